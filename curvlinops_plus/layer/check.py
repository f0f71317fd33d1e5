"""`check_rule`: whether a layer rule is right, for whoever writes one.

A rule is compared with plain autodiff on one example at a time, and its fast paths with the plain sums that they
replace. Everything happens in double precision on a copy of the module, so that an error of 1e-8 is a mistake.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from curvlinops_plus.errors import UnsupportedError, VerificationError
from curvlinops_plus.layer.replay import check_repeatable, differentiable_parameters
from curvlinops_plus.layer.rows import SparseRows
from curvlinops_plus.layer.rule import AffineRule, LayerRule, outer_products, rule_of, why_generic
from curvlinops_plus.linalg.layout import Layout

__all__ = ["RuleCheck", "check_rule"]

_TOLERANCE = 1e-8  # of double precision


@dataclass(frozen=True)
class RuleCheck:
    """What `check_rule` found; `print` it.

    Attributes:
        module: Type of the module.
        rule: Type of its rule.
        note: Why the module has only the generic rule, or empty.
        rows: (check, largest relative error).
    """

    module: str
    rule: str
    note: str
    rows: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        note = [f"no Kronecker factors: {self.note}"] if self.note else []
        lines = [f"{name.ljust(width)}  {error:.1e}" for name, error in self.rows]
        return "\n".join([f"{self.rule} of {self.module}", *note, *lines, f"all {len(lines)} checks passed"])


def check_rule(
    module: nn.Module,
    *example_input: Any,
    rule: LayerRule | type[LayerRule] | None = None,
    num_vectors: int = 2,
    seed: int = 0,
    **kwargs: Any,
) -> RuleCheck:
    """Compare a layer rule with plain autodiff.

    Looked at are per-example gradients, entry by entry, also for other numbers of vectors and examples; of affine rules
    also rows and their fast paths (`input_gram`, `mean_inputs`, `grad_gram`, `sum_grads`); and whether the rule changes
    the module or its inputs. The parameters are used as they are: a weight that is zero hides what multiplies it.

    Args:
        module: A layer, in the mode in which it will be used. Not changed: a double precision copy is.
        example_input: What it is called with, two examples at least. They are on axis 0 (or 1 if the module has
            `batch_first=False`), and where the rule's `axes` says.
        rule: The rule, or its class. Default: the module's rule.
        num_vectors: Number of output gradients.
        seed: Of the output gradients.
        **kwargs: Keyword inputs of the call.

    Returns:
        A table of checks, each with its largest relative error.

    Raises:
        VerificationError: Naming module, rule, check, error and the likely cause.
        UnsupportedError: If the module draws random numbers, mixes examples by design, or the rule refuses it.
        ValueError: If there are less than two examples, or nothing to check.

    Cost: a forward and backward pass per example and vector, a few times. Made for small inputs.

    Example:
        >>> print(check_rule(nn.PReLU(), torch.linspace(-2, 2, 6).view(3, 2)))
        PReLURule of PReLU
        patterns                              0.0e+00
        examples are independent              0.0e+00
        gradients                             0.0e+00
        gradients, as many vectors as examples  0.0e+00
    """
    mine = _double(module)
    if rule is None:
        rule, note = rule_of(mine), why_generic(mine)
    else:
        rule, note = (rule() if isinstance(rule, type) else rule), ""
        if (reason := rule.refuses(mine)) is not None:
            raise UnsupportedError(f"{type(rule).__name__} refuses {type(module).__name__}: {reason}")
    check_repeatable(mine)
    rule.check(mine)
    args, kwargs = tree_map_only(Tensor, _to_double, (example_input, kwargs))
    with torch.random.fork_rng():
        check = _Check(mine, rule, _Inputs(mine, rule, args, kwargs), torch.Generator().manual_seed(seed))
        check.everything(num_vectors)
    return RuleCheck(type(module).__name__, type(rule).__name__, note, tuple(check.rows))


class _Inputs:
    """The inputs of a call: as the module wants them, for one example, and with the examples first as rules do."""

    def __init__(self, module: nn.Module, rule: LayerRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        self.axis = int(getattr(module, "batch_first", None) is False)
        tensors = [t for t in self.leaves if isinstance(t, Tensor)]
        if not tensors:
            raise ValueError("check_rule needs an example of the layer's input: check_rule(layer, x).")
        axes = iter(rule.axes(module, self.axis, tensors, inputs=True))
        self.axes = [next(axes) if isinstance(t, Tensor) else 0 for t in self.leaves]
        first, at = tensors[0], next(a for a, t in zip(self.axes, self.leaves) if isinstance(t, Tensor))
        self.num_examples = first.shape[at] if first.ndim > at else 0
        if self.num_examples < 2:
            raise ValueError(
                f"check_rule needs at least two examples on axis {at} of the input, got shape {list(first.shape)}."
            )
        #: Which leaves carry examples.
        self.carry = [
            isinstance(t, Tensor) and t.ndim > a and t.shape[a] == self.num_examples
            for t, a in zip(self.leaves, self.axes)
        ]

    def some(self, start: int, stop: int, examples_first: bool = False) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Fresh copies of the inputs of some examples."""
        found = []
        for t, axis, carries in zip(self.leaves, self.axes, self.carry):
            if isinstance(t, Tensor):
                t = t.narrow(axis, start, stop - start) if carries else t
                t = (t.movedim(axis, 0) if carries and examples_first else t).clone()
            found.append(t)
        return tree_unflatten(found, self.spec)

    def in_axes(self) -> list[int]:
        """Where the module wants the examples, for each tensor."""
        return [
            axis if carries else 0
            for t, axis, carries in zip(self.leaves, self.axes, self.carry)
            if isinstance(t, Tensor)
        ]


