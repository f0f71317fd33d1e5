"""What worker processes do: each function gets its processes and arguments, and returns something small."""

from __future__ import annotations

import copy
import io
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import APPROXIMATIONS, VECTORS, problem, unchanged
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    ActivationHessian,
    Checkpoint,
    CurvatureEstimator,
    CurvatureWarning,
    EmpiricalRisk,
    GGNFactor,
    Hessian,
    Jacobian,
    KFACOptimizer,
    ProcessError,
    Processes,
    curvature,
)

WORLDS = (1, 2, 3, 8)


def serve(rank: int, number: int, port: int, pipe: Any, timeout: float) -> None:
    """Join the group and do jobs until the end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CurvatureWarning)
    wait = timedelta(seconds=timeout)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", wait, number, rank)
    groups = {world: dist.new_group(range(world), timeout=wait) for world in WORLDS if world <= number}
    groups[number] = groups.get(number, dist.group.WORLD)
    while True:
        try:
            job, world, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(globals()[job](Processes(groups[world]), *args))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def away(found: Any, expected: Any) -> float:
    """Relative difference."""
    found, expected = (torch.as_tensor(t).detach().double() for t in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).norm() / max(float(expected.norm()), 1e-12))


def blocks(processes: Processes, name: str, approximation: str, vectors: str) -> float:
    """How far the matrix of several processes is from that of one."""
    p = problem(name)
    kind, sent = APPROXIMATIONS[approximation], VECTORS[vectors]
    shared = p.risk(processes.share(p.data), processes=processes)
    one, found = curvature(p.risk(), kind, vectors=sent), 0.0
    for kept in (0, 2**26):  # of what layers receive in one sweep for the next
        several = curvature(shared, kind, vectors=sent, max_kept_bytes=kept)
        assert one.examples == several.examples
        found = max(found, away(several.to_dense(), one.to_dense()))
    return found


class Shared(nn.Module):
    """Two layers that read one tensor in most batches."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes, self.a, self.b, self.c = sizes, nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x * 1.0 if len(x) in self.sizes else x
        return self.c(self.a(x).tanh() * self.b(other))


def in_groups(processes: Processes, sizes: tuple[int, ...], examples: int) -> dict[str, float]:
    """Layers in groups, split factors and shared input factors, beside one process."""
    torch.manual_seed(0)
    model = Shared(sizes).double()
    X, y = torch.randn(examples, 4).double(), torch.randint(3, (examples,))
    data = list(zip(X.split(6), y.split(6), strict=True))
    shared = EmpiricalRisk(model, nn.CrossEntropyLoss(), processes.share(data), processes=processes)
    found = {}
    for kind in (KFAC, EKFAC.using(split=2)):
        one = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), kind)
        needs = one.memory()
        limit = max(layer.computing for layer in needs.layers.values())
        for max_bytes in (limit, needs.computing):
            several = curvature(shared, kind, max_bytes=max_bytes, max_kept_bytes=0)
            found[f"{kind} {max_bytes}"] = away(several.to_dense(), one.to_dense())
    return found


def shifted(batches: list[Any]) -> list[Any]:
    """Batches of other sizes, with the same examples in the same order."""
    X, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return list(zip(X.split(4), y.split(4), strict=True))


def vectors(processes: Processes, name: str) -> dict[str, float]:
    """The same for all vectors, and exact operators."""
    p, found = problem(name), {}
    for sent in VECTORS:
        found[f"KFAC {sent}"] = blocks(processes, name, "KFAC", sent)
        if sent != "forward only":
            found[f"EKFAC {sent}"] = blocks(processes, name, "EKFAC", sent)
            shared = p.risk(processes.share(shifted(p.data)), processes=processes)
            found[f"GGN {sent}"] = away(GGN(shared, VECTORS[sent]).to_dense(), GGN(p.risk(), VECTORS[sent]).to_dense())
    return found


def exact(processes: Processes, name: str) -> dict[str, float]:
    """Loss, gradient, GGN and Hessian."""
    p = problem(name)
    one, several = p.risk(), p.risk(processes.share(p.data), processes=processes)
    v = torch.linspace(-1, 1, one.space.dim, dtype=torch.float64)
    found = {"loss": away(several.loss(), one.loss())}
    g, expected = (torch.cat([t.flatten() for t in risk.gradient().values()]) for risk in (several, one))
    found["gradient"] = away(g, expected)
    for kind in (GGN, Hessian):
        for check in (None, True):
            found[f"{kind.__name__} {check}"] = away(kind(several, check_deterministic=check) @ v, kind(one) @ v)
    return found


