"""Layers in groups within `max_bytes`, blocks that are kept elsewhere, and what `memory()` says
before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from curvlinops_plus import (
    EKFAC,
    KFAC,
    BlockwiseLinearOperator,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    curvature,
)
from curvlinops_plus.linalg import LinearOperator
from test.cases import APPROXIMATIONS, VECTORS, close, problem

quiet = pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")


def limit(K: BlockwiseLinearOperator, part: int = 5) -> int:
    """A part of what all layers need, but enough for each."""
    needs = K.memory()
    return max(needs.computing // part, *(layer.computing for layer in needs.layers.values()))


@quiet
@pytest.mark.parametrize(
    ("name", "kind", "vectors"),
    [
        ("mlp", "EKFAC", "mc"),
        ("strided cnn", "KFAC", "exact"),
        ("attention", "EKFAC, large factors diagonal", "exact"),
        ("attention", "TNT", "mc"),
        ("tied", "EKFAC", "exact"),
        ("language model", "NearestKronecker by sweeps", "mc"),
    ],
)
def test_groups_have_the_numbers_of_one_sweep(name: str, kind: str, vectors: str) -> None:
    p, options = problem(name), {"default": APPROXIMATIONS[kind], "vectors": VECTORS[vectors]}
    risk = p.risk()
    K = curvature(risk, APPROXIMATIONS[kind], **options)
    groups = curvature(
        risk, APPROXIMATIONS[kind], **options, max_bytes=limit(K), offload="cpu", max_kept_bytes=0
    )
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    assert torch.equal(groups @ v, K @ v)
    assert torch.equal(groups.trace, K.trace)


@quiet
def test_groups_have_the_size_that_was_given(capsys: Any) -> None:
    p = problem("deep linear")
    needs = [layer.computing for layer in p.curvature(EKFAC).memory().layers.values()]
    assert len(needs) == 3
    for size, groups in ((max(needs), 3), (max(needs[0] + needs[1], needs[2]), 2), (sum(needs), 1)):
        curvature(p.risk(progressbar=True), EKFAC, max_bytes=size, max_kept_bytes=0)
        assert (f"group 2 of {groups}" in capsys.readouterr().err) == (groups > 1)
    once = EmpiricalRisk(p.model, p.loss, iter(p.data), p.params)
    with pytest.raises(ValueError, match="another sweep over it is needed"):
        curvature(once, KFAC, max_bytes=limit(p.curvature(KFAC)))


# ----------------------------------------------------------------------------------------- memory()


def tensors_in(K: BlockwiseLinearOperator) -> int:
    """Bytes of what blocks are made of; what they share counts once."""
    seen: dict[int, int] = {}

    def look(node: Any) -> None:
        if isinstance(node, Tensor):
            seen[node.data_ptr()] = node.numel() * node.element_size()
        elif isinstance(node, LinearOperator):
            for name, part in vars(node).items():
                look(part if name != "_memory" else None)

    for block in K.operator.blocks.values():
        look(block)
    return sum(seen.values())


@quiet
@pytest.mark.parametrize("kind", [KFAC, EKFAC, FullBlock, DiagonalBlock], ids=repr)
@pytest.mark.parametrize(
    "name", ["strided cnn", "grouped cnn", "tied", "language model", "generic layers"]
)
def test_memory_is_what_blocks_take(name: str, kind: Any) -> None:
    p = problem(name)
    before = curvature(p.risk(), kind, compute=False).memory()
    K = p.curvature(kind)
    assert before == K.memory()
    assert before.kept == tensors_in(K)
    assert before.kept <= before.computing


# ------------------------------------------------------------------------------------------ offload


@pytest.mark.parametrize(
    ("kind", "separate"),
    [("KFAC", True), ("EKFAC", False), ("FullBlock", False), ("ScaledIdentity", False)],
)
def test_blocks_elsewhere_have_all_closed_forms(kind: str, separate: bool) -> None:
    p = problem("mlp")
    K = p.curvature(APPROXIMATIONS[kind], separate_weight_and_bias=separate)
    away = K.offload("cpu")
    away.operator._keeps_elsewhere = (
        True  # though it is the same device: each block is fetched, and its results go back
    )
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    forms: Any = (
        lambda A: A.trace, lambda A: A.frobenius_norm, lambda A: A.to_dense(), lambda A: A.diagonal(),
        lambda A: A.eigenvalues(), lambda A: A.shift(0.1).logdet, lambda A: (2 * A).inverse(0.1) @ v,
        lambda A: A.power(0.5, 0.1) @ v, lambda A: A.inverse((0.1, 0.2)) @ v, lambda A: (A + K) @ v,
        lambda A: A.inverse(0.1, use_heuristic_damping=True) @ v, lambda A: (A + A).inverse(0.1) @ v,
        lambda A: A.operator[:5, :5].to_dense(), lambda A: A @ v,
    )  # fmt: skip
    for form in forms:
        close(form(away), form(K))
    close(away.to(torch.float32) @ v.float(), (K @ v).float(), 1e-5)
    other = p.curvature(APPROXIMATIONS[kind], separate_weight_and_bias=separate)
    other.load_state_dict(away.state_dict())
    assert torch.equal(other @ v, K @ v)
