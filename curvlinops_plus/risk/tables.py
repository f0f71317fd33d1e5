"""Which tensors of a forward pass are the same for all examples, and of which parameters they are
made.

Parameters, buffers, other tensors that modules hold, and what functions like `torch.arange` return
are; and what functions compute from these alone. All else may depend on examples: what the model is
given, and what is computed from it. What an autograd function does isn't seen, but the graph says
of what it returned from which parameters it is. Where a function broadcasts a table over examples,
gradients of each example are those of the table; see `layer/broadcast.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves, tree_map

from curvlinops_plus.layer.broadcast import (
    BroadcastRule,
    TableOfPass,
    TableRead,
    WeightRead,
    table_reads,
)
from curvlinops_plus.risk.calls import OutsideReads, title
from curvlinops_plus.risk.routes import GatheredRows

if TYPE_CHECKING:
    from curvlinops_plus.risk.layers import ModuleUse


#: Name of a function that broadcasts, number of axes of what it returns, and the axis of the
#: examples.
Place = tuple[str, tuple[int, int]]


class _Table(NamedTuple):
    """A tensor, which is kept alive; its version, by which writes to it are noticed; what it is
    made of; and whether it had a graph, which autograd functions give to what they have computed.
    """

    tensor: Tensor
    version: int
    sources: tuple[Any, ...]
    has_graph: bool


class Tables:
    """The tables of one pass.

    Args:
        sources_of: What the table is made of that a tensor is by itself, as a parameter; None of
            all other tensors. It is asked, too, about the parameters that an autograd function
            reads beside examples.

    Example:
        >>> import torch
        >>> w = torch.ones(3, requires_grad=True)
        >>> tables = Tables(lambda t: ("w",) if t is w else None)
        >>> tables.add(2 * w, ("w",))
        >>> tables.of(w), tables.of(torch.ones(3))
        (('w',), None)
    """

    def __init__(self, sources_of: Callable[[Tensor], tuple[Any, ...] | None]) -> None:
        self._sources_of = sources_of
        self._tables: dict[int, _Table] = {}
        #: The graph's nodes of tables, likewise.
        self._nodes: dict[Any, tuple[Any, ...]] = {}

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """A pass begins, with the parameters, buffers and other tensors that the modules have
        now.
        """
        self._tables.clear()
        self._nodes.clear()
        for module in modules:
            for held in (module._parameters, module._buffers):
                for t in held.values():
                    self._add(t, ())
            for value in vars(module).values():
                self._add_held(value)

    def of(self, t: Tensor) -> tuple[Any, ...] | None:
        """What a table is made of, nothing for constants; None of a tensor that may depend on
        examples.
        """
        sources = self._sources_of(t)
        if sources is not None:
            return sources
        table = self._tables.get(id(t))
        is_noted = table is not None and table.has_graph == t.requires_grad
        if not is_noted and isinstance(t.grad_fn, BackwardCFunction):
            return self._of_autograd_function(t)
        return None if table is None or table.version != t._version else table.sources

    def _of_autograd_function(self, t: Tensor) -> tuple[Any, ...] | None:
        """What a tensor is made of that an autograd function returned, by its graph.

        It may depend on examples, too, as a constant: it is the same tensor for all of them, and so
        is the way from it to its parameters. What has a row for each meets them in other ways.
        """
        last: Any = t.grad_fn
        sources: dict[Any, None] = {}
        nodes = [last]
        while nodes:
            node = nodes.pop()
            is_leaf = hasattr(node, "variable")
            made_of = self.of(node.variable) if is_leaf else self._nodes.get(node)
            if made_of is not None:
                sources |= dict.fromkeys(made_of)
                continue
            # Functions inside of others, and views.
            if is_leaf or not (
                isinstance(node, BackwardCFunction) or len(node.next_functions) == 1
            ):
                for earlier, _ in last.next_functions:
                    if hasattr(earlier, "variable"):
                        self._sources_of(earlier.variable)  # read, but not in a table
                return None
            nodes += [earlier for earlier, _ in node.next_functions if earlier is not None]
        self._add(t, tuple(sources))
        return tuple(sources)

    def of_all(self, tensors: Iterable[Tensor]) -> tuple[Any, ...] | None:
        """What a tensor is made of that is computed from these; None if some are no tables."""
        union: dict[Any, None] = {}
        for t in tensors:
            sources = self.of(t)
            if sources is None:
                return None
            union |= dict.fromkeys(sources)
        return tuple(union)

    def add(self, output: Any, sources: tuple[Any, ...]) -> None:
        """Something was computed from tables."""
        for t in [output] if isinstance(output, Tensor) else tree_leaves(output):
            self._add(t, sources)

    def _add_held(self, value: Any) -> None:
        """Constants that a module holds, perhaps in lists and dictionaries."""
        if isinstance(value, Tensor) and not value.requires_grad:
            self._add(value, ())
        elif isinstance(value, (list, tuple)):
            for part in value:
                self._add_held(part)
        elif type(value) is dict:
            for part in value.values():
                self._add_held(part)

    def _add(self, t: Any, sources: tuple[Any, ...]) -> None:
        if isinstance(t, Tensor) and not t.is_inference():
            self._tables[id(t)] = _Table(t, t._version, sources, t.requires_grad)
            if t.grad_fn is not None:
                self._nodes[t.grad_fn] = sources

    def reads(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: Any,
        num_examples: int,
        rows: GatheredRows | None = None,
        known: Mapping[Any, Collection[Place]] | None = None,
    ) -> list[tuple[TableRead | WeightRead, Place]]:
        """The tables with parameters in them that a call broadcasts over examples.

        Args:
            rows: Knows rows of which examples don't have as many, one after the other.
            known: What a table is made of to where it is broadcast. Any axis may have as many
                entries as there are examples.
        """
        name = getattr(function, "__name__", "")
        for reads in table_reads(function, args, kwargs, output):
            with_places = []
            for read in reads:
                sources = self.of(read.table)
                axes = []
                if sources:
                    is_ragged = rows is not None and rows.moves_rows(output)
                    axes = read.example_axes(num_examples, is_ragged)
                places = [(name, (len(read.shape), axis)) for axis in axes]
                if known is not None and sources:
                    places = [place for place in places if place in known[sources[0]]]
                if places:
                    with_places.append((read, places[0]))
            if with_places:
                return with_places
        return []


@dataclass(eq=False)
class TableCall:
    """A function call in a recorded pass, and the layers whose tables it broadcasts.

    Attributes:
        output: What it returned.
        reads: Index of each layer, its use, and the rule of this call.
        inputs: What the rules need.
        axis: The axis of the examples.
        outside: What to raise, and the use, if a table meets examples in another way.
    """

    output: Any
    reads: Sequence[tuple[int, ModuleUse, BroadcastRule]] = ()
    inputs: Sequence[Tensor] = ()
    axis: int = 0
    outside: _Outside | None = None


class _Outside(NamedTuple):
    use: ModuleUse
    error: OutsideReads


def _run(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rows: GatheredRows | None
) -> Any:
    output = function(*args, **kwargs)
    if rows is not None:
        rows.follow(function, args, kwargs, output)
    return output


class BroadcastUses:
    """Layers whose parameters functions broadcast over examples, and the tables of a recorded pass.

    Args:
        model: What runs.
        uses: Indices of layers, and uses.
        params: Key to the tensor that the model reads.
        key_of: Key of the parameter that a tensor shows numbers of.
        inside: For each module that runs, keys of the parameters that it answers for.
        backward: Whether gradients are recorded.
        resumed: As for `TableOfPass`.

    Attributes:
        keys: Of the parameters.
        tables: Those of the pass.
    """

    def __init__(
        self,
        model: nn.Module,
        uses: Sequence[tuple[int, ModuleUse]],
        params: Mapping[str, Tensor],
        key_of: Callable[[Tensor], str | None],
        inside: Sequence[set[str]],
        backward: bool,
        resumed: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model = model
        self._resumed = resumed
        #: Key to the layer, the use, and the parameter's name in its module.
        self._uses: dict[str, tuple[int, ModuleUse, str]] = {}
        self._params = params
        self._key_of = key_of
        self._inside = inside
        self._backward = backward
        #: Key to where functions broadcast the parameter.
        self._places: dict[str, Collection[Place]] = {}
        for index, use in uses:
            assert use.function is not None
            for name, key in use.keys.items():
                self._uses[key] = (index, use, name)
                self._places[key] = use.function.options
        self.keys = self._uses.keys()
        self.tables = Tables(self._sources_of)
        #: What stands for frozen parameters, so that gradients come back to them.
        self._leaves: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A pass begins."""
        if self.keys:
            self.tables.begin(self._model.modules())

    def forget(self) -> None:
        """Forget the pass."""
        self.tables.begin(())
        self._leaves = {}

    def call(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_examples: int,
        rows: GatheredRows | None = None,
        axis: int | None = None,
    ) -> TableCall:
        """Call a function.

        Args:
            rows: Follows rows of which examples don't have as many, one after the other.
            axis: Where the examples are, if it is known.
        """
        if not self.keys:
            return TableCall(_run(function, args, kwargs, rows))
        tables = self.tables
        inputs = [*tensors_in(args, kwargs)]
        made_of = [tables.of(t) for t in inputs]
        is_table = None not in made_of
        keys = dict.fromkeys(key for sources in made_of for key in sources or ())
        if not keys:
            output = _run(function, args, kwargs, rows)
            if is_table:
                tables.add(output, ())
            return TableCall(output)
        if self._backward and any(not t.requires_grad for t in inputs if self._key_of(t)):
            args, kwargs = tree_map(self._free, (tuple(args), dict(kwargs)))
        output = _run(function, args, kwargs, rows)
        leads_back = not self._backward or any(
            isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output)
        )
        reads = []
        if leads_back and (not is_table or is_one_tensor(inputs)):
            reads = tables.reads(function, args, kwargs, output, num_examples, rows, self._places)
        read_keys = {key for read, _ in reads for key in tables.of(read.table) or ()}
        if read_keys == keys.keys() and axis in (None, reads[0][1][1][1]):
            on = reads[0][1][1][1]
            # Rows that are followed are treated one by one.
            one_by_one = rows is not None and on == 0 and rows.places(output) is not None
            return self._read(output, reads, 1 if one_by_one else output.shape[on] // num_examples)
        if is_table and not reads:
            tables.add(output, tuple(keys) if leads_back else ())
        elif leads_back and self._backward and _has_numbers(output):
            return TableCall(output, outside=self._outside(function, [*keys]))
        return TableCall(output)

    def _sources_of(self, t: Tensor) -> tuple[str, ...] | None:
        """The parameter that a tensor shows numbers of, if functions broadcast it; nothing while a
        module runs that answers for it.
        """
        key = self._key_of(t)
        # Views that were made under `no_grad` lead nowhere.
        if key is None or (t.is_leaf and t.requires_grad and t is not self._params[key]):
            return None
        is_answered = any(key in keys for keys in self._inside)
        return () if is_answered or key not in self.keys else (key,)

    def _free(self, value: Any) -> Any:
        """A frozen parameter with a gradient; anything else as it is."""
        key = self._key_of(value) if isinstance(value, Tensor) else None
        if key is None or key not in self.keys or value.requires_grad:
            return value
        if key not in self._leaves:
            self._leaves[key] = value.detach().requires_grad_()
            self.tables.add(self._leaves[key], (key,))
        return self._leaves[key]

    def _read(
        self,
        output: Any,
        reads: Sequence[tuple[TableRead | WeightRead, Place]],
        positions: int,
    ) -> TableCall:
        """The layers that a call reads, each with its tables, along an axis with so many positions
        of each example, or rows that are followed.
        """
        _, (_, axis) = reads[0][1]
        tables_of: dict[tuple[int, ModuleUse], list[TableOfPass]] = {}
        for read, _ in reads:
            sources: dict[tuple[int, ModuleUse], dict[str, Tensor]] = {}
            for key in self.tables.of(read.table) or ():
                index, use, name = self._uses[key]
                source = self._leaves.get(key, self._params[key])
                sources.setdefault((index, use), {})[name] = source
            for layer, named in sources.items():
                table = TableOfPass(read, axis, positions, named, self._resumed)
                tables_of.setdefault(layer, []).append(table)
        layers = [(*layer, BroadcastRule(tables)) for layer, tables in tables_of.items()]
        return TableCall(output, layers, reads[0][0].inputs, axis)

    def _outside(self, function: Any, keys: Sequence[str]) -> _Outside:
        use = self._uses[keys[0]][1]
        name = getattr(function, "__name__", function)
        message = (
            f"{title(use.name)}: {keys} are broadcast over examples elsewhere, and here {name!r} "
            "reads them, or what is made of them, in another way. Leave them out of `params`, or "
            "restructure that part of the model."
        )
        return _Outside(use, OutsideReads(message, keys))


def _has_numbers(output: Any) -> bool:
    """Not so of an expert that sees no row: no gradient comes back through it."""
    return any(isinstance(t, Tensor) and t.numel() for t in tree_leaves(output))


def is_one_tensor(inputs: Sequence[Tensor]) -> bool:
    """Whether a call may make copies for all examples; of several tables it makes a table, though
    one of them may have as many rows as there are examples.
    """
    return len(inputs) == 1


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of a function, which may be in lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value, {})
