"""The ground state of a quantum spin chain: stochastic reconfiguration, Adam and SGD.

Ten spins in a ring with a transverse field at the critical point, H = -Σ Z_i Z_{i+1} - Σ X_i. A
small network is log ψ of a configuration; samples are drawn from |ψ|², and the average of their
local energies is minimized. With 1024 configurations everything is known exactly: |ψ|² to draw
from, the energy of a network, the lowest eigenvalue.

Each method takes the best of several learning rates, tuned from another start; Adam and SGD get
four times the steps.

    python examples/reconfiguration.py        # needs matplotlib; some thirty seconds; writes
    docs/reconfiguration.png
"""

import time

import torch
from style import legend, panel, write
from torch import nn

from curvlinops_plus.optim import StochasticReconfiguration

torch.set_num_threads(1)  # more threads gain nothing on tensors of this size
SPINS, SAMPLES, STARTS = 10, 256, (1, 2, 3)
METHODS = {  # learning rates to choose from, and steps
    "SR": ((0.03, 0.1, 0.3), 120),
    "Adam": ((3e-3, 1e-2, 3e-2, 1e-1), 480),
    "SGD": ((3e-2, 1e-1, 3e-1, 1.0), 480),
}

states = torch.arange(2**SPINS)
spins = 1.0 - 2.0 * (states[:, None] >> torch.arange(SPINS) & 1).double()  # [1024, 10], each ±1
diagonal = -(spins * spins.roll(1, 1)).sum(1)
flipped = states[:, None] ^ (
    1 << torch.arange(SPINS)
)  # [1024, 10]: the configuration with one spin turned
H = torch.diag(diagonal)
H[states[:, None].expand_as(flipped), flipped] -= 1.0
exact = float(torch.linalg.eigvalsh(H)[0])


@torch.no_grad()
def look(net):
    """|ψ|² and local energies (H ψ)(x) / ψ(x) of all configurations."""
    log_psi = net(spins)[:, 0]
    psi = (log_psi - log_psi.max()).exp()
    return psi.square() / psi.square().sum(), diagonal - psi[flipped].sum(1) / psi


def train(method, lr, steps, start):
    """Relative errors of the energy over the steps; the net at the end."""
    torch.manual_seed(start)
    layers = nn.Linear(SPINS, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    net, errors = nn.Sequential(*layers).double(), []
    if method == "SR":
        optimizer = StochasticReconfiguration(net, lr=lr, damping=1e-3)
    else:
        optimizer = getattr(torch.optim, method)(net.parameters(), lr=lr)
    for _ in range(steps):
        p, local = look(net)
        errors.append(float(p @ local - exact) / abs(exact))
        drawn = torch.multinomial(p, SAMPLES, replacement=True)
        x, energies = spins[drawn], local[drawn]
        if method == "SR":
            optimizer.step(x, energies)
        else:
            optimizer.zero_grad()
            (
                2 * (energies - energies.mean()) * net(x)[:, 0]
            ).mean().backward()  # its gradient is that of the energy
            optimizer.step()
    return torch.tensor(errors), net


def final(errors):
    return float(errors[-20:].mean())  # single steps are as noisy as the samples


ax = panel()
print(f"{SPINS} spins, exact energy {exact:.5f}, {SAMPLES} samples per step")
for method, (rates, steps) in METHODS.items():
    lr = min(rates, key=lambda lr: final(train(method, lr, steps, start=0)[0]))
    begin = time.perf_counter()
    curves, nets = zip(*[train(method, lr, steps, start) for start in STARTS], strict=True)
    seconds = (time.perf_counter() - begin) / len(STARTS)
    ends = torch.tensor([final(curve) for curve in curves])
    p, local = look(nets[0])
    energies = local[torch.multinomial(p, 10_000, replacement=True)]
    print(
        f"{method:4} lr {lr:5}, {steps} steps in {seconds:4.1f} s: relative error "
        f"{ends.mean():.1e} ± {ends.std() / len(ends) ** 0.5:.0e} over {len(ends)} starts; energy "
        f"of the first, from 10000 samples: {energies.mean():.4f} ± {energies.std() / 100:.4f}",
        flush=True,
    )
    curves = torch.stack(curves)
    (line,) = ax.semilogy(curves.log().mean(0).exp(), label=f"{method}, learning rate {lr}")
    ax.fill_between(
        range(steps), curves.amin(0), curves.amax(0), color=line.get_color(), alpha=0.2, linewidth=0
    )

ax.set(xlabel=f"steps of {SAMPLES} samples", ylabel="relative error of the energy")
legend(ax)
write(ax, "reconfiguration")
