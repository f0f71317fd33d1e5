"""How sure is a network far from its data? README's first example, drawn.

A small network learns which points lie outside a circle. On its own it is certain everywhere but
at the circle. A Laplace approximation lets the weights be uncertain, as far as the data leave them
so: predictions stay certain where there are points, and become less so away from them.

    python examples/circle.py   # needs matplotlib; two seconds; writes docs/circle.png
"""

import torch
from matplotlib.figure import Figure
from style import write
from torch import nn

from curvlinops_plus import EKFAC, EmpiricalRisk, Laplace, curvature

torch.set_num_threads(1)
torch.manual_seed(0)
X = torch.randn(500, 2)
y = (X.norm(dim=1) > 1.2).long()
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
for _ in range(300):
    optimizer.zero_grad()
    loss(model(X), y).backward()
    optimizer.step()

K = curvature(EmpiricalRisk(model, loss, [(X, y)]), EKFAC)
la = Laplace(K).fit_prior()

EDGE, POINTS = 8.0, 241
axis = torch.linspace(-EDGE, EDGE, POINTS)
plane = torch.cartesian_prod(axis, axis)
with torch.no_grad():
    outside = {"network": model(plane).softmax(1)[:, 1], "Laplace": la.predict(plane)[:, 1]}
for method, p in outside.items():
    far = plane.norm(dim=1) > 4
    print(f"{method}: mean probability of the surer class beyond radius 4: {p[far].mean():.3f}")

figure = Figure(figsize=(9.2, 3.6), layout="constrained")
panels = figure.subplots(1, 2, sharey=True)
for ax, (method, p) in zip(panels, outside.items(), strict=True):
    image = ax.imshow(
        p.view(POINTS, POINTS).T,
        origin="lower",
        extent=(-EDGE, EDGE, -EDGE, EDGE),
        aspect="auto",
        cmap="RdBu_r",
        vmin=0,
        vmax=1,
        interpolation="bilinear",
    )
    for label, color in enumerate(("#9ecae1", "#fcae91")):
        ax.scatter(*X[y == label].T, s=5, color=color, edgecolors="black", linewidths=0.2)
    ax.set_title(method, size=13)
    ax.tick_params(labelsize=11)
bar = figure.colorbar(image, ax=panels, pad=0.01)
bar.set_label("probability of “outside”", size=12)

write(bar.ax, "circle")
