"""Rows and columns of matrices, picked in every way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from curvlinops_plus import GGNFactorLinearOperator, GGNLinearOperator
from curvlinops_plus.errors import NoClosedForm, UnsupportedError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Eigendecomposed,
    IdentityLinearOperator,
    Kronecker,
    Layout,
    LinearOperator,
    ProjectedLinearOperator,
    Space,
    Structure,
    SubmatrixLinearOperator,
)
from test.helpers import seeded
from test.linalg.cases import (
    CASES,
    F64,
    Case,
    OnlyProducts,
    block_diagonal,
    eye_like,
    normal,
    orthogonal,
    psd,
)
from test.linalg.test_laws import close
from test.nets import tanh_net

PSD, GENERAL = Structure.PSD, Structure.GENERAL
SPACE = Space.from_shapes({"a": (2, 2), "b": (3,), "c": (2,)})  # 9 entries
M9 = psd(9, 9)
A9 = OnlyProducts(M9, SPACE)
MASK = [k in (1, 4) for k in range(9)]

PICKS: list[tuple[Any, list[int]]] = [
    ([4, 0, 7], [4, 0, 7]),
    (range(3, 6), [3, 4, 5]),
    ([], []),
    (torch.tensor([8, 3], dtype=torch.int32), [8, 3]),
    (np.array([2, 5]), [2, 5]),
    ([np.int64(6)], [6]),
    (MASK, [1, 4]),
    (torch.tensor(MASK), [1, 4]),
    (np.array(MASK), [1, 4]),
    (slice(2, 6), [2, 3, 4, 5]),
    (slice(None, None, -3), [8, 5, 2]),
    (slice(None), list(range(9))),
    ("b", [4, 5, 6]),
    (["c", "a"], [7, 8, 0, 1, 2, 3]),
]


@pytest.mark.parametrize(("which", "at"), PICKS, ids=str)
def test_ways_to_pick(which: Any, at: list[int]) -> None:
    for rows, cols, expected in (
        (which, [0, 5], M9[at][:, [0, 5]]),
        ([0, 5], which, M9[[0, 5]][:, at]),
        (which, which, M9[at][:, at]),
    ):
        S = SubmatrixLinearOperator(A9, rows, cols)
        assert S.shape == tuple(expected.shape)
        close(S.to_dense(), expected)
        close(S.T.to_dense(), expected.T)
        close(A9[rows, cols].to_dense(), expected)
        X = normal(expected.shape[1], 2)
        close(S @ X, expected @ X)
        close(normal(2, expected.shape[0]) @ S, normal(2, expected.shape[0]) @ expected)
        assert S.structure == (PSD if rows is cols else GENERAL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_of_every_operator(case: Case) -> None:
    """What `submatrix` returns is the submatrix, and what it knows of itself is right."""
    A, M = case.make(F64)
    m, n = M.shape
    rows, cols = list(range(m))[::-2], list(range(n))[1:]
    close(A[rows, cols].to_dense(), M[rows][:, cols])
    close(A[rows, cols].T.to_dense(), M[rows][:, cols].T)
    if m != n:
        return
    P = torch.zeros_like(M)
    P[rows, rows] = 1
    for B, expected in (
        (A[rows, rows], M[rows][:, rows]),
        (ProjectedLinearOperator(A, rows), P @ M @ P),
    ):
        close(B.to_dense(), expected)
        close(B.T.to_dense(), expected.T)
        assert B.structure == A.structure
        try:
            close(B.diagonal(), expected.diagonal())
            close(B.trace, expected.trace())
        except NoClosedForm:
            assert "diagonal" in case.without


def test_names_shapes_and_structure_stay() -> None:
    S, x = A9[["c", "a"], "b"], normal(3)
    assert (S.in_shapes, S.out_shapes) == (((3,),), ((2,), (2, 2)))
    answer = S @ {"b": x}
    assert list(answer) == ["c", "a"]
    close(answer["a"].flatten(), M9[:4, 4:7] @ x)
    close(answer["c"], M9[7:, 4:7] @ x)
    assert A9[:, "b"].out_space == A9[:, :].in_space == SPACE
    named = SubmatrixLinearOperator(IdentityLinearOperator({"w": (2,), "b": (1,)}), "b", "b").to(
        dtype=F64
    )
    assert named.in_space.names == ["b"]
    M, d = psd(6, 6), Diagonal(torch.arange(6.0, dtype=F64))
    kept, cross = Dense(M, PSD)[[5, 1], [5, 1]], Dense(M, PSD)[[5, 1], [1, 5]]
    assert (type(kept), kept.structure, type(cross), cross.structure) == (
        Dense,
        PSD,
        Dense,
        GENERAL,
    )
    assert isinstance(d[[1, 3], [1, 3]], Diagonal)
    close(d[[1, 3], [3, 1]].to_dense(), torch.tensor([[0.0, 1.0], [3.0, 0.0]], dtype=F64))
    close(
        Dense(M, PSD).shift(3.0)[[0, 1], [1, 2]].to_dense(),
        (M + 3 * eye_like(M))[[0, 1]][:, [1, 2]],
    )
    S = SubmatrixLinearOperator(Dense(M, PSD), [0, 1], [0, 1])
    S.set_submatrix([1, 2], [4, 0, 3])
    close(S.to_dense(), M[[1, 2]][:, [4, 0, 3]])
    assert (S.structure, S.shape) == (GENERAL, (2, 3))


@pytest.mark.parametrize("which", ["sorted", "shuffled", "one", "all", "a block and some"])
def test_parts_of_blocks(which: str) -> None:
    """A part of every block: entries in the order asked for, with the inverse and determinant of
    the part.
    """
    K, M = block_diagonal()
    n = len(M)
    shuffled = torch.randperm(n, generator=seeded())
    at = {
        "sorted": shuffled[: n // 2].sort().values,
        "shuffled": shuffled[: n // 2],
        "one": torch.tensor([n - 1]),
        "all": shuffled,
        "a block and some": torch.cat([K.positions()["conv"], K.positions()["scale"][:1]]),
    }[which]
    expected = M[at][:, at]
    for S, D in (
        (K[at, at], expected),
        ((2 * K).shift(0.1)[at, at], 2 * expected + 0.1 * eye_like(expected)),
    ):
        assert isinstance(S, BlockDiagonal)
        close(S.to_dense(), D)
        close(S @ normal(len(at), 2), D @ normal(len(at), 2))
        close(S.inverse(0.1).to_dense(), torch.linalg.inv(D + 0.1 * eye_like(expected)))
        close(S.logdet, torch.logdet(D))
        close(S.diagonal(), D.diagonal())
        close((S + S).to_dense(), 2 * D)
    v = normal(len(at))
    close(S.merge(S.split(v)), v)
    with pytest.raises(UnsupportedError, match="cuts blocks has no state"):
        S.state_dict()
    if which in ("all", "a block and some"):
        assert K[at, at].blocks["conv"] is K.blocks["conv"]  # what is picked whole stays


def test_parameters_of_blocks() -> None:
    K, M = block_diagonal()
    at = K.space.unflatten(torch.arange(K.space.dim))
    names = ["scale", "conv.weight", "conv.bias"]
    S, rows = K[names, names], torch.cat([at[name].flatten() for name in names])
    assert S.blocks == {name: K.blocks[name] for name in ("conv", "scale")}
    close(S.to_dense(), M[rows][:, rows])
    close(BlockDiagonal.from_state_dict(S.state_dict()).to_dense(), S.to_dense())
    cut, rows = K[["conv.weight"], ["conv.weight"]], at["conv.weight"].flatten()
    assert cut.in_shapes == ((2, 2, 1, 3),)
    close(
        cut.inverse(0.1).to_dense(),
        torch.linalg.inv(M[rows][:, rows] + 0.1 * torch.eye(12, dtype=F64)),
    )
    assert isinstance(K["scale", "grouped"], SubmatrixLinearOperator)


def test_positions_of_blocks_with_numbered_parameters() -> None:
    """Positions are no names, also where the only parameter is called "0" as a flat vector is."""
    M = psd(3, 3)
    layouts = {"b": Layout({"0": "d -> 1 d"}, {"0": (3,)})}
    K = BlockDiagonal({"b": Dense(M, PSD)}, layouts, Space({"0": (3,)}))
    for at in ([2, 0, 1], [1], [0, 1, 2]):
        close(K[at, at].to_dense(), M[at][:, at])
        close(K[at, at][:, :].to_dense(), M[at][:, at])


def test_entries_of_parts_are_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvlinops_plus.linalg.submatrices._COLUMNS", 3)
    E = Eigendecomposed(Kronecker(orthogonal(5), orthogonal(4, 1), GENERAL), normal(20).abs() + 0.1)
    K, groups = Kronecker(psd(3, 3), psd(4, 4, seed=1)), Kronecker(psd(3, 2, 2), psd(3, 3, seed=1))
    for A, some in (
        (K, [8, 3, 1, 0, 11]),
        (E, [17, 3, 6, 8, 0, 12, 2]),
        (groups, [17, 4, 0, 13, 5]),
    ):
        S, expected = A[some, some], A.to_dense()[some][:, some]
        assert isinstance(S, Dense)
        close(S.logdet, expected.logdet())
        close((S + 2 * S).inverse().to_dense(), torch.linalg.inv(3 * expected))


def test_parts_of_curvature_matrices() -> None:
    torch.manual_seed(0)
    model = tanh_net(3, 4, 2).double()
    data = [(torch.randn(7, 3, dtype=F64), torch.randn(7, 2, dtype=F64))]
    params, names = dict(model.named_parameters()), ["2.weight", "2.bias"]
    G = GGNLinearOperator(model, nn.MSELoss(), params, data)
    close(G[names, "0.bias"].to_dense(), G.to_dense()[16:, 12:16])
    for A in (G, GGNFactorLinearOperator(model, nn.MSELoss(), params, data)):
        for rows, cols in (([0], []), ([], [0]), ([], [])):
            assert (
                A[rows, cols].to_dense().shape
                == A[rows, cols].T.to_dense().T.shape
                == (len(rows), len(cols))
            )


def test_other_libraries_still_leave_multiplication_to_us() -> None:
    """`A[i, j]` makes an object look like a sequence, which NumPy and PyTorch must not take it
    for.
    """
    A: LinearOperator = Dense(M9, PSD)
    close(torch.from_numpy(np.ones(9) @ A), M9.sum(0))
    close((np.float64(2) * A).to_dense(), 2 * M9)
    close(torch.ones(9, dtype=F64) @ A, M9.sum(0))
    close((torch.tensor(2.0, dtype=F64) * A).to_dense(), 2 * M9)
