"""Random vectors: unbiased, reproducible from their seed, and indifferent to how examples are batched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FEW, LOSSES, PROBLEMS, Net, Problem, close, problem, same, unchanged
from helpers import normal
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvaturePropagation,
    DiagonalBlock,
    EKFACLinearOperator,
    Exact,
    FisherMCLinearOperator,
    FullBlock,
    KFACLinearOperator,
    MonteCarlo,
)


def unbiased(draws: Tensor, expected: Tensor) -> None:
    """Fail unless nearly all means over independent draws are within 4 standard errors.

    Draws of Fisher matrices have heavy tails and entries are correlated, so one entry in a hundred may be beyond.
    """
    spread = draws.std(0)
    assert spread.max() > 0, "nothing was drawn"
    off = (draws.mean(0) - expected).abs() > 4 * spread / len(draws) ** 0.5 + 1e-9 * expected.abs().max()
    assert off.double().mean() < 0.01, f"{float(off.double().mean()):.1%} of the entries are off"


def blocks(name: str, samples: int, seeds: range, kind: Any = MonteCarlo) -> Tensor:
    p = problem(name)
    return torch.stack([p.curvature(FullBlock, vectors=kind(samples, seed=s)).to_dense() for s in seeds])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("loss", LOSSES)
def test_draws_average_to_the_ggn_under_every_option(loss: str) -> None:
    p = problem(f"mlp, {loss}")
    unbiased(blocks(f"mlp, {loss}", 50, range(20)), p.exact.only_blocks(p.exact.ggn(), False))


def test_unbiased_can_fail() -> None:
    p, draws = problem("mlp"), blocks("mlp", 50, range(20))
    for wrong in (p.exact.empirical_fisher(per_term=False), 1.3 * p.exact.ggn(), 0.7 * p.exact.ggn()):
        with pytest.raises(AssertionError, match="entries are off"):
            unbiased(draws, p.exact.only_blocks(wrong, False))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PROBLEMS if "," not in n])
def test_draws_average_to_the_ggn_on_every_net(name: str) -> None:
    p = problem(name)
    # So many samples, since saturated attention has few draws that are large.
    unbiased(blocks(name, 400, range(40, 80)), p.exact.only_blocks(p.exact.ggn(), False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "flattened"])
def test_curvature_propagation_averages_to_the_ggn(name: str) -> None:
    p = problem(name)
    unbiased(blocks(name, 10, range(80), CurvaturePropagation), p.exact.only_blocks(p.exact.ggn(), False))


@pytest.mark.slow
def test_error_falls_with_the_root_of_the_samples_over_three_decades() -> None:
    def errors(p: Problem, name: str, samples: int) -> Tensor:
        expected = p.exact.only_blocks(p.exact.ggn(), False)
        return torch.stack([(draw - expected).norm() for draw in blocks(name, samples, range(20))])

    for name in ("mlp", "strided cnn", "attention", "mlp, mse", "mlp, ce-all"):
        sizes = torch.tensor([4.0, 40.0, 400.0, 4000.0])
        rms = torch.stack([errors(problem(name), name, int(m)).square().mean().sqrt() for m in sizes]).log()
        x = sizes.log() - sizes.log().mean()
        slope = float((x * rms).sum() / x.square().sum())
        assert abs(slope + 0.5) < 0.06, f"{name}: error ~ samples^{slope:.3f}"


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("name", ["mlp", "strided cnn", "attention"])
def test_the_seed_decides(kind: Any, name: str) -> None:
    p = problem(name)

    def make(seed: int) -> Any:
        torch.manual_seed(torch.seed() % 1000)  # whatever the global generator does
        return kind(p.model, p.loss, p.params, p.data, seed=seed, mc_samples=2, check_deterministic=False)

    with torch.random.fork_rng(devices=[]):
        one, two, other = make(0), make(0), make(1)
        same(one.to_dense(), two.to_dense())
        assert not torch.allclose(one.to_dense(), other.to_dense())
        first = one.to_dense().clone()
        one.compute_kronecker_factors()
        if kind is EKFACLinearOperator:
            one.compute_eigenvalue_correction()
        same(one.to_dense(), first)


def test_two_products_with_the_monte_carlo_fisher_see_one_matrix() -> None:
    p = problem("attention")
    F = FisherMCLinearOperator(p.model, p.loss, p.params, p.data, seed=3, mc_samples=2)
    with unchanged(p.model, p.loss, p.data):
        same(F.to_dense(), F.to_dense())
    v = torch.linspace(-1, 1, F.shape[0], dtype=torch.float64)
    close(F @ v, F.to_dense() @ v)


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_the_monte_carlo_fisher_is_unbiased(name: str) -> None:
    p = problem(name)
    options: dict[str, Any] = {"mc_samples": 40, "check_deterministic": False}
    draws = [FisherMCLinearOperator(p.model, p.loss, p.params, p.data, seed=s, **options) for s in range(20)]
    unbiased(torch.stack([F.to_dense() for F in draws]), p.exact.ggn())


@pytest.mark.parametrize("name", FEW)
def test_draws_do_not_depend_on_batch_sizes(name: str) -> None:
    p = problem(name)
    if isinstance(p.data[0], dict):
        joined: Any = {key: torch.cat([batch[key] for batch in p.data]) for key in p.data[0]}
        singles: Any = [{key: t[n : n + 1] for key, t in joined.items()} for n in range(6)]
    else:
        joined = tuple(torch.cat(parts) for parts in zip(*p.data, strict=True))
        singles = [tuple(t[n : n + 1] for t in joined) for n in range(6)]
    for vectors in (MonteCarlo(3, seed=2), Exact(signs=True, seed=2)):
        dense = p.curvature(FullBlock, vectors=vectors).to_dense()
        for data in ([joined], singles):
            close(p.curvature(FullBlock, data, vectors=vectors).to_dense(), dense)
    options: dict[str, Any] = {"seed": 2, "mc_samples": 3, **p.net.options}
    F, one = (FisherMCLinearOperator(p.model, p.loss, p.params, data, **options) for data in (p.data, singles))
    close(one.to_dense(), F.to_dense())


@pytest.mark.slow
def test_random_signs_are_unbiased_where_positions_mix() -> None:
    p = problem("attention")
    draws = torch.stack([p.curvature(FullBlock, vectors=Exact(signs=True, seed=s)).to_dense() for s in range(150)])
    unbiased(draws, p.exact.only_blocks(p.exact.ggn(), False))


# ------------------------------------------------------------------------------------------------ curvature propagation


def small(outputs: int, loss: nn.Module, X: Tensor, y: Tensor) -> Problem:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    with torch.no_grad():
        for index, q in enumerate(model.parameters()):
            q.copy_(0.7 * normal(*q.shape, seed=100 + index))
    return Problem(Net(model, [X]), loss, [(X, y)])


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.PoissonNLLLoss()])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
def test_curvature_propagation_has_no_noise_for_one_output(loss: nn.Module, approximation: Any) -> None:
    p = small(1, loss, normal(5, 4), (torch.arange(5) % 2).double()[:, None])
    exact = p.curvature(approximation, vectors=Exact()).to_dense()
    for vectors in (CurvaturePropagation(), CurvaturePropagation(3, seed=8)):
        close(p.curvature(approximation, vectors=vectors).to_dense(), exact, 1e-10)
    drawn = p.curvature(approximation, vectors=MonteCarlo()).to_dense()
    assert float((drawn - exact).norm() / exact.norm()) > 0.05


def test_curvature_propagation_has_less_noise_than_drawn_labels_where_predictions_are_peaked() -> None:
    p = small(10, nn.CrossEntropyLoss(), normal(20, 4), torch.arange(20) % 10)
    with torch.no_grad():
        p.model[2].weight.mul_(6)  # type: ignore[index]
    assert p.model(p.data[0][0]).softmax(-1).amax(-1).mean() > 0.8
    exact = p.curvature(FullBlock).to_dense()

    def error(kind: Any) -> float:
        draws = torch.stack([p.curvature(FullBlock, vectors=kind(1, seed=s)).to_dense() for s in range(60)])
        return float((draws - exact).square().sum((1, 2)).mean() / exact.square().sum())

    assert error(CurvaturePropagation) < error(MonteCarlo)
