"""Leave everything as it was found: random numbers, buffers, generators of data loaders, options of embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from curvlinops_plus.layer.embedding import refuse_renormalization

__all__ = ["untouched"]


# Options of embeddings that say nothing about the function they compute.
_PLAIN = {"max_norm": None, "sparse": False, "scale_grad_by_freq": False}


@contextmanager
def untouched(model: nn.Module, data: Any) -> Iterator[None]:
    """Restore the global random state, the model's buffers and the data's generators on the way out, also on error.

    Even iterating a `DataLoader` draws from the global generator, and a forward pass in training mode moves running
    statistics. Cost: a copy of the buffers.

    Embeddings do without `sparse` and `scale_grad_by_freq` meanwhile, which are about `.grad` alone (and the latter's
    is no derivative), and without `max_norm`, which has nothing to do once it was found that no row exceeds it.

    Raises:
        UnsupportedError: If an embedding's `max_norm` would rewrite its weight.
    """
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    holders = (data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None))
    generators = [g for g in (getattr(h, "generator", None) for h in holders) if isinstance(g, torch.Generator)]
    states = [g.get_state() for g in generators]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    for table in tables:
        refuse_renormalization(table)
    options = [{name: getattr(table, name) for name in _PLAIN} for table in tables]
    try:
        for table in tables:
            vars(table).update(_PLAIN)
        yield
    finally:
        for table, before in zip(tables, options):
            vars(table).update(before)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        for generator, state in zip(generators, states):
            generator.set_state(state)
        with torch.no_grad():
            for module, name, buffer, copy in buffers:
                # Compared by value: batch norm writes without telling the version counter, and a needless write would
                # disturb a graph of the user's that waits for its backward pass.
                if not torch.equal(buffer, copy) and not bool((buffer.isnan() & copy.isnan() | (buffer == copy)).all()):
                    buffer.copy_(copy)
                module._buffers[name] = buffer
