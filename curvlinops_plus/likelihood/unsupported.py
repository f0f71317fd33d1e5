"""Errors about losses that are not supported, with what to use instead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import isroutine
from typing import Any

from torch import nn

from curvlinops_plus.errors import UnsupportedError


def not_registered(loss: Any, known: Sequence[type]) -> UnsupportedError:
    """The error for a loss whose class is not among the known ones, or that computes something else."""
    inner = loss.func if isinstance(loss, partial) else loss
    name = getattr(inner, "__name__", type(inner).__name__)
    said = f"no likelihood is registered for the loss {name}"
    if isroutine(inner):
        return UnsupportedError(
            f"{said}, a function. Losses are known by their class, which holds the options: pass the module of "
            "torch.nn, as nn.CrossEntropyLoss(). GGN, Hessian and Empirical() take any function."
        )
    parent = next((t for t in type(loss).__mro__ if t in known), None)
    if parent and has_hooks(loss):
        return UnsupportedError(
            f"{said}. Hooks run when it is called, its own or those of all modules, and may change its value: remove "
            "them."
        )
    why = ""
    if isinstance(loss, type):
        why = f" This is a class, not a loss: call it, {loss.__name__}(...)."
    elif parent:
        why = f" It changes the forward of {parent.__name__}, whose rules may be wrong for it."
    elif isinstance(loss, (nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)):
        why = (
            " It has no curvature far from the target: its Hessian is 0 there, so it depends on which examples happen "
            "to be fitted. GGNLinearOperator, HessianLinearOperator and Empirical() accept it; for all else choose a "
            "distribution, as torch.distributions.Laplace(f, 1.0), whose Fisher matrix counts every example."
        )
    return UnsupportedError(
        f"{said}.{why} Known losses: {', '.join(sorted(t.__name__ for t in known))}. To add yours (a class), say which "
        f"distribution it is the negative log-likelihood of:\n\n    @register_likelihood({name})\n"
        "    def _(loss):\n        return FromDistribution(lambda f: torch.distributions.Poisson(f.exp()))\n\n"
        "or decorate a subclass of Likelihood, which needs one method, nll."
    )


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(loss: Any) -> bool:
    """Whether calling a loss runs hooks, which may change what it returns, or the gradient.

    Those that have an attribute `only_reads` are this package's own, and change nothing.
    """
    if not isinstance(loss, nn.Module):
        return False
    return has_own_hooks(loss) or any(vars(nn.modules.module)[f"_global{kind}"] for kind in _HOOKS)


def has_own_hooks(loss: nn.Module) -> bool:
    """Whether it has such hooks itself."""
    return any(not hasattr(hook, "only_reads") for kind in _HOOKS for hook in vars(loss)[kind].values())
