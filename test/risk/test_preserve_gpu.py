"""What cuDNN and CUDA graphs can't do, as if on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    DiagonalBlock,
    EmpiricalRisk,
    Hessian,
    KFACOptimizer,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.blocks import CurvatureEstimator
from curvlinops_plus.risk import preserve

pytestmark = pytest.mark.filterwarnings("ignore::curvlinops_plus.errors.CurvatureWarning")


class Seen(torch.autograd.Function):
    """The identity, which notes whether cuDNN is allowed, forward and backward."""

    generate_vmap_rule = True
    states: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        Seen.states.append(torch.backends.cudnn.enabled)
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Seen.states.append(torch.backends.cudnn.enabled)
        return g.clone()

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()


class Model(nn.Module):
    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.middle = nn.GRU(3, 3, batch_first=True) if recurrent else nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(x)
        h = h[0] if isinstance(h, tuple) else h
        return self.head(Seen.apply(h)[:, -1])


def made(recurrent: bool = True) -> EmpiricalRisk:
    torch.manual_seed(0)
    data = [(torch.randn(4, 5, 3), torch.randint(2, (4,)))]
    return EmpiricalRisk(Model(recurrent).eval(), nn.CrossEntropyLoss(), data)


WORK: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "gradient": lambda risk: risk.gradient(),
    "blocks": lambda risk: curvature(risk, DiagonalBlock),
    "GGN": lambda risk: GGN(risk) @ torch.ones(risk.space.dim),
    "Hessian": lambda risk: Hessian(risk) @ torch.ones(risk.space.dim),
}


@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_recurrent_layers_run_without_cudnn(
    name: str, recurrent: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preserve, "_CUDA", (kind,))
    Seen.states.clear()
    WORK[name](made(recurrent))
    is_fused = recurrent and kind == "cpu"
    assert set(Seen.states) == {not is_fused}
    assert len(Seen.states) > 1
    assert torch.backends.cudnn.enabled


def test_cudnn_is_restored_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preserve, "_CUDA", ("cpu",))
    model = Model(True)
    with pytest.raises(ZeroDivisionError), preserve.preserve_state(model, None):
        1 / int(torch.backends.cudnn.enabled)
    assert torch.backends.cudnn.enabled
    with torch.backends.cudnn.flags(enabled=False):
        with preserve.preserve_state(model, None):
            assert not torch.backends.cudnn.enabled
        assert not torch.backends.cudnn.enabled
    assert torch.backends.cudnn.enabled


# ------------------------------------------------------------------------------------- CUDA graphs
@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph is being captured."""
    answers = [False]
    monkeypatch.setattr(preserve, "_CUDA", ("cpu",))
    monkeypatch.setattr(preserve, "_is_capturing", lambda: answers[0])
    return answers


@pytest.mark.parametrize("name", WORK)
def test_passes_refuse_to_be_captured(name: str, capturing: list[bool]) -> None:
    risk = made()
    capturing[0] = True
    with pytest.raises(UnsupportedError, match="outside of the capture"):
        WORK[name](risk)
    capturing[0] = False
    WORK[name](risk)


def test_training_loops_refuse_to_be_captured(capturing: list[bool]) -> None:
    loss = nn.CrossEntropyLoss()
    model = Model(False)
    X = torch.randn(4, 5, 3)
    y = torch.randint(2, (4,))
    optimizer = KFACOptimizer(model, loss, statistics_every=2)

    def backward() -> None:
        optimizer.zero_grad()
        loss(model(X), y).backward()

    capturing[0] = True
    with pytest.raises(UnsupportedError, match="outside of the capture"):
        backward()
    capturing[0] = False
    backward()
    optimizer.step()
    # A step without statistics: passes of the user's own may be captured, the step may not.
    capturing[0] = True
    backward()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match="outside of the capture"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    capturing[0] = False
    optimizer.step()
    assert optimizer.last_step.step == 1
    optimizer.close()
    estimator = CurvatureEstimator(EmpiricalRisk(model, loss, ()), DiagonalBlock)
    capturing[0] = True
    with (
        pytest.raises(UnsupportedError, match="outside of the capture"),
        estimator.listen((X, y)),
    ):
        model(X)
    with pytest.raises(UnsupportedError, match="outside of the capture"):
        estimator.update((X, y))
    assert estimator.updates == 0


def test_nothing_is_captured_here() -> None:
    assert not preserve._is_capturing()
