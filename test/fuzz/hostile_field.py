"""Hostile networks of the kinds in which faults were found in the field, and of those that the
limits name. Importing this file registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint

from test.fuzz.field_modules import Cube, Gate, Softened, cube, product
from test.fuzz.hostile_networks import (
    HOSTILE,
    NO_ANSWER,
    linear,
    with_middle,
)
from test.fuzz.modules import made, vector


# ---------------------------------------------------------------------------------- rows of experts
class _Flipped(torch.autograd.Function):
    """Rows in the other order, unseen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.flip(0)


def _sent(m: Any, h: Tensor) -> Tensor:
    """Rows are gathered, and go back by `index_add`; an expert may have none."""
    out = torch.zeros_like(h)
    gates, chosen = m.router(h).softmax(1).max(1)
    for number, expert in enumerate(m.experts):
        mine = (chosen == number).nonzero()[:, 0]
        sent = expert(h.index_select(0, mine))
        out = out.index_add(0, mine, gates[mine, None] * sent)
    return out


def _by_table(m: Any, h: Tensor) -> Tensor:
    """Who sees what is a matrix of ones and zeros."""
    order = h[:, 0].argsort()
    seen = functional.one_hot(order, len(h)).to(h.dtype)
    return seen.T @ m.l(torch.einsum("mn,nd->md", seen, h)).tanh()


def _turned(m: Any, h: Tensor) -> Tensor:
    return _Flipped.apply(m.l(_Flipped.apply(h)).tanh())  # type: ignore[no-any-return, attr-defined]


def _of_stack(m: Any, h: Tensor) -> Tensor:
    chosen = (h[:, 0] > 0).long()
    return torch.bmm(m.w[chosen], h[:, :, None])[..., 0] + m.b[chosen]


# ---------------------------------------------------------------------------- functions of one's own
class _WrongTangent(torch.autograd.Function):
    """A function whose forward mode is wrong."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 3 * t * ctx.saved_tensors[0]


def _gate_beside(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(h * m.w)
    return gate * (h + m.w)


def _scattered(m: Any, h: Tensor) -> Tensor:
    index = torch.tensor([0, 0, 1]).expand(len(h), 3)
    return m.l(torch.ones_like(h).scatter_reduce(1, index, h, "prod"))


def _hooked_gradient(m: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: 2 * g)
    return m.l(h)


# ------------------------------------------------------------------------------------ what is kept
def _in_attribute(m: Any, h: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = m.w.square() + 1
    return h * m.kept


def _in_dict(m: Any, h: Tensor) -> Tensor:
    if "w" not in m.kept:
        m.kept["w"] = m.w.square() + 1
    return h * m.kept["w"]


class _Cached(nn.Module):
    """What is made of a parameter is kept by a method, or by a property."""

    def __init__(self, by_method: bool) -> None:
        super().__init__()
        self.w, self.by_method = vector(3), by_method

    @lru_cache(2)  # noqa: B019
    def method(self) -> Tensor:
        return self.w.square() + 1

    @cached_property
    def attribute(self) -> Tensor:
        return self.w.square() + 1

    def forward(self, h: Tensor) -> Tensor:
        return h * (self.method() if self.by_method else self.attribute)


# ------------------------------------------------------------------------- other calls of parameters
def _mapped(m: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: functional.linear(row, m.l.weight, m.l.bias))(h)


def _derivative(m: Any, h: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: m.l(row).square().sum()))(h)


def _twice_checkpointed(m: Any, h: Tensor) -> Tensor:
    def within(x: Tensor) -> Tensor:
        return checkpoint(m.l, x.tanh(), use_reentrant=False)

    return checkpoint(within, h, use_reentrant=False)


def _slices(m: Any, h: Tensor) -> Tensor:
    out = m.l(h)
    out[:, 1:] *= out[:, :1].detach() + 2
    out[:, 0].add_(1)
    return out


def _closed_over() -> nn.Module:
    hidden = [nn.Parameter(torch.zeros(3))]
    return with_middle(lambda m, h: h * (m.w + hidden[0]), w=lambda: hidden[0])()


def _same_memory() -> nn.Module:
    model = with_middle(lambda m, h: m.l(h), l=linear)()
    model.get_submodule("l").weight.data = model.last.weight.data  # type: ignore[union-attr]
    return model


def _two_places(m: Any, h: Tensor) -> Tensor:
    return m.one(h) * m.two(h)


def two_places() -> nn.Module:
    layer = linear()
    parts = {"one": nn.Sequential(layer, nn.Tanh()), "two": nn.Sequential(nn.Tanh(), layer)}
    return with_middle(
        _two_places, **{name: partial(_given, part) for name, part in parts.items()}
    )()


def _given(part: nn.Module) -> nn.Module:
    return part


def parametrized(name: str) -> nn.Module:
    return parametrize.register_parametrization(linear(), name, Softened())


# ------------------------------------------------------------------- examples that are not alone
def _first_decides(m: Any, h: Tensor) -> Tensor:
    return m.l(h) if float(h[0, 0]) > 0 else m.l(h).square()


def _own_row(m: Any, h: Tensor) -> Tensor:
    """Each place in the batch has a row of its own."""
    return h + m.table[: len(h)]


def _words(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.tanh(m.words((x > 0).long()).sum(1)))


def words(**options: Any) -> Callable[[], nn.Module]:
    return lambda: made(_words, words=nn.Embedding(2, 3, **options), last=linear())


def _noise(m: Any, h: Tensor) -> Tensor:
    return h * torch.from_numpy(np.random.default_rng().random(h.shape))


def middle(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A function of the layer `l` in the middle."""
    return with_middle(function, l=linear)


