"""Several processes compute what one does from all data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    ActivationHessian,
    EmpiricalRisk,
    GGNFactor,
    Hessian,
    Jacobian,
    Processes,
    curvature,
)
from curvlinops_plus.risk import parameters
from test.cases import APPROXIMATIONS, VECTORS, problem
from test.cases import NETS as MADE
from test.distributed.together import by_one, close, require, said, shifted, small

NETS = [
    "strided cnn",
    "attention",
    "called twice",
    "tied",
    "generic layers",
    "language model",
    "called rarely",
]


def check_blocks(processes: Processes, name: str, kind: Any, vectors: Any, **options: Any) -> None:
    """The matrix of several processes is that of one."""
    p = problem(name)

    def alone() -> tuple[int, Tensor]:
        K = curvature(p.risk(), kind, vectors=vectors)
        return K.examples, K.to_dense().detach()

    examples, expected = by_one(processes, alone)
    K = curvature(
        p.risk(processes.share(p.data), processes=processes), kind, vectors=vectors, **options
    )
    assert K.examples == examples
    close(K.to_dense(), expected, f"{name} {options}")


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_blocks(processes: Processes, approximation: str) -> None:
    for kept in (0, 2**26):  # of what layers receive in one sweep for the next
        check_blocks(
            processes,
            "mlp",
            APPROXIMATIONS[approximation],
            VECTORS["empirical"],
            max_kept_bytes=kept,
        )


@pytest.mark.parametrize("name", [name for name in NETS if name in MADE])
def test_other_networks(processes: Processes, name: str) -> None:
    """In some of them there are layers that only some processes call."""
    for kind in (KFAC, EKFAC):
        check_blocks(processes, name, kind, VECTORS["exact"])


@pytest.mark.parametrize("vectors", VECTORS)
def test_vectors(processes: Processes, vectors: str) -> None:
    """Random ones are the same whatever the number of processes, and the batches."""
    p, sent = problem("mlp"), VECTORS[vectors]
    check_blocks(processes, "mlp", KFAC, sent)
    if vectors != "forward only":
        check_blocks(processes, "mlp", EKFAC, sent)
        shared = p.risk(processes.share(shifted(p.data)), processes=processes)
        close(
            GGN(shared, sent).to_dense(), by_one(processes, lambda: GGN(p.risk(), sent).to_dense())
        )


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.trunk(x))
        return {"a": self.a(h), "b": self.b(h)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_several_losses(processes: Processes, reduction: str) -> None:
    """Means over other numbers of terms in each batch: their relative weights are those of all
    data.
    """
    torch.manual_seed(0)
    model, weight = Heads().double(), torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    losses = {
        "a": nn.CrossEntropyLoss(weight, ignore_index=1, reduction=reduction),
        "b": (nn.MSELoss(), 0.5),
    }
    X, y = torch.randn(17, 4, dtype=torch.float64), torch.randint(3, (17,))
    data = [(x, {"a": a, "b": x[:, :2]}) for x, a in zip(X.split(5), y.split(5), strict=True)]
    one = EmpiricalRisk(model, losses, data)
    several = EmpiricalRisk(model, losses, processes.share(data), processes=processes)
    close(several.loss(), one.loss(), "loss")
    close(several.gradient(), one.gradient(), "gradient")
    for vectors in ("empirical", "mc", "exact"):
        K, L = (curvature(risk, EKFAC, vectors=VECTORS[vectors]) for risk in (several, one))
        close(K.to_dense(), L.to_dense(), vectors)
    for kind in (GGN, Hessian):
        close(kind(several).to_dense(), kind(one).to_dense(), kind)


@pytest.mark.parametrize(("examples", "owned"), [(21, True), (1, False)])
def test_groups_of_layers(processes: Processes, examples: int, owned: bool) -> None:
    """Also where a process has no examples."""
    torch.manual_seed(0)
    model, loss = small(), nn.CrossEntropyLoss()
    X, y = torch.randn(examples, 4).double(), torch.randint(3, (examples,))
    data = list(zip(X.split(6), y.split(6), strict=True))
    shared = EmpiricalRisk(model, loss, processes.share(data), processes=processes)
    for kind in (KFAC, EKFAC):
        one = curvature(EmpiricalRisk(model, loss, data), kind)
        needed = max(layer.computing for layer in one.memory().layers.values())
        K = curvature(shared, kind, owned=owned, max_bytes=needed, offload="cpu" if owned else None)
        close(K.to_dense(), one.to_dense(), kind)
        close((2 * K).inverse(0.1).to_dense(), (2 * one).inverse(0.1).to_dense(), kind)


def test_refused(processes: Processes) -> None:
    p = problem("mlp")
    risk, dataset = (
        p.risk(processes.share(p.data), processes=processes),
        TensorDataset(torch.arange(7)),
    )
    sampler = DistributedSampler(dataset, processes.world, processes.rank)
    wrapped = nn.parallel.DistributedDataParallel(p.model, process_group=processes.group)
    words = {
        (
            lambda: Jacobian(risk)
        ): "UnsupportedError: Jacobian can't be computed by several processes",
        (
            lambda: GGNFactor(risk)
        ): "UnsupportedError: GGNFactor can't be computed by several processes",
        (
            lambda: ActivationHessian(risk, ("0", "output", 0))
        ): "UnsupportedError: ActivationHessian can't be",
        (
            lambda: processes.share(DataLoader(dataset, sampler=sampler))
        ): "ValueError: .* DistributedSampler, .*twice",
        (lambda: p.risk(processes=processes.group)): "TypeError: processes is a ProcessGroup",
    }
    require({pattern: (said(work), pattern) for work, pattern in words.items()})
    EmpiricalRisk(wrapped, p.loss, p.data, processes=processes)
    parameters._warn_alone.cache_clear()  # processes serve several tests
    with pytest.warns(match=r"The model is wrapped by DistributedDataParallel, .*processes=None"):
        EmpiricalRisk(wrapped, p.loss, p.data)
