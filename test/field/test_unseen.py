"""Parameters that an autograd function reads, which is no function of PyTorch's, from modules that
only hold them: their gradients come from a rerun, also where they are zero at first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    DiagonalBlock,
    EmpiricalRisk,
    KFACOptimizer,
    UnsupportedError,
    curvature,
)
from test.cases import close
from test.helpers import Written, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*exact diagonal:UserWarning")


class Product(torch.autograd.Function):
    """A matrix of products, whose derivative is written by hand."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] @ b.T, a.T @ grads[0]


class Holder(nn.Module):
    """A module that is not called."""

    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.p = p


CONTAINERS: dict[str, Any] = {
    "dict": lambda p: nn.ParameterDict({"default": p}),
    "list": lambda p: nn.ParameterList([p]),
    "module": Holder,
}


class Held(nn.Module):
    """Beside a layer, a product of factors that containers hold; one of them may be zero."""

    def __init__(self, container: str, zero: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        factors = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 3))]
        if zero:
            factors[1] = nn.Parameter(torch.zeros(2, 3))
        self.held = nn.ModuleList(map(CONTAINERS[container], factors))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.held.parameters()
        delta: Any = Product.apply(a, b)
        return self.head(torch.tanh(self.layer(x) + x @ delta))


@pytest.mark.parametrize("zero", [False, True], ids=["random", "zero at first"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_what_an_autograd_function_reads_has_its_curvature(container: str, zero: bool) -> None:
    torch.manual_seed(0)
    model = Held(container, zero).double().eval()
    data = [(normal(5, 3, seed=1), normal(5, 2, seed=2))]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), DiagonalBlock)
    rows = []
    for number in model(data[0][0]).flatten():
        back = torch.autograd.grad(number, [*model.parameters()], retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in back]))
    close(K.diagonal(), torch.stack(rows).square().sum(0) * 2 / 10)


def test_training_preconditions_what_an_autograd_function_reads() -> None:
    torch.manual_seed(0)
    model = Held("dict", True).double()
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(model, loss)
    x = normal(8, 3, seed=1)
    y = normal(8, 2, seed=2)
    values = []
    for _ in range(4):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        values.append(float(value))
    assert optimizer.curvature.withdrawn == []
    assert values == sorted(values, reverse=True)


class Calls(nn.Module):
    """A module that is called and hands its own parameter to an autograd function: it is run again
    by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        h: Any = Product.apply(x, self.a)
        return h


def test_a_module_that_is_called_is_run_again_by_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Calls(), nn.Linear(2, 2)).double()
    data = [(normal(5, 3, seed=1), normal(5, 2, seed=2))]
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    K = curvature(risk, DiagonalBlock)
    assert [*K.blocks] == ["0", "1", "2"]
    assert risk.reads is not None
    assert not risk.reads.enclosing


def test_training_ends_if_no_layer_is_left() -> None:
    """One is withdrawn because of dropout, and then the other, of which the examples are on another
    axis than its rule takes for theirs.
    """

    def run(m: Any, x: Tensor) -> Tensor:
        h = F.dropout(torch.einsum("nti,ij->ntj", x, m.w), 0.3, m.training).tanh()
        return m.layer(h.transpose(0, 1)).transpose(0, 1).cumsum(1)[:, -1]

    torch.manual_seed(0)
    model = Written(run, w=nn.Parameter(normal(3, 3)), layer=nn.Linear(3, 2)).double().train()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss())
    f = model(normal(4, 8, 3, seed=1))
    with pytest.raises(UnsupportedError, match=r"'layer'.*Nothing is left of which"):
        F.cross_entropy(f, torch.arange(4) % 2)
    assert optimizer.curvature.updates == 0
