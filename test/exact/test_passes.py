"""Awkward models, with derivatives that PyTorch gets wrong or lacks: every operator is that of the
same model in plain operations, or refuses the model by name.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn.functional import one_hot
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    GGN,
    ActivationHessian,
    DiagonalBlock,
    EmpiricalRisk,
    GGNFactor,
    Hessian,
    Jacobian,
    curvature,
)
from curvlinops_plus.errors import UnsupportedError
from test.cases import close, unchanged
from test.helpers import F64, normal, refuses_cdist
from test.middles import Net, Once, clipped, reversed_by_hook, stopped, without_tangents


def matrices(model: nn.Module, data: list[Any]) -> dict[str, Tensor]:
    """Gradient, Jacobian, GGN and Hessian of the mean cross-entropy by `torch.func`."""
    params = {key: p.detach() for key, p in model.named_parameters()}
    flat, count = torch.cat([p.flatten() for p in params.values()]), sum(y.numel() for _, y in data)

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(f, y, reduction="sum") / count

    def run(theta: Tensor, X: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in params.values()])
        values = {
            key: part.view_as(p) for (key, p), part in zip(params.items(), parts, strict=True)
        }
        return functional_call(model, values, (X,))

    rows, total = [], {"g": 0, "GGN": 0, "H": 0}
    for X, y in data:
        f, J = run(flat, X), jacrev(run)(flat, X).flatten(0, -2)
        M = hessian(lambda f, y=y: loss(f, y))(f).reshape(f.numel(), f.numel())
        of_batch = lambda theta, X=X, y=y: loss(run(theta, X), y)  # noqa: E731
        parts = {"g": jacrev(of_batch)(flat), "GGN": J.T @ M @ J, "H": hessian(of_batch)(flat)}
        rows, total = [*rows, J], {key: total[key] + part for key, part in parts.items()}
    return {"J": torch.cat(rows), **total}


# ------------------------------------------------------------------------------ in plain operations
class PlainNorm(nn.Module):
    """Batch norm, instance norm or group norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.norm = norm.weight, norm.bias, norm.eps, [norm]

    def forward(self, x: Tensor) -> Tensor:
        norm, shape = self.norm[0], (1, -1, *[1] * (x.ndim - 2))
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            rows, axes = x, (0, *range(2, x.ndim))
        else:
            rows, axes = x.reshape(len(x), getattr(norm, "num_groups", x.shape[1]), -1), (2,)
        mean, var = rows.mean(axes, keepdim=True), rows.var(axes, correction=0, keepdim=True)
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and not norm.training:
            mean, var = norm.running_mean.view(shape), norm.running_var.view(shape)
        h = ((rows - mean) / (var + self.eps).sqrt()).view_as(x)
        return h if self.weight is None else h * self.weight.view(shape) + self.bias.view(shape)


class PlainTable(nn.Module):
    """An embedding."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.padding = table.weight, table.padding_idx

    def forward(self, x: Tensor) -> Tensor:
        rows = one_hot(x, len(self.weight)).to(F64) @ self.weight
        return (
            rows
            if self.padding is None
            else torch.where((x == self.padding)[..., None], rows.detach(), rows)
        )


class PlainWeightNorm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.dim = norm.dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        axes = [axis for axis in range(v.ndim) if self.dim in (-1, None) or axis != self.dim]
        return v * g / v.square().sum(axes, keepdim=self.dim not in (-1, None)).sqrt()


class Checkpointed(nn.Module):
    """Runs a module, or a function, again in the backward pass."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


PLAIN: dict[type, Callable[[Any], nn.Module]] = {
    nn.Embedding: PlainTable,
    type(
        nn.utils.parametrizations.weight_norm(nn.Linear(1, 1)).parametrizations.weight[0]
    ): PlainWeightNorm,
    Checkpointed: lambda part: plain(part.inner),
} | dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm), PlainNorm)


