"""Base classes of the matrix-free operators of a risk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.exact.passes import differentiable
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.operator import linear_in
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch, require_rereadable
from curvlinops_plus.risk.check import require_repeatable
from curvlinops_plus.risk.losses import LossWeights, coarsest_dtype, loss_pass, loss_weights, require_same
from curvlinops_plus.risk.preserve import preserve_state, training_modules, untraced
from curvlinops_plus.risk.replicas import sums_of
from curvlinops_plus.risk.risk import takes_risk


class RiskOperator(LinearOperator):
    """A matrix of an empirical risk, known by its products.

    Args:
        risk: Model, loss, data and parameters.
        check_deterministic: False: two evaluations of the model on a few examples need not agree.
    """

    @takes_risk
    def __init__(self, risk: EmpiricalRisk, check_deterministic: bool | None = None) -> None:
        self.risk, self._compares_few = risk, check_deterministic is not False
        self.dtype, self.device = risk.dtype, risk.device
        self._narrow = any(p.dtype == torch.float16 for p in risk.params.values())

    def _batches(self, what: str = "._matmat", draws: Draws | None = None) -> Iterator[Batch]:
        """The batches of the data; on the first one two evaluations of the model have to agree, once per risk.

        Args:
            what: Says in a progress bar what they are read for.
            draws: Random numbers, which go on with the examples of each batch.
        """
        if self.risk.processes.world == 1:  # several have done it together
            self.risk.whole.renew()
        for number, batch in enumerate(self.risk.batches(type(self).__name__ + what)):
            if self._compares_few and not number:
                require_repeatable(self.risk, batch)
            if draws is not None:
                draws.of_examples(self.risk.processes.numbers(batch.first, batch.num_examples))
            yield batch


class SymmetricRiskOperator(RiskOperator):
    """A symmetric matrix that is a sum over batches, times the factor of the loss's reduction."""

    _totals: Totals | None = None  # of the last pass over the data, which tell the relative weights of several losses

    @abstractmethod
    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:  # X [n, K]
        """Un-reduced product with `X`, and the totals of the data; losses have these relative weights."""

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._whole_product, self._whole_product)

    def _whole_product(self, X: Tensor) -> Tensor:
        return in_range(X, self._narrow, lambda V: self._scaled(partial(self._sweep, V.T.contiguous().T), V))

    @untraced
    def _scaled(self, sweep: Callable[[LossWeights], tuple[Tensor, Totals]], X: Tensor | None = None) -> Tensor:
        """The result of a sweep over the data, with the vectors `X`, times the factor of the reduction."""
        with differentiable(self.risk):
            total, self._totals = self._summed(sweep, X)
        return total.mul_(self.risk.scale(self._totals))

    def _summed(
        self, sweep: Callable[[LossWeights], tuple[Tensor, Totals]], X: Tensor | None = None
    ) -> tuple[Tensor, Totals]:
        """The sum of what sweeps over the data of all processes return, which multiply the same `X`. Collective."""
        risk = self.risk

        def same() -> dict[str, Any]:
            vectors = {} if X is None else {"the vector (random ones need a generator of one seed)": X.detach()}
            return sums_of(vectors)

        def own() -> tuple[Tensor, Totals]:
            weights = loss_weights(risk, self._totals)
            total, totals = sweep(weights)
            risk.processes.sum_([total])
            totals = totals.over(risk.processes)
            weights.require(totals)
            return total, totals

        return risk.together(own, same=same)

    def _check_products(self, cause: str | None = None) -> None:
        """Compare two products; `cause` says what differs if they do, if it is known."""
        require_same_products(self, self.in_space.dim, lambda v: self._summed(partial(self._sweep, v), v)[0], cause)


