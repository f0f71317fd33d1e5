"""The K-FAC optimizer: steps against their formulas, options, errors, state."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, GGN, CurvatureWarning, EmpiricalRisk, FullBlock, NumericsError, UnsupportedError
from curvlinops_plus.optim.kfac import (
    KFACOptimizer,
    KFACPreconditioner,
    LevenbergMarquardt,
    NormConstraint,
    WeightDecay,
)

EXACT = {"vectors": "ggn_exact"}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(n: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return X, torch.randint(3, (n,), generator=generator)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def take(optimizer: Any, model: nn.Module, loss: Any, *batches: Any) -> Tensor:
    """One step; the batches before it are one update."""
    optimizer.zero_grad()
    for X, y in batches:
        with optimizer.listen((X, y)):
            output = model(X)
        value = loss(output, y)
        (value / len(batches)).backward()
    optimizer.step()
    return value.detach()


# ---------------------------------------------------------------------------------------------------------- formulas
def test_one_step_solves_a_linear_regression() -> None:
    torch.manual_seed(0)
    X, y = torch.randn(30, 4).double(), torch.randn(30, 2).double()
    model, loss = nn.Linear(4, 2).double(), nn.MSELoss()
    optimizer = KFACOptimizer(
        model, loss, lr=1.0, momentum=0.0, damping=1e-14, norm_constraint=None, approximation=FullBlock, **EXACT
    )
    take(optimizer, model, loss, (X, y))
    ones = torch.cat([X, torch.ones(30, 1).double()], 1)
    best = torch.linalg.lstsq(ones, y).solution.T
    torch.testing.assert_close(torch.cat([model.weight, model.bias[:, None]], 1).detach(), best, rtol=1e-9, atol=1e-9)


def test_steps_follow_the_formula() -> None:
    """Three steps with momentum, against dense algebra with the exact blocks of each batch."""
    model, loss = net(), nn.CrossEntropyLoss()
    lr, mu, damping, decay = 0.3, 0.8, 0.1, 0.9
    optimizer = KFACOptimizer(
        model,
        loss,
        lr=lr,
        momentum=mu,
        damping=damping,
        approximation=FullBlock,
        decay=decay,
        inverse_every=2,
        norm_constraint=None,
        **EXACT,
    )
    twin = copy.deepcopy(model)
    running, weight, velocity, inverse = 0, 0.0, 0, None
    for step in range(5):
        X, y = batch(seed=step)
        value = loss(twin(X), y)
        g = torch.cat([t.flatten() for t in torch.autograd.grad(value, list(twin.parameters()))])
        G = GGN(EmpiricalRisk(twin, loss, [(X, y)])).to_dense()
        G[:25, 25:] = G[25:, :25] = 0
        running, weight = decay * running + G, decay * weight + 1
        if step % 2 == 0:
            inverse = torch.linalg.inv(running / weight + damping * torch.eye(43).double())
        velocity = mu * velocity - lr * inverse @ g
        with torch.no_grad():
            nn.utils.vector_to_parameters(flat(twin) + velocity, twin.parameters())
        take(optimizer, model, loss, (X, y))
        torch.testing.assert_close(flat(model), flat(twin), rtol=1e-9, atol=1e-10)


def test_adaptive_coefficients_of_the_exact_preconditioner_are_one_and_zero() -> None:
    torch.manual_seed(0)
    model, loss, (X, y) = nn.Linear(4, 3).double(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(
        model, loss, "adaptive", "adaptive", 0.05, approximation=FullBlock, decay=1e-9, inverse_every=1, **EXACT
    )
    for _ in range(4):
        take(optimizer, model, loss, (X, y))
        report = optimizer.last_step
        assert report.lr == pytest.approx([1.0], abs=1e-6)
        assert report.momentum == pytest.approx([0.0], abs=1e-6)


def test_an_adaptive_coefficient_beside_numbers_of_groups() -> None:
    """`lr` minimises the quadratic model along the direction, with each group's own part of the velocity."""
    model, loss = net(), nn.CrossEntropyLoss()
    groups = [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[2].parameters(), "momentum": 0.2}]
    optimizer = KFACOptimizer(model, loss, "adaptive", damping=0.1, params=groups, **EXACT)
    momenta = torch.tensor([0.9] * 25 + [0.2] * 18, dtype=torch.float64)
    before, velocity = flat(model), torch.zeros(43).double()
    for step in range(3):
        X, y = batch(seed=step)
        G = GGN(EmpiricalRisk(model, loss, [(X, y)])).to_dense() + 0.1 * torch.eye(43).double()
        take(optimizer, model, loss, (X, y))
        delta = flat(model) - before
        direction, g = delta - momenta * velocity, gradient(model)
        assert float(direction @ (G @ delta + g)) == pytest.approx(0, abs=1e-10)  # the slope at the minimum
        before, velocity = flat(model), delta


