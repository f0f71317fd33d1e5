"""The gradient of the loss from the user's own backward pass: as by a pass of its own, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    NumericsError,
    UnsupportedError,
)

Y = torch.tensor([0, 2, 1, 1, 0])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), Y


def estimator(model: nn.Module, loss: Any = None, kind: Any = KFAC, **options: Any) -> CurvatureEstimator:
    risk = EmpiricalRisk(model, loss or nn.CrossEntropyLoss(), (), **options)
    return CurvatureEstimator(risk, kind, default=DiagonalBlock, vectors=Empirical(), decay=0.9)


def listen(running: CurvatureEstimator, given: Any, backward: Callable[[Any], object]) -> None:
    """Go back inside the block."""
    with running.listen(given):
        out = running.risk.model(given[0])
        backward(out)


def close(one: CurvatureEstimator, other: CurvatureEstimator, tolerance: float = 1e-12) -> None:
    K, L = one.operator.to_dense(), other.operator.to_dense()
    assert float(L.norm()) > 0
    assert float((K - L).norm()) <= tolerance * float(L.norm())


@pytest.mark.parametrize("factor", [1.0, 2.0**10, -0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [KFAC, KFAC.using(kfac_approx="reduce"), EKFAC, DiagonalBlock])
def test_going_back_inside_is_updating(kind: Any, reduction: str, factor: float) -> None:
    """Whatever the loss is multiplied with; gradients are the user's, and nothing stays on model and outputs."""
    model, loss = network(), nn.CrossEntropyLoss(reduction=reduction)
    running, listening = estimator(model, loss, kind), estimator(model, loss, kind)
    for seed in range(4):
        X, y = batch(seed)
        running.update((X, y))
        model.zero_grad()
        with listening.listen((X, y)):
            out = model(X)
            (factor * loss(out, y)).backward()
        expected = torch.autograd.grad(factor * loss(model(X), y), list(model.parameters()))
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
        assert not out._backward_hooks
    close(listening, running)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_no_pass_is_made_but_now_and_then_to_compare() -> None:
    model, found = network(), []
    running = estimator(model)

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda g: found.append(1))

    for seed in range(8):
        given = batch(seed)
        before = len(found)
        handle = model[1].register_forward_hook(watch)
        listen(running, given, lambda out: nn.functional.cross_entropy(out, Y).backward())
        handle.remove()
        made = len(found) - before
        assert made == 1 if seed in (2, 4, 5, 6) else made >= 2


class Heads(nn.Module):
    """Two outputs with losses of their own, and steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"one": self.one(h).mean(1), "other": self.other(h)}


def test_several_losses() -> None:
    torch.manual_seed(0)
    model, losses = Heads().double(), {"one": (nn.CrossEntropyLoss(), 2.0), "other": (nn.MSELoss(), 0.5)}
    running, listening = estimator(model, losses), estimator(model, losses)
    for _ in range(3):
        X, y = torch.randn(5, 6, 3, dtype=torch.float64), {"one": Y, "other": torch.randn(5, 6, 2, dtype=torch.float64)}
        running.update((X, y))

        def backward(out: Any, y: Any = y) -> None:
            (2 * losses["one"][0](out["one"], y["one"]) + 0.5 * losses["other"][0](out["other"], y["other"])).backward()

        listen(listening, (X, y), backward)
    close(listening, running)
    with pytest.raises(UnsupportedError, match="is not that of the risk's loss"):
        listen(listening, (X, y), lambda out: losses["one"][0](out["one"], y["one"]).backward())
    assert listening.updates == 3


class Wild(nn.Module):
    """A checkpointed layer, an activation in place behind a view, a layer that is called twice, frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x[:, None]).relu_()
        h = checkpoint(lambda h: torch.tanh(self.twice(h)), h, use_reentrant=False)
        return self.last(torch.tanh(self.twice(h)))[:, 0].clone()


def test_a_wild_model() -> None:
    torch.manual_seed(0)
    model = Wild().double()
    running, listening = (estimator(model, params=dict(model.named_parameters())) for _ in range(2))
    for seed in range(4):
        running.update(batch(seed))
        listen(listening, batch(seed), lambda out: nn.functional.cross_entropy(out, Y).backward())
    close(listening, running)


