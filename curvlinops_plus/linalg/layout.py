"""A group of parameters, for example the weight and bias of a layer, as one matrix.

The pattern of each parameter says how, in the words of einops: `"o i h w -> o (i h w)"` is the
weight of a convolution with one row per output channel, `"o -> o 1"` its bias as one more column.
On the left is the parameter as PyTorch stores it, on the right are the axes `rows cols` of the
matrix, or `batch rows cols` (groups of a convolution: `"(g o) i h w -> g o (i h w)"`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

import torch
from einops import EinopsError, rearrange
from torch import Tensor

Sizes = Mapping[str, int]


class Layout:
    """How a group of parameters makes one matrix `[rows, cols]` or `[batch, rows, cols]`, and its
    row-major vector.

    Columns of several parameters stand side by side, in the order of the patterns.

    Args:
        patterns: Parameter name to pattern.
        shapes: Parameter name to shape.
        sizes: Sizes of axes that the shapes leave open, for example `{"g": 4}`.

    Raises:
        ValueError: If a pattern cannot be read, does not fit its shape, or the rows of the
            parameters differ.

    Example:
        >>> patterns = {"weight": "o i -> o i", "bias": "o -> o 1"}
        >>> layout = Layout(patterns, {"weight": (2, 3), "bias": (2,)})
        >>> layout.matrix_shape
        (2, 4)
        >>> v = layout.join({"weight": torch.zeros(2, 3, 1), "bias": torch.ones(2, 1)})
        >>> v.T
        tensor([[0., 0., 0., 1., 0., 0., 0., 1.]])
        >>> {name: tuple(t.shape) for name, t in layout.split(v).items()}
        {'weight': (2, 3, 1), 'bias': (2, 1)}
    """

    def __init__(
        self,
        patterns: Mapping[str, str],
        shapes: Mapping[str, Sequence[int]],
        sizes: Sizes | None = None,
    ) -> None:
        if not patterns or patterns.keys() != shapes.keys():
            raise ValueError(
                "Expected one pattern and one shape per parameter, got patterns of "
                f"{list(patterns)} and shapes of {list(shapes)}."
            )
        self.patterns = dict(patterns)
        self.shapes = {name: torch.Size(shapes[name]) for name in patterns}
        self.sizes = dict(sizes or {})
        self._parts = [
            _Part(name, Pattern(patterns[name]), shape, self.sizes)
            for name, shape in self.shapes.items()
        ]
        heights = {part.matrix_shape[:-1] for part in self._parts}
        if len(heights) > 1:
            raise ValueError(
                "Expected parameters of one layout to have the same rows, got matrices "
                f"{[part.matrix_shape for part in self._parts]} from patterns {self.patterns}."
            )
        self._widths = [part.matrix_shape[-1] for part in self._parts]
        self._is_vector = len(self._parts) == 1 and self._parts[0].pattern.keeps_order
        #: `(rows, cols)` or `(batch, rows, cols)`.
        self.matrix_shape: tuple[int, ...] = (*heights.pop(), sum(self._widths))
        #: The number of entries of the matrix.
        self.dim: int = prod(self.matrix_shape)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of their columns."""
        return list(self.patterns)

    def __repr__(self) -> str:
        return f"Layout({self.patterns} -> {list(self.matrix_shape)})"

    def gather(self, parameters: Sequence[Tensor]) -> Tensor:
        """The row-major vectors `[K, dim]` of the matrix, from the parameters in their order, each
        `[K, *shape]` or `[K, size]`.

        A view if there is one parameter whose axes keep their order.
        """
        K = len(parameters[0])
        if self._is_vector:
            return parameters[0].reshape(K, self.dim)
        matrices = [part.matrices(t) for part, t in zip(self._parts, parameters, strict=True)]
        # Joined first: parameters that are stored channels-last make one that is.
        return torch.cat(matrices, dim=-1).reshape(K, self.dim)

    def scatter(self, vectors: Tensor) -> list[Tensor]:  # [K, dim] -> each [K, size]
        """The parameters of row-major vectors, in their order: undoes `gather`."""
        if self._is_vector:
            return [vectors]
        K = len(vectors)
        matrices = vectors.reshape(K, *self.matrix_shape).split_with_sizes(self._widths, -1)
        return [
            part.parameters(columns).reshape(K, part.shape.numel())
            for part, columns in zip(self._parts, matrices, strict=True)
        ]

    def join(self, tree: Mapping[str, Tensor]) -> Tensor:  # {name: [*shape, K]} -> [dim, K]
        """As `gather`, with the axis of columns last; `tree` may hold other parameters too."""
        return self.gather([tree[name].movedim(-1, 0) for name in self.patterns]).T

    def split(self, v: Tensor) -> dict[str, Tensor]:  # [dim, K] -> {name: [*shape, K]}
        """The parameters of row-major vectors, with the axis of columns last: undoes `join`."""
        tree = {}
        for part, t in zip(self._parts, self.scatter(v.T), strict=True):
            tree[part.name] = t.reshape(len(t), *part.shape).movedim(0, -1)
        return tree

    def views(self, v: Tensor) -> dict[str, Tensor]:  # [dim] -> {name: [*shape]}
        """The parameters of a row-major vector as views; axes that the matrix takes apart stay
        apart.

        Example:
            >>> layout = Layout({"w": "(g o) i -> g o i"}, {"w": (6, 2)}, {"g": 3})
            >>> layout.views(torch.zeros(12))["w"].shape
            torch.Size([3, 2, 2])
        """
        columns = v.view(1, *self.matrix_shape).split_with_sizes(self._widths, -1)
        return {
            part.name: part.rearrange(M, part.pattern.matrix, part.axes_apart)[0]
            for part, M in zip(self._parts, columns, strict=True)
        }


