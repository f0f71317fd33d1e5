"""Matrices whose rows belong to the data: the Jacobian of a model's outputs, and factors `B` with `B Bᵀ = GGN`.

Letters: `P` parameters, `N` examples, `R` loss terms per example, `K` columns of the root of the loss Hessian.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.base import RiskOperator, in_range, require_own_data, require_same_products
from curvlinops_plus.exact.loss_terms import LossTerms, check_vectors, loss_roots, run_losses
from curvlinops_plus.exact.passes import Outputs, Passes, Read, differentiable
from curvlinops_plus.linalg import Space
from curvlinops_plus.linalg.operator import linear_in
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals, Vectors, as_vectors
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.losses import LossWeights, loss_weights
from curvlinops_plus.risk.preserve import untraced
from curvlinops_plus.risk.risk import takes_risk


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
        read: As in `Passes`.
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
        self._seed, self._passes, self._linear = seed, Passes(risk, read, chunk_size), False
        self._forward = False  # whether `J v` is known to be right
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
    def _over_data(self, sweep: Callable[[LossWeights], tuple[Tensor, Totals]]) -> Tensor:
        with differentiable(self.risk):
            return self._reduced(sweep)

    def _rows_product(self, X: Tensor) -> Tensor:  # [P, K] -> [m, K]
        return in_range(X, self._narrow, lambda V: self._over_data(partial(self._rows_sweep, V)))

    def _transpose_product(self, X: Tensor) -> Tensor:  # [m, K] -> [P, K]
        return in_range(X, self._narrow, lambda V: self._over_data(partial(self._transpose_sweep, V)))

    def _rows_dense(self) -> Tensor:  # [m, P]
        """The matrix; each batch by backward passes for its rows, or by tangents of all parameters if these are
        fewer.
        """
        return self._over_data(self._dense_sweep)

    def _blocks(
        self, weights: LossWeights, totals: Totals, forward: bool
    ) -> Iterator[tuple[Batch, RowBlock, list[slice], _Placement, torch.dtype]]:
        """Each batch with its block, where its rows are, and the dtype of the outputs."""
        place, draws = _Placement(self), Draws(self._seed)
        for batch in self._batches(draws=draws):
            if (forward and not self._forward) or not self._linear:
                self._passes.require_linear(batch, forward)
                self._linear, self._forward = True, forward
            F, extra = self._outputs(batch)
            block = self._row_block(F, extra, draws, totals, weights)
            yield batch, block, place.take(block.shapes), place, F[0].dtype
        place.check_complete()

    def _outputs(self, batch: Batch) -> tuple[Outputs, Any]:
        """What `read` returns, without a graph; random states are as before."""
        state = RandomState.now(self.risk.device)
        with torch.no_grad():
            found = self._passes.read(self.risk.model, batch)
        state.restore()
        return found

    def _rows_sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        totals, result = Totals(), X.new_zeros(self._row_space.dim, X.shape[1])
        for batch, block, _, place, _ in self._blocks(weights, totals, forward=True):
            place.write(result, _rows_of(block, self._passes.forward(batch, X.T)).T)
        return result, totals

    def _transpose_sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        totals, result = Totals(), X.new_zeros(X.shape[1], self.risk.space.dim)
        for batch, block, parts, _, dtype in self._blocks(weights, totals, forward=False):
            rows = [X[part].T.to(dtype).reshape(-1, *shape) for part, shape in zip(parts, block.shapes, strict=True)]
            U = block.product(rows)
            result += self._passes.graph(batch, lambda F, extra, free, U=U: self._passes.back(F, free, U))
        return result.T, totals

    def _dense_sweep(self, weights: LossWeights) -> tuple[Tensor, Totals]:
        totals, n = Totals(), self.risk.space.dim
        result = torch.zeros(self._row_space.dim, n, dtype=self.dtype, device=self.device)
        for batch, block, _, place, dtype in self._blocks(weights, totals, forward=False):
            sizes = [shape.numel() for shape in block.shapes]
            m = sum(sizes)
            if m > n:
                eye = torch.eye(n, dtype=self.dtype, device=self.device)
                place.write(result, _rows_of(block, self._passes.forward(batch, eye)).T)
                continue
            parts = torch.eye(m, dtype=dtype, device=self.device).split(sizes, 1)
            U = block.product([part.reshape(m, *shape) for part, shape in zip(parts, block.shapes, strict=True)])
            place.write(result, self._passes.graph(batch, lambda F, extra, free, U=U: self._passes.back(F, free, U)))
        return result, totals


def _rows_of(block: RowBlock, JV: list[Tensor]) -> Tensor:  # -> [K, rows]
    return torch.cat([u.flatten(1) for u in block.transpose_product(JV)], 1)


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


class Jacobian(DataRows):
    """The Jacobian of the model's output with respect to the parameters: all outputs of all data, `[N·C, P]`.

    The result is one tensor `[N, *output]`: the outputs of all batches stacked along their first axis, in the order of
    the data, which must be the same in every pass. For a risk with several losses it is one such tensor for each output
    that they read, under the key of the loss. Nothing is scaled, and losses and targets are not used.
    `.T` is the transposed Jacobian.

    Args:
        risk: Model, data and parameters; `output=` there picks the tensor out of what the model returns. Its `num_data`
            is the number of examples. Default: they are counted once.
        check_deterministic: True compares two products first. None: two evaluations of a few examples have to agree,
            once per risk. False: not even these.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64 at most.

    Raises:
        ValueError: If the data are an iterator, or outputs of different batches can't be stacked.
        RuntimeError: If two products differ, as with a loader that shuffles.
        UnsupportedError: If the model uses an operation with neither forward mode nor a second derivative.

    Cost: `J @ v` is one forward pass that carries tangents, without a graph (two backward passes for models that have
    no forward mode); the transposed product is one forward and one backward pass. `to_dense()` takes as many backward
    passes as a batch has outputs, or tangents of all parameters if these are fewer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk
        >>> data = [(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)), (torch.ones(1, 2), torch.zeros(1, 1))]
        >>> J = Jacobian(EmpiricalRisk(nn.Linear(2, 1), nn.MSELoss(), data))
        >>> J.to_dense(), J.out_shapes
        (tensor([[3., 4., 1.],
            [1., 1., 1.]]), (torch.Size([2, 1]),))
        >>> J.T @ [torch.tensor([[1.0], [-1.0]])]
        [tensor([[2., 3.]]), tensor([0.])]
    """

    @takes_risk
    def __init__(
        self, risk: EmpiricalRisk, *, check_deterministic: bool | None = None, chunk_size: int | None = None
    ) -> None:
        self.in_space = risk.space
        super().__init__(risk, partial(_run_outputs, risk), 0, check_deterministic, chunk_size)

    @property
    def out_space(self) -> Space:  # type: ignore[override]
        return self._row_space

    def _row_block(self, F: Outputs, extra: Any, draws: Draws, totals: Totals, weights: LossWeights) -> RowBlock:
        return _Identity([f.shape for f in F])

    def _count_rows(self) -> dict[str, tuple[int, ...]]:
        """A forward pass for one batch, and for all if rows are positions, whose number may differ between batches."""
        risk = self.risk
        shapes: list[torch.Size] = []
        counts: list[int] = []
        positions = False  # [N·R, C], and R may differ from batch to batch
        for batch in self._batches(", sizes"):
            N = batch.num_examples
            own = [f.shape for f in self._outputs(batch)[0]] if not shapes or positions else None
            if not shapes and own is not None:
                shapes, counts = own, [0] * len(own)
                positions = any(shape[0] != N for shape in own)
                if risk.options.num_data is not None:
                    counts = [risk.options.num_data * shape[0] // N for shape in own]
                    break
            counts = [count + (N if own is None else own[k][0]) for k, count in enumerate(counts)]
        keys = ["0" if key is None else str(key) for key in risk.losses.keys]
        return {key: (count, *shape[1:]) for key, count, shape in zip(keys, counts, shapes, strict=True)}

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._rows_product, self._transpose_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._transpose_product, self._rows_product)

    def _to_dense(self) -> Tensor:
        return self._rows_dense()


def _run_outputs(risk: EmpiricalRisk, model: nn.Module, batch: Batch) -> tuple[Sequence[Tensor], None]:
    """Run the model: the outputs that the losses read."""
    return risk.run(batch, model)[0], None


class _Identity:
    """Rows that are the outputs themselves."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self.shapes = shapes

    def product(self, U: Sequence[Tensor]) -> Sequence[Tensor]:
        return U

    def transpose_product(self, V: Sequence[Tensor]) -> Sequence[Tensor]:
        return V


