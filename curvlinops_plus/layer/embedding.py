"""Rules of `nn.Embedding` and `nn.EmbeddingBag`: their rows are one-hot vectors, or weighted sums
of them.

Row `t` of the table `W [vocabulary, d]` is `Wᵀ e_t`: as a matrix `[d, vocabulary]` the table
multiplies the unit vector of token `t`. Its input factor is a diagonal, the number of occurrences
of each token. See `SparseRows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.registry import register_rule
from curvlinops_plus.layer.rows import SparseRows
from curvlinops_plus.layer.rule import AffineRule


@register_rule(nn.Embedding)
class EmbeddingRule(AffineRule):
    """`nn.Embedding` on tokens `x [B, *positions]`: the positions share the table.

    Tokens at `padding_idx` have no gradient: their rows are not kept. `scale_grad_by_freq` rescales
    what PyTorch writes into `.grad`, which is then not a derivative: it is ignored here, as is
    `sparse`, which only sets how PyTorch stores a gradient. `max_norm` is refused.

    Example:
        >>> layer, x = nn.Embedding(10, 3, padding_idx=0), torch.tensor([[4, 2, 4], [7, 0, 0]])
        >>> rows = EmbeddingRule().inputs(layer, x)
        >>> rows.shape, rows.count()
        (torch.Size([2, 3, 10]), 4.0)
        >>> rows.square_sum()
        tensor([0., 0., 1., 0., 2., 0., 0., 1., 0., 0.])
    """

    sparse = True

    def check(self, module: Any) -> None:
        """Refuse `max_norm`.

        Raises:
            UnsupportedError: If it is set.
        """
        refuse_renormalization(module)

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """The table, transposed: one column per token."""
        return {"weight": "i o -> o i"}

    def inputs(self, module: Any, x: Tensor) -> SparseRows:  # [B, *positions] -> [B, S, i]
        """One unit vector for each token.

        Raises:
            ValueError: If `x` has no example dimension.
        """
        if x.ndim == 0:
            raise ValueError(
                f"{module} got an input of shape (), expected [examples, ...]. Add the example "
                "dimension with `x[None]`."
            )
        # The output at token t is Wᵀ e_t.
        tokens = x[..., None].flatten(1)
        kept = None if module.padding_idx is None else tokens != module.padding_idx
        return SparseRows(tokens[..., None], None, module.num_embeddings, kept, _dtype(module))

    def grads(self, module: Any, g: Tensor) -> Tensor:  # [V, B, *positions, d] -> [V, B, S, d]
        """The output gradient, positions in one dimension."""
        return g[:, :, None].flatten(2, -2)


@register_rule(nn.EmbeddingBag)
class EmbeddingBagRule(EmbeddingRule):
    """`nn.EmbeddingBag` with modes "sum" and "mean", in every form of call: one row with several
    entries per bag.

    The examples are the bags. The up to three inputs of a call become one tensor, see `input_of`.
    Entries at `padding_idx` are left out of the row and of the mean, and bags without any other
    entry are not kept. The input factor is the diagonal of `Σ a aᵀ / bags`. Other options are as
    for `EmbeddingRule`. Mode "max" gets the generic rule.

    Example:
        >>> layer = nn.EmbeddingBag(6, 3, mode="mean")
        >>> tokens, offsets = torch.tensor([4, 2, 4, 1]), torch.tensor([0, 2])
        >>> x = EmbeddingBagRule().input_of(layer, (tokens, offsets), {})
        >>> EmbeddingBagRule().inputs(layer, x).to_dense()
        tensor([[[0.0000, 0.0000, 0.5000, 0.0000, 0.5000, 0.0000]],
        <BLANKLINE>
                [[0.0000, 0.5000, 0.0000, 0.0000, 0.5000, 0.0000]]])
    """

    def refuses(self, module: Any) -> str | None:
        """Mode "max", which is not linear in the table."""
        if module.mode == "max":
            return (
                f"{type(module).__name__}(mode='max') is not linear in its table, so it has no "
                "Kronecker rule: use DiagonalBlock for this layer, or mode 'sum' or 'mean'"
            )
        return None

    def input_of(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The bags as one tensor, examples first.

        Returns:
            Integers `[B, L]`, -1 after the end of a bag. With `per_sample_weights`, pairs (token,
            weight) `[B, L, 2]` in float64, which represents both exactly. Either is returned
            unchanged if it is the only input.

        Raises:
            ValueError: If the input is no tensor, or has one dimension and comes without offsets.
        """
        named = {**dict(zip(("input", "offsets", "per_sample_weights"), args)), **kwargs}
        x: Any = super().input_of(module, (named.get("input"),), {})
        offsets = named.get("offsets")
        weights = named.get("per_sample_weights")
        if x.is_nested:
            offsets = x.offsets()[:-1]
            if weights is not None:
                weights = weights.values()
            x = x.values()
        elif module.include_last_offset and offsets is not None:
            offsets = offsets[:-1]
        if x.ndim == 1:
            if offsets is None:
                raise ValueError(
                    f"{module} got an input of shape {tuple(x.shape)} without `offsets`, which say "
                    "its bags."
                )
            place, present = _places_in_bags(len(x), offsets)
            x = torch.where(present, x[place], -1)
            if weights is not None:
                weights = weights[place]
        if weights is None:
            return x
        return torch.stack([x.double(), weights.detach().double()], -1)

    def inputs(self, module: Any, x: Tensor) -> SparseRows:  # [B, L] or [B, L, 2] -> [B, 1, i]
        """One row for each bag of what `input_of` returns."""
        tokens = x if x.ndim == 2 else x[..., 0].long()
        present = tokens >= 0
        if module.padding_idx is not None:
            present = present & (tokens != module.padding_idx)
        weight = present.to(_dtype(module))
        if x.ndim == 3:
            weight = torch.where(present, x[..., 1].to(weight.dtype), 0)
        # Entries at `padding_idx` don't count in a mean.
        if module.mode == "mean":
            weight = weight / present.sum(1, keepdim=True).clamp(min=1)
        return SparseRows(
            tokens.clamp(min=0)[:, None],
            weight[:, None],
            module.num_embeddings,
            present.any(1, keepdim=True),
        )

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, d] -> [V, B, 1, d]
        """The output gradient of each bag."""
        return g[:, :, None]


def _dtype(module: nn.Embedding | nn.EmbeddingBag) -> torch.dtype:
    return torch.promote_types(module.weight.dtype, torch.float32)


def _places_in_bags(entries: int, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the entries of each bag in a flat list, `[B, L]`, and which of them belong to
    the bag.
    """
    # A bag ends where the next one begins, the last one at the end of the list.
    lengths = torch.diff(starts, append=starts.new_tensor([entries]))
    longest = int(lengths.max()) if len(lengths) else 0
    step = torch.arange(longest, device=starts.device)
    places = starts[:, None] + step
    present = step < lengths[:, None]
    return places.clamp(max=max(0, entries - 1)), present


def refuse_renormalization(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse `max_norm`: a forward pass would shorten rows of the weight in place.

    Raises:
        UnsupportedError: If it is set.
    """
    if module.max_norm is not None:
        raise UnsupportedError(
            f"{module} shortens rows of its weight in place whenever it reads them. Set "
            "max_norm=None; rows that are still longer can be shortened before, "
            "w.copy_(torch.renorm(w, 2, 0, max_norm)) for its weight w."
        )
