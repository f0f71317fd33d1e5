"""What training with curvature can't do, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.optim.kfac.step_batches import mean_over
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.constant_statistics import batch_norms

__all__ = ["common_damping", "naming_batch_norm", "no_batch", "require_common", "require_same_loss"]


def no_batch(risk: EmpiricalRisk, inside: bool) -> RuntimeError:
    """The error of a step that has not seen what it needs.

    Args:
        risk: Model and losses.
        inside: Whether a loss was called inside of the model.
    """
    names = ", ".join(getattr(one.loss, "__name__", type(one.loss).__name__) for one in risk.losses)
    found = " It was called inside of the model's forward, before the model's output was known." if inside else ""
    return RuntimeError(
        f"No batch was seen since the last step: the loss that was given, {names}, was not called on an output "
        f"of the model in training mode.{found} Write `loss(model(X), y).backward()` with that loss; or, for losses "
        "that are functions and outputs that are changed before, call the model inside "
        "`with optimizer.listen((X, y)):`. A model that was compiled and called before belongs into the "
        "optimizer as torch.compile returned it. strict=False steps with the statistics of before."
    )


def common_damping(keys: Iterable[str], dampings: Mapping[str, float]) -> float:
    """The damping of a block, from those of its parameters.

    Raises:
        ValueError: If these differ.
    """
    found = {dampings[key] for key in keys}
    if len(found) > 1:
        raise ValueError(
            f"The parameters {list(keys)} are one block of the curvature, and have dampings (weight decay included) "
            f"{sorted(found)}. Put them in one group. Weight decay of weights alone is possible if it is decoupled, a "
            "number: it is no part of the curvature then."
        )
    return found.pop()


def require_common(
    blocks: Iterable[Iterable[str]], options: Mapping[str, Mapping[str, Any]], dampings: Mapping[str, float]
) -> None:
    """Refuse options that differ within a block.

    Args:
        blocks: Keys of the parameters of each.
        options: Name of an option to its value for each parameter, by key.
        dampings: The damping of each parameter, weight decay included.

    Raises:
        ValueError: Naming the parameters.
    """
    for keys in blocks:
        common_damping(keys, dampings)
        for name, values in options.items():
            found = [values[key] for key in keys]
            if any(value != found[0] for value in found):
                raise ValueError(
                    f"The parameters {list(keys)} are one block of the curvature, and have {name} {found}. Put them in "
                    "one group."
                )


def require_same_loss(risk: EmpiricalRisk, given: Any, find: Callable[[], float]) -> None:
    """Refuse a loss of the user that is another one than that of the statistics.

    Args:
        risk: Model and losses.
        given: The user's, None if it is not known. Of several processes each has its own, whose mean is compared.
        find: Computes the other one.

    Raises:
        ValueError: With both numbers.
    """
    if given is None:
        raise ValueError("check_loss compares the loss that step's closure returns; write step(lambda: value).")
    own = torch.tensor(float(torch.as_tensor(given).detach()), dtype=torch.float64)
    theirs, ours = float(mean_over(risk.processes, own)), find()
    if not abs(theirs - ours) <= 1e-3 * max(abs(theirs), abs(ours)):
        names = ", ".join(one.title for one in risk.losses)
        raise ValueError(
            f"The loss that is minimised is {theirs:.6g}, and that of the statistics, {names}, is {ours:.6g} on the "
            "same batches. Give the optimizer the loss with the same options (label smoothing, class weights, ignored "
            "targets) and the same reduction, a mean or a sum. With weight decay in the loss, or a loss that was "
            "scaled, compare what there is without it."
        )


@contextmanager
def naming_batch_norm(risk: EmpiricalRisk) -> Iterator[None]:
    """Context whose refusals say what to do about batch norms that are trained."""
    try:
        yield
    except UnsupportedError as error:
        params = set(risk.params.values())
        names = [name for name, m in batch_norms(risk.model).items() if params & set(m.parameters())]
        if not names:
            raise
        raise UnsupportedError(
            f"{names} are batch norm in training mode, whose own parameters have no curvature: the examples of a batch "
            "depend on each other. Leave these parameters out of `params`, and give them to another optimizer."
        ) from error
