"""Sums over data for one layer: what an approximation is made of.

An approximation is a class with two methods: `update` adds what a mini-batch contributes, `finish`
turns the sums into an operator, or into another accumulator that needs one more sweep over the
data. Everything it keeps is a sum, so running averages, merging two data sets, resuming and saving
are written in `blocks.sums`, once.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import Dense, LinearOperator
from curvlinops_plus.linalg.decisions import is_finite
from curvlinops_plus.linalg.gram_sum import add_gram, mirror
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.risk import Group, Layer, LayerBatch, Totals

if TYPE_CHECKING:
    from typing_extensions import Self

# Totals over all batches to the factor `c` in front of the sum of all loss terms.
LossScale = Callable[[Totals], Tensor | float]
# Pairs of what a block has and what it must have.
Parts = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Needs:
    """Bytes that the blocks of a layer take: what `Accumulator.needs` returns.

    Args:
        computing: While they are computed: statistics, and what is made of them before the data are
            read again.
        kept: When they are finished.

    Example: the second method of an approximation that keeps one number per parameter.
        >>> class Mine(Accumulator):
        ...     def needs(self):
        ...         size = 4 * sum(self.layer.params[key].numel() for key in self.group.keys)
        ...         return Needs(computing=size, kept=size)
    """

    computing: int
    kept: int


#: Option to the function `(name, value)` that refuses it.
Readers = Mapping[str, Callable[[str, Any], Any]]


class _MadeByOperators(ABCMeta):
    """A class of which operators make objects, each for a layer, and users don't."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if args or "layer" in options:
            return super().__call__(*args, **options)
        name = cls.__name__
        listed = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise TypeError(
            f"{name}({listed}) is made by operators, for each layer. Give them the class itself, "
            f"curvature(risk, {name}), and with options {name}.using({listed or '...'})."
        )


