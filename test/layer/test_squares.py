"""Squares of per-example gradients in a basis, against the formula, whichever side is rotated
first.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvlinops_plus.layer import squares
from curvlinops_plus.layer.squares import squared_gradients
from test.helpers import normal

F64 = torch.float64


def basis(kind: str, size: int, groups: tuple[int, ...]) -> Tensor | None:
    if kind == "none":
        return None
    return torch.linalg.qr(normal(*groups, size, size, seed=size))[0]


def dense(Q: Tensor | None, size: int) -> Tensor:
    return torch.eye(size, dtype=F64) if Q is None else Q


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kinds", [("full", "full"), ("full", "none"), ("none", "full")])
@pytest.mark.parametrize("groups", [(), (2,)])
@pytest.mark.parametrize("S", [1, 4, 9, 20])  # of 12 rows and 7 columns, or 7 and 12
@pytest.mark.parametrize(("o", "i"), [(12, 7), (7, 12)])
def test_squares_are_those_of_the_formula(
    o: int,
    i: int,
    S: int,
    groups: tuple[int, ...],
    kinds: tuple[str, str],
    bias: bool,
    one_by_one: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(squares, "_CHUNK_BYTES", 8 if one_by_one else 2000)
    g, a = normal(5, S, *groups, o), normal(5, S, *groups, i, seed=1)
    QG, QA = basis(kinds[0], o, groups), basis(kinds[1], i + bias, groups)
    extended = torch.cat([a, torch.ones_like(a[..., :1])], -1) if bias else a
    J = torch.einsum("ns...o,ns...i->n...oi", g, extended)
    expected = (dense(QG, o).mT @ J @ dense(QA, i + bias)).square().sum(0)
    before = g.clone(), a.clone()
    images = (
        g.movedim(1, -1).contiguous().movedim(-1, 1)
    )  # channels before positions, as of convolutions
    for rows in (g, images):
        found = squared_gradients(rows, a, QG, QA, bias)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        for total in (found, expected.clone()):  # as it is returned, and as it is stored
            added = squared_gradients(rows, a, QG, QA, bias, total)
            torch.testing.assert_close(added, 2 * expected, rtol=1e-11, atol=1e-11)
    assert torch.equal(g, before[0])
    assert torch.equal(a, before[1])
