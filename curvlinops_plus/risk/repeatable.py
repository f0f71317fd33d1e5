"""Whether two evaluations of a model agree, on a few examples, and which module is random if they don't."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.random_state import RandomState, kept_random_state
from curvlinops_plus.risk.compare_rules import TOLERANCE
from curvlinops_plus.risk.determinism import training_modules
from curvlinops_plus.risk.examples import take_examples
from curvlinops_plus.risk.module_uses import title
from curvlinops_plus.risk.process_state import eager, hookable_modules, own_calls
from curvlinops_plus.risk.reading import Batch
from curvlinops_plus.risk.replaced_parameters import copied_buffers
from curvlinops_plus.risk.risk import EmpiricalRisk, RiskOptions

# How many examples are looked at.
_FEW = 3
# So many evaluations of a model that draws numbers have to agree.
_DRAWS = 32


def require_repeatable(risk: EmpiricalRisk, batch: Batch) -> None:
    """Compare two evaluations of the model on a few examples of a batch, once for each mode of its modules.

    Args:
        risk: Model and options; with `check=False` nothing is compared.

    Raises:
        RuntimeError: If they differ; names the first module whose outputs do, and modules in training mode. Also if a
            model in training mode draws from PyTorch's generator at all: it may differ rarely (stochastic depth).

    Cost: once, two forward passes over three examples, or over the batch where its examples can't be told apart. More
    if a model draws numbers in evaluation mode, which need not change its output.
    """
    if not risk.options.check:
        return
    modes = tuple(m.training for m in risk.model.modules())
    if modes in risk.checked.modes:
        return
    few = None
    if batch.num_examples > _FEW and are_examples_clear(batch, risk.options):
        few = take_examples(batch, range(_FEW))
    with kept_random_state(), eager(), copied_buffers(risk.model), torch.no_grad():
        error = _compare(risk, batch if few is None else few, batch)
    torch.clear_autocast_cache()  # before PyTorch 2.7 it gives weights that were cast without gradients to later passes
    if error is not None:
        raise error
    risk.checked.modes.add(modes)


def are_examples_clear(batch: Batch, options: RiskOptions) -> bool:
    """Whether it is clear for each tensor of the input if it carries examples, and on which axis."""
    N, elsewhere = batch.num_examples, bool(options.example_axis)
    if options.example_of_row:  # of a graph, say, a tensor's rows are not examples
        return False
    for t in tree_leaves(batch.X):
        if isinstance(t, Tensor) and t.ndim:
            axes = t.shape[:2].count(N)
            # Other rows may be examples times positions, bags of tokens, nodes of graphs, or a table that all share.
            if (axes == 0 and len(t) != 1) or (axes == 2 and elsewhere):
                return False
    return True


def _compare(risk: EmpiricalRisk, few: Batch, batch: Batch) -> RuntimeError | None:
    state = RandomState.now(risk.device)
    try:
        first = risk.run(few)[0]
    except Exception:
        if few is batch:
            raise
        return _compare(risk, batch, batch)  # the model needs the whole batch, as the nodes of a graph do
    drew = RandomState.now(risk.device) != state
    for _ in range(_DRAWS if drew else 1):
        for f, again in zip(first, risk.run(few)[0], strict=True):
            away = relative_difference(again, f) if again.shape == f.shape else 1.0
            if away > TOLERANCE[f.element_size()]:
                where = first_different(risk.model, *_twice(risk, few))
                return not_repeatable(risk.model, away, where)
        if drew and (names := _training_modules_that_draw(risk, few)):
            return RuntimeError(
                f"The model draws random numbers in training mode, in {names}, so evaluations may differ, if rarely: "
                "call model.eval(). check_deterministic=False takes them as they come."
            )
    return None


def _training_modules_that_draw(risk: EmpiricalRisk, batch: Batch) -> str:
    """The innermost modules in training mode that draw numbers in a forward pass."""
    running: list[RandomState] = []
    found: dict[str, str] = {}
    handles = []
    for name, module in hookable_modules(risk.model):

        def enter(module: nn.Module, args: Any) -> None:
            running.append(RandomState.now(risk.device))

        def leave(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
            inside = any(known.startswith(f"{name}.") or not name for known in found)
            if running.pop() != RandomState.now(risk.device) and module.training and not inside:
                found.setdefault(name, f"{name!r} ({type(module).__name__})")

        handles += [
            module.register_forward_pre_hook(own_calls(enter)),
            module.register_forward_hook(own_calls(leave)),
        ]
    try:
        risk.run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return ", ".join(found.values())


def _twice(risk: EmpiricalRisk, batch: Batch) -> list[list[tuple[str, list[Tensor]]]]:
    return [outputs_of_modules(risk.model, lambda: risk.run(batch)) for _ in range(2)]


def not_repeatable(model: nn.Module, away: float, where: str) -> RuntimeError:
    """The error about a model that is random.

    Args:
        where: The first module whose outputs differ, in words, if it is known.
    """
    random = training_modules(model)
    cause = f"These modules are in training mode: {random}; call model.eval()." if random else ""
    return RuntimeError(
        f"Two evaluations of the model on the same examples differ, by {away:.1e} of the output's norm"
        f"{f', first in {where}' if where else ''}. {cause or 'Does it draw random numbers, or count its calls?'} "
        "check_deterministic=False takes them as they come."
    )


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Relative difference; 0 where it can't be told because a number is not finite."""
    # Without copies where it goes: large numbers have squares beyond float32.
    for dtype in (torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32), torch.float64):
        one, other = a.to(dtype), b.to(dtype)
        size, away = float(torch.linalg.vector_norm(other)), float(torch.linalg.vector_norm(one - other))
        if math.isfinite(size) and math.isfinite(away):
            return away / (size or 1.0)
    return 0.0


def outputs_of_modules(model: nn.Module, run: Callable[[], object]) -> list[tuple[str, list[Tensor]]]:
    """What each call of a module returned, with the module's name, in the order in which the calls ended."""
    outputs: list[tuple[str, list[Tensor]]] = []
    handles = []
    for name, module in hookable_modules(model):

        def note(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
            leaves = [t.detach().clone() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
            outputs.append((name, leaves))

        handles.append(module.register_forward_hook(own_calls(note)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def first_different(
    model: nn.Module, one: Sequence[tuple[str, list[Tensor]]], two: Sequence[tuple[str, list[Tensor]]]
) -> str:
    """The first module whose outputs differ, in words; "" if there is none."""
    for (name, before), (_, after) in zip(one, two):
        for a, b in zip(before, after):
            if a.shape == b.shape and relative_difference(b, a) > TOLERANCE[a.element_size()]:
                return f"{title(name)} ({type(model.get_submodule(name)).__name__})"
    return ""
