"""What PyTorch's own tests ask of every optimizer, asked of K-FAC and of its preconditioner with SGD and Adam."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from curvlinops_plus import EKFAC
from curvlinops_plus.optim.kfac import KFACOptimizer, KFACPreconditioner, LevenbergMarquardt, WeightDecay
from test.optim.test_kfac_optimizer import batch, flat, net


class Preconditioned:
    """A preconditioner and the optimizer that goes on from its gradients, which are used as one."""

    def __init__(self, model: nn.Module, loss: nn.Module, kind: Callable[..., Any], **options: Any) -> None:
        self.first = KFACPreconditioner(model, loss, **options)
        self.second = kind(model.parameters(), lr=0.05)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.second.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        value = self.first.step(closure)
        self.second.step()
        return value

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first.load_state_dict(state["first"])
        self.second.load_state_dict(state["second"])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.second.param_groups

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.first.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.second.register_step_post_hook(hook)


KINDS: dict[str, Callable[..., Any]] = {
    "KFACOptimizer": KFACOptimizer,
    "with SGD": lambda model, loss, **options: Preconditioned(model, loss, torch.optim.SGD, **options),
    "with Adam": lambda model, loss, **options: Preconditioned(model, loss, torch.optim.Adam, **options),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return KINDS[request.param]


def plain(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, to_none: bool = True) -> Tensor:
    optimizer.zero_grad(set_to_none=to_none)
    value = loss(model(X), y)
    value.backward()
    optimizer.step()
    return value.detach()


def test_the_loss_goes_down(kind: Callable[..., Any]) -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = kind(model, loss, damping=0.1)
    values = [plain(optimizer, model, loss, X, y) for _ in range(40)]
    assert values[-1] < 0.5 * values[0]


def test_gradients_that_stay_zeros(kind: Callable[..., Any]) -> None:
    """`zero_grad(set_to_none=False)` is the same."""
    found = []
    for to_none in (True, False):
        model, loss = net(), nn.CrossEntropyLoss()
        optimizer = kind(model, loss, vectors="ggn_exact")
        for step in range(4):
            plain(optimizer, model, loss, *batch(seed=step), to_none=to_none)
        found.append(flat(model))
    assert torch.equal(*found)


def test_hooks_of_steps(kind: Callable[..., Any]) -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer, calls = kind(model, loss), []
    before = optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    plain(optimizer, model, loss, *batch())
    before.remove()
    plain(optimizer, model, loss, *batch())
    assert calls == ["before", "after", "after"]


def test_hooks_of_states() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer, calls = KFACOptimizer(model, loss), []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("post"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("load post"))
    plain(optimizer, model, loss, *batch())
    state = optimizer.state_dict()
    assert calls == ["pre", "post"]
    optimizer.load_state_dict(state)
    assert calls[-2:] == ["load pre", "load post"]


def _closure(optimizer: Any, model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    value = loss(model(X), y)
    value.backward()
    return value


def test_a_closure(kind: Callable[..., Any]) -> None:
    found = []
    for closing in (True, False):
        model, loss = net(), nn.CrossEntropyLoss()
        optimizer = kind(model, loss)
        for step in range(3):
            X, y = batch(seed=step)

            def closure(
                model: Any = model, loss: Any = loss, optimizer: Any = optimizer, X: Any = X, y: Any = y
            ) -> Any:
                optimizer.zero_grad()
                value = loss(model(X), y)
                value.backward()
                return value

            if closing:
                assert optimizer.step(closure).requires_grad
            else:
                plain(optimizer, model, loss, X, y)
        found.append(flat(model))
    assert torch.equal(*found)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o)]),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    """Those of PyTorch set learning rate and momentum as they set SGD's, and they are what the next step takes."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, lr=0.1, momentum=0.9)
    sgd = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    schedulers = [SCHEDULERS[name](o) for o in (optimizer, sgd)]
    for step in range(5):
        plain(optimizer, model, loss, *batch(seed=step))
        sgd.step()
        for option in ("lr", "momentum"):
            assert getattr(optimizer.last_step, option) == [sgd.param_groups[0][option]]
        for scheduler in schedulers:
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        for option in ("lr", "momentum"):
            assert optimizer.param_groups[0][option] == sgd.param_groups[0][option]


