"""One recorded call of a layer: its inputs, and where the gradients of its outputs will arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.risk.module_uses import Call, ModuleUse, title
from curvlinops_plus.risk.refused_calls import not_by_example
from curvlinops_plus.risk.row_order import RowOrder


@dataclass(eq=False)
class OutputSlot:
    """One tensor that a call returned, and where its gradient arrives.

    Attributes:
        shape: Of the tensor, which is not kept.
        dtype: Likewise.
        device: Likewise.
        axis: The axis that carries the examples.
        fold: Number of examples if that axis carries positions and, inside them, examples.
        expanded: Whether it was one row for all examples before.
        order: Of rows that have one of their own.
        edge: Where autograd delivers the gradient.
        handle: Of the hook that receives it.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    axis: int
    fold: int | None = None
    expanded: bool = False
    order: RowOrder | None = None
    edge: Any = None
    handle: Any = None

    @property
    def num_rows(self) -> int:
        """How many rows there are on the axis of the examples, when it is the first one."""
        if self.fold is None and self.order is None:
            return self.shape[self.axis]
        return self.arrange(torch.empty((), device=self.device).expand(self.shape)).shape[0]

    @property
    def kept(self) -> Tensor | None:
        """Which rows there are, [N, P], if they had an order of their own and are not steps of a sequence."""
        return None if self.order is None or self.order.padded else self.order.kept

    def connect(self, t: Tensor, receive: Callable[[Tensor], None]) -> None:
        """Let autograd deliver the gradient of the tensor to `receive`."""
        node = t.grad_fn
        if node is None or isinstance(node, torch._C._FunctionBase):
            self.edge = get_gradient_edge(t)  # which keeps the graph of a node written in Python
        else:
            self.edge = GradientEdge(node, t.output_nr)
        self.handle = t.register_hook(receive)

    def arrange(self, t: Tensor, lead: int = 0) -> Tensor:
        """The same numbers with the examples first, after `lead` leading axes."""
        if self.fold is not None:
            t = t.unflatten(lead, (-1, self.fold))
        if self.order is not None:
            t = self.order.rows(t, self.axis + lead)
        return t.movedim(self.axis + lead, lead) if self.axis or self.fold is not None else t

    def gradient(self, g: Tensor | None, V: int, batched: bool) -> Tensor:
        """A gradient [V, *out], examples first; zeros for None. Without `batched` it came without the axis V."""
        if g is None:
            return self.arrange(torch.zeros(V, *self.shape, dtype=self.dtype, device=self.device), 1)
        return self.arrange(g if batched else g.unsqueeze(0), 1)


@dataclass(eq=False)
class RecordedCall:
    """A recorded call, which lasts until the next batch.

    Attributes:
        call: What a `LayerBatch` shows of it.
        layer: Index of its layer.
        slots: What it returned, one slot per floating-point tensor.
        single: Whether it returned just one tensor.
        versions: Its inputs and their versions, to notice changes in place.
        expanded: Whether it returned one row for all examples.
    """

    call: Call
    layer: int
    slots: list[OutputSlot]
    single: bool
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    expanded: bool = False

    def set_gradients(self, grads: dict[int, Tensor], V: int, batched: bool) -> None:
        """Move the gradients of the slots (by identity) into `call.grads`; zeros where there are none."""
        found = [slot.gradient(grads.pop(id(slot), None), V, batched) for slot in self.slots]
        self.call.grads = found[0] if self.single else found

    def require_unchanged(self) -> None:
        """Refuse inputs that were written to since the call."""
        for t, version in self.versions:
            if t._version != version:
                raise UnsupportedError(
                    f"the input of {title(self.call.use.name)} was modified in place after the layer read it, "
                    "so its curvature can't be computed from it. "
                    f"Replace the in-place operation (for instance `x += y` by `x = x + y`)."
                )

    def release(self) -> None:
        """Release the graph."""
        for slot in self.slots:
            if slot.handle is not None:
                slot.handle.remove()
            slot.edge = slot.handle = None


