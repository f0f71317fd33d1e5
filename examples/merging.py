"""Can networks that learnt different classes be merged? An average, weighted by the curvature of
each loss.

A small network is trained on a few digits. Two copies of it learn more, five classes each, and
forget the others. Weighted by the curvature of each copy's loss, an average of their parameters
keeps what matters to each. Diagonal Fisher matrices weight parameters one by one, K-FAC whole
layers.

    python examples/merging.py   # needs scikit-learn and matplotlib; half a minute; writes
    docs/merging.png
"""

import copy

import torch
from sklearn.datasets import load_digits
from style import COLORS, panel, write
from torch import nn

from curvlinops_plus import KFAC, DiagonalBlock, EmpiricalRisk, curvature, merge

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
SEEDS = range(5)
digits = load_digits()
X, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
loss = nn.CrossEntropyLoss()


def learn(model, examples, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        some = examples[torch.randint(len(examples), (128,))]
        optimizer.zero_grad()
        loss(model(X[some]), y[some]).backward()
        optimizer.step()
    return model


def accuracies(seed):
    """Of the better expert and of merged networks, on all classes."""
    torch.manual_seed(seed)
    train, test = torch.randperm(len(X)).split([1297, 500])
    base = learn(
        nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)), train[:200], steps=30
    )
    parts = train[y[train] < 5], train[y[train] >= 5]
    experts = [learn(copy.deepcopy(base), part, steps=300) for part in parts]
    risks = [
        EmpiricalRisk(model, loss, [(X[part], y[part])])
        for model, part in zip(experts, parts, strict=True)
    ]

    average = copy.deepcopy(base)
    EmpiricalRisk(average, loss, []).assign((risks[0].vector() + risks[1].vector()) / 2)
    merged = [
        merge(experts, [curvature(risk, kind) for risk in risks]) for kind in (DiagonalBlock, KFAC)
    ]
    with torch.no_grad():
        right = [
            (model(X[test]).argmax(1) == y[test]).float().mean()
            for model in (*experts, average, *merged)
        ]
    return torch.stack([max(right[:2]), *right[2:]])


names = "one expert", "average", "diagonal", "K-FAC"
runs = torch.stack([accuracies(seed) for seed in SEEDS])  # [5, 4]
found = runs.mean(0).tolist()
print(
    "accuracy on all ten digits: "
    f"{', '.join(f'{name} {a:.3f}' for name, a in zip(names, found, strict=True))}"
)
assert found[3] > 0.887
assert found[3] > max(found[:3])

ax = panel()
ends = (runs.mean(0) - runs.amin(0)).tolist(), (runs.amax(0) - runs.mean(0)).tolist()
ax.barh(names, found, 0.65, xerr=ends, color=COLORS[4], capsize=4)
ax.set(xlabel="accuracy on all ten digits", xlim=(0, 1), title="mean and range of five seeds")
ax.grid(visible=False, axis="y")
ax.invert_yaxis()
write(ax, "merging")
