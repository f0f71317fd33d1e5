"""Several processes; knows tensors and processes only."""

from curvlinops_plus.distributed.processes import Alone, Processes

__all__ = ["Alone", "Processes"]
