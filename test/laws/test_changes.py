"""What is changed after an operator or estimator was made: it computes with that, or refuses it by
name.

Only what is documented as computed before (a finished block, an inverse) stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from curvlinops_plus import (
    GGN,
    KFAC,
    CurvatureEstimator,
    EmpiricalRisk,
    curvature,
)

pytestmark = pytest.mark.filterwarnings("ignore:1 of 4 layers get their exact diagonal")


class Scale(nn.Module):
    """Attributes, some inside of others, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inside, self.function = 2.0, [1.0], torch.tanh
        self.buffer: Tensor
        self.register_buffer("buffer", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale * self.inside[0]) + self.buffer * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.norm, self.act = (
            nn.Linear(4, 6),
            Scale(),
            nn.LayerNorm(6),
            nn.LeakyReLU(0.1),
        )
        self.conv, self.last = nn.Conv1d(1, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.act(self.norm(self.scale(self.a(x))))[:, None])
        return self.last(pad(h, (0, 4 - h.shape[-1])).flatten(1))


class Case:
    """A network, a loss and two batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.loss = Net().double(), nn.CrossEntropyLoss()
        X, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
        self.data = [(X[:4], y[:4]), (X[4:], y[4:])]

    def risk(self, data: Any = None) -> EmpiricalRisk:
        return EmpiricalRisk(self.model, self.loss, self.data if data is None else data)


def _scaled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 1.2 * value for name, value in state.items()}


# Attributes, functions, tensors, of the model, the loss and the data.
CHANGES: dict[str, Callable[[Case], Any]] = {
    "attribute": lambda case: setattr(case.model.scale, "scale", 3.0),
    "eps": lambda case: setattr(case.model.norm, "eps", 0.5),
    "stride": lambda case: setattr(case.model.conv, "stride", (2,)),
    "module": lambda case: setattr(case.model, "act", nn.Tanh()),
    "hook": lambda case: case.model.scale.register_forward_hook(
        lambda module, args, out: 1.3 * out
    ),
    "buffer": lambda case: case.model.scale.buffer.mul_(1.5),
    "parameter's data": lambda case: case.model.a.weight.data.mul_(1.5),
    "state": lambda case: case.model.load_state_dict(_scaled(case.model.state_dict())),
    "smoothing": lambda case: setattr(case.loss, "label_smoothing", 0.3),
    "class weights": lambda case: setattr(
        case.loss, "weight", torch.tensor([1.0, 2, 5], dtype=torch.float64)
    ),
    "ignored": lambda case: setattr(case.loss, "ignore_index", 1),
    "reduction": lambda case: setattr(case.loss, "reduction", "sum"),
    "data": lambda case: case.data[1][0].mul_(1.5),
    "targets": lambda case: case.data[1][1].add_(1).remainder_(3),
}
REFUSED: dict[str, tuple[Callable[[Case], Any], type[Exception], str]] = {
    "another parameter": (
        lambda case: setattr(
            case.model.a, "weight", nn.Parameter(1.5 * case.model.a.weight.detach())
        ),
        ValueError,
        r"other tensors in place of its parameters or modules \['a.weight'\]",
    ),
}

Again = Callable[[], Tensor]


def _product(kind: Any, **options: Any) -> Callable[[Case], tuple[Again, Again]]:
    def made(case: Case) -> tuple[Again, Again]:
        def product(A: Any) -> Tensor:
            return A @ torch.cos(torch.arange(A.shape[1]).double())

        A = kind(case.risk(), **options)
        product(A)
        return lambda: product(A), lambda: product(kind(case.risk(), **options))

    return made


def _blocks(kind: Any) -> Callable[[Case], tuple[Again, Again]]:
    def made(case: Case) -> tuple[Again, Again]:
        risk = case.risk()
        curvature(risk, kind)
        return lambda: curvature(risk, kind).to_dense(), lambda: curvature(
            case.risk(), kind
        ).to_dense()

    return made


def _gradient(case: Case) -> tuple[Again, Again]:
    risk = case.risk()
    risk.gradient()

    def flat(risk: EmpiricalRisk) -> Tensor:
        return torch.cat([g.flatten() for g in risk.gradient().values()])

    return lambda: flat(risk), lambda: flat(case.risk())


def _update(case: Case) -> tuple[Again, Again]:
    def new() -> CurvatureEstimator:
        return CurvatureEstimator(
            case.risk(()), KFAC, decay=1e-300
        )  # earlier batches count for nothing

    def add(estimator: CurvatureEstimator, batch: Any) -> Tensor:
        estimator.update(batch)
        return estimator.operator.to_dense()

    estimator = new()
    add(estimator, case.data[0])
    return lambda: add(estimator, case.data[1]), lambda: add(new(), case.data[1])


MADE: dict[str, Callable[[Case], tuple[Again, Again]]] = {
    "GGN": _product(GGN),
    "gradient": _gradient,
    "KFAC": _blocks(KFAC),
    "update": _update,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MADE)
def test_changes_count(name: str, change: str) -> None:
    case = Case()
    again, fresh = MADE[name](case)
    with torch.no_grad():
        CHANGES[change](case)
    torch.testing.assert_close(again(), fresh(), rtol=1e-9, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("name", MADE)
def test_changes_are_refused(name: str, change: str) -> None:
    case = Case()
    again, _ = MADE[name](case)
    make, error, words = REFUSED[change]
    make(case)
    with pytest.raises(error, match=words):
        again()


def test_what_was_computed_stays() -> None:
    case = Case()
    K = curvature(case.risk(), KFAC)
    v = torch.ones(K.shape[1], dtype=torch.float64)
    inverse, before = K.inverse(damping=0.1), K @ v
    solved = inverse @ v
    for change in CHANGES.values():
        with torch.no_grad():
            change(case)
    assert torch.equal(K @ v, before)
    assert torch.equal(inverse @ v, solved)
