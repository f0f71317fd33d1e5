"""What layers receive is kept for the next sweep up to a limit: nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import NETS, problem
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    EKFAC,
    EKFACLinearOperator,
    EmpiricalRisk,
    Exact,
    MonteCarlo,
    NearestKronecker,
    curvature,
)
from curvlinops_plus.blocks.sweep_cache import SweepCache
from curvlinops_plus.risk import find_layers
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.sweep import sweep

KINDS = {
    "EKFAC": EKFAC,
    "EKFAC, reduce": EKFAC.using(kfac_approx="reduce"),
    "NearestKronecker by sweeps": NearestKronecker.using(max_bytes=0, power_iterations=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_kept_is_swept(name: str, kind: str) -> None:
    p, vectors = problem(name), MonteCarlo(3, seed=1) if "reduce" in kind else Exact()
    options = {"risk": p.risk(), "vectors": vectors}
    kept = p.curvature(KINDS[kind], **options).to_dense()
    assert torch.equal(kept, p.curvature(KINDS[kind], **options, max_kept_bytes=0).to_dense())


@pytest.mark.parametrize("max_kept_bytes", [0, 64, 2**26])
def test_what_fits_is_kept(max_kept_bytes: int) -> None:
    """Else the data are read once more."""
    p, read = problem("mlp"), []

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            read.append(1)
            return super().__iter__()

    options = {"max_kept_bytes": max_kept_bytes}
    K = curvature(EmpiricalRisk(p.model, p.loss, Counted(p.data), p.params), EKFAC, **options)
    assert len(read) == (1 if max_kept_bytes == 2**26 else 2)
    read.clear()
    K = EKFACLinearOperator(p.model, p.loss, p.params, Counted(p.data), check_deterministic=False, **options)
    _ = K.trace
    assert len(read) == (1 if max_kept_bytes == 2**26 else 2)
    assert K.max_kept_bytes == max_kept_bytes


class WithOwnEnd(EKFAC):
    def finish(self) -> Any:
        return super().finish()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_gradients_of_examples_are_kept_where_they_are_smaller(samples: int, bias: bool) -> None:
    """A convolution with more positions than rows and columns: 2 · 4 or 5 numbers instead of 64 · 3 per example."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2, padding="same", bias=bias), nn.Tanh(), nn.Flatten(), nn.Linear(128, 3))
    data = [(torch.randn(20, 1, 8, 8), torch.randint(3, (20,))) for _ in range(3)]
    outputs = 4 * 60 * (128 + samples * 3)  # inputs and gradients of the other layer
    small = outputs + samples * 4 * 60 * 2 * (4 + bias) + 1000  # and what else belongs to a batch
    read: list[int] = []

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            read.append(1)
            return super().__iter__()

    def run(kind: type[EKFAC], max_kept_bytes: int) -> torch.Tensor:
        risk, vectors = EmpiricalRisk(model, nn.CrossEntropyLoss(), Counted(data)), MonteCarlo(samples, seed=0)
        return curvature(risk, kind, vectors=vectors, max_kept_bytes=max_kept_bytes).to_dense()

    swept = run(EKFAC, 0)
    assert len(read) == 2
    assert torch.equal(run(EKFAC, small), swept)
    assert len(read) == 3
    assert torch.equal(run(WithOwnEnd, small), swept)  # what it reads again is not known
    assert len(read) == 5


@pytest.mark.parametrize("given", [-1, 1.5, True, "64 MiB"])
def test_other_memory_is_refused(given: Any) -> None:
    p = problem("mlp")
    for make in (
        lambda: curvature(p.risk(), EKFAC, max_kept_bytes=given),
        lambda: EKFACLinearOperator(p.model, p.loss, p.params, p.data, max_kept_bytes=given),
    ):
        with pytest.raises(ValueError, match=r"max_kept_bytes=.* must be an integer of at least 0.*0 keeps nothing"):
            make()


