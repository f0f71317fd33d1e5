"""Curvature in a training loop: an estimator records its forward passes, and its inverse
preconditions the gradient.

An autoencoder of handwritten digits with a bottleneck of six numbers is hard for gradient descent:
directions differ in curvature by orders of magnitude. Only one `with` is added to the loop: it
records the forward pass for an exponential moving average of EKFAC, whose damped inverse is
refreshed every tenth step. Half way everything is written to a file and read again, and training
continues from there.

    pip install -e ".[examples]" python examples/streaming.py            # some fifteen seconds on
    two cores; writes docs/streaming.png
"""

import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from style import legend, panel, write
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import EKFAC, CurvatureEstimator, EmpiricalRisk, MonteCarlo, load, save

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
X = torch.tensor(load_digits().data / 16, dtype=torch.float32)
loss, STEPS = nn.MSELoss(), 400


def start():
    """The same network and the same order of batches for everybody."""
    torch.manual_seed(0)
    widths = [64, 48, 24, 6, 24, 48, 64]
    layers = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.Tanh())][:-1]
    loader = DataLoader(
        TensorDataset(X),
        128,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        drop_last=True,
    )
    return nn.Sequential(*layers), (batch[0] for _ in range(STEPS) for batch in loader)


def train(lr, curved, interrupt=False):
    """Losses of all data, every tenth step."""
    model, batches = start()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)

    def listener():
        risk = EmpiricalRisk(model, loss, ())
        return CurvatureEstimator(risk, EKFAC, vectors=MonteCarlo(seed=1), decay=0.95, damping=1e-3)

    estimator, losses = listener(), []
    for step in range(STEPS):
        x = next(batches)
        optimizer.zero_grad()
        if curved:
            with estimator.listen((x, x)):
                value = loss(model(x), x)
        else:
            value = loss(model(x), x)
        value.backward()
        if curved:
            if step % 10 == 0:
                estimator.refresh()
            direction = estimator.inverse() @ [p.grad for p in model.parameters()]
            slope = sum((d * p.grad).sum() for d, p in zip(direction, model.parameters()))
            shorter = min(
                1.0, (1e-4 / (lr**2 * slope)).sqrt()
            )  # a bound on the length of a step, in its own metric
            for p, d in zip(model.parameters(), direction):
                p.grad.copy_(shorter * d)
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                losses.append(loss(model(X), X).item())
        if interrupt and step == STEPS // 2:
            with tempfile.TemporaryDirectory() as folder:
                save(estimator.state_dict(), Path(folder) / "curvature.safetensors")
                estimator = listener()
                estimator.load_state_dict(load(Path(folder) / "curvature.safetensors"))
    return losses


curves = {f"SGD, lr {lr}": train(lr, False) for lr in (1.0, 3.0, 5.0)}
curves |= {f"EKFAC, lr {lr}": train(lr, True) for lr in (0.1, 0.3)}
for name, losses in curves.items():
    print(
        f"{name:15} mean squared error after 100, 200, 400 steps: {losses[9]:.4f} {losses[19]:.4f} "
        f"{losses[39]:.4f}"
    )
same = train(0.3, True, interrupt=True) == curves["EKFAC, lr 0.3"]
verdict = "bit for bit the same" if same else "different"
print(f"saved after {STEPS // 2} steps and read again, the other half is {verdict}")

ax = panel()
for name, losses in curves.items():
    diverged = not losses[-1] < 1
    ax.semilogy(range(10, STEPS + 1, 10), losses, label=f"{name} (diverges)" if diverged else name)
ax.set(xlabel="step", ylabel="mean squared error", ylim=(0.01, 0.2))
ax.set_yticks(ticks := [0.01, 0.02, 0.05, 0.1, 0.2], map(str, ticks), minor=False)
ax.minorticks_off()
legend(ax)
write(ax, "streaming")
