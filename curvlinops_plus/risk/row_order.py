"""Rows in an order of their own: layers that see some rows of a batch, gathered by index, ragged or repeated.

`RowOrder` brings them into the form that all other layers have, N examples times P positions: examples with fewer rows
are filled up, and what fills them up does not count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import PaddedSequence, RecurrentRule
from curvlinops_plus.risk.module_uses import ModuleUse, title


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Which rows of a call belong to which example.

    Attributes:
        index: Numbers of the rows, example by example, [N * P]; 0 where an example has fewer.
        kept: Whether there is such a row, [N, P].
        num_rows: How many rows the call has.
        padded: Whether rows are the steps of a packed sequence, which become a padded one: N examples, and P steps on
            an axis of their own.
    """

    index: Tensor
    kept: Tensor
    num_rows: int
    padded: bool = False

    @classmethod
    def of(cls, examples: Tensor, num_examples: int) -> RowOrder:
        """The order of rows that belong to these examples.

        Args:
            examples: Number of the example of each row, [rows].
            num_examples: N.

        Example:
            >>> order = RowOrder.of(torch.tensor([1, 0, 1]), 2)
            >>> order.rows(torch.tensor([5, 6, 7]), 0), order.kept.tolist()
            (tensor([6, 0, 5, 7]), [[True, False], [True, True]])
        """
        counts = examples.bincount(minlength=num_examples)
        P = max(1, int(counts.max())) if num_examples else 1
        kept = torch.arange(P, device=counts.device) < counts[:, None]
        index = torch.zeros_like(kept, dtype=torch.long)
        index[kept] = examples.argsort(stable=True)
        return cls(index.flatten(), kept, len(examples))

    @classmethod
    def of_packed(cls, packed: PackedSequence) -> RowOrder:
        """The order of a packed sequence: all first steps, then all second ones, of the examples that have them."""
        steps = packed.batch_sizes.tolist()
        first = torch.arange(steps[0], device=packed.data.device)
        examples = first if packed.sorted_indices is None else packed.sorted_indices
        return replace(cls.of(torch.cat([examples[:n] for n in steps]), steps[0]), padded=True)

    def without_packed(self, inputs: Any) -> Any:
        """Inputs of a layer, with the steps of every example, filled up, instead of a packed sequence."""
        if isinstance(inputs, PackedSequence):
            return PaddedSequence(self.filled(inputs.data.detach(), 0).view(*self.kept.shape, -1), self.kept)
        if isinstance(inputs, dict):
            return {key: self.without_packed(value) for key, value in inputs.items()}
        return tuple(map(self.without_packed, inputs)) if isinstance(inputs, tuple) else inputs

    def filled(self, t: Tensor, axis: int) -> Tensor:  # [.., rows, ..] -> [.., N * P, ..]
        """The rows of an input, example by example; another row, or zeros, where an example has fewer."""
        if self.num_rows:  # not zeros: a layer may divide by their norm
            return t.index_select(axis, self.index)
        return t.new_zeros(*t.shape[:axis], len(self.index), *t.shape[axis + 1 :])

    def rows(self, t: Tensor, axis: int) -> Tensor:  # [.., rows, ..] -> [.., N * P, ..], or [.., N, P, ..] if padded
        """The rows of a gradient, example by example; zeros where an example has fewer."""
        absent = ~self.kept.view(-1, *[1] * (t.ndim - axis - 1))
        found = self.filled(t, axis).masked_fill(absent, 0)
        return found.unflatten(axis, self.kept.shape) if self.padded else found


def packed_order(use: ModuleUse, out: Any, num_examples: int) -> RowOrder | None:
    """The order of the rows of the packed sequence that a recurrent layer returned; None if it returned none.

    Raises:
        UnsupportedError: If there is not one sequence for each example.
    """
    if not (isinstance(use.rule, RecurrentRule) and isinstance(out, tuple) and isinstance(out[0], PackedSequence)):
        return None
    order = RowOrder.of_packed(out[0])
    if len(order.kept) != num_examples:
        raise UnsupportedError(
            f"{title(use.name)} ({type(use.owner).__name__}) returned {len(order.kept)} packed sequences in a batch of "
            f"{num_examples} examples; expected one for each. Pack those of all examples, or leave its parameters "
            f"{list(use.keys.values())} out of `params`."
        )
    return order


def refuse_functions(uses: Sequence[ModuleUse], names: Collection[str]) -> None:
    """Refuse an order of rows for `uses` by functions, as inside attention: no module runs that has rows.

    Raises:
        UnsupportedError: Naming the first one.
    """
    for use in uses:
        if any(n in ("", use.name) or use.name.startswith(f"{n}.") for n in names):
            raise UnsupportedError(
                f"example_of_row= can't be said for {title(use.name)} ({type(use.owner).__name__}), whose weights are "
                f"read by functions. Leave its parameters {list(use.keys.values())} out of `params`, or give the "
                "module a tensor with the examples on one axis."
            )


def read_order(examples: Any, name: str, rows: int, num_examples: int) -> RowOrder:
    """The order that a user's function gave for a call with so many rows.

    Raises:
        UnsupportedError: If it is no tensor of integers, one for each row, from 0 to N - 1.
    """
    where = f"example_of_row={{{name!r}: ...}}"
    if not isinstance(examples, Tensor) or examples.dtype not in (torch.int64, torch.int32):
        what = f"a {examples.dtype} tensor" if isinstance(examples, Tensor) else f"a {type(examples).__name__}"
        raise UnsupportedError(f"{where} returned {what}; expected a LongTensor [{rows}], one example for each row.")
    if examples.shape != (rows,):
        raise UnsupportedError(
            f"{where} returned shape {list(examples.shape)}, and the layer returned {rows} rows; expected one number "
            "of an example for each row."
        )
    if rows and not 0 <= int(examples.min()) <= int(examples.max()) < num_examples:
        raise UnsupportedError(
            f"{where} returned numbers from {int(examples.min())} to {int(examples.max())}; expected numbers of "
            f"examples, from 0 to {num_examples - 1}."
        )
    return RowOrder.of(examples.long(), num_examples)
