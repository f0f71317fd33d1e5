"""Models and parameters that can't be differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.module_tree import parameters_of
from curvlinops_plus.risk.sharded import give_up_gathered
from curvlinops_plus.risk.wrappers import inner_model


def require_module(model: Any) -> tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Parameter]]:
    """A model without its wrapper, its modules and parameters by their names; refuses what is no model, or not yet one.

    Raises:
        ValueError: If it is no module, or has parameters without shapes.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        advice = ""
        if isinstance(model, type):
            advice = f" Call it: {model.__name__}(...)."
        elif callable(model):
            advice = (
                " A function (params, X) is a model for KFACLinearOperator(function, loss, params, data) and the like."
            )
        raise ValueError(f"`model` is {what}; layers can only be recorded in a torch.nn.Module.{advice}")
    inner, modules = inner_model(model)
    give_up_gathered(modules.values())
    owned = parameters_of(modules)
    buffers = {
        f"{name}.{own}".lstrip("."): b
        for name, module in modules.items()
        if module._buffers
        for own, b in module._buffers.items()
        if b is not None
    }
    if lazy := [name for name, t in (owned | buffers).items() if type(t) is not nn.Parameter and is_lazy(t)]:
        raise ValueError(
            f"{_some(lazy)} of the model have no shapes yet: their modules are lazy, such as nn.LazyLinear. Call the "
            "model once on a batch, model(X), which gives them their shapes."
        )
    return inner, modules, owned


def refuse_parameters(
    modules: Mapping[str, nn.Module], owned: Mapping[str, Tensor], params: Mapping[str, Tensor]
) -> None:
    """Refuse parameters that have no derivatives here.

    Args:
        params: Those that something is differentiated with respect to, by key.

    Raises:
        UnsupportedError: If they have no values (meta device), were made in inference mode, or belong to a compiled
            `ScriptModule`.
    """
    if meta := [name for name, p in owned.items() if p.is_meta]:
        raise UnsupportedError(
            f"The parameters {_some(meta)} are on the meta device, so they have shapes and no values. Materialize the "
            "model first: model.to_empty(device=...) and load_state_dict(...)."
        )
    if any(map(Tensor.is_inference, params.values())):
        frozen = [key for key, p in params.items() if p.is_inference()]
        raise UnsupportedError(
            f"The parameters {_some(frozen)} were made in torch.inference_mode(), so nothing can be differentiated "
            "with respect to them. Make or load the model outside of it, or take a copy: copy.deepcopy(model)."
        )
    for name, module in modules.items():
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted and (keys := [key for key, p in params.items() if any(p is q for q in module.parameters())]):
            where = f"Its module {name!r}" if name else "It"
            raise UnsupportedError(
                f"The model can't be differentiated with respect to {_some(keys)}. {where} "
                f"is a {type(module).__name__} (torch.jit): its parameters can't be replaced, and hooks inside it do "
                "not run. Pass the Python module that it was made from, or leave its parameters out of `params`."
            )


def _some(keys: Sequence[str]) -> str:
    return f"{list(keys[:5])}{' …' if len(keys) > 5 else ''}"
