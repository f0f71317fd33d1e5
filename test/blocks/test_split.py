"""`split`: of large factors the matrices on their diagonals are kept, and nothing between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import close, problem
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    EmpiricalRisk,
    FullBlock,
    MonteCarlo,
    curvature,
    load,
    save,
)
from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg import Dense, Eigendecomposed, Kronecker, SplitFactor

NETS = ["mlp", "strided cnn", "attention", "called twice", "grouped cnn", "language model", "masked"]
quiet = pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")


def known(names: list[str]) -> list[str]:
    from cases import NETS as MADE

    return [name for name in names if name in MADE]


def diagonal_part(M: Tensor, split: int) -> Tensor:
    """The matrices on the diagonal of `M [*b, d, d]`, as few as possible with at most `split` rows each."""
    d = M.shape[-1]
    number = -(-d // split)
    sizes = [len(part) for part in torch.arange(d).tensor_split(number)]
    piece = torch.repeat_interleave(torch.arange(number), torch.tensor(sizes))
    return M * (piece[:, None] == piece)


def matrices(factor: Any) -> Tensor:
    return factor.matrices()


@quiet
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", known(NETS))
def test_factors_are_the_diagonal_parts(name: str, approx: str, separate: bool) -> None:
    p, options = problem(name), {"kfac_approx": approx}
    whole = p.curvature(KFAC.using(**options), separate_weight_and_bias=separate)
    K = p.curvature(KFAC.using(**options, split=3), separate_weight_and_bias=separate)
    found = 0
    for block, twin in zip(K.blocks.values(), whole.blocks.values(), strict=True):
        pairs = ((block.G, twin.G), (block.A, twin.A)) if isinstance(block, Kronecker) else ((block, twin),)
        for factor, unsplit in pairs:
            if isinstance(unsplit, Dense) and isinstance(factor, (Dense, SplitFactor)):
                close(matrices(factor), diagonal_part(unsplit.matrix, 3), 1e-10)
                found += isinstance(factor, SplitFactor)
    assert found
    close(K.trace, whole.trace, 1e-10)
    close(K.diagonal(), whole.diagonal(), 1e-10)


@quiet
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", known(["mlp", "strided cnn", "attention", "grouped cnn", "tied"]))
def test_eigenvalues_are_exact(name: str, separate: bool) -> None:
    p, kind = problem(name), EKFAC.using(split=3)
    K = p.curvature(kind, separate_weight_and_bias=separate)
    exact = curvature(p.risk(), FullBlock, vectors=K.vectors, separate_weight_and_bias=separate)
    for block, full in zip(K.blocks.values(), exact.blocks.values(), strict=True):
        if isinstance(block, Eigendecomposed):
            Q = block.basis.to_dense()
            close(Q.T @ Q, torch.eye(len(Q), dtype=Q.dtype), 1e-10)
            close(block.values, (Q.T @ full.to_dense() @ Q).diagonal(), 1e-10)
    close(K.trace, exact.trace, 1e-10)


@quiet
@pytest.mark.parametrize("kind", [KFAC.using(split=3), EKFAC.using(split=3), EKFAC.using(split=1)], ids=repr)
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_states_inverses_streams(name: str, kind: Any, tmp_path: Any) -> None:
    p = problem(name)
    K = p.curvature(kind)
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    close(K.inverse(0.1) @ (K @ v + 0.1 * v), v)
    close(K.inverse((0.1, 0.2)).logdet if kind.kind is KFAC else K.inverse(0.1).logdet, -_logdet(K, kind), 1e-9)
    other = p.curvature(kind, vectors=None)
    for state in (K.state_dict(), _through_file(K, tmp_path)):
        other.replace_blocks({block: 2 * operator for block, operator in other.unscaled.blocks.items()})
        other.load_state_dict(state)
        assert torch.equal(other @ v, K @ v)
    one, two = (CurvatureEstimator(p.risk(), kind) for _ in range(2))
    for batch in p.data:
        one.update(batch)
    close(one.operator.trace, K.trace)
    one.refresh(0.1)
    close(one.operator.trace, K.trace, what="in new bases")
    two.load_state_dict(one.state_dict())
    close(two.operator @ v, one.operator @ v)


def _logdet(K: Any, kind: Any) -> Tensor:
    if kind.kind is EKFAC:
        return torch.linalg.slogdet(K.to_dense() + 0.1 * torch.eye(K.shape[0], dtype=torch.float64))[1]
    total = torch.zeros((), dtype=torch.float64)
    for block in K.blocks.values():
        if isinstance(block, Kronecker):
            G, A = (F.to_dense() for F in (block.G, block.A))
            G, A = G + 0.2 * torch.eye(len(G), dtype=G.dtype), A + 0.1 * torch.eye(len(A), dtype=A.dtype)
            total = total + torch.logdet(torch.kron(G.contiguous(), A.contiguous()))
        else:
            total = total + torch.logdet(block.to_dense() + 0.2 * torch.eye(block.shape[0], dtype=torch.float64))
    return total


def _through_file(K: Any, tmp_path: Any) -> Any:
    save(K, tmp_path / "K")
    return load(tmp_path / "K")


def test_the_table_says_so_and_others_are_refused() -> None:
    p = problem("mlp")
    assert "G in 2 pieces of" in repr(p.curvature(KFAC.using(split=3)))
    for wrong in (0, -1, 2.5, True, "4096"):
        with pytest.raises(ValueError, match=r"split=.*expected the most rows that a factor may have, an integer"):
            p.curvature(KFAC.using(split=wrong))
    K = p.curvature(KFAC.using(split=3))
    with pytest.raises(NoClosedForm, match="no closed form of `inverse`"):
        _ = (K + p.curvature(KFAC)).inverse(0.1)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_the_head_of_a_large_vocabulary(kind: Any) -> None:
    """Said before: within 1 GiB for KFAC. Computed with a tenth of the rows."""
    tokens = torch.randint(50257, (1, 6))

    def risk(vocabulary: int) -> EmpiricalRisk:
        model = nn.Sequential(nn.Embedding(vocabulary, 64), nn.Linear(64, vocabulary, bias=False), nn.Flatten(0, -2))
        seen = tokens % vocabulary
        return EmpiricalRisk(model, nn.CrossEntropyLoss(), [(seen, seen.roll(-1, 1).flatten())])

    needs = curvature(risk(50257), KFAC.using(split=4096), compute=False).memory()
    assert needs.layers["1"].kept / 2**30 == pytest.approx(0.72, abs=0.01)
    assert needs.computing < 2**30
    K = curvature(risk(5026), kind.using(split=400), vectors=MonteCarlo(seed=0))
    v = torch.ones(K.shape[0])
    close(K.inverse(0.1) @ (K @ v + 0.1 * v), v, rtol=1e-3)
