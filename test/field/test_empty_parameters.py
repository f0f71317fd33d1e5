"""Parameters without entries: layers of width zero, adapters of rank zero, placeholders. They add
nothing to any number, and everything else is as without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    KFACOptimizer,
    Laplace,
    RelativeDamping,
    curvature,
    self_influence,
)
from test.cases import close
from test.helpers import Written, normal, output_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*exact diagonal:UserWarning"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]


def head(s: Any, h: Tensor) -> Tensor:
    return s.b(torch.tanh(h))


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, Any]]]] = {
    "placeholder": (
        lambda s, x: head(s, s.a(x)),
        lambda: {"empty": nn.Parameter(torch.zeros(0))},
    ),
    "rows that are summed": (
        lambda s, x: head(s, s.a(x) + s.empty.sum(0)),
        lambda: {"empty": nn.Parameter(torch.zeros(0, 5))},
    ),
    "width zero": (
        lambda s, x: head(s, s.a(x) + s.empty(x).sum(1, keepdim=True)),
        lambda: {"empty": nn.Linear(4, 0)},
    ),
    "rank zero": (
        lambda s, x: head(s, s.a(x) + s.up(s.down(x))),
        lambda: {"down": nn.Linear(4, 0, bias=False), "up": nn.Linear(0, 5, bias=False)},
    ),
}


def problem(name: str) -> EmpiricalRisk:
    function, empty = FUNCTIONS[name]
    torch.manual_seed(0)
    model = Written(function, a=nn.Linear(4, 5), b=nn.Linear(5, 3), **empty()).double()
    data = [(normal(6, 4, seed=1), normal(6, 3, seed=2))]
    return EmpiricalRisk(model, nn.MSELoss(), data)


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, FullBlock])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_add_nothing(name: str, approximation: Any) -> None:
    risk = problem(name)
    K = curvature(risk, approximation)
    X, _ = next(iter(risk.data))
    J = output_rows(risk.model, X.split(1))
    diagonal = J.square().sum(0) * 2 / 18
    close(GGN(risk) @ torch.eye(J.shape[1], dtype=J.dtype), J.T @ J * 2 / 18)
    close(curvature(risk, DiagonalBlock).diagonal(), diagonal)
    if approximation is not KFAC:
        close(K.trace, diagonal.sum())
    assert not any(error > 1e-9 for *_, error in K.verify().rows)
    summary = K.summary(damping=1e-2)
    assert "-" in str(summary)
    for row in summary:
        assert (row["count"] == 0) == (row["largest"] != row["largest"])  # NaN
    largest = max(row["largest"] for row in summary if row["count"])
    assert f"{largest:.4g}" in str(summary).splitlines()[-1]
    close(Laplace(K).fit_prior().outputs(X)[0], risk.model(X))
    assert torch.isfinite(self_influence(K.inverse(RelativeDamping(0.1)), risk)).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_trained(name: str) -> None:
    risk = problem(name)
    X, y = next(iter(risk.data))
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(risk.model, loss, lr=0.1)
    errors = []
    for _ in range(8):
        optimizer.zero_grad()
        error = loss(risk.model(X), y)
        error.backward()
        optimizer.step()
        errors.append(float(error.detach()))
    assert errors[-1] < errors[0]
