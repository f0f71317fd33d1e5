"""Every approximation on every problem is what its definition says, in float64, against the slow
exact twin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    EFLinearOperator,
    Exact,
    FullBlock,
    GGNLinearOperator,
    HessianLinearOperator,
    IdentityLinearOperator,
    curvature,
)
from curvlinops_plus.linalg import Kronecker
from curvlinops_plus.risk import Vectors
from test.cases import (
    APPROXIMATIONS,
    FEW,
    LOSSES,
    PROBLEMS,
    VECTORS,
    Problem,
    close,
    problem,
    unchanged,
)
from test.helpers import normal, seeded

every_problem = pytest.mark.parametrize("name", PROBLEMS)
#: Every net in every form, every loss in the plainest.
FORMS = [
    (n, *form)
    for n in PROBLEMS
    for form in itertools.product((False, True), repeat=2)
    if "," not in n or not any(form)
]
in_every_form = pytest.mark.parametrize(
    ("name", "separate", "reduce"),
    FORMS,
    ids=[f"{n}-{'separate' if s else 'joint'}-{'reduce' if r else 'expand'}" for n, s, r in FORMS],
)
few_problems = pytest.mark.parametrize("name", FEW)
separate_or_joint = pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
expand_or_reduce = pytest.mark.parametrize("reduce", [False, True], ids=["expand", "reduce"])


def kfac(reduce: bool) -> Any:
    return KFAC.using(kfac_approx="reduce" if reduce else "expand")


def ekfac(reduce: bool) -> Any:
    return EKFAC.using(kfac_approx="reduce" if reduce else "expand")


# ----------------------------------------------------------------------------------- exact matrices


@every_problem
def test_matrix_free_operators_are_the_matrices(name: str) -> None:
    p = problem(name)
    expected = {
        GGNLinearOperator: p.exact.ggn(),
        EFLinearOperator: p.exact.empirical_fisher(per_term=True),
        HessianLinearOperator: p.exact.hessian(),
    }
    for kind, matrix in expected.items():
        with unchanged(p.model, p.loss, p.data):
            A = kind(p.model, p.loss, p.params, p.data, **p.net.options)
            close(A.to_dense(), matrix, what=kind.__name__)
            v = torch.linspace(-1, 1, len(matrix), dtype=torch.float64)
            close(A @ v, matrix @ v, what=f"{kind.__name__} @ v")


@every_problem
def test_gradient_and_loss(name: str) -> None:
    p = problem(name)
    with unchanged(p.model, p.loss, p.data):
        gradient = p.risk().gradient()
    assert list(gradient) == list(p.keyed)
    close(torch.cat([g.flatten() for g in gradient.values()]), p.exact.gradient())


@pytest.mark.one_in(2, all_of=FEW)
@every_problem
@separate_or_joint
def test_full_and_diagonal_blocks_are_the_ggn_s(name: str, separate: bool) -> None:
    p = problem(name)
    expected = p.exact.only_blocks(p.exact.ggn(), separate)
    risk = p.risk()
    for approximation, matrix in (
        (FullBlock, expected),
        (DiagonalBlock, expected.diagonal().diag()),
    ):
        K = p.curvature(approximation, risk=risk, separate_weight_and_bias=separate)
        close(K.to_dense(), matrix, what=approximation.__name__)


@pytest.mark.one_in(2, all_of=FEW)
@every_problem
@separate_or_joint
def test_empirical_fisher_blocks(name: str, separate: bool) -> None:
    p = problem(name)
    risk = p.risk()
    for vectors, per_term in ((VECTORS["empirical"], False), (VECTORS["empirical per term"], True)):
        expected = p.exact.only_blocks(p.exact.empirical_fisher(per_term), separate)
        K = p.curvature(FullBlock, risk=risk, vectors=vectors, separate_weight_and_bias=separate)
        close(K.to_dense(), expected, what=repr(vectors))


# --------------------------------------------------------------------------------------------- KFAC


@pytest.mark.one_in(4, all_of=FEW)
@in_every_form
def test_kfac_is_its_definition(name: str, separate: bool, reduce: bool) -> None:
    p = problem(name)
    K = p.curvature(kfac(reduce), separate_weight_and_bias=separate)
    close(K.to_dense(), p.exact.kfac(p.exact.exact(), reduce, separate))


@pytest.mark.one_in(3)
@few_problems
@separate_or_joint
@expand_or_reduce
@pytest.mark.parametrize("max_bytes", [0, 100, 150])
def test_large_factors_are_diagonal(
    name: str, separate: bool, reduce: bool, max_bytes: int
) -> None:
    p = problem(name)
    options = {"separate_weight_and_bias": separate}
    K = p.curvature(KFAC.using(**kfac(reduce).options, max_bytes=max_bytes), **options)
    expected = p.exact.kfac(p.exact.exact(), reduce, separate, max_bytes)
    close(K.to_dense(), expected)
    E = p.curvature(EKFAC.using(max_bytes=max_bytes), **options)
    exact = p.exact.only_blocks(p.exact.ggn(), separate)
    close(E.trace, exact.trace(), what="trace")
    if max_bytes == 0:
        assert not torch.equal(expected, p.exact.kfac(p.exact.exact(), reduce, separate)), (
            "the law can fail"
        )
        close(E.to_dense(), exact.diagonal().diag(), what="EKFAC in the basis of the parameters")


@few_problems
@separate_or_joint
@expand_or_reduce
def test_kfac_and_ekfac_of_the_empirical_fisher(name: str, separate: bool, reduce: bool) -> None:
    p = problem(name)
    for vectors, per_term in ((VECTORS["empirical"], False), (VECTORS["empirical per term"], True)):
        K = p.curvature(kfac(reduce), vectors=vectors, separate_weight_and_bias=separate)
        close(
            K.to_dense(),
            p.exact.kfac(p.exact.empirical(per_term), reduce, separate),
            what=repr(vectors),
        )
        E = p.curvature(ekfac(reduce), vectors=vectors, separate_weight_and_bias=separate)
        close(E.trace, p.exact.empirical_fisher(per_term).trace(), what=repr(vectors))


@pytest.mark.one_in(4, all_of=FEW)
@in_every_form
def test_ekfac_is_its_definition_keeps_the_trace_and_is_never_worse_than_kfac(
    name: str, separate: bool, reduce: bool
) -> None:
    p = problem(name)
    K = p.curvature(ekfac(reduce), separate_weight_and_bias=separate)
    of_kfac, dense = p.exact.kfac(p.exact.exact(), reduce, separate), K.to_dense()
    block_diagonal = p.exact.only_blocks(dense, separate)
    close(dense, block_diagonal, what="zero between blocks")
    for keys in p.exact.blocks(separate):
        at = p.exact.places(keys)
        block, E = dense[at[:, None], at], p.exact.ggn()[at[:, None], at]
        layer = p.exact.affine_layer(keys[0])
        if layer is None:
            close(block, E.diagonal().diag(), what=f"diagonal of {keys}")
            continue
        basis = K.blocks[keys[0] if separate else (layer or keys[0])].basis
        assert isinstance(basis, Kronecker) == p.exact.has_weight(keys)
        Q = basis.to_dense()[p.exact.order(keys)]
        close(Q.T @ Q, torch.eye(len(Q)), what=f"orthogonal basis of {keys}")
        factored = of_kfac[at[:, None], at]
        close(
            Q @ (Q.T @ factored @ Q).diagonal().diag() @ Q.T,
            factored,
            what=f"eigenvectors of {keys}",
        )
        close(block, Q @ (Q.T @ E @ Q).diagonal().diag() @ Q.T, what=f"block of {keys}")
    exact = p.exact.only_blocks(p.exact.ggn(), separate)
    close(K.trace, exact.trace(), what="trace")
    error, error_of_kfac = (dense - exact).norm(), (of_kfac - exact).norm()
    assert error <= error_of_kfac * (1 + 1e-9) + 1e-12, (
        f"error {error:.3g} of EKFAC, {error_of_kfac:.3g} of KFAC"
    )


class Given(Vectors):
    """Vectors of the user's own, one tensor [V, N, R, C] per batch."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches, self.index = batches, -1

    def count(self, likelihood: Any, F: Tensor) -> int:
        return 3

    def send(self, likelihood: Any, F: Tensor, Y: Tensor, draws: Any) -> Iterator[Tensor]:
        self.index = (self.index + 1) % len(self.batches)
        assert self.batches[self.index].shape[1:] == F.shape
        yield from self.batches[self.index]


