"""Kronecker-factored optimal curvature through a class like those of curvlinops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.blocks.per_example import NearestKronecker
from curvlinops_plus.classic.fisher_types import FisherType
from curvlinops_plus.classic.kronecker_factored import KFACLinearOperator


class KFOCLinearOperator(KFACLinearOperator):
    """Kronecker-factored optimal curvature (KFOC): per layer the product `G ⊗ A` nearest to the exact block.

    Nearest in the Frobenius norm, see `NearestKronecker`; a separate bias block is exact. `input_covariances` and
    `gradient_covariances` are the factors of the layers' weights: both symmetric and positive semi-definite, with equal
    mean eigenvalues. Layers without Kronecker factors get their exact diagonal, and one warning lists them.

    Arguments as for `KFACLinearOperator`, without `kfac_approx`; the exact matrix ("type-2") is the default. More
    options are those of `curvature(risk, NearestKronecker.using(...))`.

    Args:
        fisher_type: "type-2" (exact), "mc" (labels drawn from the model) or "empirical".
        mc_samples: Draws per example for "mc".
        options: Keyword options of `KFACLinearOperator`.

    Cost: one sweep for layers whose block takes no more than 64 MiB, four sweeps for larger ones.

    Source: Schnaus et al. 2021, "Kronecker-factored optimal curvature"; Koroko et al. 2022 (arXiv 2201.10285).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 2)
        >>> data = [(torch.rand(5, 3), torch.rand(5, 2))]
        >>> K = KFOCLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> K.input_covariances[""].shape, {name: block.shape for name, block in K.blocks.items()}
        (torch.Size([3, 3]), {'weight': (6, 6), 'bias': (2, 2)})
    """

    _APPROXIMATION = NearestKronecker

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: nn.Module,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        seed: int = 2147483647,
        num_per_example_loss_terms: int | None = None,
        separate_weight_and_bias: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        fisher_type: str = FisherType.TYPE2,
        mc_samples: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(
            model_func,
            loss_func,
            params,
            data,
            progressbar=progressbar,
            check_deterministic=check_deterministic,
            seed=seed,
            fisher_type=fisher_type,
            mc_samples=mc_samples,
            num_per_example_loss_terms=num_per_example_loss_terms,
            separate_weight_and_bias=separate_weight_and_bias,
            num_data=num_data,
            batch_size_fn=batch_size_fn,
            **options,
        )
