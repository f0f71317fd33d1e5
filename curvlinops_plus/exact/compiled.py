"""Products with batches by compiled functions, which are found equal to the eager ones first.

What is compiled is one function of tensors alone: parameters, copies of buffers, a batch, vectors
and random numbers. `torch.compile` guards all else that it reads, such as options of modules, and
compiles once more if that has changed.

What can't be compiled, is random, leaves something behind in the model, has other numbers or takes
longer is computed eagerly, after a warning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias
from warnings import warn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops_plus.errors import CurvatureWarning, level_of_user
from curvlinops_plus.exact.differentiable import differentiable
from curvlinops_plus.exact.passes import Passes
from curvlinops_plus.exact.reading import AddUp, Reading
from curvlinops_plus.exact.traced_batch import Asked, GivenDraws, Names, NotedDraws, Trace
from curvlinops_plus.layer.kept import Snapshot
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import Draws, Totals
from curvlinops_plus.risk.batches import Batch, tensors_of
from curvlinops_plus.risk.check import require_repeatable
from curvlinops_plus.risk.preserve import training_modules, with_short_products

#: From a batch, vectors [K, n] and a reading to products with the batch, before they are reduced.
OfBatch: TypeAlias = Callable[[Batch, Tensor, Reading], Tensor]

_BACKEND = "inductor"
# A compiled product is left if it takes longer than the eager one, by the best of so many trials.
_TRIALS = 3
_is_timed = True
# Largest difference from the eager product that is rounding, by bytes of the coarsest numbers: of
# the part of each parameter, relative to that and a thousandth of the whole.
_SAME = {2: 5e-2, 4: 1e-4, 8: 1e-7}
_WORDS = {False: "one vector", True: "several vectors at once"}
_functions_made = count()
_C: Any = torch._C


class NotCompiled(Exception):
    """Why a product is computed eagerly."""


class ProductForms(NamedTuple):
    """A product of an operator, in all forms."""

    eager: AddUp
    """With all data."""
    of_batch: OfBatch
    """With one batch."""
    traced: Callable[[Trace, Tensor, Reading], Tensor]
    """The same by `torch.func`."""
    over_data: Callable[[OfBatch, Tensor, Reading], Tensor]
    """From a product with one batch, columns and a reading to the product with all data."""


class Compiled:
    """A product with all data by compiled functions of its batches.

    Args:
        operator: Its name, for messages.
        passes: They have the risk, and how the model is run.
        product: The product, in all forms.
        compares_few: Whether two evaluations of the model on a few examples have to agree.

    Attributes:
        reasons: Whether there are several columns -> why these are multiplied eagerly.

    Cost: of the first product with each shape of batches an eager one, the time of the compiler,
    and a few products of both kinds, whose times are compared.
    """

    def __init__(
        self, operator: str, passes: Passes, product: ProductForms, compares_few: bool
    ) -> None:
        self.operator = operator
        self.passes = passes
        self.product = product
        self.compares_few = compares_few
        self._names = Names(passes.risk)
        self.reasons: dict[bool, str] = {}
        # Whether there are several columns, and a state of the modules -> functions: of the first
        # kind of batches, and of others.
        self._functions: dict[Any, list[Any]] = {}
        # Kinds of batches that were compared -> the random numbers that they ask for.
        self._kinds: dict[Any, Asked] = {}
        # Whether several columns are multiplied one after the other: not all can be vectorised.
        self._one_by_one = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies compile for themselves."""
        return Compiled, (self.operator, self.passes, self.product, self.compares_few)

    def is_on(self, X: Tensor) -> bool:
        """Whether products with columns like these are compiled, as far as is known."""
        return X.shape[1] > 0 and (X.shape[1] > 1) not in self.reasons

    def __call__(self, X: Tensor, reading: Reading) -> Tensor:
        """The product, as an `AddUp`; inside of `differentiable(risk, compiled=True)`."""
        risk = self.passes.risk
        state = RandomState.now(risk.device)
        tensors = [*risk.model.parameters(), *risk.model.buffers()]
        attributes = [{*vars(t)} for t in tensors]
        try:
            reason = _obstacle(self.passes)
            if reason:
                raise NotCompiled(reason)
            inputs = _Inputs(self.passes)
            return self.product.over_data(partial(self._of_batch, inputs), X, reading)
        except NotCompiled as error:
            reason = str(error)
        finally:
            for t, names in zip(tensors, attributes, strict=True):
                for name in vars(t).keys() - names:  # the compiler's
                    delattr(t, name)
        state.restore()
        reading.totals = Totals()
        several = X.shape[1] > 1
        if several and not self._one_by_one and False not in self.reasons:
            self._one_by_one = True
            return self(X, reading)
        with differentiable(risk):
            total = self.product.eager(X, reading)
        # Not before: an error of the eager product is about something else.
        self.reasons[several] = reason
        warn(
            f"{self.operator}(compile=True) multiplies {_WORDS[several]} eagerly. {reason}",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )
        return total

    # ---------------------------------------------------------------------------------- one batch
    def _of_batch(self, inputs: _Inputs, batch: Batch, rows: Tensor, reading: Reading) -> Tensor:
        tensors = tensors_of([batch.X, batch.y, batch.weight])
        shapes = [(t.shape, t.dtype) for t in tensors]
        several = len(rows) > 1
        kind = ((several, inputs.modes), batch.unpack, batch.num_examples, *shapes)
        if kind not in self._kinds:
            self._learn(kind, inputs, batch, rows, reading)
        return self._run(kind, inputs, batch, rows, reading)

    def _run(
        self, kind: Any, inputs: _Inputs, batch: Batch, rows: Tensor, reading: Reading
    ) -> Tensor:
        """By the compiled function for this kind of batches.

        Raises:
            NotCompiled: If it can't be compiled, or fails.
        """
        several = len(rows) > 1
        if several and self._one_by_one:
            first, *others = rows.split(1)
            uncounted = replace(reading, totals=Totals())
            products = [self._of_batch(inputs, batch, first, reading)]
            products += [self._of_batch(inputs, batch, row, uncounted) for row in others]
            return torch.cat(products)
        numbers = _drawn(reading.draws, self._kinds[kind], batch.num_examples)
        rows = rows.flatten().view(rows.shape)  # strides of one row are any numbers
        if several:
            torch._dynamo.mark_dynamic(rows, 0)
        # The first kind has a function without sizes that vary; in that of all others they may.
        number = min(1, [k for k in self._kinds if k[0] == kind[0]].index(kind))
        functions = self._functions.setdefault(kind[0], [])
        hooks = _C._autograd._saved_tensors_hooks_get_disabled_error_message()
        level = forward_ad._current_level
        # Some operations can't have numbers of columns that vary, which is no error here.
        log = logging.getLogger("torch._guards")
        was_disabled = log.disabled
        log.disabled = True
        try:
            if number == len(functions):
                functions.append(self._function(None if number or several else False))
            products, totals = functions[number](
                inputs.parameters,
                self._names.buffer_copies(),
                replace(batch, first=0),
                rows,
                reading.weights,
                numbers,
            )
        except Exception as error:
            # What the compiler traced last may have left modes behind.
            if hooks is None:
                _C._autograd._saved_tensors_hooks_enable()
            if level < 0:
                _end_forward_mode()
            raise NotCompiled(_message(error)) from error
        finally:
            log.disabled = was_disabled
        reading.totals.add(totals)
        return products

    def _function(self, dynamic: bool | None) -> Any:
        """The product with one batch, which is compiled when it is called."""
        passes = self.passes
        traced = self.product.traced
        names = self._names

        def one_batch(
            parameters: Any, buffers: Any, batch: Batch, rows: Tensor, weights: Any, numbers: Any
        ) -> tuple[Tensor, Totals]:
            trace = Trace(passes, names, parameters, buffers, batch)
            reading = Reading(weights, GivenDraws(numbers), Totals())
            products = traced(trace, rows, reading)
            return products, reading.totals

        # What was compiled, and how often it may be, belongs to the code of a function.
        code = one_batch.__code__.replace(co_name=f"one_batch_{next(_functions_made)}")
        copy = FunctionType(code, one_batch.__globals__, closure=one_batch.__closure__)
        return torch.compile(copy, fullgraph=True, dynamic=dynamic, backend=_BACKEND)

    # ------------------------------------------------------------------------------ the comparison
    def _learn(
        self, kind: Any, inputs: _Inputs, batch: Batch, rows: Tensor, reading: Reading
    ) -> None:
        """Compile for a kind of batches, and compare with the eager product.

        Raises:
            NotCompiled: If it can't be compiled, has other numbers, or takes longer.
        """
        risk = self.passes.risk
        if names := training_modules(risk.model):
            raise NotCompiled(f"These modules are in training mode: {names}.")
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(rows.shape, generator=generator, dtype=rows.dtype, device="cpu")
        vectors = normal.to(rows.device)

        def eager(draws: Draws) -> Tensor:
            with differentiable(risk):
                state = RandomState.now(risk.device)
                parts = replace(reading, draws=draws, totals=Totals())
                products = self.product.of_batch(batch, vectors, parts)
                if RandomState.now(risk.device) != state:
                    raise NotCompiled("The model draws random numbers.")
                return products

        def compiled() -> Tensor:
            return self._run(kind, inputs, batch, vectors, replace(reading, totals=Totals()))

        if self.compares_few:
            with differentiable(risk):
                require_repeatable(risk, batch)
        asked: Asked = []
        expected = eager(NotedDraws(reading.draws.again(), asked))
        self._kinds[kind] = asked
        try:
            before = Snapshot(risk.model)
            products = compiled()
            if changed := before.changed():
                raise NotCompiled(f"Calls of the model change its modules {changed[:3]}.")
            self._require_equal(products, expected)
            alike = [k for k in self._kinds if k[0] == kind[0]]
            if _is_timed and len(alike) <= 2:  # the first of each function
                _require_faster(compiled, lambda: eager(reading.draws.again()))
        except NotCompiled:
            del self._kinds[kind]
            raise

    def _require_equal(self, products: Tensor, expected: Tensor) -> None:
        """Compare products [K, n] with eager ones, parameter by parameter.

        Raises:
            NotCompiled: If they differ.
        """
        risk = self.passes.risk
        sizes = self.passes.sizes
        if expected.shape[1] != risk.space.dim:
            sizes = [expected.shape[1]]
        itemsize = self.passes.itemsize or 8
        rounding = with_short_products(_SAME[itemsize], itemsize, risk.device)
        whole = expected.norm()
        for product, part in zip(products.split(sizes, 1), expected.split(sizes, 1), strict=True):
            difference = (product - part).norm()
            if not bool(difference <= rounding * (part.norm() + 1e-3 * whole)):
                relative = float((products - expected).norm() / whole)
                raise NotCompiled(f"Its numbers are others, by {relative:.1g} of the norm.")


