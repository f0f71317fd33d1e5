"""Everything but the data is the same in all processes, or they say what differs; what fails in one
raises in all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    Hessian,
    Processes,
    curvature,
    estimate,
)
from test.cases import problem, unchanged
from test.distributed.together import close, everywhere, require, said, small
from test.helpers import seeded

WHERE = (
    r": .* in process 0, and .* in process 1\. Everything but the data has to be the same in all\."
)
MODEL = "^ProcessError: The processes differ in "
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
    failing = max(
        rank
        for rank, count in enumerate(everywhere(processes, sum(len(X) for X, _ in mine)))
        if count
    )
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
    move(1.0)
    found["replicas"] = said(lambda: risk().loss())
    move(-1.0)
    found["empty"] = said(lambda: risk([]).loss())
    failed = rf"^ProcessError: Process {failing} of {world} failed"
    words = {
        "data": rf"{failed}.*OSError: the disk is full",
        "forward": rf"{failed}.*ArithmeticError: no luck.*in fail",
        "product": rf"{failed}.*ArithmeticError: no luck",
        "nan": rf"^ProcessError: Process .* of {world} failed.*NumericsError: .*layer '0'",
        "replicas": r"The processes differ in 0.bias: .* in process 0, and .* in process",
        "empty": r"`data` has no examples in any of the",
    }
    require({name: (found[name], pattern) for name, pattern in words.items()})
    alone = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    close(
        curvature(risk(), EKFAC, vectors="mc").to_dense(),
        curvature(alone, EKFAC, vectors="mc").to_dense(),
    )


def normalised(processes: Processes) -> tuple[nn.Sequential, list[Any]]:
    """A network with statistics, and the part of some data."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
    data = [(torch.randn(4, 4, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(3)]
    return nn.Sequential(*layers).double().eval(), processes.share(data)


@two_processes
def test_other_models_and_losses(processes: Processes) -> None:
    """Also where they differ in nothing that parameters among `params` and their norms tell."""
    last, found, words = processes.rank == 1, {}, {}

    def case(name: str, pattern: str, change: Any = None, loss: Any = None, **options: Any) -> None:
        model, data = normalised(processes)
        with torch.no_grad():
            if last and change is not None:
                change(model)
        params, loss = (
            [*model[0].parameters(), *model[1].parameters()],
            loss or nn.CrossEntropyLoss(),
        )
        risk = EmpiricalRisk(model, loss, data, params, processes=processes, **options)
        found[name], words[name] = said(lambda: curvature(risk, DiagonalBlock).trace), pattern

    right, weights = (
        r"^\d\.\d+e[+-]\d+$",
        torch.tensor([1.0, 1.0, 1.0 + 9 * last], dtype=torch.float64),
    )
    case("same", right, output=lambda f: f)
    case("buffers", f"{MODEL}1.running_mean{WHERE}", lambda model: model[1].running_mean.add_(1))
    case("signs", f"{MODEL}0.weight{WHERE}", lambda model: model[0].weight[0].neg_())
    case(
        "weights",
        f"{MODEL}CrossEntropyLoss: .*weight.*10",
        loss=nn.CrossEntropyLoss(weight=weights),
    )
    case("count", f"{MODEL}num_data=: {WHERE[2:]}", num_data=10 + last)
    case("afterwards", right)
    require_of_all(processes, found, words)
    assert found["same"] == found["afterwards"]


@two_processes
def test_other_vectors(processes: Processes) -> None:
    """Of operators whose products are sums over processes; what each has by itself may be
    multiplied with anything.
    """
    p, rank = problem("mlp"), processes.rank
    risk = p.risk(processes.share(p.data), processes=processes)
    one, G = torch.ones(risk.space.dim, dtype=torch.float64), GGN(risk)
    K, owned = curvature(risk, KFAC), curvature(risk, KFAC, owned=True)
    v = one * (1 + rank)
    estimator = CurvatureEstimator(p.risk((), processes=processes), KFAC)
    estimator.update(processes.share(p.data)[0])
    torch.manual_seed(rank)
    pairs: dict[str, tuple[Callable[[], Any], str]] = {
        "GGN": (
            lambda: G @ one.index_fill(0, torch.tensor([7]), 1 + 1e-3 * rank),
            f"{MODEL}the vector.*{WHERE}",
        ),
        "Hessian": (lambda: v @ Hessian(risk), f"{MODEL}the vector.*{WHERE}"),
        "estimated": (
            lambda: estimate.hutchinson_trace(G, 5),
            f"{MODEL}the vector .random.*{WHERE}",
        ),
        "owned": (lambda: owned @ v, f"{MODEL}the vectors that they multiply{WHERE}"),
        "refresh": (
            lambda: estimator.refresh(damping=1.0 + rank),
            f"{MODEL}the damping: {WHERE[2:]}",
        ),
    }
    found = {name: said(work) for name, (work, _) in pairs.items()}
    require_of_all(processes, found, {name: pattern for name, (_, pattern) in pairs.items()})
    close(K @ v, (1 + rank) * (K @ one), "what each has by itself")
    traces = [estimate.hutchinson_trace(A, 5, generator=seeded(3)) for A in (G, GGN(p.risk()))]
    close(*traces)
