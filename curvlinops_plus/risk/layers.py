"""Which modules hold the parameters: a `Layer` per module, or per set of modules that share a
parameter.

A layer's parameters are addressed by *keys*: the names of a dict of parameters, or the model's own
names for a list. A `ModuleUse` is one module, or one function call inside a module, that reads some
of them; a tied weight has several uses in one layer, in one or two *roles*: an embedding multiplies
with the transpose of the matrix that the head multiplies with.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from curvlinops_plus.layer import AffineRule, LayerRule, differentiable_parameters, rule_of
from curvlinops_plus.layer.functions import LINEAR, Function
from curvlinops_plus.layer.replay import is_parametrized
from curvlinops_plus.layer.rule import GENERIC, EnclosedRule, flat_pattern
from curvlinops_plus.linalg import Layout
from curvlinops_plus.risk.calls import title
from curvlinops_plus.risk.parameters import common_dtype


@dataclass(eq=False)
class Role:
    """Uses that multiply with the same matrix.

    Attributes:
        uses: The uses; their calls are positions that share the matrix.
        transposed: Whether it is the transpose of the layer's matrix.
        sparse: Whether all inputs are `SparseRows`.
    """

    uses: tuple[ModuleUse, ...]
    transposed: bool = False
    sparse: bool = False


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters of a layer that share one block, and how they form one matrix.

    Attributes:
        name: The block's name.
        keys: Keys of the parameters, in the order in which they fill the matrix.
        layout: The matrix.
    """

    name: str
    keys: tuple[str, ...]
    layout: Layout


@dataclass(eq=False)
class Layer:
    """Parameters that are read together, the modules that read them, and the blocks they form.

    Attributes:
        name: Name of the first module that reads them.
        uses: The modules; more than one if a parameter is shared.
        params: Key to parameter.
        groups: The blocks, either one for all parameters or one per parameter.
        roles: What the modules multiply with; the first one's matrix is the layer's. Empty without
            Kronecker factors.
        affine: Whether Kronecker factors exist: all modules have affine rules, and roles that fit.
        sparse: Whether the input factor is a diagonal.
        weight: Key of an affine layer's weight, None if it is not tracked.
        bias: Key of an affine layer's bias, None if it has none or it is not tracked.
        accumulation_dtype: The parameters' dtype, float32 at least.
        device: Where the parameters are.
    """

    name: str
    uses: tuple[ModuleUse, ...]
    params: dict[str, Tensor]
    groups: tuple[Group, ...]
    roles: tuple[Role, ...] = ()
    affine: bool = field(init=False)
    sparse: bool = field(init=False)
    weight: str | None = field(init=False, default=None)
    bias: str | None = field(init=False, default=None)
    accumulation_dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.affine = bool(self.roles)
        self.sparse = self.affine and all(
            role.sparse and not role.transposed for role in self.roles
        )
        for use in self.roles[0].uses if self.roles else self.uses[:1]:
            for local, key in use.keys.items():
                if local == "bias":
                    self.bias = self.bias or key
                else:
                    self.weight = self.weight or key
        self.accumulation_dtype, (first, *_) = common_dtype(self.params), self.params.values()
        self.device = first.device

    @property
    def title(self) -> str:
        """How messages call the layer."""
        return title(self.name)

    @property
    def tied(self) -> bool:
        """Whether several modules read the same parameter."""
        return len(self.uses) > 1


def find_layers(
    model: nn.Module,
    params: Mapping[str, Tensor],
    separate_weight_and_bias: bool = False,
    found: FoundReads | None = None,
    uses: list[ModuleUse] | None = None,
) -> list[Layer]:
    """Group parameters by the modules that read them, in the order in which the model names its
    modules.

    Modules that share a parameter form one layer. Only modules that own one of `params` appear.

    Args:
        model: The model.
        params: Key to parameter, each one the model's own.
        separate_weight_and_bias: Give every parameter its own block.
        found: What is known of reads by functions, see `layers_of`.
        uses: What `find_uses` finds, if somebody has looked.
    """
    uses = find_uses(model, params) if uses is None else uses
    if found is not None:
        uses = _with_found(model, params, uses, found)
    layers = []
    pending = list(uses)
    while pending:
        members, reached = [pending.pop(0)], set()
        while True:  # all modules connected through shared parameters
            reached = {key for use in members for key in use.keys.values()}
            joined = [use for use in pending if reached & set(use.keys.values())]
            if not joined:
                break
            members += joined
            pending = [use for use in pending if use not in joined]
        layers.append(_make_layer(members, params, separate_weight_and_bias))
    names = [group.name for layer in layers for group in layer.groups]
    if len({*names}) < len(names):
        twice = {name for name in names if names.count(name) > 1}
        raise ValueError(
            f"Several blocks would be named {sorted(twice)}: a parameter has a key that is the "
            "name of a module. Give it another key in `params`."
        )
    return layers


