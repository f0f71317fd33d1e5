"""Exact matrix-free operators: generalized Gauss-Newton, Hessian, empirical Fisher and Monte-Carlo Fisher.

Each product reads the data once. `J v` is forward-mode differentiation where that is right for the model, else the
derivative of `wᵀ J` with respect to `w` (see `linearize.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.double_backward import (
    PlainWeightNorm,
    naming_operations,
    plain_attention,
    refuse_asymmetry,
    refuse_once_differentiable,
)
from curvlinops_plus.exact.linearize import (
    CHUNK_BYTES,
    FunctionModule,
    Linearizer,
    Outputs,
    checked_chunk_size,
    pull,
)
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.linalg import LinearOperator, Space, Structure
from curvlinops_plus.linalg.products import outside_autocast
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals
from curvlinops_plus.risk.determinism import require_same
from curvlinops_plus.risk.first_order import loss_pass
from curvlinops_plus.risk.loss_weights import LossWeights, with_consistent_weights
from curvlinops_plus.risk.parameter_reads import refuse_outside_reads
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import Batch

__all__ = ["EFLinearOperator", "FisherMCLinearOperator", "GGNLinearOperator", "HessianLinearOperator"]


class _RiskOperator(LinearOperator):
    """A curvature matrix of an empirical risk, known by its products."""

    _structure: ClassVar[Structure] = Structure.PSD
    _any_loss: ClassVar[bool] = False
    _any_blocks: ClassVar[bool] = False

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        loss_func: Any,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        block_sizes: Sequence[int] | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        chunk_size: int | None = None,
        **risk_options: Any,
    ) -> None:
        self.chunk_size = checked_chunk_size(chunk_size)
        model = model_func if isinstance(model_func, nn.Module) else FunctionModule(model_func, params)
        self.risk = EmpiricalRisk(
            model,
            loss_func,
            data,
            params,
            batch_size_fn=batch_size_fn,
            num_data=num_data,
            progressbar=progressbar,
            **risk_options,
        )
        # Refuse now, not at first use.
        if not (self._any_loss and not self.risk.losses.known):
            self.risk.losses.require_likelihoods()
        _ = self.risk.losses.reduction
        self._block_sizes = self._checked(block_sizes)
        if check_deterministic:
            self._check_deterministic()

    def _checked(self, block_sizes: Sequence[int] | None) -> list[int]:
        """Numbers of parameters per block."""
        count = len(self.risk.params)
        if isinstance(block_sizes, int):
            raise TypeError(f"block_sizes={block_sizes} must be a list, how many parameters each block has.")
        if block_sizes is None:
            return [count]
        if not self._any_blocks:
            raise ValueError(f"{type(self).__name__} does not support block_sizes; HessianLinearOperator does.")
        if sum(block_sizes) != count or any(size <= 0 for size in block_sizes):
            raise ValueError(f"block_sizes={list(block_sizes)} must be positive and add up to {count}, the parameters.")
        return list(block_sizes)

    def _check_deterministic(self) -> None:
        """Compare the total losses of two passes."""
        with preserve_state(self.risk.model, self.risk.data):
            first, second = loss_pass(self.risk), loss_pass(self.risk)
        require_same(self.risk, first, second)

    @property
    def in_space(self) -> Space:
        return self.risk.space

    @property
    def out_space(self) -> Space:
        return self.risk.space

    @property
    def dtype(self) -> torch.dtype:
        return self.risk.dtype

    @property
    def device(self) -> torch.device:
        return self.risk.device

    @property
    def structure(self) -> Structure:
        return self._structure

    def gradient_and_loss(self) -> tuple[list[Tensor], Tensor]:
        """Gradient of the loss in the order of the parameters, and the loss, over all data; without autocast, as all
        products.
        """
        with outside_autocast(self.device):
            gradient, loss = self.risk.gradient_and_loss()
        return list(gradient.values()), loss

    def _to_dense(self) -> Tensor:
        return self._matmat(torch.eye(self.shape[1], dtype=self.dtype, device=self.device))

    def _matmat(self, X: Tensor) -> Tensor:
        with preserve_state(self.risk.model, self.risk.data):
            return self._one_product(X)

    def _one_product(self, X: Tensor) -> Tensor:
        """The product, without restoring the random state afterwards."""
        product, totals = with_consistent_weights(self.risk, lambda weights: self._one_sweep(X, weights))
        return product * self.risk.scale(totals)

    @abstractmethod
    def _one_sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        """Un-reduced product with `X` [n, K], and what was seen."""

    def _draws(self) -> Draws:
        return Draws(0)


Middle = Callable[[Tensor], Tensor]


class _JacobianSandwich(_RiskOperator):
    """`Jᵀ M J` with a matrix `M` of the loss, given by its product; of several losses the sum."""

    #: Several losses: whether `M` is made of the loss's own gradients.
    _of_loss: ClassVar[bool] = False

    @abstractmethod
    def _middle(self, likelihood: Likelihood | None, F: Tensor, Y: Any, loss: Any, draws: Draws) -> Middle:
        """The product [K, N, R, C] -> [K, N, R, C] with M; None for a loss without a likelihood."""

    def _middles(self, F: Any, Y: Any, part: Totals, draws: Draws, weights: LossWeights) -> list[tuple[Tensor, Middle]]:
        """Outputs and their matrices."""
        losses = self.risk.losses
        factors = losses.vector_factors(weights.of(part), self._of_loss)
        found = []
        for one, f, y, loss, a, own in zip(losses, F, Y, part.losses, factors, self._streams(F, Y, draws), strict=True):
            if f.requires_grad or one.known:
                middle = self._middle(one.likelihood if one.known else None, f, y, loss, own)
                found.append((f, middle if a == 1 else lambda V, a=a, middle=middle: a**2 * middle(V)))
        return found

    def _streams(self, F: Sequence[Tensor], Y: Sequence[Any], draws: Draws) -> Sequence[Draws]:
        """Random numbers for each of several losses."""
        return [draws] * len(F)

    @cached_property
    def _linear(self) -> Linearizer:
        return Linearizer(self.risk, self._evaluate, self.chunk_size)

    def _evaluate(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Any]:
        """Run the model; the outputs in canonical form, and what the loss says of them."""
        f, y, class_axis = self.risk.run(batch, model)
        terms = self.risk.terms(f, y, batch, class_axis)
        return terms.outputs, (terms.outputs, terms.targets, terms.totals)

    def _to_dense(self) -> Tensor:
        """The matrix `[n, n]`. Cost: a backward pass for each number that a batch's outputs have, or a product for each
        parameter where these are fewer.
        """
        n, linear = self.shape[1], self._linear
        zero = torch.zeros(n, n, dtype=self.dtype, device=self.device)
        with preserve_state(self.risk.model, self.risk.data):
            matrix, totals = with_consistent_weights(
                self.risk, lambda weights: self._summed(zero, linear.matrix, weights)
            )
        return matrix * self.risk.scale(totals)

    def _one_sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        linear = self._linear
        rows, totals = self._summed(torch.zeros_like(X.T), lambda batch, M: linear.sandwich(batch, X.T, M), weights)
        return rows.T, totals

    def _summed(
        self, total: Tensor, of_batch: Callable[[Batch, Any], Tensor], weights: LossWeights
    ) -> tuple[Tensor, Totals]:
        """`total` plus what each batch gives with its `M`, and what was seen."""
        totals, draws = Totals(), self._draws()

        def middle(outputs: Outputs, extra: Any) -> Callable[[list[Tensor]], list[Tensor | None]]:
            F, Y, part = extra
            totals.add(part.detached())
            found = {id(f): M for f, M in self._middles(F, Y, part, draws, weights)}
            Ms = [found.get(id(f)) for f in outputs]
            return lambda V: [None if M is None else M(v) for M, v in zip(Ms, V, strict=True)]

        for batch in self.risk.batches(type(self).__name__):
            total = total + of_batch(batch, middle)
        return total, totals


class GGNLinearOperator(_JacobianSandwich):
    """The generalized Gauss-Newton matrix `c Σ_n J_nᵀ H_n J_n`, exact and matrix-free.

    `H_n` is the Hessian of the loss with respect to the model's output, with every option of the loss. For losses of
    which only the Fisher information makes sense as a curvature (`nn.NLLLoss`, whose Hessian is 0 in the
    log-probabilities; `nn.BCELoss`, `nn.GaussianNLLLoss`, `nn.PoissonNLLLoss(log_input=False)`) it is that, see
    docs/modes.md; the same loss written as a function has its plain Hessian.

    Args:
        model_func: The network: a module, or a function `(params, X) -> outputs` (then `params` is a dict).
        loss_func: Any loss; one without a likelihood is differentiated twice, see `EmpiricalRisk(reduction=...)`. For
            several outputs a dict or a tuple of losses, or of pairs (loss, weight).
        params: The parameters, a list or a dict.
        data: Iterable of batches.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compare the total loss of two passes over the data first.
        num_data: Replaces the number of examples in the scale of the loss.
        block_sizes: Not supported here (`HessianLinearOperator` does), kept for the order of arguments.
        batch_size_fn: Number of examples of an input that is no tensor.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.
        risk_options: Keyword options of `EmpiricalRisk`.

    Raises:
        ValueError: If `chunk_size` is less than one.

    Cost: one sweep per product; columns of a chunk share the forward pass.

    Source: Schraudolph 2002, "Fast curvature matrix-vector products for second-order gradient descent".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> G.to_dense()
        tensor([[18.]])
    """

    _any_loss = True

    def _middle(self, likelihood: Likelihood | None, F: Tensor, Y: Any, loss: Any, draws: Draws) -> Middle:
        if likelihood is not None:
            F = F.detach()
            return lambda V: likelihood.hessian_product(F, Y, V)
        # Any other loss: its Hessian with respect to the output, by double backward.
        (gradient,) = torch.autograd.grad(loss, F, create_graph=True, allow_unused=True)
        if gradient is None or not gradient.requires_grad:
            return torch.zeros_like

        def product(V: Tensor) -> Tensor:
            with naming_operations():
                return torch.autograd.grad(gradient, F, V, retain_graph=True, is_grads_batched=True)[0]

        return product


class EFLinearOperator(_JacobianSandwich):
    """The empirical Fisher `c Σ_n Σ_r ∇ℓ_{n,r} ∇ℓ_{n,r}ᵀ`: outer products of the gradients of all loss terms.

    Arguments as for `GGNLinearOperator`. Of several losses, the sum over the terms of all, whose gradients are those of
    the weighted loss (see docs/heads.md).

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

    _of_loss = True

    def _middle(self, likelihood: Likelihood | None, F: Tensor, Y: Any, loss: Any, draws: Draws) -> Middle:
        assert likelihood is not None
        g = likelihood.grad(F.detach(), Y)
        return lambda V: g * (g * V).sum(-1, keepdim=True)


