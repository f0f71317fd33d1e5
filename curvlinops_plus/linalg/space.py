"""Named tensors seen as one vector, and the conversion between the two.

A `Space` is an ordered list of names and shapes. Its vectors are the tensors of those shapes, each flattened row by
row, one after another. Operators compute with flat matrices `[dim, K]` only; what a user passes (a flat tensor, a list,
a dictionary, a NumPy array, with or without `K` columns) is converted by `Space.read`, and the result by `Space.write`
to the container type that was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.linalg.numerics import at_least_float32

Tree = Mapping[str, Tensor] | Sequence[Tensor]
Kind = Literal["tensor", "numpy", "list", "tuple", "dict"]


@dataclass(frozen=True)
class Container:
    """The container type of a vector, and where its columns are (`None`: a single vector)."""

    kind: Kind
    columns: Literal["last", "first"] | None
    #: Of tensors that processes have parts of, mesh and placements, by their positions in the tree.
    spread: Mapping[int, tuple[Any, Any]] = field(default_factory=dict)


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
            TypeError: If it is neither a sequence nor a mapping.
            ValueError: If a single shape was given instead of several.

        Example:
            >>> Space.from_shapes([(2, 3), ()]).sizes
            [6, 1]
        """
        if not isinstance(shapes, (Mapping, Sequence)) or isinstance(shapes, str):
            raise TypeError(f"Expected a sequence or mapping of shapes such as [(2, 3), (2,)], got {shapes!r}.")
        items = _items(shapes)
        if any(isinstance(shape, int) for _, shape in items):
            raise ValueError(
                f"Expected a sequence of shapes, got {shapes!r}; write [{tuple(s for _, s in items)}] for one shape."
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
        parts = []
        for tensor, (name, shape) in zip(self._ordered(tree), self.shapes.items(), strict=True):
            if tensor.shape[: len(shape)] != shape:
                raise ValueError(
                    f'Tensor "{name}": expected shape {list(shape)} (and columns), got {list(tensor.shape)}.'
                )
            parts.append(tensor.reshape(shape.numel(), *tensor.shape[len(shape) :]))
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

    def part(self, v: Tensor, name: str) -> Tensor:  # [dim, *K] -> [*shape, *K]
        """One tensor of `[dim, *K]`, as a view.

        Example:
            >>> Space.from_shapes({"a": (2, 2), "b": (1,)}).part(torch.arange(5), "b")
            tensor([4])
        """
        start, size = self.extents[name]
        return v.narrow(0, start, size).view((*self.shapes[name], *v.shape[1:]))

    def flatten_rows(self, tree: Tree) -> Tensor:  # {name: [*K, *shape]} -> [*K, dim]
        """Join tensors with leading axes `K`, as Jacobians and stacked gradients have them, into one `[*K, dim]`.

        Raises:
            ValueError: If names, number, shapes or leading axes of the tensors do not fit.

        Example:
            >>> space = Space.from_shapes([(2, 2), (1,)])
            >>> space.flatten_rows([torch.ones(7, 2, 2), torch.zeros(7, 1)]).shape
            torch.Size([7, 5])
        """
        parts = []
        for tensor, (name, shape) in zip(self._ordered(tree), self.shapes.items(), strict=True):
            lead = tensor.ndim - len(shape)
            if lead < 0 or tensor.shape[lead:] != shape:
                raise ValueError(f'Tensor "{name}": expected shape [..., {_inner(shape)}], got {list(tensor.shape)}.')
            parts.append(tensor.reshape(*tensor.shape[:lead], shape.numel()))
        if any(part.shape[:-1] != parts[0].shape[:-1] for part in parts):
            lead = {name: list(part.shape[:-1]) for name, part in zip(self.shapes, parts, strict=True)}
            raise ValueError(f"Expected the same leading axes in every tensor, got {lead}.")
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

    def read(
        self, X: Any, dtype: torch.dtype, device: torch.device, *, columns_first: bool = False
    ) -> tuple[Tensor, Container]:
        """Convert whatever a user multiplies with into `[dim, K]`, and say what `write` has to convert back to.

        Args:
            X: A tensor or NumPy array `[dim]` or `[dim, K]`; a list, tuple or dictionary of tensors `[*shape]` or
                `[*shape, K]`.
            dtype: What the operator computes in. Tensors that are not wider are converted to it, NumPy arrays always.
            device: Where the operator computes.
            columns_first: The `K` axis comes first (`[K, dim]`, `[K, *shape]`), as in products from the left.

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
        if kind not in ("tensor", "numpy"):
            rows, container = self._join(tensors, kind, columns_first)
            spread = {k: like for k, t in enumerate(self._ordered(X)) if (like := _spread_like(t))}
            return rows, replace(container, spread=spread) if spread else container
        given, (X,) = X, tensors
        if X.ndim not in (1, 2) or X.shape[-1 if columns_first else 0] != self.dim:
            matrix = f"[K, {self.dim}]" if columns_first else f"[{self.dim}, K]"
            raise ValueError(f"Expected shape [{self.dim}] or {matrix}, got {list(X.shape)}.")
        spread = {0: like} if (like := _spread_like(given)) else {}
        if X.ndim == 1:
            return X[:, None], Container(kind, None, spread)
        return (X.T, Container(kind, "first", spread)) if columns_first else (X, Container(kind, "last", spread))

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
            >>> Space.from_shapes([(2, 2), (1,)]).write(torch.ones(5, 1), Container("list", None))
            [tensor([[1., 1.],
                    [1., 1.]]), tensor([1.])]
        """
        kind, columns = container.kind, container.columns
        v = Y[:, 0] if columns is None else Y.T if columns == "first" else Y
        if kind == "tensor":
            return _spread(v, *container.spread[0], False) if container.spread else v
        if kind == "numpy":
            return to_numpy(v)
        tree = self.unflatten_rows(v) if columns == "first" else self.unflatten(v)
        for place, like in container.spread.items():
            tree[self.names[place]] = _spread(tree[self.names[place]], *like, columns == "first")
        return tree if kind == "dict" else tuple(tree.values()) if kind == "tuple" else list(tree.values())

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

    def _join(self, parts: list[Tensor], kind: Kind, columns_first: bool) -> tuple[Tensor, Container]:
        columns = {
            _columns(part.shape, name, shape, columns_first)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }
        if len(columns) > 1:
            given = {name: list(part.shape) for name, part in zip(self.shapes, parts, strict=True)}
            raise ValueError(f"Expected the same number of columns in every tensor, got shapes {given}.")
        if columns == {None}:
            return self.flatten(parts)[:, None], Container(kind, None)
        if columns_first:
            return self.flatten_rows(parts).T, Container(kind, "first")
        return self.flatten(parts), Container(kind, "last")

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


def _columns(given: torch.Size, name: str, shape: torch.Size, columns_first: bool) -> int | None:
    """How many columns a tensor for `shape` has; None if it is a single vector."""
    if given == shape:
        return None
    own, K = (given[1:], given[:1]) if columns_first else (given[:-1], given[-1:])
    if len(given) != len(shape) + 1 or own != shape:
        matrix = f"[{_inner(torch.Size(()), 'K', shape)}]" if columns_first else f"[{_inner(shape, 'K')}]"
        raise ValueError(f'Tensor "{name}": expected shape {list(shape)} or {matrix}, got {list(given)}.')
    return K[0]


def _inner(shape: Sequence[int], *more: Any) -> str:
    """`[2, 3]` and "K" -> "2, 3, K"; a shape among `more` is spelled out too."""
    tail = [str(n) for part in more for n in (part if isinstance(part, torch.Size) else [part])]
    return ", ".join([*map(str, shape), *tail])


def _spread_like(tensor: Any) -> tuple[Any, Any] | None:
    """Mesh and placements of a DTensor, of which each process has a part; None for another tensor."""
    return (tensor.device_mesh, tensor.placements) if hasattr(tensor, "full_tensor") else None


def _spread(tensor: Tensor, mesh: Any, placements: Sequence[Any], columns_first: bool) -> Any:
    """A DTensor whose whole is here, without communication."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [
        Shard(place.dim + 1) if columns_first and type(place) is Shard else place if place.is_shard() else Replicate()
        for place in placements
    ]
    whole = DTensor.from_local(tensor.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, placements)


def _convert(tensor: Any, dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    if _spread_like(tensor):
        tensor = tensor.full_tensor()
    if tensor.device != device:
        raise TypeError(
            f"Expected {what} on {device}, where the operator is, got {tensor.device}; "
            f"move one of them: X.to('{device}') or operator.to(device='{tensor.device}')."
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        nested = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"Expected {what} to be a dense tensor, got a {nested} one; convert it: X.to_dense().")
    if tensor.dtype == dtype:
        return tensor
    if tensor.is_complex():
        raise TypeError(
            f"Expected {what} to be real, as the operator is, got {tensor.dtype}; multiply X.real and X.imag apart."
        )
    other = ""
    if tensor.is_floating_point():
        if torch.finfo(tensor.dtype).bits <= torch.finfo(dtype).bits:
            return tensor.to(dtype)  # a wider vector is refused: its digits would be lost unseen
        other = f", or have the operator in {tensor.dtype} (of model and data in it, or by its own .to(dtype=...))"
    raise TypeError(
        f"Expected {what} in {dtype}, the dtype of the operator, got {tensor.dtype}; convert it: X.to({dtype}){other}."
    )
