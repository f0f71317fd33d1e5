"""The classic inverse of KFAC and EKFAC, with the damping conventions of curvlinops 3.0.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from curvlinops_plus.classic.kronecker_factored import EKFACLinearOperator, KFACLinearOperator
from curvlinops_plus.linalg import BlockDiagonal, Deferred, Structure

#: Arguments of the constructor that a state has, each kept under its name behind an underscore.
_OPTIONS = (
    "damping",
    "use_heuristic_damping",
    "min_damping",
    "use_exact_damping",
    "cache",
    "retry_double_precision",
)


class KFACInverseLinearOperator(Deferred):
    """Damped inverse of a `KFACLinearOperator` or `EKFACLinearOperator`.

    Args:
        A: The operator.
        damping: A number that is added *in full to each factor*, or a pair for input and gradient factors. With
            `use_exact_damping` or `use_heuristic_damping` a single number.
        use_heuristic_damping: Split the number over the factors, Martens & Grosse 2015, section 6.3.
        min_damping: Lower bound of each side under the heuristic.
        use_exact_damping: `(A + damping·I)⁻¹`, through eigendecompositions.
        cache: Keep the inverse blocks; otherwise they are formed at every product.
        retry_double_precision: Try a failing Cholesky decomposition once more in float64.

    Raises:
        ValueError: For another operator, both kinds of damping, a pair with either, or EKFAC without exact damping.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import KFACLinearOperator
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 2)
        >>> data = [(torch.rand(5, 3), torch.rand(5, 2))]
        >>> K = KFACLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> v = torch.ones(8)
        >>> inverse = KFACInverseLinearOperator(K, damping=1e-2, use_exact_damping=True)
        >>> bool(torch.allclose(inverse @ (K @ v + 1e-2 * v), v, atol=1e-4))
        True
    """

    SELF_ADJOINT: ClassVar[bool] = True

    def __init__(
        self,
        A: KFACLinearOperator,
        damping: float | tuple[float, float] = 0.0,
        use_heuristic_damping: bool = False,
        min_damping: float = 1e-8,
        use_exact_damping: bool = False,
        cache: bool = True,
        retry_double_precision: bool = True,
    ) -> None:
        if not isinstance(A, KFACLinearOperator):
            raise ValueError(
                f"The input `A` must be an instance of `KFACLinearOperator`, got {type(A).__name__}. Other "
                "operators have `A.inverse(damping)`."
            )
        if use_heuristic_damping and use_exact_damping:
            raise ValueError("Either use heuristic damping or exact damping, not both.")
        if (use_heuristic_damping or use_exact_damping) and isinstance(damping, tuple):
            raise ValueError(f"Heuristic and exact damping require a single damping value. Got {damping}.")
        if isinstance(A, EKFACLinearOperator) and not use_exact_damping:
            raise ValueError("Only exact damping is supported for EKFAC. Pass use_exact_damping=True.")
        super().__init__(A.in_space, A.dtype, A.device, Structure.PSD)
        self._A, self._damping = A, damping
        self._use_heuristic_damping, self._min_damping = use_heuristic_damping, min_damping
        self._use_exact_damping = use_exact_damping
        self._cache, self._retry_double_precision = cache, retry_double_precision
        self._operator: BlockDiagonal | None = None
        self._inverted: BlockDiagonal | None = None  # whose inverse that is: blocks of `A` may be computed anew

    @property
    def operator(self) -> BlockDiagonal:
        """The inverse blocks as a plain operator."""
        A = self._A.operator
        if self._operator is not None and self._inverted is A:
            return self._operator
        operator = self._invert()
        if self._cache:
            self._operator, self._inverted = operator, A
        return operator

    def _invert(self) -> BlockDiagonal:
        damping: Any = self._damping
        if not (self._use_exact_damping or self._use_heuristic_damping or isinstance(damping, tuple)):
            damping = (damping, damping)
        inverse = self._A.inverse(
            damping,
            use_heuristic_damping=self._use_heuristic_damping,
            min_damping=self._min_damping,
            retry_double_precision=self._retry_double_precision,
        )
        assert isinstance(inverse, BlockDiagonal)
        return inverse

    # --------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Options, and the state of the operator that is inverted. The inverse blocks follow from them."""
        return {"A": self._A.state_dict(), **{name: getattr(self, f"_{name}") for name in _OPTIONS}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and the inverted operator's blocks.

        Raises:
            ValueError: If keys are missing, or the inverted operator's state does not fit; nothing has changed then.
        """
        missing = [name for name in ("A", *_OPTIONS) if name not in state_dict]
        if missing:
            raise ValueError(f"The state lacks {missing}; is the file cut off, or not the state of an inverse?")
        self._A.load_state_dict(state_dict["A"])
        for name in _OPTIONS:
            setattr(self, f"_{name}", state_dict[name])
        self._operator = None

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], A: KFACLinearOperator) -> KFACInverseLinearOperator:
        """The inverse that a state describes, of `A`.

        Args:
            state_dict: What `state_dict()` returned.
            A: The operator; it takes over the blocks of the state.

        Raises:
            ValueError: If the state does not fit.
        """
        inverse = cls(A, use_exact_damping=True)
        inverse.load_state_dict(state_dict)
        return inverse
