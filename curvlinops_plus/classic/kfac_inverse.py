"""The classic inverse of KFAC and EKFAC, with the damping conventions of curvlinops 3.0.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from curvlinops_plus.classic.kronecker_factored import EKFACLinearOperator, KFACLinearOperator
from curvlinops_plus.linalg import Deferred, LinearOperator, Structure


class KFACInverseLinearOperator(Deferred):
    """Damped inverse of a `KFACLinearOperator` or `EKFACLinearOperator`.

    Args:
        A: The operator.
        damping: A number that is added *in full to each factor*, or a pair for input and gradient factors. With
            `use_exact_damping` or `use_heuristic_damping` a single number.
        use_heuristic_damping: Split the number over the factors, Martens & Grosse 2015, section 6.3.
        min_damping: Lower bound of each side under the heuristic.
        use_exact_damping: `(A + damping·I)⁻¹`, through eigendecompositions.
        cache: Accepted for code written for curvlinops; inverse blocks are computed now, and kept.
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
        if isinstance(A, EKFACLinearOperator) and not use_exact_damping:
            raise ValueError("Only exact damping is supported for EKFAC. Pass use_exact_damping=True.")
        super().__init__(A.in_space, A.dtype, A.device, Structure.PSD)
        chosen = {
            "use_heuristic_damping": use_heuristic_damping,
            "min_damping": min_damping,
            "use_exact_damping": use_exact_damping,
            "retry_double_precision": retry_double_precision,
        }
        by_factor = not (use_exact_damping or use_heuristic_damping or isinstance(damping, tuple))
        self._A, self._options = A, {"damping": damping, "cache": cache, **chosen}
        self._operator = A.inverse((damping, damping) if by_factor else damping, **chosen)

    @property
    def operator(self) -> LinearOperator:
        """The inverse blocks as a plain operator."""
        return self._operator

    def state_dict(self) -> dict[str, Any]:
        """Options, and the state of the operator that is inverted. The inverse blocks follow from them."""
        return {"A": self._A.state_dict(), **self._options}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and the inverted operator's blocks.

        Raises:
            ValueError: If the inverted operator's state does not fit.
        """
        self._A.load_state_dict(state_dict["A"])
        KFACInverseLinearOperator.__init__(self, self._A, **{name: state_dict[name] for name in self._options})

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], A: KFACLinearOperator) -> KFACInverseLinearOperator:
        """The inverse that a state describes, of `A`.

        Args:
            state_dict: What `state_dict()` returned.
            A: The operator; it takes over the blocks of the state.

        Raises:
            ValueError: If the state does not fit.
        """
        A.load_state_dict(state_dict["A"])
        return cls(A, **{name: option for name, option in state_dict.items() if name != "A"})
