"""Functions that read parameters: which they are, and the layers to which their calls belong.

Modules are known by their types; what a `forward` does with parameters is not. One forward pass on
a few examples shows which functions read them. Products with a weight (`F.linear`, `x @ W.T`,
`F.conv2d`, ...) and vectors that are added become uses of a layer as calls of a module are. So do
scales, shifts and tables that are broadcast over the examples; see `BroadcastRule`. A parameter
that anything else reads keeps the rule of the module that holds it, if it has none of its own, or
gets that of the innermost module around its readers; see `EnclosedRule`.

The models that need it are those with modules without a rule of their own, and those where the
self-check or the recording notices that something else than its layer reads a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import takewhile
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from curvlinops_plus.contexts import Endings, GradMode, entered
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.broadcast import TableRead, mask_to_expand, with_mask
from curvlinops_plus.layer.functions import BIAS, LINEAR, AffineCall, Function, affine_calls
from curvlinops_plus.layer.rule import GENERIC, AffineRule
from curvlinops_plus.risk.batches import Batch, known_length, take_examples
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.layers import (
    FoundReads,
    Layer,
    ModuleUse,
    ParameterProduct,
    find_layers,
    find_uses,
)
from curvlinops_plus.risk.preserve import own_calls, preserve_state
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.routes import GatheredRows
from curvlinops_plus.risk.tables import Place, Tables, tensors_in


# ---------------------------------------------------------------------------------- finding readers
def layers_of(risk: EmpiricalRisk, separate_weight_and_bias: bool = False) -> list[Layer]:
    """The layers of a risk; functions that read parameters of modules without a rule are looked for
    first.

    Data that can be read only once, and empty ones, are not read: such modules keep the generic
    rule.

    Args:
        separate_weight_and_bias: Give every parameter its own block.

    Cost: once per risk, and only with such modules, a forward pass on a few examples.
    """
    with risk.placed():
        uses = find_uses(risk.model, risk.params)
        unknown = risk.reads is None and GENERIC in [use.rule for use in uses]
        if unknown and not isinstance(risk.data, Iterator) and known_length(risk.data) != 0:
            try:
                look_for_functions(risk)
            except Exception:
                # Of the model or the data: recording runs them again, and names layers.
                risk.reads = FoundReads()
        return find_layers(risk.model, risk.params, separate_weight_and_bias, risk.reads, uses)


def look_for_functions(
    risk: EmpiricalRisk, batch: Batch | None = None, error: ValueError | None = None
) -> None:
    """Look how functions read parameters, and note it in `risk.reads`.

    Args:
        batch: A batch; default: the first of the data.
        error: What recording said of a parameter that is read outside of its layer. It is raised
            again if what is found does not explain it.
    """
    is_new = risk.reads is None
    previous = risk.reads or FoundReads()
    failed = {*getattr(error, "keys", ())}
    # First how functions read parameters; then the module around a layer of which recorded calls
    # don't tell enough, each time one module further, up to the model.
    attempts = [set[str]()] if is_new else []
    if failed:
        attempts.append(failed)
    if attempts:
        with (
            preserve_state(risk.model, risk.data),
            risk.placed(),
            torch.inference_mode(False),
            GradMode(True),
        ):
            if batch is None:
                batch = next(risk.batches("functions"), None)
            if batch is None:  # other processes have examples, and tell what they find
                return
            for keys in attempts:
                risk.reads = find_functions(risk, batch, keys, previous)
                explains = is_new and (risk.reads.products or risk.reads.broadcast)
                explains = explains or risk.reads.gathered != previous.gathered
                now = risk.reads.instead, risk.reads.enclosing
                if explains or now != (previous.instead, previous.enclosing):
                    return
    if error is not None:
        raise UnsupportedError(f"{error}{_tried(risk, previous, failed)}") from error


def begin_to_follow(risk: EmpiricalRisk, batch: Batch, error: OutsideReads) -> bool:
    """Whether passes follow gathered rows from now on, as none of the layers of which recorded
    calls don't tell enough has seen any before. The layers stay the same.
    """
    reads = risk.reads or FoundReads()
    if reads.gathered:
        return False
    with (
        preserve_state(risk.model, risk.data),
        risk.placed(),
        torch.inference_mode(False),
        GradMode(True),
    ):
        dry = DryPass(risk, find_uses(risk.model, risk.params), batch)
    if dry.moves_rows or not dry.of_gathered.isdisjoint(error.keys):
        risk.reads = replace(reads, gathered=True)
    return risk.reads is not None and risk.reads.gathered


def _tried(risk: EmpiricalRisk, previous: FoundReads, failed: Collection[str]) -> str:
    """What to say of modules that were run again for single examples, in vain; the last one is the
    widest.
    """
    names = list[str]()
    for key in risk.params:
        if key in failed and key in previous.enclosing:
            names += [*previous.failed.get(key, ()), previous.enclosing[key]]
    if not names:
        return ""
    modules = [f"{name!r}" if name else "the model itself" for name in dict.fromkeys(names)]
    return (
        f" Running {', then '.join(modules)} again for each example did not help, and there is no "
        "module further out in which examples are told apart."
    )


def find_functions(
    risk: EmpiricalRisk, batch: Batch, failed: Collection[str], previous: FoundReads
) -> FoundReads:
    """How functions read parameters outside of modules with rules, from one batch.

    Args:
        failed: Keys of parameters whose gradients are wrong by what is known: the next module
            around gives them.
        previous: What was found before. A parameter that a module encloses gets no smaller one.
    """
    dry = DryPass(risk, find_uses(risk.model, risk.params), batch)
    outside = {
        key: [read for read in reads if not read.answered] for key, reads in dry.reads.items()
    }
    gathered = previous.gathered or dry.moves_rows or not dry.of_gathered.isdisjoint(failed)
    # What has failed is recorded once more if passes begin to follow rows.
    failed_for_good = failed if gathered == previous.gathered else ()
    instead = _instead_of_rules(dry, failed_for_good, previous)
    outside |= {key: dry.reads[key] for key in instead}
    # Parameters that are read by anything but products, some of them as tables.
    taken = {*failed_for_good, *previous.enclosing}.difference(instead)
    by_tables = dict.fromkeys(instead)
    for key, reads in outside.items():
        if key not in taken and not all(read.product for read in reads):
            if all(read.is_broadcast for read in reads):
                by_tables[key] = None
            else:
                taken.add(key)
    calls: list[_ReadProduct] = []
    for key, reads in outside.items():
        if key not in by_tables:
            calls += [read.product for read in reads if read.product]
    # Without its weight, the bias of a convolution is on another axis than a vector that is added.
    for call in calls:
        if call.weight in taken and call.bias and call.function.name not in ("linear", "bias"):
            taken.add(call.bias)
    products = []
    for call in calls:
        named = {"weight": call.weight, "bias": call.bias}
        kept = {name: key for name, key in named.items() if key not in (None, *taken, *by_tables)}
        keys = {name: key for name, key in kept.items() if key is not None}
        of_bias = replace(BIAS, stacked=call.function.stacked)
        product = ParameterProduct(call.function if "weight" in keys else of_bias, keys)
        if keys and product not in products:
            products.append(product)
    enclosing: dict[str, str] = {}
    # In the order of the parameters: sets have another one in other processes.
    for key in [key for key in risk.params if key in taken]:
        name = _enclosing_module(risk, dry, key, failed, previous)
        if name is not None:
            enclosing[key] = name
    tried = dict(previous.failed)
    for key, name in previous.enclosing.items():
        if enclosing.get(key) != name:
            tried[key] = (*tried.get(key, ()), name)
    broadcast = {
        key: tuple(dict.fromkeys(place for read in outside[key] for place in read.broadcasts))
        for key in _broadcast(dry, by_tables, taken, enclosing)
    }
    kept = [key for key in instead if key in broadcast]
    return FoundReads(tuple(products), enclosing, tried, broadcast, kept, gathered)


def _broadcast(
    dry: DryPass,
    by_tables: Collection[str],
    taken: Collection[str],
    enclosing: Mapping[str, str],
) -> list[str]:
    """Keys of parameters that get their gradients where they are broadcast.

    Not so where their module runs again anyway, for other parameters; those that nothing reads, in
    the same module, have gradients of zero.
    """
    keys = dict.fromkeys(by_tables)
    for use in dry.uses:
        held = [*use.keys.values()]
        runs_again = [key for key in held if enclosing.get(key, use.name) == use.name]
        if not use.without_rule or keys.keys().isdisjoint(held):
            continue
        if any(key in taken for key in runs_again):
            for key in held:
                keys.pop(key, None)
        else:
            keys |= dict.fromkeys(key for key in held if key not in dry.reads)
    return [*keys]


def _instead_of_rules(dry: DryPass, failed: Collection[str], previous: FoundReads) -> list[str]:
    """Keys of parameters whose module has a rule, and returns a table, such as one of positions:
    where the table is broadcast, the gradients of each example are.
    """
    known = {*previous.enclosing, *previous.broadcast}
    instead = [key for key in dry.reads if key in previous.instead and key not in failed]
    for use in dry.uses:
        # All of a layer's, since what its module returns is one table.
        keys = [key for key in use.keys.values() if key in failed]
        reads = [read for key in keys for read in dry.reads.get(key, ())]
        if known.isdisjoint(keys) and reads and all(read.is_broadcast for read in reads):
            instead += [key for key in keys if key in dry.reads and key not in instead]
    return instead


def _enclosing_module(
    risk: EmpiricalRisk, dry: DryPass, key: str, failed: Collection[str], previous: FoundReads
) -> str | None:
    """The innermost module around all readers of a parameter that may give its gradients, None if
    the one that holds it sees all of them.
    """
    # Modules that run around each of the readers, outermost first.
    frames = zip(*[read.frames for read in dry.reads.get(key, ())])
    common = takewhile(lambda level: len({frame.name for frame in level}) == 1, frames)
    names = [level[0].name for level in common if all(frame.rows for frame in level)]
    holders = {use.name for use in dry.uses if use.without_rule and key in use.keys.values()}
    before = previous.enclosing.get(key)
    if key not in failed and before is None and not holders.isdisjoint(names):
        return None
    modules = dict(risk.model.named_modules())
    around = [n for n in names if any(p is risk.params[key] for p in modules[n].parameters())]
    if before in around:
        # The same module as before, or the next one further out.
        around = around[: around.index(before) + (key not in failed)]
    elif before is None and key in failed:
        by_product = any(key in product.keys.values() for product in previous.products)
        by_product |= key in previous.broadcast
        if not by_product:
            # What holds it has been run again.
            around = [name for name in around if name not in holders or name == ""]
    if around:
        return around[-1]
    if key in failed and key not in dry.reads:
        # Read where nothing is seen, as under `vmap`.
        return ""
    return before


def _few(model: nn.Module, batch: Batch) -> Batch | None:
    """Some examples of a batch, whose number says of most axes whether they carry examples; None
    for all.

    The number divides no size of parameters and buffers, and none behind the examples in the input;
    where there is no such number, it divides as few of them as possible. It is a prime: then it
    divides no product of such sizes either, as axes have that the model puts together.
    """
    numbers = [n for n in (3, 5, 7, 11, 13, 17, 19, 23) if n <= batch.num_examples]
    if not numbers:
        return None
    inputs = [t for t in tree_leaves(batch.X) if isinstance(t, Tensor)]
    sizes = {size for t in inputs for size in t.shape} - {batch.num_examples}
    sizes |= {size for t in (*model.parameters(), *model.buffers()) for size in t.shape}

    def confused(number: int) -> int:
        return sum(size % number == 0 for size in sizes)

    return take_examples(batch, range(min(numbers, key=confused)))


@dataclass(eq=False)
class _Frame:
    """A call of a module.

    Attributes:
        answers: Keys of the parameters that its rule is for.
        rows: Whether it takes and returns rows of examples; the model itself does.
    """

    name: str
    answers: set[str]
    rows: bool = True


@dataclass(frozen=True)
class _ReadProduct:
    """A function with a rule that multiplies with a weight, or adds a bias: their keys."""

    function: Function
    weight: str | None
    bias: str | None


@dataclass(eq=False)
class _Read:
    """A function that reads a parameter.

    Attributes:
        frames: The modules that run, outermost first, without the one that answers for the
            parameter.
        answered: Whether there is one that answers.
        product: What it computes, if there is a rule for that.
        broadcasts: Where it, or a table that is made of what it returns, is broadcast over
            examples.
        is_mixed: Whether the parameter or such a table meets examples in any other way.
    """

    key: str
    frames: list[_Frame]
    answered: bool
    product: _ReadProduct | None = None
    broadcasts: list[Place] = field(default_factory=list)
    is_mixed: bool = False

    @property
    def is_broadcast(self) -> bool:
        """Whether all that the model does with it is broadcasting."""
        return bool(self.broadcasts) and not self.is_mixed


class DryPass:
    """A forward pass on a few examples, and what reads parameters in it.

    If the input can't be cut, or the model fails on the part, all examples are taken. What has as
    many rows as there are examples, or a multiple of them, is taken for rows of examples; so their
    number is chosen by `_few`.

    Args:
        uses: The modules that hold parameters.

    Attributes:
        reads: Key to the functions that read the parameter.
        of_gathered: Keys of the parameters of layers that see gathered rows.
        moves_rows: Whether layers see rows in another order than that of the examples, or another
            number of each of them.
    """

    def __init__(self, risk: EmpiricalRisk, uses: list[ModuleUse], batch: Batch) -> None:
        self.risk = risk
        self.uses = uses
        attention = [use for use in uses if use.function is not None]
        self._of_attention = {key for use in attention for key in use.keys.values()}
        few = _few(risk.model, batch)
        try:
            self._run(few or batch)
        except Exception:
            if few is None:
                raise
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        self.reads: dict[str, list[_Read]] = {}
        self.of_gathered: set[str] = set()
        self.moves_rows = False
        self._rows = GatheredRows(batch.num_examples)
        self._examples = batch.num_examples
        self._stack = list[_Frame]()
        # Frozen ones, too, leave a trace in what is computed from these.
        self._free = {key: nn.Parameter(p.detach()) for key, p in self.risk.params.items()}
        self._views = ParameterViews(self._free)
        self._now: dict[str, _Read] = {}
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
                self.risk.run(batch, model)

        self.risk.at(self._free, run)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        answers: set[str] = set()
        for use in self.uses:
            if use.name == name and use.function is None and not use.without_rule:
                places = use.places(module)
                if all(m._parameters.get(n) is self._free[key] for m, n, key in places):
                    answers |= {*use.keys.values()}
        self._stack.append(_Frame(name, answers))

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
        return any(n and n % self._examples == 0 for n in sizes)

    def _reads_of(self, t: Tensor) -> tuple[_Read, ...] | None:
        """The read of now of a parameter."""
        key = self._views.key(t)
        return None if key is None else (self._now[key],)

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
        self._rows.follow(function, args, kwargs, out)
        self._views.select(function, args, out)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        reads = []
        if self._stack:  # a training loop's pass is recorded in the model, not behind it
            reads = self._tables.reads(function, args, kwargs, out, self._examples)
        # Others give shapes, detached copies, and views of parameters.
        if not reads and all(self._views.key(t) is not None for t in outputs):
            if not outputs and sources is not None:
                self._tables.add(out, ())
            return out
        for call in affine_calls(function, args, kwargs):
            product = self._product(call, examples)
            if product is None:
                continue
            keys = self._now.keys() & {product.weight, product.bias}
            self._look_at_rows(call.input, keys, product.function.stacked)
            for key, read in self._now.items():
                if key in (product.weight, product.bias):
                    read.product = product
                    in_attention = product.function in (LINEAR, BIAS) and key in self._of_attention
                    read.answered |= in_attention
        for key, read in self._now.items():
            self.reads.setdefault(key, []).append(read)
        if not reads and sources is not None:
            self._tables.add(out, sources)
        else:
            self._note_tables(inputs, reads)
        # What is expanded is a view of the parameter no more.
        return out.clone() if reads and out._is_view() else out

    def _read(self, key: str) -> _Read:
        """The read of a parameter in the modules that run."""
        answering = [key in frame.answers for frame in self._stack]
        if any(answering):
            return _Read(key, self._stack[: answering.index(True)], True)
        return _Read(key, [*self._stack], False)

    def _note_tables(
        self, inputs: Sequence[Tensor], reads: Sequence[tuple[TableRead, Place]]
    ) -> None:
        """Note that tables are broadcast in a call, or meet examples in another way."""
        seen: set[_Read] = set()
        for table_read, place in reads:
            for read in self._tables.of(table_read.table) or ():
                read.broadcasts.append(place)
                seen.add(read)
        for t in inputs:
            for read in self._tables.of(t) or ():
                read.is_mixed |= read not in seen

    def _product(self, product: AffineCall, examples: int | None) -> _ReadProduct | None:
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
            return _ReadProduct(replace(BIAS, stacked=function.stacked), None, bias.key)
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
        try:
            rule = function.module(w, b)[1]
            assert isinstance(rule, AffineRule)
            if not function.stacked:
                rule.at(weight.rows, len(w))
        except (ValueError, NotImplementedError):
            return None
        return _ReadProduct(function, weight.key, None if bias is None else bias.key)

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
        return rows % self._examples == 0 or (rows == 1 and product.function.name == "embedding")


# ------------------------------------------------------------------------------------- seeing calls
Receive = Callable[[Any, "tuple[Any, ...]", "dict[str, Any]", "int | None"], Any]


@cache
def _body(original: Any) -> Callable[..., Any]:
    """A function of PyTorch that runs its body even while a mode is active.

    The original hands itself to the mode instead, which then sees one call and nothing of what
    happens inside.
    """
    private = {**original.__globals__, "has_torch_function": lambda *_: False}
    body = FunctionType(
        original.__code__, private, original.__name__, original.__defaults__, original.__closure__
    )
    body.__kwdefaults__ = original.__kwdefaults__
    return body


class FunctionCalls(TorchFunctionMode):
    """While active, shows every call of a torch function, those inside
    `F.multi_head_attention_forward` included.

    Costs a few microseconds per call.

    Args:
        receive: Called with function, arguments, keywords and, inside attention, where examples are
            on axis 1, the number of examples; calls the function, and returns the result that the
            model goes on with.
    """

    def __init__(self, receive: Receive) -> None:
        super().__init__()
        self.receive = receive
        self.examples: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outer = self.examples
        # Activation checkpointing runs the model again inside of `grad`, and must see the same
        # graph.
        if func not in (F.multi_head_attention_forward, torch.autograd.grad):
            return self.receive(func, args, kwargs, self.examples)
        if func is F.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            if query.ndim != 3:
                raise UnsupportedError(
                    f"Multi-head attention got a query of shape {list(query.shape)}, expected "
                    "three dimensions with the examples on one of them. Add the example dimension "
                    "with `x[None]`."
                )
            self.examples = query.shape[1]
        try:
            with entered(self):
                return _body(func)(*args, **kwargs)
        finally:
            self.examples = outer


class View(NamedTuple):
    """Rows of a parameter, transposed or not.

    Attributes:
        matrices: Of a stack: the number of the matrix or vector that it is, or one for each row of
            what it meets; None for all of the stack.
    """

    key: str
    rows: slice
    transposed: bool
    matrices: int | Tensor | None = None


def function_of(product: AffineCall, weight: View | None, bias: View | None) -> Function | None:
    """What a product is of the parameters that it reads; None if it is no product with a matrix."""
    function: Function | None = product.function
    if weight is None:
        if bias is not None and bias.matrices is not None:
            return replace(function, stacked=True)
        # One vector for each row is none for all of them.
        return function if product.bias is None or product.bias.ndim == 1 else None
    if weight.transposed:
        function = function.transpose()
    is_stack = weight.matrices is not None or product.of_stack
    if function is None or not is_stack:
        return function
    return replace(function, stacked=True)


class ParameterViews:
    """Finds the parameter that a tensor is, or is a view of.

    Args:
        params: Key to parameter, in the tensors that the model reads.

    Example:
        >>> import torch
        >>> W = torch.ones(4, 3)
        >>> views = ParameterViews({"W": W})
        >>> views.find(W[1:3].T)
        View(key='W', rows=slice(1, 3, None), transposed=True, matrices=None)
        >>> views.find(W[::2]), views.key(W[::2]), views.key(2 * W)
        (None, 'W', None)
        >>> stack = torch.ones(4, 3, 2)
        >>> ParameterViews({"W": stack}).find(stack[1].T)
        View(key='W', rows=slice(0, 3, None), transposed=True, matrices=1)
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._keys = {id(p): key for key, p in params.items()}
        #: What was selected from stacks, `W[index]`: keys and indices.
        self._selected = WeakTensorKeyDictionary()

    def select(self, function: Any, args: Sequence[Any], out: Any) -> None:
        """Notice a selection `W[index]` of matrices or vectors of a stack, one for each row."""
        if function not in _SELECT or len(args) < 2 or not isinstance(args[0], Tensor):
            return
        key = self._keys.get(id(args[0]))
        index = args[-1]
        if key is None or not isinstance(index, Tensor) or index.dtype == torch.bool:
            return
        on_first_axis = args[1] is index or (isinstance(args[1], int) and args[1] == 0)
        if index.ndim == 1 and args[0].ndim in (2, 3) and on_first_axis:
            self._selected[out] = (key, index)

    def selects(self, index: Any) -> bool:
        """Whether matrices are selected by this index."""
        selected = self._selected.values()
        return any(index is i for key, i in selected if self._params[key].ndim == 3)

    def key(self, t: Tensor) -> str | None:
        """Key of the parameter that a tensor shows numbers of."""
        if id(t) in self._keys:
            return self._keys[id(t)]
        if len(self._selected):
            selected = self._selected.get(t if t._base is None else t._base)
            if selected is not None:
                return selected[0]
        return None if t._base is None else self._keys.get(id(t._base))

    def find(self, t: Tensor | None) -> View | None:
        """The parameter whose rows a tensor is; None if it is none, or any other view."""
        key = None if t is None else self.key(t)
        if t is None or key is None:
            return None
        p = self._params[key]
        if len(self._selected) and (selection := self._selection(t)) is not None:
            return selection
        if t is p:
            return View(key, slice(0, len(p)), False) if p.ndim else None
        if p.requires_grad and t.grad_fn is None and torch.is_grad_enabled():
            # Made under `no_grad`: nothing comes back to the parameter, though it requires a
            # gradient.
            return None
        rows = _rows_of(t, p)
        if rows is not None:
            return View(key, rows, False)
        if t.ndim == p.ndim == 3:
            rows = _rows_of(t.mT, p)
            return None if rows is None else View(key, rows, True)
        if t.ndim == p.ndim - 1:
            return self._matrix(key, t, p)
        rows = _rows_of(t.T, p) if t.ndim == 2 else None
        return None if rows is None else View(key, rows, True)

    def _matrix(self, key: str, t: Tensor, p: Tensor) -> View | None:
        """The matrix of a stack that a tensor is, or the vector."""
        offset = int(t.storage_offset() - p.storage_offset())
        number = offset // max(1, p.stride(0))
        if p.ndim not in (2, 3) or not 0 <= number < len(p):
            return None
        matrix = p.detach()[number]
        rows = _rows_of(t, matrix)
        if rows is not None:
            return View(key, rows, False, number)
        rows = _rows_of(t.T, matrix) if t.ndim == 2 else None
        return None if rows is None else View(key, rows, True, number)

    def _selection(self, t: Tensor) -> View | None:
        """What was selected from a stack, or its transpose."""
        base = t if t._base is None else t._base
        selected = self._selected.get(base)
        if selected is None:
            return None
        key, index = selected
        whole = slice(0, len(index))
        transposed = base.ndim == 3 and _rows_of(t, base) is None
        if _rows_of(t.mT if transposed else t, base) != whole:
            return None
        return View(key, slice(0, self._params[key].shape[1]), transposed, index)


