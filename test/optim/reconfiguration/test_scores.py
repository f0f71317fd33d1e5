"""`S` and `Ō` are those of their definitions: for all kinds of amplitudes, in all
representations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus.linalg import Structure
from curvlinops_plus.optim import CenteredFisherLinearOperator, stochastic_reconfiguration
from curvlinops_plus.optim.reconfiguration.scores import (
    Ensemble,
    LogAmplitude,
    Scores,
    recorded_kernel,
)
from test.helpers import seeded
from test.optim.reconfiguration.amplitudes import (
    C128,
    F64,
    PROBLEMS,
    Net,
    Problem,
    close,
    complex_rbm,
    dense,
    flat,
    normal,
    real_net,
    tensors,
)

problems = pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)


def fisher(problem: Problem, **options: Any) -> CenteredFisherLinearOperator:
    return CenteredFisherLinearOperator(*problem.args, amplitude=problem.amplitude, **options)


def ensemble(problem: Problem, **options: Any) -> Ensemble:
    return Ensemble(
        LogAmplitude(problem.log_psi, problem.params, problem.amplitude), problem.samples, **options
    )


@pytest.mark.one_in(2)
@problems
@pytest.mark.parametrize("weighted", [False, True])
def test_covariance_by_definition(make: Callable[[], Problem], weighted: bool) -> None:
    """With the parameters of when it was made, whatever becomes of these; and derivatives of
    quadratic forms.
    """
    problem = make()
    weights = normal(len(problem.samples), seed=7).square() if weighted else None
    O, _ = dense(problem, weights)
    S, v = O.T @ O, normal(O.shape[1], 2, seed=8)
    for options in ({}, {"stored": True}, {"chunk_size": 4}, {"chunk_size": 4, "stored": True}):
        operator = fisher(problem, weights=weights, **options)
        for p in tensors(problem.params):
            p.data.mul_(1.5)
        assert operator.structure == Structure.PSD
        assert close(operator @ v, S @ v)
        assert close(operator.to_dense(), S)
        assert close(operator.diagonal(), S.diagonal())
        assert close(operator.trace, S.trace())
        assert close(v.T @ operator, v.T @ S)
        u = v[:, 0].clone().requires_grad_()
        assert close(torch.autograd.grad(operator.quadratic_form(u), u)[0], 2 * S @ v[:, 0])
        for p in tensors(problem.params):
            p.data.div_(1.5)


@problems
@pytest.mark.parametrize("weighted", [False, True])
def test_scores_and_their_adjoint(make: Callable[[], Problem], weighted: bool) -> None:
    problem = make()
    weights = normal(len(problem.samples), seed=7).square() if weighted else None
    O, _ = dense(problem, weights)
    for stored in (False, True):
        scores = Scores(ensemble(problem, weights=weights), stored)
        assert close(scores.to_dense(), O)
        u = normal(len(O), 2, seed=8)
        assert close(scores.T @ u, O.T @ u)
        assert close(scores.kernel(), O @ O.T)


def test_samples_may_be_trees() -> None:
    problem = real_net(6, 3)
    x = problem.samples

    def log_psi(params: Any, samples: Any) -> Tensor:
        return torch.func.functional_call(
            problem.log_psi, params, (samples["x"] + samples["more"][0],)
        )

    S = CenteredFisherLinearOperator(
        log_psi, problem.params, {"x": x - 1, "more": (torch.ones_like(x),)}, chunk_size=4
    )
    assert close(S.to_dense(), fisher(problem).to_dense())
    assert close(
        S @ torch.ones(S.shape[1], dtype=F64), fisher(problem) @ torch.ones(S.shape[1], dtype=F64)
    )


def test_a_function_that_vmap_refuses() -> None:
    def log_psi(params: list[Tensor], x: Tensor) -> Tensor:
        out = [params[0] * row.sum() if row[0] > 0 else params[1] * row[1] ** 2 for row in x]
        return torch.stack(out)

    params, x = [torch.tensor(0.5, dtype=F64), torch.tensor(2.0, dtype=F64)], normal(7, 3)
    J = torch.stack(
        [torch.where(x[:, 0] > 0, x.sum(1), 0.0), torch.where(x[:, 0] > 0, 0.0, x[:, 1] ** 2)], 1
    )
    centred = J - J.mean(0)
    S = CenteredFisherLinearOperator(log_psi, params, x, stored=True)
    assert close(S.to_dense(), centred.T @ centred / 7)


def test_parameters_that_do_nothing() -> None:
    params = [torch.ones(3, dtype=F64), torch.tensor(1.0, dtype=F64)]
    x = normal(5)
    for stored in (False, True):
        S = CenteredFisherLinearOperator(lambda p, x: p[1] * x, params, x, stored=stored)
        assert close(
            S.to_dense(), torch.diag(torch.tensor([0, 0, 0, float(x.var(correction=0))], dtype=F64))
        )
        assert close(S @ torch.ones(4, dtype=F64), S.to_dense() @ torch.ones(4, dtype=F64))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.conv = nn.Embedding(3, 4), nn.Conv1d(4, 6, 2, groups=2)
        self.norm, self.head, self.out = nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 1)
        self.to(F64)
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(0.5 * normal(*p.shape, seed=k))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(self.embedding(x).movedim(1, 2))).movedim(1, 2)
        return self.out(torch.relu_(self.head(self.norm(h)).sum(1)))


class Sneaky(Layered):
    """A norm that is not what it says when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eps = 1.0
        out = super().forward(x)
        self.norm.eps = 1e-5
        return out


