"""The Hessian of the loss with respect to the input or output of a module inside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.base import RiskOperator, require_own_data
from curvlinops_plus.exact.loss_terms import hessian_product
from curvlinops_plus.exact.passes import Passes, differentiable
from curvlinops_plus.linalg import Space, Structure
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.preserve import own_calls, untraced
from curvlinops_plus.risk.risk import takes_risk


class ActivationHessian(RiskOperator):
    """The Hessian of the loss with respect to an activation: the input or output of a module inside the model.

    The activation of one batch is one tensor `[N, *features]`, and the Hessian is `[numbers, numbers]`. Several batches
    are several tensors, in the order of the data; batches don't interact, so the Hessian is block-diagonal over them,
    and the loss is that of the whole data set: with `reduction="mean"`, one over what PyTorch divides by for all data.

    Args:
        risk: Model, loss (any one, also without a likelihood), data and parameters.
        activation: Which one: name of the module as in `model.named_modules()`, "input" or "output", and the position
            among several inputs or outputs (0 where there is one). Other modules may read the tensor, too; an "input"
            is what this module alone reads.
        check_deterministic: True compares two products first. None: two evaluations of a few examples have to agree,
            once per risk. False: not even these.

    Raises:
        ValueError: If there is no such module or tensor, it is not called exactly once per forward pass, or the tensor
            is not made of floating-point numbers; or if the data are an iterator.
        RuntimeError: If two products differ.
        UnsupportedError: If the model uses an operation that PyTorch can't differentiate twice, or the module is inside
            of activation checkpointing.

    Cost: one forward and one backward pass per product, and one more backward pass for each column; only what comes
    after the activation is differentiated.

    Example:
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
        >>> data = [(torch.rand(10, 4), torch.rand(10, 2))]
        >>> risk = EmpiricalRisk(model, nn.MSELoss(reduction="sum"), data)
        >>> H = ActivationHessian(risk, ("1", "output", 0))
        >>> H.shape, H.in_shapes
        ((30, 30), (torch.Size([10, 3]),))
        >>> block, W = H.to_dense()[:3, :3], model[2].weight.detach()  # of the first example
        >>> torch.allclose(block, 2 * W.T @ W)
        True
    """

    structure = Structure.SYMMETRIC

    @takes_risk
    def __init__(
        self, risk: EmpiricalRisk, activation: tuple[str, str, int], *, check_deterministic: bool | None = None
    ) -> None:
        super().__init__(risk, check_deterministic)
        self._activation = _checked(risk.model, activation)
        self._passes = Passes(risk, _read)
        require_own_data(risk, type(self).__name__)
        _ = risk.losses.reduction  # refuse now, not at first use
        if check_deterministic:
            self._check_products(self._sweep, self.in_space.dim)

    @cached_property
    @untraced
    def in_space(self) -> Space:  # type: ignore[override]
        shapes: list[torch.Size] = []
        with differentiable(self.risk):
            self._loop("sizes", lambda z, *_: shapes.append(z.shape))
        return Space.from_shapes(shapes)

    @property
    def out_space(self) -> Space:  # type: ignore[override]
        return self.in_space

    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        n, shapes = self.in_space.dim, iter(self.in_space.shapes.values())
        X = X.clone() if X.is_inference() else X
        found: list[Tensor] = []
        start = 0

        def block(z: Tensor, batch_totals: Totals) -> None:
            nonlocal start
            expected = next(shapes, None)
            if z.shape != expected:
                self._raise_changed(z.shape, expected)
            rows = X[start : start + z.numel()].T.to(z.dtype)
            start += z.numel()
            product = hessian_product(weights.objective(batch_totals), z)
            columns = [product(row.reshape(1, *z.shape)).flatten(1) for row in rows]
            found.append(torch.cat(columns).T.to(X.dtype))

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
        """`visit(z, batch_totals)` for every batch: the activation, and totals whose loss is a function of it."""
        risk, totals = self.risk, Totals()
        frozen = [p.detach() for p in risk.params.values()]

        def of_batch(model: nn.Module, batch: Batch) -> None:
            with self._leaf() as caught:
                read = risk.run(batch, model)
            if len(caught) != 1:
                name, side, _ = self._activation
                raise ValueError(
                    f'Module "{name}" was called {len(caught)} times in one forward pass; the Hessian with '
                    f"respect to its {side} needs exactly one call. Choose another module."
                )
            batch_totals = risk.losses.terms(read, batch).totals
            visit(caught[0], batch_totals)
            totals.add(batch_totals)

        try:
            for batch in self._batches(f", {what}"):
                self._passes.at(batch, frozen, partial(of_batch, batch=batch))
        except CheckpointError as error:
            raise UnsupportedError(
                f'Module "{self._activation[0]}" is inside of activation checkpointing, which runs it again in the '
                "backward pass and finds another tensor in place of the activation. Call it without checkpointing, or "
                "choose a module outside."
            ) from error
        return totals

    @contextmanager
    def _leaf(self) -> Iterator[list[Tensor]]:
        """Context in which the model continues with a leaf of the graph in place of the activation."""
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
            handle = module.register_forward_pre_hook(own_calls(lambda module, args: replaced(args)))
        else:
            handle = module.register_forward_hook(own_calls(lambda module, args, out: replaced(out)))
        try:
            yield caught
        finally:
            handle.remove()

    def _raise_changed(self, came: torch.Size | None, expected: torch.Size | None) -> None:
        raise ValueError(
            f"The activation had shape {None if expected is None else list(expected)} in the first pass over the data "
            f"and {None if came is None else list(came)} in this one. Each pass must give the same batches in the same "
            "order (shuffle=False)."
        )


def _read(model: nn.Module, batch: Batch) -> tuple[tuple[()], None]:
    return (), None  # nothing is differentiated in the parameters


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
