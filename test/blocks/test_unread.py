"""Parameters that nothing reads are refused, whatever kind of module holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import KFAC, CurvatureEstimator, DiagonalBlock, EmpiricalRisk, FullBlock, curvature


class Own(nn.Module):
    """Parameters, modules, and a function of them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(torch.rand(*part)))
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "beside a product": (lambda: Own(lambda s, x: x @ s.w.T, w=(2, 3), unread=(2,)), "unread"),
    "inside what is run again": (lambda: Own(lambda s, x: x @ s.w.exp().T, w=(2, 3), unread=(2,)), "unread"),
    "all that a module holds": (lambda: Own(lambda s, x: s.l(x), l=nn.Linear(3, 2), unread=(2,)), "unread"),
    "in a child": (
        lambda: Own(lambda s, x: s.l(s.c(x)), l=nn.Linear(3, 2), c=Own(lambda s, x: x * s.a, a=(3,), unread=(3,))),
        "c.unread",
    ),
    "the bias of a weight": (
        lambda: Own(lambda s, x: s.l(x @ s.c.weight.T), l=nn.Linear(3, 2), c=nn.Linear(3, 3)),
        "c.bias",
    ),
    "the weight of a bias": (
        lambda: Own(lambda s, x: s.l(x + s.c.bias), l=nn.Linear(3, 2), c=nn.Linear(3, 3)),
        "c.weight",
    ),
    "detached": (lambda: Own(lambda s, x: x @ s.w.T + s.unread.detach(), w=(2, 3), unread=(2,)), "unread"),
    "a module": (lambda: Own(lambda s, x: s.l(x), l=nn.Linear(3, 2), c=nn.Linear(3, 2, bias=False)), "c.weight"),
}


@pytest.mark.filterwarnings("ignore:.*exact diagonal")
@pytest.mark.parametrize("approximation", [KFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize("name", MODELS)
def test_unread_parameters_are_refused_by_name(name: str, approximation: Any) -> None:
    make, key = MODELS[name]
    model, batch = make(), (torch.rand(6, 3).double(), torch.rand(6, 2).double())
    words = rf"(never (reads|called)|never called).*'{key}'\].*no curvature.*(`params`|leave_out_uncalled)"
    with pytest.raises(ValueError, match=words):
        curvature(EmpiricalRisk(model, nn.MSELoss(), [batch]), approximation)
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.MSELoss(), ()), approximation)
    estimator.update(batch)
    with pytest.raises(ValueError, match=words):
        _ = estimator.operator
    others = {other: p for other, p in model.named_parameters() if other != key}
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), [batch], others), approximation)
    assert bool(K.diagonal().all())


@pytest.mark.filterwarnings("ignore:.*exact diagonal")
def test_what_later_batches_read_is_right() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        return x * (s.a if x[0, 0] > 0 else s.b).exp()

    model = Own(run, a=(3,), b=(3,))
    data = [(sign * torch.rand(5, 3).double(), torch.rand(5, 3).double()) for sign in (1, -1)]
    loss = nn.MSELoss(reduction="sum")
    K = curvature(EmpiricalRisk(model, loss, data), DiagonalBlock)
    expected = [2 * (X * p.detach().exp()).square().sum(0) for (X, _), p in zip(data, model.parameters())]
    assert torch.allclose(K.diagonal(), torch.cat(expected))


def test_a_parameter_that_is_read_may_have_no_gradient() -> None:
    model = Own(lambda s, x: s.l(x + 0 * s.w), l=nn.Linear(3, 2), w=(3,))
    batch = (torch.rand(6, 3).double(), torch.rand(6, 2).double())
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), [batch]), DiagonalBlock)
    assert not K.blocks["w"].diagonal().any()