def plain(model: nn.Module) -> nn.Module:
    """The same model in plain operations."""
    model = copy.deepcopy(model)
    if type(model) in PLAIN:
        return PLAIN[type(model)](model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in PLAIN:
                setattr(parent, name, PLAIN[type(child)](child))
    return model


# ------------------------------------------------------------------------------------------- models
class Deviates(torch.autograd.Function):
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


class Forces(nn.Module):
    """Minus the gradient of an energy with respect to the input."""

    def __init__(self, create_graph: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.create_graph = nn.Linear(4, 5), nn.Linear(5, 1), create_graph

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = self.last(self.first(x.requires_grad_()).tanh()).square().sum()
            return -torch.autograd.grad(energy, x, create_graph=self.create_graph)[0]


class PlainForces(Forces):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return -2 * self.last(h) * ((1 - h**2) * self.last.weight) @ self.first.weight


class Steps(nn.Module):
    """A linear map after a step along the gradient of a penalty, which forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((self.w**4).sum(), self.w, create_graph=True)
        return nn.functional.linear(x, self.w - 0.05 * g)


class PlainSteps(Steps):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.w - 0.05 * 4 * self.w**3)


def in_small_batches(net: nn.Module, h: Tensor) -> Tensor:
    """Another branch without a rule for tangents."""
    return without_tangents(net, h) if len(h) < 3 else h * h


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), *layers)


def rows(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Flatten(), nn.Linear(4, 3))


def tokens(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 3))


def trained(norm: Any) -> nn.Module:
    norm.running_mean.copy_(torch.randn(3))
    norm.running_var.copy_(torch.rand(3) + 0.5)
    return norm.eval()


Twin = Callable[[Any], nn.Module]


def middle(of: Any, twin: Any) -> tuple[Callable[[], nn.Module], Twin]:
    """A network with a function in the middle, and with another one."""
    return lambda: Net(of), lambda model: named(Net(twin), model)


def named(twin: nn.Module, model: nn.Module) -> nn.Module:
    twin.double().load_state_dict(model.state_dict())
    return twin


def with_gate(net: nn.Module, h: Tensor) -> Tensor:
    return h.sigmoid().detach() * h


#: Each model, and how its twin is made.
RIGHT: dict[str, tuple[Callable[[], nn.Module], Twin]] = {
    "a gate without gradients": middle(stopped, with_gate),
    "no rule for tangents": middle(without_tangents, lambda net, h: h * h),
    "wrong tangents": middle(lambda net, h: Deviates.apply(h), lambda net, h: h),
    "nothing arrives": middle(lambda net, h: h.detach(), lambda net, h: h.detach()),
    "a later branch without tangents": middle(in_small_batches, lambda net, h: h * h),
    "batch norm of one image": (
        lambda: images(trained(nn.BatchNorm2d(3)), nn.Tanh(), nn.Conv2d(3, 3, 1)),
        plain,
    ),
    "batch norm in training": (lambda: images(nn.BatchNorm2d(3)), plain),
    "instance norm": (lambda: images(nn.InstanceNorm2d(3, affine=True)), plain),
    "group norm": (lambda: rows(nn.Unflatten(1, (2, 1, 2)), nn.GroupNorm(2, 2, eps=1e-2)), plain),
    "group norm of one group": (lambda: rows(nn.GroupNorm(1, 4, affine=False)), plain),
    "group norm run again": (
        lambda: rows(Checkpointed(nn.Sequential(nn.GroupNorm(2, 4), nn.Tanh()))),
        plain,
    ),
    "weight norm": (lambda: rows(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), plain),
    "weight norm of a matrix": (
        lambda: rows(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4), dim=None)),
        plain,
    ),
    "padding": (lambda: tokens(nn.Embedding(7, 2, padding_idx=-5)), plain),
    "padding run again": (lambda: tokens(Checkpointed(nn.Embedding(7, 2, padding_idx=3))), plain),
    "a table scaled by frequency": (
        lambda: tokens(nn.Embedding(7, 2, scale_grad_by_freq=True)),
        plain,
    ),
    "forces": (Forces, lambda model: named(PlainForces(), model)),
    "a step inside": (Steps, lambda model: named(PlainSteps(), model)),
}

#: What `curvature` refuses.
NOT_RECORDED = ("nothing arrives", "batch norm in training", "forces")


def with_data(
    make: Callable[[], nn.Module], dtype: torch.dtype = F64
) -> tuple[nn.Module, list[Any]]:
    """A model, and batches of three, one and two examples."""
    torch.manual_seed(0)
    model = make().to(dtype)
    first = next(p for p in model.parameters())
    if any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in model.modules()):
        X = [
            torch.tensor([[0, 1, 5], [2, 2, 3], [4, 2, 6]]),
            torch.tensor([[3, 3, 1]]),
            torch.tensor([[3, 5, 2]] * 2),
        ]
    elif first.ndim == 4:
        X = [
            normal(n, 2, 4, 5, seed=n).to(dtype, memory_format=torch.channels_last)
            for n in (3, 1, 2)
        ]
    else:
        X = [normal(n, first.shape[-1], seed=n).to(dtype) for n in (3, 1, 2)]
    return model, [(x, copy.deepcopy(model)(x.clone()).argmin(1)) for x in X]


@pytest.mark.parametrize("name", RIGHT)
def test_every_operator_is_that_of_plain_operations(name: str) -> None:
    make, twin = RIGHT[name]
    model, data = with_data(make)
    expected = matrices(twin(model), data)
    with unchanged(model, data):
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
        eye, V, m = (
            torch.eye(risk.space.dim, dtype=F64),
            normal(risk.space.dim, 2),
            len(expected["J"]),
        )
        close(torch.cat([g.flatten() for g in risk.gradient().values()]), expected["g"])
        for kind, key in ((GGN, "GGN"), (Hessian, "H"), (Jacobian, "J")):
            A = kind(risk)
            close(A @ V[:, 0], expected[key] @ V[:, 0], what=f"{key} v")
            close(A.to_dense(), expected[key], what=key)
            close(A @ eye, expected[key], what=f"{key} V")
            if kind is not Hessian:
                close(
                    kind(risk, chunk_size=1) @ V, expected[key] @ V, what=f"{key}, column by column"
                )
        close(GGN(risk).quadratic_form(V.T), V.T @ expected["GGN"] @ V)
        close(Jacobian(risk).T @ torch.eye(m, dtype=F64), expected["J"].T)
        B = GGNFactor(risk).to_dense()
        close(B @ B.T, expected["GGN"])
        if name not in NOT_RECORDED:
            close(curvature(risk, DiagonalBlock).diagonal(), expected["GGN"].diagonal())
        if isinstance(model, nn.Sequential) and not isinstance(
            model[0], (nn.Embedding, Checkpointed)
        ):
            found = ActivationHessian(risk, ("0", "output", 0)).to_dense()
            close(found, torch.block_diag(*of_activations(twin(model), data)))


def of_activations(model: Any, data: list[Any]) -> Iterator[Tensor]:
    """Hessians with respect to what the first layer returns, of the batches."""
    count = sum(y.numel() for _, y in data)
    for X, y in data:
        z = model[0](X).detach()
        loss = lambda z, y=y: nn.functional.cross_entropy(model[1:](z), y, reduction="sum") / count  # noqa: E731
        yield torch.autograd.functional.hessian(loss, z).reshape(z.numel(), z.numel())  # type: ignore[union-attr]


def test_gradients_that_a_hook_reverses() -> None:
    """The matrices of what goes back; the Hessian is not that of a function."""
    torch.manual_seed(0)
    model = Net(reversed_by_hook).double()
    twin = named(Net(lambda net, h: 2 * h.tanh().detach() - h.tanh()), model)
    data = [(normal(n, 3, seed=n), torch.arange(n) % 2) for n in (5, 3)]
    risk, expected = EmpiricalRisk(model, nn.CrossEntropyLoss(), data), matrices(twin, data)
    for v in (
        normal(risk.space.dim),
        torch.ones(risk.space.dim, dtype=F64),
        normal(risk.space.dim, 2),
    ):
        close(GGN(risk) @ v, expected["GGN"] @ v)
        close(Jacobian(risk) @ v, expected["J"] @ v)


def test_vectors_whose_squares_underflow() -> None:
    """As the last terms of a Neumann series are."""
    torch.manual_seed(0)
    risk = EmpiricalRisk(
        nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3)),
        nn.CrossEntropyLoss(),
        [(torch.rand(7, 10), torch.arange(7) % 3)],
    )
    v = torch.randn(risk.space.dim)
    for size in (1e-21, 1e-22, 1e-23):
        torch.testing.assert_close(
            GGN(risk) @ (size * v) / size, GGN(risk) @ v, rtol=1e-4, atol=1e-6
        )


def test_columns_of_a_group_norm_before_any_vector() -> None:
    """PyTorch's second derivative of several columns is wrong for one image of as many positions as
    channels.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 1), nn.GroupNorm(1, 3, eps=0.1), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)
    )
    data = [(normal(1, 2, 3), torch.tensor([1]))]
    expected = matrices(plain(model.double()), data)
    close(Hessian(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)).to_dense(), expected["H"])


