"""Passes of one batch through a model: forward with tangents, or without, and back through the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.batched import (
    add_vjp,
    checked_chunk_size,
    columns_at_once,
    columns_sent_back,
    join_rows,
    split_rows,
    vjp,
)
from curvlinops_plus.exact.double_backward import operation_context
from curvlinops_plus.exact.operations import Operations, Stopped, checkpoints_in_words, replaced_again
from curvlinops_plus.exact.tangents import PassingTangents
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.graph import is_narrow, send_in_range
from curvlinops_plus.risk.process_state import quiet

T = TypeVar("T")


class _TangentMissed(Exception):
    """A tangent was needed after it was freed, or may have been."""


Outputs = Sequence[Tensor]
# Where results of a batch have fewer numbers together, their tangents may stay: freeing them takes longer.
FEW_NUMBERS = 2**19

Read = Callable[[nn.Module, Batch], tuple[Outputs, Any]]
# From the outputs, and what was read beside them, a linear function of vectors [K, *output], one for each output.
OutputMap = Callable[[Outputs, Any], Callable[[list[Tensor]], T]]
# Such a function to vectors of the outputs, None where it is zero.
OutputProduct = OutputMap[Sequence[Tensor | None]]


class ModelPasses:
    """What runs a model on one batch; all inside of `differentiable`.

    Args:
        risk: Model, parameters and data.
        read: `read(model, batch)` runs the model and returns the tensors that are differentiated, and anything else.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.

    Attributes:
        largest: Numbers in the largest intermediate result; 0 asks to watch the next forward pass.
        numbers: Numbers that operations returned per example of that pass.
        stopped: Whether an operation of the last pass with gradients kept none of an input that has one.
        hooked: Whether the model may have registered hooks in that pass.

    Raises:
        ValueError: If `chunk_size` is less than one.
    """

    def __init__(self, risk: EmpiricalRisk, read: Read, chunk_size: int | None = None) -> None:
        self.risk, self.read, self.chunk_size = risk, read, checked_chunk_size(chunk_size)
        self.keys, self.params = list(risk.params), list(risk.params.values())
        self.largest, self.numbers, self.stopped, self.hooked = 0, 0, False, False
        self._replaced = False  # whether operations were replaced
        self._narrow = is_narrow(self.params)
        self._frees_tangents, self._most_freed = True, 0

    @property
    def _run(self) -> Read:
        """`read`, which is watched closely the first time, and always if operations have to be replaced."""
        return self._read_again if self.is_watched_enough else self._watched_read

    @property
    def is_watched_enough(self) -> bool:
        return bool(self.largest) and not self._replaced

    def _watched_read(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Any]:
        with Operations() as watch:
            found = self.read(model, batch)
        self.largest, self._replaced = max(self.largest, watch.largest), self._replaced or watch.replaced
        self.numbers = max(self.numbers, watch.numbers // batch.num_examples)
        self.stopped = watch.stopped and torch.is_grad_enabled()
        if torch.is_grad_enabled():
            self.hooked = watch.hooked
        return found

    def _read_again(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Any]:
        if not torch.is_grad_enabled():
            return self.read(model, batch)
        with Stopped() as watch:
            found = self.read(model, batch)
        self.stopped, self.hooked = watch.found, watch.hooked
        return found

    def at(self, batch: Batch, function: Callable[[Outputs, Any, list[Tensor]], T]) -> T:
        """`function(F, extra, parameters)` while the model has these parameters; `F` has a graph."""
        free = [p.detach().requires_grad_() for p in self.params]

        def inside(model: nn.Module) -> T:
            with nullcontext() if self.is_watched_enough else replaced_again(model):
                F, extra = self._run(model, batch)
                return function(F, extra, free)

        with checkpoints_in_words():
            return self.risk.at(dict(zip(self.keys, free)), inside)

    def at_tangent(self, batch: Batch, row: Tensor, function: Callable[..., T]) -> T:  # row [1, n]
        """`function(F, extra, J v, parameters)`: one forward pass, whose graph is there for the backward pass."""
        if self.is_watched_enough and self.numbers * batch.num_examples < FEW_NUMBERS:
            return self._at_tangent(batch, row, function, None)
        if self._frees_tangents:
            state = RandomState.now(self.risk.device)
            try:
                return self._at_tangent(batch, row, function, True)
            except _TangentMissed:
                state.restore()
        found = self._at_tangent(batch, row, function, False)
        self._frees_tangents = False  # unless the forward pass has an error either way
        return found

    def _at_tangent(self, batch: Batch, row: Tensor, function: Callable[..., T], frees: bool | None) -> T:
        free = [p.detach().requires_grad_() for p in self.params]

        with ExitStack() as level:
            level.enter_context(forward_ad.dual_level())
            # `make_dual` copies a tangent that is a part of a larger tensor, unless it doesn't look like one.
            V = [torch.from_dlpack(t[0].detach()) for t in split_rows(row, self.params)]
            duals = [forward_ad.make_dual(p, v) for p, v in zip(free, V, strict=True)]
            passing = None if frees is None else PassingTangents(_tangents(duals), frees)

            def inside(model: nn.Module) -> T:
                with nullcontext() if self.is_watched_enough else replaced_again(model):
                    with level:  # left before the backward pass, which would propagate the tangents, too
                        F, extra, JV = self._with_tangents(model, batch, passing)
                    return function(F, extra, JV, free)

            return self.risk.at(dict(zip(self.keys, duals)), inside)

    def _with_tangents(
        self, model: nn.Module, batch: Batch, passing: PassingTangents | None
    ) -> tuple[Outputs, Any, list[Tensor]]:
        try:
            with passing or nullcontext():
                F, extra = self._run(model, batch)
                JV = [t.detach()[None] for t in _tangents(F)]
        except (UnsupportedError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if passing is None or not passing.free:
                raise
            raise _TangentMissed from error  # perhaps hooks of saved tensors, which parts of models don't allow
        if passing is not None and passing.free:
            # What a GPU computed is looked at only where more is freed: the host would wait for it.
            look = self.risk.device.type == "cpu" or passing.freed > self._most_freed
            if passing.missed_one(JV if look else ()):
                raise _TangentMissed
            self._most_freed = max(self._most_freed, passing.freed)
        return F, extra, JV

    def jvp_forward(self, batch: Batch, rows: Tensor, state: RandomState) -> list[Tensor]:
        """`J v` without a graph, [K, n] -> [K, *output]; random numbers are those of the forward pass at `state`."""
        after = RandomState.now(self.risk.device)
        values, V = tuple(p.detach() for p in self.params), split_rows(rows, self.params)

        def function(*parameters: Tensor) -> tuple[Tensor, ...]:
            found = self.risk.at(dict(zip(self.keys, parameters)), lambda model: self._run(model, batch))
            return tuple(found[0])

        def one(*tangents: Tensor) -> tuple[Tensor, ...]:
            return torch.func.jvp(function, values, tangents)[1]

        def alone(k: int) -> list[Tensor]:
            state.restore()
            leaves = [p.detach().requires_grad_(torch.is_grad_enabled()) for p in values]
            with forward_ad.dual_level():
                made = _tangents(function(*(forward_ad.make_dual(p, v[k]) for p, v in zip(leaves, V, strict=True))))
            return [t.detach() for t in made]

        try:
            if len(rows) > 1:
                try:
                    state.restore()
                    with quiet(), torch.no_grad():
                        return list(torch.func.vmap(one, randomness="same")(*V))
                except RuntimeError:  # an operation that can't be vectorised; all else fails again
                    pass
            columns = with_least_graph(self.risk.device, lambda: [alone(k) for k in range(len(rows))])
            return [torch.stack(ts) for ts in zip(*columns, strict=True)]
        finally:
            after.restore()

    def vjp(
        self,
        F: Outputs,
        free: list[Tensor],
        vectors: Sequence[Tensor | None],
        K: int,
        total: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """`Jᵀ u` for K vectors, [K, *output] -> [K, n], added to `total` if there is one; the last frees the graph."""
        sent = [(f, v) for f, v in zip(F, vectors, strict=True) if v is not None and f.requires_grad]
        narrow = self._narrow or is_narrow(F)
        if K == 1 and not narrow:
            if total is None:
                total = torch.zeros(1, self.risk.space.dim, dtype=self.risk.dtype, device=self.risk.device)
            return add_vjp([f for f, _ in sent], free, [v.to(f.dtype) for f, v in sent], total, last)
        return self._vjp_of_several(sent, free, K, total, last, narrow)

    def _vjp_of_several(
        self,
        sent: list[tuple[Tensor, Tensor]],
        free: list[Tensor],
        K: int,
        total: Tensor | None,
        last: bool,
        narrow: bool,
    ) -> Tensor:
        size = columns_sent_back(self.chunk_size, self._numbers_of_a_column, self.largest, free)
        if total is None and size < K:
            total = torch.zeros(K, self.risk.space.dim, dtype=self.risk.dtype, device=self.risk.device)
        for start in range(0, K, size):
            k = min(size, K - start)
            U, ends = [v[start : start + k] for _, v in sent], last and start + k == K
            parts = _sent_back([f for f, _ in sent], free, U, ends, narrow) if sent else [None] * len(free)
            if total is None:
                return join_rows(parts, free, K, self.risk.dtype)
            join_rows(parts, free, k, self.risk.dtype, total[start : start + k])
        assert total is not None
        return total

    def columns(self) -> int:
        """How many columns are taken forward together."""
        return columns_at_once(self.chunk_size, self._numbers_of_a_column)

    @property
    def _numbers_of_a_column(self) -> int:  # forward mode and backward pass hold a few results of each at a time
        return self.risk.space.dim + 4 * self.largest


def jvp_double_backward(F: Outputs, free: list[Tensor], rows: Tensor, why: str | None) -> list[Tensor]:
    """`J v` as the derivative of `wᵀ J` with respect to `w`, [K, n] -> [K, *output]."""
    JV = {id(f): f.new_zeros(len(rows), *f.shape) for f in F}
    reached = [f for f in F if f.requires_grad]
    w = [torch.zeros_like(f, requires_grad=True) for f in reached]
    with operation_context(why):
        back = torch.autograd.grad(reached, free, w, create_graph=True, allow_unused=True) if reached else ()
        used = [(g, v) for g, v in zip(back, split_rows(rows, free)) if g is not None and g.requires_grad]
        if used:
            found = vjp([g for g, _ in used], w, [v for _, v in used])
            JV |= {id(f): t.detach() for f, t in zip(reached, found, strict=True) if t is not None}
    return [JV[id(f)] for f in F]


def _sent_back(F: Outputs, free: list[Tensor], U: list[Tensor], last: bool, narrow: bool) -> list[Tensor | None]:
    """The parts of `Jᵀ u`, in the range of float16 if they go through it."""
    if not narrow:
        return vjp(F, free, [u.to(f.dtype) for f, u in zip(F, U, strict=True)], last)
    wide = [u.to(torch.promote_types(u.dtype, torch.float32)) for u in U]
    arrived = send_in_range(lambda vectors: vjp(F, free, vectors), F, wide, narrow=True)
    return [arrived.take(at) for at in range(len(free))]


def with_least_graph(device: torch.device, run: Callable[[], T]) -> T:
    """`run()` without a graph, unless the model differentiates in its forward pass."""
    state = RandomState.now(device)
    try:
        with torch.no_grad():
            return run()
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except RuntimeError:
        state.restore()
        with torch.enable_grad():
            return run()


def _tangents(outputs: Outputs) -> list[Tensor]:
    found = [forward_ad.unpack_dual(f) for f in outputs]
    return [torch.zeros_like(f) if t is None else t for f, t in found]
