"""The modules and parameters of a model by their names, in one walk over it.

The same as `named_modules` and `named_parameters` of PyTorch give, whose nested generators take several times as long.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Name to module, each module once, under the first of its names.

    Example:
        >>> relu = nn.ReLU()
        >>> list(modules_of(nn.Sequential(nn.Sequential(relu), nn.Linear(3, 2), relu)))
        ['', '0', '0.0', '1']
    """
    names = {model: ""}
    _name_inside(model, "", names)
    return {name: module for module, name in names.items()}


def _name_inside(module: nn.Module, prefix: str, names: dict[nn.Module, str]) -> None:
    for own, child in module._modules.items():
        if child is not None and child not in names:
            names[child] = prefix + own
            if child._modules:
                _name_inside(child, f"{prefix}{own}.", names)


def parameters_of(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Name to parameter, each parameter once, under the first of its names.

    Args:
        modules: What `modules_of` returns.

    Example:
        >>> list(parameters_of(modules_of(nn.Sequential(nn.Linear(3, 2), nn.PReLU()))))
        ['0.weight', '0.bias', '1.weight']
    """
    named = {
        f"{name}.{own}" if name else own: p
        for name, module in modules.items()
        if module._parameters
        for own, p in module._parameters.items()
        if p is not None
    }
    if len({*map(id, named.values())}) == len(named):
        return named
    first = {id(p): name for name, p in reversed(named.items())}
    return {name: p for name, p in named.items() if first[id(p)] == name}