def test_on_a_quadratic_the_ratio_is_one() -> None:
    torch.manual_seed(0)
    X, y = torch.randn(30, 4).double(), torch.randn(30, 2).double()
    model, loss = nn.Linear(4, 2).double(), nn.MSELoss()
    policy = LevenbergMarquardt(1.0, interval=2, decay=0.5)
    optimizer = KFACOptimizer(model, loss, 0.1, 0.5, policy, approximation=FullBlock, **EXACT)
    dampings = []
    for step in range(6):
        take(optimizer, model, loss, (X, y))
        dampings.append(optimizer.last_step.damping[0])
        if step % 2:
            assert optimizer.last_step.rho == pytest.approx(1.0, abs=1e-9)
        else:
            assert optimizer.last_step.rho is None
    assert dampings == pytest.approx([1, 1, 0.25, 0.25, 0.0625, 0.0625])


def test_damping_does_not_vanish() -> None:
    """A ratio that is always 1, as on a quadratic, says nothing against smaller dampings."""
    policy = LevenbergMarquardt(2e-4, interval=1, decay=0.5)
    assert policy.adapted(policy.adapted(2e-4, 1.0), 1.0) == 1e-4
    assert LevenbergMarquardt(2e-4, interval=1, decay=0.5, min=1e-8).adapted(1e-4, 1.0) == 5e-5


@pytest.mark.parametrize("norm", ["damped", "fisher", "euclidean"])
@pytest.mark.parametrize("of", ["update", "step"])
def test_a_norm_constraint_bounds_what_it_says(of: str, norm: str) -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    c, lr, mu, damping = 1e-4, 0.5, 0.9, 0.1
    optimizer = KFACOptimizer(
        model,
        loss,
        lr,
        mu,
        damping,
        approximation=FullBlock,
        norm_constraint=NormConstraint(c, of, norm),
        decay=1.0,
        inverse_every=100,
        **EXACT,
    )
    before, velocity = flat(model), torch.zeros(43).double()
    for _ in range(4):
        take(optimizer, model, loss, (X, y))
        delta = flat(model) - before
        bounded = delta if of == "update" else delta - mu * velocity
        K = optimizer.curvature.estimator.refreshed.to_dense()
        M = {"damped": K + damping * torch.eye(43).double(), "fisher": K, "euclidean": torch.eye(43).double()}[norm]
        assert float(bounded @ M @ bounded) == pytest.approx(c, rel=1e-6)
        assert optimizer.last_step.scale < 1
        before, velocity = flat(model), delta


