"""Block-diagonal matrices with one block per group of parameters, all here or each kept by one of
several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.damping import Damping, Scalar, relative_part
from curvlinops_plus.linalg.dense import Dense, Diagonal
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.linalg.numerics import frobenius, side_by_side
from curvlinops_plus.linalg.operator import (
    OF_PARTS,
    LinearOperator,
    Scaled,
    about,
    outside_autocast,
)
from curvlinops_plus.linalg.packing import FORMAT, pack, unpack
from curvlinops_plus.linalg.space import Space, Structure

T = TypeVar("T")


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
        >>> blocks = {"fc": Kronecker(torch.eye(2), 2 * torch.eye(4)), "scale": Diagonal(torch.ones(4))}
        >>> K = BlockDiagonal(blocks, layouts, space)
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
        first = next(iter(blocks.values()))
        super().__init__(space, first.dtype, first.device, out_space=space)
        #: The parameters of the layouts, in the order of the vector.
        self.space = space
        #: Name to operator, and to how the parameters of the block make its vector.
        self.blocks, self.layouts = dict(blocks), {name: layouts[name] for name in blocks}
        listed = [item for layout in self.layouts.values() for item in layout.shapes.items()]
        if sorted(listed) != sorted(space.shapes.items()):
            raise ValueError(
                f"Expected each of the parameters {space} in one layout, got {listed}."
            )
        for name, block in self.blocks.items():
            dim, known = self.layouts[name].dim, (self.dtype, self.device)
            if block.shape != (dim, dim) or (block.dtype, block.device) != known:
                raise ValueError(
                    f'block "{name}": expected a {dim} x {dim} matrix for {self.layouts[name]}, in {self.dtype} on '
                    f"{self.device} as the first block, got {block.label}."
                )
        if device not in (None, self.device):
            self.device, self._keeps_elsewhere = device, True
        order = {key: place for place, key in enumerate(space.shapes)}
        #: Where the parameters of each block are among the tensors of the space.
        self._places = {
            name: [order[key] for key in layout.shapes] for name, layout in self.layouts.items()
        }

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        return min(block.structure for block in self.blocks.values())

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
        given = X.T.contiguous().split_with_sizes(self.space.sizes, 1)
        results: list[Any] = [None] * len(given)
        for name in self.blocks:
            layout, places = self.layouts[name], self._places[name]
            try:
                y = getattr(self._fetched(name), product)(
                    layout.gather([given[place] for place in places]).T
                )
            except OF_PARTS as error:
                raise about(f'block "{name}"', error) from error
            for place, part in zip(places, layout.scatter(y.T)):
                results[place] = part
        # Blocks of other processes are zero here.
        return torch.cat(
            [torch.zeros_like(x) if y is None else y for x, y in zip(given, results)], 1
        ).T

    def split(self, v: Any) -> dict[str, Tensor]:
        """A vector's parts, block by block: what each block is multiplied with.

        Args:
            v: What the operator may be multiplied with: a flat tensor, a list or dictionary of
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
            >>> K = BlockDiagonal({"b": Diagonal(torch.ones(1)), "a": Diagonal(torch.ones(2))}, layouts, space)
            >>> K.split(torch.tensor([1.0, 2.0, 3.0]))
            {'b': tensor([3.]), 'a': tensor([1., 2.])}
        """
        X, container = self.in_space.read(v, self.dtype, self.device)
        return {
            name: part if container.columns else part[:, 0] for name, part in self._split(X).items()
        }

    def _split(self, X: Tensor) -> dict[str, Tensor]:  # [n, K] -> {name: [dim, K]}
        tree = self.space.unflatten(X)
        return {name: layout.join(tree) for name, layout in self.layouts.items()}

    def positions(self) -> dict[str, Tensor]:
        """Block name to `[dim]`: where in the vector the entries are that the block multiplies, in
        its order.
        """
        return {
            n: at[:, 0]
            for n, at in self._split(
                torch.arange(self.shape[0], device=self.device)[:, None]
            ).items()
        }

    def merge(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector `[n]`, or `[n, K]`, of which `parts` are the blocks' parts: undoes `split`."""
        tree: dict[str, Tensor] = {}
        for name, layout in self.layouts.items():
            part = parts[name]
            split = layout.split(part if part.ndim == 2 else part[:, None])
            tree |= {key: t if part.ndim == 2 else t[..., 0] for key, t in split.items()}
        return self.space.flatten(tree)

    def adjoint(self) -> LinearOperator:
        return (
            self
            if self.structure >= Structure.SYMMETRIC
            else self._with(self._each(methodcaller("adjoint")))
        )

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> BlockDiagonal:
        other = self._with({name: block.to(device, dtype) for name, block in self.blocks.items()})
        other.dtype, other.device = dtype or self.dtype, device or self.device
        other._keeps_elsewhere = self._keeps_elsewhere and device is None
        return other

    def offload(self, where: str | torch.device = "cpu") -> BlockDiagonal:
        """The same matrix with blocks that are kept on another device, and fetched one by one when
        they are used.

        Inverses, powers and multiples are kept there, too. Decompositions are not remembered: take
        `K.inverse` once.
        """
        device, other = self.device, self.to(torch.device(where))
        other.device, other._keeps_elsewhere = device, other.device != device
        return other

    def _fetched(self, name: str) -> LinearOperator:
        """A block on the device of vectors."""
        return self.blocks[name].to(self.device) if self._keeps_elsewhere else self.blocks[name]

    def _to_dense(self) -> Tensor:
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for name, at in self.positions().items():
            dense[at[:, None], at] = self._fetched(name).to_dense()
        return dense

    # States
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All blocks and what they are of, in tensors and plain Python, as `save` and `torch.save`
        take it.

        Raises:
            ValueError: If a block is known by its products alone.
        """
        return {
            "format": FORMAT,
            "class": "BlockDiagonal",
            "space": {name: list(shape) for name, shape in self.space.shapes.items()},
            "layouts": {
                name: {"patterns": x.patterns, "sizes": x.sizes} for name, x in self.layouts.items()
            },
            "blocks": self._each(pack),
        }

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, Any], device: torch.device | str = "cpu"
    ) -> BlockDiagonal:
        """The operator that a state describes.

        Args:
            state_dict: What `state_dict()` returned.
            device: Where its tensors shall be.

        Raises:
            ValueError: If it is no such state.

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
        space = Space(state_dict["space"])
        blocks = {name: unpack(x, torch.device(device)) for name, x in state_dict["blocks"].items()}
        layouts = {
            name: Layout(
                x["patterns"], {key: space.shapes[key] for key in x["patterns"]}, x["sizes"]
            )
            for name, x in state_dict["layouts"].items()
        }
        return BlockDiagonal(blocks, layouts, space)

    # Closed forms
    # ----------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Tensor:
        return torch.stack(list(self._tensors(attrgetter("trace")).values())).sum()

    @property
    def frobenius_norm(self) -> Tensor:
        return frobenius(torch.stack(list(self._tensors(attrgetter("frobenius_norm")).values())))

    def eigenvalues(self) -> Tensor:
        return torch.cat(list(self._tensors(methodcaller("eigenvalues"), decomposes=True).values()))

    def diagonal(self) -> Tensor:
        """The diagonal, `[n]`, in the order of the parameters."""
        return self.merge(self._tensors(methodcaller("diagonal")))

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        found = self._tensors(lambda block: torch.stack(block._slogdet()), decomposes=True)
        signs, logarithms = torch.stack(list(found.values())).unbind(1)
        return signs.prod(), logarithms.sum()

    def inverse(
        self, damping: Damping = 0.0, *, retry_double_precision: bool = True
    ) -> BlockDiagonal:
        """`(K + damping I)⁻¹`, block by block; see `LinearOperator.inverse`."""
        again = {"retry_double_precision": retry_double_precision}
        return self._with(
            self._each(lambda block: partial(block.inverse, **again), True, self.per_block(damping))
        )

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> BlockDiagonal:
        """`(K + damping I)ᵖ`, block by block; see `LinearOperator.power`."""
        return self._with(
            self._each(
                lambda block: partial(block.power, p, exact=exact), True, self.per_block(damping)
            )
        )

    def shift(self, delta: Damping) -> BlockDiagonal:
        """`K + delta I`, block by block."""
        return self._with(self._each(attrgetter("shift"), dampings=self.per_block(delta)))

    def _scale(self, c: Scalar) -> BlockDiagonal:
        return self._with(self._each(methodcaller("_scale", c)))

    def _plus(self, other: LinearOperator) -> BlockDiagonal | None:
        """Block by block, if the groups of parameters are the same, whatever they are called; also
        with a diagonal.
        """
        at = self.positions()
        if isinstance(other, Diagonal):
            parts = {name: Diagonal(other.vector.flatten()[at[name]]) for name in self.blocks}
        elif isinstance(other, BlockDiagonal) and type(other) is type(self):
            theirs = {
                where.cpu().numpy().tobytes(): other.blocks.get(name)
                for name, where in other.positions().items()
            }
            parts = {name: theirs.get(at[name].cpu().numpy().tobytes()) for name in self.blocks}
        else:
            return None
        if None in parts.values():
            return None
        return self._with({name: block + parts[name] for name, block in self.blocks.items()}, other)

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
        self, function: Callable[[LinearOperator], Tensor], decomposes: bool = False
    ) -> dict[str, Tensor]:
        """Block name to `function(block)`, whoever has the block."""
        return self._each(function, decomposes)

    def _each(
        self,
        function: Callable[[Any], Any],
        decomposes: bool = False,
        dampings: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Block name to `function(block)`, or to `function(block)(dampings[name])`.

        If that decomposes the blocks, several are done at the same time.
        """

        def of(name: str) -> Any:
            try:
                found = function(self._fetched(name))
                found = found if dampings is None else found(dampings[name])
            except OF_PARTS as error:
                raise about(f'block "{name}"', error) from error
            if self._keeps_elsewhere and isinstance(found, LinearOperator):
                return found.to(self.blocks[name].device)
            return found

        with outside_autocast(self.device):
            if decomposes:
                return dict(zip(self.blocks, side_by_side(of, list(self.blocks), self._work)))
            return {name: of(name) for name in self.blocks}

    def _work(self, name: str) -> float:
        """About how many operations a decomposition of the block takes, for `side_by_side`."""
        block = self.blocks[name]
        block = block.A if isinstance(block, Scaled) else block
        dense = [M for M in getattr(block, "factors", (block,)) if isinstance(M, Dense)]
        alone = block.device.type != "cpu" or any(
            M.matrix.requires_grad for M in dense
        )  # a graph is of one thread
        return 0.0 if alone else float(sum(10 * M.size**3 for M in dense))

    def _with(self, blocks: dict[str, LinearOperator], *others: LinearOperator) -> BlockDiagonal:
        """The same groups of parameters with other blocks of the same sizes, made with other
        matrices.
        """
        first = next(iter(blocks.values()))
        other = copy(self)
        other.blocks, other.dtype = blocks, first.dtype
        other.device = self.device if self._keeps_elsewhere else first.device
        return other

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
        relative = {
            name: rule for name, d in dampings.items() if (rule := relative_part(d)) is not None
        }
        if not relative or self.structure != Structure.PSD:
            return dict(dampings)
        traces = torch.stack(list(self._tensors(attrgetter("trace")).values()))
        sizes = traces.new_tensor([layout.dim for layout in self.layouts.values()])
        means = torch.where(traces == 0, traces.sum() / self.shape[0], traces / sizes)
        mean_of = dict(zip(self.layouts, means.unbind(), strict=True))
        numbers = dict(dampings)
        for name, rule in relative.items():
            number = rule.factor * mean_of[name]
            split = dampings[name]
            numbers[name] = number if split is rule else replace(split, damping=number)
        return numbers


class Group(Protocol):
    """What the matrix needs of the processes, see `Processes`."""

    def together(self, work: Callable[[], T]) -> T: ...
    def gather(self, part: T) -> list[T]: ...
    def sum_(self, tensors: list[Tensor]) -> None: ...
    def same(self, facts: Mapping[str, Any]) -> None: ...


class OwnedBlockDiagonal(BlockDiagonal):
    """A `BlockDiagonal` matrix of which each process has some blocks, with the same interface and
    equal results.

    Products, traces, norms, eigenvalues and draws are computed by all processes together, each with
    its own blocks: all have to ask for them, with the same vectors. So are `inverse` and `power`,
    which send no blocks. Multiples, shifts and sums are made without the others.

    Args:
        blocks: Name to square operator: those of this process.
        layouts: Of all blocks, as for `BlockDiagonal`.
        space: As for `BlockDiagonal`.
        processes: The processes, `Processes()`.
        dtype, device: Of the blocks.
        structure: What all blocks are.

    Raises:
        ProcessError: By what is computed together, in all processes: if it fails in one of them, or
            they multiply different vectors.
        UnsupportedError: If derivatives are asked for, which would have to go through other
            processes.

    Cost: of a product the sum of a vector over the processes.

    Example: on a single process, which has all blocks.
        >>> from curvlinops_plus.distributed import Alone
        >>> from curvlinops_plus.linalg import Diagonal
        >>> layouts = {"w": Layout({"w": "d -> 1 d"}, {"w": (2,)})}
        >>> blocks, cpu = {"w": Diagonal(torch.ones(2))}, torch.device("cpu")
        >>> OwnedBlockDiagonal(blocks, layouts, Space({"w": (2,)}), Alone(), torch.float32, cpu).trace
        tensor(2.)
    """

    structure: Structure = Structure.PSD  # type: ignore[assignment] (the same in all processes)

    def __init__(
        self,
        blocks: Mapping[str, LinearOperator],
        layouts: Mapping[str, Layout],
        space: Space,
        processes: Group,
        dtype: torch.dtype,
        device: torch.device,
        structure: Structure = Structure.PSD,
    ) -> None:
        LinearOperator.__init__(self, space, dtype, device, structure)
        self.space, self.blocks, self.layouts, self.processes = (
            space,
            dict(blocks),
            dict(layouts),
            processes,
        )
        self._places = {
            name: [space.names.index(key) for key in x.shapes] for name, x in layouts.items()
        }

    def _with(self, blocks: dict[str, LinearOperator], *others: LinearOperator) -> BlockDiagonal:
        other = copy(self)
        other.blocks, other.structure = (
            blocks,
            min([self.structure, *(B.structure for B in others)]),
        )
        return other

    # Together
    # ----------------------------------------------------------------------------------------------

    def _blockwise(self, product: str, X: Tensor) -> Tensor:
        def work() -> Tensor:
            if product != "_root_matmat":  # draws of any numbers will do
                self.processes.same(
                    {
                        "the vectors that they multiply": [
                            float(X.detach().sum()),
                            float(X.detach().norm()),
                        ]
                    }
                )
            Y = super(OwnedBlockDiagonal, self)._blockwise(product, X).contiguous()
            if Y.requires_grad:
                raise UnsupportedError(
                    f"{self.label} has no derivatives, since they would have to go through other "
                    "processes. Use torch.no_grad() or detach(), or the operator that gather() "
                    "returns."
                )
            self.processes.sum_([Y])
            return Y

        return self.processes.together(work)

    def _tensors(
        self, function: Callable[[LinearOperator], Tensor], decomposes: bool = False
    ) -> dict[str, Tensor]:
        def work() -> dict[str, Tensor]:
            own = {name: t.detach().cpu() for name, t in self._each(function, decomposes).items()}
            told = {name: t for part in self.processes.gather(own) for name, t in part.items()}
            return {name: told[name].to(self.device) for name in self.layouts}

        return self.processes.together(work)

    def gather(self) -> BlockDiagonal:
        """All blocks in all processes, as a `BlockDiagonal`. Collective.

        Raises:
            ValueError: If a block is known by its products alone.
        """
        told = self.processes.together(
            lambda: self.processes.gather(self._each(lambda block: pack(block.to("cpu"))))
        )
        packed = {name: state for part in told for name, state in part.items()}
        blocks = {name: unpack(packed[name], self.device) for name in self.layouts}
        return BlockDiagonal(blocks, self.layouts, self.space)

    def state_dict(self) -> dict[str, Any]:
        """That of `gather()`. Collective."""
        return self.gather().state_dict()

    def _to_dense(self) -> Tensor:
        return LinearOperator._to_dense(self)

    def inverse(
        self, damping: Damping = 0.0, *, retry_double_precision: bool = True
    ) -> BlockDiagonal:
        """`(K + damping I)⁻¹`, block by block; see `LinearOperator.inverse`. Collective; sends no
        blocks.
        """
        options = {"retry_double_precision": retry_double_precision}
        return self.processes.together(
            lambda: super(OwnedBlockDiagonal, self).inverse(damping, **options)
        )

    def power(self, p: float, damping: Damping = 0.0, *, exact: bool = True) -> BlockDiagonal:
        """`(K + damping I)ᵖ`, block by block; see `LinearOperator.power`. Collective; sends no
        blocks.
        """
        return self.processes.together(
            lambda: super(OwnedBlockDiagonal, self).power(p, damping, exact=exact)
        )

    # By each by itself
    # ----------------------------------------------------------------------------------------------

    def shift(self, delta: Damping) -> BlockDiagonal:
        """`K + delta I`, block by block. Collective if `delta` is relative to the blocks."""
        numbers = delta.values() if isinstance(delta, Mapping) else [delta]
        return self._signed(
            super().shift(delta),
            [float(torch.as_tensor(x).min()) for x in numbers if not callable(x)],
        )

    def _scale(self, c: Scalar) -> BlockDiagonal:
        return self._signed(super()._scale(c), [float(c)])

    def _signed(self, made: BlockDiagonal, numbers: list[float]) -> BlockDiagonal:
        if min(numbers, default=0.0) < 0:
            made.structure = min(made.structure, Structure.SYMMETRIC)  # type: ignore[misc] (an attribute here)
        return made

    def per_block(self, damping: Any) -> dict[str, Any]:
        if isinstance(damping, Tensor) and damping.ndim > 0:
            damping = dict(zip(self.layouts, damping.unbind(), strict=True))
        if not isinstance(damping, Mapping):
            damping = dict.fromkeys(self.layouts, damping)
        numbers = self._with_numbers(damping)
        return {name: numbers[name] for name in self.blocks}
