"""Embeddings and bags of embeddings, in every form of call, against autodiff."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from curvlinops_plus import (
    GGN,
    KFAC,
    AffineRule,
    CurvatureEstimator,
    CurvatureWarning,
    Empirical,
    EmpiricalRisk,
    Exact,
    Hessian,
    Jacobian,
    curvature,
)
from curvlinops_plus.layer import rule_of
from curvlinops_plus.layer.embedding import EmbeddingBagRule, EmbeddingRule
from test.helpers import Written, normal, seeded

V, B, VOCABULARY, D = 2, 4, 7, 3
EMBEDDING, BAG = EmbeddingRule(), EmbeddingBagRule()


def check(rule: AffineRule, module: Any, args: Any, kwargs: Any, g: Tensor) -> None:
    """`W a` is the output where rows are kept, and the statistics are those of the rows written
    out.
    """
    x = rule.input_of(module, args, kwargs)
    rows: Any = rule.inputs(module, x)
    out, a, grads = module(*args, **kwargs).detach(), rows.to_dense(), rule.grads(module, g)
    kept = torch.ones(rows.shape[:2], dtype=torch.bool) if rows.kept is None else rows.kept
    assert (a.dtype, a.shape[2]) == (out.dtype, VOCABULARY)
    assert grads.shape == (*g.shape[:1], *a.shape[:2], D)
    tolerance = 1e-12 if out.dtype == torch.float64 else 1e-5
    close = {"rtol": tolerance, "atol": tolerance}
    expected = rule.grads(module, out[None])[0]
    torch.testing.assert_close(a @ module.weight.detach(), expected * kept[..., None], **close)
    A, total, count = rule.input_gram(module, x)
    torch.testing.assert_close(A, a.square().sum((0, 1)), **close)
    torch.testing.assert_close(total, a.sum((0, 1)), **close)
    assert count == kept.sum()
    torch.testing.assert_close(
        rule.grad_gram(module, g), torch.einsum("vbso,vbsp->op", grads, grads), **close
    )


def autodiff(module: nn.Module, args: Any, kwargs: Any, g: Tensor) -> Tensor:
    """[V, B, i, d]: one backward pass of the whole call for each vector and example."""
    frozen = [p.requires_grad for p in module.parameters()]
    module.requires_grad_()
    out, J = module(*args, **kwargs), torch.zeros(*g.shape[:2], VOCABULARY, D, dtype=g.dtype)
    for v in range(len(g)):
        for n in range(g.shape[1]):
            only = torch.zeros_like(g[v])
            only[n] = g[v, n]
            J[v, n] = torch.autograd.grad(out, [module.weight], only, retain_graph=True)[
                0
            ].to_dense()
    for p, before in zip(module.parameters(), frozen, strict=True):
        p.requires_grad_(before)
    return J


# --------------------------------------------------------------------------------------- embeddings
@pytest.mark.parametrize("positions", [(), (5,), (2, 3), (1,)])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -2}, {"sparse": True}])
def test_embedding(positions: tuple[int, ...], options: Any, loop: Any, same: Any) -> None:
    module, x = nn.Embedding(VOCABULARY, D, **options), torch.randint(VOCABULARY, (B, *positions))
    with torch.no_grad():
        module.weight.normal_()  # also at padding_idx, whose row may hold anything
    assert type(rule_of(module)) is EmbeddingRule
    g = torch.randn(V, *module(x).shape)
    check(EMBEDDING, module, (x,), {}, g)
    twin = loop(module, (x,), {}, g)
    same(EMBEDDING.per_example_grads(module, (x,), {}, g), twin)
    same(EMBEDDING.per_example_grads(module, (), {"input": x.int()}, g), twin)
    same(EMBEDDING.per_example_grads(module.requires_grad_(False), (x,), {}, g), twin)
    assert all(p.grad is None and not p.requires_grad for p in module.parameters())


# --------------------------------------------------------------------------------------------- bags
FLAT, OFFSETS = (
    torch.tensor([3, 1, 3, 0, 6, 6, 6, 2, 1]),
    torch.tensor([0, 3, 3, 7]),
)  # the second bag is empty
WEIGHTS = normal(9, seed=3)

CALLS = {
    "table": ({}, (torch.tensor([[3, 1, 3], [0, 0, 0], [5, 1, 6], [1, 1, 2]]),), {}),
    "one-entry": ({}, (torch.tensor([[3], [0], [5], [1]]),), {}),
    "offsets": ({}, (FLAT, OFFSETS), {}),
    "offsets-int": ({}, (FLAT.int(), OFFSETS.int()), {}),
    "keywords": ({}, (), {"offsets": OFFSETS, "input": FLAT}),
    "last-offset": (
        {"include_last_offset": True},
        (FLAT, torch.cat([OFFSETS, torch.tensor([9])])),
        {},
    ),
    "nested": (
        {},
        (torch.nested.nested_tensor([FLAT[:3], FLAT[3:7], FLAT[7:]], layout=torch.jagged),),
        {},
    ),
}
WEIGHTED = {
    "table": ({}, (FLAT.view(3, 3), None, WEIGHTS.view(3, 3)), {}),
    "offsets": ({}, (FLAT, OFFSETS, WEIGHTS), {}),
    "keywords": ({}, (FLAT,), {"per_sample_weights": WEIGHTS, "offsets": OFFSETS}),
    "last-offset": (
        {"include_last_offset": True},
        (FLAT, torch.cat([OFFSETS, torch.tensor([9])]), WEIGHTS),
        {},
    ),
}


@pytest.mark.parametrize("padding_idx", [None, 1, -1])
@pytest.mark.parametrize(
    ("mode", "name"),
    [(m, n) for m in ("sum", "mean") for n in CALLS] + [("weighted", n) for n in WEIGHTED],
)
def test_bag(mode: str, name: str, padding_idx: int | None, same: Any) -> None:
    options, args, kwargs = (WEIGHTED if mode == "weighted" else CALLS)[name]
    mode = "sum" if mode == "weighted" else mode
    module: Any = nn.EmbeddingBag(VOCABULARY, D, mode=mode, padding_idx=padding_idx, **options)
    with torch.no_grad():
        module.weight.normal_()
    assert type(rule_of(module)) is EmbeddingBagRule
    g = torch.randn(V, *module(*args, **kwargs).shape)
    check(BAG, module, args, kwargs, g)
    twin = {"weight": autodiff(module, args, kwargs, g)}
    same(BAG.per_example_grads(module, args, kwargs, g), twin)
    same(BAG.per_example_grads(module.requires_grad_(False), args, kwargs, g), twin)
    x = BAG.input_of(module, args, kwargs)
    assert x.shape[0] == g.shape[1]
    assert BAG.input_of(module, (x,), {}) is x  # as a recorder asks
    same(BAG.per_example_grads(module, (x.detach(),), {}, g), twin)
    some = BAG.per_example_grads(module, (x[1:],), {}, g[:, 1:])  # bags can be taken out of it
    same(some, {"weight": twin["weight"][:, 1:]})


@st.composite
def bags(draw: st.DrawFn) -> tuple[nn.Module, Any]:
    """Bags of any length, also none."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    mode, weighted = draw(st.sampled_from([("sum", False), ("mean", False), ("sum", True)]))
    last = draw(st.booleans())
    padding_idx = draw(st.one_of(st.none(), st.integers(0, VOCABULARY - 1)))
    module = nn.EmbeddingBag(
        VOCABULARY, D, mode=mode, padding_idx=padding_idx, include_last_offset=last
    )
    generator = seeded(draw(st.integers(0, 999)))
    flat = torch.randint(VOCABULARY, (sum(lengths),), generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weights = (torch.randn(len(flat), generator=generator),) if weighted else ()
    return module, (flat, offsets if last else offsets[:-1], *weights)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(bags())
def test_any_bags(drawn: tuple[nn.Module, Any]) -> None:
    module, args = drawn
    torch.manual_seed(0)
    g = torch.randn(V, *module(*args).shape)
    check(BAG, module, args, {}, g)
    J = BAG.per_example_grads(module, args, {}, g)["weight"]
    torch.testing.assert_close(J, autodiff(module, args, {}, g), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------ options
OPTIONS = {
    "num_embeddings": VOCABULARY,
    "embedding_dim": D,
    "padding_idx": 2,
    "max_norm": 100.0,
    "norm_type": 1.0,
    "scale_grad_by_freq": False,
    "sparse": True,
    "_weight": torch.randn(VOCABULARY, D, dtype=torch.float64),
    "device": "cpu",
    "dtype": torch.float32,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (nn.Embedding, {"_freeze": True}),
        (nn.EmbeddingBag, {"mode": "sum", "include_last_offset": True}),
    ],
)
def test_every_constructor_option_is_handled(kind: type[Any], more: Any, same: Any) -> None:
    """A new option in a future PyTorch fails here until somebody says what becomes of it."""
    options = {**OPTIONS, **more}
    assert set(inspect.signature(kind).parameters) == set(options)
    required = dict(list(options.items())[:2])
    for name, value in options.items():
        module = kind(**{**required, name: value})
        rule: Any = rule_of(module)
        assert type(rule) in (EmbeddingRule, EmbeddingBagRule)
        args = (torch.randint(VOCABULARY, (B, 5)),)
        if (
            len(module(*args)) != B
        ):  # torch 2.6 loses the last bag of a matrix under `include_last_offset`
            continue
        g = torch.randn(V, *module(*args).shape, dtype=module.weight.dtype)
        check(rule, module, args, {}, g)
        twin, tolerance = autodiff(module, args, {}, g), 1e-12 if g.dtype == torch.float64 else 1e-4
        same(rule.per_example_grads(module, args, {}, g), {"weight": twin}, tolerance)


# ---------------------------------------------------------------------------- scaled gradients
CE, CLASSES = nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, 0, 1, 2])
TOKENS = torch.tensor([[0, 0], [1, 0], [2, 3], [4, 4], [0, 1], [1, 1]])


