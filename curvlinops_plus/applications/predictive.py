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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.applications.attribution import sent_back, with_zeros
from curvlinops_plus.blocks import BlockwiseLinearOperator
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

#: What has a predictive distribution here, and by which links from outputs to class probabilities.
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
    if link not in links:
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
        (m, s), v = mean.chunk(2, -1), spread.chunk(2, -1)[0]
        return Normal(m, v + s.clamp(min=likelihood.loss.eps))
    if link == "bridge":
        return (_bridge(mean, spread),)
    normalise = (
        partial(torch.softmax, dim=-1) if isinstance(likelihood, CrossEntropy) else torch.sigmoid
    )
    if link == "probit":
        return (normalise(mean / (1 + math.pi / 8 * spread).sqrt()),)
    draws = standard_normal(samples, mean.numel(), generator, mean).view(
        *mean.shape, samples
    )  # example by example
    if spread.ndim == mean.ndim:
        deviations = spread.sqrt()[..., None] * draws
    else:
        values, Q = eigh(spread)
        deviations = Q @ (values.clamp(min=0).sqrt()[..., None] * draws)
    return (normalise((mean[..., None] + deviations).mT).mean(-2),)


def _bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the Dirichlet distribution whose Laplace approximation in the logits is N(m, S).

    A constant that is added to all logits doesn't matter, so the normal distribution is conditioned
    on a sum of 0.

    Source: Hobbhahn, Kristiadi & Hennig 2022, "Fast predictive uncertainty for classification with
    Bayesian deep networks".
    """
    K, rows = mean.shape[-1], covariance.sum(-1)
    total = rows.sum(-1, keepdim=True).clamp(min=torch.finfo(mean.dtype).tiny)
    mean = mean - rows * mean.sum(-1, keepdim=True) / total
    variances = (covariance.diagonal(dim1=-2, dim2=-1) - rows.square() / total).clamp(
        min=torch.finfo(mean.dtype).tiny
    )
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
    """What is made of the outputs for inputs `X`, and of their variances, or (`full`) covariances
    within loss terms.

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
    X = {key: x for key, x in X.items() if key != "labels"} if unpack else X
    N = count_examples(X, None, 0, risk.options.batch_size_fn, unpack)
    if not N:
        raise ValueError("There are no inputs to predict for.")
    by_layer = picked is None and isinstance(K, BlockwiseLinearOperator)
    layers = [entry.layer for entry in K.plan] if by_layer else layers_of(risk)
    take = partial(_projected, root, {}) if by_layer else LayerBatch.param_grads
    weights, results = LossWeights(risk), []
    with preserve_state(risk.model, risk.data):
        start, step = (
            0,
            1 if isinstance(X, (Tensor, Mapping)) else N,
        )  # the first example tells what one takes
        while start < N:
            stop = min(start + step, N)
            batch = Batch(
                _examples(X, N, start, stop),
                risk.losses.joined([None]),
                stop - start,
                unpack,
                start,
            )
            with torch.inference_mode(False), torch.no_grad():
                (f,), _, (axis,) = risk.run(batch)
            F = (
                risk.losses[0].require_likelihood().canonical(f, f, batch.num_examples, axis)[0]
            )  # [N, R, C]
            phis, _ = sent_back(
                risk, _Units(), weights, batch, layers, take
            )  # [R·C, N, k] of each block
            if not by_layer:
                J = risk.space.flatten_rows(with_zeros(phis, risk, F[0].numel(), len(F)))
                phis = {"": _transposed_times(root, J if picked is None else J[..., picked])}
            phis = [phi.view(*F.shape[1:], len(F), -1).permute(2, 0, 1, 3) for phi in phis.values()]
            spread = sum(
                (phi @ phi.mT if full else phi.square().sum(-1) for phi in phis),
                start=torch.zeros(()).to(F),
            )
            results.append(then(F, spread, f.shape, axis))
            start, step = stop, max(1, max_bytes // (2 * sum(phi[0].nbytes for phi in phis) + 1))
    return [torch.cat(parts) for parts in zip(*results)]


def _projected(
    root: BlockDiagonal, lengths: dict[Layer, Tensor], seen: LayerBatch
) -> dict[str, Tensor]:
    """`φ` of each block of a layer, [V, N, k].

    Where a layer reads one row `a` for each example, and `L = (Q_G ⊗ Q_A) √Λ (Q_G ⊗ Q_A)ᵀ`, `φ` is
    up to a rotation `(Q_Gᵀ g) √(Λ (Q_Aᵀ a)²)`: as many numbers as the layer has outputs, not as it
    has parameters. The second factor is kept in `lengths` for the further vectors.
    """
    found = {}
    for group in seen.layer.groups:
        own, L = seen.restrict(group), root.blocks[group.name]
        basis: Any = getattr(L, "basis", None)
        in_factors = isinstance(L, Diagonal) or isinstance(basis, Kronecker)
        one_row = own.role is not None and own.weight and not own.sparse and len(own.calls) == 1
        if in_factors and one_row and own.grads.shape[2:-1] == (1,):
            values, phi = getattr(L, "vector" if basis is None else "values"), own.grads[:, :, 0]
            if basis is not None:
                phi = _transposed_times(basis.G, phi)
            if seen.first:
                a: Any = own.inputs[:, 0]  # type: ignore[index]
                a = a if basis is None else _transposed_times(basis.A, a)
                lengths[seen.layer] = (a.square() @ values.view(-1, a.shape[1]).square().T).sqrt()
            phi = phi * lengths[seen.layer]
        else:
            phi = _transposed_times(L, own.per_example_grads.flatten(2))
        found[group.name] = phi
    return found


def _transposed_times(L: LinearOperator, J: Tensor) -> Tensor:  # Lᵀ times each row of J
    return (L.T @ J.flatten(0, -2).T).T.reshape(J.shape)


class _Targetless(Likelihood):
    """Outputs in the form in which a loss reads them, where there are no targets."""

    def __init__(self, like: Likelihood) -> None:
        super().__init__(None, "sum")
        self.class_axis = like.class_axis

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
    other = copy(risk)
    (one,) = risk.losses
    loss = _Targetless(one.require_likelihood())
    other.losses = Losses({"dict": {one.key: loss}, "tuple": (loss,)}.get(risk.losses.form, loss))
    other.checked, other.processes = Checked(), Alone()
    other.options = replace(risk.options, mask=None, shift_labels=False, progressbar=False)
    return other


def _examples(X: Any, N: int, start: int, stop: int) -> Any:
    """Some of the examples of an input."""
    if isinstance(X, Tensor):
        return X[start:stop]
    if not isinstance(X, Mapping):
        return X
    return {
        key: x[start:stop] if isinstance(x, Tensor) and x.ndim and len(x) == N else x
        for key, x in X.items()
    }
