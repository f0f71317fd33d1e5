"""Tangents and graphs are freed as soon as nothing needs them, and products stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import peak
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import GGN, EmpiricalRisk, Hessian
from curvlinops_plus.exact import model_passes, tangents
from curvlinops_plus.exact.tangents import PassingTangents


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).softmax(-1).tanh()


def deep() -> EmpiricalRisk:
    """Results take much more memory than parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(32) for _ in range(8)))
    return EmpiricalRisk(model, nn.MSELoss(), [(torch.randn(1024, 32), torch.randn(1024, 32))])


class Mixer(nn.Module):
    """Its functions save tensors that they make on their way: rows of all positions, copies of transposed matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.qkv = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
        x = x + ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(x)))


def tokens() -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixer(32) for _ in range(4)))
    return EmpiricalRisk(model, nn.MSELoss(), [(torch.randn(32, 32, 32), torch.randn(32, 32, 32))])


@pytest.mark.parametrize("generic", [True, False], ids=["random vector", "ones"])
@pytest.mark.parametrize("kind", [deep, tokens])
def test_a_ggn_product_takes_little_more_memory_than_a_gradient(
    kind: Callable[[], EmpiricalRisk], generic: bool
) -> None:
    """Tangents that stayed with saved tensors would double it; those of softmax and norms take more, 3.5 times it."""
    risk = kind()
    X, y = risk.data[0]
    risk.model(X[:2])

    def gradient() -> None:
        torch.autograd.grad(nn.functional.mse_loss(risk.model(X), y), [*risk.model.parameters()])

    v = torch.randn(risk.space.dim) if generic else torch.ones(risk.space.dim)
    GGN(EmpiricalRisk(risk.model, nn.MSELoss(), [(X[:2], y[:2])])) @ v  # what is loaded at first use
    G = GGN(risk, check_deterministic=False)
    assert peak(lambda: G @ v) < 1.4 * peak(gradient)  # the first product, with its checks
    assert peak(lambda: G @ v) < 1.4 * peak(gradient)
    kept = GGN(risk, check_deterministic=False, max_kept_bytes=2**24)
    _ = kept @ v
    assert peak(lambda: kept @ v) < 2.2 * peak(gradient)  # makes a linearisation, once
    assert peak(lambda: kept @ v) < 1.4 * peak(gradient)


def wide() -> EmpiricalRisk:
    """Parameters take much more memory than results."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    return EmpiricalRisk(model, nn.MSELoss(), [(torch.randn(8, 512), torch.randn(8, 512)) for _ in range(3)])


@pytest.mark.parametrize(
    ("kind", "first", "later"), [(GGN, 2.5, 2.5), (Hessian, 4.5, 2.9)], ids=["GGN", "Hessian"]
)  # in vectors
def test_a_product_holds_few_vectors_beside_its_own(kind: type[GGN | Hessian], first: float, later: float) -> None:
    """The result, and that of a batch; the Hessian's first one checks symmetry with another vector."""
    risk = wide()
    v, size = torch.randn(risk.space.dim), 4 * risk.space.dim
    H = kind(risk, check_deterministic=False)
    assert peak(lambda: H @ v) < first * size
    assert peak(lambda: H @ v) < later * size


def test_the_check_of_symmetry_frees_the_graph_on_its_way() -> None:
    """Else it would hold all of it, beside another vector and another product."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)]
    risk = EmpiricalRisk(nn.Sequential(*layers), nn.MSELoss(), [(torch.randn(512, 256), torch.randn(512, 256))])
    v = torch.randn(risk.space.dim)
    H = Hessian(risk, check_deterministic=False)
    assert peak(lambda: H @ v) < 1.4 * peak(lambda: H @ v)  # the first product, with its checks, and the second


def test_checking_symmetry_holds_one_product_at_a_time() -> None:
    risk = wide()
    H = Hessian(risk, check_deterministic=False)
    assert peak(lambda: H @ torch.ones(risk.space.dim)) < 8.5 * 4 * risk.space.dim


class Differentiates(nn.Module):
    """A backward pass inside of the model reads tangents of what was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            u = self.net(x)
            return u + torch.autograd.grad(u.sum(), x, create_graph=True)[0][:, :2]


