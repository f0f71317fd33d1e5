"""`listen` leaves the user's forward pass alone, and what is added is what `update` adds, or refused behind it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import close
from torch import Tensor, nn

from curvlinops_plus import (
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    UnsupportedError,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* layers get their exact diagonal", "ignore:.*are batch norm in training mode"
)
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
    """Positions, as numbers with an axis of one example or without; and weights that a layer makes."""

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
        return self.head(torch.tanh(self.body(x) + self.use(table, len(x)) * self.use(made, len(x))).mean(1))


def estimator(model: nn.Module, kind: Any = KFAC, vectors: Any = None, **options: Any) -> CurvatureEstimator:
    loss = options.pop("loss", nn.CrossEntropyLoss())
    risk = EmpiricalRisk(model, loss, (), **options)
    return CurvatureEstimator(risk, kind, default=DiagonalBlock, vectors=vectors or Exact(), decay=0.9)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(len(Y), T, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), Y


def by_listen(running: CurvatureEstimator, given: tuple[Tensor, Tensor]) -> Tensor:
    with running.listen(given):
        out = running.risk.model(given[0])
    return out


def by_parts(running: CurvatureEstimator, given: tuple[Tensor, Tensor]) -> Tensor:
    heard = running.begin(given[0])
    # As the hooks of an optimizer do.
    out = running.risk.model(given[0])
    heard.end(out)
    heard.add(given[1])
    return out


IN_TURNS = [(name, by_listen if k % 2 else by_parts, k in (0, 3, 4)) for k, name in enumerate(TABLES)]


@pytest.mark.parametrize(("name", "door", "axis"), [*IN_TURNS, ("broadcast", by_listen, False)])
def test_tables_for_all_examples(name: str, door: Any, axis: bool) -> None:
    """The outputs are those of the plain model, bit by bit, whose code sees its own shapes; what is added is right."""
    torch.manual_seed(0)
    model = Table(TABLES[name], axis).double()
    listening, running = estimator(model), estimator(model)
    for seed in range(3):
        given = batch(seed)
        plain, shapes = model(given[0]), list(model.seen)
        model.seen.clear()
        out = door(listening, given)
        assert torch.equal(out, plain)
        assert model.seen[:2] == shapes[:2]
        expected, found = (torch.autograd.grad(CE(f, Y), list(model.parameters())) for f in (plain, out))
        assert all(map(torch.equal, found, expected))
        running.update(given)
        model.seen.clear()
    close(listening.operator.to_dense(), running.operator.to_dense(), 1e-12)


def test_a_table_that_is_read_in_some_batches_only() -> None:
    """What is added later can't be taken apart: it is refused by name, behind the user's pass."""
    torch.manual_seed(0)
    model = Table(TABLES["broadcast"]).double()
    running = estimator(model)
    by_parts(running, batch(0))
    model.use = TABLES["sum"]
    heard, out = running.begin(batch(1)[0]), model(batch(1)[0])
    heard.end(out)
    with pytest.raises(UnsupportedError, match=r"one row for all 5 examples.*In earlier batches"):
        heard.add(Y)
    assert running.updates == 1
    assert not model.table._forward_hooks
    model.use = TABLES["broadcast"]
    by_parts(running, batch(2))


MADE = {
    "a copy": (lambda model, X: copy.deepcopy(model)(X), "called 0 times between `begin` and `end`"),
    "two calls": (lambda model, X: (model(X), model(X))[1], "called 2 times between `begin` and `end`"),
    "other inputs": (lambda model, X: model(X + 1), "called on other tensors"),
    "another output": (lambda model, X: 2 * model(X), "has not returned since `begin`"),
}


@pytest.mark.parametrize("name", MADE)
def test_outputs_of_other_calls(name: str) -> None:
    """Those of a copy were taken for a batch without gradients, which halved the curvature."""
    torch.manual_seed(0)
    model, (make, words) = Table(TABLES["broadcast"]).double(), MADE[name]
    running = estimator(model)
    heard = running.begin(batch(0)[0])
    with pytest.raises(ValueError, match=words):
        heard.end(make(model, batch(0)[0]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert running.updates == 0


class Refusing(nn.Module):
    """A layer that runs without gradients in a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.last(h.mean(1))


def test_what_recording_refuses_is_said_behind_the_users_pass() -> None:
    running = estimator(Refusing().double())
    heard = running.begin(batch(0)[0])
    heard.end(running.risk.model(batch(0)[0]))
    with pytest.raises(UnsupportedError, match=r"layer 'first' ran under torch.no_grad"):
        heard.add(Y)


class Dropping(nn.Module):
    """Dropout and a running state in training, and a table that takes a pass of its own."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.drop = nn.Embedding(T, 2), nn.Linear(2, 3), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.head(self.drop(torch.tanh(x + self.table(torch.arange(T)[None]))).mean(1))


def test_a_pass_of_its_own_begins_as_the_users() -> None:
    """Random numbers and buffers are those of the user's pass, and afterwards those that it has left."""
    torch.manual_seed(0)
    model = Dropping().double()
    listening, running = estimator(model), estimator(model)
    for seed in range(3):
        torch.manual_seed(seed)
        running.update(batch(seed))
        torch.manual_seed(seed)
        by_listen(listening, batch(seed))
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        model.count -= 1
        model(batch(seed)[0])
        assert torch.equal(after, torch.get_rng_state())
        assert float(model.count) == seed + 1
    close(listening.operator.to_dense(), running.operator.to_dense())


# -------------------------------------------------------------------------------------------- the user's backward pass


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def back(running: CurvatureEstimator, given: Any, backward: Callable[[Any], object]) -> None:
    """Go back inside the block."""
    with running.listen(given):
        out = running.risk.model(given[0])
        backward(out)


def test_going_back_inside_is_refused() -> None:
    running = estimator(dense(), vectors=Empirical())
    with pytest.raises(ValueError, match="after the block, not inside"):
        back(running, batch(0), lambda out: CE(out, Y).backward())
    assert running.updates == 0


# ---------------------------------------------------------------------------------------- batch norm in training loops


def vectors(options: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """A network of vectors, with data."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, **options)
    return nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(12, 4).double()


def images(options: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """A network of images, with data."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, **options)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), norm, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3)).double()
    return model, torch.randn(12, 2, 3, 3).double()
