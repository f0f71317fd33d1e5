"""Everything but the data is the same in all processes, or they say what differs; what fails in one raises in all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import problem, unchanged
from together import World, close, everywhere, require, said, small
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    Hessian,
    ProcessError,
    Processes,
    curvature,
    estimate,
)

WHERE = r".* in process 0, and .* in process 1\. Everything but the data has to be the same in all\."
MODEL = "^ProcessError: The processes differ in model and loss, or what they compute with these: "
two_processes = pytest.mark.parametrize("processes", [2], indirect=True)


def require_of_all(processes: Processes, found: dict[str, str], words: dict[str, str]) -> None:
    """All are told the same."""
    told = everywhere(processes, found)
    assert all(one == told[0] for one in told)
    assert found.keys() == words.keys()
    require({name: (found[name], pattern) for name, pattern in words.items()})


def test_failures(processes: Processes) -> None:
    """Nothing has changed then."""
    world, model, data = processes.world, small(), problem("mlp").data
    mine, one = processes.share(data), torch.ones(43, dtype=torch.float64)
    failing = max(rank for rank, count in enumerate(everywhere(processes, sum(len(X) for X, _ in mine))) if count)
    last = processes.rank == failing  # of those that have examples

    def risk(data: Any = mine) -> EmpiricalRisk:
        return EmpiricalRisk(model, nn.CrossEntropyLoss(), data, processes=processes)

    class Broken(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield self[0]
            raise OSError("the disk is full")

    def fail(module: nn.Module, args: Any) -> None:
        raise ArithmeticError("no luck")

    def move(by: float) -> None:
        with torch.no_grad():
            model[0].bias[0] += by * last

    found = {}
    with unchanged(model):
        found["data"] = said(lambda: curvature(risk(Broken(mine) if last else mine), KFAC))
        handle = model[2].register_forward_pre_hook(fail) if last else None
        found["forward"] = said(lambda: curvature(risk(), EKFAC))
        found["product"] = said(lambda: GGN(risk()) @ one)
        if handle is not None:
            handle.remove()
        nan = [(X * float("nan"), y) for X, y in mine] if last else mine
        found["nan"] = said(lambda: curvature(risk(nan), EKFAC))
        found["loss"] = said(lambda: risk().loss() if last else risk().gradient())
    move(1.0)
    found["replicas"] = said(lambda: risk().loss())
    move(-1.0)
    found["empty"] = said(lambda: risk([]).loss())
    failed = rf"^ProcessError: Process {failing} of {world} failed"
    words = {
        "data": rf"{failed} in .*BlockwiseLinearOperator.*\n?.*OSError: the disk is full",
        "forward": rf"{failed}.*ArithmeticError: no luck.*in fail",
        "product": rf"{failed} in .*GGN.*ArithmeticError: no luck",
        "nan": rf"{failed}.*NumericsError: .*layer '0'",
        "loss": r"The processes are in different places: .*the loss",
        "replicas": r"The processes differ in model and loss.*'0.bias'.* in process 0, and .* in process",
        "empty": r"`data` has no examples in any of the",
    }
    require({name: (found[name], pattern) for name, pattern in words.items()})
    alone = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    close(curvature(risk(), EKFAC, vectors="mc").to_dense(), curvature(alone, EKFAC, vectors="mc").to_dense())


def lonely(processes: Processes) -> None:
    """A process ends, and the other says so as soon as it would wait for it."""
    if processes.rank == 1:
        os._exit(1)
    p = problem("mlp")
    with pytest.raises(ProcessError, match="lost contact"):
        curvature(p.risk(processes.share(p.data), processes=processes), KFAC)


def test_a_process_that_has_ended() -> None:
    world = World(2, timeout=20.0)
    try:
        assert world.run(Path(__file__), "lonely", {}) == {0: None, 1: "ended"}
    finally:
        world.close()


class Scaled(nn.Module):
    """With attributes of its own, some of which are others in each process."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.factor, self.rank = 2.0, rank

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.mean = x.detach(), float(x.detach().mean())  # of these examples
        return x * self.factor


