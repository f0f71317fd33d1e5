"""Matrices that hold their entries, and products of them: live tensors and zero eigenvalues."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning, SingularMatrixError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Eigendecomposed,
    Kronecker,
    Layout,
    LinearOperator,
    Space,
    Structure,
)
from test.helpers import seeded
from test.linalg.cases import F64, eye_like, normal, orthogonal, psd
from test.linalg.test_laws import close

PSD, GENERAL = Structure.PSD, Structure.GENERAL


# Remembered decompositions
# ---------------------------------------------------------------------------------------


def test_decompositions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until entries change, and never with a graph."""
    M, calls, eigh = psd(4, 4), [], torch.linalg.eigh
    A = Dense(M, PSD)
    monkeypatch.setattr(torch.linalg, "eigh", lambda X: calls.append(1) or eigh(X))
    for _ in range(3):
        _ = A.logdet, A.eigenvalues(), A.shift(0.1).logdet, A.power(-0.5), A.sample()
    close((2 * A).eigenvalues(), 2 * A.eigenvalues())
    assert len(calls) == 1
    M.add_(torch.eye(4, dtype=F64))
    A.eigenvalues()
    assert len(calls) == 2
    A = Dense(M.requires_grad_(), PSD)
    for _ in range(2):  # a remembered graph could not be used twice
        (grad,) = torch.autograd.grad(A.logdet, M)
        close((grad + grad.T) / 2, torch.linalg.inv(M).detach())


# Zero eigenvalues
# --------------------------------------------------------------------------------------------------


def low_rank(d: int, rank: int, dtype: torch.dtype = F64) -> Tensor:
    rows = normal(rank, d).to(dtype)
    return rows.T @ rows


def singular_operators(dtype: torch.dtype) -> dict[str, LinearOperator]:
    M = low_rank(5, 2, dtype)
    Q = Kronecker(orthogonal(2).to(dtype), orthogonal(2, 1).to(dtype), GENERAL)
    return {
        "dense": Dense(M, PSD),
        "diagonal": Diagonal(torch.tensor([1.0, 0.0], dtype=dtype)),
        "kronecker G": Kronecker(M, psd(2, 2).to(dtype)),
        "kronecker both": Kronecker(M, M),
        "eigendecomposed": Eigendecomposed(Q, torch.tensor([1.0, 1e-20, -1e-20, 2.0], dtype=dtype)),
        "eigendecomposed, positive": Eigendecomposed(
            Q, torch.tensor([1.0, 1e-20, 1e-20, 2.0], dtype=dtype)
        ),
        "zero": Dense(0 * M, PSD),
        "scaled": 3 * Dense(M, PSD),
    }


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("name", singular_operators(F64))
def test_singular_matrices(name: str, dtype: torch.dtype) -> None:
    A = singular_operators(dtype)[name]
    M = A.to_dense()
    assert (A.logdet.item(), A.det.item()) == (-inf, 0)
    assert bool((A.eigenvalues() >= 0).all())
    message = r"singular: \d+ of its \d+ eigenvalues count as zero.*RelativeDamping"
    for function in (
        lambda: A.inverse(),
        lambda: A.inverse(torch.tensor(0.0)),
        lambda: A.power(-0.5),
    ):
        with pytest.raises(SingularMatrixError, match=message):
            function()
    root = A.power(0.5).to_dense()
    torch.testing.assert_close(
        root @ root, M, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-9
    )
    inverse = A.inverse(0.1)
    assert torch.isfinite(inverse.logdet)
    torch.testing.assert_close(inverse.logdet, -A.shift(0.1).logdet, rtol=1e-3, atol=1e-3)
    assert torch.isfinite(A.sample(seeded(), 3)).all()


