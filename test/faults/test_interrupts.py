"""Ctrl-C at any line: what is the user's is as before, and results are those of before or of
afterwards.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    EmpiricalRisk,
    FullBlock,
    Hessian,
    Jacobian,
    KFACOptimizer,
    Laplace,
    LevenbergMarquardt,
    attribution_scores,
    curvature,
)
from curvlinops_plus.contexts import GradMode
from test.faults.interrupts import Stop, Users, every, interrupted, is_free, number_of_lines, same

Data = list[tuple[Tensor, Tensor]]
#: Of a test one line in so many, and about so many lines at most; by night more.
STRIDE, MOST = 31, 60


class Network(nn.Module):
    """A layer, a norm with buffers, and a weight that a function reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.head = nn.Parameter(torch.randn(3, 5))

    def forward(self, X: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.norm(self.inner(X))), self.head)


def network() -> Network:
    torch.manual_seed(0)
    return Network().double().eval()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data() -> Data:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    return list(zip(X.split(6), (torch.arange(12) % 3).split(6), strict=True))


LOSS = nn.CrossEntropyLoss()
V = torch.linspace(-1, 1, 50, dtype=torch.float64)


def product(K: Any) -> Tensor:
    return K @ V[: K.shape[1]]


#: Results of a risk that an interrupt may fall into.
RESULTS: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "loss": lambda risk: risk.loss(),
    "gradient": lambda risk: risk.gradient(),
    "KFAC": lambda risk: product(curvature(risk, KFAC)),
    "EKFAC": lambda risk: product(curvature(risk, EKFAC, vectors="mc").inverse(0.1)),
    "FullBlock": lambda risk: curvature(risk, FullBlock).logdet,
    "GGN": lambda risk: product(GGN(risk)),
    "Hessian": lambda risk: product(Hessian(risk)),
    "Jacobian": lambda risk: product(Jacobian(risk)),
    "attribution": lambda risk: attribution_scores(curvature(risk, EKFAC).inverse(0.1), risk, risk),
    "Laplace": lambda risk: Laplace(curvature(risk, KFAC)).fit_prior().predict(data()[0][0]),
}


