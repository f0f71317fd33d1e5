"""Scores of measurements and of losses without a likelihood, by layer, of few directions, and from
a store, against autodiff of one example at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    EmpiricalRisk,
    attribution_scores,
    curvature,
    per_example_gradients,
    self_influence,
)
from curvlinops_plus.linalg import Dense
from test.cases import close, unchanged
from test.helpers import normal
from test.nets import tanh_net

N, C = 7, 3
X, Y = normal(N, 4), torch.arange(N) % C
NUMBERS = normal(N, C, seed=1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return tanh_net(4, 5, C).double()


def rows(model: nn.Module, of: Callable[[Tensor, Tensor], Tensor], y: Tensor = Y) -> Tensor:
    """Gradients [N, P] of a number of each example."""
    params = [*model.parameters()]
    gradients = []
    for n in range(N):
        value = of(model(X[n : n + 1]), y[n : n + 1]).sum()
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, params)]))
    return torch.stack(gradients)


def risk_of(model: nn.Module, loss: Any, y: Tensor = Y) -> EmpiricalRisk:
    return EmpiricalRisk(model, loss, [(X[:4], y[:4]), (X[4:], y[4:])])


def matrix(risk: EmpiricalRisk) -> Dense:
    return Dense(normal(risk.space.dim, risk.space.dim, seed=5))


def margin(f: Tensor, y: Tensor) -> Tensor:
    own = f.gather(1, y[:, None])[:, 0]
    return own - f.scatter(1, y[:, None], -torch.inf).logsumexp(1)


MEASUREMENTS: dict[str, Any] = {
    "margin": margin,
    "difference of logits": lambda f, y: f[:, 0] - f[:, 1],
    "probability": lambda f, y: f.softmax(1).gather(1, y[:, None])[:, 0],
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_measurements(name: str) -> None:
    model, measurement = network(), MEASUREMENTS[name]
    risk = risk_of(model, nn.CrossEntropyLoss())
    A, G = matrix(risk), rows(model, nn.CrossEntropyLoss(reduction="sum"))
    Q = rows(model, measurement)
    with unchanged(model, risk.data):
        found = attribution_scores(A, risk, risk, measurement=measurement)
        gradients = [*per_example_gradients(risk, measurement=measurement)]
    close(found, Q @ A.matrix @ G.T)
    close(torch.cat([risk.space.flatten_rows(g) for g in gradients]), Q)


def flow(f: Tensor, y: Tensor) -> Tensor:
    """Minus the log density of a triangular map with three numbers."""
    return (0.5 * (f[:, 0] * y[:, 0] + f[:, 1]).square() - F.logsigmoid(f[:, 2])).mean()


LOSSES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "Huber": (nn.HuberLoss(), F.huber_loss),
    "sum": (nn.HuberLoss(reduction="sum"), lambda f, y: F.huber_loss(f, y, reduction="sum")),
    "flow": (flow, flow),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_without_a_likelihood(name: str) -> None:
    model, (loss, of) = network(), LOSSES[name]
    risk = risk_of(model, loss, NUMBERS)
    A, G = matrix(risk), rows(model, of, NUMBERS)
    with unchanged(model, risk.data):
        close(attribution_scores(A, risk, risk), G @ A.matrix @ G.T)
        close(self_influence(A, risk), ((G @ A.matrix) * G).sum(1))
    c = 1.0 if name == "sum" else 1 / N
    close(c * G.sum(0), risk.space.flatten(risk.gradient()))


def test_scores_of_layers_add_up() -> None:
    model = network()
    risk = risk_of(model, nn.CrossEntropyLoss())
    P = curvature(risk, EKFAC).inverse(0.1)
    parts = attribution_scores(P, risk, risk, per_layer=True)
    assert parts.keys() == {"0", "2"}
    close(parts["0"] + parts["2"], attribution_scores(P, risk, risk))
    G = rows(model, nn.CrossEntropyLoss(reduction="sum"))
    first = torch.arange(G.shape[1]) < 25  # of the first layer
    close(parts["0"], G[:, first] @ P.to_dense()[first][:, first] @ G[:, first].T)
    terms = attribution_scores(P, risk, risk, per_layer=True, per_term=True)
    close(terms["2"][..., 0], parts["2"])


def test_queries_are_projected_to_a_rank() -> None:
    model = network()
    risk = risk_of(model, nn.CrossEntropyLoss())
    A, G = matrix(risk), rows(model, nn.CrossEntropyLoss(reduction="sum"))
    U, S, V = torch.linalg.svd(G @ A.matrix, full_matrices=False)
    for rank in (1, 3, N, 100):
        nearest = U[:, :rank] * S[:rank] @ V[:rank]
        close(attribution_scores(A, risk, risk, rank=rank), nearest @ G.T)


@pytest.mark.parametrize("options", [{}, {"per_layer": True, "per_term": True, "rank": 2}], ids=str)
def test_a_store_is_resumed(tmp_path: Path, options: dict[str, Any]) -> None:
    model = network()
    risk = risk_of(model, nn.CrossEntropyLoss())
    A = matrix(risk)
    expected = attribution_scores(A, risk, risk, **options)
    calls: list[int] = []

    def interrupted() -> Any:
        yield risk.data[0]
        calls.append(1)
        raise KeyboardInterrupt

    class Data:
        def __iter__(self) -> Any:
            return interrupted()

    with pytest.raises(KeyboardInterrupt):
        attribution_scores(A, risk, risk.with_data(Data()), store=tmp_path, **options)
    assert calls
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["about.safetensors", "batch-000000.safetensors"]
    passes: list[int] = []
    handle = model.register_forward_hook(lambda m, args, out: passes.append(len(out)))
    found = attribution_scores(A, risk, risk, store=tmp_path, **options)
    first = len(passes)
    again = attribution_scores(A, risk, risk, store=tmp_path, **options)
    handle.remove()
    assert len(passes) - first < first  # the queries alone
    for scores in (found, again):
        if options:
            for name, part in expected.items():  # type: ignore[attr-defined]
                close(scores[name], part)  # type: ignore[index]
        else:
            close(scores, expected)
    with pytest.raises(ValueError, match=r"another computation: \['queries'\] differ"):
        attribution_scores(matrix(risk)._scale(2.0), risk, risk, store=tmp_path, **options)
    with pytest.raises(ValueError, match="Batch 0 has 7 examples, and had 4"):
        attribution_scores(A, risk, risk.with_data([(X, Y)]), store=tmp_path, **options)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="parameters"):
        attribution_scores(A, risk, risk, store=tmp_path, **options)
