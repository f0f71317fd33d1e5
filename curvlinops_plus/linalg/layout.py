"""A group of parameters, for example the weight and bias of a layer, as ONE matrix.

The pattern of each parameter says how, in the words of einops: `"o i h w -> o (i h w)"` is the weight of a convolution
with one row per output channel, `"o -> o 1"` its bias as one more column. Left is the parameter as PyTorch stores it,
right are the axes `rows cols` of the matrix, or `batch rows cols` (groups of a convolution: `"(g o) i h w -> g o (i h
w)"`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from einops import EinopsError, rearrange
from torch import Tensor


class Layout:
    """How a group of parameters makes one matrix `[rows, cols]` or `[batch, rows, cols]`, and its row-major vector.

    Columns of several parameters stand side by side, in the order of the patterns.

    Args:
        patterns: Parameter name to pattern.
        shapes: Parameter name to shape.
        sizes: Sizes of axes that the shapes leave open, for example `{"g": 4}`.

    Raises:
        ValueError: If a pattern cannot be read, does not fit its shape, or the rows of the parameters differ.

    Example:
        >>> layout = Layout({"weight": "o i -> o i", "bias": "o -> o 1"}, {"weight": (2, 3), "bias": (2,)})
        >>> layout.matrix_shape
        (2, 4)
        >>> v = layout.join({"weight": torch.zeros(2, 3, 1), "bias": torch.ones(2, 1)})
        >>> v.T
        tensor([[0., 0., 0., 1., 0., 0., 0., 1.]])
        >>> {name: tuple(t.shape) for name, t in layout.split(v).items()}
        {'weight': (2, 3, 1), 'bias': (2, 1)}
    """

    def __init__(
        self, patterns: Mapping[str, str], shapes: Mapping[str, Sequence[int]], sizes: Mapping[str, int] | None = None
    ) -> None:
        if not patterns or patterns.keys() != shapes.keys():
            raise ValueError(
                f"Expected one pattern and one shape per parameter, got patterns of {list(patterns)} "
                f"and shapes of {list(shapes)}."
            )
        self.patterns = dict(patterns)
        self.shapes = {name: torch.Size(shapes[name]) for name in patterns}
        self.sizes = dict(sizes or {})
        self._parts = [_Part(name, patterns[name], shape, self.sizes) for name, shape in self.shapes.items()]
        if len({part.matrix[:-1] for part in self._parts}) > 1:
            raise ValueError(
                f"Expected parameters of one layout to have the same rows, got matrices "
                f"{[part.matrix for part in self._parts]} from patterns {self.patterns}."
            )
        self._widths = [part.matrix[-1] for part in self._parts]
        self._is_vector = len(self._parts) == 1 and not self._parts[0].permutes
        #: `(rows, cols)` or `(batch, rows, cols)`.
        self.matrix_shape: tuple[int, ...] = (*self._parts[0].matrix[:-1], sum(self._widths))
        #: The number of entries of the matrix.
        self.dim: int = prod(self.matrix_shape)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of their columns."""
        return list(self.patterns)

    def __repr__(self) -> str:
        return f"Layout({self.patterns} -> {list(self.matrix_shape)})"

    def gather(self, parts: Sequence[Tensor]) -> Tensor:  # each [K, *shape] or [K, size] -> [K, dim]
        """The row-major vectors of the matrix, from the parameters in their order.

        A view if there is one parameter whose axes keep their order.
        """
        if self._is_vector:
            return parts[0].reshape(len(parts[0]), self.dim)
        matrices = [part.matrices(t) for part, t in zip(self._parts, parts, strict=True)]
        return torch.cat(matrices, dim=-1).reshape(len(parts[0]), self.dim)  # channels-last parts make one that is

    def scatter(self, rows: Tensor) -> list[Tensor]:  # [K, dim] -> each [K, size]
        """The parameters of row-major vectors, in their order: undoes `gather`."""
        if self._is_vector:
            return [rows]
        M = rows.reshape(len(rows), *self.matrix_shape).split_with_sizes(self._widths, -1)
        return [
            part.parameters(columns).reshape(len(rows), part.shape.numel())
            for part, columns in zip(self._parts, M, strict=True)
        ]

    def join(self, tree: Mapping[str, Tensor]) -> Tensor:  # {name: [*shape, K]} -> [dim, K]
        """As `gather`, with the axis of columns last; `tree` may hold other parameters too."""
        return self.gather([tree[name].movedim(-1, 0) for name in self.patterns]).T

    def split(self, v: Tensor) -> dict[str, Tensor]:  # [dim, K] -> {name: [*shape, K]}
        """The parameters of row-major vectors, with the axis of columns last: undoes `join`."""
        found = zip(self.shapes.items(), self.scatter(v.T), strict=True)
        return {name: t.reshape(len(t), *shape).movedim(0, -1) for (name, shape), t in found}

    def views(self, v: Tensor) -> dict[str, Tensor]:  # [dim] -> {name: [*shape]}
        """The parameters of a row-major vector as views; axes that the matrix takes apart stay apart.

        Example:
            >>> layout = Layout({"w": "(g o) i -> g o i"}, {"w": (6, 2)}, {"g": 3})
            >>> layout.views(torch.zeros(12))["w"].shape
            torch.Size([3, 2, 2])
        """
        columns = v.view(1, *self.matrix_shape).split_with_sizes(self._widths, -1)
        return {name: part.view(t)[0] for name, part, t in zip(self.patterns, self._parts, columns, strict=True)}


class _Part:
    """One parameter and its columns of the matrix."""

    def __init__(self, name: str, pattern: str, shape: torch.Size, sizes: Mapping[str, int]) -> None:
        left, _, right = (side.strip() for side in pattern.partition("->"))
        axes = re.findall(r"\([^()]*\)|\S+", left)
        known = {**sizes, **{axis: size for axis, size in zip(axes, shape) if axis.isidentifier()}}
        self.shape, self.sizes = shape, {axis: n for axis, n in known.items() if axis in re.findall(r"\w+", pattern)}
        apart = re.sub(r"[()]", "", left)
        #: Whether the axes change their order.
        self.permutes = apart.split() != [axis for axis in re.findall(r"\w+", right) if axis != "1"]
        self._forth, self._back = f"k0 {left} -> k0 {right}", f"k0 {right} -> k0 {left}"
        self._apart = f"k0 {right} -> k0 {apart}"
        try:
            empty = self.matrices(torch.empty(1, *shape, device="meta"))
            self.parameters(empty)
        except (EinopsError, ValueError) as error:
            raise ValueError(f'Pattern "{pattern}" of parameter "{name}" with shape {list(shape)}: {error}') from error
        self.matrix = tuple(empty.shape[1:])
        if len(self.matrix) not in (2, 3):
            raise ValueError(f'Pattern "{pattern}": expected "rows cols" or "batch rows cols" on the right.')

    def matrices(self, t: Tensor) -> Tensor:  # [K, *shape] or [K, size] -> [K, *matrix]
        return rearrange(t.reshape(len(t), *self.shape), self._forth, **self.sizes)

    def parameters(self, M: Tensor) -> Tensor:  # [K, *matrix] -> [K, *shape]
        return rearrange(M, self._back, **self.sizes)

    def view(self, M: Tensor) -> Any:  # [K, *matrix] -> [K, *shape], axes apart
        return rearrange(M, self._apart, **self.sizes)
