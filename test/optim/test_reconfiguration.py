"""Directions are those of dense algebra, in every mode and with every solver."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus.errors import CurvatureWarning, NumericsError, SingularMatrixError, UnsupportedError
from curvlinops_plus.optim import fisher_inverse, stochastic_reconfiguration
from curvlinops_plus.optim.reconfiguration.amplitude import LogAmplitude
from curvlinops_plus.optim.reconfiguration.damped_solve import DampedSystem, _smoothed_pseudo_inverse
from curvlinops_plus.optim.reconfiguration.ensemble import Ensemble

from .amplitudes import C128, F64, PROBLEMS, Net, Problem, close, complex_rbm, dense, flat, normal, real_net

problems = pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
LAMBDA = 1e-2
WAYS = [
    ("lazy", "cg"),
    ("lazy", "lsmr"),
    ("dense", "cholesky"),
    ("dense", "eigh"),
    ("dense", "cg"),
    ("dense", "lsmr"),
    ("kernel", "cholesky"),
    ("kernel", "eigh"),
    ("kernel", "cg"),
]
TIGHT = {"tol": 1e-14, "max_iter": 2000}


def reconfigure(problem: Problem, **options: Any) -> Any:
    args = (*problem.args, problem.costs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*missed", CurvatureWarning)  # 1e-14 asks for all there is
        return stochastic_reconfiguration(*args, amplitude=problem.amplitude, **{"damping": LAMBDA, **options})


def exact(problem: Problem, damping: float = LAMBDA, weights: Tensor | None = None) -> Tensor:
    O, target = dense(problem, weights)
    return torch.linalg.solve(O.T @ O + damping * torch.eye(O.shape[1], dtype=F64), O.T @ target)


@problems
@pytest.mark.parametrize(("mode", "solver"), WAYS)
def test_every_way_gives_the_direction(make: Callable[[], Problem], mode: str, solver: str) -> None:
    problem = make()
    options = TIGHT if solver in ("cg", "lsmr") else {}
    direction, report = reconfigure(problem, mode=mode, solver=solver, **options)
    assert close(flat(direction), exact(problem))
    assert (report.mode, report.solver) == (mode, solver)
    assert report.residual < 1e-10
    assert (report.iterations is not None) == (solver in ("cg", "lsmr"))


@problems
def test_default_tolerance_of_float64(make: Callable[[], Problem]) -> None:
    """Nothing is asked for: lazy agrees with the others to ten digits, without a warning."""
    problem = make()
    args = (*problem.args, problem.costs, LAMBDA)
    found = [flat(stochastic_reconfiguration(*args, mode, amplitude=problem.amplitude)[0]) for mode in MODES]
    assert all(close(direction, exact(problem)) for direction in found)


MODES: tuple[Any, ...] = ("lazy", "dense", "kernel", "auto")


@problems
@pytest.mark.parametrize("mode", ["lazy", "dense", "kernel"])
def test_directions_look_like_parameters(make: Callable[[], Problem], mode: Any) -> None:
    problem = make()
    direction, _ = reconfigure(problem, mode=mode)
    assert type(direction) is type(problem.params)
    pairs = (
        zip(direction.values(), problem.params.values())
        if isinstance(direction, dict)
        else zip(direction, problem.params)
    )
    assert all((d.shape, d.dtype, d.device) == (p.shape, p.dtype, p.device) for d, p in pairs)


def test_holomorphic_in_complex_algebra() -> None:
    """Netket's way: `(O† O + λ)⁻¹ O† ε` with complex matrices."""
    problem = complex_rbm(9, "holomorphic")
    n, costs = 9, problem.costs
    params = [p.clone().requires_grad_() for p in problem.params.values()]
    values = problem.log_psi(dict(zip(problem.params, params)), problem.samples)
    # PyTorch's gradient of a complex output is the conjugate of the derivative.
    rows = [torch.autograd.grad(v, params, torch.ones_like(v), retain_graph=True) for v in values]
    J = torch.stack([torch.cat([g.flatten() for g in row]).conj() for row in rows])
    O, target = (J - J.mean(0)) / n**0.5, (costs - costs.mean()) / n**0.5
    expected = torch.linalg.solve(O.mH @ O + LAMBDA * torch.eye(O.shape[1], dtype=C128), O.mH @ target)
    for mode in MODES:
        direction, _ = reconfigure(problem, mode=mode)
        assert close(torch.cat([d.flatten() for d in direction.values()]), expected)


