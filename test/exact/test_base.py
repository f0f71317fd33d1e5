"""Models that are random, which operators of a risk refuse by default, after looking at a few
examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from curvlinops_plus import EKFAC, EmpiricalRisk, Jacobian, KFACLinearOperator, curvature
from curvlinops_plus.exact import GGN, ActivationHessian, GGNFactor, Hessian
from curvlinops_plus.linalg import LinearOperator
from test.cases import unchanged

Make = Callable[..., LinearOperator]
EXACT: dict[str, Make] = {
    "GGN": GGN,
    "GGNFactor": GGNFactor,
    "Hessian": Hessian,
    "Jacobian": Jacobian,
    "ActivationHessian": lambda risk, **options: ActivationHessian(
        risk, ("0", "output", 0), **options
    ),
}
BLOCKS: dict[str, Make] = {
    "EKFAC": lambda risk: curvature(risk, EKFAC),
    "classic": lambda risk: KFACLinearOperator(
        risk.model, nn.CrossEntropyLoss(), [*risk.params.values()], risk.data, seed=0
    ),
}
exact = pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
every = pytest.mark.parametrize("make", (EXACT | BLOCKS).values(), ids=EXACT | BLOCKS)


class Noise(nn.Module):
    """Adds random numbers in every mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Rarely(nn.Module):
    """Random in training mode, with a probability; draws a number in evaluation mode, too, perhaps
    for nothing.
    """

    def __init__(self, probability: float, always: float = 0.0) -> None:
        super().__init__()
        self.probability, self.always = probability, always

    def forward(self, x: Tensor) -> Tensor:
        drawn = float(torch.rand(()))
        return 2 * x if drawn < (self.probability if self.training else self.always) else x


def risk_of(middle: nn.Module, **options: Any) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), middle, nn.Linear(20, 3)).double()
    data = [(torch.rand(n, 4).double(), torch.randint(3, (n,))) for n in (7, 5)]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **options)


def spectral() -> nn.Module:
    """A layer whose vectors are as before training."""
    torch.manual_seed(0)
    layer = spectral_norm(nn.Linear(20, 20))
    for vector in layer.buffers():  # far from those of the largest singular value
        vector.copy_(nn.functional.normalize(torch.rand_like(vector), dim=0))
    return layer


#: The layer in the middle, and the words; in evaluation mode some of them pass.
RANDOM: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (
        lambda: nn.Dropout(0.5),
        r"Two evaluations of the model.*training mode: '1' \(Dropout\).*model.eval",
    ),
    # Two evaluations agree nearly always, so drawing numbers in training mode is refused.
    "stochastic depth": (
        lambda: Rarely(1e-6),
        "draws random numbers in training mode, in code of its own.*model.ev",
    ),
    "noise": (Noise, r"Does it draw random numbers"),
    "random in evaluation": (
        lambda: Rarely(0.3, always=0.3),
        "Two evaluations of the model|depend on each other",
    ),
}


@pytest.mark.parametrize("kind", RANDOM)
@every
def test_random_models_are_refused_by_name(make: Make, kind: str) -> None:
    middle, words = RANDOM[kind]
    risk = risk_of(middle())
    if kind == "random in evaluation":
        risk.model.eval()
    with unchanged(risk.model), pytest.raises(RuntimeError, match=words):
        make(risk).to_dense()
    if kind in ("dropout", "stochastic depth"):
        risk.model.eval()
        make(risk).to_dense()


@exact
def test_each_product_is_refused_also_after_others_in_another_mode(make: Make) -> None:
    risk = risk_of(nn.Dropout(0.5))
    risk.model.eval()
    operator = make(risk)
    v = torch.ones(operator.shape[1], dtype=torch.float64)
    _ = operator @ v
    risk.model.train()
    with pytest.raises(RuntimeError, match=r"'1' \(Dropout\); call model.eval"):
        _ = operator @ v


@exact
def test_spectral_norm_in_training_mode_is_another_function_each_time(make: Make) -> None:
    risk = risk_of(spectral())
    with unchanged(risk.model), pytest.raises(RuntimeError, match="Two evaluations of the model"):
        make(risk).to_dense()


@exact
def test_random_models_pass_on_request(make: Make) -> None:
    risk = risk_of(nn.Dropout(0.5))
    make(risk, check_deterministic=False).to_dense()
    make(risk_of(nn.Dropout(0.5), check=False)).to_dense()
    with pytest.raises(RuntimeError, match=r"'1' \(Dropout\); call model.eval"):
        make(risk, check_deterministic=True).to_dense()


class Counts(nn.Module):
    """Notes the sizes of the batches that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sizes = nn.Linear(4, 3), []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.linear(x)


@exact
def test_the_look_is_at_three_examples_and_once_per_risk(make: Make) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counts()).double()
    counts: Counts = model[1]  # type: ignore[assignment]
    data = [(torch.rand(9, 4).double(), torch.randint(3, (9,))) for _ in range(2)]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    for _ in range(2):
        operator = make(risk)
        for _ in range(2):
            _ = operator @ torch.ones(operator.shape[1], dtype=torch.float64)
    assert counts.sizes.count(3) == 2


class Graph(nn.Module):
    """Needs its whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.A = nn.Linear(4, 3), torch.rand(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.A @ nn.functional.dropout(self.linear(x), 0.5, self.training)


def test_a_model_that_needs_its_whole_batch_is_looked_at_as_a_whole() -> None:
    data = [(torch.rand(6, 4).double(), torch.randint(3, (6,)))]
    risk = EmpiricalRisk(Graph().double(), nn.CrossEntropyLoss(), data)
    with pytest.raises(RuntimeError, match=r"Two evaluations"):
        GGN(risk).to_dense()
    risk.model.eval()
    GGN(risk).to_dense()
