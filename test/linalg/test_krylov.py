"""Iterative solvers and inverses, against dense algebra and SciPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus import EKFACLinearOperator, FisherType, GGNLinearOperator, HessianLinearOperator
from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.linalg import (
    CGInverseLinearOperator,
    Dense,
    Diagonal,
    IdentityLinearOperator,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
    SolveInfo,
    Space,
    Structure,
    cg,
    lsmr,
    minres,
    neumann,
)

from .cases import F64, OnlyProducts, normal, orthogonal, psd
from .test_laws import close

F32 = torch.float32
PSD, SYMMETRIC = Structure.PSD, Structure.SYMMETRIC
SOLVERS = {"cg": cg, "minres": minres, "lsmr": lsmr}
RELATIVE = {"cg": cg, "minres": minres}
each_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
each_relative = pytest.mark.parametrize("solver", RELATIVE.values(), ids=RELATIVE)


def with_eigenvalues(values: Tensor, seed: int = 0) -> Tensor:
    Q = orthogonal(len(values), seed)
    return (Q * values) @ Q.T


def spread(n: int, condition: float) -> Tensor:
    return torch.logspace(0, -float(np.log10(condition)), n, dtype=F64)


def indefinite(n: int, condition: float) -> Tensor:
    values = spread(n, condition)
    return with_eigenvalues(values * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0))


def residual(M: Tensor, x: Tensor, b: Tensor) -> Tensor:
    """Relative, per column, in float64."""
    r = torch.linalg.vector_norm(b.double() - M.double() @ x.double(), dim=0)
    return r / torch.linalg.vector_norm(b.double(), dim=0)


def quietly(solve: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        return solve(*args, **kwargs)


# What every solver does ----------------------------------------------------------------------------------------------


@each_solver
@pytest.mark.parametrize("dtype", [F64, F32])
def test_solves(solver, dtype: torch.dtype, device: torch.device) -> None:
    M = psd(20, 20)
    A = Dense(M.to(device, dtype), PSD)
    b = normal(20, 3).to(device, dtype)
    tolerances = {"atol": 1e-9, "btol": 1e-9} if solver is lsmr else {"tol": 1e-6}
    x, info = solver(A, b, **tolerances) if dtype == F64 else solver(A, b)
    assert x.dtype == dtype
    assert x.device.type == device.type
    torch.testing.assert_close(x.cpu().double(), torch.linalg.solve(M, b.cpu().double()), rtol=1e-3, atol=1e-4)
    assert info.converged.all()
    assert info.reason == "converged"
    assert info.converged.shape == info.relative_residual.shape == (3,)
    torch.testing.assert_close(info.relative_residual.cpu(), residual(M, x.cpu(), b.cpu()), rtol=0.1, atol=2e-7)
    assert 0 < info.iterations <= 40


@each_solver
def test_zero_right_hand_sides_and_small_shapes(solver) -> None:
    A = Dense(psd(5, 5), PSD)
    b = normal(5, 3)
    b[:, 1] = 0
    x, info = solver(A, b, x0=normal(5, seed=1))
    assert (x[:, 1] == 0).all()
    assert info.relative_residual[1] == 0
    assert info.converged.all()
    x, info = solver(A, torch.zeros(5, dtype=F64))
    assert (x == 0).all()
    assert info.iterations == 0
    assert info.reason == "converged"
    x, info = solver(A, torch.zeros(5, 0, dtype=F64))
    assert x.shape == (5, 0)
    assert info.converged.shape == (0,)
    one, info = solver(Dense(torch.tensor([[4.0]]), PSD), torch.tensor([2.0]))
    assert one.item() == pytest.approx(0.5, rel=1e-5)
    assert info.iterations <= 2


@each_solver
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_tiny_and_huge_numbers(solver, dtype: torch.dtype, size: float) -> None:
    A, b = Dense(psd(8, 8).to(dtype), PSD), normal(8, 2).to(dtype)
    plain, info = solver(A, b)
    scaled, scaled_info = solver(A, b * size)
    torch.testing.assert_close(scaled / size, plain, rtol=1e-3, atol=1e-4)
    assert scaled_info.converged.all()
    tiny_A, info = solver(Dense(1e-15 * psd(8, 8).to(dtype), PSD), b)
    torch.testing.assert_close(tiny_A * 1e-15, plain, rtol=1e-3, atol=1e-4)
    assert info.converged.all()


@each_solver
def test_a_first_guess(solver) -> None:
    M, b = psd(6, 6), normal(6, 2)
    A, exact = Dense(M, PSD), torch.linalg.solve(M, b)
    for guess in (exact, exact.numpy()):
        x, info = solver(A, b, x0=guess)
        assert info.iterations == 0
        close(x, exact)
    one, info = solver(A, b, x0=exact[:, 0])
    assert info.iterations > 0
    torch.testing.assert_close(one, exact, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="a first guess with 1 or 2 columns, as the right-hand side, got 3"):
        solver(A, b, x0=normal(6, 3))


@each_solver
@pytest.mark.parametrize("condition", [1e2, 1e8, 1e12])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_ill_conditioned_meets_its_tolerance_or_warns(solver, condition: float, dtype: torch.dtype) -> None:
    """Never neither; and what `info` says is true."""
    M = with_eigenvalues(spread(60, condition)).to(dtype)
    A = Dense(M, PSD)
    b = torch.cat([normal(60, 2).to(dtype), M @ normal(60, 2, seed=1).to(dtype)], dim=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x, info = solver(A, b)
    assert torch.isfinite(x).all()
    true = residual(M, x, b)
    # Rounding in the last residual alone.
    slack = torch.finfo(dtype).eps * 60 * torch.linalg.vector_norm(x.double(), dim=0) / b.double().norm(dim=0)
    assert ((info.relative_residual - true).abs() <= 1e-3 * true + slack).all()
    assert bool(info.converged.all()) == (not caught)
    if solver is not lsmr:
        assert torch.equal(info.converged, info.relative_residual <= 1e-5)
    if caught:
        assert issubclass(caught[0].category, CurvatureWarning)
        worst = info.relative_residual[~info.converged].max()
        assert f"{worst:.1e}" in str(caught[0].message)
    if condition == 1e2:
        assert info.converged.all()
    if condition == 1e8 and solver is not lsmr:
        assert not info.converged[:2].any()
        assert info.converged[2:].all()


@each_solver
def test_singular_but_consistent(solver) -> None:
    values = torch.cat([torch.linspace(1, 5, 6, dtype=F64), torch.zeros(4, dtype=F64)])
    M = with_eigenvalues(values)
    b = M @ normal(10, 3)
    x, info = solver(Dense(M, PSD), b)
    assert info.converged.all()
    # Without a first guess in the null space, it is the solution of least norm.
    torch.testing.assert_close(x, torch.linalg.pinv(M, rtol=1e-10) @ b, rtol=1e-3, atol=1e-4)


@each_solver
def test_nothing_of_the_caller_is_kept_or_changed(solver) -> None:
    M = psd(5, 5).requires_grad_()
    b = normal(5).requires_grad_()
    before = b.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, _ = solver(Dense(M, PSD), b)
    assert not x.requires_grad
    assert M.grad is None
    assert torch.equal(b, before)
    torch.testing.assert_close(x, torch.linalg.solve(M.detach(), before), rtol=1e-3, atol=1e-4)
    with torch.inference_mode():
        inside, _ = solver(Dense(psd(5, 5), PSD), before)
    torch.testing.assert_close(inside.clone(), x, rtol=1e-3, atol=1e-4)


@each_solver
def test_half_precision_computes_in_float32(solver) -> None:
    M = psd(6, 6).to(torch.bfloat16)
    b = normal(6).to(torch.bfloat16)
    x, _ = quietly(solver, Dense(M, PSD), b)
    assert x.dtype == torch.bfloat16
    torch.testing.assert_close(x.double(), torch.linalg.solve(M.double(), b.double()), rtol=0.1, atol=0.1)


@each_solver
def test_columns_with_nan(solver) -> None:
    b = normal(5, 3)
    b[2, 1] = torch.nan
    with pytest.warns(CurvatureWarning, match=r"for 1 of 3 columns.* is nan: converged \(columns 0, 2\); the right"):
        x, info = solver(Dense(psd(5, 5), PSD), b)
    assert info.converged.tolist() == [True, False, True]
    assert info.relative_residual[1].isnan()
    assert torch.isfinite(x[:, ::2]).all()


@each_solver
def test_the_iteration_limit(solver) -> None:
    A = Dense(with_eigenvalues(spread(30, 1e4)), PSD)
    with pytest.warns(CurvatureWarning, match=r"for 1 of 1 columns; .* after 3 iterations .* limit 3 reached"):
        x, info = solver(A, normal(30), max_iter=3)
    assert info.iterations == 3
    with pytest.warns(CurvatureWarning, match="after 0 iterations is 1.0e"):
        x, info = solver(A, normal(30), max_iter=0)
    assert (x == 0).all()
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match="Expected max_iter to be an integer of at least 0, got"):
            solver(A, normal(30), max_iter=wrong)


REFUSED = [
    (lambda solve: solve(torch.eye(3), torch.ones(3)), TypeError, r"LinearOperator, got Tensor; wrap it: Dense\(A\)"),
    (lambda solve: solve(Dense(torch.eye(3)), torch.ones(4)), ValueError, r"Expected shape \[3\]"),
    (lambda solve: solve(Dense(torch.eye(3)), torch.ones(3, dtype=F64)), TypeError, "got torch.float64"),
    (lambda solve: solve(Dense(torch.eye(3)), torch.ones(3), atol=-1.0), ValueError, "atol to be at least 0, got -1.0"),
]


@each_solver
@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refused(solver, call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(solver)


@pytest.mark.parametrize("solver", [cg, minres, neumann])
def test_only_lsmr_takes_rectangles(solver) -> None:
    with pytest.raises(ValueError, match=r"Expected a square matrix, got Dense.*use LSMR"):
        solver(Dense(normal(3, 2)), normal(3))
    with pytest.raises(ValueError, match="tol to be at least 0, got nan"):
        solver(Dense(normal(3, 3)), normal(3), tol=float("nan"))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 12), K=st.integers(1, 4), seed=st.integers(0, 10**6), rank=st.integers(0, 12))
def test_solvers_agree(n: int, K: int, seed: int, rank: int) -> None:
    """All solve the same consistent systems, of any rank."""
    factor = normal(n, min(rank, n), seed=seed)
    M = factor @ factor.T
    b = M @ normal(n, K, seed=seed + 1)
    A = Dense(M, PSD)
    for solver in (cg, minres):
        x, info = quietly(solver, A, b, tol=1e-8)
        assert info.converged.all() or info.relative_residual.max() < 1e-6
        assert (torch.linalg.vector_norm(b - M @ x, dim=0) <= 1e-6 * torch.linalg.vector_norm(b, dim=0)).all()
    x, _ = quietly(lsmr, A, b, atol=1e-12, btol=1e-12, conlim=0)
    assert (torch.linalg.vector_norm(b - M @ x, dim=0) <= 1e-4 * torch.linalg.vector_norm(b, dim=0)).all()


# The methods themselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32])
def test_cg_on_an_indefinite_matrix_never_claims_what_is_not(dtype: torch.dtype) -> None:
    M = indefinite(40, 1e3).to(dtype)
    b = normal(40, 4).to(dtype)
    x, info = quietly(cg, Dense(M, SYMMETRIC), b)
    assert not info.converged.any()
    assert torch.isfinite(x).all()
    torch.testing.assert_close(info.relative_residual, residual(M, x, b), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_cg_without_a_solution(dtype: torch.dtype) -> None:
    """`b` outside the range of a singular matrix: no solution is claimed."""
    values = torch.cat([torch.linspace(1, 3, 5, dtype=F64), torch.zeros(5, dtype=F64)])
    M, b = with_eigenvalues(values).to(dtype), normal(10, 3).to(dtype)
    with pytest.warns(CurvatureWarning, match="CG missed tol=1e-05 for 3 of 3 columns"):
        x, info = cg(Dense(M, PSD), b)
    assert torch.isfinite(x).all()
    torch.testing.assert_close(info.relative_residual, residual(M, x, b), rtol=0.1, atol=0.1)


SOFTMAX = nn.CrossEntropyLoss()


def _classifier(kind: type, *sizes: int, seed: int = 0) -> Tensor:
    """The dense Hessian or GGN of a softmax classifier, singular because scores can be shifted."""
    torch.manual_seed(seed)
    layers = [part for m, n in pairwise(sizes) for part in (nn.Linear(m, n), nn.Tanh())][:-1]
    model = nn.Sequential(*layers).double()
    data = [(torch.randn(60, sizes[0], dtype=F64), torch.randint(sizes[-1], (60,)))]
    M = kind(model, SOFTMAX, list(model.parameters()), data).to_dense()
    return (M + M.T) / 2


SINGULAR: dict[str, Callable[[], Tensor]] = {
    "zeros on the diagonal": lambda: torch.diag(torch.cat([torch.zeros(5), torch.linspace(1, 2, 35)]).double()),
    "indefinite": lambda: with_eigenvalues(
        torch.cat([torch.zeros(5, dtype=F64), spread(18, 1e2), -0.9 * spread(17, 1e2)])
    ),
    "softmax regression": lambda: _classifier(HessianLinearOperator, 8, 4),
    "GGN": lambda: _classifier(GGNLinearOperator, 4, 4, 3),
    "Hessian": lambda: _classifier(HessianLinearOperator, 4, 4, 3),
}


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("make", SINGULAR.values(), ids=SINGULAR)
def test_minres_of_singular_systems(make: Callable[[], Tensor], dtype: torch.dtype) -> None:
    """The residual is the least there is, and `x` no larger than solutions for such `b` are."""
    M = make()
    n, A = len(M), Dense(M.to(dtype), SYMMETRIC)
    b = normal(n, 3, seed=1).to(dtype)
    b[:, 1] = (M @ M @ b[:, 1].double()).to(dtype)  # this one in the range
    inverse = torch.linalg.pinv(M, rtol=1e-10, hermitian=True)
    least = inverse @ b.double()
    x, info = quietly(minres, A, b, max_iter=2000)
    reached, best = residual(M, x, b), residual(M, least, b)
    assert info.converged.tolist() == [False, True, False]
    assert "(columns 1); A is singular in" in info.reason
    assert "and b not in its range: x minimizes the residual; add a damping (columns 0, 2)" in info.reason
    assert (reached[[0, 2]] <= (1.1 if dtype == F64 else 2.0) * best[[0, 2]]).all()
    torch.testing.assert_close(info.relative_residual, reached, rtol=1e-2, atol=1e-5)
    assert (x.double().norm(dim=0) <= 10 * torch.linalg.matrix_norm(inverse, 2) * b.double().norm(dim=0)).all()
    inverted = MINRESInverseLinearOperator(A, max_iter=2000)
    torch.testing.assert_close(quietly(lambda: inverted @ b), x)
    assert inverted.info is not None
    assert inverted.info.reason == info.reason


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("make", SINGULAR.values(), ids=SINGULAR)
def test_minres_of_singular_systems_preconditioned(make: Callable[[], Tensor], dtype: torch.dtype) -> None:
    """The least residual in the norm of the preconditioner."""
    M = make()
    P = torch.linspace(0.5, 2, len(M), dtype=F64)
    root, b = P.sqrt(), normal(len(M), seed=1).to(dtype)
    least = root * (torch.linalg.pinv(root[:, None] * M * root, rtol=1e-10, hermitian=True) @ (root * b.double()))
    options = {"preconditioner": Diagonal(P.to(dtype)), "max_iter": 2000}
    x, info = quietly(minres, Dense(M.to(dtype), SYMMETRIC), b, **options)
    reached, best = ((root * (b.double() - M @ y.double())).norm() for y in (x, least))
    assert "A is singular in" in info.reason
    assert reached <= (1.1 if dtype == F64 else 2.0) * best
    assert x.double().norm() <= 20 * least.norm()


@pytest.mark.parametrize("dtype", [F64, F32])
def test_minres_never_makes_a_first_guess_worse(dtype: torch.dtype) -> None:
    """Whatever the iteration limit."""
    for M in (SINGULAR["indefinite"](), SINGULAR["GGN"](), with_eigenvalues(spread(40, 1e2))):
        A, b = Dense(M.to(dtype), SYMMETRIC), normal(len(M), 2, seed=2).to(dtype)
        guess = (torch.linalg.pinv(M, rtol=1e-4, hermitian=True) @ b.double()).to(dtype)
        for limit in (1, 7, 60, 400):
            x, _ = quietly(minres, A, b, x0=guess, tol=1e-14, max_iter=limit)
            assert (residual(M, x, b) <= residual(M, guess, b) * 1.001 + 10 * torch.finfo(dtype).eps).all()
            x, _ = quietly(minres, A, b, tol=1e-14, max_iter=limit)
            assert (residual(M, x, b) <= 1.5).all()


@pytest.mark.parametrize("condition", [10.0, 1e3])
def test_minres_solves_indefinite_systems(condition: float) -> None:
    M, b = indefinite(50, condition), normal(50, 2)
    x, info = minres(Dense(M, SYMMETRIC), b, tol=1e-8, max_iter=2000)
    assert info.converged.all()
    assert residual(M, x, b).max() <= 1e-8


@pytest.mark.parametrize(("n", "rank", "damping"), [(300, 100, 1e-3), (122, 30, 1e-3), (122, 30, 1e-4)])
def test_a_drifting_recurrence_goes_on(n: int, rank: int, damping: float) -> None:
    """Of ill-conditioned float32 systems the error is that of plain conjugate gradients, which never start again."""
    for seed in range(5 if n > 200 else 12):
        generator = torch.Generator().manual_seed(seed)
        J = torch.randn(n, rank, dtype=F64, generator=generator) * torch.logspace(0, -2, rank, dtype=F64)
        A = (J @ J.T / J.square().sum(1).mean() + damping * torch.eye(n, dtype=F64)).to(F32)
        b = torch.randn(n, 1, generator=generator)
        exact = torch.linalg.solve(A.double(), b.double())
        ours, plain = (float((x - exact).norm()) for x in (quietly(cg, Dense(A, PSD), b)[0], _plain_cg(A, b, 1e-5)))
        assert ours < 2 * plain < 0.02 * float(exact.norm())


def _plain_cg(A: Tensor, b: Tensor, tol: float) -> Tensor:
    x, r = torch.zeros_like(b), b.clone()
    p, square = r.clone(), r.double().square().sum()
    goal = tol**2 * square
    while square > goal:
        Ap = A @ p
        alpha = (square / (p.double() * Ap.double()).sum()).float()
        x, r = x + alpha * p, r - alpha * Ap
        old, square = square, r.double().square().sum()
        p = r + (square / old).float() * p
    return x


@each_relative
def test_preconditioning_reduces_iterations(solver) -> None:
    M = with_eigenvalues(spread(60, 1e4))
    A, b = Dense(M, PSD), normal(60, 3)
    approximate = torch.linalg.inv(M + 1e-3 * torch.eye(60, dtype=F64))
    _, plain = solver(A, b)
    for preconditioner in (
        Dense(approximate, PSD),
        Dense(approximate.float(), PSD),  # a lower precision
        lambda R: approximate @ R,
    ):
        x, info = solver(A, b, preconditioner=preconditioner)
        assert info.iterations < plain.iterations / 3
        assert residual(M, x, b).max() <= 1.01e-5
    x, info = solver(A, b, preconditioner=Dense(torch.linalg.inv(M), PSD))
    assert info.iterations <= 3
    space = Space.from_shapes({"w": (6, 10)})
    x, info = solver(OnlyProducts(M, space), b, preconditioner=OnlyProducts(approximate, space))
    assert info.converged.all()


@each_relative
def test_bad_preconditioners(solver) -> None:
    A, b = Dense(psd(5, 5), PSD), normal(5, 2)
    for wrong in (Diagonal(-torch.ones(5, dtype=F64)), lambda R: R * torch.nan, lambda R: 0 * R):
        with pytest.warns(CurvatureWarning, match="preconditioner is not symmetric positive definite, or gave NaN"):
            x, info = solver(A, b, preconditioner=wrong)
        assert torch.isfinite(x).all()
        assert not info.converged.any()
    with pytest.raises(ValueError, match=r"a preconditioner of the shape of Dense.*got Dense"):
        solver(A, b, preconditioner=Dense(psd(4, 4), PSD))
    with pytest.raises(ValueError, match=r"take and return \[5, k\], for any k: gave it \[5, 2\], got \[5\]"):
        solver(A, b, preconditioner=lambda R: R[:, 0])
    with pytest.raises(ValueError, match="got float"):
        solver(A, b, preconditioner=lambda R: 1.0)
    with pytest.raises(TypeError, match="an operator or a function, got int"):
        solver(A, b, preconditioner=3)
    with pytest.raises(TypeError, match="Expected a preconditioner on cpu"):
        solver(A, b, preconditioner=IdentityLinearOperator([(5,)], "meta", F64))


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (6, 6)])
@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_lsmr_is_the_damped_pseudo_inverse(shape: tuple[int, int], damp: float) -> None:
    M, b = normal(*shape), normal(shape[0], 3, seed=1)
    x, info = lsmr(Dense(M), b, damp=damp, atol=1e-12, btol=1e-12)
    assert info.converged.all()
    gram = M.T @ M + damp**2 * torch.eye(shape[1], dtype=F64)
    expected = torch.linalg.pinv(M) @ b if damp == 0 else torch.linalg.solve(gram, M.T @ b)
    torch.testing.assert_close(x, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(info.relative_residual, residual(M, x, b), rtol=1e-6, atol=1e-9)


def test_lsmr_stays_close_to_its_first_guess() -> None:
    M, b, x0 = normal(4, 9), normal(4, seed=1), normal(9, seed=2)
    x, _ = lsmr(Dense(M), b, atol=1e-12, btol=1e-12, x0=x0)
    torch.testing.assert_close(x, x0 + torch.linalg.pinv(M) @ (b - M @ x0), rtol=1e-8, atol=1e-9)


def test_lsmr_condition_limit_and_log(capsys: pytest.CaptureFixture[str]) -> None:
    A = Dense(with_eigenvalues(spread(20, 1e6)))
    with pytest.warns(CurvatureWarning, match=r"LSMR missed atol=1e-12, btol=1e-12.*condition number above conlim"):
        lsmr(A, normal(20), atol=1e-12, btol=1e-12, conlim=10.0, show=True)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("LSMR     0: 1 columns, ‖Aᵀ r‖ / ‖A‖ ‖r‖ up to 1.00e+00")
    assert len(printed) >= 2


@pytest.mark.parametrize("preconditioned", [False, True])
def test_neumann_is_its_series(preconditioned: bool) -> None:
    M, b = normal(6, 6) / 4 + torch.eye(6, dtype=F64), normal(6, 2)
    P = psd(6, 6, seed=1) / 2 if preconditioned else torch.eye(6, dtype=F64)
    expected = torch.zeros_like(M)
    for k in range(4):
        expected += 0.3 * P @ torch.linalg.matrix_power(torch.eye(6, dtype=F64) - 0.3 * M @ P, k)
    x, info = quietly(
        neumann, Dense(M), b, num_terms=3, scale=0.3, preconditioner=Dense(P, PSD) if preconditioned else None
    )
    close(x, expected @ b)
    torch.testing.assert_close(info.relative_residual, residual(M, x, b))
    assert info.iterations == 4
    if preconditioned:
        as_function, _ = quietly(neumann, Dense(M), b, num_terms=3, scale=0.3, preconditioner=lambda R: P @ R)
        close(as_function, x)


def test_neumann_ends() -> None:
    A, b = Diagonal(torch.tensor([0.5, 1.5], dtype=F64)), normal(2, 2)
    b[:, 1] = 0
    x, info = neumann(A, b, tol=1e-3)
    assert 5 < info.iterations < 15
    assert info.converged.all()
    assert (x[:, 1] == 0).all()
    with pytest.warns(CurvatureWarning, match=r"missed tol=1e-12 for 1 of 2.*6 terms are not enough: add terms"):
        neumann(A, b, num_terms=5, tol=1e-12)
    with pytest.warns(
        CurvatureWarning, match="missed a residual below that of x = 0.*the series diverges: decrease sc"
    ):
        neumann(A, b, num_terms=5, scale=2.0)
    with pytest.raises(ValueError, match=r"overflowed at term \d+ of 10001: it diverges. Decrease scale=10"):
        neumann(A, b, num_terms=10_000, scale=10.0)
    with pytest.warns(CurvatureWarning, match="diverges"):
        x, _ = neumann(A, b, num_terms=2000, scale=10.0, check_nan=False)
    assert not torch.isfinite(x).all()
    with pytest.raises(ValueError, match="num_terms to be an integer of at least 0, got -1"):
        neumann(A, b, num_terms=-1)


# The operators -------------------------------------------------------------------------------------------------------

INVERSES = {
    "cg": lambda A: CGInverseLinearOperator(A, tolerance=1e-12),
    "minres": lambda A: MINRESInverseLinearOperator(A, tol=1e-12),
    "lsmr": lambda A: LSMRInverseLinearOperator(A, atol=1e-13, btol=1e-13),
    "neumann": lambda A: NeumannInverseLinearOperator(A, num_terms=400, scale=0.5),
}
each_inverse = pytest.mark.parametrize("make", INVERSES.values(), ids=INVERSES)


@each_inverse
def test_inverses_as_operators(make) -> None:
    M, space = psd(6, 6), Space.from_shapes({"a": (2, 2), "b": (2,)})
    inverse = make(OnlyProducts(M, space))
    expected = torch.linalg.inv(M)
    close(inverse.to_dense(), expected)
    close(inverse.T.to_dense(), expected)
    assert inverse.shape == (6, 6)
    assert inverse.in_shapes == ((2, 2), (2,))
    X = normal(6, 3)
    answer = inverse @ space.unflatten(X)
    assert list(answer) == ["a", "b"]
    close(space.flatten(answer), expected @ X)
    close(X.T @ inverse, X.T @ expected)
    close(inverse.adjoint() @ X, expected @ X)
    S = inverse.to_scipy()
    np.testing.assert_allclose(S @ X.numpy(), (expected @ X).numpy(), rtol=1e-8)
    np.testing.assert_allclose(S.H @ X[:, 0].numpy(), (expected @ X[:, 0]).numpy(), rtol=1e-8)
    largest = sla.eigsh(S, k=1, return_eigenvectors=False)
    assert largest[0] == pytest.approx(1 / torch.linalg.eigvalsh(M)[0].item())
    close((2 * inverse) @ X, 2 * expected @ X)
    close((inverse @ Dense(M, PSD)) @ X, X)


@each_inverse
def test_info_is_that_of_the_last_product(make) -> None:
    inverse = make(Dense(psd(6, 6), PSD))
    assert inverse.info is None
    for K in (3, 1):
        _ = inverse @ normal(6, K)
        assert isinstance(inverse.info, SolveInfo)
        assert inverse.info.converged.tolist() == [True] * K
        assert inverse.info.relative_residual.max() < 1e-9
    _ = normal(2, 6) @ inverse
    assert inverse.info.converged.shape == (2,)
    twice = [inverse @ normal(6), inverse @ normal(6)]
    assert torch.equal(*twice)


def test_moving_takes_the_guess_and_the_preconditioner_along() -> None:
    M, b = psd(5, 5), normal(5)
    inverse = CGInverseLinearOperator(Dense(M, PSD), initial_guess=b, preconditioner=Diagonal(1 / M.diagonal()))
    moved = inverse.to(dtype=F32)
    assert moved.options["preconditioner"].dtype == moved.options["x0"].dtype == F32
    torch.testing.assert_close(moved @ b.float(), torch.linalg.solve(M, b).float(), rtol=1e-3, atol=1e-4)


@each_inverse
def test_operators_refuse(make) -> None:
    with pytest.raises(TypeError, match="Expected a LinearOperator, got Tensor; wrap it"):
        make(torch.eye(3))
    if make is not INVERSES["lsmr"]:
        with pytest.raises(ValueError, match=r"Expected a square matrix, got Dense.*use LSMRInverse"):
            make(Dense(normal(3, 2)))


def test_the_adjoint_of_a_preconditioned_series() -> None:
    M, P = torch.eye(5, dtype=F64) + 0.1 * normal(5, 5), Dense(torch.eye(5, dtype=F64) + 0.1 * normal(5, 5, seed=1))
    inverse = NeumannInverseLinearOperator(Dense(M), num_terms=2, preconditioner=P)
    close(inverse.T.to_dense(), inverse.to_dense().T)
    both = NeumannInverseLinearOperator(Dense(psd(5, 5), PSD), 2, 0.1, preconditioner=Dense(psd(5, 5, seed=1), PSD))
    assert both.structure == SYMMETRIC
    close(both.to_dense(), both.to_dense().T)
    function = NeumannInverseLinearOperator(Dense(M), num_terms=2, preconditioner=lambda R: R)
    assert function.structure == Structure.GENERAL
    with pytest.raises(NotImplementedError, match="needs the adjoint of the preconditioner, which a function does not"):
        _ = function.T


@pytest.mark.parametrize("make", [INVERSES["cg"], INVERSES["minres"], INVERSES["lsmr"]])
def test_derivatives_in_the_vector(make) -> None:
    M = torch.eye(3, dtype=F64) + 0.1 * normal(3, 3) if make is INVERSES["lsmr"] else psd(3, 3)
    inverse = make(Dense(M, Structure.GENERAL))
    x = normal(3, 2).requires_grad_()
    (gradient,) = torch.autograd.grad((inverse @ x).square().sum(), x, create_graph=True)
    close(gradient.detach(), 2 * torch.linalg.inv(M).T @ torch.linalg.inv(M) @ x.detach())
    (second,) = torch.autograd.grad(gradient.sum(), x)
    close(second, 2 * (torch.linalg.inv(M).T @ torch.linalg.inv(M)).sum(0)[:, None].expand(3, 2))


def test_cg_takes_a_product_for_symmetric() -> None:
    """`B Bᵀ` declares nothing, and its CG inverse has an adjoint all the same."""
    B = Dense(normal(5, 5))
    inverse = CGInverseLinearOperator(B @ B.T, tolerance=1e-12, max_iter=200)
    assert inverse.structure == SYMMETRIC
    assert inverse.T is inverse
    torch.testing.assert_close(
        normal(5) @ inverse, torch.linalg.inv(B.matrix @ B.matrix.T) @ normal(5), rtol=1e-5, atol=1e-6
    )
    assert CGInverseLinearOperator(Dense(psd(3, 3), PSD)).structure == PSD


def test_the_keywords_of_curvlinops() -> None:
    M, b = psd(6, 6), normal(6, 2)
    expected = torch.linalg.solve(M, b)
    A = Dense(M, PSD)
    inverse = CGInverseLinearOperator(
        A,
        tolerance=1e-13,
        eps=0,
        stop_updating_after=1e-12,
        max_iter=100,
        max_tridiag_iter=6,
        initial_guess=torch.zeros_like(b),
        preconditioner=lambda R: R / M.diagonal()[:, None],
    )
    close(inverse @ b, expected)
    assert inverse.options["tol"] == 1e-12
    inverse = LSMRInverseLinearOperator(A, damp=0.0, atol=1e-13, btol=1e-13, conlim=0, maxiter=50, show=False, x0=None)
    close(inverse @ b, expected)
    close(NeumannInverseLinearOperator(A, 400, 0.5, True) @ b, expected)
    with pytest.raises(TypeError, match="n_tridiag"):
        CGInverseLinearOperator(A, n_tridiag=3)  # type: ignore[call-arg]


def test_the_default_of_cg_is_a_small_residual_or_a_warning() -> None:
    """The peer's default gives a relative residual of 0.46 here, and says nothing."""
    A = Dense(with_eigenvalues(spread(100, 1e3)), PSD)
    b = normal(100)
    inverse = CGInverseLinearOperator(A)
    assert residual(A.matrix, (inverse @ b)[:, None], b[:, None]).max() <= 1e-5


