"""Spreads of outputs by closed forms and by columns, against Jacobians of one example at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    Laplace,
    curvature,
)
from curvlinops_plus.applications import output_covariance
from test.cases import close
from test.helpers import normal, seeded

pytestmark = pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")
N, T, C = 5, 3, 12


class Wrapped(nn.Module):
    """A body, and what a function makes of it and a head."""

    def __init__(self, head: nn.Module, of: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.of = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), head, of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.head, self.body(x))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some, self.others = nn.Linear(3, 5), nn.Linear(3, C - 5, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([self.some(z), self.others(z)], -1)


LINEAR, PLAIN = nn.Linear, lambda head, z: head(z)
SCALES = normal(C, seed=3)
#: Head, what is done with it, axes of the inputs between examples and features, and whether its
#: numbers are the outputs.
HEADS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...], bool]] = {
    "linear": (lambda: LINEAR(3, C), PLAIN, (), True),
    "no bias": (lambda: LINEAR(3, C, bias=False), PLAIN, (), True),
    "tokens": (lambda: LINEAR(3, C), lambda head, z: head(z).mT, (T,), True),
    "last token": (lambda: LINEAR(3, C), lambda head, z: head(z)[:, -1], (T,), True),
    "two calls": (
        lambda: LINEAR(3, C),
        lambda head, z: torch.stack([head(z[:, 1]), head(z[:, 0])], -1),
        (2,),
        True,
    ),
    "softcap": (lambda: LINEAR(3, C), lambda head, z: 2 * torch.tanh(head(z) / 2), (), True),
    "scales": (lambda: LINEAR(3, C), lambda head, z: head(z) * SCALES, (), True),
    "turned": (lambda: LINEAR(3, C), lambda head, z: head(z).flip(-1), (), True),
    "relu": (lambda: LINEAR(3, C), lambda head, z: head(z).relu(), (), True),
    "some": (lambda: LINEAR(3, C + 2), lambda head, z: head(z)[:, 1:-1], (), True),
    "convolution": (
        lambda: nn.Conv1d(3, C, 2, padding=1),
        lambda head, z: head(z.mT),
        (T,),
        True,
    ),
    "two heads": (TwoHeads, PLAIN, (), True),
    "sum of calls": (lambda: LINEAR(3, C), lambda head, z: head(z).sum(1), (2,), False),
    "calls side by side": (
        lambda: LINEAR(3, C // 2),
        lambda head, z: torch.cat([head(z), head(z)], -1),
        (),
        True,
    ),
    "shared by outputs": (
        lambda: LINEAR(3, C // 2),
        lambda head, z: head(z).repeat(1, 2),
        (),
        False,
    ),
    "log-softmax": (lambda: LINEAR(3, C), lambda head, z: head(z).log_softmax(-1), (), False),
    "grouped": (
        lambda: nn.Conv1d(3, C, 1, groups=3),
        lambda head, z: head(z.mT),
        (T,),
        False,
    ),
}
APPROXIMATIONS: dict[str, Any] = {
    "KFAC": lambda risk: curvature(risk, KFAC),
    "EKFAC apart": lambda risk: curvature(risk, EKFAC, separate_weight_and_bias=True),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock),
    "full": lambda risk: curvature(risk, FullBlock),
    "inputs alone": lambda risk: curvature(risk, KFAC, vectors=ForwardOnly()),
}


def risk_of(name: str, loss: Any = None) -> tuple[EmpiricalRisk, Tensor]:
    make, of, axes, _ = HEADS[name]
    torch.manual_seed(0)
    model = Wrapped(make(), of).double()
    X = normal(N, *axes, 4, seed=1)
    f = model(X)
    y = torch.randint(C, (N, *f.shape[2:]), generator=seeded(2))
    return EmpiricalRisk(model, loss or nn.CrossEntropyLoss(), [(X, y)]), X


def moments(risk: EmpiricalRisk, la: Laplace, X: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and covariances [N, R, C, C], from Jacobians of single examples."""
    params = {key: p.detach() for key, p in risk.params.items()}

    def of_example(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(risk.model, p, (x[None],))[0].movedim(0, -1).reshape(-1, C)

    rows = [jacrev(lambda p, x=x: of_example(p, x))(params) for x in X]
    J = torch.stack([torch.cat([row[k].flatten(2) for k in params], -1) for row in rows])
    mean = torch.stack([of_example(params, x) for x in X])
    return mean, J @ la.posterior.to_dense() @ J.mT


def squeezed(t: Tensor) -> Tensor:
    return t[:, 0] if t.shape[1] == 1 else t


@pytest.mark.one_in(10, all_of=("calls side by side", "turned"))
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("name", HEADS)
def test_spreads_are_those_of_jacobians(
    name: str, approximation: str, columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_covariance, "_ROWS_PER_COLUMN", 0 if columns else math.inf)
    seen: Counter[str] = Counter()
    plain = output_covariance._Derivatives._output_layers

    def noted(self: Any, *args: Any) -> Any:
        found = plain(self, *args)
        seen.update(layer.name.split(".")[0] for layer in found)
        return found

    monkeypatch.setattr(output_covariance._Derivatives, "_output_layers", noted)
    risk, X = risk_of(name)
    la = Laplace(APPROXIMATIONS[approximation](risk), 2.0)
    mean, expected = moments(risk, la, X)
    found = la.outputs(X)
    close(found[0], squeezed(mean))
    close(found[1], squeezed(expected))
    seen.clear()
    variances = expected.diagonal(dim1=-2, dim2=-1)
    p = (mean / (1 + math.pi / 8 * variances).sqrt()).softmax(-1)
    close(la.predict(X).movedim(1, -1).reshape(N, -1, C), p)
    is_known = HEADS[name][3] and approximation != "full"
    assert seen.keys() == ({"head"} if is_known else set())
    from curvlinops_plus.applications.predictive import _bridge

    bridge = _bridge(mean, variances, expected.sum(-1))
    close(la.predict(X, "bridge").movedim(1, -1).reshape(N, -1, C), bridge)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_layers_with_examples_on_another_axis(
    columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Positions(nn.Module):
        """A layer on [T, N, features] in the middle."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3 * T, C)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.body(x.transpose(0, 1)))
            return self.head(z.transpose(0, 1).flatten(1))

    monkeypatch.setattr(output_covariance, "_ROWS_PER_COLUMN", 0 if columns else math.inf)
    torch.manual_seed(0)
    model, X = Positions().double(), normal(N, T, 4, seed=1)
    y = torch.arange(N) % C
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)], example_axis={"body": 1})
    la = Laplace(curvature(risk, EKFAC), 2.0)
    mean, expected = moments(risk, la, X)
    found = la.outputs(X)
    close(found[0], mean[:, 0])
    close(found[1], expected[:, 0])


def test_columns_are_not_taken_where_backward_passes_have_wrong_derivatives() -> None:
    class Doubled(torch.autograd.Function):
        """The identity, whose backward pass hides its argument from autograd."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return g.detach() + 0 * g

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 2), nn.Linear(2, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(Doubled.apply(self.body(x)))  # type: ignore[arg-type]

    torch.manual_seed(0)
    model, X = Hidden().double(), normal(N, 4, seed=1)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, torch.arange(N) % C)])
    la = Laplace(curvature(risk, EKFAC), 2.0)
    mean = model(X)
    params = [*model.parameters()]
    rows = [torch.autograd.grad(f, params, retain_graph=True) for f in mean.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(N, C, -1)
    close(la.outputs(X)[0], mean)
    close(la.outputs(X)[1], J @ la.posterior.to_dense() @ J.mT)
