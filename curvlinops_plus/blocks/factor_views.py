"""Kronecker factors by layer, under the names that they have in curvlinops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from curvlinops_plus.blocks.ekfac import EKFAC
from curvlinops_plus.blocks.kfac import KFAC, MAX_BYTES, factor_forms
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.linalg import (
    Dense,
    Diagonal,
    Eigendecomposed,
    Kronecker,
    LinearOperator,
    Space,
)
from curvlinops_plus.risk import Layer

COVARIANCES = ("input_covariances", "gradient_covariances")
EIGENVECTORS = ("input_covariances_eigenvectors", "gradient_covariances_eigenvectors")
VALUES = "corrected_eigenvalues"


def factor_names(entry: LayerPlan) -> tuple[str, ...]:
    """Names of the factors that the blocks of a layer are made of; none unless it is approximated by KFAC or EKFAC."""
    kind, layer = entry.approximation.kind, entry.layer
    if issubclass(kind, EKFAC):  # the eigenvectors of a diagonal factor are the identity's
        forms = factor_forms(layer, entry.approximation.options.get("max_bytes", MAX_BYTES))
        without = {side for side in "AG" if side not in forms or forms[side].diagonal}
        return (*(name for side, name in zip("AG", EIGENVECTORS) if side not in without), VALUES)
    return COVARIANCES[layer.weight is None :] if issubclass(kind, KFAC) else ()


def read_factor(layer: Layer, name: str, blocks: Mapping[str, LinearOperator], space: Space) -> Any:
    """One factor of a layer, the tensor that its blocks multiply with.

    Corrected eigenvalues are [o, i] if weight and bias have a joint block, else {position of the parameter: tensor}.

    Raises:
        KeyError: If the blocks have no such factor, or another process keeps them.
    """
    if name == VALUES:
        values: dict[int, Any] = {}
        for group in layer.groups:
            *rows, columns = group.layout.matrix_shape
            shape = (*rows, columns) if layer.weight in group.keys else rows
            block: Any = blocks[group.name]
            values[space.names.index(group.keys[0])] = block.values.view(*shape)
        joint = len(layer.groups) == 1 and len(layer.params) > 1
        return next(iter(values.values())) if joint else values
    side = "A" if name.startswith("input") else "G"
    for group in sorted(layer.groups, key=lambda group: layer.weight not in group.keys):
        block = blocks[group.name]
        operator = block.basis if isinstance(block, Eigendecomposed) else block
        if isinstance(operator, Kronecker):
            return _tensor(getattr(operator, side))
        if side == "G" and isinstance(operator, (Dense, Diagonal)):
            return _tensor(operator)
    raise KeyError(layer.name)


def _tensor(factor: Any) -> Tensor:
    """What a factor is made of."""
    return factor.vector if isinstance(factor, Diagonal) else factor.matrix
