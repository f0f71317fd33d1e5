"""What training with curvature can't do, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.replay import spectral_norms
from curvlinops_plus.optim.kfac.step_batches import mean_over
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.check import batch_norms


@dataclass
class Noticed:
    """What hooks have noticed since the last step, for the error of a step that has not seen a batch.

    Attributes:
        calls: How the model was called: "train", or why this call was none of training.
        inside: Whether a loss was called inside of the model.
        elsewhere: Index of a loss to what it was called on instead of an output of the model.
        missing: Indices of losses that are still to be called on an output that others of them were called on.
    """

    calls: set[str] = field(default_factory=set)
    inside: bool = False
    elsewhere: dict[int, str] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    heard: bool = False

    def called_on(self, index: int, f: Any, y: Any, output: Any) -> None:
        """A loss was called on `f` and `y`, and the model had returned `output`."""
        if y is output:
            found = "with the model's output as its target; write `loss(model(X), y)`."
        elif f is output:
            found = "on an output that was written to in place after the model returned it; write to a copy."
        else:
            found = (
                f"on {_shape(f)}, and not on the model's output itself, {_shape(output)}. If that was changed in "
                "between (squeeze, view, a slice), let the model return what the loss reads; or give the optimizer "
                "output=, a function of what the model returns, such as lambda out: out.squeeze(-1), or out.movedim("
                "-1, 1) for classes on the last axis, and call the model inside `with optimizer.listen((X, y)):`."
            )
        self.elsewhere[index] = found


def _shape(f: Any) -> str:
    return f"a tensor of shape {list(f.shape)}" if isinstance(f, torch.Tensor) else f"a {type(f).__name__}"


def no_batch(risk: EmpiricalRisk, noticed: Noticed, again: bool) -> RuntimeError:
    """The error of a step that has not seen what it needs.

    Args:
        again: Whether the step evaluates the model on its batches again.
    """
    otherwise = "" if again else " strict=False steps with the statistics of before."
    return RuntimeError(f"No batch was seen since the last step. {_cause(risk, noticed)}{otherwise}")


def _cause(risk: EmpiricalRisk, noticed: Noticed) -> str:
    """Why a step has seen no batch, as far as hooks can tell."""
    titles = [one.title for one in risk.losses]
    functions = [one.title for one in risk.losses if not isinstance(one.loss, nn.Module)]
    if noticed.heard:
        return (
            "One was heard, and its gradients were removed (by zero_grad() after backward()); this step looks at the "
            "loss that its gradients come from once more."
        )
    if functions:
        return (
            f"The loss {', '.join(functions)} is a function, whose calls can't be heard. Call the model inside "
            "`with optimizer.listen((X, y)):`, then the loss and backward() after that block."
        )
    if noticed.missing or noticed.elsewhere:
        missing = ", ".join(titles[i] for i in sorted(noticed.missing))
        unheard = f"Not called on the model's output, as the other losses were: {missing}." if missing else ""
        return " ".join([unheard, *(f"{titles[i]} was called {on}" for i, on in noticed.elsewhere.items())]).strip()
    names = ", ".join(titles)
    if noticed.inside:
        return (
            f"{names} was called inside of the model's forward, before the model's output was known. Call the model "
            "inside `with optimizer.listen((X, y)):`."
        )
    if "train" in noticed.calls:
        return (
            f"The model was called in training mode, and {names}, as the optimizer was given it, was not. Was it "
            "another instance of the loss (give the optimizer the one that is called), or a function as in "
            "torch.nn.functional (call the model inside `with optimizer.listen((X, y)):`), or a loss that was "
            "compiled and called before (make the optimizer first)?"
        )
    if noticed.calls:
        return f"The model was called {', and '.join(sorted(noticed.calls))}, which is not heard as training."
    return (
        "The model was not called, nor was it inside `with optimizer.listen((X, y)):`. Was it a copy of the model, or "
        "one that was compiled and called before (give the optimizer what torch.compile returned), or was the "
        "optimizer closed?"
    )


def common_damping(keys: Iterable[str], dampings: Mapping[str, float]) -> float:
    """The damping of a block, from those of its parameters."""
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
        given: The user's, None if it is not known. Of several processes each has its own, whose mean is compared.
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
def naming_training_mode(risk: EmpiricalRisk) -> Iterator[None]:
    """Context whose refusals say what to do about layers that have no curvature in training mode."""
    try:
        yield
    except UnsupportedError as error:
        params, model = set(risk.params.values()), risk.model
        for found, what in ((batch_norms(model), _BATCH_NORM), (spectral_norms(model), _SPECTRAL_NORM)):
            if names := [name for name, m in found.items() if params & set(m.parameters())]:
                raise UnsupportedError(
                    f"{names} {what} these parameters out of `params`, and give them to another optimizer."
                ) from error
        raise


_BATCH_NORM = (
    "are batch norm in training mode, whose own parameters have no curvature: the examples of a batch depend on each "
    "other. Leave"
)
_SPECTRAL_NORM = (
    "have spectral norm in training mode, which changes their weights in every forward pass, so their curvature is not "
    "known. Call eval() on these modules alone, which keeps the singular vectors of before; or leave"
)


def require_order(state: Mapping[str, Any], own: list[str]) -> None:
    """Refuse an optimizer's state whose velocities, which have numbers, would be those of other parameters.

    Args:
        own: Keys of the parameters, in their order.
    """
    theirs = state.get("parameters", own)
    if theirs != own and sorted(theirs) == sorted(own):
        raise ValueError(
            f"The state is of parameters in the order {theirs[:5]}..., and this optimizer has {own[:5]}...: "
            "velocities belong to parameters by their places. Give `params` in the order of before."
        )