@problems
@pytest.mark.parametrize("mode", ["lazy", "dense", "kernel"])
def test_spring_is_its_minimization(make: Callable[[], Problem], mode: Any) -> None:
    """Primal: `(S + λ) δ = Ō* ε̄ + λ μ φ`, in the space of parameters, against our dual."""
    problem, mu = make(), 0.9
    O, target = dense(problem)
    P = O.shape[1]
    phi = normal(P, seed=4)
    psi = LogAmplitude(problem.log_psi, problem.params, problem.amplitude)
    primal = torch.linalg.solve(O.T @ O + LAMBDA * torch.eye(P, dtype=F64), O.T @ target + LAMBDA * mu * phi)
    found, _ = reconfigure(problem, mode=mode, momentum=mu, previous=psi.write(phi))
    assert close(flat(found), primal)


def test_spring_on_one_batch_tends_to_a_smaller_damping() -> None:
    problem, mu, direction = real_net(9, 6), 0.7, None
    for _ in range(75):
        direction, _ = reconfigure(problem, mode="kernel", momentum=mu, previous=direction)
    assert close(flat(direction), exact(problem, LAMBDA * (1 - mu)), 1e-9)


@problems
def test_projection_has_no_effect(make: Callable[[], Problem]) -> None:
    problem, weights = make(), normal(len(make().samples), seed=7).square()
    for w in (None, weights):
        expected = exact(problem, weights=w)
        for solver in ("cholesky", "eigh"):
            direction, report = reconfigure(problem, mode="kernel", proj_reg=1.0, solver=solver, weights=w)
            assert close(flat(direction), expected)
            assert report.residual < 1e-10


@problems
@pytest.mark.parametrize("damping", [0.0, 1e-2])
@pytest.mark.parametrize("mode", ["lazy", "dense", "kernel"])
def test_diagonal_shift(make: Callable[[], Problem], mode: Any, damping: float) -> None:
    problem, mu, eps = make(), 0.5, 0.05
    O, target = dense(problem)
    S = O.T @ O
    M = eps * torch.diag(S.diagonal()) + damping * torch.eye(len(S), dtype=F64)
    phi = normal(len(S), seed=4)
    expected = torch.linalg.solve(S + M, O.T @ target + mu * M @ phi)
    psi = LogAmplitude(problem.log_psi, problem.params, problem.amplitude)
    options = {"momentum": mu, "previous": psi.write(phi), "mode": mode}
    direction, _ = reconfigure(problem, damping=damping, diagonal_shift=eps, **options)
    assert close(flat(direction), expected)


def test_diagonal_shift_ignores_the_scales_of_parameters() -> None:
    """A parameter in other units moves by the same amount, in those units."""
    x, costs = normal(30, 2), normal(30, seed=1)
    one = stochastic_reconfiguration(lambda p, x: x @ p[0], [normal(2)], x, costs, 0.0, diagonal_shift=0.1)
    scale = torch.tensor([1.0, 1e3], dtype=F64)
    other = stochastic_reconfiguration(lambda p, x: x @ (p[0] * scale), [normal(2)], x, costs, 0.0, diagonal_shift=0.1)
    assert close(other.direction[0] * scale, one.direction[0])


