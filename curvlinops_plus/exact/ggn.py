"""The generalized Gauss-Newton matrix, and all others of the form `Jᵀ M J`: Fisher, sampled or empirical."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.exact.base import ParameterCurvature
from curvlinops_plus.exact.double_backward import loss_hessian_product
from curvlinops_plus.exact.kept import KEPT_BYTES, KeptLinearizations
from curvlinops_plus.exact.linearize import Linearizer, OutputMap, Outputs
from curvlinops_plus.exact.loss_terms import LossTerms, check_vectors, loss_roots, run_losses
from curvlinops_plus.linalg import Structure
from curvlinops_plus.linalg.compared import described
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals, Vectors, as_vectors
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.risk import made_together

# [K, *output] for each output, in and out.
OutputProduct = Callable[[Sequence[Tensor]], list[Tensor]]


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
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.
        max_kept_bytes: Memory in which linearisations of batches may stay between products with single vectors, on a
            CPU; 0, the default, keeps none. A product with one needs no forward pass; the second product with the same
            parameters makes them. By giving it you say that the model is a function of parameters, buffers and batch,
            and that neither it nor anything that it calls remembers what was computed: its code runs again on tensors
            without numbers, and each call of a function of PyTorch's is compared. So changes of parameters, buffers,
            data, attributes, modes, and of the code are noticed. Nothing stays of models with convolutions,
            checkpointing, hooks, backward passes or operations of their own, random numbers, or tensors that neither
            model nor loss holds, nor with losses without likelihood.

    Raises:
        ValueError: If `vectors` sends nothing (`ForwardOnly()`), `chunk_size` is less than one, or `max_kept_bytes` is
            no integer of at least 0.
        UnsupportedError: If the loss has no likelihood and `vectors` needs one. `Exact()` takes any loss: what has no
            likelihood is differentiated twice.
        RuntimeError: If two passes over the data disagree.

    Cost: one sweep per product, of a forward pass with tangents and a backward pass, or two backward passes of a single
    column where a linearisation stayed; columns of a chunk share the forward pass.
    `quadratic_form(J)` is a forward pass with tangents for each row, without a backward pass;
    rows that require a gradient take a product, with a graph.
    `to_dense()`: a backward pass for each number that a batch's outputs have, or a product for each parameter where
    these are fewer.

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

    @made_together
    def __init__(
        self,
        risk: EmpiricalRisk,
        vectors: Vectors | str | None = None,
        *,
        check_deterministic: bool | None = None,
        chunk_size: int | None = None,
        max_kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.vectors = as_vectors(vectors)
        risk = risk.for_vectors(self.vectors)
        super().__init__(risk, check_deterministic)
        check_vectors(type(self).__name__, risk, self.vectors, any_loss=True)
        read = partial(run_losses, risk)
        kept = KeptLinearizations(risk, read, max_kept_bytes)
        # Whether they are still right is read by the host, and a GPU would wait for it.
        if not risk.losses.known or risk.device.type != "cpu" or risk.options.weight is not None:
            kept = None
        self._linear = Linearizer(risk, read, chunk_size, kept)
        if check_deterministic:
            self._check_loss()
            if self.vectors.random:
                self._check_products(
                    "The total loss does not differ, so the data come in another order each time (shuffle=True?), and "
                    "random vectors follow that order."
                )

    def _described(self) -> Mapping[str, Any]:
        return {"vectors=": described(self.vectors)}

    def _sum(
        self,
        of_batch: Callable[[Batch, int, OutputMap[Any], Tensor | None], Tensor],
        size: tuple[int, int],
        weights: LossWeights,
    ) -> tuple[Tensor, Totals]:
        """Un-reduced sum over the batches, and the totals of the data.

        Args:
            of_batch: From a batch, its number, the product with `M`, and the sum so far, the sum with this batch.
            size: Of the sum.
            weights: Of the losses.
        """
        totals, draws, total = Totals(), Draws(self.vectors.seed or 0), None

        def output_product(F: Outputs, extra: tuple[list[LossTerms], Totals]) -> OutputProduct:
            terms, batch_totals = extra
            totals.add(batch_totals)
            factors = self.risk.losses.vector_factors(weights.of(batch_totals), self.vectors.of_loss)
            if all(term.likelihood is not None for term in terms):
                return loss_roots(self.risk, self.vectors, terms, factors, draws).outer_product
            return _hessian_product(terms, factors)

        for index, batch in enumerate(self._batches(draws=draws)):
            total = of_batch(batch, index, output_product, total)
        if total is None:  # the examples are in other processes
            total = torch.zeros(size, dtype=self.dtype, device=self.device)
        return total, totals

    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        def product(batch: Batch, index: int, output_product: OutputMap[Any], total: Tensor | None) -> Tensor:
            return self._linear.ggn_product(batch, X.T, output_product, index, total)

        total, totals = self._sum(product, (X.shape[1], X.shape[0]), weights)
        return total.T, totals

    def _to_dense(self) -> Tensor:
        def matrix(batch: Batch, index: int, output_product: OutputMap[Any], total: Tensor | None) -> Tensor:
            found = self._linear.ggn_matrix(batch, output_product)
            return found if total is None else total.add_(found)

        return self._scaled(partial(self._sum, matrix, self.shape))

    def _quadratic_form(self, rows: Tensor) -> Tensor:
        """`⟨J v, M J w⟩` from tangents alone: nothing is sent back unless derivatives in the rows are wanted."""
        if (rows.requires_grad and torch.is_grad_enabled()) or torch._C._are_functorch_transforms_active():
            return super()._quadratic_form(rows)

        def form(batch: Batch, index: int, output_product: OutputMap[Any], total: Tensor | None) -> Tensor:
            found = self._linear.ggn_form(batch, torch.atleast_2d(rows), output_product)
            return found if total is None else total.add_(found)

        k = 1 if rows.ndim == 1 else len(rows)
        found = self._scaled(partial(self._sum, form, (k, k)), rows)
        return found if rows.ndim > 1 else found[0, 0]


def _hessian_product(terms: Sequence[LossTerms], weights: Sequence[float]) -> OutputProduct:
    """The product with the Hessians of losses of which some have no likelihood, and so no root."""
    products = [
        loss_hessian_product(term.loss, term.F)
        if term.likelihood is None
        else partial(term.likelihood.hessian_product, term.F.detach(), term.Y)
        for term in terms
    ]
    return lambda V: [w**2 * product(v) for w, product, v in zip(weights, products, V, strict=True)]
