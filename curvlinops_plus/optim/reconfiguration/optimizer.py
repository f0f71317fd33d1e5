"""Stochastic reconfiguration as a PyTorch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from curvlinops_plus.optim.reconfiguration.amplitude import (
    Amplitude,
    LogAmplitude,
    LogPsi,
    Params,
    full_precision_no_grad,
)
from curvlinops_plus.optim.reconfiguration.damped_solve import DampedSystem, Mode, Solver, SolveReport, check_options
from curvlinops_plus.optim.reconfiguration.directions import centred_costs, reconfigure
from curvlinops_plus.optim.reconfiguration.scores import Ensemble


class StochasticReconfiguration(torch.optim.Optimizer):
    """Steps `θ ← θ - lr δ` along the directions `δ` of `stochastic_reconfiguration`.

    `step(samples, local_costs)` takes a batch of samples of the current |ψ|² (or of anything, with weights) and a cost
    for each; no backward pass is needed before, and `.grad` is neither read nor written. Directions are for half
    the gradient of an energy, see `stochastic_reconfiguration`: netket's learning rates are half as large for the same
    step.

    There is one parameter group, `param_groups[0]`, because one matrix couples all parameters. Its `lr`, `damping`,
    `momentum`, `diagonal_shift` and `norm_constraint` are read in every step: `torch.optim.lr_scheduler` works on `lr`,
    and the others may be changed between steps. With momentum, `φ` is the direction of the previous step, without
    learning rate and norm constraint, as in SPRING.

    Args:
        log_psi: A module called with the samples, or a function `(params, samples)`; returns `log ψ` of each, `[n]`.
        params: Parameters, a list or a dict, changed in place; of a module its own, None for all that require a
            gradient.
        lr: Learning rate.
        damping: `λ`, or a schedule: a function of the number of steps taken before, from 0.
        momentum: SPRING's `μ`; 0.99 is SPRING's default, 0 plain stochastic reconfiguration.
        norm_constraint: Largest squared norm `C` of a step `lr δ`, momentum included; longer ones are shortened to it.
            None: no limit.
        norm: Which norm that is. "euclidean": `lr² |δ|² <= C`, as in SPRING. "fisher": `lr² δ* (S + λI) δ <= C`, with
            this step's `S` and damping (diagonal shift included), which bounds the change of ψ; as in KFAC.
        mode, chunk_size, amplitude, diagonal_shift, solver, tol, max_iter: As for `stochastic_reconfiguration`.

    Attributes:
        report: `SolveReport` of the last step; None before the first.

    Raises:
        ValueError: If a number is out of range, or arguments do not fit each other.

    Its `state_dict` holds the group, the number of steps, and the previous direction; loaded into an optimizer that was
    made with the same arguments and the same parameters, it continues bit for bit. Schedules are not part of it.

    Example:
        >>> a = torch.tensor(2.0)  # the harmonic oscillator, whose ground state has a = 1 and energy 1/2
        >>> x = torch.linspace(-6, 6, 101)  # enumerated here, drawn from |ψ|² in earnest
        >>> optimizer = StochasticReconfiguration(lambda params, x: -params[0] * x**2 / 2, [a], lr=0.2)
        >>> for _ in range(20):
        ...     energy = optimizer.step(x, a / 2 + (1 - a**2) * x**2 / 2, weights=(-a * x**2).exp())
        >>> print(f"{a:.3f} {energy:.4f}")
        1.000 0.5000
    """

    def __init__(
        self,
        log_psi: LogPsi,
        params: Params = None,
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
        if norm not in ("euclidean", "fisher"):
            raise ValueError(f'Expected norm to be "euclidean" or "fisher", got {norm!r}.')
        self._psi = LogAmplitude(log_psi, params, amplitude)
        self._schedule = damping if callable(damping) else None
        self._norm, self._chunk_size = norm, chunk_size
        self._options: dict[str, Any] = {"mode": mode, "solver": solver, "tol": tol, "max_iter": max_iter}
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
        """Add the only parameter group.

        Raises:
            ValueError: For a second one.
        """
        if getattr(self, "param_groups", None):
            raise ValueError("StochasticReconfiguration has one parameter group: one matrix couples all parameters.")
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
            NumericsError: If a cost, `log ψ` or a derivative is NaN or infinite; nothing has changed then.
        """
        (group,) = self.param_groups
        if self._schedule is not None:
            group["damping"] = self._schedule(group["steps"])
        self._check(group)
        with full_precision_no_grad(self._psi.device):
            ensemble = Ensemble(self._psi, samples, weights, self._chunk_size)
            target, mean = centred_costs(ensemble, local_costs)
            system = DampedSystem(ensemble, group["damping"], diagonal_shift=group["diagonal_shift"], **self._options)
            before = {name: self.state[p].get("previous") for name, p in self._psi.params.items()}
            phi = None if any(t is None for t in before.values()) else self._psi.read(before, "the direction before")
            direction, self.report = reconfigure(system, target, group["momentum"], phi)
            factor = float(group["lr"])
            if group["norm_constraint"] is not None:
                factor *= self._shorten(system, direction, factor, group["norm_constraint"])
            named = self._psi.write(direction)
            for p, delta in zip(group["params"], named.values() if isinstance(named, dict) else named, strict=True):
                if group["momentum"]:
                    self.state[p]["previous"] = delta.clone()
                p.add_(delta, alpha=-factor)
        group["steps"] += 1
        return mean

    def _shorten(self, system: DampedSystem, direction: Tensor, lr: float, limit: float) -> float:
        """Factor of at most 1 that reduces the squared norm of `lr δ` to the limit."""
        unknowns = system.to_unknowns(direction)
        curved = system.product(unknowns).square().sum() + system.shift * unknowns.square().sum()
        square = lr**2 * float(curved if self._norm == "fisher" else direction.square().sum())
        return min(1.0, (limit / square) ** 0.5) if square > 0 else 1.0

    def _check(self, group: dict[str, Any]) -> None:
        names = ("lr", "damping", "diagonal_shift", "norm_constraint")
        numbers = {name: group[name] for name in names if group[name] is not None}
        check_options(self._options["mode"], self._options["solver"], group["momentum"], **numbers)
