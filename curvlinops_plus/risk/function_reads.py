"""Functions that read parameters: which they are, and the layers to which their calls belong.

Modules are known by their types; what a `forward` does with parameters is not. One forward pass on
a few examples shows which functions read them. Products with a weight (`F.linear`, `x @ W.T`,
`F.conv2d`, ...) and vectors that are added become uses of a layer as calls of a module are. A
parameter that anything else reads keeps the rule of the module that holds it, if it has none of its
own, or gets that of the innermost module around its readers; see `EnclosedRule`.

The models that need it are those with modules without a rule of their own, and those where the
self-check or the recording notices that something else than its layer reads a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import takewhile
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.functions import BIAS, LINEAR, Function, Product, products
from curvlinops_plus.layer.rule import GENERIC
from curvlinops_plus.risk.batches import Batch, known_length, take_examples
from curvlinops_plus.risk.layers import FoundReads, Layer, ModuleUse, find_layers, find_uses
from curvlinops_plus.risk.preserve import own_calls, preserve_state
from curvlinops_plus.risk.risk import EmpiricalRisk

# Numbers of examples, of which one is chosen that divides no size in the model. That it is a prime
# counts: then it divides no product of such sizes either, as axes have that the model puts
# together.
_FEW = (3, 5, 7, 11, 13, 17, 19, 23)


# ------------------------------------------------------------------------------------- seeing calls
Receive = Callable[[Any, "tuple[Any, ...]", "dict[str, Any]", Any, "int | None"], Any]


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
        receive: Called with function, arguments, keywords, result and, inside attention, where
            examples are on axis 1, the number of examples; returns the result that the model goes
            on with.
    """

    def __init__(self, receive: Receive) -> None:
        super().__init__()
        self.receive = receive
        self.examples: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, outer = kwargs or {}, self.examples
        # Activation checkpointing runs the model again inside of `grad`, and must see the same
        # graph.
        if func not in (F.multi_head_attention_forward, torch.autograd.grad):
            return self.receive(func, args, kwargs, func(*args, **kwargs), self.examples)
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
            with self:
                return _body(func)(*args, **kwargs)
        finally:
            self.examples = outer


class View(NamedTuple):
    """Rows of a parameter, transposed or not."""

    key: str
    rows: slice
    transposed: bool


