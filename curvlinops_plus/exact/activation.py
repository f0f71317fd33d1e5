"""The Hessian of the loss with respect to the input or output of a module inside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.base import RiskOperator, require_own_data
from curvlinops_plus.exact.ggn import ValueHessian
from curvlinops_plus.exact.passes import Outputs, Passes, differentiable
from curvlinops_plus.linalg import Space, Structure
from curvlinops_plus.linalg.numerics import whole
from curvlinops_plus.risk import EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.loss_passes import LossWeights
from curvlinops_plus.risk.preserve import own_calls, untraced
from curvlinops_plus.risk.risk import takes_risk


class ActivationHessian(RiskOperator):
    """The Hessian of the loss with respect to an activation: the input or output of a module inside
    the model.

    The activation of one batch is one tensor `[N, *features]`, and the Hessian is `[numbers,
    numbers]`. Several batches are several tensors, in the order of the data; batches don't
    interact, so the Hessian is block-diagonal over them, and the loss is that of the whole data
    set: with `reduction="mean"`, one over what PyTorch divides by for all data.

    Args:
        risk: Model, loss (any one, also without a likelihood), data and parameters.
        activation: Which one: name of the module as in `model.named_modules()`, "input" or
            "output", and the position among several inputs or outputs (0 where there is one). Other
            modules may read the tensor, too; an "input" is what this module alone reads.
        check_deterministic: True compares two products first. None: two evaluations of a few
            examples have to agree, once per risk. False: not even these.

    Raises:
        ValueError: If there is no such module, or it is not called exactly once per forward pass;
            or if the data are an iterator.
        IndexError: If there is no such tensor.
        RuntimeError: If it is not made of floating-point numbers, or two products differ.
        UnsupportedError: If the model uses an operation that PyTorch can't differentiate twice.

    Cost: one forward and one backward pass per product, and one more backward pass for each column;
    only what comes after the activation is differentiated.

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
        self,
        risk: EmpiricalRisk,
        activation: tuple[str, str, int],
        *,
        check_deterministic: bool | None = None,
    ) -> None:
        name, side, index = (
            activation
            if isinstance(activation, (tuple, list)) and len(activation) == 3
            else [None] * 3
        )
        names = [name for name, _ in risk.model.named_modules()]
        if name not in names or side not in ("input", "output") or whole(index) is None:
            raise ValueError(
                f'activation={activation!r} must be (module name, "input" or "output", position), as ("1", "output", '
                f"0), with one of the modules {names}."
            )
        self._activation = activation
        super().__init__(risk, Passes(risk, self._read, twice=True), check_deterministic)
        require_own_data(risk, type(self).__name__)
        if check_deterministic:
            self._check_products(self._sweep, self.in_space.dim)

    @cached_property
    @untraced
    def in_space(self) -> Space:  # type: ignore[override]
        shapes = []
        with differentiable(self.risk):
            for batch in self._batches(", sizes"):
                with self._passes.run(batch) as (_, (z, _), _, _):
                    shapes.append(z.shape)
        return Space.from_shapes(shapes)

    def _read(self, model: nn.Module, batch: Batch) -> tuple[Outputs, tuple[Tensor, Totals]]:
        """The activation of a batch, and totals whose losses are a function of it; nothing else is
        differentiated.
        """
        with self._leaf() as caught:
            read = self.risk.run(batch, model)
        if len(caught) != 1:
            name, side, _ = self._activation
            raise ValueError(
                f'Module "{name}" was called {len(caught)} times in one forward pass; the Hessian with '
                f"respect to its {side} needs exactly one call. Choose another module."
            )
        return caught, (caught[0], self.risk.losses.terms(read, batch).totals)

    def _sweep(self, X: Tensor, weights: LossWeights) -> tuple[Tensor, Totals]:
        totals, found, shapes = Totals(), [], [*self.in_space.shapes.values()]
        for batch in self._batches():
            with self._passes.run(batch) as (_, (z, batch_totals), _, _):
                if [z.shape] != shapes[len(found) : len(found) + 1]:
                    break
                rows = X.split(self.in_space.sizes)[len(found)].T.to(z.dtype)
                H = ValueHessian(weights.objective(batch_totals), z)
                columns = [H.outer_product(row.reshape(1, *z.shape)).flatten(1) for row in rows]
                found.append(torch.cat(columns).T.to(X.dtype))
                totals.add(batch_totals)
        else:
            if len(found) == len(shapes):
                return torch.cat(found), totals
        raise ValueError(
            f"There is no batch {len(found)} with an activation of the shape that it had in the "
            "first pass. Each pass must give the same batches in the same order (shuffle=False)."
        )

    @contextmanager
    def _leaf(self) -> Iterator[list[Tensor]]:
        """Context in which the model continues with a leaf of the graph in place of the
        activation.
        """
        name, side, index = self._activation
        module, caught = self.risk.model.get_submodule(name), []

        def replaced(values: Any) -> Any:
            several = isinstance(values, (tuple, list))
            items = list(values) if several else [values]
            caught.append(items[index].detach().clone().requires_grad_())
            items[index] = caught[
                -1
            ].clone()  # a leaf must not be written to, and what comes next may be in-place
            if not several:
                return items[0]
            return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)

        if side == "input":
            handle = module.register_forward_pre_hook(
                own_calls(lambda module, args: replaced(args))
            )
        else:
            handle = module.register_forward_hook(
                own_calls(lambda module, args, out: replaced(out))
            )
        try:
            yield caught
        finally:
            handle.remove()