_SELECT = {Tensor.__getitem__, torch.index_select, Tensor.index_select}


def _rows_of(view: Tensor, p: Tensor) -> slice | None:
    """The rows of a parameter that a view of it shows, None if it shows something else."""
    if view.dtype != p.dtype or not view.ndim == p.ndim > 0 or view.shape[1:] != p.shape[1:]:
        return None
    strides = zip(view.stride(), p.stride(), view.shape)
    if any(stride != of_parameter for stride, of_parameter, size in strides if size > 1):
        return None
    offset = int(view.storage_offset() - p.storage_offset())
    start, remainder = divmod(offset, max(1, p.stride(0)))
    if remainder or not 0 <= start <= len(p) - len(view):
        return None
    return slice(start, start + len(view))


# --------------------------------------------------------------------------------------- in a state
def describe_reads(reads: FoundReads | None) -> dict[str, Any] | None:
    """What was found, in plain Python."""
    if reads is None:
        return None
    products = []
    for function, keys in reads.products:
        options = _lists(function.options)
        products.append({"keys": dict(keys), "function": asdict(function) | {"options": options}})
    return {
        "products": products,
        "enclosing": dict(reads.enclosing),
        "broadcast": {key: _lists(places) for key, places in reads.broadcast.items()},
        "instead": [*reads.instead],
        "gathered": reads.gathered,
    }


