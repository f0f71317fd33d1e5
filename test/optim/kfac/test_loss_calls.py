"""Losses that the K-FAC optimizer hears in training loops: equal ones, and functions; and the forms
in which they read what the model returned.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from curvlinops_plus import CurvatureWarning, Empirical, KFACOptimizer, LevenbergMarquardt
from test.helpers import normal, seeded
from test.optim.kfac.training import EXACT, TwoHeads, batch, flat, net, plain

WEIGHT = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
X, Y = batch()
NUMBERS = normal(12, 3, seed=5)
SHARES = NUMBERS.sigmoid()
COUNTS = torch.randint(4, (12, 3), generator=seeded(3)).double()
LOOKS: dict[str, Any] = {"damping": LevenbergMarquardt(0.1, interval=1), **EXACT}


@pytest.fixture(autouse=True)
def no_modes_are_left() -> Iterator[None]:
    """Whatever a loop does, PyTorch's modes are afterwards what they were."""
    yield
    assert _get_current_function_mode_stack() == []


def trained(loss: Any, call: Callable[[Tensor, Tensor], Tensor], y: Tensor, **options: Any) -> Any:
    """Parameters after three steps with a loop that calls another loss than the optimizer has."""
    model = net()
    optimizer = KFACOptimizer(model, loss, **options)
    for seed in range(3):
        plain(optimizer, model, call, batch(seed=seed)[0], y)
        assert optimizer.last_step.examples == 12
        assert _get_current_function_mode_stack() == []
    return flat(model)


# ------------------------------------------------------------------------------------- equal losses
Call = Callable[[Tensor, Tensor], Tensor]
#: A loss, its targets, and functions with equal options.
EQUAL: list[tuple[Callable[[], nn.Module], Tensor, list[Call]]] = [
    (nn.CrossEntropyLoss, Y, [F.cross_entropy, lambda f, y: F.cross_entropy(target=y, input=f)]),
    (lambda: nn.CrossEntropyLoss(WEIGHT, ignore_index=1, label_smoothing=0.1), Y,
     [lambda f, y: F.cross_entropy(f, y, WEIGHT.clone(), ignore_index=1, label_smoothing=0.1)]),
    (lambda: nn.CrossEntropyLoss(reduction="sum"), Y,
     [lambda f, y: F.cross_entropy(f, y, reduction="sum"),
      lambda f, y: F.cross_entropy(f, y, size_average=False)]),
    (nn.MSELoss, NUMBERS, [F.mse_loss, lambda f, y: F.mse_loss(f, y, reduction="mean")]),
    (nn.BCEWithLogitsLoss, SHARES, [F.binary_cross_entropy_with_logits]),
    (lambda: nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT), SHARES,
     [lambda f, y: F.binary_cross_entropy_with_logits(f, y, WEIGHT, pos_weight=WEIGHT + 0)]),
    (lambda: nn.PoissonNLLLoss(full=True), COUNTS,
     [lambda f, y: F.poisson_nll_loss(f, y, full=True)]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(EQUAL)))
def test_equal_losses_are_heard(number: int) -> None:
    """Another object with the same options, and the function: the same bits as of the loss itself,
    also where batches are evaluated once more.
    """
    make, y, functions = EQUAL[number]
    options = LOOKS if number % 2 else {}
    loss = make()
    expected = trained(loss, loss, y, **options)
    for call in (make(), *functions):
        assert torch.equal(trained(make(), call, y, **options), expected)


#: Losses that have gradients of each example, and no distribution.
WITHOUT_LIKELIHOOD: list[tuple[nn.Module, Call]] = [
    (nn.SmoothL1Loss(beta=0.5), lambda f, y: F.smooth_l1_loss(f, y, beta=0.5)),
    (nn.HuberLoss(delta=0.7), lambda f, y: F.huber_loss(f, y, delta=0.7)),
    (nn.L1Loss(), F.l1_loss),
]


@pytest.mark.parametrize("number", range(len(WITHOUT_LIKELIHOOD)))
def test_losses_without_a_likelihood_are_heard(number: int) -> None:
    loss, function = WITHOUT_LIKELIHOOD[number]
    options = {"vectors": Empirical(), "check": False}
    expected = trained(loss, loss, NUMBERS, **options)
    assert torch.equal(trained(loss, function, NUMBERS, **options), expected)