class ParameterViews:
    """Finds the parameter that a tensor is, or is a view of.

    Args:
        params: Key to parameter, in the tensors that the model reads.

    Example:
        >>> import torch
        >>> W = torch.ones(4, 3)
        >>> views = ParameterViews({"W": W})
        >>> views.find(W[1:3].T)
        View(key='W', rows=slice(1, 3, None), transposed=True)
        >>> views.find(W[::2]), views.key(W[::2]), views.key(2 * W)
        (None, 'W', None)
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params, self._keys = params, {id(p): key for key, p in params.items()}

    def key(self, t: Tensor) -> str | None:
        """Key of the parameter that a tensor shows numbers of."""
        found = self._keys.get(id(t))
        return found if found is not None or t._base is None else self._keys.get(id(t._base))

    def find(self, t: Tensor | None) -> View | None:
        """The parameter whose rows a tensor is; None if it is none, or any other view."""
        if t is None or (key := self.key(t)) is None:
            return None
        p = self._params[key]
        if t is p:
            return View(key, slice(0, len(p)), False) if p.ndim else None
        if p.requires_grad and t.grad_fn is None and torch.is_grad_enabled():
            # made under `no_grad`: nothing comes back to the parameter, though it requires a
            # gradient
            return None
        for transposed in (False, True) if t.ndim == 2 else (False,):
            v = t.T if transposed else t
            same = all(a == b for a, b, size in zip(v.stride(), p.stride(), v.shape) if size > 1)
            if same and v.dtype == p.dtype and v.ndim == p.ndim > 0 and v.shape[1:] == p.shape[1:]:
                start, rest = divmod(
                    int(v.storage_offset() - p.storage_offset()), max(1, p.stride(0))
                )
                if rest == 0 and 0 <= start <= len(p) - len(v):
                    return View(key, slice(start, start + len(v)), transposed)
        return None


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
        readable = not isinstance(risk.data, Iterator) and known_length(risk.data) != 0
        if risk.reads is None and GENERIC in [use.rule for use in uses] and readable:
            try:
                look_for_functions(risk)
            except (
                Exception
            ):  # of the model or the data; recording runs them again, and names layers
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
    before, failed = risk.reads, {*getattr(error, "keys", ())}
    known = FoundReads() if before is None else before
    # First how functions read parameters; then the module around a layer of which recorded calls
    # don't tell enough, each time one module further, up to the model.
    attempts = ([set[str]()] if before is None else []) + ([failed] if failed else [])
    if attempts:
        state = preserve_state(risk.model, risk.data)
        with state, risk.placed(), torch.inference_mode(False), torch.enable_grad():
            batch = next(risk.batches("functions"), None) if batch is None else batch
            if batch is None:  # other processes have examples, and tell what they find
                return
            for keys in attempts:
                risk.reads = find_functions(risk, batch, keys, known)
                if risk.reads.enclosing != known.enclosing or (
                    before is None and risk.reads.products
                ):
                    return
    if error is not None:
        raise UnsupportedError(f"{error}{_tried(risk, known, failed)}") from error


def _tried(risk: EmpiricalRisk, known: FoundReads, failed: Collection[str]) -> str:
    """What to say of modules that were run again for single examples, in vain; the last one is the
    widest.
    """
    names = list[str]()
    for key in risk.params:
        if key in failed and key in known.enclosing:
            names += [*known.failed.get(key, ()), known.enclosing[key]]
    if not names:
        return ""
    modules = [f"{name!r}" if name else "the model itself" for name in dict.fromkeys(names)]
    return (
        f" Running {', then '.join(modules)} again for each example did not help, and there is no "
        "module further out in which examples are told apart."
    )


def find_functions(
    risk: EmpiricalRisk, batch: Batch, failed: Collection[str] = (), known: FoundReads | None = None
) -> FoundReads:
    """How functions read parameters outside of modules with rules, from one batch.

    Args:
        failed: Keys of parameters whose gradients are wrong by what is known: the next module
            around gives them.
        known: What was found before. A parameter that a module encloses gets no smaller one.
    """
    known = FoundReads() if known is None else known
    enclosed = {*failed, *known.enclosing}
    uses = find_uses(risk.model, risk.params)
    reads = DryPass(risk, uses, batch).reads
    outside = {key: [read for read in found if not read.answered] for key, found in reads.items()}
    taken = enclosed | {key for key in reads if not all(read.product for read in outside[key])}
    calls = [
        read.product for found in outside.values() for read in found if read.product is not None
    ]
    # Without its weight, the bias of a convolution is on another axis than a vector that is added.
    taken |= {
        b
        for function, w, b in calls
        if b is not None and w in taken and function.name not in ("linear", "bias")
    }
    products: dict[Any, dict[str, str]] = {}
    for function, w, b in calls:
        keys = {
            name: key
            for name, key in (("weight", w), ("bias", b))
            if key is not None and key not in taken
        }
        if keys:
            function = function if "weight" in keys else BIAS
            products.setdefault((function, *keys.items()), keys)
    enclosing, modules = dict[str, str](), dict(risk.model.named_modules())
    by_product = {key for _, keys in known.products for key in keys.values()}
    for key in [
        key for key in risk.params if key in taken
    ]:  # sets have another order in other processes
        common = takewhile(
            lambda frames: len({frame.name for frame in frames}) == 1,
            zip(*[read.frames for read in reads.get(key, ())]),
        )
        names = [frames[0].name for frames in common if all(frame.rows for frame in frames)]
        holders = {use.name for use in uses if use.without_rule and key in use.keys.values()}
        if key not in enclosed and not holders.isdisjoint(names):
            continue  # its own module sees all of it
        around = [
            name for name in names if any(p is risk.params[key] for p in modules[name].parameters())
        ]
        before = known.enclosing.get(key)
        if before in around:
            around = around[: around.index(before) + (key not in failed)]
        elif (
            before is None and key in failed and key not in by_product
        ):  # what holds it has been run again
            around = [name for name in around if name not in holders or name == ""]
        if around:
            enclosing[key] = around[-1]
        elif key in failed and key not in reads:  # read where nothing is seen, as under `vmap`
            enclosing[key] = ""
        elif before is not None:
            enclosing[key] = before
    tried = dict(known.failed)
    for key, before in known.enclosing.items():
        tried[key] = (*tried.get(key, ()), *([before] if enclosing.get(key) != before else []))
    return FoundReads(
        tuple((function, keys) for (function, *_), keys in products.items()), enclosing, tried
    )


def _few(model: nn.Module, batch: Batch) -> Batch | None:
    """Some examples of a batch, whose number says of most axes whether they carry examples; None
    for all.

    The number divides no size of parameters and buffers, and none behind the examples in the input;
    if the batch is too small for that, it divides as few of them as possible.
    """
    tensors = [t for t in tree_leaves(batch.X) if isinstance(t, Tensor)]
    sizes = {n for t in (*model.parameters(), *model.buffers()) for n in t.shape}
    sizes |= {n for t in tensors for n in t.shape if n != batch.num_examples}
    numbers = [number for number in _FEW if number <= batch.num_examples]
    if not numbers:
        return None
    return take_examples(
        batch, range(min(numbers, key=lambda number: sum(n % number == 0 for n in sizes)))
    )


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


@dataclass(eq=False)
class _Read:
    """A function that reads a parameter.

    Attributes:
        frames: The modules that run, outermost first, without the one that answers for the
            parameter.
        answered: Whether there is one that answers.
        product: Function, key of the weight and of the bias, if there is a rule for what it does.
    """

    frames: list[_Frame]
    answered: bool
    product: tuple[Function, str | None, str | None] | None


class DryPass:
    """A forward pass on a few examples, and what reads parameters in it.

    If the input can't be cut, or the model fails on the part, all examples are taken. What has as
    many rows as there are examples, or a multiple of them, is taken for rows of examples; so their
    number is chosen by `_few`.

    Args:
        uses: The modules that hold parameters.

    Attributes:
        reads: Key to the functions that read the parameter.
    """

    def __init__(self, risk: EmpiricalRisk, uses: list[ModuleUse], batch: Batch) -> None:
        self.risk, self.uses = risk, uses
        self._of_attention = {
            key for use in uses if use.function is not None for key in use.keys.values()
        }
        few = _few(risk.model, batch)
        try:
            self._run(few or batch)
        except Exception:
            if few is None:
                raise
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        self._examples, self._stack = batch.num_examples, list[_Frame]()
        self.reads: dict[str, list[_Read]] = {}
        # Frozen ones, too, leave a trace in what is computed from these.
        self._free = {key: nn.Parameter(p.detach()) for key, p in self.risk.params.items()}
        self._views = ParameterViews(self._free)

        def run(model: nn.Module) -> None:
            with ExitStack() as hooks:
                for name, module in model.named_modules():
                    if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                        continue
                    enter, leave = own_calls(partial(self._enter, name)), own_calls(self._leave)
                    hooks.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                    hook = module.register_forward_hook(leave, always_call=True, with_kwargs=True)
                    hooks.callback(hook.remove)
                with FunctionCalls(self._receive):
                    self.risk.run(batch, model)

        self.risk.at(self._free, run)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        mine = [
            use
            for use in self.uses
            if use.name == name and use.function is None and not use.without_rule
        ]
        held = [
            use
            for use in mine
            if all(m._parameters.get(n) is self._free[k] for m, n, k in use.places(module))
        ]
        answers = {key for use in held for key in use.keys.values()}
        self._stack.append(_Frame(name, answers))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any = None) -> None:
        frame = self._stack.pop()
        frame.rows = not frame.name or all(map(self._has_rows, ((args, kwargs), out)))

    def _has_rows(self, tree: Any) -> bool:
        """Whether some tensor may carry the examples on its first axis or the second."""
        tensors = [
            t for t in tree_leaves(tree) if isinstance(t, Tensor) and self._views.key(t) is None
        ]
        return any(n and n % self._examples == 0 for t in tensors for n in t.shape[:2])

    def _receive(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        examples: int | None,
    ) -> Any:
        """One function call."""
        given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
        read = {self._views.key(t) for t in given} - {None}
        made = (
            [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            if read
            else []
        )
        if all(
            self._views.key(t) is not None for t in made
        ):  # shapes, detached copies, and views of parameters
            return out
        known: dict[str | None, Any] = {}
        for product in products(function, args, kwargs):
            if (triple := self._product(product, examples)) is not None:
                known |= dict.fromkeys(triple[1:], triple)
        for key in read:
            assert key is not None
            frames = [*takewhile(lambda f, key=key: key not in f.answers, self._stack)]
            product = known.get(key)
            answered = any(key in frame.answers for frame in self._stack)
            answered |= (
                product is not None and product[0] in (LINEAR, BIAS) and key in self._of_attention
            )
            self.reads.setdefault(key, []).append(_Read(frames, answered, product))
        return out

    def _product(
        self, product: Product, examples: int | None
    ) -> tuple[Function, str | None, str | None] | None:
        """What a call multiplies with or adds, if there is a rule for it and it has rows of
        examples.
        """
        weight, bias = self._views.find(product.weight), self._views.find(product.bias)
        function = (
            product.function.transpose()
            if weight is not None and weight.transposed
            else product.function
        )
        of_parameter = (
            self._views.key(product.input) is not None
        )  # but what attention multiplies with is an input
        rows = product.input.shape[0]
        by_example = rows % self._examples == 0 or (
            rows == 1 and product.function.name == "embedding"
        )
        if function is None or (examples is None and (of_parameter or not by_example)):
            return None
        w, b = (None if view is None else self.risk.params[view.key] for view in (weight, bias))
        if weight is None:
            return (
                (BIAS, None, bias.key)
                if bias is not None and function.name in ("linear", "bias")
                else None
            )
        read = (
            slice(0, 0 if b is None else len(b)) if function.transposed else weight.rows
        )  # else rows are inputs
        if bias is not None and bias.rows != read:
            return None
        try:
            function.module(w, b)[1].at(weight.rows, len(self.risk.params[weight.key]))
        except (ValueError, NotImplementedError):
            return None
        return function, weight.key, None if bias is None else bias.key


# --------------------------------------------------------------------------------------- in a state
def describe_reads(reads: FoundReads | None) -> dict[str, Any] | None:
    """What was found, in plain Python."""
    if reads is None:
        return None
    products = [
        {
            "keys": dict(keys),
            "function": {**asdict(function), "options": _plain(function.options, list)},
        }
        for function, keys in reads.products
    ]
    return {"products": products, "enclosing": dict(reads.enclosing)}


def extent(described: Mapping[str, Any]) -> tuple[int, int, int]:
    """How far somebody has looked who describes reads so: the more parameters are enclosed, in the
    larger modules.
    """
    depths = [len(name.split(".")) if name else 0 for name in described["enclosing"].values()]
    return len(depths), -sum(depths), len(described["products"])


def rebuild_reads(risk: EmpiricalRisk, data: Mapping[str, Any] | None) -> FoundReads | None:
    """Undo `describe_reads`, for the parameters of a risk.

    Raises:
        ValueError: If the risk has not these parameters.
    """
    if data is None:
        return None
    products = [
        (
            Function(**{**p["function"], "options": _plain(p["function"]["options"], tuple)}),
            dict(p["keys"]),
        )
        for p in data["products"]
    ]
    named = {key for _, keys in products for key in keys.values()} | data["enclosing"].keys()
    if missing := named - risk.params.keys():
        raise ValueError(
            f"State mismatch in the parameters: the state has {sorted(missing)}, this risk has not."
        )
    return FoundReads(tuple(products), dict(data["enclosing"]))


def _plain(value: Any, kind: type[list[Any]] | type[tuple[Any, ...]]) -> Any:
    """The same with lists for tuples, or the other way round."""
    return (
        kind([_plain(part, kind) for part in value]) if isinstance(value, (list, tuple)) else value
    )
