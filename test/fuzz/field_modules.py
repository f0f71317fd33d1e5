"""Modules like those in which faults were found in the field: experts, functions of one's own,
parameters that functions read, tensors kept in a pass, layers in two places. All of them take one
tensor `[N, ...]`.

A module may say by `twin` how it is written with calls of its submodules alone, whose factors are
known by definition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from test.fuzz.modules import Conv1D, made, vector


def twinned(
    forward: Callable[[Any, Any], Tensor], twin: Callable[[Any, Any], Tensor], **parts: Any
) -> nn.Module:
    """A module with a forward pass, and the same with calls of submodules."""
    module = made(forward, **parts)
    type(module).twin = twin  # type: ignore[attr-defined]
    return module


def by_calls(model: nn.Module) -> None:
    """Let a copy of a model call submodules where it says how."""
    for module in model.modules():
        if (twin := getattr(type(module), "twin", None)) is not None:
            module.forward = partial(twin, module)  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------ experts
def _top(m: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gates [M, k] of the experts that each row is sent to, and their numbers."""
    gates, chosen = m.router(rows).softmax(-1).topk(m.top, -1)
    return gates / gates.sum(-1, keepdim=True), chosen


def _of_masks(m: Any, rows: Tensor) -> Tensor:
    gates, chosen = _top(m, rows)
    out = torch.zeros_like(rows)
    for number in range(m.number):
        for rank in range(m.top):
            mine = chosen[:, rank] == number
            if mine.any():
                out[mine] += gates[mine, rank, None] * m.expert(number, rows[mine])
    return out


def _of_indices(m: Any, rows: Tensor) -> Tensor:
    gates, chosen = _top(m, rows)
    out = torch.zeros_like(rows)
    for number in range(m.number):
        mine, rank = (chosen == number).nonzero(as_tuple=True)
        if len(mine):
            sent = m.expert(number, rows.index_select(0, mine))
            out = out.index_add(0, mine, gates[mine, rank, None] * sent)
    return out


def _of_sorted(m: Any, rows: Tensor) -> Tensor:
    gates, chosen = _top(m, rows)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=m.number).tolist()
    places = order // m.top
    parts = [
        m.expert(number, part)
        for number, part in enumerate(rows[places].split(counts))
        if len(part)
    ]
    weighted = torch.cat(parts) * gates.flatten()[order, None]
    return torch.zeros_like(rows).index_add_(0, places, weighted)


def _of_matrices(m: Any, rows: Tensor) -> Tensor:
    gates, chosen = _top(m, rows)
    sent = [torch.bmm(m.w[index], rows[:, :, None])[..., 0] for index in chosen.unbind(1)]
    return (torch.stack(sent, 1) * gates[..., None]).sum(1)


ROUTES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "masks": _of_masks,
    "indices": _of_indices,
    "sorted": _of_sorted,
    "matrices": _of_matrices,
}


def experts(d: int, how: str, top: int, stacked: bool, bias: bool) -> nn.Module:
    """A mixture of two experts, each a layer or a matrix of a stack, and the rows that go on as
    they are.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, d)
        return (rows + ROUTES[how](m, rows)).view_as(x)

    parts: dict[str, Any] = {"router": nn.Linear(d, 2), "top": top, "number": 2}
    if stacked or how == "matrices":
        parts["w"] = vector(2, d, d)
    else:
        parts["experts"] = nn.ModuleList(nn.Linear(d, d, bias=bias) for _ in range(2))
    module = made(forward, **parts)
    type(module).expert = _expert  # type: ignore[attr-defined]
    return module


def _expert(m: Any, number: int, rows: Tensor) -> Tensor:
    if hasattr(m, "w"):
        return functional.linear(rows, m.w[number])
    return m.experts[number](rows)


# ---------------------------------------------------------------------------- functions of one's own
class Cube(torch.autograd.Function):
    """`x + x³/3`, in one function with its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + x**3 / 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1 + ctx.saved_tensors[0].square())


class ContextCube(torch.autograd.Function):
    """The same with a context of its own, and forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x + x**3 / 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1 + ctx.saved_tensors[0].square())

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return t * (1 + ctx.saved_tensors[0].square())


class MappedCube(ContextCube):
    """The same under `vmap`."""

    generate_vmap_rule = True


class Gate(torch.autograd.Function):
    """`tanh(x) w`, with the gradient of each input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.tanh() * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        t = x.tanh()
        return g * w * (1 - t.square()), (g * t).sum(tuple(range(g.ndim - 1)))


