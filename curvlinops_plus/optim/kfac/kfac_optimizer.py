"""K-FAC as a PyTorch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from curvlinops_plus.blocks import KFAC
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.optim.kfac.flat import Flat, Vectors
from curvlinops_plus.optim.kfac.policies import (
    LevenbergMarquardt,
    NormConstraint,
    StepReport,
    WeightDecay,
    as_weight_decay,
    number,
)
from curvlinops_plus.optim.kfac.preconditioner import Inverse, KFACPreconditioner
from curvlinops_plus.optim.kfac.trust import QuadraticModel, Trust
from curvlinops_plus.risk import Vectors as SentBack


class KFACOptimizer(KFACPreconditioner):
    """K-FAC: steps along the gradient, times the inverse of a curvature that follows training.

    A step is, in this order: statistics of the batch (they are added in its forward pass); a new inverse, if it is due;
    `P g = (K + λI)⁻¹ g` with the gradients in `.grad`; coefficients; `δ = -lr · P g + momentum · v`, shortened by the
    norm constraint; `θ ← θ + δ` and `v ← δ`; the damping's adaptation. The velocity `v` is the update before,
    times the learning rate of now over that of then, as in `torch.optim.SGD`: it does not go on when a schedule ends.

    Options of parameter groups, read in every step, so that schedulers and anybody may change them: `lr`, `momentum`,
    `damping`, `weight_decay`, `norm_constraint`. Parameters of one block (a layer's weight and bias) belong in one
    group.

    Nothing about a training loop changes: hooks on the model and on the loss module hear the calls, in training mode
    with gradients enabled. They are removed by `close()`, at the end of `with KFACOptimizer(...) as optimizer:`, and
    with the optimizer. For losses that are functions, or outputs that are changed before the loss, see `listen`.
    Several batches before a step are one update. `step(closure)` is PyTorch's.

    Parameters without gradient, or of layers that no batch has called yet, are left alone. Steps that don't call a
    layer leave its curvature as it is.

    Args:
        model: The network.
        loss: The loss, or several, as for `EmpiricalRisk`.
        lr: `α`, or "adaptive": the minimum of the quadratic model.
        momentum: `μ`, or "adaptive".
        damping: `λ`, a function of the number of steps before, or `LevenbergMarquardt(...)`.
        params: Parameters, or groups of them with options of their own; default: all that require a gradient.
        approximation, default: As for `curvature`.
        vectors: What is backpropagated for the statistics; default: `MonteCarlo()`.
        decay: Of the statistics' moving average, per update; batches weigh by their examples, or loss terms. Below 1 if
            losses are sums.
        statistics_every: Steps between two updates of the statistics.
        inverse_every: Steps between two refreshes of the inverse; one comes earlier for a layer that was never called.
        inverse: "exact" is `(K + λI)⁻¹` with the damping of now, from eigendecompositions; "factored" splits `λ`
            between the factors of each Kronecker product, with the damping of the refresh, and is cheaper.
        power: Of `K + λI`, below 0.
        norm_constraint: A number bounds the whole update, `⟨δ, (K + λ) δ⟩ <= c`, with the `K` of the last refresh and
            the `λ` of the step; `NormConstraint` has other ways.
            "auto" is 1e-3, and None with adaptive coefficients.
        weight_decay: A number is decoupled, as in AdamW; `WeightDecay` has other kinds.
        quadratic_model: Curvature of the quadratic model: the "blocks", or the "exact" GGN of the step's batches.
            Default: blocks for the damping's adaptation, exact for adaptive coefficients.
        reject: Undo steps that raise the loss of their batches, and multiply the damping by this number. The loss is
            then evaluated before and after every step.
        maximize: Go up instead of down.
        strict: Refuse a step for which statistics were due, and no batch was seen; else it takes the old ones.
        risk_options: The other options of `EmpiricalRisk`, such as `output` and `mask`.

    Raises:
        ValueError: If an option is out of range, or options contradict each other.
        TypeError: If an option has another type; later, if a scheduler drives what is adaptive.

    Cost: statistics are a backward pass to the layers' outputs; a refresh is one eigendecomposition (or Cholesky
    decomposition) per factor, and a product with `K` for the norm constraint; a step multiplies every gradient by two
    or four matrices.

    Source: Martens and Grosse 2015, arXiv 1503.05671; kfac_jax, whose trajectories it reproduces.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model, loss = nn.Linear(3, 2), nn.MSELoss()
        >>> optimizer = KFACOptimizer(model, loss, lr=0.1)
        >>> X, y = torch.rand(8, 3), torch.rand(8, 2)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss(model(X), y).backward()
        ...     optimizer.step()
        >>> optimizer.last_step.step, optimizer.last_step.examples
        (2, 8)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        lr: float | Literal["adaptive"] = 0.1,
        momentum: float | Literal["adaptive"] = 0.9,
        damping: float | Callable[[int], float] | LevenbergMarquardt = 1e-3,
        *,
        params: Any = None,
        approximation: Any = KFAC,
        default: Any = KFAC,
        vectors: SentBack | str | None = None,
        decay: float = 0.95,
        statistics_every: int = 1,
        inverse_every: int = 10,
        inverse: Inverse = "exact",
        power: float = -1.0,
        norm_constraint: float | NormConstraint | Literal["auto"] | None = "auto",
        weight_decay: float | WeightDecay = 0.0,
        quadratic_model: Literal["blocks", "exact"] | None = None,
        reject: float | None = None,
        maximize: bool = False,
        strict: bool = True,
        **risk_options: Any,
    ) -> None:
        adaptive = "adaptive" in (lr, momentum)
        if norm_constraint == "auto":
            norm_constraint = None if adaptive else 1e-3
        if quadratic_model not in (None, "blocks", "exact"):
            raise ValueError(f'quadratic_model={quadratic_model!r}; expected "blocks", "exact" or None.')
        if reject is not None and (number("reject", reject, low=1.0) and callable(damping)):
            raise ValueError(
                "reject= multiplies the damping, which is a schedule here. Give a number, or LevenbergMarquardt."
            )
        levenberg = damping if isinstance(damping, LevenbergMarquardt) else None
        self._maximize = maximize
        self._exact_model = (quadratic_model or ("exact" if adaptive else "blocks")) == "exact"
        self._options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(
            model,
            loss,
            damping.initial if isinstance(damping, LevenbergMarquardt) else damping,
            params=params,
            approximation=approximation,
            default=default,
            vectors=vectors,
            decay=decay,
            statistics_every=statistics_every,
            inverse_every=inverse_every,
            inverse=inverse,
            power=power,
            norm_constraint=norm_constraint,
            strict=strict,
            **risk_options,
        )
        if levenberg is not None or reject is not None:
            self.trust = Trust(self.curvature, self._hearing.kept, self._exact_model, levenberg, reject)

    def _check_groups(self) -> None:
        super()._check_groups()
        adaptive = False
        for group in self.param_groups:
            as_weight_decay(group["weight_decay"])
            for name in ("lr", "momentum"):
                if (value := group[name]) == "adaptive":
                    adaptive = True
                    if group["norm_constraint"] is not None:
                        raise ValueError(
                            "An adaptive lr or momentum and a norm constraint can't both choose the length of a step; "
                            "give one."
                        )
                elif not isinstance(value, Tensor):  # which others may write to, as schedulers do
                    group[name] = number(name, value)
                else:
                    number(name, value)
        if adaptive:
            for name in ("lr", "momentum"):
                values = {group[name] for group in self.param_groups}
                if "adaptive" in values and len(values) > 1:
                    raise ValueError(
                        f"{name} is adaptive in one group and a number in another; one value serves all then."
                    )
            if self.trust is None:
                self.trust = Trust(self.curvature, self._hearing.kept, self._exact_model, None, None)

    @property
    def _adapts(self) -> bool:
        """Whether this step adapts the damping."""
        levenberg = None if self.trust is None else self.trust.levenberg
        return levenberg is not None and (self._hearing.steps + 1) % levenberg.interval == 0

    @property
    def _adaptive(self) -> bool:
        """Whether the quadratic model gives a coefficient."""
        return any(isinstance(group[name], str) for group in self.param_groups for name in ("lr", "momentum"))

    @property
    def _looks_again(self) -> bool:
        if self.trust is None:
            return False
        return self._adapts or self.trust.reject is not None or (self._adaptive and self._exact_model)

    # --------------------------------------------------------------------------------------------------------- a step
    def _gradient(self) -> dict[str, Tensor]:
        """The gradient of what is minimised: with the sign of `maximize`, and with coupled weight decay."""
        found = super()._gradient()
        if self._maximize:
            found = {key: -g for key, g in found.items()}
        for group in self.param_groups:
            decay = as_weight_decay(group["weight_decay"])
            if decay.kind == "coupled" and decay.strength:
                for p in group["params"]:
                    if (g := found.get(key := self._keys[p])) is not None:
                        found[key] = g + decay.strength * p.to(g.dtype)
        return found

    def _step(self, flat: Flat, report: StepReport) -> None:
        lr, momentum, trust = flat.option("lr"), flat.option("momentum"), self.trust
        known: tuple[QuadraticModel, list[float]] | None = None  # a model, and the update in its coordinates
        if trust is not None and self._adaptive:
            lr, momentum, model, w = trust.coefficients(flat, lr, momentum)
            known = model, w
        report.lr, report.momentum = sorted(set(lr)), sorted(set(momentum))
        flat.combine(lr, momentum, undoable=trust is not None and trust.reject is not None)
        displacement = flat.with_decay()
        self._report(flat, displacement, report)
        if trust is not None and (self._adapts or trust.reject is not None):
            if known is None or displacement is not flat.update:
                known = trust.model(flat, [displacement]), [1.0]
            self._add_and_look(trust, flat, displacement, known, report)
        else:
            flat.add_to_params(displacement)
        if not report.rejected:
            flat.remember(self.state)

    def _add_and_look(
        self,
        trust: Trust,
        flat: Flat,
        displacement: Vectors,
        known: tuple[QuadraticModel, list[float]],
        report: StepReport,
    ) -> None:
        """Move, and see whether the loss changed as predicted; adapt the damping, or undo the step.

        Args:
            displacement: What is added to the parameters.
            known: A quadratic model, and the displacement in its coordinates.
        """
        model, w = known
        levenberg = trust.levenberg
        report.quadratic_change = predicted = model.change(w, levenberg is not None and levenberg.include_damping)
        before, report.loss = [p.clone() for p in flat.params], self._objective(trust)
        flat.add_to_params(displacement)
        report.new_loss = self._objective(trust)
        report.rho = (report.new_loss - report.loss) / predicted if predicted else float("nan")
        if trust.reject is not None and not report.new_loss <= report.loss:
            for p, old in zip(flat.params, before, strict=True):
                p.copy_(old)
            self._reject_step(trust, report)
        elif self._adapts and levenberg is not None and (report.update_norm or report.scale < 1):
            for group in self.param_groups:
                group["damping"] = levenberg.adapted(group["damping"], report.rho)

    def _objective(self, trust: Trust) -> float:
        """The loss of this step's batches at the parameters of now, with weight decay that is part of it."""
        value = -trust.loss() if self._maximize else trust.loss()
        for group in self.param_groups:
            if decay := as_weight_decay(group["weight_decay"]).curvature:
                value += sum(decay / 2 * float(p.square().sum()) for p in group["params"])
        return value

    def _not_finite(self, error: NumericsError, report: StepReport) -> None:
        if self.trust is None or self.trust.reject is None:
            raise error from None
        self._reject_step(self.trust, report)

    def _reject_step(self, trust: Trust, report: StepReport) -> None:
        assert trust.reject is not None
        report.rejected = True
        for group in self.param_groups:
            group["damping"] *= trust.reject
            if trust.levenberg is not None:
                group["damping"] = min(group["damping"], trust.levenberg.max)
