"""Losses, data and outputs of a form that we can't take: what was expected, what came and what to
do next.
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
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
)
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.preserve import training_modules

KINDS = (HessianLinearOperator, GGNLinearOperator, KFACLinearOperator)
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = numbers(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
TARGET = numbers(6, 3, seed=3).softmax(1)


def net(out: int = 3) -> nn.Linear:
    model = nn.Linear(5, out, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(numbers(out, 5, seed=1))
        model.bias.copy_(numbers(out, seed=2))
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


UNCOUNTED = r"Can't tell how many examples batch 0 has.*`batch_size_fn=lambda X:"
GAUSSIAN, TWO = nn.GaussianNLLLoss(), [(X, numbers(6, 2))]
#: What is not as it should be, and what is said of it.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"loss": nn.CrossEntropyLoss},
        TypeError,
        r"is the class CrossEntropyLoss; expected an instance",
    ),
    ({"loss": None}, TypeError, r"The loss is a NoneType; expected one as nn.MSELoss\(\)"),
    (
        {"loss": "mse"},
        TypeError,
        r"The loss is 'mse'; expected one as nn.MSELoss\(\).*a function of",
    ),
    (
        {"data": [(X, {"a": Y})]},
        TypeError,
        "got a dict. .* for several targets give losses in their structure",
    ),
    ({"data": None}, TypeError, r"`data` is a NoneType; expected an iterable of batches \(X, y\)"),
    (
        {"data": TensorDataset(X, Y)},
        TypeError,
        r"TensorDataset; .* Dataset.*DataLoader\(dataset, batch_size=...\)",
    ),
    (
        {"data": Counting([(X, Y)])},
        TypeError,
        r"are batches already, DataLoader\(dataset, batch_size=None\)",
    ),
    (
        {"model": nn.Sequential(net(), nn.RReLU(0.1, 0.9))},
        RuntimeError,
        r"in training mode: '1' \(RReLU\); call model.e",
    ),
    *[
        ({"model": Sum(), "data": [(given, Y)]}, ValueError, UNCOUNTED)
        for given in ((X, X), {"mask": X[:2], "x": X}, ["a", "b"])
    ],
]
EXACT: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"loss": nn.HuberLoss(reduction="none"), "data": [(X, TARGET)]},
        UnsupportedError,
        "is no scalar loss",
    ),
    (
        {"loss": lambda f, y: f.square()},
        ValueError,
        r"<lambda> returned a tensor of shape \[6, 3\]; expected a 0-d",
    ),
    (
        {"loss": lambda f, y: 1.0},
        TypeError,
        r"returned a float; expected a 0-d tensor.*without .item\(\)",
    ),
    (
        {"loss": detached},
        ValueError,
        "loss detached does not depend on the model's output in a differentiable way",
    ),
    (
        {"model": nn.Sequential(net(4), Complex())},
        UnsupportedError,
        r"complex\d+; expected real numbers.*view_as_real",
    ),
    (
        {"model": MeanAndVariance(), "loss": GAUSSIAN, "data": TWO},
        ValueError,
        r"a tuple; .*lambda o: o\[0\]`",
    ),
    (
        {"model": MeanAndVariance(), "loss": GAUSSIAN, "data": TWO, "output": lambda o: o[0]},
        ValueError,
        r"half the output.*\[6, 1\] for the output \[6, 2\], got \[6, 2\].*side by si",
    ),
    (
        {"output": lambda o: o[:, :0]},
        UnsupportedError,
        r"\[6, 0\], torch.float64, without numbers. If the batch is empty",
    ),
]


@pytest.mark.parametrize(
    ("kind", "given", "error", "words"),
    [(kind, *row) for kind in KINDS for row in REFUSED]
    + [(kind, *row) for kind in KINDS[:2] for row in EXACT],
)
def test_refused(kind: Any, given: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"model": net(), "loss": CE, "data": [(X, Y)], **given}
    with pytest.raises(error, match=words):
        product(kind, **given)
    assert getattr(given["data"], "read", 0) == 0


@pytest.mark.parametrize("name", ["num_data", "num_per_example_loss_terms"])
@pytest.mark.parametrize("number", [0, -6, float("nan"), float("inf")])
def test_numbers_are_positive(name: str, number: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={number} must be positive: it is the number of"):
        EmpiricalRisk(net(), CE, [(X, Y)], **{name: number})


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


# -------------------------------------------------------------------------------------- determinism
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Dropout(0.1), "'0' (Dropout)"),
        (nn.BatchNorm1d(5), "'0' (BatchNorm1d)"),
        (nn.LSTM(5, 5, num_layers=2, dropout=0.1), "'0' (LSTM)"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "'0' (MultiheadAttention)"),
        (nn.Dropout(0.0), ""),
        (nn.LSTM(5, 5, num_layers=2), ""),
        (nn.MultiheadAttention(4, 2), ""),
        (nn.ReLU(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_in_training_mode(module: nn.Module, name: str) -> None:
    assert training_modules(nn.Sequential(module)) == name
    assert training_modules(nn.Sequential(module).eval()) == ""


def test_messages_of_several_losses_name_the_output() -> None:
    """What is said of one loss is said of each of several."""
    model, y = nn.Linear(5, 4).double(), numbers(6, 4)

    def risk(loss: Any, target: Any) -> EmpiricalRisk:
        split = lambda f: {"a": f[:, :2], "b": f[:, 2:]}  # noqa: E731
        return EmpiricalRisk(
            model, {"a": loss, "b": MSE}, [(X, {"a": target, "b": y[:, 2:]})], output=split
        )

    with pytest.raises(
        TypeError, match="output 'a': MSELoss needs a target that is a tensor, got a list"
    ):
        risk(MSE, y[:, :2].tolist()).gradient()
    with pytest.raises(
        ValueError,
        match=r"returned a tensor of shape \[6, 2\]; expected a 0-d tensor, a single number",
    ):
        risk(lambda f, t: f - t, y[:, :2]).gradient()
