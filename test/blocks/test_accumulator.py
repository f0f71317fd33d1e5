"""Sums over data: merging, resuming and decaying accumulators; a loss whose Fisher is known in closed form."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from cases import close, problem, same
from helpers import decay
from torch import Tensor, nn

from curvlinops_plus import (
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    FisherMCLinearOperator,
    FullBlock,
    GGNLinearOperator,
    MonteCarlo,
    curvature,
)

KINDS = pytest.mark.parametrize("kind", [KFAC, DiagonalBlock, FullBlock])


@cache
def kept(kind: Any) -> Any:
    """The same approximation, which keeps copies of its accumulators in `found`: the sweep gives up their sums."""

    class Kept(kind):
        found: ClassVar[list[Any]] = []

        def finish_for_good(self) -> Any:
            copied = self.empty()
            copied.merge(self)
            self.found.append(copied)
            return super().finish_for_good()

    return Kept


def accumulators(kind: Any, name: str, batches: slice) -> list[Any]:
    """The accumulators of one sweep over some of the batches, one for each layer."""
    p = problem(name)
    kept(kind).found.clear()
    curvature(p.risk(data=p.data[batches]), kept(kind))
    return list(kept(kind).found)


def dense(result: Any) -> Tensor:
    blocks = result.values() if isinstance(result, dict) else [result]
    return torch.block_diag(*(block.to_dense() for block in blocks))


@KINDS
@pytest.mark.parametrize("name", ["mlp", "mlp, ce-ignore", "strided cnn", "mlp, mse-sum"])
def test_two_parts_merged_are_the_whole(kind: Any, name: str) -> None:
    whole = accumulators(kind, name, slice(None))
    first, second = accumulators(kind, name, slice(2)), accumulators(kind, name, slice(2, None))
    for a, b, expected in zip(first, second, whole, strict=True):
        alone = dense(b.finish())
        a.merge(b)
        close(dense(a.finish()), dense(expected.finish()))
        same(dense(b.finish()), alone)


@KINDS
def test_sums_can_be_saved_and_go_on(kind: Any) -> None:
    whole = accumulators(kind, "mlp", slice(None))
    first, second = accumulators(kind, "mlp", slice(2)), accumulators(kind, "mlp", slice(2, None))
    for a, b, expected in zip(first, second, whole, strict=True):
        blank = type(a)(a.layer, a.group, a.scale)
        state = a.state_dict()
        blank.load_state_dict(state)
        for total in state["sums"].values():
            total.zero_()
        blank.merge(b)
        close(dense(blank.finish()), dense(expected.finish()))


@KINDS
def test_decayed_sums_are_decayed_means(kind: Any) -> None:
    """Value = Σ ρ^(t-k) s_k / Σ ρ^(t-k) n_k; without decay the mean over all data."""
    rho = 0.7
    parts = [accumulators(kind, "mlp, mse", slice(k, k + 1)) for k in range(3)]
    for layer in range(2):
        running, sums, counts = None, {}, {}
        for k, part in enumerate(parts):
            one = part[layer]
            weight = rho ** (2 - k)
            for name, total in one.sums.items():
                count = one.counts.get(name, one.totals.loss_count)
                sums[name] = sums.get(name, 0) + weight * total
                counts[name] = counts.get(name, 0) + weight * float(count)
            if running is None:
                running = type(one)(one.layer, one.group, one.scale)
            decay(running, rho)
            running.merge(one)
        for name in sums:
            close(running.value(name), sums[name] / counts[name], what=name)


# ------------------------------------------------------------------------------------------ Gaussian, mean and variance


class MeanAndVariance(nn.Module):
    """Two means and two variances."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()

    def forward(self, x: Tensor) -> Tensor:
        mean, raw = self.net(x).chunk(2, -1)
        return torch.cat([mean, raw.exp() + 0.1], -1)


def gaussian() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor]:
    """Model, data, and the Fisher matrix `1/(N·C) Σ Jᵀ diag(1/s, 1/(2s²)) J`."""
    model = MeanAndVariance()
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(n, 3, generator=generator).double(), torch.randn(n, 2, generator=generator).double())
        for n in (3, 2)
    ]
    theta = {name: p.detach() for name, p in model.named_parameters()}
    total: Any = 0
    for X, _ in data:
        for x in X:
            jacobian = torch.func.jacrev(lambda t, x=x: torch.func.functional_call(model, t, (x,)))(theta)
            J = torch.cat([j.reshape(4, -1) for j in jacobian.values()], 1)
            s = model(x)[2:].detach()
            total = total + J.T @ torch.cat([1 / s, 1 / (2 * s**2)]).diag() @ J
    return model, data, total / 10


def test_gaussian_fisher() -> None:
    model, data, expected = gaussian()
    loss = nn.GaussianNLLLoss()
    G = GGNLinearOperator(model, loss, list(model.parameters()), data)
    close(G.to_dense(), expected)
    full = curvature(EmpiricalRisk(model, loss, data), FullBlock).to_dense()
    first = 16
    close(full[:first, :first], expected[:first, :first])
    close(full[first:, first:], expected[first:, first:])


def test_gaussian_draws_are_unbiased() -> None:
    model, data, expected = gaussian()
    params = list(model.parameters())
    draws = torch.stack(
        [
            FisherMCLinearOperator(
                model, nn.GaussianNLLLoss(), params, data, seed=s, mc_samples=100, check_deterministic=False
            ).to_dense()
            for s in range(20)
        ]
    )
    off = (draws.mean(0) - expected).abs() > 4 * draws.std(0) / 20**0.5 + 1e-9
    assert off.double().mean() < 0.01
    K = curvature(EmpiricalRisk(model, nn.GaussianNLLLoss(), data), FullBlock, vectors=MonteCarlo(2000, seed=3))
    assert abs(float(K.trace / expected.trace()) - 1) < 0.1


def test_numbers_of_rows_are_in_double_precision() -> None:
    """Those of an embedding with padding are tensors of whole numbers, which PyTorch decays in single precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(15, 2)).double()
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), KFAC, decay=0.9)
    seen = torch.zeros(6, dtype=torch.float64)
    for _ in range(5):
        X, y = torch.randint(6, (7, 5)), torch.randint(2, (7,))
        estimator.update((X, y))
        seen = 0.9 * seen + X.flatten().bincount(minlength=6) * (torch.arange(6) > 0)
    frequencies = estimator.operator.blocks["0"].A.diagonal()
    torch.testing.assert_close(frequencies, seen / seen.sum(), rtol=1e-15, atol=0)


def test_rows_beyond_those_of_single_precision() -> None:
    layer = curvature(problem("mlp").risk(), DiagonalBlock, compute=False).plan[0].layer
    for first, more in ((torch.tensor(2**24), torch.tensor(1)), (torch.tensor([[2.0**24]]), torch.ones(1, 1))):
        accumulator = KFAC(layer, None, lambda totals: 1.0)
        accumulator.add("A", torch.eye(2), first)
        accumulator.add("A", torch.eye(2), more)
        assert float(accumulator.counts["A"]) == 2**24 + 1
