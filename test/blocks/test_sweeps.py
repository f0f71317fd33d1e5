"""What layers receive is kept for the next sweep up to a limit: nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from curvlinops_plus import (
    EKFAC,
    EKFACLinearOperator,
    EmpiricalRisk,
    Exact,
    MonteCarlo,
    NearestKronecker,
    curvature,
)
from curvlinops_plus.blocks.sweeps import Kept
from curvlinops_plus.risk import find_layers
from curvlinops_plus.risk.record import sweep
from test.cases import NETS, problem

KINDS = [
    EKFAC,
    EKFAC.using(kfac_approx="reduce"),
    NearestKronecker.using(max_bytes=0, power_iterations=2),
]


@pytest.mark.parametrize(
    ("name", "kind"), [(name, KINDS[k % 3]) for k, name in enumerate(NETS)], ids=repr
)
def test_kept_is_swept(name: str, kind: Any) -> None:
    p, vectors = problem(name), MonteCarlo(3, seed=1) if kind is KINDS[1] else Exact()
    options = {"risk": p.risk(), "vectors": vectors}
    kept = p.curvature(kind, **options).to_dense()
    assert torch.equal(kept, p.curvature(kind, **options, max_kept_bytes=0).to_dense())


class Counted(list[Any]):
    """Data that count how often they are read."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()


@pytest.mark.parametrize("max_kept_bytes", [0, 64, 2**26])
def test_what_fits_is_kept(max_kept_bytes: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Else the data are read once more."""
    p, passes = problem("mlp"), 1 if max_kept_bytes == 2**26 else 2
    data = Counted(p.data)
    curvature(
        EmpiricalRisk(p.model, p.loss, data, progressbar=True), EKFAC, max_kept_bytes=max_kept_bytes
    )
    assert data.passes == passes
    bars = capfd.readouterr().err
    assert ("sweep 1 (on" in bars, "sweep 2 (kept)" in bars) == (True, passes == 1)
    options: dict[str, Any] = {"check_deterministic": False, "max_kept_bytes": max_kept_bytes}
    _ = EKFACLinearOperator(p.model, p.loss, p.params, data, **options).trace
    assert data.passes == 2 * passes


def test_memory_is_bounded() -> None:
    """Tensors count once, with all of their storage; one too many, and nothing is kept any more."""
    p = problem("mlp")
    batches: list[Any] = []
    risk = p.risk()
    layers = set(find_layers(risk.model, risk.params))
    sweep(risk, list(layers), Exact(), batches.append)
    last = batches[-1]  # gradients were handed over and are gone
    kept = Kept(last.calls[0].args[0].untyped_storage().nbytes(), layers)
    for _ in range(3):
        kept.add(last)
    assert kept.has([last.layer])
    last.calls[0].args[0].add_(0)  # what is written to, is no longer what was received
    assert not kept.has([last.layer])
    kept.add(next(batch for batch in batches if batch.layer is not last.layer))
    assert not kept.batches
    assert not kept.has([last.layer])
