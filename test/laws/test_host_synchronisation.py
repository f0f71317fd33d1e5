"""After the first batch, which is checked, no sweep waits for the device, however many layers and batches there are.

On a GPU the host runs ahead and queues work; a number that it reads (`bool(t)`, `t.item()`, `t.tolist()`, indexing with
a mask, a copy between devices) makes it wait until all of that is done. Such readings are the same operations on every
device, so they are counted here on the CPU, too, by the batch in which they happen and the function that reads.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    TNT,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    FullBlock,
    GGNFactor,
    Hessian,
    KFACOptimizer,
    MonteCarlo,
    curvature,
)

# Operations whose result the host needs, or whose size it has to know.
_READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}

# What can't be avoided, as file.function. In an update of an estimator, once: with NaN nothing may have changed.
_OF_UPDATES = {"layer_sums.require_finite"}
# Squares of an embedding's gradients: how many different tokens an example has.
_OF_EMBEDDINGS = {"rows.of"}
# Linearisations are kept in main memory alone, if the vector tells whether they are right.
# In main memory class indices of every batch are compared with the number of classes; a GPU does that by itself.
_OF_THE_CPU = {"cross_entropy.canonical_target", "batched.is_generic"}
# In the 1st, 2nd, 4th, ... batch three examples are compared with what their layers saw.
_OF_LOOKS = {"determinism.relative_difference", "random_state.__eq__", "check.compare"}
# After the last batch, per statistic, factor or buffer: is it finite, do terms count, decompositions, is it as before.
_AT_THE_END = {
    "accumulator.value",
    "losses._divided",
    "numerics.check_finite",
    "eigendecomposition._eigh",
    "data_rows._reduced",
    "passes.agree",
    "modules._restore_buffer",
    "rows.of",
}


class Readings(TorchDispatchMode):
    """Counts by batch (None: not in one) and function of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: int | None = None
        self.found: Counter[tuple[int | None, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        masks = name in _INDEXING and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
        if name in _READS or masks or _between_devices(name, args, kwargs):
            self.note()
        return func(*args, **kwargs)

    def note(self) -> None:
        frame = sys._getframe()
        while not _tells(frame):
            frame = frame.f_back
        self.found[self.batch, f"{frame.f_globals['__name__'].split('.')[-1]}.{frame.f_code.co_name}"] += 1

    def of_batches(self, numbers: Sequence[int | None]) -> set[str]:
        """The functions that read something in these batches."""
        return {name for batch, name in self.found if batch in numbers}


def _tells(frame: Any) -> bool:
    """Whether it is a function of the package, or of the test's approximation, and no mode that operations pass by."""
    name = frame.f_code.co_name
    ours = frame.f_globals.get("__name__", "").startswith("curvlinops_plus") and name != "__torch_function__"
    return ours or name == "update"


def _between_devices(name: str, args: Any, kwargs: Any) -> bool:
    if name == "copy_":
        return args[0].device.type != args[1].device.type and not (len(args) > 2 and args[2])
    to = kwargs.get("device")
    waits = not kwargs.get("non_blocking", False)
    return name == "_to_copy" and to is not None and waits and torch.device(to).type != args[0].device.type


class Batches:
    """Data that tell which of their batches is being worked on."""

    def __init__(self, data: Sequence[Any], readings: Readings) -> None:
        self.data, self.readings = data, readings

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.data):
            self.readings.batch = number
            yield item
        self.readings.batch = None


def perceptron(depth: int) -> nn.Module:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(5, 5), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), *hidden, nn.Linear(5, 3))


def convolutions(depth: int) -> nn.Module:
    hidden = [layer for _ in range(depth) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh())]
    last = [nn.Conv2d(3, 3, 2, stride=2, groups=3), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 3, 3, padding=1), *hidden, *last).eval()


