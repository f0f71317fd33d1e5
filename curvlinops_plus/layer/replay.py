"""Per-example gradients of any module, by running it again one example at a time.

A layer was called with some inputs, and a gradient came back for its output. To learn what each example says about
the layer's own parameters, the layer is called again with that example alone and the gradient is pulled back through
it. `torch.func.vmap` does this for many examples at once; where it cannot, a plain loop does.

The user's module is left as found: it runs on copies of its inputs and buffers and on detached parameters
(`torch.func.functional_call`), and attributes that its `forward` sets are put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm

# The only walk over nested inputs (tuples, dicts, model outputs) that agrees with what torch.func itself does.
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlinops_plus.errors import UnsupportedError

__all__ = ["at_least_float32", "differentiable_parameters", "replay_per_example"]

# Work memory per example, in multiples of its inputs and output: what a small module keeps for its backward pass.
_ACTIVATIONS = 6


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half-precision floats to float32; everything else is returned as it is.

    Example:
        >>> at_least_float32(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


def differentiable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module itself holds, frozen ones too, but no quantized (integer) ones.

    Example:
        >>> list(differentiable_parameters(nn.Sequential(nn.Linear(3, 2)))), list(differentiable_parameters(nn.PReLU()))
        ([], ['weight'])
    """
    return {name: p for name, p in module.named_parameters(recurse=False) if p.dtype.is_floating_point}


def replay_per_example(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor, max_bytes: int
) -> dict[str, Tensor]:
    """Pull output gradients back to a module's own parameters, for each example by itself.

    Args:
        module: Any module that treats its examples independently and returns one tensor.
        args: Positional inputs of the call. Tensors whose dimension 0 has size `B` hold one entry per example, also
            inside tuples, lists and dicts; everything else is the same for all examples.
        kwargs: Keyword inputs of the call, likewise.
        g: Gradients of the output, `[V, B, *out]`.
        max_bytes: Work memory aimed at, on top of the result. At least one example is done at a time.

    Returns:
        Local name of each direct parameter to its gradients, `[V, B, *shape]`, in float32 at least.

    Raises:
        UnsupportedError: If the module mixes the examples of a batch, draws random numbers or does not return a tensor.
        ValueError: If one example's output does not fit its gradient.

    Example:
        >>> g = torch.ones(1, 3, 4)
        >>> replay_per_example(nn.LayerNorm(4), (torch.rand(3, 4),), {}, g, max_bytes=2**20)["bias"].shape
        torch.Size([1, 3, 4])
    """
    _refuse_mixed_examples(module)
    call = _Call(module, args, kwargs, num_examples=g.shape[1])
    g = at_least_float32(g.detach())
    sizes = call.chunk_sizes(g, max_bytes)
    # Rounding to half inside a replay would undo the conversion to float32.
    with torch.no_grad(), torch.autocast(g.device.type, enabled=False), _left_as_found(module):
        try:
            return _in_chunks(call.all_at_once, g, sizes)
        except UnsupportedError:
            raise
        except Exception:  # vmap refuses in many ways: control flow, in-place writes, unknown operations
            pass
        with _no_random_numbers(module, g.device):
            return _in_chunks(call.one_by_one, g, sizes)


