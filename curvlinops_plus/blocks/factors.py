"""How the Kronecker factors of a layer are kept: as matrices, as matrices on their diagonals, or as diagonals."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import count, takewhile
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import Dense, Diagonal, SplitFactor, Structure
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.risk import Layer

# A factor: its matrix or matrices `[*b, d, d]`, its diagonal `[*b, d]`, or the matrices on the diagonal of a split one.
Parts = Tensor | tuple[Tensor, ...]

# Rows that wait before they are multiplied, see `GramSum`.


class FactorForm(NamedTuple):
    """What is kept of a factor.

    Attributes:
        size: Its rows.
        batch: Its batch axis, () or (b,).
        bytes: Of its matrices, before `max_bytes` was asked.
        diagonal: Whether only the diagonal is kept.
        pieces: Rows of each matrix on its diagonal, if it is split; else of the only one.
        split: Whether matrices on the diagonal are kept, and nothing between them.
    """

    size: int
    batch: tuple[int, ...]
    bytes: int
    diagonal: bool
    pieces: tuple[int, ...]
    kept: int
    split: bool


def factor_forms(layer: Layer, max_bytes: int, split: int | None = None) -> dict[str, FactorForm]:
    """The form of `G`, and of `A` if there is a weight.

    Args:
        max_bytes: What takes more is diagonal, and so is `A` of sparse rows.
        split: Factors with more rows are split into as few matrices of equal size as possible, up to one row.
    """
    options = layer.accumulation_dtype.itemsize, max_bytes, split
    forms: dict[str, FactorForm] = {}
    for group in layer.groups:
        *batch, o, i = group.layout.matrix_shape
        forms["G"] = _form(o, (*batch,), False, *options)
        if layer.weight in group.keys:
            forms["A"] = _form(i, (*batch,), layer.sparse, *options)
    return forms


@lru_cache(1024)
def _form(
    size: int, batch: tuple[int, ...], sparse: bool, itemsize: int, max_bytes: int, split: int | None
) -> FactorForm:
    number = 1 if split is None else max(1, -(-size // split))
    pieces = tuple([size // number + (k < size % number) for k in range(number)])
    row = prod(batch) * itemsize
    bytes_ = row * sum([piece**2 for piece in pieces])
    if sparse or bytes_ > max_bytes:
        return FactorForm(size, batch, bytes_, True, pieces, row * size, False)
    return FactorForm(size, batch, bytes_, False, pieces, bytes_, number > 1)


def form_in_role(layer: Layer, role: int, forms: dict[str, FactorForm]) -> tuple[FactorForm | None, FactorForm]:
    """The forms of the input and of the gradient factor of a role: in a transposed one they change sides."""
    A, G = forms.get("A"), forms["G"]
    if layer.roles[role].transposed:
        assert A is not None
        return G, A
    return A, G


def slices(form: FactorForm, columns: int) -> list[slice]:
    """Where the columns of each part are, of rows that may lack some of the last columns."""
    found, start = [], 0
    for piece in form.pieces:
        found.append(slice(min(start, columns), min(start + piece, columns)))
        start += piece
    return found


def numbered(names: Container[str], name: str) -> list[str]:
    """Names of the parts of a split factor among others, in their order."""
    return list(takewhile(lambda part: part in names, (f"{name}.{k}" for k in count())))


def of_form(factor: Parts, form: FactorForm) -> Parts:
    """A factor of a role in the form that the layer's has; columns that the role does not have are zero."""
    if form.diagonal:
        assert isinstance(factor, Tensor)
        return torch.nn.functional.pad(factor, (0, form.size - factor.shape[-1]))
    if form.split:
        parts = [torch.diag(factor[at]) for at in slices(form, len(factor))] if isinstance(factor, Tensor) else factor
        return tuple(_padded(part, size) for part, size in zip(parts, form.pieces, strict=True))
    assert isinstance(factor, Tensor)
    return _padded(torch.diag(factor) if factor.ndim == 1 else factor, form.size)


def _padded(M: Tensor, size: int) -> Tensor:
    missing = size - len(M)
    return torch.nn.functional.pad(M, (0, missing, 0, missing)) if missing else M


def as_factor(factor: Parts, structure: Structure, axes: int = 2) -> Factor:
    """A factor as an operator; the tensors are shared.

    Args:
        structure: Of its matrices.
        axes: Of a matrix, with those of a batch: what has fewer is a diagonal.
    """
    if not isinstance(factor, Tensor):
        return SplitFactor([Dense(part, structure) for part in factor])
    return Dense(factor, structure) if factor.ndim == axes else Diagonal(factor)


def check_factor_sizes(accumulator: Accumulator, limit: int, option: str) -> None:
    """Refuse Kronecker factors that are larger than the option of that name allows.

    Raises:
        UnsupportedError: If a factor has more than `limit` bytes.
    """
    layer = accumulator.layer
    for name, form in factor_forms(layer, limit).items():
        if form.bytes > limit and not (name == "A" and layer.sparse):
            raise UnsupportedError(
                f"{layer.title}: its factor {name} is {form.size} x {form.size}, {form.bytes / 2**30:.1f} GiB, above "
                f"{option}={limit}. Use KFAC or EKFAC, which take its diagonal, or DiagonalBlock for this layer, leave "
                f"its parameters {list(layer.params)} out of `params`, or say "
                f"{type(accumulator).__name__}.using({option}=...)."
            )


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """All entries of a factor as one vector: for inner products."""
    return torch.cat([part.flatten() for part in parts])


def unstacked(vector: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Undoes `stacked`."""
    found = vector.split([part.numel() for part in like])
    return tuple(values.view_as(part) for values, part in zip(found, like, strict=True))
