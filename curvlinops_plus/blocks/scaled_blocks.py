"""Blocks times a number: the operator that is made of them, and its inverses."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.factor_damping import heuristic_factor_damping, pair_damping
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.linalg import BlockDiagonal, Deferred, LinearOperator, Space, Structure
from curvlinops_plus.linalg.damping import BlockDampings, HeuristicDamping, Scalar, resolve

if TYPE_CHECKING:
    from typing_extensions import Self


class ScaledBlocks(Deferred):
    """A number times a positive semi-definite block-diagonal matrix, which may be computed at first use.

    Multiples share the blocks. Subclasses write `_at_first_use`, and set `plan`.
    """

    #: The layers of the blocks: a separate bias block is damped like the gradient factor of its weight.
    plan: list[LayerPlan]

    def __init__(self, space: Space, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(space, dtype, device, Structure.PSD)
        #: The operator is `scale` times the blocks.
        self.scale: float | Tensor = 1.0
        self._unscaled: BlockDiagonal | None = None
        self._operator: BlockDiagonal | None = None

    @abstractmethod
    def _at_first_use(self) -> None:
        """Compute the blocks, and hand them to `_set_operator`."""

    def _set_operator(self, unscaled: BlockDiagonal | None) -> None:
        self._unscaled = self._operator = unscaled
        if unscaled is not None and (isinstance(self.scale, Tensor) or self.scale != 1):
            self._operator = unscaled._scale(self.scale)

    def replace_blocks(self, blocks: Mapping[str, LinearOperator]) -> None:
        """Replace some of the blocks (of the unscaled operator), by their names."""
        self._set_operator(BlockDiagonal({**self.unscaled.blocks, **blocks}, self.unscaled.layouts, self.in_space))

    @property
    def operator(self) -> BlockDiagonal:
        """The blocks as a plain operator that knows nothing of networks."""
        if self._operator is None:
            self._at_first_use()
        assert self._operator is not None
        return self._operator

    @property
    def unscaled(self) -> BlockDiagonal:
        """The blocks without `scale`."""
        if self._unscaled is None:
            self._at_first_use()
        assert self._unscaled is not None
        return self._unscaled

    @property
    def blocks(self) -> dict[str, LinearOperator]:
        """Block name to operator. Blocks are named after layers, or after parameters that have a block of their own."""
        return dict(self.operator.blocks)

    def _scale(self, c: Scalar) -> Self:
        unscaled = self.unscaled  # computed once, for this operator and its multiples
        multiple = copy.copy(self)
        multiple._set_scale(self.scale * c)
        multiple._set_operator(unscaled)
        return multiple

    def _set_scale(self, scale: float | Tensor) -> None:
        self.scale = scale
        self.structure = Structure.PSD if scale >= 0 else Structure.SYMMETRIC

    def inverse(
        self,
        damping: Any = 0.0,
        *,
        use_heuristic_damping: bool = False,
        min_damping: float = 1e-8,
        retry_double_precision: bool = True,
        use_exact_damping: bool = False,
    ) -> LinearOperator:
        """`(K + damping·I)⁻¹`, an operator with its own `logdet`, `trace`, `sample`.

        Args:
            damping: A number; a tensor with one value per block; a rule such as `RelativeDamping(0.1)`; or a pair
                `(λ_A, λ_G)` that is added to the Kronecker factors instead, as `HeuristicDamping` chooses one.
            use_heuristic_damping: The same as `HeuristicDamping(damping, min=min_damping)`: split the number over the
                factors by Martens & Grosse 2015, section 6.3. A separate bias block is damped like the gradient factor
                of its weight.
            min_damping: Lower bound of each side under the heuristic.
            retry_double_precision: Try a failing Cholesky decomposition once more in float64.
            use_exact_damping: Accepted for code written for curvlinops, where a plain number damps each factor unless
                this is True; here it always damps the whole matrix, and a pair each factor.

        Raises:
            SingularMatrixError: If a block is singular and `damping` is 0; names the block.
            ValueError: If a pair is given together with the heuristic, or either together with exact damping.
        """
        if use_exact_damping and (use_heuristic_damping or isinstance(damping, (tuple, HeuristicDamping))):
            raise ValueError("Either damp the factors (heuristic damping, or a pair) or use exact damping, not both.")
        if isinstance(damping, HeuristicDamping):
            use_heuristic_damping, min_damping, damping = True, damping.min, damping.damping
        if not use_heuristic_damping and not isinstance(damping, tuple):
            return self.operator.inverse(damping, retry_double_precision=retry_double_precision)
        unscaled, c = self.unscaled, self.scale
        if not c > 0:
            raise ValueError(
                f"Dampings of factors need a positive multiple of the curvature; this operator is {float(c):g} times "
                "it. Damp the whole matrix, with a number."
            )
        # `c G ⊗ A` damped by (λ_A, λ_G) is `c` times `G ⊗ A` damped by (λ_A, λ_G / c).
        if use_heuristic_damping and isinstance(damping, tuple):
            raise ValueError("Heuristic and exact damping require a single damping value.")

        def of_blocks() -> dict[str, Any]:
            if not use_heuristic_damping:
                return pair_damping(unscaled, damping, c)
            operator = self.operator
            dampings = operator.per_block(damping)
            numbers = dampings | {name: resolve(dampings[name], block) / c for name, block in operator.blocks.items()}
            return heuristic_factor_damping(unscaled, self.plan, numbers, min_damping)

        found: Any = BlockDampings((damping, use_heuristic_damping, min_damping), of_blocks)
        inverse = unscaled.inverse(found, retry_double_precision=retry_double_precision)
        return inverse if unscaled is self._operator else inverse._scale(1 / c)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Self:
        # Also if the blocks are computed anew; the model stays where it is.
        moved = copy.copy(self)
        moved.device = self.device if device is None else device
        moved.dtype = self.dtype if dtype is None else dtype
        if isinstance(self.scale, Tensor):
            moved.scale = self.scale.to(moved.device, moved.dtype)
        moved._set_operator(self.unscaled.to(device=device, dtype=dtype))
        return moved

    def offload(self, where: str | torch.device = "cpu") -> Self:
        """The same operator with blocks that are kept on another device; see `BlockDiagonal.offload`."""
        moved = copy.copy(self)
        moved._set_operator(self.unscaled.offload(where))
        return moved

    def split(self, v: Any) -> dict[str, Tensor]:
        """A vector's parts, block by block (`BlockDiagonal.split`): `K.blocks[name] @ K.split(v)[name]`."""
        return self.operator.split(v)

    def merge(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector that `parts` are the blocks' parts of: undoes `split`."""
        return self.operator.merge(parts)