def extent(described: Mapping[str, Any]) -> tuple[int, int, int, bool]:
    """How far somebody has looked who describes reads so: the more parameters are enclosed, in the
    larger modules.
    """
    depths = [len(name.split(".")) if name else 0 for name in described["enclosing"].values()]
    number = len(described["products"]) + len(described["broadcast"])
    return len(depths), -sum(depths), number, described["gathered"]


def rebuild_reads(risk: EmpiricalRisk, data: Mapping[str, Any] | None) -> FoundReads | None:
    """Undo `describe_reads`, for the parameters of a risk.

    Raises:
        ValueError: If the risk has not these parameters.
    """
    if data is None:
        return None
    products = []
    for described in data["products"]:
        options = _tuples(described["function"]["options"])
        function = Function(**described["function"] | {"options": options})
        products.append(ParameterProduct(function, dict(described["keys"])))
    keys = {key for product in products for key in product.keys.values()}
    missing = (keys | data["enclosing"].keys() | data["broadcast"].keys()) - risk.params.keys()
    if missing:
        raise ValueError(
            f"State mismatch in the parameters: the state has {sorted(missing)}, this risk has not."
        )
    return FoundReads(
        tuple(products),
        dict(data["enclosing"]),
        broadcast={key: _tuples(places) for key, places in data["broadcast"].items()},
        instead=[*data["instead"]],
        gathered=data["gathered"],
    )


def _lists(value: Any) -> Any:
    return [*map(_lists, value)] if isinstance(value, (list, tuple)) else value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
