"""The modules and parameters of a model by their names, and other values in their place, for one thread and a while.

Names are those that `named_modules` and `named_parameters` of PyTorch give, whose nested generators take several times
as long.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.embedding import refuse_renormalization
from curvlinops_plus.layer.replay import as_parameters
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk.graph import nodes_of, postorder
from curvlinops_plus.risk.process_state import OwnThread, exclusive, own_passes


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


def hookable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that take hooks, with their names: all but those compiled by `torch.jit`."""
    return ((name, m) for name, m in modules_of(model).items() if not isinstance(m, torch.jit.ScriptModule))


#: Every module that holds a parameter, and the names in it and keys of those it holds.
Places = Sequence[tuple[nn.Module, Sequence[tuple[str, str]]]]


class Replaced(dict[str, Any]):
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


@contextmanager
def replaced_parameters(places: Places, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the modules have other parameters, by key; other threads see their own ones."""
    ours = OwnThread()
    as_parameters(values.values())
    with ExitStack() as stack:
        for module, names in places:
            given = module._parameters
            replaced = {**given, **{name: values[key] for name, key in names}}
            made = Replaced(replaced, getattr(given, "own", given), ours)
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
                made = Replaced(copies, getattr(given, "own", given), ours)
                vars(module)["_buffers"] = made
                stack.callback(_restore, module, "_buffers", given, made, copies)
        yield


def _restore(
    module: nn.Module, attribute: str, given: dict[str, Any], made: Replaced, names: Mapping[str, Any]
) -> None:
    # What the model registered meanwhile stays.
    given.update({name: p for name, p in dict.items(made) if name not in names})
    vars(module)[attribute] = given


# Options of embeddings that say nothing about the function they compute.
_PLAIN = {"max_norm": None, "sparse": False, "scale_grad_by_freq": False}


@contextmanager
def preserve_state(model: nn.Module, data: Any) -> Iterator[None]:
    """Restore the global random state, the model's buffers and the data's generators at the end, also on error.

    Even iterating a `DataLoader` draws from the global generator, and a forward pass in training mode moves running
    statistics. Cost: a copy of the buffers.

    Meanwhile embeddings run without `sparse` and `scale_grad_by_freq`, which only change `.grad` (the latter to what is
    no derivative), and without `max_norm`, after a check that no row exceeds it. And nothing runs under the caller's
    autocast: a matrix does not depend on where it is asked for. Autocast inside the model's forward is part of the
    model.

    One thread at a time is in here; others wait.

    Raises:
        UnsupportedError: If an embedding's `max_norm` would rewrite its weight.
    """
    with exclusive(), own_passes, ExitStack() as no_autocast:
        modules = modules_of(model)
        for kind in filter(torch.is_autocast_enabled, {"cpu", *[p.device.type for p in model.parameters()]}):
            no_autocast.enter_context(torch.autocast(kind, enabled=False))
        with kept_attributes(modules.values()):
            buffers = _prepared(modules.values())
            random, generators = RandomState.now(), [(g, g.get_state()) for g in data_generators(data)]
            try:
                yield
            finally:
                random.restore()
                for generator, state in generators:
                    generator.set_state(state)
                for buffer in buffers:
                    _restore_buffer(*buffer)


@contextmanager
def kept_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What modules store in themselves while they run, as activations and counters, is as before at the end."""
    before = [(module.__dict__, {**module.__dict__}) for module in modules]
    try:
        yield
    finally:
        for own, attributes in before:
            for name in {*own}.difference(attributes):
                del own[name]
            own.update(attributes)


def _prepared(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    """Copies of buffers beside them; options of embeddings are set, which `kept_attributes` undoes."""
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    for module in modules:
        if module._buffers:
            buffers += [(module, name, b, b.detach().clone()) for name, b in module._buffers.items() if b is not None]
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            refuse_renormalization(module)
            vars(module).update(_PLAIN)
    return buffers


def data_generators(data: Any) -> list[torch.Generator]:
    """The generators of a data loader and its samplers."""
    holders = (data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return [g for g in found if g is not None and isinstance(g, torch.Generator)]


@torch.no_grad()
def _restore_buffer(module: nn.Module, name: str, buffer: Tensor, before: Tensor) -> None:
    # Compared by value: batch norm writes without telling the version counter, and a needless write would disturb a
    # graph of the user's that waits for its backward pass.
    if not torch.equal(buffer, before):
        same = buffer == before
        if not bool((same | buffer.isnan() & before.isnan()).all()):
            buffer.copy_(before)
    module._buffers[name] = buffer


def refuse_outside_reads(reader: str, tensors: Iterable[Tensor], params: Mapping[str, Tensor]) -> None:
    """Refuse a model or loss that reads trainable parameters past the modules, where other values stand for them.

    Args:
        reader: Which of the two.
        tensors: What it returned.
        params: The parameters in their own tensors, by key.

    Cost: a walk through the graph.
    """
    own = {id(p): key for key, p in params.items()}
    read = {own.get(id(getattr(node, "variable", None))) for node in postorder(nodes_of(tensors))} - {None}
    if read:
        names = [key for key in params if key in read]
        raise UnsupportedError(
            f"The {reader} reads the parameters {names[:5]}{' …' if len(names) > 5 else ''} from elsewhere than the "
            "attributes of modules, such as a list that keeps them, or a penalty in the loss. Derivatives are taken "
            "where parameters are replaced in the modules, so that part would be left out. Let forward read the "
            "attribute (self.weight), keep several in an nn.ParameterList, and add the curvature of a penalty to the "
            "operator, as in `H + weight_decay * IdentityLinearOperator(...)`."
        )