class FisherMCLinearOperator(_JacobianSandwich):
    """Monte-Carlo estimate of the Fisher: would-be gradients at labels drawn from the model's predictive distribution.

    The draws are those of KFAC and EKFAC with the same seed; two products see the same matrix.

    Args:
        model_func, loss_func, params, data, progressbar, check_deterministic, num_data, batch_size_fn: As for
            `GGNLinearOperator`.
        seed: Where the draws start.
        mc_samples: Draws per example.
        risk_options: `chunk_size` as for `GGNLinearOperator`, and keyword options of `EmpiricalRisk`.

    Raises:
        ValueError: If `mc_samples` is no integer of at least one.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> F = FisherMCLinearOperator(model, nn.MSELoss(), list(model.parameters()), data, mc_samples=10000)
        >>> bool((F.to_dense() - 18).abs() < 1)
        True
    """

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: Any,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        seed: int = 2147483647,
        mc_samples: int = 1,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        **risk_options: Any,
    ) -> None:
        if isinstance(mc_samples, bool) or not isinstance(mc_samples, int) or mc_samples < 1:
            raise ValueError(f"mc_samples={mc_samples!r} must be an integer of at least 1, the draws per example.")
        self._seed, self._mc_samples = seed, mc_samples
        super().__init__(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            check_deterministic,
            num_data,
            None,
            batch_size_fn,
            **risk_options,
        )

    def _draws(self) -> Draws:
        return Draws(self._seed)

    def _check_deterministic(self) -> None:
        """Two products must see the same matrix: the draws follow the order of the examples."""
        super()._check_deterministic()
        v = torch.ones(self.shape[1], 1, dtype=self.dtype, device=self.device)
        with preserve_state(self.risk.model, self.risk.data):
            one, two = self._one_product(v), self._one_product(v)
        if not torch.allclose(one, two, rtol=1e-4, atol=1e-6):
            raise RuntimeError(
                "Two products with the same vector differ, although the total loss does not: the data come in another "
                "order each time (shuffle=True?), and the draws follow that order. Use a loader that does not shuffle. "
                "check_deterministic=False turns this check off."
            )

    def _streams(self, F: Sequence[Tensor], Y: Sequence[Any], draws: Draws) -> Sequence[Draws]:
        losses, num = self.risk.losses, self._mc_samples

        def draw(index: int, own: Draws) -> Tensor:
            return losses[index].likelihood.draw(F[index].detach(), Y[index], num, own.uniform)

        consumers = [lambda own, index=index: draw(index, own) for index in range(len(F))]
        return losses.streams((num, *(tuple(f.shape[1:]) for f in F)), draws, len(F[0]), consumers)

    def _middle(self, likelihood: Likelihood | None, F: Tensor, Y: Any, loss: Any, draws: Draws) -> Middle:
        assert likelihood is not None
        drawn = likelihood.draw(F.detach(), Y, self._mc_samples, draws.uniform)

        def product(V: Tensor) -> Tensor:
            out = torch.zeros_like(V)
            for g in drawn:
                out += g * (g * V).sum(-1, keepdim=True)
            return out / self._mc_samples

        return product