def make_recorded_call(
    use: ModuleUse,
    layer: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    slots: list[OutputSlot],
    single: bool,
    axis: int,
    num_examples: int,
) -> RecordedCall:
    """Note a call: its inputs with the examples first, and their versions.

    Args:
        layer: Index of its layer.
        single: Whether it returned just one tensor.
        axis: The axis of its inputs that carries the examples.

    Raises:
        UnsupportedError: If the axes taken for the examples' don't carry them.
    """
    _check_slots(use, slots, num_examples, (args, kwargs))
    slot, out_axes = slots[0], [slot.axis for slot in slots]
    expand = num_examples if any(slot.expanded for slot in slots) else 0
    if isinstance(use.rule, AffineRule):  # it reads one tensor; the rest is not kept alive
        read = use.rule.input_of(use.module, args, kwargs).detach()
        x, moved = _examples_first(read, axis if slot.fold is None else 1, use, slot, num_examples, expand)
        if x.shape[0] != slot.num_rows:
            raise _other_rows(use, x, slot, num_examples)
        call, inputs = Call(use, (x,), {}, None, [moved], out_axes, slot.kept), [read]
    else:
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        at = [k for k, t in enumerate(leaves) if isinstance(t, Tensor)]
        inputs, in_axes, rows = [leaves[k].detach() for k in at], [], slot.num_rows
        for k, t, on in zip(at, inputs, use.rule.axes(use.module, axis, inputs, inputs=True), strict=True):
            leaves[k], moved = t, _ = _examples_first(t, on, use, slot, num_examples, expand)
            in_axes.append(_axis_of_examples(t, moved, rows))
        positional, named = tree_unflatten(leaves, spec)
        call = Call(use, positional, named, None, in_axes, out_axes, slot.kept)
    versions = [(t, t._version) for t in inputs if not t.is_inference()]
    return RecordedCall(call, layer, slots, single, versions, expanded=bool(expand))


def _examples_first(t: Tensor, axis: int, use: ModuleUse, slot: OutputSlot, N: int, expand: int) -> tuple[Tensor, int]:
    """An input with the examples on axis 0 as in the output, and the axis on which they were."""
    if slot.fold is not None:
        t = t.unflatten(0, (-1, slot.fold))
    if slot.order is not None and t.ndim > axis and t.shape[axis] == slot.order.num_rows:
        t, N = slot.order.filled(t, axis), len(slot.order.index)
    moved = axis != 0 and t.ndim > axis and (use.function is not None or t.shape[axis] in (1, N))
    if moved:
        t = t.movedim(axis, 0)
    if expand and t.ndim and t.shape[0] == 1:
        t = t.expand(expand, *t.shape[1:])
    return t, axis if moved else 0


def _axis_of_examples(t: Tensor, moved: int, rows: int) -> int | None:
    """Where an input had the examples that are first now; None for one that all of them share."""
    return moved if moved or (t.ndim > 0 and len(t) == rows) else None


def _check_slots(use: ModuleUse, slots: Sequence[OutputSlot], N: int, inputs: Any) -> None:
    for slot in slots:
        if slot.order is not None:
            continue
        size = slot.shape[slot.axis] if len(slot.shape) > slot.axis and slot.fold is None else slot.fold or 0
        if size == 0 or size % N or (slot.axis != 0 and size != N and use.function is None):
            raise not_by_example(
                use,
                inputs,
                N,
                f"{title(use.name)} ({type(use.owner).__name__}) returned shape {list(slot.shape)} in a batch of "
                f"{N} examples: axis {slot.axis} should carry the examples, or a multiple of them. If another axis "
                f"does, say EmpiricalRisk(..., example_axis={{{use.name!r}: axis}}). A table for all examples, as of "
                "positions, needs an axis of size 1 for them, as embedding(places[None]).",
            )
    if len(slots) > 1 and len(rows := {slot.num_rows for slot in slots}) > 1:
        raise UnsupportedError(
            f"{title(use.name)} ({type(use.owner).__name__}) returned tensors with {sorted(rows)} rows for {N} "
            "examples; expected one number of rows."
        )


def _other_rows(use: ModuleUse, x: Tensor, slot: OutputSlot, N: int) -> UnsupportedError:
    """What to raise if input and output have other numbers of rows."""
    return UnsupportedError(
        f"{title(use.name)} ({type(use.owner).__name__}) got an input of shape {list(x.shape)} and "
        f"returned {list(slot.shape)} in a batch of {N} examples: the example axis differs. Add a leading axis "
        f"for the examples, or say EmpiricalRisk(..., example_axis={{{use.name!r}: axis}})."
    )


def isolate(out: Tensor, use: ModuleUse, several: bool = False) -> Tensor:
    """The same numbers, differentiable, and neither a leaf nor a view: in-place operations keep its edge.

    Args:
        several: Whether it is one of several tensors, of which one may be computed from another inside the module:
            what arrives at it must have come from outside.

    Raises:
        UnsupportedError: If gradients are switched off.
    """
    if not torch.is_grad_enabled():
        raise UnsupportedError(
            f"{title(use.name)} ran under torch.no_grad(). If this is activation checkpointing, pass "
            "use_reentrant=False; if it is a frozen part of the model, leave its parameters "
            f"{list(use.keys.values())} out of `params`."
        )
    if not out.requires_grad:
        out = out.detach().requires_grad_()
    elif not several and not out._is_view():
        return out
    # A module of unknown code may have saved its output for backward, and an alias has a version counter of its own.
    if not isinstance(use.rule, AffineRule):
        return out.clone()
    return torch.ops.aten._unsafe_view(out, out.shape)
