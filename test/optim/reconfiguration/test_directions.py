"""Directions are those of dense algebra, in every mode and with every solver; the optimizer takes
them.
"""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from curvlinops_plus.errors import CurvatureWarning, NumericsError
from curvlinops_plus.optim import StochasticReconfiguration, fisher_inverse
from curvlinops_plus.optim import stochastic_reconfiguration as sr
from curvlinops_plus.optim.reconfiguration.damped_solve import smoothed_pseudo_inverse
from curvlinops_plus.optim.reconfiguration.amplitude import LogAmplitude
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
    rbm,
    real_net,
)

problems = pytest.mark.parametrize("name", PROBLEMS)
LAMBDA = 1e-2
MODES: tuple[Any, ...] = ("lazy", "dense", "kernel", "auto")
WAYS = [
    ("lazy", "cg"),
    *((mode, solver) for mode in ("dense", "kernel") for solver in ("cholesky", "cg")),
]


def exact(
    problem: Problem,
    damping: float = LAMBDA,
    weights: Tensor | None = None,
    diagonal_shift: float = 0.0,
    momentum: float = 0.0,
    phi: Any = 0.0,
) -> Tensor:
    """`(S + M)⁻¹ (Ō* ε̄ + μ M φ)` with `M = λ + ε diag(S)`: SPRING's minimisation, in the space of
    parameters.
    """
    O, target = dense(problem, weights)
    S = O.T @ O
    M = damping * torch.eye(len(S), dtype=F64) + diagonal_shift * torch.diag(S.diagonal())
    return torch.linalg.solve(
        S + M, O.T @ target + momentum * M @ (phi + torch.zeros(len(S), dtype=F64))
    )


@problems
@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_every_way_gives_the_direction(name: str, mode: str, solver: Any) -> None:
    """Of each amplitude; with other further options in each case."""
    problem, number = (
        PROBLEMS[name](),
        len(WAYS) * [*PROBLEMS].index(name) + WAYS.index((mode, solver)),
    )
    psi, O = LogAmplitude(problem.log_psi, problem.params, problem.amplitude), dense(problem)[0]
    phi = normal(O.shape[1], seed=4)
    options: dict[str, Any] = {
        "weights": normal(len(problem.samples), seed=7).square() if number % 2 else None
    }
    options |= {"diagonal_shift": 0.05 * (number % 4 == 2), "momentum": 0.9 * (number % 5 < 2)}
    given: dict[str, Any] = {
        "chunk_size": 4 if number % 3 == 1 else None,
        "previous": psi.write(phi),
    }
    given |= {"tol": 1e-14, "max_iter": 2000} if solver == "cg" else {}
    args = (*problem.args, problem.costs, LAMBDA, mode)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*missed", CurvatureWarning
        )  # 1e-14 asks for all there is
        direction, report = sr(
            *args, solver=solver, amplitude=problem.amplitude, **options, **given
        )
    assert close(flat(direction), exact(problem, **options, phi=phi), 1e-9)
    assert type(direction) is type(problem.params)
    assert (report.mode, report.solver) == (mode, solver)
    assert report.residual < 1e-10
    assert (report.iterations is not None) == (solver == "cg")


def test_a_diagonal_shift_without_damping() -> None:
    """A parameter in other units moves by the same amount, in those units; one without effect
    stays.
    """
    x, costs, scale = normal(30, 2), normal(30, seed=1), torch.tensor([1.0, 1e3], dtype=F64)
    one = sr(
        lambda p, x: x @ p[0], [normal(2), normal(3)], x, costs, 0.0, diagonal_shift=0.1
    ).direction
    other = sr(
        lambda p, x: x @ (p[0] * scale), [normal(2)], x, costs, 0.0, diagonal_shift=0.1
    ).direction
    assert close(other[0] * scale, one[0])
    assert not bool(one[1].any())


@pytest.mark.parametrize("amplitude", ["real", "complex", "holomorphic"])
def test_half_of_the_gradient_of_an_energy(amplitude: Any) -> None:
    """The convention: with |ψ|² enumerated, `δ = (S + λ)⁻¹ ∇⟨E⟩ / 2`, the gradient by autodiff of
    the quotient.
    """
    H = normal(9, 9, seed=3, dtype=F64 if amplitude == "real" else C128)
    H, problem = H + H.mH, real_net(9, 6) if amplitude == "real" else complex_rbm(9, amplitude)
    params = {name: p.detach().clone().requires_grad_() for name, p in problem.params.items()}
    log_psi: Any = problem.log_psi
    if isinstance(log_psi, nn.Module):
        log_psi = lambda params, x: torch.func.functional_call(problem.log_psi, params, (x,))  # noqa: E731
    psi = log_psi(params, problem.samples).exp()
    energy = (psi.conj() @ H @ psi / (psi.conj() @ psi)).real
    gradient = dict(zip(params, torch.autograd.grad(energy, list(params.values()))))
    local, weights = ((H @ psi) / psi).detach(), psi.detach().abs().square()
    direction, _ = sr(
        log_psi, params, problem.samples, local, LAMBDA, amplitude=amplitude, weights=weights
    )
    inverse = fisher_inverse(log_psi, params, LAMBDA, mode="dense", amplitude=amplitude)
    assert close(flat(inverse(gradient, problem.samples, weights)), 2 * flat(direction))


