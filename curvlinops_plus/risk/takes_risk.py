"""What takes a risk refuses anything else, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from curvlinops_plus.risk.risk import EmpiricalRisk

__all__ = ["takes_risk"]

P = ParamSpec("P")
T = TypeVar("T")


def takes_risk(function: Callable[P, T]) -> Callable[P, T]:
    """A function, or a constructor, whose first argument is a risk: refuses anything else with what to write.

    The arguments are looked at before Python counts them, because who forgets the risk gives model, loss and data.
    """
    constructor = function.__name__ == "__init__"

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        given = args[constructor:] or ([kwargs["risk"]] if "risk" in kwargs else [])
        if given and not isinstance(given[0], EmpiricalRisk):
            _refuse(given[0], type(args[0]).__name__ if constructor else function.__name__)
        return function(*args, **kwargs)

    return checked


def _refuse(given: Any, owner: str) -> None:
    raise TypeError(
        f"{owner} takes an EmpiricalRisk, got a {type(given).__name__}: make one of model, loss and data first, "
        "EmpiricalRisk(model, loss, data)."
    )
