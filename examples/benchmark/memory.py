"""Peak memory of a task above what was there before it, of the process or of the GPU.

    python examples/benchmark/memory.py b_resnet --quick     # the figures of one workload, one line
    for each task

On the CPU each task runs in a process of its own, forked when libraries, model and data are there
and the task has run once on two examples. The allocator is told to give memory back, so that the
growth is what was held at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tasks import curvlinops, ekfac, exact, kfac, product
from workloads import MAKERS, Workload, make, workload

import curvlinops_plus

TASKS = ["KFAC", "EKFAC", "GGN product", "Hessian product"]
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def growth(name: str, device: str, quick: bool, threads: int) -> dict[str, dict[str, float]]:
    """Bytes by task and library ("ours", "theirs"), on a fresh process."""
    command = [
        sys.executable,
        __file__,
        name,
        "--device",
        device,
        "--threads",
        str(threads),
        *["--quick"] * quick,
    ]
    done = subprocess.run(
        command, env={**os.environ, **_MALLOC}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"Memory of {name} could not be measured:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _run(task: str, library: ModuleType, work: Workload) -> Any:
    if task.endswith("product"):
        return product(exact(library, work, task.split()[0]), work)()
    return (ekfac if task == "EKFAC" else kfac)(library, work)


def _of_process(task: str, library: ModuleType, work: Workload, small: Workload) -> float:
    """Growth of resident memory, in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        _run(
            "KFAC" if task == "EKFAC" else task, library, small
        )  # decompositions don't depend on the data's size
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        kept = _run(task, library, work)
        os.write(write, str(_status("VmHWM") - before).encode())
        del kept
        os._exit(0)
    os.close(write)
    found = os.read(read, 100)
    os.waitpid(child, 0)
    return float(found) if found else float("nan")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _of_gpu(task: str, library: ModuleType, work: Workload, small: Workload) -> float:
    _run(task, library, small)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = _run(task, library, work)
    peak = torch.cuda.max_memory_allocated()
    del kept
    return float(peak - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=list(MAKERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    work = make(arguments.workload, arguments.device, arguments.quick)
    X, y = work.data[0]
    small = workload(work.name, work.model, [(X[:2], y[:2])], arguments.device)
    measure = _of_gpu if arguments.device == "cuda" else _of_process
    libraries = {"ours": curvlinops_plus} | ({} if curvlinops is None else {"theirs": curvlinops})
    found = {
        task: {who: measure(task, lib, work, small) for who, lib in libraries.items()}
        for task in TASKS
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
