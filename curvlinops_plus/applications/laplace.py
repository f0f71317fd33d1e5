"""The Laplace approximation: a normal distribution of the parameters around a mode of their
posterior.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from curvlinops_plus.applications.evidence import Evidence, parts_of
from curvlinops_plus.applications.networks import parameters_of, require_present
from curvlinops_plus.applications.order import require_order
from curvlinops_plus.applications.output_covariance import (
    Spread,
    Then,
    output_covariance,
    output_jacobians,
)
from curvlinops_plus.applications.precisions import (
    Precision,
    as_float,
    positive,
    precisions_of,
)
from curvlinops_plus.applications.predictive import Normal, needed_spread, predictive
from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.exact import GGN
from curvlinops_plus.likelihood.elementwise import MSE, GaussianNLL
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Eigendecomposed,
    Kronecker,
    LinearOperator,
    PositionedBlocks,
    Structure,
)
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.linalg.submatrices import select
from curvlinops_plus.options import flag, integer, number, random_generator, tensor_of
from curvlinops_plus.progress import shown
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.loss_passes import loss_pass
from curvlinops_plus.risk.preserve import preserve_state, untraced

Mean = float | Tensor | Mapping[str, Tensor]


class Laplace:
    """The posterior `N(θ*, Σ)` of a network's parameters, `Σ = (K_sum + P)⁻¹`, and what follows
    from it.

    `θ*` are the parameters as they are, a mode of the posterior: they were trained with the loss,
    as a sum over the data, plus `½ (θ - μ)ᵀP(θ - μ)` of the prior `N(μ, P⁻¹)`. `K_sum` is the
    curvature `K` of the loss, multiplied by what the loss's "mean" divides by (the number of
    examples, or of tokens that are not ignored, or their summed class weights). `MSELoss` becomes
    the negative log-likelihood of `N(f, noise²)`.

    Predictions are those of the network that is linear in its parameters around `θ*`.

    Args:
        K: The curvature, as `curvature(risk, ...)` returns it, with any mix of approximations; or
            `GGN(risk)`, which is formed as a dense matrix. A risk whose `params` are those of the
            last layer gives a last-layer approximation. The risk's data are read once more, for the
            loss.
        prior_precision: One number for all parameters, or a mapping with one for each block
            (`K.blocks`) or each parameter. In a Kronecker product weight and bias share one, unless
            `K` was made with `separate_weight_and_bias=True`. Or another `Laplace` of the same
            parameters: its posterior is the prior. Then curvatures add up, Kronecker products as
            the nearest single one.
        noise: Standard deviation of the observations around the outputs, of `MSELoss`. None: that
            of the residuals at `θ*`, until `fit_prior` finds a better one; a number stays.
        prior_mean: Of all parameters, or name to tensor of each; not with another `Laplace`, whose
            mode it is.
        temperature: What the log-likelihood is divided by: below 1 the posterior is narrower.
        subnetwork: Some of the parameters, as `K[subnetwork, subnetwork]` takes them (names,
            positions, a mask); the others are fixed.
        max_bytes: Memory for derivatives of outputs in predictions: inputs are cut into chunks that
            need no more.

    Attributes:
        prior_precision: As given, or as `fit_prior` found it.
        noise: The standard deviation, a number or tensor; None for other losses.
        temperature: As given.

    Raises:
        TypeError: If `K` is not such a curvature.
        ValueError: If `K` is not that of the present parameters and of all data; if a precision or
            the noise is not positive and finite, or names don't fit.
        UnsupportedError: If the loss has no likelihood or a weight that is not 1, or there are
            several losses: their sum over the data is unknown; or if different precisions within
            one Kronecker product, or a sum of curvatures, have no closed form.

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
        K: LinearOperator,
        prior_precision: Precision | Laplace = 1.0,
        noise: float | Tensor | None = None,
        *,
        prior_mean: Mean | None = None,
        temperature: float = 1.0,
        subnetwork: str | Sequence[Any] | Tensor | None = None,
        max_bytes: int = 2**28,
    ) -> None:
        self.K = K
        self.risk = _risk_for_posterior(K)
        self._max_bytes = integer("max_bytes", max_bytes, low=0)
        self._parameters = parameters_of(K)
        require_present(self.risk, self._parameters, "K")
        totals = _loss_totals(self.risk)
        examples = getattr(K, "examples", totals.examples)
        if examples != totals.examples:
            raise ValueError(
                f"K was computed from {examples} examples, and the data of its risk now have "
                f"{totals.examples}; Laplace needs the curvature of all data."
            )
        (loss,) = self.risk.losses
        self.likelihood = loss.require_likelihood()
        self.temperature = number("temperature", temperature, above=0)
        #: What a mean loss divides by: K is multiplied by it for a sum over the data.
        self._divisor = 1 / float(self.risk.scale(totals))
        self._loss = float(totals.losses[0])
        #: How many numbers MSELoss observes.
        self._observed = float(totals.counts[0]) if isinstance(self.likelihood, MSE) else 0.0
        self._noise_is_given = noise is not None
        if self._observed:
            noise = math.sqrt(self._loss / self._observed) if noise is None else noise
            positive(noise, "noise")
        elif noise is not None:
            raise ValueError(
                f"noise={noise!r} is about observations around outputs, and {loss.title} has none."
            )
        self._blocks, self._positions = _blocks_by_name(K, subnetwork)
        theta = self.risk.space.flatten({key: p.detach() for key, p in self.risk.params.items()})
        theta = theta.to(K.device, K.dtype)
        self._mode = theta.clone() if self._positions is None else theta[self._positions]
        #: Of the data before these, if the prior is a posterior; it stays when that changes.
        self._curvature_before: BlockDiagonal | None = None
        if isinstance(prior_precision, Laplace):
            before = prior_precision
            _require_same_parameters(self, before, prior_mean)
            self._curvature_before = before._total()
            prior_precision = before.prior_precision
            prior_mean = before._mode
        self._prior_mean = self._vector(0.0 if prior_mean is None else prior_mean)
        self.prior_precision = prior_precision
        self.noise = noise
        self._root: BlockDiagonal | None = None
        self._root_hyperparameters: list[Any] = []
        self._block_precisions(prior_precision)  # refuses now
        if self._curvature_before is not None:
            self._total()  # refuses now, too

    def __repr__(self) -> str:
        """The curvature and the hyperparameters that it has now; nothing is computed."""
        prior = f"prior precision {_shown(self.prior_precision)}"
        noise = "" if self.noise is None else f", noise {_shown(self.noise)}"
        return (
            f"Laplace({len(self._mode)} parameters, {self.risk.losses[0].title})\n"
            f"  curvature: {self.K.label}\n"
            f"  {prior}{noise}, temperature {self.temperature:g}"
        )

    # -------------------------------------------------------------------------------- the posterior
    @property
    def posterior(self) -> BlockDiagonal:
        """The covariance `Σ` of the parameters, an operator with `diagonal()`, `logdet`, `trace`,
        `sample`, ...
        """
        factor = 1.0
        blocks = self._total()
        if self._curvature_before is None:
            # Blocks remember their eigenvectors, multiples of them would not.
            factor = float(self._curvature_factor(self.noise).detach())
            blocks = self._blocks
        precisions = self._block_precisions(self.prior_precision)
        covariances = {}
        with full_precision(self.K.device.type):
            for name, block in blocks.blocks.items():
                # Σ = (c K + P)⁻¹ = (K + P / c)⁻¹ / c, with P = δ I or diag(δ) in a block.
                delta = precisions[name].detach().to(self.K.device, self.K.dtype) / factor
                if delta.ndim == 0:
                    covariance: LinearOperator = block.power(-1.0, delta)
                elif isinstance(block, Diagonal):
                    covariance = Diagonal(block.vector + delta).power(-1.0)
                else:
                    matrix = block.to_dense() + delta.diag()
                    covariance = Dense(matrix, Structure.PSD).power(-1.0)
                covariances[name] = covariance._scale(1 / factor)
        return self._blocks._with(covariances)

    def _total(self) -> BlockDiagonal:
        """The curvature of the log-likelihood of all data so far, those of the prior too."""
        c = float(self._curvature_factor(self.noise).detach())
        total = self._blocks._scale(c)
        if self._curvature_before is None:
            return total
        total = total._plus(self._curvature_before)
        assert isinstance(total, BlockDiagonal)
        total = total.nearest_kronecker()
        for name, block in total.blocks.items():
            if not isinstance(block, (Dense, Diagonal, Kronecker, Eigendecomposed)):
                raise UnsupportedError(
                    f'Block "{name}": the sum of two curvatures has no eigenvectors in closed '
                    "form. Take KFAC, DiagonalBlock, FullBlock or GGN for both."
                )
        return total

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
        """`log p(data) ≈ log p(data | θ*) - ½ (θ* - μ)ᵀP(θ* - μ) - ½ log det(1 + P⁻¹K_sum)`, a 0-d
        float64 tensor.

        The log-likelihood is minus the loss, as a sum; of `MSELoss` it is that of normal
        distributions. It and the curvature are divided by the temperature. If the prior is a
        posterior, the data are those since.

        Args:
            prior_precision: In place of the attribute; differentiable in tensors.
            noise: The same.

        Raises:
            UnsupportedError: If different precisions within one Kronecker product have no closed
                form, or `prior_precision` is given where the prior is a posterior.
        """
        if self._curvature_before is not None:
            return self._evidence_since(prior_precision, noise)
        prior = self.prior_precision if prior_precision is None else prior_precision
        if not isinstance(noise, Tensor):
            number("noise", noise, above=0, optional=True)
        noise = self.noise if noise is None else noise
        precisions = self._block_precisions(prior)
        c = self._curvature_factor(noise)
        positions = self._blocks.positions()
        evidence = self._log_likelihood(noise)
        for name, block in self._blocks.blocks.items():
            delta = precisions[name]
            theta = self._deviation()[positions[name]]
            # The eigenvalues of P⁻¹ c K: of a dense block those of P^(-1/2) c K P^(-1/2).
            if delta.ndim == 0 or isinstance(block, Diagonal):
                ratios = c * block.eigenvalues().detach().double() / delta
            else:
                root = delta.rsqrt()
                matrix = block.to_dense().detach().double()
                ratios = torch.linalg.eigvalsh(c * root[:, None] * matrix * root)
            # ½ (θ - μ)ᵀP(θ - μ) and ½ log det(1 + P⁻¹ c K): no large logarithms are subtracted
            evidence = evidence - (delta * theta.square()).sum() / 2
            evidence = evidence - ratios.clamp(min=0).log1p().sum() / 2
        return evidence

    def _log_likelihood(self, noise: Any) -> Tensor:
        """That of the data at the mode, by the temperature."""
        value = torch.tensor(-self._loss, dtype=torch.float64)
        if noise is not None:
            # log N(y; f, noise²) = -½ (y - f)² / noise² - ½ log(2π noise²), for each number
            variance = torch.as_tensor(noise, dtype=torch.float64) ** 2
            value = (value / variance - self._observed * (2 * math.pi * variance).log()) / 2
        return value / self.temperature

    def _evidence_since(self, prior_precision: Any, noise: Any) -> Tensor:
        """The evidence of the data since the prior, which is a posterior `N(μ, (K₀ + P)⁻¹)`."""
        if prior_precision is not None or noise is not None:
            raise UnsupportedError(
                "The prior is a posterior: its precision and the noise are what they are. Leave "
                "out prior_precision= and noise=."
            )
        before = self._curvature_before
        assert before is not None
        totals = self._total()
        precisions = self._block_precisions(self.prior_precision)
        positions = self._blocks.positions()
        evidence = self._log_likelihood(self.noise)
        deviations = self._deviation()
        for name, block in totals.blocks.items():
            # -½ (θ - μ)ᵀ(K₀ + P)(θ - μ) - ½ (log det(K + K₀ + P) - log det(K₀ + P))
            delta = precisions[name].to(deviations.device)
            deviation = deviations[positions[name]]
            earlier = before.blocks[name].to(dtype=deviation.dtype)
            square = deviation @ (earlier @ deviation) + (delta * deviation.square()).sum()
            growth = _logdet(block, delta) - _logdet(earlier, delta)
            evidence = evidence - (square + growth) / 2
        return evidence

    def _vector(self, mean: Any) -> Tensor:
        """The mean of the prior, of the parameters that this is about, in double precision."""
        if isinstance(mean, Mapping):
            named = {key: torch.as_tensor(value).to(self._mode) for key, value in mean.items()}
            whole = self.risk.space.flatten(named).double()
            return whole if self._positions is None else whole[self._positions]
        vector = tensor_of("prior_mean", mean).detach().to(self._mode.device, torch.float64)
        if vector.ndim and vector.shape != self._mode.shape:
            raise ValueError(
                f"prior_mean has the shape {list(vector.shape)}; expected one number, a vector of "
                f"all {len(self._mode)} parameters, or a mapping with a tensor of each."
            )
        return vector.expand(self._mode.shape)

    def _deviation(self) -> Tensor:
        """`θ* - μ` in double precision."""
        return self._mode.double() - self._prior_mean

    def fit_prior(self, *, progressbar: bool = False) -> Laplace:
        """Maximise `log_marginal_likelihood` over the prior precision (each of them), and the noise
        if none was given.

        Newton's method in their logarithms, in which the evidence is concave: there is one maximum.
        Cost: no pass over data; eigenvalues once, and about ten steps of a few sums over them; of a
        dense matrix with several precisions some Cholesky decompositions in each step.

        Args:
            progressbar: Show a bar over the steps.

        Returns:
            The approximation itself.

        Raises:
            NumericsError: If no maximum is found. Of parameters that are all zero the best
                precision is infinite, of those without curvature it is zero: a very large or small
                number comes out.
            UnsupportedError: If the prior is a posterior.
        """
        flag("progressbar", progressbar)
        if self._curvature_before is not None:
            raise UnsupportedError(
                "The prior is a posterior, and fixed: call fit_prior of the first Laplace, before "
                "others have it as their prior."
            )
        names, values, groups = precisions_of(self.prior_precision, self._blocks)
        fits_noise = self.noise is not None and not self._noise_is_given
        initial = [*values.detach().tolist()]
        if fits_noise:
            initial.append(as_float(self.noise))
        logs = torch.tensor(initial, dtype=torch.float64).log().to(self.K.device)
        evidence = self._evidence(groups, fits_noise)
        with torch.no_grad(), tqdm(desc="prior precision", disable=not progressbar) as bar:
            logs, is_maximum = evidence.minimum(logs, bar.update)
        optimum = logs.exp().tolist()
        if not is_maximum:
            raise NumericsError(
                "No maximum of the log marginal likelihood was found; Newton's method stopped at "
                f"{optimum}."
            )
        if fits_noise:
            self.noise = optimum.pop()
        self.prior_precision = optimum[0] if names is None else dict(zip(names, optimum))
        return self

    def _evidence(self, groups: Mapping[str, Tensor], fits_noise: bool) -> Evidence:
        """The evidence as a function of logarithms.

        Args:
            groups: Block name to the number of its precision, or of that of each entry.
        """
        parts, squares = parts_of(self._blocks, groups, self._deviation())
        noise = 1.0 if self.noise is None or fits_noise else as_float(self.noise)
        loss = self._loss / 2 / noise**2 if self._observed else self._loss
        divisor = self._divisor / 2 / noise**2 if self._observed else self._divisor
        observed = self._observed if fits_noise else 0.0
        log_factor = math.log(divisor / self.temperature)
        return Evidence(parts, squares, log_factor, loss, observed, self.temperature, fits_noise)

    # ---------------------------------------------------------------------------------- predictions
    def outputs(self, X: Any) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the model's outputs, [N, C] and [N, C, C]; of R loss terms [N, R,
        C] and [N, R, C, C].

        If `X` requires a gradient both have derivatives by it, as have predictions: whole Jacobians
        of the examples are formed then.

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

    def joint(self, X: Any) -> tuple[Tensor, Tensor]:
        """Mean [N, C] and covariance [N, C, N, C] of the outputs for all inputs together; of R loss
        terms [N, R, C] and [N, R, C, N, R, C].

        Args:
            X: What the model is called with. If it requires a gradient, both have one.

        Raises:
            ValueError: If the model's parameters have changed.

        Cost: all derivatives at once, N·R·C·P numbers for P parameters.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from curvlinops_plus import GGN, EmpiricalRisk
            >>> _ = torch.manual_seed(0)
            >>> X = torch.randn(20, 2)
            >>> risk = EmpiricalRisk(nn.Linear(2, 1), nn.MSELoss(), [(X, X.sum(1, keepdim=True))])
            >>> mean, covariance = Laplace(GGN(risk)).joint(X[:3])
            >>> mean.shape, covariance.shape
            (torch.Size([3, 1]), torch.Size([3, 1, 3, 1]))
        """
        require_present(self.risk, self._parameters, "K")
        F, J = output_jacobians(self.K, self._positions, X)
        rows = J.flatten(0, 2)
        covariance = rows @ (self.posterior @ rows.T)
        if F.shape[1] == 1:
            F = F[:, 0]
        return F, covariance.view(*F.shape, *F.shape)

    def predict(
        self,
        X: Any,
        link: str = "probit",
        *,
        samples: int = 1000,
        generator: torch.Generator | None = None,
        progressbar: bool = False,
    ) -> Tensor | Normal:
        """The predictive distribution for inputs `X`, in the shape of the model's outputs.

        Args:
            X: What the model is called with; or a list, iterator or `DataLoader` of batches like
                those of the data, whose targets are not read. A loader with `shuffle=False`.
            link: Of class probabilities: "probit", the softmax of `m / √(1 + π/8 variance)`,
                without random numbers; "mc", the mean over draws of the outputs; "bridge", the mean
                of a Dirichlet distribution. "mc" needs covariances between classes.
            samples: Draws of "mc".
            generator: Of these; default: PyTorch's global one. Draws depend on the chunks, and so
                on `max_bytes`.
            progressbar: Show a bar over the batches of a loader.

        Returns:
            Class probabilities, of `CrossEntropyLoss` and `BCEWithLogitsLoss`; of regression
            `(mean, variance)` of an observation, noise included.

        Raises:
            ValueError: If the model's parameters have changed, `link` does not fit the loss, or a
                loader is shuffled: nobody would know whose predictions these are.
            UnsupportedError: If the loss has no predictive distribution here.

        Cost: a last linear layer, at any number of positions, takes some passes whatever the number
        of outputs, and a product with its eigenvectors. Else a backward pass for each number of an
        example's output, as far as its parameters reach, or three for each number that its layers
        return, if that is less.
        """
        flag("progressbar", progressbar)
        # Without a function that counts them, examples in a list could not be told apart.
        is_list = isinstance(X, list) and self.risk.options.batch_size_fn is None
        if is_list or isinstance(X, (DataLoader, Iterator)):
            require_order(self.risk.with_data(X))
            predictions = []
            for item in shown(X, "predictions", progressbar):
                part = item[0] if isinstance(item, (tuple, list)) else item
                options = {"samples": samples, "generator": generator}
                predictions.append(self.predict(part, link, **options))
            if not predictions:
                raise ValueError("There are no inputs to predict for.")
            if isinstance(predictions[0], Normal):
                return Normal(*[torch.cat(parts) for parts in zip(*predictions)])
            return torch.cat(predictions)
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
        if isinstance(X, tuple) and self.risk.options.batch_size_fn is None:
            raise TypeError(
                f"X is a tuple of length {len(X)}; expected what the model is called with, alone, "
                "as la.predict(X) of a batch (X, y), or a list of batches, as la.predict([(X, y)])."
            )
        require_present(self.risk, self._parameters, "K")
        prior = self.prior_precision
        precisions = dict(prior) if isinstance(prior, Mapping) else {"": prior}
        hyperparameters = [(name, as_float(v)) for name, v in precisions.items()]
        hyperparameters.append(("temperature", self.temperature))
        if self.noise is not None:
            hyperparameters.append(("noise", as_float(self.noise)))
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
        divisor = torch.tensor(self._divisor / self.temperature, dtype=torch.float64)
        if noise is None:
            return divisor
        return divisor / (2 * torch.as_tensor(noise, dtype=torch.float64) ** 2)

    def _block_precisions(self, prior: Precision) -> dict[str, Tensor]:
        """Block name to its precision: one number, or one for each of its entries."""
        return precisions_of(prior, self._blocks).of_blocks()


