"""Models with complex parameters beside real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    GGNLinearOperator,
    Hessian,
    KFACOptimizer,
    curvature,
)

LOSS = nn.MSELoss()


class Spectral(nn.Module):
    """A convolution along the last axis: a product with the lowest frequencies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:  # [N, width, T]
        low = torch.fft.rfft(x)[..., :3]
        return torch.fft.irfft(torch.einsum("nit,oit->not", low, self.weight), n=x.shape[-1])


class Operator(nn.Module):
    """Lift, spectral convolution, projection at each of 8 places."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.spectral, self.skip, self.project = (
            nn.Linear(1, 3),
            Spectral(3),
            nn.Conv1d(3, 3, 1),
            nn.Linear(3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 1]
        h = self.lift(x).mT
        return self.project(torch.tanh(self.spectral(h) + self.skip(h)).mT)


class Phase(nn.Module):
    """A complex parameter of the model itself, and a real layer."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.layer = nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.phase).abs().square()


MODELS: dict[str, Callable[[], nn.Module]] = {"spectral": Operator, "phase": Phase}


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            module.double()
    X = torch.randn(5, 8, 1).double()
    return model, X, torch.randn_like(model(X).detach())


@pytest.mark.parametrize(
    "make", [EmpiricalRisk, GGNLinearOperator, KFACOptimizer], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(("name", "key"), [("spectral", "spectral.weight"), ("phase", "phase")])
def test_complex_parameters_are_named(make: Callable[..., object], name: str, key: str) -> None:
    model, X, y = case(name)
    arguments = {
        EmpiricalRisk: (model, LOSS, [(X, y)]),
        GGNLinearOperator: (model, LOSS, list(model.parameters()), [(X, y)]),
        KFACOptimizer: (model, LOSS),
    }[make]  # type: ignore[index]
    words = rf"The parameters \['{key}'\] are torch.complex128; only real .* params=\[p for p in model.*is_floating_point"
    with pytest.raises(ValueError, match=words):
        make(*arguments)


@pytest.mark.parametrize("name", MODELS)
def test_the_real_ones_alone_work(name: str) -> None:
    """As the message says; the right values are rows of the Jacobian, and second derivatives, by
    `torch.autograd`.
    """
    model, X, y = case(name)
    params = [p for p in model.parameters() if p.is_floating_point()]
    risk = EmpiricalRisk(model, LOSS, [(X[:2], y[:2]), (X[2:], y[2:])], params)

    def flat(tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([t.flatten() for t in tensors])

    J = torch.stack(
        [flat(torch.autograd.grad(f, params, retain_graph=True)) for f in model(X).flatten()]
    )
    G = 2 * J.T @ J / len(J)
    gradient = flat(torch.autograd.grad(LOSS(model(X), y), params, create_graph=True))
    H = torch.stack(
        [
            flat(torch.autograd.grad(g, params, retain_graph=True, materialize_grads=True))
            for g in gradient
        ]
    )
    torch.testing.assert_close(curvature(risk, DiagonalBlock).diagonal(), G.diagonal())
    torch.testing.assert_close(GGN(risk).to_dense(), G)
    torch.testing.assert_close(Hessian(risk).to_dense(), H)
    K = curvature(risk, FullBlock)
    at = 0
    for size in [block.shape[0] for block in K.blocks.values()]:
        torch.testing.assert_close(
            K.to_dense()[at : at + size, at : at + size], G[at : at + size, at : at + size]
        )
        at += size


def test_training_with_the_real_ones() -> None:
    model, X, y = case("spectral")
    before = model.spectral.weight.detach().clone()  # type: ignore[union-attr, operator]
    optimizer = KFACOptimizer(
        model, LOSS, params=[p for p in model.parameters() if p.is_floating_point()]
    )
    values = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = LOSS(model(X), y)
        loss.backward()
        optimizer.step()
        values.append(float(loss))
    assert values[-1] < values[0]
    assert torch.equal(model.spectral.weight, before)  # type: ignore[union-attr, arg-type]
