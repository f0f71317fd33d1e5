"""From the arguments of curvlinops' classes to an `EmpiricalRisk`, and the options that they name
by strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.risk import EmpiricalRisk


class FisherType(str, Enum):
    """Which matrix the gradient statistics estimate; members and their strings may be used alike.

    Example:
        >>> FisherType("mc") is FisherType.MC, FisherType.MC == "mc"
        (True, True)
    """

    TYPE2 = "type-2"
    MC = "mc"
    EMPIRICAL = "empirical"
    FORWARD_ONLY = "forward-only"


class KFACType(str, Enum):
    """How positions that share a weight are treated, see `KFAC`."""

    EXPAND = "expand"
    REDUCE = "reduce"


def names_of(kinds: type[Enum]) -> list[str]:
    """The strings of the members."""
    return [kind.value for kind in kinds]


def build_risk(
    model_func: nn.Module | Callable[..., Any],
    loss_func: Any,
    params: Sequence[Tensor | str] | Mapping[str, Tensor],
    data: Iterable[Any],
    progressbar: bool = False,
    num_data: int | None = None,
    batch_size_fn: Callable[[Any], int] | None = None,
    **risk_options: Any,
) -> EmpiricalRisk:
    """The risk that the arguments of a classic operator describe, see `GGNLinearOperator`."""
    return EmpiricalRisk(
        model_func,
        loss_func,
        data,
        params,
        progressbar=progressbar,
        num_data=num_data,
        batch_size_fn=batch_size_fn,
        **risk_options,
    )
