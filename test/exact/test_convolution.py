"""Hessians of models with convolutions, against PyTorch's own second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import normal
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import conv1d, conv2d
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from curvlinops_plus import EmpiricalRisk, Hessian


def twin(model: nn.Module, X: Tensor, params: list[str] | None = None) -> Tensor:
    """The Hessian of the mean of squares, column by column."""
    names = list(dict(model.named_parameters())) if params is None else params
    leaves = [model.get_parameter(name).detach().requires_grad_() for name in names]
    loss = functional_call(model, dict(zip(names, leaves)), (X,)).square().mean()
    g = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    flat = torch.cat([(torch.zeros_like(p) if d is None else d).flatten() for d, p in zip(g, leaves)])
    rows = [torch.autograd.grad(number, leaves, retain_graph=True, materialize_grads=True) for number in flat]
    return torch.stack([torch.cat([t.flatten() for t in row]) for row in rows])


def of(model: nn.Module, X: Tensor, params: list[str] | None = None) -> Hessian:
    chosen = None if params is None else [model.get_parameter(name) for name in params]
    return Hessian(EmpiricalRisk(model, nn.MSELoss(), [(X, torch.zeros_like(model(X)))], params=chosen))


def require_right(model: nn.Module, X: Tensor, params: list[str] | None = None) -> None:
    """The first product, later ones, several columns together and one by one, and the matrix."""
    exact, H = twin(model, X, params), of(model, X, params)
    V = normal(H.shape[1], 3, seed=5)
    for _ in range(2):
        torch.testing.assert_close(H @ V[:, 0], exact @ V[:, 0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(H @ V, exact @ V, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(H.to_dense(), exact, rtol=1e-9, atol=1e-11)


class Model(nn.Module):
    """A function of an input, a convolution and a linear layer."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.conv, self.function = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 3, 2), function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x).tanh())


CONVOLUTIONS = {
    "1-D": (nn.Conv1d(3, 4, 3, padding=1), (5,)),
    "2-D": (nn.Conv2d(3, 4, 3, padding=1), (5, 4)),
    "3-D": (nn.Conv3d(3, 2, (1, 2, 2)), (2, 3, 3)),
    "strides that leave pixels over": (nn.Conv2d(3, 4, (2, 3), stride=(2, 3), padding=(1, 0)), (4, 7)),
    "small images, many channels": (nn.Conv2d(3, 9, 2, stride=2, dilation=2, padding=1, bias=False), (6, 5)),
    "groups": (nn.Conv2d(3, 6, 2, groups=3, stride=2, dilation=(1, 2)), (4, 5)),
    "same": (nn.Conv2d(3, 4, 3, padding="same"), (4, 3)),
    "circular": (nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), (5,)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution(name: str) -> None:
    conv, size = CONVOLUTIONS[name]
    torch.manual_seed(0)
    first = type(conv)(2, 3, 1)
    model = nn.Sequential(first, nn.Tanh(), conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    X = normal(3, 2, *size)
    model.double()(X)
    require_right(model, X)
    require_right(model, X, ["2.weight"])  # the other parameters have gradients, too


def tied(model: Any, x: Tensor) -> Tensor:
    """Two uses of a weight, a part of it, and a sum of its numbers."""
    h = model.conv(x).tanh()
    h = conv2d(h[:, :2], model.conv.weight) + conv2d(h, model.conv.weight[:, :1], groups=1 if h.shape[1] == 1 else 3)
    return h.flatten(1) * model.conv.weight.square().sum()


def inner_step(model: Any, x: Tensor) -> Tensor:
    """Descends by a gradient inside, whose numbers are needed."""
    weight = model.conv.weight
    (g,) = torch.autograd.grad(conv2d(x, weight).square().mean(), weight, create_graph=True)
    return conv2d(x, weight - 0.3 * g, model.conv.bias).flatten(1)


class Again(torch.autograd.Function):
    """A convolution that goes back by a backward pass inside, and reads what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.weight, ctx.out = weight, conv2d(x, weight)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        more = {"retain_graph": True, "create_graph": torch.is_grad_enabled()}
        (found,) = torch.autograd.grad(ctx.out, ctx.weight, g, **more)
        return None, found + 0 * found.square()


MODELS = {
    "tied": tied,
    "inner step": inner_step,
    "inner backward pass": lambda model, x: Again.apply(x.detach(), model.conv.weight).tanh().flatten(1) * x.mean(),
    "checkpoint": lambda model, x: checkpoint(lambda x: model.conv(x).tanh(), x, use_reentrant=False).flatten(1),
    "vmap": lambda model, x: torch.vmap(lambda row: model.conv(row[None])[0])(x).tanh().flatten(1),
    "jvp": lambda model, x: torch.func.jvp(model.conv, (x,), (x.square(),))[1].tanh().flatten(1),
    "input only": lambda model, x: conv1d(x.flatten(1)[:, None], model.first.weight.flatten()[None, None]).flatten(1),
}


@pytest.mark.parametrize("name", MODELS)
def test_whoever_reads_the_gradient_of_a_weight(name: str) -> None:
    require_right(Model(MODELS[name]), normal(2, 2, 4, 4))


def test_hooks_that_read_the_gradient_of_a_weight() -> None:
    seen: list[Tensor] = []

    def forward(model: Any, x: Tensor) -> Tensor:
        weight = model.conv.weight
        if weight is not own:
            weight.register_hook(lambda g: seen.append(g.detach()) if torch.is_grad_enabled() else None)
        return model.conv(x).tanh().flatten(1)

    model, X = Model(forward), normal(2, 2, 4, 4)
    own = model.conv.weight
    H = of(model, X)
    v = normal(H.shape[1])
    _ = H @ v
    seen.clear()
    _ = H @ v
    (g,) = torch.autograd.grad(model(X).square().mean(), own)
    assert seen
    for found in seen:
        torch.testing.assert_close(found / found.norm(), g / g.norm(), rtol=1e-9, atol=1e-11)


def operations(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops()


def layers(*modules: nn.Module) -> Iterator[nn.Module]:
    for module in modules:
        yield from (module, nn.Tanh())


@pytest.mark.parametrize("size", [3, 12])
def test_gradients_of_weights_are_not_computed_in_the_first_backward_pass(size: int) -> None:
    """Of a layer's nine products eight are left: forward, back to the input, and six for the second backward pass."""
    model = nn.Sequential(*layers(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))), nn.Flatten()).double()
    X = normal(2, 8, size, size)
    H = of(model, X)
    v = normal(H.shape[1])
    operations(lambda: H @ v)  # counting is done by hooks, whose linearity the first product looks at
    layer = operations(lambda: model(X))
    assert operations(lambda: H @ v) <= 8 * layer


def test_nothing_changes() -> None:
    """Nor is anything found in anomaly mode, which looks for NaN."""
    model, X = Model(MODELS["tied"]), normal(2, 2, 4, 4)
    H = of(model, X)
    v = normal(H.shape[1])
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        found = H @ v
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert torch.equal(found, H @ v)
