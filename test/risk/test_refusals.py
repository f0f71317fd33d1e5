"""Losses, data, outputs and options of a form that we can't take: what was expected, what came and
what to do next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from curvlinops_plus import (
    GGN,
    DiagonalBlock,
    EmpiricalRisk,
    Exact,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    MonteCarlo,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.risk.vectors import CurvaturePropagation, as_vectors
from test.cases import problem
from test.helpers import Refusal, Written, normal, refusals

KINDS = (HessianLinearOperator, GGNLinearOperator, KFACLinearOperator)
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


X, Y = normal(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
TARGET = normal(6, 3, seed=3).softmax(1)


def net(out: int = 3) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(5, out, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(normal(out, 5, seed=1))
        model.bias.copy_(normal(out, seed=2))
    return model


def product(kind: Any, model: nn.Module, loss: Any, data: Any, **options: Any) -> Tensor:
    """The operator and one product with it."""
    A = kind(model, loss, list(model.parameters()), data, **options)
    return A @ torch.ones(A.shape[1], dtype=A.dtype)


class Counting(Dataset[Any]):
    """Items that count how often they are read."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.read = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.items[index]


def detached(f: Tensor, y: Tensor) -> Tensor:
    return f.detach().sum()


class MeanAndVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = net(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x)
        return out[:, :2], out[:, 2:].exp()


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = net()

    def forward(self, X: Any) -> Tensor:
        return self.layer(X[0] + X[1])


class Complex(nn.Module):
    """Pairs of numbers as complex ones."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x.unflatten(1, (2, 2)).contiguous())


GAUSSIAN, TWO = nn.GaussianNLLLoss(), [(X, normal(6, 2))]
ATTENTION, TIMES = problem("attention"), problem("time first")
MODEL = net()


def risk(model: Any = MODEL, data: Any = ((X, Y),), **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(model, CE, data, **options)


def lazy() -> nn.Sequential:
    return nn.Sequential(net(), nn.LazyLinear(3)).double()


def whole_numbers() -> EmpiricalRisk:
    model = net()
    model.scale = nn.Parameter(torch.ones(3, dtype=torch.long), requires_grad=False)
    return risk(model, params=list(model.parameters()))


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def two_names(m: Any, x: Tensor) -> dict[str, Tensor]:
    return {"score": m.l(x), "other": m.l(x)}


def scaled(inner: nn.Module) -> Written:
    """A parameter of the network's own before a module."""
    scale = nn.Parameter(torch.ones(5).double())
    return Written(lambda m, x: m.inner(x * m.scale)[:, :3], inner=inner, scale=scale)


def of_loss(loss: Any, target: Any) -> EmpiricalRisk:
    """The first of two outputs has this loss."""
    y = normal(6, 4)
    data = [(X, {"a": target, "b": y[:, 2:]})]
    split = lambda f: {"a": f[:, :2], "b": f[:, 2:]}  # noqa: E731
    return EmpiricalRisk(net(4), {"a": loss, "b": MSE}, data, output=split)


