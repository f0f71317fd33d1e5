"""Matrices whose rows belong to the data: the Jacobian of a model's outputs, and factors `B` with
`B Bᵀ = GGN`.

Letters: `P` parameters, `N` examples, `R` loss terms per example, `K` columns of the root of the
loss Hessian.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.exact.adjoint import AdjointCheck
from curvlinops_plus.exact.base import RiskOperator, require_own_data
from curvlinops_plus.exact.compiled import Compiled, NotCompiled, OfBatch, ProductForms
from curvlinops_plus.exact.differentiable import differentiable
from curvlinops_plus.exact.ggn import LossRoots, check_vectors, read_terms
from curvlinops_plus.exact.passes import Outputs, Passes, Read
from curvlinops_plus.exact.reading import AddUp, Reading
from curvlinops_plus.exact.traced_batch import Trace, each, pullback, rows_joined
from curvlinops_plus.linalg import Space
from curvlinops_plus.linalg.operator import linear_in
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, EmpiricalRisk, Vectors, as_vectors
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.loss_passes import LossWeights
from curvlinops_plus.risk.losses import Terms
from curvlinops_plus.risk.preserve import untraced
from curvlinops_plus.risk.risk import takes_risk


class OutputRows:
    """The block of `L` of a batch whose rows are the outputs themselves."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self.shapes = shapes

    def product(self, U: Sequence[Tensor]) -> Sequence[Tensor]:
        """`Lᵀ u`: [K, *shape] for each of `shapes` -> [K, *output] for each output."""
        return U

    def transpose_product(self, V: Sequence[Tensor]) -> Sequence[Tensor]:
        """`L v`: [K, *output] for each output -> [K, *shape] for each of `shapes`."""
        return V


class RowsOfBatch(NamedTuple):
    """The rows of `L J` that belong to a batch."""

    batch: Batch
    block: OutputRows | LossRoots
    """The transposed block of `L`."""
    numbers: Tensor
    """Which rows they are."""


