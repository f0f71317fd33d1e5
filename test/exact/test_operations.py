"""Operations whose derivatives PyTorch gets wrong or lacks, against the same model in plain operations."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from cases import close, unchanged
from helpers import F64, normal
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn.functional import batch_norm, embedding, one_hot
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    GGN,
    ActivationHessian,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    GGNFactor,
    Hessian,
    Jacobian,
    curvature,
)
from curvlinops_plus.errors import UnsupportedError


class PlainNorm(nn.Module):
    """Batch norm with running statistics, or instance norm, in plain operations."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.fixed = (
            (norm.running_mean, norm.running_var) if isinstance(norm, nn.modules.batchnorm._BatchNorm) else None
        )

    def forward(self, x: Tensor) -> Tensor:
        shape, axes = (1, -1, *[1] * (x.ndim - 2)), tuple(range(2, x.ndim))
        if self.fixed is None:
            mean, var = x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)
        else:
            mean, var = (t.view(shape) for t in self.fixed)
        return (x - mean) / (var + self.eps).sqrt() * self.weight.view(shape) + self.bias.view(shape)


class ChannelsLast(nn.Module):
    """A Linear over the channels of every pixel: what comes back is channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.movedim(1, -1)).flatten(1).unflatten(1, (2, -1))


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        return batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias)


class PlainGroups(nn.Module):
    """Group norm in plain operations."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.groups, self.eps = norm.weight, norm.bias, norm.num_groups, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(len(x), self.groups, -1)
        h = ((h - h.mean(2, keepdim=True)) / (h.var(2, correction=0, keepdim=True) + self.eps).sqrt()).view_as(x)
        if self.weight is None:
            return h
        shape = (-1, *[1] * (x.ndim - 2))
        return h * self.weight.view(shape) + self.bias.view(shape)


class PlainPReLU(nn.Module):
    """PReLU as a sum of two slopes."""

    def __init__(self, prelu: nn.PReLU) -> None:
        super().__init__()
        self.weight = prelu.weight

    def forward(self, x: Tensor) -> Tensor:
        positive = (x > 0).to(x.dtype)
        return x * positive + x * (1 - positive) * self.weight.view(-1, *[1] * (x.ndim - 2))


def plain(model: nn.Module) -> nn.Module:
    """The same model with norms in plain operations."""
    model = copy.deepcopy(model)
    others = {nn.GroupNorm: PlainGroups, nn.PReLU: PlainPReLU}
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in others:
                setattr(parent, name, others[type(child)](child))
            elif isinstance(child, kinds):
                setattr(parent, name, PlainNorm(child))
            elif isinstance(child, FunctionalNorm):
                setattr(parent, name, nn.Sequential())
                getattr(parent, name).norm = PlainNorm(child.norm)
    return model


def matrices(model: nn.Module, loss: Any, data: list[Any]) -> dict[str, Tensor]:
    """Gradient, Jacobian, GGN and Hessian by `torch.func`, from losses whose terms are the entries of the target."""
    params = {key: p.detach() for key, p in model.named_parameters()}
    flat, count = torch.cat([p.flatten() for p in params.values()]), sum(y.numel() for _, y in data)

    def run(theta: Tensor, X: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in params.values()])
        values = {key: part.view_as(p) for (key, p), part in zip(params.items(), parts, strict=True)}
        return functional_call(model, values, (X,))

    found = {"J": [], "GGN": [], "H": [], "g": []}
    for X, y in data:
        f, J = run(flat, X), jacrev(run)(flat, X).flatten(0, -2)
        HL = hessian(lambda f, y=y: loss(f, y))(f).reshape(f.numel(), f.numel())
        found["J"].append(J)
        found["GGN"].append(J.T @ HL @ J * y.numel() / count)
        found["g"].append(jacrev(lambda t, X=X, y=y: loss(run(t, X), y))(flat) * y.numel() / count)
        found["H"].append(hessian(lambda t, X=X, y=y: loss(run(t, X), y))(flat) * y.numel() / count)
    return {key: torch.cat(parts) if key == "J" else sum(parts) for key, parts in found.items()}  # type: ignore[misc]


