"""How good scores of training examples are: the linear datamodeling score."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.options import instance, integer, number


class DatamodelingScore(NamedTuple):
    """A linear datamodeling score and its interval.

    Attributes:
        score: The mean over queries.
        low: Lower end of the interval.
        high: Upper end.
        of_queries: Rank correlation of each query, [Q].
    """

    score: float
    low: float
    high: float
    of_queries: Tensor


def linear_datamodeling_score(
    scores: Tensor,
    subsets: Tensor,
    outcomes: Tensor,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> DatamodelingScore:
    """Rank correlation of what scores predict for networks trained on parts of the data, and what
    these networks do; the mean over queries.

    A network without the examples outside of a subset is predicted a loss that is the lower, the
    larger the sum of the scores inside (Park et al. 2023). 1 is perfect, 0 no better than chance.

    Args:
        scores: Of N training examples for Q queries, [Q, N], as `attribution_scores` returns them.
        subsets: Which examples M networks were trained on, [M, N], True (or 1) where they were.
        outcomes: The loss (or other measurement that was attributed) of the queries in these
            networks, [M, Q]; the mean of several networks for each subset is less noisy.
        confidence: Of the interval.
        resamples: Bootstrap samples, of subsets and of queries, with replacement.
        seed: Of these.

    Raises:
        ValueError: If shapes don't fit, or there are fewer than three subsets.

    Source: Park et al. 2023, "TRAK: attributing model behavior at scale".

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> scores = torch.randn(5, 40, generator=generator)
        >>> subsets = torch.rand(30, 40, generator=generator) < 0.5
        >>> noise = torch.randn(30, 5, generator=generator)
        >>> found = linear_datamodeling_score(scores, subsets, noise - subsets.float() @ scores.T)
        >>> 0.8 < found.low < found.score < found.high <= 1
        True
    """
    for name, value in (("scores", scores), ("subsets", subsets), ("outcomes", outcomes)):
        instance(name, value, Tensor, "a tensor")
    resamples = integer("resamples", resamples, low=1)
    confidence = number("confidence", confidence, above=0)
    shapes = [[*t.shape] for t in (scores, subsets, outcomes)]
    M, N = subsets.shape if subsets.ndim == 2 else (0, 0)
    Q = len(scores) if scores.ndim else 0
    if shapes != [[Q, N], [M, N], [M, Q]] or M < 3:
        raise ValueError(
            f"scores, subsets and outcomes have the shapes {shapes}; expected [Q, N], [M, N] and "
            "[M, Q] with at least 3 subsets."
        )
    if confidence >= 1:
        raise ValueError(f"confidence={confidence}; expected a number below 1, such as 0.95.")
    predicted = -(subsets.double() @ scores.double().T)  # [M, Q]
    outcomes = outcomes.double()
    of_queries = _rank_correlations(predicted, outcomes)
    generator = torch.Generator().manual_seed(integer("seed", seed))
    means = []
    for _ in range(resamples):
        rows = torch.randint(M, (M,), generator=generator)
        columns = torch.randint(Q, (Q,), generator=generator)
        rows, columns = rows.to(scores.device), columns.to(scores.device)
        of_sample = _rank_correlations(predicted[rows][:, columns], outcomes[rows][:, columns])
        means.append(of_sample.mean())
    score = float(of_queries.mean())
    resampled = torch.stack(means).cpu()
    # Repeated subsets make correlations smaller: that bias is subtracted.
    resampled = resampled - resampled.mean() + score
    ends = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = resampled.quantile(ends).clamp(-1, 1).tolist()
    return DatamodelingScore(score, low, high, of_queries)


def _rank_correlations(a: Tensor, b: Tensor) -> Tensor:  # [M, Q], [M, Q] -> [Q]
    """Spearman's correlation of each column; 0 where all values are equal."""
    a = _ranks(a)
    b = _ranks(b)
    product = (a * b).sum(0)
    return product / (a.norm(dim=0) * b.norm(dim=0)).clamp(min=1e-30)


def _ranks(values: Tensor) -> Tensor:
    """Ranks in each column less their mean; equal values have the mean of theirs."""
    in_order = values.T.contiguous()
    sorted_values = in_order.sort(-1).values
    below = torch.searchsorted(sorted_values, in_order)
    up_to = torch.searchsorted(sorted_values, in_order, right=True)
    ranks = (below + up_to).double().T / 2
    return ranks - ranks.mean(0)
