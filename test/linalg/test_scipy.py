"""SciPy's solvers on our operators, and SciPy's matrices as operators of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg as sla
import torch
from torch import nn

from curvlinops_plus import HessianLinearOperator
from curvlinops_plus.linalg import Dense, Structure
from curvlinops_plus.linalg.scipy_import import from_scipy

from .cases import F64, normal, psd, symmetric
from .test_laws import close

PSD, SYMMETRIC = Structure.PSD, Structure.SYMMETRIC
F32 = torch.float32


def hessian(dtype: torch.dtype) -> HessianLinearOperator:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    data = [(torch.randn(12, 4).to(dtype), torch.randn(12, 2).to(dtype))]
    return HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)


# Ours in SciPy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32])
def test_eigsh_of_a_hessian(dtype: torch.dtype) -> None:
    """ARPACK works in float64, whatever the operator computes in."""
    H = hessian(dtype)
    S = H.to_scipy()
    assert S.dtype == np.float64
    expected = np.linalg.eigvalsh(H.to_dense().double().numpy())
    tolerance = 1e-9 if dtype == F64 else 1e-4
    values, vectors = sla.eigsh(S, k=3)
    assert values.dtype == vectors.dtype == S.dtype
    by_size = expected[np.argsort(np.abs(expected))]
    np.testing.assert_allclose(np.sort(values), np.sort(by_size[-3:]), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(S @ vectors, vectors * values, atol=10 * tolerance)
    lowest = sla.eigsh(S, k=1, which="SA", return_eigenvectors=False)
    np.testing.assert_allclose(lowest[0], expected[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_cg_and_minres(dtype: torch.dtype) -> None:
    P, I, b = psd(9, 9), symmetric(9), normal(9).to(dtype).numpy()
    tolerance = 1e-7 if dtype == F64 else 1e-3
    x, info = sla.cg(Dense(P.to(dtype), PSD).to_scipy(), b, rtol=tolerance / 10)
    assert info == 0
    np.testing.assert_allclose(P.numpy() @ x, b, atol=10 * tolerance)
    x, info = sla.minres(Dense(I.to(dtype), SYMMETRIC).to_scipy(), b, rtol=tolerance / 100)
    assert info == 0
    np.testing.assert_allclose(I.numpy() @ x, b, atol=10 * tolerance)


# SciPy's as ours -----------------------------------------------------------------------------------------------------

MATRIX = normal(4, 6).numpy()
SOURCES: list[tuple[str, Any]] = [
    ("array", MATRIX),
    ("csr matrix", scipy.sparse.csr_matrix(MATRIX)),
    ("coo array", scipy.sparse.coo_array(MATRIX)),
    ("operator", sla.aslinearoperator(MATRIX)),
    ("ours and back", Dense(torch.from_numpy(MATRIX)).to_scipy()),
]
each_source = pytest.mark.parametrize("source", [op for _, op in SOURCES], ids=[name for name, _ in SOURCES])


@each_source
def test_from_scipy(source: Any) -> None:
    A, M = from_scipy(source), torch.from_numpy(MATRIX)
    assert A.shape == (4, 6)
    assert A.dtype == F64
    assert A.structure == Structure.GENERAL
    close(A.to_dense(), M)
    close(A.T.to_dense(), M.T)
    X = normal(6, 3)
    close(A @ X, M @ X)
    close(A @ X[:, 0], M @ X[:, 0])
    assert isinstance(A @ X.numpy(), np.ndarray)
    close(normal(2, 4) @ A, normal(2, 4) @ M)
    close((A @ A.T).to_dense(), M @ M.T)
    np.testing.assert_allclose(A.to_scipy() @ X.numpy(), M @ X)


@each_source
@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16])
def test_from_scipy_in_a_dtype_on_a_device(source: Any, dtype: torch.dtype, device: torch.device) -> None:
    A = from_scipy(source, dtype, device)
    assert A.dtype == dtype
    assert A.device.type == device.type
    x = normal(6).to(device, dtype)
    answer = A @ x
    assert answer.dtype == dtype
    assert answer.device.type == device.type
    loose = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(answer.cpu().double(), torch.from_numpy(MATRIX) @ x.cpu().double(), **loose)
    again = from_scipy(source).to(device, dtype)
    torch.testing.assert_close(again @ x, answer, **loose)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.float64, np.float64),
        (torch.float32, np.float32),
        (torch.float16, np.float16),
        (torch.bfloat16, np.float32),
        ("float32", np.float32),
        (float, np.float64),
        (np.dtype("f8"), np.float64),
        (None, np.float64),
    ],
)
def test_to_scipy_takes_dtypes_of_both(given: Any, expected: Any) -> None:
    """Algorithms are told a dtype; a product has that of its vector, as in curvlinops."""
    S = Dense(torch.from_numpy(MATRIX)).to_scipy(given)
    assert S.dtype == (S @ np.ones(6, dtype=int)).dtype == expected
    for kind in (np.float32, np.float64):
        found = S @ np.ones(6, dtype=kind), S.rmatvec(np.ones(4, dtype=kind))
        assert [x.dtype for x in found] == [kind, kind]
        np.testing.assert_allclose(found[0], MATRIX.sum(1), rtol=1e-6)


class Users:
    """An operator as somebody else writes it, with what `@` needs."""

    def __init__(self, M: torch.Tensor) -> None:
        self.M, self.shape = M, M.shape

    def __matmul__(self, X: torch.Tensor) -> torch.Tensor:
        return self.M @ X

    @property
    def T(self) -> Users:
        return Users(self.M.T)


@pytest.mark.parametrize(
    "make", [lambda M: sla.aslinearoperator(M.numpy()), lambda M: scipy.sparse.csr_array(M), Users]
)
def test_sums_with_operators_of_others(make: Any) -> None:
    M, N, X = normal(4, 6), normal(4, 6, seed=1), normal(6, 3)
    A, B = Dense(M), make(N)
    for found, expected in ((A + B, M + N), (A - B, M - N), (2 * A + B, 2 * M + N)):
        close(found @ X, expected @ X)
        close(found.T @ M[:, :2], expected.T @ M[:, :2])
    with pytest.raises(ValueError, match=r"Expected operators of equal shapes, got \[4, 6\]"):
        Dense(normal(6, 6)) + B
    if not scipy.sparse.issparse(B):  # a matrix of SciPy does not leave the sum to us
        close((B + A) @ X, (M + N) @ X)
        close((B - A) @ X, (N - M) @ X)


class OnlyMatvec:
    """The least that a matrix is made of: its shape and one product."""

    shape, products = (2, 3), 0

    def matvec(self, x: np.ndarray) -> np.ndarray:
        return np.arange(6.0).reshape(2, 3) @ x


class OnlyMatmat:
    shape = (2, 3)

    def matmat(self, X: np.ndarray) -> np.ndarray:
        assert X.ndim == 2
        return np.arange(6.0).reshape(2, 3) @ X


class BothMatmats(OnlyMatmat):
    dtype = np.float32

    def rmatmat(self, X: np.ndarray) -> np.ndarray:
        return np.arange(6.0).reshape(2, 3).T @ X


@pytest.mark.parametrize("kind", [OnlyMatvec, OnlyMatmat])
def test_an_object_with_one_product(kind: Any) -> None:
    M, A = torch.arange(6, dtype=F64).view(2, 3), from_scipy(kind())
    assert A.shape == (2, 3)
    assert A.dtype == F64
    for X in (normal(3), normal(3, 4)):
        torch.testing.assert_close(A @ X, M @ X, rtol=0, atol=1e-14)
    torch.testing.assert_close(A.to_dense(), M, rtol=0, atol=0)
    assert from_scipy(kind(), F32).to(dtype=F64).dtype == F64
    with pytest.raises(NotImplementedError, match="cannot multiply from the left; give it `rmatvec`"):
        normal(2) @ A


def test_an_object_with_products_of_several_columns() -> None:
    M, A = torch.arange(6, dtype=F32).view(2, 3), from_scipy(BothMatmats())
    assert A.dtype == F32
    for X in (normal(2).float(), normal(4, 2).float()):
        torch.testing.assert_close(X @ A, X @ M)
    torch.testing.assert_close(A.T.to_dense(), M.T)


def test_an_operator_without_adjoint() -> None:
    op = sla.LinearOperator((3, 3), matvec=lambda x: 2 * x, dtype=np.float64)
    symmetric_one = from_scipy(op, structure=SYMMETRIC)
    close(torch.ones(3, dtype=F64) @ symmetric_one, 2 * torch.ones(3, dtype=F64))
    with pytest.raises(NotImplementedError, match="cannot multiply from the left; give it `rmatvec`, or call from_sci"):
        _ = torch.ones(3, dtype=F64) @ from_scipy(op)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: from_scipy(torch.eye(2)), TypeError, r"got a tensor; use Dense\(op\)"),
        (lambda: from_scipy(Dense(torch.eye(2))), TypeError, "which is one of ours already"),
        (lambda: from_scipy(np.eye(2) * 1j), TypeError, "real numbers, got dtype complex128"),
        (
            lambda: from_scipy("matrix"),
            TypeError,
            "sparse matrix or NumPy array, got 'matrix' of type str; make it an a",
        ),
        (lambda: from_scipy([[1, 2], [3, 4]]), TypeError, r"got \[\[1, 2\], \[3, 4\]\] of type list; .*np.array\(op"),
        (lambda: from_scipy(MATRIX, dtype="float32"), TypeError, "torch.dtype such as torch.float32, got 'float32'"),  # type: ignore[arg-type]
        (lambda: from_scipy(MATRIX, dtype=torch.int64), TypeError, "floating-point torch.dtype .* got torch.int64"),
        (
            lambda: Dense(torch.eye(2)).to_scipy(torch.int32),
            TypeError,
            "of NumPy or PyTorch, got torch.int32; take 'fl",
        ),
        (
            lambda: Dense(torch.eye(2)).to_scipy("single!"),
            TypeError,
            "floating-point one of .*, got 'single!'; take 'fl",
        ),
        (lambda: Dense(torch.eye(2)).to_scipy(complex), TypeError, "got <class 'complex'>"),
        (lambda: from_scipy(MATRIX, structure=PSD), ValueError, r"expected a PSD matrix to be square, got \[4, 6\]"),
        (
            lambda: from_scipy(scipy.sparse.csr_array(MATRIX), structure=SYMMETRIC),
            ValueError,
            r"Expected a SYMMETRIC matrix to be square, got \[4, 6\]",
        ),
    ],
)
def test_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
