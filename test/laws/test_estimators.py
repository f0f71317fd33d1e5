"""Every estimator of every kind of matrix: the same numbers in each precision; what is refused, by
name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.estimate import (
    condition_number,
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    logdet,
    matrix,
    spectral_norm,
    top_eigenpairs,
    xdiag,
    xtrace,
)
from curvlinops_plus.linalg import Dense, Kronecker, Structure
from test.helpers import F64, Counted, normal, seeded


def psd(n: int, seed: int = 0) -> Tensor:
    M = normal(n, n, seed=seed)
    return M @ M.T / n + torch.eye(n, dtype=F64)


G, A = psd(3), psd(4, seed=1)
MATRIX = torch.kron(G, A)


class Users:
    """An operator of another library: PyTorch's dtype and device, products, a transpose."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.shape, self.dtype, self.device = (
            matrix,
            matrix.shape,
            matrix.dtype,
            matrix.device,
        )

    def __matmul__(self, X: Tensor) -> Tensor:
        return self.matrix @ X

    def adjoint(self) -> Users:
        return Users(self.matrix.T)


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "ours": lambda M: Dense(M, Structure.SYMMETRIC),
    "general": lambda M: Dense(M, Structure.GENERAL),
    "kronecker": lambda M: Kronecker(G.to(M), A.to(M)),
    "counted": Counted,
    "of another library": Users,
    "sparse tensor": lambda M: M.to_sparse(),
    "numpy, odd strides": lambda M: M.flip(0, 1).numpy()[::-1, ::-1],
    "scipy": lambda M: aslinearoperator(M.numpy()),
    "scipy sparse array": lambda M: scipy.sparse.csr_array(M.numpy()),
    "scipy sparse matrix": lambda M: scipy.sparse.coo_matrix(M.numpy()),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "hutchinson_trace": lambda M: hutchinson_trace(M, 5, generator=seeded(), return_error=True),
    "hutchpp_trace": lambda M: hutchpp_trace(M, 6, generator=seeded(), return_error=True),
    "xtrace": lambda M: xtrace(M, 6, "sphere", generator=seeded(), return_error=True),
    "hutchinson_diag": lambda M: hutchinson_diag(M, 5, generator=seeded(), return_error=True),
    "xdiag": lambda M: xdiag(M, 6, generator=seeded(), return_error=True),
    "hutchinson_squared_fro": lambda M: hutchinson_squared_fro(
        M, 5, generator=seeded(), return_error=True
    ),
    "logdet": lambda M: logdet(M, 3, 12, generator=seeded(), return_error=True),
    "top_eigenpairs": lambda M: top_eigenpairs(M, 2, generator=seeded(), tol=1e-6)[:1],
    "spectral_norm": lambda M: (spectral_norm(M, generator=seeded(), tol=1e-6),),
    "condition_number": lambda M: (condition_number(M, generator=seeded(), tol=1e-5),),
    "spectrum": lambda M: lanczos_approximate_spectrum(
        M, 5, 20, generator=seeded(), boundaries=(0.5, 20)
    ),
    "log spectrum": lambda M: lanczos_approximate_log_spectrum(
        M, 5, 20, generator=seeded(), boundaries=(0.5, 20)
    ),
}
every_call = pytest.mark.parametrize("call", CALLS)


@every_call
def test_every_kind_gives_the_same(call: str) -> None:
    """In double precision; single precision stays single, and half precision is computed in
    single.
    """
    expected = CALLS[call](MATRIX)
    for kind, make in KINDS.items():
        for left, right in zip(expected, CALLS[call](make(MATRIX))):
            assert isinstance(right, Tensor), kind
            assert right.dtype == F64
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-9)
    for kind in ("ours", "numpy, odd strides", "scipy", "scipy sparse array"):
        found = CALLS[call](KINDS[kind](MATRIX.float()))
        assert {t.dtype for t in found} == {torch.float32}
        torch.testing.assert_close(found[0].double(), expected[0], rtol=2e-3, atol=1e-4)
    half = MATRIX.bfloat16()
    assert {t.dtype for t in CALLS[call](half)} == {torch.float32}
    torch.testing.assert_close(
        CALLS[call](half)[0].double(), CALLS[call](half.double())[0], rtol=2e-3, atol=1e-4
    )
    found = CALLS[call](Counted(half))  # whose products are rounded
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0.3, atol=0.1)


