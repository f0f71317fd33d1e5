"""Sparse rows against the same rows written out, and the memory that they are for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvlinops_plus.layer.rows import SparseRows
from test.helpers import seeded


def written_out(rows: SparseRows) -> Tensor:
    """[B, S, i], by the definition."""
    B, S, L = rows.index.shape
    dense = torch.zeros(B, S, rows.size)
    for b in range(B):
        for s in range(S):
            for k in range(L):
                weight = 1.0 if rows.weight is None else rows.weight[b, s, k]
                if rows.kept is None or rows.kept[b, s]:
                    dense[b, s, rows.index[b, s, k]] += weight
    return dense


@st.composite
def sparse(draw: st.DrawFn, examples: int | None = None, size: int | None = None) -> SparseRows:
    """Few places, so that many entries meet; no examples, no positions and no entries are possible
    too.
    """
    B = draw(st.integers(0, 4)) if examples is None else examples
    S, L = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    size = draw(st.integers(1, 6)) if size is None else size
    generator = seeded(draw(st.integers(0, 999)))
    index = torch.randint(size, (B, S, L), generator=generator)
    weight = torch.randn(B, S, L, generator=generator) if draw(st.booleans()) else None
    kept = torch.rand(B, S, generator=generator) < 0.6 if draw(st.booleans()) else None
    return SparseRows(index, weight, size, kept)


def gradients(rows: SparseRows, V: int, o: int) -> tuple[Tensor, Tensor]:
    generator = seeded()
    B, S, _ = rows.shape
    return torch.randn(V, B, S, o, generator=generator), torch.randn(o, o, generator=generator)


def close(ours: Tensor, twin: Tensor) -> None:
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, twin, rtol=1e-12, atol=1e-12)


def check(rows: SparseRows, V: int = 2, o: int = 3) -> None:
    a = written_out(rows)
    g, Q = gradients(rows, V, o)
    kept = torch.ones(rows.shape[:2], dtype=torch.bool) if rows.kept is None else rows.kept
    close(rows.to_dense(), a)
    close(rows.sum(), a.sum((0, 1)))
    close(rows.square_sum(), a.square().sum((0, 1)))
    close(rows.mean_square(), (a.sum(1) / kept.sum(1, keepdim=True).clamp(min=1)).square().sum(0))
    assert rows.count() == kept.sum()
    J = torch.einsum("vbso,bsi->vboi", g, a)
    close(rows.outer(g), J)
    close(rows.squared(g), J.square().sum((0, 1)))
    close(rows.squared(g, Q), (Q.T @ J).square().sum((0, 1)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sparse(), st.integers(0, 3), st.integers(1, 3))
def test_everything_is_that_of_the_rows_written_out(rows: SparseRows, V: int, o: int) -> None:
    check(rows, V, o)


def test_dtypes() -> None:
    index, g = torch.randint(5, (2, 3, 1), dtype=torch.int32), torch.randn(1, 2, 3, 4)
    rows = SparseRows(index, None, 5, dtype=torch.float32)
    assert rows.index.dtype == torch.int64
    assert {rows.sum().dtype, rows.square_sum().dtype, rows.mean_square().dtype} == {torch.float32}
    assert rows.outer(g).dtype == rows.squared(g).dtype == torch.float64  # the wider one
    assert (
        rows.outer(g.float()).dtype == rows.squared(g.float(), torch.eye(4)).dtype == torch.float32
    )
    wide = SparseRows(index, torch.ones(2, 3, 1), 5, dtype=torch.float32)
    assert wide.to_dense().dtype == torch.float32
    assert SparseRows.cat([rows, SparseRows(index, None, 5)]).dtype == torch.float64


# ------------------------------------------------------------------------------------------- memory
class Largest(TorchDispatchMode):
    """The largest tensor that any operation made, in numbers."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


@contextmanager
def at_most(numbers: int) -> Iterator[None]:
    with Largest() as largest:
        yield
    assert largest.numel <= numbers


def test_nothing_is_written_out() -> None:
    """50 000 tokens: neither rows B·S·i nor gradients per example B·i·o are ever there, only the
    result o·i.
    """
    V, B, S, L, o, size = 3, 64, 20, 2, 8, 50_000
    rows = SparseRows(
        torch.randint(size, (B, S, L)), torch.randn(B, S, L), size, torch.rand(B, S) < 0.8
    )
    g, Q = torch.randn(V, B, S, o), torch.randn(o, o)
    with at_most(size):
        assert rows.sum().shape == rows.square_sum().shape == rows.mean_square().shape == (size,)
    with at_most(max(size * o, V * B * S * L * o)):
        assert rows.squared(g, Q).shape == (o, size)


# ----------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("index", "options"),
    [
        (torch.zeros(2, 3, dtype=torch.long), {}),
        (torch.zeros(2, 3, 1), {}),
        (torch.zeros(2, 3, 1, dtype=torch.long), {"weight": torch.ones(3)}),
        (torch.zeros(2, 3, 1, dtype=torch.long), {"kept": torch.ones(3, dtype=torch.bool)}),
        (torch.zeros(2, 3, 1, dtype=torch.long), {"kept": torch.ones(2, 3)}),
    ],
)
def test_shapes_that_do_not_fit(index: Tensor, options: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"Expected integer indices \[B, S, L\], weights of the same shape and kept",
    ):
        SparseRows(**{"index": index, "weight": None, "size": 5, **options})


def test_calls_with_more_and_fewer_entries_are_joined() -> None:
    parts = [SparseRows(torch.tensor([[index]]), None, 5) for index in ([1], [4, 2])]
    assert torch.equal(
        SparseRows.cat(parts).to_dense(), torch.cat([part.to_dense() for part in parts], 1)
    )
