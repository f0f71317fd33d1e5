"""Losses that users write: a kind of fault in each function."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    CurvatureWarning,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    Hessian,
    MonteCarlo,
    NumericsError,
    curvature,
)
from test.cases import close
from test.helpers import seeded


# ---------------------------------------------------- values of batches and those of their examples
def root_of_mean_square(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().mean().sqrt()


def dice(f: Tensor, y: Tensor) -> Tensor:
    p, t = f.sigmoid(), y.sigmoid()
    return 1 - 2 * (p * t).sum() / (p.square().sum() + t.square().sum())


def contrastive(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f @ y.T, torch.arange(len(f)))


def cox(f: Tensor, y: Tensor) -> Tensor:
    order = y[:, 0].argsort(descending=True)
    risk = f[order, 0]
    return (risk.logcumsumexp(0) - risk).mean()


def mean_over_kept(f: Tensor, y: Tensor) -> Tensor:
    kept = y > -0.5
    return ((f - y).square() * kept).sum() / kept.sum()


def weighted_classes(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, (y[:, 0] > 0).long(), weight=torch.tensor([1.0, 5.0, 1.0]).to(f))


def variance_of_outputs(f: Tensor, y: Tensor) -> Tensor:
    """Of a single example it is not a number."""
    return (f - y).var(0).sum()


def broadcast_by_mistake(f: Tensor, y: Tensor) -> Tensor:
    return (f[:, 0] - y[:, :1]).square().mean()


OF_BATCHES = (
    root_of_mean_square,
    dice,
    contrastive,
    cox,
    mean_over_kept,
    weighted_classes,
    variance_of_outputs,
    broadcast_by_mistake,
)


def examples(N: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = seeded(1)
    X, y = torch.randn(2, N, 3, generator=generator).to(dtype)
    return X, y


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3).to(dtype)


def told(risk: EmpiricalRisk) -> list[str]:
    """What all uses of a risk warn of."""
    v = torch.ones(risk.space.dim, dtype=risk.dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        risk.loss()
        risk.gradient()
        for operator in (Hessian(risk), GGN(risk)):
            operator @ v
            operator @ torch.stack([v, 2 * v], 1)
        risk.loss()
    ours = [warning for warning in caught if issubclass(warning.category, CurvatureWarning)]
    assert all(warning.filename == __file__ for warning in ours)
    return [str(warning.message) for warning in ours]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("loss", OF_BATCHES, ids=lambda loss: loss.__name__)
def test_a_loss_that_is_no_mean_over_examples(
    loss: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    """The package weighs batches by their numbers of examples, which is the loss of all only if it
    is such a mean.
    """
    model, (X, y) = linear(dtype), examples(dtype=dtype)
    with torch.no_grad():
        whole = loss(model(X), y)
        halves = (loss(model(X[:6]), y[:6]) + loss(model(X[6:]), y[6:])) / 2
        thirds = sum(loss(model(X[n : n + 4]), y[n : n + 4]) for n in (0, 4, 8)) / 3
    assert abs(halves - whole) > 1e-4 or abs(thirds - whole) > 1e-4  # so the split matters

    (message,) = told(EmpiricalRisk(model, loss, [(X[:6], y[:6]), (X[6:], y[6:])]))
    assert message.startswith(
        f"{loss.__name__} is not the mean of the losses of single examples: for 6 of them it is "
    )
    assert (
        "depend on how the data are split into batches. Give all data in one batch, or a loss that"
        in message
    )
    # One batch is no split, whatever its loss; and that is the number.
    risk = EmpiricalRisk(model, loss, [(X, y)])
    assert not told(risk)
    torch.testing.assert_close(risk.loss(), whole)


@pytest.mark.parametrize(
    "loss", [root_of_mean_square, dice, broadcast_by_mistake], ids=lambda loss: loss.__name__
)
def test_blocks_of_such_losses(loss: Callable[..., Tensor]) -> None:
    """They are told, too, and are those of the losses of single examples."""
    model, (X, y) = linear(), examples()
    risk = EmpiricalRisk(model, loss, [(X[:6], y[:6]), (X[6:], y[6:])])
    with pytest.warns(CurvatureWarning, match="is not the mean of the losses of single examples"):
        K = curvature(risk, DiagonalBlock, vectors=Empirical())
    rows = []
    for n in range(len(X)):
        value = loss(model(X[n : n + 1]), y[n : n + 1])
        gradient = torch.autograd.grad(value, [*model.parameters()])
        rows.append(torch.cat([g.flatten() for g in gradient]))
    close(K.diagonal(), torch.stack(rows).square().mean(0))


def absolute(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).abs().mean()


def first_column(f: Tensor, y: Tensor) -> Tensor:
    """Of an output [N, 1] and a target [N]."""
    return (f[:, 0] - y).square().mean()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize(
    "loss",
    [absolute, lambda f, y: (f - y).square().sum(), nn.HuberLoss(), nn.L1Loss(reduction="sum")],
    ids=["mean", "sum", "Huber", "L1"],
)
@pytest.mark.parametrize(("output", "target"), [((-1, 1), (-1,)), ((-1,), (-1, 1))], ids=str)
def test_outputs_and_targets_are_not_broadcast(
    loss: Any, output: tuple[int, ...], target: tuple[int, ...], batches: int
) -> None:
    """`f - y` has the differences of all pairs of examples."""
    X, y = examples()
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0) if len(output) == 1 else nn.Identity())
    targets = y[:, 0].reshape(target)
    data = [(X, targets)] if batches == 1 else [(X[:7], targets[:7]), (X[7:], targets[7:])]
    reduction = None if isinstance(loss, nn.Module) or loss is absolute else "sum"
    risk = EmpiricalRisk(model.double(), loss, data, reduction=reduction)
    blocks = partial(curvature, risk, DiagonalBlock, vectors=Empirical())
    operators = Hessian(risk).materialize, GGN(risk).materialize
    for use in (risk.loss, risk.gradient, *operators, blocks):
        with pytest.raises(ValueError, match="Nothing is broadcast silently, so reshape one"):
            use()


@pytest.mark.parametrize(
    "loss",
    [
        first_column,
        lambda f, y: root_of_mean_square(f[:, 0], y),
        lambda f, y: (f.flatten() - y.flatten()).square().mean(),
    ],
    ids=["a column", "no mean", "flat"],
)
def test_what_reads_a_column_is_as_it_says(loss: Any) -> None:
    X, y = examples()
    model = nn.Linear(3, 1).double()
    risk = EmpiricalRisk(model, loss, [(X, y[:, 0])])
    expected = loss(model(X), y[:, 0])
    torch.testing.assert_close(risk.loss(), expected.detach())
    g = torch.autograd.grad(expected, [*model.parameters()])
    torch.testing.assert_close([*risk.gradient().values()], [*g])


def test_the_numbers_in_the_warning() -> None:
    """Of 3, 4 and 12 the root of the mean square is 7.506, their mean 6.333."""
    X, y = torch.zeros(3, 1).double(), torch.tensor([[3.0], [4.0], [12.0]]).double()
    model = nn.Linear(1, 1, bias=False).double()
    with pytest.warns(
        CurvatureWarning, match=r"for 3 of them it is 7\.506, and their mean is 6\.333\."
    ):
        EmpiricalRisk(model, root_of_mean_square, [(X, y), (X, y)]).loss()


def sum_of_squares(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum()


def divided_by_a_constant(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum() / 4


def mean_of_squares(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().mean()


@pytest.mark.parametrize(
    ("loss", "given", "fitting"),
    [
        (sum_of_squares, None, "sum"),
        (divided_by_a_constant, None, "sum"),
        (mean_of_squares, "sum", "mean"),
    ],
    ids=["sum", "constant", "mean"],
)
def test_the_other_reduction(loss: Callable[..., Tensor], given: str | None, fitting: str) -> None:
    model, (X, y) = linear(), examples()
    data = [(X[:5], y[:5]), (X[5:], y[5:])]
    (message,) = told(EmpiricalRisk(model, loss, data, reduction=given))
    assert message.endswith(
        f"It is their {fitting}: say EmpiricalRisk(..., reduction='{fitting}')."
    )
    risk = EmpiricalRisk(model, loss, data, reduction=fitting)
    assert not told(risk)
    torch.testing.assert_close(risk.loss(), loss(model(X), y).detach())


def focal(f: Tensor, y: Tensor) -> Tensor:
    p = f.softmax(1).gather(1, y[:, :1].long().clamp(0, 2))
    return -((1 - p) ** 2 * p.log()).mean()


def weighted_sum(f: Tensor, y: Tensor) -> Tensor:
    return ((f - y).abs().sqrt() * torch.tensor([1.0, 2.0, 3.0]).to(f)).sum()


def small_difference_of_large_numbers(f: Tensor, y: Tensor) -> Tensor:
    return (f - y + 10).square().mean() - 100


def with_noise(f: Tensor, y: Tensor) -> Tensor:
    return (f - y + torch.randn_like(f)).square().mean()


def of_two_and_more(f: Tensor, y: Tensor) -> Tensor:
    if len(f) < 2:
        raise ValueError("two at least")
    return (f[1:] - f[:-1]).square().mean()


class Counting(nn.Module):
    """Its value depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return (f - y).square().mean()