RESUMED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "warmup": {"statistics_every": 2},
    "LM": {"damping": LevenbergMarquardt(1.0, interval=3), "reject": 2.0},
    "EKFAC": {"approximation": EKFAC, "inverse_every": 3},
    "coupled": {"weight_decay": WeightDecay(1e-2, "coupled"), "inverse": "factored"},
}


class Steps:
    """Steps of K-FAC with some options on one batch."""

    def __init__(self, **options: Any) -> None:
        self.model, self.loss, self.taken = net(), nn.CrossEntropyLoss(), 0
        self.optimizer = KFACOptimizer(self.model, self.loss, **options)

    def __call__(self) -> None:
        X, y = batch()
        self.optimizer.zero_grad()
        self.loss(self.model(X), y).backward()
        self.optimizer.step()
        self.taken += 1

    def scheduled(self, name: str) -> None:
        scheduler = SCHEDULERS[name](self.optimizer)
        for _ in range(3):
            self()
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_what_is_adaptive(name: str) -> None:
    """Those that multiply "adaptive", and those that put numbers in its place."""
    take = Steps(lr="adaptive")
    with pytest.raises(TypeError, match=r'is "adaptive": the quadratic model chooses it in every step.*a scheduler'):
        take.scheduled(name)
    assert take.taken == (2 if name == "ReduceLROnPlateau" else 0)


def test_a_scheduler_beside_an_adaptive_momentum() -> None:
    take = Steps(lr=0.1, momentum="adaptive")
    scheduler = lr_scheduler.ExponentialLR(take.optimizer, 0.5)
    for lr in (0.1, 0.05, 0.025):
        take()
        scheduler.step()
        assert take.optimizer.last_step.lr == pytest.approx([lr])
    lr_scheduler.OneCycleLR(take.optimizer, 0.1, total_steps=10)
    with pytest.raises(TypeError, match=r'momentum is "adaptive"'):
        take()


def test_a_coefficient_that_is_adaptive_no_more() -> None:
    take = Steps(lr="adaptive")
    optimizer = take.optimizer
    optimizer.param_groups[0]["lr"] = 0.1
    take()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    take()
    scheduler.step()
    optimizer.param_groups[0]["momentum"] = "adaptive"
    take()
    stored = io.BytesIO()
    torch.save(optimizer.state_dict(), stored)
    stored.seek(0)
    assert torch.load(stored, weights_only=True)["param_groups"][0]["momentum"] == "adaptive"


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_resuming_with_schedulers(name: str, factor: float) -> None:
    """Bit for bit, through bytes, in a network that was made anew; the scheduler is part of it."""

    def make(model: nn.Module) -> tuple[KFACOptimizer, Any]:
        optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), **RESUMED[name])
        return optimizer, lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    def train(model: nn.Module, optimizer: KFACOptimizer, scheduler: Any, steps: range) -> None:
        loss = optimizer.curvature.risk.losses[0].loss
        for step in steps:
            X, y = batch(seed=step)
            optimizer.zero_grad()
            (factor * loss(model(X), y)).backward()
            optimizer.step()
            scheduler.step()

    straight = net()
    optimizer, scheduler = make(straight)
    if name == "warmup":
        optimizer.warmup([batch(seed=k + 50) for k in range(3)])
    train(straight, optimizer, scheduler, range(5))
    stored = io.BytesIO()
    torch.save([straight.state_dict(), optimizer.state_dict(), scheduler.state_dict()], stored)
    train(straight, optimizer, scheduler, range(5, 11))
    stored.seek(0)
    of_model, of_optimizer, of_scheduler = torch.load(stored, weights_only=True)
    resumed = net(seed=7)
    resumed.load_state_dict(of_model)
    again, scheduler = make(resumed)
    again.load_state_dict(of_optimizer)
    scheduler.load_state_dict(of_scheduler)
    train(resumed, again, scheduler, range(5, 11))
    assert torch.equal(flat(resumed), flat(straight))


