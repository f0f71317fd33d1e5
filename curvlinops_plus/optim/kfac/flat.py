"""Parameters as the blocks of a curvature see them: one vector for each group of options, in which steps are taken."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

# PyTorch's own optimizers are made of these; its type hints don't list them.
from torch import Tensor, _foreach_add_, _foreach_copy_, _foreach_mul_, _foreach_norm  # pyright: ignore

from curvlinops_plus.linalg import BlockDiagonal, Dense, Eigendecomposed, Kronecker, Layout
from curvlinops_plus.linalg.products import outside_autocast
from curvlinops_plus.optim.kfac.policies import NormConstraint, as_norm_constraint, as_weight_decay

Group = MutableMapping[str, Any]  # of options
Vectors = list[Tensor]  # one per group
State = MutableMapping[Any, dict[str, Any]]  # an optimizer's, of its parameters
Place = tuple[int, torch.Size, tuple[int, ...], int]  # number of the vector, shape, strides, offset


def norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm of all of them."""
    found = _foreach_norm(list(tensors))
    return float(found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found)))


def number_of(value: Any) -> Any:
    """An option of a group; tensors are numbers."""
    return float(value) if isinstance(value, Tensor) else value


class Products:
    """The products of all blocks with their parts of some vectors; what is done entry by entry for all at once."""

    def __init__(self, K: BlockDiagonal, names: Sequence[Sequence[str]]) -> None:
        blocks = [K.blocks[name] for group in names for name in group]
        self._sizes = [[K.layouts[name].dim for name in group] for group in names]
        self._device = K.device
        self._bases: list[tuple[int, Tensor, Tensor]] = []  # of `(G ⊗ A) diag(values) (G ⊗ A)ᵀ`
        self._values: list[Tensor] = []
        self._factors: list[tuple[int, Tensor, Tensor]] = []  # of `G ⊗ A`
        self._others = {}
        for n, block in enumerate(blocks):
            pair = block.basis if isinstance(block, Eigendecomposed) else block
            if (
                not (isinstance(pair, Kronecker) and isinstance(pair.G, Dense) and isinstance(pair.A, Dense))
                or pair.batch
            ):
                self._others[n] = block
            elif isinstance(block, Eigendecomposed):
                self._bases.append((n, pair.G.matrix, pair.A.matrix))
                self._values.append(block.values.view(len(pair.G.matrix), -1))
            else:
                self._factors.append((n, pair.G.matrix, pair.A.matrix))

    def of(self, vectors: Vectors) -> Vectors:
        """`K v`."""
        parts = [part for v, sizes in zip(vectors, self._sizes, strict=True) for part in v.split(sizes)]
        with outside_autocast(self._device):
            inner = [G.mT @ parts[n].view(len(G), len(A)) @ A for n, G, A in self._bases]
            if inner:
                _foreach_mul_(inner, self._values)
            for (n, G, A), t in zip(self._bases, inner, strict=True):
                parts[n] = (G @ t @ A.mT).view(-1)
            for n, G, A in self._factors:
                parts[n] = (G @ parts[n].view(len(G), len(A)) @ A.mT).view(-1)
            for n, block in self._others.items():
                parts[n] = block._matmat(parts[n][:, None])[:, 0]
        joined, start = [], 0
        for sizes in self._sizes:
            joined.append(torch.cat(parts[start : start + len(sizes)]))
            start += len(sizes)
        return joined


