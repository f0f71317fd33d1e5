"""Estimators and optimizers of several processes follow those of one."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvlinops_plus import (
    KFAC,
    Checkpoint,
    CurvatureEstimator,
    Empirical,
    EmpiricalRisk,
    Exact,
    KFACOptimizer,
    LevenbergMarquardt,
    NumericsError,
    Processes,
)
from curvlinops_plus.blocks import users_pass
from test.cases import APPROXIMATIONS, VECTORS, problem
from test.distributed.together import close, everywhere, flat, shifted, small
from test.helpers import seeded


def same(one: CurvatureEstimator, several: CurvatureEstimator, when: str = "") -> None:
    """Refuse estimators with other curvatures or inverses."""
    close(several.operator.to_dense(), one.operator.to_dense(), f"operator {when}")
    close(several.inverse().to_dense(), one.inverse().to_dense(), f"inverse {when}")


@pytest.mark.parametrize(
    ("approximation", "vectors", "decay"),
    [("KFAC", "mc", 0.9), ("EKFAC", "mc", 0.9), ("EKFAC", "exact", 1.0), ("FullBlock", "mc", 0.5)],
)
def test_estimator(
    processes: Processes, approximation: str, vectors: str, decay: float, tmp_path: Path
) -> None:
    """Parts of each batch, in other numbers of micro-batches; of eight processes some have no
    examples.

    Their state, also in a checkpoint, goes on in one process and in several.
    """
    p, options = problem("mlp"), {"vectors": VECTORS[vectors], "decay": decay, "damping": 0.1}
    X, y = (torch.cat(t) for t in zip(*p.data, strict=True))
    one = CurvatureEstimator(p.risk(()), APPROXIMATIONS[approximation], **options)
    several = CurvatureEstimator(
        p.risk((), processes=processes), APPROXIMATIONS[approximation], **options
    )

    def feed(n: int) -> None:
        one.update((X[:n], y[:n]))
        mine, target = processes.share([(X[:n], y[:n])])[0]
        # EKFAC's first basis is that of the first micro-batches: these have to be the same.
        size = 1 + processes.rank if several.updates else max(len(mine), 1)
        for start in range(0, max(len(mine), 1), size):
            micro = mine[start : start + size], target[start : start + size]
            several.update(micro, decay=1.0 if start else None)

    def refresh(when: str) -> None:
        one.refresh()
        several.refresh()
        same(one, several, when)

    feed(6)
    feed(5)
    refresh("after a refresh")
    feed(6)
    same(one, several, "at the end")
    state = several.state_dict()
    assert state["examples"] == one.state_dict()["examples"]
    dcp.save(
        {"curvature": Checkpoint(several)}, checkpoint_id=tmp_path, process_group=processes.group
    )
    one = CurvatureEstimator(p.risk(()), APPROXIMATIONS[approximation], **options)
    one.load_state_dict(state)
    several, stored = (
        CurvatureEstimator(
            p.risk((), processes=processes), APPROXIMATIONS[approximation], **options
        )
        for _ in range(2)
    )
    several.load_state_dict(state)
    same(one, several, "after loading")
    dcp.load(
        {"curvature": Checkpoint(stored)}, checkpoint_id=tmp_path, process_group=processes.group
    )
    same(one, stored, "from a checkpoint")
    feed(6)
    refresh("going on")


class Positions(nn.Module):
    """Learned positions and a scale, which functions read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.places, self.head = nn.Linear(3, 4), nn.Embedding(2, 4), nn.Linear(8, 3)
        self.g = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            (torch.tanh(self.body(x) + self.places(torch.arange(2))) * self.g).flatten(1)
        )


class Slopes(nn.Module):
    """A network whose derivative is taken in the forward pass, inside of another one: the model is
    run again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.net(x)
            return (u + torch.autograd.grad(u.sin().sum(), x, create_graph=True)[0]).sum(1)


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
@pytest.mark.parametrize("make", [Positions, Slopes])
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_reads_that_another_process_finds(
    processes: Processes, approximation: str, make: type[nn.Module]
) -> None:
    """Functions read parameters, and other processes have no examples to see it from in the first
    step.
    """
    torch.manual_seed(0)
    model, loss = make().double(), nn.CrossEntropyLoss()
    one, several = (
        CurvatureEstimator(
            EmpiricalRisk(model, loss, (), **options), APPROXIMATIONS[approximation], decay=0.9
        )
        for options in ({}, {"processes": processes})
    )
    for number, n in enumerate((5, 10, 10)):
        X, y = torch.randn(n, 2, 3, dtype=torch.float64), torch.randint(3, (n,))
        one.update((X, y))
        mine = (
            slice(5) if processes.rank == 0 else slice(5, 10) if processes.rank == 1 else slice(0)
        )
        several.update((X[mine], y[mine]))
        close(several.operator.to_dense(), one.operator.to_dense(), f"step {number}")


class ReadTwice(nn.Module):
    """In some batches a function reads the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.twice = nn.Linear(3, 4), nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h) + h.square() @ self.head.weight.T if self.twice else self.head(h)


