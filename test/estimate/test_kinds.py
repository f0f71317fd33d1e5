"""Every kind of matrix gives the same numbers; what is no matrix, and numbers out of range, are refused by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers import F64, seeded
from scipy.sparse.linalg import LinearOperator as SciPyLinearOperator
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.estimate import logdet
from curvlinops_plus.estimate.diagonal import hutchinson_diag, xdiag
from curvlinops_plus.estimate.eigen import condition_number, spectral_norm, top_eigenpairs
from curvlinops_plus.estimate.norm import hutchinson_squared_fro
from curvlinops_plus.estimate.probes import random_vector
from curvlinops_plus.estimate.spectrum import lanczos_approximate_log_spectrum, lanczos_approximate_spectrum
from curvlinops_plus.estimate.trace import hutchinson_trace, hutchpp_trace, xtrace
from curvlinops_plus.linalg import Dense, Kronecker, LinearOperator, Structure


def psd(n: int, seed: int = 0) -> Tensor:
    M = torch.randn(n, n, dtype=F64, generator=seeded(seed))
    return M @ M.T / n + torch.eye(n, dtype=F64)


G, A = psd(3), psd(4, seed=1)
MATRIX = torch.kron(G, A)


class Foreign:
    """An operator of another library: PyTorch's dtype and device, products, a transpose."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.shape, self.dtype, self.device = matrix, matrix.shape, matrix.dtype, matrix.device

    def __matmul__(self, X: Tensor) -> Tensor:
        return self.matrix @ X

    def adjoint(self) -> Foreign:
        return Foreign(self.matrix.T)


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "ours": lambda M: Dense(M, Structure.SYMMETRIC),
    "general": lambda M: Dense(M, Structure.GENERAL),
    "kronecker": lambda M: Kronecker(G.to(M), A.to(M)),
    "foreign": Foreign,
    "sparse tensor": lambda M: M.to_sparse(),
    "numpy": lambda M: M.numpy(),
    "numpy, odd strides": lambda M: M.flip(0, 1).numpy()[::-1, ::-1],
    "scipy": lambda M: aslinearoperator(M.numpy()),
    "scipy sparse array": lambda M: scipy.sparse.csr_array(M.numpy()),
    "scipy sparse matrix": lambda M: scipy.sparse.coo_matrix(M.numpy()),
    "back from scipy": lambda M: Dense(M, Structure.SYMMETRIC).to_scipy(),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "hutchinson_trace": lambda M: hutchinson_trace(M, 5, generator=seeded(), return_error=True),
    "hutchpp_trace": lambda M: hutchpp_trace(M, 6, generator=seeded(), return_error=True),
    "xtrace": lambda M: xtrace(M, 6, generator=seeded(), return_error=True),
    "hutchinson_diag": lambda M: hutchinson_diag(M, 5, generator=seeded(), return_error=True),
    "xdiag": lambda M: xdiag(M, 6, generator=seeded(), return_error=True),
    "hutchinson_squared_fro": lambda M: hutchinson_squared_fro(M, 5, generator=seeded(), return_error=True),
    "logdet": lambda M: logdet(M, 3, 12, generator=seeded(), return_error=True),
    "top_eigenpairs": lambda M: top_eigenpairs(M, 2, generator=seeded(), tol=1e-6)[:1],
    "spectral_norm": lambda M: (spectral_norm(M, generator=seeded(), tol=1e-6),),
    "condition_number": lambda M: (condition_number(M, generator=seeded(), tol=1e-5),),
    "spectrum": lambda M: lanczos_approximate_spectrum(M, 5, 20, generator=seeded(), boundaries=(0.5, 20)),
    "log spectrum": lambda M: lanczos_approximate_log_spectrum(M, 5, 20, generator=seeded(), boundaries=(0.5, 20)),
}
every_call = pytest.mark.parametrize("call", CALLS)


@pytest.mark.parametrize("kind", KINDS)
@every_call
def test_every_kind_gives_the_same(call: str, kind: str) -> None:
    expected, found = CALLS[call](MATRIX), CALLS[call](KINDS[kind](MATRIX))
    for left, right in zip(expected, found):
        assert isinstance(right, Tensor)
        assert right.dtype == F64
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["ours", "numpy", "scipy", "scipy sparse array"])
@every_call
def test_float32_stays(call: str, kind: str) -> None:
    found = CALLS[call](KINDS[kind](MATRIX.float()))
    assert {t.dtype for t in found} == {torch.float32}
    torch.testing.assert_close(found[0].double(), CALLS[call](MATRIX)[0], rtol=2e-3, atol=1e-4)


@every_call
def test_devices(call: str, device: torch.device) -> None:
    found = CALLS[call](MATRIX.to(device))
    assert {t.device.type for t in found} == {device.type}
    torch.testing.assert_close(found[0].cpu(), CALLS[call](MATRIX)[0], rtol=1e-6, atol=1e-9)


@every_call
def test_autocast_changes_nothing(call: str) -> None:
    single = MATRIX.float()
    expected = CALLS[call](single)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[call](single)
    for left, right in zip(expected, found):
        assert torch.equal(left, right)


