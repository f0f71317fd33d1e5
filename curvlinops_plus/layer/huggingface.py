"""Rules of Hugging Face's layers, registered by full name, so that `transformers` need not be installed."""

from __future__ import annotations

from torch import nn

from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.layer.rule_registry import register_rule


@register_rule("transformers.pytorch_utils.Conv1D")
class Conv1DRule(LinearRule):
    """`Conv1D` of GPT and GPT-2: a linear layer whose weight `[i, o]` is stored transposed, always with a bias.

    Example:
        >>> Conv1DRule().patterns(nn.Identity())
        {'weight': 'i o -> o i', 'bias': 'o -> o 1'}
    """

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """`W` transposed, then the bias as one more column."""
        return {"weight": "i o -> o i", "bias": "o -> o 1"}
