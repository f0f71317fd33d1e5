"""Each mode of vectors in the exact operators, against the same mode in `curvature`; their products
and quadratic forms as functions of vectors; the composing door and the classic one.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    ActivationHessian,
    ActivationHessianLinearOperator,
    CGInverseLinearOperator,
    CurvaturePropagation,
    CurvatureWarning,
    EFLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    FisherMCLinearOperator,
    FullBlock,
    GGNFactor,
    GGNFactorLinearOperator,
    GGNLinearOperator,
    Hessian,
    HessianLinearOperator,
    Jacobian,
    JacobianLinearOperator,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.exact import passes
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.risk import Draws, Vectors
from test.cases import FEW, Problem, close, problem, unchanged
from test.helpers import F64, normal, seeded
from test.nets import tanh_net


class Mixed(Vectors):
    """A mode of a user's own: a random vector, and the gradient."""

    seed = 5

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return 2

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        yield draws.uniform(*F.shape).to(F)
        yield likelihood.grad(F, Y)


MODES: dict[str, Any] = {
    "exact": Exact(),
    "signs": Exact(signs=True, seed=3),
    "curvature propagation": CurvaturePropagation(3, seed=1),
    "mc": MonteCarlo(2, seed=1),
    "empirical": Empirical(),
    "empirical per term": Empirical(per_term=True),
    "own": Mixed(),
}
each_mode = pytest.mark.parametrize("mode", MODES)


