"""Named tensors seen as one vector, and the conversions; and what is known of a matrix.

A `Space` is an ordered list of names and shapes. Its vectors are the tensors of those shapes, each
flattened row by row, one after another. Operators compute with flat matrices `[dim, K]` only; what
a user passes (a flat tensor, a list, a dictionary, a NumPy array, with or without `K` columns) is
converted by `Space.read`, and the result by `Space.write` to the container type that was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.options import instance

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
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        #: The number of entries of each tensor.
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        #: The number of entries of the whole vector.
        self.dim = 0
        #: Name to first position in the vector, and number of entries.
        self.extents: dict[str, tuple[int, int]] = {}
        for name, size in zip(self.shapes, self.sizes):
            self.extents[name] = (self.dim, size)
            self.dim += size

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
        return cls({name: tensor.shape for name, tensor in _by_name(tensors).items()})

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]] | Sequence[Sequence[int]]) -> Space:
        """The space of tensors of these shapes.

        Raises:
            TypeError: If a single shape was given instead of several.

        Example:
            >>> Space.from_shapes([(2, 3), ()]).sizes
            [6, 1]
        """
        named = _by_name(instance("shapes", shapes, Iterable, "a list of shapes"))
        if not all(isinstance(shape, (tuple, list)) for shape in named.values()):
            raise TypeError(
                f"Expected a sequence or mapping of shapes such as [(2, 3), (2,)], got {shapes!r}."
            )
        return cls(named)

    @property
    def names(self) -> list[str]:
        """The names, in the order of the vector."""
        return list(self.shapes)

    @property
    def is_flat(self) -> bool:
        """Whether there is only one tensor, with one axis."""
        return [len(shape) for shape in self.shapes.values()] == [1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and list(self.shapes.items()) == list(other.shapes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    def __repr__(self) -> str:
        shapes = [f"{name}: {list(shape)}" for name, shape in self.shapes.items()]
        return f"Space({', '.join(shapes)})"

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
    # ----------------------------------------------------------------------------------------------

    def flatten(self, tree: Tree) -> Tensor:  # {name: [*shape, *K]} -> [dim, *K]
        """Join a dictionary or list of tensors, any trailing axes `K` kept, into one `[dim, *K]`.

        Raises:
            ValueError: If names, number or shapes of the tensors are not those of the space.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).flatten([torch.ones(2, 2), torch.zeros(1)])
            tensor([1., 1., 1., 1., 0.])
        """
        tensors = self._ordered(tree)
        parts = []
        columns = None
        for tensor, (name, shape) in zip(tensors, self.shapes.items()):
            if columns is None:
                columns = tensor.shape[len(shape) :]
            if tensor.shape != shape + columns:
                raise self._other_shape(name, tensor, "before")
            parts.append(tensor.reshape(shape.numel(), *columns))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 0)

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
        tensors = self._ordered(tree)
        parts = []
        rows = None
        for tensor, (name, shape) in zip(tensors, self.shapes.items()):
            if rows is None:
                rows = tensor.shape[: tensor.ndim - len(shape)]
            if tensor.shape != rows + shape:
                raise self._other_shape(name, tensor, "behind")
            parts.append(tensor.reshape(*rows, shape.numel()))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def unflatten_rows(self, v: Tensor) -> dict[str, Tensor]:  # [*K, dim] -> {name: [*K, *shape]}
        """Cut `[*K, dim]` into its named tensors, as views.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).unflatten_rows(torch.zeros(7, 5))["0"].shape
            torch.Size([7, 2, 2])
        """
        K = v.shape[:-1]
        return {
            name: v.narrow(-1, start, size).view((*K, *self.shapes[name]))
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
        kind, v = self._read(X, dtype, device, self.flatten)
        if v.ndim not in (1, 2) or v.shape[0] != self.dim:
            raise ValueError(
                f"Expected shape [{self.dim}] or [{self.dim}, K], got {list(v.shape)}."
            )
        if v.ndim == 1:
            return v[:, None], Container(kind, columns=False)
        return v, Container(kind, columns=True)

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
        kind, rows = self._read(J, dtype, device, self.flatten_rows)
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
        if container.kind == "dict":
            return tree
        if container.kind == "list":
            return list(tree.values())
        return tuple(tree.values())

    def _read(
        self,
        X: Any,
        dtype: torch.dtype,
        device: torch.device,
        flatten: Callable[[Tree], Tensor],
    ) -> tuple[Kind, Tensor]:
        """The kind of the container, and its entries as they are computed with."""
        if isinstance(X, Tensor):
            return "tensor", _convert(X, dtype, device, "the vector")
        if isinstance(X, np.ndarray):
            if X.dtype.kind not in "fiub":
                raise TypeError(f"Expected a NumPy array of real numbers, got dtype {X.dtype}.")
            # A copy, always: NumPy arrays may be read-only, or change while autograd still needs
            # them.
            return "numpy", torch.tensor(np.ascontiguousarray(X), dtype=dtype, device=device)
        if not isinstance(X, (Mapping, list, tuple)):
            raise TypeError(
                f"Expected a tensor or NumPy array [{self.dim}] or [{self.dim}, K], or a list or "
                f"dictionary of {len(self.shapes)} tensors; got {type(X).__name__}."
            )
        tensors = []
        for tensor, (name, shape) in zip(self._ordered(X), self.shapes.items()):
            if not isinstance(tensor, Tensor):
                advice = " Gradients in `.grad` are there after loss.backward()."
                raise TypeError(
                    f'Entry "{name}": expected a tensor of shape {list(shape)}, got '
                    f"{type(tensor).__name__}.{advice if tensor is None else ''}"
                )
            tensors.append(_convert(tensor, dtype, device, f'tensor "{name}"'))
        v = flatten(tensors)
        if isinstance(X, Mapping):
            return "dict", v
        if isinstance(X, tuple):
            return "tuple", v
        return "list", v

    def _ordered(self, tree: Tree) -> list[Tensor]:
        """The tensors of a tree, in the order of the vector."""
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

    def _other_shape(self, name: str, tensor: Tensor, place: str) -> ValueError:
        return ValueError(
            f'Tensor "{name}": expected shape {list(self.shapes[name])} {place} axes that are the '
            f"same in every tensor; got {list(tensor.shape)}."
        )


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor as an array; half precision as float32, for NumPy has no bfloat16."""
    return at_least_float32(tensor.detach().cpu()).numpy()


def _by_name(items: Any) -> dict[str, Any]:
    """A mapping as it is; members of a sequence under the names "0", "1", and so on."""
    if isinstance(items, Mapping):
        return dict(items)
    return {str(position): item for position, item in enumerate(items)}


def _convert(tensor: Tensor, dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    if tensor.device != device:
        raise TypeError(
            f"Expected {what} on {device}, where the operator is, got {tensor.device}; "
            f"move one of them: X.to('{device}') or operator.to(device='{tensor.device}')."
        )
    if tensor.dtype == dtype:
        return tensor
    # A vector of a wider dtype would lose digits, and nobody would notice.
    if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits > torch.finfo(dtype).bits:
        raise TypeError(
            f"Expected {what} in {dtype}, the dtype of the operator, got {tensor.dtype}; convert "
            f"it, X.to({dtype}), or have the operator in a wider dtype: of model and data in it, "
            "or by its own .to(dtype=...)."
        )
    return tensor.to(dtype)
