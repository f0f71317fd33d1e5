"""Passes of one batch through a model, forward with tangents and back through the graph: `J v`, `Jᵀ u`, `Jᵀ M J v`.

`J v` is forward-mode differentiation: each operation carries a tangent along, and the graph of the same forward pass
serves the backward pass after it. Where an operation has no forward mode, or forward mode is wrong (it ignores
`torch.no_grad`), `J v` is the derivative of `wᵀ J` with respect to `w`, by two backward passes. Which one is right is
told by the products themselves: `⟨M J v, J v⟩ = ⟨v, Jᵀ M J v⟩`.

Hessians never go forward: PyTorch's forward derivatives of normalisation layers are constants for the backward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, group_norm
from torch.overrides import TorchFunctionMode

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.numerics import whole
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.graph import gradients_of, nodes_of, postorder, raise_unreached
from curvlinops_plus.risk.preserve import preserve_state, quiet

T = TypeVar("T")
Outputs = Sequence[Tensor]
Read = Callable[[nn.Module, Batch], tuple[Outputs, Any]]
# A linear function of vectors [K, *output], one for each output, to the same.
Linear = Callable[[list[Tensor]], Sequence[Tensor]]

# Columns that are computed together: their results stay below so many bytes, and they are at most so many.
_CHUNK_BYTES, _COLUMNS = 2**28, 64
# On a CPU columns are backpropagated together only while results have fewer numbers: larger ones gain nothing by it.
_CPU_NUMBERS = 2**17
# By bytes of the coarsest numbers, how far the two sides of the identity may be apart.
_TOLERANCE = {2: 5e-2, 4: 5e-3, 8: 1e-6}
_MISSING = re.compile(r"derivative for '?(?:aten::)?_*(\w+?)(?:_dense)?(?:_backward)?'? is not implemented")


@contextmanager
def differentiable(risk: EmpiricalRisk) -> Iterator[None]:
    """Context in which passes over the data can be differentiated in every mode, whatever the caller's modes are.

    Afterwards the state of model and data is as before, see `preserve_state`. Attention runs by plain operations, whose
    fused kernels have neither forward mode nor second derivatives, and compiled modules run eagerly.
    """
    with preserve_state(risk.model, risk.data), torch.inference_mode(False), sdpa_kernel(SDPBackend.MATH):
        yield


class Replaced(TorchFunctionMode):
    """While active, replaces two operations of which PyTorch has wrong derivatives by others of the same values.

    Of weight norm's fused kernel the second derivative is wrong; forward mode ignores the `padding_idx` of tables, and
    their gradients by `scale_grad_by_freq` are no derivatives.

    Args:
        met: Where it notes, at once, that an operation was "replaced", and that there was "group norm".
    """

    def __init__(self, met: set[str]) -> None:
        super().__init__()
        self.met = met

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._weight_norm:  # pyright: ignore[reportPrivateImportUsage]
            self.met.add("replaced")
            return _weight_norm(*args, **kwargs)
        if func is embedding and (found := _embedding(*args, **kwargs)) is not None:
            self.met.add("replaced")
            return found
        if func in (group_norm, torch.group_norm):
            self.met.add("group norm")
        return func(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / |v|`, with a norm for each entry of the axis, or a single one if that is -1."""
    others = [axis for axis in range(v.ndim) if dim == -1 or axis != dim % v.ndim]
    return v * (g / v.square().sum(others, keepdim=dim != -1).sqrt())


