"""Looking at a stream of batches changes nothing of it, and a state has all that its rounding depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
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
    KFACOptimizer,
    LevenbergMarquardt,
    MonteCarlo,
    curvature,
    load,
    save,
)
from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.estimator_state import write_estimator
from curvlinops_plus.layer import convolution_gram

KINDS: dict[str, Any] = {
    "KFAC": KFAC,
    "reduce": KFAC.using(kfac_approx="reduce"),
    "split": KFAC.using(split=7),
    "EKFAC": EKFAC,
    "full": FullBlock,
    "diagonal": DiagonalBlock,
}
SIZES = (5, 3, 70, 1, 20, 7, 9, 130, 2, 3)  # some rows wait for others, some are multiplied at once


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 4))


def images() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 4))


def correlated(padding: int = 1, size: int = 6) -> nn.Module:
    """Of its convolution, correlations of images are summed, or products of those that are as small as the kernel."""
    images = nn.Linear(9, 4 * size**2), nn.Unflatten(1, (4, size, size))
    conv = nn.Conv2d(4, 2, 3, padding=padding)
    return nn.Sequential(*images, conv, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 4))


@pytest.fixture(autouse=True)
def small_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_gram, "_MIN_PATCHES", 1)
    monkeypatch.setattr(convolution_gram, "_MIN_PACKED_PRODUCTS", 1)
    monkeypatch.setattr(convolution_gram, "_IMAGE_BYTES", 0)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": dense,
    "images": images,
    "correlated": correlated,
    "whole images": partial(correlated, size=3),
}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for n in SIZES:
        yield torch.randn(n, 9, generator=generator), torch.randint(4, (n,), generator=generator)


@pytest.mark.parametrize(("name", "form"), [("correlated", "Correlations"), ("whole images", "Images")])
def test_packed_numbers_are_in_the_state(name: str, form: str) -> None:
    estimator = stream(name, KFAC)
    for batch in batches():
        estimator.update(batch)
    found = dict(leaves(estimator.state_dict()))
    assert [value.split("(")[0] for path, value in found.items() if path.endswith("/rows/A/form")] == [form]
    assert any(path.endswith("/rows/A/packed") for path in found)


def two_paddings() -> nn.Module:
    """Two convolutions of one kernel, of which the last one is called."""
    images = nn.Linear(9, 144), nn.Unflatten(1, (4, 6, 6))
    one, two = (nn.Conv2d(4, 2, 3, padding=padding) for padding in ((2, 1), (1, 2)))
    two.weight, two.bias = one.weight, one.bias
    net = nn.Sequential(*images, one, two, nn.Flatten(), nn.Linear(96, 4))
    net.forward = lambda x: net[5](net[4](two(net[1](net[0](x)))))
    return net


def test_correlations_belong_to_a_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in {"two": two_paddings, "one": partial(correlated, 1), "none": partial(correlated, 0)}.items():
        monkeypatch.setitem(NETWORKS, name, make)
    running, resumed = stream("two", KFAC), stream("two", KFAC)
    for batch in batches():
        running.update(batch)
    resumed.load_state_dict(running.state_dict())
    same_bits(running.operator.state_dict(), resumed.operator.state_dict())
    running = stream("one", KFAC)
    running.update(next(batches()))
    with pytest.raises(ValueError, match=r"'2'.*: the state is that of a convolution of other options, .*\(1, 1\)"):
        stream("none", KFAC).load_state_dict(running.state_dict())


def stream(
    name: str, kind: Any, loss: nn.Module | None = None, decay: float = 0.95, vectors: Any = None
) -> CurvatureEstimator:
    torch.manual_seed(1)
    risk = EmpiricalRisk(NETWORKS[name](), loss or nn.CrossEntropyLoss(), ())
    return CurvatureEstimator(risk, kind, vectors=vectors or MonteCarlo(2, seed=1), decay=decay, damping=0.1)


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


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "operator": lambda it, tmp_path: it.operator.to_dense(),
    "state_dict": lambda it, tmp_path: it.state_dict(),
    "write_estimator": lambda it, tmp_path: write_estimator(it),
    "save": lambda it, tmp_path: save(it, tmp_path / "state.safetensors"),
    "inference mode": lambda it, tmp_path: torch.inference_mode()(it.state_dict)(),
}


def streamed(name: str, kind: str, look: Callable[[Any, int], Any] = lambda it, step: None, **options: Any) -> Any:
    """An estimator that saw all batches, and was looked at after each; a step's blocks were made in between."""
    estimator = stream(name, KINDS[kind], **options)
    for step, batch in enumerate(batches()):
        estimator.update(batch)
        if step == 6:
            estimator.refresh()
        look(estimator, step)
    return estimator


@cache
def unseen(name: str, kind: str) -> tuple[Any, Tensor]:
    """The state of an estimator that nobody looked at, and a product with its inverse."""
    return what_is_left(streamed(name, kind))


def what_is_left(estimator: CurvatureEstimator) -> tuple[Any, Tensor]:
    state = estimator.state_dict()
    estimator.refresh()
    v = torch.linspace(-1, 1, estimator.refreshed.shape[0])
    return state, estimator.inverse() @ v


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_looking_at_an_estimator_changes_no_bits(name: str, kind: str, tmp_path: Any) -> None:
    """In every way after every batch, another one first each time; on dense layers each by itself, too."""

    def all_ways(it: Any, step: int) -> None:
        for k in range(len(ways)):
            ways[(step + k) % len(ways)](it, tmp_path)

    ways = list(LOOKS.values())
    alone = [lambda it, step, way=way: way(it, tmp_path) for way in ways] if name == "dense" else []
    state, product = unseen(name, kind)
    for look in (all_ways, *alone):
        seen, of_seen = what_is_left(streamed(name, kind, look))
        same_bits(seen, state)
        assert torch.equal(of_seen, product)


