"""Models that ask for their parameters in other ways than by an attribute, while others stand in
their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import EKFAC, CurvatureEstimator, EmpiricalRisk, FullBlock, Jacobian, curvature
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact import GGN, GGNFactor, Hessian
from curvlinops_plus.risk.preserve import training_modules
from test.cases import close
from test.helpers import seeded
from test.nets import tanh_net


class Asks(nn.Module):
    """`W tanh(V x)`, whose `W` is read in a way of its own."""

    def __init__(
        self, ask: Callable[[Any], Tensor], keep: Callable[[Tensor], Any] = lambda w: None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.inner = nn.Parameter(torch.rand(2, 3)), nn.Linear(3, 3, bias=False)
        self.double()
        self.ask, self.kept = ask, keep(self.w)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x).tanh(), self.ask(self))


WAYS: dict[str, Callable[[Any], Tensor]] = {
    "get_parameter": lambda m: m.get_parameter("w"),
    "named_parameters": lambda m: dict(m.named_parameters())["w"],
    "a copy of _parameters": lambda m: {**m._parameters}["w"],
    "state_dict": lambda m: m.state_dict(keep_vars=True)["w"],
}


def _risk(model: nn.Module, params: Any = None) -> EmpiricalRisk:
    generator = seeded(1)
    data = [
        (
            torch.rand(6, 3, generator=generator).double(),
            torch.rand(6, 2, generator=generator).double(),
        )
    ]
    return EmpiricalRisk(model, nn.MSELoss(reduction="sum"), data, params)


def _jacobian(model: nn.Module, X: Tensor) -> Tensor:
    """By plain autograd, at the model's own parameters."""
    params = list(model.parameters())
    rows = [torch.autograd.grad(f, params, retain_graph=True) for f in model(X).flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.mark.filterwarnings("ignore:.*exact diagonal")
@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_a_parameter_gives_the_replaced_one(name: str) -> None:
    model = Asks(WAYS[name])
    ((X, y),) = _risk(model).data  # type: ignore[misc]
    J, params = _jacobian(model, X), list(model.parameters())
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad((model(X) - y).square().sum(), params)]
    )

    def loss(W: Tensor, V: Tensor) -> Tensor:
        return (F.linear(F.linear(X, V).tanh(), W) - y).square().sum()

    rows = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in params))
    H = torch.cat(
        [torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(params, rows)]
    )
    close(Jacobian(_risk(model)).to_dense(), J)
    close(GGN(_risk(model)).to_dense(), 2 * J.T @ J)
    factor = GGNFactor(_risk(model)).to_dense()
    close(factor @ factor.T, 2 * J.T @ J)
    close(Hessian(_risk(model)).to_dense(), H)
    close(torch.cat([g.flatten() for g in _risk(model).gradient().values()]), gradient)
    for approximation in (FullBlock, EKFAC):
        K = curvature(_risk(model), approximation)
        close(torch.as_tensor(K.trace), 2 * J.square().sum())


USES: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "GGN": lambda risk: GGN(risk).to_dense(),
    "Hessian": lambda risk: Hessian(risk).to_dense(),
    "Jacobian": lambda risk: Jacobian(risk).to_dense(),
    "gradient": lambda risk: risk.gradient(),
    "EKFAC": lambda risk: curvature(risk, EKFAC),
}
KEEPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda w: [w], lambda m: m.kept[0]),
    "view": (lambda w: [w.T], lambda m: m.kept[0].T),
    "beside the attribute": (lambda w: [w], lambda m: m.w + m.kept[0]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_parameters_kept_elsewhere_are_refused_by_name(
    keep: Any, use: Callable[[EmpiricalRisk], Any]
) -> None:
    model = Asks(keep[1], keep[0])
    words = r"layer 'inner|layer ''|reads the parameters \['w'\] from elsewhere than the attributes.*nn\.ParameterList"
    with pytest.raises(UnsupportedError, match=words):
        use(_risk(model))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "assigned": lambda m: m.load_state_dict(
        {k: 2 * v for k, v in m.state_dict().items()}, assign=True
    ),
    "a new module": lambda m: setattr(m, "inner", nn.Linear(3, 3, bias=False).double()),
    "parametrized": lambda m: nn.utils.parametrizations.orthogonal(m.inner),
}
LATER: dict[str, Callable[[EmpiricalRisk], Any]] = {
    **USES,
    "loss": lambda risk: risk.loss(),
    "update": lambda risk: CurvatureEstimator(risk, EKFAC).update(risk.data[0]),  # type: ignore[index]
    "listen": lambda risk: _listen(CurvatureEstimator(risk, EKFAC), risk),
}


def _listen(running: CurvatureEstimator, risk: EmpiricalRisk) -> None:
    ((X, y),) = risk.data  # type: ignore[misc]
    with running.listen((X, y)):
        nn.functional.mse_loss(risk.model(X), y)


@pytest.mark.parametrize("use", LATER.values(), ids=LATER)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_models_with_other_tensors_than_when_the_risk_was_made(
    change: Any, use: Callable[[EmpiricalRisk], Any]
) -> None:
    risk = _risk(Asks(lambda m: m.w))
    use(risk)
    change(risk.model)
    with pytest.raises(
        ValueError, match=r"has other tensors in place of its parameters or modules \['"
    ):
        use(risk)


def test_modules_without_parameters_may_be_replaced() -> None:
    model = tanh_net(3, 3, 2).double()
    risk = _risk(model)
    model[1] = nn.ReLU()
    close(GGN(risk).to_dense(), GGN(_risk(model)).to_dense())


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Dropout(0.1), "'0' (Dropout)"),
        (nn.BatchNorm1d(5), "'0' (BatchNorm1d)"),
        (nn.LSTM(5, 5, num_layers=2, dropout=0.1), "'0' (LSTM)"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "'0' (MultiheadAttention)"),
        (nn.Dropout(0.0), ""),
        (nn.LSTM(5, 5, num_layers=2), ""),
        (nn.MultiheadAttention(4, 2), ""),
        (nn.ReLU(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_in_training_mode(module: nn.Module, name: str) -> None:
    assert training_modules(nn.Sequential(module)) == name
    assert training_modules(nn.Sequential(module).eval()) == ""