class ParameterCurvature(SymmetricRiskOperator):
    """A symmetric matrix over the parameters of a risk."""

    @takes_risk
    def __init__(self, risk: EmpiricalRisk, check_deterministic: bool | None = None) -> None:
        super().__init__(risk, check_deterministic)
        self.in_space = self.out_space = risk.space

    @untraced
    def _check_loss(self) -> None:
        """Compare the total losses of two passes."""
        risk = self.risk
        with preserve_state(risk.model, risk.data):
            first, second = risk.together(lambda: (loss_pass(risk), loss_pass(risk)))
        require_same(risk, first, second)

    @untraced
    def gradient_and_loss(self) -> tuple[list[Tensor], Tensor]:
        """Gradient of the loss in the order of the parameters, and the loss, over all data."""
        gradient, loss = self.risk.gradient_and_loss()
        return list(gradient.values()), loss


def require_own_data(risk: EmpiricalRisk, name: str) -> None:
    """Refuse an operator whose rows belong to the data, where these are read once or spread over processes.

    Raises:
        ValueError: If they can be read only once.
        UnsupportedError: Naming it.
    """
    require_rereadable(risk.data, f"{name} reads the data once per product")
    if risk.processes.world > 1:
        raise UnsupportedError(
            f"{name} can't be computed by several processes together: its rows belong to the data, of which each has "
            "a part. Make it of a risk without `processes=`, for the rows of this part."
        )


@untraced
def require_same_products(
    operator: RiskOperator, n: int, product: Callable[[Tensor], Tensor], cause: str | None = None
) -> None:
    """Compare two products with the same vector.

    Args:
        operator: The operator.
        n: Size of the vector.
        product: The product with `[n, 1]`, which leaves random states as they are after it: a loader that shuffles
            draws again for the second one.
        cause: What differs, if it is known.

    Raises:
        NumericsError: If the product is not finite.
        RuntimeError: If they differ; says whether it is the order.
    """
    risk, name = operator.risk, type(operator).__name__
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(n, 1, generator=generator, dtype=risk.dtype).to(risk.device)
    with differentiable(risk):
        one, two = product(v), product(v)
    if not bool(one.isfinite().all()):
        raise NumericsError(f"A product with {name} has NaN or infinite entries: does the model's output?")
    if _close(one, two, coarsest_dtype(risk)):
        return
    off = "check_deterministic=False turns this check off."
    if _close(one.sort(0)[0], two.sort(0)[0], coarsest_dtype(risk)):
        raise RuntimeError(
            f"Two products of {name} with the same vector have the same entries in another order: the data come in "
            "another order each time (shuffle=True?), and the rows follow that order. Use a loader that does not "
            f"shuffle. {off}"
        )
    if random := training_modules(risk.model):
        cause = f"These modules are in training mode: {random}; call model.eval()."
    raise RuntimeError(
        f"Two products of {name} with the same vector differ. "
        f"{cause or 'Do the data change from pass to pass (shuffle=True, random augmentation), or the model?'} "
        f"The data must come in the same order each time (shuffle=False). {off}"
    )


def in_range(X: Tensor, narrow: bool, product: Callable[[Tensor], Tensor]) -> Tensor:
    """A linear function of columns [n, K], each times a power of two that brings its largest number to about 1.

    Args:
        narrow: Whether they go through float16; else they are left as they are.

    Raises:
        NumericsError: If what comes out has left the range of float16.
    """
    if not narrow:
        return product(X)
    power = torch.exp2(torch.frexp(X.detach().abs().amax(0))[1].clamp(-100, 100).to(X.dtype))
    found = product(X / power) * power
    if not bool(found.isfinite().all()) and bool(X.isfinite().all()):
        raise NumericsError(
            "A product has NaN or infinite entries: something on its way through the model leaves the range of "
            "float16, whose largest number is 65504, or the model's own outputs are not finite. Compute it with "
            "model.float() or model.bfloat16(), or with a loss that is divided by more."
        )
    return found


def _close(a: Any, b: Any, dtype: torch.dtype) -> bool:
    tolerance = 1e-8 if dtype == torch.float64 else 1e-3
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * a.norm() + 1e-30)
