"""Passes of one batch through a model, forward with tangents and back through the graph: `J v`, `Jᵀ
u`, `Jᵀ M J v`.

`J v` is forward-mode differentiation: each operation carries a tangent along, and the graph of the
same forward pass serves the backward pass after it. Where an operation has no forward mode, or
forward mode is wrong, `J v` is the derivative of `wᵀ J` with respect to `w`, by two backward
passes. Which one is right is told by `AdjointCheck`.

Hessians never go forward: PyTorch's forward derivatives of normalisation layers are constants for
the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from curvlinops_plus.contexts import Endings, GradMode, entered
from curvlinops_plus.exact.differentiable import DerivativeFixes
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.options import whole
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch, gradients_of, postorder
from curvlinops_plus.risk.preserve import quiet

Outputs: TypeAlias = Sequence[Tensor]
Read: TypeAlias = Callable[[nn.Module, Batch], tuple[Outputs, Any]]
# A linear function of vectors [K, *output], one for each output, to the same.
Linear: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]

# Columns that are computed together: their results stay below so many bytes, and they are at most
# so many.
_BYTES_AT_ONCE = 2**28
_COLUMNS_AT_ONCE = 64
# On a CPU columns are backpropagated together only while results have fewer numbers: larger ones
# gain nothing by it.
_CPU_NUMBERS = 2**17


class Pass(NamedTuple):
    """A batch that was run through the model."""

    outputs: Outputs
    """`F`, with a graph down to the parameters."""
    extra: Any
    """What `read` returned beside them."""
    parameters: list[Tensor]
    """Copies of the parameters."""
    tangents: list[Tensor]
    """`J v` [1, *output] of the vector, if there was one."""


def read_losses(risk: EmpiricalRisk, model: nn.Module, batch: Batch) -> tuple[Any, Totals]:
    """Run the model: its losses, and the totals that they are in."""
    totals = risk.losses.terms(risk.run(batch, model), batch).totals
    return totals.losses, totals


class Passes:
    """Products with the Jacobian `J` of what a model returns, batch by batch; all inside of
    `differentiable`.

    Args:
        risk: Model, parameters and data.
        read: `read(model, batch)` runs the model and returns the tensors that are differentiated,
            and anything else.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64
            at most.
        twice: Whether there is no forward mode.

    Attributes:
        twice: Whether `J v` takes two backward passes.
        reached: Whether any output has depended on the parameters; None before the first.
        itemsize: Bytes of the coarsest numbers in the model; None before the first run.

    Raises:
        ValueError: If `chunk_size` is less than one.
    """

    def __init__(
        self, risk: EmpiricalRisk, read: Read, chunk_size: int | None = None, twice: bool = False
    ) -> None:
        self.risk = risk
        self.read = read
        self.params = list(risk.params.values())
        self.sizes = [p.numel() for p in self.params]
        self.columns = _columns_at_once(chunk_size, risk.space.dim)
        self._always_together = chunk_size is not None or risk.device.type != "cpu"
        self.narrow = any(p.dtype == torch.float16 for p in self.params)
        self.twice = twice
        self.reached: bool | None = None
        self.itemsize: int | None = None
        self._fixes = DerivativeFixes()

    @contextmanager
    def run(self, batch: Batch, row: Tensor | None = None) -> Iterator[Pass]:
        """Run the model on a batch, with the tangents of a vector [n] if there is one.

        Inside, the model has the copies of the parameters, because checkpointing runs parts of it
        again in the backward pass.
        """
        copies = [p.detach().requires_grad_() for p in self.params]
        values = copies
        tangents = []
        # The first run of the model is watched, and all others if they need it.
        watched = self.itemsize is None or self._fixes.any
        with Endings() as forward_mode:
            if row is not None:
                forward_mode.enter_context(forward_ad.dual_level())
                # `make_dual` copies a tangent that is a part of a larger tensor, unless it doesn't
                # look like one.
                V = [torch.from_dlpack(v[0].detach()) for v in self.split(row[None])]
                values = [forward_ad.make_dual(p, v) for p, v in zip(copies, V, strict=True)]
            named = dict(zip(self.risk.params, values, strict=True))
            with self.risk.placed(named), Endings() as endings:
                if watched:
                    endings.enter_context(self._fixes)
                F, extra = self.read(self.risk.model, batch)
                if row is not None:
                    for f in F:
                        tangent = forward_ad.unpack_dual(f).tangent
                        tangent = torch.zeros_like(f) if tangent is None else tangent.detach()
                        tangents.append(tangent[None])
                # Before the backward pass, which would propagate tangents, too.
                forward_mode.close()
                if self.itemsize is None:
                    self.itemsize = _coarsest(F, copies)
                self.reached = self.reached or not F or any(f.requires_grad for f in F)
                yield Pass(F, extra, copies, tangents)

    # ------------------------------------------------------------------------------------- products
    def ggn(
        self,
        batch: Batch,
        rows: Tensor,
        matrix: Callable[[Outputs, Any], Linear],
        total: Tensor | None = None,
    ) -> Tensor:
        """Add `Jᵀ M J v` of several vectors [K, n] to a total [K, n]; returns `⟨M J v, J v⟩` [K].

        Args:
            matrix: Makes the product with `M` from the outputs and what was read beside them.
            total: None for `⟨M J v, J w⟩` [K, K] of all pairs of up to `columns` vectors, without a
                backward pass.

        Cost: one forward pass with tangents and one backward pass for a single vector, which share
        the graph. Several share a forward pass, and carry tangents through another one.
        """
        state = RandomState.now(self.risk.device)
        single = len(rows) == 1 and not self.twice
        wide = torch.promote_types(rows.dtype, torch.float32)
        pairs = "ko,lo->kl" if total is None else "ko,ko->k"
        energies = []
        with self.run(batch, rows[0] if single else None) as run:
            M = matrix(run.outputs, run.extra)
            for start in range(0, len(rows), self.columns):
                part = slice(start, start + self.columns)
                if single:
                    JV = run.tangents
                elif self.twice:
                    JV = self.backward_twice(run, rows[part])
                else:
                    JV = self.forward(batch, rows[part], state)
                MJV = M(JV)
                if total is not None:
                    self.back(run.outputs, run.parameters, MJV, total[part], last=single)
                with full_precision(rows.device.type):
                    inner = [
                        torch.einsum(pairs, MJv.flatten(1).to(wide), Jv.flatten(1).to(wide))
                        for MJv, Jv in zip(MJV, JV, strict=True)
                    ]
                energies.append(reduce(torch.add, inner))
        return torch.cat(energies)

    def back(
        self,
        outputs: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        vectors: Sequence[Tensor],
        total: Tensor,
        last: bool = False,
    ) -> None:
        """Add `Jᵀ u` of several vectors, [K, *output] for each output, to a total, a row for each.

        In float16 vectors are sent times a power of two that leaves room on both sides.

        Args:
            last: Whether the graph may be freed.
        """
        reached = []
        sent = []
        for f, v in zip(outputs, vectors, strict=True):
            if f is not None and f.requires_grad:
                reached.append(f)
                sent.append(v)
        if not sent:
            return
        power = 1.0
        if self.narrow or any(f.dtype == torch.float16 for f in reached):
            largest = max(float(v.abs().amax()) for v in sent)
            if 0 < largest < math.inf:
                power = 2.0 ** (-math.frexp(largest)[1])
                sent = [v.float() * power for v in sent]
        sent = [v.to(f.dtype) for v, f in zip(sent, reached, strict=True)]
        sizes = [p.numel() for p in inputs]
        K = len(total)
        together = self._at_once(reached, K) if K > 1 else 1
        for start in range(0, K, together):
            part = slice(start, start + together)
            freed = last and start + together >= K
            products = vjp(reached, inputs, [v[part] for v in sent], freed)
            for entries, product in zip(total[part].split(sizes, 1), products, strict=True):
                if product is not None:
                    product = product.reshape(len(entries), -1)
                    entries += product if power == 1 else product.to(entries.dtype) / power

    def _at_once(self, outputs: Sequence[Tensor], K: int) -> int:
        """How many of K columns are backpropagated together."""
        if self._fixes.group_norm:
            return 1
        if self._always_together:
            return self.columns
        numbers = max(t.numel() for t in (*outputs, *self.params))
        return max(1, min(K, _CPU_NUMBERS // max(1, numbers)))

    def forward(self, batch: Batch, rows: Tensor, state: RandomState | None = None) -> list[Tensor]:
        """`J v` of several vectors, [K, n] -> [K, *output] for each output.

        Args:
            state: Where the random numbers of the forward pass begin that is differentiated; by
                default those of now.

        Cost: one forward pass with tangents, without a graph, for a piece of vectors.
        """
        if state is None:
            state = RandomState.now(self.risk.device)
        if len(rows) > self.columns:
            pieces = [self.forward(batch, piece, state) for piece in rows.split(self.columns)]
            return [torch.cat(parts) for parts in zip(*pieces, strict=True)]
        if self.twice:
            with self.run(batch) as run:
                return self.backward_twice(run, rows)
        try:
            with quiet(), GradMode(False):
                if len(rows) == 1:
                    return self.tangents(batch, rows[0], state)
                return self._vectorised(batch, rows, state)
        except RuntimeError:
            # What can't be vectorised, or differentiates in its forward pass; all else fails again.
            pieces = [self.tangents(batch, row, state) for row in rows]
            return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def tangents(self, batch: Batch, row: Tensor, state: RandomState) -> list[Tensor]:
        """`J v` of one vector, [n] -> [1, *output]; with a graph unless gradients are off."""
        state.restore()
        with self.run(batch, row) as run:
            return run.tangents

    def _vectorised(self, batch: Batch, rows: Tensor, state: RandomState) -> list[Tensor]:
        """`J v` of several vectors by one forward pass."""
        values = tuple(p.detach() for p in self.params)

        def outputs(*parameters: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(self.risk.params, parameters, strict=True))
            with self.risk.placed(named), entered(self._fixes):
                return tuple(self.read(self.risk.model, batch)[0])

        def product(*tangents: Tensor) -> tuple[Tensor, ...]:
            return torch.func.jvp(outputs, values, tangents)[1]

        state.restore()
        return list(torch.func.vmap(product, randomness="same")(*self.split(rows)))

    def backward_twice(self, run: Pass, rows: Tensor) -> list[Tensor]:
        """`J v` as the derivative of `wᵀ J` with respect to `w`, [K, n] -> [K, *output]."""
        JV = [f.new_zeros(len(rows), *f.shape) for f in run.outputs]
        reached = [k for k, f in enumerate(run.outputs) if f.requires_grad]
        if not reached:
            return JV
        F = [run.outputs[k] for k in reached]
        # Not at zero, where functions that take the logarithm of a gradient are singular.
        w = [v[0].requires_grad_() for v in fixed_vectors(F)]
        gradients = gradients_of(F, run.parameters, w, True, create_graph=True)
        wJ = []
        V = []
        for gradient, v in zip(gradients, self.split(rows), strict=True):
            if gradient is not None and gradient.requires_grad:
                wJ.append(gradient)
                V.append(v)
        together = self._at_once(run.outputs, len(rows))
        for start in range(0, len(rows) if wJ else 0, together):
            part = slice(start, start + together)
            for k, Jv in zip(reached, vjp(wJ, w, [v[part] for v in V]), strict=True):
                if Jv is not None:
                    JV[k][part] = Jv.detach()
        return JV

    def split(self, rows: Tensor) -> list[Tensor]:  # [K, n] -> [K, *shape] for each parameter
        """The parts of several vectors, in the parameters' own dtypes."""
        if rows.is_inference():
            rows = rows.clone()
        parts = zip(rows.split(self.sizes, 1), self.params, strict=True)
        return [part.reshape(len(rows), *p.shape).to(p.dtype) for part, p in parts]


