"""Linear layers: their inputs are the rows, with any number of shared positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from curvlinops_plus.layer.registry import register_rule
from curvlinops_plus.layer.rule import AffineRule


@register_rule(nn.Linear)
class LinearRule(AffineRule):
    """`nn.Linear` on `x [B, *positions, i]`: the positions between examples and features share the
    weight.

    Example:
        >>> import torch
        >>> layer, x = nn.Linear(3, 2), torch.rand(4, 5, 6, 3)
        >>> LinearRule().inputs(layer, x).shape
        torch.Size([4, 30, 3])
    """

    #: Whether the weight is stored as `[i, o]`.
    transposed: bool = False

    def patterns(self, module: Any) -> dict[str, str]:
        """`W` or its transpose, then the bias as one more column."""
        patterns = {}
        if module.weight is not None:
            patterns["weight"] = "i o -> o i" if self.transposed else "o i -> o i"
        if module.bias is not None:
            patterns["bias"] = "o -> o 1"
        return patterns

    def lacks_examples(self, module: nn.Module, x: Tensor) -> bool:
        return x.ndim < 2

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *positions, i] -> [B, S, i]
        """The input, positions in one dimension (a view of a contiguous `x`).

        Raises:
            ValueError: If `x` has no example dimension.
        """
        if self.lacks_examples(module, x):
            raise ValueError(
                f"{module} got an input of shape {tuple(x.shape)}, expected [examples, ..., "
                f"{getattr(module, 'in_features', 'features')}]. Add the example dimension with "
                "`x[None]`."
            )
        return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])

    def grads(
        self, module: nn.Module, g: Tensor
    ) -> Tensor:  # [V, B, *positions, o] -> [V, B, S, o]
        """The output gradient, positions in one dimension (a view of a contiguous `g`)."""
        return g.reshape(*g.shape[:2], g.shape[2:-1].numel(), g.shape[-1])


@register_rule("transformers.pytorch_utils.Conv1D")
class Conv1DRule(LinearRule):
    """`Conv1D` of GPT and GPT-2: a linear layer whose weight `[i, o]` is stored transposed.

    It is registered by its full name, so that `transformers` need not be installed.
    """

    transposed = True
