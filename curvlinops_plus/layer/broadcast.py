"""Tensors that are the same for all examples, where functions broadcast them over the examples:
`x + t`, `x * t`, `t.expand(N, ...)`, scale and shift of norms, biases of products and attention,
weights that are computed.

Such a table `t` is a parameter, or computed from parameters alone. The gradient of one example
follows from the gradient `g` at what the function returned:
`Σ g` for a sum, `Σ g x` for a product, `-Σ g x / t²` for a denominator, over all axes along which
`t` was broadcast but that of the examples; `Σ g xᵀ` over positions for a weight. From the table it
goes back to the parameters by autograd, one row for each example. Nothing is run again: dropout
elsewhere in the model does not matter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.layer.functions import AffineCall, affine_calls
from curvlinops_plus.layer.replay import RerunError, in_chunks
from curvlinops_plus.layer.rule import LayerRule, flat_pattern
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.linalg.precision import full_precision

# From the gradient of one vector at the output and the inputs, the examples first.
Products = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class TableRead:
    """A tensor that a function broadcasts, if it is a table.

    Attributes:
        table: The tensor.
        shape: That of the output, to which it is broadcast.
        products: What its gradient is the sum of.
        inputs: What else that depends on.
        behind: Number of axes of the output behind those of the table.
        own_block: Whether parameters that are read in such ways alone have a block of their own;
            else they stay in that of their module.
    """

    table: Tensor
    shape: Sequence[int]
    products: Products
    inputs: Sequence[Tensor] = ()
    behind: int = 0
    own_block: bool = True

    @property
    def sizes(self) -> list[int]:
        """The table's shape with 1 for each axis along which it is broadcast."""
        before = len(self.shape) - self.table.ndim - self.behind
        return [*[1] * before, *self.table.shape, *[1] * self.behind]

    def example_axes(self, num_examples: int, is_ragged: bool = False) -> list[int]:
        """The axes along which it may be broadcast over examples.

        The first axis may carry several positions of each example, such as windows of an image.

        Args:
            is_ragged: It has rows of the examples, and not as many of each, one after the other.

        Example:
            >>> read = TableRead(torch.ones(4, 3), (5, 4, 3), lambda g: g)
            >>> read.example_axes(5), read.example_axes(4)
            ([0], [])
        """
        axes = []
        for axis, (before, size) in enumerate(zip(self.sizes, self.shape, strict=True)):
            positions, rest = divmod(size, num_examples)
            carries = size and not rest and (positions == 1 or axis == 0)
            if before == 1 and (carries or (axis == 0 and is_ragged)):
                axes.append(axis)
        return axes

    @property
    def channels_first(self) -> bool | None:
        """As for `LayerRule`."""
        return True if self.behind else None

    def gradients(
        self, g: Tensor, inputs: Sequence[Tensor], axis: int, positions: int
    ) -> Tensor:  # g: [V, B * positions, *out] -> [V, B, *table]
        """Gradients of the table for each example, which were on this axis of the output."""
        sizes = self.sizes
        del sizes[axis]
        sums = []
        for g_v in g:
            product = self.products(g_v, *inputs)
            sums.append(product.sum_to_size([len(product), *sizes]))
        J = torch.stack(sums).unflatten(1, (-1, positions)).sum(2)
        return J.view(*J.shape[:2], *self.table.shape)

    def numbers(self, output: int) -> int:
        """About how many numbers the gradient of one example takes on the way, which has so many
        at the output.
        """
        return output


