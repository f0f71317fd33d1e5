"""One call of one module, as a `LayerBatch` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from curvlinops_plus.layer import AffineRule
from curvlinops_plus.risk.module_uses import ModuleUse


@dataclass(eq=False)
class Call:
    """One call of one module.

    Attributes:
        use: The module and its rule.
        args: Positional inputs, detached; per-example tensors carry the examples (times positions) on axis 0.
        kwargs: Keyword inputs, likewise.
        grads: Output gradients [V, N * positions, *out], None before they are known; a list of them for a module that
            returns several tensors.
        in_axes: Where the module itself has the examples, for each tensor among its inputs; None for one that all
            examples share.
        out_axes: The same for its outputs.
        kept: Of rows that had an order of their own: which of the N * P there are, [N, P]; None for all.
        rule: The rule of an affine layer.
    """

    use: ModuleUse
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grads: Any = None
    in_axes: Sequence[int | None] | None = None
    out_axes: Sequence[int] | None = None
    kept: Tensor | None = None
    rule: AffineRule = field(init=False)

    def __post_init__(self) -> None:
        self.rule = self.use.rule  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def input(self) -> Tensor:
        """What an affine layer multiplies: all that is noted of its inputs."""
        return self.args[0]
