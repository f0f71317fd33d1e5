"""What sums of operators keep, follow and refuse."""

from __future__ import annotations

from collections.abc import Callable

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


def products() -> tuple[Kronecker, Kronecker]:
    return Kronecker(psd(3, 3), psd(4, 4, seed=1)), Kronecker(psd(3, 3, seed=2), psd(4, 4, seed=3))


@pytest.mark.parametrize("step", [1e-2, 1e-5])
def test_norm_of_a_difference_does_not_cancel(step: float) -> None:
    G, A = psd(6, 6), psd(5, 5, seed=1)
    H, B = G + step * psd(6, 6, seed=2), A + step * psd(5, 5, seed=3)
    D = Kronecker(G.float(), A.float()) - Kronecker((7 * H).float(), (B / 7).float())
    exact = D.to(F64).to_dense().norm()
    assert abs(float(D.frobenius_norm) / float(exact) - 1) < 1e-5 / step


K31, M31 = block_diagonal(F64)


@pytest.mark.parametrize(
    "make",
    [
        lambda c: c * products()[0] + products()[1],
        lambda c: c * Dense(psd(4, 4), PSD) + Dense(psd(4, 4, seed=1), PSD),
        lambda c: K31 + c * Diagonal(M31.diagonal()),
    ],
    ids=["products", "dense", "blocks"],
)
def test_derivatives_in_a_factor_twice(make: Callable[[Tensor], LinearOperator]) -> None:
    """A sum is made once; each product makes a graph of its own."""
    c = torch.tensor(2.0, dtype=F64, requires_grad=True)
    S, x = make(c), normal(make(c).shape[0])
    for _ in range(2):
        (grad,) = torch.autograd.grad((S @ x).sum(), c)
        (expected,) = torch.autograd.grad((make(c).to_dense() @ x).sum(), c)
        close(grad, expected)


def test_sums_follow_entries_that_change() -> None:
    """Also after their closed forms were asked for; an inverse does not follow."""
    (K, L), M, d = products(), psd(4, 4), normal(4).abs() + 0.1
    for S, changing in (
        (2 * K + L, K.G.matrix),
        (2 * Dense(M, PSD) + Diagonal(d), M),
        (Diagonal(d) + Dense(M, PSD), d),
    ):
        before, inverse = S.logdet, S.inverse(0.1).to_dense()
        changing *= 2
        D = S.A.to_dense() + S.B.to_dense() if isinstance(S, FormedSum) else sum(term.to_dense() for term in S.terms)
        close(S.to_dense(), D)
        close(S.logdet, D.logdet())
        assert S.logdet != before
        close(S.inverse(0.1).to_dense(), torch.linalg.inv(D + 0.1 * eye_like(D)))
        assert not torch.allclose(S.inverse(0.1).to_dense(), inverse)


@pytest.mark.parametrize("damping", [1e-1, 1e-4])
def test_damped_inverse_in_float32(damping: float, recwarn: pytest.WarningsRecorder) -> None:
    """No warning where the matrix is worse conditioned than float32 resolves."""
    G, A, H, B = (L @ L.T for L in (normal(12, 5, seed=k) for k in range(4)))
    S = Kronecker(G.float(), A.float()) + Kronecker(H.float(), B.float())
    inverse, D = S.inverse(damping), S.to(F64).to_dense()
    exact = torch.linalg.solve(D + damping * eye_like(D), normal(144))
    assert ((inverse @ normal(144).float()).double() - exact).norm() < 1e-3 * exact.norm()
    assert not [w for w in recwarn if issubclass(w.category, CurvatureWarning)]
    assert bool(inverse.info.converged.all())


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
    A = Later(lambda: K31, K31.in_space)
    S, P = A + A, (A + A + K31)[["scale"], ["scale"]]
    assert A.count == 0
    close(S.inverse(0.1).to_dense(), torch.linalg.inv(2 * M31 + 0.1 * eye_like(M31)))
    close(BlockDiagonal.from_state_dict(S.state_dict()).to_dense(), 2 * M31)
    assert list(P.blocks) == ["scale"]
    assert A.count == 1
    A.computed = 3 * K31
    close(S.to_dense(), 6 * M31)
    flat = Later(lambda: Diagonal(torch.ones(len(M31), dtype=F64)), Space.flat(len(M31)))
    assert (flat + A).in_space == (A + flat).out_space == K31.in_space
    close((flat + A).to_dense(), 3 * M31 + eye_like(M31))


def test_what_sums_are() -> None:
    """Names of both, batches, exact zeros, and what is no sum of products."""
    cols, rows = Space({"a": (1, 3)}), Space({"y": (2, 1)})
    S = Dense(torch.ones(2, 3), in_space=cols) + Dense(torch.ones(2, 3), out_space=rows)
    assert (S.in_space, S.out_space, S.materialize().out_space) == (cols, rows, rows)
    S = Dense(psd(3, 2, 2), PSD) + Diagonal(normal(6).abs())
    assert S.operator.matrix.shape == (3, 2, 2)
    close(S.logdet, S.to_dense().logdet())
    E = Eigendecomposed(Dense(orthogonal(4)), torch.tensor([1e-12, 1.0, 2.0, 1e12], dtype=F64)).inverse(1e-13)
    close((E + E).logdet, (2 * E).logdet)
    K, L = products()
    close((2 * K + K).inverse((0.1, 0.2)).to_dense(), (3 * K).inverse((0.1, 0.2)).to_dense())
    with torch.autocast("cpu", torch.bfloat16):
        found = (K + L).logdet
    close(found, (K + L).to_dense().logdet())
    assert isinstance(Kronecker(psd(2, 2), psd(3, 3)) + Kronecker(psd(3, 3), psd(2, 2)), Sum)
    for call, error, words in (
        (
            lambda: (K + L).inverse((0.1, 0.2)),
            ValueError,
            r"pair of dampings .* belongs to the two factors .* KroneckerS",
        ),
        (lambda: (K - L).inverse(0.1), NoClosedForm, r"KroneckerSum\(12 x 12, SYMMETRIC.* no closed form of `inverse`"),
        (lambda: (K - L).nearest_kronecker(), NoClosedForm, r"KroneckerSum.*no `nearest_kronecker`, because a term is"),
        (
            lambda: KroneckerSum([K, Dense(psd(12, 12))]),
            ValueError,
            "Expected Kronecker products and multiples of them",
        ),
        (
            lambda: KroneckerSum([K, Kronecker(K.A, K.G)]),
            ValueError,
            r"factors \[\[3, 3\], \[4, 4\]\] and \[\[4, 4\], ",
        ),
    ):
        with pytest.raises(error, match=words):
            call()