class ContextGate(torch.autograd.Function):
    """The same with a context of its own, under `vmap`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x.tanh() * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        t = x.tanh()
        return g * w * (1 - t.square()), (g * t).sum(tuple(range(g.ndim - 1)))


@torch.library.custom_op("random_networks::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """`x + x³/3` as an operator."""
    return x + x**3 / 3


@torch.library.custom_op("random_networks::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    """`x Wᵀ` as an operator."""
    return x @ w.T


def _cube_backward(ctx: Any, g: Tensor) -> Tensor:
    return g * (1 + ctx.saved_tensors[0].square())


def _product_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return g @ w, g.reshape(-1, len(w)).mT @ x.reshape(-1, w.shape[1])


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


cube.register_fake(torch.empty_like)
product.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], len(w)))
cube.register_autograd(_cube_backward, setup_context=_save)
product.register_autograd(_product_backward, setup_context=_save)

#: Name to a function of a tensor.
OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "function": Cube.apply,
    "with a context": ContextCube.apply,
    "mapped": MappedCube.apply,
    "operator": cube,
}
#: Name to a function of a tensor and a parameter, and the parameter's shape.
OWN_OF_PARAMETERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int], Any]]] = {
    "function": (Gate.apply, vector),
    "with a context": (ContextGate.apply, vector),
    "operator": (product, lambda d: vector(d, d)),
}


def own_function(name: str) -> nn.Module:
    """A function of one's own between layers."""
    return made(lambda m, x: OWN[name](x))


def own_function_of(name: str, d: int, held: bool) -> nn.Module:
    """A function of one's own that reads a parameter: of the module that calls it, or of one that
    is never called.
    """
    of, parameter = OWN_OF_PARAMETERS[name]
    if held:
        return made(lambda m, x: of(x, m.held["w"]), held=nn.ParameterDict({"w": parameter(d)}))
    return made(lambda m, x: of(x, m.w), w=parameter(d))


# ----------------------------------------------------------------------- what functions read and do
def by_function(layer: Any, how: str) -> nn.Module:
    """A layer whose parameters a function reads."""
    reads: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "linear": lambda m, x: functional.linear(x, m.layer.weight, m.layer.bias),
        "matmul": lambda m, x: x @ m.layer.weight.T,
        "addmm": lambda m, x: torch.addmm(
            m.layer.bias, x.reshape(-1, x.shape[-1]), m.layer.weight.T
        ).view(*x.shape[:-1], -1),
        "in, out": lambda m, x: torch.addmm(
            m.layer.bias, x.reshape(-1, x.shape[-1]), m.layer.weight
        ).view(*x.shape[:-1], -1),
        "checkpoint": lambda m, x: checkpoint(
            lambda h: functional.linear(h.tanh(), m.layer.weight, m.layer.bias),
            x,
            use_reentrant=False,
        ),
    }
    if how == "checkpoint":
        return twinned(reads[how], lambda m, x: m.layer(x.tanh()), layer=layer)
    return twinned(reads[how], lambda m, x: m.layer(x), layer=layer)


def read_linear(i: int, o: int, how: str, bias: bool) -> nn.Module:
    """A linear layer whose parameters a function reads."""
    if how == "in, out":
        return by_function(Conv1D(o, i), how)
    return by_function(nn.Linear(i, o, bias=how == "addmm" or (bias and how != "matmul")), how)


#: Ways of reading a matrix [o, i] that have no Kronecker factors, or read rows.
MATRICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w: torch.einsum("...i,oi->...o", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([-1], [1])),
    "rows": lambda x, w: torch.cat([x @ w[:1].T, (x @ w[1:].T).tanh()], -1),
    "columns": lambda x, w: x[..., :1] @ w[:, :1].T + x[..., 1:].tanh() @ w[:, 1:].T,
    "normed": lambda x, w: functional.linear(x, w / (1 + w.square().sum(1, keepdim=True)).sqrt()),
    "distances": lambda x, w: (x[..., None, :] - w).square().sum(-1),
    "taken": lambda x, w: functional.linear(x, w[[-1, *range(len(w) - 1)]]),
    "twice": lambda x, w: functional.linear(x, w) + functional.linear(x.tanh(), w).square(),
}


def matrix(i: int, o: int, how: str) -> nn.Module:
    """A parameter that a function reads as a matrix."""
    return made(lambda m, x: MATRICES[how](x, m.w), w=vector(o, i))


#: Ways of reading a table [T, d] with examples [N, T, d].
TABLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda x, w: x + w,
    "gates": lambda x, w: x * w.sigmoid(),
    "with an axis": lambda x, w: x + w[None],
    "looked up": lambda x, w: x + w[torch.arange(x.shape[1], device=x.device)],
    "embedded": lambda x, w: x + functional.embedding(torch.arange(x.shape[1]).to(x.device), w),
    "as keys": lambda x, w: (x @ w.T).softmax(-1) @ w,
    "in front": lambda x, w: torch.cat([w[:1].expand(len(x), 1, -1), x], 1),
    "repeated": lambda x, w: x + w.repeat(len(x), 1, 1),
}


def table(length: int, d: int, how: str) -> nn.Module:
    """A table of positions, which some batches are as long as."""
    return made(lambda m, x: TABLES[how](x, m.w), w=vector(length, d))


# ------------------------------------------------------------------------- what is kept, and shared
def _keep(m: Any, h: Tensor) -> Tensor:
    if m.where == "attribute":
        m.kept = h
    elif m.where == "dict":
        m.kept = {"h": h}
    elif m.where == "list":
        m.kept = [*m.kept[-1:], h]
    else:
        m.kept.h = h
    return h