def test_ekfac_preconditions_the_ggn() -> None:
    """An ill-conditioned Gauss-Newton matrix: the tolerance is met or a warning says what was reached."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 5)).double()
    X = torch.randn(100, 20, dtype=F64) * torch.logspace(1, -2, 20, dtype=F64)
    data, params = [(X, torch.randint(0, 5, (100,)))], list(model.parameters())
    G = GGNLinearOperator(model, nn.CrossEntropyLoss(), params, data)
    K = EKFACLinearOperator(model, nn.CrossEntropyLoss(), params, data, fisher_type=FisherType.TYPE2)
    gradient, _ = G.gradient_and_loss()
    damping = 1e-4
    A = G + damping * IdentityLinearOperator(G.in_shapes, dtype=F64)
    plain = CGInverseLinearOperator(A)
    fast = CGInverseLinearOperator(A, preconditioner=K.inverse(damping))
    step, fast_step = plain @ gradient, fast @ gradient
    assert plain.info is not None
    assert fast.info is not None
    assert plain.info.converged.all()
    assert fast.info.converged.all()
    assert fast.info.iterations < plain.info.iterations / 1.5
    dense = A.to_dense()
    for x in (step, fast_step):
        assert isinstance(x, list)
        flat = G.in_space.flatten(x)[:, None]
        assert residual(dense, flat, G.in_space.flatten(gradient)[:, None]).max() <= 1.01e-5
    undamped = CGInverseLinearOperator(G, max_iter=30)
    with pytest.warns(CurvatureWarning, match=r"CG missed tol=1e-05 for 1 of 1 columns; the largest relative residual"):
        _ = undamped @ torch.randn(G.shape[0], dtype=F64)