def test_diagonal_shift_of_a_parameter_that_does_nothing() -> None:
    params = [normal(2), normal(3)]
    found, _ = stochastic_reconfiguration(
        lambda p, x: x @ p[0], params, normal(30, 2), normal(30, seed=1), 0.0, diagonal_shift=0.1
    )
    assert bool((found[1] == 0).all())
    assert bool(torch.isfinite(found[0]).all())


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(PROBLEMS)),
    mode=st.sampled_from(["lazy", "dense", "kernel", "auto"]),
    n=st.integers(2, 25),
    chunk_size=st.one_of(st.none(), st.integers(1, 9)),
    weighted=st.booleans(),
    momentum=st.sampled_from([0.0, 0.5]),
    diagonal_shift=st.sampled_from([0.0, 0.1]),
)
def test_options_combine(
    name: str, mode: Any, n: int, chunk_size: int | None, weighted: bool, momentum: float, diagonal_shift: float
) -> None:
    problem = PROBLEMS[name]()
    problem = Problem(problem.log_psi, problem.params, normal(n, 4, seed=n), problem.amplitude)
    weights = normal(n, seed=7).square() if weighted else None
    O, target = dense(problem, weights)
    S = O.T @ O
    M = LAMBDA * torch.eye(len(S), dtype=F64) + diagonal_shift * torch.diag(S.diagonal())
    phi = normal(len(S), seed=4)
    psi = LogAmplitude(problem.log_psi, problem.params, problem.amplitude)
    options = {"momentum": momentum, "previous": psi.write(phi), "diagonal_shift": diagonal_shift}
    direction, _ = reconfigure(problem, mode=mode, chunk_size=chunk_size, weights=weights, **options)
    assert close(flat(direction), torch.linalg.solve(S + M, O.T @ target + momentum * M @ phi), 1e-9)


def test_half_of_the_gradient_of_an_energy() -> None:
    """The convention: with |ψ|² enumerated, `δ = (S + λ)⁻¹ ∇⟨E⟩ / 2`, the gradient by autodiff of the quotient."""
    H = normal(8, 8, seed=3)
    H = H + H.T
    x, params = normal(8, 2), [normal(2, seed=1).requires_grad_(), normal(2, seed=2).requires_grad_()]

    def log_psi(params: Any, x: Tensor) -> Tensor:
        return (x @ params[0]).sin() - (x @ params[1]).square()

    psi = log_psi(params, x).exp()
    energy = psi @ H @ psi / (psi @ psi)
    gradient = torch.cat(torch.autograd.grad(energy, params))
    local, weights = ((H @ psi) / psi).detach(), psi.detach().square()
    direction, _ = stochastic_reconfiguration(log_psi, params, x, local, LAMBDA, weights=weights)
    inverse = fisher_inverse(log_psi, params, LAMBDA, mode="dense")
    assert close(torch.cat(direction), inverse(gradient / 2, x, weights))


def test_complex_gradient_is_that_of_autograd() -> None:
    """`fisher_inverse` takes `p.grad` of complex parameters, which is twice `Ō* ε̄` for an energy."""
    H = normal(9, 9, seed=3, dtype=C128)
    H = H + H.mH
    for amplitude in ("complex", "holomorphic"):
        problem = complex_rbm(9, amplitude)
        params = {name: p.clone().requires_grad_() for name, p in problem.params.items()}
        psi = problem.log_psi(params, problem.samples).exp()
        energy = (psi.conj() @ H @ psi / (psi.conj() @ psi)).real
        gradient = dict(zip(params, torch.autograd.grad(energy, list(params.values()))))
        local, weights = ((H @ psi) / psi).detach(), psi.detach().abs().square()
        args = (problem.log_psi, params)
        direction, _ = stochastic_reconfiguration(
            *args, problem.samples, local, LAMBDA, amplitude=amplitude, weights=weights
        )
        inverse = fisher_inverse(*args, LAMBDA, mode="dense", amplitude=amplitude)
        natural = inverse(gradient, problem.samples, weights)
        assert close(flat(natural), 2 * flat(direction))


@problems
def test_fisher_inverse_in_every_mode(make: Callable[[], Problem]) -> None:
    problem = make()
    O, _ = dense(problem)
    g = normal(O.shape[1], seed=6)
    expected = torch.linalg.solve(O.T @ O + LAMBDA * torch.eye(len(g), dtype=F64), g)
    psi = LogAmplitude(problem.log_psi, problem.params, problem.amplitude)
    for mode in MODES:
        inverse = fisher_inverse(problem.log_psi, problem.params, LAMBDA, mode=mode, amplitude=problem.amplitude)
        assert inverse.report is None
        assert close(inverse(g, problem.samples), expected)  # flat in, flat out
        found = inverse(psi.write(g), problem.samples)
        assert type(found) is type(problem.params)
        assert close(flat(found), expected)
        assert inverse.report.residual < 1e-10