FLAT: dict[str, Callable[[], nn.Module]] = {
    "experts that may have no rows": with_middle(
        _sent, router=linear, experts=lambda: nn.ModuleList(linear() for _ in range(2))
    ),
    "rows by a table of who sees what": middle(_by_table),
    "rows behind a function of one's own": middle(_turned),
    "a matrix for each row": with_middle(
        _of_stack, w=lambda: vector(2, 3, 3), b=lambda: vector(2, 3)
    ),
    "a function of one's own": middle(lambda m, h: Cube.apply(m.l(h))),  # type: ignore[attr-defined]
    "an operator of one's own": middle(lambda m, h: cube(m.l(h))),
    "an operator that reads a parameter": with_middle(
        lambda m, h: product(h, m.l.weight), l=partial(linear, bias=False)
    ),
    "a function that reads a layer's parameter": middle(
        lambda m, h: Gate.apply(m.l(h), m.l.bias)  # type: ignore[attr-defined]
    ),
    "a wrong tangent": middle(lambda m, h: _WrongTangent.apply(m.l(h))),  # type: ignore[attr-defined]
    "a gate under no_grad": with_middle(_gate_beside, w=lambda: vector(3)),
    "products of scattered numbers": middle(_scattered),
    "sums of exponentials one after the other": middle(
        lambda m, h: torch.logcumsumexp(30 * m.l(h), 1)
    ),
    "a gradient that a hook doubles": middle(_hooked_gradient),
    "a cache in an attribute": with_middle(
        lambda m, h: m.inner(h), inner=lambda: made(_in_attribute, w=vector(3), kept=None)
    ),
    "a cache in a dict": with_middle(
        lambda m, h: m.inner(h), inner=lambda: made(_in_dict, w=vector(3), kept={})
    ),
    "a cache of a method": with_middle(lambda m, h: m.inner(h), inner=lambda: _Cached(True)),
    "a cached property": with_middle(lambda m, h: m.inner(h), inner=lambda: _Cached(False)),
    "a function under vmap": middle(_mapped),
    "a derivative under vmap": middle(_derivative),
    "checkpoints in checkpoints": middle(_twice_checkpointed),
    "slices written to": middle(_slices),
    "a parameter that a closure holds, too": _closed_over,
    "parameters in the same memory": _same_memory,
    "a module in two places": two_places,
    "a parametrized weight": with_middle(lambda m, h: m.l(h), l=lambda: parametrized("weight")),
    "a parametrized bias": with_middle(lambda m, h: m.l(h), l=lambda: parametrized("bias")),
    "orthogonal": with_middle(
        lambda m, h: m.l(h), l=lambda: parametrizations.orthogonal(linear(), "weight", "cayley")
    ),
    "scripted": with_middle(lambda m, h: m.l(h), l=lambda: torch.jit.script(linear())),
    "the first example decides": middle(_first_decides),
    "the largest of the batch": middle(lambda m, h: m.l(h) - h.amax(0)),
    "sorted along the batch": middle(lambda m, h: m.l(h.sort(0).values)),
    "one row for all": middle(lambda m, h: m.l(h.mean(0, keepdim=True)).expand(len(h), -1)),
    "a row for each place in the batch": with_middle(_own_row, table=lambda: vector(3, 3)),
    "a norm of all examples": with_middle(
        lambda m, h: h / (1 + h.norm()) * m.w, w=lambda: vector(3)
    ),
    "words with padding": words(padding_idx=1),
    "words that are cut": words(max_norm=1.0),
    "dropout without a mode": middle(lambda m, h: functional.dropout(m.l(h), 0.5)),
    "noise of NumPy's": middle(_noise),
}


