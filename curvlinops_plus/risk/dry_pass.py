"""What reads parameters in a forward pass on a few examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.functions import Function, Product, added_bias, products
from curvlinops_plus.risk.examples import take_examples
from curvlinops_plus.risk.function_calls import FunctionCalls, ParameterViews
from curvlinops_plus.risk.function_uses import is_bias
from curvlinops_plus.risk.module_uses import ModuleUse
from curvlinops_plus.risk.process_state import eager, hookable_modules, own_calls
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.risk import EmpiricalRisk


@dataclass(eq=False)
class Read:
    """Something that reads a parameter and is no product.

    Attributes:
        where: What reads it, in words.
    """

    key: str
    where: str


@dataclass(eq=False)
class Claim:
    """A product with a weight.

    Attributes:
        function: The function, with the parameter as it is stored.
        keys: Local name to key.
        rows: Leading size of its input; None inside attention, where examples are on another axis.
        where: Where it was, in words.
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


@dataclass(eq=False)
class _Running:
    """A module that runs.

    Attributes:
        answers: Keys of the parameters that its rule is for.
        whole: Whether it and its children hold their own parameters, no other tensors in their place.
    """

    name: str
    answers: set[str]
    whole: bool


class DryPass:
    """A forward pass on some examples, and what reads parameters in it.

    Args:
        uses: The modules that hold parameters.
        examples: How many of them to take. If the input can't be cut, or the model fails on the part, all.

    Attributes:
        examples: The number of examples.
        claims: The products, in the order in which they happened.
        reads: What else read parameters.
        stacks: Key to the names of the modules that ran at each of its reads, outermost first.
        rows: Calls of modules with affine rules: a read that they would be, and the leading size of their output.
        sizes: Name of a module to the leading sizes of what its calls return.
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
        self.claims: list[Claim] = []
        self.reads: list[Read] = []
        self._products: dict[int, Claim] = {}
        self.stacks: dict[str, list[tuple[str, ...]]] = {}
        self.rows: list[tuple[Read, int]] = []
        self.sizes: dict[str, list[int]] = {}
        self._inside: list[_Running] = []
        free = {key: nn.Parameter(p.detach()) for key, p in self.risk.params.items()}
        self._free, self._views = free, ParameterViews(free)
        with eager():
            outputs = self.risk.at(free, lambda model: self._forward(batch, model))
        for t in tree_leaves(outputs):
            if id(t) in self._products:
                self._products[id(t)].consumers += 1
        for claim in self.claims:
            if len(claim.added) == 1 and claim.consumers == 1:
                claim.keys["bias"] = claim.added[0]
            else:
                self.reads += [Read(key, "an addition") for key in claim.added]

    def _forward(self, batch: Batch, model: nn.Module) -> Any:
        self._held = {name: dict(module._parameters) for name, module in model.named_modules()}
        with self._watching(), FunctionCalls(self._receive):
            return self.risk.run(batch, model)[0]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Know which module runs, and the parameters that it answers for."""
        handles: list[Any] = []
        for name, module in hookable_modules(self.risk.model):
            enter, leave = own_calls(partial(self._enter, name)), own_calls(self._leave)
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        mine = [use for use in self.uses if use.name == name and use.function is None and not use.without_rule]
        answers = {key for use in mine if use.holds(module, self._free) for key in use.keys.values()}
        whole = all(
            child._parameters.get(local) is p
            for inside, child in module.named_modules(prefix=name)
            for local, p in self._held.get(inside, {}).items()
        )
        self._inside.append(_Running(name, answers, whole))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        running = self._inside.pop()
        axis = (self.risk.options.example_axis or {}).get(running.name, 0)
        found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        sizes = [t.shape[axis] if t.ndim > axis else 1 for t in found]
        self.sizes.setdefault(running.name, []).extend(sizes)
        if any(use.name == running.name and isinstance(use.rule, AffineRule) for use in self.uses):
            read = f"{type(module).__name__} {running.name!r}"
            self.rows += [(Read(key, read), size) for key in sorted(running.answers) for size in sizes[:1]]

    def _receive(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, examples: int | None
    ) -> Any:
        """One function call."""
        given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
        for t in given:
            if id(t) in self._products:
                self._products[id(t)].consumers += 1
        read = {key for t in given for key in self._views.keys(t)}
        if not read or not self._computes(out):
            return out
        for key in read:
            self.stacks.setdefault(key, []).append(self._around(key))
        read -= {key for m in self._inside for key in m.answers}
        if read:
            where = f"`{getattr(function, '__name__', function)}` in {self._place}"
            read -= self._added(function, args, kwargs, out)
            found = products(function, args, kwargs)
            read -= self._lone_biases(found)
            read -= self._claimed([self._claim(p, out, examples, where) for p in found])
            self.reads += [Read(key, where) for key in read]
        return out

    def _around(self, key: str) -> tuple[str, ...]:
        """Modules that run: not the one that answers for a parameter, nor any with other tensors in its own's place."""
        return tuple(m.name for m in takewhile(lambda m: key not in m.answers and m.whole, self._inside))

    def _computes(self, out: Any) -> bool:
        """Whether a result depends on parameters and is more than a view of them; not shapes, nor detached copies."""
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        return bool(made) and not all(map(self._views.keys, made))

    def _lone_biases(self, found: Iterable[Product]) -> set[str]:
        """Keys of biases whose weights are not tracked, but which are known to be read like that, by attention."""
        pairs = [(p.function, self._views.find(p.bias)) for p in found if self._views.find(p.weight) is None]
        biases = {(function, view.key) for function, view in pairs if view is not None}
        return {
            use.keys["bias"]
            for use in self.uses
            if [*use.keys] == ["bias"] and (use.function, use.keys["bias"]) in biases
        }

    def _claimed(self, found: list[Claim | None]) -> set[str]:
        """Note a product, if a call is just one; the keys that it explains."""
        claims = [claim for claim in found if claim is not None]
        if len(claims) != 1:
            return set()
        (claim,) = claims
        keys = set(claim.keys.values())
        known = {key for use in self.uses if use.function == claim.function for key in use.keys.values()}
        if not known & keys:  # else attention, which is known
            self.claims.append(claim)
            self._products[id(claim.out)] = claim
        return keys

    def _added(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> set[str]:
        """Note the bias that is added to a product; its key."""
        for h, b in added_bias(function, args, kwargs):
            if id(h) in self._products and self._add(self._products[id(h)], h, b, out):
                return {self._products[id(h)].added[-1]}
        return set()

    @property
    def _place(self) -> str:
        """Where the model is, in words."""
        if not self._inside:
            return "the selection of the output"
        name = self._inside[-1].name
        kind = type(self.risk.model.get_submodule(name)).__name__
        return f"the forward of {kind} {name!r}" if name else f"{kind}.forward"

    def _add(self, claim: Claim, h: Tensor, b: Tensor, out: Tensor) -> bool:
        """`h + b` of a product: note the bias."""
        view = self._views.find(b)
        if view is None or not is_bias(h, b, out) or not claim.function.adds_last or "bias" in claim.keys:
            return False
        if not claim.whole or view.rows.stop - view.rows.start != len(self.risk.params[view.key]):
            return False
        claim.added.append(view.key)
        return True

    def _claim(self, product: Product, out: Tensor, examples: int | None, where: str) -> Claim | None:
        """A product with a tracked weight for which there is a rule."""
        weight, bias = self._views.find(product.weight), self._views.find(product.bias)
        # A product of two parameters; but what attention multiplies its weights with is an input, whatever it is.
        if weight is None or (examples is None and any(self._views.keys(x) for x in product.inputs)):
            return None
        function: Function | None = product.function
        if weight.transposed and function is not None:
            function = function.transpose()
        total = len(self.risk.params[weight.key])
        whole = weight.rows.stop - weight.rows.start == total
        if function is None:
            return None
        if bias is not None and not function.bias_fits(weight.rows, bias.rows, len(self.risk.params[bias.key])):
            return None
        keys = {"weight": weight.key} if bias is None else {"weight": weight.key, "bias": bias.key}
        params = self.risk.params
        try:
            _, rule = function.module(params[weight.key], None if bias is None else params[bias.key])
            rule.at(weight.rows, total)
        except (ValueError, NotImplementedError):
            return None
        rows = product.inputs[0].shape[0] if examples is None else None
        return Claim(function, keys, rows, where, out, whole)
