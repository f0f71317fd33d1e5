"""Blocks beside KFAC and EKFAC: nearest Kronecker product, trace-normalised product, identity;
against dense algebra.

The exact blocks are those of `FullBlock`, which `test_laws.py` compares with autodiff on every
problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from curvlinops_plus import (
    KFAC,
    TNT,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    GGNDiagonalLinearOperator,
    KFOCLinearOperator,
    MonteCarlo,
    NearestKronecker,
    ScaledIdentity,
    curvature,
)
from curvlinops_plus.blocks import per_example
from curvlinops_plus.linalg import Kronecker
from curvlinops_plus.linalg.nearest import nearest_to_matrix
from curvlinops_plus.risk import layer_batch
from test.cases import FEW, NETS, close, problem, same
from test.helpers import seeded

#: Every net with joint blocks or with a block for each parameter, in turns.
in_some_form = pytest.mark.parametrize(
    ("name", "separate"), [(name, k % 2 == 1) for k, name in enumerate(NETS)]
)
MORE = [*FEW, "grouped cnn", "padding index"]
KINDS = {
    "formed": NearestKronecker,
    "by one sweep": NearestKronecker.using(max_bytes=0, power_iterations=1),
    "by sweeps": NearestKronecker.using(max_bytes=0, power_iterations=4),
}


@cache
def nearest(name: str, kind: str, separate: bool = False) -> Any:
    """One of `KINDS` of a problem; made once, so don't change it."""
    return problem(name).curvature(KINDS[kind], separate_weight_and_bias=separate)


def matrices(K: Any, dense: Any) -> Iterator[tuple[str, Any, tuple[int, int], list[Tensor]]]:
    """Name, layer, `(o, i)` of each block, and the matrices on its diagonal: one, or one for each
    group.
    """
    for entry in K.plan:
        for group in entry.layer.groups:
            *batch, o, i = group.layout.matrix_shape
            block = dense[group.name].to_dense()
            size, number = o * i, batch[0] if batch else 1
            yield (
                group.name,
                entry.layer,
                (o, i),
                [
                    block[k * size : (k + 1) * size, k * size : (k + 1) * size]
                    for k in range(number)
                ],
            )


def best(F: Tensor, o: int, i: int) -> tuple[Tensor, bool]:
    """The nearest Kronecker product from one SVD of Van Loan's rearrangement, and whether it is the
    only one.
    """
    R = F.view(o, i, o, i).permute(0, 2, 1, 3).reshape(o * o, i * i)
    U, S, V = torch.linalg.svd(R, full_matrices=False)
    return S[0] * torch.kron(U[:, 0].view(o, o), V[0].view(i, i)), len(S) == 1 or bool(
        S[1] < 0.999 * S[0]
    )


# -------------------------------------------------------------------------------- nearest Kronecker


@in_some_form
def test_nearest_kronecker_is_the_leading_singular_pair(name: str, separate: bool) -> None:
    p = problem(name)
    exact = p.made("FullBlock", separate).blocks
    K = nearest(name, "formed", separate)
    for block, layer, (o, i), parts in matrices(K, exact):
        found = next(part for other, *_, part in matrices(K, K.blocks) if other == block)
        if not layer.affine:
            close(
                K.blocks[block].to_dense(), torch.block_diag(*parts).diagonal().diag(), what=block
            )
            continue
        for F, N in zip(parts, found, strict=True):
            expected, unique = best(F, o, i)
            if unique:
                close(N, expected, 1e-8, block)
            assert (F - N).norm() <= (F - expected).norm() + 1e-8 * F.norm(), block


@pytest.mark.parametrize("name", MORE)
def test_nearest_kronecker_is_never_further_than_kfac(name: str) -> None:
    p = problem(name)
    for separate in (False, True):
        exact = p.exact.only_blocks(p.exact.ggn(), separate)
        found = {kind: nearest(name, kind, separate) for kind in ("formed", "by one sweep")}
        made = found | {kind: p.made(kind, separate) for kind in ("KFAC", "KFAC reduce")}
        away = {kind: float((K.to_dense() - exact).norm()) for kind, K in made.items()}
        rounding = 1e-9 * away["KFAC"] + 1e-12 * float(exact.norm())
        assert away["by one sweep"] <= away["KFAC"] + rounding
        assert (
            away["formed"]
            <= min(away["KFAC"], away["KFAC reduce"], away["by one sweep"]) + rounding
        )


