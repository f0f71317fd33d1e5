"""Models that run a part of themselves under `torch.no_grad()` first, and feed the result back:
self-conditioning, recycling, targets of their own. These calls are constants.

Of the squared error the Gauss-Newton matrix is `2 / (N C)` times the sum of squared derivatives of
the outputs, which autograd gives for one example after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    GGN,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    KFACOptimizer,
    UnsupportedError,
    curvature,
)
from test.cases import close
from test.helpers import Written, normal, output_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*exact diagonal:UserWarning")


def self_conditioned(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = torch.tanh(s.a(x))
    return s.b(torch.tanh(s.a(x) + first))


def recycled(s: Any, x: Tensor) -> Tensor:
    h = x
    with torch.no_grad():
        for _ in range(2):
            h = torch.tanh(s.square(h))
    return s.b(torch.tanh(s.square(h)).repeat(1, 2)[:, :5])


def by_functions(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        first = F.linear(x, s.w) * s.scale
    return s.b(torch.tanh(F.linear(x, s.w) * s.scale + first))


def recurrent(s: Any, x: Tensor) -> Tensor:
    x = x[:, None].expand(-1, 3, -1)
    with torch.no_grad():
        h = s.norm(s.gru(x)[0])[:, -1]
    return s.b(s.norm(s.gru(x, h[None].contiguous())[0][:, -1]))


def inference(s: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        first = s.a(x)
    return s.b(torch.tanh(s.a(x) + first.clone()))


def checkpointed(s: Any, x: Tensor) -> Tensor:
    def half(x: Tensor) -> Tensor:
        with torch.no_grad():
            first = s.a(x)
        return torch.tanh(s.a(x) + first)

    return s.b(checkpoint(half, x, use_reentrant=False))


def net(function: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    members: dict[Any, dict[str, Any]] = {
        recycled: {"square": nn.Linear(4, 4)},
        by_functions: {"w": nn.Parameter(torch.randn(5, 4)), "scale": nn.Parameter(torch.ones(5))},
        recurrent: {"gru": nn.GRU(4, 5, batch_first=True), "norm": nn.LayerNorm(5)},
    }
    inner = members.get(function, {"a": nn.Linear(4, 5)})
    return Written(function, **inner, b=nn.Linear(5, 3)).double()


X, Y = normal(6, 4, seed=1), normal(6, 3, seed=2)
FUNCTIONS = [self_conditioned, recycled, by_functions, recurrent, inference, checkpointed]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_without_a_graph_are_constants(function: Callable[..., Tensor]) -> None:
    model = net(function)
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X[:4], Y[:4]), (X[4:], Y[4:])])
    J = output_rows(model, X.split(1))
    diagonal = J.square().sum(0) * 2 / 18
    close(curvature(risk, DiagonalBlock).diagonal(), diagonal)
    close(GGN(risk) @ torch.eye(J.shape[1], dtype=J.dtype), J.T @ J * 2 / 18)
    estimator = CurvatureEstimator(risk, DiagonalBlock, vectors=Exact())
    estimator.update((X, Y))
    close(estimator.operator.diagonal(), diagonal)
    assert not any(error > 1e-9 for *_, error in curvature(risk).verify().rows)


@pytest.mark.parametrize("vectors", [None, Empirical()], ids=["sampled", "empirical"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_they_are_trained(function: Callable[..., Tensor], vectors: Any) -> None:
    model, loss = net(function), nn.MSELoss()
    options = {} if vectors is None else {"vectors": vectors}
    optimizer = KFACOptimizer(model, loss, lr=0.1, **options)
    errors = []
    for _ in range(8):
        optimizer.zero_grad()
        error = loss(model(X), Y)
        error.backward()
        optimizer.step()
        errors.append(float(error.detach()))
    assert errors[-1] < errors[0]
    assert not optimizer.curvature.withdrawn


def test_a_layer_that_only_runs_without_a_graph_is_told() -> None:
    model = net(lambda s, x: s.b(torch.no_grad()(s.a)(x)))
    with pytest.raises(UnsupportedError, match=r"layer 'a' ran under torch.no_grad\(\)"):
        curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, Y)]))
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(model, loss)
    with pytest.raises(UnsupportedError, match=r"layer 'a' ran under torch.no_grad\(\)"):
        loss(model(X), Y)
    del optimizer


def test_reentrant_checkpointing_beside_a_call_is_told() -> None:
    """Autograd does not show the gradients inside, though the layer has another call."""

    def both(s: Any, x: Tensor) -> Tensor:
        h = s.first(x)
        return s.b(s.a(h) + checkpoint(s.a, h, use_reentrant=True))

    torch.manual_seed(0)
    members = {"first": nn.Linear(4, 4), "a": nn.Linear(4, 5), "b": nn.Linear(5, 3)}
    model = Written(both, **members).double()
    with pytest.raises(UnsupportedError, match="use_reentrant=True"):
        curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, Y)]))
