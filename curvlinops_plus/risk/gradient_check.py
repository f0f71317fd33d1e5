"""Vectors for single examples: which rows they reach, and what layer rules make of them, compared with autograd."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood.sampling import wide_dtype
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.module_uses import title
from curvlinops_plus.risk.outside_reads import OutsideReads, not_by_example
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.recorded_call import OutputSlot, RecordedCall
from curvlinops_plus.risk.refused_calls import MORE_THAN_BROADCAST, refusal_of_one_row

__all__ = [
    "TOLERANCE",
    "SentVectors",
    "compare_all_rows",
    "halves_by_digits",
    "random_halves",
    "send_single",
    "send_to_all",
]

#: Largest relative difference that passes as rounding, by bytes of a number. Models in float64 may have norms that
#: compute in float32 whatever they get.
TOLERANCE = {2: 5e-2, 4: 1e-3, 8: 1e-8}

_OTHER_THAN_RECORDED = (
    "Does something else read the parameter, does the module compute something else when it is run again (attributes "
    "set around the call, counters, numbers of the batch), does a hook change what it returns, or is something "
    "differentiated in the forward pass?"
)


@dataclass
class SentVectors:
    """What vectors for single examples left behind.

    Attributes:
        calls: The recorded calls.
        first: What a vector for the first example left at their slots, by identity, if it reached others.
        grads: The same of a vector for the example in the middle.
        expected: Autograd's gradients of parameters for the latter, by key.
        num_examples: N.
        batch_size: Of how many examples the N were taken.
        every: Whether the vector was one for all examples instead.
        rows_known: Whether it is known that these reach rows of their own only.
    """

    calls: list[RecordedCall]
    first: dict[int, Tensor]
    grads: dict[int, Tensor]
    expected: dict[str, Tensor]
    num_examples: int
    batch_size: int
    every: bool = False
    rows_known: bool = False

    @property
    def where(self) -> str:
        """Which examples were compared, in words."""
        N, whole = self.num_examples, self.batch_size
        return f"in a check of all {N} examples of a batch" if whole == N else f"in a check of {N} of {whole} examples"

    def compare(self, layers: Sequence[Layer]) -> set[int]:
        """Compare rows and rules.

        Returns:
            Indices of the layers whose gradients are not all zero.

        Raises:
            UnsupportedError: Naming the layer.
        """
        N = self.num_examples
        sent: list[tuple[Sequence[int], dict[int, Tensor]]] = [([0], self.first)] if self.first else []
        sent.append((range(N) if self.every else [N // 2], self.grads))
        found = [] if self.rows_known else _find_rows(self.calls, N, sent)
        if found is None:
            return set()  # statistics that are not finite name layer and batch
        for at, recorded, slot in found:
            raise _wrong_rows(self, recorded, slot, *sent[at])
        return _compare_rules(self, layers)


def send_single(
    recorder: Recorder,
    outputs: Sequence[Tensor],
    free: Mapping[str, Tensor],
    batch_size: int,
    every: bool = False,
) -> SentVectors:
    """Send a random vector for the first example back, and one for that in the middle.

    Args:
        recorder: Which recorded the forward pass.
        outputs: What it returned, with a graph.
        free: Key to the tensor that stood for the parameter in it.
        batch_size: Of how many examples those in the pass were taken.
        every: Send a vector for all examples instead of the latter.
    """
    N = recorder.num_examples
    if not outputs:
        return SentVectors([], {}, {}, {}, N, batch_size)
    recorder.require_unchanged()
    slots = [slot for recorded in recorder.calls for slot in recorded.slots]
    edges, numbers = [slot.edge for slot in slots], [_random_like(f) for f in outputs]

    def send(n: int, inputs: list[Any], retain_graph: bool = False) -> tuple[Tensor | None, ...]:
        vectors = [_only(v, range(N) if every and n else [n], N) for v in numbers]
        return torch.autograd.grad(outputs, inputs, vectors, retain_graph=retain_graph, allow_unused=True)

    # Two of them: examples that change places may leave one where it is.
    first = _by_slot(slots, send(0, edges, retain_graph=True)) if N > 1 else {}
    if _find_rows(recorder.calls, N, [([0], first)]) == []:
        first = {}  # there is nothing to say of them, and they would take memory in the pass that follows
    found = send(N // 2, [*edges, *free.values()])
    grads, expected = _by_slot(slots, found), _by_key(free, found[len(slots) :])
    return SentVectors(recorder.calls, first, grads, expected, N, batch_size, every)


def send_to_all(recorder: Recorder, outputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> SentVectors:
    """Send a random vector for all examples back through a whole batch, and once more with a factor for each example.

    Factors are powers of two, by which gradients are multiplied without rounding: if rows of each example are
    multiplied by its own, bit by bit, then no other example reaches them. Otherwise halves of the examples tell.

    Args:
        recorder: Which recorded the forward pass; its graph is kept.
        outputs: What it returned, with a graph.
        params: Key to parameter.

    Raises:
        UnsupportedError: Naming a layer in which vectors for half of the examples reach rows of the other half.

    Cost: two backward passes; up to four more where PyTorch rounds otherwise.
    """
    N = recorder.num_examples
    if not outputs:
        return SentVectors([], {}, {}, {}, N, N)
    recorder.require_unchanged()
    slots = [slot for recorded in recorder.calls for slot in recorded.slots]
    edges, vectors = [slot.edge for slot in slots], [_random_like(f) for f in outputs]
    inputs = [*edges, *params.values()]
    found = torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, allow_unused=True)
    factors = torch.tensor(_factors(N), device=vectors[0].device)
    scaled = [(v.reshape(N, -1) * factors.to(v.dtype)[:, None]).view(v.shape) for v in vectors]
    again = torch.autograd.grad(outputs, edges, scaled, retain_graph=True, allow_unused=True)
    exact = N == 1 or _are_scaled(slots, found, again, factors)
    if not exact:
        compare_all_rows(recorder, outputs, halves_by_digits(N))
    expected = _by_key(params, found[len(slots) :])
    return SentVectors(recorder.calls, {}, _by_slot(slots, found), expected, N, N, every=True, rows_known=exact)


def _are_scaled(
    slots: Sequence[OutputSlot], one: Sequence[Tensor | None], two: Sequence[Tensor | None], factors: Tensor
) -> bool:
    """Whether the rows of each example in the second gradients are those in the first times its factor, all finite."""
    away, N = [], len(factors)
    for slot, g, h in zip(slots, one, two):
        if g is not None and h is not None:
            g, h = (slot.arrange(t).reshape(N, -1) for t in (g, h))
            away.append((g * factors.to(g.dtype)[:, None] - h).count_nonzero())
        elif g is not h:
            return False
    return not away or not bool(torch.stack(away).any())  # of numbers that are not finite the difference is NaN


@cache
def _factors(N: int) -> list[float]:
    """Of each example one of 16 factors, by four binary digits, see `_codes`."""
    return [(-1.0 if code & 1 else 1.0) * 2.0 ** (code >> 1) for code in _codes(N)]


def random_halves(N: int) -> list[list[int]]:
    """Both of two random halves of the examples; every other example, which finds rows that moved on by one, or not."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(N))
    return [(part == side).nonzero()[:, 0].tolist() for part in (order % 2, torch.arange(N) % 2) for side in (0, 1)]