@few_problems
@separate_or_joint
@expand_or_reduce
def test_vectors_of_the_user_s_own(name: str, separate: bool, reduce: bool) -> None:
    p = problem(name)
    generator = seeded()
    own = [
        torch.randn(3, *b.terms.shape, dtype=torch.float64, generator=generator)
        for b in p.exact.batches
    ]
    vectors = p.exact.given(own)
    exact = p.exact.only_blocks(p.exact.from_gradients(vectors), separate)
    K, F, E = (
        p.curvature(kind, vectors=Given(own), separate_weight_and_bias=separate)
        for kind in (kfac(reduce), FullBlock, ekfac(reduce))
    )
    close(K.to_dense(), p.exact.kfac(vectors, reduce, separate), what="KFAC")
    close(F.to_dense(), exact, what="FullBlock")
    close(E.trace, exact.trace(), what="EKFAC")


# ------------------------------------------------------------------------ what theory says is exact


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "ce-ignore-a-class"])
def test_kfac_is_exact_for_one_datum_without_sharing(loss: str) -> None:
    p = problem(f"mlp, {loss}")
    for batch in [(X[1:2], y[1:2]) for X, y in p.data if len(X) > 1]:
        single = Problem(p.net, p.loss, [batch])
        exact = single.exact.only_blocks(single.exact.ggn(), False)
        for kind in (KFAC, EKFAC):
            close(single.curvature(kind).to_dense(), exact, what=kind.__name__)


