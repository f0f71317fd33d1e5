"""K-FAC as a PyTorch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from curvlinops_plus.blocks import KFAC
from curvlinops_plus.blocks.accumulator import Choice, Choices
from curvlinops_plus.optim.kfac.flat import StepVectors, norm_of
from curvlinops_plus.optim.kfac.policies import (
    GroupOptions,
    LevenbergMarquardt,
    NormConstraint,
    StepReport,
    WeightDecay,
)
from curvlinops_plus.optim.kfac.preconditioner import Inverse, KFACPreconditioner
from curvlinops_plus.optim.kfac.trust import QuadraticModel, Trust
from curvlinops_plus.options import flag, number, one_of
from curvlinops_plus.risk import AllRiskKeywords, Loss
from curvlinops_plus.risk import Vectors as SentBack

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KFACOptimizer(KFACPreconditioner):
    """K-FAC: steps along the gradient, times the inverse of a curvature that follows training.

    A step is, in this order: statistics of the batch (they are added when its loss is called, with
    `Empirical()` in its backward pass); a new inverse, if it is due; `P g = (K + λI)⁻¹ g` with the
    gradients in `.grad`; coefficients; `δ = -lr · P g + momentum · v`, shortened by the norm
    constraint; `θ ← θ + δ` and `v ← δ`; the damping's adaptation. The velocity `v` is the update
    before, scaled by the ratio of the learning rates, as in `torch.optim.SGD`: it does not go on
    when a schedule ends.

    Options of parameter groups, read in every step, so that schedulers may change them: `lr`,
    `momentum`, `damping`, `weight_decay`, `norm_constraint`. Parameters of one block (a layer's
    weight and bias) belong in one group.

    Nothing about a training loop changes: hooks on the model record its calls, in training mode
    with gradients enabled, and hear their losses: the modules that were given, others with the same
    options, or their functions, as `F.cross_entropy(output, y)`; on the output in any shape, order
    of axes or dtype. They are removed by `close()`, at the end of `with KFACOptimizer(...) as
    optimizer:`, and with the optimizer. For other losses, and outputs that are changed before the
    loss, see `listen`. Several batches before a step are one update. `step(closure)` is PyTorch's.

    Parameters without gradient, or of layers that no batch has called yet, don't change. Steps that
    don't call a layer don't change its curvature.

    Args:
        model: The network.
        loss: The loss, or several, as for `EmpiricalRisk`.
        lr: `α`, or "adaptive": the minimum of the quadratic model.
        momentum: `μ`, or "adaptive".
        damping: `λ`, a function of the number of steps before, or `LevenbergMarquardt(...)`.
        params: Parameters or names, as for `EmpiricalRisk`, or groups of them with options of their
            own; default: all that require a gradient.
        approximation, default: As for `curvature`.
        vectors: What is backpropagated for the statistics; default: `MonteCarlo()`.
        decay: Of the statistics' moving average, per update; batches are weighted by numbers of
            examples, or loss terms. Below 1 if losses are sums.
        statistics_every: Steps between two updates of the statistics.
        inverse_every: Steps between two refreshes of the inverse; one comes earlier for a layer
            that was never called.
        inverse: "exact" is `(K + λI)⁻¹` with the damping of now, from eigendecompositions;
            "factored" splits `λ` between the factors of each Kronecker product, with the damping of
            the refresh, and is cheaper.
        power: Of `K + λI`, below 0.
        norm_constraint: A number bounds the whole update, `⟨δ, (K + λ) δ⟩ <= c`, with the `K` of
            the last refresh and the `λ` of the step; `NormConstraint` has other ways. "auto" is
            1e-3, and None with adaptive coefficients.
        weight_decay: A number is decoupled, as in AdamW; `WeightDecay` has other kinds.
        quadratic_model: Curvature of the quadratic model: the "blocks", or the "exact" GGN of the
            step's batches. Default: blocks for the damping's adaptation, exact for adaptive
            coefficients.
        reject: Undo steps that raise the loss of their batches, and multiply the damping by this
            number. The loss is then evaluated before and after every step.
        maximize: Go up instead of down.
        strict: Refuse a step for which statistics were due, and no batch was seen; else it takes
            the old ones.
        risk_options: The other options of `EmpiricalRisk`, such as `output` and `mask`.

    Raises:
        ValueError: If an option is out of range, or options contradict each other.
        TypeError: If an option has another type; later, if a scheduler drives what is adaptive.

    Cost: statistics are a backward pass to the layers' outputs; with `Empirical()` your own brings
    the gradients, if the loss is all that it goes back from. A refresh is one eigendecomposition
    (or Cholesky decomposition) per factor, and a product with `K` for the norm constraint; a step
    multiplies every gradient by two or four matrices.

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

    _moves = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        lr: float | Literal["adaptive"] = 0.1,
        momentum: float | Literal["adaptive"] = 0.9,
        damping: float | Callable[[int], float] | LevenbergMarquardt = 1e-3,
        *,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
        approximation: Choices = KFAC,
        default: Choice = KFAC,
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
        **risk_options: Unpack[AllRiskKeywords],
    ) -> None:
        adaptive = "adaptive" in [word for word in (lr, momentum) if isinstance(word, str)]
        if isinstance(norm_constraint, str) and norm_constraint == "auto":
            norm_constraint = None if adaptive else 1e-3
        one_of("quadratic_model", quadratic_model, "blocks", "exact", None)
        number("reject", reject, low=1, optional=True)
        flag("maximize", maximize)
        if reject is not None and callable(damping):
            raise ValueError(
                "reject= multiplies the damping, which is a schedule here; give a number."
            )
        self._levenberg = damping if isinstance(damping, LevenbergMarquardt) else None
        self._reject = reject
        self._sign = -1 if maximize else 1
        self._exact_model = quadratic_model == "exact" or (quadratic_model is None and adaptive)
        self._group_options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
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

    def _check_options(self, options: list[GroupOptions]) -> None:
        adaptive = any("adaptive" in group.coefficients for group in options)
        for name, values in zip(("lr", "momentum"), zip(*(each.coefficients for each in options))):
            if "adaptive" in values and len(set(values)) > 1:
                raise ValueError(
                    f"{name} is adaptive in one group and a number in another; one value serves "
                    "all then."
                )
        if adaptive and any(each.norm_constraint is not None for each in options):
            raise ValueError(
                "Adaptive coefficients and a norm constraint can't both choose the length of a "
                "step."
            )
        super()._check_options(options)
        self._adaptive = adaptive
        looks_again = adaptive or self._levenberg is not None or self._reject is not None
        if self.trust is None and looks_again:
            self.trust = Trust(self.curvature, self._hooks.kept, self._exact_model)
        self._hooks.keeps = self._looks_again

    @property
    def _adapts(self) -> bool:
        """Whether this step adapts the damping."""
        return (
            self._levenberg is not None and (self._hooks.steps + 1) % self._levenberg.interval == 0
        )

    @property
    def _looks_again(self) -> bool:
        return self._adapts or self._reject is not None or (self._adaptive and self._exact_model)

    def _apply(self, vectors: StepVectors, report: StepReport) -> None:
        model = None
        w = [1.0, 1.0]
        if self.trust is not None and self._adaptive:
            model = self.trust.model(vectors, vectors.along())
            coefficients = zip(*(o.coefficients for o in vectors.options), strict=True)
            w = model.minimizer([None if "adaptive" in values else 1.0 for values in coefficients])
        report.lr = [w[0] * lr for lr in vectors.lrs]
        report.momentum = [w[1] * μ for μ in vectors.momenta]
        looks = self.trust is not None and (self._adapts or self._reject is not None)
        shrinks = vectors.combine(w, undoable=looks)
        self._unread = {"scale": vectors.scale, "update_norm": norm_of(vectors.displacement)}
        if self.trust is None or not looks:
            return vectors.move()
        try:
            if model is None or shrinks:
                model = self.trust.model(vectors, [vectors.displacement])
                w = [1.0]
            self._move_and_look(self.trust, vectors, model, w, report)
        except BaseException:  # the model was run once more: out of memory, or interrupted
            vectors.undo()
            raise

    def _move_and_look(
        self,
        trust: Trust,
        vectors: StepVectors,
        model: QuadraticModel,
        w: Sequence[float],
        report: StepReport,
    ) -> None:
        """Move, and see whether the loss changed as predicted; adapt the damping, or undo the step.

        Args:
            model: A quadratic model, and
            w: the displacement in its coordinates.
        """
        rule = self._levenberg
        predicted = model.change(w, rule is not None and rule.include_damping)
        report.quadratic_change = predicted
        report.loss = self._objective(trust)
        vectors.move()
        report.new_loss = self._objective(trust)
        report.rho = (report.new_loss - report.loss) / predicted if predicted else float("nan")
        if self._reject is not None and not report.new_loss <= report.loss:
            vectors.undo()
            self._raise_damping(report)
        elif self._adapts and rule is not None and self._has_moved:
            for group in self.param_groups:
                group["damping"] = rule.adapted(float(group["damping"]), report.rho)

    @property
    def _has_moved(self) -> bool:
        """Whether the step had a direction."""
        return bool(self.last_step.update_norm) or self.last_step.scale < 1

    def _objective(self, trust: Trust) -> float:
        """The loss of this step's batches at the parameters of now, with weight decay that is part
        of it.
        """
        value = self._sign * trust.loss()
        for options, group in zip(self._options, self.param_groups, strict=True):
            decay = options.in_curvature
            if decay:
                value += sum(decay / 2 * float(p.square().sum()) for p in group["params"])
        return value
