"""Log-amplitudes of every kind, and their derivatives and directions by plain dense algebra: the
slow exact twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from test.helpers import seeded

F64, C128 = torch.float64, torch.complex128


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = seeded(seed)
    real = torch.randn(shape, generator=generator, dtype=F64)
    if not dtype.is_complex:
        return real.to(dtype)
    return torch.complex(real, torch.randn(shape, generator=generator, dtype=F64)).to(dtype)


class Net(nn.Module):
    """A real log-amplitude of 4 numbers: linear layers, and a parameter that no layer owns."""

    def __init__(self, width: int, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(4, width, dtype=dtype),
            nn.Linear(width, 1, bias=False, dtype=dtype),
        )
        self.decay = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        with torch.no_grad():
            for seed, p in enumerate(self.parameters()):
                p.copy_(0.5 * normal(*p.shape, seed=seed + 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))[:, 0] - self.decay * x.square().sum(1)


def rbm(params: Any, x: Tensor) -> Tensor:
    """A restricted Boltzmann machine; holomorphic in complex parameters, complex in mixed ones."""
    return x.to(params["a"].dtype) @ params["a"] + torch.log(
        torch.cosh(x.to(params["W"].dtype) @ params["W"] + params["b"])
    ).sum(1)


def two_nets(params: Any, x: Tensor) -> Tensor:
    """Real parameters, a complex amplitude."""
    h = torch.tanh(x @ params[0])
    return torch.complex(h @ params[1], (h * x) @ params[2])


def magnitude(params: Any, x: Tensor) -> Tensor:
    """Complex parameters, a real amplitude."""
    return (x.to(C128) @ params[0] + 1j).abs().log() + (x @ params[1]).tanh()


@dataclass(frozen=True)
class Problem:
    """A log-amplitude with parameters, samples and costs."""

    log_psi: Any
    params: Any
    samples: Tensor
    amplitude: Any = "real"

    @property
    def costs(self) -> Tensor:
        n = len(self.samples)
        return normal(n, seed=5, dtype=F64 if self.amplitude == "real" else C128) - 3

    @property
    def args(self) -> tuple[Any, Any, Tensor]:
        return self.log_psi, self.params, self.samples


def real_net(n: int, width: int) -> Problem:
    net = Net(width)
    return Problem(net, dict(net.named_parameters()), normal(n, 4))


def complex_rbm(n: int, amplitude: str, mixed: bool = False) -> Problem:
    params = {
        "a": normal(4, seed=1, dtype=C128),
        "W": normal(4, 3, seed=2, dtype=C128),
        "b": normal(3, seed=3),
    }
    if not mixed:
        params["b"] = normal(3, seed=3, dtype=C128)
    return Problem(rbm, {name: 0.3 * p for name, p in params.items()}, normal(n, 4), amplitude)


def real_parameters(n: int) -> Problem:
    return Problem(
        two_nets,
        [normal(4, 4, seed=1), normal(4, seed=2), normal(4, seed=3)],
        normal(n, 4),
        "complex",
    )


def real_amplitude(n: int) -> Problem:
    return Problem(magnitude, (normal(4, seed=1, dtype=C128), normal(4, seed=2)), normal(n, 4))


# Fewer samples than parameters, and more.
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "module, P > n": lambda: real_net(9, 6),
    "module, n > P": lambda: real_net(60, 4),
    "complex, real parameters, P > n": lambda: real_parameters(6),
    "complex, real parameters, n > P": lambda: real_parameters(40),
    "complex, complex parameters": lambda: complex_rbm(11, "complex"),
    "complex, both kinds of parameters": lambda: complex_rbm(30, "complex", mixed=True),
    "holomorphic, P > n": lambda: complex_rbm(7, "holomorphic"),
    "holomorphic, n > P": lambda: complex_rbm(50, "holomorphic"),
    "real, both kinds of parameters": lambda: real_amplitude(20),
}


def tensors(params: Any) -> list[Tensor]:
    return [p.detach() for p in (params.values() if isinstance(params, dict) else params)]


def flat(tree: Any) -> Tensor:
    """Complex numbers as real and imaginary parts in turn."""
    parts = tensors(tree)
    return torch.cat([(torch.view_as_real(p) if p.is_complex() else p).reshape(-1) for p in parts])


def jacobian(problem: Problem) -> Tensor:
    """Derivatives of (Re, Im) log ψ with respect to real numbers, [n, 2 or 1, P], by `jacrev` over
    the whole batch.
    """
    values, names = (
        tensors(problem.params),
        list(problem.params) if isinstance(problem.params, dict) else None,
    )

    def f(real: list[Tensor]) -> Tensor:
        ps = [
            torch.view_as_complex(r) if p.is_complex() else r
            for r, p in zip(real, values, strict=True)
        ]
        given = ps if names is None else dict(zip(names, ps, strict=True))
        if isinstance(problem.log_psi, nn.Module):
            assert isinstance(given, dict)
            out = functional_call(problem.log_psi, given, (problem.samples,))
        else:
            out = problem.log_psi(given, problem.samples)
        if problem.amplitude == "real":
            return (out.real if out.is_complex() else out)[:, None]
        return torch.stack((out.real, out.imag), 1)

    with torch.no_grad():
        J = jacrev(f)([torch.view_as_real(p) if p.is_complex() else p for p in values])
    return torch.cat([j.reshape(*j.shape[:2], -1) for j in J], 2)


def dense(problem: Problem, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`Ō [n·c, P]` and `ε̄ [n·c]`, by their definitions."""
    J, costs = jacobian(problem), problem.costs
    n = len(costs)
    w = torch.full((n,), 1 / n, dtype=F64) if weights is None else weights / weights.sum()
    E = torch.stack((costs.real, costs.imag), 1) if J.shape[1] == 2 else costs[:, None]
    centred = J - (w[:, None, None] * J).sum(0)
    target = E - (w[:, None] * E).sum(0)
    root = w.sqrt()
    return (root[:, None, None] * centred).flatten(0, 1), (root[:, None] * target).flatten()


def close(a: Any, b: Any, tolerance: float = 1e-10) -> bool:
    """Whether two vectors agree, relative to the size of the second."""
    return float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))