def test_fisher_inverse_starts_at_the_gradient() -> None:
    """As in vmcnet: without iterations the answer is the gradient."""
    problem, g = real_net(9, 6), normal(37, seed=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        assert close(fisher_inverse(problem.log_psi, None, max_iter=0)(g, problem.samples), g, 1e-14)


def test_fisher_inverse_reads_parameters_anew() -> None:
    problem, g = real_net(9, 3), normal(19, seed=6)
    inverse = fisher_inverse(problem.log_psi, problem.params)
    before = inverse(g, problem.samples)
    with torch.no_grad():
        problem.params["first.weight"].mul_(2)
    assert not close(inverse(g, problem.samples), before, 1e-3)
    assert close(inverse(g, problem.samples), fisher_inverse(problem.log_psi, problem.params)(g, problem.samples))


def test_lazy_needs_no_more_iterations_than_samples() -> None:
    problem = real_net(9, 6)
    _, report = reconfigure(problem, mode="lazy")
    assert report.iterations is not None
    assert report.iterations <= 9 + 2


def test_reports() -> None:
    problem = real_net(9, 6)
    O, _ = dense(problem)
    values = torch.linalg.eigvalsh(O @ O.T)
    condition = float((values[-1] + LAMBDA) / LAMBDA)
    _, eigh = reconfigure(problem, mode="kernel", solver="eigh")
    assert (eigh.rank, eigh.size) == (8, 9)
    assert eigh.condition == pytest.approx(condition)
    _, cholesky = reconfigure(problem, mode="kernel")
    assert (cholesky.rank, cholesky.solver) == (None, "cholesky")
    assert condition / 2 < cholesky.condition <= condition * (1 + 1e-9)
    _, big = reconfigure(problem, mode="dense", solver="eigh")
    assert (big.rank, big.size) == (8, 37)


@pytest.mark.parametrize(
    ("n", "width", "mode"), [(9, 6, "kernel"), (60, 4, "dense")], ids=["more parameters", "more samples"]
)
def test_auto_by_sizes(n: int, width: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = real_net(n, width)
    assert reconfigure(problem).report.mode == mode
    assert reconfigure(problem, solver="lsmr").report.mode == "dense"
    assert reconfigure(problem, solver="cg").report.mode == mode
    monkeypatch.setattr("curvlinops_plus.optim.reconfiguration.damped_solve._LARGEST", 5)
    assert reconfigure(problem).report.mode == "lazy"
    monkeypatch.undo()
    monkeypatch.setattr("curvlinops_plus.optim.reconfiguration.damped_solve._STORED_BYTES", 10)
    assert reconfigure(problem).report.mode == ("kernel" if n == 9 else "lazy")  # layers need no Jacobian
    assert reconfigure(problem, solver="lsmr").report.mode == "lazy"


def test_no_damping_with_enough_samples() -> None:
    problem = complex_rbm(80, "complex")
    for solver in ("cholesky", "eigh", "cg"):
        direction, report = reconfigure(problem, damping=0.0, mode="dense", solver=solver)
        assert close(flat(direction), exact(problem, 0.0), 1e-8)
        assert report.solver == ("cg" if solver == "cg" else "eigh")
    assert close(flat(reconfigure(problem, damping=0.0, mode="lazy")[0]), exact(problem, 0.0), 1e-6)
    assert reconfigure(problem, damping=0.0).report.mode == "dense"


def test_smoothed_pseudo_inverse_where_cholesky_fails() -> None:
    """Float32, and a damping below rounding: an answer that fits the data, and a warning."""
    net = Net(6, torch.float32)
    x = normal(30, 4, dtype=torch.float32)
    costs = normal(30, seed=1, dtype=torch.float32)
    x = torch.cat([x, x])  # a kernel of half the rank
    with pytest.warns(CurvatureWarning, match=r"the kernel \[60, 60\] with damping 1.0e-12 is not positive definite"):
        direction, report = stochastic_reconfiguration(net, None, x, torch.cat([costs, costs]), 1e-12, "kernel")
    assert report.solver == "pinv"
    assert report.rank < 60
    assert report.condition > 1e3
    assert all(bool(torch.isfinite(d).all()) for d in direction)


def test_smoothed_pseudo_inverse_by_definition() -> None:
    Q = torch.linalg.qr(normal(5, 5)).Q
    cut = 5 * torch.finfo(F64).eps
    values = torch.tensor([1.0, 0.5, 2 * cut, 0.1 * cut, -0.5 * cut], dtype=F64)
    expected = torch.tensor([1.0, 2.0, 1 / (2 * cut) / (1 + 2.0**-6), 0.0, 0.0], dtype=F64)
    b = normal(5, seed=1)
    x, rank, condition = _smoothed_pseudo_inverse(Q @ torch.diag(values) @ Q.T, b, 0.0)
    assert rank in (2, 3, 4)  # which of the three small ones are kept is a matter of rounding
    assert condition > 1e14
    x, rank, _ = _smoothed_pseudo_inverse(torch.diag(values), b, 0.0)
    assert rank == 3
    assert close(x / expected.clamp(min=1), b * (expected > 0), 1e-12)


def test_smoothed_pseudo_inverse_of_a_rotated_matrix() -> None:
    """Far from the cut it is the inverse, in any basis; nearer, eigenvalue by eigenvalue."""
    Q, b = torch.linalg.qr(normal(5, 5)).Q, normal(5, seed=1)
    values = torch.tensor([1.0, 0.7, 0.5, 0.2, 0.1], dtype=F64)
    M = Q @ torch.diag(values) @ Q.T
    x, rank, condition = _smoothed_pseudo_inverse(M, b, 0.3)
    assert close(x, torch.linalg.solve(M + 0.3 * torch.eye(5, dtype=F64), b), 1e-12)
    assert rank == 5
    assert condition == pytest.approx(1.3 / 0.4)
    values[4] = 1e-30
    x, rank, _ = _smoothed_pseudo_inverse(Q @ torch.diag(values) @ Q.T, b, 0.0)
    assert rank in (4, 5)  # what rounding makes of a zero may be above the cut, and is smoothed then
    kept = Q[:, :4]
    assert close(kept.T @ x, (kept.T @ b) / values[:4], 1e-12)


@pytest.mark.parametrize("mode", ["lazy", "dense", "kernel"])
def test_float32(mode: Any) -> None:
    net, x = Net(6, torch.float32), normal(12, 4)
    costs = normal(12, seed=5)
    expected = stochastic_reconfiguration(Net(6), None, x, costs, LAMBDA).direction
    found, report = stochastic_reconfiguration(net, None, x.float(), costs, LAMBDA, mode)
    assert all(d.dtype == torch.float32 for d in found)
    assert all(close(d.double(), e, 2e-3) for d, e in zip(found, expected))
    assert report.residual < 1e-4


def test_large_energies_are_centred_before_they_are_rounded() -> None:
    net, x = Net(6, torch.float32), normal(12, 4, dtype=torch.float32)
    costs = normal(12, seed=5)
    small = stochastic_reconfiguration(net, None, x, costs).direction
    large = stochastic_reconfiguration(net, None, x, costs + 2.0**30).direction
    assert all(close(a, b, 1e-4) for a, b in zip(large, small))


def test_equal_costs_give_no_direction() -> None:
    problem = real_net(9, 6)
    for mode in MODES:
        direction, report = stochastic_reconfiguration(*problem.args, torch.full((9,), -2.5), mode=mode)
        assert all(not bool(d.any()) for d in direction.values())
        assert report.residual == 0


def test_costs_of_any_number_type() -> None:
    problem = real_net(9, 6)
    args, expected = problem.args, stochastic_reconfiguration(*problem.args, problem.costs.round()).direction
    for costs in (problem.costs.round().long(), problem.costs.round().numpy(), problem.costs.round() + 0.3j):
        found = stochastic_reconfiguration(*args, costs).direction
        assert close(flat(found), flat(expected))


def test_real_costs_of_a_complex_amplitude() -> None:
    problem = complex_rbm(9, "complex")
    args = problem.args
    one = stochastic_reconfiguration(*args, problem.costs.real, amplitude="complex").direction
    other = stochastic_reconfiguration(*args, problem.costs.real + 0j, amplitude="complex").direction
    assert close(flat(one), flat(other))


def test_adding_a_function_of_the_parameters_changes_nothing() -> None:
    problem = complex_rbm(12, "complex")

    def log_psi(params: Any, x: Tensor) -> Tensor:
        return problem.log_psi(params, x) + 3j * params["a"].sum() + params["W"].abs().square().sum()

    for mode in MODES:
        args = (problem.params, problem.samples, problem.costs, LAMBDA, mode)
        found = stochastic_reconfiguration(log_psi, *args, amplitude="complex").direction
        assert close(flat(found), exact(problem))


def test_inside_inference_mode_and_autocast() -> None:
    problem = real_net(9, 6)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        direction, _ = stochastic_reconfiguration(*problem.args, problem.costs, LAMBDA)
    assert close(flat(direction), exact(problem))


# Words ---------------------------------------------------------------------------------------------------------------


def with_nan(t: Tensor) -> Tensor:
    t = t.clone()
    t[[1, 4]] = torch.nan
    return t


class Clamping(nn.Module):
    """Its gradients are cut where they are long, as in products with long vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.a
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-5.0, 5.0))
        return h.tanh()


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).log_softmax(0)


NET = real_net(9, 6)
X, E = NET.samples, NET.costs
ARGS = (*NET.args, E)
RANDOM = nn.Sequential(nn.Linear(4, 1), nn.Dropout()).double()
NORMED = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (
            ValueError,
            r"at least two samples with a positive weight, got 1 of 1",
            lambda: sr(*NET.args[:2], X[:1], E[:1]),
        ),
        (ValueError, r"at least two samples.*got 0 of 0", lambda: sr(*NET.args[:2], X[:0], E[:0])),
        (ValueError, r"at least two samples.*got 1 of 9", lambda: sr(*ARGS, weights=[1] + 8 * [0])),
        (
            ValueError,
            r"weights that are finite and not negative; 1 of 9 samples \(8\)",
            lambda: sr(*ARGS, weights=[1] * 8 + [-1]),
        ),
        (ValueError, r"Expected 9 real weights, one per sample; got .* shape \[2\]", lambda: sr(*ARGS, weights=[1, 1])),
        (
            NumericsError,
            r"local_costs is NaN or infinite for 2 of 9 samples \(1, 4\).*clip",
            lambda: sr(*NET.args, with_nan(E)),
        ),
        (
            NumericsError,
            r"log ψ is NaN or infinite for 2 of 9 samples \(1, 4\)",
            lambda: sr(*NET.args[:2], with_nan(X), E),
        ),
        (
            NumericsError,
            r"derivatives of log ψ are NaN or infinite for 1 of 3 samples \(5\)",
            lambda: sr(
                lambda p, x: (p[0] * x).sqrt(),
                [torch.ones((), dtype=F64)],
                torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=F64),
                E,
                chunk_size=3,
            ),
        ),
        (
            ValueError,
            r"local_costs of shape \[9\], one for each sample, got \[9, 1\]",
            lambda: sr(*NET.args, E[:, None]),
        ),
        (ValueError, r'mode="kernel" needs a positive damping', lambda: sr(*ARGS, 0.0, "kernel")),
        (
            ValueError,
            r'mode="kernel" needs a positive damping',
            lambda: fisher_inverse(*NET.args[:2], 0.0, mode="kernel"),
        ),
        (
            SingularMatrixError,
            r"S of 37 real parameters is singular: .* 9 samples have rank 8 at most. Add a damping",
            lambda: sr(*ARGS, 0.0),
        ),
        (SingularMatrixError, r"S of 37 real parameters is singular", lambda: sr(*ARGS, 0.0, "lazy")),
        (
            SingularMatrixError,
            r"S is singular: 1 of its 2 eigenvalues count as zero.*Add a damping",
            lambda: sr(lambda p, x: x[:, 0] * (p[0] + p[1]), [torch.ones((), dtype=F64)] * 2, X, E, 0.0),
        ),
        (ValueError, r"damping to be a finite number of at least 0, got -1", lambda: sr(*ARGS, -1)),
        (ValueError, r"damping to be a finite number of at least 0, got nan", lambda: sr(*ARGS, float("nan"))),
        (ValueError, r"momentum to be at least 0 and below 1, got 1.0", lambda: sr(*ARGS, momentum=1.0)),
        (
            ValueError,
            r"mode to be one of \['lazy', 'dense', 'kernel', 'auto'\], got 'qgt'",
            lambda: sr(*ARGS, mode="qgt"),
        ),
        (ValueError, r"solver to be None or one of .* got 'lu'", lambda: sr(*ARGS, solver="lu")),
        (
            ValueError,
            r"solver='eigh' does not go with mode='lazy': take one of \['cg', 'lsmr'\], or mode \['dense', 'kernel'\]",
            lambda: sr(*ARGS, mode="lazy", solver="eigh"),
        ),
        (
            ValueError,
            r'solver="lsmr" solves least-squares problems',
            lambda: fisher_inverse(*NET.args[:2], solver="lsmr"),
        ),
        (
            ValueError,
            r"amplitude to be one of \['real', 'complex', 'holomorphic'\], got 'imaginary'",
            lambda: sr(*ARGS, amplitude="imaginary"),
        ),
        (
            ValueError,
            r'amplitude="holomorphic" needs complex parameters, and .* are real. Use "complex"',
            lambda: sr(*ARGS, amplitude="holomorphic"),
        ),
        (
            ValueError,
            r'amplitude="holomorphic" needs a complex log ψ, and log_psi returned torch.float64',
            lambda: sr(
                lambda p, x: (x @ p[0]).abs(), [torch.ones(4, dtype=C128)], X.to(C128), E, amplitude="holomorphic"
            ),
        ),
        (
            ValueError,
            r"violate the Cauchy-Riemann equations",
            lambda: sr(
                lambda p, x: x.to(C128) @ p[0].conj(), [torch.ones(4, dtype=C128)], X, E, amplitude="holomorphic"
            ),
        ),
        (
            ValueError,
            r"log_psi returned shape \[9, 4\] for 9 samples; expected \[9\] or \[9, 1\]",
            lambda: sr(lambda p, x: x * p[0], [torch.ones(4, dtype=F64)], X, E),
        ),
        (
            ValueError,
            r"log_psi returned a tuple for 9 samples.*return log\|ψ\|",
            lambda: sr(lambda p, x: (x, x), [torch.ones(4)], X, E),
        ),
        (
            TypeError,
            r"log_psi to be a torch.nn.Module, or a function .* got str",
            lambda: sr("psi", [torch.ones(4)], X, E),
        ),
        (
            TypeError,
            r"`params` to be a list, tuple or dict of tensors.*got Tensor",
            lambda: sr(lambda p, x: x @ p, torch.ones(4), X, E),
        ),
        (
            TypeError,
            r"`params` to be a list, tuple or dict of tensors.*got NoneType",
            lambda: sr(lambda p, x: x @ p, None, X, E),
        ),
        (TypeError, r"`params` to be .* got one with other entries", lambda: sr(lambda p, x: x @ p, [1.0], X, E)),
        (TypeError, r"`params` to be .* got an empty one", lambda: sr(lambda p, x: x @ p, [], X, E)),
        (
            ValueError,
            r"real or complex parameters; '0' is of torch.int64",
            lambda: sr(lambda p, x: x @ p, [torch.ones(4, dtype=torch.long)], X, E),
        ),
        (ValueError, r"is not a parameter of the model", lambda: sr(NET.log_psi, [torch.ones(4)], X, E)),
        (
            ValueError,
            r"samples as a tensor, or a tuple.* got \[\[9, 4\], \[3\]\]",
            lambda: sr(*NET.args[:2], (X, torch.ones(3)), E),
        ),
        (ValueError, r"chunk_size to be a positive whole number or None, got 0", lambda: sr(*ARGS, chunk_size=0)),
        (UnsupportedError, r"log_psi draws random numbers", lambda: sr(RANDOM, None, X, E)),
        (UnsupportedError, r"can't be called with one sample.*Batch norm", lambda: sr(NORMED, None, X, E)),
        (UnsupportedError, r"backward pass through the model is not linear", lambda: sr(Clamping(), None, X, E)),
        (UnsupportedError, r"must depend on one sample only", lambda: sr(Mixing(), None, X, E)),
        (
            ValueError,
            r"previous: .*expected shape",
            lambda: sr(*ARGS, momentum=0.5, previous={n: torch.ones(2) for n in NET.params}),
        ),
        (ValueError, r"grad: .*missing \['decay'", lambda: fisher_inverse(*NET.args[:2])({}, X)),
        (
            ValueError,
            r"grad: expected one vector, got 2 columns",
            lambda: fisher_inverse(*NET.args[:2])(torch.ones(37, 2), X),
        ),
        (TypeError, r"grad: ", lambda: fisher_inverse(*NET.args[:2])("gradient", X)),
        (NumericsError, r"grad has NaN", lambda: fisher_inverse(*NET.args[:2])(torch.full((37,), torch.nan), X)),
    ],
)
def test_words(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        call()


def sr(*args: Any, **options: Any) -> Any:
    return stochastic_reconfiguration(*args, **options)


def test_overflow_of_the_matrix() -> None:
    params, x = [torch.tensor(1.0)], torch.tensor([1e25, -1e25, 3e25])
    with pytest.raises(NumericsError, match=r"S \[1, 1\] has NaN or infinite entries, from derivatives too large"):
        stochastic_reconfiguration(lambda p, x: p[0] * x, params, x, torch.tensor([1.0, 2.0, 3.0]), mode="dense")


def test_lazy_says_when_it_did_not_get_there() -> None:
    problem = real_net(60, 4)
    with pytest.warns(
        CurvatureWarning, match=r"cg in mode 'lazy' ended at a relative residual of .*: iteration limit 2"
    ):
        stochastic_reconfiguration(*problem.args, problem.costs, 1e-6, "lazy", max_iter=2)
    with pytest.warns(CurvatureWarning, match=r"CG missed tol=1e-14"):
        stochastic_reconfiguration(*problem.args, problem.costs, 1e-6, "lazy", max_iter=2, tol=1e-14)


def test_system_of_the_same_norm() -> None:
    """`|Ō δ|² + λ |δ|²`, as the optimizer's norm constraint forms it, is `δ* (S + λ) δ`."""
    problem = real_net(9, 6)
    O, _ = dense(problem)
    e = Ensemble(LogAmplitude(problem.log_psi, problem.params), problem.samples)
    system, v = DampedSystem(e, LAMBDA, "kernel"), normal(37, seed=2)
    assert close(system.product(v).square().sum() + system.shift * v @ v, v @ (O.T @ O @ v + LAMBDA * v))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_parameter_that_breaks_cauchy_and_riemann_is_enough(position: int) -> None:
    """Of three complex ones, of which the others are holomorphic."""

    def log_psi(params: Any, x: Tensor) -> Tensor:
        parts = [p.conj() if k == position else p for k, p in enumerate(params)]
        return x.to(C128) @ parts[0] + torch.log(torch.cosh(x.to(C128) @ parts[1])) + parts[2] * x.square().sum(1)

    params = [
        0.3 * normal(4, seed=1, dtype=C128),
        0.3 * normal(4, seed=2, dtype=C128),
        torch.tensor(0.2 + 0.1j).to(C128),
    ]
    with pytest.raises(ValueError, match="violate the Cauchy-Riemann equations"):
        stochastic_reconfiguration(log_psi, params, normal(9, 4), normal(9, dtype=C128), 1e-3, amplitude="holomorphic")
