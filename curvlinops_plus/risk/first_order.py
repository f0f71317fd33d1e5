"""Passes over all data: loss and gradient, what several losses are divided by, where a forward pass goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from curvlinops_plus.risk.layers import title
from curvlinops_plus.risk.parameter_reads import refuse_outside_reads
from curvlinops_plus.risk.totals import Shares, Totals, UnevenError

if TYPE_CHECKING:
    from curvlinops_plus.risk.risk import EmpiricalRisk

__all__ = ["count_terms", "first_nonfinite", "one_pass", "settled"]

T = TypeVar("T")


def one_pass(risk: EmpiricalRisk, gradient: bool) -> tuple[dict[str, Tensor], Totals]:
    """Gradient of the sum of all loss terms (zeros if it is not wanted), and totals. Random state is not restored.

    Of several losses each one's terms count with its share.
    """
    free = {key: p.detach().requires_grad_() for key, p in risk.params.items()}
    totals, grads = Totals(), {key: torch.zeros_like(p) for key, p in free.items()}

    def loop(model: nn.Module) -> None:
        looked_at = not gradient or (risk.heads is None and risk.known_loss)
        for batch in risk.batches("gradient" if gradient else "loss"):
            with torch.set_grad_enabled(gradient), torch.compiler.set_stance("force_eager"):
                f, y, class_axis = risk.run(batch, model)
                _, _, part = risk.terms(f, y, batch, class_axis)
            if not looked_at:
                refuse_outside_reads(risk.objective(part), risk.params)
                looked_at = True
            if gradient:
                found = torch.autograd.grad(risk.objective(part), list(free.values()), allow_unused=True)
                for total, g in zip(grads.values(), found):
                    if g is not None:
                        total += g
            totals.add(part.detached())

    with torch.inference_mode(False), torch.enable_grad():
        risk.at(free, loop)
    return grads, totals


def settled(risk: EmpiricalRisk, attempt: Callable[[], tuple[T, Totals]]) -> tuple[T, Totals]:
    """Result and totals of a pass over the data, which runs again if several losses had other shares than thought.

    The first attempt takes the shares for those of the pass before, or of the first batch.

    Raises:
        ValueError: If passes don't agree.
    """
    heads = risk.heads
    if heads is None:
        return attempt()
    if heads.constant or risk.one_shot:
        with risk.sharing(Shares(heads, risk.num_data)):
            return attempt()
    shares = Shares(heads, risk.num_data, risk.remembered, risk.one_batch)
    for _ in range(2):
        try:
            with risk.sharing(shares):
                result, totals = attempt()
        except UnevenError:
            whole = count_terms(risk)
        else:
            whole = totals.detached()
            if shares.fit(whole):
                risk.remembered = whole
                return result, totals
        shares = Shares(heads, risk.num_data, whole)
    raise ValueError(shares.changing())


def count_terms(risk: EmpiricalRisk) -> Totals:
    """Totals of all data. Cost: one forward pass. Random state is not restored."""
    totals = Totals()
    with torch.inference_mode(False), torch.no_grad():
        for batch in risk.batches("counting loss terms"):
            with torch.compiler.set_stance("force_eager"):
                f, y, class_axis = risk.run(batch)
            with torch.autocast(risk.device.type, enabled=False):
                totals.add(risk.terms(f, y, batch, class_axis)[2])
    return totals


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
