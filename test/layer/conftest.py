"""The slow twin of every rule: one `torch.autograd.grad` per example and vector, on the user's own
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from curvlinops_plus.layer import RULES, differentiable_parameters


def _loop(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    g: Any,
    in_axes: Sequence[int] | None = None,
    out_axes: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Per-example gradients [V, B, *shape] of a module's own parameters, which must require
    gradients.

    `args` and `g` have the examples first, as rules get them; `g` is a list if the module returns
    several tensors.
    """
    g = [g] if isinstance(g, Tensor) else g
    V, B = g[0].shape[:2]
    params = differentiable_parameters(module)
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    axes = iter(in_axes or [0] * len(leaves))
    axes = [next(axes) if isinstance(t, Tensor) else 0 for t in leaves]

    def one(n: int) -> list[Tensor]:
        """Outputs for one example, which come first."""
        some = [
            t[n].unsqueeze(axis).clone() if isinstance(t, Tensor) and t.ndim and len(t) == B else t
            for t, axis in zip(leaves, axes)
        ]
        a, k = tree_unflatten(some, spec)
        out = [
            t
            for t in tree_leaves(module(*a, **k))
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
        return [t.movedim(axis, 0) for t, axis in zip(out, out_axes or [0] * len(out))]

    result = {name: p.new_zeros(V, B, *p.shape) for name, p in params.items()}
    for n in range(B):
        out = one(n)
        parts = [k for k, t in enumerate(out) if t.requires_grad]
        for v in range(V if parts else 0):
            back = [g[k][v, n].reshape(out[k].shape) for k in parts]
            grads = torch.autograd.grad(
                [out[k] for k in parts],
                list(params.values()),
                back,
                retain_graph=True,
                materialize_grads=True,
            )
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
    """Double precision by default; modules are built from the same global seed, which is put
    back.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    """Rules that a test registers are gone after it."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)
