"""The Laplace approximation: a normal distribution of the parameters around a mode of their
posterior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.applications.networks import parameters_of, require_present
from curvlinops_plus.applications.predictive import (
    Normal,
    needs_covariance,
    output_covariance,
    predictive,
)
from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.exact import GGN
from curvlinops_plus.likelihood.elementwise import MSE, GaussianNLL
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    LinearOperator,
    PositionedBlocks,
    Structure,
)
from curvlinops_plus.linalg.operator import outside_autocast
from curvlinops_plus.linalg.submatrices import select
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.loss_passes import loss_pass
from curvlinops_plus.risk.preserve import preserve_state, untraced

Precision = float | Tensor | Mapping[str, Any]


class Laplace:
    """The posterior `N(θ*, Σ)` of a network's parameters, `Σ = (K_sum + P)⁻¹`, and what follows
    from it.

    `θ*` are the parameters as they are, a mode of the posterior: they were trained with the loss,
    as a sum over the data, plus `½ θᵀPθ`. `K_sum` is the curvature `K` of the loss, multiplied by
    what the loss's "mean" divides by (the number of examples, or of tokens that are not ignored, or
    their summed class weights), and `P` the precision of the prior `N(0, P⁻¹)`. `MSELoss` becomes
    the negative log-likelihood of `N(f, noise²)`.

    Predictions are those of the network that is linear in its parameters around `θ*`.

    Args:
        K: The curvature, as `curvature(risk, ...)` returns it, with any mix of approximations; or
            `GGN(risk)`, which is formed as a dense matrix. A risk whose `params` are those of the
            last layer gives a last-layer approximation. The risk's data are read once more, for the
            loss.
        prior_precision: One number for all parameters, or a mapping with one for each block
            (`K.blocks`) or each parameter. In a Kronecker product weight and bias share one, unless
            `K` was made with `separate_weight_and_bias=True`.
        noise: Standard deviation of the observations around the outputs, of `MSELoss`. None: that
            of the residuals at `θ*`, until `fit_prior` finds a better one; a number stays.
        subnetwork: Some of the parameters, as `K[subnetwork, subnetwork]` takes them (names,
            positions, a mask); the others are fixed.
        max_bytes: Memory for derivatives of outputs in predictions: inputs are cut into chunks that
            need no more.

    Attributes:
        prior_precision: As given, or as `fit_prior` found it.
        noise: The standard deviation, a number or tensor; None for other losses.

    Raises:
        TypeError: If `K` is not such a curvature.
        ValueError: If `K` is not that of the present parameters and of all data; if a precision or
            the noise is not positive and finite, or names don't fit.
        UnsupportedError: If the loss has no likelihood or a weight that is not 1, or there are
            several losses: their sum over the data is unknown; or if different precisions within
            one Kronecker product have no closed form.

    Cost: a forward pass over the data. The first number takes eigendecompositions of the factors of
    `K`, others none.

    Sources: MacKay 1992, "The evidence framework applied to classification networks"; Immer et al.
    2021, "Improving predictions of Bayesian neural nets via local linearization"; Daxberger et al.
    2021, "Laplace Redux".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import KFAC, EmpiricalRisk, curvature
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> data = [(torch.randn(20, 2), torch.randint(3, (20,)))]
        >>> la = Laplace(curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), KFAC)).fit_prior()
        >>> la.predict(torch.randn(4, 2)).shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        K: Any,
        prior_precision: Precision = 1.0,
        noise: float | Tensor | None = None,
        *,
        subnetwork: Any = None,
        max_bytes: int = 2**28,
    ) -> None:
        self.K, self.risk, self._max_bytes = K, _risk_of(K), max_bytes
        self._parameters = parameters_of(K)
        require_present(self.risk, self._parameters, "K")
        totals, (one,) = _totals(self.risk), self.risk.losses
        if getattr(K, "examples", totals.examples) != totals.examples:
            words = (
                f"K was computed from {K.examples} examples, and the data of its risk now have "
                f"{totals.examples}"
            )
            raise ValueError(f"{words}; Laplace needs the curvature of all data.")
        self.likelihood = one.require_likelihood()
        #: What K is multiplied by for a sum over the data, the sum of the loss, and how many
        #: numbers MSELoss observes.
        self._count, self._loss, self._numbers = (
            1 / float(self.risk.scale(totals)),
            float(totals.losses[0]),
            0.0,
        )
        self._noise_is_known = noise is not None
        if isinstance(one.likelihood, MSE):
            self._numbers = float(totals.counts[0])
            noise = math.sqrt(self._loss / self._numbers) if noise is None else noise
            _positive(noise, "noise")
        elif noise is not None:
            raise ValueError(
                f"noise={noise!r} is about observations around outputs, and {one.title} has none."
            )
        self._blocks, self._picked = _picked_blocks(K, subnetwork)
        mode = self.risk.space.flatten({key: p.detach() for key, p in self.risk.params.items()}).to(
            K.device, K.dtype
        )
        self._mode = mode.clone() if self._picked is None else mode[self._picked]
        self.prior_precision, self.noise = prior_precision, noise
        self._known: tuple[Any, BlockDiagonal | None] = None, None
        self._precisions(prior_precision)  # refuses now

    # -------------------------------------------------------------------------------- the posterior
    @property
    def posterior(self) -> BlockDiagonal:
        """The covariance `Σ` of the parameters, an operator with `diagonal()`, `logdet`, `trace`,
        `sample`, ...
        """
        c, found = float(self._factor(self.noise).detach()), {}
        with outside_autocast(self.K.device):
            for name, delta in self._precisions(self.prior_precision).items():
                block, delta = (
                    self._blocks.blocks[name],
                    delta.detach().to(self.K.device, self.K.dtype),
                )
                if delta.ndim == 0:
                    found[name] = (c * block).power(-1.0, delta)
                elif isinstance(block, Diagonal):
                    found[name] = Diagonal(c * block.vector + delta).power(-1.0)
                else:
                    found[name] = Dense(c * block.to_dense() + delta.diag(), Structure.PSD).power(
                        -1.0
                    )
        return self._blocks._with(found)

    def sample(self, generator: torch.Generator | None = None, num: int | None = None) -> Any:
        """Samples of the parameters: name to `[*shape]` or `[*shape, num]`; of a subnetwork by
        positions `[k, num]`.

        They are for the linear model: put into the network itself, they predict badly where it is
        not linear.

        Args:
            generator: Where random numbers come from; default: PyTorch's global one.
            num: How many; None for one.
        """
        draws = self.posterior.sample(generator, num)
        draws = draws + (self._mode if num is None else self._mode[:, None])
        return draws if self._blocks.in_space.is_flat else self._blocks.in_space.unflatten(draws)

    # --------------------------------------------------------------------------------- the evidence
    def log_marginal_likelihood(
        self, prior_precision: Precision | None = None, noise: Any = None
    ) -> Tensor:
        """`log p(data) ≈ log p(data | θ*) - ½ θ*ᵀPθ* - ½ log det(1 + P⁻¹K_sum)`, a 0-d float64
        tensor.

        The log-likelihood is minus the loss, as a sum; of `MSELoss` it is that of normal
        distributions.

        Args:
            prior_precision: In place of the attribute; differentiable in tensors.
            noise: The same.

        Raises:
            UnsupportedError: If different precisions within one Kronecker product have no closed
                form.
        """
        prior = self._precisions(
            self.prior_precision if prior_precision is None else prior_precision
        )
        noise = self.noise if noise is None else noise
        c, positions = self._factor(noise), self._blocks.positions()
        value = torch.tensor(-self._loss, dtype=torch.float64)
        if noise is not None:  # normal densities
            variance = torch.as_tensor(noise, dtype=torch.float64) ** 2
            value = (value / variance - self._numbers * (2 * math.pi * variance).log()) / 2
        for name, block in self._blocks.blocks.items():
            delta, theta = prior[name], self._mode[positions[name]].double()
            if delta.ndim == 0 or isinstance(block, Diagonal):
                values = c * block.eigenvalues().detach().double() / delta
            else:
                root = delta.rsqrt()
                values = torch.linalg.eigvalsh(
                    c * root[:, None] * block.to_dense().detach().double() * root
                )
            # log det(1 + P⁻¹ c K): no logarithms of large determinants are subtracted
            value = (
                value - (delta * theta.square()).sum() / 2 - values.clamp(min=0).log1p().sum() / 2
            )
        return value

    def fit_prior(self) -> Laplace:
        """Maximise `log_marginal_likelihood` over the prior precision (each of them), and the noise
        if none was given.

        Deterministic: L-BFGS in their logarithms, from the present ones. Cost: no pass over data;
        eigenvalues once, of a dense matrix with several precisions in each step.

        Returns:
            The approximation itself.

        Raises:
            NumericsError: If no maximum is found. Of parameters that are all zero the best
                precision is infinite, of those without curvature it is zero: a very large or small
                number comes out.
        """
        given, noise = self.prior_precision, self.noise
        names = list(given) if isinstance(given, Mapping) else None
        start = list(given.values()) if isinstance(given, Mapping) else [given]
        fits_noise = noise is not None and not self._noise_is_known
        start = [_number(v) for v in ([*start, noise] if fits_noise else start)]
        logs = torch.tensor(start, dtype=torch.float64).log().requires_grad_()

        def split(values: Any) -> tuple[Any, Any]:
            prior = values[0] if names is None else dict(zip(names, values))
            return prior, values[-1] if fits_noise else noise

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = -self.log_marginal_likelihood(*split(logs.exp()))
            value.backward()
            return value

        optimizer = torch.optim.LBFGS(
            [logs],
            max_iter=200,
            tolerance_grad=1e-6,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )
        with torch.enable_grad():
            optimizer.step(loss)
            value = float(loss().detach())
        found = logs.detach().exp().tolist()
        if logs.grad is None or not float(logs.grad.abs().max()) <= 1e-3 * (1 + abs(value)):
            raise NumericsError(
                f"No maximum of the log marginal likelihood was found; L-BFGS stopped at {found}."
            )
        self.prior_precision, self.noise = split(found)
        return self

    # ---------------------------------------------------------------------------------- predictions
    def outputs(self, X: Any) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the model's outputs, [N, C] and [N, C, C]; of R loss terms [N, R,
        C] and [N, R, C, C].

        Args:
            X: What the model is called with.

        Raises:
            ValueError: If the model's parameters have changed.
        """
        mean, spread = self._outputs(X, True, lambda F, spread, *_: (F, spread))
        return (mean[:, 0], spread[:, 0]) if mean.shape[1] == 1 else (mean, spread)

    def predict(
        self,
        X: Any,
        link: str = "probit",
        *,
        samples: int = 1000,
        generator: torch.Generator | None = None,
    ) -> Tensor | Normal:
        """The predictive distribution for inputs `X`, in the shape of the model's outputs.

        Args:
            X: What the model is called with.
            link: Of class probabilities: "probit", the softmax of `m / √(1 + π/8 variance)`,
                without random numbers; "mc", the mean over draws of the outputs; "bridge", the mean
                of a Dirichlet distribution. The last two need covariances between classes.
            samples: Draws of "mc".
            generator: Of these; default: PyTorch's global one. Draws depend on the chunks, and so
                on `max_bytes`.

        Returns:
            Class probabilities, of `CrossEntropyLoss` and `BCEWithLogitsLoss`; of regression
            `(mean, variance)` of an observation, noise included.

        Raises:
            ValueError: If the model's parameters have changed, or `link` does not fit the loss.
            UnsupportedError: If the loss has no predictive distribution here.

        Cost: a backward pass for each number of an example's output, as far as its parameters
        reach.
        """
        likelihood = self.likelihood
        noise = (
            None
            if self.noise is None
            else torch.as_tensor(self.noise, dtype=torch.float64).detach()
        )

        def average(
            F: Tensor, spread: Tensor, f_shape: torch.Size, axis: int | None
        ) -> tuple[Tensor, ...]:
            found, shape = (
                predictive(likelihood, link, F, spread, noise, samples, generator),
                list(f_shape),
            )
            if isinstance(likelihood, GaussianNLL):  # means without variances
                shape[likelihood.class_axis if axis is None else axis] = found[0].shape[-1]
            return tuple(likelihood.restore(v, torch.Size(shape), len(v), axis) for v in found)

        found = self._outputs(X, needs_covariance(likelihood, link), average)
        return Normal(*found) if len(found) > 1 else found[0]

    # ------------------------------------------------------------------------------------ internals
    def _outputs(self, X: Any, full: bool, then: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        require_present(self.risk, self._parameters, "K")
        prior = self.prior_precision
        values = dict(prior) if isinstance(prior, Mapping) else {"": prior}
        key = [(name, _number(v)) for name, v in values.items()], self.noise and _number(self.noise)
        if self._known[0] != key:  # else its root is known
            self._known = key, self.posterior.power(0.5)
        root = self._known[1]
        assert root is not None
        return output_covariance(self.K, root, self._picked, X, full, self._max_bytes, then)

    def _factor(self, noise: Any) -> Tensor:
        """What the curvature is multiplied by: that of `MSELoss` is of the squared error, twice
        `noise²` too large.
        """
        count = torch.tensor(self._count, dtype=torch.float64)
        return (
            count
            if noise is None
            else count / (2 * torch.as_tensor(noise, dtype=torch.float64) ** 2)
        )

    def _precisions(self, given: Precision) -> dict[str, Tensor]:
        """Block name to its precision: one number, or one for each of its entries."""
        blocks, space = self._blocks.blocks, self._blocks.in_space
        if not isinstance(given, Mapping):
            return dict.fromkeys(blocks, _positive(given, "prior_precision"))
        values = {name: _positive(v, f"prior_precision[{name!r}]") for name, v in given.items()}
        if values.keys() == blocks.keys():
            return values
        if values.keys() != space.shapes.keys():
            expected = f"expected the blocks {list(blocks)}, or the parameters {space.names}"
            raise ValueError(f"prior_precision has the names {list(values)}; {expected}.")
        of_all = torch.cat(
            [values[name].expand(shape.numel()) for name, shape in space.shapes.items()]
        )
        owner = torch.cat(
            [torch.full((shape.numel(),), k) for k, shape in enumerate(space.shapes.values())]
        )
        found = {}
        for name, at in self._blocks.positions().items():
            one = len(owner[at.cpu()].unique()) == 1
            found[name] = of_all[at.cpu()[0]] if one else of_all[at.cpu()]
            if not one and not isinstance(blocks[name], (Dense, Diagonal)):
                words = f'Block "{name}" is a {type(blocks[name]).__name__} of several parameters: give one precision'
                raise UnsupportedError(
                    f"{words} for each block, or make K with separate_weight_and_bias=True."
                )
        return found


def _risk_of(K: Any) -> EmpiricalRisk:
    """The risk of a curvature of which the multiple is known that belongs to a sum over the
    data.
    """
    if not isinstance(K, (BlockwiseLinearOperator, GGN)):
        words = (
            "Laplace takes the curvature of a risk, curvature(risk, ...) or GGN(risk), got a "
            f"{type(K).__name__}"
        )
        raise TypeError(f"{words}. For a part K[i, i] say Laplace(K, subnetwork=i).")
    if isinstance(K, BlockwiseLinearOperator) and float(K.scale) != 1:
        raise ValueError(
            f"K is {float(K.scale):g} times a curvature; give K itself, Laplace makes the sum over "
            "the data."
        )
    losses = K.risk.losses
    if len(losses) > 1 or not losses.have_likelihoods or losses[0].weight != 1:
        words = (
            "Laplace needs the negative log-likelihood of the data: one loss with a likelihood and "
            "the weight 1"
        )
        raise UnsupportedError(
            f"{words}, not {', '.join(one.title for one in losses)}; see @register_likelihood."
        )
    return K.risk


@untraced
def _totals(risk: EmpiricalRisk) -> Totals:
    """Loss and counts over all data."""
    with preserve_state(risk.model, risk.data):
        return risk.together(lambda: loss_pass(risk)).plain()


def _picked_blocks(K: Any, subnetwork: Any) -> tuple[BlockDiagonal, Tensor | None]:
    """The blocks of the parameters that the approximation is about, and the positions of these;
    None for all.
    """
    operator: LinearOperator = K.operator if hasattr(K, "operator") else K.materialize()
    picked = (
        None if subnetwork is None else select(subnetwork, K.in_space, K.device, "row").positions
    )
    if picked is not None:
        operator = operator[subnetwork, subnetwork]
    if isinstance(operator, BlockDiagonal):
        return operator, picked
    whole = torch.arange(operator.shape[0], device=K.device)
    return PositionedBlocks({"all": operator}, {"all": whole}, operator.in_space), picked


def _number(value: Any) -> float:
    return float(torch.as_tensor(value).detach())


def _positive(given: Any, name: str) -> Tensor:
    value = torch.as_tensor(given, dtype=torch.float64)
    if value.ndim or not 0 < float(value.detach()) < float("inf"):
        raise ValueError(f"{name} is {given!r}; expected one positive finite number.")
    return value