def test_dropout_in_training_mode() -> None:
    """The random numbers are those of the user's pass."""
    model, (X, y) = network(), batch()
    model[1] = nn.Dropout(0.5)
    running, listening = estimator(model, kind=EKFAC), estimator(model, kind=EKFAC)
    state = torch.get_rng_state()
    running.update((X, y))
    torch.set_rng_state(state)
    listen(listening, (X, y), lambda out: nn.functional.cross_entropy(out, y).backward())
    close(listening, running)


def test_half_precision_under_a_scaler() -> None:
    model, (X, y) = network().float(), batch()
    running, listening = estimator(model), estimator(model)
    running.update((X.float(), y))
    with torch.autocast("cpu", dtype=torch.bfloat16), listening.listen((X.float(), y)):
        value = nn.functional.cross_entropy(model(X.float()), y)
        (2.0**16 * value).backward()
    close(listening, running, 0.05)


CE = nn.functional.cross_entropy


def twice(out: Tensor) -> None:
    CE(out, Y).backward(retain_graph=True)
    CE(out, Y).backward()


#: What is done inside, and what it is refused with: in a batch that is compared with a pass of our own, and in others.
REFUSED: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "options": (lambda out: CE(out, Y, label_smoothing=0.2).backward(), "to layer '2' is not that", "no multiple"),
    "targets": (lambda out: CE(out, Y.flip(0)).backward(), "to layer '2' is not that", "no multiple"),
    "twice": (twice, "differentiated 2 times", "differentiated 2 times"),
    "nan": (
        lambda out: (float("nan") * CE(out, Y)).backward(),
        "to layer '2' is not that",
        "statistic 'G' has NaN",
    ),
}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_another_loss_is_refused(name: str, check: bool) -> None:
    backward, compared, taken = REFUSED[name]
    running = estimator(network(), check=check)
    with pytest.raises((UnsupportedError, NumericsError), match=compared if check else taken):
        listen(running, batch(), backward)
    assert running.updates == 0
    running.update(batch())


@pytest.mark.parametrize("check", [False, True])
def test_part_of_a_backward_pass_is_refused(check: bool) -> None:
    model = network()
    running = estimator(model, check=check)
    match = "brought to layer '0' is not that.*not all of the model" if check else "did not reach layer '0'"
    with pytest.raises(UnsupportedError, match=match):
        listen(running, batch(), lambda out: torch.autograd.grad(CE(out, Y), [model[2].weight]))
    assert running.updates == 0


def test_a_step_inside_is_refused() -> None:
    model = network()

    def steps(out: Tensor) -> None:
        CE(out, Y).backward()
        torch.optim.SGD(model.parameters(), 1e-3).step()

    for check in (False, True):
        match = r"Parameters were written to inside `listen`.*`loss\.backward\(\)` inside"
        with pytest.raises(ValueError, match=match):
            listen(estimator(model, check=check), batch(), steps)


def test_a_penalty_on_activations_is_refused() -> None:
    """It doesn't go through the model's output, where its gradient would be seen."""
    model, hidden = network(), []
    model[1].register_forward_hook(lambda m, a, out: hidden.append(out))
    running = estimator(model)
    with pytest.raises(
        UnsupportedError,
        match=r"brought to layer '0' is not that.*a penalty on activations.*Call `loss\.backward\(\)` after",
    ):
        listen(
            running,
            batch(),
            lambda out: (nn.functional.cross_entropy(out, Y) + hidden[-1].square().mean()).backward(),
        )
    assert running.updates == 0


def test_losses_that_read_something_else_need_a_pass_of_their_own() -> None:
    model = network()
    running = estimator(model, output=lambda out: 2 * out)
    with pytest.raises(ValueError, match="after the block, not inside"):
        listen(running, batch(), lambda out: nn.functional.cross_entropy(2 * out, Y).backward())
    running.update(batch())
    assert running.updates == 1


