"""Networks that do what recording must notice: each is computed right or refused, and never silently wrong.

Each network is a module for inputs [N, 4] or [N, T, 4] with outputs [N, 3] or [N, 3, H, W]. `HOSTILE` lists them with
their inputs; `NO_ANSWER` those for which every number is wrong, such as dropout in training mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrize, prune

__all__ = ["HOSTILE", "NO_ANSWER"]


class Base(nn.Module):
    """Two layers; a subclass says what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


def with_middle(function: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A network with a function in the middle, and parts that the function uses."""

    def make() -> nn.Module:
        class Network(Base):
            def middle(self, h: Tensor) -> Tensor:
                return function(self, h)

        model = Network()
        for name, part in parts.items():
            setattr(model, name, part())
        return model

    return make


def norm() -> nn.Module:
    return nn.LayerNorm(3, eps=1e-3)


def vector() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3))


# ----------------------------------------------------------------------------------- forward passes that differentiate
class Forces(Base):
    """The gradient of an energy in the input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = torch.tanh(self.last(torch.tanh(self.first(x)))).sum(-1)
            force = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
        return torch.cat([energy[:, None], force[:, :2]], -1)


class Penalty(Base):
    """Outputs and the squared norm of their gradient in the input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            f = super().forward(x)
            g = torch.autograd.grad(f.sum(), x, create_graph=True)[0]
        return f + g.square().sum(-1, keepdim=True)


# ----------------------------------------------------------------------------------- other tensors than the parameters
class FastWeights(Base):
    """A layer called with twice its weight."""

    def middle(self, h: Tensor) -> Tensor:
        values = {name: 2 * p for name, p in self.last.named_parameters()}
        return functional_call(self.last, values, (h,))


class Swapped(Base):
    """Another weight in place of the parameter during the call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first._parameters.pop("weight")
        assert weight is not None
        self.first.weight = weight * torch.tensor([[1.0], [2.0], [3.0]], dtype=weight.dtype)  # type: ignore[assignment]
        try:
            return super().forward(x)
        finally:
            del self.first.weight
            self.first._parameters["weight"] = weight


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class Cached(Base):
    """A parametrization that is computed once for two calls."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.last, "weight", Doubled())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.last(torch.tanh(self.last(torch.tanh(self.first(x)))))


def pruned() -> nn.Module:
    model = Base()
    prune.l1_unstructured(model.first, "weight", amount=0.3)
    return model


# ----------------------------------------------------------------------------------- calls that are not what they seem
class Counted(Base):
    """A layer of its own whose function depends on how often it ran in this forward pass."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.calls = vector(), 0

        def forward(self, h: Tensor) -> Tensor:
            self.calls += 1
            return torch.sin(h * self.w) * (1 + self.calls % 2)

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.calls = 0
        h = torch.tanh(self.first(x))
        return self.last(self.inner(h) + self.inner(h.square()))


class Told(Base):
    """A layer of its own that reads an attribute set around the call."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.factor = vector(), 1.0

        def forward(self, h: Tensor) -> Tensor:
            return torch.sin(h * self.w) * self.factor

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def middle(self, h: Tensor) -> Tensor:
        self.inner.factor = 3.0
        out = self.inner(h)
        self.inner.factor = 1.0
        return out


class Scaled(nn.Module):
    """A layer of its own that is told a number for each example, or computes one from all of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.w, self.how, self.told = vector(), how, None

    def forward(self, h: Tensor) -> Tensor:
        if self.how == "length":
            return h * self.w * len(h)
        if self.how == "told":
            assert self.told is not None
            return h * self.w * self.told
        return (h - h.mean(0)) / (h.var(0, correction=0) + 0.1).sqrt() * self.w + self.w.square()


class Informed(Base):
    """A layer with a number for each example that is stored before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled("told")

    def middle(self, h: Tensor) -> Tensor:
        self.inner.told = h.detach().square().sum(-1, keepdim=True)  # type: ignore[assignment]
        return self.inner(h)


class Halves(nn.Module):
    """Another function of the first half of a batch than of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = vector(), vector()

    def forward(self, h: Tensor) -> Tensor:
        k = len(h) // 2
        return torch.cat([h[:k] * self.v, torch.sin(h[k:] * self.w)])


# ------------------------------------------------------------------------------------------------------ examples, axes
class TimeMajor(nn.Module):
    """Positions before examples, as one axis or as two."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.first, self.last, self.flat = nn.Linear(4, 3), nn.Linear(3, 3), flat

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 4]
        N, T = x.shape[:2]
        h = x.transpose(0, 1)
        h = self.first(h.reshape(N * T, 4)).view(T, N, 3) if self.flat else self.first(h)
        return self.last(torch.tanh(h).sum(0))


class Placed(nn.Module):
    """Embeddings of positions without an axis of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(4, 3), nn.Embedding(2, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 4]
        return torch.tanh(self.first(x) + self.places(torch.arange(x.shape[1]))).sum(1)


class Biased(nn.Module):
    """A bias of scores between positions, from an embedding of their distances."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.distance = nn.Linear(4, 3), nn.Embedding(3, 1)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 4]
        h, t = self.first(x), torch.arange(x.shape[1])
        bias = self.distance((t[:, None] - t).abs())[..., 0]
        return ((h @ h.mT + bias).softmax(-1) @ h).sum(1)


class Experts(Base):
    """Examples that are sent to one of two layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out, one = torch.zeros_like(h), x[:, 0] > 0
        out[one], out[~one] = self.last(h[one]), self.other(h[~one])
        return out


def _sorted(model: Any, h: Tensor) -> Tensor:
    order = h[:, 0].argsort(descending=True)
    out = torch.empty_like(h)
    out[order] = torch.tanh(model.inner(h[order]))
    return out


def _doubled_rows(model: Any, h: Tensor) -> Tensor:
    one, two = model.inner(torch.cat([h, h.square()])).chunk(2)
    return one * two


class Shared(nn.Module):
    """Two attention modules that share one of their parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 2), nn.Linear(2, 3)
        self.one, self.two = (nn.MultiheadAttention(2, 1, batch_first=True) for _ in range(2))
        owner, _, local = name.rpartition(".")
        setattr(self.two.get_submodule(owner), local, getattr(self.one.get_submodule(owner), local))

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 4]
        h = torch.tanh(self.first(x))
        h = h + self.one(h, h, h, need_weights=False)[0]
        return self.last((h + self.two(h, h, h, need_weights=False)[0]).sum(1))


def _hooked(model: nn.Module, hook: Callable[..., Any], before: bool = False) -> nn.Module:
    layer = model.first
    (layer.register_forward_pre_hook if before else layer.register_forward_hook)(hook)  # type: ignore[union-attr]
    return model


class InPlace(Base):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.relu_(x))


class Lists(Base):
    """Parameters in containers of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(3, 3), torch.zeros(3)])
        self.more = nn.ParameterDict({"a": torch.zeros(3)})

    def middle(self, h: Tensor) -> Tensor:
        return torch.sin(h @ self.weights[0] + self.weights[1]) * self.more["a"]


