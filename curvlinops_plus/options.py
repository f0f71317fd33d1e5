"""Readers of arguments: each returns its value in one type, or refuses it under its name.

Public functions and constructors read options by these before they compute anything, so that what
is out of range is refused where it was given, and not by PyTorch some steps later. A value of
another type is a `TypeError`, one out of range a `ValueError`; both say what was expected.
"""

from __future__ import annotations

import operator
from math import inf, isfinite, nan
from numbers import Real
from reprlib import repr as shortened
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "device_of",
    "flag",
    "function",
    "instance",
    "integer",
    "number",
    "one_of",
    "random_generator",
    "tensor_of",
    "type_error",
    "whole",
]


def number(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    optional: bool = False,
) -> Any:
    """A finite number as a float; tensors with one entry are numbers, True and False are not.

    Args:
        low, above: It must be at least `low`, or larger than `above`.
        high, below: The same from the other side.
        infinite: Whether it may be infinite; or NaN, where there are no bounds.
        optional: Whether it may be None, which is returned.

    Example:
        >>> number("lr", torch.tensor(0.5), low=0)
        0.5
        >>> number("lr", float("inf"), low=0)
        Traceback (most recent call last):
        ValueError: lr=inf; expected a finite number at least 0.
    """
    if optional and value is None:
        return None
    if isinstance(value, Tensor):
        value = value.detach()
        is_number = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    else:
        is_number = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
    as_float = _nearest_float(value) if is_number else nan
    within = (
        (low is None or as_float >= low)
        and (above is None or as_float > above)
        and (high is None or as_float <= high)
        and (below is None or as_float < below)
    )
    if is_number and within and (infinite or isfinite(as_float)):
        return as_float
    bounds = {"at least": low, "above": above, "at most": high, "below": below}
    limits = [f"{word} {limit:g}" for word, limit in bounds.items() if limit is not None]
    kind = "a number" if isfinite(as_float) or not is_number else "a finite number"
    expected = f"{kind} {' and '.join(limits)}".rstrip()
    if not is_number:
        raise type_error(name, value, expected)
    raise ValueError(f"{name}={as_float:g}; expected {expected}.")


def _nearest_float(real: Any) -> float:
    """A number as a float; infinite if it is larger than all of these."""
    try:
        return float(real)
    except OverflowError:  # of an integer
        return inf if real > 0 else -inf


def integer(name: str, value: Any, low: int | None = None, *, optional: bool = False) -> Any:
    """An integer of at least `low`, also one of NumPy or a 0-d tensor; None if it is `optional`.

    Example:
        >>> integer("max_iter", np.int64(3), low=1)
        3
        >>> integer("max_iter", 2.5, low=1)
        Traceback (most recent call last):
        TypeError: max_iter is the float 2.5; expected an integer of at least 1.
    """
    if optional and value is None:
        return None
    expected = "an integer" if low is None else f"an integer of at least {low}"
    integral = whole(value)
    if integral is None:
        raise type_error(name, value, expected)
    if integral >= 2**63:
        raise ValueError(f"{name}={shortened(integral)}; expected {expected}, below 2**63.")
    if low is not None and integral < low:
        raise ValueError(f"{name}={integral}; expected {expected}.")
    return integral


def whole(value: Any) -> int | None:
    """An integer, also one of NumPy or a 0-d tensor of integers; None for anything else, True and
    False included.

    Example:
        >>> whole(torch.tensor(3)), whole(3.0), whole(True)
        (3, None, None)
    """
    # Before NumPy 2.3 np.True_ is an index.
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, Tensor) and (value.ndim or value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def flag(name: str, value: Any, *, optional: bool = False) -> Any:
    """True or False, also as 1 or 0; None if it is `optional`.

    Example:
        >>> flag("maximize", "no")
        Traceback (most recent call last):
        TypeError: maximize is the str 'no'; expected True or False.
    """
    if optional and value is None:
        return None
    if not isinstance(value, (bool, np.bool_, int)) or value not in (0, 1):
        raise type_error(name, value, "True, False or None" if optional else "True or False")
    return bool(value)


def one_of(name: str, value: Any, *words: str | None) -> Any:
    """One of these words, or None if that is among them.

    Example:
        >>> one_of("norm", "taxi", "euclidean", "fisher")
        Traceback (most recent call last):
        ValueError: norm='taxi'; expected one of 'euclidean', 'fisher'.
    """
    is_word = value is None or isinstance(value, str)
    if not is_word or value not in words:
        raise ValueError(
            f"{name}={shortened(value)}; expected one of {', '.join(map(repr, words))}."
        )
    return value


def function(name: str, value: Any, form: str, *, optional: bool = True) -> Any:
    """Something to call, or None if it is `optional`; `form` says how it is called.

    Example:
        >>> function("mask", torch.ones(2, 3), "mask(X, y) -> [N, T] bool")
        Traceback (most recent call last):
        TypeError: mask is a Tensor [2, 3] of torch.float32; expected a function, mask(X, y) -> [N,
            T] bool.
    """
    if not callable(value) and not (optional and value is None):
        raise type_error(name, value, f"a function, {form}")
    return value


def instance(
    name: str,
    value: Any,
    kinds: type | tuple[type, ...],
    expected: str,
    *,
    optional: bool = False,
) -> Any:
    """An object of one of these classes, or None if it is `optional`; `expected` says in words
    which, and where they come from.
    """
    if not isinstance(value, kinds) and not (optional and value is None):
        raise type_error(name, value, expected)
    return value


def random_generator(value: Any, advice: str = "") -> torch.Generator | None:
    """A generator of random numbers, or None for the global one."""
    expected = "a torch.Generator; for a seed write generator=torch.Generator().manual_seed(seed)"
    return instance("generator", value, torch.Generator, expected + advice, optional=True)


def device_of(name: str, value: Any) -> Any:
    """A device, also by its name; None stays None."""
    if value is None or isinstance(value, torch.device):
        return value
    try:
        return torch.device(value)
    except (TypeError, RuntimeError, ValueError, OverflowError) as error:
        raise type_error(name, value, "a device, such as 'cpu' or 'cuda:0'") from error


def tensor_of(name: str, value: Any) -> Tensor:
    """A tensor, also of a list of numbers or a NumPy array."""
    try:
        return torch.as_tensor(value)
    except (TypeError, RuntimeError, ValueError, OverflowError) as error:
        raise type_error(name, value, "a tensor, or numbers for one") from error


def type_error(name: str, value: Any, expected: str) -> TypeError:
    """The error about an argument of another type than was expected."""
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, np.bool_)):
        came = repr(value)
    elif isinstance(value, Tensor):
        came = f"a {kind} {list(value.shape)} of {value.dtype}"
    elif isinstance(value, type):
        came = f"the class {value.__name__}"
    elif isinstance(value, (str, int, float, complex, list, tuple, dict)):
        came = f"the {kind} {shortened(value)}"
    else:
        came = f"a {kind}"
    return TypeError(f"{name} is {came}; expected {expected}.")
