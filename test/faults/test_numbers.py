"""A number that is not finite makes no finite answer: solvers, by column, and damped solves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlinops_plus import (
    CGInverseLinearOperator,
    CurvatureWarning,
    LinearOperator,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
    NumericsError,
    StochasticReconfiguration,
    cg,
    lsmr,
    minres,
    neumann,
    stochastic_reconfiguration,
)
from curvlinops_plus.linalg import Dense, Space, Structure
from test.helpers import F64, normal

NAN, INF = float("nan"), float("inf")
M = torch.diag(torch.linspace(0.5, 1.5, 6, dtype=F64)) + 0.02
A = Dense(M, Structure.PSD)
UNCOUPLED = M.clone()
UNCOUPLED[5, :5] = UNCOUPLED[:5, 5] = 0.0
B = normal(6, 3)
X = torch.linalg.solve(M, B)
SOLVERS: list[Callable[..., Any]] = [cg, minres, lsmr, neumann]
INVERSES: list[Any] = [
    CGInverseLinearOperator,
    MINRESInverseLinearOperator,
    LSMRInverseLinearOperator,
    NeumannInverseLinearOperator,
]
each_solver = pytest.mark.parametrize("solver", SOLVERS)


class Broken(LinearOperator):
    """A matrix with a number that is not finite in the products with columns that `is_hit` tells."""

    in_space, structure = Space.flat(6), Structure.PSD
    dtype, device = F64, torch.device("cpu")

    def __init__(self, value: float, is_hit: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.value = value
        self.is_hit = is_hit

    def _matmat(self, X: Tensor) -> Tensor:
        Y = UNCOUPLED @ X
        Y[2] = Y[2].where(~self.is_hit(X), self.value)
        return Y


def with_number(value: float, rows: Any, columns: Any) -> Tensor:
    B_bad = B.clone()
    B_bad[rows, columns] = value
    return B_bad


def solved(solver: Callable[..., Any], *args: Any, **options: Any) -> tuple[Tensor, Any]:
    with pytest.warns(CurvatureWarning, match="NaN or infinite entries; x is NaN there"):
        return solver(*args, **options)


@each_solver
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("rows", [4, slice(None)], ids=["one entry", "all"])
def test_right_hand_sides(solver: Any, value: float, rows: Any) -> None:
    x, info = solved(solver, A, with_number(value, rows, 1))
    assert x[:, 1].isnan().all()
    assert info.relative_residual[1].isnan()
    torch.testing.assert_close(x[:, [0, 2]], X[:, [0, 2]], rtol=1e-3, atol=1e-4)
    assert info.converged.tolist() == [True, False, True]
    x, info = solved(solver, A, with_number(value, rows, 1)[:, 1])
    assert x.isnan().all()
    assert not info.converged.any()


@pytest.mark.parametrize("inverse", INVERSES)
def test_inverses(inverse: Any, recwarn: Any) -> None:
    solution = inverse(A)
    x = solution @ with_number(INF, 0, 2)
    assert x[:, 2].isnan().all()
    assert x[:, :2].isfinite().all()
    assert solution.info.converged.tolist() == [True, True, False]


@pytest.mark.parametrize("solver", [cg, minres, lsmr])
def test_first_guesses(solver: Any) -> None:
    x, info = solved(solver, A, B, x0=with_number(NAN, 3, 0))
    assert x[:, 0].isnan().all()
    assert info.converged.tolist() == [False, True, True]


@pytest.mark.parametrize("solver", [cg, minres, lsmr])
@pytest.mark.parametrize("value", [NAN, INF])
def test_products(solver: Any, value: float) -> None:
    """Only the columns that the operator fails for are lost."""
    right = B.clone()
    right[5, [0, 2]] = 0  # and so it stays, as the last entry has no part in others
    broken = Broken(value, lambda X: X[5] != 0)
    x, info = solved(solver, broken, right)
    assert x[:, 1].isnan().all()
    assert info.converged.tolist() == [True, False, True]
    assert x[:, [0, 2]].isfinite().all()
    x, info = solved(solver, Broken(value, lambda X: X[5] == X[5]), right[:, :1])
    assert x.isnan().all()
    assert not info.converged.any()


@pytest.mark.parametrize("solver", [cg, minres])
def test_preconditioners(solver: Any) -> None:
    x, info = solved(solver, A, B, preconditioner=lambda R: R * NAN)
    assert x.isnan().all()
    assert not info.converged.any()


def test_the_neumann_series() -> None:
    broken = Broken(NAN, lambda X: X[5] == X[5])
    with pytest.raises(ValueError, match="overflowed at term 1"):
        neumann(broken, B)
    x, info = solved(neumann, broken, B, check_nan=False)
    assert x.isnan().all()
    assert not info.converged.any()
    with pytest.raises(ValueError, match="num_terms=-1; expected an integer of at least 0"):
        NeumannInverseLinearOperator(A, num_terms=-1)


def test_zero_is_still_solved() -> None:
    """A right-hand side of 0 has the solution 0, beside one that is not finite, too."""
    for solver in SOLVERS:
        right = with_number(INF, 0, 0)
        right[:, 1] = 0
        x, info = solved(solver, A, right)
        assert not x[:, 1].any()
        assert bool(info.converged[1])
        assert info.relative_residual[1] == 0


@pytest.mark.parametrize("mode", ["dense", "kernel", "lazy"])
def test_stochastic_reconfiguration_moves_nothing(mode: Any) -> None:
    a = torch.tensor(2.0, dtype=F64)
    optimizer = StochasticReconfiguration(lambda p, x: -p[0] * x**2 / 2, [a], mode=mode)
    x = torch.linspace(-2, 2, 9, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        for costs in (x.clone().fill_(NAN), x / 0):
            with pytest.raises(NumericsError, match="local_costs is NaN or infinite for"):
                optimizer.step(x, costs)
    assert a == 2


@pytest.mark.parametrize("solver", ["cg", "cholesky"])
def test_a_previous_direction_that_is_not_finite(solver: Any) -> None:
    x = torch.linspace(-2, 2, 9, dtype=F64)
    a = [torch.tensor(2.0, dtype=F64)]
    with pytest.raises(NumericsError, match=r"the previous direction, .* NaN or infinite"):
        stochastic_reconfiguration(
            lambda p, x: -p[0] * x**2 / 2,
            a,
            x,
            x**2,
            momentum=0.5,
            mode="dense",
            solver=solver,
            previous=[torch.tensor(NAN, dtype=F64)],
        )
