"""Loaders, iterators, determinism, wrappers of models: what data and models come in, and how often
they are read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    EFLinearOperator,
    EKFACLinearOperator,
    EmpiricalRisk,
    FullBlock,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    curvature,
)
from test.cases import close, problem, unchanged

OPERATORS = [
    KFACLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    EFLinearOperator,
]
every_operator = pytest.mark.parametrize("kind", OPERATORS)


# ---------------------------------------------------------------------------------------- iterators


def test_an_iterator_is_fine_for_one_sweep() -> None:
    p = problem("mlp")
    for approximation in (KFAC, DiagonalBlock, FullBlock):
        K = curvature(p.risk(data=iter(p.data)), approximation)
        close(K.to_dense(), p.curvature(approximation).to_dense())
        assert float(K.trace) > 0  # nothing is read again
    with pytest.raises(ValueError, match="iterator, which can be read only once"):
        K.compute()
    with pytest.raises(ValueError, match="iterator, which can be read only once"):
        _ = curvature(p.risk(data=iter(p.data)), EKFAC).trace


def test_every_sweep_sees_the_same_number_of_examples() -> None:
    p = problem("mlp")

    class Shrinking(list):
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return iter(p.data[: 4 - self.passes])

    K = EKFACLinearOperator(
        p.model, p.loss, p.params, Shrinking(), check_deterministic=False, max_kept_bytes=0
    )
    with (
        unchanged(p.model),
        pytest.raises(ValueError, match="gave 6 examples in one sweep and 4 in the next"),
    ):
        _ = K.trace
    with unchanged(p.model), pytest.raises(RuntimeError, match=r"disagree.*6 examples.*4"):
        KFACLinearOperator(p.model, p.loss, p.params, Shrinking())


def test_empty_batches_are_left_out_and_empty_data_is_refused() -> None:
    p = problem("mlp")
    empty = (torch.zeros(0, 4).double(), torch.zeros(0, dtype=torch.long))
    close(p.curvature(KFAC, [empty, *p.data, empty]).to_dense(), p.curvature(KFAC).to_dense())
    for data in ([], [empty]):
        with pytest.raises(ValueError, match="`data` has no examples"):
            _ = curvature(p.risk(data=data), KFAC).trace


# ------------------------------------------------------------------------------------- data loaders


@every_operator
def test_data_that_changes_is_noticed(kind: Any) -> None:
    p = problem("mlp")

    class Noisy(list):
        def __iter__(self) -> Any:
            return ((X + 0.1 * torch.rand_like(X), y) for X, y in p.data)

    with (
        unchanged(p.model),
        pytest.raises(RuntimeError, match=r"[Tt]wo passes over the data disagree"),
    ):
        kind(p.model, p.loss, p.params, Noisy())
    kind(p.model, p.loss, p.params, Noisy(), check_deterministic=False)


# ----------------------------------------------------------------------------------------- wrappers


class Wrapped(nn.Module):
    """Runs a net behind activation checkpointing."""

    def __init__(self, net: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


WRAPPERS: dict[str, tuple[str, Any]] = {
    **{
        name: (name, lambda net: Wrapped(net, reentrant=False))
        for name in ("mlp", "in-place relu", "attention")
    },
    "data parallel": ("mlp", nn.DataParallel),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers(wrapper: str) -> None:
    name, wrap = WRAPPERS[wrapper]
    p = problem(name)
    model = wrap(p.model)
    for approximation in (KFAC, EKFAC, FullBlock):
        with unchanged(model):
            K = curvature(EmpiricalRisk(model, p.loss, p.data, p.params), approximation)
            K.compute()
        close(K.to_dense(), p.curvature(approximation).to_dense())
    close(GGNLinearOperator(model, p.loss, p.params, p.data).to_dense(), p.exact.ggn())
