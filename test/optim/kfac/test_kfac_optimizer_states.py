"""Going on where another optimizer stopped."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from curvlinops_plus import EKFAC
from curvlinops_plus.optim import (
    KFACOptimizer,
    LevenbergMarquardt,
    NormConstraint,
    WeightDecay,
)
from test.optim.kfac.training import EXACT, Twisted, batch, flat, listening, net, plain

CE = nn.CrossEntropyLoss()
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "statistics": {"statistics_every": 3, "momentum": 0.0},
    "factored": {"inverse": "factored", "weight_decay": WeightDecay(1e-2, "coupled")},
    "EKFAC": {"approximation": EKFAC, "default": EKFAC, "inverse_every": 3},
    "steps": {"norm_constraint": NormConstraint(1e-3, "step")},
    "Levenberg-Marquardt": {"damping": LevenbergMarquardt(1.0, interval=3), "reject": 2.0},
    "schedule": {"damping": lambda step: 0.5**step},
    "adaptive": {"lr": "adaptive", "momentum": "adaptive"},
    "Monte Carlo": {"vectors": None},
    "empirical": {"vectors": "empirical"},
}


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        if isinstance(model, Twisted):
            model.head = (0, 0, 1, 1, 0, 1)[step % 6]
        plain(optimizer, model, CE, *batch(seed=step))
        if scheduler is not None:
            scheduler.step()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("make", [net, Twisted])
@pytest.mark.parametrize("at", [3, 5])
def test_resuming_is_exact(name: str, make: Callable[..., nn.Module], at: int) -> None:
    """Bit for bit, through bytes, in a network that was made anew; also with a scheduler, and heads
    that take turns.
    """

    def made() -> tuple[nn.Module, KFACOptimizer, Any]:
        model = make().double()
        optimizer = KFACOptimizer(model, CE, **{**EXACT, "inverse_every": 4, **OPTIONS[name]})
        scheduled = at == 5 and name != "adaptive" and name != "statistics"
        return model, optimizer, OneCycleLR(optimizer, 0.1, total_steps=20) if scheduled else None

    straight, optimizer, scheduler = made()
    if name == "statistics":
        optimizer.warmup([batch(seed=k + 50) for k in range(3)])
    train(straight, optimizer, scheduler, range(at))
    stored = io.BytesIO()
    torch.save(
        [straight.state_dict(), optimizer.state_dict(), scheduler and scheduler.state_dict()],
        stored,
    )
    train(straight, optimizer, scheduler, range(at, 9))
    stored.seek(0)
    of_model, of_optimizer, of_scheduler = torch.load(stored, weights_only=True)
    resumed, again, scheduler = made()
    resumed.load_state_dict(of_model)
    again.load_state_dict(of_optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(of_scheduler)
    train(resumed, again, scheduler, range(at, 9))
    assert torch.equal(flat(resumed), flat(straight))


@pytest.mark.parametrize("listens", [False, True])
def test_a_state_between_micro_batches(listens: bool) -> None:
    """Statistics of both are one update after resuming, too; gradients are the user's to keep; no
    step changes it.
    """
    straight, resumed = net(), net(seed=9)
    optimizer, again = (KFACOptimizer(model, CE, **EXACT) for model in (straight, resumed))
    (listening if listens else plain)(optimizer, straight, CE, *batch())
    (CE(straight(batch()[0]), batch()[1]) / 2).backward()
    stored = optimizer.state_dict()
    kept = copy.deepcopy(stored["state"])
    resumed.load_state_dict(straight.state_dict())
    again.load_state_dict(stored)
    X, y = batch(seed=5)
    for model, one in ((straight, optimizer), (resumed, again)):
        (CE(model(X), y) / 2).backward()
        one.step()
        assert one.last_step.examples == 24
    dense = [one.curvature.operator.to_dense() for one in (optimizer, again)]
    assert torch.equal(*dense)
    assert all(
        torch.equal(t["velocity"], kept[name]["velocity"]) for name, t in stored["state"].items()
    )


def test_the_state_shows_the_velocity_of_now() -> None:
    """Also while the learning rate changes; and without it there is none."""
    model, before = net(), flat(net())
    optimizer = KFACOptimizer(model, CE, **EXACT)
    for step in range(3):
        plain(optimizer, model, CE, *batch(seed=step))
        shown = torch.cat([optimizer.state[p]["velocity"].flatten() for p in model.parameters()])
        torch.testing.assert_close(optimizer.param_groups[0]["lr"] * shown, flat(model) - before)
        before, optimizer.param_groups[0]["lr"] = flat(model), 0.1 / (step + 2)
    optimizer.state.clear()
    CE(model(batch()[0]), batch()[1]).backward()
    for p in model.parameters():
        p.grad.zero_()
    optimizer.step()
    assert torch.equal(flat(model), before)


def test_the_order_of_parameters_does_not_matter() -> None:
    one, two = net(), net()
    optimizer = KFACOptimizer(one, CE, **EXACT)
    plain(optimizer, one, CE, *batch())
    other = KFACOptimizer(two, CE, params=[*two[2].parameters(), *two[0].parameters()], **EXACT)
    other.load_state_dict(optimizer.state_dict())
    two.load_state_dict(one.state_dict())
    for each, model in ((optimizer, one), (other, two)):
        plain(each, model, CE, *batch(seed=2))
    torch.testing.assert_close(flat(one), flat(two), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(4, 3).double(), "The state is of groups with the parameters"),
        (lambda: net().float(), "mismatch in dtype: the state has 'float64'"),
    ],
)
def test_states_that_do_not_fit(make: Callable[[], nn.Module], words: str) -> None:
    """Nothing has changed then."""
    model = net()
    optimizer, other = KFACOptimizer(model, CE, **EXACT), KFACOptimizer(make(), CE, **EXACT)
    plain(optimizer, model, CE, *batch())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state
    assert (other.steps, other.curvature.updates) == (0, 0)
    assert other.state_dict()["param_groups"] == before["param_groups"]
