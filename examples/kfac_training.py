"""Training with K-FAC: an autoencoder of digits. Nothing in the training loop changes but the
optimizer's name.

A bottleneck of eight numbers between layers of tanh is hard for first-order methods: the loss is
curved a thousand times more along some directions than along others. K-FAC and EKFAC (the same with
corrected eigenvalues) divide by the curvature, which they estimate from the training batches. All
optimizers take the same batches from the same start, with a cosine schedule of the learning rate;
that of Adam is the best of six.

    pip install -e ".[examples]" python examples/kfac_training.py        # about half a minute on
    one core; writes docs/kfac_training.png
"""

import time
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from style import legend, panel, write
from torch import nn

from curvlinops_plus import EKFAC, KFACOptimizer

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
digits = torch.tensor(load_digits().data / 16, dtype=torch.float32)
digits = digits[torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))]
train, test, STEPS = digits[:1500], digits[1500:], 400
loss = nn.MSELoss()


def squared_error(model, x):
    """Per image."""
    with torch.no_grad():
        return (model(x) - x).square().sum(1).mean().item()


def run(make):
    """Steps, seconds and errors of one training run."""
    torch.manual_seed(0)
    widths = [64, 48, 24, 8, 24, 48, 64]
    model = nn.Sequential(
        *[part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.Tanh())][:-1]
    )
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator, seconds, curve = torch.Generator().manual_seed(0), 0.0, []
    for step in range(STEPS):
        x = train[torch.randint(len(train), (500,), generator=generator)]
        start = time.process_time()
        optimizer.zero_grad()
        loss(model(x), x).backward()
        optimizer.step()
        schedule.step()
        seconds += time.process_time() - start
        if step % 5 == 4:
            curve.append((step + 1, seconds, squared_error(model, train)))
    return curve, squared_error(model, test)


runs = {
    "K-FAC": run(lambda model: KFACOptimizer(model, loss, lr=0.3)),
    "EKFAC": run(lambda model: KFACOptimizer(model, loss, lr=0.3, approximation=EKFAC)),
    "K-FAC, statistics every 5 steps": run(
        lambda model: KFACOptimizer(model, loss, lr=0.3, statistics_every=5)
    ),
}
rates = (1e-3, 3e-3, 1e-2, 2e-2, 3e-2, 6e-2)
adam = {lr: run(lambda model, lr=lr: torch.optim.Adam(model.parameters(), lr)) for lr in rates}
best = min(adam, key=lambda lr: adam[lr][0][-1][2])
runs[f"Adam, lr {best}"] = adam[best]

print(f"squared error per image after {STEPS} steps")
for name, (curve, of_test) in runs.items():
    _, seconds, of_train = curve[-1]
    print(
        f"{name:32} train {of_train:.3f}  test {of_test:.3f}  {1000 * seconds / STEPS:4.1f} ms per "
        "step"
    )
target = runs[f"Adam, lr {best}"][0][-1][2]
for name, (curve, _) in runs.items():
    step, seconds, _ = next(point for point in curve if point[2] <= target)
    print(f"{name:32} reaches Adam's last error, {target:.3f}, after {step} steps, {seconds:.1f} s")

ax = panel()
for name, (curve, _) in runs.items():
    steps, _, errors = zip(*curve, strict=True)
    ax.semilogy(steps, errors, label=name)
ax.set(xlabel="step", ylabel="squared error per image", ylim=(0.6, 8))
ax.set_yticks(marks := (0.7, 1, 2, 4, 8), map(str, marks), minor=False)
ax.minorticks_off()
legend(ax, columnspacing=1.0)
write(ax, "kfac_training")
