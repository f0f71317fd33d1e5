"""Each mode in each exact operator, against the same mode in `curvature`; the composing door and the classic one."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import FEW, close, problem, unchanged
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    GGN,
    ActivationHessian,
    ActivationHessianLinearOperator,
    CurvaturePropagation,
    CurvatureWarning,
    EFLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    FisherMCLinearOperator,
    ForwardOnly,
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
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact import batched
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.risk import Draws, Vectors

F64 = torch.float64


class Mixed(Vectors):
    """A mode of a user's own: a random vector, and the gradient."""

    seed = 5

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return 2

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        yield draws.uniform(*F.shape).to(F)
        yield likelihood.grad(F, Y)


class Nothing(Vectors):
    """A mode of a user's own, whose vectors happen to be none."""

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return 0

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        return iter(())


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


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(0))


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


@each_mode
@pytest.mark.parametrize("name", FEW)
def test_every_mode_is_the_same_matrix_everywhere(name: str, mode: str) -> None:
    p, vectors = problem(name), MODES[mode]
    with unchanged(p.model, p.loss, p.data):
        G = GGN(p.risk(), vectors, check_deterministic=True)
        dense = G.to_dense()
        check_factor(p.risk(), vectors, G, dense)
    terms = p.exact.batches[0].terms.shape[1]
    if mode != "mc" or terms == 1:  # products of different terms of an example are left out: they are 0 in the mean
        close(p.exact.only_blocks(dense, False), full_blocks(p.risk(), vectors))


