"""What worker processes do: each function gets its processes and arguments, and returns something small."""

from __future__ import annotations

import copy
import io
import os
import time
import traceback
import warnings
from collections.abc import Callable, Container
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import APPROXIMATIONS, VECTORS, problem, unchanged
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    ActivationHessian,
    BlockwiseLinearOperator,
    Checkpoint,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EKFACLinearOperator,
    EmpiricalRisk,
    Exact,
    GGNFactor,
    Hessian,
    HeuristicDamping,
    Jacobian,
    KFACLinearOperator,
    KFACOptimizer,
    MonteCarlo,
    NumericsError,
    ProcessError,
    Processes,
    RelativeDamping,
    ScaledIdentity,
    UnsupportedError,
    cg,
    curvature,
    estimate,
    load,
    save,
)
from curvlinops_plus.linalg import BlockDiagonal, Elsewhere, LinearOperator, Sum

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


def tensors_of(blocks: Any) -> int:
    """Bytes of all tensors of blocks, each counted once."""
    found: dict[int, int] = {}
    seen: set[int] = set()

    def look(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            found[node.untyped_storage().data_ptr()] = node.untyped_storage().nbytes()
        elif id(node) not in seen:
            seen.add(id(node))
            parts = node if isinstance(node, (list, tuple)) else node.values() if isinstance(node, dict) else []
            for part in [*parts, *(vars(node).values() if isinstance(node, LinearOperator) else [])]:
                look(part)

    look(dict(blocks))
    return sum(found.values())


def away(found: Any, expected: Any) -> float:
    """Relative difference."""
    found, expected = (torch.as_tensor(t).detach().double() for t in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).norm() / max(float(expected.norm()), 1e-12))


def by_one(processes: Processes, work: Callable[[], Any]) -> Any:
    """What the first process computes by itself, told to all."""
    found = [work() if processes.rank == 0 else None]
    dist.broadcast_object_list(found, 0, processes.group)
    return found[0]


def blocks(processes: Processes, name: str, approximation: str, vectors: str) -> float:
    """How far the matrix of several processes is from that of one."""
    p = problem(name)
    kind, sent = APPROXIMATIONS[approximation], VECTORS[vectors]
    shared = p.risk(processes.share(p.data), processes=processes)

    def alone() -> Any:
        K = curvature(p.risk(), kind, vectors=sent)
        return K.examples, K.to_dense().detach()

    (examples, one), found = by_one(processes, alone), 0.0
    for kept in (0, 2**26):  # of what layers receive in one sweep for the next
        several = curvature(shared, kind, vectors=sent, max_kept_bytes=kept)
        assert examples == several.examples
        found = max(found, away(several.to_dense(), one))
    return found


def owned(processes: Processes, name: str, approximation: str, options: dict[str, Any]) -> dict[str, float]:
    """How far everything that is said of blocks with owners is from what is said of those that all have."""
    p, kind = problem(name), APPROXIMATIONS[approximation]
    shared = p.risk(processes.share(p.data), processes=processes)
    several = curvature(shared, kind, owned=True, **options)
    whole = curvature(p.risk(), kind, **options)
    n = whole.shape[0]
    params = [*p.risk().params.values()]
    read = partial(BlockwiseLinearOperator.from_state_dict, model=p.model, data=p.data, params=params, loss=p.loss)
    v, V = (
        torch.linspace(-1, 1, n, dtype=torch.float64),
        torch.randn(n, 2, generator=torch.Generator().manual_seed(0)).double(),
    )
    found = {}

    def compare(what: str, numbers: Callable[[Any], Any]) -> None:
        found[what] = away(numbers(several), numbers(whole))

    def seed() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    for what, made in {
        "K": lambda K: K,
        "multiple": lambda K: 3 * K,
        "sum": lambda K: K + 2 * K,
        "inverse": lambda K: K.inverse(0.1),
        "inverse, relative": lambda K: K.inverse(RelativeDamping(0.3)),
        "inverse, heuristic": lambda K: (2 * K).inverse(HeuristicDamping(RelativeDamping(0.3))),
        "inverse, pair": lambda K: K.inverse((0.1, 0.2)),
        "inverse, per block": lambda K: K.inverse({name: 0.1 + k for k, name in enumerate(K.blocks)}),
        "power": lambda K: K.power(-0.5, 0.1),
        "shift": lambda K: K.shift(0.2),
    }.items():
        a, b = made(several), made(whole)
        found[f"{what} @ v"] = away(a @ v, b @ v)
        found[f"V @ {what}"] = away(V.T @ a, V.T @ b)
        for number in ("trace", "frobenius_norm"):
            found[f"{what} {number}"] = away(getattr(a, number), getattr(b, number))
        found[f"{what} diagonal"] = away(a.diagonal(), b.diagonal())
        if not isinstance(b, Sum):
            found[f"{what} sample"] = away(a.sample(seed(), 2), b.sample(seed(), 2))
        if not isinstance(b, Sum) and what != "inverse, pair":
            found[f"{what} eigenvalues"] = away(a.eigenvalues(), b.eigenvalues())
    compare("dense", lambda K: K.to_dense())
    compare("logdet", lambda K: K.shift(0.1).logdet)
    compare("det", lambda K: K.shift(0.1).det)
    compare("form", lambda K: K.quadratic_form(V.T))
    compare("part", lambda K: K[:5, :5].to_dense())
    compare("to", lambda K: K.to(torch.float32).to(torch.float64).to_dense().sign() * 0 + K.to_dense())
    compare("tree", lambda K: torch.cat([t.flatten() for t in (K @ p.risk().gradient()).values()]))
    compare("estimated", lambda K: estimate.xtrace(K, num_matvecs=10, generator=seed()))
    gathered = several.operator.gather(processes.world - 1)
    assert (gathered is None) == (processes.rank != processes.world - 1)
    if gathered is not None:
        found["gathered"] = away(gathered.to_dense(), whole.to_dense())
    found["loaded"] = away(read(several.state_dict()).to_dense(), whole.to_dense())
    inverse = BlockDiagonal.from_state_dict(several.inverse(0.1).state_dict())
    found["inverse, loaded"] = away(inverse.to_dense(), whole.inverse(0.1).to_dense())
    # Memory: blocks of all, the largest, and what this process has.
    sizes = [tensors_of({name: block}) for name, block in whole.blocks.items()]
    limit = tensors_of(whole.blocks) / processes.world + max(sizes)
    found["memory above the limit"] = max(0.0, tensors_of(several.operator.here) - limit)
    assert sorted(several.blocks) == sorted(whole.blocks)
    return found


