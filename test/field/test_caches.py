"""Modules that keep what they computed from a parameter, as caches of eval mode do: each pass
computes it anew.

The right values come from plain autograd, one example after the other, of a module that keeps
nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Hessian,
    UnsupportedError,
    curvature,
    per_example_gradients,
)
from test.cases import close
from test.helpers import normal


class Bias(nn.Module):
    """A bias whose entries are looked up in a table, by a way that may keep them."""

    def __init__(self, kept: Any, look_up: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.table, self.kept, self.look_up = nn.Parameter(normal(5, seed=1)), kept, look_up
        self.register_buffer("at", torch.tensor([0, 1, 2, 1, 4, 3]))

    def entries(self) -> Tensor:
        return self.table[self.at]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.look_up(self)

    @lru_cache(4)  # noqa: B019
    def of_method(self, device: torch.device) -> Tensor:
        return self.entries()

    @cached_property
    def of_property(self) -> Tensor:
        return self.entries()


def in_names(kept: Callable[[Any], Any], key: Any = "bias") -> Callable[[Any], Tensor]:
    def look_up(s: Any) -> Tensor:
        if key not in kept(s):
            kept(s)[key] = s.entries()
        return kept(s)[key]

    return look_up


def in_list(s: Any) -> Tensor:
    if not s.kept:
        s.kept.append(s.entries())
    return s.kept[0]


def in_attribute(s: Any) -> Tensor:
    if s.kept is None:
        s.kept = s.entries()
    return s.kept


def in_new_attribute(s: Any) -> Tensor:
    if not hasattr(s, "made"):
        s.made = {"bias": (s.entries(), None)}
    return s.made["bias"][0]


def with_flag(s: Any) -> Tensor:
    if not s.kept["ready"]:
        s.made, s.kept["ready"] = s.entries(), True
    return s.made


def in_object(s: Any) -> Tensor:
    if s.kept.bias is None:
        s.kept.bias = s.entries()
    return s.kept.bias


# What a module has for it at first, and how it looks entries up.
WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "by device": (dict, in_names(lambda s: s.kept, torch.device("cpu"))),
    "an ordered dictionary": (OrderedDict, in_names(lambda s: s.kept)),
    "a dictionary in a list": (lambda: [{}], in_names(lambda s: s.kept[0])),
    "a list": (list, in_list),
    "a deque": (lambda: deque(maxlen=2), in_list),
    "an attribute": (lambda: None, in_attribute),
    "a new attribute": (lambda: None, in_new_attribute),
    "an attribute, with a flag": (lambda: {"ready": False}, with_flag),
    "an object": (lambda: SimpleNamespace(bias=None), in_object),
    "a dictionary of an object": (lambda: SimpleNamespace(of={}), in_names(lambda s: s.kept.of)),
    "a method's cache": (lambda: None, lambda s: s.of_method(s.table.device)),
    "a property": (lambda: None, lambda s: s.of_property),
}
every = pytest.mark.parametrize("way", WAYS)
pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
DATA = [(normal(4, 4, seed=k), torch.tensor([0, 1, 2, 0])) for k in (2, 3)]
LOSS = nn.CrossEntropyLoss()


def network(way: str | None = None) -> nn.Sequential:
    Bias.of_method.cache_clear()
    make, look_up = (lambda: None, Bias.entries) if way is None else WAYS[way]
    model = (
        nn.Sequential(nn.Linear(4, 6), Bias(make(), look_up), nn.Tanh(), nn.Linear(6, 3))
        .double()
        .eval()
    )
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(normal(*p.shape, seed=k) / 2)
    return model


def flat(gradients: Any) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])


def truth() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of examples, the loss's gradient, its GGN and its Hessian, by autograd."""
    model, X, y = network(), *map(torch.cat, zip(*DATA))
    params = [*model.parameters()]
    rows = torch.stack(
        [
            flat(torch.autograd.grad(LOSS(model(X[n : n + 1]), y[n : n + 1]), params))
            for n in range(8)
        ]
    )
    first = flat(torch.autograd.grad(LOSS(model(X), y), params, create_graph=True))
    H = torch.stack([flat(torch.autograd.grad(g, params, retain_graph=True)) for g in first])
    F = model(X)
    J = torch.stack(
        [flat(torch.autograd.grad(f, params, retain_graph=True)) for f in F.flatten()]
    ).view(8, 3, -1)
    p = F.detach().softmax(1)
    C = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return rows, first.detach(), torch.einsum("nci,ncd,ndj->ij", J, C, J) / 8, H


