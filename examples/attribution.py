"""Which training digits matter for a prediction, and which are mislabelled? Influence scores with
five inverses.

A network learns 500 handwritten digits. Scores predict how the loss of other digits changes if half
of the 500 are left out; 100 networks trained without them show how it really changes. The linear
datamodeling score is the rank correlation of both. Then a tenth of the labels is made wrong, and
self-influence finds them.

    python examples/attribution.py   # needs scikit-learn, matplotlib; some thirty seconds; writes
    docs/attribution.png
"""

from time import perf_counter

import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from style import COLORS, panel, write
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CGInverseLinearOperator,
    DiagonalBlock,
    EmpiricalRisk,
    IdentityLinearOperator,
    RelativeDamping,
    attribution_scores,
    curvature,
    self_influence,
)

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
digits = load_digits()
X, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = torch.randperm(len(X))[:600].split([500, 100])
loss, decay, subsets = nn.CrossEntropyLoss(), 1e-2, 50


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def learn(
    weights, labels, steps=200
):  # [M, N] -> parameters of M networks, all trained side by side
    M, net = len(weights), network()
    params = {
        k: p.detach().requires_grad_()
        for k, p in stack_module_state([network() for _ in range(M)])[0].items()
    }
    optimizer = torch.optim.Adam(params.values(), lr=1e-2)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        outputs = vmap(lambda p: functional_call(net, p, X[train]))(params).flatten(0, 1)
        losses = nn.functional.cross_entropy(outputs, labels.repeat(M), reduction="none").view(
            M, -1
        )
        mean = (losses * weights).sum() / weights[0].sum()
        optimizer.zero_grad()
        (mean + decay / 2 * sum(p.square().sum() for p in params.values())).backward()
        optimizer.step()
    return {k: p.detach() for k, p in params.items()}


def as_model(params):
    model = network()
    model.load_state_dict({k: p[0] for k, p in params.items()})
    return model


# Half of the examples fifty times, with two networks each.
plain = network()
halves = torch.zeros(subsets, 500).scatter_(1, torch.rand(subsets, 500).argsort(1)[:, :250], 1.0)
retrained = learn(halves.repeat(2, 1), y[train])
outputs = vmap(lambda p: functional_call(plain, p, X[test]))(retrained).flatten(0, 1)
losses = nn.functional.cross_entropy(outputs, y[test].repeat(2 * subsets), reduction="none")
losses = losses.view(2, subsets, 100).mean(0)  # [subsets, queries]

model = as_model(learn(torch.ones(1, 500), y[train]))
risk = EmpiricalRisk(model, loss, [(X[train], y[train])])
queries = risk.with_data([(X[test], y[test])])


def rank_correlations(scores):  # [queries]; their mean is the linear datamodeling score
    predicted = -halves @ scores.T  # who is in the training set makes the loss smaller
    return torch.tensor(
        [spearmanr(*pair).statistic for pair in zip(predicted.T, losses.T, strict=True)]
    )


inverses = {
    "gradients alone": IdentityLinearOperator(risk.space),
    "diagonal": curvature(risk, DiagonalBlock).inverse(RelativeDamping(0.1)),
    "KFAC": curvature(risk, KFAC).inverse(RelativeDamping(0.1)),
    "EKFAC": curvature(risk, EKFAC).inverse(RelativeDamping(0.1)),
    "GGN, by CG": CGInverseLinearOperator(GGN(risk).shift(decay), tolerance=1e-3, max_iter=100),
}
print("linear datamodeling score, of 50 halves of the data:")
found = {}
for name, P in inverses.items():
    start = perf_counter()
    found[name] = rank_correlations(attribution_scores(P, queries, risk))
    print(f"  {name:16} {found[name].mean():.3f}   ({perf_counter() - start:.2f} s)", flush=True)

# Fifty labels become wrong ones.
wrong = torch.randperm(500)[:50]
labels = y[train].clone()
labels[wrong] = (labels[wrong] + torch.randint(1, 10, (50,))) % 10
model = as_model(learn(torch.ones(1, 500), labels))
noisy = EmpiricalRisk(model, loss, [(X[train], labels)])
is_wrong = torch.zeros(500).index_fill_(0, wrong, 1.0)
P = curvature(noisy, EKFAC).inverse(RelativeDamping(0.1))
influence = self_influence(P, noisy)
print(f"mislabelled or not? AUROC of self-influence {roc_auc_score(is_wrong, influence):.3f}")

means = [float(values.mean()) for values in found.values()]
errors = [float(1.96 * values.std() / len(values) ** 0.5) for values in found.values()]
ax = panel()
ax.barh(list(found), means, 0.65, xerr=errors, color=COLORS[4], capsize=4)
ax.set(
    xlabel="linear datamodeling score", xlim=(0, 1), title="mean over 100 queries, 95 % interval"
)
ax.grid(visible=False, axis="y")
ax.invert_yaxis()
write(ax, "attribution")
