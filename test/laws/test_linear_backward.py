"""Backward passes that are not linear are no derivatives: every matrix is refused by name, however long vectors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from middles import Net
from torch import Tensor, nn
from torch.autograd import Function

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    GGNFactor,
    Hessian,
    Jacobian,
    UnsupportedError,
    curvature,
)

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 0, 1, 1, 0])


class _Normalised(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / (1e-9 + grads[0].norm(dim=-1, keepdim=True))


class _Straight(Function):
    """Linear, though no derivative: what it says is what is meant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    def middle(net: nn.Module, h: Tensor) -> Tensor:
        h = h.tanh()
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return middle


WRONG: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "clamped": hooked(lambda g: g.clamp(-0.05, 0.05)),
    "clamped where vectors are long": hooked(lambda g: g.clamp(-3.0, 3.0)),
    "cut off": hooked(lambda g: g * (g.abs() > 0.3)),
    "normalised": lambda net, h: _Normalised.apply(h),  # type: ignore[arg-type, return-value]
}


def _network(name: str) -> Net:
    torch.manual_seed(0)
    return Net(WRONG[name]).double()


def _risk(model: nn.Module, **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, Y)], **options)


def _updated(risk: EmpiricalRisk, heard: bool) -> Any:
    estimator = CurvatureEstimator(risk.with_data(()))
    if not heard:
        estimator.update((X, Y))
    else:
        with estimator.listen((X, Y)):
            risk.model(X)
    return estimator.operator


V = 1e-3 * torch.cos(torch.arange(26.0).double())
U = 1e-3 * torch.sin(torch.arange(1.0, 13).double())
DOORS: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "GGN": lambda risk: GGN(risk) @ V,
    "GGN, columns": lambda risk: GGN(risk) @ torch.stack([V, 2 * V], 1),
    "GGN, dense": lambda risk: GGN(risk).to_dense(),
    "empirical, dense": lambda risk: GGN(risk, Empirical()).to_dense(),
    "Hessian": lambda risk: Hessian(risk) @ V,
    "Hessian, dense": lambda risk: Hessian(risk).to_dense(),
    "Jacobian": lambda risk: Jacobian(risk) @ V,
    "Jacobian, transposed": lambda risk: Jacobian(risk).T @ U,
    "Jacobian, dense": lambda risk: Jacobian(risk).to_dense(),
    "factor": lambda risk: GGNFactor(risk).to_dense(),
    "full": lambda risk: curvature(risk, FullBlock).to_dense(),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock).diagonal(),
    "KFAC": lambda risk: curvature(risk, KFAC).to_dense(),
    "EKFAC": lambda risk: curvature(risk, EKFAC).to_dense(),
    "update": lambda risk: _updated(risk, heard=False),
    "listen": lambda risk: _updated(risk, heard=True),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str, door: str) -> None:
    with pytest.raises(UnsupportedError, match=r"not linear in the (gradient|vector)"):
        DOORS[door](_risk(_network(name)))


@pytest.mark.parametrize("name", WRONG)
def test_batches_of_one_example(name: str) -> None:
    risk = EmpiricalRisk(_network(name), nn.CrossEntropyLoss(), [(X[:1], Y[:1])])
    with pytest.raises(UnsupportedError, match="not linear in the vector"):
        curvature(risk, FullBlock)


@pytest.mark.parametrize("inside", [False, True], ids=["float16", "float16 inside"])
def test_float16_is_linear(inside: bool) -> None:
    """It has no digits for vectors that are much shorter; clamps are found all the same."""

    class Narrow(nn.Module):
        def __init__(self, clamped: bool) -> None:
            super().__init__()
            self.first, self.last, self.clamped = nn.Linear(3, 4), nn.Linear(4, 2), clamped

        def forward(self, x: Tensor) -> Tensor:
            h = _Straight.apply(self.first(x).half())
            if self.clamped and h.requires_grad:  # type: ignore[attr-defined]
                h.register_hook(lambda g: g.clamp(-0.05, 0.05))  # type: ignore[attr-defined]
            return self.last(h.to(self.last.weight.dtype))  # type: ignore[attr-defined]

    for clamped in (False, True):
        torch.manual_seed(0)
        model = Narrow(clamped) if inside else Narrow(clamped).half()
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X.float() if inside else X.half(), Y)])
        for door in ("GGN, dense", "Jacobian, dense", "factor"):
            if clamped:
                with pytest.raises(UnsupportedError, match="not linear in the"):
                    DOORS[door](risk)
            else:
                DOORS[door](risk)


@pytest.mark.parametrize("wide", [3, 400])
def test_examples_by_themselves(wide: int) -> None:
    """In large layers, of which three examples are run by themselves; other hooks are fine."""

    class Deep(nn.Module):
        def __init__(self, hook: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3, wide), nn.Linear(wide, wide), nn.Linear(wide, 2)
            self.hook = hook

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            if h.requires_grad:
                h.register_hook(self.hook)
            return self.last(torch.tanh(self.second(h)))

    torch.manual_seed(0)
    data = [(torch.randn(40, 3).double(), torch.randint(2, (40,)))]
    for hook, wrong in ((lambda g: g.clamp(-1e-2, 1e-2), True), (lambda g: -2 * g, False), (lambda g: None, False)):
        risk = EmpiricalRisk(Deep(hook).double(), nn.CrossEntropyLoss(), data)
        if wrong:
            with pytest.raises(UnsupportedError, match=r"arrives at layer 'first' in a backward pass is not linear"):
                curvature(risk, KFAC)
        else:
            curvature(risk, KFAC)


def test_surrogates_are_linear() -> None:
    """The same matrix through all doors: that of the Jacobian that backward passes make."""
    torch.manual_seed(0)
    model = Net(lambda net, h: _Straight.apply(h)).double()  # type: ignore[arg-type]
    plain = Net(lambda net, h: h + ((4 * h).round() / 4 - h).detach()).double()
    plain.load_state_dict(model.state_dict())
    expected = GGN(_risk(plain)).to_dense()
    torch.testing.assert_close(GGN(_risk(model)).to_dense(), expected)
    torch.testing.assert_close(GGN(_risk(model)) @ V, expected @ V)
    trace = curvature(_risk(model), DiagonalBlock).diagonal()
    torch.testing.assert_close(trace, expected.diagonal())


@pytest.mark.parametrize("door", DOORS)
def test_hooks_of_parameters_are_left_alone(door: str) -> None:
    """They are about what arrives in `.grad`: no matrix depends on them, and nobody calls them."""
    torch.manual_seed(0)
    model, called = Net(lambda net, h: h.tanh()).double(), list[Tensor]()
    expected = DOORS[door](_risk(model))
    for p in model.parameters():
        p.register_hook(lambda g: called.append(g) or g.clamp(-1e-3, 1e-3))
    found = DOORS[door](_risk(model))
    as_tensor: Any = getattr(found, "to_dense", lambda: found)
    torch.testing.assert_close(as_tensor(), getattr(expected, "to_dense", lambda: expected)())
    assert not called
