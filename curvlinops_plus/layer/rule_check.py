"""`check_rule`: test a layer rule against autodiff.

A rule is compared with plain autodiff on one example at a time, and its fast paths with the plain
sums that they replace. All is computed in double precision on a copy of the module, with a relative
tolerance of 1e-8.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from curvlinops_plus.errors import UnsupportedError, VerificationError
from curvlinops_plus.layer.registry import rule_of, why_generic
from curvlinops_plus.layer.replay import (
    Call,
    attributes_restored,
    check_repeatable,
    differentiable_parameters,
)
from curvlinops_plus.layer.rows import SparseRows
from curvlinops_plus.layer.rule import AffineRule, LayerRule, outer_products
from curvlinops_plus.linalg.space import Layout

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
        width = max(len(name) for name, _ in self.rows)
        note = [f"no Kronecker factors: {self.note}"] if self.note else []
        lines = [f"{name.ljust(width)}  {error:.1e}" for name, error in self.rows]
        return "\n".join(
            [f"{self.rule} of {self.module}", *note, *lines, f"all {len(self.rows)} checks passed"]
        )


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
    # Old weight normalization keeps a computed weight in an attribute, which deepcopy refuses.
    kept = [t for m in module.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    mine = copy.deepcopy(module, {id(t): _to_double(t).clone() for t in kept}).double()
    note = why_generic(mine) if rule is None else ""
    rule = rule_of(mine) if rule is None else rule() if isinstance(rule, type) else rule
    if (reason := rule.refuses(mine)) is not None:
        raise UnsupportedError(f"{type(rule).__name__} refuses {type(module).__name__}: {reason}")
    if not note and not isinstance(rule, AffineRule):
        note = f"{type(rule).__name__} is no AffineRule"
    check_repeatable(mine)
    rule.check(mine)
    args, kwargs = tree_map_only(Tensor, _to_double, (example_input, kwargs))
    with torch.random.fork_rng(), attributes_restored(mine):
        check = _Check(mine, rule, args, kwargs, seed)
        check.gradients(num_vectors)
        if isinstance(rule, AffineRule):
            check.affine(rule, num_vectors)
    return RuleCheck(type(module).__name__, type(rule).__name__, note, tuple(check.rows.items()))


class _Check:
    """All checks of one rule on one call; `rows` has the largest error of each."""

    def __init__(
        self, module: nn.Module, rule: LayerRule, args: Any, kwargs: Mapping[str, Any], seed: int
    ) -> None:
        self.module, self.rule, self.generator = module, rule, torch.Generator().manual_seed(seed)
        self.params, self.rows = differentiable_parameters(module), {"patterns": 0.0}
        if not self.params:
            raise ValueError(
                f"{type(module).__name__} holds no parameters of its own: there is nothing to "
                "check."
            )
        try:
            Layout(
                rule.patterns(module),
                {name: p.shape for name, p in self.params.items()},
                rule.sizes(module),
            )
        except (ValueError, KeyError) as error:
            raise self.failed(
                "patterns", f"{error} (of the parameters {list(self.params)})"
            ) from error
        leaves, self.spec = tree_flatten((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        axis = int(getattr(module, "batch_first", None) is False)
        axes = rule.axes(module, axis, tensors, inputs=True) if tensors else []
        self.N = N = tensors[0].shape[axes[0]] if tensors and tensors[0].ndim > axes[0] else 0
        if N < 2:
            raise ValueError(
                "check_rule needs a call of the layer with two examples at least: "
                "check_rule(layer, x)."
            )
        #: Axis of the examples of each tensor in the module; None for what all examples share.
        self.in_axes = [
            a if t.ndim > a and t.shape[a] == N else None for t, a in zip(tensors, axes)
        ]
        copies, named = tree_map_only(Tensor, torch.clone, (args, kwargs))
        with torch.no_grad():
            out = module(*copies, **named)
        found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        self.out_axes = rule.axes(module, axis, found, inputs=False) if found else []
        if not found or any(t.ndim <= a or t.shape[a] != N for t, a in zip(found, self.out_axes)):
            raise self.failed(
                "examples are independent",
                f"{N} examples gave outputs of shapes {[list(t.shape) for t in found]}, expected "
                f"floating-point tensors with the examples on axis {axis}. If they are elsewhere, "
                "override `axes`.",
            )
        self.single = isinstance(out, Tensor)
        self.outputs = [t.movedim(a, 0) for t, a in zip(found, self.out_axes)]
        # Examples first, as rules get them.
        first = iter([t if a is None else t.movedim(a, 0) for t, a in zip(tensors, self.in_axes)])
        self.leaves = [next(first) if isinstance(t, Tensor) else t for t in leaves]
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        self.call = Call(module, args, kwargs, N, self.in_axes, self.out_axes)

    def alone(self, n: int, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs of the module for one example."""
        with torch.no_grad():
            inputs = [self.call.leaves[i][n] for i in self.call.per_example]
            return self.call.run(params, inputs, [t.shape[1:] for t in self.outputs])

    def gradients(self, V: int) -> None:
        """Outputs and gradients of single examples."""
        N, name = self.N, "examples are independent"
        for n in range(N):
            for whole, one in zip(self.outputs, self.alone(n, self.call.params)):
                cause = (
                    "An output depends on other examples, calls before or random numbers "
                    "(`module.eval()` first)."
                )
                self.equal(name, one, whole[n], cause)
        for name, vectors, stop in (
            ("gradients", V, N),
            ("gradients, one vector and fewer examples", 1, N - 1),
        ):
            g, axes = (
                [self.randn(vectors, stop, *t.shape[1:]) for t in self.outputs],
                iter(self.in_axes),
            )
            some = [
                t[:stop].clone() if isinstance(t, Tensor) and next(axes) is not None else t
                for t in self.leaves
            ]
            (args, kwargs), given = tree_unflatten(some, self.spec), [t.clone() for t in g]
            given = given[0] if self.single else given
            found = self.rule.example_grads(
                self.module, args, kwargs, given, self.in_axes, self.out_axes
            )
            if found.keys() != self.params.keys():
                raise self.failed(
                    name, f"gradients of {sorted(found)}, expected those of {sorted(self.params)}."
                )
            self.equal_grads(
                name, found, g, "Is it summed over all positions, and over nothing else?"
            )

    def affine(self, rule: AffineRule, V: int) -> None:
        """The output is `W a + b` with the rows `a` of the rule, and fast paths agree with sums
        over rows.
        """
        module, x = self.module, rule.input_of(self.module, *tree_unflatten(self.leaves, self.spec))
        g = self.randn(V, *self.outputs[0].shape)
        a, b = rule.rows(module, x), rule.grad_rows(module, g)
        if isinstance(a, SparseRows) != rule.sparse:
            raise self.failed(
                "rows", f"inputs(...) returned a {type(a).__name__}, with sparse={rule.sparse}."
            )
        step = {name: self.randn(*p.shape) for name, p in self.call.params.items()}
        one, other = (
            self.alone(0, {name: p + by * step[name] for name, p in self.call.params.items()})[0]
            for by in (1, -1)
        )
        cause = (
            "The layer is no W a + b: its rule can be a LayerRule, which has no Kronecker factors."
        )
        self.equal(
            "output is affine in the parameters", (one + other) / 2, self.outputs[0][0], cause
        )
        self.equal_grads(
            "rows",
            rule.split(module, outer_products(b, a), b),
            [g],
            "It is the sum of products of rows.",
        )
        rows, fewer = (
            t.to_dense() if isinstance(t, SparseRows) else t for t in (a, rule.rows(module, x[:-1]))
        )
        self.equal(
            "rows of fewer examples",
            fewer,
            rows[:-1],
            "Rows of an example must not depend on the others.",
        )
        A, total, count = rule.input_gram(module, x)
        gram = torch.einsum("bs...i,bs...j->...ij", rows, rows)
        number = a.count() if isinstance(a, SparseRows) else float(rows.shape[0] * rows.shape[1])
        for name, got, expected, what in (
            (
                "input_gram",
                A,
                gram.diag() if rule.sparse else gram,
                "Σ a aᵀ [*b, i, i], of sparse rows its diagonal",
            ),
            ("input_gram", total, rows.sum((0, 1)), "Σ a, the second result of input_gram"),
            (
                "input_gram",
                torch.tensor(count),
                torch.tensor(number),
                "the number of rows, its third result",
            ),
            (
                "mean_inputs",
                None if rule.sparse else rule.mean_inputs(module, x),
                rows.mean(1),
                "the mean",
            ),
            (
                "grad_gram",
                rule.grad_gram(module, g),
                torch.einsum("vbs...o,vbs...p->...op", b, b),
                "Σ g gᵀ",
            ),
        ):
            if got is not None:
                self.equal(
                    f"fast path {name}", got, expected, f"This is {what}, of the rule's own rows."
                )

    def randn(self, *shape: int) -> Tensor:
        """Random numbers of the check's own generator, on the device of the parameters."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator).to(
            next(iter(self.params.values()))
        )

    def failed(self, name: str, what: str) -> VerificationError:
        """The error of a check."""
        return VerificationError(
            f"{type(self.rule).__name__} of {type(self.module).__name__}, check {name!r}: {what}"
        )

    def equal_grads(
        self, name: str, found: Mapping[str, Tensor], g: list[Tensor], cause: str
    ) -> None:
        """Compare gradients of each example with those of plain autograd, one example at a time."""
        for key, J in self.call.one_by_one(g, slice(0, len(g[0])), slice(0, g[0].shape[1])).items():
            self.equal(name, found[key], J, f"This is {key!r} [vectors, examples, *shape]. {cause}")

    def equal(self, name: str, got: Tensor, expected: Tensor, cause: str) -> None:
        """Note the error of a check, or raise if it is too large."""
        if got.shape != expected.shape:
            raise self.failed(
                name, f"shape {list(got.shape)}, expected {list(expected.shape)}. {cause}"
            )
        got, expected = got.detach().double(), expected.detach().double()
        size = float(expected.abs().max()) if expected.numel() else 1.0
        error = float((got - expected).abs().max()) / (size or 1.0) if got.numel() else 0.0
        if not error <= _TOLERANCE:
            raise self.failed(name, f"off by {error:.1e} relative to the largest entry. {cause}")
        self.rows[name] = max(error, self.rows.get(name, 0.0))


def _to_double(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t.detach()
