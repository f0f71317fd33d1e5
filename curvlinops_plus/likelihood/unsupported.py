"""Errors about losses and targets that are not supported, with what to use instead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError


def not_registered(loss: Any, known: Sequence[type]) -> UnsupportedError:
    """The error for a loss whose class is not among the known ones, or overrides their `forward`."""
    if isinstance(loss, (FunctionType, BuiltinFunctionType, MethodType, partial)):
        inner = loss.func if isinstance(loss, partial) else loss
        return UnsupportedError(
            f"no likelihood is registered for the loss {getattr(inner, '__name__', type(inner).__name__)}, a function. "
            "Losses are known by their class, which holds the options: pass the module of torch.nn, as "
            "nn.CrossEntropyLoss(). GGN, Hessian and Empirical() take any function; for all else write a loss of your "
            "own as a torch.nn.Module, and register its class with @register_likelihood."
        )
    kind = type(loss)
    parent = next((t for t in kind.__mro__ if t in known), None)
    name = loss.__name__ if isinstance(loss, type) else kind.__name__
    why = _advice(loss)
    if parent and has_hooks(loss):
        own = any(getattr(loss, f"_{kind}") for kind in _HOOKS)
        where = "its own" if own else "global ones, of all modules (torch.nn.modules.module.register_module_...)"
        return UnsupportedError(
            f"no likelihood is registered for the loss {name}. Hooks run when it is called, {where}, "
            "and may change its value: remove them."
        )
    if parent:
        why = f" It changes the forward of {parent.__name__}, whose rules may be wrong for it."
    return UnsupportedError(
        f"no likelihood is registered for the loss {name}.{why} Known losses: "
        f"{', '.join(sorted(t.__name__ for t in known))}. To add yours (a class), say which distribution it is the "
        f"negative log-likelihood of:\n\n    @register_likelihood({name})\n    def _(loss):\n"
        "        return FromDistribution(lambda f: torch.distributions.Poisson(f.exp()))\n\n"
        "or decorate a subclass of Likelihood, which needs one method, nll."
    )


_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_OWN_HOOKS = tuple(f"_{kind}" for kind in _HOOKS)


def has_hooks(loss: Any) -> bool:
    """Whether calling a loss runs hooks, which may change what it returns, or the gradient.

    Those that have an attribute `only_reads` are this package's own, and change nothing.
    """
    if not isinstance(loss, nn.Module):
        return False
    common = nn.modules.module.__dict__
    return has_own_hooks(loss) or bool([kind for kind in _HOOKS if common[f"_global_{kind}"]])


def has_own_hooks(loss: nn.Module) -> bool:
    """Whether it has such hooks itself."""
    own = loss.__dict__
    tables = [own[kind] for kind in _OWN_HOOKS if own[kind]]
    return bool(tables) and any(not hasattr(hook, "only_reads") for table in tables for hook in table.values())


_ROBUST = (
    " {name} has no curvature far from the target: its Hessian is 0 there, so it depends on which examples "
    "happen to be fitted. GGNLinearOperator, HessianLinearOperator and Empirical() accept it; for all else choose a "
    "distribution, as torch.distributions.Laplace(f, 1.0), whose Fisher matrix counts every example."
)
# What to use instead of losses of PyTorch that are not supported.
_ADVICE: dict[type, str] = {
    nn.L1Loss: _ROBUST,
    nn.SmoothL1Loss: _ROBUST,
    nn.HuberLoss: _ROBUST,
    nn.KLDivLoss: (
        " It reads log-probabilities, in which it is linear, so its Hessian is 0. Use nn.CrossEntropyLoss on the "
        "logits, which takes class probabilities as targets and differs by a constant."
    ),
    nn.SoftMarginLoss: " It is nn.BCEWithLogitsLoss with targets (y + 1) / 2 in place of y = ±1: use that.",
    nn.MultiLabelSoftMarginLoss: ' With reduction="mean" it is nn.BCEWithLogitsLoss: use that.',
}


def _advice(loss: Any) -> str:
    """Why a loss is not supported and what to use instead, if known; else empty."""
    if isinstance(loss, type):
        return f" This is a class, not a loss: call it, {loss.__name__}(...)."
    kind = next((t for t in type(loss).__mro__ if t in _ADVICE), None)
    return "" if kind is None else _ADVICE[kind].format(name=type(loss).__name__)


def how_to_convert(y: Any) -> str:
    """Advice about a target that is not a tensor."""
    if y is None:
        return "Batches must be (X, y) with the target y, or mappings with 'labels' that are not None."
    if isinstance(y, np.ndarray):
        return "Convert it with torch.from_numpy, in the data set or in the collate function of the loader."
    if any(isinstance(part, Tensor) for part in tree_leaves(y)):
        return (
            "One loss reads one target: give losses in the structure of the targets, as {'a': loss_a, 'b': loss_b} or "
            "(loss_a, loss_b), or batches (X, y) with one tensor y."
        )
    return "Convert it with torch.tensor, in the data set or in the collate function of the loader."