class TwoOutputs(nn.Module):
    """One layer whose output two losses read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        f = self.layer(x)
        return {"a": f[:, :2].sin(), "b": f[:, 2:]}


def two_losses() -> EmpiricalRisk:
    torch.manual_seed(0)
    data = []
    for n, ignored in ((3, 1), (4, 0)):  # shares differ from batch to batch
        a = torch.randint(2, (n,))
        a[:ignored] = -100
        data.append((torch.randn(n, 3, dtype=F64), {"a": a, "b": torch.randn(n, 2, dtype=F64)}))
    losses = {"a": nn.CrossEntropyLoss(), "b": (nn.MSELoss(), 0.3)}
    return EmpiricalRisk(TwoOutputs().double(), losses, data)


@each_mode
def test_every_mode_with_several_losses(mode: str) -> None:
    vectors = MODES[mode]
    G = GGN(two_losses(), vectors, check_deterministic=True)
    dense = G.to_dense()
    check_factor(two_losses(), vectors, G, dense)
    blocks = full_blocks(two_losses(), vectors)
    if mode != "mc":
        close(dense, blocks)
    cross = dense[:6, 6:12].abs().max() / dense.abs().max()  # weights of one output with those of the other
    assert (cross > 1e-3) == (mode in ("curvature propagation", "empirical")), f"{float(cross):.1e}"


def test_columns_of_several_losses() -> None:
    risk = two_losses()
    B = GGNFactor(risk)
    assert {key: list(shape) for key, shape in B.in_space.shapes.items()} == {"a": [7, 1, 1], "b": [7, 1, 2]}
    u = {"a": normal(7, 1, 1), "b": torch.zeros(7, 1, 2, dtype=F64)}
    own = GGNFactor(EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), [(X, y["a"]) for X, y in risk.data],
                                  output=lambda out: out["a"]))  # fmt: skip
    close(torch.cat([t.flatten() for t in (B @ u).values()]), own @ u["a"].flatten())
    assert list(GGNFactor(risk, Empirical()).in_space.shapes.values()) == [torch.Size((7, 1, 1))]
    assert list(GGNFactor(risk, "empirical").in_shapes) == [torch.Size((7, 1, 1))]


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.HuberLoss()], ids=["likelihood", "none"])
@pytest.mark.parametrize("chunk_bytes", [2**28, 3 * 8 * 170])
def test_columns_of_large_results(loss: nn.Module, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent back one by one, into the sum over batches, also where several pieces go forward."""
    sent: list[int] = []

    def counted(outputs: Any, inputs: Any, vectors: Any, last: bool = False) -> Any:
        sent.append(len(vectors[0]))
        return batched.vjp(outputs, inputs, vectors, last)

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    targets = (lambda n: torch.arange(n) % 3) if isinstance(loss, nn.CrossEntropyLoss) else (lambda n: normal(n, 3))
    risk = EmpiricalRisk(model, loss, [(normal(n, 4), targets(n)) for n in (6, 4, 5)])
    V = normal(risk.space.dim, 7)
    expected = torch.stack([GGN(risk) @ v for v in V.T], 1)
    U = torch.stack([Jacobian(risk) @ v for v in V.T], 1)
    back = torch.stack([Jacobian(risk).T @ u for u in U.T], 1)
    close(GGN(risk) @ V, expected)
    monkeypatch.setattr(batched, "CPU_NUMBERS", 1)
    monkeypatch.setattr(batched, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr("curvlinops_plus.exact.model_passes.vjp", counted)
    G, J = GGN(risk), Jacobian(risk)
    for _ in range(2):
        close(G @ V, expected)
        close(J @ V, U)
        close(J.T @ U, back)
    assert set(sent) == {1}
    sent.clear()
    close(GGN(risk, chunk_size=3) @ V, expected)
    assert 3 in sent


@pytest.mark.parametrize("kind", [GGN, Hessian])
def test_columns_of_large_parameters(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of weights are results, too; and vectors lie in memory one after the other, as batches take them."""
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 3)).double()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(normal(2, 40), torch.arange(2))] * 2)
    A, V = kind(risk), normal(risk.space.dim, 7)
    expected, sent, seen = torch.stack([A @ v for v in V.T], 1), [], []

    def counted(outputs: Any, inputs: Any, vectors: Any, last: bool = False) -> Any:
        sent.append(len(vectors[0]))
        return vjp(outputs, inputs, vectors, last)

    vjp, sweep, module = batched.vjp, kind._sweep, {GGN: "model_passes", Hessian: "hessian"}[kind]
    monkeypatch.setattr(f"curvlinops_plus.exact.{module}.vjp", counted)
    monkeypatch.setattr(kind, "_sweep", lambda self, X, weights: seen.append(X) or sweep(self, X, weights))
    close(A @ V, expected)
    assert set(sent) == {7}
    sent.clear()
    monkeypatch.setattr(batched, "CPU_NUMBERS", 2 * 40 * 50)
    close(A @ V, expected)
    assert max(sent) == 2
    assert all(X.T.is_contiguous() for X in seen)


def test_vectors_that_are_none_make_zero() -> None:
    G = GGN(problem("mlp").risk(), Nothing())
    assert not G.to_dense().any()
    assert not (G @ normal(G.shape[1])).any()


@pytest.mark.parametrize("kind", [GGN, GGNFactor])
def test_what_is_refused(kind: Any) -> None:
    risk = problem("mlp").risk()
    for vectors in (ForwardOnly(), "forward-only"):
        with pytest.raises(ValueError, match=rf"{kind.__name__} needs vectors .*; ForwardOnly\(\) sends none"):
            kind(risk, vectors)
    with pytest.raises(ValueError, match="Unknown vectors"):
        kind(risk, "ggn")
    huber = EmpiricalRisk(risk.model, nn.HuberLoss(), [(normal(2, 4), normal(2, 3))])
    for vectors in (Exact(signs=True), "fisher_exact", MonteCarlo(), Mixed()):
        with pytest.raises(UnsupportedError, match="no likelihood is registered"):
            kind(huber, vectors)
    if kind is GGNFactor:
        with pytest.raises(UnsupportedError, match="no likelihood is registered"):
            kind(huber)
    else:
        close(kind(huber).to_dense(), kind(huber, "ggn_exact").to_dense())
    gaussian = EmpiricalRisk(risk.model, nn.GaussianNLLLoss(), [(normal(2, 4), normal(2, 3))])
    with pytest.raises(UnsupportedError, match="GaussianNLLLoss has a Hessian in mean and variance"):
        kind(gaussian, "ggn_exact")


def test_random_vectors_follow_the_order_of_the_data() -> None:
    p = problem("mlp")
    X, y = (torch.cat(parts) for parts in zip(*p.data, strict=True))
    shuffled = DataLoader(TensorDataset(X, y), 2, shuffle=True, generator=torch.Generator().manual_seed(0))
    for vectors in (MonteCarlo(), CurvaturePropagation()):
        with pytest.raises(RuntimeError, match="total loss does not differ, so the data come in another order"):
            GGN(p.risk(shuffled), vectors, check_deterministic=True)
    GGN(p.risk(shuffled), check_deterministic=True)
    GGN(p.risk(shuffled), Empirical(), check_deterministic=True)


# ---------------------------------------------------------------------------------------------------------- two doors
def test_the_classic_operators_are_those_of_a_risk() -> None:
    p = problem("attention")
    given = (p.model, p.loss, p.params, p.data)
    doors: list[tuple[Any, type, Any]] = [
        (GGNLinearOperator(*given), GGN, GGN(p.risk())),
        (EFLinearOperator(*given), GGN, GGN(p.risk(), Empirical(per_term=True))),
        (FisherMCLinearOperator(*given, seed=3, mc_samples=2), GGN, GGN(p.risk(), MonteCarlo(2, 3))),
        (HessianLinearOperator(*given), Hessian, Hessian(p.risk())),
        (HessianLinearOperator(*given, block_sizes=[2, 6]), Hessian, Hessian(p.risk(), block_sizes=[2, 6])),
        (JacobianLinearOperator(*given[:1], *given[2:]), Jacobian, Jacobian(p.risk())),
        (GGNFactorLinearOperator(*given), GGNFactor, GGNFactor(p.risk())),
        (
            ActivationHessianLinearOperator(*given[:2], ("first", "output", 0), p.data),
            ActivationHessian,
            ActivationHessian(p.risk(), ("first", "output", 0)),
        ),
    ]
    for classic, kind, composing in doors:
        assert isinstance(classic, kind)
        assert torch.equal(classic.to_dense(), composing.to_dense())
    J = Jacobian(p.risk())
    close(J.T.to_dense(), J.to_dense().T)


def test_messages_of_the_classic_door() -> None:
    p = problem("mlp")
    given = (p.model, p.loss, p.params, p.data)
    for kind in (GGNLinearOperator, EFLinearOperator):
        with pytest.raises(ValueError, match=f"{kind.__name__} does not support block_sizes; HessianLinearOperator"):
            kind(*given, block_sizes=[4])
        with pytest.raises(TypeError, match="block_sizes=4 must be a list"):
            kind(*given, block_sizes=4)  # type: ignore[arg-type]
    for sizes in ([1], [5, -1], [4, 0]):
        with pytest.raises(ValueError, match=r"must be positive and add up to 4, the parameters"):
            Hessian(p.risk(), block_sizes=sizes)
    with pytest.raises(ValueError, match="A model that is a function needs `params` as a dict"):
        GGNLinearOperator(lambda params, X: X, p.loss, p.params, p.data)


def test_a_model_is_no_risk() -> None:
    for make in (GGN, GGNFactor, Hessian, Jacobian, curvature):
        with pytest.raises(TypeError, match=r"takes an EmpiricalRisk, got a Linear: make one of model"):
            make(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_operators_can_be_pickled() -> None:
    risk = problem("mlp").risk()
    for make in (GGN, GGNFactor, Hessian, Jacobian):
        A = make(risk)
        assert torch.equal(pickle.loads(pickle.dumps(A)).to_dense(), A.to_dense())
