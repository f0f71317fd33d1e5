"""Models inside of the wrappers by which processes train together."""

from __future__ import annotations

from typing import Any
from warnings import warn

import torch.distributed as dist
from torch import nn

from curvlinops_plus.distributed import Alone, Processes
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.risk.module_tree import modules_of

#: What this process was told already.
_told: set[str] = set()


def inner_model(model: nn.Module) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The model inside of `DistributedDataParallel`, and its modules by the names by which layers are known.

    Raises:
        UnsupportedError: If it is inside of `FullyShardedDataParallel`.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    modules = modules_of(inner)
    for name, module in modules.items():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                f"{f'The module {name!r}' if name else 'The model'} is a FullyShardedDataParallel, whose parameters "
                "are pieces of flat tensors. Use fully_shard of torch.distributed.fsdp, or DistributedDataParallel."
            )
    return inner, modules


def wrapper_of(model: nn.Module) -> tuple[str, Any]:
    """Name and process group of the wrapper of a model; "" and None if there is none."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel", model.process_group
    if any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__):
        return "fully_shard (FSDP)", None
    return "", None


def wrapped_processes(model: nn.Module) -> Processes | None:
    """The processes that train a model inside of `DistributedDataParallel`; None without one.

    Raises:
        UnsupportedError: If its parameters are sharded.
    """
    name, group = wrapper_of(model)
    if name and group is None:
        raise UnsupportedError(
            f"The parameters of the model are sharded by {name}, and this optimizer takes steps with whole ones. Use "
            "DistributedDataParallel. Or listen to its passes, CurvatureEstimator(EmpiricalRisk(..., processes="
            "Processes())).listen(batch), and take steps along inverse() @ gradients, which are sharded as these are."
        )
    return Processes(group) if name and group is not None else None


def common_processes(model: nn.Module, processes: Any) -> Alone:
    """The processes that share the data.

    Args:
        model: The model as it was given.
        processes: `Processes`, or None for this one alone.

    Raises:
        TypeError: If it is something else.

    Warns:
        CurvatureWarning: Once, of a wrapped model without processes.
    """
    if isinstance(processes, Alone):
        return processes
    if processes is not None:
        raise TypeError(
            f"processes is a {type(processes).__name__}; expected Processes(), or None for this process alone."
        )
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    name, group = wrapper_of(model)
    if name and name not in _told and dist.get_world_size(group) > 1:
        _told.add(name)
        warn(
            f"The model is wrapped by {name}, and the risk has processes=None: each process computes with its own part "
            "of the data, and by itself. Say EmpiricalRisk(..., processes=Processes()) for that of all data.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )
    return Alone()
