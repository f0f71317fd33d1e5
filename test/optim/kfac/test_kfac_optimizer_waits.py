"""What a step reads from the device: on a GPU each number that the host reads is waited for."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvlinops_plus import KFAC, EmpiricalRisk, KFACOptimizer, NumericsError, curvature
from curvlinops_plus.blocks.sums import Sums
from curvlinops_plus.optim import NormConstraint
from curvlinops_plus.optim.kfac.flat import StepVectors


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squared norms stay tensors, as on a GPU."""
    square = StepVectors._square

    def unread(self: StepVectors, vectors: list[Tensor], norm: str, numbers: list[int]) -> Tensor:
        return torch.tensor(square(self, vectors, norm, numbers), dtype=torch.float64)

    monkeypatch.setattr(StepVectors, "_square", unread)


class Reads(TorchDispatchMode):
    """Counts numbers that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def train(norm_constraint: NormConstraint, steps: int = 5) -> tuple[list[Tensor], KFACOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(
        model, loss, lr=0.5, momentum=0.9, inverse_every=2, norm_constraint=norm_constraint
    )
    X = torch.randn(6, 4, dtype=torch.float64)
    y = torch.randn(6, 2, dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], optimizer


CONSTRAINTS = [
    NormConstraint(c, of, norm)
    for c in (1e-4, 1e12)
    for of in ("update", "step")
    for norm in ("damped", "fisher", "euclidean")
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
def test_bounds_that_are_not_read_are_the_same(
    constraint: NormConstraint, request: pytest.FixtureRequest
) -> None:
    expected, optimizer = train(constraint)
    report = optimizer.last_step
    request.getfixturevalue("on_device")
    found, optimizer = train(constraint)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-15)
    assert isinstance(optimizer.last_step.scale, float)
    assert isinstance(optimizer.last_step.update_norm, float)
    assert optimizer.last_step.scale == pytest.approx(report.scale, rel=1e-12)
    assert optimizer.last_step.update_norm == pytest.approx(report.update_norm, rel=1e-12)
    assert (report.scale < 1) == (constraint.c < 1)


@pytest.mark.parametrize("square", [0.0, 1e-9, 0.25, 0.2501, 4.0, 1e300, inf, nan])
def test_factors_of_tensors(square: float) -> None:
    constraint = NormConstraint(0.25)
    factor = constraint.factor_on_device(torch.tensor(square, dtype=torch.float64))
    assert float(factor) == pytest.approx(constraint.factor(square), rel=1e-15)


@pytest.mark.usefixtures("on_device")
def test_a_step_reads_one_number() -> None:
    """Whether the gradient is finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(
        model, loss, momentum=0.9, inverse_every=100, statistics_every=100, norm_constraint=1e-3
    )
    X = torch.randn(6, 4)
    y = torch.randn(6, 2)
    reads = Reads()
    for step in range(3):
        optimizer.zero_grad()
        loss(model(X), y).backward()
        with reads if step == 2 else torch.enable_grad():
            optimizer.step()
    assert reads.count == 1
    norm = optimizer.last_step.update_norm
    assert 0 < norm < inf
    assert optimizer.last_step.update_norm == norm


def test_sums_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the CPU one answer tells whether all of them are finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    X = torch.randn(6, 4)
    y = torch.randn(6, 2)
    look_at = Sums._look_at
    devices = ["cpu", "elsewhere"]
    counts = []

    def counted(self: Sums, accumulators: list) -> None:
        self.device = devices[len(counts)]
        with Reads() as reads:
            look_at(self, accumulators)
        self.device = "cpu"
        counts.append(reads.count)
        assert all(accumulator.is_finite for accumulator in accumulators) == (len(counts) == 2)

    monkeypatch.setattr(Sums, "_look_at", counted)
    matrices = []
    for _ in devices:
        K = curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, y)]), KFAC)
        matrices.append(K.to_dense())
    assert counts == [0, 1]
    assert torch.equal(*matrices)


def test_sums_that_are_not_finite_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at = Sums._look_at

    def elsewhere(self: Sums, accumulators: list) -> None:
        self.device = "elsewhere"
        accumulators[0].raw[next(iter(accumulators[0].raw))][0] = nan
        look_at(self, accumulators)
        self.device = "cpu"

    monkeypatch.setattr(Sums, "_look_at", elsewhere)
    risk = EmpiricalRisk(nn.Linear(4, 3), nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 3))])
    with pytest.raises(NumericsError, match="NaN or infinite"):
        curvature(risk, KFAC)
