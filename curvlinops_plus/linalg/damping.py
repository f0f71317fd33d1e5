"""Dampings: numbers and rules, and how one is split between the two factors of a Kronecker product.

`K.inverse(damping)`, `K.power(p, damping)` and `K.shift(delta)` take

* a number or 0-d tensor `λ`: `λ I` is added to the matrix; results are differentiable in a tensor,
* a rule: anything that is called with a matrix and returns such a number, for example
  `RelativeDamping(0.1)`,
* for `inverse` of a Kronecker product `G ⊗ A` also a pair `(λ_A, λ_G)`: each is added to its own
  factor; or a rule that returns a pair, `HeuristicDamping(0.1)`,
* for a block-diagonal matrix a 1-d tensor with one number per block, or a mapping from block name
  to any of the above; for `inverse` of a batch of matrices, which is block-diagonal, a 1-d tensor
  as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops_plus.linalg.decisions import is_finite, is_true
from curvlinops_plus.linalg.space import Structure
from curvlinops_plus.options import number

Scalar = float | Tensor
Rule = Callable[[Any], Any]  # a number, or a pair for the factors of a Kronecker product
Damping = Scalar | Rule | tuple[Any, Any] | Mapping[str, Any]
"""What is added to a matrix: a number or a rule such as `RelativeDamping(0.1)`, for blocks also one
of each by name; for a Kronecker product a pair, one for each factor.
"""


@dataclass(frozen=True)
class RelativeDamping:
    """A rule: `factor` times the mean eigenvalue of the matrix (of each block by itself, for a
    block-diagonal matrix).

    Needs the trace of the matrix, nothing else. A block without scale of its own, whose trace is 0,
    as of parameters behind a layer that starts at zero, takes the mean eigenvalue of the whole
    block-diagonal matrix, if that is positive semi-definite. A matrix of zeros gets no damping, nor
    does such a block by itself: give a number.

    Args:
        factor: 0.1 is what influence functions commonly use; 1e-3 is cautious.

    Example:
        >>> from curvlinops_plus.linalg import Diagonal
        >>> K = Diagonal(torch.tensor([1.0, 3.0]))
        >>> K.inverse(RelativeDamping(0.5)).diagonal()
        tensor([0.5000, 0.2500])
    """

    factor: float

    def __post_init__(self) -> None:
        number("RelativeDamping(factor)", self.factor, low=0)

    def __call__(self, operator: Any) -> Tensor:
        return self.factor * operator.trace / operator.shape[0]


@dataclass(frozen=True)
class HeuristicDamping:
    """A rule: one damping, split between the two factors of a Kronecker product by
    `heuristic_damping`.

    A matrix that is no Kronecker product gets the whole damping. Only inverses can be damped by
    factors.

    Args:
        damping: `λ`, a number, a 0-d tensor or a rule such as `RelativeDamping`; of a batch of
            products also one for each, of a curvature one per block.
        min: Neither factor gets less than this.

    Source: Martens and Grosse 2015, arXiv 1503.05671, section 6.3.

    Example:
        >>> from curvlinops_plus.linalg import Kronecker
        >>> K = Kronecker(torch.eye(2), 4.0 * torch.eye(3))
        >>> HeuristicDamping(1e-2)(K)
        (tensor(0.2000), tensor(0.0500))
        >>> K.inverse(HeuristicDamping(1e-2)).diagonal()[0]
        tensor(0.2268)
    """

    damping: Scalar | Rule | Mapping[str, Any]
    min: float = 1e-8

    def __post_init__(self) -> None:
        check_damping("HeuristicDamping(damping)", self.damping)
        number("HeuristicDamping(min)", self.min, low=0)

    def __call__(self, operator: Any) -> Any:
        damping = resolve(self.damping, operator, batch=getattr(operator, "batch", ()))
        if not hasattr(operator, "G"):
            return damping
        return heuristic_damping(operator.A, operator.G, damping, self.min)


def check_damping(name: str, damping: Any) -> None:
    """Refuse what can't be the damping of a positive semi-definite matrix, before there is one."""
    if isinstance(damping, Mapping):
        for block, of_block in damping.items():
            check_damping(f"{name}[{block!r}]", of_block)
    elif isinstance(damping, tuple):
        for of_factor in damping:
            check_damping(name, of_factor)
    elif not callable(damping) and not (isinstance(damping, Tensor) and damping.ndim):
        number(name, damping, low=0)


def relative_part(damping: Any) -> RelativeDamping | None:
    """The rule if a damping, or what is split between factors, is relative to the matrix."""
    if isinstance(damping, HeuristicDamping):
        damping = damping.damping
    return damping if isinstance(damping, RelativeDamping) else None


