"""Arithmetic, what it refuses, and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg import (
    Dense,
    IdentityLinearOperator,
    LinearOperator,
    Scaled,
    Shifted,
    Space,
    Structure,
    Sum,
)

from .cases import F64, OnlyProducts, eye_like, normal, psd, symmetric
from .test_laws import close

PSD, SYMMETRIC, GENERAL = Structure.PSD, Structure.SYMMETRIC, Structure.GENERAL


def test_structure_of_results() -> None:
    P, S, G = Dense(psd(3, 3), PSD), Dense(symmetric(3), SYMMETRIC), Dense(normal(3, 3))
    assert (P + P).structure == PSD
    assert (P + S).structure == SYMMETRIC
    assert (P - P).structure == SYMMETRIC
    assert (P + G).structure == GENERAL
    assert (2 * P).structure == PSD
    assert (-P).structure == (-S).structure == SYMMETRIC
    assert (-G).structure == GENERAL
    assert P.shift(1.0).structure == PSD
    assert P.shift(-1.0).structure == SYMMETRIC
    assert (P @ P).structure == GENERAL


def test_adding_multiples_of_the_identity_shifts() -> None:
    M = psd(4, 4)
    A, eye = Dense(M, PSD), IdentityLinearOperator([(4,)], dtype=F64)
    for shifted, delta in (
        (A + eye, 1.0),
        (eye + A, 1.0),
        (A + 3 * eye, 3.0),
        (2 * eye + A, 2.0),
        (A - 0.1 * eye, -0.1),
        (A + eye / 2, 0.5),
    ):
        assert isinstance(shifted, Shifted)
        close(shifted.to_dense(), M + delta * eye_like(M))
        close(shifted.logdet, torch.logdet(M + delta * eye_like(M)))
    twice = (A + eye) + eye
    assert isinstance(twice, Shifted)
    assert twice.A is A
    close((eye - A).to_dense(), eye_like(M) - M)
    close((eye + 2 * eye).logdet, 4 * torch.tensor(3.0, dtype=F64).log())
    close((eye.shift(1.0)).to_dense(), 2 * eye_like(M))


def test_nested_arithmetic() -> None:
    M, N = normal(3, 3), normal(3, 3, seed=1)
    A, B = Dense(M), Dense(N)
    close((2 * A - B.T @ A / 4).to_dense(), 2 * M - N.T @ M / 4)
    close((A @ B).T.to_dense(), (M @ N).T)
    close((-(A + B)).T.to_dense(), -(M + N).T)
    close((A @ B).inverse().to_dense(), torch.linalg.inv(M @ N))
    assert isinstance(3 * (2 * A), Scaled)
    close((3 * (2 * A)).to_dense(), 6 * M)


REFUSED = [
    (
        lambda A: A + Dense(torch.eye(2)),
        ValueError,
        r"equal spaces, got Dense\(\[\[3\]\] x \[\[3\]\]\) and Dense\(\[\[2\]\]",
    ),
    (lambda A: A @ Dense(torch.eye(2)), ValueError, r"spaces inside a product to be equal, got Dense.* @ Dense"),
    (
        lambda A: A + Dense(torch.eye(3, dtype=F64)),
        TypeError,
        "one dtype and on one device, got torch.float32 on cpu and torch.float64",
    ),
    (lambda A: A @ Dense(torch.eye(3, dtype=F64)), TypeError, "convert one of them with .to"),
    (lambda A: A * torch.ones(3), TypeError, r"the factor of a Dense to be one number.*got a tensor of shape \[3\]"),
    (lambda A: torch.ones(3) * A, TypeError, "the factor of a Dense"),
    (lambda A: A * A, TypeError, "got Dense"),
    (lambda A: A / "2", TypeError, "the divisor of a Dense to be one number"),
    (lambda A: A + 1.0, TypeError, "unsupported operand"),
    (lambda A: A - torch.ones(3, 3), TypeError, "unsupported operand"),
    (
        lambda A: A + 1,
        TypeError,
        r"operand for \+: int with Dense.* Add c times the identity by A.shift\(c\), a matrix M",
    ),
    (lambda A: 1 - A, TypeError, "unsupported operand for -: int with Dense"),
    (lambda A: torch.ones(3, 3) + A, TypeError, r"\+: Tensor with Dense.*by A \+ Dense\(M\)"),
    (lambda A: np.ones((3, 3)) - A, TypeError, "-: ndarray with Dense"),
    (lambda A: A + "A", TypeError, r"unsupported operand type\(s\)"),
    (lambda A: A * A, TypeError, r"got Dense\(3 x 3.*\); the product of two matrices is A @ B"),
    (
        lambda A: np.asarray(A),
        TypeError,
        r"Dense.* is not an array. For its entries write A.to_dense\(\).cpu\(\).numpy",
    ),
    (lambda A: np.dot(A, np.ones(3)), TypeError, r"is not an array.*for SciPy A.to_scipy\(\); products .* are A @ x"),
    (
        lambda A: A @ torch.ones(3, dtype=F64),
        TypeError,
        "in torch.float32, the dtype of the operator, got torch.float64",
    ),
    (lambda A: A @ [torch.ones(3, dtype=F64)], TypeError, 'tensor "0" in torch.float32, .* got torch.float64'),
    (lambda A: A @ torch.ones(3, dtype=torch.long), TypeError, r"got torch.int64; convert it: X.to\(torch.float32\)"),
    (lambda A: A @ torch.ones(3, dtype=torch.cfloat), TypeError, "to be real.* multiply X.real and X.imag apart"),
    (lambda A: A @ torch.eye(3).to_sparse(), TypeError, r"dense tensor, got a torch.sparse_coo one; .*X.to_dense\(\)"),
    (lambda A: A.sample(3), TypeError, r"a torch.Generator, got int 3; for a seed write .*manual_seed.* draws num="),
    (lambda A: A.sample(num=1.5), TypeError, "num to be an integer, the number of draws, got 1.5"),
    (lambda A: A.sample(num=-1), ValueError, "num to be at least 0, got -1"),
    (lambda A: A.quadratic_form(None), TypeError, r"Dense.*quadratic_form\(J\): Expected a tensor .*; got NoneType"),
    (lambda A: A.quadratic_form([1.0]), TypeError, r'"0": expected a tensor of shape \[3\], got float'),
    (lambda A: A.quadratic_form({"w": torch.ones(3)}), ValueError, r"missing \['0'\], unexpected \['w'\]"),
    (lambda A: A.quadratic_form(torch.tensor(1.0)), ValueError, r"J of shape \[3\] or \[..., m, 3\], got \[\]"),
    (lambda A: A[:, [0]].quadratic_form(torch.ones(1)), ValueError, "Only a square matrix has quadratic forms, got"),
    (
        lambda A: Sum(A, A).logdet,
        NoClosedForm,
        r"Sum\(3 x 3.*no closed form of `logdet`: .*A.materialize\(\).logdet.*Lanczos",
    ),
    (lambda A: (A @ A).inverse(0.1), NoClosedForm, "Product.*CGInverseLinearOperator"),
    (lambda A: (A + A @ A).to_scipy() @ np.ones(3, dtype=complex), TypeError, "real numbers, got dtype complex128"),
]


@pytest.mark.parametrize(("function", "error", "message"), REFUSED)
def test_refused(function, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function(Dense(torch.eye(3), PSD))


@pytest.mark.parametrize("wide", [torch.float32, F64])
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16, torch.float32])
def test_narrower_vectors_are_widened(narrow: torch.dtype, wide: torch.dtype) -> None:
    """The result is that of the widened vector, in the operator's dtype."""
    A, X = Dense(normal(3, 4).to(wide)), normal(4, 2).to(narrow)
    expected = A.to_dense() @ X.to(wide)
    assert (A @ X).dtype == wide
    close(A @ X, expected)
    close((A @ [X])[0], expected)
    close(X.T @ A.T, expected.T)
    close((A.T @ A).quadratic_form(X.T), expected.T @ expected)


