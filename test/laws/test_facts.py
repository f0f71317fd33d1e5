"""Facts about curvature that any correct package must show, in float64 at 1e-10 relative to the norm.

They are those that kfac_jax was measured by. Facts about every problem of `cases.py` are in `test_laws.py`; here are
those that need nets, losses or vectors of their own, most with a control that they do not hold by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import ByPosition, Net, Problem
from cases import close as close_to
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    EFLinearOperator,
    Empirical,
    Exact,
    FisherMCLinearOperator,
    FullBlock,
    GGNLinearOperator,
    HessianLinearOperator,
    MonteCarlo,
)
from curvlinops_plus.likelihood import likelihood_of
from curvlinops_plus.risk.vectors import CurvaturePropagation, as_vectors

F64 = torch.float64
close = partial(close_to, rtol=1e-10)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, C: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(C, shape, generator=torch.Generator().manual_seed(seed))


def made(model: nn.Module, loss: nn.Module, *data: tuple[Tensor, Tensor]) -> Problem:
    """A problem whose parameters are fixed numbers."""
    model.double()
    with torch.no_grad():
        for index, q in enumerate(model.parameters()):
            q.copy_(0.7 * numbers(*q.shape, seed=100 + index))
    return Problem(Net(model, [X for X, _ in data]), loss, list(data))


def mlp(activation: nn.Module | None = None, o: int = 3, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), activation or nn.Tanh(), nn.Linear(5, o), *more)


def jacobian(p: Problem, X: Tensor, of: Callable[[Tensor], Tensor] = lambda f: f) -> Tensor:
    """Jacobian [*shape of the output, P] of a function of the output."""
    params = dict(p.model.named_parameters())
    J = jacrev(lambda values: of(functional_call(p.model, values, (X,))))({k: q.detach() for k, q in params.items()})
    dim = p.model(X).ndim
    return torch.cat([j.flatten(dim) for j in J.values()], -1)


def operator(kind: Any, p: Problem, **options: Any) -> Tensor:
    return kind(p.model, p.loss, p.params, p.data, check_deterministic=False, **options).to_dense()


def differs(one: Tensor, other: Tensor, at_least: float = 0.05) -> None:
    """The control of a fact: without its condition it does not hold."""
    error = float((one - other).norm() / other.norm())
    assert error > at_least, f"equal to {error:.1e}, although nothing says so"


# ------------------------------------------------------------------------------------------------------ exact matrices


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.PoissonNLLLoss()])
def test_fact_1_the_dense_ggn_is_the_mean_of_jhj_and_the_columns_of_the_operator(loss: nn.Module) -> None:
    X = numbers(5, 4)
    y = classes(5) if isinstance(loss, nn.CrossEntropyLoss) else numbers(5, 3, seed=1).abs().clamp(max=1)
    p = made(mlp(), loss, (X, y))
    J, f = jacobian(p, X), p.model(X).detach()
    # Each divides by what the mean of one example divides by.
    H = torch.stack([jacrev(jacrev(lambda z, n=n: loss(z[None], y[n : n + 1])))(f[n]) for n in range(5)])
    expected = torch.einsum("ncp,ncd,ndq->pq", J, H, J) / 5
    close(operator(GGNLinearOperator, p), expected, what="to_dense")
    G = GGNLinearOperator(p.model, p.loss, p.params, p.data)
    close(torch.stack([G @ e for e in torch.eye(len(expected), dtype=F64)], 1), expected, what="columns")


def by_labels(p: Problem) -> Tensor:
    """The Fisher matrix by its definition: scores of every possible target, weighed by the model's probabilities."""
    ((X, _),) = p.data
    f, J = p.model(X).detach(), jacobian(p, X)
    N, C = f.shape
    if isinstance(p.loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        log_p = jacobian(p, X, lambda f: f.log_softmax(-1))
        return torch.einsum("nc,ncp,ncq->pq", f.softmax(-1), log_p, log_p) / N
    total = torch.zeros(J.shape[-1], J.shape[-1], dtype=F64)
    for label in product((0.0, 1.0), repeat=C):
        y = torch.tensor(label, dtype=F64).expand(N, C)
        if isinstance(p.loss, nn.MSELoss):  # two points with the mean and the variance of the normal distribution
            weight, v = torch.full((N,), 0.5**C, dtype=F64), 2 * (y - 0.5) * 2**0.5
        else:
            q = f if isinstance(p.loss, nn.BCELoss) else f.sigmoid()
            weight = (q * y + (1 - q) * (1 - y)).prod(-1)
            v = (q - y) / (q * (1 - q)) if isinstance(p.loss, nn.BCELoss) else q - y
        score = torch.einsum("nc,ncp->np", v, J)
        total += torch.einsum("n,np,nq->pq", weight, score, score)
    return total / (N * C)


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (nn.CrossEntropyLoss(), nn.Identity()),
        (nn.NLLLoss(), nn.LogSoftmax(-1)),
        (nn.BCEWithLogitsLoss(), nn.Identity()),
        (nn.BCELoss(), nn.Sigmoid()),
        (nn.MSELoss(), nn.Identity()),
    ],
    ids=lambda part: type(part).__name__,
)
def test_fact_2_the_exact_fisher_is_the_exact_ggn(loss: nn.Module, last: nn.Module) -> None:
    """Also the Fisher of losses that read log-probabilities or probabilities, by what a model ends in."""
    y = classes(4) if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) else classes(4, 3, C=2).double()
    p = made(mlp(None, 3, last), loss, (numbers(4, 4), y))
    fisher = by_labels(p)
    close(operator(GGNLinearOperator, p), fisher, what="GGN")
    blocks = p.exact.only_blocks(fisher, False)
    close(p.curvature(FullBlock, vectors=as_vectors("fisher_exact")).to_dense(), blocks, what="fisher_exact")
    if likelihood_of(loss).no_ggn is None:
        close(p.curvature(FullBlock, vectors=as_vectors("ggn_exact")).to_dense(), blocks, what="ggn_exact")
    differs(operator(EFLinearOperator, p), fisher)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.PoissonNLLLoss(), nn.PoissonNLLLoss(log_input=False)])
