"""The network that an operator belongs to, and whether its parameters are still the same."""

from __future__ import annotations

from typing import Any

from torch import equal, nn

from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.parameters import Fingerprint, changed_parameters, fingerprint


def risk_of(K: LinearOperator) -> EmpiricalRisk | None:
    """The risk that a curvature (or a multiple of one) was computed from; None for sums, inverses
    and plain matrices.
    """
    risk = getattr(K, "risk", None)
    return risk if isinstance(risk, EmpiricalRisk) else None


def parameters_of(K: Any) -> Fingerprint:
    """The fingerprint of a curvature's parameters; blocks that were not computed yet are computed
    now.
    """
    _ = getattr(K, "operator", None)
    return getattr(K, "parameters", None) or fingerprint(K.risk)


def require_present(risk: EmpiricalRisk, parameters: Fingerprint, title: str) -> None:
    """Refuse a network that was trained further. Cost: one pass over the memory of the
    parameters.
    """
    changed = changed_parameters(parameters, fingerprint(risk), 1e-12)
    if changed:
        raise ValueError(
            f"The parameters {changed[:3]} have changed since {title} was computed; compute it "
            "anew, or load the weights at which it was computed (a saved K has none of its own)."
        )


def require_own_values(K: LinearOperator, model: nn.Module, title: str) -> None:
    """Refuse a curvature of a network at other values of the parameters than it has now."""
    risk = risk_of(K)
    if risk is None or risk.model is not model:
        return
    require_present(risk, parameters_of(K), title)
    pairs = [(key, risk.params[key], p) for key, p in risk.own_params.items()]
    differing = [key for key, here, own in pairs if here is not own and not equal(here, own)]
    if differing:
        raise ValueError(
            f"{title} was computed at other values of {differing[:3]} than the network's own; load "
            "them first."
        )
