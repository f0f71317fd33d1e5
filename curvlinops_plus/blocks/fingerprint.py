"""Two numbers for each parameter, which tell later whether its values are still the same."""

from __future__ import annotations

from collections.abc import Mapping

from curvlinops_plus.linalg.compared import Sums
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.replicas import all_parameters

Fingerprint = Mapping[str, list[float]]


def fingerprint(risk: EmpiricalRisk) -> Fingerprint:
    """For all parameters of the risk's model `Σ|p|` and `Σ p·cos(index)`, whatever their device and dtype.

    Writing to `p.data` changes no version of a tensor, so that only values tell. Those of the risk have their own keys;
    others, which it depends on too, that of the model after "model.".

    Cost: one pass over the memory of the parameters, 2 ms for a million of them on one core.
    """
    risk.whole.renew()
    return Sums(all_parameters(risk), risk.device)


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
    """Refuse the first use of an operator, called `label`, at other parameters than it was made at."""
    if changed := changed_parameters(before, fingerprint(risk), 1e-12):
        raise RuntimeError(
            f"{label} is computed at its first use, and the parameters {changed} have changed since it was made. Call "
            "its compute() for the matrix at the present ones, or make it after they change. `curvature` computes at "
            "once, and so does check_deterministic=True of the other classes."
        )
