"""Matrices of equal size, decomposed as one batch.

A curvature has many small factors of few sizes. One call for all of a size saves what each call
costs, which on a GPU is most of the time: launches of kernels, and a wait for the decomposition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg.arithmetic import Scaled
from curvlinops_plus.linalg.damping import HeuristicDamping
from curvlinops_plus.linalg.dense import Dense, Diagonal, OneTensor
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.numerics import eigh, with_zeros
from curvlinops_plus.linalg.operator import LinearOperator
from curvlinops_plus.linalg.space import Structure

# Rows of matrices that are stacked on the CPU. With more, the calls that a stack saves are no part
# of the time, and matrices are better decomposed side by side, or through a low rank.
_LARGEST_ON_CPU = 64
# Bytes of a stack, which is a copy of its matrices.
_LARGEST_STACK = 2**25


def decompose_in_stacks(factors: Iterable[Sequence[Dense]]) -> None:
    """Let positive semi-definite matrices remember their eigendecompositions, with one call for
    all of a shape, dtype and threshold.

    Args:
        factors: Of each block. On a device, eigenvectors of the first ones of blocks of one shape
            lie one behind the other in memory, as do those of the second ones: see `joined`.

    Those that fail, or are not finite, are left: `eigh` of each tries again, and says what is
    wrong. So are those that remember one already, that are not to remember any, and on the CPU
    those that have no other of their shape.
    """
    # Those that derivatives are taken through remember nothing: chosen in the caller's mode.
    stacks = list(_stacks(_by_shape(factors)))
    with torch.inference_mode(False), GradMode(False):
        for stack in stacks:
            matrices = [factor.matrix for factor in stack]
            M = as_one(matrices)
            if M is None:
                M = torch.stack(matrices)
            try:
                values, Q = eigh(M)
            except NumericsError:
                continue
            values = with_zeros(values, Q, M, stack[0].rtol)
            if M.device.type != "cpu":
                Q = Q.contiguous()
            for factor, *parts in zip(stack, values.unbind(), Q.unbind()):
                if M.device.type == "cpu":
                    # With memory of their own: pickles of a part hold the whole stack.
                    parts = [part.clone() for part in parts]
                factor.remember_eigh(*parts)


def _by_shape(factors: Iterable[Sequence[Dense]]) -> Iterator[Dense]:
    """The factors of all blocks that do not remember theirs, side by side for blocks of one
    shape.
    """
    of_shape: dict[Any, list[Sequence[Dense]]] = {}
    for of_block in factors:
        if not any(factor.lacks("eigh") for factor in of_block):
            continue
        of_shape.setdefault(tuple(factor.matrix.shape for factor in of_block), []).append(of_block)
    for blocks in of_shape.values():
        for side in zip(*blocks, strict=True):
            yield from side


def lay_together(blocks: Iterable[LinearOperator]) -> None:
    """Move the tensors of blocks of one shape into one memory, one behind the other, where `joined`
    needs no copies.

    Args:
        blocks: With tensors that nobody else holds, as each is replaced by an equal one.
    """
    of_shape: dict[Any, list[list[OneTensor]]] = {}
    for block in blocks:
        tensors = [t for t in getattr(block, "factors", (block,)) if isinstance(t, OneTensor)]
        if not any(t.batch or t.tensor.requires_grad for t in tensors):
            shape = tuple((type(t), t.shape, t.dtype) for t in tensors)
            of_shape.setdefault(shape, []).append(tensors)
    # Blocks may share a factor, which lies in one place: that of the larger ones.
    laid: set[int] = set()
    for of_blocks in sorted(of_shape.values(), key=lambda members: -len(members[0])):
        for side in zip(*of_blocks, strict=True):
            count = max(_LARGEST_STACK // max(side[0].tensor.nbytes, 1), 1)
            for start in range(0, len(side), count):
                new = {id(t): t for t in side[start : start + count] if id(t) not in laid}
                laid |= new.keys()
                if len(new) > 1:
                    memory = torch.stack([t.tensor for t in new.values()])
                    for t, part in zip(new.values(), memory.unbind(), strict=True):
                        t.move(part)


def alike(blocks: Mapping[str, LinearOperator]) -> Iterator[list[str]]:
    """The names of at least two blocks of one kind, whose tensors lie in one memory."""
    of_kind: dict[Any, list[str]] = {}
    for name, block in blocks.items():
        kind = _kind(block)
        if kind is not None:
            of_kind.setdefault(kind, []).append(name)
    return (names for names in of_kind.values() if len(names) > 1)


def _kind(block: LinearOperator) -> tuple[Any, ...] | None:
    """What is equal of blocks that can be joined; None of one that can't be."""
    if isinstance(block, Eigendecomposed):
        basis = _kind(block.basis)
        return basis and (Eigendecomposed, basis, block.structure, block.rtol)
    if isinstance(block, Kronecker):
        G, A = [_kind(factor) for factor in block.factors]
        return G and A and (Kronecker, G, A)
    if type(block) is Dense:
        known = (block.structure, block.rtol)
    elif type(block) is Diagonal:
        known = ()
    else:
        return None
    memory = block.tensor.untyped_storage()._cdata
    return None if block.batch else (type(block), block.shape, block.dtype, memory, *known)


