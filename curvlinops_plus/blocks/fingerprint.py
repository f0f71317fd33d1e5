"""Two numbers for each parameter, which tell later whether its values are still the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from math import cos, sin

import torch
from torch import Tensor, nn

from curvlinops_plus.risk import EmpiricalRisk

__all__ = ["Fingerprint", "changed_parameters", "fingerprint", "require_unchanged"]

Fingerprint = dict[str, list[float]]

# Waves of a longer parameter are those of one piece, shifted.
_PIECE = 2**18
# Shorter parameters are summed up together.
_SHORT = 2**12


def fingerprint(risk: EmpiricalRisk) -> Fingerprint:
    """For all parameters of the risk's model `Σ|p|` and `Σ p·cos(index)`, whatever their device and dtype.

    Writing to `p.data` changes no version of a tensor, so that only values tell. Those of the risk have their own keys;
    others, which it depends on too, that of the model after "model.".

    Cost: one pass over the memory of the parameters, 2 ms for a million of them on one core.
    """
    risk.whole.renew()
    params, tracked = dict(risk.params), {id(p) for p in risk.params.values()}
    others = ((name, risk.whole.of(p)) for name, p in risk.model.named_parameters())
    params |= {f"model.{name}": p for name, p in others if id(p) not in tracked}
    short = [key for key, p in params.items() if _is_short(p, risk.device)]
    with torch.no_grad():
        found = {key: torch.stack(_sums(p)).to(risk.device) for key, p in params.items() if key not in short}
        parts = ([_short_sums([params[key] for key in short])] if short else []) + [*found.values()]
        # Read together: every answer of a GPU is waited for.
        read = torch.cat([sums.view(-1, 2) for sums in parts]).tolist()
    sums = dict(zip([*short, *found], read, strict=True))
    return {key: sums[key] for key in params}


def changed_parameters(
    before: Mapping[str, list[float]], now: Mapping[str, list[float]], tolerance: float
) -> list[str]:
    """Keys of the parameters that changed, relative to the sum of their absolute values by more than `tolerance`."""
    return [
        key
        for key, (size, *_) in before.items()
        if key not in now
        or not all(abs(a - b) <= tolerance * max(size, 1e-30) for a, b in zip(before[key], now[key], strict=True))
    ]


def require_unchanged(label: str, before: Mapping[str, list[float]], risk: EmpiricalRisk) -> None:
    """Refuse the first use of an operator, called `label`, at other parameters than it was made at.

    Raises:
        RuntimeError: Naming the parameters.
    """
    if changed := changed_parameters(before, fingerprint(risk), 1e-12):
        raise RuntimeError(
            f"{label} is computed at its first use, and the parameters {changed} have changed since it was made. Call "
            "its compute() for the matrix at the present ones, or make it after they change. `curvature` computes at "
            "once, and so does check_deterministic=True of the other classes."
        )


def _is_short(p: Tensor, device: torch.device) -> bool:
    """Whether the sums of a parameter are computed together with those of others on the device."""
    plain = type(p) in (Tensor, nn.Parameter) and p.is_floating_point() and p.layout == torch.strided
    return plain and p.numel() <= _SHORT and p.device == device and device.type in ("cpu", "cuda")


def _short_sums(params: Sequence[Tensor]) -> Tensor:  # -> [number of parameters, 2]
    """The same as `_sums`, of all parameters at once."""
    waves, lengths = _short_waves(tuple(p.numel() for p in params), params[0].device)
    flat = torch.cat([p.reshape(-1) for p in params]).double()
    return torch.segment_reduce(torch.stack((flat.abs(), flat * waves), 1), "sum", lengths=lengths)


@lru_cache(16)
def _short_waves(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        cosine = _waves(device)[0]
        return torch.cat([cosine[:length] for length in lengths]), torch.tensor(lengths, device=device)


def _sums(p: Tensor) -> tuple[Tensor, Tensor]:
    if p.is_meta:
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    flat = (torch.view_as_real(p) if p.is_complex() else p).reshape(-1)
    flat = flat.cpu() if flat.device.type == "mps" else flat  # which has no float64
    cosine, sine = _waves(flat.device)
    if len(flat) <= _PIECE:
        x = flat.double()
        return x.abs().sum(), x.dot(cosine[: len(x)])
    size = wave = flat.new_zeros((), dtype=torch.float64)
    for start in range(0, len(flat), _PIECE):
        x = flat[start : start + _PIECE].double()
        size = size + x.abs().sum()
        # cos(s + k) = cos s cos k - sin s sin k
        wave = wave + cos(start) * x.dot(cosine[: len(x)]) - sin(start) * x.dot(sine[: len(x)])
    return size, wave


@cache
def _waves(device: torch.device) -> tuple[Tensor, Tensor]:
    k = torch.arange(_PIECE, dtype=torch.float64, device=device)
    return k.cos(), k.sin()
