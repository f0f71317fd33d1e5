"""Layers in groups within `max_bytes`, blocks that live elsewhere, and what `memory()` says before: equal numbers."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
    UnsupportedError,
    curvature,
    load,
    save,
)
from curvlinops_plus.blocks import memory
from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.linalg import Dense, Diagonal
from curvlinops_plus.linalg.offload import Offloaded, Stored

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the process can't measure itself")
quiet = pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")


def limit(K: BlockwiseLinearOperator, part: int = 5) -> int:
    """A part of what all layers need, but enough for each."""
    needs = K.memory()
    return max(needs.computing // part, *(layer.computing for layer in needs.layers.values()))


@quiet
@pytest.mark.parametrize("vectors", ["exact", "mc"])
@pytest.mark.parametrize(
    "kind", ["KFAC", "EKFAC", "EKFAC, large factors diagonal", "TNT", "NearestKronecker by sweeps"]
)
@pytest.mark.parametrize("name", ["mlp", "strided cnn", "attention", "tied", "language model"])
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


def test_sweeps_are_announced_and_groups_named(capsys: Any) -> None:
    p = problem("mlp")
    K = p.curvature(EKFAC)
    with pytest.warns(CurvatureWarning, match=r"layers in \d groups take \d sweeps over the data, instead of 2"):
        curvature(p.risk(progressbar=True), EKFAC, max_bytes=limit(K), max_kept_bytes=0)
    assert "group 2 of " in capsys.readouterr().err


def test_what_does_not_fit_is_refused_by_name() -> None:
    p = problem("mlp")
    least = limit(p.curvature(EKFAC))
    with pytest.raises(
        UnsupportedError,
        match=rf"layer '.*': EKFAC needs .* GiB .*more than max_bytes={least - 1}.*EKFAC.using\(split=",
    ):
        curvature(p.risk(), EKFAC, max_bytes=least - 1)
    with pytest.raises(UnsupportedError, match=r"more than max_bytes=1 .*DiagonalBlock"):
        curvature(p.risk(), FullBlock, max_bytes=1)
    for wrong in (0, -1, 1.5, True, "1 GiB"):
        with pytest.raises(ValueError, match=r"max_bytes=.* must be an integer of at least 1"):
            curvature(p.risk(), KFAC, max_bytes=wrong)  # type: ignore[arg-type]


@quiet
def test_data_that_can_be_read_once_have_no_groups() -> None:
    p = problem("mlp")
    once = EmpiricalRisk(p.model, p.loss, iter(p.data), p.params)
    with pytest.raises(ValueError, match="another sweep over it is needed"):
        curvature(once, KFAC, max_bytes=limit(p.curvature(KFAC)))


def test_unknown_needs_are_refused_by_name() -> None:
    class Mine(Accumulator):
        def update(self, batch: Any) -> None:
            self.add("d", batch.per_example_grads.square().sum((0, 1)).flatten())

        def finish(self) -> Diagonal:
            return Diagonal(self.value("d"))

    p = problem("mlp")
    with pytest.raises(
        UnsupportedError, match=r"Mine does not say how much memory it takes. Define its method `needs\(\)`"
    ):
        curvature(p.risk(), Mine, max_bytes=10**9)
    close(curvature(p.risk(), Mine).diagonal(), p.curvature(DiagonalBlock).diagonal())


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
@pytest.mark.parametrize("kind", [KFAC, EKFAC, DiagonalBlock, KFAC.using(split=3), EKFAC.using(split=3)], ids=repr)
@pytest.mark.parametrize("name", ["mlp", "strided cnn", "tied", "language model", "generic layers"])
def test_memory_is_what_blocks_take(name: str, kind: Any) -> None:
    p = problem(name)
    before = curvature(p.risk(), kind, compute=False).memory()
    K = p.curvature(kind)
    assert before == K.memory()
    assert before.kept == tensors_in(K)
    assert before.kept <= before.computing


def gpt2_small() -> nn.Module:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(768, 2304), nn.Linear(768, 768), nn.Linear(768, 3072), nn.Linear(3072, 768))]
        return nn.Sequential(*(copy.deepcopy(blocks[0]) for _ in range(12)))


def test_memory_of_gpt2_small_is_that_of_the_table() -> None:
    from curvlinops_plus.blocks.plan import make_plan
    from curvlinops_plus.risk.layers import find_layers

    model = gpt2_small()
    found = memory.memory_of(make_plan(find_layers(model, dict(model.named_parameters())), EKFAC, EKFAC))
    assert len(found.layers) == 48
    factors = sum(needs.kept for needs in found.kfac.values()) / 2**30
    values = sum(needs.kept for needs in found.ekfac.values()) / 2**30 - factors
    assert (round(factors, 2), round(values, 2)) == (1.21, 0.32)
    assert 2 * factors + values < found.computing / 2**30 < 1.05 * (2 * factors + values)  # and rows that wait
    assert "all, GiB" in str(found)


def test_too_little_memory_is_said_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("mlp")
    monkeypatch.setattr(memory, "_LITTLE", 0)
    monkeypatch.setattr(memory, "_free", lambda device: 1000)
    with pytest.warns(
        CurvatureWarning, match=r"are free on cpu; '.*' takes .*max_bytes=.*split=.*memory\(\)\) lists all"
    ):
        curvature(p.risk(), KFAC)
    monkeypatch.setattr(memory, "_free", lambda device: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CurvatureWarning)
        curvature(p.risk(), KFAC)
    monkeypatch.undo()
    assert memory._free(torch.device("cpu")) or not Path("/proc/meminfo").exists()


@quiet
def test_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "processes.md").read_text(encoding="utf-8")
    section = page[page.index("## More than memory") : page.index("## Cost")]
    namespace: dict[str, object] = {"__name__": "processes"}
    with torch.random.fork_rng():
        for code, expected in re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", section, flags=re.DOTALL):
            printed = StringIO()
            with redirect_stdout(printed):
                exec(compile(code, "processes.md", "exec"), namespace)
            assert printed.getvalue() == expected


# -------------------------------------------------------------------------------------------------------------- offload


@pytest.mark.parametrize("kind", ["KFAC", "EKFAC", "FullBlock", "DiagonalBlock", "TNT", "ScaledIdentity"])
@pytest.mark.parametrize("separate", [False, True])
def test_offloaded_blocks_have_all_closed_forms(kind: str, separate: bool, tmp_path: Path) -> None:
    p = problem("mlp")
    K = p.curvature(APPROXIMATIONS[kind], separate_weight_and_bias=separate)
    away = K.offload(f"disk:{tmp_path}")
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    close(away @ v, K @ v)
    for name in ("trace", "frobenius_norm"):
        close(getattr(away, name), getattr(K, name))
    close(away.to_dense(), K.to_dense())
    close(away.diagonal(), K.diagonal())
    close(away.eigenvalues(), K.eigenvalues())
    close(away.shift(0.1).logdet, K.shift(0.1).logdet)
    close((2 * away).inverse(0.1) @ v, (2 * K).inverse(0.1) @ v)
    close(away.power(0.5, 0.1) @ v, K.power(0.5, 0.1) @ v)
    close(away.inverse((0.1, 0.2)) @ v, K.inverse((0.1, 0.2)) @ v)
    close(away.inverse(0.1, use_heuristic_damping=True) @ v, K.inverse(0.1, use_heuristic_damping=True) @ v)
    close((away + K) @ v, 2 * (K @ v))
    close((away + away).inverse(0.1) @ v, (K + K).inverse(0.1) @ v)
    close(away.operator[:5, :5].to_dense(), K.operator[:5, :5].to_dense())
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


def test_what_can_not_be_offloaded_is_refused_by_name(tmp_path: Path) -> None:
    p = problem("mlp")
    K = p.curvature(KFAC)
    for wrong, words in (("disk:", "names no folder"), ("nowhere", 'Expected "cpu", another device, or "disk:folder"')):
        with pytest.raises(ValueError, match=words):
            K.offload(wrong)
        with pytest.raises(ValueError, match=words):
            curvature(p.risk(), KFAC, offload=wrong)
    with pytest.raises(FileNotFoundError):
        K.offload(f"disk:{tmp_path}/a/b")
    with pytest.raises(ValueError, match="is for eigenvectors, and no block has some: those of EKFAC do"):
        K.offload(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Expected a dtype in floating point"):
        p.curvature(EKFAC).offload(dtype=torch.int8)
    K.replace_blocks({name: Dense(block.to_dense()) @ Dense(block.to_dense()) for name, block in K.blocks.items()})
    with pytest.raises(ValueError, match=r'block ".*": A block of type Product can\'t be saved'):
        K.offload(f"disk:{tmp_path}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_eigenvectors(dtype: torch.dtype) -> None:
    """Half the memory for an error of the order of the rounding; eigenvalues and trace stay what they are."""
    p = problem("attention")
    for kind in (EKFAC, EKFAC.using(split=4)):
        K = p.curvature(kind)
        rounded = K.offload(dtype=dtype)
        exact, found = K.to_dense(), rounded.to_dense()
        eps = torch.finfo(dtype).eps
        assert 0 < (found - exact).norm() < eps * exact.norm()
        close(found.trace(), K.trace, 1e-12)
        assert torch.equal(rounded.trace, K.trace)
        assert torch.equal(rounded.inverse(0.1).logdet, K.inverse(0.1).logdet)
        inverse, twin = rounded.inverse(0.1), K.inverse(0.1).to_dense()
        assert (inverse.to_dense() - twin).norm() < eps * twin.norm()
        halves = [stored for block in rounded.blocks.values() for stored in _kept(block)]
        assert {t.dtype for t in halves if t.ndim > 1} == {dtype}


def _kept(block: Any) -> list[Tensor]:
    leaves = tree_leaves(block._state) if isinstance(block, Offloaded) else []
    return [stored._kept for stored in leaves if isinstance(stored, Stored)]


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
    """Bytes that are taken for KFAC and EKFAC at once and in groups, and for taking over a state and using it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(torch.randn(32, WIDTH), torch.randint(4, (32,)))])
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
        path, loaded = f"{folder}/state", []
        model = nn.Linear(2500, 2500)
        K = curvature(EmpiricalRisk(model, nn.MSELoss(), ()), KFAC, compute=False)
        eye = torch.eye(2501)
        factors = {"input_covariances": {"": eye}, "gradient_covariances": {"": eye[1:, 1:]}}
        save({**K.state_dict(), "examples": 1, "blocks": {}, **factors}, path)
        found["file"] = Path(path).stat().st_size
        restore = BlockwiseLinearOperator.from_state_dict
        restore(load(path), model, None)  # what is loaded at first use
        found["taken over"] = growth(lambda: loaded.append(restore(load(path), model, None)))
        found["used"] = growth(lambda: loaded[0] @ torch.ones(K.shape[0]))
    return found


@linux
def test_groups_take_less_and_states_are_mapped() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    found = json.loads(printed.splitlines()[-1])
    batch = 2**23  # of inputs, gradients, graphs and LAPACK's work on one matrix
    for kind in ("KFAC", "EKFAC"):
        assert found[f"{kind} at once"] > 0.8 * found[f"{kind} needs"] / (2 if kind == "EKFAC" else 1), found
        assert found[f"{kind} in groups"] < found[f"{kind} needs"] / 5 + batch, found
    assert found["taken over"] < found["file"] / 10, found
    assert found["used"] > found["file"] / 2, found


if __name__ == "__main__":
    print(json.dumps(measured()))
