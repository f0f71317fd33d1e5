"""Which modules hold the parameters: a `Layer` per module, or per set of modules that share a
parameter.

A layer's parameters are addressed by *keys*: the names of a dict of parameters, or the model's own
names for a list. A `ModuleUse` is one module, or one function call inside a module, that reads some
of them; a tied weight has several uses in one layer, in one or two *roles*: an embedding multiplies
with the transpose of the matrix that the head multiplies with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from curvlinops_plus.layer import AffineRule, LayerRule, differentiable_parameters, rule_of
from curvlinops_plus.layer.broadcast import BroadcastRule
from curvlinops_plus.layer.functions import LINEAR, Function
from curvlinops_plus.layer.replay import is_parametrized
from curvlinops_plus.layer.rule import GENERIC, EnclosedRule, flat_pattern
from curvlinops_plus.linalg import Layout
from curvlinops_plus.linalg.layout import Pattern
from curvlinops_plus.risk.calls import title
from curvlinops_plus.risk.found_reads import FoundReads, ParameterProduct
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
        stacked: Whether the parameters are stacks of matrices, of which each row meets one.
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
    stacked: bool = field(init=False)
    weight: str | None = field(init=False, default=None)
    bias: str | None = field(init=False, default=None)
    accumulation_dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.affine = bool(self.roles)
        self.sparse = self.affine and all(
            role.sparse and not role.transposed for role in self.roles
        )
        self.stacked = self.affine and self.uses[0].rule.stacked
        for use in self.roles[0].uses if self.roles else self.uses[:1]:
            for local, key in use.keys.items():
                if local == "bias":
                    self.bias = self.bias or key
                else:
                    self.weight = self.weight or key
        self.accumulation_dtype = common_dtype(self.params)
        self.device = next(iter(self.params.values())).device

    @cached_property
    def one_matrix(self) -> Layer:
        """The layer that a matrix of a stack would be by itself."""
        params = {key: p.detach()[0] for key, p in self.params.items()}
        uses = []
        for use in self.uses:
            assert use.function is not None
            tensors = {local: params[key] for local, key in use.keys.items()}
            function = replace(use.function, stacked=False)
            module, rule = function.module(tensors)
            uses.append(replace(use, module=module, rule=rule, function=function))
        return _make_layer(uses, params, len(self.groups) > 1)

    @property
    def title(self) -> str:
        """How messages call the layer."""
        return title(self.name)

    @property
    def type_name(self) -> str:
        """The type of the first module that holds the parameters."""
        return type(self.uses[0].owner).__name__

    @property
    def tied(self) -> bool:
        """Whether several modules read the same parameter."""
        return len(self.uses) > 1


def find_layers(
    model: nn.Module,
    params: Mapping[str, Tensor],
    separate_weight_and_bias: bool = False,
    reads: FoundReads | None = None,
    uses: list[ModuleUse] | None = None,
) -> list[Layer]:
    """Group parameters by the modules that read them, in the order in which the model names its
    modules.

    Modules that share a parameter form one layer. Only modules that own one of `params` appear.

    Args:
        model: The model.
        params: Key to parameter, each one the model's own.
        separate_weight_and_bias: Give every parameter its own block.
        reads: What is known of reads by functions, see `layers_of`.
        uses: What `find_uses` finds, if somebody has looked.
    """
    uses = find_uses(model, params) if uses is None else uses
    if reads is not None:
        uses = _with_reads(model, params, uses, reads)
    layers = []
    pending = [*uses]
    while pending:
        # All modules that are connected through shared parameters.
        members = [pending.pop(0)]
        while True:
            keys = {key for use in members for key in use.keys.values()}
            joined = [use for use in pending if not keys.isdisjoint(use.keys.values())]
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


def _with_reads(
    model: nn.Module, params: Mapping[str, Tensor], uses: Sequence[ModuleUse], reads: FoundReads
) -> list[ModuleUse]:
    """The uses of modules, each followed by products that read its parameters; modules that enclose
    reads come last.
    """
    # Names of modules, each with the local names and keys of the parameters read inside.
    enclosing: dict[str, dict[str, str]] = {}
    for key, name in reads.enclosing.items():
        inside = model.get_submodule(name).named_parameters(remove_duplicate=False)
        local = next(local for local, p in inside if p is params[key])
        enclosing.setdefault(name, {})[local] = key
    merged = []
    pending = [*reads.products]
    by_products = {key for product in pending for key in product.keys.values()}
    tables = dict(reads.broadcast)
    for use in uses:
        read_elsewhere = {*reads.enclosing, *reads.instead}
        if use.without_rule:
            read_elsewhere |= by_products | reads.broadcast.keys()
        keys = {local: key for local, key in use.keys.items() if key not in read_elsewhere}
        if use.without_rule and use.name in enclosing:
            # It runs again anyway.
            enclosing[use.name] = keys | enclosing[use.name]
        elif keys:
            merged.append(replace(use, keys=keys))
        of_tables = {local: key for local, key in use.keys.items() if key in tables}
        if of_tables:
            places = dict.fromkeys(p for key in of_tables.values() for p in tables.pop(key))
            name = next(iter(of_tables.values())).removesuffix(".weight") if keys else use.name
            function = Function("broadcast", tuple(places))
            merged.append(
                ModuleUse(name, use.module, BroadcastRule(), of_tables, use.owner, function)
            )
        held = {*use.keys.values()}
        for product in [*pending]:
            if not held.isdisjoint(product.keys.values()):
                pending.remove(product)
                merged.append(_use_of_product(product, params, use.owner))
    for name, keys in enclosing.items():
        module = model.get_submodule(name)
        merged.append(ModuleUse(name, module, EnclosedRule(tuple(keys)), keys, module))
    return merged


def _use_of_product(
    product: ParameterProduct, params: Mapping[str, Tensor], owner: nn.Module
) -> ModuleUse:
    keys = product.keys
    tensors = {local: params[key] for local, key in keys.items()}
    module, rule = product.function.module(tensors)
    local, key = next(iter(keys.items()))
    name = key if local == "bias" else key.removesuffix(f".{local}")
    return ModuleUse(name, module, rule, keys, owner, product.function)


def _make_layer(uses: list[ModuleUse], params: Mapping[str, Tensor], separate: bool) -> Layer:
    roles = _roles(uses, separate)
    patterns: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for use in roles[0].uses if roles else uses:
        module_patterns = use.rule.patterns(use.module)
        sizes |= use.rule.sizes(use.module)
        # The bias is the last column.
        for local in sorted(use.keys, key="bias".__eq__):
            patterns.setdefault(use.keys[local], module_patterns[local])
    if not roles and len(uses) > 1:
        # Two modules may see the same parameter as different matrices; what is left in common is a
        # flat vector.
        patterns = {key: flat_pattern(params[key].ndim) for key in patterns}
    name = uses[0].name
    keys = tuple(patterns)
    blocks = {key: (key,) for key in keys} if separate else {name or keys[0]: keys}
    groups = []
    for block, block_keys in blocks.items():
        described = tuple([(key, patterns[key], params[key].shape) for key in block_keys])
        layout = _layout(described, tuple(sizes.items()))
        groups.append(Group(block, block_keys, layout))
    return Layer(name, tuple(uses), {key: params[key] for key in keys}, tuple(groups), roles)


@lru_cache(4096)
def _layout(
    described: tuple[tuple[str, str, torch.Size], ...], sizes: tuple[tuple[str, int], ...]
) -> Layout:
    """Some parameters as one matrix, from their keys, the patterns of their rule, and shapes."""
    keys, patterns, shapes = zip(*described)
    axes = {axis for pattern in patterns for axis in Pattern(pattern).names}
    used = {axis: n for axis, n in sizes if axis in axes}
    return Layout(dict(zip(keys, patterns)), dict(zip(keys, shapes)), used)


def _roles(uses: list[ModuleUse], separate: bool) -> tuple[Role, ...]:
    """What affine modules that share parameters multiply with; empty if they have no common matrix.

    They have one if all share the weight, seen as one matrix or its transpose, and a bias belongs
    to one role alone; as a separate block it would need the gradient factor of that role, which the
    nearest product does not have.
    """
    for use in uses:
        if not isinstance(use.rule, AffineRule):
            return ()
    by_matrix = {"": uses}
    if len(uses) > 1 and any(use.keys.keys() != {"bias"} for use in uses):
        weights = {
            tuple([key for local, key in use.keys.items() if local != "bias"]) for use in uses
        }
        is_one_weight = len(weights) == 1 and len(weights.pop()) == 1
        if not is_one_weight or any(use.rule.sizes(use.module) for use in uses):
            return ()
        # A module with dense rows says what the matrix is: it may have a bias, which is one more
        # column.
        by_matrix = {}
        for use in sorted(uses, key=lambda use: ("bias" not in use.keys, use.rule.sparse)):
            by_matrix.setdefault(_matrix_of(use), []).append(use)
    lead, *flipped = by_matrix
    if any(matrix != Pattern(f"-> {lead}").transposed for matrix in flipped):
        return ()
    roles = []
    for matrix, members in by_matrix.items():
        biases = {use.keys.get("bias") for use in members}
        # A separate block of a bias that only some of them add needs a gradient factor of its own.
        several = len(biases - {None}) > 1 or (separate and len(biases) > 1)
        elsewhere = matrix != lead or (separate and len(by_matrix) > 1)
        if several or (biases != {None} and elsewhere):
            return ()
        is_sparse = all(use.rule.sparse for use in members)
        roles.append(Role(tuple(members), matrix != lead, is_sparse))
    return tuple(roles)


def _matrix_of(use: ModuleUse) -> str:
    """The pattern that makes a matrix of the weight, with axes named after their positions in the
    parameter.
    """
    local = next(local for local in use.keys if local != "bias")
    pattern = Pattern(use.rule.patterns(use.module)[local])
    positions = {axis: f"d{k}" for k, axis in enumerate(pattern.names)}
    words = pattern.matrix.replace("(", " ( ").replace(")", " ) ").split()
    return " ".join([positions.get(word, word) for word in words])


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
        holders = []
        for local, key in self.keys.items():
            path, _, name = local.rpartition(".")
            holders.append((module.get_submodule(path), name, key))
        return holders

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"{title(self.name)} ({type(self.owner).__name__})"

    @property
    def without_rule(self) -> bool:
        """Whether nothing is known of the module but that it holds the parameters."""
        return self.rule is GENERIC and not is_parametrized(self.module)


def find_uses(model: nn.Module, params: Mapping[str, Tensor]) -> list[ModuleUse]:
    """The modules that read some parameters, and the function calls inside attention (key to the
    model's own).
    """
    key_of = {id(p): key for key, p in params.items()}
    uses: list[ModuleUse] = []
    # Modules whose parameters another one answers for.
    claimed: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in claimed or not (module._parameters or module._modules):
            continue
        if module._modules and is_parametrized(module):
            claimed |= {*module.get_submodule("parametrizations").modules()}
        held = differentiable_parameters(module)
        rule = rule_of(module, held)
        for part in rule.parts(module):
            claimed.add(part.module)
            keys = _tracked(part.params, key_of)
            if keys:
                part_name = f"{name}.{part.name}".lstrip(".")
                uses.append(ModuleUse(part_name, part.module, part.rule, keys, module, LINEAR))
            of_parts = {id(p) for p in part.params.values()}
            held = {local: p for local, p in held.items() if id(p) not in of_parts}
        keys = _tracked(held, key_of)
        if keys:
            rule.check(module)
            uses.append(ModuleUse(name, module, rule, keys, module))
    readers = [_without_aliases(use, uses) for use in uses]
    return [use for use in readers if use.keys]


def _tracked(params: Mapping[str, Tensor], key_of: Mapping[int, str]) -> dict[str, str]:
    """Local name to key, of those parameters that have one."""
    return {local: key_of[id(p)] for local, p in params.items() if id(p) in key_of}


def _without_aliases(use: ModuleUse, uses: list[ModuleUse]) -> ModuleUse:
    """A container without parameters that affine modules inside read: it only holds names (BERT's
    `predictions.bias`).

    Should it read them too, recording finds one reader more than calls, and says so.
    """
    if isinstance(use.rule, AffineRule):
        return use
    inside = {*use.module.modules()} - {use.module}
    read: set[str] = set()
    for reader in uses:
        if reader.owner in inside and isinstance(reader.rule, AffineRule):
            read |= {*reader.keys.values()}
    return replace(use, keys={local: key for local, key in use.keys.items() if key not in read})
