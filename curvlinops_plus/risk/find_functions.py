"""Finding out which functions read parameters, from a forward pass on a few examples.

Modules are known by their types; what a `forward` does with parameters is not. Products with a weight (`F.linear`,
`x @ W.T + b`, `F.conv2d`, ...) become uses of a layer as calls of a module are. A parameter that anything else reads
keeps the rule of the module that holds it, if it has none of its own; see `LayerRule`.

The models that need it are those with modules without a rule of their own, and those where something else than its
layer reads a parameter, which recording notices by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import torch

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.functions import Function
from curvlinops_plus.layer.rule_registry import GENERIC
from curvlinops_plus.risk.dry_pass import Claim, DryPass, Read
from curvlinops_plus.risk.layers import FoundReads, Layer, find_layers
from curvlinops_plus.risk.module_uses import ModuleUse, find_uses
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import Batch, is_iterator
from curvlinops_plus.risk.risk import EmpiricalRisk


def layers_of(risk: EmpiricalRisk, separate_weight_and_bias: bool = False) -> list[Layer]:
    """The layers of a risk; functions that read parameters of modules without a rule are looked for first.

    Data that can be read only once, and empty ones, are not looked at: such modules keep the generic rule.

    Args:
        separate_weight_and_bias: Give every parameter its own block.

    Cost: once per risk, and only with such modules, two forward passes on two and three examples.
    """
    with risk.placed():
        uses = find_uses(risk.model, risk.params)
        if risk.reads is None and GENERIC in [use.rule for use in uses] and _is_readable(risk.data):
            try:
                look_for_functions(risk)
            except Exception:  # of the model or the data; recording runs them again, and names layers
                risk.reads = FoundReads()
        return find_layers(risk.model, risk.params, separate_weight_and_bias, risk.reads, uses)


def _is_readable(data: Any) -> bool:
    return not is_iterator(data) and not (isinstance(data, Sized) and not len(data))


def look_for_functions(risk: EmpiricalRisk, batch: Batch | None = None, error: ValueError | None = None) -> None:
    """Look once how functions read parameters, and note it in `risk.reads`.

    Args:
        batch: A batch; default: the first of the data.
        error: What recording said of a parameter that is read outside of its layer. It is raised again if what is found
            does not explain it.
    """
    before, keys = risk.reads, {*getattr(error, "keys", ())}
    known = before.enclosing if before is not None else {}
    if before is None or keys - before.unexplained.keys():
        state = preserve_state(risk.model, risk.data)
        with state, risk.placed(), torch.inference_mode(False), torch.enable_grad():
            batch = next(risk.batches("functions"), None) if batch is None else batch
            if batch is None:  # the examples are in other processes, which tell what they find
                return
            # A module that did not have rows for examples either: the next one around it.
            beyond = {key: (name, key in keys) for key, name in known.items()}
            risk.reads = find_functions(risk, batch, {*keys, *known}, beyond)
        if before is None and (risk.reads.products or risk.reads.enclosing):
            return
        if before is not None and risk.reads.enclosing.items() - known.items():
            return
    assert risk.reads is not None
    if error is not None:
        where = "".join(f" {key!r} is read by {what}." for key, what in risk.reads.unexplained.items())
        raise UnsupportedError(f"{error}{where}") from error


def find_functions(
    risk: EmpiricalRisk,
    batch: Batch,
    enclosed: Collection[str] = (),
    beyond: Mapping[str, tuple[str, bool]] | None = None,
) -> FoundReads:
    """How functions read parameters outside of modules with rules, from one batch.

    Args:
        enclosed: Keys of parameters for which the rules of their own modules won't do.
        beyond: Keys to the innermost module that may enclose their reads, and whether it is excluded itself.
    """
    N, uses = batch.num_examples, find_uses(risk.model, risk.params)
    passes = [DryPass(risk, uses, batch, n) for n in ((2, 3) if N > 2 else (N,))]
    claims, reads = passes[0].claims, [*passes[0].reads, *_constant(passes[0], passes[-1])]
    reads += [Read(key, "what is one table for all examples") for key in enclosed if key in passes[0].stacks]
    products = _resolve(risk, uses, claims, reads)
    claimed = {key for use in products for key in use.keys.values()}
    apart = [use for use in uses if use.without_rule or claimed & {*use.keys.values()}]
    free = {key for use in apart for key in use.keys.values()} | {*enclosed}
    around, outside = _enclose(risk, uses, passes, reads, enclosed, beyond or {})
    around = {key: around[key] for key in risk.params if key in around}  # sets have another order in other processes
    return FoundReads(products, around, outside, frozenset(free - _seen(passes)))


def _seen(passes: Iterable[DryPass]) -> set[str]:
    """Keys of parameters that functions read."""
    return {key for each in passes for key in each.stacks}


def _constant(first: DryPass, last: DryPass) -> list[Read]:
    """What has no row for each example has no gradient for each, such as a weight that a function makes of others."""
    reads = []
    again = last if len(last.claims) == len(first.claims) else first
    for claim, other in zip(first.claims, again.claims, strict=True):
        if claim.rows is None or other.rows is None:
            continue
        one_row = claim.rows == 1 < first.examples and claim.function.name != "embedding"
        if one_row or not _follows(claim.rows, other.rows, first, again):
            reads += [Read(key, claim.where) for key in claim.keys.values()]
    again = last if len(last.rows) == len(first.rows) else first
    pairs = zip(first.rows, again.rows, strict=True)
    return reads + [read for (read, size), (_, other) in pairs if not _follows(size, other, first, again)]


def _resolve(
    risk: EmpiricalRisk, uses: Iterable[ModuleUse], claims: Iterable[Claim], reads: list[Read]
) -> tuple[ModuleUse, ...]:
    """Uses for those parameters that only products read; what else reads the others is added to `reads`."""
    claims, taken = _free(claims, reads), {read.key for read in reads}
    found: dict[Any, tuple[Function, dict[str, str]]] = {}
    for claim in claims:
        keys = {local: key for local, key in claim.keys.items() if key not in taken}
        found[claim.function, tuple(keys.items())] = claim.function, keys
    # A product without the bias that the same product has elsewhere needs no use of its own.
    kept = [
        (function, keys)
        for function, keys in found.values()
        if not any(f == function and keys.items() < more.items() for f, more in found.values())
    ]
    return tuple(_use(risk, uses, function, keys) for function, keys in kept)


def _free(claims: Iterable[Claim], reads: list[Read]) -> list[Claim]:
    """The products with weights that nothing else reads; the others become such reads."""
    claims = list(claims)
    while True:
        taken = {read.key for read in reads}
        lost = [claim for claim in claims if claim.keys["weight"] in taken]
        if not lost:
            return claims
        claims = [claim for claim in claims if claim not in lost]
        reads += [Read(key, claim.where) for claim in lost for key in claim.keys.values()]


def describe_reads(reads: FoundReads | None) -> dict[str, Any] | None:
    """What was found, in plain Python."""
    if reads is None:
        return None
    products = []
    for use in reads.products:
        assert use.function is not None
        function = asdict(use.function)
        function["options"] = [[name, [*v] if isinstance(v, tuple) else v] for name, v in use.function.options]
        products.append({"keys": dict(use.keys), "function": function})
    return {"products": products, "enclosing": dict(reads.enclosing), "unread": sorted(reads.unread)}


def rebuild_reads(risk: EmpiricalRisk, data: Mapping[str, Any] | None) -> FoundReads | None:
    """Undo `describe_reads`, for the parameters of a risk.

    Raises:
        ValueError: If the risk has not these parameters.
    """
    if data is None:
        return None
    named = {key for p in data["products"] for key in p["keys"].values()} | data["enclosing"].keys()
    if missing := named - risk.params.keys():
        raise ValueError(f"State mismatch in the parameters: the state has {sorted(missing)}, this risk has not.")
    products = []
    with risk.placed():
        uses = find_uses(risk.model, risk.params)
        for p in data["products"]:
            options = tuple(
                (name, tuple(value) if isinstance(value, list) else value) for name, value in p["function"]["options"]
            )
            products.append(_use(risk, uses, Function(**{**p["function"], "options": options}), dict(p["keys"])))
    return FoundReads(tuple(products), dict(data["enclosing"]), unread=frozenset(data["unread"]))


def _use(risk: EmpiricalRisk, uses: Iterable[ModuleUse], function: Function, keys: dict[str, str]) -> ModuleUse:
    params = risk.params
    module, rule = function.module(params[keys["weight"]], params[keys["bias"]] if "bias" in keys else None)
    holder = next(use for use in uses if keys["weight"] in use.keys.values())
    return ModuleUse(keys["weight"].removesuffix(".weight"), module, rule, keys, holder.owner, function)


def _enclose(
    risk: EmpiricalRisk,
    uses: Iterable[ModuleUse],
    passes: Sequence[DryPass],
    reads: Iterable[Read],
    enclosed: Collection[str],
    beyond: Mapping[str, tuple[str, bool]],
) -> tuple[dict[str, str], dict[str, str]]:
    """Modules that enclose all reads of a parameter that its own module does not, and reads outside of the model."""
    enclosing: dict[str, str] = {}
    outside: dict[str, str] = {}
    holders = {(use.name, key) for use in uses if use.without_rule for key in use.keys.values()}
    modules = dict(risk.model.named_modules())
    for read in reads:
        common = _by_example(_common_start(passes[0].stacks[read.key]), passes)
        own = [name for name in common if (name, read.key) in holders]
        if own and read.key not in enclosed:
            continue  # its own module sees all of it
        p = risk.params[read.key]
        around = [name for name in common if name not in own and any(q is p for q in modules[name].parameters())]
        around = _beyond(around, *beyond[read.key]) if read.key in beyond else around
        if around:
            enclosing[read.key] = around[-1]
        else:
            outside.setdefault(read.key, read.where)
    return enclosing, outside


def _beyond(around: list[str], name: str, excluded: bool) -> list[str]:
    """The modules from the outermost one to this one."""
    return around[: around.index(name) + (not excluded)] if name in around else []


def _by_example(names: Iterable[str], passes: Sequence[DryPass]) -> list[str]:
    """The modules that return a row for each example, or one row for all; and the model itself, ""."""
    first, last = passes[0], passes[-1]

    def does(name: str) -> bool:
        sizes, others = first.sizes.get(name, []), last.sizes.get(name, [])
        return len(sizes) == len(others) and all(_follows(*pair, first, last) for pair in zip(sizes, others))

    return [name for name in names if not name or does(name)]


def _follows(size: int, other: int, first: DryPass, last: DryPass) -> bool:
    """Whether a leading size in two passes is one, or in proportion to the number of examples."""
    if size == other == 1:
        return True
    return size % first.examples == 0 and size * last.examples == other * first.examples


def _common_start(stacks: list[tuple[str, ...]]) -> list[str]:
    """The modules that all stacks begin with."""
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*stacks))]
