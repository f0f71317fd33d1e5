"""Ordinary models, written as people write them, each with inputs, targets and losses: a new one is
a line of `MODELS`.

Of each all is made anew by `make`, `batch` and `loss`: the same numbers in every process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from test.helpers import DEVICE
from test.lives.packages import IMAGE_MODELS, LANGUAGE_MODELS, TEXT_MODELS

# -------------------------------------------------------------------------------------- perceptrons


class Scale(nn.Module):
    """Features that are scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.g = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.g)


class TwoHeads(nn.Module):
    """A class and a box."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.box = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.body(x))
        return {"class": self.label(h), "box": self.box(h)}


class Experts(nn.Module):
    """Each example goes to the expert of its largest gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(4, 2), nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mine = (choice == k).nonzero()[:, 0]
            out[mine] = weight[mine, None] * torch.tanh(expert(x[mine]))
        return self.head(x + out)


class LoRA(nn.Module):
    """A frozen layer, and a small product beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / 2)
        self.B = nn.Parameter(torch.randn(base.out_features, rank) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T


def peft() -> nn.Module:
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    base = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0", "2"]))
    for p in model.parameters():
        if p.requires_grad:  # its products begin with zeros, which make others zero
            nn.init.normal_(p, std=0.5)
    return model


# ------------------------------------------------------------------------------------------- images


class ResNet(nn.Module):
    """A residual block whose batch norm keeps its statistics, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.shortcut, self.head = nn.Conv2d(2, 3, 1), nn.Linear(3, 3)
        self.train()

    def train(self, mode: bool = True) -> ResNet:
        super().train(mode)
        self.bn1.eval()
        self.bn2.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        h += self.shortcut(x)
        return self.head(F.relu(h).mean((2, 3)))


class ConvNeXt(nn.Module):
    """A block with LayerScale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = (
            nn.Conv2d(2, 4, 2, stride=2),
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
        )
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.gamma, self.head = nn.Parameter(0.5 * torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.gamma * self.down(F.gelu(self.up(h)))
        return self.head((x + h.permute(0, 3, 1, 2)).mean((-2, -1)))


class UNet(nn.Module):
    """Down, up, and across; a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3)
        self.below, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.out = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.norm(self.inside(x)))
        h = self.up(F.silu(self.below(F.avg_pool2d(skip, 2))))
        return self.out(torch.cat([skip, h], 1))


class ViT(nn.Module):
    """Patches behind a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(2, 4, 2, stride=2), nn.Linear(4, 3)
        self.cls, self.positions = (
            nn.Parameter(torch.randn(1, 1, 4)),
            nn.Parameter(torch.randn(1, 5, 4)),
        )
        self.block = nn.TransformerEncoderLayer(
            4, 2, 6, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(x), -1, -1), h], 1) + self.positions
        return self.head(self.block(h)[:, 0])


class DETR(nn.Module):
    """Learned positions: a table of rows and one of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(2, 3, 1), nn.Linear(3, 3)
        self.rows, self.columns = nn.Embedding(4, 3), nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(4, device=x.device)
        h = self.patches(x).permute(0, 2, 3, 1) + self.rows(at)[:, None] + self.columns(at)
        return self.head(torch.tanh(h).mean((1, 2)))


# ---------------------------------------------------------------------------------------- sequences