def test_embeddings_that_scale_gradients() -> None:
    """Their gradients are the user's; curvature is that without the option, wherever it listens, or
    is refused.
    """
    found, dense, grads = [], [], []
    for scales in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(5, 3, scale_grad_by_freq=scales), nn.Flatten(), nn.Linear(6, 3)
        ).double()
        for vectors in (Exact(), Empirical()):
            estimator = CurvatureEstimator(EmpiricalRisk(model, CE, ()), vectors=vectors)
            with estimator.listen((TOKENS, CLASSES)):
                model(TOKENS)
            found.append(estimator.operator.to_dense())
        CE(model(TOKENS), CLASSES).backward()
        grads.append(model[0].weight.grad)

        def looks_up(m: Any, x: Tensor, scales: bool = scales) -> Tensor:
            return m.last(functional.embedding(x, m.table, scale_grad_by_freq=scales).flatten(1))

        reader = Written(looks_up, table=model[0].weight, last=model[2])
        table = EmpiricalRisk(reader, CE, [(TOKENS, CLASSES)])
        dense.append([kind(table).to_dense() for kind in (GGN, Hessian, Jacobian)])
        if scales:
            with pytest.warns(
                CurvatureWarning, match="exact diagonal.*a rule that autograd contradicts"
            ):
                curvature(table, KFAC)
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*dense)
    assert not torch.allclose(*grads)
