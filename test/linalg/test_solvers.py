"""Iterative solvers and inverses, against dense algebra and SciPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.linalg import (
    CGInverseLinearOperator,
    Dense,
    Diagonal,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
    Space,
    Structure,
    cg,
    lsmr,
    minres,
    neumann,
)
from test.linalg.cases import F64, OnlyProducts, normal, orthogonal, psd
from test.linalg.test_laws import close

F32 = torch.float32
PSD, SYMMETRIC = Structure.PSD, Structure.SYMMETRIC
SOLVERS = {"cg": cg, "minres": minres, "lsmr": lsmr}
RELATIVE = {"cg": cg, "minres": minres}
each_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
each_relative = pytest.mark.parametrize("solver", RELATIVE.values(), ids=RELATIVE)


def with_eigenvalues(values: Tensor) -> Tensor:
    Q = orthogonal(len(values))
    return (Q * values) @ Q.T


def spread(n: int, condition: float) -> Tensor:
    return torch.logspace(0, -float(np.log10(condition)), n, dtype=F64)


def tight(solver: Callable[..., Any], tolerance: float) -> dict[str, float]:
    return {"atol": tolerance, "btol": tolerance} if solver is lsmr else {"tol": tolerance}


def residual(M: Tensor, x: Tensor, b: Tensor) -> Tensor:
    """Relative, per column, in float64."""
    r = torch.linalg.vector_norm(b.double() - M.double() @ x.double(), dim=0)
    return r / torch.linalg.vector_norm(b.double(), dim=0)


def quietly(solve: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        return solve(*args, **kwargs)


@each_solver
@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16])
def test_solves(solver, dtype: torch.dtype, device: torch.device) -> None:
    """Columns of every scale, one of zeros; half precision is computed in float32; autocast changes
    nothing.
    """
    M = psd(20, 20).to(dtype)
    scales = torch.tensor([1, 0, 1e-30, 1e25], dtype=F64)
    b = (normal(20, 4) * scales).to(device, dtype)
    exact = torch.linalg.solve(M.double(), b.cpu().double()) / scales.where(scales > 0, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, info = quietly(
            solver, Dense(M.to(device), PSD), b, **(tight(solver, 1e-9) if dtype == F64 else {})
        )
    assert (x.dtype, x.device.type) == (dtype, device.type)
    assert not x[:, 1].any()
    found = x.cpu().double() / scales.where(scales > 0, 1)
    if dtype == torch.bfloat16:
        torch.testing.assert_close(found, exact, rtol=0.1, atol=0.1)
        return
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
    assert info.reason == "converged"
    assert info.converged.tolist() == [True] * 4
    true = residual(M, x.cpu(), b.cpu()).nan_to_num(0.0)
    torch.testing.assert_close(info.relative_residual.cpu().double(), true, rtol=0.1, atol=1e-6)
    assert 0 < info.iterations <= 40


@each_solver
def test_every_form_of_a_vector_and_a_first_guess(solver) -> None:
    M, space, b = psd(6, 6), Space.from_shapes({"a": (2, 2), "b": (2,)}), normal(6, 2)
    A, exact = OnlyProducts(M, space), torch.linalg.solve(M, b)
    for question in (b, b[:, 0], b.numpy(), space.unflatten(b), list(space.unflatten(b).values())):
        x, info = solver(A, question, **tight(solver, 1e-12))
        assert type(x) is type(question)
        flat = torch.as_tensor(x) if isinstance(x, (Tensor, np.ndarray)) else space.flatten(x)
        close(flat, exact if flat.ndim == 2 else exact[:, 0])
        assert len(info.converged) == (1 if flat.ndim == 1 else 2)
    x, info = solver(A, 50 * b, x0=50 * exact)
    assert info.iterations <= 1
    close(x, 50 * exact)
    x, info = solver(A, 50 * b, x0=50 * exact[:, 0])  # of one column, for both
    torch.testing.assert_close(x, 50 * exact, rtol=1e-3, atol=1e-2)
    assert solver(A, torch.zeros(6, 0, dtype=F64))[0].shape == (6, 0)


@each_solver
def test_columns_end_by_themselves(solver) -> None:
    """Beside one with NaN, too."""
    A, b = Diagonal(torch.linspace(1, 30, 30, dtype=F64)), torch.zeros(30, 3, dtype=F64)
    b[4, 0], b[2, 1], b[:, 2] = 1, torch.nan, normal(30)
    with pytest.warns(CurvatureWarning, match=r"for 1 of 3 columns.*NaN or infinite entries"):
        x, info = solver(A, b)
    assert info.converged.tolist() == [True, False, True]
    assert torch.isfinite(x[:, ::2]).all()
    M = psd(5, 5)
    M[1, 1] = torch.nan
    with pytest.warns(CurvatureWarning, match="for 1 of 1 columns"):
        x, info = solver(Dense(M, PSD), normal(5))
    assert not info.converged.any()


@each_solver
@pytest.mark.parametrize("condition", [1e2, 1e8])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_ill_conditioned_meets_its_tolerance_or_warns(
    solver, condition: float, dtype: torch.dtype
) -> None:
    """Never neither; and what `info` says is true, whatever the scale of the matrix."""
    M = 1e-9 * with_eigenvalues(spread(60, condition)).to(dtype)
    b = torch.cat([normal(60, 2).to(dtype), 1e9 * M @ normal(60, 2, seed=1).to(dtype)], dim=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x, info = solver(Dense(M, PSD), b)
    true = residual(M, x, b)
    # Rounding in the last residual alone.
    slack = (
        torch.finfo(dtype).eps
        * 60e-9
        * torch.linalg.vector_norm(x.double(), dim=0)
        / b.double().norm(dim=0)
    )
    assert ((info.relative_residual - true).abs() <= 1e-3 * true + slack).all()
    assert bool(info.converged.all()) == (not caught)
    if solver is not lsmr:
        assert torch.equal(info.converged, info.relative_residual <= 1e-5)
        if dtype == F64:
            assert info.converged.tolist() == (
                [True] * 4 if condition == 1e2 else [False, False, True, True]
            )
    if caught:
        assert f"{info.relative_residual[~info.converged].max():.1e}" in str(caught[0].message)


@each_solver
def test_the_iteration_limit(solver) -> None:
    A = Dense(with_eigenvalues(spread(30, 1e4)), PSD)
    with pytest.warns(
        CurvatureWarning, match=r"for 1 of 1 columns; .* after 3 iterations .* limit 3 reached"
    ):
        _, info = solver(A, normal(30), max_iter=3)
    assert info.iterations == 3
    with pytest.warns(CurvatureWarning, match="after 0 iterations is 1.0e"):
        x, _ = solver(A, normal(30), max_iter=0)
    assert (x == 0).all()


EYE, ONES = Dense(torch.eye(3), PSD), torch.ones(3)


# The methods themselves
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_the_iterates_of_cg_are_scipys(steps: int) -> None:
    M, b = psd(12, 12), normal(12)
    P = torch.diag(1 / M.diagonal())
    for own, their in ((None, None), (Dense(P, PSD), P.numpy())):
        x, _ = quietly(cg, Dense(M, PSD), b, preconditioner=own, max_iter=steps, tol=0.0)
        close(
            x, torch.from_numpy(sla.cg(M.numpy(), b.numpy(), rtol=0.0, maxiter=steps, M=their)[0])
        )


def test_cg_reports_negative_and_zero_curvature() -> None:
    A = Diagonal(torch.tensor([1.0, 2.0, -3.0], dtype=F64))
    # One bad column does not disturb the good one.
    b = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=F64)
    with pytest.warns(CurvatureWarning, match=r"for 1 of 2 columns.*not positive definite"):
        x, info = cg(A, b)
    assert info.converged.tolist() == [True, False]
    torch.testing.assert_close(x, torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 0.0]], dtype=F64))
    for M in (0 * A.to_dense(), with_eigenvalues(spread(40, 1e3) * (-1.0) ** torch.arange(40))):
        with pytest.warns(CurvatureWarning, match="zero or negative curvature.*use MINRES"):
            x, info = cg(Dense(M, SYMMETRIC), normal(len(M), 2))
        assert not info.converged.any()
        assert x.isfinite().all()


@pytest.mark.parametrize("dtype", [F64, F32])
def test_minres_of_a_singular_indefinite_system(dtype: torch.dtype) -> None:
    """The residual is about the least there is."""
    M = with_eigenvalues(
        torch.cat([torch.zeros(5, dtype=F64), spread(18, 1e2), -0.9 * spread(17, 1e2)])
    )
    b = normal(40, 3, seed=1).to(dtype)
    b[:, 1] = (M @ M @ b[:, 1].double()).to(dtype)  # this one in the range
    least = torch.linalg.pinv(M, rtol=1e-10, hermitian=True) @ b.double()
    x, info = quietly(minres, Dense(M.to(dtype), SYMMETRIC), b, max_iter=2000)
    assert info.converged.tolist() == [False, True, False]
    assert "and b not in its range, x minimizes the residual; damp A" in info.reason
    assert (residual(M, x, b)[[0, 2]] <= 1.1 * residual(M, least, b)[[0, 2]]).all()


@each_relative
def test_tolerances_and_preconditioners(solver) -> None:
    A, b = Dense(with_eigenvalues(spread(30, 1e3)), PSD), 100 * normal(30)
    _, loose = solver(A, b, tol=0.0, atol=1.0)
    _, fine = solver(A, b, tol=1e-9, atol=0.0)
    assert loose.iterations < fine.iterations
    assert 0.01 < loose.relative_residual[0] * b.norm() <= 1.0
    with pytest.warns(CurvatureWarning, match="missed tol=1e-15, atol=1e-18"):
        solver(A, b, tol=1e-15, atol=1e-18, max_iter=5)
    M = with_eigenvalues(spread(60, 1e4))
    A, b = Dense(M, PSD), normal(60, 3)
    P = torch.linalg.inv(M + 1e-3 * torch.eye(60, dtype=F64))
    _, plain = solver(A, b)
    for preconditioner in (
        Dense(P, PSD),
        Dense(P.float(), PSD),
        lambda R: P @ R,
    ):  # also in a lower precision
        x, info = solver(A, b, preconditioner=preconditioner)
        assert info.iterations < plain.iterations / 3
        assert residual(M, x, b).max() <= 1.01e-5
    with pytest.warns(CurvatureWarning):
        _, info = solver(A, b, preconditioner=lambda R: R * torch.nan)
    assert not info.converged.any()


@pytest.mark.parametrize(
    ("shape", "damp"), [((9, 4), 0.0), ((4, 9), 0.0), ((4, 9), 0.5), ((6, 6), 0.5)]
)
def test_lsmr_is_the_damped_pseudo_inverse(shape: tuple[int, int], damp: float) -> None:
    M, b = normal(*shape), normal(shape[0], 3, seed=1)
    x, info = lsmr(Dense(M), b, damp=damp, atol=1e-12, btol=1e-12)
    assert info.converged.all()
    gram = M.T @ M + damp**2 * torch.eye(shape[1], dtype=F64)
    expected = torch.linalg.pinv(M) @ b if damp == 0 else torch.linalg.solve(gram, M.T @ b)
    torch.testing.assert_close(x, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(info.relative_residual, residual(M, x, b), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_neumann_is_its_series(preconditioned: bool) -> None:
    M, b = normal(6, 6) / 4 + torch.eye(6, dtype=F64), normal(6, 2)
    P = (
        normal(6, 6, seed=1) / 4 + torch.eye(6, dtype=F64)
        if preconditioned
        else torch.eye(6, dtype=F64)
    )
    expected = sum(
        0.3 * P @ torch.linalg.matrix_power(torch.eye(6, dtype=F64) - 0.3 * M @ P, k)
        for k in range(4)
    )
    options = {"num_terms": 3, "scale": 0.3, "preconditioner": Dense(P) if preconditioned else None}
    x, info = quietly(neumann, Dense(M), b, **options)
    close(x, expected @ b)
    torch.testing.assert_close(info.relative_residual, residual(M, x, b))
    assert info.iterations == 4
    inverse = NeumannInverseLinearOperator(Dense(M), **options)
    close(quietly(inverse.to_dense), expected)
    close(quietly(inverse.T.to_dense), expected.T)


def test_neumann_ends() -> None:
    A, b = Diagonal(torch.tensor([0.5, 1.5], dtype=F64)), 100 * normal(2, 2)
    b[:, 1] = 0
    x, info = neumann(A, b, tol=1e-3)
    assert 5 < info.iterations < 15
    assert info.converged.all()
    assert (x[:, 1] == 0).all()
    with pytest.warns(
        CurvatureWarning,
        match=r"missed tol=1e-12 for 1 of 2 .*after 6 .*: add terms, decrease scale",
    ):
        neumann(A, b, num_terms=5, tol=1e-12)
    with pytest.warns(
        CurvatureWarning,
        match="missed a residual below that of x = 0.*: add terms, decrease scale=2 b",
    ):
        neumann(A, b, num_terms=5, scale=2.0)


# The operators
# --------------------------------------------------------------------------------------------------

INVERSES = {
    "cg": lambda A: CGInverseLinearOperator(A, tolerance=1e-12),
    "minres": lambda A: MINRESInverseLinearOperator(A, tol=1e-12),
    "lsmr": lambda A: LSMRInverseLinearOperator(A, atol=1e-13, btol=1e-13),
    "neumann": lambda A: NeumannInverseLinearOperator(A, num_terms=400, scale=0.5),
}
each_inverse = pytest.mark.parametrize("make", INVERSES.values(), ids=INVERSES)


@each_inverse
def test_inverses_as_operators(make) -> None:
    M, space, X = psd(6, 6), Space.from_shapes({"a": (2, 2), "b": (2,)}), normal(6, 3)
    inverse, expected = make(OnlyProducts(M, space)), torch.linalg.inv(M)
    assert inverse.info is None
    close(inverse.to_dense(), expected)
    answer = inverse @ space.unflatten(X)
    assert list(answer) == ["a", "b"]
    close(space.flatten(answer), expected @ X)
    assert inverse.info.converged.tolist() == [True] * 3
    close(X[:, :2].T @ inverse, X[:, :2].T @ expected)
    assert inverse.info.converged.shape == (2,)  # that of the last product
    close(inverse.adjoint() @ X, expected @ X)
    np.testing.assert_allclose(
        inverse.to_scipy().H @ X[:, 0].numpy(), (expected @ X[:, 0]).numpy(), rtol=1e-8
    )
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((inverse @ x).square().sum(), x)
    close(gradient, 2 * expected @ expected @ X)
    v = X[:, 0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        inverse.shift(0.1).quadratic_form(v), v
    )  # a part of which has a graph anyway
    close(gradient, 2 * (expected @ v + 0.1 * v).detach())
    moved = make(Dense(M, PSD)).to(dtype=F32)
    assert moved.dtype == F32
    torch.testing.assert_close(quietly(moved.to_dense), expected.float(), rtol=1e-4, atol=1e-5)


def test_the_keywords_of_curvlinops() -> None:
    """And CG takes a product for symmetric, which declares nothing."""
    M, b = psd(6, 6), normal(6, 2)
    A, expected = Dense(M, PSD), torch.linalg.solve(M, b)
    inverse = CGInverseLinearOperator(
        A,
        tolerance=1e-13,
        eps=0,
        stop_updating_after=1e-12,
        max_iter=100,
        max_tridiag_iter=6,
        initial_guess=b,
        preconditioner=Diagonal(1 / M.diagonal()),
    )
    close(inverse @ b, expected)
    assert inverse.options["tol"] == 1e-12
    assert inverse.to(dtype=F32).options["preconditioner"].dtype == F32
    inverse = LSMRInverseLinearOperator(
        A, damp=0.0, atol=1e-13, btol=1e-13, conlim=0, maxiter=50, show=False, x0=None
    )
    close(inverse @ b, expected)
    close(NeumannInverseLinearOperator(A, 400, 0.5, True) @ b, expected)
    attributes = {
        "shape": (6, 6),
        "dtype": F64,
        "device": "cpu",
        "T": M,
        "__matmul__": lambda self, x: M @ x,
    }
    theirs: Any = type("OperatorOfCurvlinops", (), attributes)()
    close(LSMRInverseLinearOperator(theirs, atol=0, btol=0) @ b, expected)
    close(NeumannInverseLinearOperator(theirs, 400, 0.5) @ b, expected)
    # Tolerances of 0 are SciPy's, also for a matrix in float32: its precision as tolerance is too
    # loose.
    N = normal(30, 5) @ normal(30, 5).T / 5 + 0.02 * torch.eye(30, dtype=F64)
    x = LSMRInverseLinearOperator(Dense(N.float(), PSD), atol=0, btol=0, maxiter=60) @ torch.ones(
        30
    )
    of_scipy = sla.lsmr(Dense(N.float(), PSD).to_scipy(), np.ones(30), atol=0, btol=0, maxiter=60)[
        0
    ]
    assert (x - torch.from_numpy(of_scipy)).norm() < 1e-5 * x.norm()
    inverse = CGInverseLinearOperator(A @ A, tolerance=1e-12, max_iter=200)
    assert inverse.T is inverse
    close(b.T @ inverse, b.T @ torch.linalg.inv(M @ M))