@pytest.mark.parametrize("kind", ["KFAC", "reduce", "split", "full"])
def test_what_is_looked_at_is_what_was_added(kind: str) -> None:
    """With rows that wait, and after some were multiplied."""
    data, running = list(batches()), stream("dense", KINDS[kind], decay=1.0, vectors=Exact())
    for step, batch in enumerate(data):
        running.update(batch)
        risk = EmpiricalRisk(running.risk.model, nn.CrossEntropyLoss(), data[: step + 1])
        expected = curvature(risk, KINDS[kind], vectors=Exact()).to_dense()
        for _ in range(2):
            torch.testing.assert_close(running.operator.to_dense(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_changes_no_bits_of_the_other(kind: str) -> None:
    seen, unseen = stream("dense", KINDS[kind]), stream("dense", KINDS[kind])
    for step, batch in enumerate(batches()):
        if step in (1, 4, 8):
            into = stream("dense", KINDS[kind])
            into.adopt_bases(seen)
            into.merge(seen)
        for one in (seen, unseen):
            one.update(batch)
    same_bits(seen.state_dict(), unseen.state_dict())


#: An estimator counts loss terms once, whatever its layers are: weights of classes with two of the networks.
WEIGHTED = [*((name, False) for name in NETWORKS), ("dense", True), ("correlated", True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "weights"), WEIGHTED)
def test_going_on_after_every_batch(name: str, kind: str, weights: bool, tmp_path: Any) -> None:
    """Rows that wait, moving averages that are multiplied later, counts and their precision are in the state."""
    loss = nn.CrossEntropyLoss(torch.tensor([0.3, 1.7, 0.9, 1.1]) if weights else None)
    expected = streamed(name, kind, loss=loss).state_dict() if weights else unseen(name, kind)[0]
    resumed = stream(name, KINDS[kind], loss)
    for step, batch in enumerate(batches()):
        resumed.update(batch)
        if step == 6:
            resumed.refresh()
        state = resumed.state_dict()
        if step % 2:
            save(state, tmp_path / "state.safetensors")
            state = load(tmp_path / "state.safetensors")
        else:
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        resumed = stream(name, KINDS[kind], loss)
        resumed.load_state_dict(state)
    same_bits(resumed.state_dict(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_states_without_rows_that_wait(kind: str) -> None:
    """Earlier versions added all rows when they were asked for their state."""
    running, resumed = stream("dense", KINDS[kind]), stream("dense", KINDS[kind])
    data = list(batches())
    for batch in data[:5]:
        running.update(batch)
    state = running.state_dict()
    accumulators = [a for own in running._sums.stages.values() for stage in own for a in stage.values()]
    stored = [
        s for key, own in state["sums"].items() if key != "called" for stage in own.values() for s in stage.values()
    ]
    for accumulator, old in zip(accumulators, stored, strict=True):
        assert old.pop("rows").keys() == accumulator._rows.keys()
        old["sums"] = {name: total.clone() for name, total in accumulator.sums.items()}
    resumed.load_state_dict(state)
    for one in (running, resumed):
        one.update(data[5])
    torch.testing.assert_close(resumed.operator.to_dense(), running.operator.to_dense())


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "EKFAC": {"approximation": EKFAC},
    "factored": {"inverse": "factored"},
    "every 3": {"statistics_every": 3},
    "Levenberg-Marquardt": {"damping": LevenbergMarquardt(1.0, interval=2), "quadratic_model": "blocks"},
}


def trained(name: str, options: dict[str, Any], between: Callable[[nn.Module, Any], Any]) -> list[Tensor]:
    """The parameters after some steps; `between` returns the optimizer to go on with."""
    torch.manual_seed(1)
    model, loss = NETWORKS[name](), nn.CrossEntropyLoss()

    def made() -> KFACOptimizer:
        return KFACOptimizer(model, loss, vectors=MonteCarlo(seed=1), inverse_every=4, **options)

    optimizer = made()
    for X, y in batches():
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
        optimizer = between(optimizer, made) or optimizer
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_checkpoints_change_no_bits_of_a_training(name: str, options: str) -> None:
    def resumed(optimizer: Any, made: Callable[[], Any]) -> Any:
        state = optimizer.state_dict()
        optimizer.close()
        new = made()
        new.load_state_dict(state)
        return new

    plain, *others = (
        trained(name, OPTIMIZERS[options], between)
        for between in (
            lambda optimizer, made: None,
            lambda optimizer, made: optimizer.state_dict() and optimizer.curvature.estimator.operator and None,
            resumed,
        )
    )
    for other in others:
        assert all(map(torch.equal, plain, other))


def test_a_sum_that_is_written_to_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """That bits are compared is what finds it: an accumulator that adds its rows when it is read fails."""
    value, (state, _) = Accumulator.value, unseen("dense", "KFAC")
    monkeypatch.setattr(Accumulator, "value", lambda self, name: (self.sums, value(self, name))[1])
    with pytest.raises(AssertionError):
        same_bits(streamed("dense", "KFAC", lambda it, step: it.operator.to_dense()).state_dict(), state)
