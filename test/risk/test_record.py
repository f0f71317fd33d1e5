"""Sending vectors one at a time, or many at once: the same numbers, whatever autograd can
vectorise.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import KFAC, CurvatureWarning, EmpiricalRisk, FullBlock, MonteCarlo, curvature
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk import LayerBatch, backward_pass
from curvlinops_plus.risk.backward_pass import BackwardPass
from curvlinops_plus.risk.function_reads import layers_of
from curvlinops_plus.risk.record import sweep
from test.cases import APPROXIMATIONS, NETS, close, problem


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("approximation", ["KFAC", "FullBlock"])
def test_streamed_is_batched(
    name: str, approximation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(name)
    batched, risk = p.made(approximation).to_dense(), p.risk()
    for at_once in (1, 2):
        monkeypatch.setattr(BackwardPass, "at_once", lambda self, number, k=at_once: min(number, k))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CurvatureWarning)
            close(p.curvature(APPROXIMATIONS[approximation], risk=risk).to_dense(), batched, 1e-12)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
def test_gradients_that_arrive_one_by_one(
    name: str, approximation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(name)
    at_once = p.made(approximation).to_dense()
    monkeypatch.setattr(backward_pass, "_MANY_NUMBERS", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        K = p.curvature(APPROXIMATIONS[approximation], risk=p.risk())
    close(K.to_dense(), at_once, 1e-12)


@pytest.mark.parametrize(("limit", "during"), [(2**22, 0), (0, 4)])
def test_large_gradients_do_not_wait(
    limit: int, during: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers but the first one are shown while the backward pass goes on, and then forgotten."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])
    risk = EmpiricalRisk(net, nn.MSELoss(), [(torch.rand(3, 4), torch.rand(3, 4))], check=False)
    going_back: list[bool] = []

    def consume(batch: LayerBatch) -> None:
        going_back.append(torch._C._current_graph_task_id() != -1)

    monkeypatch.setattr(backward_pass, "_MANY_NUMBERS", limit)
    sweep(risk, layers_of(risk), MonteCarlo(1, 0), consume)
    assert sum(going_back) == during
    assert len(going_back) == 5


class CalledInVain(nn.Module):
    """Calls a layer twice, and goes on with one of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(2 * x)
        return self.layer(x)


@pytest.mark.parametrize("limit", [2**22, 0])
def test_calls_that_reach_no_output_have_gradient_zero(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = CalledInVain().double()
    X = torch.rand(5, 4, dtype=torch.float64)
    data = [(X, torch.rand(5, 1, dtype=torch.float64))]
    monkeypatch.setattr(backward_pass, "_MANY_NUMBERS", limit)
    risk = EmpiricalRisk(model, nn.MSELoss(), data, check=False)
    G = curvature(risk, FullBlock).to_dense()
    # The Hessian of the mean of 5 squares of a function that is linear in weight and bias.
    J = torch.cat([X, torch.ones(5, 1, dtype=torch.float64)], 1)
    close(G, 2 / 5 * J.T @ J, 1e-12)


class Taught(nn.Module):
    """Also calls its layer with other tensors in place, as with the average of a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        others = {name: 2 * p.detach() for name, p in self.layer.named_parameters()}
        return self.layer(x) + torch.func.functional_call(self.layer, others, (3 * x,))


def test_calls_with_other_tensors_are_no_calls_of_the_layer() -> None:
    torch.manual_seed(0)
    X = torch.rand(5, 4, dtype=torch.float64)
    data = [(X, torch.rand(5, 1, dtype=torch.float64))]
    risk = EmpiricalRisk(Taught().double(), nn.MSELoss(), data, check=False)
    J = torch.cat([X, torch.ones(5, 1, dtype=torch.float64)], 1)
    close(curvature(risk, FullBlock).to_dense(), 2 / 5 * J.T @ J, 1e-12)


class Square(torch.autograd.Function):
    """x², whose backward leaves PyTorch for a moment: vmap can't follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * x.detach().numpy() * g.detach().numpy())


class Squared(nn.Module):
    def __init__(self, square: Any) -> None:
        super().__init__()
        self.first, self.last, self.square = nn.Linear(4, 5), nn.Linear(5, 3), square

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.square(self.first(x)))


@pytest.mark.parametrize("approximation", [KFAC, FullBlock])
def test_functions_that_cannot_be_vectorised(approximation: Any) -> None:
    p = problem("mlp")
    custom, plain = Squared(Square.apply).double(), Squared(torch.square).double()
    plain.load_state_dict(custom.state_dict())
    one, other = (
        curvature(EmpiricalRisk(m, p.loss, p.data), approximation).to_dense()
        for m in (custom, plain)
    )
    close(one, other, 1e-12)
    many = MonteCarlo(samples=7, seed=1)
    one, other = (
        curvature(EmpiricalRisk(m, p.loss, p.data), KFAC, vectors=many).to_dense()
        for m in (custom, plain)
    )
    close(one, other, 1e-12)


def test_other_data_are_looked_at_again() -> None:
    """What was found right for some data says nothing of others."""

    class MixesFive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return self.head(h + h.mean(0) if len(x) == 5 else h)

    def data(N: int) -> list[Any]:
        return [(torch.ones(N, 4), torch.zeros(N, 2))]

    risk = EmpiricalRisk(MixesFive(), nn.MSELoss(), data(4))
    _ = curvature(risk).trace
    assert risk.with_data(data(5)).loss() > 0
    with pytest.raises(UnsupportedError, match=r"the model mixes examples|depend on each other"):
        _ = curvature(risk.with_data(data(5))).trace
    assert len(risk.data) == 1  # type: ignore[arg-type]
    assert len(risk.data[0][0]) == 4  # type: ignore[index]