class DataRows(RiskOperator):
    """A matrix `L J [m, P]`, or its transpose, whose rows belong to the data in their order.

    `J` is the Jacobian of the model's outputs, and `L` block-diagonal over batches.

    Args:
        risk: Model, data and parameters.
        read: As in `Passes`.
        seed: Where random numbers for `L` start.
        check_deterministic: True compares two products first. None: two evaluations of a few
            examples have to agree, once per risk. False: not even these.
        chunk_size: Columns that are computed together.
    """

    _sizes = "_row_space"
    _transposed = False  # whether the rows are columns
    # How many rows each example has, if there is one output and these are equally many.
    _per_example: int | None = None
    _compiled_columns: Compiled | None = None

    def __init__(
        self,
        risk: EmpiricalRisk,
        read: Read,
        seed: int,
        check_deterministic: bool | None,
        chunk_size: int | None,
    ) -> None:
        passes = Passes(risk, read, chunk_size)
        super().__init__(risk, passes, check_deterministic)
        require_own_data(risk, type(self).__name__)
        self._adjoint_check = AdjointCheck(passes)
        self._seed = seed
        if check_deterministic:
            self._compare_products(self._rows, risk.space.dim)

    @abstractmethod
    def _block(self, F: Outputs, extra: Any, reading: Reading) -> OutputRows | LossRoots:
        """The block of `L` of a batch, from what `read` returned; what it counts is added to the
        totals.
        """

    @cached_property
    @untraced
    def _row_space(self) -> Space:
        """One tensor for each output, stacked along the first axis; flat if batches differ in
        another one.
        """
        reading = Reading(LossWeights(self.risk, plain=True), Draws(self._seed or 0))
        shapes_of_batches = []
        ratios = set()
        with differentiable(self.risk):
            for batch in self._batches(reading, ", sizes"):
                block = self._block(*self._outputs(batch), reading)
                shapes_of_batches.append(block.shapes)
                ratios.add(block.shapes[0].numel() / batch.num_examples)
        if len(ratios) == 1 and len(block.shapes) == 1:
            self._per_example = int(ratios.pop())
        shapes_of_rows = []
        for shapes in zip(*shapes_of_batches, strict=True):
            stacked = {shape[1:] for shape in shapes}
            if len(stacked) == 1:
                shapes_of_rows.append((sum(shape[0] for shape in shapes), *stacked.pop()))
            else:
                shapes_of_rows.append((sum(shape.numel() for shape in shapes),))
        names = ["0"] if len(shapes_of_rows) == 1 else map(str, self.risk.losses.output_keys)
        return Space.from_shapes(dict(zip(names, shapes_of_rows)))

    def _outputs(self, batch: Batch) -> tuple[Outputs, Any]:
        """What `read` returns, without a graph; random states are as before."""
        state = RandomState.now(self.risk.device)
        with self.risk.placed(), GradMode(False):
            outputs, extra = self._passes.read(self.risk.model, batch)
        state.restore()
        return outputs, extra

    @property
    def in_space(self) -> Space:  # type: ignore[override]
        return self._row_space if self._transposed else self.risk.space

    @property
    def out_space(self) -> Space:  # type: ignore[override]
        return self.risk.space if self._transposed else self._row_space

    # ------------------------------------------------------------------------------------- products
    def _matmat(self, X: Tensor) -> Tensor:
        return self._product(X, self._transposed)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._product(X, not self._transposed)

    def _product(self, X: Tensor, transposed: bool) -> Tensor:
        add_up_rows: AddUp = self._rows
        add_up_columns: AddUp = self._columns
        _ = self._row_space  # the data are read for it
        if self._compiled is not None and self._compiled.is_on(X):
            add_up_rows = self._compiled
        if self._compiled_columns is not None and self._compiled_columns.is_on(X):
            add_up_columns = self._compiled_columns
        rows = partial(self._over_data, add_up_rows)
        columns = partial(self._over_data, add_up_columns)
        return linear_in(X, columns, rows) if transposed else linear_in(X, rows, columns)

    def _to_dense(self) -> Tensor:
        dense = self._over_data(self._dense_rows)
        return dense.T if self._transposed else dense

    def _rows(self, X: Tensor, reading: Reading) -> Tensor:  # [P, K] -> [m, K]
        """`L J X`."""
        products = X.new_zeros(self._row_space.dim, X.shape[1])
        for part in self._blocks(reading, X.shape[1]):
            products[part.numbers] = self._forward(part, X.T).T
        return products

    def _columns(self, X: Tensor, reading: Reading) -> Tensor:  # [m, K] -> [P, K]
        """`Jᵀ Lᵀ X`."""
        total = X.new_zeros(X.shape[1], self.risk.space.dim)
        for part in self._blocks(reading, 1, forward=False):
            self._back(part, X[part.numbers].T, total)
        return total.T

    def _dense_rows(self, _: Any, reading: Reading) -> Tensor:  # [m, P]
        """Each batch by backward passes for its rows, or by tangents of all parameters if these are
        fewer.
        """
        n = self.risk.space.dim
        dense = torch.zeros(self._row_space.dim, n, dtype=self.dtype, device=self.device)
        for part in self._blocks(reading, 1, forward=False):
            m = len(part.numbers)
            if m > n:
                self._adjoint_check.check_passes(part.batch, n)
                dense[part.numbers] = self._forward(
                    part, torch.eye(n, device=self.device).to(dense)
                ).T
            else:
                rows = dense.new_zeros(m, n)
                self._back(part, torch.eye(m, device=self.device).to(dense), rows)
                dense[part.numbers] = rows
        return dense

    def _blocks(
        self, reading: Reading, columns: int, forward: bool = True
    ) -> Iterator[RowsOfBatch]:
        """The rows of each batch.

        Args:
            columns: As for `AdjointCheck.check_passes`.
            forward: Likewise.
        """
        sizes = self._row_space.sizes
        ends = list(accumulate(sizes))
        starts = [end - size for end, size in zip(ends, sizes)]
        for batch in self._batches(reading):
            self._adjoint_check.check_passes(batch, columns, forward=forward)
            block = self._block(*self._outputs(batch), reading)
            numbers = []
            for k, shape in enumerate(block.shapes):
                stop = starts[k] + shape.numel()
                numbers.append(torch.arange(starts[k], stop, device=self.device))
                starts[k] = stop
            if any(stop > end for stop, end in zip(starts, ends, strict=True)):
                break
            yield RowsOfBatch(batch, block, torch.cat(numbers))
        if starts != ends:
            raise self._other_examples()

    def _other_examples(self) -> ValueError:
        return ValueError(
            f"The data have more or fewer examples than {type(self).__name__} saw in an earlier "
            "pass. Each pass must give the same examples in the same order."
        )

    def _forward(self, part: RowsOfBatch, V: Tensor) -> Tensor:  # [K, P] -> [K, rows]
        LJV = part.block.transpose_product(self._passes.forward(part.batch, V))
        return torch.cat([u.flatten(1).to(V.dtype) for u in LJV], 1)

    def _back(self, part: RowsOfBatch, rows: Tensor, total: Tensor) -> None:
        """Add the products with rows [K, rows] of a batch to a total [K, P]."""
        shapes = part.block.shapes
        pieces = rows.split([shape.numel() for shape in shapes], 1)
        with self._passes.run(part.batch) as run:
            dtype = run.outputs[0].dtype
            U = [
                piece.reshape(-1, *shape).to(dtype)
                for piece, shape in zip(pieces, shapes, strict=True)
            ]
            self._passes.back(run.outputs, run.parameters, part.block.product(U), total)


