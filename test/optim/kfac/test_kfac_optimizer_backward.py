"""With the gradient of the loss as the vector, the user's own backward pass brings the gradients of
layers, and statistics are what a pass of our own makes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import EKFAC, KFAC, Empirical, EmpiricalRisk, curvature
from curvlinops_plus.blocks import users_pass
from curvlinops_plus.optim import KFACOptimizer
from curvlinops_plus.risk import backward_pass
from test.optim.kfac.test_kfac_optimizer_loops import hooks
from test.optim.kfac.training import batch, net, plain

Step = Callable[[Any, Any, nn.Module, Tensor, Tensor], Any]
CE = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def small_passes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_pass, "_ENOUGH_NUMBERS", 0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each backward pass of our own."""
    passes: list[str] = []

    def counted(real: Callable[..., Any], *args: Any) -> Any:
        passes.append("one")
        return real(*args)

    for name in ("gradients_of", "stream_gradients"):
        monkeypatch.setattr(backward_pass, name, partial(counted, getattr(backward_pass, name)))
    return passes


def statistics(
    model: nn.Module, step: Step, data: list[Any], own: bool = False, **options: Any
) -> tuple[list[Tensor], int]:
    """The blocks after one step for each batch, and the number of examples."""
    options = {"loss": CE, "check": False, "vectors": Empirical(), "lr": 1e-2, **options}
    optimizer = KFACOptimizer(model, **options)
    torch.manual_seed(5)
    with pytest.MonkeyPatch.context() as patch:
        if own:
            patch.setattr(users_pass.UsersPass, "follow", lambda *args: False)
        for X, y in data:
            step(optimizer, model, optimizer.curvature.risk.losses[0].loss, X, y)
    blocks = [block.to_dense() for block in optimizer.curvature.operator.blocks.values()]
    return blocks, optimizer.curvature.examples


