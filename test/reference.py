"""Slow exact twins of everything that is computed cleverly elsewhere: definitions, `torch.func` and
plain loops.

Nothing of the package is imported here. A `Reference` is built from a model, the user's own loss
and data, and forms every matrix from the whole Jacobian and from the Hessian of the user's own loss
with respect to the model's output, so that every option of a loss is covered by PyTorch's reading
of it.

Letters: N examples, R loss terms of C numbers each, F = N·R·C numbers in a batch's output, P
parameters, V vectors, S positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev
from torch.nn.functional import embedding_bag, linear
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only


def _out_in(w: Tensor, module: nn.Module) -> Tensor:
    return w[None]


def _in_out(w: Tensor, module: nn.Module) -> Tensor:
    return w.mT[None]


def _conv(w: Tensor, module: nn.Module) -> Tensor:
    return w.reshape(module.groups, len(w) // module.groups, -1)  # type: ignore[arg-type, operator]


def _conv_transpose(w: Tensor, module: nn.Module) -> Tensor:
    return w.unflatten(0, (module.groups, -1)).movedim(2, 1).flatten(2)  # type: ignore[arg-type]


#: Layers of the form W a + b: how the weight is read as matrices `[m, o, i]`, and the axis of the
#: output's channels, which are the rows of the first matrix, then those of the second, and so on.
AFFINE: dict[Any, tuple[Callable[[Tensor, nn.Module], Tensor], int]] = {
    nn.Linear: (_out_in, -1),
    nn.Conv1d: (_conv, 1),
    nn.Conv2d: (_conv, 1),
    nn.Conv3d: (_conv, 1),
    nn.ConvTranspose1d: (_conv_transpose, 1),
    nn.ConvTranspose2d: (_conv_transpose, 1),
    nn.ConvTranspose3d: (_conv_transpose, 1),
    nn.Embedding: (_in_out, -1),
    nn.EmbeddingBag: (_in_out, -1),
    "transformers.pytorch_utils.Conv1D": (_in_out, -1),
}


@dataclass(eq=False)
class Seen:
    """One batch."""

    X: Any
    N: int
    f: Tensor  # the output in its own shape
    J: Tensor  # [F, P]
    g: Tensor  # [F], gradient of the summed loss
    H: Tensor  # [F, F], Hessian of the summed loss
    terms: Tensor  # [N, R, C], places in the flattened output
    divisor: float  # what "mean" divides by
    mask: Tensor | None  # [N, T]


Vectors = tuple[tuple[Seen, Tensor], ...]
"""For every batch what is backpropagated through it, [V, F]."""


class Projection(nn.Module):
    """`W x + b` with parameters of somebody else's."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return linear(x, w, b)


