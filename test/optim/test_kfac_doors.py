"""How the K-FAC optimizer hears training loops: plain ones, its own block, closures; in the wild."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import EmpiricalRisk, NumericsError, curvature
from curvlinops_plus.optim.kfac import KFACOptimizer, KFACPreconditioner, LevenbergMarquardt
from test.optim.test_kfac_optimizer import batch, flat, net

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "statistics every 3": {"statistics_every": 3},
    "adaptive": {"lr": "adaptive", "momentum": "adaptive", "damping": LevenbergMarquardt(1.0, interval=2)},
    "reject": {"reject": 2.0},
}


def hooks(*modules: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(m, kind)) for module in modules for m in module.modules() for kind in kinds)


def plain(optimizer: Any, model: nn.Module, loss: nn.Module, X: Any, y: Any) -> None:
    optimizer.zero_grad()
    loss(model(X), y).backward()
    optimizer.step()


def listening(optimizer: Any, model: nn.Module, loss: nn.Module, X: Any, y: Any) -> None:
    optimizer.zero_grad()
    with optimizer.listen((X, y)):
        output = model(X)
    F.cross_entropy(output, y).backward()
    optimizer.step()


def closing(optimizer: Any, model: nn.Module, loss: nn.Module, X: Any, y: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(X), y)
        value.backward()
        return value

    optimizer.step(closure)


def test_gradients_of_the_loss_come_from_its_own_backward_pass() -> None:
    """Empirical vectors: the same steps as with a block, whose vectors are sent by a pass of its own."""
    found = []
    for door in (plain, listening):
        model, loss = net(), nn.CrossEntropyLoss()
        optimizer = KFACOptimizer(model, loss, vectors="empirical")
        for step in range(7):
            door(optimizer, model, loss, *batch(seed=step))
        assert optimizer.last_step.examples == 12
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", OPTIONS)
def test_all_doors_give_the_same_bits(name: str) -> None:
    found = []
    for door in (plain, listening, closing):
        model, loss = net(), nn.CrossEntropyLoss()
        optimizer = KFACOptimizer(model, loss, **OPTIONS[name])
        for step in range(12):
            door(optimizer, model, loss, *batch(seed=step))
        assert hooks(model, loss) == 3
        found.append(flat(model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --------------------------------------------------------------------------------------------------------------- hooks
def test_hooks_are_gone_after_close_and_deletion() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    with KFACOptimizer(model, loss) as optimizer:
        plain(optimizer, model, loss, *batch())
        assert hooks(model, loss) == 3
    assert hooks(model, loss) == 0
    optimizer = KFACPreconditioner(model, loss)
    plain(optimizer, model, loss, *batch())
    del optimizer
    gc.collect()
    assert hooks(model, loss) == 0


@pytest.mark.parametrize("vectors", [None, "empirical"])
def test_an_optimizer_that_is_dropped_in_the_middle_of_a_step(vectors: str | None) -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss, vectors=vectors)
    output = model(X)
    if vectors:
        loss(output, y)
    del optimizer
    gc.collect()
    assert hooks(model, loss) == 0
    with torch.no_grad():
        model(X)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", [KFACOptimizer, KFACPreconditioner])
def test_an_optimizer_that_is_dropped_is_gone_at_once(kind: Any, steps: int) -> None:
    """Without the garbage collector, which runs at any moment, also while somebody reads the hooks of a module."""
    model, loss = net(), nn.CrossEntropyLoss()
    gc.collect()
    gc.disable()
    try:
        optimizer = kind(model, loss)
        for _ in range(steps):
            plain(optimizer, model, loss, *batch())
        del optimizer
        assert hooks(model, loss) == 0
    finally:
        gc.enable()


def test_copies_and_pickles_are_not_heard() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss)
    X, y = batch()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss(other(X), y).backward()
        with pytest.raises(RuntimeError, match="No batch was seen"):
            optimizer.step()


def test_an_error_in_the_model_leaves_nothing() -> None:
    class Failing(nn.Module):
        fails = False

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, X: Tensor) -> Tensor:
            out = self.linear(X)
            if self.fails:
                raise KeyError("mine")
            return out

    model, loss = Failing().double(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss)
    model.fails = True
    with pytest.raises(KeyError, match="mine"):
        model(batch()[0])
    assert hooks(model, loss) == 3
    model.fails = False
    plain(optimizer, model, loss, *batch())
    assert optimizer.last_step.examples == 12


def test_targets_that_are_refused_change_nothing() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss)
    plain(optimizer, model, loss, X, y)
    state = copy.deepcopy(optimizer.curvature.estimator.state_dict())
    value = loss(model(X * float("nan")), y)  # whose caller may look at it, and skip the step
    assert hooks(model, loss) == 3
    with pytest.raises(NumericsError, match="statistic"):
        optimizer.step()
    value.backward()
    assert torch.equal(optimizer.curvature.estimator.operator.to_dense(), _dense(optimizer, state))
    plain(optimizer, model, loss, X, y)


def _dense(optimizer: KFACOptimizer, state: dict[str, Any]) -> Tensor:
    other = copy.copy(optimizer.curvature.estimator)
    other.load_state_dict(state)
    return other.operator.to_dense()


def test_other_operators_of_the_same_model_and_loss() -> None:
    """Hooks of the optimizer don't count: they change neither outputs nor losses."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    before = curvature(EmpiricalRisk(model, loss, [(X, y)])).to_dense()
    optimizer = KFACOptimizer(model, loss)
    assert torch.equal(curvature(EmpiricalRisk(model, loss, [(X, y)])).to_dense(), before)
    plain(optimizer, model, loss, X, y)
    assert optimizer.last_step.examples == 12


