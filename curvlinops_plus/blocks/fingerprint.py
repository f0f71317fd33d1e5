"""Two numbers for each parameter, which tell later whether its values are still the same."""

from __future__ import annotations

from collections.abc import Mapping

from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.replicas import parameter_sums

Fingerprint = Mapping[str, list[float]]


def fingerprint(risk: EmpiricalRisk) -> Fingerprint:
    """For all parameters of the risk's model `Σ p` and `‖p‖`, whatever their device and dtype.

    Writing to `p.data` changes no version of a tensor, so that only values tell. Those of the risk have their own keys;
    others, which it depends on too, that of the model after "model.".

    Cost: one pass over the memory of the parameters, 2 ms for a million of them on one core.
    """
    risk.whole.renew()
    return parameter_sums(risk)


def changed_parameters(
    before: Mapping[str, list[float]], now: Mapping[str, list[float]], tolerance: float
) -> list[str]:
    """Keys of the parameters whose sums changed by more than `tolerance`, relative to their size."""

    def same(key: str) -> bool:
        room = tolerance * before[key][1]
        return key in now and all(abs(a - b) <= 2 * room for a, b in zip(before[key], now[key], strict=True))

    return [key for key in before if not same(key)]


def require_unchanged(label: str, before: Mapping[str, list[float]], risk: EmpiricalRisk) -> None:
    """Refuse the first use of an operator, called `label`, at other parameters than it was made at."""
    if changed := changed_parameters(before, fingerprint(risk), 1e-12):
        raise RuntimeError(
            f"{label} is computed at its first use, and the parameters {changed} have changed since it was made. Call "
            "its compute() for the matrix at the present ones, or make it after they change. `curvature` computes at "
            "once, and so does check_deterministic=True of the other classes."
        )
