"""The registry of layer rules: which rule a module has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from torch import nn

from curvlinops_plus.layer.replay import differentiable_parameters
from curvlinops_plus.layer.rule import LayerRule

RULES: dict[type[nn.Module] | str, LayerRule] = {}
"""Module type, or its full name, to its rule. `register_rule` adds to it."""

_Rule = TypeVar("_Rule", bound=type[LayerRule])


def register_rule(*types: type[nn.Module] | str) -> Callable[[_Rule], _Rule]:
    """Class decorator that makes a `LayerRule` the rule of some module types and of their subclasses.

    Subclasses with a `forward` of their own are excluded. Registering a type again replaces its rule.

    Args:
        *types: One or more subclasses of `nn.Module`, or their full names, such as
            `"transformers.pytorch_utils.Conv1D"`, for types of libraries that need not be imported.

    Raises:
        TypeError: If the arguments are not module types, or the decorated class is not a rule.

    Example:
        >>> from curvlinops_plus.layer import AffineRule
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
    wrong = [t for t in types if not (_is_full_name(t) or (isinstance(t, type) and issubclass(t, nn.Module)))]
    if not types or wrong:
        raise TypeError(
            f"register_rule expects module types or their full names, got {wrong if types else 'nothing'}. Write "
            "`@register_rule(MyLayer)` above `class MyLayerRule(AffineRule)`."
        )

    def register(rule: _Rule) -> _Rule:
        if not (isinstance(rule, type) and issubclass(rule, LayerRule)):
            raise TypeError(f"@register_rule decorates a subclass of LayerRule or AffineRule, got {rule!r}.")
        instance = rule()
        RULES.update(dict.fromkeys(types, instance))
        return rule

    return register


def rule_of(module: nn.Module, held: Mapping[str, nn.Parameter] | None = None) -> LayerRule:
    """The rule of a module: that of its type or nearest base type, or else the generic `LayerRule`.

    A rule is used only if the module computes what its type does: with the type's own `forward`, with parameters that
    are its own (no weight normalization, no parametrization) and with options that the rule supports.
    `why_generic` gives the reason otherwise. `held` are its `differentiable_parameters`, if somebody has looked.

    Raises:
        ValueError: If `patterns` of the rule names something that the module does not have.

    Example:
        >>> rule_of(nn.Linear(3, 2)).patterns(nn.Linear(3, 2))
        {'weight': 'o i -> o i', 'bias': 'o -> o 1'}
    """
    found = _find(module, held)
    return GENERIC if isinstance(found, str) else found


def why_generic(module: nn.Module) -> str:
    """Why a module has only the generic rule, in one sentence; empty if it has one of its own.

    Example:
        >>> why_generic(nn.Softplus())
        'no rule is registered for Softplus: add one with @register_rule(Softplus)'
    """
    found = _find(module)
    return found if isinstance(found, str) else ""


GENERIC = LayerRule()


def _find(module: nn.Module, held: Mapping[str, nn.Parameter] | None = None) -> LayerRule | str:
    """The registered rule that fits the module, or the reason why there is none."""
    kind = type(module)
    keys = _keys(kind)
    key = next(filter(RULES.__contains__, keys), None)
    if key is None:
        return f"no rule is registered for {kind.__name__}: add one with @register_rule({kind.__name__})"
    rule, registered = RULES[key], keys[key]
    if (kind.forward, kind.__call__) != (registered.forward, registered.__call__) or "forward" in module.__dict__:
        return f"this {kind.__name__} has another `forward` than {registered.__name__}: add a rule with @register_rule"
    if (reason := rule.refuses(module)) is not None:
        return reason
    # Of a parametrized module, `weight` is computed from other parameters, which the module holds instead.
    direct, named = differentiable_parameters(module) if held is None else held, rule.patterns(module)
    if direct.keys() != named.keys():
        if missing := [name for name in named if name not in direct and not hasattr(module, name)]:
            raise ValueError(
                f"{type(rule).__name__}.patterns names {missing}, but {kind.__name__} has the parameters "
                f"{list(direct)}. Use the names of the parameters in the module."
            )
        return (
            f"this {kind.__name__} holds the parameters {list(direct)}, expected {list(named)} (is one of them "
            "computed from others, as by weight normalization?)"
        )
    return rule


@lru_cache(1024)
def _keys(kind: type[nn.Module]) -> dict[type | str, type]:
    """Under what a rule may be registered that a type of module has, the nearest base type first."""
    return {key: t for t in kind.__mro__ for key in (t, f"{t.__module__}.{t.__qualname__}")}


def _is_full_name(t: Any) -> bool:
    return isinstance(t, str) and "." in t and all(part.isidentifier() for part in t.split("."))
