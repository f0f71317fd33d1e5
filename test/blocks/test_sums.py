"""Sums over data: accumulators that are merged, saved and decayed; moving averages of layers that
some steps call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    Exact,
    FullBlock,
    NearestKronecker,
    ScaledIdentity,
    curvature,
)
from curvlinops_plus.layer import ConvRule, convolution_gram, register_rule
from test.cases import close, problem, same
from test.helpers import Written

KINDS = [KFAC, DiagonalBlock, FullBlock, TNT, NearestKronecker, ScaledIdentity]


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("name", ["mlp, ce-ignore", "strided cnn", "mlp, mse-sum"])
def test_two_parts_merged_are_the_whole(kind: Any, name: str) -> None:
    """Also if one of them was saved, and its state is written to afterwards; the other one
    stays.
    """
    p = problem(name)
    one, two, whole, loaded = (
        CurvatureEstimator(p.risk(()), kind, vectors="type-2") for _ in range(4)
    )
    for k, batch in enumerate(p.data):
        (one if k < 2 else two).update(batch, decay=1)
        whole.update(batch, decay=1)
    state, alone = one.state_dict(), two.operator.to_dense()
    loaded.load_state_dict(state)
    for own in state["sums"]["layers"].values():
        for total in (
            t for stage in own["stages"] for a in stage.values() for t in a["sums"].values()
        ):
            total.zero_()
    for first in (one, loaded):
        first.merge(two)
        first.merge(
            CurvatureEstimator(p.risk(()), kind, vectors="type-2")
        )  # which has seen nothing
        close(first.operator.to_dense(), whole.operator.to_dense())
        assert (first.updates, first.examples, first.weight) == (
            whole.updates,
            whole.examples,
            whole.weight,
        )
    same(two.operator.to_dense(), alone)


def test_numbers_of_rows_are_in_double_precision() -> None:
    """Those of an embedding with padding are tensors of whole numbers, which PyTorch decays in
    single precision.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(15, 2)
    ).double()
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), KFAC, decay=0.9)
    seen = torch.zeros(6, dtype=torch.float64)
    for step in range(6):
        X, y = torch.randint(6, (7, 5)) * bool(step), torch.randint(2, (7,))
        estimator.update((X, y))
        assert estimator.operator.trace.isfinite()  # also of padding alone, which is no row
        seen = 0.9 * seen + X.flatten().bincount(minlength=6) * (torch.arange(6) > 0)
    frequencies = estimator.operator.blocks["0"].A.diagonal()
    torch.testing.assert_close(frequencies, seen / seen.sum(), rtol=1e-15, atol=0)


def test_rows_beyond_those_of_single_precision() -> None:
    layer = curvature(problem("mlp").risk(), DiagonalBlock, compute=False).plan[0].layer
    for first, more in (
        (torch.tensor(2**24), torch.tensor(1)),
        (torch.tensor([[2.0**24]]), torch.ones(1, 1)),
    ):
        accumulator = KFAC(layer, None, lambda totals: 1.0)
        accumulator.add("A", torch.eye(2), first)
        accumulator.add("A", torch.eye(2), more)
        assert float(accumulator.counts["A"]) == 2**24 + 1


def test_sums_begin_in_memory_of_their_own() -> None:
    layer = curvature(problem("mlp").risk(), DiagonalBlock, compute=False).plan[0].layer
    accumulator = KFAC(layer, None, lambda totals: 1.0)
    shared = torch.ones(2, 2)
    accumulator.add("A", shared, 1.0)
    accumulator.add("A", shared, 1.0)
    torch.testing.assert_close(accumulator.sums["A"], torch.full((2, 2), 2.0))
    torch.testing.assert_close(shared, torch.ones(2, 2))


# ---------------------------------------------------------------------- layers that some steps call

STREAMED = {"KFAC": KFAC, "EKFAC": EKFAC, "diagonal": DiagonalBlock, "full": FullBlock}


def one_head(m: Any, x: Tensor) -> Tensor:
    """Of the head that the first entry of the batch names."""
    return m.heads[int(x[0, 0, 0])](m.trunk(x))