def test_states_are_copies_that_load_anywhere(kind: Callable[..., Any]) -> None:
    """A deep copy and a pickle of the state; what was loaded is not the other's to change."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = kind(model, loss)
    for step in range(3):
        plain(optimizer, model, loss, *batch(seed=step))
    start = copy.deepcopy(model.state_dict())
    found = []
    for carried in (copy.deepcopy(optimizer.state_dict()), pickle.loads(pickle.dumps(optimizer.state_dict()))):
        twin = net(3)
        twin.load_state_dict(start)
        other = kind(twin, loss)
        other.load_state_dict(carried)
        plain(other, twin, loss, *batch(seed=5))
        found.append(flat(twin))
    plain(optimizer, model, loss, *batch(seed=5))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], flat(model))


def test_groups_with_options_of_their_own() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    groups = [
        {"params": list(model[0].parameters()), "damping": 1.0, "momentum": 0.0, "maximize": False},
        {"params": list(model[2].parameters()), "lr": 0.5, "weight_decay": 0.1, "name": "head"},
    ]
    optimizer = KFACOptimizer(model, loss, lr=0.1, params=groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [group["damping"] for group in optimizer.param_groups] == [1.0, 1e-3]
    assert optimizer.param_groups[1]["name"] == "head"
    assert "Parameter Group 1" in repr(optimizer)
    plain(optimizer, model, loss, X, y)
    assert optimizer.last_step.lr == [0.1, 0.5]
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_names_of_parameters() -> None:
    """Pairs of names and parameters, as PyTorch's optimizers take them."""
    model, loss = net(), nn.CrossEntropyLoss()
    twin = copy.deepcopy(model)
    optimizer = KFACOptimizer(model, loss, params=model.named_parameters())
    other = KFACOptimizer(twin, loss)
    for step in range(2):
        plain(optimizer, model, loss, *batch(seed=step))
        plain(other, twin, loss, *batch(seed=step))
    assert torch.equal(flat(model), flat(twin))
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


class Shared(nn.Module):
    """Embedding and head are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, y: Tensor) -> Tensor:
        return self.head(self.embedding(y).tanh())


def test_parameters_that_are_shared() -> None:
    torch.manual_seed(0)
    model, loss, (_, y) = Shared().double(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss)
    values = [plain(optimizer, model, loss, y, y) for _ in range(20)]
    assert values[-1] < values[0]
    assert len(optimizer.param_groups[0]["params"]) == 1


CE = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: KFACOptimizer(m, CE, lr=torch.ones(2)), TypeError, "lr is a Tensor; expected"),
        (lambda m: KFACOptimizer(m, CE, params=[]), ValueError, "`params` is empty"),
        (lambda m: KFACOptimizer(m, CE, foreach=True), TypeError, "KFACOptimizer has no option 'foreach'"),
        (lambda m: KFACPreconditioner(m, CE, lr=1, fused=True), TypeError, "has no option 'lr', 'fused'"),
        (lambda m: KFACOptimizer(m.parameters(), CE), TypeError, "The model is a generator; expected"),
        (lambda m: KFACOptimizer(m, nn.CrossEntropyLoss), TypeError, "The loss is the class CrossEntropyLoss"),
        (lambda m: KFACOptimizer(m, CE, params=[*m.parameters(), m[0].weight]), ValueError, "is the same parameter as"),
        (lambda m: KFACOptimizer(nn.Linear(3, 2, dtype=torch.cfloat), CE), ValueError, "only real floating-point"),
        (lambda m: KFACOptimizer(m.requires_grad_(False), CE), ValueError, "a Sequential, has no parameters"),
    ],
)
def test_what_is_refused(make: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(net())


def test_states_that_do_not_fit() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss)
    plain(optimizer, model, loss, *batch())
    before = copy.deepcopy(optimizer.state_dict())
    for change, message in ((lambda g: g.pop(), "doesn't match the size"), (lambda g: g.append(9), "doesn't match")):
        state = copy.deepcopy(before)
        change(state["param_groups"][0]["params"])
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
    twin = net()
    twin.load_state_dict(model.state_dict())
    other = KFACOptimizer(twin, loss)
    other.load_state_dict(before)
    for m, o in ((model, optimizer), (twin, other)):
        plain(o, m, loss, *batch(seed=4))
    assert torch.equal(flat(model), flat(twin))


def test_an_empty_batch() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss)
    plain(optimizer, model, loss, *batch())
    with pytest.raises(ValueError, match="The batch has no examples"):
        plain(optimizer, model, loss, *batch(0))
    plain(optimizer, model, loss, *batch())


def test_options_that_other_optimizers_have_are_absent() -> None:
    for made in (KFACOptimizer, KFACPreconditioner):
        assert not {"foreach", "fused", "capturable", "differentiable"} & set(inspect.signature(made).parameters)