@every_call
def test_the_user_s_modes_and_tensors(call: str) -> None:
    """Autocast changes nothing; nothing of the user's changes; NaN and infinity are noticed."""
    single = MATRIX.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[call](single)
    assert all(torch.equal(left, right) for left, right in zip(CALLS[call](single), found))
    own, before = MATRIX.clone().requires_grad_(), torch.get_rng_state()
    CALLS[call](own)
    with torch.inference_mode():
        CALLS[call](MATRIX)
    assert torch.equal(own, MATRIX)
    assert own.grad is None
    assert torch.equal(before, torch.get_rng_state())
    for bad in (float("nan"), float("inf")):
        broken = MATRIX.clone()
        broken[3, 3] = bad
        with pytest.raises(
            NumericsError, match=r"product with A has NaN or infinite.*look for them"
        ):
            CALLS[call](broken)


@every_call
def test_the_default_dtype_is_not_taken(call: str) -> None:
    torch.set_default_dtype(F64)
    try:
        found = CALLS[call](MATRIX.float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in found} == {torch.float32}


def test_other_matrices() -> None:
    """Integers of NumPy are read in double precision; rectangles of every kind."""
    found = hutchinson_trace(scipy.sparse.csr_array(np.diag([1, 2, 3])), 2)
    torch.testing.assert_close(found, torch.tensor(6.0, dtype=F64))
    wide = normal(4, 9)
    for make in (Counted, Dense, lambda M: M.numpy(), KINDS["scipy"], KINDS["scipy sparse array"]):
        for M in (wide, wide.T.contiguous()):
            expected = hutchinson_squared_fro(M, 3, generator=seeded())
            torch.testing.assert_close(
                hutchinson_squared_fro(make(M), 3, generator=seeded()), expected
            )
            torch.testing.assert_close(spectral_norm(make(M)), torch.linalg.matrix_norm(M, 2))
            torch.testing.assert_close(
                condition_number(make(M), tol=1e-6), torch.linalg.cond(M), rtol=1e-6, atol=0
            )


def test_products_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as promised."""
    monkeypatch.setattr(matrix, "BLOCK_BYTES", 2 * MATRIX[0].nbytes)
    estimates = (
        (hutchinson_trace, 8, 2),
        (hutchpp_trace, 9, 3),
        (xtrace, 8, 4),
        (hutchinson_diag, 8, 2),
    )
    for estimate, num, most in estimates:
        # Of vectors that happen to be parallel one would be left out.
        estimate(M := Counted(MATRIX), num, generator=seeded())
        assert (sum(M.seen), max(M.seen)) == (num, most)
    monkeypatch.setattr(
        matrix, "BLOCK_BYTES", 3 * 16 * MATRIX[0].nbytes
    )  # each vector with those of its steps
    logdet(M := Counted(MATRIX), num_probes=5, num_steps=12)
    assert M.seen == [2] + [3] * 12 + [2] * 12  # two look for symmetry
    lanczos_approximate_spectrum(M := Counted(MATRIX), 6, num_repeats=10, boundaries=(0, 20))
    assert M.seen == [2] + [9] * 6 + [1] * 6


# What is refused
# --------------------------------------------------------------------------------------------------

ESTIMATORS = [
    hutchinson_trace,
    hutchpp_trace,
    xtrace,
    hutchinson_diag,
    xdiag,
    hutchinson_squared_fro,
]
I12 = torch.eye(12)


@pytest.mark.parametrize(
    ("estimate", "least"),
    [*zip(ESTIMATORS, (1, 3, 2, 1, 2, 1))],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_numbers_of_products(estimate: Callable, least: int) -> None:
    """At least one draw, two for a standard error, fewer than the whole matrix takes."""
    assert torch.isfinite(estimate(I12, np.int64(least))).all()
    assert torch.isfinite(torch.stack(estimate(I12, 2 * least, return_error=True))).all()
    assert torch.isnan(estimate(I12, least, return_error=True)[1]).all()
    for num in (0, 12):
        with pytest.raises(
            ValueError, match=rf"num_matvecs \({num}\) must be at least 1 and less than A's size"
        ):
            estimate(I12, num)
    if estimate is not hutchinson_squared_fro:
        with pytest.raises(ValueError, match=r"Operator must be square. Got shape \(5, 4\)"):
            estimate(Dense(torch.zeros(5, 4)), 6)