def check(model: nn.Module, loss: Any, data: list[Any], twin: nn.Module, recorded: bool = True) -> None:
    """Every operator of the model is that of its twin."""
    expected = matrices(twin, loss, data)
    risk = EmpiricalRisk(model, loss, data)
    eye = torch.eye(risk.space.dim, dtype=F64)
    close(torch.cat([g.flatten() for g in risk.gradient().values()]), expected["g"])
    for found in (GGN(risk).to_dense(), GGN(risk) @ eye, GGN(risk, chunk_size=1) @ eye):
        close(found, expected["GGN"])
    for chunk_size in (None, 1):
        close(Hessian(risk, chunk_size=chunk_size).to_dense(), expected["H"])
    close(Jacobian(risk) @ eye, expected["J"])
    close(Jacobian(risk).T @ torch.eye(len(expected["J"]), dtype=F64), expected["J"].T)
    B = GGNFactor(risk).to_dense()
    close(B @ B.T, expected["GGN"])
    if recorded:
        close(curvature(risk, DiagonalBlock).diagonal(), expected["GGN"].diagonal())


# ---------------------------------------------------------------------------------------------------------- batch norm
NORMED = {
    "instance norm": (lambda: [nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True)], (6, 5)),
    "instance norm 3d": (lambda: [nn.Conv3d(2, 3, 2), nn.InstanceNorm3d(3, affine=True)], (3, 4, 3)),
    "batch norm": (lambda: [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 3, 1)], (4, 5)),
    "batch norm 3d": (lambda: [nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)], (3, 3, 3)),
    "channels last": (
        lambda: [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), ChannelsLast()],
        (4, 5),
    ),
    "one row": (
        lambda: [nn.Conv2d(2, 3, (1, 2)), nn.BatchNorm2d(3), ChannelsLast()],
        (1, 5),
    ),
    "as a function": (lambda: [nn.Conv2d(2, 3, 3), FunctionalNorm(), nn.Tanh(), nn.Conv2d(3, 2, 1)], (4, 4)),
}


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", NORMED)
def test_batches_of_one_example_under_norms(name: str, sizes: tuple[int, ...]) -> None:
    """A loss on `[1, C, H, W]` sends gradients back whose strides PyTorch's backward pass of batch norm misreads."""
    layers, shape = NORMED[name]
    torch.manual_seed(0)
    model = nn.Sequential(*layers()).double().eval()
    for m in model.modules():
        if getattr(m, "running_mean", None) is not None:
            m.running_mean.copy_(normal(3, seed=1))  # type: ignore[operator, union-attr]
            m.running_var.copy_(normal(3, seed=2).square() + 0.5)  # type: ignore[operator, union-attr]
    X = [normal(n, 2, *shape, seed=n) for n in sizes]
    if name == "batch norm":  # what a channels-last data loader gives
        X = [x.to(memory_format=torch.channels_last) for x in X]
    with torch.no_grad():
        data = [(x, model(x).argmin(1)) for x in X]
    twin = plain(model)
    if name == "as a function":
        twin[1] = twin[1].norm
    with unchanged(model, data):
        check(model, nn.CrossEntropyLoss(), data, twin, recorded=name != "as a function")