# ---------------------------------------------------------------------------------------------------------- what counts
def test_evaluation_is_not_heard() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss)
    plain(optimizer, model, loss, X, y)
    with torch.no_grad():
        loss(model(X), y)
    model.eval()
    loss(model(X), y)
    model.train()
    assert optimizer.curvature.examples == 0
    with pytest.raises(RuntimeError, match=r"called in eval mode .*, and without gradients .*, which is not heard"):
        optimizer.step()


def test_gradient_accumulation() -> None:
    X, y = batch(12)
    found = []
    for parts in ([(X, y)], [(X[:4], y[:4]), (X[4:], y[4:])]):
        model, loss = net(), nn.CrossEntropyLoss()
        optimizer = KFACOptimizer(model, loss, vectors="ggn_exact")
        for _ in range(3):
            optimizer.zero_grad()
            for x, t in parts:
                (loss(model(x), t) * len(x) / 12).backward()
            optimizer.step()
        assert optimizer.last_step.examples == 12
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


def test_calls_without_the_loss_are_dropped() -> None:
    """The generator's loop of a GAN: the model is called once more, for somebody else's loss."""
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss)
    optimizer.zero_grad()
    model(X).square().mean().backward()
    loss(model(X[:5]), y[:5]).backward()
    optimizer.step()
    assert optimizer.last_step.examples == 5


def test_an_output_that_was_changed_before_the_loss() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    optimizer = KFACOptimizer(model, loss)
    loss(2 * model(X), y).backward()
    with pytest.raises(RuntimeError, match=r"not on the model.s output itself.*optimizer\.listen"):
        optimizer.step()


def test_two_optimizers_on_one_model() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    options = {"vectors": "ggn_exact", "norm_constraint": None}
    one = KFACOptimizer(model, loss, params=list(model[0].parameters()), **options)
    two = KFACOptimizer(model, loss, params=list(model[2].parameters()), **options)
    both = net()
    alone = KFACOptimizer(both, loss, **options)
    for step in range(4):
        X, y = batch(seed=step)
        model.zero_grad()
        loss(model(X), y).backward()
        one.step()
        two.step()
        plain(alone, both, loss, X, y)
    torch.testing.assert_close(flat(model), flat(both), rtol=1e-9, atol=1e-10)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, X: Tensor, factor: Tensor | None = None) -> dict[str, Tensor]:
        out = self.linear(X)
        return {"logits": out if factor is None else out * factor[:, None], "value": out[:, 0]}


