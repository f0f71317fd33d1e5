"""Networks and data to measure on, no downloads: six for CPUs, two for GPUs, each but the smallest
in two sizes.
"""

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
        left_out: Name of a layer whose factors would be too large.
    """

    name: str
    model: nn.Module
    data: list[tuple[Tensor, Tensor]]
    exact: bool = True
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    left_out: str | None = None

    @property
    def layers(self) -> list[nn.Module]:
        named = self.model.named_modules()
        return [
            m
            for name, m in named
            if isinstance(m, (nn.Linear, nn.Conv2d)) and name != self.left_out
        ]

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for layer in self.layers for p in layer.parameters()]

    @property
    def device(self) -> torch.device:
        return self.data[0][1].device


Made = tuple[nn.Module, list[tuple[Tensor, Tensor]]]


def batches(X: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), y.split(size)))


def perceptron(*widths: int, N: int, batch: int = 256) -> Made:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    return model, batches(torch.randn(N, widths[0]), torch.randint(widths[-1], (N,)), batch)


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


def images(size: int, classes: int, N: int, batch: int) -> list[tuple[Tensor, Tensor]]:
    return batches(torch.randn(N, 3, size, size), torch.randint(classes, (N,)), batch)


def resnet(width: int, size: int, N: int, batch: int) -> Made:
    """Like ResNet-18 without its first pooling."""
    widths = [width * k for k in (1, 1, 1, 2, 2, 4, 4, 8, 8)]
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    first, last = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.Linear(8 * width, 10)
    model = nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)
    return model.eval(), images(size, 10, N, batch)


class Bottleneck(nn.Module):
    """Convolutions 1×1, 3×3, 1×1 with batch norm around a shortcut."""

    def __init__(self, c_in: int, c: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, c, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU(),
            nn.Conv2d(c, c, 3, stride, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU(),
            nn.Conv2d(c, 4 * c, 1, bias=False), nn.BatchNorm2d(4 * c),
        )  # fmt: skip
        same = stride == 1 and c_in == 4 * c
        self.shortcut = nn.Identity() if same else nn.Conv2d(c_in, 4 * c, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(
    width: int, size: int, N: int, batch: int, classes: int, depths: tuple[int, ...] = (3, 4, 6, 3)
) -> Made:
    """Like ResNet-50."""
    blocks: list[nn.Module] = []
    c_in = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            blocks.append(Bottleneck(c_in, width * 2**stage, 2 if stage and not index else 1))
            c_in = 4 * width * 2**stage
    stem = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    model = nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, classes)
    )
    return model.eval(), images(size, classes, N, batch)


class Attention(nn.Module):
    """Causal self-attention from two linear layers."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A small language model; logits have the classes on axis 1, as PyTorch's cross-entropy wants
    them.
    """

    def __init__(self, layers: int, d: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, d), nn.Embedding(context, d)
        self.attention = nn.ModuleList([Attention(d, heads) for _ in range(layers)])
        self.mlp = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
                for _ in range(layers)
            ]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(d) for _ in range(2 * layers + 1)])
        self.head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.token(tokens) + self.position(places)
        for index, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            x = x + attention(self.norms[2 * index](x))
            x = x + mlp(self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x)).transpose(1, 2)


def language(
    layers: int, d: int, heads: int, context: int, vocabulary: int, N: int, batch: int
) -> Made:
    tokens = torch.randint(vocabulary, (N, context))
    return Decoder(layers, d, heads, context, vocabulary).eval(), batches(
        tokens, tokens.roll(-1, 1), batch
    )


def digits(N: int) -> Made:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    X, y = (
        torch.tensor(bunch.images, dtype=torch.float32)[:N, None] / 16,
        torch.tensor(bunch.target)[:N],
    )
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for index in [i for _ in range(5) for i in torch.randperm(len(X)).split(64)]:
        optimizer.zero_grad()
        F.cross_entropy(model(X[index]), y[index]).backward()
        optimizer.step()
    model.zero_grad()
    return model, batches(X, y, 256)


#: Name to the full size and a quick one.
MAKERS: dict[str, tuple[Callable[[], Made], Callable[[], Made]]] = {
    "a_mlp": (
        lambda: perceptron(784, 512, 512, 10, N=2048),
        lambda: perceptron(784, 256, 256, 10, N=1024),
    ),
    "b_resnet": (
        lambda: resnet(32, 32, N=64, batch=32),
        lambda: resnet(16, 20, N=24, batch=12),
    ),
    "c_gpt": (
        lambda: language(4, 256, 4, 128, 1000, N=16, batch=4),
        lambda: language(2, 128, 4, 64, 300, N=8, batch=4),
    ),
    "d_wide": (
        lambda: perceptron(2048, 2048, 2048, 10, N=1024),
        lambda: perceptron(640, 640, 640, 10, N=640),
    ),
    "e_digits": (lambda: digits(1792), lambda: digits(1024)),
    "f_resnet50": (
        lambda: resnet50(64, 224, N=256, batch=64, classes=1000),
        lambda: resnet50(4, 32, N=8, batch=4, classes=10, depths=(1, 1, 1, 1)),
    ),
    "g_gpt2": (
        lambda: language(12, 768, 12, 1024, 50257, N=16, batch=4),
        lambda: language(2, 32, 4, 16, 100, N=4, batch=2),
    ),
    "tiny": (lambda: perceptron(3, 6, 6, 6, N=32),) * 2,
}
CPU = ["tiny", "e_digits", "a_mlp", "d_wide", "b_resnet", "c_gpt"]
CUDA = ["a_mlp", "d_wide", "f_resnet50", "g_gpt2"]


def make(name: str, device: str = "cpu", quick: bool = False) -> Workload:
    """A workload by name, always the same numbers."""
    torch.manual_seed(0)
    return workload(name, *MAKERS[name][quick](), device)


def workload(
    name: str, model: nn.Module, data: list[tuple[Tensor, Tensor]], device: str = "cpu"
) -> Workload:
    """Only the parameters that curvature is about have gradients, so that a gradient pass is of
    these.
    """
    data = [(X.to(device), y.to(device)) for X, y in data]
    few = name in ("a_mlp", "b_resnet", "d_wide", "e_digits", "tiny", "classes")  # classes
    work = Workload(
        name, model.to(device), data, exact=few, left_out="head" if name == "g_gpt2" else None
    )
    wanted = {id(p) for p in work.params}
    for p in work.model.parameters():
        p.requires_grad_(id(p) in wanted)
    return work