MEANS = [
    (nn.HuberLoss(), None),
    (nn.SmoothL1Loss(reduction="sum"), None),
    (nn.SoftMarginLoss(), None),
    (nn.KLDivLoss(reduction="batchmean"), None),
    (lambda f, y: (f - y).abs().pow(1.5).mean(), None),
    (focal, None),
    (weighted_sum, "sum"),
    (small_difference_of_large_numbers, None),
    (with_noise, None),
    (of_two_and_more, None),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("loss", "reduction"), MEANS)
def test_means_and_sums_over_examples_are_quiet(
    loss: Any, reduction: str | None, dtype: torch.dtype
) -> None:
    X, y = examples(dtype=dtype)
    data = [(X[:5], y[:5].clamp(min=0.1)), (X[5:], y[5:].clamp(min=0.1))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EmpiricalRisk(linear(dtype), loss, data, reduction=reduction).loss()


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 4)], ids=str)
def test_equal_numbers_of_pixels(shape: tuple[int, ...]) -> None:
    """Also where outputs hold several rows for each example."""
    model = nn.Sequential(
        nn.Linear(3, 20 if len(shape) == 2 else 24), nn.Unflatten(1, shape), nn.Flatten(0, 1)
    )
    X = torch.randn(7, 3)
    y = torch.randn(7 * shape[0], *shape[1:])
    data = [(X[:3], y[: 3 * shape[0]]), (X[3:], y[3 * shape[0] :])]
    assert not told(EmpiricalRisk(model, lambda f, y: (f - y).pow(4).mean(), data))
    with pytest.warns(CurvatureWarning, match="root_of_mean_square is not the mean"):
        EmpiricalRisk(model, root_of_mean_square, data).loss()


