"""Tables of which nobody sees how they are made: by autograd functions, or from constants that
modules hold in plain attributes; with dropout elsewhere in the model, so that nothing can be run
again.

The right values come from plain autograd, for one example after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import DiagonalBlock, Empirical, EmpiricalRisk, KFACOptimizer, curvature
from test.cases import close
from test.helpers import Written, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*exact diagonal:UserWarning")

N, i = 7, 4


class Product(torch.autograd.Function):
    """`a b` of a row and a matrix, whose derivative is written by hand."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] @ b.T, torch.outer(a, grads[0])


class Scaled(torch.autograd.Function):
    """Rows of examples times a vector."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        return torch.einsum("ni,i->ni", x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        w, x = ctx.saved_tensors
        return (grads[0] * x).sum(0), grads[0] * w


def product(a: Tensor, b: Tensor) -> Tensor:
    delta: Any = Product.apply(a, b)
    return delta


def factors(zero: bool = False) -> dict[str, Any]:
    b = torch.zeros(2, i) if zero else normal(2, i, seed=2)
    return {"a": nn.Parameter(normal(2, seed=1)), "b": nn.Parameter(b)}


def prompted(m: Any, x: Tensor) -> Tensor:
    """Rows in front of each sequence, as prompt tuning has them: the places in a dictionary."""
    places = m.places["default"].unsqueeze(0).expand(len(x), -1)[:1]
    prompt = m.prompt(places).repeat(len(x), 1, 1)
    return torch.cat([prompt, x[:, None]], 1).cumsum(1).tanh().sum(1)


def with_prompt() -> dict[str, Any]:
    return {"prompt": nn.Embedding(3, i), "places": {"default": torch.arange(3)}}


#: Name -> the model's parts, and what it does.
CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any, Tensor], Tensor]]] = {
    "scale": (factors, lambda m, x: x * product(m.a, m.b)),
    "shift": (factors, lambda m, x: x + product(m.a, m.b)),
    "zero at first": (lambda: factors(True), lambda m, x: x + product(m.a, m.b)),
    "made further": (factors, lambda m, x: x * (1 + product(m.a.tanh(), 2 * m.b).exp())),
    "expanded": (factors, lambda m, x: x + product(m.a, m.b).expand(len(x), i).tanh()),
    "weight": (factors, lambda m, x: F.linear(x, m.layer.weight + product(m.a, m.b).diag())),
    "prompts": (with_prompt, prompted),
    "in a list": (
        lambda: {"w": nn.Parameter(normal(i, seed=3)), "held": [(normal(i, seed=4),)]},
        lambda m, x: x + (m.w * m.held[0][0]).tanh(),
    ),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    parts, run = CASES[name]
    model = Written(
        lambda m, x: m.head(m.drop(run(m, m.layer(x)).tanh())),
        **parts(),
        layer=nn.Linear(i, i),
        drop=nn.Dropout(0.3),
        head=nn.Linear(i, 2),
    )
    return model.double(), normal(N, i, seed=8), torch.arange(N) % 2


def rows_of(losses: Any, params: Sequence[Tensor]) -> Tensor:
    """The gradient of each loss."""
    rows = []
    for loss in losses:
        back = torch.autograd.grad(loss, params, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in back]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_examples_have_their_own_gradients(name: str) -> None:
    model, x, y = made(name)
    model.eval()
    losses = [F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(N)]
    J = rows_of(losses, [*model.parameters()])
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(x, y)])
    close(curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal(), J.square().mean(0))
    assert risk.reads is not None
    assert risk.reads.broadcast or risk.reads.computed
    assert risk.reads.enclosing.keys() <= risk.reads.computed.keys()  # nothing runs again


@pytest.mark.parametrize("name", CASES)
def test_all_layers_are_preconditioned_in_training(name: str) -> None:
    model, x, y = made(name)
    model.train()
    optimizer = KFACOptimizer(
        model,
        nn.CrossEntropyLoss(),
        lr=0.1,
        approximation=DiagonalBlock,
        vectors=Empirical(),
        decay=1e-12,
    )
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    # The first batch is recorded in a pass of its own.
    with optimizer.paused():
        torch.manual_seed(5)
        J = rows_of(F.cross_entropy(model(x), y, reduction="none"), [*model.parameters()])
    torch.manual_seed(5)
    F.cross_entropy(model(x), y).backward()
    optimizer.curvature.refresh()
    assert not optimizer.curvature.withdrawn
    close(optimizer.curvature.operator.diagonal(), J.square().mean(0))


def scaled_input(m: Any, x: Tensor) -> Tensor:
    h: Any = Scaled.apply(m.w, x)
    return m.head(m.before(h.tanh()))


def scaled_twice(m: Any, x: Tensor) -> Tensor:
    """Once where it is seen, and once where it isn't."""
    h: Any = Scaled.apply(m.w, m.before(x).tanh() * m.w)
    return m.head(h.tanh())


class Inner(nn.Module):
    """Gets a table of its parameter from outside, and reads the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(normal(i, seed=1))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return (x + self.w.sum()).cumsum(1) * torch.outer(x[:, 0], table)


def passed_inside(m: Any, x: Tensor) -> Tensor:
    return m.head(m.layer(m.before(x), product(m.layer.w[:2], m.b)).tanh())


MIXED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "input": (scaled_input, nn.Identity),
    "twice": (scaled_twice, nn.Identity),
    "passed inside": (passed_inside, Inner),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", MIXED)
def test_rows_of_examples_are_no_table(name: str, check: bool) -> None:
    """The model runs again then, also if nothing is compared."""
    torch.manual_seed(0)
    run, layer = MIXED[name]
    model = Written(
        run,
        w=nn.Parameter(normal(i, seed=1)),
        b=nn.Parameter(normal(2, i, seed=2)),
        before=nn.Linear(i, i),
        layer=layer(),
        head=nn.Linear(i, 2),
    ).double()
    x, y = normal(N, i, seed=8), torch.arange(N) % 2
    losses = [F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(N)]
    J = rows_of(losses, [*model.parameters()])
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(x, y)], check=check)
    close(curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal(), J.square().mean(0))


def test_frozen_parameters_of_autograd_functions_are_not_zero() -> None:
    model, x, y = made("scale")
    model.eval()
    losses = [F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) for n in range(N)]
    J = rows_of(losses, [*model.parameters()])
    model.requires_grad_(False)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(x, y)], params=[*model.parameters()])
    close(curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal(), J.square().mean(0))
