"""Gradients that the user's own backward pass delivers, which spares a pass where the loss's gradient is sent back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.risk.autograd_graph import postorder
from curvlinops_plus.risk.determinism import TOLERANCE
from curvlinops_plus.risk.float16_range import below_range
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import title
from curvlinops_plus.risk.record import OutputSlot, RecordedCall, Recorder

_AFTER = "Call `loss.backward()` after the block: then vectors are sent by a pass of their own."


class UserBackward:
    """What arrives at the outputs of a model and of its layers while the user goes back through a recorded pass.

    Args:
        outputs: What the losses read, as the model returned it.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Tensor]) -> None:
        self._layers, self._calls = recorder.layers, recorder.by_layer()
        self._at_outputs: dict[int, list[Tensor]] = {id(f): [] for f in outputs}
        self._at_slots: dict[int, tuple[Tensor, int]] = {}  # with versions
        self._scale: Tensor | None = None
        self._handles = [f.register_hook(self._at_outputs[id(f)].append) for f in outputs if f.requires_grad]
        recorder.receive = self._receive

    def close(self) -> None:
        """Remove the hooks from the outputs."""
        for handle in self._handles:
            handle.remove()

    @property
    def happened(self) -> bool:
        """Whether the user went back."""
        return any(self._at_outputs.values())

    @property
    def below_range(self) -> bool:
        """Whether what arrived has lost digits in float16."""
        return below_range(g for g, _ in self._at_slots.values())

    def _receive(self, recorded: RecordedCall, slot: OutputSlot, g: Tensor) -> None:
        g = g.detach()
        self._at_slots[id(slot)] = g, g._version

    def gradients(self, outputs: Sequence[Tensor], vector: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients that `vector` at the outputs has at the layers' outputs, by identity of the slot.

        Whatever number the user's loss was multiplied with is divided out: a mean, parts of a batch, a gradient scaler.

        Raises:
            UnsupportedError: If what arrived is no multiple of `vector`, or did not arrive everywhere.
        """
        factor, found, missing = self._factor(outputs, vector), {}, []
        for recorded in (recorded for calls in self._calls.values() for recorded in calls):
            for slot in recorded.slots:
                if (g := self._arrived(recorded, slot)) is not None:
                    found[id(slot)] = (_wide(g) if g.dtype == torch.float16 else g) / factor
                elif slot.edge is not None:
                    missing.append((recorded, slot))
        nodes = {node for node, _ in postorder([f.grad_fn for f in outputs])} if missing else set()
        for recorded, slot in missing:
            if slot.edge.node in nodes:
                raise UnsupportedError(
                    f"The backward pass inside `listen` did not reach {title(recorded.call.use.name)}. Call "
                    "`loss.backward()`, without `inputs`, so that it reaches all layers, or after the block."
                )
        return found

    def _arrived(self, recorded: RecordedCall, slot: OutputSlot) -> Tensor | None:
        g, version = self._at_slots.get(id(slot), (None, 0))
        if g is not None and g._version != version:
            where = title(recorded.call.use.name)
            raise UnsupportedError(f"The gradient of {where} was written to in the backward pass. {_AFTER}")
        return g

    def _factor(self, outputs: Sequence[Tensor], vector: Sequence[Tensor]) -> Tensor:
        """The number that `vector` was multiplied with, 0-d."""
        self.require_once()
        arrived = [self._at_outputs[id(f)] for f in outputs]
        pairs = [(g[0].detach() if g else torch.zeros_like(v), v) for g, v in zip(arrived, vector, strict=True)]
        g, v = (torch.cat([_wide(t).flatten() for t in ts]) for ts in zip(*pairs))
        factor, away = _multiple(g, v)
        if not away <= TOLERANCE[min(f.element_size() for f in outputs)] and bool(g.sum().isfinite()):
            raise UnsupportedError(
                "The gradient that the backward pass inside `listen` brought to the model's output is no multiple of "
                f"that of the risk's loss for this batch: the rest has {away:.1e} of its norm. Was it another loss, or "
                f"one with other weights or targets? {_AFTER}"
            )
        return factor

    def require_once(self) -> None:
        """Refuse a second backward pass."""
        if (times := max(map(len, self._at_outputs.values()))) > 1:
            raise UnsupportedError(
                f"The model's output was differentiated {times} times inside `listen`, expected once. {_AFTER}"
            )

    def compare(self, batch: LayerBatch, itemsize: int) -> None:
        """Compare what arrived with gradients from a pass of our own: it must be the same multiple in all layers.

        Args:
            batch: A layer's, from that pass.
            itemsize: Bytes of the coarsest numbers in the user's pass.

        Raises:
            UnsupportedError: If it is not.
        """
        for where, theirs, ours in self._pairs(batch):
            coarsest, theirs, ours = min(itemsize, theirs.element_size()), _wide(theirs), _wide(ours)
            scale, away = _multiple(theirs, ours)
            if self._scale is None and bool(ours.any()):
                self._scale = scale
            elif self._scale is not None:
                away = _distance(theirs, self._scale * ours, relative_to=self._scale * ours)
            if not away <= TOLERANCE[coarsest]:
                raise UnsupportedError(
                    f"The gradient that the backward pass inside `listen` brought to {where} is not that of the risk's "
                    f"loss for this batch: they differ by {away:.1e} of its norm. Was it another loss, is something "
                    f"else differentiated (a penalty on activations), or not all of the model? {_AFTER}"
                )

    def _pairs(self, batch: LayerBatch) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The layer's name, what arrived at its calls, and what arrived there in another pass."""
        index = next(k for k, layer in enumerate(self._layers) if layer is batch.layer)
        for recorded, call in zip(self._calls[index], batch.calls, strict=True):
            ours = [call.grads] if isinstance(call.grads, Tensor) else call.grads or ()
            for slot, own in zip(recorded.slots, ours, strict=True):
                yield batch.layer.title, slot.gradient(self._arrived(recorded, slot), 1, False), own


def _multiple(g: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """The number times which `v` is closest to `g`, and how far it is from it, relative to `g`."""
    square = (v * v).sum()
    factor = torch.where(square > 0, (g * v).sum() / square, torch.ones_like(square))
    return factor, _distance(g, factor * v, relative_to=g)


def _distance(a: Tensor, b: Tensor, relative_to: Tensor) -> float:
    """Distance over the norm of one of them; 0 of zeros."""
    away = torch.dist(a, b)
    return float(torch.where(away == 0, away, away / relative_to.norm()))


def _wide(t: Tensor) -> Tensor:
    return at_least_float32(t.detach())
