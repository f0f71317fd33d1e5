"""Named tensors seen as one vector, and the conversion between the two; and what is known of a matrix.

A `Space` is an ordered list of names and shapes. Its vectors are the tensors of those shapes, each flattened row by
row, one after another. Operators compute with flat matrices `[dim, K]` only; what a user passes (a flat tensor, a list,
a dictionary, a NumPy array, with or without `K` columns) is converted by `Space.read`, and the result by `Space.write`
to the container type that was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import at_least_float32

Tree = Mapping[str, Tensor] | Sequence[Tensor]
Kind = Literal["tensor", "numpy", "list", "tuple", "dict"]


class Structure(IntEnum):
    """What is known about a matrix; each value implies the smaller ones, so that a sum has the minimum of its parts.

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
        shapes: Name to shape, in the order of the vector. `Space.of` and `Space.from_shapes` also take sequences,
            whose members are called "0", "1", and so on.

    Example:
        >>> space = Space.from_shapes({"weight": (2, 3), "bias": (2,)})
        >>> space.dim
        8
        >>> {name: tuple(t.shape) for name, t in space.unflatten(torch.zeros(8, 5)).items()}
        {'weight': (2, 3, 5), 'bias': (2, 5)}
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        #: Name to shape, in the order of the vector.
        self.shapes: dict[str, torch.Size] = {name: torch.Size(shape) for name, shape in shapes.items()}
        #: The number of entries of each tensor.
        self.sizes: list[int] = [shape.numel() for shape in self.shapes.values()]
        #: Name to first position in the vector, and number of entries.
        self.extents: dict[str, tuple[int, int]] = dict(zip(self.shapes, zip([0, *accumulate(self.sizes)], self.sizes)))
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
            raise TypeError(f"Expected a sequence or mapping of shapes such as [(2, 3), (2,)], got {shapes!r}.")
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
        return f"Space({', '.join(f'{name}: {list(shape)}' for name, shape in self.shapes.items())})"

    def compatible(self, other: Space) -> bool:
        """Whether both have equal shapes in the same order; names need not agree.

        Example:
            >>> Space.from_shapes([(2, 3)]).compatible(Space.from_shapes({"weight": (2, 3)}))
            True
        """
        return list(self.shapes.values()) == list(other.shapes.values())

    def matches(self, other: Space) -> bool:
        """Whether a vector of one can be taken for a vector of the other: compatible, or one of them is flat.

        Example:
            >>> Space.from_shapes([(2, 3)]).matches(Space.from_shapes([(6,)]))
            True
        """
        return self.compatible(other) or (self.dim == other.dim and (self.is_flat or other.is_flat))

    # Trees of tensors and flat vectors ------------------------------------------------------------------------------

    def flatten(self, tree: Tree) -> Tensor:  # {name: [*shape, *K]} -> [dim, *K]
        """Join a dictionary or list of tensors, any trailing axes `K` kept, into one `[dim, *K]`.

        Raises:
            ValueError: If names, number or shapes of the tensors are not those of the space.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).flatten([torch.ones(2, 2), torch.zeros(1)])
            tensor([1., 1., 1., 1., 0.])
        """
        parts, columns = [], set()
        for tensor, (name, shape) in zip(self._ordered(tree), self.shapes.items(), strict=True):
            K = tensor.shape[len(shape) :]
            columns.add(K)
            if tensor.shape[: len(shape)] != shape or len(columns) > 1:
                raise ValueError(
                    f'Tensor "{name}": expected shape {list(shape)}, or [{", ".join(map(str, shape))}, K], '
                    f"equally many in every tensor; got {list(tensor.shape)}."
                )
            parts.append(tensor.reshape(shape.numel(), *K))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
        """Join tensors with leading axes `K`, as Jacobians and stacked gradients have them, into one `[*K, dim]`.

        Raises:
            ValueError: If names, number, shapes or leading axes of the tensors do not fit.

        Example:
            >>> space = Space.from_shapes([(2, 2), (1,)])
            >>> space.flatten_rows([torch.ones(7, 2, 2), torch.zeros(7, 1)]).shape
            torch.Size([7, 5])
        """
        parts, leading = [], set()
        for tensor, (name, shape) in zip(self._ordered(tree), self.shapes.items(), strict=True):
            K = tensor.shape[: max(tensor.ndim - len(shape), 0)]
            leading.add(K)
            if tensor.shape[len(K) :] != shape or len(leading) > 1:
                raise ValueError(
                    f'Tensor "{name}": expected shape [..., {", ".join(map(str, shape))}], with the same leading axes '
                    f"in every tensor; got {list(tensor.shape)}."
                )
            parts.append(tensor.reshape(*K, shape.numel()))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

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

    # Containers -----------------------------------------------------------------------------------------------------

    def read(self, X: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Container]:
        """Convert whatever a user multiplies with into `[dim, K]`, and say what `write` has to convert back to.

        Args:
            X: A tensor or NumPy array `[dim]` or `[dim, K]`; a list, tuple or dictionary of tensors `[*shape]` or
                `[*shape, K]`.
            dtype: What the operator computes in. Tensors that are not wider are converted to it, NumPy arrays always.
            device: Where the operator computes.

        Raises:
            TypeError: On a container that is not in the list, a dtype or a device that does not fit.
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
            raise ValueError(f"Expected shape [{self.dim}] or [{self.dim}, K], got {list(v.shape)}.")
        return (v[:, None], Container(kind, False)) if v.ndim == 1 else (v, Container(kind, True))

    def read_rows(self, J: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Kind]:
        """Convert one vector, or the rows of Jacobians, into `[dim]` or `[..., m, dim]`; also the container type.

        Args:
            J: A tensor or NumPy array `[dim]` or `[..., m, dim]`; a list, tuple or dictionary of tensors `[*shape]` or
                `[..., m, *shape]`.
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
            raise ValueError(f"Expected J of shape [{self.dim}] or [..., m, {self.dim}], got {list(rows.shape)}.")
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
        return tree if container.kind == "dict" else (list if container.kind == "list" else tuple)(tree.values())

    def _tensors(self, X: Any, dtype: torch.dtype, device: torch.device) -> tuple[Kind, list[Tensor]]:
        """What the container is, and its one tensor, or its tensors in the order of the space, as computed with."""
        if isinstance(X, Tensor):
            return "tensor", [_convert(X, dtype, device, "the vector")]
        if isinstance(X, np.ndarray):
            if X.dtype.kind not in "fiub":
                raise TypeError(f"Expected a NumPy array of real numbers, got dtype {X.dtype}.")
            # A copy, always: NumPy arrays may be read-only, or change while autograd still needs them.
            return "numpy", [torch.tensor(np.ascontiguousarray(X), dtype=dtype, device=device)]
        if not isinstance(X, (Mapping, list, tuple)):
            raise TypeError(
                f"Expected a tensor or NumPy array [{self.dim}] or [{self.dim}, K], or a list or dictionary of "
                f"{len(self.shapes)} tensors; got {type(X).__name__}."
            )
        tensors = []
        for tensor, (name, shape) in zip(self._ordered(X), self.shapes.items(), strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f'Entry "{name}": expected a tensor of shape {list(shape)}, got {type(tensor).__name__}.'
                    + (" Gradients in `.grad` are there after loss.backward()." if tensor is None else "")
                )
            tensors.append(_convert(tensor, dtype, device, f'tensor "{name}"'))
        return "dict" if isinstance(X, Mapping) else "tuple" if isinstance(X, tuple) else "list", tensors

    def _ordered(self, tree: Tree) -> list[Tensor]:
        if isinstance(tree, Mapping):
            if tree.keys() != self.shapes.keys():
                missing = [name for name in self.shapes if name not in tree]
                unexpected = [name for name in tree if name not in self.shapes]
                raise ValueError(f"Expected tensors named {self.names}; missing {missing}, unexpected {unexpected}.")
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
            f"Expected {what} in {dtype}, the dtype of the operator, got {tensor.dtype}; convert it, X.to({dtype}), or "
            "have the operator in a wider dtype: of model and data in it, or by its own .to(dtype=...)."
        )
    return tensor.to(dtype)