@dataclass(frozen=True, eq=False)
class FoundReads:
    """What a forward pass showed of how parameters are read, beyond the types of modules.

    Attributes:
        products: Functions that multiply with parameters, or add them, in addition to modules with
            rules of their own, and instead of modules without; each with the keys of "weight" and
            "bias".
        enclosing: Keys of parameters that other functions read outside of the module that holds
            them, each with the name of the innermost module in which they all are, and that gives
            their gradients when it runs again.
        failed: Keys of parameters, each with the names of modules that were run again before, and
            did not.
    """

    products: Sequence[tuple[Function, dict[str, str]]] = ()
    enclosing: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, Sequence[str]] = field(default_factory=dict)


def _with_found(
    model: nn.Module, params: Mapping[str, Tensor], uses: Sequence[ModuleUse], found: FoundReads
) -> list[ModuleUse]:
    """The uses of modules, each followed by products that read its parameters; modules that enclose
    reads come last.
    """
    enclosing: dict[str, dict[str, str]] = {}
    for key, name in found.enclosing.items():
        inside = model.get_submodule(name).named_parameters(remove_duplicate=False)
        enclosing.setdefault(name, {})[next(local for local, p in inside if p is params[key])] = key
    merged, pending = list[ModuleUse](), [*found.products]
    claimed = {key for _, keys in pending for key in keys.values()}
    for use in uses:
        own = {*use.keys.values()}
        free = found.enclosing.keys() | (claimed if use.without_rule else set())
        keys = {local: key for local, key in use.keys.items() if key not in free}
        if use.without_rule and use.name in enclosing:  # it runs again anyway
            enclosing[use.name] = keys | enclosing[use.name]
        elif keys:
            merged.append(use if keys == use.keys else replace(use, keys=keys))
        for product in [product for product in pending if not own.isdisjoint(product[1].values())]:
            pending.remove(product)
            function, keys = product
            module, rule = function.module(
                *(params[keys[n]] if n in keys else None for n in ("weight", "bias"))
            )
            name = next(iter(keys.values())).removesuffix(".weight")
            merged.append(ModuleUse(name, module, rule, keys, use.owner, function))
    for name, keys in enclosing.items():
        module = model.get_submodule(name)
        merged.append(ModuleUse(name, module, EnclosedRule(tuple(keys)), keys, module))
    return merged


def _make_layer(uses: list[ModuleUse], params: Mapping[str, Tensor], separate: bool) -> Layer:
    roles = _roles(uses, separate)
    patterns: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for use in roles[0].uses if roles else uses:
        known = use.rule.patterns(use.module)
        sizes |= use.rule.sizes(use.module)
        named = sorted(use.keys, key="bias".__eq__)  # it is the last column
        patterns |= {
            use.keys[local]: known[local] for local in named if use.keys[local] not in patterns
        }
    if not roles and len(uses) > 1:
        # Two modules may see the same parameter as different matrices; what is left in common is a
        # flat vector.
        patterns = {key: flat_pattern(params[key].ndim) for key in patterns}
    name, keys = uses[0].name, list(patterns)
    blocks = {key: [key] for key in keys} if separate else {name or keys[0]: keys}
    groups = []
    for label, own in blocks.items():
        named = tuple([(key, patterns[key], params[key].shape) for key in own])
        groups.append(Group(label, tuple(own), _layout(named, tuple(sizes.items()))))
    return Layer(name, tuple(uses), {key: params[key] for key in keys}, tuple(groups), roles)


@lru_cache(4096)
def _layout(
    named: tuple[tuple[str, str, torch.Size], ...], sizes: tuple[tuple[str, int], ...]
) -> Layout:
    """Some parameters as one matrix, by the patterns of their rule."""
    used = {axis: n for axis, n in sizes if any(axis in _axes(pattern) for _, pattern, _ in named)}
    return Layout(
        {key: pattern for key, pattern, _ in named}, {key: shape for key, _, shape in named}, used
    )