# -------------------------------------------------------------------------------------------- steps
def _packed(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    """Sequences of several lengths."""
    lengths = 1 + (x[:, 0, 0] > 0).long()
    packed = rnn.pack_padded_sequence(m.first(x), lengths, batch_first=True, enforce_sorted=False)
    state = m.gru(packed)[1][0]
    return m.last(state)


def _masked(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    is_padding = x[..., 0] < 0
    is_padding[:, 0] = False
    return m.last(m.layer(m.first(x), src_key_padding_mask=is_padding).mean(1))


def _biased_attention(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    h = m.first(x)[:, None]
    return m.last(functional.scaled_dot_product_attention(h, h, h, attn_mask=m.bias)[:, 0].sum(1))


def _class_token(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    h = torch.cat([m.token.expand(len(x), -1, -1), m.first(x)], 1)
    return m.last((h + m.places[: h.shape[1]]).tanh().mean(1))


def _folded(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    """Clips of an example in the batch, and back."""
    h = torch.tanh(m.first(x.flatten(0, 1)))
    return m.last(h.unflatten(0, (len(x), -1)).sum(1))


def _attended_then_behind_one(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    h = m.first(x).transpose(0, 1)
    return m.last(m.attention(h, h, h)[0].sum(0)[None])[0]


def _over_examples(m: Any, x: Tensor) -> Tensor:  # [N, T, 4]
    """Attention that takes examples for positions."""
    h = m.first(x)
    return m.last(m.attention(h, h, h)[0].sum(1))


def steps(forward: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> Any:
    """A network of two layers and these parts."""
    return lambda: made(
        forward, first=nn.Linear(4, 2), last=nn.Linear(2, 3), **{k: v() for k, v in parts.items()}
    )


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True)


STEPS: dict[str, Callable[[], nn.Module]] = {
    "packed sequences": steps(_packed, gru=lambda: nn.GRU(2, 2, batch_first=True)),
    "an encoder with a mask of padding": steps(_masked, layer=_encoder),
    "attention with a table": steps(_biased_attention, bias=lambda: vector(2, 2)),
    "a class token": steps(
        _class_token, token=lambda: vector(1, 1, 2), places=lambda: vector(3, 2)
    ),
    "clips of an example": steps(_folded),
    "attention, then behind one": steps(
        _attended_then_behind_one, attention=lambda: nn.MultiheadAttention(2, 1)
    ),
    "attention over examples": steps(_over_examples, attention=lambda: nn.MultiheadAttention(2, 1)),
}

HOSTILE |= {name: (make, (4,)) for name, make in FLAT.items()}
HOSTILE |= {name: (make, (2, 4)) for name, make in STEPS.items()}
NO_ANSWER |= {"dropout without a mode", "noise of NumPy's"}