def halves_by_digits(N: int) -> list[list[int]]:
    """The examples that have a 1 as one of four binary digits, see `_codes`."""
    codes = _codes(N)
    return [[n for n, code in enumerate(codes) if code >> digit & 1] for digit in range(min(4, (N - 1).bit_length()))]


def _codes(N: int) -> list[int]:
    """Of each example a number of four binary digits, in which any two of 16 examples differ; the first is its parity.

    Of more examples the last three digits are random.
    """
    order = range(N) if N <= 16 else torch.randperm(N, generator=torch.Generator().manual_seed(N)).tolist()
    return [(n & 1) | (order[n] & 14) for n in range(N)]


def compare_all_rows(recorder: Recorder, outputs: Sequence[Tensor], halves: Sequence[Sequence[int]]) -> None:
    """Refuse layers in which vectors for half of the examples reach rows of the other half, in a whole batch.

    Args:
        recorder: Which recorded the forward pass; its graph is kept.
        outputs: What it returned, with a graph.
        halves: Examples that a vector is sent back for.

    Raises:
        UnsupportedError: Naming the layer.

    Cost: a backward pass to the layers' outputs for each.
    """
    N, outputs = recorder.num_examples, [f for f in outputs if f.requires_grad]
    slots = [slot for recorded in recorder.calls for slot in recorded.slots]
    if N < 2 or not outputs or not slots:
        return
    recorder.require_unchanged()
    edges, numbers = [slot.edge for slot in slots], [_random_like(f) for f in outputs]

    def send(chosen: Sequence[int]) -> dict[int, Tensor]:
        vectors = [_only(v, chosen, N) for v in numbers]
        found = torch.autograd.grad(outputs, edges, vectors, retain_graph=True, allow_unused=True)
        return _by_slot(slots, found)

    for at, recorded, slot in _find_rows(recorder.calls, N, ((chosen, send(chosen)) for chosen in halves)) or ():
        sent = SentVectors(recorder.calls, {}, {}, {}, N, N)
        raise _wrong_rows(sent, recorded, slot, halves[at], send(halves[at]))


