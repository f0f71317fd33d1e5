"""What layer rules make of recorded gradients, compared with autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvlinops_plus.likelihood.sampling import wide_dtype
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.recorded_call import RecordedCall
from curvlinops_plus.risk.refused_calls import OutsideReads

#: Largest relative difference that passes as rounding, by bytes of a number. Models in float64 may have norms that
#: compute in float32 whatever they get.
TOLERANCE = {2: 5e-2, 4: 1e-3, 8: 1e-8}

_OTHER_THAN_RECORDED = (
    "Does something else read the parameter, does the module compute something else when it is run again (attributes "
    "set around the call, counters, numbers of the batch), does a hook change what it returns, is it given a table "
    "with as many rows as there are examples (pass table[None]), is something differentiated in the forward pass, or "
    "does it call embedding(..., scale_grad_by_freq=True), which divides gradients by how often the batch has a row "
    "(nn.Embedding with that option is taken as one without)?"
)


@dataclass
class SentVectors:
    """What vectors for single examples left behind.

    Attributes:
        calls: The recorded calls.
        first: What a vector for the first example and that in the middle left at their slots, by identity, if it
            reached others.
        grads: What a longer vector for the example in the middle left there.
        expected: Autograd's gradients of parameters for the latter, by key.
        num_examples: N.
        batch_size: Of how many examples the N were taken.
        every: Whether the vector was one for all examples instead.
    """

    calls: list[RecordedCall]
    first: dict[int, Tensor]
    grads: dict[int, Tensor]
    expected: dict[str, Tensor]
    num_examples: int
    batch_size: int
    every: bool = False

    @property
    def where(self) -> str:
        """Which examples were compared, in words."""
        N, whole = self.num_examples, self.batch_size
        return f"in a check of all {N} examples of a batch" if whole == N else f"in a check of {N} of {whole} examples"


def compare_rules(sent: SentVectors, layers: Sequence[Layer]) -> set[int]:
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
        (index, key, pair)
        for index, layer in enumerate(layers)
        for key, *pair in _combinations(sent, layer, calls[index])
    ]
    if not parts:
        return set()
    reached = set()
    for (index, key, *_), (away, size) in zip(parts, _norms([pair for *_, pair in parts]), strict=True):
        if size:
            reached.add(index)
        if not away <= TOLERANCE[_coarsest(layers[index], key, calls[index]).itemsize] * size:
            _compare_in_full(sent, layers[index], calls[index])
    for recorded in sent.calls:
        recorded.call.grads = None
    return reached


def _norms(pairs: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Of each pair of tensors the norms of their difference and of the second one, all at once."""
    ours, theirs = (torch.cat([t.flatten() for t in part]) for part in zip(*pairs, strict=True))
    wide = wide_dtype(ours.device)  # in which no square is too large or too small
    squares = torch.stack((ours - theirs, theirs), 1).to(wide).square()
    lengths = torch.tensor([ours.numel() for ours, _ in pairs])
    return torch.segment_reduce(squares.cpu(), "sum", lengths=lengths).sqrt().tolist()


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
        made = None if batch is None else _made(batch if len(layer.groups) == 1 else batch.restrict(group), left)
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
            if not float(away) <= rounding * _size(calls) + _underflow(kind, calls, theirs) and not _both_undefined(
                ours, theirs
            ):
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
    kinds = [*(slot.dtype for recorded in calls for slot in recorded.slots), layer.params[key].dtype]
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


def _underflow(kind: torch.dtype, calls: Sequence[RecordedCall], theirs: Tensor) -> float:
    """How much numbers below the range of a dtype add up to: in float16 they are common."""
    smallest = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    sizes = (
        slot.shape.numel() ** 0.5 * (1 + _norm((c.call.args, dict(c.call.kwargs)))) for c in calls for slot in c.slots
    )
    return smallest * (theirs.numel() ** 0.5 + sum(sizes))


def _wrong_rule(sent: SentVectors, layer: Layer, key: str, ours: Tensor, theirs: Tensor, called: bool) -> OutsideReads:
    """What to say of two gradients that differ, if it can't be found which functions read the parameter."""
    if not called:
        why = "The layer was not called, so something else reads the parameter."
    elif not theirs.any():
        why = "Was the module called with other tensors than its parameters (functional_call, swapped weights)?"
    else:
        why = _OTHER_THAN_RECORDED
    who = "all examples" if sent.every else "one example"
    return OutsideReads(
        f"{layer.title} ({type(layer.uses[0].owner).__name__}): the gradient of {key!r} for {who}, "
        f"{sent.where}, has norm {float(ours.norm()):.4g} by the layer's rule and {float(theirs.norm()):.4g} by "
        f"autograd, and they differ by {float((ours - theirs).norm()):.2g}. {why} Leave the parameters "
        f"{list(layer.params)} out of `params`, or "
        "restructure that part of the model. EmpiricalRisk(..., check=False) goes on without this check, and with "
        "numbers that are wrong."
    )


def _norm(tree: Any) -> float:
    """The norm of the first floating-point tensor in a tree: of inputs, those behind it are masks and the like."""
    first = next((t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()), None)
    return 0.0 if first is None else float(first.norm(dtype=torch.promote_types(first.dtype, torch.float32)))
