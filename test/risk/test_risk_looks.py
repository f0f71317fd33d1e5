"""What a risk, and what is made of it, say of themselves; and the names that they show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from curvlinops_plus import (
    EKFAC,
    GGN,
    EmpiricalRisk,
    GGNFactor,
    Hessian,
    Jacobian,
    KFACOptimizer,
    Laplace,
    QuadraticPenalty,
    curvature,
)
from test.helpers import normal

MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
DATA = [(normal(5, 3), normal(5, 2, seed=1)), (normal(2, 3), normal(2, 2))]
FIRST = "EmpiricalRisk(Sequential, MSELoss), 26 parameters in 4 tensors, float64 on cpu"


class Stream(IterableDataset):
    """Batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a repr reads no data")


class Unknown:
    """Batches whose number nobody knows, as loaders of streams say in different ways."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a repr reads no data")

    def __len__(self) -> int:
        raise NotImplementedError


class NoCalls(nn.Module):
    """A model that must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, X: Any) -> Any:
        raise AssertionError("a repr runs no model")


def risk(**options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(MODEL, nn.MSELoss(), DATA, **options)


def test_a_risk_says_what_it_is_made_of() -> None:
    assert repr(risk()) == f"{FIRST}\n  data: list of 2 batches"
    last = repr(risk(num_data=70, check=False, output=len, params=["2"])).splitlines()[-1]
    assert last == "  options: output=len, num_data=70, check=False"
    assert repr(risk(params=["2"])).startswith("EmpiricalRisk(Sequential, MSELoss), 10 parameters")
    losses = {"a": nn.MSELoss(), "b": (nn.CrossEntropyLoss(), 0.5)}
    several = repr(EmpiricalRisk(MODEL, losses, DATA[:1]))
    assert "loss 'a' (MSELoss), loss 'b' (CrossEntropyLoss)" in several
    assert several.endswith("list of 1 batch")


def test_nothing_is_read_or_run_for_it() -> None:
    loader = DataLoader(Stream(), batch_size=None)
    of_stream = EmpiricalRisk(NoCalls(), nn.MSELoss(), loader)
    assert repr(of_stream).endswith("data: DataLoader")
    of_stream = EmpiricalRisk(NoCalls(), nn.MSELoss(), Unknown())
    assert repr(of_stream).endswith("data: Unknown")
    assert "data: generator" in repr(EmpiricalRisk(MODEL, nn.MSELoss(), (b for b in DATA)))
    for operator in (GGN(of_stream), Hessian(of_stream)):
        assert repr(operator).startswith(f"{type(operator).__name__}(2 x 2, ")
        assert "\n    data: Unknown" in repr(operator)
    for kind in (Jacobian, GGNFactor):
        assert repr(kind(of_stream)).startswith(f"{kind.__name__}(sizes not read yet, torch.float")
    J = Jacobian(risk())
    assert J.shape == (14, 26)
    assert repr(J).startswith("Jacobian(14 x 26, GENERAL, torch.float64, cpu)\n  of Empiric")
    K = curvature(of_stream, "diagonal", compute=False)
    assert "not computed yet" in repr(K)


def test_blocks_say_whose_they_are() -> None:
    K = curvature(risk(), EKFAC)
    block = K.blocks["2"]
    assert repr(block) == (
        "Eigendecomposed(10 x 10, PSD, torch.float64, cpu), block '2' (2.weight, 2.bias), trace "
        f"{float(block.trace):.4g}"
    )
    assert "block '0' (0.weight, 0.bias)" in repr((2 * K).blocks["0"])
    assert block.label == "Eigendecomposed(10 x 10, PSD, torch.float64, cpu)"
    posterior = repr(Laplace(K).posterior)
    assert posterior.endswith("\n  2 blocks: 0 Eigendecomposed, 2 Eigendecomposed")


def test_a_posterior_a_penalty_and_an_optimizer() -> None:
    K = curvature(risk(), EKFAC)
    la = Laplace(K, {"0": 2.0, "2": 30.0}, noise=0.5)
    assert repr(la) == (
        "Laplace(26 parameters, MSELoss)\n  curvature: BlockwiseLinearOperator 26x26, float64 on "
        "cpu\n  prior precision 2 to 30, noise 0.5, temperature 1"
    )
    la = Laplace(K).fit_prior()
    assert f"prior precision {la.prior_precision:.4g}, noise {la.noise:.4g}" in repr(la)
    assert repr(QuadraticPenalty(K, strength=3.0)).endswith("float64 on cpu, strength=3)")
    with KFACOptimizer(MODEL, nn.MSELoss(), lr=0.1) as optimizer:
        assert repr(optimizer).startswith("KFACOptimizer (\nParameter Group 0\n")
        assert repr(optimizer).endswith(f"of {FIRST}\nafter 0 steps, 0 updates of the statistics")


def test_names_are_those_that_users_call() -> None:
    of_risk = {name for name in dir(risk()) if not name.startswith("_")}
    assert of_risk == {
        *("model", "losses", "data", "params", "options", "processes", "space", "device", "dtype"),
        *("loss", "gradient", "gradient_and_loss", "vector", "assign", "at", "with_data"),
    }
    K = curvature(risk(), compute=False)
    internal = {"adopts_vectors", "kept_on", "of_data", "of_plan", "state_parts"}
    assert internal & set(dir(K)) == set()
    assert {"summary", "blocks", "inverse", "trace", "verify", "memory", "risk"} <= set(dir(K))
    assert len([name for name in dir(K) if not name.startswith("_")]) <= 56
