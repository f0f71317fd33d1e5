"""What are the eigenvalues of a trained network's curvature, and how well do KFAC and EKFAC
preserve them?

A small network learns handwritten digits. The Hessian and the GGN of its loss are never formed:
Lanczos iterations from random vectors give the densities of their eigenvalues. KFAC and EKFAC have
exact eigenvalues, which check the estimates; their densities come from the same iterations, so that
the four curves are smoothed alike.

    python examples/spectrum.py   # needs scikit-learn and matplotlib; some twenty seconds; writes
    two pictures
"""

import torch
from sklearn.datasets import load_digits
from style import legend, panel, write
from torch import Generator, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalRisk,
    Hessian,
    curvature,
    plot_spectrum,
)
from curvlinops_plus.estimate import (
    lanczos_approximate_log_spectrum,
    top_eigenpairs,
    xtrace,
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
    loss(model(X[batch]), y[batch]).backward()
    optimizer.step()
print(f"accuracy {(model(X).argmax(1) == y).double().mean():.3f}, loss {loss(model(X), y):.3f}")

risk = EmpiricalRisk(model, loss, list(zip(X.split(600), y.split(600), strict=True)))
H, G = Hessian(risk), GGN(risk)
K = curvature(risk, KFAC, separate_weight_and_bias=True)
E = curvature(risk, EKFAC, separate_weight_and_bias=True)
eigenvalues, densities = panel(), panel()
FLOOR = 1e-5  # added to |λ| on the logarithmic axis: where the zeros are drawn

print(f"{G.shape[0]} parameters; eigenvalues and traces, from products:")
traces = {}
for name, A in (("Hessian", H), ("GGN", G), ("KFAC", K), ("EKFAC", E)):
    generator = Generator().manual_seed(0)
    largest = top_eigenpairs(A, 10, generator=generator).eigenvalues
    traces[name], error = xtrace(A, 200, generator=generator, return_error=True)
    print(f"{name:8} 1st {largest[0]:.4f}, 2nd {largest[1]:.4f}, 10th {largest[9]:.4f}", end="")
    print(f", trace {traces[name]:.3f} ± {error:.3f}", flush=True)
    eigenvalues.semilogy(
        range(1, 31), top_eigenpairs(A, 30, generator=generator).eigenvalues, label=name
    )
    ends = (0.0, float(largest[0]))
    density = lanczos_approximate_log_spectrum(
        A, 100, num_repeats=4, boundaries=ends, epsilon=FLOOR, generator=generator
    )
    plot_spectrum(density, log=True, ax=densities, label=name)
print("smallest of the Hessian", top_eigenpairs(H, largest=False).eigenvalues.numpy().round(4))

print("the same in closed form:")
for name, A in (("KFAC", K), ("EKFAC", E)):
    largest = A.eigenvalues().sort(descending=True).values[[0, 1, 9]]
    print(
        f"{name:8} 1st {largest[0]:.4f}, 2nd {largest[1]:.4f}, 10th {largest[2]:.4f}, trace "
        f"{A.trace:.3f}",
        end="",
    )
    print(f", {A.trace / traces['GGN'] - 1:+.2%} beside the GGN")

eigenvalues.set(xlabel="k", ylabel="kth largest eigenvalue")
densities.set(
    xlabel=f"|λ| + {FLOOR:g}", ylabel="density of eigenvalues", xlim=(3e-6, 3), ylim=(1e-3, 2e5)
)
for ax in eigenvalues, densities:
    legend(ax, 4, columnspacing=1.0, handlelength=1.6)
write(eigenvalues, "spectrum")
write(densities, "spectrum_density")
