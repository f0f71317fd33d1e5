"""What tests of the self-check share."""

from __future__ import annotations

import pytest


@pytest.fixture
def both_ways() -> None:
    """There is one way now."""
