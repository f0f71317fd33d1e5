"""Networks that do what recording must notice are computed right, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from curvlinops_plus.layer.linear import LinearRule
from test.fuzz.hostile import SIZES, verdicts, wrong
from test.fuzz.hostile_networks import HOSTILE


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", HOSTILE)
def test_right_or_refused(name: str) -> None:
    found = [wrong(verdicts(name, sizes)) for sizes in SIZES]
    assert found == [{}] * len(SIZES)


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the laws, and by the package before them."""
    plain: Callable[..., Any] = LinearRule.grads
    monkeypatch.setattr(LinearRule, "grads", lambda rule, module, g: 2 * plain(rule, module, g))
    name, sizes = "hook that changes an output", [3, 1, 2]
    assert "diagonal" in wrong(verdicts(name, sizes, self_check=False))
    assert wrong(verdicts(name, sizes)) == {}
    assert isinstance(HOSTILE["forces"][0](), nn.Module)
