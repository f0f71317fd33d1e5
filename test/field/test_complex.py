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
from curvlinops_plus.optim import CenteredFisherLinearOperator, fisher_inverse
from test.helpers import normal

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


# ----------------------------------------------------------- complex vectors of real parameters
class Amplitude(nn.Module):
    """A complex amplitude with real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(self.last(self.first(x).tanh()))


def of_amplitude() -> tuple[CenteredFisherLinearOperator, dict[str, Tensor], Tensor]:
    """The matrix, a complex vector by names, and the product."""
    torch.manual_seed(0)
    psi, x = Amplitude().double(), normal(9, 3)
    rows = []
    for n in range(9):
        out = torch.view_as_real(psi(x[n : n + 1]))[0]
        parts = [torch.autograd.grad(p, [*psi.parameters()], retain_graph=True) for p in out]
        re, im = (torch.cat([t.flatten() for t in part]) for part in parts)
        rows.append(torch.complex(re, im))
    O = torch.stack(rows) - torch.stack(rows).mean(0)
    S = (O.mH @ O).real / 9
    v = {
        name: torch.complex(normal(*p.shape, seed=1), normal(*p.shape, seed=2))
        for name, p in psi.named_parameters()
    }
    flat = torch.cat([t.flatten() for t in v.values()])
    operator = CenteredFisherLinearOperator(psi, None, x, amplitude="complex")
    return operator, v, torch.complex(S @ flat.real, S @ flat.imag)


@pytest.mark.parametrize("form", ["dict", "list", "flat", "columns"])
def test_a_real_matrix_multiplies_complex_vectors(form: str) -> None:
    S, v, expected = of_amplitude()
    flat = torch.cat([t.flatten() for t in v.values()])
    if form == "dict":
        found = torch.cat([t.flatten() for t in (S @ v).values()])
    elif form == "list":
        found = torch.cat([t.flatten() for t in S @ [*v.values()]])
    elif form == "flat":
        found = S @ flat
    else:
        found = (S @ torch.stack([flat, 2j * flat], 1))[:, 1] / 2j
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", ["dict", "list", "flat"])
def test_complex_gradients_of_real_parameters_are_told(form: str) -> None:
    """The direction is that of the real part, which nobody takes silently."""
    _, v, _ = of_amplitude()
    flat = torch.cat([t.flatten() for t in v.values()])
    gradient = {"dict": v, "list": [*v.values()], "flat": flat}[form]
    direction = fisher_inverse(Amplitude().double(), None, amplitude="complex")
    with pytest.raises(ValueError, match="Expected real numbers for real parameters"):
        direction(gradient, normal(9, 3))
