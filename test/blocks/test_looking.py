"""Looking at a stream of batches changes nothing of it, and a state has all that its rounding depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    Exact,
    FullBlock,
    MonteCarlo,
    curvature,
    load,
    save,
)
from curvlinops_plus.layer import convolution_gram

KINDS: dict[str, Any] = {
    "KFAC": KFAC,
    "reduce": KFAC.using(kfac_approx="reduce"),
    "EKFAC": EKFAC,
    "full": FullBlock,
    "diagonal": DiagonalBlock,
}
SIZES = (5, 3, 70, 1, 20, 7, 9, 130, 2, 3)  # some rows wait for others, some are multiplied at once


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 4))


def correlated(padding: int = 1, size: int = 6) -> nn.Module:
    """Of its convolution, correlations of images are summed, or products of those that are as small as the kernel."""
    images = nn.Linear(9, 4 * size**2), nn.Unflatten(1, (4, size, size))
    conv = nn.Conv2d(4, 2, 3, padding=padding)
    return nn.Sequential(*images, conv, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 4))


@pytest.fixture(autouse=True)
def small_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_gram, "_MIN_PATCHES", 1)
    monkeypatch.setattr(convolution_gram, "_MIN_PRODUCTS", 1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": dense,
    "correlated": correlated,
    "without padding": partial(correlated, 0),
}
#: Every kind on dense layers, and convolutions whose rows are not formed.
STREAMS = [
    *(("dense", kind) for kind in KINDS),
    ("correlated", "KFAC"),
    ("correlated", "EKFAC"),
]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for n in SIZES:
        yield torch.randn(n, 9, generator=generator), torch.randint(4, (n,), generator=generator)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of a state."""
    if isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


def same_bits(one: Any, two: Any) -> None:
    mine, theirs = dict(leaves(one)), dict(leaves(two))
    assert mine.keys() == theirs.keys()
    for path, value in mine.items():
        other = theirs[path]
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, path


def stream(name: str, kind: str, vectors: Any = None, decay: float = 0.95) -> CurvatureEstimator:
    torch.manual_seed(1)
    loss = nn.CrossEntropyLoss(torch.tensor([0.3, 1.7, 0.9, 1.1]))
    risk = EmpiricalRisk(NETWORKS[name](), loss, ())
    vectors = vectors or MonteCarlo(2, seed=1)
    return CurvatureEstimator(risk, KINDS[kind], vectors=vectors, decay=decay, damping=0.1)


def streamed(
    name: str, kind: str, between: Callable[[CurvatureEstimator, int], CurvatureEstimator] = lambda it, step: it
) -> tuple[Any, Tensor]:
    """State and inverse of an estimator that saw all batches; `between` returns the one to go on with."""
    estimator = stream(name, kind)
    for step, batch in enumerate(batches()):
        estimator.update(batch)
        if step == 6:
            estimator.refresh()
        estimator = between(estimator, step)
    state = estimator.state_dict()
    estimator.refresh()
    return state, estimator.inverse() @ torch.linspace(-1, 1, estimator.refreshed.shape[0])


@pytest.mark.parametrize(("name", "kind"), STREAMS)
def test_looking_and_resuming_change_no_bits(name: str, kind: str, tmp_path: Path) -> None:
    """In every way after every batch, another one first each time. Rows that wait, moving averages that are multiplied
    later, counts and their precision are in the state.
    """

    def look(it: CurvatureEstimator, step: int) -> CurvatureEstimator:
        into = stream(name, kind)
        into.load_state_dict(it.state_dict())
        ways: list[Callable[[], object]] = [
            lambda: it.operator.to_dense(),
            it.state_dict,
            lambda: save(it, tmp_path / "state"),
            lambda: torch.inference_mode()(it.state_dict)(),
            lambda: into.merge(it),
        ]
        for k in range(len(ways)):
            ways[(step + k) % len(ways)]()
        return it

    def resume(it: CurvatureEstimator, step: int) -> CurvatureEstimator:
        state, path = it.state_dict(), tmp_path / "state"
        if step % 2:
            save(state, path)
            state = load(path)
        else:
            torch.save(state, path)
            state = torch.load(path, weights_only=True)
        resumed = stream(name, kind)
        resumed.load_state_dict(state)
        return resumed

    state, product = streamed(name, kind)
    for between in (look, resume):
        found, of_found = streamed(name, kind, between)
        same_bits(found, state)
        assert torch.equal(of_found, product)


@pytest.mark.parametrize("kind", ["KFAC", "reduce", "full"])
def test_what_is_looked_at_is_what_was_added(kind: str) -> None:
    """With rows that wait, and after some were multiplied."""
    data, running = list(batches()), stream("dense", kind, Exact(), 1.0)
    for step, batch in enumerate(data):
        running.update(batch)
        risk = running.risk.with_data(data[: step + 1])
        expected = curvature(risk, KINDS[kind], vectors=Exact()).to_dense()
        for _ in range(2):
            torch.testing.assert_close(running.operator.to_dense(), expected, rtol=1e-4, atol=1e-6)
