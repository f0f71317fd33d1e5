"""Rows and columns of matrices, picked in every way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from curvlinops_plus import GGNFactorLinearOperator, GGNLinearOperator, KFACLinearOperator
from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Eigendecomposed,
    IdentityLinearOperator,
    Kronecker,
    Layout,
    LinearOperator,
    PositionedBlocks,
    Space,
    Structure,
)
from curvlinops_plus.linalg.submatrices import (
    PrincipalPart,
    ProjectedLinearOperator,
    SubmatrixLinearOperator,
    submatrix,
)

from .cases import CASES, F64, Case, OnlyProducts, block_diagonal, eye_like, normal, orthogonal, psd
from .test_laws import close

PSD, GENERAL = Structure.PSD, Structure.GENERAL
SPACE = Space.from_shapes({"a": (2, 2), "b": (3,), "c": (2,)})  # 9 entries
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def flags(n: int, *positions: int) -> list[bool]:
    return [k in positions for k in range(n)]


PICKS: list[tuple[Any, list[int]]] = [
    ([4, 0, 7], [4, 0, 7]),
    ((1, 2), [1, 2]),
    (range(3, 6), [3, 4, 5]),
    ([], []),
    (torch.tensor([8, 3]), [8, 3]),
    (torch.tensor([8, 3], dtype=torch.int32), [8, 3]),
    (np.array([2, 5]), [2, 5]),
    ([np.int64(6)], [6]),
    (flags(9, 1, 4), [1, 4]),
    (torch.tensor(flags(9, 0, 8)), [0, 8]),
    (np.array(flags(9, 3)), [3]),
    (slice(2, 6), [2, 3, 4, 5]),
    (slice(None, None, 4), [0, 4, 8]),
    (slice(None, None, -3), [8, 5, 2]),
    (slice(-2, None), [7, 8]),
    (slice(None), list(range(9))),
    ("b", [4, 5, 6]),
    (["c", "a"], [7, 8, 0, 1, 2, 3]),
]


@pytest.mark.parametrize(("which", "positions"), PICKS, ids=str)
def test_ways_to_pick(which: Any, positions: list[int]) -> None:
    M = psd(9, 9)
    A = OnlyProducts(M, SPACE)
    for rows, cols, expected in (
        (which, [0, 5], M[positions][:, [0, 5]]),
        ([0, 5], which, M[[0, 5]][:, positions]),
        (which, which, M[positions][:, positions]),
    ):
        S = SubmatrixLinearOperator(A, rows, cols)
        assert S.shape == tuple(expected.shape)
        close(S.to_dense(), expected)
        close(S.T.to_dense(), expected.T)
        close(A[rows, cols].to_dense(), expected)
        X = normal(expected.shape[1], 2)
        close(S @ X, expected @ X)
        close(normal(2, expected.shape[0]) @ S, normal(2, expected.shape[0]) @ expected)
        assert S.structure == (PSD if rows is cols else GENERAL)


@each_case
def test_of_every_operator(case: Case) -> None:
    """What `submatrix` returns is the submatrix, and what it knows of itself is right."""
    A, M = case.make(F64)
    m, n = M.shape
    rows, cols = list(range(m))[::-2], list(range(n))[1:]
    close(A[rows, cols].to_dense(), M[rows][:, cols])
    close(A[rows, cols].T.to_dense(), M[rows][:, cols].T)
    if m == n:
        principal = A[rows, rows]
        expected = M[rows][:, rows]
        close(principal.to_dense(), expected)
        assert principal.structure == A.structure
        try:
            close(principal.diagonal(), expected.diagonal())
            close(principal.trace, expected.trace())
        except NoClosedForm:
            assert "diagonal" in case.without
        projected = ProjectedLinearOperator(A, rows)
        P = torch.zeros_like(M)
        P[rows, rows] = 1
        close(projected.to_dense(), P @ M @ P)
        close(projected.T.to_dense(), (P @ M @ P).T)
        assert projected.structure == A.structure
        try:
            close(projected.diagonal(), (P @ M @ P).diagonal())
            close(projected.trace, (P @ M @ P).trace())
        except NoClosedForm:
            assert "diagonal" in case.without


def test_whole_blocks_stay_blocks() -> None:
    K, M = block_diagonal(F64)
    assert isinstance(K, BlockDiagonal)
    names = ["scale", "conv.weight", "conv.bias"]
    at = K.space.unflatten(torch.arange(K.space.dim))
    positions = torch.cat([at[name].flatten() for name in names])
    S = K[names, names]
    assert isinstance(S, BlockDiagonal)
    assert list(S.blocks) == ["conv", "scale"]
    assert S.blocks["conv"] is K.blocks["conv"]
    close(S.to_dense(), M[positions][:, positions])
    close(S.logdet, torch.logdet(M[positions][:, positions]))
    cut = K[["conv.weight"], ["conv.weight"]]
    assert isinstance(cut, BlockDiagonal)
    assert cut.in_shapes == ((2, 2, 1, 3),)
    assert isinstance(cut.blocks["conv"], Kronecker)  # all columns of the weight, none of the bias
    expected = M[at["conv.weight"].flatten()][:, at["conv.weight"].flatten()]
    close(cut.to_dense(), expected)
    close(cut.inverse(0.1).to_dense(), torch.linalg.inv(expected + 0.1 * torch.eye(12, dtype=F64)))
    assert isinstance(K["scale", "grouped"], SubmatrixLinearOperator)


@pytest.mark.parametrize("which", ["sorted", "shuffled", "every other", "one"])
def test_parts_of_blocks(which: str) -> None:
    """A part of every block: entries in the order asked for, with the inverse and determinant of the part."""
    K, M = block_diagonal(F64)
    n = len(M)
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    at = {
        "sorted": shuffled[: n // 2].sort().values,
        "shuffled": shuffled[: n // 2],
        "every other": torch.arange(0, n, 2),
        "one": torch.tensor([n - 1]),
    }[which]
    expected = M[at][:, at]
    for S, D in ((K[at, at], expected), ((2 * K).shift(0.1)[at, at], 2 * expected + 0.1 * eye_like(expected))):
        assert isinstance(S, BlockDiagonal)
        close(S.to_dense(), D)
        close(S @ normal(len(at)), D @ normal(len(at)))
        close(S.inverse(0.1).to_dense(), torch.linalg.inv(D + 0.1 * eye_like(expected)))
        close(S.logdet, torch.logdet(D))
        close(S.diagonal(), D.diagonal())
        close((S + S).to_dense(), 2 * D)


def test_large_parts_are_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvlinops_plus.linalg.entries.LARGEST", 8 * 9)
    K, at = Kronecker(psd(3, 3), psd(4, 4, seed=1)), [0, 5, 6, 11]
    assert isinstance(K[at[:3], at[:3]].inverse(), Dense)
    expected = K.to_dense()[at][:, at]
    close(K[at, at].to_dense(), expected)
    close(K[at, at] @ normal(4), expected @ normal(4))
    close(K[at, at].trace, expected.trace())
    with pytest.raises(NoClosedForm, match=r"4 x 4 part of Kronecker\(12.* is not formed.*CGInverseLinearOperator"):
        K[at, at].inverse()


def test_parts_have_flat_vectors() -> None:
    """Parts by positions are added to and multiplied by each other, whatever blocks they come from."""
    K, M = block_diagonal(F64)
    L = BlockDiagonal(
        {"all": Dense(psd(31, 31), PSD)}, {"all": Layout({"x": "d -> 1 d"}, {"x": (31,)})}, Space({"x": (31,)})
    )
    at = [3, 30, 0, 17, 8, 9]
    A, B, D = M[at][:, at], psd(31, 31)[at][:, at], normal(6)
    close((K[at, at] + L[at, at]).to_dense(), A + B)
    close((K[at, at] @ L[at, at]).to_dense(), A @ B)
    close((K[at, at] @ [D])[0], A @ D)
    close((K[at, at] + K[at, at]).inverse(0.1).to_dense(), torch.linalg.inv(2 * A + 0.1 * eye_like(A)))
    rest = [k for k in range(31) if k not in at]
    close(
        (K[at, at] - K[at, rest] @ K[rest, rest].inverse() @ K[rest, at]).to_dense(),
        A - M[at][:, rest] @ torch.linalg.solve(M[rest][:, rest], M[rest][:, at]),
    )
    sub = [4, 0, 2]
    close(K[at, at][sub, sub].to_dense(), A[sub][:, sub])
    close(BlockDiagonal.from_state_dict(K[at, at].state_dict()).to_dense(), A)
    close(K[at, at].to(torch.float32).to_dense(), A.float())
    S = K[at, at]
    close(S.merge(S.split(D)), D)
    assert [len(part) for part in S.split(D).values()] == [block.shape[0] for block in S.blocks.values()]


@pytest.mark.parametrize("which", ["bias", "row", "some"])
@pytest.mark.parametrize("kind", ["kronecker", "batch", "dense"])
def test_parts_in_an_eigenbasis(which: str, kind: str) -> None:
    """Entries come from the factors of the basis."""
    bases = {
        "kronecker": lambda: Kronecker(orthogonal(5), orthogonal(4, 1), GENERAL),
        "batch": lambda: Kronecker(torch.stack([orthogonal(5), orthogonal(5, 2)]), orthogonal(2, 1), GENERAL),
        "dense": lambda: Dense(orthogonal(20)),
    }
    E = Eigendecomposed(bases[kind](), normal(20).abs() + 0.1)
    at = {"bias": [3, 7, 11, 15, 19], "row": [8, 9, 10, 11], "some": [17, 3, 6, 8, 0, 12, 2]}[which]
    expected = E.to_dense()[at][:, at]
    S = E[at, at]
    assert isinstance(S, PrincipalPart)
    close(S.to_dense(), expected)
    close(S.logdet, expected.logdet())
    close(S @ normal(len(at)), expected @ normal(len(at)))
    close((S + 2 * S).inverse().to_dense(), torch.linalg.inv(3 * expected))
    E.values.mul_(2)
    close(S.logdet, (2 * expected).logdet())  # it follows


def test_positions_of_blocks_are_checked() -> None:
    D = Diagonal(torch.ones(2))
    with pytest.raises(ValueError, match=r"Expected positions of each block, got blocks \['a'\], positions \['b'\]"):
        PositionedBlocks({"a": D}, {"b": torch.tensor([0, 1])}, Space.flat(2))
    with pytest.raises(ValueError, match="Expected each position from 0 to 1 in one block"):
        PositionedBlocks({"a": D}, {"a": torch.tensor([0, 0])}, Space.flat(2))
    with pytest.raises(ValueError, match='block "a": expected a 1 x 1 matrix for 1 positions'):
        PositionedBlocks({"a": D}, {"a": torch.tensor([0])}, Space.flat(1))


def test_layers_of_a_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = [(torch.randn(7, 3, dtype=F64), torch.randn(7, 2, dtype=F64))]
    params = dict(model.named_parameters())
    K = KFACLinearOperator(model, nn.MSELoss(), params, data, separate_weight_and_bias=False)
    names = ["2.weight", "2.bias"]
    S = K[names, names]
    dense = K.to_dense()
    close(S.to_dense(), dense[16:, 16:])
    close(S.inverse(0.1).logdet, -torch.logdet(dense[16:, 16:] + 0.1 * torch.eye(10, dtype=F64)))
    assert list(S @ {name: params[name].detach() for name in names}) == names
    assert S.device == K.device
    assert S.structure == PSD
    before = S.to_dense()
    K.compute_kronecker_factors()  # what is computed again, is seen
    close(S.to_dense(), before)
    with torch.no_grad():
        model[0].weight.mul_(2)
    K.compute_kronecker_factors()
    close(S.to_dense(), K.to_dense()[16:, 16:])
    assert (S.to_dense() - before).abs().max() > 1e-3
    G = GGNLinearOperator(model, nn.MSELoss(), params, data)
    close(G[names, "0.bias"].to_dense(), G.to_dense()[16:, 12:16])
    close(G["0.bias", "0.bias"].to_dense(), G.to_dense()[12:16, 12:16])


def test_nothing_picked_of_a_curvature_matrix() -> None:
    model = nn.Linear(3, 2).double()
    data = [(torch.randn(7, 3, dtype=F64), torch.randn(7, 2, dtype=F64))]
    params = list(model.parameters())
    for A in (
        GGNLinearOperator(model, nn.MSELoss(), params, data),
        GGNFactorLinearOperator(model, nn.MSELoss(), params, data),
    ):
        for rows, cols in (([0], []), ([], [0]), ([], [])):
            shape = (len(rows), len(cols))
            for S in (SubmatrixLinearOperator(A, rows, cols), A[rows, cols]):
                assert S.to_dense().shape == shape
                assert S.T.to_dense().shape == shape[::-1]
                close(S @ torch.ones(len(cols), dtype=F64), torch.zeros(len(rows), dtype=F64))
                assert (S @ torch.ones(len(cols), 0, dtype=F64)).shape == (len(rows), 0)
                assert (torch.ones(0, len(rows), dtype=F64) @ S).shape == (0, len(cols))


def test_only_operators() -> None:
    for call in (
        lambda A: SubmatrixLinearOperator(A, [0], [0]),
        lambda A: submatrix(A, [0], [0]),
        lambda A: ProjectedLinearOperator(A, [0]),
    ):
        with pytest.raises(TypeError, match=r"Expected A to be a LinearOperator, got Tensor; use Dense\(A\), or index"):
            call(torch.eye(2))
        with pytest.raises(TypeError, match=r"got ndarray; use from_scipy\(A\) or Dense\(A\)"):
            call(np.eye(2))


def test_moving() -> None:
    for A in (
        SubmatrixLinearOperator(Dense(psd(4, 4), PSD), [3, 1], [2, 0]),
        ProjectedLinearOperator(Dense(psd(4, 4), PSD), [3, 1]),
    ):
        moved = A.to(dtype=torch.float32)
        assert moved.dtype == torch.float32
        close(moved.to_dense(), A.to_dense().float())
    named = SubmatrixLinearOperator(IdentityLinearOperator({"w": (2,), "b": (1,)}), "b", "b").to(dtype=F64)
    assert named.in_space.names == ["b"]


def test_a_submatrix_without_closed_forms() -> None:
    S = SubmatrixLinearOperator(Dense(normal(4, 4)), [0, 1], [1, 0])
    with pytest.raises(NoClosedForm, match=r"SubmatrixLinearOperator\(2 x 2.* no closed form of `diagonal`"):
        S.diagonal()
    with pytest.raises(NoClosedForm, match="`diagonal`"):
        _ = S.trace


def picks(*which: Any) -> LinearOperator:
    return OnlyProducts(psd(9, 9), SPACE)[which]


REFUSED = [
    (lambda: picks([0, 9], [0]), "Expected row numbers between 0 and 8, got numbers between 0 and 9"),
    (lambda: picks([0], [-1, 3]), "Expected column numbers between 0 and 8, got numbers between -1 and 3"),
    (lambda: picks([0, 1, 0], [0]), "Expected different rows, got 1 duplicates"),
    (
        lambda: picks([0], [1.0]),
        r"columns as a list of integers, a boolean mask, a slice, or names .*'a', 'b'.*got \[1",
    ),
    (lambda: picks(3, [0]), "rows as a list of integers.*; got 3"),
    (lambda: picks([0], [0, "a"]), r"got \[0, 'a'\]"),
    (lambda: picks([0, True], [0]), r"got \[0, True\]"),
    (lambda: picks(torch.zeros(2), [0]), "rows as a list of integers"),
    (lambda: picks(torch.zeros(2, 2, dtype=torch.long), [0]), "rows as a list of integers"),
    (lambda: picks(None, [0]), "got None"),
    (lambda: picks([True], [0]), "Expected a mask of 9 entries, one per row, got 1"),
    (lambda: picks(["a", "d"], [0]), r"names of rows out of \['a', 'b', 'c'\], got \['a', 'd'\]"),
    (lambda: picks("a", ["b", "b"]), "Expected different names of columns"),
    (lambda: picks([0]), r"Expected A\[rows, cols\], with : for all rows or columns; got A\[\(\[0\],\)\]"),
    (lambda: OnlyProducts(psd(9, 9), SPACE)["a"], r"got A\['a'\]"),  # type: ignore[index]
    (lambda: list(OnlyProducts(psd(9, 9), SPACE)), r"got A\[0\]"),  # type: ignore[call-overload]
    (lambda: SubmatrixLinearOperator(Dense(normal(3, 2)), [0], [2]), "column numbers between 0 and 1"),
    (lambda: submatrix(Dense(normal(3, 2)), [3], [0]), "row numbers between 0 and 2"),
    (
        lambda: ProjectedLinearOperator(Dense(normal(3, 2)), [0]),
        "Only a square matrix can be projected from both sides",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
