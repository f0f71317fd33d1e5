"""Processes that are started once for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from test.gpu import emulator

ROOT = Path(__file__).parents[2]

WORLD = 2


@pytest.fixture(scope="session")
def elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What new processes make of all models that are tested, by their ranks; see `worker.py`."""
    from test.lives.lives import KINDS, operator_of
    from test.lives.models import MODELS

    folder = tmp_path_factory.mktemp("elsewhere")
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    tested = {call.params.get("ordinary") for call in calls if call is not None}
    there = [name for name in MODELS if name in tested and not MODELS[name].missing]
    states = {
        name: {kind: operator_of(name, kind).state_dict() for kind in KINDS} for name in there
    }
    torch.save(states, folder / "operators.pt")
    # New processes have no emulated GPU: gloo would send its numbers as those of a real one.
    environment = os.environ | {"PYTHONPATH": str(ROOT), emulator.VARIABLE: ""}
    command = [sys.executable, "-m", "test.lives.worker"]
    workers = [
        subprocess.Popen([*command, str(rank), str(WORLD), str(folder)], env=environment)
        for rank in range(WORLD)
    ]
    try:
        assert [worker.wait(timeout=600) for worker in workers] == [0] * WORLD
    finally:
        for worker in workers:
            worker.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