def test_a_norm_constraint_after_a_refresh_is_positive() -> None:
    """The carried `(K + λ) δ` belongs to the inverse before; wherever it is no metric, it is computed anew."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, 0.5, 0.9, 1e-3, inverse_every=1, decay=0.1, **EXACT)
    for step in range(30):
        take(optimizer, model, loss, batch(4, step))
        assert 0 < optimizer.last_step.scale <= 1
        assert bool(flat(model).isfinite().all())


def test_without_damping_the_step_does_not_depend_on_the_parametrisation() -> None:
    """A linear change of the inputs that the first layer undoes: the function after the step is the same."""
    torch.manual_seed(0)
    T, loss = torch.randn(4, 4).double() + 3 * torch.eye(4).double(), nn.CrossEntropyLoss()
    X, y = batch(200)
    outputs = []
    for change in (torch.eye(4).double(), T):
        model = net()
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight @ torch.linalg.inv(change))
        optimizer = KFACOptimizer(
            model, loss, 0.1, 0.0, 1e-13, norm_constraint=None, params=list(model[0].parameters()), **EXACT
        )
        take(optimizer, model, loss, (X @ change.T, y))
        outputs.append(model(X @ change.T).detach())
    torch.testing.assert_close(*outputs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["decoupled", "coupled", "in_loss"])
def test_weight_decay(kind: str) -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    eta, lr, damping = 0.2, 0.3, 0.1
    theta = flat(model)
    K = torch.zeros(43, 43).double()
    G = GGN(EmpiricalRisk(model, loss, [(X, y)])).to_dense()
    K[:25, :25], K[25:, 25:] = G[:25, :25], G[25:, 25:]
    optimizer = KFACOptimizer(
        model,
        loss,
        lr,
        0.0,
        damping,
        approximation=FullBlock,
        norm_constraint=None,
        weight_decay=WeightDecay(eta, kind),
        **EXACT,
    )
    take(optimizer, model, loss, (X, y))
    g = gradient(model)
    if kind == "decoupled":
        expected = theta - lr * torch.linalg.solve(K + damping * torch.eye(43).double(), g) - lr * eta * theta
    else:
        g = g + eta * theta if kind == "coupled" else g
        expected = theta - lr * torch.linalg.solve(K + (damping + eta) * torch.eye(43).double(), g)
    torch.testing.assert_close(flat(model), expected, rtol=1e-9, atol=1e-10)


def test_micro_batches_are_one_update() -> None:
    X, y = batch(12)
    loss, found = nn.CrossEntropyLoss(), []
    for parts in ([(X, y)], [(X[:6], y[:6]), (X[6:], y[6:])]):
        model = net()
        optimizer = KFACOptimizer(model, loss, damping=LevenbergMarquardt(0.1, interval=1), **EXACT)
        for _ in range(4):
            take(optimizer, model, loss, *parts)
        assert optimizer.last_step.examples == 12
        found.append((flat(model), torch.tensor(optimizer.last_step.rho)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def test_maximize_goes_the_other_way() -> None:
    loss, (X, y) = nn.CrossEntropyLoss(), batch()
    moved = []
    for maximize in (False, True):
        model = net()
        before = flat(model)
        take(KFACOptimizer(model, loss, maximize=maximize, **EXACT), model, loss, (X, y))
        moved.append(flat(model) - before)
    torch.testing.assert_close(moved[0], -moved[1])


def test_the_preconditioner_writes_gradients() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    twin = copy.deepcopy(model)
    preconditioner = KFACPreconditioner(model, loss, 0.1, **EXACT)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = KFACOptimizer(twin, loss, 0.1, 0.0, 0.1, norm_constraint=None, **EXACT)
    for _ in range(3):
        take(preconditioner, model, loss, (X, y))
        sgd.step()
        take(optimizer, twin, loss, (X, y))
    torch.testing.assert_close(flat(model), flat(twin))


# ----------------------------------------------------------------------------------------------- behaviour in the wild
def test_a_step_that_raises_the_loss_is_undone() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(
        model, loss, lr=1e3, momentum=0.9, damping=1e-3, reject=4.0, norm_constraint=None, **EXACT
    )
    before = flat(model)
    take(optimizer, model, loss, (X, y))
    report = optimizer.last_step
    assert report.rejected
    assert report.new_loss > report.loss
    assert torch.equal(flat(model), before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["damping"] == pytest.approx(4e-3)
    optimizer.param_groups[0]["lr"] = 1e-2
    take(optimizer, model, loss, (X, y))
    assert not optimizer.last_step.rejected
    assert optimizer.last_step.new_loss < optimizer.last_step.loss


def test_gradients_that_are_not_finite_change_nothing() -> None:
    for reject in (None, 2.0):
        model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
        optimizer = KFACOptimizer(model, loss, reject=reject, **EXACT)
        take(optimizer, model, loss, (X, y))
        before, state = flat(model), copy.deepcopy(optimizer.state_dict()["state"])
        with optimizer.listen((X, y)):
            output = model(X)
        loss(output, y).backward()
        model[2].weight.grad[0, 0] = float("nan")
        if reject is None:
            with pytest.raises(NumericsError, match=r"gradient of 2\.weight is not finite; parameters have not"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.last_step.rejected
            assert optimizer.param_groups[0]["damping"] == pytest.approx(2e-3)
        assert torch.equal(flat(model), before)
        for number, entries in optimizer.state_dict()["state"].items():
            assert all(torch.equal(*map(torch.as_tensor, (t, state[number][name]))) for name, t in entries.items())


@pytest.mark.parametrize("constraint", [None, NormConstraint(1e-3), NormConstraint(1e-3, of="step")])
def test_the_velocity_follows_the_learning_rate(constraint: NormConstraint | None) -> None:
    """Without a gradient, steps shrink by the momentum and by what the learning rate becomes, as those of SGD."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, lr=0.1, momentum=0.5, norm_constraint=constraint, damping=0.1)
    sgd_model = net()
    sgd = torch.optim.SGD(sgd_model.parameters(), lr=0.1, momentum=0.5)
    norms: dict[str, list[float]] = {"kfac": [], "sgd": []}
    for step, lr in enumerate((0.1, 0.1, 0.02, 0.0, 0.05, 0.1)):
        for name, taken, network in (("kfac", optimizer, model), ("sgd", sgd, sgd_model)):
            taken.param_groups[0]["lr"] = lr
            taken.zero_grad()
            loss(network(batch()[0]), batch()[1]).backward()
            if step:
                for p in network.parameters():
                    p.grad.zero_()
            before = flat(network).clone()
            taken.step()
            norms[name].append(float((flat(network) - before).norm()))
    relative = {name: [norm / values[0] for norm in values] for name, values in norms.items()}
    assert relative["sgd"][:3] == pytest.approx([1.0, 0.5, 0.05])
    assert relative["kfac"][:4] == pytest.approx([1.0, 0.5, 0.05, 0.0])
    assert relative["kfac"][4] == 0.0  # a velocity that was multiplied by zero is gone


