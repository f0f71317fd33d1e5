"""Damped inverses: the conventions of curvlinops 3.0.1 and of the composing door, against dense
algebra.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFACLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    RelativeDamping,
    SingularMatrixError,
)
from test.cases import APPROXIMATIONS, close, problem

separate_or_joint = pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
NETS = ["mlp", "strided cnn", "weights only", "biases only"]


def operator(kind: Any, name: str, separate: bool) -> Any:
    p = problem(name)
    return kind(
        p.model, p.loss, p.params, p.data, fisher_type="type-2", separate_weight_and_bias=separate
    )


def inverse_by_factors(name: str, K: Any, separate: bool, damping: Any) -> Tensor:
    """Dense inverse from factors: `damping(A, G)` is the pair added to them; a bias by itself gets
    the second.
    """
    p = problem(name)
    result = torch.zeros(K.shape, dtype=torch.float64)
    for keys in p.exact.blocks(separate):
        layer = p.exact.affine_layer(keys[0])
        assert layer is not None
        G = K.gradient_covariances[layer]
        weight = any(p.exact.names[key].endswith("weight") for key in keys)
        A = K.input_covariances.get(layer)
        lambda_A, lambda_G = damping(A, G)
        G_inv = torch.linalg.inv(G + lambda_G * torch.eye(len(G), dtype=G.dtype))
        A_inv = (
            torch.linalg.inv(A + lambda_A * torch.eye(len(A), dtype=G.dtype))
            if weight
            else torch.ones(1, 1, dtype=torch.float64)
        )
        r, c = p.exact.matrix_places(keys)
        at = p.exact.places(keys)
        result[at[:, None], at] = G_inv[r[:, None], r] * A_inv[c[:, None], c]
    return result


def heuristic(A: Tensor | None, G: Tensor, damping: float, smallest: float) -> tuple[float, float]:
    mean_A = 1.0 if A is None else float(A.diagonal().mean())
    mean_G = float(G.diagonal().mean())
    if not mean_G > 0 or not mean_A > 0:
        return damping, damping
    pi = sqrt(mean_A / mean_G)
    return max(pi * sqrt(damping), smallest), max(sqrt(damping) / pi, smallest)


@separate_or_joint
@pytest.mark.parametrize("name", NETS)
def test_a_number_or_a_pair_is_added_to_the_factors(name: str, separate: bool) -> None:
    K = operator(KFACLinearOperator, name, separate)
    for damping, pair in ((0.3, (0.3, 0.3)), ((0.2, 0.5), (0.2, 0.5))):
        expected = inverse_by_factors(name, K, separate, lambda A, G, pair=pair: pair)
        inverse = KFACInverseLinearOperator(K, damping=damping)
        v = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
        for _ in range(2):  # the damping is not added twice
            close(inverse @ v, expected @ v)
        close(inverse.to_dense(), expected)
        close(inverse.trace, expected.trace())
        close(inverse.logdet, torch.linalg.slogdet(expected).logabsdet)
        close(inverse.det.log(), torch.linalg.slogdet(expected).logabsdet)
        close(inverse.frobenius_norm, expected.norm())


@separate_or_joint
@pytest.mark.parametrize(
    ("name", "smallest"),
    [("mlp", 0.4), ("strided cnn", 1e-8), ("weights only", 1e-8), ("mlp", 0.0)],
)
def test_heuristic_damping(name: str, separate: bool, smallest: float) -> None:
    K = operator(KFACLinearOperator, name, separate)
    if smallest == 0:  # a mean eigenvalue of zero cannot be divided by: the plain number is used
        K.gradient_covariances["0"].zero_()
    expected = inverse_by_factors(name, K, separate, lambda A, G: heuristic(A, G, 0.09, smallest))
    inverse = KFACInverseLinearOperator(
        K, damping=0.09, use_heuristic_damping=True, min_damping=smallest
    )
    close(inverse.to_dense(), expected)
    close(
        K.inverse(damping=0.09, use_heuristic_damping=True, min_damping=smallest).to_dense(),
        expected,
    )


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("kind", ["groups", "attention"])
def test_heuristic_damping_of_several_matrices_with_a_bias_apart(kind: str) -> None:
    """Groups of channels, or queries, keys and values: each has its own `π`."""
    torch.manual_seed(0)
    conv = nn.Sequential(
        nn.Conv1d(5, 6, 2, groups=1), nn.Tanh(), nn.Conv1d(6, 4, 1, groups=2), nn.Flatten()
    )
    model = (conv if kind == "groups" else Attending()).double()
    data = [(torch.randn(5, 5, 4, dtype=torch.float64), torch.arange(5) % 3)]
    K = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        data,
        fisher_type="type-2",
        separate_weight_and_bias=True,
    )
    weight, bias = (
        ("2.weight", "2.bias")
        if kind == "groups"
        else ("layer.in_proj_weight", "layer.in_proj_bias")
    )
    blocks, inverse = K.blocks, K.inverse(0.09, use_heuristic_damping=True).blocks
    A, G, of_bias = blocks[weight].A.matrix, blocks[weight].G.matrix, blocks[bias].to_dense()
    pieces, biases, d = [], [], G.shape[-1]
    for k in range(len(G)):
        to_A, to_G = heuristic(A[k], G[k], 0.09, 1e-8)
        A_inv = torch.linalg.inv(A[k] + to_A * torch.eye(len(A[k]), dtype=A.dtype))
        pieces.append(
            torch.kron(torch.linalg.inv(G[k] + to_G * torch.eye(d, dtype=A.dtype)), A_inv)
        )
        at = slice(k * d, (k + 1) * d)
        biases.append(torch.linalg.inv(of_bias[at, at] + to_G * torch.eye(d, dtype=A.dtype)))
    close(inverse[weight].to_dense(), torch.block_diag(*pieces))
    close(inverse[bias].to_dense(), torch.block_diag(*biases))


@pytest.mark.parametrize("name", ["strided cnn", "tied", "generic layers"])
@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC", "FullBlock", "DiagonalBlock"])
def test_a_damping_for_every_block(name: str, approximation: str) -> None:
    p = problem(name)
    K = p.curvature(APPROXIMATIONS[approximation])
    dampings = torch.linspace(0.1, 1.0, len(K.blocks), dtype=torch.float64)
    dense, relative = K.to_dense(), K.to_dense()
    names = {
        tuple(sorted(group.keys)): group.name for entry in K.plan for group in entry.layer.groups
    }
    for keys in p.exact.blocks(False):
        block = names[tuple(sorted(keys))]
        at = p.exact.places(keys)
        dense[at, at] += dampings[list(K.blocks).index(block)]
        relative[at, at] += 0.1 * K.to_dense()[at, at].mean()
    close(
        K.inverse(damping=dampings).to_dense(), torch.linalg.inv(dense), what="one number per block"
    )
    close(
        K.inverse(damping=RelativeDamping(0.1)).to_dense(),
        torch.linalg.inv(relative),
        what="relative",
        rtol=1e-7,
    )


def test_what_is_refused() -> None:
    K = operator(KFACLinearOperator, "mlp", True)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (K, {"use_heuristic_damping": True, "use_exact_damping": True}, "heuristic"),
        (K, {"damping": (0.1, 0.1), "use_exact_damping": True}, "exact damping"),
        (
            K,
            {"damping": (0.1, 0.1), "use_heuristic_damping": True},
            "require a single damping value",
        ),
        (
            operator(EKFACLinearOperator, "mlp", True),
            {"damping": 0.1},
            "Only exact damping is supported for EKFAC",
        ),
        (K.operator, {}, "must be an instance of `KFACLinearOperator`"),
    ]
    for A, options, words in refused:
        with pytest.raises(ValueError, match=words):
            KFACInverseLinearOperator(A, **options)


def test_heuristic_damping_takes_what_exact_damping_takes() -> None:
    """A rule, one number per block, or a mapping: each layer's own number is split over its
    factors.
    """
    K = operator(KFACLinearOperator, "mlp", False)
    names = list(K.blocks)
    means = {name: float(block.trace) / block.shape[0] for name, block in K.blocks.items()}
    ruled = K.inverse(RelativeDamping(0.1), use_heuristic_damping=True).to_dense()
    mapped = K.inverse(
        {name: 0.1 * means[name] for name in names}, use_heuristic_damping=True
    ).to_dense()
    listed = torch.tensor([0.1 * means[name] for name in names], dtype=torch.float64)
    close(mapped, ruled)
    close(K.inverse(listed, use_heuristic_damping=True).to_dense(), ruled)
    expected = inverse_by_factors(
        "mlp",
        K,
        False,
        lambda A, G: heuristic(A, G, 0.1 * float(A.trace() * G.trace()) / (len(A) * len(G)), 1e-8),
    )
    close(ruled, expected)


def test_an_inverse_is_computed_at_first_use() -> None:
    """As in curvlinops: one without a damping can be made to load a state into it."""
    K = operator(KFACLinearOperator, "mlp", True)
    K.gradient_covariances["0"].zero_()
    inverse, damped = KFACInverseLinearOperator(K), KFACInverseLinearOperator(K, 0.1)
    v = torch.ones(K.shape[0], dtype=torch.float64)
    with pytest.raises(SingularMatrixError, match=r'block "0.*singular'):
        _ = inverse @ v
    inverse.load_state_dict(damped.state_dict())
    close(inverse @ v, damped @ v)
    close(KFACInverseLinearOperator(K, 0.1, use_exact_damping=True) @ v, K.inverse(0.1) @ v)
