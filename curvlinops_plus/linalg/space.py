"""Named tensors seen as one vector or as one matrix, and the conversions; and what is known of a
matrix.

A `Space` is an ordered list of names and shapes. Its vectors are the tensors of those shapes, each
flattened row by row, one after another. Operators compute with flat matrices `[dim, K]` only; what
a user passes (a flat tensor, a list, a dictionary, a NumPy array, with or without `K` columns) is
converted by `Space.read`, and the result by `Space.write` to the container type that was given.

A `Layout` is a group of parameters, for example the weight and bias of a layer, as ONE matrix. The
pattern of each parameter says how, in the words of einops: `"o i h w -> o (i h w)"` is the weight
of a convolution with one row per output channel, `"o -> o 1"` its bias as one more column. Left is
the parameter as PyTorch stores it, right are the axes `rows cols` of the matrix, or `batch rows
cols` (groups of a convolution: `"(g o) i h w -> g o (i h w)"`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from einops import EinopsError, rearrange
from torch import Tensor

from curvlinops_plus.linalg.numerics import at_least_float32

Tree = Mapping[str, Tensor] | Sequence[Tensor]
Kind = Literal["tensor", "numpy", "list", "tuple", "dict"]


class Structure(IntEnum):
    """What is known about a matrix; each value implies the smaller ones, so that a sum has the
    minimum of its parts.

    Example:
        >>> min(Structure.PSD, Structure.SYMMETRIC).name
        'SYMMETRIC'
    """

    GENERAL = 0
    SYMMETRIC = 1
    PSD = 2  # symmetric, no negative eigenvalue


@dataclass(frozen=True)
class Container:
    """The container type of a vector, and whether there are columns."""

    kind: Kind
    columns: bool


class Space:
    """An ordered list of named shapes whose tensors together make one vector of size `dim`.

    Args:
        shapes: Name to shape, in the order of the vector. `Space.of` and `Space.from_shapes` also
            take sequences, whose members are called "0", "1", and so on.

    Example:
        >>> space = Space.from_shapes({"weight": (2, 3), "bias": (2,)})
        >>> space.dim
        8
        >>> {name: tuple(t.shape) for name, t in space.unflatten(torch.zeros(8, 5)).items()}
        {'weight': (2, 3, 5), 'bias': (2, 5)}
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        #: Name to shape, in the order of the vector.
        self.shapes: dict[str, torch.Size] = {
            name: torch.Size(shape) for name, shape in shapes.items()
        }
        #: The number of entries of each tensor.
        self.sizes: list[int] = [shape.numel() for shape in self.shapes.values()]
        #: Name to first position in the vector, and number of entries.
        self.extents: dict[str, tuple[int, int]] = dict(
            zip(self.shapes, zip([0, *accumulate(self.sizes)], self.sizes))
        )
        #: The number of entries of the whole vector.
        self.dim: int = sum(self.sizes)

    @classmethod
    def flat(cls, dim: int) -> Space:
        """The space of one unnamed vector `[dim]`.

        Example:
            >>> Space.flat(3)
            Space(0: [3])
        """
        return cls({"0": (dim,)})

    @classmethod
    def of(cls, tensors: Tree) -> Space:
        """The space of these tensors.

        Example:
            >>> Space.of([torch.zeros(2, 3), torch.zeros(4)])
            Space(0: [2, 3], 1: [4])
        """
        return cls({name: tensor.shape for name, tensor in _items(tensors)})

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]] | Sequence[Sequence[int]]) -> Space:
        """The space of tensors of these shapes.

        Raises:
            TypeError: If a single shape was given instead of several.

        Example:
            >>> Space.from_shapes([(2, 3), ()]).sizes
            [6, 1]
        """
        items = _items(shapes)
        if any(isinstance(shape, (int, str)) for _, shape in items):
            raise TypeError(
                f"Expected a sequence or mapping of shapes such as [(2, 3), (2,)], got {shapes!r}."
            )
        return cls(dict(items))

    @property
    def names(self) -> list[str]:
        """The names, in the order of the vector."""
        return list(self.shapes)

    @property
    def is_flat(self) -> bool:
        """Whether there is only one tensor, with one axis."""
        return len(self.shapes) == 1 and len(next(iter(self.shapes.values()))) == 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and list(self.shapes.items()) == list(other.shapes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    def __repr__(self) -> str:
        return (
            f"Space({', '.join(f'{name}: {list(shape)}' for name, shape in self.shapes.items())})"
        )

    def compatible(self, other: Space) -> bool:
        """Whether both have equal shapes in the same order; names need not agree.

        Example:
            >>> Space.from_shapes([(2, 3)]).compatible(Space.from_shapes({"weight": (2, 3)}))
            True
        """
        return list(self.shapes.values()) == list(other.shapes.values())

    def matches(self, other: Space) -> bool:
        """Whether a vector of one can be taken for a vector of the other: compatible, or one of
        them is flat.

        Example:
            >>> Space.from_shapes([(2, 3)]).matches(Space.from_shapes([(6,)]))
            True
        """
        return self.compatible(other) or (self.dim == other.dim and (self.is_flat or other.is_flat))

    # Trees of tensors and flat vectors
    # ------------------------------------------------------------------------------

    def flatten(self, tree: Tree) -> Tensor:  # {name: [*shape, *K]} -> [dim, *K]
        """Join a dictionary or list of tensors, any trailing axes `K` kept, into one `[dim, *K]`.

        Raises:
            ValueError: If names, number or shapes of the tensors are not those of the space.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).flatten([torch.ones(2, 2), torch.zeros(1)])
            tensor([1., 1., 1., 1., 0.])
        """
        return self._join(tree, 0)

    def unflatten(self, v: Tensor) -> dict[str, Tensor]:  # [dim, *K] -> {name: [*shape, *K]}
        """Cut `[dim, *K]` into its named tensors, as views.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).unflatten(torch.arange(5))["0"]
            tensor([[0, 1],
                    [2, 3]])
        """
        K = v.shape[1:]
        return {
            name: v.narrow(0, start, size).view((*self.shapes[name], *K))
            for name, (start, size) in self.extents.items()
        }

    def flatten_rows(self, tree: Tree) -> Tensor:  # {name: [*K, *shape]} -> [*K, dim]
        """Join tensors with leading axes `K`, as Jacobians and stacked gradients have them, into
        one `[*K, dim]`.

        Raises:
            ValueError: If names, number, shapes or leading axes of the tensors do not fit.

        Example:
            >>> space = Space.from_shapes([(2, 2), (1,)])
            >>> space.flatten_rows([torch.ones(7, 2, 2), torch.zeros(7, 1)]).shape
            torch.Size([7, 5])
        """
        return self._join(tree, -1)

    def _join(self, tree: Tree, axis: int) -> Tensor:
        """The tensors as parts of one, along its first or last axis."""
        parts, others = [], set()
        for tensor, (name, shape) in zip(self._ordered(tree), self.shapes.items(), strict=True):
            cut = max(tensor.ndim - len(shape), 0) if axis else len(shape)
            K, own = (tensor.shape[:cut], tensor.shape[cut:])[:: 1 if axis else -1]
            others.add(K)
            if own != shape or len(others) > 1:
                raise ValueError(
                    f'Tensor "{name}": expected shape {list(shape)} {"behind" if axis else "before"} axes that are the '
                    f"same in every tensor; got {list(tensor.shape)}."
                )
            parts.append(
                tensor.reshape(*K, shape.numel()) if axis else tensor.reshape(shape.numel(), *K)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    def unflatten_rows(self, v: Tensor) -> dict[str, Tensor]:  # [*K, dim] -> {name: [*K, *shape]}
        """Cut `[*K, dim]` into its named tensors, as views.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).unflatten_rows(torch.zeros(7, 5))["0"].shape
            torch.Size([7, 2, 2])
        """
        return {
            name: v.narrow(-1, start, size).view((*v.shape[:-1], *self.shapes[name]))
            for name, (start, size) in self.extents.items()
        }

    # Containers
    # ----------------------------------------------------------------------------------------------

    def read(self, X: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Container]:
        """Convert whatever a user multiplies with into `[dim, K]`, and say what `write` has to
        convert back to.

        Args:
            X: A tensor or NumPy array `[dim]` or `[dim, K]`; a list, tuple or dictionary of tensors
                `[*shape]` or `[*shape, K]`.
            dtype: What the operator computes in. Tensors that are not wider are converted to it,
                NumPy arrays always.
            device: Where the operator computes.

        Raises:
            TypeError: On a container that is not in the list, a dtype or a device that does not
                fit.
            ValueError: On names, lengths or shapes that do not fit.

        Example:
            >>> space = Space.from_shapes({"a": (2, 2), "b": ()})
            >>> tree = {"a": torch.eye(2), "b": torch.tensor(3.0)}
            >>> X, container = space.read(tree, torch.float32, torch.device("cpu"))
            >>> X.T, container.kind
            (tensor([[1., 0., 0., 1., 3.]]), 'dict')
        """
        kind, tensors = self._tensors(X, dtype, device)
        v = tensors[0] if kind in ("tensor", "numpy") else self.flatten(tensors)
        if v.ndim not in (1, 2) or v.shape[0] != self.dim:
            raise ValueError(
                f"Expected shape [{self.dim}] or [{self.dim}, K], got {list(v.shape)}."
            )
        return (v[:, None], Container(kind, False)) if v.ndim == 1 else (v, Container(kind, True))

    def read_rows(self, J: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Kind]:
        """Convert one vector, or the rows of Jacobians, into `[dim]` or `[..., m, dim]`; also the
        container type.

        Args:
            J: A tensor or NumPy array `[dim]` or `[..., m, dim]`; a list, tuple or dictionary of
                tensors `[*shape]` or `[..., m, *shape]`.
            dtype, device: As for `read`.

        Raises:
            TypeError: As `read`.
            ValueError: As `read`.

        Example:
            >>> space = Space.from_shapes([(2, 2), (1,)])
            >>> tree = [torch.ones(7, 3, 2, 2), torch.zeros(7, 3, 1)]
            >>> J, kind = space.read_rows(tree, torch.float32, torch.device("cpu"))
            >>> J.shape, kind
            (torch.Size([7, 3, 5]), 'list')
        """
        kind, tensors = self._tensors(J, dtype, device)
        rows = tensors[0] if kind in ("tensor", "numpy") else self.flatten_rows(tensors)
        if rows.ndim == 0 or rows.shape[-1] != self.dim:
            raise ValueError(
                f"Expected J of shape [{self.dim}] or [..., m, {self.dim}], got {list(rows.shape)}."
            )
        return rows, kind

    def write(self, Y: Tensor, container: Container) -> Any:
        """Convert a result `[dim, K]` to the container type that was given.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).write(torch.ones(5, 1), Container("list", False))
            [tensor([[1., 1.],
                    [1., 1.]]), tensor([1.])]
        """
        v = Y if container.columns else Y[:, 0]
        if container.kind == "tensor":
            return v
        if container.kind == "numpy":
            return to_numpy(v)
        tree = self.unflatten(v)
        return (
            tree
            if container.kind == "dict"
            else (list if container.kind == "list" else tuple)(tree.values())
        )

    def _tensors(
        self, X: Any, dtype: torch.dtype, device: torch.device
    ) -> tuple[Kind, list[Tensor]]:
        """What the container is, and its one tensor, or its tensors in the order of the space, as
        computed with.
        """
        if isinstance(X, Tensor):
            return "tensor", [_convert(X, dtype, device, "the vector")]
        if isinstance(X, np.ndarray):
            if X.dtype.kind not in "fiub":
                raise TypeError(f"Expected a NumPy array of real numbers, got dtype {X.dtype}.")
            # A copy, always: NumPy arrays may be read-only, or change while autograd still needs
            # them.
            return "numpy", [torch.tensor(np.ascontiguousarray(X), dtype=dtype, device=device)]
        if not isinstance(X, (Mapping, list, tuple)):
            raise TypeError(
                f"Expected a tensor or NumPy array [{self.dim}] or [{self.dim}, K], or a list or "
                f"dictionary of {len(self.shapes)} tensors; got {type(X).__name__}."
            )
        tensors = []
        for tensor, (name, shape) in zip(self._ordered(X), self.shapes.items(), strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f'Entry "{name}": expected a tensor of shape {list(shape)}, got {type(tensor).__name__}.'
                    + (
                        " Gradients in `.grad` are there after loss.backward()."
                        if tensor is None
                        else ""
                    )
                )
            tensors.append(_convert(tensor, dtype, device, f'tensor "{name}"'))
        return "dict" if isinstance(X, Mapping) else "tuple" if isinstance(
            X, tuple
        ) else "list", tensors

    def _ordered(self, tree: Tree) -> list[Tensor]:
        if isinstance(tree, Mapping):
            if tree.keys() != self.shapes.keys():
                missing = [name for name in self.shapes if name not in tree]
                unexpected = [name for name in tree if name not in self.shapes]
                raise ValueError(
                    f"Expected tensors named {self.names}; missing {missing}, unexpected "
                    f"{unexpected}."
                )
            return [tree[name] for name in self.shapes]
        if len(tree) != len(self.shapes):
            shapes = [list(shape) for shape in self.shapes.values()]
            raise ValueError(f"Expected {len(shapes)} tensors of shapes {shapes}, got {len(tree)}.")
        return list(tree)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor as an array; half precision as float32, for NumPy has no bfloat16."""
    return at_least_float32(tensor.detach().cpu()).numpy()


def _items(sequence_or_mapping: Any) -> list[tuple[str, Any]]:
    if isinstance(sequence_or_mapping, Mapping):
        return list(sequence_or_mapping.items())
    return [(str(position), value) for position, value in enumerate(sequence_or_mapping)]


def _convert(tensor: Tensor, dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    if tensor.device != device:
        raise TypeError(
            f"Expected {what} on {device}, where the operator is, got {tensor.device}; "
            f"move one of them: X.to('{device}') or operator.to(device='{tensor.device}')."
        )
    if tensor.dtype == dtype:
        return tensor
    if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits > torch.finfo(dtype).bits:
        # Of a wider vector digits would be lost unseen.
        raise TypeError(
            f"Expected {what} in {dtype}, the dtype of the operator, got {tensor.dtype}; convert "
            f"it, X.to({dtype}), or have the operator in a wider dtype: of model and data in it, "
            "or by its own .to(dtype=...)."
        )
    return tensor.to(dtype)


class Layout:
    """How a group of parameters makes one matrix `[rows, cols]` or `[batch, rows, cols]`, and its
    row-major vector.

    Columns of several parameters stand side by side, in the order of the patterns.

    Args:
        patterns: Parameter name to pattern.
        shapes: Parameter name to shape.
        sizes: Sizes of axes that the shapes leave open, for example `{"g": 4}`.

    Raises:
        ValueError: If a pattern cannot be read, does not fit its shape, or the rows of the
            parameters differ.

    Example:
        >>> layout = Layout({"weight": "o i -> o i", "bias": "o -> o 1"}, {"weight": (2, 3), "bias": (2,)})
        >>> layout.matrix_shape
        (2, 4)
        >>> v = layout.join({"weight": torch.zeros(2, 3, 1), "bias": torch.ones(2, 1)})
        >>> v.T
        tensor([[0., 0., 0., 1., 0., 0., 0., 1.]])
        >>> {name: tuple(t.shape) for name, t in layout.split(v).items()}
        {'weight': (2, 3, 1), 'bias': (2, 1)}
    """

    def __init__(
        self,
        patterns: Mapping[str, str],
        shapes: Mapping[str, Sequence[int]],
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        if not patterns or patterns.keys() != shapes.keys():
            raise ValueError(
                "Expected one pattern and one shape per parameter, got patterns of "
                f"{list(patterns)} and shapes of {list(shapes)}."
            )
        self.patterns = dict(patterns)
        self.shapes = {name: torch.Size(shapes[name]) for name in patterns}
        self.sizes = dict(sizes or {})
        self._parts = [
            _Part(name, patterns[name], shape, self.sizes) for name, shape in self.shapes.items()
        ]
        if len({part.matrix[:-1] for part in self._parts}) > 1:
            raise ValueError(
                f"Expected parameters of one layout to have the same rows, got matrices "
                f"{[part.matrix for part in self._parts]} from patterns {self.patterns}."
            )
        self._widths = [part.matrix[-1] for part in self._parts]
        self._is_vector = len(self._parts) == 1 and not self._parts[0].permutes
        #: `(rows, cols)` or `(batch, rows, cols)`.
        self.matrix_shape: tuple[int, ...] = (*self._parts[0].matrix[:-1], sum(self._widths))
        #: The number of entries of the matrix.
        self.dim: int = prod(self.matrix_shape)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of their columns."""
        return list(self.patterns)

    def __repr__(self) -> str:
        return f"Layout({self.patterns} -> {list(self.matrix_shape)})"

    def gather(
        self, parts: Sequence[Tensor]
    ) -> Tensor:  # each [K, *shape] or [K, size] -> [K, dim]
        """The row-major vectors of the matrix, from the parameters in their order.

        A view if there is one parameter whose axes keep their order.
        """
        if self._is_vector:
            return parts[0].reshape(len(parts[0]), self.dim)
        matrices = [part.matrices(t) for part, t in zip(self._parts, parts, strict=True)]
        return torch.cat(matrices, dim=-1).reshape(
            len(parts[0]), self.dim
        )  # channels-last parts make one that is

    def scatter(self, rows: Tensor) -> list[Tensor]:  # [K, dim] -> each [K, size]
        """The parameters of row-major vectors, in their order: undoes `gather`."""
        if self._is_vector:
            return [rows]
        M = rows.reshape(len(rows), *self.matrix_shape).split_with_sizes(self._widths, -1)
        return [
            part.parameters(columns).reshape(len(rows), part.shape.numel())
            for part, columns in zip(self._parts, M, strict=True)
        ]

    def join(self, tree: Mapping[str, Tensor]) -> Tensor:  # {name: [*shape, K]} -> [dim, K]
        """As `gather`, with the axis of columns last; `tree` may hold other parameters too."""
        return self.gather([tree[name].movedim(-1, 0) for name in self.patterns]).T

    def split(self, v: Tensor) -> dict[str, Tensor]:  # [dim, K] -> {name: [*shape, K]}
        """The parameters of row-major vectors, with the axis of columns last: undoes `join`."""
        found = zip(self.shapes.items(), self.scatter(v.T), strict=True)
        return {name: t.reshape(len(t), *shape).movedim(0, -1) for (name, shape), t in found}

    def views(self, v: Tensor) -> dict[str, Tensor]:  # [dim] -> {name: [*shape]}
        """The parameters of a row-major vector as views; axes that the matrix takes apart stay
        apart.

        Example:
            >>> layout = Layout({"w": "(g o) i -> g o i"}, {"w": (6, 2)}, {"g": 3})
            >>> layout.views(torch.zeros(12))["w"].shape
            torch.Size([3, 2, 2])
        """
        columns = v.view(1, *self.matrix_shape).split_with_sizes(self._widths, -1)
        return {
            name: part.view(t)[0]
            for name, part, t in zip(self.patterns, self._parts, columns, strict=True)
        }


class _Part:
    """One parameter and its columns of the matrix."""

    def __init__(
        self, name: str, pattern: str, shape: torch.Size, sizes: Mapping[str, int]
    ) -> None:
        left, _, right = (side.strip() for side in pattern.partition("->"))
        axes = re.findall(r"\([^()]*\)|\S+", left)
        known = {**sizes, **{axis: size for axis, size in zip(axes, shape) if axis.isidentifier()}}
        self.shape, self.sizes = (
            shape,
            {axis: n for axis, n in known.items() if axis in re.findall(r"\w+", pattern)},
        )
        apart = re.sub(r"[()]", "", left)
        #: Whether the axes change their order.
        self.permutes = apart.split() != [axis for axis in re.findall(r"\w+", right) if axis != "1"]
        self._forth, self._back = f"k0 {left} -> k0 {right}", f"k0 {right} -> k0 {left}"
        self._apart = f"k0 {right} -> k0 {apart}"
        try:
            empty = self.matrices(torch.empty(1, *shape, device="meta"))
            self.parameters(empty)
        except (EinopsError, ValueError) as error:
            raise ValueError(
                f'Pattern "{pattern}" of parameter "{name}" with shape {list(shape)}: {error}'
            ) from error
        self.matrix = tuple(empty.shape[1:])
        if len(self.matrix) not in (2, 3):
            raise ValueError(
                f'Pattern "{pattern}": expected "rows cols" or "batch rows cols" on the right.'
            )

    def matrices(self, t: Tensor) -> Tensor:  # [K, *shape] or [K, size] -> [K, *matrix]
        return rearrange(t.reshape(len(t), *self.shape), self._forth, **self.sizes)

    def parameters(self, M: Tensor) -> Tensor:  # [K, *matrix] -> [K, *shape]
        return rearrange(M, self._back, **self.sizes)

    def view(self, M: Tensor) -> Any:  # [K, *matrix] -> [K, *shape], axes apart
        return rearrange(M, self._apart, **self.sizes)