def head_of_each_row(m: Any, x: Tensor) -> Tensor:
    """Each row of a batch has its own head; a head that no row has is not called."""
    features, head = m.trunk(x), x[:, 0, 0]
    found = [
        (head == k)[:, None] * m.heads[k](features) for k in range(3) if bool((head == k).any())
    ]
    return torch.stack(found).sum(0)


def routed_model(forward: Any = one_head, heads: int = 2) -> nn.Module:
    trunk = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 3), nn.Sigmoid())
    return Written(forward, trunk=trunk, heads=nn.ModuleList(nn.Linear(3, 2) for _ in range(heads)))


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield
    torch.set_default_dtype(torch.float32)


def routed(head: int, n: int = 4) -> tuple[Tensor, Tensor]:
    X = torch.randn(n, 1, 4)
    X[:, 0, 0] = head
    return X, torch.randn(n, 2)


def estimator(
    model: nn.Module, kind: Any, reduction: str = "mean", **options: Any
) -> CurvatureEstimator:
    risk = EmpiricalRisk(model, nn.MSELoss(reduction=reduction), ())
    return CurvatureEstimator(risk, kind, vectors=Exact(), **options)


def blocks(running: CurvatureEstimator, prefix: str) -> list[Tensor]:
    found = {
        name: block.to_dense()
        for name, block in running.operator.blocks.items()
        if name.startswith(prefix)
    }
    assert found
    return [found[name] for name in sorted(found)]


def agree(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, two in zip(got, expected, strict=True):
        assert float((one - two).norm()) <= tolerance * float(two.norm()) > 0


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("leave_out", "reduction"), [(False, "mean"), (True, "mean"), (True, "sum")]
)
@pytest.mark.parametrize("kind", STREAMED)
def test_a_layer_is_what_the_steps_that_call_it_make_it(
    kind: str, leave_out: bool, reduction: str
) -> None:
    """Also of other sizes, and when a state is loaded in between. The trunk is in all steps."""
    model = routed_model()
    options = {"decay": 0.7, "leave_out_uncalled": leave_out, "reduction": reduction}
    running = estimator(model, STREAMED[kind], **options)
    only = [
        estimator(model, STREAMED[kind], **options | {"leave_out_uncalled": True}) for _ in range(2)
    ]
    for step, head in enumerate([0, 0, 0, 1, 0, 1, 1]):
        batch = routed(head, 2 + step)
        running.update(batch)
        only[head].update(batch)
        for k in range(2):
            if step >= 3 or (k == 0 and leave_out):
                agree(blocks(running, f"heads.{k}"), blocks(only[k], f"heads.{k}"))
        if step == 4:
            loaded = estimator(model, STREAMED[kind], **options)
            loaded.load_state_dict(running.state_dict())
            running = loaded


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("kind", "reduction"), [("diagonal", "mean"), ("full", "sum")])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_micro_batches_of_a_step_count_for_all_its_layers(
    kind: str, reduction: str, order: tuple[int, ...], resume: bool
) -> None:
    """A step whose micro-batches call different layers is one batch, whose loss is a mean or sum
    over all of them.
    """
    model, micro = (
        routed_model(head_of_each_row, 3),
        {k: torch.randn(2 + k, 1, 4) for k in range(3)},
    )
    for k, X in micro.items():
        X[:, 0, 0] = k
    data = {k: (X, torch.randn(len(X), 2)) for k, X in micro.items()}
    options = {"decay": 0.5, "leave_out_uncalled": True, "reduction": reduction}
    one, several = (
        estimator(model, STREAMED[kind], **options),
        estimator(model, STREAMED[kind], **options),
    )
    for running in (one, several):
        running.update(data[0])  # a step before
    for start, k in enumerate(order):
        several.update(data[k], decay=1.0 if start else None)
        if resume:
            state = several.state_dict()
            several = estimator(model, STREAMED[kind], **options)
            several.load_state_dict(state)
    one.update(tuple(torch.cat(t) for t in zip(*data.values(), strict=True)))
    for prefix in ("heads.0", "heads.1", "heads.2", "trunk"):
        agree(blocks(several, prefix), blocks(one, prefix))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", ["KFAC", "diagonal"])
