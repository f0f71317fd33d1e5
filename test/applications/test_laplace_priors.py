"""Priors with a mean, tempering, a posterior as the next prior, and joint and differentiable
predictions, against dense algebra.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    Laplace,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.applications import Normal
from test.applications.test_laplace import (
    CLASSES,
    NETS,
    N,
    jacobian,
    mode,
    precision,
    risk_of,
)
from test.cases import close
from test.helpers import F64, normal, refusals

X = NETS["mlp"][1]


def normal_logdet(P: Tensor) -> Tensor:
    return torch.linalg.slogdet(P)[1]


@pytest.mark.parametrize("loss", ["mean", "squared"])
def test_temperature_and_mean_of_the_prior(loss: str) -> None:
    risk = risk_of("mlp", loss)
    K, noise = curvature(risk, EKFAC), 0.3 if loss == "squared" else None
    mean = {key: normal(*p.shape, seed=k) for k, (key, p) in enumerate(risk.params.items())}
    plain = Laplace(K, 2.0, noise)
    la = Laplace(K, 2.0, noise, prior_mean=mean, temperature=0.25)
    # The likelihood to the power of 4: four times the data.
    P = 4 * (precision(K, loss, 2.0, noise) - 2 * torch.eye(K.shape[0], dtype=F64))
    P = P + 2 * torch.eye(K.shape[0], dtype=F64)
    close(la.posterior.to_dense(), torch.linalg.inv(P))
    theta = mode(risk)
    at = theta - risk.space.flatten(mean)
    n = len(theta)
    likelihood = plain.log_marginal_likelihood() + theta @ theta
    P_plain = precision(K, loss, 2.0, noise)
    likelihood = likelihood + normal_logdet(P_plain) / 2 - n / 2 * math.log(2.0)
    expected = 4 * likelihood - at @ at - normal_logdet(P) / 2 + n / 2 * math.log(2.0)
    close(la.log_marginal_likelihood(), expected)
    plain.predict(X)
    plain.temperature = 0.25
    close(plain.posterior.to_dense(), la.posterior.to_dense())
    close(plain.predict(X)[0], la.predict(X)[0])
    plain.temperature = 1.0
    la.fit_prior()
    best = la.log_marginal_likelihood()
    for factor in (0.9, 1.1):
        assert la.log_marginal_likelihood(factor * la.prior_precision) < best  # type: ignore[operator]
    moved = Laplace(K, 2.0, noise, prior_mean=0.5).log_marginal_likelihood()
    again = Laplace(K, 2.0, noise, prior_mean=torch.full((n,), 0.5)).log_marginal_likelihood()
    close(moved, plain.log_marginal_likelihood() + theta @ theta - ((theta - 0.5) ** 2).sum())
    close(moved, again)
    some = Laplace(K, 2.0, noise, subnetwork=[3, 0], prior_mean=mean)
    close(some._deviation(), at[[3, 0]])


@pytest.mark.parametrize("approximation", [DiagonalBlock, FullBlock, "GGN"])
@pytest.mark.parametrize("loss", ["mean", "squared"])
def test_a_posterior_is_the_next_prior(loss: str, approximation: Any) -> None:
    """Exact where curvatures add up: as the whole data, but for where the network was."""
    first = risk_of("mlp", loss)
    (batch, other) = first.data
    noise = 0.5 if loss == "squared" else None

    def of(risk: EmpiricalRisk) -> Any:
        return GGN(risk) if approximation == "GGN" else curvature(risk, approximation)

    before = Laplace(of(first.with_data([batch])), 2.0, noise)
    la = Laplace(of(first.with_data([other])), before, noise)
    both = Laplace(of(first), 2.0, noise)
    close(la.posterior.to_dense(), both.posterior.to_dense())
    close(la.predict(X)[0], both.predict(X)[0])
    total = before.log_marginal_likelihood() + la.log_marginal_likelihood()
    close(total, both.log_marginal_likelihood())
    with torch.no_grad():
        model = first.model
        model[2].bias += 0.1  # type: ignore[index,operator]
    moved = Laplace(of(first.with_data([other])), before, noise)
    P = torch.linalg.inv(before.posterior.to_dense())
    step = mode(first) - before._mode
    loss_sum = moved._log_likelihood(noise)
    Q = torch.linalg.inv(moved.posterior.to_dense())
    growth = normal_logdet(Q) - normal_logdet(P)
    close(moved.log_marginal_likelihood(), loss_sum - (step @ P @ step + growth) / 2)


def test_kronecker_products_add_up_to_the_nearest() -> None:
    risk = risk_of()
    halves = [curvature(risk.with_data([batch]), KFAC) for batch in risk.data]
    before = Laplace(halves[0], {"0": 2.0, "2": 3.0})
    la = Laplace(halves[1], before)
    sums = (5 * halves[0].operator + 7 * halves[1].operator).nearest_kronecker()
    delta = torch.cat([torch.full((12,), 2.0), torch.full((15,), 3.0)]).double()
    close(la.posterior.to_dense(), torch.linalg.inv(sums.to_dense() + delta.diag()))
    again = Laplace(halves[0], la)  # and so on
    assert again.posterior.trace < la.posterior.trace < before.posterior.trace


@pytest.mark.parametrize("subnetwork", [None, [3, 0, 20]])
def test_the_joint_covariance(subnetwork: Any) -> None:
    risk = risk_of()
    la = Laplace(curvature(risk, KFAC), 2.0, subnetwork=subnetwork)
    mean, covariance = la.joint(X)
    J = jacobian(risk, X)[..., slice(None) if subnetwork is None else subnetwork]
    close(mean, risk.model(X))
    close(covariance, torch.einsum("ncp,pq,mdq->ncmd", J, la.posterior.to_dense(), J))
    within = torch.stack([covariance[n, :, n] for n in range(N)])
    close(within, la.outputs(X)[1])


@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_predictions_are_differentiable_in_the_inputs(link: str) -> None:
    la = Laplace(curvature(risk_of(), KFAC), 2.0, max_bytes=10_000)
    at = X[:4].clone().requires_grad_()
    close(la.predict(at, link), la.predict(X[:4], link))
    assert torch.autograd.gradcheck(lambda x: la.predict(x, link), at)
    assert torch.autograd.gradcheck(la.outputs, at)
    assert torch.autograd.gradcheck(la.joint, at)
    with torch.no_grad():
        assert not la.predict(at, link).requires_grad
    assert all(p.grad is None for p in la.risk.model.parameters())


def test_derivatives_where_inputs_are_mappings_and_outputs_have_terms() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv1d(2, 3, 2)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.inner(x * scale)

    torch.manual_seed(0)
    model = Named().double()
    x, scale = normal(5, 2, 4), normal(1, 2, 1, seed=1)
    y = torch.arange(15).view(5, 3) % 3
    risk = EmpiricalRisk(
        model,
        nn.CrossEntropyLoss(),
        [{"x": x, "scale": scale, "labels": y}],
        shift_labels=False,
        batch_size_fn=lambda X: len(X["x"]),
    )
    la = Laplace(curvature(risk, FullBlock), 2.0)
    plain = la.predict({"x": x, "scale": scale})
    at = x.clone().requires_grad_()
    close(la.predict({"x": at, "scale": scale}), plain)
    assert torch.autograd.gradcheck(lambda x: la.predict({"x": x, "scale": scale}), at)


@pytest.mark.parametrize("loss", ["mean", "squared"])
def test_predictions_for_loaders(loss: str) -> None:
    la = Laplace(curvature(risk_of("mlp", loss), KFAC))
    loader = DataLoader(TensorDataset(X, CLASSES), batch_size=5)
    whole, parts = la.predict(X), la.predict(loader)
    assert isinstance(parts, Normal) == (loss == "squared")
    for a, b in zip(whole, parts, strict=True):
        close(a, b)
    once = la.predict(iter([X[:5], (X[5:],)]), progressbar=True)
    close(once[0], whole[0])
    listed = la.predict([(X[:5], CLASSES[:5]), (X[5:], CLASSES[5:])])
    close(listed[0], whole[0])


def la_of(approximation: Any = KFAC, **options: Any) -> Laplace:
    return Laplace(curvature(risk_of(), approximation), **options)


test_refusals = refusals(
    [
        (
            lambda: la_of(prior_precision=la_of(), prior_mean=0.0),
            ValueError,
            "leave out prior_mean",
        ),
        (lambda: la_of(prior_mean=torch.zeros(3)), ValueError, r"prior_mean has the shape \[3\]"),
        (lambda: la_of(temperature=0.0), ValueError, "temperature"),
        (
            lambda: la_of(
                prior_precision=Laplace(curvature(risk_of(), KFAC, separate_weight_and_bias=True))
            ),
            ValueError,
            "the same blocks",
        ),
        (lambda: la_of(EKFAC, prior_precision=la_of(EKFAC)), UnsupportedError, "no eigenvectors"),
        (lambda: la_of(prior_precision=la_of()).fit_prior(), UnsupportedError, "is a posterior"),
        (
            lambda: la_of(prior_precision=la_of()).log_marginal_likelihood(1.0),
            UnsupportedError,
            "is a posterior",
        ),
        (lambda: la_of().predict(iter([])), ValueError, "no inputs"),
        (lambda: la_of().predict([]), ValueError, "no inputs"),
        (
            lambda: la_of().predict(DataLoader(TensorDataset(X, CLASSES), 5, shuffle=True)),
            ValueError,
            r"listed in the order .*RandomSampler \(shuffle=True\)",
        ),
    ]
)
