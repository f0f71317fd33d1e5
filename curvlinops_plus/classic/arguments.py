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
    params: Sequence[Tensor] | Mapping[str, Tensor],
    data: Iterable[Any],
    progressbar: bool = False,
    num_data: int | None = None,
    batch_size_fn: Callable[[Any], int] | None = None,
    **risk_options: Any,
) -> EmpiricalRisk:
    """The risk that the arguments of a classic operator describe, see `GGNLinearOperator`."""
    model = model_func if isinstance(model_func, nn.Module) else FunctionModule(model_func, params)
    return EmpiricalRisk(
        model,
        loss_func,
        data,
        params,
        progressbar=progressbar,
        num_data=num_data,
        batch_size_fn=batch_size_fn,
        **risk_options,
    )


class FunctionModule(nn.Module):
    """A function `(params, X) -> outputs` as a module that holds the parameters.

    Args:
        function: The function; its parameters may be replaced as those of any module.
        params: Values of the parameters, by key.

    Raises:
        TypeError: If it is no function.
        ValueError: If `params` is no mapping.
    """

    def __init__(
        self, function: Callable[..., Any], params: Sequence[Tensor] | Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        if isinstance(function, EmpiricalRisk) or not callable(function):
            raise TypeError(
                f"The model is a {type(function).__name__}; expected a torch.nn.Module, or a "
                "function (params, X) -> outputs. Of a risk take curvature(risk, KFAC), GGN(risk) "
                "and the like."
            )
        if not isinstance(params, Mapping):
            raise ValueError(
                "A model that is a function needs `params` as a dict; it is called as "
                "model_func(params, X)."
            )
        self.function = function
        self.keys = list(params)
        for index, p in enumerate(params.values()):
            if not isinstance(p, nn.Parameter):
                p = nn.Parameter(p.detach(), requires_grad=False)
            self.register_parameter(f"p{index}", p)

    def forward(self, X: Any) -> Any:
        """The function's value at the module's parameters."""
        params = {key: getattr(self, f"p{index}") for index, key in enumerate(self.keys)}
        return self.function(params, X)
