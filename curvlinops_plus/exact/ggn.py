"""The generalized Gauss-Newton matrix, and all others of the form `Jᵀ M J`: Fisher, sampled or
empirical.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.adjoint import AdjointCheck
from curvlinops_plus.exact.base import RiskOperator
from curvlinops_plus.exact.compiled import Compiled, ProductForms
from curvlinops_plus.exact.differentiable import gradients_with_graph
from curvlinops_plus.exact.passes import Linear, Outputs, Pass, Passes, vjp
from curvlinops_plus.exact.reading import Reading
from curvlinops_plus.exact.traced_batch import Trace, each, pullback, rows_joined
from curvlinops_plus.linalg import Structure
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import EmpiricalRisk, Vectors, as_vectors
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.losses import OutputLoss, Terms
from curvlinops_plus.risk.risk import takes_risk
from curvlinops_plus.risk.vectors import WeightedRoot


class GGN(RiskOperator):
    """The matrix `c Σ_n J_nᵀ M_n J_n`, exact and matrix-free: the generalized Gauss-Newton matrix,
    or a Fisher matrix.

    `J_n` is the Jacobian of the model's output for example n, and `c` the factor of the loss's
    reduction over the whole data set. By default `M_n` is the Hessian of the loss with respect to
    the output, with every option of the loss. For losses of which only the Fisher information makes
    sense as a curvature (`nn.NLLLoss`, whose Hessian is 0 in the log-probabilities; `nn.BCELoss`,
    `nn.GaussianNLLLoss`, `nn.PoissonNLLLoss(log_input=False)`) it is the Fisher information; the
    same loss written as a function has its plain Hessian. Other `vectors` give other matrices:

    | vectors | matrix | | --- | --- | | `Exact()` | generalized Gauss-Newton | |
    `MonteCarlo(samples, seed)` | Fisher, estimated from labels that the model draws; loss terms are
    taken apart | | `Empirical()` | empirical Fisher, one gradient per example | |
    `Empirical(per_term=True)` | empirical Fisher, one gradient per loss term | |
    `CurvaturePropagation(samples, seed)`, `Exact(signs=True)` | GGN, estimated from columns with
    random signs | | a `Vectors` class of your own | `M_n = Σ_k v_k v_kᵀ` of the vectors that it
    sends |

    Random vectors are the same in each product: they depend on the seed and the order of the
    examples. Of several losses it is the weighted sum of their matrices; with vectors that are sent
    together for all losses (`Empirical()`, `CurvaturePropagation`) there are cross terms, as in
    `curvature(risk, FullBlock, vectors=...)`.

    Args:
        risk: Model, loss, data and parameters.
        vectors: Which matrix: an object as above, or a name (see `as_vectors`). Default: `Exact()`.
        check_deterministic: True compares the total loss of two passes over the data first, and two
            products if vectors are random. None: two evaluations of a few examples have to agree,
            once per risk. False: not even these.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64
            at most.
        compile: Whether products and `gradient_and_loss()` are computed by compiled functions
            (`torch.compile`), after a comparison with the eager product on the first batch of each
            shape. What can't be compiled, or has other numbers, or takes longer, stays eager, with
            a warning. It takes seconds to minutes in the first products, see docs/performance.md.

    Raises:
        ValueError: If `vectors` sends nothing (`ForwardOnly()`), or `chunk_size` is less than one.
        UnsupportedError: If the loss has no likelihood and `vectors` needs one. `Exact()` takes any
            loss: what has no likelihood is differentiated twice.
        RuntimeError: If two passes over the data disagree.

    Cost: one sweep per product, of a forward pass with tangents and a backward pass; columns of a
    chunk share a forward pass. `to_dense()`: a backward pass for each number that a batch's outputs
    have, or a product for each parameter where these are fewer. `quadratic_form` of a few vectors
    takes no backward pass.

    Source: Schraudolph 2002, "Fast curvature matrix-vector products for second-order gradient
    descent".

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
        compile: bool = False,
    ) -> None:
        self.vectors = as_vectors(vectors)
        risk = risk.for_vectors(self.vectors)
        check_vectors(type(self).__name__, risk, self.vectors, any_loss=True)
        self.in_space = self.out_space = risk.space
        passes = Passes(risk, partial(read_terms, risk), chunk_size)
        super().__init__(risk, passes, check_deterministic)
        self._adjoint_check = AdjointCheck(passes)
        if self.vectors.random:
            self._seed = self.vectors.seed or 0
        if compile:
            product = ProductForms(self._products, self._of_batch, self._traced, self._sum)
            self._compiled = Compiled(type(self).__name__, passes, product, self._compares_few)
        if check_deterministic:
            self._compare_losses()
            if self.vectors.random:
                self._compare_products(self._products, self.in_space.dim)

    def _products(self, X: Tensor, reading: Reading) -> Tensor:
        rows = X.T.contiguous()
        total = torch.zeros_like(rows)
        energy = rows.new_zeros(len(rows))
        roots = partial(LossRoots, self.risk, self.vectors, reading)
        for batch in self._batches(reading):
            self._adjoint_check.check_passes(batch, len(rows), graph=True)
            energy += self._passes.ggn(batch, rows, roots, total)
        self._adjoint_check.check_products(rows, total, energy)
        return total.T

    def _of_batch(self, batch: Batch, rows: Tensor, reading: Reading) -> Tensor:
        """Products of one batch, [K, n] -> [K, n]."""
        total = torch.zeros_like(rows)
        roots = partial(LossRoots, self.risk, self.vectors, reading)
        self._adjoint_check.check_passes(batch, len(rows), graph=True)
        energy = self._passes.ggn(batch, rows, roots, total)
        self._adjoint_check.check_products(rows, total, energy)
        return total

    def _traced(self, trace: Trace, rows: Tensor, reading: Reading) -> Tensor:
        """The same in a compiled function."""
        F, JV, pull = trace.linearized(rows)
        M = LossRoots(self.risk, self.vectors, reading, F, trace.extra)
        MJV = [v.to(f.dtype) for v, f in zip(M(JV), F, strict=True)]
        return rows_joined(each(lambda *v: pull(v), MJV), rows.dtype)

    def _quadratic_form(self, rows: Tensor) -> Tensor:
        """By the forward half of products, which one product of all checks."""
        few = 0 < rows[..., 0].numel() <= self._passes.columns
        if rows.requires_grad or rows.ndim > 2 or self._passes.narrow or not few:
            return super()._quadratic_form(rows)
        form = self._over_data(self._forms, rows.reshape(-1, rows.shape[-1]).T)
        return form if rows.ndim == 2 else form[0, 0]

    def _forms(self, X: Tensor, reading: Reading) -> Tensor:
        """`Xᵀ GGN X` before it is reduced."""
        rows = X.T.contiguous()
        total = rows.new_zeros(len(rows), len(rows))
        roots = partial(LossRoots, self.risk, self.vectors, reading)
        for batch in self._batches(reading):
            self._adjoint_check.check_passes(batch, len(rows))
            total += self._passes.ggn(batch, rows, roots)
        return total

    def _to_dense(self) -> Tensor:
        return self._over_data(self._dense_sum)

    def _dense_sum(self, _: Any, reading: Reading) -> Tensor:
        """From the rows of `J` of each batch if these are fewer than parameters, else column by
        column.
        """
        passes = self._passes
        n = self.in_space.dim
        total = torch.zeros(n, n, dtype=self.dtype, device=self.device)
        roots = partial(LossRoots, self.risk, self.vectors, reading)
        for batch in self._batches(reading):
            self._adjoint_check.check_passes(batch, 1, forward=False)
            state = RandomState.now(self.device)
            with passes.run(batch) as run:
                by_rows = sum(f.numel() for f in run.outputs) < n
                if by_rows:
                    J = _dense_jacobian(passes, run, self.dtype)
                    M = roots(run.outputs, run.extra)
                    total += _transposed_product(M, run.outputs, J) @ J
            if not by_rows:
                self._adjoint_check.check_passes(batch, n)
                state.restore()  # dropout is that of a product
                passes.ggn(batch, torch.eye(n, dtype=self.dtype, device=self.device), roots, total)
        return total