@pytest.mark.parametrize("name", MORE)
def test_factors_are_symmetric_positive_and_balanced(name: str) -> None:
    for K in (*(nearest(name, kind) for kind in KINDS), problem(name).made("TNT")):
        for block in [block for block in K.blocks.values() if isinstance(block, Kronecker)]:
            for M in (block.G.to_dense(), block.A.to_dense()):
                values = torch.linalg.eigvalsh(M)
                close(M, M.T, 1e-14)
                assert values.min() >= -1e-12 * values.max()
            if block.trace > 0:
                close(
                    block.G.traces() / block.G.size,
                    block.A.traces() / block.A.size,
                    what="balanced",
                )


@pytest.mark.parametrize("name", ["mlp", "attention", "tied"])
def test_every_sweep_comes_nearer_until_nothing_is_left(name: str) -> None:
    p = problem(name)
    exact, formed = p.made("FullBlock"), nearest(name, "formed")
    distances = []
    for sweeps in (1, 2, 3, 60):
        K = p.curvature(NearestKronecker.using(max_bytes=0, power_iterations=sweeps))
        distances.append(float((K.to_dense() - exact.to_dense()).norm()))
    least = float((formed.to_dense() - exact.to_dense()).norm())
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(distances))
    assert abs(distances[-1] - least) <= 1e-6 * least + 1e-12


def test_as_many_sweeps_as_were_asked_for() -> None:
    p, passes = problem("mlp"), []

    class Counted(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            passes.append(1)
            return super().__iter__()

    risk = EmpiricalRisk(p.model, p.loss, Counted(p.data))
    plan = curvature(risk, compute=False).plan
    largest = max(8 * group.layout.dim**2 for entry in plan for group in entry.layer.groups)
    for options, kept, expected in (
        ({"max_bytes": 0, "power_iterations": 1}, 0, 2),
        ({"max_bytes": 0, "power_iterations": 3}, 0, 4),
        ({"max_bytes": 0, "power_iterations": 3}, 2**24, 1),
        ({"max_bytes": largest - 1, "power_iterations": 2}, 0, 3),
        ({"max_bytes": largest}, 0, 1),
    ):
        passes.clear()
        curvature(risk, NearestKronecker.using(**options), max_kept_bytes=kept)
        assert len(passes) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0, 3]))
def test_nearest_to_matrix(o: int, i: int, rank: int, batch: int) -> None:
    generator = seeded(o + 7 * i + 50 * rank)
    J = torch.randn(max(batch, 1), rank, o, i, dtype=torch.float64, generator=generator)
    R = torch.einsum("bnoi,bnpj->bopij", J, J)
    G, A = nearest_to_matrix(R if batch else R[0])
    for k in range(max(batch, 1)):
        Gk, Ak, Rk = (G[k], A[k], R[k]) if batch else (G, A, R[0])
        product = torch.einsum("op,...->op...", Gk, Ak)
        least = torch.linalg.svdvals(Rk.reshape(o * o, -1))[1:].norm()
        assert (Rk - product).norm() <= least + 1e-8 * Rk.norm()
        assert torch.linalg.eigvalsh(Gk).min() >= -1e-7 * Gk.norm()
        assert torch.linalg.eigvalsh(Ak).min() >= -1e-7 * Ak.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tie_has_positive_factors(dtype: torch.dtype) -> None:
    """vec(I) vec(I)ᵀ: any unit matrix and itself are as near; some are indefinite. The identity is
    the fair one.
    """
    R = torch.einsum("oi,pj->opij", torch.eye(3, dtype=dtype), torch.eye(3, dtype=dtype))
    G, A = nearest_to_matrix(R)
    close(G, torch.eye(3) / 3**0.5, 1e-6)
    close(A, torch.eye(3) / 3**0.5, 1e-6)


# ------------------------------------------------------------------------- trace-normalised product


