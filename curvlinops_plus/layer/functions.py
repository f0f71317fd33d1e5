"""Functions that multiply with a weight, such as `torch.nn.functional.linear`: what they multiply, and by which rule.

A model may pass its parameters to functions rather than call modules. A call of such a function is a `Product`, and its
`Function`, what the call does apart from its tensors, gives the rule of the module that would do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.layer.rule import AffineRule
from curvlinops_plus.layer.rule_registry import rule_of


@dataclass(frozen=True)
class Function:
    """What a product with a weight is, apart from its tensors.

    Attributes:
        name: Name of the function, "linear" for all matrix products.
        options: Its options, such as stride and padding.
        transposed: Of "linear", whether the parameter is the transpose of the matrix, `y = x W + b`.
        left: Of "linear", whether the matrix stands on the left, `y = W x` with positions on the last axis.

    Example:
        >>> module, rule = LINEAR.module(nn.Parameter(torch.ones(2, 3)), None)
        >>> rule.patterns(module)
        {'weight': 'o i -> o i'}
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    transposed: bool = False
    left: bool = False

    def transpose(self) -> Function | None:
        """The same with the transposed weight; None if there is no such product."""
        return replace(self, transposed=not self.transposed) if self.name == "linear" else None

    def bias_fits(self, weight: slice, bias: slice, size: int) -> bool:
        """Whether these rows of a bias of that size belong to these rows of the weight."""
        if self.transposed or self.name.startswith("conv_transpose"):  # rows of the weight are inputs
            return bias.stop - bias.start == size
        return bias == weight

    @property
    def adds_last(self) -> bool:
        """Whether a vector that is added to the product afterwards is a bias: outputs are on the last axis."""
        return self.name in ("linear", "bilinear") and not self.left

    def module(self, weight: Tensor, bias: Tensor | None) -> tuple[nn.Module, AffineRule]:
        """A module that does the same as a call with these parameters, and its rule.

        Raises:
            ValueError: If the weight has not the shape that the function takes.
        """
        module: nn.Module
        if self.name == "linear":
            if weight.ndim != 2:
                raise ValueError(f"A weight of shape {list(weight.shape)} is no matrix.")
            module, rule = Matrix(weight, bias), MatrixRule(self.transposed, self.left)
        else:
            module = _MODULES[self.name](weight, bias, dict(self.options))
            for local, p in (("weight", weight), ("bias", bias)):
                if p is not None:
                    setattr(module, local, p)
            rule = rule_of(module)
            assert isinstance(rule, AffineRule)
        return module, rule


LINEAR = Function("linear")


class Matrix(nn.Module):
    """A weight, whichever way round, and a bias or None: what stands for products that functions compute."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias


class MatrixRule(LinearRule):
    """Products with a matrix in functions: `x Wᵀ + b`, `x W + b`, or `W x`.

    A call may read some rows of the parameter: a part of the outputs, or of the inputs if it is transposed. The other
    entries of its rows are zero.

    Args:
        transposed: Whether the parameter is `[i, o]`.
        left: Whether the matrix stands on the left of `x [B, *, i, positions]`.
        rows: The rows of the parameter that are read, and their number; None for all.

    Example:
        >>> rule = MatrixRule().at(slice(1, 3), 4)
        >>> rule.grads(Matrix(nn.Parameter(torch.ones(4, 3)), None), torch.ones(1, 1, 2))
        tensor([[[[0., 1., 1., 0.]]]])
    """

    def __init__(self, transposed: bool = False, left: bool = False, rows: tuple[slice, int] | None = None) -> None:
        self.transposed, self.left, self.read_rows = transposed, left, rows

    def at(self, rows: slice, total: int) -> MatrixRule:
        """The rule of a call that reads only some rows of the parameter."""
        whole = rows.stop - rows.start == total
        return self if whole else MatrixRule(self.transposed, self.left, (rows, total))

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """`W` or its transpose, then the bias as one more column."""
        weight = {"weight": "i o -> o i" if self.transposed else "o i -> o i"}
        return weight if module.bias is None else {**weight, "bias": "o -> o 1"}

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *positions, i] -> [B, S, i]
        """The input, positions in one dimension; zeros where it does not meet the rows that are read."""
        a = super().inputs(module, x.mT if self.left else x)
        return self._pad(a) if self.transposed else a

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, *positions, o] -> [V, B, S, o]
        """The output gradient, positions in one dimension; zeros for rows that are not read."""
        rows = super().grads(module, g.mT if self.left else g)
        return rows if self.transposed else self._pad(rows)

    def _pad(self, t: Tensor) -> Tensor:
        if self.read_rows is None:
            return t
        rows, total = self.read_rows
        return F.pad(t, (rows.start, total - rows.stop))


@dataclass(frozen=True, eq=False)
class Product:
    """A call of a function, read as a product with a weight.

    Attributes:
        function: The function with its options.
        inputs: What the weight is multiplied with.
        weight: The weight.
        bias: What is added, None for nothing.
    """

    function: Function
    inputs: tuple[Tensor, ...]
    weight: Tensor
    bias: Tensor | None = None


def products(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Product]:
    """How a call can be read as a product: in two ways for `A @ B`, of which either may be the weight.

    Example:
        >>> x, W = torch.ones(5, 3), torch.ones(3, 2)
        >>> [(p.function.transposed, p.function.left) for p in products(torch.matmul, (x, W), {})]
        [(True, False)]
        >>> products(torch.add, (x, x), {})
        []
    """
    read = _READERS.get(function)
    if read is None:
        return []
    try:
        found = read(*args, **kwargs)
    except TypeError:  # arguments that this signature does not have
        return []
    return [p for p in found if all(isinstance(t, Tensor) for t in (*p.inputs, p.weight))]


def added_bias(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The summands of `h + b`, either of which may be the bias; nothing for other calls."""
    if function not in _ADDITIONS or kwargs or len(args) != 2 or not all(isinstance(t, Tensor) for t in args):
        return []
    return [(args[0], args[1]), (args[1], args[0])]


