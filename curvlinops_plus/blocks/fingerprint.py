"""Two numbers for each parameter, which tell later whether its values are still the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property, lru_cache
from math import cos, sin

import torch
from torch import Tensor, nn

from curvlinops_plus.risk import EmpiricalRisk

__all__ = ["Fingerprint", "changed_parameters", "fingerprint", "require_unchanged"]

Fingerprint = Mapping[str, list[float]]

# Waves of a longer parameter are those of one piece, shifted.
_PIECE = 2**18
# Shorter parameters are summed up together.
_SHORT = 2**12


class _Sums(Mapping[str, list[float]]):
    """A fingerprint. Short parameters are copied, and summed up when somebody asks for a number.

    Args:
        params: The parameters, by key.
        device: Where the numbers of all are gathered.
    """

    def __init__(self, params: Mapping[str, Tensor], device: torch.device) -> None:
        gathered = device.type in ("cpu", "cuda")
        with torch.no_grad():
            short = {key: p.flatten() for key, p in params.items() if gathered and _is_short(p, device)}
            self._copy = torch.cat([*short.values()]) if short else None
            long = {key: torch.stack(_sums(p)).to(device) for key, p in params.items() if key not in short}
        self._keys, self._long = list(params), long
        self._lengths = {key: p.numel() for key, p in short.items()}

    @cached_property
    def _numbers(self) -> dict[str, list[float]]:
        parts = [] if self._copy is None else [_short_sums(self._copy, tuple(self._lengths.values()))]
        # Read together: every answer of a GPU is waited for.
        read = torch.cat([sums.view(-1, 2) for sums in (*parts, *self._long.values())]).tolist()
        found = dict(zip([*self._lengths, *self._long], read, strict=True))
        self._copy = None
        return {key: found[key] for key in self._keys}

    def __getitem__(self, key: str) -> list[float]:
        return self._numbers[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


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
    return _Sums(params, risk.device)


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
    return plain and p.numel() <= _SHORT and p.device == device


def _short_sums(flat: Tensor, lengths: tuple[int, ...]) -> Tensor:  # -> [number of parameters, 2]
    """The same as `_sums`, of all parameters at once."""
    waves, ends = _short_waves(lengths, flat.device)
    flat = flat.double()
    return torch.segment_reduce(torch.stack((flat.abs(), flat * waves), 1), "sum", lengths=ends)


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