@problems
def test_fisher_inverse_in_every_mode(name: str) -> None:
    problem = PROBLEMS[name]()
    O, _ = dense(problem)
    g = normal(O.shape[1], seed=6)
    expected = torch.linalg.solve(O.T @ O + LAMBDA * torch.eye(len(g), dtype=F64), g)
    psi = LogAmplitude(problem.log_psi, problem.params, problem.amplitude)
    for mode in MODES:
        inverse: Any = fisher_inverse(
            problem.log_psi, problem.params, LAMBDA, mode=mode, amplitude=problem.amplitude
        )
        assert inverse.report is None
        assert close(inverse(g, problem.samples), expected)  # flat in, flat out
        found = inverse(psi.write(g), problem.samples)
        assert type(found) is type(problem.params)
        assert close(flat(found), expected)
        assert inverse.report.residual < 1e-10


def test_fisher_inverse_reads_parameters_anew() -> None:
    """Without iterations the answer is the gradient, as in vmcnet."""
    problem, g = real_net(9, 3), normal(19, seed=6)
    inverse = fisher_inverse(problem.log_psi, problem.params)
    before = inverse(g, problem.samples)
    with torch.no_grad():
        problem.params["first.weight"].mul_(2)
    assert not close(inverse(g, problem.samples), before, 1e-3)
    assert close(
        inverse(g, problem.samples),
        fisher_inverse(problem.log_psi, problem.params)(g, problem.samples),
    )
    with pytest.warns(CurvatureWarning, match="iteration limit 0"):
        assert close(
            fisher_inverse(problem.log_psi, None, max_iter=0)(g, problem.samples), g, 1e-14
        )


