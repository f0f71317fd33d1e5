"""How certain is a regression, and which network is best? A Laplace approximation answers both
without test data.

Three parts: error bands around a curve that was learnt from a few points; negative log-likelihood
and coverage of intervals on diabetes patients, with networks that fit their training data exactly;
and networks of several sizes for handwritten digits, ranked by their marginal likelihood, which
needs training data alone.

    python examples/laplace_regression.py   # needs scikit-learn and matplotlib; half a minute;
    writes two pictures
"""

from itertools import pairwise
from math import pi

import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_diabetes, load_digits
from style import COLORS, legend, panel, write
from torch import nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    Laplace,
    curvature,
    plot_predictions,
)

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
torch.set_default_dtype(torch.float64)


def network(*widths):
    layers = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def train(model, loss, X, y, steps, decay=0.0, lr=1e-2):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
    return EmpiricalRisk(model, loss, [(X, y)])


# 1. A curve, with a gap in the data.
torch.manual_seed(0)
X = torch.cat([torch.rand(30, 1) * 2 - 3, torch.rand(30, 1) * 2 + 1])
y = X.sin() + 0.1 * torch.randn(60, 1)
risk = train(network(1, 20, 20, 1), nn.MSELoss(), X, y, 1500)
la = Laplace(GGN(risk)).fit_prior()
grid = torch.linspace(-5, 5, 200)[:, None]
print(f"curve: noise {la.noise:.3f} (true .1), prior precision {la.prior_precision:.3f}")
ax = plot_predictions(
    grid, la.predict(grid), data=(X, y), ax=panel(), label="network, 95 % of Laplace"
)
ax.plot(grid, grid.sin(), color=COLORS[1], linestyle="--", label="truth")
ax.set(ylim=(-4, 4))
legend(ax)
write(ax, "laplace")


# 2. Diabetes: 150 patients for training, 292 for testing; inputs and outputs have variance 1.
def diabetes(seed, approximations):
    """Rows [negative log-likelihood, coverage of 95 % intervals]: of the training error, then of
    each approximation.
    """
    torch.manual_seed(seed)
    data = load_diabetes()
    X, y = torch.tensor(data.data), torch.tensor(data.target)[:, None]
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    train_, test = torch.randperm(len(X)).split([150, 292])
    risk = train(network(10, 30, 1), nn.MSELoss(), X[train_], y[train_], 1000, decay=1e-4)
    with torch.no_grad():
        predictions = [(risk.model(X[test]), risk.loss())]
    predictions += [Laplace(make(risk)).fit_prior().predict(X[test]) for make in approximations]
    error = [(y[test] - mean) ** 2 for mean, _ in predictions]
    return torch.tensor(
        [
            [
                float((e / v + (2 * pi * v).log()).mean() / 2),
                float((e < 1.96**2 * v).double().mean()),
            ]
            for e, (_, v) in zip(error, predictions)
        ]
    )


approximations = {
    "GGN, all entries": GGN,
    "EKFAC": lambda risk: curvature(risk, EKFAC),
    "KFAC": lambda risk: curvature(risk, KFAC),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock),
}
rows = torch.stack([diabetes(seed, approximations.values()) for seed in range(5)]).mean(0).tolist()
print("diabetes, five seeds: negative log-likelihood, coverage of 95 % intervals")
for name, (nll, coverage) in zip(["training error alone", *approximations], rows):
    print(f"  {name:20} {nll:7.2f}  {coverage:.2f}")

# 3. Which network? 200 digits for training, all others for testing; the marginal likelihood needs
# only the 200.
digits = load_digits()
X, y = torch.tensor(digits.data) / 8 - 1, torch.tensor(digits.target)
sizes = [
    (64, *hidden, 10)
    for hidden in [(), (4,), (16,), (64,), (4, 4), (16, 16), (64, 64), (16, 16, 16)]
]
evidence, losses = [], []
for seed in range(2):
    torch.manual_seed(seed)
    train_, test = torch.randperm(len(X)).split([200, len(X) - 200])
    for decay in (1e-3, 1e-2):
        for size in sizes:
            risk = train(network(*size), nn.CrossEntropyLoss(), X[train_], y[train_], 150, decay)
            la = Laplace(curvature(risk, KFAC)).fit_prior()
            evidence.append(float(la.log_marginal_likelihood()) / 200)
            with torch.no_grad():
                losses.append(float(risk.losses[0].loss(risk.model(X[test]), y[test])))
print(
    f"digits, {len(losses)} networks: rank correlation of evidence and test loss "
    f"{spearmanr(evidence, losses)[0]:.2f}"
)
ax = panel()
ax.plot(evidence, losses, "o", color=COLORS[0])
ax.set(xlabel="log marginal likelihood per training digit (nats)", ylabel="test loss (nats)")
write(ax, "laplace_evidence")
