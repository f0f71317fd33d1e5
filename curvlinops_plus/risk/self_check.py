"""Checks, in the first batch of a risk, that recorded rows belong to the examples that they are assigned to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.risk.layers import title
from curvlinops_plus.risk.process_state import eager
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.recorded_call import OutputSlot, RecordedCall

__all__ = ["check_example_rows", "check_expanded_rows"]


def check_example_rows(recorder: Recorder, model: nn.Module, outputs: Sequence[Tensor]) -> None:
    """Refuse layers whose rows are not examples: a vector for one example must reach no other example's rows.

    Catches position embeddings `[T, d]`, time-major data and models that mix examples.

    Args:
        recorder: Which recorded a forward pass.
        model: The model.
        outputs: What it returned, those with a graph.

    Raises:
        UnsupportedError: Naming the layer.

    Warns:
        CurvatureWarning: Instead, if there is batch norm in training mode, which mixes examples.

    Cost: one backward pass.
    """
    kind = nn.modules.batchnorm._BatchNorm
    mixing = [name for name, m in model.named_modules() if isinstance(m, kind) and m.training]
    if mixing:
        warn(
            f"{mixing} are batch norm in training mode: the examples of a batch depend on each other, and what layers "
            f"before them contribute through the batch's statistics is left out. Call model.eval() first.",
            CurvatureWarning,
            stacklevel=2,
        )
        return
    N = recorder.num_examples
    n = N - 1
    recorder.require_unchanged()
    wrong: list[RecordedCall] = []

    def receive(recorded: RecordedCall, slot: OutputSlot, g: Tensor) -> None:
        rows = slot.arrange(g.detach()).unflatten(0, (N, -1))
        if bool(rows[:n].any() | rows[n + 1 :].any()) and bool(rows.isfinite().all()):
            wrong.append(recorded)

    sources = recorder.sources(outputs)
    if sources:
        with recorder.receiving(receive):
            vectors = [_only(f, n, N) for f in outputs]
            torch.autograd.grad(outputs, sources, vectors, retain_graph=True, allow_unused=True)
    if wrong:
        recorded = min(wrong, key=recorder.calls.index)
        slot, use = recorded.slots[0], recorded.call.use
        raise UnsupportedError(
            f"{title(use.name)} ({type(use.owner).__name__}) returned shape {list(slot.out.shape)} in a batch of "
            f"{N} examples, but axis {slot.axis} does not carry the examples (is it a position "
            f"embedding, or time-major?), or the model mixes examples. Say EmpiricalRisk(..., "
            f"example_axis={{{use.name!r}: axis}}), expand the layer's input to the batch in the model, or leave its "
            f"parameters out of `params`."
        )


def check_expanded_rows(
    recorder: Recorder, outputs: Sequence[Tensor], run: Callable[[], Sequence[Tensor]], random: Tensor
) -> None:
    """Refuse models in which a row for each example is not the same as one row for all.

    Args:
        recorder: Which recorded a forward pass.
        outputs: What the model returned in it, with a row for each example.
        run: Runs the model on the same batch.
        random: State of the global generator before that forward pass.

    Raises:
        UnsupportedError: Naming the layer.

    Cost: one forward pass, and two backward passes.
    """
    N, expanded = recorder.num_examples, [recorded for recorded in recorder.calls if recorded.expanded]
    with recorder.disabled(), torch.random.fork_rng(devices=[]), eager():
        torch.set_rng_state(random)
        plain = [f.detach() for f in run()]
    slots = [slot for recorded in expanded for slot in recorded.slots]
    for output, without in zip(outputs, plain, strict=True):
        rounding = 100 * torch.finfo(output.dtype).eps  # the same sums of the same numbers, row by row
        same = torch.allclose(output, without, rtol=rounding, atol=rounding * float(without.abs().max()))
        if same and recorder.backward and output.requires_grad:
            edges = [slot.edge for slot in slots]
            for n in (0, N - 1):
                v = _only(output, n, N)
                found = torch.autograd.grad(output, edges, v, retain_graph=True, allow_unused=True)
                for slot, g in zip(slots, found):
                    if g is not None:
                        rows = slot.arrange(g)
                        same &= not bool(rows[:n].any() | rows[n + 1 :].any())
        if not same:
            raise UnsupportedError(
                f"layer {expanded[0].call.use.name!r} returns one row for all {N} examples of a batch, and the model "
                f"does more with it than broadcast it (it picks a row, or reduces over the first axis). Its gradient "
                f"can't be told apart by examples: leave its parameters out of `params`, or expand its output to the "
                f"batch in the model."
            )


def _only(f: Tensor, n: int, N: int) -> Tensor:
    """A vector of the output's shape that is zero for all examples but one."""
    v = torch.zeros_like(f)
    piece = v.unflatten(0, (N, -1))[n]
    piece.copy_(torch.linspace(1, 2, piece.numel(), device=f.device).view_as(piece))
    return v
