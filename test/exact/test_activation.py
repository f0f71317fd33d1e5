"""Hessians with respect to activations against `torch.autograd.functional.hessian`, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import close, unchanged
from helpers import refuses_cdist
from middles import Once
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import ActivationHessianLinearOperator
from curvlinops_plus.errors import UnsupportedError


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

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        terms = (f.softmax(1) - nn.functional.one_hot(y, f.shape[1])).square().sum(1)
        return terms.mean() if self.reduction == "mean" else terms.sum()


def _mlp() -> Block:
    return Block(nn.Linear(3, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def _cnn() -> Block:
    return Block(
        nn.Conv2d(1, 2, 2),
        nn.Sequential(nn.BatchNorm2d(2), nn.Sigmoid(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(2, 3)),
    )


def _transformer() -> Block:
    return Block(nn.Linear(3, 4), Encoder())


#: A model and the shape of an example.
MODELS: dict[str, tuple[Callable[[], Block], tuple[int, ...]]] = {
    "mlp": (_mlp, (3,)),
    "cnn": (_cnn, (1, 3, 3)),
    "transformer": (_transformer, (2, 3)),
}
LOSSES: dict[str, Callable[[str], nn.Module]] = {
    "cross-entropy": lambda reduction: nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), ignore_index=1, reduction=reduction
    ),
    "no likelihood": lambda reduction: Brier(reduction),
}


def make(name: str, *sizes: int) -> tuple[Block, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    maker, shape = MODELS[name]
    model = maker().double().eval()
    y = torch.tensor([0, 2, 1, 0, 2, 2])
    data = []
    for n in sizes:
        data.append((torch.randn(n, *shape, dtype=torch.float64), y[:n]))
        y = y[n:]
    return model, data


def expected(model: Block, loss: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The Hessian of the loss of all data together with respect to all activations, examples concatenated."""
    z = torch.cat([model.head(X) for X, _ in data]).detach()
    y = torch.cat([y for _, y in data])
    with sdpa_kernel(SDPBackend.MATH):
        H = hessian(lambda flat: loss(model.tail(flat.clone().view(z.shape)), y), z.flatten())
    assert isinstance(H, Tensor)
    return H


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_hessian(name: str, loss_name: str, reduction: str) -> None:
    loss = LOSSES[loss_name](reduction)
    for sizes in ((3,), (3, 1, 2)):
        model, data = make(name, *sizes)
        H_expected = expected(model, loss, data)
        assert H_expected.any()
        with unchanged(model, data, loss):
            H = ActivationHessianLinearOperator(model, loss, ("head", "output", 0), data)
            # What the tail takes is what the head returns.
            same = ActivationHessianLinearOperator(model, loss, ("tail", "input", 0), data)
            dense = H.to_dense()
            V = torch.randn(H.shape[0], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            product, one, left = H @ V, H @ V[:, 0], V[:, 0] @ same
        assert len(H.in_shapes) == len(sizes)
        close(dense, H_expected)
        close(product, H_expected @ V)
        close(one, H_expected @ V[:, 0])
        close(left, V[:, 0] @ H_expected)
        assert H.T is H


class ThirdPower(torch.autograd.Function):
    """A backward pass by hand, of which the second derivative is not symmetric."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.square() * x.roll(1, -1)).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g[0] * (2 * x * x.roll(1, -1) + x.roll(-1, -1).square().detach())


def test_symmetry_is_looked_at() -> None:
    """For each new shape, as kernels may go wrong for a batch of one only."""

    class Tail(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * (ThirdPower.apply(x) if len(x) == 1 else x.square()))

    torch.manual_seed(0)
    model = Block(nn.Linear(3, 4), Tail(4, 3)).double()
    data = [(torch.randn(n, 3, dtype=torch.float64), torch.zeros(n, dtype=torch.long)) for n in (3, 2, 1)]
    loss, which = nn.CrossEntropyLoss(), ("head", "output", 0)
    close(
        ActivationHessianLinearOperator(model, loss, which, data[:2]).to_dense(),
        expected(model, loss, data[:2]),
    )
    for use in (lambda H: H.to_dense(), lambda H: H @ torch.ones(H.shape[0], dtype=torch.float64)):
        H = ActivationHessianLinearOperator(model, loss, which, data, check_deterministic=False)
        with pytest.raises(UnsupportedError, match="not symmetric"):
            use(H)


class Slopes(nn.PReLU):
    """PReLU, and the same in plain operations."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) - self.weight * (-x).clamp(min=0) if self.training else super().forward(x)


class Groups(nn.GroupNorm):
    """Group norm, and the same in plain operations."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        h = x.view(len(x), self.num_groups, -1)
        h = (h - h.mean(2, keepdim=True)) / (h.var(2, correction=0, keepdim=True) + self.eps).sqrt()
        return h.view_as(x) * self.weight + self.bias


@pytest.mark.parametrize("piece", [Slopes(4), Groups(2, 4), Groups(1, 4)], ids=["PReLU", "two groups", "one group"])
@pytest.mark.parametrize("sizes", [(1,), (2, 1)], ids=str)
def test_second_derivatives_that_pytorch_gets_wrong(piece: nn.Module, sizes: tuple[int, ...]) -> None:
    """PReLU at zero, and group norm for several vectors at once."""
    torch.manual_seed(0)
    model = Block(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Sequential(piece, nn.Linear(4, 3))).double().eval()
    data = [(torch.randn(n, 3, dtype=torch.float64), torch.arange(n)) for n in sizes]
    dense = ActivationHessianLinearOperator(model, nn.CrossEntropyLoss(), ("head", "output", 0), data).to_dense()
    z = torch.cat([model.head(X) for X, _ in data]).detach()
    assert not z.all()
    # The slope at zero is that of negative numbers.
    z = torch.where(z == 0, -1e-300, z)
    y = torch.cat([y for _, y in data])
    model.train()
    H = hessian(lambda flat: nn.functional.cross_entropy(model.tail(flat.view(z.shape)), y), z.flatten())
    assert isinstance(H, Tensor)
    close(dense, H)


def test_same_numbers_as_curvlinops() -> None:
    pytest.importorskip("backpack")
    peer = pytest.importorskip("curvlinops.experimental")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)).double()
    data = [(torch.rand(10, 4, dtype=torch.float64), torch.rand(10, 2, dtype=torch.float64))]
    for activation in (("1", "input", 0), ("0", "output", 0), ("2", "output", 0), ("1", "output", 0)):
        ours = ActivationHessianLinearOperator(model, nn.MSELoss(), activation, data)
        theirs = peer.ActivationHessianLinearOperator(model, nn.MSELoss(), activation, data)
        V = torch.randn(ours.shape[0], 2, dtype=torch.float64)
        assert ours.shape == tuple(theirs.shape)
        close(ours @ V, theirs @ V)


def test_input_of_the_whole_model_and_num_data() -> None:
    model, data = make("mlp", 3)
    loss, (X, y) = nn.CrossEntropyLoss(), data[0]
    found = ActivationHessianLinearOperator(model, loss, ("", "input", 0), data, num_data=30).to_dense()
    theirs = hessian(lambda flat: loss(model.tail(model.head(flat.view(X.shape)).clone()), y), X.flatten())
    assert isinstance(theirs, Tensor)
    close(found, theirs / 10)


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
    model = User(kind).double()
    X, y = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    loss = nn.MSELoss()

    def after(a: Tensor, b: Tensor) -> Tensor:
        return loss(model.out(a * b), y)

    a, b = X.sin() * 2, (X * (X + 1)).cos()
    cases: dict[tuple[str, int], tuple[Callable[[Tensor], Tensor], Tensor]] = {
        ("output", 0): (lambda z: after(z, b), a),
        ("output", 1): (lambda z: after(a, z), b),
        ("output", -1): (lambda z: after(a, z), b),
        ("input", 0): (lambda z: after(z.sin() * 2, (z * (X + 1)).cos()), X),
        ("input", 2): (lambda z: after(a, (X * z).cos()), X + 1),
    }
    for (side, index), (function, at) in cases.items():
        H = ActivationHessianLinearOperator(model, loss, ("inner", side, index), [(X, y)])
        truth = hessian(function, at)
        assert isinstance(truth, Tensor)
        close(H.to_dense(), truth.reshape(6, 6))
    data = [(X, y)]
    with pytest.raises(ValueError, match='Entry 1 of the input of module "inner" is int; only a tensor'):
        ActivationHessianLinearOperator(model, loss, ("inner", "input", 1), data)
    with pytest.raises(ValueError, match='output of module "inner" has 2 entries; there is no entry 2'):
        ActivationHessianLinearOperator(model, loss, ("inner", "output", 2), data)
    with pytest.raises(ValueError, match='output of module "out" has 1 entry; there is no entry 1'):
        ActivationHessianLinearOperator(model, loss, ("out", "output", 1), data)


def test_several_losses() -> None:
    torch.manual_seed(0)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.body(x).tanh()
            return {"a": self.a(h), "b": self.b(h)}

    model, sizes = Heads().double(), (3, 2)
    data = []
    for n in sizes:
        X = torch.randn(n, 3, dtype=torch.float64)
        data.append((X, {"a": torch.randint(2, (n,)), "b": torch.randn(n, 1, dtype=torch.float64)}))
    data[0][1]["a"][0] = -100  # not as many terms of each loss in each batch
    loss = {"a": nn.CrossEntropyLoss(), "b": (nn.MSELoss(), 0.3)}
    found = ActivationHessianLinearOperator(model, loss, ("body", "output", 0), data).to_dense()
    z = torch.cat([model.body(X) for X, _ in data]).detach()

    def total(flat: Tensor) -> Tensor:
        h = flat.view(z.shape).tanh()
        y = {key: torch.cat([y[key] for _, y in data]) for key in ("a", "b")}
        return nn.CrossEntropyLoss()(model.a(h), y["a"]) + 0.3 * nn.MSELoss()(model.b(h), y["b"])

    H = hessian(total, z.flatten())
    assert isinstance(H, Tensor)
    close(found, H)


def test_curvature_that_is_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    X = torch.randn(2, 3, dtype=torch.float64)

    class Sum(nn.Module):
        reduction = "sum"

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return (f * y).sum()

    H = ActivationHessianLinearOperator(model, Sum(), ("0", "output", 0), [(X, torch.ones_like(X[:, :2]))])
    assert not H.to_dense().any()


# ---------------------------------------------------------------------------------------------------------- messages
@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (("middle", "output", 0), r'No module is named "middle"; the model has \[.*head'),
        (("head", "outputs", 0), 'must be "input" or "output", got .outputs.'),
        (("head", "output", "0"), "the third part must be a position, an int"),
        (("head", "output"), "must be .module name"),
    ],
)
def test_activations_that_are_not_there(activation: Any, message: str) -> None:
    model, data = make("mlp", 3)
    with pytest.raises(ValueError, match=message):
        ActivationHessianLinearOperator(model, nn.CrossEntropyLoss(), activation, data)


def test_number_of_calls() -> None:
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act, nn.Linear(3, 3)).double()
    _, data = make("mlp", 3)
    with pytest.raises(ValueError, match='Module "1" was called 2 times in one forward pass'):
        ActivationHessianLinearOperator(model, nn.CrossEntropyLoss(), ("1", "output", 0), data)
    assert not act._forward_hooks


def test_activation_inside_of_checkpointing() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(lambda h: torch.tanh(self.inner(h)), self.first(x), use_reentrant=False))

    model, data = Again().double(), [(torch.rand(2, 3).double(), torch.rand(2, 2).double())]
    for side in ("input", "output"):
        with unchanged(model, data), pytest.raises(UnsupportedError, match='Module "inner" is inside of activation ch'):
            ActivationHessianLinearOperator(model, nn.MSELoss(), ("inner", side, 0), data).to_dense()
    outside = ActivationHessianLinearOperator(model, nn.MSELoss(reduction="sum"), ("last", "input", 0), data)
    W = model.last.weight.detach()
    close(outside.to_dense(), torch.block_diag(2 * W.T @ W, 2 * W.T @ W))


def test_kinds_of_data_and_models() -> None:
    model, data = make("mlp", 3)
    loss, activation = nn.CrossEntropyLoss(), ("head", "output", 0)
    with pytest.raises(ValueError, match="`data` is an iterator, which can be read only once"):
        ActivationHessianLinearOperator(model, loss, activation, iter(data))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Activations are known by modules; `model_func` is a function"):
        ActivationHessianLinearOperator(lambda X: X, loss, activation, data)  # type: ignore[arg-type]
    X, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    shuffled = DataLoader(TensorDataset(X, y), 2, shuffle=True, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match=r"same order each time \(shuffle=False\)"):
        ActivationHessianLinearOperator(model, loss, activation, shuffled)
    with pytest.raises(UnsupportedError, match="none"):
        ActivationHessianLinearOperator(model, nn.CrossEntropyLoss(reduction="none"), activation, data)


def test_data_that_change() -> None:
    model, data = make("mlp", 3, 1)
    H = ActivationHessianLinearOperator(model, nn.CrossEntropyLoss(), ("head", "output", 0), data)
    v = torch.ones(H.shape[0], dtype=torch.float64)
    last = data.pop()
    with pytest.raises(ValueError, match=r"had shape \[1, 4\] in the first pass over the data and None"):
        _ = H @ v
    data[0] = (last[0], last[1])
    with pytest.raises(
        ValueError, match=r"had shape \[3, 4\] in the first pass over the data and \[1, 4\] in this one"
    ):
        _ = H @ v


def test_operation_without_second_derivative() -> None:
    class Distances(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x[:, None], x[:, None] + 1).flatten(1) * x

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(x)  # type: ignore[return-value]

    _, data = make("mlp", 3)
    with pytest.raises(UnsupportedError, match="The backward pass of Once is marked @once_differentiable"):
        ActivationHessianLinearOperator(
            Block(nn.Linear(3, 3), Square()).double(), nn.CrossEntropyLoss(), ("head", "output", 0), data
        )
    model = Block(nn.Linear(3, 3), Distances()).double()
    _, data = make("mlp", 3)
    with refuses_cdist("uses cdist, which PyTorch can't differentiate twice"):
        ActivationHessianLinearOperator(model, nn.CrossEntropyLoss(), ("head", "output", 0), data)