@every_call
def test_nothing_of_the_user_s_changes(call: str) -> None:
    matrix, before = MATRIX.clone().requires_grad_(), torch.get_rng_state()
    CALLS[call](matrix)
    with torch.inference_mode():
        CALLS[call](MATRIX)
    assert torch.equal(matrix, MATRIX)
    assert matrix.grad is None
    assert torch.equal(before, torch.get_rng_state())


def test_progress_bars(capsys: pytest.CaptureFixture[str]) -> None:
    for estimate in (hutchinson_trace, hutchpp_trace, xtrace, hutchinson_diag, xdiag, hutchinson_squared_fro):
        estimate(MATRIX, 6, progressbar=True, chunk_size=2)
        assert "6/6" in capsys.readouterr().err, estimate
    for estimate in (logdet, top_eigenpairs, spectral_norm, condition_number):
        estimate(MATRIX, progressbar=True)
        assert re.search(r"\d+it", capsys.readouterr().err), estimate
    lanczos_approximate_spectrum(MATRIX, 5, progressbar=True)
    assert "Lanczos runs" in capsys.readouterr().err
    xtrace(MATRIX, 6)
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------------------------ refusals

ESTIMATORS = [hutchinson_trace, hutchpp_trace, xtrace, hutchinson_diag, xdiag, hutchinson_squared_fro]
SQUARE = [(f, (6,)) for f in ESTIMATORS[:5]] + [
    (logdet, ()),
    (top_eigenpairs, ()),
    (lanczos_approximate_spectrum, (5,)),
]


@pytest.mark.parametrize(("estimate", "arguments"), SQUARE, ids=lambda x: getattr(x, "__name__", ""))
def test_only_square_matrices(estimate: Callable, arguments: tuple) -> None:
    for bad in (torch.zeros(5, 4), np.zeros((5, 4)), Dense(torch.zeros(5, 4)), scipy.sparse.eye_array(5, 4)):
        with pytest.raises(ValueError, match=r"Operator must be square. Got shape \(5, 4\).*hutchinson_squared_fro"):
            estimate(bad, *arguments)
    with pytest.raises(ValueError, match=r"Operator must be square. Got shape \(2, 3, 3\)"):
        estimate(torch.zeros(2, 3, 3), *arguments)
    with pytest.raises(ValueError, match=r"A must have entries. Got shape \(0, 0\)"):
        estimate(torch.zeros(0, 0), *arguments)


