"""Whether processes evaluate the same model and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from curvlinops_plus.distributed import Alone
from curvlinops_plus.linalg.compared import compared, described
from curvlinops_plus.risk.losses import Losses
from curvlinops_plus.risk.module_tree import modules_of, parameters_of
from curvlinops_plus.risk.sharded import WholeParameters

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
# Attributes of modules that are options.
_PLAIN = (bool, int, float, complex, str)
_INTERNAL = frozenset(vars(nn.Module()))


class Shared(Protocol):
    """What is the same in all processes."""

    model: nn.Module
    losses: Losses
    params: dict[str, Tensor]
    whole: WholeParameters
    options: Any
    processes: Alone


def all_parameters(risk: Any) -> dict[str, Tensor]:
    """The parameters of a risk under their keys, and others of its model under their names after "model."."""
    tracked = {*map(id, risk.params.values())}
    every = risk.whole.of(parameters_of(modules_of(risk.model)))
    others = [name for name, at in zip(every, map(id, every.values())) if at not in tracked]
    return risk.params | {f"model.{name}": every[name] for name in others}


def require_replicas(risk: Shared, over_data: bool, more: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Refuse processes that differ in model, losses, options or parameters.

    Compared are all parameters and buffers, types, modes and options of modules (`extra_repr`, and all plain attributes
    of PyTorch's own), and what losses hold. Of functions, such as `output=`, the names alone.

    Args:
        over_data: Whether the data are read now. Otherwise batches came one by one, in passes of training that write
            to buffers and attributes, which are not compared then.
        more: Name to what else has to be the same.

    Cost: for several processes, one pass over the memory of the parameters.
    """

    def describe() -> dict[str, Any]:
        parameters = all_parameters(risk)
        tensors = {f"the parameter {name!r}": p for name, p in parameters.items()}
        modules, held = _modules(risk.model, "the model", over_data)
        options = {field.name: getattr(risk.options, field.name) for field in fields(risk.options)}
        return {
            "the list of parameters": list(risk.params),
            **compared(tensors | held),
            **modules,
            **{f"the {one.title}" if one.key is not None else "the loss": _loss(risk, one) for one in risk.losses},
            **{f"{name}=": described(option, _name) for name, option in options.items() if name not in _OWN},
            **more(),
        }

    risk.processes.same("model and loss, or what they compute with these", describe, _advice)


def _advice(name: str) -> str:
    return _BUFFERS if name.startswith("the buffer") else _VECTOR if name == "the vector" else ""


def _modules(whole: nn.Module, called: str, over_data: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options of the modules, and their buffers."""
    options: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, module in whole.named_modules():
        title = f"the module {name!r}" if name else called
        options[title] = [f"{type(module).__name__}({module.extra_repr()})", "train" if module.training else "eval"]
        if not over_data:
            continue
        options |= {f"{own!r} of {title}": value for own, value in _attributes(module).items()}
        # In training mode they normalise by the batch, and write what they don't read.
        if not (isinstance(module, _NormBase) and module.training):
            tensors |= {f"the buffer {f'{name}.{own}'.lstrip('.')!r}": b for own, b in module.named_buffers("", False)}
    return options, tensors


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Options among the attributes of a module of PyTorch; others may note there which process they are in."""
    if not type(module).__module__.startswith("torch.nn."):
        return {}
    own = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
    return {name: value for name, value in own.items() if isinstance(value, _PLAIN) or _is_plain_list(value)}


def _name(value: Any) -> str | None:
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else None


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and 0 < len(value) <= 64 and all(isinstance(x, _PLAIN) for x in value)


def _loss(risk: Shared, one: Any) -> Any:
    def module(value: Any) -> Any:
        if not isinstance(value, nn.Module):
            return None
        value = value.module if isinstance(value, nn.parallel.DistributedDataParallel) else value
        if value is risk.model:
            return "the model"
        options, tensors = _modules(value, "the loss", True)
        parameters = {f"the parameter {name!r}": p for name, p in value.named_parameters()}
        return {**options, **compared(tensors | parameters)}

    return [described(one.loss, module), one.weight, one.reduction]
