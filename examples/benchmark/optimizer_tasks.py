"""What the optimizers are compared on: three networks with data made here, minutes on one core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A network, its loss, its batches and how a result is judged.

    Attributes:
        model: Makes the network, with PyTorch's global random numbers.
        loss: Of a batch, as it is trained.
        batch: Draws one; without the validation data if the second argument is true, as in trials.
        splits: "train", "validation" and "test": what is judged, with the model in evaluation mode.
        judge: Outputs and targets to figures by name; the first one is the error that counts.
        steps: At "equal steps".
        floor: No model has a smaller expected error.
    """

    model: Callable[[], nn.Module]
    loss: nn.Module
    batch: Callable[[Generator, bool], Batch]
    splits: Mapping[str, Batch]
    judge: Callable[[Tensor, Tensor], dict[str, float]]
    steps: int
    floor: float = 0.0


def _seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


@lru_cache
def _digits() -> Batch:
    """1797 images of 8×8 pixels in [0, 1], in an order of chance."""
    X, y = (torch.tensor(t) for t in load_digits(return_X_y=True))
    order = torch.randperm(len(X), generator=_seeded(0))
    return X[order].float() / 16, y[order]


def autoencoder() -> Task:
    """Digits through a bottleneck of eight numbers between layers of tanh; 1500 images and 297 for
    the test.
    """
    images = _digits()[0]
    train, validation, test = images[:1500], images[1200:1500], images[1500:]

    def model() -> nn.Module:
        widths = [64, 48, 24, 8, 24, 48, 64]
        return nn.Sequential(
            *[part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.Tanh())][:-1]
        )

    def batch(generator: Generator, trial: bool) -> Batch:
        x = train[torch.randint(1200 if trial else 1500, (500,), generator=generator)]
        return x, x

    def judge(output: Tensor, x: Tensor) -> dict[str, float]:
        return {"squared error per image": (output - x).square().sum(1).mean().item()}

    splits = {"train": (train, train), "validation": (validation, validation), "test": (test, test)}
    return Task(model, nn.MSELoss(), batch, splits, judge, steps=500)


# -------------------------------------------------------------------------------------- transformer
SYMBOLS, LENGTH, WIDTH = 32, 32, 64


class MarkovText:
    """Text in which a character depends on the two before it, in its stationary distribution.

    Attributes:
        next: Probabilities of the next character; `[c, b, a]` is that of `a` after `c b`.
        pairs: Probabilities of two characters in sequence.
        entropy: Mean entropy of the characters 1, 2, ..., `LENGTH`, each given those before, the
            first of which is 0.
    """

    def __init__(self) -> None:
        # Three in four contexts share what the character before says; the table has no shorter
        # description otherwise.
        logits = 1.5 * torch.randn(
            SYMBOLS, SYMBOLS, SYMBOLS, generator=_seeded(1), dtype=torch.float64
        )
        logits += 1.5 * torch.randn(SYMBOLS, SYMBOLS, generator=_seeded(2), dtype=torch.float64)
        self.next = logits.softmax(-1)
        pairs = torch.full((SYMBOLS, SYMBOLS), SYMBOLS**-2.0, dtype=torch.float64)
        for _ in range(200):
            pairs = torch.einsum("cb,cba->ba", pairs, self.next)
        self.pairs = pairs
        third = torch.einsum("cb,cba->cba", pairs, self.next)
        after_two = -(third * self.next.log()).sum()
        after_one = -(pairs * (pairs / pairs.sum(1, keepdim=True)).log()).sum()
        self.entropy = ((after_one + (LENGTH - 1) * after_two) / LENGTH).item()

    def sample(self, num: int, generator: Generator) -> Batch:  # [num, LENGTH], [num, LENGTH]
        """Texts, and the same shifted by one character."""
        first = torch.multinomial(self.pairs.flatten(), num, replacement=True, generator=generator)
        text = [first // SYMBOLS, first % SYMBOLS]
        while len(text) <= LENGTH:
            text.append(
                torch.multinomial(self.next[text[-2], text[-1]], 1, generator=generator)[:, 0]
            )
        found = torch.stack(text, 1)
        return found[:, :-1], found[:, 1:]


class Attention(nn.Module):
    """Causal self-attention with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, WIDTH] -> the same
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each after layer norm and beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:  # [N, T, WIDTH] -> the same
        x = x + self.attention(x)
        return x + self.perceptron(x)


class Transformer(nn.Module):
    """Two blocks; token and position embeddings are added, and the head is a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.1)
        self.blocks = nn.Sequential(TransformerBlock(), TransformerBlock(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, text: Tensor) -> Tensor:  # [N, T] -> [N, SYMBOLS, T], as the loss takes it
        places = torch.arange(text.shape[1]).expand_as(text)
        return self.head(self.blocks(self.tokens(text) + self.positions(places))).transpose(1, 2)


def _cross_entropy(output: Tensor, y: Tensor) -> dict[str, float]:
    return {"cross-entropy": F.cross_entropy(output, y).item()}


def transformer() -> Task:
    """Order-2 Markov text over 32 characters; every batch of 32 × 32 characters is new."""
    source = MarkovText()
    splits = {
        name: source.sample(128, _seeded(seed)) for name, seed in (("validation", 10), ("test", 11))
    }
    return Task(
        Transformer,
        nn.CrossEntropyLoss(),
        lambda generator, _: source.sample(32, generator),
        splits,
        _cross_entropy,
        steps=300,
        floor=source.entropy,
    )


# ---------------------------------------------------------------------------------------------- CNN
def augmented(x: Tensor, generator: Generator) -> Tensor:  # [N, 1, 8, 8] -> the same
    """Images that are turned and scaled a little, moved by up to a pixel, and noisy."""
    num = len(x)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num, generator=generator)

    angle, scale = uniform(-0.25, 0.25), uniform(0.9, 1.1)
    cos, sin = angle.cos() / scale, angle.sin() / scale
    shift = uniform(-0.25, 0.25), uniform(-0.25, 0.25)  # of a half width of four pixels
    affine = torch.stack(
        [torch.stack([cos, -sin, shift[0]], 1), torch.stack([sin, cos, shift[1]], 1)], 1
    )
    moved = F.grid_sample(
        x, F.affine_grid(affine, list(x.shape), align_corners=False), align_corners=False
    )
    return moved + 0.1 * torch.randn(x.shape, generator=generator)


def cnn() -> Task:
    """Digits by a convolutional network with batch norm, from augmented images; 1200 images and 597
    for the test.
    """
    X, y = _digits()[0][:, None].unflatten(-1, (8, 8)), _digits()[1]
    rows = {"train": slice(1200), "validation": slice(900, 1200), "test": slice(1200, None)}

    def model() -> nn.Module:
        parts: list[nn.Module] = []
        for i, o in pairwise([1, 8, 16, 16]):
            parts += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
        parts.insert(6, nn.MaxPool2d(2))
        return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def batch(generator: Generator, trial: bool) -> Batch:
        chosen = torch.randint(900 if trial else 1200, (128,), generator=generator)
        return augmented(X[chosen], generator), y[chosen]

    def judge(output: Tensor, y: Tensor) -> dict[str, float]:
        wrong = (output.argmax(1) != y).double().mean().item()
        return _cross_entropy(output, y) | {"error, %": 100 * wrong}

    return Task(
        model,
        nn.CrossEntropyLoss(),
        batch,
        {name: (X[r], y[r]) for name, r in rows.items()},
        judge,
        steps=200,
    )


TASKS = {"autoencoder": autoencoder, "transformer": transformer, "cnn": cnn}
