"""Layers that run without a graph inside of an autograd function, whose backward pass runs them
again: solvers by the adjoint method, and functions that save memory.

The functions here are exact, so that the right values come from autograd through the same steps
without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    KFAC,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    Hessian,
    KFACOptimizer,
    UnsupportedError,
    curvature,
)
from test.cases import close
from test.helpers import Written, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*exact diagonal:UserWarning")

N, i, STEPS = 5, 3, 4


def step(f: nn.Module, x: Tensor) -> Tensor:
    return x + f(x) / STEPS


class Solved(torch.autograd.Function):
    """Steps of a differential equation, and back by its adjoint."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        states = [x]
        with torch.no_grad():
            for _ in range(STEPS):
                states.append(step(f, states[-1]))
        ctx.f = f
        ctx.params = params
        ctx.save_for_backward(*states)
        return states[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        g = grads[0].detach()
        total = [torch.zeros_like(p) for p in ctx.params]
        for state in reversed(ctx.saved_tensors[:-1]):
            with torch.enable_grad():
                x = state.detach().requires_grad_()
                out = step(ctx.f, x)
            g, *more = torch.autograd.grad(out, (x, *ctx.params), g)
            total = [a + b for a, b in zip(total, more, strict=True)]
        return None, g, *total


def solved(f: nn.Module, x: Tensor) -> Tensor:
    out: Any = Solved.apply(f, x, *f.parameters())
    return out


def plainly(f: nn.Module, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = step(f, x)
    return x


#: Name -> what the model does, with a solver.
CASES: dict[str, Any] = {
    "solver": lambda m, x, solve: m.head(solve(m.f, m.before(x))),
    "without biases": lambda m, x, solve: m.head(solve(m.f, m.before(x))),
    "of the input": lambda m, x, solve: m.head(solve(m.f, x) + m.before(x)),
    "beside itself": lambda m, x, solve: m.head(solve(m.f, m.before(x)) * m.f(x)),
    "twice": lambda m, x, solve: m.head(solve(m.f, solve(m.f, m.before(x)).sin())),
}


def made(name: str, solve: Any = solved) -> nn.Module:
    torch.manual_seed(0)
    bias = name != "without biases"
    return Written(
        lambda m, x: CASES[name](m, x, solve),
        before=nn.Linear(i, i),
        f=nn.Sequential(nn.Linear(i, 6, bias), nn.Tanh(), nn.Linear(6, i, bias)),
        head=nn.Linear(i, 2),
    ).double()


X, Y = normal(N, i, seed=1), torch.arange(N) % 2


def rows_of(numbers: Any, params: Sequence[Tensor]) -> Tensor:
    """The gradient of each number."""
    rows = []
    for number in numbers:
        back = torch.autograd.grad(number, params, retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in back]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_diagonals_are_exact(name: str) -> None:
    model = made(name)
    twin = made(name, plainly)
    J = rows_of(F.cross_entropy(twin(X), Y, reduction="none"), [*twin.parameters()])
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, Y)])
    close(curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal(), J.square().mean(0))
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X, normal(N, 2, seed=2))])
    exact = rows_of(twin(X).flatten(), [*twin.parameters()]).square().sum(0) / N
    K = curvature(risk, KFAC, vectors=Exact())
    close(curvature(risk, DiagonalBlock, vectors=Exact()).diagonal(), exact)
    # Layers outside keep their factors.
    outside = [block for key, block in K.blocks.items() if key in ("before", "head")]
    assert len(outside) == 2
    assert all("Kronecker" in type(block).__name__ for block in outside)


@pytest.mark.parametrize("name", CASES)
def test_all_layers_are_preconditioned_in_training(name: str) -> None:
    model = made(name)
    twin = made(name, plainly)
    options: Any = {"approximation": DiagonalBlock, "vectors": Empirical()}
    optimizers = [KFACOptimizer(m, nn.CrossEntropyLoss(), **options) for m in (model, twin)]
    for _ in range(3):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(m(X), Y).backward()
            optimizer.step()
    assert not optimizers[0].curvature.withdrawn
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p, q)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [GGN, Hessian])
def test_second_derivatives_are_refused(kind: Any, name: str) -> None:
    """The backward pass gives them as constants."""
    A = kind(EmpiricalRisk(made(name), nn.CrossEntropyLoss(), [(X, Y)]))
    with pytest.raises(UnsupportedError, match=r"without a graph.*: Solved"):
        _ = A @ normal(A.shape[1])


class Signs(torch.autograd.Function):
    """A derivative of zero, whatever arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.zeros_like(grads[0])


class Doubled(torch.autograd.Function):
    """Twice the positive part, and a backward pass that forgets the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x.relu()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * (x > 0) * grads[0].detach()


def test_zeros_may_be_constants_and_other_numbers_may_not() -> None:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.layer(x).tanh()
        signs: Any = Signs.apply(h)
        return m.head(h * (1 + signs))

    model = Written(run, layer=nn.Linear(i, i), head=nn.Linear(i, 2)).double()
    params = [*model.parameters()]
    v = normal(sum(p.numel() for p in params), seed=3)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, Y)])
    layer: Any = model.layer
    signs = layer(X).sign().detach()
    fixed = Written(
        lambda m, x: m.head(m.layer(x).tanh() * (1 + signs)), **dict(model.named_children())
    )
    gradient = torch.autograd.grad(F.cross_entropy(fixed(X), Y), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradient])
    product = torch.autograd.grad(flat @ v, params)
    close(Hessian(risk) @ v, torch.cat([g.flatten() for g in product]))

    def doubled(m: Any, x: Tensor) -> Tensor:
        h: Any = Doubled.apply(m.layer(x).tanh())
        return m.head(h)

    model.function = doubled
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, Y)])
    with pytest.raises(UnsupportedError, match=r"without a graph.*: Doubled"):
        _ = Hessian(risk) @ v


def test_what_has_no_gradient_is_still_refused() -> None:
    """A frozen part of the model, whose parameters are asked for."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = m.layer(x)
        return m.head(h)

    model = Written(run, layer=nn.Linear(i, i), head=nn.Linear(i, 2)).double()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, Y)])
    with pytest.raises(UnsupportedError, match=r"'layer' ran under torch.no_grad\(\).*odeint"):
        curvature(risk, DiagonalBlock)
