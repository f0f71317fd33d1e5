"""The generalized Gauss-Newton matrix, and all others of the form `Jᵀ M J`: Fisher, sampled or empirical."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.exact.base import ParameterCurvature
from curvlinops_plus.exact.loss_terms import LossTerms, check_vectors, hessian_product, loss_roots, run_losses
from curvlinops_plus.exact.passes import Linear, Outputs, Passes, not_a_derivative
from curvlinops_plus.linalg import Structure
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals, Vectors, as_vectors
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.risk import takes_risk


class GGN(ParameterCurvature):
    """The matrix `c Σ_n J_nᵀ M_n J_n`, exact and matrix-free: the generalized Gauss-Newton matrix, or a Fisher matrix.

    `J_n` is the Jacobian of the model's output for example n, and `c` the factor of the loss's reduction over the whole
    data set. By default `M_n` is the Hessian of the loss with respect to the output, with every option of the loss. For
    losses of which only the Fisher information makes sense as a curvature (`nn.NLLLoss`, whose Hessian is 0 in the
    log-probabilities; `nn.BCELoss`, `nn.GaussianNLLLoss`, `nn.PoissonNLLLoss(log_input=False)`) it is the
    Fisher information; the same loss written as a function has its plain Hessian. Other `vectors` give other matrices:

    | vectors | matrix |
    | --- | --- |
    | `Exact()` | generalized Gauss-Newton |
    | `MonteCarlo(samples, seed)` | Fisher, estimated from labels that the model draws; loss terms are taken apart |
    | `Empirical()` | empirical Fisher, one gradient per example |
    | `Empirical(per_term=True)` | empirical Fisher, one gradient per loss term |
    | `CurvaturePropagation(samples, seed)`, `Exact(signs=True)` | GGN, estimated from columns with random signs |
    | a `Vectors` class of your own | `M_n = Σ_k v_k v_kᵀ` of the vectors that it sends |

    Random vectors are the same in each product: they depend on the seed and the order of the examples. Of several
    losses it is the weighted sum of their matrices; with vectors that are sent together for all losses (`Empirical()`,
    `CurvaturePropagation`) there are cross terms, as in `curvature(risk, FullBlock, vectors=...)`.

    Args:
        risk: Model, loss, data and parameters.
        vectors: Which matrix: an object as above, or a word (see `as_vectors`). Default: `Exact()`.
        check_deterministic: True compares the total loss of two passes over the data first, and two products if vectors
            are random. None: two evaluations of a few examples have to agree, once per risk. False: not even these.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64 at most.

    Raises:
        ValueError: If `vectors` sends nothing (`ForwardOnly()`), or `chunk_size` is less than one.
        UnsupportedError: If the loss has no likelihood and `vectors` needs one. `Exact()` takes any loss: what has no
            likelihood is differentiated twice.
        RuntimeError: If two passes over the data disagree.

    Cost: one sweep per product, of a forward pass with tangents and a backward pass; columns of a chunk share a
    forward pass. `to_dense()`: a backward pass for each number that a batch's outputs have, or a product for each
    parameter where these are fewer.

    Source: Schraudolph 2002, "Fast curvature matrix-vector products for second-order gradient descent".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import Empirical, EmpiricalRisk
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.tensor([[3.0]]), torch.zeros(1, 1))])
        >>> GGN(risk).to_dense(), GGN(risk, Empirical()).to_dense()  # 2 · 3², (2 · 3 · 3)²
        (tensor([[18.]]), tensor([[324.]]))
    """

    structure = Structure.PSD

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
        super().__init__(risk, check_deterministic)
        check_vectors(type(self).__name__, risk, self.vectors, any_loss=True)
        self._passes = Passes(risk, partial(run_losses, risk), chunk_size)
        if check_deterministic:
            self._check_loss()
            if self.vectors.random:
                self._check_products(self._sweep, self.in_space.dim)

    def _output_product(
        self, totals: Totals, weights: LossWeights, draws: Draws
    ) -> Callable[[Outputs, tuple[list[LossTerms], Totals]], Linear]:
        """Makes the product with `M` of a batch, whose counts are added to the totals."""

        def product(F: Outputs, extra: tuple[list[LossTerms], Totals]) -> Linear:
            terms, batch_totals = extra
            totals.add(batch_totals)
            factors = weights.factors(batch_totals, self.vectors.of_loss)
            if all(term.likelihood is not None for term in terms):
                return loss_roots(self.risk, self.vectors, terms, factors, draws).outer_product
            products = [  # of losses without a likelihood, which have no root
                hessian_product(term.loss, term.F)
                if term.likelihood is None
                else partial(term.likelihood.hessian_product, term.F.detach(), term.Y)
                for term in terms
            ]
            return lambda V: [w**2 * product(v) for w, product, v in zip(factors, products, V, strict=True)]

        return product

    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        rows, state = X.T.contiguous(), RandomState.now(self.device)
        for _ in range(2):
            totals, draws = Totals(), Draws(self.vectors.seed or 0)
            total, energy = torch.zeros_like(rows), torch.zeros(len(rows), dtype=self.dtype, device=self.device)
            for batch in self._batches(draws=draws):
                energy += self._passes.ggn(batch, rows, self._output_product(totals, weights, draws), total)
                if self._passes.twice:  # a vector of ones may not tell what a random one does
                    self._passes.require_linear(batch)
            if self._passes.agree(rows, total, energy):
                return total.T, totals
            state.restore()
        raise not_a_derivative()

    def _to_dense(self) -> Tensor:
        return self._over_data(self._dense_sweep)

    def _dense_sweep(self, _: Any, weights: LossWeights) -> tuple[Tensor, Totals]:
        """From the rows of `J` of each batch if these are fewer than parameters, else column by column."""
        totals, draws, n = Totals(), Draws(self.vectors.seed or 0), self.in_space.dim
        total = torch.zeros(n, n, dtype=self.dtype, device=self.device)
        for batch in self._batches(draws=draws):
            self._passes.require_linear(batch)
            output_product = self._output_product(totals, weights, draws)

            def rows(F: Outputs, extra: Any, free: list[Tensor], product: Any = output_product) -> Tensor | None:
                sizes = [f.numel() for f in F]
                if sum(sizes) >= n:
                    return None
                M, parts = product(F, extra), []
                for unit in torch.eye(sum(sizes), dtype=F[0].dtype, device=self.device).split(self._passes.columns):
                    units = zip(unit.split(sizes, 1), F, strict=True)
                    parts.append(self._passes.back(F, free, [u.reshape(-1, *f.shape) for u, f in units]))
                J = torch.cat(parts)
                V = [part.T.reshape(n, *f.shape).to(f.dtype) for part, f in zip(J.split(sizes), F, strict=True)]
                return torch.cat([Mv.flatten(1).to(J.dtype) for Mv in M(V)], 1) @ J

            state = RandomState.now(self.device)
            found = self._passes.graph(batch, rows)
            if found is None:
                state.restore()
                eye = torch.eye(n, dtype=self.dtype, device=self.device)
                self._passes.ggn(batch, eye, output_product, total)
            else:
                total += found
        return total, totals