def test_fact_3_full_and_diagonal_blocks_are_those_of_the_full_matrix(loss: nn.Module) -> None:
    y = classes(5) if isinstance(loss, nn.CrossEntropyLoss) else classes(5, 3, C=6).double()
    p = made(mlp(None, 3, nn.Softplus()), loss, (numbers(5, 4), y))
    whole = operator(GGNLinearOperator, p)
    blocks = p.exact.only_blocks(whole, False)
    close(p.curvature(FullBlock).to_dense(), blocks, what="full")
    close(p.curvature(DiagonalBlock).to_dense(), whole.diagonal().diag(), what="diagonal")
    differs(blocks, whole)


NATURAL = {
    "ce": (nn.CrossEntropyLoss(), classes(5)),
    "mse": (nn.MSELoss(), numbers(5, 3)),
    "bce": (nn.BCEWithLogitsLoss(), classes(5, 3, C=2).double()),
    "poisson": (nn.PoissonNLLLoss(), classes(5, 3, C=6).double()),
}
natural = pytest.mark.parametrize("name", NATURAL)


@natural
def test_fact_4_hessian_and_ggn_are_equal_for_a_model_that_is_linear_in_its_parameters(name: str) -> None:
    loss, y = NATURAL[name]
    p = made(nn.Sequential(nn.Tanh(), nn.Linear(4, 3)), loss, (numbers(5, 4), y))
    close(operator(HessianLinearOperator, p), operator(GGNLinearOperator, p))


