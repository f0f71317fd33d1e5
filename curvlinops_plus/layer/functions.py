"""Functions that multiply with a weight, such as `torch.nn.functional.linear`: what they multiply,
and by which rule.

A model may pass its parameters to functions rather than call modules. A call of such a function is
a `AffineCall`, and its `Function`, what the call does apart from its tensors, gives the rule of the
module that would do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.layer.experts import StackRule
from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.layer.recurrent_functions import recurrent_module
from curvlinops_plus.layer.registry import rule_of
from curvlinops_plus.layer.rule import LayerRule


@dataclass(frozen=True)
class Function:
    """What a product with a weight is, apart from its tensors.

    Attributes:
        name: Name of the function, "linear" for all matrix products, "bias" for vectors that are
            added, "broadcast" for what is broadcast over examples in any way; of one that runs a
            recurrent layer the name of its type, such as "LSTM".
        options: Its options, such as stride and padding; of "broadcast" where that is.
        transposed: Of "linear", whether the parameter is the transpose of the matrix, `y = x W +
            b`.
        stacked: Of "linear" and "bias", whether the parameter is a stack, of which each row meets
            one matrix or vector.

    Example:
        >>> module, rule = LINEAR.module({"weight": nn.Parameter(torch.ones(2, 3))})
        >>> rule.patterns(module)
        {'weight': 'o i -> o i'}
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    transposed: bool = False
    stacked: bool = False

    def transpose(self) -> Function | None:
        """The same with the transposed weight; None if there is no such product."""
        return replace(self, transposed=not self.transposed) if self.name == "linear" else None

    @property
    def is_recurrent(self) -> bool:
        """Whether it runs a recurrent layer, all of whose weights it reads."""
        return self.name.removesuffix("Cell") in ("LSTM", "GRU", "RNN")

    def module(self, params: Mapping[str, Tensor]) -> tuple[nn.Module, LayerRule]:
        """A module that does the same as a call with these parameters, by its own names, and its
        rule.

        Raises:
            ValueError: If the weight has not the shape that the function takes.
        """
        if self.is_recurrent:
            module = recurrent_module(self.name, dict(self.options), params)
            return module, rule_of(module)
        weight = params.get("weight")
        bias = params.get("bias")
        if self.stacked:
            if (weight is not None and weight.ndim != 3) or (bias is not None and bias.ndim != 2):
                raise ValueError("Expected a stack of matrices, with a stack of vectors or none.")
            return Projection(weight, bias), StackRule(
                self.transposed, "columns" in dict(self.options)
            )
        if self.name in ("linear", "bias"):
            if weight is not None and weight.ndim != 2:
                raise ValueError(f"A weight of shape {list(weight.shape)} is no matrix.")
            return Projection(weight, bias), MatrixRule(self.transposed)
        assert weight is not None
        options: dict[str, Any] = {**dict(self.options), "device": "meta"}
        if self.name == "embedding":
            vocabulary, dim = weight.shape
            module = nn.Embedding(vocabulary, dim, **options)
        else:
            kind = getattr(nn, self.name.replace("conv", "Conv"))
            out_channels, in_channels, *kernel = weight.shape
            # Each group sees its part of the input's channels.
            in_channels *= options["groups"]
            module = kind(in_channels, out_channels, kernel, bias=bias is not None, **options)
        module.weight = weight
        if bias is not None:
            module.bias = bias
        return module, rule_of(module)


LINEAR = Function("linear")
BIAS = Function("bias")
TRANSPOSED = Function("linear", transposed=True)


