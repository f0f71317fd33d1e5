"""The fuzzer holds on its first seeds, and notices when something is broken."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlinops_plus
from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.likelihood.elementwise import MSE
from curvlinops_plus.linalg import Kronecker
from curvlinops_plus.risk import EmpiricalRisk, LayerBatch, function_reads
from curvlinops_plus.risk.found_reads import FoundReads
from test.fuzz import run
from test.fuzz.field_pieces import FIELD_PIECES, FIELD_TOKENS
from test.fuzz.limits import LIMITS
from test.fuzz.run import describe, draw_whole, run_case, run_seed

#: In them each piece of the field appears.
FIELD = [98, 137, 194, 203, 226, 264, 274, 283]


def test_each_piece_of_the_field_appears() -> None:
    described = [json.dumps(draw_whole(seed)) for seed in FIELD]
    for name in (*FIELD_PIECES, *FIELD_TOKENS, "dropout", "later"):
        assert any(f'"{name}"' in about for about in described), name


@pytest.mark.parametrize("small", [False, True], ids=["usual buffers", "small buffers"])
def test_first_seeds(small: bool) -> None:
    seeds = [*range(1000 * small, 1000 * small + 4), *FIELD]
    outcomes = [run_seed(seed, small) for seed in seeds]
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    made, refused = (
        sum(numbers)
        for numbers in zip(*((o.made, o.refused.total()) for o in outcomes), strict=True)
    )
    assert made > 5 * len(seeds)
    assert refused < 0.1 * made


def test_a_seed_is_a_case() -> None:
    first, again = draw_whole(7), draw_whole(7)
    assert first == again == json.loads(json.dumps(first))
    one, two = run.make(first), run.make(again)
    for x, y in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(x, y)
    assert "loss" in describe(first)


# -------------------------------------------------------------------------------------- it can fail
def _wrap(
    owner: Any, name: str, change: Callable[..., Any]
) -> Callable[[pytest.MonkeyPatch], None]:
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
    "a factor in a rule": _wrap(
        LinearRule, "grads", lambda plain, rule, m, g: 2 * plain(rule, m, g)
    ),
    "an example that a rule forgets": _wrap(LinearRule, "grads", _without_last),
    "a batch that is not read": _wrap(EmpiricalRisk, "batches", _wrong_batches),
    "a wrong scale": _wrap(EmpiricalRisk, "scale", lambda plain, *a: 1.0001 * plain(*a)),
    "a wrong root": _wrap(MSE, "root_diagonal", lambda plain, *a: 1.01 * plain(*a)),
    "a sum over positions that is a mean": _wrap(
        LayerBatch, "bias_grads", lambda plain, batch: plain(batch) / max(1, batch.grads.shape[2])
    ),
    "a wrong damping": _wrap(
        Kronecker, "_inverse", lambda plain, K, damping, retry: plain(K, 2 * damping, retry)
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_something_broken_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that does not hold, not merely an error; wrong rules by the package itself, without a
    wrong number.
    """
    BROKEN[kind](monkeypatch)
    checks = [
        [
            "inverse",
            {"kind": "KFAC", "vectors": "exact", "separate": False, "times": 1.0, "rule": False},
        ]
    ]
    given = {"checks": checks} if "damping" in kind else {}
    outcomes = (run_case({**draw_whole(seed), **given}, self_check=False) for seed in range(60))
    assert any(
        not problem.law.isidentifier() for outcome in outcomes for problem in outcome.problems
    )
    if "rule" in kind or "positions" in kind:
        # Else the module around a layer would be run for each example, which has other blocks.
        monkeypatch.setattr(function_reads, "find_functions", lambda *given: FoundReads())
        found = [run_case(draw_whole(seed)) for seed in range(8)]
        assert [problem for outcome in found for problem in outcome.problems] == []
        assert any(
            "by the layer's rule" in message for outcome in found for message in outcome.refused
        )


def test_every_limit_is_in_the_table() -> None:
    """Constants of modules that count bytes, rows or blocks."""
    package = Path(curvlinops_plus.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Name) and re.fullmatch(
                    r"_?([A-Z]+_)?(BYTES|BLOCK|ROWS)", target.id
                ):
                    found.add(
                        (".".join(path.relative_to(package).with_suffix("").parts), target.id)
                    )
    assert len(found) > 10
    defaults = {("blocks.sweeps", "KEPT_BYTES"), ("blocks.kfac", "MAX_BYTES")}
    assert found - defaults <= {(path, name) for path, name, _ in LIMITS}