def _dense_jacobian(passes: Passes, run: Pass, dtype: torch.dtype) -> Tensor:
    """`J [outputs, n]` of a batch, by a backward pass for each row."""
    F = run.outputs
    sizes = [f.numel() for f in F]
    units = torch.eye(sum(sizes), dtype=F[0].dtype, device=F[0].device).split(sizes, 1)
    vectors = [unit.reshape(-1, *f.shape) for unit, f in zip(units, F, strict=True)]
    J = torch.zeros(sum(sizes), sum(passes.sizes), dtype=dtype, device=F[0].device)
    passes.back(F, run.parameters, vectors, J)
    return J


def _transposed_product(M: Linear, F: Outputs, J: Tensor) -> Tensor:
    """`(M J)ᵀ [n, outputs]`."""
    columns = J.split([f.numel() for f in F])
    V = [v.T.reshape(-1, *f.shape).to(f.dtype) for v, f in zip(columns, F, strict=True)]
    return torch.cat([product.flatten(1).to(J.dtype) for product in M(V)], 1)


# ---------------------------------------------------------------------------- matrices over outputs
def read_terms(risk: EmpiricalRisk, model: nn.Module, batch: Batch) -> tuple[Outputs, Terms]:
    """Run the model: the outputs that are differentiated, and what the losses make of them.

    Values of losses with a likelihood are not computed.
    """
    terms = risk.losses.terms(risk.run(batch, model), batch, values=False)
    risk.losses.require_targets(terms)
    return terms.outputs, terms


class ValueHessian:
    """The Hessian of a loss with respect to an output `F`, below it in a graph, for losses without
    a likelihood.

    Cost: one backward pass, and one for each product.
    """

    per_term = True

    def __init__(self, loss: Any, F: Tensor) -> None:
        self.F = F
        self.gradient = None
        if loss.requires_grad and F.requires_grad:
            sent = torch.ones_like(loss).requires_grad_()
            (self.gradient,) = gradients_with_graph([loss], [F], [sent])

    def outer_product(self, V: Tensor) -> Tensor:
        """`H v` of vectors [K, *F.shape]."""
        if self.gradient is None or not self.gradient.requires_grad:
            return torch.zeros_like(V)
        (product,) = vjp([self.gradient], [self.F], [V])
        return torch.zeros_like(V) if product is None else product


