"""The numbers of a curvature, block by block, as a table: `K.summary()`."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.plan import table
from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg import HeuristicDamping, LinearOperator
from curvlinops_plus.linalg.damping import check_damping
from curvlinops_plus.linalg.stacks import factors_of

if TYPE_CHECKING:
    from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator

_LABELS = ("block", "module", "parameters")
_NUMBERS = ("count", "trace", "largest", "rank", "condition")


class Summary(tuple[dict[str, Any], ...]):
    """Numbers of the blocks of a curvature, what `K.summary()` returns: one dictionary for each.

    Printed, it is a table with a last line for all blocks; in a notebook too.
    `pandas.DataFrame(K.summary())` makes a frame of it. The keys of a row are

    * `block`, `layer`, `module`: the name of the block, that of its layer, the class of the module
      (several, joined by "+", if they share parameters),
    * `parameters`, `count`: their names, joined by commas, and how many numbers they are,
    * `trace`, `largest`, `rank`: sum of the eigenvalues, the largest one, and how many don't count
      as zero, by the rule of `K.inverse()`,
    * `condition`: the largest absolute eigenvalue over the smallest, of the damped block if there
      is a damping; inf if one counts as zero.

    A number that has no closed form, and the condition of a block of zeros, is NaN; "-" in print.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import DiagonalBlock, EmpiricalRisk, curvature
        >>> data = [(torch.ones(4, 3), torch.zeros(4, 2))]
        >>> K = curvature(EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), data), DiagonalBlock)
        >>> K.summary()
        block   module  parameters    count  trace  largest  rank  condition
        weight  Linear  weight, bias      8      8        1     8          1
        all                               8      8        1     8
        >>> K.summary()[0]["rank"]
        8
    """

    __slots__ = ()

    def __str__(self) -> str:
        rows = self._texts()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        # Numbers are read from their last digits.
        left = len(_LABELS)
        aligned = [
            (*row[:left], *(t.rjust(w) for t, w in zip(row[left:], widths[left:]))) for row in rows
        ]
        return "\n".join(table(aligned))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        head, *body, last = self._texts()
        lines = ["<table>", _html_row(head, "th")]
        lines += [_html_row(row, "td") for row in body]
        return "\n".join([*lines, _html_row(last, "th"), "</table>"])

    def _texts(self) -> list[tuple[str, ...]]:
        """Head, rows and the last line, as texts."""
        rows: list[tuple[str, ...]] = [(*_LABELS, *_NUMBERS)]
        for row in self:
            names = (row["block"], row["module"], row["parameters"])
            rows.append((*names, *(_text(row[key]) for key in _NUMBERS)))
        totals: dict[str, Any] = {
            key: sum(row[key] for row in self) for key in ("count", "trace", "rank")
        }
        of_blocks = [row["largest"] for row in self if row["count"]]
        totals["largest"] = nan if any(map(isnan, of_blocks)) else max(of_blocks, default=nan)
        rows.append(("all", "", "", *(_text(totals[key]) for key in _NUMBERS[:-1]), ""))
        return rows


def summary_of(K: BlockwiseLinearOperator, damping: Any = None) -> Summary:
    """The numbers of all blocks; see `BlockwiseLinearOperator.summary`."""
    numbers = K.operator._tensors(_numbers_of, factors_of)
    if damping is not None:
        check_damping("damping", damping)
        of_blocks = damping.values() if isinstance(damping, Mapping) else [damping]
        if any(isinstance(of_block, (tuple, HeuristicDamping)) for of_block in of_blocks):
            damped: Any = K.inverse(damping)  # whose condition is that of the damped factors
        else:
            damped = K.operator.shift(damping)
        conditions = damped._tensors(_condition_of, factors_of)
        numbers = [torch.cat([n[:3], c[None]]) for n, c in zip(numbers, conditions, strict=True)]
    # All numbers in one transfer.
    read = dict(zip(K.operator.layouts, torch.stack(numbers).tolist(), strict=True))
    rows = []
    for entry in K.plan:
        for group in entry.layer.groups:
            trace, largest, rank, condition = read[group.name]
            row = {
                "block": group.name,
                "layer": entry.layer.name,
                "module": "+".join(type(use.owner).__name__ for use in entry.layer.uses),
                "parameters": ", ".join(group.keys),
                "count": group.layout.dim,
                "trace": trace,
                "largest": largest,
                "rank": rank if isnan(rank) else int(rank),
                "condition": condition,
            }
            rows.append(row)
    return Summary(rows)


def _numbers_of(block: LinearOperator) -> Tensor:  # -> [4], float64
    """Trace, largest eigenvalue, rank and condition of a block; NaN where there is no closed
    form, and of the eigenvalues of a block without entries.
    """
    unknown = torch.full((4,), nan, dtype=torch.float64, device=block.device)
    try:
        unknown[0] = block.trace.detach()
        values = block._counted().detach().double()
    except NoClosedForm:
        return unknown
    rank = (values != 0).sum().double()
    if not len(values):
        unknown[2] = rank
        return unknown
    return torch.stack([unknown[0], values.max(), rank, _ratio(values)])


def _condition_of(block: LinearOperator) -> Tensor:  # -> [], float64
    try:
        return _ratio(block._counted().detach().double())
    except NoClosedForm:
        return torch.tensor(nan, dtype=torch.float64, device=block.device)


def _ratio(values: Tensor) -> Tensor:
    """The largest absolute value over the smallest: inf if that is 0, NaN if all are or if there
    are none.
    """
    if not len(values):
        return values.new_tensor(nan)
    sizes = values.abs()
    return sizes.max() / sizes.min()


def _text(number: float) -> str:
    if isnan(number):
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.4g}"


def _html_row(texts: tuple[str, ...], tag: str) -> str:
    from html import escape

    left = len(_LABELS)
    cells = [f"<{tag}>{escape(text)}</{tag}>" for text in texts[:left]]
    align = ' style="text-align: right"'
    cells += [f"<{tag}{align}>{escape(text)}</{tag}>" for text in texts[left:]]
    return f"<tr>{''.join(cells)}</tr>"
