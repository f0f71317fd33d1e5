"""Gram products and their sums, Cholesky decompositions, zeros and random numbers, also of bad
input.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning, NumericsError, SingularMatrixError
from curvlinops_plus.linalg import (
    Dense,
    Kronecker,
    Structure,
    cholesky_inverse,
    eigh,
    gram,
    numerics,
    psd_clip,
)
from curvlinops_plus.linalg.gram_sum import add_gram, mirror
from test.helpers import seeded
from test.linalg.cases import F64, normal, psd

F32 = torch.float32


def near(found: Tensor, expected: Tensor) -> None:
    """Up to rounding of sums in the dtype of what was found."""
    tolerance = (
        {"rtol": 1e-12, "atol": 1e-10} if found.dtype == F64 else {"rtol": 1e-4, "atol": 1e-3}
    )
    torch.testing.assert_close(found.double(), expected.double(), **tolerance)


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize(("M", "d"), [(3, 2), (0, 3), (300, 129), (200, 600), (10, 300)])
def test_gram(M: int, d: int, dtype: torch.dtype) -> None:
    rows = normal(M, d).to(dtype)
    for memory in (rows, rows.T.contiguous().T, torch.cat([rows, rows], dim=1)[:, :d]):
        before = memory.clone()
        G = gram(memory)
        assert G.dtype == dtype
        near(G, rows.double().T @ rows.double())
        assert torch.equal(memory, before)
    for half in (torch.float16, torch.bfloat16):
        assert gram((100 * torch.ones(1000, 2)).to(half))[0, 0] == 1e7  # overflows in float16


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("d", [1, 3, 130, 600])
def test_sums_of_gram_matrices(d: int, dtype: torch.dtype) -> None:
    """Of pieces of every length, in place in one triangle, of which the other one is read in
    between.
    """
    total, expected = torch.zeros(d, d, dtype=dtype), torch.zeros(d, d, dtype=F64)
    turned = torch.zeros(d, d, dtype=dtype).T  # in another order in memory
    for step, M in enumerate((0, 1, 300, 70)):
        rows = normal(M, d, seed=step).to(dtype)
        assert add_gram(rows, total) is total
        add_gram(rows, turned)
        expected += rows.double().T @ rows.double()
        rows.fill_(torch.nan)  # nobody's tensor is kept
        if step > 1:
            near(mirror(total), expected)
            near(mirror(turned), expected)


def test_cholesky_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch; repeated in double precision; what it says where that fails, too, is a damping
    that works.
    """
    M, cholesky = psd(4, 4), torch.linalg.cholesky_ex
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(
            cholesky_inverse(M, 0.1), torch.linalg.inv(M + 0.1 * torch.eye(4))
        )
    batch, damping = psd(2, 3, 3), torch.tensor([0.1, 0.2], dtype=F64)
    expected = torch.linalg.inv(batch + damping[:, None, None] * torch.eye(3))
    torch.testing.assert_close(cholesky_inverse(batch, damping), expected)
    assert cholesky_inverse(torch.eye(2, dtype=torch.float16)).dtype == torch.float16
    low = gram(normal(3, 40).float())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        with pytest.raises(SingularMatrixError, match=r"a damping of .* would do") as caught:
            cholesky_inverse(low - 1e-3 * torch.eye(40), 1e-12)
    said = float(str(caught.value).split("a damping of ")[1].split(" ")[0])
    assert torch.isfinite(cholesky_inverse(low, said)).all()
    with pytest.raises(SingularMatrixError, match=r"with damping 1.0e-01 to 2.0e-01 is not"):
        cholesky_inverse(-torch.eye(2, dtype=F64).expand(2, 2, 2), torch.tensor([0.1, 0.2]))

    def fails_in_float32(M: Tensor) -> tuple[Tensor, Tensor]:
        L, info = cholesky(M)
        return L, info + int(M.dtype == F32)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails_in_float32)
    M = M.float()
    with pytest.warns(
        CurvatureWarning, match="of the matrix with damping 1.0e-01 failed in float32"
    ):
        torch.testing.assert_close(
            cholesky_inverse(M, 0.1), torch.linalg.inv(M + 0.1 * torch.eye(4))
        )
    with pytest.raises(
        SingularMatrixError, match=r"with damping 1.0e-01 is not positive definite in torch.float32"
    ):
        cholesky_inverse(M, 0.1, retry_double_precision=False)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("function", [eigh, cholesky_inverse])
def test_matrices_that_are_not_finite(function: Any, bad: float) -> None:
    M = torch.eye(3)
    M[1, 2] = bad
    with pytest.raises(
        NumericsError,
        match=r"the matrix \[3, 3\] has 1 entries that are NaN or infinite.*half precis",
    ):
        function(M)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_inverse_beside_an_input_of_another_scale(scale: float, dtype: torch.dtype) -> None:
    """Small eigenvalues count where they are large for their rows; of a rank that is low, the
    others don't.
    """
    X, v = normal(500, 8) @ normal(8, 8, seed=1), torch.ones(8, dtype=F64)
    X[:, 0] = scale * (1 + 0.3 * normal(500))
    M = X.T @ X / 500
    values, Q = torch.linalg.eigh(M + 1e-4 * torch.eye(8, dtype=F64))
    for power in (-1.0, -0.5):
        found = Dense(M.to(dtype), Structure.PSD).power(power, 1e-4) @ v.to(dtype)
        twin = Q @ (values**power * (Q.T @ v))
        assert (found.double() - twin).norm() < 2e3 * torch.finfo(dtype).eps * twin.norm()
    assert int((Dense((X[:3].T @ X[:3]).to(dtype), Structure.PSD).eigenvalues() > 0).sum()) == 3


def test_zeros_norms_and_random_numbers() -> None:
    values = torch.tensor([[-1e-3, 1e-9, 1.0], [0.0, 0.0, 0.0], [-3.0, -2.0, -1.0]])
    assert psd_clip(values).tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert torch.equal(psd_clip(values[0], rtol=0.0), torch.tensor([0.0, 1e-9, 1.0]))
    eps = torch.finfo(F64).eps
    assert psd_clip(torch.tensor([2 * eps, 4 * eps, 1.0], dtype=F64)).tolist() == [0, 4 * eps, 1]
    # Above √eps times its own scale an eigenvalue counts, but not above d times that, which none
    # can be.
    assert psd_clip(torch.tensor([1e-9, 1.0]), scales=lambda: torch.tensor([1e-9, 0.5]))[0] > 0
    assert psd_clip(torch.tensor([1e-9, 1.0]), scales=lambda: torch.tensor([1e-10, 0.5]))[0] == 0
    G, A = (s * normal(4, 4).float() for s in (1e-30, 1e25))
    near(
        Kronecker(Dense(G), Dense(A)).frobenius_norm * 1e5,
        G.double().norm() * A.double().norm() * 1e5,
    )
    like = torch.empty((), dtype=F64)
    draws = numerics.standard_normal(3, 4000, seeded(), like)
    assert torch.equal(draws[:, :2], numerics.standard_normal(2, 4000, seeded(), like))
    assert abs(draws.mean()) < 4 / 12000**0.5
    assert abs(draws.square().mean() - 1) < 4 * (2 / 12000) ** 0.5