def data(number: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [batch(8, seed) for seed in range(number)]


# ------------------------------------------------------------------------------- loops that do alike
class Telling(nn.Module):
    """Keeps what it has computed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, _, self.last = net()

    def after(self, hidden: Tensor) -> Tensor:
        self.active = torch.tanh(hidden)
        return self.last(self.active)

    def forward(self, X: Tensor) -> Tensor:
        self.hidden = self.first(X)
        return self.after(self.hidden)


def stepping(backward: Callable[[Any, Any, Tensor, Tensor], None]) -> Step:
    """A step with this backward pass, which gets model, output, and the loss as a function."""

    def step(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        output = model(X)
        backward(model, output, loss(output, y), X)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()

    return step


def twice(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    value.backward(retain_graph=True)
    value.backward()


def clipped(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def with_a_penalty(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    (value + sum(p.square().sum() for p in model.parameters())).backward()


def with_a_pass_before(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    model.hidden.square().mean().backward(retain_graph=True)
    value.backward()


def of_second_order(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    value.backward(create_graph=True)


def in_a_thread(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    thread = threading.Thread(target=value.backward)
    thread.start()
    thread.join()


def with_inner_passes(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    """Inside of the pass others go through a part of the same graph."""
    hidden = model.hidden
    square = hidden.square().sum()

    def look(g: Tensor) -> None:
        handle.remove()
        torch.autograd.grad(square, model.first.weight, retain_graph=True)

    handle = hidden.register_hook(look)
    value.backward()


TAKEN: dict[str, Step] = {
    "plain": plain,
    "a third": stepping(lambda model, output, value, X: (value / 3).backward()),
    "scaled": stepping(lambda model, output, value, X: (value * 2**16).backward()),
    "negated": stepping(lambda model, output, value, X: (-value).backward()),
    "function": stepping(lambda model, output, value, X: torch.autograd.backward([value])),
    "twice": stepping(twice),
    "clipped": stepping(clipped),
    "penalty on parameters": stepping(with_a_penalty),
    "another pass before": stepping(with_a_pass_before),
    "second order": stepping(of_second_order),
    "thread": stepping(in_a_thread),
    "inner passes": stepping(with_inner_passes),
}


@pytest.mark.filterwarnings("ignore:.*create_graph=True")
@pytest.mark.parametrize("name", TAKEN)
def test_gradients_are_taken_from_the_users_pass(name: str, sent: list[str]) -> None:
    expected, examples = statistics(Telling(), TAKEN[name], data(), own=True)
    assert len(sent) == 3
    sent.clear()
    found, seen = statistics(Telling(), TAKEN[name], data())
    assert not sent
    assert seen == examples
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def beside(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    (value + model.hidden.square().mean()).backward()


def several_roots(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    torch.autograd.backward([value, model.hidden.square().mean()])


def some_inputs(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    torch.autograd.backward(value, inputs=[*model.last.parameters()])


def by_grad(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    torch.autograd.grad(value, [*model.parameters()])


def output_alone(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    (value + 1e-3 * output[:, 0].mean()).backward()


def saliency(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    torch.autograd.grad(output.sum(), [*model.parameters()], retain_graph=True)
    value.backward()


def another_loss(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    nn.functional.cross_entropy(output, output.argmax(1)).backward()


def one_example(optimizer: Any, model: Any, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    """Its gradient is another one by a hook, by little."""
    weights = torch.ones(len(X), 1, dtype=X.dtype)
    weights[3] = 1 + 1e-6
    optimizer.zero_grad()
    output = model(X)
    output.register_hook(lambda g: g * weights)
    loss(output, y).backward()
    optimizer.step()


def unseen(model: Any, output: Tensor, value: Tensor, X: Tensor) -> None:
    ones = (torch.ones_like(value),)
    inputs = tuple(model.parameters())
    _engine_run_backward((value,), ones, False, False, inputs, True, accumulate_grad=True)


OTHERS: dict[str, Step] = {
    "penalty on activations": stepping(beside),
    "several roots": stepping(several_roots),
    "inputs": stepping(some_inputs),
    "autograd.grad": stepping(by_grad),
    "one more output": stepping(output_alone),
    "saliency": stepping(saliency),
    "another loss": stepping(another_loss),
    "one example": one_example,
    "unseen": stepping(unseen),
    "none": stepping(lambda model, output, value, X: None),
    "nothing": stepping(lambda model, output, value, X: (0 * value).backward()),
    "infinite": stepping(lambda model, output, value, X: (1e308 * value * 10).backward()),
    "far too large": stepping(lambda model, output, value, X: (value * 2**60).backward()),
}


@pytest.mark.filterwarnings("ignore:.*is multiplied by")
@pytest.mark.parametrize("name", OTHERS)
def test_other_passes_are_not_taken(name: str, sent: list[str]) -> None:
    """Our own brings the same numbers, with the graph of the user's forward pass."""
    step = OTHERS[name]

    def with_finite_gradients(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            real = KFACOptimizer.step

            def finite(optimizer: Any) -> None:
                for p in args[1].parameters():
                    p.grad.nan_to_num_(0, 0, 0).clamp_(-1, 1)
                real(optimizer)

            patch.setattr(KFACOptimizer, "step", finite)
            step(*args)

    expected, examples = statistics(Telling(), with_finite_gradients, data(), own=True)
    sent.clear()
    found, seen = statistics(Telling(), with_finite_gradients, data())
    assert len(sent) == 3
    assert seen == examples
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_they_are_those_of_the_loss_by_hand() -> None:
    """`Σ_n a_n a_nᵀ / N` and `Σ_n g_n g_nᵀ / N`, by autograd of one example after the other."""
    model = Telling()
    X, y = batch(8)
    optimizer = KFACOptimizer(model, CE, vectors=Empirical(), check=False)
    for rows in (slice(0, 4), slice(4, 8)):
        (CE(model(X[rows]), y[rows]) / 2).backward()
    block = next(iter(optimizer.curvature.operator.blocks.values()))
    A = torch.zeros(5, 5, dtype=torch.float64)
    G = torch.zeros(5, 5, dtype=torch.float64)
    for x, label in zip(X, y, strict=True):
        z = model.first(x).detach().requires_grad_()
        (g,) = torch.autograd.grad(nn.functional.cross_entropy(model.after(z), label), z)
        a = torch.cat([x, torch.ones(1, dtype=torch.float64)])
        A += a.outer(a) / 8
        G += g.outer(g) / 8
    # rows and columns of the weight, the bias is the last column
    expected = torch.einsum("ik,jl->ijkl", G, A).reshape(25, 25)
    torch.testing.assert_close(block.to_dense(), expected, rtol=1e-12, atol=1e-16)


# ------------------------------------------------------------------------------------------- models
class Pictures(nn.Module):
    """Batch norm, dropout, an activation in place, one layer that is called twice, and one that the
    loss does not reach.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 2, padding=1), nn.BatchNorm1d(3)
        self.twice, self.unused = nn.Linear(5, 5), nn.Linear(5, 2)
        self.last = nn.Linear(15, 3)
        self.dropout = nn.Dropout(0.4)

    def forward(self, X: Tensor) -> Tensor:
        h = self.dropout(torch.relu_(self.norm(self.conv(X[:, None]))))
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        self.unused(h).sum()
        return self.last(h.flatten(1))


class Text(nn.Module):
    """An embedding, layers at positions, and a checkpoint; classes on the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, X: Tensor) -> Tensor:
        h = self.norm(self.embedding(X.abs().mul(3).long().clamp(max=8)))
        h = checkpoint(lambda h: torch.relu_(self.inner(h)), h, use_reentrant=False)
        return self.head(h).transpose(1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": net,
    "pictures": Pictures,
    "text": Text,
    "one layer": lambda: nn.Linear(4, 3),
}


@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
@pytest.mark.parametrize("many", [0, 2**22])
@pytest.mark.parametrize("kind", [KFAC, EKFAC])
@pytest.mark.parametrize("name", MODELS)
def test_models(
    name: str, kind: Any, many: int, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EKFAC sends the first batch twice by itself."""
    monkeypatch.setattr(backward_pass, "_MANY_NUMBERS", many)
    batches = data(4)
    if name == "text":
        batches = [(X, y[:, None].expand(8, 4).roll(1, 0)) for X, y in batches]
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(MODELS[name]().double())
    options: dict[str, Any] = {"approximation": kind, "loss": nn.CrossEntropyLoss(ignore_index=2)}
    expected, _ = statistics(made[0], plain, batches, own=True, **options)
    sent.clear()
    found, _ = statistics(made[1], plain, batches, **options)
    assert len(sent) == (2 if kind is EKFAC else 0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)


class Wide(nn.Sequential):
    """Its output has single precision."""

    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X).float()


@pytest.mark.parametrize("kind", [nn.Sequential, Wide])
@pytest.mark.parametrize(
    ("dtype", "own", "tolerance"), [(torch.bfloat16, 0, 2e-2), (torch.float16, 3, 0.0)]
)
def test_autocast(
    dtype: torch.dtype, own: int, tolerance: float, kind: Any, sent: list[str]
) -> None:
    """In float16 what is scaled for the user's pass may overflow there."""

    def step(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", dtype):
            value = loss(model(X.float()), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    expected, _ = statistics(kind(*net().float()), step, data(), own=True)
    sent.clear()
    found, _ = statistics(kind(*net().float()), step, data())
    assert len(sent) == own
    for block, right in zip(found, expected, strict=True):
        assert (block - right).norm() <= tolerance * right.norm()


class Named(nn.Module):
    """Its output has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, X: Tensor) -> dict[str, Tensor]:
        return {"class": self.net(X)}


@pytest.mark.parametrize(("name", "own"), [("plain", 0), ("penalty on activations", 3)])
def test_on_a_gpu(name: str, own: int, device: torch.device, sent: list[str]) -> None:
    """Threads of its own run the backward pass."""

    def step(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
        (TAKEN | OTHERS)[name](optimizer, model, loss, X.float().to(device), y.to(device))

    expected, _ = statistics(Telling().float().to(device), step, data(), own=True)
    sent.clear()
    found, _ = statistics(Telling().float().to(device), step, data())
    assert len(sent) == own
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_weights_and_labels(reduction: str, sent: list[str]) -> None:
    loss = nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 2.0, 3.0]).double(), reduction=reduction, label_smoothing=0.1
    )

    def step(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        (0.3 * loss(model(X)["class"], y)).backward()
        optimizer.step()

    given: Any = {"class": (loss, 0.3)}
    expected, _ = statistics(Named(), step, data(), own=True, loss=given)
    sent.clear()
    found, _ = statistics(Named(), step, data(), loss=given)
    assert not sent
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


# ------------------------------------------------------------------------------- batches and failures
def test_batches_of_a_step() -> None:
    """Whose losses are summed, or go back one by one: with equal parameters the mean over all."""

    def summed(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> None:
        value = loss(model(X[:4]), y[:4]) + loss(model(X[4:]), y[4:])
        value.backward()
        for rows in (slice(0, 2), slice(2, 8)):
            loss(model(X[rows]), y[rows]).backward()
        optimizer.step()

    model = net()
    batches = data()
    found, examples = statistics(model, summed, batches, decay=1.0, lr=0.0)
    risk = EmpiricalRisk(model, CE, batches)
    expected = curvature(risk, KFAC, vectors=Empirical())
    assert examples == 48
    for block, right in zip(found, expected.blocks.values(), strict=True):
        torch.testing.assert_close(block, right.to_dense(), rtol=1e-10, atol=1e-14)


def test_a_pass_from_elsewhere_that_takes_the_graph() -> None:
    """The batch is added by another forward pass, as it would be before any backward pass."""

    def step(optimizer: Any, model: Any, loss: nn.Module, X: Tensor, y: Tensor) -> None:
        loss(model(X), y)
        optimizer.zero_grad()
        model.active.square().mean().backward()
        optimizer.step()

    expected, _ = statistics(Telling(), step, data(), own=True)
    found, _ = statistics(Telling(), step, data())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_a_pass_that_fails() -> None:
    """Its batch is no part of the statistics; the next ones are as usual."""

    def fail(g: Tensor) -> None:
        raise ZeroDivisionError

    model = Telling()
    optimizer = KFACOptimizer(model, CE, vectors=Empirical(), check=False, lr=0.0)
    X, y = batch(8)
    value = CE(model(X + 1), y)
    model.hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        value.backward()
    assert not optimizer.curvature.updates
    del value
    plain(optimizer, model, CE, X, y)
    assert optimizer.last_step.examples == 8
    expected = curvature(EmpiricalRisk(model, CE, [(X, y)]), KFAC, vectors=Empirical())
    found = optimizer.curvature.operator
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-10, atol=1e-14)


def test_an_optimizer_that_is_gone_hears_nothing() -> None:
    model = net()
    optimizer = KFACOptimizer(model, CE, vectors=Empirical(), check=False)
    X, y = batch(8)
    value = CE(model(X), y)
    estimator = optimizer.curvature
    del optimizer
    assert not hooks(model)
    value.backward()
    assert not estimator.updates


def test_a_state_in_the_middle_of_a_step() -> None:
    """It has the batch whose loss was computed."""
    model = net()
    optimizer = KFACOptimizer(model, CE, vectors=Empirical(), check=False)
    X, y = batch(8)
    value = CE(model(X), y)
    assert optimizer.state_dict()["heard"] == [1, 8]
    value.backward()
    optimizer.step()
    assert optimizer.curvature.examples == 8


def test_the_self_check_stays(sent: list[str]) -> None:
    """Batches 1 and 4 are compared with autograd's gradients, and what is wrong is left alone."""
    optimizer = KFACOptimizer(net(), CE, vectors=Empirical())
    for X, y in data(5):
        plain(optimizer, optimizer.curvature.risk.model, CE, X, y)
    assert optimizer.curvature.risk.checked.batches == 5
    assert len(sent) == 2


def test_small_passes_are_our_own(sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_pass, "_ENOUGH_NUMBERS", 8 * (5 + 3) + 1)
    statistics(net(), plain, data())
    assert len(sent) == 3
