"""Training of models whose layers are not all called in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, KFAC, DiagonalBlock
from curvlinops_plus.optim.kfac import KFACOptimizer, KFACPreconditioner
from test.optim.test_kfac_optimizer import EXACT, flat


class Branches(nn.Module):
    """One branch of several, after a common trunk if there is one."""

    def __init__(self, trunk: bool = True, branches: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.ELU()) if trunk else nn.Identity()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3))
            for _ in range(branches)
        )

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.trunk(x))


def made(trunk: bool = True) -> Branches:
    torch.manual_seed(5)
    return Branches(trunk).double()


def step(optimizer: Any, model: Branches, branch: int, loss: Any) -> list[str]:
    optimizer.zero_grad()
    X, y = torch.randn(7, 4).double(), torch.randint(3, (7,))
    loss(model(X, branch=branch), y).backward()
    optimizer.step()
    return optimizer.last_step.left_alone


@pytest.mark.parametrize("kind", [KFAC, EKFAC, DiagonalBlock])
@pytest.mark.parametrize("before", [1, 6])
def test_a_branch_that_is_called_later_has_a_curvature_of_its_own(kind: Any, before: int) -> None:
    """That of its first batch, at once: it moves as in a first step, although the inverse is not due."""
    model, loss = made(trunk=False), nn.CrossEntropyLoss()
    options: dict[str, Any] = {
        "default": kind,
        "approximation": kind,
        "momentum": 0.0,
        "norm_constraint": None,
        **EXACT,
    }
    optimizer = KFACOptimizer(model, loss, inverse_every=100, **options)
    for _ in range(before):
        step(optimizer, model, 0, loss)
    fresh = made(trunk=False)
    fresh.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    left = step(optimizer, model, 1, loss)
    assert {key.split(".")[1] for key in left} == {"0", "2"}
    torch.manual_seed(1)
    step(KFACOptimizer(fresh, loss, **options), fresh, 1, loss)
    torch.testing.assert_close(flat(model), flat(fresh), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("make", [KFACOptimizer, KFACPreconditioner])
@pytest.mark.parametrize("trunk", [True, False])
def test_branches_that_take_turns(make: Any, trunk: bool) -> None:
    model, loss = made(trunk), nn.CrossEntropyLoss()
    optimizer = make(model, loss)
    for turn in (0, 1, 0, 1, 2, 2, 1):
        left = step(optimizer, model, turn, loss)
        assert {key.split(".")[1] for key in left} == {"0", "1", "2"} - {str(turn)}


@pytest.mark.parametrize("make", [KFACOptimizer, KFACPreconditioner])
def test_without_any_curvature_everything_is_left_alone(make: Any) -> None:
    """Statistics of the second branch are not due when it is called first."""
    model, loss = made(trunk=False), nn.CrossEntropyLoss()
    optimizer = make(model, loss, statistics_every=3)
    step(optimizer, model, 0, loss)
    before = flat(model)
    assert len(step(optimizer, model, 1, loss)) == 12
    assert torch.equal(flat(model), before)
    for _ in range(2):
        left = step(optimizer, model, 1, loss)
    assert len(left) == 8


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_state_in_between_goes_on_bit_for_bit(kind: Any) -> None:
    model, loss = made(), nn.CrossEntropyLoss()
    options = {"default": kind, "approximation": kind, "inverse_every": 4}
    optimizer = KFACOptimizer(model, loss, **options)
    for turn in (0, 0, 1):
        step(optimizer, model, turn, loss)
    twin = made()
    twin.load_state_dict(model.state_dict())
    other = KFACOptimizer(twin, loss, **options)
    other.load_state_dict(optimizer.state_dict())
    for seed, turn in enumerate((1, 2, 0, 0, 2)):
        for each, net in ((optimizer, model), (other, twin)):
            torch.manual_seed(seed)
            step(each, net, turn, loss)
        assert torch.equal(flat(model), flat(twin))


def test_velocities_of_branches_that_rested_follow_the_learning_rate() -> None:
    """Each is multiplied by the learning rate of now over that of the step that it comes from."""
    model, loss = made(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, lr=0.2, momentum=0.5, norm_constraint=None, damping=1.0, **EXACT)
    group = optimizer.param_groups[0]
    step(optimizer, model, 0, loss)
    kept = {p: optimizer.state[p]["velocity"].clone() for p in model.branches[0].parameters()}
    for lr, turn in ((0.1, 1), (0.05, 1), (0.004, 2)):
        group["lr"] = lr
        step(optimizer, model, turn, loss)
    before = {p: p.detach().clone() for p in model.branches[0].parameters()}
    optimizer.zero_grad()
    loss(model(torch.randn(7, 4).double(), branch=0), torch.randint(3, (7,))).backward()
    for p in before:
        p.grad.zero_()
    trunk = optimizer.state[model.trunk[0].weight]["velocity"].clone()
    weight = model.trunk[0].weight.detach().clone()
    optimizer.step()
    for p, old in before.items():
        torch.testing.assert_close(p.detach() - old, 0.5 * 0.004 / 0.2 * kept[p], rtol=1e-12, atol=0)
    assert float((model.trunk[0].weight.detach() - weight - 0.5 * trunk).norm()) > 0  # it has not rested
    assert {entry["velocity_lr"] for entry in optimizer.state.values() if entry} == {0.1 * 0.5, 0.004}
