"""What two slow exact twins of the package have in common: networks written out, derivatives by
plain autograd, and the Kronecker factors of a layer by their definition.

Nothing of the package is imported here. `reference.py` is the twin of the laws, `fuzz/truth.py`
that of random cases.

Letters: N examples, F numbers in the outputs of a pass, P parameters, S positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding_bag, linear
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from test.written_out import Attention, written_out


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


# -------------------------------------------------------------------------------------- derivatives
def jacobian(f: Tensor, by: Sequence[Tensor], at_once: bool = True) -> Tensor:
    """Derivatives [F, P] of the numbers of `f` by those of some tensors.

    Args:
        at_once: By one vectorised call; some operations and hooks don't allow it.
    """
    if not f.requires_grad:
        return f.new_zeros(f.numel(), sum(t.numel() for t in by))
    ones = torch.eye(f.numel(), dtype=f.dtype, device=f.device).view(-1, *f.shape)

    def columns(vectors: Tensor, number: int, **options: Any) -> Tensor:
        grads = torch.autograd.grad(f, by, vectors, True, allow_unused=True, **options)
        blocks = []
        for g, t in zip(grads, by, strict=True):
            zero = f.new_zeros(number, t.numel())  # of what it does not depend on
            blocks.append(zero if g is None else g.to_dense().reshape(number, -1))
        return torch.cat(blocks, 1).detach()

    if at_once:
        return columns(ones, len(ones), is_grads_batched=True)
    return torch.cat([columns(one, 1) for one in ones])


# ------------------------------------------------------------------------------------------- layers
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


@dataclass(eq=False)
class Pass:
    """One forward pass."""

    run: Callable[[], Tensor]  # the numbers [F] of the outputs, with their graph
    example: Tensor  # [F], whose number it is
    N: int
    mask: Tensor | None = None  # [N, T], the positions that count


class Twin:
    """Parameters of a network, the layers that hold them, and the factors of these.

    Args:
        model: The model; it is copied.
        params: Key to the model's own parameter, in the order of the vector.
        example_axis: Module name to the axis of its examples.
        plain: Prepares the copy of the model.
        bags: Whether embedding bags are written out.

    Attributes:
        model: The copy, in its precision.
        names: Key to name in the model.
        values: Key to the parameter of the copy.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        example_axis: Mapping[str, int] | None = None,
        plain: Callable[[nn.Module], object] = lambda model: None,
        bags: bool = False,
    ) -> None:
        own = {id(p): name for name, p in model.named_parameters()}
        self.names = {key: own[id(p)] for key, p in params.items()}
        self.model = written_out(copy.deepcopy(model).requires_grad_(False), bags)
        plain(self.model)
        parameters = {key: self.model.get_parameter(name) for key, name in self.names.items()}
        self.values = {key: p.requires_grad_() for key, p in parameters.items()}
        self.example_axis = dict(example_axis or {})

    def __hash__(self) -> int:
        return id(self)

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters."""
        return list(self.values.values())

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
        if is_parametrized(module):  # its bias
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

    def affine_layer(self, key: str) -> str | None:
        """Name of the layer that a parameter belongs to, if it has Kronecker factors."""
        layer = self.layer_of(key)
        return layer.name if layer.roles else None

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
    def _calls(self, b: Pass, use: Use) -> tuple[list[Any], list[Tensor], Tensor]:
        """Inputs and outputs of a module in one forward pass, and the model's output."""
        inputs: list[Any] = []
        outputs: list[Tensor] = []

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            inputs.append(tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)))
            outputs.append(out.clone() if out.requires_grad else out.clone().requires_grad_())
            return outputs[-1].clone()  # what follows may write to it

        handle = self.model.get_submodule(use.path).register_forward_hook(hook, with_kwargs=True)
        try:
            return inputs, outputs, b.run()
        finally:
            handle.remove()

    @cache  # noqa: B019
    def rows(self, b: Pass, use: Use) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each call the inputs `a` [m, N, S, i], derivatives [F, m, N, S, o] of the model's
        output by the outputs, and whether a position counts [N, S].

        A row of inputs is, by definition, the derivative of one output number with respect to its
        row of the weight.
        """
        m, o, i = use.matrix.shape
        inputs, outputs, f = self._calls(b, use)
        of_example = (b.example[:, None] == torch.arange(b.N, device=b.example.device)).view(
            -1, 1, b.N, 1, 1
        )

        def examples_first(t: Tensor, lead: int, *last: int) -> Tensor:
            """[*lead, *positions, *last], the examples somewhere, to [*lead, N, S, *last]; one row
            may be for all.
            """
            t = t.movedim(lead + use.axis, lead)
            t = t.expand(*t.shape[:lead], b.N, *t.shape[lead + 1 :]) if t.shape[lead] == 1 else t
            return t.reshape(*t.shape[:lead], b.N, -1, *last)

        weight = self.model.get_parameter(use.weight).detach().requires_grad_()
        result = []
        for (args, kwargs), out in zip(inputs, outputs, strict=True):
            products = use.evaluate(weight, args, kwargs).movedim(use.channel, 0)[::o]
            by_weight = jacobian(products, [weight]).view(*products.shape, -1)
            a = torch.stack([by_weight[k, ..., use.matrix[k, 0]] for k in range(m)])
            d = jacobian(f, [out]).view(-1, *out.shape)
            d = d.movedim(use.channel if use.channel < 0 else use.channel + 1, -1)
            d = examples_first(d, 1, m, o).movedim(-2, 1) * of_example
            kept = self._counts(use, out, args, kwargs)
            result.append((examples_first(a, 1, i), d, examples_first(kept, 0)))
        return result

    def _counts(self, use: Use, out: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        """Whether a position counts, in the shape of the output without channels."""
        module = self.model.get_submodule(use.path)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return [*args, *kwargs.values()][0] != module.padding_idx
        if isinstance(module, nn.EmbeddingBag):  # a bag of ones is as large as it has entries
            given = {**dict(zip(("input", "offsets"), args, strict=False)), **kwargs}
            given["per_sample_weights"] = None
            ones = torch.ones_like(module.weight)
            last, padding = module.include_last_offset, module.padding_idx
            sizes = embedding_bag(
                weight=ones, mode="sum", include_last_offset=last, padding_idx=padding, **given
            )
            return sizes[:, 0] > 0
        return torch.ones_like(out.movedim(use.channel, -1)[..., 0], dtype=torch.bool)

    def factors_of(
        self,
        uses: Sequence[Use],
        inner: Sequence[tuple[Pass, Tensor]],
        reduce: bool = False,
        ones: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`A = Σ a aᵀ / (number of rows)` and `G = Σ Dᵀ M D`, one example at a time.

        Those of several matrices are on the diagonal of one large matrix.

        Args:
            uses: Places that multiply with the same matrices.
            inner: Of each pass the matrix M [F, F] between the derivatives of the outputs.
            reduce: Average inputs and sum gradients over positions first.
            ones: Append a column of ones to the inputs.
        """
        pairs = []
        for slot in range(max(use.slot + len(use.matrix) for use in uses)):
            here = [use for use in uses if use.slot <= slot < use.slot + len(use.matrix)]
            pairs.append(self._factors_of_matrix(here, slot, inner, reduce, ones))
        A, G = (torch.block_diag(*parts) for parts in zip(*pairs, strict=True))
        return A, G

    def _factors_of_matrix(
        self,
        uses: Sequence[Use],
        slot: int,
        inner: Sequence[tuple[Pass, Tensor]],
        reduce: bool,
        ones: bool,
    ) -> tuple[Tensor, Tensor]:
        A: Any = 0.0
        G: Any = 0.0
        count = 0
        for b, M in inner:
            for n in range(b.N):
                a, D = self._rows_of_example(b, n, uses, slot)
                if ones:
                    a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
                if reduce and len(a):
                    a, D = a.mean(0, keepdim=True), D.sum(1, keepdim=True)
                count += len(a)
                A = A + a.T @ a
                G = G + torch.einsum("fso,fg,gsp->op", D, M, D)
        if all(use.sparse for use in uses):
            A = A.diagonal().diag()
        return A / max(count, 1), G

    def _rows_of_example(
        self, b: Pass, n: int, uses: Sequence[Use], slot: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs [S, i] and derivatives [F, S, o] at the positions that count."""
        o, i = uses[0].matrix.shape[1:]
        inputs, derivatives = [], []
        for use in uses:
            for a, D, kept in self.rows(b, use):
                counts = kept[n]
                if b.mask is not None and b.mask.shape[1] == a.shape[2]:
                    counts = counts & b.mask[n]
                inputs.append(a[slot - use.slot, n, counts])
                derivatives.append(D[:, slot - use.slot, n, counts])
        if not inputs:
            return b.J.new_zeros(0, i), b.J.new_zeros(len(b.example), 0, o)
        return torch.cat(inputs), torch.cat(derivatives, 1)

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

    def kronecker(self, keys: Sequence[str], A: Tensor, G: Tensor) -> Tensor:
        """`G ⊗ A` in the order of a layer's parameters."""
        r, c = self.matrix_places(keys)
        return G[r[:, None], r] * A[c[:, None], c]