def test_keywords_and_several_losses() -> None:
    torch.manual_seed(0)
    model, (X, y) = Keywords().double(), batch()
    losses = {"logits": nn.CrossEntropyLoss(), "value": nn.MSELoss()}
    twin = copy.deepcopy(model)
    factor, target = torch.rand(12).double(), torch.rand(12).double()
    optimizer = KFACOptimizer(model, losses, damping=LevenbergMarquardt(0.1, interval=1))
    other = KFACOptimizer(twin, losses, damping=LevenbergMarquardt(0.1, interval=1))
    for _ in range(3):
        optimizer.zero_grad()
        out = model(X, factor=factor)
        (losses["logits"](out["logits"], y) + losses["value"](input=out["value"], target=target)).backward()
        optimizer.step()
        other.zero_grad()
        with other.listen({"X": X, "factor": factor, "labels": {"logits": y, "value": target}}):
            out = twin(X=X, factor=factor)
        (F.cross_entropy(out["logits"], y) + F.mse_loss(out["value"], target)).backward()
        other.step()
    assert optimizer.last_step.examples == 12
    assert torch.equal(flat(model), flat(twin))
    assert optimizer.last_step.rho == other.last_step.rho


def test_a_loss_that_is_a_function_has_the_listening_door() -> None:
    model, (X, y) = net(), batch()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss())
    listening(optimizer, model, nn.CrossEntropyLoss(), X, y)
    assert optimizer.last_step.examples == 12


# --------------------------------------------------------------------------------------------------------- in the wild
def noisy(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)).double()


@pytest.mark.filterwarnings("ignore:.*batch norm in training mode")
@pytest.mark.parametrize("door", [plain, listening, closing])
def test_batch_norm_and_dropout(door: Callable[..., None]) -> None:
    """Re-evaluations have the same dropout, and leave running statistics and random numbers alone."""
    model, loss = noisy(), nn.CrossEntropyLoss()
    params = [*model[0].parameters(), *model[4].parameters()]
    optimizer = KFACOptimizer(model, loss, params=params, damping=LevenbergMarquardt(0.1, interval=1), lr=1e-5)
    twin = copy.deepcopy(model)
    for step in range(3):
        X, y = batch(seed=step)
        torch.manual_seed(step)
        door(optimizer, model, loss, X, y)
        after = torch.get_rng_state()
        torch.manual_seed(step)
        with torch.no_grad():
            value = loss(twin(X), y)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(model[1].running_mean, twin[1].running_mean)
        assert optimizer.last_step.loss == pytest.approx(float(value), rel=1e-9)
        assert optimizer.last_step.rho == pytest.approx(1.0, rel=1e-2)  # of the same random function
        twin.load_state_dict(model.state_dict())


@pytest.mark.filterwarnings("ignore:The gradient in .grad differs")
@pytest.mark.parametrize("options", [{}, {"damping": LevenbergMarquardt(0.1, interval=1)}], ids=["", "evaluates"])
def test_what_modules_store_is_the_users(options: dict[str, Any]) -> None:
    """An auxiliary loss of stored activations, and a counter in plain Python."""

    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(4, 5), nn.Linear(5, 3), 0

        def forward(self, X: Tensor) -> Tensor:
            self.calls += 1
            self.h = self.a(X).tanh()
            return self.b(self.h)

    torch.manual_seed(0)
    model, loss, (X, y) = Storing().double(), nn.CrossEntropyLoss(), batch()
    twin = copy.deepcopy(model)
    optimizer = KFACOptimizer(model, loss, lr=0.0, **options)
    for step in range(3):
        optimizer.zero_grad()
        value = loss(model(X), y)
        assert model.h.shape == (12, 5)
        (value + model.h.square().mean()).backward()
        optimizer.step()
        twin.zero_grad()
        (loss(twin(X), y) + twin.h.square().mean()).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        assert model.calls == step + 1


