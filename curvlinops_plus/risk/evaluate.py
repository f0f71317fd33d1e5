"""Loss and gradient over all data, and where a forward pass first goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvlinops_plus.risk.layers import title
from curvlinops_plus.risk.totals import Totals

if TYPE_CHECKING:
    from curvlinops_plus.risk.risk import EmpiricalRisk

__all__ = ["first_nonfinite", "gradient_and_loss"]


def gradient_and_loss(risk: EmpiricalRisk, gradient: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient and loss over all data; nothing is written to `.grad`."""
    free = {key: p.detach().requires_grad_() for key, p in risk.params.items()}
    totals, grads = Totals(), {key: torch.zeros_like(p) for key, p in free.items()}

    def one_pass(model: nn.Module) -> None:
        for batch in risk.batches("gradient" if gradient else "loss"):
            with torch.set_grad_enabled(gradient), torch.compiler.set_stance("force_eager"):
                f, y, class_axis = risk.run(batch, model)
                F, Y = risk.canonical(f, y, batch, class_axis)
                nll = risk.likelihood.nll(F, Y).sum()
            if gradient:
                found = torch.autograd.grad(nll, list(free.values()), allow_unused=True)
                for total, g in zip(grads.values(), found):
                    if g is not None:
                        total += g
            count = risk.likelihood.count(F, Y)
            totals.add(Totals(batch.num_examples, batch.num_examples * F.shape[1], count, nll.detach()))

    with risk.untouched(), torch.inference_mode(False), torch.enable_grad():
        risk.at(free, one_pass)
    c = risk.scale(totals)
    return {key: g * c for key, g in grads.items()}, torch.as_tensor(totals.loss * c).to(risk.dtype)


def first_nonfinite(risk: EmpiricalRisk) -> str | None:
    """Where NaN or inf first appears in a forward pass: a sentence naming layer and batch, None if nowhere."""
    if risk.one_shot:
        return None
    found: list[str] = []
    handles = []

    def hook(name: str) -> Callable[..., None]:
        def check(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            for what, values in (("input", args), ("output", (out,))):
                bad = any(
                    isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isfinite().all()) for t in values
                )
                if bad and not found:
                    found.append(
                        f"the {what} of {title(name)} ({type(module).__name__}) in batch {{index}} has NaN or "
                        "infinite entries"
                    )

        return check

    try:
        for name, module in risk.model.named_modules():
            handles.append(module.register_forward_hook(hook(name)))
        with risk.untouched(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for index, batch in enumerate(risk.batches("looking for NaN")):
                risk.run(batch)
                if found:
                    return found[0].format(index=index)
    finally:
        for handle in handles:
            handle.remove()
    return None
