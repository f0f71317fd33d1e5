"""The vectors that steps are taken in: parameters as the blocks of a curvature see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch

# PyTorch's own optimizers are made of these; its type hints don't list them.
from torch import Tensor, _foreach_add_, _foreach_copy_, _foreach_mul_, _foreach_norm  # pyright: ignore

from curvlinops_plus.linalg import BlockDiagonal, Dense, Eigendecomposed, Kronecker, LinearOperator
from curvlinops_plus.optim.kfac.policies import GroupOptions, NormConstraint

GroupVectors = list[Tensor]  # one per group


class StepVectors:
    """Parameters that move together, as vectors: one for each option group, with its blocks one
    behind the other.

    A block's part is the row-major vector of its matrix (`Layout`), which is what its curvature
    multiplies. So sums and norms take one call for a whole group, and blocks are multiplied without
    copies. Vectors and the views of their parts are made once.

    The update is `δ = lr · u` with the velocity `u ← μ u - P g`. Beside vectors stand their
    products with the curvature, `C u ← μ C u - C P g` with `C P g = g - λ P g`, so that norm
    constraints cost no products, except after a refresh.

    Args:
        K: The curvature `C` of the last refresh.
        groups: Key to number of the option group of every parameter that has a gradient.
        params: Keys to themselves.
        state: The optimizer's, of its parameters: velocities of before.
        dtype: Of the vectors.

    Attributes:
        K: The curvature of now.
        known: The blocks that had a curvature when the vectors were made.
        groups: Number of the option group of each vector.
        blocks: The names of the blocks of each vector.
        keys: Of the parameters, in the order of their entries.
        params: Themselves.
        gradient: `g`, each `[n]`.
        direction: `P g` and `C P g`, each `[2, n]`.
        velocity: `u` and `C u`, each `[2, n]`.
        displacement: What is added to the parameters, each `[n]`.
        options: Those of this step, of each vector.
        lrs, momenta: Their learning rates and momenta, each once.
        scale: The least factor of a norm constraint in this step, where vectors are on another
            device than the CPU perhaps as a 0-d tensor.

    Raises:
        ValueError: If some parameters of a block have a gradient, and others have none.
    """

    options: list[GroupOptions]
    scale: Tensor | float

    def __init__(
        self,
        K: BlockDiagonal,
        groups: Mapping[str, int],
        params: Mapping[str, Tensor],
        state: Mapping[Any, Mapping[str, Tensor]],
        dtype: torch.dtype,
    ) -> None:
        blocks = _blocks_by_group(K, groups)
        self.known = K.layouts.keys()
        self.groups = list(blocks)
        self.blocks = list(blocks.values())
        layouts = [K.layouts[name] for names in self.blocks for name in names]
        self.keys = [key for layout in layouts for key in layout.names]
        self.params = [params[key] for key in self.keys]
        #: Numbers of the option groups of the parameters.
        self._owners = [groups[key] for key in self.keys]

        sizes = [sum(K.layouts[name].dim for name in names) for names in self.blocks]
        memory = {"dtype": dtype, "device": K.device}
        self.gradient = [torch.zeros(n, **memory) for n in sizes]
        self.displacement = [torch.zeros(n, **memory) for n in sizes]
        self.direction = [torch.zeros(2, n, **memory) for n in sizes]
        self.velocity = [torch.zeros(2, n, **memory) for n in sizes]
        #: Their rows, as views: `P g` and `C P g`, `u` and `C u`.
        self._rows_of_direction = [d.unbind() for d in self.direction]
        self._rows_of_velocity = [u.unbind() for u in self.velocity]
        self._all_options: Sequence[GroupOptions] = ()
        self.renew(K)
        self._gradient_entries = self._entries(self.gradient)
        self._displacement_entries = self._entries(self.displacement)
        #: Numbers of the parameters with an axis that the matrix takes apart.
        self._apart = [
            i for i, p in enumerate(self.params) if p.shape != self._gradient_entries[i].shape
        ]
        self._restore(state)

    def renew(self, K: BlockDiagonal) -> None:
        """Take another curvature of the same blocks."""
        self.K = K
        self._curved = False  # whether `C u` is that of this curvature
        self._curvature: BlockProducts | None = None
        self._preconditioner: tuple[BlockDiagonal, BlockProducts] | None = None

    # ----------------------------------------------------------------------- parameters and vectors
    def _parts(self, vectors: Sequence[Tensor]) -> Iterable[tuple[str, Tensor]]:
        """The names of the blocks and their parts of vectors, each `[n]`, as views."""
        for names, vector in zip(self.blocks, vectors, strict=True):
            yield from zip(
                names, vector.split([self.K.layouts[name].dim for name in names]), strict=True
            )

    def _entries(self, vectors: GroupVectors) -> list[Tensor]:
        """The entries of each parameter as views; axes that the matrix takes apart stay apart."""
        return [
            entries
            for name, part in self._parts(vectors)
            for entries in self.K.layouts[name].views(part).values()
        ]

    def _taken_apart(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors of the shapes of parameters in the shapes of their entries."""
        if self._apart:
            tensors = list(tensors)
        for i in self._apart:
            tensors[i] = tensors[i].view(self._gradient_entries[i].shape)
        return tensors

    def of_parameters(self, vectors: GroupVectors) -> list[Tensor]:
        """Vectors, each `[n]`, in the shapes of the parameters, as views where strides allow."""
        return [
            entries.reshape(p.shape)
            for entries, p in zip(self._entries(vectors), self.params, strict=True)
        ]

    def keep(self, state: MutableMapping[Any, dict[str, Tensor]]) -> None:
        """Show the velocity as entries of each parameter's state."""
        velocities = self.of_parameters([u for u, _ in self._rows_of_velocity])
        products = self.of_parameters([curved for _, curved in self._rows_of_velocity])
        for p, velocity, curved in zip(self.params, velocities, products, strict=True):
            state[p] = {"velocity": velocity}
            if self._curved:
                state[p]["curved_velocity"] = curved

    def _restore(self, state: Mapping[Any, Mapping[str, Tensor]]) -> None:
        """Take over the velocity from the parameters' state."""
        velocities = self._entries([u for u, _ in self._rows_of_velocity])
        products = self._entries([curved for _, curved in self._rows_of_velocity])
        self._curved = True
        for p, velocity, curved in zip(self.params, velocities, products, strict=True):
            before = state.get(p) or {}
            if "velocity" in before:
                velocity.copy_(before["velocity"].view(velocity.shape))
                self._curved &= "curved_velocity" in before
            if "curved_velocity" in before:
                curved.copy_(before["curved_velocity"].view(curved.shape))

    # --------------------------------------------------------------------------------------- a step
    def load(self, sign: int) -> bool:
        """Take over the gradients, and say whether they are finite.

        Args:
            sign: -1 to go up.
        """
        gradients = []
        for p in self.params:
            assert p.grad is not None
            gradients.append(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        _foreach_copy_(self._gradient_entries, self._taken_apart(gradients))
        if sign < 0:
            _foreach_mul_(self.gradient, -1)
        return isfinite(norm_of(self.gradient))

    def precondition(
        self, P: BlockDiagonal, λ: Sequence[float], options: Sequence[GroupOptions]
    ) -> None:
        """Begin a step with `P g`.

        Args:
            P: The inverse of the damped curvature, or another power.
            λ: The damping in `P`, of each vector.
            options: Of all groups.
        """
        if options is not self._all_options:
            self._take_options(options)
        self.scale = 1.0
        if self._couples:
            params = self._taken_apart(self.params)
            for entries, p, o in zip(self._gradient_entries, params, self._decays, strict=True):
                entries.add_(p, alpha=o.coupled)
        if self._preconditioner is None or self._preconditioner[0] is not P:
            products = [Pg for Pg, _ in self._rows_of_direction]
            self._preconditioner = P, self._products(P, self.gradient, products)
        self._preconditioner[1].write()
        # C P g = g - λ P g
        for g, (Pg, CPg), damping in zip(self.gradient, self._rows_of_direction, λ, strict=True):
            torch.sub(g, Pg, alpha=damping, out=CPg)
        self._bound("step", self.direction)

    def _take_options(self, options: Sequence[GroupOptions]) -> None:
        """Take other options of all groups."""
        self._all_options = options
        self.options = [options[k] for k in self.groups]
        #: Each norm constraint with the numbers of the vectors that it bounds as one.
        self._bounds: dict[NormConstraint, list[int]] = {}
        for k, o in enumerate(self.options):
            if o.norm_constraint is not None:
                self._bounds.setdefault(o.norm_constraint, []).append(k)
        self._decays = [options[k] for k in self._owners]  # of each parameter
        self.lrs = sorted({o.rates[0] for o in self.options})
        self.momenta = sorted({o.rates[1] for o in self.options})
        self._couples = any(o.coupled for o in self._decays)
        self._shrinks = any(o.decoupled for o in self._decays)

    def along(self) -> list[GroupVectors]:
        """The two directions `-lr P g` and `μ lr u`, of which an update is made."""
        rates = [o.rates for o in self.options]
        return [
            [Pg * -lr for (Pg, _), (lr, _) in zip(self._rows_of_direction, rates, strict=True)],
            [u * (lr * μ) for (u, _), (lr, μ) in zip(self._rows_of_velocity, rates, strict=True)],
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
            copies = [t.clone() for t in (*self.params, *self.velocity)]
            self._before = copies, self._curved
        for u, d, o in zip(self.velocity, self.direction, self.options, strict=True):
            u.mul_(w[1] * o.rates[1]).sub_(d, alpha=w[0])
        self._bound("update", self.velocity)
        rows = zip(self.displacement, self._rows_of_velocity, self.options, strict=True)
        for step, (u, _), o in rows:
            torch.mul(u, o.rates[0], out=step)
        if self._shrinks:
            params = self._taken_apart(self.params)
            for entries, p, o in zip(self._displacement_entries, params, self._decays, strict=True):
                entries.sub_(p, alpha=w[0] * o.rates[0] * o.decoupled)
        return self._shrinks

    def _bound(self, of: str, vectors: GroupVectors) -> None:
        """Shorten what is longer than its norm constraint allows.

        Args:
            of: "step" for the directions, "update" for the velocities.
            vectors: These.
        """
        for constraint, numbers in self._bounds.items():
            if constraint.of != of:
                continue
            needs_product = constraint.norm != "euclidean" and of == "update"
            if needs_product and not self._curved:  # as after the curvature was renewed
                self._multiply_velocity()
            square = self._square(vectors, constraint.norm, numbers)
            if isinstance(square, Tensor):
                self._shorten(vectors, numbers, constraint.factor_on_device(square))
                continue
            if not square > 0 and needs_product:  # rounding has made up `C u`
                self._multiply_velocity()
                square = self._square(vectors, constraint.norm, numbers)
            factor = constraint.factor(float(square))
            if factor < 1:
                self._shorten(vectors, numbers, factor)

    def _shorten(
        self, vectors: GroupVectors, numbers: Iterable[int], factor: Tensor | float
    ) -> None:
        for k in numbers:
            vectors[k].mul_(factor)
        if isinstance(factor, Tensor):
            self.scale = factor.clamp(max=self.scale)
        else:
            self.scale = min(self.scale, factor)

    def _square(self, vectors: GroupVectors, norm: str, numbers: Iterable[int]) -> Tensor | float:
        """The squared norm of those of these numbers together, times their learning rates.

        Returns:
            A number on the CPU, else a 0-d tensor: to read it would be to wait for the device.
        """
        total = 0.0
        for k in numbers:
            # ⟨v, v⟩ and ⟨v, C v⟩
            products = torch.mv(vectors[k], vectors[k][0])
            if products.device.type == "cpu":
                euclidean, square = products.tolist()
            else:
                euclidean, square = products.double()
            if norm == "euclidean":
                square = euclidean
            elif norm == "damped":
                square += self.options[k].shift * euclidean
            total += self.options[k].rates[0] ** 2 * square
        return total

    def _multiply_velocity(self) -> None:
        """`C u` with the curvature of now."""
        if self._curvature is None:
            velocity, products = zip(*self._rows_of_velocity)
            self._curvature = self._products(self.K, velocity, products)
        self._curvature.write()
        self._curved = True

    def _products(
        self, K: BlockDiagonal, vectors: Sequence[Tensor], products: Sequence[Tensor]
    ) -> BlockProducts:
        pairs = zip(self._parts(vectors), self._parts(products), strict=True)
        return BlockProducts(K, {name: (part, product) for (name, part), (_, product) in pairs})

    def move(self) -> None:
        """Add the displacement to the parameters, in the precision of these."""
        _foreach_add_(self._taken_apart(self.params), self._displacement_entries)

    def undo(self) -> None:
        """Parameters and velocities are what they were before `combine`."""
        copies, self._curved = self._before
        _foreach_copy_([*self.params, *self.velocity], copies)


def norm_of(vectors: GroupVectors) -> Tensor:
    """The Euclidean norm of all of them, 0-d."""
    norms = _foreach_norm(vectors)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _blocks_by_group(K: BlockDiagonal, groups: Mapping[str, int]) -> dict[int, list[str]]:
    """Number of an option group to the blocks whose parameters have gradients."""
    blocks: dict[int, list[str]] = {}
    for name, layout in K.layouts.items():
        keys = [key for key in layout.names if key in groups]
        if 0 < len(keys) < len(layout.names):
            raise ValueError(
                f"Of the parameters {layout.names}, which are one block of the curvature, only "
                f"{keys} have a gradient. Freeze the others before the optimizer is made, or "
                "leave them out of its `params`."
            )
        if keys:
            blocks.setdefault(groups[keys[0]], []).append(name)
    return blocks


class _Rotation(NamedTuple):
    """A block `(G ⊗ A) diag(values) (G ⊗ A)ᵀ`, with its part of a vector and of its product as
    matrices, and what multiplies these: `matmul` would choose it anew each time.
    """

    G: Tensor
    A: Tensor
    Gt: Tensor
    At: Tensor
    part: Tensor
    product: Tensor
    values: Tensor
    multiply: Callable[..., Tensor]


class _Stack(NamedTuple):
    """Blocks of one shape on a device as one block, and where their vectors and products are."""

    block: LinearOperator
    parts: list[Tensor]
    products: list[Tensor]


class BlockProducts:
    """The products of blocks with parts of some vectors, written into parts of others.

    Args:
        K: The blocks.
        places: The name of each block that is multiplied: its part of a vector, and where its
            product goes.
    """

    def __init__(self, K: BlockDiagonal, places: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self._rotations: list[_Rotation] = []
        #: `G`, a part of a vector as a matrix, `Aᵀ`, its product.
        self._factors: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._others: list[tuple[LinearOperator, Tensor, Tensor]] = []
        self._stacks: list[_Stack] = []
        alone = dict(places)
        for names, block in K.stacks().items():
            if places.keys() >= {*names}:
                parts, products = zip(*[alone.pop(name) for name in names], strict=True)
                self._stacks.append(_Stack(block, [*parts], [*products]))
        for name, (part, product) in alone.items():
            block = K.blocks[name]
            pair = block.basis if isinstance(block, Eigendecomposed) else block
            if not (
                isinstance(pair, Kronecker)
                and isinstance(pair.G, Dense)
                and isinstance(pair.A, Dense)
            ):
                self._others.append((block, part, product))
                continue
            G = pair.G.matrix
            A = pair.A.matrix
            shape = (*G.shape[:-1], A.shape[-1])
            part = part.view(shape)
            product = product.view(shape)
            if isinstance(block, Eigendecomposed):
                multiply = torch.mm if G.ndim == 2 else torch.bmm
                values = block.values.view(shape)
                rotation = _Rotation(G, A, G.mT, A.mT, part, product, values, multiply)
                self._rotations.append(rotation)
            else:
                self._factors.append((G, part, A.mT, product))
        self._values = [r.values for r in self._rotations]

    def write(self) -> None:
        """Multiply the vectors as they are now."""
        for block, parts, products in self._stacks:
            product = block._matmat(torch.cat(parts)[:, None])[:, 0]
            _foreach_copy_(products, product.chunk(len(products)))
        if self._rotations:
            rotated = [r.multiply(r.multiply(r.Gt, r.part), r.A) for r in self._rotations]
            _foreach_mul_(rotated, self._values)
            for r, t in zip(self._rotations, rotated, strict=True):
                r.multiply(r.multiply(r.G, t), r.At, out=r.product)
        for G, part, At, product in self._factors:
            torch.matmul(G @ part, At, out=product)
        for block, part, product in self._others:
            product.copy_(block._matmat(part[:, None])[:, 0])
