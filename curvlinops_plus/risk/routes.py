"""Rows of which examples don't have as many, one after the other: to which example each belongs.

In a mixture of experts a layer sees some rows of the examples, in an order of their own:
`x[index]`, `x[mask]`, `x.index_select(0, index)`. The same function of the rows' places tells where
its result comes from, and functions that keep rows hand the places on. Only functions that are
known here do; behind others nothing is known of rows, and layers are treated as everywhere else.

Of nodes of several graphs, and of other rows that are ragged from the beginning, the user says the
example (`example_of_rows=`). They are told by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.recurrent_functions import RECURRENT
from curvlinops_plus.risk.packed import PACK, UNPACK, PackedOrders


class Origins(NamedTuple):
    """Where the rows of a tensor come from.

    Attributes:
        index: Origins among the rows of all examples, which follow one another, `[M]`.
        total: The number of these rows.
    """

    index: Tensor
    total: int

    @classmethod
    def of_ragged(cls, examples: Tensor, num_examples: int) -> Origins:
        """Of rows of these examples, each at the next position of its example, as if examples had
        as many positions as the longest.

        Example:
            >>> Origins.of_ragged(torch.tensor([0, 1, 1, 0, 1]), 2)
            Origins(index=tensor([0, 3, 4, 1, 5]), total=6)
        """
        counts = torch.bincount(examples, minlength=num_examples)
        order = examples.argsort(stable=True)
        first_rows = counts.cumsum(0) - counts
        places = torch.arange(len(examples), device=examples.device)
        positions = torch.empty_like(examples)
        positions[order] = places - first_rows[examples[order]]
        length = int(counts.max())
        return cls(examples * length + positions, num_examples * length)


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """To which examples the rows of a call belong, sorted by examples.

    Attributes:
        order: The row of the call that is at each place, `[M]`.
        examples: Its example, `[M]`.
        positions: Its position in the example that it was gathered from, `[M]`.
        num_positions: How many positions examples have there.
        num_examples: N.
        axes: On how many axes of the call's tensors the rows are.

    Example: rows 2, 0 and 1 of two examples with two positions each.
        >>> rows = RoutedRows.of(Origins(torch.tensor([2, 0, 1]), 4), 2)
        >>> rows.order, rows.examples, rows.counts
        (tensor([1, 2, 0]), tensor([0, 0, 1]), [2, 1])
        >>> rows.padded(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3., 0.])
        >>> rows.kept()
        tensor([[ True,  True],
                [ True, False]])
    """

    order: Tensor
    examples: Tensor
    positions: Tensor
    num_positions: int
    num_examples: int
    axes: int = 1

    @classmethod
    def of(cls, places: Origins, num_examples: int) -> RoutedRows:
        """The rows at these places."""
        num_positions = places.total // num_examples
        examples = places.index // num_positions
        order = examples.argsort(stable=True)
        examples = examples[order]
        positions = (places.index % num_positions)[order]
        return cls(order, examples, positions, num_positions, num_examples)

    @cached_property
    def counts(self) -> list[int]:
        """How many rows each example has."""
        return torch.bincount(self.examples, minlength=self.num_examples).tolist()

    @property
    def length(self) -> int:
        """S, the largest number of rows of an example, 1 at least."""
        return max(1, *self.counts)

    def of_examples(self, chosen: range) -> RoutedRows:
        """Those of some examples, which are neighbours."""
        rows = self.rows_of(chosen)
        examples = self.examples[rows] - chosen.start
        return replace(
            self,
            order=self.order[rows],
            examples=examples,
            positions=self.positions[rows],
            num_examples=len(chosen),
        )

    def rows_of(self, chosen: range) -> slice:
        """Where the rows of some examples are."""
        ends = [0, *accumulate(self.counts)]
        return slice(ends[chosen.start], ends[chosen.stop])

    def sorted(self, t: Tensor, axis: int = 0) -> Tensor:
        """What the call has of its rows, sorted."""
        return t.flatten(axis, axis + self.axes - 1).index_select(axis, self.order)

    def subset(self, rows: Tensor | slice) -> RoutedRows:
        """Some of the rows, of as many examples."""
        return replace(
            self,
            order=self.order[rows],
            examples=self.examples[rows],
            positions=self.positions[rows],
        )

    def of_one_example(self) -> RoutedRows:
        """All of them as rows of one example."""
        return replace(self, examples=torch.zeros_like(self.examples), num_examples=1)

    def padded(self, t: Tensor, axis: int = 0) -> Tensor:  # [.., M, ..] -> [.., N · S, ..]
        """Rows with zeros between the examples, which have S each then."""
        shape = [*t.shape]
        shape[axis] = self.num_examples * self.length
        return t.new_zeros(shape).index_copy(axis, self._slots(), t)

    def kept(self, mask: Tensor | None = None) -> Tensor:  # [N, S] bool
        """Where there are rows that count by a mask of positions `[N, T]`, if it is of these."""
        counted = torch.ones_like(self.examples, dtype=torch.bool)
        if mask is not None and mask.shape[1] == self.num_positions:
            counted = mask[self.examples, self.positions]
        return self.padded(counted).view(self.num_examples, -1)

    def _slots(self) -> Tensor:
        # Row m is the (m - first row of its example)-th one of S.
        starts = [0, *accumulate(self.counts)][:-1]
        first = torch.tensor(starts, device=self.examples.device)
        within = torch.arange(len(self.examples), device=self.examples.device)
        return within + self.examples * self.length - first[self.examples]


# ------------------------------------------------------------------------------- following the rows
class GatheredRows:
    """The places of gathered rows in one forward pass.

    Args:
        num_examples: Of the batch. What has as many rows, or a multiple of them, has rows of the
            examples, one after the other, until a function gathers some.
        example_of_rows: The example of each row, for kinds of rows of which examples don't have as
            many. What has as many rows has these, also what a function has scattered to them.

    Example:
        >>> x, rows = torch.rand(6, 3), GatheredRows(2)
        >>> index = torch.tensor([5, 0])
        >>> y = x[index]
        >>> rows.follow(Tensor.__getitem__, (x, index), {}, y)
        >>> z = y.tanh()
        >>> rows.follow(Tensor.tanh, (y,), {}, z)
        >>> rows.places(z)
        Origins(index=tensor([5, 0]), total=6)
    """

    def __init__(self, num_examples: int, example_of_rows: Sequence[Tensor] = ()) -> None:
        self.num_examples = num_examples
        self._places = WeakTensorKeyDictionary()
        self.packed = PackedOrders(self.places)
        #: Number of rows to where they come from, of those of which examples don't have as many.
        self._ragged: dict[int, Origins] = {}
        for number, examples in kinds_by_number(num_examples, example_of_rows).items():
            self._ragged[number] = Origins.of_ragged(examples, num_examples)
        self._are_ragged = bool(example_of_rows)

    def places(self, t: Tensor) -> Origins | None:
        """Where the rows of a tensor come from; None if each example has as many, one after the
        other.
        """
        places = self._places.get(t) if len(self._places) else None
        if places is not None or not self._ragged or not t.ndim or isinstance(t, nn.Parameter):
            return places
        return self._ragged.get(len(t))

    def are_known(self, t: Tensor) -> bool:
        """Whether it is known to which examples rows belong that no function has gathered."""
        return not self._are_ragged or (t.ndim > 0 and len(t) == self.num_examples)

    def may_have_examples(self, size: int) -> bool:
        """Whether the rows of so long an axis may belong to examples."""
        return size in self._ragged or (size > 0 and size % self.num_examples == 0)

    def moves_rows(self, t: Tensor) -> bool:
        """Whether a tensor was gathered, and its rows are not as many of each example, one after
        the other.
        """
        places = self.places(t)
        if places is None:
            return False
        each, remainder = divmod(len(places.index), self.num_examples)
        examples = places.index // (places.total // self.num_examples)
        in_order = torch.arange(self.num_examples, device=examples.device).repeat_interleave(each)
        return bool(remainder) or not torch.equal(examples, in_order)

    def same(self, t: Tensor, of: Tensor) -> None:
        """A tensor stands for another one."""
        places = self.places(of)
        if places is not None:
            self._places[t] = places
        self.packed.same(t, of)

    def follow(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Note where rows of the result of a function come from."""
        self.packed.follow(function, args, kwargs, out)
        if self._follow_packed(function, args, out):
            return
        gather = _GATHERS.get(function)
        if gather is None and not len(self._places) and not self._ragged:
            return
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        if not all(isinstance(t, Tensor) for t in outputs):
            return
        if gather is not None:
            try:
                gathered = gather(*args, **kwargs)
            except (TypeError, IndexError):  # arguments that are not known here
                return
            if gathered is not None:
                self._gather(gathered, outputs)
                return
        if function in _CAT and not kwargs.get("dim", args[1] if len(args) > 1 else 0):
            self._join(args[0] if args else kwargs["tensors"], outputs[0])
            return
        sources = self._sources(function, args, kwargs)
        # Of entries of a table for each row, positions are not those of the rows.
        source = min(sources, key=lambda source: source[1].total, default=None)
        if source is None:
            return
        x, places = source
        for t in outputs:
            kept = _kept_rows(function, x, t, args, kwargs)
            if kept == 1:
                self._places[t] = places
            elif kept > 1:
                self._places[t] = Origins(places.index.repeat_interleave(kept), places.total)

    def _follow_packed(self, function: Any, args: Sequence[Any], out: Any) -> bool:
        """Whether a function packs sequences, runs steps of packed ones, pads them again, or takes
        their states after the last step: rows are in another order then.
        """
        if function is Tensor.__getitem__ and isinstance(args[1], int):
            order = self.packed.sorted_on(args[0], 1)
            if order is not None and out.ndim:
                self._places[out] = Origins(order, len(order))
            return order is not None
        if not (function in (PACK, UNPACK) or function in RECURRENT) or len(args) < 2:
            return False
        batch_sizes = out[1] if function is PACK else args[1]
        if not isinstance(batch_sizes, Tensor) or batch_sizes.is_floating_point():
            return False  # states before the first step
        rows = self.packed.rows(batch_sizes, self.num_examples)
        if rows is None:
            return True
        if function is not UNPACK:
            self._places[out[0]] = Origins(rows.places, rows.num_sequences * len(batch_sizes))
        elif len(args) > 2 and args[2]:  # the sequences first
            self._places[out[0]] = Origins(rows.order, rows.num_sequences)
        if function in RECURRENT:
            self.packed.note_states(out[1:], rows)
        return True

    def _gather(self, gathered: _Gathered, outputs: Sequence[Tensor]) -> None:
        x, num_axes, take = gathered
        if isinstance(x, nn.Parameter):
            return
        places = self.places(x)
        shape = x.shape[:num_axes]
        if places is not None:
            index = places.index.view(-1, *[1] * (num_axes - 1)).expand(shape)
            total = places.total
        elif x.ndim and x.shape[0] and not x.shape[0] % self.num_examples:
            total = shape.numel()
            index = torch.arange(total, device=x.device).view(shape)
        else:
            return
        taken = take(index)
        for t, of_t in zip(outputs, taken if isinstance(taken, (tuple, list)) else (taken,)):
            if of_t.ndim == 1 and t.ndim and len(t) == len(of_t):
                self._places[t] = Origins(of_t, total)

    def _join(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Parts one after the other, that were gathered from the same rows."""
        places = [self.places(t) for t in parts if len(t)]
        if places and len({None if of_part is None else of_part.total for of_part in places}) == 1:
            joined = [of_part for of_part in places if of_part is not None]
            if joined:
                index = torch.cat([of_part.index for of_part in joined])
                self._places[out] = Origins(index, joined[0].total)

    def _sources(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Tensor, Origins]]:
        """Gathered tensors among the arguments; of products the one with the rows."""
        candidates = [*args, *kwargs.values()]
        if function in _CAT:
            candidates = candidates[0]
        if _name(function) in _PRODUCTS:
            # The second factor has rows, too, if there is one for each.
            has_rows = len(args) > 1 and isinstance(args[1], Tensor) and args[1].ndim > 2
            candidates = candidates[: 1 + (has_rows and _name(function) in _MATRICES)]
        for t in candidates:
            if isinstance(t, Tensor):
                places = self.places(t)
                if places is not None:
                    yield t, places


def kinds_by_number(num_examples: int, example_of_rows: Sequence[Tensor]) -> dict[int, Tensor]:
    """Number of rows to their examples, without that of rows of which each example has one.

    Raises:
        UnsupportedError: If one number is that of two kinds.
    """
    if not example_of_rows:
        return {}
    kinds = {num_examples: torch.arange(num_examples, device=example_of_rows[0].device)}
    for examples in example_of_rows:
        known = kinds.setdefault(len(examples), examples)
        if known is not examples and not torch.equal(known, examples):
            raise UnsupportedError(
                f"In a batch of {num_examples} examples there are two kinds of {len(examples)} "
                "rows, of which examples have different numbers (example_of_rows=, or one row for "
                "each example), and rows are told by their number. Put another example into the "
                "batch, or leave one out."
            )
    del kinds[num_examples]
    return kinds


def _kept_rows(
    function: Any, x: Tensor, t: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int:
    """How many rows of a result each row of `x` has become, in the same order; 0 if that is not
    known.
    """
    name = _name(function)
    rows = x.shape[0]
    if not t.is_floating_point() or not t.ndim or name in _MOVE:
        return 0
    if name in _RESHAPE:
        return t.shape[0] // rows if rows and not t.shape[0] % rows else 0
    if t.shape[0] != rows:
        return 0
    if name in _TURN:
        return int(t.stride(0) == x.stride(0))
    if name in _REDUCE:
        axes = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        return int(all(isinstance(axis, int) and axis % x.ndim for axis in axes))
    if name == "getitem":
        first = args[1][0] if isinstance(args[1], tuple) else args[1]
        return int(first is Ellipsis or first == slice(None))
    broadcasts = name in _BINARY and t.ndim == x.ndim
    return int(t.shape == x.shape or broadcasts or name in _PRODUCTS or name in _KEEP)


def _name(function: Any) -> str:
    name = getattr(function, "__name__", "")
    # Methods of operators, and custom operators with their overloads.
    return name.partition(".")[0].strip("_").removesuffix("_")


# Functions by their names, without underscores. Of others the result has the rows of an argument of
# its shape.
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "grouped_mm", "grouped_mm_fallback"}
_PRODUCTS |= {"conv1d", "conv2d", "conv3d", "embedding"}
_MATRICES = {"matmul", "bmm"}
_BINARY = {"add", "sub", "mul", "multiply", "div", "truediv", "true_divide", "where"}
_KEEP = {"chunk", "split", "tensor_split", "unsqueeze", "squeeze", "expand", "cat"}
_KEEP |= {"concat", "concatenate", "glu", "pad", "unflatten", "narrow"}
_RESHAPE = {"view", "reshape", "flatten"}
_REDUCE = {"sum", "mean", "amax", "amin", "logsumexp", "prod", "max", "min"}
_TURN = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "get", "t"}
_MOVE = {"flip", "fliplr", "flipud", "roll", "sort", "argsort", "cumsum", "cumprod", "rot90"}
_MOVE |= {"scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_put"}
_MOVE |= {"index_fill", "index_reduce", "setitem", "put", "einsum", "stack", "zeros_like"}
_MOVE |= {"empty_like", "ones_like", "full_like", "rand_like", "randn_like", "adjoint", "rot90"}


# ---------------------------------------------------------------------------- functions that gather
class _Gathered(NamedTuple):
    """What a function gathers rows of.

    Attributes:
        x: The tensor.
        num_axes: The number of its leading axes, the entries of which are rows.
        take: The same of other entries in their place.
    """

    x: Tensor
    num_axes: int
    take: Callable[[Tensor], Any]


def _getitem(x: Tensor, index: Any) -> _Gathered | None:
    items = index if isinstance(index, tuple) else (index,)
    if items and isinstance(items[0], slice):
        is_part = items[0] != slice(None)
        return _Gathered(x, 1, lambda places: places[items[0]]) if is_part else None
    leading: list[Any] = []
    num_axes = 0
    for item in items:
        if not isinstance(item, (Tensor, list)) and not (leading and isinstance(item, int)):
            break
        leading.append(item)
        num_axes += 1
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            num_axes += item.ndim - 1  # a mask
    # What else is indexed is inside of rows.
    if not leading or any(isinstance(item, (Tensor, list)) for item in items[len(leading) :]):
        return None
    return _Gathered(x, num_axes, lambda places: places[tuple(leading)])


def _index_select(input: Tensor, dim: int, index: Tensor) -> _Gathered | None:
    return _Gathered(input, 1, lambda places: places[index]) if dim % input.ndim == 0 else None


# All entries of a row come from one row, as an expanded index has it.
def _gather(input: Tensor, dim: int, index: Tensor) -> _Gathered | None:
    if dim % input.ndim or any(stride for stride in index.stride()[1:]):
        return None
    return _Gathered(input, 1, lambda places: places[index.flatten(1)[:, 0]])


def _repeat_interleave(
    input: Tensor, repeats: Any, dim: int | None = None, **options: Any
) -> _Gathered | None:
    if dim is None or dim % input.ndim:
        return None
    return _Gathered(input, 1, lambda places: places.repeat_interleave(repeats, dim=0))


def _split(tensor: Tensor, sizes: Any, dim: int = 0) -> _Gathered | None:
    return None if dim % tensor.ndim else _Gathered(tensor, 1, lambda places: places.split(sizes))


def _chunk(input: Tensor, chunks: int, dim: int = 0) -> _Gathered | None:
    return None if dim % input.ndim else _Gathered(input, 1, lambda places: places.chunk(chunks))


def _narrow(input: Tensor, dim: int, start: Any, length: int) -> _Gathered | None:
    if dim % input.ndim:
        return None
    return _Gathered(input, 1, lambda places: places.narrow(0, start, length))


_CAT = {torch.cat, torch.concat, torch.concatenate}
_GATHERS: dict[Any, Callable[..., _Gathered | None]] = {
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((torch.index_select, Tensor.index_select), _index_select),
    **dict.fromkeys((torch.gather, Tensor.gather), _gather),
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), _repeat_interleave),
    **dict.fromkeys((torch.split, Tensor.split, torch.functional.split), _split),
    **dict.fromkeys((torch.chunk, Tensor.chunk), _chunk),
    **dict.fromkeys((torch.narrow, Tensor.narrow), _narrow),
}
