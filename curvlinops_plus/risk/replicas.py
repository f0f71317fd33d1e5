"""Models that processes train together: wrapped, sharded, or the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.distributed import Alone, Processes
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.risk.preserve import parameter_places, replaced_parameters

#: Wrappers that this process was told of already.
_told: set[str] = set()


def wrapped_processes(model: nn.Module) -> Processes | None:
    """The processes that train a model inside of `DistributedDataParallel`; None without one.

    Raises:
        UnsupportedError: If its parameters are sharded.
    """
    if any(_is_sharded(type(module)) for module in model.modules()):
        raise UnsupportedError(
            "The parameters of the model are sharded by fully_shard (FSDP), and this optimizer takes steps with whole "
            "ones. Use DistributedDataParallel. Or listen to its passes, CurvatureEstimator(EmpiricalRisk(..., "
            "processes=Processes())).listen(batch), and take steps along inverse() @ whole gradients, full_tensor()."
        )
    return Processes(model.process_group) if isinstance(model, nn.parallel.DistributedDataParallel) else None


def common_processes(model: nn.Module, processes: Any) -> Alone:
    """The processes that share the data: `processes`, or this one alone for None.

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
    name = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel) and name not in _told:
        _told.add(name)
        warn(
            f"The model is wrapped by {name}, and the risk has processes=None: each process computes with its own part "
            "of the data, and by itself. Say EmpiricalRisk(..., processes=Processes()) for that of all data.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )
    return Alone()


# ------------------------------------------------------------------------------------------------------------- the same
def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """For each tensor `Σ x` and its norm in double precision: they tell whether it has changed.

    Cost: one pass over their memory.

    Example:
        >>> sums_of({"x": torch.tensor([3.0, -4.0])})
        {'x': [-1.0, 5.0]}
    """
    found = []
    with torch.no_grad():
        for t in tensors.values():
            t = t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[operator]
            t = t.to_dense() if t.layout != torch.strided else t
            t = torch.view_as_real(t) if t.is_complex() else t
            t = t.cpu() if t.device.type == "mps" else t
            x = t if t.is_floating_point() else t.double()
            sums = x.sum(dtype=torch.float64), torch.linalg.vector_norm(x, dtype=torch.float64)
            found.append(torch.stack(sums).nan_to_num())  # NaN equals NaN
    together = [sums.to(found[0].device) for sums in found]  # every answer of a GPU is waited for
    return dict(zip(tensors, torch.stack(together).tolist() if found else [], strict=True))


def parameter_sums(risk: Any) -> dict[str, list[float]]:
    """`sums_of` the parameters: under their keys, and others of the model under their names after "model."."""
    tracked = {*map(id, risk.params.values())}
    every = risk.whole.of(dict(risk.model.named_parameters()))
    return sums_of(risk.params | {f"model.{name}": p for name, p in every.items() if id(p) not in tracked})


def require_replicas(risk: Any, over_data: bool, more: Callable[[], Mapping[str, Any]]) -> None:
    """Refuse processes that differ in parameters, losses, options, or `more`. Collective.

    Args:
        over_data: Whether the data are read now: then buffers are compared, too. Batches of training write to them.
    """
    if risk.processes.world > 1:
        buffers = sums_of(dict(risk.model.named_buffers())) if over_data else {}
        options = {f"{name}=": x for name, x in vars(risk.options).items() if name not in ("check", "progressbar")}
        losses = {
            one.title: (one.likelihood.options() if one.known else one.loss, one.weight, one.reduction)
            for one in risk.losses
        }
        risk.processes.same(parameter_sums(risk) | buffers | losses | options | dict(more()))


# ------------------------------------------------------------------------------------------------------------- sharded
class WholeParameters:
    """The values of parameters of which `fully_shard` gives each process a part, as plain tensors of whole shapes.

    Passes over the data evaluate the model at these. Nothing is communicated inside of a pass then, so that processes
    may have other numbers of batches. All processes have to make it together if the model is sharded.

    Raises:
        UnsupportedError: If parameters are spread in another way, or over processes that don't share the data.

    Cost: memory for all parameters that are spread; the blocks of their layers take more.
    """

    def __init__(self, model: nn.Module, owned: Mapping[str, Tensor], processes: Alone) -> None:
        self._model = model
        self._parts: dict[str, Any] = {name: p for name, p in owned.items() if hasattr(p, "full_tensor")}
        modules = model.named_modules() if self._parts else ()
        roots = [name for name, module in modules if _is_sharded(type(module))]
        for name, p in self._parts.items():
            inside = any(root in ("", name) or name.startswith(f"{root}.") for root in roots)
            if not inside or sum(not place.is_replicate() for place in p.placements) > 1:
                raise UnsupportedError(
                    f"The parameter {name!r} is spread over processes by parallelize_module (tensor parallel) or "
                    f"distribute_tensor, {p.placements}, and the model computes with parts of it. Only fully_shard is "
                    "known. Make a plain model, of what torch.distributed.checkpoint.state_dict.get_model_state_dict("
                    "model, options=StateDictOptions(full_state_dict=True)) returns."
                )
            if p.device_mesh.size() > processes.world:
                raise UnsupportedError(
                    "The parameters are spread over processes by fully_shard, so that none can evaluate the model "
                    "alone. Say EmpiricalRisk(..., processes=Processes()), in all of them."
                )
        values = {name: p.detach().full_tensor().clone() for name, p in self._parts.items()}
        self._whole = {name: nn.Parameter(t, self._parts[name].requires_grad) for name, t in values.items()}
        self._places = parameter_places(model.modules(), self._parts) if self._parts else ()

    def __bool__(self) -> bool:
        """Whether there are such parameters."""
        return bool(self._parts)

    def of(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Key to the whole of a parameter of the model; itself if it is not spread."""
        whole = {id(p): self._whole[name] for name, p in self._parts.items()}
        return {key: whole.get(id(p), p) for key, p in params.items()}

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
        if self._parts:
            self.give_up()
            with torch.no_grad():
                for name, p in self._parts.items():
                    self._whole[name].requires_grad_(p.requires_grad).copy_(p.full_tensor())

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Context in which the modules have the whole parameters, and don't gather or give up any."""
        if not self._parts:
            yield
            return
        tables: list[Any] = [t for m in self._model.modules() for t in (m._forward_pre_hooks, m._forward_hooks)]
        before = [dict(table) for table in tables]
        for table, hooks in zip(tables, before):
            for number, hook in hooks.items():
                if (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp"):
                    del table[number]
        try:
            with replaced_parameters(self._places, self._whole):
                yield
        finally:
            for table, hooks in zip(tables, before):
                since = {number: hook for number, hook in table.items() if number not in hooks}
                table.clear()
                table.update(hooks | since)


def give_up_gathered(modules: Iterable[nn.Module]) -> None:
    """Let `fully_shard` give up what it has gathered for a pass, so that modules have their own parameters."""
    for module in modules:
        if _is_sharded(type(module)):
            module.reshard()  # type: ignore[operator]


@cache
def _is_sharded(kind: type[nn.Module]) -> bool:
    """Whether it is one of the classes that `fully_shard` makes."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)
