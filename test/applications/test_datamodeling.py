"""Linear datamodeling scores, against SciPy's rank correlation."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr

from curvlinops_plus import linear_datamodeling_score
from test.cases import close
from test.helpers import normal, seeded

Q, N, M = 6, 40, 30
SCORES = normal(Q, N)
SUBSETS = torch.rand(M, N, generator=seeded()) < 0.5
OUTCOMES = normal(M, Q, seed=1) * 3 - SUBSETS.double() @ SCORES.T


@pytest.mark.parametrize("digits", [None, 0], ids=["different", "ties"])
def test_is_the_mean_rank_correlation(digits: int | None) -> None:
    outcomes = OUTCOMES if digits is None else OUTCOMES.round()
    found = linear_datamodeling_score(SCORES, SUBSETS, outcomes)
    predicted = -SUBSETS.double() @ SCORES.T
    expected = [spearmanr(predicted[:, q], outcomes[:, q]).statistic for q in range(Q)]
    close(found.of_queries, torch.tensor(expected))
    assert found.score == float(found.of_queries.mean())
    assert found.low < found.score < found.high


def test_the_interval_covers_the_score_of_many_subsets() -> None:
    """Of 40 data sets of 30 subsets, nearly all intervals have what 3000 subsets give."""
    generator = seeded(3)

    def draw(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        subsets = torch.rand(number, N, generator=generator) < 0.5
        noise = torch.randn(number, Q, generator=generator, dtype=torch.float64)
        return subsets, 6 * noise - subsets.double() @ SCORES.T

    truth = linear_datamodeling_score(SCORES, *draw(3000), resamples=1).score
    inside = 0
    for _ in range(40):
        found = linear_datamodeling_score(SCORES, *draw(M), resamples=100)
        inside += found.low <= truth <= found.high
    assert inside >= 34


def test_the_seed_decides() -> None:
    a, b, c = (linear_datamodeling_score(SCORES, SUBSETS, OUTCOMES, seed=s) for s in (0, 0, 1))
    assert a[:3] == b[:3]
    assert a.low != c.low
    narrow = linear_datamodeling_score(SCORES, SUBSETS, OUTCOMES, confidence=0.5)
    assert a.low < narrow.low < narrow.high < a.high


def test_the_interval_is_over_queries_too() -> None:
    """Half of the queries are predicted perfectly, half the other way round."""
    signs = torch.tensor([1.0, -1.0] * (Q // 2), dtype=SCORES.dtype)
    found = linear_datamodeling_score(SCORES, SUBSETS, -(SUBSETS.double() @ SCORES.T) * signs)
    close(found.of_queries, signs)
    assert found.low < -0.3 < 0.3 < found.high
