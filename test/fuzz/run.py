"""Running cases: what holds, what was refused, and what failed."""

from __future__ import annotations

import linecache
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from curvlinops_plus import CurvatureWarning, NoClosedForm, NumericsError, UnsupportedError
from test.fuzz import algebra_checks, matrix_checks, training_checks  # noqa: F401 (they register)
from test.fuzz.case import Description, draw, make
from test.fuzz.checks import CHECKS, Failure, Skipped, Subject, draw_checks
from test.fuzz.limits import small_buffers
from test.helpers import unchanged


@dataclass
class Problem:
    """A check that failed: its name and options; what did not hold, or the type of an error;
    numbers or its message.
    """

    check: list[Any]
    law: str
    numbers: str


@dataclass
class Outcome:
    """What became of a case: how many checks ran to their end, messages of refusals, and
    failures.
    """

    made: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)


def draw_whole(seed: int) -> Description:
    """The description of a case with its checks."""
    return {**draw(seed), "checks": draw_checks(seed)}


def run_case(about: Description, small: bool = False, self_check: bool = True) -> Outcome:
    """Make every check of a case.

    Args:
        about: The description.
        small: Set every limit of working memory to 64 bytes.
        self_check: Let the package look at what it records, as it does for users.

    Raises:
        Invalid: If there is no such case.
    """
    case, outcome = make(about), Outcome()
    subject = Subject(case, self_check)
    if not subject.truth.kept:
        about = {**about, "checks": about["checks"][:1]}  # nothing counts: only that it is refused
    with warnings.catch_warnings(), small_buffers() if small else nullcontext():
        warnings.simplefilter("ignore", CurvatureWarning)
        warnings.filterwarnings("ignore", module="torch")
        for name, options in about["checks"]:
            try:
                with unchanged(case.model, case.data):
                    CHECKS[name].run(subject, options)
                outcome.made += 1
            except Skipped:
                pass
            except Failure as failure:
                outcome.problems.append(Problem([name, options], failure.law, failure.numbers))
            except Exception as error:
                if is_refusal(error):
                    outcome.refused[f"{name}: {type(error).__name__}: {str(error)[:150]}"] += 1
                else:
                    outcome.problems.append(
                        Problem([name, options], type(error).__name__, str(error)[:500])
                    )
    return outcome


def is_refusal(error: BaseException) -> bool:
    """Whether an error is the package's own word: raised there, not by PyTorch, SciPy or these
    checks.
    """
    if isinstance(error, (UnsupportedError, NumericsError, NoClosedForm)):
        return True
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    ours = traceback.tb_frame.f_globals.get("__name__", "").startswith("curvlinops_plus.")
    line = linecache.getline(code.co_filename, traceback.tb_lineno).strip()
    return isinstance(error, (ValueError, RuntimeError)) and ours and line.startswith("raise ")


def run_seed(seed: int, small: bool = False) -> Outcome:
    """Make the case of a seed and run it."""
    torch.set_num_threads(1)
    return run_case(draw_whole(seed), small)


def describe(about: Description) -> str:
    """A case as a few readable lines."""
    lines = [
        f"  data      {'tokens' if about['tokens'] else about['dtype']} [N, "
        f"{', '.join(map(str, about['input']))}], batches of {about['sizes']}",
        *(f"  layer     {_call(name, options)}" for name, options in about["layers"]),
        *(f"  head      {_call(**_named(head, 'form'))}" for head in about["heads"]),
        *(f"  loss      {_call(**_named(o, 'kind'))}" for o in about["losses"]),
        f"  params    {about['params']}, frozen: {about['frozen']}, num_data={about['num_data']}",
        *(f"  check     {_call(name, options)}" for name, options in about["checks"]),
    ]
    return "\n".join(lines)


def _named(options: dict[str, Any], key: str) -> dict[str, Any]:
    return {"name": options[key], "options": {k: v for k, v in options.items() if k != key}}


def _call(name: str, options: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
