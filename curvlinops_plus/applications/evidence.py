"""The evidence of a Laplace approximation as a function of logarithms, and its one maximum.

With prior precisions `δ_k` and a standard deviation σ of observations the negative evidence is

    data(log σ) + ½ Σ_k δ_k ‖θ_k - μ_k‖² + ½ log det(1 + c P⁻¹ K),    c = c₀ / σ²,

and convex in `(log δ, log σ)`: data and quadratic forms are sums of exponentials, and the
determinant is a sum of products of them with coefficients, principal minors of `K`, that are not
negative. So Newton's method finds the one minimum from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops_plus.linalg import BlockDiagonal, Diagonal
from curvlinops_plus.linalg.numerics import eigh

# Newton's steps are no longer than this in a logarithm, and one of these fractions of it is best.
_LONGEST = 4.0
_FRACTIONS = (1.0, 0.5, 0.2, 0.05)
_STEPS = 200


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Parameters with one precision: `log det(1 + K / e^s)` for one number s.

    Attributes:
        eigenvalues: Of their part of `K`, [n] in double precision.
        group: Number of the precision.
    """

    eigenvalues: Tensor
    group: int

    def value(self, s: Tensor) -> Tensor:
        """The determinant's logarithm, 0-d; no large logarithms are subtracted."""
        return (self.eigenvalues * (-s[self.group]).exp()).log1p().sum()

    def add_derivatives(self, s: Tensor, gradient: Tensor, hessian: Tensor) -> None:
        """Add first and second derivatives by `s` [h] to a gradient [h] and a Hessian [h, h]."""
        ratios = self.eigenvalues * (-s[self.group]).exp()
        first = -ratios / (1 + ratios)
        second = ratios / (1 + ratios).square()
        gradient[self.group] += first.sum()
        hessian[self.group, self.group] += second.sum()


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """Parameters of a dense block with several precisions: `log det(1 + E⁻¹ K)` with `E =
    diag(e^s)`.

    Attributes:
        matrix: `K`, [n, n] in double precision.
        groups: Numbers of the precisions of the parameters, [n].
    """

    matrix: Tensor
    groups: Tensor

    def value(self, s: Tensor) -> Tensor:
        """The determinant's logarithm, 0-d; infinite where the 1 is lost to rounding."""
        L, info = torch.linalg.cholesky_ex(self._sum(s))
        return (2 * L.diagonal().log().sum()).where(info == 0, math.inf)

    def add_derivatives(self, s: Tensor, gradient: Tensor, hessian: Tensor) -> None:
        """Add first and second derivatives by `s` [h] to a gradient [h] and a Hessian [h, h]."""
        # With B = 1 + E^-½ K E^-½ the first are B⁻¹_ii - 1, the second δ_ij B⁻¹_ii - (B⁻¹_ij)².
        eigenvalues, Q = eigh(self._sum(s))
        inverse = (Q / eigenvalues.clamp(min=1)) @ Q.T
        diagonal = inverse.diagonal()
        gradient.index_add_(0, self.groups, diagonal - 1)
        rows = torch.zeros_like(hessian[:, :1]).expand(-1, len(inverse)).contiguous()
        rows.index_add_(0, self.groups, -inverse.square())
        hessian.T.index_add_(0, self.groups, rows.T)
        hessian.diagonal().index_add_(0, self.groups, diagonal)

    def _sum(self, s: Tensor) -> Tensor:
        """`B = 1 + E^-½ K E^-½`."""
        root = (-s[self.groups] / 2).exp()
        B = root[:, None] * self.matrix * root
        B.diagonal().add_(1)
        return B


def parts_of(
    blocks: BlockDiagonal, groups: Mapping[str, Tensor], deviations: Tensor
) -> tuple[list[Spectrum | DenseBlock], Tensor]:
    """The blocks of `K`, and `‖θ_k - μ_k‖²` of the parameters with each precision, [h].

    Args:
        groups: Block name to the number of its precision, or of that of each entry; on the CPU.
        deviations: `θ - μ`.
    """
    device = deviations.device
    positions = blocks.positions()
    h = 1 + max([int(group.max()) for group in groups.values()])
    squares = torch.zeros(h, dtype=torch.float64, device=device)
    parts: list[Spectrum | DenseBlock] = []
    if all(group.ndim == 0 for group in groups.values()):
        blocks.eigenvalues()  # all at once; blocks remember eigenvectors
    for name, block in blocks.blocks.items():
        group = groups[name]
        if group.ndim:
            index = group.to(device)
        else:  # nothing is copied to the device
            index = torch.full((block.shape[0],), int(group), device=device)
        squares.index_add_(0, index, deviations[positions[name]].square())
        if group.ndim and not isinstance(block, Diagonal):
            parts.append(DenseBlock(block.to_dense().detach().double(), index))
            continue
        eigenvalues = block.eigenvalues().detach().double().clamp(min=0)
        for k in group.unique().tolist():
            part = eigenvalues[index == k] if group.ndim else eigenvalues
            parts.append(Spectrum(part, k))
    return parts, squares


