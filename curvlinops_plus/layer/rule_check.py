"""`check_rule`: test a layer rule against autodiff.

A rule is compared with plain autodiff on one example at a time, and its fast paths with the plain
sums that they replace. All is computed in double precision on a copy of the module, with a relative
tolerance of 1e-8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import UnsupportedError, VerificationError
from curvlinops_plus.layer.kept import module_copy
from curvlinops_plus.layer.registry import rule_of, why_generic
from curvlinops_plus.layer.replay import (
    Call,
    Unhooked,
    attributes_restored,
    check_repeatable,
    differentiable_parameters,
    floating_tensors,
)
from curvlinops_plus.layer.rows import SparseRows
from curvlinops_plus.layer.rule import AffineRule, LayerRule, outer_products
from curvlinops_plus.linalg.layout import Layout
from curvlinops_plus.options import instance, integer

_TOLERANCE = 1e-8  # of double precision


@dataclass(frozen=True)
class RuleCheck:
    """Result of `check_rule`, printed as a table.

    Attributes:
        module: Type of the module.
        rule: Type of its rule.
        note: Why there are no Kronecker factors, or empty.
        rows: (check, largest relative error).
    """

    module: str
    rule: str
    note: str
    rows: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        width = max(len(check) for check, _ in self.rows)
        lines = [f"{self.rule} of {self.module}"]
        if self.note:
            lines.append(f"no Kronecker factors: {self.note}")
        lines += [f"{check.ljust(width)}  {error:.1e}" for check, error in self.rows]
        return "\n".join([*lines, f"all {len(self.rows)} checks passed"])


def check_rule(
    module: nn.Module,
    *example_input: Any,
    rule: LayerRule | type[LayerRule] | None = None,
    num_vectors: int = 2,
    seed: int = 0,
    **kwargs: Any,
) -> RuleCheck:
    """Compare a layer rule with plain autodiff.

    Checked are per-example gradients, entry by entry, also for other numbers of vectors and
    examples; of affine rules also rows and their fast paths (`input_gram`, `mean_inputs`,
    `grad_gram`). The parameters are used with their values: a zero weight hides errors in its
    factors.

    Args:
        module: A layer, in the mode in which it will be used. Not changed: a double precision copy
            is.
        example_input: What it is called with, two examples at least. They are on axis 0 (or 1 if
            the module has `batch_first=False`), and where the rule's `axes` says.
        rule: The rule, or its class. Default: the module's rule.
        num_vectors: Number of output gradients.
        seed: Of the output gradients.
        **kwargs: Keyword inputs of the call.

    Returns:
        A table of checks, each with its largest relative error.

    Raises:
        VerificationError: Naming module, rule, check, error and the likely cause. Errors that the
            rule itself raises are passed on.
        UnsupportedError: If the module mixes examples by design, or the rule refuses it.
        ValueError: If there are less than two examples, or nothing to check.

    Cost: several forward and backward passes per example and vector. Intended for small inputs.

    Example:
        >>> print(check_rule(nn.PReLU(), torch.linspace(-2, 2, 6).view(3, 2)))
        PReLURule of PReLU
        no Kronecker factors: PReLURule is no AffineRule
        patterns                                  0.0e+00
        examples are independent                  0.0e+00
        gradients                                 0.0e+00
        gradients, one vector and fewer examples  0.0e+00
        all 4 checks passed
    """
    instance("module", module, nn.Module, "a torch.nn.Module")
    kind = rule() if isinstance(rule, type) else rule
    instance("rule", kind, LayerRule, "a rule, or the class of one", optional=True)
    num_vectors = integer("num_vectors", num_vectors, low=1)
    seed = integer("seed", seed, low=0)
    double = module_copy(module, lambda t: _to_double(t).clone()).double()
    note = ""
    if rule is None:
        rule = rule_of(double)
        note = why_generic(double)
    elif isinstance(rule, type):
        rule = rule()
    reason = rule.refuses(double)
    if reason is not None:
        raise UnsupportedError(f"{type(rule).__name__} refuses {type(module).__name__}: {reason}")
    if not note and not isinstance(rule, AffineRule):
        note = f"{type(rule).__name__} is no AffineRule"
    check_repeatable(double)
    rule.check(double)
    args, kwargs = tree_map_only(Tensor, _to_double, (example_input, kwargs))
    with torch.random.fork_rng(), attributes_restored(double):
        check = _Check(double, rule, seed)
        check.patterns()
        check.read_call(args, kwargs)
        check.independence()
        check.gradients("gradients", num_vectors, check.num_examples)
        check.gradients("gradients, one vector and fewer examples", 1, check.num_examples - 1)
        if isinstance(rule, AffineRule):
            check.affine(rule, num_vectors)
    return RuleCheck(type(module).__name__, type(rule).__name__, note, tuple(check.rows.items()))


class _Check:
    """All checks of one rule on one call; `rows` has the largest error of each."""

    def __init__(self, module: nn.Module, rule: LayerRule, seed: int) -> None:
        self.module = module
        self.rule = rule
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: dict[str, float] = {}
        self.params = differentiable_parameters(module)
        if not self.params:
            raise ValueError(
                f"{type(module).__name__} holds no parameters of its own: there is nothing to "
                "check."
            )

    def patterns(self) -> None:
        """Patterns can be read, and fit the shapes."""
        shapes = {name: p.shape for name, p in self.params.items()}
        try:
            Layout(self.rule.patterns(self.module), shapes, self.rule.sizes(self.module))
        except (ValueError, KeyError) as error:
            message = f"{error} (of the parameters {list(self.params)})"
            raise self.failed("patterns", message) from error
        self.rows["patterns"] = 0.0

    def read_call(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Call the module, and note where inputs and outputs have the examples."""
        model_axis = int(getattr(self.module, "batch_first", None) is False)
        self.read_inputs(args, kwargs, model_axis)
        copied_args, copied_kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        with GradMode(False):
            out = Unhooked(self.module)(*copied_args, **copied_kwargs)
        outputs = floating_tensors(out)
        out_axes: list[int] = []
        if outputs:
            out_axes = self.rule.axes(self.module, model_axis, outputs, inputs=False)
        divided = [_size(t, axis) == self.num_examples for t, axis in zip(outputs, out_axes)]
        if not outputs or not all(divided):
            raise self.failed(
                "examples are independent",
                f"{self.num_examples} examples gave outputs of shapes "
                f"{[list(t.shape) for t in outputs]}, expected floating-point tensors with the "
                f"examples on axis {model_axis}. If they are elsewhere, override `axes`.",
            )
        self.is_single = isinstance(out, Tensor)
        #: With the examples first, as rules get them.
        self.outputs = [t.movedim(axis, 0) for t, axis in zip(outputs, out_axes)]
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        self.call = Call(self.module, args, kwargs, self.num_examples, self.in_axes, out_axes)

    def read_inputs(self, args: Any, kwargs: Mapping[str, Any], model_axis: int) -> None:
        """The leaves of the inputs, with the examples first."""
        self.leaves, self.spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        tensors = [self.leaves[i] for i in places]
        axes = self.rule.axes(self.module, model_axis, tensors, inputs=True) if tensors else []
        sizes = [_size(t, axis) for t, axis in zip(tensors, axes, strict=True)]
        self.num_examples = sizes[0] if sizes else 0
        if self.num_examples < 2:
            raise ValueError(
                "check_rule needs a call of the layer with two examples at least: "
                "check_rule(layer, x)."
            )
        self.in_axes: list[int | None] = []
        for i, axis, size in zip(places, axes, sizes):
            if size == self.num_examples:
                self.in_axes.append(axis)
                self.leaves[i] = self.leaves[i].movedim(axis, 0)
            else:  # all examples share it
                self.in_axes.append(None)

    def alone(self, n: int, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs of the module for one example."""
        with GradMode(False):
            return self.call.run(params, self.call.inputs(n), [t.shape[1:] for t in self.outputs])

    def independence(self) -> None:
        """Outputs of single examples are those of all together."""
        for n in range(self.num_examples):
            for together, alone in zip(self.outputs, self.alone(n, self.call.params)):
                self.equal(
                    "examples are independent",
                    alone,
                    together[n],
                    "An output depends on other examples, calls before or random numbers "
                    "(`module.eval()` first).",
                )

    def gradients(self, check: str, num_vectors: int, num_examples: int) -> None:
        """The rule's gradients of the first examples are those of autograd."""
        g = [self.randn(num_vectors, num_examples, *t.shape[1:]) for t in self.outputs]
        leaves = list(self.leaves)
        for place in self.call.per_example:
            leaves[place] = leaves[place][:num_examples].clone()
        args, kwargs = tree_unflatten(leaves, self.spec)
        copies = [t.clone() for t in g]
        gradients = self.rule.example_grads(
            self.module,
            args,
            kwargs,
            copies[0] if self.is_single else copies,
            self.in_axes,
            self.call.out_axes,
        )
        if gradients.keys() != self.params.keys():
            raise self.failed(
                check, f"gradients of {sorted(gradients)}, expected those of {sorted(self.params)}."
            )
        cause = "Is it summed over all positions, and over nothing else?"
        self.equal_grads(check, gradients, g, cause)

    def affine(self, rule: AffineRule, num_vectors: int) -> None:
        """The output is `W a + b` with the rows `a` of the rule, and fast paths agree with sums
        over rows.
        """
        module = self.module
        x = rule.input_of(module, *tree_unflatten(self.leaves, self.spec))
        g = self.randn(num_vectors, *self.outputs[0].shape)
        a = rule.rows(module, x)
        b = rule.grad_rows(module, g)
        if isinstance(a, SparseRows) != rule.sparse:
            raise self.failed(
                "rows", f"inputs(...) returned a {type(a).__name__}, with sparse={rule.sparse}."
            )
        # An affine function at the middle of two points is the mean of its values there.
        step = {name: self.randn(*p.shape) for name, p in self.call.params.items()}
        forth = {name: p + step[name] for name, p in self.call.params.items()}
        back = {name: p - step[name] for name, p in self.call.params.items()}
        self.equal(
            "output is affine in the parameters",
            (self.alone(0, forth)[0] + self.alone(0, back)[0]) / 2,
            self.outputs[0][0],
            "The layer is no W a + b: its rule can be a LayerRule, which has no Kronecker factors.",
        )
        gradients = rule.split(module, outer_products(b, a), b)
        self.equal_grads("rows", gradients, [g], "It is the sum of products of rows.")
        fewer = rule.rows(module, x[:-1])
        self.equal(
            "rows of fewer examples",
            _dense(fewer),
            _dense(a)[:-1],
            "Rows of an example must not depend on the others.",
        )
        self.fast_paths(rule, x, g)

    def fast_paths(self, rule: AffineRule, x: Tensor, g: Tensor) -> None:
        """Sums over rows."""

        def compare(name: str, value: Tensor, expected: Tensor, meaning: str) -> None:
            cause = f"This is {meaning}, of the rule's own rows."
            self.equal(f"fast path {name}", value, expected, cause)

        a = rule.rows(self.module, x)
        b = rule.grad_rows(self.module, g)
        rows = _dense(a)
        gram = torch.einsum("bs...i,bs...j->...ij", rows, rows)
        count = a.count() if isinstance(a, SparseRows) else float(rows.shape[0] * rows.shape[1])
        # The plain sums are formed from rows; fast paths may never form them.
        A, row_sum, number = rule.input_gram(self.module, x)
        meaning = "Σ a aᵀ [*b, i, i], of sparse rows its diagonal"
        compare("input_gram", A, gram.diag() if rule.sparse else gram, meaning)
        meaning = "Σ a, the second result of input_gram"
        compare("input_gram", row_sum, rows.sum((0, 1)), meaning)
        meaning = "the number of rows, its third result"
        compare("input_gram", torch.tensor(number), torch.tensor(count), meaning)
        if not rule.sparse:
            compare("mean_inputs", rule.mean_inputs(self.module, x), rows.mean(1), "the mean")
        gram = torch.einsum("vbs...o,vbs...p->...op", b, b)
        compare("grad_gram", rule.grad_gram(self.module, g), gram, "Σ g gᵀ")

    def randn(self, *shape: int) -> Tensor:
        """Random numbers of the check's own generator, on the device of the parameters."""
        device = next(iter(self.params.values())).device
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator, device="cpu").to(
            device
        )

    def failed(self, check: str, reason: str) -> VerificationError:
        """The error of a check."""
        return VerificationError(
            f"{type(self.rule).__name__} of {type(self.module).__name__}, check {check!r}: {reason}"
        )

    def equal_grads(
        self, check: str, gradients: Mapping[str, Tensor], g: list[Tensor], cause: str
    ) -> None:
        """Compare gradients of each example with those of plain autograd, one example at a time."""
        num_vectors, num_examples = g[0].shape[:2]
        expected = self.call.one_by_one(g, slice(0, num_vectors), slice(0, num_examples))
        for name, J in expected.items():
            shape = f"This is {name!r} [vectors, examples, *shape]."
            self.equal(check, gradients[name], J, f"{shape} {cause}")

    def equal(self, check: str, value: Tensor, expected: Tensor, cause: str) -> None:
        """Note the error of a check, or raise if it is too large."""
        if value.shape != expected.shape:
            raise self.failed(
                check, f"shape {list(value.shape)}, expected {list(expected.shape)}. {cause}"
            )
        error = 0.0
        if value.numel():
            expected = expected.detach().double()
            difference = (value.detach().double() - expected).abs().max()
            error = float(difference) / (float(expected.abs().max()) or 1.0)
        if not error <= _TOLERANCE:
            raise self.failed(check, f"off by {error:.1e} relative to the largest entry. {cause}")
        self.rows[check] = max(error, self.rows.get(check, 0.0))


def _size(t: Tensor, axis: int) -> int:
    return t.shape[axis] if t.ndim > axis else 0


def _dense(rows: Tensor | SparseRows) -> Tensor:
    return rows.to_dense() if isinstance(rows, SparseRows) else rows


def _to_double(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t.detach()
