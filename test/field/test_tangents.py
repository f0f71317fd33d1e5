"""Operations whose tangents are lost, partly or wholly, and functions that have no second
derivative.

Products must be those of a Jacobian from plain backward passes, one for each output, or be refused
by name. In all of these cases `⟨M J̃ v, J̃ v⟩` and `⟨v, Jᵀ M J̃ v⟩` agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from curvlinops_plus import (
    GGN,
    EmpiricalRisk,
    GGNFactor,
    Hessian,
    Jacobian,
    NumericsError,
    UnsupportedError,
)
from test.cases import close
from test.helpers import normal

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")


class Net(nn.Module):
    """Something at the end of a network, or in the middle."""

    def __init__(self, strange: Callable[[Tensor], Any], last: bool = True) -> None:
        super().__init__()
        self.first, self.head, self.strange, self.last = (
            nn.Linear(4, 3),
            nn.Linear(3, 3),
            strange,
            last,
        )
        self.double()
        for seed, p in enumerate(self.parameters()):
            p.data = 0.7 * normal(*p.shape, seed=seed + 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.strange(self.head(h)) if self.last else self.head(self.strange(h))


def scattered(h: Tensor) -> Tensor:
    """Products of pairs; the operation has a tangent of zero."""
    ones = torch.ones(len(h), 3, dtype=h.dtype)
    index = torch.tensor([0, 1, 1]).expand(len(h), 3)
    return ones.scatter_reduce(1, index, h, "prod")


def selected(h: Tensor) -> Tensor:
    return (
        h.new_ones(3, len(h)).index_reduce(0, torch.tensor([0, 2, 2]), h.T.contiguous(), "prod").T
    )


def stopped_norm(h: Tensor) -> Tensor:
    with torch.no_grad():
        norm = h.norm(dim=1, keepdim=True)
    return h / norm


def stopped_part(h: Tensor) -> Tensor:
    with torch.no_grad():
        other = h[:, :1] * 2
    return torch.cat([h[:, 1:], other * h[:, :1]], 1)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class ByHand(torch.autograd.Function):
    """Its forward mode forgets a factor."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.cos(x) * g

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 0 * t


def of_several(h: Tensor) -> Tensor:
    """Code that knows when it is vectorised, and does without derivatives then."""
    vectorised = torch._C._functorch.peek_interpreter_stack() is not None
    return torch.sin(h.detach() if vectorised else h)


LOST: dict[str, Callable[[], nn.Module]] = {
    "scatter_reduce, last": lambda: Net(scattered),
    "scatter_reduce, in the middle": lambda: Net(scattered, last=False),
    "index_reduce": lambda: Net(selected),
    "logcumsumexp of far terms": lambda: Net(lambda h: (30 * h).logcumsumexp(1)),
    "a norm without gradient, last": lambda: Net(stopped_norm),
    "a norm without gradient, in the middle": lambda: Net(stopped_norm, last=False),
    "a factor without gradient": lambda: Net(stopped_part),
    "once differentiable, last": lambda: Net(Once.apply),
    "once differentiable, in the middle": lambda: Net(Once.apply, last=False),
    "a wrong jvp": lambda: Net(ByHand.apply),
    "a wrong jvp of one output": lambda: Net(
        lambda h: torch.cat([h[:, :2], ByHand.apply(h[:, 2:])], 1)
    ),
    "wrong for several columns": lambda: Net(of_several),
}