def _columns_at_once(chunk_size: int | None, dim: int) -> int:
    if chunk_size is None:
        return max(1, min(_COLUMNS_AT_ONCE, _BYTES_AT_ONCE // max(1, 8 * dim)))
    columns = whole(chunk_size)
    if columns is None or columns < 1:
        raise ValueError(
            f"chunk_size={chunk_size!r} must be an integer of at least 1, the number of "
            "columns computed together."
        )
    return columns


def _coarsest(outputs: Outputs, parameters: list[Tensor]) -> int:
    """Bytes of the coarsest floating-point numbers in a graph."""
    dtypes = {t.dtype for t in (*outputs, *parameters)}
    for node in postorder(outputs):
        dtypes |= {metadata.dtype for metadata in node._input_metadata}
    return min(dtype.itemsize for dtype in dtypes if dtype.is_floating_point)


def fixed_vectors(tensors: Sequence[Tensor], K: int = 1) -> list[Tensor]:
    """Random vectors [K, *shape] for each tensor, always the same; small enough for float16."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(K, *t.shape, generator=generator, device="cpu") for t in tensors)
    return [v.mul_(2.0**-4).to(t) for v, t in zip(numbers, tensors, strict=True)]


def vjp(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    last: bool = False,
) -> list[Tensor | None]:
    """Vector-Jacobian products of several vectors `[K, *output]`: `[K, *input]`, None where nothing
    depends.

    Args:
        last: Whether a single vector may free what the graph saved.

    Cost: one backward pass, vectorised over K; a single vector takes the plain way, which is
    faster.
    """
    K = len(vectors[0])
    if K == 1:
        gradients = gradients_of(outputs, inputs, [v[0] for v in vectors], not last)
        return [None if g is None else g[None] for g in gradients]
    try:
        with quiet():
            options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
            return list(torch.autograd.grad(outputs, inputs, vectors, **options))
    except RuntimeError:  # operations that can't be vectorised; all else fails again
        rows = [vjp(outputs, inputs, [v[k : k + 1] for v in vectors]) for k in range(K)]
    products = []
    for column in zip(*rows, strict=True):
        parts = [g for g in column if g is not None]
        products.append(torch.cat(parts) if parts else None)
    return products
