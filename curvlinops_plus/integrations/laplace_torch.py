"""A backend for laplace-torch: `Laplace(model, "classification", backend=CurvlinopsPlusGGN)`, and
nothing else changes.

Its curvatures are those of this package, with every layer and loss check: diagonals without
Jacobians, Kronecker factors of convolutions of any kind, normalisation, embeddings and attention.
laplace-torch adds the factors of batches up, and gives each parameter one pair of factors, or one
matrix if it has one axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks import KFAC, DiagonalBlock, curvature
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact import GGN
from curvlinops_plus.linalg import Kronecker, LinearOperator
from curvlinops_plus.risk import Empirical, EmpiricalRisk, Exact, MonteCarlo, Vectors

if TYPE_CHECKING:
    GGNInterface = EFInterface = object
    Kron: Any = None
else:
    try:
        from laplace.curvature import EFInterface, GGNInterface
        from laplace.utils import Kron
    except ImportError:  # the module can be read without
        GGNInterface = EFInterface = object


class _Backend:
    """Loss and curvature of one batch, as laplace-torch asks for them; of `MSELoss` half of
    both.
    """

    _risk: EmpiricalRisk | None = None

    def _risk_of(self: Any, x: Any, y: Tensor) -> EmpiricalRisk:
        """The risk of a batch; layers are compared with autograd in the first one alone."""
        if self._risk is None or not self._has_same_params(self._risk):
            size = (lambda X: len(X[self.dict_key_x])) if isinstance(x, Mapping) else None
            self._risk = EmpiricalRisk(
                self.model, self.lossfunc, [(x, y)], self.params, batch_size_fn=size
            )
        risk = self._risk.with_data([(x, y)])
        risk.checked = self._risk.checked
        return risk

    def _has_same_params(self: Any, risk: EmpiricalRisk) -> bool:
        return all(a is b for a, b in zip(risk.params.values(), self.params, strict=True))

    def full(self: Any, x: Any, y: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Loss and dense matrix."""
        risk = self._risk_of(x, y)
        G = GGN(risk, self._vectors()).to_dense()
        if self.subnetwork_indices is not None:
            G = G[self.subnetwork_indices][:, self.subnetwork_indices]
        return self.factor * risk.loss(), self.factor * G

    def diag(self: Any, x: Any, y: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Loss and exact diagonal; no Jacobian is formed."""
        risk = self._risk_of(x, y)
        diagonal = curvature(risk, DiagonalBlock, vectors=self._vectors()).diagonal()
        if self.subnetwork_indices is not None:
            diagonal = diagonal[self.subnetwork_indices]
        return self.factor * risk.loss(), self.factor * diagonal

    def kron(self: Any, x: Any, y: Tensor, N: int, **options: Any) -> tuple[Tensor, Any]:
        """Loss and factors of every parameter: those of a batch of M examples are sums and means
        times M / N.

        Args:
            x: Inputs.
            y: Targets.
            N: Number of all examples.
            options: Those of `KFAC`, such as `kfac_approx`.

        Raises:
            UnsupportedError: If a parameter has no Kronecker factors of its own shape (recurrent,
                transposed layers).
        """
        risk = self._risk_of(x, y)
        K = curvature(
            risk, KFAC.using(**options), vectors=self._vectors(), separate_weight_and_bias=True
        )
        positions = K.operator.positions()
        block_names = {
            parameter: block
            for block, layout in K.operator.layouts.items()
            for parameter in layout.names
        }
        factors = []
        for key, p in risk.params.items():
            block = K.blocks[block_names[key]]
            block_positions = positions[block_names[key]]
            if p.ndim < 2:
                order = block_positions.argsort()
                factors.append([block.to_dense()[order][:, order]])
                continue
            pair = _pair(block, block_positions, p.shape[0])
            if pair is None:
                raise UnsupportedError(
                    f"{key!r} has no Kronecker factors of its shape; take 'diag' or 'full'."
                )
            row_factor, column_factor = pair
            factors.append([row_factor, (K.examples or N) / N * column_factor])
        return self.factor * risk.loss(), Kron(factors) * self.factor


class CurvlinopsPlusGGN(_Backend, GGNInterface):
    """Gauss-Newton matrix, or with `stochastic=True` the Fisher matrix from labels that the model
    draws.

    Arguments are those of laplace-torch's backends; pass them by `backend_kwargs`.

    Example:
        >>> from laplace import Laplace  # doctest: +SKIP
        >>> la = Laplace(model, "classification", backend=CurvlinopsPlusGGN)  # doctest: +SKIP
    """

    _drawn = 0

    def _vectors(self: Any) -> Vectors:
        if not self.stochastic:
            return Exact()
        self._drawn += 1  # other draws for each batch
        return MonteCarlo(self.num_samples, seed=self._drawn)


class CurvlinopsPlusEF(_Backend, EFInterface):
    """Empirical Fisher matrix; of `MSELoss` half of that of the squared error, as in
    laplace-torch's own backends.

    Example:
        >>> from laplace import Laplace  # doctest: +SKIP
        >>> la = Laplace(model, "classification", backend=CurvlinopsPlusEF)  # doctest: +SKIP
    """

    def _vectors(self: Any) -> Vectors:
        return Empirical()


def _pair(block: LinearOperator, positions: Tensor, rows: int) -> tuple[Tensor, Tensor] | None:
    """Factors of the rows and columns of a parameter at these positions of the block, None if it
    has none.
    """
    if not isinstance(block, Kronecker):
        return None
    G = block.G.matrices()
    A = block.A.matrices()
    if block.batch:
        # Groups, or q, k and v of self-attention: Σ_b G_b ⊗ A_b by one product of block_diag(G_b)
        # and the mean of A. It is exact where they share A; traces are in any case.
        G, A = (M.expand(block.batch[0], -1, -1) for M in (G, A))
        traces = A.diagonal(dim1=-2, dim2=-1).sum(-1)
        A = A.mean(0)
        G = torch.block_diag(*(G * (traces / A.trace().clamp(min=1e-30))[:, None, None]))
    matrix = (positions - positions.min()).view(len(G), len(A))
    natural = torch.arange(positions.numel(), device=positions.device)
    if len(G) == rows and torch.equal(matrix.flatten(), natural):
        return G, A
    # Stored transposed, as in GPT-2's Conv1D.
    if len(A) == rows and torch.equal(matrix.T.flatten(), natural):
        return A, G
    return None