def test_a_quadratic_form_of_one_vector_is_a_number() -> None:
    space = Space.from_shapes({"a": (2, 2), "b": (2,)})
    M, v = psd(6, 6), normal(6).requires_grad_()
    A, tree = OnlyProducts(M, space), space.unflatten(v)
    for J in (v, tree, list(tree.values()), tuple(tree.values())):
        number = A.quadratic_form(J)
        assert number.shape == ()
        close(number, v @ M @ v)
    close(torch.autograd.grad(A.quadratic_form(v), v)[0], 2 * M @ v)
    array = A.quadratic_form(v.detach().numpy())
    assert isinstance(array, np.ndarray)
    close(torch.tensor(array), v @ M @ v)
    rows = A.quadratic_form(normal(5, 3, 6).numpy())
    close(torch.tensor(rows), normal(5, 3, 6) @ M @ normal(5, 3, 6).mT)
    assert A.quadratic_form(torch.zeros(0, 6, dtype=F64)).shape == (0, 0)


def test_sum() -> None:
    M, N = psd(3, 3), psd(3, 3, seed=1)
    A, B = Dense(M, PSD), Dense(N, PSD)
    close(sum([A, B, A]).to_dense(), 2 * M + N)
    assert sum([A]) is A


class Nothing(LinearOperator):
    """Not symmetric, and cannot be transposed."""

    in_space, dtype, device = Space.from_shapes([(3,)]), F64, torch.device("cpu")  # type: ignore[assignment]

    def _matmat(self, X: torch.Tensor) -> torch.Tensor:
        return X.cumsum(0)


