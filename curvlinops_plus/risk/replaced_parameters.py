"""Other values of a model's parameters, for one thread and a while."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.layer.run_again import as_parameters
from curvlinops_plus.risk.process_state import OwnThread

#: Every module that holds a parameter, and the names in it and keys of those it holds.
Places = Sequence[tuple[nn.Module, Sequence[tuple[str, str]]]]
#: Parents, names and children of modules.
Paths = Sequence[tuple[nn.Module, str, nn.Module]]


class _Replaced(dict[str, Any]):
    """The parameters or buffers of one module: those given to one thread, its own ones to all others."""

    def __init__(self, replaced: Mapping[str, Any], own: Mapping[str, Any], ours: OwnThread) -> None:
        super().__init__(replaced)
        self.own, self.ours = own, ours

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) if self.ours() else self.own[name]

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, default) if self.ours() else self.own.get(name, default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return super().items() if self.ours() else self.own.items()  # pyright: ignore[reportReturnType]

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return super().values() if self.ours() else self.own.values()  # pyright: ignore[reportReturnType]


def parameter_places(modules: Iterable[nn.Module], params: Mapping[str, Tensor]) -> Places:
    """Where parameters are: a module may have two names, a parameter two modules."""
    key_of = dict(zip(map(id, params.values()), params))
    places: list[tuple[nn.Module, Sequence[tuple[str, str]]]] = []
    for module in modules:
        held = module._parameters.items() if module._parameters else ()
        if names := [(name, key_of[place]) for name, p in held if (place := id(p)) in key_of]:
            places.append((module, names))
    return places


def paths_in(modules: Iterable[nn.Module]) -> Paths:
    """Parent, name and child of each module that holds parameters or other modules."""
    return [
        (module, name, child)
        for module in modules
        if module._modules
        for name, child in module._modules.items()
        if child is not None and (child._parameters or child._modules)
    ]


def require_places(
    places: Places, paths: Sequence[tuple[nn.Module, str, nn.Module]], own: Mapping[str, Tensor]
) -> None:
    """Refuse a model that holds other tensors by now than it did.

    Args:
        paths: The modules on the way to these, and maybe others.
    """
    gone = [m for parent, name, m in paths if name not in parent._modules or parent._modules[name] is not m]
    inside = {module for child in gone for module in child.modules()} if gone else ()
    other = [
        key
        for module, names in places
        for name, key in names
        if (name not in (held := module._parameters) or held[name] is not own[key] or module in inside)
        and not isinstance(held, _Replaced)
    ]
    if other:
        raise ValueError(
            f"The model has other tensors in place of its parameters {other[:5]}{' …' if other[5:] else ''} than when "
            "this risk was made (load_state_dict(..., assign=True), a new nn.Parameter, or another module). Make a new "
            "EmpiricalRisk, or a new optimizer."
        )


@contextmanager
def replaced_parameters(places: Places, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the modules have other parameters, by key; other threads see their own ones."""
    ours = OwnThread()
    as_parameters(values.values())
    with ExitStack() as stack:
        for module, names in places:
            given = module._parameters
            replaced = {**given, **{name: values[key] for name, key in names}}
            made = _Replaced(replaced, getattr(given, "own", given), ours)
            vars(module)["_parameters"] = made
            stack.callback(_restore, module, "_parameters", given, made, dict(names))
        yield


@contextmanager
def copied_buffers(model: nn.Module) -> Iterator[None]:
    """Context in which the modules have copies of their buffers: what is written to them is lost."""
    ours = OwnThread()
    with ExitStack() as stack:
        for module in model.modules():
            given = module._buffers
            if given:
                copies = {name: None if b is None else b.clone() for name, b in given.items()}
                made = _Replaced(copies, getattr(given, "own", given), ours)
                vars(module)["_buffers"] = made
                stack.callback(_restore, module, "_buffers", given, made, copies)
        yield


def _restore(
    module: nn.Module, attribute: str, given: dict[str, Any], made: _Replaced, names: Mapping[str, Any]
) -> None:
    # What the model registered meanwhile stays.
    given.update({name: p for name, p in dict.items(made) if name not in names})
    vars(module)[attribute] = given
