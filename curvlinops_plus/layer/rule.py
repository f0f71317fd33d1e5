"""Rules that say what a layer saw, and the registry that finds the rule of a module.

A rule turns what was recorded for a layer, its inputs and the gradients of its output, into what the layer's parameters
have to do with it. `LayerRule` gives per-example gradients for any module. `AffineRule` is for layers whose output is
`W a + b`, the ones Kronecker factors are made for: a subclass states three facts and inherits the rest.

Shapes, here and in the files of this folder:

    x   [B, *in]        the layer's input, B examples in dimension 0
    g   [V, B, *out]    gradients of the layer's output for V vectors sent back
    a   [B, S, i]       rows: what W is multiplied with, S positions that share W, no column of ones for the bias
    J   [V, B, *shape]  per-example gradients of one parameter

Half-precision inputs and gradients are converted to float32 before they are multiplied or summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from curvlinops_plus.layer.replay import at_least_float32, differentiable_parameters, replay_per_example
from curvlinops_plus.linalg.numerics import gram

__all__ = ["RULES", "AffineRule", "LayerRule", "register_rule", "rule_of", "why_generic"]


class LayerRule:
    """Per-example gradients of any module that treats its examples (dimension 0) independently.

    This is the rule of every layer that has no other: it runs the module again for each example. Register a subclass
    with `register_rule` for a layer that can say the same with less work.

    Attributes:
        max_bytes: Work memory that one call of `per_example_grads` aims at, on top of its result (default 64 MiB).

    Example:
        >>> rule, layer = rule_of(nn.PReLU()), nn.PReLU()
        >>> rule.patterns(layer)
        {'weight': 'd0 -> 1 (d0)'}
        >>> g = torch.ones(1, 2, 3)
        >>> rule.per_example_grads(layer, (torch.tensor([[-1.0, 2, -3], [4, 5, -6]]),), {}, g)["weight"]
        tensor([[[-4.],
                 [-6.]]])
    """

    max_bytes: int = 64 * 2**20

    def refuses(self, module: nn.Module) -> str | None:
        """Say why this rule does not fit a module of the registered type, or `None` if it does.

        The module then gets the generic rule. Override it for options of a layer that the rule cannot express.
        """
        return None

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """How each direct parameter is part of the layer's one matrix: an einops pattern per local name.

        The default is a matrix with one row that holds all parameters side by side.
        """
        return {name: _flat_pattern(p.ndim) for name, p in differentiable_parameters(module).items()}

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B, *out] -> {name: [V, B, *shape]}
        """Gradients of each example for the module's direct parameters, for V vectors at the output.

        The module may have any inputs and parameters (frozen ones too), may contain other modules, and is left as
        found. It is run with one example at a time, under `torch.func.vmap` if possible, else in a plain loop (V·B
        backward passes; for modules with in-place writes, control flow or operations that vmap does not know).

        Args:
            module: The layer.
            args: Positional inputs of its call: tensors whose dimension 0 has size B hold one entry per example (also
                inside tuples, lists and dicts), everything else is the same for all examples.
            kwargs: Keyword inputs of its call, likewise.
            g: Gradients of the output, `[V, B, *out]`.

        Returns:
            Local name of each direct parameter to gradients `[V, B, *shape]`, in float32 at least.

        Raises:
            UnsupportedError: If the module mixes examples, draws random numbers or does not return one tensor.
            ValueError: If the output of one example does not fit its gradient.
        """
        return replay_per_example(module, args, kwargs, g, self.max_bytes)


class AffineRule(LayerRule):
    """Rule of a layer whose output is `W a` or `W a + b`: state three facts, inherit the rest.

    `patterns` names the weight, with the pattern that turns it into the matrix `W [o, i]`, and after it `"bias"` with
    the pattern `"o -> o 1"` if the layer has one. `inputs` gives the rows `a` and `grads` the rows of the output
    gradient. The other methods follow; override them where a layer can do it faster.

    Example:
        >>> class Transposed(nn.Module):  # y = x @ kernel, kernel [i, o]
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.kernel = nn.Parameter(torch.ones(3, 2))
        ...     def forward(self, x):
        ...         return x @ self.kernel
        >>> @register_rule(Transposed)
        ... class TransposedRule(AffineRule):
        ...     def patterns(self, module):
        ...         return {"kernel": "i o -> o i"}
        ...     def inputs(self, module, x):
        ...         return x[:, None]
        ...     def grads(self, module, g):
        ...         return g[:, :, None]
        >>> layer, x, g = Transposed(), torch.ones(5, 3), torch.ones(1, 5, 2)
        >>> rule_of(layer).per_example_grads(layer, (x,), {}, g)["kernel"].shape
        torch.Size([1, 5, 3, 2])
    """

    def patterns(self, module: nn.Module) -> dict[str, str]:
        """The weight's pattern, e.g. `"o i -> o i"`, then `"bias": "o -> o 1"` if the layer has a bias."""
        raise NotImplementedError(f"{type(self).__name__} must define patterns(module), e.g. {{'W': 'o i -> o i'}}.")

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *in] -> [B, S, i]
        """The rows that the weight is multiplied with, without a column of ones."""
        raise NotImplementedError(f"{type(self).__name__} must define inputs(module, x), [B, *in] -> [B, S, i].")

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, *out] -> [V, B, S, o]
        """The output gradient, one row for each row of `inputs`."""
        raise NotImplementedError(f"{type(self).__name__} must define grads(module, g), [V, B, *out] -> [V, B, S, o].")

    def input_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The `x` among the inputs of a call: the first positional input, or else the first keyword.

        Raises:
            ValueError: If that is not a tensor.
        """
        x = next(iter([*args, *kwargs.values()]), None)
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{type(self).__name__} expects a tensor as first input of the layer, got {type(x).__name__}. Override "
                "`input_of` if the layer takes its input elsewhere."
            )
        return x

    def input_gram(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, int]:  # [B, *in] -> [i, i], [i], B·S
        """Sum of `a aᵀ` over all rows, sum of `a`, and the number of rows."""
        rows = self._inputs(module, x).flatten(0, 1)
        return gram(rows), rows.sum(0), len(rows)

    def mean_inputs(self, module: nn.Module, x: Tensor) -> Tensor:  # [B, *in] -> [B, i]
        """Mean of `a` over the positions of each example."""
        return self._inputs(module, x).mean(1)

    def grad_gram(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, *out] -> [o, o]
        """Sum of `g gᵀ` over all V·B·S rows."""
        return gram(self._grads(module, g).flatten(0, 2))

    def sum_grads(self, module: nn.Module, g: Tensor) -> Tensor:  # [V, B, *out] -> [V, B, o]
        """Sum of `g` over the positions of each example."""
        return self._grads(module, g).sum(2)

    def per_example_grads(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], g: Tensor
    ) -> dict[str, Tensor]:  # g: [V, B, *out] -> {name: [V, B, *shape]}
        """Gradients of each example, `Σ_s g aᵀ` for the weight and `Σ_s g` for the bias.

        Args:
            module: The layer.
            args: Positional inputs of its call.
            kwargs: Keyword inputs of its call.
            g: Gradients of the output, `[V, B, *out]`.

        Returns:
            Local name of each parameter to gradients `[V, B, *shape]`, in float32 at least.

        Raises:
            ValueError: If inputs and gradients do not fit together.
        """
        a, rows = self._inputs(module, self.input_of(args, kwargs)), self._grads(module, g)
        if a.shape[:2] != rows.shape[1:3]:
            raise ValueError(
                f"{type(module).__name__}: inputs have {a.shape[0]} examples of {a.shape[1]} positions, output "
                f"gradients have {rows.shape[1]} of {rows.shape[2]}. They must come from the same call of the layer."
            )
        dtype = torch.promote_types(a.dtype, rows.dtype)
        return self._split(module, _sum_of_outer_products(rows.to(dtype), a.to(dtype)), rows)

    def _split(self, module: nn.Module, J: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Cut the columns of `J [V, B, o, i]` into parameters, and add the bias."""
        named, start = {}, 0
        for name, pattern in self.patterns(module).items():
            shape = getattr(module, name).shape
            if name == "bias":
                named[name] = _to_parameter(rows.sum(2)[..., None], pattern, shape)
                continue
            columns = prod(shape) // J.shape[2]
            named[name] = _to_parameter(J[..., start : start + columns], pattern, shape)
            start += columns
        if start != J.shape[3]:
            raise ValueError(
                f"{type(self).__name__}: inputs(...) has {J.shape[3]} columns, but the parameters of patterns(...) "
                f"without the bias have {start}."
            )
        return named

    def _inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        """`inputs` in float32 at least, with its shape checked: [B, S, i]."""
        a = at_least_float32(self.inputs(module, at_least_float32(x)))
        if a.ndim != 3 or a.shape[0] != x.shape[0]:
            raise ValueError(
                f"{type(self).__name__}.inputs returned shape {tuple(a.shape)}, expected [B, S, i] with B = "
                f"{x.shape[0]} for x of shape {tuple(x.shape)}."
            )
        return a

    def _grads(self, module: nn.Module, g: Tensor) -> Tensor:
        """`grads` in float32 at least, with its shape checked: [V, B, S, o]."""
        rows = at_least_float32(self.grads(module, at_least_float32(g)))
        if rows.ndim != 4 or rows.shape[:2] != g.shape[:2]:
            raise ValueError(
                f"{type(self).__name__}.grads returned shape {tuple(rows.shape)}, expected [V, B, S, o] with V, B = "
                f"{tuple(g.shape[:2])} for g of shape {tuple(g.shape)}."
            )
        return rows


