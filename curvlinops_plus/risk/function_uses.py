"""Which products with a weight, computed by functions, belong to which layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.functions import Product
from curvlinops_plus.risk.function_calls import ParameterViews, View
from curvlinops_plus.risk.module_uses import ModuleUse, title
from curvlinops_plus.risk.process_state import Uncopied
from curvlinops_plus.risk.recorded_call import RecordedCall


def is_bias(h: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether `out = h + b` adds one number of `b` to each output of a product `h`."""
    return h.shape == out.shape and b.ndim == 1 and b.shape == h.shape[-1:]


class FunctionUses:
    """Finds the layers to which a product belongs, among those that are read by functions.

    A product inside a module that answers for the parameter itself belongs to that module. A bias that is added to a
    product afterwards, `x @ W + b`, belongs to it.

    Args:
        uses: Indices of layers, and their uses by functions.
        params: Key to the tensor that the model reads.
    """

    def __init__(self, uses: Sequence[tuple[int, ModuleUse]], params: Mapping[str, Tensor]) -> None:
        #: Those of several parameters first.
        self._uses = sorted(uses, key=lambda item: -len(item[1].keys))
        self._keys = {key for _, use in uses for key in use.keys.values()}
        self._params = params
        self._views = ParameterViews({key: params[key] for key in self._keys})
        self._total = {key: len(params[key]) for key in self._keys if params[key].ndim}
        #: Keys of the modules that run at the moment, which answer for them.
        self._inside: list[set[str]] = []
        #: Products to which a bias may still be added, by the identity of their result.
        self._open: dict[int, tuple[Tensor, RecordedCall]] = {}
        self._sums: list[RecordedCall] = []

    def watch(self, use: ModuleUse) -> list[Any]:
        """Hooks that tell when a module runs, if functions read the same parameters outside of it."""
        shared = self._keys & set(use.keys.values())
        if not shared:
            return []

        def enter(module: nn.Module, args: Any) -> None:
            self._inside.append(shared if use.holds(module, self._params) else set())

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            if self._inside:
                self._inside.pop()

        return [
            use.module.register_forward_pre_hook(Uncopied(enter)),
            use.module.register_forward_hook(Uncopied(leave), always_call=True),
        ]

    def of(self, product: Product) -> list[tuple[int, ModuleUse]]:
        """The uses that a product is, with indices of their layers, for the rows that it reads."""
        weight, bias = self._view(product.weight), self._view(product.bias)
        function = product.function
        if weight is not None and weight.transposed:
            function = function.transpose()
        reads = {local: view for local, view in (("weight", weight), ("bias", bias)) if view is not None}
        found = []
        for partial in (False, True):  # a product without its bias yet
            for index, use in self._uses:
                mine = {local: key for local, key in use.keys.items() if local in reads and reads[local].key == key}
                fits = "weight" in mine if partial else len(mine) == len(use.keys)
                if mine and fits and use.function == function:
                    found.append((index, self._at(use, mine, [reads.pop(local) for local in mine])))
        return found

    def _view(self, t: Tensor | None) -> View | None:
        view = self._views.find(t)
        return None if view is None or any(view.key in keys for keys in self._inside) else view

    def _at(self, use: ModuleUse, keys: dict[str, str], views: Sequence[View]) -> ModuleUse:
        """The use for a call that reads these keys, and of them these rows."""
        assert isinstance(use.rule, AffineRule)
        assert use.function is not None
        view, *others = views
        if others and not use.function.bias_fits(view.rows, others[0].rows, self._total[others[0].key]):
            raise UnsupportedError(
                f"{title(use.name)}: a call of `{use.function.name}` reads rows {view.rows.start}:{view.rows.stop} of "
                f"its weight and rows {others[0].rows.start}:{others[0].rows.stop} of its bias."
            )
        return replace(use, keys=keys, rule=use.rule.at(view.rows, self._total[view.key]))

    # ------------------------------------------------------------------------------------------- biases added later
    def remember(self, out: Tensor, call: RecordedCall) -> None:
        """A product whose bias may be added later."""
        function = call.call.use.function
        if function is not None and function.adds_last and any("bias" in use.keys for _, use in self._of_weight(call)):
            self._open[id(out)] = out, call

    def add_bias(self, h: Tensor, b: Tensor, out: Tensor) -> None:
        """`h + b`: the bias belongs to the product, if `h` is one."""
        view = self._view(b) if id(h) in self._open else None
        if view is None or not is_bias(h, b, out):
            return
        _, call = self._open[id(h)]
        for _, use in self._of_weight(call):
            if use.keys.get("bias") == view.key and "bias" not in call.call.use.keys:
                call.call.use = replace(call.call.use, keys=use.keys)
                self._sums.append(call)
                return

    def _of_weight(self, call: RecordedCall) -> list[tuple[int, ModuleUse]]:
        mine = call.call.use
        return [
            (index, use)
            for index, use in self._uses
            if use.module is mine.module and use.keys.get("weight") == mine.keys.get("weight")
        ]

    def start(self) -> None:
        """Forget the last forward pass."""
        self.end()
        self._sums.clear()

    def end(self) -> None:
        """The forward pass is over; what it returned need not be kept."""
        self._open.clear()
        self._inside.clear()

    def check_sums(self, consumers: Mapping[Any, int]) -> None:
        """Refuse products that are used with and without the bias that is added to them.

        Args:
            consumers: Number of nodes of the graph that read a recorded output.
        """
        for call in self._sums:
            edge = call.slots[0].edge
            if edge is not None and consumers.get(edge.node, 1) > 1:
                use = call.call.use
                raise UnsupportedError(
                    f"{title(use.name)}: the product with {use.keys['weight']!r} is used before {use.keys['bias']!r} "
                    "is added to it, too, so that the two have different gradients. Add the bias to a product of its "
                    "own, or leave it out of `params`."
                )
