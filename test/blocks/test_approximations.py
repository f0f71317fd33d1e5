"""Approximations by their names: the same operators as by their classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    KFACOptimizer,
    NearestKronecker,
    ScaledIdentity,
    curvature,
)
from curvlinops_plus.blocks.approximations import APPROXIMATIONS, approximation_of
from test.cases import close
from test.helpers import normal

MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
RISK = EmpiricalRisk(MODEL, nn.MSELoss(), [(normal(5, 3), normal(5, 2, seed=1))])

WORDS = {
    "kfac": KFAC,
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "e-kfac": EKFAC,
    "tnt": TNT,
    "nearest_kronecker": NearestKronecker,
    "NearestKronecker": NearestKronecker,
    "diagonal": DiagonalBlock,
    "Diagonal_Block": DiagonalBlock,
    "full": FullBlock,
    "fullblock": FullBlock,
    "scaled-identity": ScaledIdentity,
}


def test_every_approximation_has_a_name() -> None:
    assert {approximation_of(word).kind for word in WORDS} == set(APPROXIMATIONS)
    assert {word: approximation_of(word).kind for word in WORDS} == WORDS


def test_names_stand_for_classes_wherever_these_are_taken() -> None:
    close(curvature(RISK, "ekfac").to_dense(), curvature(RISK, EKFAC).to_dense())
    mixed = curvature(RISK, {"0": "full", nn.Linear: "kfac"}, default="diagonal")
    close(mixed.to_dense(), curvature(RISK, {"0": FullBlock}, default=KFAC).to_dense())
    assert repr(CurvatureEstimator(RISK, "ekfac").plan[0].approximation) == "EKFAC"
    with KFACOptimizer(MODEL, nn.MSELoss(), lr=0.1, approximation="diagonal") as optimizer:
        assert {repr(entry.approximation) for entry in optimizer.curvature.plan} == {
            "DiagonalBlock"
        }


@pytest.mark.parametrize("word", ["kfak", "", "block", "K FAC"])
def test_other_words_are_refused_with_all_names(word: str) -> None:
    names = "'KFAC', 'EKFAC', 'TNT', 'NearestKronecker', 'DiagonalBlock', 'FullBlock', 'ScaledId"
    with pytest.raises(ValueError, match=f"{word!r} is no approximation. Expected one of {names}"):
        curvature(RISK, word)
    with pytest.raises(ValueError, match="is no approximation"):
        curvature(RISK, {"0": word}, default=KFAC)


def test_a_state_made_by_name_is_loaded() -> None:
    K = curvature(RISK, "ekfac")
    loaded = type(K).from_state_dict(K.state_dict(), MODEL)
    assert torch.equal(loaded.to_dense(), K.to_dense())
