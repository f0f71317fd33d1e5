"""Scores on disk, batch by batch, so that a run that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.blocks import load, save


class ScoreStore:
    """A folder with a file for each batch of the training data.

    Args:
        folder: Where; made if it is not there.
        about: What scores depend on, tensors and plain numbers. Tensors are compared up to
            rounding.

    Raises:
        ValueError: If the folder has scores of something else.
    """

    def __init__(self, folder: str | PathLike[str], about: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "about.safetensors"
        if not path.exists():
            save(dict(about), path)
            return
        known = load(path)
        differing = [key for key in about if not _is_about(known.get(key), about[key])]
        if differing:
            raise ValueError(
                f"{self.folder} has scores of another computation: {differing} differ. Take "
                "another folder, or remove this one."
            )

    def has(self, batch: int) -> bool:
        """Whether the scores of a batch are here."""
        return self._path(batch).exists()

    def read(self, batch: int, num_examples: int) -> dict[str, Tensor]:
        """The scores of a batch that is here.

        Raises:
            ValueError: If it had another number of examples.
        """
        state = load(self._path(batch))
        if state["num_examples"] != num_examples:
            raise ValueError(
                f"Batch {batch} has {num_examples} examples, and had {state['num_examples']} when "
                f"its scores were written to {self.folder}; go on with the same batches."
            )
        return {key: scores.clone() for key, scores in state["scores"].items()}

    def write(self, batch: int, num_examples: int, scores: Mapping[str, Tensor]) -> None:
        """Keep the scores of a batch."""
        on_host = {key: part.cpu().contiguous() for key, part in scores.items()}
        save({"num_examples": num_examples, "scores": on_host}, self._path(batch))

    def _path(self, batch: int) -> Path:
        return self.folder / f"batch-{batch:06d}.safetensors"


def _is_about(known: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return known == wanted
    if not isinstance(known, Tensor) or known.shape != wanted.shape:
        return False
    return torch.allclose(known, wanted.cpu(), rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
