"""The damped inverse of an estimated curvature, which is renewed every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from curvlinops_plus.blocks import BlockwiseLinearOperator, CurvatureEstimator
from curvlinops_plus.linalg import HeuristicDamping, LinearOperator
from curvlinops_plus.optim.kfac.curvature_options import CurvatureOptions
from curvlinops_plus.optim.kfac.refusals import common_damping

__all__ = ["DampedInverse", "complete"]


class DampedInverse:
    """`(c K + λI)ᵖ` of the curvature `K` at an estimator's last refresh, where `c` is the factor of each step's loss.

    Args:
        estimator: The statistics.
        options: Which inverse, and when it is renewed.

    Attributes:
        dampings: Key of a parameter to the damping of the last refresh; None before.
    """

    def __init__(self, estimator: CurvatureEstimator, options: CurvatureOptions) -> None:
        self._estimator, self._options = estimator, options
        self.dampings: dict[str, float] | None = None
        self._made: tuple[Any, LinearOperator] | None = None  # the inverse, with the dampings that it belongs to

    def refresh_if_due(self, step: int, dampings: Mapping[str, float], factor: float) -> bool:
        """Renew the inverse if its time has come.

        Args:
            step: The number of the step.
            dampings: Key of a parameter to the damping `λ` of its block.
            factor: `c`.
        """
        due = self.dampings is None or step % self._options.inverse_every == 0
        if due:
            self._estimator.refresh_by(lambda K: self._of_blocks(K, _divided(dampings, factor)))
            self.dampings, self._made = dict(dampings), None
        return due

    def restore(self, dampings: dict[str, float] | None) -> None:
        """Go on with the dampings of a refresh that the estimator remembers."""
        self.dampings, self._made = dampings, None

    def apply(self, gradients: Mapping[str, Tensor], dampings: Mapping[str, float], factor: float) -> dict[str, Tensor]:
        """`(c K + λI)ᵖ g` of the parameters that have gradient and curvature.

        Args:
            gradients: Key of a parameter to its gradient; where there is none, it counts as zero.
            dampings: As for `refresh_if_due`.
            factor: As there.
        """
        P = self._damped(dampings, factor)
        for layout in self._estimator.refreshed.operator.layouts.values():
            with_gradient = [key for key in layout.names if key in gradients]
            if 0 < len(with_gradient) < len(layout.names):
                raise ValueError(
                    f"Of the parameters {list(layout.names)}, which are one block of the curvature, only "
                    f"{with_gradient} have a gradient. Freeze the others before the optimizer is made, or leave them "
                    "out of its `params`."
                )
        found = P @ complete(P, gradients, self._estimator.risk.params)
        return _multiplied({key: t for key, t in found.items() if key in gradients}, factor**self._options.power)

    def product(self, vectors: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
        """`c K v`, with the statistics of the last refresh; zero where there is no curvature."""
        K = self._estimator.refreshed
        found = K @ complete(K, vectors, self._estimator.risk.params)
        return _multiplied({k: found[k] if k in found else v.new_zeros(v.shape) for k, v in vectors.items()}, factor)

    def _damped(self, dampings: Mapping[str, float], factor: float) -> LinearOperator:
        """`(K + λI / c)ᵖ` with these dampings; a factored one keeps those of the refresh."""
        if self._options.inverse == "factored":
            assert self.dampings is not None
            dampings = self.dampings
        dampings = _divided(dampings, factor)
        if self._made is None or self._made[0] != dampings:
            K, power = self._estimator.refreshed, self._options.power
            of_blocks = self._of_blocks(K, dampings)
            P = self._estimator.inverse(of_blocks) if power == -1 else K.power(power, of_blocks)
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


def _multiplied(vectors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return vectors if factor == 1 else {key: factor * t for key, t in vectors.items()}


def _divided(dampings: Mapping[str, float], factor: float) -> Mapping[str, float]:
    return dampings if factor == 1 else {key: damping / factor for key, damping in dampings.items()}
