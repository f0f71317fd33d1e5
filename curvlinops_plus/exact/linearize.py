"""Products with the Jacobian of a model's output, batch by batch, by forward and backward differentiation.

`J v` is forward-mode differentiation: each operation carries a tangent along. That costs about one forward pass more,
and the graph of the same forward pass serves a backward pass after it. Where an operation has no forward mode, or where
it would be wrong (`torch.no_grad()` inside a model stops gradients, but not tangents), `J v` is the derivative of
`wᵀ J` with respect to `w` instead, by two backward passes. Which of the two is right for a model is determined once per
operator, on the first batch: the numbers of a product `Jᵀ M J v` tell it themselves, others need a check of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.batched import (
    agree,
    checked_chunk_size,
    columns_at_once,
    is_generic,
    join_rows,
    split_rows,
    vjp,
)
from curvlinops_plus.exact.double_backward import only_rounding, operation_context, refuse_once_differentiable, tried
from curvlinops_plus.exact.kept import KeptLinearizations
from curvlinops_plus.exact.operations import Operations, checkpoints_in_words, replaced_again
from curvlinops_plus.exact.random_state import random_state, set_random_state
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.autograd_graph import postorder, raise_unreached
from curvlinops_plus.risk.process_state import quiet
from curvlinops_plus.risk.reading import Batch

__all__ = ["Linearizer", "Outputs"]

T = TypeVar("T")


Outputs = Sequence[Tensor]
Read = Callable[[nn.Module, Batch], tuple[Outputs, Any]]
# From the outputs, and what was read beside them, a linear function of vectors [K, *output], one for each output.
OutputMap = Callable[[Outputs, Any], Callable[[list[Tensor]], T]]


class Linearizer:
    """Products with the Jacobian `J` of what a model returns, batch by batch; all inside of `differentiable()`.

    Args:
        risk: Model, parameters and data.
        read: `read(model, batch)` runs the model and returns the tensors that are differentiated, and anything else.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.
        kept: Where linearisations stay between products with single vectors, if they do.

    Raises:
        ValueError: If `chunk_size` is less than one.
    """

    def __init__(
        self, risk: EmpiricalRisk, read: Read, chunk_size: int | None = None, kept: KeptLinearizations | None = None
    ) -> None:
        self.kept = kept
        self.risk, self.read, self.chunk_size = risk, read, checked_chunk_size(chunk_size)
        self.keys, self.params = list(risk.params), list(risk.params.values())
        self._largest = 0  # numbers in the largest intermediate result; 0 asks to watch the next forward pass
        self._numbers = 0  # numbers that operations returned per example of that pass
        self._stopped = False  # whether a tangent came out of an operation under `no_grad` then
        self._replaced = False  # whether operations were replaced
        self._forward: bool | None = None  # whether forward mode is right; None before it was tried
        self._shared = True  # whether the graph of a forward pass with tangents serves the backward pass
        self._graphs: set[int] = set()  # of forward passes for which it was tried
        self._why: str | None = None  # the reason why forward mode is not used

    # ------------------------------------------------------------------------------------------------------ products
    def jvp(self, batch: Batch, rows: Tensor, output_map: OutputMap[Tensor]) -> Tensor:
        """`L J v` for several vectors of parameters: [K, n] -> [K, m].

        Args:
            batch: The batch.
            rows: The vectors.
            output_map: Makes the product [K, *output] -> [K, m] with `L`.

        Cost: one forward pass with tangents for a single vector, another one without for several.
        """
        if self._forward is None:
            self._choose_mode(batch)
        pieces = rows.split(self._columns())
        if not self._forward:

            def by_double_backward(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
                product = output_map([f.detach() for f in F], extra)
                return torch.cat([product(_jvp_double_backward(F, free, piece, self._why)) for piece in pieces])

            return self._at(batch, by_double_backward)
        if len(rows) == 1:
            return _with_least_graph(
                self.risk.device,
                lambda: self._at_tangent(
                    batch, rows, lambda F, extra, JV, _: output_map([f.detach() for f in F], extra)(JV)
                ),
            )
        with torch.no_grad():
            state = random_state(self.risk.device)
            product = self._at(batch, lambda F, extra, _: output_map(F, extra))
            return torch.cat([product(self._jvp_forward(batch, piece, state)) for piece in pieces])

    def vjp(self, batch: Batch, vectors: Callable[[Outputs, Any], list[Tensor]]) -> Tensor:
        """`Jᵀ u` for several vectors of the outputs' shapes: [K, *output] -> [K, n].

        Args:
            batch: The batch.
            vectors: Makes the vectors [K, *output], one tensor for each output.

        Cost: one forward pass, and one backward pass for each vector.
        """

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
            with torch.no_grad():
                made = vectors([f.detach() for f in F], extra)
            pieces = zip(*(v.split(self._columns()) for v in made), strict=True)
            return torch.cat([self._vjp(F, free, piece, len(piece[0])) for piece in pieces])

        return self._at(batch, inside)

    def ggn_product(
        self,
        batch: Batch,
        rows: Tensor,
        output_product: OutputMap[Sequence[Tensor | None]],
        index: int = 0,
        total: Tensor | None = None,
    ) -> Tensor:
        """`Jᵀ M J v` for several vectors, [K, n] -> [K, n].

        Args:
            batch: The batch.
            rows: The vectors.
            output_product: Makes the product [K, *output] -> [K, *output] with `M` from the outputs, which are still
                part of a graph; None for an output on which `M` is zero.
            index: Number of the batch in a pass over the data.
            total: What the product is added to, [K, n], if it is not the first one; it is returned then.

        Cost: one forward pass with tangents and one backward pass for a single vector, whose graph they share.
        """
        output_product = _once(output_product)  # some ways fail before another one is right
        if self._forward is None:
            found = self._product_that_tells(batch, rows, output_product)
            if found is not None:
                return found if total is None else total.add_(found)
            self._choose_mode(batch)
        if self._forward and self._shared and self.kept is not None and self._is_watched_enough:
            found = self.kept.product(index, batch, rows, output_product, self._numbers, total)
            if found is not None:
                return found
        state = random_state(self.risk.device)
        for _ in range(2):
            try:
                return self._ggn_product(batch, rows, output_product, total)
            except _OtherGraph as other:  # a branch of the model that was not tried
                set_random_state(self.risk.device, state)
                self._choose_mode(batch)
                self._graphs.add(other.graph)
        self._forward, self._why = False, "the model takes another way each time it is called."
        return self._ggn_product(batch, rows, output_product, total)

    def _ggn_product(
        self, batch: Batch, rows: Tensor, output_product: OutputMap[Sequence[Tensor | None]], total: Tensor | None
    ) -> Tensor:
        if self._forward and self._shared and len(rows) == 1:

            def with_tangents(F: Outputs, extra: Any, JV: list[Tensor], free: list[Tensor]) -> Tensor:
                self._require_tried(F)
                return self._vjp(F, free, output_product(F, extra)(JV), 1, total)

            return self._at_tangent(batch, rows, with_tangents)
        state, pieces = random_state(self.risk.device), rows.split(self._columns())

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
            self._require_tried(F)
            product, found = output_product(F, extra), []
            for piece in pieces:
                forward = self._forward
                JV = (
                    self._jvp_forward(batch, piece, state)
                    if forward
                    else _jvp_double_backward(F, free, piece, self._why)
                )
                found.append(self._vjp(F, free, product(JV), len(piece)))
            return torch.cat(found)

        found = self._at(batch, inside)
        return found if total is None else total.add_(found)

    def ggn_matrix(self, batch: Batch, output_product: OutputMap[Sequence[Tensor | None]]) -> Tensor:
        """`Jᵀ M J`, [n, n]: from the rows of `J` if these are fewer than parameters, else column by column.

        Args:
            batch: The batch.
            output_product: As for `ggn_product`.

        Cost: one forward pass, and a backward pass for each number in the outputs; or a `ggn_product` of all columns.
        """
        n = self.risk.space.dim

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor | None:
            sizes = [f.numel() for f in F]
            if sum(sizes) >= n:
                return None
            product, rows = output_product(F, extra), []
            for k, f in enumerate(F):
                for unit in torch.eye(sizes[k], dtype=f.dtype, device=f.device).split(self._columns()):
                    vectors = [unit.view(-1, *f.shape) if j == k else None for j in range(len(F))]
                    rows.append(self._vjp(F, free, vectors, len(unit)))
            J = torch.cat(rows)  # [m, n]
            V = [part.T.reshape(n, *f.shape).to(f.dtype) for part, f in zip(J.split(sizes), F, strict=True)]
            MV = [torch.zeros_like(v) if Mv is None else Mv for v, Mv in zip(V, product(V), strict=True)]
            return torch.cat([Mv.flatten(1).to(J.dtype) for Mv in MV], 1) @ J

        state = random_state(self.risk.device)
        found = self._at(batch, inside)
        if found is not None:
            return found
        set_random_state(self.risk.device, state)
        return self.ggn_product(batch, torch.eye(n, dtype=self.risk.dtype, device=self.risk.device), output_product)

    def outputs(self, batch: Batch) -> tuple[Outputs, Any]:
        """What `read` returns, without a graph; random states are as before."""
        state = random_state(self.risk.device)
        with torch.no_grad():
            found = self.read(self.risk.model, batch)
        set_random_state(self.risk.device, state)
        return found

    # ------------------------------------------------------------------------------------------------------- running
    @property
    def _run(self) -> Read:
        """`read`, which is watched the first time, and always if operations have to be replaced."""
        return self.read if self._is_watched_enough else self._watched_read

    @property
    def _is_watched_enough(self) -> bool:
        return bool(self._largest) and not self._replaced

    def _watched_read(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Any]:
        with Operations() as watch:
            found = self.read(model, batch)
        self._largest, self._replaced = max(self._largest, watch.largest), self._replaced or watch.replaced
        self._numbers = max(self._numbers, watch.numbers // batch.num_examples)
        self._stopped = watch.stopped and torch.is_grad_enabled()
        return found

    def _at(self, batch: Batch, function: Callable[[Outputs, Any, list[Tensor]], T]) -> T:
        """`function(F, extra, parameters)` while the model has these parameters; `F` has a graph."""
        free, reached = [p.detach().requires_grad_() for p in self.params], True

        def inside(model: nn.Module) -> T:
            nonlocal reached
            with nullcontext() if self._is_watched_enough else replaced_again(model):
                F, extra = self._run(model, batch)
                reached = not torch.is_grad_enabled() or any(f.requires_grad for f in F)
                return function(F, extra, free)

        with checkpoints_in_words():
            found = self.risk.at(dict(zip(self.keys, free)), inside)
        if not reached and self._forward is None:
            self._choose_mode(batch)  # which notices what it depends on without a graph
        return found

    def _at_tangent(self, batch: Batch, row: Tensor, function: Callable[..., T]) -> T:  # row [1, n]
        """`function(F, extra, J v, parameters)`: one forward pass, whose graph is there for the backward pass."""
        free = [p.detach().requires_grad_() for p in self.params]

        with ExitStack() as level:
            level.enter_context(forward_ad.dual_level())
            duals = [forward_ad.make_dual(p, t[0]) for p, t in zip(free, split_rows(row, self.params), strict=True)]

            def inside(model: nn.Module) -> T:
                with nullcontext() if self._is_watched_enough else replaced_again(model):
                    with level:  # left before the backward pass, which would propagate the tangents, too
                        F, extra = self._run(model, batch)
                        JV = [t.detach()[None] for t in _tangents(F)]
                    return function(F, extra, JV, free)

            return self.risk.at(dict(zip(self.keys, duals)), inside)

    # ------------------------------------------------------------------------------------------------- forward mode
    def _require_tried(self, F: Outputs) -> None:
        """Refuse forward mode where the model takes another way than when it was tried: parts may have no graph there.

        Raises:
            _OtherGraph: If the graph was not seen.
        """
        if self._forward and (graph := _graph(F)) not in self._graphs:
            raise _OtherGraph(graph)

    def _product_that_tells(
        self, batch: Batch, rows: Tensor, output_product: OutputMap[Sequence[Tensor | None]]
    ) -> Tensor | None:
        """`Jᵀ M J v` by forward mode, if its own numbers say that forward mode is right; else None, and nothing is
        known.

        `<M J v, J v> = <v, Jᵀ M J v>` holds for any `M`, with `J` from forward mode on the left, and from a backward
        pass on the right.
        """
        if len(rows) > 1 or not is_generic(rows[0], self.params):
            return None
        state, self._largest = random_state(self.risk.device), 0

        def product(F: Outputs, extra: Any, JV: list[Tensor], free: list[Tensor]) -> Tensor | None:
            MJV = [Mv for Mv in output_product(F, extra)(JV) if Mv is not None]
            if len(MJV) < len(JV):
                return None
            back = self._vjp(F, free, MJV, 1)
            if not agree(rows, JV, MJV, back, [*F, *free]):
                return None
            self._graphs.add(_graph(F))
            return back

        try:
            with _first_use_of_forward_mode():
                found = self._at_tangent(batch, rows, product)
        except UnsupportedError:
            raise
        except RuntimeError:
            found = None
        if found is not None and not self._stopped:
            self._forward = True
            return found
        set_random_state(self.risk.device, state)
        return None

    def _choose_mode(self, batch: Batch) -> None:
        """Determine whether forward mode is possible and right: does it agree with a backward pass?"""
        device = self.risk.device
        generator, state = torch.Generator().manual_seed(0), random_state(device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=self.risk.dtype).to(device)

        v = normal(1, self.risk.space.dim)

        def agrees(F: Outputs, extra: Any, JV: list[Tensor], free: list[Tensor]) -> bool:
            self._graphs.add(_graph(F))
            return _agrees(lambda u: self._vjp(F, free, u, 1), F, free, v, [t.to(v.dtype) for t in JV], normal)

        try:
            self._largest = 0
            with _first_use_of_forward_mode():
                right = self._at_tangent(batch, v, agrees)
        except CheckpointError:  # the forward pass that it repeats has no tangents
            self._shared = False
            set_random_state(device, state)
            right = self._at(batch, lambda F, extra, free: agrees(F, extra, self._jvp_forward(batch, v, state), free))
        except UnsupportedError:
            raise
        except RuntimeError as error:
            right, self._why = False, str(error).splitlines()[0]
        finally:
            set_random_state(device, state)
        if right and not self._stopped:
            self._forward = True
            return
        self._why = self._why or "it disagrees with a backward pass (torch.no_grad() or a hook inside the model?)."

        def twice(F: Outputs, extra: Any, free: list[Tensor]) -> bool:
            for f in F:
                refuse_once_differentiable(f)
            return agrees(F, extra, _jvp_double_backward(F, free, v, self._why), free)

        if not self._at(batch, twice):
            raise UnsupportedError(
                "The derivative of the model by two backward passes disagrees with that by one: a hook of the model or "
                f"a backward pass written by hand is not linear in the gradient.{tried(self._why)}"
            )
        self._forward = False
        set_random_state(device, state)

    def _jvp_forward(self, batch: Batch, rows: Tensor, state: Any) -> list[Tensor]:
        """`J v` without a graph, [K, n] -> [K, *output]; random numbers are those of the forward pass at `state`."""
        after = random_state(self.risk.device)
        values, V = tuple(p.detach() for p in self.params), split_rows(rows, self.params)

        def function(*parameters: Tensor) -> tuple[Tensor, ...]:
            found = self.risk.at(dict(zip(self.keys, parameters)), lambda model: self._run(model, batch))
            return tuple(found[0])

        def one(*tangents: Tensor) -> tuple[Tensor, ...]:
            return torch.func.jvp(function, values, tangents)[1]

        def alone(k: int) -> list[Tensor]:
            set_random_state(self.risk.device, state)
            leaves = [p.detach().requires_grad_(torch.is_grad_enabled()) for p in values]
            with forward_ad.dual_level():
                made = _tangents(function(*(forward_ad.make_dual(p, v[k]) for p, v in zip(leaves, V, strict=True))))
            return [t.detach() for t in made]

        try:
            if len(rows) > 1:
                try:
                    set_random_state(self.risk.device, state)
                    with quiet(), torch.no_grad():
                        return list(torch.func.vmap(one, randomness="same")(*V))
                except RuntimeError:  # an operation that can't be vectorised; all else fails again
                    pass
            columns = _with_least_graph(self.risk.device, lambda: [alone(k) for k in range(len(rows))])
            return [torch.stack(ts) for ts in zip(*columns, strict=True)]
        finally:
            set_random_state(self.risk.device, after)

    # ------------------------------------------------------------------------------------------------- reverse mode
    def _vjp(
        self,
        F: Outputs,
        free: list[Tensor],
        vectors: Sequence[Tensor | None],
        K: int,
        total: Tensor | None = None,
    ) -> Tensor:
        """`Jᵀ u` for K vectors, [K, *output] -> [K, n]; added to `total` if there is one."""
        sent = [(f, v.to(f.dtype)) for f, v in zip(F, vectors, strict=True) if v is not None and f.requires_grad]
        parts = vjp([f for f, _ in sent], free, [v for _, v in sent]) if sent else [None] * len(free)
        return join_rows(parts, free, K, self.risk.dtype, total)

    def _columns(self) -> int:
        # Forward mode and backward pass hold a few results of each column at a time.
        return columns_at_once(self.chunk_size, self.risk.space.dim + 4 * self._largest)


class _OtherGraph(Exception):
    """A forward pass took another way than those for which forward mode was tried."""

    def __init__(self, graph: int) -> None:
        self.graph = graph


def _graph(F: Outputs) -> int:
    """What a graph is like, whether or not its parameters carry tangents, of which they are a view then."""
    names = []
    for node, below in postorder([f.grad_fn for f in F]):
        of_parameter = len(below) == 1 and not below[0].next_functions
        if not (of_parameter and node.name() in ("ViewBackward0", "AliasBackward0")):
            names.append(node.name())
    return hash(tuple(names))


@contextmanager
def _first_use_of_forward_mode() -> Iterator[None]:
    """Context without the warning that PyTorch gives when it loads its own rules of forward mode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
        yield


