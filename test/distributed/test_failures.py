"""What fails in one process raises in all, and nothing has changed."""

from __future__ import annotations

import re
from typing import Any

import pytest


@pytest.mark.parametrize("world", [2, 3])
def test_failures(workers: Any, world: int) -> None:
    words = {
        "data": rf"^Process {world - 1} of {world} failed in .*BlockwiseLinearOperator.*\n?.*OSError: the disk is full",
        "forward": rf"^Process {world - 1} of {world} failed.*ArithmeticError: no luck[^$]*in fail",
        "product": rf"^Process {world - 1} of {world} failed in .*GGN.*ArithmeticError: no luck",
        "nan": rf"^Process {world - 1} of {world} failed.*NumericsError: .*layer '0'",
        "loss": r"^The processes are in different places: .*the loss",
        "replicas": r"^The processes differ in model and loss.*'0.bias'.* in process 0, and .* in process",
        "empty": r"`data` has no examples in any of the",
        "afterwards": "True",
    }
    for found in workers.run(world, "failures"):
        assert found.keys() == words.keys()
        for name, pattern in words.items():
            assert re.search(pattern, found[name]), found[name]


def test_a_process_that_has_ended(three: Any) -> None:
    """The others say so, as soon as they would wait for it."""
    three.start(3, "lonely")
    found = three.answers(3)
    assert found[1] == "ended"
    assert all("lost contact" in found[rank] for rank in (0, 2)), found
