"""The slow twin of every rule: one `torch.autograd.grad` per example and vector, on the user's own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def _loop(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor) -> dict[str, Tensor]:
    """Per-example gradients [V, B, *shape] of a module's direct parameters, which must require gradients."""
    V, B = g.shape[:2]
    params = {name: p for name, p in module.named_parameters(recurse=False) if p.is_floating_point()}

    def one(value: Any, n: int) -> Any:
        if isinstance(value, Tensor):
            return value[n : n + 1].clone() if value.ndim and len(value) == B else value
        if isinstance(value, (tuple, list)):
            return type(value)(one(v, n) for v in value)
        if isinstance(value, dict):
            return {k: one(v, n) for k, v in value.items()}
        return value

    result = {name: p.new_zeros(V, B, *p.shape) for name, p in params.items()}
    for v in range(V):
        for n in range(B):
            out = module(*(one(a, n) for a in args), **{k: one(a, n) for k, a in kwargs.items()})
            grads = torch.autograd.grad(out, list(params.values()), g[v, n].reshape(out.shape), materialize_grads=True)
            for name, grad in zip(params, grads, strict=True):
                result[name][v, n] = grad.to_dense()
    return result


def _same(ours: dict[str, Tensor], twin: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert ours.keys() == twin.keys()
    for name, J in twin.items():
        assert ours[name].shape == J.shape
        assert ours[name].dtype == J.dtype
        assert not ours[name].requires_grad
        scale = max(1.0, J.abs().max().item())
        assert (ours[name] - J).abs().max().item() <= tolerance * scale, name


@pytest.fixture
def loop() -> Callable[..., dict[str, Tensor]]:
    return _loop


@pytest.fixture
def same() -> Callable[..., None]:
    return _same


@pytest.fixture(autouse=True)
def _float64_and_one_seed() -> Any:
    """Double precision by default; modules are built from the same global seed, which is put back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(before)
