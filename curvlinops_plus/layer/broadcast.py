"""Tensors that are the same for all examples, where functions broadcast them over the examples:
`x + t`, `x * t`, `t.expand(N, ...)`, scale and shift of norms, biases of products and attention.

Such a table `t` is a parameter, or computed from parameters alone. What the function returns is
linear in it, so that the gradient of one example follows from the gradient `g` at what it returned:
`Σ g` for a sum, `Σ g x` for a product, over all axes along which `t` was broadcast but that of the
examples. From the table it goes back to the parameters by autograd, one row for each example.
Nothing is run again: dropout elsewhere in the model does not matter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.layer.rule import LayerRule
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
    """

    table: Tensor
    shape: Sequence[int]
    products: Products
    inputs: Sequence[Tensor] = ()
    behind: int = 0

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


@dataclass(frozen=True, eq=False)
class TableOfPass:
    """A table in a recorded pass.

    Attributes:
        read: The function that reads it.
        axis: The axis of the examples.
        positions: Of each example on that axis.
        source: The parameter that it is or was computed from, which has its graph.
        resumed: Makes a context in which what ran in the pass runs as it did: activation
            checkpointing runs parts of the model again for that graph.
    """

    read: TableRead
    axis: int
    positions: int
    source: Tensor
    resumed: Callable[[], AbstractContextManager[Any]] = nullcontext

    def gradients(
        self, inputs: Sequence[Tensor], g: Tensor
    ) -> Tensor:  # g: [V, B * positions, *out] -> [V, B, *source]
        """Gradients of the parameter for each example."""
        table = self.read.table
        sizes = self.read.sizes
        del sizes[self.axis]
        sums = []
        for g_v in g:
            product = self.read.products(g_v, *inputs)
            sums.append(product.sum_to_size([len(product), *sizes]))
        J = torch.stack(sums).unflatten(1, (-1, self.positions)).sum(2)
        J = J.view(*J.shape[:2], *table.shape)
        if table is self.source:
            return J
        with self.resumed():
            return _pulled_back(table, self.source, J)


def _pulled_back(table: Tensor, source: Tensor, J: Tensor) -> Tensor:
    """Gradients of a parameter from those of a table that was computed from it, `[V, B, *table] ->
    [V, B, *source]`; the graph stays.
    """
    rows = J.flatten(0, 1).to(table.dtype)

    def gradient(row: Tensor, **options: Any) -> Tensor:
        (back,) = torch.autograd.grad(table, source, row, retain_graph=True, **options)
        return back.to_dense() if back.is_sparse else back

    try:
        with warnings.catch_warnings():
            # vmap takes a loop there, which is correct.
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            back = gradient(rows, is_grads_batched=True)
    except RuntimeError:  # an operation that can't be vectorised
        back = torch.stack([gradient(row) for row in rows])
    return at_least_float32(back).view(*J.shape[:2], *source.shape)


class BroadcastRule(LayerRule):
    """Parameters that functions broadcast over the examples, themselves or in tables.

    Args:
        tables: Of a recorded call: the parameter's name in its module to the table that it is in.

    Example:
        >>> w, x = torch.ones(3, requires_grad=True), torch.tensor([[1.0, 2, 3], [4, 5, 6]])
        >>> (read,), _ = table_reads(torch.mul, (2 * w, x), {}, 2 * w * x)
        >>> rule = BroadcastRule({"weight": TableOfPass(read, 0, 1, w)})
        >>> rule.per_example_grads(nn.Module(), (x,), {}, torch.ones(1, 2, 3))["weight"]
        tensor([[[ 2.,  4.,  6.],
                 [ 8., 10., 12.]]])
    """

    channels_first: ClassVar[bool | None] = None

    def __init__(self, tables: dict[str, TableOfPass] | None = None) -> None:
        self.tables = tables or {}

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B * positions, *out] -> {name: [V, B, *shape]}
        """Gradients of each example, from what is multiplied with the tables, the examples first.

        Cost: one pass over `g` for each; of tables that were computed, a backward pass of their
        computation for each example.
        """
        inputs = [at_least_float32(t) for t in args]
        g = at_least_float32(g.detach())
        with GradMode(False), full_precision(g.device.type):
            return {name: table.gradients(inputs, g) for name, table in self.tables.items()}


# ------------------------------------------------------------------------------ functions that read
def table_reads(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> list[list[TableRead]]:
    """Tensors that a call may have broadcast, in alternative ways: of `a + b` either may be the
    table.

    Example:
        >>> x = torch.ones(5, 3)
        >>> [len(reads) for reads in table_reads(torch.mul, (x, x), {}, x * x)]
        [1, 1]
        >>> table_reads(torch.matmul, (x, x.T), {}, x @ x.T)
        []
    """
    reader = _READERS_OF_TABLES.get(function)
    if reader is None or not isinstance(output, Tensor):
        return []
    try:
        ways = reader(output, *args, **kwargs)
    except TypeError:  # arguments that this signature does not have
        return []
    reads_of_ways = []
    for reads in ways:
        tensors = [t for read in reads for t in (read.table, *read.inputs)]
        if tensors and all(isinstance(t, Tensor) for t in tensors):
            reads_of_ways.append(reads)
    return reads_of_ways


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


# Linear in the numerator alone.
def _divided(output: Tensor, input: Any, other: Any, *, out: None = None) -> Any:
    denominator = _beside_output(other, output)
    return [[TableRead(input, output.shape, torch.div, [denominator])]]


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