class Jacobian(DataRows):
    """The Jacobian of the model's output with respect to the parameters: all outputs of all data,
    `[N·C, P]`.

    The result is one tensor `[N, *output]`: the outputs of all batches stacked along their first
    axis, in the order of the data, which must be the same in every pass; a flat one if batches
    differ in another axis. For a risk with several losses it is one such tensor for each output
    that they read, under the key of the loss. Nothing is scaled, and losses and targets are not
    used. `.T` is the transposed Jacobian.

    Args:
        risk: Model, data and parameters; `output=` there picks the tensor out of what the model
            returns.
        check_deterministic: True compares two products first. None: two evaluations of a few
            examples have to agree, once per risk. False: not even these.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64
            at most.
        compile: Whether products are computed by compiled functions (`torch.compile`), after a
            comparison with the eager product on the first batch of each shape. What can't be
            compiled, or has other numbers, or takes longer, stays eager, with a warning. It takes
            seconds to minutes in the first products, see docs/performance.md.

    Raises:
        ValueError: If the data are an iterator, or have more or fewer examples than in an earlier
            pass.
        RuntimeError: If two products differ, as with a loader that shuffles.
        UnsupportedError: If the model uses an operation with neither forward mode nor a second
            derivative.

    Cost: `J @ v` is one forward pass that carries tangents, without a graph (two backward passes
    for models that have no forward mode); the transposed product is one forward and one backward
    pass. One forward pass over the data comes first, for their number. `to_dense()` takes as many
    backward passes as a batch has outputs, or tangents of all parameters if these are fewer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk
        >>> y = torch.zeros(1, 1)
        >>> data = [(torch.tensor([[3.0, 4.0]]), y), (torch.ones(1, 2), y)]
        >>> J = Jacobian(EmpiricalRisk(nn.Linear(2, 1), nn.MSELoss(), data))
        >>> J.to_dense(), J.out_shapes
        (tensor([[3., 4., 1.],
            [1., 1., 1.]]), (torch.Size([2, 1]),))
        >>> J.T @ [torch.tensor([[1.0], [-1.0]])]
        [tensor([[2., 3.]]), tensor([0.])]
    """

    _exponent = 0.0

    @takes_risk
    def __init__(
        self,
        risk: EmpiricalRisk,
        *,
        check_deterministic: bool | None = None,
        chunk_size: int | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(risk, self._read, 0, check_deterministic, chunk_size)
        if compile:
            name = type(self).__name__
            rows = ProductForms(self._rows, self._rows_of_batch, self._traced_rows, self._stacked)
            columns = ProductForms(
                self._columns, self._columns_of_batch, self._traced_columns, self._summed
            )
            self._compiled = Compiled(name, self._passes, rows, self._compares_few)
            self._compiled_columns = Compiled(name, self._passes, columns, self._compares_few)

    def _read(self, model: nn.Module, batch: Batch) -> tuple[Outputs, None]:
        return self.risk.run(batch, model)[0], None

    def _block(self, F: Outputs, extra: Any, reading: Reading) -> OutputRows:
        return OutputRows([f.shape for f in F])

    # ------------------------------------------------------------------------------ compiled forms
    def _stacked(self, of_batch: OfBatch, X: Tensor, reading: Reading) -> Tensor:
        """`J X` from products with batches, [K, P] -> [K, rows]."""
        products = X.new_zeros(self._row_space.dim, X.shape[1])
        for batch, numbers in self._numbered(reading):
            for columns in self._pieces(X.shape[1]):
                rows = X.T[columns].contiguous()
                products[numbers, columns] = of_batch(batch, rows, reading).T
        return products

    def _summed(self, of_batch: OfBatch, X: Tensor, reading: Reading) -> Tensor:
        """`Jᵀ X` from products with batches, [K, rows] -> [K, P]."""
        total = X.new_zeros(X.shape[1], self.risk.space.dim)
        for batch, numbers in self._numbered(reading):
            for columns in self._pieces(X.shape[1]):
                rows = X[numbers, columns].T.contiguous()
                total[columns] += of_batch(batch, rows, reading)
        return total.T

    def _pieces(self, K: int) -> Iterator[slice]:
        step = self._passes.columns
        return (slice(start, start + step) for start in range(0, K, step))

    def _numbered(self, reading: Reading) -> Iterator[tuple[Batch, slice]]:
        """The batches and which rows they have."""
        if self._per_example is None:
            raise NotCompiled("Several outputs, or other numbers of rows in each batch.")
        stop = 0
        for batch in self._batches(reading, compares_few=False):
            start = stop
            stop += batch.num_examples * self._per_example
            if stop > self._row_space.dim:
                break
            yield batch, slice(start, stop)
        if stop != self._row_space.dim:
            raise self._other_examples()

    def _rows_of_batch(self, batch: Batch, rows: Tensor, reading: Reading) -> Tensor:
        self._adjoint_check.check_passes(batch, len(rows))
        return rows_joined(self._passes.forward(batch, rows), rows.dtype)

    def _columns_of_batch(self, batch: Batch, rows: Tensor, reading: Reading) -> Tensor:
        self._adjoint_check.check_passes(batch, 1, forward=False)
        total = rows.new_zeros(len(rows), self.risk.space.dim)
        block = self._block(*self._outputs(batch), reading)
        everything = torch.arange(rows.shape[1], device=rows.device)
        self._back(RowsOfBatch(batch, block, everything), rows, total)
        return total

    def _traced_rows(self, trace: Trace, rows: Tensor, reading: Reading) -> Tensor:
        return rows_joined(trace.linearized(rows)[1], rows.dtype)

    def _traced_columns(self, trace: Trace, rows: Tensor, reading: Reading) -> Tensor:
        (f,), pull = pullback(trace.outputs, *trace.parameters)
        U = rows.reshape(len(rows), *f.shape).to(f.dtype)
        return rows_joined(each(lambda u: pull((u,)), [U]), rows.dtype)


class GGNFactor(DataRows):
    """A factor `B [P, N·R·K]` of `GGN(risk, vectors)`, exact and matrix-free: `B Bᵀ = GGN`.

    `B = √c Jᵀ B_ℓ`, with a root `B_ℓ` of the Hessian of every loss term, or the vectors in its
    place, and the factor `c` of the loss's reduction over the whole data set. `B @ u` draws from
    N(0, GGN) if `u` is standard normal; `B.T @ v` has the squared norm `vᵀ GGN v`. Known as
    `multiply_ggn_factor` and `multiply_fisher_factor` (`B @ u`), and `..._transpose` (`B.T @ v`) in
    kfac_jax, whose loss classes give the same roots.

    What `B` multiplies is one tensor `[N, R, K]` in the order of the data: N examples, R loss terms
    of each, K columns of the root. If R differs from batch to batch, it is a flat one, `[Σ N·R·K]`,
    batch after batch. Of several losses it is one such tensor for each loss, under the key of its
    output; or a single one, where their vectors are sent together.

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
        check_deterministic: True compares two products first. None: two evaluations of a few
            examples have to agree, once per risk. False: not even these.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64
            at most.

    Raises:
        ValueError: If `vectors` sends nothing (`ForwardOnly()`), the data are an iterator, or
            `chunk_size` is less than one.
        RuntimeError: If two products differ, as with a loader that shuffles.
        UnsupportedError: If a loss has no likelihood, or no root.

    Cost: `B @ u` is one forward and one backward pass, `B.T @ v` one forward pass with tangents.
    One pass over the data comes first, for their number.

    Source: Martens 2020, "New insights and perspectives on the natural gradient method", sections 8
    and 9.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> B = GGNFactor(EmpiricalRisk(nn.Linear(1, 1, bias=False), nn.MSELoss(), data))
        >>> B.to_dense(), (B @ B.T).to_dense()  # 3 √2
        (tensor([[4.2426]]), tensor([[18.0000]]))
    """

    _exponent = 0.5
    _transposed = True

    @takes_risk
    def __init__(
        self,
        risk: EmpiricalRisk,
        vectors: Vectors | str | None = None,
        *,
        check_deterministic: bool | None = None,
        chunk_size: int | None = None,
    ) -> None:
        self.vectors = as_vectors(vectors)
        risk = risk.for_vectors(self.vectors)
        check_vectors(type(self).__name__, risk, self.vectors, any_loss=False)
        super().__init__(
            risk, partial(read_terms, risk), self.vectors.seed or 0, check_deterministic, chunk_size
        )

    def _block(self, F: Outputs, extra: Terms, reading: Reading) -> LossRoots:
        return LossRoots(self.risk, self.vectors, reading, F, extra)