class Twice(DiagonalBlock):
    """Reads the data once more, and does not say so before."""

    def finish(self) -> Any:
        return DiagonalBlock(self.layer, self.group, self.scale)


def classic(processes: Processes) -> tuple[dict[str, float], dict[str, str]]:
    """Operators with the names of curvlinops: with blocks kept apart, in groups, elsewhere, split; by two sweeps."""
    p, pieces = problem("mlp"), Processes(processes.group, shard="contiguous")
    params, away_from, said = list(p.model.parameters()), {}, {}
    v = torch.linspace(-1, 1, 43, dtype=torch.float64)
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        for more in ({}, {"separate_weight_and_bias": False, "split": 3}):
            one = kind(p.model, p.loss, params, p.data, **more)
            needs = max(layer.computing for layer in one.memory().layers.values())
            for options in ({}, {"owned": True}, {"owned": True, "max_bytes": needs, "offload": "cpu"}):
                K = kind(p.model, p.loss, params, pieces.share(p.data), processes=pieces, **options, **more)
                away_from[f"{kind.__name__} {more} {options}"] = away(K @ v, one @ v)
            names = ["input_covariances", "gradient_covariances"]
            if kind is EKFACLinearOperator:
                names = [*(f"{name}_eigenvectors" for name in names), "corrected_eigenvalues"]
            for name in names:
                for layer, expected in getattr(one, name).items():
                    try:
                        found = getattr(K, name)[layer]
                    except UnsupportedError as error:
                        said[name] = str(error)
                    else:  # the order of the eigenvectors of equal eigenvalues, and their signs, are any
                        assert type(found) is type(expected)
                        if name in KFAC_NAMES and isinstance(found, torch.Tensor):
                            away_from[f"{name} {layer} {more}"] = away(found, expected)
    one, K = (EKFACLinearOperator(p.model, p.loss, params, p.data) for _ in range(2))
    K = EKFACLinearOperator(p.model, p.loss, params, pieces.share(p.data), processes=pieces)
    K.compute_kronecker_factors()
    away_from["at first use"] = away(K @ v, one @ v)
    K.compute_eigenvalue_correction()
    away_from["eigenvalues again"] = away(K @ v, one @ v)
    apart = EKFACLinearOperator(p.model, p.loss, params, pieces.share(p.data), processes=pieces, owned=True)
    groups = EKFACLinearOperator(p.model, p.loss, params, p.data, max_bytes=10000)
    for name, work in {
        "apart": apart.compute_eigenvalue_correction,
        "groups": groups.compute_kronecker_factors,
    }.items():
        try:
            work()
        except UnsupportedError as error:
            said[name] = str(error)
    return away_from, said


KFAC_NAMES = ("input_covariances", "gradient_covariances")


def owned_failures(processes: Processes) -> dict[str, str]:
    """What is said where blocks are kept apart."""
    p = problem("mlp")
    risk = p.risk(processes.share(p.data), processes=processes)
    K = curvature(risk, KFAC, owned=True)
    other = next(block for block in K.blocks.values() if isinstance(block, Elsewhere))
    v = torch.ones(43, dtype=torch.float64)
    singular = curvature(risk, {"2": ScaledIdentity.using(scale=0.0)}, default=KFAC, owned=True)
    found = {
        "label": repr(other),
        "vector": raises(lambda: K @ (v * (1 + processes.rank))),
        "sign": raises(lambda: K @ (v if processes.rank else -v)),
        "singular": raises(lambda: singular.inverse()),
        "derivative": raises(lambda: K @ v.clone().requires_grad_()),
        "damping": raises(lambda: K.shift(torch.ones((), dtype=torch.float64, requires_grad=True)).logdet),
        "sweeps": raises(lambda: curvature(risk, Twice, owned=True)),
        "folder": raises(lambda: save(K, "nowhere/at/all", sharded=True)),
        "different": raises(lambda: K @ v if processes.rank else K.trace),
    }
    for name, work in {
        "block": lambda: other @ torch.ones(other.shape[0], dtype=torch.float64),
        "number": lambda: other.trace,
        "rank": lambda: K.operator.gather(17),
        "not owned": lambda: save(curvature(risk, KFAC), "K", sharded=True),
    }.items():
        try:
            work()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["afterwards"] = str(away(K @ v, curvature(risk, KFAC) @ v) < 1e-10)
    return found


def saved(processes: Processes, approximation: str, folder: str) -> float:
    """Save blocks with owners, each process its own, in a file and in a checkpoint; and all in one file."""
    p = problem("strided cnn")
    risk = p.risk(processes.share(p.data), processes=processes)
    K = 2 * curvature(risk, APPROXIMATIONS[approximation], owned=True)
    save(K, f"{folder}/parts.safetensors", sharded=True)
    save(K.inverse(0.1), f"{folder}/inverse.safetensors", sharded=True)
    save(K, f"{folder}/one.safetensors")
    dcp.save({"K": Checkpoint(K)}, checkpoint_id=f"{folder}/checkpoint", process_group=processes.group)
    return float(K.trace)


def restored(processes: Processes, approximation: str, folder: str) -> dict[str, Any]:
    """Load them on another number of processes."""
    p, found = problem("strided cnn"), {}
    whole = 2 * curvature(p.risk(), APPROXIMATIONS[approximation])
    params = [*p.risk().params.values()]
    for owned in (False, True):
        options: dict[str, Any] = {"params": params, "loss": p.loss, "owned": owned, "processes": processes}
        for name in ("parts", "one"):
            state = load(f"{folder}/{name}.safetensors")
            K = BlockwiseLinearOperator.from_state_dict(state, p.model, p.data, **options)
            found[f"{name} {owned}"] = away(K.to_dense(), whole.to_dense())
        risk = p.risk(processes.share(p.data), processes=processes)
        K = BlockwiseLinearOperator(risk, APPROXIMATIONS[approximation], owned=owned, compute=False)
        dcp.load({"K": Checkpoint(K)}, checkpoint_id=f"{folder}/checkpoint", process_group=processes.group)
        found[f"checkpoint {owned}"] = away(K.to_dense(), whole.to_dense())
        kept = K.operator.here if owned else K.blocks
        assert owned is False or processes.world == 1 or len(kept) < len(whole.blocks)
    inverse = BlockDiagonal.from_state_dict(load(f"{folder}/inverse.safetensors"))
    found["inverse"] = away(inverse.to_dense(), whole.inverse(0.1).to_dense())
    return found


