"""Hessians with respect to activations against `torch.autograd.functional.hessian`."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import ActivationHessianLinearOperator
from test.cases import close, unchanged
from test.helpers import F64, normal


class Block(nn.Module):
    """A module in the middle of a network, whose tail is known as a function of its output."""

    def __init__(self, head: nn.Module, tail: nn.Module) -> None:
        super().__init__()
        self.head, self.tail = head, tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.head(x))


class Encoder(nn.Module):
    """A transformer layer and a head on the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Brier(nn.Module):
    """Squared distance of probabilities, which no likelihood is registered for."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.softmax(1) - nn.functional.one_hot(y, f.shape[1])).square().sum(1).mean()


def mlp() -> Block:
    return Block(
        nn.Linear(3, 4),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    )


def cnn() -> Block:
    layers = nn.BatchNorm2d(2), nn.Sigmoid(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(2, 3)
    return Block(nn.Conv2d(1, 2, 2), nn.Sequential(*layers))


def transformer() -> Block:
    return Block(nn.Linear(3, 4), Encoder())


WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=F64)
LOSSES: list[nn.Module] = [
    nn.CrossEntropyLoss(WEIGHTS, ignore_index=1),
    nn.CrossEntropyLoss(WEIGHTS, ignore_index=1, reduction="sum"),
    Brier(),
]


def make(
    model: Callable[[], Block] = mlp, *sizes: int
) -> tuple[Block, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    made, shape = model().double().eval(), {mlp: (3,), cnn: (1, 3, 3), transformer: (2, 3)}[model]
    y = torch.tensor([0, 2, 1, 0, 2, 2]).split([*sizes, 6 - sum(sizes)])
    return made, [(torch.randn(n, *shape, dtype=F64), y[k]) for k, n in enumerate(sizes)]


def expected(model: Block, loss: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The Hessian of the loss of all data together with respect to all activations, examples
    concatenated.
    """
    z = torch.cat([model.head(X) for X, _ in data]).detach()
    y = torch.cat([y for _, y in data])
    return dense(lambda flat: loss(model.tail(flat.clone().view(z.shape)), y), z)


