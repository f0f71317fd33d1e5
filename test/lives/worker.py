"""New processes: the first one reads operators that are in a file, then both live the lives of all
models together.

Run as `python -m test.lives.worker rank world folder`.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvlinops_plus import BlockwiseLinearOperator, CurvatureWarning, Processes
from test.lives.lives import in_parts, trained
from test.lives.models import MODELS, Ordinary


def read(ordinary: Ordinary, states: dict[str, Any]) -> dict[str, Tensor]:
    """The matrices of stored operators."""
    model = ordinary.make()
    options = {"loss": ordinary.loss(), **ordinary.options(model)}
    return {
        kind: BlockwiseLinearOperator.from_state_dict(
            state, model, None, trained(model), **options
        ).to_dense()
        for kind, state in states.items()
    }


def attempt(work: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or the words of its error."""
    try:
        return work(*args)
    except Exception:
        return traceback.format_exc()


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CurvatureWarning)
    found: dict[str, Any] = {}
    stored = torch.load(folder / "operators.pt", map_location="cpu", weights_only=True)
    if rank == 0:
        found["read"] = {
            name: attempt(read, MODELS[name], states) for name, states in stored.items()
        }
    dist.init_process_group("gloo", f"file://{folder}/world", timedelta(minutes=5), world, rank)
    there = {name: MODELS[name] for name in stored}
    found["in parts"] = {
        name: attempt(in_parts, ordinary, Processes()) for name, ordinary in there.items()
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
