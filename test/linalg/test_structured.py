"""What is special about matrices that hold their entries: live tensors, zero eigenvalues, random factors."""

from __future__ import annotations

from math import inf, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlinops_plus.errors import NoClosedForm, NumericsError, SingularMatrixError
from curvlinops_plus.linalg import (
    Dense,
    Diagonal,
    Eigendecomposed,
    HeuristicDamping,
    IdentityLinearOperator,
    Kronecker,
    LinearOperator,
    Space,
    Structure,
)

from .cases import CASES, F64, batched_kron, eye_like, normal, orthogonal, psd
from .test_laws import apply_form, close

PSD = Structure.PSD
size = st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(
    size,
    size,
    st.sampled_from(["dense", "diagonal", "identity"]),
    st.sampled_from(["dense", "diagonal"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_random_kronecker(o: int, i: int, kind_G: str, kind_A: str, batch_G: bool, batch_A: bool, K: int) -> None:
    def factor(kind: str, d: int, batched: bool, seed: int):
        if kind == "identity":
            return IdentityLinearOperator([(d,)], dtype=F64), torch.eye(d, dtype=F64)
        if kind == "diagonal":
            vector = normal(*([2] if batched else []), d, seed=seed).abs() + 0.1
            return Diagonal(vector), torch.diag_embed(vector)
        M = psd(*([2] if batched else []), d, d, seed=seed)
        return M, M

    (G, dense_G), (A, dense_A) = factor(kind_G, o, batch_G, 1), factor(kind_A, i, batch_A, 2)
    K_op = Kronecker(G, A)
    batched = dense_G.ndim == 3 or dense_A.ndim == 3
    M = batched_kron(dense_G, dense_A) if batched else torch.kron(dense_G, dense_A)
    X = normal(len(M), K)
    close(K_op.to_dense(), M)
    close(K_op @ X, M @ X)
    close(K_op @ X[:, 0], M @ X[:, 0])
    close(K_op @ X.T.contiguous().T, M @ X)  # columns one after another in memory
    close(K_op.diagonal(), M.diagonal())
    close(K_op.trace, M.trace())
    close(K_op.logdet, torch.logdet(M))
    close(K_op.frobenius_norm, torch.linalg.matrix_norm(M))
    close(K_op.eigenvalues().sort().values, torch.linalg.eigvalsh(M))
    for damping in (0.0, 0.3):
        close(K_op.inverse(damping).to_dense(), torch.linalg.inv(M + damping * eye_like(M)))
    if batched or kind_G == "dense":
        pair = K_op.inverse((0.2, 0.1)).to_dense()
        damped = [
            dense + d * eye_like(dense[0] if dense.ndim == 3 else dense)
            for dense, d in ((dense_G, 0.1), (dense_A, 0.2))
        ]
        close(pair, torch.linalg.inv(batched_kron(*damped) if batched else torch.kron(*damped)))


def test_convention() -> None:
    G, A, W = normal(2, 2), normal(3, 3, seed=1), normal(2, 3, seed=2)
    close((Kronecker(G, A, Structure.GENERAL) @ W.flatten()).view(2, 3), G @ W @ A.T)


# Live tensors --------------------------------------------------------------------------------------------------------


# Zero eigenvalues ----------------------------------------------------------------------------------------------------


def low_rank(d: int, rank: int, dtype: torch.dtype = F64) -> torch.Tensor:
    rows = normal(rank, d).to(dtype)
    return rows.T @ rows


def singular_operators(dtype: torch.dtype) -> dict[str, LinearOperator]:
    M = low_rank(5, 2, dtype)
    Q = Kronecker(orthogonal(2).to(dtype), orthogonal(2, 1).to(dtype), Structure.GENERAL)
    return {
        "dense": Dense(M, PSD),
        "diagonal": Diagonal(torch.tensor([1.0, 0.0], dtype=dtype)),
        "kronecker G": Kronecker(M, psd(2, 2).to(dtype)),
        "kronecker A": Kronecker(psd(2, 2).to(dtype), M),
        "kronecker both": Kronecker(M, M),
        "eigendecomposed": Eigendecomposed(Q, torch.tensor([1.0, 1e-20, -1e-20, 2.0], dtype=dtype)),
        "zero": Dense(0 * M, PSD),
        "scaled": 3 * Dense(M, PSD),
    }


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("name", singular_operators(F64))
def test_singular_matrices(name: str, dtype: torch.dtype) -> None:
    A = singular_operators(dtype)[name]
    M = A.to_dense()
    assert A.logdet.item() == -inf
    assert A.det.item() == 0
    assert bool((A.eigenvalues() >= 0).all())
    for function in (lambda: A.inverse(), lambda: A.inverse(torch.tensor(0.0)), lambda: A.power(-0.5)):
        with pytest.raises(
            SingularMatrixError, match=r"singular: \d+ of its \d+ eigenvalues count as zero.*(damping=|any positive)"
        ):
            function()
    root = A.power(0.5).to_dense()
    torch.testing.assert_close(root @ root, M, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-9)
    assert torch.isfinite(A.shift(0.1).logdet)
    inverse = A.inverse(0.1)
    assert torch.isfinite(inverse.logdet)
    torch.testing.assert_close(inverse.logdet, -A.shift(0.1).logdet, rtol=1e-3, atol=1e-3)
    draws = A.sample(torch.Generator().manual_seed(0), 3)
    assert torch.isfinite(draws).all()


def test_singular_indefinite() -> None:
    A = Dense(torch.zeros(2, 2), Structure.SYMMETRIC)
    assert A.logdet == -inf
    with pytest.raises(SingularMatrixError, match="singular or not finite; add a damping"):
        A.inverse()
    assert A.inverse(2.0).to_dense().diagonal().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("d", [33, 150])
@pytest.mark.parametrize("least", [0.0, 0.1, 0.6, 1.5, 4.0, 1e3])
def test_determinants_follow_the_rule_of_eigenvalues(
    dtype: torch.dtype, d: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eigenvalue counts as zero below `d eps` times the largest; decompositions only where it is next to that."""
    Q = orthogonal(d, seed=1)
    values = torch.linspace(0.1, 1.0, d, dtype=F64)
    values[0] = least * d * torch.finfo(dtype).eps
    M = ((Q * values) @ Q.T).to(dtype)
    want = values.log().sum().to(dtype) if least > 1 else torch.tensor(-inf, dtype=dtype)
    if least in (0.0, 0.1, 1e3):
        monkeypatch.setattr(torch.linalg, "eigh", lambda _: pytest.fail("decomposed"))
    for A in (Dense(M, PSD), Dense(torch.stack([M, M]), PSD)):
        slack = {"rtol": 0.05 if least < 10 else 1e-3, "atol": 0.0}
        torch.testing.assert_close(A.logdet, want * prod(A.batch), **slack)
        assert bool((A.slogdets()[0] == (least > 1)).all())
    with pytest.raises(NumericsError, match="NaN or infinite"):
        Dense(M * torch.nan, PSD).logdet  # noqa: B018


def test_determinants_of_a_batch_with_one_singular_matrix() -> None:
    M = torch.stack([torch.eye(40), torch.zeros(40, 40)])
    assert Dense(M, PSD).slogdets()[1].tolist() == [0.0, -inf]


def test_negative_determinants() -> None:
    D = Diagonal(torch.tensor([2.0, -1.0]))
    assert D.det == -2
    assert D.logdet.isnan()
    assert Kronecker(D, Diagonal(torch.tensor([1.0, 3.0]))).det.item() == pytest.approx(36.0)


# Messages ------------------------------------------------------------------------------------------------------------


MESSAGES = [
    (lambda: Dense(torch.zeros(2, 3), PSD), ValueError, r"expected a PSD matrix to be square, got \[2, 3\]"),
    (lambda: Dense(torch.zeros(4, 2, 3)), ValueError, "expected a batch of matrices to be square"),
    (
        lambda: Dense(torch.zeros(3)),
        ValueError,
        r"Dense: expected a real tensor with 2 axes, or 3 for a batch; got .*\[3\]",
    ),
    (
        lambda: Diagonal(torch.zeros(2, dtype=torch.int64)),
        ValueError,
        "Diagonal: expected a real tensor .* got torch.int64",
    ),
    (lambda: Diagonal([1.0]), ValueError, "got list"),  # type: ignore[arg-type]
    (lambda: Dense(torch.zeros(2, 3)).trace, ValueError, "Only a square matrix has a trace"),
    (lambda: Dense(torch.eye(2)).eigenvalues(), NoClosedForm, "no closed form of `eigenvalues`: .* A.to_dense.*eigsh"),
    (
        lambda: Dense(torch.eye(2)).power(0.5),
        ValueError,
        "Expected a positive semi-definite matrix, got Dense.*real powers",
    ),
    (lambda: Dense(torch.eye(2)).sample(), ValueError, "only those are covariances"),
    (
        lambda: Dense(torch.eye(2)).quadratic_form(torch.ones(3)),
        ValueError,
        r"J of shape \[2\] or \[..., m, 2\], got \[3\]",
    ),
    (
        lambda: Kronecker(torch.zeros(2, 2, 2), torch.zeros(3, 2, 2)),
        ValueError,
        "equal batches, got G with 2 and A with 3",
    ),
    (lambda: Kronecker(torch.eye(2), torch.eye(2, dtype=F64)), ValueError, "G torch.float32 .* A torch.float64"),
    (lambda: Kronecker(torch.eye(2), [[1.0]]), ValueError, "Factor A: expected a tensor, Dense, .* got list"),  # type: ignore[arg-type]
    (
        lambda: Kronecker(torch.full((2, 2), torch.nan), torch.eye(2)).logdet,
        NumericsError,
        "factor G: .*NaN or infinite",
    ),
    (lambda: Kronecker(torch.eye(2), torch.zeros(2, 2)).inverse(), SingularMatrixError, "factor A: .*singular"),
    (lambda: Eigendecomposed(Dense(torch.eye(2)), torch.ones(3)), ValueError, r"values \[n\], got \[2, 2\] and \[3\]"),
    (
        lambda: Eigendecomposed(Dense(torch.eye(2)), torch.ones(2, dtype=F64)),
        ValueError,
        "basis and values in one dtype",
    ),
]


@pytest.mark.parametrize(("function", "error", "message"), MESSAGES)
def test_messages(function, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_gpu(case) -> None:
    A, M = case.make(F64)
    if case.name in ("only products", "shifted products"):
        return
    B = A.to("cuda")
    assert B.device.type == "cuda"
    X = normal(A.shape[1], 3)
    close((B @ X.cuda()).cpu(), M @ X)
    close(torch.from_numpy(B @ X.numpy()), M @ X)
    for form in ("trace", "logdet", "frobenius_norm", "diagonal"):
        if form not in case.without:
            torch.testing.assert_close(apply_form(B, form).cpu(), apply_form(A, form), equal_nan=True)
    if "damped_inverse" not in case.without:
        close(B.inverse(0.1).to_dense().cpu(), A.inverse(0.1).to_dense())
    if "sample" not in case.without:  # eigenvectors have a sign, so draws agree in distribution only
        assert B.sample(torch.Generator().manual_seed(0)).device.type == "cuda"


# Spaces of a formed matrix -------------------------------------------------------------------------------------------

NAMED = Space.from_shapes({"w": (2, 1), "b": (2,)})


def test_spaces_of_a_rectangular_matrix() -> None:
    M = normal(3, 4)
    A = Dense(M, in_space=NAMED, out_space=Space.from_shapes({"y": (3, 1)}))
    assert (A @ {"w": torch.ones(2, 1, dtype=F64), "b": torch.ones(2, dtype=F64)})["y"].shape == (3, 1)
    assert A.T.in_space.names == ["y"]
    assert A.T.out_space == NAMED
    square = Dense(psd(4, 4) + torch.triu(psd(4, 4)), in_space=NAMED, out_space=Space.from_shapes({"y": (4,)}))
    inverse = square.inverse()
    assert (inverse.in_space.names, inverse.out_space.names) == (["y"], ["w", "b"])
    with pytest.raises(ValueError, match=r"expected spaces of 3 rows and 5 columns, got .* and Space\(w: \[2, 1\]"):
        Dense(normal(3, 5), in_space=NAMED)


def test_heuristic_damping_of_a_multiple() -> None:
    """`c G ⊗ A` is the product of `c G` and `A`; dampings of factors are for inverses."""
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G, A = root @ root.T, torch.diag(torch.arange(1.0, 4.0, dtype=torch.float64))
    K, rule = Kronecker(G, A), HeuristicDamping(0.1)
    expected = Kronecker(2.5 * G, A).inverse(rule).to_dense()
    assert torch.allclose((2.5 * K).inverse(rule).to_dense(), expected, rtol=1e-12)
    expected = Kronecker(2.5 * G, A).inverse((0.1, 0.3)).to_dense()
    assert torch.allclose((2.5 * K).inverse((0.1, 0.3)).to_dense(), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="need a positive multiple of a Kronecker product"):
        (-1.0 * K).inverse(rule)
    for wrong in (lambda: K.power(-1.0, rule), lambda: K.shift(rule), lambda: (2.5 * K).power(-1.0, rule)):
        with pytest.raises(TypeError, match=r"one number, got a pair\. Pairs of dampings"):
            wrong()