@pytest.mark.parametrize(("n", "width", "mode"), [(9, 6, "kernel"), (60, 4, "dense")])
def test_auto_by_sizes(n: int, width: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = real_net(n, width)

    def chosen(solver: Any = None) -> str:
        return sr(*problem.args, problem.costs, LAMBDA, solver=solver).report.mode

    assert (chosen(), chosen("cg")) == (mode, mode)
    for limit in ("_LARGEST", "_STORED_BYTES"):
        monkeypatch.setattr(f"curvlinops_plus.optim.reconfiguration.damped_solve.{limit}", 5)
        assert (chosen(), chosen("cholesky")) == ("lazy", "dense")
        monkeypatch.undo()
    assert (
        sr(*problem.args, problem.costs, LAMBDA, "lazy").report.iterations <= n + 2
    )  # no more than samples


def test_no_damping_with_enough_samples() -> None:
    problem = complex_rbm(80, "complex")
    for mode, solver in (("dense", "cholesky"), ("dense", "cg"), ("lazy", "cg"), ("auto", None)):
        args = (*problem.args, problem.costs, 0.0, mode)
        direction, report = sr(*args, solver=solver, amplitude="complex")
        assert close(flat(direction), exact(problem, 0.0), 1e-6 if mode == "lazy" else 1e-8)
        assert (report.mode, report.solver) == (
            mode if mode != "auto" else "dense",
            "cg" if solver == "cg" else "pinv",
        )
        if solver != "cg":
            O, _ = dense(problem)
            assert (report.rank, report.condition) == (
                O.shape[1],
                pytest.approx(float(torch.linalg.cond(O)) ** 2),
            )


def testsmoothed_pseudo_inverse() -> None:
    """By definition; in any basis, far from the cut it is the inverse; and where Cholesky fails."""
    cut, b, Q = 5 * torch.finfo(F64).eps, normal(5, seed=1), torch.linalg.qr(normal(5, 5)).Q
    values = torch.tensor([1.0, 0.5, 2 * cut, 0.1 * cut, -0.5 * cut], dtype=F64)
    expected = torch.tensor([1.0, 2.0, 1 / (2 * cut) / (1 + 2.0**-6), 0.0, 0.0], dtype=F64)
    x, rank, _ = smoothed_pseudo_inverse(torch.diag(values), b, 0.0)
    assert rank == 3
    assert close(x / expected.clamp(min=1), b * (expected > 0), 1e-12)
    M = Q @ torch.diag(torch.tensor([1.0, 0.7, 0.5, 0.2, 0.1], dtype=F64)) @ Q.T
    x, rank, condition = smoothed_pseudo_inverse(M, b, 0.3)
    assert close(x, torch.linalg.solve(M + 0.3 * torch.eye(5, dtype=F64), b), 1e-12)
    assert (rank, condition) == (5, pytest.approx(1.3 / 0.4))
    x, costs = normal(30, 4, dtype=torch.float32), normal(30, seed=1, dtype=torch.float32)
    x, costs = torch.cat([x, x]), torch.cat([costs, costs])  # a kernel of half the rank
    with pytest.warns(
        CurvatureWarning,
        match=r"the kernel \[60, 60\] with damping 1.0e-12 is not positive definite",
    ):
        direction, report = sr(Net(6, torch.float32), None, x, costs, 1e-12, "kernel")
    assert (report.solver, report.rank < 60, report.condition > 1e3) == ("pinv", True, True)
    assert all(bool(torch.isfinite(d).all()) for d in direction)


@pytest.mark.parametrize("mode", ["lazy", "dense", "kernel"])
def test_float32(mode: Any) -> None:
    """Large energies are centred before they are rounded."""
    net, x, costs = Net(6, torch.float32), normal(12, 4), normal(12, seed=5)
    expected = sr(Net(6), None, x, costs, LAMBDA).direction
    for shift in (0.0, 2.0**30):
        found, report = sr(net, None, x.float(), costs + shift, LAMBDA, mode)
        assert all(d.dtype == torch.float32 for d in found)
        assert all(close(d.double(), e, 2e-3) for d, e in zip(found, expected))
        assert report.residual < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_costs(mode: Any) -> None:
    """Equal ones give no direction; of any number type; a function of the parameters alone changes
    nothing.
    """
    problem, other = real_net(9, 6), complex_rbm(12, "complex")
    direction, report = sr(*problem.args, torch.full((9,), -2.5), mode=mode)
    assert not any(bool(d.any()) for d in direction.values())
    assert report.residual == 0
    costs = problem.costs.round()
    expected = flat(sr(*problem.args, costs, mode=mode).direction)
    for given in (costs.long(), costs.numpy(), costs + 0.3j):
        assert close(flat(sr(*problem.args, given, mode=mode).direction), expected)

    def log_psi(params: Any, x: Tensor) -> Tensor:
        return other.log_psi(params, x) + 3j * params["a"].sum() + params["W"].abs().square().sum()

    for costs in (other.costs, other.costs.real, other.costs.real + 0j):
        found = sr(
            log_psi, other.params, other.samples, costs, LAMBDA, mode, amplitude="complex"
        ).direction
        expected = sr(*other.args, costs + 0j, LAMBDA, "dense", amplitude="complex").direction
        assert close(flat(found), flat(expected))


# ----------------------------------------------------------------------------------------- refusals
NET = real_net(9, 6)
X, E = NET.samples, NET.costs
ARGS, ONES, INF = (*NET.args, E), torch.ones(4, dtype=F64), float("inf")


def test_lazy_says_when_it_did_not_get_there() -> None:
    problem = real_net(60, 4)
    for options, words in (
        ({}, "cg in mode 'lazy' ended at a .*: iteration limit 2"),
        ({"tol": 1e-14}, "CG missed"),
    ):
        with pytest.warns(CurvatureWarning, match=words):
            sr(*problem.args, problem.costs, 1e-6, "lazy", max_iter=2, **options)


# ---------------------------------------------------------------------------------------- optimizer
def batches(n: int = 9) -> list[tuple[Tensor, Tensor]]:
    return [(normal(n, 4, seed=100 + k), normal(n, seed=200 + k)) for k in range(12)]


@problems
def test_steps(name: str) -> None:
    """Directions times the learning rate, with schedules of it and of the damping, and SPRING's
    momentum.
    """
    problem, previous, seen = PROBLEMS[name](), None, []
    lr, momentum = 0.3, 0.0 if name.startswith("module") else 0.6
    psi = LogAmplitude(problem.log_psi, problem.params, problem.amplitude)
    values = {key: p.detach().clone() for key, p in psi.params.items()}

    def damping(step: int) -> float:
        seen.append(step)
        return 1e-2 * 0.5**step

    sro = StochasticReconfiguration(
        problem.log_psi, problem.params, lr, damping, momentum, amplitude=problem.amplitude
    )
    scheduler = ExponentialLR(sro, gamma=0.5)
    for k in range(3):
        given = (*problem.args, problem.costs * (k + 1), 1e-2 * 0.5**k)
        previous, _ = sr(*given, momentum=momentum, previous=previous, amplitude=problem.amplitude)
        for key, d in zip(
            values, previous.values() if isinstance(previous, dict) else previous, strict=True
        ):
            values[key] -= lr * 0.5**k * d
        mean = sro.step(problem.samples, problem.costs * (k + 1))
        scheduler.step()
        assert close(flat(problem.params), flat(values))
        assert close(mean, (problem.costs * (k + 1)).mean())
    assert seen == [0, 0, 1, 2]  # once when it was made
    assert sro.report is not None
    assert sro.report.residual < 1e-10


@pytest.mark.parametrize("diagonal_shift", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["lazy", "dense", "kernel"])
@pytest.mark.parametrize("norm", ["euclidean", "fisher"])
def test_norm_constraint(norm: Any, mode: Any, diagonal_shift: float) -> None:
    """`|δ|²`, or `|Ō δ|² + λ |δ|²`, of the step; longer ones alone are shortened."""
    problem, limit = real_net(9, 6), 1e-4
    O, _ = dense(problem)
    M = (
        O.T @ O
        + 1e-3 * torch.eye(37, dtype=F64)
        + diagonal_shift * torch.diag((O.T @ O).diagonal())
    )
    metric, ends, start = (
        torch.eye(37, dtype=F64) if norm == "euclidean" else M,
        [],
        flat(problem.params).clone(),
    )
    for bound in (limit, 1e6, None):
        each = real_net(9, 6)
        options = {
            "lr": 0.5,
            "mode": mode,
            "norm": norm,
            "diagonal_shift": diagonal_shift,
            "norm_constraint": bound,
        }
        StochasticReconfiguration(each.log_psi, each.params, **options).step(
            each.samples, each.costs
        )
        ends.append(flat(each.params))
    step = ends[0] - start
    assert float(step @ metric @ step) == pytest.approx(limit, rel=1e-9)
    assert torch.equal(ends[1], ends[2])


@pytest.mark.parametrize("kind", [torch.bfloat16, C128])
def test_resumes_bit_for_bit(kind: torch.dtype) -> None:
    def made() -> tuple[Any, StochasticReconfiguration]:
        params: Any = {
            "a": normal(4, seed=1, dtype=kind),
            "W": normal(4, 3, seed=2, dtype=kind),
            "b": normal(3),
        }
        net = rbm if kind is C128 else Net(6, kind)
        params = params if kind is C128 else dict(net.named_parameters())
        options: dict[str, Any] = {
            "lr": 0.1,
            "damping": lambda step: 1e-2 * 0.9**step,
            "momentum": 0.9,
        }
        options |= {"norm_constraint": 1e-2, "amplitude": "complex" if kind is C128 else "real"}
        return params, StochasticReconfiguration(net, params, **options)

    data = [(x if kind is C128 else x.to(kind), costs) for x, costs in batches()]
    params, sro = made()
    for x, costs in data[:5]:
        sro.step(x, costs)
    file = io.BytesIO()
    torch.save([params, sro.state_dict()], file)
    file.seek(0)
    stored, state = torch.load(file, weights_only=True)
    others, resumed = made()
    with torch.no_grad():
        for name, p in others.items():
            p.copy_(stored[name])
    resumed.load_state_dict(state)
    for x, costs in data[5:9]:
        sro.step(x, costs)
        resumed.step(x, costs)
    assert all(map(torch.equal, params.values(), others.values()))


def test_what_does_not_change() -> None:
    """Parameters that were not given, gradients; and all if a step fails."""
    net = Net(6)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.decay.grad = torch.ones((), dtype=F64)
    sro, (x, costs) = StochasticReconfiguration(net, [net.first.weight], momentum=0.5), batches()[0]
    sro.step(x, costs)
    assert [name for name, p in net.named_parameters() if not torch.equal(p, before[name])] == [
        "first.weight"
    ]
    assert net.first.weight.grad is None
    assert float(net.decay.grad) == 1
    moved, state = net.first.weight.detach().clone(), copy.deepcopy(sro.state_dict())
    with pytest.raises(
        NumericsError, match=r"local_costs is NaN or infinite for 1 of 9 samples \(3\)"
    ):
        sro.step(x, costs.index_fill(0, torch.tensor([3]), torch.inf))
    assert torch.equal(net.first.weight, moved)
    assert sro.param_groups[0]["steps"] == state["param_groups"][0]["steps"]
    assert torch.equal(sro.state_dict()["state"][0]["previous"], state["state"][0]["previous"])
