"""Blocks beside KFAC and EKFAC: nearest Kronecker product, trace-normalised product, identity; against dense algebra.

The exact blocks are those of `FullBlock`, which `test_laws.py` compares with autodiff on every problem.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from cases import FEW, NETS, close, fresh, problem, same, unchanged
from helpers import decay
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus import (
    KFAC,
    TNT,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    KFOCLinearOperator,
    MonteCarlo,
    NearestKronecker,
    NumericsError,
    ScaledIdentity,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.blocks import nearest as nearest_module
from curvlinops_plus.blocks import tnt
from curvlinops_plus.blocks.estimator import CurvatureEstimator
from curvlinops_plus.blocks.nearest import PowerStep
from curvlinops_plus.linalg import Dense, Kronecker, Scaled
from curvlinops_plus.linalg.kronecker_approximation import balanced, nearest_to_matrix
from curvlinops_plus.linalg.packing import pack, unpack
from curvlinops_plus.risk import find_layers, layer_batch
from curvlinops_plus.risk.sweep import sweep

every_net = pytest.mark.parametrize("name", NETS)
separate_or_joint = pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
#: Every net with joint blocks, a few with a block for each parameter.
FORMS = [*((name, False) for name in NETS), *((name, True) for name in (*FEW, "grouped cnn", "padding index"))]
in_every_form = pytest.mark.parametrize(
    ("name", "separate"), FORMS, ids=[f"{name}-{'separate' if apart else 'joint'}" for name, apart in FORMS]
)
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
    """Name, layer, `(o, i)` of each block, and the matrices on its diagonal: one, or one for each group."""
    for entry in K.plan:
        for group in entry.layer.groups:
            *batch, o, i = group.layout.matrix_shape
            block = dense[group.name].to_dense()
            size, number = o * i, batch[0] if batch else 1
            yield (
                group.name,
                entry.layer,
                (o, i),
                [block[k * size : (k + 1) * size, k * size : (k + 1) * size] for k in range(number)],
            )


def rearranged(F: Tensor, o: int, i: int, sparse: bool = False) -> Tensor:
    """Van Loan's rearrangement, pairs of rows against pairs of columns; equal columns alone if `sparse`."""
    R = F.view(o, i, o, i).permute(0, 2, 1, 3)
    return R.diagonal(dim1=2, dim2=3).reshape(o * o, i) if sparse else R.reshape(o * o, i * i)


def best(F: Tensor, o: int, i: int, sparse: bool) -> tuple[Tensor, bool]:
    """The nearest Kronecker product from one SVD, and whether it is the only one."""
    U, S, V = torch.linalg.svd(rearranged(F, o, i, sparse), full_matrices=False)
    G, A = U[:, 0].view(o, o), V[0].diag() if sparse else V[0].view(i, i)
    return S[0] * torch.kron(G, A), len(S) == 1 or bool(S[1] < 0.999 * S[0])


# --------------------------------------------------------------------------------------------------- nearest Kronecker


@in_every_form
def test_nearest_kronecker_is_the_leading_singular_pair(name: str, separate: bool) -> None:
    p = problem(name)
    exact = p.made("FullBlock", separate).blocks
    K = nearest(name, "formed", separate)
    for block, layer, (o, i), parts in matrices(K, exact):
        found = next(part for other, *_, part in matrices(K, K.blocks) if other == block)
        if not layer.affine:
            close(K.blocks[block].to_dense(), torch.block_diag(*parts).diagonal().diag(), what=block)
            continue
        for F, N in zip(parts, found, strict=True):
            expected, unique = best(F, o, i, layer.sparse)
            if unique:
                close(N, expected, 1e-8, block)
            assert (F - N).norm() <= (F - expected).norm() + 1e-8 * F.norm(), block