class HessianLinearOperator(_RiskOperator):
    """The Hessian of the empirical risk, exact and matrix-free.

    Arguments as for `GGNLinearOperator`; `block_sizes` are the numbers of parameters that form a block each: products
    with the block-diagonal Hessian.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[3.0]]), torch.zeros(1, 1))]
        >>> H = HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> H.to_dense()
        tensor([[18.]])
    """

    _structure = Structure.SYMMETRIC
    _any_loss = True
    _any_blocks = True
    _looked_at = False
    _largest = 1  # numbers in the largest intermediate result of the first forward pass
    _normed = False  # whether there is weight norm in it

    def _one_sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        risk, totals = self.risk, Totals()
        free = {key: p.detach().requires_grad_() for key, p in risk.params.items()}

        with torch.inference_mode(False), torch.enable_grad(), plain_attention(), naming_operations():
            X = X.clone() if X.is_inference() else X
            total = torch.zeros_like(X)

            def loop(model: nn.Module) -> None:
                for batch in risk.batches(type(self).__name__):
                    watch = None if self._looked_at and not self._normed else PlainWeightNorm()
                    with torch.compiler.set_stance("force_eager"), watch or nullcontext():
                        f, y, class_axis = risk.run(batch, model)
                    part = risk.terms(f, y, batch, class_axis).totals
                    if watch is not None:
                        self._largest, self._normed = max(self._largest, watch.largest), watch.used
                    total.add_(self._product(part, list(free.values()), X, weights))
                    totals.add(part.detached())

            risk.at(free, loop)
        return total, totals

    def _product(self, part: Totals, params: list[Tensor], X: Tensor, weights: LossWeights) -> Tensor:
        """Un-reduced Hessian of one batch times `X` [n, K]."""
        loss = weights.objective(part)
        if not self._looked_at:
            refuse_once_differentiable(loss)
            refuse_outside_reads(loss, self.risk.params)
        gradient = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        blocks = torch.tensor(self._block_sizes).cumsum(0).tolist()

        def product(rows: Tensor) -> Tensor:
            V, found = self._split(rows), []
            for start, stop in zip([0, *blocks], blocks):
                used = [i for i in range(start, stop) if (g := gradient[i]) is not None and g.requires_grad]
                if used:
                    found += pull([gradient[i] for i in used], params[start:stop], [V[i] for i in used])
                else:
                    found += [None] * (stop - start)
            return self._join(found, len(rows))

        if not self._looked_at:
            refuse_asymmetry(product, X)
            self._looked_at = True
        # Two backward passes hold a few results of each column at a time.
        size = self.chunk_size or max(1, CHUNK_BYTES // (8 * (X.shape[0] + 4 * self._largest)))
        return torch.cat([product(piece) for piece in X.T.split(size)]).T

    def _split(self, rows: Tensor) -> list[Tensor]:
        """[K, n] to [K, *shape] for each parameter, in the parameters' own dtypes."""
        parts = rows.split(list(self.in_space.sizes), dim=1)
        return [part.reshape(len(rows), *p.shape).to(p.dtype) for part, p in zip(parts, self.risk.params.values())]

    def _join(self, parts: Sequence[Tensor | None], K: int) -> Tensor:
        """[K, *shape] for each parameter to [K, n]."""
        joined = [
            torch.zeros(K, p.numel(), dtype=self.dtype, device=self.device)
            if part is None
            else part.reshape(K, -1).to(self.dtype)
            for part, p in zip(parts, self.risk.params.values())
        ]
        return torch.cat(joined, 1)
