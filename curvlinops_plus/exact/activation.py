"""The Hessian of the loss with respect to what a module inside the model takes or returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.double_backward import naming_operations, plain_attention, refuse_once_differentiable
from curvlinops_plus.exact.linearize import (
    CHUNK_BYTES,
    pull,
)
from curvlinops_plus.linalg import LinearOperator, Space, Structure
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.loss_weights import LossWeights, with_consistent_weights
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import is_iterator

__all__ = ["ActivationHessianLinearOperator"]


class ActivationHessianLinearOperator(LinearOperator):
    """The Hessian of the loss with respect to an activation: the input or output of a module inside the model.

    The activation of one batch is one tensor `[N, *features]`, and the Hessian is `[numbers, numbers]`. Several batches
    are several tensors, in the order of the data; batches don't interact, so the Hessian is block-diagonal over them,
    and the loss is that of the whole data set: with `reduction="mean"`, one over what PyTorch divides by for all data.

    Args:
        model_func: The network.
        loss_func: Any loss; for several outputs a dict or tuple of losses.
        activation: Which one: name of the module as in `model.named_modules()`, "input" or "output", and the position
            among several inputs or outputs (0 where there is one). Other modules may read the tensor, too; an "input"
            is what this module alone reads.
        data: Iterable of batches.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compare two products first.
        num_data: Replaces the number of examples in the scale of the loss.
        batch_size_fn: Number of examples of an input that is no tensor.
        risk_options: Keyword options of `EmpiricalRisk`.

    Raises:
        ValueError: If there is no such module or tensor, it is not called exactly once per forward pass, or the tensor
            is not made of floating-point numbers.
        RuntimeError: If two products differ.
        UnsupportedError: If the model uses an operation that PyTorch can't differentiate twice.

    Cost: one forward and one backward pass per product, and one more backward pass for each column; only what comes
    after the activation is gone through.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
        >>> data = [(torch.rand(10, 4), torch.rand(10, 2))]
        >>> H = ActivationHessianLinearOperator(model, nn.MSELoss(reduction="sum"), ("1", "output", 0), data)
        >>> H.shape, H.in_shapes
        ((30, 30), (torch.Size([10, 3]),))
        >>> block, W = H.to_dense()[:3, :3], model[2].weight.detach()  # of the first example
        >>> torch.allclose(block, 2 * W.T @ W)
        True
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
        if not isinstance(model_func, nn.Module):
            raise ValueError(f"Activations are known by modules; `model_func` is a {type(model_func).__name__}.")
        self._activation = _checked(model_func, activation)
        self.risk = EmpiricalRisk(
            model_func,
            loss_func,
            data,
            dict(model_func.named_parameters()),
            batch_size_fn=batch_size_fn,
            num_data=num_data,
            progressbar=progressbar,
            **risk_options,
        )
        if is_iterator(self.risk.data):
            raise ValueError(
                f"`data` is an iterator, which can be read only once; {type(self).__name__} reads the data once per "
                "product. Pass a list or a DataLoader."
            )
        # Refuse now, not at first use.
        _ = self.risk.losses.reduction
        if check_deterministic:
            self._check_deterministic()

    # ------------------------------------------------------------------------------------------------------- what it is
    @cached_property
    def in_space(self) -> Space:
        shapes: list[torch.Size] = []
        with preserve_state(self.risk.model, self.risk.data):
            self._loop("sizes", lambda z, _: shapes.append(z.shape))
        return Space.from_shapes(shapes)

    @property
    def out_space(self) -> Space:
        return self.in_space

    @property
    def dtype(self) -> torch.dtype:
        return self.risk.dtype

    @property
    def device(self) -> torch.device:
        return self.risk.device

    @property
    def structure(self) -> Structure:
        return Structure.SYMMETRIC

    # --------------------------------------------------------------------------------------------------------- products
    def _matmat(self, X: Tensor) -> Tensor:
        with preserve_state(self.risk.model, self.risk.data):
            return self._product(X.clone() if X.is_inference() else X)

    def _product(self, X: Tensor) -> Tensor:
        found, totals = with_consistent_weights(self.risk, lambda weights: self._one_sweep(X, weights))
        return found * self.risk.scale(totals)

    def _one_sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        """Un-reduced product, and what was seen."""
        n, shapes = self.in_space.dim, iter(self.in_space.shapes.values())
        found: list[Tensor] = []
        start = 0

        def block(z: Tensor, part: Totals) -> None:
            nonlocal start
            expected = next(shapes, None)
            if z.shape != expected:
                self._raise_changed(z.shape, expected)
            rows = X[start : start + z.numel()].T
            start += z.numel()
            size = max(1, CHUNK_BYTES // (8 * n))
            loss = weights.objective(part)
            if not found:
                refuse_once_differentiable(loss)
            found.append(torch.cat([_second(z, loss, piece) for piece in rows.split(size)], 0).T.to(X.dtype))

        totals = self._loop("product", block)
        if start != n:
            self._raise_changed(None, next(shapes, None))
        return torch.cat(found), totals

    def _to_dense(self) -> Tensor:
        dense = torch.zeros(*self.shape, dtype=self.dtype, device=self.device)
        # One column of every block at a time: blocks of different batches don't overlap.
        sizes = self.in_space.sizes
        most = max(sizes)
        eyes = [torch.eye(size, most, dtype=self.dtype, device=self.device) for size in sizes]
        start = 0
        for size, columns in zip(sizes, self._matmat(torch.cat(eyes)).split(sizes), strict=True):
            dense[start : start + size, start : start + size] = columns[:, :size]
            start += size
        return dense

    def _loop(self, what: str, visit: Callable[[Tensor, Totals], object]) -> Totals:
        """`visit(z, part)` for every batch: the activation, and totals whose loss is a function of it."""
        risk, totals = self.risk, Totals()
        frozen = {key: p.detach() for key, p in risk.params.items()}

        def loop(model: nn.Module) -> None:
            for batch in risk.batches(f"{type(self).__name__}, {what}"):
                with torch.compiler.set_stance("force_eager"), self._leaf() as caught:
                    f, y, class_axis = risk.run(batch, model)
                if len(caught) != 1:
                    name, side, _ = self._activation
                    raise ValueError(
                        f'Module "{name}" was called {len(caught)} times in one forward pass; the Hessian with '
                        f"respect to its {side} needs exactly one call. Choose another module."
                    )
                part = risk.terms(f, y, batch, class_axis).totals
                visit(caught[0], part)
                totals.add(part.detached())

        with torch.inference_mode(False), torch.enable_grad(), plain_attention():
            risk.at(frozen, loop)
        return totals

    @contextmanager
    def _leaf(self) -> Iterator[list[Tensor]]:
        """While active, the model goes on with a leaf in place of the activation."""
        name, side, index = self._activation
        module, caught = self.risk.model.get_submodule(name), []

        def replaced(values: Any) -> Any:
            several = isinstance(values, (tuple, list))
            items = list(values) if several else [values]
            if not -len(items) <= index < len(items):
                raise ValueError(
                    f'The {side} of module "{name}" has {len(items)} '
                    f"{'entry' if len(items) == 1 else 'entries'}; there is no entry {index}."
                )
            t = items[index]
            if not isinstance(t, Tensor) or not t.is_floating_point():
                what = str(t.dtype) if isinstance(t, Tensor) else type(t).__name__
                raise ValueError(
                    f'Entry {index} of the {side} of module "{name}" is {what}; only a tensor of floating-point '
                    "numbers has a Hessian."
                )
            z = t.detach().clone().requires_grad_()
            caught.append(z)
            items[index] = z.clone()  # a leaf must not be written to, and what comes next may be in-place
            if not several:
                return items[0]
            return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)

        if side == "input":
            handle = module.register_forward_pre_hook(lambda module, args: replaced(args))
        else:
            handle = module.register_forward_hook(lambda module, args, out: replaced(out))
        try:
            yield caught
        finally:
            handle.remove()

    # ---------------------------------------------------------------------------------------------------------- checks
    def _check_deterministic(self) -> None:
        generator = torch.Generator().manual_seed(0)
        with preserve_state(self.risk.model, self.risk.data):
            v = torch.randn(self.in_space.dim, 1, generator=generator, dtype=self.dtype).to(self.device)
            one, two = self._product(v), self._product(v)
        tolerance = 1e-8 if self.dtype == torch.float64 else 1e-3
        if not bool((one - two).norm() <= tolerance * one.norm() + 1e-30):
            raise RuntimeError(
                f"Two products of {type(self).__name__} with the same vector differ. The data must come in the same "
                "order each time (shuffle=False) and the model must be deterministic (model.eval()). "
                "check_deterministic=False turns this check off."
            )

    def _raise_changed(self, came: torch.Size | None, expected: torch.Size | None) -> None:
        raise ValueError(
            f"The activation had shape {None if expected is None else list(expected)} in the first pass over the data "
            f"and {None if came is None else list(came)} in this one. Each pass must give the same batches in the same "
            "order (shuffle=False)."
        )


