"""The exact diagonal of the generalized Gauss-Newton matrix through a class like those of curvlinops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator
from curvlinops_plus.blocks.per_example import DiagonalBlock
from curvlinops_plus.classic.build_risk import build_risk
from curvlinops_plus.risk import Exact, MonteCarlo


class GGNDiagonalLinearOperator(BlockwiseLinearOperator):
    """The diagonal of the generalized Gauss-Newton matrix, exact or from would-be gradients, for any layer.

    Args:
        model_func: The network, a module.
        loss_func: A loss with a registered likelihood.
        params: The parameters, in the order in which vectors are formed: a list, or a dict under names of your own.
        data: Iterable of batches, as for `KFACLinearOperator`.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compute now, and compare the total loss of two passes over the data. Otherwise the diagonal
            is computed at first use, which refuses parameters that have changed since.
        num_data: Replaces the number of examples in the scale of the loss.
        batch_size_fn: Number of examples of an input that is no tensor.
        mc_samples: Draws per example; 0 is the exact diagonal.
        seed: Where the random draws start.
        risk_options: Keyword options of `EmpiricalRisk`.

    Raises:
        ValueError: For an unknown loss, or a negative `mc_samples`.
        RuntimeError: If two passes over the data disagree, or the parameters changed before the first use.

    Cost: one sweep, with one backward pass per column of the loss Hessian's root, or per draw.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1)
        >>> data = [(torch.tensor([[2.0]]), torch.zeros(1, 1))]
        >>> GGNDiagonalLinearOperator(model, nn.MSELoss(), list(model.parameters()), data).diagonal().round()
        tensor([8., 2.])
    """

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: nn.Module,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        mc_samples: int = 0,
        seed: int = 2147483647,
        **risk_options: Any,
    ) -> None:
        super().__init__(
            build_risk(model_func, loss_func, params, data, progressbar, num_data, batch_size_fn, **risk_options),
            DiagonalBlock,
            vectors=MonteCarlo(mc_samples, seed) if mc_samples else Exact(),
            check_deterministic=check_deterministic,
            compute=check_deterministic,
        )