def test_log_probabilities_and_probabilities() -> None:
    for last, make, function, y in (
        (nn.LogSoftmax(1), nn.NLLLoss, F.nll_loss, Y),
        (nn.Sigmoid(), nn.BCELoss, F.binary_cross_entropy, SHARES),
    ):
        ends = []
        for call in (None, make(), function):
            model, loss = nn.Sequential(net(), last), make()
            optimizer = KFACOptimizer(model, loss)
            for _ in range(2):
                plain(optimizer, model, call or loss, X, y)
            ends.append(flat(model))
        assert torch.equal(ends[0], ends[1])
        assert torch.equal(ends[0], ends[2])


def test_several_losses() -> None:
    """Each by its function, in another order; a factor is said once, and not twice as large."""
    ends = []
    for functions in (False, True):
        model = TwoHeads().double()
        losses = (nn.CrossEntropyLoss(), 0.3), (nn.MSELoss(), 5.0)
        optimizer = KFACOptimizer(model, losses, **LOOKS)
        classify, locate = nn.CrossEntropyLoss(), losses[1][0]
        if functions:
            classify, locate = F.cross_entropy, F.mse_loss
        for step in range(2):
            optimizer.zero_grad()
            one, two = model(X)
            value = 5.0 * locate(two, NUMBERS[:, :2]) + 0.3 * classify(one, Y)
            (3 * value).backward()
            if step:
                optimizer.step()
            else:
                with pytest.warns(CurvatureWarning, match="is multiplied by 3 before its backward"):
                    optimizer.step()
            assert optimizer.last_step.examples == 12
        ends.append(flat(model))
    assert torch.equal(*ends)


class Halved(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) / 2


#: What was given, what was called, and words of the error.
OTHER: list[tuple[Callable[[], nn.Module], Call, str]] = [
    (nn.CrossEntropyLoss, lambda f, y: F.cross_entropy(f, y, reduction="sum"),
     r"cross_entropy was called with reduction='sum', and not as CrossEntropyLoss with reduction='mean'"),
    (nn.CrossEntropyLoss, nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2),
     r"with ignore_index=2, label_smoothing=0\.1, and not as .*ignore_index=-100, label_smoothing=0\.0"),
    (nn.CrossEntropyLoss, nn.CrossEntropyLoss(WEIGHT),
     r"with weight=a tensor \[3\], and not as CrossEntropyLoss with weight=None"),
    (lambda: nn.CrossEntropyLoss(WEIGHT), nn.CrossEntropyLoss(2 * WEIGHT), "weight=a tensor"),
    (nn.CrossEntropyLoss, lambda f, y: F.mse_loss(f, F.one_hot(y, 3).double()),
     "mse_loss was called, and not CrossEntropyLoss, which the optimizer was given"),
    (lambda: nn.HuberLoss(delta=2.0), lambda f, y: F.huber_loss(f, NUMBERS),
     r"with delta=1\.0, and not as HuberLoss with delta=2\.0"),
    (nn.CrossEntropyLoss, lambda f, y: F.cross_entropy(2 * f, y),
     r"called on something else than the output of the model, \[12, 3\], or on one that was changed"),
    (nn.CrossEntropyLoss, lambda f, y: F.cross_entropy(f[:, :2], y % 2), "on something else than the"),
    (nn.CrossEntropyLoss, lambda f, y: F.cross_entropy(f.T, Y[:3]), "on something else than the"),
    (Halved, F.cross_entropy, r"since the last step\. Recorded are"),
    (Halved, Halved(), r"since the last step\. Recorded are"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OTHER)))
@pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")
def test_other_losses_are_not_heard(number: int) -> None:
    """The error of the step says in what they differ, and how to go on; the next step does."""
    make, call, words = OTHER[number]
    model, loss = net(), make()
    vectors = "empirical" if isinstance(loss, (nn.HuberLoss, Halved)) else None
    optimizer = KFACOptimizer(model, loss, vectors=vectors, check=False)
    for _ in range(2):
        call(model(X), Y).backward()
        with pytest.raises(RuntimeError, match=rf"No batch was recorded.*{words}(?s:.*)listen"):
            optimizer.step()
    plain(optimizer, model, loss, X, NUMBERS if isinstance(loss, nn.HuberLoss) else Y)
    assert optimizer.last_step.examples == 12