@pytest.mark.parametrize("sizes", [(1,), (2, 1)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("groups", "shape"), [(1, (2,)), (2, (4,)), (1, (2, 2)), (2, (2, 2)), (2, (4, 1, 2))], ids=str)
def test_group_norm(groups: int, shape: tuple[int, ...], affine: bool, sizes: tuple[int, ...]) -> None:
    """Its second derivative is wrong in PyTorch for several vectors at once, for some shapes without an error."""
    torch.manual_seed(0)
    size = math.prod(shape)
    norm = nn.GroupNorm(groups, shape[0], eps=1e-2, affine=affine)
    model = nn.Sequential(nn.Linear(3, size), nn.Unflatten(1, shape), norm, nn.Tanh(), nn.Flatten(), nn.Linear(size, 3))
    model = model.double()
    data = [(normal(n, 3, seed=n), torch.arange(n) % 3) for n in sizes]
    with unchanged(model, data):
        check(model, nn.CrossEntropyLoss(), data, plain(model))


def test_group_norm_as_a_function_in_low_precision() -> None:
    """Results have the dtype of PyTorch's own, also under autocast."""

    class Net(nn.Module):
        def __init__(self, cast: bool) -> None:
            super().__init__()
            self.layer, self.cast, self.kinds = nn.Linear(4, 4), cast, set[torch.dtype]()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
                h = torch.group_norm(self.layer(x), 2)
            self.kinds.add(h.dtype)
            return h.float()

    torch.manual_seed(0)
    for cast in (True, False):
        model = Net(cast).to(torch.float32 if cast else torch.bfloat16)
        x = torch.randn(3, 4, dtype=model.layer.weight.dtype)
        _ = Hessian(EmpiricalRisk(model, nn.MSELoss(), [(x, torch.zeros(3, 4))])).to_dense(), model(x)
        assert len(model.kinds) == 1


@pytest.mark.parametrize("slopes", [1, 4])
def test_prelu_at_zero(slopes: int) -> None:
    """PyTorch's second derivative takes the other slope there, and is not symmetric."""
    torch.manual_seed(0)
    for shape in ((4,), (4, 2)):
        size = math.prod(shape)
        layers = [nn.Linear(3, size), nn.ReLU(), nn.Unflatten(1, shape), nn.PReLU(slopes), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(size, 3)).double()
        data = [(normal(n, 3, seed=n), torch.arange(n) % 3) for n in (3, 1)]
        with unchanged(model, data):
            check(model, nn.CrossEntropyLoss(), data, plain(model))


def test_symmetry_is_looked_at_for_each_shape_of_batches() -> None:
    """A kernel may go wrong for a batch of one only."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.copy = x.detach() if len(x) == 1 else None
            ctx.save_for_backward(x, y)
            return x**2 * y

        @staticmethod
        def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
            x, y = ctx.saved_tensors
            x = x if ctx.copy is None else ctx.copy
            return 2 * g[0] * x * y, g[0] * x**2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return Wrong.apply(self.a(x), self.b(x))  # type: ignore[no-any-return]

    model, v = Net().double(), torch.ones(24, dtype=F64)
    data = [(normal(n, 3), torch.zeros(n, 3, dtype=F64)) for n in (3, 3, 1)]
    _ = Hessian(EmpiricalRisk(model, nn.MSELoss(), data[:2])) @ v
    with pytest.raises(UnsupportedError, match="not symmetric"):
        Hessian(EmpiricalRisk(model, nn.MSELoss(), data)) @ v


# ------------------------------------------------------------------------------------------------------ zero, rounding
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_derivatives_that_are_zero(dtype: torch.dtype) -> None:
    """A norm takes the bias in front of it away; what rounding leaves is no sign of a wrong backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3), nn.Tanh()).to(dtype)
    data = [(normal(2, 2, 5, 5).to(dtype), normal(2, 3, 3, 3).to(dtype))]
    risk, v = EmpiricalRisk(model, nn.MSELoss(), data, [model[0].bias]), torch.ones(3, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for A in (GGN(risk), Hessian(risk), Jacobian(risk)):
            assert float((A @ v).norm()) < 100 * torch.finfo(dtype).eps
            assert float(A.to_dense().norm()) < 100 * torch.finfo(dtype).eps


# --------------------------------------------------------------------------------------------------- bags of embeddings
class Bags(nn.Module):
    def __init__(self, form: str, **options: Any) -> None:
        super().__init__()
        self.form, self.bag, self.head = form, nn.EmbeddingBag(7, 4, **options), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, 3]
        if self.form == "ragged":  # without the last token of every bag but the first
            kept = torch.cat([x[0], x[1:, :-1].flatten()])
            ends = torch.arange(len(x)) * 2 + 3
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends if self.bag.include_last_offset else ends[:-1]])
            return self.head(self.bag(kept, offsets).tanh())
        weights = torch.linspace(-1, 2, x.numel(), dtype=F64).view(x.shape) if self.form == "weighted" else None
        return self.head(self.bag(x, per_sample_weights=weights).tanh())


