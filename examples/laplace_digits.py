"""Does a network notice that it has never seen such an image? A Laplace approximation of a small CNN, with EKFAC.

A CNN learns 300 handwritten digits. Test digits with shuffled pixels are no digits, yet the network is often sure of them.
The curvature of its training loss says how well the data determine the weights, and with the weights' uncertainty in its
predictions the network tells digits from non-digits better. The curvature is then saved and read in a new process.

    python examples/laplace_digits.py        # needs scikit-learn; about 15 seconds on two cores
"""

import subprocess
import sys
import tempfile
from math import pi
from pathlib import Path

import torch
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.func import functional_call, jacrev, vmap

from curvlinops_plus import EKFACLinearOperator

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(),
    nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Tanh(),
    nn.Flatten(), nn.Linear(256, 10),
).to(device, torch.float64)  # in double precision, all machines print the same digits
params = dict(model.named_parameters())


def report(K):
    """Print numbers that follow from the structure of K alone."""
    print(f"trace {K.trace:.1f}, Frobenius norm {K.frobenius_norm:.2f}, logdet(K + I) {K.shift(1.0).logdet:.1f}")


if sys.argv[1:]:  # the second process: a model, a file, no data
    saved = torch.load(sys.argv[1], map_location=device)
    model.load_state_dict(saved["model"])
    report(EKFACLinearOperator.from_state_dict(saved["K"], model, params, data=None))
    sys.exit()

# 300 digits to learn, 500 others to recognise, and these again with their pixels shuffled, differently in each.
digits = load_digits()
X, y = torch.tensor(digits.images[:, None] / 8 - 1, device=device), torch.tensor(digits.target, device=device)
train, test = torch.randperm(len(X))[:800].to(device).split([300, 500])
shuffled = X[test].flatten(1).gather(1, torch.rand(500, 64).argsort(1).to(device)).view_as(X[test])
data = list(zip(X[train].split(100), y[train].split(100), strict=True))

# The loss is a sum and the weight decay 1 is the precision of a standard normal prior: training finds the posterior's mode.
loss = nn.CrossEntropyLoss(reduction="sum")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=1.0)
for _ in range(100):
    optimizer.zero_grad()
    loss(model(X[train]), y[train]).backward()
    optimizer.step()

# README: from here
K = EKFACLinearOperator(model, loss, params, data, fisher_type="type-2", progressbar=True)
report(K)  # trace, Frobenius norm, log-determinant: closed forms

v = torch.ones(K.shape[1], dtype=K.dtype, device=device)
print(f"|K v| {(K @ v).norm():.2f} in PyTorch, {((K @ v.cpu().numpy()) ** 2).sum() ** 0.5:.2f} in NumPy")
print("largest eigenvalues", eigsh(K.to_scipy(), k=5, return_eigenvectors=False).round(1))

posterior = K.inverse(damping=1.0)  # the covariance of the weights, (K + I)⁻¹; posterior.sample() draws from it


@torch.no_grad()
def confidence(images, uncertain):
    """Largest class probability; if `uncertain`, with the variance of the logits in J (K + I)⁻¹ Jᵀ (probit approximation)."""
    logits = model(images)
    if uncertain:
        J = vmap(jacrev(lambda p, x: functional_call(model, p, x[None])[0]), (None, 0))(params, images)
        variance = posterior.quadratic_form(J).diagonal(dim1=1, dim2=2)
        logits = logits / (1 + pi / 8 * variance).sqrt()
    return logits.softmax(1).amax(1)


for name, uncertain in (("point estimate", False), ("Laplace", True)):
    scores = torch.cat([confidence(x, uncertain) for x in torch.cat([X[test], shuffled]).split(100)])
    print(f"digits or shuffled pixels? AUROC {roc_auc_score([1] * 500 + [0] * 500, scores.cpu()):.3f} ({name})")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "curvature.pt"
    torch.save({"model": model.state_dict(), "K": K.state_dict()}, path)
    subprocess.run([sys.executable, __file__, path], check=True)  # a new process: the same numbers, without data