def _shown(numbers: Any) -> str:
    """A number, or the smallest and the largest of several."""
    given = numbers.values() if isinstance(numbers, Mapping) else [numbers]
    tensors = [torch.as_tensor(number).detach().cpu().double().flatten() for number in given]
    low, high = (float(end) for end in torch.cat(tensors).aminmax())
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _risk_for_posterior(K: Any) -> EmpiricalRisk:
    """The risk of a curvature, if the sum of its loss over data is a negative log-likelihood."""
    if not isinstance(K, (BlockwiseLinearOperator, GGN)):
        raise TypeError(
            "Laplace takes the curvature of a risk, curvature(risk, ...) or GGN(risk), got a "
            f"{type(K).__name__}. For a part K[i, i] use Laplace(K, subnetwork=i)."
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


def _logdet(block: LinearOperator, delta: Tensor) -> Tensor:
    """`log det(K + diag(δ))` of a positive semi-definite block, in double precision."""
    if delta.ndim and not isinstance(block, Diagonal):
        return torch.linalg.slogdet(block.to_dense().double() + delta.diag())[1]
    return (block.eigenvalues().double().clamp(min=0) + delta).log().sum()


def _require_same_parameters(posterior: Laplace, prior: Laplace, prior_mean: Any) -> None:
    """Refuse a prior of other parameters."""
    if prior_mean is not None:
        raise ValueError(
            "The mode of the Laplace that is the prior is its mean: leave out prior_mean=."
        )
    places = posterior._blocks.positions()
    others = prior._blocks.positions()
    same = places.keys() == others.keys() and posterior._blocks.in_space == prior._blocks.in_space
    if not same or not all(torch.equal(places[name], others[name]) for name in places):
        raise ValueError(
            f"The prior is a Laplace with the blocks {list(others)}, and the curvature has "
            f"{list(places)}; expected the same blocks of the same parameters."
        )