class GPT(nn.Module):
    """Learned positions, and a head that shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(5, 4), nn.Embedding(4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return self.head(self.norm2(x)).transpose(1, 2)


class RMSNorm(nn.Module):
    """By hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Llama(nn.Module):
    """RMSNorm, rotary positions and a gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm1, self.norm2 = nn.Embedding(5, 4), RMSNorm(4), RMSNorm(4)
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(4, 3, bias=False),
            nn.Linear(4, 3, bias=False),
            nn.Linear(3, 4),
        )
        self.norm, self.head = RMSNorm(4), nn.Linear(4, 5, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        angle = torch.outer(torch.arange(ids.shape[1]), torch.tensor([1.0, 0.1])).to(x).repeat(1, 2)

        def rotary(t: Tensor) -> Tensor:
            one, two = t.chunk(2, -1)
            return t * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

        h = self.norm1(x)
        scores = rotary(self.q(h)) @ rotary(self.k(h)).transpose(1, 2) / 2
        mask = torch.ones_like(scores[0], dtype=torch.bool).tril()
        x = x + self.o(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ self.v(h))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norm(x)).transpose(1, 2)


class LSTM(nn.Module):
    """A class from the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(5, 3), nn.LSTM(3, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        _, (h, _) = self.lstm(self.tokens(ids))
        return self.head(h[-1])


class Bags(nn.Module):
    """Texts of several lengths, all in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        return self.head(torch.tanh(self.bag(X["text"], X["offsets"])))


# ---------------------------------------------------------------------------------------- the table


def floats(*shape: int) -> Callable[[int], list[Tensor]]:
    """Inputs or targets of normal numbers, one for each example."""
    return lambda n: [torch.randn(shape, dtype=torch.float64) for _ in range(n)]


def integers(most: int, *shape: int) -> Callable[[int], list[Tensor]]:
    """Inputs or targets of numbers below `most`, one for each example."""
    return lambda n: [torch.randint(most, shape) for _ in range(n)]


def texts(n: int) -> list[Tensor]:
    """One to four tokens for each example."""
    return [torch.randint(6, (random.Random(k).randint(1, 4),)) for k in range(n)]


def bags(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    offsets = torch.tensor([0, *(len(text) for text in texts[:-1])]).cumsum(0)
    return {"text": torch.cat([*texts]), "offsets": offsets}


def number_of_bags(model: Bags) -> dict[str, Any]:
    return {"batch_size_fn": lambda X: len(X["offsets"])}


def heads(n: int) -> list[dict[str, Tensor]]:
    return [
        {"class": label, "box": box}
        for label, box in zip(integers(3)(n), floats(4)(n), strict=True)
    ]


def two_losses() -> dict[str, Any]:
    return {"class": nn.CrossEntropyLoss(), "box": (nn.MSELoss(), 0.5)}


def stacked(items: Sequence[Any]) -> Any:
    """A batch of these examples."""
    if isinstance(items[0], dict):
        return {name: stacked([item[name] for item in items]) for name in items[0]}
    return torch.stack([*items])


@dataclass(frozen=True)
class Ordinary:
    """A model with all that a loop needs.

    Attributes:
        module: Makes the model, in single precision.
        inputs: The inputs of a number of examples.
        targets: Their targets.
        loss: Makes the loss, or losses with weights by the names of outputs.
        collate: Makes the input of a batch.
        options: Of `EmpiricalRisk`, for the model.
        needs: A package that has to be there.
        rtol: How close results are that are computed in other ways: models may compute some of
            them in single precision.
    """

    module: Callable[[], nn.Module]
    inputs: Callable[[int], Sequence[Any]]
    targets: Callable[[int], Sequence[Any]]
    loss: Callable[[], Any] = nn.CrossEntropyLoss
    collate: Callable[[Sequence[Any]], Any] = stacked
    options: Callable[[Any], dict[str, Any]] = lambda model: {}
    needs: str = "torch"
    rtol: float = 1e-10

    @property
    def missing(self) -> bool:
        return find_spec(self.needs) is None

    def make(self) -> nn.Module:
        """The model in double precision."""
        torch.manual_seed(0)
        model = self.module().double()
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean, norm.running_var = (
                torch.rand(3).double() - 0.5,
                torch.rand(3).double() + 0.5,
            )
        return model.to(DEVICE)

    def examples(self, n: int, seed: int) -> list[Any]:
        """Pairs of input and target."""
        torch.manual_seed(seed)
        return list(zip(self.inputs(n), self.targets(n), strict=True))

    def batch(self, examples: Sequence[Any]) -> Any:
        """The batch that they make."""
        batch = self.collate([x for x, _ in examples]), stacked([y for _, y in examples])
        return tree_map(lambda t: t.to(DEVICE), batch)


images, tokens, classes, words = floats(2, 4, 4), integers(5, 4), integers(3), integers(5, 4)

MODELS: dict[str, Ordinary] = {
    "MLP": Ordinary(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), floats(4), classes
    ),
    "regression": Ordinary(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
        floats(4),
        floats(2),
        nn.MSELoss,
    ),
    "Scale": Ordinary(Scale, floats(4), classes),
    "ResNet": Ordinary(ResNet, images, classes),
    "ConvNeXt": Ordinary(ConvNeXt, images, classes),
    "U-Net": Ordinary(UNet, images, integers(3, 4, 4)),
    "ViT": Ordinary(ViT, images, classes),
    "DETR": Ordinary(DETR, images, classes),
    "GPT": Ordinary(GPT, tokens, words),
    "Llama": Ordinary(Llama, tokens, words),
    "LSTM": Ordinary(LSTM, tokens, classes),
    "bags": Ordinary(Bags, texts, classes, collate=bags, options=number_of_bags),
    "LoRA": Ordinary(
        lambda: nn.Sequential(LoRA(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)), floats(4), classes
    ),
    "peft": Ordinary(peft, floats(4), classes, needs="peft"),
    "two heads": Ordinary(TwoHeads, floats(4), heads, two_losses),
    "experts": Ordinary(Experts, floats(4), classes),
}
#: Models of packages, which are slow to import.
OF_PACKAGES = {
    name: Ordinary(make, inputs, targets, needs="transformers", rtol=1e-6)
    for models, inputs, targets in (
        (LANGUAGE_MODELS, tokens, words),
        (TEXT_MODELS, tokens, classes),
        (IMAGE_MODELS, images, classes),
    )
    for name, make in models.items()
}
MODELS |= OF_PACKAGES
