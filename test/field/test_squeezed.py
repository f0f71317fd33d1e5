"""Models that end with `squeeze()`, which takes the axis of the examples away as well where the last
batch has one example.

Right values are those of the model that names its axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    Hessian,
    KFACOptimizer,
    Laplace,
    curvature,
    per_example_gradients,
)
from test.cases import close
from test.helpers import Written, normal

pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")
X = normal(8, 4, seed=1)
NUMBERS, VECTORS = normal(8, seed=2), normal(8, 3, seed=3)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 1])


def huber(f: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(f, y)


# Loss, targets, number of outputs.
PROBLEMS: dict[str, tuple[Callable[..., Tensor], Tensor, int]] = {
    "squared error": (nn.MSELoss(), NUMBERS, 1),
    "binary": (nn.BCEWithLogitsLoss(), (NUMBERS > 0).double(), 1),
    "a function": (huber, NUMBERS, 1),
    "vectors": (nn.MSELoss(), VECTORS, 3),
    "classes": (nn.CrossEntropyLoss(), LABELS, 3),
    "probabilities": (nn.CrossEntropyLoss(), VECTORS.softmax(1), 3),
}


def model(outputs: int, end: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    members = {"a": nn.Linear(4, 5), "b": nn.Linear(5, outputs)}
    return Written(lambda s, x: end(s.b(torch.tanh(s.a(x)))), **members).double()


def risks(name: str, bare: bool = False) -> tuple[EmpiricalRisk, EmpiricalRisk]:
    """That of a model which squeezes, with a last batch of one example, and that of all at once.

    Args:
        bare: Whether the target of that example has no axis of examples either.
    """
    loss, y, outputs = PROBLEMS[name]
    data = [(X[:7], y[:7]), (X[7:], y[7] if bare else y[7:])]
    squeezed = EmpiricalRisk(model(outputs, torch.squeeze), loss, data)
    plain = model(outputs, lambda f: f.squeeze(1) if outputs == 1 else f)
    return squeezed, EmpiricalRisk(plain, loss, [(X, y)])


def rows_of(risk: EmpiricalRisk) -> Tensor:
    """Gradients of the examples, one after the other."""
    batches = per_example_gradients(risk)
    return torch.cat([torch.cat([g.flatten(1) for g in of.values()], 1) for of in batches])


# A vector as a target would be those of several examples.
BARE = [(name, bare) for name in PROBLEMS for bare in (False, True)]
BARE = [pair for pair in BARE if pair not in (("vectors", True), ("probabilities", True))]


@pytest.mark.parametrize(("name", "bare"), BARE)
def test_a_last_batch_of_one(name: str, bare: bool) -> None:
    squeezed, plain = risks(name, bare)
    eye = torch.eye(GGN(plain).shape[0], dtype=X.dtype)
    close(GGN(squeezed) @ eye, GGN(plain) @ eye)
    close(Hessian(squeezed) @ eye, Hessian(plain) @ eye)
    close(squeezed.loss(), plain.loss())
    for vectors in (Exact(), Empirical()):
        if name == "a function" and isinstance(vectors, Exact):
            continue
        one, two = (curvature(r, DiagonalBlock, vectors=vectors) for r in (squeezed, plain))
        close(one.diagonal(), two.diagonal())
    for one, two in zip(rows_of(squeezed), rows_of(plain), strict=True):
        close(one, two)


@pytest.mark.parametrize("vectors", [Exact(), Empirical()], ids=["exact", "empirical"])
@pytest.mark.parametrize("name", ["squared error", "binary", "classes"])
def test_training_with_a_last_batch_of_one(name: str, vectors: Any) -> None:
    loss, y, outputs = PROBLEMS[name]
    ends = []
    for squeezes in (True, False):
        plain = model(outputs, lambda f: f.squeeze(1) if f.shape[1] == 1 else f)
        net = model(outputs, torch.squeeze) if squeezes else plain
        optimizer = KFACOptimizer(net, loss, lr=0.1, vectors=vectors)
        for _ in range(3):
            for rows in (slice(0, 7), slice(7, 8)):
                target = y[rows]
                if squeezes and name != "squared error" and len(target) == 1:
                    target = y[7]  # PyTorch's loss asks for the same shape
                optimizer.zero_grad()
                loss(net(X[rows]), target).backward()
                optimizer.step()
        assert not optimizer.curvature.withdrawn
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    close(ends[0], ends[1])


def pooled(squeeze: Callable[[Tensor], Tensor]) -> nn.Module:
    """Pools an image, and squeezes in front of the head."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.adaptive_avg_pool2d(torch.tanh(s.conv(x)), 1)
        return s.head(torch.tanh(s.a(squeeze(h))))

    torch.manual_seed(0)
    members = {"conv": nn.Conv2d(1, 5, 2), "a": nn.Linear(5, 4), "head": nn.Linear(4, 3)}
    return Written(forward, **members).double()


@pytest.mark.parametrize("name", ["vectors", "classes"])
def test_layers_behind_it_in_a_last_batch_of_one(name: str) -> None:
    loss, y, _ = PROBLEMS[name]
    images = X.view(8, 1, 2, 2)
    data = [(images[:7], y[:7]), (images[7:], y[7:])]
    squeezed = EmpiricalRisk(pooled(torch.squeeze), loss, data)
    plain = EmpiricalRisk(pooled(lambda h: h.flatten(1)), loss, [(images, y)])
    for approximation in (KFAC, EKFAC, DiagonalBlock):
        for vectors in (Exact(), Empirical()):
            one, two = (curvature(r, approximation, vectors=vectors) for r in (squeezed, plain))
            close(one.to_dense(), two.to_dense())
            assert not any(error > 1e-9 for *_, error in one.verify().rows)
    optimizer = KFACOptimizer(squeezed.model, loss, lr=0.1)
    other = KFACOptimizer(plain.model, loss, lr=0.1)
    for rows in (slice(0, 7), slice(7, 8)):
        for optimized, net in ((optimizer, squeezed.model), (other, plain.model)):
            output = net(images[rows])
            optimized.zero_grad()
            # PyTorch's losses ask for a target without the axis, too.
            target = y[rows] if output.ndim == 2 else y[7]
            loss(output, target).backward()
            optimized.step()
    for p, q in zip(squeezed.model.parameters(), plain.model.parameters(), strict=True):
        close(p, q)


def test_predictions_for_one() -> None:
    squeezed, _ = risks("squared error")
    la = Laplace(curvature(squeezed, DiagonalBlock), 1.0)
    means, variances = la.predict(X)
    mean, variance = la.predict(X[2:3])
    close(mean, means[2:3])
    close(variance, variances[2:3])