class Transforms(nn.Module):
    """Transformations of functions allow no hooks of saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(lambda row: self.second(self.first(row).tanh())))(x).sum(-1)


class Views(nn.Module):
    """Views that outlive what they are views of, writing into views, and results that stay in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 12), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.first(x).tanh().chunk(3, 1)
        found = [a.T.T * b, (b + 1)[:, :].view(-1, 4), c.reshape(-1, 2, 2).transpose(1, 2).flatten(1)]
        h = found[0] + found[1] * found[2].exp()
        h = h.clone()
        h[:, :2].add_(found[1][:, 2:])
        h.mul_(c.detach() + 2)
        return self.second(h.relu_() + torch.stack(found).sum(0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, all_states = x.new_zeros(len(x), 5), []
        for _ in range(4):
            h = self.cell(x, h)
            all_states.append(h)
        return self.head(torch.stack(all_states).mean(0))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Transposed(nn.Module):
    """A recurrent cell written by hand, which takes new views of the same parameters at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.U, self.W = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 4) / 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for _ in range(3):
            h = (x @ self.U.t() + h @ self.W.t()).tanh()
        return self.head(h)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.W.T).tanh() @ self.W).exp() @ self.W.T[:, :2]


class Expands(nn.Module):
    """Views that are larger than what they are views of, and end before it; copies of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.exp()
        row = scale.view(1, -1)
        for _ in range(2):
            x = (x * row.expand(x.shape)).tanh()
        copy = torch.zeros_like(self.scale.detach()).copy_(self.scale)
        x = x + torch.ops.aten.alias(scale) + copy
        del copy
        return x * scale + self.scale


class Sparse(nn.Module):
    """Sparse tensors have no tangents, and looking for one is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        to, of = torch.ones(len(x), len(x)).triu().to_sparse().indices()
        h = self.first(x).tanh()
        return self.second(torch.zeros_like(h).index_add(0, to, h[of]))


class Refuses(nn.Module):
    """Hooks of saved tensors are refused with a message of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return self.second(self.first(x).tanh())


class Sine(torch.autograd.Function):
    """Forward mode is the only way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return t * ctx.saved_tensors[0].cos()


class Forwards(nn.Module):
    """Results of functions written by hand, of which views end before they do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = Sine.apply(self.first(x))
        pairs = self.drop(h.view(-1, 2, 2)).view(-1, 2, 2).sum(1)
        return self.second(self.drop(h)) * pairs


def sequence(*inside: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *inside, nn.Linear(4, 2)).eval()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 4), layer, nn.Flatten()).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether tangents can be freed
    "attention": (lambda: nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 4), Attention(), nn.Flatten()), True),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 3, 1)), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
            nn.MaxPool2d((2, 1)), nn.Flatten(), nn.Linear(4, 2),
        ),
        True,
    ),
    "views": (Views, True),
    "recurrent": (Recurrent, True),
    "checkpointed": (Checkpointed, True),
    "in place": (lambda: sequence(nn.ReLU(inplace=True)), True),
    "returns its input": (lambda: sequence(nn.Tanh(), nn.Dropout(), nn.Dropout(0.0)), True),
    "encoder": (encoder, True),
    "transposed": (Transposed, True),
    "tied": (Tied, True),
    "expands": (lambda: sequence(Expands(4)), True),
    "sparse": (Sparse, True),
    "forwards": (lambda: Forwards().eval(), True),
    "refuses": (Refuses, False),
    "differentiates": (Differentiates, False),
    "transforms": (Transforms, False),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("name", MODELS)