class Flat:
    """Parameters that move together, as vectors: one for each option group, with its blocks one behind the other.

    A block's part is the row-major vector of its matrix (`Layout`), which is what its curvature multiplies. So sums and
    norms take one call for a whole group, and blocks are multiplied without copies.

    Args:
        K: The curvature of the last refresh.
        groups: Key to option group of every parameter that has a gradient; a block is in that of its first parameter.
        params: Keys to themselves.
        state: The optimizer's, of its parameters: what was kept before.
        dtype: Of the vectors.

    Attributes:
        keys: Of the parameters, in the order of their entries.
        params: Themselves.
        groups: The option group of each vector.
        gradient: `g`.
        direction: `P g`.
        update: `δ`, without decoupled weight decay.
        scale: The least factor of a norm constraint in this step.

    Raises:
        ValueError: If some parameters of a block have a gradient, and others have none.
    """

    def __init__(
        self,
        K: BlockDiagonal,
        groups: Mapping[str, Group],
        params: Mapping[str, Tensor],
        state: State,
        dtype: torch.dtype,
    ) -> None:
        found: dict[int, dict[str, Layout]] = {}
        for name, layout in K.layouts.items():
            if _has_gradient(layout, groups):
                found.setdefault(id(groups[layout.names[0]]), {})[name] = layout
        self.names = [list(layouts) for layouts in found.values()]
        firsts = [next(iter(layouts.values())).names[0] for layouts in found.values()]
        self.groups = [groups[key] for key in firsts]
        places = _places(found.values())
        self.keys, self._places = list(places), list(places.values())
        self.params, self._of_params = [params[key] for key in self.keys], [groups[key] for key in self.keys]
        self._at = [k for k, *_ in self._places]
        self._sizes = [sum(layout.dim for layout in layouts.values()) for layouts in found.values()]
        self._dtype = dtype
        #: Parameters with an axis that the matrix takes apart.
        self._apart = [i for i, p in enumerate(self.params) if p.shape != self._places[i][1]]
        self.gradient: Vectors = self.zeros()
        self._entries = self._views(self.gradient)
        self.direction: Vectors = []
        self.update: Vectors = []
        self.scale = 1.0
        self._constraints: list[NormConstraint | None] = []
        self._sent: Vectors = []  # `(C + λ) P g`
        self._curved: Vectors = []  # `(C + λ) δ`, if a norm constraint reads it
        self._lr: list[Any] = []
        self.λ: list[float] = []  # of each vector
        # Of the update before; None without one. `(C + λ) v` is None, too, where it is not known.
        self._velocity: list[Tensor | None]
        self._curved_velocity: list[Tensor | None]
        self._rates: list[float | None]
        self._dampings: list[float | None]
        self.renew(K)
        self._recall(state)

    def renew(self, K: BlockDiagonal) -> None:
        """Take another curvature of the same blocks, which what is kept of `(C + λ) v` doesn't belong to."""
        self._curved_velocity = [None] * len(self.groups)
        self.K = K
        self._P: tuple[BlockDiagonal, Products] | None = None
        self._products: Products | None = None

    def zeros(self) -> Vectors:
        """Zero vectors."""
        device = self.params[0].device
        return [torch.zeros(size, dtype=self._dtype, device=device) for size in self._sizes]

    # ---------------------------------------------------------------------------------------- parameters and vectors
    def _views(self, vectors: Vectors) -> list[Tensor]:
        """The entries of each parameter, with axes that the matrix takes apart taken apart."""
        if vectors[0].ndim == 1:
            return [vectors[k].as_strided(shape, strides, at) for k, shape, strides, at in self._places]
        lead, first = vectors[0].shape[:-1], [v.stride()[:-1] for v in vectors]
        return [vectors[k].as_strided(lead + shape, first[k] + strides, at) for k, shape, strides, at in self._places]

    def _taken_apart(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        tensors = list(tensors)
        for i in self._apart:
            tensors[i] = tensors[i].view(self._places[i][1])
        return tensors

    def join(self, tensors: Iterable[Tensor]) -> Vectors:
        """The vectors of tensors that are shaped as the parameters, in their order."""
        vectors = self.zeros()
        _foreach_copy_(self._views(vectors), self._taken_apart(tensors))
        return vectors

    def split(self, vectors: Vectors) -> list[Tensor]:  # each [*lead, n]
        """Tensors `[*lead, *shape]` in the order of the parameters, as views where strides allow."""
        tensors, lead = self._views(vectors), vectors[0].shape[:-1]
        for i in self._apart:
            tensors[i] = tensors[i].reshape(*lead, *self.params[i].shape)
        return tensors

    def add_to_params(self, vectors: Vectors) -> None:
        """Add vectors to the parameters, in the precision of these."""
        _foreach_add_(self._taken_apart(self.params), self._views(vectors))

    # --------------------------------------------------------------------------------------------------------- a step
    def option(self, name: str, default: Any = None) -> list[Any]:
        """An option of each vector's group; tensors are numbers."""
        return [number_of(group.get(name, default)) for group in self.groups]

    def precondition(
        self, gradient: Mapping[str, Tensor], P: BlockDiagonal, dampings: Sequence[float], inverted: Sequence[float]
    ) -> None:
        """Begin a step with `P g`, shortened where `α P g` is longer than its norm constraint allows.

        Args:
            gradient: Key to `g`.
            P: The inverse of the damped curvature, or another power.
            dampings: `λ` of each vector, with the weight decay that is part of the curvature.
            inverted: `λ` in `P`, another one if that keeps the damping of its refresh.
        """
        _foreach_copy_(self._entries, self._taken_apart([gradient[key] for key in self.keys]))
        if self._P is None or self._P[0] is not P:
            self._P = P, Products(P, self.names)
        self.direction, self._sent, self.scale = self._P[1].of(self.gradient), self.gradient, 1.0
        self._constraints = [as_norm_constraint(group["norm_constraint"]) for group in self.groups]
        if inverted != dampings:
            more = zip(self.gradient, self.direction, dampings, inverted, strict=True)
            self._sent = [g + (λ - other) * d for g, d, λ, other in more]
        self.λ = list(dampings)
        rates = [lr if isinstance(lr, float) else None for lr in self.option("lr")]
        for k, (v, lr, before) in enumerate(zip(self._velocity, rates, self._rates, strict=True)):
            ratio = lr / before if lr is not None and before else 1.0  # else it went on as fast when a schedule ends
            curved, λ = self._curved_velocity[k], self._dampings[k]
            if v is not None and ratio != 1:
                v.mul_(ratio)
                self._rates[k] = lr
                if curved is not None:
                    curved.mul_(ratio)
            if v is not None and curved is not None and λ is not None and λ != dampings[k]:
                curved.add_(v, alpha=dampings[k] - λ)
                self._dampings[k] = dampings[k]

        def squares(norm: str) -> list[Tensor]:
            found = self._squares(norm, self.direction, self._sent)
            return [lr**2 * square for lr, square in zip(self.option("lr", 1.0), found, strict=True)]

        if factors := self._factors("step", squares):
            self.direction = [factor * d for factor, d in zip(factors, self.direction, strict=True)]
            self._sent = [factor * s for factor, s in zip(factors, self._sent, strict=True)]

    def combine(self, lr: Sequence[float], momentum: Sequence[float], undoable: bool = False) -> None:
        """`δ = -α P g + μ v`, shortened where it is longer than its norm constraint allows.

        Args:
            undoable: Keep `v` until `remember`; else it is written to.
        """

        def combined(new: Vectors, old: Sequence[Tensor | None]) -> Vectors:
            found = []
            for d, v, α, μ in zip(new, old, lr, momentum, strict=True):
                if v is None:
                    found.append(d * -α)
                else:
                    found.append((v * μ if undoable else v.mul_(μ)).add_(d, alpha=-α))
            return found

        known = [(v is None) == (c is None) for v, c in zip(self._velocity, self._curved_velocity, strict=True)]
        reads = any(_reads_curved(c) for c in self._constraints)
        self._lr, self.update = list(lr), combined(self.direction, self._velocity)
        self._curved = combined(self._sent, self._curved_velocity) if reads else []

        def squares(norm: str) -> list[Tensor]:
            if norm == "euclidean":
                return self._squares(norm, self.update, self._curved)
            found = _products(self.update, self._curved)
            if not all(known) or not _total(found) > 0:  # as after the curvature was renewed
                curved = self.curved(self.update)
                self._curved = [c + λ * u for c, u, λ in zip(curved, self.update, self.λ, strict=True)]
            return self._squares(norm, self.update, self._curved)

        if factors := self._factors("update", squares):
            for vectors in (self.update, self._curved):
                for v, factor in zip(vectors, factors):  # none if nothing is curved
                    v.mul_(factor)

    def curved(self, vectors: Vectors) -> Vectors:
        """`C v`, with the statistics of the last refresh."""
        if self._products is None:
            self._products = Products(self.K, self.names)
        return self._products.of(vectors)

    def with_decay(self) -> Vectors:
        """The update, with decoupled weight decay."""
        groups = {id(group): group for group in self._of_params}
        decays = {i: as_weight_decay(group.get("weight_decay", 0.0)) for i, group in groups.items()}
        if not any(decay.strength for decay in decays.values() if decay.kind == "decoupled"):
            return self.update
        of_params = [decays[id(group)] for group in self._of_params]
        strengths = [decay.strength if decay.kind == "decoupled" else 0.0 for decay in of_params]
        factors = [-self._lr[k] * strength for k, strength in zip(self._at, strengths, strict=True)]
        dtype = self.update[0].dtype
        shrink = self.join([factor * p.to(dtype) for p, factor in zip(self.params, factors, strict=True)])
        return [u + s for u, s in zip(self.update, shrink, strict=True)]

    # --------------------------------------------------------------------------------------------------- the velocity
    @property
    def velocity(self) -> Vectors:
        """The update before, with the learning rate of now; zero without one."""
        return [torch.zeros_like(g) if v is None else v for g, v in zip(self.gradient, self._velocity, strict=True)]

    @property
    def moves(self) -> bool:
        """Whether there is a velocity."""
        return any(v is not None for v in self._velocity)

    def remember(self, state: State) -> None:
        """The update is the velocity of the next step."""
        same = all(new is old for new, old in zip(self.update, self._velocity, strict=True))
        moving = [μ != 0 for μ in self.option("momentum")]
        curved = [m and _reads_curved(c) for m, c in zip(moving, self._constraints, strict=True)]
        self._velocity = [v if m else None for v, m in zip(self.update, moving, strict=True)]
        self._curved_velocity = [self._curved[k] if there else None for k, there in enumerate(curved)]
        self._rates = [lr if isinstance(lr, float) else None for lr in self.option("lr")]
        self._dampings = list(self.λ)
        if not same or not all(moving):
            self.keep(state)

    def keep(self, state: State) -> None:
        """Show what is kept as entries of each parameter's state, views where strides allow."""
        for name, vectors, numbers in (
            ("velocity", self._velocity, self._rates),
            ("curved_velocity", self._curved_velocity, self._dampings),
        ):
            there = [v is not None for v in vectors]
            if not any(there) and not state:
                continue
            entries = self.split([v if v is not None else self.gradient[k] for k, v in enumerate(vectors)])
            for p, k, t in zip(self.params, self._at, entries, strict=True):
                for entry, value in ((name, t), (_NUMBERS[name], numbers[k])):
                    if there[k] and value is not None:
                        state[p][entry] = value
                    elif p in state:
                        state[p].pop(entry, None)

    def _recall(self, state: State) -> None:
        """Go on with what other vectors have kept."""
        n = len(self.groups)
        self._velocity, self._curved_velocity = list[Tensor | None]([None] * n), list[Tensor | None]([None] * n)
        self._rates, self._dampings = list[float | None]([None] * n), list[float | None]([None] * n)
        kept = [state.get(p) or {} for p in self.params]
        rates = self.option("lr")
        for k in range(n):
            own = [i for i, at in enumerate(self._at) if at == k]
            there = [i for i in own if "velocity" in kept[i]]
            if not there:
                continue
            before = {kept[i].get("velocity_lr") for i in there}
            dampings = {kept[i].get("velocity_damping") for i in there}
            factors = dict.fromkeys(there, 1.0)
            if len(before) == 1:
                self._rates[k] = before.pop()
            else:  # parameters that rested have a velocity that was taken with another lr
                self._rates[k] = rates[k] if isinstance(rates[k], float) else None
                factors = {i: rates[k] / lr for i in there if (lr := kept[i].get("velocity_lr")) and self._rates[k]}
            self._velocity[k] = self._joined(k, {i: kept[i]["velocity"] * factors.get(i, 1.0) for i in there})
            if all("curved_velocity" in kept[i] for i in there) and len(dampings) == 1:
                found = {i: kept[i]["curved_velocity"] * factors.get(i, 1.0) for i in there}
                self._curved_velocity[k], self._dampings[k] = self._joined(k, found), dampings.pop()

    def _joined(self, k: int, entries: Mapping[int, Tensor]) -> Tensor:
        """One vector, zero where there is no entry."""
        filled = [entries[i] if i in entries else torch.zeros_like(p) for i, p in enumerate(self.params)]
        return self.join(filled)[k]

    # --------------------------------------------------------------------------------------------------------- norms
    def _squares(self, norm: str, one: Vectors, curved: Vectors) -> list[Tensor]:
        """The squared norm of each vector; `curved` is `(C + λ)` times `one`."""
        if norm == "euclidean":
            return _products(one, one)
        found = _products(one, curved)
        if norm == "damped":
            return found
        return [c - λ * e for c, e, λ in zip(found, _products(one, one), self.λ, strict=True)]

    def _factors(self, of: str, squares: Callable[[str], list[Tensor]]) -> list[float]:
        """What each part is multiplied with; empty if no constraint is active.

        Groups with the same constraint are bounded together, as one vector.
        """
        factors = [1.0] * len(self._constraints)
        for c in {c for c in self._constraints if c is not None and c.of == of}:
            at = [i for i, other in enumerate(self._constraints) if other == c]
            found = squares(c.norm)
            factor = c.factor(_total([found[i] for i in at]))
            self.scale = min(self.scale, factor)
            for i in at:
                factors[i] = factor
        return factors if min(factors, default=1.0) < 1 else []


_NUMBERS = {"velocity": "velocity_lr", "curved_velocity": "velocity_damping"}


def _products(one: Vectors, two: Vectors) -> list[Tensor]:
    """`⟨a, b⟩` of each pair of vectors, 0-d tensors."""
    return [a.dot(b) for a, b in zip(one, two, strict=True)]


def _total(numbers: Sequence[Tensor]) -> float:
    """The sum of 0-d tensors."""
    return float(numbers[0] if len(numbers) == 1 else torch.stack(list(numbers)).sum())


def _reads_curved(c: NormConstraint | None) -> bool:
    return c is not None and c.of == "update" and c.norm != "euclidean"


def _has_gradient(layout: Layout, keys: Container[str]) -> bool:
    """Whether a block has a gradient."""
    found = [key for key in layout.names if key in keys]
    if 0 < len(found) < len(layout.names):
        raise ValueError(
            f"Of the parameters {layout.names}, which are one block of the curvature, only {found} have a gradient. "
            "Freeze the others before the optimizer is made, or leave them out of its `params`."
        )
    return bool(found)


def _places(blocks: Iterable[Mapping[str, Layout]]) -> dict[str, Place]:
    """Key of a parameter to where its entries are in the vectors of some blocks."""
    places: dict[str, Place] = {}
    for k, layouts in enumerate(blocks):
        sizes = [layout.dim for layout in layouts.values()]
        for layout, part in zip(layouts.values(), torch.empty(sum(sizes), device="meta").split(sizes), strict=True):
            for key, t in layout.views(part).items():
                places[key] = k, t.shape, t.stride(), int(t.storage_offset())
    return places
