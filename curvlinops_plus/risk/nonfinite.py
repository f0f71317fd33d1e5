"""Finding the first NaN or infinite numbers of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.risk.module_uses import title
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.process_state import eager, hookable_modules, own_calls
from curvlinops_plus.risk.reading import is_iterator
from curvlinops_plus.risk.risk import EmpiricalRisk


def first_nonfinite(risk: EmpiricalRisk) -> str | None:
    """Where NaN or inf first appears in a forward pass: words naming layer and batch, None if nowhere.

    Cost: forward passes up to that batch; none for data that can be read only once.
    """
    if is_iterator(risk.data):
        return None
    found: list[str] = []

    def check(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            for what, values in (("input", args), ("output", (out,))):
                floats = [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]
                if not found and not all(bool(t.isfinite().all()) for t in floats):
                    found.append(f"the {what} of {title(name)} ({type(module).__name__})")

        return hook

    handles = []
    try:
        for name, module in hookable_modules(risk.model):
            handles.append(module.register_forward_hook(own_calls(check(name))))
        with (
            preserve_state(risk.model, risk.data),
            torch.no_grad(),
            eager(),
        ):
            for index, batch in enumerate(risk.batches("looking for NaN")):
                risk.run(batch)
                if found:
                    return f"{found[0]} in batch {index} has NaN or infinite entries"
    finally:
        for handle in handles:
            handle.remove()
    return None