def scalar(value: Any, operator: Any, what: str) -> Scalar:
    """`value` as a Python number, or as a 0-d tensor of the operator's dtype and device.

    Raises:
        TypeError: If it is neither, naming `what` was expected to be a number.
        ValueError: If it is NaN or infinite.
    """
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        if value.dtype == torch.bool or not is_finite(value.detach()):
            number(what, value)
        return value.to(operator.device, operator.dtype)
    if isinstance(value, (int, float, np.integer, np.floating)):
        return number(what, value)
    shown = list(value.shape) if hasattr(value, "shape") else repr(value)
    raise TypeError(
        f"Expected {what} of a {type(operator).__name__} to be one number, a 0-d tensor or a rule; "
        f"got {type(value).__name__} {shown}. Pairs of dampings, one for each factor, and "
        "HeuristicDamping, which makes one, are for the `inverse` of a Kronecker product; the "
        "product of two matrices is A @ B."
    )


def resolve(damping: Any, operator: Any, *, each: bool = False, batch: tuple[int, ...] = ()) -> Any:
    """The number that a damping (a number or a rule) means for this matrix.

    Args:
        each: Whether it may also be a pair, of a Kronecker product, which then is a pair of
            numbers.
        batch: `(b,)` where it may also be one number for each of `b` matrices.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is NaN or infinite, or negative and the matrix positive semi-definite.
    """
    value: Any = damping(operator) if callable(damping) else damping
    if each and isinstance(value, tuple) and hasattr(operator, "factors"):
        for_A, for_G = value
        G, A = operator.factors
        return resolve(for_A, A, batch=batch), resolve(for_G, G, batch=batch)
    if batch and isinstance(value, Tensor) and value.shape == batch:
        value = value.to(operator.device, operator.dtype)
    else:
        value = scalar(value, operator, "the damping")
    is_tensor = isinstance(value, Tensor)
    negative = is_true(~(value >= 0).all()) if is_tensor else not value >= 0
    # Some matrices have to look at all their entries to know their structure.
    if negative and operator.structure == Structure.PSD:
        lowest = float(value.detach().min()) if is_tensor else value
        raise ValueError(
            "Expected the damping of a positive semi-definite matrix to be at least 0, got "
            f"{lowest:g}."
        )
    if is_tensor and value.ndim and is_true(~value.isfinite().all()):
        raise ValueError(f"Expected finite dampings, got {value.tolist()}.")
    return value


def is_zero(damping: Scalar) -> bool:
    """Whether there is no damping: neither a positive number, nor one that derivatives are taken
    with respect to.
    """
    if isinstance(damping, Tensor):
        return not damping.requires_grad and is_true((damping == 0).all())
    return damping == 0


def heuristic_damping(
    A: Any, G: Any, damping: Scalar, min_damping: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """Split one damping `λ` between the factors of `G ⊗ A` (Martens and Grosse, 2015, arXiv
    1503.05671, section 6.3).

    With `π = √((tr A / dim A) / (tr G / dim G))` the factors get `π √λ` and `√λ / π`, so that `(G +
    √λ/π I) ⊗ (A + π √λ I)` differs from `G ⊗ A + λ I` by cross terms that are as small as possible
    in trace norm.

    Args:
        A: Input factor, a tensor `[*b, i, i]` or an operator.
        G: Gradient factor, a tensor `[*b, o, o]` or an operator.
        damping: `λ`.
        min_damping: Neither part gets smaller than this.

    Returns:
        `(λ_A, λ_G)`, one number per matrix of a batch. Both are `λ` where a mean eigenvalue is not
        positive.

    Example:
        >>> heuristic_damping(4.0 * torch.eye(3), torch.eye(2), damping=1e-2)
        (tensor(0.2000), tensor(0.0500))
    """
    mean_A = _mean_eigenvalue(A)
    mean_G = _mean_eigenvalue(G)
    usable = (mean_A > 0) & (mean_G > 0)
    ones = torch.ones_like(mean_A * mean_G)
    pi = torch.where(usable, mean_A / torch.where(usable, mean_G, ones), ones).sqrt()
    root = damping.sqrt() if isinstance(damping, Tensor) else sqrt(damping)
    for_A = (pi * root).clamp(min=min_damping)
    for_G = (root / pi).clamp(min=min_damping)
    undivided = damping * ones
    return torch.where(usable, for_A, undivided), torch.where(usable, for_G, undivided)


def _mean_eigenvalue(factor: Any) -> Tensor:  # -> [*b]
    if isinstance(factor, Tensor):
        return factor.diagonal(dim1=-2, dim2=-1).mean(-1)
    return factor.traces() / factor.size
