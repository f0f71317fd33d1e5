"""Laplace approximations against dense matrices, autodiff of one example at a time, and sampled
outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet, MultivariateNormal, Normal
from torch.func import functional_call, jacrev

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    Laplace,
    curvature,
)
from test.cases import close, unchanged
from test.fuzz.limits import small_buffers
from test.helpers import F64, normal, seeded
from test.nets import tanh_net

N, C = 12, 3


class Tokens(nn.Module):
    """An embedding, a normalisation and two linear layers of which one sees positions: [N, T] ->
    [N, C].
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 3), nn.LayerNorm(3)
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(self.table(x))).tanh().mean(1))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return tanh_net(2, 4, C).double()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 4, 2),
        nn.Tanh(),
        nn.Conv2d(4, 2, 2, groups=2),
        nn.Flatten(),
        nn.Linear(8, C),
    )
    return nn.Sequential(*layers).double()


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return Tokens().double()


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, normal(N, 2, seed=1)),
    "cnn": (cnn, normal(N, 1, 4, 4, seed=1)),
    "tokens": (tokens, torch.randint(5, (N, 4), generator=seeded(1))),
}
CLASSES = torch.randint(C, (N,), generator=seeded(2))
NUMBERS = normal(N, C, seed=2)
WEIGHTS = torch.tensor([1.0, 2.0, 4.0], dtype=F64)

#: Loss, targets, and what its mean divides by.
LOSSES: dict[str, tuple[Any, Tensor, float]] = {
    "mean": (nn.CrossEntropyLoss(), CLASSES, N),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), CLASSES, 1),
    "ignored": (nn.CrossEntropyLoss(ignore_index=1), CLASSES, float((CLASSES != 1).sum())),
    "weighted": (nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES, float(WEIGHTS[CLASSES].sum())),
    "binary": (nn.BCEWithLogitsLoss(), (NUMBERS > 0).double(), N * C),
    "squared": (nn.MSELoss(), NUMBERS, N * C),
    "squared sum": (nn.MSELoss(reduction="sum"), NUMBERS, 1),
}
APPROXIMATIONS: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "KFAC": lambda risk: curvature(risk, KFAC),
    "EKFAC apart": lambda risk: curvature(risk, EKFAC, separate_weight_and_bias=True),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock),
    "full blocks": lambda risk: curvature(risk, FullBlock),
    "empirical": lambda risk: curvature(risk, KFAC, vectors=Empirical()),
    "mixed": lambda risk: curvature(risk, {nn.Linear: EKFAC}, default=FullBlock),
    "GGN": lambda risk: GGN(risk),
}


def risk_of(net: str = "mlp", loss: str = "mean", params: Any = None) -> EmpiricalRisk:
    make, X = NETS[net]
    y = LOSSES[loss][1]
    return EmpiricalRisk(make(), LOSSES[loss][0], [(X[:5], y[:5]), (X[5:], y[5:])], params)


def mode(risk: EmpiricalRisk) -> Tensor:
    return torch.cat([p.detach().flatten() for p in risk.params.values()])


def jacobian(risk: EmpiricalRisk, X: Tensor) -> Tensor:
    """[N, *output, P], by plain automatic differentiation of one example at a time."""
    params = {key: p.detach() for key, p in risk.params.items()}
    rows = [jacrev(lambda p, x=x: functional_call(risk.model, p, (x[None],))[0])(params) for x in X]
    return torch.stack(
        [torch.cat([J[key].flatten(-p.ndim) for key, p in params.items()], -1) for J in rows]
    )


def precision(K: Any, loss: str, delta: Tensor | float, noise: float | None = None) -> Tensor:
    """The precision of the posterior, dense."""
    c = LOSSES[loss][2] / (1.0 if noise is None else 2 * noise**2)
    return c * K.to_dense() + torch.diag(torch.as_tensor(delta, dtype=F64).expand(K.shape[0]))


@pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_outputs_are_those_of_the_dense_posterior(net: str, approximation: str) -> None:
    risk = risk_of(net)
    K, X = APPROXIMATIONS[approximation](risk), NETS[net][1][:4]
    J, sigma = jacobian(risk, X), torch.linalg.inv(precision(K, "mean", 2.0))
    with unchanged(risk.model, risk.data, X), torch.no_grad():
        la = Laplace(K, 2.0)
        mean, covariance = la.outputs(X)
        probabilities = la.predict(X)
    close(mean, risk.model(X))
    close(covariance, J @ sigma @ J.mT)
    close(la.posterior.to_dense(), sigma)
    variances = covariance.diagonal(dim1=1, dim2=2)
    close(probabilities, (mean / (1 + math.pi / 8 * variances).sqrt()).softmax(-1))