@dataclass(frozen=True, eq=False)
class Evidence:
    """The negative log marginal likelihood as a function of `x`, logarithms of h precisions and, if
    it is not given, of σ.

    Attributes:
        parts: The blocks of `K`.
        squares: `‖θ_k - μ_k‖²` of the parameters with each precision, [h].
        log_factor: `log c`, with σ `log c₀`.
        loss: Sum of the losses over the data, half of squared errors.
        observed: How many numbers have the deviation σ; 0 if there is none.
        temperature: What the log-likelihood is divided by; `log_factor` knows of it already.
        has_noise: Whether σ is the last number of x.
    """

    parts: Sequence[Spectrum | DenseBlock]
    squares: Tensor
    log_factor: float
    loss: float
    observed: float
    temperature: float
    has_noise: bool

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of precisions and of σ."""
        return (x[:-1], x[-1]) if self.has_noise else (x, x.new_zeros(()))

    def value(self, x: Tensor) -> Tensor:
        """0-d, on the device of `x`."""
        logs, log_noise = self._split(x)
        s = logs + 2 * log_noise - self.log_factor
        determinants = torch.stack([part.value(s) for part in self.parts]).sum()
        constant = self.observed * (log_noise + math.log(2 * math.pi) / 2)
        data = (self.loss * (-2 * log_noise).exp() + constant) / self.temperature
        return data + ((logs.exp() * self.squares).sum() + determinants) / 2

    def derivatives(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient [h] and Hessian [h, h], with σ one larger."""
        logs, log_noise = self._split(x)
        h = len(logs)
        s = logs + 2 * log_noise - self.log_factor
        first = torch.zeros_like(logs)
        second = torch.zeros_like(logs).diag()
        for part in self.parts:
            part.add_derivatives(s, first, second)
        quadratic = logs.exp() * self.squares
        gradient = torch.zeros_like(x)
        hessian = torch.zeros_like(x).diag()
        gradient[:h] = (quadratic + first) / 2
        hessian[:h, :h] = (quadratic.diag() + second) / 2
        if self.has_noise:
            errors = self.loss * (-2 * log_noise).exp()
            gradient[h] = (self.observed - 2 * errors) / self.temperature + first.sum()
            hessian[h, :h] = second.sum(0)
            hessian[:h, h] = second.sum(0)
            hessian[h, h] = 4 * errors / self.temperature + 2 * second.sum()
        return gradient, hessian

    def minimum(self, x: Tensor, shown: Callable[[], object]) -> tuple[Tensor, bool]:
        """The point of the minimum, from a point; whether it was reached.

        The host reads one number in each of about ten steps.

        Args:
            shown: Called after each step.
        """
        lowest = self.value(x)
        for _ in range(_STEPS):
            gradient, hessian = self.derivatives(x)
            # Directions in which nothing changes have zeros in both.
            hessian.diagonal().add_(1e-13 * hessian.diagonal().amax() + 1e-300)
            L, _ = torch.linalg.cholesky_ex(hessian)
            step = torch.cholesky_solve(gradient[:, None], L)[:, 0]
            decrease = gradient @ step
            step = step * (_LONGEST / step.abs().amax()).clamp(max=1)
            points = torch.stack([x, *[x - fraction * step for fraction in _FRACTIONS]])
            values = torch.stack([lowest, *map(self.value, points[1:])]).nan_to_num(math.inf)
            best = values.argmin()[None]  # an index of one number would be read
            # What a step promises is below rounding: the last one is taken all the same.
            is_last = (decrease <= 1e-11 * (1 + lowest.abs())) & lowest.isfinite()
            x = points[1].where(is_last, points[best][0])
            lowest = values[best][0]
            shown()
            if bool(is_last):
                return x, True
        return x, False
