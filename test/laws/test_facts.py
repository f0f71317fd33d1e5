"""Facts about curvature that any correct package must show, in float64 at 1e-10 relative to the norm.

They are those that kfac_jax was measured by. Facts about every problem of `cases.py` are in `test_laws.py`; here are
those that need nets, losses or vectors of their own, most with a control that they do not hold by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import ByPosition, Net, Problem
from cases import close as close_to
from torch import Tensor, nn

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
    MonteCarlo,
)
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


def operator(kind: Any, p: Problem, **options: Any) -> Tensor:
    return kind(p.model, p.loss, p.params, p.data, check_deterministic=False, **options).to_dense()


def differs(one: Tensor, other: Tensor, at_least: float = 0.05) -> None:
    """The control of a fact: without its condition it does not hold."""
    error = float((one - other).norm() / other.norm())
    assert error > at_least, f"equal to {error:.1e}, although nothing says so"


# ------------------------------------------------------------------------------------------------------ exact matrices


NATURAL = {
    "ce": (nn.CrossEntropyLoss(), classes(5)),
    "mse": (nn.MSELoss(), numbers(5, 3)),
    "bce": (nn.BCEWithLogitsLoss(), classes(5, 3, C=2).double()),
    "poisson": (nn.PoissonNLLLoss(), classes(5, 3, C=6).double()),
}
natural = pytest.mark.parametrize("name", NATURAL)


# ------------------------------------------------------------------------------------------------- where KFAC is exact


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


@pytest.mark.slow
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