@natural
def test_fact_4_hessian_and_ggn_have_equal_blocks_for_a_piecewise_linear_net(name: str) -> None:
    loss, y = NATURAL[name]
    p = made(mlp(nn.ReLU()), loss, (numbers(5, 4), y))
    H, G = operator(HessianLinearOperator, p), operator(GGNLinearOperator, p)
    close(p.exact.only_blocks(H, False), p.exact.only_blocks(G, False))
    differs(H, G, 1e-3)
    curved = made(mlp(nn.Tanh()), loss, (numbers(5, 4), y))
    H, G = (
        curved.exact.only_blocks(operator(kind, curved), False) for kind in (HessianLinearOperator, GGNLinearOperator)
    )
    differs(H, G, 1e-3)


# ------------------------------------------------------------------------------------------------- where KFAC is exact


def test_fact_5_kfac_is_exact_for_a_deep_linear_net_with_squared_error_and_not_with_cross_entropy() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3))

    p = made(deep(), nn.MSELoss(), (numbers(6, 4), numbers(6, 3, seed=1)))
    exact = p.curvature(FullBlock).to_dense()
    for approximation in (KFAC, EKFAC):
        close(p.curvature(approximation).to_dense(), exact)
    p = made(deep(), nn.CrossEntropyLoss(), (numbers(6, 4), classes(6)))
    K, F = p.curvature(KFAC).blocks, p.curvature(FullBlock).blocks
    for name in K:
        differs(K[name].to_dense(), F[name].to_dense())


@natural
@pytest.mark.parametrize(
    "vectors",
    [Exact(), MonteCarlo(seed=3), Empirical(), CurvaturePropagation(seed=3)],
    ids=lambda vectors: type(vectors).__name__,
)
def test_fact_6_kfac_is_exact_for_one_example(name: str, vectors: Any) -> None:
    """Any net without weight sharing, all columns or one vector of any kind."""
    loss, y = NATURAL[name]
    p = made(mlp(), loss, (numbers(1, 4), y[:1]))
    exact = p.curvature(FullBlock, vectors=vectors).to_dense()
    for approximation in (KFAC, EKFAC):
        close(p.curvature(approximation, vectors=vectors).to_dense(), exact)
    two = made(mlp(), loss, (numbers(2, 4), y[:2]))
    one, other = (two.curvature(kind, vectors=vectors).to_dense() for kind in (KFAC, FullBlock))
    differs(one, other, 1e-3)


def test_fact_7_kfac_is_exact_for_a_last_linear_layer_with_squared_error() -> None:
    """Whatever is below, here convolution, pooling and normalization."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3, affine=False), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 2)
    )
    p = made(model, nn.MSELoss(), (numbers(4, 2, 3, 3), numbers(4, 2, seed=1)))
    exact = p.curvature(FullBlock).blocks
    for approximation in (KFAC, EKFAC):
        K = p.curvature(approximation).blocks
        close(K["5"].to_dense(), exact["5"].to_dense())
        differs(K["0"].to_dense(), exact["0"].to_dense())


def test_fact_8_expand_is_exact_with_a_loss_term_per_position_and_reduce_with_their_mean() -> None:
    """Deep linear with squared error. Every position counts although exact vectors are zero at all but one."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    X = numbers(4, 3, 4)
    linear = lambda *middle: nn.Sequential(nn.Linear(4, 5), *middle, nn.Linear(5, 2))  # noqa: E731
    by_position = made(linear(), nn.MSELoss(), (X, numbers(4, 3, 2, seed=1)))
    pooled = made(linear(Mean()), nn.MSELoss(), (X, numbers(4, 2, seed=1)))
    expand, reduce = KFAC, KFAC.using(kfac_approx="reduce")
    for p, right, wrong in ((by_position, expand, reduce), (pooled, reduce, expand)):
        exact = p.curvature(FullBlock).blocks["0"].to_dense()
        K = p.curvature(right).blocks["0"]
        close(K.to_dense(), exact)
        assert float(K.A.to_dense()[-1, -1]) == pytest.approx(1, rel=1e-14), "the bias counts every position"
        differs(p.curvature(wrong).blocks["0"].to_dense(), exact)