class Shared(nn.Module):
    """Three layers that read one tensor, in most batches."""

    def __init__(self, sizes: Container[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.a, self.b, self.c, self.d = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x * 1.0 if len(x) in self.sizes else x
        return self.c(self.a(x).tanh() * self.b(other) + self.d(x))


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


def apart(processes: Processes, sizes: tuple[int, ...], examples: int, folder: str) -> dict[str, float]:
    """The same of blocks with owners, also offloaded and saved, beside one process whose layers share nothing."""
    torch.manual_seed(0)
    model, alone = Shared(sizes).double(), Shared(range(100)).double()
    alone.load_state_dict(model.state_dict())
    X, y = torch.randn(examples, 4).double(), torch.randint(3, (examples,))
    data, loss, path = list(zip(X.split(6), y.split(6), strict=True)), nn.CrossEntropyLoss(), f"{folder}/K.safetensors"
    shared = EmpiricalRisk(model, loss, processes.share(data), processes=processes)
    read = partial(BlockwiseLinearOperator.from_state_dict, model=model, data=data, loss=loss, processes=processes)
    found: dict[str, float] = {}
    for kind in (KFAC, EKFAC, KFAC.using(split=2), EKFAC.using(kfac_approx="reduce", split=3)):
        one = curvature(EmpiricalRisk(alone, loss, data), kind)
        needs = one.memory()
        limit = max(layer.computing for layer in needs.layers.values())
        choices: list[dict[str, Any]] = [
            {},
            {"max_bytes": limit, "max_kept_bytes": 0, "offload": "disk:" + folder},
            {"max_bytes": needs.computing, "offload": "cpu"},
        ]
        for number, options in enumerate(choices):
            several, what = curvature(shared, kind, owned=True, **options), f"{kind} {number}"
            assert several.memory() == needs
            for name, K in {what: several, f"{what}, elsewhere": several.offload("disk:" + folder)}.items():
                found[name] = away(K.to_dense(), one.to_dense())
                found[f"{name}, inverse"] = away((2 * K).inverse(0.1).to_dense(), (2 * one).inverse(0.1).to_dense())
                pairs = [A.inverse(HeuristicDamping(0.1)) for A in (K, one)]
                found[f"{name}, damped factors"] = away(*(A.to_dense() for A in pairs))
                found[f"{name}, logdet"] = away(K.shift(0.1).logdet, one.shift(0.1).logdet)
            save(several, path, sharded=True)
            loaded = [read(load(path), owned=owned) for owned in (False, True)]
            save(loaded[1], path, sharded=True)  # over the files that its blocks are read from
            found |= {f"{what}, loaded {k}": away(K.to_dense(), one.to_dense()) for k, K in enumerate(loaded)}
            if kind is KFAC and number == 0 and not sizes and examples > processes.world:
                here: dict[str, Any] = several.operator.here
                assert len({id(here[name].A) for name in "abd" if name in here}) <= 1
    return found


def apart_refusals(processes: Processes) -> dict[str, str]:
    """What does not fit, of blocks with owners: the same in all processes."""
    p = problem("mlp")
    risk = p.risk(processes.share(p.data), processes=processes)
    K = curvature(risk, {"0": EKFAC}, default=KFAC, owned=True)
    trace = K.offload(dtype=torch.bfloat16).trace  # only one of them has eigenvectors
    return {
        "few eigenvectors": f"{away(trace, K.trace):.1e}",
        "no eigenvectors": raises(lambda: curvature(risk, KFAC, owned=True).offload(dtype=torch.bfloat16)),
        "no place": raises(lambda: K.offload("disk:nowhere/at/all" if processes.rank == 0 else "cpu")),
        "one layer": raises(lambda: curvature(risk, KFAC, owned=True, max_bytes=300)),
        "afterwards": str(away(K.to_dense(), curvature(risk, {"0": EKFAC}, default=KFAC).to_dense()) < 1e-10),
    }


def shifted(batches: list[Any]) -> list[Any]:
    """Batches of other sizes, with the same examples in the same order."""
    X, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return list(zip(X.split(4), y.split(4), strict=True))


def contiguous(processes: Processes) -> dict[str, float]:
    """Random vectors of pieces of the data, in lists and loaders; and of parts of any sizes."""
    p, found = problem("mlp"), {}
    pieces = Processes(processes.group, shard="contiguous")
    X, y = (torch.cat(parts) for parts in zip(*p.data, strict=True))
    start, stop = (max(0, len(X) * k // pieces.world - 2 * (k < pieces.world)) for k in (pieces.rank, pieces.rank + 1))
    forms = {
        "list": pieces.share(shifted(p.data)),
        "loader": pieces.share(DataLoader(TensorDataset(X, y), batch_size=4)),
        "own": [(X[start:stop], y[start:stop])],
    }
    assert sum(processes.gather("sizes", sum(len(x) for x, _ in forms["list"]))) == len(X)
    for name, data in forms.items():
        for sent in ("mc", "signs"):
            one = curvature(p.risk(), EKFAC, vectors=VECTORS[sent])
            several = curvature(p.risk(data, processes=pieces), EKFAC, vectors=VECTORS[sent])
            found[f"{name} {sent}"] = away(several.to_dense(), one.to_dense())
            one, several = (GGN(risk, VECTORS[sent]) for risk in (p.risk(), p.risk(data, processes=pieces)))
            found[f"{name} GGN {sent}"] = away(several.to_dense(), one.to_dense())
    return found


def unnumbered(processes: Processes) -> list[str]:
    """What is said where the numbers of examples are not known; and that they are not needed otherwise."""
    p, pieces = problem("mlp"), Processes(processes.group, shard="contiguous")

    class Stream:
        def __iter__(self) -> Any:
            return iter(pieces.share(p.data))

    risk = p.risk(Stream(), processes=pieces)
    assert away(curvature(risk, EKFAC).to_dense(), curvature(p.risk(), EKFAC).to_dense()) < 1e-10
    estimator = CurvatureEstimator(p.risk((), processes=pieces), KFAC, vectors="mc")
    found = [raises(lambda: curvature(risk, KFAC, vectors="mc"))]
    try:
        estimator.update(p.data[0])
    except NotImplementedError as error:
        found.append(str(error))
    return found


def vectors(processes: Processes, name: str) -> dict[str, float]:
    """The same for all vectors, and exact operators."""
    p, found = problem(name), {}
    for sent in VECTORS:
        found[f"KFAC {sent}"] = blocks(processes, name, "KFAC", sent)
        if sent != "forward only":
            found[f"EKFAC {sent}"] = blocks(processes, name, "EKFAC", sent)
            shared = p.risk(processes.share(shifted(p.data)), processes=processes)
            one = by_one(processes, lambda sent=sent: GGN(p.risk(), VECTORS[sent]).to_dense())
            found[f"GGN {sent}"] = away(GGN(shared, VECTORS[sent]).to_dense(), one)
    return found


def exact(processes: Processes, name: str) -> dict[str, float]:
    """Loss, gradient, GGN and Hessian."""
    p = problem(name)
    one, several = p.risk(), p.risk(processes.share(p.data), processes=processes)
    v = torch.linspace(-1, 1, one.space.dim, dtype=torch.float64)
    alone = by_one(processes, lambda: (one.loss(), one.gradient(), [kind(one) @ v for kind in (GGN, Hessian)]))
    loss, gradient, products = alone
    found = {"loss": away(several.loss(), loss)}
    g, expected = (torch.cat([t.flatten() for t in each.values()]) for each in (several.gradient(), gradient))
    found["gradient"] = away(g, expected)
    for kind, product in zip((GGN, Hessian), products, strict=True):
        for check in (None, True):
            found[f"{kind.__name__} {check}"] = away(kind(several, check_deterministic=check) @ v, product)
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


def late_reads(processes: Processes, approximation: str) -> dict[str, float]:
    """Functions read parameters, and the second process has no examples to see it from in the first step."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.places, self.head = nn.Linear(3, 4), nn.Embedding(2, 4), nn.Linear(8, 3)
            self.g = nn.Parameter(torch.rand(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((torch.tanh(self.body(x) + self.places(torch.arange(2))) * self.g).flatten(1))

    torch.manual_seed(0)
    model, loss = Positions().double(), nn.CrossEntropyLoss()
    batches = [(torch.randn(n, 2, 3, dtype=torch.float64), torch.randint(3, (n,))) for n in (5, 10, 10)]
    one, several = (
        CurvatureEstimator(EmpiricalRisk(model, loss, (), **options), APPROXIMATIONS[approximation], decay=0.9)
        for options in ({}, {"processes": processes})
    )
    found = {}
    for number, (X, y) in enumerate(batches):
        one.update((X, y))
        mine = slice(5) if processes.rank == 0 else slice(5, None)
        several.update((X[mine], y[mine]))
        found[f"step {number}"] = away(several.operator.to_dense(), one.operator.to_dense())
    return found


def late_terms(processes: Processes, approximation: str, reduction: str) -> dict[str, float]:
    """An estimator whose first batches have no examples, or no targets that count, in any process."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), nn.CrossEntropyLoss(reduction=reduction)
    model, rank, found = model.double(), processes.rank, {}
    X, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    none = torch.full_like(y, -100)
    risks = EmpiricalRisk(model, loss, ()), EmpiricalRisk(model, loss, (), processes=processes)
    options = {"vectors": VECTORS["exact"], "damping": 0.1}
    one, several = (CurvatureEstimator(risk, APPROXIMATIONS[approximation], **options) for risk in risks)
    several.update((X[:0], y[:0]))
    # The second process alone has targets that count, then all have.
    for first, targets in ((1.0, none), (1.0, torch.where(torch.arange(6) % processes.world == 1, y, none)), (None, y)):
        one.update((X, targets), decay=first)
        part = slice(rank, None, processes.world)
        several.update((X[part], targets[part]), decay=first)
        if reduction == "sum" or not targets.equal(none):
            found[f"{len(found)}"] = away(several.operator.to_dense(), one.operator.to_dense())
    one.refresh()
    several.refresh()
    return found | {"inverse": away(several.inverse().to_dense(), one.inverse().to_dense())}


class Attends(nn.Module):
    """Attention, behind a layer of which one input is always 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(5, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(torch.cat([x[..., :4], 0 * x[..., :1]], -1))
        return self.last(self.attention(h, h, h, need_weights=False)[0].mean(1))


def degenerate(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network whose factors have large null spaces or repeated eigenvalues, and the shape of an example."""
    torch.manual_seed(0)
    if name == "attention":
        return Attends().double(), (2, 5)
    model = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    if name == "dead units":
        nn.init.constant_(model[0].bias[:3], -100)
    if name == "equal outputs":
        nn.init.zeros_(model[4].weight)
        nn.init.zeros_(model[4].bias)
    return model, (9,)


def few_rows(processes: Processes, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """EKFAC, whose bases come from batches of fewer rows than columns, in an estimator and in training."""
    (model, shape), loss, steps = degenerate(name), nn.CrossEntropyLoss(), 12
    X, y = torch.randn(steps, 4, *shape, dtype=torch.float64), torch.randint(3, (steps, 4))
    batches = [*zip(X, y, strict=True)]
    risks = [EmpiricalRisk(model, loss, (), processes=each) for each in (None, processes)]
    one, several = (CurvatureEstimator(risk, EKFAC, default=EKFAC, decay=0.9, vectors=Exact()) for risk in risks)
    found = {}
    for k, batch in enumerate(batches):
        one.update(batch)
        several.update(processes.share([batch])[0])
        if k % 5 == 3:
            one.refresh(0.1)
            several.refresh(0.1)
            found[f"operator {k}"] = away(several.operator.to_dense(), one.operator.to_dense())
            found[f"inverse {k}"] = away(several.inverse().to_dense(), one.inverse().to_dense())
    alone = copy.deepcopy(model)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=processes.group)
    options = {"approximation": EKFAC, "default": EKFAC, "lr": 0.1, "inverse_every": 3} | options
    for each, mine in ((alone, batches), (ddp, [processes.share([batch])[0] for batch in batches])):
        optimizer = KFACOptimizer(each, loss, **options)
        for x, t in mine:
            optimizer.zero_grad()
            (loss(each(x), t) * len(x) / 4 * (1 if each is alone else processes.world)).backward()
            optimizer.step()
    values = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, alone)]
    return {"trained": away(*values)} | found


class Routed(nn.Module):
    """A trunk, and one head for each batch, which its first entry names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(3, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[int(x[0, 0])](self.trunk(x).tanh())


def routed(heads: list[int | None]) -> list[Any]:
    """A batch for each head; one without examples for None."""
    found = []
    for k, head in enumerate(heads):
        X = torch.randn(0 if head is None else 2 + k, 3, dtype=torch.float64)
        X[:, 0] = head or 0
        found.append((X, torch.randn(len(X), 2, dtype=torch.float64)))
    return found


def routes(processes: Processes, approximation: str, decay: float, settled: bool) -> dict[str, Any]:
    """An estimator whose processes call other layers in the same step, and one that is alone."""
    torch.manual_seed(0)
    model, loss, rank = Routed().double(), nn.MSELoss(), processes.rank
    options = {"decay": decay, "vectors": VECTORS["exact"], "leave_out_uncalled": True}
    kind = APPROXIMATIONS[approximation]
    one = CurvatureEstimator(EmpiricalRisk(model, loss, ()), kind, **options)
    several = CurvatureEstimator(EmpiricalRisk(model, loss, (), processes=processes), kind, **options)
    for heads in ([0, 1], [0, 0], [2, 1], [None, 0], [1, 2], [1, None]):
        parts = routed(heads)
        first = None
        for X, y in parts:
            if len(X):
                one.update((X, y), decay=first)
                first = 1.0
        several.update(parts[rank])
        if settled:
            several.settle()
    if not settled and decay < 1:
        return {"said": raises(lambda: several.operator)}
    found = {"operator": away(several.operator.to_dense(), one.operator.to_dense())}
    state = several.state_dict()
    several = CurvatureEstimator(EmpiricalRisk(model, loss, (), processes=processes), kind, **options)
    several.load_state_dict(state)
    for heads in ([0, 2], [1, 1]):
        for k, (X, y) in enumerate(parts := routed(heads)):
            one.update((X, y), decay=1.0 if k else None)
        several.update(parts[rank])
        several.settle()
    return found | {"going on": away(several.operator.to_dense(), one.operator.to_dense())}


def routed_training(processes: Processes) -> dict[str, float]:
    """Training of a model whose processes call other layers."""
    torch.manual_seed(0)
    model, loss, rank = Routed().double(), nn.MSELoss(), processes.rank
    alone = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 0.1, "inverse_every": 3, "vectors": VECTORS["exact"]}
    ddp = nn.parallel.DistributedDataParallel(model, process_group=processes.group, find_unused_parameters=True)
    one, several = KFACOptimizer(alone, loss, **options), KFACOptimizer(ddp, loss, **options)
    for heads in ([0, 1], [0, 0], [2, 1], [1, 0], [1, 1], [1, 2], [0, 0]):
        parts, count = routed(heads), 5
        one.zero_grad()
        for X, y in parts:
            (loss(alone(X), y) * len(X) / count).backward()
        one.step()
        several.zero_grad()
        X, y = parts[rank]
        (loss(ddp(X), y) * len(X) / count * 2).backward()
        for k, head in enumerate(model.heads):  # parameters that are used nowhere have no gradient, as with one process
            if k not in heads:
                head.zero_grad()
        several.step()
    values = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, alone)]
    operators = [each.curvature.estimator.operator.to_dense() for each in (several, one)]
    return {"values": away(*values), "curvature": away(*operators)}


def train(
    processes: Processes, options: dict[str, Any], wrapper: dict[str, Any], more: int = 0, reduction: str = "mean"
) -> dict[str, Any]:
    """Training of a wrapped model on parts of batches, and of one that is alone on the whole batches.

    The numbers of the losses make the mean of all gradients that of the whole, also where some parts have one example
    `more`, and other numbers of micro-batches.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    alone, loss = copy.deepcopy(model), nn.CrossEntropyLoss(reduction=reduction)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=processes.group, **wrapper)
    steps, N = 12, 6 * processes.world + more
    X, y = torch.randn(steps, N, 4, dtype=torch.float64), torch.randint(3, (steps, N))
    check = options.pop("check_loss", False)
    one, several = KFACOptimizer(alone, loss, **options), KFACOptimizer(ddp, loss, **options)
    one.check_loss = several.check_loss = check
    for step in range(steps):
        one.zero_grad()
        value = loss(alone(X[step]), y[step])
        value.backward()
        one.step(lambda value=value: value)
        several.zero_grad()
        mine = X[step][processes.rank :: processes.world], y[step][processes.rank :: processes.world]
        micro, value = [*zip(mine[0].split(4), mine[1].split(4), strict=True)], 0.0
        micro = micro if processes.rank or not more else [mine]
        for k, (x, t) in enumerate(micro):
            with ddp.no_sync() if k < len(micro) - 1 else nullcontext():
                part = loss(ddp(x), t) * processes.world * (len(x) / N if reduction == "mean" else 1)
                part.backward()
                value = value + part.detach()
        several.step(lambda value=value: value)
    values = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, alone)]
    operator = several.curvature.estimator.operator
    names = [*operator.mapping, *operator.in_space.names]
    # The state fits a model without a wrapper.
    plain = copy.deepcopy(model)
    resumed = KFACOptimizer(plain, loss, **options)
    resumed.load_state_dict(several.state_dict())
    for m, optimizer in ((plain, resumed), (alone, one)):
        optimizer.zero_grad()
        value = loss(m(X[0]), y[0])
        value.backward()
        optimizer.step(lambda value=value: value)
    on = away(*(torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (plain, alone)))
    return {"away": max(away(*values), on), "values": values[0].tolist(), "names": names}


