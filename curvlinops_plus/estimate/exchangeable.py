"""Leaving one vector out of an orthonormal basis without computing it again (Epperly, Tropp, Webber 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlinops_plus.estimate.columns import length, orthonormal


def leave_one_out(Y: Tensor) -> tuple[Tensor, Tensor]:  # [n, N] -> [n, r], [r, N]
    """A basis `Q` of the range of `Y`, and for every column `i` the direction `sᵢ` that only this column adds.

    `Q (I - sᵢ sᵢᵀ) Qᵀ` is the projection on the range of all other columns. `sᵢ` has length 1, or is 0 where the other
    columns have the same range, as they do if the rank `r` is less than `N` and the columns are random.

    Cost: `O(n N²)`, as one QR decomposition.

    Example:
        >>> Q, S = leave_one_out(torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]]))
        >>> (Q @ S).abs()
        tensor([[1., 0.],
                [0., 1.],
                [0., 0.]])
    """
    Q, R = orthonormal(Y)
    U, sigma, Vh = torch.linalg.svd(R)  # Vh [N, N], also if there are fewer rows than columns
    rounding = Y.shape[1] * torch.finfo(Y.dtype).eps
    rank = int((sigma > rounding * sigma.amax()).sum())
    S = Vh[:rank] / sigma[:rank, None]
    S = S / length(S).clamp(min=torch.finfo(Y.dtype).tiny)
    # Leaving out column i takes a dimension from the range exactly if no combination of columns that is 0 contains it.
    needed = length(Vh[rank:]) <= 10 * rounding
    return Q @ U[:, :rank], S * needed
