"""A factor that is block-diagonal: what is left of a large matrix if its far entries are not kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlinops_plus.linalg.damping import Scalar
from curvlinops_plus.linalg.factor import Factor
from curvlinops_plus.linalg.numerics import frobenius
from curvlinops_plus.linalg.space import Space
from curvlinops_plus.linalg.structure import Structure


class SplitFactor(Factor):
    """Matrices on the diagonal of a larger one, which may differ in size; zero between them.

    With a batch axis each of them is a batch, and so is the whole.

    Args:
        pieces: The matrices, from the first to the last.

    Raises:
        ValueError: If there are none, or they differ in batch, dtype or device.

    Example:
        >>> from curvlinops_plus.linalg import Dense, Kronecker
        >>> pieces = [Dense(torch.eye(2), Structure.PSD), Dense(2 * torch.eye(1), Structure.PSD)]
        >>> Kronecker(SplitFactor(pieces), Dense(torch.ones(1, 1), Structure.PSD)).diagonal()
        tensor([1., 1., 2.])
    """

    def __init__(self, pieces: Sequence[Factor]) -> None:
        if not pieces:
            raise ValueError("SplitFactor: expected at least one matrix.")
        first = pieces[0]
        for piece in pieces:
            if (piece.batch, piece.dtype, piece.device) != (first.batch, first.dtype, first.device):
                raise ValueError(
                    f"SplitFactor: expected matrices of one batch, dtype and device, got {first.label} and "
                    f"{piece.label}."
                )
        self.pieces = list(pieces)
        self.batch, self.size = first.batch, sum(piece.size for piece in pieces)
        self.rows = sum(piece.rows for piece in pieces)
        b = self.batch[0] if self.batch else 1
        out_space = None if self.rows == self.size else Space.flat(b * self.rows)
        super().__init__(Space.flat(b * self.size), first.dtype, first.device, out_space=out_space)

    @property
    def structure(self) -> Structure:
        return min(piece.structure for piece in self.pieces)

    @property
    def largest(self) -> int:
        return max(piece.largest for piece in self.pieces)

    def left(self, M: Tensor) -> Tensor:
        parts = M.split_with_sizes([piece.size for piece in self.pieces], -2)
        return torch.cat([piece.left(part) for piece, part in zip(self.pieces, parts, strict=True)], -2)

    def right(self, M: Tensor) -> Tensor:
        parts = M.split_with_sizes([piece.size for piece in self.pieces], -1)
        return torch.cat([piece.right(part) for piece, part in zip(self.pieces, parts, strict=True)], -1)

    def _matmat(self, X: Tensor) -> Tensor:
        return self.left(X.reshape(*self.batch, self.size, X.shape[1])).reshape(-1, X.shape[1])

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.adjoint()._matmat(X)

    def adjoint(self) -> SplitFactor:
        return self if self.structure >= Structure.SYMMETRIC else SplitFactor([p.adjoint() for p in self.pieces])

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> SplitFactor:
        return SplitFactor([piece.to(device, dtype) for piece in self.pieces])

    def matrices(self) -> Tensor:
        """All entries, `[*b, m, n]`, zeros too."""
        whole = torch.zeros(*self.batch, self.rows, self.size, dtype=self.dtype, device=self.device)
        row = column = 0
        for piece in self.pieces:
            whole[..., row : row + piece.rows, column : column + piece.size] = piece.matrices()
            row, column = row + piece.rows, column + piece.size
        return whole

    def _to_dense(self) -> Tensor:
        whole = self.matrices()
        return torch.block_diag(*whole) if self.batch else whole

    def traces(self) -> Tensor:
        return torch.stack([piece.traces() for piece in self.pieces]).sum(0)

    def norms(self) -> Tensor:
        return frobenius(torch.stack([piece.norms() for piece in self.pieces]), 0)

    def diagonals(self) -> Tensor:
        return torch.cat([piece.diagonals() for piece in self.pieces], -1)

    def slogdets(self) -> tuple[Tensor, Tensor]:
        signs, logarithms = zip(*(piece.slogdets() for piece in self.pieces), strict=True)
        return torch.stack(signs).prod(0), torch.stack(logarithms).sum(0)

    def eigh(self) -> tuple[Tensor, Factor]:
        values, bases = zip(*(piece.eigh() for piece in self.pieces), strict=True)
        return torch.cat(values, -1), SplitFactor(bases)

    def _inverse(self, damping: Scalar, retry: bool) -> SplitFactor:
        return SplitFactor([piece._inverse(damping, retry) for piece in self.pieces])

    def _power(self, p: float, damping: Scalar) -> SplitFactor:
        return SplitFactor([piece._power(p, damping) for piece in self.pieces])

    def _entrywise_square(self) -> SplitFactor:
        return SplitFactor([piece._entrywise_square() for piece in self.pieces])