def normalised(processes: Processes) -> tuple[nn.Sequential, list[Any]]:
    """A network with statistics, and the part of some data."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), Scaled(processes.rank), nn.Linear(5, 3)
    data = [(torch.randn(4, 4, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(3)]
    return nn.Sequential(*layers).double().eval(), processes.share(data)


CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "buffers": (
        lambda model: model[1].running_mean.add_(1),
        rf"the buffer '1.running_mean' is{WHERE} Buffers that .* for b in model.buffers\(\)",
    ),
    "signs": (lambda model: model[0].weight[0].neg_(), f"the parameter '0.weight' is{WHERE}"),
    "options": (lambda model: setattr(model[1], "eps", 0.5), "the module '1' is 'BatchNorm1d.*eps=1e-05.*eps=0.5"),
}


@two_processes
def test_other_models_and_losses(processes: Processes) -> None:
    """Also where they differ in nothing that parameters among `params` and their norms tell."""
    last, found, words = processes.rank == 1, {}, {}

    def case(name: str, pattern: str, change: Any = None, loss: Any = None, **options: Any) -> None:
        model, data = normalised(processes)
        with torch.no_grad():
            if last and change is not None:
                change(model)
        params, loss = [*model[0].parameters(), *model[1].parameters()], loss or nn.CrossEntropyLoss()
        risk = EmpiricalRisk(model, loss, data, params, processes=processes, **options)
        found[name], words[name] = said(lambda: curvature(risk, DiagonalBlock).trace), pattern

    right, weights = r"^\d\.\d+e[+-]\d+$", torch.tensor([1.0, 1.0, 1.0 + 9 * last], dtype=torch.float64)
    case("same", right)
    for name, (change, pattern) in CHANGES.items():
        case(name, MODEL + pattern, change)
    case("weights", f"{MODEL}.weight. of the loss is{WHERE}", loss=nn.CrossEntropyLoss(weight=weights))
    case("count", f"{MODEL}num_data= is 10{WHERE}", num_data=10 + last)
    case("afterwards", right)
    require_of_all(processes, found, words)
    assert found["same"] == found["afterwards"]


@two_processes
def test_other_vectors(processes: Processes) -> None:
    """Of operators whose products are sums over processes; what each has by itself may be multiplied with anything."""
    p, rank = problem("mlp"), processes.rank
    risk = p.risk(processes.share(p.data), processes=processes)
    one, G = torch.ones(risk.space.dim, dtype=torch.float64), GGN(risk)
    K, owned = curvature(risk, KFAC), curvature(risk, KFAC, owned=True)
    v = one * (1 + rank)
    estimator = CurvatureEstimator(p.risk((), processes=processes), KFAC)
    estimator.update(processes.share(p.data)[0])
    torch.manual_seed(rank)
    vector = rf"{MODEL}the vector is{WHERE} Each process has to multiply the same vectors"
    made = r"what the matrix was made with, as dampings and multiples is "
    pairs: dict[str, tuple[Callable[[], Any], str]] = {
        "GGN": (lambda: G @ one.index_fill(0, torch.tensor([7]), 1 + 1e-6 * rank), vector),
        "Hessian": (lambda: v @ Hessian(risk), vector),
        "estimated": (lambda: estimate.hutchinson_trace(G, 5), vector),
        "damping": (lambda: owned.inverse(1.0 + rank) @ one, f"differ in the inverse that they make: {made}1.0{WHERE}"),
        "multiple": (lambda: ((1.0 + rank) * owned).trace, f"differ in what they multiply: {made}"),
        "refresh": (lambda: estimator.refresh(damping=1.0 + rank), f"differ in a refresh: the damping is 1.0{WHERE}"),
    }
    found = {name: said(work) for name, (work, _) in pairs.items()}
    require_of_all(processes, found, {name: pattern for name, (_, pattern) in pairs.items()})
    close(K @ v, (1 + rank) * (K @ one), "what each has by itself")
    traces = [estimate.hutchinson_trace(A, 5, generator=torch.Generator().manual_seed(3)) for A in (G, GGN(p.risk()))]
    close(*traces)


@two_processes
def test_calls_that_are_left_early(processes: Processes) -> None:
    """Nobody is taken to be in the call before."""
    last, p = processes.rank == 1, problem("mlp")
    risk = p.risk(data := processes.share(p.data), processes=processes)
    first = curvature(risk, KFAC).trace
    failed = said(lambda: CurvatureEstimator(risk, decay=7 if last else 1) and None)
    require({"": (failed, "^ProcessError: Process 1 of 2 failed in CurvatureEstimator.*ValueError: decay=7")})
    assert torch.equal(curvature(risk, KFAC).trace, first)

    class Leaves(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    try:  # not an error: others are not told, and wait
        interrupted = said(lambda: risk.with_data(Leaves() if last else data).loss())
    except KeyboardInterrupt:
        interrupted = said(lambda: risk.loss())
    require({"": (interrupted, r"The processes are in different places: .*collective calls number \[\d+, \d+\]")})
    assert torch.equal(curvature(risk, KFAC).trace, first)
