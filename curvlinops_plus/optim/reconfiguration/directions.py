"""Natural-gradient directions: `stochastic_reconfiguration` for averages over samples,
`fisher_inverse` for gradients.

Conventions. With centred derivatives `Ō` and centred costs `ε̄`, both times the roots of the
weights (`1/√n` each without weights),

    S = Ō* Ō,    δ = (S + λI)⁻¹ Ō* ε̄ = Ō* (Ō Ō* + λI)⁻¹ ε̄

The gradient of an energy `⟨E⟩` over `|ψ|²` is `∇⟨E⟩ = 2 Re Ō* ε̄`, twice the one here: `δ = (S +
λI)⁻¹ ∇⟨E⟩ / 2`, as in vmcnet; netket's directions are `2 δ`. For a density, `log ψ = log p`, the
gradient of `⟨E⟩` over `p` is `Ō* ε̄`, and `S` the Fisher matrix: then `δ` is the natural gradient
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg.checksums import require_intact, sealed
from curvlinops_plus.linalg.fields import Fields, reading
from curvlinops_plus.linalg.precision import plain_mode
from curvlinops_plus.optim.reconfiguration.amplitude import (
    Amplitude,
    LogAmplitude,
    LogPsi,
    PsiParams,
)
from curvlinops_plus.optim.reconfiguration.damped_solve import (
    DampedSystem,
    Mode,
    Solver,
    SolveReport,
    check_options,
)
from curvlinops_plus.optim.reconfiguration.scores import Ensemble, name_samples
from curvlinops_plus.optim.tied import TiedOptimizer
from curvlinops_plus.options import one_of, tensor_of


class Reconfiguration(NamedTuple):
    """Result of `stochastic_reconfiguration`.

    Attributes:
        direction: `δ`, in the container, shapes and dtypes of the parameters; subtract a multiple
            of it.
        report: Residual, rank and condition of the solve.
    """

    direction: Any
    report: SolveReport


def stochastic_reconfiguration(
    log_psi: LogPsi,
    params: PsiParams,
    samples: Any,
    local_costs: Tensor,
    damping: float = 1e-3,
    mode: Mode = "auto",
    momentum: float = 0.0,
    *,
    previous: Any = None,
    weights: Any = None,
    chunk_size: int | None = None,
    amplitude: Amplitude = "real",
    diagonal_shift: float = 0.0,
    solver: Solver | None = None,
    tol: float | None = None,
    max_iter: int | None = None,
) -> Reconfiguration:
    """The direction of stochastic reconfiguration (also minSR, SPRING), `δ = (S + λI)⁻¹ Ō* ε̄`.

    Subtracting a multiple of it lowers the average of the local costs, by natural gradient descent.
    Note that `Ō* ε̄` is *half* the gradient of an energy over |ψ|²: `δ = (S + λI)⁻¹ ∇⟨E⟩ / 2`.
    netket's direction is twice this one.

    With momentum it is SPRING's: the `δ` of least `|Ō δ - ε̄|² + λ |δ - μ φ|²`, `φ` being the
    previous direction. For one batch repeated it converges to the `δ` of damping `λ (1 - μ)`.

    Args:
        log_psi: A module called with the samples, or a function `(params, samples)`; returns `log
            ψ` of each, `[n]`.
        params: Parameters, a list or a dict; of a module its own, None for all that require a
            gradient.
        samples: `[n, ...]`, or a tuple, list or dict of such tensors; drawn from |ψ|², or with
            `weights`.
        local_costs: A number for each sample, `[n]`: local energies `(H ψ)(x) / ψ(x)`, rewards, …
            Of complex ones the real part is used if ψ is real.
        damping: `λ`.
        mode: "lazy" (products only), "dense" (`S` [P, P]), "kernel" (`Ō Ō*` [n, n], twice that if
            complex) or "auto", by sizes. All give the same direction.
        momentum: SPRING's `μ`, at least 0 and below 1.
        previous: The previous direction, in the container of the parameters; None: none.
        weights: Weights `[n]` of the samples, divided by their sum.
        chunk_size: How many samples are differentiated at once; None: all. Does not change the
            result.
        amplitude: "real", "complex" or "holomorphic", see `LogAmplitude`.
        diagonal_shift: `ε` of a shift by `ε diag(S)` on top of `λI`; the direction then hardly
            depends on the scales of the parameters.
        solver: "cholesky" for dense and kernel (if it fails, a smoothed pseudo-inverse with a
            warning), "cg" for all modes; None: Cholesky, in mode "lazy" CG started at `Ō* ε̄`.
        tol: Relative residual at which "cg" stops; None: 1e-5 in float32, 1e-12 in float64, or what
            rounding allows.
        max_iter: Their largest number of iterations; None: 10·P.

    Returns:
        `(direction, report)`: a list or dict like the parameters, and a `SolveReport` with the
        residual reached, rank and condition number.

    Raises:
        ValueError: If arguments do not fit each other; fewer than two samples; mode "kernel"
            without damping.
        NumericsError: If a cost, `log ψ` or a derivative is NaN or infinite; names the samples.
        SingularMatrixError: If there is no damping and `S` is singular.

    Cost: a forward pass, then in mode "dense" one backward pass per sample (vectorised), n·P² for
        `S`, P³/3 to solve.
        In mode "kernel" of a module with real `log ψ` one forward and one backward pass (no
        Jacobian is stored), of anything else, or in chunks, as dense, n²·P for the kernel and n³/3.
        In mode "lazy" three backward passes per iteration.

    Source: Sorella 1998, arXiv cond-mat/9803107; Chen and Heyl 2024, arXiv 2302.01941 (kernel);
        Goldshlager, Abrahamsen
        and Lin 2024, arXiv 2401.10190 (SPRING).

    Example:
        >>> # |ψ|² is a normal distribution of variance 1/(2a)
        >>> psi = lambda params, x: -params["a"] * x**2 / 2
        >>> x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
        >>> direction, report = stochastic_reconfiguration(
        ...     psi, {"a": torch.tensor(1.0)}, x, x**2, damping=0.0
        ... )
        >>> direction  # costs grow with x², and so does -log ψ: a should grow
        {'a': tensor(-2.)}
    """
    psi = LogAmplitude(log_psi, params, amplitude)
    phi = None if previous is None else psi.read(previous)
    numbers = {"damping": damping, "diagonal_shift": diagonal_shift}
    check_options(mode, solver, tol, max_iter, momentum, **numbers)
    with plain_mode(psi.device.type):
        ensemble = Ensemble(psi, samples, weights, chunk_size)
        target, _ = centred_costs(ensemble, local_costs)
        system = DampedSystem(ensemble, damping, mode, solver, diagonal_shift, tol, max_iter)
        delta, report = system.direction(target, momentum, phi)
        return Reconfiguration(psi.write(delta), report)


def centred_costs(ensemble: Ensemble, local_costs: Any) -> tuple[Tensor, Tensor]:
    """`ε̄` [n·c], costs minus their mean times the roots of the weights, and the mean.

    Raises:
        ValueError: If there is not one number per sample.
        NumericsError: If one is NaN or infinite; names the samples.
    """
    psi = ensemble.psi
    n = ensemble.n
    costs = tensor_of("local_costs", local_costs).detach().to(psi.device)
    if costs.shape != (n,):
        raise ValueError(
            f"Expected local_costs of shape [{n}], one for each sample, got {list(costs.shape)}."
        )
    invalid = ~torch.isfinite(costs)
    if bool(invalid.any()):
        raise NumericsError(
            f"local_costs is NaN or infinite for {name_samples(invalid)}. Local energies diverge "
            "at nodes of ψ and where particles meet without a cusp: leave these samples out, or "
            "clip the costs (say at five mean deviations from the median) before they come here."
        )
    costs = costs.to(torch.promote_types(costs.dtype, psi.dtype))
    # Large energies are centred before they are rounded, and differences before they are averaged.
    differences = costs - costs[0]
    mean = (ensemble.weights.to(costs.dtype) * differences).sum()
    differences = differences - mean
    mean = mean + costs[0]
    parts = torch.view_as_real(differences) if costs.is_complex() else differences[:, None]
    if parts.shape[1] < ensemble.components:  # real costs of a complex amplitude
        parts = torch.cat((parts, torch.zeros_like(parts)), 1)
    target = parts[:, : ensemble.components] * ensemble.root[:, None]
    return target.to(psi.dtype).flatten(), mean


@dataclass
class FisherInverse:
    """Result of `fisher_inverse`: a function `(grad, samples) -> direction`.

    Attributes:
        report: `SolveReport` of the last solve; None before the first.
    """

    psi: LogAmplitude
    chunk_size: int | None
    options: dict[str, Any]
    report: SolveReport | None = None

    def __call__(self, grad: Any, samples: Any, weights: Any = None) -> Any:
        """`(S + λI)⁻¹ grad`, with `S` at the parameters' current values.

        Args:
            grad: A gradient in the container of the parameters, or one flat tensor [P].

        Returns:
            The direction in the container of `grad`.
        """
        g = self.psi.read(grad)
        if not bool(torch.isfinite(g).all()):
            raise NumericsError("grad has NaN or infinite entries.")
        with plain_mode(self.psi.device.type):
            ensemble = Ensemble(self.psi, samples, weights, self.chunk_size)
            system = DampedSystem(ensemble, **self.options)
            direction, self.report = system.inverse(g)
            return self.psi.write(direction, like=grad)


def fisher_inverse(
    log_psi: LogPsi,
    params: PsiParams = None,
    damping: float = 1e-3,
    max_iter: int | None = None,
    mode: Mode = "lazy",
    *,
    chunk_size: int | None = None,
    amplitude: Amplitude = "real",
    solver: Solver | None = None,
    tol: float | None = None,
) -> Callable[..., Any]:
    """A function `(grad, samples) -> (S + λI)⁻¹ grad`: natural-gradient directions for any
    gradient.

    The parameters are read in each call, so that one function serves a whole optimization.

    Args:
        log_psi: A module called with the samples, or a function `(params, samples)`; returns `log
            ψ` of each, `[n]`.
        params: Parameters, a list or a dict; of a module its own, None for all that require a
            gradient.
        damping: `λ`.
        max_iter: Largest number of iterations of CG; None: 10·P.
        mode: "lazy": CG, started at the gradient. "dense": `S` [P, P]. "kernel": Woodbury's
            identity, `(g - Ō* (Ō Ō* + λ)⁻¹ Ō g) / λ`. "auto": by sizes.
        chunk_size: How many samples are differentiated at once; None: all.
        amplitude: "real", "complex" or "holomorphic". The gradient with respect to a complex
            parameter is that of `p.grad`: the real part's plus `i` times the imaginary part's.
        solver: As for `stochastic_reconfiguration`.
        tol: Relative residual at which CG stops; None: 1e-5 in float32, 1e-12 in float64, or what
            rounding allows.

    Returns:
        The function. It also takes `weights` of the samples; its `report` is the `SolveReport` of
        the last solve.

    Raises:
        ValueError: If arguments do not fit each other, or for mode "kernel" without damping.
        SingularMatrixError: When called, if there is no damping and `S` is singular.

    Cost: see `stochastic_reconfiguration`.

    Example:
        >>> psi = lambda params, x: -((x - params[0]) ** 2) / 4
        >>> inverse = fisher_inverse(psi, [torch.zeros(())], damping=0.0)
        >>> inverse([torch.tensor(1.0)], torch.tensor([-1.0, 1.0, 3.0]))
        [tensor(1.5000)]
    """
    check_options(mode, solver, tol, max_iter, damping=damping)
    if mode == "kernel" and not damping:
        raise ValueError(
            'mode="kernel" needs a positive damping: Woodbury\'s identity divides by it.'
        )
    options = {"damping": damping, "mode": mode, "solver": solver, "tol": tol, "max_iter": max_iter}
    return FisherInverse(LogAmplitude(log_psi, params, amplitude), chunk_size, options)


class StochasticReconfiguration(TiedOptimizer):
    """Steps `θ ← θ - lr δ` along the directions `δ` of `stochastic_reconfiguration`.

    `step(samples, local_costs)` takes a batch of samples of the current |ψ|² (or of anything, with
    weights) and a cost for each; no backward pass is needed before, and `.grad` is neither read nor
    written. Directions are for half the gradient of an energy, see `stochastic_reconfiguration`:
    netket's learning rates are half as large for the same step.

    There is one parameter group, `param_groups[0]`, because one matrix couples all parameters. Its
    `lr`, `damping`, `momentum`, `diagonal_shift` and `norm_constraint` are read in every step:
    `torch.optim.lr_scheduler` works on `lr`, and the others may be changed between steps. With
    momentum, `φ` is the direction of the previous step, without learning rate and norm constraint,
    as in SPRING.

    Args:
        log_psi: A module called with the samples, or a function `(params, samples)`; returns `log
            ψ` of each, `[n]`.
        params: Parameters, a list or a dict, changed in place; of a module its own, None for all
            that require a gradient.
        lr: Learning rate.
        damping: `λ`, or a schedule: a function of the number of steps taken before, from 0.
        momentum: SPRING's `μ`; 0.99 is SPRING's default, 0 plain stochastic reconfiguration.
        norm_constraint: Largest squared norm `C` of a step `lr δ`, momentum included; longer ones
            are shortened to it. None: no limit.
        norm: Which norm that is. "euclidean": `lr² |δ|² <= C`, as in SPRING. "fisher": `lr² δ* (S +
            λI) δ <= C`, with this step's `S` and damping (diagonal shift included), which bounds
            the change of ψ; as in KFAC.
        mode, chunk_size, amplitude, diagonal_shift, solver, tol, max_iter: As for
            `stochastic_reconfiguration`.

    Attributes:
        report: `SolveReport` of the last step; None before the first.

    Raises:
        ValueError: If a number is out of range, or arguments do not fit each other.

    Its `state_dict` holds the group, the number of steps, and the previous direction, with
    checksums; loaded into an optimizer that was made with the same arguments and the same
    parameters, it continues bit for bit. Schedules are not part of it.

    Example:
        >>> # the harmonic oscillator, whose ground state has a = 1 and energy 1/2
        >>> a = torch.tensor(2.0)
        >>> x = torch.linspace(-6, 6, 101)  # enumerated here, drawn from |ψ|² in earnest
        >>> log_psi = lambda params, x: -params[0] * x**2 / 2
        >>> optimizer = StochasticReconfiguration(log_psi, [a], lr=0.2)
        >>> for _ in range(20):
        ...     energy = optimizer.step(x, a / 2 + (1 - a**2) * x**2 / 2, weights=(-a * x**2).exp())
        >>> print(f"{a:.3f} {energy:.4f}")
        1.000 0.5000
    """

    def __init__(
        self,
        log_psi: LogPsi,
        params: PsiParams = None,
        lr: float = 0.05,
        damping: float | Callable[[int], float] = 1e-3,
        momentum: float = 0.0,
        norm_constraint: float | None = None,
        mode: Mode = "auto",
        *,
        norm: Literal["euclidean", "fisher"] = "euclidean",
        chunk_size: int | None = None,
        amplitude: Amplitude = "real",
        diagonal_shift: float = 0.0,
        solver: Solver | None = None,
        tol: float | None = None,
        max_iter: int | None = None,
    ) -> None:
        one_of("norm", norm, "euclidean", "fisher")
        self._psi = LogAmplitude(log_psi, params, amplitude)
        self._schedule = damping if callable(damping) else None
        self._norm = norm
        self._chunk_size = chunk_size
        self._options: dict[str, Any] = {
            "mode": mode,
            "solver": solver,
            "tol": tol,
            "max_iter": max_iter,
        }
        self.report: SolveReport | None = None
        group = {
            "lr": lr,
            "damping": damping(0) if callable(damping) else damping,
            "momentum": momentum,
            "norm_constraint": norm_constraint,
            "diagonal_shift": diagonal_shift,
            "steps": 0,
        }
        self._check(group)
        super().__init__(list(self._psi.params.values()), group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused but for the first: one matrix couples all parameters."""
        if getattr(self, "param_groups", None):
            raise ValueError(
                "StochasticReconfiguration has one parameter group: one matrix couples all "
                "parameters."
            )
        super().add_param_group(param_group)

    def step(self, samples: Any, local_costs: Tensor, weights: Any = None) -> Tensor:  # type: ignore[override]
        """One step.

        Args:
            samples: As for `stochastic_reconfiguration`.
            local_costs: A number for each sample.
            weights: Weights of the samples.

        Returns:
            The weighted mean of the costs, before the step.

        Raises:
            NumericsError: If a cost, `log ψ` or a derivative is NaN or infinite; nothing has
                changed then.
        """
        (group,) = self.param_groups
        if self._schedule is not None:
            group["damping"] = self._schedule(group["steps"])
        self._check(group)
        with plain_mode(self._psi.device.type):
            ensemble = Ensemble(self._psi, samples, weights, self._chunk_size)
            target, mean = centred_costs(ensemble, local_costs)
            system = DampedSystem(
                ensemble, group["damping"], diagonal_shift=group["diagonal_shift"], **self._options
            )
            direction, self.report = system.direction(target, group["momentum"], self._previous())
            step_size = self._step_size(group, system, direction)
            for name, delta in self._psi.by_name(direction).items():
                p = self._psi.params[name]
                if group["momentum"]:
                    self.state[p]["previous"] = delta.clone()
                p.add_(delta, alpha=-step_size)
        group["steps"] += 1
        return mean

    def state_dict(self) -> dict[str, Any]:
        """As PyTorch's, with checksums: to change it, such as the learning rate, delete its entry
        "checksums", too.
        """
        return sealed(super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where another optimizer with the same arguments stopped.

        Raises:
            ValueError: If the state is damaged, or of other parameters; nothing has changed then.
        """
        title = "The state"
        with reading(title):
            require_intact(state_dict, title)
            state = Fields(state_dict, title)
            group = state.sequence("param_groups", 1).part(0)
            group.require({"params", *self.defaults})
            params = self.param_groups[0]["params"]
            if group["params"] != list(range(len(params))):
                raise group.error("'params'", str(group["params"]), f"those of {len(params)}")
            group.count("steps")
            for name in ("lr", "damping", "momentum", "diagonal_shift"):
                group.number(name, 0.0)
            self._check(dict(group.data))
            for number, of_parameter in state.part("state").parts():
                p = params[group.sequence("params").count(number)]
                # A scheduler of the user may keep more.
                if "previous" in of_parameter.data:
                    of_parameter.tensor("previous", tuple(p.shape), p.dtype)
        super().load_state_dict(dict(state_dict))

    def _previous(self) -> Tensor | None:
        """The direction of the step before, `φ` [P]; None in the first step or without momentum."""
        directions = {name: self.state[p].get("previous") for name, p in self._psi.params.items()}
        if any(direction is None for direction in directions.values()):
            return None
        return self._psi.read(directions)

    def _step_size(self, group: dict[str, Any], system: DampedSystem, direction: Tensor) -> float:
        """The learning rate, or less if the squared norm of the step would exceed its limit."""
        lr = float(group["lr"])
        limit = group["norm_constraint"]
        if limit is None:
            return lr
        if self._norm == "fisher":
            square = lr**2 * float(system.square(direction))
        else:
            square = lr**2 * float(direction.square().sum())
        return lr * (limit / square) ** 0.5 if square > limit else lr

    def _check(self, group: dict[str, Any]) -> None:
        names = ("lr", "damping", "diagonal_shift", "norm_constraint")
        numbers = {name: group[name] for name in names}
        if numbers["norm_constraint"] is None:
            del numbers["norm_constraint"]
        check_options(**self._options, momentum=group["momentum"], **numbers)