class _Call:
    """One call of a module, to be repeated for single examples at other parameters."""

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], num_examples: int) -> None:
        self.module = module
        own = differentiable_parameters(module)
        # Copies: some layers write into their weight (`nn.Embedding(max_norm=...)`).
        self.params = {name: at_least_float32(p.detach().clone()) for name, p in own.items()}
        # A direct parameter may have two names; a child's use of it is the child's own business (`tie_weights=False`).
        first = {id(p): name for name, p in own.items()}
        direct = module.named_parameters(recurse=False, remove_duplicate=False)
        self.aliases = {name: first[id(p)] for name, p in direct if id(p) in first}
        inner = module.named_parameters(remove_duplicate=False)
        self.frozen = {n: at_least_float32(p.detach()) for n, p in inner if n not in self.aliases}
        self.buffers = {n: at_least_float32(b.detach()) for n, b in module.named_buffers(remove_duplicate=False)}

        leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        self.leaves = [at_least_float32(t.detach()) if isinstance(t, Tensor) else t for t in leaves]
        self.per_example = [
            i for i, t in enumerate(self.leaves) if isinstance(t, Tensor) and t.ndim > 0 and t.shape[0] == num_examples
        ]

    def chunk_sizes(self, g: Tensor, max_bytes: int) -> tuple[int, int]:
        """How many vectors and how many examples are worked on at a time."""
        V, B = g.shape[:2]
        example = g[0].nbytes + sum(self.leaves[i].nbytes for i in self.per_example)
        params = sum(p.nbytes for p in self.params.values())
        rows = max_bytes // max(1, 2 * params + _ACTIVATIONS * example // max(1, B))
        return min(V, max(1, rows)), min(B, max(1, rows // max(1, V)))

    def run(self, params: Mapping[str, Tensor], examples: Sequence[Tensor], out_shape: torch.Size) -> Tensor:
        """Output of the module for one example (whose inputs have no example dimension)."""
        leaves = list(self.leaves)
        for i, t in zip(self.per_example, examples, strict=True):
            leaves[i] = t[None]
        # The module may write into what it is given: inputs and buffers are copies.
        args, kwargs = tree_unflatten([t.clone() if isinstance(t, Tensor) else t for t in leaves], self.spec)
        state = {name: params[first] for name, first in self.aliases.items()}
        buffers = {n: b.clone() for n, b in self.buffers.items()}
        out = functional_call(self.module, {**self.frozen, **buffers, **state}, args, kwargs, tie_weights=False)
        kind = type(self.module).__name__
        if not isinstance(out, Tensor):
            raise UnsupportedError(
                f"{kind} returned a {type(out).__name__}, expected one tensor: per-example gradients are for modules "
                "with tensor outputs. Wrap the part of it that holds the parameters in a module of its own."
            )
        if out.numel() != out_shape.numel():
            raise ValueError(
                f"{kind}, called with one example, returned shape {tuple(out.shape)}, but the output gradient of one "
                f"example has shape {tuple(out_shape)}. The examples must be dimension 0 of its inputs and its output, "
                "and each must be treated independently of the others."
            )
        return out.reshape(out_shape)

    def all_at_once(self, g: Tensor, vectors: slice, examples: slice) -> dict[str, Tensor]:
        """Gradients of a chunk by `vmap` over examples, `[V, B, *shape]`."""

        def one(inputs: list[Tensor], g_n: Tensor) -> dict[str, Tensor]:  # g_n: [V, *out] -> [V, *shape]
            back = vjp(lambda p: self.run(p, inputs, g_n.shape[1:]), self.params)[1]
            # No second vmap over vectors: nested in the first it gives wrong numbers for PReLU (torch 2.13).
            rows = [back(v)[0] for v in g_n]
            return {name: torch.stack([row[name] for row in rows]) for name in self.params}

        inputs = [self.leaves[i][examples] for i in self.per_example]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*batching rule.*")  # vmap's own loop: slow, and right
            # Out dimension 0 and a transpose: with another one, vmap misplaces what depends on no example (torch 2.13).
            chunk = vmap(one, in_dims=(0, 1))(inputs, g[vectors, examples])
        return {name: J.transpose(0, 1) for name, J in chunk.items()}

    def one_by_one(self, g: Tensor, vectors: slice, examples: slice) -> dict[str, Tensor]:
        """Gradients of a chunk by one backward pass per example and vector, `[V, B, *shape]`."""
        chunk: list[dict[str, Tensor]] = []
        for n in range(examples.start, examples.stop):
            with torch.enable_grad():
                params = {name: p.detach().requires_grad_() for name, p in self.params.items()}
                out = self.run(params, [self.leaves[i][n] for i in self.per_example], g.shape[2:])
            leaves = list(params.values())
            rows = [
                torch.autograd.grad(out, leaves, g_n, retain_graph=True, materialize_grads=True)
                if out.requires_grad
                else tuple(torch.zeros_like(p) for p in leaves)
                for g_n in g[vectors, n]
            ]
            columns = zip(*([J.to_dense() for J in row] for row in rows), strict=True)  # `sparse=True` embeddings
            chunk.append({name: torch.stack(J) for name, J in zip(params, columns, strict=True)})
        return {name: torch.stack([c[name] for c in chunk], dim=1) for name in self.params}


def _in_chunks(
    grads: Callable[[Tensor, slice, slice], dict[str, Tensor]], g: Tensor, sizes: tuple[int, int]
) -> dict[str, Tensor]:
    """Run `grads` on pieces of at most `sizes` vectors and examples and put the results together."""
    (V, B), (v, b) = g.shape[:2], sizes
    if (v, b) == (V, B):
        return grads(g, slice(0, V), slice(0, B))
    result: dict[str, Tensor] = {}
    for v0 in range(0, V, v):
        for b0 in range(0, B, b):
            at = slice(v0, min(v0 + v, V)), slice(b0, min(b0 + b, B))
            for name, J in grads(g, *at).items():
                if name not in result:
                    result[name] = J.new_empty(V, B, *J.shape[2:])
                result[name][at] = J
    return result


def _refuse_mixed_examples(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
            where = f"{type(child).__name__}" + (f" ({name!r} of {type(module).__name__})" if name else "")
            why = "in training mode" if child.training else "with track_running_stats=False"
            raise UnsupportedError(
                f"{where} {why} normalizes with the statistics of the batch: its examples are not independent, so they "
                "have no gradients of their own. Call `model.eval()` first, on a layer that tracks running statistics."
            )


@contextmanager
def _left_as_found(module: nn.Module) -> Iterator[None]:
    """Undo what `forward` writes to attributes, e.g. `self.attention = ...`: a vmapped tensor must not stay there."""
    found = [(vars(m), dict(vars(m))) for m in module.modules()]
    for m in module.modules():
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            m.scale_grad_by_freq = False  # it rescales gradients by what else is in a batch: no derivative of anything
    try:
        yield
    finally:
        for now, before in found:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)


@contextmanager
def _no_random_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the global generator, and refuse a module that drew from it: the first call's draw is gone."""

    def states() -> list[Tensor]:
        return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = states()
        yield
        if not all(map(torch.equal, before, states())):
            raise UnsupportedError(
                f"{type(module).__name__} draws random numbers (dropout in training mode?), so running it again for "
                "one example gives another result. Call `model.eval()` first, or leave out this layer's parameters."
            )