class _Inputs:
    """What the batches of a product have in common.

    Attributes:
        modes: Whether modules are in training mode, and their hooks, which the compiler does not
            guard.
        parameters: Their values, in the order of the risk.
    """

    def __init__(self, passes: Passes) -> None:
        self.modes = tuple(
            [
                (m.training, *m._forward_pre_hooks, *m._forward_hooks, *m._backward_hooks)
                for m in passes.risk.model.modules()
            ]
        )
        self.parameters = [p.detach() for p in passes.params]


def _drawn(draws: Draws, asked: Asked, N: int) -> dict[int, list[Tensor]]:
    """The random numbers that N examples ask for, by loss."""
    draws = draws.again()
    # All before the first of them draws: it is the others' original.
    streams = {k: draws.of_loss(k) for k in sorted({k for k, _ in asked}, reverse=True)}
    numbers: dict[int, list[Tensor]] = {k: [] for k in streams}
    for k, shape in asked:
        numbers[k].append(streams[k].uniform(N, *shape[1:]))
    return numbers


def _end_forward_mode() -> None:
    """Leave the level of forward mode that a trace has entered: where it fails, the compiler
    forgets it in Python, or altogether.
    """
    forward_ad._current_level = -1
    # There is at most one level, and no way to ask for it.
    with suppress(RuntimeError):
        _C._enter_dual_level()
    _C._exit_dual_level(level=0)


