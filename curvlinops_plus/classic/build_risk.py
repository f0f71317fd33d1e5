"""From the arguments of curvlinops' classes to an `EmpiricalRisk`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.risk import EmpiricalRisk

_OPTIONS = signature(EmpiricalRisk).parameters


def build_risk(
    model_func: nn.Module | Callable[..., Any],
    loss_func: Any,
    params: Sequence[Tensor] | Mapping[str, Tensor],
    data: Iterable[Any],
    progressbar: bool = False,
    num_data: int | None = None,
    batch_size_fn: Callable[[Any], int] | None = None,
    *,
    of_layers: bool = False,
    **risk_options: Any,
) -> EmpiricalRisk:
    """The risk that the arguments of a classic operator describe, see `GGNLinearOperator`.

    Args:
        of_layers: For an operator made of layers: as in curvlinops 3.0.1 inputs in mappings need `batch_size_fn`.

    Raises:
        TypeError: If neither the operator nor `EmpiricalRisk` has an option.
        ValueError: If the model is a function and `params` is no mapping, or `batch_size_fn` is missing.
    """
    if unknown := [name for name in risk_options if name not in _OPTIONS]:
        raise TypeError(
            f"Unexpected keyword {', '.join(map(repr, unknown))}: an option neither of this operator nor of "
            "`EmpiricalRisk`, whose options it takes, too."
        )
    if of_layers and batch_size_fn is None and isinstance(data, Sequence) and len(data):
        item = data[0]
        if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], Mapping):
            raise ValueError(
                "When using dict-like custom data, `batch_size_fn` is required: a function of X that returns the "
                "number of examples, for instance `batch_size_fn=lambda X: len(X['x'])`."
            )
    risk = EmpiricalRisk(
        model_func if isinstance(model_func, nn.Module) else FunctionModule(model_func, params),
        loss_func,
        data,
        params,
        progressbar=progressbar,
        num_data=num_data,
        batch_size_fn=batch_size_fn,
        **risk_options,
    )
    return risk


class FunctionModule(nn.Module):
    """A function `(params, X) -> outputs` as a module that holds the parameters.

    Args:
        function: The function; its parameters may be replaced as those of any module.
        params: Values of the parameters, by key.

    Raises:
        TypeError: If it is no function.
        ValueError: If `params` is no mapping.
    """

    def __init__(self, function: Callable[..., Any], params: Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        super().__init__()
        if isinstance(function, EmpiricalRisk) or not callable(function):
            other = " Of a risk take curvature(risk, KFAC), GGN(risk) and the like."
            raise TypeError(
                f"The model is a {type(function).__name__}; expected a torch.nn.Module, or a function (params, X) -> "
                f"outputs.{other if isinstance(function, EmpiricalRisk) else ''}"
            )
        if not isinstance(params, Mapping):
            raise ValueError(
                "A model that is a function needs `params` as a dict, and is called as model_func(params, X). Pass "
                "dict(model.named_parameters()) or the like, or a torch.nn.Module."
            )
        self.function, self.keys = function, list(params)
        for index, p in enumerate(params.values()):
            own = p if isinstance(p, nn.Parameter) else nn.Parameter(p.detach(), requires_grad=False)
            self.register_parameter(f"p{index}", own)

    def forward(self, X: Any) -> Any:
        """The function's result with the module's parameters.

        Raises:
            ValueError: If it asks for a parameter that there is not.
        """
        params = {key: getattr(self, f"p{index}") for index, key in enumerate(self.keys)}
        try:
            return self.function(params, X)
        except KeyError as error:
            if isinstance(X, Mapping) or not error.args or error.args[0] in params:
                raise  # another mapping's
            raise ValueError(
                f"The model function asks for {error.args[0]!r}, and `params` has no such key; it has {self.keys}."
            ) from error