class Projection(nn.Module):
    """A weight, whichever way round, and a bias, or one of them: what stands for products that
    functions compute.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """The product with a weight `[o, i]`."""
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


class MatrixRule(LinearRule):
    """Products with a matrix in functions: `x Wᵀ + b` or `x W + b`.

    A call may read some rows of the parameter: a part of the outputs, or of the inputs if it is
    transposed. The other entries of its rows are zero.

    Args:
        transposed: Whether the parameter is `[i, o]`.
        rows: The rows of the parameter that are read, and their number; None for all.

    Example:
        >>> rule = MatrixRule().at(slice(1, 3), 4)
        >>> rule.grads(Projection(nn.Parameter(torch.ones(4, 3)), None), torch.ones(1, 1, 2))
        tensor([[[[0., 1., 1., 0.]]]])
    """

    def __init__(self, transposed: bool = False, rows: tuple[slice, int] | None = None) -> None:
        self.transposed = transposed
        self.read_rows = rows

    def at(self, rows: slice, total: int) -> MatrixRule:
        """The rule of a call that reads only some rows of the parameter."""
        if rows.stop - rows.start == total:
            return self
        return type(self)(self.transposed, (rows, total))

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *positions, i] -> [B, S, i]
        """The input, positions in one dimension; zeros where it does not meet the rows that are
        read.
        """
        a = super().inputs(module, x)
        return self._pad(a) if self.transposed else a

    def grads(
        self, module: nn.Module, g: Tensor
    ) -> Tensor:  # [V, B, *positions, o] -> [V, B, S, o]
        """The output gradient, positions in one dimension; zeros for rows that are not read."""
        rows = super().grads(module, g)
        return rows if self.transposed else self._pad(rows)

    def _pad(self, t: Tensor) -> Tensor:
        if self.read_rows is None:
            return t
        rows, total = self.read_rows
        return F.pad(t, (rows.start, total - rows.stop))


@dataclass(frozen=True, eq=False)
class AffineCall:
    """A call of a function, read as a product with a weight, or as the addition of a vector.

    Attributes:
        function: The function with its options.
        input: What the weight is multiplied with, or the vector added to.
        weight: The weight; None of an addition.
        bias: What is added; None for nothing.
        of_stack: Whether the weight is a whole stack of matrices.
        ends: Of such a weight, the number of rows up to each matrix's last one; None if the first
            axis of the input says which matrix a row meets.
    """

    function: Function
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None = None
    of_stack: bool = False
    ends: Tensor | None = None


def affine_calls(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[AffineCall]:
    """How a call can be read as a product; in two ways for `a + b`, of which either may be the
    vector.

    Example:
        >>> x, W = torch.ones(5, 3), torch.ones(3, 2)
        >>> [p.function.transposed for p in affine_calls(torch.matmul, (x, W), {})]
        [True]
        >>> affine_calls(torch.mul, (x, x), {})
        []
    """
    reader = _READERS.get(function) or _READERS.get(getattr(function, "_qualified_op_name", None))
    if reader is None:
        return []
    try:
        readings = reader(*args, **kwargs)
    except TypeError:  # arguments that this signature does not have
        return []
    return [
        reading
        for reading in readings
        if isinstance(reading.input, Tensor) and isinstance(reading.weight, (Tensor, type(None)))
    ]


# One reader for each signature: which argument is what.
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[AffineCall]:
    return [AffineCall(LINEAR, input, weight, bias)] if input.ndim > 1 else []


# x @ W
def _matmul(
    input: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None
) -> list[AffineCall]:
    weight = mat2 if other is None else other
    if weight is not None and input.ndim == weight.ndim == 3 and len(input) == len(weight):
        return _bmm(input, weight)
    if weight is None or input.ndim < 2 or weight.ndim != 2:
        return []
    return [AffineCall(TRANSPOSED, input, weight)]


# mat1 @ mat2 + input
def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> list[AffineCall]:
    plain = beta == 1 and alpha == 1 and input.ndim == 1
    return [AffineCall(TRANSPOSED, mat1, mat2, input)] if plain else []


# Either side may be the vector, or one for each row.
def _add(input: Any, other: Any) -> list[AffineCall]:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return []
    return [
        AffineCall(BIAS, a, None, b)
        for a, b in ((input, other), (other, input))
        if (b.ndim == 1 < a.ndim and a.shape[-1] == len(b)) or (b.ndim == 2 and a.shape == b.shape)
    ]


# Each row with a matrix of its own, x[m] @ W[m] or W[m] @ x[m], or the rows for each matrix.
def _bmm(input: Tensor, mat2: Tensor) -> list[AffineCall]:
    columns = Function("linear", (("columns", True),))
    return [
        AffineCall(TRANSPOSED, input, mat2),
        AffineCall(columns, mat2, input),
        AffineCall(TRANSPOSED, input, mat2, of_stack=True),
    ]


# Rows up to offs[k] with the k-th matrix.
def _grouped_mm(
    input: Tensor, weight: Tensor, offs: Tensor | None = None, bias: None = None, **options: Any
) -> list[AffineCall]:
    if input.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None:
        return []
    return [AffineCall(TRANSPOSED, input, weight, of_stack=True, ends=offs)]


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> list[AffineCall]:
    # With `max_norm` it overwrites rows of the weight.
    if max_norm is not None or input.ndim == 0:
        return []
    if padding_idx is not None:
        padding_idx %= len(weight)
    return [AffineCall(Function("embedding", (("padding_idx", padding_idx),)), input, weight)]


def _convolution(name: str) -> Callable[..., list[AffineCall]]:
    """The reader of `conv1d`, `conv2d` or `conv3d`."""
    n = int(name[-2])

    def sizes(value: Any) -> Any:
        """A string, or one number for each dimension."""
        if isinstance(value, str):
            return value
        values = value if isinstance(value, Sequence) else (value,)
        values = tuple(map(int, values))
        return values * n if len(values) == 1 else values

    def read(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> list[AffineCall]:
        if input.ndim != n + 2:
            return []
        options = {
            "stride": sizes(stride),
            "padding": sizes(padding),
            "dilation": sizes(dilation),
            "groups": groups,
        }
        return [AffineCall(Function(name, tuple(options.items())), input, weight, bias)]

    return read


_READERS: dict[Any, Callable[..., list[AffineCall]]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), _add),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    # By names: they are not in all versions, or in other libraries.
    **{getattr(F, name): _grouped_mm for name in ("grouped_mm",) if hasattr(F, name)},
    **{getattr(torch, name): _grouped_mm for name in ("_grouped_mm",) if hasattr(torch, name)},
    "transformers::grouped_mm_fallback": _grouped_mm,
    **{getattr(F, name): _convolution(name) for name in ("conv1d", "conv2d", "conv3d")},
}
