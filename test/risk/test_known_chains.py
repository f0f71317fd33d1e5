"""Chains of PyTorch's own modules, in which nothing is compared with autograd; and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from cases import close
from curvlinops_plus.risk.known_chains import are_calls_of
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from curvlinops_plus import (
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    Exact,
    FullBlock,
    KFACOptimizer,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.layer.linear import LinearRule
from curvlinops_plus.layer.rule_registry import RULES
from curvlinops_plus.risk import model_calls
from curvlinops_plus.risk.draws import Draws
from curvlinops_plus.risk.find_functions import layers_of
from curvlinops_plus.risk.loss_weights import loss_weights
from curvlinops_plus.risk.record import Recorder
from curvlinops_plus.risk.sweep import RecordedPasses

N = 7


def risk_of(model: nn.Module, *shape: int, **options: Any) -> EmpiricalRisk:
    X = torch.randn(N, *shape, generator=torch.Generator().manual_seed(1)).double()
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, torch.arange(N) % 3)], **options)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.ReLU(True)), nn.Linear(6, 3)
    ).double()


def one_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4).eval(), nn.GELU(), nn.MaxPool2d(2)
    last = nn.Conv2d(4, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*first, nn.Dropout(0.0), *last).double()


def sequences() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Flatten(1, 2), nn.LayerNorm(20), nn.Dropout(0.5).eval(), nn.Linear(20, 3)
    return nn.Sequential(nn.Conv1d(3, 4, 2), nn.SiLU(), nn.Linear(4, 5), *head).double()


class Subclass(nn.Sequential):
    """As people write it."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(4, width), nn.Softplus(), nn.Linear(width, 3))


def subclass() -> nn.Sequential:
    torch.manual_seed(0)
    return Subclass(5).double()


CHAINS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (4,)),
    "one layer": (one_layer, (4,)),
    "subclass": (subclass, (4,)),
    "convolutions": (convolutions, (2, 6, 6)),
    "sequences": (sequences, (3, 5)),
}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch was known to be one of a chain."""
    found: list[bool] = []

    def noted(*given: Any) -> bool:
        found.append(are_calls_of(*given))
        return found[-1]

    monkeypatch.setattr("curvlinops_plus.risk.sweep.are_calls_of", noted)
    return found


class Same(nn.Module):
    """The same model, of a type that nobody knows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("approximation", [FullBlock, DiagonalBlock])
def test_chains_are_known(name: str, approximation: Any, looks: list[bool]) -> None:
    make, shape = CHAINS[name]
    K = curvature(risk_of(make(), *shape), approximation)
    assert looks == [True]
    other = curvature(risk_of(Same(make()), *shape), approximation)
    assert looks == [True, False]
    close(K.to_dense(), other.to_dense())


def test_some_of_the_parameters(looks: list[bool]) -> None:
    model = perceptron()
    params = [model[3].bias, model[0].weight]
    K, other = (curvature(risk_of(m, 4, params=params), FullBlock) for m in (model, Same(model)))
    assert looks == [True, False]
    close(K.to_dense(), other.to_dense())


@pytest.mark.parametrize("listens", [False, True])
def test_hooks_of_an_optimizer_only_read(listens: bool, looks: list[bool]) -> None:
    model, loss, X = perceptron(), nn.CrossEntropyLoss(), torch.randn(N, 4).double()
    optimizer = KFACOptimizer(model, loss)
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.listen((X, torch.arange(N) % 3)) if listens else nullcontext():
            value = loss(model(X), torch.arange(N) % 3)
        value.backward()
        optimizer.step()
    assert looks == [True, True]


@pytest.mark.parametrize("shared", [False, True])
def test_modules_of_a_chain_are_after_a_pass_as_in_it(shared: bool) -> None:
    """So their states are not noted in it; where calls are compared, as with a shared weight, they are told later."""
    model = perceptron()
    model.append(nn.Linear(3, 3).double()).append(nn.Linear(3, 3).double())
    if shared:
        model[5].weight = model[4].weight
    told = []
    for each in (model, Same(model)):
        risk = risk_of(each, 4)
        passes = RecordedPasses(risk, layers_of(risk), Exact(), loss_weights(risk))
        with passes.hooked():
            passes.observe(next(risk.batches("")), Draws(0), lambda batch: None)
            recorder = passes.recorder
            assert (recorder.chain is not None) == (each is model and not shared)
            assert {call.state is None for call in recorder.calls} == {each is model}
            states = [call.seen_state() for call in recorder.calls]
            told.append([(state.options, state.changes()) for state in states if state is not None])
    assert len(told[0]) == 5
    assert told[0] == told[1]


