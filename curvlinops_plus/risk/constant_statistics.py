"""Batch norm in training mode as a function of each example, at statistics of the batch that are constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus.risk.process_state import own_calls

__all__ = ["constant_statistics"]


@contextmanager
def constant_statistics(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Context in which batch norms in training mode return the same numbers, and derivatives leave the statistics out.

    Args:
        modules: The batch norms, by name.
    """
    with ExitStack() as hooks:
        for module in modules.values():
            handle = module.register_forward_hook(own_calls(_at_constants), prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _at_constants(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
    x: Tensor = next(iter([*args, *kwargs.values()]))
    others = [axis for axis in range(x.ndim) if axis != 1]
    held = next((t for t in (module.running_mean, module.weight) if t is not None), x)
    mean, variance = x.detach().mean(others).to(held.dtype), x.detach().var(others, correction=0).to(held.dtype)
    return F.batch_norm(x, mean, variance, module.weight, module.bias, False, 0.0, module.eps)
