"""SciPy's solvers on our operators, and SciPy's matrices as operators of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
import torch
from torch import nn

from curvlinops_plus import HessianLinearOperator
from curvlinops_plus.linalg import Dense, Structure, from_scipy
from test.linalg.cases import F64, normal
from test.linalg.test_laws import close
from test.nets import tanh_net

PSD, SYMMETRIC = Structure.PSD, Structure.SYMMETRIC
F32 = torch.float32
MATRIX = normal(4, 6).numpy()


@pytest.mark.parametrize("dtype", [F64, F32])
def test_scipy_s_solvers(dtype: torch.dtype) -> None:
    """ARPACK works in float64, whatever the operator computes in."""
    torch.manual_seed(0)
    model = tanh_net(4, 5, 2).to(dtype)
    data = [(torch.randn(12, 4).to(dtype), torch.randn(12, 2).to(dtype))]
    H = HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    S, tolerance = H.to_scipy(), 1e-9 if dtype == F64 else 1e-4
    expected = np.linalg.eigvalsh(H.to_dense().double().numpy())
    values, vectors = sla.eigsh(S, k=3)
    assert S.dtype == values.dtype == np.float64
    by_size = expected[np.argsort(np.abs(expected))]
    np.testing.assert_allclose(
        np.sort(values), np.sort(by_size[-3:]), rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(S @ vectors, vectors * values, atol=10 * tolerance)
    largest = sla.svds(
        Dense(torch.from_numpy(MATRIX).to(dtype)).to_scipy(), k=1, return_singular_vectors=False
    )
    np.testing.assert_allclose(largest, np.linalg.norm(MATRIX, 2), rtol=10 * tolerance)


DTYPES: Any = {
    torch.float64: np.float64,
    torch.bfloat16: np.float32,
    "float32": np.float32,
    None: np.float64,
}


@pytest.mark.parametrize("given", DTYPES)
def test_to_scipy_takes_dtypes_of_both(given: Any) -> None:
    """Algorithms are told a dtype; a product has that of its vector, as in curvlinops."""
    S = Dense(torch.from_numpy(MATRIX)).to_scipy(given)
    assert S.dtype == (S @ np.ones(6, dtype=int)).dtype == DTYPES[given]
    for kind in (np.float32, np.float64):
        assert [(S @ np.ones(6, dtype=kind)).dtype, S.rmatvec(np.ones(4, dtype=kind)).dtype] == [
            kind,
            kind,
        ]


SOURCES: dict[str, Any] = {
    "array": MATRIX,
    "csr matrix": scipy.sparse.csr_matrix(MATRIX),
    "coo array": scipy.sparse.coo_array(MATRIX),
    "operator": sla.aslinearoperator(MATRIX),
    "ours and back": Dense(torch.from_numpy(MATRIX)).to_scipy(),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_from_scipy(source: Any, device: torch.device) -> None:
    A, M, X = from_scipy(source), torch.from_numpy(MATRIX), normal(6, 3)
    assert (A.shape, A.dtype, A.structure) == ((4, 6), F64, Structure.GENERAL)
    close(A.to_dense(), M)
    close(A @ X, M @ X)
    assert isinstance(A @ X.numpy(), np.ndarray)
    close(normal(2, 4) @ A, normal(2, 4) @ M)
    close((A @ A.T).to_dense(), M @ M.T)
    np.testing.assert_allclose(A.to_scipy() @ X.numpy(), M @ X)
    for dtype, bound in ((F64, 1e-12), (F32, 1e-5), (torch.bfloat16, 5e-2)):
        x = normal(6).to(device, dtype)
        for B in (from_scipy(source, dtype, device), A.to(device, dtype)):
            assert B.dtype == (B @ x).dtype == dtype
            assert B.device.type == (B @ x).device.type == device.type
            torch.testing.assert_close(
                (B @ x).cpu().double(), M @ x.cpu().double(), rtol=bound, atol=bound
            )


def test_dtypes_and_copies() -> None:
    for given, expected in (
        (np.float64, F64),
        (np.float32, F32),
        (np.int64, F64),
        (np.float16, F32),
    ):
        assert from_scipy(np.eye(2, dtype=given)).dtype == expected
    assert from_scipy(scipy.sparse.eye(2, dtype=np.float32)).dtype == F32
    A = from_scipy(M := np.eye(2), structure=PSD)
    M *= 3
    close(A.to_dense(), torch.eye(2, dtype=F64))
    assert A.structure == PSD
    x = torch.ones(2, dtype=F64)
    y = from_scipy(sla.LinearOperator((2, 2), matvec=lambda v: v, dtype=np.float64)) @ x
    y += 1
    close(x, torch.ones(2, dtype=F64))


def test_symmetric_operators_need_one_product() -> None:
    op = sla.LinearOperator((3, 3), matvec=lambda x: 2 * x, dtype=np.float64)
    close(normal(3) @ from_scipy(op, structure=SYMMETRIC), 2 * normal(3))


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
    with pytest.raises(ValueError, match=r"spaces of .* don.t fit"):
        Dense(normal(6, 6)) + B
    x = normal(6, seed=2).requires_grad_()
    close(torch.autograd.grad(((A + B) @ x).square().sum(), x)[0], 2 * (M + N).T @ ((M + N) @ x))
    if not scipy.sparse.issparse(B):  # a matrix of SciPy does not leave the sum to us
        close((B + A) @ X, (M + N) @ X)
        close((B - A) @ X, (N - M) @ X)


EYE = Dense(torch.eye(2))
