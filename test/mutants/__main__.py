"""The command line: `python -m test.mutants`."""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROOMS = sorted(path.stem for path in HERE.glob("*.diff"))


@dataclass(frozen=True)
class Mutant:
    """A mistake in one file of the package.

    Attributes:
        file: Its path below the package.
        lines: Those of the hunk, each with " ", "-" or "+" before it.
    """

    file: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.file, *self.lines])

    def apply(self, text: str) -> str:
        """The text with the mistake, or a `ValueError` unless it has exactly one place for it."""
        old, new = (
            "".join(f"{line[1:]}\n" for line in self.lines if line[0] in kinds)
            for kinds in (" -", " +")
        )
        if (count := f"\n{text}".count(f"\n{old}")) != 1:
            raise ValueError(f"{count} places in the file have these lines.")
        return f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]

    def function(self, text: str) -> str | None:
        """The outermost function around the first changed line, or None where that runs at
        import.
        """
        mutated = self.apply(text)
        same = next(
            k
            for k, (a, b) in enumerate(zip(text.split("\n"), mutated.split("\n"), strict=False))
            if a != b
        )
        return _function_at(ast.parse(text), same + 1, "")


def _function_at(node: ast.AST, line: int, prefix: str) -> str | None:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if child.lineno <= line <= (child.end_lineno or 0):
            name = prefix + child.name
            return (
                _function_at(child, line, f"{name}.") if isinstance(child, ast.ClassDef) else name
            )
    return None


def read(room: str) -> list[Mutant]:
    """The mutants of a room: paragraphs of its file."""
    paragraphs = (HERE / f"{room}.diff").read_text(encoding="utf-8").strip("\n").split("\n\n")
    return [
        Mutant(file, tuple(lines)) for file, *lines in (each.split("\n") for each in paragraphs)
    ]


def recorded(path: Path, tests: list[str]) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Which tests reach each function, the quickest first, and how long each test takes."""
    if not path.exists():
        print("recording which functions each test calls ...", flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "test.mutants.reach",
            "--reach",
            str(path),
            *tests,
        ]
        subprocess.run(
            [*command, "-p", "no:cacheprovider"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True
        )
    found = json.loads(path.read_text(encoding="utf-8"))
    reaching = defaultdict(list)
    for test, (_, numbers) in sorted(found["tests"].items(), key=lambda item: item[1][0]):
        for number in numbers:
            reaching[found["functions"][number]].append(test)
    return reaching, {test: seconds for test, (seconds, _) in found["tests"].items()}


def spread(tests: list[str], seconds: dict[str, float], limit: float) -> list[str]:
    """Tests of all files in turns until they take `limit` seconds."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.split("::")[0], []).append(test)
    chosen, total, turns = [], 0.0, [iter(own) for own in files.values()]
    while turns and total < limit:
        for turn in list(turns):
            test = next(turn, None)
            if test is None:
                turns.remove(turn)
            else:
                chosen.append(test)
                total += seconds[test]
    return chosen


def run(mutant: Mutant, tests: list[str], folder: str, limit: float) -> None:
    """In a process of its own: run tests against a copy with the mistake; the exit status is
    pytest's.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    for name in ("curvlinops_plus", "test", "docs", "examples"):
        shutil.copytree(
            ROOT / name, f"{folder}/{name}", ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, folder)
    path = Path(folder, "curvlinops_plus", mutant.file)
    path.write_text(mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    os.chdir(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in ("test", "curvlinops_plus")]:
        del sys.modules[name]
    sys.path[:] = [folder, *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = folder
    signal.alarm(round(20 + 5 * limit))  # a loop without end is noticed, too
    import pytest

    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def outcomes(
    work: list[tuple[Mutant, list[str], float]], jobs: int
) -> Iterator[tuple[Mutant, int, int, float]]:
    """Each mutant with pytest's exit status, the number of its tests, and the seconds they took."""
    import torch  # once, for all processes that are forked

    torch.set_num_threads(1)
    context, left, running = get_context("fork"), work[::-1], []
    while left or running:
        while left and len(running) < jobs:
            mutant, tests, limit = left.pop()
            folder = tempfile.mkdtemp()
            process = context.Process(target=run, args=(mutant, tests, folder, limit))
            process.start()
            running.append((process, mutant, tests, folder, time.monotonic()))
        time.sleep(0.05)
        for each in [each for each in running if not each[0].is_alive()]:
            running.remove(each)
            process, mutant, tests, folder, start = each
            shutil.rmtree(folder, ignore_errors=True)
            yield mutant, process.exitcode or 0, len(tests), time.monotonic() - start


def main() -> int:
    """Run the mutants of some rooms, and say which survive."""
    parser = argparse.ArgumentParser(
        prog="python -m test.mutants", description="Mistakes that tests have to notice."
    )
    parser.add_argument("rooms", nargs="*", default=ROOMS, help=f"some of {', '.join(ROOMS)}")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--tests", nargs="*", default=[], help="files and folders to take tests from (default: all)"
    )
    parser.add_argument(
        "--reach", type=Path, help="a recording to use; it is made if the file is not there"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of tests for a mutant, all files in turns"
    )
    given = parser.parse_args()
    mutants = [mutant for room in given.rooms for mutant in read(room)]
    with tempfile.TemporaryDirectory() as folder:
        reaching, seconds = recorded(given.reach or Path(folder, "reach.json"), given.tests)
    work, survivors = [], []
    for mutant in mutants:
        text = (ROOT / "curvlinops_plus" / mutant.file).read_text(encoding="utf-8")
        try:
            name = mutant.function(text)
        except ValueError as error:
            print(f"\ndoes not apply: {error}\n{mutant}", flush=True)
            survivors.append(mutant)
            continue
        if name is None:  # at import: whatever reaches the file
            tests = sorted(
                {t for f, own in reaching.items() if f.startswith(f"{mutant.file}:") for t in own}
            )
        else:
            tests = reaching[f"{mutant.file}:{name}"]
        if tests:
            chosen = spread(sorted(tests, key=seconds.__getitem__), seconds, given.seconds)
            work.append((mutant, chosen, sum(map(seconds.__getitem__, chosen))))
        else:
            print(f"\nno test reaches {name} of\n{mutant}", flush=True)
            survivors.append(mutant)
    for done, (mutant, status, count, took) in enumerate(outcomes(work, given.jobs), 1):
        if status in (0, 4, 5):  # passed, or none found
            why = "survives" if status == 0 else "has no tests any more: record anew; it survives"
            print(f"\n{why} {count} tests ({took:.0f} s)\n{mutant}", flush=True)
            survivors.append(mutant)
        elif done % 25 == 0:
            print(f"{done} of {len(work)}", flush=True)
    print(
        f"{len(mutants)} mutants: {len(mutants) - len(survivors)} killed, {len(survivors)} survive"
    )
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
