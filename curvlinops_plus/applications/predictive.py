"""Covariances of a model's outputs, and averages of predictions over normally distributed outputs.

With `Σ = L Lᵀ` and `φ_{n,c} = Lᵀ J_{n,c}` for example `n` and number `c` of its output, covariances
are products of these vectors. For regression the predictive distribution is normal again. Class
probabilities have no closed form, and three approximations are usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.applications.attribution import fill_unused, send_back
from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.contexts import GradMode
from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.likelihood.bce import BCEWithLogits
from curvlinops_plus.likelihood.cross_entropy import NLL, CrossEntropy
from curvlinops_plus.likelihood.elementwise import MSE, GaussianNLL
from curvlinops_plus.linalg import BlockDiagonal, Diagonal, Kronecker, LinearOperator
from curvlinops_plus.linalg.numerics import eigh, standard_normal
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, LayerBatch, Vectors
from curvlinops_plus.risk.batches import Batch, count_examples, mapped, on_device
from curvlinops_plus.risk.function_reads import layers_of
from curvlinops_plus.risk.loss_passes import LossWeights
from curvlinops_plus.risk.losses import Losses
from curvlinops_plus.risk.preserve import preserve_state, untraced
from curvlinops_plus.risk.risk import Checked

#: Likelihoods with a predictive distribution, and their links from outputs to class probabilities.
LINKS: dict[type[Likelihood], tuple[str, ...]] = {
    CrossEntropy: ("probit", "mc", "bridge"),
    NLL: ("probit", "mc", "bridge"),
    BCEWithLogits: ("probit", "mc"),
    MSE: ("probit",),
    GaussianNLL: ("probit",),
}


class Normal(NamedTuple):
    """A normal distribution of each number of a prediction.

    Attributes:
        mean: Its mean.
        variance: Its variance.
    """

    mean: Tensor
    variance: Tensor


def needs_covariance(likelihood: Likelihood, link: str) -> bool:
    """Whether covariances between the numbers of a loss term are needed, or variances alone.

    Raises:
        ValueError: If the loss does not have this link.
        UnsupportedError: If it has no predictive distribution here.
    """
    links = LINKS.get(type(likelihood))
    if links is None:
        raise UnsupportedError(
            f"{likelihood.name} has no predictive distribution here; outputs(X) has their moments."
        )
    if not isinstance(link, str) or link not in links:
        raise ValueError(f"link={link!r}; {likelihood.name} has {', '.join(map(repr, links))}.")
    return isinstance(likelihood, CrossEntropy) and link != "probit"


def predictive(
    likelihood: Likelihood,
    link: str,
    mean: Tensor,
    spread: Tensor,
    noise: Tensor | None,
    samples: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, ...]:
    """The predictive distribution of each loss term, [N, R, C]: class probabilities, or means and
    variances.

    Args:
        link: As `needs_covariance` has accepted it.
        mean: Of the outputs, [N, R, C].
        spread: Their variances, or covariances if these are needed.
        noise: Standard deviation of the observations, of `MSE`.
    """
    if isinstance(likelihood, MSE):
        assert noise is not None
        return Normal(mean, spread + noise.to(mean) ** 2)
    if isinstance(likelihood, GaussianNLL):
        # The outputs are means and variances of observations.
        center, noise_variance = mean.chunk(2, -1)
        center_variance, _ = spread.chunk(2, -1)
        return Normal(center, center_variance + noise_variance.clamp(min=likelihood.loss.eps))
    if link == "bridge":
        return (_bridge(mean, spread),)
    if isinstance(likelihood, CrossEntropy):
        probabilities = partial(torch.softmax, dim=-1)
    else:
        probabilities = torch.sigmoid
    if link == "probit":
        return (probabilities(mean / (1 + math.pi / 8 * spread).sqrt()),)
    # One row of draws for each number of the outputs, example by example: [N, R, C, samples].
    draws = standard_normal(samples, mean.numel(), generator, mean).view(*mean.shape, samples)
    if spread.ndim == mean.ndim:
        deviations = spread.sqrt()[..., None] * draws
    else:
        # S^½ z = Q √Λ z
        eigenvalues, Q = eigh(spread)
        deviations = Q @ (eigenvalues.clamp(min=0).sqrt()[..., None] * draws)
    return (probabilities((mean[..., None] + deviations).mT).mean(-2),)


def _bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the Dirichlet distribution whose Laplace approximation in the logits is N(m, S).

    A constant that is added to all logits doesn't matter, so the normal distribution is conditioned
    on a sum of 0.

    Source: Hobbhahn, Kristiadi & Hennig 2022, "Fast predictive uncertainty for classification with
    Bayesian deep networks".
    """
    K = mean.shape[-1]
    tiny = torch.finfo(mean.dtype).tiny
    # m - S1 1ᵀm / 1ᵀS1 and the diagonal of S - S1 (S1)ᵀ / 1ᵀS1
    row_sums = covariance.sum(-1)
    total = row_sums.sum(-1, keepdim=True).clamp(min=tiny)
    mean = mean - row_sums * mean.sum(-1, keepdim=True) / total
    variances = covariance.diagonal(dim1=-2, dim2=-1) - row_sums.square() / total
    variances = variances.clamp(min=tiny)
    # α_k = (1 - 2/K + exp(m_k) / K² Σ_l exp(-m_l)) / S_kk, in logarithms.
    alpha = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(K)
    if K > 2:
        alpha = torch.logaddexp(alpha, torch.full_like(alpha, math.log(1 - 2 / K)))
    return (alpha - variances.log()).softmax(-1)


