"""Which rule a module has: `register_rule` gives one to a type of module, `rule_of` finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

from torch import nn

from curvlinops_plus.layer.replay import differentiable_parameters, is_parametrized
from curvlinops_plus.layer.rule import GENERIC, LayerRule

RULES: dict[type[nn.Module] | str, LayerRule] = {}
"""Module type, or its full name, to its rule. `register_rule` adds to it."""

_Rule = TypeVar("_Rule", bound=type[LayerRule])


def register_rule(*types: type[nn.Module] | str) -> Callable[[_Rule], _Rule]:
    """Class decorator that makes a `LayerRule` the rule of some module types and of their
    subclasses.

    Subclasses with a `forward` of their own are excluded. Registering a type again replaces its
    rule.

    Args:
        *types: One or more subclasses of `nn.Module`, or their full names, such as
            `"transformers.pytorch_utils.Conv1D"`, for types of libraries that need not be imported.

    Raises:
        TypeError: If the arguments are not module types, or the decorated class is not a rule.

    Example:
        >>> class MyLinear(nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> rule_of(MyLinear(3, 2)).__class__.__name__
        'LayerRule'
        >>> from curvlinops_plus.layer import AffineRule
        >>> @register_rule(MyLinear)
        ... class MyLinearRule(AffineRule):
        ...     def patterns(self, module):
        ...         return {"weight": "o i -> o i", "bias": "o -> o 1"}
        ...
        ...     def inputs(self, module, x):
        ...         return x[:, None]
        ...
        ...     def grads(self, module, g):
        ...         return 2 * g[:, :, None]
        >>> rule_of(MyLinear(3, 2)).__class__.__name__
        'MyLinearRule'
    """
    wrong = [t for t in types if not _can_be_registered(t)]
    if not types or wrong:
        raise TypeError(
            "register_rule expects module types or their full names, got "
            f"{wrong if types else 'nothing'}. Write `@register_rule(MyLayer)` above `class "
            "MyLayerRule(AffineRule)`."
        )

    def register(rule: _Rule) -> _Rule:
        if not (isinstance(rule, type) and issubclass(rule, LayerRule)):
            raise TypeError(
                f"@register_rule decorates a subclass of LayerRule or AffineRule, got {rule!r}."
            )
        RULES.update(dict.fromkeys(types, rule()))
        return rule

    return register


def rule_of(module: nn.Module, held: Mapping[str, nn.Parameter] | None = None) -> LayerRule:
    """The rule of a module: that of its type or nearest base type, or else the generic `LayerRule`.

    A rule is used only if the module computes what its type does: with the type's own `forward`,
    with parameters that are its own (no weight normalization, no parametrization) and with options
    that the rule supports. `why_generic` gives the reason otherwise. `held` are its
    `differentiable_parameters`, if somebody has looked.

    Raises:
        ValueError: If `patterns` of the rule names something that the module does not have.

    Example:
        >>> rule_of(nn.Linear(3, 2)).patterns(nn.Linear(3, 2))
        {'weight': 'o i -> o i', 'bias': 'o -> o 1'}
    """
    rule = _find_rule(module, held)
    return GENERIC if isinstance(rule, str) else rule


def why_generic(module: nn.Module) -> str:
    """Why a module has only the generic rule, in one sentence; empty if it has one of its own.

    Example:
        >>> why_generic(nn.Softplus())
        'no rule is registered for Softplus: add one with @register_rule(Softplus)'
    """
    reason = _find_rule(module)
    return reason if isinstance(reason, str) else ""


def _find_rule(
    module: nn.Module, held: Mapping[str, nn.Parameter] | None = None
) -> LayerRule | str:
    """The registered rule that fits the module, or the reason why there is none."""
    kind = type(module)
    # The nearest of its base types that is registered.
    key = next((key for key in _keys(kind) if key in RULES), None)
    if key is None:
        path = f"{kind.__module__}.{kind.__qualname__}"
        path = kind.__name__ if path.startswith("torch.") else path
        return f"no rule is registered for {path}: add one with @register_rule({kind.__name__})"
    base = _keys(kind)[key]
    # A subclass that computes something else has no rule.
    same_forward = kind.forward is base.forward and kind.__call__ is base.__call__
    if not same_forward or "forward" in vars(module):
        return (
            f"this {kind.__name__} has another `forward` than {base.__name__}: add a rule with "
            "@register_rule"
        )
    rule = RULES[key]
    reason = rule.refuses(module)
    if reason is not None:
        return reason
    parameters = differentiable_parameters(module) if held is None else held
    computed = _computed(module, parameters)
    # The default patterns are of whatever parameters there are.
    if computed and type(rule).patterns is not LayerRule.patterns:
        return (
            f"this {kind.__name__} computes {computed} from the parameters {list(parameters)}, as "
            "by weight normalization"
        )
    expected = rule.patterns(module)
    if parameters.keys() == expected.keys():
        return rule
    missing = [name for name in expected if name not in parameters and not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"{type(rule).__name__}.patterns names {missing}, but {kind.__name__} has the "
            f"parameters {list(parameters)}. Use the names of the parameters in the module."
        )
    return (
        f"this {kind.__name__} holds the parameters {list(parameters)}, expected {list(expected)} "
        "(is one of them computed from others, as by weight normalization?)"
    )


def _computed(module: nn.Module, parameters: Iterable[str]) -> list[str]:
    """Attributes that `torch.nn.utils.parametrize` computes from parameters at each access. They
    are not looked at here: that may change buffers (spectral normalization) or draw random numbers.
    """
    if not is_parametrized(module):
        return []
    names = [*cast("nn.ModuleDict", module.parametrizations)]
    prefixes = {name: f"parametrizations.{name}." for name in names}
    return [name for name in names if any(key.startswith(prefixes[name]) for key in parameters)]


@lru_cache(1024)
def _keys(kind: type[nn.Module]) -> dict[type | str, type]:
    """What a type and its base types may be registered as, the nearest first."""
    return {key: t for t in kind.__mro__ for key in (t, f"{t.__module__}.{t.__qualname__}")}


def _can_be_registered(t: Any) -> bool:
    """Whether it is a type of module or a full name."""
    if isinstance(t, str):
        return "." in t and all(part.isidentifier() for part in t.split("."))
    return isinstance(t, type) and issubclass(t, nn.Module)
