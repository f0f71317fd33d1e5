"""Models whose parameters are spread over processes by `fully_shard`: their whole values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvlinops_plus.distributed import Alone, Processes
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.replaced_parameters import parameter_places, replaced_parameters


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
