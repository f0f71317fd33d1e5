"""Steps of the K-FAC optimizer against dense algebra, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    HeuristicDamping,
    KFACPreconditioner,
    LevenbergMarquardt,
    NormConstraint,
    WeightDecay,
    curvature,
)
from curvlinops_plus.optim import KFACOptimizer
from test.helpers import seeded
from test.optim.kfac.training import EXACT, Twisted, batch, flat, gradient, net, plain

CE = nn.CrossEntropyLoss()


class Dense:
    """The same optimizer, with matrices of all parameters: the slow twin of one with these
    options.
    """

    def __init__(
        self, model: nn.Module, options: dict[str, Any], groups: list[dict[str, Any]] | None
    ) -> None:
        self.model, self.options = model, options
        self.names = [name for name, _ in model.named_parameters()]
        sizes = [(name, p.numel()) for name, p in model.named_parameters()]
        self.groups = groups or [{"params": self.names}]
        #: Options of each parameter's entries, in which adaptive coefficients are 1.
        parts = [
            [torch.full((n,), float(name in group["params"])) for name, n in sizes]
            for group in self.groups
        ]
        self.masks = [torch.cat(of).double() for of in parts]
        damping = options["damping"]
        self.policy = damping if isinstance(damping, LevenbergMarquardt) else None
        self.λ = [
            group.get("damping", self.policy.initial if self.policy else damping)
            for group in self.groups
        ]
        self.step_number, self.running, self.weight = 0, torch.zeros(()), 0.0
        self.velocity, self.lr_before = torch.zeros_like(flat(model)), None
        self.refreshed = torch.zeros(())
        self.rho: float | None = None
        self.scale, self.rejected = 1.0, False

    def by_entry(self, values: list[Any]) -> Tensor:
        """Numbers of groups as one for each entry."""
        return sum(float(v) * mask for v, mask in zip(values, self.masks, strict=True))  # type: ignore[return-value]

    def of_groups(self, name: str) -> list[Any]:
        return [group.get(name, self.options[name]) for group in self.groups]

    def matrix(self, X: Tensor, y: Tensor, kind: Any) -> Tensor:
        """A curvature of the batch, in the order of the model's parameters."""
        risk = EmpiricalRisk(self.model, CE, [(X, y)])
        K = GGN(risk) if kind is None else curvature(risk, kind, default=kind, **EXACT)
        sizes = [t.numel() for t in K.in_space.unflatten(torch.ones(K.shape[0])).values()]
        position = dict(zip(K.in_space.names, torch.arange(K.shape[0]).split(sizes), strict=True))
        order = torch.cat([position[name] for name in self.names])
        return K.to_dense()[order][:, order]

    def objective(self, X: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            value = float(CE(self.model(X), y)) * (-1 if self.options["maximize"] else 1)
        return (
            value + float((self.decay("coupled", "in_loss") * flat(self.model).square()).sum()) / 2
        )

    def decay(self, *kinds: str) -> Tensor:
        """Strengths of weight decay of some kinds."""
        decays = [
            d if isinstance(d, WeightDecay) else WeightDecay(d)
            for d in self.of_groups("weight_decay")
        ]
        return self.by_entry([d.strength if d.kind in kinds else 0.0 for d in decays])

    def step(self, X: Tensor, y: Tensor, lr_factor: float = 1.0) -> None:
        o, k, θ = self.options, self.step_number, flat(self.model)
        g = torch.cat(
            [
                t.flatten()
                for t in torch.autograd.grad(CE(self.model(X), y), [*self.model.parameters()])
            ]
        )
        g = (-g if o["maximize"] else g) + self.decay("coupled", "in_loss") * θ
        if k % o["statistics_every"] == 0:
            self.running = o["decay"] * self.running + self.matrix(X, y, o["approximation"])
            self.weight = o["decay"] * self.weight + 1
        if k % o["inverse_every"] == 0:
            self.refreshed = self.running / self.weight
        if callable(o["damping"]):
            self.λ = [o["damping"](k)] * len(self.groups)
        K, λ = self.refreshed, self.by_entry(self.λ) + self.decay("coupled", "in_loss")
        values, Q = torch.linalg.eigh(K + λ.diag())
        d = Q @ (values.clamp(min=1e-12) ** o["power"] * (Q.T @ g))
        adaptive = [o[name] == "adaptive" for name in ("lr", "momentum")]
        lr = torch.ones_like(θ) if adaptive[0] else lr_factor * self.by_entry(self.of_groups("lr"))
        μ = torch.ones_like(θ) if adaptive[1] else self.by_entry(self.of_groups("momentum"))
        v = (
            self.velocity
            if self.lr_before is None or adaptive[0]
            else self.velocity * lr / self.lr_before
        )
        self.scale = 1.0
        d = d * self.shorten(lr * d, "step", K, λ)
        directions = torch.stack([-lr * d, μ * v], 1)
        exact = o["quadratic_model"] == "exact" or (any(adaptive) and o["quadratic_model"] is None)
        C = self.matrix(X, y, None) if exact else self.running / self.weight
        C = C + self.decay("coupled", "in_loss").diag()
        w = torch.ones(2).double()
        if any(adaptive):
            free = [
                i
                for i, is_adaptive in enumerate(adaptive)
                if is_adaptive and bool(directions[:, i].any())
            ]
            w = torch.tensor([0.0 if is_adaptive else 1.0 for is_adaptive in adaptive]).double()
            M = C + self.by_entry(self.λ).diag()
            A, b = directions[:, free], g + M @ directions @ w
            w[free] = torch.linalg.solve(A.T @ M @ A, -(A.T @ b))
        δ = directions @ w
        δ = δ * self.shorten(δ, "update", K, λ)
        self.rejected = False
        adapts = self.policy is not None and (k + 1) % self.policy.interval == 0
        moved = δ - w[0] * lr * self.decay("decoupled") * θ
        before = self.objective(X, y)
        nn.utils.vector_to_parameters(θ + moved, self.model.parameters())
        if adapts or o["reject"]:
            after = self.objective(X, y)
            q = float(g @ moved + moved @ C @ moved / 2)
            q += (
                float(moved @ (self.by_entry(self.λ) * moved)) / 2
                if self.policy and self.policy.include_damping
                else 0.0
            )
            self.rho, self.rejected = (
                (after - before) / q,
                bool(o["reject"]) and not after <= before,
            )
            if self.rejected:
                nn.utils.vector_to_parameters(θ, self.model.parameters())
                self.λ = [o["reject"] * λ for λ in self.λ]
            elif adapts and self.policy:
                self.λ = [self.policy.adapted(λ, self.rho) for λ in self.λ]
        if not self.rejected:
            self.velocity, self.lr_before = δ, lr
        self.step_number += 1

    def shorten(self, δ: Tensor, of: str, K: Tensor, λ: Tensor) -> Tensor:
        """Factors by which entries are shortened; groups with the same constraint are one
        vector.
        """
        factors, constraints = torch.ones_like(δ), self.of_groups("norm_constraint")
        constraints = [NormConstraint(c) if isinstance(c, float) else c for c in constraints]
        for c in {c for c in constraints if c is not None and c.of == of}:
            mask = sum(m for m, other in zip(self.masks, constraints, strict=True) if other == c)
            M = {"damped": K + λ.diag(), "fisher": K, "euclidean": torch.eye(len(δ)).double()}[
                c.norm
            ]
            square = float((mask * δ) @ M @ (mask * δ))
            factor = min(1.0, (c.c / square) ** 0.5) if square else 1.0
            self.scale, factors = min(self.scale, factor), factors * (1 - mask + mask * factor)
        return factors


DEFAULTS: dict[str, Any] = {
    "lr": 0.3,
    "momentum": 0.8,
    "damping": 0.1,
    "approximation": FullBlock,
    "decay": 0.9,
    "inverse_every": 2,
    "statistics_every": 1,
    "norm_constraint": None,
    "weight_decay": 0.0,
    "maximize": False,
    "power": -1.0,
    "reject": None,
    "quadratic_model": None,
}
FORGETS = {"approximation": KFAC, "decay": 1e-10}  # means of its factors are no means of matrices
ADAPTIVE = {"lr": "adaptive", "momentum": "adaptive"}
FIRST, SECOND = ["0.weight", "0.bias"], ["2.weight", "2.bias"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "KFAC": FORGETS,
    "diagonal": {"approximation": DiagonalBlock},
    "statistics": {"statistics_every": 3, "inverse_every": 2, "decay": 0.5},
    "schedule": {"damping": lambda step: 1.0 / (1 + step)},
    "root": {"power": -0.5},
    "maximize": {"maximize": True, "norm_constraint": 1e-3},
    "decoupled": {"weight_decay": 0.2},
    "coupled": {"weight_decay": WeightDecay(0.2, "coupled")},
    "in the loss": {"weight_decay": WeightDecay(0.2, "in_loss")},
    "coupled, looked at": {
        "weight_decay": WeightDecay(0.2, "coupled"),
        "damping": LevenbergMarquardt(0.1, 2),
    },
    "in the loss, looked at": {"weight_decay": WeightDecay(0.2, "in_loss"), **ADAPTIVE},
    "Levenberg-Marquardt": {"damping": LevenbergMarquardt(0.1, interval=2, decay=0.5)},
    "bad predictions": {
        "damping": LevenbergMarquardt(1e-3, interval=1, thresholds=(0.97, 0.99)),
        "lr": 0.9,
    },
    "with the damping": {"damping": LevenbergMarquardt(0.3, interval=1, include_damping=True)},
    "exact model": {"damping": LevenbergMarquardt(0.3, interval=1), "quadratic_model": "exact"},
    "maximize, looked at": {"damping": LevenbergMarquardt(0.3, interval=1), "maximize": True},
    "adaptive": ADAPTIVE,
    "adaptive, blocks": {**ADAPTIVE, "quadratic_model": "blocks"},
    "adaptive, damping": {**ADAPTIVE, "damping": LevenbergMarquardt(1.0, interval=1)},
    "adaptive, decaying": {
        **ADAPTIVE,
        "damping": LevenbergMarquardt(1.0, interval=1),
        "weight_decay": 0.2,
    },
    "adaptive lr": {"lr": "adaptive", "momentum": 0.5},
    "rejecting": {"reject": 3.0, "lr": 2.0, "damping": 1e-3},
    "rejecting, LM": {"reject": 3.0, "lr": 2.0, "damping": LevenbergMarquardt(1e-3, interval=2)},
}
for of in ("update", "step"):
    for norm in ("damped", "fisher", "euclidean"):
        OPTIONS[f"{of}, {norm}"] = {
            "norm_constraint": NormConstraint(1e-3, of, norm),
            "inverse_every": 3,
        }  # type: ignore[arg-type]
OPTIONS |= {
    "bound, schedule": {
        "norm_constraint": 1e-3,
        "damping": lambda step: 0.1 * 0.7**step,
        "inverse_every": 4,
    },
    "bound, adapted": {
        "norm_constraint": 1e-3,
        "damping": LevenbergMarquardt(0.1, interval=1),
        "inverse_every": 4,
    },
    "bound, rejecting": {
        "norm_constraint": 3.0,
        "reject": 1.5,
        "lr": 2.0,
        "damping": 1e-2,
        "inverse_every": 3,
    },
}
GROUPS: dict[str, list[dict[str, Any]]] = {
    "coefficients": [
        {"params": FIRST, "momentum": 0.1, "damping": 0.5},
        {"params": SECOND, "lr": 0.1},
    ],
    "decay": [
        {"params": SECOND, "weight_decay": WeightDecay(0.3, "coupled")},
        {"params": FIRST, "weight_decay": 0.1},
    ],
    "one bound": [
        {"params": FIRST, "norm_constraint": 1e-3},
        {"params": SECOND, "norm_constraint": 1e-3},
    ],
    "two bounds": [
        {"params": FIRST, "norm_constraint": 1e-3},
        {"params": SECOND, "norm_constraint": 1e-4},
    ],
    "of steps": [
        {"params": FIRST, "norm_constraint": NormConstraint(1e-4, "step")},
        {"params": SECOND, "norm_constraint": NormConstraint(1e-1, "step"), "lr": 0.7},
    ],
    "one without": [
        {"params": FIRST, "norm_constraint": 1e-3},
        {"params": SECOND, "momentum": 0.2},
    ],
    "adaptive": [{"params": FIRST, "momentum": 0.9}, {"params": SECOND, "momentum": 0.2}],
}


def follow(
    model: nn.Module, options: dict[str, Any], groups: list[dict[str, Any]] | None = None
) -> None:
    """Steps of an optimizer and of its twin, with a learning rate that changes."""
    options, twin, params = DEFAULTS | options, copy.deepcopy(model), None
    dense, named = Dense(twin, options, groups), dict(model.named_parameters())
    if groups is not None:
        params = [
            {**group, "params": [named[name] for name in group["params"]]} for group in groups
        ]
    optimizer = KFACOptimizer(
        model, CE, params=params, default=options["approximation"], **options, **EXACT
    )
    decay = options["weight_decay"]
    in_loss = decay.strength if isinstance(decay, WeightDecay) and decay.kind == "in_loss" else 0.0
    starts = [group["lr"] for group in optimizer.param_groups]
    for step in range(7):
        factor = 0.5 if step > 3 else 1.0
        for group, start in zip(optimizer.param_groups, starts, strict=True):
            group["lr"] = start if isinstance(start, str) else factor * start
        X, y = batch(seed=step)
        damping = [*dense.λ]
        dense.step(X, y, factor)
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in model.parameters())
        (CE(model(X), y) + in_loss / 2 * squares).backward()
        optimizer.step()
        report = optimizer.last_step
        torch.testing.assert_close(flat(model), flat(twin), rtol=1e-8, atol=1e-9)
        assert report.rejected == dense.rejected
        assert report.scale == pytest.approx(dense.scale, rel=1e-6)
        assert [group["damping"] for group in optimizer.param_groups] == pytest.approx(
            dense.λ, rel=1e-6
        )
        if report.rho is not None:
            assert report.rho == pytest.approx(dense.rho, rel=1e-5)
            assert report.damping == damping


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_dense_algebra(name: str) -> None:
    follow(net(), OPTIONS[name])


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name: str) -> None:
    follow(net(), {"lr": "adaptive"} if name == "adaptive" else {}, GROUPS[name])


