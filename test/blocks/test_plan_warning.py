"""Layers that get their exact diagonal instead of Kronecker factors are reported once, when the plan is final."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import EKFAC, KFAC, CurvatureEstimator, EmpiricalRisk, KFACLinearOperator, curvature
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError


class Scaled(nn.Module):
    """Reads the weight of a layer norm once more, which the first sweep finds out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.head = nn.LayerNorm(4), nn.Bilinear(4, 4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.norm.weight
        return self.head(self.gate(x, x))


class Functional(nn.Module):
    """A weight of its own: until a batch was seen it looks as if there were no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


@contextmanager
def _said(number: int, words: str = "") -> Iterator[None]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    own = [w for w in found if issubclass(w.category, CurvatureWarning)]
    assert len(own) == number, [str(w.message) for w in own]
    for w in own:
        assert words in str(w.message)
        assert w.filename == __file__  # where the caller stands


def _risk(model: nn.Module) -> EmpiricalRisk:
    torch.manual_seed(0)
    return EmpiricalRisk(model, nn.MSELoss(), [(torch.rand(5, 4), torch.rand(5, 2)) for _ in range(2)])


def test_a_plan_that_is_made_anew_is_reported_once() -> None:
    for approximation in (KFAC, EKFAC):
        with _said(1, "layers get their exact diagonal"):
            K = curvature(_risk(Scaled()), approximation)
    with _said(0):
        K.compute()


def test_estimators_report_what_is_final_after_the_first_batch() -> None:
    risk = _risk(Functional())
    with _said(0):
        estimator = CurvatureEstimator(EmpiricalRisk(risk.model, risk.losses.given, ()))
        estimator.update(risk.data[0])  # type: ignore[index]
    assert "KFAC" in repr(estimator)
    risk = _risk(Scaled())
    with _said(0):
        estimator = CurvatureEstimator(EmpiricalRisk(risk.model, risk.losses.given, ()))
    with _said(1, "exact diagonal"):
        estimator.update(risk.data[0])  # type: ignore[index]
    with _said(0):
        estimator.update(risk.data[1])  # type: ignore[index]
        _ = estimator.operator


def test_so_do_operators_at_first_use_and_classic_ones() -> None:
    risk = _risk(Scaled())
    with _said(1, "exact diagonal"):
        KFACLinearOperator(risk.model, risk.losses.given, dict(risk.model.named_parameters()), risk.data)
    with _said(0):
        K = KFACLinearOperator(
            risk.model, risk.losses.given, dict(risk.model.named_parameters()), risk.data, check_deterministic=False
        )
    with _said(1, "exact diagonal"):
        _ = K @ torch.ones(K.shape[1])


def test_what_is_refused_gives_no_warning() -> None:
    model = Scaled()
    model.append = [model.gate.weight]  # type: ignore[assignment]
    model.gate.forward = lambda x, y: F.bilinear(x, y, model.append[0], model.gate.bias)  # type: ignore
    with _said(0), pytest.raises(UnsupportedError, match="from elsewhere"):
        curvature(_risk(model))