# ------------------------------------------------------------------------------------------------------ random vectors


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.PoissonNLLLoss()])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
def test_fact_13_curvature_propagation_has_no_noise_for_one_output(loss: nn.Module, approximation: Any) -> None:
    p = made(mlp(None, 1), loss, (numbers(5, 4), classes(5, 1, C=2).double()))
    exact = p.curvature(approximation, vectors=Exact()).to_dense()
    for vectors in (CurvaturePropagation(), CurvaturePropagation(3, seed=8)):
        close(p.curvature(approximation, vectors=vectors).to_dense(), exact)
    differs(p.curvature(approximation, vectors=MonteCarlo()).to_dense(), exact)


def within_4_standard_errors(draws: Tensor, expected: Tensor) -> None:
    spread = draws.std(0) / len(draws) ** 0.5
    assert float(spread.max()) > 0, "nothing was drawn"
    z = (draws.mean(0) - expected).abs() / (spread + 1e-12 * expected.abs().max())
    assert z.max() < 4, f"{z.max().item():.2f} standard errors"


@pytest.mark.parametrize("kind", [MonteCarlo, CurvaturePropagation])
@pytest.mark.parametrize("sequence", [False, True], ids=["one term", "several terms"])
def test_fact_14_random_vectors_average_to_the_exact_matrix(kind: Any, sequence: bool) -> None:
    """Full blocks and gradient factors, which are linear in the products of gradients."""
    if sequence:
        p = made(nn.Sequential(mlp(), Swap()), nn.CrossEntropyLoss(), (numbers(3, 2, 4), classes(3, 2)))
    else:
        p = made(mlp(), nn.CrossEntropyLoss(), (numbers(5, 4), classes(5)))
    exact, factors = p.curvature(FullBlock).to_dense(), gradient_factors(p, Exact())
    drawn = [p.curvature(FullBlock, vectors=kind(10, seed=s)).to_dense() for s in range(80)]
    within_4_standard_errors(torch.stack(drawn), exact)
    within_4_standard_errors(torch.stack([gradient_factors(p, kind(10, seed=s)) for s in range(80)]), factors)
    for wrong in (1.2 * exact, p.exact.only_blocks(operator(EFLinearOperator, p), False)):
        with pytest.raises(AssertionError, match="standard errors"):
            within_4_standard_errors(torch.stack(drawn), wrong)


def test_curvature_propagation_has_less_noise_than_drawn_labels_where_predictions_are_peaked() -> None:
    p = made(mlp(None, 10), nn.CrossEntropyLoss(), (numbers(20, 4), classes(20, C=10)))
    with torch.no_grad():
        p.model[2].weight.mul_(6)  # type: ignore[index]
    assert p.model(p.data[0][0]).softmax(-1).amax(-1).mean() > 0.8
    exact = p.curvature(FullBlock).to_dense()

    def error(kind: Any) -> float:
        draws = torch.stack([p.curvature(FullBlock, vectors=kind(1, seed=s)).to_dense() for s in range(60)])
        return float((draws - exact).square().sum((1, 2)).mean() / exact.square().sum())

    assert error(CurvaturePropagation) < error(MonteCarlo)


