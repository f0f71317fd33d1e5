"""What layers see is kept for the next sweep while it is little: nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import NETS, problem
from torch import nn

from curvlinops_plus import EKFAC, EmpiricalRisk, Exact, MonteCarlo, NearestKronecker, curvature
from curvlinops_plus.blocks import plan
from curvlinops_plus.blocks.sweep_cache import Kept
from curvlinops_plus.risk import find_layers
from curvlinops_plus.risk.sweep import sweep

KINDS = {
    "EKFAC": EKFAC,
    "EKFAC, reduce": EKFAC.using(kfac_approx="reduce"),
    "NearestKronecker by sweeps": NearestKronecker.using(max_bytes=0, power_iterations=2),
}


@pytest.mark.parametrize("vectors", [Exact(), MonteCarlo(3, seed=1)], ids=["exact", "Monte Carlo"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_kept_is_swept(name: str, kind: str, vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(name)
    kept = p.curvature(KINDS[kind], vectors=vectors).to_dense()
    monkeypatch.setattr(plan, "_KEPT_BYTES", 0)
    assert torch.equal(kept, p.curvature(KINDS[kind], vectors=vectors).to_dense())


def test_memory_is_bounded() -> None:
    """Tensors count once, with all of their storage; one too many, and nothing is kept any more."""
    p = problem("mlp")
    seen: list[Any] = []
    risk = p.risk()
    sweep(risk, find_layers(risk.model, risk.params), Exact(), seen.append)
    inputs = seen[-1].calls[0].args[0]
    kept = Kept(inputs.untyped_storage().nbytes())
    for _ in range(3):
        kept.add(0, seen[-1])  # gradients were handed over and are gone
    assert kept.has([0])
    assert not kept.has([0, 1])
    kept.add(1, seen[0])
    assert not kept.has([0])
    kept.add(0, seen[-1])
    assert not kept.has([0])


def test_data_in_one_buffer_are_not_kept() -> None:
    """A loader that writes every batch into the same memory: the inputs of a batch are gone with the next one."""
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 2).double(), [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    y = torch.zeros(4, 2, dtype=torch.float64)

    class OneBuffer:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            buffer = torch.empty_like(batches[0])
            for X in batches:
                yield buffer.copy_(X), y

    data = OneBuffer()
    found = curvature(EmpiricalRisk(model, nn.MSELoss(), data), EKFAC).to_dense()
    assert data.passes == 2
    assert torch.equal(
        found, curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, y) for X in batches]), EKFAC).to_dense()
    )


def test_what_changes_between_calls_is_seen() -> None:
    """Only one call of `compute` keeps anything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.randn(9, 3), torch.zeros(9, 2))])
    K = curvature(risk, EKFAC)
    before = K.to_dense()
    with torch.no_grad():
        model[0].weight *= 2
    K.compute()
    fresh = curvature(risk, EKFAC).to_dense()
    assert torch.equal(K.to_dense(), fresh)
    assert not torch.allclose(before, fresh)


@pytest.mark.parametrize("progressbar", [False, True])
def test_bars(progressbar: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """One for each time that something is looked at, if wanted."""
    p = problem("mlp")
    curvature(p.risk(progressbar=progressbar), EKFAC).compute()
    bars = capfd.readouterr().err
    assert ("sweep 1 (on" in bars, "sweep 2 (kept)" in bars) == (progressbar, progressbar)
