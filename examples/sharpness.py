"""How sharp is the minimum that gradient descent finds? Eigenvalues of the Hessian while a network
is trained.

Gradient descent with step size η is unstable where the largest eigenvalue of the Hessian, the
sharpness, is above 2/η. Trained on all data at once, networks become sharper until they reach it,
and stay there (Cohen et al. 2021). The traces of EKFAC's blocks, which are those of the
Gauss-Newton matrix, show which layers contribute.

    python examples/sharpness.py   # needs scikit-learn and matplotlib; some twenty seconds; writes
    two pictures
"""

import torch
from sklearn.datasets import load_digits
from style import COLORS, legend, panel, write
from torch import Generator, nn

from curvlinops_plus import EKFAC, EmpiricalRisk, Hessian, MonteCarlo, curvature, top_eigenpairs

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
STEPS, EVERY, RATES = 1000, 50, (0.1, 0.2)

digits = load_digits()
X, y = torch.tensor(digits.data[:500] / 16 - 0.5), torch.eye(10)[digits.target[:500]].double()
sharp, of_layers = panel(), panel()
for k, lr in enumerate(RATES):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)
    ).double()
    loss, params = nn.MSELoss(), list(model.parameters())
    risk = EmpiricalRisk(
        model, lambda f, y: ((f - y) ** 2).sum(1).mean(), [(X, y)], reduction="mean"
    )
    optimizer, sharpness, traces = torch.optim.SGD(params, lr), [], []
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            top = top_eigenpairs(Hessian(risk), 1, tol=1e-2, generator=Generator().manual_seed(0))
            sharpness.append(float(top.eigenvalues))
        if step % EVERY == 0 and lr == RATES[-1]:
            # of the mean over numbers, of which an example has ten
            K = curvature(EmpiricalRisk(model, loss, [(X, y)]), EKFAC, vectors=MonteCarlo(10))
            traces.append([10 * row["trace"] for row in K.summary()])
        optimizer.zero_grad()
        value = ((model(X) - y) ** 2).sum(1).mean()
        value.backward()
        optimizer.step()
    steps = range(0, STEPS + 1, EVERY)
    late = sorted(sharpness[len(sharpness) // 2 :])[len(sharpness) // 4]
    print(
        f"step size {lr}: 2/η = {2 / lr:.2f}, sharpness at the start {sharpness[0]:.2f}", end=", "
    )
    print(f"median of the second half {late:.2f}; loss {float(value.detach()):.4f}")
    sharp.plot(steps, sharpness, color=COLORS[k], linestyle="-", label=f"step size {lr}")
    sharp.axhline(2 / lr, color=COLORS[k], linestyle=":", linewidth=1, label=f"2 / {lr}")
for index, trace in enumerate(zip(*traces, strict=True)):
    of_layers.plot(steps, trace, label=f"layer {index + 1}")
    print(
        f"layer {index + 1}: trace {trace[0]:.1f} at the start, {trace[-1]:.1f} at the end (step "
        f"size {RATES[-1]})"
    )
sharp.set(xlabel="step", ylabel="largest eigenvalue", ylim=(0, None))
of_layers.set(xlabel="step", ylabel=f"trace of the layer, η = {RATES[-1]}", ylim=(0, None))
legend(sharp)
legend(of_layers, 3)
write(sharp, "sharpness")
write(of_layers, "sharpness_traces")
