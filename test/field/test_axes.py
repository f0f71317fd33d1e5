"""Layers that see all examples on another axis, behind one of size 1, as code for sequences calls
them: one row is also what a table for all examples looks like.

The right values come from plain autograd, for one example after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    FullBlock,
    KFACOptimizer,
    curvature,
    per_example_gradients,
)
from test.cases import close
from test.helpers import Written, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")


def attended_then_pooled(m: Any, h: Tensor) -> Tensor:
    """[N, T, i]: attention with the sequence first, and a layer on [1, N, i]."""
    h = h.transpose(0, 1)
    pooled = m.attention(h, h, h)[0].sum(0)
    return m.layer(pooled[None]).squeeze(0)


def attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2)


#: Name -> the layer, what the model does with it.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "squeezed": (lambda: nn.Linear(4, 4), lambda m, h: m.layer(h[None]).squeeze(0)),
    "flattened": (lambda: nn.Linear(4, 4), lambda m, h: m.layer(h[None, None]).flatten(0, 2)),
    "taken": (lambda: nn.Linear(4, 4), lambda m, h: m.layer(h[None])[0]),
    "examples are places": (
        lambda: nn.Conv1d(4, 4, 1),
        lambda m, h: m.layer(h.mT[None]).squeeze(0).mT,
    ),
    "recurrent": (lambda: nn.GRU(4, 4), lambda m, h: m.layer(h[None])[0].squeeze(0)),
    "scaled": (lambda: nn.LayerNorm(4), lambda m, h: m.layer(h[None]).squeeze(0)),
    "sequence first": (lambda: nn.Linear(4, 4), attended_then_pooled),
}


def squares(f: Tensor, y: Tensor) -> Tensor:
    """A function of one's own, which broadcasts whatever it gets."""
    return (f - y).square().sum()


def model_of(name: str, plain: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    """The network and its data; or one whose layer gets rows of examples."""
    torch.manual_seed(0)
    layer, function = CASES[name]
    call = (lambda m, h: m.layer(h)) if plain else function
    members = {"first": nn.Linear(3, 4), "layer": layer(), "last": nn.Linear(4, 2)}
    members["attention"] = attention() if function is attended_then_pooled else nn.Identity()
    model = Written(lambda m, x: m.last(call(m, m.first(x).tanh())), **members).double()
    X = normal(5, 3, 3) if function is attended_then_pooled else normal(5, 3)
    return model, X, normal(5, 2, seed=1)


def gradients(model: nn.Module, loss: Any, X: Tensor, Y: Tensor) -> Tensor:
    rows = []
    for x, y in zip(X, Y, strict=True):
        g = torch.autograd.grad(loss(model(x[None]), y[None]), [*model.parameters()])
        rows.append(torch.cat([t.flatten() for t in g]))
    return torch.stack(rows)


@pytest.mark.parametrize("loss", [squares, nn.MSELoss(reduction="sum")], ids=["own", "MSELoss"])
@pytest.mark.parametrize("name", CASES)
def test_examples_on_another_axis_are_told_apart(name: str, loss: Any) -> None:
    model, X, Y = model_of(name)
    expected = gradients(model, loss, X, Y)
    risk = EmpiricalRisk(model, loss, [(X, Y)], reduction="sum")
    (found,) = per_example_gradients(risk)
    close(torch.cat([found[key].flatten(1) for key in risk.params], 1), expected)
    block = curvature(risk, FullBlock, vectors=Empirical())
    close(block.trace, expected.square().sum())


@pytest.mark.parametrize("name", ["squeezed", "flattened"])
def test_training_is_that_of_the_layer_on_rows(name: str) -> None:
    values = list[list[float]]()
    for plain in (False, True):
        model, X, Y = model_of(name, plain)
        loss = nn.MSELoss()
        optimizer = KFACOptimizer(model, loss, approximation=DiagonalBlock, vectors=Exact())
        values.append([])
        for _ in range(5):
            optimizer.zero_grad()
            value = loss(model(X), Y)
            value.backward()
            optimizer.step()
            values[-1].append(value.item())
        assert not optimizer.curvature.withdrawn
    assert values[0] == pytest.approx(values[1], rel=1e-10)


def test_a_table_of_one_row_is_still_broadcast() -> None:
    """Its outputs have the same shape without."""
    torch.manual_seed(0)
    model = Written(
        lambda m, x: m.last((m.first(x) + m.places(torch.arange(1)[None])[0]).tanh()),
        first=nn.Linear(3, 4),
        places=nn.Embedding(2, 4),
        last=nn.Linear(4, 2),
    ).double()
    X, Y = normal(5, 3), normal(5, 2, seed=1)
    expected = gradients(model, squares, X, Y)
    risk = EmpiricalRisk(model, squares, [(X, Y)], reduction="sum")
    (found,) = per_example_gradients(risk)
    close(torch.cat([found[key].flatten(1) for key in risk.params], 1), expected)