@every_net
def test_nearest_kronecker_is_never_further_than_kfac(name: str) -> None:
    p = problem(name)
    for separate in (False, True) if name in FEW else (False,):
        exact = p.exact.only_blocks(p.exact.ggn(), separate)

        def distance(K: Any, exact: Tensor = exact) -> float:
            return float((K.to_dense() - exact).norm())

        expand, reduce = (distance(p.made(kind, separate)) for kind in ("KFAC", "KFAC reduce"))
        rounding = 1e-12 * float(exact.norm())
        assert distance(nearest(name, "by one sweep", separate)) <= expand * (1 + 1e-9) + rounding
        assert distance(nearest(name, "formed", separate)) <= min(expand, reduce) * (1 + 1e-9) + rounding


@every_net
def test_factors_are_symmetric_and_positive(name: str) -> None:
    for K in (*(nearest(name, kind) for kind in KINDS), problem(name).made("TNT")):
        for block in K.blocks.values():
            if isinstance(block, Kronecker):
                for factor in (block.G, block.A):
                    values, M = torch.linalg.eigvalsh(factor.to_dense()), factor.to_dense()
                    close(M, M.T, 1e-14)
                    assert values.min() >= -1e-12 * values.max()
                if block.trace > 0:
                    close(block.G.traces() / block.G.size, block.A.traces() / block.A.size, what="balanced")


@pytest.mark.parametrize("name", FEW)
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


def test_convergence_is_that_of_the_singular_values() -> None:
    """What the squared distance has above the least shrinks by (σ₂/σ₁)² per sweep at the worst, in the end."""
    p = problem("mlp, bce")
    exact = p.curvature(FullBlock).blocks["0"].to_dense()
    S = torch.linalg.svdvals(rearranged(exact, 5, 5))
    least, over = S[1:].square().sum(), []
    for sweeps in (2, 3, 4):
        K = p.curvature(NearestKronecker.using(max_bytes=0, power_iterations=sweeps))
        over.append(float((K.blocks["0"].to_dense() - exact).norm() ** 2 - least))
    for before, after in pairwise(over):
        assert 0 <= after <= float(S[1] / S[0]) ** 2 * before * 1.01


@pytest.mark.parametrize("sweeps", [1, 2, 3])
@pytest.mark.parametrize("keep", [True, False])
def test_as_many_sweeps_as_were_asked_for(sweeps: int, keep: bool) -> None:
    p = problem("mlp")
    passes = []

    class Counted(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            passes.append(1)
            return super().__iter__()

    risk = EmpiricalRisk(p.model, p.loss, Counted(p.data))
    options = {} if keep else {"max_kept_bytes": 0}
    curvature(risk, NearestKronecker.using(max_bytes=0, power_iterations=sweeps), **options)
    assert len(passes) == (1 if keep else sweeps + 1)
    passes.clear()
    curvature(risk, NearestKronecker)
    assert len(passes) == 1


def test_only_layers_that_are_too_large_need_more_sweeps() -> None:
    """10 kB hold the last layer's block [18, 18], not the first one's [25, 25]... in float64: 2592 and 5000 bytes."""
    p = problem("mlp")
    K = p.curvature(NearestKronecker.using(max_bytes=4000, power_iterations=1))
    formed, swept = p.curvature(NearestKronecker), p.curvature(KINDS["by one sweep"])
    close(K.blocks["2"].to_dense(), formed.blocks["2"].to_dense())
    close(K.blocks["0"].to_dense(), swept.blocks["0"].to_dense())
    with pytest.raises(AssertionError, match="relative error"):
        close(K.blocks["0"].to_dense(), formed.blocks["0"].to_dense())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.sampled_from([0, 3]))
