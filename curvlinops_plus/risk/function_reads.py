"""Functions that read parameters: which they are, and the layers to which their calls belong.

Modules are known by their types; what a `forward` does with parameters is not. One forward pass on three examples shows
which functions read them. Products with a weight (`F.linear`, `x @ W.T`, `F.conv2d`, ...) and vectors that are added
become uses of a layer as calls of a module are. A parameter that anything else reads keeps the rule of the module that
holds it, if it has none of its own, or gets that of the innermost module around its readers; see `EnclosedRule`.

The models that need it are those with modules without a rule of their own, and those where the self-check or the
recording notices that something else than its layer reads a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.functions import BIAS, LINEAR, Function, Product, products
from curvlinops_plus.layer.rule import GENERIC
from curvlinops_plus.risk.batches import Batch, is_iterator, take_examples
from curvlinops_plus.risk.layers import FoundReads, Layer, ModuleUse, find_layers, find_uses
from curvlinops_plus.risk.modules import hookable_modules, preserve_state
from curvlinops_plus.risk.process_state import Uncopied, eager, own_calls
from curvlinops_plus.risk.risk import EmpiricalRisk

# A prime that hardly any other size of a tensor is a multiple of.
_FEW = 3


# ------------------------------------------------------------------------------------------------------ seeing calls
Receive = Callable[[Any, "tuple[Any, ...]", "dict[str, Any]", Any, "int | None"], Any]


@cache
def _body(original: Any) -> Callable[..., Any]:
    """A function of PyTorch that runs its body even while a mode is active.

    The original hands itself to the mode instead, which then sees one call and nothing of what happens inside.
    """
    private = {**original.__globals__, "has_torch_function": lambda *_: False}
    body = FunctionType(original.__code__, private, original.__name__, original.__defaults__, original.__closure__)
    body.__kwdefaults__ = original.__kwdefaults__
    return body


class FunctionCalls(TorchFunctionMode):
    """While active, shows every call of a torch function, those inside `F.multi_head_attention_forward` included.

    It also keeps attention and transformer layers off their fused inference path, which calls no submodule at all.
    Costs a few microseconds per call.

    Args:
        receive: Called with function, arguments, keywords, result and, inside attention, where examples are on axis 1,
            the number of examples; returns the result that the model goes on with.
    """

    def __init__(self, receive: Receive) -> None:
        super().__init__()
        self.receive = receive
        self.examples: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            if query.ndim != 3:
                raise UnsupportedError(
                    f"Multi-head attention got a query of shape {list(query.shape)}, expected three dimensions with "
                    "the examples on one of them. Add the example dimension with `x[None]`."
                )
            outer, self.examples = self.examples, query.shape[1]
            try:
                with self:
                    return _body(func)(*args, **kwargs)
            finally:
                self.examples = outer
        if func is torch.autograd.grad:  # activation checkpointing runs the model again, and must see the same graph
            with self:
                return _body(func)(*args, **kwargs)
        return self.receive(func, args, kwargs, func(*args, **kwargs), self.examples)


@dataclass(frozen=True)
class View:
    """Rows of a parameter, transposed or not.

    Attributes:
        rows: Its rows.
        transposed: Whether the view is the transpose of these rows.
    """

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
        >>> views.find(W[::2]), views.keys(W[::2]), views.keys(2 * W)
        (None, ['W'], [])
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._by_memory: dict[int, list[tuple[str, Tensor]]] = {}
        for key, p in params.items():
            self._by_memory.setdefault(id(_base(p)), []).append((key, p))

    def keys(self, t: Tensor) -> list[str]:
        """Keys of the parameters that a tensor shows numbers of."""
        near = self._by_memory.get(id(_base(t)), [])
        if len(near) > 1:  # parameters that are views of one tensor themselves
            found = self.find(t)
            return [key for key, _ in near] if found is None else [found.key]
        return [key for key, _ in near]

    def find(self, t: Tensor | None) -> View | None:
        """The parameter whose rows a tensor is; None if it is none, or any other view."""
        if t is None:
            return None
        for key, p in self._by_memory.get(id(_base(t)), []):
            if t is not p and p.requires_grad and t.grad_fn is None and torch.is_grad_enabled():
                continue  # made under `no_grad`: nothing comes back to the parameter, though it requires a gradient
            for transposed in (False, True) if t.ndim == 2 else (False,):
                rows = _rows(t.T if transposed else t, p)
                if rows is not None:
                    return View(key, rows, transposed)
        return None


def _base(t: Tensor) -> Tensor:
    return t if t._base is None else t._base


def _rows(t: Tensor, p: Tensor) -> slice | None:
    """Which rows of `p` a view of the same memory shows, if it shows whole rows."""
    if t is p:
        return slice(0, len(p)) if p.ndim else None
    if t.dtype != p.dtype or t.ndim != p.ndim or t.ndim == 0 or t.shape[1:] != p.shape[1:] or p.stride(0) == 0:
        return None
    if any(a != b for a, b, size in zip(t.stride(), p.stride(), t.shape) if size > 1):
        return None
    start, rest = divmod(int(t.storage_offset() - p.storage_offset()), p.stride(0))
    return slice(start, start + len(t)) if rest == 0 and 0 <= start <= len(p) - len(t) else None


class FunctionUses:
    """Finds the layers to which a product belongs, among those that are read by functions.

    A product inside a module that answers for the parameter itself belongs to that module.

    Args:
        uses: Indices of layers, and their uses by functions.
        params: Key to the tensor that the model reads.
    """

    def __init__(self, uses: Sequence[tuple[int, ModuleUse]], params: Mapping[str, Tensor]) -> None:
        self._uses = {(use.function, use.keys.get("weight"), use.keys.get("bias")): (i, use) for i, use in uses}
        self._keys = {key for _, use in uses for key in use.keys.values()}
        self._params = params
        self._views = ParameterViews({key: params[key] for key in self._keys})
        #: Keys of the modules that run at the moment, which answer for them.
        self.inside: list[set[str]] = []

    def watch(self, use: ModuleUse) -> list[Any]:
        """Hooks that tell when a module runs, if functions read the same parameters outside of it."""
        shared = self._keys & set(use.keys.values())
        if not shared:
            return []

        def enter(module: nn.Module, args: Any) -> None:
            self.inside.append(shared if use.holds(module, self._params) else set())

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            if self.inside:
                self.inside.pop()

        return [
            use.module.register_forward_pre_hook(Uncopied(enter)),
            use.module.register_forward_hook(Uncopied(leave), always_call=True),
        ]

    def of(self, product: Product) -> list[tuple[int, ModuleUse]]:
        """The uses that a product is, with indices of their layers, for the rows that it reads."""
        weight, bias = self._view(product.weight), self._view(product.bias)
        function, w, b = product.function, weight and weight.key, bias and bias.key
        if weight is not None and weight.transposed:
            function = function.transpose()
        whole, known = self._uses.get((function, w, b)), self._uses.get
        if whole is None:  # the two belong to layers of their own, or only one is tracked
            found = [(known((function, w, None)), weight), (known((LINEAR, None, b)) or known((BIAS, None, b)), bias)]
        else:
            found = [(whole, weight or bias)]
        return [self._at(*known, view) for known, view in found if known is not None and view is not None]

    def _view(self, t: Tensor | None) -> View | None:
        view = self._views.find(t)
        return None if view is None or any(view.key in keys for keys in self.inside) else view

    def _at(self, index: int, use: ModuleUse, view: View) -> tuple[int, ModuleUse]:
        assert isinstance(use.rule, AffineRule)
        return index, replace(use, rule=use.rule.at(view.rows, len(self._params[view.key])))


# ----------------------------------------------------------------------------------------------------- finding readers
def layers_of(risk: EmpiricalRisk, separate_weight_and_bias: bool = False) -> list[Layer]:
    """The layers of a risk; functions that read parameters of modules without a rule are looked for first.

    Data that can be read only once, and empty ones, are not looked at: such modules keep the generic rule.

    Args:
        separate_weight_and_bias: Give every parameter its own block.

    Cost: once per risk, and only with such modules, a forward pass on three examples.
    """
    with risk.placed():
        uses = find_uses(risk.model, risk.params)
        readable = not is_iterator(risk.data) and not (isinstance(risk.data, Sized) and not len(risk.data))
        if risk.reads is None and GENERIC in [use.rule for use in uses] and readable:
            try:
                look_for_functions(risk)
            except Exception:  # of the model or the data; recording runs them again, and names layers
                risk.reads = FoundReads()
        return find_layers(risk.model, risk.params, separate_weight_and_bias, risk.reads, uses)


def look_for_functions(risk: EmpiricalRisk, batch: Batch | None = None, error: ValueError | None = None) -> None:
    """Look how functions read parameters, and note it in `risk.reads`.

    Args:
        batch: A batch; default: the first of the data.
        error: What recording said of a parameter that is read outside of its layer. It is raised again if what is found
            does not explain it.
    """
    before, keys = risk.reads, {*getattr(error, "keys", ())}
    known = {} if before is None else before.enclosing
    # First how functions read parameters; then the module around a layer of which recorded calls don't tell enough.
    attempts = ([set()] if before is None else []) + ([keys] if keys - known.keys() else [])
    if attempts:
        state = preserve_state(risk.model, risk.data)
        with state, risk.placed(), torch.inference_mode(False), torch.enable_grad():
            batch = next(risk.batches("functions"), None) if batch is None else batch
            if batch is None:  # other processes have examples, and tell what they find
                return
            for enclosed in attempts:
                risk.reads = find_functions(risk, batch, {*enclosed, *known})
                if risk.reads.enclosing.keys() - known.keys() or (before is None and risk.reads.products):
                    return
    if error is not None:
        raise UnsupportedError(str(error)) from error


def find_functions(risk: EmpiricalRisk, batch: Batch, enclosed: Collection[str] = ()) -> FoundReads:
    """How functions read parameters outside of modules with rules, from one batch.

    Args:
        enclosed: Keys of parameters for which neither the rules of their own modules nor products will do.
    """
    uses = find_uses(risk.model, risk.params)
    reads = DryPass(risk, uses, batch).reads
    outside = {key: [read for read in found if not read.answered] for key, found in reads.items()}
    taken = {key for key in reads if key in enclosed or not all(read.product for read in outside[key])}
    calls = [read.product for found in outside.values() for read in found if read.product is not None]
    # Without its weight, the bias of a convolution is on another axis than a vector that is added.
    taken |= {b for function, w, b in calls if b is not None and w in taken and function.name not in ("linear", "bias")}
    found: dict[Any, ModuleUse] = {}
    for function, w, b in calls:
        w, b = (None if key in taken else key for key in (w, b))
        product = (function if w is not None else BIAS), w, b
        if (w or b) and product not in found:
            found[product] = _use(risk, uses, product[0], {n: k for n, k in (("weight", w), ("bias", b)) if k})
    holders = {(use.name, key) for use in uses if use.without_rule for key in use.keys.values()}
    enclosing, modules = {}, dict(risk.model.named_modules())
    for key in [key for key in risk.params if key in taken]:  # sets have another order in other processes
        around = zip(*(read.frames for read in reads[key]))
        common = [*takewhile(lambda frames: len({frame.name for frame in frames}) == 1, around)]
        names = [frames[0].name for frames in common if all(frame.rows for frame in frames)]
        if key not in enclosed and any((name, key) in holders for name in names):
            continue  # its own module sees all of it
        holds = [name for name in names if any(p is risk.params[key] for p in modules[name].parameters())]
        if holds := [name for name in holds if key not in enclosed or (name, key) not in holders or name == ""]:
            enclosing[key] = holds[-1]
    claimed = {key for use in found.values() for key in use.keys.values()}
    apart = [use for use in uses if use.without_rule or claimed & {*use.keys.values()}]
    free = {key for use in apart for key in use.keys.values()} | {*enclosed}
    return FoundReads(tuple(found.values()), enclosing, frozenset(free - reads.keys()))


def _use(risk: EmpiricalRisk, uses: Sequence[ModuleUse], function: Function, keys: dict[str, str]) -> ModuleUse:
    module, rule = function.module(*(risk.params[keys[name]] if name in keys else None for name in ("weight", "bias")))
    first = next(iter(keys.values()))
    holder = next(use for use in uses if first in use.keys.values())
    return ModuleUse(first.removesuffix(".weight"), module, rule, keys, holder.owner, function)


@dataclass(eq=False)
class _Frame:
    """A call of a module.

    Attributes:
        answers: Keys of the parameters that its rule is for.
        whole: Whether it and its children hold their own parameters, no other tensors in their place.
        rows: Whether it takes and returns rows of examples; the model itself does.
    """

    name: str
    answers: set[str]
    whole: bool
    rows: bool = True


@dataclass(eq=False)
class _Read:
    """A function that reads a parameter.

    Attributes:
        frames: The modules that run, outermost first: not the one that answers for the parameter, nor any with other
            tensors in its own's place.
        answered: Whether there is one that answers.
        product: Function, key of the weight and of the bias, if there is a rule for what it does.
    """

    frames: tuple[_Frame, ...]
    answered: bool
    product: tuple[Function, str | None, str | None] | None


class DryPass:
    """A forward pass on three examples, and what reads parameters in it.

    If the input can't be cut, or the model fails on the part, all examples are taken.

    Args:
        uses: The modules that hold parameters.

    Attributes:
        reads: Key to the functions that read the parameter.
    """

    def __init__(self, risk: EmpiricalRisk, uses: list[ModuleUse], batch: Batch) -> None:
        self.risk, self.uses = risk, uses
        self._of_attention = {key for use in uses if use.function is not None for key in use.keys.values()}
        few = take_examples(batch, range(_FEW)) if batch.num_examples > _FEW else None
        try:
            self._run(few or batch)
        except Exception:
            if few is None:
                raise
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        self._examples, self._stack = batch.num_examples, list[_Frame]()
        self._held: dict[str, dict[str, Any]] = {}
        self.reads: dict[str, list[_Read]] = {}
        # Frozen ones, too, leave a trace in what is computed from these.
        self._free = {key: nn.Parameter(p.detach()) for key, p in self.risk.params.items()}
        self._views = ParameterViews(self._free)

        def run(model: nn.Module) -> None:
            self._held = {name: dict(module._parameters) for name, module in model.named_modules()}
            with ExitStack() as hooks:
                for name, module in hookable_modules(model):
                    enter, leave = own_calls(partial(self._enter, name)), own_calls(self._leave)
                    hooks.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                    hook = module.register_forward_hook(leave, always_call=True, with_kwargs=True)
                    hooks.callback(hook.remove)
                with FunctionCalls(self._receive):
                    self.risk.run(batch, model)

        with eager():
            self.risk.at(self._free, run)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        mine = [use for use in self.uses if use.name == name and use.function is None and not use.without_rule]
        answers = {key for use in mine if use.holds(module, self._free) for key in use.keys.values()}
        whole = all(
            child._parameters.get(local) is p
            for inside, child in module.named_modules(prefix=name)
            for local, p in self._held.get(inside, {}).items()
        )
        self._stack.append(_Frame(name, answers, whole))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any = None) -> None:
        frame = self._stack.pop()
        frame.rows = not frame.name or all(map(self._has_rows, ((args, kwargs), out)))

    def _has_rows(self, tree: Any) -> bool:
        """Whether some tensor may carry the examples on its first axis or the second."""
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and not self._views.keys(t)]
        return any(n and n % self._examples == 0 for t in tensors for n in t.shape[:2])

    def _receive(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, examples: int | None
    ) -> Any:
        """One function call."""
        given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
        read = {key for t in given for key in self._views.keys(t)}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad] if read else []
        if not made or all(map(self._views.keys, made)):  # shapes, detached copies, and views of parameters
            return out
        known: dict[str, Any] = {}
        for product in products(function, args, kwargs):
            if (triple := self._product(product, examples)) is not None:
                known |= {key: triple for key in triple[1:] if key is not None}
        for key in read:
            frames = tuple(takewhile(lambda f, key=key: key not in f.answers and f.whole, self._stack))
            product = known.get(key)
            answered = any(key in frame.answers for frame in self._stack)
            answered |= product is not None and product[0] in (LINEAR, BIAS) and key in self._of_attention
            self.reads.setdefault(key, []).append(_Read(frames, answered, product))
        return out

    def _product(self, product: Product, examples: int | None) -> tuple[Function, str | None, str | None] | None:
        """What a call multiplies with or adds, if there is a rule for it and it has rows of examples."""
        function: Function | None = product.function
        weight, bias = self._views.find(product.weight), self._views.find(product.bias)
        of_parameter = bool(self._views.keys(product.input))  # but what attention multiplies with is an input
        if (weight is None and bias is None) or (of_parameter and examples is None):
            return None
        if weight is not None and weight.transposed and function is not None:
            function = function.transpose()
        rows = product.input.shape[0]
        own = rows % self._examples == 0 or (rows == 1 and product.function.name == "embedding")
        if function is None or not (own or examples is not None):
            return None
        params = self.risk.params
        if weight is None or bias is None:
            fits = weight is not None or function.name in ("linear", "bias")
        else:  # rows of a transposed weight are inputs
            whole = bias.rows.stop - bias.rows.start == len(params[bias.key])
            fits = whole if function.transposed else bias.rows == weight.rows
        try:
            w, b = (None if view is None else params[view.key] for view in (weight, bias))
            view = weight or bias
            assert view is not None
            if weight is not None:
                function.module(w, b)[1].at(view.rows, len(params[view.key]))
        except (ValueError, NotImplementedError):
            return None
        keys = [None if view is None else view.key for view in (weight, bias)]
        return (function if weight is not None else BIAS, keys[0], keys[1]) if fits else None


# ---------------------------------------------------------------------------------------------------------- in a state
def describe_reads(reads: FoundReads | None) -> dict[str, Any] | None:
    """What was found, in plain Python."""
    if reads is None:
        return None
    found = []
    for use in reads.products:
        assert use.function is not None
        function = asdict(use.function)
        function["options"] = [[name, [*v] if isinstance(v, tuple) else v] for name, v in use.function.options]
        found.append({"keys": dict(use.keys), "function": function})
    return {"products": found, "enclosing": dict(reads.enclosing), "unread": sorted(reads.unread)}


def rebuild_reads(risk: EmpiricalRisk, data: Mapping[str, Any] | None) -> FoundReads | None:
    """Undo `describe_reads`, for the parameters of a risk.

    Raises:
        ValueError: If the risk has not these parameters.
    """
    if data is None:
        return None
    named = {key for p in data["products"] for key in p["keys"].values()} | data["enclosing"].keys()
    if missing := named - risk.params.keys():
        raise ValueError(f"State mismatch in the parameters: the state has {sorted(missing)}, this risk has not.")
    found = []
    with risk.placed():
        uses = find_uses(risk.model, risk.params)
        for p in data["products"]:
            options = tuple(
                (name, tuple(value) if isinstance(value, list) else value) for name, value in p["function"]["options"]
            )
            found.append(_use(risk, uses, Function(**{**p["function"], "options": options}), dict(p["keys"])))
    return FoundReads(tuple(found), dict(data["enclosing"]), frozenset(data["unread"]))
