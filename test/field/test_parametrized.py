"""Weights that `torch.nn.utils.parametrize` computes at each access: whoever looks at the
attribute computes it, which may change buffers and draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization

from curvlinops_plus import (
    EKFAC,
    GGN,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    KFACLinearOperator,
    KFACOptimizer,
    Laplace,
    QuadraticPenalty,
    curvature,
    merge,
)
from test.cases import close
from test.helpers import normal, output_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")


class Counted(nn.Module):
    """A parametrization that counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return 1.5 * w


def counted(layer: nn.Module, name: str) -> nn.Module:
    return register_parametrization(layer, name, Counted())


#: Networks 3 -> 2, one for each way in which a rule looks at its layer.
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(counted(nn.Linear(3, 4), "weight"), nn.Linear(4, 2)),
    "bias": lambda: nn.Sequential(counted(nn.Linear(3, 4), "bias"), nn.Linear(4, 2)),
    "norm": lambda: nn.Sequential(
        nn.Linear(3, 4), counted(nn.LayerNorm(4), "weight"), nn.Linear(4, 2)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        counted(nn.Conv1d(1, 4, 3), "weight"),
        nn.Flatten(),
        nn.Linear(4, 2),
    ),
    # It estimates another singular value at each access in training mode.
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
}

USES: dict[str, Callable[[EmpiricalRisk], object]] = {
    "curvature": lambda risk: curvature(risk, EKFAC),
    "its table": lambda risk: str(curvature(risk, DiagonalBlock)),
    "a check": lambda risk: curvature(risk, EKFAC).verify(),
    "an estimator": lambda risk: CurvatureEstimator(risk, EKFAC).update(batch()),
    "an optimizer": lambda risk: KFACOptimizer(risk.model, nn.CrossEntropyLoss()),
    "predictions": lambda risk: Laplace(curvature(risk, EKFAC)).predict(batch()[0]),
    "a penalty": lambda risk: QuadraticPenalty(curvature(risk, EKFAC))(),
    "a classic operator": lambda risk: KFACLinearOperator(
        risk.model, nn.CrossEntropyLoss(), [*risk.params.values()], risk.data
    ),
}


def batch() -> tuple[Tensor, Tensor]:
    return normal(5, 3), torch.tensor([0, 1, 1, 0, 1])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", NETWORKS)
def test_nobody_looks_at_what_is_computed(name: str, use: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    if name == "spectral norm":
        with torch.no_grad():
            for _ in range(3):
                model(batch()[0])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [batch()])
    # Estimates that have not converged are told as such.
    with suppress(RuntimeError) if name == "spectral norm" else nullcontext():
        USES[use](risk)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["linear", "bias", "norm", "convolution"])
def test_gradients_are_of_the_original(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    X, y = batch()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)])
    expected: Any = 0
    for c in range(2):  # Σ_n Σ_c p_c |∇ log p_c|²
        for n in range(5):
            log_p = model(X[n : n + 1]).log_softmax(1)[0, c]
            g = torch.autograd.grad(log_p, [*model.parameters()])
            expected += log_p.exp().detach() * sum(t.square().sum() for t in g) / 5
    close(curvature(risk, DiagonalBlock).trace, expected)


# --------------------------------------------------------- copies of what modules keep and computed
class Keeps(nn.Module):
    """It keeps what it computed last, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last = [self.w.square()]
        return x @ self.last[0].T


COPIED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "a list": Keeps,
    "nothing": lambda: nn.Linear(3, 4),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", COPIED)
def test_networks_that_keep_what_they_computed_are_merged(name: str) -> None:
    """Python's copy refuses tensors with a graph."""
    torch.manual_seed(0)
    models = [nn.Sequential(COPIED[name](), nn.Linear(4, 2)).double().eval() for _ in range(2)]
    if name == "spectral norm":  # buffers of both are to be the same
        models[1].load_state_dict(models[0].state_dict())
        with torch.no_grad():
            models[1].get_parameter("1.weight").add_(1)
    X, y = batch()
    risks = [EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)]) for model in models]
    curvatures = [curvature(risk, DiagonalBlock) for risk in risks]
    for model in models:
        model(X)
    merged = merge(models, curvatures, damping=0.1)
    thetas = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    d = [K.diagonal() for K in curvatures]
    mean = (thetas[0] + thetas[1]) / 2
    right = sum(k * (t - mean) for k, t in zip(d, thetas, strict=True))
    expected = mean + right / (d[0] + d[1] + 0.1)
    close(torch.cat([p.detach().flatten() for p in merged.parameters()]), expected.detach())
    # Its outputs are those of a network that was given these parameters.
    other = nn.Sequential(COPIED[name](), nn.Linear(4, 2)).double().eval()
    other.load_state_dict(merged.state_dict())
    close(merged(X), other(X))


# ------------------------------------------------------------- a cache that the caller has opened
class Squared(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * w.abs()


def squares() -> nn.Module:
    """A layer whose weight is computed, called twice, and one without."""
    torch.manual_seed(0)
    layer = register_parametrization(nn.Linear(3, 3), "weight", Squared())
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 2)).double()


@pytest.mark.parametrize("grad", [True, False], ids=["with graphs", "without"])
def test_weights_that_the_caller_caches_are_computed_anew(grad: bool) -> None:
    model = squares()
    X, y = batch()
    J = output_rows(model, X.split(1))
    p = model(X).softmax(1).detach()
    H = torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None])) / 5
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)])
    with parametrize.cached(), torch.set_grad_enabled(grad):
        model(X)
        cache = dict(parametrize._cache)
        close(GGN(risk) @ torch.eye(J.shape[1], dtype=J.dtype), J.T @ H @ J)
        close(curvature(risk, DiagonalBlock).diagonal(), (J.T @ H @ J).diagonal())
        gradients = [g.flatten() for g in risk.gradient().values()]
        close(torch.cat(gradients), J.T @ (p - nn.functional.one_hot(y, 2)).flatten() / 5)
        curvature(risk, EKFAC).verify()
        assert parametrize._cache == cache
        assert parametrize._cache_enabled == 1
    assert not parametrize._cache_enabled


@pytest.mark.parametrize("vectors", [Exact(), Empirical()], ids=["exact", "empirical"])
@pytest.mark.parametrize("around", ["the call", "the step"])
def test_training_in_a_cache_is_training_without(around: str, vectors: Any) -> None:
    ends = []
    for cache in (nullcontext, parametrize.cached):
        model, loss = squares(), nn.CrossEntropyLoss()
        X, y = batch()
        optimizer = KFACOptimizer(model, loss, lr=0.1, vectors=vectors)
        for _ in range(4):
            optimizer.zero_grad()
            with cache() if around == "the step" else nullcontext():
                with cache():
                    value = loss(model(X), y)
                value.backward()
                optimizer.step()
        assert not optimizer.curvature.withdrawn
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(ends[0], ends[1])
