"""What tests of the self-check share."""

from __future__ import annotations

import pytest

from curvlinops_plus.risk import self_check


@pytest.fixture(params=["through the batch", "by themselves"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are looked at through the batch itself, and a second time as large ones are."""
    if request.param == "by themselves":
        monkeypatch.setattr(self_check, "_LIGHT", 0)