class Attention(nn.Module):
    """What `nn.MultiheadAttention` computes, line by line, with its parameters under its names."""

    #: Layers that look here whether they may go past all submodules don't.
    _qkv_same_embed_dim = False

    def __init__(self, given: nn.MultiheadAttention) -> None:
        super().__init__()
        assert given.dropout == 0 or not given.training, "random masks have no definition"
        own = "in_proj_weight q_proj_weight k_proj_weight v_proj_weight in_proj_bias bias_k bias_v"
        for name in own.split():
            self.register_parameter(name, getattr(given, name))
        self.out_proj = nn.Linear(1, 1)
        self.out_proj.weight, self.out_proj.bias = given.out_proj.weight, given.out_proj.bias
        self.q, self.k, self.v = Projection(), Projection(), Projection()
        self.embed_dim, self.heads, self.zero = (
            given.embed_dim,
            given.num_heads,
            given.add_zero_attn,
        )
        self.num_heads, self.batch_first = given.num_heads, given.batch_first
        self.train(given.training)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            return tuple(self.in_proj_weight.unflatten(0, (3, -1)))  # type: ignore[return-value]
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        biases = (
            (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.unflatten(0, (3, -1))
        )
        xs, parts = (query, key, value), (self.q, self.k, self.v)
        q, k, v = (
            part(x, w, b) for part, x, w, b in zip(parts, xs, self.weights(), biases, strict=True)
        )
        N, L, E = q.shape
        extra = []
        if self.bias_k is not None:
            extra.append((self.bias_k.expand(N, 1, E), self.bias_v.expand(N, 1, E)))
        if self.zero:
            extra.append((q.new_zeros(N, 1, E),) * 2)
        seen = q.new_zeros(N, self.heads, L, k.shape[1])  # what is added to the scores
        for mask, shape in (
            (key_padding_mask, (N, 1, 1, -1)),
            (attn_mask, (-1, self.heads, L, k.shape[1])),
        ):
            if mask is None:
                continue
            mask = mask[None, None] if mask is attn_mask and mask.ndim == 2 else mask.reshape(shape)
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            seen = seen + mask
        for k_more, v_more in extra:
            k, v = torch.cat([k, k_more], 1), torch.cat([v, v_more], 1)
            seen = torch.cat([seen, seen.new_zeros(N, self.heads, L, 1)], -1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        p = (q @ k.mT / q.shape[-1] ** 0.5 + seen).softmax(-1)
        out = self.out_proj((p @ v).transpose(1, 2).flatten(2))
        p = p.mean(1) if average_attn_weights else p
        return out if self.batch_first else out.transpose(0, 1), p if need_weights else None


def _written_out(model: nn.Module) -> nn.Module:
    """The model with every attention written out."""
    if isinstance(model, nn.MultiheadAttention):
        return Attention(model)
    for name, child in model.named_children():
        setattr(model, name, _written_out(child))
    return model


@dataclass(eq=False)
class Use:
    """A place where a weight is multiplied with something."""

    path: str  # of the module whose calls it sees
    weight: str
    bias: str | None
    evaluate: Callable[
        [Tensor, tuple[Any, ...], Mapping[str, Any]], Tensor
    ]  # output of a call at another weight
    matrix: Tensor  # [m, o, i], places of the numbers of the matrices in the flattened weight
    shift: Tensor  # [m, o], places of the numbers of the bias in the flattened bias
    channel: int  # axis of the output's channels
    axis: int  # of the examples
    slot: int = 0  # which of the layer's matrices its first one is
    sparse: bool = False  # whether the input factor is a diagonal


@dataclass(eq=False)
class Layer:
    """Parameters that share a block."""

    name: str  # of the first place that holds one
    keys: list[str]
    #: The places where they are used, if there are Kronecker factors: those that multiply with the
    #: same matrices together, first those with the layer's own, then those with its transpose.
    roles: list[list[Use]]


class Reference:
    """Curvature matrices of `Σ loss` over a data set, by definition.

    Args:
        model: The model; it is copied.
        loss: The user's loss.
        data: Batches `(X, y)`, or mappings with "labels".
        params: Key to the model's own parameter, in the order of the vector.
        read: The model's output to the tensor that the loss reads.
        axis: Axis of that tensor which holds the C numbers of a term.
        to_loss: That tensor as the loss wants to have it.
        count: Number of examples of X.
        num_data: Replaces the number of examples in the scale of the loss.
        num_terms: Replaces the number of loss terms per example in it.
        mask: X, y to the positions [N, T] that count.
        example_axis: Module name to the axis of its examples.
        plain: Turns the copy of the model into one that `torch.func` can differentiate.

    Matrices are computed once, since many laws ask for them: whoever changes one clones it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        data: Sequence[Any],
        params: Mapping[str, Tensor],
        read: Callable[[Any], Tensor] = lambda out: out,
        axis: int = -1,
        to_loss: Callable[[Tensor], Tensor] = lambda f: f,
        count: Callable[[Any], int] = len,
        num_data: int | None = None,
        num_terms: int | None = None,
        mask: Callable[[Any, Any], Tensor] | None = None,
        example_axis: Mapping[str, int] | None = None,
        plain: Callable[[nn.Module], object] = lambda model: None,
    ) -> None:
        own = {id(p): name for name, p in model.named_parameters()}
        self.names = {key: own[id(p)] for key, p in params.items()}
        self.values = {key: p.detach().clone() for key, p in params.items()}
        self.model = _written_out(copy.deepcopy(model).requires_grad_(False))
        plain(self.model)
        # Every place that holds a parameter, once: a module that is registered under two names is
        # one place, and replacing it under both would make `functional_call` put the wrong tensor
        # back.
        self.slots: dict[str, list[str]] = {key: [] for key in self.names}
        key_of = {id(self.model.get_parameter(name)): key for key, name in self.names.items()}
        for path, module in self.model.named_modules():
            for local, p in module._parameters.items():
                if id(p) in key_of:
                    self.slots[key_of[id(p)]].append(f"{path}.{local}" if path else local)
        self.read, self.axis, self.to_loss = read, axis, to_loss
        self.example_axis = dict(example_axis or {})
        self.summed, self.mean = copy.deepcopy(loss), copy.deepcopy(loss)
        self.summed.reduction, self.mean.reduction = "sum", "mean"
        self.batches = [self._see(item, count, mask) for item in data]
        self.c = 1.0
        if loss.reduction == "mean":
            divisor = sum(b.divisor for b in self.batches)
            examples = sum(b.N for b in self.batches)
            terms = sum(b.N * b.terms.shape[1] for b in self.batches)
            per_example = terms / examples if num_terms is None else num_terms
            self.c = terms / ((examples if num_data is None else num_data) * per_example) / divisor

    # ------------------------------------------------------------------------------------ one batch
    def call(self, theta: Mapping[str, Tensor], X: Any) -> Tensor:
        """Output at other parameters."""
        replaced = {slot: value for key, value in theta.items() for slot in self.slots[key]}
        args, kwargs = (X.args, X.kwargs) if isinstance(X, Inputs) else ((X,), {})
        with torch.compiler.set_stance("force_eager"):
            return self.read(functional_call(self.model, replaced, args, kwargs, tie_weights=False))

    def _see(self, item: Any, count: Callable[[Any], int], mask: Any) -> Seen:
        if isinstance(item, Mapping):
            y, kwargs = item["labels"], {k: v for k, v in item.items() if k != "labels"}
            X, N = Inputs((), kwargs), len(y)
        else:
            X, y = item
            N = count(X)
        f = self.call(self.values, X)
        J = torch.cat(
            [
                j.reshape(f.numel(), -1)
                for j in jacrev(lambda t: self.call(t, X).flatten())(self.values).values()
            ],
            1,
        )

        def total(flat: Tensor) -> Tensor:
            return self.summed(self.to_loss(flat.view(f.shape)), y)

        summed, mean = total(f.flatten()), self.mean(self.to_loss(f), y)
        divisor = 0.0 if float(summed) == 0 else float(summed / mean)
        places = torch.arange(f.numel(), device=f.device).view(f.shape)
        terms = (
            places.view(N, -1, 1)
            if f.ndim == 1
            else places.movedim(self.axis, -1).reshape(N, -1, f.shape[self.axis])
        )
        H = hessian(total)(f.flatten())
        return Seen(
            X,
            N,
            f,
            J,
            grad(total)(f.flatten()),
            H,
            terms,
            divisor,
            None if mask is None else mask(item[0], y),
        )

    # ------------------------------------------------------------------------------ matrices [P, P]
    @cache  # noqa: B019 (twins of the problems live as long as the tests)
    def ggn(self) -> Tensor:
        """`c Σ Jᵀ H J`."""
        return self.c * sum(b.J.T @ b.H @ b.J for b in self.batches)

    @cache  # noqa: B019
    def empirical_fisher(self, per_term: bool) -> Tensor:
        """`c Σ u uᵀ` over gradients `u` of examples, or of terms."""
        return self.c * sum(
            u.T @ u
            for u in (self.gradients(b, v).flatten(0, 1) for b, v in self.empirical(per_term))
        )

    @cache  # noqa: B019
    def hessian(self) -> Tensor:
        """Hessian of the whole loss."""
        sizes = [v.numel() for v in self.values.values()]

        def total(flat: Tensor, b: Seen, y: Any) -> Tensor:
            parts = flat.split(sizes)
            theta = {
                key: part.view(v.shape)
                for part, (key, v) in zip(parts, self.values.items(), strict=True)
            }
            return self.summed(self.to_loss(self.call(theta, b.X)), y)

        flat = torch.cat([v.flatten() for v in self.values.values()])
        # Reverse over reverse: forward over reverse (`hessian`) is wrong for LayerNorm in PyTorch
        # 2.13.
        return self.c * sum(
            jacrev(grad(total))(flat, b, y)
            for b, y in zip(self.batches, self._targets, strict=True)
        )

    def with_targets(self, targets: Sequence[Any]) -> Reference:
        """Remember the targets, which `hessian` reads once more."""
        self._targets = list(targets)
        return self

    def __hash__(self) -> int:
        return id(self)

    def gradient(self) -> Tensor:
        """Gradient of the whole loss."""
        return self.c * sum(b.J.T @ b.g for b in self.batches)

    # ------------------------------------------------------------------------------- vectors [V, F]
    @cache  # noqa: B019
    def exact(self) -> Vectors:
        """Columns of a root of every term's Hessian, one term of each example at a time."""
        result = []
        for b in self.batches:
            N, R, C = b.terms.shape
            v = torch.zeros(R, C, b.f.numel(), dtype=b.f.dtype, device=b.f.device)
            for n in range(N):
                for r in range(R):
                    at = b.terms[n, r]
                    values, Q = torch.linalg.eigh(b.H[at[:, None], at])
                    v[r][:, at] = (Q * values.clamp(min=0).sqrt()).T
            result.append((b, v.flatten(0, 1)))
        return tuple(result)

    @cache  # noqa: B019
    def empirical(self, per_term: bool) -> Vectors:
        """The loss's own gradient, of all terms together or of each."""
        result = []
        for b in self.batches:
            R = b.terms.shape[1]
            v = torch.zeros(R if per_term else 1, b.f.numel(), dtype=b.f.dtype, device=b.f.device)
            for r in range(R):
                at = b.terms[:, r].flatten()
                v[r if per_term else 0, at] = b.g[at]
            result.append((b, v))
        return tuple(result)

    def given(self, vectors: Sequence[Tensor]) -> Vectors:
        """Vectors [V, N, R, C] of the caller, one tensor per batch."""
        result = []
        for b, given in zip(self.batches, vectors, strict=True):
            v = torch.zeros(len(given), b.f.numel(), dtype=b.f.dtype, device=b.f.device)
            v[:, b.terms.flatten()] = given.flatten(1)
            result.append((b, v))
        return tuple(result)

    @cache  # noqa: B019
    def gradients(self, b: Seen, v: Tensor) -> Tensor:
        """Gradients [V, N, P] of each example by itself."""
        of_examples = []
        for n in range(b.N):
            at = b.terms[n].flatten()
            of_examples.append(v[:, at] @ b.J[at])
        return torch.stack(of_examples, 1)

    # --------------------------------------------------------------------------------------- blocks
    @cached_property
    def layers(self) -> list[Layer]:
        """Parameters by the modules that hold them; modules that share one are together."""
        parts: list[Layer] = []
        inner: set[str] = set()
        for path, module in self.model.named_modules():
            if path in inner:
                continue
            names = [
                f"{path}.{local}".lstrip(".")
                for local, p in module._parameters.items()
                if p is not None
            ]
            if is_parametrized(module):
                start = f"{path}.parametrizations".lstrip(".")
                inner |= {
                    name for name, _ in self.model.get_submodule(start).named_modules(prefix=start)
                }
                names += [
                    name
                    for name, _ in self.model.get_submodule(start).named_parameters(prefix=start)
                ]
            if isinstance(module, Attention):
                parts += self._attention(path, module)
                names = [name for name in names if name.endswith(("bias_k", "bias_v"))]
            use = self._use(path, module)
            parts.append(Layer(path, self.keys_of(names), [] if use is None else [[use]]))
        layers: list[Layer] = []
        for part in (part for part in parts if part.keys):
            tied = [layer for layer in layers if set(layer.keys) & set(part.keys)]
            members = [*tied, part]
            keys = [key for key in self.names if any(key in member.keys for member in members)]
            at = layers.index(tied[0]) if tied else len(layers)
            merged = Layer(members[0].name, keys, part.roles if not tied else self._roles(members))
            layers = [layer for layer in layers if layer not in tied]
            layers.insert(at, merged)
        return layers

    def keys_of(self, names: Sequence[str | None]) -> list[str]:
        """Keys of those of the model's parameters that are among ours."""
        own = [self.model.get_parameter(name) for name in names if name is not None]
        return [
            key
            for key, name in self.names.items()
            if any(self.model.get_parameter(name) is p for p in own)
        ]

    def _use(self, path: str, module: nn.Module) -> Use | None:
        """What an affine module multiplies."""
        kinds = [
            (t, k)
            for t in type(module).__mro__
            for k in (t, f"{t.__module__}.{t.__qualname__}")
            if k in AFFINE
        ]
        weight = module._parameters.get("weight")
        if not kinds or type(module).forward is not kinds[0][0].forward or weight is None:
            return None
        if getattr(module, "mode", None) == "max":
            return None
        matrices, channel = AFFINE[kinds[0][1]]
        matrix = matrices(torch.arange(weight.numel()).view(weight.shape), module)
        return Use(
            path,
            f"{path}.weight".lstrip("."),
            None if module._parameters.get("bias") is None else f"{path}.bias".lstrip("."),
            lambda w, args, kwargs: functional_call(module, {"weight": w}, args, dict(kwargs)),
            matrix,
            torch.arange(matrix[:, :, 0].numel()).view(matrix.shape[:2]),
            channel,
            self.example_axis.get(path, 0),
            sparse=isinstance(module, (nn.Embedding, nn.EmbeddingBag)),
        )

    def _attention(self, path: str, module: Attention) -> list[Layer]:
        """The in-projection: three matrices side by side, or three layers and a bias if they differ
        in size.
        """
        within = f"{path}.".lstrip(".")
        bias = None if module.in_proj_bias is None else f"{within}in_proj_bias"
        E = module.embed_dim
        uses = []
        for slot, part in enumerate("qkv"):
            joint = module.in_proj_weight is not None
            weight = f"{within}in_proj_weight" if joint else f"{within}{part}_proj_weight"
            w = module.get_parameter(weight.removeprefix(within))
            place = torch.arange(w.numel()).view(w.shape)
            rows = slice(slot * E, slot * E + E) if joint else slice(E)
            matrix, shift = place[rows][None], torch.arange(slot * E, slot * E + E)[None]

            def evaluate(w: Tensor, args: Any, kwargs: Any, rows: slice = rows) -> Tensor:
                return linear(args[0], w[rows], args[2])

            uses.append(Use(f"{within}{part}", weight, bias, evaluate, matrix, shift, -1, 0, slot))
        if module.in_proj_weight is not None:
            return [Layer(f"{within}in_proj", self.keys_of([uses[0].weight, bias]), [uses])]
        alone = [
            Layer(
                f"{within}{part}_proj",
                self.keys_of([use.weight]),
                [[replace(use, slot=0, bias=None)]],
            )
            for part, use in zip("qkv", uses, strict=True)
        ]
        return [*alone, Layer(f"{within}in_proj_bias", self.keys_of([bias]), [uses])]

    def _roles(self, members: list[Layer]) -> list[list[Use]]:
        """Roles of modules that share parameters; none unless they share one matrix, and a bias is
        in one role only.
        """
        uses = [use for member in members for role in member.roles for use in role]
        weights = {tuple(self.keys_of([use.weight])) for use in uses}
        if (
            not all(member.roles for member in members)
            or len(weights) > 1
            or any(len(u.matrix) > 1 for u in uses)
        ):
            return []
        if any(use.slot for use in uses):
            return []
        if weights == {()}:  # a bias alone has the same role wherever it is added
            return [uses]
        uses = sorted(uses, key=lambda use: (not self.keys_of([use.bias]), use.sparse))  # stable
        own = [use for use in uses if torch.equal(use.matrix, uses[0].matrix)]
        others = [use for use in uses if use not in own]
        fits = all(torch.equal(use.matrix, uses[0].matrix.mT) for use in others)
        biases = [{tuple(self.keys_of([use.bias])) for use in role} for role in (own, others)]
        if not fits or len(biases[0]) > 1 or biases[1] - {()}:
            return []
        return [own, others] if others else [own]

    def blocks(self, separate: bool) -> list[list[str]]:
        """Keys of the parameters that share a block."""
        return [[key] for key in self.names] if separate else [layer.keys for layer in self.layers]

    def layer_of(self, key: str) -> Layer:
        """The layer of a parameter."""
        return next(layer for layer in self.layers if key in layer.keys)

    def places(self, keys: Sequence[str]) -> Tensor:
        """Where parameters stand in the whole vector."""
        starts, start = {}, 0
        for key, value in self.values.items():
            starts[key], start = start, start + value.numel()
        ranges = [torch.arange(starts[k], starts[k] + self.values[k].numel()) for k in keys]
        return torch.cat([torch.zeros(0, dtype=torch.long), *ranges])

    def only_blocks(self, matrix: Tensor, separate: bool) -> Tensor:
        """A matrix with everything outside of the blocks set to zero."""
        result = torch.zeros_like(matrix)
        for keys in self.blocks(separate):
            at = self.places(keys)
            result[at[:, None], at] = matrix[at[:, None], at]
        return result

    # -------------------------------------------------------------------------------------- factors
    def affine_layer(self, key: str) -> str | None:
        """Name of the layer that a parameter belongs to, if it has Kronecker factors."""
        layer = self.layer_of(key)
        return layer.name if layer.roles else None

    def _calls(
        self, b: Seen, use: Use, probes: Sequence[Tensor] | None = None
    ) -> tuple[list[Any], list[Tensor], Tensor]:
        """Inputs and outputs of a module in one forward pass, with numbers added to its outputs;
        the model's output.
        """
        inputs: list[Any] = []
        outputs: list[Tensor] = []

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor
        ) -> Tensor | None:
            inputs.append(tree_map_only(Tensor, torch.clone, (args, kwargs)))
            outputs.append(out.clone())
            return None if probes is None else out + probes[len(outputs) - 1]

        handle = self.model.get_submodule(use.path).register_forward_hook(hook, with_kwargs=True)
        try:
            f = self.call(self.values, b.X)
        finally:
            handle.remove()
        return inputs, outputs, f

    @cache  # noqa: B019
    def rows(self, b: Seen, use: Use) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each call the inputs `a` [m, N, S, i], derivatives [F, m, N, S, o] of the model's
        output by the outputs, and whether a position counts [N, S].

        A row of inputs is, by definition, the derivative of one output number with respect to its
        row of the weight.
        """
        m, o, i = use.matrix.shape
        inputs, outputs, _ = self._calls(b, use)
        if not outputs:
            return []

        def examples_first(t: Tensor, lead: int, *last: int) -> Tensor:
            """[*lead, *positions, *last], the examples somewhere, to [*lead, N, S, *last]; one row
            may be for all.
            """
            t = t.movedim(lead + use.axis, lead)
            t = t.expand(*t.shape[:lead], b.N, *t.shape[lead + 1 :]) if t.shape[lead] == 1 else t
            return t.reshape(*t.shape[:lead], b.N, -1, *last)

        def probe(out: Tensor) -> Tensor:
            shape = list(out.shape)
            shape[use.axis] = b.N if shape[use.axis] == 1 else shape[use.axis]
            return out.new_zeros(shape)

        D = jacrev(lambda p: self._calls(b, use, p)[2].flatten())([probe(out) for out in outputs])
        weight = self.model.get_parameter(use.weight).detach()
        result = []
        for (args, kwargs), out, d in zip(inputs, outputs, D, strict=True):

            def first_channels(w: Tensor, args: Any = args, kwargs: Any = kwargs) -> Tensor:
                return use.evaluate(w, args, kwargs).movedim(use.channel, 0)[::o]

            by_weight = jacrev(first_channels)(weight).flatten(
                out.ndim
            )  # [m, *positions, numbers of the weight]
            a = torch.stack([by_weight[k, ..., use.matrix[k, 0]] for k in range(m)])
            d = d.movedim(use.channel if use.channel < 0 else use.channel + 1, -1)
            module = self.model.get_submodule(use.path)
            kept = torch.ones(out.movedim(use.channel, -1).shape[:-1], dtype=torch.bool)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                kept = [*args, *kwargs.values()][0] != module.padding_idx
            if isinstance(module, nn.EmbeddingBag):  # a bag of ones is as large as it has entries
                given = {
                    **dict(zip(("input", "offsets"), args, strict=False)),
                    **kwargs,
                    "per_sample_weights": None,
                }
                more = {
                    "include_last_offset": module.include_last_offset,
                    "padding_idx": module.padding_idx,
                }
                kept = (
                    embedding_bag(weight=torch.ones_like(weight), mode="sum", **given, **more)[:, 0]
                    > 0
                )
            result.append(
                (
                    examples_first(a, 1, i),
                    examples_first(d, 1, m, o).movedim(-2, 1),
                    examples_first(kept, 0),
                )
            )
        return result

    @cache  # noqa: B019
    def factors(
        self,
        name: str,
        vectors: Vectors,
        reduce: bool = False,
        ones: bool = False,
        max_bytes: float = math.inf,
    ) -> tuple[Tensor, Tensor]:
        """`A` and `G` of a layer, one example, one position, one vector at a time.

        Those of a layer of several matrices are block-diagonal. Those of tied weights are the
        nearest Kronecker product to the sum over roles, where `A` is a mean of theirs with weights
        that add up to one.

        Args:
            name: The layer.
            vectors: What is backpropagated through each batch.
            reduce: Average inputs and sum gradients over positions first.
            ones: Append a column of ones to the inputs.
            max_bytes: Larger factors of each role are replaced by their diagonals.
        """
        layer = next(layer for layer in self.layers if layer.name == name and layer.roles)
        own, *others = layer.roles
        pairs = [self._role(own, vectors, reduce, ones)]
        # The other role multiplies with the transpose, so that its factors change places; it has no
        # column of ones.
        for role in others:
            rows, columns = self._role(role, vectors, reduce, False)
            pairs.append(
                (torch.block_diag(columns, columns.new_zeros(1, 1)) if ones else columns, rows)
            )
        pairs = [
            (self._kept(A, layer, max_bytes), self._kept(G, layer, max_bytes)) for A, G in pairs
        ]
        A, G = pairs[0]
        if not others:
            return A, G
        total = torch.stack([torch.outer(G.flatten(), A.flatten()) for A, G in pairs]).sum(0)
        u, s, vt = torch.linalg.svd(total, full_matrices=False)
        of_each = torch.stack([A.flatten() for A, _ in pairs], 1)
        weights = torch.linalg.lstsq(of_each, vt[0][:, None]).solution.sum()
        return (vt[0] / weights).view(A.shape), (u[:, 0] * s[0] * weights).view(G.shape)

    def _kept(self, factor: Tensor, layer: Layer, max_bytes: float) -> Tensor:
        """The factor if it is small enough, else its diagonal. Of several matrices all count."""
        own = layer.roles[0]
        count = max(use.slot + len(use.matrix) for use in own)
        return (
            factor
            if factor.numel() / count * factor.itemsize <= max_bytes
            else factor.diagonal().diag()
        )

    @cache  # noqa: B019
    def _own_role(self, layer: Layer, vectors: Vectors, reduce: bool) -> Tensor:
        """`G` of the uses that have the bias."""
        return self._role(layer.roles[0], vectors, reduce, False)[1]

    def _role(
        self, uses: list[Use], vectors: Vectors, reduce: bool, ones: bool
    ) -> tuple[Tensor, Tensor]:
        pairs = []
        for slot in range(max(use.slot + len(use.matrix) for use in uses)):
            here = [use for use in uses if use.slot <= slot < use.slot + len(use.matrix)]
            pairs.append(self._matrix(here, slot, vectors, reduce, ones))
        A, G = (torch.block_diag(*parts) for parts in zip(*pairs, strict=True))
        return A, G

    def _matrix(
        self, uses: list[Use], slot: int, vectors: Vectors, reduce: bool, ones: bool
    ) -> tuple[Tensor, Tensor]:
        A: Any = 0.0
        G: Any = 0.0
        rows = 0
        for b, v in vectors:
            calls = [
                (a[slot - use.slot], D[:, slot - use.slot], kept)
                for use in uses
                for a, D, kept in self.rows(b, use)
            ]
            for n in range(b.N):
                a_n, g_n = [], []
                for a, D, kept in calls:
                    for s in range(a.shape[1]):
                        masked = (
                            b.mask is not None
                            and b.mask.shape[1] == a.shape[1]
                            and not b.mask[n, s]
                        )
                        if masked or not kept[n, s]:
                            continue
                        a_n.append(torch.cat([a[n, s], a.new_ones(1)]) if ones else a[n, s])
                        g_n.append(v @ D[:, n, s])  # [V, o]
                if reduce and a_n:
                    a_n, g_n = [torch.stack(a_n).mean(0)], [torch.stack(g_n).sum(0)]
                for a, g in zip(a_n, g_n, strict=True):
                    A = A + torch.outer(a, a)
                    rows += 1
                    G = G + g.T @ g
        if all(use.sparse for use in uses):
            A = A.diagonal().diag()
        return A / rows, self.c * G

    def matrix_places(self, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Row and column of every number of a layer's parameters in the layer's matrix `[o, i]` or
        `[o, i + 1]`.

        Several matrices stand on the diagonal of one large matrix.
        """
        uses = self.layer_of(keys[0]).roles[0]
        rows, columns = [], []
        for key in keys:
            numbers = self.values[key].numel()
            r, c = (torch.full((numbers,), -1) for _ in range(2))
            for use in uses:
                m, o, i = use.matrix.shape
                width = i + (len(keys) > 1)
                for k in range(m):
                    slot = use.slot + k
                    if key in self.keys_of([use.weight]):
                        r[use.matrix[k]] = slot * o + torch.arange(o)[:, None].expand(o, i)
                        c[use.matrix[k]] = slot * width + torch.arange(i).expand(o, i)
                    elif key in self.keys_of([use.bias]):
                        r[use.shift[k]] = slot * o + torch.arange(o)
                        c[use.shift[k]] = slot * width + i if len(keys) > 1 else 0
            assert bool((r >= 0).all())
            rows.append(r)
            columns.append(c)
        return torch.cat(rows), torch.cat(columns)

    def order(self, keys: Sequence[str]) -> Tensor:
        """Where every number of a layer's parameters stands in the row-major vector of its matrices
        `[m, o, i]`.
        """
        r, c = self.matrix_places(keys)
        i = self.layer_of(keys[0]).roles[0][0].matrix.shape[2]
        width = i + (len(keys) > 1) if self.has_weight(keys) else 1
        return r * width + c % width

    def has_weight(self, keys: Sequence[str]) -> bool:
        """Whether a layer's weight is among its parameters."""
        weight = self.keys_of([self.layer_of(keys[0]).roles[0][0].weight])
        return any(key in weight for key in keys)

    @cache  # noqa: B019
    def kfac(
        self,
        vectors: Vectors,
        reduce: bool = False,
        separate: bool = False,
        max_bytes: float = math.inf,
    ) -> Tensor:
        """`G ⊗ A` on every layer that has factors, the diagonal of the exact block on the others.
        [P, P]

        Factors that take more than `max_bytes` are replaced by their diagonals.
        """
        result = torch.diag(self.from_gradients(vectors).diagonal())
        for keys in self.blocks(separate):
            layer = self.layer_of(keys[0])
            if not layer.roles:
                continue
            if self.has_weight(keys):
                A, G = self.factors(layer.name, vectors, reduce, len(keys) > 1, max_bytes)
            else:
                G = self._kept(self._own_role(layer, vectors, reduce), layer, max_bytes)
                A = torch.ones(1, 1, dtype=G.dtype)
            r, c = self.matrix_places(keys)
            at = self.places(keys)
            result[at[:, None], at] = G[r[:, None], r] * A[c[:, None], c]
        return result

    def from_gradients(self, vectors: Vectors) -> Tensor:
        """`c Σ u uᵀ` over the per-example gradients of all vectors, [P, P]."""
        return self.c * sum(
            u.T @ u for u in (self.gradients(b, v).flatten(0, 1) for b, v in vectors)
        )

    def corrected_eigenvalues(
        self, keys: Sequence[str], vectors: Vectors, QG: Tensor, QA: Tensor | None
    ) -> Tensor:
        """`Λ = c Σ (Q_Gᵀ U Q_A)²` of a layer's per-example gradients `U` [o, i] (i = 1 for a bias
        by itself).
        """
        rows, columns = self.matrix_places(keys)
        QA = torch.ones(1, 1, dtype=QG.dtype) if QA is None else QA
        total = torch.zeros(len(QG), len(QA), dtype=QG.dtype)
        for b, v in vectors:
            for u in self.gradients(b, v).flatten(0, 1)[:, self.places(keys)]:
                U = torch.zeros(len(QG), len(QA), dtype=QG.dtype)
                U[rows, columns] = u
                total += (QG.T @ U @ QA) ** 2
        return self.c * total


@dataclass
class Inputs:
    """Inputs of a model that is not called with one positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
