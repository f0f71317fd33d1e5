"""Comparing numbers, and the registry of the checks that are made on a case with what a check has
at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus import Empirical, EmpiricalRisk, Exact, curvature
from test.fuzz.case import Case
from test.fuzz.pieces import Options
from test.fuzz.truth import Truth

#: What is backpropagated where the matrix is known exactly.
VECTORS: dict[str, Any] = {
    "exact": Exact(),
    "empirical": Empirical(),
    "terms": Empirical(per_term=True),
}


class Failure(AssertionError):
    """A law that does not hold, and what was found and expected."""

    def __init__(self, law: str, numbers: str) -> None:
        super().__init__(f"{law}: {numbers}")
        self.law, self.numbers = law, numbers


class Skipped(Exception):
    """A check that says nothing about a case."""


def require(condition: bool) -> None:
    """Leave a check that does not apply to a case."""
    if not condition:
        raise Skipped


def holds(law: str, condition: bool, numbers: str) -> None:
    """Fail unless something is true."""
    if not condition:
        raise Failure(law, numbers)


def equal(law: str, got: Any, expected: Any, tolerance: float, scale: float | None = None) -> None:
    """Fail unless shapes agree and the difference is below the tolerance, relative to `scale` or
    the norm expected.
    """
    got, expected = (torch.as_tensor(t).detach().to(torch.float64) for t in (got, expected))
    holds(
        law,
        got.shape == expected.shape,
        f"shape {list(got.shape)}, expected {list(expected.shape)}",
    )
    if not got.numel():
        return
    holds(law, bool(expected.isfinite().all()), "the expected numbers are not finite")
    holds(
        law, bool(got.isfinite().all()), f"not finite: {_short(got)}, expected {_short(expected)}"
    )
    error = float((got - expected).norm())
    size = max(float(expected.norm()) if scale is None else scale, 1e-4)
    holds(
        law,
        error <= tolerance * size,
        f"relative error {error / size:.1e}: {_short(got)}, expected {_short(expected)}",
    )


def _short(t: Tensor) -> str:
    if t.numel() == 1:
        return f"{float(t):.10g}"
    return f"norm {float(t.norm()):.8g} of {list(t.shape)}"


@dataclass(eq=False)
class Subject:
    """A case that is looked at, and the truth about it; with `self_check` the package looks, as it
    does for users.
    """

    case: Case
    self_check: bool = True

    @cached_property
    def truth(self) -> Truth:
        return Truth(self.case)

    @property
    def tolerance(self) -> float:
        return 1e-8 if self.case.dtype == torch.float64 else 3e-3

    @property
    def double(self) -> bool:
        return self.case.dtype == torch.float64

    def risk(self, data: Any = None, **options: Any) -> EmpiricalRisk:
        """The library's view of the case."""
        case = self.case
        data = case.shown(case.data if data is None else data)
        options = {**case.options, "check": self.self_check, **options}
        return EmpiricalRisk(case.model, case.loss, data, case.params, **options)

    @property
    def known(self) -> bool:
        """Whether every loss is the negative logarithm of a probability that the package knows."""
        return all(o["kind"] != "other" for o in self.case.about["losses"])

    def curvature(self, approximation: Any, **options: Any) -> Any:
        """A block-diagonal operator of the case."""
        require(self.known)
        return curvature(self.risk(), approximation, **options).compute()

    def normal(self, *shape: int, what: str = "") -> Tensor:
        return self.case.normal(*shape, what=what)

    def equal(
        self, law: str, got: Any, expected: Any, factor: float = 1.0, scale: float | None = None
    ) -> None:
        """Compare in the tolerance of the case's precision."""
        equal(law, got, expected, factor * self.tolerance, scale)


@dataclass(frozen=True)
class Check:
    """A check of a case, which raises `Failure`; its random options; how often it is drawn, None
    for always.
    """

    run: Callable[[Subject, Options], None]
    draw: Callable[[Random], Options]
    often: float | None


CHECKS: dict[str, Check] = {}


def check(
    name: str, draw: Callable[[Random], Options] = lambda r: {}, often: float | None = 1.0
) -> Callable[[Callable[[Subject, Options], None]], Callable[[Subject, Options], None]]:
    """Register a check."""

    def register(run: Callable[[Subject, Options], None]) -> Callable[[Subject, Options], None]:
        CHECKS[name] = Check(run, draw, often)
        return run

    return register


def draw_checks(seed: int, number: int = 3) -> list[list[Any]]:
    """Names and options of the checks that are always made, and of some others."""
    r = Random(f"checks {seed}")
    always = [name for name, one in CHECKS.items() if one.often is None]
    others = {name: one.often for name, one in CHECKS.items() if one.often is not None}
    chosen: list[str] = []
    while len(chosen) < min(number, len(others)):
        name = r.choices([*others], [*others.values()])[0]
        if name not in chosen:
            chosen.append(name)
    return [[name, CHECKS[name].draw(r)] for name in [*always, *chosen]]
