"""Factors `B` of curvature matrices, `B Bᵀ = GGN`.

Letters: `P` parameters, `N` examples, `R` loss terms per example, `K` columns of the root of the loss Hessian.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from curvlinops_plus.exact.data_rows import DataRows, RowBlock
from curvlinops_plus.exact.linearize import Outputs
from curvlinops_plus.exact.loss_terms import (
    LossTerms,
    check_vectors,
    loss_roots,
    run_losses,
)
from curvlinops_plus.linalg import Space
from curvlinops_plus.linalg.implicit import linear_in
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals, Vectors, as_vectors
from curvlinops_plus.risk.losses import LossWeights, with_consistent_weights
from curvlinops_plus.risk.risk import takes_risk


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
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.

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
        result, self._totals = with_consistent_weights(self.risk, sweep, self._totals)
        return result * float(self.risk.scale(self._totals)) ** 0.5

    def _count_rows(self) -> dict[str, tuple[int, ...]]:
        draws, found = Draws(self._seed), []
        for batch in self._batches(", sizes", draws):
            _, (terms, _) = self._linear.outputs(batch)
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
