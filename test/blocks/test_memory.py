"""Embeddings of many tokens: nothing is ever as large as tokens times tokens, or examples times the table."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import APPROXIMATIONS, problem
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    KFACLinearOperator,
    MonteCarlo,
    UnsupportedError,
    curvature,
)

ROWS, D, N, S = 50_000, 16, 8, 32
TABLE = ROWS * D
#: A few copies of the table are fine: a product has an input, an output and something in between. One example's dense
#: gradient for each of N examples is 8 tables; the positions' one-hot rows are 16 of them.
ALLOWED = 3 * TABLE


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.what = 0, "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                size = t.untyped_storage().nbytes() // t.element_size()  # an expanded view is small
                if size > self.size:
                    self.size, self.what = size, f"{func} made {list(t.shape)}"
        return out

    def check(self, allowed: int = ALLOWED) -> None:
        assert 0 < self.size <= allowed, f"{self.what}: {self.size} numbers, {self.size / TABLE:.1f} tables"


class Words(nn.Module):
    """A classifier of texts: an embedding of many words, a linear layer at every position, the mean."""

    def __init__(self, padding: int | None = None, bag: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, D) if bag else nn.Embedding(ROWS, D, padding_idx=padding)
        self.body, self.head = nn.Linear(D, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(self.table(x)))
        return self.head(h if isinstance(self.table, nn.EmbeddingBag) else h.mean(1))


def words(**options: Any) -> EmpiricalRisk:
    """The risk of it; the seed is fixed, and put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Words(**options)
        data = [(torch.randint(ROWS, (N, S)), torch.randint(2, (N,))) for _ in range(2)]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


def used(risk: EmpiricalRisk) -> int:
    """Numbers in rows of the table that occur."""
    return len(torch.cat([X.flatten() for X, _ in risk.data]).unique()) * D


#: Without those that form whole blocks, or that are not zero for tokens that never occur.
APPROACHES = {
    name: kind
    for name, kind in APPROXIMATIONS.items()
    if name not in ("FullBlock", "NearestKronecker", "ScaledIdentity")
}
every_approach = pytest.mark.parametrize("approximation", APPROACHES)


@every_approach
@pytest.mark.parametrize("options", [{}, {"padding": 3}, {"bag": True}], ids=["plain", "padding", "bag"])
def test_statistics_of_a_large_table(approximation: str, options: dict[str, Any]) -> None:
    risk = words(**options)
    with Largest() as largest:
        K = curvature(risk, APPROACHES[approximation])
        K.compute()
    largest.check()
    block = K.blocks["table"]
    assert block.shape == (TABLE, TABLE)
    close_to_rows(risk, block.diagonal())


def close_to_rows(risk: EmpiricalRisk, diagonal: Tensor) -> None:
    """The block is not just small, but there: not zero for tokens that occur, zero for all others."""
    found = int((diagonal > 0).sum())
    assert 0.5 * used(risk) <= found <= used(risk), f"{found} of {used(risk)} entries"


@every_approach
def test_operations_on_a_large_table(approximation: str) -> None:
    """Products, solves, traces, diagonals, determinants: never more than a few tables."""
    risk = words()
    K = curvature(risk, APPROACHES[approximation])
    K.compute()
    v = torch.ones(K.shape[1])
    operations: dict[str, Callable[[], Any]] = {
        "product": lambda: K @ v,
        "trace": lambda: K.trace,
        "norm": lambda: K.frobenius_norm,
        "diagonal": lambda: K.diagonal(),
        "eigenvalues": lambda: K.eigenvalues(),
        "inverse": lambda: K.inverse(damping=0.1) @ v,
        "logdet": lambda: K.inverse(damping=0.1).logdet,
        "shift": lambda: K.shift(0.1).logdet,
        "power": lambda: K.power(-0.5, damping=0.1) @ v,
        "sample": lambda: K.sample(generator=torch.Generator().manual_seed(0)),
        "state": lambda: K.state_dict(),
    }
    if approximation.startswith("KFAC"):
        operations["pair of dampings"] = lambda: K.inverse(damping=(0.1, 0.2)) @ v
        operations["heuristic damping"] = lambda: K.inverse(damping=0.1, use_heuristic_damping=True) @ v
    for name, operation in operations.items():
        with Largest() as largest:
            result = operation()
        try:
            # Concatenating the other layers, or a float64 draw with its uniform numbers, are copies of their own.
            largest.check()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.is_floating_point() and name not in ("state",):
                assert bool(t.isfinite().all()), name


