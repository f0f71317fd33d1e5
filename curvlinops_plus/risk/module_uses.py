"""Which modules, and function calls inside modules, read some parameters; and one such call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.layer import AffineRule, LayerRule, differentiable_parameters, rule_of
from curvlinops_plus.layer.functions import LINEAR, Function
from curvlinops_plus.layer.replay import is_parametrized
from curvlinops_plus.layer.rule_registry import GENERIC
from curvlinops_plus.risk.modules import modules_of


@dataclass(frozen=True, eq=False)
class ModuleUse:
    """One module that reads parameters of a layer.

    Attributes:
        name: The module's name in the model ("" for the model itself); of a function call, the name of the part too.
        module: The module, or what stands for the part of it that a function call reads.
        rule: What the module does with its parameters.
        keys: The module's own parameter names, each with the key of the tracked parameter.
        owner: The module in the model that holds the parameters.
        function: The function that reads the parameters, which no hook sees; None if the module does.
    """

    name: str
    module: nn.Module
    rule: LayerRule
    keys: dict[str, str]
    owner: nn.Module
    function: Function | None = None

    def own(self, module: nn.Module, params: Mapping[str, Tensor]) -> dict[str, bool]:
        """Key to whether the module holds this parameter at the moment, not another tensor in its place."""
        return {key: _slot(module, local) is params[key] for local, key in self.keys.items()}

    def holds(self, module: nn.Module, params: Mapping[str, Tensor]) -> bool:
        """Whether the module holds all of the parameters at the moment."""
        return False not in [_slot(module, local) is params[key] for local, key in self.keys.items()]

    @property
    def without_rule(self) -> bool:
        """Whether nothing is known of the module but that it holds the parameters."""
        return self.rule is GENERIC and not is_parametrized(self.module)


@dataclass(eq=False)
class Call:
    """One call of one module.

    Attributes:
        use: The module and its rule.
        args: Positional inputs, detached; per-example tensors carry the examples (times positions) on axis 0.
        kwargs: Keyword inputs, likewise.
        grads: Output gradients [V, N * positions, *out], None before they are known; a list of them for a module that
            returns several tensors.
        in_axes: Where the module itself has the examples, for each tensor among its inputs; None for one that all
            examples share.
        out_axes: The same for its outputs.
        rule: The rule of an affine layer.
    """

    use: ModuleUse
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grads: Any = None
    in_axes: Sequence[int | None] | None = None
    out_axes: Sequence[int] | None = None
    rule: AffineRule = field(init=False)

    def __post_init__(self) -> None:
        self.rule = self.use.rule  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def input(self) -> Tensor:
        """What an affine layer multiplies: all that is noted of its inputs."""
        return self.args[0]


def _slot(module: nn.Module, local: str) -> Tensor | None:
    """What a module holds under the name of a parameter, which may be that of a parametrization or of a child."""
    if local in module._parameters:
        return module._parameters[local]
    inside, _, name = local.rpartition(".")
    return module.get_submodule(inside)._parameters.get(name)


def title(name: str) -> str:
    """How messages call a module of that name in the model."""
    return f"layer {name!r}" if name else "layer '' (the model itself)"


def find_uses(model: nn.Module, params: Mapping[str, Tensor]) -> list[ModuleUse]:
    """The modules that read some parameters, and the function calls inside attention (key to the model's own)."""
    key_of = dict(zip(map(id, params.values()), params))
    uses: list[ModuleUse] = []
    claimed: set[nn.Module] = set()  # whose parameters another one answers for
    for name, module in modules_of(model).items():
        if module in claimed or not (module._parameters or module._modules):
            continue
        if module._modules and is_parametrized(module):
            claimed |= {*module.get_submodule("parametrizations").modules()}
        held = differentiable_parameters(module)
        rule, in_parts = rule_of(module, held), set[int]()
        for part in rule.parts(module):
            claimed.add(part.module)
            in_parts |= {id(p) for p in part.params.values()}
            if keys := _tracked(part.params, key_of):
                full = ".".join([name, part.name]).lstrip(".")
                uses.append(ModuleUse(full, part.module, part.rule, keys, module, LINEAR))
        if keys := _tracked(held, key_of, in_parts):
            rule.check(module)
            uses.append(ModuleUse(name, module, rule, keys, module))
    return [use for use in uses if isinstance(use.rule, AffineRule) or not _alias(use, uses)]


def _tracked(params: Mapping[str, Tensor], key_of: Mapping[int, str], without: Collection[int] = ()) -> dict[str, str]:
    """Local name to key, of those parameters that have one, `without` some."""
    found = zip(params, map(id, params.values()))
    return {local: key_of[at] for local, at in found if at in key_of and at not in without}


def _alias(use: ModuleUse, uses: list[ModuleUse]) -> bool:
    """Whether a container only holds names for parameters that modules inside it read (BERT's `predictions.bias`).

    Should it read them too, recording finds one reader more than calls, and says so.
    """
    inside = {id(m) for m in use.module.modules()} - {id(use.module)}
    others = [u for u in uses if id(u.owner) in inside and isinstance(u.rule, AffineRule)]
    return set(use.keys.values()) <= {key for u in others for key in u.keys.values()}