def test_nearest_to_matrix(o: int, i: int, rank: int, diagonal: bool, batch: int) -> None:
    generator = torch.Generator().manual_seed(o + 7 * i + 50 * rank)
    J = torch.randn(max(batch, 1), rank, o, i, dtype=torch.float64, generator=generator)
    R = torch.einsum("bnoi,bnpj->bopij", J, J)
    R = R.diagonal(dim1=3, dim2=4) if diagonal else R
    G, A = nearest_to_matrix(R if batch else R[0], diagonal)
    for k in range(max(batch, 1)):
        Gk, Ak, Rk = (G[k], A[k], R[k]) if batch else (G, A, R[0])
        product = torch.einsum("op,...->op...", Gk, Ak)
        least = torch.linalg.svdvals(Rk.reshape(o * o, -1))[1:].norm()
        assert (Rk - product).norm() <= least + 1e-8 * Rk.norm()
        assert torch.linalg.eigvalsh(Gk).min() >= -1e-7 * Gk.norm()
        assert (Ak if diagonal else torch.linalg.eigvalsh(Ak)).min() >= -1e-7 * Ak.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tie_has_positive_factors(dtype: torch.dtype) -> None:
    """vec(I) vec(I)ᵀ: any unit matrix and itself are as near; some are indefinite. The identity is the fair one."""
    R = torch.einsum("oi,pj->opij", torch.eye(3, dtype=dtype), torch.eye(3, dtype=dtype))
    G, A = nearest_to_matrix(R)
    close(G, torch.eye(3) / 3**0.5, 1e-6)
    close(A, torch.eye(3) / 3**0.5, 1e-6)


def test_nothing_is_nearest_to_nothing() -> None:
    for diagonal in (False, True):
        G, A = nearest_to_matrix(torch.zeros(2, 2, 3, *[] if diagonal else [3]), diagonal)
        assert not torch.einsum("op,...->op...", G, A).any()


def test_balancing_keeps_the_product() -> None:
    G, A = torch.diag(torch.tensor([1.0, 8.0])), torch.tensor([[1.0, 0.5], [0.5, 3.0]])
    B, C = balanced(G, A)
    close(torch.kron(B, C), torch.kron(G, A), 1e-6)
    close(B.trace(), C.trace(), 1e-6)
    B, C = balanced(0 * G, A)
    same(B, 0 * G)
    same(C, A)


def test_nan_names_the_statistic_and_the_layer() -> None:
    p = fresh("mlp")
    data = [(X.clone(), y) for X, y in p.data]
    data[1][0][0, 0] = torch.nan
    for kind in (NearestKronecker, TNT, KINDS["by sweeps"]):
        with pytest.raises(NumericsError, match=r"layer '0'.*NaN"):
            curvature(EmpiricalRisk(p.model, p.loss, data), kind).compute()


# --------------------------------------------------------------------------------------------- trace-normalised product


@in_every_form
def test_tnt_is_its_definition(name: str, separate: bool) -> None:
    """`G ⊗ A / tr F` with the two partial traces of the exact block."""
    p = problem(name)
    exact = p.made("FullBlock", separate).blocks
    K = p.made("TNT", separate)
    for block, layer, (o, i), parts in matrices(K, exact):
        if not layer.affine:
            close(K.blocks[block].to_dense(), torch.block_diag(*parts).diagonal().diag(), what=block)
            continue
        products = []
        for F in parts:
            F4 = F.view(o, i, o, i)
            G, A = torch.einsum("oipi->op", F4), torch.einsum("oioj->ij", F4)
            A = A.diagonal().diag() if layer.sparse else A
            products.append(torch.kron(G, A) / F.trace() if F.trace() > 0 else F)
        close(K.blocks[block].to_dense(), torch.block_diag(*products), what=block)
    close(K.trace, p.exact.ggn().trace(), 1e-12, "trace")


def test_tnt_without_weight_sharing_weighs_inputs_by_gradients() -> None:
    p = problem("mlp, mse")
    block = p.curvature(TNT).blocks["0"]
    A: Any = 0.0
    G: Any = 0.0
    for b in p.exact.batches:
        use = p.exact.layers[0].roles[0][0]
        ((a, D, _),) = p.exact.rows(b, use)  # a [m, N, S, i], D [F, m, N, S, o]: gradients of every output number
        a = torch.cat([a[0, :, 0], torch.ones(a.shape[1], 1, dtype=a.dtype)], 1)
        g = D[:, 0, :, 0] * (2 * p.exact.c) ** 0.5
        A = A + torch.einsum("fno,ni,nj->ij", g.square(), a, a)
        G = G + torch.einsum("fno,fnp,ni->op", g, g, a.square())
    close(block.to_dense(), torch.kron(G, A) / A.trace())


# ------------------------------------------------------------------------------------------------------------ identity