@pytest.mark.parametrize("loss", LOSSES)
def test_evidence_is_that_of_the_sum_over_the_data(loss: str) -> None:
    risk = risk_of("mlp", loss)
    K = curvature(risk, EKFAC)
    noise = 0.3 if "squared" in loss else None
    theta, X, y = mode(risk), NETS["mlp"][1], LOSSES[loss][1]
    if noise is None:
        likelihood = -risk.losses[0].loss(risk.model(X), y) * LOSSES[loss][2]
    else:
        likelihood = Normal(risk.model(X), noise).log_prob(y).sum()
    P, n = precision(K, loss, 2.0, noise), K.shape[0]
    expected = likelihood - theta @ theta - torch.logdet(P) / 2 + n / 2 * math.log(2.0)
    close(Laplace(K, 2.0, noise).log_marginal_likelihood(), expected)


def test_samples_are_parameters_around_the_mode() -> None:
    risk = risk_of()
    K = curvature(risk, KFAC)
    for num in (None, 3):
        drawn = Laplace(K, 1e12).sample(seeded(), num)
        for key, p in risk.params.items():
            close(
                drawn[key],
                p if num is None else p.detach()[..., None].expand(*p.shape, 3),
                rtol=1e-3,
            )
    assert Laplace(K, 1e12, subnetwork=[3, 0]).sample(seeded(), 5).shape == (2, 5)


def test_a_precision_for_each_parameter() -> None:
    for make in (
        lambda r: GGN(r),
        lambda r: curvature(r, DiagonalBlock),
        lambda r: curvature(r, FullBlock),
    ):
        risk = risk_of()
        K, X = make(risk), NETS["mlp"][1][:3]
        prior = {name: 0.5 + k for k, name in enumerate(risk.params)}
        delta = torch.cat(
            [torch.full((p.numel(),), prior[name], dtype=F64) for name, p in risk.params.items()]
        )
        la, P, J = Laplace(K, prior), precision(K, "mean", delta), jacobian(risk, X)
        close(la.outputs(X)[1], J @ torch.linalg.inv(P) @ J.mT)
        theta = la._mode
        value = (
            -N * risk.loss()
            - (delta * theta**2).sum() / 2
            - torch.logdet(P) / 2
            + delta.log().sum() / 2
        )
        close(la.log_marginal_likelihood(), value)
    blocks = {name: 0.5 + k for k, name in enumerate(curvature(risk, KFAC).blocks)}
    one = Laplace(curvature(risk, KFAC), blocks).log_marginal_likelihood()
    close(one, Laplace(curvature(risk, KFAC), {"2": 1.5, "0": 0.5}).log_marginal_likelihood())


def test_the_evidence_is_differentiable_and_fit_prior_maximises_it() -> None:
    la = Laplace(curvature(risk_of("mlp", "squared"), EKFAC), {"0": 1.0, "2": 1.0})
    logs = torch.zeros(3, dtype=F64, requires_grad=True)

    def evidence(logs: Tensor) -> Tensor:
        a, b, c = logs.exp()
        return la.log_marginal_likelihood({"0": a, "2": b}, c)

    assert torch.autograd.gradcheck(evidence, logs)
    la.fit_prior()
    assert isinstance(la.prior_precision, dict)
    at = torch.tensor([*la.prior_precision.values(), la.noise], dtype=F64).log().requires_grad_()
    best = evidence(at)
    close(best, la.log_marginal_likelihood())
    assert float(torch.autograd.grad(best, at)[0].abs().max()) < 1e-4
    for k in range(3):
        for away in (-0.1, 0.1):
            assert bool(evidence(at + away * torch.eye(3, dtype=F64)[k]) < best)


def test_a_given_noise_stays_and_an_unknown_one_begins_with_the_residuals() -> None:
    risk = risk_of("mlp", "squared")
    K = curvature(risk, KFAC)
    assert Laplace(K, noise=0.25).fit_prior().noise == 0.25
    close(
        torch.tensor(Laplace(K).noise, dtype=F64),
        (risk.model(NETS["mlp"][1]) - NUMBERS).square().mean().sqrt(),
    )
    assert Laplace(K).fit_prior().noise != Laplace(K).noise


