"""Layers that read one tensor have one input factor, and one basis of it; those that stop to, a factor of their own."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from cases import close
from torch import Tensor, nn

from curvlinops_plus import EKFAC, KFAC, CurvatureEstimator, EmpiricalRisk, curvature
from curvlinops_plus.blocks import ekfac
from curvlinops_plus.blocks.shared_inputs import SharedInputs
from curvlinops_plus.linalg import structured


class Attention(nn.Module):
    """Queries, keys and values of one tensor; `other` says for a batch whether keys read another one."""

    def __init__(self, other: Any = lambda x: False) -> None:
        super().__init__()
        self.other, self.enter = other, nn.Linear(6, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.gate, self.up, self.leave = nn.Linear(8, 5, bias=False), nn.Linear(8, 5, bias=False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).tanh()
        keys = h.sigmoid() if self.other(x) else h
        h = (self.q(h) @ self.k(keys).mT).softmax(-1) @ self.v(h)
        return self.leave(self.gate(h).sigmoid() * self.up(h)).mean(1)


def made(other: Any = lambda x: False, dtype: torch.dtype = torch.float64) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = Attention(other).to(dtype)
    data = [(torch.randn(n, 4, 6).to(dtype), torch.randint(3, (n,))) for n in (9, 7, 8)]
    for number, (X, _) in enumerate(data):
        X[..., 0] = number  # so that a batch is known by any of its examples
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


def alone(monkeypatch: pytest.MonkeyPatch, risk: EmpiricalRisk, kind: Any) -> Tensor:
    """The slow twin: each layer with a sum of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(SharedInputs, "begin", lambda self, calls: None)
        return curvature(risk, kind).to_dense()


def factor(K: Any, name: str) -> Any:
    block = K.blocks[name]
    return block.A if hasattr(block, "A") else block.basis.A


KINDS = [kind.using(**o) for kind in (KFAC, EKFAC) for o in ({}, {"kfac_approx": "reduce"}, {"split": 3})]


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_one_factor_with_the_same_numbers(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    K = curvature(made(), kind)
    close(K.to_dense(), alone(monkeypatch, made(), kind), 1e-12)
    parts = [[piece.matrix for piece in getattr(f, "pieces", [f])] for f in (factor(K, n) for n in ("q", "k", "v"))]
    assert all(a is b for a, b in zip(parts[0], parts[1], strict=True))
    assert parts[2][0] is not parts[0][0]  # without a bias it has no column of ones
    assert factor(K, "gate").size == factor(K, "up").size == 8


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_what_stops_to_be_shared_is_right(batch: int, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    risk = made(lambda x: bool((x[..., 0] == batch).all()))
    K = curvature(risk, kind)
    close(K.to_dense(), alone(monkeypatch, risk, kind), 1e-12)
    assert getattr(factor(K, "q"), "matrix", None) is not getattr(factor(K, "k"), "matrix", 0)


def test_half_precision_shares_too() -> None:
    K = curvature(made(dtype=torch.bfloat16), KFAC)
    assert factor(K, "q") is factor(K, "k")
    assert factor(K, "q").dtype == torch.float32


def test_one_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    risk, sizes = made(), []
    decompose, eigenvectors = structured.eigh, ekfac.eigenbasis
    monkeypatch.setattr(structured, "eigh", lambda M, **o: (sizes.append(len(M)), decompose(M, **o))[1])
    monkeypatch.setattr(ekfac, "eigenbasis", lambda M, **o: (sizes.append(len(M)), eigenvectors(M, **o))[1])
    curvature(risk, KFAC).inverse(0.1)
    # Inputs of enter, q = k, v, gate = up, leave; and six gradient factors.
    assert sorted(sizes) == [3, 5, 5, 6, 7, 8, 8, 8, 8, 8, 8, 9]
    sizes.clear()
    curvature(risk, EKFAC)
    assert sorted(sizes) == [3, 5, 5, 6, 7, 8, 8, 8, 8, 8, 8, 9]


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_an_estimator_makes_factors_anew(kind: Any) -> None:
    """At each refresh, of all that was added until then."""
    risk = made()
    often, once = (CurvatureEstimator(risk, kind, damping=0.1) for _ in range(2))
    for batch in risk.data:
        often.update(batch)
        often.refresh()
        once.update(batch)
    once.refresh()
    for name in ("enter", "q", "k", "up", "leave"):
        close(factor(often.operator, name).to_dense(), factor(once.operator, name).to_dense(), 1e-9)


def test_other_kinds_and_options_do_not_share() -> None:
    K = curvature(made(), {"k": KFAC.using(kfac_approx="reduce")})
    assert factor(K, "q") is not factor(K, "k")
    K = curvature(made(), {"k": EKFAC})
    assert factor(K, "q") is not factor(K, "k")


def test_a_rule_that_changes_its_rows_does_not_share() -> None:
    from curvlinops_plus import register_rule
    from curvlinops_plus.layer.linear import LinearRule

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    @register_rule(Twice)
    class TwiceRule(LinearRule):
        def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
            return 2 * super().inputs(module, x)

    risk = made()
    twice = Twice(8, 8, dtype=torch.float64)
    twice.load_state_dict(risk.model.k.state_dict())
    model = copy.deepcopy(risk.model)
    model.k = twice
    K = curvature(EmpiricalRisk(model, risk.losses.given, risk.data), KFAC)
    close(factor(K, "k").matrix[:-1, :-1], 4 * factor(K, "q").matrix[:-1, :-1], 1e-12)


def test_inputs_of_a_batch_are_gone_when_the_model_runs_on_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, gone, seen = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), [], []
    data = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(4)]
    begin = SharedInputs.begin

    def watched(self: SharedInputs, calls: Any) -> None:
        seen.extend(weakref.ref(call.input) for own in calls.values() for call in own if call.input.shape[1] == 5)
        begin(self, calls)

    monkeypatch.setattr(SharedInputs, "begin", watched)
    model[0].register_forward_pre_hook(lambda module, args: gone.append(all(before() is None for before in seen)))
    curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data, check=False), KFAC)
    assert len(seen) == 2 * len(data)
    assert len(gone) >= len(data)
    assert all(gone)