@pytest.mark.parametrize("name", FEW)
@separate_or_joint
def test_scaled_identity(name: str, separate: bool) -> None:
    p = problem(name)
    vectors = ForwardOnly()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no layer falls back
        K = curvature(p.risk(), ScaledIdentity.using(scale=3.0), vectors=vectors, separate_weight_and_bias=separate)
        with unchanged(p.model, p.data):
            K.compute()
    n = K.shape[0]
    eye = torch.eye(n, dtype=torch.float64)
    close(K.to_dense(), 3 * eye, 1e-15)
    close(K.logdet, n * torch.tensor(3.0, dtype=torch.float64).log())
    close(K.inverse(damping=1.0).to_dense(), eye / 4)
    close(K.power(0.5, damping=1.0).to_dense(), 2 * eye)
    close(K.eigenvalues(), 3 * torch.ones(n))
    close(curvature(p.risk(), ScaledIdentity, vectors=vectors).trace, n)


def test_a_layer_that_is_left_as_it_is() -> None:
    p = problem("mlp")
    K = curvature(p.risk(), {"0": ScaledIdentity}, default=KFAC)
    close(K.to_dense()[:25, :25], torch.eye(25))
    close(K.blocks["2"].to_dense(), p.curvature(KFAC).blocks["2"].to_dense())


def test_scale_of_zero() -> None:
    p = problem("mlp")
    K = curvature(p.risk(), ScaledIdentity.using(scale=0.0))
    close(K.inverse(damping=0.5).diagonal(), 2 * torch.ones(43))
    assert float(K.logdet) == -torch.inf


@pytest.mark.parametrize("scale", [-1.0, float("inf"), float("nan")])
def test_other_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="finite scale of at least 0, got"):
        curvature(problem("mlp").risk(), ScaledIdentity.using(scale=scale)).compute()


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("kind", [*KINDS.values(), TNT])
def test_forward_only_is_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"layer '0': (NearestKronecker|TNT) is made of gradients"):
        curvature(problem("mlp").risk(), kind, vectors=ForwardOnly()).compute()


@pytest.mark.parametrize(
    ("kind", "option"),
    [(NearestKronecker.using(max_factor_bytes=100), "max_factor_bytes"), (TNT.using(max_bytes=100), "max_bytes")],
)
def test_large_factors_are_refused(kind: Any, option: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"layer '0': its factor G is 5 x 5.*above {option}=100.*{option}=\.\.\."
    ):
        curvature(problem("mlp").risk(), kind).compute()


@pytest.mark.parametrize("kind", [TNT, NearestKronecker, ScaledIdentity])
def test_blocks_of_one_sweep_are_kept_up_batch_by_batch(kind: Any) -> None:
    p = problem("mlp")
    estimator = CurvatureEstimator(p.risk(), kind)
    for batch in p.data:
        estimator.update(batch)
    close(estimator.operator.to_dense(), p.curvature(kind).to_dense())


def test_several_sweeps_are_not_for_streams() -> None:
    p = problem("mlp")
    estimator = CurvatureEstimator(p.risk(), KINDS["by sweeps"])
    with pytest.raises(UnsupportedError, match=r"layer '0': its block is too large to be formed.*max_bytes=\.\.\."):
        estimator.update(p.data[0])
    assert estimator.updates == 0


