"""Vectors for single examples: which rows they reach. What layer rules make of them is looked at by `compare_rules`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.replay import at_least_float32
from curvlinops_plus.risk.autograd_graph import gradients_of
from curvlinops_plus.risk.compare_rules import SentVectors, compare_rules
from curvlinops_plus.risk.float16_range import is_narrow, send_in_range
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.module_uses import title
from curvlinops_plus.risk.outside_reads import not_by_example
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.recorded_call import OutputSlot, RecordedCall
from curvlinops_plus.risk.refused_calls import MORE_THAN_BROADCAST, refusal_of_one_row

__all__ = [
    "compare",
    "compare_all_rows",
    "halves_by_digits",
    "random_halves",
    "send_single",
]


def compare(sent: SentVectors, layers: Sequence[Layer]) -> set[int]:
    """Compare rows and rules with what vectors left behind.

    Returns:
        Indices of the layers whose gradients are not all zero.
    """
    N = sent.num_examples
    vectors = [(_one_of(N, 0), sent.first)] if sent.first else []
    vectors.append((_all_of(N) if sent.every else _one_of(N, N // 2), sent.grads))
    found = _find_rows(sent.calls, N, vectors)
    if found is None:
        return set()  # statistics that are not finite name layer and batch
    for at, recorded, slot in found:
        raise _wrong_rows(sent, recorded, slot, *vectors[at])
    return compare_rules(sent, layers)


def send_single(
    recorder: Recorder,
    outputs: Sequence[Tensor],
    free: Mapping[str, Tensor],
    batch_size: int,
    every: bool = False,
    whole: bool = False,
) -> SentVectors:
    """Send a random vector for the first example back, and one for that in the middle.

    Args:
        outputs: What it returned, with a graph.
        free: Key to the tensor that stood for the parameter in it.
        batch_size: Of how many examples those in the pass were taken.
        every: Send a vector for all examples instead of the latter.
        whole: Whether this is a batch by itself, which others go back through: the graph is kept, and the vector for
            the first example is left to `compare_all_rows`.
    """
    N = recorder.num_examples
    if not outputs:
        return SentVectors([], {}, {}, {}, N, batch_size)
    recorder.require_unchanged()
    slots = [slot for recorded in recorder.calls for slot in recorded.slots]
    edges, numbers = [slot.edge for slot in slots], [_random_like(f) for f in outputs]

    def send(n: int, inputs: list[Any], retain_graph: bool = False) -> Sequence[Tensor | None]:
        vectors = [_only(v, _all_of(N) if every and n else _one_of(N, n)) for v in numbers]
        return _gradients(slots, outputs, inputs, vectors, retain_graph)

    # Two of them: examples that change places may leave one where it is.
    first = _by_slot(slots, send(0, edges, retain_graph=True)) if N > 1 and not whole else {}
    if first and _find_rows(recorder.calls, N, [(_one_of(N, 0), first)]) == []:
        first = {}  # there is nothing to say of them, and they would take memory in the pass that follows
    found = send(N // 2, [*edges, *free.values()], retain_graph=whole)
    grads, expected = _by_slot(slots, found), _by_key(free, found[len(slots) :])
    return SentVectors(recorder.calls, first, grads, expected, N, batch_size, every)


def random_halves(N: int) -> Tensor:  # -> [4, N]
    """Both of two random halves of the examples; every other example, which finds rows that moved on by one, or not."""
    parts = torch.stack((_shuffled(N), torch.arange(N))) % 2 == 1
    return torch.cat((parts, ~parts))


def halves_by_digits(N: int) -> Tensor:  # -> [digits, N]
    """The examples whose numbers have a 1 as one of four binary digits, in which any two of 16 examples differ.

    Of more examples the last three digits are random.
    """
    digits = torch.arange(min(4, (N - 1).bit_length()))
    order = torch.arange(N)
    numbers = torch.where(digits[:, None] == 0, order, _shuffled(N)) if N > 16 else order
    return (numbers >> digits[:, None]) % 2 == 1


def _shuffled(N: int) -> Tensor:
    return torch.randperm(N, generator=torch.Generator().manual_seed(N))


def compare_all_rows(recorder: Recorder, outputs: Sequence[Tensor], halves: Tensor) -> None:
    """Refuse layers in which vectors for half of the examples reach rows of the other half, in a whole batch.

    Args:
        recorder: Which recorded the forward pass; its graph is kept.
        outputs: What it returned, with a graph.
        halves: Which examples a vector is sent back for, [vectors, N] bool.

    Cost: a backward pass to the layers' outputs for each.
    """
    N, outputs = recorder.num_examples, [f for f in outputs if f.requires_grad]
    slots = [slot for recorded in recorder.calls for slot in recorded.slots]
    if N < 2 or not outputs or not slots:
        return
    recorder.require_unchanged()
    edges, numbers = [slot.edge for slot in slots], [_random_like(f) for f in outputs]

    def send(chosen: Tensor) -> dict[int, Tensor]:
        vectors = [_only(v, chosen) for v in numbers]
        return _by_slot(slots, _gradients(slots, outputs, edges, vectors, retain_graph=True))

    for at, recorded, slot in _find_rows(recorder.calls, N, ((chosen, send(chosen)) for chosen in halves)) or ():
        sent = SentVectors(recorder.calls, {}, {}, {}, N, N)
        raise _wrong_rows(sent, recorded, slot, halves[at], send(halves[at]))


def _gradients(
    slots: Sequence[OutputSlot], outputs: Sequence[Tensor], inputs: list[Any], vectors: list[Tensor], retain_graph: bool
) -> Sequence[Tensor | None]:
    """What vectors leave at some places, all times one number."""
    narrow = is_narrow([*outputs, *(slot.out for slot in slots)])
    send = partial(gradients_of, outputs, inputs, retain_graph=retain_graph or narrow)
    return send_in_range(send, outputs, vectors, narrow).gradients


def _find_rows(
    calls: Sequence[RecordedCall], N: int, sent: Iterable[tuple[Tensor, Mapping[int, Tensor]]]
) -> list[tuple[int, RecordedCall, OutputSlot]] | None:
    """Where vectors for some examples reach rows of others.

    Args:
        sent: Of each vector the examples that it was for, [N] bool, and what it left at slots, by identity.

    Returns:
        Numbers of vectors, with calls and slots; None if a gradient is not finite.
    """
    places, sums, factors = [], [], _factors(N)
    for at, (chosen, grads) in enumerate(sent):
        others = factors.masked_fill(chosen, 0)
        for recorded in calls:
            for slot in recorded.slots:
                if (g := grads.get(id(slot))) is not None:
                    rows = at_least_float32(slot.arrange(g).reshape(N, -1))
                    # A number that is not finite stays one, whatever it is multiplied with.
                    sums.append(others.to(rows) @ rows)
                    places.append((at, recorded, slot))
    if not sums or not torch.cat(sums).any():
        return []
    sizes = torch.stack([total.abs().sum() for total in sums]).tolist()
    if not all(map(math.isfinite, sizes)):
        return None
    return [place for place, size in zip(places, sizes) if size]


@lru_cache(16)
def _factors(N: int) -> Tensor:
    """Random numbers of either sign, of 1 at least: sums of rows times these are zero only if all rows are."""
    generator = torch.Generator().manual_seed(N)
    return (1 + torch.rand(N, generator=generator)) * (1 - 2 * torch.randint(2, (N,), generator=generator))


def _by_slot(slots: Sequence[OutputSlot], grads: Iterable[Tensor | None]) -> dict[int, Tensor]:
    """Gradients by the identity of the slots where they arrived; those of parameters may follow."""
    return {id(slot): g.detach() for slot, g in zip(slots, grads) if g is not None}


def _by_key(params: Mapping[str, Tensor], grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Gradients of parameters by their keys, of those that have one; `nn.Embedding(sparse=True)` has sparse ones."""
    found = {key: g for key, g in zip(params, grads, strict=True) if g is not None}
    return {key: g.to_dense() if g.is_sparse else g for key, g in found.items()}