def _kept(m: Any) -> Tensor:
    if m.where == "attribute":
        return m.kept
    if m.where == "object":
        return m.kept.h
    return m.kept["h" if m.where == "dict" else -1]


def kept(d: int, where: str) -> nn.Module:
    """A layer's output that is kept in the pass, and read behind the next layer; it stays there."""
    start = {"attribute": None, "dict": {}, "list": [], "object": SimpleNamespace()}[where]
    first = made(lambda m, x: _keep(m, m.layer(x)), layer=nn.Linear(d, d), where=where, kept=start)
    return made(
        lambda m, x: m.last(m.first(x).tanh()) + _kept(m.first), first=first, last=nn.Linear(d, d)
    )


def in_two_places(d: int, bias: bool) -> nn.Module:
    """One layer that two modules hold."""
    layer = nn.Linear(d, d, bias=bias)
    one, two = nn.Sequential(layer, nn.Tanh()), nn.Sequential(nn.Softplus(), layer)
    return made(lambda m, x: m.one(x) + m.two(x), one=one, two=two)


class ScaledLinear(nn.Linear):
    """It doubles what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LowRank(nn.Linear):
    """A product of two layers beside its own."""

    def __init__(self, d: int) -> None:
        super().__init__(d, d)
        self.down, self.up = nn.Linear(d, 1, bias=False), nn.Linear(1, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class Standardized(nn.Linear):
    """Rows of its weight have mean zero."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Residual(nn.LayerNorm):
    """A norm beside its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


#: Name to a layer of a class of its own.
SUBCLASSES: dict[str, Callable[[int], nn.Module]] = {
    "scaled": lambda d: ScaledLinear(d, d),
    "low rank": LowRank,
    "standardized": lambda d: Standardized(d, d, bias=False),
    "residual": lambda d: Residual(d, eps=1e-3),
}


class Softened(nn.Module):
    """A parametrization without parameters."""

    def forward(self, w: Tensor) -> Tensor:
        return w + 0.3 * w.tanh()


class Shifted(nn.Module):
    """A parametrization with parameters: a product of low rank."""

    def __init__(self, o: int, i: int) -> None:
        super().__init__()
        self.u, self.v = vector(o, 1), vector(1, i)

    def forward(self, w: Tensor) -> Tensor:
        return w + self.u @ self.v


def parametrized(d: int, how: str) -> nn.Module:
    """A layer with a parametrization of its weight or bias."""
    layer = nn.Linear(d, d)
    name = "bias" if how == "bias" else "weight"
    parametrization = Shifted(d, d) if how == "low rank" else Softened()
    parametrize.register_parametrization(layer, name, parametrization)
    return layer


# ------------------------------------------------------------------------------------------- tokens
#: Ways of reading a table [4, d] with tokens [N, T].
LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, w: w[x],
    "embedding": lambda x, w: functional.embedding(x, w),
    "padded": lambda x, w: functional.embedding(x, w, padding_idx=1),
    "one hot": lambda x, w: functional.one_hot(x, len(w)).to(w.dtype) @ w,
    "index_select": lambda x, w: w.index_select(0, x.flatten()).view(*x.shape, -1),
}


def looked_up(d: int, how: str) -> nn.Module:
    """A table that a function looks up tokens in."""
    return made(lambda m, x: LOOKUPS[how](x, m.w), w=vector(4, d))


def bag_with_offsets(d: int, mode: str, weights: bool) -> nn.Module:
    """A bag of all tokens of a batch, and where each example begins."""

    def factors(x: Tensor, w: Tensor) -> Tensor:
        return (1 + x).to(w.dtype) / 3

    def forward(m: Any, x: Tensor) -> Tensor:
        offsets = torch.arange(0, x.numel(), x.shape[1], device=x.device)
        given = factors(x, m.bag.weight).flatten() if weights else None
        return m.bag(x.flatten(), offsets, given)

    def twin(m: Any, x: Tensor) -> Tensor:
        if not weights:
            return m.bag(x)
        return (m.bag.weight[x] * factors(x, m.bag.weight)[..., None]).sum(1)

    weights = weights and mode == "sum"
    return twinned(forward, twin, bag=nn.EmbeddingBag(4, d, mode=mode))


def padded(d: int, pooled: bool, padding: int | None) -> nn.Module:
    """Attention that leaves out padding (token 0), then the mean of what is none."""

    def forward(m: Any, x: Tensor) -> Tensor:
        is_padding = x == 0
        is_padding[:, 0] = False
        h = m.embedding(x)
        h = h + m.attention(h, h, h, key_padding_mask=is_padding, need_weights=False)[0]
        if not pooled:
            return h
        counts = (~is_padding).to(h.dtype)[..., None]
        return (h * counts).sum(1) / counts.sum(1)

    parts = {"embedding": nn.Embedding(4, d, padding_idx=padding)}
    return made(forward, **parts, attention=nn.MultiheadAttention(d, 1, batch_first=True))
