"""The Hessian of the loss with respect to the input or output of a module inside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.contexts import Endings
from curvlinops_plus.exact.base import RiskOperator, require_own_data
from curvlinops_plus.exact.differentiable import differentiable
from curvlinops_plus.exact.ggn import ValueHessian
from curvlinops_plus.exact.passes import Outputs, Passes
from curvlinops_plus.exact.reading import Reading
from curvlinops_plus.linalg import Space, Structure
from curvlinops_plus.options import whole
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals
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
    _sizes = "in_space"

    @takes_risk
    def __init__(
        self,
        risk: EmpiricalRisk,
        activation: tuple[str, str, int],
        *,
        check_deterministic: bool | None = None,
    ) -> None:
        names = [name for name, _ in risk.model.named_modules()]
        name = side = index = None
        if isinstance(activation, (tuple, list)) and len(activation) == 3:
            name, side, index = activation
        if name not in names or side not in ("input", "output") or whole(index) is None:
            raise ValueError(
                f'activation={activation!r} must be (module name, "input" or "output", position), '
                f'as ("1", "output", 0), with one of the modules {names}.'
            )
        self._activation = activation
        super().__init__(risk, Passes(risk, self._read, twice=True), check_deterministic)
        require_own_data(risk, type(self).__name__)
        if check_deterministic:
            self._compare_products(self._products, self.in_space.dim)

    @cached_property
    @untraced
    def in_space(self) -> Space:  # type: ignore[override]
        reading = Reading(LossWeights(self.risk, plain=True), Draws(0))
        shapes = []
        with differentiable(self.risk):
            for batch in self._batches(reading, ", sizes"):
                with self._passes.run(batch) as run:
                    shapes.append(run.outputs[0].shape)
        return Space.from_shapes(shapes)

    def _read(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Totals]:
        """The activation of a batch, and totals whose losses are a function of it; nothing else is
        differentiated.
        """
        with self._leaf() as leaves:
            output = self.risk.run(batch, model)
        if len(leaves) != 1:
            name, side, _ = self._activation
            raise ValueError(
                f'Module "{name}" was called {len(leaves)} times in one forward pass; the Hessian '
                f"with respect to its {side} needs exactly one call. Choose another module."
            )
        return leaves, self.risk.losses.terms(output, batch).totals

    def _products(self, X: Tensor, reading: Reading) -> Tensor:
        shapes = [*self.in_space.shapes.values()]
        rows = [part.T for part in X.split(self.in_space.sizes)]
        products = []
        for batch in self._batches(reading):
            with self._passes.run(batch) as run:
                z = run.outputs[0]
                number = len(products)
                if [z.shape] != shapes[number : number + 1]:
                    raise self._other_batches(number)
                H = ValueHessian(reading.weights.objective(run.extra), z)
                columns = [
                    H.outer_product(row.reshape(1, *z.shape)).flatten(1)
                    for row in rows[number].to(z.dtype)
                ]
                products.append(torch.cat(columns).T.to(X.dtype))
                reading.totals.add(run.extra)
        if len(products) != len(shapes):
            raise self._other_batches(len(products))
        return torch.cat(products)

    def _other_batches(self, number: int) -> ValueError:
        return ValueError(
            f"There is no batch {number} with an activation of the shape that it had in the "
            "first pass. Each pass must give the same batches in the same order (shuffle=False)."
        )

    @contextmanager
    def _leaf(self) -> Iterator[list[Tensor]]:
        """Context in which the model continues with a leaf of the graph in place of the
        activation.
        """
        name, side, index = self._activation
        module = self.risk.model.get_submodule(name)
        leaves: list[Tensor] = []

        def replaced(values: Any) -> Any:
            items = list(values) if isinstance(values, (tuple, list)) else [values]
            leaf = items[index].detach().clone().requires_grad_()
            leaves.append(leaf)
            # A leaf must not be written to, and what comes next may be in-place.
            items[index] = leaf.clone()
            if not isinstance(values, (tuple, list)):
                return items[0]
            return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)

        with Endings() as endings:
            if side == "input":
                hook = own_calls(lambda module, args: replaced(args))
                endings.callback(module.register_forward_pre_hook(hook).remove)
            else:
                hook = own_calls(lambda module, args, out: replaced(out))
                endings.callback(module.register_forward_hook(hook).remove)
            yield leaves
