"""Linearisations that stay between products: a product needs no forward pass then.

Of a batch the graph of the outputs `F` is kept, and that of `Jᵀ w` as a function of `w`. `J v` is the derivative of the
latter, `Jᵀ M J v` a backward pass through the former. That is less work than a forward pass with tangents and a
backward pass, but for convolutions, whose second derivatives are slow. Memory is bounded, and nothing is used again
unless model and data are proved to be the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map_only

from curvlinops_plus.exact.batched import agree, is_generic, join_rows, split_rows, vjp
from curvlinops_plus.exact.random_state import random_state, set_random_state
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.autograd_graph import postorder
from curvlinops_plus.risk.examples import take_examples
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.repeatable import are_examples_clear

__all__ = ["KeptLinearizations"]

Outputs = Sequence[Tensor]
_SIMPLE = (bool, int, float, str, type(None))
OutputProduct = Callable[[Outputs, Any], Callable[[list[Tensor]], Sequence[Tensor | None]]]


@dataclass(eq=False)
class _Kept:
    """The linearisation of one batch.

    Attributes:
        batch: A copy of the batch, from which it was computed.
        F: Outputs, with their graph.
        extra: What was read beside them.
        free: The parameters in that graph.
        w: Vectors of the outputs' shapes.
        back: Where `Jᵀ w` is in the graph, which is linear in `w`; None for parameters that no output depends on.
        bytes: What it holds.
    """

    batch: Batch
    F: Outputs
    extra: Any
    free: list[Tensor]
    w: list[Tensor]
    back: list[GradientEdge | None]
    bytes: int

    def product(
        self, rows: Tensor, output_product: OutputProduct, total: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], Sequence[Tensor | None]]:
        """`Jᵀ M J v` for `rows` [1, n], added to `total` if there is one; and `J v` and `M J v` on the way."""
        used = [(g, v) for g, v in zip(self.back, split_rows(rows, self.free), strict=True) if g is not None]
        found = vjp([g for g, _ in used], self.w, [v for _, v in used])
        JV = [torch.zeros_like(f)[None] if t is None else t.detach() for f, t in zip(self.F, found, strict=True)]
        MJV = output_product(self.F, self.extra)(JV)
        sent = [(f, u.to(f.dtype)) for f, u in zip(self.F, MJV, strict=True) if u is not None]
        parts = vjp([f for f, _ in sent], self.free, [u for _, u in sent])
        return join_rows(parts, self.free, 1, rows.dtype, total), JV, MJV


class KeptLinearizations:
    """The linearisations of some batches of a data set, in the order in which they come.

    They are made in the second of two products with the same model, and dropped as soon as something of it changes:
    parameters and buffers (by identity, version and bits), modes, hooks and simple attributes of modules; or the
    outputs of an example of the first batch in a single bit. A batch has to be equal to the one that is kept.

    Args:
        risk: Model, parameters and data; the matrix of every loss is known from the output.
        read: As in `Linearizer`.
        max_bytes: The largest memory that all of them may hold.
    """

    def __init__(self, risk: EmpiricalRisk, read: Callable[[nn.Module, Batch], Any], max_bytes: int) -> None:
        self.risk, self.read, self.max_bytes = risk, read, max_bytes
        self._forget()

    def _forget(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._marks: Any = None  # of the model in the product before
        self._same = 0  # products since the model changed, which were as good as a kept linearisation allows
        self._patience = 1  # products that it must not change in, before something is kept
        self._sample: tuple[Batch, list[Tensor]] | None = None  # an example, and the model's outputs
        self._off = self.max_bytes <= 0

    def __getstate__(self) -> dict[str, Any]:  # graphs can't be copied or stored
        return {"risk": self.risk, "read": self.read, "max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def product(
        self,
        index: int,
        batch: Batch,
        rows: Tensor,  # [1, n]
        output_product: OutputProduct,
        numbers: int,
        total: Tensor | None = None,
    ) -> Tensor | None:
        """`Jᵀ M J v` of batch number `index` from its linearisation; None if there is none, and nothing happened.

        Args:
            index: Number of the batch in this pass; they come in order.
            batch: The batch.
            rows: The vector.
            output_product: As in `Linearizer.ggn_product`, but that of a batch may be asked for twice.
            numbers: How many numbers operations of a forward pass return per example, about.
            total: What the product is added to, if it is not the first one; it is returned then.
        """
        if self._off:
            return None
        if not index:
            self._look()
        kept = self._kept.get(index)
        if kept is not None:
            if _equal(kept.batch, batch):
                return self._at(kept.free, lambda model: kept.product(rows, output_product, total)[0])
            self._changed()
        if self._same <= self._patience or kept is not None:
            return None
        if self.max_bytes - self._used() < numbers * batch.num_examples * self.risk.dtype.itemsize:
            self._off = not self._kept and not index  # not even the first one fits
            return None
        if not is_generic(rows[0], self._params):
            return None
        found = self._keep(index, batch, rows, output_product)
        return found if found is None or total is None else total.add_(found)

    @property
    def _params(self) -> list[Tensor]:
        return list(self.risk.params.values())

    def _at(self, free: list[Tensor], function: Callable[[nn.Module], Any]) -> Any:
        return self.risk.at(dict(zip(self.risk.params, free, strict=True)), function)

    # --------------------------------------------------------------------------------------------------- is it the same
    def _look(self) -> None:
        """At the beginning of a product: is the model the one that it was?"""
        marks = _marks([self.risk.model, *(one.loss for one in self.risk.losses)], self._params)
        if self._marks is None:
            self._same = 1  # there was a product before, which found out how to differentiate
        elif marks != self._marks or (self._sample is not None and not self._repeats(*self._sample)):
            self._changed()
        self._marks, self._same = marks, self._same + 1

    def _changed(self) -> None:
        if self._kept and self._same < self._patience + 3:
            self._patience *= 2  # making them took more than they saved
        self._kept, self._sample, self._same = {}, None, 0

    def _repeats(self, batch: Batch, before: list[Tensor]) -> bool:
        now = self._evaluate(batch)
        return now is not None and len(now) == len(before) and all(map(torch.equal, now, before))

    def _evaluate(self, batch: Batch) -> list[Tensor] | None:
        """The model's outputs; None if it fails, as one that needs its whole batch does."""
        try:
            with torch.no_grad():
                found = self._at([p.detach() for p in self._params], lambda model: self.read(model, batch)[0])
        except Exception:
            return None
        return [f.clone() for f in found]

    # ------------------------------------------------------------------------------------------------------ making one
    def _keep(self, index: int, batch: Batch, rows: Tensor, output_product: OutputProduct) -> Tensor | None:
        """The product with a linearisation that is made, if it is right and fits; it is kept then."""
        state = random_state(self.risk.device)
        try:
            made = self._linearize(batch)
            if made is not None and self._take_sample(made) and _same_states(state, random_state(self.risk.device)):
                if self._used() + made.bytes > self.max_bytes:
                    self._off = not self._kept
                    return None
                found, JV, MJV = self._at(made.free, lambda model: made.product(rows, output_product))
                u = [Mv for Mv in MJV if Mv is not None]
                if len(u) == len(JV) and agree(rows, JV, u, found, made.F):
                    self._kept[index] = made
                    return found
        except RuntimeError:  # an operation that can't be differentiated twice; all else fails again
            pass
        self._off, self._kept, self._sample = True, {}, None
        set_random_state(self.risk.device, state)
        return None

    def _used(self) -> int:
        return sum(kept.bytes for kept in self._kept.values())

    def _take_sample(self, made: _Kept) -> bool:
        """Whether there is an example whose outputs tell that the model is the same."""
        if self._sample is None and are_examples_clear(made.batch, self.risk.options):
            few = take_examples(made.batch, [0])
            outputs = None if few is None else self._evaluate(few)
            self._sample = None if few is None or outputs is None else (few, outputs)
        return self._sample is not None

    def _linearize(self, batch: Batch) -> _Kept | None:
        """The linearisation of a batch, None where products from it would be slow, or not right."""
        batch = Batch(_copies(batch.X), _copies(batch.y), batch.num_examples, batch.unpack)
        free = [p.detach().requires_grad_() for p in self._params]
        F, extra = self._at(free, lambda model: self.read(model, batch))
        if not all(f.requires_grad for f in F) or any(_is_slow(node) for node, _ in postorder([f.grad_fn for f in F])):
            return None
        w = [torch.zeros_like(f, requires_grad=True) for f in F]
        back = self._at(free, lambda model: torch.autograd.grad(F, free, w, create_graph=True, allow_unused=True))
        # The gradients themselves are zero.
        edges = [get_gradient_edge(g) if g is not None and g.requires_grad else None for g in back]
        return _Kept(batch, F, extra, free, w, edges, self._bytes(F, edges, [*F, *w, *_tensors(batch)]))

    def _bytes(self, F: Outputs, edges: Sequence[GradientEdge | None], more: Sequence[Tensor]) -> int:
        """What graphs hold, and some tensors, without parameters and buffers."""
        graph = postorder([*(f.grad_fn for f in F), *(edge.node for edge in edges if edge is not None)])
        tensors = [*_saved(node for node, _ in graph), *more]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        for p in (*self._params, *self.risk.model.buffers()):
            held.pop(p.untyped_storage().data_ptr(), None)
        return sum(held.values())


