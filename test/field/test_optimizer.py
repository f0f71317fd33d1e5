"""Training loops that ordinary code has: a kind of fault in each function."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import KFACOptimizer, KFACPreconditioner, StochasticReconfiguration
from test.helpers import normal

X = normal(9, 4)
Y = normal(9, 3, seed=1)
FAR = 10 * X
LOSS = nn.MSELoss()
#: `2 / (N C) Σ_n tr J_nᵀ J_n` of a linear layer, by hand.
TRACE = float(2 * (X.square().sum(1) + 1).mean())


class Opaque:
    """What a model may return, and no tree of tensors."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class ManyForms(nn.Module):
    """A linear layer that is called in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Any, form: str = "") -> Any:
        if form == "fails":
            raise ArithmeticError("on purpose")
        if isinstance(x, list):
            x = torch.cat(x)
        x = FAR if x is None else x
        out = self.layer(x)
        forms = {
            "tuple": (x, out),
            "dict": {"features": x},
            "object": Opaque(out),
            "none": None,
            "empty": out[:0],
        }
        return forms.get(form, out)


def failing(model: nn.Module) -> None:
    with pytest.raises(ArithmeticError):
        model(FAR, form="fails")


#: Calls that belong to no loss.
OTHERS: dict[str, Callable[[nn.Module], object]] = {
    **{
        form: lambda model, form=form: model(FAR, form=form)
        for form in ("tuple", "dict", "object", "none", "empty")
    },
    "fails": failing,
    "no input": lambda model: model(None),
    "a list": lambda model: model([FAR, FAR]),
}


def made(**options: Any) -> tuple[ManyForms, KFACOptimizer]:
    torch.manual_seed(2)
    model = ManyForms()
    return model, KFACOptimizer(model, LOSS, lr=0.01, vectors="ggn_exact", **options)


def seen(optimizer: KFACOptimizer) -> float:
    return float(optimizer.curvature.operator.trace)


@pytest.mark.parametrize("place", ["before", "between", "after", "of the step before"])
@pytest.mark.parametrize("kind", OTHERS)
def test_calls_of_another_form_leave_the_right_one_alone(kind: str, place: str) -> None:
    """More of them than calls may wait for their loss, so that they could push it out."""
    (model, optimizer), other = made(), OTHERS[kind]
    if place == "of the step before":
        LOSS(model(X), Y).backward()
        optimizer.step()
        other(model)
        optimizer.zero_grad()
    for _ in range(6 * (place == "before")):
        other(model)
    output = model(X)
    for _ in range(6 * (place == "between")):
        other(model)
    loss = LOSS(output, Y)
    for _ in range(6 * (place == "after")):
        other(model)
    loss.backward()
    optimizer.step()
    assert optimizer.last_step.examples == 9
    assert seen(optimizer) == pytest.approx(TRACE, rel=1e-12)


def test_a_loss_of_a_call_that_cannot_be_read_is_refused() -> None:
    """There the error comes, and the next step goes on."""
    model, optimizer = made()
    _, output = model(FAR, form="tuple")
    with pytest.raises(ValueError, match=r"The model returned a tuple; .*output=lambda o: o\[0\]"):
        LOSS(output, Y)
    LOSS(model(X), Y).backward()
    optimizer.step()
    assert seen(optimizer) == pytest.approx(TRACE, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("object", "can't be read: The model returned a Opaque; expected the tensor"),
        ("no input", "can't be read: Can't tell how many examples"),
    ],
)
def test_a_step_without_a_readable_call_says_why(kind: str, message: str) -> None:
    model, optimizer = made()
    output: Any = OTHERS[kind](model)
    LOSS(output.value if kind == "object" else output, Y).backward()
    with pytest.raises(
        RuntimeError, match=f"No batch was recorded since the last step, .*{message}"
    ):
        optimizer.step()
    LOSS(model(X), Y).backward()
    optimizer.step()
    assert seen(optimizer) == pytest.approx(TRACE, rel=1e-12)


def test_readers_that_fail_are_reasons_too() -> None:
    """Of an `output=` that fits one form of the call only."""
    model, optimizer = made(output=lambda out: out["features"] if isinstance(out, dict) else out[1])
    model(FAR, form="dict")
    model(FAR, form="none")
    LOSS(model(X, form="tuple")[1], Y).backward()
    optimizer.step()
    assert seen(optimizer) == pytest.approx(TRACE, rel=1e-12)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_optimizers_are_refused_at_once(way: str) -> None:
    model, optimizer = made()
    of_amplitude = StochasticReconfiguration(
        lambda params, x: -params[0] * x**2, [torch.tensor(1.0)]
    )
    for tied in (optimizer, KFACPreconditioner(model, LOSS), of_amplitude):
        with pytest.raises(
            TypeError, match=rf"{type(tied).__name__} can't be copied or pickled.*load_state_dict"
        ):
            COPIES[way](tied)
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        COPIES[way]((model, optimizer)) if way != "copy" else copy.copy(optimizer)


def test_what_ordinary_code_copies_is_still_copied() -> None:
    """Averages of models and states of schedulers, beside the advice of the error."""
    model, optimizer = made()
    average = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        LOSS(model(X), Y).backward()
        optimizer.step()
        average.update_parameters(model)
        scheduler.step()
    assert pickle.loads(pickle.dumps(scheduler.state_dict()))["last_epoch"] == 2
    twin = copy.deepcopy(model)
    other = KFACOptimizer(twin, LOSS, lr=0.01, vectors="ggn_exact")
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for net, tied in ((model, optimizer), (twin, other)):
        tied.zero_grad()
        LOSS(net(X), Y).backward()
        tied.step()
    assert torch.equal(model.layer.weight, twin.layer.weight)
    assert average.module.layer.weight.isfinite().all()


@pytest.mark.parametrize("kind", [KFACOptimizer, KFACPreconditioner])
def test_parameters_in_place_of_the_model_are_named(kind: type) -> None:
    model = nn.Linear(2, 2)
    for arguments in ([model.parameters()], [[*model.parameters()]], [model.parameters(), LOSS]):
        with pytest.raises(
            TypeError,
            match=rf"The model is a \w+; .*{kind.__name__}\(model, loss, \.\.\.\).*params=",
        ):
            kind(*arguments, damping=0.1)


def test_a_state_is_loaded_again() -> None:
    """As accelerate does with the optimizer's own, before that of a checkpoint."""
    model, optimizer = made()
    t = torch.tensor(1.0, requires_grad=True)
    of_amplitude = StochasticReconfiguration(lambda params, x: -params[0] * x**2, [t])
    LOSS(model(X), Y).backward()
    optimizer.step()
    for tied in (optimizer, of_amplitude):
        state = copy.deepcopy(tied.state_dict())
        for _ in range(3):
            tied.load_state_dict(state)
        assert "differentiable" not in tied.defaults
        assert "differentiable" in torch.optim.SGD([t]).defaults  # what PyTorch's have