class Mixed(nn.Module):
    """Embedding, attention, norms and positions, with logits `[N, C, T]`."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlps = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(depth)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token((x[:, 0].abs() * 2).long().clamp(max=6))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        for mlp in self.mlps:
            h = h + mlp(h)
        return self.head(h.mean(1))


MODELS = {"perceptron": perceptron, "convolutions": convolutions, "attention": Mixed}
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss, lambda N: torch.randint(3, (N,))),
    "squared error": (nn.MSELoss, lambda N: torch.randn(N, 3)),
}


def _listen(approximation: Any, vectors: Any) -> Callable[[EmpiricalRisk], None]:
    def run(risk: EmpiricalRisk) -> None:
        model, loss = risk.model, risk.losses[0].loss
        estimator = CurvatureEstimator(EmpiricalRisk(model, loss, ()), approximation, vectors=vectors, decay=0.9)
        for X, y in risk.data:
            with estimator.listen((X, y)):
                model(X)

    return run


def _train(risk: EmpiricalRisk) -> None:
    model, loss = risk.model, risk.losses[0].loss
    for module in model.modules():
        module.training = not isinstance(module, nn.BatchNorm2d)
    optimizer = KFACOptimizer(model, loss, lr=1e-3, damping=1e-2)
    for X, y in risk.data:
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()


def _product(operator: Callable[[EmpiricalRisk], Any], times: int, columns: int = 1) -> Callable[[EmpiricalRisk], None]:
    def run(risk: EmpiricalRisk) -> None:
        A = operator(risk)
        V = torch.ones(A.shape[1], columns, device=A.device)
        for _ in range(times):
            A @ V

    return run


SWEEPS: dict[str, Callable[[EmpiricalRisk], object]] = {
    "KFAC, Monte Carlo": lambda risk: curvature(risk, KFAC, vectors=MonteCarlo()),
    "KFAC, exact": lambda risk: curvature(risk, KFAC, vectors=Exact()),
    "KFAC, empirical": lambda risk: curvature(risk, KFAC, vectors=Empirical()),
    "EKFAC": lambda risk: curvature(risk, EKFAC, vectors=MonteCarlo()),
    "TNT": lambda risk: curvature(risk, TNT, vectors=MonteCarlo()),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock, vectors=MonteCarlo()),
    "full": lambda risk: curvature(risk, FullBlock, vectors=MonteCarlo()),
    "GGN product": _product(GGN, 1),
    "GGN products": _product(GGN, 3, columns=2),
    "Fisher products": _product(lambda risk: GGN(risk, MonteCarlo()), 3),
    "GGN factor": _product(GGNFactor, 2),
    "Hessian product": _product(Hessian, 1),
    "Hessian products": _product(Hessian, 3, columns=2),
    "estimator": _listen(KFAC, MonteCarlo()),
    "estimator, empirical": _listen(KFAC, Empirical()),
    "estimator, EKFAC": _listen(EKFAC, MonteCarlo()),
}


def readings(
    sweep: Callable[[EmpiricalRisk], object], model: str, loss: str, device: torch.device, depth: int, batches: int
) -> Readings:
    torch.manual_seed(0)
    made, (make_loss, targets) = MODELS[model](depth).to(device), LOSSES[loss]
    data = [(torch.randn(4, 4, 4, device=device), targets(4).to(device)) for _ in range(batches)]
    found = Readings()
    with found:
        sweep(EmpiricalRisk(made, make_loss(), Batches(data, found)))
    return found


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::curvlinops_plus.errors.CurvatureWarning")
@pytest.mark.parametrize(
    ("model", "loss"), [*((model, "cross-entropy") for model in MODELS), ("perceptron", "squared error")]
)
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_does_not_wait_for_the_device(name: str, model: str, loss: str, device: torch.device) -> None:
    allowed = {
        *_OF_LOOKS,
        *(_OF_UPDATES if "estimator" in name else ()),
        *(_OF_EMBEDDINGS if model == "attention" else ()),
        *(_OF_THE_CPU if device.type == "cpu" else ()),
    }
    few, many = (readings(SWEEPS[name], model, loss, device, depth=2, batches=batches) for batches in (2, 4))
    for found in (few, many):
        assert found.of_batches(range(1, 4)) <= allowed
        assert found.of_batches([None]) <= _AT_THE_END
        assert all(found.found[batch, update] <= 1 for batch in range(4) for update in _OF_UPDATES)
    # What is read in the first batch and at the end does not depend on the number of batches.
    assert _once(few, allowed) == _once(many, allowed)


@pytest.mark.filterwarnings("ignore::curvlinops_plus.errors.CurvatureWarning")
@pytest.mark.parametrize("model", MODELS)
def test_a_step_between_refreshes_reads_a_few_numbers(model: str, device: torch.device) -> None:
    """The loss, norms, whether anything is not finite, however many layers there are."""
    allowed = {*_OF_LOOKS, *_OF_EMBEDDINGS, *(_OF_THE_CPU if device.type == "cpu" else ())}
    shallow, deep = (readings(_train, model, "cross-entropy", device, depth, batches=4) for depth in (1, 3))
    for step in (1, 2, 3):
        one, other = ({name: n for (batch, name), n in r.found.items() if batch == step} for r in (shallow, deep))
        assert one == other
        assert sum(number for name, number in other.items() if name not in allowed) <= 8


def _once(found: Readings, allowed: set[str]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for (_, name), number in found.found.items():
        if name not in allowed:
            total[name] += number
    return dict(total)


@pytest.mark.parametrize(
    "read",
    [
        lambda a: float(a.sum()),
        lambda a: bool(a.isfinite().all()),
        lambda a: a.sum().item(),
        lambda a: a[a > 0],
        lambda a: a.nonzero(),
        lambda a: torch.equal(a, a),
    ],
)
def test_readings_are_counted(read: Callable[[Tensor], object], device: torch.device) -> None:
    class Reading(DiagonalBlock):
        def update(self, batch: Any) -> None:
            super().update(batch)
            read(batch.per_example_grads)

    few, deep = (
        readings(lambda risk: curvature(risk, Reading), "perceptron", "squared error", device, depth, 3)
        for depth in (1, 3)
    )
    assert few.of_batches([2]) == deep.of_batches([2]) == {"test_host_synchronisation.update"}
    assert few.found[1, "test_host_synchronisation.update"] < deep.found[1, "test_host_synchronisation.update"]