def _obstacle(passes: Passes) -> str:
    """Why nothing of a risk is compiled, as a sentence; nothing if it may be."""
    risk = passes.risk
    if isinstance(risk.data, Iterator):
        return "The data are an iterator, which can be read only once."
    if risk.sharded:
        return "The parameters are sharded by fully_shard."
    if passes.narrow:
        return "Vectors for a model in float16 are scaled by what it returns."
    if any(loss.warning for loss in risk.losses):
        return "The loss is no mean (or sum) over examples."
    return ""


def _message(error: Exception) -> str:
    """The first line of an error of the compiler, and the line of code that it is about."""
    error = getattr(error, "inner_exception", error)
    lines = str(error).strip().splitlines() or [""]
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    place = f" ({places[-1]})" if places else ""
    return f"{type(error).__name__}: {lines[0]}{place}"


def _require_faster(compiled: Callable[[], Any], eager: Callable[[], Any]) -> None:
    """Compare the times of two functions.

    Raises:
        NotCompiled: If the compiled one takes longer.
    """
    times: dict[Any, list[float]] = {compiled: [], eager: []}
    for _ in range(_TRIALS):
        for function, taken in times.items():
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    ratio = min(times[compiled]) / min(times[eager])
    if ratio > 1:
        raise NotCompiled(f"Compiled, it takes {ratio:.2g} times as long.")
