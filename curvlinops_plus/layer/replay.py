"""Per-example gradients of any module, by running it again one example at a time.

Given the inputs of a layer's call and gradients of its output, the layer is called again with each
example alone, and the gradient of that example is backpropagated to the layer's own parameters.
`torch.func.vmap` does this for many examples at once; where it fails, a plain loop does.

The user's module is not changed: it runs on copies of its inputs and buffers and on detached
parameters (`torch.func.functional_call`), and attributes that its `forward` sets are restored.

Inputs and outputs may be nested (tuples, dicts, model outputs); their tensors are numbered in the
order of PyTorch's pytrees. Parameters behind a parametrization (`torch.nn.utils.parametrize`) are
parameters of the module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.kept import drop_new_tensors, kept_attributes, parts_kept
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.random_state import RandomState


class RerunError(UnsupportedError):
    """A module can't be run again with one example; a module around it may be."""


class NoExampleGradients(UnsupportedError):
    """A module draws random numbers or normalizes with the statistics of the batch, and so do all
    modules around it.

    Args:
        fact: What it does.
        advice: What to do about it, but in training loops, which are meant to be like that.
    """

    def __init__(self, fact: str, advice: str) -> None:
        super().__init__(f"{fact} {advice}")
        self.fact, self.advice = fact, advice


# Work memory per example, in multiples of its inputs and output: what a small module keeps for its
# backward pass.
_ACTIVATIONS = 6


