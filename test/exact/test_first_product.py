"""The first product of an operator, whose own numbers tell whether derivatives are right, and vectors that can't."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import FEW, close, problem
from helpers import F64, normal
from middles import MIDDLES, Forgetful, Net
from torch import Tensor, nn
from torch.autograd import Function

from curvlinops_plus import EmpiricalRisk, MonteCarlo
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.exact import GGN, Hessian, Jacobian, forward_mode, hessian
from curvlinops_plus.exact.batched import is_generic


def risk_of(model: nn.Module, **options: Any) -> EmpiricalRisk:
    data = [(normal(n, 3, seed=n), torch.arange(n) % 2) for n in (5, 3)]
    return EmpiricalRisk(model.double(), nn.CrossEntropyLoss(), data, **options)


def dense_by_rows(risk: EmpiricalRisk) -> Tensor:
    """The GGN from backward passes for each output alone."""
    total = torch.zeros(risk.space.dim, risk.space.dim, dtype=F64)
    params = list(risk.params.values())
    for X, _ in risk.data:
        f = risk.model(X)
        rows = [
            torch.autograd.grad(entry, params, retain_graph=True, allow_unused=True, materialize_grads=True)
            for entry in f.flatten()
        ]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        p = f.detach().softmax(1)
        H = torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None]))
        total += J.T @ H @ J
    return total / sum(len(X) for X, _ in risk.data)


@pytest.mark.parametrize("name", MIDDLES)
def test_the_first_product_finds_out_where_forward_mode_is_wrong(name: str) -> None:
    torch.manual_seed(0)
    middle, right = MIDDLES[name]
    risk = risk_of(Net(middle))
    dense, G, v = dense_by_rows(risk), GGN(risk), normal(risk.space.dim)
    for w in (v, normal(risk.space.dim, seed=1)):
        close(G @ w, dense @ w)
        assert G._linear.mode.right is right


@pytest.mark.parametrize("name", FEW)
def test_the_first_product_is_that_of_the_matrix(name: str) -> None:
    p = problem(name)
    v = normal(p.exact.ggn().shape[1])
    close(GGN(p.risk()) @ v, p.exact.ggn() @ v)


@pytest.mark.parametrize("name", ["plain", "gradient reversal by a hook", "no rule for tangents"])
def test_draws_and_examples_count_once(name: str) -> None:
    torch.manual_seed(0)
    risk = risk_of(Net(MIDDLES[name][0]))
    v = normal(risk.space.dim)
    close(GGN(risk, MonteCarlo(2, 5)) @ v, GGN(risk, MonteCarlo(2, 5)).to_dense() @ v)


class _Deviates(Function):
    """The identity, whose tangents are wrong where they are not all alike."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return 2 * tangents[0] - tangents[0].mean(-1, keepdim=True)


def vectors(params: list[Tensor]) -> dict[str, Tensor]:
    """Vectors for which the first layer's outputs have the same tangents."""
    rows = [normal(3, seed=1).expand(4, 3), torch.ones(4), normal(2, 4, seed=2), normal(2, seed=3)]
    without = [torch.zeros(4, 3), torch.zeros(4), normal(2, 4, seed=2), normal(2, seed=3)]
    small = [1e-9 * normal(4, 3), 1e-9 * normal(4), normal(2, 4, seed=2), normal(2, seed=3)]
    sparse = [torch.eye(4)[:, :3], torch.ones(4), normal(2, 4, seed=2), normal(2, seed=3)]
    forms = {"ones": [torch.ones_like(p) for p in params], "equal rows": rows, "no first layer": without}
    forms |= {"next to no first layer": small, "sparse": sparse}
    return {name: torch.cat([t.double().flatten() for t in parts]) for name, parts in forms.items()}