class Trained(Base):
    """A norm in training mode."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=affine, track_running_stats=False)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h)


def _dropout() -> nn.Module:
    model = with_middle(lambda m, h: m.drop(h), drop=lambda: nn.Dropout(0.5))()
    return model.train()


class Images(nn.Module):
    """A convolution and a norm of its output, classes for every pixel."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 2, padding=1), kind(3)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 4]
        return self.norm(self.conv(x[:, None])).mean(-1)[..., 0] + self.norm(self.conv(x[:, None])).square().mean(
            (2, 3)
        )


FLAT, STEPS = (4,), (2, 4)
#: Name to a maker of the network, and the shape of an example.
HOSTILE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "forces": (Forces, FLAT),
    "gradient penalty": (Penalty, FLAT),
    "functional_call inside": (FastWeights, FLAT),
    "weight swapped around the call": (Swapped, FLAT),
    "parametrization cached": (Cached, FLAT),
    "pruned": (pruned, FLAT),
    "old weight norm": (
        lambda: with_middle(lambda m, h: m.w(h), w=lambda: nn.utils.weight_norm(nn.Linear(3, 3)))(),
        FLAT,
    ),
    "layer norm's weight read outside": (with_middle(lambda m, h: m.n(h) + m.n.weight.square(), n=norm), FLAT),
    "layer norm's weight in the output of a parent": (with_middle(lambda m, h: m.n(h) * m.n.weight, n=norm), FLAT),
    "linear weight read outside": (with_middle(lambda m, h: m.last(h) @ m.last.weight), FLAT),
    "linear weight by a function": (
        with_middle(lambda m, h: functional.linear(h, m.l.weight), l=lambda: nn.Linear(3, 3, bias=False)),
        FLAT,
    ),
    "linear bias by its owner": (with_middle(lambda m, h: h + m.last.bias), FLAT),
    "scale held by the parent": (with_middle(lambda m, h: h + m.s * m.n(h), s=vector, n=norm), FLAT),
    "gru's weights read outside": (
        with_middle(lambda m, h: m.c(h, h) + m.c.weight_ih.sum(0).tanh(), c=lambda: nn.GRUCell(3, 3)),
        FLAT,
    ),
    "weights detached in one place": (
        with_middle(lambda m, h: functional.linear(m.last(h), m.last.weight.detach())),
        FLAT,
    ),
    "forward called without its hooks": (with_middle(lambda m, h: m.l.forward(h), l=lambda: nn.Linear(3, 3)), FLAT),
    "a layer called under no_grad first": (
        with_middle(lambda m, h: m.l(_quiet(m.l, h)), l=lambda: nn.Linear(3, 3)),
        FLAT,
    ),
    "call counter": (Counted, FLAT),
    "attribute set around the call": (Told, FLAT),
    "length of the batch": (with_middle(lambda m, h: m.inner(h), inner=lambda: Scaled("length")), FLAT),
    "batch statistics by hand": (with_middle(lambda m, h: m.inner(h), inner=lambda: Scaled("statistics")), FLAT),
    "batch statistics between layers": (with_middle(lambda m, h: h - h.mean(0)), FLAT),
    "softmax over examples": (with_middle(lambda m, h: h.softmax(0)), FLAT),
    "a buffer for each example": (Informed, FLAT),
    "time-major": (lambda: TimeMajor(False), STEPS),
    "time-major rows": (lambda: TimeMajor(True), STEPS),
    "positions without examples": (Placed, STEPS),
    "relative bias": (Biased, STEPS),
    "experts": (Experts, FLAT),
    "examples sorted": (with_middle(_sorted, inner=lambda: nn.Linear(3, 3)), FLAT),
    "two rows of each example": (with_middle(_doubled_rows, inner=lambda: nn.Linear(3, 3)), FLAT),
    "halves of a batch": (with_middle(lambda m, h: m.inner(h), inner=Halves), FLAT),
    "examples rolled": (with_middle(lambda m, h: m.inner(h.roll(1, 0)), inner=lambda: nn.Linear(3, 3)), FLAT),
    "first example only": (with_middle(lambda m, h: h + m.inner(h[:1]), inner=lambda: nn.Linear(3, 3)), FLAT),
    "in_proj_weight shared": (lambda: Shared("in_proj_weight"), STEPS),
    "in_proj_bias shared": (lambda: Shared("in_proj_bias"), STEPS),
    "out_proj.weight shared": (lambda: Shared("out_proj.weight"), STEPS),
    "hook that changes an output": (lambda: _hooked(Base(), lambda m, args, out: 2 * out), FLAT),
    "hook that changes an input": (lambda: _hooked(Base(), lambda m, args: (2 * args[0],), True), FLAT),
    "hook that reads the weight": (lambda: _hooked(Base(), lambda m, args, out: out + m.weight.sum(1)), FLAT),
    "input written to": (InPlace, FLAT),
    "parameters in lists": (Lists, FLAT),
    "batch norm in training mode": (lambda: Trained(True).train(), FLAT),
    "batch norm without parameters in training mode": (lambda: Trained(False).train(), FLAT),
    "instance norm of images": (lambda: Images(lambda c: nn.InstanceNorm2d(c, affine=True)), STEPS),
    "batch norm of images": (lambda: Images(nn.BatchNorm2d), STEPS),
    "group norm of images": (lambda: Images(lambda c: nn.GroupNorm(1, c)), STEPS),
    "dropout in training mode": (_dropout, FLAT),
}
#: Every number is wrong for them.
NO_ANSWER = {"dropout in training mode"}


def _quiet(layer: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(layer(h))
