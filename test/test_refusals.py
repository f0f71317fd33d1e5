"""What operators of every room refuse, and in which words; nothing of the user's has changed then.

What one room refuses is in its `test_refusals.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    ActivationHessian,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    EFLinearOperator,
    EKFACLinearOperator,
    FisherMCLinearOperator,
    GGNFactor,
    GGNLinearOperator,
    Hessian,
    HessianLinearOperator,
    Jacobian,
    KFACLinearOperator,
    NumericsError,
    UnsupportedError,
    curvature,
)
from test.cases import problem, unchanged
from test.helpers import F64, normal

KFACS = [KFACLinearOperator, EKFACLinearOperator]
EXACT = [GGNLinearOperator, HessianLinearOperator, EFLinearOperator, FisherMCLinearOperator]
CLASSIC = [*KFACS, *EXACT]
SAMPLING = [*KFACS, FisherMCLinearOperator]
EXACT_DOORS = [GGN, GGNFactor, Hessian, Jacobian, ActivationHessian]
DOORS = [*EXACT_DOORS, curvature, BlockwiseLinearOperator, CurvatureEstimator]
X, Y, CE = normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), nn.CrossEntropyLoss()
P, TWO = problem("mlp"), problem("two outputs")
MODEL, W = P.model, P.model[0].weight
FOREIGN = torch.zeros(5, 4, dtype=F64)
NAN = X.clone()
NAN[1, 3] = torch.nan


def function(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w1"].T).relu() @ params["w2"].T


#: Classes, what they are given in place of what is right, and what is said of it.
CLASSES: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    (CLASSIC, {"params": [W, FOREIGN]},
     ValueError, r"params\[1\] with shape \[5, 4\] is not a parameter of the"),
    (CLASSIC, {"params": [W, W]},
     ValueError, r"params\[1\] is the same parameter as params\[0\]: the model's"),
    (CLASSIC, {"params": []}, ValueError, "`params` is empty"),
    (CLASSIC, {"model": P.risk()},
     TypeError, r"The model is a EmpiricalRisk; .*take curvature\(risk, KFAC\),"),
    (CLASSIC, {"model": 3},
     TypeError, "The model is a int; expected a torch.nn.Module, or a function"),
    ([*KFACS, *EXACT[:2]], {"model": function},
     TypeError, r"a function is called as .*, a dict from names to tensors; got list"),
    (CLASSIC, {"loss": nn.CrossEntropyLoss(reduction="none")},
     UnsupportedError, r'CrossEntropyLoss\(reduction=.none.\).*use "mean" or "sum"'),
    (SAMPLING, {"loss": nn.HuberLoss()},
     ValueError, r"no likelihood is registered for the loss HuberLoss(.|\n)*@register_likelihood"),
    (CLASSIC, {"data": [(X, torch.full((6,), 3))]}, ValueError, "class index 3.*C = 3 classes"),
    (CLASSIC, {"loss": nn.MSELoss(), "data": [(X, torch.zeros(6).double())]},
     ValueError, r"MSELoss needs a target of the output's shape \[6, 3\], got \[6\]"),
    (CLASSIC, {"data": [(X, torch.full((6,), -100))]},
     ValueError, "No term of CrossEntropyLoss counts: every target"),
    (CLASSIC, {"data": [(X, Y), (NAN, Y)]},
     NumericsError, "layer '0'.*statistic|The total loss is nan"),
    (KFACS, {"data": [(X, Y), (NAN, Y)], "check_deterministic": False},
     NumericsError, "layer '0': the statistic"),
    (CLASSIC, {"of": TWO}, ValueError, r"The model returned a tuple; .*output=lambda o: o\[0\]"),
    (CLASSIC, {"of": TWO, "output": lambda out: out},
     ValueError, "`output` selected a tuple; expected the tensor"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("kinds", "given", "error", "words"), CLASSES, ids=[words for *_, words in CLASSES]
)
def test_refusals_of_classes(
    kinds: list[Any], given: dict[str, Any], error: type[Exception], words: str
) -> None:
    p = given.get("of", P)
    inputs = {"model": p.model, "loss": p.loss, "params": p.params, "data": p.data, **given}
    inputs.pop("of", None)
    arguments = [inputs.pop(name) for name in ("model", "loss", "params", "data")]
    for kind in kinds:
        with unchanged(p.model, p.data), pytest.raises(error, match=words):
            kind(*arguments, **inputs).to_dense()


@pytest.mark.parametrize("make", DOORS)
def test_model_loss_and_data_in_place_of_a_risk(make: Callable[..., Any]) -> None:
    words = (
        rf"^{make.__name__} takes an EmpiricalRisk, got a Sequential: "
        r".* EmpiricalRisk\(model, loss, data\)\.$"
    )
    for number in range(1, 5):
        with pytest.raises(TypeError, match=words):
            make(*[MODEL, CE, [(X, Y)], list(MODEL.parameters())][:number])
    with pytest.raises(TypeError, match=words):
        make(risk=MODEL)
