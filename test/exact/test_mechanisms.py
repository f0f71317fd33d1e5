"""What makes products faster or smaller: linearisations that stay, tangents that are freed, gradients of convolutions
that are not computed, a first product that tells what forward mode is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import FEW, close, problem, unchanged
from helpers import normal, peak
from middles import MIDDLES, Net
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from curvlinops_plus import EmpiricalRisk
from curvlinops_plus.exact import GGN, Hessian

KEPT = {"max_kept_bytes": 2**28}


# --------------------------------------------------------------------------------------------- linearisations that stay
@pytest.mark.parametrize("name", FEW)
def test_products_with_what_stays(name: str) -> None:
    p = problem(name)
    dense = p.exact.ggn()
    with unchanged(p.model, p.loss, p.data):
        G = GGN(p.risk(), **KEPT)
        for seed in range(4):
            v = normal(len(dense), seed=seed)
            close(G @ v, dense @ v)
        V = torch.stack([v, torch.ones_like(v)], 1)
        close(G @ V, dense @ V)


class Scaled(nn.Module):
    """Reads things that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.random = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 2.0, False
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        f = self.layer(x) * self.scale + self.shift
        return f.tanh() * torch.rand(()) if self.random else f.tanh()


CHANGES: dict[str, Callable[[Any, list[Any], Any], object]] = {
    "parameter": lambda model, data, loss: model.layer[0].weight.data.mul_(0.5),
    "buffer": lambda model, data, loss: model.shift.add_(1),
    "attribute": lambda model, data, loss: setattr(model, "scale", 3.0),
    "module": lambda model, data, loss: model.layer.__setitem__(1, nn.Sigmoid()),
    "hook": lambda model, data, loss: model.layer[1].register_forward_hook(lambda m, args, out: out * 2),
    "loss": lambda model, data, loss: loss.weight[:1].mul_(0.5),
    "input": lambda model, data, loss: data[1][0].mul_(0.5),
    "target": lambda model, data, loss: data[1][1].fill_(2),
    "batches": lambda model, data, loss: data.pop(),
    "random numbers": lambda model, data, loss: setattr(model, "random", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_products(name: str) -> None:
    torch.manual_seed(0)
    model, loss = Scaled().double(), nn.CrossEntropyLoss(weight=normal(3).abs())
    data = [(normal(n, 4, seed=n), torch.arange(n) % 3) for n in (6, 4, 5)]
    risk = EmpiricalRisk(model, loss, data, check=False)
    G, v = GGN(risk, check_deterministic=False, **KEPT), normal(risk.space.dim)
    for _ in range(3):
        before = G @ v
    assert len(G._linear.kept._kept) == 3  # type: ignore[union-attr]
    CHANGES[name](model, data, loss)
    for seed in range(3):
        torch.manual_seed(seed)
        found = G @ v
        torch.manual_seed(seed)
        close(found, GGN(risk, check_deterministic=False) @ v, 1e-13)
    assert float((before - found).norm() / before.norm()) > 1e-4


# ---------------------------------------------------------------------------------------------- tangents that are freed
class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).softmax(-1).tanh()


def test_a_ggn_product_takes_little_more_memory_than_a_gradient() -> None:
    """Tangents that stayed with saved tensors would double it; those of softmax and norms take more, 3.5 times it."""
    torch.manual_seed(0)
    model, X, y = nn.Sequential(*(Residual(32) for _ in range(8))), torch.randn(1024, 32), torch.randn(1024, 32)
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X, y)])
    v = torch.randn(risk.space.dim)
    _ = GGN(risk.with_data([(X[:2], y[:2])])) @ v  # what is loaded at first use
    gradient = peak(lambda: torch.autograd.grad(nn.functional.mse_loss(model(X), y), [*model.parameters()]))
    G = GGN(risk, check_deterministic=False)
    for _ in range(2):  # the first product, with its checks
        assert peak(lambda: G @ v) < 1.4 * gradient


# --------------------------------------------------------------------------------------------------------- convolutions
def layers(count: int) -> Iterator[nn.Module]:
    for _ in range(count):
        yield from (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())


def test_gradients_of_convolutions_are_not_computed_in_the_first_backward_pass() -> None:
    """Of a layer's nine products eight are left: forward, back to the input, and six for the second backward pass."""
    torch.manual_seed(0)
    model, X = nn.Sequential(*layers(6), nn.Flatten()).double(), normal(2, 8, 3, 3)
    H = Hessian(EmpiricalRisk(model, nn.MSELoss(), [(X, torch.zeros_like(model(X)))]))
    v, counts = normal(H.shape[1]), []
    for run in (lambda: H @ v, lambda: model(X), lambda: H @ v):  # the first product looks at hooks, which count
        with FlopCounterMode(display=False) as counted:
            run()
        counts.append(counted.get_total_flops())
    assert counts[2] <= 8 * counts[1]


# ---------------------------------------------------------------------------------------------------- the first product
@pytest.mark.parametrize("name", MIDDLES)
def test_the_first_product_finds_out_where_forward_mode_is_right(name: str) -> None:
    torch.manual_seed(0)
    middle, right = MIDDLES[name]
    data = [(normal(n, 3, seed=n), torch.arange(n) % 2) for n in (5, 3)]
    G = GGN(EmpiricalRisk(Net(middle).double(), nn.CrossEntropyLoss(), data))
    _ = G @ normal(G.shape[1])
    assert G._linear.mode.right is right