def test_only_matrices() -> None:
    for bad in (torch.zeros(3), torch.zeros(2, 3, 3), np.zeros(3)):
        for estimate in (spectral_norm, condition_number, lambda A: hutchinson_squared_fro(A, 1)):
            with pytest.raises(ValueError, match=r"A must be a matrix. Got shape .*expected two axes"):
                estimate(bad)
    for bad in (3, [[1.0]], "A", None):
        with pytest.raises(TypeError, match=r"Expected a LinearOperator, a tensor, a NumPy array, or a SciPy.*got "):
            xtrace(bad, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.eye(5, dtype=torch.long), "real floating-point numbers, got torch.int64; convert it"),
        (torch.eye(5, dtype=torch.complex64), "real floating-point numbers, got torch.complex64"),
        (np.eye(5, dtype=complex), "a matrix of real numbers, got ndarray of complex128"),
        (scipy.sparse.eye_array(5, dtype=complex), "real numbers, got dia_array of complex128"),
        (np.array([["a"]]), "real numbers, got ndarray of <U1"),
    ],
)
def test_only_real_numbers(bad: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        hutchinson_trace(bad, 2)


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_numbers_of_products(estimate: Callable) -> None:
    square = torch.eye(12)
    with pytest.raises(ValueError, match=r"num_matvecs \(0\) must be at least 1"):
        estimate(square, 0)
    for too_many in (12, 30):
        with pytest.raises(ValueError, match=rf"num_matvecs \({too_many}\) must be less than .*A.*whole matrix"):
            estimate(square, too_many)
    with pytest.raises(ValueError, match=r"num_matvecs \(6\) must be less than .*A"):  # n = 1 has no estimate
        estimate(torch.eye(1), 6)
    with pytest.raises(ValueError, match=r"chunk_size \(0\) must be at least 1"):
        estimate(square, 6, chunk_size=0)
    if estimate is not xdiag:
        with pytest.raises(ValueError, match=r"'gauss'. Expected 'rademacher', 'normal' or 'sphere'"):
            estimate(square, 6, "gauss")


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_counts_are_integers(estimate: Callable) -> None:
    square = torch.eye(12)
    with pytest.raises(TypeError, match=r"num_matvecs \(6.0\) must be an integer, got float; take num_matvecs=6\."):
        estimate(square, 6.0)
    with pytest.raises(TypeError, match=r"num_matvecs \(True\) must be an integer, got bool\."):
        estimate(square, True)
    with pytest.raises(TypeError, match=r"chunk_size \('2'\) must be an integer, got str\."):
        estimate(square, 6, chunk_size="2")
    expected = estimate(square, 6, chunk_size=4, generator=seeded())
    assert torch.equal(estimate(square, np.int64(6), chunk_size=np.int32(4), generator=seeded()), expected)


@pytest.mark.parametrize("seed", [0, np.random.default_rng(0)])
def test_generators_are_pytorch_s(seed: Any) -> None:
    square = torch.eye(12)
    for call in (
        *(lambda f=f: f(square, 6, generator=seed) for f in ESTIMATORS),
        lambda: logdet(square, generator=seed),
        lambda: top_eigenpairs(square, generator=seed),
        lambda: lanczos_approximate_spectrum(square, 5, generator=seed),
        lambda: random_vector(3, "normal", generator=seed),
    ):
        with pytest.raises(
            TypeError, match=rf"torch.Generator or None, got .* of type {type(seed).__name__}; for a se"
        ):
            call()


def test_divisible_numbers() -> None:
    square = torch.eye(12)
    with pytest.raises(ValueError, match=r"num_matvecs \(7\) must be divisible by 3; take 6 or 9"):
        hutchpp_trace(square, 7)
    with pytest.raises(ValueError, match=r"num_matvecs \(2\) must be divisible by 3; take 3\."):
        hutchpp_trace(square, 2)
    for estimate in (xtrace, xdiag):
        with pytest.raises(ValueError, match=r"num_matvecs \(5\) must be divisible by 2; take 4 or 6"):
            estimate(square, 5)


def test_frobenius_counts_the_smaller_side() -> None:
    for shape in ((5, 9), (9, 5)):
        with pytest.raises(ValueError, match=rf"\(5\) must be less than the minimum dimension of A.*\({shape[0]}, "):
            hutchinson_squared_fro(torch.zeros(shape), 5)


def test_errors_of_a_single_draw() -> None:
    square = torch.eye(12)
    for estimate, one, two in (
        (hutchinson_trace, 1, 2), (hutchpp_trace, 3, 6), (xtrace, 2, 4), (hutchinson_diag, 1, 2), (xdiag, 2, 4),
        (hutchinson_squared_fro, 1, 2),
    ):  # fmt: skip
        assert torch.isfinite(estimate(square, one)).all()
        with pytest.raises(
            ValueError, match=rf"standard error needs at least two draws, got 1; take num_matvecs={two}"
        ):
            estimate(square, one, return_error=True)
        assert torch.isfinite(torch.stack(estimate(square, two, return_error=True))).all()
    with pytest.raises(ValueError, match="needs at least two draws, got 1; take num_probes=2"):
        logdet(square, num_probes=1, return_error=True)


class NoAdjoint(LinearOperator):
    """Not declared symmetric, and no product from the left."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = Dense(matrix)

    in_space = property(lambda self: self.matrix.in_space)
    out_space = property(lambda self: self.matrix.out_space)
    dtype = property(lambda self: self.matrix.dtype)
    device = property(lambda self: self.matrix.device)

    def _matmat(self, X: Tensor) -> Tensor:
        return self.matrix @ X


def test_products_that_an_operator_has_not() -> None:
    wide = torch.randn(4, 9, dtype=F64, generator=seeded())
    one_way = SciPyLinearOperator((4, 9), matvec=lambda x: wide.numpy() @ x, dtype=np.float64)
    for estimate in (lambda A: hutchinson_squared_fro(A, 2), spectral_norm):
        with pytest.raises(NotImplementedError, match=r"no product with its transpose.*`rmatvec` or `rmatmat`"):
            estimate(one_way)
        with pytest.raises(NotImplementedError, match=r"NoAdjoint has no adjoint.*`_rmatmat"):
            estimate(NoAdjoint(wide))
    hutchinson_squared_fro(NoAdjoint(wide.T.contiguous()), 2)  # a tall one needs none


@every_call
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_matrices_that_are_not_finite(call: str, bad: float) -> None:
    matrix = MATRIX.clone()
    matrix[3, 3] = bad
    with pytest.raises(NumericsError, match=r"product with Tensor\(12 x 12, .* NaN or infinite.*look for them"):
        CALLS[call](matrix)


NAMES_OF_3_0_1 = {
    hutchinson_trace: ["A", "num_matvecs", "distribution"],
    hutchpp_trace: ["A", "num_matvecs", "distribution"],
    xtrace: ["A", "num_matvecs", "distribution"],
    hutchinson_diag: ["A", "num_matvecs", "distribution"],
    xdiag: ["A", "num_matvecs"],
    hutchinson_squared_fro: ["A", "num_matvecs", "distribution"],
}


@pytest.mark.parametrize("estimate", NAMES_OF_3_0_1)
def test_names_of_curvlinops_3_0_1(estimate: Callable) -> None:
    parameters = inspect.signature(estimate).parameters.values()
    positional = [p for p in parameters if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == NAMES_OF_3_0_1[estimate]
    assert [p.default for p in positional[2:]] in ([], ["rademacher"])
    assert {p.kind for p in list(parameters)[len(positional) :]} == {inspect.Parameter.KEYWORD_ONLY}
