"""What second derivatives need beyond PyTorch's: operations, losses and vectors that would go wrong silently."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import close, unchanged
from middles import Forgetful
from torch import Tensor, nn

from curvlinops_plus import (
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNFactorLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.exact import batched, hessian
from curvlinops_plus.likelihood import likelihood_of

F64 = torch.float64
KINDS = [
    HessianLinearOperator,
    GGNLinearOperator,
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNFactorLinearOperator,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
]
each_kind = pytest.mark.parametrize("kind", KINDS)


def net(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def data(dtype: torch.dtype = F64) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(7, 3, generator=generator, dtype=F64).to(dtype)
    y = torch.randint(3, (7,), generator=generator)
    return [(X[:4], y[:4]), (X[4:], y[4:])]


def operator(kind: Any, model: nn.Module, batches: list[Any], **options: Any) -> Any:
    params = list(model.parameters())
    if "Jacobian" in kind.__name__:
        return kind(model, params, batches, **options)
    return kind(model, nn.CrossEntropyLoss(), params, batches, **options)


def hessian_by_differences(model: nn.Module, loss: Any, batches: list[Any], h: float = 1e-5) -> Tensor:
    """Central differences of gradients."""
    params = list(model.parameters())

    def gradient() -> Tensor:
        total = sum(loss(model(X), y) * len(X) for X, y in batches) / sum(len(X) for X, _ in batches)
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, params)])

    columns = []
    for p in params:
        for k in range(p.numel()):
            ends = []
            for sign in (h, -h):
                with torch.no_grad():
                    p.view(-1)[k] += sign
                ends.append(gradient())
                with torch.no_grad():
                    p.view(-1)[k] -= sign
            columns.append((ends[0] - ends[1]) / (2 * h))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("certainty", [100, 400, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_networks_that_are_certain_have_hessians(certainty: float, seed: int) -> None:
    """Their loss is 0 and their Hessian rounding, which is not symmetric."""
    torch.manual_seed(seed)
    model, X = nn.Linear(2, 3).double(), torch.randn(4, 2, dtype=F64)
    with torch.no_grad():
        model.weight.mul_(certainty)
    y = model(X).argmax(1)
    H = HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, y)])
    p = model(X).softmax(1).detach()
    p[range(4), y] = p.scatter(1, y[:, None], 0.0).sum(1)  # 1 - p, which is small
    assert float((H @ torch.randn(9, dtype=F64)).norm()) < 1e-12 + 1e3 * float(p.sum())


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["old", "new"])
def test_weight_norm(wrap: Any, dim: int | None) -> None:
    """The second derivative of PyTorch's own kernel is wrong for a norm per row or column."""
    model = net()
    with pytest.warns(FutureWarning) if wrap is nn.utils.weight_norm else nullcontext():
        for index in (0, 2):
            wrap(model[index], dim=dim)
    H = HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data())
    expected = hessian_by_differences(model, nn.CrossEntropyLoss(), data())
    for _ in range(2):  # the second time nothing is watched
        close(H.to_dense(), expected, 1e-7)
    G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), [(X, X) for X, _ in data()])
    J = JacobianLinearOperator(model, list(model.parameters()), data()).to_dense()
    close(G.to_dense(), 2 * J.T @ J / J.shape[0])


class Cubic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Forgetful.apply(self.a(x), self.b(x))  # type: ignore[no-any-return]


def test_hessians_that_are_not_symmetric() -> None:
    model = Cubic().double()
    H = HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data())
    with pytest.raises(UnsupportedError, match=r"not symmetric.*wrong second derivative.*gradgradcheck"):
        H @ torch.ones(24, dtype=F64)
    model = model.float()
    H = HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data(torch.float32))
    with pytest.warns(CurvatureWarning, match=r"not symmetric.*float32 numbers.*float64 the two can be told apart"):
        H @ torch.ones(24)


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
def test_a_loss_that_reads_parameters(kind: Any) -> None:
    """Past the model they are not those that are replaced."""
    model = net()
    params = list(model.parameters())
    cross = nn.CrossEntropyLoss()

    def inside(f: Tensor, y: Tensor) -> Tensor:
        return cross(f, y) + sum(p.square().sum() for p in model.parameters()) / 2

    def past(f: Tensor, y: Tensor) -> Tensor:
        return cross(f, y) + sum(p.square().sum() for p in params) / 2

    A = kind(model, past, params, data())
    with (
        unchanged(model),
        pytest.raises(ValueError, match=r"parameters \['0.weight', '0.bias'.*past the model"),
    ):
        A.gradient_and_loss()
    if kind is HessianLinearOperator:
        with unchanged(model), pytest.raises(ValueError, match="past the model"):
            A @ torch.ones(31, dtype=F64)
        H = kind(model, cross, params, data()).to_dense()
        close(kind(model, inside, params, data()).to_dense(), H + torch.eye(31, dtype=F64))
    g, loss = kind(model, inside, params, data()).gradient_and_loss()
    plain, without = kind(model, cross, params, data()).gradient_and_loss()
    close(loss, without + sum(p.detach().square().sum() for p in params) / 2)
    for one, two, p in zip(g, plain, params):
        close(one, two + p.detach())


@each_kind
def test_autocast_around_products(kind: Any) -> None:
    A = operator(kind, net(torch.float32), data(torch.float32))
    dense = A.to_dense()
    B, square = 2 * A + A, dense.T @ dense
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(A.to_dense(), dense)
        close(B.to_dense(), 3 * dense, 1e-6)
        close((A.T @ A).to_dense(), square, 1e-5)
        close(A @ torch.eye(A.shape[1]), dense, 1e-5)
        if hasattr(A, "gradient_and_loss"):
            inside = A.gradient_and_loss()
    if hasattr(A, "gradient_and_loss"):
        for one, two in zip(inside[0], A.gradient_and_loss()[0]):
            assert torch.equal(one, two)