def diverging(processes: Processes, options: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """Training in which one process meets a batch with NaN: what was said of each step, and the parameters."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), nn.CrossEntropyLoss()
    ddp = nn.parallel.DistributedDataParallel(model, process_group=processes.group)
    optimizer, said = KFACOptimizer(ddp, loss, **options), []
    for step in range(8):
        batch = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
        X, y = processes.share([batch])[0]
        optimizer.zero_grad()
        loss(ddp(X * float("nan") if step == 3 and processes.rank == 1 else X), y).backward()
        try:
            optimizer.step()
            said.append(optimizer.last_step.rejected)
        except NumericsError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


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


def traffic(processes: Processes, approximation: str, apart: bool = False, depth: int = 0) -> tuple[int, int, int, int]:
    """Bytes of sums, of decompositions, of sums for one, and of all else; and whether all have the same bits."""
    sent = {"sums": 0, "decompositions": 0, "to one": 0, "else": 0}
    reduce, broadcast, gather, to_one = dist.all_reduce, dist.broadcast, dist.all_gather, dist.reduce

    def counted(name: str, function: Any) -> Any:
        def call(t: Any, *args: Any, **options: Any) -> Any:
            kind = name if isinstance(t, torch.Tensor) and t.is_floating_point() else "else"
            sent[kind] += t.nbytes if isinstance(t, torch.Tensor) else args[0].nbytes
            return function(t, *args, **options)

        return call

    torch.manual_seed(0)
    layers, norms = (nn.Linear(20, 30), nn.Linear(30, 30), nn.Linear(30, 10)), [nn.LayerNorm(30) for _ in range(depth)]
    model = nn.Sequential(layers[0], nn.ReLU(), *norms, layers[1], nn.ReLU(), layers[2])
    params = [p for layer in layers for p in layer.parameters()]
    data = [(torch.randn(50, 20), torch.randint(10, (50,))) for _ in range(2)]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), processes.share(data), params, processes=processes)
    dist.all_reduce, dist.broadcast = counted("sums", reduce), counted("decompositions", broadcast)
    dist.all_gather, dist.reduce = counted("else", gather), counted("to one", to_one)
    try:
        K = curvature(risk, APPROXIMATIONS[approximation], vectors="mc", owned=apart)
    finally:
        dist.all_reduce, dist.broadcast, dist.all_gather, dist.reduce = reduce, broadcast, gather, to_one
    processes.same("bits", lambda: {"numbers": str((K @ torch.ones(K.shape[1])).tolist())})
    return sent["sums"], sent["decompositions"], sent["to one"], sent["else"]


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


def owned_nets(processes: Processes, names: list[str]) -> dict[str, float]:
    """The same of other networks, also with a block for each parameter."""
    found = {}
    for name in names:
        for kind, separate in (("KFAC", True), ("EKFAC", False), ("FullBlock", True)):
            options = {"separate_weight_and_bias": separate, "vectors": "empirical"}
            every = owned(processes, name, kind, options)
            found |= {f"{name} {kind} {separate} {what}": number for what, number in every.items()}
    return found


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


class Sharded(nn.Module):
    """Layers of several kinds, one of them frozen, and a module that others are inside of."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 5, bias=False), nn.ReLU()))
        self.head = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.norm(torch.tanh(self.frozen(x)))))