def _find_rows(
    calls: Sequence[RecordedCall], N: int, sent: Iterable[tuple[Sequence[int], Mapping[int, Tensor]]]
) -> list[tuple[int, RecordedCall, OutputSlot]] | None:
    """Where vectors for some examples reach rows of others.

    Args:
        calls: The recorded calls.
        N: Number of examples.
        sent: Of each vector the examples that it was for, and what it left at slots, by identity.

    Returns:
        Numbers of vectors, with calls and slots; None if a gradient is not finite.
    """
    slots = [(recorded, slot) for recorded in calls for slot in recorded.slots]
    tables, others = [], []
    for examples, grads in sent:
        rows = [_largest(slot, grads.get(id(slot)), N) for _, slot in slots]
        tables.append(torch.stack(rows) if rows else torch.zeros(0, N))
        others.append(_are_others(examples, N))
    if not tables or not slots:
        return []
    # A number that is not finite stays one, whatever it is multiplied with.
    mask = torch.tensor(others, device=tables[0].device)[:, None]
    reached = (torch.stack(tables) * mask).amax(2).tolist()  # [vectors, slots]
    if not all(map(math.isfinite, chain.from_iterable(reached))):
        return None
    return [(at, *slots[k]) for at, sizes in enumerate(reached) for k, size in enumerate(sizes) if size]


def _by_slot(slots: Sequence[OutputSlot], grads: Iterable[Tensor | None]) -> dict[int, Tensor]:
    """Gradients by the identity of the slots where they arrived; those of parameters may follow."""
    return {id(slot): g.detach() for slot, g in zip(slots, grads) if g is not None}


