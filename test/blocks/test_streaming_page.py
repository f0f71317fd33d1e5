"""The code of docs/streaming.md runs, block after block, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text(encoding="utf-8")


def errors(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"squared error per image (\d+\.\d+)\n", text)]


def test_blocks_run_and_train(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, object] = {"__name__": "page"}
    with torch.random.fork_rng():
        for block in blocks:
            exec(compile(block, "streaming.md", "exec"), namespace)
    printed = errors(capsys.readouterr().out)
    assert printed == pytest.approx(errors(PAGE), rel=0.1)  # rounding is another one with other processors
    assert max(printed) < 1.1
