"""A group of parameters, for example the weight and bias of a layer, as ONE matrix.

The pattern of each parameter says how: `"o i h w -> o (i h w)"` is the weight of a convolution with one row per output
channel, `"o -> o 1"` its bias as one more column. Left is the parameter as PyTorch stores it, right are the axes
`rows cols` of the matrix, or `batch rows cols` (groups of a convolution: `"(g o) i h w -> g o (i h w)"`). Parentheses
merge axes and `1` is an axis of size one, as in einops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Steps:
    """A parsed pattern: view as `atoms`, permute by `order`, view as `matrix`; and the inverse of that."""

    shape: tuple[int, ...]  # of the parameter
    atoms: tuple[int, ...]  # sizes of the elementary axes, in the order of the parameter
    order: tuple[int, ...]  # positions of these axes in the order of the matrix
    matrix: tuple[int, ...]  # [*batch, rows, cols]
    permutes: bool  # whether `order` changes anything
    ordered: tuple[int, ...]  # sizes of the elementary axes, in the order of the matrix
    back: tuple[int, ...]  # positions of the axes of the matrix in the order of the parameter; the last axis stays

    def matrices(self, t: Tensor) -> Tensor:  # [K, *shape] or [K, size] -> [K, *matrix]
        """Parameters as matrices, as views where strides allow."""
        if self.permutes:
            t = t.reshape(len(t), *self.atoms).permute(0, *(axis + 1 for axis in self.order))
        return t.reshape(len(t), *self.matrix)

    def vectors(self, M: Tensor) -> Tensor:  # [K, *matrix] -> [K, size]
        """Parameters as vectors, as views where strides allow."""
        if self.permutes:
            M = M.reshape(len(M), *self.ordered).permute(0, *(axis + 1 for axis in self.back[:-1]))
        return M.flatten(1)


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
        self._steps = {
            name: _parse(name, pattern, self.shapes[name], self.sizes) for name, pattern in self.patterns.items()
        }
        parsed = [*self._steps.values()]
        if len({steps.matrix[:-1] for steps in parsed}) > 1:
            matrices = {name: steps.matrix for name, steps in self._steps.items()}
            raise ValueError(
                f"Expected parameters of one layout to have the same rows, got matrices {matrices} "
                f"from patterns {self.patterns}."
            )
        self._permutes = any(steps.permutes for steps in parsed)
        self._widths = [steps.matrix[-1] for steps in parsed]
        #: `(rows, cols)` or `(batch, rows, cols)`.
        self.matrix_shape: tuple[int, ...] = (*parsed[0].matrix[:-1], sum(self._widths))
        #: The number of entries of the matrix.
        self.dim: int = prod(self.matrix_shape)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of their columns."""
        return list(self.patterns)

    def __repr__(self) -> str:
        return f"Layout({self.patterns} -> {list(self.matrix_shape)})"

    def join(self, tree: Mapping[str, Tensor]) -> Tensor:  # {name: [*shape, K]} -> [dim, K]
        """The row-major vector of the matrix, for each of `K` columns; `tree` may hold other parameters too.

        A view if there is one parameter whose axes keep their order. Otherwise one copy, stored column by column.
        """
        return self.gather([tree[name].movedim(-1, 0) for name in self._steps]).T

    def gather(self, parts: Sequence[Tensor]) -> Tensor:  # each [K, *shape] or [K, size] -> [K, dim]
        """As `join`, of the parameters in their order, and with the axis of columns first."""
        if len(parts) == 1 and not self._permutes:
            return parts[0].reshape(len(parts[0]), self.dim)
        matrices = [steps.matrices(t) for steps, t in zip(self._steps.values(), parts, strict=True)]
        return torch.cat(matrices, dim=-1).reshape(len(parts[0]), self.dim)  # channels-last parts make one that is

    def scatter(self, rows: Tensor) -> list[Tensor]:  # [K, dim] -> each [K, size]
        """The parameters of row-major vectors, in their order, with the axis of columns first: undoes `gather`."""
        if len(self._steps) == 1 and not self._permutes:
            return [rows]
        M = rows.reshape(len(rows), *self.matrix_shape).split_with_sizes(self._widths, -1)
        return [steps.vectors(part) for steps, part in zip(self._steps.values(), M, strict=True)]

    def columns(self, name: str, t: Tensor) -> Tensor:  # [*shape] -> [rows, cols] or [batch, rows, cols]
        """The columns of the matrix that one parameter fills, as a view where strides allow."""
        return self._steps[name].matrices(t[None])[0]

    def views(self, v: Tensor) -> dict[str, Tensor]:  # [dim] -> {name: [*shape]}
        """The parameters of a row-major vector as views; axes that the matrix takes apart stay apart.

        Example:
            >>> layout = Layout({"w": "(g o) i -> g o i"}, {"w": (6, 2)}, {"g": 3})
            >>> layout.views(torch.zeros(12))["w"].shape
            torch.Size([3, 2, 2])
        """
        parts = v.view(self.matrix_shape).split_with_sizes(self._widths, -1)
        return {
            name: part.view(steps.ordered).permute(steps.back[:-1])
            for (name, steps), part in zip(self._steps.items(), parts, strict=True)
        }

    def width(self, name: str) -> int:
        """How many columns of the matrix one parameter fills."""
        return self._steps[name].matrix[-1]

    def split(self, v: Tensor) -> dict[str, Tensor]:  # [dim, K] -> {name: [*shape, K]}
        """The parameters of a row-major vector, as views where strides allow."""
        K = v.shape[-1]
        M = v.reshape(*self.matrix_shape, K)
        out, start = {}, 0
        for name, steps in self._steps.items():
            part = M.narrow(-2, start, steps.matrix[-1])
            if steps.permutes:
                part = part.reshape(*steps.ordered, K).permute(steps.back)
            out[name] = part.reshape(*steps.shape, K)
            start += steps.matrix[-1]
        return out


