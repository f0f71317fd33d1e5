"""Memory of the K-FAC optimizers does not grow with the number of steps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC
from curvlinops_plus.optim.kfac import KFACOptimizer, KFACPreconditioner, LevenbergMarquardt, NormConstraint

pytestmark = pytest.mark.usefixtures("new_objects_only")

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "EKFAC, factored, other times": {"approximation": EKFAC, "statistics_every": 3, "inverse": "factored"},
    "Levenberg-Marquardt": {"damping": LevenbergMarquardt(1.0, interval=2)},
    "adaptive": {"lr": "adaptive", "momentum": "adaptive", "damping": LevenbergMarquardt(1.0)},
    "rejecting": {"reject": 2.0, "norm_constraint": NormConstraint(1e-3, "step")},
    "gradients of the loss": {"vectors": "empirical"},
}


def tensors() -> tuple[int, int]:
    """How many tensors there are, and numbers in them. Nothing may hold them: they would be there the next time."""
    gc.collect()
    sizes = [o.numel() for o in gc.get_objects() if isinstance(o, Tensor)]
    return len(sizes), sum(sizes)


def train(steps: int, **options: Any) -> list[tuple[int, int]]:
    """`tensors()` at equal distances from a refresh."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 2)), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, **{"inverse_every": 6, "lr": 0.01, **options})
    found = []
    for step in range(steps):
        X, y = torch.randn(5, 3), torch.randint(2, (5,))
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
        if step >= 23 and (step - 23) % ((steps - 24) // 2 // 12 * 12) == 0:
            found.append(tensors())
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_tensors_do_not_grow(name: str) -> None:
    first, *later = train(72, **OPTIONS[name])
    assert later
    assert all(number <= first[0] and size <= first[1] for number, size in later), (first, later)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_tensors_do_not_grow_over_a_thousand_steps(name: str) -> None:
    first, *later = train(1008, **OPTIONS[name])
    assert later
    assert all(number <= first[0] and size <= first[1] for number, size in later), (first, later)


def test_growth_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    plain = KFACOptimizer._move

    def keeping(self: KFACOptimizer, *given: Any) -> Any:
        move = plain(self, *given)
        kept.append(move.direction[0].clone())
        return move

    monkeypatch.setattr(KFACOptimizer, "_move", keeping)
    first, *later = train(72)
    assert later[-1][0] > first[0]


def test_the_preconditioner_keeps_no_tensors_of_a_step() -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(3, 2), nn.MSELoss()
    preconditioner, counts = KFACPreconditioner(model, loss, inverse_every=6), []
    for step in range(60):
        preconditioner.zero_grad()
        loss(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
        preconditioner.step()
        if step % 12 == 11:
            counts.append(tensors())
    assert max(counts[2:]) <= counts[1]