@pytest.mark.parametrize("form", vectors([torch.ones(1)]))
def test_vectors_that_would_hide_a_wrong_derivative_are_not_asked(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    risk = risk_of(Net(lambda net, h: _Deviates.apply(h)))  # type: ignore[arg-type]
    params = list(risk.params.values())
    v, w, dense = vectors(params)[form], normal(risk.space.dim), dense_by_rows(risk)
    assert not is_generic(v, params)
    assert is_generic(w, params)
    G = GGN(risk)
    close(G @ v, dense @ v)
    close(G @ w, dense @ w)
    assert G._linear.mode.right is False
    monkeypatch.setattr(forward_mode, "is_generic", lambda v, params: True)
    monkeypatch.setattr(forward_mode, "is_by_hand", lambda F, hooked: False)
    G = GGN(risk)
    _ = G @ v
    if form != "sparse":  # what the test is about
        assert G._linear.mode.right


def test_vectors_that_say_as_much_as_random_ones() -> None:
    params = [torch.ones(6, 5), torch.ones(6), torch.ones(8, 3, 3, 3)]
    n = sum(p.numel() for p in params)
    for seed in range(20):
        v = normal(n, seed=seed)
        assert is_generic(v, params)
        assert is_generic(v.sign(), params)
        assert is_generic(1e-20 * v, params)
    assert not is_generic(torch.zeros(n), params)
    assert not is_generic(torch.full((n,), torch.nan), params)
    assert not is_generic(normal(n) * (torch.rand(n) > 0.7), params)


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 2), []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)  # an attribute itself would be as before after each pass
        return self.linear(x).tanh()


def test_the_first_product_is_no_dearer_than_others() -> None:
    model = _Counts()
    risk = risk_of(model, check=False)
    for v, passes in ((normal(8), 2), (torch.ones(8, dtype=F64), 3)):
        model.calls.clear()
        _ = GGN(risk) @ v
        assert len(model.calls) == passes


class _Cubic(nn.Module):
    """`x² y`, whose second derivative a backward pass written by hand gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Forgetful.apply(self.a(x), self.b(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("columns", [1, 3])
def test_hessians_that_are_not_symmetric_are_found_with_the_vector_itself(columns: int) -> None:
    risk = risk_of(_Cubic())
    for seed in range(20):
        with pytest.raises(UnsupportedError, match="not symmetric"):
            _ = Hessian(risk) @ normal(24, columns, seed=seed)
    model = _Cubic().float()
    data = [(X.float(), y) for X, y in risk.data]
    with pytest.warns(CurvatureWarning, match="not symmetric"):
        _ = Hessian(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)) @ normal(24, columns).float()


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_symmetric_hessians_need_one_product_more(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
    model = nn.Sequential(*layers).to(dtype)
    data = [(normal(n, 3).to(dtype), torch.arange(n) % 2) for n in (40, 30)]
    risk, looks, vjps = EmpiricalRisk(model, nn.CrossEntropyLoss(), data), [], []
    three, once = hessian.refuse_asymmetry, hessian.vjp
    monkeypatch.setattr(hessian, "refuse_asymmetry", lambda *args: (looks.append(1), three(*args)))
    monkeypatch.setattr(hessian, "vjp", lambda *args: (vjps.append(1), once(*args))[1])
    n = risk.space.dim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            _ = Hessian(risk) @ normal(n, seed=seed).to(dtype)
        assert (len(looks), len(vjps)) == (0, 3 * 2 * 2)
        _ = Hessian(risk) @ torch.ones(n, dtype=dtype)
    assert len(looks) == 2


class NoForwardMode(Function):
    """Twice its input, without a forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Branch(nn.Module):
    """Takes another branch in the smaller batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out = NoForwardMode.apply(h) if len(x) < 5 else 2 * h
        assert isinstance(out, Tensor)
        return self.last(torch.tanh(out))


def test_a_branch_without_forward_mode_in_a_later_batch() -> None:
    torch.manual_seed(0)
    risk = risk_of(Branch())
    dense, v = dense_by_rows(risk), normal(risk.space.dim)
    J = Jacobian(risk)
    close(J @ v, J.to_dense() @ v)
    for G in (GGN(risk), GGN(risk, max_kept_bytes=2**20)):
        for _ in range(3):
            close(G @ v, dense @ v)