class Swap(nn.Module):
    """Classes to the axis where cross-entropy expects them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)


def gradient_factors(p: Problem, vectors: Any) -> Tensor:
    K = p.curvature(KFAC, vectors=vectors)
    return torch.cat([block.G.to_dense().flatten() for block in K.blocks.values()])


# ------------------------------------------------------------------------------------------------------------- weights

WEIGHTED: dict[str, tuple[Callable[[float], nn.Module], Tensor]] = {
    "ce": (lambda w: nn.CrossEntropyLoss(torch.full((3,), w, dtype=F64), reduction="sum"), classes(5)),
    "bce": (lambda w: nn.BCEWithLogitsLoss(torch.tensor(w)), classes(5, 3, C=2).double()),
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize(
    ("mode", "factor"),
    [
        ("fisher_exact", 3.0),
        ("ggn_exact", 3.0),
        ("fisher_gradients", 3.0),
        ("fisher_curvature_prop", 3.0),
        ("ggn_curvature_prop", 3.0),
        ("fisher_empirical", 9.0),
    ],
)
def test_fact_15_a_weight_scales_the_matrix_and_its_square_the_empirical_fisher(
    name: str, mode: str, factor: float
) -> None:
    loss, y = WEIGHTED[name]
    one, three = (made(mlp(), loss(w), (numbers(5, 4), y)) for w in (1.0, 3.0))
    for approximation in (KFAC, FullBlock):
        plain, scaled = (q.curvature(approximation, vectors=as_vectors(mode)).to_dense() for q in (one, three))
        close(scaled, factor * plain)
    close(operator(GGNLinearOperator, three), 3 * operator(GGNLinearOperator, one))
    close(operator(FisherMCLinearOperator, three), 3 * operator(FisherMCLinearOperator, one))
    close(operator(EFLinearOperator, three), 9 * operator(EFLinearOperator, one))


# --------------------------------------------------------------------------------------------------- roots and columns


def test_fact_26_columns_reassemble_the_root_for_logits_of_any_number_of_dimensions() -> None:
    """`Σ (Jᵀ b)(Jᵀ b)ᵀ` over one-hot columns `b` of all positions is `Jᵀ H J`; kfac_jax errs from 3 dimensions on.

    That `B (Bᵀ v) = H v` for every loss with every option is in `test/likelihood/test_losses.py`.
    """
    for d in ((), (2,), (2, 2)):
        X, y = numbers(3, 4, *d), classes(3, *d)
        conv = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d}[len(d)]
        layers = [conv(4, 5), conv(5, 3)] if not d else [conv(4, 5, 1), conv(5, 3, 1)]
        p = made(nn.Sequential(layers[0], nn.Tanh(), layers[1]), nn.CrossEntropyLoss(), (X, y))
        loss, f = likelihood_of(p.loss), p.model(X).detach()
        F, Y = loss.canonical(f, y, 3)
        J = jacobian(p, X).flatten(0, -2)
        expected = torch.zeros(J.shape[-1], J.shape[-1], dtype=F64)
        columns = loss.num_columns(F)
        for n, r, k in product(range(3), range(F.shape[1]), range(columns)):
            u = torch.zeros(*F.shape[:2], columns, dtype=F64)
            u[n, r, k] = 1
            column = loss.restore(loss.hessian_root_product(F, Y, u), f.shape, 3).flatten() @ J
            expected += torch.outer(column, column) / (3 * F.shape[1])
        close(operator(GGNLinearOperator, p), expected, what=f"{2 + len(d)} dimensions")
        close(p.curvature(FullBlock).to_dense(), p.exact.only_blocks(expected, False), what="blocks")


# --------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
def test_fact_27_ignored_examples_leave_the_exact_matrix(approximation: Any) -> None:
    """A mean divides by what is kept, so the matrix is that of the kept rows; a sum over N is N_kept / N of it."""
    X, y = numbers(6, 4), classes(6)
    y[[1, 4]] = -100
    kept = y >= 0
    for reduction in ("mean", "sum"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        all_rows, kept_rows = made(mlp(), loss, (X, y)), made(mlp(), loss, (X[kept], y[kept]))
        exact = operator(GGNLinearOperator, all_rows)
        close(exact, operator(GGNLinearOperator, kept_rows))
        if approximation in (DiagonalBlock, FullBlock):
            close(all_rows.curvature(approximation).to_dense(), kept_rows.curvature(approximation).to_dense())
        else:  # the input factor is one of all inputs, unless a mask says more
            differs(all_rows.curvature(approximation).to_dense(), kept_rows.curvature(approximation).to_dense(), 1e-3)
        mean = operator(GGNLinearOperator, made(mlp(), nn.CrossEntropyLoss(), (X[kept], y[kept])))
        if reduction == "sum":
            close(exact / 6, mean * 4 / 6)


def sequences() -> tuple[Problem, Problem]:
    """Sequences of 5 positions of which 3 count, and the same ones cut off after 3."""
    X, y = numbers(4, 5, 4), classes(4, 5)
    short = made(ByPosition(mlp()), nn.CrossEntropyLoss(), (X[:, :3], y[:, :3]))
    masked = y.clone()
    masked[:, 3:] = -100
    return made(ByPosition(mlp()), nn.CrossEntropyLoss(), (X, masked)), short


def counted(X: Tensor, y: Tensor) -> Tensor:
    return y >= 0


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize("vectors", [Exact(), Empirical()], ids=repr)
def test_fact_27_masked_positions_are_as_if_they_were_not_there(approximation: Any, vectors: Any) -> None:
    long, short = sequences()
    K = long.curvature(approximation, risk={"mask": counted}, vectors=vectors)
    close(K.to_dense(), short.curvature(approximation, vectors=vectors).to_dense())


@pytest.mark.parametrize("vectors", [Exact(), Empirical(), MonteCarlo(), CurvaturePropagation()], ids=repr)
def test_fact_27_the_corner_of_a_bias_counts_kept_positions(vectors: Any) -> None:
    """Nothing is inferred from gradients that happen to be zero: only the mask says what is left out."""
    long, short = sequences()
    masked = long.curvature(KFAC, risk={"mask": counted}, vectors=vectors).blocks
    plain, cut = (p.curvature(KFAC, vectors=vectors).blocks for p in (long, short))
    for name, block in masked.items():
        A = block.A.to_dense()
        assert float(A[-1, -1]) == pytest.approx(1, rel=1e-14)
        close(A, cut[name].A.to_dense())
        differs(plain[name].A.to_dense(), A)


# ------------------------------------------------------------------------------------------------------- convolutions
class Pixels(nn.Module):
    """Channels last, a linear layer at every pixel, channels first."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.linear = nn.Linear(i, o)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("approximation", [KFAC, KFAC.using(kfac_approx="reduce"), EKFAC, FullBlock])