def jacobian(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    numbers = torch.cat([model(x).flatten() for x, _ in data])
    rows = [
        torch.autograd.grad(f, list(model.parameters()), retain_graph=True, materialize_grads=True)
        for f in numbers
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def data_of(sizes: tuple[int, ...] = (3, 4)) -> list[tuple[Tensor, Tensor]]:
    return [(normal(n, 4, seed=n), normal(n, 3, seed=n + 9)) for n in sizes]


#: From the risk, the matrix 2/m JᵀJ (m outputs) or J, and a matrix of columns: got and expected.
PRODUCTS: dict[str, Callable[[EmpiricalRisk, Tensor, Tensor], tuple[Any, Any]]] = {
    "GGN, one column": lambda risk, J, V: (GGN(risk) @ V[:, 0], 2 / len(J) * J.T @ (J @ V[:, 0])),
    "GGN, a column of zeros but one": lambda risk, J, V: (
        GGN(risk) @ torch.eye(len(V), dtype=V.dtype)[-1],
        2 / len(J) * J.T @ J[:, -1],
    ),
    "GGN, several": lambda risk, J, V: (GGN(risk) @ V, 2 / len(J) * J.T @ (J @ V)),
    "GGN, dense": lambda risk, J, V: (GGN(risk).to_dense(), 2 / len(J) * J.T @ J),
    "GGN, quadratic form": lambda risk, J, V: (
        GGN(risk).quadratic_form(V.T),
        2 / len(J) * (J @ V).T @ (J @ V),
    ),
    "GGN, pieces of columns": lambda risk, J, V: (
        GGN(risk, chunk_size=2) @ V,
        2 / len(J) * J.T @ (J @ V),
    ),
    "factor": lambda risk, J, V: (
        (lambda u: (u * u).sum())((GGNFactor(risk).T @ V[:, 0]).flatten()),
        2 / len(J) * (J @ V[:, 0]).square().sum(),
    ),
    "Jacobian, one column": lambda risk, J, V: (Jacobian(risk) @ V[:, 0], J @ V[:, 0]),
    "Jacobian, several": lambda risk, J, V: (Jacobian(risk) @ V, J @ V),
    "Jacobian, transposed": lambda risk, J, V: (
        Jacobian(risk).T @ normal(len(J)),
        J.T @ normal(len(J)),
    ),
    "Jacobian, dense": lambda risk, J, V: (Jacobian(risk).to_dense(), J),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", LOST)
def test_products_are_those_of_backward_passes(name: str, product: str) -> None:
    model, data = LOST[name](), data_of()
    J = jacobian(model, data)
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    try:
        got, expected = PRODUCTS[product](risk, J, normal(J.shape[1], 3, seed=5))
    except UnsupportedError as error:
        assert name.startswith("once")  # all else is computed
        assert product not in ("Jacobian, transposed", "Jacobian, dense")  # which go back once
        assert "can be differentiated once" in str(error)  # noqa: PT017
        assert "Once" in str(error)  # noqa: PT017
    else:
        close(torch.as_tensor(got).flatten(), torch.as_tensor(expected).flatten(), 1e-7)


@pytest.mark.parametrize("name", [name for name in LOST if not name.startswith("once")])
def test_a_dense_ggn_of_more_outputs_than_parameters(name: str) -> None:
    """It is made of columns, and not of the rows of the Jacobian."""
    model, data = LOST[name](), data_of((9, 10))
    J = jacobian(model, data)
    close(GGN(EmpiricalRisk(model, nn.MSELoss(), data)).to_dense(), 2 / len(J) * J.T @ J, 1e-7)
    close(Jacobian(EmpiricalRisk(model, nn.MSELoss(), data)).to_dense(), J, 1e-7)


class BySize(nn.Module):
    """Does something else with the outputs of batches of four."""

    def __init__(self, strange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.strange = Net(lambda h: h), strange

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return self.strange(h) if len(x) == 4 else h


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("strange", [scattered, ByHand.apply, lambda h: (100 * h).logcumsumexp(1)])
def test_batches_of_another_size_lose_tangents(
    strange: Callable[[Tensor], Tensor], product: str
) -> None:
    model, data = BySize(strange), data_of((3, 3, 4))
    J = jacobian(model, data)
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    got, expected = PRODUCTS[product](risk, J, normal(J.shape[1], 3, seed=5))
    close(torch.as_tensor(got).flatten(), torch.as_tensor(expected).flatten(), 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["scatter_reduce, last", "a wrong jvp", "a wrong jvp of one output", "index_reduce"]
)
def test_in_single_and_half_precision(name: str, dtype: torch.dtype) -> None:
    model = LOST[name]().to(dtype)
    data = [(x.to(dtype), y.to(dtype)) for x, y in data_of()]
    v = normal(24 + 3).to(torch.float32)
    wide = LOST[name]()
    J = jacobian(wide, data_of())
    product = GGN(EmpiricalRisk(model, nn.MSELoss(), data)) @ v
    expected = 2 / len(J) * J.T @ (J @ v.double())
    close(product.double(), expected, 1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("factor", [None, 1.0, 1e4])
def test_one_small_parameter_that_loses_its_tangent(
    factor: float | None, dtype: torch.dtype
) -> None:
    """Among many others that don't: each counts as much as all others, whatever its gradient."""
    small, tolerance = {torch.float64: (1e-7, 1e-8), torch.float32: (1e-5, 1e-3)}[dtype]
    size = small if factor is None else factor

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *[layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.Tanh())]
            )
            self.shift = nn.Parameter(torch.full((1,), 0.3))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + size * ByHand.apply(self.shift)

    torch.manual_seed(0)
    model = Scaled().to(dtype)
    data = [(normal(5, 6).to(dtype), normal(5, 6).to(dtype))]
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    keys = list(risk.params)
    offset = sum(p.numel() for p in list(risk.params.values())[: keys.index("shift")])
    unit = torch.zeros(risk.space.dim, dtype=dtype)
    unit[offset] = 1.0
    found = (GGN(risk) @ unit)[offset]
    expected = (
        2 * (size * torch.cos(model.shift.detach().double())) ** 2
    )  # the mean of thirty equal squares
    close(found, expected[0], tolerance)


def test_a_wrong_second_derivative_where_zero_is_singular() -> None:
    """Logarithms of gradients in a backward pass: two backward passes must not begin at zero."""

    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # g exp(x), by logarithms
            (x,) = ctx.saved_tensors
            return g.sign() * (g.abs().log() + x).exp()

    model, data = Net(Log.apply), data_of()
    J, v = jacobian(model, data), normal(27)
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    close(GGN(risk) @ v, 2 / len(J) * J.T @ (J @ v), 1e-7)
    close(Jacobian(risk) @ v, J @ v, 1e-7)


# ----------------------------------------------------------------------------- no second derivative
@pytest.mark.parametrize("form", ["vector", "dense"])
@pytest.mark.parametrize("where", ["last", "middle", "below a frozen head", "loss"])
def test_a_hessian_through_once_differentiable_is_refused(where: str, form: str) -> None:
    model = Net((lambda h: h) if where == "loss" else Once.apply, last=where == "last")
    loss: Any = nn.MSELoss()
    if where == "below a frozen head":
        model.head.requires_grad_(False)
    if where == "loss":
        loss = lambda f, y: Once.apply(f - y).mean()  # noqa: E731
    H = Hessian(EmpiricalRisk(model, loss, data_of()))
    with pytest.raises(UnsupportedError, match=r"once_differentiable`\): Once"):
        _ = H.to_dense() if form == "dense" else H @ normal(H.shape[1])


def test_a_loss_that_is_once_differentiable_has_no_ggn() -> None:
    loss: Any = lambda f, y: Once.apply(f - y).mean()  # noqa: E731
    G = GGN(EmpiricalRisk(Net(torch.sin), loss, data_of()))
    with pytest.raises(UnsupportedError, match="can be differentiated once"):
        _ = G @ normal(G.shape[1])


# ------------------------------------------------------------------------------- what is not finite
class Distance(nn.Module):
    """`exp(-|x - c|)` at a distance of zero."""

    def __init__(self, by: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.c, self.by = nn.Parameter(torch.ones(1, 3).double()), by

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-self.by(x - self.c))


DISTANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "root of a sum": lambda d: d.square().sum(1, keepdim=True).sqrt(),
    "power": lambda d: d.square().sum(1, keepdim=True).pow(0.5),
    "norm by hand": lambda d: (d * d).sum(1, keepdim=True) ** 0.5,
}


@pytest.mark.parametrize("kind", [GGN, Jacobian, Hessian, GGNFactor])
@pytest.mark.parametrize("name", DISTANCES)
def test_products_that_are_not_finite_are_refused_by_name(name: str, kind: Any) -> None:
    data = [(torch.ones(2, 3).double(), torch.zeros(2, 1).double())]
    A = kind(EmpiricalRisk(Distance(DISTANCES[name]), nn.MSELoss(), data))
    for product in (lambda: A @ torch.ones(A.shape[1]).double(), A.to_dense):
        with pytest.raises(
            (NumericsError, UnsupportedError), match=f"{kind.__name__}|not the derivative"
        ):
            product()


def test_vectors_that_are_not_finite_are_the_callers() -> None:
    model = Net(torch.sin)
    G = GGN(EmpiricalRisk(model, nn.MSELoss(), data_of()))
    v = torch.ones(27).double()
    v[3] = torch.nan
    assert bool((G @ v).isnan().any())
    model.first.bias.data[0] = torch.inf
    model.head.weight.data[0] = torch.nan
    with pytest.raises(
        NumericsError, match=r"GGN has NaN.*\['first.bias', 'head.weight'\] are not"
    ):
        _ = G @ torch.ones(27).double()
