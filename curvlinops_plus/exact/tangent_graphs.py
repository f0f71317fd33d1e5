"""Forward passes with tangents whose own graph keeps no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["TangentNeeded", "is_about_hooks", "without_tangent_graphs"]


class TangentNeeded(Exception):
    """A backward pass needs a tensor that `without_tangent_graphs` took for one of the tangents' own graph."""


@contextmanager
def without_tangent_graphs() -> Iterator[None]:
    """Context in which nothing is saved for the derivatives of tangents.

    Parameters with tangents require a gradient, and so do tangents: PyTorch records each operation twice, once for
    values and once for tangents, of which only the first is asked for. What it saves for values has a tangent itself,
    or requires no gradient.

    Raises:
        TangentNeeded: In a backward pass, if something is missing after all.
        RuntimeError: In a backward pass, if what was saved has been written to, as PyTorch does without this context.
    """

    def pack(t: Tensor) -> tuple[Tensor | None, int]:
        if t.requires_grad and forward_ad.unpack_dual(t).tangent is None:
            return None, 0
        return t.detach(), t._version  # a node that held its own output would never be freed

    def unpack(saved: tuple[Tensor | None, int]) -> Tensor:
        t, version = saved
        if t is None:
            raise TangentNeeded
        if t._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(t.shape)} is at version {t._version}; expected version {version} instead."
            )
        return t

    with saved_tensors_hooks(pack, unpack) if torch.is_grad_enabled() else torch.no_grad():
        yield


def is_about_hooks(error: Exception) -> bool:
    """Whether an error says that the context can't be used, as transformations of `torch.func` inside a model do."""
    return isinstance(error, TangentNeeded) or "saved tensor hooks" in str(error)