def test_targets_that_are_no_tensors() -> None:
    """A list of one target for each example is not cut; a tuple of tensors is."""

    def of_list(f: Tensor, targets: Any) -> Tensor:
        return sum((row - t).square().mean() for row, t in zip(f, targets)) / len(f)  # type: ignore[return-value]

    def of_pair(f: Tensor, targets: Any) -> Tensor:
        return ((f - targets["y"]).square() * targets["weight"]).sum() / targets["weight"].sum()

    X, y = examples()
    lists = [(X[:6], [*y[:6].repeat(1, 1)]), (X[6:], [*y[6:]])]
    assert not told(EmpiricalRisk(linear(), of_list, lists))
    weights = torch.arange(1.0, 13).double()[:, None]
    pairs = [(X[n : n + 6], {"y": y[n : n + 6], "weight": weights[n : n + 6]}) for n in (0, 6)]
    assert len(told(EmpiricalRisk(linear(), of_pair, pairs))) == 1


def test_several_losses_are_compared_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.one(x), "b": self.two(x)}

    X, y = examples(dtype=torch.float32)
    data = [(X[n : n + 6], {"a": y[n : n + 6], "b": y[n : n + 6]}) for n in (0, 6)]
    (message,) = told(
        EmpiricalRisk(Two(), {"a": nn.MSELoss(), "b": (root_of_mean_square, 0.5)}, data)
    )
    assert message.startswith("loss 'b' (root_of_mean_square) is not the mean")


