"""Gradients at what layers returned, taken from the backward pass that the user makes anyway.

Where our own pass would send `v` back from the model's output, such as the gradient of a sum of
loss terms, the user's pass brings `γ v`: a mean divides by the number of terms, a gradient scaler
multiplies. Gradients are linear in what comes from the output, so those at the layers are `γ` times
ours, if two things hold:

* what arrives at the output is a multiple of `v`;
* it is all that arrives: nothing that the user goes back from, such as a penalty on activations,
  reaches a layer on a way around the output.

Both are looked at where the pass reaches the output. The graph below is whole then, so that our own
pass can still be made instead. The second one takes the tensors that the user goes back from, which
autograd tells nobody, but Python does: they are an argument of `torch.autograd.backward`, in a
frame of a thread that waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from curvlinops_plus.contexts import Endings, GradMode
from curvlinops_plus.layer.replay import NoExampleGradients
from curvlinops_plus.linalg.numerics import at_least_float32, wide
from curvlinops_plus.risk.backward_pass import Arrivals
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.losses import Totals
from curvlinops_plus.risk.preserve import exclusive, own_passes, weak_hook
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.vectors import Draws

# Largest relative difference from a multiple of our vector, by bytes of a number.
_MULTIPLE = {2: 1e-2, 4: 1e-5, 8: 1e-10}
# Beyond these, gradients might underflow or overflow in the user's pass, and not in ours.
_FACTORS = (2.0**-40, 2.0**40)


class UsersBackward:
    """Waits for the user's backward pass through a recorded one, and shows layers what arrives.

    Nothing of the graph holds it: who drops it hears of no pass any more.

    Args:
        recorder: Of the pass; its risk has one loss.
        batch: The batch, with targets.
        outputs: What the model returned, as for `Recorder.send_back`.
        fresh: Makes sums that `consume` what layers are shown, before something arrives; None if
            our own pass is asked for.
        then: Called once: at the end of a pass of which everything has arrived; or before anything
            has arrived, if our own pass is to be made.

    Attributes:
        totals: Of the batch that was shown; None if it was not.
        sums: What was shown it.
        error: Why gradients of examples can't be told from what has arrived.
        is_under_way: Whether a pass was begun, and not ended: unless it goes on it has failed, and
            the graph is gone.
    """

    def __init__(
        self,
        recorder: Recorder,
        batch: Batch,
        outputs: tuple[Any, Any, Any],
        fresh: Callable[[], Any],
        then: Callable[[], None],
    ) -> None:
        self._recorder = recorder
        self._batch = batch
        self._outputs = outputs
        self._fresh = fresh
        self._then = then
        self.totals: Totals | None = None
        self.sums: Any = None
        self.error: Exception | None = None
        self.is_under_way = False
        self._arrivals: Arrivals | None = None
        self._task = -1
        self._edges = recorder.last.edges
        self._output = get_gradient_edge(outputs[0][0])
        self._handles: list[Any] = []
        self._at_node(self._output.node, self._begin)

    def _at_node(self, node: Any, method: Callable[..., None], *first: Any) -> None:
        """Call a method with the gradients at a node, as long as this exists."""
        self._handles.append(node.register_prehook(weak_hook(method, *first)))

    def close(self) -> None:
        """Wait no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, gradients: Sequence[Tensor | None]) -> None:
        """A backward pass has reached the output."""
        self.close()
        node = self._output.node
        totals, vector = self._own_vector()
        factor = _factor(gradients[self._output.output_nr], vector)
        if factor != 0 and _is_only_way(node, {edge.node for edge in self._edges}):
            self.sums = self._fresh()
        if self.sums is None:
            return self._then()
        back = self._recorder.backward_pass(self.sums.consume, self._batch)
        self._arrivals = Arrivals(back, factor)
        self.is_under_way = True
        self._task = torch._C._current_graph_task_id()
        end = weak_hook(self._end, totals)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        for k, edge in enumerate(self._edges):
            if edge.node == node:
                self._arrive(k, gradients)
            else:
                self._at_node(edge.node, self._arrive, k)

    def _own_vector(self) -> tuple[Totals, Tensor | None]:
        """Totals of the batch, and what our own pass would send back, if that is one vector."""
        totals, groups = self._recorder.vectors_to_send(self._batch, self._outputs, Draws(0))
        if len(groups) != 1 or groups[0].number != 1:
            return totals, None
        return totals, next(iter(groups[0].vectors))[0]

    def _arrive(self, k: int, gradients: Sequence[Tensor | None]) -> None:
        # Code of the user may go through the same graph inside of the pass.
        if torch._C._current_graph_task_id() == self._task:
            self._show(lambda arrivals: arrivals.add(k, gradients[self._edges[k].output_nr]))

    def _end(self, totals: Totals) -> None:
        self.close()
        self._show(Arrivals.finish)
        self.is_under_way = False
        if self._arrivals is not None:
            totals.reached = self._arrivals.back.reached
            self.totals = totals
        self._then()

    def _show(self, change: Callable[[Arrivals], None]) -> None:
        """Show a layer what has arrived, unless one has failed."""
        if self._arrivals is None:
            return
        try:
            with Endings() as endings:
                endings.enter_context(exclusive)
                own_passes.enter(endings)
                change(self._arrivals)
        except (OutsideReads, NoExampleGradients) as error:
            self.error = error.with_traceback(None)
            self._arrivals = None


def _factor(gradient: Tensor | None, v: Tensor | None) -> float:
    """`γ` of a gradient `γ v`; 0 if it is no multiple, or one that can't be divided by. One wait
    for a GPU.
    """
    if gradient is None or v is None or v.shape != gradient.shape:
        return 0.0
    tolerance = _MULTIPLE[min(v.element_size(), gradient.element_size())]
    with GradMode(False):
        v = at_least_float32(v)
        g = at_least_float32(gradient).to(v.dtype)
        double = wide(v)
        norms = [torch.linalg.vector_norm(t, dtype=double) for t in (g, v)]
        size = norms[0]
        γ = torch.copysign(size / norms[1], g.flatten() @ v.flatten())
        difference = torch.linalg.vector_norm(torch.addcmul(g, v, -γ.to(v.dtype)), dtype=double)
        γ, difference, size = torch.stack([γ, difference, size]).tolist()
    # NaN passes none of these
    if _FACTORS[0] <= abs(γ) <= _FACTORS[1] and difference <= tolerance * size:
        return γ
    return 0.0


def _is_only_way(output: Any, nodes: Collection[Any]) -> bool:
    """Whether what the backward passes of now begin with reaches these nodes through that of the
    output alone; not if it can't be told.
    """
    roots = [*_roots()]
    if not roots or None in roots:
        return False
    seen = {output}
    while roots:
        node = roots.pop()
        if node in seen or node is None:
            continue
        if node in nodes:
            return False
        seen.add(node)
        roots += [child for child, _ in node.next_functions]
    return True


def _roots() -> Iterator[Any]:
    """Nodes that the backward passes of all threads begin with; None for one that can't be told, or
    that need not reach everything below.
    """
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is torch.autograd.grad.__code__:
                yield None
            elif frame.f_code is torch.autograd.backward.__code__:
                arguments = frame.f_locals
                if arguments["inputs"]:
                    yield None
                for t in arguments["tensors"]:
                    yield t.grad_fn if isinstance(t, Tensor) else t.node
            frame = frame.f_back