def _by_key(params: Mapping[str, Tensor], grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Gradients of parameters by their keys, of those that have one."""
    return {key: g for key, g in zip(params, grads, strict=True) if g is not None}


def _are_others(examples: Sequence[int], N: int) -> list[float]:
    """Of each example 0 if it is one of these, else 1."""
    chosen = {*examples}
    return [float(n not in chosen) for n in range(N)]


def _largest(slot: OutputSlot, g: Tensor | None, N: int) -> Tensor:  # -> [N]
    """The largest number in the rows of each example."""
    dtype = wide_dtype(slot.out.device)
    if g is None:
        return torch.zeros(N, dtype=dtype, device=slot.out.device)
    return slot.arrange(g).reshape(N, -1).abs().amax(1).to(dtype)


def _wrong_rows(
    sent: SentVectors, recorded: RecordedCall, slot: OutputSlot, examples: Sequence[int], grads: Mapping[int, Tensor]
) -> UnsupportedError:
    """What to say of a layer in which a vector for some examples, which left these, reaches rows of others."""
    N, use = sent.num_examples, recorded.call.use
    if recorded.expanded:
        return refusal_of_one_row(use, N, MORE_THAN_BROADCAST)
    rows = slot.arrange(grads[id(slot)]).unflatten(0, (N, -1))
    own, others = rows[[*examples]], rows[[n for n in range(N) if n not in {*examples}]]
    who = f"example {examples[0]}" if len(examples) == 1 else f"{len(examples)} examples"
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


def _compare_rules(sent: SentVectors, layers: Sequence[Layer]) -> set[int]:
    """Refuse layers whose rules make other gradients of recorded calls than autograd.

    Two random combinations of the rows of each parameter are compared, which takes no gradients of the parameters' size
    from most rules; where these disagree, all numbers.

    Returns:
        Indices of the layers whose gradients are not all zero.
    """
    calls: dict[int, list[RecordedCall]] = {index: [] for index in range(len(layers))}
    for recorded in sent.calls:
        calls[recorded.layer].append(recorded)
        recorded.set_gradients(sent.grads, 1, batched=False)
    parts = [
        (index, key, ours, theirs)
        for index, layer in enumerate(layers)
        for key, ours, theirs in _combinations(sent, layer, calls[index])
    ]
    if not parts:
        return set()
    norms = [torch.linalg.vector_norm(t) for *_, ours, theirs in parts for t in (ours - theirs, theirs)]
    sizes = torch.stack(norms).tolist()
    reached = set()
    for (index, key, *_), away, size in zip(parts, sizes[::2], sizes[1::2]):
        if size:
            reached.add(index)
        if not away <= TOLERANCE[_coarsest(layers[index], key, calls[index]).itemsize] * size:
            _compare_in_full(sent, layers[index], calls[index])
    for recorded in sent.calls:
        recorded.call.grads = None
    return reached


def _combinations(
    sent: SentVectors, layer: Layer, calls: Sequence[RecordedCall]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of each parameter its key, and random combinations of the rows of its gradients, by the rule and by autograd."""
    batch = _batch(sent, layer, calls) if calls else None
    for group in layer.groups:
        matrix, dtype = group.layout.matrix_shape, layer.accumulation_dtype
        left = _left(matrix[-2], dtype).to(layer.device)
        theirs = {
            key: left @ group.layout.columns(key, sent.expected[key]).to(dtype)
            for key in group.keys
            if key in sent.expected
        }
        made = None if batch is None else _made(batch.restrict(group), left)
        start = 0
        for key in group.keys:
            stop = start + group.layout.width(key)
            ours = None if made is None else made[..., start:stop]
            if key in theirs:
                yield key, torch.zeros_like(theirs[key]) if ours is None else ours, theirs[key]
            elif ours is not None:
                yield key, ours, torch.zeros_like(ours)
            start = stop


def _made(batch: LayerBatch, left: Tensor) -> Tensor:
    try:
        first, *more = (piece.combined_grads(left).sum((0, 1)) for piece in batch.pieces())
        return sum(more, first)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError) as error:
        layer = batch.layer
        raise OutsideReads(
            f"{layer.title} ({type(layer.uses[0].owner).__name__}): the layer's rule failed on a recorded call, with "
            f"{type(error).__name__}: {error}. {_OTHER_THAN_RECORDED} Leave the parameters {list(layer.params)} out of "
            "`params`, or restructure that part of the model."
        ) from error


@cache
def _left(rows: int, dtype: torch.dtype) -> Tensor:
    """Two random rows, or as many as there are."""
    if rows <= 2:
        return torch.eye(rows, dtype=dtype)
    return torch.randn(2, rows, generator=torch.Generator().manual_seed(rows), dtype=dtype)


def _compare_in_full(sent: SentVectors, layer: Layer, calls: Sequence[RecordedCall]) -> None:
    """Refuse a layer whose rule makes another gradient of its recorded calls than autograd."""
    made = _summed_gradients(_batch(sent, layer, calls)) if calls else {}
    for key, p in layer.params.items():
        ours = made[key] if key in made else torch.zeros_like(p)
        theirs = sent.expected[key] if key in sent.expected else torch.zeros_like(p)
        kind = _coarsest(layer, key, calls)
        away = torch.dist(ours, theirs)
        if not bool(away <= TOLERANCE[kind.itemsize] * theirs.norm()):
            # Half precision rounds so much that there is no room for more than that.
            rounding = torch.finfo(kind).eps * (2 if kind.itemsize == 2 else 100)
            if not float(away) <= rounding * _size(calls) and not _both_undefined(ours, theirs):
                raise _wrong_rule(sent, layer, key, ours, theirs, bool(calls))


