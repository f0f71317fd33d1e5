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
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.example_lists import with_entries
from curvlinops_plus.layer.kept import CallStart, drop_new_tensors, kept_attributes, parts_kept
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.random_state import RandomState


class RerunError(UnsupportedError):
    """A module can't be run again with one example; a module around it may be."""


class NoExampleGradients(UnsupportedError):
    """A module draws random numbers or normalizes with the statistics of the batch, and so do all
    modules around it.

    Args:
        fact: What it does.
        advice: What to do about it, but in training loops, which are meant to be like that.
        keys: Keys of the parameters, where they are known.
    """

    def __init__(self, fact: str, advice: str, keys: Iterable[str] = ()) -> None:
        super().__init__(f"{fact} {advice}")
        self.fact = fact
        self.advice = advice
        self.keys = tuple(keys)


# What a small module keeps for its backward pass, in multiples of its inputs and output.
_SAVED_FOR_BACKWARD = 6


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
    # By its method, which knows what other threads may see.
    held = module._parameters.items()
    if is_parametrized(module):
        inner = module.get_submodule("parametrizations")
        held = (*held, *inner.named_parameters(prefix="parametrizations"))
    by_name: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, p in held:
        if p is not None and p.dtype.is_floating_point and id(p) not in seen:
            seen.add(id(p))
            by_name[name] = p
    return by_name


def is_parametrized(module: nn.Module) -> bool:
    """Whether some of its tensors are computed by `torch.nn.utils.parametrize`."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)


def held_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that modules hold, by one name for each place; of tied ones there are several.

    PyTorch's names of a module that is in two places are two, and `functional_call` with both would
    leave in it what it was given.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> list(held_parameters(nn.Sequential(layer, nn.Tanh(), layer)))
        ['0.weight']
    """
    return _by_place(module, lambda m: m._parameters)


