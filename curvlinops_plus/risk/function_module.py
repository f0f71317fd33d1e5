"""Functions of parameters and an input, as models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from torch import Tensor, nn

# A module, or a function `(params, X) -> outputs` with a mapping of parameters.
ModelOrFunction = nn.Module | Callable[..., Any]


class FunctionModule(nn.Module):
    """A function `(params, X) -> outputs` as a module that holds the parameters.

    Its parameters have the names that the function knows them by; `"layer.weight"` is that of an
    inner module.

    Args:
        function: The function. It is called with a dict of tensors, which are not always those that
            were given, and then as a module is: with `X`, or with keywords from a mapping that
            has `labels`.
        params: Name to value. The module's parameters share their memory, so that changes in place
            are seen.

    Raises:
        TypeError: If it is no function, or `params` no dict of tensors.
    """

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Tensor] | Any) -> None:
        super().__init__()
        if isinstance(function, type):
            raise TypeError(f"`model` is the class {function.__name__}: call it.")
        if not callable(function):
            raise TypeError(
                f"The model is a {type(function).__name__}; expected a torch.nn.Module, or a "
                "function (params, X) -> outputs. Of a risk take curvature(risk, KFAC), GGN(risk) "
                "and the like."
            )
        if not isinstance(params, Mapping) or not all(
            isinstance(key, str) and isinstance(p, Tensor) for key, p in params.items()
        ):
            raise TypeError(
                "A model that is a function is called as function(params, X), and needs `params`, "
                f"a dict from names to tensors; got {type(params).__name__}."
            )
        self.function = function
        #: Key of the function to the names of the inner modules around its parameter, and its own.
        self._places: dict[str, list[str]] = {}
        for key, value in params.items():
            place = []
            holder: nn.Module = self
            *outer, last = key.split(".")
            for name in outer:
                name = _free(holder, name)
                holder.add_module(name, holder._modules.get(name) or nn.Module())
                holder = holder.get_submodule(name)
                place.append(name)
            last = _free(holder, last)
            p = value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach(), False)
            holder.register_parameter(last, p)
            self._places[key] = [*place, last]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function's value at the module's parameters."""
        params = {key: reduce(getattr, place, self) for key, place in self._places.items()}
        return self.function(params, *args, **kwargs)


def _free(holder: nn.Module, name: str) -> str:
    """A name for something in a module, which may have another attribute of this name, as all have
    "training".
    """
    return f"{name}_" if hasattr(holder, name) and name not in holder._modules else name
