"""Vectors that are sent back through float16, times a power of two that keeps what arrives in its range.

float16 rounds what is smaller than 6e-5 to multiples of 6e-8, and overflows at 65504. A backward pass is linear: what a
vector leaves behind is divided by the same power, in wider numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops_plus.errors import NumericsError

_START = 6  # a vector's largest number is brought to 2 ** _START: below it is more room than above
_HIGH = 14  # the largest number that arrives anywhere should be below 2 ** _HIGH,
_LOW = -4  # and the largest of each layer above 2 ** _LOW, so that numbers of a thousandth keep their digits
_DOWN = 10  # after an overflow
_ROUGH = -17  # the largest of a layer has fewer digits than in bfloat16 below 2 ** _ROUGH


class Arrived(NamedTuple):
    """What vectors leave behind.

    Attributes:
        gradients: What arrived.
        power: The power of two that it is multiplied with.
        rough: Where so little arrived, beside other places, that float16 holds few of its digits.
    """

    gradients: list[Tensor | None]
    power: float = 1.0
    rough: Sequence[int] = ()

    def take(self, at: int) -> Tensor | None:
        """What arrived at one place, divided by the power; it is not kept here any more."""
        g, self.gradients[at] = self.gradients[at], None
        return g if g is None or self.power == 1 else g.to(torch.promote_types(g.dtype, torch.float32)) / self.power


def is_narrow(places: Iterable[Any]) -> bool:
    """Whether one of the tensors, or of the places for them, is in float16."""
    return any(place.dtype == torch.float16 for place in places)


def narrowest(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a vector for an output of this dtype is made: it is rounded after it was multiplied."""
    return torch.float32 if dtype == torch.float16 else dtype


def columns_in_range(X: Tensor, narrow: bool, product: Callable[[Tensor], Tensor]) -> Tensor:
    """A linear function of columns [n, K], each times a power of two that brings its largest number to about 1.

    Args:
        narrow: Whether they go through float16; else they are left as they are.
    """
    if not narrow:
        return product(X)
    power = torch.exp2(torch.frexp(X.detach().abs().amax(0))[1].clamp(-100, 100).to(X.dtype))
    return product(X / power) * power


def require_in_range(found: Tensor, narrow: bool, given: Tensor | None = None) -> Tensor:
    """A result, unless it left the range of float16 on its way: the true one may be finite.

    Args:
        narrow: Whether it went through float16.
        given: What it is the result of; what is not finite itself stays so.

    Raises:
        NumericsError: If it is not finite.
    """
    if narrow and not bool(found.isfinite().all()) and (given is None or bool(given.isfinite().all())):
        raise NumericsError(
            "A product has NaN or infinite entries: something on its way through the model leaves the range of "
            "float16, whose largest number is 65504, or the model's own outputs are not finite. Compute it with "
            "model.float() or model.bfloat16(), or with a loss that is divided by more."
        )
    return found


def below_range(gradients: Iterable[Tensor]) -> bool:
    """Whether float16 gradients that somebody else sent are so small that they have lost digits."""
    narrow = [g.abs().amax() for g in gradients if g.dtype == torch.float16 and g.numel()]
    return bool(narrow) and float(torch.stack(narrow).min()) < 2.0**_LOW


def send_in_range(
    send: Callable[[Sequence[Tensor]], Iterable[Tensor | None]],
    outputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    narrow: bool,
) -> Arrived:
    """Send vectors back.

    Args:
        send: Called with vectors in the outputs' dtypes; returns what arrives. May be called again.
        outputs: Where they are sent from.
        vectors: One for each output, `[*lead, *output]`.
        narrow: Whether there is float16 on their way; else they are sent as they are.

    Cost: a pass, and further ones after an overflow, or if it brought numbers that are too small.
    """
    largest = max(_sizes(vectors).values(), default=0.0) if narrow else 0.0
    if not 0 < largest < math.inf:
        return Arrived([*send([v.to(f.dtype) for v, f in zip(vectors, outputs, strict=True)])])

    def sent(exponent: int) -> tuple[list[Tensor | None], dict[int, float]]:
        found = [*send([(v * 2.0**exponent).to(f.dtype) for v, f in zip(vectors, outputs, strict=True)])]
        return found, _sizes(found)

    exponent = _START - _exponent(largest)
    found, sizes = sent(exponent)
    for _ in range(4):
        if all(map(math.isfinite, sizes.values())):
            break
        exponent -= _DOWN
        found, sizes = sent(exponent)
    else:  # it is not finite, whatever it is multiplied with
        return Arrived(found, 2.0**exponent)
    least, most = (f(sizes.values(), default=1.0) for f in (min, max))
    if least < 2.0**_LOW and (room := _HIGH - _exponent(most)) > 0:
        more = min(room, _LOW - _exponent(least)) if least else room  # zeros may be numbers that were too small
        again, larger = sent(exponent + more)
        if all(map(math.isfinite, larger.values())):
            found, sizes, exponent = again, larger, exponent + more
    return Arrived(found, 2.0**exponent, [at for at, size in sizes.items() if 0 < size < 2.0**_ROUGH])


def _exponent(size: float) -> int:
    return math.frexp(size)[1]


def _sizes(tensors: Iterable[Tensor | None]) -> dict[int, float]:
    """The largest number of each tensor, by its position."""
    found = {at: t.detach().abs().amax().float() for at, t in enumerate(tensors) if t is not None and t.numel()}
    return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}
