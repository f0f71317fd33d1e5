"""Centred log-derivatives `Ō` as linear operators, from which the covariance `S = Ōᵀ Ō` is formed.

    Ō = √W (I - 1 wᵀ) J        [n·c, P]

with `J` the derivatives of `log ψ` at the n samples (c = 1 row for each, or 2: real and imaginary part), `w` the
normalised weights of the samples (1/n without weights) and `W = diag(w)`. `√W (I - 1 wᵀ) = (I - √w √wᵀ) √W` is a
projection times `√W`: centring once is enough, because centring twice changes nothing.

Shapes: P real numbers in the parameters, n samples, c components; rows of `Ō` sample by sample, component by component.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus.linalg import LinearOperator, Space, gram
from curvlinops_plus.linalg.implicit import linear_in
from curvlinops_plus.linalg.numerics import standard_normal
from curvlinops_plus.optim.reconfiguration.ensemble import Ensemble
from curvlinops_plus.optim.reconfiguration.sample_kernel import recorded_sample_kernel


class Scores(LinearOperator):
    """`Ō` [n·c, P]. Subclasses define its products; quadratic functions of it have their own methods."""

    def __init__(self, ensemble: Ensemble) -> None:
        psi = ensemble.psi
        super().__init__(psi.space, psi.dtype, psi.device, out_space=Space.flat(ensemble.n * ensemble.components))
        self.ensemble = ensemble

    def stored(self) -> StoredScores:
        """The same with all derivatives in memory."""
        return StoredScores(self.ensemble)

    def kernel(self) -> Tensor:
        """`Ō Ōᵀ` [n·c, n·c], the centred neural tangent kernel."""
        return self.stored().kernel()

    def covariance(self) -> Tensor:
        """`S = Ōᵀ Ō` [P, P]."""
        return self.stored().covariance()

    def variances(self) -> Tensor:
        """The diagonal of `S`, [P]."""
        raise NotImplementedError

    def null_directions(self) -> Tensor:
        """Orthonormal columns [n·c, c] that `Ōᵀ` maps to zero, because derivatives are centred."""
        eye = torch.eye(self.ensemble.components, dtype=self.dtype, device=self.device)
        return torch.kron(self.ensemble.root[:, None], eye)

    def centred(self, t: Tensor) -> Tensor:  # [n, ...] -> [n, ...]
        """`√W (I - 1 wᵀ) t`."""
        w, root = self.ensemble.weights, self.ensemble.root
        mean = torch.tensordot(w.to(t.dtype), t, dims=1)
        return (t - mean) * root.view(-1, *[1] * (t.ndim - 1)).to(t.dtype)


class StoredScores(Scores):
    """`Ō` with all its entries; of a holomorphic amplitude the complex derivatives [n, P/2], half as many numbers.

    Args:
        scale: Divide column k by `scale[k]`; of a complex parameter the same for both parts.

    Cost: n·c·P numbers, and one backward pass per sample and component (vectorised).
    """

    def __init__(self, ensemble: Ensemble, scale: Tensor | None = None) -> None:
        super().__init__(ensemble)
        J = torch.cat([J for _, J in ensemble.jacobians()])  # [n, rows, P]
        J = J if scale is None else J / scale
        if ensemble.psi.kind == "holomorphic":  # of f = u + iv with θ = x + iy: f' = ∂u/∂x - i ∂u/∂y
            self.matrix = self.centred(torch.view_as_complex(J[:, 0].unflatten(-1, (-1, 2)).contiguous()).conj())
        else:
            self.matrix = self.centred(J).flatten(0, 1)
        self.matrix = self.matrix.resolve_conj()

    def _matmat(self, X: Tensor) -> Tensor:
        return _to_real(self.matrix @ self._from_real(X))

    def _rmatmat(self, X: Tensor) -> Tensor:
        return _to_real(self.matrix.mH @ self._from_real(X))

    def _from_real(self, X: Tensor) -> Tensor:  # [2d, K] -> complex [d, K]
        if not self.matrix.is_complex():
            return X
        return torch.complex(*X.unflatten(0, (-1, 2)).unbind(1))  # torch 2.6 can't view a single column

    def stored(self) -> StoredScores:
        return self

    def kernel(self) -> Tensor:
        return _as_blocks(self.matrix @ self.matrix.mH) if self.matrix.is_complex() else gram(self.matrix.T)

    def covariance(self) -> Tensor:
        return _as_blocks(self.matrix.mH @ self.matrix) if self.matrix.is_complex() else gram(self.matrix)

    def variances(self) -> Tensor:
        squares = self.matrix.abs().square().sum(0)
        return squares.repeat_interleave(2) if self.matrix.is_complex() else squares


class MatrixFreeScores(Scores):
    """`Ō` by its products: a forward pass, and one or two backward passes each, per chunk of samples.

    Without chunks the graph of the forward pass is kept, and only backward passes are left.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__(ensemble)
        self._kept: _Graph | None = None

    def _graph(self, chunk: Any) -> _Graph:
        if self._kept is not None:
            return self._kept
        graph = _Graph(self.ensemble, chunk)
        if len(self.ensemble.chunks) == 1:
            self._kept = graph
        return graph

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._product, self._transpose_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._transpose_product, self._product)

    def _product(self, X: Tensor) -> Tensor:  # [P, K] -> [n·c, K]
        columns = []
        with self.ensemble.running():
            for chunk in self.ensemble.chunks:
                graph = self._graph(chunk)
                columns.append(torch.stack([graph.forward(self.in_space.unflatten(v)) for v in X.T], -1))
        return self.centred(torch.cat(columns).to(self.dtype)).flatten(0, 1)  # [n, c, K] -> [n·c, K]

    def _transpose_product(self, X: Tensor) -> Tensor:  # [n·c, K] -> [P, K]
        w, root = self.ensemble.weights, self.ensemble.root
        U = X.view(self.ensemble.n, self.ensemble.components, -1)
        U = root[:, None, None] * U
        U = U - w[:, None, None] * U.sum(0)  # (I - w 1ᵀ) √W X
        total, start = torch.zeros(self.shape[1], X.shape[1], dtype=self.dtype, device=self.device), 0
        with self.ensemble.running():
            for chunk in self.ensemble.chunks:
                graph = self._graph(chunk)
                stop = start + graph.rows
                for k in range(X.shape[1]):
                    total[:, k] += self.in_space.flatten(graph.backward(U[start:stop, :, k])).to(self.dtype)
                start = stop
        return total

    def recorded_kernel(self) -> Tensor | None:
        """`Ō Ōᵀ` from the recorded inputs and output gradients of layers; None if they can't be recorded.

        A parameter may also be read outside of the recorded calls. So the result is compared with plain autograd on one
        random vector: `uᵀ Ō Ōᵀ u = |Ōᵀ u|²`.
        """
        plain = recorded_sample_kernel(self.ensemble)
        if plain is None:
            return None
        kernel = self.centred(self.centred(plain).T)
        u = standard_normal(1, len(kernel), torch.Generator().manual_seed(0), kernel)
        form, square = (u.T @ kernel @ u)[0, 0], self._rmatmat(u).square().sum()
        # Rounding is relative to the kernel before it was centred.
        room = torch.finfo(kernel.dtype).eps ** 0.5 * (square + plain.diagonal().mean())
        return kernel if bool((form - square).abs() <= room) else None

    def kernel(self) -> Tensor:
        recorded = self.recorded_kernel()
        return super().kernel() if recorded is None else recorded

    def variances(self) -> Tensor:
        ensemble, holomorphic = self.ensemble, self.ensemble.psi.kind == "holomorphic"
        mean, total = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for at, J in ensemble.jacobians():  # one chunk at a time is in memory
            mean = mean + torch.tensordot(ensemble.weights[at], J, dims=1)
        for at, J in ensemble.jacobians():
            total = total + torch.tensordot(ensemble.weights[at], (J - mean).square(), dims=1)
        squares = total.sum(0)
        return squares.unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2) if holomorphic else squares