# ------------------------------------------------------------------------------------------------------------- helpers
def _same_states(one: Any, other: Any) -> bool:
    return all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _is_slow(node: Any) -> bool:
    return "Convolution" in node.name()


def _saved(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that nodes of a graph hold."""
    for node in nodes:
        names = [name for name in dir(type(node)) if name.startswith("_saved_")]
        for value in [*(getattr(node, name) for name in names), getattr(node, "saved_tensors", ())]:
            yield from (t for t in tree_flatten(value)[0] if isinstance(t, Tensor))


def _tensors(batch: Batch) -> list[Tensor]:
    leaves = tree_flatten((batch.X, batch.y))[0]
    return [t for t in leaves if isinstance(t, Tensor)]


def _copies(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().clone(), tree)


def _equal(one: Batch, other: Batch) -> bool:
    """Whether two batches are equal; False where it can't be told."""
    a, b = tree_flatten((one.X, one.y)), tree_flatten((other.X, other.y))
    if a[1] != b[1] or one.num_examples != other.num_examples or one.unpack != other.unpack:
        return False
    for s, t in zip(a[0], b[0], strict=True):
        if isinstance(s, Tensor) and isinstance(t, Tensor):
            if s.dtype != t.dtype or s.shape != t.shape or s.stride() != t.stride() or not torch.equal(s, t):
                return False
        elif not (isinstance(s, _SIMPLE) and type(s) is type(t) and s == t):
            return False
    return True


def _marks(roots: Sequence[Any], params: Sequence[Tensor]) -> list[Any]:
    """What changes when parameters, buffers, modes, hooks or simple attributes of modules do."""
    modules = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
    held = [[*m._parameters.values(), *m._buffers.values()] for m in modules]
    different = list({id(t): t for t in itertools.chain(params, *held) if t is not None}.values())
    bits = torch.stack([_bits(t).to(different[0].device) for t in different]).tolist()
    tensors = [(id(t), None if t.is_inference() else t._version, t.data_ptr(), t.shape, t.dtype) for t in different]
    return [[_mark(m) for m in modules], [[*map(id, own)] for own in held], tensors, bits]


def _mark(m: nn.Module) -> tuple[Any, ...]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [tuple(getattr(m, kind, ())) for kind in kinds]
    return id(m), type(m), hooks, {name: value for name, value in vars(m).items() if isinstance(value, _SIMPLE)}


def _bits(t: Tensor) -> Tensor:
    """The sum of the bits of a tensor, taken for integers: a write to `t.data` tells no version counter."""
    flat, size = t.detach().flatten(), t.element_size()
    if (flat.storage_offset() * size) % 8 == 0 and (flat.numel() * size) % 8 == 0:
        return flat.view(torch.int64).sum()  # four times as fast
    return flat.view(torch.uint8).sum(dtype=torch.int64)