def test_predictions_of_regression_include_the_noise() -> None:
    risk = risk_of("mlp", "squared")
    K, X = curvature(risk, KFAC), NETS["mlp"][1][:4]
    la = Laplace(K, 2.0, noise=0.3)
    mean, variance = la.predict(X)
    J, sigma = jacobian(risk, X), torch.linalg.inv(precision(K, "squared", 2.0, 0.3))
    close(mean, risk.model(X))
    close(variance, (J @ sigma @ J.mT).diagonal(dim1=1, dim2=2) + 0.09)


def test_predicted_variances_come_with_their_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=F64), nn.Softplus())
    X, y = normal(N, 2, seed=1), normal(N, 1, seed=2)
    risk = EmpiricalRisk(model, nn.GaussianNLLLoss(), [(X, y)])
    la = Laplace(GGN(risk))
    mean, variance = la.predict(X)
    f, covariance = la.outputs(X)
    close(mean, f[:, :1])
    close(variance, f[:, 1:] + covariance[:, :1, 0])


def test_links_agree_with_draws() -> None:
    la, X = Laplace(GGN(risk_of()), 0.3), NETS["mlp"][1][:2]
    mean, covariance = la.outputs(X)
    draws = MultivariateNormal(mean, covariance + 1e-12 * torch.eye(C, dtype=F64))
    torch.manual_seed(0)
    expected = draws.sample((100_000,)).softmax(-1).mean(0)
    close(la.predict(X, "mc", samples=100_000, generator=seeded()), expected, rtol=0.01)
    close(la.predict(X), expected, rtol=0.1)
    close(la.predict(X, "bridge"), expected, rtol=0.1)


def test_the_bridge_is_the_mean_of_its_dirichlet_distribution() -> None:
    """Whose Laplace approximation in the logits, of sum zero, has the given mean and variances."""
    alpha = torch.tensor([3.0, 5.0, 9.0, 4.0], dtype=F64)
    mean = alpha.log() - alpha.log().mean()
    # The Hessian of -Σ α log softmax(f) at its mode, inverted where the sum is zero.
    p = alpha / alpha.sum()
    covariance = torch.linalg.pinv(alpha.sum() * (torch.diag(p) - torch.outer(p, p)))
    from curvlinops_plus.applications.predictive import _bridge

    shifted = covariance + 0.7  # a constant added to all logits doesn't matter
    close(_bridge(mean + 2.0, shifted.diagonal(), shifted.sum(1)), Dirichlet(alpha).mean)
    S = (
        normal(4, 4) @ normal(4, 4).T
    )  # of any other normal distribution, given that the sum is zero
    rows, total = S.sum(1), S.sum()
    centred = S - rows.outer(rows) / total + 0.7
    mean_centred = mean + alpha - rows * alpha.sum() / total
    expected = _bridge(mean_centred, centred.diagonal(), centred.sum(1))
    close(_bridge(mean + alpha, S.diagonal(), rows), expected)


def test_binary_losses() -> None:
    la, X = Laplace(curvature(risk_of("mlp", "binary"), KFAC), 0.3), NETS["mlp"][1][:2]
    mean, covariance = la.outputs(X)
    variances = covariance.diagonal(dim1=1, dim2=2)
    close(la.predict(X), (mean / (1 + math.pi / 8 * variances).sqrt()).sigmoid())
    torch.manual_seed(0)
    expected = (
        (mean + variances.sqrt() * torch.randn(50_000, *mean.shape, dtype=F64)).sigmoid().mean(0)
    )
    close(la.predict(X, "mc", samples=50_000, generator=seeded()), expected, rtol=0.01)


def test_several_terms_keep_the_shape_of_the_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, C, 1), nn.Tanh(), nn.Conv1d(C, C, 2)).double()  # [N, C, T]
    X, y = normal(5, 2, 4, seed=1), torch.randint(C, (5, 3), generator=seeded(2))
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)])
    K = GGN(risk)
    la = Laplace(K, 2.0)
    mean, covariance = la.outputs(X)
    J = jacobian(risk, X).movedim(1, 2)  # [N, T, C, P]
    close(
        covariance,
        J @ torch.linalg.inv(15 * K.to_dense() + 2 * torch.eye(K.shape[0], dtype=F64)) @ J.mT,
    )
    close(mean, model(X).mT)
    probabilities = la.predict(X)
    assert probabilities.shape == (5, C, 3)
    close(probabilities.sum(1), torch.ones(5, 3))
    blocks = Laplace(curvature(risk, FullBlock), 2.0)
    assert blocks.outputs(X)[1].shape == (5, 3, C, C)


