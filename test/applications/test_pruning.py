"""Pruning against a slow optimal brain surgeon, which forms every matrix."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import close
from helpers import normal
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from curvlinops_plus import EKFAC, GGN, KFAC, DiagonalBlock, EmpiricalRisk, NoClosedForm, UnsupportedError, curvature
from curvlinops_plus import prune as pruned
from curvlinops_plus.linalg import Dense, Space, Structure


def network(**options: Any) -> tuple[nn.Module, EmpiricalRisk]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))
    X, y = normal(20, 1, 3, 3), torch.arange(20) % 3
    return model.double(), EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:12], y[:12]), (X[12:], y[12:])], **options)


def surgeon(H: Tensor, theta: Tensor, may_go: Tensor, sparsity: float, rounds: int) -> tuple[Tensor, Tensor]:
    """The minimum of `(x - θ)ᵀ H (x - θ)` with `x_i = 0` for what is gone, by Lagrange multipliers."""
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


def both_halves(risk: EmpiricalRisk) -> Any:
    return curvature(risk, KFAC) + curvature(risk.with_data([*risk.data][:1]), KFAC)


CURVATURES: dict[str, Any] = {
    "KFAC": lambda risk: curvature(risk, KFAC),
    "EKFAC": lambda risk: curvature(risk, EKFAC),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock),
    "GGN": lambda risk: GGN(risk).materialize(),
    "sum": lambda risk: both_halves(risk).nearest_kronecker(),
}


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("kind", CURVATURES)
def test_is_the_slow_surgeon(kind: str, some: bool, rounds: int) -> None:
    model, risk = network()
    K = CURVATURES[kind](risk)
    theta = risk.space.flatten({key: p.detach().clone() for key, p in risk.params.items()})
    candidates = ["0.weight", "3.weight", "5.bias"] if some else None
    chosen = {key: torch.full(p.shape, some is False or key in (candidates or ())) for key, p in risk.params.items()}
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


def test_rounds_and_other_parameters_help() -> None:
    """The rise of the quadratic form: of several rounds less than of one, and far less than without moving the rest."""
    torch.manual_seed(0)
    theta, A = normal(60), normal(60, 60)
    H = A @ A.T / 60 + torch.ones(60, 60, dtype=torch.float64)
    rises = []
    for K, rounds in ((H.diag().diag(), 1), (H, 1), (H, 12)):
        model = nn.Linear(60, 1, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(theta[None])
        pruned(model, on(model, K), 0.5, rounds, damping=1e-9)
        rises.append(float((model.weight[0] - theta) @ H @ (model.weight[0] - theta)))
    assert rises[2] < 0.9 * rises[1] < 0.5 * rises[0]


def on(model: nn.Module, K: Tensor) -> Dense:
    """A matrix on the parameters of a model."""
    space = Space.of(dict(model.named_parameters()))
    return Dense(K, Structure.PSD, in_space=space, out_space=space)


def test_masks_are_those_of_torch() -> None:
    """They stay while the model is trained, and `remove` makes them plain."""
    model, risk = network()
    before = [*dict(model.named_parameters())]
    masks = pruned(model, curvature(risk, KFAC), 0.5, 2, candidates=["3.weight"])
    assert torch_prune.is_pruned(model)
    assert [name for name, _ in model.named_buffers()] == ["3.weight_mask"]
    assert masks["3.weight"].sum() == 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for X, y in risk.data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    torch_prune.remove(model[3], "weight")  # type: ignore[index]
    assert {*dict(model.named_parameters())} == {*before}
    weight = model[3].weight  # type: ignore[index]
    assert not weight[~masks["3.weight"]].any()
    assert weight[masks["3.weight"]].all()
    assert weight.requires_grad


def test_shared_parameters_stay_shared() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False)).double()
    model[2].weight = model[0].weight
    risk = EmpiricalRisk(model, nn.MSELoss(), [(normal(9, 3), normal(9, 3, seed=1))])
    (mask,) = pruned(model, curvature(risk, KFAC), 0.5, 2).values()
    model(normal(2, 3)).sum().backward()
    assert model[0].weight_orig is model[2].weight_orig
    for layer in (model[0], model[2]):
        assert not layer.weight[~mask].any()


def test_nothing_and_almost_everything() -> None:
    model, risk = network()
    before = copy.deepcopy(model.state_dict())
    masks = pruned(model, curvature(risk, KFAC), 0.0, 1, candidates=[])
    assert masks == {}
    for key, t in model.state_dict().items():
        close(t, before[key], rtol=1e-7)
    masks = pruned(model, curvature(risk, KFAC), 0.999, 4)
    assert sum(int(m.sum()) for m in masks.values()) == 0
    assert not any(p.any() for p in model.parameters())


def test_refusals() -> None:
    model, risk = network()
    K = curvature(risk, KFAC)
    with pytest.raises(ValueError, match=r"sparsity=1 must be in \[0, 1\)"):
        pruned(model, K, 1)
    with pytest.raises(ValueError, match=r"rounds=0 must be at least 1"):
        pruned(model, K, 0.5, 0)
    with pytest.raises(TypeError, match=r"`model` is a function; expected a torch.nn.Module"):
        pruned(lambda x: x, K, 0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`K` is a Tensor; expected the curvature"):
        pruned(model, torch.eye(3), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"names \['1.weight'\], which K doesn't know; it knows .*'0.weight'"):
        pruned(model, K, 0.5, candidates=["1.weight"])
    with pytest.raises(ValueError, match=r"'0.weight' of shape .* that the model doesn't have: its parameters are"):
        pruned(model[3], K, 0.5)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"that the model doesn't have: it has shape"):
        pruned(nn.Sequential(nn.Conv2d(1, 3, 2)), K, 0.5)
    with pytest.raises(NoClosedForm, match=r"materialize"):
        pruned(model, GGN(risk), 0.5)
    at = EmpiricalRisk(model, nn.CrossEntropyLoss(), risk.data, {k: p.detach() + 1 for k, p in risk.params.items()})
    with pytest.raises(ValueError, match=r"K was computed at other values of .* than the network's own"):
        pruned(model, curvature(at, KFAC), 0.5)
    trained = copy.deepcopy(model)
    old = curvature(EmpiricalRisk(trained, nn.CrossEntropyLoss(), risk.data), KFAC)
    with torch.no_grad():
        next(trained.parameters()).mul_(1.1)
    with pytest.raises(ValueError, match=r"\['0.weight'\] have changed since K was computed, .* another point"):
        pruned(trained, 2 * old, 0.5)
    pruned(model, K, 0.1, 1)
    with pytest.raises(ValueError, match=r"have changed since K was computed"):
        pruned(model, K, 0.5)


class Uncalled(nn.Module):
    """Parameters of modules that are not called, or are called after somebody else has read them."""

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


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (torch.nn.utils.parametrizations.weight_norm, "0.parametrizations.weight.original0"),
        (torch.nn.utils.parametrizations.orthogonal, "0.parametrizations.weight.original"),
        (torch.nn.utils.weight_norm, "0.weight_g"),
        (torch.nn.utils.spectral_norm, "0.weight_orig"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parameters_of_which_weights_are_computed(make: Any, key: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(nn.Linear(3, 3, dtype=torch.float64)), nn.Linear(3, 1, dtype=torch.float64)).eval()
    space = EmpiricalRisk(model, nn.MSELoss(), []).space
    K = on(model, torch.eye(space.dim))
    with pytest.raises(UnsupportedError, match=f"From '{key}' a weight is computed"):
        pruned(model, K, 0.5, candidates=[key])
    assert pruned(model, K, 0.5, candidates=["0.bias", "1.weight"]).keys() == {"0.bias", "1.weight"}


def test_pruned_modules_are_refused() -> None:
    model, risk = network()
    pruned(model, curvature(risk, KFAC), 0.5, 1, candidates=["3.weight"])
    others = EmpiricalRisk(model, nn.CrossEntropyLoss(), risk.data, {"3.bias": model[3].bias})  # type: ignore[index]
    with pytest.raises(ValueError, match=r"'3.bias' belongs to a Linear that is pruned already.*remove"):
        pruned(model, curvature(others, DiagonalBlock), 0.5)