@expand_or_reduce
@separate_or_joint
def test_kfac_is_exact_for_deep_linear_nets_with_squared_error(
    reduce: bool, separate: bool
) -> None:
    """The output's derivative is then the same for every example (Bernacchia et al. 2018)."""
    p = problem("deep linear")
    exact = p.exact.only_blocks(p.exact.ggn(), separate)
    for approximation in (kfac(reduce), ekfac(reduce)):
        close(p.curvature(approximation, separate_weight_and_bias=separate).to_dense(), exact)


@pytest.mark.parametrize(
    "name", ["sequence", "grid", "flattened", "flattened, mse", "flattened, bce"]
)
def test_random_signs_are_exact_for_expand_where_positions_do_not_mix(name: str) -> None:
    p = problem(name)
    K = p.curvature(KFAC, vectors=Exact(signs=True, seed=5))
    close(K.to_dense(), p.exact.kfac(p.exact.exact()))


# ----------------------------------------------------------------------------------- data and scale


def merged(p: Problem, sizes: list[int]) -> list[Any]:
    """The same examples in batches of other sizes."""
    if isinstance(p.data[0], dict):
        whole = {key: torch.cat([batch[key] for batch in p.data]) for key in p.data[0]}
        return [
            dict(zip(whole, parts, strict=True))
            for parts in zip(*(t.split(sizes) for t in whole.values()), strict=True)
        ]
    X, y = (torch.cat(parts) for parts in zip(*p.data, strict=True))
    return list(zip(X.split(sizes), y.split(sizes), strict=True))


@pytest.mark.one_in(3)
@few_problems
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_batch_sizes_do_not_matter(name: str, approximation: str) -> None:
    """Nor do they for random draws, which follow the examples."""
    p = problem(name)
    risks = [p.risk(merged(p, sizes)) for sizes in ([6], [2, 1, 3])]
    for vectors in ("exact", "signs", "mc", "empirical", "empirical per term"):
        K, other = (
            p.curvature(APPROXIMATIONS[approximation], risk=r, vectors=VECTORS[vectors])
            for r in risks
        )
        what = f"{vectors}, batches of [6] and [2, 1, 3]"
        if (
            "EKFAC" in approximation
        ):  # where a factor lacks rank, rounding decides about its eigenvectors
            close(other.trace, K.trace, what=what)
        else:
            close(other.to_dense(), K.to_dense(), what=what)


