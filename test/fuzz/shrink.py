"""Smaller cases that still fail: fewer layers, batches, options and checks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from .case import Description, differentiable, make
from .run import Invalid, Problem, run_case

__all__ = ["shrink"]


def shrink(about: Description, problem: Problem, small: bool = False, tries: int = 150) -> Description:
    """The smallest description found that still fails in the same check.

    Args:
        about: The description that fails.
        problem: How it fails.
        small: Whether buffers are small.
        tries: How many candidates are run at most.
    """
    about = {**about, "checks": [problem.check]}
    if not _fails(about, problem, small):  # earlier checks are needed
        return {**about, "checks": about["checks"]}
    progress = True
    while progress and tries > 0:
        progress = False
        for candidate in _smaller(about):
            tries -= 1
            if tries <= 0:
                break
            if _fails(candidate, problem, small):
                about, progress = candidate, True
                break
    return about


def _fails(about: Description, problem: Problem, small: bool) -> bool:
    try:
        if not differentiable(make(about)):
            return False
        found = run_case(about, small).problems
    except Invalid:
        return False
    except Exception:
        return False  # not the same case any more
    # A wrong number stays a wrong number, and an error the same kind of error.
    errors = problem.law.isidentifier()
    return any(p.law.isidentifier() == errors and (not errors or p.law == problem.law) for p in found)


def _smaller(about: Description) -> Iterator[Description]:
    """Descriptions with one thing less, the most important first."""

    def changed(**values: Any) -> Description:
        return {**copy.deepcopy(about), **values}

    layers = about["layers"]
    for k in range(len(layers)):
        yield changed(layers=layers[:k] + layers[k + 1 :])
    for k, (name, options) in enumerate(layers):
        inner = options.get("inner")
        if inner:
            yield changed(layers=layers[:k] + inner + layers[k + 1 :])
            for j in range(len(inner)):
                rest = {**options, "inner": inner[:j] + inner[j + 1 :]}
                yield changed(layers=[*layers[:k], [name, rest], *layers[k + 1 :]])
    sizes = about["sizes"]
    for k in range(len(sizes) if len(sizes) > 1 else 0):
        yield changed(sizes=sizes[:k] + sizes[k + 1 :])
    for k, size in enumerate(sizes):
        if size > 1:
            yield changed(sizes=[*sizes[:k], 1, *sizes[k + 1 :]])
    for key, plain in (("params", "all"), ("frozen", "none"), ("num_data", None)):
        if about[key] != plain:
            yield changed(**{key: plain})
    yield from _plainer(about, "losses", {"weight": False, "smoothing": 0.0, "ignore": None, "pos_weight": False})
    yield from _plainer(about, "losses", {"kind": "mse", "reduction": "sum", "factor": 1.0, "full": False})
    yield from _plainer(about, "heads", {"linear": False, "form": "vector", "classes": 2})
    if len(about["losses"]) > 1:
        for k in range(len(about["losses"])):
            yield changed(losses=[about["losses"][k]], heads=[about["heads"][k]], form="single")


def _plainer(about: Description, part: str, plain: dict[str, Any]) -> Iterator[Description]:
    for k, options in enumerate(about[part]):
        for key, value in plain.items():
            if key in options and options[key] != value:
                new = copy.deepcopy(about)
                new[part][k][key] = value
                yield new
