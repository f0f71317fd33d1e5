"""The rule of parameters that are read anywhere inside a module, as by functions that no other rule is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.replay import replay_per_example
from curvlinops_plus.layer.rule import LayerRule, flat_pattern


class EnclosedRule(LayerRule):
    """Per-example gradients of parameters inside a module, its own or its children's, by running all of it again.

    Args:
        names: Their names in the module.

    Example:
        >>> import torch
        >>> module, g = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.ones(1, 4, 2)
        >>> rule = EnclosedRule(("0.weight",))
        >>> {name: tuple(J.shape) for name, J in rule.per_example_grads(module, (torch.ones(4, 3),), {}, g).items()}
        {'0.weight': (1, 4, 2, 3)}
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """All parameters side by side in one row."""
        named = dict(module.named_parameters(remove_duplicate=False))
        return {name: flat_pattern(named[name].ndim) for name in self.names}

    def replay(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        g: Tensor | Sequence[Tensor],
        in_axes: Sequence[int | None] | None = None,
        out_axes: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Run the module again for each example.

        Raises:
            UnsupportedError: If it can't be run with other values of the parameters.
        """
        try:
            return replay_per_example(module, args, kwargs, g, self.max_bytes, in_axes, out_axes, self.names)
        except (TypeError, RuntimeError) as error:
            raise UnsupportedError(
                f"{type(module).__name__} can't be run again for single examples with other values of "
                f"{list(self.names)}, which functions read inside: {error}. Leave these out of `params`, or give that "
                "use a module with a rule."
            ) from error
