"""Models that processes train together: wrapped, sharded, or the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import cache
from typing import Any
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from curvlinops_plus.distributed import Alone, Processes
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.linalg.compared import compared, described
from curvlinops_plus.risk.modules import modules_of, parameter_places, parameters_of, replaced_parameters

#: What this process was told already.
_told: set[str] = set()


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


# ------------------------------------------------------------------------------------------------------------- the same
def all_parameters(risk: Any) -> dict[str, Tensor]:
    """The parameters of a risk under their keys, and others of its model under their names after "model."."""
    tracked = {*map(id, risk.params.values())}
    every = risk.whole.of(parameters_of(modules_of(risk.model)))
    return risk.params | {f"model.{name}": p for name, p in every.items() if id(p) not in tracked}


def require_replicas(risk: Any, over_data: bool, more: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Refuse processes that differ in model, losses, options or parameters.

    Compared are parameters and buffers, types, modes and `extra_repr` of modules, and how losses and options print.

    Args:
        risk: An `EmpiricalRisk`.
        over_data: Whether the data are read now. Otherwise batches came one by one, in passes of training that write
            to buffers, which are not compared then.
        more: Name to what else has to be the same.

    Cost: for several processes, one pass over the memory of the parameters.
    """

    def describe() -> dict[str, Any]:
        tensors = {f"the parameter {name!r}": p for name, p in all_parameters(risk).items()}
        kinds: dict[str, Any] = {}
        for name, module in modules_of(risk.model).items():
            kinds[f"the module {name!r}"] = f"{type(module).__name__}({module.extra_repr()})", module.training
            # In training mode they normalise by the batch, and write what they don't read.
            if over_data and not (isinstance(module, _NormBase) and module.training):
                held = module.named_buffers("", recurse=False)
                tensors |= {f"the buffer {f'{name}.{own}'.lstrip('.')!r}": b for own, b in held}
        for one in risk.losses:
            name = f"the {one.title}" if one.key is not None else "the loss"
            kinds[name] = [described(one.loss, _printed), one.weight, one.reduction]
            if isinstance(one.loss, nn.Module):
                tensors |= {f"{own!r} of {name}": b for own, b in one.loss.named_buffers()}
        options = {field.name: getattr(risk.options, field.name) for field in fields(risk.options)}
        own = {f"{name}=": described(option, _printed) for name, option in options.items() if name not in _OWN}
        return {"the list of parameters": list(risk.params), **compared(tensors), **kinds, **own, **more()}

    def advice(name: str) -> str:
        return _BUFFERS if name.startswith("the buffer") else _VECTOR if name == "the vector" else ""

    risk.processes.same("model and loss, or what they compute with these", describe, advice)


# What others may do in another way.
_OWN = {"check", "progressbar"}
_BUFFERS = (
    " Buffers that passes in training mode write, such as the running statistics of batch norm without SyncBatchNorm, "
    "differ after training. Take those of one process: for b in model.buffers(): torch.distributed.broadcast(b, 0)."
)
_VECTOR = (
    " Each process has to multiply the same vectors. Random ones come from the global generator unless one is given: "
    "pass generator=torch.Generator().manual_seed(0) to estimators, or draw with the same seed in all."
)


def _printed(value: Any) -> str | None:
    if isinstance(value, nn.Module):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else None


