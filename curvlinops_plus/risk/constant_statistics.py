"""Batch norm in training mode as a function of each example, at statistics of the batch that are constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from curvlinops_plus.linalg.numerics import at_least_float32
from curvlinops_plus.risk.module_tree import modules_of
from curvlinops_plus.risk.process_state import own_calls

# Of modules with a forward of their own it is not known what they return.
_FORWARDS = {_BatchNorm.forward, nn.SyncBatchNorm.forward}


def batch_norms(model: nn.Module) -> dict[str, Any]:
    """The batch norms of a model that are in training mode, by name."""
    modules = modules_of(model).items()
    return {name: m for name, m in modules if m.training and isinstance(m, _BatchNorm) and _is_known(m)}


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size() == 1  # else the statistics are those of several batches
    return getattr(module.forward, "__func__", None) in _FORWARDS


@contextmanager
def constant_statistics(norms: Iterable[Any]) -> Iterator[None]:
    """Context in which batch norms in training mode return the same numbers, and derivatives leave the statistics out.

    Running statistics change as without it. Batch norms with a forward of their own are left as they are.

    Args:
        norms: The batch norms of a model, see `batch_norms`.
    """
    with ExitStack() as hooks:
        for module in norms:
            handle = module.register_forward_hook(own_calls(_at_constants), prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _at_constants(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
    x: Tensor = next(iter([*args, *kwargs.values()]))
    others = [axis for axis in range(x.ndim) if axis != 1]
    wide = at_least_float32(x.detach())  # as PyTorch sums in half precision
    held = next((t for t in (module.running_mean, module.weight) if t is not None), x)
    mean, variance = (t.to(held.dtype) for t in (wide.mean(others), wide.var(others, correction=0)))
    return F.batch_norm(x, mean, variance, module.weight, module.bias, False, 0.0, module.eps)
