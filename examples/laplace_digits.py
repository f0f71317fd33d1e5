"""Is a network less confident on images that are not digits? A Laplace approximation of a small
CNN, with EKFAC.

A CNN learns 300 handwritten digits. Shuffled pixels of digits are not digits, yet the network is
often confident on them. The curvature of the training loss says how well the data determine the
weights; predictions that take this uncertainty into account distinguish digits from shuffled pixels
better. The curvature is then saved, and loaded in a new process without data.

    python examples/laplace_digits.py   # needs scikit-learn and matplotlib; ten seconds; writes
    docs/laplace_digits.png
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from style import COLORS, legend, panel, write
from torch import nn

from curvlinops_plus import (
    EKFAC,
    BlockwiseLinearOperator,
    EmpiricalRisk,
    Laplace,
    curvature,
)

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
device = "cuda" if torch.cuda.is_available() else "cpu"

# In double precision all machines print the same figures.
convolutions = (
    nn.Conv2d(1, 8, 3, padding=1),
    nn.Tanh(),
    nn.Conv2d(8, 16, 3, stride=2, padding=1),
    nn.Tanh(),
)
model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10)).to(device, torch.float64)


def report(K):
    """Print what follows from the structure of K; no data are read."""
    print(
        f"trace {K.trace:.1f}, Frobenius norm {K.frobenius_norm:.2f}, logdet(K + I) "
        f"{K.shift(1.0).logdet:.1f}"
    )


if sys.argv[1:]:  # the second process: a file and a model, no data
    saved = torch.load(sys.argv[1], map_location=device)
    model.load_state_dict(saved["model"])
    print("in a new process: ", end="")
    report(BlockwiseLinearOperator.from_state_dict(saved["K"], model))
    sys.exit()

# 300 digits for training, 500 for testing, and these again with their pixels shuffled, each by
# another permutation.
digits = load_digits()
X, y = (
    torch.tensor(digits.images[:, None] / 8 - 1, device=device),
    torch.tensor(digits.target, device=device),
)
train, test = torch.randperm(len(X))[:800].split([300, 500])
shuffled = X[test].flatten(1).gather(1, torch.rand(500, 64).argsort(1).to(device)).view_as(X[test])
data = list(zip(X[train].split(100), y[train].split(100), strict=True))

# A sum over examples is a negative log-likelihood, and weight decay 1 the precision of a standard
# normal prior: this training leads to a mode of the weights' posterior, and the posterior's
# precision there is K + I.
loss = nn.CrossEntropyLoss(reduction="sum")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1.0)
for _ in range(100):
    optimizer.zero_grad()
    loss(model(X[train]), y[train]).backward()
    optimizer.step()

risk = EmpiricalRisk(model, loss, data, progressbar=True)
K = curvature(risk, EKFAC, separate_weight_and_bias=True)  # a block for each parameter
report(K)

v = torch.ones(K.shape[1], dtype=K.dtype, device=device)
print(
    f"norm of K v: {(K @ v).norm():.2f} for a tensor v, "
    f"{sum((K @ v.cpu().numpy()) ** 2) ** 0.5:.2f} for an array"
)
print("largest eigenvalues:", eigsh(K.to_scipy(), k=5, return_eigenvectors=False).round(1))

la = Laplace(
    K, prior_precision=1.0
)  # covariance (K + I)⁻¹ of the weights; la.sample(generator) draws from it
images = torch.cat([X[test], shuffled])
found = {"point estimate": model(images).softmax(1), "Laplace": la.predict(images)}
ax = panel()
for method, p in found.items():
    surest = p.amax(1).detach().cpu()  # the largest class probability
    auroc = roc_auc_score([True] * 500 + [False] * 500, surest)
    print(f"digit, or shuffled pixels? AUROC {auroc:.3f} ({method})", flush=True)
    look = (
        {"alpha": 0.6}
        if method == "Laplace"
        else {"histtype": "step", "linestyle": "--", "linewidth": 1.5}
    )
    for k, (label, values) in enumerate(
        zip(("digits", "shuffled pixels"), surest.split(500), strict=True)
    ):
        ax.hist(
            values.tolist(),
            bins=20,
            range=(0, 1),
            color=COLORS[k],
            label=f"{label}, {method}",
            **look,
        )

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "curvature.pt"
    torch.save({"model": model.state_dict(), "K": K.state_dict()}, path)
    subprocess.run([sys.executable, __file__, path], check=True)  # the first line once more

ax.set(xlabel="largest class probability", ylabel="images", ylim=(0, 420))
legend(ax, columnspacing=1.0)
write(ax, "laplace_digits")
