"""Checking that two passes over the data have the same loss."""

from __future__ import annotations

import torch
from torch import nn

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.risk.nonfinite import first_nonfinite
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.totals import Totals


def require_same(risk: EmpiricalRisk, first: Totals, second: Totals) -> None:
    """Compare the totals of two passes: the order of the examples does not matter, everything else does.

    Raises:
        NumericsError: If a loss is not finite; names layer and batch.
        RuntimeError: If the passes disagree; names modules in training mode.
    """
    weighted = (sum(a.weight * x for a, x in zip(risk.losses, totals.losses)) for totals in (first, second))
    one, two = (torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in weighted)
    if not bool(one.isfinite() & two.isfinite()):
        where = first_nonfinite(risk)
        raise NumericsError(f"The total loss is {float(one)}." + (f" First seen: {where}." if where else ""))
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


def coarsest_dtype(risk: EmpiricalRisk) -> torch.dtype:
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
