"""Layers in groups within `max_bytes`, blocks that live elsewhere, and what `memory()` says before: equal numbers."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import APPROXIMATIONS, VECTORS, close, problem

from curvlinops_plus import (
    EKFAC,
    KFAC,
    BlockwiseLinearOperator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.linalg.offload import Offloaded

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the process can't measure itself")
quiet = pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")


def limit(K: BlockwiseLinearOperator, part: int = 5) -> int:
    """A part of what all layers need, but enough for each."""
    needs = K.memory()
    return max(needs.computing // part, *(layer.computing for layer in needs.layers.values()))


@quiet
@pytest.mark.parametrize(
    ("name", "kind", "vectors"),
    [
        ("mlp", "EKFAC", "mc"),
        ("strided cnn", "KFAC", "exact"),
        ("attention", "EKFAC, large factors diagonal", "exact"),
        ("attention", "TNT", "mc"),
        ("tied", "EKFAC", "exact"),
        ("language model", "NearestKronecker by sweeps", "mc"),
    ],
)
def test_groups_have_the_numbers_of_one_sweep(name: str, kind: str, vectors: str, tmp_path: Path) -> None:
    p, options = problem(name), {"default": APPROXIMATIONS[kind], "vectors": VECTORS[vectors]}
    risk = p.risk()
    K = curvature(risk, APPROXIMATIONS[kind], **options)
    groups = curvature(
        risk, APPROXIMATIONS[kind], **options, max_bytes=limit(K), offload=f"disk:{tmp_path}", max_kept_bytes=0
    )
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    assert all(isinstance(block, Offloaded) for block in groups.blocks.values())
    assert torch.equal(groups @ v, K @ v)
    assert torch.equal(groups.trace, K.trace)
    del groups
    gc.collect()
    assert not list(tmp_path.iterdir())


@quiet
def test_groups_are_announced_and_of_the_size_that_was_given(capsys: Any) -> None:
    p = problem("deep linear")
    needs = [layer.computing for layer in p.curvature(EKFAC).memory().layers.values()]
    assert len(needs) == 3
    for size, groups in (
        (max(needs), 3),
        (max(needs[0] + needs[1], needs[2]), 2),
        (sum(needs) - 1, 2),
        (sum(needs), 1),
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            curvature(p.risk(progressbar=True), EKFAC, max_bytes=size, max_kept_bytes=0)
        said = [str(w.message) for w in found if issubclass(w.category, CurvatureWarning)]
        words = f"3 layers in {groups} groups take {2 * groups} sweeps over the data, instead of 2."
        assert said == [f"max_bytes={size}: {words}"] * (groups > 1)
        assert (f"group 2 of {groups}" in capsys.readouterr().err) == (groups > 1)
    once = EmpiricalRisk(p.model, p.loss, iter(p.data), p.params)
    with pytest.raises(ValueError, match="another sweep over it is needed"):
        curvature(once, KFAC, max_bytes=limit(p.curvature(KFAC)))


# ------------------------------------------------------------------------------------------------------------- memory()


def tensors_in(K: BlockwiseLinearOperator) -> int:
    """Bytes of what blocks are made of; what they share counts once."""
    seen: dict[int, int] = {}

    def look(node: Any) -> None:
        for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            look(part)
        if isinstance(node, Tensor):
            seen[node.data_ptr()] = node.numel() * node.element_size()

    from curvlinops_plus.linalg.packing import pack

    for block in K.unscaled.blocks.values():
        look(pack(block, lambda t: t))
    return sum(seen.values())


@quiet
@pytest.mark.parametrize("kind", [KFAC, EKFAC, FullBlock, DiagonalBlock], ids=repr)
@pytest.mark.parametrize("name", ["strided cnn", "grouped cnn", "tied", "language model", "generic layers"])
def test_memory_is_what_blocks_take(name: str, kind: Any) -> None:
    p = problem(name)
    before = curvature(p.risk(), kind, compute=False).memory()
    K = p.curvature(kind)
    assert before == K.memory()
    assert before.kept == tensors_in(K)
    assert before.kept <= before.computing


# -------------------------------------------------------------------------------------------------------------- offload


@pytest.mark.parametrize(
    ("kind", "separate"), [("KFAC", True), ("EKFAC", False), ("FullBlock", False), ("ScaledIdentity", False)]
)
def test_offloaded_blocks_have_all_closed_forms(kind: str, separate: bool, tmp_path: Path) -> None:
    p = problem("mlp")
    K = p.curvature(APPROXIMATIONS[kind], separate_weight_and_bias=separate)
    away = K.offload(f"disk:{tmp_path}")
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    forms: Any = (
        lambda A: A.trace, lambda A: A.frobenius_norm, lambda A: A.to_dense(), lambda A: A.diagonal(),
        lambda A: A.eigenvalues(), lambda A: A.shift(0.1).logdet, lambda A: (2 * A).inverse(0.1) @ v,
        lambda A: A.power(0.5, 0.1) @ v, lambda A: A.inverse((0.1, 0.2)) @ v, lambda A: (A + K) @ v,
        lambda A: A.inverse(0.1, use_heuristic_damping=True) @ v, lambda A: (A + A).inverse(0.1) @ v,
        lambda A: A.operator[:5, :5].to_dense(), lambda A: A @ v,
    )  # fmt: skip
    for form in forms:
        close(form(away), form(K))
    close(away.to(torch.float32) @ v.float(), (K @ v).float(), 1e-5)
    other = p.curvature(APPROXIMATIONS[kind], separate_weight_and_bias=separate)
    other.load_state_dict(away.state_dict())
    assert torch.equal(other @ v, K @ v)
    for copied in (copy.deepcopy(away.operator.blocks), pickle.loads(pickle.dumps(away.operator.blocks))):
        assert not any(isinstance(block, Offloaded) for block in copied.values())


def test_inverses_share_eigenvectors_and_files_are_removed(tmp_path: Path) -> None:
    K = problem("mlp").curvature(EKFAC)
    away = K.offload(f"disk:{tmp_path}")
    files = len(list(tmp_path.iterdir()))
    inverse = away.inverse(0.1)
    assert len(list(tmp_path.iterdir())) == files + len(K.blocks)  # eigenvalues alone
    del away
    gc.collect()
    assert inverse.trace > 0
    del inverse
    gc.collect()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------ resident memory, by itself

WIDTH, DEPTH = 500, 8


def resident(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def growth(task: Any) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    result = task()
    found = resident("VmHWM") - before
    del result
    return found


def measured() -> dict[str, int]:
    """Bytes that are taken for KFAC and EKFAC at once and in groups."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    data = [(torch.randn(32, WIDTH), torch.randint(4, (32,)))]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, check=False)  # which takes gradients of all parameters
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in (KFAC, EKFAC):

            def compute(kind: Any = kind, **options: Any) -> Any:
                return curvature(risk, kind, vectors=MonteCarlo(seed=0), max_kept_bytes=0, **options)

            needs = compute(compute=False).memory().computing
            within = {"max_bytes": needs // 5, "offload": f"disk:{folder}"}
            compute()  # what is loaded at first use
            found |= {f"{kind.__name__} needs": needs, f"{kind.__name__} at once": growth(compute)}
            found[f"{kind.__name__} in groups"] = growth(lambda: compute(**within))  # noqa: B023
    return found


@linux
@pytest.mark.slow
def test_groups_take_less() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    found = json.loads(printed.splitlines()[-1])
    batch = 2**23  # of inputs, gradients, graphs and LAPACK's work on one matrix
    for kind in ("KFAC", "EKFAC"):
        assert found[f"{kind} at once"] > 0.8 * found[f"{kind} needs"] / (2 if kind == "EKFAC" else 1), found
        assert found[f"{kind} in groups"] < found[f"{kind} needs"] / 5 + batch, found


if __name__ == "__main__":
    print(json.dumps(measured()))
