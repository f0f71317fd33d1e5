"""What users do to gradients, losses and learning rates between two steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import CurvatureWarning, MonteCarlo
from curvlinops_plus.optim.kfac import KFACOptimizer, LevenbergMarquardt, WeightDecay
from test.optim.test_kfac_optimizer import EXACT, flat

ADAPTIVE: dict[str, Any] = {"lr": "adaptive", "momentum": "adaptive", "damping": LevenbergMarquardt(1.0, interval=1)}


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.GELU(), nn.Flatten(), nn.Linear(8, 3)).double()


def batch(seed: int, n: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator).double(), torch.randint(3, (n,), generator=generator)


def zero_by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.detach().mul_(0)


ZEROED: dict[str, Callable[[nn.Module], Any]] = {
    "None": lambda model: model.zero_grad(),
    "in place": lambda model: model.zero_grad(set_to_none=False),
    "zero_": lambda model: [p.grad.zero_() for p in model.parameters()],
    "times 0": zero_by_data,
}


@pytest.mark.parametrize("zero", ZEROED)
def test_gradients_that_were_zeroed_belong_to_no_batch(zero: str) -> None:
    """A batch was thrown away: the loss of the next one is not twice the loss."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    X, y = batch(0)
    loss(model(X), y).backward()
    ZEROED[zero](model)
    for seed in (1, 2):  # two micro-batches
        X, y = batch(seed)
        (loss(model(X), y) / 2).backward()
    optimizer.step()
    assert optimizer.curvature.factor == 1.0


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("options", [ADAPTIVE, {"reject": 2.0}, {"damping": LevenbergMarquardt(1.0, interval=1)}])
def test_weight_decay_in_the_loss_is_known(options: dict[str, Any], maximize: bool) -> None:
    """No warning about further terms, of which there are none; but if there are."""
    for more, sign in ((0.0, -1 if maximize else 1), (1.0, 1)):
        model, loss, (X, y), η = net(), nn.CrossEntropyLoss(), batch(1), 0.3
        optimizer = KFACOptimizer(model, loss, weight_decay=WeightDecay(η, "in_loss"), maximize=maximize, **options)
        squares = sum(p.square().sum() for p in model.parameters())
        (loss(model(X), y) + (sign * η / 2 + more) * squares).backward()
        if more:
            with pytest.warns(CurvatureWarning, match="differs from that of the losses"):
                optimizer.step()
        else:
            optimizer.step()


def test_a_step_that_was_refused_keeps_nothing_for_the_next_one() -> None:
    """Neither do its statistics merge with those of the next step."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer, twin = KFACOptimizer(model, loss, **EXACT), net()
    other = KFACOptimizer(twin, loss, **EXACT)
    for each, m in ((optimizer, model), (other, twin)):
        X, y = batch(1)
        loss(m(X), y).backward()
        if each is optimizer:
            m[1].bias.grad = None
            with pytest.raises(ValueError, match=r"only \['1.weight'\] have a gradient"):
                each.step()
        each.zero_grad()
        if each is other:
            each.curvature.forget()
        X, y = batch(2)
        loss(m(X), y).backward()
        each.step()
        assert each.last_step.examples == 9
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_of_length_zero_does_not_adapt_the_damping(momentum: float) -> None:
    """As in a warm-up that begins at 0."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, 0.1, momentum, LevenbergMarquardt(1.0, interval=1), **EXACT)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 1) / 10)
    dampings = []
    for seed in range(4):
        X, y = batch(seed)
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
        schedule.step()
        dampings.append(optimizer.param_groups[0]["damping"])
    assert dampings[:2] == [1.0, 1.0]
    assert dampings[2] < 1.0


