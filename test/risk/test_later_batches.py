"""Models that do something else with their layers in later batches only: right, or refused without being asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cases import close
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    GGNLinearOperator,
    UnsupportedError,
    curvature,
)

pytestmark = pytest.mark.usefixtures("both_ways")

torch.manual_seed(0)
PLAIN = torch.randn(6, 4).double().abs()
#: Four batches of the same shape; every number of the last two is negative, which the models take as a sign.
BATCHES = [(PLAIN, torch.arange(6) % 3), (PLAIN + 1, torch.arange(6) % 2)]
BATCHES += [(-X, y) for X, y in BATCHES]


class Net(nn.Module):
    """Two linear layers with another one between them, and something strange for negative inputs."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.middle = nn.Identity() if middle is None else middle.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(self.strange(h, x) if bool((x < 0).all()) else self.middle(h))

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        return self.middle(h)


class Image(nn.Module):
    """A convolution of a vector, which keeps its length if it is padded by one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        out = self.conv(h[:, None])[:, 0]
        return out if out.shape[1] == 6 else torch.cat([out, h[:, :2]], 1)


class Padding(Net):
    """Sets an option around the call."""

    def __init__(self) -> None:
        super().__init__(Image())

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        conv: Any = self.middle.conv
        conv.padding = (0,)
        try:
            return self.middle(h)
        finally:
            conv.padding = (1,)


class Dilation(Net):
    """The same for options that leave the shape as it is."""

    def __init__(self) -> None:
        super().__init__(Image())

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        conv: Any = self.middle.conv
        conv.padding, conv.dilation = (2,), (2,)
        try:
            return self.middle(h)
        finally:
            conv.padding, conv.dilation = (1,), (1,)


class Epsilon(Net):
    """The same for the epsilon of a norm."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(6))

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        norm: Any = self.middle
        norm.eps = 1.0
        try:
            return norm(h)
        finally:
            norm.eps = 1e-5


class Scale(nn.Module):
    """A module of unknown code, with options and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(6))
        self._options: dict[str, Any] = {"power": (1, 2)}
        self.register_buffer("factor", torch.ones(()))
        self.around: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x * self.gamma ** self._options["power"][0]) * self.get_buffer("factor")


class Function(Net):
    """Sets a function around the call."""

    def __init__(self) -> None:
        super().__init__(Scale())

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        scale: Any = self.middle
        scale.around = lambda x: x
        try:
            return scale(h)
        finally:
            scale.around = torch.tanh


class Options(Net):
    """Sets an entry of a dict around the call."""

    def __init__(self) -> None:
        super().__init__(Scale())

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        options: Any = self.middle._options
        options["power"] = (3, 2)
        try:
            return self.middle(h)
        finally:
            options["power"] = (1, 2)


class Buffer(Net):
    """Replaces a buffer around the call."""

    def __init__(self) -> None:
        super().__init__(Scale())

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        scale: Any = self.middle
        before, scale.factor = scale.factor, 2 * scale.factor
        try:
            return scale(h)
        finally:
            scale.factor = before


class Data(Net):
    """Replaces the numbers of a weight around the call."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        weight: Any = self.middle.weight
        before, weight.data = weight.data, 2 * weight.data
        out = self.middle(torch.relu(h))
        weight.data = before
        return out


class OtherWeights(Net):
    """Calls a layer with other tensors than its parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        weight, bias = self.middle.parameters()
        return functional_call(self.middle, {"weight": 2 * weight, "bias": bias}, (h,))


class Twice(Net):
    """Reads a weight outside of its layer, too."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(6))

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        return self.middle(h) * self.middle.weight  # type: ignore[operator]


class Forces(Net):
    """Differentiates."""

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = torch.tanh(self.a(x))
            (force,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h + force.sum(1, keepdim=True)


class Hooked(Net):
    """Has a hook of all modules."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: 2 * out)
        try:
            return self.middle(h)
        finally:
            handle.remove()


class Stopped(Net):
    """Runs a layer without a gradient."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        weight, bias = (p.detach() for p in self.middle.parameters())
        return nn.functional.linear(h, weight, bias) + self.middle(h).detach()


class HookedOtherwise(Net):
    """A hook that makes as many operations as another one does that is always there."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))
        self.factor: Any = self.middle.register_forward_hook(lambda module, args, out: 1 * out)

    def strange(self, h: Tensor, x: Tensor) -> Tensor:
        self.factor.remove()
        with self.middle.register_forward_hook(lambda module, args, out: 2 * out):
            out = self.middle(h)
        self.factor = self.middle.register_forward_hook(lambda module, args, out: 1 * out)
        return out


NETS = [
    HookedOtherwise,
    Padding,
    Dilation,
    Epsilon,
    Function,
    Options,
    Buffer,
    Data,
    OtherWeights,
    Twice,
    Forces,
    Hooked,
    Stopped,
]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same numbers each time, those of a layer that it is given included."""
    torch.manual_seed(0)
    return make()


@cache
def exact_trace(make: Callable[[], nn.Module], plain_first: bool = True) -> Tensor:
    """Of the Gauss-Newton matrix, whose products know of no layers."""
    model, data = seeded(make), BATCHES if plain_first else BATCHES[::-1]
    return GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data).to_dense().trace()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("order", ["plain first", "strange first"])
@pytest.mark.parametrize("approximation", [DiagonalBlock, FullBlock, EKFAC])
@pytest.mark.parametrize("make", NETS)
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_something_else_in_later_batches(make: Callable[[], nn.Module], approximation: Any, order: str) -> None:
    model, data = seeded(make), BATCHES if order == "plain first" else BATCHES[::-1]
    exact = exact_trace(make, order == "plain first")
    try:
        K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation)
    except UnsupportedError as error:
        assert "layer 'a'" in str(error) or "layer 'middle" in str(error)  # noqa: PT017
    else:
        close(K.trace, exact)


@pytest.mark.parametrize("make", NETS)
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_in_training_loops(make: Callable[[], nn.Module]) -> None:
    model = seeded(make)
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), DiagonalBlock)
    try:
        for batch in BATCHES:
            estimator.update(batch)
    except UnsupportedError as error:
        assert "layer 'a'" in str(error) or "layer 'middle" in str(error)  # noqa: PT017
    else:
        close(estimator.operator.trace, exact_trace(make))


def sizes_of_passes(model: nn.Module, data: Any, approximation: Any = KFAC) -> list[int]:
    """How many examples the passes of a sweep have."""
    sizes: list[int] = []
    handle = model.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    _ = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation).trace
    handle.remove()
    return sizes


def test_batches_of_one_kind_are_looked_at_once() -> None:
    assert sizes_of_passes(Net(), BATCHES) == [6, 3, 6, 6, 6]


class Steps(Net):
    """As many steps as its input says."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        for _ in range(int(x[0, 0])):
            h = torch.tanh(h)
        return self.b(h)


def test_a_model_that_does_something_else_in_every_batch() -> None:
    """Its batches are looked at, later in ever fewer of them."""
    data = [(torch.cat([torch.full((6, 1), float(k)).double(), PLAIN[:, 1:]], 1), BATCHES[0][1]) for k in range(40)]
    sizes = sizes_of_passes(Steps(), data)
    assert sizes[:16] == [6, 3] * 8
    assert sizes.count(6) == 40
    assert sizes.count(3) == 8 + 2  # batches 16 and 32
