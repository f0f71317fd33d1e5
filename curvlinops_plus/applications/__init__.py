"""Uses of curvature: functions and small classes made of a risk and an operator."""

from curvlinops_plus.applications.laplace import Laplace
from curvlinops_plus.applications.predictive import Normal

__all__ = ["Laplace", "Normal"]
