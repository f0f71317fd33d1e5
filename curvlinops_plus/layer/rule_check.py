"""`check_rule`: test a layer rule against autodiff.

A rule is compared with plain autodiff on one example at a time, and its fast paths with the plain sums that they
replace. All is computed in double precision on a copy of the module, with a relative tolerance of 1e-8.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from curvlinops_plus.errors import UnsupportedError, VerificationError
from curvlinops_plus.layer.replay import check_repeatable, differentiable_parameters
from curvlinops_plus.layer.rows import SparseRows
from curvlinops_plus.layer.rule import AffineRule, LayerRule, outer_products
from curvlinops_plus.layer.rule_registry import rule_of, why_generic
from curvlinops_plus.linalg.layout import Layout

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
        return "\n".join([f"{self.rule} of {self.module}", *note, *lines, f"all {len(self.rows)} checks passed"])


def check_rule(
    module: nn.Module,
    *example_input: Any,
    rule: LayerRule | type[LayerRule] | None = None,
    num_vectors: int = 2,
    seed: int = 0,
    **kwargs: Any,
) -> RuleCheck:
    """Compare a layer rule with plain autodiff.

    Checked are per-example gradients, entry by entry, also for other numbers of vectors and examples; of affine rules
    also rows and their fast paths (`stacked_inputs`, `input_gram`, `mean_inputs`, `stacked_grads`, `grad_gram`,
    `sum_grads`). The parameters are used with their values: a zero weight hides errors in its factors.

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

    Cost: several forward and backward passes per example and vector. Intended for small inputs.

    Example:
        >>> print(check_rule(nn.PReLU(), torch.linspace(-2, 2, 6).view(3, 2)))
        PReLURule of PReLU
        no Kronecker factors: PReLURule is no AffineRule
        patterns                                  0.0e+00
        examples are independent                  0.0e+00
        gradients                                 0.0e+00
        gradients, as many vectors as examples    0.0e+00
        gradients, one vector and fewer examples  0.0e+00
        all 5 checks passed
    """
    mine = _double(module)
    note = why_generic(mine) if rule is None else ""
    if rule is None:
        rule = rule_of(mine)
    else:
        rule = rule() if isinstance(rule, type) else rule
        if (reason := rule.refuses(mine)) is not None:
            raise UnsupportedError(f"{type(rule).__name__} refuses {type(module).__name__}: {reason}")
    if not note and not isinstance(rule, AffineRule):
        note = f"{type(rule).__name__} is no AffineRule"
    check_repeatable(mine)
    rule.check(mine)
    args, kwargs = tree_map_only(Tensor, _to_double, (example_input, kwargs))
    with torch.random.fork_rng():
        rows = _Check(mine, rule, args, kwargs, torch.Generator().manual_seed(seed)).everything(num_vectors)
    return RuleCheck(type(module).__name__, type(rule).__name__, note, tuple(rows.items()))


class _Check:
    """All checks of one rule on one call."""

    def __init__(
        self, module: nn.Module, rule: LayerRule, args: Any, kwargs: Mapping[str, Any], generator: torch.Generator
    ) -> None:
        self.module, self.rule, self.generator = module, rule, generator
        self.params, self.rows = differentiable_parameters(module), dict[str, float]()
        if not self.params:
            raise ValueError(f"{type(module).__name__} holds no parameters of its own: there is nothing to check.")
        self.leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        self.axis = int(getattr(module, "batch_first", None) is False)
        tensors = [t for t in self.leaves if isinstance(t, Tensor)]
        if not tensors:
            raise ValueError("check_rule needs an example of the layer's input: check_rule(layer, x).")
        axes = rule.axes(module, self.axis, tensors, inputs=True)
        self.N = N = tensors[0].shape[axes[0]] if tensors[0].ndim > axes[0] else 0
        if N < 2:
            raise ValueError(
                f"check_rule needs at least two examples on axis {axes[0]} of the input, got shape "
                f"{list(tensors[0].shape)}."
            )
        every = iter([a if t.ndim > a and t.shape[a] == N else None for t, a in zip(tensors, axes)])
        #: Axis of the examples of each leaf; None for what all examples share.
        self.axes = [next(every) if isinstance(t, Tensor) else None for t in self.leaves]

    def everything(self, V: int) -> dict[str, float]:
        """The largest error of each check, cheap ones first."""
        N, rule = self.N, self.rule
        patterns = rule.patterns(self.module)
        if patterns.keys() != self.params.keys():
            raise self.failed(
                "patterns",
                f"patterns(module) names {list(patterns)}, but the module holds {list(self.params)}. Give each "
                "parameter a pattern.",
            )
        try:
            Layout(patterns, {name: p.shape for name, p in self.params.items()}, rule.sizes(self.module))
        except ValueError as error:
            raise self.failed("patterns", str(error)) from error
        self.rows["patterns"] = 0.0
        before, outputs = torch.get_rng_state(), [t.detach() for t in self.run(0, N)]
        if not torch.equal(before, torch.get_rng_state()):
            raise UnsupportedError(
                f"{type(self.module).__name__} draws random numbers (dropout in training mode?), so that calling it "
                "again gives another result. Call `module.eval()` first."
            )
        for n in range(N):
            for whole, alone in zip(outputs, self.run(n, n + 1)):
                cause = "The output for one example depends on the others of its batch, or on calls before."
                self.equal("examples are independent", alone, whole[n : n + 1], cause)
        for name, vectors, stop in (
            ("gradients", V, N),
            ("gradients, as many vectors as examples", N, N),
            ("gradients, one vector and fewer examples", 1, N - 1),
        ):
            self.gradients(name, [self.randn(vectors, stop, *t.shape[1:]) for t in outputs])
        if isinstance(rule, AffineRule):
            self.affine(rule, outputs[0], self.randn(V, *outputs[0].shape))
        return self.rows

    def gradients(self, name: str, g: list[Tensor]) -> None:
        """Per-example gradients, against one example at a time."""
        args, kwargs = self.examples(0, g[0].shape[1], examples_first=True)
        given = g[0] if self.single else g
        in_axes = [axis or 0 for t, axis in zip(self.leaves, self.axes) if isinstance(t, Tensor)]
        found = self.called(name, lambda: self.rule.example_grads(self.module, args, kwargs, given, in_axes, self.outs))
        if found.keys() != self.params.keys():
            raise self.failed(name, f"gradients of {sorted(found)}, expected those of {sorted(self.params)}.")
        hint = (
            "Do `inputs` and `grads` list the same positions in the same order, and does `patterns` order rows and "
            "columns as they do?"
            if isinstance(self.rule, AffineRule)
            else "Does it sum over all positions, and over nothing else?"
        )
        for key, expected in self.one_by_one(g).items():
            self.equal(name, found[key], expected, f"This is {key!r} [vectors, examples, *shape]. {hint}")

    def affine(self, rule: AffineRule, out: Tensor, g: Tensor) -> None:
        """The output is `W a + b` with the rows `a` of the rule, and fast paths agree with sums over rows."""
        args, kwargs = self.examples(0, self.N, examples_first=True)
        module, x = self.module, self.called("rows", lambda: rule.input_of(self.module, args, kwargs))
        a, b = self.called("rows", lambda: (rule.rows(module, x), rule.grad_rows(module, g)))
        if isinstance(a, SparseRows) != rule.sparse:
            raise self.failed("rows", f"inputs(...) returned a {type(a).__name__}, with sparse={rule.sparse}.")
        step = {name: self.randn(*p.shape) for name, p in self.params.items()}
        moved = [
            self.run(0, self.N, {name: p.detach() + by * step[name] for name, p in self.params.items()})[0].detach()
            for by in (1.0, -1.0)
        ]
        cause = "The layer is no W a + b: its rule can be a LayerRule, which has no Kronecker factors."
        self.equal("output is affine in the parameters", (moved[0] + moved[1]) / 2, out, cause)
        J = self.called("rows", lambda: rule.split(module, outer_products(b, a), b))
        for key, expected in self.one_by_one([g]).items():
            cause = f"This is {key!r} [vectors, examples, *shape] as the sum of outer products of rows."
            self.equal("rows", J[key], expected, cause)
        cause, fewer = "The rows of an example must not depend on the other examples.", rule.rows(module, x[:-1])
        rows = _dense(a)
        self.equal("rows of fewer examples", _dense(fewer), rows[:-1], cause)
        A, total, count = self.called("fast paths", lambda: rule.input_gram(module, x))
        sparse, number = isinstance(a, SparseRows), float(rows.shape[0] * rows.shape[1])
        gram = rows.square().sum((0, 1)) if sparse else torch.einsum("bs...i,bs...j->...ij", rows, rows)
        if isinstance(a, SparseRows) and a.kept is not None:
            number = float(a.kept.sum())
        for name, fast, expected, what in (
            ("stacked_inputs", lambda: rule.stacked_inputs(module, x), rows.flatten(0, 1), "all rows of the input"),
            ("stacked_grads", lambda: rule.stacked_grads(module, g), b.flatten(0, 2), "all rows of the gradient"),
            ("input_gram", lambda: A, gram, "the diagonal of Σ a aᵀ [i]" if sparse else "Σ a aᵀ [*b, i, i]"),
            ("input_gram", lambda: total, rows.sum((0, 1)), "Σ a, the second result of input_gram"),
            ("input_gram", lambda: torch.tensor(count), torch.tensor(number), "the number of rows, its third result"),
            ("mean_inputs", lambda: None if sparse else rule.mean_inputs(module, x), rows.mean(1), "the mean"),
            ("grad_gram", lambda: rule.grad_gram(module, g), torch.einsum("vbs...o,vbs...p->...op", b, b), "Σ g gᵀ"),
            ("sum_grads", lambda: rule.sum_grads(module, g), b.sum(2), "the sum over positions"),
        ):
            if (got := self.called("fast paths", fast)) is not None:
                self.equal(f"fast path {name}", got, expected, f"This is {what}, of the rule's own rows.")

    # -------------------------------------------------------------------------------------------------- references
    def examples(self, start: int, stop: int, examples_first: bool = False) -> tuple[Any, Any]:
        """Fresh copies of the (args, kwargs) of some examples, on the module's axis or first, as in rules."""
        found = []
        for t, axis in zip(self.leaves, self.axes):
            if axis is not None:
                t = t.narrow(axis, start, stop - start)
                t = t.movedim(axis, 0) if examples_first else t
            found.append(t.clone() if isinstance(t, Tensor) else t)
        return tree_unflatten(found, self.spec)

    def run(self, start: int, stop: int, params: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """Outputs of the module for some examples, examples first."""
        args, kwargs = self.examples(start, stop)
        with torch.enable_grad():
            out = functional_call(self.module, dict(params or {}), args, kwargs)
        self.single = isinstance(out, Tensor)
        leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        self.outs = self.rule.axes(self.module, self.axis, leaves, inputs=False) if leaves else []
        for t, axis in zip(leaves, self.outs):
            if t.ndim <= axis or t.shape[axis] != stop - start:
                raise self.failed(
                    "examples are independent",
                    f"{stop - start} examples gave an output of shape {list(t.shape)}, expected them on axis {axis}. "
                    "If they are elsewhere, override `axes`.",
                )
        if not leaves:
            what = f"the module returned a {type(out).__name__} without floating-point tensors."
            raise self.failed("examples are independent", what)
        return [t.movedim(axis, 0) for t, axis in zip(leaves, self.outs)]

    def one_by_one(self, g: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients of each example [V, B, *shape] by plain autograd."""
        (V, B), leaves = g[0].shape[:2], list(self.params.values())
        result = {name: p.new_zeros(V, B, *p.shape) for name, p in self.params.items()}
        for n in range(B):
            outputs = self.run(n, n + 1)
            parts = [k for k, t in enumerate(outputs) if t.requires_grad]
            for v in range(V if parts else 0):
                back = [g[k][v, n : n + 1].to(outputs[k].dtype) for k in parts]
                fs = [outputs[k] for k in parts]
                found = torch.autograd.grad(fs, leaves, back, retain_graph=True, materialize_grads=True)
                for J, found_here in zip(result.values(), found):
                    J[v, n] = found_here.to_dense()
        return result

    def randn(self, *shape: int) -> Tensor:
        """Random numbers of the check's own generator, on the device of the parameters."""
        device = next(iter(self.params.values())).device
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator).to(device)

    # --------------------------------------------------------------------------------------------------- verdicts
    def called(self, name: str, call: Callable[[], Any]) -> Any:
        """What the rule returns; its errors are failed checks."""
        try:
            return call()
        except UnsupportedError:
            raise
        except Exception as error:
            raise self.failed(name, f"the rule raised {type(error).__name__}: {error}") from error

    def failed(self, name: str, what: str) -> VerificationError:
        """The error of a check."""
        return VerificationError(f"{type(self.rule).__name__} of {type(self.module).__name__}, check {name!r}: {what}")

    def equal(self, name: str, got: Tensor, expected: Tensor, cause: str) -> None:
        """Store the error of a check, or raise if it is too large."""
        if got.shape != expected.shape:
            raise self.failed(name, f"shape {list(got.shape)}, expected {list(expected.shape)}. {cause}")
        got, expected = got.detach().double(), expected.detach().double()
        size = float(expected.abs().max()) if expected.numel() else 1.0
        error = float((got - expected).abs().max()) / (size or 1.0) if got.numel() else 0.0
        if not error <= _TOLERANCE:
            raise self.failed(name, f"off by {error:.1e} relative to the largest entry. {cause}")
        self.rows[name] = max(error, self.rows.get(name, 0.0))


def _dense(rows: Tensor | SparseRows) -> Tensor:
    return rows.to_dense() if isinstance(rows, SparseRows) else rows


def _to_double(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t.detach()


def _double(module: nn.Module) -> nn.Module:
    """A copy in double precision, whose own parameters require gradients."""
    # Old weight normalization keeps a computed weight in an attribute, which deepcopy refuses.
    tensors = [t for m in module.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    mine = copy.deepcopy(module, {id(t): t.detach().clone() for t in tensors}).double()
    own = differentiable_parameters(mine)
    known = {id(p) for p in own.values()}
    for name, m in mine.named_modules():
        for key, value in vars(m).items():
            if isinstance(value, Tensor):
                setattr(m, key, _to_double(value))
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            m.scale_grad_by_freq = False  # rescales gradients by frequencies in the batch: not a derivative
        if name and not name.startswith("parametrizations"):
            for key, p in m._parameters.items():
                if id(p) in known:  # a child that shares a parameter gets a copy: only the module's own use is checked
                    assert p is not None
                    m._parameters[key] = nn.Parameter(p.detach().clone())
    for p in own.values():
        p.requires_grad_()
    return mine