def test_parameters_without_gradient_or_curvature_are_left_alone() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)
            self.head = "one"

        def forward(self, X: Tensor) -> Tensor:
            return getattr(self, self.head)(self.body(X).tanh())

    torch.manual_seed(0)
    model, loss, (X, y) = TwoHeads().double(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, inverse_every=1, **EXACT)
    before = copy.deepcopy(model.state_dict())
    take(optimizer, model, loss, (X, y))
    assert optimizer.last_step.left_alone == ["two.weight", "two.bias"]
    assert torch.equal(model.two.weight, before["two.weight"])
    assert not torch.equal(model.one.weight, before["one.weight"])
    model.head = "two"
    one = model.one.weight.detach().clone()
    take(optimizer, model, loss, (X, y))
    assert optimizer.last_step.left_alone == ["one.weight", "one.bias"]  # no gradient in this step
    assert torch.equal(model.one.weight, one)
    assert not torch.equal(model.two.weight, before["two.weight"])


def test_groups_and_schedulers() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
    optimizer = KFACOptimizer(model, loss, lr=0.4, params=groups, **EXACT)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = copy.deepcopy(model.state_dict())
    take(optimizer, model, loss, (X, y))
    assert torch.equal(model[2].weight, before["2.weight"])
    assert not torch.equal(model[0].weight, before["0.weight"])
    scheduler.step()
    take(optimizer, model, loss, (X, y))
    assert optimizer.last_step.lr == [0.0, 0.2]


def test_a_schedule_of_the_damping() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, damping=lambda step: 1.0 / (1 + step), **EXACT)
    for expected in (1.0, 0.5, 1 / 3):
        take(optimizer, model, loss, (X, y))
        assert optimizer.last_step.damping == [expected]


def test_a_schedule_and_a_groups_own_damping() -> None:
    model = net()
    groups = [{"params": model[0].parameters(), "damping": 3.0}, {"params": model[2].parameters()}]
    with pytest.raises(ValueError, match="A schedule sets the damping of all groups, and one of them has its own"):
        KFACOptimizer(model, nn.CrossEntropyLoss(), damping=lambda step: 0.5, params=groups)


def test_statistics_and_inverses_come_when_they_are_due() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, statistics_every=3, inverse_every=2, **EXACT)
    seen = []
    for _ in range(7):
        take(optimizer, model, loss, (X, y))
        seen.append((optimizer.last_step.examples, optimizer.last_step.refreshed))
    assert seen == [(12, True), (0, False), (0, True), (12, False), (0, True), (0, False), (12, True)]


def test_a_closure_is_called_once() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer, calls = KFACOptimizer(model, loss, **EXACT), []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        with optimizer.listen((X, y)):
            output = model(X)
        value = loss(output, y)
        value.backward()
        return value

    with torch.no_grad():
        value = optimizer.step(closure)
    assert len(calls) == 1
    assert value.requires_grad
    assert optimizer.last_step.examples == 12


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"inverse": "factored"},
        {"approximation": EKFAC},
        {"norm_constraint": NormConstraint(1e-3, "step")},
        {"damping": LevenbergMarquardt(1.0, interval=2)},
        {"lr": "adaptive", "momentum": "adaptive"},
        {"vectors": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [3, 5])
