"""What counts as the same number, and checking that two passes over the data have the same loss."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.risk.totals import Totals


class Compared(Protocol):
    """What two passes over the data are compared of."""

    model: nn.Module
    losses: Any
    params: dict[str, Tensor]


#: Largest relative difference that passes as rounding, by bytes of a number. Models in float64 may have norms that
#: compute in float32 whatever they get.
TOLERANCE = {2: 5e-2, 4: 1e-3, 8: 1e-6}


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Relative difference; 0 where it can't be told because a number is not finite."""
    # Without copies where it goes: large numbers have squares beyond float32.
    for dtype in (torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32), torch.float64):
        one, other = a.to(dtype), b.to(dtype)
        size, away = float(torch.linalg.vector_norm(other)), float(torch.linalg.vector_norm(one - other))
        if math.isfinite(size) and math.isfinite(away):
            return away / (size or 1.0)
    return 0.0


def require_same(risk: Compared, first: Totals, second: Totals) -> None:
    """Compare the totals of two passes: the order of the examples does not matter, everything else does.

    Raises:
        NumericsError: If a loss is not finite.
        RuntimeError: If the passes disagree; names modules in training mode.
    """
    weighted = (sum(a.weight * x for a, x in zip(risk.losses, totals.losses)) for totals in (first, second))
    one, two = (torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in weighted)
    if not bool(one.isfinite() & two.isfinite()):
        raise NumericsError(f"The total loss is {float(one)}: an output or a target has NaN or infinite entries.")
    tolerance = 1e-8 if coarsest_dtype(risk) == torch.float64 else 5e-5
    if first.examples == second.examples and torch.allclose(one, two, rtol=tolerance, atol=1e-6):
        return
    random = training_modules(risk.model)
    cause = "Does the data change from pass to pass (random augmentation, drop_last with shuffling), or the model?"
    if random:
        cause = f"These modules are in training mode: {random}; call model.eval()."
    raise RuntimeError(
        f"Two passes over the data disagree: total loss {float(one):.8g} over {first.examples} examples and "
        f"{float(two):.8g} over {second.examples}. {cause} check_deterministic=False turns this check off."
    )


def coarsest_dtype(risk: Compared) -> torch.dtype:
    """The dtype of the parameters that rounds most: what the digits of results are limited by."""
    return max((p.dtype for p in risk.params.values()), key=lambda dtype: torch.finfo(dtype).eps)


def training_modules(model: nn.Module) -> str:
    """Names of modules whose forward pass in training mode is random or depends on the batch, "" if there are none.

    Recurrent networks and attention drop out by themselves, without a module inside.

    Example:
        >>> training_modules(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.LSTM(2, 2, num_layers=2, dropout=0.1)))
        "'1' (Dropout), '2' (LSTM)"
    """
    modules = [(name, m) for name, m in model.named_modules() if m.training and _differs_in_training(m)]
    return ", ".join(f"{name!r} ({type(m).__name__})" for name, m in modules)


def _differs_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.num_layers > 1 and module.dropout > 0  # it drops between its layers
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.RReLU))