def differentiable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The floating-point parameters that a module itself holds, including frozen ones.

    Those of its parametrizations are included, under dotted names.

    Example:
        >>> (
        ...     list(differentiable_parameters(nn.Sequential(nn.Linear(3, 2)))),
        ...     list(differentiable_parameters(nn.PReLU())),
        ... )
        ([], ['weight'])
        >>> list(differentiable_parameters(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))))
        ['bias', 'parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    every = _own_parameters(module)
    first = {id(p): name for name, p in reversed(every.items())}
    return {name: p for name, p in every.items() if first[id(p)] == name}


def is_parametrized(module: nn.Module) -> bool:
    """Whether some of its tensors are computed by `torch.nn.utils.parametrize`."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Differentiable parameters by all of their names."""
    held = module._parameters.items()  # by its method, which knows what other threads may see
    if "parametrizations" in module._modules and is_parametrized(module):
        inner = module.get_submodule("parametrizations")
        held = (*held, *inner.named_parameters(prefix="parametrizations", remove_duplicate=False))
    return {name: p for name, p in held if p is not None and p.dtype.is_floating_point}


def why_computed(module: nn.Module, names: Sequence[str]) -> str | None:
    """A message if some of a module's tensors are computed from its parameters; None if all are
    parameters.

    Example:
        >>> why_computed(nn.utils.parametrizations.weight_norm(nn.LayerNorm(3)), ("weight", "bias"))
        "['weight'] of this ParametrizedLayerNorm is computed from other parameters"
    """
    found = [
        n
        for n in names
        if n not in module._parameters and isinstance(getattr(module, n, None), Tensor)
    ]
    return (
        f"{found} of this {type(module).__name__} is computed from other parameters"
        if found
        else None
    )


class Call:
    """One call of a module, repeated for single examples with detached copies of its tensors, in
    float32 at least.

    Args:
        module: Any module that treats its examples independently.
        args: Positional inputs of the call. Tensors whose dimension 0 has size `B` hold one entry
            per example, also inside tuples, lists and dicts; all other values are shared by all
            examples.
        kwargs: Keyword inputs of the call, likewise.
        num_examples: `B`.
        in_axes: For each tensor of `(args, kwargs)`, the axis of the examples in the module itself,
            or of the size 1 of a tensor that is broadcast over them; None for one that all examples
            share. Default 0.
        out_axes: For each floating-point tensor of the output, the axis of the examples. Default 0.
        names: Other parameters than the module's own, by names in the module: those of its
            children, wherever it reads them.
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
        own = (
            differentiable_parameters(module)
            if names is None
            else {name: inner[name] for name in names}
        )
        # Copies: some layers write to their weight (`nn.Embedding(max_norm=...)`).
        self.params = {name: at_least_float32(p.detach().clone()) for name, p in own.items()}
        # An own parameter may have two names. A child that shares it keeps using its own copy
        # (`tie_weights=False`).
        first = {id(p): name for name, p in own.items()}
        every = _own_parameters(module) if names is None else inner
        self.aliases = {name: first[id(p)] for name, p in every.items() if id(p) in first}
        self.frozen = {
            n: at_least_float32(p.detach()) for n, p in inner.items() if n not in self.aliases
        }
        self.buffers = {
            n: at_least_float32(b.detach()) for n, b in module.named_buffers(remove_duplicate=False)
        }
        leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        self.leaves = [at_least_float32(t.detach()) if isinstance(t, Tensor) else t for t in leaves]
        tensors = [i for i, t in enumerate(leaves) if isinstance(t, Tensor)]
        self.per_example: dict[int, int] = {}
        for i, axis in zip(
            tensors, [0] * len(tensors) if in_axes is None else in_axes, strict=True
        ):
            t = self.leaves[i]
            if axis is not None and t.ndim and len(t) == num_examples:
                self.per_example[i] = axis
            elif axis is not None and t.ndim > axis and len(t) == 1:
                self.leaves[i] = t.movedim(0, axis)

    def per_example_grads(self, g: Tensor | Sequence[Tensor], max_bytes: int) -> dict[str, Tensor]:
        """Backpropagate output gradients to the parameters, for each example separately.

        Args:
            g: Gradients of the output, `[V, B, *out]`; of a module that returns several tensors a
                list of them, one for each floating-point tensor.
            max_bytes: Target for work memory, in addition to the result. At least one example is
                processed at a time.

        Returns:
            Name of each parameter to its gradients, `[V, B, *shape]`, in float32 at least.

        Raises:
            UnsupportedError: If the module mixes the examples of a batch, draws random numbers,
                fails on one example, or returns other tensors than gradients are given for.

        Example:
            >>> g = torch.ones(1, 3, 4)
            >>> Call(nn.LayerNorm(4), (torch.rand(3, 4),), {}, 3).per_example_grads(g, 2**20)["bias"].shape
            torch.Size([1, 3, 4])
            >>> layer = nn.GRU(4, 2)
            >>> x = torch.rand(3, 5, 4)  # examples first here, and second where the layer wants it
            >>> g = [torch.ones(1, 3, 5, 2), torch.zeros(1, 3, 1, 2)]
            >>> call = Call(layer, (x,), {}, 3, in_axes=[1], out_axes=[1, 1])
            >>> call.per_example_grads(g, 2**20)["weight_ih_l0"].shape
            torch.Size([1, 3, 6, 4])
        """
        check_repeatable(self.module)
        g = [at_least_float32(t.detach()) for t in ([g] if isinstance(g, Tensor) else g)]
        sizes, random = self.chunk_sizes(g, max_bytes), RandomState.now(g[0].device)
        # Autocast would undo the conversion to float32.
        with (
            torch.no_grad(),
            torch.autocast(g[0].device.type, enabled=False),
            attributes_restored(self.module),
        ):
            try:
                return in_chunks(self.all_at_once, g, sizes)
            # vmap has many kinds of errors: control flow, in-place writes, unsupported operations
            except Exception:
                pass
            try:
                found = in_chunks(self.one_by_one, g, sizes)
                if random == RandomState.now(g[0].device):
                    return found
                why = "It draws random numbers (dropout in training mode?)."
                raise NoExampleGradients(
                    self.refusal(why), "For the curvature of the model call `model.eval()`."
                )
            except (UnsupportedError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # of any code of the user's
                raise RerunError(
                    self.refusal(
                        f"It raised {type(error).__name__}: {error}. Does it read what its last "
                        "call left (a cache: use_cache=False), or the number of examples?"
                    )
                ) from error
            finally:
                random.restore()

    def refusal(self, why: str) -> str:
        """What to say of a module that can't be run again."""
        return (
            f"{type(self.module).__name__} can't be run again with one example of the batch, which "
            f"gives the example's gradients of {list(self.params)}. {why} Write a rule for it "
            "(@register_rule), or leave these out of `params`."
        )

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
        """Outputs of the module for one example (whose inputs have no example dimension), in these
        shapes.
        """
        leaves = list(self.leaves)
        for (i, axis), t in zip(self.per_example.items(), examples, strict=True):
            leaves[i] = t.unsqueeze(axis)
        drop_new_tensors(parts_kept(self.module.modules()))
        # The module may write into what it is given: inputs and buffers are copies.
        args, kwargs = tree_unflatten(
            [t.clone() if isinstance(t, Tensor) else t for t in leaves], self.spec
        )
        state = {name: params[first] for name, first in self.aliases.items()}
        buffers = {n: b.clone() for n, b in self.buffers.items()}
        as_parameters([*self.frozen.values(), *state.values()])
        out = functional_call(
            self.module, {**self.frozen, **buffers, **state}, args, kwargs, tie_weights=False
        )
        found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        axes = [0] * len(found) if self.out_axes is None else self.out_axes
        if [t.numel() for t in found] != [shape.numel() for shape in shapes] or any(
            axis and (t.ndim <= axis or t.shape[axis] != 1) for t, axis in zip(found, axes)
        ):
            shown, expected = [list(t.shape) for t in found], [list(shape) for shape in shapes]
            whole = (
                " No tensor among its inputs carries the examples: an object that holds several, "
                "as a batch of graphs, can't be divided. Give one of them per batch, with "
                "batch_size_fn=lambda X: 1."
            )
            raise RerunError(
                self.refusal(
                    f"It returned a {type(out).__name__} with floating-point tensors of shapes "
                    f"{shown}, and its output gradients have {expected} for one example, which is "
                    f"to be on axis {axes} of them.{'' if self.per_example else whole}"
                )
            )
        return [
            (t.squeeze(a) if a else t).reshape(shape)
            for t, a, shape in zip(found, axes, shapes, strict=True)
        ]

    def all_at_once(
        self, g: Sequence[Tensor], vectors: slice, examples: slice
    ) -> dict[str, Tensor]:
        """Gradients of a chunk by `vmap` over examples, `[V, B, *shape]`."""

        def one(
            inputs: list[Tensor], g_n: list[Tensor]
        ) -> dict[str, Tensor]:  # g_n: [V, *out] each -> [V, *shape]
            shapes = [t.shape[1:] for t in g_n]
            out, back = vjp(lambda p: self.run(p, inputs, shapes), self.params)[:2]
            # No second vmap over vectors: nested in the first it gives wrong numbers for PReLU
            # (torch 2.13).
            rows = [back([v.to(o.dtype) for v, o in zip(row, out)])[0] for row in zip(*g_n)]
            return {name: torch.stack([row[name] for row in rows]) for name in self.params}

        inputs = [self.leaves[i][examples] for i in self.per_example]
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*batching rule.*"
            )  # vmap takes a loop there, which is correct
            # Out dimension 0 and a transpose: with another one, vmap misplaces constant outputs
            # (torch 2.13).
            chunk = vmap(one, in_dims=(0, 1))(inputs, [t[vectors, examples] for t in g])
        return {name: J.transpose(0, 1) for name, J in chunk.items()}

    def one_by_one(self, g: Sequence[Tensor], vectors: slice, examples: slice) -> dict[str, Tensor]:
        """Gradients of a chunk by one backward pass per example and vector, `[V, B, *shape]`."""
        chunk: list[list[Tensor]] = []
        for n in range(examples.start, examples.stop):
            with torch.enable_grad():
                params = {name: p.detach().requires_grad_() for name, p in self.params.items()}
                out = self.run(
                    params, [self.leaves[i][n] for i in self.per_example], [t.shape[2:] for t in g]
                )
                live = [(k, f) for k, f in enumerate(out) if f.requires_grad]
                # Something has a graph also where nothing depends on the parameters.
                fs, leaves = (
                    [f for _, f in live] or [next(iter(params.values())).sum() * 0],
                    [*params.values()],
                )
            rows = []
            for v in range(vectors.start, vectors.stop):
                back = [g[k][v, n].to(f.dtype) for k, f in live] or [fs[0].detach()]
                J = torch.autograd.grad(fs, leaves, back, retain_graph=True, materialize_grads=True)
                rows.append(
                    [t.to_dense() for t in J]
                )  # those of `sparse=True` embeddings are sparse
            chunk.append([torch.stack(some) for some in zip(*rows)])
        return {name: torch.stack(some, dim=1) for name, some in zip(self.params, zip(*chunk))}


