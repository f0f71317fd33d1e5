"""Mistakes that newcomers make: errors say what was expected, what came and what to do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    BlockwiseLinearOperator,
    EmpiricalRisk,
    KFACLinearOperator,
    KFACOptimizer,
    Laplace,
    NumericsError,
    UnsupportedError,
    curvature,
    save,
)
from test.helpers import normal, refusals

X, Y = normal(6, 3), torch.arange(6) % 2
DATA = [(X, Y)]
CE = nn.CrossEntropyLoss()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


MODEL = net()


def risk(
    data: Any = DATA, model: nn.Module = MODEL, loss: Any = CE, **options: Any
) -> EmpiricalRisk:
    return EmpiricalRisk(model, loss, data, **options)


def laplace() -> Laplace:
    return Laplace(curvature(risk()))


def loaded() -> BlockwiseLinearOperator:
    """Without data, which nothing but a check needs."""
    return BlockwiseLinearOperator.from_state_dict(curvature(risk()).state_dict(), MODEL)


def read() -> Iterator[nn.Parameter]:
    """An iterator that has come to its end."""
    params = MODEL.parameters()
    assert len([*params]) == 4
    return params


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return net()


def trained_in_evaluation_mode() -> None:
    model = net().eval()
    optimizer = KFACOptimizer(model, CE)
    CE(model(X), Y).backward()
    optimizer.step()


EMPTY = TensorDataset(X[:0], Y[:0])
REFUSED = [
    (lambda: laplace().predict((X, Y)),
     TypeError, r"X is a tuple of length 2; .*la\.predict\(X\) of a batch.*la\.predict\(\[\(X, y\)"),
    (lambda: loaded().verify(), ValueError, r"no examples\. Give some.*from_state_dict\(state, mod"),
    (lambda: curvature(risk(())), ValueError, r"no examples\. .*EmpiricalRisk\(model, loss, data\)"),
    (lambda: curvature(risk(DataLoader(EMPTY))),
     ValueError, r"Is the dataset empty, or shorter than a batch, with drop_last=True"),
    (lambda: curvature(risk(iter(()))), ValueError, r"It is an iterator, which can be read only once"),
    (lambda: KFACLinearOperator(MODEL, [*MODEL.parameters()], CE, DATA),
     ValueError, r"is a Parameter; .*Arguments are model, loss, and then parameters or data"),
    (lambda: risk(params=read()), ValueError, r"read only once, and was: pass list\(model\.param"),
    (lambda: KFACOptimizer(MODEL, CE, params=read()),
     ValueError, r"an iterator that was read before.*pass a list, as list\(model\.parameters\(\)\)"),
    (lambda: risk(model=net().requires_grad_(False)),
     ValueError, "has 4 parameters, of which 0 require a gradient"),
    (lambda: risk(model=in_inference_mode()),
     UnsupportedError, r"'0' was made under torch\.inference_mode.*load its state_dict"),
    (lambda: curvature(risk([(X.float(), Y)])),
     RuntimeError, r"input of the batch is torch\.float32, the parameters are torch\.float64.*X\.to"),
    (lambda: curvature(risk([{"x": X, "labels": Y}])),
     TypeError, r"given to the model as keywords.*make pairs, \(batch\['x'\], batch\['labels'\]\)"),
    (trained_in_evaluation_mode, RuntimeError, r"in evaluation mode: call model\.train\(\)"),
    (lambda: curvature(risk()) * curvature(risk()),
     TypeError, r"got BlockwiseLinearOperator \[26, 26\]\. .*product of two matrices is A @ B"),
    (lambda: curvature(risk([(X * torch.nan, Y)])), NumericsError, "Look for NaN in inputs, targets and"),
    (lambda: curvature(risk(), "KFCA"), ValueError, "'KFCA' is no approximation. Expected one of"),
    (lambda: curvature(risk()).inverse(-1e-3), ValueError, "at least 0, got -0.001"),
    (lambda: curvature(risk([(X, Y, Y)])), ValueError, r"tuple of length 3; expected a pair \(X, y\)"),
    (lambda: risk(model=nn.Linear), TypeError, "`model` is the class Linear: call it"),  # type: ignore[arg-type]
    (lambda: risk(loss=nn.CrossEntropyLoss(reduction="none")),
     UnsupportedError, 'is no scalar loss.*use "mean" or "sum"'),
    (lambda: curvature(risk([(X, Y.double())])), ValueError, r"class indices of shape \[6\], integers"),
    (lambda: curvature(risk(model=nn.Sequential(net(), nn.Dropout()))),
     RuntimeError, r"'1' \(Dropout\); call model\.eval\(\)\. The operator's check_deterministic=Fal"),
]  # fmt: skip
test_refusals = refusals(REFUSED)


def test_where_a_file_can_not_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*absent to write K\.safetensors into"):
        save(curvature(risk()), tmp_path / "absent" / "K.safetensors")


def test_what_works_is_as_good() -> None:
    """Modes around the call, compiled models and replicas change nothing."""
    expected = curvature(risk()).to_dense()
    with torch.no_grad():
        torch.testing.assert_close(curvature(risk()).to_dense(), expected)
    with torch.inference_mode():
        inputs = X.clone()
    torch.testing.assert_close(curvature(risk([(inputs, Y)])).to_dense(), expected)
    wrapped = nn.DataParallel(copy.deepcopy(MODEL))
    torch.testing.assert_close(curvature(risk(model=wrapped)).to_dense(), expected)
    compiled: Any = torch.compile(copy.deepcopy(MODEL), backend="eager")
    torch.testing.assert_close(curvature(risk(model=compiled)).to_dense(), expected)