class PlainBags(Bags):
    def forward(self, x: Tensor) -> Tensor:
        bag, rows = self.bag, one_hot(x, 7).to(F64) @ self.bag.weight  # [N, 3, d]
        kept = torch.ones(x.shape, dtype=torch.bool)
        if bag.padding_idx is not None:
            kept = x != bag.padding_idx
        if self.form == "ragged":
            kept = kept.clone()
            kept[1:, -1] = False
        if self.form == "weighted":
            rows = rows * torch.linspace(-1, 2, x.numel(), dtype=F64).view(x.shape)[..., None]
        if bag.mode == "max":
            some = kept.any(1)[:, None]
            out = torch.where(some, torch.where(kept[..., None], rows, -torch.inf).amax(1), 0.0)
        else:
            out = (rows * kept[..., None]).sum(1)
            if bag.mode == "mean":
                out = out / kept.sum(1).clamp(min=1)[:, None]
        return self.head(out.tanh())


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("rows", {"mode": "sum"}),
        ("rows", {"mode": "mean"}),
        ("rows", {"mode": "max"}),
        ("rows", {"mode": "sum", "padding_idx": 2}),
        ("rows", {"mode": "mean", "padding_idx": 2}),
        ("rows", {"mode": "max", "padding_idx": 2}),
        ("rows", {"mode": "mean", "sparse": True}),
        ("weighted", {"mode": "sum"}),
        ("ragged", {"mode": "sum", "padding_idx": 3}),
        ("ragged", {"mode": "mean", "include_last_offset": True}),
        ("ragged", {"mode": "max"}),
    ],
    ids=str,
)
def test_bags_of_embeddings(form: str, options: dict[str, Any]) -> None:
    """They have neither forward mode nor a second derivative in PyTorch."""
    torch.manual_seed(0)
    model = Bags(form, **options).double()
    twin = PlainBags(form, **{**options, "sparse": False}).double()
    twin.load_state_dict(model.state_dict())
    tokens = [torch.tensor([[0, 1, 5], [2, 2, 2], [4, 2, 6]]), torch.tensor([[3, 3, 1], [3, 5, 2]])]
    data = [(x, torch.arange(len(x)) % 3) for x in tokens]
    with unchanged(model, data):
        check(model, nn.CrossEntropyLoss(), data, twin, recorded=form == "rows")


# ------------------------------------------------------------------------------------------- models that differentiate
class Forces(nn.Module):
    """Minus the gradient of an energy with respect to the input."""

    def __init__(self, enable: bool) -> None:
        super().__init__()
        self.net, self.enable = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), enable

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.enable or torch.is_grad_enabled()):
            x.requires_grad_()
            (g,) = torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)
        return -g


class PlainForces(Forces):
    def forward(self, x: Tensor) -> Tensor:
        (a, b), (c, d) = ((m.weight, m.bias) for m in (self.net[0], self.net[2]))
        h = torch.tanh(x @ a.T + b)
        return -2 * (h @ c.T + d) * ((1 - h**2) * c) @ a


@pytest.mark.parametrize("enable", [True, False])
def test_models_that_differentiate(enable: bool) -> None:
    torch.manual_seed(0)
    model, twin = Forces(enable).double(), PlainForces(enable).double()
    twin.load_state_dict(model.state_dict())
    data = [(normal(3, 4), normal(3, 4, seed=1)), (normal(2, 4, seed=2), normal(2, 4, seed=3))]
    with unchanged(model, data):
        check(model, nn.MSELoss(), data, twin, recorded=False)
        risk = EmpiricalRisk(model, nn.MSELoss(), data)
        close(risk.loss(), EmpiricalRisk(twin, nn.MSELoss(), data).loss())
        _ = Hessian(risk, check_deterministic=True), GGN(risk, check_deterministic=True)
        assert not data[0][0].requires_grad


def test_models_without_a_graph() -> None:
    """Forces without `create_graph` depend on parameters that no derivative reaches; unused parameters are no error."""

    class NoGraph(Forces):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return -torch.autograd.grad(self.net(x.requires_grad_()).square().sum(), x)[0]

    model, data = NoGraph(True).double(), [(normal(3, 4), normal(3, 4, seed=1))]
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    for use in (
        risk.gradient,
        Hessian(risk).to_dense,
        GGN(risk).to_dense,
        lambda: GGN(risk) @ torch.ones(risk.space.dim, dtype=F64),
        Jacobian(risk).to_dense,
        lambda: Jacobian(risk).T @ torch.ones(12, dtype=F64),
    ):
        with (
            unchanged(model, data),
            pytest.raises(UnsupportedError, match=r"does not depend .* without create_graph=True"),
        ):
            use()
    unused = nn.Parameter(torch.ones(2, dtype=F64))
    model = nn.Linear(4, 4).double().requires_grad_(False)
    model.register_parameter("unused", unused)
    risk = EmpiricalRisk(model, nn.MSELoss(), data, [unused])
    assert not GGN(risk).to_dense().any()
    assert not Jacobian(risk).to_dense().any()