def test_several_columns_take_as_many_tables() -> None:
    K = curvature(words(), KFAC)
    K.compute()
    X = torch.ones(K.shape[1], 3)
    with Largest() as largest:
        _ = K @ X
    largest.check(3 * ALLOWED)


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock])
@pytest.mark.parametrize("vectors", [MonteCarlo(samples=5, seed=0), Empirical()], ids=["mc", "empirical"])
def test_several_vectors_take_no_more(approximation: Any, vectors: Any) -> None:
    risk = words()
    with Largest() as largest:
        curvature(risk, approximation, vectors=vectors).compute()
    largest.check()


def test_forward_only_on_a_large_table() -> None:
    with Largest() as largest:
        K = curvature(words(), KFAC, vectors=ForwardOnly())
        K.compute()
        _ = K.trace
    largest.check()


def test_the_classic_door_on_a_large_table() -> None:
    risk = words()
    with Largest() as largest:
        K = KFACLinearOperator(risk.model, risk.losses.given, list(risk.params.values()), risk.data)
        _ = K @ torch.ones(K.shape[1])
        _ = K.trace
    largest.check()
    A = K.input_covariances["table"]
    assert A.numel() == ROWS
    assert abs(float(A.sum()) - 1) < 1e-5  # how often each token occurs


def test_the_embedding_alone_is_the_same_as_a_small_one() -> None:
    """Tokens that never occur change nothing: rows 0 to 9 of a large table against a table of 10."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        large, small = Words().double(), Words().double()
        small.table = nn.Embedding(10, D).double()
        x, y = torch.randint(10, (N, S)), torch.randint(2, (N,))
    with torch.no_grad():
        small.table.weight.copy_(large.table.weight[:10])
        small.body.load_state_dict(large.body.state_dict())
        small.head.load_state_dict(large.head.state_dict())
    loss, at = nn.CrossEntropyLoss(), slice(0, 10 * D)
    for name, kind in APPROACHES.items():
        one, other = (curvature(EmpiricalRisk(m, loss, [(x, y)]), kind) for m in (large, small))
        diagonal = one.blocks["table"].diagonal()
        # Layers' matrices are [d, tokens]; the diagonal of the whole is in the order of the parameters, [tokens, d].
        assert diagonal.numel() == TABLE
        assert torch.allclose(one.diagonal()[at], other.diagonal()[at], rtol=1e-9, atol=1e-14), name
        assert not one.diagonal()[at.stop : TABLE].any(), name
        assert torch.allclose(one.trace, other.trace, rtol=1e-9), name


def test_a_full_block_of_a_large_table_is_refused() -> None:
    """The size is in the message, and what to do instead."""
    with pytest.raises(UnsupportedError, match=rf"{TABLE} x {TABLE}.*2384\.2 GiB.*Use DiagonalBlock, KFAC or EKFAC"):
        curvature(words(), {"table": FullBlock}, default=KFAC).compute()


def test_the_block_of_a_tied_table_has_a_diagonal_factor() -> None:
    """The head needs a factor between tokens: with 50 000 of them it would have 9 GiB."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(ROWS, 2), nn.Linear(2, ROWS, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x).mean(1))

    risk = EmpiricalRisk(Tied(), nn.CrossEntropyLoss(), [(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1).long())])
    with Largest() as largest:
        K = curvature(risk, KFAC, vectors=MonteCarlo(seed=0))
    assert largest.size <= ALLOWED
    assert "9.3 GiB as a matrix" in str(K)
    with pytest.raises(UnsupportedError, match=r"factor .*50000 x 50000, 9\.3 GiB.*DiagonalBlock"):
        curvature(risk, TNT)


def test_the_measure_can_fail() -> None:
    """Dense gradients of a batch, or one-hot rows, would be noticed."""
    for wrong in (lambda: torch.zeros(N, ROWS, D), lambda: torch.zeros(N * S, ROWS)):
        with Largest() as largest:
            wrong()
        with pytest.raises(AssertionError, match="tables"):
            largest.check()
    with Largest() as largest:
        torch.zeros(1).expand(100 * TABLE)
    largest.check()


def test_sums_of_a_layer_end_when_its_block_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those of all layers are there while eigenvectors are computed."""
    seen: list[weakref.ref[KFAC]] = []
    alive: list[int] = []
    finish = KFAC.finish_for_good

    def watched(accumulator: KFAC) -> Any:
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(accumulator))
        return finish(accumulator)

    monkeypatch.setattr(KFAC, "finish_for_good", watched)
    problem("mlp").curvature(KFAC)
    assert len(alive) > 1
    assert not any(alive)


def test_a_factor_ends_with_its_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    decompose = EKFAC.decompose

    def look(self: EKFAC, name: str, M: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(M))
        return decompose(self, name, M)

    monkeypatch.setattr(EKFAC, "decompose", look)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    curvature(EmpiricalRisk(model, nn.MSELoss(), [(torch.randn(16, 8), torch.randn(16, 3))]), EKFAC)
    assert alive == [0] * 4