class Accumulator(metaclass=_MadeByOperators):
    """Sums over data for one layer, or for one group of its parameters.

    Subclasses write `update(batch)`, which calls `self.add(name, value)`, and `finish()`, which
    reads `self.value(name)`.

    Args:
        layer: The layer.
        group: The parameters that form the block; None if the class handles all of a layer's groups
            itself.
        scale: Function of the totals that returns the factor `c` in front of the sum of all loss
            terms.

    Example: the diagonal of each layer's mean gradient outer product, from two lines.
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, curvature
        >>> from curvlinops_plus.linalg import Diagonal
        >>> class MyDiagonal(Accumulator):
        ...     def update(self, batch):
        ...         self.add("d", batch.per_example_grads.square().sum((0, 1)).flatten())
        ...
        ...     def finish(self):
        ...         return Diagonal(self.value("d"))
        >>> data = [(torch.ones(4, 3), torch.zeros(4, 2))]
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), data)
        >>> curvature(risk, MyDiagonal).diagonal().round(decimals=3)
        tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    """

    #: One accumulator per group of parameters. False: one per layer, whose `finish` returns {block
    #: name: operator}.
    per_group: ClassVar[bool] = True
    #: Whether the layer must have an affine rule.
    affine: ClassVar[bool] = False
    #: Whether gradients must be backpropagated: not with `ForwardOnly()`.
    needs_gradients: ClassVar[bool] = False
    #: How many sweeps over the data it takes, with the accumulators that `finish` makes: knowing it
    #: saves some.
    sweeps: int = 1
    #: Of an accumulator for a second sweep: whether `change_basis` is implemented, which streaming
    #: needs.
    changes_basis: ClassVar[bool] = False
    #: Names of attributes with tensors (or None) that the sums depend on, such as the basis that
    #: they are in.
    constants: ClassVar[tuple[str, ...]] = ()

    #: Readers of the options that `using` takes, by name: each refuses what is out of range.
    readers: ClassVar[Readers] = {}

    def __init__(self, layer: Layer, group: Group | None, scale: LossScale) -> None:
        self.layer = layer
        self.group = group
        self.scale = scale
        #: The sums by name, and the names of those of which only the lower triangle is there.
        self.raw: dict[str, Tensor] = {}
        self.halves: set[str] = set()
        #: What each sum is divided by, if not by what the loss is.
        self.counts: dict[str, Tensor | float] = {}
        #: What the sums are of.
        self.totals = Totals()
        #: Whether the sums are known to be finite.
        self.is_finite = False
        #: Whether nothing is added any more: values are made in the memory of the sums.
        self.complete = False
        #: Results of `decompose` that other processes have computed, by the names of
        #: `decompositions`.
        self.decomposed: dict[str, Tensor] = {}

    @classmethod
    def using(cls, **options: Any) -> Approximation:
        """This approximation with options: `KFAC.using(kfac_approx="reduce")`."""
        return Approximation(cls, options)

    @classmethod
    def remark(cls, layer: Layer, **options: Any) -> str:
        """What an operator's table adds to the name of this approximation, with these options, for
        a layer.
        """
        return ""

    @property
    def sums(self) -> dict[str, Tensor]:
        """The running sums by name, as a whole, to be written to."""
        while self.halves:
            mirror(self.raw[self.halves.pop()])
        return self.raw

    @sums.setter
    def sums(self, sums: dict[str, Tensor]) -> None:
        self.raw = sums
        self.halves = set()
        self.is_finite = False

    # ------------------------------------------------------------------------------- for subclasses
    @abstractmethod
    def update(self, batch: LayerBatch) -> None:
        """Add what one mini-batch contributes. Called once per piece of vectors; sums over pieces
        are right by linearity.
        """

    @abstractmethod
    def finish(self) -> LinearOperator | Mapping[str, LinearOperator] | Accumulator:
        """The block made of the sums, or an accumulator that needs one more sweep. Leaves the sums
        as they are.
        """

    def add(
        self,
        name: str,
        value: Tensor,
        count: Tensor | float | None = None,
        is_shared: bool = True,
    ) -> None:
        """Add to a running sum.

        Args:
            name: Of the sum.
            value: What to add.
            count: What to add to the sum's own divisor, a number or a tensor that broadcasts; None
                if the sum is scaled like the loss, `c Σ`.
            is_shared: Whether somebody else may have the tensor `value`. If nobody has, a large one
                is not copied.
        """
        if name in self.raw:
            self.raw[name] += value
        else:
            self.raw[name] = value.clone() if is_shared else value
        if count is not None:
            # In single precision large numbers stop growing, and whole ones would decay in it.
            if isinstance(count, Tensor):
                count = count.double()
            self.counts[name] = self.counts.get(name, 0.0) + count

    def add_rows(
        self, name: str, rows: Tensor, ones: bool = False, count: float | None = None
    ) -> None:
        """Add `rowsᵀ rows` to a running sum.

        Args:
            name: Of the sum.
            rows: `[M, d]`.
            ones: Whether each row is extended by a 1 at its end, the same in every call.
            count: As for `add`.
        """
        rows = at_least_float32(rows)
        if ones:
            rows = torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1)
        total = self.raw.get(name)
        self.raw[name] = add_gram(rows if total is None else rows.to(total.dtype), total)
        self.halves.add(name)
        if count is not None:
            self.counts[name] = self.counts.get(name, 0.0) + count

    def value(self, name: str) -> Tensor:
        """The sum over its own count, or times the loss's factor `c`.

        Raises:
            NumericsError: If it has NaN or infinite entries.
        """
        if name not in self.raw:
            raise KeyError(f"{self.layer.title}: nothing was added to {name!r} yet.")
        total = self.sums[name]
        # What is added to later is not written to.
        out = total if self.complete else None
        if name in self.counts:
            count = self.counts[name]
            if isinstance(count, Tensor):
                count = torch.where(count > 0, count, 1.0).to(total)
            elif not count > 0:
                count = 1.0
            value = torch.div(total, count, out=out)
        else:
            factor = self.scale(self.totals)
            if isinstance(factor, Tensor):
                factor = factor.to(total)
            value = torch.mul(total, factor, out=out)
        if self.complete:
            self.counts[name] = 1.0
        if self.is_finite:
            return value
        # The sum of all entries is finite unless one of them is not, or it overflows: look at each
        # of them only then.
        if not is_finite(value.sum()) and not bool(value.isfinite().all()):
            raise NumericsError(
                f"{self.layer.title}: the statistic {name!r} has NaN or infinite entries. Look for "
                "NaN in inputs, targets and parameters, or for overflow in half precision."
            )
        return value

    def decompositions(self) -> dict[str, Dense]:
        """The matrices that `finish` decomposes, by name, so that processes can share this work;
        none by default.
        """
        return {}

    def decompose(self, name: str, M: Dense) -> Tensor:
        """The decomposition of a matrix of `decompositions`, a tensor like its entries."""
        raise NotImplementedError

    @property
    def block_name(self) -> str:
        """The name of its block, or of its layer if it makes all blocks of it."""
        return self.layer.name if self.group is None else self.group.name

    @property
    def groups(self) -> list[Group]:
        """The groups of parameters of its blocks."""
        return list(self.layer.groups) if self.group is None else [self.group]

    def needs(self) -> Needs | None:
        """How much memory the block takes; None if that is not known. Nothing is computed for
        it.
        """
        return None

    def exact_parts(self, block: LinearOperator, J: Tensor, batches: Sequence[LayerBatch]) -> Parts:
        """What is exact of a block: pairs of what the block has and what it must have, for
        `K.verify()`.

        Override it for an approximation with other properties; an empty list if nothing of it is
        exact. By default the trace, where the batch is one gradient of one position. Sums of
        several gradients lose it in KFAC, but we know no approximation that does not keep it there,
        of factors, diagonals or sketches.

        Args:
            block: Made of `batches`.
            J: Gradients by plain autograd, [V, N, *b, rows, columns], times `√c`: the exact block
                is `Σ vec(J) vec(J)ᵀ`. V = 0 with `ForwardOnly()`.
            batches: What `update` got, restricted to the parameters of the block. Their gradients
                lack `√c`.
        """
        return [(block.trace, J.square().sum())] if is_one_product(J, batches) else []

    # ------------------------------------------------------------------------------------- for sums
    def empty(self) -> Self:
        """The same without anything added to it."""
        # As `copy.copy`, which takes several times as long.
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.raw = {}
        other.halves = set()
        other.is_finite = False
        other.counts = {}
        other.totals = Totals()
        other.decomposed = {}
        return other

    def copy(self) -> Self:
        """The same; changes of one are none of the other."""
        other = self.empty()
        other.sums = {name: total.clone() for name, total in self.sums.items()}
        other.counts = dict(self.counts)
        other.totals = self.totals
        return other

    def shared(self) -> Self:
        """The same with the same tensors, for others that replace them."""
        other = self.empty()
        other.raw = dict(self.raw)
        other.halves = set(self.halves)
        other.counts = dict(self.counts)
        other.totals = self.totals
        return other

    def change_basis(self, before: Accumulator) -> None:
        """Take over the sums of an accumulator of the same sweep, for streaming (see
        `CurvatureEstimator.refresh`).

        An approximation of several sweeps makes a new accumulator for its second sweep whenever it
        is refreshed. The batches that the previous one has summed are not read again; this method
        expresses its sums in the new basis.

        Raises:
            UnsupportedError: If that is not possible; the approximation needs to see all data in
                each sweep.
        """
        raise self.streaming_error()

    def streaming_error(self) -> UnsupportedError:
        """What to raise for an approximation that can't be updated batch by batch."""
        return UnsupportedError(
            f"{self.layer.title}: {type(self).__name__} makes several sweeps over the same data, "
            "so it can't be updated batch by batch. Use KFAC, EKFAC, DiagonalBlock or FullBlock, "
            "or curvature(risk, ...) over a whole data set."
        )

    def state_dict(self) -> dict[str, Any]:
        """Sums, divisors and what they depend on, in copies."""
        sums = {name: total.detach().clone() for name, total in self.sums.items()}
        counts: dict[str, Tensor | float] = {}
        for name, count in self.counts.items():
            counts[name] = count.clone() if isinstance(count, Tensor) else float(count)
        tensors = {name: getattr(self, name) for name in self.constants}
        constants = {name: t.clone() for name, t in tensors.items() if t is not None}
        return {"sums": sums, "counts": counts, "constants": constants}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        device = self.layer.device
        self.sums = {name: total.to(device, copy=True) for name, total in state["sums"].items()}
        for name, count in state["counts"].items():
            if isinstance(count, Tensor):
                count = count.to(device, torch.float64)
            self.counts[name] = count
        for name in self.constants:
            constant = state["constants"].get(name)
            setattr(self, name, None if constant is None else constant.to(device, copy=True))