@pytest.mark.parametrize("approximation", ["KFAC", "diagonal", "full blocks", "GGN"])
@pytest.mark.parametrize("picked", [["2.weight"], ["2.weight", "2.bias"], [3, 0, 20], range(5, 18)])
def test_a_subnetwork(approximation: str, picked: Any) -> None:
    risk = risk_of()
    K, X = APPROXIMATIONS[approximation](risk), NETS["mlp"][1][:3]
    la = Laplace(K, 2.0, subnetwork=picked)
    whole = torch.arange(K.shape[0])
    named = risk.space.unflatten(whole)
    at = (
        torch.cat([named[p].flatten() for p in picked])
        if isinstance(picked[0], str)
        else whole[list(picked)]
    )
    P = N * K.to_dense()[at][:, at] + 2 * torch.eye(len(at), dtype=F64)
    J = jacobian(risk, X)[..., at]
    close(la.outputs(X)[1], J @ torch.linalg.inv(P) @ J.mT)
    theta = mode(risk)[at]
    expected = -N * risk.loss() - theta @ theta - torch.logdet(P) / 2 + len(at) / 2 * math.log(2.0)
    close(la.log_marginal_likelihood(), expected)


@pytest.mark.parametrize(
    ("net", "approximation"), [("mlp", "KFAC"), ("cnn", "full blocks"), ("mlp", "GGN")]
)
def test_inputs_are_cut_into_chunks(net: str, approximation: str) -> None:
    K, X = APPROXIMATIONS[approximation](risk_of(net)), NETS[net][1]
    sizes: list[int] = []
    K.risk.model.register_forward_hook(lambda m, args, out: sizes.append(len(out)))
    whole, parts = Laplace(K), Laplace(K, max_bytes=10_000)
    expected = whole.predict(X), whole.outputs(X)[1]
    sizes.clear()
    with small_buffers():
        close(parts.predict(X), expected[0])
        close(parts.outputs(X)[1], expected[1])
    assert max(sizes) < N


class Forms(nn.Module):
    """The perceptron on a mapping; its output by name, by position or as it is."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = mlp(), form

    def forward(self, x: Any = None, **more: Tensor) -> Any:
        f = self.inner(x["x"] if isinstance(x, dict) else x)
        return {"dict": {"y": f}, "tuple": (f,)}.get(self.form, f)


CE, MAPPING = nn.CrossEntropyLoss(), {"x": NETS["mlp"][1]}
DATA: dict[str, tuple[Any, Any]] = {
    "dict": ({"y": CE}, [(MAPPING, {"y": CLASSES})]),
    "tuple": ((CE,), [(MAPPING, (CLASSES,))]),
    "mapping": (CE, [(MAPPING, CLASSES)]),
    "labels": (CE, [{**MAPPING, "labels": CLASSES}]),
}


@pytest.mark.parametrize("make", [GGN, lambda risk: curvature(risk, KFAC)], ids=["GGN", "KFAC"])
@pytest.mark.parametrize("form", DATA)
def test_forms_of_data_and_outputs(form: str, make: Any) -> None:
    loss, data = DATA[form]
    plain, X = Laplace(make(risk_of())), NETS["mlp"][1]
    la = Laplace(make(EmpiricalRisk(Forms(form), loss, data, shift_labels=False)), max_bytes=6000)
    close(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    close(la.predict(MAPPING, "bridge"), plain.predict(X, "bridge"))
    close(la.outputs(MAPPING)[1], plain.outputs(X)[1])


def test_predictions_follow_prior_and_noise() -> None:
    la, X = Laplace(curvature(risk_of("mlp", "squared"), KFAC), noise=0.5), NETS["mlp"][1]
    first = la.predict(X).variance
    la.prior_precision, la.noise = {"0": 2.0, "2": 3.0}, 0.1
    close(la.predict(X).variance, Laplace(la.K, la.prior_precision, 0.1).predict(X).variance)
    la.prior_precision, la.noise = 1.0, torch.tensor(0.5, requires_grad=True)
    close(la.predict(X).variance, first)
