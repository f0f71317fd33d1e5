"""The command line: `python -m test.fuzz START COUNT`."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from test.fuzz.run import Outcome, Problem, describe, draw_whole, run_seed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m test.fuzz", description="Random networks against plain autodiff."
    )
    parser.add_argument("start", type=int, nargs="?", default=0, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=100, help="how many seeds")
    parser.add_argument(
        "--small", action="store_true", help="every limit of working memory at 64 bytes"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--hostile", action="store_true", help="networks that do what recording must notice"
    )
    return parser.parse_args()


def _safe(small: bool, seed: int) -> Outcome:
    """The outcome of a seed; what goes wrong in making the case is a failure as well."""
    warnings.simplefilter("ignore")
    try:
        return run_seed(seed, small)
    except Exception as error:
        return Outcome(
            problems=[Problem(["the fuzzer", {}], type(error).__name__, str(error)[:500])]
        )


def _outcomes(seeds: range, small: bool, jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(partial(_safe, small), seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(_safe, small), seeds, chunksize=8)


def report(seed: int, problem: Problem, about: dict[str, Any], small: bool) -> str:
    """What is printed about a failure."""
    flag = " --small" if small else ""
    return "\n".join(
        [
            f"seed {seed}: {problem.check[0]}: {problem.law}: {problem.numbers}",
            describe(about) if about else "",
            f"  repeat    python -m test.fuzz{flag} {seed} 1",
        ]
    )


def main() -> int:
    """Run seeds; the exit status says whether anything failed."""
    warnings.simplefilter("ignore")  # of PyTorch, about padding and batching rules
    arguments = _arguments()
    if arguments.hostile:
        from test.fuzz.hostile import main as hostile

        return hostile()
    started, made, failed, refused = time.monotonic(), 0, 0, Counter[str]()
    seeds = range(arguments.start, arguments.start + arguments.count)
    for seed, outcome in zip(seeds, _outcomes(seeds, arguments.small, arguments.jobs), strict=True):
        made += outcome.made
        refused.update(outcome.refused)
        for problem in outcome.problems:
            failed += 1
            about = (
                {}
                if problem.check[0] == "the fuzzer"
                else {**draw_whole(seed), "checks": [problem.check]}
            )
            print(report(seed, problem, about, arguments.small), flush=True)
    total = made + failed + sum(refused.values())
    share = 100 * sum(refused.values()) / max(1, total)
    seconds = time.monotonic() - started
    print(
        f"{len(seeds)} seeds, {made} checks hold, {failed} failed, {share:.1f} % refused, "
        f"{seconds:.0f} s"
    )
    for message, times in refused.most_common():
        print(f"  refused {times} x {message}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
