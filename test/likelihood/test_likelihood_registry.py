"""Which loss has which rules, and what a user can add."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import (
    MSE,
    Likelihood,
    likelihood_of,
    rebuild_loss,
    register_likelihood,
)
from curvlinops_plus.likelihood import likelihood as likelihood_file


@pytest.fixture(autouse=True)
def _registry_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihood_file, "_MAKERS", dict(likelihood_file._MAKERS))


class Huber(Likelihood):
    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        return functional.huber_loss(F, Y, reduction="none").sum(-1)


def test_a_subclass_follows_its_parent_unless_it_computes_something_else() -> None:
    class Named(nn.MSELoss):
        pass

    class Doubled(nn.MSELoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return 2 * super().forward(input, target)

    class Called(nn.MSELoss):
        def __call__(self, *args: Tensor) -> Tensor:
            return 2 * super().__call__(*args)

    assert type(likelihood_of(Named())) is MSE
    patched, hooked = nn.MSELoss(), nn.MSELoss()
    patched.forward = lambda input, target: input.sum()
    hooked.register_forward_hook(lambda module, args, out: None)
    for loss in (Doubled(), Called(), patched, hooked):
        with pytest.raises(
            UnsupportedError, match="It changes the forward of MSELoss, or has hooks"
        ):
            likelihood_of(loss)
    register_likelihood(Doubled)(Huber)
    assert type(likelihood_of(Doubled())) is Huber
    with pytest.raises(UnsupportedError, match=r"Doubled can't be rebuilt from saved options"):
        rebuild_loss(likelihood_of(Doubled()).options())


def test_a_class_or_a_function_can_be_registered() -> None:
    assert register_likelihood(nn.HuberLoss)(Huber) is Huber
    loss = nn.HuberLoss(reduction="sum")
    assert likelihood_of(loss).reduction == "sum"
    assert likelihood_of(loss).name == "HuberLoss"

    @register_likelihood(nn.HuberLoss)
    def _(loss: nn.HuberLoss) -> Likelihood:
        return Huber()

    assert likelihood_of(loss).loss is loss
    with pytest.raises(UnsupportedError, match=r"HuberLoss\(reduction='none'\)"):
        likelihood_of(nn.HuberLoss(reduction="none"))


def test_a_likelihood_is_a_loss_by_itself() -> None:
    huber = Huber(reduction="sum")
    assert likelihood_of(huber) is huber
    assert huber.reduction == "sum"
    with pytest.raises(UnsupportedError, match=r"Huber\(reduction='none'\)"):
        likelihood_of(Huber(reduction="none"))


def test_a_loss_without_reduction_is_a_mean() -> None:
    class Plain:
        def __call__(self, f: Tensor, y: Tensor) -> Tensor:
            return functional.huber_loss(f, y)

    register_likelihood(Plain)(Huber)
    assert likelihood_of(Plain()).reduction == "mean"


def test_defaults_of_a_convex_loss() -> None:
    huber = Huber()
    F = torch.tensor([[[0.5, 3.0], [0.0, 0.0]]])
    Y = torch.zeros(1, 2, 2)
    expected = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]])
    B = huber.hessian_root(F, Y)
    torch.testing.assert_close(torch.einsum("knrc,knrd->nrcd", B, B), expected)
    torch.testing.assert_close(torch.stack(list(huber.hessian_root_columns(F, Y))), B)
    torch.testing.assert_close(torch.stack([*huber.hessian_root_columns(F, Y)]), B)
    assert huber.count(F, Y) == 4
    assert huber.scale(F, Y).shape == (1, 2, 1)


def test_products_of_a_loss_that_is_not_convex() -> None:
    class Sine(Likelihood):
        def nll(self, F: Tensor, Y: Tensor) -> Tensor:
            return (F - Y).sin().sum(-1)

    F, Y = torch.tensor([[[1.0, -0.5]]]), torch.zeros(1, 1, 2)
    torch.testing.assert_close(Sine().hessian_product(F, Y, torch.ones(1, 1, 2)), -F.sin())
