"""How many weights can be set to zero? Without training again, by magnitude, a diagonal and KFAC.

A network learns handwritten digits, and loses 70 to 95 percent of its weights and biases: the
smallest ones, those that matter least by the diagonal of the curvature (optimal brain damage), or
those that the others can compensate for according to KFAC (optimal brain surgeon), at once or in
twenty rounds.

    python examples/pruning.py   # needs scikit-learn and matplotlib; some thirty seconds; writes
    docs/pruning.png
"""

from copy import deepcopy

import torch
from sklearn.datasets import load_digits
from style import legend, panel, write
from torch import nn

from curvlinops_plus import (
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    IdentityLinearOperator,
    curvature,
    prune,
)

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
digits = load_digits()
X, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = torch.randperm(len(X)).split([1200, 597])

model = nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(40):
    for batch in train[torch.randperm(1200)].split(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[batch]), y[batch]).backward()
        optimizer.step()


def accuracy(network):
    return (network(X[test]).argmax(1) == y[test]).double().mean()


risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[train], y[train])])
smallest, diagonal = IdentityLinearOperator(risk.space), curvature(risk, DiagonalBlock)
K = curvature(risk, KFAC)
ways = {
    "magnitude": (smallest, 1),
    "diagonal": (diagonal, 1),
    "KFAC, one round": (K, 1),
    "KFAC, 20 rounds": (K, 20),
}
sparsities = (0.7, 0.8, 0.9, 0.95)
ax = panel()
print(f"{K.shape[0]} parameters, accuracy {accuracy(model):.3f}; with so many of them zero:")
print(" " * 16 + "".join(f"{s:8.0%}" for s in sparsities))
for name, (curve, rounds) in ways.items():
    found = []
    for sparsity in sparsities:
        pruned = deepcopy(model)
        prune(pruned, curve, sparsity, rounds)
        found.append(accuracy(pruned))
    print(f"{name:16}" + "".join(f"{a:8.3f}" for a in found), flush=True)
    ax.plot([100 * s for s in sparsities], found, marker="o", label=name)

ax.axhline(accuracy(model), color="gray", linestyle=":", label="all parameters")
ax.set(xlabel="parameters that are zero (%)", ylabel="accuracy on test digits", ylim=(0, 1))
legend(ax)
write(ax, "pruning")
