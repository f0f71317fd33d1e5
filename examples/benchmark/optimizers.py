"""K-FAC beside SGD, Adam, Muon, SOAP and Shampoo: equal trials, then equal steps and equal CPU
time.

Every optimizer gets the same number of trials on each task, at the same quasi-random points of its
two ranges, from one seed; the best by the validation loss trains again from three other seeds, and
that is what the tables say. All learning rates follow a cosine to zero, but adaptive ones. A step's
CPU time is measured in turns, 20 steps of each, and "equal time" is that of K-FAC with statistics
every five steps: all are tuned again for as many steps as fill it.

    pip install -e ".[examples,benchmark]" python examples/benchmark/optimizers.py --quick
    # under a minute; the figures mean nothing python examples/benchmark/optimizers.py
    # two hours on one core; goes on where it was stopped python examples/benchmark/optimizers.py
    --tasks cnn --trials 4 --modes steps python examples/benchmark/optimizers.py --draw
    # tables and picture from optimizers.json alone

Results are kept in `optimizers.json` beside this file; what is there is not run again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch
from measure import figure, table
from optimizer_contenders import CONTENDERS, Contender
from optimizer_tasks import TASKS, Task
from torch import nn

from curvlinops_plus.errors import NumericsError

MODES = ["steps", "time"]
#: Its time is what all get at equal time.
YARDSTICK = "K-FAC, statistics / 5"
CURVE_POINTS = 25


# ------------------------------------------------------------------------------------------ running
def training(
    task: Task,
    contender: Contender,
    values: Mapping[str, float],
    seed: int,
    steps: int,
    trial: bool,
) -> Any:
    """Train; yields the model before the first step and after each, with the CPU time of the
    step.
    """
    torch.manual_seed(seed)
    model, generator = task.model(), torch.Generator().manual_seed(1000 + seed)
    optimizers = contender.make(model, task.loss, **values)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    schedules = [cosine(o, steps) for o in optimizers if o.param_groups[0]["lr"] != "adaptive"]
    for _ in range(steps):
        X, y = task.batch(generator, trial)
        start = time.process_time()
        for optimizer in optimizers:
            optimizer.zero_grad()
        task.loss(model(X), y).backward()
        for follows in (*optimizers, *schedules):
            follows.step()
        yield model, time.process_time() - start


def errors(task: Task, model: nn.Module, split: str) -> dict[str, float]:
    """How good a model is on a split, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        X, y = task.splits[split]
        found = task.judge(model(X), y)
    model.train()
    return {name: value if math.isfinite(value) else math.inf for name, value in found.items()}