def test_resuming_is_exact(options: dict[str, Any], at: int, tmp_path: Any) -> None:
    loss = nn.CrossEntropyLoss()

    def make(model: nn.Module) -> KFACOptimizer:
        return KFACOptimizer(model, loss, **{**EXACT, "inverse_every": 4, **options})

    straight = net()
    optimizer = make(straight)
    for step in range(8):
        if step == at:
            torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "at.pt")
        take(optimizer, straight, loss, batch(seed=step))
    stored = torch.load(tmp_path / "at.pt", weights_only=True)
    resumed = net(seed=9)
    again = make(resumed)
    resumed.load_state_dict(stored["model"])
    again.load_state_dict(stored["optimizer"])
    for step in range(at, 8):
        take(again, resumed, loss, batch(seed=step))
    assert torch.equal(flat(resumed), flat(straight))


def test_a_state_between_micro_batches() -> None:
    """Statistics of both are one update after resuming, too; what the state can't have is said."""
    loss, straight, resumed = nn.CrossEntropyLoss(), net(), net(seed=9)
    optimizer, again = (KFACOptimizer(model, loss, **EXACT) for model in (straight, resumed))
    take(optimizer, straight, loss, batch())
    (loss(straight(batch()[0]), batch()[1]) / 2).backward()
    with pytest.warns(CurvatureWarning, match="between a backward pass and its step: the gradients"):
        stored = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(straight.state_dict())
    again.load_state_dict(stored)
    X, y = batch(seed=5)
    for model, one in ((straight, optimizer), (resumed, again)):
        (loss(model(X), y) / 2).backward()
        one.step()
        assert one.last_step.examples == 24
    dense = [one.curvature.estimator.operator.to_dense() for one in (optimizer, again)]
    assert torch.equal(*dense)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()


# ------------------------------------------------------------------------------------------------------------ messages
def test_a_step_without_a_batch() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    nn.functional.cross_entropy(model(X), y).backward()
    with pytest.raises(RuntimeError, match=r"No batch was seen since the last step.*optimizer\.listen"):
        optimizer.step()
    optimizer = KFACOptimizer(model, loss, strict=False, **EXACT)
    take(optimizer, model, loss, (X, y))
    optimizer.step()
    assert optimizer.last_step.examples == 0
    with pytest.raises(RuntimeError, match="No batch was seen"):  # there are no old statistics
        KFACOptimizer(model, loss, strict=False, **EXACT).step()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr=-1; expected a number at least 0"),
        ({"lr": "auto"}, TypeError, "lr is a str; expected a number"),
        ({"damping": -1.0}, ValueError, "damping=-1"),
        ({"inverse": "cholesky"}, ValueError, "inverse='cholesky'; expected"),
        ({"inverse": "factored", "power": -0.5}, ValueError, "only inverses can be damped factor by factor"),
        ({"inverse_every": 0}, ValueError, "inverse_every=0; expected a number of steps"),
        ({"statistics_every": 1.5}, ValueError, "statistics_every=1.5"),
        ({"quadratic_model": "ggn"}, ValueError, "quadratic_model='ggn'"),
        ({"norm_constraint": -1.0}, ValueError, "norm_constraint=-1"),
        ({"lr": "adaptive", "norm_constraint": 1e-3}, ValueError, "can't both choose the length"),
        ({"reject": 0.5}, ValueError, "reject=0.5; expected a number at least 1"),
        ({"reject": 2.0, "damping": lambda step: 1.0}, ValueError, "is a schedule here"),
        ({"decay": 2.0}, ValueError, "decay=2.0"),
        ({"power": 1.0}, ValueError, "power"),
        ({"power": -0.5}, ValueError, "A norm constraint in the damped norm is for inverses"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KFACOptimizer(net(), nn.CrossEntropyLoss(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LevenbergMarquardt(0.0), "initial=0"),
        (lambda: LevenbergMarquardt(1.0, interval=0), "interval=0"),
        (lambda: LevenbergMarquardt(1.0, thresholds=(0.5, 0.5)), "thresholds"),
        (lambda: LevenbergMarquardt(1.0, min=1.0, max=0.1), "max=0.1"),
        (lambda: LevenbergMarquardt(1e-5), "initial=1e-05; expected a number at least 0.0001"),
        (lambda: NormConstraint(1.0, "all"), "of='all'"),
        (lambda: NormConstraint(1.0, norm="l2"), "norm='l2'"),
        (lambda: WeightDecay(1.0, "l2"), "kind='l2'"),
        (lambda: WeightDecay(-1.0), "weight decay=-1"),
    ],
)
def test_policies_that_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_one_block_in_two_groups() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")]},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "damping": 1.0},
    ]
    optimizer = KFACOptimizer(model, loss, params=groups, **EXACT)
    with pytest.raises(ValueError, match=r"are one block of the curvature, and have dampings.*Put them in one group"):
        take(optimizer, model, loss, (X, y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lr": 0.2},
            r"\['0.weight', '0.bias'\] are one block .*, and have lr \[0\.1, 0\.2\].*one group",
        ),
        ({"norm_constraint": 1.0}, r"are one block of the curvature, and have norm_constraint \[0\.001, 1\.0\]"),
        ({"weight_decay": WeightDecay(0.1, "coupled")}, "are one block.*possible if it is decoupled, a number"),
    ],
)
def test_other_options_within_a_block(options: dict[str, Any], message: str) -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    for options_of_bias, refused in ((options, True), ({"weight_decay": 0.1}, False)):
        groups = [
            {"params": [p for n, p in model.named_parameters() if n.endswith("weight")]},
            {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], **options_of_bias},
        ]
        optimizer = KFACOptimizer(model, loss, params=groups, **EXACT)
        with pytest.raises(ValueError, match=message) if refused else nullcontext():
            take(optimizer, model, loss, (X, y))
        optimizer.close()