RULES: dict[type[nn.Module], LayerRule] = {}
"""Module type to its rule. `register_rule` adds to it."""

_Rule = TypeVar("_Rule", bound=type[LayerRule])


def register_rule(*types: type[nn.Module]) -> Callable[[_Rule], _Rule]:
    """Class decorator that makes a `LayerRule` the rule of some module types and of their subclasses.

    A subclass with a `forward` of its own is not taken for its parent. Registering a type again replaces its rule.

    Args:
        *types: One or more subclasses of `nn.Module`.

    Raises:
        TypeError: If something else than module types is given, or something else than a rule is decorated.

    Example:
        >>> class MyLinear(nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> rule_of(MyLinear(3, 2)).__class__.__name__
        'LayerRule'
        >>> @register_rule(MyLinear)
        ... class MyLinearRule(AffineRule):
        ...     def patterns(self, module):
        ...         return {"weight": "o i -> o i", "bias": "o -> o 1"}
        ...     def inputs(self, module, x):
        ...         return x[:, None]
        ...     def grads(self, module, g):
        ...         return 2 * g[:, :, None]
        >>> rule_of(MyLinear(3, 2)).__class__.__name__
        'MyLinearRule'
    """
    wrong = [t for t in types if not (isinstance(t, type) and issubclass(t, nn.Module))]
    if not types or wrong:
        raise TypeError(
            f"register_rule expects module types, got {wrong if types else 'nothing'}. Write `@register_rule(MyLayer)` "
            "above `class MyLayerRule(AffineRule)`."
        )

    def register(rule: _Rule) -> _Rule:
        if not (isinstance(rule, type) and issubclass(rule, LayerRule)):
            raise TypeError(f"@register_rule decorates a subclass of LayerRule or AffineRule, got {rule!r}.")
        instance = rule()
        RULES.update(dict.fromkeys(types, instance))
        return rule

    return register


