"""The code of docs/reconfiguration.md runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "reconfiguration.md").read_text(encoding="utf-8")


def test_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {"__name__": "page"}
    with torch.random.fork_rng():
        for block in blocks:
            exec(compile(block, "reconfiguration.md", "exec"), namespace)
    assert float(namespace["mean"]) > 0  # type: ignore[arg-type]


def test_the_picture_is_there() -> None:
    for name in re.findall(r"!\[.*?\]\((.*?)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / name).is_file()