@pytest.mark.filterwarnings("ignore:.*without preconditioner")
def test_a_layer_that_one_process_has_withdrawn(processes: Processes) -> None:
    """All leave it without preconditioner, and of the others have the statistics of all data."""
    torch.manual_seed(0)
    model, loss = ReadTwice().double(), nn.CrossEntropyLoss()
    risk = EmpiricalRisk(model, loss, (), processes=processes, check="every")
    estimator = CurvatureEstimator(risk, decay=0.9)
    for number in range(3):
        X, y = (
            torch.randn(4 * processes.world, 3, dtype=torch.float64),
            torch.arange(4 * processes.world) % 3,
        )
        mine = slice(4 * processes.rank, 4 * processes.rank + 4)
        model.twice = number > 0 and processes.rank == processes.world - 1
        estimator.update((X[mine], y[mine]))
    K = estimator.operator
    assert estimator.withdrawn == ["head"]
    close(K.blocks["head"].to_dense(), torch.eye(15, dtype=torch.float64), "the block of the layer")
    traces = processes.gather(float(K.blocks["body"].trace))
    assert len({*traces}) == 1
    assert traces[0] > 0


class Routed(nn.Module):
    """A trunk, and one head for each batch, which its first entry names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(3, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x[0, 0])](self.trunk(x).tanh())


def routed(heads: list[int | None]) -> list[Any]:
    """A batch for each head; one without examples for None."""
    found = []
    for k, head in enumerate(heads):
        X = torch.randn(0 if head is None else 2 + k, 3, dtype=torch.float64)
        X[:, 0] = head or 0
        found.append((X, torch.randn(len(X), 2, dtype=torch.float64)))
    return found


two_processes = pytest.mark.parametrize("processes", [2], indirect=True)


@two_processes
def test_processes_that_call_other_layers(processes: Processes) -> None:
    """A layer that some processes call in a step is decayed, and divided by the examples of all of
    them.
    """
    model, loss = Routed().double(), nn.MSELoss()
    options = {"decay": 0.8, "vectors": VECTORS["exact"], "leave_out_uncalled": True}
    one = CurvatureEstimator(EmpiricalRisk(model, loss, ()), KFAC, **options)
    several = CurvatureEstimator(
        EmpiricalRisk(model, loss, (), processes=processes), KFAC, **options
    )
    for heads in ([0, 1], [0, 0], [2, 1], [None, 0], [1, 2], [1, None]):
        parts, first = routed([*heads]), None
        for X, y in parts:
            if len(X):
                one.update((X, y), decay=first)
                first = 1.0
        several.update(parts[processes.rank])
        close(several.operator.to_dense(), one.operator.to_dense())


PLAIN = {"lr": 0.1, "inverse_every": 3}
ADAPTIVE = {
    "lr": "adaptive",
    "momentum": "adaptive",
    "damping": LevenbergMarquardt(0.1, interval=2),
}


@pytest.mark.parametrize(
    ("options", "wrapper", "more", "reduction"),
    [
        (PLAIN, {}, 0, "mean"),
        (PLAIN | {"inverse": "factored"}, {"find_unused_parameters": True}, 0, "mean"),
        (PLAIN, {}, 1, "sum"),
        (ADAPTIVE, {}, 1, "mean"),
        (ADAPTIVE, {}, 1, "sum"),
        ({"lr": 0.1, "reject": 2.0}, {}, 1, "mean"),
    ],
    ids=str,
)
def test_optimizer(
    processes: Processes,
    options: dict[str, Any],
    wrapper: dict[str, Any],
    more: int,
    reduction: str,
) -> None:
    """Of a wrapped model on parts of batches, beside one that is alone on the whole batches.

    The numbers of the losses make the mean of all gradients that of the whole, also where some
    parts have one example `more`, and other numbers of micro-batches. Replicas are the same bit by
    bit.
    """
    model, loss = small(), nn.CrossEntropyLoss(reduction=reduction)
    alone, options = copy.deepcopy(model), dict(options)
    ddp = DistributedDataParallel(model, process_group=processes.group, **wrapper)
    steps, N, world = 12, 6 * processes.world + more, processes.world
    X, y = torch.randn(steps, N, 4, dtype=torch.float64), torch.randint(3, (steps, N))
    one, several = KFACOptimizer(alone, loss, **options), KFACOptimizer(ddp, loss, **options)
    one.curvature.draws_by_batch = several.curvature.draws_by_batch = False

    def whole(model: nn.Module, optimizer: KFACOptimizer, step: int) -> None:
        optimizer.zero_grad()
        value = loss(model(X[step]), y[step])
        value.backward()
        optimizer.step(lambda: value)

    for step in range(steps):
        whole(alone, one, step)
        several.zero_grad()
        mine, total = (
            (X[step][processes.rank :: world], y[step][processes.rank :: world]),
            torch.tensor(0.0),
        )
        micro = (
            [*zip(mine[0].split(4), mine[1].split(4), strict=True)]
            if processes.rank or not more
            else [mine]
        )
        for k, (x, t) in enumerate(micro):
            with ddp.no_sync() if k < len(micro) - 1 else nullcontext():
                part = loss(ddp(x), t) * world * (len(x) / N if reduction == "mean" else 1)
                part.backward()
                total = total + part.detach()
        several.step(lambda total=total: total)
    close(flat(model), flat(alone))
    values = everywhere(processes, flat(model).tolist())
    assert all(each == values[0] for each in values)
    operator = several.curvature.operator
    assert [*operator.mapping, *operator.in_space.names] == [
        "0",
        "2",
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    plain = copy.deepcopy(model)  # the state fits a model without a wrapper
    resumed = KFACOptimizer(plain, loss, **options)
    resumed.curvature.draws_by_batch = False
    resumed.load_state_dict(several.state_dict())
    whole(plain, resumed, 0)
    whole(alone, one, 0)
    close(flat(plain), flat(alone))


def test_gradients_from_the_backward_passes_of_a_wrapper(processes: Processes) -> None:
    """Each process multiplies its losses by a number of its own."""
    options = PLAIN | {"vectors": Empirical()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(users_pass, "_ENOUGH_NUMBERS", 0)
        test_optimizer(processes, options, {}, 1, "mean")


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
def test_decompositions_are_shared_out(processes: Processes, approximation: str) -> None:
    """Each is computed by one process, and all have the same bits."""
    count, original, p = [0], torch.linalg.eigh, problem("mlp")

    def counted(M: Any) -> Any:
        count[0] += 1
        return original(M)

    estimator = CurvatureEstimator(
        p.risk((), processes=processes), APPROXIMATIONS[approximation], damping=0.1
    )
    torch.linalg.eigh = counted
    try:
        estimator.update(processes.share(shifted(p.data)[:1])[0])
        count[0] = 0
        estimator.refresh()
    finally:
        torch.linalg.eigh = original
    counts = everywhere(processes, count[0])
    assert (sum(counts), max(counts)) == (4, {2: 2, 3: 2, 8: 1}[processes.world])
    found = everywhere(
        processes, (estimator.inverse() @ torch.ones(43, dtype=torch.float64)).tolist()
    )
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("options", [{}, {"reject": 2.0}], ids=str)
def test_a_batch_of_one_process_is_not_finite(
    processes: Processes, options: dict[str, Any]
) -> None:
    """All refuse or reject that step, and go on together."""
    model, loss = small(), nn.CrossEntropyLoss()
    ddp = DistributedDataParallel(model, process_group=processes.group)
    optimizer, rejected = KFACOptimizer(ddp, loss, **PLAIN, **options), []
    for step in range(6):
        batch = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
        X, y = processes.share([batch])[0]
        optimizer.zero_grad()
        loss(ddp(X * float("nan") if step == 3 and processes.rank == 1 else X), y).backward()
        if step == 3 and not options:
            with pytest.raises(NumericsError, match=r"The gradient of .* is not finite"):
                optimizer.step()
        else:
            optimizer.step()
            rejected.append(optimizer.last_step.rejected)
    assert rejected == ([False] * 3 + [True] + [False] * 2 if options else [False] * 5)
    found = everywhere(processes, flat(model).tolist())
    assert all(each == found[0] for each in found)
    assert bool(flat(model).isfinite().all())


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
def test_a_process_without_examples_takes_part(processes: Processes, approximation: str) -> None:
    """Its share of a step is empty, also of the first one; and all are, in the third."""
    X = torch.randn(8, 4, generator=seeded(0)).double()
    y = torch.randint(3, (8,), generator=seeded(1))
    last = processes.world - 1
    cuts = [(0, 6), (6, 8), (8, 8), (2, 8)]
    one, several = small(), small()
    options = {"approximation": APPROXIMATIONS[approximation], "vectors": Exact()}
    alone = KFACOptimizer(one, nn.CrossEntropyLoss(), **options)
    together = KFACOptimizer(several, nn.CrossEntropyLoss(), processes=processes, **options)
    for k, (start, stop) in enumerate(cuts):
        idle = last if k % 2 == 0 else 0  # another one has none
        working = [rank for rank in range(processes.world) if rank != idle]
        size = -(-(stop - start) // max(1, len(working)))
        first = start + size * working.index(processes.rank) if processes.rank != idle else stop
        mine = slice(min(first, stop), min(first + size, stop))
        for model, optimizer, part in ((one, alone, slice(start, stop)), (several, together, mine)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[part]), y[part])  # the statistics
            with optimizer.paused():
                value = nn.functional.cross_entropy(model(X[part]), y[part], reduction="sum")
            (value / max(1, stop - start)).backward()
        for p in several.parameters():
            assert p.grad is not None
            p.grad = sum(everywhere(processes, p.grad), torch.zeros_like(p.grad))
        alone.step()
        together.step()
        close(flat(several), flat(one), f"step {k}")
    assert together.curvature.state_dict()["examples"] == 14
