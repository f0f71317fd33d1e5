"""Pruning against a slow optimal brain surgeon, which forms every matrix."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from curvlinops_plus import EKFAC, GGN, KFAC, DiagonalBlock, EmpiricalRisk, curvature
from curvlinops_plus import prune as pruned
from test.cases import close
from test.helpers import normal


def network() -> tuple[Any, EmpiricalRisk]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)
    )
    X, y = normal(20, 1, 3, 3), torch.arange(20) % 3
    return model.double(), EmpiricalRisk(
        model, nn.CrossEntropyLoss(), [(X[:12], y[:12]), (X[12:], y[12:])]
    )


def surgeon(
    H: Tensor, theta: Tensor, may_go: Tensor, sparsity: float, rounds: int
) -> tuple[Tensor, Tensor]:
    """The minimum of `(x - θ)ᵀ H (x - θ)` with `x_i = 0` for what is gone, by Lagrange
    multipliers.
    """
    n, number = len(theta), int(may_go.sum())
    gone: list[int] = []
    inverse, x = torch.linalg.inv(H), theta.clone()
    for step in range(rounds):
        M = inverse.clone()
        if gone:
            M -= inverse[:, gone] @ torch.linalg.inv(inverse[gone][:, gone]) @ inverse[gone]
        cost = {i: float(x[i] ** 2 / M[i, i]) for i in range(n) if may_go[i] and i not in gone}
        target = number - round(number * (1 - sparsity) ** ((step + 1) / rounds))
        gone += sorted(cost, key=lambda i: cost[i])[: target - len(gone)]
        x = theta - inverse[:, gone] @ torch.linalg.solve(inverse[gone][:, gone], theta[gone])
        x[gone] = 0
    mask = torch.ones(n, dtype=torch.bool)
    mask[gone] = False
    return x, mask


CURVATURES: dict[str, Any] = {
    "KFAC": lambda risk: curvature(risk, KFAC),
    "EKFAC": lambda risk: curvature(risk, EKFAC),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock),
    "GGN": lambda risk: GGN(risk).materialize(),
    "sum": lambda risk: (
        curvature(risk, KFAC) + curvature(risk.with_data(risk.data[:1]), KFAC)
    ).nearest_kronecker(),
}


@pytest.mark.parametrize(("some", "rounds"), [(False, 1), (True, 3)], ids=["all", "some"])
@pytest.mark.parametrize("kind", CURVATURES)
def test_is_the_slow_surgeon(kind: str, some: bool, rounds: int) -> None:
    model, risk = network()
    K = CURVATURES[kind](risk)
    theta = risk.space.flatten({key: p.detach().clone() for key, p in risk.params.items()})
    candidates = ["0.weight", "3.weight", "5.bias"] if some else None
    chosen = {
        key: torch.full(p.shape, some is False or key in (candidates or ()))
        for key, p in risk.params.items()
    }
    H = K.to_dense() + 1e-3 * torch.eye(len(theta), dtype=theta.dtype)
    expected, mask = surgeon(H, theta, risk.space.flatten(chosen), 0.6, rounds)
    masks = pruned(model, K, 0.6, rounds, damping=1e-3, candidates=candidates)
    assert masks.keys() == (set(candidates) if candidates else risk.params.keys())
    for key, m in risk.space.unflatten(mask).items():
        module, _, name = key.rpartition(".")
        found = getattr(model.get_submodule(module), name)
        close(found, risk.space.unflatten(expected)[key], rtol=1e-7, what=key)
        if key in masks:
            assert torch.equal(masks[key], m)
            assert not found[~m].any()
    if kind == "diagonal":
        kept = risk.space.unflatten(theta)["3.weight"] * masks["3.weight"]
        close(model[3].weight, kept, rtol=1e-12)  # type: ignore[index]


def test_masks_are_those_of_torch() -> None:
    """They stay while the model is trained, and `remove` makes them plain."""
    model, risk = network()
    before = {*dict(model.named_parameters())}
    masks = pruned(model, curvature(risk, KFAC), 0.5, 2, candidates=["3.weight"])
    assert [name for name, _ in model.named_buffers()] == ["3.weight_mask"]
    assert masks["3.weight"].sum() == 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for X, y in risk.data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    torch_prune.remove(model[3], "weight")
    assert {*dict(model.named_parameters())} == before
    weight = model[3].weight
    assert not weight[~masks["3.weight"]].any()
    assert weight[masks["3.weight"]].all()
    assert weight.requires_grad


class Uncalled(nn.Module):
    """Parameters of modules that are not called, or are called after somebody else has read
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.held = nn.Linear(4, 4)
        self.several = nn.ParameterList([nn.Parameter(normal(4, 4))])
        self.named = nn.ParameterDict({"a": nn.Parameter(normal(4, 4, seed=1))})
        self.late = nn.Linear(4, 4, bias=False)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.held.weight, self.held.bias))
        x = torch.tanh(x @ self.several[0] @ self.named["a"])
        x = self.late(torch.tanh(nn.functional.linear(x, self.late.weight)))
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


@pytest.mark.parametrize("copied", [False, True])
def test_masks_stay_where_modules_are_not_called(copied: bool) -> None:
    model: Any = Uncalled().double()
    X, y = normal(5, 3, 4), normal(5, 4, seed=1)
    masks = pruned(model, curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, y)]), KFAC), 0.5, 2)
    model = copy.deepcopy(model) if copied else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), y).backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    plain: Any = Uncalled().double()
    state = model.state_dict()
    plain.load_state_dict({name: state[f"{name}_orig"] * masks[name] for name in masks})
    for mode in (True, False):
        with torch.no_grad():
            close(model.train(mode)(X), plain.train(mode)(X))


def test_many_rounds_of_blocks_that_are_inverted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several rounds, and inverses of what is left where that takes fewer operations; in
    single precision, too, the same parameters go.
    """
    from curvlinops_plus.applications import pruning

    counts: Counter[str] = Counter()
    for name in ("without", "_anew"):
        plain = getattr(pruning._Remainder, name)

        def counted(part: Any, *args: Any, name: str = name, plain: Any = plain) -> Any:
            counts[name] += 1
            return plain(part, *args)

        monkeypatch.setattr(pruning._Remainder, name, counted)
    model, risk = network()
    K = curvature(risk, EKFAC)
    theta = risk.space.flatten({key: p.detach().clone() for key, p in risk.params.items()})
    H = K.to_dense() + 1e-3 * torch.eye(len(theta), dtype=theta.dtype)
    expected, _ = surgeon(H, theta, torch.ones(len(theta), dtype=torch.bool), 0.9, 12)
    masks = pruned(model, K, 0.9, 12, damping=1e-3)
    found = {key: model.get_parameter(f"{key}_orig").detach() for key in masks}
    close(risk.space.flatten(found), expected, rtol=1e-7)
    assert counts["without"] > 3 * counts["_anew"] > 0
    model, risk = network()
    single = EmpiricalRisk(
        model.float(), nn.CrossEntropyLoss(), [(X.float(), y) for X, y in risk.data]
    )
    masks_of_single = pruned(model, curvature(single, EKFAC), 0.9, 12, damping=1e-3)
    assert all(torch.equal(masks[key], mask) for key, mask in masks_of_single.items())