@pytest.mark.parametrize("name", CHAINS)
def test_the_graph_of_a_chain_says_where_it_begins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the walk through the graph, which is left out."""
    (make, shape), own, same = CHAINS[name], Recorder.sources, []

    def both(recorder: Recorder, outputs: Any) -> list[Any]:
        known = own(recorder, outputs) if recorder.chain else []
        recorder.chain = None
        walked = own(recorder, outputs)
        same.append(known == walked)
        return walked

    monkeypatch.setattr(Recorder, "sources", both)
    curvature(risk_of(make(), *shape), FullBlock)
    assert same == [True]


# ------------------------------------------------------------------------- changed after an operator has been computed
def cumulated(h: Tensor) -> Tensor:
    return h.cumsum(0)


class Cumulated(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return cumulated(h)


class MixingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return cumulated(super().forward(input))


class MixingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return cumulated(out) if func is torch.nn.functional.relu or func is torch.tanh else out


class Shifted(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.roll(1, 0)


class Forgetful(LinearRule):
    """A rule of the user's, which is wrong."""

    def grad_rows(self, module: nn.Module, g: Tensor) -> Tensor:
        return super().grad_rows(module, g) * 2


@contextmanager
def other_forward(kind: type[nn.Module]) -> Iterator[None]:
    own = kind.forward
    kind.forward = lambda self, h: cumulated(own(self, h))  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.forward = own  # type: ignore[method-assign]


@contextmanager
def other_rule() -> Iterator[None]:
    own, RULES[nn.Linear] = RULES[nn.Linear], Forgetful()
    try:
        yield
    finally:
        RULES[nn.Linear] = own


@contextmanager
def global_hook() -> Iterator[None]:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return cumulated(out) if isinstance(module, nn.Tanh) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _forward_of_an_instance(m: Any) -> None:
    own = m[1].forward
    m[1].forward = lambda h: cumulated(own(h))


def _forward_of_the_whole(m: Any) -> None:
    m.forward = lambda x: m[3](cumulated(m[2](m[1](m[0](x)))))


def _method_of_an_instance(m: Any) -> None:
    m[1]._call_impl = lambda h: cumulated(h)


def _replaced(m: Any, index: int, module: nn.Module) -> None:
    m[index] = module.double()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward of an instance": _forward_of_an_instance,
    "forward of the whole": _forward_of_the_whole,
    "call of an instance": _method_of_an_instance,
    "forward hook": lambda m: m[1].register_forward_hook(lambda module, args, out: cumulated(out)),
    "forward hook of a layer": lambda m: m[0].register_forward_hook(lambda module, args, out: cumulated(out)),
    "forward pre-hook": lambda m: m[3].register_forward_pre_hook(lambda module, args: (cumulated(args[0]),)),
    "backward hook": lambda m: m[1].register_full_backward_hook(lambda module, gi, go: (cumulated(gi[0]),)),
    "backward pre-hook": lambda m: m[1].register_full_backward_pre_hook(lambda module, go: (cumulated(go[0]),)),
    "hook of a parameter": lambda m: m[3].weight.register_hook(lambda g: g / 2),
    "another submodule": lambda m: _replaced(m, 1, Cumulated()),
    "one more submodule": lambda m: m[2].append(Cumulated()),
    "subclass": lambda m: _replaced(m, 3, MixingLinear(6, 3)),
    "class of an instance": lambda m: setattr(m[3], "__class__", MixingLinear),
    "parametrization of rows": lambda m: parametrize.register_parametrization(m[3], "weight", Shifted()),
    "forward of a type": lambda m: other_forward(nn.Tanh),
    "forward of sequences": lambda m: other_forward(nn.Sequential),
    "rule": lambda m: other_rule(),
    "global hook": lambda m: global_hook(),
    "function mode": lambda m: MixingMode(),
    "softmax over examples": lambda m: _replaced(m, 1, nn.Softmax(0)),
    "batch norm in training mode": lambda m: _replaced(m, 1, nn.BatchNorm1d(6)),
    "batch norm without statistics": lambda m: _replaced(m, 1, nn.BatchNorm1d(6, track_running_stats=False).eval()),
    "dropout in training mode": lambda m: _replaced(m, 1, nn.Dropout(0.5)),
    "a layer twice": lambda m: _replaced(m, 2, m[2].append(m[2][0])),
    "a weight twice": lambda m: setattr(m[2].append(nn.Linear(6, 6).double())[2], "weight", m[2][0].weight),
}
#: What has a curvature all the same.
RIGHT = {"hook of a parameter", "parametrization of rows", "a layer twice", "a weight twice"}