def full_blocks(risk: EmpiricalRisk, vectors: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Exact\(\) sends", CurvatureWarning)
        return curvature(risk, FullBlock, vectors=vectors).to_dense()


def check_factor(risk: EmpiricalRisk, vectors: Any, G: GGN, dense: Tensor) -> None:
    """`B Bᵀ` is the matrix, and products are those with the dense ones."""
    V = normal(len(dense), 3)
    close(G @ V, dense @ V)
    close(G @ V[:, 0], dense @ V[:, 0])
    B = GGNFactor(risk, vectors, check_deterministic=True)
    dense_B, U = B.to_dense(), normal(B.shape[1], 2)
    close(dense_B @ dense_B.T, dense)
    close(B @ U, dense_B @ U)
    close(B.T @ V, dense_B.T @ V)


@pytest.mark.one_in(2)
@each_mode
@pytest.mark.parametrize("name", FEW)
def test_every_mode_is_the_same_matrix_everywhere(name: str, mode: str) -> None:
    p, vectors = problem(name), MODES[mode]
    with unchanged(p.model, p.loss, p.data):
        G = GGN(p.risk(), vectors, check_deterministic=True)
        dense = G.to_dense()
        check_factor(p.risk(), vectors, G, dense)
        for J in (normal(len(dense)), normal(3, len(dense)), normal(2, 4, len(dense))):
            close(G.quadratic_form(J), J @ dense @ J.mT if J.ndim > 1 else J @ dense @ J)
    terms = p.exact.batches[0].terms.shape[1]
    if (
        mode != "mc" or terms == 1
    ):  # products of different terms of an example are left out: they are 0 in the mean
        close(p.exact.only_blocks(dense, False), full_blocks(p.risk(), vectors))


class TwoOutputs(nn.Module):
    """One layer whose output two losses read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        f = self.layer(x)
        return {"a": f[:, :2].sin(), "b": f[:, 2:]}


def two_losses(second: nn.Module | None = None) -> EmpiricalRisk:
    torch.manual_seed(0)
    data = []
    for n, ignored in ((3, 1), (4, 0)):  # shares differ from batch to batch
        a = torch.randint(2, (n,))
        a[:ignored] = -100
        data.append((torch.randn(n, 3, dtype=F64), {"a": a, "b": torch.randn(n, 2, dtype=F64)}))
    losses = {"a": nn.CrossEntropyLoss(), "b": (second or nn.MSELoss(), 0.3)}
    return EmpiricalRisk(TwoOutputs().double(), losses, data)


@each_mode
def test_every_mode_with_several_losses(mode: str) -> None:
    vectors = MODES[mode]
    G = GGN(two_losses(), vectors, check_deterministic=True)
    dense = G.to_dense()
    check_factor(two_losses(), vectors, G, dense)
    if mode != "mc":
        close(dense, full_blocks(two_losses(), vectors))
    cross = (
        dense[:6, 6:12].abs().max() / dense.abs().max()
    )  # weights of one output with those of the other
    assert (cross > 1e-3) == (mode in ("curvature propagation", "empirical")), f"{float(cross):.1e}"


def test_columns_of_several_losses() -> None:
    risk = two_losses()
    B = GGNFactor(risk)
    assert {key: list(shape) for key, shape in B.in_space.shapes.items()} == {
        "a": [7, 1, 1],
        "b": [7, 1, 2],
    }
    u = {"a": normal(7, 1, 1), "b": torch.zeros(7, 1, 2, dtype=F64)}
    data = [(X, y["a"]) for X, y in risk.data]
    own = GGNFactor(EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), data, output=itemgetter("a")))
    close(torch.cat([t.flatten() for t in (B @ u).values()]), own @ u["a"].flatten())
    assert list(GGNFactor(risk, "empirical").in_shapes) == [torch.Size((7, 1, 1))]


class OfUser(nn.Module):
    """Half of the squared error, without a likelihood."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).square().mean() / 2


def test_a_loss_without_likelihood_beside_one_that_has_one() -> None:
    """Its matrix is that of the same loss with a likelihood, at half of its weight."""
    G, half = GGN(two_losses(OfUser())), two_losses()
    half = EmpiricalRisk(
        half.model, {"a": nn.CrossEntropyLoss(), "b": (nn.MSELoss(), 0.15)}, half.data
    )
    expected, V = GGN(half).to_dense(), normal(16, 2)
    close(G.to_dense(), expected)
    close(G @ V, expected @ V)
    close(G.quadratic_form(V.T), V.T @ expected @ V)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.HuberLoss()], ids=["likelihood", "none"]
)
def test_columns_of_large_results(loss: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are backpropagated one by one, into the sum over batches, also where several pieces go
    forward.
    """
    model = tanh_net(4, 5, 3).double()
    targets = (
        (lambda n: torch.arange(n) % 3)
        if isinstance(loss, nn.CrossEntropyLoss)
        else (lambda n: normal(n, 3))
    )
    risk = EmpiricalRisk(model, loss, [(normal(n, 4), targets(n)) for n in (6, 4, 5)])
    V = normal(risk.space.dim, 7)
    operators = [GGN(risk), Hessian(risk), Jacobian(risk), Jacobian(risk).T]
    vectors = [V, V, V, Jacobian(risk) @ V]
    expected = [
        torch.stack([A @ v for v in X.T], 1) for A, X in zip(operators, vectors, strict=True)
    ]
    monkeypatch.setattr(passes, "_CPU_NUMBERS", 1)
    monkeypatch.setattr(passes, "_COLUMNS_AT_ONCE", 3)
    operators = [GGN(risk), Hessian(risk), Jacobian(risk), Jacobian(risk).T]
    for A, X, product in zip(operators, vectors, expected, strict=True):
        close(A @ X, product)
    close(GGN(risk, chunk_size=3) @ V, expected[0])


class Nothing(Mixed):
    """A mode whose vectors happen to be none."""

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return 0

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        return iter(())


def test_columns_of_a_random_model_are_those_of_one_draw() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout()).double()
    G = GGN(
        EmpiricalRisk(model, nn.MSELoss(), [(normal(6, 3), normal(6, 4))]),
        check_deterministic=False,
    )
    torch.manual_seed(0)
    M, v = G.to_dense(), normal(16)
    torch.manual_seed(0)
    close(M @ v, G @ v)


def test_vectors_that_are_none_make_zero() -> None:
    G = GGN(problem("mlp").risk(), Nothing())
    assert not G.to_dense().any()
    assert not (G @ normal(G.shape[1])).any()


def test_random_vectors_follow_the_order_of_the_data() -> None:
    p = problem("mlp")
    X, y = (torch.cat(parts) for parts in zip(*p.data, strict=True))
    shuffled = DataLoader(TensorDataset(X, y), 2, shuffle=True, generator=seeded())
    for vectors in (MonteCarlo(), CurvaturePropagation()):
        with pytest.raises(RuntimeError, match="another order each time"):
            GGN(p.risk(shuffled), vectors, check_deterministic=True)
    GGN(p.risk(shuffled), check_deterministic=True)
    GGN(p.risk(shuffled), Empirical(), check_deterministic=True)


# ---------------------------------------------------------------- products as functions of a vector
EXACT: dict[str, Any] = {
    "GGN": GGN,
    "Monte Carlo": lambda risk: GGN(risk, MonteCarlo(2)),
    "Hessian": Hessian,
    "product": lambda risk: (factor := GGNFactor(risk)) @ factor.T,
    "Jacobian": lambda risk: (J := Jacobian(risk)).T @ J,
    "sum": lambda risk: GGN(risk) + 3 * curvature(risk, KFAC),
    "shifted": lambda risk: Hessian(risk).shift(0.1),
    "part": lambda risk: Hessian(risk)["0.weight", "0.weight"],
    "general": lambda risk: Hessian(risk) @ GGN(risk),
    "inverse": lambda risk: CGInverseLinearOperator(GGN(risk).shift(0.1), tolerance=1e-13),
    "EKFAC": lambda risk: curvature(risk, EKFAC).inverse(1e-2),
}


@pytest.mark.parametrize("name", EXACT)
def test_derivatives_of_quadratic_forms(name: str) -> None:
    """A quadratic form is a penalty: its gradient is `(A + Aᵀ) v`."""
    risk = problem("mlp").risk()
    A = EXACT[name](risk)
    M, v, close = A.to_dense(), normal(A.shape[1]).requires_grad_(), torch.testing.assert_close
    S, tolerance = M + M.T, {"rtol": 1e-9, "atol": 1e-10}
    for x in (v, A.in_space.unflatten(v), list(A.in_space.unflatten(v).values())):
        value = A.quadratic_form(x)
        close(value.detach(), (v @ M @ v).detach(), **tolerance)
        (g,) = torch.autograd.grad(value, v, create_graph=True)
        close(g.detach(), (S @ v).detach(), **tolerance)
    (second,) = torch.autograd.grad(g @ torch.ones_like(g), v)
    close(second, S.sum(0), **tolerance)
    J, W = normal(2, A.shape[1]).requires_grad_(), normal(2, 2, seed=1)
    (g,) = torch.autograd.grad((A.quadratic_form(J) * W).sum(), J)
    close(g, (W @ J @ M.T + W.T @ J @ M).detach(), **tolerance)
    with torch.no_grad():
        assert not A.quadratic_form(J).requires_grad


# ---------------------------------------------------------------------------------------- two doors
def doors(p: Problem) -> list[tuple[Any, type, Any]]:
    """A classic operator, its class in the composing door, and one of a risk."""
    given = (p.model, p.loss, p.params, p.data)
    return [
        (GGNLinearOperator(*given), GGN, GGN(p.risk())),
        (EFLinearOperator(*given), GGN, GGN(p.risk(), Empirical(per_term=True))),
        (
            FisherMCLinearOperator(*given, seed=3, mc_samples=2),
            GGN,
            GGN(p.risk(), MonteCarlo(2, 3)),
        ),
        (HessianLinearOperator(*given), Hessian, Hessian(p.risk())),
        (
            HessianLinearOperator(*given, block_sizes=[2, 6]),
            Hessian,
            Hessian(p.risk(), block_sizes=[2, 6]),
        ),
        (JacobianLinearOperator(*given[:1], *given[2:]), Jacobian, Jacobian(p.risk())),
        (GGNFactorLinearOperator(*given), GGNFactor, GGNFactor(p.risk())),
        (
            ActivationHessianLinearOperator(*given[:2], ("first", "output", 0), p.data),
            ActivationHessian,
            ActivationHessian(p.risk(), ("first", "output", 0)),
        ),
    ]


def test_the_classic_operators_are_those_of_a_risk_and_can_be_pickled() -> None:
    for classic, kind, composing in doors(problem("attention")):
        assert isinstance(classic, kind)
        assert torch.equal(classic.to_dense(), composing.to_dense())
        assert torch.equal(pickle.loads(pickle.dumps(composing)).to_dense(), composing.to_dense())


@pytest.mark.parametrize("kind", [GGN, Hessian, Jacobian, GGNFactor])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_the_caller(mode: Any, kind: Any) -> None:
    risk = problem("mlp").risk()
    A, fast = kind(risk), torch.backends.mha.get_fastpath_enabled()
    dense, v, u = A.to_dense(), normal(A.shape[1]), normal(A.shape[0])
    with mode():
        close(kind(risk) @ v, dense @ v)
        close(A.T @ u, dense.T @ u)
        close(kind(risk).to_dense(), dense)
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("index", range(7))
def test_autocast_around_products(index: int) -> None:
    A = doors(problem("attention").to(torch.device("cpu"), torch.float32))[index][0]
    dense = A.to_dense()
    B, square = 2 * A + A, dense.T @ dense
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(A.to_dense(), dense)
        close(B.to_dense(), 3 * dense, 1e-6)
        close((A.T @ A).to_dense(), square, 1e-5)
        close(A @ torch.eye(A.shape[1]), dense, 1e-5)
    assert (A @ torch.zeros(A.shape[1], 0)).shape == (A.shape[0], 0)


@pytest.mark.parametrize("kind", [GGN, Jacobian])
def test_columns_share_a_forward_pass(kind: Any) -> None:
    p, calls = problem("mlp"), []
    A = kind(p.risk())
    V = normal(A.shape[1], 8)
    expected = torch.stack([A @ v for v in V.T], 1)
    _ = A @ V[:, :2]  # the first product of several columns is compared with plain backward passes
    handle = p.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        close(A @ V, expected)
        assert len(calls) == 2 * len(p.data)  # outputs, and tangents of all columns
    finally:
        handle.remove()
