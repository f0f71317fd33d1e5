"""Layers that see all examples on another axis, behind one of size 1, as code for sequences calls
them: one row is also what a table for all examples looks like.

The right values come from plain autograd, for one example after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    CurvatureEstimator,
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


def of_places(m: Any, x: Tensor) -> Tensor:
    """[N, 3, i]: a table as long as some batches is added."""
    return (m.first(x) + m.table(torch.arange(3))).tanh().sum(1)


def time_major(m: Any, x: Tensor) -> Tensor:
    """[N, 3, i]: the layer sees [3, N, i]."""
    return m.layer(m.first(x.transpose(0, 1)).tanh()).sum(0)


def of_states(m: Any, x: Tensor) -> Tensor:
    """[N, 3, i]: steps that read a weight by a function, and begin with a state for all examples."""
    state = m.table.weight[:1]
    for step in x.unbind(1):
        state = torch.tanh(m.first(step) + state @ m.layer.weight)
    return state


def beside_a_row(m: Any, x: Tensor) -> Tensor:
    """[N, 3, i]: a layer of its own that gets one row for all examples."""
    h = m.first(x).tanh().sum(1)
    return m.distances(h, h.new_ones(1, 4))


def distances() -> nn.Module:
    w = nn.Parameter(torch.eye(4))
    return Written(lambda m, h, row: torch.cdist(h + row, m.w).square(), w=w)


#: Name -> a forward pass behind which there is one more layer, and what it uses besides the first.
SEQUENCES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, nn.Module]]] = {
    "table": (of_places, {"table": nn.Embedding(3, 4)}),
    "time-major": (time_major, {"layer": nn.Linear(4, 4)}),
    "row": (beside_a_row, {"distances": distances()}),
    "state": (of_states, {"table": nn.Embedding(3, 4), "layer": nn.Linear(4, 4, bias=False)}),
}


def stream_of(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    if name in CASES:
        return model_of(name)
    torch.manual_seed(0)
    function, members = SEQUENCES[name]
    members = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 2), **copy.deepcopy(members)}
    model = Written(lambda m, x: m.last(function(m, x)), **members).double()
    return model, normal(5, 3, 3), normal(5, 2, seed=1)


@pytest.mark.filterwarnings("error:.*without preconditioner")
@pytest.mark.parametrize("way", ["update", "listen"])
@pytest.mark.parametrize("name", [*CASES, *SEQUENCES])
def test_a_stream_may_begin_with_one_example(name: str, way: str) -> None:
    """Of one example all axes of size one look alike."""
    model, X, Y = stream_of(name)
    loss = nn.MSELoss(reduction="sum")
    estimator = CurvatureEstimator(EmpiricalRisk(model, loss, ()), FullBlock, vectors=Empirical())
    for batch in zip(X.split([1, 3, 1]), Y.split([1, 3, 1]), strict=True):
        if way == "update":
            estimator.update(batch)
        else:
            with estimator.listen(batch):
                model(batch[0])
    close(estimator.operator.trace, gradients(model, loss, X, Y).square().sum())
    assert not estimator.withdrawn
    if name == "row":  # for one example it may as well be one of its own
        assert [*estimator.operator.blocks] == ["first", "last", "distances"]


@pytest.mark.parametrize("sizes", [[5], [1, 4]])
@pytest.mark.parametrize("name", ["squeezed", "flattened"])
def test_training_is_that_of_the_layer_on_rows(name: str, sizes: list[int]) -> None:
    values = list[list[float]]()
    for plain in (False, True):
        model, X, Y = model_of(name, plain)
        loss = nn.MSELoss()
        optimizer = KFACOptimizer(model, loss, approximation=DiagonalBlock, vectors=Exact())
        values.append([])
        for x, y in 5 * [*zip(X.split(sizes), Y.split(sizes), strict=True)]:
            optimizer.zero_grad()
            value = loss(model(x), y)
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
