"""`FromDistribution`: a likelihood from a `torch.distributions` object."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution, kl_divergence

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.draws import categories, counts, inside
from curvlinops_plus.likelihood.likelihood import (
    Likelihood,
    Uniform,
    count_tensor,
    hessian_products,
)
from curvlinops_plus.options import function, integer, one_of


class FromDistribution(Likelihood):
    """The negative log-likelihood of a distribution `p(y | f)`, all derivatives by automatic
    differentiation.

    The loss may differ from it by a constant. `H` is the Fisher matrix, the second derivative of
    `KL(p(. | f₀) ‖ p(. | f))` at `f = f₀`; it is the Hessian too where `f` are natural parameters
    (logits, log-rates, means). Monte-Carlo vectors are gradients at targets drawn from the
    distribution, which average to the same matrix.

    The divergence is that of `torch.distributions`, which implements it for most families: normal
    (also multivariate), Bernoulli, binomial, categorical, Poisson, geometric, exponential, gamma,
    beta, Dirichlet, Laplace, Cauchy, Gumbel, log-normal, .... For others, such as Student's t, only
    Monte-Carlo vectors and the empirical Fisher are available, unless you add the divergence with
    `torch.distributions.register_kl`.

    Args:
        make: Function from the output [N, R, C] to a distribution with batch shape [N, R] or [N, R,
            ...].
        reduction: "mean" or "sum". Default: that of the loss it is registered for, else "mean",
            which divides by the number of entries of `log_prob`.
        class_axis: Axis of the model's output that becomes the last one. Default: the last one.

    Draws invert the distribution function where there is one (`icdf`, Poisson, or finitely many
    values). Otherwise each example is sampled separately, from its own seed; the global random
    state is restored.

    Which values it can take must not depend on `f`: uniform and Pareto distributions have no Fisher
    matrix.

    Raises:
        UnsupportedError: (by products and roots) If the divergence is unknown.

    Example:
        >>> poisson = FromDistribution(lambda f: torch.distributions.Poisson(f.exp()))
        >>> F, Y = poisson.canonical(torch.zeros(2, 3), torch.ones(2, 3), num_examples=2)
        >>> poisson.hessian_product(F, Y, torch.ones(2, 1, 3)).flatten()
        tensor([1., 1., 1., 1., 1., 1.])
    """

    def __init__(
        self,
        make: Callable[[Tensor], Distribution],
        reduction: str = "mean",
        class_axis: int = -1,
        loss: Any = None,
    ) -> None:
        super().__init__(loss, one_of("reduction", reduction, "mean", "sum"))
        form = "make(f) -> Distribution, called with outputs"
        self.make = function("make", make, form, optional=False)
        self.class_axis = integer("class_axis", class_axis)

    def canonical_target(
        self, y: Tensor, F: Tensor, f_shape: torch.Size, class_axis: int
    ) -> Tensor:
        """Target in the shape of the distribution: a number per term, or the shape of one draw at
        the class axis.
        """
        distribution = self._distribution(F)
        expected = distribution.batch_shape + distribution.event_shape
        own = expected[
            2:
        ]  # the shape of one term's target; its axes stand where the output has its class axis
        shape = (
            f_shape if len(f_shape) == 1 else f_shape[:class_axis] + own + f_shape[class_axis + 1 :]
        )
        if y.shape != shape or y.numel() != expected.numel():
            raise ValueError(
                f"{self.name}: an output of shape {list(f_shape)} makes a "
                f"{type(distribution).__name__} for targets of shape {list(shape)}, got a target "
                f"of shape {list(y.shape)}."
            )
        if len(f_shape) > 1:
            y = y.movedim([class_axis + i for i in range(len(own))], list(range(-len(own), 0)))
        Y = y.reshape(expected)
        return Y.to(F.dtype) if Y.is_floating_point() else Y

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        log_prob = self._distribution(F).log_prob(Y)
        return -log_prob.reshape(*F.shape[:2], -1).sum(-1)

    def count(self, F: Tensor, Y: Tensor) -> Tensor:
        """One for every entry of `log_prob`."""
        return count_tensor(self._distribution(F).batch_shape.numel(), F.device)

    @property
    def no_ggn(self) -> str | None:
        return (
            "may have a Hessian that depends on the targets, unless the outputs are natural "
            "parameters"
        )

    def hessian_product(self, F: Tensor, Y: Tensor, V: Tensor) -> Tensor:
        here = self._distribution(F)
        self._require_divergence(here)
        return hessian_products(lambda f: _divergence(here, self.make(f)).sum(), F, V)

    def draw(self, F: Tensor, Y: Tensor, num: int, uniform: Uniform) -> Tensor:
        targets = self._draw_targets(F, num, uniform)  # [num, N, R, ...]
        repeated = F.expand(num, *F.shape).flatten(0, 1)
        return self.grad(repeated, targets.flatten(0, 1)).view(num, *F.shape)

    def _draw_targets(self, F: Tensor, num: int, uniform: Uniform) -> Tensor:
        with GradMode(False):
            distribution = self._distribution(F)
            shape = (len(F), num, *distribution.batch_shape[1:])
            if distribution.has_enumerate_support and not distribution.event_shape:
                with suppress(NotImplementedError):  # binomials with different numbers of trials
                    values = distribution.enumerate_support(expand=False)  # [L, 1, 1, ...]
                    p = distribution.log_prob(values).exp().movedim(0, -1)  # [N, R, ..., L]
                    drawn = categories(
                        p, uniform(*shape).to(F.device).movedim(1, -1)
                    )  # [N, R, ..., num]
                    return values.flatten()[drawn].movedim(-1, 0)
            if isinstance(distribution, distributions.Poisson):
                u = uniform(*shape).to(F.device).movedim(1, 0)
                return counts(distribution.rate.to(u).expand(u.shape), u).to(F.dtype)
            if not distribution.event_shape:
                with suppress(NotImplementedError):
                    distribution.icdf(
                        count_tensor(0.5, F.device).expand(distribution.batch_shape)
                    )  # before numbers are used
                    return distribution.icdf(inside(uniform(*shape).to(F.device).movedim(1, 0))).to(
                        F.dtype
                    )
            return self._sample_each(F, num, uniform)

    def _sample_each(self, F: Tensor, num: int, uniform: Uniform) -> Tensor:
        """Samples [num, N, R, ...], example by example, so that they don't depend on batch
        sizes.
        """
        seeds = (uniform(len(F), 1)[:, 0] * 2**53).long().tolist()
        device = F.device
        # The generator of one device: `torch.manual_seed` would seed those of all others, too.
        generator = torch.default_generator
        devices = []
        if device.type != "cpu":
            generator = torch.get_device_module(device)
            devices = [device]
        samples = []
        with torch.random.fork_rng(devices, device_type=device.type):
            for f, seed in zip(F.split(1), seeds, strict=True):
                generator.manual_seed(seed)
                samples.append(self._distribution(f).sample(torch.Size([num])))
        return torch.cat(samples, 1)

    def _distribution(self, F: Tensor) -> Distribution:
        distribution = self.make(F)
        if distribution.batch_shape[:2] != F.shape[:2]:
            raise ValueError(
                f"{self.name}: the distribution made from an output of shape {list(F.shape)} must "
                f"have a batch shape that begins with {list(F.shape[:2])} (examples, terms of "
                f"each), got batch shape {list(distribution.batch_shape)} and event shape "
                f"{list(distribution.event_shape)}."
            )
        return distribution

    def _require_divergence(self, distribution: Distribution) -> None:
        kind = _innermost(distribution)
        try:
            # PyTorch would compare transforms at one output and assume that equal ones are
            # constant. And what it has for Wishart distributions can't be differentiated twice.
            moved = (
                isinstance(kind, distributions.TransformedDistribution)
                and type(kind) not in _CONSTANT_TRANSFORMS
            )
            if moved or isinstance(kind, distributions.Wishart):
                raise NotImplementedError
            _divergence(distribution, distribution)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{self.name}: PyTorch has no Kullback-Leibler divergence between two "
                f"{type(kind).__name__} distributions, so their exact Fisher matrix is unknown. "
                "Use MonteCarlo(samples) or Empirical() vectors, FisherMCLinearOperator or "
                "EFLinearOperator, or add the divergence with torch.distributions.register_kl."
            ) from error


#: Transformed distributions whose transforms do not depend on their parameters, or whose divergence
#: is implemented.
_CONSTANT_TRANSFORMS = (
    distributions.LogNormal,
    distributions.LogisticNormal,
    distributions.HalfNormal,
    distributions.InverseGamma,
    distributions.Gumbel,
)


def _innermost(distribution: Distribution) -> Distribution:
    """The distribution inside nested `Independent` ones."""
    while isinstance(distribution, distributions.Independent):
        distribution = distribution.base_dist
    return distribution


def _divergence(p: Distribution, q: Distribution) -> Tensor:
    """`KL(p ‖ q)`, or a function with the same second derivative in `q` at `q = p`."""
    P = _innermost(p)
    Q = _innermost(q)
    if isinstance(P, distributions.Laplace) and isinstance(Q, distributions.Laplace):
        # PyTorch's formula has |m - n| in it, whose second derivative at 0 comes out as 0.
        return ((Q.loc - P.loc) ** 2 + (Q.scale - P.scale) ** 2) / (2 * P.scale**2)
    return kl_divergence(p, q)