def test_clipping_acts_on_the_gradient() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    twin = copy.deepcopy(model)
    options = {"vectors": "ggn_exact", "norm_constraint": None, "momentum": 0.0}
    one, two = KFACOptimizer(model, loss, **options), KFACOptimizer(twin, loss, **options)
    loss(model(X), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    one.step()
    loss(twin(X), y).backward()
    whole = float(torch.cat([p.grad.flatten() for p in twin.parameters()]).norm())
    two.step()
    start = flat(net())
    torch.testing.assert_close((flat(model) - start) * whole / norm, flat(twin) - start)


def test_autocast_and_a_scaler() -> None:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        X, y = batch(seed=step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model(X.float()), y)
        scaler.scale(value).backward()
        if step == 2:
            model[0].weight.grad.fill_(float("inf"))  # the scaler skips this step
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model), before) == (step == 2)
    assert optimizer.curvature.steps == 3
    assert optimizer.curvature.estimator.updates == 4
    assert optimizer.last_step.examples == 24  # those of the skipped step belong to the next one


def test_compiled_models() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    one, two = KFACOptimizer(compiled, loss, statistics_every=2), KFACOptimizer(twin, loss, statistics_every=2)
    for step in range(4):
        plain(one, compiled, loss, *batch(seed=step))
        plain(two, twin, loss, *batch(seed=step))
        assert one.last_step.examples == two.last_step.examples
    torch.testing.assert_close(flat(model), flat(twin))


def test_frozen_layers() -> None:
    model, loss, (X, y) = net(), nn.CrossEntropyLoss(), batch()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = KFACOptimizer(model, loss)
    plain(optimizer, model, loss, X, y)
    assert torch.equal(model[0].weight, before)
    assert optimizer.last_step.left_alone == []


def test_layers_that_are_trained_later() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    model[0].requires_grad_(False)
    optimizer = KFACOptimizer(model, loss, params=list(model.parameters()))
    before = model[0].weight.clone()
    plain(optimizer, model, loss, *batch())
    assert optimizer.last_step.left_alone == ["0.weight", "0.bias"]
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    plain(optimizer, model, loss, *batch(seed=2))
    assert optimizer.last_step.left_alone == []
    assert not torch.equal(model[0].weight, before)
    with pytest.raises(ValueError, match=r"shape \[2\] is not among those that the optimizer was made with"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2))})


def test_warming_up_is_a_plain_mean() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    batches = [batch(seed=k) for k in range(4)]
    before = flat(model)
    optimizer = KFACOptimizer(model, loss, vectors="ggn_exact", decay=0.5)
    optimizer.warmup(iter(batches), steps=3)
    assert torch.equal(flat(model), before)
    K = curvature(EmpiricalRisk(model, loss, batches[:3]), vectors="ggn_exact")
    torch.testing.assert_close(optimizer.curvature.estimator.operator.to_dense(), K.to_dense())
    plain(optimizer, model, loss, *batches[3])
    assert optimizer.last_step.examples == 12
    with pytest.raises(
        ValueError, match=r"warmup\(\.\.\.\) averages batches before the first step.*1 steps were taken"
    ):
        optimizer.warmup(batches)


@pytest.mark.usefixtures("new_objects_only")
def test_memory_does_not_grow() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, damping=LevenbergMarquardt(1.0))

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    for step in range(20):
        plain(optimizer, model, loss, *batch(seed=step))
    few = tensors()
    for step in range(200):
        plain(optimizer, model, loss, *batch(seed=step))
    assert tensors() <= few


def test_habits_of_optimizers_of_pytorch() -> None:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, lr=0.3)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    plain(optimizer, model, loss, *batch())
    assert calls == ["before", "after"]
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    assert "lr: 0.3" in repr(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for scheduler in (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k)),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ):
        plain(optimizer, model, loss, *batch())
        scheduler.step(1.0) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else scheduler.step()