_TOKEN = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*|1)")


def _parse(name: str, pattern: str, shape: torch.Size, sizes: Mapping[str, int]) -> _Steps:
    where = f'Pattern "{pattern}" of parameter "{name}" with shape {list(shape)}'
    if pattern.count("->") != 1:
        raise ValueError(f'{where}: expected one "->" between the axes of the parameter and "rows cols".')
    left, right = (_axes(side, where) for side in pattern.split("->"))
    if len(left) != len(shape):
        raise ValueError(f"{where}: expected {len(left)} axes.")
    if len(right) not in (2, 3):
        raise ValueError(f'{where}: expected "rows cols" or "batch rows cols" on the right, got {len(right)} axes.')
    names, order = ([atom for group in side for atom in group] for side in (left, right))
    if sorted(names) != sorted(order) or len(set(names)) != len(names):
        raise ValueError(f"{where}: expected every axis once on each side, got {names} and {order}.")
    known: dict[str, int] = {}
    for group, size in zip(left, shape, strict=True):
        known |= _group_sizes(group, size, sizes, where)
    return _steps(shape, names, order, known, matrix=tuple(prod(known[atom] for atom in group) for group in right))


def _steps(
    shape: torch.Size, names: list[str], order: list[str], sizes: Mapping[str, int], matrix: tuple[int, ...]
) -> _Steps:
    """The steps from axes `names`, in the order of the parameter, to `order`, in that of the matrix."""
    return _Steps(
        shape=tuple(shape),
        atoms=tuple(sizes[atom] for atom in names),
        order=tuple(names.index(atom) for atom in order),
        matrix=matrix,
        permutes=names != order,
        ordered=tuple(sizes[atom] for atom in order),
        back=(*(order.index(atom) for atom in names), len(names)),
    )


def _axes(side: str, where: str) -> list[list[str]]:
    """`"o (i h w) 1"` to `[["o"], ["i", "h", "w"], []]`."""
    if _TOKEN.sub("", side).strip():
        raise ValueError(
            f'{where}: cannot read "{side.strip()}"; write axis names, 1, and parentheses around merged axes.'
        )
    return [
        [atom for atom in (inside.split() if single == "" else [single]) if atom != "1"]
        for inside, single in _TOKEN.findall(side)
    ]


def _group_sizes(group: list[str], size: int, sizes: Mapping[str, int], where: str) -> dict[str, int]:
    """Sizes of the axes that are merged into one of this size."""
    known = {atom: sizes[atom] for atom in group if atom in sizes}
    unknown = [atom for atom in group if atom not in sizes]
    product = prod(known.values())
    if len(unknown) == 1 and product and size % product == 0:
        known[unknown[0]] = size // product
    elif unknown or product != size:
        raise ValueError(
            f"{where}: axes {group} must multiply to {size}, given sizes {dict(sizes)}; pass sizes={{axis: size}}."
        )
    return {atom: known[atom] for atom in group}
