"""Parameters as the blocks of a curvature see them: one vector for each group of options, in which
steps are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

# PyTorch's own optimizers are made of these; its type hints don't list them.
from torch import Tensor, _foreach_add_, _foreach_copy_, _foreach_mul_, _foreach_neg_, _foreach_norm  # pyright: ignore

from curvlinops_plus.linalg import BlockDiagonal, Dense, Eigendecomposed, Kronecker
from curvlinops_plus.optim.kfac.policies import GroupOptions

Vectors = list[Tensor]  # one per group


def norm(tensors: list[Tensor]) -> float:
    """The Euclidean norm of all of them."""
    parts = _foreach_norm(tensors)
    return float(parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts)))


class Products:
    """The products of all blocks with their parts of some vectors; what is done entry by entry for
    all at once.
    """

    def __init__(self, K: BlockDiagonal, names: Sequence[Sequence[str]]) -> None:
        self._sizes = [[K.layouts[name].dim for name in group] for group in names]
        #: Places of `(G ⊗ A) diag(values) (G ⊗ A)ᵀ` and of `G ⊗ A`; their shapes and both factors,
        #: transposed and not.
        self._bases: dict[int, tuple[torch.Size, Tensor, Tensor, Tensor, Tensor]] = {}
        self._factors: dict[int, tuple[torch.Size, Tensor, Tensor]] = {}
        self._values: list[Tensor] = []
        self._others = {}
        for n, block in enumerate(K.blocks[name] for group in names for name in group):
            pair = block.basis if isinstance(block, Eigendecomposed) else block
            if not (
                isinstance(pair, Kronecker)
                and isinstance(pair.G, Dense)
                and isinstance(pair.A, Dense)
            ):
                self._others[n] = block
                continue
            G, A = pair.G.matrix, pair.A.matrix
            shape = torch.Size((*G.shape[:-1], A.shape[-1]))
            if isinstance(block, Eigendecomposed):
                self._bases[n] = shape, G, A, G.mT, A.mT
                self._values.append(block.values.view(shape))
            else:
                self._factors[n] = shape, G, A.mT

    def of(self, vectors: Vectors) -> Vectors:
        """`K v`."""
        parts = [
            part for v, sizes in zip(vectors, self._sizes, strict=True) for part in v.split(sizes)
        ]
        inner = [Gt @ parts[n].view(shape) @ A for n, (shape, _, A, Gt, _) in self._bases.items()]
        if inner:
            _foreach_mul_(inner, self._values)
        for (n, (_, G, _, _, At)), t in zip(self._bases.items(), inner, strict=True):
            parts[n] = (G @ t @ At).flatten()
        for n, (shape, G, At) in self._factors.items():
            parts[n] = (G @ parts[n].view(shape) @ At).flatten()
        for n, block in self._others.items():
            parts[n] = block._matmat(parts[n][:, None])[:, 0]
        of_blocks = iter(parts)
        return [torch.cat([next(of_blocks) for _ in sizes]) for sizes in self._sizes]


class Flat:
    """Parameters that move together, as vectors: one for each option group, with its blocks one
    behind the other.

    A block's part is the row-major vector of its matrix (`Layout`), which is what its curvature
    multiplies. So sums and norms take one call for a whole group, and blocks are multiplied without
    copies.

    The update is `δ = lr · u` with the velocity `u ← μ u - P g`. Beside vectors stand their
    products with the curvature, `C u ← μ C u - C P g` with `C P g = g - λ P g`, so that norm
    constraints cost no products, except after a refresh.

    Args:
        K: The curvature `C` of the last refresh.
        groups: Key to number of the option group of every parameter that has a gradient.
        params: Keys to themselves.
        state: The optimizer's, of its parameters: what was kept before.
        dtype: Of the vectors.

    Attributes:
        known: The blocks that have a curvature.
        given: The parameters that have a gradient.
        groups: Number of the option group of each vector.
        blocks: The names of the blocks of each vector.
        keys: Of the parameters, in the order of their entries.
        params: Themselves.
        gradient: `g`, each `[n]`.
        direction: `P g` and `C P g`, each `[2, n]`.
        velocity: `u` and `C u`, each `[2, n]`.
        displacement: What is added to the parameters, each `[n]`.
        options: Those of this step, of each vector.
        scale: The least factor of a norm constraint in this step.

    Raises:
        ValueError: If some parameters of a block have a gradient, and others have none.
    """

    def __init__(
        self,
        K: BlockDiagonal,
        groups: Mapping[str, int],
        params: Mapping[str, Tensor],
        state: Mapping[Any, Mapping[str, Tensor]],
        dtype: torch.dtype,
    ) -> None:
        found: dict[int, list[str]] = {}
        for name, layout in K.layouts.items():
            have = [key for key in layout.names if key in groups]
            if 0 < len(have) < len(layout.names):
                raise ValueError(
                    f"Of the parameters {layout.names}, which are one block of the curvature, only "
                    f"{have} have a gradient. Freeze the others before the optimizer is made, or "
                    "leave them out of its `params`."
                )
            if have:
                found.setdefault(groups[have[0]], []).append(name)
        self.known, self.given = K.layouts.keys(), groups.keys()
        self.groups, self.blocks = list(found), list(found.values())
        #: Key of a parameter to where its entries are: number of the vector, shape, strides,
        #: offset.
        places: dict[str, tuple[int, torch.Size, tuple[int, ...], int]] = {}
        sizes = [[K.layouts[name].dim for name in names] for names in self.blocks]
        for k, names in enumerate(self.blocks):
            for name, part in zip(
                names, torch.empty(sum(sizes[k]), device="meta").split(sizes[k]), strict=True
            ):
                for key, t in K.layouts[name].views(part).items():
                    places[key] = k, t.shape, t.stride(), int(t.storage_offset())
        self.keys, self._places = list(places), list(places.values())
        self._owners = [groups[key] for key in self.keys]
        self.params = [params[key] for key in self.keys]
        #: Parameters with an axis that the matrix takes apart.
        self._apart = [i for i, p in enumerate(self.params) if p.shape != self._places[i][1]]
        like = {"dtype": dtype, "device": K.device}
        self.gradient, self.displacement = (
            [torch.zeros(sum(n), **like) for n in sizes] for _ in range(2)
        )
        self.velocity = [torch.zeros(2, sum(n), **like) for n in sizes]
        self.direction: Vectors = []
        self._entries, self._moves = self._views(self.gradient), self._views(self.displacement)
        self.scale = 1.0
        self.renew(K)
        self._known = True  # whether `C u` is that of this curvature
        for p, t in zip(self.params, self._views(self.velocity), strict=True):
            if "velocity" in (kept := state.get(p) or {}):
                self._known &= "curved_velocity" in kept
                t.copy_(
                    torch.stack(
                        (kept["velocity"], kept.get("curved_velocity", kept["velocity"]))
                    ).view(t.shape)
                )

    def renew(self, K: BlockDiagonal) -> None:
        """Take another curvature of the same blocks."""
        self.K, self._known = K, False
        self._products: Products | None = None
        self._P: tuple[BlockDiagonal, Products] | None = None

    # ----------------------------------------------------------------------- parameters and vectors
    def _views(self, vectors: Vectors) -> list[Tensor]:  # each [*lead, n]
        """The entries of each parameter, with axes that the matrix takes apart taken apart."""
        lead, first = vectors[0].shape[:-1], [v.stride()[:-1] for v in vectors]
        return [
            vectors[k].as_strided(lead + shape, first[k] + strides, at)
            for k, shape, strides, at in self._places
        ]

    def _taken_apart(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        tensors = list(tensors)
        for i in self._apart:
            tensors[i] = tensors[i].view(self._places[i][1])
        return tensors

    def split(self, vectors: Vectors) -> list[Tensor]:  # each [*lead, n]
        """Tensors `[*lead, *shape]` in the order of the parameters, as views where strides
        allow.
        """
        tensors, lead = self._views(vectors), vectors[0].shape[:-1]
        for i in self._apart:
            tensors[i] = tensors[i].reshape(*lead, *self.params[i].shape)
        return tensors

    def keep(self, state: MutableMapping[Any, dict[str, Tensor]]) -> None:
        """Show the velocity as entries of each parameter's state."""
        for p, t in zip(self.params, self.split(self.velocity), strict=True):
            state[p] = (
                {"velocity": t[0], "curved_velocity": t[1]} if self._known else {"velocity": t[0]}
            )

    # --------------------------------------------------------------------------------------- a step
    def precondition(
        self,
        gradient: Mapping[str, Tensor],
        P: BlockDiagonal,
        λ: Sequence[float],
        options: Sequence[GroupOptions],
        sign: int,
    ) -> None:
        """Begin a step with `P g`.

        Args:
            gradient: Key to gradient.
            P: The inverse of the damped curvature, or another power.
            λ: The damping in `P`, of each vector.
            options: Of all groups.
            sign: -1 to go up.
        """
        self.options, self.scale = [options[k] for k in self.groups], 1.0
        self._shrink = [options[k].decoupled for k in self._owners]
        _foreach_copy_(self._entries, self._taken_apart([gradient[key] for key in self.keys]))
        if sign < 0:
            _foreach_neg_(self.gradient)
        coupled = [o.coupled for o in self.options]
        if any(coupled):
            for entries, p, (k, *_) in zip(
                self._entries, self._taken_apart(self.params), self._places, strict=True
            ):
                entries.add_(p, alpha=coupled[k])
        if self._P is None or self._P[0] is not P:
            self._P = P, Products(P, self.blocks)
        found = zip(self.gradient, self._P[1].of(self.gradient), λ, strict=True)
        self.direction = [torch.stack((d, torch.sub(g, d, alpha=x))) for g, d, x in found]
        self._bound("step", self.direction)

    def along(self) -> list[Vectors]:
        """The two directions `-lr P g` and `μ lr u`, of which an update is made."""
        rates = [o.rates for o in self.options]
        return [
            [d[0] * -lr for d, (lr, _) in zip(self.direction, rates, strict=True)],
            [u[0] * (lr * μ) for u, (lr, μ) in zip(self.velocity, rates, strict=True)],
        ]

    def combine(self, w: Sequence[float], undoable: bool = False) -> bool:
        """`u ← w₁ μ u - w₀ P g`; the displacement is `lr u`, less decoupled weight decay.

        Args:
            w: Factors of both directions.
            undoable: Whether `undo` may take it back, and what is added to the parameters
                afterwards.

        Returns:
            Whether there is such weight decay.
        """
        if undoable:
            self._before = (
                [p.clone() for p in self.params],
                [u.clone() for u in self.velocity],
                self._known,
            )
        for u, d, o in zip(self.velocity, self.direction, self.options, strict=True):
            u.mul_(w[1] * o.rates[1]).sub_(d, alpha=w[0])
        self._bound("update", self.velocity)
        for step, u, o in zip(self.displacement, self.velocity, self.options, strict=True):
            torch.mul(u[0], o.rates[0], out=step)
        if any(self._shrink):
            places = zip(
                self._moves, self._taken_apart(self.params), self._places, self._shrink, strict=True
            )
            for entries, p, (k, *_), η in places:
                entries.sub_(p, alpha=w[0] * self.options[k].rates[0] * η)
        return any(self._shrink)

    def _bound(self, of: str, vectors: Vectors) -> None:
        """Shorten what is longer than its norm constraint allows; groups with the same one are
        bounded as one vector.

        Args:
            of: "step" for the directions, "update" for the velocities.
            vectors: These.
        """
        constraints = [o.norm_constraint for o in self.options]
        for c in dict.fromkeys(c for c in constraints if c is not None and c.of == of):
            at = [k for k, other in enumerate(constraints) if other == c]
            curved = c.norm != "euclidean" and of == "update"
            square = self._square(vectors, c.norm, at) if self._known or not curved else 0.0
            if not square > 0 and curved:  # as after the curvature was renewed
                for u, product in zip(
                    self.velocity, self.curved([u[0] for u in self.velocity]), strict=True
                ):
                    u[1] = product
                self._known, square = True, self._square(vectors, c.norm, at)
            if (factor := c.factor(square)) < 1:
                for k in at:
                    vectors[k].mul_(factor)
            self.scale = min(self.scale, factor)

    def _square(self, vectors: Vectors, norm: str, at: Iterable[int]) -> float:
        """The squared norm of those of these numbers together, times their learning rates."""
        total: Any = 0.0
        for k in at:
            (v, curved), o = vectors[k], self.options[k]
            product = v if norm == "euclidean" else curved
            if norm == "damped":
                product = torch.add(curved, v, alpha=o.shift)
            total = total + o.rates[0] ** 2 * v.dot(product)
        return float(total)

    def curved(self, vectors: Vectors) -> Vectors:
        """`C v`, with the statistics of the last refresh."""
        if self._products is None:
            self._products = Products(self.K, self.blocks)
        return self._products.of(vectors)

    def move(self) -> None:
        """Add the displacement to the parameters, in the precision of these."""
        _foreach_add_(self._taken_apart(self.params), self._moves)

    def undo(self) -> None:
        """Parameters and velocities are what they were before `combine`."""
        params, velocity, self._known = self._before
        _foreach_copy_([*self.params, *self.velocity], [*params, *velocity])
