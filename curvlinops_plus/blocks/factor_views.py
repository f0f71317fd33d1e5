"""Live views of Kronecker factors: layer name to the very tensors that an operator multiplies with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from curvlinops_plus.blocks.kfac import EKFAC, KFAC, ekfac_blocks, kfac_blocks
from curvlinops_plus.linalg import BlockDiagonal, Dense, Diagonal, Eigendecomposed, Kronecker
from curvlinops_plus.risk import Group, Layer

if TYPE_CHECKING:
    from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator

__all__ = ["Factors", "views"]


def views(owner: BlockwiseLinearOperator) -> dict[str, Factors]:
    """Every kind of factor, under the name that it has in a state dict."""
    return {
        "input_covariances": Factors(owner, "A", KFAC),
        "gradient_covariances": Factors(owner, "G", KFAC),
        "input_covariances_eigenvectors": Factors(owner, "A", EKFAC),
        "gradient_covariances_eigenvectors": Factors(owner, "G", EKFAC),
        "corrected_eigenvalues": Factors(owner, "values", EKFAC),
    }


class Factors(MutableMapping[str, Any]):
    """Live view of one kind of factor: layer name to tensor.

    The tensors are those that the operator multiplies with: changing one in place, or setting an item, changes the
        operator.

    Args:
        owner: The operator.
        part: "A", "G" or "values".
        kind: KFAC for covariances, EKFAC for eigenvectors.
    """

    def __init__(self, owner: BlockwiseLinearOperator, part: str, kind: type[KFAC]) -> None:
        self.owner, self.part, self.kind = owner, part, kind

    def _entries(self) -> dict[str, Layer]:
        exact = {
            entry.layer.name: entry.layer
            for entry in self.owner.plan
            if issubclass(entry.approximation.kind, self.kind)
            and issubclass(entry.approximation.kind, EKFAC) == (self.kind is EKFAC)
        }
        if self.part == "A":  # the eigenvectors of a diagonal factor are the identity's
            known = {name: layer for name, layer in exact.items() if layer.weight is not None}
            return {name: layer for name, layer in known.items() if not (layer.sparse and self.kind is EKFAC)}
        return exact

    def __getitem__(self, name: str) -> Any:
        layer = self._entries()[name]
        blocks = self.owner.operator.blocks
        if self.part == "values":
            shaped = {g: blocks[g.name].values.view(*_value_shape(layer, g)) for g in layer.groups}  # type: ignore[attr-defined]
            if len(layer.groups) == 1 and not self.owner.separate_weight_and_bias and len(layer.params) > 1:
                return next(iter(shaped.values()))
            order = {key: position for position, key in enumerate(self.owner.risk.params)}
            return {order[group.keys[0]]: value for group, value in shaped.items()}
        for group in layer.groups:
            block: Any = blocks[group.name]
            operator = block.basis if isinstance(block, Eigendecomposed) else block
            if isinstance(operator, Kronecker):
                factor = getattr(operator, self.part)
                return factor.vector if isinstance(factor, Diagonal) else factor.matrix
            if self.part == "G" and isinstance(operator, Dense):
                return operator.matrix
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        layer = self._entries()[name]
        current: dict[str, Any] = {}
        for view, factors in views(self.owner).items():
            same = (factors.part, factors.kind) == (self.part, self.kind)
            current[view] = value if same else factors.get(name)
        if self.kind is EKFAC:
            values, order = current["corrected_eigenvalues"], list(self.owner.risk.params)
            parts = {
                g.name: values[order.index(g.keys[0])] if isinstance(values, Mapping) else values for g in layer.groups
            }
            QG, QA = current["gradient_covariances_eigenvectors"], current["input_covariances_eigenvectors"]
            blocks = ekfac_blocks(layer, QG, QA, parts)
        else:
            blocks = kfac_blocks(layer, current["input_covariances"], current["gradient_covariances"])
        operator = self.owner.operator
        self.owner._operator = BlockDiagonal({**operator.blocks, **blocks}, operator.layouts, self.owner.risk.space)

    def __delitem__(self, name: str) -> None:
        raise TypeError("Factors of an operator can be replaced, not removed.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __repr__(self) -> str:
        return repr(dict(self))


def _value_shape(layer: Layer, group: Group) -> tuple[int, ...]:
    *rows, columns = group.layout.matrix_shape
    return (*rows, columns) if layer.weight in group.keys else tuple(rows)