class _Graph:
    """A forward pass of some samples, with what is needed to multiply with its Jacobian and the transpose of it.

    `J v` is the derivative of `wᵀ J` with respect to `w`.
    """

    def __init__(self, ensemble: Ensemble, chunk: Any) -> None:
        self.leaves = {name: v.detach().requires_grad_() for name, v in ensemble.free.items()}
        self.out = ensemble.psi(self.leaves, chunk)  # [m, c]
        self.rows = len(self.out)
        self.w = torch.zeros_like(self.out, requires_grad=True)

    @cached_property
    def back(self) -> dict[str, Tensor]:
        """`Jᵀ w`, with a graph to `w`."""
        if not self.out.requires_grad:
            return {}
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(self.out, leaves, self.w, create_graph=True, allow_unused=True)
        return {name: g for name, g in zip(self.leaves, found, strict=True) if g is not None and g.requires_grad}

    def forward(self, v: Mapping[str, Tensor]) -> Tensor:  # {name: [*s]} -> [m, c]
        if not self.back:
            return torch.zeros_like(self.w).detach()
        along = [v[name].to(g.dtype) for name, g in self.back.items()]
        (out,) = torch.autograd.grad(list(self.back.values()), self.w, along, retain_graph=True, materialize_grads=True)
        return out

    def backward(self, u: Tensor) -> dict[str, Tensor]:  # [m, c] -> {name: [*s]}
        if not self.out.requires_grad:
            return {name: torch.zeros_like(v) for name, v in self.leaves.items()}
        found = torch.autograd.grad(
            self.out, list(self.leaves.values()), u.to(self.out.dtype), retain_graph=True, materialize_grads=True
        )
        return dict(zip(self.leaves, found, strict=True))


def _to_real(Y: Tensor) -> Tensor:  # complex [d, K] -> [2d, K]
    return torch.stack((Y.real, Y.imag), 1).flatten(0, 1) if Y.is_complex() else Y


def _as_blocks(M: Tensor) -> Tensor:  # complex [d, e] -> [2d, 2e]
    """A complex matrix as the real one that multiplies real and imaginary parts, each entry a 2 x 2 block."""
    rows = torch.stack((torch.stack((M.real, -M.imag), -1), torch.stack((M.imag, M.real), -1)), 1)  # [d, 2, e, 2]
    return rows.reshape(2 * M.shape[0], 2 * M.shape[1])