def test_layers_of_a_stream_are_in_the_order_of_the_plan() -> None:
    """Of eight layers that can't be streamed the first one is named, whatever their places in memory are."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.MSELoss(), ()), KINDS["by sweeps"])
    with pytest.raises(UnsupportedError, match="layer '0': its block is too large"):
        estimator.update((torch.rand(3, 4), torch.rand(3, 4)))


def test_no_sweeps_are_refused() -> None:
    with pytest.raises(ValueError, match="power_iterations=0: expected at least 1"):
        curvature(problem("mlp").risk(), NearestKronecker.using(power_iterations=0)).compute()


@pytest.mark.parametrize("kind", [NearestKronecker, TNT])
def test_layers_without_factors_fall_back_and_are_listed(kind: Any) -> None:
    p = problem("generic layers")
    with pytest.warns(CurvatureWarning, match=r"2 of 4 layers get their exact diagonal.*'1' \(LayerNorm"):
        K = curvature(p.risk(), kind)
    assert [type(block).__name__ for block in K.blocks.values()] == ["Kronecker", "Diagonal", "Diagonal", "Kronecker"]
    with pytest.raises(UnsupportedError, match=rf"layer '1' \(LayerNorm\) can't have {kind.__name__}"):
        curvature(p.risk(), {"1": kind})


# ----------------------------------------------------------------------------------------------------- pieces and paths


@pytest.mark.parametrize(
    "name", ["sequence", "attention", "strided cnn", "grouped cnn", "tied", "padding index", "mlp"]
)
def test_pieces_and_paths_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One example at a time, gradients per example instead of rows, rows instead of gradients per example."""
    p = problem(name)
    kinds = (TNT, NearestKronecker, KINDS["by sweeps"])
    expected = [p.curvature(kind).to_dense() for kind in kinds]
    monkeypatch.setattr(nearest_module, "_WORK_BYTES", 1)
    for by_rows in (True, False):
        if not (by_rows and name == "tied"):  # two roles have no common rows
            monkeypatch.setattr(tnt, "_by_rows", lambda batch, by_rows=by_rows: by_rows and not batch.layer.sparse)
        monkeypatch.setattr(tnt, "_PIECE_BYTES", 1)
        for kind, dense in zip(kinds, expected, strict=True):
            close(p.curvature(kind).to_dense(), dense, 1e-9, f"{kind}, by rows: {by_rows}")


def test_gradients_per_example_are_never_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    grads = tnt.LayerBatch.per_example_grads.func  # type: ignore[attr-defined]
    monkeypatch.setattr(
        tnt.LayerBatch, "per_example_grads", property(lambda batch: sizes.append(batch.num_examples) or grads(batch))
    )
    monkeypatch.setattr(tnt, "_PIECE_BYTES", 1)
    monkeypatch.setattr(layer_batch, "_PIECE_BYTES", 1)  # of the self-check
    p = problem("attention")
    p.curvature(TNT)
    assert set(sizes) == {1}


# ------------------------------------------------------------------------------------------------ sums, merging, states


@cache
def kept(kind: type[Any]) -> Any:
    """The same accumulator, with all that finished in `found`."""

    class Kept(kind):
        found: ClassVar[list[Any]] = []

        def finish(self) -> Any:
            self.found.append(self)
            return super().finish()

        def finish_for_good(self) -> Any:
            return self.finish()  # the sums are looked at

    return Kept


def accumulators(kind: type[Any], batches: slice, **options: Any) -> list[Any]:
    p = problem("strided cnn")
    kept(kind).found.clear()
    curvature(p.risk(data=p.data[batches]), kept(kind).using(**options))
    return list(kept(kind).found)


every_sum = pytest.mark.parametrize(
    ("kind", "options"), [(TNT, {}), (NearestKronecker, {}), (ScaledIdentity, {}), (NearestKronecker, {"max_bytes": 0})]
)


def after(result: Any) -> Tensor:
    return result.given if isinstance(result, PowerStep) else result.to_dense()


@every_sum
def test_two_parts_merged_are_the_whole(kind: Any, options: Any) -> None:
    whole = accumulators(kind, slice(None), **options)
    first, second = accumulators(kind, slice(2), **options), accumulators(kind, slice(2, None), **options)
    for a, b, expected in zip(first, second, whole, strict=True):
        resumed = type(a)(a.layer, a.group, a.scale, **options)
        resumed.load_state_dict(a.state_dict())
        a.merge(b)
        resumed.merge(b)
        close(after(a.finish()), after(expected.finish()))
        close(after(resumed.finish()), after(expected.finish()))


@every_sum
def test_equal_parts_decayed_are_one_of_them(kind: Any, options: Any) -> None:
    parts = [accumulators(kind, slice(1), **options) for _ in range(3)]
    for layer, one in enumerate(parts[0]):
        expected = after(one.finish())
        for other in parts[1:]:
            decay(one, 0.7)
            one.merge(other[layer])
        close(after(one.finish()), expected)