class GGNFactor(DataRows):
    """A factor `B [P, N·R·K]` of `GGN(risk, vectors)`, exact and matrix-free: `B Bᵀ = GGN`.

    `B = √c Jᵀ B_ℓ`, with a root `B_ℓ` of the Hessian of every loss term, or the vectors in its place, and the factor
    `c` of the loss's reduction over the whole data set. `B @ u` draws from N(0, GGN) if `u` is standard normal;
    `B.T @ v` has the squared norm `vᵀ GGN v`. Known as `multiply_ggn_factor` and `multiply_fisher_factor` (`B @ u`),
    and `..._transpose` (`B.T @ v`) in kfac_jax, whose loss classes give the same roots.

    What `B` multiplies is one tensor `[N, R, K]` in the order of the data: N examples, R loss terms of each, K columns
    of the root. If R differs from batch to batch, it is a flat one, `[Σ N·R·K]`, batch after batch. Of several losses
    it is one such tensor for each loss, under the key of its output; or a single one, where their vectors are sent
    together.

    | vectors | R | K |
    | --- | --- | --- |
    | `Exact()` | loss terms | that of the likelihood: C, of cross-entropy C - 1 |
    | `MonteCarlo(samples, seed)` | loss terms | `samples` |
    | `Empirical(per_term=True)` | loss terms | 1 |
    | `Empirical()` | 1 | 1 |
    | `CurvaturePropagation(samples, seed)` | 1 | `samples` |
    | others | 1 | number of vectors that are sent |

    Args:
        risk: Model, loss, data and parameters; each loss needs a likelihood.
        vectors: Which matrix, as for `GGN`. Default: `Exact()`.
        check_deterministic: True compares two products first. None: two evaluations of a few examples have to agree,
            once per risk. False: not even these.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64 at most.

    Raises:
        ValueError: If `vectors` sends nothing (`ForwardOnly()`), the data are an iterator, or `chunk_size` is less than
            one.
        RuntimeError: If two products differ, as with a loader that shuffles.
        UnsupportedError: If a loss has no likelihood, or no root.

    Cost: `B @ u` is one forward and one backward pass, `B.T @ v` one forward pass with tangents. One pass over the
    data comes first, for their number.

    Source: Martens 2020, "New insights and perspectives on the natural gradient method", sections 8 and 9.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> B = GGNFactor(EmpiricalRisk(nn.Linear(1, 1, bias=False), nn.MSELoss(), data))
        >>> B.to_dense(), (B @ B.T).to_dense()  # 3 √2
        (tensor([[4.2426]]), tensor([[18.0000]]))
    """

    @takes_risk
    def __init__(
        self,
        risk: EmpiricalRisk,
        vectors: Vectors | str | None = None,
        *,
        check_deterministic: bool | None = None,
        chunk_size: int | None = None,
    ) -> None:
        self.vectors, self.out_space = as_vectors(vectors), risk.space
        risk = risk.for_vectors(self.vectors)
        check_vectors(type(self).__name__, risk, self.vectors, any_loss=False)
        read = partial(run_losses, risk)
        super().__init__(risk, read, self.vectors.seed or 0, check_deterministic, chunk_size)

    _totals: Totals | None = None  # of the last pass over the data

    @property
    def in_space(self) -> Space:  # type: ignore[override]
        return self._row_space

    def _row_block(
        self, F: Outputs, extra: tuple[list[LossTerms], Totals], draws: Draws, totals: Totals, weights: LossWeights
    ) -> RowBlock:
        terms, batch_totals = extra
        totals.add(batch_totals)
        factors = self.risk.losses.vector_factors(weights.of(batch_totals), self.vectors.of_loss)
        return loss_roots(self.risk, self.vectors, terms, factors, draws)

    def _reduced(self, sweep: Callable[[LossWeights], tuple[Tensor, Totals]]) -> Tensor:
        weights = loss_weights(self.risk, self._totals)
        result, self._totals = sweep(weights)
        weights.require(self._totals)
        return result * float(self.risk.scale(self._totals)) ** 0.5

    def _count_rows(self) -> dict[str, tuple[int, ...]]:
        draws, found = Draws(self._seed), []
        for batch in self._batches(", sizes", draws):
            _, (terms, _) = self._outputs(batch)
            found.append(loss_roots(self.risk, self.vectors, terms, [1.0] * len(terms), draws).shapes)
        rows = []
        for shapes in zip(*found, strict=True):
            if len({shape[1:] for shape in shapes}) == 1:
                rows.append((sum(shape[0] for shape in shapes), *shapes[0][1:]))
            else:  # a different number of terms in each batch
                rows.append((sum(shape.numel() for shape in shapes),))
        return dict(zip(["0"] if len(rows) == 1 else [str(key) for key in self.risk.losses.keys], rows, strict=True))

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._transpose_product, self._rows_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._rows_product, self._transpose_product)

    def _to_dense(self) -> Tensor:
        return self._rows_dense().T