@dataclass(frozen=True, eq=False)
class WeightRead:
    """A weight that a function multiplies with, if it is a table.

    Attributes:
        call: The product.
        shape: That of the output.
    """

    call: AffineCall
    shape: Sequence[int]
    own_block: ClassVar[bool] = False

    @property
    def table(self) -> Any:
        """The weight."""
        return self.call.weight

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What it is multiplied with."""
        return [self.call.input.detach()]

    @property
    def channels_first(self) -> bool:
        """As for `LayerRule`."""
        return self._convolves

    @property
    def _convolves(self) -> bool:
        return self.call.function.name.startswith("conv")

    def example_axes(self, num_examples: int, is_ragged: bool = False) -> list[int]:
        """The axes of the output that may carry the examples; see `TableRead`."""
        number = 1 if self._convolves else len(self.shape) - 1
        axes = []
        for axis, size in enumerate(self.shape[:number]):
            folds = size > 0 and size % num_examples == 0
            if size == num_examples or (axis == 0 and (folds or is_ragged)):
                axes.append(axis)
        return axes

    def gradients(
        self, g: Tensor, inputs: Sequence[Tensor], axis: int, positions: int
    ) -> Tensor:  # g: [V, B * positions, *out] -> [V, B, *weight]
        """Gradients of the weight for each example, by the rule of layers with such a weight."""
        x = inputs[0].unflatten(0, (-1, positions))
        g = g.unflatten(1, (-1, positions))
        module, rule = self.call.function.module({"weight": nn.Parameter(self.table.detach())})
        if not self._convolves:  # all but the last axis are positions
            return rule.per_example_grads(module, (x,), {}, g)["weight"]
        images = (x.flatten(0, 1),)
        J = rule.per_example_grads(module, images, {}, g.flatten(1, 2))["weight"]
        return J.unflatten(1, (-1, positions)).sum(2)

    def numbers(self, output: int) -> int:
        """See `TableRead`: the rows that the weight meets, too, and a gradient for each image."""
        if self.call.function.name == "embedding":
            return output
        o = max(1, self.shape[1 if self._convolves else -1])
        rows = output // o * (self.table.numel() // o)
        images = output // max(1, prod(self.shape[1:])) if self._convolves else 0
        return output + rows + images * self.table.numel()


@dataclass(frozen=True, eq=False)
class TableOfPass:
    """A table in a recorded pass.

    Attributes:
        read: The function that reads it.
        axis: The axis of the examples.
        positions: Of each example on that axis.
        sources: The parameters that it is or was computed from, which have its graph, by their
            names in a module.
        resumed: Makes a context in which what ran in the pass runs as it did: activation
            checkpointing runs parts of the model again for that graph.
        version: The table's, when it was read.
    """

    read: TableRead | WeightRead
    axis: int
    positions: int
    sources: Mapping[str, Tensor]
    resumed: Callable[[], AbstractContextManager[Any]] = nullcontext
    version: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.read.table._version)

    def gradients(
        self, inputs: Sequence[Tensor], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B * positions, *out] -> {name: [V, B, *source]}
        """Gradients of the parameters for each example.

        Raises:
            RerunError: If the table's graph is no more that of what was read.
        """
        table = self.read.table
        J = self.read.gradients(g, inputs, self.axis, self.positions)
        if not self.is_computed:
            return dict.fromkeys(self.sources, J)
        if table._version != self.version:
            raise RerunError(
                f"what is computed from {[*self.sources]} is written into after it was read."
            )
        with self.resumed():
            back = _pulled_back(table, [*self.sources.values()], J)
        return dict(zip(self.sources, back, strict=True))

    @property
    def is_computed(self) -> bool:
        """Whether it has a graph, rather than being a parameter itself."""
        return all(source is not self.read.table for source in self.sources.values())

    def bytes_on_the_way(self, g: Tensor) -> int:  # g: [V, B * positions, *out]
        """About how much memory the gradient of one example takes."""
        output = g[0, : self.positions].numel()
        numbers = self.read.numbers(output) + _COPIES * self.read.table.numel()
        for source in self.sources.values():
            numbers += _COPIES * source.numel()
        return numbers * max(4, g.element_size())


#: How many tensors of the size of a table a pass back through its computation holds.
_COPIES = 4


def _pulled_back(
    table: Tensor, sources: Sequence[Tensor], J: Tensor
) -> list[Tensor]:  # [V, B, *table] -> each [V, B, *source]
    """Gradients of parameters from those of a table that was computed from them; the graph
    stays.
    """
    rows = J.flatten(0, 1).to(table.dtype)

    def gradients(row: Tensor, **options: Any) -> list[Tensor]:
        # Some may only have given a shape or a dtype.
        back = torch.autograd.grad(
            table, sources, row, retain_graph=True, allow_unused=True, **options
        )
        dense = []
        for t, source in zip(back, sources, strict=True):
            if t is None:
                t = row.new_zeros(*row.shape[: row.ndim - table.ndim], *source.shape)
            dense.append(t.to_dense() if t.is_sparse else t)
        return dense

    try:
        with warnings.catch_warnings():
            # vmap takes a loop there, which is correct.
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            back = gradients(rows, is_grads_batched=True)
    except RuntimeError:  # an operation that can't be vectorised
        back = [torch.stack(of_rows) for of_rows in zip(*map(gradients, rows), strict=True)]
    return [
        at_least_float32(t).view(*J.shape[:2], *source.shape)
        for t, source in zip(back, sources, strict=True)
    ]


class BroadcastRule(LayerRule):
    """Parameters that functions broadcast over the examples, themselves or in tables.

    Args:
        tables: Of a recorded call: what it reads of the parameters.

    Example:
        >>> w, x = torch.ones(3, requires_grad=True), torch.tensor([[1.0, 2, 3], [4, 5, 6]])
        >>> (read,), _ = table_reads(torch.mul, (2 * w, x), {}, 2 * w * x)
        >>> rule = BroadcastRule([TableOfPass(read, 0, 1, {"weight": w})])
        >>> rule.per_example_grads(nn.Module(), (x,), {}, torch.ones(1, 2, 3))["weight"]
        tensor([[[ 2.,  4.,  6.],
                 [ 8., 10., 12.]]])
    """

    def __init__(self, tables: Sequence[TableOfPass] = ()) -> None:
        self.tables = tables
        firsts = {table.read.channels_first for table in tables}
        #: By a weight or by channels, if one tells.
        self.channels_first = next(iter(firsts - {None}), None)  # type: ignore[misc]

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """All parameters side by side in one row, also those of children."""
        named = module.named_parameters(remove_duplicate=False)
        return {name: flat_pattern(p.ndim) for name, p in named}

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B * positions, *out] -> {name: [V, B, *shape]}
        """Gradients of each example, from what is multiplied with the tables, the examples first.

        Cost: one pass over `g` for each; of tables that were computed, a backward pass of their
        computation for each example.
        """
        inputs = [at_least_float32(t) for t in args]
        g = at_least_float32(g.detach())
        positions = self.tables[0].positions

        def of_chunk(g: Sequence[Tensor], vectors: slice, examples: slice) -> dict[str, Tensor]:
            rows = slice(examples.start * positions, examples.stop * positions)
            g_rows = g[0][vectors, examples].flatten(1, 2)
            inputs_of_rows = [t[rows] if len(t) == number else t for t in inputs]
            gradients: dict[str, Tensor] = {}
            for table in self.tables:
                for name, J in table.gradients(inputs_of_rows, g_rows).items():
                    gradients[name] = gradients[name] + J if name in gradients else J
            return gradients

        number = g.shape[1]
        pairs = self.max_bytes // max(1, sum(table.bytes_on_the_way(g) for table in self.tables))
        with GradMode(False), full_precision(g.device.type):
            return in_chunks(of_chunk, [g.unflatten(1, (-1, positions))], pairs)


# ------------------------------------------------------------------------------ functions that read
def table_reads(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> list[list[TableRead | WeightRead]]:
    """Tensors that a call may have broadcast, in alternative ways: of `a + b` either may be the
    table.

    Example:
        >>> x = torch.ones(5, 3)
        >>> [len(reads) for reads in table_reads(torch.mul, (x, x), {}, x * x)]
        [1, 1]
        >>> table_reads(torch.exp, (x,), {}, x.exp())
        []
    """
    if not isinstance(output, Tensor):
        return []
    ways: list[Any] = []
    if function in _READERS_OF_TABLES:
        with suppress(TypeError):  # arguments that this signature does not have
            ways = _READERS_OF_TABLES[function](output, *args, **kwargs)
    weights = _weights(function, args, kwargs, output)
    if weights:  # with the bias, if there is one
        ways = [[*weights, *reads] for reads in ways or [[]]]
    reads_of_ways = []
    for reads in ways:
        tensors = [t for read in reads for t in (read.table, *read.inputs)]
        if tensors and all(isinstance(t, Tensor) for t in tensors):
            reads_of_ways.append(reads)
    return reads_of_ways


def _weights(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor
) -> list[WeightRead]:
    """The weight that a call multiplies with, if it does; not a stack of several."""
    reads = []
    for call in affine_calls(function, args, kwargs):
        if call.weight is None or call.of_stack:
            continue
        read = WeightRead(call, output.shape)
        if call.weight.ndim == 2 or read.channels_first:
            reads.append(read)
    return reads


def _beside_output(t: Any, output: Tensor) -> Any:
    """An operand with as many axes as the output, which others are moved in the same way as."""
    return t.detach()[(None,) * (output.ndim - t.ndim)] if isinstance(t, Tensor) else t


# One reader for each signature: the ways in which a call can be read.
def _added(sign: float, other_sign: float, in_place: bool = False) -> Any:
    """The reader of `± input ± other`."""

    def read(
        output: Tensor, input: Any, other: Any, *, alpha: float = 1, out: None = None
    ) -> list[list[TableRead]]:
        # What is written to a view reaches others by its base.
        if in_place and (output._is_view() or not output.requires_grad):
            return []
        factors = ((input, sign), (other, other_sign * alpha))
        operands = factors[1:] if in_place else factors
        return [
            [TableRead(t, output.shape, lambda g, factor=factor: factor * g)]
            for t, factor in operands
        ]

    return read


# other - input
def _subtracted(output: Tensor, input: Any, other: Any, **options: Any) -> Any:
    return _added(1, -1)(output, other, input, **options)


def _multiplied(output: Tensor, input: Any, other: Any, *, out: None = None) -> Any:
    a = _beside_output(input, output)
    b = _beside_output(other, output)
    return [
        [TableRead(input, output.shape, torch.mul, [b])],
        [TableRead(other, output.shape, torch.mul, [a])],
    ]


def _divided(output: Tensor, input: Any, other: Any, *, out: None = None) -> Any:
    a = _beside_output(input, output)
    b = _beside_output(other, output)
    of_denominator: Products = lambda g, a, b: -g * a / b.square()  # noqa: E731
    return [
        [TableRead(input, output.shape, torch.div, [b])],
        [TableRead(other, output.shape, of_denominator, [a, b], own_block=False)],
    ]


def _chosen(output: Tensor, condition: Any, input: Any, other: Any, *, out: None = None) -> Any:
    chosen = _beside_output(condition, output)
    return [
        [TableRead(input, output.shape, torch.mul, [chosen])],
        [TableRead(other, output.shape, torch.mul, [~chosen])],
    ]


# `expand` and `repeat`, which may also put copies behind each other.
def _expanded(output: Tensor, input: Tensor, *sizes: Any, **options: Any) -> Any:
    before = [*[1] * (output.ndim - input.ndim), *input.shape]
    if any(size not in (1, now) for size, now in zip(before, output.shape, strict=True)):
        return []
    return [[TableRead(input, output.shape, torch.clone)]]


# What is added to products.
def _shifted(
    output: Tensor, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **options: Any
) -> list[list[TableRead]]:
    # Behind the channels of a convolution there are positions.
    behind = weight.ndim - 2
    if bias is None or output.ndim != input.ndim:
        return []
    shifted: Products = lambda g, *_: g  # noqa: E731
    return [[TableRead(bias, output.shape, shifted, (), behind)]]


def _norm_of(
    output: Tensor,
    x: Tensor,
    weight: Any,
    bias: Any,
    normalized: Callable[[Tensor], Tensor],
    behind: int = 0,
) -> list[list[TableRead]]:
    """`weight · x̂ + bias`, where so many axes are behind those of weight and bias."""
    inputs = [x.detach()]
    reads = []
    if weight is not None:
        scaled: Products = lambda g, x: g * normalized(x)  # noqa: E731
        reads.append(TableRead(weight, output.shape, scaled, inputs, behind))
    if bias is not None:
        shifted: Products = lambda g, x: g  # noqa: E731
        reads.append(TableRead(bias, output.shape, shifted, inputs, behind))
    return [reads]


def _layer_norm(
    output: Tensor,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return _norm_of(
        output, input, weight, bias, lambda x: F.layer_norm(x, normalized_shape, eps=eps)
    )


def _rms_norm(
    output: Tensor, input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Any:
    return _norm_of(output, input, weight, None, lambda x: F.rms_norm(x, normalized_shape, eps=eps))


def _group_norm(
    output: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    behind = input.ndim - 2
    return _norm_of(
        output, input, weight, bias, lambda x: F.group_norm(x, num_groups, eps=eps), behind
    )


def _batch_norm(
    output: Tensor,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    x = at_least_float32(input.detach())
    mean = running_mean
    var = running_var
    if training:
        # Those of the whole batch, of which the rule may get a part.
        others = [axis for axis in range(x.ndim) if axis != 1]
        var, mean = torch.var_mean(x, others, correction=0)
    return _norm_of(
        output,
        input,
        weight,
        bias,
        lambda x: F.batch_norm(x, mean.to(x), var.to(x), eps=eps),
        input.ndim - 2,
    )


def _instance_norm(
    output: Tensor,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    def normalized(x: Tensor) -> Tensor:
        if use_input_stats:
            return F.instance_norm(x, eps=eps)
        mean = running_mean.to(x)
        return F.instance_norm(x, mean, running_var.to(x), use_input_stats=False, eps=eps)

    return _norm_of(output, input, weight, bias, normalized, input.ndim - 2)


_READERS_OF_TABLES: Any = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _added(1, 1)),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), _added(1, 1, in_place=True)),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), _added(1, -1)),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), _subtracted),
    **dict.fromkeys((Tensor.sub_, Tensor.__isub__), _added(1, -1, in_place=True)),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _multiplied),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), _divided),
    torch.where: _chosen,
    **dict.fromkeys((Tensor.expand, Tensor.expand_as, torch.broadcast_to), _expanded),
    **dict.fromkeys((Tensor.broadcast_to, Tensor.repeat, torch.tile, Tensor.tile), _expanded),
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _layer_norm),
    **dict.fromkeys((F.group_norm, torch.group_norm), _group_norm),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm),
    **dict.fromkeys((F.linear, F.conv1d, F.conv2d, F.conv3d), _shifted),
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}


def mask_to_expand(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What attention adds to its scores, if it has no axis of examples yet, and the sizes that give
    it one; None if there is no such tensor.

    Expanded before the call, it has a gradient for each example, dropout or not.
    """
    if function is not F.scaled_dot_product_attention:
        return None
    query = args[0] if args else kwargs["query"]
    mask = kwargs.get("attn_mask")
    if len(args) > 3:
        mask = args[3]
    if not isinstance(mask, Tensor) or not 2 <= mask.ndim <= query.ndim:
        return None
    sizes = [*[1] * (query.ndim - mask.ndim), *mask.shape]
    return None if sizes[0] != 1 else (mask, [query.shape[0], *sizes[1:]])


def with_mask(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], mask: Tensor
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of attention with another mask."""
    if len(args) > 3:
        return (*args[:3], mask, *args[4:]), kwargs
    return args, {**kwargs, "attn_mask": mask}
