"""What running a module again asks of it, and what is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.random_state import RandomState


def check_repeatable(module: nn.Module) -> None:
    """Refuse modules whose output for an example depends on the batch or on the number of calls.

    Raises:
        UnsupportedError: For batch normalization with the statistics of the batch, and spectral normalization in
            training mode, whose weight changes with every forward pass.
    """
    for name, child in module.named_modules():
        where = type(child).__name__ + (f" ({name!r} of {type(module).__name__})" if name else "")
        if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
            why = "in training mode" if child.training else "with track_running_stats=False"
            raise UnsupportedError(
                f"{where} {why} normalizes with the statistics of the batch: its examples are not independent, so they "
                "have no gradients of their own. Call `model.eval()` first, on a layer that tracks running statistics."
            )
        if _updates_vectors(child):
            raise UnsupportedError(
                f"{where} in training mode: spectral normalization updates its estimate of the largest singular value "
                "in every forward pass, so running the layer again gives another weight. Call `model.eval()` first."
            )


def spectral_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose weights spectral normalization changes in every forward pass, by name.

    Example:
        >>> model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
        >>> list(spectral_norms(model)), list(spectral_norms(model.eval()))
        (['0'], [])
    """
    owners = {name: m for name, m in model.named_modules() if not isinstance(m, _SpectralNorm)}
    none = nn.Module()
    return {
        name: m
        for name, m in owners.items()
        if any(map(_updates_vectors, (m, *getattr(m, "parametrizations", none).modules())))
    }


def _updates_vectors(module: nn.Module) -> bool:
    """Whether it is spectral normalization in training mode, of the new or the old kind."""
    new = isinstance(module, _SpectralNorm) and hasattr(module, "_u")  # vectors are normalized without one
    old = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return module.training and (new or old)


def as_parameters(tensors: Iterable[Tensor]) -> None:
    """Let tensors that stand for parameters pass for them: `Module.get_parameter` returns nothing else."""
    for t in tensors:
        t._is_param = True  # type: ignore[attr-defined]  # PyTorch's own mark, of subclasses of tensors


@contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Undo what `forward` writes to attributes, e.g. `self.attention = ...`: vmapped tensors must not stay there."""
    found = [(vars(m), dict(vars(m))) for m in module.modules()]
    # The contents of lists and dicts too: recurrent layers keep their weights in a list.
    held = [(v, v.copy()) for _, before in found for v in before.values() if isinstance(v, (list, dict))]
    for m in module.modules():
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            m.scale_grad_by_freq = (
                False  # it rescales gradients by frequencies in the batch: the result is not a derivative
            )
    cached, parametrize._cache_enabled = parametrize._cache_enabled, 0  # `parametrize.cached()`: of other parameters
    try:
        yield
    finally:
        parametrize._cache_enabled = cached
        for now, before in found:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for now, before in held:
            _restore_contents(now, before)


def _restore_contents(now: Any, before: Any) -> None:
    """Restore the contents of a list or a dict if they have changed."""

    def entries(container: Any) -> list[tuple[Any, Any]]:
        return list(container.items() if isinstance(container, dict) else enumerate(container))

    pairs = list(zip_longest(entries(now), entries(before), fillvalue=(None, None)))
    if any(key != old_key or value is not old for (key, value), (old_key, old) in pairs):
        now.clear()
        if isinstance(now, dict):
            now.update(before)
        else:
            now.extend(before)


@contextmanager
def words_for_errors(module: nn.Module) -> Iterator[None]:
    """Say what was tried when tensors no longer fit in a module that ran before, with the whole batch."""
    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError):  # words of our own, or nothing that the module did
        raise
    except RuntimeError as error:
        raise UnsupportedError(
            f"{type(module).__name__} can't be run again with one example of the batch, which gives the example's "
            f"gradients ({type(error).__name__}: {error}). Does it read what its last call left (a cache: "
            "use_cache=False), or the number of examples? Write a rule for it (@register_rule), or leave its "
            "parameters out of `params`."
        ) from error


@contextmanager
def no_random_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the global random state, and refuse a module that draws from it: the draws of the first call are lost."""
    before = RandomState.now(device)
    try:
        yield
        if before != RandomState.now(device):
            raise UnsupportedError(
                f"{type(module).__name__} draws random numbers (dropout in training mode?), so running it again for "
                "one example gives another result. Call `model.eval()` first, or leave out this layer's parameters."
            )
    finally:
        before.restore()
