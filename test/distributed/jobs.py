"""What worker processes do: each function gets its processes and arguments, and returns something small."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cases import APPROXIMATIONS, VECTORS, problem, unchanged
from torch import nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureWarning,
    EmpiricalRisk,
    Hessian,
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
    options = {"vectors": sent, "max_kept_bytes": 0}
    one, several = curvature(p.risk(), kind, **options), curvature(shared, kind, **options)
    assert one.examples == several.examples
    return away(several.to_dense(), one.to_dense())


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
        found["product"] = raises(lambda: GGN(risk()) @ torch.ones(38, dtype=torch.float64))
        if handle is not None:
            handle.remove()
        nan = [(X * float("nan"), y) for X, y in mine] if last else mine
        found["nan"] = raises(lambda: curvature(risk(nan), EKFAC))
        found["loss"] = raises(lambda: risk().loss() if last else risk().gradient())
    with torch.no_grad():
        model[0].bias[0] += last
    found["replicas"] = raises(lambda: risk().loss())
    with torch.no_grad():
        model[0].bias[0] -= last
    found["empty"] = raises(lambda: risk([]).loss())
    found["afterwards"] = str(blocks(processes, "mlp", "EKFAC", "mc") < 1e-10)
    return found


def lonely(processes: Processes) -> str:
    """What is said when another process has ended."""
    if processes.rank == 1:
        os._exit(1)
    p = problem("mlp")
    return raises(lambda: curvature(p.risk(processes.share(p.data), processes=processes), KFAC))
