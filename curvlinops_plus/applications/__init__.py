"""Floor 5: uses of curvature, functions and small classes made of a risk and an operator."""

from curvlinops_plus.applications.attribution import attribution_scores, self_influence
from curvlinops_plus.applications.example_gradients import per_example_gradients
from curvlinops_plus.applications.pruning import prune

__all__ = ["attribution_scores", "per_example_gradients", "prune", "self_influence"]
