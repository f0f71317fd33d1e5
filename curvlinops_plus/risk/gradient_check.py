"""Vectors for single examples: which rows they reach. What layer rules make of them is looked at by `compare_rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.risk.autograd_graph import gradients_of
from curvlinops_plus.risk.compare_rules import TOLERANCE, SentVectors, compare_rules
from curvlinops_plus.risk.float16_range import Arrived, is_narrow, send_in_range
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.module_uses import title
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.recorded_call import OutputSlot, RecordedCall
from curvlinops_plus.risk.refused_calls import MORE_THAN_BROADCAST, not_by_example, refusal_of_one_row

# The second vector is so much longer: a hook that clamps gradients may leave a shorter one, or positive ones, alone.
_LONGER = -16.0


def compare(sent: SentVectors, layers: Sequence[Layer]) -> set[int]:
    """Compare rows and rules with what vectors left behind.

    Returns:
        Indices of the layers whose gradients are not all zero.
    """
    N = sent.num_examples
    vectors = [(_two_of(N), sent.first)] if sent.first else []
    vectors.append((_all_of(N) if sent.every else _one_of(N, N // 2), sent.grads))
    found = _find_rows(sent.calls, N, vectors)
    if found is None:
        return set()  # statistics that are not finite name layer and batch
    for at, recorded, slot in found:
        raise _wrong_rows(sent, recorded, slot, *vectors[at])
    return compare_rules(sent, layers)


def _require_linear(sent: SentVectors, rows: Mapping[int, Tensor], alone: Callable[[], Mapping[int, Tensor]]) -> None:
    """Refuse backward passes in which a longer vector leaves something else than as much more in an example's rows.

    Args:
        sent: What the longer one has left.
        rows: What it should have left in the rows of the example in the middle.
        alone: Sends a vector for the first example back, which may be what has reached these rows, too.

    Raises:
        UnsupportedError: Naming the layer.
    """
    N = sent.num_examples
    places = [(c, s) for c in sent.calls for s in c.slots if id(s) in rows and id(s) in sent.grads]
    if not places:
        return
    pairs = [(rows[id(s)], _middle(s, sent.grads[id(s)], N)) for _, s in places]
    norms = torch.stack([norm for one, other in pairs for norm in (torch.dist(one, other), one.norm(), other.norm())])
    found = [(away, max(sizes)) for away, *sizes in norms.view(-1, 3).tolist()]
    largest = max(size for _, size in found)
    for (recorded, slot), (away, size) in zip(places, found, strict=True):
        if not away > max(TOLERANCE[slot.dtype.itemsize] * size, 10 * torch.finfo(slot.dtype).eps * largest):
            continue
        first = alone()
        for _, other, mixed in _find_rows(sent.calls, N, [(_one_of(N, 0), first)]) or ():
            raise _wrong_rows(sent, other, mixed, _one_of(N, 0), first)
        raise UnsupportedError(
            f"What arrives at {title(recorded.call.use.name)} in a backward pass is not linear in the vector that is "
            f"sent back: of {_LONGER:g} times that vector it differs by {away / size:.1e} of the norm. Does a "
            "hook inside the model clamp, normalise or perturb gradients, or a backward pass that is written by hand? "
            "There are no derivatives then: leave that out while the curvature is computed."
        )


def _middle(slot: OutputSlot, g: Tensor, N: int) -> Tensor:
    """What arrived in the rows of the example in the middle."""
    return at_least_float32(slot.arrange(g).reshape(N, -1)[N // 2])


def send_single(
    recorder: Recorder,
    outputs: Sequence[Tensor],
    free: Mapping[str, Tensor],
    batch_size: int,
    every: bool = False,
) -> SentVectors:
    """Send a random vector for the first example and that in the middle back, and a longer one for the latter alone.

    Args:
        outputs: What it returned, with a graph.
        free: Key to the tensor that stood for the parameter in it.
        batch_size: Of how many examples those in the pass were taken.
        every: Send a vector for all examples instead of the latter.

    Raises:
        UnsupportedError: If what arrives is not linear in what is sent.
    """
    N = recorder.num_examples
    if not outputs:
        return SentVectors([], {}, {}, {}, N, batch_size)
    recorder.require_unchanged()
    slots = recorder.slots
    edges, numbers = [slot.edge for slot in slots], [_random_like(f) for f in outputs]

    def send(chosen: Tensor, length: float, inputs: list[Any]) -> Arrived:
        return _gradients(slots, outputs, inputs, [length * _only(v, chosen) for v in numbers])

    # Two vectors: examples that change places may leave one where it is.
    arrived = send(_two_of(N), 1.0, edges)
    first, rows = _by_slot(slots, arrived.gradients), dict[int, Tensor]()
    if arrived.power == 1:  # in float16 the two may be multiplied with different numbers
        rows = {id(s): _LONGER * _middle(s, first[id(s)], N) for s in slots if id(s) in first}
    if _find_rows(recorder.calls, N, [(_two_of(N), first)]) == []:
        first = {}  # there is nothing to say of them, and they would take memory in the pass that follows
    del arrived  # which holds them, too
    chosen = _all_of(N) if every else _one_of(N, N // 2)
    found = send(chosen, _LONGER, [*edges, *free.values()]).gradients
    grads, expected = _by_slot(slots, found), _by_key(free, found[len(slots) :])
    sent = SentVectors(recorder.calls, first, grads, expected, N, batch_size, every)
    if not first:
        _require_linear(sent, rows, lambda: _by_slot(slots, send(_one_of(N, 0), 1.0, edges).gradients))
    return sent


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
    slots = recorder.slots
    if N < 2 or not outputs or not slots:
        return
    recorder.require_unchanged()
    edges, numbers = [slot.edge for slot in slots], [_random_like(f) for f in outputs]

    def send(chosen: Tensor) -> dict[int, Tensor]:
        vectors = [_only(v, chosen) for v in numbers]
        return _by_slot(slots, _gradients(slots, outputs, edges, vectors).gradients)

    for at, recorded, slot in _find_rows(recorder.calls, N, ((chosen, send(chosen)) for chosen in halves)) or ():
        sent = SentVectors(recorder.calls, {}, {}, {}, N, N)
        raise _wrong_rows(sent, recorded, slot, halves[at], send(halves[at]))


def _gradients(
    slots: Sequence[OutputSlot], outputs: Sequence[Tensor], inputs: list[Any], vectors: list[Tensor]
) -> Arrived:
    """What vectors leave at some places; the graph is kept."""
    narrow = is_narrow((*outputs, *slots))
    send = partial(gradients_of, outputs, inputs, retain_graph=True)
    return send_in_range(send, outputs, vectors, narrow)


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


def _two_of(N: int) -> Tensor:
    """The first example and that in the middle."""
    return _one_of(N, 0) | _one_of(N, N // 2)


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
        f"{title(use.name)} ({type(use.owner).__name__}) returned shape {list(slot.shape)} {sent.where}, but "
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