def raises(work: Callable[[], object]) -> str:
    """The message of a `ProcessError`."""
    try:
        work()
    except ProcessError as error:
        return str(error)
    raise AssertionError("no ProcessError")


def failures(processes: Processes) -> dict[str, str]:
    """What is said when the last process fails at its data, in its forward pass, with NaN, or has other parameters."""
    last = processes.rank == processes.world - 1
    model, data = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), problem("mlp").data
    model.load_state_dict(problem("mlp").model.state_dict())
    mine = processes.share(data)

    def risk(data: Any = mine) -> EmpiricalRisk:
        return EmpiricalRisk(model, nn.CrossEntropyLoss(), data, processes=processes)

    class Broken(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield self[0]
            raise OSError("the disk is full")

    def fail(module: nn.Module, args: Any) -> None:
        raise ArithmeticError("no luck")

    found = {}
    with unchanged(model):
        found["data"] = raises(lambda: curvature(risk(Broken(mine) if last else mine), KFAC))
        handle = model[2].register_forward_pre_hook(fail) if last else None
        found["forward"] = raises(lambda: curvature(risk(), EKFAC))
        found["product"] = raises(lambda: GGN(risk()) @ torch.ones(43, dtype=torch.float64))
        if handle is not None:
            handle.remove()
        nan = [(X * float("nan"), y) for X, y in mine] if last else mine
        found["nan"] = raises(lambda: curvature(risk(nan), EKFAC))
        found["loss"] = raises(lambda: risk().loss() if last else risk().gradient())
    with torch.no_grad():
        model[0].bias[0] += float(last)
    found["replicas"] = raises(lambda: risk().loss())
    with torch.no_grad():
        model[0].bias[0] -= float(last)
    found["empty"] = raises(lambda: risk([]).loss())
    found["afterwards"] = str(blocks(processes, "mlp", "EKFAC", "mc") < 1e-10)
    return found


def lonely(processes: Processes) -> str:
    """What is said when another process has ended."""
    if processes.rank == 1:
        os._exit(1)
    p = problem("mlp")
    return raises(lambda: curvature(p.risk(processes.share(p.data), processes=processes), KFAC))


def streams(processes: Processes, approximation: str, vectors: str, decay: float) -> dict[str, float]:
    """An estimator that is fed parts of each batch, in other numbers of micro-batches; and its state."""
    p, options = problem("mlp"), {"vectors": VECTORS[vectors], "decay": decay, "damping": 0.1}
    batches = [(X[:n], y[:n]) for n in (6, 5, 6) for X, y in [[torch.cat(t) for t in zip(*p.data, strict=True)]]]
    one = CurvatureEstimator(p.risk(()), APPROXIMATIONS[approximation], **options)
    several = CurvatureEstimator(p.risk((), processes=processes), APPROXIMATIONS[approximation], **options)
    found = {}

    def feed(batch: Any) -> None:
        one.update(batch)
        X, y = processes.share([batch])[0]
        # EKFAC's first basis is that of the first micro-batches: these have to be the same.
        size = 1 + processes.rank if several.updates else max(len(X), 1)
        for start in range(0, max(len(X), 1), size):
            several.update((X[start : start + size], y[start : start + size]), decay=1.0 if start else None)

    def compare(when: str) -> None:
        found[f"operator {when}"] = away(several.operator.to_dense(), one.operator.to_dense())
        found[f"inverse {when}"] = away(several.inverse().to_dense(), one.inverse().to_dense())

    for number, batch in enumerate(batches):
        feed(batch)
        if number == 1:
            one.refresh()
            several.refresh()
            compare("after a refresh")
    compare("at the end")
    state = several.state_dict()
    expected = one.state_dict()
    assert state["examples"] == expected["examples"]
    several = CurvatureEstimator(p.risk((), processes=processes), APPROXIMATIONS[approximation], **options)
    several.load_state_dict(state)
    compare("after loading")
    feed(batches[0])
    one.refresh()
    several.refresh()
    compare("going on")
    return found


def train(processes: Processes, options: dict[str, Any], wrapper: dict[str, Any], steps: int = 12) -> dict[str, Any]:
    """Training of a wrapped model on parts of batches, and of one that is alone on the whole batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    alone, loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    ddp = nn.parallel.DistributedDataParallel(model, process_group=processes.group, **wrapper)
    X, y = (
        torch.randn(steps, 6 * processes.world, 4, dtype=torch.float64),
        torch.randint(3, (steps, 6 * processes.world)),
    )
    one, several = KFACOptimizer(alone, loss, **options), KFACOptimizer(ddp, loss, **options)
    for step in range(steps):
        one.zero_grad()
        loss(alone(X[step]), y[step]).backward()
        one.step()
        several.zero_grad()
        mine = X[step][processes.rank :: processes.world], y[step][processes.rank :: processes.world]
        with ddp.no_sync():
            (loss(ddp(mine[0][:4]), mine[1][:4]) * 4 / 6).backward()
        (loss(ddp(mine[0][4:]), mine[1][4:]) * 2 / 6).backward()
        several.step()
    values = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, alone)]
    names = sorted(several.curvature.estimator.operator.mapping)
    return {"away": away(*values), "values": values[0].tolist(), "names": names}


def heard(processes: Processes, wrapper: dict[str, Any]) -> dict[str, float]:
    """`listen` leaves gradients of a wrapped model as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    plain, loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    wrapped, twin = (
        nn.parallel.DistributedDataParallel(m, process_group=processes.group, **wrapper) for m in (model, plain)
    )
    X, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    mine = X[processes.rank :: processes.world], y[processes.rank :: processes.world]
    found = {}
    one = CurvatureEstimator(EmpiricalRisk(copy.deepcopy(model), loss, ()), EKFAC)
    one.update((X, y))
    for given in (wrapped, model):
        estimator = CurvatureEstimator(EmpiricalRisk(given, loss, (), processes=processes), EKFAC)
        for module in (wrapped, twin):
            module.zero_grad()
        with estimator.listen(mine):
            value = loss(wrapped(mine[0]), mine[1])
        value.backward()
        loss(twin(mine[0]), mine[1]).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        found[type(given).__name__] = away(estimator.operator.to_dense(), one.operator.to_dense())
        assert sorted(estimator.operator.mapping) == ["0", "2"]
    return found


def half_way(processes: Processes, approximation: str, folder: str) -> bytes:
    """The state of an estimator after two batches, also in a checkpoint."""
    risk = problem("mlp").risk((), processes=processes)
    estimator = CurvatureEstimator(risk, APPROXIMATIONS[approximation], vectors="mc", decay=0.9)
    for batch in shifted(problem("mlp").data)[:1] * 2:
        estimator.update(processes.share([batch])[0])
    estimator.refresh(0.1)
    dcp.save({"curvature": Checkpoint(estimator)}, checkpoint_id=folder, process_group=processes.group)
    buffer = io.BytesIO()
    torch.save(estimator.state_dict(), buffer)
    return buffer.getvalue()


def second_half(processes: Processes, approximation: str, folder: str, state: bytes) -> dict[str, float]:
    """Go on from it, on any number of processes."""
    p, kind, found = problem("mlp"), APPROXIMATIONS[approximation], {}
    one = CurvatureEstimator(p.risk(()), kind, vectors="mc", decay=0.9)
    one.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
    batches = shifted(p.data)[:1] * 2
    for batch in batches:
        one.update(batch)
    for way in ("state", "checkpoint"):
        several = CurvatureEstimator(p.risk((), processes=processes), kind, vectors="mc", decay=0.9)
        if way == "state":
            several.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        else:
            state_of = {"curvature": Checkpoint(several)}
            dcp.load(state_of, checkpoint_id=folder, process_group=processes.group)
        for batch in batches:
            several.update(processes.share([batch])[0])
        found[way] = away(several.operator.to_dense(), one.operator.to_dense())
        found[f"{way}, inverse"] = away(several.inverse().to_dense(), one.inverse().to_dense())
    return found


def traffic(processes: Processes, approximation: str) -> tuple[int, int, int]:
    """Bytes of sums, of decompositions, and of all else in a sweep; and whether all have the same bits."""
    sent = {"sums": 0, "decompositions": 0, "else": 0}
    reduce, broadcast, gather = dist.all_reduce, dist.broadcast, dist.all_gather_object

    def counted(name: str, function: Any) -> Any:
        def call(t: Any, *args: Any, **options: Any) -> Any:
            kind = name if isinstance(t, torch.Tensor) and t.is_floating_point() else "else"
            sent[kind] += t.nbytes if isinstance(t, torch.Tensor) else len(pickle.dumps(args[0]))
            return function(t, *args, **options)

        return call

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 10))
    data = [(torch.randn(50, 20), torch.randint(10, (50,))) for _ in range(2)]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), processes.share(data), processes=processes)
    dist.all_reduce, dist.broadcast = counted("sums", reduce), counted("decompositions", broadcast)
    dist.all_gather_object = counted("else", gather)
    try:
        K = curvature(risk, APPROXIMATIONS[approximation], vectors="mc")
    finally:
        dist.all_reduce, dist.broadcast, dist.all_gather_object = reduce, broadcast, gather
    processes.same("bits", lambda: {"numbers": str((K @ torch.ones(K.shape[1])).tolist())})
    return sent["sums"], sent["decompositions"], sent["else"]


