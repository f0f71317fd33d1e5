"""Networks that do what recording must notice: each is computed right or refused, and never
silently wrong.

Each network is a module for inputs [N, 4] or [N, T, 4] with outputs [N, 3] or [N, 3, H, W].
`HOSTILE` lists them with their inputs; `NO_ANSWER` those for which every number is wrong, such as
dropout in training mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrize, prune

from test.fuzz.modules import made, vector

linear = partial(nn.Linear, 3, 3)


class Base(nn.Module):
    """Two layers; a subclass says what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), linear()

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


def with_middle(
    function: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]
) -> Callable[[], nn.Module]:
    """A network with a function in the middle, and parts that the function uses."""

    def make() -> nn.Module:
        kind: Any = type("Network", (Base,), {"middle": function})
        model = kind()
        for name, part in parts.items():
            setattr(model, name, part())
        return model

    return make


def instead(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A network of the same two layers with another forward pass."""
    return lambda: made(forward, Base)


def inner(
    forward: Callable[[Any, Tensor], Tensor], *names: str, **attributes: Any
) -> Callable[[], nn.Module]:
    """A layer of its own with vectors as parameters."""
    return lambda: made(forward, **{name: vector(3) for name in names or "w"}, **attributes)


def norm() -> nn.Module:
    return nn.LayerNorm(3, eps=1e-3)


# ---------------------------------------------------------------- forward passes that differentiate
def _forces(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = torch.tanh(m.last(torch.tanh(m.first(x)))).sum(-1)
        force = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
    return torch.cat([energy[:, None], force[:, :2]], -1)


def _penalty(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        f = Base.forward(m, x)
        g = torch.autograd.grad(f.sum(), x, create_graph=True)[0]
    return f + g.square().sum(-1, keepdim=True)


# ---------------------------------------------------------------- other tensors than the parameters
def _fast_weights(m: Any, h: Tensor) -> Tensor:
    return functional_call(m.last, {name: 2 * p for name, p in m.last.named_parameters()}, (h,))


def _swapped(m: Any, x: Tensor) -> Tensor:
    """Another weight in place of the parameter during the call."""
    weight = m.first._parameters.pop("weight")
    m.first.weight = weight * torch.tensor([[1.0], [2.0], [3.0]], dtype=weight.dtype)
    try:
        return Base.forward(m, x)
    finally:
        del m.first.weight
        m.first._parameters["weight"] = weight


def _two_calls_cached(m: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return m.last(torch.tanh(m.last(torch.tanh(m.first(x)))))


def cached() -> nn.Module:
    model = instead(_two_calls_cached)()
    parametrize.register_parametrization(model.last, "weight", made(lambda m, w: 2 * w))  # type: ignore[arg-type]
    return model


def pruned() -> nn.Module:
    model = Base()
    prune.l1_unstructured(model.first, "weight", amount=0.3)
    return model


# ---------------------------------------------------------------- calls that are not what they seem
def _counts(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return torch.sin(h * m.w) * (1 + m.calls % 2)


def _counted(m: Any, h: Tensor) -> Tensor:
    m.inner.calls = 0
    return m.inner(h) + m.inner(h.square())


def _told(m: Any, h: Tensor) -> Tensor:
    m.inner.factor = 3.0
    out = m.inner(h)
    m.inner.factor = 1.0
    return out


def _informed(m: Any, h: Tensor) -> Tensor:
    m.inner.told = h.detach().square().sum(-1, keepdim=True)
    return m.inner(h)


def _statistics(m: Any, h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (h.var(0, correction=0) + 0.1).sqrt() * m.w + m.w.square()


def _halves(m: Any, h: Tensor) -> Tensor:
    k = len(h) // 2
    return torch.cat([h[:k] * m.v, torch.sin(h[k:] * m.w)])


def _quiet_first(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.tanh(m.l(h))
    return m.l(h)


# ----------------------------------------------------------------------------------- examples, axes
def _time_major(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    return m.last(torch.tanh(m.first(x.transpose(0, 1))).sum(0))


def _time_major_rows(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    N, T = x.shape[:2]
    return m.last(torch.tanh(m.first(x.transpose(0, 1).reshape(N * T, 4)).view(T, N, 3)).sum(0))


def _placed(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    return torch.tanh(m.first(x) + m.places(torch.arange(x.shape[1]))).sum(1)


def _biased(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    h, t = m.first(x), torch.arange(x.shape[1])
    bias = m.distance((t[:, None] - t).abs())[..., 0]
    return ((h @ h.mT + bias).softmax(-1) @ h).sum(1)


def _experts(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    out, one = torch.zeros_like(h), x[:, 0] > 0
    out[one], out[~one] = m.last(h[one]), m.other(h[~one])
    return out


def _sorted(model: Any, h: Tensor) -> Tensor:
    order = h[:, 0].argsort(descending=True)
    out = torch.empty_like(h)
    out[order] = torch.tanh(model.inner(h[order]))
    return out


def _doubled_rows(model: Any, h: Tensor) -> Tensor:
    one, two = model.inner(torch.cat([h, h.square()])).chunk(2)
    return one * two


def _two_attentions(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    h = torch.tanh(m.first(x))
    h = h + m.one(h, h, h, need_weights=False)[0]
    return m.last((h + m.two(h, h, h, need_weights=False)[0]).sum(1))


def shared(name: str) -> nn.Module:
    """Two attention modules that share one of their parameters."""
    one, two = (nn.MultiheadAttention(2, 1, batch_first=True) for _ in range(2))
    owner, _, local = name.rpartition(".")
    setattr(two.get_submodule(owner), local, getattr(one.get_submodule(owner), local))
    return made(_two_attentions, first=nn.Linear(4, 2), last=nn.Linear(2, 3), one=one, two=two)


def hooked(hook: Callable[..., Any], before: bool = False) -> nn.Module:
    model = Base()
    (model.first.register_forward_pre_hook if before else model.first.register_forward_hook)(hook)
    return model


def _lists(m: Any, h: Tensor) -> Tensor:
    return torch.sin(h @ m.weights[0] + m.weights[1]) * m.more["a"]


def _of_images(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    h = m.norm(m.conv(x[:, None]))
    return h.mean(-1)[..., 0] + m.norm(m.conv(x[:, None])).square().mean((2, 3))


def images(kind: Any) -> Callable[[], nn.Module]:
    """A convolution and a norm of its output."""
    return lambda: made(_of_images, conv=nn.Conv2d(1, 3, 2, padding=1), norm=kind(3))


def training(**parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: with_middle(lambda m, h: m.part(h), **parts)().train()


def untracked(affine: bool) -> Callable[[], nn.Module]:
    return partial(nn.BatchNorm1d, 3, affine=affine, track_running_stats=False)


class _Scaled(torch.autograd.Function):
    """A product with a parameter that only its own backward pass knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class _Counted(nn.Module):
    """A parametrization with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, w: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return w * w.detach().square().sum().sqrt().reciprocal()


def _kept(m: Any, h: Tensor) -> Tensor:
    """What is made of a parameter once, as caches of eval mode do."""
    if not m.cache:
        m.cache.append(m.w.square() + 1)
    return h * m.cache[0]


def _table_of_all(m: Any, h: Tensor) -> Tensor:
    """A table as long as a batch of three, and no row of an example."""
    return h @ m.table(torch.arange(3)).tanh()


def _tokens(m: Any, x: Tensor) -> Tensor:  # [N, T, 4] -> [N, 3, T]
    h = torch.tanh(m.first(x)) + m.places(torch.arange(x.shape[1]))
    return m.last(h * m.gain).mT


def _dense_heads(m: Any, x: Tensor) -> Tensor:  # [N, T, 4] -> [N, 3, T]
    h = torch.tanh(m.first(x)).transpose(0, 1)
    return torch.stack([m.last(step) @ m.last.weight for step in h], 2)


FLAT: dict[str, Callable[[], nn.Module]] = {
    "forces": instead(_forces),
    "gradient penalty": instead(_penalty),
    "functional_call inside": with_middle(_fast_weights),
    "weight swapped around the call": instead(_swapped),
    "parametrization cached": cached,
    "pruned": pruned,
    "old weight norm": with_middle(lambda m, h: m.w(h), w=lambda: nn.utils.weight_norm(linear())),
    "layer norm's weight read outside": with_middle(
        lambda m, h: m.n(h) + m.n.weight.square(), n=norm
    ),
    "layer norm's weight in the output of a parent": with_middle(
        lambda m, h: m.n(h) * m.n.weight, n=norm
    ),
    "linear weight read outside": with_middle(lambda m, h: m.last(h) @ m.last.weight),
    "linear weight by a function": with_middle(
        lambda m, h: functional.linear(h, m.l.weight), l=partial(linear, bias=False)
    ),
    "linear bias by its owner": with_middle(lambda m, h: h + m.last.bias),
    "scale held by the parent": with_middle(
        lambda m, h: h + m.s * m.n(h), s=lambda: vector(3), n=norm
    ),
    "gru's weights read outside": with_middle(
        lambda m, h: m.c(h, h) + m.c.weight_ih.sum(0).tanh(), c=lambda: nn.GRUCell(3, 3)
    ),
    "weights detached in one place": with_middle(
        lambda m, h: functional.linear(m.last(h), m.last.weight.detach())
    ),
    "forward called without its hooks": with_middle(lambda m, h: m.l.forward(h), l=linear),
    "a layer called under no_grad first": with_middle(_quiet_first, l=linear),
    "call counter": with_middle(_counted, inner=inner(_counts, calls=0)),
    "attribute set around the call": with_middle(
        _told, inner=inner(lambda m, h: torch.sin(h * m.w) * m.factor, factor=1.0)
    ),
    "length of the batch": with_middle(
        lambda m, h: m.inner(h), inner=inner(lambda m, h: h * m.w * len(h))
    ),
    "batch statistics by hand": with_middle(lambda m, h: m.inner(h), inner=inner(_statistics)),
    "batch statistics between layers": with_middle(lambda m, h: h - h.mean(0)),
    "softmax over examples": with_middle(lambda m, h: h.softmax(0)),
    "a buffer for each example": with_middle(
        _informed, inner=inner(lambda m, h: h * m.w * m.told, told=None)
    ),
    "experts": lambda: made(_experts, Base, other=linear()),
    "examples sorted": with_middle(_sorted, inner=linear),
    "two rows of each example": with_middle(_doubled_rows, inner=linear),
    "halves of a batch": with_middle(lambda m, h: m.inner(h), inner=inner(_halves, "v", "w")),
    "examples rolled": with_middle(lambda m, h: m.inner(h.roll(1, 0)), inner=linear),
    "first example only": with_middle(lambda m, h: h + m.inner(h[:1]), inner=linear),
    "hook that changes an output": lambda: hooked(lambda m, args, out: 2 * out),
    "hook that changes an input": lambda: hooked(lambda m, args: (2 * args[0],), True),
    "hook that reads the weight": lambda: hooked(lambda m, args, out: out + m.weight.sum(1)),
    "input written to": instead(lambda m, x: Base.forward(m, functional.relu_(x))),
    "parameters in lists": with_middle(
        _lists,
        weights=lambda: nn.ParameterList([torch.zeros(3, 3), torch.zeros(3)]),
        more=lambda: nn.ParameterDict({"a": torch.zeros(3)}),
    ),
    "all examples are one row": with_middle(lambda m, h: m.l(h[None]).squeeze(0), l=linear),
    "all examples are one image": with_middle(
        lambda m, h: m.l(h[None, None]).flatten(0, 2), l=linear
    ),
    "examples are places of a convolution": with_middle(
        lambda m, h: m.c(h.mT[None]).squeeze(0).mT, c=lambda: nn.Conv1d(3, 3, 1)
    ),
    "examples are steps of a recurrence": with_middle(
        lambda m, h: m.c(h[None].transpose(0, 1))[0].squeeze(1), c=lambda: nn.GRU(3, 3)
    ),
    "sequence of one step": with_middle(
        lambda m, h: m.c(h[None])[0].squeeze(0), c=lambda: nn.GRU(3, 3)
    ),
    "a norm of one row": with_middle(lambda m, h: m.n(h[None]).squeeze(0), n=norm),
    "a parameter in a function of its own": with_middle(
        lambda m, h: _Scaled.apply(h, m.w), w=lambda: vector(3)
    ),
    "a parametrization with a state": with_middle(
        lambda m, h: m.l(h),
        l=lambda: parametrize.register_parametrization(linear(), "weight", _Counted()),
    ),
    "a cache in a list": with_middle(
        lambda m, h: m.inner(h), inner=lambda: made(_kept, w=vector(3), cache=[])
    ),
    "a table as long as a batch": with_middle(_table_of_all, table=lambda: nn.Embedding(3, 3)),
    "batch norm in training mode": training(part=untracked(True)),
    "batch norm without parameters in training mode": training(part=untracked(False)),
    "dropout in training mode": training(part=lambda: nn.Dropout(0.5)),
}
STEPS: dict[str, Callable[[], nn.Module]] = {
    "time-major": instead(_time_major),
    "time-major rows": instead(_time_major_rows),
    "positions without examples": lambda: made(
        _placed, first=nn.Linear(4, 3), places=nn.Embedding(2, 3)
    ),
    "tokens, positions and a gain": lambda: made(
        _tokens, first=nn.Linear(4, 3), places=nn.Embedding(2, 3), last=linear(), gain=vector(3)
    ),
    "heads of each step that read a weight": lambda: made(
        _dense_heads, first=nn.Linear(4, 3), last=linear()
    ),
    "relative bias": lambda: made(_biased, first=nn.Linear(4, 3), distance=nn.Embedding(3, 1)),
    "in_proj_weight shared": lambda: shared("in_proj_weight"),
    "in_proj_bias shared": lambda: shared("in_proj_bias"),
    "out_proj.weight shared": lambda: shared("out_proj.weight"),
    "instance norm of images": images(lambda c: nn.InstanceNorm2d(c, affine=True)),
    "batch norm of images": images(nn.BatchNorm2d),
    "group norm of images": images(lambda c: nn.GroupNorm(1, c)),
}
#: Name to a maker of the network, and the shape of an example.
HOSTILE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (make, (4,)) for name, make in FLAT.items()},
    **{name: (make, (2, 4)) for name, make in STEPS.items()},
}
#: Every number is wrong for them.
NO_ANSWER = {"dropout in training mode"}
