"""Modules that change in each call what they compute: power iterations, observers, counters. In
training loops their gradients are those of the call as it was, and resumed training is the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    KFACOptimizer,
)
from test.helpers import seeded

Make = Callable[[], nn.Module]


class Changing(nn.Module):
    """A module with a weight, and something that each call changes before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, generator=seeded(1)).double())
        self.state: Tensor
        self.register_buffer("state", torch.ones(()).double())
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(x)
        return x @ (self.weight * self.state + self.calls).tanh().T

    def change(self, x: Tensor) -> None:
        raise NotImplementedError

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, calls: int) -> None:
        self.calls = calls


class CountsInBuffer(Changing):
    def change(self, x: Tensor) -> None:
        self.state.add_(0.3)


class CountsInAttribute(Changing):
    def change(self, x: Tensor) -> None:
        self.calls += 1


class FollowsWeight(Changing):
    def change(self, x: Tensor) -> None:
        self.state = 0.5 * self.state + self.weight.abs().max()


class SetByFirstBatch(Changing):
    """As quantizers choose their step: later calls find it there."""

    def change(self, x: Tensor) -> None:
        if not self.calls:
            self.state.copy_(x.abs().mean())
            self.calls = 1


class ClippedByHook(Changing):
    """As observers of activations do, behind the module: outputs are not what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(self.clip)

    def change(self, x: Tensor) -> None:
        pass

    @staticmethod
    def clip(module: Changing, args: tuple[Tensor], output: Tensor) -> Tensor:
        module.state = 0.5 * module.state + 0.3 * output.detach().max()
        return 2 * torch.minimum(output, module.state)


class FollowsBatch(Changing):
    """What one example would leave is something else."""

    def change(self, x: Tensor) -> None:
        self.state.mul_(0.5).add_(x.abs().mean())


def behind(make: Make) -> Make:
    """A network that begins with a module."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 3)).double()

    return made


def linear() -> nn.Linear:
    return nn.Linear(5, 4)


TOLD: dict[str, Make] = {
    "a counter in a buffer": CountsInBuffer,
    "a counter in an attribute": CountsInAttribute,
    "a norm of the weight": FollowsWeight,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(linear()),
    "spectral norm by a hook": lambda: nn.utils.spectral_norm(linear()),
    "set by the first batch": SetByFirstBatch,
    "a hook that clips": ClippedByHook,
}
OTHERS: dict[str, Make] = {
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(4, momentum=0.3)),
    "a mean over the batch": FollowsBatch,
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    X = torch.randn(6, 5, generator=generator).double()
    return X, torch.randint(3, (6,), generator=generator)


def squares(model: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    """`Σ_n g_n²` of the batch, by autograd for one example after the other in one graph."""
    params = [*model.parameters()]
    total = torch.zeros(sum(p.numel() for p in params)).double()
    for value in nn.functional.cross_entropy(model(X), y, reduction="none"):
        g = torch.autograd.grad(value, params, retain_graph=True)
        total += torch.cat([t.flatten() for t in g]).square()
    return total


@pytest.mark.parametrize("make", TOLD.values(), ids=TOLD)
def test_gradients_are_those_of_the_call_as_it_was(make: Make) -> None:
    """Of the first batch they are those of another call behind it."""
    model = behind(make)()
    loss = nn.CrossEntropyLoss()
    risk = EmpiricalRisk(model, loss, ())
    estimator = CurvatureEstimator(risk, DiagonalBlock, vectors=Empirical())
    expected = torch.zeros(risk.space.dim).double()
    for seed in range(5):
        X, y = batch(seed)
        state = copy.deepcopy(model.state_dict())
        with estimator.listen((X, y)):
            value = loss(model(X), y)
        if seed == 0:
            state = copy.deepcopy(model.state_dict())
        same = behind(make)()
        same.load_state_dict(state)
        expected += squares(same, X, y)
        grads = torch.autograd.grad(value, [*model.parameters()])
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads):
                p -= g
        K = estimator.operator
        torch.testing.assert_close(K.diagonal(), expected / (6 * (seed + 1)), rtol=1e-9, atol=0)
    assert not estimator.withdrawn


def observed() -> nn.Module:
    """A network that learns to be quantized, whose observers count."""
    quantization = pytest.importorskip("torch.ao.quantization")
    torch.manual_seed(0)
    stubs = quantization.QuantStub(), quantization.DeQuantStub()
    convolution = nn.Sequential(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 4, (1, 2)), nn.ReLU())
    head = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    model = nn.Sequential(stubs[0], convolution, head, stubs[1]).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        model = quantization.prepare_qat(model)
    model(batch(0)[0].float())
    return model


def train(model: nn.Module, optimizer: KFACOptimizer, seeds: Sequence[int]) -> None:
    dtype = next(model.parameters()).dtype
    for seed in seeds:
        X, y = batch(seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X.to(dtype)), y).backward()
        optimizer.step()


RESUMED = {
    **{name: behind(make) for name, make in (TOLD | OTHERS).items()},
    "observers of quantization": observed,
}


@pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")
@pytest.mark.parametrize("make", RESUMED.values(), ids=RESUMED)
def test_resumed_training_is_the_same(make: Make) -> None:
    """Wherever the self-check of the resumed run looks first."""

    def begun() -> tuple[nn.Module, KFACOptimizer]:
        model = make()
        return model, KFACOptimizer(model, nn.CrossEntropyLoss())

    model, optimizer = begun()
    train(model, optimizer, range(8))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(8, 20))

    resumed, other = begun()
    resumed.load_state_dict(states[0])
    other.load_state_dict(states[1])
    train(resumed, other, range(8, 20))

    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizer.curvature.withdrawn == other.curvature.withdrawn
    is_told = make is not RESUMED["a mean over the batch"]
    assert bool(optimizer.curvature.withdrawn) != is_told


class WrongInTheEnd(nn.Module):
    """A batch's mean is read, as soon as a buffer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, generator=seeded(1)).double())
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = x.mean(0) if int(self.calls) > 4 else 1.0
        return torch.cdist(x * scale, self.weight)


@pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")
def test_a_resumed_run_looks_at_the_same_batches() -> None:
    """The fourth batch is compared with plain autograd, though the resumed run sees it first."""

    def withdrawn_after_each(resumes_at: int | None) -> list[list[str]]:
        model = behind(WrongInTheEnd)()
        optimizer = KFACOptimizer(model, nn.CrossEntropyLoss())
        names = []
        for seed in range(6):
            if seed == resumes_at:
                states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = behind(WrongInTheEnd)()
                optimizer = KFACOptimizer(model, nn.CrossEntropyLoss())
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            train(model, optimizer, [seed])
            names.append(optimizer.curvature.withdrawn)
        return names

    expected = withdrawn_after_each(None)
    assert expected == [[], [], [], ["0"], ["0"], ["0"]]
    assert withdrawn_after_each(2) == expected
