"""Small modules that random networks are made of, beside those of PyTorch. All of them take one tensor `[N, ...]`."""

from __future__ import annotations

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
            self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"


class Function(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Any, text: str) -> None:
        super().__init__()
        self.function, self.text = function, text

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.text


class Keyword(nn.Module):
    """A layer that is called with a keyword."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


class Contiguous(nn.Module):
    """A layer that takes views of its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.contiguous())


class Residual(nn.Module):
    """`x + inner(x)`; in place it writes to the output of a layer."""

    def __init__(self, inner: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place = inner, in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.in_place:
            h += x
            return h
        return x + h


class Branches(nn.Module):
    """Two modules that read one tensor, and what becomes of their outputs."""

    def __init__(self, one: nn.Module, two: nn.Module, join: str) -> None:
        super().__init__()
        self.one, self.two, self.join = one, two, join

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        if self.join == "cat":
            return torch.cat([a, b], -1)
        if self.join == "gate":
            return a.mul_(torch.sigmoid(b))
        return a * b if self.join == "mul" else a - b


class Repeated(nn.Module):
    """One module that is called several times, with an activation in between."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x


class Tied(nn.Module):
    """Two layers that share a weight: in the same way, or one of them transposed."""

    def __init__(self, d: int, how: str, bias: bool) -> None:
        super().__init__()
        self.one = nn.Linear(d, d, bias=bias and how != "transposed")
        if how == "transposed":
            self.two: nn.Module = Conv1D(d, d)
        else:
            self.two = nn.Linear(d, d, bias=bias)
            if bias and how == "both":
                self.two.bias = self.one.bias
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class Bare(nn.Module):
    """Parameters that a container holds itself, beside a layer: a vector that is used twice, and a number."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(()))
        self.inner = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(x * self.scale + self.shift) + self.scale)


class Wave(nn.Module):
    """A layer without a rule of its own: `sin(x w) + m(w) x`, nonlinear in its parameter."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.w) + self.w.square().mean() * x


class TwoInputs(nn.Module):
    """A bilinear layer of a tensor and a function of it."""

    def __init__(self, d: int, out: int, bias: bool) -> None:
        super().__init__()
        self.product = nn.Bilinear(d, d, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, torch.tanh(x))


class Positions(nn.Module):
    """Adds the embedding of each position, one row for all examples; it has an axis of examples, or not."""

    def __init__(self, length: int, d: int, plain: bool) -> None:
        super().__init__()
        self.embedding, self.plain = nn.Embedding(length, d), plain

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return x + (self.embedding(places) if self.plain else self.embedding(places[None]))


class ByHandAttention(nn.Module):
    """One head made of linear layers."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, 2), nn.Linear(d, 2, bias=False), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)


class Attention(nn.Module):
    """`nn.MultiheadAttention` of one input, or between the input and a function of it."""

    def __init__(self, d: int, cross: bool, **options: Any) -> None:
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(d, **options)

    def forward(self, x: Tensor) -> Tensor:
        first = self.attention.batch_first
        x = x if first else x.transpose(0, 1)
        other = torch.sin(2 * x) if self.cross else x
        h = self.attention(x, other, other, need_weights=False)[0]
        return h if first else h.transpose(0, 1)


class Recurrent(nn.Module):
    """A recurrent layer; its sequence, and its last state added to it."""

    def __init__(self, kind: str, d: int, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(d, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        first = self.rnn.batch_first
        out, state = self.rnn(x if first else x.transpose(0, 1))
        last = (state[0] if isinstance(state, tuple) else state)[-1]
        out = out if first else out.transpose(0, 1)
        return out + last.repeat(1, out.shape[-1] // last.shape[-1])[:, None]


class Cells(nn.Module):
    """A recurrent cell that is called for every step."""

    def __init__(self, kind: str, d: int) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] + state[1] if isinstance(state, tuple) else state  # type: ignore[return-value]


class Encoder(nn.Module):
    """A transformer's layer."""

    def __init__(self, d: int, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            d, 1, 2, dropout=0.0, activation="gelu", batch_first=batch_first, norm_first=norm_first
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.self_attn.batch_first:
            return self.layer(x)
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Again(nn.Module):
    """A module that runs again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=False)


class Halves(nn.Module):
    """Parts of a layer's output, which are views of it; one of them is overwritten."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.layer = nn.Linear(d, 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layer(x).tensor_split(2, -1)
        return torch.relu(a) + b.tanh()


class Stopped(nn.Module):
    """A branch whose input is detached."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.layer = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.layer(x.detach())


class Bag(nn.Module):
    """An embedding bag of each example's tokens."""

    def __init__(self, vocabulary: int, d: int, mode: str, padding: int | None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, d, mode=mode, padding_idx=padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x)


class TiedHead(nn.Module):
    """Token embedding, something in between, and a head with the embedding's weight."""

    def __init__(self, embedding: nn.Embedding, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body = embedding, body
        self.head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        self.head.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x)))
