"""Passes of the user that are listened to: they go on as they would without, whatever recording would do to them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import CurvatureEstimator, Empirical, EmpiricalRisk, Exact, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:.* layers get their exact diagonal")
T = 3

# What a model does with a table for all examples, [1, T, d], before it adds it to [N, T, d].
TABLES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "broadcast": lambda t, N: t,
    "without its axis": lambda t, N: t[0],
    "sum": lambda t, N: t.sum(0),
    "mean": lambda t, N: t.mean(0),
    "norm": lambda t, N: t / t.norm(),
    "softmax": lambda t, N: t.softmax(0),
    "repeated": lambda t, N: t.repeat(N, 1, 1),
    "reshaped": lambda t, N: t.reshape(t.shape[1:]),
}
Y = torch.tensor([0, 2, 1, 1, 0])


class Table(nn.Module):
    """Positions, as numbers with an axis of one example or without; and weights that a layer makes."""

    def __init__(self, use: Callable[[Tensor, int], Tensor], axis: bool) -> None:
        super().__init__()
        self.table, self.made = nn.Embedding(T, 4), nn.Linear(2, 4)
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.use, self.axis, self.seen = use, axis, list[Any]()

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 2]
        places = torch.arange(T)
        table = self.table(places[None]) if self.axis else self.table(places)[None]
        made = self.made(torch.ones(1, 1, 2, dtype=x.dtype))
        self.seen += [table.shape, made.shape]
        table, made = self.use(table, len(x)), self.use(made, len(x))
        return self.head(torch.tanh(self.body(x) + table * made).mean(1))


def batch(seed: int, N: int = len(Y)) -> tuple[Tensor, Tensor]:
    return torch.randn(N, T, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), Y[:N]


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


@pytest.mark.parametrize("door", [by_listen, by_parts])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("axis", [True, False])
@pytest.mark.parametrize("name", TABLES)
def test_tables_for_all_examples(name: str, axis: bool, check: bool, door: Any) -> None:
    """The outputs are those of the plain model, bit by bit, whose code sees its own shapes; what is added is right."""
    torch.manual_seed(0)
    model = Table(TABLES[name], axis).double()
    listening = CurvatureEstimator(
        EmpiricalRisk(model, nn.CrossEntropyLoss(), (), check=check), vectors=Exact(), decay=0.9
    )
    running = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), vectors=Exact(), decay=0.9)
    for seed in range(3):
        given = batch(seed)
        plain, shapes = model(given[0]), list(model.seen)
        model.seen.clear()
        out = door(listening, given)
        assert torch.equal(out, plain)
        assert model.seen[:2] == shapes[:2]
        expected = torch.autograd.grad(nn.functional.cross_entropy(plain, Y), list(model.parameters()))
        found = torch.autograd.grad(nn.functional.cross_entropy(out, Y), list(model.parameters()))
        assert all(torch.equal(g, h) for g, h in zip(found, expected, strict=True))
        running.update(given)
        model.seen.clear()
    if not check and name in ("without its axis", "mean"):
        return  # the output alone does not show that examples share what they read
    K, L = listening.operator.to_dense(), running.operator.to_dense()
    assert K.shape == L.shape
    assert float((K - L).norm()) <= 1e-12 * float(L.norm())


@pytest.mark.parametrize("vectors", [Exact(), Empirical()])
def test_a_table_that_is_read_in_some_batches_only(vectors: Any) -> None:
    """What is added later can't be taken apart: it is refused by name, behind the user's pass."""
    torch.manual_seed(0)
    model = Table(TABLES["broadcast"], True).double()
    running = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), vectors=vectors)
    by_parts(running, batch(0))
    model.use = TABLES["sum"]
    plain = model(batch(1)[0])
    heard = running.begin(batch(1)[0])
    out = model(batch(1)[0])
    heard.end(out)
    assert torch.equal(out, plain)
    with pytest.raises(UnsupportedError, match=r"picks a row, or reduces over the first axis.*In earlier batches") as e:
        heard.add(Y)
    assert type(e.value) is UnsupportedError
    assert running.updates == 1
    assert not model.table._forward_hooks
    model.use = TABLES["broadcast"]
    by_parts(running, batch(2))


MADE = {
    "a copy": (lambda model, X: copy.deepcopy(model)(X), "called 0 times between `begin` and `end`"),
    "a copy after the model": (lambda model, X: (model(X), copy.deepcopy(model)(X))[1], "has not returned since"),
    "two calls": (lambda model, X: (model(X), model(X))[1], "called 2 times between `begin` and `end`"),
    "other inputs": (lambda model, X: model(X + 1), "called on other tensors"),
    "another output": (lambda model, X: 2 * model(X), "has not returned since `begin`"),
}


@pytest.mark.parametrize("name", MADE)
def test_outputs_of_other_calls(name: str) -> None:
    """Those of a copy were taken for a batch without gradients, which halved the curvature."""
    torch.manual_seed(0)
    model = Table(TABLES["broadcast"], True).double()
    running = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), vectors=Exact())
    running.update(batch(0))
    before = running.operator.to_dense()
    heard, (make, words) = running.begin(batch(0)[0]), MADE[name]
    out = make(model, batch(0)[0])
    with pytest.raises(ValueError, match=words):
        heard.end(out)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert running.updates == 1
    by_parts(running, batch(0))
    torch.testing.assert_close(running.operator.to_dense(), before)


class Experts(nn.Module):
    """Hard routing: each example to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])
        self.rows: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x, out = x.mean(1), torch.zeros(len(x), 3, dtype=x.dtype)
        for k, expert in enumerate(self.experts):
            at = self.rows[k] = ((x[:, 0] > 0).long() == k).nonzero().flatten()
            out = out.index_add(0, at, expert(x[at]))
        return out