def test_losses_of_other_networks_are_not_heard() -> None:
    """Between the output and its loss."""
    model, teacher = net(), net(3)
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), **EXACT)
    output = model(X)
    F.cross_entropy(teacher(X), Y)
    F.mse_loss(NUMBERS, NUMBERS)
    F.cross_entropy(output, Y).backward()
    optimizer.step()
    other = net()
    plain(KFACOptimizer(other, loss := nn.CrossEntropyLoss(), **EXACT), other, loss, X, Y)
    assert torch.equal(flat(model), flat(other))


# -------------------------------------------------------------------------- modes of other people
class Counting(TorchFunctionMode):
    """Calls of a function while the mode is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is F.cross_entropy
        return func(*args, **(kwargs or {}))


def around_the_model(model: nn.Module, X: Tensor, y: Tensor, modes: list[Any]) -> Tensor:
    with modes[0], modes[1]:
        output = model(X)
    return F.cross_entropy(output, y)


def around_the_loss(model: nn.Module, X: Tensor, y: Tensor, modes: list[Any]) -> Tensor:
    output = model(X)
    with modes[0], modes[1]:
        return F.cross_entropy(output, y)


def around_both(model: nn.Module, X: Tensor, y: Tensor, modes: list[Any]) -> Tensor:
    with modes[0]:
        output = model(X)
        with modes[1]:
            return F.cross_entropy(output, y)


def crossing(model: nn.Module, X: Tensor, y: Tensor, modes: list[Any]) -> Tensor:
    """One that ends between output and loss, and one that begins there."""
    with ExitStack() as stack:
        stack.enter_context(modes[0])
        output = model(X)
    with modes[1]:
        value = F.cross_entropy(output, y)
        assert _get_current_function_mode_stack() == [modes[1]]
    return value


def generating(model: nn.Module, X: Tensor, y: Tensor, modes: list[Any]) -> Tensor:
    """A generator that is left in the middle, with a mode of its own."""

    def outputs() -> Iterator[Tensor]:
        with modes[0]:
            yield model(X)

    generator = outputs()
    value = F.cross_entropy(next(generator), y)
    generator.close()
    return value


@pytest.mark.parametrize(
    "loop", [around_the_model, around_the_loss, around_both, crossing, generating]
)
@pytest.mark.parametrize("device", [False, True])
def test_modes_of_users_stay_in_order(loop: Callable[..., Tensor], device: bool) -> None:
    """Modes are left by who entered them, also PyTorch's of a default device."""
    model = net()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss())
    for _ in range(3):
        first: Any = torch.device("cpu") if device and loop is not crossing else Counting()
        second = Counting()
        optimizer.zero_grad()
        loop(model, X, Y, [first, second]).backward()
        assert _get_current_function_mode_stack() == []
        assert second.calls == (loop not in (around_the_model, generating))
        optimizer.step()
        assert optimizer.last_step.examples == 12


def test_a_default_device_that_is_set_meanwhile() -> None:
    """It stays at the bottom of the stack, where PyTorch looks for it."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss)
    output = model(X)
    try:
        torch.set_default_device("cpu")
        assert torch.get_default_device().type == "cpu"
        F.cross_entropy(output, Y).backward()
        optimizer.step()
        model(X)
    finally:
        torch.set_default_device(None)
    optimizer.close()
    assert _get_current_function_mode_stack() == []


def failing(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(model(X), Y[:5])


#: What may come in place of a loss.
LEFT: dict[str, Callable[[nn.Module], object]] = {
    "features": lambda model: model(X).square().mean().backward(),
    "an error of the loss": failing,
    "evaluation": lambda model: model.eval()(X),
}


@pytest.mark.parametrize("kind", LEFT)
def test_calls_without_a_loss_leave_nothing(kind: str) -> None:
    """Until the next call of the model, or the next step; or when the optimizer goes."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss)
    for _ in range(3):
        LEFT[kind](model)
    model.train()
    plain(optimizer, model, loss, X, Y)
    assert _get_current_function_mode_stack() == []
    LEFT[kind](model)
    optimizer.close()
    assert _get_current_function_mode_stack() == []
    optimizer = KFACOptimizer(model.train(), loss)
    LEFT[kind](model)
    del optimizer
    gc.collect()
    assert _get_current_function_mode_stack() == []