def joined(blocks: Sequence[Any]) -> Any:
    """Blocks of one kind, see `alike`, as one block whose factors are batches, without copies of
    matrices: it multiplies their vectors one behind the other.

    Returns:
        None if matrices do not lie at equal distances, as parts of a batch do.
    """
    block = blocks[0]
    if isinstance(block, Eigendecomposed):
        basis = joined([member.basis for member in blocks])
        if basis is None:
            return None
        values = torch.cat([member.values for member in blocks])
        return Eigendecomposed(basis, values, block.structure, block.rtol)
    if isinstance(block, Kronecker):
        G = joined([member.G for member in blocks])
        A = joined([member.A for member in blocks])
        return None if G is None or A is None else Kronecker(G, A)
    batch = as_one([member.tensor for member in blocks])
    if batch is None:
        return None
    if isinstance(block, Diagonal):
        return Diagonal(batch)
    matrices = Dense(batch, block.structure, block.rtol)
    if not any(member.lacks("eigh") for member in blocks):
        values, Q = zip(*[member.eigh() for member in blocks], strict=True)
        eigenvectors = as_one([of_member.matrix for of_member in Q])
        if eigenvectors is not None:
            matrices.remember_eigh(torch.stack(values), eigenvectors)
    return matrices


def joined_dampings(dampings: Sequence[Any]) -> Any:
    """The damping of joined blocks; None if theirs are of different kinds, or rules."""
    damping = dampings[0]
    if isinstance(damping, tuple) and all(isinstance(pair, tuple) for pair in dampings):
        for_A, for_G = map(joined_dampings, zip(*dampings, strict=True))
        return None if for_A is None or for_G is None else (for_A, for_G)
    if isinstance(damping, HeuristicDamping):
        if {(type(rule), getattr(rule, "min", None)) for rule in dampings} != {
            (HeuristicDamping, damping.min)
        }:
            return None
        undivided = joined_dampings([rule.damping for rule in dampings])
        return None if undivided is None else HeuristicDamping(undivided, damping.min)
    if all(isinstance(number, float | int) for number in dampings) and len(set(dampings)) == 1:
        return damping
    if all(isinstance(number, Tensor) and number.ndim == 0 for number in dampings):
        return torch.stack(list(dampings))
    return None


def parted(batch: Any) -> list[Any]:
    """The blocks of which `joined` has made one, or an inverse or power of it."""
    if isinstance(batch, Eigendecomposed):
        bases = parted(batch.basis)
        parts = zip(bases, batch.values.chunk(len(bases)), strict=True)
        return [Eigendecomposed(Q, values, batch.structure, batch.rtol) for Q, values in parts]
    if isinstance(batch, Kronecker):
        return [Kronecker(G, A) for G, A in zip(*map(parted, batch.factors), strict=True)]
    return batch.parted()


def as_one(matrices: Sequence[Tensor]) -> Tensor | None:
    """Matrices of one shape as a batch, without a copy; None if they do not lie in one memory at
    equal distances, as parts of a batch do.

    Example:
        >>> batch = torch.arange(8.0).view(2, 2, 2)
        >>> as_one([batch[1], batch[0]]) is None, bool((as_one([*batch]) == batch).all())
        (True, True)
    """
    first = matrices[0]
    memory = first.untyped_storage()._cdata
    start = first.storage_offset()
    step = matrices[1].storage_offset() - start if len(matrices) > 1 else 0
    for number, matrix in enumerate(matrices):
        place = (matrix.untyped_storage()._cdata, matrix.storage_offset())
        if place != (memory, start + number * step) or matrix.stride() != first.stride():
            return None
        if matrix.requires_grad:  # its gradient would be lost
            return None
    if step < 0:
        return None
    return first.as_strided((len(matrices), *first.shape), (step, *first.stride()), start)


def _stacks(factors: Iterable[Dense]) -> Iterator[list[Dense]]:
    """Different matrices each, of equal shape, dtype, device and threshold: at least two on the
    CPU, and of large ones.
    """
    alike: dict[Any, dict[int, Dense]] = {}
    for factor in factors:
        large = factor.device.type == "cpu" and factor.size > _LARGEST_ON_CPU
        if not large and factor.structure == Structure.PSD and factor.lacks("eigh"):
            kind = (factor.matrix.shape, factor.dtype, factor.device, factor.rtol)
            # Blocks may share a factor.
            alike.setdefault(kind, {})[id(factor)] = factor
    for different in alike.values():
        ordered = list(different.values())
        count = max(_LARGEST_STACK // max(ordered[0].matrix.nbytes, 1), 1)
        stacks = [ordered[start : start + count] for start in range(0, len(ordered), count)]
        # A large one takes long by itself, and its owner may free memory first.
        small = ordered[0].device.type != "cpu" and ordered[0].matrix.nbytes <= _LARGEST_STACK
        yield from (stack for stack in stacks if len(stack) > 1 or small)


def factors_of(block: LinearOperator, damping: Any = None) -> list[Dense]:
    """The dense matrices whose eigendecompositions give those of a block, whatever its damping."""
    if isinstance(block, Scaled):
        block = block.A
    factors = getattr(block, "factors", (block,))
    return [factor for factor in factors if isinstance(factor, Dense)]


def factors_to_invert(block: LinearOperator, damping: Any) -> list[Dense]:
    """The factors whose eigendecompositions `block.inverse(damping)` needs.

    Others are inverted by a Cholesky decomposition: matrices that are no Kronecker product, and
    factors with a damping of their own.
    """
    matrix = block.A if isinstance(block, Scaled) else block
    of_factors = isinstance(damping, tuple) or callable(damping)
    return factors_of(block) if isinstance(matrix, Kronecker) and not of_factors else []
