"""Checks that `J v` and `Jᵀ u` belong to the same matrix `J`.

An operation may have no forward mode, or a wrong one (it ignores `torch.no_grad`). Which way of
computing `J v` is right is told by plain backward passes: `⟨u, J v⟩ = ⟨Jᵀ u, v⟩` for random `u` and
`v`, once for each way. The products themselves tell less, since `⟨M J̃ v, J̃ v⟩ = ⟨v, Jᵀ M J̃ v⟩`
also holds where `J̃` loses a part of `J`, or all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.differentiable import gradients_with_graph, is_once_differentiable
from curvlinops_plus.exact.passes import Pass, Passes, fixed_vectors
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk.batches import Batch, tensors_of
from curvlinops_plus.risk.preserve import with_short_products

# By bytes of the coarsest numbers, how far the two sides of an identity may be apart: of products,
# and of one pair of vectors, in which every parameter that loses its tangent counts as much as any
# other.
_OF_PRODUCTS = {2: 5e-2, 4: 5e-3, 8: 1e-6}
_OF_ONE_PAIR = {2: 0.1, 4: 1e-4, 8: 1e-6}
# Vectors `u`: one pair may agree by chance, where numbers have few digits.
_PAIRS = 3
# By how much, at most, a random vector is larger for parameters with small gradients than for those
# with the largest.
_LARGEST_FACTOR = {2: 2.0**4, 4: 2.0**10, 8: 2.0**20}


class AdjointCheck:
    """Comparisons of the products that passes compute."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._passed = set[Any]()  # ways of computing `J v`, and shapes of batches

    def check_passes(
        self, batch: Batch, columns: int, graph: bool = False, forward: bool = True
    ) -> None:
        """Compare `⟨u, J v⟩` with `⟨Jᵀ u, v⟩` for random `u` and `v`, once for each way in which `J
        v` is computed.

        And for each shape of batches: code may branch by it.

        Args:
            columns: Of the product that comes next: one, or several at once.
            graph: Whether a single tangent is carried while the graph of the backward pass is made,
                as by `ggn`.
            forward: Whether it computes `J v`. If not, and nothing can, there is nothing to compare
                with.

        Raises:
            RuntimeError: If they differ in forward mode; two backward passes may be right.
            UnsupportedError: If they differ all the same, or the model can't be differentiated
                twice.

        Cost: once for each shape, a forward pass, three backward passes, and `J v` of one or two
        vectors.
        """
        passes = self.passes
        risk = passes.risk
        if columns > 1 and columns % passes.columns == 1:  # the last one is computed by itself
            self.check_passes(batch, 1)
        if passes.twice:
            way = "twice"
        elif columns > 1:
            way = "several"
        else:
            way = "with graph" if graph else "alone"
        kind = way, batch.num_examples, *[t.shape for t in tensors_of(batch.X)]
        if kind in self._passed:
            return
        state = RandomState.now(risk.device)
        try:
            with passes.run(batch) as run:
                if not any(f.requires_grad for f in run.outputs):
                    return
                U = fixed_vectors(run.outputs, _PAIRS)
                JTU = torch.zeros(_PAIRS, risk.space.dim, dtype=risk.dtype, device=risk.device)
                passes.back(run.outputs, run.parameters, U, JTU)
                rows = self._balanced(JTU, 2 if columns > 1 and not passes.twice else 1)
                if passes.twice:
                    _require_twice(run)
                    JV = passes.backward_twice(run, rows)
            if way == "with graph":
                JV = passes.tangents(batch, rows[0], state)
            elif not passes.twice:
                JV = passes.forward(batch, rows, state)
            self._require_pairs(U, JV, JTU, rows)
        except RuntimeError as error:
            # `Jᵀ u` goes back once, which the model may be able to do.
            if forward or not passes.twice or not is_once_differentiable(error):
                raise
        finally:
            state.restore()
        self._passed.add(kind)

    def _balanced(self, JTU: Tensor, K: int) -> Tensor:
        """Random vectors `v` [K, n] in which every parameter contributes as much to `⟨Jᵀ u, v⟩` as
        any other.
        """
        sizes = self.passes.sizes
        norms = torch.stack([part.norm() for part in JTU.split(sizes, 1)])
        most = _LARGEST_FACTOR[self.passes.itemsize or 8]
        factors = (norms.max() / norms).nan_to_num(1.0).clamp(1.0, most)
        generator = torch.Generator().manual_seed(1)
        size = K, JTU.shape[1]
        normal = torch.randn(size, generator=generator, dtype=JTU.dtype, device="cpu")
        rows = normal.to(JTU.device)
        return rows * factors.repeat_interleave(torch.tensor(sizes, device=JTU.device))

    def _require_pairs(
        self, U: Sequence[Tensor], JV: Sequence[Tensor], JTU: Tensor, rows: Tensor
    ) -> None:
        """Require `⟨u, J v⟩ = ⟨Jᵀ u, v⟩` for all pairs.

        Args:
            U: Vectors `u` [pairs, *output], for each output.
            JV: Products `J v` [K, *output], likewise.
            JTU: Products `Jᵀ u` [pairs, n].
            rows: Vectors `v` [K, n].
        """
        wide = torch.promote_types(JTU.dtype, torch.float32)
        sizes = self.passes.sizes
        u = torch.cat([t.flatten(1).to(wide) for t in U], 1)
        Jv = torch.cat([t.flatten(1).to(wide) for t in JV], 1)
        with full_precision(u.device.type):
            difference = (u @ Jv.T - (JTU @ rows.T).to(wide)).abs()
        # The standard deviation of `⟨Jᵀ u, v⟩`, if `v` is random: √Σ_p |g_p|² w_p² over parameters
        # p.
        deviations = [
            g.norm(dim=1) * v.square().mean().sqrt()
            for g, v in zip(JTU.split(sizes, 1), rows[:1].split(sizes, 1), strict=True)
        ]
        deviation = torch.stack(deviations).norm(dim=0).to(wide)
        # Where derivatives are zero, as before a norm that takes them away, rounding is all that is
        # left of them.
        eps = torch.finfo(wide).eps
        rounding = 10 * eps * u.norm(dim=1)[:, None] * rows.to(wide).norm(dim=1)
        itemsize = self.passes.itemsize or 8
        tolerance = with_short_products(_OF_ONE_PAIR[itemsize], itemsize, JTU.device)
        if bool((difference > tolerance * deviation[:, None] + rounding).any()):
            raise self._not_adjoint("⟨u, J v⟩ and ⟨Jᵀ u, v⟩")

    def check_products(self, rows: Tensor, products: Tensor, energy: Tensor) -> None:
        """Require `⟨M J v, J v⟩ = ⟨v, Jᵀ M J v⟩` for vectors and products [K, n]; what is not
        finite passes.

        Args:
            energy: `⟨M J v, J v⟩` [K].

        Raises:
            RuntimeError: If they differ in forward mode; two backward passes may be right.
            UnsupportedError: If they differ all the same.
        """
        energy = energy.to(rows)
        difference = (energy - (rows * products).sum(1)).abs()
        room = rows.norm(dim=1) * products.norm(dim=1) / rows.shape[1] ** 0.5
        tiny = torch.finfo(energy.dtype).tiny  # below, numbers have few digits
        tolerance = _OF_PRODUCTS[self.passes.itemsize or 8]
        if bool((difference > tolerance * (energy.abs() + room) + tiny).any()):
            raise self._not_adjoint("⟨M J v, J v⟩ and ⟨v, Jᵀ M J v⟩")

    def _not_adjoint(self, sides: str) -> Exception:
        kind = UnsupportedError if self.passes.twice else RuntimeError
        return kind(
            f"The model's backward pass is not the derivative of its forward pass: {sides} differ. "
            "Does a hook, or a backward pass written by hand, clamp, normalise or perturb "
            "gradients, or a custom operator lack derivatives? Leave that out while the curvature "
            "is computed."
        )


def _require_twice(run: Pass) -> None:
    """Refuse functions whose backward pass can't be differentiated, which autograd would take for
    constants.
    """
    reached = [f for f in run.outputs if f.requires_grad]
    sent = [v[0].requires_grad_() for v in fixed_vectors(reached)]
    gradients_with_graph(reached, run.parameters, sent)
