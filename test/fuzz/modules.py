"""Small modules that random networks are made of, beside those of PyTorch. All of them take one
tensor `[N, ...]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:
    from transformers.pytorch_utils import Conv1D  # type: ignore[import-not-found]
except ImportError:

    class Conv1D(nn.Module):
        """`x @ weight + bias` with a weight [i, o], under the name that Hugging Face gives it."""

        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.nx = nf, nx
            self.weight, self.bias = (
                nn.Parameter(torch.zeros(nx, nf)),
                nn.Parameter(torch.zeros(nf)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"


def made(
    forward: Callable[[Any, Any], Tensor], base: type[nn.Module] = nn.Module, **parts: Any
) -> nn.Module:
    """A module of a class of its own: `forward(self, x)`, and what it uses, in the order of its
    parameters.
    """
    module = type("Made", (base,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def vector(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def function(of: Callable[[Tensor], Tensor]) -> nn.Module:
    """A function without parameters."""
    return made(lambda m, x: of(x))


def behind_one(layer: nn.Module, how: str) -> nn.Module:
    """A layer of which all examples are one row, as code for sequences calls it."""
    undo: dict[str, Callable[[Tensor], Tensor]] = {
        "squeeze": lambda y: y.squeeze(0),
        "flatten": lambda y: y.flatten(0, 1),
        "take": lambda y: y[0],
        "sum": lambda y: y.sum(0),
    }
    return made(lambda m, x: undo[how](m.layer(x[None])), layer=layer)


def keyword(layer: nn.Module) -> nn.Module:
    """A layer that is called with a keyword."""
    return made(lambda m, x: m.layer(input=x), layer=layer)


def contiguous(layer: nn.Module) -> nn.Module:
    """A layer that takes views of its input."""
    return made(lambda m, x: m.layer(x.contiguous()), layer=layer)


def _added(m: Any, x: Tensor) -> Tensor:
    h = m.inner(x)
    h += x
    return h


def residual(inner: nn.Module, in_place: bool) -> nn.Module:
    """`x + inner(x)`; in place it writes to the output of a layer."""
    return made(_added if in_place else lambda m, x: x + m.inner(x), inner=inner)


def branches(one: nn.Module, two: nn.Module, join: str) -> nn.Module:
    """Two modules that read one tensor, and what becomes of their outputs."""
    joined: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cat": lambda a, b: torch.cat([a, b], -1),
        "gate": lambda a, b: a.mul_(torch.sigmoid(b)),
        "mul": lambda a, b: a * b,
        "sub": lambda a, b: a - b,
    }
    return made(lambda m, x: joined[join](m.one(x), m.two(x)), one=one, two=two)


def repeated(inner: nn.Module, times: int) -> nn.Module:
    """One module that is called several times, with an activation in between."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = torch.tanh(m.inner(x))
        return x

    return made(forward, inner=inner)


def tied(d: int, how: str, bias: bool) -> nn.Module:
    """Two layers that share a weight: in the same way, or one of them transposed."""
    one = nn.Linear(d, d, bias=bias and how != "transposed")
    two: Any = Conv1D(d, d) if how == "transposed" else nn.Linear(d, d, bias=bias)
    two.weight = one.weight
    if bias and how == "both":
        two.bias = one.bias
    return made(lambda m, x: m.two(torch.tanh(m.one(x))), one=one, two=two)


def bare(d: int) -> nn.Module:
    """Parameters that a container holds itself, beside a layer: a vector that is used twice, and a
    number.
    """
    parts = {"scale": vector(d), "shift": vector(), "inner": nn.Linear(d, d)}
    return made(lambda m, x: m.inner(torch.tanh(x * m.scale + m.shift) + m.scale), **parts)


def wave(d: int) -> nn.Module:
    """A layer without a rule of its own, nonlinear in its parameter."""
    return made(lambda m, x: torch.sin(x * m.w) + m.w.square().mean() * x, w=vector(d))


def two_inputs(d: int, out: int, bias: bool) -> nn.Module:
    """A bilinear layer of a tensor and a function of it."""
    return made(lambda m, x: m.product(x, torch.tanh(x)), product=nn.Bilinear(d, d, out, bias=bias))


def positions(length: int, d: int, plain: bool) -> nn.Module:
    """Adds the embedding of each position, one row for all examples; it has an axis of examples, or
    not.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return x + m.embedding(places if plain else places[None])

    return made(forward, embedding=nn.Embedding(length, d))


def attention_by_hand(d: int) -> nn.Module:
    """One head made of linear layers."""
    parts = {"q": nn.Linear(d, 2), "k": nn.Linear(d, 2, bias=False), "v": nn.Linear(d, d)}
    return made(lambda m, x: (m.q(x) @ m.k(x).mT).softmax(-1) @ m.v(x), **parts)


def attention(d: int, cross: bool, **options: Any) -> nn.Module:
    """`nn.MultiheadAttention` of one input, or between the input and a function of it."""
    first = options["batch_first"]

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        other = torch.sin(2 * x) if cross else x
        h = m.attention(x, other, other, need_weights=False)[0]
        return h if first else h.transpose(0, 1)

    return made(forward, attention=nn.MultiheadAttention(d, **options))


def recurrent(kind: str, d: int, **options: Any) -> nn.Module:
    """A recurrent layer; its sequence, and its last state added to it."""
    first = options["batch_first"]

    def forward(m: Any, x: Tensor) -> Tensor:
        out, state = m.rnn(x if first else x.transpose(0, 1))
        last = (state[0] if isinstance(state, tuple) else state)[-1]
        out = out if first else out.transpose(0, 1)
        return out + last.repeat(1, out.shape[-1] // last.shape[-1])[:, None]

    return made(forward, rnn=getattr(nn, kind)(d, 2, **options))


def cells(kind: str, d: int) -> nn.Module:
    """A recurrent cell that is called for every step."""

    def forward(m: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return state[0] + state[1] if isinstance(state, tuple) else state

    return made(forward, cell=getattr(nn, kind)(d, 2))


def encoder(d: int, batch_first: bool, norm_first: bool) -> nn.Module:
    """A transformer's layer."""
    options: Any = {"activation": "gelu", "batch_first": batch_first, "norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(d, 1, 2, dropout=0.0, **options)
    if batch_first:
        return made(lambda m, x: m.layer(x), layer=layer)
    return made(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)


def again(inner: nn.Module) -> nn.Module:
    """A module that runs again in the backward pass."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return (
            checkpoint(m.inner, x, use_reentrant=False) if torch.is_grad_enabled() else m.inner(x)
        )

    return made(forward, inner=inner)


def halves(d: int) -> nn.Module:
    """Parts of a layer's output, which are views of it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = m.layer(x).tensor_split(2, -1)
        return torch.relu(a) + b.tanh()

    return made(forward, layer=nn.Linear(d, 2 * d))


def stopped(d: int) -> nn.Module:
    """A branch whose input is detached."""
    return made(lambda m, x: torch.tanh(x) + m.layer(x.detach()), layer=nn.Linear(d, d))


def bag(vocabulary: int, d: int, mode: str, padding: int | None) -> nn.Module:
    """An embedding bag of each example's tokens."""
    return made(
        lambda m, x: m.bag(x), bag=nn.EmbeddingBag(vocabulary, d, mode=mode, padding_idx=padding)
    )


def tied_head(embedding: nn.Embedding, body: nn.Module) -> nn.Module:
    """Token embedding, something in between, and a head with the embedding's weight."""
    head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
    head.weight = embedding.weight
    return made(
        lambda m, x: m.head(m.body(m.embedding(x))), embedding=embedding, body=body, head=head
    )
