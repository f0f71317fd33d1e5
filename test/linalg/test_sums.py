"""What sums of operators keep, follow and refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlinops_plus.errors import CurvatureWarning, NoClosedForm
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Deferred,
    Dense,
    Diagonal,
    Eigendecomposed,
    FormedSum,
    IdentityLinearOperator,
    Kronecker,
    KroneckerSum,
    LinearOperator,
    Space,
    Structure,
    Sum,
)

from .cases import F64, block_diagonal, eye_like, normal, orthogonal, psd
from .test_laws import close

PSD = Structure.PSD


def eye(n: int) -> IdentityLinearOperator:
    return IdentityLinearOperator([(n,)], dtype=F64)


def products() -> tuple[Kronecker, Kronecker]:
    return Kronecker(psd(3, 3), psd(4, 4, seed=1)), Kronecker(psd(3, 3, seed=2), psd(4, 4, seed=3))


@pytest.mark.parametrize("step", [1e-2, 1e-5])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_norm_of_a_difference_does_not_cancel(step: float, batch: tuple[int, ...], scale: float) -> None:
    """Also of terms whose factors are large and small in turn, and of three terms."""
    G, A = psd(*batch, 6, 6), psd(*batch, 5, 5, seed=1)
    H, B = G + step * psd(*batch, 6, 6, seed=2), A + step * psd(*batch, 5, 5, seed=3)
    D = Kronecker(G.float(), A.float()) - Kronecker((scale * H).float(), (B / scale).float())
    exact = D.to(F64).to_dense().norm()
    assert abs(float(D.frobenius_norm) / float(exact) - 1) < 1e-5 / step
    D = D.to(F64)
    close(D.frobenius_norm, D.to_dense().norm())
    close((D + Kronecker(G, B)).frobenius_norm, (D.to_dense() + Kronecker(G, B).to_dense()).norm())


def test_sums_follow_entries_that_change() -> None:
    """Every kind of sum holds its parts; also after its closed forms were asked for."""
    K, M = block_diagonal(F64)
    Q, d = Dense(orthogonal(4)), normal(4).abs() + 0.1
    sums: list[tuple[Callable[[], LinearOperator], Tensor]] = []

    def case(make: Callable[..., LinearOperator], *tensors: Tensor) -> None:
        sums.append((lambda: make(*tensors), tensors[0]))

    case(
        lambda G, A, H, B: 2 * Kronecker(G, A) + Kronecker(H, B),
        psd(3, 3),
        psd(4, 4),
        psd(3, 3, seed=2),
        psd(4, 4, seed=3),
    )
    case(lambda A, G, B: Kronecker(G, A) + 2 * Kronecker(G, B), psd(4, 4), psd(3, 3), psd(4, 4, seed=1))
    case(lambda M, N: 2 * Dense(M, PSD) + Dense(N, PSD), psd(4, 4), psd(4, 4, seed=1))
    case(lambda d, M: 2 * Diagonal(d) + Dense(M, PSD), d.clone(), psd(4, 4))
    case(lambda d: Diagonal(d) + 3 * Diagonal(d), d.clone())
    case(lambda v, w: Eigendecomposed(Q, v) + 2 * Eigendecomposed(Q, w), d.clone(), d + 1)
    case(lambda d: K + 2 * Diagonal(d), normal(len(M)).abs())
    for make, changing in sums:
        S = make()
        before = S.trace
        closed = not isinstance(S, BlockDiagonal)
        if closed:
            before = S.logdet
            S.inverse(0.1)
        changing *= 2
        close(S.to_dense(), make().to_dense())
        close(S @ normal(S.shape[0]), make().to_dense() @ normal(S.shape[0]))
        close(S.trace, make().to_dense().trace())
        if closed:
            D = make().to_dense()
            close(S.logdet, D.logdet())
            assert S.logdet != before
            inverse = S.inverse(0.1)
            close(inverse.to_dense(), torch.linalg.inv(D + 0.1 * eye_like(D)))
            changing /= 2
            close(inverse.to_dense(), torch.linalg.inv(D + 0.1 * eye_like(D)))  # an inverse does not follow


def number() -> Tensor:
    return torch.tensor(2.0, dtype=F64, requires_grad=True)


def test_derivatives_of_closed_forms() -> None:
    """Right where a factor is shared; refused by name elsewhere, also after a call without derivatives."""
    G, A, B = psd(3, 3), psd(4, 4), psd(4, 4, seed=1)
    for make in (
        lambda c: c * Kronecker(G, A) + Kronecker(G, B),
        lambda c: Dense(G, PSD) + c * Dense(psd(3, 3, seed=5), PSD),
    ):
        c = number()
        S = make(c)
        with torch.no_grad():
            _ = S.logdet, S.inverse(0.1)
        for form in (lambda S: S.logdet, lambda S: S.inverse(0.1).to_dense().square().sum()):
            for _ in range(2):
                (grad,) = torch.autograd.grad(form(S), c)
                dense = Dense(make(c).to_dense(), PSD)
                (expected,) = torch.autograd.grad(form(dense), c)
                close(grad, expected)
    S = number() * Kronecker(G, A) + Kronecker(psd(3, 3, seed=2), B)
    forms: dict[str, Callable[[], Any]] = {
        "logdet": lambda: S.logdet,
        "inverse": lambda: S.inverse(0.1),
        "sample": lambda: S.sample(),
        "frobenius_norm": lambda: S.frobenius_norm,
        "nearest_kronecker": lambda: S.nearest_kronecker(),
    }
    for member, form in forms.items():
        with torch.no_grad():
            form()
        with pytest.raises(NoClosedForm, match=rf"`{member}` of KroneckerSum.*not differentiable in what its terms"):
            form()
    with pytest.raises(NoClosedForm, match="`inverse` of KroneckerSum"):
        S.inverse()


def test_what_inference_mode_leaves_is_usable() -> None:
    """Closed forms that were first asked for in inference mode, then where derivatives are taken."""
    K, L = products()
    for S in (K + L, Dense(psd(12, 12), PSD) + Dense(psd(12, 12, seed=1), PSD)):
        with torch.inference_mode():
            _ = S.logdet, S.inverse()
        v = normal(12).requires_grad_()
        (grad,) = torch.autograd.grad((S.inverse() @ v).sum(), v)
        close(grad, torch.linalg.inv(S.to_dense()).sum(0))


def test_closed_forms_keep_their_precision_under_autocast() -> None:
    K, L = products()
    E = Eigendecomposed(Kronecker(orthogonal(3), orthogonal(4, 1), Structure.GENERAL), normal(12).abs() + 0.1)
    at = [0, 5, 6, 11]
    for S in (K.to(torch.float32) + L.to(torch.float32), E.to(torch.float32)[at, at]):
        with torch.autocast("cpu", torch.bfloat16):
            found = S.logdet, S.frobenius_norm
        M = S.to_dense()
        close(found[0], M.logdet())
        close(found[1], M.norm())


def test_zeros_of_exact_values_stay_small_values() -> None:
    """An inverse has eigenvalues that are known exactly, however small they are beside the largest."""
    E = Eigendecomposed(Dense(orthogonal(4)), torch.tensor([1e-12, 1.0, 2.0, 1e12], dtype=F64))
    inverse = E.inverse(1e-13)
    S = inverse + inverse
    assert isinstance(S, FormedSum)
    close(S.logdet, (2 * inverse).logdet)
    assert (
        Dense(torch.eye(2, dtype=F64), PSD, 0.0) + Dense(torch.diag(torch.tensor([1e17, 0.0]).double()), PSD, 0.0)
    ).det > 0


def test_factors_in_common() -> None:
    """The same tensor, or the identity: then the sum has what one product has."""
    G, A, B = psd(3, 3), psd(4, 4), psd(4, 4, seed=1)
    D = Diagonal(normal(4).abs())
    for S in (
        Kronecker(eye(3), A) + Kronecker(eye(3), B),
        Kronecker(G, A) + 2 * Kronecker(G, eye(4)),
        Kronecker(G, A) + Kronecker(G, D),
        Kronecker(G, eye(4)) + Kronecker(G, D),
        Kronecker(G, D) + Kronecker(eye(3), D) - Kronecker(G / 10, D),
        Kronecker(psd(2, 3, 3), A) + Kronecker(psd(2, 3, 3, seed=1), A),
    ):
        M = S.to_dense()
        assert isinstance(S, KroneckerSum)
        close(S.inverse(0.1).to_dense(), torch.linalg.inv(M + 0.1 * eye_like(M)))
        close(S.frobenius_norm, M.norm())
        if S.structure == PSD:
            close(S.logdet, M.logdet())
            close(S.eigenvalues().sort().values, torch.linalg.eigvalsh(M))
            close((S.power(0.5) @ S.power(0.5)).to_dense(), M)


def test_dampings_of_factors_of_a_sum() -> None:
    K, other = products()
    for A, B in (
        (2 * K + K, 3 * K),
        (K + Kronecker(other.G, K.A), Kronecker(K.G.to_dense() + other.G.to_dense(), K.A)),
    ):
        close(A.inverse((0.1, 0.2)).to_dense(), B.inverse((0.1, 0.2)).to_dense())
    with pytest.raises(ValueError, match=r"pair of dampings .* belongs to the two factors .* KroneckerSum"):
        (K + other).inverse((0.1, 0.2))


def test_sums_of_inverses_share_their_basis() -> None:
    K, _ = products()
    S = K.inverse(0.1) + 2 * K.inverse(0.2)
    M = S.to_dense()
    close(S.logdet, M.logdet())
    close(S.power(-0.5).to_dense() @ S.power(0.5).to_dense(), eye_like(M))
    assert isinstance(K.inverse(0.1) + products()[1].inverse(0.1), Sum)


@pytest.mark.parametrize("damping", [1e-1, 1e-4])
def test_damped_inverse_in_float32(damping: float, recwarn: pytest.WarningsRecorder) -> None:
    """No warning where the matrix is worse conditioned than float32 resolves."""
    low = [normal(12, 5, seed=k) for k in range(4)]
    G, A, H, B = (L @ L.T for L in low)
    S = Kronecker(G.float(), A.float()) + Kronecker(H.float(), B.float())
    inverse = S.inverse(damping)
    x = inverse @ normal(144).float()
    D = S.to(F64).to_dense()
    exact = torch.linalg.solve(D + damping * eye_like(D), normal(144))
    assert (x.double() - exact).norm() < 1e-3 * exact.norm()
    assert not [w for w in recwarn if issubclass(w.category, CurvatureWarning)]
    assert bool(inverse.info.converged.all())
    assert inverse.to(F64).dtype == F64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    K, L = (P.to(dtype) for P in products())
    S = K + L
    M = S.to(F64).to_dense()
    for form in (
        lambda S: S.logdet,
        lambda S: S.frobenius_norm,
        lambda S: (S.inverse() @ torch.ones(12, dtype=S.dtype)).sum(),
    ):
        assert form(S).dtype == dtype
        torch.testing.assert_close(form(S).double(), form(Dense(M, PSD)), rtol=0.1, atol=0.5)


class Later(Deferred):
    """Computed when it is asked for, and again when told so."""

    def __init__(self, make: Callable[[], LinearOperator], space: Space) -> None:
        super().__init__(space, F64, torch.device("cpu"), PSD)
        self.make, self.computed, self.count = make, None, 0

    @property
    def operator(self) -> LinearOperator:
        if self.computed is None:
            self.computed, self.count = self.make(), self.count + 1
        return self.computed


def test_sums_of_deferred_operators() -> None:
    """Nothing is computed by adding; what is computed anew is followed; names of either are kept."""
    K, M = block_diagonal(F64)
    A = Later(lambda: K, K.space)
    S = A + A
    P = (S + K)[["scale"], ["scale"]]
    others = [A + Kronecker(psd(31, 31), psd(1, 1)), A @ A]
    assert A.count == 0
    close(S.to_dense(), 2 * M)
    close(S.inverse(0.1).to_dense(), torch.linalg.inv(2 * M + 0.1 * eye_like(M)))
    assert list(S.blocks) == list(K.blocks)
    close(S.merge(S.split(normal(len(M)))), normal(len(M)))
    close(BlockDiagonal.from_state_dict(S.state_dict()).to_dense(), 2 * M)
    close(S.nearest_kronecker().to_dense(), 2 * M)
    assert list(P.blocks) == ["scale"]
    assert A.count == 1
    A.computed = 3 * K
    close(S.to_dense(), 6 * M)
    close(P.to_dense(), 7 * K.blocks["scale"].to_dense())
    flat = Later(lambda: Diagonal(torch.ones(len(M), dtype=F64)), Space.flat(len(M)))
    assert (flat + A).in_space == K.space
    assert (A + flat).out_space == K.space
    close((flat + A).to_dense(), 3 * M + eye_like(M))
    with pytest.raises(TypeError, match=r"FormedSum.* has no `blocks`: it is not block-diagonal"):
        _ = (flat + flat).blocks
    with pytest.raises(NoClosedForm):
        others[0].inverse()


def test_a_batch_stays_a_batch() -> None:
    """A diagonal without batch is cut into those of the matrices."""
    S = Dense(psd(3, 2, 2), PSD) + Diagonal(normal(6).abs())
    assert isinstance(S, FormedSum)
    assert isinstance(S.operator, Dense)
    assert S.operator.matrix.shape == (3, 2, 2)
    close(S.logdet, S.to_dense().logdet())


def test_messages() -> None:
    K, L = products()
    with pytest.raises(NoClosedForm, match=r"KroneckerSum\(12 x 12, SYMMETRIC.* no closed form of `inverse`"):
        (K - L).inverse(0.1)
    with pytest.raises(ValueError, match="Expected Kronecker products and multiples of them as terms, got Dense"):
        KroneckerSum([K, Dense(psd(12, 12))])


def test_states_of_inverses_of_sums() -> None:
    K, _ = block_diagonal(F64)
    conv = {"conv": Kronecker(psd(2, 2, seed=8), psd(7, 7, seed=9))}
    total = K + K._with({**K.blocks, **conv})
    close(BlockDiagonal.from_state_dict(total.inverse().state_dict()).to_dense(), total.inverse().to_dense())


def cut(state: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


@pytest.mark.parametrize(
    "path",
    [
        ("layouts", "fc", "patterns"),
        ("layouts", "fc", "sizes"),
        ("space", "scale"),
        ("blocks", "fc"),
        ("blocks", "conv", "terms"),
        ("blocks", "conv", "terms", 0, "G"),
        ("blocks", "conv", "type"),
    ],
    ids=str,
)
def test_damaged_states(path: tuple[str, ...]) -> None:
    K, _ = block_diagonal(F64)
    with pytest.raises(
        ValueError, match=r"incomplete \(|Expected one layout per block|Expected each of the parameters"
    ):
        BlockDiagonal.from_state_dict(cut((K + K).state_dict(), *path))
    state = (K + K).state_dict()
    state["blocks"]["conv"]["terms"][0] = state["blocks"]["scale"]
    with pytest.raises(ValueError, match="Expected Kronecker products and multiples of them as terms"):
        BlockDiagonal.from_state_dict(state)