def _once(output_product: OutputMap[T]) -> OutputMap[T]:
    """The product of the first call in each: what it counts and draws for a batch is counted and drawn once."""
    made: list[Callable[[list[Tensor]], T]] = []

    def product(F: Outputs, extra: Any) -> Callable[[list[Tensor]], T]:
        if not made:
            made.append(output_product(F, extra))
        return made[0]

    return product


def _agrees(
    back_of: Callable[[list[Tensor]], Tensor],
    F: Outputs,
    free: list[Tensor],
    v: Tensor,
    JV: list[Tensor],
    normal: Callable[..., Tensor],
) -> bool:
    """Whether `<u, J v>` is the same from both sides, with a `u` along `J v`; `back_of(u)` is `Jᵀ u`."""
    norm = torch.stack([t.norm() for t in JV]).norm()
    if norm > 0 and not any(f.requires_grad for f in F):
        raise_unreached()
    u = [t / norm for t in JV] if bool((norm > 0) & norm.isfinite()) else [normal(*t.shape) for t in JV]
    back = back_of(u)
    if not bool(back.isfinite().all()):
        return True  # nothing to compare, whichever way
    # As v is random, rounding errors hardly add up; where they do, two backward passes are slower, and right.
    size, eps = torch.maximum(norm, back.norm()), max(torch.finfo(t.dtype).eps for t in (*F, *free))
    if bool(((back * v).sum() - norm).abs() <= min(10 * eps**0.5, 0.1) * size):
        return True
    # Or the derivative is zero, as that of a bias in front of a norm, and rounding is all that is left.
    small = bool(size <= eps**0.5 * torch.stack([f.norm() for f in F]).norm())
    return small and only_rounding(back, lambda: back_of([3 * t for t in u]) / 3)


def _jvp_double_backward(F: Outputs, free: list[Tensor], rows: Tensor, why: str | None) -> list[Tensor]:
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


def _with_least_graph(device: torch.device, run: Callable[[], T]) -> T:
    """`run()` without a graph, unless the model differentiates in its forward pass."""
    state = random_state(device)
    try:
        with torch.no_grad():
            return run()
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except RuntimeError:
        set_random_state(device, state)
        with torch.enable_grad():
            return run()


def _tangents(outputs: Outputs) -> list[Tensor]:
    found = [forward_ad.unpack_dual(f) for f in outputs]
    return [torch.zeros_like(f) if t is None else t for f, t in found]