def _embedding(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """A table whose row `padding_idx` is constant, and whose gradients are derivatives; None if they are anyway."""
    if padding_idx is None and not scale_grad_by_freq:
        return None
    out = embedding(index, weight, None, max_norm, norm_type)
    if padding_idx is None:
        return out
    return torch.where((index == padding_idx % len(weight))[..., None], out.detach(), out)


class MissingDerivative(UnsupportedError):
    """An operation can't be differentiated twice."""


@contextmanager
def naming_operations() -> Iterator[None]:
    """Context that names the operation which can't be differentiated twice, if that is why its body fails.

    Raises:
        MissingDerivative: Instead of PyTorch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not (found := _MISSING.search(str(error))):
            raise
        raise MissingDerivative(
            f"The model or the loss uses {found[1]}, which PyTorch can't differentiate twice. Write it with "
            "operations that it can (cdist as (x[:, None] - y).norm(dim=-1), attention as softmax(q kᵀ) v), or use an "
            "operator that goes back once, as KFACLinearOperator."
        ) from error


class Passes:
    """Products with the Jacobian `J` of what a model returns, batch by batch; all inside of `differentiable`.

    Args:
        risk: Model, parameters and data.
        read: `read(model, batch)` runs the model and returns the tensors that are differentiated, and anything else.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64 at most.

    Attributes:
        twice: Whether `J v` takes two backward passes.

    Raises:
        ValueError: If `chunk_size` is less than one.
    """

    def __init__(self, risk: EmpiricalRisk, read: Read, chunk_size: int | None = None) -> None:
        if chunk_size is not None and ((found := whole(chunk_size)) is None or found < 1):
            raise ValueError(
                f"chunk_size={chunk_size!r} must be an integer of at least 1, the number of columns computed together."
            )
        self.risk, self.read, self.params = risk, read, list(risk.params.values())
        fitting = _CHUNK_BYTES // max(1, 8 * risk.space.dim)
        self.columns = int(chunk_size) if chunk_size else max(1, min(_COLUMNS, fitting))
        self._fixed = chunk_size is not None
        self.twice = False
        self._right: bool | None = None  # the value of `twice` that is known to be right
        self._met: set[str] = set()  # see `Replaced`, which watches a first run, and all others if it is needed
        self._ran = False
        self._itemsize: int | None = None  # of the coarsest numbers in the model

    # ------------------------------------------------------------------------------------------------ running the model
    def at(self, batch: Batch, values: Sequence[Tensor], function: Callable[[nn.Module], T]) -> T:
        """`function(model)` at these values of the parameters, backward passes too: checkpointing runs parts again."""
        with nullcontext() if self._ran and "replaced" not in self._met else Replaced(self._met):
            found = self.risk.at(dict(zip(self.risk.params, values, strict=True)), function)
        self._ran = True
        return found

    def graph(self, batch: Batch, function: Callable[[Outputs, Any, list[Tensor]], T]) -> T:
        """`function(F, extra, parameters)`; `F` has a graph."""
        free = [p.detach().requires_grad_() for p in self.params]
        return self.at(batch, free, lambda model: function(*self.read(model, batch), free))

    def tangent(
        self, batch: Batch, row: Tensor, function: Callable[[Outputs, Any, list[Tensor], list[Tensor]], T]
    ) -> T:
        """`function(F, extra, J v, parameters)` for one vector [n]; `F` has a graph, `J v` is [1, *output] each."""
        free = [p.detach().requires_grad_(torch.is_grad_enabled()) for p in self.params]
        with ExitStack() as level:
            level.enter_context(forward_ad.dual_level())
            # `make_dual` copies a tangent that is a part of a larger tensor, unless it doesn't look like one.
            V = [torch.from_dlpack(t[0].detach()) for t in split_rows(row[None], self.params)]
            duals = [forward_ad.make_dual(p, v) for p, v in zip(free, V, strict=True)]

            def inside(model: nn.Module) -> T:
                with level:  # left before the backward pass, which would propagate the tangents, too
                    F, extra = self.read(model, batch)
                    JV = [t.detach()[None] for t in _tangents(F)]
                return function(F, extra, JV, free)

            return self.at(batch, duals, inside)

    # --------------------------------------------------------------------------------------------------------- products
    def ggn(
        self, batch: Batch, rows: Tensor, output_product: Callable[[Outputs, Any], Linear], total: Tensor
    ) -> Tensor:
        """Add `Jᵀ M J v` of several vectors [K, n] to a total; returns `⟨M J v, J v⟩` [K].

        Args:
            output_product: Makes the product with `M` from the outputs and what was read beside them.
            total: [K, n]. Where an operation has no forward mode it is written to once all the same.

        Cost: one forward pass with tangents and one backward pass for a single vector, which share the graph. Several
        share a forward pass, and carry tangents through another one.
        """
        state = RandomState.now(self.risk.device)

        def reached(F: Outputs, JV: list[Tensor]) -> list[Tensor]:
            if not any(f.requires_grad for f in F):  # nothing depends on the parameters, or a graph was lost
                state.restore()
                other = [1.01 * p.detach() + 0.01 for p in self.params]
                moved = self.at(batch, other, lambda model: self.read(model, batch)[0])
                if not all(torch.equal(f, there) for f, there in zip(F, moved, strict=True)):
                    raise_unreached()
            return JV

        made: list[Linear] = []  # what it counts and draws for a batch is counted and drawn once

        def product(F: Outputs, extra: Any) -> Linear:
            made[:] = made or [output_product(F, extra)]
            return made[0]

        def shared(F: Outputs, extra: Any, JV: list[Tensor], free: list[Tensor]) -> Tensor:
            MJV = product(F, extra)(reached(F, JV))
            self.back(F, free, MJV, total, last=True)
            return inner(MJV, JV)

        def several(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
            M, energy = product(F, extra), []
            for piece, own in zip(rows.split(self.columns), total.split(self.columns), strict=True):
                JV = self._twice(F, free, piece) if self.twice else self._forward(batch, piece, state)
                MJV = M(reached(F, JV))
                self.back(F, free, MJV, own)
                energy.append(inner(MJV, JV))
            return torch.cat(energy)

        return self.in_some_way(
            state,
            lambda: (
                self.tangent(batch, rows[0], shared)
                if len(rows) == 1 and not self.twice
                else self.graph(batch, several)
            ),
        )

    def forward(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """`J v` of several vectors, [K, n] -> [K, *output] for each output; what is read is read without a graph.

        Cost: one forward pass with tangents for a piece of vectors.
        """
        state = RandomState.now(self.risk.device)

        def run() -> list[Tensor]:
            pieces = [
                self.graph(batch, lambda F, extra, free, piece=piece: self._twice(F, free, piece))
                if self.twice
                else self._forward(batch, piece, state)
                for piece in rows.split(self.columns)
            ]
            return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

        return self.in_some_way(state, run)

    def in_some_way(self, state: RandomState, run: Callable[[], T]) -> T:
        """`run()`, by two backward passes from now on if an operation has no forward mode."""
        if self.twice:
            return run()
        try:
            return run()
        except (UnsupportedError, torch.OutOfMemoryError):
            raise
        except RuntimeError:  # what is wrong with the model itself fails again
            state.restore()
            self.twice = True
            return run()

    def require_linear(self, batch: Batch) -> None:
        """Find out, by a product `Jᵀ J v`, how `J v` is right, for operators whose products don't tell.

        A model of which there is none passes: its products `Jᵀ u` are right.

        Raises:
            UnsupportedError: If backward passes are not the derivative of the forward pass.
        """
        if self._right == self.twice:
            return
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(self.risk.space.dim, generator=generator).to(self.risk.device, self.risk.dtype)
        state = RandomState.now(self.risk.device)
        for _ in range(2):
            try:
                found = torch.zeros_like(v)[None]
                energy = self.ggn(batch, v[None], lambda F, extra: lambda V: V, found)
            except MissingDerivative:
                self._right = self.twice
                return
            finally:
                state.restore()
            if self.agree(v[None], found, energy):
                self._right = self.twice
                return
        raise not_a_derivative()

    def agree(self, rows: Tensor, products: Tensor, energy: Tensor) -> bool:
        """Whether `⟨M J v, J v⟩ = ⟨v, Jᵀ M J v⟩` for vectors and products [K, n]; after False another way is tried.

        What is not finite is reported elsewhere.
        """
        one, two = energy.to(rows), (rows * products).sum(1)
        room = rows.norm(dim=1) * products.norm(dim=1) / rows.shape[1] ** 0.5
        tolerance = _TOLERANCE[self._itemsize or 8]
        small = torch.finfo(one.dtype).tiny  # below, numbers have few digits
        fine = ~((one - two).abs() > tolerance * (one.abs() + room) + small)
        if bool(fine.all()):
            return True
        self.twice = True
        return False

    # ------------------------------------------------------------------------------------------------------------ parts
    def back(
        self, F: Outputs, free: list[Tensor], vectors: Sequence[Tensor], total: Tensor | None = None, last: bool = False
    ) -> Tensor:
        """`Jᵀ u` of several vectors, [K, *output] for each output -> [K, n], added to a total if there is one.

        In float16 vectors are sent times a power of two that leaves room on both sides.

        Args:
            last: Whether the graph may be freed.
        """
        K = len(vectors[0])
        if total is None:
            total = torch.zeros(K, self.risk.space.dim, dtype=self.risk.dtype, device=self.risk.device)
        if self._itemsize is None:
            met = {d for node in postorder(nodes_of(F)) for d in (m.dtype for m in node._input_metadata)}
            dtypes = met | {t.dtype for t in (*F, *self.params)}
            self._itemsize = min([d.itemsize for d in dtypes if d.is_floating_point], default=8)
        sent = [(f, v) for f, v in zip(F, vectors, strict=True) if f.requires_grad]
        power = 1.0
        if torch.float16 in {t.dtype for t in (*F, *self.params)}:
            largest = max((float(v.abs().amax()) for _, v in sent), default=0.0)
            power = 2.0 ** (-math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        size = self.sent_together(K, F)
        for start in range(0, K if sent else 0, size):
            U = [v[start : start + size] for _, v in sent]
            U = [(u if power == 1 else u.float() * power).to(f.dtype) for (f, _), u in zip(sent, U, strict=True)]
            found = vjp([f for f, _ in sent], free, U, last and start + size >= K)
            add_rows(total[start : start + size], found, free, power)
        return total

    def sent_together(self, K: int, F: Outputs) -> int:
        """How many of K columns are backpropagated together."""
        if "group norm" in self._met:  # several at once are wrong in its second derivative
            return 1
        numbers = max((t.numel() for t in (*F, *self.params)), default=1)
        together = self.risk.device.type != "cpu" or self._fixed
        return self.columns if together else max(1, min(K, _CPU_NUMBERS // max(1, numbers)))

    def _forward(self, batch: Batch, rows: Tensor, state: RandomState) -> list[Tensor]:
        """`J v` without a graph, [K, n] -> [K, *output]; random numbers are those of the forward pass at `state`."""
        after = RandomState.now(self.risk.device)
        values, V = tuple(p.detach() for p in self.params), split_rows(rows, self.params)

        def function(*parameters: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.at(batch, parameters, lambda model: self.read(model, batch)[0]))

        def alone(k: int) -> list[Tensor]:
            state.restore()
            return self.tangent(batch, rows[k], lambda F, extra, JV, free: [t[0] for t in JV])

        try:
            if len(rows) > 1:
                try:
                    state.restore()
                    with quiet(), torch.no_grad():
                        one = lambda *tangents: torch.func.jvp(function, values, tangents)[1]  # noqa: E731
                        return list(torch.func.vmap(one, randomness="same")(*V))
                except RuntimeError:  # an operation that can't be vectorised; all else fails again
                    pass
            try:
                with torch.no_grad():
                    columns = [alone(k) for k in range(len(rows))]
            except NotImplementedError:
                raise
            except RuntimeError:  # the model differentiates in its forward pass
                columns = [alone(k) for k in range(len(rows))]
            return [torch.stack(ts) for ts in zip(*columns, strict=True)]
        finally:
            after.restore()

    def _twice(self, F: Outputs, free: list[Tensor], rows: Tensor) -> list[Tensor]:
        """`J v` as the derivative of `wᵀ J` with respect to `w`, [K, n] -> [K, *output]."""
        JV = {id(f): f.new_zeros(len(rows), *f.shape) for f in F}
        reached = [f for f in F if f.requires_grad]
        w = [torch.zeros_like(f, requires_grad=True) for f in reached]
        with naming_operations():
            back = gradients_of(reached, free, w, True, create_graph=True) if reached else ()
            used = [(g, v) for g, v in zip(back, split_rows(rows, free)) if g is not None and g.requires_grad]
            if used:
                size, gradients = self.sent_together(len(rows), F), [g for g, _ in used]
                for start in range(0, len(rows), size):
                    at = slice(start, start + size)
                    for f, t in zip(reached, vjp(gradients, w, [v[at] for _, v in used]), strict=True):
                        if t is not None:
                            JV[id(f)][at] = t.detach()
        return [JV[id(f)] for f in F]


def not_a_derivative() -> UnsupportedError:
    """The error about a model whose backward pass does not fit to its forward pass."""
    return UnsupportedError(
        "The model's backward pass is not the derivative of its forward pass: ⟨M J v, J v⟩ and ⟨v, Jᵀ M J v⟩ differ. "
        "Does a hook, or a backward pass written by hand, clamp, normalise or perturb gradients? Leave that out while "
        "the curvature is computed."
    )


def split_rows(rows: Tensor, params: Sequence[Tensor]) -> list[Tensor]:  # [K, n] -> [K, *shape] for each parameter
    """The parts of several vectors, in the parameters' own dtypes."""
    rows, K = rows.clone() if rows.is_inference() else rows, rows.shape[0]
    parts = rows.split([p.numel() for p in params], dim=1)
    return [part.reshape(K, *p.shape).to(p.dtype) for part, p in zip(parts, params, strict=True)]


def add_rows(total: Tensor, parts: Sequence[Tensor | None], params: Sequence[Tensor], power: float = 1.0) -> None:
    """Add several vectors to a total [K, n], from their parts over a power of two; None is zero."""
    for own, part in zip(total.split([p.numel() for p in params], 1), parts, strict=True):
        if part is not None:
            own += part.reshape(len(own), -1) if power == 1 else part.reshape(len(own), -1).to(own.dtype) / power


def inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:  # -> [K]
    """Inner products of vectors [K, *output], summed over outputs, in float32 at least."""
    found = [(a.to(torch.promote_types(a.dtype, torch.float32)) * b).flatten(1).sum(1) for a, b in zip(one, other)]
    return sum(found[1:], found[0])


def vjp(
    outputs: Sequence[Any], inputs: Sequence[Tensor], vectors: Sequence[Tensor], last: bool = False
) -> list[Tensor | None]:
    """Vector-Jacobian products of several vectors `[K, *output]`: `[K, *input]`, None where nothing depends.

    Args:
        last: Whether a single vector may free what the graph saved.

    Cost: one backward pass, vectorised over K; a single vector takes the plain way, which is faster.
    """
    if len(vectors[0]) == 1:
        found = gradients_of(outputs, inputs, [v[0] for v in vectors], not last)
        return [None if g is None else g[None] for g in found]
    try:
        with quiet():
            options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
            return list(torch.autograd.grad(outputs, inputs, vectors, **options))
    except RuntimeError:  # operations that can't be vectorised; all else fails again
        rows = [vjp(outputs, inputs, [v[k : k + 1] for v in vectors]) for k in range(len(vectors[0]))]
    columns = zip(*rows, strict=True)
    return [None if column[0] is None else torch.cat([g for g in column if g is not None]) for column in columns]


def _tangents(outputs: Outputs) -> list[Tensor]:
    found = [forward_ad.unpack_dual(f) for f in outputs]
    return [torch.zeros_like(f) if t is None else t for f, t in found]