# ------------------------------------------------------------------------------------------ refused
class RawBag(nn.Module):
    """By a function that is not replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.embedding_bag(
            self.bag.weight, x.flatten(), torch.arange(0, x.numel(), x.shape[1])
        )[0]


def distances(net: nn.Module, h: Tensor) -> Tensor:
    return torch.cdist(h[:, None], h[:, None] + 1).flatten(1) * h


def of_activation(risk: EmpiricalRisk) -> ActivationHessian:
    return ActivationHessian(risk, ("a", "output", 0))


ALL = (GGN, Hessian, Jacobian)
ALL_OF_NET = (*ALL, of_activation)
#: Each model, the operators that refuse it, and the words.
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], str]] = {
    "once differentiable": (
        lambda: Net(lambda net, h: Once.apply(h)),
        ALL,
        "can be differentiated once.*Once",
    ),
    "clipped gradients": (
        lambda: Net(clipped),
        (GGN, Jacobian),
        "not the derivative of its forward pass",
    ),
    "distances": (
        lambda: Net(distances),
        ALL_OF_NET,
        "uses cdist, which PyTorch can't differentiate twice. Write it",
    ),
    "raw bags": (RawBag, ALL, "uses embedding_bag, which PyTorch can't differentiate twice"),
    "forces without a graph": (
        lambda: Forces(False),
        ALL,
        "does not depend .* without create_graph=True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, kinds, words = REFUSED[name]
    model, data = with_data(make)
    raw = name in (
        "distances",
        "raw bags",
        "once differentiable",
    )  # rows of a Jacobian go back once
    for kind in kinds:
        for form in ("vector", *(["dense"] if kind not in (GGN, Jacobian) or not raw else [])):
            refused: AbstractContextManager[object] = pytest.raises(UnsupportedError, match=words)
            refused = (
                refuses_cdist(words) if name == "distances" else refused
            )  # draws random numbers
            with unchanged(model), refused:
                A: Any = kind(EmpiricalRisk(model, nn.CrossEntropyLoss(), data))
                n = A.shape[1]
                _ = A.to_dense() if form == "dense" else A @ normal(n)
    if raw:
        J = Jacobian(EmpiricalRisk(model, nn.CrossEntropyLoss(), data))
        f = torch.cat([model(x).flatten() for x, _ in data])
        rows = [
            torch.autograd.grad(number, [*model.parameters()], retain_graph=True) for number in f
        ]
        close(J.to_dense(), torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))


def test_a_dense_ggn_by_rows_goes_back_once() -> None:
    """A bag of embeddings can't be differentiated twice, and rows of the Jacobian of few outputs
    needn't be.
    """
    model, data = with_data(RawBag)
    numbers = sum(len(y) for _, y in data)
    f = torch.cat([model(x).flatten() for x, _ in data])
    if sum(p.numel() for p in model.parameters()) <= len(f):
        pytest.skip("columns are fewer")
    rows = [torch.autograd.grad(number, [*model.parameters()], retain_graph=True) for number in f]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    p = torch.softmax(f.detach().view(numbers, -1), 1)
    H = torch.block_diag(*[torch.diag(q) - torch.outer(q, q) for q in p]) / numbers
    close(GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), data)).to_dense(), J.T @ H @ J)


@pytest.mark.parametrize("columns", [1, 3])
def test_first_products_say_nothing_about_pytorch_itself(columns: int) -> None:
    """In a new process, where forward mode is used for the first time and any warning is an
    error.
    """
    code = (
        "import torch, warnings\n"
        "from curvlinops_plus import GGN, EmpiricalRisk\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())\n"
        "data = [(torch.rand(5, 3), torch.rand(5, 2))]\n"
        "filters = list(warnings.filters)\n"
        f"GGN(EmpiricalRisk(model, torch.nn.MSELoss(), data)) @ torch.ones(8, {columns})\n"
        "assert warnings.filters == filters\n"
    )
    run = [sys.executable, "-W", "error:`torch.jit.script`", "-c", code]
    shown = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
