"""What was found of how functions read parameters, and how states describe it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from curvlinops_plus.layer.functions import Function


class ParameterProduct(NamedTuple):
    """A function that multiplies with parameters, or adds them, and the keys of its "weight" and
    "bias".
    """

    function: Function
    keys: dict[str, str]


@dataclass(frozen=True, eq=False)
class FoundReads:
    """What a forward pass showed of how parameters are read, beyond the types of modules.

    Attributes:
        products: Functions that read parameters in addition to modules with rules of their own, and
            instead of modules without.
        enclosing: Keys of parameters that other functions read outside of the module that holds
            them, each with the name of the innermost module in which they all are, and that gives
            their gradients when it runs again.
        failed: Keys of parameters, each with the names of modules that were run again before, and
            did not.
        broadcast: Keys of parameters that functions broadcast over examples, each with where they
            do.
        computed: Keys of parameters that functions broadcast, or multiply with as weights,
            themselves or in tables, of modules that would run again else; each with where they do.
        instead: Keys of broadcast ones where this is taken instead of the calls of a module with a
            rule of its own.
        gathered: Whether layers see rows that were gathered from those of the examples, as in
            mixtures of experts: passes follow where rows come from.
    """

    products: Sequence[ParameterProduct] = ()
    enclosing: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    broadcast: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    computed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    instead: Sequence[str] = ()
    gathered: bool = False


def describe_reads(reads: FoundReads | None) -> dict[str, Any] | None:
    """What was found, in plain Python."""
    if reads is None:
        return None
    products = []
    for function, keys in reads.products:
        options = _lists(function.options)
        products.append({"keys": dict(keys), "function": asdict(function) | {"options": options}})
    return {
        "products": products,
        "enclosing": dict(reads.enclosing),
        "broadcast": {key: _lists(places) for key, places in reads.broadcast.items()},
        "computed": {key: _lists(places) for key, places in reads.computed.items()},
        "instead": [*reads.instead],
        "gathered": reads.gathered,
    }


def extent(described: Mapping[str, Any]) -> tuple[int, int, int, bool, int]:
    """How far somebody has looked who describes reads so: the more parameters are enclosed, in the
    larger modules, of which more run again.
    """
    depths = [len(name.split(".")) if name else 0 for name in described["enclosing"].values()]
    number = len(described["products"]) + len(described["broadcast"])
    again = -len(described["computed"])
    return len(depths), -sum(depths), number, described["gathered"], again


def rebuild_reads(params: Collection[str], data: Mapping[str, Any] | None) -> FoundReads | None:
    """Undo `describe_reads`, for parameters with these keys.

    Raises:
        ValueError: If others are described.
    """
    if data is None:
        return None
    products = []
    for described in data["products"]:
        options = _tuples(described["function"]["options"])
        function = Function(**described["function"] | {"options": options})
        products.append(ParameterProduct(function, dict(described["keys"])))
    keys = {key for product in products for key in product.keys.values()}
    computed = data.get("computed", {})  # states of before have none
    keys |= data["enclosing"].keys() | data["broadcast"].keys() | computed.keys()
    missing = keys - {*params}
    if missing:
        raise ValueError(
            f"State mismatch in the parameters: the state has {sorted(missing)}, this risk has not."
        )
    return FoundReads(
        tuple(products),
        dict(data["enclosing"]),
        broadcast={key: _tuples(places) for key, places in data["broadcast"].items()},
        computed={key: _tuples(places) for key, places in computed.items()},
        instead=[*data["instead"]],
        gathered=data["gathered"],
    )


def _lists(value: Any) -> Any:
    return [*map(_lists, value)] if isinstance(value, (list, tuple)) else value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