@pytest.mark.parametrize("loss", LOSSES)
def test_mean_is_sum_over_what_pytorch_divides_by(loss: str) -> None:
    for net in ("mlp", "attention"):
        p = problem(f"{net}, {loss}")
        other = Problem(
            p.net, p.exact.summed if p.loss.reduction == "mean" else p.exact.mean, p.data
        )
        divisor = sum(b.divisor for b in p.exact.batches)
        mean, summed = (p, other) if p.loss.reduction == "mean" else (other, p)
        of_mean, of_sum = mean.risk(), summed.risk()
        for approximation in (KFAC, EKFAC, FullBlock):
            K, S = (
                mean.curvature(approximation, risk=of_mean),
                summed.curvature(approximation, risk=of_sum),
            )
            close(K.to_dense() * divisor, S.to_dense())


@pytest.mark.parametrize(
    "name", ["mlp", "attention", "attention, ce-ignore", "mlp, mse-sum", "attention, mse"]
)
def test_given_counts_replace_the_divisor_of_the_loss_and_nothing_else(name: str) -> None:
    p = problem(name)
    data, terms = {"num_data": 17}, {"num_per_example_loss_terms": 5}
    for given in (data, terms, data | terms):
        twin = p.reference(
            num_data=given.get("num_data"), num_terms=given.get("num_per_example_loss_terms")
        )
        K, F = (p.curvature(kind, risk=given).to_dense() for kind in (KFAC, FullBlock))
        close(K, twin.kfac(twin.exact()), what=f"KFAC with {given}")
        close(F, twin.only_blocks(twin.ggn(), False), what=f"FullBlock with {given}")
        A = GGNLinearOperator(p.model, p.loss, p.params, p.data, **given, **p.net.options)
        close(A.to_dense(), twin.ggn(), what=f"GGN with {given}")


def attended(X: Any, y: Tensor) -> Tensor:
    """A mask [N, T] that keeps the first position and some others."""
    return (torch.arange(y.numel()).view(y.shape) % 3 != 1) | (torch.arange(y.shape[1]) == 0)


@pytest.mark.parametrize("name", ["attention", "sequence", "uneven sequences", "time first"])
@expand_or_reduce
@separate_or_joint
def test_masked_positions_leave_both_factors(name: str, reduce: bool, separate: bool) -> None:
    p = problem(name)
    twin = p.reference(mask=attended)
    K = p.curvature(kfac(reduce), risk={"mask": attended}, separate_weight_and_bias=separate)
    close(K.to_dense(), twin.kfac(twin.exact(), reduce, separate))


FACTORED = [
    "mlp",
    "strided cnn",
    "attention",
    "called twice",
    "frozen sequence",
    "grouped cnn",
    "padding index",
]


@pytest.mark.parametrize("name", [*FACTORED, "self-attention", "cross-attention of three sizes"])
@expand_or_reduce
@separate_or_joint
def test_forward_only_needs_no_backward_pass(name: str, reduce: bool, separate: bool) -> None:
    p = problem(name)

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled() or not x.requires_grad
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise AssertionError("a backward pass was run")

    graphs: list[Any] = []
    *_, last = [m for m in p.model.modules() if isinstance(m, nn.Linear)]
    handles = [
        p.model.register_forward_hook(lambda module, args, out: NoBackward.apply(out)),
        last.register_forward_hook(lambda module, args, out: graphs.append(out.grad_fn)),
    ]
    try:
        K = p.curvature(
            kfac(reduce), vectors=VECTORS["forward only"], separate_weight_and_bias=separate
        )
    finally:
        [handle.remove() for handle in handles]
    assert set(graphs) == {None}, "an autograd graph was built"
    for keys in p.exact.blocks(separate):
        layer = p.exact.affine_layer(keys[0])
        assert layer is not None
        A, G = p.exact.factors(layer, p.exact.exact(), reduce, ones=len(keys) > 1)
        A = A if p.exact.has_weight(keys) else torch.ones(1, 1)
        r, c = p.exact.matrix_places(keys)
        at = p.exact.places(keys)
        expected = torch.eye(len(G), dtype=G.dtype)[r[:, None], r] * A[c[:, None], c]
        close(K.to_dense()[at[:, None], at], expected, what=str(keys))