def pair(processes: Processes, made: Callable[[], nn.Module] = Sharded) -> tuple[nn.Module, nn.Module]:
    """A model of which each process has parts, and the same as a whole."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = made().double()
    model = copy.deepcopy(plain)
    mesh = DeviceMesh.from_group(processes.group, "cpu")
    for module in (getattr(model, "inner", None), getattr(model, "head", None), model):
        if module is not None:
            fully_shard(module, mesh=mesh)
    return model, plain


def fully_sharded(processes: Processes, examples: int) -> dict[str, float]:
    """Everything of a model that `fully_shard` has spread, with parts of the data of other sizes, or empty."""
    model, plain = pair(processes)
    X, y = torch.randn(examples, 4, dtype=torch.float64), torch.randint(3, (examples,))
    data, loss = [(X[:3], y[:3]), (X[3:], y[3:])], nn.CrossEntropyLoss()
    mine = [(x[k : k + 1], t[k : k + 1]) for x, t in processes.share(data) for k in range(len(x))]  # batches of one
    if not torch.__version__.startswith("2.6"):  # whose fully_shard runs on GPUs only
        with torch.no_grad():
            model(X)  # after which it keeps some gathered parameters
    hooks = [dict(table) for m in model.modules() for table in (m._forward_pre_hooks, m._forward_hooks)]
    several, one = EmpiricalRisk(model, loss, mine, processes=processes), EmpiricalRisk(plain, loss, data)
    v = torch.linspace(-1, 1, one.space.dim, dtype=torch.float64)
    gradient, expected = several.gradient(), one.gradient()
    found = {"loss": away(several.loss(), one.loss())}
    found |= {f"gradient {key}": away(g, expected[key]) for key, g in gradient.items()}
    for kind in (GGN, Hessian):
        found[kind.__name__] = away(kind(several) @ v, kind(one) @ v)
    for name in ("KFAC", "EKFAC", "FullBlock"):
        needs = curvature(several, APPROXIMATIONS[name], compute=False).memory()
        assert needs == curvature(one, APPROXIMATIONS[name], compute=False).memory()
        limit = max(layer.computing for layer in needs.layers.values())
        for options in ({}, {"vectors": "mc"}, {"owned": True}, {"owned": True, "max_bytes": limit, "offload": "cpu"}):
            K, L = (curvature(r, APPROXIMATIONS[name], **options) for r in (several, one))
            found[f"{name} {options}"] = away(K.to_dense(), L.to_dense())
    mine = mine or data[:1]  # of which each process looks at some by itself
    curvature(several.with_data(mine), KFAC).verify()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CurvatureWarning)  # parameters are those that the state is of
        read = BlockwiseLinearOperator.from_state_dict(K.state_dict(), plain, data, loss=loss)
    found["loaded"] = away(read.to_dense(), L.to_dense())
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    after = [dict(table) for m in model.modules() for table in (m._forward_pre_hooks, m._forward_hooks)]
    assert [list(table.items()) for table in after] == [list(table.items()) for table in hooks]
    return found


def spread_vectors(processes: Processes) -> dict[str, float]:
    """Products with vectors of which each process has parts."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    K, mesh = curvature(problem("mlp").risk(), KFAC), DeviceMesh.from_group(processes.group, "cpu")
    torch.manual_seed(0)
    v, V = torch.randn(43, dtype=torch.float64), torch.randn(43, 4, dtype=torch.float64)
    found = {}
    for place in (Shard(0), Replicate()):
        for name, given, work in (
            ("v", v, lambda x: K @ x),
            ("V", V, lambda x: K @ x),
            ("rows", V.T.contiguous(), lambda x: x @ K),
            ("tree", K.in_space.unflatten(v), lambda x: K @ x),
            ("trees", K.in_space.unflatten(V), lambda x: K @ x),
            ("rows of trees", K.in_space.unflatten_rows(V.T), lambda x: x @ K),
        ):
            if isinstance(given, dict):
                spread = {key: distribute_tensor(t, mesh, [place]) for key, t in given.items()}
                pairs = [(work(spread)[key], t) for key, t in work(given).items()]
            else:
                pairs = [(work(distribute_tensor(given, mesh, [place])), work(given))]
            for d, t in pairs:
                assert type(d).__name__ == "DTensor"
                found[f"{name} {place}"] = away(d.full_tensor(), t)
    return found