REFUSED: list[Refusal] = [
    # models
    (lambda: risk(lambda x: x), TypeError, "A model that is a function is called as .*got NoneType"),
    (lambda: risk(nn.Linear), TypeError, r"`model` is the class Linear: call it"),
    (lambda: risk([(X, Y)]), TypeError, "The model is a list; expected a torch.nn.Module, or"),
    (lambda: risk(CE),
     ValueError, "has 0 parameters.*The arguments are model, loss and data, in this order"),
    (lambda: risk(frozen()),
     ValueError, "has 2 parameters, of which . require a gradient"),
    (lambda: risk(lazy()),
     ValueError, "The module '1' has no shapes yet: it is lazy.*Call the model once"),
    # parameters
    (whole_numbers, ValueError, "torch.int64.*only real floating-point parameters"),
    (lambda: risk(params=MODEL.named_parameters()),
     ValueError, r"a tuple, .*dict\(model.named_par"),
    (lambda: risk(params=["0.weight"]), ValueError, r"`params` names '0.weight', and the model Linear has neither"),
    (lambda: risk(params=MODEL),
     TypeError, r"`params` is a Linear; .*list\(model.parameters\(\)\)"),
    (lambda: risk(params=MODEL.weight), TypeError, "`params` is a Parameter; expected a list"),
    # options of a risk
    (lambda: risk(example_axis=1),
     TypeError, "example_axis=1 is no dict from names of modules to axes"),
    (lambda: TIMES.risk(example_axis={"bdy": 1}), ValueError,
     r"example_axis=\{'bdy': 1\} matches no module of the model; they are \['body', 'head'\]"),
    (lambda: curvature(ATTENTION.risk(mask=lambda X, y: None)),
     ValueError, "`mask` returned NoneType; expected a"),
    (lambda: curvature(ATTENTION.risk(mask=lambda X, y: torch.ones(len(y), 3))),
     ValueError, r"`mask` returned torch.float32 \[3, 3\]; expected a bool tensor \[3, T\]"),
    # batches, outputs and losses
    (lambda: curvature(risk(data=[X])), ValueError, "Batch 0 is a Tensor; expected a pair"),
    (lambda: curvature(risk(data=[{"x": X}])),
     ValueError, r"a mapping with keys \['x'\]; expected a pair \(X, y\) or a mapping with"),
    (lambda: GGN(risk(Written(two_names, l=net()))).to_dense(),
     ValueError, r"returned a dict with fields \['score', 'other'\].*output=lambda o: o"),
    (lambda: curvature(risk(scaled(nn.BatchNorm1d(5, affine=False)).double()), DiagonalBlock),
     NotImplementedError, r"\['inner'\] are batch norm in training mode.*model.eval"),
    (lambda: curvature(risk(scaled(nn.Dropout(0.5))), DiagonalBlock),
     RuntimeError, r"'inner' \(Dropout\).*model.eval"),
    # vectors
    (lambda: as_vectors("ggn"), ValueError, "Unknown vectors: 'ggn'.*'type-2'.*'ggn_exact'"),
    (lambda: as_vectors(MonteCarlo),
     TypeError, r"MonteCarlo'>\. Expected an object such as Exact\(\)"),
    (lambda: MonteCarlo(samples=0),
     ValueError, "MonteCarlo needs at least one sample, got samples=0"),
    (lambda: CurvaturePropagation(samples=0),
     ValueError, "CurvaturePropagation needs at least one sample"),
    (lambda: Exact(matrix="hessian"),
     ValueError, r"Exact\(matrix='hessian'\) must be None, \"fisher\" or \"ggn\""),
    (lambda: MonteCarlo(samples=1.5), TypeError, "MonteCarlo needs an integer, got samples=1.5"),
    # one of several losses
    (lambda: of_loss(MSE, [[0.0]]).gradient(),
     TypeError, "output 'a': MSELoss needs a target that is a tensor, got a list"),
    (lambda: of_loss(lambda f, t: f - t, TWO[0][1]).gradient(), ValueError,
     r"returned a tensor of shape \[6, 2\]; expected a 0-d tensor, a single number"),
    (lambda: risk(reduction="sum"), ValueError, "reduction='sum' contradicts the loss"),
    *[(lambda name=name, number=number: risk(**{name: number}),
       ValueError, f"{name}={number} must be positive: it is the number of")
      for name in ("num_data", "num_per_example_loss_terms")
      for number in (0, -6, float("nan"), float("inf"))],
]  # fmt: skip
test_refusals = refusals(REFUSED, MODEL, ATTENTION.model, TIMES.model)

