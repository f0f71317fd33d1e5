"""`listen` leaves the user's forward pass alone, and what is added is what `update` adds, or
refused behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    KFAC,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    UnsupportedError,
)
from curvlinops_plus.linalg import Kronecker
from curvlinops_plus.risk import preserve
from test.cases import close
from test.helpers import normal

pytestmark = pytest.mark.filterwarnings("ignore:.* layers get their exact diagonal")
T, CE = 3, nn.functional.cross_entropy
Y = torch.tensor([0, 2, 1, 1, 0])

# What a model does with a table for all examples, [1, T, d], before it adds it to [N, T, d].
TABLES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "broadcast": lambda t, N: t,
    "without its axis": lambda t, N: t[0],
    "sum": lambda t, N: t.sum(0),
    "norm": lambda t, N: t / t.norm(),
    "softmax": lambda t, N: t.softmax(0),
    "repeated": lambda t, N: t.repeat(N, 1, 1),
}


class Table(nn.Module):
    """Positions, as numbers with an axis of one example or without; and weights that a layer
    makes.
    """

    def __init__(self, use: Callable[[Tensor, int], Tensor], axis: bool = True) -> None:
        super().__init__()
        self.table, self.made = nn.Embedding(T, 4), nn.Linear(2, 4)
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.use, self.axis, self.seen = use, axis, list[Any]()

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 2]
        places = torch.arange(T)
        table = self.table(places[None]) if self.axis else self.table(places)[None]
        made = self.made(torch.ones(1, 1, 2, dtype=x.dtype))
        self.seen += [table.shape, made.shape]
        return self.head(
            torch.tanh(self.body(x) + self.use(table, len(x)) * self.use(made, len(x))).mean(1)
        )


def estimator(model: nn.Module) -> CurvatureEstimator:
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), ())
    return CurvatureEstimator(risk, KFAC, default=DiagonalBlock, vectors=Exact(), decay=0.9)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return normal(len(Y), T, 2, seed=seed), Y


def by_listen(running: CurvatureEstimator, given: tuple[Tensor, Tensor]) -> Tensor:
    with running.listen(given):
        out = running.risk.model(given[0])
    return out


def by_parts(running: CurvatureEstimator, given: tuple[Tensor, Tensor]) -> Tensor:
    """As the hooks of an optimizer do."""
    heard = running._users_pass(running.risk.read_input(given[0], False))
    heard.begin()
    out = running.risk.model(given[0])
    heard.end(out)
    heard.add(given[1])
    return out


IN_TURNS = [
    (name, by_listen if k % 2 else by_parts, k in (0, 3, 4)) for k, name in enumerate(TABLES)
]


@pytest.mark.parametrize(("name", "way", "axis"), [*IN_TURNS, ("broadcast", by_listen, False)])
def test_tables_for_all_examples(name: str, way: Any, axis: bool) -> None:
    """The outputs are those of the plain model, bit by bit, whose code sees its own shapes; what is
    added is right.
    """
    torch.manual_seed(0)
    model = Table(TABLES[name], axis).double()
    listening, running = estimator(model), estimator(model)
    for seed in range(3):
        given = batch(seed)
        plain, shapes = model(given[0]), list(model.seen)
        model.seen.clear()
        out = way(listening, given)
        assert torch.equal(out, plain)
        assert model.seen[:2] == shapes[:2]
        expected, found = (
            torch.autograd.grad(CE(f, Y), list(model.parameters())) for f in (plain, out)
        )
        assert all(map(torch.equal, found, expected))
        running.update(given)
        model.seen.clear()
    close(listening.operator.to_dense(), running.operator.to_dense(), 1e-12)


def test_a_table_that_is_read_in_some_batches_only() -> None:
    """What is added later can't be taken apart: the layer is named, and left without
    preconditioner.
    """
    torch.manual_seed(0)
    model = Table(TABLES["broadcast"]).double()
    running = estimator(model)
    for number in range(3):
        by_parts(running, batch(number))
    model.use = TABLES["sum"]
    with pytest.warns(
        CurvatureWarning, match=r"layer .table.*So do those of \['made'\].*In earlier batches"
    ):  # the fourth is looked at
        by_parts(running, batch(3))
    assert running.updates == 4
    assert running.withdrawn == ["table", "made"]
    assert not model.table._forward_hooks
    by_parts(running, batch(4))
    K, size = running.operator, model.table.weight.numel()
    close(K.blocks["table"].to_dense(), torch.eye(size).double())
    model.use = TABLES["broadcast"]
    assert [*K.blocks] == [*running.operator.blocks]


def test_what_is_dropped_leaves_no_hooks() -> None:
    model = Table(TABLES["norm"]).double()
    running = estimator(model)
    by_listen(running, batch(0))
    heard = running._users_pass(running.risk.read_input(batch(0)[0], False))
    heard.begin()
    assert model.head._forward_hooks
    del heard
    assert not preserve.eager.is_on  # else other threads would wait for good
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert running.updates == 1


@pytest.mark.parametrize("way", [by_listen, by_parts])
def test_what_recording_refuses_is_said_behind_the_users_pass(way: Any) -> None:
    class Refusing(nn.Module):
        """A layer that runs without gradients in a part of the model."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = torch.tanh(self.first(x))
            return self.last(h.mean(1))

    running = estimator(Refusing().double())
    with pytest.raises(UnsupportedError, match=r"layer 'first' ran under torch.no_grad"):
        way(running, batch(0))
    assert not any(m._forward_hooks for m in running.risk.model.modules())


class ByFunctions(nn.Module):
    """Reads its parameters by functions alone, or by a module besides."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 4))
        self.head = nn.Linear(3, 3) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.linear(x, self.matrix))


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_that_wait_for_their_targets_are_kept_apart(
    head: bool, order: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = ByFunctions(head).double()
    batches = [
        (torch.rand(5, 4, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64))
        for _ in range(3)
    ]
    updated, waiting = (
        CurvatureEstimator(EmpiricalRisk(model, nn.MSELoss(), ()), vectors=Empirical())
        for _ in range(2)
    )
    for each in batches:
        updated.update(each)
    waiting.update(batches[0])
    passes = []
    for X, _ in batches[1:]:
        users_pass = waiting._users_pass(waiting.risk.read_input(X, False))
        users_pass.begin()
        users_pass.end(model(X))
        passes.append(users_pass)
    for k in order:
        passes[k].add(batches[1 + k][1])
    close(waiting.operator.to_dense(), updated.operator.to_dense(), 1e-12)
    X = torch.cat([X for X, _ in batches])
    block = waiting.operator.blocks["matrix"]
    assert isinstance(block, Kronecker)
    close(block.A.matrices(), X.T @ X / 15, 1e-12)
