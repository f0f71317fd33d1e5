"""Networks whose outputs are derivatives: a Poisson equation, and energies with forces; curvature
against Adam and L-BFGS at equal time.

The Poisson network carries value, gradient and second derivatives through its layers ("Taylor
mode"), so that its matrices have Kronecker factors: K-FAC. The potential differentiates in its
forward pass: there the full block of all parameters is the exact Gauss-Newton matrix.

    python examples/physics.py [seconds]   # for each optimizer, by default 20
"""

import math
import sys
import time
import warnings
from itertools import pairwise

import torch
from torch import nn

from curvlinops_plus import CurvatureWarning, FullBlock, KFACOptimizer, LevenbergMarquardt

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
torch.set_default_dtype(torch.float64)
# Biases and the potential have no Kronecker factors, as they should.
warnings.simplefilter("ignore", CurvatureWarning)
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0


class Affine(nn.Module):
    """`W h + b` of values, and `W h'` of derivatives: `h [N, 1 + 2d, i]`."""

    def __init__(self, i, o):
        super().__init__()
        self.matrix = nn.Linear(i, o, bias=False)
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, h):
        h = self.matrix(h)
        return torch.cat([h[:, :1] + self.bias, h[:, 1:]], 1)


class Poisson(nn.Module):
    """`Δu` at points `x [N, d]` of the unit cube; `u` is 0 on its boundary."""

    def __init__(self, d, width, depth):
        super().__init__()
        self.d = d
        sizes = [d] + [width] * depth
        self.hidden = nn.ModuleList([Affine(i, o) for i, o in pairwise(sizes)])
        self.last = Affine(width, 1)

    def derivatives(self, x):
        """Value, d first and d second derivatives of the network, `[N, 1 + 2d]`."""
        eye = torch.eye(self.d).expand(len(x), -1, -1)
        h = torch.cat([x[:, None], eye, torch.zeros_like(eye)], 1)
        for layer in self.hidden:
            value, first, second = layer(h).split([1, self.d, self.d], 1)
            t = torch.tanh(value)
            slope = 1 - t * t
            h = torch.cat([t, slope * first, slope * (second - 2 * t * first * first)], 1)
        return self.last(h)[..., 0]

    def forward(self, x):
        value, first, second = self.derivatives(x).split([1, self.d, self.d], 1)
        # u = B N with B = Π 4 x (1 - x): Δu = B ΔN + 2 ∇B ∇N + N ΔB
        q = 4 * x * (1 - x)
        others = torch.stack([q[:, torch.arange(self.d) != k].prod(1) for k in range(self.d)], 1)
        terms = q.prod(1, keepdim=True) * second + 2 * (4 - 8 * x) * others * first
        return (terms - 8 * others * value).sum(1, keepdim=True)

    def solution(self, x):
        return self.derivatives(x)[:, 0] * (4 * x * (1 - x)).prod(1)


class Potential(nn.Module):
    """Energy `[N, 1]` of atoms at `x [N, atoms, 3]`, a sum over pairs, and forces `-dE/dx`."""

    def __init__(self, atoms, width):
        super().__init__()
        self.pairs = torch.triu_indices(atoms, atoms, 1)
        self.of_pair = nn.Sequential(
            *(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            i, j = self.pairs
            energy = self.of_pair((x[:, i] - x[:, j]).norm(dim=-1, keepdim=True)).sum(1)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, -slope.flatten(1)], 1)


def poisson_problem(d=2, points=400):
    generator = torch.Generator().manual_seed(1)
    X, T = (torch.rand(n, d, generator=generator) for n in (points, 2000))
    y = -d * math.pi**2 * torch.sin(math.pi * X).prod(1, keepdim=True)
    truth = torch.sin(math.pi * T).prod(1)

    def error(model):
        with torch.no_grad():
            return float((model.solution(T) - truth).norm() / truth.norm())

    return lambda: Poisson(d, 32, 2), X, y, error


def forces_problem(atoms=4, num=200):
    generator = torch.Generator().manual_seed(1)
    i, j = torch.triu_indices(atoms, atoms, 1)

    def observed(x):  # Morse's potential
        x.requires_grad_()
        energy = ((1 - torch.exp(1.2 - (x[:, i] - x[:, j]).norm(dim=-1))) ** 2).sum(1, True)
        (slope,) = torch.autograd.grad(energy.sum(), x)
        return x.detach(), torch.cat([energy.detach(), -slope.flatten(1)], 1)

    X, y = observed(1.2 * torch.randn(num, atoms, 3, generator=generator))
    T, truth = observed(1.2 * torch.randn(500, atoms, 3, generator=generator))

    def error(model):
        return float((model(T).detach() - truth).norm() / truth.norm())

    return lambda: Potential(atoms, 24), X, y, error


ADAPTIVE = {"norm_constraint": None, "inverse_every": 5}


def natural(model, loss, **options):
    damping = LevenbergMarquardt(1.0, min=1e-8)
    return KFACOptimizer(model, loss, "adaptive", "adaptive", damping, **ADAPTIVE, **options)


OPTIMIZERS = {
    "Adam, lr .01": lambda model, _: torch.optim.Adam(model.parameters(), lr=0.01),
    "Adam, lr .003": lambda model, _: torch.optim.Adam(model.parameters(), lr=0.003),
    "L-BFGS": lambda model, _: torch.optim.LBFGS(
        model.parameters(), line_search_fn="strong_wolfe", history_size=50
    ),
    "K-FAC, adaptive": natural,
    "full block, adaptive": lambda model, loss: natural(model, loss, approximation=FullBlock),
}
PROBLEMS = {
    "Poisson": (poisson_problem, ["Adam, lr .01", "Adam, lr .003", "L-BFGS", "K-FAC, adaptive"]),
    "forces": (
        forces_problem,
        ["Adam, lr .01", "Adam, lr .003", "L-BFGS", "full block, adaptive"],
    ),
}


def train(model, X, y, name):
    """Returns the number of steps."""
    loss = nn.MSELoss()
    optimizer = OPTIMIZERS[name](model, loss)

    def closure():
        optimizer.zero_grad()
        value = loss(model(X), y)
        value.backward()
        return value

    steps = 0
    end = time.process_time() + SECONDS
    while time.process_time() < end:
        optimizer.step(closure)
        steps += 1
    return steps


for problem, (make_problem, names) in PROBLEMS.items():
    for name in names:
        make_model, X, y, error = make_problem()
        torch.manual_seed(0)
        model = make_model()
        steps = train(model, X, y, name)
        loss = float(nn.functional.mse_loss(model(X), y).detach())
        figures = f"{steps:6d} steps  loss {loss:.1e}  error {error(model):.1e}"
        print(f"{problem:8s} {name:22s} {figures}", flush=True)
