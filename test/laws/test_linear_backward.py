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
    ActivationHessian,
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


def by_node(hook: Callable[[Tensor], Tensor], how: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """By the node of the graph, before or behind its own derivative, or by the one below; not by a tensor."""

    def middle(net: nn.Module, h: Tensor) -> Tensor:
        h = 1.5 * h.tanh()
        node: Any = h.grad_fn
        if node is not None:
            if how == "before":
                node.register_prehook(lambda gs: (hook(gs[0]), *gs[1:]))
            elif how == "behind":
                node.register_hook(lambda gs, _: (hook(gs[0]), *gs[1:]))
            else:
                node.next_functions[0][0].register_prehook(lambda gs: (hook(gs[0]), *gs[1:]))
        return h

    return middle


WRONG: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "clamped": hooked(lambda g: g.clamp(-0.05, 0.05)),
    "clamped where vectors are long": hooked(lambda g: g.clamp(-3.0, 3.0)),
    "cut off": hooked(lambda g: g * (g.abs() > 0.3)),
    "normalised": lambda net, h: _Normalised.apply(h),  # type: ignore[arg-type, return-value]
    "positive": hooked(lambda g: g.clamp(min=0)),
    "as long, another way": hooked(lambda g: g * g.abs().amax() / g.norm().clamp(min=1e-300)),
    "clamped before a node": by_node(lambda g: g.clamp(-3.0, 3.0), "before"),
    "clamped behind a node": by_node(lambda g: g.clamp(-3.0, 3.0), "behind"),
    "clamped before the node below": by_node(lambda g: g.clamp(-3.0, 3.0), "below"),
    "cut off before a node": by_node(lambda g: g * (g.abs() > 0.3), "before"),
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
    "Jacobian, transposed": lambda risk: Jacobian(risk).T @ U.repeat(len(list(risk.data))),
    "Jacobian, dense": lambda risk: Jacobian(risk).to_dense(),
    "factor": lambda risk: GGNFactor(risk).to_dense(),
    "activation": lambda risk: ActivationHessian(risk, ("a", "output", 0)).to_dense(),
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


@pytest.mark.parametrize("name", [n for n in WRONG if n != "as long, another way"])  # there are multiples of one vector
def test_batches_of_one_example(name: str) -> None:
    risk = EmpiricalRisk(_network(name), nn.CrossEntropyLoss(), [(X[:1], Y[:1])])
    with pytest.raises(UnsupportedError, match="not linear in the vector"):
        curvature(risk, FullBlock)


class _Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


def _other_way(net: nn.Module, h: Tensor) -> Tensor:
    return 1.0 * WRONG["clamped where vectors are long"](net, h)


@pytest.mark.parametrize("door", [*DOORS][: [*DOORS].index("full")])
@pytest.mark.parametrize("other", ["clamped where vectors are long", "clamped before a node", "another way"])
def test_later_batches(other: str, door: str) -> None:
    """Hooks that only later batches have are found, whether or not the graph is another one."""
    middle = _other_way if other == "another way" else WRONG[other]

    def sometimes(net: nn.Module, h: Tensor) -> Tensor:
        return middle(net, h) if bool(h.detach().abs().amax() > 4) else 1.5 * h.tanh()

    torch.manual_seed(0)
    risk = EmpiricalRisk(Net(sometimes).double(), nn.CrossEntropyLoss(), [(X, Y), (X, Y), (8 * X, Y)])
    with pytest.raises(UnsupportedError, match="not linear in the vector"):
        DOORS[door](risk)


def test_later_batches_that_cannot_be_differentiated_twice() -> None:
    def sometimes(net: nn.Module, h: Tensor) -> Tensor:
        return _Once.apply(h) if bool(h.detach().abs().amax() > 4) else h**2  # type: ignore[return-value]

    torch.manual_seed(0)
    risk = EmpiricalRisk(Net(sometimes).double(), nn.CrossEntropyLoss(), [(X, Y), (8 * X, Y)])
    for door in ("Hessian", "activation"):
        with pytest.raises(UnsupportedError, match="_Once is marked @once_differentiable"):
            DOORS[door](risk)


def _rows(risk: EmpiricalRisk) -> Tensor:
    f = risk.model(X)
    found = [torch.autograd.grad(n, [*risk.params.values()], retain_graph=True) for n in f.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in found])


@pytest.mark.parametrize("how", ["before", "behind", "below"])
def test_linear_hooks_of_nodes(how: str) -> None:
    """The derivative is what backward passes say: `J` is that of autograd, and the Hessian what it gives twice."""
    torch.manual_seed(0)
    model = Net(by_node(lambda g: -2 * g, how)).double()
    risk = _risk(model)
    J = _rows(risk)
    p = model(X).detach().softmax(1)
    M = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)) / len(X)
    params = [*model.parameters()]
    g = torch.autograd.grad(nn.CrossEntropyLoss()(model(X), Y), params, create_graph=True)
    flat = torch.cat([part.flatten() for part in g])
    twice = [torch.autograd.grad(n, params, retain_graph=True) for n in flat]
    H = torch.stack([torch.cat([part.flatten() for part in row]) for row in twice])
    expected = {
        "GGN": J.T @ M @ J @ V,
        "GGN, dense": J.T @ M @ J,
        "Hessian": H @ V,
        "Hessian, dense": H,
        "Jacobian": (J @ V).view(6, 2),
        "Jacobian, transposed": J.T @ U,
        "Jacobian, dense": J,
    }
    for door, value in expected.items():
        torch.testing.assert_close(DOORS[door](risk).flatten(), value.flatten(), rtol=1e-9, atol=1e-15)
    block = curvature(risk, FullBlock).to_dense()
    for part in (slice(0, 16), slice(16, 26)):
        torch.testing.assert_close(block[part, part], (J.T @ M @ J)[part, part], rtol=1e-9, atol=1e-15)


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
