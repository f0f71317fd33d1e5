"""Functions that read parameters: which they are, and the layers to which their calls belong.

Modules are known by their types; what a `forward` does with parameters is not. One forward pass on
a few examples shows which functions read them. Products with a weight (`F.linear`, `x @ W.T`,
`F.conv2d`, ...) and vectors that are added become uses of a layer as calls of a module are. So do
scales, shifts and tables that are broadcast over the examples; see `BroadcastRule`. A parameter
that anything else reads keeps the rule of the module that holds it, if it has none of its own, or
gets that of the innermost module around its readers; see `EnclosedRule`.

The models that need it are those with modules without a rule of their own, and those where the
self-check or the recording notices that something else than its layer reads a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.functions import BIAS
from curvlinops_plus.layer.rule import GENERIC
from curvlinops_plus.progress import known_length
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.dry_pass import DryPass, ParameterRead
from curvlinops_plus.risk.found_reads import FoundReads, ParameterProduct
from curvlinops_plus.risk.layers import (
    Layer,
    find_layers,
    find_uses,
    uses_with_reads,
)
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.risk import EmpiricalRisk


def layers_of(risk: EmpiricalRisk, separate_weight_and_bias: bool = False) -> list[Layer]:
    """The layers of a risk; functions that read parameters of modules without a rule are looked for
    first.

    Data that can be read only once, and empty ones, are not read: such modules keep the generic
    rule.

    Args:
        separate_weight_and_bias: Give every parameter its own block.

    Cost: once per risk, and only with such modules, a forward pass on a few examples.
    """
    with risk.placed():
        uses = find_uses(risk.model, risk.params)
        unknown = risk.reads is None and GENERIC in [use.rule for use in uses]
        if unknown and not isinstance(risk.data, Iterator) and known_length(risk.data) != 0:
            try:
                look_for_functions(risk)
            except Exception:
                # Of the model or the data: recording runs them again, and names layers.
                risk.reads = FoundReads()
        return find_layers(risk.model, risk.params, separate_weight_and_bias, risk.reads, uses)


def look_for_functions(
    risk: EmpiricalRisk, batch: Batch | None = None, error: ValueError | None = None
) -> None:
    """Look how functions read parameters, and note it in `risk.reads`.

    Args:
        batch: A batch; default: the first of the data.
        error: What recording said of a parameter that is read outside of its layer. It is raised
            again if what is found does not explain it.
    """
    is_new = risk.reads is None
    previous = risk.reads or FoundReads()
    failed = {*getattr(error, "keys", ())}
    # First how functions read parameters; then the module around a layer of which recorded calls
    # don't tell enough, each time one module further, up to the model.
    attempts = [set[str]()] if is_new else []
    if failed:
        attempts.append(failed)
    # Experts may have seen all rows in the batches before, or none.
    shown = error.batch if isinstance(error, OutsideReads) else None
    if attempts:
        with _for_looking(risk):
            if batch is None:
                batch = next(risk.batches("functions"), None)
            if batch is None:  # other processes have examples, and tell what they find
                return
            for keys in attempts:
                if keys and shown is not None and _begins_to_follow(risk, shown, keys):
                    return
                risk.reads = find_functions(risk, batch, keys, None if is_new else previous)
                explains = is_new and (risk.reads.products or risk.reads.broadcast)
                explains = explains or risk.reads.gathered > previous.gathered
                now = risk.reads.instead, risk.reads.enclosing, {*risk.reads.computed}
                before = previous.instead, previous.enclosing, {*previous.computed}
                if explains or now != before:
                    return
    if error is not None:
        raise UnsupportedError(f"{error}{_tried(risk, previous, failed)}") from error


def begin_to_follow(risk: EmpiricalRisk, batch: Batch, error: OutsideReads) -> bool:
    """Whether passes follow gathered rows from now on, as none of the layers of which recorded
    calls don't tell enough has seen any before. The layers stay the same.
    """
    with _for_looking(risk):
        return _begins_to_follow(risk, batch, error.keys)


def _begins_to_follow(risk: EmpiricalRisk, batch: Batch, keys: Iterable[str]) -> bool:
    """See `begin_to_follow`."""
    reads = risk.reads or FoundReads()
    if reads.gathered:
        return False
    dry = DryPass(risk, find_uses(risk.model, risk.params), batch)
    if dry.moves_rows or not dry.of_gathered.isdisjoint(keys):
        risk.reads = replace(reads, gathered=True)
    return risk.reads is not None and risk.reads.gathered


def is_expert(risk: EmpiricalRisk, layer: Layer) -> bool:
    """Whether a layer that no batch has called may be one of a mixture of experts, of which another
    one has seen all rows: then a layer of the same shapes sees rows that the model gathers.
    """
    if isinstance(risk.data, Iterator):  # its batches are gone
        return False
    with _for_looking(risk):
        batch = next(risk.batches("functions"), None)
        if batch is None:
            return False
        dry = DryPass(risk, find_uses(risk.model, risk.params), batch)
    shapes = {risk.params[key].shape for key in dry.of_gathered}
    return shapes.issuperset([p.shape for p in layer.params.values()])


@contextmanager
def _for_looking(risk: EmpiricalRisk) -> Iterator[None]:
    """Context of passes that show how parameters are read."""
    with (
        preserve_state(risk.model, risk.data),
        risk.placed(),
        torch.inference_mode(False),
        GradMode(True),
    ):
        yield


def _tried(risk: EmpiricalRisk, previous: FoundReads, failed: Collection[str]) -> str:
    """What to say of modules that were run again for single examples, in vain; the last one is the
    widest.
    """
    names = list[str]()
    for key in risk.params:
        if key in failed and key in previous.enclosing:
            names += [*previous.failed.get(key, ()), previous.enclosing[key]]
    if not names:
        return ""
    modules = [f"{name!r}" if name else "the model itself" for name in dict.fromkeys(names)]
    return (
        f" Running {', then '.join(modules)} again for each example did not help, and there is no "
        "module further out in which examples are told apart."
    )


def find_functions(
    risk: EmpiricalRisk, batch: Batch, failed: Collection[str], previous: FoundReads | None
) -> FoundReads:
    """How functions read parameters outside of modules with rules, from one batch.

    Args:
        failed: Keys of parameters whose gradients are wrong by what is known: of those in tables
            the module gives them that they were spared, of others the next one around.
        previous: What was found before, if somebody has looked. A parameter that a module encloses
            gets no smaller one.
    """
    never = {*failed}
    if previous is None:
        previous = FoundReads()
    else:
        never |= risk.params.keys() - previous.computed.keys()
    failed = [key for key in failed if key not in previous.computed]
    dry = DryPass(risk, find_uses(risk.model, risk.params), batch)
    outside = {
        key: [read for read in reads if not read.answered] for key, reads in dry.reads.items()
    }
    gathered = previous.gathered or dry.moves_rows or not dry.of_gathered.isdisjoint(failed)
    # What has failed is recorded once more if passes begin to follow rows.
    failed_for_good = failed if gathered == previous.gathered else ()
    instead = _instead_of_rules(dry, failed_for_good, previous)
    outside |= {key: dry.reads[key] for key in instead}
    # Parameters that are read by anything but products, some of them as tables.
    taken = {*failed_for_good, *previous.enclosing, *dry.unseen}.difference(instead)
    by_tables = dict.fromkeys(key for key in instead if not _is_recurrent(dry.reads[key]))
    for key, reads in outside.items():
        if key not in taken and not all(read.product for read in reads):
            if all(read.is_broadcast for read in reads):
                by_tables[key] = None
            else:
                taken.add(key)
    calls: list[ParameterProduct] = []
    for key, reads in outside.items():
        if key not in by_tables:
            calls += [read.product for read in reads if read.product]
    for call in calls:
        if _needs_all(call, taken):
            taken.update(call.keys.values())
    products = _products_of(calls, {*taken, *by_tables})
    enclosing: dict[str, str] = {}
    # In the order of the parameters: sets have another one in other processes.
    for key in [key for key in risk.params if key in taken]:
        name = _enclosing_module(risk, dry, key, failed, previous)
        if name is not None:
            enclosing[key] = name
    tried = dict(previous.failed)
    for key, name in previous.enclosing.items():
        if enclosing.get(key) != name:
            tried[key] = (*tried.get(key, ()), name)
    broadcast = {
        key: tuple(
            dict.fromkeys(place for read in outside.get(key, ()) for place in read.broadcasts)
        )
        for key in _broadcast(dry, by_tables, taken, enclosing)
    }
    by_product = {key for product in products for key in product.keys.values()}
    kept = tuple([key for key in instead if key in broadcast or key in by_product])
    found = FoundReads(tuple(products), enclosing, tried, broadcast, {}, kept, gathered)
    return replace(found, computed=_keys_of_tables(risk, dry, found, never))


def _needs_all(call: ParameterProduct, taken: Collection[str]) -> bool:
    """Whether a product has no rule without parameters that are taken.

    A recurrent layer reads all of its weights. Without its weight, the bias of a convolution is on
    another axis than a vector that is added.
    """
    function = call.function
    if function.name in ("linear", "bias"):
        return False
    needed = call.keys.values() if function.is_recurrent else [call.keys.get("weight")]
    return any(key in taken for key in needed)


def _products_of(
    calls: Iterable[ParameterProduct], others: Collection[str]
) -> list[ParameterProduct]:
    """The products, each once, without parameters that get their gradients otherwise: of what has
    lost its weight the bias is left.
    """
    products = []
    for call in calls:
        keys = {name: key for name, key in call.keys.items() if key not in others}
        is_whole = "weight" in keys or call.function.is_recurrent
        of_bias = replace(BIAS, stacked=call.function.stacked)
        product = ParameterProduct(call.function if is_whole else of_bias, keys)
        if keys and product not in products:
            products.append(product)
    return products


def _keys_of_tables(
    risk: EmpiricalRisk, dry: DryPass, found: FoundReads, never: Collection[str]
) -> dict[str, tuple[Any, ...]]:
    """Keys of parameters in tables, each with where they are read, of the modules that need not run
    again because all of theirs are.

    Args:
        never: Keys of others.
    """
    places: dict[str, tuple[Any, ...]] = {}
    for key, reads in dry.reads.items():
        if key in never or key in dry.of_attention:
            continue
        if all(read.is_known for read in reads):
            outside = [read for read in reads if not read.answered or read.again]
            of_key = [place for read in outside for place in (*read.broadcasts, *read.computes)]
            places[key] = tuple(dict.fromkeys(of_key))
    computed: dict[str, tuple[Any, ...]] = {}
    for use in uses_with_reads(risk.model, risk.params, dry.uses, found):
        if use.runs_again and all(places.get(key) for key in use.keys.values()):
            computed |= {key: places[key] for key in use.keys.values()}
    return computed


def _broadcast(
    dry: DryPass,
    by_tables: Collection[str],
    taken: Collection[str],
    enclosing: Mapping[str, str],
) -> list[str]:
    """Keys of parameters that get their gradients where they are broadcast.

    Not so where their module runs again anyway, for other parameters; those that nothing reads, in
    the same module, have gradients of zero.
    """
    keys = dict.fromkeys(by_tables)
    for use in dry.uses:
        held = [*use.keys.values()]
        runs_again = [key for key in held if enclosing.get(key, use.name) == use.name]
        if not use.without_rule or keys.keys().isdisjoint(held):
            continue
        if any(key in taken for key in runs_again):
            for key in held:
                keys.pop(key, None)
        else:
            keys |= dict.fromkeys(key for key in held if key not in dry.reads)
    return [*keys]


def _instead_of_rules(dry: DryPass, failed: Collection[str], previous: FoundReads) -> list[str]:
    """Keys of parameters whose module has a rule, and returns a table, such as one of positions:
    where the table is broadcast, the gradients of each example are. Those of a recurrent layer that
    gets packed sequences are where a function runs its steps.
    """
    known = {*previous.enclosing, *previous.broadcast, *previous.instead}
    instead = [key for key in dry.reads if key in previous.instead and key not in failed]
    for use in dry.uses:
        # All of a layer's, since what its module returns is one table.
        keys = [key for key in use.keys.values() if key in failed]
        reads = [read for key in keys for read in dry.reads.get(key, ())]
        by_function = all(read.is_broadcast for read in reads) or _is_recurrent(reads)
        if known.isdisjoint(keys) and reads and by_function:
            instead += [key for key in keys if key in dry.reads and key not in instead]
    return instead


def _is_recurrent(reads: Collection[ParameterRead]) -> bool:
    """Whether functions that run recurrent layers are all that reads a parameter."""
    return all(read.product and read.product.function.is_recurrent for read in reads)


def _enclosing_module(
    risk: EmpiricalRisk, dry: DryPass, key: str, failed: Collection[str], previous: FoundReads
) -> str | None:
    """The innermost module around all readers of a parameter that may give its gradients, None if
    the one that holds it sees all of them.
    """
    # Modules that run around each of the readers, outermost first.
    frames = zip(*[read.frames for read in dry.reads.get(key, ())])
    common = takewhile(lambda level: len({frame.name for frame in level}) == 1, frames)
    names = [level[0].name for level in common if all(frame.rows for frame in level)]
    holders = {use.name for use in dry.uses if use.without_rule and key in use.keys.values()}
    before = previous.enclosing.get(key)
    if key not in failed and before is None and not holders.isdisjoint(names):
        return None
    modules = dict(risk.model.named_modules())
    around = [n for n in names if any(p is risk.params[key] for p in modules[n].parameters())]
    if before in around:
        # The same module as before, or the next one further out.
        around = around[: around.index(before) + (key not in failed)]
    elif before is None and key in failed:
        by_product = any(key in product.keys.values() for product in previous.products)
        by_product |= key in previous.broadcast
        if not by_product:
            # What holds it has been run again.
            around = [name for name in around if name not in holders or name == ""]
    if around:
        return around[-1]
    if key in dry.unseen or (key in failed and key not in dry.reads):
        # Read where nothing is seen, as under `vmap` or in an autograd function.
        return ""
    return before