def steps(batches: slice, given: Callable[[Tensor], Tensor] = lambda t: t) -> list[PowerStep]:
    """Power steps of the data's part, each with what it has seen."""
    p = problem("strided cnn")
    starts = [s.finish() for s in accumulators(NearestKronecker, slice(None), max_bytes=0)]
    risk = p.risk(data=p.data[batches])
    by_name = {s.group.name: s for s in starts}
    for s in starts:
        s.given = given(s.given)
    names = {group.name: group for layer in find_layers(risk.model, risk.params) for group in layer.groups}

    def consume(batch: Any) -> None:
        group = names[batch.layer.groups[0].name]
        by_name[group.name].update(batch.restrict(batch.layer.groups[0]))

    def count(part: Any) -> None:
        for s in starts:
            s.totals.add(part)

    from curvlinops_plus import Exact

    sweep(risk, find_layers(risk.model, risk.params), Exact(), consume, count)
    return starts


def test_power_steps_merge_if_the_given_factor_is_the_same() -> None:
    for a, b, whole in zip(steps(slice(2)), steps(slice(2, None)), steps(slice(None)), strict=True):
        saved = a.state_dict()
        a.merge(b)
        close(after(a.finish()), after(whole.finish()))
        other = PowerStep(b.layer, b.group, b.scale, torch.zeros_like(b.given), "A", b.left)
        other.load_state_dict(saved)
        other.merge(b)
        close(after(other.finish()), after(whole.finish()))
    for a, b in zip(steps(slice(2)), steps(slice(2, None), lambda t: 2 * t), strict=True):
        with pytest.raises(ValueError, match="best ones for the same factor A, and those given differ"):
            a.merge(b)


@pytest.mark.parametrize("name", ["mlp", "grouped cnn", "padding index"])
def test_states_refuse_factors_that_are_swapped(name: str) -> None:
    p = problem(name)
    for kind in (NearestKronecker, TNT):
        K = p.curvature(kind)
        state = K.state_dict()
        block = next(iter(K.blocks))
        packed = state["blocks"][block]
        assert packed["type"] == "Kronecker"
        swapped = {**packed, "G": packed["A"], "A": packed["G"]}
        if K.blocks[block].G.size == K.blocks[block].A.size:
            continue
        dense = K.to_dense()
        with pytest.raises(ValueError, match=rf"block '{block}'.*sizes"):
            K.load_state_dict({**state, "blocks": {**state["blocks"], block: swapped}})
        same(K.to_dense(), dense)


def test_multiples_of_the_identity_are_packed() -> None:
    for dtype in (torch.float32, torch.float64):
        K = curvature(problem("mlp").risk(), ScaledIdentity.using(scale=0.1)).operator.to(dtype=dtype)
        block = K.blocks["0"]
        back = unpack(pack(block), torch.device("cpu"))
        assert isinstance(back, Scaled)
        assert back.dtype == dtype
        same(back.to_dense(), block.to_dense())
    with pytest.raises(ValueError, match=r"Product can't be saved; known are .* multiples of the identity"):
        pack(Dense(torch.eye(2)) @ Dense(torch.eye(2)))
    with pytest.raises(ValueError, match="incomplete"):
        unpack({"type": "ScaledIdentity", "size": 3}, torch.device("cpu"))


# ----------------------------------------------------------------------------------------------------- the classic door


def kfoc(name: str, **options: Any) -> Any:
    p = problem(name)
    return KFOCLinearOperator(p.model, p.loss, p.params, p.data, **options)


@separate_or_joint
def test_kfoc_is_nearest_kronecker(separate: bool) -> None:
    p = problem("strided cnn")
    K = kfoc("strided cnn", separate_weight_and_bias=separate)
    expected = p.curvature(NearestKronecker, separate_weight_and_bias=separate)
    same(K.to_dense(), expected.to_dense())
    assert list(K.input_covariances) == list(K.gradient_covariances) == ["0", "2", "4"]
    for name, block in expected.blocks.items():
        if isinstance(block, Kronecker):
            layer = name.removesuffix(".weight")
            close(K.input_covariances[layer], block.A.matrix)
            close(K.gradient_covariances[layer], block.G.matrix)


