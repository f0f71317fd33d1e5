"""The optimizer: its steps are directions times the learning rate, constraints hold, and a saved state goes on."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.optim import StochasticReconfiguration, stochastic_reconfiguration
from curvlinops_plus.optim.reconfiguration.amplitude import LogAmplitude

from .amplitudes import C128, F64, PROBLEMS, Net, close, dense, flat, normal, rbm, real_net


def batches(n: int = 9) -> list[tuple[Tensor, Tensor]]:
    return [(normal(n, 4, seed=100 + k), normal(n, seed=200 + k)) for k in range(12)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_step_is_the_direction_times_the_learning_rate(name: str) -> None:
    problem = PROBLEMS[name]()
    direction, _ = stochastic_reconfiguration(*problem.args, problem.costs, 1e-2, amplitude=problem.amplitude)
    before = flat(problem.params).clone()
    optimizer = StochasticReconfiguration(
        problem.log_psi, problem.params, lr=0.3, damping=1e-2, amplitude=problem.amplitude
    )
    mean = optimizer.step(problem.samples, problem.costs)
    assert close(flat(problem.params), before - 0.3 * flat(direction))
    assert close(mean, problem.costs.mean())
    assert optimizer.report is not None
    assert optimizer.report.residual < 1e-10


def test_momentum_is_springs() -> None:
    net, twin, previous = Net(6), Net(6), None
    optimizer = StochasticReconfiguration(net, lr=0.1, momentum=0.9, norm_constraint=1e-3)
    for x, costs in batches()[:4]:
        previous, _ = stochastic_reconfiguration(twin, None, x, costs, momentum=0.9, previous=previous)
        optimizer.step(x, costs)
        step = 0.1 * flat(dict(enumerate(previous)))
        step = step * min(1.0, (1e-3 / float(step @ step)) ** 0.5)
        with torch.no_grad():
            for p, delta in zip(twin.parameters(), step.split([p.numel() for p in twin.parameters()])):
                p.sub_(delta.view_as(p))
        assert close(flat(dict(net.named_parameters())), flat(dict(twin.named_parameters())))


@pytest.mark.parametrize("diagonal_shift", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["lazy", "dense", "kernel"])
@pytest.mark.parametrize("norm", ["euclidean", "fisher"])
def test_norm_constraint(norm: Any, mode: Any, diagonal_shift: float) -> None:
    problem, limit = real_net(9, 6), 1e-4
    O, _ = dense(problem)
    S = O.T @ O
    M = 1e-3 * torch.eye(len(S), dtype=F64) + diagonal_shift * torch.diag(S.diagonal())
    metric = torch.eye(len(S), dtype=F64) if norm == "euclidean" else S + M
    options = {"lr": 0.5, "mode": mode, "norm": norm, "diagonal_shift": diagonal_shift}
    before = flat(problem.params).clone()
    optimizer = StochasticReconfiguration(problem.log_psi, problem.params, norm_constraint=limit, **options)
    optimizer.step(problem.samples, problem.costs)
    step = flat(problem.params) - before
    assert float(step @ metric @ step) == pytest.approx(limit, rel=1e-9)
    free = real_net(9, 6)
    StochasticReconfiguration(free.log_psi, free.params, norm_constraint=1e6, **options).step(free.samples, free.costs)
    plain = real_net(9, 6)
    StochasticReconfiguration(plain.log_psi, plain.params, **options).step(plain.samples, plain.costs)
    assert torch.equal(flat(free.params), flat(plain.params))


def test_schedules() -> None:
    seen: list[int] = []

    def damping(step: int) -> float:
        seen.append(step)
        return 1e-2 * 0.5**step

    net, twin = Net(6), Net(6)
    optimizer = StochasticReconfiguration(net, lr=0.2, damping=damping)
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    for k, (x, costs) in enumerate(batches()[:3]):
        direction, _ = stochastic_reconfiguration(twin, None, x, costs, 1e-2 * 0.5**k)
        optimizer.step(x, costs)
        scheduler.step()
        with torch.no_grad():
            for p, d in zip(twin.parameters(), direction):
                p.sub_(0.2 * 0.5**k * d)
        assert close(flat(dict(net.named_parameters())), flat(dict(twin.named_parameters())))
    assert seen == [0, 0, 1, 2]  # once when it was made
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 / 8)
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.step(*batches()[3])


def make(net: Any) -> tuple[StochasticReconfiguration, ExponentialLR]:
    optimizer = StochasticReconfiguration(
        net, lr=0.1, damping=lambda step: 1e-2 * 0.9**step, momentum=0.9, norm_constraint=1e-2
    )
    return optimizer, ExponentialLR(optimizer, gamma=0.9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit(dtype: torch.dtype) -> None:
    nets = [Net(6, dtype), Net(6, dtype)]
    optimizer, scheduler = make(nets[0])
    data = [(x.to(dtype), costs) for x, costs in batches()]
    for x, costs in data[:5]:
        optimizer.step(x, costs)
        scheduler.step()
    file = io.BytesIO()
    torch.save({"net": nets[0].state_dict(), "sr": optimizer.state_dict(), "lr": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, schedule = make(nets[1])
    nets[1].load_state_dict(saved["net"])
    resumed.load_state_dict(saved["sr"])
    schedule.load_state_dict(saved["lr"])
    for x, costs in data[5:]:
        for o, s in ((optimizer, scheduler), (resumed, schedule)):
            o.step(x, costs)
            s.step()
        assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters()))
    forgetful, _ = make(copy.deepcopy(nets[1]))
    assert not forgetful.state_dict()["state"]


def test_resumes_complex_parameters_bit_for_bit() -> None:
    def params() -> dict[str, Tensor]:
        return {"a": normal(4, seed=1, dtype=C128), "W": normal(4, 3, seed=2, dtype=C128), "b": normal(3, seed=3)}

    one, other = params(), params()
    optimizer = StochasticReconfiguration(rbm, one, amplitude="complex", momentum=0.9)
    for x, costs in batches()[:3]:
        optimizer.step(x, costs)
    resumed = StochasticReconfiguration(rbm, other, amplitude="complex", momentum=0.9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, p in one.items():
        other[name].copy_(p)
    for x, costs in batches()[3:6]:
        optimizer.step(x, costs)
        resumed.step(x, costs)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_direction_before_takes_part_in_what_is_saved() -> None:
    """The test above can fail: without the state the continuation is another."""
    one, other = Net(6), Net(6)
    optimizer, _ = make(one)
    x, costs = batches()[0]
    optimizer.step(x, costs)
    other.load_state_dict(one.state_dict())
    forgetful, _ = make(other)
    optimizer.step(x, costs)
    forgetful.step(x, costs)
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_only_the_parameters_given_change() -> None:
    net = Net(6)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.decay.grad = torch.ones((), dtype=F64)
    StochasticReconfiguration(net, [net.first.weight]).step(*batches()[0])
    changed = [name for name, p in net.named_parameters() if not torch.equal(p, before[name])]
    assert changed == ["first.weight"]
    assert net.first.weight.grad is None
    assert net.decay.grad is not None
    assert float(net.decay.grad) == 1


def test_nothing_changes_when_a_step_fails() -> None:
    net = Net(6)
    optimizer, _ = make(net)
    x, costs = batches()[0]
    optimizer.step(x, costs)
    before, state = flat(dict(net.named_parameters())).clone(), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(NumericsError, match=r"local_costs is NaN or infinite for 1 of 9 samples \(3\)"):
        optimizer.step(x, costs.index_fill(0, torch.tensor([3]), torch.inf))
    assert torch.equal(flat(dict(net.named_parameters())), before)
    assert optimizer.param_groups[0]["steps"] == state["param_groups"][0]["steps"]


def test_energy_goes_down() -> None:
    """An enumerated Hamiltonian: to its lowest eigenvalue."""
    H = normal(6, 6, seed=3) - 3.0 * torch.ones(6, 6, dtype=F64)
    H = H + H.T
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double(), torch.eye(6, dtype=F64)
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(0.3 * normal(*p.shape, seed=k))
    optimizer = StochasticReconfiguration(net, lr=0.05, damping=1e-3)
    energy = torch.tensor(0.0)
    for _ in range(150):
        psi = net(x)[:, 0].detach().exp()
        energy = optimizer.step(x, H @ psi / psi, weights=psi.square())
    assert 0 <= float(energy - torch.linalg.eigvalsh(H)[0]) < 1e-3


def test_words() -> None:
    net = Net(6)
    with pytest.raises(ValueError, match='norm to be "euclidean" or "fisher", got \'max\''):
        StochasticReconfiguration(net, norm="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr to be a finite number of at least 0, got -1"):
        StochasticReconfiguration(net, lr=-1)
    with pytest.raises(ValueError, match="norm_constraint to be a finite number of at least 0, got -1"):
        StochasticReconfiguration(net, norm_constraint=-1)
    with pytest.raises(ValueError, match="momentum to be at least 0 and below 1"):
        StochasticReconfiguration(net, momentum=1.5)
    with pytest.raises(ValueError, match="one parameter group"):
        StochasticReconfiguration(net).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer = StochasticReconfiguration(net, damping=lambda step: 1.0 - step)
    x, costs = batches()[0]
    optimizer.step(x, costs)
    optimizer.param_groups[0]["steps"] = 2
    with pytest.raises(ValueError, match=r"damping to be a finite number of at least 0, got -1\.0"):
        optimizer.step(x, costs)


def test_reads_the_form_of_its_parameters() -> None:
    net = Net(6)
    psi = LogAmplitude(net, list(net.parameters()))
    v = normal(37)
    assert close(psi.read(psi.write(v), "it"), v)
