"""The base class of the matrix-free operators of a risk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.exact.compiled import Compiled, OfBatch
from curvlinops_plus.exact.differentiable import differentiable
from curvlinops_plus.exact.passes import Passes
from curvlinops_plus.exact.reading import AddUp, Reading
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.operator import linear_in
from curvlinops_plus.options import flag
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


class RiskOperator(LinearOperator):
    """A matrix of an empirical risk, known by its products: a sum over batches, times the factor of
    the reduction.

    Args:
        risk: Model, loss, data and parameters.
        passes: Its products with one batch.
        check_deterministic: False: two evaluations of the model on a few examples need not agree.
    """

    _exponent = 1.0  # of the factor of the reduction, 0 for what does not depend on losses
    _seed: int | None = None  # of random numbers for each example, if there are some
    # Of the last time that the data were read: they tell the relative weights of several losses.
    _totals: Totals | None = None
    _compiled: Compiled | None = None  # its products, if that was asked for

    def __init__(
        self, risk: EmpiricalRisk, passes: Passes, check_deterministic: bool | None
    ) -> None:
        self.risk = risk
        self.dtype = risk.dtype
        self.device = risk.device
        self._passes = passes
        flag("check_deterministic", check_deterministic, optional=True)
        self._compares_few = check_deterministic is not False

    def _products(self, X: Tensor, reading: Reading) -> Tensor:
        """The product with `X` before it is reduced, see `AddUp`."""
        raise NotImplementedError

    def _matmat(self, X: Tensor) -> Tensor:
        add_up: AddUp = self._products
        if self._compiled is not None and self._compiled.is_on(X):
            add_up = self._compiled
        product = partial(self._over_data, add_up)
        return linear_in(X, product, product)

    def _sum(self, of_batch: OfBatch, X: Tensor, reading: Reading) -> Tensor:
        """The sum of products with batches, a few vectors at a time."""
        rows = X.T.contiguous()
        total = rows.new_zeros(len(rows), self.shape[0])
        for batch in self._batches(reading, compares_few=False):
            for start in range(0, len(rows), self._passes.columns):
                part = slice(start, start + self._passes.columns)
                total[part] += of_batch(batch, rows[part], reading)
        return total.T

    def _batches(
        self, reading: Reading, purpose: str = "._matmat", compares_few: bool = True
    ) -> Iterator[Batch]:
        """The batches of the data; on the first one two evaluations of the model have to agree,
        once per risk.

        Args:
            purpose: Says in a progress bar what they are read for.
            compares_few: False if these evaluations are made elsewhere.
        """
        for batch in self.risk.batches(type(self).__name__ + purpose):
            if compares_few and self._compares_few and batch.first == 0:
                require_repeatable(self.risk, batch)
            if self._seed is not None:
                numbers = self.risk.processes.numbers(batch.first, batch.num_examples)
                reading.draws.of_examples(numbers, self.risk.device)
            yield batch

    @untraced
    def _over_data(self, add_up: AddUp, X: Tensor | None = None) -> Tensor:
        """What the data of all processes add up to, which multiply the same `X`, times the factor
        of the reduction. Collective. The state of model and data is as before.

        In float16 each column is sent times a power of two that brings its largest number to about
        1.

        Raises:
            NumericsError: If what comes out has left the range of float16.
        """
        vectors = {}
        power = None
        if X is not None:
            vectors["the vector (random ones need a generator of one seed)"] = X.detach()
            if self._passes.narrow:
                exponents = torch.frexp(X.detach().abs().amax(0))[1].clamp(-100, 100)
                power = torch.exp2(exponents.to(X.dtype))
                X = X / power
        compiled = isinstance(add_up, Compiled)
        with differentiable(self.risk, compiled):
            total, self._totals = self.risk.together(
                partial(self._read_once, add_up, X), same=partial(sums_of, vectors)
            )
        if self._exponent:
            total *= self.risk.scale(self._totals) ** self._exponent
        if power is not None:
            total *= power
        finite = math.isfinite(total.sum()) or bool(total.isfinite().all())
        if not finite and (X is None or bool(X.isfinite().all())):
            raise self._not_finite()
        return total

    def _read_once(self, add_up: AddUp, X: Tensor | None) -> tuple[Tensor, Totals]:
        """The sum over all processes, and the totals of the data.

        Forward mode that is missing or wrong shows in an error: the data are read again.
        """
        risk = self.risk
        passes = self._passes
        plain = self._exponent == 0
        weights = LossWeights(risk, plain=True) if plain else loss_weights(risk, self._totals)
        reading = Reading(weights, Draws(self._seed or 0))
        state = RandomState.now(self.device)
        try:
            total = add_up(X, reading)
        except (UnsupportedError, NumericsError, torch.OutOfMemoryError):
            raise
        except RuntimeError:
            if passes.twice or isinstance(risk.data, Iterator):  # which can't be read again
                raise
            state.restore()
            passes.twice = True  # all other errors come again
            reading = Reading(weights, Draws(self._seed or 0))
            total = add_up(X, reading)
        if passes.reached is False:
            raise_unreached()
        risk.processes.sum_([total])
        totals = reading.totals.over(risk.processes)
        weights.require(totals)
        return total, totals

    def _not_finite(self) -> NumericsError:
        if self._passes.narrow:
            return NumericsError(
                "A product leaves the range of float16, up to 65504; take model.float()."
            )
        bad = [key for key, p in self.risk.params.items() if not bool(p.isfinite().all())]
        cause = "Is there a root, a norm or a logarithm at zero?"
        if bad:
            cause = f"The parameters {bad[:5]} are not."
        return NumericsError(
            f"A product with {type(self).__name__} has NaN or infinite entries: derivatives of the "
            f"model or the loss are not finite on these data. {cause}"
        )

    @untraced
    def _compare_losses(self) -> None:
        """Compare the total losses of two passes."""
        risk = self.risk
        with preserve_state(risk.model, risk.data):
            require_same(risk, *risk.together(lambda: (loss_pass(risk), loss_pass(risk))))

    @untraced
    def _compare_products(self, add_up: AddUp, n: int) -> None:
        """Compare two products with the same vector [n].

        Raises:
            RuntimeError: If they differ.
        """
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(n, 1, generator=generator, dtype=self.dtype, device="cpu").to(self.device)

        def both(X: Tensor, reading: Reading) -> Tensor:
            """Random states go on between them: a loader that shuffles draws again."""
            again = replace(reading, totals=Totals())
            return torch.stack([add_up(X, reading), add_up(X, again)])

        one, two = self._over_data(both, v)
        tolerance = 1e-8 if coarsest_dtype(self.risk) == torch.float64 else 1e-3
        if bool((one - two).norm() <= tolerance * one.norm() + 1e-30):
            return
        raise RuntimeError(
            f"Two products of {type(self).__name__} with the same vector differ. Do the data come "
            "in another order each time (shuffle=True?), do they change from pass to pass (random "
            "augmentation), or does the model (call model.eval())? The data must come in the same "
            "order each time (shuffle=False). check_deterministic=False turns this check off."
        )

    @cached_property
    def _compiled_gradient(self) -> Any:
        """By compiled functions."""
        from curvlinops_plus.exact.gradient import Gradient

        return Gradient(self.risk)

    @untraced
    def gradient_and_loss(self) -> tuple[list[Tensor], Tensor]:
        """Gradient of the loss in the order of the parameters, and the loss, over all data; of a
        compiled operator by compiled functions.
        """
        both = self.risk.gradient_and_loss
        if self._compiled is not None:
            both = self._compiled_gradient.with_loss
        gradient, loss = both()
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