def sharded_training(processes: Processes) -> dict[str, float]:
    """Listening to a sharded model while it is trained; its gradients are untouched, and directions are sharded."""
    (model, plain), loss, found = pair(processes), nn.CrossEntropyLoss(), {}
    twin, _ = pair(processes)
    several = CurvatureEstimator(EmpiricalRisk(model, loss, (), processes=processes), KFAC, decay=0.9)
    one = CurvatureEstimator(EmpiricalRisk(plain, loss, ()), KFAC, decay=0.9)
    for step in range(3):
        X, y = torch.randn(4 * processes.world, 4, dtype=torch.float64), torch.randint(3, (4 * processes.world,))
        mine = processes.share([(X, y)])[0]
        for m in (model, twin, plain):
            m.zero_grad()
        if step == 1:  # while the model has gathered parameters
            value = loss(model(mine[0]), mine[1])
            several.update(mine)
        else:
            with several.listen(mine):
                value = loss(model(mine[0]), mine[1])
        value.backward()
        loss(twin(mine[0]), mine[1]).backward()
        one.update((X, y))
        loss(plain(X), y).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is None or torch.equal(p.grad.to_local(), q.grad.to_local())
        several.refresh(0.1)
        one.refresh(0.1)
        found[f"operator {step}"] = away(several.operator.to_dense(), one.operator.to_dense())
        ours, theirs = (
            inverse @ {key: p.grad for key, p in m.named_parameters() if p.requires_grad}
            for m, inverse in ((model, several.inverse()), (plain, one.inverse()))
        )
        with torch.no_grad():
            for m, ds in ((model, ours), (twin, ours), (plain, theirs)):
                for key, p in m.named_parameters():
                    if key in ds:
                        p -= 0.1 * ds[key]
        for key, d in ours.items():
            assert d.placements == dict(model.named_parameters())[key].placements
            found[f"direction {step} {key}"] = away(d.full_tensor(), theirs[key])
    return found