def test_without_decay_batches_add_up_to_the_data_set(kind: str) -> None:
    """All of them count for each layer, in whatever order they come, also if estimators are
    merged.
    """
    model = routed_model()
    data = [routed(head, 2 + k) for k, head in enumerate([0, 1, 0, 0, 1])]
    expected = curvature(
        EmpiricalRisk(model, nn.MSELoss(), data), STREAMED[kind], vectors=Exact()
    ).to_dense()
    running = estimator(model, STREAMED[kind], leave_out_uncalled=True)
    parts = [estimator(model, STREAMED[kind], leave_out_uncalled=True) for _ in range(2)]
    for batch in data:
        running.update(batch)
        parts[int(batch[0][0, 0, 0])].update(batch)
    agree([running.operator.to_dense()], [expected])
    before = blocks(parts[1], "heads")
    parts[0].merge(parts[1])
    agree([parts[0].operator.to_dense()], [expected])
    assert parts[1].uncalled == ["heads.0"]
    agree(blocks(parts[1], "heads"), before)
    extra = routed(0)
    for each in (running, parts[0]):
        each.update(extra)
    agree([parts[0].operator.to_dense()], [running.operator.to_dense()])


@pytest.mark.parametrize("bias", [True, False])
def test_correlations_of_images_are_summed(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all sizes, beside batches that are too small for them; states resume."""
    monkeypatch.setattr(convolution_gram, "_MIN_PRODUCTS", 0)
    layers = (
        nn.Conv2d(8, 3, 3, padding=1, bias=bias),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(1),
        nn.Linear(12, 2),
    )
    model, sizes = (
        nn.Sequential(*layers).float(),
        [(6, 8, 12, 12), (2, 8, 12, 12), (5, 8, 16, 11), (3, 8, 12, 12)],
    )
    data = [(torch.randn(size).float(), torch.randn(size[0], 2).float()) for size in sizes]

    def whole() -> Tensor:
        return curvature(EmpiricalRisk(model, nn.MSELoss(), data), KFAC).to_dense()

    running, other, resumed = (
        CurvatureEstimator(EmpiricalRisk(model, nn.MSELoss(), ()), decay=0.9) for _ in range(3)
    )
    got = whole()
    for k, batch in enumerate(data):
        running.update(batch)
        if k == 2:
            resumed.load_state_dict(running.state_dict())
    resumed.update(data[3])
    assert torch.equal(resumed.operator.to_dense(), running.operator.to_dense())
    monkeypatch.setattr(convolution_gram, "_MIN_PATCHES", 10**9)  # never
    for batch in data:
        other.update(batch)
    resumed.merge(other)
    expected = other.operator.to_dense()
    for one, two in (
        (got, whole()),
        (running.operator.to_dense(), expected),
        (resumed.operator.to_dense(), expected),
    ):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


class Doubled(ConvRule):
    """Of a convolution of `2 x`, as a rule of one's own says it."""

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return super().inputs(module, 2 * x)

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, float]:
        return super().input_gram(module, 2 * x)


def test_correlations_are_not_those_of_a_rule_with_other_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convolution_gram, "_MIN_PRODUCTS", 0)
    kind = type(
        "DoubledConv", (nn.Conv2d,), {"forward": lambda self, x: nn.Conv2d.forward(self, 2 * x)}
    )
    register_rule(kind)(Doubled)
    model, X = (
        nn.Sequential(kind(8, 3, 3, padding=1), nn.Flatten()).float(),
        torch.randn(6, 8, 12, 12).float(),
    )
    data = [(X, torch.randn(6, 432).float())]
    a = F.unfold(2 * X, 3, padding=1).transpose(1, 2).flatten(0, 1)
    A = (
        curvature(EmpiricalRisk(model, nn.MSELoss(), data), KFAC, vectors="mc")
        .blocks["0"]
        .A.to_dense()
    )
    torch.testing.assert_close(A[:-1, :-1], a.T @ a / len(a), rtol=1e-4, atol=1e-4)
