"""The few sums by which the self-check compares rows and gradients, against each number by itself."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from cases import close
from curvlinops_plus.risk.compare_rules import _norms
from curvlinops_plus.risk.gradient_check import _factors, halves_by_digits, random_halves
from torch import Tensor, nn

from curvlinops_plus import KFAC, EmpiricalRisk, UnsupportedError, curvature
from curvlinops_plus.risk.totals import Totals


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
def test_norms_of_all_differences_at_once(size: float) -> None:
    """Also where squares of float32 numbers overflow, or vanish."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3), (2, 1), (1, 4), (3, 2, 2)]
    ours, theirs = ([size * torch.randn(*shape, generator=generator) for shape in shapes] for _ in range(2))
    pairs = list(zip(ours, [t.mT.contiguous().mT for t in theirs]))
    expected = [[float(t.double().norm()) / size for t in (one - other, other)] for one, other in pairs]
    close(torch.tensor(_norms(pairs)) / size, torch.tensor(expected), rtol=1e-6)
    theirs[1][0, 0] = float("nan")
    assert [bool(torch.tensor(sizes).isnan().all()) for sizes in _norms(list(zip(ours, theirs)))] == [0, 1, 0, 0]


@pytest.mark.parametrize("N", [2, 3, 9, 16, 17, 100])
def test_halves(N: int) -> None:
    """Any two of 16 examples are apart in one of the halves, and each example has its other half."""
    digits, halves = halves_by_digits(N), random_halves(N)
    assert digits.shape == (min(4, (N - 1).bit_length()), N)
    assert digits.dtype == halves.dtype == torch.bool
    if N <= 16:
        assert all(bool((digits[:, m] != digits[:, n]).any()) for m, n in combinations(range(N), 2))
    assert digits.any(1).all()
    assert not digits.all(1).any()
    assert bool((halves.sum(0) == 2).all())
    assert float(_factors(N).abs().min()) >= 1


@pytest.mark.parametrize("strength", [1.0, 1e-30])
@pytest.mark.parametrize("reached", range(9))
def test_one_row_of_another_example(reached: int, strength: float) -> None:
    """A single number in a single row is found, wherever it is."""

    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            moved = torch.zeros(len(x), 4)
            if len(x) == 9:
                moved[reached, 1] = strength
            return self.b(h) + (moved * h).sum(0)[1] * torch.eye(9, 2)[: len(x)].roll(reached + 1, 0)

    torch.manual_seed(0)
    data = [(torch.randn(9, 3), torch.arange(9) % 2)]
    with pytest.raises(UnsupportedError, match=r"layer 'a'.*mixes examples|depend on each other"):
        _ = curvature(EmpiricalRisk(Leaks(), nn.CrossEntropyLoss(), data), KFAC).trace


def test_totals_leave_what_is_added_as_it_is() -> None:
    parts = [Totals(2, 2, torch.tensor(float(k)), counts=(torch.tensor(1.0),)) for k in (3, 5)]
    whole = Totals()
    for part in parts:
        whole.add(part)
    whole.decay(0.5)
    assert (whole.examples, float(whole.loss_count), float(whole.counts[0])) == (4, 4.0, 2.0)
    assert [float(part.loss_count) for part in parts] == [3.0, 5.0]
    assert [float(part.counts[0]) for part in parts] == [1.0, 1.0]