class Straight(Twisted):
    """With one head."""

    def __init__(self) -> None:
        super().__init__()
        del self.heads[1]


@pytest.mark.parametrize(
    "name", ["KFAC", "diagonal", "update, damped", "rejecting", "adaptive", "coupled"]
)
def test_layers_whose_matrices_take_axes_apart(name: str) -> None:
    follow(Straight().double(), FORGETS | OPTIONS[name])


@pytest.mark.parametrize(
    "options", [{"inverse": "factored"}, {"approximation": EKFAC, "default": EKFAC}], ids=str
)
def test_steps_with_the_inverse_of_the_last_refresh(options: dict[str, Any]) -> None:
    """A factored one keeps the damping of the refresh; eigenvalues of EKFAC's basis are averaged by
    the estimator.
    """
    model, factored = net(), "inverse" in options
    optimizer = KFACOptimizer(
        model,
        CE,
        1.0,
        0.0,
        lambda step: 0.1 * 0.5**step,
        norm_constraint=None,
        inverse_every=3,
        **EXACT,
        **options,
    )
    for step in range(5):
        before, λ = flat(model), 0.1 * 0.5 ** (step // 3 * 3 if factored else step)
        plain(optimizer, model, CE, *batch(seed=step))
        K = optimizer.curvature.refreshed
        P = K.inverse(HeuristicDamping(λ, min=0.0) if factored else λ)
        torch.testing.assert_close(before - flat(model), P @ gradient(model), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("damping", [lambda step: 0.1 * 1.5**step, lambda step: 0.1 * 0.7**step])
def test_a_bound_with_a_factored_inverse(damping: Any) -> None:
    """With the damping of now. That inverse is of a larger matrix, so updates may be shorter than
    they had to be.
    """
    model, c = net(), 1e-3
    optimizer = KFACOptimizer(
        model, CE, 0.3, 0.9, damping, norm_constraint=c, inverse="factored", inverse_every=4
    )
    for step in range(8):
        before = flat(model)
        plain(optimizer, model, CE, *batch(seed=step))
        δ, K = flat(model) - before, optimizer.curvature.refreshed
        assert 0.3 * c < float(δ @ (K @ δ)) + damping(step) * float(δ @ δ) <= c * (1 + 1e-9)


def test_a_bound_after_a_rest() -> None:
    """Velocities that rested while the curvature was renewed are measured with that of now."""
    model, c = Twisted().double(), 1e-3
    optimizer = KFACOptimizer(
        model,
        CE,
        0.3,
        0.9,
        0.1,
        params=model.heads.parameters(),
        norm_constraint=c,
        inverse_every=3,
        **EXACT,
    )
    for step, number in enumerate((0, 1, 0, 1, 1, 0)):
        before = flat(model.heads)
        turn(optimizer, model, number, step)
        K = optimizer.curvature.refreshed
        δ = (flat(model.heads) - before)[: K.shape[0]]  # at first of one head
        assert float(δ @ (K @ δ) + 0.1 * δ @ δ) == pytest.approx(c)


@pytest.mark.parametrize("norm", ["damped", None])
def test_the_preconditioner_writes_gradients(norm: Any) -> None:
    """The same direction; a constraint bounds it in place of the update."""
    model, c = net(), 1e-3
    twin = copy.deepcopy(model)
    sgd = torch.optim.SGD([{"params": model.parameters(), "name": "all"}], lr=0.1)
    preconditioner = KFACPreconditioner(  # the learning rate is the other optimizer's
        model,
        CE,
        0.1,
        params=sgd.param_groups,
        norm_constraint=c if norm else None,
        inverse_every=2,
        **EXACT,
    )
    optimizer = KFACOptimizer(
        twin, CE, 0.1, 0.0, 0.1, norm_constraint=c / 100 if norm else None, inverse_every=2, **EXACT
    )
    for step in range(3):
        plain(preconditioner, model, CE, *batch(seed=step))
        sgd.step()
        plain(optimizer, twin, CE, *batch(seed=step))
        torch.testing.assert_close(flat(model), flat(twin))
        assert (preconditioner.last_step.scale < 1) == bool(norm)
    (X, y), grads = batch(), [p.grad for p in model.parameters()]
    CE(model(X), y).backward()
    preconditioner.step()
    assert all(
        p.grad is g for p, g in zip(model.parameters(), grads, strict=True)
    )  # views of another's buffer, maybe


@pytest.mark.parametrize(
    ("options", "rho", "expected"),
    [
        ({}, 0.2, 2 / 0.9**5),
        ({}, 0.25, 2.0),
        ({}, 0.75, 2.0),
        ({}, 0.8, 2 * 0.9**5),
        ({}, float("nan"), 2 / 0.9**5),
        ({}, -float("inf"), 2 / 0.9**5),
        ({"interval": 3, "decay": 0.5}, 0.9, 2 * 0.5**3),
        ({"thresholds": (0.4, 0.5)}, 0.3, 2 / 0.9**5),
        ({"min": 1.9}, 1.0, 1.9),
        ({"max": 2.1}, 0.0, 2.1),
    ],
)
def test_how_the_damping_adapts(options: dict[str, Any], rho: float, expected: float) -> None:
    assert LevenbergMarquardt(2.0, **options).adapted(2.0, rho) == pytest.approx(expected)


# --------------------------------------------------------- layers that are not called in every step
def turn(optimizer: Any, model: Twisted, head: int, seed: int = 0) -> list[str]:
    """A step with one of the heads; the parameters that were left alone."""
    model.head = head
    plain(optimizer, model, CE, *batch(7, seed))
    return optimizer.last_step.left_alone


def head(number: int) -> list[str]:
    return [f"heads.{number}.weight", f"heads.{number}.bias"]


@pytest.mark.parametrize("kind", [KFAC, EKFAC, DiagonalBlock])
def test_a_head_that_is_called_later_has_a_curvature_of_its_own(kind: Any) -> None:
    """That of its first batch, at once: it moves as in a first step, although the inverse is not
    due.
    """
    model = Twisted().double()
    options = {
        "default": kind,
        "approximation": kind,
        "momentum": 0.0,
        "norm_constraint": None,
        **EXACT,
    }
    parts = {"params": list(model.heads.parameters())}
    optimizer = KFACOptimizer(model, CE, inverse_every=100, **parts, **options)
    for step in range(3):
        assert turn(optimizer, model, 0, step) == head(1)
    fresh = copy.deepcopy(model)
    assert turn(optimizer, model, 1) == head(0)
    turn(KFACOptimizer(fresh, CE, params=list(fresh.heads.parameters()), **options), fresh, 1)
    torch.testing.assert_close(flat(model), flat(fresh), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("make", [KFACOptimizer, KFACPreconditioner])
def test_without_any_curvature_everything_is_left_alone(make: Any) -> None:
    """Statistics of the second head are not due when it is called first."""
    model = Twisted().double()
    optimizer = make(model, CE, params=model.heads.parameters(), statistics_every=3)
    turn(optimizer, model, 0)
    before = flat(model)
    assert turn(optimizer, model, 1) == head(0) + head(1)
    assert torch.equal(flat(model), before)
    assert [turn(optimizer, model, 1) for _ in range(2)][1] == head(0)


@pytest.mark.parametrize("reject", [None, 2.0])
def test_velocities_that_rested_follow_the_learning_rate(reject: float | None) -> None:
    """Each is multiplied by the learning rate of now over that of the step that it comes from."""
    model = Twisted().double()
    optimizer = KFACOptimizer(
        model, CE, 0.2, 0.5, 1.0, norm_constraint=None, reject=reject, **EXACT
    )
    turn(optimizer, model, 0)
    kept = {p: 0.2 * optimizer.state[p]["velocity"] for p in model.heads[0].parameters()}
    for seed, lr in enumerate((0.1, 0.05, 0.004)):
        optimizer.param_groups[0]["lr"] = lr
        turn(optimizer, model, 1, seed)
    before = {p: p.detach().clone() for p in kept}
    storage = optimizer.state[model.heads[0].weight]["velocity"].untyped_storage()
    assert storage.nbytes() == 8 * model.heads[0].weight.numel()  # no part of a vector of all
    model.head, (X, y) = 0, batch()
    optimizer.zero_grad()
    CE(model(X), y).backward()
    for p in kept:
        p.grad.zero_()
    optimizer.step()
    for p, old in before.items():
        torch.testing.assert_close(
            p.detach() - old, 0.5 * 0.004 / 0.2 * kept[p], rtol=1e-11, atol=1e-17
        )


class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 4, sparse=sparse), nn.Linear(12, 3)

    def forward(self, X: Tensor) -> Tensor:
        return self.head(self.table(X).flatten(1))


@pytest.mark.parametrize("kind", [KFACOptimizer, KFACPreconditioner])
def test_sparse_gradients(kind: Any) -> None:
    """A table whose gradient is sparse moves as one whose gradient is not."""
    ends = []
    for model in (Table(True).double(), Table(False).double()):
        generator = seeded()
        damping: Any = LevenbergMarquardt(0.1, interval=1) if kind is KFACOptimizer else 1.0
        optimizer = kind(model, CE, damping=damping, **EXACT)
        sgd = torch.optim.SGD(
            model.parameters(), lr=0.1 if kind is KFACPreconditioner else 0.0, momentum=0.9
        )
        for _ in range(4):
            X, y = (
                torch.randint(7, (6, 3), generator=generator),
                torch.randint(3, (6,), generator=generator),
            )
            plain(optimizer, model, CE, X, y)
            sgd.step()
        ends.append(flat(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