def test_products_are_right_where_every_tangent_is_freed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_passes, "FEW_NUMBERS", 0)
    monkeypatch.setattr(tangents, "LEAST_NUMBERS", 1)
    torch.manual_seed(0)
    make, freed = MODELS[name]
    model, X = make().double(), torch.randn(5, 3, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X, torch.zeros_like(model(X))), (2 * X, torch.zeros_like(model(X)))])
    G, params = GGN(risk), [*model.parameters()]

    def rows(x: Tensor) -> Tensor:
        found = []
        for f in model(x).flatten():
            parts = torch.autograd.grad(f, params, retain_graph=True, allow_unused=True, materialize_grads=True)
            found.append(torch.cat([g.flatten() for g in parts]))
        return torch.stack(found)

    J = torch.cat([rows(X), rows(2 * X)])
    for v in torch.randn(3, len(J.T), dtype=torch.float64):
        torch.testing.assert_close(G @ v, 2 / len(J) * (J.T @ (J @ v)), rtol=1e-9, atol=1e-12)
    assert G._linear.mode.right
    assert G._linear.passes._frees_tangents is freed


@pytest.mark.parametrize("sizes", [(8, 8192), (8192, 8)], ids=["later", "at first"])
@pytest.mark.parametrize(
    "inside", [nn.ReLU(inplace=True), nn.Dropout().eval(), Expands(64)], ids=["ReLU", "Dropout", "expands"]
)
def test_batches_of_many_and_of_few_examples_have_the_same_product(inside: nn.Module, sizes: tuple[int, int]) -> None:
    """Tangents of few numbers stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), inside, nn.Linear(64, 3)).double()
    data = [(torch.randn(n, 32, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64)) for n in sizes]
    G, params = GGN(EmpiricalRisk(model, nn.MSELoss(), data), check_deterministic=False), [*model.parameters()]
    v, found = torch.randn(sum(p.numel() for p in params), dtype=torch.float64), []
    parts = [t.view_as(p) for t, p in zip(v.split([p.numel() for p in params]), params, strict=True)]
    for X, _ in data:
        F = model(X)
        u = torch.zeros_like(F, requires_grad=True)
        back = torch.autograd.grad(F, params, u, create_graph=True)
        JV = torch.autograd.grad(back, u, parts, retain_graph=True)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(F, params, JV)]))
    for _ in range(2):
        torch.testing.assert_close(G @ v, 2 / (3 * sum(sizes)) * sum(found), rtol=1e-9, atol=1e-12)
    assert G._linear.mode.right
    assert G._linear.passes._frees_tangents


def test_an_error_of_the_model_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:
                raise RuntimeError("too many examples")
            return super().forward(x)

    monkeypatch.setattr(model_passes, "FEW_NUMBERS", 0)
    data = [(torch.randn(n, 3), torch.zeros(n, 2)) for n in (4, 5)]
    G = GGN(EmpiricalRisk(Fails(3, 2), nn.MSELoss(), data), check_deterministic=False)
    with pytest.raises(RuntimeError, match="too many examples"):
        _ = G @ torch.randn(8)
    assert G._linear.mode.right
    assert G._linear.passes._frees_tangents


def test_a_freed_tangent_is_nan_and_what_is_needed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tangents, "LEAST_NUMBERS", 1)
    W = torch.randn(3, 3, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(W, torch.ones_like(W))
        kept = forward_ad.unpack_dual(dual).tangent
        with PassingTangents([kept]) as passing:
            h = dual * 2
            view, tangent = h.view(9), forward_ad.unpack_dual(h).tangent
            del h
            out = view * view  # saves it
            assert tangent.eq(2).all()  # a view of it lives
            del view
            out = out.sum()
            assert tangent.isnan().all()
            assert forward_ad.unpack_dual(out).tangent.isfinite()
            turned = torch.ops.aten.alias(dual).t()
            del turned
            assert (dual * 2).shape == (3, 3)
            assert kept.eq(1).all()
            before = passing.freed
            for _ in range(3):
                out.relu_()
            assert passing.freed <= before + 1
    assert not passing.missed_one([torch.ones(2)])
    assert passing.missed_one([torch.ones(2), torch.tensor([1.0, torch.nan])])


def test_results_that_are_modified_after_they_were_saved_are_noticed() -> None:
    W: Any = torch.randn(3, 3, requires_grad=True)
    with PassingTangents():
        h = W * 2
        out = h * h
        h += 1
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: a tensor of shape \[3, 3\] is at versio"
    ):
        out.sum().backward()
