"""The base class of the matrix-free operators of a risk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.exact.passes import Passes, differentiable
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.operator import linear_in
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch, raise_unreached, require_rereadable
from curvlinops_plus.risk.check import require_repeatable
from curvlinops_plus.risk.loss_passes import (
    LossWeights,
    coarsest_dtype,
    loss_pass,
    loss_weights,
    require_same,
)
from curvlinops_plus.risk.parameters import sums_of
from curvlinops_plus.risk.preserve import preserve_state, untraced

#: From columns `X [n, K]` (None for a dense matrix) and the relative weights of the losses, what
#: one pass over the data adds up, and the totals of the data.
Sweep: TypeAlias = Callable[[Any, LossWeights], tuple[Tensor, Totals]]


class RiskOperator(LinearOperator):
    """A matrix of an empirical risk, known by its products: a sum over batches, times the factor of
    the reduction.

    Args:
        risk: Model, loss, data and parameters.
        passes: Its products with one batch.
        check_deterministic: False: two evaluations of the model on a few examples need not agree.
    """

    _exponent = 1.0  # of the factor of the reduction, 0 for what does not depend on losses
    _totals: Totals | None = (
        None  # of the last pass over the data, which tell the relative weights of several losses
    )

    def __init__(
        self, risk: EmpiricalRisk, passes: Passes, check_deterministic: bool | None
    ) -> None:
        self.risk, self._passes, self._compares_few = risk, passes, check_deterministic is not False
        self.dtype, self.device = risk.dtype, risk.device

    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        """The product with `X` before it is reduced, see `Sweep`."""
        raise NotImplementedError

    def _matmat(self, X: Tensor) -> Tensor:
        product = partial(self._over_data, self._sweep)
        return linear_in(X, product, product)

    def _batches(self, what: str = "._matmat", draws: Draws | None = None) -> Iterator[Batch]:
        """The batches of the data; on the first one two evaluations of the model have to agree,
        once per risk.

        Args:
            what: Says in a progress bar what they are read for.
            draws: Random numbers, which go on with the examples of each batch.
        """
        for number, batch in enumerate(self.risk.batches(type(self).__name__ + what)):
            if self._compares_few and not number:
                require_repeatable(self.risk, batch)
            if draws is not None:
                draws.of_examples(
                    self.risk.processes.numbers(batch.first, batch.num_examples), self.risk.device
                )
            yield batch

    @untraced
    def _over_data(self, sweep: Sweep, X: Tensor | None = None) -> Tensor:
        """What a sweep adds up over the data of all processes, which multiply the same `X`, times
        the factor of the reduction. Collective. The state of model and data is as before.

        In float16 each column is sent times a power of two that brings its largest number to about
        1.

        Raises:
            NumericsError: If what comes out has left the range of float16.
        """
        risk, passes, power = self.risk, self._passes, None
        if X is not None and passes.narrow:
            power = torch.exp2(
                torch.frexp(X.detach().abs().amax(0))[1].clamp(-100, 100).to(X.dtype)
            )
            X = X / power

        def own() -> tuple[Tensor, Totals]:
            weights = (
                loss_weights(risk, self._totals)
                if self._exponent
                else LossWeights(risk, plain=True)
            )
            state = RandomState.now(self.device)
            try:
                total, totals = sweep(X, weights)
            except (UnsupportedError, NumericsError, torch.OutOfMemoryError):
                raise
            except RuntimeError:
                if passes.twice or isinstance(risk.data, Iterator):  # which can't be read again
                    raise
                state.restore()
                passes.twice = (
                    True  # an operation has no forward mode, or a wrong one; all else fails again
                )
                total, totals = sweep(X, weights)
            if passes.reached is False:
                raise_unreached()
            risk.processes.sum_([total])
            totals = totals.over(risk.processes)
            weights.require(totals)
            return total, totals

        vectors = (
            {}
            if X is None
            else {"the vector (random ones need a generator of one seed)": X.detach()}
        )
        with differentiable(risk):
            total, self._totals = risk.together(own, same=partial(sums_of, vectors))
        if self._exponent:
            total *= risk.scale(self._totals) ** self._exponent
        if power is not None:
            total *= power
        if not math.isfinite(total.sum()) and not bool(total.isfinite().all()):
            self._refuse_not_finite(X)
        return total

    def _refuse_not_finite(self, X: Tensor | None) -> None:
        if X is not None and not bool(X.isfinite().all()):
            return  # which is the caller's
        if self._passes.narrow:
            raise NumericsError(
                "A product leaves the range of float16, up to 65504; take model.float()."
            )
        bad = [key for key, p in self.risk.params.items() if not bool(p.isfinite().all())]
        cause = (
            f"The parameters {bad[:5]} are not."
            if bad
            else "Is there a root, a norm or a logarithm at zero?"
        )
        raise NumericsError(
            f"A product with {type(self).__name__} has NaN or infinite entries: derivatives of the "
            f"model or the loss are not finite on these data. {cause}"
        )

    @untraced
    def _check_loss(self) -> None:
        """Compare the total losses of two passes."""
        risk = self.risk
        with preserve_state(risk.model, risk.data):
            first, second = risk.together(lambda: (loss_pass(risk), loss_pass(risk)))
        require_same(risk, first, second)

    @untraced
    def _check_products(self, sweep: Sweep, n: int) -> None:
        """Compare two products with the same vector [n].

        Raises:
            NumericsError: If the product is not finite.
            RuntimeError: If they differ.
        """
        risk, name = self.risk, type(self).__name__
        v = torch.randn(n, 1, generator=torch.Generator().manual_seed(0), dtype=risk.dtype).to(
            risk.device
        )

        def both(X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
            """Random states go on between them: a loader that shuffles draws again."""
            (one, totals), (two, _) = sweep(X, weights), sweep(X, weights)
            return torch.stack([one, two]), totals

        one, two = self._over_data(both, v)
        if not bool(one.isfinite().all()):
            raise NumericsError(
                f"A product with {name} has NaN or infinite entries: does the model's output?"
            )
        tolerance = 1e-8 if coarsest_dtype(risk) == torch.float64 else 1e-3
        if bool((one - two).norm() <= tolerance * one.norm() + 1e-30):
            return
        raise RuntimeError(
            f"Two products of {name} with the same vector differ. Do the data come in another "
            "order each time (shuffle=True?), do they change from pass to pass (random "
            "augmentation), or does the model (call model.eval())? The data must come in the same "
            "order each time (shuffle=False). check_deterministic=False turns this check off."
        )

    @untraced
    def gradient_and_loss(self) -> tuple[list[Tensor], Tensor]:
        """Gradient of the loss in the order of the parameters, and the loss, over all data."""
        gradient, loss = self.risk.gradient_and_loss()
        return list(gradient.values()), loss


def require_own_data(risk: EmpiricalRisk, name: str) -> None:
    """Refuse an operator whose rows belong to the data, where these are read once or spread over
    processes.

    Raises:
        ValueError: If they can be read only once.
        UnsupportedError: Naming it.
    """
    require_rereadable(risk.data, f"{name} reads the data once per product")
    if risk.processes.world > 1:
        raise UnsupportedError(
            f"{name} can't be computed by several processes together: its rows belong to the data, "
            "of which each has a part. Make it of a risk without `processes=`, for the rows of "
            "this part."
        )