# ---------------------------------------------------------------------------------------------------------- functions
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Product]:
    return [Product(LINEAR, (input,), weight, bias)] if input.ndim > 1 else []


def _matmul(input: Tensor, other: Tensor) -> list[Product]:
    found = []
    if input.ndim > 1 and other.ndim == 2:
        found.append(Product(Function("linear", transposed=True), (input,), other))
    if input.ndim == 2 and other.ndim > 2:
        found.append(Product(Function("linear", left=True), (other,), input))
    return found


def _mm(input: Tensor, mat2: Tensor) -> list[Product]:
    return _matmul(input, mat2)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> list[Product]:
    if beta != 1 or alpha != 1 or input.ndim != 1:
        return []
    return [Product(Function("linear", transposed=True), (mat1,), mat2, input)]


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Product]:
    return [Product(Function("bilinear"), (input1, input2), weight, bias)] if input1.ndim > 1 else []


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> list[Product]:
    if max_norm is not None or input.ndim == 0:  # it would overwrite rows
        return []
    if padding_idx is not None:
        padding_idx %= len(weight)
    return [Product(Function("embedding", (("padding_idx", padding_idx),)), (input,), weight)]


def _index(table: Tensor, index: Any) -> list[Product]:
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.ndim == 0:
        return []
    if table.ndim != 2:
        return []
    tokens = torch.where(index < 0, index + len(table), index)
    return [Product(Function("embedding", (("padding_idx", None),)), (tokens,), table)]


def _convolution(name: str, *order: str) -> Callable[..., list[Product]]:
    """A reader of calls whose options come in this order."""
    n = int(name[-2])

    def read(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> list[Product]:
        if input.ndim != n + 2:
            return []
        defaults = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
        given = defaults | dict(zip(order, args)) | kwargs
        each = ((key, _sizes(given[key], n)) for key in order if key != "groups")
        return [Product(Function(name, (*each, ("groups", given["groups"]))), (input,), weight, bias)]

    return read


def _sizes(value: Any, n: int) -> Any:
    """An option of a convolution, a string or one number for each dimension."""
    if isinstance(value, str):
        return value
    values = tuple(int(v) for v in value) if isinstance(value, Sequence) else (int(value),)
    return values * n if len(values) == 1 else values


_READERS: dict[Any, Callable[..., list[Product]]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    F.bilinear: _bilinear,
    F.embedding: _embedding,
    Tensor.__getitem__: _index,
    **{
        getattr(F, name): _convolution(name, "stride", "padding", "dilation", "groups")
        for name in ("conv1d", "conv2d", "conv3d")
    },
    **{
        getattr(F, name): _convolution(name, "stride", "padding", "output_padding", "groups", "dilation")
        for name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    },
}

_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}

_CONVOLUTIONS = {
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "conv3d": nn.Conv3d,
    "conv_transpose1d": nn.ConvTranspose1d,
    "conv_transpose2d": nn.ConvTranspose2d,
    "conv_transpose3d": nn.ConvTranspose3d,
}


def _make_convolution(name: str) -> Callable[[Tensor, Tensor | None, dict[str, Any]], nn.Module]:
    def make(weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> nn.Module:
        first, second = weight.shape[:2]
        groups = options["groups"]
        channels = (first, second * groups) if "transpose" in name else (second * groups, first)
        kernel = tuple(weight.shape[2:])
        return _CONVOLUTIONS[name](*channels, kernel, bias=bias is not None, device="meta", **options)

    return make


#: Name of a function to what makes a module of a weight, a bias and options; the module's own parameters are replaced.
_MODULES: dict[str, Callable[[Tensor, Tensor | None, dict[str, Any]], nn.Module]] = {
    "bilinear": lambda weight, bias, options: nn.Bilinear(
        weight.shape[1], weight.shape[2], weight.shape[0], bias=bias is not None, device="meta"
    ),
    "embedding": lambda weight, bias, options: nn.Embedding(weight.shape[0], weight.shape[1], device="meta", **options),
    **{name: _make_convolution(name) for name in _CONVOLUTIONS},
}