@every
def test_every_pass_computes_it_anew(way: str) -> None:
    rows, gradient, G, H = truth()
    risk = EmpiricalRisk(network(way), LOSS, DATA)
    close(
        curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal(),
        rows.square().sum(0) / 8,
        what="diagonal",
    )
    close(curvature(risk, EKFAC).trace, G.trace(), what="trace")
    assert risk.reads is not None
    assert not risk.reads.enclosing, "the module by itself tells its gradients"
    close(GGN(risk).to_dense(), G, what="GGN")
    close(Hessian(risk).to_dense(), H, what="Hessian")
    close(flat(risk.gradient().values()), gradient, what="gradient")
    found = torch.cat(
        [
            torch.cat([g.flatten(1) for g in batch.values()], 1)
            for batch in per_example_gradients(risk)
        ]
    )
    close(found, rows, what="gradients of examples")
    estimator = CurvatureEstimator(EmpiricalRisk(network(way), LOSS, ()), EKFAC)
    for batch in DATA:
        estimator.update(batch)
    close(estimator.operator.trace, G.trace(), what="estimator")


@every
def test_nothing_of_it_is_left(way: str) -> None:
    model = network(way)
    GGN(EmpiricalRisk(model, LOSS, DATA)).to_dense()
    curvature(EmpiricalRisk(model, LOSS, DATA), EKFAC).compute()
    kept: Any = model[1].kept
    inside = vars(kept) if isinstance(kept, SimpleNamespace) else kept
    assert str(inside) in (
        "None",
        "{}",
        "[]",
        "[{}]",
        "{'bias': None}",
        "{'of': {}}",
        "OrderedDict()",
        "{'ready': False}",
        str(deque(maxlen=2)),
    )
    assert not {"made", "of_property"} & vars(model[1]).keys()
    assert not Bias.of_method.cache_info().currsize


@every
def test_what_the_user_s_call_kept_is_what_the_model_computes(way: str) -> None:
    """Kept without a graph it is a constant: autograd gives no gradient, and neither is there
    curvature.
    """
    model = network(way)
    with torch.no_grad():
        model(DATA[0][0])
    params = dict(model.named_parameters())
    X, y = map(torch.cat, zip(*DATA))
    expected = torch.autograd.grad(
        LOSS(model(X), y), [*params.values()], allow_unused=True, materialize_grads=True
    )
    risk = EmpiricalRisk(model, LOSS, DATA)
    close(flat(risk.gradient().values()), flat(expected))
    assert not risk.gradient()["1.table"].any()
    assert not GGN(risk).to_dense()[30:35].any()


@every
@pytest.mark.parametrize("spent", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda risk: risk.gradient(),
        lambda risk: GGN(risk).to_dense(),
        lambda risk: Hessian(risk).to_dense(),
        lambda risk: curvature(risk, EKFAC),
    ],
    ids=["gradient", "GGN", "Hessian", "EKFAC"],
)
def test_what_the_user_s_call_kept_with_a_graph_is_refused(way: str, spent: bool, use: Any) -> None:
    model = network(way)
    out = model(DATA[0][0])
    if spent:
        out.sum().backward()
    elsewhere = r"reads the parameters \['1\.table'\].*cache of eval"
    gone = r"earlier call, which is gone\. ('1' \(Bias\)|A module or a cache of a method) kept.*model\.train\(\)"
    words = f"{elsewhere}|{gone}"
    with pytest.raises(UnsupportedError, match=words):
        use(EmpiricalRisk(model, LOSS, DATA))


