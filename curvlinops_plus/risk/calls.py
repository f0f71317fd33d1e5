"""A recorded call of a module or a function: what it read, and where gradients arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.example_lists import with_entries
from curvlinops_plus.layer.kept import CallStart
from curvlinops_plus.risk.packed import PackedRows
from curvlinops_plus.risk.routes import RoutedRows

if TYPE_CHECKING:
    from curvlinops_plus.risk.batches import Batch
    from curvlinops_plus.risk.layers import ModuleUse


@dataclass(eq=False)
class RecordedCall:
    """A recorded call of a module, or of a function with parameters.

    Attributes:
        use: The module or function.
        rule: Its rule; of a function that reads some rows of a weight, that of these.
        args: Positional inputs, detached; per-example tensors carry the examples (times positions)
            on axis 0.
        kwargs: Keyword inputs, likewise.
        in_axes: Where the module itself has the examples, for each tensor among its inputs; None
            for one that all examples share. None for affine layers.
        layer: Index of its layer.
        expanded: Whether it returned one row for all examples, which was expanded.
        outputs: The floating-point tensors that it returned.
        versions: Its inputs and their versions, to notice changes in place.
        single: Whether it returned just one tensor.
        first_edge: Number of its first output among those of all calls.
        grads: Output gradients [V, N * positions, *out], None before they are known; a list of them
            for a module that returns several tensors.
        routed: To which examples the rows belong that were gathered from them, [M, *in] and
            [V, M, *out] then; None where each example has as many, one after the other.
        matrices: Of a stack of matrices: the number of the one that all rows meet, or that of each
            row [M].
        start: What its module held when it began; None where that does not matter.
        restarts: Whether the module, run again, begins with that, rather than what it holds now.
    """

    use: ModuleUse
    rule: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    in_axes: Sequence[int | None] | None
    layer: int
    expanded: bool
    outputs: Sequence[Output]
    versions: Sequence[tuple[Tensor, int]] = ()
    single: bool = True
    first_edge: int = 0
    grads: Any = None
    routed: RoutedRows | None = None
    matrices: int | Tensor | None = None
    start: CallStart | None = None
    restarts: bool = False

    def note_versions(self, tensors: Sequence[Tensor]) -> None:
        """Remember the inputs as they are now."""
        self.versions = [(t, t._version) for t in tensors if not t.is_inference()]

    @property
    def out_axes(self) -> list[int]:
        """Where the module itself has the examples, for each of its outputs."""
        return [output.axis for output in self.outputs]

    @property
    def gradients(self) -> Sequence[Tensor]:
        """Gradients of all outputs, also if it is just one."""
        return [self.grads] if self.single else self.grads

    @gradients.setter
    def gradients(self, gradients: Sequence[Tensor]) -> None:
        self.grads = gradients[0] if self.single else gradients

    def of_examples(self, N: int, examples: range, vectors: slice) -> RecordedCall:
        """The call for some of its N examples, which are neighbours, and some of the vectors."""

        def rows_of(t: Tensor, axis: int = 0) -> Tensor:
            positions = t.shape[axis] // N
            return t.narrow(axis, examples.start * positions, len(examples) * positions)

        if self.routed is not None:
            part = self.of_rows(self.routed.rows_of(examples), vectors)
            part.routed = self.routed.of_examples(examples)
            return part
        part = copy(self)
        if self.grads is not None:
            part.gradients = [rows_of(g[vectors], 1) for g in self.gradients]
        if self.in_axes is None:
            part.args = (rows_of(self.args[0]),)
            return part
        num_rows = self.gradients[0].shape[1]
        leaves, structure = tree_flatten((self.args, self.kwargs))
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for k, axis in zip(tensors, self.in_axes, strict=True):
            if axis is not None and len(leaves[k]) == num_rows:
                leaves[k] = rows_of(leaves[k])
        part.args, part.kwargs = tree_unflatten(leaves, structure)
        if all(axis is None for axis in self.in_axes):
            part.args = tuple(with_entries(arg, N, examples) for arg in part.args)
            part.kwargs = {name: with_entries(x, N, examples) for name, x in part.kwargs.items()}
            leaves = tree_leaves((part.args, part.kwargs))
            part.in_axes = [None for leaf in leaves if isinstance(leaf, Tensor)]
        return part

    def of_rows(self, rows: Tensor | slice, vectors: slice = slice(None)) -> RecordedCall:
        """The call for some of its gathered rows, in their order, and some of the vectors."""
        assert self.routed is not None
        part = copy(self)
        part.routed = self.routed.subset(rows)
        if isinstance(self.matrices, Tensor):
            part.matrices = self.matrices[rows]
        if self.grads is not None:
            part.gradients = [g[vectors][:, rows] for g in self.gradients]
        if self.in_axes is None:
            part.args = (self.args[0][rows],)
            return part
        leaves, structure = tree_flatten((self.args, self.kwargs))
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for k, axis in zip(tensors, self.in_axes, strict=True):
            if axis is not None:
                leaves[k] = leaves[k][rows]
        part.args, part.kwargs = tree_unflatten(leaves, structure)
        return part


@dataclass(eq=False)
class Output:
    """A tensor that a call returned, which is not kept: what it was like, and where its gradient
    arrives.

    Attributes:
        axis: The axis that carries the examples.
        fold: Number of examples if that axis carries positions and, inside them, examples.
        edge: Where autograd delivers the gradient.
        routed: To which examples its rows belong, if they were gathered.
        is_squeezed: Whether it is that of a single example, and had no axis for it.
        packed: Which they are of packed sequences; on another axis than the first it carries states
            of these.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    axis: int
    fold: int | None
    edge: Any
    routed: RoutedRows | None = None
    is_squeezed: bool = False
    packed: PackedRows | None = None

    @property
    def rows(self) -> int:
        """The examples, or a multiple of them."""
        if self.packed is not None:
            return self.packed.num_sequences
        return self.fold or self.shape[self.axis]

    def gradient(self, g: Tensor | None, V: int) -> Tensor:
        """What has arrived, as [V, *out] with the examples first; zeros if nothing has.

        Args:
            g: The gradient for one vector or, with one more axis, for several.
        """
        if g is None:
            g = torch.zeros(V, *self.shape, dtype=self.dtype, device=self.device)
        elif self.is_squeezed:
            g = g.reshape(-1, *self.shape)
        elif g.ndim == len(self.shape):
            g = g.unsqueeze(0)
        if self.routed is not None:
            return self.routed.sorted(g, 1)
        if self.packed is not None and not self.axis:
            return self.packed.padded(g, 1)
        if self.packed is not None:
            g = self.packed.unsorted(g, self.axis + 1)
        if self.fold is not None:
            g = g.unflatten(1, (-1, self.fold))
        return g.movedim(self.axis + 1, 1) if self.axis else g


class OutsideReads(UnsupportedError):
    """What a layer's calls show is not all that the model does with a parameter;
    `look_for_functions` finds the rest.

    Args:
        message: What to say if that does not help.
        keys: Keys of parameters whose gradients only a module around their layer can tell apart by
            examples.

    Attributes:
        batch: In which that was noticed, in a sweep.
    """

    batch: Batch | None = None

    def __init__(self, message: str, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


def title(name: str) -> str:
    """How messages call a module of that name in the model."""
    return f"layer {name!r}" if name else "layer '' (the model itself)"
