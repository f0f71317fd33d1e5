"""Dampings: numbers, pairs, rules, one per block."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from curvlinops_plus.linalg import (
    Dense,
    Diagonal,
    HeuristicDamping,
    IdentityLinearOperator,
    Kronecker,
    RelativeDamping,
    Structure,
    heuristic_damping,
)
from test.linalg.cases import F64, batched_kron, block_diagonal, eye_like, normal, psd
from test.linalg.test_laws import close

PSD = Structure.PSD


def test_pair_belongs_to_the_factors() -> None:
    """Also of a multiple: `c G ⊗ A` is the product of `c G` and `A`."""
    G, A = psd(2, 2), psd(3, 3, seed=1)
    inverse = Kronecker(G, A).inverse((0.1, torch.tensor(0.2, dtype=F64)))
    expected = torch.kron(
        torch.linalg.inv(G + 0.2 * eye_like(G)), torch.linalg.inv(A + 0.1 * eye_like(A))
    )
    assert isinstance(inverse, Kronecker)
    close(inverse.to_dense(), expected)
    close(inverse.logdet, torch.logdet(expected))
    rule = Kronecker(G, A).inverse((RelativeDamping(0.5), 0.0))
    close(rule.to_dense(), torch.linalg.inv(torch.kron(G, A + 0.5 * A.trace() / 3 * eye_like(A))))
    for damping in ((0.1, 0.3), HeuristicDamping(0.1)):
        expected = Kronecker(2.5 * G, A).inverse(damping).to_dense()
        close((2.5 * Kronecker(G, A)).inverse(damping).to_dense(), expected)


@pytest.mark.parametrize("kind", [Dense, Diagonal, Kronecker])
def test_a_batch_takes_one_damping_for_each_matrix(kind: Any) -> None:
    M = torch.stack([psd(3, 3, seed=k) for k in range(2)])
    A = {
        Dense: Dense(M, PSD),
        Diagonal: Diagonal(M.diagonal(dim1=1, dim2=2)),
        Kronecker: Kronecker(Dense(torch.eye(2, dtype=F64), PSD), M),
    }[kind]
    dampings = torch.tensor([0.1, 2.0], dtype=F64)
    expected = torch.linalg.inv(
        A.to_dense() + torch.diag(dampings.repeat_interleave(A.shape[0] // 2))
    )
    close(A.inverse(dampings).to_dense(), expected)
    close(A.inverse(dampings).logdet, torch.logdet(expected))
    with pytest.raises(ValueError, match="to be at least 0, got -1"):
        A.inverse(torch.tensor([0.1, -1.0]))
    with pytest.raises(ValueError, match="to be at least 0, got nan"):
        A.inverse(torch.tensor([0.1, torch.nan]))


def test_heuristic_split() -> None:
    """Martens and Grosse, section 6.3, by hand; of a dead factor there is nothing to split."""
    G, A = psd(2, 2), 7 * psd(3, 3, seed=1)
    pi = sqrt((A.trace() / 3) / (G.trace() / 2))
    split = heuristic_damping(A, G, 1e-2)
    close(torch.stack(split), torch.tensor([pi * 0.1, 0.1 / pi], dtype=F64))
    K = Kronecker(G, A)
    close(K.inverse(HeuristicDamping(1e-2)).to_dense(), K.inverse(split).to_dense())
    differentiable = torch.tensor(1e-2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d: K.inverse(HeuristicDamping(d)).trace, differentiable)
    floor = heuristic_damping(torch.eye(2), 1e-12 * torch.eye(2), 1e-12, min_damping=1e-4)
    assert [d.item() for d in floor] == pytest.approx([1.0, 1e-4])
    for dead in ((0 * A, G), (A, 0 * G)):
        assert [d.item() for d in heuristic_damping(*dead, 0.3)] == [0.3, 0.3]


def test_heuristic_split_of_each_group() -> None:
    G, A = psd(2, 2, 2), psd(2, 3, 3, seed=1)
    G[1] *= 0
    split = heuristic_damping(A, G, 0.04)
    for k in range(2):
        close(torch.stack(split)[:, k], torch.stack(heuristic_damping(A[k], G[k], 0.04)))
    inverse = Kronecker(G, A).inverse(HeuristicDamping(0.04))
    one = [
        torch.linalg.inv(F + d[:, None, None] * torch.eye(F.shape[-1]))
        for F, d in zip((A, G), split, strict=True)
    ]
    close(inverse.to_dense(), batched_kron(one[1], one[0]))
    for other in (psd(2, 2), IdentityLinearOperator([(2,)], dtype=F64)):
        assert torch.isfinite(Kronecker(other, A).inverse(HeuristicDamping(0.04)).logdet)


@pytest.mark.parametrize("number", [0.1, np.float64(0.1), torch.tensor(0.1), RelativeDamping(0.1)])
def test_kinds_of_numbers(number: Any) -> None:
    """A matrix without factors takes what would be split whole."""
    A = Dense(psd(3, 3), PSD)
    size = 0.1 * A.trace / 3 if isinstance(number, RelativeDamping) else 0.1
    D = A.matrix + size * eye_like(A.matrix)
    torch.testing.assert_close(A.inverse(number).to_dense(), torch.linalg.inv(D))
    torch.testing.assert_close(A.inverse(HeuristicDamping(number)).to_dense(), torch.linalg.inv(D))
    torch.testing.assert_close(A.power(2, number).to_dense(), D @ D)
    torch.testing.assert_close(A.shift(number).to_dense(), D)


BLOCKS = block_diagonal()[0].blocks.values()


MEANS = [float(block.trace / block.shape[0]) for block in BLOCKS]


PER_BLOCK: list[tuple[Any, list[float]]] = [
    (0.3, [0.3] * 4),
    (torch.tensor([0.1, 0.2, 0.3, 0.4]), [0.1, 0.2, 0.3, 0.4]),
    ({"fc": 0.3, "conv": 0.1, "scale": 0.2, "groups": torch.tensor(0.4)}, [0.1, 0.2, 0.3, 0.4]),
    (RelativeDamping(0.1), [0.1 * mean for mean in MEANS]),
    (lambda block: 1 / block.shape[0], [1 / block.shape[0] for block in BLOCKS]),
]


@pytest.mark.parametrize(("damping", "numbers"), PER_BLOCK)
def test_one_damping_per_block(damping: Any, numbers: list[float]) -> None:
    K, _ = block_diagonal()
    for result, function in (
        (K.inverse(damping), lambda block, d: block.inverse(d)),
        (K.power(-0.5, damping), lambda block, d: block.power(-0.5, d)),
        (K.shift(damping), lambda block, d: block.shift(d)),
    ):
        for (name, block), d in zip(K.blocks.items(), numbers, strict=True):
            torch.testing.assert_close(
                result.blocks[name].to_dense(), function(block, d).to_dense()
            )


def test_derivatives_in_dampings() -> None:
    """One prior precision per block; a damping of zero; through an inverse."""
    K, _ = block_diagonal()
    delta, x = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64, requires_grad=True), normal(K.shape[0])
    for function in (
        lambda d: K.shift(d).logdet,
        lambda d: K.shift(d).trace,
        lambda d: x @ (K.inverse(d) @ x),
    ):
        assert torch.autograd.gradcheck(function, delta)
    zero, A = torch.tensor(0.0, dtype=F64, requires_grad=True), Kronecker(psd(2, 2), psd(3, 3))
    close(torch.autograd.grad(A.inverse(zero).trace, zero)[0], -A.power(-2).trace)
