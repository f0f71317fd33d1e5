"""Sparse rows: the one-hot and bag-of-words rows that an embedding table is multiplied with.

The embedding of token 7 is the table times the 7-th unit vector. Such rows are stored as the
indices and values of their non-zero entries, and sums of products are formed for the indices that
occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops_plus.layer.squares import multiplied
from curvlinops_plus.linalg.pieces import rows_at_once

# Work memory for columns of several matrices at a time.
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
        index = self.index
        weight = self.weight
        kept = self.kept
        fits = index.ndim == 3 and not index.is_floating_point()
        if weight is not None:
            fits = fits and weight.shape == index.shape
        if kept is not None:
            fits = fits and kept.shape == index.shape[:2] and kept.dtype == torch.bool
        if not fits:
            described = [
                t if t is None else (list(t.shape), t.dtype) for t in (index, weight, kept)
            ]
            raise ValueError(
                "Expected integer indices [B, S, L], weights of the same shape and kept rows [B, "
                f"S] of bool, got {described}."
            )
        dtype = self.dtype
        if dtype is None:
            dtype = torch.get_default_dtype() if weight is None else weight.dtype
        if weight is None:
            weight = torch.ones_like(index, dtype=dtype)
        # A frozen dataclass sets its fields this way.
        object.__setattr__(self, "index", index.long())
        object.__setattr__(self, "weight", weight.to(dtype))
        object.__setattr__(self, "dtype", dtype)

    # ----------------------------------------------------------------------------------- other rows
    @property
    def shape(self) -> torch.Size:
        """`[B, S, i]`, the shape of the dense rows."""
        return torch.Size((*self.index.shape[:2], self.size))

    def masked(self, mask: Tensor) -> SparseRows:  # [B, S] bool
        """The same rows, keeping only those where `mask` is True."""
        return replace(self, kept=mask if self.kept is None else self.kept & mask)

    def times(self, factors: Tensor) -> SparseRows:  # [B]
        """The same rows, those of each example multiplied by a number."""
        return replace(self, weight=self._values * factors[:, None, None])

    def reshape(self, num_examples: int) -> SparseRows:
        """The same rows as those of another number of examples, with more or fewer positions.

        Example:
            >>> SparseRows(torch.zeros(6, 2, 1, dtype=torch.long), None, 5).reshape(3).shape
            torch.Size([3, 4, 5])
        """
        B, S, L = self.index.shape
        positions = B * S // num_examples
        return replace(
            self,
            index=self.index.reshape(num_examples, positions, L),
            weight=self._values.reshape(num_examples, positions, L),
            kept=None if self.kept is None else self.kept.reshape(num_examples, positions),
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
        kept = None
        if any(part.kept is not None for part in parts):
            kept = torch.cat([part._kept for part in parts], 1)
        return SparseRows(
            torch.cat([_widened(part.index, L) for part in parts], 1),
            torch.cat([_widened(part._values, L) for part in parts], 1),
            parts[0].size,
            kept,
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
        # With one entry in each row there is nothing to add up before squaring.
        if self.index.shape[2] == 1:
            return self._at_places(self.index.flatten(), self._values.square().flatten())
        B, S, _ = self.index.shape
        rows = self.reshape(max(1, B * S))  # each row as an example of its own
        return rows.squared(rows._values.new_ones(1, *rows.index.shape[:2], 1))[0]

    def mean_square(self) -> Tensor:  # [i]
        """`Σ_n ā_n²` of the means `ā_n` over an example's kept rows: the diagonal of `Σ_n ā_n
        ā_nᵀ`.
        """
        num_rows = self._kept.sum(1).clamp(min=1)
        means = self.times(1 / num_rows.to(self._values))
        return means.squared(self._values.new_ones(1, *self.index.shape[:2], 1))[0]

    def count(self) -> float:
        """Number of kept rows."""
        if self.kept is None:
            return float(prod(self.index.shape[:2]))
        return float(self.kept.sum())

    # ---------------------------------------------------------------------- products with gradients
    def outer(self, g: Tensor) -> Tensor:  # [V, B, S, o] -> [V, B, o, i]
        """`Σ_s g aᵀ` of each example as a dense tensor: V·B·o·i numbers.

        Example:
            >>> rows = SparseRows(torch.tensor([[[2], [2]]]), None, 3)
            >>> rows.outer(torch.tensor([[[[1.0], [5.0]]]]))
            tensor([[[[0., 0., 6.]]]])
        """
        g = self._promoted(g)
        V, B, _, o = g.shape
        J = g.new_zeros(V, B * self.size, o)
        columns = self._examples() * self.size + self.index
        # One entry of each row at a time.
        for column, value in zip(columns.unbind(2), self._values.to(g.dtype).unbind(2)):
            J.index_add_(1, column.flatten(), (g * value[..., None]).flatten(1, 2))
        return J.view(V, B, self.size, o).mT

    def inner_products(self, g: Tensor, C: Tensor) -> Tensor:
        """Inner products of each example's `Σ_s g aᵀ` with matrices, [V, B, K]; only columns that
        occur are read.

        Args:
            g: Gradients of the layer's output [V, B, S, o].
            C: Matrices [K, o, i].

        Cost: memory for S·L·K·o numbers of an example, in pieces, on a CPU of a few megabytes.

        Example:
            >>> rows = SparseRows(torch.tensor([[[2], [0]]]), None, 3)
            >>> g, C = torch.tensor([[[[1.0], [10.0]]]]), torch.tensor([[[1.0, 2.0, 3.0]]])
            >>> rows.inner_products(g, C)
            tensor([[[13.]]])
        """
        g = self._promoted(g)
        columns = C.to(g.dtype).movedim(2, 0)  # [i, K, o]
        values = self._values.to(g.dtype)
        entries = self.index.shape[1] * self.index.shape[2] * columns[0].numel()
        step = rows_at_once(g.device, _WORK_BYTES, entries * g.element_size())
        products = []
        for start in range(0, len(self.index), step):
            examples = slice(start, start + step)
            Ca = torch.einsum("bsl,bslko->bsko", values[examples], columns[self.index[examples]])
            products.append(torch.einsum("vbso,bsko->vbk", g[:, examples], Ca))
        return torch.cat(products, 1)

    def squared(self, g: Tensor, Q: Tensor | None = None) -> Tensor:  # -> [o, i]
        """`Σ_{v,n} (Qᵀ Σ_s g a)²`, entry by entry: EKFAC's eigenvalues where the input factor is a
        diagonal.

        Only pairs of an example and an index that occur are formed.

        Args:
            g: Gradients of the layer's output [V, B, S, o].
            Q: Basis of the rows of W [o, o], None for the identity.

        Cost: memory for 2·B·S·L·o numbers at most.

        Example:
            >>> rows = SparseRows(torch.tensor([[[2], [2]], [[2], [0]]]), None, 3)
            >>> rows.squared(torch.ones(1, 2, 2, 1))
            tensor([[1., 0., 5.]])
        """
        g = self._promoted(g)
        o = g.shape[3]
        values = self._values.to(g.dtype)[..., None]
        # Pairs of an index and an example that occur, and which of them each entry is.
        num_examples = max(1, len(self.index))
        keys = self.index * num_examples + self._examples()
        keys, pair_of_entry = torch.unique(keys.flatten(), return_inverse=True)
        columns = keys // num_examples
        total = g.new_zeros(self.size, o)
        for g_v in g:
            terms = (g_v[:, :, None] * values).flatten(0, 2)
            J = g.new_zeros(len(columns), o).index_add_(0, pair_of_entry, terms)
            total.index_add_(0, columns, multiplied(J, Q).square_())
        return total.T

    # ------------------------------------------------------------------------------------ internals
    @property
    def _kept(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        return torch.ones(self.index.shape[:2], dtype=torch.bool, device=self.index.device)

    @property
    def _values(self) -> Tensor:  # [B, S, L]
        """The weights, 0 in rows that are not kept."""
        assert self.weight is not None  # since __post_init__
        if self.kept is None:
            return self.weight
        return torch.where(self.kept[..., None], self.weight, 0)

    def _promoted(self, g: Tensor) -> Tensor:
        """Gradients in the dtype of their products with rows."""
        assert self.dtype is not None  # since __post_init__
        return g.to(torch.promote_types(g.dtype, self.dtype))

    def _examples(self) -> Tensor:  # [B, 1, 1]
        """The number of each example."""
        return torch.arange(len(self.index), device=self.index.device)[:, None, None]

    def _at_places(self, places: Tensor, values: Tensor) -> Tensor:
        total = torch.zeros(self.size, dtype=self.dtype, device=values.device)
        return total.index_add_(0, places, values)


def _widened(t: Tensor, L: int) -> Tensor:
    """Entries padded with weight 0 at index 0."""
    return F.pad(t, [0, L - t.shape[2]])