def test_an_operator_without_adjoint() -> None:
    A = Nothing()
    assert (A @ torch.ones(3, dtype=F64)).tolist() == [1, 2, 3]
    with pytest.raises(
        NotImplementedError, match=r"Nothing has no adjoint: .*define `_rmatmat\(self, X\)`.*Structure.SYMMETRIC"
    ):
        _ = A.T @ torch.ones(3, dtype=F64)
    assert A.to("cpu") is A
    for there in (("meta",), (torch.float32,), (None, torch.float32)):
        with pytest.raises(NotImplementedError, match="Nothing owns no tensors that could be moved"):
            A.to(*there)


def test_names_and_numbers_of_other_libraries() -> None:
    """`A.H` is SciPy's adjoint, `A.to(dtype)` PyTorch's conversion; division by 0 says of what."""
    A = Dense(normal(3, 4))
    x = normal(3)
    assert torch.equal(A.H @ x, A.T @ x)
    torch.testing.assert_close(A.H @ x, A.to_dense().T @ x)
    assert (2 * A).H.shape == (4, 3)
    there = A.to(torch.float32)
    assert there.dtype == torch.float32
    assert torch.equal(there.to_dense(), A.to_dense().float())
    for zero in (0, 0.0, torch.tensor(0.0)):
        with pytest.raises(ZeroDivisionError, match=r"Dense\(3 x 4, .*\) can't be divided by 0"):
            _ = A / zero


def test_attributes_by_constructor_or_class() -> None:
    space, out = Space.from_shapes({"w": (2,)}), Space.from_shapes({"y": (2,)})

    class Twice(LinearOperator):
        device = torch.device("cpu")

        def _matmat(self, X: torch.Tensor) -> torch.Tensor:
            return 2 * X

    A = Twice(space, F64)
    assert (A.in_space, A.out_space, A.structure, A.device.type) == (space, space, GENERAL, "cpu")
    assert Twice(space, F64, structure=PSD).structure == PSD
    assert Twice(space, F64, out_space=out).T.in_space is out
    (y,) = (Twice(space, F64, out_space=out) @ {"w": torch.ones(2, dtype=F64)}).items()
    assert (y[0], y[1].tolist()) == ("y", [2, 2])
    for missing, B in {"dtype": Twice(space), "in_space": Twice(dtype=F64)}.items():
        with pytest.raises(AttributeError, match=rf"Twice has no `{missing}`: pass it to LinearOperator.__init__"):
            B @ torch.ones(2, dtype=F64)


# SciPy ---------------------------------------------------------------------------------------------------------------


def test_scipy_dtypes() -> None:
    for dtype in (torch.float32, F64, torch.bfloat16):
        S = Dense(torch.eye(3, dtype=dtype)).to_scipy()
        assert S.dtype == np.float64
        assert (S @ np.ones(3)).dtype == np.float64
        assert (S @ np.ones(3, dtype=np.float32)).dtype == np.float32
        narrow = Dense(torch.eye(3, dtype=dtype)).to_scipy(np.float32)
        assert narrow.dtype == np.float32
        assert (narrow @ np.ones(3)).dtype == np.float64
    wide = Dense(torch.eye(3)).to_scipy(dtype=np.float64)
    assert wide.dtype == np.float64
    assert (wide @ np.ones((3, 2))).dtype == np.float64
    assert (wide.H @ np.ones(3)).dtype == np.float64