def rule_of(module: nn.Module) -> LayerRule:
    """The rule of a module: that of its type or nearest base type, or else the generic `LayerRule`.

    A rule is used only if the module computes what its type does: with the type's own `forward`, with parameters that
    are its own (no weight normalization, no parametrization) and with options that the rule can express.
    `why_generic` says what stood in the way.

    Raises:
        ValueError: If `patterns` of the rule names something that the module does not have.

    Example:
        >>> rule_of(nn.Linear(3, 2)).patterns(nn.Linear(3, 2))
        {'weight': 'o i -> o i', 'bias': 'o -> o 1'}
    """
    found = _find(module)
    return GENERIC if isinstance(found, str) else found


def why_generic(module: nn.Module) -> str:
    """One sentence that says why a module has only the generic rule; empty if it has one of its own.

    Example:
        >>> why_generic(nn.PReLU())
        'no rule is registered for PReLU: add one with @register_rule(PReLU)'
    """
    found = _find(module)
    return found if isinstance(found, str) else ""


GENERIC = LayerRule()


def _find(module: nn.Module) -> LayerRule | str:
    """The registered rule that fits the module, or the reason why there is none."""
    kind = type(module)
    registered = next((t for t in kind.__mro__ if t in RULES), None)
    if registered is None:
        return f"no rule is registered for {kind.__name__}: add one with @register_rule({kind.__name__})"
    rule = RULES[registered]
    if kind.forward is not registered.forward or kind.__call__ is not registered.__call__ or "forward" in vars(module):
        return f"this {kind.__name__} has another `forward` than {registered.__name__}: add a rule with @register_rule"
    if (reason := rule.refuses(module)) is not None:
        return reason
    direct, named = dict(module.named_parameters(recurse=False)), rule.patterns(module)
    if missing := [name for name in named if not hasattr(module, name)]:
        raise ValueError(
            f"{type(rule).__name__}.patterns names {missing}, but {kind.__name__} has the parameters {list(direct)}. "
            "Use the names of the parameters in the module."
        )
    if direct.keys() != named.keys():
        return (
            f"this {kind.__name__} holds the parameters {list(direct)}, expected {list(named)} (is one of them "
            "computed from others, as by weight normalization?)"
        )
    return rule


def _flat_pattern(ndim: int) -> str:
    axes = " ".join(f"d{k}" for k in range(ndim))
    return f"{axes} -> 1 ({axes})" if ndim else "-> 1 1"


def _sum_of_outer_products(g: Tensor, a: Tensor) -> Tensor:  # [V, B, S, o], [B, S, i] -> [V, B, o, i]
    if a.shape[1] == 1:  # products with one summand: a multiplication is faster than batched matrix products
        return g.mT * a
    return torch.einsum("vbso,bsi->vboi", g, a)


def _to_parameter(J: Tensor, pattern: str, shape: torch.Size) -> Tensor:  # [*lead, o, i] -> [*lead, *shape]
    """Read a parameter's pattern backwards."""
    tensor, matrix = (side.strip() for side in pattern.split("->"))
    sizes = {axis: n for axis, n in zip(tensor.split(), shape, strict=False) if axis.isidentifier()}
    return rearrange(J, f"... {matrix} -> ... {tensor}", **sizes)