def test_options_that_are_tensors() -> None:
    found = []
    for as_tensor in (False, True):
        model, loss = net(), nn.CrossEntropyLoss()
        lr: Any = torch.tensor(0.125) if as_tensor else 0.125
        optimizer = KFACOptimizer(model, loss, lr=lr, damping=lr, **EXACT)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            take(optimizer, model, loss, batch(seed=step))
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.125 / 8
        found.append(flat(model))
    assert torch.equal(*found)


def test_batch_norm_that_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    with pytest.raises(UnsupportedError, match=r"\['1'\] are batch norm.*out of `params`, and give them to another"):
        KFACOptimizer(model, nn.CrossEntropyLoss())


def test_batch_norm_between_layers_is_told_of_without_asking_for_evaluation_mode() -> None:
    model, loss = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double(), nn.MSELoss()
    optimizer = KFACOptimizer(model, loss, params=[*model[0].parameters(), *model[3].parameters()])
    with pytest.warns(CurvatureWarning, match="is left out. While training, K-FAC does without.*another optimizer"):
        loss(model(torch.randn(20, 4).double()), torch.randn(20, 3).double()).backward()
    optimizer.step()


def test_a_loss_inside_of_the_model() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = net(), nn.CrossEntropyLoss()

        def forward(self, X: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.net(X), y)

    model, (X, y) = WithLoss(), batch()
    optimizer = KFACOptimizer(model, model.loss)
    model(X, y).backward()
    with pytest.raises(RuntimeError, match=r"CrossEntropyLoss was called inside of the model's forward.*listen"):
        optimizer.step()


def test_a_block_of_which_a_part_has_no_gradient() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    take(optimizer, model, loss, (X, y))
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"which are one block of the curvature, only \['0.weight'\] have a gradient"):
        take(optimizer, model, loss, (X, y))


def test_a_step_without_gradients_does_nothing() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer, before = KFACOptimizer(model, loss, **EXACT), flat(model)
    with optimizer.listen((X, y)):
        model(X)
    optimizer.step()
    assert torch.equal(flat(model), before)
    assert len(optimizer.last_step.left_alone) == 4


def test_a_constraint_that_comes_later_holds() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(
        model, loss, 0.5, 0.9, 0.1, approximation=FullBlock, norm_constraint=None, decay=1.0, inverse_every=100, **EXACT
    )
    for _ in range(3):
        take(optimizer, model, loss, (X, y))
    optimizer.param_groups[0]["norm_constraint"] = c = 1e-4
    before = flat(model)
    take(optimizer, model, loss, (X, y))
    delta = flat(model) - before
    M = optimizer.curvature.estimator.refreshed.to_dense() + 0.1 * torch.eye(43).double()
    assert float(delta @ M @ delta) == pytest.approx(c, rel=1e-6)


