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
        known = self._risk
        if known is None or any(
            a is not b for a, b in zip(known.params.values(), self.params, strict=True)
        ):
            size = (lambda X: len(X[self.dict_key_x])) if isinstance(x, Mapping) else None
            self._risk = known = EmpiricalRisk(
                self.model, self.lossfunc, [(x, y)], self.params, batch_size_fn=size
            )
        risk = known.with_data([(x, y)])
        risk.checked = known.checked  # layers are compared with autograd once
        return risk

    def full(self: Any, x: Any, y: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Loss and dense matrix."""
        risk = self._risk_of(x, y)
        G, picked = GGN(risk, self._vectors()).to_dense(), self.subnetwork_indices
        G = G if picked is None else G[picked][:, picked]
        return self.factor * risk.loss(), self.factor * G

    def diag(self: Any, x: Any, y: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Loss and exact diagonal; no Jacobian is formed."""
        risk = self._risk_of(x, y)
        D, picked = (
            curvature(risk, DiagonalBlock, vectors=self._vectors()).diagonal(),
            self.subnetwork_indices,
        )
        return self.factor * risk.loss(), self.factor * (D if picked is None else D[picked])

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
        factors, positions = [], K.operator.positions()
        owners = {
            parameter: block
            for block, layout in K.operator.layouts.items()
            for parameter in layout.names
        }
        for key, p in risk.params.items():
            block, at = K.blocks[owners[key]], positions[owners[key]]
            if p.ndim < 2:
                order = at.argsort()
                factors.append([block.to_dense()[order][:, order]])
            elif pair := _pair(block, at, p.shape[0]):
                factors.append([pair[0], (K.examples or N) / N * pair[1]])
            else:
                raise UnsupportedError(
                    f"{key!r} has no Kronecker factors of its shape; take 'diag' or 'full'."
                )
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


def _pair(block: LinearOperator, at: Tensor, rows: int) -> tuple[Tensor, Tensor] | None:
    """Factors of the rows and columns of a parameter at these positions of the block, None if it
    has none.
    """
    if not isinstance(block, Kronecker):
        return None
    G, A = block.G.matrices(), block.A.matrices()
    # groups, or q, k and v of self-attention, which share A: then it is exact; traces are in any
    # case
    if block.batch:
        G, A = (M.expand(block.batch[0], -1, -1) for M in (G, A))
        sizes = A.diagonal(dim1=-2, dim2=-1).sum(-1)
        A = A.mean(0)
        G = torch.block_diag(*(G * (sizes / A.trace().clamp(min=1e-30))[:, None, None]))
    places = (at - at.min()).view(len(G), len(A))
    natural = torch.arange(at.numel(), device=at.device)
    for pair, own in (
        ((G, A), places),
        ((A, G), places.T),
    ):  # stored as it is, or transposed as in GPT-2's Conv1D
        if len(pair[0]) == rows and torch.equal(own.flatten(), natural):
            return pair
    return None
