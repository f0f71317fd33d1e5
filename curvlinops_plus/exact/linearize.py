"""Products with the Jacobian of a model's output, batch by batch, by forward and backward differentiation.

`J v` is forward-mode differentiation: each operation carries a tangent along. That costs about one forward pass more,
and the graph of the same forward pass serves a backward pass after it. Where that is not possible, or wrong, `J v` is
the derivative of `wᵀ J` with respect to `w` instead, by two backward passes, see `ForwardMode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.forward_mode import ForwardMode, OtherGraph
from curvlinops_plus.exact.kept import KeptLinearizations
from curvlinops_plus.exact.model_passes import ModelPasses, OutputMap, OutputProduct, Outputs, Read, jvp_double_backward
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import Batch

T = TypeVar("T")


class Linearizer:
    """Products with the Jacobian `J` of what a model returns, batch by batch; all inside of `differentiable`.

    Args:
        risk: Model, parameters and data.
        read: As in `ModelPasses`.
        chunk_size: As there.
        kept: Where linearisations stay between products, if they do.

    Raises:
        ValueError: If `chunk_size` is less than one.
    """

    def __init__(
        self, risk: EmpiricalRisk, read: Read, chunk_size: int | None = None, kept: KeptLinearizations | None = None
    ) -> None:
        self.risk, self.kept = risk, kept
        self.passes = ModelPasses(risk, read, chunk_size)
        self.mode = ForwardMode(self.passes)

    def jvp(self, batch: Batch, rows: Tensor, output_map: OutputMap[Tensor]) -> Tensor:
        """`L J v` for several vectors of parameters, [K, n] -> [K, m]; `output_map` is `L`, [K, *output] -> [K, m].

        Cost: one forward pass with tangents for a single vector, another one without for several.
        """
        if self.mode.right is None:
            self.mode.choose(batch)
        return self._in_tried_mode(batch, lambda: self._jvp(batch, rows, output_map))

    def _jvp(self, batch: Batch, rows: Tensor, output_map: OutputMap[Tensor]) -> Tensor:
        pieces = rows.split(self.passes.columns())
        if not self.mode.right:

            def by_double_backward(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
                self.mode.require_linear(F, free)
                product = output_map([f.detach() for f in F], extra)
                return torch.cat([product(jvp_double_backward(F, free, piece, self.mode.why)) for piece in pieces])

            return self._at(batch, by_double_backward)

        # With a graph, which tells whether the model takes the way for which forward mode was tried.
        def product(F: Outputs, extra: Any) -> Callable[[list[Tensor]], Tensor]:
            self.mode.require_tried(F)
            return output_map([f.detach() for f in F], extra)

        if len(rows) == 1:
            return self.passes.at_tangent(batch, rows, lambda F, extra, JV, _: product(F, extra)(JV))
        state = RandomState.now(self.risk.device)
        found = self._at(batch, lambda F, extra, _: product(F, extra))
        with torch.no_grad():
            return torch.cat([found(self.passes.jvp_forward(batch, piece, state)) for piece in pieces])

    def _in_tried_mode(self, batch: Batch, run: Callable[[], Tensor]) -> Tensor:
        """`run()`, after forward mode was tried for the way that the model takes."""
        state = RandomState.now(self.risk.device)
        for _ in range(2):
            try:
                return run()
            except OtherGraph as other:  # a branch of the model that was not tried
                state.restore()
                self.mode.choose(batch)
                self.mode.graphs.add(other.graph)
            except UnsupportedError:
                raise
            except NotImplementedError:  # an operation of this branch may have no forward mode
                if not self.mode.right:
                    raise
                state.restore()
                self.mode.choose(batch)
                if self.mode.right:
                    raise
        self.mode.right, self.mode.why = False, "the model takes another way each time it is called."
        return run()

    def vjp(self, batch: Batch, vectors: Callable[[Outputs, Any], list[Tensor]]) -> Tensor:
        """`Jᵀ u`, [K, n], for the vectors [K, *output] that `vectors` makes, one tensor for each output.

        Cost: one forward pass, and one backward pass for each vector.
        """

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
            with torch.no_grad():
                made = vectors([f.detach() for f in F], extra)
            back = self.passes.vjp(F, free, made, len(made[0]))
            self.mode.require_linear(F, free)
            return back

        return self._at(batch, inside)

    def ggn_product(
        self,
        batch: Batch,
        rows: Tensor,
        output_product: OutputProduct,
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
        if self.mode.right is None:
            found = self.mode.product_that_tells(batch, rows, output_product)
            if found is not None:
                return found if total is None else total.add_(found)
            self.mode.choose(batch)
        if self.mode.right and self.mode.shared and len(rows) == 1 and self.passes.is_watched_enough and self.kept:
            found = self.kept.product(index, batch, rows, output_product, self.passes.numbers, total)
            if found is not None:
                return found
        return self._in_tried_mode(batch, lambda: self._ggn_product(batch, rows, output_product, total))

    def _ggn_product(self, batch: Batch, rows: Tensor, output_product: OutputProduct, total: Tensor | None) -> Tensor:
        if self.mode.right and self.mode.shared and len(rows) == 1:

            def with_tangents(F: Outputs, extra: Any, JV: list[Tensor], free: list[Tensor]) -> Tensor:
                self.mode.require_tried(F)
                return self.passes.vjp(F, free, output_product(F, extra)(JV), 1, total, last=True)

            return self.passes.at_tangent(batch, rows, with_tangents)
        state, size = RandomState.now(self.risk.device), self.passes.columns()
        found = torch.zeros(rows.shape, dtype=self.risk.dtype, device=rows.device) if total is None else total

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
            self.mode.require_tried(F)
            if not self.mode.right:
                self.mode.require_linear(F, free)
            product = output_product(F, extra)
            for start in range(0, len(rows), size):
                piece = rows[start : start + size]
                JV = (
                    self.passes.jvp_forward(batch, piece, state)
                    if self.mode.right
                    else jvp_double_backward(F, free, piece, self.mode.why)
                )
                last = start + size >= len(rows)
                self.passes.vjp(F, free, product(JV), len(piece), found[start : start + size], last)
            return found

        return self._at(batch, inside)

    def ggn_form(self, batch: Batch, rows: Tensor, output_product: OutputProduct) -> Tensor:
        """`⟨J v, M J w⟩` of several vectors, [..., k, n] -> [..., k, k].

        Cost: one forward pass with tangents for each vector, and one without for several.
        """

        def output_map(F: Outputs, extra: Any) -> Callable[[list[Tensor]], Tensor]:
            product = output_product(F, extra)

            def both(JV: list[Tensor]) -> Tensor:
                MJV = [torch.zeros_like(v) if Mv is None else Mv for v, Mv in zip(JV, product(JV), strict=True)]
                return torch.cat([t.detach().flatten(1).to(rows.dtype) for t in (*JV, *MJV)], 1)

            return both

        found = self.jvp(batch, rows.detach().flatten(0, -2), output_map)
        JV, MJV = found.reshape(*rows.shape[:-1], -1).chunk(2, -1)
        return JV @ MJV.mT

    def ggn_matrix(self, batch: Batch, output_product: OutputProduct) -> Tensor:
        """`Jᵀ M J`, [n, n]: from the rows of `J` if these are fewer than parameters, else column by column.

        Cost: one forward pass, and a backward pass for each number in the outputs; or a `ggn_product` of all columns.
        """
        n = self.risk.space.dim

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor | None:
            sizes = [f.numel() for f in F]
            if sum(sizes) >= n:
                return None
            self.mode.require_linear(F, free)
            product, rows = output_product(F, extra), []
            for k, f in enumerate(F):
                for unit in torch.eye(sizes[k], dtype=f.dtype, device=f.device).split(self.passes.columns()):
                    vectors = [unit.view(-1, *f.shape) if j == k else None for j in range(len(F))]
                    rows.append(self.passes.vjp(F, free, vectors, len(unit)))
            J = torch.cat(rows)  # [m, n]
            V = [part.T.reshape(n, *f.shape).to(f.dtype) for part, f in zip(J.split(sizes), F, strict=True)]
            MV = [torch.zeros_like(v) if Mv is None else Mv for v, Mv in zip(V, product(V), strict=True)]
            return torch.cat([Mv.flatten(1).to(J.dtype) for Mv in MV], 1) @ J

        state = RandomState.now(self.risk.device)
        found = self._at(batch, inside)
        if found is not None:
            return found
        state.restore()
        return self.ggn_product(batch, torch.eye(n, dtype=self.risk.dtype, device=self.risk.device), output_product)

    def outputs(self, batch: Batch) -> tuple[Outputs, Any]:
        """What `read` returns, without a graph; random states are as before."""
        state = RandomState.now(self.risk.device)
        with torch.no_grad():
            found = self.passes.read(self.risk.model, batch)
        state.restore()
        return found

    def _at(self, batch: Batch, function: Callable[[Outputs, Any, list[Tensor]], T]) -> T:
        """`function(F, extra, parameters)`, after a look whether parameters are reached, if there was none."""

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> tuple[T, bool]:
            return function(F, extra, free), not torch.is_grad_enabled() or any(f.requires_grad for f in F)

        found, reached = self.passes.at(batch, inside)
        if not reached and self.mode.right is None:
            self.mode.choose(batch)  # which notices what it depends on without a graph
        return found


def _once(output_product: OutputMap[T]) -> OutputMap[T]:
    """The product of the first call in each: what it counts and draws for a batch is counted and drawn once."""
    made: list[Callable[[list[Tensor]], T]] = []

    def product(F: Outputs, extra: Any) -> Callable[[list[Tensor]], T]:
        if not made:
            made.append(output_product(F, extra))
        return made[0]

    return product