def test_which_eigenvalues_are_zero() -> None:
    """A tolerance decides; small exact values are no zeros."""
    M = torch.diag(torch.tensor([1.0, 1e-9]))
    assert Dense(M, PSD).logdet == -inf
    assert torch.isfinite(Dense(M, PSD, rtol=0.0).logdet)
    values, of_twelve = torch.tensor([1.0, 1e-3]), torch.tensor([1.0] * 11 + [1e-6])
    assert torch.isfinite(Eigendecomposed(Dense(torch.eye(2)), values).logdet)
    assert Eigendecomposed(Dense(torch.eye(2)), values, rtol=1e-2).logdet == -inf
    # Of a Kronecker basis the size of its largest factor counts: 4 eps is below 1e-6, and 12 eps
    # above it.
    assert torch.isfinite(Eigendecomposed(Kronecker(torch.eye(3), torch.eye(4)), of_twelve).logdet)
    for A in (
        Dense(torch.diag(values.floor()), PSD),
        Kronecker(torch.diag(values.floor()), torch.eye(1)),
    ):
        inverse = A.inverse(1e-10)  # whose eigenvalues are 1 and 1e10
        torch.testing.assert_close(inverse.logdet, torch.tensor(1e10).log(), rtol=1e-4, atol=0)
        assert bool((inverse.inverse(1e-3).eigenvalues() > 0).all())


def test_other_determinants() -> None:
    """A batch with one singular matrix; negative ones; multiples of an inverse."""
    M = torch.stack([torch.eye(40), torch.zeros(40, 40)])
    assert Dense(M, PSD).slogdets()[1].tolist() == [0.0, -inf]
    inverse = Dense(torch.diag(torch.tensor([1.0, 0.0])), PSD).inverse(1e-10)
    torch.testing.assert_close((inverse / 2).logdet, inverse.logdet - 2 * torch.tensor(2.0).log())
    D = Diagonal(torch.tensor([2.0, -1.0]))
    assert D.det == -2
    assert D.logdet.isnan()
    assert Kronecker(D, Diagonal(torch.tensor([1.0, 3.0]))).det.item() == pytest.approx(36.0)


def test_float32_cholesky_that_fails_is_repeated_in_float64() -> None:
    A = Dense(torch.tensor([[1.0, 1.0], [1.0, 1.0]]) + 1e-9 * torch.eye(2), PSD)
    K = BlockDiagonal({"b": A}, {"b": Layout({"w": "d -> 1 d"}, {"w": (2,)})}, Space({"w": (2,)}))
    for B in (A, K):
        with pytest.warns(
            CurvatureWarning, match="with damping 1.0e-09 failed in float32; retrying in float64"
        ):
            inverse = B.inverse(1e-9)
        assert inverse.dtype == torch.float32
        assert inverse.to_dense()[0, 0].item() == pytest.approx(5e8, rel=1e-3)
        with pytest.raises(
            SingularMatrixError,
            match=r"definite in torch.float32; a damping of .* would do, or pass re",
        ):
            B.inverse(1e-9, retry_double_precision=False)


# Spaces
# --------------------------------------------------------------------------------------------------

NAMED = Space.from_shapes({"w": (2, 1), "b": (2,)})


def test_a_dense_matrix_keeps_its_spaces() -> None:
    M = psd(4, 4)
    A, tree = Dense(M, PSD, in_space=NAMED), {"w": normal(2, 1), "b": normal(2)}
    for B, expected in (
        (A, M),
        (A.inverse(0.3), torch.linalg.inv(M + 0.3 * eye_like(M))),
        (A.power(2), M @ M),
        (A.shift(0.3), M + 0.3 * eye_like(M)),
        (2 * A, 2 * M),
        (A.to(dtype=torch.float32).to(dtype=F64), M.float().double()),
        (Dense(M + torch.triu(M), in_space=NAMED).shift(1.0), M + torch.triu(M) + eye_like(M)),
    ):
        assert B.in_space == B.out_space == NAMED
        answer = B @ tree
        assert list(answer) == ["w", "b"]
        close(NAMED.flatten(answer), expected @ NAMED.flatten(tree))
    A = Dense(normal(3, 4), in_space=NAMED, out_space=Space.from_shapes({"y": (3, 1)}))
    assert (A @ tree)["y"].shape == (3, 1)
    assert (A.T.in_space.names, A.T.out_space) == (["y"], NAMED)
    inverse = Dense(
        M + torch.triu(M), in_space=NAMED, out_space=Space.from_shapes({"y": (4,)})
    ).inverse()
    assert (inverse.in_space.names, inverse.out_space.names) == (["y"], ["w", "b"])
    batched = Dense(psd(2, 2, 2), PSD, rtol=0.0).materialize()
    assert (batched.batch, batched.rtol) == ((), 0.0)
