"""README's code runs, and what it shows of the main example is the example itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def is_example(block: str) -> bool:
    """Whether a block is (part of) the example script, which .ci/run runs as a whole."""
    script = (ROOT / "examples" / "laplace_digits.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    return all(line in script for line in lines)


def test_the_main_example_is_the_script() -> None:
    assert any(is_example(block) and len(block.splitlines()) >= 15 for block in blocks("python"))


def test_all_other_python_blocks_run() -> None:
    pytest.importorskip("sklearn")
    namespace: dict[str, object] = {"__name__": "readme"}
    others = [block for block in blocks("python") if not is_example(block)]
    assert others
    for block in others:
        exec(compile(block, "README.md", "exec"), namespace)


def test_the_two_commands_are_there() -> None:
    assert 'pip install -e ".[examples]" && python examples/laplace_digits.py' in README
    assert 'pip install -e ".[test]" && pytest' in README
