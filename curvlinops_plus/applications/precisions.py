"""Prior precisions: one for all parameters, for each block or for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import BlockDiagonal, Dense, Diagonal
from curvlinops_plus.options import tensor_of

Precision = float | Tensor | Mapping[str, Any]


class Precisions(NamedTuple):
    """Prior precisions, and which parameters have which.

    Attributes:
        names: Of the precisions; None of a single one for all.
        values: [h], in double precision.
        groups: Block name to the number of its precision, 0-d, or of that of each of its entries.
    """

    names: list[str] | None
    values: Tensor
    groups: dict[str, Tensor]

    def of_blocks(self) -> dict[str, Tensor]:
        """Block name to its precision: one number, or one for each of its entries."""
        return {name: self.values[group] for name, group in self.groups.items()}


def precisions_of(prior: Precision, blocks: BlockDiagonal) -> Precisions:
    """The precisions that a user gave, for the blocks of a curvature.

    Raises:
        ValueError: If one is not positive and finite, or the names are others.
        UnsupportedError: If there are several within a block without a closed form for that.
    """
    by_name = blocks.blocks
    shapes = blocks.in_space.shapes
    if not isinstance(prior, Mapping):
        value = positive(prior, "prior_precision")
        return Precisions(None, value[None], dict.fromkeys(by_name, torch.tensor(0)))
    values = {name: positive(v, f"prior_precision[{name!r}]") for name, v in prior.items()}
    names = list(values)
    stacked = torch.stack([*values.values()]) if values else torch.zeros(0)
    if values.keys() == by_name.keys():
        groups = {name: torch.tensor(names.index(name)) for name in by_name}
        return Precisions(names, stacked, groups)
    if values.keys() != shapes.keys():
        raise ValueError(
            f"prior_precision has the names {list(values)}; expected the blocks "
            f"{list(by_name)}, or the parameters {list(shapes)}."
        )
    sizes = torch.tensor([shape.numel() for shape in shapes.values()])
    numbers = torch.tensor([names.index(name) for name in shapes])
    of_entry = numbers.repeat_interleave(sizes)
    groups = {}
    for name, positions in blocks.positions().items():
        group = of_entry[positions.cpu()]
        if len(group.unique()) == 1:
            group = group[0]
        elif not isinstance(by_name[name], (Dense, Diagonal)):
            raise UnsupportedError(
                f'Block "{name}" is a {type(by_name[name]).__name__} of several parameters: '
                "give one precision for each block, or make K with "
                "separate_weight_and_bias=True."
            )
        groups[name] = group
    return Precisions(names, stacked, groups)


def as_float(value: Any) -> float:
    """A number, or a 0-d tensor, as a number."""
    return float(torch.as_tensor(value).detach())


def positive(value: Any, name: str) -> Tensor:
    """A positive finite number as a 0-d tensor in double precision.

    Raises:
        ValueError: If it is none; `name` says what it is.
    """
    precision = tensor_of(name, value).double()
    if precision.ndim or not 0 < float(precision.detach()) < float("inf"):
        raise ValueError(f"{name} is {value!r}; expected one positive finite number.")
    return precision