@untraced
def output_covariance(
    K: Any,
    root: BlockDiagonal,
    picked: Tensor | None,
    X: Any,
    full: bool,
    max_bytes: int,
    then: Callable[[Tensor, Tensor, torch.Size, int | None], tuple[Tensor, ...]],
) -> list[Tensor]:
    """`then` of the outputs for inputs `X` and their variances, or (`full`) covariances within loss
    terms, chunk by chunk; its tensors are joined.

    Args:
        K: The curvature, which knows model and parameters.
        root: `L` with `L Lᵀ` the covariance of the parameters.
        picked: Positions of the parameters that this is about; None for all.
        X: What the model is called with.
        max_bytes: Memory for derivatives of outputs: inputs are cut into chunks.
        then: Takes the outputs `[N, R, C]` of a chunk, variances `[N, R, C]` or covariances `[N, R,
            C, C]`, the shape in which the model returns outputs, and its axis of C numbers where it
            is not the loss's own.

    Raises:
        ValueError: If there are no inputs.
    """
    risk = _without_targets(K.risk)
    X = mapped(on_device, X, risk.device)
    # The model is called as `model(**X)` where the data's batches are mappings.
    unpack = isinstance(X, Mapping) and isinstance(next(iter(K.risk.data), None), Mapping)
    if unpack:
        X = {key: x for key, x in X.items() if key != "labels"}
    N = count_examples(X, None, 0, risk.options.batch_size_fn, unpack)
    if not N:
        raise ValueError("There are no inputs to predict for.")
    projections = _Projections(K, root, picked, risk)
    results = []
    start = 0
    # The first example tells how much memory one takes; other inputs can't be cut.
    step = 1 if isinstance(X, (Tensor, Mapping)) else N
    with preserve_state(risk.model, risk.data):
        while start < N:
            stop = min(start + step, N)
            inputs = _slice_examples(X, N, start, stop)
            batch = Batch(inputs, risk.losses.joined([None]), stop - start, unpack, start)
            with torch.inference_mode(False), GradMode(False):
                (f,), _, (axis,) = risk.run(batch)
            F, _ = (
                risk.losses[0].require_likelihood().canonical(f, f, batch.num_examples, axis)
            )  # [N, R, C]
            phis = projections.of(batch, F)
            # Cov(f_c, f_d) = J_cᵀ Σ J_d = Σ_blocks φ_c · φ_d
            spread = torch.zeros(()).to(F)
            for phi in phis:
                spread = spread + (phi @ phi.mT if full else phi.square().sum(-1))
            results.append(then(F, spread, f.shape, axis))
            start = stop
            step = max(1, max_bytes // (2 * sum(phi[0].nbytes for phi in phis) + 1))
    return [torch.cat(parts) for parts in zip(*results)]


class _Projections:
    """`φ = Lᵀ J` of the examples' outputs: layer by layer, or of whole Jacobians where `root`
    is not of `K`'s blocks.
    """

    def __init__(
        self, K: Any, root: BlockDiagonal, picked: Tensor | None, risk: EmpiricalRisk
    ) -> None:
        self.root = root
        self.picked = picked
        self.risk = risk
        self.weights = LossWeights(risk)
        self.by_layer = picked is None and isinstance(K, BlockwiseLinearOperator)
        self.layers = [entry.layer for entry in K.plan] if self.by_layer else layers_of(risk)
        #: `√(Λ (Q_Aᵀ a)²)` of layers that read one row of each example.
        self.lengths: dict[Layer, Tensor] = {}

    def of(self, batch: Batch, F: Tensor) -> list[Tensor]:
        """`φ` of each block, [N, R, C, k], for outputs `F` [N, R, C]."""
        N, R, C = F.shape
        take = self._of_layer if self.by_layer else methodcaller("param_grads")
        parts, _ = send_back(self.risk, _Units(), self.weights, batch, self.layers, take)
        if self.by_layer:
            phis = [*parts.values()]
        else:
            J = self.risk.space.flatten_rows(fill_unused(parts, self.risk, R * C, N))
            phis = [_transposed_times(self.root, J if self.picked is None else J[..., self.picked])]
        return [phi.view(R, C, N, -1).permute(2, 0, 1, 3) for phi in phis]

    def _of_layer(self, batch: LayerBatch) -> dict[str, Tensor]:
        """`φ` of each block of a layer, [V, N, k].

        Where a layer reads one row `a` for each example, and `L = (Q_G ⊗ Q_A) √Λ (Q_G ⊗ Q_A)ᵀ`,
        `φ` is up to a rotation `(Q_Gᵀ g) √(Λ (Q_Aᵀ a)²)`: as many numbers as the layer has outputs,
        not as it has parameters. The second factor is kept for the further vectors.
        """
        phis = {}
        for group in batch.layer.groups:
            part = batch.restrict(group)
            L: Any = self.root.blocks[group.name]
            basis = getattr(L, "basis", None)
            in_factors = isinstance(L, Diagonal) or isinstance(basis, Kronecker)
            is_plain = part.role is not None and part.weight and not part.sparse
            one_row = is_plain and len(part.calls) == 1 and part.grads.shape[2:-1] == (1,)
            if not (in_factors and one_row):
                phis[group.name] = _transposed_times(L, part.per_example_grads.flatten(2))
                continue
            g = part.grads[:, :, 0]
            if basis is not None:
                g = _transposed_times(basis.G, g)
            if batch.first:
                a: Any = part.inputs[:, 0]  # type: ignore[index]
                if basis is not None:
                    a = _transposed_times(basis.A, a)
                # L is Diagonal(√Λ) itself, or √Λ in the basis.
                roots = L.vector if isinstance(L, Diagonal) else L.values
                roots = roots.view(-1, a.shape[1])
                self.lengths[batch.layer] = (a.square() @ roots.square().T).sqrt()
            phis[group.name] = g * self.lengths[batch.layer]
        return phis


def _transposed_times(L: LinearOperator, J: Tensor) -> Tensor:
    """`Lᵀ` times each row of J."""
    return (L.T @ J.flatten(0, -2).T).T.reshape(J.shape)


class _Units(Vectors):
    """A unit vector for each number of an example's output, the same for all examples."""

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return F.shape[1] * F.shape[2]

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        for r in range(F.shape[1]):
            for c in range(F.shape[2]):
                unit = torch.zeros_like(F)
                unit[:, r, c] = 1
                yield unit


def _without_targets(risk: EmpiricalRisk) -> EmpiricalRisk:
    """The same model, parameters and layers for inputs alone, in this process."""
    (reference,) = risk.losses
    loss = _Targetless(reference.require_likelihood().class_axis)
    losses: Any = loss
    if risk.losses.form == "dict":
        losses = {reference.key: loss}
    elif risk.losses.form == "tuple":
        losses = (loss,)
    targetless = copy(risk)
    targetless.losses = Losses(losses)
    targetless.checked = Checked()
    targetless.processes = Alone()
    targetless.options = replace(risk.options, mask=None, shift_labels=False, progressbar=False)
    return targetless


class _Targetless(Likelihood):
    """Outputs in the form in which a loss reads them, where there are no targets."""

    def __init__(self, class_axis: int) -> None:
        super().__init__(None, "sum")
        self.class_axis = class_axis

    def canonical(
        self, f: Tensor, y: Any, num_examples: int, class_axis: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().canonical(f, f, num_examples, class_axis)

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        return F

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        return torch.zeros_like(F[..., 0])


def _slice_examples(X: Any, N: int, start: int, stop: int) -> Any:
    """Examples `start` to `stop` of an input; what has no axis of N examples is for all."""
    if isinstance(X, Tensor):
        return X[start:stop]
    if not isinstance(X, Mapping):
        return X
    per_example = [key for key, x in X.items() if isinstance(x, Tensor) and x.ndim and len(x) == N]
    return {key: x[start:stop] if key in per_example else x for key, x in X.items()}
