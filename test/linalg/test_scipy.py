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
from curvlinops_plus.linalg import Dense, Kronecker, Structure
from curvlinops_plus.linalg.conjugate_gradients import cg
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
@pytest.mark.parametrize("solver", ["arpack", "propack"])
def test_svds(dtype: torch.dtype, solver: str) -> None:
    M = normal(30, 20)
    S = Dense(M.to(dtype)).to_scipy()
    u, s, vt = sla.svds(S, k=2, solver=solver)
    np.testing.assert_allclose(np.sort(s), np.linalg.svd(M.numpy())[1][1::-1], rtol=1e-6 if dtype == F64 else 1e-3)
    np.testing.assert_allclose(S @ vt.T, u * s, atol=1e-2)


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


@pytest.mark.parametrize("dtype", [F64, F32])
def test_lobpcg(dtype: torch.dtype) -> None:
    K = Kronecker(psd(6, 6).to(dtype), psd(5, 5, seed=1).to(dtype))
    start = np.random.default_rng(0).standard_normal((30, 3)).astype(np.float64 if dtype == F64 else np.float32)
    values, _ = sla.lobpcg(K.to_scipy(), start, maxiter=200, tol=1e-6 if dtype == F64 else 1e-3)
    expected = np.linalg.eigvalsh(K.to_dense().double().numpy())[::-1][:3]
    np.testing.assert_allclose(values, expected, rtol=1e-8 if dtype == F64 else 1e-3)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_expm_multiply_and_onenormest(dtype: torch.dtype) -> None:
    M, b = normal(8, 8) / 4, normal(8).to(dtype).numpy()
    S = Dense(M.to(dtype)).to_scipy()
    x = sla.expm_multiply(S, b, traceA=float(M.trace()))
    np.testing.assert_allclose(x, scipy.linalg.expm(M.numpy()) @ b, rtol=1e-9 if dtype == F64 else 1e-3, atol=1e-4)
    exact = np.linalg.norm(M.numpy(), 1)
    assert exact / 3 < sla.onenormest(S) < exact * (1 + 1e-5)  # it estimates from below


@pytest.mark.parametrize(
    "use",
    [
        lambda A, b: sla.eigsh(A, k=1),
        lambda A, b: sla.cg(A, b),
        lambda A, b: sla.lsmr(A, b),
        lambda A, b: sla.svds(A, k=1),
        lambda A, b: sla.expm_multiply(A, b, traceA=1.0),
    ],
)
def test_scipy_wants_dtypes_of_numpy(use: Any) -> None:
    """Never a result: once NumPy understands PyTorch's dtypes, the sentence in `to_scipy` can go."""
    A = Dense(psd(9, 9), PSD)
    with pytest.raises(TypeError, match=r"torch\.float64|not an array"):
        use(A, normal(9).numpy())
    use(A.to_scipy(), normal(9).numpy())


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


def test_dtypes_follow_the_source() -> None:
    for given, expected in ((np.float64, F64), (np.float32, F32), (np.int64, F64)):
        assert from_scipy(np.eye(2, dtype=given)).dtype == expected
        assert from_scipy(scipy.sparse.eye(2, dtype=given)).dtype == expected
    assert from_scipy(np.eye(2, dtype=np.float16)).dtype == F32


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


def test_an_array_is_copied() -> None:
    M = np.eye(2)
    A = from_scipy(M, structure=PSD)
    M *= 3
    close(A.to_dense(), torch.eye(2, dtype=F64))
    assert A.structure == PSD
    M.flags.writeable = False
    close(from_scipy(M).to_dense(), 3 * torch.eye(2, dtype=F64))


def test_a_sparse_system() -> None:
    n = 200
    laplacian = scipy.sparse.diags([-np.ones(n - 1), 2.1 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1])
    A = from_scipy(laplacian.tocsr(), structure=PSD)
    assert A.T is A
    b = normal(n, 2)
    x, info = cg(A, b, tol=1e-13)
    assert info.converged.all()
    close(x, torch.from_numpy(sla.spsolve(laplacian.tocsc(), b.numpy())))


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