def test_steps_without_statistics_watch_nothing() -> None:
    """Nothing but the steps that need it costs anything."""
    model = net()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), statistics_every=2)
    for step in range(4):
        output = model(X)
        assert len(_get_current_function_mode_stack()) == (step + 1) % 2
        F.cross_entropy(output, Y).backward()
        optimizer.step()


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.filterwarnings("ignore:.*Dynamo")
def test_compiled_functions_go_through() -> None:
    """Between output and loss, and a loss in them, which is not heard."""
    torch.compiler.reset()
    model = net()
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def accuracy(f: Tensor, y: Tensor) -> Tensor:
        return (f.argmax(1) == y).double().mean() + F.cross_entropy(2 * f, y)

    expected = None
    for _ in range(3):
        output = model(X)
        value = accuracy(output, Y)
        with torch.no_grad():
            expected = (output.argmax(1) == Y).double().mean() + F.cross_entropy(2 * output, Y)
        assert value.item() == pytest.approx(expected.item(), rel=1e-12)
        F.cross_entropy(output, Y).backward()
        optimizer.step()
        assert optimizer.last_step.examples == 12


# --------------------------------------------------------------- forms of what the model returned
class Last(nn.Module):
    """A network whose last step may be left to the training loop."""

    def __init__(self, last: Callable[[Tensor], Tensor] | None = None, width: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, width)
        self.last = last

    def forward(self, X: Tensor) -> Tensor:
        out = self.second(torch.tanh(self.first(X)))
        return out if self.last is None else self.last(out)


SEQUENCES = normal(6, 5, 4, seed=2)
WORDS = torch.randint(3, (6, 5), generator=seeded(4))
ONE = X[:1]
#: Inputs, targets, the loss, the width of the output, and what is done to it before the loss.
FORMS: dict[str, tuple[Tensor, Tensor, nn.Module, int, Callable[[Tensor], Tensor]]] = {
    "squeeze": (X, NUMBERS[:, 0], nn.MSELoss(), 1, lambda f: f.squeeze(-1)),
    "select": (X, NUMBERS[:, 0], nn.MSELoss(), 1, lambda f: f[:, 0]),
    "flatten": (X, SHARES[:, 0], nn.BCEWithLogitsLoss(), 1, lambda f: f.flatten()),
    "view": (X, NUMBERS.reshape(-1), nn.MSELoss(), 3, lambda f: f.view(-1)),
    "float": (X, Y, nn.CrossEntropyLoss(), 3, lambda f: f.float()),
    "tokens": (SEQUENCES, WORDS.view(-1), nn.CrossEntropyLoss(), 3, lambda f: f.view(-1, 3)),
    "transposed": (SEQUENCES, WORDS, nn.CrossEntropyLoss(), 3, lambda f: f.transpose(1, 2)),
    "mT": (SEQUENCES, WORDS, nn.CrossEntropyLoss(), 3, lambda f: f.mT.contiguous().double()),
    "permuted": (SEQUENCES, WORDS.T.reshape(-1)[:30].view(6, 5), nn.CrossEntropyLoss(), 3,
                 lambda f: f.unflatten(1, (5, 1)).permute(0, -1, 1, 2).squeeze(3)),
    "one": (ONE, NUMBERS[0, 0], nn.MSELoss(), 1, lambda f: f.squeeze()),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("options", [{}, LOOKS], ids=["random", "looks"])
def test_forms_are_those_of_a_model_that_makes_them(name: str, options: dict[str, Any]) -> None:
    """Statistics, steps, and losses of batches that are evaluated once more."""
    X, y, loss, width, change = FORMS[name]
    own_change = change
    if name == "one":  # losses are of examples on an axis

        def own_change(f: Tensor) -> Tensor:
            return f.squeeze(-1)

    ends = []
    for outside in (False, True):
        model = Last(None if outside else own_change, width).double()
        optimizer = KFACOptimizer(model, loss, lr=0.01, **options)
        for step in range(3):
            optimizer.zero_grad()
            output = model(X)
            value = (
                loss(change(output), y)
                if outside
                else loss(output, y.view(output.shape) if name == "one" else y)
            )
            value.backward()
            optimizer.step()
            assert optimizer.last_step.examples == len(X), step
        ends.append((flat(model), optimizer.curvature.operator.trace, optimizer.last_step.rho))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*is multiplied by")
def test_the_curvature_of_a_squeezed_output_by_hand() -> None:
    """`2/N Σ_n (|x_n|² + 1)` is the trace of a linear layer's under a mean square error."""
    for sizes in ([12], [5, 5, 2], [11, 1]):
        model = nn.Linear(4, 1).double()
        optimizer = KFACOptimizer(model, nn.MSELoss(), **EXACT)
        for part in X.split(sizes):
            y = part.sum(1).squeeze()
            (F.mse_loss(model(part).squeeze(), y) * len(part) / 12).backward()
        optimizer.step()
        trace = 2 * (X.square().sum(1) + 1).mean()
        torch.testing.assert_close(optimizer.curvature.operator.trace, trace)


def test_forms_of_several_outputs() -> None:
    """One in another form, the other as it is."""
    ends = []
    for outside in (False, True):
        model = TwoHeads().double()
        losses = nn.CrossEntropyLoss(), nn.MSELoss()
        optimizer = KFACOptimizer(
            model,
            losses,
            output=None if outside else lambda o: (o[0], o[1].view(-1)),
            **LOOKS,
        )
        y = NUMBERS[:, :2].reshape(-1)
        for _ in range(2):
            optimizer.zero_grad()
            with ExitStack() as stack:
                if not outside:
                    stack.enter_context(optimizer.listen((X, (Y, y))))
                one, two = model(X)
            (losses[0](one, Y) + losses[1](two.view(-1), y)).backward()
            optimizer.step()
            assert optimizer.last_step.examples == 12
        ends.append((flat(model), optimizer.last_step.rho))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-13)


