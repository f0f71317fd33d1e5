"""Whatever happens, the user's model, data and random numbers are left as they were found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    Accumulator,
    DiagonalBlock,
    EFLinearOperator,
    EKFACLinearOperator,
    EmpiricalRisk,
    FisherMCLinearOperator,
    FullBlock,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    curvature,
)
from test.cases import NETS, Problem, fresh, unchanged

OPERATORS = [
    KFACLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    EFLinearOperator,
    FisherMCLinearOperator,
]
every_operator = pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.__name__)


def multiply(kind: Any, model: nn.Module, p: Problem, data: Any, **options: Any) -> Tensor:
    """Make an operator and use it."""
    K = kind(model, p.loss, p.params, data, **options)
    return K @ torch.ones(K.shape[1], dtype=torch.float64)


class UserError(Exception):
    """Something that only the user's code raises."""


@every_operator
def test_everything_of_the_user_s_stays(kind: Any) -> None:
    p = fresh("strided cnn")
    for q in list(p.model.parameters())[:2]:
        q.grad = torch.ones_like(q)
    p.model[0].bias.requires_grad_(False)
    p.model[2].eval()
    p.model.register_buffer("count", torch.zeros(3))
    p.model[0].note = "mine"
    with unchanged(p.model, p.loss, p.data):
        K = kind(p.model, p.loss, p.params, p.data)
        _ = K @ torch.ones(K.shape[1], dtype=torch.float64)
        _ = K.gradient_and_loss()
        if isinstance(K, KFACLinearOperator):
            K.verify()
            inverse = K.inverse(damping=1.0)
            _ = (
                K.trace,
                K.det,
                inverse @ torch.ones(K.shape[1], dtype=torch.float64),
                K.state_dict(),
                repr(K),
            )


@pytest.mark.parametrize("name", NETS)
def test_random_numbers_and_modes_stay_on_every_net(name: str) -> None:
    p = fresh(name)
    p.model.train()
    for m in p.model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.eval()
    p.curvature(DiagonalBlock)  # looks at everything by itself


class Raises(nn.Module):
    """Raises in its n-th call, after the layers before it have run."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.after:
            raise UserError("the user's own words")
        return x


@every_operator
@pytest.mark.parametrize("after", [0, 2, 4])
def test_an_error_of_the_user_s_forward_goes_through(kind: Any, after: int) -> None:
    p = fresh("in-place relu")
    raising = Raises(after)
    model = nn.Sequential(p.model[0], p.model[1], raising, p.model[2])
    with (
        unchanged(model, p.loss, p.data),
        pytest.raises(UserError, match=r"^the user's own words$"),
    ):
        multiply(kind, model, p, p.data)
    raising.after = 10**6
    with unchanged(model, p.loss, p.data):
        kind(model, p.loss, p.params, p.data)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise UserError("the user's own words")


class Bad(Accumulator):
    def update(self, batch: Any) -> None:
        raise UserError("the user's own words")

    def finish(self) -> Any:
        raise AssertionError("not reached")


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, FullBlock, Bad])
def test_errors_of_a_backward_pass_and_of_accumulators_go_through(approximation: Any) -> None:
    p = fresh("mlp")
    if approximation is not Bad:
        p.model[1].register_forward_hook(lambda module, args, out: RaisesInBackward.apply(out))
    with unchanged(p.model, p.data), pytest.raises(UserError, match=r"^the user's own words$"):
        _ = curvature(p.risk(), approximation).trace


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("_forward_hooks", lambda m: m[0].register_forward_hook(lambda *_: None)),
        ("_backward_hooks", lambda m: m[2].register_full_backward_hook(lambda *_: None)),
        ("requires_grad", lambda m: m[0].weight.requires_grad_(False)),
        ("grad", lambda m: setattr(m[0].weight, "grad", torch.zeros(5, 4).double())),
        ("training", lambda m: m[1].eval()),
        ("values", lambda m: m[0].weight.data.add_(1)),
        ("version", lambda m: m[0].weight.detach().add_(0)),
        ("object", lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone())),
        ("attributes", lambda m: setattr(m[0], "input0", 1)),
        ("attributes", lambda m: setattr(m[0].weight, "kfac", 1)),
        ("attributes", lambda m: setattr(m[0], "forward", m[0].forward)),
        ("random numbers", lambda m: torch.rand(1)),
    ],
)
def test_unchanged_can_fail(what: str, change: Any) -> None:
    p = fresh("mlp")
    with (
        torch.random.fork_rng(devices=[]),
        pytest.raises(AssertionError, match=what),
        unchanged(p.model),
    ):
        change(p.model)


def test_what_a_forward_pass_sets_in_a_module_is_gone() -> None:
    """As its activations, which would keep the graph; also where the module is run again for each
    example.
    """

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x
            return super().forward(x)

    model = nn.Sequential(Noting(3, 3), nn.Linear(3, 2))
    curvature(EmpiricalRisk(model, nn.MSELoss(), [(torch.rand(4, 3), torch.rand(4, 2))]))
    assert not hasattr(model[0], "seen")
