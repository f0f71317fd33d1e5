"""The code of README, of every page of docs/ and of the notebooks of examples/ runs as it is pasted,
block after block, and prints what the page says. With an emulated GPU new tensors are on it, as after `set_default_device`.

A page is one namespace. What a block prints is compared with the ```text block that follows it, if
one does. Blocks of another language than `python` (such as `py`, code of other libraries) are shown
and not run.
"""

from __future__ import annotations

import doctest
import json
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from curvlinops_plus import CurvatureWarning
from curvlinops_plus.layer import RULES
from test.gpu import emulator
from test.helpers import DEVICE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
#: Pages that import what the package does not need.
NEEDS = {
    "huggingface": ("transformers", "peft", "accelerate"),
    "lightning": ("lightning",),
    "from_laplace_torch": ("torchmetrics", "laplace"),
    "sharpness": ("matplotlib",),
}
#: Pages that are not for a GPU as they stand.
ON_THE_CPU = {
    "huggingface": "its trainer is asked for the CPU",
    "lightning": "its trainer is asked for the CPU",
    "from_curvlinops": "the page adds NumPy's arrays and new tensors",
    "processes": "gloo can't send what an emulated GPU holds",
}
#: What `torchrun` says to one process by itself.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
#: Pages whose code takes more than a few seconds.
SLOW: set[str] = set()


def blocks(page: str) -> list[tuple[str, str | None]]:
    """Each block of code, and what the page says that it prints."""
    fence = re.compile(
        r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```$)?", flags=re.DOTALL | re.MULTILINE
    )
    found = [(code, expected or None) for code, expected in fence.findall(page)]
    assert len(found) == page.count("```python"), (
        "a block of code begins and ends with a line of its own"
    )
    return found


def cells(notebook: str) -> str:
    """The code of a notebook and what it printed, as a page."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "code":
            printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            said = f"```text\n{printed}```\n" if printed else ""
            parts.append(f"```python\n{''.join(cell['source'])}\n```\n{said}")
    return "".join(parts)


def agrees(expected: str, printed: str) -> bool:
    """Whether it was printed. Decimals may differ by a tenth, as processors round differently, and
    training goes on.
    """
    if doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
        return True
    decimal = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
    pairs = list(zip(decimal.findall(expected), decimal.findall(printed)))
    near = all(math.isclose(float(one), float(other), rel_tol=0.1) for one, other in pairs)
    return near and decimal.sub("#", expected).split() == decimal.sub("#", printed).split()


def run(page: str, name: str = "page") -> None:
    namespace: dict[str, object] = {"__name__": name}
    for number, (code, expected) in enumerate(blocks(page)):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(code, f"{name}, block {number}", "exec"), namespace)
        said = (
            printed.getvalue()
            .replace(f", device='{DEVICE}'", "")
            .replace(f" on {DEVICE}", " on cpu")
        )
        same = expected is None or agrees(expected, said)
        assert same, f"block {number} printed\n{said}\ninstead of\n{expected}"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Pages register layers, draw random numbers, and begin process groups."""
    before = dict(RULES)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)  # of layers without Kronecker factors
        yield
    RULES.clear()
    RULES.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def with_code() -> list[object]:
    found = []
    for path in PAGES:
        if blocks(path.read_text(encoding="utf-8")):
            found.append(
                pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW))
            )
    return found


@pytest.mark.parametrize("path", with_code())
def test_the_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what a page writes
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    for module in NEEDS.get(path.stem, ()):
        pytest.importorskip(module)
    if not emulator.is_installed():
        run(path.read_text(encoding="utf-8"), path.stem)
    elif path.stem in ON_THE_CPU:
        pytest.skip(ON_THE_CPU[path.stem])
    else:
        with DEVICE:
            run(path.read_text(encoding="utf-8"), path.stem)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")  # nothing is shown
    pytest.importorskip("matplotlib")
    if emulator.is_installed():
        pytest.skip("its data are on the CPU")
    page = cells(path.read_text(encoding="utf-8"))
    assert len(blocks(page)) > 5
    assert sum(expected is not None for _, expected in blocks(page)) > 5
    run(page, path.stem)


def test_code_fits_the_column_of_the_site() -> None:
    for path in PAGES:
        for code, _ in blocks(path.read_text(encoding="utf-8")):
            assert [line for line in code.splitlines() if len(line) > 88] == [], path.name


def test_a_page_that_says_something_else_fails() -> None:
    with pytest.raises(AssertionError, match="block 0 printed"):
        run("```python\nprint(1 + 1)\n```\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match="block 0 printed"):
        run("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match="block 0 printed"):
        run("```python\nprint('error', 1.3)\n```\n```text\nerror 1.1\n```\n")
    run("```python\nprint('error', 1.12)\n```\n```text\nerror 1.1\n```\n")
    with pytest.raises(NameError):
        run("```python\na = 1\n```\n\n```python\nb\n```\n")
    with pytest.raises(AssertionError, match="line of its own"):
        run("Code:```python\na = 1\n```\n")
    run("```py\nnot python\n```\n```python\nprint(1 + 1)\n```\n")