def test_memory_is_bounded() -> None:
    """Tensors count once, with all of their storage; one too many, and nothing is kept any more."""
    p = problem("mlp")
    batches: list[Any] = []
    risk = p.risk()
    layers = find_layers(risk.model, risk.params)
    sweep(risk, layers, Exact(), batches.append)
    last = batches[-1]  # gradients were handed over and are gone
    other = next(batch for batch in batches if batch.layer is not last.layer)
    cache = SweepCache(last.calls[0].args[0].untyped_storage().nbytes(), layers)
    for _ in range(3):
        cache.add(last)
    assert cache.has([last.layer])
    assert not cache.has(layers)
    cache.add(other)
    assert not cache.has([last.layer])
    cache.add(last)
    assert not cache.has([last.layer])


def test_layers_that_are_not_asked_for_are_not_kept() -> None:
    risk = problem("mlp").risk()
    one, other = find_layers(risk.model, risk.params)
    cache = SweepCache(2**20, [one])
    sweep(risk, [one, other], Exact(), cache.add)
    assert cache.has([one])
    assert not cache.has([other])


@pytest.mark.parametrize("how", ["PyTorch", "NumPy", "data"])
@pytest.mark.parametrize("inner", [nn.Identity, lambda: nn.Unflatten(1, (1, 3))])
def test_data_in_one_buffer(inner: Any, how: str) -> None:
    """A loader that writes every batch into the same memory, with or without telling version counters."""
    torch.manual_seed(0)
    model = nn.Sequential(inner(), nn.Linear(3, 2), nn.Flatten()).double()
    data = [(torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)) for _ in range(3)]

    class OneBuffer:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            array = np.empty((4, 3))
            buffer = torch.from_numpy(array)
            write = {"PyTorch": buffer.copy_, "data": buffer.data.copy_, "NumPy": lambda X: np.copyto(array, X.numpy())}
            for X, y in data:
                write[how](X)
                yield buffer, y
            array[:] = 7

    given = OneBuffer()
    found = curvature(EmpiricalRisk(model, nn.MSELoss(), given), EKFAC).to_dense()
    assert given.passes == 1
    assert torch.equal(found, curvature(EmpiricalRisk(model, nn.MSELoss(), data), EKFAC).to_dense())
    assert torch.equal(found, curvature(EmpiricalRisk(model, nn.MSELoss(), data), EKFAC, max_kept_bytes=0).to_dense())


class Opaque:
    """Data of a type that nobody can look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_data_that_are_no_tensors() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, given: Opaque) -> torch.Tensor:
            return self.layer(given.x)

    torch.manual_seed(0)
    model, batches = Reads(), [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    y = torch.zeros(4, 2, dtype=torch.float64)

    class OneBuffer:
        def __iter__(self) -> Any:
            array = np.empty((4, 3))
            for X in batches:
                array[:] = X.numpy()
                yield Opaque(torch.from_numpy(array)), y

    options: Any = {"batch_size_fn": lambda X: len(X.x)}
    found = curvature(EmpiricalRisk(model, nn.MSELoss(), OneBuffer(), **options), EKFAC).to_dense()
    data = [(Opaque(X), y) for X in batches]
    assert torch.equal(found, curvature(EmpiricalRisk(model, nn.MSELoss(), data, **options), EKFAC).to_dense())


def test_large_data_are_not_copied() -> None:
    X, y = torch.zeros(4, 3), torch.zeros(4, 2)
    for max_bytes, copied in ((X.nbytes - 1, False), (X.nbytes, True)):
        cache = SweepCache(max_bytes, [])
        cache.begin(Batch(X, y, 4))
        one, other = cache._own((X, X.detach()))
        assert (one.data_ptr() != X.data_ptr()) == copied
        assert one.data_ptr() == other.data_ptr()  # layers that read the same count once


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


def test_batches_of_lists_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 3
    begun: list[Any] = []
    begin = SweepCache.begin
    monkeypatch.setattr(SweepCache, "begin", lambda self, batch: begun.append(batch) or begin(self, batch))
    for data, copied in (([(X, y)], False), (DataLoader(TensorDataset(X, y), 6), True)):
        curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), EKFAC).compute()
        assert bool(begun) == copied