def test_other_things_stay() -> None:
    """Numbers that a module counts in containers where there are no new tensors, and what it
    needs.
    """

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.calls["forward"] += 1
            self.seen.append(len(x))
            self.last = len(x)
            return super().forward(x) * self.scales[0] * self.names["a"]

    model = Counts(4, 3).double()
    scale, offset = torch.ones(3).double(), torch.full((3,), 2.0).double()
    model.calls, model.seen, model.scales, model.names = {"forward": 3}, [1], [scale], {"a": offset}
    curvature(EmpiricalRisk(model, LOSS, DATA), EKFAC).compute()
    GGN(EmpiricalRisk(model, LOSS, DATA)).to_dense()
    assert model.calls["forward"] - 3 == len(model.seen) - 1 > 0
    assert not hasattr(model, "last")
    assert model.scales[0] is scale
    assert model.names["a"] is offset


# --------------------------------------------------------------------- caches for generating text
class Mixer(nn.Module):
    """A recurrence over what was before, which it finds in a cache and leaves there."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.decay, self.config = nn.Parameter(torch.zeros(4)), config

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        before = cache[-1] if cache else torch.zeros_like(x)
        out = torch.hypot(x, self.decay) * (1 + before)
        if cache is not None:
            cache.append(out)
        return out


class Decoder(nn.Module):
    """Its configuration says whether it makes a cache; its part has a configuration of its own."""

    def __init__(self, fails: bool = False, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.first, self.fails = nn.Linear(4, 4), fails
        self.mixer = Mixer(SimpleNamespace(**config))
        self.last = nn.Linear(4, 3)
        self.double()
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(normal(*p.shape, seed=k) / 2)

    def forward(self, x: Tensor) -> Tensor:
        makes = getattr(self.config, "use_cache", False)
        if self.fails and not torch.is_inference_mode_enabled():
            raise ArithmeticError("on purpose")
        cache: list[Tensor] | None = [] if makes and self.mixer.config.use_cache else None
        h = torch.tanh(self.first(x))
        return self.last(self.mixer(h, cache))


def test_models_make_no_caches_meanwhile() -> None:
    model = Decoder(use_cache=True)
    params = [*model.parameters()]
    rows = []
    for X, y in DATA:
        for n in range(len(X)):
            out = model(X[n : n + 1])
            rows.append(flat(torch.autograd.grad(LOSS(out, y[n : n + 1]), params)))
    squares = torch.stack(rows).square().mean(0)
    risk = EmpiricalRisk(model, LOSS, DATA)
    K = curvature(risk, DiagonalBlock, vectors=Empirical())
    close(K.diagonal(), squares)
    assert risk.reads is not None
    assert not risk.reads.enclosing, "the module by itself tells its gradients"
    assert model.config.use_cache
    assert model.mixer.config.use_cache


@pytest.mark.parametrize("value", [False, None, "no", 1])
def test_other_configurations_stay(value: Any) -> None:
    model = Decoder(use_cache=value, other=[value])
    GGN(EmpiricalRisk(model, LOSS, DATA)).to_dense()
    assert vars(model.config) == {"use_cache": value, "other": [value]}
    assert vars(model.mixer.config) == {"use_cache": value, "other": [value]}


def test_configurations_are_put_back_after_errors() -> None:
    model = Decoder(fails=True, use_cache=True)
    with pytest.raises(ArithmeticError):
        EmpiricalRisk(model, LOSS, DATA).loss()
    assert model.config.use_cache
    assert model.mixer.config.use_cache


def test_a_training_loop_keeps_its_cache() -> None:
    """In the user's pass the model makes one; nothing of it is read when a module runs again."""
    model = Decoder(use_cache=True)
    estimator = CurvatureEstimator(
        EmpiricalRisk(model, LOSS, ()), DiagonalBlock, vectors=Empirical()
    )
    for X, y in DATA:
        estimator.reset()
        with estimator.listen((X, y)):
            model(X)
        assert model.config.use_cache
    twin = Decoder(use_cache=False)
    other = curvature(EmpiricalRisk(twin, LOSS, DATA[1:]), DiagonalBlock, vectors=Empirical())
    close(estimator.operator.diagonal(), other.diagonal())