@pytest.mark.parametrize("door", [by_listen, by_parts])
@pytest.mark.parametrize("few", [1, 2])
def test_an_expert_that_gets_few_examples(few: int, door: Any) -> None:
    """In a later batch: refused by name behind the user's pass, unless it is said whose rows these are."""
    torch.manual_seed(0)
    model, (X, y) = Experts().double(), batch(0)
    rows = {f"experts.{k}": lambda X, y, k=k: model.rows[k] for k in (0, 1)}
    told, refusing, running = (
        CurvatureEstimator(
            EmpiricalRisk(model, nn.CrossEntropyLoss(), (), example_of_row=example_of_row),
            vectors=Exact(),
            leave_out_uncalled=True,
        )
        for example_of_row in (rows, None, rows)
    )
    for number in (0, few, 5 - few):  # examples of the first expert
        X[:, :, 0] = torch.tensor([-1.0] * number + [1.0] * (len(Y) - number))[:, None]
        plain = model(X)
        running.update((X, y))
        assert torch.equal(door(told, (X, y)), plain)
        if number:
            with pytest.raises(UnsupportedError, match=r"example_of_row=\{'experts.[01]': lambda X, y: model.rows\}"):
                door(refusing, (X, y))
        else:
            door(refusing, (X, y))
    torch.testing.assert_close(told.operator.to_dense(), running.operator.to_dense())


class Refusing(nn.Module):
    """A layer that runs without gradients in a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.last(h.mean(1))


@pytest.mark.parametrize("vectors", [Exact(), Empirical()])
def test_what_recording_refuses_is_said_behind_the_users_pass(vectors: Any) -> None:
    model = Refusing().double()
    running = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), vectors=vectors)
    heard = running.begin(batch(0)[0])
    heard.end(model(batch(0)[0]))
    with pytest.raises(UnsupportedError, match=r"layer 'first' ran under torch.no_grad"):
        heard.add(Y)


class Dropping(nn.Module):
    """Dropout and a running state in training."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.drop = nn.Embedding(T, 2), nn.Linear(2, 3), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.head(self.drop(torch.tanh(x + self.table(torch.arange(T)[None]))).mean(1))


