"""One call of a layer while its batch is alive: where its gradients arrive, and what it must not change meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.risk.layer_batch import Call
from curvlinops_plus.risk.layers import Use, title

__all__ = ["Event", "Port", "connect", "isolate", "make_event"]


@dataclass(eq=False)
class Port:
    """One tensor that a call returned, and its gradient's way back.

    Attributes:
        out: The tensor's shape, dtype and device, on an empty tensor that takes no memory.
        axis: The axis that carries the examples.
        fold: Number of examples if that axis carries positions and, inside them, examples.
        expanded: Whether it was one row for all examples before.
        edge: Where autograd delivers the gradient.
        handle: Of the hook that receives it.
    """

    out: Tensor
    axis: int
    fold: int | None = None
    expanded: bool = False
    edge: Any = None
    handle: Any = None

    def arrange(self, t: Tensor, lead: int = 0) -> Tensor:
        """The same numbers with the examples first, after `lead` leading axes."""
        if self.fold is not None:
            t = t.unflatten(lead, (-1, self.fold))
        return t.movedim(self.axis + lead, lead)

    def zeros(self, V: int) -> Tensor:
        """A gradient of zeros for V vectors, examples first."""
        return self.arrange(self.out.new_zeros(V, *self.out.shape), 1)


@dataclass(eq=False)
class Event:
    """A call while its batch is alive.

    Attributes:
        call: What a `LayerBatch` shows of it.
        layer: Index of its layer.
        ports: What it returned, one port per floating-point tensor.
        single: Whether it returned just one tensor.
        versions: Its inputs and their versions, to notice changes in place.
    """

    call: Call
    layer: int
    ports: list[Port]
    single: bool
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    @property
    def expanded(self) -> bool:
        """Whether it returned one row for all examples."""
        return any(port.expanded for port in self.ports)

    def receive(self, grads: Mapping[int, Tensor | None], V: int, lead: int) -> None:
        """Take the gradients of the ports (by identity), zeros where there are none.

        Args:
            grads: Identity of a port to its gradient.
            V: Number of vectors.
            lead: 1 if the gradients have a leading axis of vectors, else 0.
        """
        arranged = []
        for port in self.ports:
            g = grads.get(id(port))
            t = port.zeros(V) if g is None else port.arrange(g, lead)
            arranged.append(t if g is None or lead else t[None])
        self.call.grads = arranged[0] if self.single else arranged

    def forget(self) -> None:
        """Let go of the graph."""
        for port in self.ports:
            if port.handle is not None:
                port.handle.remove()
            port.edge = port.handle = None


def make_event(
    use: Use,
    layer: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ports: list[Port],
    single: bool,
    axis: int,
    num_examples: int,
    fold: int | None = None,
) -> Event:
    """Note a call: its inputs with the examples first, and their versions.

    Raises:
        UnsupportedError: If the axes taken for the examples' don't carry them.
    """
    N, where = num_examples, f"{title(use.name)} ({type(use.owner).__name__})"
    affine = use.rule if isinstance(use.rule, AffineRule) else None
    for port in ports:
        size = port.out.shape[port.axis] if port.out.ndim > port.axis and port.fold is None else port.fold or 0
        if size == 0 or size % N or (port.axis != 0 and size != N and not use.functional):
            raise UnsupportedError(
                f"{where} returned shape {list(port.out.shape)} in a batch of {N} examples: axis {port.axis} should "
                f"carry the examples, or a multiple of them. If another axis does, say EmpiricalRisk(..., "
                f"example_axis={{{use.name!r}: axis}})."
            )
    versions: list[tuple[Tensor, int]] = []
    if affine is not None:  # an affine layer reads one tensor; the rest is not kept alive
        args, kwargs = (affine.input_of(use.module, args, kwargs),), {}
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    if affine is not None:
        wanted = [axis if fold is None else 1]
    else:
        wanted = use.rule.axes(use.module, axis, tensors, inputs=True)
    expanded = any(port.expanded for port in ports)
    axes, kept = iter(wanted), []
    in_axes = []
    for t in leaves:
        if isinstance(t, Tensor):
            at, t = next(axes), t.detach()
            if not t.is_inference():
                versions.append((t, t._version))
            if fold is not None:
                t = t.unflatten(0, (-1, fold))
            moved = at != 0 and t.ndim > at and (use.functional or t.shape[at] in (1, N))
            t = t.movedim(at, 0) if moved else t
            in_axes.append(at if moved else 0)
            if expanded and t.ndim and t.shape[0] == 1:
                t = t.expand(N, *t.shape[1:])
        kept.append(t)
    first, named = tree_unflatten(kept, spec)
    call = Call(use, first, named, in_axes=in_axes, out_axes=[port.axis for port in ports])
    rows = {port.arrange(port.out).shape[0] for port in ports}
    if len(rows) > 1:
        raise UnsupportedError(
            f"{where} returned tensors with {sorted(rows)} rows for {N} examples; expected one number of rows."
        )
    if affine is not None and call.input.shape[0] not in rows:
        raise UnsupportedError(
            f"{where} got an input of shape {list(call.input.shape)} and returned {list(ports[0].out.shape)} in a "
            f"batch of {N} examples: the example axis differs. Add a leading axis for the examples, or say "
            f"EmpiricalRisk(..., example_axis={{{use.name!r}: axis}})."
        )
    return Event(call, layer, ports, single, versions)


def isolate(out: Tensor, use: Use, several: bool = False) -> Tensor:
    """The same numbers, differentiable, and neither a leaf nor a view: in-place operations keep its edge.

    Args:
        out: What the module returned.
        use: The module.
        several: Whether it is one of several tensors, of which one may be computed from another inside the module:
            what arrives at it must have come from outside.
    """
    if not torch.is_grad_enabled():
        raise UnsupportedError(
            f"{title(use.name)} ran under torch.no_grad(). If this is activation checkpointing, pass "
            "use_reentrant=False; if it is a frozen part of the model, leave its parameters "
            f"{list(use.keys.values())} out of `params`."
        )
    if out.requires_grad and not out._is_view() and not several:
        return out
    if not out.requires_grad:
        out = out.detach().requires_grad_()
    # A module of unknown code may have saved its output for backward, and an alias has a version counter of its own.
    if not isinstance(use.rule, AffineRule):
        return out.clone()
    return torch.ops.aten._unsafe_view(out, out.shape)


def connect(port: Port, out: Tensor, arrive: Callable[[Tensor], None]) -> None:
    """Let autograd deliver the gradient of `out`."""
    port.edge = get_gradient_edge(out)
    port.handle = out.register_hook(arrive)
