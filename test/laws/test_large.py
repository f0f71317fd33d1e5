"""Embeddings of many tokens: nothing is as large as tokens times tokens, or examples times the
table; large factors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvlinops_plus import EKFAC, KFAC, CurvatureEstimator, EmpiricalRisk, MonteCarlo, curvature
from curvlinops_plus.linalg import Diagonal, Eigendecomposed, IdentityLinearOperator, Kronecker
from test.cases import APPROXIMATIONS, close, problem
from test.helpers import Written, seeded

ROWS, D, N, S = 50_000, 16, 8, 32
TABLE = ROWS * D
#: A few copies of the table are fine: a product has an input, an output and something in between.
#: One example's dense gradient for each of N examples is 8 tables; the positions' one-hot rows are
#: 16 of them.
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
        assert 0 < self.size <= allowed, (
            f"{self.what}: {self.size} numbers, {self.size / TABLE:.1f} tables"
        )


def classifier(rows: int = ROWS, padding: int | None = None, bag: bool = False) -> Any:
    """Of texts: an embedding of many words, a linear layer at every position, the mean."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.body(m.table(x)))
        return m.head(h if bag else h.mean(1))

    table = nn.EmbeddingBag(rows, D) if bag else nn.Embedding(rows, D, padding_idx=padding)
    return Written(forward, table=table, body=nn.Linear(D, 4), head=nn.Linear(4, 2))


def words(**options: Any) -> EmpiricalRisk:
    """The risk of it; the seed is fixed, and put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = classifier(**options)
        data = [(torch.randint(ROWS, (N, S)), torch.randint(2, (N,))) for _ in range(2)]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


#: Without those that form whole blocks or factors, or that are not zero for tokens that never
#: occur.
APPROACHES = {
    name: kind
    for name, kind in APPROXIMATIONS.items()
    if name not in ("FullBlock", "TNT", "ScaledIdentity")
    and not name.startswith("NearestKronecker")
}


@pytest.mark.parametrize("approximation", APPROACHES)
@pytest.mark.parametrize(
    "options", [{}, {"padding": 3}, {"bag": True}], ids=["plain", "padding", "bag"]
)
def test_statistics_of_a_large_table(approximation: str, options: dict[str, Any]) -> None:
    risk = words(**options)
    vectors = MonteCarlo(samples=5, seed=0) if "padding" in options else None
    with Largest() as largest:
        K = curvature(risk, APPROACHES[approximation], vectors=vectors)
    largest.check()
    # The block is not just small, but there: zero for tokens that never occur, and not for others.
    used = len(torch.cat([X.flatten() for X, _ in risk.data]).unique()) * D
    assert 0.5 * used <= int((K.blocks["table"].diagonal() > 0).sum()) <= used


@pytest.mark.parametrize("approximation", APPROACHES)
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
        "sample": lambda: K.sample(generator=seeded()),
        "state": lambda: K.state_dict(),
    }
    if approximation.startswith("KFAC"):
        operations["pair of dampings"] = lambda: K.inverse(damping=(0.1, 0.2)) @ v
        operations["heuristic damping"] = lambda: (
            K.inverse(damping=0.1, use_heuristic_damping=True) @ v
        )
    for name, operation in operations.items():
        with Largest() as largest:
            result = operation()
        try:
            # Concatenating the other layers, or a float64 draw with its uniform numbers, are copies
            # of their own.
            largest.check()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.is_floating_point() and name not in ("state",):
                assert bool(t.isfinite().all()), name


def test_sums_and_factors_end_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those of all layers are there while eigenvectors are computed."""
    seen: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watch(function: Callable[..., Any], argument: int) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            alive.append(sum(ref() is not None for ref in seen))
            seen.append(weakref.ref(args[argument]))
            return function(*args)

        return watched

    monkeypatch.setattr(KFAC, "finish", watch(KFAC.finish, 0))
    problem("mlp").curvature(KFAC)
    assert alive == [0, 0]
    monkeypatch.undo()
    seen.clear()
    monkeypatch.setattr(EKFAC, "decompose", watch(EKFAC.decompose, 2))
    problem("mlp").curvature(EKFAC)
    assert alive == [0] * 6


# ------------------------------------------------------------------------------------ large factors


@pytest.mark.parametrize(
    "kind", [kind.using(max_bytes=size) for kind in (KFAC, EKFAC) for size in (0, 150)], ids=repr
)
@pytest.mark.parametrize(
    ("name", "separate"), [("mlp", False), ("strided cnn", True), ("tied", False)]
)
def test_states_inverses_and_streams(name: str, kind: Any, separate: bool) -> None:
    p = problem(name)
    K = p.curvature(kind, separate_weight_and_bias=separate)
    other = curvature(p.risk(), kind, separate_weight_and_bias=separate, compute=False)
    other.load_state_dict(K.state_dict())
    assert torch.equal(other.to_dense(), K.to_dense())
    v = torch.ones(K.shape[0], dtype=torch.float64)
    close(K.inverse(0.1) @ (K @ v + 0.1 * v), v)
    assert (K.inverse(0.1, use_heuristic_damping=True) @ v).isfinite().all()
    estimator = CurvatureEstimator(p.risk(), kind, separate_weight_and_bias=separate)
    for batch in p.data:
        estimator.update(batch)
    close(estimator.operator.trace, K.trace)
    estimator.refresh(0.1)
    close(estimator.operator.trace, K.trace, what="in new bases")
    K.verify()


def head(tied: bool) -> nn.Module:
    """A language model of one embedding and one head."""
    embedding, output = nn.Embedding(50257, 4), nn.Linear(4, 50257, bias=not tied)
    if tied:
        output.weight = embedding.weight
    return nn.Sequential(embedding, output, nn.Flatten(0, -2))


@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
def test_heads_of_large_vocabularies_need_no_options(tied: bool) -> None:
    tokens = torch.tensor([[1, 50256, 7]])
    risk = EmpiricalRisk(
        head(tied), nn.CrossEntropyLoss(), [(tokens, tokens.roll(-1, 1).flatten())]
    )
    for kind in (KFAC, EKFAC):
        K = curvature(risk, kind, vectors=MonteCarlo(samples=1, seed=0))
        assert f"{kind.__name__}, diagonal G (9.4 GiB as a matrix)" in repr(K)
        block = K.blocks["0" if tied else "1"]
        if isinstance(block, Kronecker):
            assert isinstance(block.G, Diagonal)
        else:
            assert isinstance(block, Eigendecomposed)
            assert isinstance(block.basis, Kronecker)
            assert isinstance(block.basis.G, IdentityLinearOperator)
        v = torch.ones(K.shape[0])
        close(K.inverse(0.1) @ (K @ v + 0.1 * v), v, rtol=1e-4)
        assert K.inverse(0.1).logdet.isfinite()