def some(number: int) -> Iterator[int]:
    """Numbers of lines, spread over all of them."""
    return every(max(STRIDE, number // MOST), number)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS)
def test_every_seventh_line(name: str) -> None:
    users = Users(network())
    risk = EmpiricalRisk(users.model, LOSS, data())

    def work() -> Any:
        return RESULTS[name](risk)

    expected = work()
    before = users.now()
    for line in every(7, number_of_lines(work)):
        place = interrupted(work, line)
        assert users.changes(before) == [], place
    assert same(work(), expected)


@pytest.mark.parametrize("model", [small, network])
@pytest.mark.parametrize("name", RESULTS)
def test_the_users_things_are_as_before(name: str, model: Any) -> None:
    """And a second try has the same result, also from another thread."""
    users = Users(model())
    risk = EmpiricalRisk(users.model, LOSS, data())

    def work() -> Any:
        return RESULTS[name](risk)

    expected = work()
    before = users.now()
    for line in some(number_of_lines(work)):
        place = interrupted(work, line)
        assert users.changes(before) == [], place
    assert same(work(), expected)


def test_a_mode_that_is_dropped_late_changes_nothing() -> None:
    """A traceback keeps frames, and so the modes in them, while those around have ended."""
    outer = GradMode(False)
    outer.__enter__()
    inner = GradMode(True)
    inner.__enter__()
    outer.__exit__()
    assert torch.is_grad_enabled()
    del inner
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------------- what is updated step by step
class Stream:
    """Something that goes on from batch to batch.

    Attributes:
        users: Its model.
        state: All that it goes on from, in tensors.
        steps: What changes it, by names.
    """

    users: Users
    state: Callable[[], Any]
    steps: dict[str, Callable[[], object]]


class Estimator(Stream):
    def __init__(self) -> None:
        model = small()
        self.users = Users(model)
        risk = EmpiricalRisk(model, LOSS, ())
        estimator = CurvatureEstimator(risk, EKFAC, decay=0.9, damping=0.1)
        first, second = data()
        estimator.update(first)
        estimator.refresh()

        def listen() -> None:
            with estimator.listen(second):
                model(second[0])

        self.state = estimator.state_dict
        self.steps = {
            "update": lambda: estimator.update(second),
            "micro-batch": lambda: estimator.update(second, decay=1.0),
            "listen": listen,
            "refresh": estimator.refresh,
        }


@pytest.mark.parametrize("step", Estimator().steps)
def test_a_batch_is_added_wholly_or_not(step: str) -> None:
    stream = Estimator()
    before = stream.state()
    users = stream.users.now()
    lines = number_of_lines(stream.steps[step])
    after = stream.state()
    assert not same(before, after) or step == "refresh"
    for line in some(lines):
        stream = Estimator()
        place = interrupted(stream.steps[step], line)
        state = stream.state()
        assert same(state, before) or same(state, after), place
        assert stream.users.changes({**stream.users.now(), "hooks": users["hooks"]}) == [], place


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {"damping": 0.1},
    "reject": {"damping": 0.1, "reject": 2.0},
    "Levenberg-Marquardt": {"damping": LevenbergMarquardt(0.1, interval=1)},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_move_wholly_or_not(name: str) -> None:
    """In a step that an interrupt has ended, also where it looks at its batch once more."""

    def make() -> tuple[nn.Module, Callable[[], object]]:
        model = small()
        optimizer = KFACOptimizer(model, LOSS, lr=0.5, momentum=0.0, **OPTIMIZERS[name])
        X, y = data()[0]
        LOSS(model(X), y).backward()
        return model, optimizer.step

    def parameters(model: nn.Module) -> list[Tensor]:
        return [p.detach().clone() for p in model.parameters()]

    model, step = make()
    before = parameters(model)
    lines = number_of_lines(step)
    after = parameters(model)
    assert not same(before, after)
    for line in some(lines):
        model, step = make()
        place = interrupted(step, line)
        now = parameters(model)
        assert same(now, before) or same(now, after), place
        assert is_free(), place


@pytest.mark.parametrize("name", ["reject", "Levenberg-Marquardt"])
def test_a_second_look_that_fails_undoes_the_step(name: str) -> None:
    """Such as out of memory."""
    model = small()
    optimizer = KFACOptimizer(model, LOSS, lr=1e3, norm_constraint=None, **OPTIMIZERS[name])
    X, y = data()[0]
    looks = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise MemoryError

    LOSS(model(X), y).backward()
    handle = model.register_forward_pre_hook(fail)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(MemoryError):
        optimizer.step()
    assert same([p.detach() for p in model.parameters()], before)
    handle.remove()
    optimizer.zero_grad()
    LOSS(model(X), y).backward()
    optimizer.step()
    assert optimizer.steps == 1


# ----------------------------------------------------------------------------- in the user's own code
class Interrupted(nn.Module):
    """Ctrl-C in the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def forward(self, X: Tensor) -> Tensor:
        if self.armed:
            raise Stop
        return X


def interruptible() -> tuple[nn.Sequential, Interrupted]:
    torch.manual_seed(0)
    switch = Interrupted()
    layers = nn.Linear(4, 5), nn.Tanh(), switch, nn.Linear(5, 3)
    return nn.Sequential(*layers).double(), switch


@pytest.mark.parametrize("examples", [6, 4])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_validation_after_an_interrupted_forward_pass(gradients: bool, examples: int) -> None:
    """It is none of the training: the interrupted batch is not continued by it."""
    model, switch = interruptible()
    optimizer = KFACOptimizer(model, LOSS, damping=0.1)
    hooks = Users(model).now()["hooks"]
    X, y = data()[0]
    LOSS(model(X), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = optimizer.curvature.state_dict()
    switch.armed = True
    with pytest.raises(Stop):
        model(X)
    switch.armed = False
    assert is_free()
    model.eval()
    with torch.set_grad_enabled(gradients):
        validation = LOSS(model(X[:examples]), y[:examples])
    assert validation.requires_grad == gradients
    assert same(optimizer.curvature.state_dict(), expected)
    assert Users(model).now()["hooks"] == hooks
    model.train()
    LOSS(model(X), y).backward()
    optimizer.step()
    assert optimizer.curvature.updates == 2


def test_what_an_interrupted_forward_pass_leaves_ends_with_the_optimizer() -> None:
    model, switch = interruptible()
    plain = Users(copy.deepcopy(model)).now()["hooks"]
    optimizer = KFACOptimizer(model, LOSS, damping=0.1)
    switch.armed = True
    with pytest.raises(Stop):
        model(data()[0][0])
    optimizer.close()
    assert Users(model).now()["hooks"] == plain
    assert torch.backends.mha.get_fastpath_enabled()


# ------------------------------------------------------------------------------------------- threads
def test_training_while_another_thread_evaluates() -> None:
    """As loggers and validation threads do: the training is that without them."""

    def train(steps: int, model: nn.Module) -> list[Tensor]:
        optimizer = KFACOptimizer(model, LOSS, damping=0.1)
        batches = data()
        for k in range(steps):
            X, y = batches[k % 2]
            optimizer.zero_grad()
            LOSS(model(X), y).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    expected = train(30, small())
    model = small()
    stop = threading.Event()
    errors: list[BaseException] = []

    def evaluate() -> None:
        X, y = data()[1]
        while not stop.is_set():
            try:
                model(X)
                with torch.no_grad():
                    LOSS(model(X), y)
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        found = train(30, model)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert same(found, expected)
    assert is_free()


def test_functional_calls_in_another_thread() -> None:
    """They write to the module's parameters for a moment; products don't see it."""
    model = small()
    risk = EmpiricalRisk(model, LOSS, data())
    expected = product(GGN(risk))
    stop = threading.Event()

    def call() -> None:
        named = dict(model.named_parameters())
        while not stop.is_set():
            torch.func.functional_call(model, named, (data()[0][0],))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(30):
            assert same(product(GGN(risk)), expected)
    finally:
        stop.set()
        thread.join()


class Taught(torch.utils.data.Dataset[Any]):
    """Targets are what the model itself says, as of a teacher."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.X = torch.cat([X for X, _ in data()])

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.X[n], self.model(self.X[n : n + 1])[0].argmax()


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_call_the_model(workers: int) -> None:
    """Also in workers that are forked while the model is recorded."""
    model = small()
    loader = torch.utils.data.DataLoader(
        Taught(model),
        batch_size=6,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    batches = list(loader)
    for kind in (KFAC, EKFAC):
        found = curvature(EmpiricalRisk(model, LOSS, loader), kind)
        expected = curvature(EmpiricalRisk(model, LOSS, batches), kind)
        assert same(found.to_dense(), expected.to_dense())
