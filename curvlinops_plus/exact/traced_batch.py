"""One batch inside of a compiled function: what the model returns as a function of its parameters,
and derivatives of that by `torch.func`.

The lines that run the model and read the losses are those of eager products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops_plus.exact.differentiable import DerivativeFixes
from curvlinops_plus.risk import Draws, EmpiricalRisk
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.loss_passes import LossWeights

if TYPE_CHECKING:
    from curvlinops_plus.exact.passes import Passes

Tensors = tuple[Tensor, ...]
# Their types do not follow their options.
pullback: Any = torch.func.vjp
pushforward: Any = torch.func.jvp
vectorized: Any = torch.func.vmap


class Names:
    """Under which names a model holds the parameters of a risk, and its buffers: one may have
    several.

    Attributes:
        model: The model, without what distributes it.
        parameters: The names of each parameter, in the order of the risk.
        buffers: The names of each buffer.
    """

    def __init__(self, risk: EmpiricalRisk) -> None:
        self.model = risk.model
        if isinstance(self.model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            self.model = self.model.module
        self.model = getattr(self.model, "_orig_mod", self.model)  # of a compiled one
        held = _names_by_id(self.model.named_parameters(remove_duplicate=False))
        self.parameters = [held[id(p)] for p in risk.own_params.values()]
        self.buffers = [*_names_by_id(self.model.named_buffers(remove_duplicate=False)).values()]

    def buffer_copies(self) -> list[Tensor]:
        """Copies of the buffers, in their order here."""
        return [self.model.get_buffer(names[0]).clone() for names in self.buffers]


def _names_by_id(named: Any) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, t in named:
        names.setdefault(id(t), []).append(name)
    return names


class Trace:
    """A batch inside of a compiled function.

    Args:
        passes: They have the risk, and how the model is run.
        names: Of its parameters and buffers.
        parameters: Their values.
        buffers: Likewise; the model may write to them.
        batch: The batch.

    Attributes:
        extra: What came beside the outputs when these were computed last.
    """

    extra: Any = None

    def __init__(
        self,
        passes: Passes,
        names: Names,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        batch: Batch,
    ) -> None:
        self.passes = passes
        self.names = names
        self.parameters = tuple(parameters)
        self.buffers = buffers
        self.batch = batch

    def outputs(self, *parameters: Tensor) -> Tensors:
        """The outputs that are differentiated."""
        tensors = _under_names(
            [*self.names.buffers, *self.names.parameters], [*self.buffers, *parameters]
        )

        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self.names.model, tensors, args, kwargs, tie_weights=False)

        with DerivativeFixes():
            F, self.extra = self.passes.read(call, self.batch)  # type: ignore[arg-type]
        return tuple(F)

    def gradient(self, weights: LossWeights) -> Callable[..., Tensors]:
        """The gradient of all losses, each times its relative weight, as a function of the
        parameters.
        """

        def objective(*parameters: Tensor) -> Tensor:
            self.outputs(*parameters)
            return weights.objective(self.extra)

        return torch.func.grad(objective, tuple(range(len(self.parameters))))

    def linearized(
        self, rows: Tensor
    ) -> tuple[Tensors, list[Tensor], Callable[[Tensors], Tensors]]:
        """Outputs `F`, products `J v` [K, *output] of vectors [K, n], and the function `u ↦ Jᵀ u`.

        All by one forward pass.
        """
        V = self.split(rows)
        if self.passes.twice:
            F, pull = pullback(self.outputs, *self.parameters)
            # Not at zero, where functions that take the logarithm of a gradient are singular.
            push = pullback(pull, tuple([torch.full_like(f, 2.0**-4) for f in F]))[1]
            return F, each(lambda *v: push(v)[0], V), pull

        def tangents(*parameters: Tensor) -> tuple[Tensors, Any]:
            if len(rows) == 1:
                F, Jv = pushforward(self.outputs, parameters, tuple([v[0] for v in V]))
                return F, tuple([t[None] for t in Jv])
            return vectorized(
                lambda *v: pushforward(self.outputs, parameters, v), out_dims=(None, 0)
            )(*V)

        F, pull, JV = pullback(tangents, *self.parameters, has_aux=True)
        return F, [*JV], pull

    def split(self, rows: Tensor) -> list[Tensor]:  # [K, n] -> [K, *shape] for each parameter
        """The parts of several vectors, in the parameters' own dtypes."""
        parts = zip(rows.split(self.passes.sizes, 1), self.parameters, strict=True)
        return [part.reshape(len(rows), *p.shape).to(p.dtype) for part, p in parts]


def _under_names(names: Sequence[Sequence[str]], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: t for several, t in zip(names, tensors, strict=True) for name in several}


def each(function: Callable[..., Tensors], columns: Sequence[Tensor]) -> list[Tensor]:
    """A function of tensors, for each of K: [K, *shape] of each -> [K, *shape] of each."""
    if len(columns[0]) == 1:
        return [t[None] for t in function(*[t[0] for t in columns])]
    return [*vectorized(function)(*columns)]


def rows_joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Tensors [K, *shape] side by side: [K, n]."""
    return torch.cat([t.flatten(1).to(dtype) for t in tensors], 1)


# ----------------------------------------------------------------------------------- random numbers
#: Of numbers that were asked for: which of several losses did, and their shape.
Asked = list[tuple[int, tuple[int, ...]]]


class NotedDraws(Draws):
    """Random numbers, of which it is noted how many are asked for.

    Args:
        draws: The numbers.
        asked: Where that is noted.
        loss: Which of several losses asks.
    """

    def __init__(self, draws: Draws, asked: Asked, loss: int = 0) -> None:
        vars(self).update(vars(draws))
        self.asked = asked
        self.loss = loss

    def of_loss(self, index: int) -> Draws:
        return NotedDraws(super().of_loss(index), self.asked, index) if index else self

    def uniform(self, *shape: int) -> Tensor:
        self.asked.append((self.loss, shape))
        return super().uniform(*shape)


class GivenDraws(Draws):
    """Random numbers that were drawn before.

    Args:
        numbers: For each loss, in the order in which they are asked for.
        loss: Which of several losses asks.
    """

    def __init__(self, numbers: Mapping[int, Sequence[Tensor]], loss: int = 0) -> None:
        self._numbers = numbers
        self._loss = loss
        self._next = 0

    def of_loss(self, index: int) -> Draws:
        return GivenDraws(self._numbers, index)

    def uniform(self, *shape: int) -> Tensor:
        self._next += 1
        return self._numbers[self._loss][self._next - 1].clone()