def _second(z: Tensor, loss: Tensor, rows: Tensor) -> Tensor:  # [K, numbers of z] -> the same
    """Hessian of `loss` with respect to `z` times several vectors."""
    if not loss.requires_grad:
        return torch.zeros_like(rows)
    with naming_operations():
        (gradient,) = torch.autograd.grad(loss, z, create_graph=True)
        if not gradient.requires_grad:
            return torch.zeros_like(rows)
        (found,) = pull([gradient], [z], [rows.reshape(-1, *z.shape).to(z.dtype)])
    return torch.zeros_like(rows) if found is None else found.reshape(rows.shape)


def _checked(model: nn.Module, activation: tuple[str, str, int]) -> tuple[str, str, int]:
    """The three parts of `activation`, if there is such a module."""
    if not isinstance(activation, (tuple, list)) or len(activation) != 3:
        raise ValueError(
            f'activation={activation!r} must be (module name, "input" or "output", position), as ("1", "output", 0).'
        )
    name, side, index = activation
    names = [name for name, _ in model.named_modules()]
    if name not in names:
        raise ValueError(f'No module is named "{name}"; the model has {names}.')
    if side not in ("input", "output"):
        raise ValueError(f'activation={activation!r}: the second part must be "input" or "output", got {side!r}.')
    if isinstance(index, bool) or not isinstance(index, int):
        raise ValueError(f"activation={activation!r}: the third part must be a position, an int; got {index!r}.")
    return name, side, index