def in_chunks(
    grads: Callable[[Sequence[Tensor], slice, slice], dict[str, Tensor]],
    g: Sequence[Tensor],
    sizes: tuple[int, int],
) -> dict[str, Tensor]:
    """Run `grads` on pieces of at most `sizes` vectors and examples and put the results together.

    Example:
        >>> g = [torch.arange(6.0).view(1, 6)]
        >>> in_chunks(lambda g, vectors, examples: {"sum": g[0][vectors, examples]}, g, (1, 4))["sum"]
        tensor([[0., 1., 2., 3., 4., 5.]])
    """
    (V, B), (v, b) = g[0].shape[:2], sizes
    result: dict[str, Tensor] = {}
    for v0 in range(0, V, v):
        for b0 in range(0, B, b):
            at = slice(v0, min(v0 + v, V)), slice(b0, min(b0 + b, B))
            found = grads(g, *at)
            if (v, b) == (V, B):
                return found
            for name, J in found.items():
                result.setdefault(name, J.new_empty(V, B, *J.shape[2:]))[at] = J
    return result


def check_repeatable(module: nn.Module) -> None:
    """Refuse batch normalization with the statistics of the batch.

    Raises:
        UnsupportedError: If the module contains it.
    """
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
            where = type(child).__name__ + (
                f" ({name!r} of {type(module).__name__})" if name else ""
            )
            raise NoExampleGradients(
                f"{where} "
                f"{'in training mode' if child.training else 'with track_running_stats=False'} "
                "normalizes with the statistics of the batch, so no example has gradients of its "
                "own.",
                "Call `model.eval()`, on a layer that tracks running statistics.",
            )


def as_parameters(tensors: Iterable[Tensor]) -> None:
    """Let tensors that stand for parameters pass for them: `Module.get_parameter` returns nothing
    else.
    """
    for t in tensors:
        t._is_param = True  # type: ignore[attr-defined]  # PyTorch's own mark, of subclasses of tensors


@contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Context in which a module runs again: vmapped tensors must not stay in it, e.g. as
    `self.attention`.
    """
    with kept_attributes(module.modules()):
        for m in module.modules():
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
                m.scale_grad_by_freq = (
                    False  # by frequencies in the batch: the result is not a derivative
                )
        yield
