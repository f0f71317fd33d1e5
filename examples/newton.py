"""Newton's method near a minimum: with conjugate gradients, against Adam, on a network of
handwritten digits.

Adam comes close to a minimum of loss and weight decay, and then stalls. From there Newton steps
with the damped Hessian take over: each is solved by CG, and the damping follows how well the
quadratic model predicts the change (Levenberg, Marquardt). Costs are counted in passes over the
data: one per gradient, two per product with the Hessian.

    python examples/newton.py   # needs scikit-learn and matplotlib; some thirty seconds; writes
    docs/newton.png
"""

import warnings

import torch
from sklearn.datasets import load_digits
from style import legend, panel, write
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from curvlinops_plus import CurvatureWarning, EmpiricalRisk, Hessian
from curvlinops_plus.linalg import cg

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
DECAY, START, STOP = 3e-3, 2000, 4000
digits, loss = load_digits(), nn.CrossEntropyLoss()
X, y = torch.tensor(digits.data / 16 - 0.5), torch.tensor(digits.target)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
params = list(model.parameters())
initial = parameters_to_vector(params).detach()


def evaluate(theta):
    """Objective and its gradient [n] at the parameters theta [n]; one pass."""
    vector_to_parameters(theta, params)
    value = loss(model(X), y) + DECAY / 2 * sum(p.square().sum() for p in params)
    return value.item(), parameters_to_vector(torch.autograd.grad(value, params))


def adam(lr, passes):
    """Parameters in the end, and (passes, gradient norm) on the way."""
    theta, path = initial.clone(), []
    optimizer = torch.optim.Adam([theta], lr=lr)
    for number in range(1, passes + 1):
        theta.grad = evaluate(theta)[1]
        path.append((number, theta.grad.norm().item()))
        optimizer.step()
    return theta, path


def newton(theta, passes):
    value, g = evaluate(theta)
    damping = 1e-3
    H = Hessian(EmpiricalRisk(model, loss, [(X, y)]))
    path = [(passes := passes + 1, g.norm().item())]
    while passes < STOP and g.norm() > 1e-11:
        vector_to_parameters(theta, params)
        with (
            warnings.catch_warnings()
        ):  # negative curvature or the limit end CG early: the step so far is taken
            warnings.simplefilter("ignore", CurvatureWarning)
            tolerance = min(0.3, g.norm().item() ** 0.5)
            step, info = cg(H.shift(DECAY + damping), -g, tol=tolerance, max_iter=200)
        foretold = g @ step + step @ (H @ step + DECAY * step) / 2
        new, new_g = evaluate(theta + step)
        passes += 2 * (info.iterations + 2) + 1
        ratio = (new - value) / foretold if foretold < 0 else -1  # how true the quadratic model was
        damping *= 0.2 if ratio > 0.75 else 4 if ratio < 0.25 else 1
        if (foretold < 0 and new < value) or (abs(new - value) < 1e-12 and new_g.norm() < g.norm()):
            theta, value, g = theta + step, new, new_g
        path.append((passes, g.norm().item()))
    return path


paths = {f"Adam, lr {lr}": adam(lr, STOP)[1] for lr in (0.003, 0.01, 0.03, 0.1)}
paths[f"Newton-CG after {START} passes of Adam"] = newton(adam(0.03, START)[0], START)
ax = panel()
for name, path in paths.items():
    print(
        f"{name}: smallest gradient norm {min(norm for _, norm in path):.1e}, after {path[-1][0]} "
        "passes in all"
    )
    ax.semilogy(*zip(*path), label=name, linewidth=3 if name.startswith("Newton") else 1.2)
ax.set(xlabel="passes over the data", ylabel="norm of the gradient")
legend(ax)
write(ax, "newton")
