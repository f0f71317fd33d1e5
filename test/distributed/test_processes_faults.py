"""What goes wrong in one of several processes is told to all: none waits, none ends without a word,
none goes on with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    EmpiricalRisk,
    HeuristicDamping,
    KFACOptimizer,
    Processes,
    curvature,
)
from test.distributed.together import close, small


class Parts(NamedTuple):
    """What a case begins with; `last` is true in one process, where something is different."""

    processes: Processes
    last: bool
    model: nn.Module
    data: list[tuple[Tensor, Tensor]]

    def risk(self, data: Any = None, model: nn.Module | None = None) -> EmpiricalRisk:
        data = self.data if data is None else data
        loss = nn.CrossEntropyLoss()
        return EmpiricalRisk(model or self.model, loss, data, processes=self.processes)

    def of_other_dtype(self) -> EmpiricalRisk:
        """The same numbers, in one process in another precision."""
        model = small().float().to(torch.float32 if self.last else torch.float64)
        dtype = next(model.parameters()).dtype
        return self.risk([(X.to(dtype), y) for X, y in self.data], model)

    def owned(self) -> Any:
        return curvature(self.risk(), EKFAC, owned=True)


def update_and_read(estimator: CurvatureEstimator, parts: Parts, dtype: torch.dtype) -> object:
    X, y = parts.data[0]
    estimator.update((X.to(dtype), y))
    return estimator.operator


def train(parts: Parts, approximation: Any) -> None:
    model, loss = small(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(
        model, loss, approximation=approximation, damping=0.1, processes=parts.processes
    )
    for X, y in parts.data:
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()


def interrupted(parts: Parts, work: Callable[[EmpiricalRisk], object]) -> object:
    """Ctrl-C while the model runs, in one process."""

    def stop(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    model = small()
    if parts.last:
        model[2].register_forward_pre_hook(stop)
    return work(parts.risk(model=model))


DIFFERENT = "^The processes differ in "
DTYPE = DIFFERENT + ".*dtype.*float64.*float32|" + DIFFERENT + ".*dtype.*float32.*float64"
STOPPED = "^Process 1 of 2 failed, .*KeyboardInterrupt"
CASES: dict[str, tuple[Callable[[Parts], object], str]] = {
    "dtype, curvature": (lambda p: curvature(p.of_other_dtype(), KFAC), DTYPE),
    "dtype, owned": (lambda p: curvature(p.of_other_dtype(), KFAC, owned=True), DTYPE),
    "dtype, gradient": (lambda p: p.of_other_dtype().gradient(), DTYPE),
    "dtype, estimator": (
        lambda p: update_and_read(
            CurvatureEstimator(p.of_other_dtype(), KFAC),
            p,
            torch.float32 if p.last else torch.float64,
        ),
        DTYPE,
    ),
    "approximation": (
        lambda p: train(p, EKFAC if p.last else KFAC),
        "^The processes (differ in|are at different steps: process 0 .*, process 1 )",
    ),
    "damping": (
        lambda p: p.owned().inverse(0.1 if p.last else 0.01),
        DIFFERENT + "the damping of block '0': '0.01' in process 0, and '0.1' in process 1",
    ),
    "dampings of blocks": (
        lambda p: p.owned().inverse({"0": 0.1, "2": 0.2 if p.last else 0.3}),
        DIFFERENT + "the damping of block '2'",
    ),
    "damping of factors": (
        lambda p: curvature(p.risk(), KFAC, owned=True).inverse(
            HeuristicDamping(0.1 if p.last else 0.01)
        ),
        DIFFERENT + "the damping",
    ),
    "tensor as damping": (
        lambda p: p.owned().inverse(torch.tensor(0.1 if p.last else 0.1 + 1e-7).double()),
        DIFFERENT + "the damping",
    ),
    "power": (
        lambda p: p.owned().power(-0.5 if p.last else -1.0, 0.1) @ torch.ones(43).double(),
        DIFFERENT + "how their blocks were made: .*power -1.0.*power -0.5",
    ),
    "multiple of a power": (
        lambda p: (2 * p.owned().power(-0.5 if p.last else -1.0, 0.1)).diagonal(),
        DIFFERENT + "how their blocks were made: .*power -1.0.*power -0.5",
    ),
    "shift": (
        lambda p: p.owned().shift(0.5 if p.last else 1.0).trace,
        DIFFERENT + "how their blocks were made",
    ),
    "multiple": (
        lambda p: ((3.0 if p.last else 2.0) * p.owned()).operator.diagonal(),
        DIFFERENT + "how their blocks were made",
    ),
    "interrupt, curvature": (lambda p: interrupted(p, lambda r: curvature(r, KFAC)), STOPPED),
    "interrupt, gradient": (lambda p: interrupted(p, lambda r: r.gradient()), STOPPED),
    "NaN": (
        lambda p: curvature(p.risk([(X / (not p.last), y) for X, y in p.data]), KFAC),
        "^Process 1 of 2 failed, .*NumericsError: layer '0': the statistic",
    ),
    "another function": (
        lambda p: p.risk().gradient() if p.last else p.risk().loss(),
        "^The processes are at different steps|" + DIFFERENT,
    ),
}


@pytest.mark.parametrize("processes", [2], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_all_are_told(processes: Processes, name: str) -> None:
    """In less than a second, and they go on together afterwards."""
    parts = Parts(processes, processes.rank == 1, small(), [])
    X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
    parts = parts._replace(data=processes.share([(X, torch.arange(6) % 3)]))
    work, words = CASES[name]
    expects_interrupt = name.startswith("interrupt") and parts.last
    if expects_interrupt:
        with pytest.raises(KeyboardInterrupt):
            work(parts)
    else:
        with pytest.raises(RuntimeError, match=f"(?s){words}"):
            work(parts)
    whole = EmpiricalRisk(small(), nn.CrossEntropyLoss(), [(X, torch.arange(6) % 3)])
    close(curvature(parts.risk(), KFAC).to_dense(), curvature(whole, KFAC).to_dense(), name)