class OtherForward(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return cumulated(super().forward(input))


class OtherOrder(nn.Sequential):
    @property
    def _modules(self) -> Any:
        held = super().__getattribute__("__dict__")["_modules"]
        return {**held, "mixing": Cumulated()} if len(held) == 3 else held

    @_modules.setter
    def _modules(self, held: Any) -> None:
        super().__getattribute__("__dict__")["_modules"] = held


@pytest.mark.parametrize("kind", [OtherForward, OtherOrder])
def test_subclasses_that_do_more(kind: type[nn.Sequential], looks: list[bool]) -> None:
    model = kind(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(UnsupportedError, match="depend on each other"):
        curvature(risk_of(model, 4), DiagonalBlock)
    assert not any(looks)


def test_a_subclass_that_gets_another_forward(looks: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    _ = curvature(risk_of(subclass(), 4), DiagonalBlock)
    monkeypatch.setattr(Subclass, "forward", lambda self, x: cumulated(nn.Sequential.forward(self, x)))
    with pytest.raises(UnsupportedError, match="depend on each other"):
        curvature(risk_of(subclass(), 4), DiagonalBlock)
    assert looks == [True, False]


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_trusted_that_has_changed(name: str, looks: list[bool]) -> None:
    model = perceptron()
    _ = curvature(risk_of(model, 4), DiagonalBlock)
    assert looks == [True]
    change = CHANGES[name](model)
    with change if hasattr(change, "__enter__") and not hasattr(change, "remove") else _nothing():
        if name in RIGHT:
            ours, other = (curvature(risk_of(m, 4), FullBlock).to_dense() for m in (model, Same(model)))
            close(ours, other)
        else:
            with pytest.raises((UnsupportedError, RuntimeError)):
                curvature(risk_of(model, 4), DiagonalBlock)
    assert not any(looks[1:])


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_changed_between_two_batches(looks: list[bool]) -> None:
    """Also of one operator: nothing is remembered."""
    model, X, Y = perceptron(), torch.randn(14, 4).double(), torch.arange(14) % 3

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield X[:7], Y[:7]
        model[1].register_forward_hook(lambda module, args, out: cumulated(out))
        yield X[7:], Y[7:]

    with pytest.raises(UnsupportedError, match="depend on each other"):
        curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), batches()), DiagonalBlock)
    assert looks == [True, False]


def test_what_the_user_says_of_examples(looks: list[bool]) -> None:
    model = perceptron()
    with pytest.raises(UnsupportedError, match="depend on each other"):
        curvature(risk_of(model, 4, output=cumulated), DiagonalBlock)
    assert looks == [False]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(N, N), ()),
        (nn.Sequential(nn.Conv1d(N, N, 3, padding=1), nn.Linear(3, 3)), (3,)),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Linear(4 * N, N)), (4,)),
    ],
)
def test_examples_on_no_axis(model: nn.Module, shape: tuple[int, ...], looks: list[bool]) -> None:
    """Layers that take the first axis for features, channels, or all at once."""
    with pytest.raises((UnsupportedError, ValueError, RuntimeError)):
        curvature(risk_of(model.double(), *shape), DiagonalBlock)
    assert not any(looks)


# ------------------------------------------------------------------------------------- parameters that are read twice
def test_a_batch_that_is_computed_from_the_parameters() -> None:
    """Only the graph shows it, from the second batch on, which is not copied any more."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    X = torch.randn(2, N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = [(model[0](x), torch.arange(N) % 3) for x in X]
    with pytest.raises(UnsupportedError, match=r"reads the parameters \['0.weight', '0.bias'\] from elsewhere"):
        curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), FullBlock)


def test_a_buffer_that_is_computed_from_the_parameters() -> None:
    first, last = nn.Linear(4, 3).double(), nn.Linear(3, 4, bias=False).double()
    del last.weight
    last.register_buffer("weight", first.weight.t())
    model = nn.Sequential(first, nn.Tanh(), last)
    with pytest.raises(UnsupportedError, match=r"reads the parameters \['0.weight'\] from elsewhere"):
        curvature(risk_of(model, 4), FullBlock)


@pytest.mark.parametrize("first", [nn.ReLU(True), nn.Hardtanh(inplace=True), nn.Dropout(0.0, True), nn.ReLU()], ids=str)
def test_only_chains_that_work_in_place_get_a_copy_of_the_first_batch(
    first: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []
    monkeypatch.setattr(model_calls, "copied", lambda X: copies.append(X) or X.clone())
    risk = risk_of(nn.Sequential(first, one_layer()), 4)
    before = risk.data[0][0].clone()
    found = curvature(risk, KFAC, vectors=Exact()).to_dense()
    assert len(copies) == bool(first.inplace)
    assert torch.equal(risk.data[0][0], before)
    twin = risk_of(nn.Sequential(Plain(first), one_layer()), 4)
    close(found, curvature(twin, KFAC, vectors=Exact()).to_dense())


class Plain(nn.Module):
    """A module that is none of PyTorch's types and writes to nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.clone())
