"""The parameters that a risk is a function of: the model's own tensors, found behind what the user gives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def named_params(
    model: nn.Module,
    params: Sequence[Tensor] | Mapping[str, Tensor] | None,
    owned: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Give each requested parameter a key and find the model's own tensor behind it.

    Args:
        model: The model.
        params: A list of the model's parameters, a dict of them under names of the caller's, or None for all that
            require a gradient. `p.detach()` and `p.data` are recognised by their memory; any other tensor of the same
            shape, under a name of the model's own in a dict, is another value of that parameter.
        owned: All parameters of the model, by name, if somebody has looked.

    Returns:
        Key to the model's own parameter.

    Raises:
        ValueError: If there are no parameters, one is given twice, or one does not belong to the model.
    """
    owned = dict(model.named_parameters()) if owned is None else owned
    if params is None:
        params = {name: p for name, p in owned.items() if p.requires_grad}
        if not params:
            if not owned:
                raise ValueError(
                    f"The model, a {type(model).__name__}, has no parameters. The arguments are model, loss and data, "
                    "in this order."
                )
            raise ValueError("No parameter of the model requires a gradient; name the parameters with `params=`.")
    given = _items(params)
    identities = [*map(id, [p for _, p in given])]
    names = _names(owned, identities)
    own: dict[str, Tensor] = {}
    labels: dict[str, str] = {}
    for position, ((key, p), known) in enumerate(zip(given, map(names.get, identities))):
        label = f"params[{position if key is None else key!r}]"
        name = known or _own_name(model, names, p, label, key)
        if name in labels:
            raise ValueError(
                f"{label} is the same parameter as {labels[name]}: the model's {name!r}. Name each parameter once."
            )
        labels[name] = label
        own[key or name] = owned[name]
    if not own:
        raise ValueError("`params` is empty; there is no matrix of size 0.")
    return own


def _items(params: Any) -> Collection[tuple[str | None, Any]]:
    """Keys, where there are some, and parameters.

    Raises:
        TypeError: If this is neither a mapping nor a list.
    """
    if isinstance(params, (list, tuple)):
        return [(None, p) for p in params]
    if isinstance(params, Mapping):
        if other := [key for key in params if not isinstance(key, str)]:
            raise TypeError(
                f"`params` has the key {other[0]!r}, a {type(other[0]).__name__}; expected names, as in "
                "dict(model.named_parameters())."
            )
        return params.items()
    if isinstance(params, (str, Tensor, nn.Module)) or not isinstance(params, Iterable):
        hints = {Tensor: "[p] for a single one", str: "[model.get_parameter(name)] for a single one"}
        advice = next((text for kind, text in hints.items() if isinstance(params, kind)), "list(model.parameters())")
        raise TypeError(
            f"`params` is a {type(params).__name__}; expected a list or a dict of the model's parameters: {advice}."
        )
    return [(None, p) for p in params]


def _names(owned: Mapping[str, Tensor], identities: Iterable[int]) -> dict[Any, str]:
    """The names of a model's parameters by identity, and by memory if other tensors are among those that are given."""
    names: dict[Any, str] = dict(zip(map(id, owned.values()), owned))
    if not names.keys() >= {*identities}:
        names |= {(p.data_ptr(), p.shape, p.stride()): name for name, p in owned.items() if p.numel() > 0}
    return names


def _own_name(model: nn.Module, names: Mapping[Any, str], p: Any, label: str, key: str | None) -> str:
    """The model's name of a parameter, found by memory, or else the key if that is one of its names."""
    if not isinstance(p, Tensor):
        hints = {
            tuple: " Of pairs (name, parameter) make a dict: params=dict(model.named_parameters()).",
            str: " Parameters are known by themselves: [model.get_parameter(name)].",
            dict: " Of groups of an optimizer take the parameters: [p for group in groups for p in group['params']].",
            nn.Module: " Of modules take the parameters: [*module.parameters()].",
        }
        hint = next((text for kind, text in hints.items() if isinstance(p, kind)), "")
        raise ValueError(f"{label} is a {type(p).__name__}; expected a parameter of the model.{hint}")
    if (name := names.get((p.data_ptr(), p.shape, p.stride()))) is not None:
        return name
    own = dict(model.named_parameters()).get(key or "")
    if key is None or own is None or p.shape != own.shape:
        expected = "" if own is None else f" (its own {key!r} has {list(own.shape)})"
        raise ValueError(
            f"{label} with shape {list(p.shape)} is not a parameter of the model {type(model).__name__}{expected}. "
            "Pass the model's own tensors, for instance `[p for p in model.parameters() if p.requires_grad]` or "
            "`dict(model.named_parameters())`, or a dict of other values under the same names."
        )
    return key


def values_of(params: Any, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What stands for parameters: the model's own tensors, or other values given under their names."""
    if isinstance(params, (list, tuple)) or not isinstance(params, Mapping):
        return own
    return {key: _value(params[key], p) for key, p in own.items()}


def _value(given: Tensor, own: Tensor) -> Tensor:
    if given is own or (given.data_ptr() == own.data_ptr() and given.shape == own.shape and own.numel()):
        return own
    return given if isinstance(given, nn.Parameter) else nn.Parameter(given.detach(), given.requires_grad)


def common_device(params: Mapping[str, Tensor]) -> torch.device:
    """Where all of the parameters are; refuses several devices."""
    device, *others = {p.device for p in params.values()}
    if others:
        raise ValueError(
            f"The parameters live on several devices, {sorted(map(str, [device, *others]))}; one operator needs them "
            "on one."
        )
    return device


def common_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """The widest of the parameters' dtypes, float32 at least."""
    wide, dtypes = torch.float32, {p.dtype for p in params.values()}
    for dtype in dtypes:
        if not dtype.is_floating_point:
            raise ValueError(
                f"The parameters have dtypes {sorted(map(str, dtypes))}; only real floating-point parameters have "
                "a curvature here."
            )
        wide = wide if dtype == wide else torch.promote_types(wide, dtype)
    return wide


def write_parameters(params: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into parameters, in all or in none of them.

    Raises:
        RuntimeError: If one can't be written to; names it.
    """
    before: dict[str, Tensor] = {}
    with torch.no_grad():
        for key, p in params.items():
            copy = p.detach().clone()
            try:
                p.copy_(values[key])
            except RuntimeError as error:
                for name, old in before.items():
                    params[name].copy_(old)
                raise RuntimeError(f"Can't write to the parameter {key!r}, nothing was changed: {error}") from error
            before[key] = copy
