"""Sums over data for one layer: what an approximation is made of.

An approximation is a class with two methods: `update` adds what a mini-batch contributes, `finish` turns the sums into
an operator, or into another accumulator that wants to see the data once more. Everything it keeps is a sum, so running
averages, merging two data sets, resuming and saving are written here, once.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.gram import GramSum
from curvlinops_plus.risk import Group, Layer, LayerBatch, Totals

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Accumulator", "Approximation", "needs_gradients"]


class Accumulator(ABC):
    """Sums over data for one layer, or for one group of its parameters.

    Subclasses write `update(seen)`, which calls `self.add(name, value)`, and `finish()`, which reads
    `self.value(name)`.

    Args:
        layer: The layer.
        group: The parameters that form the block; None if the class handles all of a layer's groups itself.
        scale: Totals to the factor `c` in front of the sum of all loss terms.

    Example: the diagonal of each layer's mean gradient outer product, from two lines.
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> from curvlinops_plus.linalg import Diagonal
        >>> class MyDiagonal(Accumulator):
        ...     def update(self, seen):
        ...         self.add("d", seen.per_example_grads.square().sum((0, 1)).flatten())
        ...     def finish(self):
        ...         return Diagonal(self.value("d"))
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), [(torch.ones(4, 3), torch.zeros(4, 2))])
        >>> curvature(risk, MyDiagonal).diagonal().round(decimals=3)
        tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    """

    #: One accumulator per group of parameters. False: one per layer, whose `finish` returns {block name: operator}.
    per_group: ClassVar[bool] = True
    #: Whether the layer must have an affine rule.
    affine: ClassVar[bool] = False
    #: Of an accumulator for a second sweep: whether `carry` works, so that streams can have it.
    carries: ClassVar[bool] = False
    #: Names of tensors that the sums depend on, such as the basis that they are in; None is allowed.
    constants: ClassVar[tuple[str, ...]] = ()

    def __init__(self, layer: Layer, group: Group | None, scale: Callable[[Totals], Tensor | float]) -> None:
        self.layer, self.group, self.scale = layer, group, scale
        self._sums: dict[str, Tensor] = {}
        self._waiting: dict[str, GramSum] = {}
        self.counts: dict[str, Tensor | float] = {}
        self.totals = Totals()

    @classmethod
    def using(cls, **options: Any) -> Approximation:
        """This approximation with options: `KFAC.using(kfac_approx="reduce")`."""
        return Approximation(cls, options)

    @property
    def sums(self) -> dict[str, Tensor]:
        """The running sums by name."""
        while self._waiting:
            name, rows = self._waiting.popitem()
            self._absorb(name, rows.value())
        return self._sums

    @sums.setter
    def sums(self, sums: dict[str, Tensor]) -> None:
        self._sums, self._waiting = sums, {}

    # ----------------------------------------------------------------------------------------------- for subclasses
    @abstractmethod
    def update(self, seen: LayerBatch) -> None:
        """Add what one mini-batch contributes. Called once per piece of vectors; sums over pieces are right by
        linearity.
        """

    @abstractmethod
    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        """The block made of the sums, or an accumulator that wants one more sweep. Leaves the sums as they are."""

    def add(self, name: str, value: Tensor, count: Tensor | float | None = None) -> None:
        """Add to a running sum.

        Args:
            name: Of the sum.
            value: What to add.
            count: What to add to the sum's own divisor, a number or a tensor that broadcasts; None if its mean is the
                loss's, `c Σ`.
        """
        # What was given may be shared with others.
        self._absorb(name, value if name in self._sums else value.clone(), count)

    def add_rows(self, name: str, rows: Tensor, ones: bool = False, count: Tensor | float | None = None) -> None:
        """Add `rowsᵀ rows` to a running sum; what is waiting to be multiplied together is part of it.

        Args:
            name: Of the sum.
            rows: `[M, d]`.
            ones: Whether a 1 at the end of each row is meant, in every call.
            count: As for `add`.
        """
        self._waiting.setdefault(name, GramSum(ones)).add(rows)
        self._tally(name, count)

    def _absorb(self, name: str, value: Tensor, count: Tensor | float | None = None) -> None:
        if name in self._sums:
            self._sums[name] += value
        else:
            self._sums[name] = value
        self._tally(name, count)

    def _tally(self, name: str, count: Tensor | float | None) -> None:
        if count is not None:
            self.counts[name] = self.counts.get(name, 0.0) + count

    def value(self, name: str) -> Tensor:
        """The sum over its own count, or times the loss's factor `c`.

        Raises:
            NumericsError: If it has NaN or infinite entries.
        """
        if name not in self.sums:
            raise KeyError(f"{self.layer.title}: nothing was added to {name!r} yet.")
        total = self.sums[name]
        if name in self.counts:
            count = torch.as_tensor(self.counts[name], dtype=total.dtype, device=total.device)
            value = total / torch.where(count > 0, count, torch.ones_like(count))
        else:
            value = total * torch.as_tensor(self.scale(self.totals), dtype=total.dtype, device=total.device)
        # A NaN on the diagonal of a Gram matrix is there whenever any row has one; all of a sum is looked at for the
        # rest.
        if not bool(value.sum().isfinite()) and not bool(value.isfinite().all()):
            raise NumericsError(f"{self.layer.title}: the statistic {name!r} has NaN or infinite entries.")
        return value

    @property
    def more(self) -> bool:
        """Whether `finish` will return an accumulator that wants to see the data again; saying so saves passes."""
        return False

    # -------------------------------------------------------------------------------------------------- for drivers
    def count(self, part: Totals) -> None:
        """Note that a batch is over."""
        self.totals.add(part)

    def decay(self, factor: float) -> None:
        """Multiply all sums and divisors: calling it before each batch makes values exponential moving averages."""
        for total in self.sums.values():
            total *= factor
        self.counts = {name: count * factor for name, count in self.counts.items()}
        self.totals.loss_count = self.totals.loss_count * factor
        self.totals.loss = self.totals.loss * factor

    def adopt(self, other: Accumulator) -> None:
        """Add to the sums of another accumulator from now on."""
        self._sums, self._waiting, self.counts, self.totals = other._sums, other._waiting, other.counts, other.totals

    def empty(self) -> Self:
        """The same without anything added to it."""
        other = copy.copy(self)
        other.sums, other.counts, other.totals = {}, {}, Totals()
        return other

    def carry(self, before: Accumulator) -> None:
        """Take over what an accumulator of the same sweep has summed, for streams (see `CurvatureEstimator.refresh`).

        An approximation of several sweeps makes a new accumulator for its second sweep whenever it is refreshed. What
        the one before has seen is not seen again; this method says how its sums look to the new one.

        Raises:
            UnsupportedError: If they can't be carried over; the approximation needs to see all data in each sweep.
        """
        raise UnsupportedError(
            f"{self.layer.title}: {type(self).__name__} makes several sweeps over the same data, so it can't be kept "
            "up batch by batch. Use KFAC, EKFAC, DiagonalBlock or FullBlock, or curvature(risk, ...) over a whole data "
            "set."
        )

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator of the same layer has seen: the union of two data sets.

        Raises:
            ValueError: If it is of another class or layer, or its sums have other names or shapes.
        """
        if problem := self.mismatch(other) or self.totals.mismatch(other.totals):
            raise ValueError(f"{self.layer.title}: {problem}")
        mine = (type(self), self.layer.name, {n: s.shape for n, s in self.sums.items()})
        theirs = (type(other), other.layer.name, {n: s.shape for n, s in other.sums.items()})
        if mine[:2] != theirs[:2] or (self.sums and other.sums and mine[2] != theirs[2]):
            raise ValueError(f"Can't merge accumulators of different kind: {_kind(*mine)} and {_kind(*theirs)}.")
        for name, total in other.sums.items():
            self.add(name, total.clone(), other.counts.get(name))
        self.totals.add(other.totals)

    def mismatch(self, other: Accumulator) -> str | None:
        """Why the sums of another accumulator of this class must not be added, None if they may."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Sums and divisors, in tensors and plain Python."""
        return {
            "sums": {name: total.detach().clone() for name, total in self.sums.items()},
            "counts": {name: _plain(count) for name, count in self.counts.items()},
            "examples": self.totals.examples,
            "terms": self.totals.terms,
            "loss_count": float(self.totals.loss_count),
            "loss": float(self.totals.loss),
            "shares": list(self.totals.weights),
            "constants": {
                name: t.detach().clone() for name in self.constants if (t := getattr(self, name)) is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over sums and divisors; nothing changes if some are missing.

        Raises:
            ValueError: If keys are missing.
        """
        missing = {"sums", "counts", "examples", "terms", "loss_count", "loss", "shares", "constants"} - set(state)
        if missing:
            raise ValueError(f"The state of {self.layer.title} lacks {sorted(missing)}; is the file cut off?")
        self.sums = {name: total.to(self.layer.device).clone() for name, total in state["sums"].items()}
        self.counts = {
            name: count.to(self.layer.device) if isinstance(count, Tensor) else count
            for name, count in state["counts"].items()
        }
        self.totals = Totals(
            state["examples"], state["terms"], state["loss_count"], state["loss"], weights=tuple(state["shares"])
        )
        for name in self.constants:
            t = state["constants"].get(name)
            setattr(self, name, None if t is None else t.to(self.layer.device).clone())


class Approximation:
    """An accumulator class together with options: what `curvature` takes for each layer."""

    def __init__(self, kind: type[Accumulator], options: Mapping[str, Any] | None = None) -> None:
        self.kind, self.options = kind, dict(options or {})

    @classmethod
    def of(cls, given: Any) -> Approximation:
        """Accept an `Approximation` or an `Accumulator` class.

        Raises:
            ValueError: For anything else.
        """
        if isinstance(given, Approximation):
            return given
        if isinstance(given, type) and issubclass(given, Accumulator):
            return cls(given)
        raise ValueError(
            f"{given!r} is no approximation. Expected an Accumulator class such as KFAC, EKFAC, DiagonalBlock, "
            "FullBlock, or one with options such as "
            f"KFAC.using(kfac_approx='reduce')."
        )

    def __call__(self, layer: Layer, group: Group | None, scale: Callable[[Totals], Tensor | float]) -> Accumulator:
        return self.kind(layer, group, scale, **self.options)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.kind.__name__}({options})" if options else self.kind.__name__


def _plain(count: Tensor | float) -> Tensor | float:
    return count.detach().clone() if isinstance(count, Tensor) and count.ndim else float(count)


def _kind(cls: type, name: str, shapes: Mapping[str, torch.Size]) -> str:
    return f"{cls.__name__} of layer {name!r} with { {n: list(s) for n, s in shapes.items()} }"


def needs_gradients(who: Accumulator) -> UnsupportedError:
    """What to raise for an approximation made of gradients when none are sent back."""
    return UnsupportedError(
        f"{who.layer.title}: {type(who).__name__} is made of gradients, and ForwardOnly() sends nothing "
        "back. Use Exact(), MonteCarlo() or Empirical(), or "
        f"leave the layer's parameters {list(who.layer.params)} out of `params`."
    )