def _one_of(N: int, n: int) -> Tensor:
    """The n-th example, [N] bool."""
    return torch.arange(N) == n


def _all_of(N: int) -> Tensor:
    """All examples."""
    return torch.ones(N, dtype=torch.bool)


def _wrong_rows(
    sent: SentVectors, recorded: RecordedCall, slot: OutputSlot, chosen: Tensor, grads: Mapping[int, Tensor]
) -> UnsupportedError:
    """What to say of a layer in which a vector for some examples, which left these, reaches rows of others."""
    N, use = sent.num_examples, recorded.call.use
    if recorded.expanded:
        return refusal_of_one_row(use, N, MORE_THAN_BROADCAST)
    rows = slot.arrange(grads[id(slot)]).unflatten(0, (N, -1))
    chosen = chosen.to(rows.device)
    own, others, examples = rows[chosen], rows[~chosen], chosen.nonzero()
    who = f"example {int(examples)}" if len(examples) == 1 else f"{len(examples)} examples"
    return not_by_example(
        use,
        (recorded.call.args, dict(recorded.call.kwargs)),
        N,
        f"{title(use.name)} ({type(use.owner).__name__}) returned shape {list(slot.out.shape)} {sent.where}, but "
        f"axis {slot.axis} does not carry the examples (is it a position embedding, or time-major?), or the model "
        f"mixes examples: a vector for {who} has a gradient of norm {float(own.norm()):.3g} in its rows, and of "
        f"{float(others.norm()):.3g} in others. Say EmpiricalRisk(..., example_axis={{{use.name!r}: axis}}), expand "
        "the layer's input to the batch in the model, or leave its parameters out of `params`.",
    )


def _random_like(f: Tensor) -> Tensor:
    """Random numbers of an output's shape and dtype."""
    generator, dtype = torch.Generator().manual_seed(0), torch.promote_types(f.dtype, torch.float32)
    return torch.randn(f.shape, generator=generator, dtype=dtype).to(f.device, f.dtype)


def _only(v: Tensor, chosen: Tensor) -> Tensor:
    """A vector that is zero for all other examples."""
    return (v.reshape(len(chosen), -1) * chosen.to(v.device)[:, None]).view(v.shape)