def test_momentum_that_was_zero_has_no_velocity() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, **EXACT)
    take(optimizer, model, loss, (X, y))
    optimizer.param_groups[0]["momentum"] = 0.0
    take(optimizer, model, loss, (X, y))
    assert all("velocity" not in state for state in optimizer.state.values())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    loss, (X, y) = nn.CrossEntropyLoss(), batch()
    model, other = net(), nn.Linear(4, 3).double()
    optimizer, foreign = KFACOptimizer(model, loss, **EXACT), KFACOptimizer(other, loss, **EXACT)
    take(optimizer, model, loss, (X, y))
    take(foreign, other, loss, (X, y))
    with pytest.raises(ValueError, match="parameter"):
        optimizer.load_state_dict(foreign.state_dict())
    assert (optimizer.curvature.steps, optimizer.curvature.estimator.updates) == (1, 1)


def test_copies_are_refused() -> None:
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        copy.deepcopy(KFACOptimizer(net(), nn.CrossEntropyLoss()))


def test_a_state_of_parameters_in_another_order() -> None:
    """Velocities of parameters with the same shape would change places."""
    model, loss, (X, y) = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), nn.CrossEntropyLoss(), batch()
    one = KFACOptimizer(model, loss, **EXACT)
    take(one, model, loss, (X, y))
    other = KFACOptimizer(model, loss, params=[*model[1].parameters(), *model[0].parameters()], **EXACT)
    with pytest.raises(ValueError, match=r"in the order \['0.weight'.* this optimizer has \['1.weight'"):
        other.load_state_dict(one.state_dict())
    assert not other.state


def test_a_foreign_state() -> None:
    model = net()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), **EXACT)
    with pytest.raises(ValueError, match="not the state of a KFACOptimizer: the key 'curvature' is missing"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


# -------------------------------------------------------------------------------------------------------------- checks
@pytest.mark.parametrize("door", ["hooks", "listen"])
def test_check_loss_compares_what_is_minimised(door: str) -> None:
    """Label smoothing, or the sum in place of the mean, that the optimizer was not told of. Inside of `listen` the sum
    is found to be so many times the mean, and the curvature is that of the sum."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    for users in (loss, nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(reduction="sum")):
        optimizer = KFACOptimizer(model, loss, **EXACT)
        optimizer.check_loss = True
        optimizer.zero_grad()
        if door == "hooks":
            output = model(X)
            loss(output, y)
        else:
            with optimizer.listen((X, y)):
                output = model(X)
        value = users(output, y)
        value.backward()
        before = flat(model)
        if users is loss or (users.reduction == "sum" and door == "listen"):
            assert optimizer.step(lambda value=value: value) is value
            assert optimizer.curvature.factor == pytest.approx(1.0 if users is loss else len(X))
            assert not torch.equal(flat(model), before)
        else:
            shown = [f"{float(f(output, y).detach()):.6g}" for f in (users, loss)]
            with pytest.raises(
                ValueError, match=rf"minimised is {shown[0]}, .* CrossEntropyLoss, is {shown[1]} on the"
            ):
                optimizer.step(lambda value=value: value)
            assert torch.equal(flat(model), before)
        optimizer.close()


def test_check_loss_needs_a_value() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACPreconditioner(model, loss, **EXACT)
    optimizer.check_loss = True
    with optimizer.listen((X, y)):
        output = model(X)
    loss(output, y).backward()
    with pytest.raises(ValueError, match=r"check_loss compares the loss that step's closure returns"):
        optimizer.step()


def test_norms_of_each_parameter_on_request() -> None:
    for cls in (KFACOptimizer, KFACPreconditioner):
        model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
        optimizer = cls(model, loss, **EXACT)
        take(optimizer, model, loss, (X, y))
        assert optimizer.last_step.norms == {}
        optimizer.report_norms = True
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        optimizer.zero_grad()
        with optimizer.listen((X, y)):
            output = model(X)
        loss(output, y).backward()
        gradient = {key: p.grad.clone() for key, p in model.named_parameters()}
        optimizer.step()
        report = optimizer.last_step
        for key, p in model.named_parameters():
            update = p.grad if cls is KFACPreconditioner else p - before[key]
            norms = report.norms[key]
            assert norms.parameter == pytest.approx(float(before[key].norm()))
            assert norms.gradient == pytest.approx(float(gradient[key].norm()))
            assert norms.update == pytest.approx(float(update.detach().norm()))
            assert norms.direction > 0
        assert report.update_norm == pytest.approx(sum(n.update**2 for n in report.norms.values()) ** 0.5)