class TracedHessian:
    """The same in a compiled function.

    Args:
        loss: The loss.
        F: The output.
        y: The target.
        N: Number of examples.
    """

    per_term = True

    def __init__(self, loss: OutputLoss, F: Tensor, y: Any, N: int) -> None:
        self.F = F
        self.batch = Batch(None, y, N)
        self.loss = loss

    def value(self, F: Tensor) -> Any:
        """The sum of the loss over the batch."""
        return self.loss.terms(F, self.batch.y, None, self.batch, values=True)[3]

    def outer_product(self, V: Tensor) -> Tensor:
        """`H v` of vectors [K, *F.shape]."""
        pull = pullback(torch.func.grad(self.value), self.F)[1]
        return each(pull, [V])[0]


class LossRoots:
    """The root `B` of the matrix of all losses over the outputs of one batch.

    Losses whose vectors are sent together have columns in common, and so cross terms; else each has
    its own columns, side by side.

    Args:
        risk: Has the losses.
        vectors: Which matrix.
        reading: Weights of the losses and random numbers; the counts of the batch are added to its
            totals.
        F: The outputs of the batch.
        terms: What the losses make of them.
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        vectors: Vectors,
        reading: Reading,
        F: Outputs,
        terms: Terms,
    ) -> None:
        self.roots: list[Any] = []
        # All before the first of them draws: it is the others' original.
        streams = [reading.draws.of_loss(k) for k in range(len(F))]
        for k, (loss, f, Y) in enumerate(zip(risk.losses, F, terms.targets, strict=True)):
            if loss.likelihood is not None:
                root: Any = vectors.root(loss.likelihood, f.detach(), Y, streams[k])
                if terms.weight is not None:
                    root = WeightedRoot(root, terms.weight.to(f))
            elif torch.compiler.is_compiling():
                root = TracedHessian(loss, f, Y, terms.totals.examples)
            else:
                root = ValueHessian(terms.totals.losses[k], f)
            self.roots.append(root)
        self.factors = reading.weights.factors(terms.totals, vectors.of_loss)
        #: Whether the losses have columns in common.
        self.joint = (
            vectors.together
            and len(self.roots) > 1
            and len({root.shape for root in self.roots}) == 1
            and not any(root.per_term for root in self.roots)
        )
        reading.totals.add(terms.totals)

    @property
    def shapes(self) -> list[torch.Size]:
        """What it multiplies: `[N, R', K]`, for each loss where they have columns of their own."""
        roots = self.roots[:1] if self.joint else self.roots
        return [root.shape for root in roots]

    def product(self, U: Sequence[Tensor]) -> list[Tensor]:
        """`B u`: [*lead, N, R', K] for each of `shapes` -> [*lead, N, R, C] for each output."""
        if self.joint:
            U = [U[0]] * len(self.roots)
        return self._weighted([root.product(u) for root, u in zip(self.roots, U, strict=True)])

    def transpose_product(self, V: Sequence[Tensor]) -> list[Tensor]:
        """`Bᵀ v`: [*lead, N, R, C] for each output -> [*lead, N, R', K] for each of `shapes`."""
        U = [root.transpose_product(v) for root, v in zip(self.roots, V, strict=True)]
        U = self._weighted(U)
        return [reduce(torch.add, U)] if self.joint else U

    def __call__(self, V: Sequence[Tensor]) -> list[Tensor]:
        """`M v = B Bᵀ v`: [*lead, N, R, C] for each output, in and out."""
        if self.joint:
            return self.product(self.transpose_product(V))
        MV = [root.outer_product(v) for root, v in zip(self.roots, V, strict=True)]
        return self._weighted(MV, power=2)

    def _weighted(self, tensors: list[Tensor], power: int = 1) -> list[Tensor]:
        if self.factors == [1.0]:
            return tensors
        return [c**power * t for c, t in zip(self.factors, tensors, strict=True)]


def check_vectors(name: str, risk: EmpiricalRisk, vectors: Vectors, any_loss: bool) -> None:
    """Refuse, before anything is computed, vectors without a matrix and losses that have none.

    Args:
        name: Of the operator.
        risk: Its risk.
        vectors: Its mode.
        any_loss: Whether losses without a likelihood are taken, if the mode takes them.

    Raises:
        ValueError: If no vectors are sent.
        UnsupportedError: If a loss has no likelihood that is needed, or not this matrix.
    """
    if not vectors.backward:
        raise ValueError(
            f"{name} needs vectors that are backpropagated through the network; {vectors!r} sends "
            "none. Take Exact(), MonteCarlo(samples, seed), CurvaturePropagation(samples, seed) or "
            "Empirical()."
        )
    if not any_loss or vectors.needs_likelihood or risk.losses.have_likelihoods:
        for loss in risk.losses:
            vectors.check(loss.require_likelihood())