def sharded_refusals(processes: Processes) -> dict[str, str]:
    """What can't be done with spread parameters."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, _ = pair(processes)
    loss, p = nn.CrossEntropyLoss(), problem("mlp")
    mesh = DeviceMesh.from_group(processes.group, "cpu")
    tensor_parallel = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    parallelize_module(tensor_parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = {}
    estimator = CurvatureEstimator(EmpiricalRisk(model, loss, (), processes=processes), KFAC)
    for name, work in {
        "alone": lambda: EmpiricalRisk(model, loss, p.data),
        "optimizer": lambda: KFACOptimizer(model, loss, lr=0.1),
        "begin": lambda: estimator.begin(p.data[0][0]),
        "tensor parallel": lambda: EmpiricalRisk(tensor_parallel, loss, p.data, processes=processes),
        "tensor parallel, alone": lambda: curvature(EmpiricalRisk(tensor_parallel, loss, p.data), KFAC),
        "tensor parallel, optimizer": lambda: KFACOptimizer(tensor_parallel, loss, lr=0.1),
        "tensor parallel, classic": lambda: KFACLinearOperator(
            tensor_parallel, loss, list(tensor_parallel.parameters()), p.data
        ),
        "tensor parallel, one bias": lambda: GGN(
            EmpiricalRisk(tensor_parallel, loss, p.data, [tensor_parallel[2].bias])
        ),
    }.items():
        try:
            work()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def normalised(processes: Processes) -> tuple[nn.Module, list[Any]]:
    """A network with statistics, and attributes of its own, and the part of some data."""
    torch.manual_seed(0)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.rank = 2.0, processes.rank
            self.register_buffer("far", torch.tensor([0.0, float("-inf"), 1.0]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last, self.mean = x.detach(), float(x.detach().mean())  # of these examples
            return x * self.factor

    layers = (nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), Scale(), nn.MultiheadAttention(4, 2), nn.Linear(5, 3))
    model = nn.Sequential(*layers).double().eval()
    model.forward = lambda x: layers[5](layers[3](layers[2](layers[1](layers[0](x)))))
    data = [(torch.randn(4, 4, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(3)]
    return model, processes.share(data)


def said(work: Callable[[], object]) -> str:
    """A number, or the error."""
    try:
        return f"{float(torch.as_tensor(work()).norm()):.12e}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def differing(processes: Processes) -> dict[str, str]:
    """What is said of networks, losses and options that differ in the last process."""
    last, found = processes.rank == processes.world - 1, {}

    def case(
        name: str,
        change: Callable[[nn.Sequential], object] = lambda model: None,
        loss: Callable[[], Any] = nn.CrossEntropyLoss,
        **options: Any,
    ) -> None:
        model, data = normalised(processes)
        with torch.no_grad():
            if last:
                change(model)  # type: ignore[arg-type]
        params = [*model[0].parameters(), *model[1].parameters()] if name == "rest" else None
        used = params or [p for k in (0, 1, 5) for p in model[k].parameters()]  # type: ignore[index]
        risk = EmpiricalRisk(model, loss(), data, used, processes=processes, **options)
        found[name] = said(lambda: curvature(risk, DiagonalBlock).trace)

    def rows(model: nn.Sequential) -> None:
        model[0].weight.copy_(model[0].weight.flip(0))

    case("same")
    case("statistics", lambda model: model[1].running_mean.add_(1))
    case("other numbers beside infinities", lambda model: model[3].far[2].mul_(2))
    case("rows", rows)
    case("signs", lambda model: model[0].weight[0].neg_())
    case("rest", lambda model: model[5].weight[0, 0].add_(1))
    case("eps", lambda model: setattr(model[1], "eps", 0.5))
    case("heads", lambda model: setattr(model[4], "num_heads", 4))
    case("mode", lambda model: model[2].train())
    case("smoothing", loss=lambda: nn.CrossEntropyLoss(label_smoothing=0.5 * last))
    weights = torch.tensor([1.0, 1.0, 1.0 + 9 * last], dtype=torch.float64)
    case("weights", loss=lambda: nn.CrossEntropyLoss(weight=weights))
    case("partial", loss=lambda: partial(nn.functional.cross_entropy, weight=weights))
    case("closure", loss=lambda: lambda f, y: nn.functional.cross_entropy(f * (1 + last), y), reduction="mean")
    case("count", num_data=10 + last)
    model, data = normalised(processes)
    risk = EmpiricalRisk(
        nn.Sequential(*[model[k] for k in (0, 3, 5)]),  # type: ignore[index]
        lambda f, y: nn.functional.cross_entropy(f, y) + 0 * model[0].weight.sum(),  # type: ignore[index]
        data,
        reduction="mean",
        processes=processes,
        example_of_row={"1": lambda X, y: model[3].last},  # type: ignore[index]
    )
    found["what a pass notes"] = said(risk.loss)
    found["what a pass has noted"] = said(risk.loss)
    case("afterwards")
    return found


def other_vectors(processes: Processes) -> dict[str, str]:
    """What is said of processes that multiply other vectors, or ask for other matrices."""
    p, rank = problem("mlp"), processes.rank
    risk = p.risk(processes.share(p.data), processes=processes)
    one, G = torch.ones(risk.space.dim, dtype=torch.float64), GGN(risk)
    K, owned = curvature(risk, KFAC), curvature(risk, KFAC, owned=True)
    v = one * (1 + rank)
    estimator = CurvatureEstimator(p.risk((), processes=processes), KFAC)
    estimator.update(processes.share(p.data)[0])
    torch.manual_seed(rank)
    found = {
        "GGN": said(lambda: G @ v),
        "one entry": said(lambda: G @ one.index_fill(0, torch.tensor([7]), 1 + 1e-6 * rank)),
        "order": said(lambda: G @ torch.arange(len(one)).double().roll(rank)),
        "from the left": said(lambda: v @ G),
        "adjoint": said(lambda: G.T @ v),
        "form": said(lambda: G.quadratic_form(v)),
        "tree": said(lambda: torch.cat([t.flatten() for t in (G @ risk.space.unflatten(v)).values()])),
        "Hessian": said(lambda: Hessian(risk) @ v),
        "Fisher": said(lambda: GGN(risk, MonteCarlo(seed=rank)) @ one),
        "estimated": said(lambda: estimate.hutchinson_trace(G, 5)),
        "eigenvalues": said(lambda: estimate.top_eigenpairs(G, 2).eigenvalues),
        "solved": said(lambda: cg(G.shift(1.0), one + torch.randn(len(one)).double())[0]),
        "seed": said(lambda: curvature(risk, KFAC, vectors=MonteCarlo(seed=rank)).trace),
        "approximation": said(lambda: curvature(risk, EKFAC if rank else KFAC).trace),
        "damping": said(lambda: owned.inverse(1.0 + rank) @ one),
        "heuristic": said(lambda: owned.inverse(HeuristicDamping(1.0 + rank)) @ one),
        "power": said(lambda: owned.power(0.5 + rank, 0.1) @ one),
        "shift": said(lambda: owned.shift(1.0 + rank) @ one),
        "multiple": said(lambda: ((1.0 + rank) * owned).trace),
        "added": said(lambda: (owned + (1.0 + rank) * owned) @ one),
        "refresh": said(lambda: estimator.refresh(damping=1.0 + rank)),
    }
    found["replicated"] = str(away(K @ v, (1 + rank) * (K @ one)) < 1e-12)  # local, and right
    found["generator"] = str(
        away(*(estimate.hutchinson_trace(A, 5, generator=torch.Generator().manual_seed(3)) for A in (G, GGN(p.risk()))))
        < 1e-10
    )
    return found


def left_early(processes: Processes) -> dict[str, str]:
    """What is said if a call fails before processes meet in it, and what of the calls after that."""
    last, found = processes.rank == processes.world - 1, {}
    model, data = normalised(processes)
    used = [p for k in (0, 1, 5) for p in model[k].parameters()]  # type: ignore[index]

    def risk(weight: float = 1.0) -> EmpiricalRisk:
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, weight], dtype=torch.float64))
        return EmpiricalRisk(model, loss, data, used, processes=processes)

    first = said(lambda: curvature(risk(), DiagonalBlock).trace)
    for name, make in {
        "blocks": lambda wrong: curvature(risk(), "nothing" if wrong else DiagonalBlock).trace,
        "estimator": lambda wrong: CurvatureEstimator(risk(), decay=7 if wrong else 1) and None,
        "GGN": lambda wrong: GGN(risk(), "nothing" if wrong else None) @ torch.ones(53, dtype=torch.float64),
        "Hessian": lambda wrong: Hessian(risk(), chunk_size=0 if wrong else None) and None,
    }.items():
        found[name] = said(lambda make=make: make(last))
        found[f"after {name}"] = str(said(lambda: curvature(risk(), DiagonalBlock).trace) == first)

    class Leaves(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    try:  # not an error: others are not told, and wait
        found["interrupted"] = said(lambda: risk().with_data(Leaves() if last else data).loss())
    except KeyboardInterrupt:
        found["interrupted"] = said(lambda: risk().loss())
    found["after interrupted"] = str(said(lambda: curvature(risk(), DiagonalBlock).trace) == first)
    return found


def trained_statistics(processes: Processes) -> dict[str, str]:
    """Batch norm after training by `DistributedDataParallel`, and estimators and optimizers meanwhile."""
    model, data = normalised(processes)
    model = nn.Sequential(*[model[k] for k in (0, 1, 2, 5)]).train()  # type: ignore[index]
    ddp = nn.parallel.DistributedDataParallel(model, process_group=processes.group)
    loss, found = nn.CrossEntropyLoss(), {}
    linear = {name: p for name, p in model.named_parameters() if not name.startswith("1.")}
    estimator = CurvatureEstimator(EmpiricalRisk(ddp, loss, (), linear, processes=processes), EKFAC)
    for batch in data:
        with estimator.listen(batch):
            output = ddp(batch[0])
        loss(output, batch[1]).backward()
    found["while training"] = said(lambda: estimator.refresh(damping=1.0) or estimator.operator.trace)
    ddp.eval()
    risk = EmpiricalRisk(ddp, loss, data, processes=processes)
    found["afterwards"] = said(lambda: curvature(risk, KFAC).trace)
    for b in model.buffers():
        dist.broadcast(b, 0, processes.group)
    found["after sending them"] = said(lambda: curvature(risk, KFAC).trace)
    return found