def held_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that modules hold, likewise."""
    return _by_place(module, lambda m: m._buffers)


def _by_place(module: nn.Module, held: Callable[[nn.Module], Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{prefix}.{name}" if prefix else name: t
        for prefix, m in module.named_modules()
        for name, t in held(m).items()
        if t is not None
    }


class Call:
    """One call of a module, repeated for single examples with detached copies of its tensors, in
    float32 at least.

    Args:
        module: Any module that treats its examples independently.
        args: Positional inputs of the call. Tensors whose dimension 0 has size `B` hold one entry
            per example, also inside tuples, lists and dicts; if there are none, lists of `B`
            entries do. All other values are shared by all examples.
        kwargs: Keyword inputs of the call, likewise.
        num_examples: `B`.
        in_axes: For each tensor of `(args, kwargs)`, the axis of the examples in the module itself,
            or of the size 1 of a tensor that is broadcast over them; None for one that all examples
            share.
        out_axes: For each floating-point tensor of the output, the axis of the examples.
        names: Other parameters than the module's own, by names in the module: those of its
            children, wherever it reads them.
        start: What the module held when the call began, if it has to begin with the same again;
            default: what it holds now.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_examples: int,
        in_axes: Sequence[int | None],
        out_axes: Sequence[int],
        names: Sequence[str] | None = None,
        start: CallStart | None = None,
    ) -> None:
        self.module = module
        self.start = start
        self.num_examples = num_examples
        self.out_axes = out_axes
        self._read_parameters(names)
        self._read_inputs(args, kwargs, in_axes)

    def _read_parameters(self, names: Sequence[str] | None) -> None:
        """The parameters whose gradients are asked for, and all other tensors of the module."""
        inner = held_parameters(self.module)
        if names is None:
            targets = differentiable_parameters(self.module)
            # A child that shares a parameter keeps using its own copy (`tie_weights=False`).
            prefixes = ("parametrizations.",) if is_parametrized(self.module) else ()
            by_name = {
                name: p for name, p in inner.items() if "." not in name or name.startswith(prefixes)
            }
        else:
            targets = {name: inner[name] for name in names}
            by_name = inner
        # Copies: some layers write to their weight (`nn.Embedding(max_norm=...)`).
        self.params = {name: at_least_float32(p.detach().clone()) for name, p in targets.items()}
        # A parameter may have two names.
        name_of = {id(p): name for name, p in targets.items()}
        self.aliases = {name: name_of[id(p)] for name, p in by_name.items() if id(p) in name_of}
        self.frozen = {
            name: at_least_float32(p.detach())
            for name, p in inner.items()
            if name not in self.aliases
        }
        buffers = held_buffers(self.module)
        if self.start is not None:
            buffers |= self.start.buffers
        self.buffers = {name: at_least_float32(b.detach()) for name, b in buffers.items()}

    def _read_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Sequence[int | None]
    ) -> None:
        """The leaves of the inputs, and which of them belong to examples."""
        self.leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        #: Place among the leaves of each tensor with an entry per example, and its axis there.
        self.per_example: dict[int, int] = {}
        #: The same of each tensor with one entry that is broadcast over the examples.
        self.broadcast: dict[int, int] = {}
        places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        for i, axis in zip(places, axes, strict=True):
            t = at_least_float32(self.leaves[i].detach())
            self.leaves[i] = t
            if axis is None or t.ndim == 0:
                continue
            if len(t) == self.num_examples:
                self.per_example[i] = axis
            elif len(t) == 1 and t.ndim > axis:
                self.broadcast[i] = axis

    def per_example_grads(self, g: Sequence[Tensor], max_bytes: int) -> dict[str, Tensor]:
        """Backpropagate output gradients to the parameters, for each example separately.

        Args:
            g: Gradients `[V, B, *out]`, one for each floating-point tensor of the output.
            max_bytes: Target for work memory, in addition to the result. At least one example is
                processed at a time.

        Returns:
            Name of each parameter to its gradients, `[V, B, *shape]`, in float32 at least.

        Raises:
            UnsupportedError: If the module mixes the examples of a batch, draws random numbers,
                fails on one example, or returns other tensors than gradients are given for.

        Example:
            >>> call = Call(nn.LayerNorm(4), (torch.rand(3, 4),), {}, 3, [0], [0])
            >>> call.per_example_grads([torch.ones(1, 3, 4)], 2**20)["bias"].shape
            torch.Size([1, 3, 4])
            >>> layer = nn.GRU(4, 2)
            >>> x = torch.rand(3, 5, 4)  # examples first here, and second where the layer wants it
            >>> g = [torch.ones(1, 3, 5, 2), torch.zeros(1, 3, 1, 2)]
            >>> call = Call(layer, (x,), {}, 3, in_axes=[1], out_axes=[1, 1])
            >>> call.per_example_grads(g, 2**20)["weight_ih_l0"].shape
            torch.Size([1, 3, 6, 4])
        """
        check_repeatable(self.module)
        g = [at_least_float32(t.detach()) for t in g]
        pairs = self.pairs_at_once(g, max_bytes)
        random = RandomState.now(g[0].device)
        # Autocast would undo the conversion to float32.
        with (
            GradMode(False),
            full_precision(g[0].device.type),
            attributes_restored(self.module),
        ):
            # vmap has many kinds of errors: control flow, in-place writes, unsupported operations.
            with suppress(Exception):
                return in_chunks(self.all_at_once, g, pairs)
            try:
                gradients = in_chunks(self.one_by_one, g, pairs)
                if random == RandomState.now(g[0].device):
                    return gradients
                raise NoExampleGradients(
                    self.refusal("It draws random numbers (dropout in training mode?)."),
                    "For the curvature of the model call `model.eval()`.",
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

    def pairs_at_once(self, g: Sequence[Tensor], max_bytes: int) -> int:
        """How many pairs of a vector and an example are worked on at a time."""
        tensors = [t[0] for t in g] + [self.leaves[i] for i in self.per_example]
        example_bytes = sum(t.nbytes for t in tensors) // max(1, self.num_examples)
        param_bytes = sum(p.nbytes for p in self.params.values())
        return max_bytes // max(1, 2 * param_bytes + _SAVED_FOR_BACKWARD * example_bytes)

    def inputs(self, examples: int | slice) -> list[Tensor]:
        """What the call was given of one example or several."""
        return [self.leaves[i][examples] for i in self.per_example]

    def run(
        self,
        params: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        then: Callable[[list[Tensor]], Any] = list,
        entry: int | None = None,
    ) -> Any:
        """Outputs of the module for the inputs of one example, in these shapes.

        Args:
            then: What is returned instead, computed while the module has these parameters: a
                backward pass may run it once more.
            entry: The number of the example, for lists with an entry for each.
        """
        leaves = list(self.leaves)
        for (i, axis), t in zip(self.per_example.items(), inputs, strict=True):
            leaves[i] = t.unsqueeze(axis)
        for i, axis in self.broadcast.items():
            leaves[i] = leaves[i].movedim(0, axis)
        # The module may write into what it is given: inputs and buffers are copies.
        leaves = [t.clone() if isinstance(t, Tensor) else t for t in leaves]
        buffers = {name: b.clone() for name, b in self.buffers.items()}
        parameters = self.frozen | {name: params[key] for name, key in self.aliases.items()}
        as_parameters(parameters.values())
        drop_new_tensors(parts_kept(self.module.modules()))
        if self.start is not None:
            self.start.put_attributes_back()
        args, kwargs = tree_unflatten(leaves, self.spec)
        if entry is not None and not self.per_example:
            args = tuple(with_entries(arg, self.num_examples, [entry]) for arg in args)
            kwargs = {
                name: with_entries(x, self.num_examples, [entry]) for name, x in kwargs.items()
            }

        def result(out: Any) -> Any:
            outputs = floating_tensors(out)
            self._check_outputs(type(out).__name__, outputs, shapes)
            return then([t.reshape(shape) for t, shape in zip(outputs, shapes, strict=True)])

        replaced = {f"module.{name}": t for name, t in (parameters | buffers).items()}
        call = _Followed(self.module)
        return functional_call(call, replaced, (result, args, kwargs), tie_weights=False)

    def _check_outputs(
        self, kind: str, outputs: Sequence[Tensor], shapes: Sequence[torch.Size]
    ) -> None:
        """Refuse outputs of one example that don't have these shapes on the axes of `out_axes`."""
        fits = [t.numel() for t in outputs] == [shape.numel() for shape in shapes]
        for t, axis in zip(outputs, self.out_axes):
            if axis and (t.ndim <= axis or t.shape[axis] != 1):
                fits = False
        if fits:
            return
        reason = (
            f"It returned a {kind} with floating-point tensors of shapes "
            f"{[list(t.shape) for t in outputs]}, and its output gradients have "
            f"{[list(shape) for shape in shapes]} for one example, which is to be on axis "
            f"{self.out_axes} of them."
        )
        if not self.per_example:
            reason += (
                " No tensor among its inputs carries the examples: an object that holds several, "
                "as a batch of graphs, can't be divided. Say to which example each row belongs, "
                "example_of_rows=, or give one of them per batch, batch_size_fn=lambda X: 1."
            )
        raise RerunError(self.refusal(reason))

    def all_at_once(
        self, g: Sequence[Tensor], vectors: slice, examples: slice
    ) -> dict[str, Tensor]:
        """Gradients of a chunk by `vmap` over examples, `[V, B, *shape]`."""

        def gradients_of_one(inputs: list[Tensor], g_n: list[Tensor]) -> dict[str, Tensor]:
            """Gradients `[V, *shape]` of the parameters from those of the outputs, `[V, *out]`."""
            shapes = [t.shape[1:] for t in g_n]
            outputs, pull_back, *_ = vjp(lambda p: self.run(p, inputs, shapes), self.params)
            rows: dict[str, list[Tensor]] = {name: [] for name in self.params}
            # No second vmap over vectors: nested in the first it gives wrong numbers for PReLU
            # (torch 2.13).
            for g_v in zip(*g_n, strict=True):
                back = [t.to(f.dtype) for t, f in zip(g_v, outputs, strict=True)]
                for name, J in pull_back(back)[0].items():
                    rows[name].append(J)
            return {name: torch.stack(J) for name, J in rows.items()}

        chunk = [t[vectors, examples] for t in g]
        with warnings.catch_warnings():
            # vmap takes a loop there, which is correct.
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            # Out dimension 0 and a transpose: with another one, vmap misplaces constant outputs
            # (torch 2.13).
            gradients = vmap(gradients_of_one, in_dims=(0, 1))(self.inputs(examples), chunk)
        return {name: J.transpose(0, 1) for name, J in gradients.items()}

    def one_by_one(self, g: Sequence[Tensor], vectors: slice, examples: slice) -> dict[str, Tensor]:
        """Gradients of a chunk by one backward pass per example and vector, `[V, B, *shape]`."""
        shapes = [t.shape[2:] for t in g]
        gradients: dict[str, list[Tensor]] = {name: [] for name in self.params}
        for n in range(examples.start, examples.stop):
            params = {name: p.detach().requires_grad_() for name, p in self.params.items()}
            sent = [[t[v, n] for t in g] for v in range(vectors.start, vectors.stop)]

            def rows_of(
                outputs: list[Tensor],
                params: dict[str, Tensor] = params,
                sent: list[list[Tensor]] = sent,
            ) -> list[Any]:
                with GradMode(False):
                    return [_pull_back(outputs, list(params.values()), g_v) for g_v in sent]

            with GradMode(True):
                rows = self.run(params, self.inputs(n), shapes, rows_of, n)
            for name, J in zip(self.params, zip(*rows, strict=True), strict=True):
                gradients[name].append(torch.stack(J))
        return {name: torch.stack(J, dim=1) for name, J in gradients.items()}


class Unhooked(nn.Module):
    """A module without its forward hooks: outputs are recorded before these see them, so what they
    return instead belongs to what comes behind.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with what its pre-hooks make of the inputs."""
        module = self.module
        for key, hook in [*module._forward_pre_hooks.items()]:
            if key in module._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
                continue
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        return module.forward(*args, **kwargs)


class _Followed(Unhooked):
    """A call of a module without its forward hooks, and what follows."""

    def forward(self, then: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        return then(super().forward(*args, **kwargs))


def _pull_back(
    outputs: Sequence[Tensor], params: Sequence[Tensor], g: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of `Σ ⟨g, output⟩`, keeping the graph; zero of what no output depends on."""
    pairs = [(f, t.to(f.dtype)) for f, t in zip(outputs, g, strict=True) if f.requires_grad]
    if not pairs:
        return [torch.zeros_like(p) for p in params]
    outputs, g = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, params, g, retain_graph=True, materialize_grads=True)
    # Those of `sparse=True` embeddings are sparse.
    return [t.to_dense() for t in gradients]


def floating_tensors(tree: Any) -> list[Tensor]:
    """The floating-point tensors among the leaves of inputs or outputs."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def in_chunks(
    grads: Callable[[Sequence[Tensor], slice, slice], dict[str, Tensor]],
    g: Sequence[Tensor],
    pairs: int,
) -> dict[str, Tensor]:
    """Run `grads` on pieces of at most so many pairs of a vector and an example, all vectors of an
    example first, and put the results together.

    Example:
        >>> g = [torch.arange(6.0).view(1, 6)]
        >>> double = lambda g, vectors, examples: {"double": 2 * g[0][vectors, examples]}
        >>> in_chunks(double, g, 4)["double"]
        tensor([[ 0.,  2.,  4.,  6.,  8., 10.]])
    """
    V, B = g[0].shape[:2]
    v = min(V, max(1, pairs))
    b = min(B, max(1, pairs // max(1, V)))
    if (v, b) == (V, B):
        return grads(g, slice(0, V), slice(0, B))
    gradients: dict[str, Tensor] = {}
    for v0 in range(0, V, v):
        vectors = slice(v0, min(v0 + v, V))
        for b0 in range(0, B, b):
            examples = slice(b0, min(b0 + b, B))
            for name, J in grads(g, vectors, examples).items():
                if name not in gradients:
                    gradients[name] = J.new_empty(V, B, *J.shape[2:])
                gradients[name][vectors, examples] = J
    return gradients


def check_repeatable(module: nn.Module) -> None:
    """Refuse batch normalization with the statistics of the batch.

    Raises:
        UnsupportedError: If the module contains it.
    """
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
            where = f" ({name!r} of {type(module).__name__})" if name else ""
            mode = "in training mode" if child.training else "with track_running_stats=False"
            raise NoExampleGradients(
                f"{type(child).__name__}{where} {mode} normalizes with the statistics of the "
                "batch, so no example has gradients of its own.",
                "Call `model.eval()`, on a layer that tracks running statistics.",
            )


def as_parameters(tensors: Iterable[Tensor]) -> None:
    """Let tensors that stand for parameters pass for them: `Module.get_parameter` returns nothing
    else.
    """
    for t in tensors:
        # PyTorch's own mark, of subclasses of tensors.
        t._is_param = True  # type: ignore[attr-defined]


@contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Context in which a module runs again: vmapped tensors must not stay in it, e.g. as
    `self.attention`.
    """
    with kept_attributes(module.modules()):
        for m in module.modules():
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
                # Scaled by frequencies in the batch, the result is not a derivative.
                m.scale_grad_by_freq = False
        yield
