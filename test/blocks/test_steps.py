"""Moving averages of layers that some steps call, and others don't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, KFAC, CurvatureEstimator, DiagonalBlock, EmpiricalRisk, Exact, FullBlock, curvature

KINDS = {"KFAC": KFAC, "EKFAC": EKFAC, "diagonal": DiagonalBlock, "full": FullBlock}


class Routed(nn.Module):
    """A trunk, and heads of which each batch names one by its first entry."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 3), nn.Sigmoid())
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x[0, 0, 0])](self.trunk(x))


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield
    torch.set_default_dtype(torch.float32)


def routed(head: int, n: int = 4) -> tuple[Tensor, Tensor]:
    X = torch.randn(n, 1, 4)
    X[:, 0, 0] = head
    return X, torch.randn(n, 2)


def estimator(model: nn.Module, kind: Any, reduction: str = "mean", **options: Any) -> CurvatureEstimator:
    risk = EmpiricalRisk(model, nn.MSELoss(reduction=reduction), ())
    return CurvatureEstimator(risk, kind, vectors=Exact(), **options)


def blocks(running: CurvatureEstimator, prefix: str) -> list[Tensor]:
    found = {name: block.to_dense() for name, block in running.operator.blocks.items() if name.startswith(prefix)}
    assert found
    return [found[name] for name in sorted(found)]


def close(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, two in zip(got, expected, strict=True):
        assert float((one - two).norm()) <= tolerance * float(two.norm()) > 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_what_the_steps_that_call_it_make_it(kind: str, leave_out: bool, reduction: str) -> None:
    """Also of other sizes, and when a state is loaded in between. The trunk is in all steps."""
    model = Routed()
    options = {"decay": 0.7, "leave_out_uncalled": leave_out, "reduction": reduction}
    running = estimator(model, KINDS[kind], **options)
    only = [estimator(model, KINDS[kind], **options | {"leave_out_uncalled": True}) for _ in range(2)]
    for step, head in enumerate([0, 0, 0, 1, 0, 1, 1]):
        batch = routed(head, 2 + step)
        running.update(batch)
        only[head].update(batch)
        for k in range(2):
            if step >= 3 or (k == 0 and leave_out):
                close(blocks(running, f"heads.{k}"), blocks(only[k], f"heads.{k}"))
        if step == 4:
            loaded = estimator(model, KINDS[kind], **options)
            loaded.load_state_dict(running.state_dict())
            running = loaded


class Both(Routed):
    """Each row of a batch has its own head; a head that no row has is not called."""

    def forward(self, x: Tensor) -> Tensor:
        features, head = self.trunk(x), x[:, 0, 0]
        found = [(head == k)[:, None] * self.heads[k](features) for k in range(3) if bool((head == k).any())]
        return torch.stack(found).sum(0)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["diagonal", "full"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_micro_batches_of_a_step_count_for_all_its_layers(
    kind: str, reduction: str, order: tuple[int, ...], resume: bool
) -> None:
    """A step whose micro-batches call different layers is one batch, whose loss is a mean or sum over all of them."""
    model, micro = Both(3), {k: torch.randn(2 + k, 1, 4) for k in range(3)}
    for k, X in micro.items():
        X[:, 0, 0] = k
    data = {k: (X, torch.randn(len(X), 2)) for k, X in micro.items()}
    options = {"decay": 0.5, "leave_out_uncalled": True, "reduction": reduction}
    one, several = estimator(model, KINDS[kind], **options), estimator(model, KINDS[kind], **options)
    for running in (one, several):
        running.update(data[0])  # a step before
    for start, k in enumerate(order):
        several.update(data[k], decay=1.0 if start else None)
        if resume:
            state = several.state_dict()
            several = estimator(model, KINDS[kind], **options)
            several.load_state_dict(state)
    one.update(tuple(torch.cat(t) for t in zip(*data.values(), strict=True)))
    for prefix in ("heads.0", "heads.1", "heads.2", "trunk"):
        close(blocks(several, prefix), blocks(one, prefix))


@pytest.mark.parametrize("kind", ["KFAC", "diagonal"])
def test_without_decay_batches_add_up_to_the_data_set(kind: str) -> None:
    """All of them count for each layer, in whatever order they come, also if estimators are merged."""
    model = Routed()
    data = [routed(head, 2 + k) for k, head in enumerate([0, 1, 0, 0, 1])]
    expected = curvature(EmpiricalRisk(model, nn.MSELoss(), data), KINDS[kind], vectors=Exact()).to_dense()
    running = estimator(model, KINDS[kind], leave_out_uncalled=True)
    parts = [estimator(model, KINDS[kind], leave_out_uncalled=True) for _ in range(2)]
    for batch in data:
        running.update(batch)
        parts[int(batch[0][0, 0, 0])].update(batch)
    close([running.operator.to_dense()], [expected])
    before = blocks(parts[1], "heads")
    parts[0].merge(parts[1])
    close([parts[0].operator.to_dense()], [expected])
    assert parts[1].uncalled == ["heads.0"]
    close(blocks(parts[1], "heads"), before)
    extra = routed(0)
    for each in (running, parts[0]):
        each.update(extra)
    close([parts[0].operator.to_dense()], [running.operator.to_dense()])