def test_factors_of_kfoc_are_live() -> None:
    K = kfoc("mlp")
    bias = K.blocks["0.bias"].to_dense()
    A, G = K.input_covariances["0"], K.gradient_covariances["0"].clone()
    K.input_covariances["0"] = 2 * torch.eye(4)
    close(A, 2 * torch.eye(4))
    close(K.blocks["0.weight"].to_dense(), torch.kron(G, 2 * torch.eye(4).double()))
    same(K.blocks["0.bias"].to_dense(), bias)
    with pytest.raises(ValueError, match=r"layer '0': expected a factor of shape \[4, 4\], got \[3, 3\]"):
        K.input_covariances["0"] = torch.eye(3)


@separate_or_joint
def test_kfoc_round_trip(separate: bool) -> None:
    p = problem("mlp, ce-all")
    K = kfoc("mlp, ce-all", fisher_type="mc", mc_samples=2, seed=3, separate_weight_and_bias=separate)
    other = KFOCLinearOperator.from_state_dict(K.state_dict(), p.model, p.params, None)
    close(other.to_dense(), K.to_dense(), 1e-13)
    again = KFOCLinearOperator.from_state_dict(K.state_dict(), p.model, p.params, p.data)
    again.compute_kronecker_factors()
    close(again.to_dense(), K.to_dense(), 1e-13)
    with pytest.raises(ValueError, match="class"):
        KFACLinearOperator(p.model, p.loss, p.params, p.data).load_state_dict(K.state_dict())


def test_inverse_of_kfoc() -> None:
    K = kfoc("mlp")
    eye = torch.eye(43, dtype=torch.float64)
    exact = KFACInverseLinearOperator(K, damping=0.1, use_exact_damping=True)
    close(exact.to_dense(), torch.linalg.inv(K.to_dense() + 0.1 * eye), 1e-8)
    heuristic = KFACInverseLinearOperator(K, damping=0.1, use_heuristic_damping=True).to_dense()
    block, at, root = K.blocks["0.weight"], slice(0, 20), 0.1**0.5  # equal mean eigenvalues: √λ on each side
    expected = torch.kron(block.G.matrix + root * eye[:5, :5], block.A.matrix + root * eye[:4, :4])
    close(heuristic[at, at], torch.linalg.inv(expected), 1e-8)


@pytest.mark.parametrize("wrong", [{"fisher_type": "forward-only"}, {"mc_samples": 2}])
def test_options_that_kfoc_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Invalid (fisher_type|mc_samples)"):
        kfoc("mlp", **wrong)


