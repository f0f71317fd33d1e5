"""Batches without examples, as Poisson sampling draws them: they add nothing to the statistics, and
the step goes on with the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    CurvatureEstimator,
    EmpiricalRisk,
    KFACOptimizer,
    KFACPreconditioner,
    LevenbergMarquardt,
    MonteCarlo,
)
from test.helpers import seeded

Batches = list[tuple[Tensor, Tensor]]
SIZES = [4, 0, 5, 0, 0, 6]


def batches(sizes: list[int]) -> Batches:
    drawn = []
    for seed, size in enumerate(sizes):
        generator = seeded(seed)
        X = torch.randn(6, 3, generator=generator).double()[:size]
        drawn.append((X, torch.randint(2, (6,), generator=generator)[:size]))
    return drawn


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def mean(output: Tensor, y: Tensor) -> Tensor:
    """The mean, which of nothing is 0, with gradients of 0."""
    return nn.functional.cross_entropy(output, y, reduction="sum") / max(1, len(y))


def heard(optimizer: Any, model: nn.Module, X: Tensor, y: Tensor) -> None:
    nn.functional.cross_entropy(model(X), y)  # the statistics
    with optimizer.paused():
        mean(model(X), y).backward()


def listened(optimizer: Any, model: nn.Module, X: Tensor, y: Tensor) -> None:
    with optimizer.listen((X, y)):
        output = model(X)
    mean(output, y).backward()


@pytest.mark.parametrize("way", [heard, listened])
@pytest.mark.parametrize("approximation", ["KFAC", EKFAC], ids=["KFAC", "EKFAC"])
def test_the_velocity_goes_on_and_statistics_stay(
    way: Callable[..., None], approximation: Any
) -> None:
    model = net()
    loss = nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(
        model, loss, lr=0.1, momentum=0.5, norm_constraint=None, approximation=approximation
    )
    before: list[Tensor] = []
    for X, y in batches(SIZES):
        statistics = optimizer.curvature.state_dict() if before else None
        params = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        way(optimizer, model, X, y)
        optimizer.step()
        moved = [p.detach() - q for p, q in zip(model.parameters(), params)]
        if not len(X):
            assert statistics is not None
            torch.testing.assert_close(moved, [0.5 * δ for δ in before])  # δ = momentum · v
            assert optimizer.last_step.examples == 0
            now = optimizer.curvature.state_dict()
            for name in ("sums", "updates", "examples", "weight", "draws"):
                torch.testing.assert_close(now[name], statistics[name])
        before = moved
    assert optimizer.steps == len(SIZES)
    assert optimizer.curvature.updates == 3
    assert optimizer.curvature.examples == 15


@pytest.mark.parametrize("first", [0, 1])
def test_empty_micro_batches_add_nothing(first: int) -> None:
    """A step of two micro-batches, one without examples, is a step of the other one."""
    full, empty = batches([5, 0])
    both = [full, empty] if first == 0 else [empty, full]

    def trained(each: Batches) -> nn.Module:
        model = net()
        optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), lr=0.1, inverse_every=1)
        for _ in range(3):
            optimizer.zero_grad()
            for X, y in each:
                heard(optimizer, model, X, y)
            optimizer.step()
        return model

    for p, q in zip(trained(both).parameters(), trained([full]).parameters()):
        assert torch.equal(p, q)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapting": {"damping": LevenbergMarquardt(1e-2, interval=1)},
    "rejecting": {"reject": 2.0},
    "adaptive": {"lr": "adaptive", "momentum": "adaptive"},
    "rarely": {"statistics_every": 2, "inverse_every": 2},
    "with old statistics": {"strict": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_that_begins_without_examples(options: dict[str, Any]) -> None:
    """Parameters stay until there is a batch."""
    model = net()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), **options)
    start = copy.deepcopy(model.state_dict())
    for X, y in batches([0, 0, 4, 0, 5]):
        optimizer.zero_grad()
        heard(optimizer, model, X, y)
        optimizer.step()
        if not optimizer.curvature.examples:
            assert all(torch.equal(start[key], p) for key, p in model.state_dict().items())
            assert optimizer.last_step.left_alone == [*start]
    assert optimizer.curvature.examples in (9, 4)
    assert not torch.equal(start["0.weight"], model.get_parameter("0.weight"))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_gradient_that_is_not_finite_is_the_users() -> None:
    """A mean over nothing is NaN, as in PyTorch; gradients of linear layers are 0 nevertheless."""
    model = net()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), lr=0.1)
    for X, y in batches([4, 0]):
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(X), y)
        value.backward()
        optimizer.step()
    assert value.isnan()
    assert optimizer.curvature.examples == 4


def test_in_front_of_another_optimizer() -> None:
    model = net()
    preconditioner = KFACPreconditioner(model, nn.CrossEntropyLoss())
    for X, y in batches(SIZES):
        model.zero_grad()
        heard(preconditioner, model, X, y)
        preconditioner.step()
        for p in model.parameters():
            assert p.grad is not None
            assert bool(p.grad.any()) == bool(len(X))


def test_estimators_leave_them_out() -> None:
    """As passes over data do."""

    def of(each: Batches) -> Tensor:
        risk = EmpiricalRisk(net(), nn.CrossEntropyLoss(), ())
        estimator = CurvatureEstimator(risk, vectors=MonteCarlo(seed=0), decay=0.5)
        for batch in each:
            estimator.update(batch)
        return estimator.operator.to_dense()

    assert torch.equal(of(batches(SIZES)), of([b for b in batches(SIZES) if len(b[0])]))


def test_without_any_call_a_step_is_refused_as_before() -> None:
    optimizer = KFACOptimizer(net(), nn.CrossEntropyLoss())
    with pytest.raises(RuntimeError, match="No batch was recorded"):
        optimizer.step()
