"""Preserving the user's state: random numbers, buffers, generators of data loaders, options of embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.layer.embedding import refuse_renormalization
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk.modules import modules_of, parameters_of
from curvlinops_plus.risk.process_state import exclusive, own_passes

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
        RuntimeError: If parameters were written to meanwhile, as by another thread that trains.
    """
    with exclusive(), own_passes, ExitStack() as no_autocast:
        modules = modules_of(model)
        params = parameters_of(modules)
        versions = _versions(params)
        for kind in filter(torch.is_autocast_enabled, {"cpu", *[p.device.type for p in params.values()]}):
            no_autocast.enter_context(torch.autocast(kind, enabled=False))
        with kept_attributes(modules.values()):
            buffers = _prepared(modules.values())
            random, generators = RandomState.now(), [(g, g.get_state()) for g in data_generators(data)]
            try:
                yield
                now = _versions(params)
            finally:
                random.restore()
                for generator, state in generators:
                    generator.set_state(state)
                for buffer in buffers:
                    _restore(*buffer)
        if now != versions:
            changed = [name for name, version in versions.items() if now[name] != version]
            raise RuntimeError(
                f"The parameters {changed[:5]}{' …' if len(changed) > 5 else ''} were written to during this pass over "
                "the data, so its sums belong to no values of them. Does another thread train the model, or the model "
                "or the data write to them? Compute from a copy, copy.deepcopy(model)."
            )


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


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int | None]:
    """What changes when a tensor is written to, of each."""
    inference = map(Tensor.is_inference, tensors.values())
    return {name: None if made_there else t._version for (name, t), made_there in zip(tensors.items(), inference)}


def data_generators(data: Any) -> list[torch.Generator]:
    """The generators of a data loader and its samplers."""
    holders = (data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return [g for g in found if g is not None and isinstance(g, torch.Generator)]


@torch.no_grad()
def _restore(module: nn.Module, name: str, buffer: Tensor, before: Tensor) -> None:
    # Compared by value: batch norm writes without telling the version counter, and a needless write would disturb a
    # graph of the user's that waits for its backward pass.
    if not torch.equal(buffer, before):
        same = buffer == before
        if not bool((same | buffer.isnan() & before.isnan()).all()):
            buffer.copy_(before)
    module._buffers[name] = buffer