def refuses(processes: Processes) -> dict[str, str]:
    """Messages about what can't be done."""
    p = problem("mlp")
    risk = p.risk(processes.share(p.data), processes=processes)
    dataset = TensorDataset(torch.arange(7))
    sampler = DistributedSampler(dataset, processes.world, processes.rank)
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(p.model), process_group=processes.group)
    made = {
        "Jacobian": lambda: Jacobian(risk),
        "GGNFactor": lambda: GGNFactor(risk),
        "ActivationHessian": lambda: ActivationHessian(risk, ("0", "output", 0)),
        "sampler": lambda: processes.share(DataLoader(dataset, sampler=sampler)),
        "processes": lambda: p.risk(processes=processes.group),
        "wrapped": lambda: EmpiricalRisk(wrapped, p.loss, p.data),
    }
    found = {}
    for name, work in made.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", CurvatureWarning)
                work()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    EmpiricalRisk(wrapped, p.loss, p.data, processes=processes)
    return found


def figures(processes: Processes) -> dict[str, float]:
    """Time of an agreement, in seconds."""
    start = time.perf_counter()
    for _ in range(50):
        processes.together("nothing", lambda: None)
    return {"agreement": (time.perf_counter() - start) / 50}


def decompositions(processes: Processes, approximation: str) -> tuple[int, list[float]]:
    """How many this process computes of those that an inverse needs, and the result."""
    count, original = [0], torch.linalg.eigh

    def counted(M: Any) -> Any:
        count[0] += 1
        return original(M)

    p = problem("mlp")
    estimator = CurvatureEstimator(p.risk((), processes=processes), APPROXIMATIONS[approximation], damping=0.1)
    batch = processes.share(shifted(p.data)[:1])[0]
    torch.linalg.eigh = counted
    try:
        estimator.update(batch)
        count[0] = 0
        estimator.refresh()
    finally:
        torch.linalg.eigh = original
    return count[0], (estimator.inverse() @ torch.ones(43, dtype=torch.float64)).tolist()


