"""Tensors in flat buckets, symmetric matrices as one triangle, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def pack_triangle(M: Tensor) -> Tensor:  # [*b, d, d] -> [*b, d (d + 1) / 2 numbers as a rectangle]
    """The lower triangle of symmetric matrices as a rectangle, whose other half holds the rest of it.

    Source: the rectangular full packed format of Gustavson et al. 2010.

    Example:
        >>> pack_triangle(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        tensor([[3.],
                [1.],
                [2.]])
    """
    d = M.shape[-1]
    m, odd = d // 2, d % 2
    k = m + odd  # the first k columns of the triangle, and above them the transposed rest
    packed = M.new_empty(*M.shape[:-2], d + 1 - odd, k)
    packed[..., 1 - odd :, :] = M[..., :k]
    corner = packed[..., :m, odd:]
    corner.copy_(corner.tril(-1) + M[..., k:, k:].mT.triu())
    return packed


def unpack_triangle(packed: Tensor, d: int, out: Tensor | None = None) -> Tensor:  # -> [*b, d, d]
    """Undo `pack_triangle` for matrices of size `d`; into `out`, if it is given.

    Example:
        >>> M = torch.tensor([[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]])
        >>> bool((unpack_triangle(pack_triangle(M), 3) == M).all())
        True
    """
    m, odd = d // 2, d % 2
    k = m + odd
    M = packed.new_empty(*packed.shape[:-2], d, d) if out is None else out
    M[..., :k] = packed[..., 1 - odd :, :]
    M[..., k:, k:] = packed[..., :m, odd:].mT
    M[..., :k, k:] = M[..., k:, :k].mT
    for block in (M[..., :k, :k], M[..., k:, k:]):
        block.copy_(block.tril() + block.tril(-1).mT)
    return M


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together.

    Attributes:
        tensors: The tensors, of one dtype and device.
        symmetric: Which of them are symmetric matrices.
    """

    tensors: Sequence[Tensor]
    symmetric: Sequence[bool]

    def pack(self) -> Tensor:
        """All numbers in one flat tensor."""
        parts = [pack_triangle(t) if half else t for t, half in zip(self.tensors, self.symmetric, strict=True)]
        return torch.cat([part.reshape(-1) for part in parts])

    def unpack_(self, flat: Tensor) -> None:
        """Write the numbers of a flat tensor into the tensors."""
        for t, half in zip(self.tensors, self.symmetric, strict=True):
            part, flat = flat[: _size(t, half)], flat[_size(t, half) :]
            if half:
                d = t.shape[-1]
                shape = (d + 1, d // 2) if d % 2 == 0 else (d, d // 2 + 1)
                unpack_triangle(part.view(*t.shape[:-2], *shape), d, out=t)
            else:
                t.copy_(part.view(t.shape))


def buckets(tensors: Sequence[Tensor], symmetric: Sequence[bool], most: int) -> Iterator[Bucket]:
    """Tensors in their order, in buckets of one dtype and device and at most `most` bytes, or of one larger tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, t in enumerate(tensors):
        kinds.setdefault((t.dtype, t.device), []).append(index)
    for indices in kinds.values():
        taken: list[int] = []
        size = 0
        for index in indices:
            own = _size(tensors[index], symmetric[index]) * tensors[index].element_size()
            if taken and size + own > most:
                yield Bucket([tensors[k] for k in taken], [symmetric[k] for k in taken])
                taken, size = [], 0
            taken.append(index)
            size += own
        yield Bucket([tensors[k] for k in taken], [symmetric[k] for k in taken])


def _size(t: Tensor, half: bool) -> int:
    return t.numel() // t.shape[-1] * (t.shape[-1] + 1) // 2 if half and t.numel() else t.numel()