class Tokens(nn.Module):
    """As many positions as classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).relu())


def other_axis(model: nn.Module, f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.flatten(0, 1), y.flatten())


OTHERS: dict[str, Callable[..., Tensor]] = {
    "another": lambda model, f, y: F.multi_margin_loss(f, y),
    "smoothed": lambda model, f, y: F.cross_entropy(f, y, label_smoothing=0.4),
    "targets": lambda model, f, y: F.cross_entropy(f, y.flip(0)),
    "penalty": lambda model, f, y: F.cross_entropy(f, y) + f.square().mean(),
}
SAME: dict[str, Callable[..., Tensor]] = {
    "same": lambda model, f, y: F.cross_entropy(f, y),
    "times": lambda model, f, y: -3 * F.cross_entropy(f, y),
    "sum": lambda model, f, y: F.cross_entropy(f, y, reduction="sum") / 7,
    "decay": lambda model, f, y: F.cross_entropy(f, y) + sum(p.square().sum() for p in model.parameters()),
}


@pytest.mark.parametrize("name", [*OTHERS, *SAME, "axis"])
@pytest.mark.parametrize("vectors", [{}, EXACT], ids=["mc", "exact"])
def test_another_loss_behind_listen_is_told(name: str, vectors: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if name == "axis":
        model: nn.Module = Tokens().double()
        X, minimised = torch.randint(5, (8, 5)), other_axis
        y = (X + 1) % 5
    else:
        model, (X, y), minimised = net(), batch(3), {**OTHERS, **SAME}[name]
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), **vectors)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.listen((X, y)):
                f = model(X)
            minimised(model, f, y).backward()
            optimizer.step()
    found = [str(one.message) for one in said if issubclass(one.category, CurvatureWarning)]
    found = [words for words in found if "no multiple of the gradient of CrossEntropyLoss" in words]
    assert len(found) == (name not in SAME)


def test_losses_of_one_output_behind_listen_are_not_told_apart() -> None:
    """What arrives there is the gradient of both."""
    model, (X, y) = net(), batch(1)
    losses = [nn.CrossEntropyLoss(), nn.MSELoss()]
    optimizer = KFACOptimizer(model, losses, vectors=MonteCarlo(), output=lambda f: (f, f))
    t = torch.randn(9, 3).double()
    with optimizer.listen((X, (y, t))):
        f = model(X)
    (losses[0](f, y) + losses[1](f, t)).backward()
    optimizer.step()


@pytest.mark.parametrize("option", ["lr", "momentum"])
def test_a_tensor_stays_the_option_that_it_is(option: str) -> None:
    """What is written to it has an effect in the next step."""
    found = []
    for tensor in (False, True):
        model, loss, value = net(), nn.CrossEntropyLoss(), torch.tensor(0.2)
        numbers = {"lr": 0.1, "momentum": 0.5} | {option: value if tensor else float(value)}
        optimizer = KFACOptimizer(model, loss, damping=0.1, **numbers, **EXACT)
        for seed in range(4):
            X, y = batch(seed)
            optimizer.zero_grad()
            loss(model(X), y).backward()
            optimizer.step()
            new = torch.tensor(0.2 / (seed + 2))
            if tensor:
                value.copy_(new)
            else:
                optimizer.param_groups[0][option] = float(new)
        assert (optimizer.param_groups[0][option] is value) == tensor
        found.append(flat(model))
        state = optimizer.state_dict()
        assert float(state["param_groups"][0][option]) == float(new)
        if tensor:
            value.fill_(-1.0)
            assert float(state["param_groups"][0][option]) == float(new)
            with pytest.raises(ValueError, match=f"{option}=-1"):
                optimizer.step()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)


def test_schedulers_write_to_a_tensor() -> None:
    model, loss, lr = net(), nn.CrossEntropyLoss(), torch.tensor(0.4)
    optimizer = KFACOptimizer(model, loss, lr, **EXACT)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for seed in range(2):
        X, y = batch(seed)
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
        schedule.step()
        assert optimizer.last_step.lr == [pytest.approx(0.4 / 2**seed)]
    assert optimizer.param_groups[0]["lr"] is lr
