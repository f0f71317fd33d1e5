"""Block-diagonal matrices with one block per group of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg.arithmetic import Scaled
from curvlinops_plus.linalg.checksums import require_intact, sealed
from curvlinops_plus.linalg.damping import Damping, Scalar, relative_part
from curvlinops_plus.linalg.decisions import read_together
from curvlinops_plus.linalg.dense import Dense, Diagonal
from curvlinops_plus.linalg.fields import Fields, reading
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.numerics import frobenius, side_by_side, threads_for
from curvlinops_plus.linalg.operator import OF_PARTS, LinearOperator, about
from curvlinops_plus.linalg.packing import FORMAT, pack, unpack
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.linalg.space import Space, Structure
from curvlinops_plus.linalg.stacks import (
    alike,
    decompose_in_stacks,
    factors_of,
    factors_to_invert,
    joined,
    joined_dampings,
    parted,
)

# From a block and its damping to the factors of it that are decomposed.
Decomposes = Callable[[LinearOperator, Any], list[Dense]]


class BlockDiagonal(LinearOperator):
    """One operator per group of parameters; between groups the matrix is zero.

    Everything with a closed form follows block by block, and inverses, powers, shifts, multiples
    and sums of equal groups are again block-diagonal. `inverse`, `power` and `shift` take a damping
    as a number, a 1-d tensor with one number per block, a mapping from block name to damping, or a
    rule that is called with each block. Errors begin with the block's name.

    Args:
        blocks: Name to square operator.
        layouts: The same names to how the parameters of a block make its vector.
        space: All parameters, in the order of the whole vector. Each is in one layout.
        device: Where vectors are, if blocks are kept elsewhere; each is then fetched when it is
            used.

    Raises:
        ValueError: If names, sizes, dtypes or devices do not fit.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal, Kronecker
        >>> space = Space.from_shapes({"W": (2, 3), "b": (2,), "scale": (4,)})
        >>> fc = Layout({"W": "o i -> o i", "b": "o -> o 1"}, {"W": (2, 3), "b": (2,)})
        >>> layouts = {"fc": fc, "scale": Layout({"scale": "d -> 1 d"}, {"scale": (4,)})}
        >>> G, A, d = torch.eye(2), 2 * torch.eye(4), torch.ones(4)
        >>> K = BlockDiagonal({"fc": Kronecker(G, A), "scale": Diagonal(d)}, layouts, space)
        >>> K.inverse(damping={"fc": 2.0, "scale": 1.0}).diagonal()
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.5000,
                0.5000, 0.5000, 0.5000])
    """

    _keeps_elsewhere = False

    def __init__(
        self,
        blocks: Mapping[str, LinearOperator],
        layouts: Mapping[str, Layout],
        space: Space,
        device: torch.device | None = None,
    ) -> None:
        if not blocks or blocks.keys() != layouts.keys():
            raise ValueError(
                f"Expected one layout per block and at least one block, got blocks {list(blocks)} "
                f"and layouts {list(layouts)}."
            )
        block = next(iter(blocks.values()))
        super().__init__(space, block.dtype, block.device, out_space=space)
        shapes = [item for layout in layouts.values() for item in layout.shapes.items()]
        if sorted(shapes) != sorted(space.shapes.items()):
            raise ValueError(
                f"Expected each of the parameters {space} in one layout, got {shapes}."
            )
        self._set_groups(blocks, {name: layouts[name] for name in blocks}, space)
        for name, block in blocks.items():
            dim = layouts[name].dim
            fits = block.shape == (dim, dim)
            if not fits or (block.dtype, block.device) != (self.dtype, self.device):
                raise ValueError(
                    f'block "{name}": expected a {dim} x {dim} matrix for {layouts[name]}, in '
                    f"{self.dtype} on {self.device} as the first block, got {block.label}."
                )
        if device not in (None, self.device):
            self.device = device
            self._keeps_elsewhere = True

    def _set_groups(
        self, blocks: Mapping[str, LinearOperator], layouts: Mapping[str, Layout], space: Space
    ) -> None:
        #: The parameters of the layouts, in the order of the vector.
        self.space = space
        #: Name to operator.
        self.blocks = dict(blocks)
        #: Name to how the parameters of the block make its vector.
        self.layouts = dict(layouts)
        order = {key: place for place, key in enumerate(space.shapes)}
        #: Where the parameters of each block are among the tensors of the space.
        self._places = {
            name: [order[key] for key in layout.shapes] for name, layout in layouts.items()
        }

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        blocks = self.blocks.values()
        # Diagonal matrices have to look at their entries.
        return read_together(lambda: min(block.structure for block in blocks), self.device)

    def __repr__(self) -> str:
        named = [f"{name or '(all)'} {type(block).__name__}" for name, block in self.blocks.items()]
        more = ", ..." if named[4:] else ""
        return f"{self.label}\n  {len(named)} blocks: {', '.join(named[:4])}{more}"

    # Products
    # ----------------------------------------------------------------------------------------------

    def _matmat(self, X: Tensor) -> Tensor:
        return self._blockwise("_matmat", X)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self._blockwise("_rmatmat", X)

    def _root_matmat(self, X: Tensor) -> Tensor:
        return self._blockwise("_root_matmat", X)

    def _blockwise(self, product: str, X: Tensor) -> Tensor:
        """Multiply block by block, each result written straight to its place in `[n, K]`.

        Columns are stored one after another, as `Kronecker` and `Layout.gather` do: then a block's
        rows are moved in long runs, and the whole is transposed once at most.
        """
        # X [n, K] as one tensor [K, size] for each parameter.
        tensors = X.T.contiguous().split_with_sizes(self.space.sizes, 1)
        products: list[Tensor | None] = [None] * len(tensors)
        # The root of a stack would be another one of the same matrix.
        stacks = {} if product == "_root_matmat" else self.stacks()
        for names, stack in stacks.items():
            parts = []
            for name in names:
                parts.append(self.layouts[name].gather([tensors[k] for k in self._places[name]]).T)
            Y = getattr(stack, product)(torch.cat(parts))
            for name, y in zip(names, Y.chunk(len(names)), strict=True):
                for place, part in zip(self._places[name], self.layouts[name].scatter(y.T)):
                    products[place] = part
        stacked = {name for names in stacks for name in names}
        for name in self.blocks:
            if name in stacked:
                continue
            layout = self.layouts[name]
            places = self._places[name]
            x = layout.gather([tensors[place] for place in places]).T
            try:
                y = getattr(self._fetched(name), product)(x)
            except OF_PARTS as error:
                raise about(f'block "{name}"', error) from error
            for place, part in zip(places, layout.scatter(y.T)):
                products[place] = part
        # Blocks of other processes are zero here.
        parts = [torch.zeros_like(x) if y is None else y for x, y in zip(tensors, products)]
        return torch.cat(parts, 1).T

    def stacks(self) -> dict[tuple[str, ...], LinearOperator]:
        """Names of blocks of one shape to one block of all their vectors, one behind the other.

        On a device a product, or an inverse, of all of them takes as long as that of each.
        """
        # Where matrices are in memory is not known to a compiler.
        if self.device.type == "cpu" or self._keeps_elsewhere or torch.compiler.is_compiling():
            return {}
        stacks = {}
        for names in alike(self.blocks):
            stack = joined([self.blocks[name] for name in names])
            if stack is not None:
                stacks[tuple(names)] = stack
        return stacks

    def split(self, v: Any) -> dict[str, Tensor]:
        """A vector's parts, block by block: what each block is multiplied with.

        Args:
            v: Anything that the operator multiplies: a flat tensor, a list or dictionary of
                tensors, with or without columns.

        Returns:
            Block name to `[dim]`, or `[dim, K]` of K columns: the row-major vector of the block's
            matrix.

        Example:
            >>> from curvlinops_plus.linalg import Diagonal, Layout
            >>> space = Space.from_shapes({"w": (2,), "v": (1,)})
            >>> layouts = {
            ...     "b": Layout({"v": "d -> 1 d"}, {"v": (1,)}),
            ...     "a": Layout({"w": "d -> 1 d"}, {"w": (2,)}),
            ... }
            >>> blocks = {"b": Diagonal(torch.ones(1)), "a": Diagonal(torch.ones(2))}
            >>> K = BlockDiagonal(blocks, layouts, space)
            >>> K.split(torch.tensor([1.0, 2.0, 3.0]))
            {'b': tensor([3.]), 'a': tensor([1., 2.])}
        """
        X, container = self.in_space.read(v, self.dtype, self.device)
        parts = self._split(X)
        if container.columns:
            return parts
        return {name: part[:, 0] for name, part in parts.items()}

    def _split(self, X: Tensor) -> dict[str, Tensor]:  # [n, K] -> {name: [dim, K]}
        tree = self.space.unflatten(X)
        return {name: layout.join(tree) for name, layout in self.layouts.items()}

    def positions(self) -> dict[str, Tensor]:
        """Block name to `[dim]`: where in the vector the entries are that the block multiplies, in
        its order.
        """
        every = torch.arange(self.shape[0], device=self.device)[:, None]
        return {name: part[:, 0] for name, part in self._split(every).items()}

    def merge(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector `[n]`, or `[n, K]`, of which `parts` are the blocks' parts: undoes `split`."""
        tree: dict[str, Tensor] = {}
        for name, layout in self.layouts.items():
            part = parts[name]
            if part.ndim == 2:
                tree |= layout.split(part)
            else:
                tensors = layout.split(part[:, None])
                tree |= {key: t[..., 0] for key, t in tensors.items()}
        return self.space.flatten(tree)

    def _adjoint(self) -> BlockDiagonal:
        return self._with(self._each(methodcaller("adjoint")))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> BlockDiagonal:
        copied = self._with({name: block.to(device, dtype) for name, block in self.blocks.items()})
        copied.dtype = dtype or self.dtype
        copied.device = device or self.device
        copied._keeps_elsewhere = self._keeps_elsewhere and device is None
        return copied

    def offload(self, where: str | torch.device = "cpu") -> BlockDiagonal:
        """The same matrix with blocks that are kept on another device, and fetched one by one when
        they are used.

        Inverses, powers and multiples are kept there, too. Decompositions are not remembered: take
        `K.inverse` once.
        """
        offloaded = self.to(torch.device(where))
        offloaded._keeps_elsewhere = offloaded.device != self.device
        offloaded.device = self.device
        return offloaded

    def _fetched(self, name: str) -> LinearOperator:
        """A block on the device of vectors."""
        return self.blocks[name].to(self.device) if self._keeps_elsewhere else self.blocks[name]

    def _to_dense(self) -> Tensor:
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for name, places in self.positions().items():
            dense[places[:, None], places] = self._fetched(name).to_dense()
        return dense

    # States
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All blocks and their parameters, in tensors and plain Python, as `save` and `torch.save`
        take it.

        Raises:
            ValueError: If a block is known by its products alone.
        """
        layouts = {}
        for name, layout in self.layouts.items():
            layouts[name] = {"patterns": layout.patterns, "sizes": layout.sizes}
        return sealed(
            {
                "format": FORMAT,
                "class": "BlockDiagonal",
                "space": {name: list(shape) for name, shape in self.space.shapes.items()},
                "layouts": layouts,
                "blocks": self._each(pack),
            }
        )

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, Any], device: torch.device | str = "cpu"
    ) -> BlockDiagonal:
        """The operator that a state describes.

        Args:
            state_dict: What `state_dict()` returned.
            device: Where its tensors shall be.

        Raises:
            ValueError: If it is no such state, or damaged.

        Example:
            >>> from curvlinops_plus.linalg import Diagonal
            >>> layouts = {"w": Layout({"w": "d -> 1 d"}, {"w": (2,)})}
            >>> K = BlockDiagonal({"w": Diagonal(torch.ones(2))}, layouts, Space({"w": (2,)}))
            >>> BlockDiagonal.from_state_dict((K + 2 * K).state_dict()).diagonal()
            tensor([3., 3.])
        """
        if not isinstance(state_dict, Mapping) or state_dict.get("class") != "BlockDiagonal":
            raise ValueError(
                "This is not the state of a BlockDiagonal, as its state_dict() returns it; that of "
                "a curvature is read by BlockwiseLinearOperator.from_state_dict(state, model, "
                "data)."
            )
        title = "The state"
        with reading(title):
            require_intact(state_dict, title)
            fields = Fields(state_dict, title)
            space = Space(fields.part("space").data)
            blocks = {}
            for name, block in fields.part("blocks").data.items():
                blocks[name] = unpack(block, torch.device(device), f"{title}, block {name!r}")
            layouts = {}
            for name, layout in fields.part("layouts").parts():
                patterns = layout.part("patterns").data
                shapes = {key: space.shapes[key] for key in patterns}
                layouts[name] = Layout(patterns, shapes, layout.part("sizes").data)
            return BlockDiagonal(blocks, layouts, space)

    # Closed forms
    # ----------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Tensor:
        return torch.stack(self._tensors(attrgetter("trace"))).sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return frobenius(torch.stack(self._tensors(attrgetter("frobenius_norm"))))

    def eigenvalues(self) -> Tensor:
        return torch.cat(self._tensors(methodcaller("eigenvalues"), factors_of))

    def diagonal(self) -> Tensor:
        """The diagonal, `[n]`, in the order of the parameters."""
        return self.merge(dict(zip(self.layouts, self._tensors(methodcaller("diagonal")))))

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        # The determinant is the product of the blocks' determinants.
        pairs = self._tensors(lambda block: torch.stack(block._slogdet()), factors_of)
        signs, logarithms = torch.stack(pairs, 1)
        return signs.prod(), logarithms.sum()

    def inverse(
        self, damping: Damping = 0.0, *, retry_double_precision: bool = True
    ) -> BlockDiagonal:
        """`(K + damping I)⁻¹`, block by block; see `LinearOperator.inverse`."""
        retry = {"retry_double_precision": retry_double_precision}
        return self._damped(
            lambda block: partial(block.inverse, **retry), damping, factors_to_invert, stacks=True
        )

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> BlockDiagonal:
        """`(K + damping I)ᵖ`, block by block; see `LinearOperator.power`."""
        # Whether a damping can be split depends on each block.
        return self._damped(
            lambda block: partial(block.power, p, exact=exact), damping, factors_of, stacks=exact
        )

    def shift(self, delta: Damping) -> BlockDiagonal:
        """`K + delta I`, block by block."""
        return self._damped(attrgetter("shift"), delta)

    def _scale(self, c: Scalar) -> BlockDiagonal:
        return self._with(self._each(methodcaller("_scale", c)))

    def _plus(self, other: LinearOperator) -> BlockDiagonal | None:
        """Block by block, if the groups of parameters are the same, whatever they are called; also
        with a diagonal.
        """
        positions = self.positions()
        addends: dict[str, LinearOperator | None]
        if isinstance(other, Diagonal):
            vector = other.vector.flatten()
            addends = {name: Diagonal(vector[positions[name]]) for name in self.blocks}
        elif isinstance(other, BlockDiagonal) and type(other) is type(self):
            block_at = {
                _bytes(places): other.blocks.get(name) for name, places in other.positions().items()
            }
            addends = {name: block_at.get(_bytes(positions[name])) for name in self.blocks}
        else:
            return None
        if None in addends.values():
            return None
        sums = {name: block + addends[name] for name, block in self.blocks.items()}
        return self._with(sums, other)

    def nearest_kronecker(self) -> BlockDiagonal:
        """The same with blocks that are sums of Kronecker products replaced by the nearest single
        one.
        """
        return self._with(
            self._each(lambda block: getattr(block, "nearest_kronecker", lambda: block)())
        )

    def gather(self) -> BlockDiagonal:
        """The same with all blocks here: the operator itself, unless it is an
        `OwnedBlockDiagonal`.
        """
        return self

    def _tensors(
        self,
        function: Callable[[LinearOperator], Tensor],
        decomposes: Decomposes | None = None,
    ) -> list[Tensor]:
        """`function(block)` for the blocks of all processes, in the order of the layouts."""
        return list(self._each(function, decomposes).values())

    def _damped(
        self,
        function: Callable[[Any], Any],
        damping: Damping,
        decomposes: Decomposes | None = None,
        stacks: bool = False,
    ) -> BlockDiagonal:
        """The matrix of the blocks `function(block)(damping of the block)`; arguments as for
        `_each`.
        """
        return self._with(self._each(function, decomposes, self.per_block(damping), stacks))

    def _each(
        self,
        function: Callable[[Any], Any],
        decomposes: Decomposes | None = None,
        dampings: Mapping[str, Any] | None = None,
        stacks: bool = False,
    ) -> dict[str, Any]:
        """Block name to `function(block)`, or to `function(block)(dampings[name])`.

        Args:
            decomposes: The factors of a block that are decomposed for that: of small ones, and on a
                GPU, all of a size at once; of large ones several at the same time.
            stacks: Whether the result for stacked blocks consists of those for each.
        """

        def compute(name: str) -> Any:
            try:
                value = function(self._fetched(name))
                if dampings is not None:
                    value = value(dampings[name])
            except OF_PARTS as error:
                raise about(f'block "{name}"', error) from error
            if self._keeps_elsewhere and isinstance(value, LinearOperator):
                return value.to(self.blocks[name].device)
            return value

        names = list(self.blocks)

        def compute_all() -> dict[str, Any]:
            if decomposes is None:
                return {name: compute(name) for name in names}
            # What is fetched remembers nothing, and threads gain more.
            if not self._keeps_elsewhere and threads_for(names, self._work) == 1:
                factors = [
                    decomposes(block, None if dampings is None else dampings[name])
                    for name, block in self.blocks.items()
                ]
                decompose_in_stacks(factors)
            values = self._of_stacks(function, dampings) if stacks and dampings else {}
            alone = [name for name in names if name not in values]
            values |= zip(alone, side_by_side(compute, alone, self._work), strict=True)
            return {name: values[name] for name in names}

        with full_precision(self.device.type):
            return read_together(compute_all, self.device)

    def _of_stacks(
        self, function: Callable[[Any], Any], dampings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What `_each` returns, for blocks that are stacked."""
        values: dict[str, Any] = {}
        for names, stack in self.stacks().items():
            damping = joined_dampings([dampings[name] for name in names])
            if damping is None:
                continue
            try:
                values |= zip(names, parted(function(stack)(damping)), strict=True)
            except OF_PARTS:
                # Of each by itself: then the error names the block.
                continue
        return values

    def _work(self, name: str) -> float:
        """About how many operations a decomposition of the block takes, for `side_by_side`."""
        block = self.blocks[name]
        if isinstance(block, Scaled):
            block = block.A
        operations = 0.0
        for factor in getattr(block, "factors", (block,)):
            if isinstance(factor, Dense):
                # A graph is of one thread. An eigendecomposition takes about 10 d³ operations.
                if block.device.type != "cpu" or factor.matrix.requires_grad:
                    return 0.0
                operations += 10 * factor.size**3
        return operations

    def _with(self, blocks: dict[str, Any], *others: LinearOperator) -> BlockDiagonal:
        """The same groups of parameters with other blocks of the same sizes, made with other
        matrices.
        """
        block = next(iter(blocks.values()))
        matrix = copy(self)
        matrix.blocks = blocks
        matrix.dtype = block.dtype
        if not self._keeps_elsewhere:
            matrix.device = block.device
        return matrix

    # Dampings
    # ----------------------------------------------------------------------------------------------

    def per_block(self, damping: Any) -> dict[str, Any]:
        """The damping of each block; numbers in place of relative ones, which know of the other
        blocks.
        """
        if isinstance(damping, Mapping):
            if damping.keys() != self.blocks.keys():
                raise ValueError(
                    f"Expected one damping for each of the blocks {list(self.blocks)}, got some "
                    f"for {list(damping)}."
                )
            return self._with_numbers(damping)
        if isinstance(damping, Tensor) and damping.ndim > 0:
            if damping.shape != (len(self.blocks),):
                raise ValueError(
                    f"Expected one number or one per block, [{len(self.blocks)}], "
                    f"got a damping of shape {list(damping.shape)}."
                )
            return dict(zip(self.blocks, damping.unbind(), strict=True))
        return self._with_numbers(dict.fromkeys(self.blocks, damping))

    def _with_numbers(self, dampings: Mapping[str, Any]) -> dict[str, Any]:
        """Dampings of all blocks with relative ones as numbers; blocks of trace 0 take the mean of
        the whole matrix.
        """
        numbers = dict(dampings)
        rules = {name: relative_part(damping) for name, damping in dampings.items()}
        if not any(rules.values()) or self.structure != Structure.PSD:
            return numbers
        # A block of trace 0 takes the mean eigenvalue of the whole matrix.
        traces = torch.stack(self._tensors(attrgetter("trace")))
        dims = [layout.dim for layout in self.layouts.values()]
        sizes = torch.tensor(dims, dtype=traces.dtype, device=traces.device)
        means = torch.where(traces == 0, traces.sum() / self.shape[0], traces / sizes)
        for name, mean in zip(self.layouts, means.unbind(), strict=True):
            rule = rules[name]
            if rule is None:
                continue
            numbers[name] = rule.factor * mean
            if rule is not dampings[name]:  # the number is split between factors
                numbers[name] = replace(dampings[name], damping=numbers[name])
        return numbers


def _bytes(places: Tensor) -> bytes:
    return places.cpu().numpy().tobytes()
