"""Random vectors: unbiased, reproducible from their seed, and indifferent to how examples are
batched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from curvlinops_plus import (
    CurvaturePropagation,
    EKFACLinearOperator,
    Exact,
    FisherMCLinearOperator,
    FullBlock,
    KFACLinearOperator,
    MonteCarlo,
)
from test.cases import FEW, LOSSES, PROBLEMS, close, problem, same


def unbiased(draws: Tensor, expected: Tensor) -> None:
    """Fail unless nearly all means over independent draws are within 4 standard errors.

    Draws of Fisher matrices have heavy tails and entries are correlated, so one entry in a hundred
    may be beyond.
    """
    spread = draws.std(0)
    assert spread.max() > 0, "nothing was drawn"
    off = (draws.mean(0) - expected).abs() > 4 * spread / len(
        draws
    ) ** 0.5 + 1e-9 * expected.abs().max()
    assert off.double().mean() < 0.01, f"{float(off.double().mean()):.1%} of the entries are off"


def blocks(name: str, samples: int, seeds: range, kind: Any = MonteCarlo) -> Tensor:
    p = problem(name)
    return torch.stack(
        [p.curvature(FullBlock, vectors=kind(samples, seed=s)).to_dense() for s in seeds]
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("loss", LOSSES)
def test_draws_average_to_the_ggn_under_every_option(loss: str) -> None:
    p = problem(f"mlp, {loss}")
    unbiased(blocks(f"mlp, {loss}", 50, range(20)), p.exact.only_blocks(p.exact.ggn(), False))


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
    unbiased(
        blocks(name, 10, range(80), CurvaturePropagation), p.exact.only_blocks(p.exact.ggn(), False)
    )


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("name", ["mlp", "strided cnn", "attention"])
def test_the_seed_decides(kind: Any, name: str) -> None:
    p = problem(name)

    def make(seed: int) -> Any:
        torch.manual_seed(torch.seed() % 1000)  # whatever the global generator does
        return kind(
            p.model, p.loss, p.params, p.data, seed=seed, mc_samples=2, check_deterministic=False
        )

    with torch.random.fork_rng(devices=[]):
        one, two, other = make(0), make(0), make(1)
        same(one.to_dense(), two.to_dense())
        assert not torch.allclose(one.to_dense(), other.to_dense())
        first = one.to_dense().clone()
        one.compute_kronecker_factors()
        if kind is EKFACLinearOperator:
            one.compute_eigenvalue_correction()
        same(one.to_dense(), first)


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_the_monte_carlo_fisher_is_unbiased(name: str) -> None:
    p = problem(name)
    options: dict[str, Any] = {"mc_samples": 40, "check_deterministic": False}
    draws = [
        FisherMCLinearOperator(p.model, p.loss, p.params, p.data, seed=s, **options)
        for s in range(20)
    ]
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
    F, one = (
        FisherMCLinearOperator(p.model, p.loss, p.params, data, **options)
        for data in (p.data, singles)
    )
    close(one.to_dense(), F.to_dense())


@pytest.mark.slow
def test_random_signs_are_unbiased_where_positions_mix() -> None:
    p = problem("attention")
    draws = torch.stack(
        [p.curvature(FullBlock, vectors=Exact(signs=True, seed=s)).to_dense() for s in range(150)]
    )
    unbiased(draws, p.exact.only_blocks(p.exact.ggn(), False))
