"""How close is each approximation to the exact curvature? From the diagonal to the nearest
Kronecker product.

A small network learns handwritten digits. The exact blocks of its GGN, one per layer, are compared
with approximations that take a fraction of their memory: the diagonal, a trace-normalised Kronecker
product, KFAC, EKFAC, and the Kronecker product nearest to the block. The distance is the Frobenius
norm of the difference, relative to the exact block.

    python examples/ladder.py      # needs scikit-learn and matplotlib; writes docs/ladder.png
"""

import torch
from sklearn.datasets import load_digits
from style import legend, panel, write
from torch import nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    NearestKronecker,
    curvature,
)

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads gain nothing on tensors of this size

# In double precision all machines print the same figures.
digits = load_digits()
X, y = torch.tensor(digits.data / 16 - 0.5), torch.tensor(digits.target)
model = nn.Sequential(
    nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10)
).double()
loss = nn.CrossEntropyLoss()

optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(150):
    optimizer.zero_grad()
    batch = torch.randint(len(X), (200,))
    value = loss(model(X[batch]), y[batch])
    value.backward()
    optimizer.step()
print(f"accuracy {(model(X).argmax(1) == y).double().mean():.3f}, loss {loss(model(X), y):.3f}")

risk = EmpiricalRisk(model, loss, list(zip(X.split(600), y.split(600), strict=True)))
exact = {name: block.to_dense() for name, block in curvature(risk, FullBlock).blocks.items()}
whole = sum(block.norm() ** 2 for block in exact.values()) ** 0.5

LADDER = {
    "diagonal": DiagonalBlock,
    "TNT": TNT,
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "nearest Kronecker": NearestKronecker,
}
errors, traces = {}, {}
for title, approximation in LADDER.items():
    K = curvature(risk, approximation)
    difference = {name: (block.to_dense() - exact[name]).norm() for name, block in K.blocks.items()}
    errors[title] = {name: float(d / exact[name].norm()) for name, d in difference.items()}
    errors[title]["all"] = float(sum(d**2 for d in difference.values()) ** 0.5 / whole)
    traces[title] = float(K.trace / sum(block.trace() for block in exact.values()))

columns = [f"layer {name}" if name != "all" else "all layers" for name in errors["KFAC"]]
print(f"{'relative error':20}" + "".join(f"{column:>12}" for column in columns) + f"{'trace':>12}")
for title, by_layer in errors.items():
    print(
        f"{title:20}"
        + "".join(f"{error:12.3f}" for error in by_layer.values())
        + f"{traces[title]:12.3f}"
    )

total = {title: by_layer["all"] for title, by_layer in errors.items()}
assert total["nearest Kronecker"] <= total["KFAC"], (
    "no Kronecker product is nearer than the nearest"
)
assert total["EKFAC"] <= total["KFAC"], (
    "the corrected eigenvalues are the best ones in KFAC's basis"
)

ax = panel()
width = 0.8 / len(LADDER)
for k, (title, by_layer) in enumerate(errors.items()):
    places = [j + (k - len(LADDER) / 2 + 0.5) * width for j in range(len(columns))]
    ax.bar(places, by_layer.values(), width, label=title)
ax.set_xticks(range(len(columns)), columns)
ax.set(ylabel="relative distance\nto the exact block", ylim=(0, 1))
ax.grid(visible=False, axis="x")
legend(ax, 3, columnspacing=1.0, handlelength=1.2)
write(ax, "ladder")