# ------------------------------------------------------------------------------------------------------------- sharded
class WholeParameters:
    """The values of parameters of which each process has a part, as plain tensors of their whole shapes.

    Passes over the data evaluate the model at these. Nothing is communicated inside of a pass then, so that processes
    may have other numbers of batches. All processes have to make it together if the model is sharded.

    Args:
        processes: Those that share the data, among which are all that have parts of the parameters.

    Raises:
        UnsupportedError: If parameters are spread in another way than by `fully_shard`; names the first one.

    Cost: memory for all parameters that are spread; the blocks of their layers take more.
    """

    def __init__(self, model: nn.Module, owned: Mapping[str, Tensor], processes: Alone) -> None:
        self._model = model
        other = [(name, p) for name, p in owned.items() if type(p) is not nn.Parameter]
        self._parts: dict[str, Any] = {name: p for name, p in other if hasattr(p, "full_tensor")}
        if self._parts:
            _require_fully_sharded(model, self._parts, processes)
        self._whole = {
            name: nn.Parameter(p.detach().full_tensor().clone(), p.requires_grad) for name, p in self._parts.items()
        }
        self._places = parameter_places(model.modules(), self._parts) if self._parts else ()

    def __bool__(self) -> bool:
        """Whether there are such parameters."""
        return bool(self._parts)

    def of(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Key to the whole of a parameter of the model; itself if it is not spread."""
        if not self._parts:
            return dict(params)
        names = {id(p): name for name, p in self._parts.items()}
        return {key: self._whole[names[id(p)]] if id(p) in names else p for key, p in params.items()}

    def refuse(self, what: str, advice: str) -> None:
        """Refuse what needs the layers' own parameters in the user's pass."""
        if self._parts:
            raise UnsupportedError(f"{what} whose parameters are sharded by fully_shard. {advice}")

    def give_up(self) -> None:
        """Let `fully_shard` give up what it has gathered for a pass; it gathers it again where it is needed."""
        if self._parts:
            give_up_gathered(self._model.modules())

    def renew(self) -> None:
        """Take over the present values. Collective, if there are any."""
        if not self._parts:
            return
        self.give_up()
        with torch.no_grad():
            for name, p in self._parts.items():
                self._whole[name].requires_grad_(p.requires_grad).copy_(p.full_tensor())

    def placed(self) -> AbstractContextManager[None]:
        """Context in which the modules have the whole parameters, and don't gather or give up any."""
        return self._placed() if self._parts else nullcontext()

    @contextmanager
    def _placed(self) -> Iterator[None]:
        tables = [table for m in self._model.modules() for table in (m._forward_pre_hooks, m._forward_hooks)]
        before: list[tuple[Any, list[tuple[int, Any]]]] = [(table, list(table.items())) for table in tables]
        for table, hooks in before:
            for number, hook in hooks:
                if (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp"):
                    del table[number]
        try:
            with replaced_parameters(self._places, self._whole):
                yield
        finally:
            for table, hooks in before:
                since = [item for item in table.items() if item[0] not in dict(hooks)]
                table.clear()
                table.update([*hooks, *since])


def give_up_gathered(modules: Iterable[nn.Module]) -> None:
    """Let `fully_shard` give up what it has gathered for a pass, so that modules have their own parameters."""
    for module in modules:
        if _is_sharded(type(module)):
            module.reshard()  # type: ignore[operator]


@cache
def _is_sharded(kind: type[nn.Module]) -> bool:
    """Whether it is one of the classes that `fully_shard` makes."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def _require_fully_sharded(model: nn.Module, parts: dict[str, Any], processes: Alone) -> None:
    roots = [name for name, module in model.named_modules() if _is_sharded(type(module))]
    advice = (
        "Only fully_shard of torch.distributed.fsdp is known. Make a plain model, with the values that "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
        "full_state_dict=True)) returns, or shard it by fully_shard alone."
    )
    for name, p in parts.items():
        module, _, own = name.rpartition(".")
        kind = type(model.get_submodule(module)).__name__
        if sum(not place.is_replicate() for place in p.placements) > 1:
            how = "fully_shard and parallelize_module (tensor parallel)"
        elif not any(root in ("", name) or name.startswith(f"{root}.") for root in roots):
            how = "parallelize_module (tensor parallel) or distribute_tensor"
        else:
            continue
        raise UnsupportedError(
            f"layer {module!r} ({kind}): its parameter {own!r} is spread over processes by {how}, {p.placements}, and "
            f"the model computes with parts of it. {advice}"
        )
    together = set(dist.get_process_group_ranks(processes.group)) if isinstance(processes, Processes) else set[int]()
    ranks = {rank for p in parts.values() for rank in p.device_mesh.mesh.flatten().tolist()}
    if len(ranks) > 1 and not ranks <= together:
        raise UnsupportedError(
            f"The parameters are spread over the processes {sorted(ranks)} by fully_shard, so that none can evaluate "
            f"the model alone; the risk has {sorted(together) or 'none'}. Say EmpiricalRisk(..., "
            "processes=Processes()), in all of them."
        )