class Mixed(nn.Module):
    """No chain of known modules: a convolution, a sequence whose last state nobody reads, dropout, a zero head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.conv, self.steps = nn.Conv1d(3, 4, 2), kind(4, 4, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:  # [N, 3, L]
        return self.head(self.drop(self.steps(torch.tanh(self.conv(x)).mT)[0][:, -1]))


def sequences(seed: int, N: int, L: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 3, L, dtype=dtype, generator=generator), torch.randint(3, (N,), generator=generator)


# Numbers of examples, and lengths, of the batches: two epochs, of which the last batch is smaller.
BATCHES = [(8, 5), (8, 5), (8, 6), (8, 5), (8, 5), (3, 5)] * 2


@pytest.mark.filterwarnings("ignore:.* layers get their exact diagonal")
@pytest.mark.parametrize(
    ("kind", "dtype", "retain"),
    [
        *((kind, dtype, False) for kind in (nn.LSTM, nn.GRU, nn.RNN) for dtype in (torch.float32, torch.float64)),
        (nn.GRU, torch.float64, True),
    ],
)
def test_batches_that_are_looked_at_in_a_pass_of_our_own(kind: Any, dtype: torch.dtype, retain: bool) -> None:
    """The graph of the user's may be gone, and gradients may be exactly zero: in the first step those behind the head,
    and always those of the state that nobody reads.
    """
    torch.manual_seed(0)
    model = Mixed(kind).to(dtype)
    running, listening = estimator(model, kind=DiagonalBlock), estimator(model, kind=DiagonalBlock)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed, shape in enumerate(BATCHES):
        given = X, y = sequences(seed, *shape, dtype)
        torch.manual_seed(seed)
        running.update(given)
        torch.manual_seed(seed)
        optimizer.zero_grad()
        with listening.listen(given):
            CE(model(X), y).backward(retain_graph=retain)
        optimizer.step()
    close(listening, running, 1e-4 if dtype == torch.float32 else 1e-9)
    assert listening.updates == len(BATCHES)


@pytest.mark.filterwarnings("ignore:.* layers get their exact diagonal")
def test_another_gradient_in_a_batch_that_is_looked_at_is_refused() -> None:
    torch.manual_seed(0)
    model = Mixed(nn.GRU).double()
    nn.init.normal_(model.head.weight)
    running, hidden = estimator(model, kind=DiagonalBlock), list[Tensor]()
    model.conv.register_forward_hook(lambda m, a, out: hidden.append(out))
    for seed, shape in enumerate(BATCHES[:5]):
        X, y = sequences(seed, *shape, torch.float64)
        listen(running, (X, y), lambda out, y=y: CE(out, y).backward())
    X, y = sequences(5, *BATCHES[5], torch.float64)
    with pytest.raises(UnsupportedError, match=r"is not that.*a penalty on activations"):
        listen(running, (X, y), lambda out: (CE(out, y) + hidden[-1].square().mean()).backward())
    assert running.updates == 5


@pytest.mark.filterwarnings("ignore:.* layers get their exact diagonal")
@pytest.mark.parametrize("resumed", [1, 3, 6])
def test_what_is_added_does_not_depend_on_what_is_looked_at(resumed: int) -> None:
    """Bit by bit the same without checks, and after a state was loaded, where all is looked at anew."""
    torch.manual_seed(0)
    model = Mixed(nn.GRU)
    nn.init.normal_(model.head.weight)
    one, unchecked, other = estimator(model), estimator(model, check=False), estimator(model)
    for seed, shape in enumerate(BATCHES):
        if seed == resumed:
            other = estimator(model)
            other.load_state_dict(one.state_dict())
            unchecked.state_dict()  # which sums what waits to be summed
        X, y = sequences(seed, *shape, torch.float32)
        for running in (one, unchecked, other):
            torch.manual_seed(seed)
            listen(running, (X, y), lambda out, y=y: CE(out, y).backward())
    assert torch.equal(one.operator.to_dense(), unchecked.operator.to_dense())
    assert torch.equal(one.operator.to_dense(), other.operator.to_dense())