def dense(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        H = hessian(function, at.flatten())
    assert isinstance(H, Tensor)
    return H


@pytest.mark.parametrize("loss", LOSSES, ids=["mean", "sum", "no likelihood"])
@pytest.mark.parametrize("name", [mlp, cnn, transformer])
def test_hessian(name: Callable[[], Block], loss: nn.Module) -> None:
    for sizes in ((3,), (3, 1, 2)):
        model, data = make(name, *sizes)
        H_expected = expected(model, loss, data)
        assert H_expected.any()
        with unchanged(model, data, loss):
            H = ActivationHessianLinearOperator(model, loss, ("head", "output", 0), data)
            # What the tail takes is what the head returns.
            same = ActivationHessianLinearOperator(model, loss, ("tail", "input", 0), data)
            found, V = H.to_dense(), normal(H.shape[0], 3)
            product, left = H @ V, V[:, 0] @ same
        assert len(H.in_shapes) == len(sizes)
        close(found, H_expected)
        close(product, H_expected @ V)
        close(left, V[:, 0] @ H_expected)
        assert H.T is H


def test_input_of_the_whole_model_and_num_data() -> None:
    model, data = make(mlp, 3)
    loss, (X, y) = nn.CrossEntropyLoss(), data[0]
    found = ActivationHessianLinearOperator(
        model, loss, ("", "input", 0), data, num_data=30
    ).to_dense()
    close(
        found,
        dense(lambda flat: loss(model.tail(model.head(flat.view(X.shape)).clone()), y), X) / 10,
    )


Pair = namedtuple("Pair", ["first", "second"])


class Several(nn.Module):
    """Takes and returns several things."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, k: int, y: Tensor) -> Any:
        return self.kind(x.sin() * k, (x * y).cos())


class User(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.out = Several(kind), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(x, 2, x + 1)
        return self.out(a * b)


@pytest.mark.parametrize("kind", [lambda *parts: parts, lambda *parts: list(parts), Pair])
def test_one_of_several_tensors(kind: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, loss, X, y = User(kind).double(), nn.MSELoss(), normal(2, 3), normal(2, 2, seed=1)

    def after(a: Tensor, b: Tensor) -> Tensor:
        return loss(model.out(a.view(2, 3) * b.view(2, 3)), y)

    a, b = X.sin() * 2, (X * (X + 1)).cos()
    cases: dict[tuple[str, int], tuple[Callable[[Tensor], Tensor], Tensor]] = {
        ("output", 0): (lambda z: after(z, b), a),
        ("output", 1): (lambda z: after(a, z), b),
        ("output", -1): (lambda z: after(a, z), b),
        ("input", 0): (lambda z: after(z.sin() * 2, (z * (X + 1).flatten()).cos()), X),
        ("input", 2): (lambda z: after(a, (X.flatten() * z).cos()), X + 1),
    }
    for (side, index), (function, at) in cases.items():
        H = ActivationHessianLinearOperator(model, loss, ("inner", side, index), [(X, y)])
        close(H.to_dense(), dense(function, at))
    with pytest.raises(AttributeError):  # a number
        ActivationHessianLinearOperator(model, loss, ("inner", "input", 1), [(X, y)])
    with pytest.raises(IndexError):
        ActivationHessianLinearOperator(model, loss, ("inner", "output", 2), [(X, y)])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"a": self.a(h), "b": self.b(h)}


def test_several_losses() -> None:
    torch.manual_seed(0)
    model, data = Heads().double(), []
    for n in (3, 2):
        data.append((normal(n, 3, seed=n), {"a": torch.randint(2, (n,)), "b": normal(n, 1)}))
    data[0][1]["a"][0] = -100  # not as many terms of each loss in each batch
    loss = {"a": nn.CrossEntropyLoss(), "b": (nn.MSELoss(), 0.3)}
    found = ActivationHessianLinearOperator(model, loss, ("body", "output", 0), data).to_dense()
    z = torch.cat([model.body(X) for X, _ in data]).detach()
    y = {key: torch.cat([y[key] for _, y in data]) for key in ("a", "b")}

    def total(flat: Tensor) -> Tensor:
        h = flat.view(z.shape).tanh()
        return nn.CrossEntropyLoss()(model.a(h), y["a"]) + 0.3 * nn.MSELoss()(model.b(h), y["b"])

    close(found, dense(total, z))


class Sum(nn.Module):
    reduction = "sum"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f * y).sum()


def test_curvature_that_is_zero() -> None:
    model, X = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double(), normal(2, 3)
    H = ActivationHessianLinearOperator(
        model, Sum(), ("0", "output", 0), [(X, torch.ones_like(X[:, :2]))]
    )
    assert not H.to_dense().any()


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(
            checkpoint(lambda h: torch.tanh(self.inner(h)), self.first(x), use_reentrant=False)
        )


def test_activation_inside_of_checkpointing() -> None:
    torch.manual_seed(0)
    model, loss, data = Again().double(), nn.MSELoss(), [(normal(2, 3), normal(2, 2))]
    h = model.first(data[0][0]).detach()
    ends: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        "input": (h, lambda z: loss(model.last(model.inner(z.view(2, 3)).tanh()), data[0][1])),
        "output": (
            model.inner(h).detach(),
            lambda z: loss(model.last(z.view(2, 2).tanh()), data[0][1]),
        ),
    }
    for side, (at, function) in ends.items():
        with unchanged(model, data):
            close(
                ActivationHessianLinearOperator(model, loss, ("inner", side, 0), data).to_dense(),
                dense(function, at),
            )


def test_data_that_change() -> None:
    model, data = make(mlp, 3, 1)
    H = ActivationHessianLinearOperator(model, nn.CrossEntropyLoss(), ("head", "output", 0), data)
    v = torch.ones(H.shape[0], dtype=F64)
    data.append(data[0])
    with pytest.raises(ValueError, match="no batch 2 with an activation of the shape"):
        _ = H @ v
    del data[2]
    last = data.pop()
    with pytest.raises(ValueError, match="no batch 1 with an activation of the shape"):
        _ = H @ v
    data[0] = last
    with pytest.raises(ValueError, match="no batch 0 with an activation of the shape"):
        _ = H @ v
