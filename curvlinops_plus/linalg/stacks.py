"""Matrices of equal size, decomposed as one batch.

A curvature has many small factors of few sizes. One call for all of a size saves what each call
costs, which on a GPU is most of the time: launches of kernels, and a wait for the decomposition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.linalg.arithmetic import Scaled
from curvlinops_plus.linalg.decisions import is_finite
from curvlinops_plus.linalg.dense import Dense
from curvlinops_plus.linalg.kronecker import Eigendecomposed, Kronecker
from curvlinops_plus.linalg.numerics import at_least_float32, with_zeros
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
            lie one behind the other in memory, as do those of the second ones: see `as_one`.

    Those that fail, or are not finite, are left: `eigh` of each tries again, and says what is
    wrong. So are those that remember one already, that are not to remember any, and that have no
    other of their shape.
    """
    # Those that derivatives are taken through remember nothing: chosen in the caller's mode.
    stacks = list(_stacks(_by_shape(factors)))
    with torch.inference_mode(False), GradMode(False):
        for stack in stacks:
            M = torch.stack([factor.matrix for factor in stack])
            try:
                values, Q = torch.linalg.eigh(at_least_float32(M))
            # Not converged, cuSOLVER gave up, or a device without this solver.
            except (RuntimeError, TypeError):
                continue
            if not is_finite(M.sum() + values.sum() + Q.sum()):
                continue
            values = with_zeros(values.to(M), Q.to(M), M, stack[0].rtol)
            for factor, *parts in zip(stack, values.unbind(), Q.to(M).unbind()):
                if M.device.type == "cpu":
                    # With memory of their own: pickles of a part hold the whole stack.
                    parts = [part.clone() for part in parts]
                factor.remember_eigh(*parts)


def _by_shape(factors: Iterable[Sequence[Dense]]) -> Iterator[Dense]:
    """The factors of all blocks, side by side for blocks of one shape."""
    of_shape: dict[Any, list[Sequence[Dense]]] = {}
    for of_block in factors:
        of_shape.setdefault(tuple(factor.matrix.shape for factor in of_block), []).append(of_block)
    for blocks in of_shape.values():
        for side in zip(*blocks, strict=True):
            yield from side


def stacked(blocks: Sequence[LinearOperator]) -> Eigendecomposed | None:
    """Blocks `Q diag(values) Qᵀ` of one shape as one that multiplies their vectors one behind the
    other; None if their `Q` are no Kronecker products of matrices that are parts of a batch.
    """
    bases = []
    values = []
    for block in blocks:
        if not isinstance(block, Eigendecomposed) or not isinstance(block.basis, Kronecker):
            return None
        factors = block.basis.factors
        if not all(isinstance(factor, Dense) and not factor.batch for factor in factors):
            return None
        bases.append([factor.matrices() for factor in factors])
        values.append(block.values)
    Gs, As = zip(*bases, strict=True)
    G = as_one(Gs)
    A = as_one(As)
    if len(blocks) == 1 or G is None or A is None:
        return None
    basis = Kronecker(G, A, Structure.GENERAL)
    return Eigendecomposed(basis, torch.cat(values), min(block.structure for block in blocks))


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
    """At least two different matrices each, of equal shape, dtype, device and threshold."""
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
        yield from (stack for stack in stacks if len(stack) > 1)


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
