"""The damped inverse of an estimated curvature, which is renewed every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from curvlinops_plus.blocks import BlockwiseLinearOperator, CurvatureEstimator
from curvlinops_plus.linalg import BlockDiagonal, HeuristicDamping, Layout, LinearOperator
from curvlinops_plus.linalg.block_diagonal import multiply_parts
from curvlinops_plus.optim.kfac.curvature_options import CurvatureOptions
from curvlinops_plus.optim.kfac.refusals import common_damping


class DampedInverse:
    """`(c K + λI)ᵖ` of the curvature `K` at an estimator's last refresh, where `c` is the factor of each step's loss.

    Attributes:
        dampings: Key of a parameter to the damping of the last refresh; None before.
    """

    def __init__(self, estimator: CurvatureEstimator, options: CurvatureOptions) -> None:
        self._estimator, self._options = estimator, options
        self.dampings: dict[str, float] | None = None
        self._made: tuple[Any, BlockDiagonal] | None = None  # the inverse, with the dampings that it belongs to

    def refresh_if_due(self, step: int, dampings: Mapping[str, float], factor: float) -> bool:
        """Renew the inverse if its time has come, or a layer was called that it lacks.

        Args:
            dampings: Key of a parameter to the damping `λ` of its block.
            factor: `c`.
        """
        due = self.dampings is None or step % self._options.inverse_every == 0 or self._lacks_layers
        if due:
            self._estimator.refresh_by(lambda K: self._of_blocks(K, _divided(dampings, factor)))
            self.dampings, self._made = dict(dampings), None
        return due

    @property
    def _lacks_layers(self) -> bool:
        """Whether a layer was called, in any process, that the last refresh has not seen."""
        known = {entry.layer.name for entry in self._estimator.refreshed.plan}
        return any(self._estimator.plan[index].layer.name not in known for index in self._estimator.called_ever)

    def restore(self, dampings: dict[str, float] | None) -> None:
        """Go on with the dampings of a refresh that the estimator remembers."""
        self.dampings, self._made = dampings, None

    @property
    def layouts(self) -> dict[str, Layout]:
        """Name of a block to its layout, of those that have a curvature."""
        return self._estimator.refreshed.operator.layouts

    def apply(self, parts: Mapping[str, Tensor], dampings: Mapping[str, float], factor: float) -> dict[str, Tensor]:
        """`(c K + λI)ᵖ g` of some blocks.

        Args:
            parts: Name of a block to its part of the gradient.
            dampings: As for `refresh_if_due`.
            factor: As there.
        """
        return _multiplied(self._damped(dampings, factor), parts, factor**self._options.power)

    def product(self, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
        """`c K v` of some blocks, with the statistics of the last refresh."""
        return _multiplied(self._estimator.refreshed.operator, parts, factor)

    def inverted(self, dampings: Mapping[str, float]) -> Mapping[str, float]:
        """The damping in the inverse for each parameter, of those that are wanted now."""
        if self._options.inverse == "factored":
            assert self.dampings is not None
            return self.dampings
        return dampings

    def _damped(self, dampings: Mapping[str, float], factor: float) -> BlockDiagonal:
        """`(K + λI / c)ᵖ` with these dampings; a factored one keeps those of the refresh."""
        dampings = _divided(self.inverted(dampings), factor)
        if self._made is None or self._made[0] != dampings:
            K, power = self._estimator.refreshed, self._options.power
            of_blocks = self._of_blocks(K, dampings)
            P = self._estimator.inverse(of_blocks) if power == -1 else K.power(power, of_blocks)
            assert isinstance(P, BlockDiagonal)
            self._made = dict(dampings), P
        return self._made[1]

    def _of_blocks(self, K: BlockwiseLinearOperator, dampings: Mapping[str, float]) -> Any:
        """The damping of each block, from those of its parameters."""
        found = {name: common_damping(layout.names, dampings) for name, layout in K.operator.layouts.items()}
        return HeuristicDamping(found, min=0.0) if self._options.inverse == "factored" else found


def complete(
    operator: LinearOperator, vectors: Mapping[str, Tensor], params: Mapping[str, Tensor], lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """What an operator multiplies: tensors `[*lead, *shape]`, zero where none is given."""
    return {
        key: vectors[key] if key in vectors else params[key].new_zeros((*lead, *params[key].shape))
        for key in operator.in_space.names
    }


def _multiplied(K: BlockDiagonal, parts: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """`factor` times the products of some blocks."""
    found = multiply_parts(K, parts)
    return found if factor == 1 else {name: factor * t for name, t in found.items()}


def _divided(dampings: Mapping[str, float], factor: float) -> Mapping[str, float]:
    return dampings if factor == 1 else {key: damping / factor for key, damping in dampings.items()}
