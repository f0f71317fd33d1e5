"""Matrices `L J` whose rows belong to the data: products from both sides, and where the rows of each batch are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from curvlinops_plus.exact.base import RiskOperator, require_own_data, require_same_products
from curvlinops_plus.exact.double_backward import differentiable
from curvlinops_plus.exact.linearize import Linearizer, Outputs, Read
from curvlinops_plus.linalg import Space
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals
from curvlinops_plus.risk.graph import columns_in_range, require_in_range
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.process_state import untraced


class RowBlock(Protocol):
    """The block of `L` that belongs to a batch; rows may be several tensors."""

    @property
    def shapes(self) -> Sequence[torch.Size]:
        """Shapes of the rows' tensors, the first axis along the data."""
        ...

    def product(self, U: Sequence[Tensor]) -> Sequence[Tensor]:
        """`Lᵀ u`: [K, *shape] for each of `shapes` -> [K, *output] for each output."""
        ...

    def transpose_product(self, V: Sequence[Tensor]) -> Sequence[Tensor]:
        """`L v`: [K, *output] for each output -> [K, *shape] for each of `shapes`."""
        ...


class DataRows(RiskOperator):
    """A matrix `L J [m, P]`, or its transpose, whose rows belong to the data in their order.

    `J` is the Jacobian of the model's outputs, and `L` block-diagonal over batches.

    Args:
        risk: Model, data and parameters.
        read: As in `Linearizer`.
        seed: Where random numbers for `L` start.
        check_deterministic: True compares two products first. None: two evaluations of a few examples have to agree,
            once per risk. False: not even these.
        chunk_size: Columns that are computed together.
    """

    def __init__(
        self, risk: EmpiricalRisk, read: Read, seed: int, check_deterministic: bool | None, chunk_size: int | None
    ) -> None:
        super().__init__(risk, check_deterministic)
        require_own_data(risk, type(self).__name__)
        self._seed, self._linear = seed, Linearizer(risk, read, chunk_size)
        if check_deterministic:
            require_same_products(self, risk.space.dim, lambda v: self._reduced(partial(self._rows_sweep, v)))

    # ---------------------------------------------------------------------------------------- what a subclass says
    @abstractmethod
    def _row_block(self, F: Outputs, extra: Any, draws: Draws, totals: Totals, weights: LossWeights) -> RowBlock:
        """The block of a batch, from what `read` returned; what it counts is added to the totals."""

    @abstractmethod
    def _count_rows(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of all rows; random states and modes of PyTorch are set."""

    def _reduced(self, sweep: Callable[[LossWeights], tuple[Tensor, Totals]]) -> Tensor:
        """The result of a sweep, times the factor of all rows."""
        return sweep(LossWeights.plain(self.risk.losses))[0]

    # ----------------------------------------------------------------------------------------------------- products
    @cached_property
    @untraced
    def _row_space(self) -> Space:
        with differentiable(self.risk):
            return Space.from_shapes(self._count_rows())

    @untraced
    def _over_data(self, sweep: Callable[[LossWeights], tuple[Tensor, Totals]], given: Tensor | None = None) -> Tensor:
        with differentiable(self.risk):
            return require_in_range(self._reduced(sweep), self._narrow, given)

    def _rows_product(self, X: Tensor) -> Tensor:  # [P, K] -> [m, K]
        return columns_in_range(X, self._narrow, lambda V: self._over_data(partial(self._rows_sweep, V), V))

    def _transpose_product(self, X: Tensor) -> Tensor:  # [m, K] -> [P, K]
        return columns_in_range(X, self._narrow, lambda V: self._over_data(partial(self._transpose_sweep, V), V))

    def _rows_dense(self) -> Tensor:  # [m, P]
        """The matrix; each batch by backward passes for its rows, or by tangents of all parameters if these are
        fewer.
        """
        return self._over_data(self._dense_sweep)

    def _rows_sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        place, totals, draws = _Placement(self), Totals(), Draws(self._seed)
        result = X.new_zeros(place.space.dim, X.shape[1])

        def output_map(F: Outputs, extra: Any) -> Callable[[list[Tensor]], Tensor]:
            block = self._row_block(F, extra, draws, totals, weights)
            place.take(block.shapes)
            return lambda V: torch.cat([u.flatten(1) for u in block.transpose_product(V)], 1)

        for batch in self._batches(draws=draws):
            rows = self._linear.jvp(batch, X.T, output_map)
            place.write(result, rows.T)
        place.check_complete()
        return result, totals

    def _transpose_sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        place, totals, draws = _Placement(self), Totals(), Draws(self._seed)
        result = X.new_zeros(X.shape[1], self.risk.space.dim)

        def vectors(F: Outputs, extra: Any) -> list[Tensor]:
            block = self._row_block(F, extra, draws, totals, weights)
            rows = [X[part].T.to(F[0].dtype) for part in place.take(block.shapes)]
            return [*block.product([u.reshape(-1, *shape) for u, shape in zip(rows, block.shapes, strict=True)])]

        for batch in self._batches(draws=draws):
            result += self._linear.vjp(batch, vectors)
        place.check_complete()
        return result.T, totals

    def _dense_sweep(self, weights: LossWeights) -> tuple[Tensor, Totals]:
        place, totals, draws = _Placement(self), Totals(), Draws(self._seed)
        n, like = self.risk.space.dim, {"dtype": self.dtype, "device": self.device}
        result = torch.zeros(place.space.dim, n, **like)
        for batch in self._batches(draws=draws):
            F, extra = self._linear.outputs(batch)
            block = self._row_block(F, extra, draws, totals, weights)
            place.take(block.shapes)
            place.write(result, self._dense_block(batch, block, F[0].dtype))
        place.check_complete()
        return result, totals

    def _dense_block(self, batch: Any, block: RowBlock, dtype: torch.dtype) -> Tensor:
        """The rows of one batch."""
        n, sizes = self.risk.space.dim, [shape.numel() for shape in block.shapes]
        m = sum(sizes)
        if m > n:

            def rows(V: list[Tensor]) -> Tensor:
                return torch.cat([u.flatten(1) for u in block.transpose_product(V)], 1)

            eye = torch.eye(n, dtype=self.dtype, device=self.device)
            return self._linear.jvp(batch, eye, lambda F, extra: rows).T
        parts = torch.eye(m, dtype=dtype, device=self.device).split(sizes, 1)
        U = [part.reshape(m, *shape) for part, shape in zip(parts, block.shapes, strict=True)]
        return self._linear.vjp(batch, lambda F, extra: [*block.product(U)])


class _Placement:
    """Where the rows of the next batch are, and whether all batches together have as many as expected."""

    def __init__(self, operator: DataRows) -> None:
        self.space, self.name = operator._row_space, type(operator).__name__
        self.starts = [0] * len(self.space.shapes)
        self.current: list[slice] = []

    def take(self, shapes: Sequence[torch.Size]) -> list[slice]:
        """The rows of the next batch, whose tensors have these shapes."""
        self.current, offset = [], 0
        for index, (own, whole) in enumerate(zip(shapes, self.space.shapes.values(), strict=True)):
            if whole[1:] and own[1:] != whole[1:]:
                raise ValueError(
                    f"The output has shape {list(own)} in one batch and [*, {', '.join(map(str, whole[1:]))}] in "
                    f"others. {self.name} stacks outputs along their first axis: make them agree in all others, for "
                    "instance `output=lambda f: f.flatten(0, 1)`, which makes every position a row."
                )
            start = self.starts[index]
            self.starts[index] = start + own.numel()
            if self.starts[index] > whole.numel():
                self._raise("more", whole)
            self.current.append(slice(offset + start, offset + self.starts[index]))
            offset += whole.numel()
        return self.current

    def write(self, result: Tensor, rows: Tensor) -> None:  # result [m, K], rows of the last batch [*, K]
        """Write the rows of the last batch into the result."""
        for part, own in zip(self.current, rows.split([part.stop - part.start for part in self.current])):
            result[part] = own

    def check_complete(self) -> None:
        """Refuse data with fewer rows than expected."""
        for start, whole in zip(self.starts, self.space.shapes.values()):
            if start != whole.numel():
                self._raise("fewer", whole)

    def _raise(self, what: str, shape: torch.Size) -> None:
        raise ValueError(
            f"The data have {what} examples than {self.name}, with rows {list(shape)}, was told by `num_data` or "
            "saw in an earlier pass. Each pass must give the same examples in the same order."
        )