def nets(processes: Processes, names: list[str]) -> dict[str, float]:
    """KFAC and EKFAC of other networks, some with layers that only some processes call."""
    return {f"{name} {kind}": blocks(processes, name, kind, "exact") for name in names for kind in ("KFAC", "EKFAC")}


def several_losses(processes: Processes, reduction: str) -> dict[str, float]:
    """Losses that are means over other numbers of terms in each batch."""
    torch.manual_seed(0)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h = torch.tanh(self.trunk(x))
            return {"a": self.a(h), "b": self.b(h)}

    model = Heads().double()
    weight = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    losses = {"a": nn.CrossEntropyLoss(weight, ignore_index=1, reduction=reduction), "b": (nn.MSELoss(), 0.5)}
    X, y = torch.randn(17, 4, dtype=torch.float64), torch.randint(3, (17,))
    data = [(x, {"a": a, "b": x[:, :2]}) for x, a in zip(X.split(5), y.split(5), strict=True)]
    one = EmpiricalRisk(model, losses, data)
    several = EmpiricalRisk(model, losses, processes.share(data), processes=processes)
    g, expected = (torch.cat([t.flatten() for t in risk.gradient().values()]) for risk in (several, one))
    found = {"loss": away(several.loss(), one.loss()), "gradient": away(g, expected)}
    for vectors in ("empirical", "mc", "exact"):
        ours, theirs = (curvature(risk, EKFAC, vectors=VECTORS[vectors]).to_dense() for risk in (several, one))
        found[f"EKFAC {vectors}"] = away(ours, theirs)
    found["GGN"] = away(GGN(several).to_dense(), GGN(one).to_dense())
    found["Hessian"] = away(Hessian(several).to_dense(), Hessian(one).to_dense())
    return found
