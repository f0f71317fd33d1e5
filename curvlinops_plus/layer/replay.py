"""Per-example gradients of any module, by running it again one example at a time.

Given the inputs of a layer's call and gradients of its output, the layer is called again with each example alone, and
the gradient of that example is backpropagated to the layer's own parameters. `torch.func.vmap` does this for many
examples at once; where it fails, a plain loop does.

The user's module is not changed: it runs on copies of its inputs and buffers and on detached parameters
(`torch.func.functional_call`), and attributes that its `forward` sets are restored.

Inputs and outputs may be nested (tuples, dicts, model outputs); their tensors are numbered in the order of PyTorch's
pytrees. Parameters behind a parametrization (`torch.nn.utils.parametrize`) are parameters of the module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.random_state import RandomState

# The only walk over nested inputs (tuples, dicts, model outputs) that agrees with what torch.func itself does.


# Work memory per example, in multiples of its inputs and output: what a small module keeps for its backward pass.
_ACTIVATIONS = 6


def differentiable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The floating-point parameters that a module itself holds, including frozen ones.

    Those of its parametrizations are included, under dotted names.

    Example:
        >>> list(differentiable_parameters(nn.Sequential(nn.Linear(3, 2)))), list(differentiable_parameters(nn.PReLU()))
        ([], ['weight'])
        >>> list(differentiable_parameters(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))))
        ['bias', 'parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    every = _own_parameters(module)
    if len({*map(id, every.values())}) == len(every):
        return every
    first = {id(p): name for name, p in reversed(every.items())}
    return {name: p for name, p in every.items() if first[id(p)] == name}


def is_parametrized(module: nn.Module) -> bool:
    """Whether some of its tensors are computed by `torch.nn.utils.parametrize`."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Differentiable parameters by all of their names."""
    held = module._parameters.items()  # by its method, which knows what other threads may see
    if module._modules and is_parametrized(module):
        inner = getattr(module, "parametrizations")  # noqa: B009 (unknown to type checkers)
        held = (*held, *inner.named_parameters(prefix="parametrizations", remove_duplicate=False))
    return {name: p for name, p in held if p is not None and p.dtype.is_floating_point}


def why_computed(module: nn.Module, names: Sequence[str]) -> str | None:
    """A message if some of a module's tensors are computed from its parameters; None if all are parameters.

    Example:
        >>> why_computed(nn.utils.parametrizations.weight_norm(nn.LayerNorm(3)), ("weight", "bias"))
        "['weight'] of this ParametrizedLayerNorm is computed from other parameters"
    """
    found = [n for n in names if n not in module._parameters and isinstance(getattr(module, n, None), Tensor)]
    return f"{found} of this {type(module).__name__} is computed from other parameters" if found else None


