"""What the statistics of an optimizer are, and when they and their inverse are renewed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from curvlinops_plus.optim.kfac.policies import number
from curvlinops_plus.risk import Vectors

Inverse = Literal["exact", "factored"]


@dataclass(frozen=True)
class CurvatureOptions:
    """What the statistics are, and when they and their inverse are renewed.

    Attributes:
        approximation, default, decay: As for `CurvatureEstimator`.
        vectors: As there, `MonteCarlo()` for None.
        statistics_every: Steps between two updates of the statistics.
        inverse_every: Steps between two refreshes of the inverse.
        inverse: "exact" is `(K + λI)⁻¹` with the damping of now; "factored" splits `λ` between the factors of each
            Kronecker product, with the damping of the refresh.
        power: Of `K + λI`; -1 but for special purposes.
    """

    approximation: Any
    default: Any
    vectors: Vectors | str | None
    decay: float
    statistics_every: int
    inverse_every: int
    inverse: Inverse
    power: float

    def __post_init__(self) -> None:
        number("-power", -self.power, strict=True)
        if self.inverse not in ("exact", "factored"):
            raise ValueError(
                f'inverse={self.inverse!r}; expected "exact" or "factored". Eigenvalues of their own in the eigenbasis '
                "of the Kronecker factors (EKFAC) are another curvature, not another inverse: approximation=EKFAC."
            )
        if self.inverse == "factored" and self.power != -1:
            raise ValueError(
                f'inverse="factored" and power={self.power:g}: only inverses can be damped factor by factor.'
            )
        for name in ("statistics_every", "inverse_every"):
            every = getattr(self, name)
            if not isinstance(every, int) or every < 1:
                raise ValueError(f"{name}={every!r}; expected a number of steps, at least 1.")