# -------------------------------------------------------------------------------- numbers and forms


@few_problems
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@separate_or_joint
def test_numbers_that_follow_from_structure(name: str, approximation: str, separate: bool) -> None:
    p = problem(name)
    K = p.made(approximation, separate)
    dense = K.to_dense()
    eye = torch.eye(len(dense), dtype=torch.float64)
    close(dense, dense.T, what="symmetric")
    close(K @ eye, dense, what="products")
    close(eye @ K, dense, what="products from the left")
    close(K.trace, dense.trace(), what="trace")
    close(K.frobenius_norm, dense.norm(), what="Frobenius norm")
    close(K.diagonal(), dense.diagonal(), what="diagonal")
    close(
        K.eigenvalues().sort().values,
        torch.linalg.eigvalsh(dense).clamp(min=0),
        rtol=1e-7,
        what="eigenvalues",
    )
    assert K.eigenvalues().min() >= -1e-9
    damped = dense + 0.1 * eye
    close(K.inverse(damping=0.1).to_dense(), torch.linalg.inv(damped), what="inverse")
    close(
        K.inverse(damping=0.1).logdet,
        -torch.linalg.slogdet(damped).logabsdet,
        what="logdet of the inverse",
    )
    identity = IdentityLinearOperator(K.in_shapes, K.device, K.dtype)
    close(
        (K + 0.1 * identity).logdet,
        torch.linalg.slogdet(damped).logabsdet,
        what="logdet of a damped sum",
    )
    half = K.power(-0.5, damping=0.1).to_dense()
    close(half @ damped @ half, eye, rtol=1e-8, what="power")
    J = normal(3, 2, len(dense), seed=4)
    close(K.quadratic_form(J), J @ dense @ J.mT, what="quadratic form")


@few_problems
def test_vectors_come_back_in_the_form_in_which_they_were_given(name: str) -> None:
    p = problem(name)
    K = p.curvature(KFAC)
    dense, (n, _) = K.to_dense(), K.shape
    for columns in ((), (4,)):
        v = normal(n, *columns, seed=3)
        tree, start = {}, 0
        for key, q in p.keyed.items():
            tree[key], start = (
                v[start : start + q.numel()].view(*q.shape, *columns),
                start + q.numel(),
            )
        expected = dense @ v
        close(K @ v, expected)
        got = K @ tree
        assert list(got) == list(tree)
        close(torch.cat([t.reshape(-1, *columns) for t in got.values()]), expected)
        listed = K @ list(tree.values())
        assert isinstance(listed, list)
        assert [t.shape for t in listed] == [t.shape for t in tree.values()]
        close(torch.cat([t.reshape(-1, *columns) for t in listed]), expected)
        close(torch.as_tensor(K @ v.numpy()), expected)


def test_a_different_approximation_for_every_layer() -> None:
    p = problem("generic layers")
    with pytest.warns(match="1 of 4 layers"):
        K = curvature(p.risk(), {nn.LayerNorm: FullBlock, "4": EKFAC}, default=KFAC)
    exact = p.exact.ggn()
    close(K.to_dense()[:20, :20], p.exact.kfac(p.exact.exact())[:20, :20], what="the embedding")
    for keys, block in ((["1.weight", "1.bias"], "full"), (["2.weight"], "diagonal")):
        at = p.exact.places(keys)
        expected = exact[at[:, None], at]
        close(
            K.to_dense()[at[:, None], at],
            expected if block == "full" else expected.diagonal().diag(),
            what=str(keys),
        )
    assert type(K.blocks["4"]).__name__ == "Eigendecomposed"
    only = curvature(
        p.risk(), {"?": DiagonalBlock, "1": FullBlock, nn.Linear: KFAC}
    )  # exact name, then glob, then type
    assert [type(block).__name__ for block in only.blocks.values()] == [
        "Diagonal",
        "Dense",
        "Diagonal",
        "Diagonal",
    ]


# ----------------------------------------------------------------------------- the helpers can fail