#: In place of what fits each operator: what is refused.
EVERY: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loss": nn.CrossEntropyLoss},
     TypeError, r"is the class CrossEntropyLoss; expected an instance"),
    ({"loss": None}, TypeError, r"The loss is a NoneType; expected one as nn.MSELoss\(\)"),
    ({"loss": "mse"},
     TypeError, r"The loss is 'mse'; expected one as nn.MSELoss\(\).*a function of"),
    ({"data": [(X, {"a": Y})]},
     TypeError, "got a dict. .* for several targets give losses in their structure"),
    ({"data": None}, TypeError, r"`data` is a NoneType; expected an iterable of batches \(X, y\)"),
    ({"data": TensorDataset(X, Y)},
     TypeError, r"TensorDataset; .* Dataset.*DataLoader\(dataset, batch_size=...\)"),
    ({"data": Counting([(X, Y)])},
     TypeError, r"are batches already, DataLoader\(dataset, batch_size=None\)"),
    ({"model": nn.Sequential(net(), nn.RReLU(0.1, 0.9))},
     RuntimeError, r"in training mode: '1' \(RReLU\); call model.e"),
    *[({"model": Sum(), "data": [(inputs, Y)]}, ValueError,
       r"Can't tell how many examples batch 0 has.*`batch_size_fn=lambda X:")
      for inputs in ((X, X), {"mask": X[:2], "x": X}, ["a", "b"])],
]  # fmt: skip
EXACT: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loss": nn.HuberLoss(reduction="none"), "data": [(X, TARGET)]},
     UnsupportedError, "is no scalar loss"),
    ({"loss": lambda f, y: f.square()},
     ValueError, r"<lambda> returned a tensor of shape \[6, 3\]; expected a 0-d"),
    ({"loss": lambda f, y: 1.0},
     TypeError, r"returned a float; expected a 0-d tensor.*without .item\(\)"),
    ({"loss": detached},
     ValueError, "loss detached does not depend on the model's output in a differentiable way"),
    ({"model": nn.Sequential(net(4), Complex())},
     UnsupportedError, r"complex\d+; expected real numbers.*view_as_real"),
    ({"model": MeanAndVariance(), "loss": GAUSSIAN, "data": TWO},
     ValueError, r"a tuple; .*lambda o: o\[0\]`"),
    ({"model": MeanAndVariance(), "loss": GAUSSIAN, "data": TWO, "output": lambda o: o[0]},
     ValueError, r"half the output.*\[6, 1\] for the output \[6, 2\], got \[6, 2\].*side by si"),
    ({"output": lambda o: o[:, :0]},
     UnsupportedError, r"\[6, 0\], torch.float64, without numbers. If the batch is empty"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given", "error", "words"),
    [(kind, *row) for kind in KINDS for row in EVERY]
    + [(kind, *row) for kind in KINDS[:2] for row in EXACT],
)
def test_refused(kind: Any, given: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"model": net(), "loss": CE, "data": [(X, Y)], **given}
    with pytest.raises(error, match=words):
        product(kind, **given)
    assert getattr(given["data"], "read", 0) == 0


# ------------------------------------------------------------------------------------ what is taken
class Divergence(nn.KLDivLoss):
    """From logits, which makes the loss curved in the output."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.log_softmax(1), target)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X, Y)])


class OwnLoader(Counting):
    """Says itself what it is to be iterated over."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


HALVES = [(X[:4], Y[:4]), (X[4:], Y[4:])]
#: Two ways to say the same.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one number in a vector": (
        {"loss": lambda f, y: f.square().mean().reshape(1)},
        {"loss": lambda f, y: f.square().mean()},
    ),
    "batchmean": (  # differ by a constant; batches of different sizes are one
        {
            "loss": Divergence(reduction="batchmean"),
            "data": [(X[:4], TARGET[:4]), (X[4:], TARGET[4:])],
        },
        {"data": [(X, TARGET)]},
    ),
    "a dataset of examples": ({"data": DataLoader(TensorDataset(X, Y), batch_size=4)}, {}),
    "a dataset of batches": ({"data": DataLoader(Counting(HALVES), batch_size=None)}, {}),
    "a stream": ({"data": Stream()}, {}),
    "an iterable dataset": ({"data": OwnLoader([(X, Y)])}, {}),
    "inputs that are counted": (
        {"model": Sum(), "data": [((X, X), Y)], "batch_size_fn": lambda X: len(X[0])},
        {"data": [(2 * X, Y)]},
    ),
    "numbers of NumPy": ({"num_data": np.int64(6)}, {}),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_same(kind: Any, name: str) -> None:
    one, other = ({"model": net(), "loss": CE, "data": [(X, Y)], **given} for given in SAME[name])
    torch.testing.assert_close(product(kind, **one), product(kind, **other), rtol=1e-10, atol=1e-12)
