"""A forward pass on a few examples, which shows how parameters are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.contexts import Endings
from curvlinops_plus.layer.broadcast import TableRead, WeightRead, mask_to_expand, with_mask
from curvlinops_plus.layer.functions import BIAS, LINEAR, AffineCall, Function, affine_calls
from curvlinops_plus.layer.recurrent_functions import RecurrentRead, recurrent_read
from curvlinops_plus.layer.rule import GENERIC, AffineRule
from curvlinops_plus.risk.batches import Batch, take_examples
from curvlinops_plus.risk.found_reads import ParameterProduct
from curvlinops_plus.risk.function_calls import FunctionCalls, ParameterViews, function_of
from curvlinops_plus.risk.layers import ModuleUse
from curvlinops_plus.risk.preserve import own_calls
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.routes import GatheredRows
from curvlinops_plus.risk.tables import Place, Tables, is_one_tensor, tensors_in


@dataclass(eq=False)
class _Frame:
    """A call of a module.

    Attributes:
        answers: Keys of the parameters that its rule is for.
        again: Whether that runs the module again for each example.
        rows: Whether it takes and returns rows of examples; the model itself does.
    """

    name: str
    answers: set[str]
    again: bool
    rows: bool = True


@dataclass(eq=False)
class ParameterRead:
    """A function that reads a parameter.

    Attributes:
        frames: The modules that run, outermost first, without the one that answers for the
            parameter.
        answered: Whether there is one that answers.
        again: Whether it runs again for that.
        product: What it computes, if there is a rule for that, and all parameters that it reads
            for it.
        broadcasts: Where it, or a table that is made of what it returns, is broadcast over
            examples.
        computes: Where they are read as weights that are computed are: in ways that leave the
            parameter in the block of its module.
        is_mixed: Whether the parameter or such a table meets examples in any other way.
        nodes: The graph's nodes of what it returned.
    """

    key: str
    frames: list[_Frame]
    answered: bool
    again: bool = False
    product: ParameterProduct | None = None
    broadcasts: list[Place] = field(default_factory=list)
    computes: list[Place] = field(default_factory=list)
    is_mixed: bool = False
    nodes: list[Any] = field(default_factory=list)

    @property
    def is_broadcast(self) -> bool:
        """Whether all that the model does with it is broadcasting."""
        return bool(self.broadcasts) and not (self.computes or self.is_mixed)

    @property
    def is_known(self) -> bool:
        """Whether it gives the gradients of each example without a module that runs again."""
        return not self.is_mixed or (self.answered and not self.again)

    @property
    def is_lost(self) -> bool:
        """Whether nothing was seen of what becomes of it."""
        return not (self.broadcasts or self.computes or self.is_mixed)


class DryPass:
    """A forward pass on a few examples, and what reads parameters in it.

    If the input can't be cut, or the model fails on the part, all examples are taken. What has as
    many rows as there are examples, or a multiple of them, is taken for rows of examples; so their
    number is chosen by `_few`.

    Args:
        uses: The modules that hold parameters.

    Attributes:
        reads: Key to the functions that read the parameter.
        unseen: Keys of the parameters that outputs depend on although nothing was seen to read
            them: of modules that are not called, such as what an `nn.ParameterDict` holds for an
            autograd function, or that run under `torch.no_grad()`, as in a solver by the adjoint
            method.
        of_attention: Keys of the parameters that functions inside of attention read.
        of_gathered: Keys of the parameters of layers that see gathered rows.
        moves_rows: Whether layers see rows in another order than that of the examples, or another
            number of each of them.
    """

    def __init__(self, risk: EmpiricalRisk, uses: list[ModuleUse], batch: Batch) -> None:
        self.risk = risk
        self.uses = uses
        attention = [use for use in uses if use.function is not None]
        self.of_attention = {key for use in attention for key in use.keys.values()}
        few = _few(risk.model, batch)
        try:
            self._run(few or batch)
        except Exception:
            if few is None:
                raise
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        self.reads: dict[str, list[ParameterRead]] = {}
        #: Of autograd functions.
        self._unseen_reads: dict[str, list[ParameterRead]] = {}
        self.unseen: set[str] = set()
        self.of_gathered: set[str] = set()
        self.moves_rows = False
        self._called = set[str]()
        self._without_graph = set[str]()
        self._rows = GatheredRows(batch.num_examples, batch.example_of_rows)
        self._examples = batch.num_examples
        self._stack = list[_Frame]()
        # Frozen ones, too, leave a trace in what is computed from these.
        self._free = {key: nn.Parameter(p.detach()) for key, p in self.risk.params.items()}
        self._views = ParameterViews(self._free)
        self._now: dict[str, ParameterRead] = {}
        self._tables = Tables(self._reads_of)

        def run(model: nn.Module) -> None:
            self._tables.begin(model.modules())
            with Endings() as endings:
                for name, module in model.named_modules():
                    if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                        continue
                    before = own_calls(partial(self._enter, name))
                    after = own_calls(self._leave)
                    options = {"always_call": True, "with_kwargs": True}
                    # Each in one line, between whose parts no interrupt can come.
                    endings.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                    endings.callback(module.register_forward_hook(after, **options).remove)
                endings.enter_context(FunctionCalls(self._receive))
                outputs, *_ = self.risk.run(batch, model)
            for key, reads in self._unseen_reads.items():
                seen = self.reads.get(key, [])
                for read in reads:
                    # In the forward pass of the autograd function others read it, without a graph.
                    inside = [other.frames for other in seen if not other.nodes]
                    if inside:
                        read.frames = inside[0]
                if seen or not any(read.is_mixed or read.is_lost for read in reads):
                    self.reads[key] = [*seen, *reads]
            self._follow(outputs)

        self.risk.at(self._free, run)

    def _follow(self, outputs: Iterable[Tensor]) -> None:
        """Look in the graph of the outputs for parameters that nothing was seen to read with a
        graph, of modules that were not called or ran without, and for what was lost sight of.
        """
        idle = [use for use in self.uses if use.without_rule and use.name not in self._called]
        unread = {key for use in idle for key in use.keys.values()} | self._without_graph
        unread -= self.reads.keys()
        lost = [read for reads in self.reads.values() for read in reads if read.is_lost]
        nodes = [t.grad_fn for t in outputs if unread or lost]
        visited: set[Any] = {None}
        while nodes:
            node: Any = nodes.pop()
            if node not in visited:
                visited.add(node)
                nodes += [earlier for earlier, _ in node.next_functions]
        variables = {id(getattr(node, "variable", None)) for node in visited}
        self.unseen = {key for key in unread if id(self._free[key]) in variables}
        for read in lost:
            read.is_mixed = not visited.isdisjoint(read.nodes)
        for reads in self.reads.values():
            for read in reads:
                read.nodes.clear()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._called.add(name)
        answers: set[str] = set()
        again = False
        for use in self.uses:
            if use.name == name and use.function is None and not use.without_rule:
                places = use.places(module)
                if all(m._parameters.get(n) is self._free[key] for m, n, key in places):
                    answers |= {*use.keys.values()}
                    again |= use.rule is GENERIC
        if not torch.is_grad_enabled():
            self._without_graph |= answers
        self._stack.append(_Frame(name, answers, again))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any = None) -> None:
        frame = self._stack.pop()
        for use in self.uses:
            rule = use.rule
            is_called = use.module is module and use.function is None and bool(args or kwargs)
            if is_called and isinstance(rule, AffineRule):
                self._look_at_rows(rule.input_of(module, args, kwargs), use.keys.values())
        frame.rows = not frame.name or all(map(self._has_rows, ((args, kwargs), out)))

    def _look_at_rows(self, x: Tensor, keys: Iterable[str], stacked: bool = False) -> None:
        """Whether the input of a layer with these parameters was gathered; of a stack also if each
        example has as many rows, one after the other: they are other positions than the mask's.
        """
        if self._rows.places(x) is not None:
            self.of_gathered |= {*keys}
            self.moves_rows = self.moves_rows or stacked or self._rows.moves_rows(x)

    def _has_rows(self, tree: Any) -> bool:
        """Whether some tensor may carry the examples on its first axis or the second."""
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
        sizes = {n for t in tensors if self._views.key(t) is None for n in t.shape[:2]}
        return any(map(self._rows.may_have_examples, sizes))

    def _reads_of(self, t: Tensor) -> tuple[ParameterRead, ...] | None:
        """The read of now of a parameter; where an autograd function has read it, is not known, but
        that it was in the model.
        """
        key = self._views.key(t)
        if key is None:
            return None
        if key in self._now:
            return (self._now[key],)
        if not self.risk.params[key].requires_grad:
            return None  # the function that is recorded gives it no graph
        read = replace(self._read(key), frames=self._stack[:1])
        self._unseen_reads.setdefault(key, []).append(read)
        return (read,)

    def _receive(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], examples: int | None
    ) -> Any:
        """One function call."""
        inputs = [*tensors_in(args, kwargs)]
        self._now = {}
        for t in inputs:
            key = self._views.key(t)
            if key is not None and key not in self._now:
                self._now[key] = self._read(key)
        masked = mask_to_expand(function, args, kwargs)
        if masked is not None and self._tables.of(masked[0]):
            mask, sizes = masked
            expanded = self._receive(Tensor.expand, (mask, *sizes), {}, examples)
            return self._receive(function, *with_mask(args, kwargs, expanded), examples)
        sources = self._tables.of_all(inputs)  # before the call may write to them
        out = function(*args, **kwargs)
        if sources is None:
            self._rows.follow(function, args, kwargs, out)
        self._views.select(function, args, out)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        reads = []
        # A training loop's pass is recorded in the model, not behind it.
        # Without a graph functions read, too, of which an autograd function gives gradients.
        is_read = bool(outputs) or not all(read.answered for read in self._now.values())
        if is_read and self._stack and (sources is None or is_one_tensor(inputs)):
            reads = self._tables.reads(function, args, kwargs, out, self._examples, self._rows)
        for table_read, _ in reads:
            if isinstance(table_read, WeightRead):
                self._look_at_rows(table_read.call.input, ())
        # Others give shapes, detached copies, and views of parameters.
        if not reads and all(self._views.key(t) is not None for t in outputs):
            if not outputs and sources is not None:
                self._tables.add(out, ())
            return out
        for call in affine_calls(function, args, kwargs):
            product = self._product(call, examples)
            if product is None:
                continue
            self._look_at_rows(call.input, product.keys.values(), product.function.stacked)
            for key in product.keys.values():
                read = self._now[key]
                read.product = product
                in_attention = product.function in (LINEAR, BIAS) and key in self.of_attention
                read.answered |= in_attention
        recurrent = recurrent_read(function, args, kwargs)
        if recurrent is not None:
            product = self._recurrent_product(recurrent)
            for key in () if product is None else product.keys.values():
                self._now[key].product = product
        for key, read in self._now.items():
            read.nodes += [t.grad_fn for t in outputs]
            self.reads.setdefault(key, []).append(read)
        if not reads and sources is not None:
            self._tables.add(out, sources)
        else:
            self._note_tables(inputs, reads)
        # What is expanded is a view of the parameter no more.
        return out.clone() if reads and out._is_view() else out

    def _read(self, key: str) -> ParameterRead:
        """The read of a parameter in the modules that run."""
        answering = [key in frame.answers for frame in self._stack]
        if any(answering):
            depth = answering.index(True)
            return ParameterRead(key, self._stack[:depth], True, self._stack[depth].again)
        return ParameterRead(key, [*self._stack], False)

    def _note_tables(
        self, inputs: Sequence[Tensor], reads: Sequence[tuple[TableRead | WeightRead, Place]]
    ) -> None:
        """Note that tables are broadcast in a call, or meet examples in another way."""
        seen: set[ParameterRead] = set()
        for table_read, place in reads:
            for read in self._tables.of(table_read.table) or ():
                (read.broadcasts if table_read.own_block else read.computes).append(place)
                seen.add(read)
        for t in inputs:
            for read in self._tables.of(t) or ():
                read.is_mixed |= read not in seen

    def _recurrent_product(self, read: RecurrentRead) -> ParameterProduct | None:
        """The recurrent layer that a call runs, if all of its weights are parameters and it has
        sequences of examples.
        """
        keys = {local: self._views.whole(weight) for local, weight in read.weights.items()}
        known = {local: key for local, key in keys.items() if key is not None}
        has_examples = read.num_sequences > 0 and not read.num_sequences % self._examples
        sizes = read.batch_sizes
        if sizes is not None:
            has_examples = self._rows.packed.rows(sizes, self._examples) is not None
        if len(known) < len(keys) or not has_examples:
            return None
        return ParameterProduct(Function(read.name, read.options), known)

    def _product(self, product: AffineCall, examples: int | None) -> ParameterProduct | None:
        """What a call multiplies with or adds, if there is a rule for it and it has rows of
        examples.
        """
        weight = self._views.find(product.weight)
        bias = self._views.find(product.bias)
        function: Function | None = function_of(product, weight, bias)
        if function is None or (examples is None and not self._has_examples(product)):
            return None
        if weight is None:
            if bias is None or function.name not in ("linear", "bias"):
                return None
            if bias.matrices is not None and not self._meets_rows(bias.matrices, product.input):
                return None
            return ParameterProduct(replace(BIAS, stacked=function.stacked), {"bias": bias.key})
        w = self.risk.params[weight.key]
        b = None if bias is None else self.risk.params[bias.key]
        if function.stacked:
            is_selected = weight.matrices is not None
            # All of the matrix, and the bias that belongs to it.
            is_matrix = weight.rows == slice(0, w.shape[1] if is_selected else len(w))
            if product.of_stack == is_selected:
                return None
            if not is_matrix or (bias is not None and bias.matrices is not weight.matrices):
                return None
        else:
            # Rows of a transposed weight are inputs, not outputs.
            rows = weight.rows
            if function.transposed:
                rows = slice(0, 0 if b is None else len(b))
            if bias is not None and bias.rows != rows:
                return None
        params = {"weight": w} if b is None else {"weight": w, "bias": b}
        try:
            rule = function.module(params)[1]
            assert isinstance(rule, AffineRule)
            if not function.stacked:
                rule.at(weight.rows, len(w))
        except (ValueError, NotImplementedError):
            return None
        keys = {"weight": weight.key}
        return ParameterProduct(function, keys if bias is None else {**keys, "bias": bias.key})

    def _meets_rows(self, index: int | Tensor, x: Tensor) -> bool:
        """Whether a vector of a stack, or one for each row, is added to what an expert's matrix
        has returned.
        """
        if isinstance(index, Tensor) and len(index) != x.shape[0]:
            return False
        return self._rows.places(x) is not None or self._views.selects(index)

    def _has_examples(self, product: AffineCall) -> bool:
        """Whether the input of a product has rows of examples; what attention multiplies with is an
        input, too.
        """
        if self._views.key(product.input) is not None:
            return False
        if self._rows.places(product.input) is not None:
            return True
        rows = product.input.shape[int(product.of_stack and product.ends is None)]
        return self._rows.may_have_examples(rows) or (
            rows == 1 and product.function.name == "embedding"
        )


def _few(model: nn.Module, batch: Batch) -> Batch | None:
    """Some examples of a batch, or some of them twice, whose number says of most axes whether they
    carry examples; None for all.

    The number divides no size of parameters and buffers, and none behind the examples in the input;
    where there is no such number, it divides as few of them as possible. It is a prime: then it
    divides no product of such sizes either, as axes have that the model puts together.
    """
    N = batch.num_examples
    numbers = [n for n in (3, 5, 7, 11, 13, 17, 19, 23) if n <= 2 * N + 1]
    if not numbers:
        return None
    inputs = [t for t in tree_leaves(batch.X) if isinstance(t, Tensor)]
    sizes = {size for t in inputs for size in t.shape} - {N}
    sizes |= {size for t in (*model.parameters(), *model.buffers()) for size in t.shape}

    def confused(number: int) -> int:
        return sum(size % number == 0 for size in sizes)

    return take_examples(batch, [k % N for k in range(min(numbers, key=confused))])
