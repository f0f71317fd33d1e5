"""The linearisation of one batch that stays: graphs of the outputs, and of their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten

from curvlinops_plus.exact.batched import add_vjp, split_rows, vjp
from curvlinops_plus.exact.model_passes import Outputs
from curvlinops_plus.risk.graph import edge_of, postorder


@dataclass(eq=False)
class KeptGraph:
    """The graph of outputs `F`, and that of `Jᵀ w` as a function of `w`.

    Attributes:
        F: Outputs, with their graph.
        free: The parameters in that graph.
        w: Vectors of the outputs' shapes.
        back: Where `Jᵀ w` is in the graph, which is linear in `w`; None for parameters that no output depends on.
        saved: The tensors that both hold, and their versions.
    """

    F: Outputs
    free: list[Tensor]
    w: list[Tensor]
    back: list[GradientEdge | None]
    saved: list[tuple[Tensor, int]]

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was written to its tensors, as far as PyTorch was told."""
        return all(t._version == version for t, version in self.saved)

    def jvp(self, row: Tensor) -> list[Tensor]:
        """`J v` for one vector, [1, n] -> [1, *output]."""
        used = [(edge, v) for edge, v in zip(self.back, split_rows(row, self.free), strict=True) if edge is not None]
        found = vjp([edge for edge, _ in used], self.w, [v for _, v in used])
        return [torch.zeros_like(f)[None] if t is None else t.detach() for f, t in zip(self.F, found, strict=True)]

    def vjp(self, vectors: Sequence[Tensor]) -> list[Tensor | None]:
        """The parts of `Jᵀ u` for vectors [1, *output]."""
        return vjp(self.F, self.free, [u.to(f.dtype) for f, u in zip(self.F, vectors, strict=True)])

    def add_vjp(self, vectors: Sequence[Tensor], total: Tensor) -> Tensor:
        """`total + Jᵀ u`, [1, n], in place, for vectors [1, *output]."""
        return add_vjp(self.F, self.free, [u.to(f.dtype) for f, u in zip(self.F, vectors, strict=True)], total)

    def bytes(self, others: Iterable[Tensor]) -> int:
        """What its tensors hold, without the storages of others."""
        tensors = [*(t for t, _ in self.saved), *self.F]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        for t in (*self.free, *others):
            held.pop(t.untyped_storage().data_ptr(), None)
        return sum(held.values())


def kept_graph(F: Outputs, free: list[Tensor]) -> KeptGraph | None:
    """The graphs; None where products from them would be slow, or outputs are constants.

    Args:
        F: Outputs, with a graph.
        free: Parameters, leaves of that graph.
    """
    forward = [node for node, _ in postorder([f.grad_fn for f in F])]
    if not all(f.requires_grad for f in F) or any("Convolution" in node.name() for node in forward):
        return None
    w = [torch.zeros((), dtype=f.dtype, device=f.device).expand(f.shape).requires_grad_() for f in F]
    back = _places_of_gradients(F, free, w)
    own = {get_gradient_edge(t).node for t in w}
    nodes = [*postorder(edge.node for edge in back if edge is not None)]
    _drop_what_depends_on(own, nodes)
    found = {id(t): t for t in _saved([*forward, *(node for node, _ in nodes)])}
    return KeptGraph(F, free, w, back, [(t, t._version) for t in found.values()])


def _places_of_gradients(F: Outputs, free: list[Tensor], w: list[Tensor]) -> list[GradientEdge | None]:
    """Where `Jᵀ w` is in a graph; each gradient, which is zero, goes before the next one is made."""
    back: list[GradientEdge | None] = [None] * len(free)

    def note(k: int, g: Tensor) -> Tensor:
        back[k] = edge_of(g) if g.requires_grad else None
        return g.detach().new_zeros(()).expand(g.shape)

    hooks = [p.register_hook(partial(note, k)) for k, p in enumerate(free)]
    try:
        torch.autograd.grad(F, free, w, create_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return back


def _drop_what_depends_on(own: set[Any], nodes: Iterable[tuple[Any, list[Any]]]) -> None:
    """Let nodes forget saved tensors that depend on `w`.

    `Jᵀ w` is linear in `w`, so its derivative needs none of them. In their place are NaNs: a formula that did use one
    would give no number.

    Args:
        own: Nodes of `w`.
        nodes: The graph, nodes after those below.
    """
    dependent = set(own)
    for node, below in nodes:
        if not dependent.isdisjoint(below):
            dependent.add(node)
    for node in dependent - own:
        for name in dir(type(node)):
            if not name.startswith("_raw_saved_"):
                continue
            raw, tensors = getattr(node, name), getattr(node, name.replace("_raw", "", 1))
            raws, tensors = (x if isinstance(x, (tuple, list)) else (x,) for x in (raw, tensors))
            for one, t in zip(raws, tensors, strict=True):
                if isinstance(t, Tensor) and t.grad_fn in dependent:
                    one.register_hooks(_nothing, _filler(t))


def _nothing(t: Tensor) -> None:
    """What is packed instead of a tensor."""


def _filler(t: Tensor) -> Callable[[None], Tensor]:
    shape, nan = t.shape, torch.full((), math.nan, dtype=t.dtype, device=t.device)
    return lambda _: nan.expand(shape)


def _saved(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that nodes of a graph hold."""
    for node in nodes:
        names = [name for name in dir(type(node)) if name.startswith("_saved_")]
        for value in [*(getattr(node, name) for name in names), getattr(node, "saved_tensors", ())]:
            yield from (t for t in tree_flatten(value)[0] if isinstance(t, Tensor))
