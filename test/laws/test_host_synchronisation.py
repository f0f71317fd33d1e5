"""A sweep waits for the device as often in a deep network as in a shallow one, so for no layer by itself.

On a GPU the host runs ahead and queues work; a number that it reads (`bool(t)`, `t.item()`, `t.tolist()`, indexing with
a mask, a copy between devices) makes it wait until all of that is done. Such readings are the same operations on every
device, so they are counted here on the CPU, too, by the batch in which they happen.
"""

from __future__ import annotations

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
#: The batch in which readings are counted: three examples of the 1st, 2nd, 4th, ... are compared with autograd.
COUNTED = 2


class Readings(TorchDispatchMode):
    """Counts by batch (None: not in one)."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: int | None = None
        self.found: Counter[int | None] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        masks = name in _INDEXING and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
        if name in _READS or masks or _between_devices(name, args, kwargs):
            self.found[self.batch] += 1
        return func(*args, **kwargs)


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
    "optimizer": _train,
}


def readings(sweep: Callable[[EmpiricalRisk], object], model: Any, depth: int, device: torch.device) -> int:
    torch.manual_seed(0)
    data = [(torch.randn(4, 4, 4, device=device), torch.randint(3, (4,), device=device)) for _ in range(3)]
    with Readings() as found:
        sweep(EmpiricalRisk(model(depth).to(device), nn.CrossEntropyLoss(), Batches(data, found)))
    return found.found[COUNTED]


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore::curvlinops_plus.errors.CurvatureWarning")
@pytest.mark.parametrize("model", [convolutions, Mixed])
@pytest.mark.parametrize("name", SWEEPS)
def test_layers_do_not_wait_for_the_device(name: str, model: Any, device: torch.device) -> None:
    shallow, deep = (readings(SWEEPS[name], model, depth, device) for depth in (1, 3))
    assert shallow == deep <= 8


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

    shallow, deep = (readings(lambda risk: curvature(risk, Reading), convolutions, depth, device) for depth in (1, 3))
    assert shallow < deep
