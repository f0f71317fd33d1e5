"""Blocks that processes keep apart, each by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvlinops_plus import (
    EKFAC,
    KFAC,
    BlockwiseLinearOperator,
    Checkpoint,
    EKFACLinearOperator,
    HeuristicDamping,
    KFACLinearOperator,
    Processes,
    RelativeDamping,
    ScaledIdentity,
    curvature,
    estimate,
    load,
    save,
)
from curvlinops_plus.linalg import BlockDiagonal, Sum
from curvlinops_plus.linalg.packing import pack
from test.cases import APPROXIMATIONS, problem
from test.cases import NETS as MADE
from test.distributed.together import close, require, said
from test.helpers import seeded

NETS = ["strided cnn", "called twice", "tied", "language model", "called rarely"]

MADE_OF: dict[str, Callable[[Any], Any]] = {
    "K": lambda K: K,
    "multiple": lambda K: 3 * K,
    "sum": lambda K: K + 2 * K,
    "inverse": lambda K: K.inverse(0.1),
    "relative": lambda K: K.inverse(RelativeDamping(0.3)),
    "heuristic": lambda K: (2 * K).inverse(HeuristicDamping(RelativeDamping(0.3))),
    "pair": lambda K: K.inverse((0.1, 0.2)),
    "per block": lambda K: K.inverse({name: 0.1 + k for k, name in enumerate(K.operator.layouts)}),
    "power": lambda K: K.power(-0.5, 0.1),
    "shift": lambda K: K.shift(0.2),
}


def bytes_of(blocks: Mapping[str, Any]) -> int:
    """Bytes of all tensors of blocks."""
    tensors = tree_leaves([pack(block) for block in blocks.values()])
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def check(processes: Processes, name: str, kind: Any, **options: Any) -> None:
    """Everything that is said of blocks with owners is what is said of those that all have."""
    p = problem(name)
    several = curvature(
        p.risk(processes.share(p.data), processes=processes), kind, owned=True, **options
    )
    whole = curvature(p.risk(), kind, **options)
    n = whole.shape[0]
    v = torch.linspace(-1, 1, n, dtype=torch.float64)
    V = torch.randn(n, 2, generator=seeded()).double()

    def seed() -> torch.Generator:
        return seeded(5)

    for what, made in MADE_OF.items():
        a, b = made(several), made(whole)
        close(a @ v, b @ v, what)
        close(V.T @ a, V.T @ b, what)
        for number in ("trace", "frobenius_norm"):
            close(getattr(a, number), getattr(b, number), f"{what}, {number}")
        close(a.diagonal(), b.diagonal(), what)
        if not isinstance(b, Sum):
            close(a.sample(seed(), 2), b.sample(seed(), 2), what)
            if what != "pair":
                close(a.eigenvalues(), b.eigenvalues(), what)
    for number in (
        lambda K: K.to_dense(),
        lambda K: K.shift(0.1).logdet,
        lambda K: K.quadratic_form(V.T),
        lambda K: K[:5, :5].to_dense(),
        lambda K: K.to(torch.float32).to_dense().sign(),
        lambda K: K @ whole.in_space.unflatten(v),
        lambda K: estimate.xtrace(K, num_matvecs=10, generator=seed()),
    ):
        close(number(several), number(whole))
    for damping in (0.1, RelativeDamping(0.3), HeuristicDamping(0.1)):
        for ours, theirs in zip(several.summary(damping), whole.summary(damping), strict=True):
            assert (ours["block"], ours["count"]) == (theirs["block"], theirs["count"])
            for number in ("trace", "largest", "condition"):
                assert ours[number] == pytest.approx(theirs[number], rel=1e-10), (damping, number)
    close(several.operator.gather().to_dense(), whole.to_dense(), "gathered")
    state, params = several.state_dict(), [*p.risk().params.values()]
    read = BlockwiseLinearOperator.from_state_dict(
        state, p.model, p.data, params=params, loss=p.loss
    )
    close(read.to_dense(), whole.to_dense(), "loaded")
    inverse = BlockDiagonal.from_state_dict(several.inverse(0.1).state_dict())
    close(inverse.to_dense(), whole.inverse(0.1).to_dense(), "inverse, loaded")
    # Memory: what this process has is its part and at most the blocks of the largest accumulator.
    together = [
        [group.name for group in a.groups]
        for entry in whole.plan
        for a in entry.accumulators().values()
    ]
    largest = max(bytes_of({name: whole.blocks[name] for name in names}) for names in together)
    assert bytes_of(several.blocks) <= bytes_of(whole.blocks) / processes.world + largest
    kept = [name for names in processes.gather(list(several.blocks)) for name in names]
    assert sorted(kept) == sorted(whole.blocks)


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_owned(processes: Processes, approximation: str) -> None:
    check(processes, "mlp", APPROXIMATIONS[approximation])


@pytest.mark.parametrize("name", [name for name in NETS if name in MADE])
def test_other_networks(processes: Processes, name: str) -> None:
    """Also with a block for each parameter."""
    for kind in (KFAC, EKFAC):
        check(processes, name, kind, separate_weight_and_bias=kind is KFAC, vectors="empirical")


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC"])
def test_states(processes: Processes, approximation: str, tmp_path: Path) -> None:
    """All blocks are in one file, each process has its own in a checkpoint; loaded as a whole, and
    apart again.
    """
    p, kind, folder = problem("strided cnn"), APPROXIMATIONS[approximation], str(tmp_path)
    risk, whole = (
        p.risk(processes.share(p.data), processes=processes),
        2 * curvature(p.risk(), kind),
    )
    K = 2 * curvature(risk, kind, owned=True)
    save(K.inverse(0.1), f"{folder}/inverse.safetensors")
    save(K, f"{folder}/one.safetensors")
    dcp.save(
        {"K": Checkpoint(K)}, checkpoint_id=f"{folder}/checkpoint", process_group=processes.group
    )
    dist.barrier(processes.group)
    options: dict[str, Any] = {"params": [*p.risk().params.values()], "loss": p.loss}
    for owned, group in ((False, None), (False, processes), (True, processes)):
        state, more = load(f"{folder}/one.safetensors"), {"owned": owned, "processes": group}
        read = BlockwiseLinearOperator.from_state_dict(state, p.model, p.data, **options, **more)
        close(read.to_dense(), whole.to_dense(), "file")
    for owned in (False, True):
        K = BlockwiseLinearOperator(risk, kind, owned=owned, compute=False)
        dcp.load(
            {"K": Checkpoint(K)},
            checkpoint_id=f"{folder}/checkpoint",
            process_group=processes.group,
        )
        close(K.to_dense(), whole.to_dense(), "checkpoint")
        assert not owned or len(K.blocks) < len(whole.blocks)
    inverse = BlockDiagonal.from_state_dict(load(f"{folder}/inverse.safetensors"))
    close(inverse.to_dense(), whole.inverse(0.1).to_dense(), "inverse")


def test_what_is_said(processes: Processes) -> None:
    p, rank = problem("mlp"), processes.rank
    risk = p.risk(processes.share(p.data), processes=processes)
    K, v = curvature(risk, KFAC, owned=True), torch.ones(43, dtype=torch.float64)
    singular = curvature(risk, {"2": ScaledIdentity.using(scale=0.0)}, default=KFAC, owned=True)
    words: dict[Callable[[], Any], str] = {
        lambda: (
            K @ (v if rank else -v)
        ): "The processes differ in the vectors that they multiply: .* in process 0, and",
        lambda: singular.inverse(): r"Process \d of \d failed.*SingularMatrixError: block \"2\"",
        lambda: K @ v.clone().requires_grad_(): r"no derivatives, .* gather\(\)",
        lambda: save(K, "nowhere/at/all"): r"Process \d of \d failed.*There is no folder",
        lambda: curvature(
            risk, KFAC, owned=True, max_bytes=300
        ): "layer '0': KFAC needs .* more than max_bytes=300",
    }
    require({pattern: (said(work), pattern) for work, pattern in words.items()})
    close(K @ v, curvature(risk, KFAC) @ v, "afterwards")


@pytest.mark.parametrize("processes", [2], indirect=True)
def test_operators_of_curvlinops(processes: Processes) -> None:
    p = problem("mlp")
    params, v, mine = (
        list(p.model.parameters()),
        torch.linspace(-1, 1, 43, dtype=torch.float64),
        processes.share(p.data),
    )
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        one = kind(p.model, p.loss, params, p.data)
        for options in ({}, {"owned": True, "offload": "cpu"}):
            K = kind(p.model, p.loss, params, mine, processes=processes, **options)
            close(K @ v, one @ v, f"{kind.__name__} {options}")
    apart = EKFACLinearOperator(p.model, p.loss, params, mine, processes=processes, owned=True)
    assert "eigenvectors of all layers are needed at once" in said(
        apart.compute_eigenvalue_correction
    )
