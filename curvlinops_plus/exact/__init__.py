"""Exact matrix-free operators of a risk."""

from curvlinops_plus.exact.activation import ActivationHessian
from curvlinops_plus.exact.data_rows import GGNFactor, Jacobian
from curvlinops_plus.exact.ggn import GGN
from curvlinops_plus.exact.hessian import Hessian

__all__ = ["GGN", "ActivationHessian", "GGNFactor", "Hessian", "Jacobian"]
