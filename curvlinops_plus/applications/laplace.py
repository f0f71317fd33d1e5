"""The Laplace approximation: a normal distribution of the parameters around a mode of their
posterior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.applications.networks import parameters_of, require_present
from curvlinops_plus.applications.output_covariance import (
    Spread,
    Then,
    output_covariance,
)
from curvlinops_plus.applications.predictive import Normal, needed_spread, predictive
from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.contexts import GradMode
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
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.linalg.submatrices import select
from curvlinops_plus.options import integer, number, random_generator, tensor_of
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
        >>> K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), KFAC)
        >>> la = Laplace(K).fit_prior()
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
        self.K = K
        self.risk = _risk_for_posterior(K)
        self._max_bytes = integer("max_bytes", max_bytes, low=0)
        self._parameters = parameters_of(K)
        require_present(self.risk, self._parameters, "K")
        totals = _loss_totals(self.risk)
        if getattr(K, "examples", totals.examples) != totals.examples:
            raise ValueError(
                f"K was computed from {K.examples} examples, and the data of its risk now have "
                f"{totals.examples}; Laplace needs the curvature of all data."
            )
        (loss,) = self.risk.losses
        self.likelihood = loss.require_likelihood()
        #: What a mean loss divides by: K is multiplied by it for a sum over the data.
        self._divisor = 1 / float(self.risk.scale(totals))
        self._loss = float(totals.losses[0])
        #: How many numbers MSELoss observes.
        self._observed = float(totals.counts[0]) if isinstance(self.likelihood, MSE) else 0.0
        self._noise_is_given = noise is not None
        if self._observed:
            noise = math.sqrt(self._loss / self._observed) if noise is None else noise
            _positive(noise, "noise")
        elif noise is not None:
            raise ValueError(
                f"noise={noise!r} is about observations around outputs, and {loss.title} has none."
            )
        self._blocks, self._positions = _blocks_by_name(K, subnetwork)
        theta = self.risk.space.flatten({key: p.detach() for key, p in self.risk.params.items()})
        theta = theta.to(K.device, K.dtype)
        self._mode = theta.clone() if self._positions is None else theta[self._positions]
        self.prior_precision = prior_precision
        self.noise = noise
        self._root: BlockDiagonal | None = None
        self._root_hyperparameters: list[Any] = []
        self._block_precisions(prior_precision)  # refuses now

    # -------------------------------------------------------------------------------- the posterior
    @property
    def posterior(self) -> BlockDiagonal:
        """The covariance `Σ` of the parameters, an operator with `diagonal()`, `logdet`, `trace`,
        `sample`, ...
        """
        c = float(self._curvature_factor(self.noise).detach())
        precisions = self._block_precisions(self.prior_precision)
        covariances = {}
        with full_precision(self.K.device.type):
            for name, block in self._blocks.blocks.items():
                # Σ = (c K + P)⁻¹, with P = δ I or diag(δ) in a block.
                delta = precisions[name].detach().to(self.K.device, self.K.dtype)
                if delta.ndim == 0:
                    covariances[name] = (c * block).power(-1.0, delta)
                elif isinstance(block, Diagonal):
                    covariances[name] = Diagonal(c * block.vector + delta).power(-1.0)
                else:
                    matrix = c * block.to_dense() + delta.diag()
                    covariances[name] = Dense(matrix, Structure.PSD).power(-1.0)
        return self._blocks._with(covariances)

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
        space = self._blocks.in_space
        return draws if space.is_flat else space.unflatten(draws)

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
        prior = self.prior_precision if prior_precision is None else prior_precision
        if not isinstance(noise, Tensor):
            number("noise", noise, above=0, optional=True)
        noise = self.noise if noise is None else noise
        precisions = self._block_precisions(prior)
        c = self._curvature_factor(noise)
        positions = self._blocks.positions()
        evidence = torch.tensor(-self._loss, dtype=torch.float64)
        if noise is not None:
            # log N(y; f, noise²) = -½ (y - f)² / noise² - ½ log(2π noise²), for each number
            variance = torch.as_tensor(noise, dtype=torch.float64) ** 2
            evidence = (evidence / variance - self._observed * (2 * math.pi * variance).log()) / 2
        for name, block in self._blocks.blocks.items():
            delta = precisions[name]
            theta = self._mode[positions[name]].double()
            # The eigenvalues of P⁻¹ c K: of a dense block those of P^(-1/2) c K P^(-1/2).
            if delta.ndim == 0 or isinstance(block, Diagonal):
                ratios = c * block.eigenvalues().detach().double() / delta
            else:
                root = delta.rsqrt()
                matrix = block.to_dense().detach().double()
                ratios = torch.linalg.eigvalsh(c * root[:, None] * matrix * root)
            # ½ θᵀPθ and ½ log det(1 + P⁻¹ c K): no large logarithms are subtracted
            evidence = evidence - (delta * theta.square()).sum() / 2
            evidence = evidence - ratios.clamp(min=0).log1p().sum() / 2
        return evidence

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
        prior = self.prior_precision
        names = list(prior) if isinstance(prior, Mapping) else None
        initial = list(prior.values()) if isinstance(prior, Mapping) else [prior]
        fits_noise = self.noise is not None and not self._noise_is_given
        if fits_noise:
            initial.append(self.noise)
        logs = torch.tensor([_as_float(v) for v in initial], dtype=torch.float64).log()
        logs.requires_grad_()

        def prior_and_noise(hyperparameters: Any) -> tuple[Any, Any]:
            noise = hyperparameters[-1] if fits_noise else self.noise
            if names is None:
                return hyperparameters[0], noise
            return dict(zip(names, hyperparameters)), noise

        def loss() -> Tensor:
            optimizer.zero_grad()
            negative = -self.log_marginal_likelihood(*prior_and_noise(logs.exp()))
            negative.backward()
            return negative

        optimizer = torch.optim.LBFGS(
            [logs],
            max_iter=200,
            tolerance_grad=1e-6,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )
        with GradMode(True):
            optimizer.step(loss)
            minimum = float(loss().detach())
        optimum = logs.detach().exp().tolist()
        if logs.grad is None or not float(logs.grad.abs().max()) <= 1e-3 * (1 + abs(minimum)):
            raise NumericsError(
                f"No maximum of the log marginal likelihood was found; L-BFGS stopped at {optimum}."
            )
        self.prior_precision, self.noise = prior_and_noise(optimum)
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

        def moments(F: Tensor, spread: Spread, *_: Any) -> tuple[Tensor, ...]:
            assert spread.covariances is not None
            return F, spread.covariances

        mean, covariances = self._outputs(X, "covariances", moments)
        return (mean[:, 0], covariances[:, 0]) if mean.shape[1] == 1 else (mean, covariances)

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
        samples = integer("samples", samples, low=1)
        random_generator(generator)
        likelihood = self.likelihood
        noise = self.noise
        if noise is not None:
            noise = torch.as_tensor(noise, dtype=torch.float64).detach()

        def average(
            F: Tensor, spread: Spread, f_shape: torch.Size, axis: int | None
        ) -> tuple[Tensor, ...]:
            moments = predictive(likelihood, link, F, spread, noise, samples, generator)
            shape = list(f_shape)
            if isinstance(likelihood, GaussianNLL):  # means without variances
                shape[likelihood.class_axis if axis is None else axis] = moments[0].shape[-1]
            return tuple(likelihood.restore(v, torch.Size(shape), len(v), axis) for v in moments)

        moments = self._outputs(X, needed_spread(likelihood, link), average)
        return Normal(*moments) if len(moments) > 1 else moments[0]

    # ------------------------------------------------------------------------------------ internals
    def _outputs(self, X: Any, needed: str, then: Then) -> list[Tensor]:
        """`then` of the outputs for inputs `X` and what is needed of their covariances."""
        require_present(self.risk, self._parameters, "K")
        prior = self.prior_precision
        precisions = dict(prior) if isinstance(prior, Mapping) else {"": prior}
        hyperparameters = [(name, _as_float(v)) for name, v in precisions.items()]
        if self.noise is not None:
            hyperparameters.append(("noise", _as_float(self.noise)))
        # Σ = L Lᵀ is decomposed again only if prior or noise have changed since.
        if self._root is None or self._root_hyperparameters != hyperparameters:
            self._root = self.posterior.power(0.5)
            self._root_hyperparameters = hyperparameters
        return output_covariance(
            self.K, self._root, self._positions, X, needed, self._max_bytes, then
        )

    def _curvature_factor(self, noise: Any) -> Tensor:
        """What the curvature is multiplied by: that of `MSELoss` is of the squared error, twice
        `noise²` too large.
        """
        divisor = torch.tensor(self._divisor, dtype=torch.float64)
        if noise is None:
            return divisor
        return divisor / (2 * torch.as_tensor(noise, dtype=torch.float64) ** 2)

    def _block_precisions(self, prior: Precision) -> dict[str, Tensor]:
        """Block name to its precision: one number, or one for each of its entries."""
        blocks = self._blocks.blocks
        shapes = self._blocks.in_space.shapes
        if not isinstance(prior, Mapping):
            return dict.fromkeys(blocks, _positive(prior, "prior_precision"))
        values = {name: _positive(v, f"prior_precision[{name!r}]") for name, v in prior.items()}
        if values.keys() == blocks.keys():
            return values
        if values.keys() != shapes.keys():
            raise ValueError(
                f"prior_precision has the names {list(values)}; expected the blocks "
                f"{list(blocks)}, or the parameters {list(shapes)}."
            )
        sizes = torch.tensor([shape.numel() for shape in shapes.values()])
        parameter = torch.arange(len(sizes)).repeat_interleave(sizes)  # of each entry
        entries = torch.cat([values[name].expand(shape.numel()) for name, shape in shapes.items()])
        precisions = {}
        for name, positions in self._blocks.positions().items():
            positions = positions.cpu()
            if len(parameter[positions].unique()) == 1:
                precisions[name] = entries[positions[0]]
            elif isinstance(blocks[name], (Dense, Diagonal)):
                precisions[name] = entries[positions]
            else:
                raise UnsupportedError(
                    f'Block "{name}" is a {type(blocks[name]).__name__} of several parameters: '
                    "give one precision for each block, or make K with "
                    "separate_weight_and_bias=True."
                )
        return precisions


def _risk_for_posterior(K: Any) -> EmpiricalRisk:
    """The risk of a curvature, if the sum of its loss over data is a negative log-likelihood."""
    if not isinstance(K, (BlockwiseLinearOperator, GGN)):
        raise TypeError(
            "Laplace takes the curvature of a risk, curvature(risk, ...) or GGN(risk), got a "
            f"{type(K).__name__}. For a part K[i, i] say Laplace(K, subnetwork=i)."
        )
    if isinstance(K, BlockwiseLinearOperator) and float(K.scale) != 1:
        raise ValueError(
            f"K is {float(K.scale):g} times a curvature; give K itself, Laplace makes the sum over "
            "the data."
        )
    losses = K.risk.losses
    if len(losses) > 1 or not losses.have_likelihoods or losses[0].weight != 1:
        titles = ", ".join(loss.title for loss in losses)
        raise UnsupportedError(
            "Laplace needs the negative log-likelihood of the data: one loss with a likelihood and "
            f"the weight 1, not {titles}; see @register_likelihood."
        )
    return K.risk


@untraced
def _loss_totals(risk: EmpiricalRisk) -> Totals:
    """Loss and counts over all data."""
    with preserve_state(risk.model, risk.data):
        return risk.together(lambda: loss_pass(risk)).plain()


def _blocks_by_name(K: Any, subnetwork: Any) -> tuple[BlockDiagonal, Tensor | None]:
    """The blocks of the parameters that the approximation is about, and the positions of these;
    None for all.
    """
    operator: LinearOperator = K.operator if hasattr(K, "operator") else K.materialize()
    positions = None
    if subnetwork is not None:
        positions = select(subnetwork, K.in_space, K.device, "row").positions
        operator = operator[subnetwork, subnetwork]
    if isinstance(operator, BlockDiagonal):
        return operator, positions
    everything = torch.arange(operator.shape[0], device=K.device)
    blocks = PositionedBlocks({"all": operator}, {"all": everything}, operator.in_space)
    return blocks, positions


def _as_float(value: Any) -> float:
    return float(torch.as_tensor(value).detach())


def _positive(value: Any, name: str) -> Tensor:
    precision = tensor_of(name, value).double()
    if precision.ndim or not 0 < float(precision.detach()) < float("inf"):
        raise ValueError(f"{name} is {value!r}; expected one positive finite number.")
    return precision
