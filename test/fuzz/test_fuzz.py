"""The fuzzer holds on its first seeds, and notices when something is broken."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlinops_plus
from curvlinops_plus.blocks import kfac
from curvlinops_plus.layer import AffineRule
from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.likelihood.mse import MSE
from curvlinops_plus.linalg import Kronecker
from curvlinops_plus.risk import EmpiricalRisk, function_reads
from curvlinops_plus.risk.layers import FoundReads

from . import run, shrink
from .compare import Failure, equal
from .limits import LIMITS, small_buffers
from .run import describe, draw_whole, run_case, run_seed

SEEDS = 12


@pytest.mark.parametrize("small", [False, True], ids=["usual buffers", "small buffers"])
def test_first_seeds(small: bool) -> None:
    outcomes = [run_seed(seed, small) for seed in range(1000 * small, 1000 * small + SEEDS)]
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    made, refused = (sum(numbers) for numbers in zip(*((o.made, o.refused.total()) for o in outcomes), strict=True))
    assert made > 5 * SEEDS
    assert refused < 0.1 * made


def test_a_seed_is_a_case() -> None:
    first, again = draw_whole(7), draw_whole(7)
    assert first == again == json.loads(json.dumps(first))
    one, two = run.make(first), run.make(again)
    for x, y in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(x, y)
    assert "loss" in describe(first)


# ----------------------------------------------------------------------------------------------------- it can fail
def _wrap(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace a method by `change(the method, *its arguments)`."""
    plain = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *a, **k: change(plain, *a, **k))


def _without_last(plain: Any, rule: Any, module: Any, g: Tensor) -> Tensor:
    b = plain(rule, module, g).clone()
    b[:, -1] = 0
    return b


def _wrong_batches(plain: Any, risk: Any, desc: str) -> Any:
    batches = list(plain(risk, desc))
    return iter(batches[:-1] if len(batches) > 1 else batches)


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a factor in a rule": _wrap(LinearRule, "grads", lambda plain, rule, m, g: 2 * plain(rule, m, g)),
    "an example that a rule forgets": _wrap(LinearRule, "grads", _without_last),
    "a batch that is not read": _wrap(EmpiricalRisk, "batches", _wrong_batches),
    "a wrong scale": _wrap(EmpiricalRisk, "scale", lambda plain, *a: 1.0001 * plain(*a)),
    "a wrong root": _wrap(MSE, "root_diagonal", lambda plain, *a: 1.01 * plain(*a)),
    "a sum over positions that is a mean": _wrap(
        AffineRule, "sum_grads", lambda plain, rule, m, g: plain(rule, m, g) / max(1, g[0, 0, ..., 0].numel())
    ),
    "a wrong damping": _wrap(Kronecker, "_inverse", lambda plain, K, damping, retry: plain(K, 2 * damping, retry)),
}


#: Those in which the rule of a layer is wrong.
RULE_SEEDS = 8
RULES = ["a factor in a rule", "an example that a rule forgets", "a sum over positions that is a mean"]


@pytest.mark.parametrize("kind", BROKEN)
def test_something_broken_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that does not hold, not merely an error, and not by the package itself."""
    BROKEN[kind](monkeypatch)
    checks = [["inverse", {"kind": "KFAC", "vectors": "exact", "separate": False, "times": 1.0, "rule": False}]]
    given = {"checks": checks} if "damping" in kind else {}
    outcomes = (run_case({**draw_whole(seed), **given}, self_check=False) for seed in range(60))
    assert any(not problem.law.isidentifier() for outcome in outcomes for problem in outcome.problems)


@pytest.mark.parametrize("kind", RULES)
def test_a_broken_rule_is_noticed_by_the_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anybody's asking for it, and without a wrong number."""
    BROKEN[kind](monkeypatch)
    # Else the module around a layer would be run for each example, which has other blocks.
    monkeypatch.setattr(function_reads, "find_functions", lambda *given: FoundReads())
    outcomes = [run_case(draw_whole(seed)) for seed in range(RULE_SEEDS)]
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    assert any("by the layer's rule" in message for outcome in outcomes for message in outcome.refused)


def test_errors_of_others_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise ValueError("not in the words of the package")

    monkeypatch.setattr(torch.linalg, "eigh", broken)
    monkeypatch.setattr(kfac.torch.linalg, "eigh", broken)
    assert any(run_seed(seed).problems for seed in range(10))


def test_close_numbers_are_told_apart() -> None:
    equal("law", torch.ones(3), torch.ones(3) + 1e-9, 1e-8)
    with pytest.raises(Failure, match=r"law: relative error 1.0e-07"):
        equal("law", torch.ones(3).double(), torch.ones(3).double() + 1e-7, 1e-8)
    with pytest.raises(Failure, match=r"shape \[2\], expected \[3\]"):
        equal("law", torch.ones(2), torch.ones(3), 1e-8)
    with pytest.raises(Failure, match="not finite"):
        equal("law", torch.full((2,), torch.nan), torch.ones(2), 1e-8)


def test_failures_are_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN["a wrong root"](monkeypatch)
    about, problem = next(
        (draw_whole(seed), problem)
        for seed in range(60)
        for problem in run_seed(seed).problems
        if len(draw_whole(seed)["layers"]) > 1
    )
    small = shrink.shrink(about, problem)
    assert len(small["layers"]) < len(about["layers"])
    assert len(small["checks"]) == 1
    assert run_case(small).problems


# ----------------------------------------------------------------------------------------------------- small buffers
def test_small_buffers_are_set_and_restored() -> None:
    def values() -> list[Any]:
        found = []
        for path, name, _ in LIMITS:
            owner: Any = importlib.import_module(f"curvlinops_plus.{path}")
            for part in name.split("."):
                owner = getattr(owner, part)
            found.append(owner)
        return found

    before = values()
    with small_buffers():
        assert values() == [small for _, _, small in LIMITS]
    assert values() == before


def test_every_limit_is_in_the_table() -> None:
    """Constants of modules that count bytes, rows or blocks."""
    package = Path(curvlinops_plus.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Name) and re.fullmatch(r"_?([A-Z]+_)?(BYTES|BLOCK|ROWS)", target.id):
                    found.add((".".join(path.relative_to(package).with_suffix("").parts), target.id))
    assert len(found) > 10
    defaults = {("blocks.sweep_cache", "KEPT_BYTES"), ("exact.kept", "KEPT_BYTES"), ("blocks.kfac", "MAX_BYTES")}
    assert found - defaults <= {(path, name) for path, name, _ in LIMITS}
