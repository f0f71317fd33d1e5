"""Reading what may be damaged or made by hand: each field by its name, and for what it must be.

Whatever a state holds, reading it raises a `ValueError` that names the field, what was expected,
and what came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

FLOATS = {str(dtype)[6:]: dtype for dtype in (torch.float64, torch.float32, torch.float16)}
FLOATS["bfloat16"] = torch.bfloat16

# What constructors and PyTorch raise about arguments of a wrong type or form. Among them is the end
# of the stack, for data that are nested thousands of times.
_MISREAD = (TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError)


@contextmanager
def reading(title: str) -> Iterator[None]:
    """Whatever fails in this context is about a part of a state with this title: a `ValueError`."""
    try:
        yield
    except ValueError:
        raise
    except _MISREAD as error:
        raise ValueError(
            f"{title} can't be read ({type(error).__name__}: {str(error)[:200]}); is the file "
            "damaged, or not ours?"
        ) from error


class Fields:
    """The fields of a part of a state.

    Args:
        data: The part, a mapping.
        title: What messages call it, such as "The state".

    Example:
        >>> fields = Fields({"steps": 3, "lr": -1.0}, "The state")
        >>> fields.count("steps")
        3
        >>> fields.number("lr", low=0.0)
        Traceback (most recent call last):
        ValueError: The state: 'lr' is -1.0; expected a number of at least 0. Is the file damaged?
    """

    def __init__(self, data: Any, title: str) -> None:
        self.title = title
        if not isinstance(data, Mapping):
            raise self.error("this part", data, "a dict")
        self.data: Mapping[Any, Any] = data

    def error(self, field: str, value: Any, expected: str) -> ValueError:
        """That a field has a value that it can't have."""
        if isinstance(value, Tensor):
            came = f"a tensor of {value.dtype} and shape {list(value.shape)}"
        elif isinstance(value, (str, int, float)) or value is None:
            came = repr(value)[:100]
        else:
            came = f"a {type(value).__name__}"
        return ValueError(
            f"{self.title}: {field} is {came}; expected {expected}. Is the file damaged?"
        )

    def require(self, names: Collection[Any]) -> None:
        """Refuse a part that lacks some of these fields."""
        if missing := [name for name in names if name not in self.data]:
            raise ValueError(f"{self.title} lacks {sorted(missing)}; is the file cut off?")

    def __getitem__(self, name: Any) -> Any:
        self.require([name])
        return self.data[name]

    def part(self, name: Any) -> Fields:
        """The fields of a part within this one."""
        return Fields(self[name], f"{self.title}, {name!r}")

    def parts(self) -> Iterator[tuple[Any, Fields]]:
        """All fields, each of which is a part."""
        for name in self.data:
            yield name, self.part(name)

    def word(self, name: str, known: Collection[str] | None = None) -> str:
        """A string, one of those that are known."""
        value = self[name]
        if not isinstance(value, str):
            raise self.error(repr(name), value, "a string")
        if known is not None and value not in known:
            raise self.error(repr(name), value, f"one of {', '.join(known)}")
        return value

    def flag(self, name: str) -> bool:
        """True or False, or 1 or 0."""
        value = self[name]
        if not isinstance(value, int) or value not in (0, 1):
            raise self.error(repr(name), value, "True or False")
        return bool(value)

    def number(self, name: Any, low: float = -inf) -> Any:
        """A finite number of at least `low`, as it is; 0-d tensors are numbers."""
        value = self[name]
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        real = isinstance(number, Real) and not isinstance(number, bool)
        if not real or not isfinite(number) or number < low:
            bound = "" if low == -inf else f" of at least {low:g}"
            raise self.error(repr(name), number, f"a {'finite ' * (low == -inf)}number{bound}")
        return value

    def count(self, name: Any) -> int:
        """An integer that is not negative; 0-d tensors of integers are integers."""
        value = self[name]
        if isinstance(value, Tensor) and not value.ndim:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            raise self.error(repr(name), value, "an integer of at least 0")
        return int(value)

    def sequence(self, name: str, length: int | None = None) -> Fields:
        """A list or tuple as fields with numbers for names."""
        value = self[name]
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            numbered = "" if length is None else f" of {length} entries"
            raise self.error(repr(name), value, f"a list{numbered}")
        return Fields(dict(enumerate(value)), f"{self.title}, {name!r}")

    def indices(self, name: str, size: int) -> list[int]:
        """A list of integers from 0 to `size - 1`."""
        numbers = self.sequence(name)
        indices = [numbers.count(k) for k in numbers.data]
        if any(index >= size for index in indices):
            raise self.error(repr(name), indices, f"indices below {size}")
        return indices

    def tensor(
        self, name: Any, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor without NaN or infinite entries, of this shape and dtype."""
        value = self[name]
        expected = "a tensor"
        if dtype is not None:
            expected += f" of {dtype}"
        if shape is not None:
            expected += f" and shape {list(shape)}"
        fits = (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and shape in (None, tuple(value.shape))
            and dtype in (None, value.dtype)
        )
        if not fits:
            raise self.error(repr(name), value, expected)
        require_finite_entries(value, f"{self.title}: {name!r}")
        return value


def require_finite_entries(t: Tensor, title: str) -> None:
    """Refuse NaN and infinite entries."""
    # A sum is finite unless a term is not, or it overflows: look at each of them only then.
    if not bool(t.sum().isfinite()) and not bool(t.isfinite().all()):
        raise ValueError(f"{title} has NaN or infinite entries. Is the file damaged?")