@in_some_form
def test_tnt_is_its_definition(name: str, separate: bool) -> None:
    """`G ⊗ A / tr F` with the two partial traces of the exact block."""
    p = problem(name)
    exact = p.made("FullBlock", separate).blocks
    K = p.made("TNT", separate)
    for block, layer, (o, i), parts in matrices(K, exact):
        if not layer.affine:
            close(
                K.blocks[block].to_dense(), torch.block_diag(*parts).diagonal().diag(), what=block
            )
            continue
        products = []
        for F in parts:
            F4 = F.view(o, i, o, i)
            G, A = torch.einsum("oipi->op", F4), torch.einsum("oioj->ij", F4)
            products.append(torch.kron(G, A) / F.trace() if F.trace() > 0 else F)
        close(K.blocks[block].to_dense(), torch.block_diag(*products), what=block)
    close(K.trace, p.exact.ggn().trace(), 1e-12, "trace")


# ---------------------------------------------------------------------- identity, streams, refusals


def test_scaled_identity() -> None:
    """Whatever the data; alone with `ForwardOnly`, or beside other blocks."""
    p = problem("generic layers")
    K = curvature(p.risk(), ScaledIdentity.using(scale=3.0), vectors=ForwardOnly())
    close(K.to_dense(), 3 * torch.eye(K.shape[0], dtype=torch.float64), 1e-15)
    close(K.inverse(damping=1.0).to_dense(), torch.eye(K.shape[0], dtype=torch.float64) / 4)
    mixed = curvature(problem("mlp").risk(), {"0": ScaledIdentity}, default=KFAC)
    close(mixed.to_dense()[:25, :25], torch.eye(25))


# --------------------------------------------------------------------------------- pieces and paths


@pytest.mark.parametrize("name", ["attention", "grouped cnn", "tied", "padding index"])
def test_pieces_and_paths_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One example at a time, gradients per example instead of rows, rows instead of gradients per
    example.
    """
    p = problem(name)
    kinds = (TNT, NearestKronecker, KINDS["by sweeps"])
    expected = [p.curvature(kind).to_dense() for kind in kinds]
    for by_rows in (True, False):
        if not (by_rows and name == "tied"):  # two roles have no common rows
            monkeypatch.setattr(
                per_example,
                "_by_rows",
                lambda batch, by_rows=by_rows: by_rows and not batch.layer.sparse,
            )
        monkeypatch.setattr(layer_batch, "_PIECE_BYTES", 1)
        for kind, dense in zip(kinds, expected, strict=True):
            close(p.curvature(kind).to_dense(), dense, 1e-9, f"{kind}, by rows: {by_rows}")


# --------------------------------------------------------------------------------- the classic door


@pytest.mark.parametrize("separate", [False, True])
def test_kfoc_is_nearest_kronecker(separate: bool) -> None:
    p = problem("strided cnn")
    K = KFOCLinearOperator(p.model, p.loss, p.params, p.data, separate_weight_and_bias=separate)
    expected = p.curvature(NearestKronecker, separate_weight_and_bias=separate)
    same(K.to_dense(), expected.to_dense())
    assert list(K.input_covariances) == list(K.gradient_covariances) == ["0", "2", "4"]
    for name, block in expected.blocks.items():
        if isinstance(block, Kronecker):
            layer = name.removesuffix(".weight")
            close(K.input_covariances[layer], block.A.matrix)
            close(K.gradient_covariances[layer], block.G.matrix)
    again = KFOCLinearOperator.from_state_dict(K.state_dict(), p.model, p.params, p.data)
    close(again.to_dense(), K.to_dense(), 1e-13)
    K.input_covariances["0"].mul_(2)  # they are live
    again.compute_kronecker_factors()
    assert (K.blocks["0.weight" if separate else "0"].trace / 2).isclose(
        again.blocks["0.weight" if separate else "0"].trace
    )


@pytest.mark.parametrize("name", FEW)
def test_diagonal_of_the_ggn(name: str) -> None:
    p = problem(name)
    D = GGNDiagonalLinearOperator(p.model, p.loss, p.params, p.data, **p.net.options)
    close(D.to_dense(), p.exact.ggn().diagonal().diag())
    if name == "mlp":
        drawn = GGNDiagonalLinearOperator(
            p.model, p.loss, p.params, p.data, mc_samples=3, seed=5, num_data=12
        )
        close(
            drawn.diagonal(),
            p.curvature(DiagonalBlock, vectors=MonteCarlo(3, seed=5)).diagonal() / 2,
        )
