"""What takes a risk, and memory to keep things in, refuses anything else in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from curvlinops_plus.risk.risk import EmpiricalRisk

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


def made_together(constructor: Callable[P, T]) -> Callable[P, T]:
    """A constructor that `takes_risk`: of several processes all have to come through it.

    Else one that fails before it talks to the others, which wait for it, would be taken for them in its next call.
    """

    @wraps(constructor)
    def together(*args: P.args, **kwargs: P.kwargs) -> T:
        risk = args[1] if len(args) > 1 else kwargs.get("risk")
        if not isinstance(risk, EmpiricalRisk):  # Python says what is missing
            return constructor(*args, **kwargs)
        return risk.processes.together(type(args[0]).__name__, lambda: constructor(*args, **kwargs))

    return takes_risk(together)


def _refuse(given: Any, owner: str) -> None:
    raise TypeError(
        f"{owner} takes an EmpiricalRisk, got a {type(given).__name__}: make one of model, loss and data first, "
        "EmpiricalRisk(model, loss, data)."
    )


def checked_bytes(max_kept_bytes: int, between: str) -> int:
    """The option `max_kept_bytes`, checked; `between` what something stays.

    Raises:
        ValueError: If it is no integer of at least 0.
    """
    if isinstance(max_kept_bytes, bool) or not isinstance(max_kept_bytes, int) or max_kept_bytes < 0:
        raise ValueError(
            f"max_kept_bytes={max_kept_bytes!r} must be an integer of at least 0, the memory for what stays between "
            f"{between}; 0 keeps nothing."
        )
    return max_kept_bytes