def test_warnings_of_vmap_do_not_leak() -> None:
    model = nn.Bilinear(3, 3, 2).double()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x.tanh())

    risk = EmpiricalRisk(Twice(), nn.CrossEntropyLoss(), [(normal(4, 3), torch.tensor([0, 1, 1, 0]))])
    eye = torch.eye(20, dtype=F64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _ = GGN(risk) @ eye, Hessian(risk) @ eye, Jacobian(risk).to_dense(), curvature(risk, FullBlock).to_dense()
    assert [str(w.message)[:60] for w in said] == []


# --------------------------------------------------------------------------------------------- activation checkpointing
class Checkpointed(nn.Module):
    """Runs a module, or a function, again in the backward pass."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


@pytest.mark.parametrize("kind", ["padding", "bag", "weight norm", "group norm", "PReLU"])
def test_what_is_replaced_inside_of_checkpointing(kind: str) -> None:
    """It is replaced again when the module runs in the backward pass."""
    torch.manual_seed(0)
    inner = {
        "padding": lambda: nn.Embedding(5, 4, padding_idx=1),
        "bag": lambda: nn.EmbeddingBag(5, 4),
        "weight norm": weight_normed,
        "group norm": lambda: nn.GroupNorm(2, 4),
        "PReLU": nn.PReLU,
    }[kind]()
    head = [nn.Flatten(), nn.Linear(12 if kind == "padding" else 4, 3)]
    X = torch.tensor([[0, 1, 2], [3, 1, 1]]) if kind in ("padding", "bag") else normal(2, 4)
    first = [] if kind in ("padding", "bag") else [nn.Linear(4, 4), nn.ReLU()]
    model = nn.Sequential(*first, Checkpointed(nn.Sequential(inner, nn.Tanh())), *head).double()
    twin = copy.deepcopy(model)
    twin[len(first)] = twin[len(first)].inner
    data = [(X, torch.tensor([0, 2])), (X[:1], torch.tensor([1]))]
    risk, other = (EmpiricalRisk(m, nn.CrossEntropyLoss(), data) for m in (model, twin))
    eye = torch.eye(risk.space.dim, dtype=F64)
    with unchanged(model, data):
        for operator in (GGN, Hessian, Jacobian):
            A, B = operator(risk), operator(other)
            for _ in range(2):
                close(A.to_dense(), B.to_dense())
                close(A @ eye, B @ eye)
                close(A @ eye[0], B @ eye[0])
        if first:
            one, two = (ActivationHessian(r, ("0", "output", 0)).to_dense() for r in (risk, other))
            close(one, two)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if m is not inner)


def test_functions_inside_of_checkpointing_are_refused_in_words() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(lambda x: torch.group_norm(x, 2).tanh()), nn.Linear(4, 3))
    data = [(normal(2, 4), torch.tensor([0, 2]))]
    risk = EmpiricalRisk(model.double(), nn.CrossEntropyLoss(), data)
    assert GGN(risk).to_dense().any()
    with pytest.raises(UnsupportedError, match=r"checkpoint a function that calls.*make them modules"):
        Hessian(risk).to_dense()

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.head = nn.Parameter(normal(5, 4)), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            def rows(x: Tensor) -> Tensor:
                return embedding(x, self.weight, 1).tanh().mean(1)

            return self.head(checkpoint(rows, x, use_reentrant=False))

    data = [(torch.tensor([[0, 1, 2], [3, 1, 1]]), torch.tensor([0, 2]))]
    risk = EmpiricalRisk(Table(), nn.CrossEntropyLoss(), data)
    for operator in (GGN, Hessian, Jacobian):
        with pytest.raises(UnsupportedError, match="checkpoint a function that calls"):
            operator(risk).to_dense()
