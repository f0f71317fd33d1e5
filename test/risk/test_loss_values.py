"""A likelihood that was registered for a loss, against the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from curvlinops_plus import (
    GGN,
    EmpiricalRisk,
    FromDistribution,
    FullBlock,
    Hessian,
    UnsupportedError,
    curvature,
    register_likelihood,
)
from curvlinops_plus.likelihood.likelihood import _MAKERS
from test.helpers import normal


class Squares(nn.Module):
    """½ |f - y|², added up over the outputs of an example and averaged over examples."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).square().sum(1).mean() / 2


class SumOfSquares(Squares):
    """½ |f - y|², added up over everything."""

    reduction = "sum"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).square().sum() / 2


class Shifted(Squares):
    """With a constant, which no derivative has."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return super().forward(f, y) + 7


class NoisySquares(Squares):
    """Random numbers are no evidence."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return super().forward(f, y) * torch.rand(())


def each(f: Tensor) -> Distribution:
    return Normal(f, 1.0)


def together(f: Tensor) -> Distribution:
    return Independent(Normal(f, 1.0), 1)


def narrow(f: Tensor) -> Distribution:
    return Independent(Normal(f, f.new_tensor([1.0, 0.5])), 1)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(_MAKERS)
    yield
    _MAKERS.clear()
    _MAKERS.update(before)


def risk_of(
    loss: type[nn.Module], make: Callable[[Tensor], Distribution], **options: Any
) -> EmpiricalRisk:
    register_likelihood(loss)(lambda _: FromDistribution(make))
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(normal(2, 3))
        model.bias.copy_(normal(2, seed=1))
    data = [(normal(n, 3, seed=n), normal(n, 2, seed=9 + n)) for n in (4, 3)]
    return EmpiricalRisk(model, loss(), data, **options)


def trace_of(risk: EmpiricalRisk, weight: float) -> Tensor:
    """`weight Σ_n Σ_c |∂f_c / ∂θ|²`, where each of the two outputs has the inputs and a one."""
    inputs = torch.cat([X for X, _ in risk.data])
    return 2 * weight * (inputs.square().sum() + len(inputs))


@pytest.mark.parametrize(
    ("loss", "make", "weight"),
    [(Squares, together, 1 / 7), (Shifted, together, 1 / 7), (SumOfSquares, each, 1.0)],
)
def test_of_its_own_likelihood_a_loss_has_the_curvature(
    loss: type[nn.Module], make: Callable[[Tensor], Distribution], weight: float
) -> None:
    risk = risk_of(loss, make)
    for K in (curvature(risk, FullBlock), GGN(risk).materialize()):
        torch.testing.assert_close(K.trace, trace_of(risk, weight))


@pytest.mark.parametrize(
    ("loss", "make", "found"),
    [
        (Squares, each, "is 2 times that of the likelihood, with the reduction 'mean'"),
        (SumOfSquares, narrow, "differ by 1.* of their norm"),
    ],
)
def test_another_likelihood_is_refused(
    loss: type[nn.Module], make: Callable[[Tensor], Distribution], found: str
) -> None:
    risk = risk_of(loss, make)
    for computed in (
        lambda: curvature(risk, FullBlock),
        lambda: GGN(risk).to_dense(),
        lambda: Hessian(risk).to_dense(),
        risk.loss,
    ):
        with pytest.raises(UnsupportedError, match=f"{loss.__name__}: .*not its own.*{found}"):
            computed()


def test_without_the_check_it_is_the_likelihoods() -> None:
    risk = risk_of(Squares, each, check=False)
    K = curvature(risk, FullBlock)
    torch.testing.assert_close(K.trace, trace_of(risk, 1 / 14))


def test_a_random_loss_is_not_compared() -> None:
    risk = risk_of(NoisySquares, each)
    state = torch.get_rng_state()
    curvature(risk, FullBlock)
    torch.testing.assert_close(torch.get_rng_state(), state)
