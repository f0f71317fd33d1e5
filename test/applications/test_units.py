"""Experts that are dropped as a whole, against the rise of the loss that each of them costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, KFAC, DiagonalBlock, EmpiricalRisk, curvature, prune
from test.cases import close, same
from test.helpers import normal

E, D = 4, 3


class Mixture(nn.Module):
    """Experts as stacks, or as modules."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(D, E), nn.Linear(D, 3)
        self.stacked = stacked
        if stacked:
            self.up = nn.Parameter(normal(E, 5, D).clone())
            self.down = nn.Parameter(normal(E, D, 5, seed=1).clone())
        else:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, D)) for _ in range(E)
            )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        p, choice = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for e in range(E):
            at = (choice == e).nonzero()[:, 0]
            if self.stacked:
                y = torch.tanh(rows[at] @ self.up[e].T) @ self.down[e].T
            else:
                y = self.experts[e](rows[at])
            out = out.index_add(0, at, p[at, None] * y)
        return self.head((rows + out).view_as(x)).mean(1)


def risk_of(stacked: bool) -> EmpiricalRisk:
    torch.manual_seed(0)
    X, y = normal(12, 4, D), torch.arange(12) % 3
    return EmpiricalRisk(Mixture(stacked).double(), nn.CrossEntropyLoss(), [(X, y)])


@pytest.mark.parametrize("kind", [KFAC, EKFAC, DiagonalBlock])
@pytest.mark.parametrize("stacked", [True, False])
def test_the_cheapest_experts_go(stacked: bool, kind: Any) -> None:
    risk = risk_of(stacked)
    K = curvature(risk, kind)
    H = K.to_dense() + 0.01 * torch.eye(K.shape[0]).double()
    theta = risk.space.flatten({key: p.detach().clone() for key, p in risk.params.items()})
    costs = []
    for e in range(E):
        mine = {key: torch.zeros_like(p) for key, p in risk.params.items()}
        for key, t in mine.items():
            if stacked and key in ("up", "down"):
                t[e] = 1
            elif key.startswith(f"experts.{e}."):
                t.fill_(1)
        change = theta * risk.space.flatten(mine)
        costs.append(float(change @ H @ change) / 2)
    units: Any = "experts" if stacked else [[f"experts.{e}.*"] for e in range(E)]
    masks = prune(risk.model, K, 0.5, damping=0.01, units=units)
    gone = sorted(sorted(range(E), key=costs.__getitem__)[:2])
    if stacked:
        for key in ("up", "down"):
            kept = masks[key].flatten(1).float().mean(1)
            same(kept, torch.tensor([float(e not in gone) for e in range(E)]))
    else:
        for e in range(E):
            assert bool(masks[f"experts.{e}.0.weight"].all()) == (e not in gone)
    assert bool(masks["head.weight"].all())
    close(risk.model.get_submodule("head").weight, risk.space.unflatten(theta)["head.weight"])


def test_candidates_of_units() -> None:
    risk = risk_of(True)
    K = curvature(risk, KFAC)
    masks = prune(risk.model, K, 0.25, units="experts", candidates=["down"])
    assert masks.keys() == {"down"}
    assert sorted(masks["down"].flatten(1).all(1).tolist()) == [False, True, True, True]
