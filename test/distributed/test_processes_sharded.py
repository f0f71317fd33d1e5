"""Models of which each process has parts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from curvlinops_plus import (
    GGN,
    KFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    EmpiricalRisk,
    Hessian,
    KFACOptimizer,
    Processes,
    curvature,
)
from test.cases import APPROXIMATIONS, problem
from test.distributed.together import close, require, said
from test.nets import tanh_net

# It needs streams there, which CPUs have not.
runs = pytest.mark.skipif(
    torch.__version__.startswith("2.6"), reason="models of fully_shard run on GPUs only in 2.6"
)


class Sharded(nn.Module):
    """Layers of several kinds, one of them frozen, and a module that others are inside of."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.inner = nn.Sequential(
            nn.Linear(6, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 5, bias=False), nn.ReLU())
        )
        self.head = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(torch.tanh(self.frozen(x)))))


def pair(processes: Processes) -> tuple[nn.Module, nn.Module]:
    """A model of which each process has parts, and the same as a whole."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = Sharded().double()
    model = copy.deepcopy(plain)
    mesh = DeviceMesh.from_group(processes.group, "cpu")
    for module in (model.inner, model.head, model):
        fully_shard(module, mesh=mesh)
    return model, plain


def whole(t: Any) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def hooks(model: nn.Module) -> list[object]:
    return [
        [*table.items()]
        for m in model.modules()
        for table in (m._forward_pre_hooks, m._forward_hooks)
    ]


@pytest.mark.parametrize("examples", [9, 1])
def test_everything_of_a_model(processes: Processes, examples: int) -> None:
    """Also with other numbers of batches, and in processes without data."""
    model, plain = pair(processes)
    X, y = torch.randn(examples, 4, dtype=torch.float64), torch.randint(3, (examples,))
    data, loss = (
        [(x, t) for x, t in ((X[:3], y[:3]), (X[3:], y[3:])) if len(x)],
        nn.CrossEntropyLoss(),
    )
    mine = [
        (x[k : k + 1], t[k : k + 1]) for x, t in processes.share(data) for k in range(len(x))
    ]  # batches of one
    if not torch.__version__.startswith("2.6"):  # whose fully_shard runs on GPUs only
        with torch.no_grad():
            model(X)  # after which it keeps some gathered parameters
    before = hooks(model)
    several, one = (
        EmpiricalRisk(model, loss, mine, processes=processes),
        EmpiricalRisk(plain, loss, data),
    )
    v = torch.linspace(-1, 1, one.space.dim, dtype=torch.float64)
    close(several.loss(), one.loss(), "loss")
    close(several.gradient(), one.gradient(), "gradient")
    for kind in (GGN, Hessian):
        close(kind(several) @ v, kind(one) @ v, kind)
    for name in ("KFAC", "EKFAC", "FullBlock"):
        needs = curvature(several, APPROXIMATIONS[name], compute=False).memory()
        assert needs == curvature(one, APPROXIMATIONS[name], compute=False).memory()
        limit = max(layer.computing for layer in needs.layers.values())
        for options in ({"vectors": "mc"}, {"owned": True, "max_bytes": limit, "offload": "cpu"}):
            K, L = (curvature(r, APPROXIMATIONS[name], **options) for r in (several, one))
            close(K.to_dense(), L.to_dense(), f"{name} {options}")
    curvature(
        several.with_data(mine or data[:1]), KFAC
    ).verify()  # each process looks at some by itself
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", CurvatureWarning
        )  # parameters are those that the state is of
        read = BlockwiseLinearOperator.from_state_dict(K.state_dict(), plain, data, loss=loss)
    close(read.to_dense(), L.to_dense(), "loaded")
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    assert hooks(model) == before


@runs
def test_training(processes: Processes) -> None:
    """Listening to a sharded model while it is trained; its gradients are untouched, and directions
    are sharded.
    """
    (model, plain), loss = pair(processes), nn.CrossEntropyLoss()
    twin, _ = pair(processes)
    several = CurvatureEstimator(
        EmpiricalRisk(model, loss, (), processes=processes), KFAC, decay=0.9
    )
    one = CurvatureEstimator(EmpiricalRisk(plain, loss, ()), KFAC, decay=0.9)
    for step in range(3):
        X, y = (
            torch.randn(4 * processes.world, 4, dtype=torch.float64),
            torch.randint(3, (4 * processes.world,)),
        )
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
        close(several.operator.to_dense(), one.operator.to_dense(), step)
        ours, theirs = (
            inverse @ {key: whole(p.grad) for key, p in m.named_parameters() if p.requires_grad}
            for m, inverse in ((model, several.inverse()), (plain, one.inverse()))
        )
        close(ours, theirs)
        with torch.no_grad():
            for m in (model, twin, plain):
                for key, p in m.named_parameters():
                    if key in theirs and hasattr(p, "full_tensor"):
                        p -= distribute_tensor(0.1 * theirs[key], p.device_mesh, p.placements)
                    elif key in theirs:
                        p -= 0.1 * theirs[key]


@pytest.mark.parametrize("processes", [2], indirect=True)
def test_refused(processes: Processes) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    (model, _), loss, data = pair(processes), nn.CrossEntropyLoss(), problem("mlp").data
    parallel = tanh_net(4, 6, 3).double()
    mesh = DeviceMesh.from_group(processes.group, "cpu")
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    told = r"The parameter '0.weight' is spread over processes by parallelize_module.*full_state_dict=True"
    words: dict[Callable[[], object], str] = {
        lambda: EmpiricalRisk(
            model, loss, data
        ): r"spread over processes by fully_shard.*processes=Processes\(\)",
        lambda: KFACOptimizer(
            model, loss
        ): r"sharded by fully_shard.*DistributedDataParallel.*listen",
        lambda: GGN(EmpiricalRisk(parallel, loss, data, [parallel[2].bias])): told,
    }
    require(
        {
            pattern: (said(work), f"^UnsupportedError: .*{pattern}")
            for work, pattern in words.items()
        }
    )