class Pattern:
    """How one parameter makes a matrix: `parameter -> rows cols` in the words of einops.

    Attributes:
        text: The pattern.
        parameter: Its left side: the parameter as it is stored.
        matrix: Its right side.
        axes: Axes of the parameter; several names in parentheses are one.

    Example:
        >>> pattern = Pattern("(g o) i -> g o i")
        >>> pattern.axes, pattern.names, pattern.sizes((6, 2)), pattern.transposed
        (['(g o)', 'i'], ['g', 'o', 'i'], {'i': 2}, 'i o g')
    """

    def __init__(self, text: str) -> None:
        self.text = text
        parameter, _, matrix = text.partition("->")
        self.parameter = parameter.strip()
        self.matrix = matrix.strip()
        self.axes = _axes_of(self.parameter)

    @property
    def names(self) -> list[str]:
        """Names of the parameter's axes, one by one."""
        return _names_of(self.parameter)

    def sizes(self, shape: Sequence[int], sizes: Sizes | None = None) -> dict[str, int]:
        """Sizes of axes: those that stand by themselves as `shape` says, others of the pattern as
        `sizes` says.
        """
        alone = {axis: n for axis, n in zip(self.axes, shape) if axis.isidentifier()}
        return {name: n for name, n in (sizes or {}).items() if name in self.names} | alone

    @property
    def transposed(self) -> str:
        """The right side of the transposed matrix."""
        return " ".join(reversed(_axes_of(self.matrix)))

    @property
    def keeps_order(self) -> bool:
        """Whether the row-major vector of the matrix is that of the parameter."""
        return self.names == _names_of(self.matrix)


class _Part:
    """One parameter and its columns of the matrix."""

    def __init__(self, name: str, pattern: Pattern, shape: torch.Size, sizes: Sizes) -> None:
        self.name = name
        self.pattern = pattern
        self.shape = shape
        self.sizes = pattern.sizes(shape, sizes)
        self.axes_apart = " ".join(pattern.names)
        try:
            matrix = self.matrices(torch.empty(1, *shape, device="meta"))
            self.parameters(matrix)
        except (EinopsError, ValueError) as error:
            raise ValueError(
                f'Pattern "{pattern.text}" of parameter "{name}" with shape {list(shape)}: {error}'
            ) from error
        self.matrix_shape = tuple(matrix.shape[1:])
        if len(self.matrix_shape) not in (2, 3):
            raise ValueError(
                f'Pattern "{pattern.text}": expected "rows cols" or "batch rows cols" on the right.'
            )

    # `k` is not used for an axis of patterns: `k0` is the axis of vectors.

    def matrices(self, t: Tensor) -> Tensor:  # [K, *shape] or [K, size] -> [K, *matrix]
        stored = t.reshape(len(t), *self.shape)
        return self.rearrange(stored, self.pattern.parameter, self.pattern.matrix)

    def parameters(self, M: Tensor) -> Tensor:  # [K, *matrix] -> [K, *shape]
        return self.rearrange(M, self.pattern.matrix, self.pattern.parameter)

    def rearrange(self, t: Tensor, before: str, after: str) -> Tensor:
        return rearrange(t, f"k0 {before} -> k0 {after}", **self.sizes)


def _axes_of(side: str) -> list[str]:
    return re.findall(r"\([^()]*\)|\S+", side)


def _names_of(side: str) -> list[str]:
    return re.findall(r"[^\W\d]\w*", side)
