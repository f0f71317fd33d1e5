"""Laws that every operator of `cases.py` obeys, against dense algebra."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm, SingularMatrixError
from curvlinops_plus.linalg import Dense, Kronecker, LinearOperator, Structure
from test.helpers import seeded
from test.linalg.cases import CASES, F64, FORMS, Case, eye_like, normal

TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 2e-3, "atol": 2e-4},
}


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, **TOLERANCE[expected.dtype])


@pytest.fixture(params=[F64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_products(case: Case, dtype: torch.dtype) -> None:
    A, M = case.make(dtype)
    m, n = A.shape
    assert (m, n) == M.shape
    close(A.to_dense(), M)
    close(A.T.to_dense(), M.T)
    X, Y = normal(n, 3).to(dtype), normal(m, 3, seed=1).to(dtype)
    close(A @ X, M @ X)
    close(A.T @ Y, M.T @ Y)
    close(A._rmatmat(Y), M.T @ Y)
    close(A.adjoint().adjoint() @ X, M @ X)
    close(A @ X.T.contiguous().T, M @ X)  # columns one after another in memory
    close(torch.stack([A @ x for x in X.T], dim=1), M @ X)
    close((A @ X * Y).sum(), (X * (A.T @ Y)).sum())
    close(A @ (2 * X[:, 0] - X[:, 1]), 2 * (A @ X[:, 0]) - A @ X[:, 1])
    assert (A @ X[:, :0]).shape == (m, 0)
    close(torch.autograd.grad((A @ (x := X.clone().requires_grad_()) * Y).sum(), x)[0], M.T @ Y)
    S, tolerance = A.to_scipy(), TOLERANCE[dtype]
    assert (S.shape, S.dtype) == (A.shape, np.float64)
    np.testing.assert_allclose(S @ X[:, 0].numpy(), (M @ X[:, 0]).numpy(), **tolerance)
    np.testing.assert_allclose(S.H @ Y.numpy(), (M.T @ Y).numpy(), **tolerance)
    if A.structure >= Structure.SYMMETRIC:
        close(M, M.T)
        assert A.T is A
    if A.structure == Structure.PSD:
        assert torch.linalg.eigvalsh(M).min() > -1e-6


@each_case
def test_forms(case: Case) -> None:
    """Every container type gives the same numbers, and is returned; from the left columns of
    tensors come first.
    """
    A, M = case.make(F64)
    for product, space, out, D in (
        (lambda X: A @ X, A.in_space, A.out_space, M),
        (lambda X: A.T @ X, A.out_space, A.in_space, M.T),
    ):
        for columns in ((), (1,), (4,)):
            X = normal(D.shape[1], *columns)
            Y = D @ X
            close(product(X), Y)
            answer = product(X.numpy())
            assert isinstance(answer, np.ndarray)
            close(torch.from_numpy(answer.copy()), Y)
            tree = space.unflatten(X)
            answer = product(tree)
            assert list(answer) == out.names
            assert [tuple(t.shape) for t in answer.values()] == [
                (*shape, *columns) for shape in out.shapes.values()
            ]
            close(out.flatten(answer), Y)
            for container in (list, tuple):
                answer = product(container(tree.values()))
                assert isinstance(answer, container)
                close(out.flatten(answer), Y)
    for columns in ((), (1,), (4,)):
        X = normal(*columns, A.shape[0])
        Y = X @ M
        close(X @ A, Y)
        close(torch.from_numpy((X.numpy() @ A).copy()), Y)
        tree = A.out_space.unflatten(X.T if columns else X)
        if columns:
            tree = {key: t.movedim(-1, 0) for key, t in tree.items()}
        for left in (tree, list(tree.values()), tuple(tree.values())):
            answer = left @ A
            assert type(answer) is type(left)
            parts = answer.values() if isinstance(answer, dict) else answer
            close(torch.cat([t.flatten(len(columns)) for t in parts], -1), Y)


def apply_form(A: LinearOperator, form: str) -> Any:
    if form == "inverse":
        return A.inverse()
    if form == "damped_inverse":
        return A.inverse(damping=0.1)
    if form == "power":
        return A.power(0.5)
    member = getattr(A, form)
    return member() if callable(member) else member


@each_case
def test_refuses_exactly_what_it_cannot(case: Case) -> None:
    A, _ = case.make(F64)
    for form in FORMS:
        if form not in case.without:
            apply_form(A, form)
            continue
        with pytest.raises((NoClosedForm, ValueError, SingularMatrixError)):
            apply_form(A, form)


@each_case
def test_numbers(case: Case, dtype: torch.dtype) -> None:
    A, M = case.make(dtype)
    expected: dict[str, Callable[[], Tensor]] = {
        "trace": lambda: M.trace(),
        "frobenius_norm": lambda: torch.linalg.matrix_norm(M),
        "diagonal": lambda: M.diagonal(),
        "logdet": lambda: (
            torch.linalg.slogdet(M)[1]
            if torch.linalg.det(M) >= 0
            else torch.tensor(nan, dtype=dtype)
        ),
    }
    for form, value in expected.items():
        if form not in case.without:
            actual = apply_form(A, form)
            torch.testing.assert_close(actual, value(), **TOLERANCE[dtype], equal_nan=True)
    if "logdet" not in case.without:
        close(A.det, torch.linalg.det(M))
    if "eigenvalues" not in case.without:
        close(A.eigenvalues().sort().values, torch.linalg.eigvalsh(M))


@pytest.mark.parametrize(
    "case", [case for case in CASES if "frobenius_norm" not in case.without], ids=lambda c: c.name
)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_norms_whose_squares_are_no_single_precision_numbers(case: Case, scale: float) -> None:
    A, M = case.make(torch.float32)
    size = (scale * A).frobenius_norm
    assert size.dtype == torch.float32
    torch.testing.assert_close(
        size.double() / scale, torch.linalg.matrix_norm(M.double()), rtol=1e-4, atol=0
    )


@each_case
def test_inverse(case: Case, dtype: torch.dtype) -> None:
    A, M = case.make(dtype)
    for form, damping in (
        ("inverse", 0.0),
        ("damped_inverse", 0.1),
        ("damped_inverse", torch.tensor(0.2)),
    ):
        if form not in case.without:
            inverse = A.inverse(damping)
            close((inverse @ A.shift(damping)).to_dense(), eye_like(M))
            sign, logdet = torch.linalg.slogdet(M + damping * eye_like(M))
            known = "logdet_of_damped_inverse" not in case.without and "logdet" not in case.without
            if known and sign > 0:
                close(inverse.logdet, -logdet)


@each_case
def test_power(case: Case, dtype: torch.dtype) -> None:
    A, M = case.make(dtype)
    if "power" in case.without:
        return
    for damping in (0.0, 0.1):
        D = M + damping * eye_like(M)
        root = A.power(0.5, damping)
        close((root @ root).to_dense(), D)
        # In float32 small entries are what the rounding of large ones leaves: these are up to 5e5.
        unit = M.abs().max().clamp(min=1) ** 3 if dtype == torch.float32 else 1.0
        close(A.power(3, damping).to_dense() / unit, D @ D @ D / unit)
        if "inverse" not in case.without:
            close(A.power(-0.5, damping).to_dense() @ root.to_dense(), eye_like(M))
    close(A._root_matmat(eye_like(M)) @ A._root_matmat(eye_like(M)).T, M)


@each_case
def test_shift(case: Case) -> None:
    A, M = case.make(F64)
    if A.shape[0] != A.shape[1]:
        with pytest.raises(ValueError, match="Only a square matrix"):
            A.shift(1.0)
        return
    shifted, D = A.shift(0.7), M + 0.7 * eye_like(M)
    close(shifted.to_dense(), D)
    close(shifted.shift(-0.2).to_dense(), M + 0.5 * eye_like(M))
    for form, value in (
        ("trace", D.trace()),
        ("diagonal", D.diagonal()),
        ("frobenius_norm", torch.linalg.matrix_norm(D)),
    ):
        if form not in case.without and "trace" not in case.without:
            actual = apply_form(shifted, form)
            close(actual, value)


@each_case
def test_quadratic_form(case: Case, dtype: torch.dtype) -> None:
    A, M = case.make(dtype)
    if A.shape[0] != A.shape[1]:
        return
    for lead in ((), (0,), (2,), (3, 2), (2, 1, 2)):
        J = normal(*lead, A.shape[0]).to(dtype)
        expected, tree = J @ M @ (J.mT if lead else J), A.in_space.unflatten_rows(J)
        for given in (J, tree, list(tree.values()), tuple(tree.values())):
            close(A.quadratic_form(given), expected)
        close(torch.as_tensor(A.quadratic_form(J.numpy())), expected)
    v = normal(A.shape[0]).to(dtype).requires_grad_()
    close(torch.autograd.grad(A.quadratic_form(v), v)[0], (M + M.T) @ v.detach())


@each_case
def test_sample(case: Case) -> None:
    """Its covariance, and that a generator gives the same draws for any number of them, in every
    dtype.
    """
    (A, M), (A32, _), num = case.make(F64), case.make(torch.float32), 4000
    if "sample" in case.without:
        return
    draws = A.sample(seeded(), num)
    assert draws.shape == (len(M), num)
    close(A.sample(seeded()), draws[:, 0])
    close(A32.sample(seeded()), draws[:, 0].float())
    # The variance of x_i x_j under N(0, M) is M_ii M_jj + M_ij².
    error = ((M.diagonal()[:, None] * M.diagonal() + M**2) / num).sqrt()
    assert bool(((draws @ draws.T / num - M).abs() <= 4.5 * error + 1e-12).all())
    assert bool((draws.mean(1).abs() <= 4.5 * (M.diagonal() / num).sqrt() + 1e-12).all())


def test_sample_does_not_depend_on_the_choice_of_eigenvectors() -> None:
    """Those of equal eigenvalues are any basis, another one for each rounding: the root that is
    drawn with is not.
    """
    torch.manual_seed(0)
    Q = torch.linalg.qr(torch.randn(6, 6, dtype=F64)).Q
    values = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 2.0], dtype=F64)
    M = Q * values @ Q.T
    other = M + 1e-15 * Q[:, 2:] @ torch.randn(4, 4, dtype=F64) @ Q[:, 2:].T

    def draws(M: torch.Tensor) -> list[torch.Tensor]:
        M = (M + M.T) / 2
        one, batch = Dense(M, Structure.PSD), Dense(torch.stack([M, 2 * M]), Structure.PSD)
        shifted = Kronecker(one, one).inverse(0.1)
        made = (one, batch, Kronecker(one, one), Kronecker(batch, one), shifted, one.power(2, 0.1))
        return [A.sample(seeded(1), 3) for A in made]

    for a, b in zip(draws(M), draws(other), strict=True):
        assert (a - b).abs().max() < 1e-7


@each_case
def test_gradients_in_the_shift(case: Case) -> None:
    A, _ = case.make(F64)
    delta = torch.tensor(0.3, dtype=F64, requires_grad=True)
    n = A.shape[1]
    x = normal(n)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "trace": lambda d: A.shift(d).trace,
        "logdet": lambda d: A.shift(d).logdet,
        "damped_inverse": lambda d: A.inverse(d) @ x,
        "power": lambda d: A.power(-0.5, d) @ x,
    }
    if "eigenvalues" in case.without and "dense" not in case.name:
        del functions["logdet"]  # a determinant does not tell the one of the shifted matrix
    for form, function in functions.items():
        if f"gradient_of_{form}" in case.without:
            with pytest.raises(NoClosedForm, match="not differentiable in the damping"):
                function(delta)
        elif form not in case.without and torch.isfinite(function(delta)).all():
            assert torch.autograd.gradcheck(function, (delta,))


@each_case
def test_to_another_dtype_and_device(case: Case, device: torch.device) -> None:
    A, M = case.make(F64)
    assert A.to("cpu", F64) is A
    if case.name in ("only products", "shifted products"):
        with pytest.raises(NotImplementedError, match="owns no tensors"):
            A.to(dtype=torch.float32)
        return
    B = A.to(device, torch.float32)
    assert (B.dtype, B.device.type, B.in_space, B.structure) == (
        torch.float32,
        device.type,
        A.in_space,
        A.structure,
    )
    close(B.to_dense().cpu(), M.float())
    close(
        (B @ normal(M.shape[1]).to(device, torch.float32)).cpu(), (M @ normal(M.shape[1])).float()
    )
    for form in FORMS[:5]:
        if form not in case.without:
            apply_form(B, form)


@each_case
def test_materialize(case: Case, dtype: torch.dtype) -> None:
    """The same matrix on the same spaces, with every closed form that its structure allows."""
    A, M = case.make(dtype)
    B = A.materialize()
    assert isinstance(B, Dense)
    assert (B.in_space, B.out_space, B.structure) == (A.in_space, A.out_space, A.structure)
    close(B.to_dense(), M)
    if A.structure == Structure.PSD:
        close(B.eigenvalues(), torch.linalg.eigvalsh(M))
        close(B.inverse(0.1).logdet, -torch.logdet(M + 0.1 * eye_like(M)))