def replay_per_example(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    g: Tensor | Sequence[Tensor],
    max_bytes: int,
    in_axes: Sequence[int | None] | None = None,
    out_axes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Backpropagate output gradients to a module's own parameters, for each example separately.

    Args:
        module: Any module that treats its examples independently.
        args: Positional inputs of the call. Tensors whose dimension 0 has size `B` hold one entry per example, also
            inside tuples, lists and dicts; all other values are shared by all examples.
        kwargs: Keyword inputs of the call, likewise.
        g: Gradients of the output, `[V, B, *out]`; of a module that returns several tensors a list of them, one for
            each floating-point tensor.
        max_bytes: Target for work memory, in addition to the result. At least one example is processed at a time.
        in_axes: For each tensor of `(args, kwargs)`, the axis of the examples in the module itself, or of the size 1
            of a tensor that is broadcast over them; None for one that all examples share. Default 0.
        out_axes: For each floating-point tensor of the output, the axis of the examples. Default 0.
        names: Other parameters, by names in the module: those of its children, wherever it reads them.

    Returns:
        Local name of each parameter (see `differentiable_parameters`) to its gradients, `[V, B, *shape]`, in float32
        at least.

    Raises:
        UnsupportedError: If the module mixes the examples of a batch, draws random numbers, returns no floating-point
            tensor for each gradient.
        ValueError: If one example's output does not fit its gradient.

    Example:
        >>> g = torch.ones(1, 3, 4)
        >>> replay_per_example(nn.LayerNorm(4), (torch.rand(3, 4),), {}, g, max_bytes=2**20)["bias"].shape
        torch.Size([1, 3, 4])
        >>> layer, x = nn.GRU(4, 2), torch.rand(3, 5, 4)  # examples first here, and second where the layer wants them
        >>> g = [torch.ones(1, 3, 5, 2), torch.zeros(1, 3, 1, 2)]
        >>> replay_per_example(layer, (x,), {}, g, 2**20, in_axes=[1], out_axes=[1, 1])["weight_ih_l0"].shape
        torch.Size([1, 3, 6, 4])
    """
    check_repeatable(module)
    g = [at_least_float32(t.detach()) for t in ([g] if isinstance(g, Tensor) else g)]
    call = Call(module, args, kwargs, g[0].shape[1], in_axes, out_axes, names)
    sizes = call.chunk_sizes(g, max_bytes)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {t.device.type for t in g}:  # autocast would undo the conversion to float32
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(attributes_restored(module))
        try:
            return in_chunks(call.all_at_once, g, sizes)
        except UnsupportedError:
            raise
        except Exception:  # vmap has many kinds of errors: control flow, in-place writes, unsupported operations
            pass
        try:
            with no_random_numbers(module, g[0].device):
                return in_chunks(call.one_by_one, g, sizes)
        except (NotImplementedError, torch.OutOfMemoryError):  # words of our own, or nothing that the module did
            raise
        except RuntimeError as error:
            raise UnsupportedError(
                f"{type(module).__name__} can't be run again with one example of the batch, which gives the example's "
                f"gradients ({type(error).__name__}: {error}). Does it read what its last call left (a cache: "
                "use_cache=False), or the number of examples? Write a rule for it (@register_rule), or leave its "
                "parameters out of `params`."
            ) from error


class Call:
    """One call of a module, repeated for single examples with detached copies of its tensors, in float32 at least.

    Arguments are those of `replay_per_example`.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_examples: int,
        in_axes: Sequence[int | None] | None = None,
        out_axes: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.module, self.out_axes = module, out_axes
        inner = dict(module.named_parameters(remove_duplicate=False))
        own = differentiable_parameters(module) if names is None else {name: inner[name] for name in names}
        # Copies: some layers write to their weight (`nn.Embedding(max_norm=...)`).
        self.params = {name: at_least_float32(p.detach().clone()) for name, p in own.items()}
        # An own parameter may have two names. A child that shares it keeps using its own copy (`tie_weights=False`).
        first = {id(p): name for name, p in own.items()}
        every = _own_parameters(module) if names is None else inner
        self.aliases = {name: first[id(p)] for name, p in every.items() if id(p) in first}
        self.frozen = {n: at_least_float32(p.detach()) for n, p in inner.items() if n not in self.aliases}
        self.buffers = {n: at_least_float32(b.detach()) for n, b in module.named_buffers(remove_duplicate=False)}
        leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        tensors = [i for i, t in enumerate(leaves) if isinstance(t, Tensor)]
        axes = dict(zip(tensors, [0] * len(tensors) if in_axes is None else in_axes, strict=True))
        self.leaves = [at_least_float32(t.detach()) if isinstance(t, Tensor) else t for t in leaves]
        axes = {i: axis for i, axis in axes.items() if axis is not None}
        self.per_example = {i: axes[i] for i in axes if leaves[i].ndim > 0 and len(leaves[i]) == num_examples}
        for i in axes.keys() - self.per_example.keys():
            if leaves[i].ndim > axes[i] and len(leaves[i]) == 1:
                self.leaves[i] = self.leaves[i].movedim(0, axes[i])

    @property
    def name(self) -> str:
        """Type of the module, for messages."""
        return type(self.module).__name__

    def chunk_sizes(self, g: Sequence[Tensor], max_bytes: int) -> tuple[int, int]:
        """How many vectors and how many examples are worked on at a time."""
        V, B = g[0].shape[:2]
        example = sum(t[0].nbytes for t in g) + sum(self.leaves[i].nbytes for i in self.per_example)
        params = sum(p.nbytes for p in self.params.values())
        rows = max_bytes // max(1, 2 * params + _ACTIVATIONS * example // max(1, B))
        return min(V, max(1, rows)), min(B, max(1, rows // max(1, V)))

    def run(
        self, params: Mapping[str, Tensor], examples: Sequence[Tensor], shapes: Sequence[torch.Size]
    ) -> list[Tensor]:
        """Outputs of the module for one example (whose inputs have no example dimension)."""
        leaves = list(self.leaves)
        for (i, axis), t in zip(self.per_example.items(), examples, strict=True):
            leaves[i] = t.unsqueeze(axis)
        # The module may write into what it is given: inputs and buffers are copies.
        args, kwargs = tree_unflatten([t.clone() if isinstance(t, Tensor) else t for t in leaves], self.spec)
        state = {name: params[first] for name, first in self.aliases.items()}
        buffers = {n: b.clone() for n, b in self.buffers.items()}
        as_parameters([*self.frozen.values(), *state.values()])
        out = functional_call(self.module, {**self.frozen, **buffers, **state}, args, kwargs, tie_weights=False)
        return self.outputs(out, shapes)

    def outputs(self, out: Any, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The floating-point tensors of an output, without their example dimension."""
        leaves = tree_leaves(out)
        found = [t for t in leaves if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
        if len(found) != len(shapes) or any(t.is_complex() for t in found):
            raise UnsupportedError(
                f"{self.name} returned a {type(out).__name__} with {[str(t.dtype) for t in found]}: expected real "
                f"floating-point tensors for {len(shapes)} output gradients, alone or in tuples, lists, dicts or types "
                "that torch.utils._pytree knows."
            )
        axes = [0] * len(found) if self.out_axes is None else self.out_axes
        return [self.without_example(t, axis, shape) for t, axis, shape in zip(found, axes, shapes, strict=True)]

    def without_example(self, out: Tensor, axis: int, shape: torch.Size) -> Tensor:
        """One output in the shape of its gradient."""
        if out.numel() != shape.numel() or (axis and (out.ndim <= axis or out.shape[axis] != 1)):
            raise ValueError(
                f"{self.name}, called with one example, returned shape {tuple(out.shape)}, but the output gradient of "
                f"one example has shape {tuple(shape)}. The examples must be dimension {axis} of "
                f"{'its inputs and its output' if axis == 0 else 'this output'}, "
                "and each must be treated independently of the others."
            )
        return (out.squeeze(axis) if axis else out).reshape(shape)

    def all_at_once(self, g: Sequence[Tensor], vectors: slice, examples: slice) -> dict[str, Tensor]:
        """Gradients of a chunk by `vmap` over examples, `[V, B, *shape]`."""

        def one(inputs: list[Tensor], g_n: list[Tensor]) -> dict[str, Tensor]:  # g_n: [V, *out] each -> [V, *shape]
            shapes = [t.shape[1:] for t in g_n]
            out, back = vjp(lambda p: self.run(p, inputs, shapes), self.params)[:2]
            # No second vmap over vectors: nested in the first it gives wrong numbers for PReLU (torch 2.13).
            rows = [back([v.to(o.dtype) for v, o in zip(row, out)])[0] for row in zip(*g_n)]
            return {name: torch.stack([row[name] for row in rows]) for name in self.params}

        inputs = [self.leaves[i][examples] for i in self.per_example]
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*batching rule.*"
            )  # vmap falls back to a loop, which is correct
            # Out dimension 0 and a transpose: with another one, vmap misplaces constant outputs (torch 2.13).
            chunk = vmap(one, in_dims=(0, 1))(inputs, [t[vectors, examples] for t in g])
        return {name: J.transpose(0, 1) for name, J in chunk.items()}

    def one_by_one(self, g: Sequence[Tensor], vectors: slice, examples: slice) -> dict[str, Tensor]:
        """Gradients of a chunk by one backward pass per example and vector, `[V, B, *shape]`."""
        chunk: list[list[Tensor]] = []
        for n in range(examples.start, examples.stop):
            with torch.enable_grad():
                params = {name: p.detach().requires_grad_() for name, p in self.params.items()}
                out = self.run(params, [self.leaves[i][n] for i in self.per_example], [t.shape[2:] for t in g])
            live = [k for k, f in enumerate(out) if f.requires_grad]
            fs, leaves, rows = [out[k] for k in live], list(params.values()), []
            for v in range(vectors.start, vectors.stop):
                back = [g[k][v, n].to(f.dtype) for k, f in zip(live, fs)]
                J = torch.autograd.grad(fs, leaves, back, retain_graph=True, materialize_grads=True) if live else leaves
                # Those of `sparse=True` embeddings are sparse.
                rows.append([t.to_dense() if live else torch.zeros_like(t) for t in J])
            chunk.append([torch.stack(some) for some in zip(*rows)])
        return {name: torch.stack(some, dim=1) for name, some in zip(self.params, zip(*chunk))}


def in_chunks(
    grads: Callable[[Sequence[Tensor], slice, slice], dict[str, Tensor]], g: Sequence[Tensor], sizes: tuple[int, int]
) -> dict[str, Tensor]:
    """Run `grads` on pieces of at most `sizes` vectors and examples and put the results together.

    Example:
        >>> g = [torch.arange(6.0).view(1, 6)]
        >>> in_chunks(lambda g, vectors, examples: {"sum": g[0][vectors, examples]}, g, (1, 4))["sum"]
        tensor([[0., 1., 2., 3., 4., 5.]])
    """
    (V, B), (v, b) = g[0].shape[:2], sizes
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


def check_repeatable(module: nn.Module) -> None:
    """Refuse modules whose output for an example depends on the batch or on the number of calls.

    Raises:
        UnsupportedError: For batch normalization with the statistics of the batch, and spectral normalization in
            training mode, whose weight changes with every forward pass.
    """
    for name, child in module.named_modules():
        where = type(child).__name__ + (f" ({name!r} of {type(module).__name__})" if name else "")
        if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
            why = "in training mode" if child.training else "with track_running_stats=False"
            raise UnsupportedError(
                f"{where} {why} normalizes with the statistics of the batch: its examples are not independent, so they "
                "have no gradients of their own. Call `model.eval()` first, on a layer that tracks running statistics."
            )
        if _updates_vectors(child):
            raise UnsupportedError(
                f"{where} in training mode: spectral normalization updates its estimate of the largest singular value "
                "in every forward pass, so running the layer again gives another weight. Call `model.eval()` first."
            )


def spectral_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose weights spectral normalization changes in every forward pass, by name.

    Example:
        >>> model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
        >>> list(spectral_norms(model)), list(spectral_norms(model.eval()))
        (['0'], [])
    """
    owners = {name: m for name, m in model.named_modules() if not isinstance(m, _SpectralNorm)}
    none = nn.Module()
    return {
        name: m
        for name, m in owners.items()
        if any(map(_updates_vectors, (m, *getattr(m, "parametrizations", none).modules())))
    }


def _updates_vectors(module: nn.Module) -> bool:
    """Whether it is spectral normalization in training mode, of the new or the old kind."""
    new = isinstance(module, _SpectralNorm) and hasattr(module, "_u")  # vectors are normalized without one
    old = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return module.training and (new or old)


def as_parameters(tensors: Iterable[Tensor]) -> None:
    """Let tensors that stand for parameters pass for them: `Module.get_parameter` returns nothing else."""
    for t in tensors:
        t._is_param = True  # type: ignore[attr-defined]  # PyTorch's own mark, of subclasses of tensors


@contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Undo what `forward` writes to attributes, e.g. `self.attention = ...`: vmapped tensors must not stay there."""
    found = [(vars(m), dict(vars(m))) for m in module.modules()]
    # The contents of lists too: recurrent layers keep their weights in one.
    held = [(v, [*v]) for _, before in found for v in before.values() if isinstance(v, list)]
    for m in module.modules():
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            m.scale_grad_by_freq = (
                False  # it rescales gradients by frequencies in the batch: the result is not a derivative
            )
    cached, parametrize._cache_enabled = parametrize._cache_enabled, 0  # `parametrize.cached()`: of other parameters
    try:
        yield
    finally:
        parametrize._cache_enabled = cached
        for now, before in found:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for now, before in held:
            now[:] = before


@contextmanager
def no_random_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the global random state, and refuse a module that draws from it: the draws of the first call are lost."""
    before = RandomState.now(device)
    try:
        yield
        if before != RandomState.now(device):
            raise UnsupportedError(
                f"{type(module).__name__} draws random numbers (dropout in training mode?), so running it again for "
                "one example gives another result. Call `model.eval()` first, or leave out this layer's parameters."
            )
    finally:
        before.restore()
