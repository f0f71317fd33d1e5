"""The code of the pages about optimizers runs, block after block."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from curvlinops_plus.errors import CurvatureWarning

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["reconfiguration.md", "optimizer.md"]


def _run(page: str) -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, Any] = {"__name__": "page"}
    with torch.random.fork_rng():
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
    return namespace


def test_reconfiguration_runs() -> None:
    assert float(_run("reconfiguration.md")["mean"]) > 0


def test_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*are batch norm in training mode", CurvatureWarning)
        page = _run("optimizer.md")
    assert page["optimizer"].last_step.examples == 128
    assert capsys.readouterr().out == "128 False\n"  # as the page says


@pytest.mark.parametrize("page", PAGES)
def test_the_pictures_are_there(page: str) -> None:
    for name in re.findall(r"!\[.*?\]\((.*?)\)", (DOCS / page).read_text(encoding="utf-8")):
        assert (DOCS / name).is_file()