def _both_undefined(one: Tensor, other: Tensor) -> bool:
    """NaN or infinite entries on both sides: a statistic will say in which layer and batch they are."""
    return not bool(one.isfinite().all() | other.isfinite().all())


def _batch(sent: SentVectors, layer: Layer, calls: Sequence[RecordedCall]) -> LayerBatch:
    """The calls of a layer, for the examples that a vector was sent for alone: a rule may forget the last one, say."""
    N, n = sent.num_examples, sent.num_examples // 2
    batch = LayerBatch(layer, [recorded.call for recorded in calls], N)
    return batch if sent.every else batch.examples(n, n + 1)


def _coarsest(layer: Layer, key: str, calls: Sequence[RecordedCall]) -> torch.dtype:
    """The dtype of a parameter, or of what its layer returned, that rounds most."""
    kinds = [*(slot.out.dtype for recorded in calls for slot in recorded.slots), layer.params[key].dtype]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)


def _summed_gradients(batch: LayerBatch) -> dict[str, Tensor]:
    """Gradients of a layer's parameters, by key: those of each example, added up."""
    found: dict[str, Tensor] = {}
    for group in batch.layer.groups:
        first, *more = (piece.per_example_grads.sum((0, 1)) for piece in batch.restrict(group).pieces())
        J = sum(more, first).flatten()
        found |= {key: g[..., 0] for key, g in group.layout.split(J[:, None]).items()}
    return found


def _size(calls: Sequence[RecordedCall]) -> float:
    """A bound of the numbers that add up to a gradient: where they cancel, rounding is relative to it."""
    return sum(_norm(c.call.grads) * (1 + _norm((c.call.args, dict(c.call.kwargs)))) for c in calls)


def _wrong_rule(sent: SentVectors, layer: Layer, key: str, ours: Tensor, theirs: Tensor, called: bool) -> OutsideReads:
    """What to say of two gradients that differ, if it can't be found which functions read the parameter."""
    if not called:
        why = "The layer was not called, so something else reads the parameter."
    elif not theirs.any():
        why = "Was the module called with other tensors than its parameters (functional_call, swapped weights)?"
    else:
        why = _OTHER_THAN_RECORDED
    return OutsideReads(
        f"{layer.title} ({type(layer.uses[0].owner).__name__}): the gradient of {key!r} for one example, "
        f"{sent.where}, has norm {float(ours.norm()):.4g} by the layer's rule and {float(theirs.norm()):.4g} by "
        f"autograd, and they differ by {float((ours - theirs).norm()):.2g}. {why} Leave the parameters "
        f"{list(layer.params)} out of `params`, or "
        "restructure that part of the model. EmpiricalRisk(..., check=False) goes on without this check, and with "
        "numbers that are wrong."
    )


def _random_like(f: Tensor) -> Tensor:
    """Random numbers of an output's shape and dtype."""
    generator, dtype = torch.Generator().manual_seed(0), torch.promote_types(f.dtype, torch.float32)
    return torch.randn(f.shape, generator=generator, dtype=dtype).to(f.device, f.dtype)


def _only(v: Tensor, examples: Sequence[int], N: int) -> Tensor:
    """A vector that is zero for all other examples."""
    others = torch.tensor(_are_others(examples, N), dtype=v.dtype, device=v.device)
    return (v.reshape(N, -1) * (1 - others)[:, None]).view(v.shape)


def _norm(tree: Any) -> float:
    """The norm of the first floating-point tensor in a tree: of inputs, those behind it are masks and the like."""
    first = next((t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()), None)
    return 0.0 if first is None else float(first.norm(dtype=torch.promote_types(first.dtype, torch.float32)))
