"""Does a network forget earlier tasks? Five tasks one after the other, with a penalty for each old
one.

Each task is to recognise handwritten digits with another permutation of the pixels. Of old tasks
only the curvature is kept: how much their loss grows when parameters change. Elastic weight
consolidation uses the diagonal of the Fisher matrix; K-FAC uses whole layers.

    python examples/continual_learning.py   # needs scikit-learn and matplotlib; half a minute
    # writes docs/continual_learning.png
"""

import torch
from sklearn.datasets import load_digits
from style import legend, panel, write
from torch import nn

from curvlinops_plus import KFAC, DiagonalBlock, EmpiricalRisk, QuadraticPenalty, curvature

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
SEEDS, TASKS, STEPS = range(2), 5, 300
digits = load_digits()
X, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
loss = nn.CrossEntropyLoss()


def learn_all(approximation, strength, seed):
    """Mean accuracy on the tasks that were learnt so far, after each task."""
    torch.manual_seed(seed)
    train, test = torch.randperm(len(X)).split([1297, 500])
    orders = [torch.randperm(64) for _ in range(TASKS)]
    model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 10))
    penalties, accuracies = [], []
    for task, order in enumerate(orders):
        inputs, labels = X[train][:, order], y[train]
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in range(STEPS):
            some = torch.randint(len(train), (128,))
            value = loss(model(inputs[some]), labels[some])
            for penalty in penalties:
                value = value + penalty()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
        if approximation is not None:
            K = curvature(EmpiricalRisk(model, loss, [(inputs, labels)]), approximation)
            penalties.append(QuadraticPenalty(K, strength=strength))
        with torch.no_grad():
            right = [
                (model(X[test][:, order]).argmax(1) == y[test]).float().mean()
                for order in orders[: task + 1]
            ]
        accuracies.append(float(torch.stack(right).mean()))
    return accuracies


# The strengths are the best of 10, 30, 100 and 300 for each.
methods = {"no penalty": (None, 0.0), "diagonal": (DiagonalBlock, 30.0), "K-FAC": (KFAC, 30.0)}
found = {
    name: torch.tensor([learn_all(*method, seed) for seed in SEEDS])
    for name, method in methods.items()
}
for name, accuracies in found.items():
    print(
        f"{name:10} mean accuracy after each task: "
        f"{', '.join(f'{a:.3f}' for a in accuracies.mean(0).tolist())}"
    )
last = {name: accuracies[:, -1].mean() for name, accuracies in found.items()}
assert last["K-FAC"] > 0.875 > last["diagonal"] > last["no penalty"]

ax = panel()
for name, accuracies in found.items():
    ax.plot(range(1, TASKS + 1), accuracies.mean(0), marker="o", label=name)
    ax.fill_between(
        range(1, TASKS + 1), accuracies.amin(0), accuracies.amax(0), alpha=0.25, linewidth=0
    )
ax.set(
    xlabel="tasks learnt",
    ylabel="mean accuracy on all of them",
    xticks=range(1, TASKS + 1),
    ylim=(0.3, 1.0),
)
legend(ax, 3)
write(ax, "continual_learning")