class _Check:
    """All checks of one rule."""

    def __init__(self, module: nn.Module, rule: LayerRule, inputs: _Inputs, generator: torch.Generator) -> None:
        self.module, self.rule, self.inputs, self.generator = module, rule, inputs, generator
        self.params = differentiable_parameters(module)
        self.rows: list[tuple[str, float]] = []
        self.where = f"{type(rule).__name__} of {type(module).__name__}"
        if not self.params:
            raise ValueError(f"{type(module).__name__} holds no parameters of its own: there is nothing to check.")

    # --------------------------------------------------------------------------------------------------- comparing
    def equal(self, name: str, got: Tensor, expected: Tensor, cause: str) -> None:
        """Note a check, or raise if it fails."""
        if got.shape != expected.shape:
            raise VerificationError(
                f"{self.where}, check {name!r}: shape {list(got.shape)}, expected {list(expected.shape)}. {cause}"
            )
        got, expected = got.double(), expected.double()
        error = float((got - expected).abs().max() / (expected.abs().max() or 1.0)) if got.numel() else 0.0
        if not error <= _TOLERANCE:
            raise VerificationError(
                f"{self.where}, check {name!r}: off by {error:.1e} relative to the largest entry, more than "
                f"{_TOLERANCE:g}. {cause}"
            )
        known = dict(self.rows)
        self.rows = list({**known, name: max(error, known.get(name, 0.0))}.items())

    def fail(self, name: str, what: str) -> VerificationError:
        """The error of a check without numbers."""
        return VerificationError(f"{self.where}, check {name!r}: {what}")

    # ------------------------------------------------------------------------------------------------------ checks
    def everything(self, V: int) -> None:
        """Run all checks, cheap ones first."""
        N = self.inputs.num_examples
        self.patterns()
        outputs = self.independent()
        for name, num, stop in (
            ("gradients", V, N),
            ("gradients, as many vectors as examples", N, N),
            ("gradients, one vector, fewer examples", 1, N - 1),
        ):
            g = [self.randn(num, stop, *t.shape[1:]) for t in outputs]
            self.gradients(name, g, stop)
        if (named := self.by_keyword()) is not None:
            g = [self.randn(1, N, *t.shape[1:]) for t in outputs]
            self.gradients("gradients, inputs by keyword", g, N, named)
        if isinstance(self.rule, AffineRule):
            x = self.rule.input_of(self.module, *self.inputs.some(0, N, examples_first=True))
            g = self.randn(V, *outputs[0].shape)
            self.affine(self.rule, x, g)
            self.fast_paths(self.rule, x, g)

    def patterns(self) -> None:
        """Every parameter is a part of the matrix."""
        patterns = self.rule.patterns(self.module)
        if patterns.keys() != self.params.keys():
            raise self.fail(
                "patterns",
                f"patterns(...) names {list(patterns)}, the module holds {list(self.params)}. Give each parameter a "
                "pattern.",
            )
        try:
            Layout(patterns, {name: p.shape for name, p in self.params.items()}, self.rule.sizes(self.module))
        except ValueError as error:
            raise self.fail("patterns", f"{error}") from error
        self.rows.append(("patterns", 0.0))

    def independent(self) -> list[Tensor]:
        """One example alone gives what it gives in a batch. Returns the outputs, examples first."""
        N, before = self.inputs.num_examples, torch.get_rng_state()
        outputs = self.run(0, N)
        if not torch.equal(before, torch.get_rng_state()):
            raise UnsupportedError(
                f"{type(self.module).__name__} draws random numbers (dropout in training mode?), so that calling it "
                "again gives another result. Call `module.eval()` first."
            )
        for n in range(N):
            for whole, alone in zip(outputs, self.run(n, n + 1)):
                self.equal(
                    "examples are independent",
                    alone,
                    whole[n : n + 1],
                    "The output for one example depends on the other examples of the batch, or the example axis is "
                    "another one: see `axes`.",
                )
        return outputs

    def run(self, start: int, stop: int) -> list[Tensor]:
        """Outputs of the module for some examples, examples first."""
        args, kwargs = self.inputs.some(start, stop)
        leaves = [t for t in tree_leaves(self.module(*args, **kwargs)) if isinstance(t, Tensor)]
        leaves = [t for t in leaves if t.is_floating_point()]
        axes = self.rule.axes(self.module, self.inputs.axis, leaves, inputs=False)
        for t, axis in zip(leaves, axes):
            if t.ndim <= axis or t.shape[axis] != stop - start:
                raise self.fail(
                    "examples are independent",
                    f"an output of shape {list(t.shape)} for {stop - start} examples, expected them on axis {axis}. "
                    "If they are elsewhere, override `axes`.",
                )
        self.out_axes = axes
        return [t.movedim(axis, 0) for t, axis in zip(leaves, axes)]

    def gradients(self, name: str, g: Sequence[Tensor], stop: int, named: Mapping[str, Any] | None = None) -> None:
        """Per-example gradients of the first examples, against one example at a time."""
        args, kwargs = ((), named) if named is not None else self.inputs.some(0, stop, examples_first=True)
        given = g[0] if len(g) == 1 and not isinstance(self.rule, _several) else list(g)
        tensors = [t for t in tree_leaves((args, kwargs, list(g))) if isinstance(t, Tensor)]
        before = self.state(tensors)
        try:
            found = self.call(args, kwargs, given)
        except UnsupportedError:
            raise
        except Exception as error:
            raise self.fail(name, f"per_example_grads raised {type(error).__name__}: {error}") from error
        if (changed := self.changes(before, self.state(tensors))) is not None:
            raise self.fail(name, f"per_example_grads changed {changed}. A rule leaves everything as it finds it.")
        if found.keys() != self.params.keys():
            raise self.fail(
                name, f"per_example_grads returned {sorted(found)}, the parameters are {sorted(self.params)}."
            )
        for key, expected in self.one_by_one(g, stop).items():
            self.equal(
                name,
                found[key],
                expected,
                f"This is the gradient of {key!r} [V, examples, *shape]. {self.likely_cause()}",
            )