@each_kind
def test_no_columns(kind: Any) -> None:
    A = operator(kind, net(), data())
    m, n = A.shape
    assert (A @ torch.zeros(n, 0, dtype=F64)).shape == (m, 0)
    assert (torch.zeros(0, m, dtype=F64) @ A).shape == (0, n)


def test_columns_at_once_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the largest intermediate result, not the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    batches = [(torch.randn(2, 1, 16, 16, dtype=F64), torch.randint(4, (2,)))]
    H = HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), batches)
    expected, widths = H.to_dense(), []
    vjp = hessian.vjp

    def watched(outputs: Any, inputs: Any, vectors: Any, last: bool = False) -> Any:
        widths.append(len(vectors[0]))
        return vjp(outputs, inputs, vectors, last)

    monkeypatch.setattr(hessian, "vjp", watched)
    largest = 2 * 4 * 16 * 16
    monkeypatch.setattr(batched, "CHUNK_BYTES", 3 * 8 * (H.shape[0] + 4 * largest))
    close(H.to_dense(), expected)
    assert max(widths) == 3


def test_cross_entropy_of_a_network_that_fits() -> None:
    """Where one probability is nearly 1, float32 products keep their digits."""
    likelihood = likelihood_of(nn.CrossEntropyLoss())
    generator = torch.Generator().manual_seed(0)
    F = torch.randn(50, 1, 10, generator=generator)
    F[..., 3] += 16
    Y = likelihood.canonical(F[:, 0], torch.full((50,), 3), 50, None)[1]
    V = torch.randn(4, 50, 1, 10, generator=generator)
    p = F.double().softmax(-1)
    H = torch.diag_embed(p) - p[..., None] * p[..., None, :]
    # The entry of the dominant class by what sums to zero, exactly.
    H[..., 3, 3] = p[..., :3].sum(-1) * p[..., 3] + p[..., 4:].sum(-1) * p[..., 3]
    close(likelihood.hessian_product(F, Y, V).double(), (H @ V.double()[..., None])[..., 0], 1e-5)


def test_rows_of_sequences_of_different_length() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    batches = [(torch.randn(2, T, 4, dtype=F64), 0) for T in (3, 5, 2)]
    J = JacobianLinearOperator(model, list(model.parameters()), batches, output=lambda f: f.flatten(0, 1))
    assert J.shape == (2 * (3 + 5 + 2) * 2, 10)
    rows = torch.cat([X.flatten(0, 1) for X, _ in batches])
    weight = torch.einsum("ni,oq->noqi", rows, torch.eye(2, dtype=F64)).flatten(0, 1).flatten(1)
    close(J.to_dense(), torch.cat([weight, torch.eye(2, dtype=F64).repeat(len(rows), 1)], 1))


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
def test_losses_without_a_second_derivative(kind: Any) -> None:
    model = net()
    A = kind(model, nn.MultiMarginLoss(), list(model.parameters()), data())
    with (
        unchanged(model),
        pytest.raises(UnsupportedError, match="loss uses multi_margin_loss, which PyTorch can't diff"),
    ):
        A.to_dense()


def test_arguments_that_are_none() -> None:
    model, options = net(), {"check_deterministic": False}
    params, loss = list(model.parameters()), nn.CrossEntropyLoss()
    for number in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"mc_samples={number} must be an integer of at least 1"):
            FisherMCLinearOperator(model, loss, params, data(), mc_samples=number, **options)
    for size in (0, 2.5, True):
        for kind in KINDS:
            with pytest.raises(ValueError, match=f"chunk_size={size} must be an integer of at least 1"):
                operator(kind, model, data(), chunk_size=size, **options)
    with pytest.raises(TypeError, match="block_sizes=2 must be a list"):
        HessianLinearOperator(model, loss, params, data(), block_sizes=2, **options)
    H = HessianLinearOperator(model, loss, params, data(), **options)
    assert (H @ torch.ones(31)).dtype == torch.float64
    with pytest.raises(TypeError, match=r"got torch.int64; convert it: X.to\(torch.float64\)\.$"):
        H @ torch.ones(31, dtype=torch.int64)


class SumOfOutputs(nn.Module):
    """A loss that is linear in the output: the bias of the last layer has a constant gradient."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return f.sum()


@pytest.mark.parametrize("block_sizes", [None, [4], [2, 2], [1, 1, 1, 1], [3, 1]])
def test_a_block_without_second_derivatives(block_sizes: list[int] | None) -> None:
    """It is zero, beside blocks that are not."""
    model, batches = net(), data()
    params = list(model.parameters())
    H = HessianLinearOperator(model, SumOfOutputs(), params, batches, block_sizes=block_sizes)
    whole = hessian_by_differences(model, SumOfOutputs(), batches)
    sizes, expected, start = block_sizes or [4], torch.zeros_like(whole), 0
    edges = [0, *torch.tensor([p.numel() for p in params]).cumsum(0).tolist()]
    for size in sizes:
        part = slice(edges[start], edges[start + size])
        expected[part, part], start = whole[part, part], start + size
    close(H.to_dense(), expected, 1e-6)
    assert (H.to_dense()[-3:, -3:] == 0).all()
    assert (H @ torch.ones(31, dtype=F64)).shape == (31,)


def test_a_matrix_without_second_derivatives() -> None:
    model, batches = nn.Linear(3, 2).double(), data()
    H = HessianLinearOperator(model, SumOfOutputs(), list(model.parameters()), batches, block_sizes=[1, 1])
    assert (H.to_dense() == 0).all()
