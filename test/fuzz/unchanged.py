"""What the library must leave alone: the user's model, data, gradients, random numbers and settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .compare import holds

__all__ = ["unchanged"]


def _facts(case: Case) -> dict[str, Any]:
    facts: dict[str, Any] = {"default dtype": torch.get_default_dtype(), "grad mode": torch.is_grad_enabled()}
    for name, p in [*case.model.named_parameters(), *case.model.named_buffers()]:
        facts[name] = (id(p), p._version, p.requires_grad, p.grad is None, p.dtype, p._backward_hooks is None)
    for name, m in case.model.named_modules():
        hooks = [len(getattr(m, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        facts[f"module {name}"] = (m.training, hooks, sorted(vars(m)), type(m))
    for index, (x, y) in enumerate(case.data):
        facts[f"batch {index}"] = [(id(t), t._version, t.requires_grad) for t in (x, *case.outputs(y))]
    return facts


@contextmanager
def unchanged(case: Case) -> Iterator[None]:
    """Fail if anything differs at the end, errors or not."""
    before, random = _facts(case), torch.get_rng_state()
    yield
    after = _facts(case)
    changed = [name for name in before if before[name] != after.get(name)]
    holds("the user's things stay", not changed, f"changed: {changed}")
    same: Tensor = torch.get_rng_state()
    holds("random numbers stay", torch.equal(random, same), "the global random state changed")
