"""Which training examples caused an error? Influence functions, by conjugate gradients
preconditioned with EKFAC.

A network learns digits, a fifth of them wrongly labelled, and misclassifies a test digit. One
solve, H⁻¹ ∇ℓ_test, predicts to first order how that digit's loss changes if a training example is
left out (Koh & Liang 2017); only the last layer moves here.

    python examples/inverse.py   # needs scikit-learn and matplotlib; some fifteen seconds; writes
    two pictures
"""

import torch
from sklearn.datasets import load_digits
from style import legend, panel, write
from torch import nn
from torch.func import functional_call, grad, jvp

from curvlinops_plus import EKFAC, GGN, EmpiricalRisk, curvature
from curvlinops_plus.linalg import CGInverseLinearOperator

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
N, DECAY, loss = 1000, 1e-4, nn.CrossEntropyLoss()
order, digits = torch.randperm(1797), load_digits()
X, X_test = torch.tensor(digits.data / 8)[order].split([N, 797])
truth, y_test = torch.tensor(digits.target)[order].split([N, 797])
y = torch.where(torch.rand(N) < 0.2, (truth + torch.randint(1, 10, (N,))) % 10, truth)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for batch in torch.randint(N, (100, 100)):
    optimizer.zero_grad()
    loss(model(X[batch]), y[batch]).backward()
    optimizer.step()
model[0].requires_grad_(False)
head = {name: p for name, p in model.named_parameters() if p.requires_grad}


def losses(p, X, y):
    return nn.functional.cross_entropy(functional_call(model, p, X), y, reduction="none")


def minimize(group):
    """The last layer at the minimum of the mean loss and weight decay; a group of examples counts
    as 0.
    """
    stop = {"max_iter": 3000, "tolerance_grad": 1e-6, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS(head.values(), **stop, line_search_fn="strong_wolfe")

    def objective():
        optimizer.zero_grad()
        value = losses(head, X, y).index_fill(0, group, 0).mean() + DECAY / 2 * sum(
            (p**2).sum() for p in head.values()
        )
        value.backward()
        return value

    optimizer.step(objective)
    return {name: p.detach().clone() for name, p in head.items()}


minimum = minimize(order[:0])  # of all examples
errors, before = (model(X_test).argmax(1) != y_test).nonzero(), losses(minimum, X_test, y_test)
one = errors[before[errors[:, 0]].argsort()[len(errors) // 2]]  # the error of median loss
print(
    f"{len(errors)} of 797 test digits wrong; one {y_test[one].item()} is read as "
    f"{model(X_test[one]).argmax()}"
)
risk = EmpiricalRisk(model, loss, [(X, y)], head)
H = GGN(risk).shift(DECAY)
E = curvature(risk, EKFAC, separate_weight_and_bias=True)
for name, P in ("no preconditioner", None), ("EKFAC's inverse", E.inverse(damping=DECAY)):
    inverse = CGInverseLinearOperator(H, tolerance=1e-6, preconditioner=P)
    solution = inverse @ grad(lambda p: losses(p, X_test[one], y_test[one]).sum())(minimum)
    print(f"CG with {name}: {inverse.info.iterations} iterations")
influence = jvp(lambda p: losses(p, X, y), (minimum,), (solution,))[1] / N  # ∇ℓ_nᵀ H⁻¹ ∇ℓ_test / N
order, pairs, wrong = influence.argsort(), [], y != truth  # from harmful to helpful
print(
    f"wrong labels: {wrong[order[:50]].sum()} of the 50 most harmful examples, {wrong.sum()} of "
    f"all {N}"
)
for group in [*order[:100].split(10), *order[-100:].split(10)]:
    after = losses(minimize(group), X_test[one], y_test[one])
    pairs.append([influence[group].sum(), (after - before[one]).item()])
pairs = torch.tensor(pairs).T  # predicted and actual change
print(
    f"20 groups of 10 left out: {pairs.prod(0).gt(0).sum()} signs right, correlation "
    f"{pairs.corrcoef()[0, 1]:.3f}"
)
changes, digits = panel(), panel(2.4)
changes.plot(*pairs.numpy(), "o", label="groups of 10 examples")
changes.plot(pairs[0].numpy(), pairs[0].numpy(), label="as predicted")
changes.set(xlabel="predicted change of the test loss (nats)", ylabel="actual change (nats)")
legend(changes)
write(changes, "inverse")
rows = torch.stack([order[:5], order.flip(0)[:5]])
tiles = nn.functional.pad(X[rows].view(2, 5, 8, 8), (1, 1, 2, 2), value=0.0)  # digits don't touch
digits.imshow(tiles.transpose(1, 2).reshape(24, 50).numpy(), cmap="gray_r")
digits.hlines(11.5, -0.5, 49.5, colors="black", linewidth=1)
digits.set(title=f"labels of the most harmful: {y[rows[0]].tolist()}", xticks=[], yticks=[])
digits.set(xlabel=f"labels of the most helpful: {y[rows[1]].tolist()}")
digits.grid(visible=False)
digits.spines[:].set_visible(False)
write(digits, "inverse_digits")