def _roles(uses: list[ModuleUse], separate: bool) -> tuple[Role, ...]:
    """What affine modules that share parameters multiply with; empty if they have no common matrix.

    They have one if all share the weight, seen as one matrix or its transpose, and a bias belongs
    to one role alone; as a separate block it would need the gradient factor of that role, which the
    nearest product does not have.
    """
    for use in uses:
        if not isinstance(use.rule, AffineRule):
            return ()
    if len(uses) == 1:
        return (Role(tuple(uses), sparse=all(map(_is_sparse, uses))),)
    weights = {
        tuple(sorted(key for local, key in use.keys.items() if local != "bias")) for use in uses
    }
    if weights == {()} and len({use.keys["bias"] for use in uses}) == 1:
        return (Role(tuple(uses), sparse=all(map(_is_sparse, uses))),)
    if (
        len(weights) > 1
        or len(next(iter(weights))) != 1
        or any(use.rule.sizes(use.module) for use in uses)
    ):
        return ()
    by_matrix: dict[str, list[ModuleUse]] = {}
    for use in uses:
        by_matrix.setdefault(_matrix_of(use), []).append(use)
    # A module with dense rows says what the matrix is: it may have a bias, which is one more
    # column.
    (lead, _), *others = ordered = sorted(
        by_matrix.items(),
        key=lambda item: (not any("bias" in u.keys for u in item[1]), _is_sparse(item[1][0])),
    )
    flipped = " ".join(reversed(re.findall(r"\([^()]*\)|\w+", lead)))
    if any(pattern != flipped for pattern, _ in others):
        return ()
    for position, (_, members) in enumerate(ordered):
        biases = {use.keys.get("bias") for use in members}
        # A separate block of a bias that only some of them add needs a gradient factor of its own.
        several = len(biases - {None}) > 1 or (separate and len(biases) > 1)
        if several or (biases != {None} and (position or (separate and len(ordered) > 1))):
            return ()
    return tuple(
        [Role(tuple(own), pattern != lead, all(map(_is_sparse, own))) for pattern, own in ordered]
    )


def _is_sparse(use: ModuleUse) -> bool:
    return isinstance(use.rule, AffineRule) and use.rule.sparse


def _matrix_of(use: ModuleUse) -> str:
    """The pattern that makes a matrix of the weight, with axes named after their positions in the
    parameter.
    """
    local = next(local for local in use.keys if local != "bias")
    left, right = use.rule.patterns(use.module)[local].split("->")
    names = {axis: f"d{k}" for k, axis in enumerate(_axes(left))}
    return " ".join(re.sub(r"[A-Za-z_]\w*", lambda found: names[found[0]], right).split())


def _axes(pattern: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", pattern)


@dataclass(frozen=True, eq=False)
class ModuleUse:
    """One module that reads parameters of a layer.

    Attributes:
        name: The module's name in the model ("" for the model itself); of a function call, the name
            of the part too.
        module: The module, or what stands for the part of it that a function call reads.
        rule: What the module does with its parameters.
        keys: The module's own parameter names, each with the key of the tracked parameter.
        owner: The module in the model that holds the parameters.
        function: The function that reads the parameters, which no hook sees; None if the module
            does.
    """

    name: str
    module: nn.Module
    rule: LayerRule
    keys: dict[str, str]
    owner: nn.Module
    function: Function | None = None

    def places(self, module: nn.Module) -> list[tuple[nn.Module, str, str]]:
        """The modules that hold the parameters, which may be parametrizations or children; local
        names; keys.
        """
        found = []
        for local, key in self.keys.items():
            inside, _, name = (
                ("", "", local) if local in module._parameters else local.rpartition(".")
            )
            found.append((module.get_submodule(inside), name, key))
        return found

    @property
    def without_rule(self) -> bool:
        """Whether nothing is known of the module but that it holds the parameters."""
        return self.rule is GENERIC and not is_parametrized(self.module)


def find_uses(model: nn.Module, params: Mapping[str, Tensor]) -> list[ModuleUse]:
    """The modules that read some parameters, and the function calls inside attention (key to the
    model's own).
    """
    key_of = dict(zip(map(id, params.values()), params))
    uses: list[ModuleUse] = []
    claimed: set[nn.Module] = set()  # whose parameters another one answers for
    for name, module in model.named_modules():
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
    return [read for use in uses if (read := _without_aliases(use, uses)).keys]


def _tracked(
    params: Mapping[str, Tensor], key_of: Mapping[int, str], without: Collection[int] = ()
) -> dict[str, str]:
    """Local name to key, of those parameters that have one, `without` some."""
    found = zip(params, map(id, params.values()))
    return {local: key_of[at] for local, at in found if at in key_of and at not in without}


def _without_aliases(use: ModuleUse, uses: list[ModuleUse]) -> ModuleUse:
    """A container without parameters that affine modules inside read: it only holds names (BERT's
    `predictions.bias`).

    Should it read them too, recording finds one reader more than calls, and says so.
    """
    if isinstance(use.rule, AffineRule):
        return use
    inside = {id(m) for m in use.module.modules()} - {id(use.module)}
    others = [u for u in uses if id(u.owner) in inside and isinstance(u.rule, AffineRule)]
    read = {key for u in others for key in u.keys.values()}
    return replace(use, keys={local: key for local, key in use.keys.items() if key not in read})