def test_an_output_that_is_selected_and_made_again() -> None:
    """`output=`, which `warmup` needs, beside a loop that does the same."""
    ends = []
    for outside in (False, True):
        model = Last(None if outside else lambda f: f.squeeze(-1)).double()
        output = (lambda f: f.squeeze(-1)) if outside else None
        optimizer = KFACOptimizer(model, nn.MSELoss(), output=output, **LOOKS)
        optimizer.warmup([(X, NUMBERS[:, 0])])
        for _ in range(2):
            optimizer.zero_grad()
            f = model(X)
            F.mse_loss(f.squeeze(-1) if outside else f, NUMBERS[:, 0]).backward()
            optimizer.step()
        ends.append((flat(model), optimizer.last_step.rho))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-13)


class Positions(Last):
    """A table of one row, in which the user's pass can't be recorded, and a weight that a function
    reads.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table = nn.Embedding(1, 4)
        self.scale = nn.Parameter(torch.ones(4, 4))

    def forward(self, X: Tensor) -> Tensor:
        return super().forward(
            F.linear(X, self.scale) + self.table(torch.zeros(1, dtype=torch.long))
        )


@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_forms_in_passes_of_our_own() -> None:
    ends = []
    for outside in (False, True):
        model = Positions(None if outside else lambda f: f.squeeze(-1)).double()
        loss = nn.MSELoss()
        optimizer = KFACOptimizer(model, loss, **EXACT)
        for _ in range(3):
            optimizer.zero_grad()
            output = model(X)
            loss(output.squeeze(-1) if outside else output, NUMBERS[:, 0]).backward()
            optimizer.step()
        ends.append((flat(model), optimizer.curvature.operator.trace))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def written_to(f: Tensor) -> Tensor:
    return f.squeeze(-1).mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.squeeze(-1) + 1,
        lambda f: f.flip(0).squeeze(-1),
        lambda f: f.detach().requires_grad_().squeeze(-1),
        lambda f: f.T.squeeze(0).sort().values,
        written_to,
    ],
)
def test_what_is_no_form_is_not_heard(change: Callable[[Tensor], Tensor]) -> None:
    model = Last().double()
    optimizer = KFACOptimizer(model, nn.MSELoss())
    F.mse_loss(change(model(X)), NUMBERS[:, 0]).backward()
    with pytest.raises(RuntimeError, match="another shape, order of axes or dtype, and nothing"):
        optimizer.step()


class UsersMode(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Scaled(nn.Module):
    """A parameter that a function reads, which our own passes look for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 2)
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(any(isinstance(m, UsersMode) for m in _get_current_function_mode_stack()))
        return self.linear(x * self.scale)


def test_our_passes_run_under_the_modes_of_the_user() -> None:
    """Such as a default device, while a loss function is heard inside of them."""
    model = Scaled()
    optimizer = KFACOptimizer(model, nn.MSELoss(), lr=1e-2)
    with UsersMode():
        with pytest.warns(CurvatureWarning, match="exact diagonal"):
            F.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
        assert _get_current_function_mode_stack()[0].__class__ is UsersMode
    optimizer.step()
    assert len(model.modes) > 1
    assert all(model.modes)
    assert _get_current_function_mode_stack() == []
