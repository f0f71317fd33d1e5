"""Work on several threads: the same results, in order, and errors that say what they are about."""

from __future__ import annotations

import threading

import pytest
import torch

from curvlinops_plus.errors import NumericsError
from curvlinops_plus.linalg import BlockDiagonal, Dense, Kronecker, Layout, Space, Structure, eigh
from curvlinops_plus.linalg.gram_sum import _openblas, gram
from curvlinops_plus.linalg.side_by_side import side_by_side

from .cases import normal, psd

pytestmark = pytest.mark.usefixtures("two_threads")


def much(item: object) -> float:
    return 1e8


def test_results_do_not_depend_on_what_is_beside_them() -> None:
    rows = [normal(m, 300, seed=m) for m in (40, 90, 500, 600)]
    matrices = [gram(x) for x in rows]
    torch.set_num_threads(1)
    alone = [eigh(M, semidefinite=True) for M in matrices]
    torch.set_num_threads(2)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        found = side_by_side(lambda k: eigh(matrices[k], semidefinite=True), order, much)
        for k, (values, Q) in zip(order, found, strict=True):
            assert torch.equal(values, alone[k][0])
            assert torch.equal(Q, alone[k][1])
    if (library := _openblas()) is not None:
        before = library.scipy_openblas_get_num_threads()
        side_by_side(gram, 3 * rows, much)
        assert library.scipy_openblas_get_num_threads() == before


def blocks(sizes: list[tuple[int, int]]) -> BlockDiagonal:
    space = Space.from_shapes({f"w{k}": size for k, size in enumerate(sizes)})
    layouts = {f"b{k}": Layout({f"w{k}": "o i -> o i"}, {f"w{k}": size}) for k, size in enumerate(sizes)}
    made = {f"b{k}": Kronecker(psd(o, o), psd(i, i)) for k, (o, i) in enumerate(sizes)}
    return BlockDiagonal(made, layouts, space)


def test_blocks_are_decomposed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    K, seen, plain = blocks([(2, 101), (3, 102), (120, 2)]), set(), torch.linalg.eigh
    v = normal(K.shape[0])
    torch.set_num_threads(1)
    expected = K.inverse(0.1) @ v, K.shift(0.1).logdet, K.power(-0.5, 0.1) @ v
    torch.set_num_threads(2)
    monkeypatch.setattr(torch.linalg, "eigh", lambda M: seen.add(threading.get_ident()) or plain(M))
    for form, value in zip(
        (lambda K: K.inverse(0.1) @ v, lambda K: K.shift(0.1).logdet, lambda K: K.power(-0.5, 0.1) @ v), expected
    ):
        torch.testing.assert_close(form(blocks([(2, 101), (3, 102), (120, 2)])), value)  # products have two threads now
        assert seen
        assert threading.get_ident() not in seen
        seen.clear()
    damping = torch.tensor(0.1, dtype=v.dtype, requires_grad=True)
    (grad,) = torch.autograd.grad((blocks([(2, 101), (3, 102), (120, 2)]).inverse(damping) @ v).sum(), damping)
    assert grad != 0


def test_a_failing_block_is_named() -> None:
    K = blocks([(2, 101), (3, 102), (120, 2)])
    block = K.blocks["b1"]
    assert isinstance(block, Kronecker)
    factor = block.A
    assert isinstance(factor, Dense)
    assert factor.structure == Structure.PSD
    factor.matrix[0, 0] = torch.nan
    with pytest.raises(NumericsError, match=r'block "b1".*factor A.*1 entries that are NaN'):
        K.inverse(0.1)
