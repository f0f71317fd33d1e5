"""What likelihoods refuse, and in which words: a line for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import (
    FromDistribution,
    Likelihood,
    likelihood_of,
    register_likelihood,
)
from test.helpers import Refusal, refusals, seeded

CE, MSE, NLL, BCE = nn.CrossEntropyLoss(), nn.MSELoss(), nn.NLLLoss(), nn.BCELoss()
GAUSSIAN, BINARY = nn.GaussianNLLLoss(), nn.BCEWithLogitsLoss()
LOGITS = torch.randn(2, 3, generator=seeded())
INDICES = r"needs class indices of shape .*, integers, .*class probabilities"


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def canonical(loss: Any, f: Tensor, y: Any, axis: int | None = None, N: int | None = None) -> Any:
    N = len(f) if N is None else N
    return likelihood_of(loss).canonical(f, y, N, axis)


class Sine(Likelihood):
    """Is not convex."""

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        return (F - Y).sin().sum(-1)


def mean_and_scale(f: Tensor) -> distributions.Distribution:
    mean, log_scale = f.chunk(2, -1)
    return distributions.Normal(mean, log_scale.exp())


def summed(f: Tensor) -> distributions.Distribution:
    return distributions.Poisson(f.exp().sum((1, 2)))


REFUSED: list[Refusal] = [
    # losses
    (lambda: register_likelihood(nn.MSELoss()),
     TypeError, "expects the class of a loss, got MSELoss"),
    (lambda: likelihood_of(nn.CTCLoss()), UnsupportedError,
     r"loss CTCLoss\..* Known losses: .*MSELoss(.|\n)*@register_likelihood\(CTCLoss\)\n"),
    (lambda: likelihood_of(nn.L1Loss()),
     UnsupportedError, "L1Loss. It has no curvature far from the target.*Laplace"),
    (lambda: likelihood_of(nn.HuberLoss()),
     UnsupportedError, "HuberLoss. It has no curvature far from the target"),
    (lambda: likelihood_of(nn.CrossEntropyLoss), UnsupportedError,
     "loss CrossEntropyLoss. Losses are known by their class.*pass the module"),
    (lambda: likelihood_of(functional.cross_entropy),
     UnsupportedError, "known by their class.*pass the module"),
    (lambda: likelihood_of(lambda f, y: (f - y).sum()),
     UnsupportedError, "for the loss <lambda>"),
    *[(lambda kind=kind: likelihood_of(kind(torch.tensor([1.0, -2.0]))),
       UnsupportedError, "negative weight -2; weights must be >= 0")
      for kind in (nn.CrossEntropyLoss, nn.NLLLoss)],
    (lambda: Sine().hessian_root(torch.tensor([[[1.0, -0.5]]]), zeros(1, 1, 2)), UnsupportedError,
     "Hessian of Sine .* has the eigenvalue -0.841 .*not convex.*Fisher"),
    # shapes
    *[(lambda loss=loss, f=f, y=y: canonical(loss, zeros(*f), zeros(*y)),
       ValueError, r"needs a target of the output's shape \[4.*got \[\d.*reshape")
      for loss in (MSE, BINARY)
      for f, y in [((4, 1), (4,)), ((4,), (4, 1)), ((4, 3), (4, 1)), ((4, 3), (2, 3))]],
    *[(lambda shape=shape, N=N: canonical(MSE, zeros(*shape), zeros(*shape), N=N),
       ValueError, rf"of shape \[.*\], must hold the {N} examples")
      for shape, N in [((), 1), ((3, 2), 2), ((2, 2), 4), ((0, 2), 1), ((2, 2), 0)]],
    *[(lambda shape=shape, axis=axis: canonical(CE, zeros(*shape), zeros(*shape), axis, 1),
       ValueError, r"CrossEntropyLoss: axis .* of an output of shape \[")
      for shape, axis in [((3,), None), ((2, 3), 0), ((2, 3), -2), ((2, 3), 2)]],
    *[(lambda weights=weights: canonical(nn.BCEWithLogitsLoss(**weights), zeros(4, 3), zeros(4, 3)),
       ValueError, rf"{next(iter(weights))}=.*can't be broad")
      for shape in [(2,), (1, 4, 3), (4,)]
      for weights in ({"weight": torch.ones(shape)}, {"pos_weight": torch.ones(shape)})],
    (lambda: canonical(CE, zeros(2, 3, 5), indices(2)),
     ValueError, r"axis 1 .*\[2, 5\].*target of shape \[2\].*movedim"),
    (lambda: canonical(nn.CrossEntropyLoss(torch.ones(4)), zeros(2, 3), indices(2)),
     ValueError, r"shape \[4\], .* 3 classes along axis 1"),
    (lambda: canonical(nn.BCELoss(torch.ones(2, 1)), zeros(2, 3) + 0.5, zeros(2, 3)),
     ValueError, r"shape \[2, 1\].*one entry per example"),
    (lambda: canonical(GAUSSIAN, zeros(2, 3), zeros(2, 3)),
     ValueError, r"along axis 1, an even number; got shape \[2, 3\]"),
    (lambda: canonical(GAUSSIAN, zeros(2, 4), zeros(2, 4)),
     ValueError, r"half the output along axis 1, \[2, 2\] .* got \[2, 4\]"),
    # another number of entries, other axes
    (lambda: canonical(FromDistribution(mean_and_scale), zeros(4, 5, 6), zeros(4, 5, 6)),
     ValueError, r"\[4, 5, 6\] makes a Normal for targets of shape \[4, 5, 3\], .*\[4, 5, 6\]"),
    (lambda: canonical(FromDistribution(mean_and_scale), zeros(4, 5, 6), zeros(4, 3, 5)),
     ValueError, r"\[4, 5, 6\] makes a Normal for targets of shape \[4, 5, 3\], .*\[4, 3, 5\]"),
    (lambda: canonical(FromDistribution(summed), zeros(4, 3), torch.ones(4)),
     ValueError, r"batch shape that begins with \[4, 1\].*got batch shape \[4\]"),
    # numbers
    *[(lambda k=k: canonical(CE, zeros(2, 3), torch.tensor([0, k])),
       ValueError, rf"class index {k}, .* 0 to 2 \(ignore_index is")
      for k in (3, -1, -101)],
    *[(lambda y=y: canonical(CE, zeros(2, 3), y), ValueError, INDICES)
      for y in (zeros(2), zeros(2).bool(), indices(2, 3), indices(3))],
    (lambda: canonical(nn.CrossEntropyLoss(ignore_index=1), zeros(2, 3), zeros(2, 3)),
     ValueError, "without ignore_index, class probabilities"),
    (lambda: canonical(MSE, indices(2, 3), zeros(2, 3)),
     ValueError, r"floating-point output of the model, got torch\.int64"),
    (lambda: canonical(MSE, zeros(2, 3), [0.0]),
     TypeError, "needs a target that is a tensor, got a list"),
    (lambda: canonical(NLL, LOGITS, indices(2)),
     ValueError, r"the exponentials .* 3 numbers sum to .*CrossEntropyLoss"),
    (lambda: canonical(NLL, LOGITS.log_softmax(1), LOGITS),
     ValueError, r"needs class indices without axis 1, got shape \[2, 3\]"),
    (lambda: canonical(BCE, torch.tensor([[-1.0, 2.0]]), zeros(1, 2)),
     ValueError, "from -1 to 2; probabilities .*BCEWithLogitsLoss"),
    (lambda: canonical(nn.PoissonNLLLoss(log_input=False), zeros(1, 2) - 1, zeros(1, 2)),
     ValueError, "the rate -1; .*softplus"),
    (lambda: canonical(GAUSSIAN, zeros(2, 4) - 1, zeros(2, 2)), ValueError, "negative variance"),
]  # fmt: skip
test_refusals = refusals(REFUSED)
