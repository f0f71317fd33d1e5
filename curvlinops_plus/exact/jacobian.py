"""The Jacobian of a model's outputs with respect to the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.exact.data_rows import DataRows, RowBlock
from curvlinops_plus.exact.linearize import Outputs
from curvlinops_plus.linalg import Space
from curvlinops_plus.linalg.implicit import linear_in
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.risk import takes_risk


class Jacobian(DataRows):
    """The Jacobian of the model's output with respect to the parameters: all outputs of all data, `[N·C, P]`.

    The result is one tensor `[N, *output]`: the outputs of all batches stacked along their first axis, in the order of
    the data, which must be the same in every pass. For a risk with several losses it is one such tensor for each output
    that they read, under the key of the loss. Nothing is scaled, and losses and targets are not used.
    `.T` is the transposed Jacobian.

    Args:
        risk: Model, data and parameters; `output=` there picks the tensor out of what the model returns. Its `num_data`
            is the number of examples. Default: they are counted once.
        check_deterministic: True compares two products first. None: two evaluations of a few examples have to agree,
            once per risk. False: not even these.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.

    Raises:
        ValueError: If the data are an iterator, or outputs of different batches can't be stacked.
        RuntimeError: If two products differ, as with a loader that shuffles.
        UnsupportedError: If the model uses an operation with neither forward mode nor a second derivative.

    Cost: `J @ v` is one forward pass that carries tangents, without a graph (two backward passes for models that have
    no forward mode); the transposed product is one forward and one backward pass. `to_dense()` takes as many backward
    passes as a batch has outputs, or tangents of all parameters if these are fewer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk
        >>> data = [(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1)), (torch.ones(1, 2), torch.zeros(1, 1))]
        >>> J = Jacobian(EmpiricalRisk(nn.Linear(2, 1), nn.MSELoss(), data))
        >>> J.to_dense(), J.out_shapes
        (tensor([[3., 4., 1.],
            [1., 1., 1.]]), (torch.Size([2, 1]),))
        >>> J.T @ [torch.tensor([[1.0], [-1.0]])]
        [tensor([[2., 3.]]), tensor([0.])]
    """

    @takes_risk
    def __init__(
        self, risk: EmpiricalRisk, *, check_deterministic: bool | None = None, chunk_size: int | None = None
    ) -> None:
        self.in_space = risk.space
        super().__init__(risk, partial(_run_outputs, risk), 0, check_deterministic, chunk_size)

    @property
    def out_space(self) -> Space:  # type: ignore[override]
        return self._row_space

    def _row_block(self, F: Outputs, extra: Any, draws: Draws, totals: Totals, weights: LossWeights) -> RowBlock:
        return _Identity([f.shape for f in F])

    def _count_rows(self) -> dict[str, tuple[int, ...]]:
        """A forward pass for one batch, and for all if rows are positions, whose number may differ between batches."""
        risk = self.risk
        shapes: list[torch.Size] = []
        counts: list[int] = []
        positions = False  # [N·R, C], and R may differ from batch to batch
        for batch in self._batches(", sizes"):
            N = batch.num_examples
            own = [f.shape for f in self._linear.outputs(batch)[0]] if not shapes or positions else None
            if not shapes and own is not None:
                shapes, counts = own, [0] * len(own)
                positions = any(shape[0] != N for shape in own)
                if risk.options.num_data is not None:
                    counts = [risk.options.num_data * shape[0] // N for shape in own]
                    break
            counts = [count + (N if own is None else own[k][0]) for k, count in enumerate(counts)]
        keys = ["0" if key is None else str(key) for key in risk.losses.keys]
        return {key: (count, *shape[1:]) for key, count, shape in zip(keys, counts, shapes, strict=True)}

    def _matmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._rows_product, self._transpose_product)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return linear_in(X, self._transpose_product, self._rows_product)

    def _to_dense(self) -> Tensor:
        return self._rows_dense()


def _run_outputs(risk: EmpiricalRisk, model: nn.Module, batch: Batch) -> tuple[Sequence[Tensor], None]:
    """Run the model: the outputs that the losses read."""
    return risk.run(batch, model)[0], None


class _Identity:
    """Rows that are the outputs themselves."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self.shapes = shapes

    def product(self, U: Sequence[Tensor]) -> Sequence[Tensor]:
        return U

    def transpose_product(self, V: Sequence[Tensor]) -> Sequence[Tensor]:
        return V
