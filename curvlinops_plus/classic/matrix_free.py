"""Exact matrix-free operators with the names, arguments and defaults of curvlinops 3.0.1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from curvlinops_plus.classic.arguments import build_risk
from curvlinops_plus.exact import GGN, ActivationHessian, GGNFactor, Hessian, Jacobian
from curvlinops_plus.linalg.arithmetic import Adjoint
from curvlinops_plus.options import instance, integer
from curvlinops_plus.risk import Empirical, EmpiricalRisk, MonteCarlo, Vectors

Params = Sequence[Tensor | str] | Mapping[str, Tensor]


class GGNLinearOperator(GGN):
    """`GGN(risk)`: the generalized Gauss-Newton matrix, exact and matrix-free.

    Args:
        model_func: The network: a module, or a function `(params, X) -> outputs` (then `params` is
            a dict).
        loss_func: Any loss; one without a likelihood is differentiated twice, see
            `EmpiricalRisk(reduction=...)`. For several outputs a dict or a tuple of losses, or of
            pairs (loss, weight).
        params: The parameters, a list or a dict.
        data: Iterable of batches.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compare the total loss of two passes over the data first.
        num_data: Replaces the number of examples in the scale of the loss.
        block_sizes: Not supported here (`HessianLinearOperator` does), kept for the order of
            arguments.
        batch_size_fn: Number of examples of an input that is not a tensor.
        mc_samples: Draws per example of the Monte-Carlo estimate, as of `FisherMCLinearOperator`;
            0, the default, is the exact matrix.
        seed: Where the draws start.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of
            copies.
        risk_options: Keyword options of `EmpiricalRisk`.

    Raises:
        ValueError: If `chunk_size` is less than one, or `block_sizes` is given; if `mc_samples` is
            no integer of at least 0.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> G.to_dense()
        tensor([[18.]])
    """

    _VECTORS: Vectors | None = None

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        loss_func: Any,
        params: Params,
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        block_sizes: Sequence[int] | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        mc_samples: int = 0,
        seed: int = 2147483647,
        chunk_size: int | None = None,
        **risk_options: Any,
    ) -> None:
        if block_sizes is not None:
            raise ValueError(
                f"{type(self).__name__} does not support block_sizes; HessianLinearOperator does."
            )
        integer("mc_samples", mc_samples, low=0)
        vectors = self._VECTORS
        if mc_samples and vectors is not None:
            raise ValueError(f"mc_samples={mc_samples}: {type(self).__name__} draws nothing.")
        if mc_samples:
            vectors = MonteCarlo(mc_samples, seed)
        risk = build_risk(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            num_data,
            batch_size_fn,
            **risk_options,
        )
        super().__init__(
            risk, vectors, check_deterministic=check_deterministic, chunk_size=chunk_size
        )


class EFLinearOperator(GGNLinearOperator):
    """`GGN(risk, Empirical(per_term=True))`: the empirical Fisher `c Σ_n Σ_r ∇ℓ_{n,r} ∇ℓ_{n,r}ᵀ`
    over loss terms.

    Arguments as for `GGNLinearOperator`; the loss needs a likelihood. Of several losses, the sum
    over the terms of all, whose gradients are those of the weighted loss (see docs/losses.md).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> F = EFLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> F.to_dense()  # (2 · 3 · 3)²
        tensor([[324.]])
    """

    _VECTORS = Empirical(per_term=True)


class FisherMCLinearOperator(GGN):
    """`GGN(risk, MonteCarlo(mc_samples, seed))`: Monte-Carlo estimate of the Fisher, from labels
    that the model draws.

    The draws are those of KFAC and EKFAC with the same seed; two products see the same matrix.

    Args:
        model_func, loss_func, params, data, num_data, batch_size_fn: As for `GGNLinearOperator`;
            the loss needs a likelihood.
        progressbar, check_deterministic: As for `GGNLinearOperator`.
        seed: Where the draws start.
        mc_samples: Draws per example.
        chunk_size: As for `GGNLinearOperator`.
        risk_options: Keyword options of `EmpiricalRisk`.

    Raises:
        ValueError: If `mc_samples` is no integer of at least one.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> F = FisherMCLinearOperator(
        ...     model, nn.MSELoss(), list(model.parameters()), data, mc_samples=10000
        ... )
        >>> bool((F.to_dense() - 18).abs() < 1)
        True
    """

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        loss_func: Any,
        params: Params,
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        seed: int = 2147483647,
        mc_samples: int = 1,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        chunk_size: int | None = None,
        **risk_options: Any,
    ) -> None:
        risk = build_risk(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            num_data,
            batch_size_fn,
            **risk_options,
        )
        vectors = MonteCarlo(mc_samples, seed)
        super().__init__(
            risk, vectors, check_deterministic=check_deterministic, chunk_size=chunk_size
        )


class HessianLinearOperator(Hessian):
    """`Hessian(risk)`: the Hessian of the empirical risk, exact and matrix-free.

    Arguments as for `GGNLinearOperator`; `block_sizes` are the numbers of parameters that form a
    block each: products with the block-diagonal Hessian.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> H = HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> H.to_dense()
        tensor([[18.]])
    """

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        loss_func: Any,
        params: Params,
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        block_sizes: Sequence[int] | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        **risk_options: Any,
    ) -> None:
        risk = build_risk(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            num_data,
            batch_size_fn,
            **risk_options,
        )
        super().__init__(risk, block_sizes=block_sizes, check_deterministic=check_deterministic)


class JacobianLinearOperator(Jacobian):
    """`Jacobian(risk)`: the Jacobian of the model's output with respect to the parameters, `[N·C,
    P]`.

    Args:
        model_func: The network: a module, or a function `(params, X) -> output` (then `params` is a
            dict).
        params: The parameters, a list or a dict.
        data: Iterable of batches `(X, y)`; targets are not used.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compare two products first.
        num_data: Unused: examples are counted once.
        batch_size_fn: Number of examples of an input that is not a tensor.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of
            copies.
        risk_options: Keyword options of `EmpiricalRisk`, as `output`, which picks the tensor out of
            what the model returns.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> inputs = [torch.tensor([[3.0, 4.0]]), torch.ones(1, 2)]
        >>> data = [(x, torch.zeros(1, 1)) for x in inputs]
        >>> J = JacobianLinearOperator(model, list(model.parameters()), data)
        >>> J.to_dense(), J.out_shapes
        (tensor([[3., 4., 1.],
            [1., 1., 1.]]), (torch.Size([2, 1]),))
    """

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        params: Params,
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        chunk_size: int | None = None,
        **risk_options: Any,
    ) -> None:
        unused = nn.MSELoss()  # never evaluated: a risk needs one
        risk = build_risk(
            model_func, unused, params, data, progressbar, num_data, batch_size_fn, **risk_options
        )
        super().__init__(risk, check_deterministic=check_deterministic, chunk_size=chunk_size)


class TransposedJacobianLinearOperator(Adjoint):
    """`Jacobian(risk).T`: the transposed Jacobian `[P, N·C]`. Arguments as for
    `JacobianLinearOperator`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> inputs = [torch.tensor([[3.0, 4.0]]), torch.ones(1, 2)]
        >>> data = [(x, torch.zeros(1, 1)) for x in inputs]
        >>> Jt = TransposedJacobianLinearOperator(model, list(model.parameters()), data)
        >>> Jt @ [torch.tensor([[1.0], [-1.0]])]
        [tensor([[2., 3.]]), tensor([0.])]
    """

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        params: Params,
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        chunk_size: int | None = None,
        **risk_options: Any,
    ) -> None:
        options = {
            "num_data": num_data,
            "batch_size_fn": batch_size_fn,
            "chunk_size": chunk_size,
            **risk_options,
        }
        super().__init__(
            JacobianLinearOperator(
                model_func, params, data, progressbar, check_deterministic, **options
            )
        )

    @property
    def risk(self) -> EmpiricalRisk:
        """Model, parameters and data."""
        return cast(Jacobian, self.A).risk


class GGNFactorLinearOperator(GGNFactor):
    """`GGNFactor(risk, vectors)`: a factor `B [P, N·R·K]` of the generalized Gauss-Newton matrix,
    `B Bᵀ = GGN`.

    Args:
        model_func, loss_func, params, data, num_data, batch_size_fn: As for `GGNLinearOperator`;
            the loss needs a likelihood.
        progressbar, check_deterministic: As for `GGNLinearOperator`.
        vectors: Which matrix, see `GGNFactor`.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of
            copies.
        risk_options: Keyword options of `EmpiricalRisk`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> B = GGNFactorLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> B.to_dense(), (B @ B.T).to_dense()  # 3 √2
        (tensor([[4.2426]]), tensor([[18.0000]]))
    """

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        loss_func: Any,
        params: Params,
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        vectors: Vectors | str | None = None,
        chunk_size: int | None = None,
        **risk_options: Any,
    ) -> None:
        risk = build_risk(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            num_data,
            batch_size_fn,
            **risk_options,
        )
        super().__init__(
            risk, vectors, check_deterministic=check_deterministic, chunk_size=chunk_size
        )


class ActivationHessianLinearOperator(ActivationHessian):
    """`ActivationHessian(risk, activation)`: the Hessian of the loss with respect to an activation
    inside the model.

    Args:
        model_func: The network, a module.
        loss_func: Any loss; for several outputs a dict or tuple of losses.
        activation: Which one, see `ActivationHessian`.
        data: Iterable of batches.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compare two products first.
        num_data: Replaces the number of examples in the scale of the loss.
        batch_size_fn: Number of examples of an input that is not a tensor.
        risk_options: Keyword options of `EmpiricalRisk`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
        >>> data = [(torch.rand(10, 4), torch.rand(10, 2))]
        >>> H = ActivationHessianLinearOperator(model, nn.MSELoss(), ("1", "output", 0), data)
        >>> H.shape, H.in_shapes
        ((30, 30), (torch.Size([10, 3]),))
    """

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: Any,
        activation: tuple[str, str, int],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        **risk_options: Any,
    ) -> None:
        instance("model_func", model_func, nn.Module, "a torch.nn.Module")
        params = dict(model_func.named_parameters())
        risk = build_risk(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            num_data,
            batch_size_fn,
            **risk_options,
        )
        super().__init__(risk, activation, check_deterministic=check_deterministic)
