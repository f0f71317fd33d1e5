"""Sparse rows: the one-hot and bag-of-words rows that an embedding table is multiplied with.

The embedding of token 7 is the table times the 7-th unit vector. Such rows are stored as the
indices and values of their non-zero entries, and sums of products are formed for the indices that
occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops_plus.layer.squares import multiplied

# Work memory for the gradients of several vectors at a time.
_WORK_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows `a_{b,s} = Σ_l weight[b,s,l] · e_{index[b,s,l]}` of length `size`.

    Entries of one row with the same index add up. Rows that are not kept are zero, and are not
    counted in means.

    Attributes:
        index: Indices of the entries, integers `[B, S, L]`.
        weight: Values of the entries, `[B, S, L]`; None for ones.
        size: Length `i` of a row.
        kept: Rows that are counted, `[B, S]` bool; None for all.
        dtype: Dtype of the results; default that of `weight`, or else PyTorch's default dtype.

    Raises:
        ValueError: If the shapes don't fit together.

    Example:
        >>> rows = SparseRows(torch.tensor([[[0, 2], [1, 1]]]), None, 4)
        >>> rows.to_dense()
        tensor([[[1., 0., 1., 0.],
                 [0., 2., 0., 0.]]])
        >>> rows.square_sum()
        tensor([1., 4., 1., 0.])
    """

    index: Tensor
    weight: Tensor | None
    size: int
    kept: Tensor | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        index, weight, kept = self.index, self.weight, self.kept
        wrong = (
            index.ndim != 3
            or index.is_floating_point()
            or (weight is not None and weight.shape != index.shape)
        )
        if wrong or (
            kept is not None and (kept.shape != index.shape[:2] or kept.dtype != torch.bool)
        ):
            raise ValueError(
                "Expected integer indices [B, S, L], weights of the same shape and kept rows [B, "
                "S] of bool, got "
                f"{[None if t is None else (list(t.shape), t.dtype) for t in (index, weight, kept)]}."
            )
        # A frozen dataclass sets its fields this way.
        object.__setattr__(self, "index", index.long())
        if self.dtype is None:
            object.__setattr__(
                self, "dtype", torch.get_default_dtype() if weight is None else weight.dtype
            )
        elif weight is not None:
            object.__setattr__(self, "weight", weight.to(self.dtype))

    # ----------------------------------------------------------------------------------- other rows
    @property
    def shape(self) -> torch.Size:
        """`[B, S, i]`, the shape of the dense rows."""
        return torch.Size((*self.index.shape[:2], self.size))

    def masked(self, mask: Tensor) -> SparseRows:  # [B, S] bool
        """The same rows, keeping only those where `mask` is True."""
        kept = mask if self.kept is None else self.kept & mask
        return SparseRows(self.index, self.weight, self.size, kept, self.dtype)

    def times(self, factors: Tensor) -> SparseRows:  # [B]
        """The same rows, those of each example multiplied by a number."""
        return SparseRows(
            self.index, self._weights * factors[:, None, None], self.size, self.kept, self.dtype
        )

    def reshape(self, num_examples: int) -> SparseRows:
        """Rows `[N·p, S]` as `[N, p·S]`: `p` times as many positions per example.

        Example:
            >>> SparseRows(torch.zeros(6, 2, 1, dtype=torch.long), None, 5).reshape(3).shape
            torch.Size([3, 4, 5])
        """
        B, S, L = self.index.shape
        positions = B // num_examples * S
        return SparseRows(
            self.index.reshape(num_examples, positions, L),
            None if self.weight is None else self.weight.reshape(num_examples, positions, L),
            self.size,
            None if self.kept is None else self.kept.reshape(num_examples, positions),
            self.dtype,
        )

    @staticmethod
    def cat(parts: Sequence[SparseRows]) -> SparseRows:
        """Rows of several calls of a layer as more positions of the same examples.

        Example:
            >>> rows = SparseRows(torch.zeros(6, 2, 1, dtype=torch.long), None, 5)
            >>> SparseRows.cat([rows, rows]).shape
            torch.Size([6, 4, 5])
        """
        if len(parts) == 1:
            return parts[0]
        L = max(part.index.shape[2] for part in parts)
        ones = all(part.weight is None and part.index.shape[2] == L for part in parts)
        return SparseRows(
            torch.cat([_widened(part.index, L) for part in parts], 1),
            None if ones else torch.cat([_widened(part._weights, L) for part in parts], 1),
            parts[0].size,
            None
            if all(p.kept is None for p in parts)
            else torch.cat([part._kept for part in parts], 1),
            reduce(torch.promote_types, [part._dtype for part in parts]),
        )

    # ----------------------------------------------------------------------------------- statistics
    def to_dense(self) -> Tensor:  # [B, S, i]
        """The dense rows; those that are not kept are zero."""
        B, S, _ = self.index.shape
        dense = torch.zeros(B, S, self.size, dtype=self.dtype, device=self.index.device)
        return dense.scatter_add_(2, self.index, self._values)

    def sum(self) -> Tensor:  # [i]
        """`Σ a` over all rows."""
        return self._at_places(self.index.flatten(), self._values.flatten())

    def square_sum(self) -> Tensor:  # [i]
        """`Σ a²` over all rows: the diagonal of `Σ a aᵀ`."""
        if self.index.shape[2] == 1:  # no entries to add up
            return self._at_places(self.index.flatten(), self._values.square().flatten())
        B, S, _ = self.index.shape
        return self._square_sum(
            torch.arange(B * S, device=self.index.device).view(B, S), self._values
        )

    def mean_square(self) -> Tensor:  # [i]
        """`Σ_n ā_n²` of the means `ā_n` over an example's kept rows: the diagonal of `Σ_n ā_n
        ā_nᵀ`.
        """
        rows = self._kept.sum(1).clamp(min=1)[:, None, None]
        return self._square_sum(
            torch.arange(len(rows), device=rows.device)[:, None], self._values / rows
        )

    def count(self) -> float:
        """Number of kept rows."""
        return float(prod(self.index.shape[:2]) if self.kept is None else self.kept.sum())

    # ---------------------------------------------------------------------- products with gradients
    def outer(self, g: Tensor) -> Tensor:  # [V, B, S, o] -> [V, B, o, i]
        """`Σ_s g aᵀ` of each example as a dense tensor: V·B·o·i numbers.

        Example:
            >>> rows = SparseRows(torch.tensor([[[2], [2]]]), None, 3)
            >>> rows.outer(torch.tensor([[[[1.0], [5.0]]]]))
            tensor([[[[0., 0., 6.]]]])
        """
        g = g.to(torch.promote_types(g.dtype, self._dtype))
        V, B, _, o = g.shape
        J = g.new_zeros(V, B * self.size, o)
        places = torch.arange(B, device=g.device)[:, None, None] * self.size + self.index
        for at, weight in zip(
            places.unbind(2), self._values.to(g.dtype).unbind(2)
        ):  # one entry of each row at a time
            J.index_add_(1, at.flatten(), (g * weight[..., None]).flatten(1, 2))
        return J.view(V, B, self.size, o).mT

    def inner_products(self, g: Tensor, C: Tensor) -> Tensor:
        """Inner products of each example's `Σ_s g aᵀ` with matrices, [V, B, K]; only columns that
        occur are read.

        Args:
            g: Gradients of the layer's output [V, B, S, o].
            C: Matrices [K, o, i].

        Cost: memory for S·L·K·o numbers of an example, in pieces of a few megabytes.

        Example:
            >>> rows = SparseRows(torch.tensor([[[2], [0]]]), None, 3)
            >>> rows.inner_products(torch.tensor([[[[1.0], [10.0]]]]), torch.tensor([[[1.0, 2.0, 3.0]]]))
            tensor([[[13.]]])
        """
        g = g.to(torch.promote_types(g.dtype, self._dtype))
        columns, values = C.to(g.dtype).movedim(2, 0), self._values.to(g.dtype)  # [i, K, o]
        entries = self.index.shape[1] * self.index.shape[2] * columns[0].numel()
        step = max(1, _WORK_BYTES // max(1, entries * g.element_size()))
        parts = []
        for index, value, some in zip(
            self.index.split(step), values.split(step), g.split(step, 1), strict=True
        ):
            met = torch.einsum("bsl,bslko->bsko", value, columns[index])
            parts.append(torch.einsum("vbso,bsko->vbk", some, met))
        return torch.cat(parts, 1)

    def squared(
        self, g: Tensor, Q: Tensor | None = None
    ) -> Tensor:  # [V, B, S, o], [o, o] -> [o, i]
        """`Σ_{v,n} (Qᵀ Σ_s g a)²`, entry by entry: EKFAC's eigenvalues where the input factor is a
        diagonal.

        Only pairs of an example and an index that occur are formed.

        Args:
            g: Gradients of the layer's output, a row for each row of `a`.
            Q: Basis of the rows of W, None for the identity.

        Cost: memory for 2·B·S·L·o numbers at most.

        Example:
            >>> rows = SparseRows(torch.tensor([[[2], [2]], [[2], [0]]]), None, 3)
            >>> rows.squared(torch.ones(1, 2, 2, 1))
            tensor([[1., 0., 5.]])
        """
        g = g.to(torch.promote_types(g.dtype, self._dtype))
        total, values = g.new_zeros(self.size, g.shape[3]), self._values.to(g.dtype)[..., None]
        places, pair = self._pairs(torch.arange(len(self.index), device=g.device)[:, None])
        for row in g:
            J = g.new_zeros(len(places), g.shape[3]).index_add_(
                0, pair, (row[:, :, None] * values).flatten(0, 2)
            )
            total.index_add_(0, places, multiplied(J, Q).square_())
        return total.T

    # ------------------------------------------------------------------------------------ internals
    @property
    def _dtype(self) -> torch.dtype:
        assert self.dtype is not None  # since __post_init__
        return self.dtype

    @property
    def _weights(self) -> Tensor:
        weight = self.weight
        return torch.ones_like(self.index, dtype=self.dtype) if weight is None else weight

    @property
    def _kept(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        return torch.ones(self.index.shape[:2], dtype=torch.bool, device=self.index.device)

    @property
    def _values(self) -> Tensor:  # [B, S, L]
        """The weights, 0 in rows that are not kept."""
        return (
            self._weights
            if self.kept is None
            else torch.where(self.kept[..., None], self._weights, 0)
        )

    def _pairs(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs of an index and a group that occur: the index of each, and which pair each entry
        is.

        Args:
            group: A number for each row, `[B, S]` or `[B, 1]`, less than `B·S`.
        """
        groups = max(1, self.index.shape[0] * self.index.shape[1])
        keys, pair = torch.unique(
            (self.index * groups + group[..., None]).flatten(), return_inverse=True
        )
        return keys // groups, pair

    def _square_sum(self, group: Tensor, values: Tensor) -> Tensor:
        """`Σ_k (Σ values)²` at each index, summed within groups of rows before squaring."""
        places, pair = self._pairs(group)
        return self._at_places(
            places, values.new_zeros(len(places)).index_add_(0, pair, values.flatten()).square()
        )

    def _at_places(self, places: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=values.device).index_add_(
            0, places, values
        )


def _widened(t: Tensor, L: int) -> Tensor:
    """Entries padded with weight 0 at index 0."""
    return t if t.shape[2] == L else F.pad(t, [0, L - t.shape[2]])
