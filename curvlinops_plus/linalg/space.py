"""Named tensors seen as one vector: the one place that knows every form in which a user may hand over a vector.

A `Space` is an ordered list of names and shapes. Its vectors are the tensors of those shapes, each flattened row by
row, one after another. Operators compute with flat matrices `[dim, K]` only; the forms a user likes (a flat tensor, a
list, a dictionary, a NumPy array, with or without `K` columns) are translated on the way in by `Space.read` and on the
way out by `Space.write`, so that the answer has the form of the question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["Form", "Space"]

Tree = Mapping[str, Tensor] | Sequence[Tensor]
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Form:
    """How a vector was handed over: its container, and where its columns are (`None`: a single vector)."""

    kind: Literal["tensor", "numpy", "list", "tuple", "dict"]
    columns: Literal["last", "first"] | None


@dataclass(frozen=True, eq=False)
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

    shapes: dict[str, torch.Size]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", {name: torch.Size(shape) for name, shape in self.shapes.items()})

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
            ValueError: If a single shape was given instead of several.

        Example:
            >>> Space.from_shapes([(2, 3), ()]).sizes
            [6, 1]
        """
        items = _items(shapes)
        if any(isinstance(shape, int) for _, shape in items):
            raise ValueError(
                f"Expected a sequence of shapes, got {shapes!r}; write [{tuple(s for _, s in items)}] for one shape."
            )
        return cls({name: torch.Size(shape) for name, shape in items})

    @property
    def names(self) -> list[str]:
        """The names, in the order of the vector."""
        return list(self.shapes)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of entries of each tensor."""
        return [shape.numel() for shape in self.shapes.values()]

    @cached_property
    def dim(self) -> int:
        """The number of entries of the whole vector."""
        return sum(self.sizes)

    @cached_property
    def _extents(self) -> dict[str, tuple[int, int]]:
        """Where each tensor starts in the vector, and its size."""
        starts = [0, *accumulate(self.sizes)]
        return {name: (start, size) for name, start, size in zip(self.shapes, starts, self.sizes, strict=False)}

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
        return {name: self.part(v, name) for name in self.shapes}

    def part(self, v: Tensor, name: str) -> Tensor:  # [dim, *K] -> [*shape, *K]
        """One tensor of `[dim, *K]`, as a view.

        Example:
            >>> Space.from_shapes({"a": (2, 2), "b": (1,)}).part(torch.arange(5), "b")
            tensor([4])
        """
        start, size = self._extents[name]
        return v.narrow(0, start, size).view((*self.shapes[name], *v.shape[1:]))

    def flatten_rows(self, tree: Tree) -> Tensor:  # {name: [*K, *shape]} -> [*K, dim]
        """Join tensors with leading axes `K`, as Jacobians and stacked gradients have them, into one `[*K, dim]`.

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
        """Cut `[*K, dim]` into its named tensors, as views where strides allow.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).unflatten_rows(torch.zeros(7, 5))["0"].shape
            torch.Size([7, 2, 2])
        """
        return {
            name: v.narrow(-1, start, size).view((*v.shape[:-1], *self.shapes[name]))
            for name, (start, size) in self._extents.items()
        }

    # Forms ----------------------------------------------------------------------------------------------------------

    def read(
        self, X: Any, dtype: torch.dtype, device: torch.device, *, columns_first: bool = False
    ) -> tuple[Tensor, Form]:
        """Translate whatever a user multiplies with into `[dim, K]`, and remember its form for `write`.

        Args:
            X: A tensor or NumPy array `[dim]` or `[dim, K]`; a list, tuple or dictionary of tensors `[*shape]` or
                `[*shape, K]`.
            dtype: What the operator computes in. Half-precision tensors and NumPy arrays are converted to it.
            device: Where the operator computes.
            columns_first: The `K` axis comes first (`[K, dim]`, `[K, *shape]`), as in products from the left.

        Raises:
            TypeError: On a container that is not in the list, a dtype or a device that does not fit.
            ValueError: On names, lengths or shapes that do not fit.

        Example:
            >>> space = Space.from_shapes({"a": (2, 2), "b": ()})
            >>> X, form = space.read({"a": torch.eye(2), "b": torch.tensor(3.)}, torch.float32, torch.device("cpu"))
            >>> X.T, form.kind
            (tensor([[1., 0., 0., 1., 3.]]), 'dict')
        """
        where = "first" if columns_first else "last"
        if isinstance(X, np.ndarray):
            if X.dtype.kind not in "fiub":
                raise TypeError(f"Expected a NumPy array of real numbers, got dtype {X.dtype}.")
            # A copy, always: NumPy arrays may be read-only, or change while autograd still needs them.
            return self._read_array(torch.tensor(np.ascontiguousarray(X), dtype=dtype, device=device), "numpy", where)
        if isinstance(X, Tensor):
            return self._read_array(_convert(X, dtype, device, "the vector"), "tensor", where)
        if isinstance(X, (Mapping, list, tuple)):
            return self._read_tree(X, dtype, device, where)
        raise TypeError(
            f"Expected a tensor or NumPy array [{self.dim}] or [{self.dim}, K], or a list or dictionary of "
            f"{len(self.shapes)} tensors; got {type(X).__name__}."
        )

    def write(self, Y: Tensor, form: Form) -> Any:  # [dim, K] -> form of the question
        """Give a result `[dim, K]` of this space the form that the question had.

        Example:
            >>> Space.from_shapes([(2, 2), (1,)]).write(torch.ones(5, 1), Form("list", None))
            [tensor([[1., 1.],
                    [1., 1.]]), tensor([1.])]
        """
        v = Y[:, 0] if form.columns is None else Y.T if form.columns == "first" else Y
        if form.kind == "tensor":
            return v
        if form.kind == "numpy":
            v = v.detach().cpu()
            return (v.float() if v.dtype in _HALF else v).numpy()
        tree = self.unflatten_rows(v) if form.columns == "first" else self.unflatten(v)
        return tree if form.kind == "dict" else tuple(tree.values()) if form.kind == "tuple" else list(tree.values())

    def _read_array(
        self, X: Tensor, kind: Literal["tensor", "numpy"], where: Literal["last", "first"]
    ) -> tuple[Tensor, Form]:
        axis = 0 if where == "last" else X.ndim - 1
        if X.ndim not in (1, 2) or X.shape[axis] != self.dim:
            matrix = f"[{self.dim}, K]" if where == "last" else f"[K, {self.dim}]"
            raise ValueError(f"Expected shape [{self.dim}] or {matrix}, got {list(X.shape)}.")
        if X.ndim == 1:
            return X[:, None], Form(kind, None)
        return (X if where == "last" else X.T), Form(kind, where)

    def _read_tree(
        self, tree: Any, dtype: torch.dtype, device: torch.device, where: Literal["last", "first"]
    ) -> tuple[Tensor, Form]:
        parts, extra = [], set()
        for tensor, (name, shape) in zip(self._ordered(tree), self.shapes.items(), strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f'Entry "{name}": expected a tensor of shape {list(shape)}, got {type(tensor).__name__}.'
                )
            parts.append(_convert(tensor, dtype, device, f'tensor "{name}"'))
            if tensor.shape == shape:
                extra.add(None)
                continue
            own, K = (tensor.shape[:-1], tensor.shape[-1:]) if where == "last" else (tensor.shape[1:], tensor.shape[:1])
            if tensor.ndim != len(shape) + 1 or own != shape:
                matrix = f"[{_inner(shape, 'K')}]" if where == "last" else f"[{_inner(torch.Size(()), 'K', shape)}]"
                raise ValueError(
                    f'Tensor "{name}": expected shape {list(shape)} or {matrix}, got {list(tensor.shape)}.'
                )
            extra.add(K[0])
        if len(extra) > 1:
            given = {name: list(part.shape) for name, part in zip(self.shapes, parts, strict=True)}
            raise ValueError(f"Expected the same number of columns in every tensor, got shapes {given}.")
        kind: Literal["dict", "tuple", "list"]
        kind = "dict" if isinstance(tree, Mapping) else "tuple" if isinstance(tree, tuple) else "list"
        if extra == {None}:
            return self.flatten(parts)[:, None], Form(kind, None)
        if where == "last":
            return self.flatten(parts), Form(kind, where)
        return self.flatten_rows(parts).T, Form(kind, where)

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


def _items(sequence_or_mapping: Any) -> list[tuple[str, Any]]:
    if isinstance(sequence_or_mapping, Mapping):
        return list(sequence_or_mapping.items())
    return [(str(position), value) for position, value in enumerate(sequence_or_mapping)]


def _inner(shape: Sequence[int], *more: Any) -> str:
    """`[2, 3]` and "K" -> "2, 3, K"; a shape among `more` is spelled out too."""
    tail = [str(n) for part in more for n in (part if isinstance(part, torch.Size) else [part])]
    return ", ".join([*map(str, shape), *tail])


def _convert(tensor: Tensor, dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    if tensor.device != device:
        raise TypeError(
            f"Expected {what} on {device}, where the operator is, got {tensor.device}; "
            f"move one of them: X.to('{device}') or operator.to(device='{tensor.device}')."
        )
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype in _HALF:
        return tensor.to(dtype)
    other = ""
    if tensor.is_floating_point():
        other = f", or have the operator in {tensor.dtype} (operator.to, or a model and data in that dtype)"
    raise TypeError(
        f"Expected {what} in {dtype}, the dtype of the operator, got {tensor.dtype}; convert it: X.to({dtype}){other}."
    )
