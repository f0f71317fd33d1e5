"""Rows of packed sequences against PyTorch's own padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from curvlinops_plus.risk.function_calls import FunctionCalls
from curvlinops_plus.risk.packed import PackedOrders, PackedRows
from curvlinops_plus.risk.routes import GatheredRows
from test.cases import same
from test.helpers import normal


def followed(
    x: Tensor, lengths: Tensor, orders: PackedOrders | GatheredRows, batch_first: bool
) -> PackedSequence:
    def receive(function: object, args: tuple, kwargs: dict, _: int | None) -> object:
        out = function(*args, **kwargs)  # type: ignore[operator]
        orders.follow(function, args, kwargs, out)
        return out

    with FunctionCalls(receive):
        return pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("lengths", [[2, 4, 3], [4, 4, 4], [1, 1, 4]])
def test_rows_are_padded_in_the_order_of_the_examples(batch_first: bool, lengths: list) -> None:
    x = normal(3, 4, 2)
    for n, length in enumerate(lengths):
        x[n, length:] = 0
    orders = PackedOrders()
    given = x if batch_first else x.transpose(0, 1)
    packed = followed(given, torch.tensor(lengths), orders, batch_first)
    rows = orders.rows(packed.batch_sizes, 3)
    assert rows is not None
    same(rows.padded(packed.data), x)
    same(rows.padded(packed.data[None], 1), x[None])
    same(rows.lengths, lengths)
    states = normal(2, 3, 5)
    assert packed.sorted_indices is not None
    same(rows.unsorted(states[:, packed.sorted_indices], 1), states)


def test_what_is_not_known_is_said() -> None:
    """Sizes that nobody has packed; an order that leaves examples out."""
    orders = PackedOrders()
    assert orders.rows(torch.tensor([3, 1]), 3) is None
    packed = followed(normal(3, 4, 2), torch.tensor([2, 4, 3]), orders, True)
    assert orders.rows(packed.batch_sizes, 2) is None
    assert isinstance(orders.rows(packed.batch_sizes, 3), PackedRows)


def test_padded_again_they_are_sorted() -> None:
    rows = GatheredRows(3)
    packed = followed(normal(3, 4, 2), torch.tensor([2, 4, 3]), rows, True)
    places = rows.places(packed.data)
    assert places is not None
    same(places.index // 4, [1, 2, 0, 1, 2, 0, 1, 2, 1])
    assert places.total == 12
    assert rows.moves_rows(packed.data)
    args = (packed.data, packed.batch_sizes, True, 0.0, 4)
    out = torch._VF._pad_packed_sequence(*args)  # type: ignore[attr-defined]
    rows.follow(torch._VF._pad_packed_sequence, args, {}, out)  # type: ignore[attr-defined]
    places = rows.places(out[0])
    assert places is not None
    same(places.index, [1, 2, 0])
    x = pad_packed_sequence(packed, True)[0]
    assert x.shape == out[0].shape