def final(
    task: Task,
    contender: Contender,
    values: Mapping[str, float],
    seed: int,
    steps: int,
    trial: bool,
) -> Any:
    """Errors after training on each split, and the test error on the way; infinite if training
    diverged.
    """
    every, curve, model = max(1, steps // CURVE_POINTS), {}, None
    with suppress(NumericsError):
        for step, (model, _) in enumerate(training(task, contender, values, seed, steps, trial), 1):
            if not trial and (step % every == 0 or step == steps):
                curve[step] = next(iter(errors(task, model, "test").values()))
        assert model is not None
        return {
            split: errors(task, model, split)
            for split in (["validation"] if trial else task.splits)
        }, curve
    lost = dict.fromkeys(task.judge(*[torch.zeros_like(t) for t in _like(task)]), math.inf)
    return dict.fromkeys(task.splits, lost), curve


def _like(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    X, y = task.splits["validation"]
    return task.model()(X).detach(), y


def milliseconds(task: Task, name: str, rounds: int, turn: int) -> dict[str, float]:
    """CPU time per step of every contender in the middle of its ranges: the median of turns after
    the first.
    """
    runs = {
        key: training(
            task, contender, middle(contender.ranges_for(name)), 0, turn * (rounds + 1), True
        )
        for key, contender in CONTENDERS.items()
    }
    turns: dict[str, list[float]] = {key: [] for key in runs}
    for _ in range(rounds + 1):
        for key, run in runs.items():
            turns[key].append(sum(seconds for _, (_, seconds) in zip(range(turn), run)) / turn)
    return {key: 1000 * statistics.median(found[1:]) for key, found in turns.items()}


def middle(ranges: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The middle of all ranges, in the logarithm."""
    return {name: math.sqrt(low * high) for name, (low, high) in ranges.items()}


def points(ranges: Mapping[str, tuple[float, float]], trials: int) -> list[dict[str, float]]:
    """Quasi-random points, the same for all in the unit square; the single run of those that tune
    nothing.
    """
    if not ranges:
        return [{}]
    unit = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(trials).tolist()
    return [
        {name: low * (high / low) ** u for u, (name, (low, high)) in zip(row, ranges.items())}
        for row in unit
    ]


def at_edge(
    values: Mapping[str, float], ranges: Mapping[str, tuple[float, float]], tried: list[Any]
) -> list[str]:
    """The hyper-parameters whose best value is the least or the largest that was tried."""
    found = []
    for name in ranges:
        all_values = [one["values"][name] for one in tried]
        if values[name] in (min(all_values), max(all_values)):
            found.append(name)
    return found


def compete(
    task: Task, name: str, contender: Contender, trials: int, seeds: int, result: dict[str, Any]
) -> Iterator[None]:
    """Tune a contender on seed 0, train the best from other seeds; yields after each run that
    `result` has got.
    """
    ranges, tried, finals = contender.ranges_for(name), result["tried"], result["finals"]
    steps = result["steps"]
    for values in points(ranges, trials)[len(tried) :] if ranges else ():
        found = final(task, contender, values, 0, steps, trial=True)[0]["validation"]
        tried.append({"values": values, "validation": next(iter(found.values()))})
        yield
    best = min(tried, key=lambda one: one["validation"])["values"] if tried else {}
    if _rounded(result.get("best", best)) != _rounded(best):  # more trials found a better point
        finals.clear()
        result["curve"] = []
    result |= {"best": best, "edge": at_edge(best, ranges, tried)}
    for seed in range(len(finals) + 1, seeds + 1):
        found, curve = final(task, contender, best, seed, steps, trial=False)
        before = result["curve"] or [[step, 0.0] for step in curve]  # a mean over the seeds
        weights = len(finals) / seed, 1 / seed
        result["curve"] = [
            [step, weights[0] * mean + weights[1] * curve[step]]
            for step, mean in before
            if step in curve
        ]
        finals.append(found)
        yield


def run(given: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Everything that is asked for and not kept yet; saved after each."""
    for name in given.tasks:
        task = TASKS[name]()
        of_task = kept.setdefault(name, {"floor": task.floor, "steps": {}, "time": {}})
        steps = 2 if given.quick else task.steps
        if "ms" not in of_task:
            of_task["ms"] = milliseconds(task, name, *((1, 2) if given.quick else (5, 20)))
        for mode in given.modes:
            for key, contender in CONTENDERS.items():
                if (given.only and key not in given.only) or (
                    mode == "time" and not contender.equal_time
                ):
                    continue
                filling = (
                    steps * of_task["ms"][YARDSTICK] / of_task["ms"][key]
                    if mode == "time"
                    else steps
                )
                new = {"steps": max(1, round(filling)), "tried": [], "finals": [], "curve": []}
                if key not in of_task[mode] and new["steps"] == of_task["steps"].get(key, {}).get(
                    "steps"
                ):
                    new = copy.deepcopy(of_task["steps"][key])  # the same runs fill both
                result = of_task[mode].setdefault(key, new)
                for _ in itertools.chain(
                    [None], compete(task, name, contender, given.trials, given.seeds, result)
                ):
                    given.results.write_text(
                        json.dumps(_rounded(kept), separators=(",", ":")) + "\n"
                    )
                done = (
                    f"{name}, equal {mode}: {key}, {len(result['tried'])} trials, "
                    f"{len(result['finals'])} seeds"
                )
                print(f"{done:79}", end="\r" if given.quick else "\n", flush=True)


def _rounded(value: Any) -> Any:
    """Five digits are enough; JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else 1e9
    return value


# ----------------------------------------------------------------------------------------- printing
def spread(finals: list[Any], split: str, measure: str) -> str:
    """Mean and half of the range over the seeds."""
    found = [one[split][measure] for one in finals]
    if max(found) >= 1e9:
        return f"diverged in {sum(x >= 1e9 for x in found)} of {len(found)}"
    return f"{figure(statistics.mean(found))} ± {(max(found) - min(found)) / 2:.2g}"


def _mean_test(result: Mapping[str, Any]) -> float:
    return statistics.mean(next(iter(one["test"].values())) for one in result["finals"])


def rows(of_task: Mapping[str, Any], mode: str) -> Iterator[list[str]]:
    """The table of a task: a row per optimizer."""
    results, ms = of_task[mode], of_task.get("ms", {})
    adam = of_task["steps"].get("Adam")
    target = _mean_test(adam) if adam and adam["finals"] else None
    for key in [key for key in CONTENDERS if key in results and results[key]["finals"]]:
        one = results[key]
        splits = [split for split in ("train", "test") if split in one["finals"][0]]
        judged = [
            spread(one["finals"], split, m) for split in splits for m in one["finals"][0][split]
        ]
        best = ", ".join(
            f"{name} {value:.2g}{'*' if name in one['edge'] else ''}"
            for name, value in one["best"].items()
        )
        first = next(
            (step for step, error in one["curve"] if target is not None and error <= target), None
        )
        seconds = None if first is None or key not in ms else first * ms[key] / 1000
        reached = (
            "–"
            if first is None
            else f"{first}" + ("" if seconds is None else f" ({figure(seconds)} s)")
        )
        yield [key, *judged, best or "none", figure(ms.get(key)), str(one["steps"]), reached]


def counts(found: Iterable[int]) -> str:
    """The number, or the least and the largest."""
    numbers = set(found) or {0}
    return " to ".join(str(one) for one in sorted({min(numbers), max(numbers)}))


def report(kept: Mapping[str, Any]) -> None:
    """Print all tables."""
    print(
        f"{date.today()}, CPU, {torch.get_num_threads()} thread, torch {torch.__version__}, "
        "float32.\n"
    )
    print(str(__doc__).split("\n\n")[1])
    print(
        "\nErrors are means over the seeds ± half of their range; * is the least or largest value "
        "that was tried."
    )
    print(
        "Adam's error is its test error at equal steps: after how many steps, and seconds of CPU "
        "time, others have it."
    )
    for name, of_task in kept.items():
        for mode in [mode for mode in MODES if of_task[mode]]:
            results = [one for one in of_task[mode].values() if one["finals"]]
            finals = results[0]["finals"]
            trials = counts(len(one["tried"]) for one in results if one["tried"])
            seeds = counts(len(one["finals"]) for one in results)
            measures = [
                f"{split}: {m}"
                for split in ("train", "test")
                if split in finals[0]
                for m in finals[0][split]
            ]
            floor = (
                f"; no model has less than {figure(of_task['floor'])}" if of_task["floor"] else ""
            )
            print(f"\n### {name}, equal {mode}: {trials} trials, {seeds} seeds{floor}\n")
            columns = ["optimizer", *measures, "tuned", "ms per step", "steps", "Adam's error at"]
            print(table(columns, list(rows(of_task, mode))), end="")


def draw(kept: Mapping[str, Any], picture: Path) -> None:
    """Test error of the autoencoder against CPU time, means over seeds with their ranges at the
    end; readable at 400 pixels of width.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    of_task = kept["autoencoder"]
    with pyplot.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panel = pyplot.subplots(figsize=(6.4, 4.6), layout="constrained")
        bars = 0
        for key, contender in CONTENDERS.items():
            if contender.line is not None and of_task["time"].get(key, {}).get("finals"):
                steps, found = zip(*of_task["time"][key]["curve"], strict=True)
                seconds = [step * of_task["ms"][key] / 1000 for step in steps]
                if found[-1] < 2:
                    panel.semilogy(seconds, found, label=key, linewidth=2, **contender.line)
                    errors = [
                        final["test"]["squared error per image"]
                        for final in of_task["time"][key]["finals"]
                    ]
                    bars += 1  # beside one another
                    place = seconds[-1] + 0.06 * bars
                    panel.vlines(place, min(errors), max(errors), contender.line["color"], lw=3)
        panel.set(
            xlabel="CPU time, s",
            ylabel="squared error per test image (log)",
            xlim=(0, None),
            ylim=(0.78, 2.2),
        )
        panel.set_yticks([0.8, 1, 1.2, 1.6, 2])
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        figure.savefig(picture, dpi=125)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve()
    parser.add_argument(
        "--quick", action="store_true", help="two steps, two trials, one seed; nothing is kept"
    )
    parser.add_argument(
        "--draw", action="store_true", help="run nothing; tables and picture of what is kept"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="equal steps, equal time"
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="these optimizers")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=here.with_suffix(".json"))
    parser.add_argument("--picture", type=Path, default=here.parents[2] / "docs" / "optimizers.png")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.quick:
        given.trials, given.seeds, given.results = 2, 1, Path("/dev/null")
    kept = (
        json.loads(given.results.read_text()) if not given.quick and given.results.exists() else {}
    )
    if not given.draw:
        run(given, kept)
    report(_rounded(kept))
    if not given.quick:
        draw(kept, given.picture)


if __name__ == "__main__":
    main()