def test_the_comparison_leaves_no_trace() -> None:
    """Not on the loss, its buffers, the random state, nor on data; once for a risk; and
    `check=False` leaves it out.
    """
    X, y = examples()
    data = [(X[:6], y[:6]), (X[6:], y[6:])]
    for check, calls in ((True, 2 + 2), (False, 2 + 2)):
        loss = Counting()
        risk = EmpiricalRisk(linear(), loss, data, check=check)
        torch.manual_seed(3)
        risk.loss()
        risk.loss()
        assert (loss.calls, int(loss.seen)) == (calls, calls)  # type: ignore[arg-type]
        assert torch.equal(torch.rand(2), torch.rand(2, generator=seeded(3)))
    assert not told(EmpiricalRisk(linear(), root_of_mean_square, data, check=False))


# ------------------------------------------------------------------------------- missing targets
MISSING: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "squares": (nn.MSELoss(), lambda y: y),
    "logits": (nn.BCEWithLogitsLoss(), lambda y: y.sigmoid()),
    "rates": (nn.PoissonNLLLoss(), lambda y: y.exp()),
    "classes": (nn.CrossEntropyLoss(), lambda y: y.softmax(1)),
    "a function": (mean_of_squares, lambda y: y),
    "a function with weights": (lambda f, y: ((f - y).square() * 2).mean(), lambda y: y),
}


@pytest.mark.parametrize(
    ("name", "missing"),
    [*product(MISSING, [math.nan]), *product(["squares", "logits", "rates"], [math.inf])],
)
def test_missing_targets_are_told(name: str, missing: float) -> None:
    """The Fisher matrix of these losses would be that of observed ones."""
    loss, targets = MISSING[name]
    X, y = examples()
    y = targets(y)
    y[7, 1] = missing
    data = [(X[:6], y[:6]), (X[6:], y[6:])]
    risk = EmpiricalRisk(linear(), loss, data)
    uses: list[Callable[[], object]] = [GGN(risk).materialize, Hessian(risk).materialize]
    if isinstance(loss, nn.Module):
        uses += [lambda: curvature(risk), lambda: curvature(risk, vectors=MonteCarlo(seed=0))]
    for use in uses:
        with pytest.raises((ValueError, NumericsError), match=r"NaN or infinite|is NaN on a batch"):
            use()


def test_a_function_may_leave_missing_targets_out() -> None:
    X, y = examples()
    y[7, 1] = y[2, 0] = math.nan

    def observed(f: Tensor, y: Tensor) -> Tensor:
        here = ~y.isnan()
        return (f[here] - y[here]).square().sum()

    model = linear()
    risk = EmpiricalRisk(model, observed, [(X[:6], y[:6]), (X[6:], y[6:])], reduction="sum")
    ones = torch.cat([X, torch.ones(12, 1)], 1)
    # Each output c has the matrix 2 Σ x xᵀ of the examples where it was observed.
    expected = [2 * ones[~y[:, c].isnan()].T @ ones[~y[:, c].isnan()] for c in range(3)]
    dense = GGN(risk).to_dense()
    for c in range(3):
        own = [3 * c, 3 * c + 1, 3 * c + 2, 9 + c]
        torch.testing.assert_close(dense[own][:, own], expected[c])
    block = curvature(risk, FullBlock, vectors=Empirical())
    g = [
        torch.autograd.grad(observed(model(x[None]), t[None]), [*model.parameters()])
        for x, t in zip(X, y, strict=True)
    ]
    trace = sum(t.square().sum() for row in g for t in row)
    torch.testing.assert_close(block.trace, trace)