def is_one_product(J: Tensor, batches: Sequence[LayerBatch]) -> bool:
    """Whether there is one gradient of one position, `g aᵀ`, which has an exact Kronecker
    product.
    """
    roles = batches[0].layer.roles
    if len(roles) > 1 or J.shape[:2] != (1, 1):
        return False
    return not roles or batches[0].grads.shape[2] == 1


def products(block: LinearOperator, J: Tensor) -> tuple[Tensor, Tensor]:
    """A product with the block, and with `Σ vec(J) vec(J)ᵀ` of each of the `*b` matrices: for
    `exact_parts`.
    """
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(J.shape[2:], generator=generator, dtype=torch.float64, device="cpu").to(J)
    # Σ ⟨J, X⟩ J
    inner = (J * X).sum((-2, -1), keepdim=True)
    return block @ X.flatten(), (inner * J).sum((0, 1)).flatten()


class Approximation:
    """An accumulator class together with options: what `curvature` takes for each layer."""

    def __init__(self, kind: type[Accumulator], options: Mapping[str, Any] | None = None) -> None:
        self.kind = kind
        self.options = dict(options or {})
        for name, value in self.options.items():
            if name in kind.readers:
                kind.readers[name](name, value)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.kind.__name__}({options})" if options else self.kind.__name__


Choice = type[Accumulator] | Approximation | str
"""What one layer gets: `KFAC`, "kfac", or with options `KFAC.using(kfac_approx="reduce")`."""

Choices = Choice | Mapping[Any, Choice]
"""What the layers of a risk get: one `Choice` for all, or a mapping from names of layers, globs and
types of modules to one.
"""