@pytest.mark.parametrize("make", [Layered, Sneaky, lambda: Net(5)])
def test_kernel_from_layers(make: Callable[[], nn.Module]) -> None:
    """It is checked against autograd."""
    net = make()
    x = torch.randint(0, 3, (9, 5), generator=seeded(1))
    e = Ensemble(LogAmplitude(net, None), normal(9, 4) if isinstance(net, Net) else x)
    J = torch.cat([J for _, J in e.jacobians()])[:, 0]
    recorded = recorded_kernel(e)
    assert isinstance(net, Sneaky) if recorded is None else close(recorded, J @ J.T, 1e-10)
    assert close(Scores(e, False).kernel(), Scores(e, True).kernel())


def test_nothing_of_the_users_changes() -> None:
    net = (
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 1))
        .double()
        .eval()
    )
    net[0].weight.requires_grad_(False)
    net[4].weight.grad = torch.ones_like(net[4].weight)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    random, params = torch.get_rng_state(), list(net.parameters())
    e = Ensemble(LogAmplitude(net, params), normal(7, 4))
    Scores(e, False).kernel()
    Scores(e, True).covariance()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert [p.requires_grad for p in params] == [False] + 5 * [True]
    assert [p.grad is not None for p in params] == [False] * 4 + [True, False]
    assert not any(m._forward_hooks for m in net.modules())


def test_every_device(device: torch.device) -> None:
    net, x, costs = Net(5), normal(9, 4), normal(9, seed=1)
    expected = stochastic_reconfiguration(net, None, x, costs).direction
    moved = Net(5).to(device)
    for mode in ("lazy", "dense", "kernel"):
        found, _ = stochastic_reconfiguration(moved, None, x, costs, mode=mode, chunk_size=4)
        assert all(close(d.cpu(), e) for d, e in zip(found, expected))
        assert found[0].device.type == device.type
    problem = complex_rbm(9, "holomorphic")
    params = {name: p.to(device) for name, p in problem.params.items()}
    S = CenteredFisherLinearOperator(
        problem.log_psi, params, problem.samples.to(device), amplitude="holomorphic"
    )
    assert close(S.to_dense().cpu(), fisher(problem).to_dense())


def test_holomorphic_is_the_complex_matrix() -> None:
    """Also of lists and dicts of complex tensors."""
    problem = complex_rbm(12, "holomorphic")
    J = dense(problem)[0].view(12, 2, -1, 2)
    complex_O = torch.complex(J[:, 0, :, 0], -J[:, 0, :, 1])  # f' = ∂u/∂x - i ∂u/∂y
    v = [normal(*p.shape, seed=k, dtype=C128) for k, p in enumerate(problem.params.values())]
    expected = complex_O.mH @ (complex_O @ torch.cat([t.flatten() for t in v]))
    for stored in (False, True):
        operator = fisher(problem, stored=stored)
        named = operator @ dict(zip(problem.params, v, strict=True))
        assert list(named) == list(problem.params)
        assert close(flat(named), torch.view_as_real(expected).flatten())
        assert close(
            torch.cat([t.flatten() for t in operator @ [2j * t for t in v]]), 2j * expected
        )
        real = operator @ [
            torch.view_as_real(torch.stack([t, 2j * t], -1)).movedim(-1, t.ndim) for t in v
        ]
        assert close(
            torch.cat([t[..., 0, 1].flatten() for t in real]), (2j * expected).real
        )  # real vectors stay real
