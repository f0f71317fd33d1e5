"""Which layer has which approximation, in which order of names, and which parameters it holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    TNT,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    ScaledIdentity,
    curvature,
)
from test.cases import problem
from test.helpers import Written, normal


def test_the_mapping_has_every_parameter_of_tied_layers() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.three(m.two(m.one(x).tanh()))

    layers = {"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)}
    model = Written(forward, **layers, three=nn.Linear(3, 2, bias=False)).double()
    model.two.weight = model.one.weight
    params = [model.two.bias, model.three.weight, model.one.weight, model.one.bias]
    K = curvature(
        EmpiricalRisk(model, nn.MSELoss(), [(normal(5, 3), normal(5, 2))], params), DiagonalBlock
    )
    assert K.mapping == {"one": {"weight": 2, "bias": 3, "two.bias": 0}, "three": {"weight": 1}}
    for name in ("tied", "tied with two biases", "tied autoencoder", "tied transformer"):
        p = problem(name)
        positions = [
            at for layer in p.curvature(DiagonalBlock).mapping.values() for at in layer.values()
        ]
        assert sorted(positions) == list(range(len(p.params)))


def test_names_come_before_globs_and_the_nearest_types_last() -> None:
    chosen = {
        nn.Module: FullBlock,
        nn.Linear: TNT,
        "*2": EKFAC,
        "2": DiagonalBlock,
        "4": ScaledIdentity,
    }
    layers = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)
    batch = normal(5, 3), normal(5, 2)
    risk = EmpiricalRisk(nn.Sequential(*layers).double(), nn.MSELoss(), [batch])
    K = curvature(risk, chosen)
    kinds = ["TNT", "FullBlock", "DiagonalBlock", "FullBlock", "ScaledIdentity"]
    assert [repr(entry.approximation) for entry in K.plan] == kinds
    K = curvature(risk, {nn.Linear: TNT, "*": FullBlock})
    assert {repr(entry.approximation) for entry in K.plan} == {"FullBlock"}


def scaled() -> nn.Module:
    """Reads the weight of a layer norm once more, which the first sweep finds out."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x) * m.norm.weight
        return m.head(m.gate(x, x))

    return Written(forward, norm=nn.LayerNorm(4), gate=nn.Bilinear(4, 4, 4), head=nn.Linear(4, 2))


def test_a_plan_that_is_made_anew_is_reported_once() -> None:
    """What reads the weight of a norm once more is found in the first batch; the warning points to
    the caller.
    """
    batch, loss = (torch.rand(5, 4), torch.rand(5, 2)), nn.MSELoss()
    made: list[Any] = []
    steps: list[tuple[Callable[[], object], int]] = [
        (lambda: made.append(curvature(EmpiricalRisk(scaled(), loss, [batch]), EKFAC)), 1),
        (lambda: made[0].compute(), 0),
        (lambda: made.append(CurvatureEstimator(EmpiricalRisk(scaled(), loss, ()))), 0),
        (lambda: made[1].update(batch), 1),
        (lambda: (made[1].update(batch), made[1].operator), 0),
    ]
    for step, number in steps:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
        own = [w for w in found if issubclass(w.category, CurvatureWarning)]
        assert ["exact diagonal" in str(w.message) for w in own] == [True] * number
        assert all(w.filename == __file__ for w in own)