@pytest.mark.parametrize("name", FEW)
def test_diagonal_of_the_ggn(name: str) -> None:
    p = problem(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Exact\(\) sends", CurvatureWarning)
        D = GGNDiagonalLinearOperator(p.model, p.loss, p.params, p.data, **p.net.options)
    close(D.diagonal(), p.exact.ggn().diagonal())
    close(D.to_dense(), p.exact.ggn().diagonal().diag())


def test_diagonal_of_the_ggn_from_draws() -> None:
    p = problem("mlp")
    D = GGNDiagonalLinearOperator(p.model, p.loss, p.params, p.data, mc_samples=3, seed=5)
    close(D.diagonal(), p.curvature(DiagonalBlock, vectors=MonteCarlo(3, seed=5)).diagonal())
    other = GGNDiagonalLinearOperator(p.model, p.loss, p.params, p.data, mc_samples=3, seed=5, num_data=12)
    close(other.diagonal(), D.diagonal() / 2)
    blank = GGNDiagonalLinearOperator(
        p.model, p.loss, p.params, p.data, check_deterministic=False, mc_samples=3, seed=5
    )
    blank.load_state_dict(D.state_dict())
    close(blank.diagonal(), D.diagonal(), 1e-13)
    draws = [
        GGNDiagonalLinearOperator(p.model, p.loss, p.params, p.data, False, False, mc_samples=200, seed=s).diagonal()
        for s in range(16)
    ]
    mean, error = torch.stack(draws).mean(0), torch.stack(draws).std(0) / 4
    assert bool(((mean - p.exact.ggn().diagonal()).abs() <= 5 * error + 1e-12).all())


def test_a_negative_number_of_draws_is_refused() -> None:
    p = problem("mlp")
    with pytest.raises(ValueError, match=r"Invalid mc_samples: -1\. Expected 0 for the exact diagonal"):
        GGNDiagonalLinearOperator(p.model, p.loss, p.params, p.data, mc_samples=-1)


def test_signatures_are_the_classic_ones() -> None:
    """In the order of the operators of the library that these are named after."""
    shared = ["model_func", "loss_func", "params", "data", "progressbar", "check_deterministic"]
    expected = {
        GGNDiagonalLinearOperator: [*shared, "num_data", "batch_size_fn", "mc_samples", "seed"],
        KFOCLinearOperator: [
            *shared,
            "seed",
            "num_per_example_loss_terms",
            "separate_weight_and_bias",
            "num_data",
            "batch_size_fn",
        ],
    }
    for kind, names in expected.items():
        parameters = list(inspect.signature(kind).parameters.values())
        assert [q.name for q in parameters if q.kind is q.POSITIONAL_OR_KEYWORD] == names
    assert list(inspect.signature(GGNLinearOperator).parameters)[: len(shared)] == shared


# ------------------------------------------------------------------------------------------------------------- kfac_jax


def test_blocks_are_those_of_kfac_jax() -> None:
    """Diagonal, full and trace-normalised blocks of dense layers, and the identity, where kfac_jax is installed."""
    jax, kfac_jax = pytest.importorskip("jax"), pytest.importorskip("kfac_jax")
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 7):
        pytest.skip("kfac_jax 0.0.8 does not run on jax 0.7 and later")
    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    X, y = torch.randn(7, 4).double(), torch.randint(3, (7,))
    theta = [(jnp.array(m.weight.detach().numpy().T), jnp.array(m.bias.detach().numpy())) for m in (model[0], model[2])]

    def loss(params, batch):  # type: ignore[no-untyped-def]
        (w1, b1), (w2, b2) = params
        f = jnp.tanh(batch[0] @ w1 + b1) @ w2 + b2
        kfac_jax.register_softmax_cross_entropy_loss(f, batch[1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(f), batch[1][:, None], 1))

    arguments, key = (theta, (jnp.array(X.numpy()), jnp.array(y.numpy()))), jax.random.PRNGKey(0)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(q.shape, dtype=torch.float64, generator=generator) for q in model.parameters()]
    v = [(jnp.array(w.numpy().T), jnp.array(b.numpy())) for w, b in zip(parts[::2], parts[1::2], strict=True)]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:3], y[:3]), (X[3:], y[3:])])
    for ours, theirs in (
        (DiagonalBlock, kfac_jax.DenseDiagonal),
        (FullBlock, kfac_jax.DenseFull),
        (TNT, kfac_jax.DenseTNT),
        (KFAC, kfac_jax.DenseTwoKroneckerFactored),
        (ScaledIdentity, kfac_jax.ScaledIdentity),
    ):
        estimator = kfac_jax.BlockDiagonalCurvature(
            func=loss, default_estimation_mode="ggn_exact", layer_tag_to_block_ctor={"dense": theirs}
        )
        state = estimator.init(
            key, arguments, exact_powers_to_cache=None, approx_powers_to_cache=None, cache_eigenvalues=False
        )
        state = estimator.update_curvature_matrix_estimate(
            state, ema_old=0.0, ema_new=1.0, identity_weight=0.0, batch_size=7, rng=key, func_args=arguments
        )
        K = curvature(risk, ours)
        for inverse in (False, True):
            found = (estimator.multiply_inverse if inverse else estimator.multiply)(
                state, v, identity_weight=0.1, exact_power=True, use_cached=False, pmap_axis_name=None
            )
            expected = torch.cat(
                [torch.from_numpy(jax.device_get(t).T.copy()).flatten() for pair in found for t in pair]
            )
            flat = torch.cat([t.flatten() for t in parts])
            close((K.inverse(0.1) if inverse else K.shift(0.1)) @ flat, expected, 1e-10, f"{ours} {inverse}")
