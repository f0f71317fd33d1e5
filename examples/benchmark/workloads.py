"""Networks and data to measure on: five shapes of problem, no downloads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Workload:
    """A model, a loss, data, and the parameters of its linear and convolution layers.

    Attributes:
        exact: Whether exact vectors are affordable (one backward pass per class).
    """

    name: str
    model: nn.Module
    data: list[tuple[Tensor, Tensor]]
    exact: bool = True
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)

    @property
    def params(self) -> list[nn.Parameter]:
        layers = [m for m in self.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        return [p for layer in layers for p in layer.parameters()]


def batches(X: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), y.split(size)))


def perceptron(*widths: int, N: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    return model, batches(torch.randn(N, widths[0]), torch.randint(widths[-1], (N,)), 256)


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm around a shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(),
            nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(c_out),
        )
        same = stride == 1 and c_in == c_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    widths = [32, 32, 32, 64, 64, 128, 128, 256, 256]
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
    )
    return model.eval(), batches(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)), 32)


class Attention(nn.Module):
    """Causal self-attention from two linear layers."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A small language model; logits have the classes on axis 1, as PyTorch's cross-entropy wants them."""

    def __init__(self, layers: int = 4, d: int = 256, context: int = 128, vocabulary: int = 1000) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, d), nn.Embedding(context, d)
        self.attention = nn.ModuleList([Attention(d, 4) for _ in range(layers)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(layers)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(d) for _ in range(2 * layers + 1)])
        self.head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for index, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            x = x + attention(self.norms[2 * index](x))
            x = x + mlp(self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x)).transpose(1, 2)


def language() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    tokens = torch.randint(1000, (16, 128))
    return Decoder().eval(), batches(tokens, tokens.roll(-1, 1), 4)


def digits() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    X, y = torch.tensor(bunch.images, dtype=torch.float32)[:1792, None] / 16, torch.tensor(bunch.target)[:1792]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for index in [i for _ in range(5) for i in torch.randperm(len(X)).split(64)]:
        optimizer.zero_grad()
        F.cross_entropy(model(X[index]), y[index]).backward()
        optimizer.step()
    model.zero_grad()
    return model, batches(X, y, 256)


MAKERS: dict[str, Callable[[], tuple[nn.Module, list[tuple[Tensor, Tensor]]]]] = {
    "a_mlp": lambda: perceptron(784, 512, 512, 10, N=2048),
    "b_resnet": resnet,
    "c_gpt": language,
    "d_wide": lambda: perceptron(2048, 2048, 2048, 10, N=1024),
    "e_digits": digits,
}


def make(name: str, device: str = "cpu") -> Workload:
    """A workload by name, always the same numbers."""
    torch.manual_seed(0)
    model, data = MAKERS[name]()
    work = Workload(name, model.to(device), [(X.to(device), y.to(device)) for X, y in data], exact=name != "c_gpt")
    wanted = {id(p) for p in work.params}
    for p in work.model.parameters():
        p.requires_grad_(id(p) in wanted)
    return work
