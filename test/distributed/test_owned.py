"""Blocks that processes keep apart, each by one of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cases import APPROXIMATIONS
from cases import NETS as MADE

from curvlinops_plus import load


@pytest.mark.one_in(4)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_owned(workers: Any, approximation: str) -> None:
    """Everything that is said of them is what is said of blocks that all have; two of three processes have some."""
    for found in workers.run(3, "owned", "mlp", approximation, {}):
        wrong = {what: number for what, number in found.items() if not number < 1e-10}
        assert not wrong, wrong


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC", "FullBlock"])
def test_states(workers: Any, approximation: str, tmp_path: Path) -> None:
    """Saved by three processes, loaded by one and by two."""
    workers.run(3, "saved", approximation, str(tmp_path))
    files = sorted(file.name for file in tmp_path.glob("parts*"))
    assert files == [*(f"parts-{k}-of-3.safetensors" for k in (1, 2, 3)), "parts.safetensors"]
    for world in (1, 2):
        for found in workers.run(world, "restored", approximation, str(tmp_path)):
            assert max(found.values()) < 1e-10, found


NETS = ["strided cnn", "called twice", "tied", "language model", "called rarely"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in NETS if name in MADE])
def test_other_networks(workers: Any, name: str) -> None:
    for found in workers.run(2, "owned_nets", [name]):
        wrong = {what: number for what, number in found.items() if not number < 1e-8}
        assert not wrong, wrong


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("world", "sizes", "examples"), [(2, (), 21), (2, (3, 1), 21), (3, (), 2)])
def test_groups_of_layers(workers: Any, world: int, sizes: tuple[int, ...], examples: int, tmp_path: Path) -> None:
    """With split factors, with such as layers of one process share, with blocks elsewhere."""
    for found in workers.run(world, "apart", sizes, examples, str(tmp_path)):
        wrong = {what: number for what, number in found.items() if not number < 1e-10}
        assert not wrong, wrong


def test_what_does_not_fit(workers: Any) -> None:
    words = {
        "few eigenvectors": r"e-1\d$|^0",
        "no eigenvectors": r"dtype=torch.bfloat16 is for eigenvectors, and no block has some",
        "no place": r"Process 0 of 2 failed in offloading blocks",
        "one layer": r"layer '0': KFAC needs .* more than max_bytes=300",
        "afterwards": "True",
    }
    for found in workers.run(2, "apart_refusals"):
        assert found.keys() == words.keys()
        for name, pattern in words.items():
            assert re.search(pattern, found[name], re.DOTALL), (name, found[name])


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_said(workers: Any, world: int) -> None:
    words = {
        "label": r"a block \d+x\d+ of process \d",
        "vector": r"The processes differ in what they multiply: the vector .* in process 0, and",
        "sign": r"The processes differ in what they multiply: the vector .* in process 0, and",
        "singular": r"Process \d of \d failed in an inverse of OwnedBlock.*SingularMatrixError: block \"2\"",
        "derivative": r"Process 0 of \d failed in a product.*no derivatives, .* gather\(rank=None\)",
        "damping": r"Process 0 of \d failed in closed forms.*no derivatives",
        "sweeps": r"layer '0': finish\(\) of Twice returns another accumulator.*`sweeps` has to be",
        "folder": r"Process \d of \d failed in saving all.*is in a folder that does not exist",
        "different": r"The processes are in different places",
        "block": r"UnsupportedError: a block .* has no `@` here: only process \d has its entries.*gather\(\)",
        "number": r"UnsupportedError: a block .* has no `trace` here",
        "rank": r"ValueError: rank=17: expected one from 0 to",
        "not owned": r"ValueError: sharded=True writes a file for each process .*owned=True",
        "afterwards": "True",
    }
    for found in workers.run(world, "owned_failures"):
        assert found.keys() == words.keys()
        for name, pattern in words.items():
            assert re.search(pattern, found[name], re.DOTALL), (name, found[name])


def test_parts_of_different_states(workers: Any, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        workers.run(2, "saved", "KFAC", str(tmp_path / folder))
    part = "parts-1-of-2.safetensors"
    with pytest.raises(ValueError, match=r"is one of the parts of a state: load the file that has no numbers"):
        load(tmp_path / "one" / part)
    (tmp_path / "one" / part).replace(tmp_path / "two" / part)
    with pytest.raises(ValueError, match=r"its part parts-1-of-2\.safetensors were not saved together"):
        load(tmp_path / "two" / "parts.safetensors")


def test_operators_of_curvlinops(workers: Any) -> None:
    elsewhere = r"a block \d+x\d+ of process \d has no `{}` here: only process \d has its entries.*gather\(\)"
    names = [f"{side}_covariances{kind}" for side in ("input", "gradient") for kind in ("", "_eigenvectors")]
    words = {name: elsewhere.format(name) for name in (*names, "corrected_eigenvalues")} | {
        "apart": r"The eigenvectors of all layers are needed at once.*Use compute\(\)",
        "groups": r"max_bytes=10000: layers are computed in groups.*Use compute\(\)",
    }
    said: dict[str, str] = {}
    for away_from, found in workers.run(2, "classic"):
        assert max(away_from.values()) < 1e-10, away_from
        said |= found
    assert said.keys() == words.keys()
    for name, pattern in words.items():
        assert re.search(pattern, said[name], re.DOTALL), (name, said[name])