@pytest.mark.parametrize("door", [by_listen, by_parts])
def test_a_pass_of_its_own_begins_as_the_users(door: Any) -> None:
    """Random numbers and buffers are those of the user's pass, and afterwards those that it has left."""
    torch.manual_seed(0)
    model = Dropping().double()
    listening, running = (
        CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), vectors=Exact()) for _ in (0, 1)
    )
    for seed in range(3):
        torch.manual_seed(seed)
        running.update(batch(seed))
        torch.manual_seed(seed)
        door(listening, batch(seed))
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        model.count -= 1
        model(batch(seed)[0])
        assert torch.equal(after, torch.get_rng_state())
        assert float(model.count) == seed + 1
    torch.testing.assert_close(listening.operator.to_dense(), running.operator.to_dense())


class Drawing(nn.Module):
    """A factor from Python's random numbers; positions for each example, or once for all."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(T, 2), nn.Linear(2, 3)
        self.once = False

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(T)[None] if self.once else torch.arange(T).expand(len(x), T)
        return self.head(torch.tanh(random.random() * x + self.table(places)).mean(1))


def test_what_a_pass_begins_with_is_fetched_where_another_one_is_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """All random states: in the first batch, and after one that needed another pass. Between them such a batch, of a
    model that draws from Python's random numbers, has another output there, and is refused for it.
    """
    torch.manual_seed(0)
    model = Drawing().double()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), ())
    listening, running = (CurvatureEstimator(risk, vectors=Exact()) for _ in (0, 1))
    fetched, getstate = [], random.getstate
    monkeypatch.setattr(random, "getstate", lambda: fetched.append(None) or getstate())

    def hear(seed: int, once: bool) -> int:
        """How often Python's state was fetched before the block's pass."""
        model.once = once
        with listening.listen(batch(seed)):
            fetched.clear()
            model(batch(seed)[0])
            number = len(fetched)
        return number

    assert [hear(seed, once) for seed, once in enumerate((True, True, False, False))] == [1, 1, 1, 0]
    before = {name: t.clone() for name, t in tensors_of(listening.state_dict())}
    with pytest.raises(UnsupportedError, match="draw random numbers that are not PyTorch's"):
        hear(4, True)
    assert listening.updates == 4
    assert all(torch.equal(t, before[name]) for name, t in tensors_of(listening.state_dict()))
    for seed in range(4, 7):
        random.seed(seed)
        hear(seed, True)
    listening.reset()
    for seed in range(3):
        random.seed(seed)
        assert hear(seed, True) == 1
        random.seed(seed)
        running.update(batch(seed))
    torch.testing.assert_close(listening.operator.to_dense(), running.operator.to_dense())


def tensors_of(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        return [(name, state)]
    return [each for k, v in state.items() for each in tensors_of(v, f"{name}/{k}")] if isinstance(state, dict) else []


def test_states_are_fetched_for_backward_passes_inside_that_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the 1st, 2nd, 4th, ... batch, which are compared with a pass of our own, and the one after these."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), nn.CrossEntropyLoss()
    listening = CurvatureEstimator(EmpiricalRisk(model, loss, ()), vectors=Empirical())
    fetched, getstate, found = [], random.getstate, []
    monkeypatch.setattr(random, "getstate", lambda: fetched.append(None) or getstate())
    for _ in range(9):
        X = torch.rand(5, 2)
        with listening.listen((X, Y)):
            fetched.clear()
            f = model(X)
            found.append(len(fetched))
            loss(f, Y).backward()
    assert found == [1, 1, 1, 1, 1, 0, 0, 1, 1]


class Averaging(nn.Module):
    """A factor from Python's random numbers, and a buffer that each pass writes to and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(random.random() * self.body(x)).mean(1)
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        return self.head(h + self.mean)


def test_a_backward_pass_inside_is_compared_in_a_smaller_last_batch() -> None:
    """Its pass of our own begins with the same random numbers and buffers, whichever batch it is."""
    torch.manual_seed(0)
    model, loss = Averaging().double(), nn.CrossEntropyLoss()
    listening = CurvatureEstimator(EmpiricalRisk(model, loss, ()), vectors=Empirical())
    random.seed(0)
    for seed, N in enumerate((5, 5, 5, 5, 5, 4)):
        X, y = batch(seed, N)
        with listening.listen((X, y)):
            loss(model(X), y).backward()
    after = random.random()
    random.seed(0)
    assert after == [random.random() for _ in range(7)][-1]
    assert listening.updates == 6
