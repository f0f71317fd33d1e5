"""Targets that are several tensors, such as labels and their weights, or a list with one for each
example, and `nn.KLDivLoss` as teachers use it: the empirical Fisher matrix, whose right value comes
from the gradient of one example after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    KFACOptimizer,
    curvature,
    per_example_gradients,
)
from test.cases import close
from test.helpers import normal

LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 1])
WEIGHTS = normal(8, seed=3).abs()
TEACHER = normal(8, 3, seed=4).softmax(1)


class Target(NamedTuple):
    labels: Tensor
    weights: Tensor


def weighted(f: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (F.cross_entropy(f, labels, reduction="none") * weights).mean()


def one_by_one(f: Tensor, targets: Any) -> Tensor:
    losses = [F.cross_entropy(row.expand(len(t), -1), t) for row, t in zip(f, targets, strict=True)]
    return torch.stack(losses).mean()


# Loss, and the targets of some examples.
TARGETS: dict[str, tuple[Callable[..., Tensor], Callable[[slice], Any]]] = {
    "tuple": (lambda f, y: weighted(f, *y), lambda s: (LABELS[s], WEIGHTS[s])),
    "list": (lambda f, y: weighted(f, *y), lambda s: [LABELS[s], WEIGHTS[s]]),
    "named tuple": (
        lambda f, y: weighted(f, y.labels, y.weights),
        lambda s: Target(LABELS[s], WEIGHTS[s]),
    ),
    "mapping, and a number for all": (
        lambda f, y: weighted(f / y["temperature"], y["labels"], y["weights"]),
        lambda s: {
            "labels": LABELS[s],
            "weights": WEIGHTS[s],
            "temperature": torch.tensor(2.0).double(),
        },
    ),
    "a list of sets": (
        one_by_one,
        lambda s: [torch.arange(1 + n % 3) for n in range(8)[s]],
    ),
    "a teacher, batchmean": (
        lambda f, y: nn.KLDivLoss(reduction="batchmean")(f.log_softmax(1), y),
        lambda s: TEACHER[s],
    ),
}
# With a batch of as many examples as there are parts of a target, and one of a single example.
PARTS = [slice(0, 5), slice(5, 7), slice(7, 8)]


def problem(name: str) -> tuple[EmpiricalRisk, Tensor]:
    """A risk, and the gradients of its examples [N, P]."""
    loss, targets = TARGETS[name]
    torch.manual_seed(0)
    X, model = normal(8, 4, seed=1), nn.Linear(4, 3).double()
    rows = []
    for n in range(8):
        one = slice(n, n + 1)
        value = loss(model(X[one]), targets(one))
        gradients = torch.autograd.grad(value, [*model.parameters()])
        rows.append(torch.cat([g.flatten() for g in gradients]))
    data = [(X[part], targets(part)) for part in PARTS]
    return EmpiricalRisk(model, loss, data), torch.stack(rows)


@pytest.mark.parametrize("name", TARGETS)
def test_each_example_has_its_target(name: str) -> None:
    risk, gradients = problem(name)
    K = curvature(risk, FullBlock, vectors=Empirical())
    close(K.to_dense(), gradients.T @ gradients / 8)
    listed = [
        torch.cat([g.flatten(1) for g in of.values()], 1) for of in per_example_gradients(risk)
    ]
    close(torch.cat(listed), gradients)
    close(torch.cat([g.flatten() for g in risk.gradient().values()]), gradients.mean(0))


@pytest.mark.parametrize("log_target", [False, True])
def test_the_mean_over_a_batch_of_divergences(log_target: bool) -> None:
    """`nn.KLDivLoss(reduction="batchmean")` itself, in every use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)).double()
    loss = nn.KLDivLoss(reduction="batchmean", log_target=log_target)
    X, y = normal(8, 4, seed=1), TEACHER.log() if log_target else TEACHER
    risk = EmpiricalRisk(model, loss, [(X[part], y[part]) for part in PARTS])
    # Of log-probabilities f = log p the gradient by the logits is p - t.
    errors = model(X).exp().detach() - TEACHER
    rows = torch.cat([X, torch.ones(8, 1).double()], 1)
    gradients = errors[:, :, None] * rows[:, None]
    gradients = torch.cat([gradients[..., :4].flatten(1), gradients[..., 4]], 1)
    K = curvature(risk, FullBlock, vectors=Empirical())
    close(K.to_dense(), gradients.T @ gradients / 8)
    assert GGN(risk).shape == (15, 15)

    optimizer = KFACOptimizer(model, loss, lr=0.1, vectors=Empirical())
    values = []
    for _ in range(6):
        optimizer.zero_grad()
        value = loss(model(X), y)
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0]
