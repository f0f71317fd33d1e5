"""Finding out which functions read parameters, from a forward pass on a few examples.

Modules are known by their types; what a `forward` does with parameters is not. Products with a weight (`F.linear`,
`x @ W.T + b`, `F.conv2d`, ...) become uses of a layer as calls of a module are. A parameter that anything else reads
keeps the rule of the module that holds it, if it has none of its own; see `LayerRule`.

The models that need it are those with modules without a rule of their own, and those where something else than its
layer reads a parameter, which recording notices by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.functions import Function, Product, added_bias, products
from curvlinops_plus.risk.examples import take_examples
from curvlinops_plus.risk.function_calls import FunctionCalls, ParameterViews, View
from curvlinops_plus.risk.function_uses import is_bias
from curvlinops_plus.risk.layers import FoundReads, Layer, ModuleUse, find_layers, find_uses
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import Batch, is_iterator
from curvlinops_plus.risk.risk import EmpiricalRisk

__all__ = ["describe_reads", "find_functions", "layers_of", "look_for_functions", "rebuild_reads"]


def layers_of(risk: EmpiricalRisk, separate_weight_and_bias: bool = False) -> list[Layer]:
    """The layers of a risk; functions that read parameters of modules without a rule are looked for first.

    Data that can be read only once, and empty ones, are not looked at: such modules keep the generic rule.

    Args:
        risk: Model, loss and data.
        separate_weight_and_bias: Give every parameter its own block.

    Cost: once per risk, and only with such modules, two forward passes on two and three examples.
    """
    with risk.placed():
        if risk.reads is None and any(use.without_rule for use in find_uses(risk.model, risk.params)):
            readable = not is_iterator(risk.data) and not (isinstance(risk.data, Sized) and not len(risk.data))
            if readable:
                look_for_functions(risk)
        return find_layers(risk.model, risk.params, separate_weight_and_bias, risk.reads)


def look_for_functions(risk: EmpiricalRisk, batch: Batch | None = None, error: ValueError | None = None) -> None:
    """Look once how functions read parameters, and note it in `risk.reads`.

    Args:
        risk: Model, loss and data.
        batch: A batch; default: the first of the data.
        error: What recording said of a parameter that is read outside of its layer. It is raised again if what is found
            does not explain it.

    Raises:
        ValueError: Naming a parameter and what reads it.
    """
    if risk.reads is None:
        state = preserve_state(risk.model, risk.data)
        with state, risk.placed(), torch.inference_mode(False), torch.enable_grad():
            risk.reads = find_functions(risk, next(risk.batches("functions")) if batch is None else batch)
        if risk.reads.products or risk.reads.enclosing:
            return
    if error is not None:
        where = "".join(f" {key!r} is read by {what}." for key, what in risk.reads.unexplained.items())
        raise ValueError(f"{error}{where}") from error


def find_functions(risk: EmpiricalRisk, batch: Batch) -> FoundReads:
    """How functions read parameters outside of modules with rules, from one batch."""
    N, uses = batch.num_examples, find_uses(risk.model, risk.params)
    passes = [_Pass(risk, uses, batch, n) for n in ((2, 3) if N > 2 else (N,))]
    first, last = passes[0], passes[-1]
    claims, reads = first.claims, list(first.reads)
    same = len(claims) == len(last.claims)
    for claim, other in zip(claims, last.claims if same else claims, strict=True):
        # What has no row for each example has no gradient for each: a weight that a function makes of others.
        if claim.rows is None or other.rows is None or (claim.function.name == "embedding" and claim.rows == 1):
            continue
        if claim.rows % first.examples or (same and claim.rows * last.examples != other.rows * first.examples):
            reads += [_Read(key, claim.where) for key in claim.keys.values()]
    if len(first.rows) == len(last.rows):
        for (read, rows), (_, others) in zip(first.rows, last.rows, strict=True):
            if rows > 1 and rows * last.examples != others * first.examples:
                reads.append(read)
    products = _resolve(risk, uses, claims, reads)
    return FoundReads(products, *_enclose(risk, uses, first.stacks, reads))


def _resolve(
    risk: EmpiricalRisk, uses: Iterable[ModuleUse], claims: Iterable[_Claim], reads: list[_Read]
) -> tuple[ModuleUse, ...]:
    """Uses for those parameters that only products read; what else reads the others is added to `reads`."""
    claims = list(claims)
    while True:
        taken = {read.key for read in reads}
        lost = [claim for claim in claims if claim.keys["weight"] in taken]
        if not lost:
            break
        claims = [claim for claim in claims if claim not in lost]
        reads += [_Read(key, claim.where) for claim in lost for key in claim.keys.values()]
    found: dict[Any, tuple[Function, dict[str, str]]] = {}
    for claim in claims:
        keys = {local: key for local, key in claim.keys.items() if key not in taken}
        found[claim.function, tuple(keys.items())] = claim.function, keys
    # A product without the bias that the same product has elsewhere needs no use of its own.
    kept = [
        (function, keys)
        for function, keys in found.values()
        if not any(f == function and keys.items() < more.items() for f, more in found.values())
    ]
    return tuple(_use(risk, uses, function, keys) for function, keys in kept)


def describe_reads(reads: FoundReads | None) -> dict[str, Any] | None:
    """What was found, in plain Python."""
    if reads is None:
        return None
    products = []
    for use in reads.products:
        function = asdict(use.function)
        function["options"] = [[name, [*v] if isinstance(v, tuple) else v] for name, v in use.function.options]
        products.append({"keys": dict(use.keys), "function": function})
    return {"products": products, "enclosing": dict(reads.enclosing)}


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
    products = []
    with risk.placed():
        uses = find_uses(risk.model, risk.params)
        for p in data["products"]:
            options = tuple(
                (name, tuple(value) if isinstance(value, list) else value) for name, value in p["function"]["options"]
            )
            products.append(_use(risk, uses, Function(**{**p["function"], "options": options}), dict(p["keys"])))
    return FoundReads(tuple(products), dict(data["enclosing"]))


def _use(risk: EmpiricalRisk, uses: Iterable[ModuleUse], function: Function, keys: dict[str, str]) -> ModuleUse:
    params = risk.params
    module, rule = function.module(params[keys["weight"]], params[keys["bias"]] if "bias" in keys else None)
    holder = next(use for use in uses if keys["weight"] in use.keys.values())
    return ModuleUse(keys["weight"].removesuffix(".weight"), module, rule, keys, holder.owner, function)


def _enclose(
    risk: EmpiricalRisk,
    uses: Iterable[ModuleUse],
    stacks: Mapping[str, list[tuple[str, ...]]],
    reads: Iterable[_Read],
) -> tuple[dict[str, str], dict[str, str]]:
    """Modules that enclose all reads of a parameter that its own module does not, and reads outside of the model."""
    enclosing: dict[str, str] = {}
    outside: dict[str, str] = {}
    modules = dict(risk.model.named_modules())
    for read in reads:
        if read.key in enclosing or read.key in outside:
            continue
        common = _common_start(stacks[read.key])
        holders = [use.name for use in uses if read.key in use.keys.values() and use.without_rule]
        if any(name in common for name in holders):
            continue  # its own module sees all of it
        p = risk.params[read.key]
        around = [name for name in common if any(q is p for q in modules[name].parameters())]
        if around:
            enclosing[read.key] = around[-1]
        else:
            outside[read.key] = read.where
    return enclosing, outside


def _common_start(stacks: list[tuple[str, ...]]) -> list[str]:
    """The modules that all stacks begin with."""
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*stacks))]


@dataclass(eq=False)
class _Read:
    """Something that reads a parameter and is no product.

    Attributes:
        key: The parameter.
        where: What reads it, in words.
    """

    key: str
    where: str


@dataclass(eq=False)
class _Claim:
    """A product with a weight.

    Attributes:
        function: The function, with the parameter as it is stored.
        keys: Local name to key.
        rows: Leading size of its input; None inside attention, where examples are on another axis.
        where: Where it was, in words.
        out: Its result.
        whole: Whether all rows of the weight are read.
        consumers: How many functions read the result.
        added: Keys of the vectors that are added to the result.
    """

    function: Function
    keys: dict[str, str]
    rows: int | None
    where: str
    out: Tensor
    whole: bool
    consumers: int = 0
    added: list[str] = field(default_factory=list)


class _Pass:
    """A forward pass on some examples, and what read parameters in it.

    Attributes:
        examples: The number of examples.
        claims: The products, in the order in which they happened.
        reads: What else read parameters.
        stacks: Key to the names of the modules that ran at each of its reads, outermost first.
        rows: Calls of modules with affine rules: a read that they would be, and the leading size of their output.
    """

    def __init__(self, risk: EmpiricalRisk, uses: list[ModuleUse], batch: Batch, examples: int) -> None:
        self.risk, self.uses = risk, uses
        few = take_examples(batch, list(range(examples))) if examples < batch.num_examples else batch
        try:
            self._run(few or batch)
        except Exception:
            if few is None or few is batch:
                raise
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        self.examples = batch.num_examples
        self.claims: list[_Claim] = []
        self.reads: list[_Read] = []
        self._products: dict[int, _Claim] = {}
        self.stacks: dict[str, list[tuple[str, ...]]] = {}
        self.rows: list[tuple[_Read, int]] = []
        self._inside: list[str] = []
        free = {key: p.detach().requires_grad_() for key, p in self.risk.params.items()}
        self._views = ParameterViews(free)
        with torch.compiler.set_stance("force_eager"):
            outputs = self.risk.at(free, lambda model: self._forward(batch, model))
        for t in tree_leaves(outputs):
            if id(t) in self._products:
                self._products[id(t)].consumers += 1
        for claim in self.claims:
            if len(claim.added) == 1 and claim.consumers == 1:
                claim.keys["bias"] = claim.added[0]
            else:
                self.reads += [_Read(key, "an addition") for key in claim.added]

    def _forward(self, batch: Batch, model: nn.Module) -> Any:
        with self._watching(), FunctionCalls(self._receive):
            return self.risk.run(batch, model)[0]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Know which module runs, and the parameters that it answers for."""
        self._answers: dict[str, set[str]] = {}
        for use in self.uses:
            if not use.functional and not use.without_rule:
                self._answers.setdefault(use.name, set()).update(use.keys.values())
        handles: list[Any] = []
        for name, module in self.risk.model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda m, args, name=name: self._inside.append(name)))
            handles.append(module.register_forward_hook(partial(self._leave, name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        """The forward hook of a module."""
        self._inside.pop()
        axis = (self.risk.options.example_axis or {}).get(name, 0)
        affine = any(use.name == name and isinstance(use.rule, AffineRule) for use in self.uses)
        if affine and isinstance(out, Tensor) and out.ndim > axis:
            for key in self._answers.get(name, ()):
                self.rows.append((_Read(key, f"{type(module).__name__} {name!r}"), out.shape[axis]))

    def _receive(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, examples: int | None
    ) -> Any:
        """One function call."""
        given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
        for t in given:
            if id(t) in self._products:
                self._products[id(t)].consumers += 1
        read = {key for t in given for key in self._views.keys(t)}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if not read or not made or all(map(self._views.keys, made)):  # shapes, detached copies, views
            return out
        for key in read:
            around = [name for name in self._inside if key not in self._answers.get(name, ())]
            self.stacks.setdefault(key, []).append(tuple(around))
        read -= {key for name in self._inside for key in self._answers.get(name, ())}
        if not read:
            return out
        where = f"`{getattr(function, '__name__', function)}` in {self._place}"
        for h, b in added_bias(function, args, kwargs):
            if id(h) in self._products and self._add(self._products[id(h)], h, b, out):
                read -= {self._products[id(h)].added[-1]}
        claims = [claim for p in products(function, args, kwargs) if (claim := self._claim(p, out, examples, where))]
        if len(claims) == 1:
            (claim,) = claims
            read -= set(claim.keys.values())
            known = {key for use in self.uses if use.function == claim.function for key in use.keys.values()}
            if not known & set(claim.keys.values()):  # else attention, which is known
                self.claims.append(claim)
                self._products[id(out)] = claim
        self.reads += [_Read(key, where) for key in read]
        return out

    @property
    def _place(self) -> str:
        """Where the model is, in words."""
        if not self._inside:
            return "the selection of the output"
        name = self._inside[-1]
        kind = type(self.risk.model.get_submodule(name)).__name__
        return f"the forward of {kind} {name!r}" if name else f"{kind}.forward"

    def _add(self, claim: _Claim, h: Tensor, b: Tensor, out: Tensor) -> bool:
        """`h + b` of a product: note the bias."""
        view = self._views.find(b)
        if view is None or not is_bias(h, b, out) or not claim.function.adds_last or "bias" in claim.keys:
            return False
        if not claim.whole or view.rows.stop - view.rows.start != len(self.risk.params[view.key]):
            return False
        claim.added.append(view.key)
        return True

    def _claim(self, product: Product, out: Tensor, examples: int | None, where: str) -> _Claim | None:
        """A product with a tracked weight for which there is a rule."""
        weight, bias = self._views.find(product.weight), self._views.find(product.bias)
        if weight is None or any(self._views.keys(x) for x in product.inputs):
            return None
        function: Function | None = product.function
        if weight.transposed and function is not None:
            function = function.transpose()
        total = len(self.risk.params[weight.key])
        whole = weight.rows.stop - weight.rows.start == total
        if function is None or (bias is not None and not self._bias_fits(weight, bias)):
            return None
        keys = {"weight": weight.key} if bias is None else {"weight": weight.key, "bias": bias.key}
        params = self.risk.params
        try:
            _, rule = function.module(params[weight.key], None if bias is None else params[bias.key])
            rule.at(weight.rows, total)
        except (ValueError, NotImplementedError):
            return None
        rows = product.inputs[0].shape[0] if examples is None else None
        return _Claim(function, keys, rows, where, out, whole)

    def _bias_fits(self, weight: View, bias: View) -> bool:
        """Whether the rows of a bias are those of its weight; of a transposed weight, all of them."""
        if bias.rows == weight.rows:
            return True
        return weight.transposed and bias.rows.stop - bias.rows.start == len(self.risk.params[bias.key])