def test_fact_9_a_one_by_one_convolution_is_a_linear_layer_at_every_pixel(approximation: Any) -> None:
    tail = nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    data = numbers(5, 3, 4, 2), classes(5)
    convolution = made(nn.Sequential(nn.Conv2d(3, 3, 1), *tail), nn.CrossEntropyLoss(), data)
    linear = made(nn.Sequential(Pixels(3, 3), *tail), nn.CrossEntropyLoss(), data)
    with torch.no_grad():
        for p, q in zip(linear.params, convolution.params, strict=True):
            p.copy_(q.view_as(p))
    close(convolution.curvature(approximation).to_dense(), linear.curvature(approximation).to_dense())


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, (2, 0)])
@pytest.mark.parametrize("groups", [1, 2])
def test_fact_28_the_input_factor_is_the_second_moment_of_the_patches(
    groups: int, padding: Any, stride: int, dilation: int
) -> None:
    layer = nn.Conv2d(4, 2, 3, stride, padding, dilation, groups, bias=False)
    model = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    X = numbers(3, 4, 7, 6)
    p = made(model, nn.MSELoss(), (X, numbers(3, 2, seed=1)))
    patches = nn.functional.unfold(X, 3, dilation, padding, stride).mT.unflatten(-1, (groups, -1))  # [N, S, g, i]
    assert patches.shape[1] == layer(X)[0, 0].numel()  # as many locations as the output has
    A = torch.einsum("nsgi,nsgj->gij", patches, patches) / patches[..., 0, 0].numel()
    close(p.curvature(KFAC).blocks["0"].A.to_dense(), torch.block_diag(*A))
