"""The state of a block-diagonal operator: what it says about itself, its blocks, and what can be made of it again.

Options are stored as data: `{"kind": name of the class, "options": {name: value}}` for the approximation of each layer
and for the vectors. Version 1 stored the `repr` of both; such states are converted when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.factor_views import VALUES, blocks_from_factors, factor_names, read_factor
from curvlinops_plus.blocks.fingerprint import Fingerprint
from curvlinops_plus.blocks.plan import LayerPlan
from curvlinops_plus.blocks.stored_options import (
    as_data,
    rebuild_approximations,
    rebuild_vectors,
    same_data,
)
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import BlockDiagonal, Kronecker, LinearOperator, Space
from curvlinops_plus.linalg.packing import FORMAT, copied, pack, taken, unpack
from curvlinops_plus.risk import EmpiricalRisk, Group, Vectors
from curvlinops_plus.risk.function_reads import describe_reads, layers_of, rebuild_reads
from curvlinops_plus.risk.losses import rebuild_losses

VERSION = 1
# Without them a state is cut off; "examples", "blocks" and factors are there as soon as blocks are computed.
KEYS = (
    "format",
    "version",
    "class",
    "loss_type",
    "loss_reduction",
    "loss_options",
    "fisher_type",
    "vectors",
    "seed",
    "mc_samples",
    "separate_weight_and_bias",
    "num_data",
    "num_per_example_loss_terms",
    "progressbar",
    "dtype",
    "scale",
    "layers",
    "reads",
    "fingerprint",
)


class StateOwner(Protocol):
    """What a state needs of the operator that it is of."""

    plan: list[LayerPlan]
    risk: EmpiricalRisk
    vectors: Vectors
    separate_weight_and_bias: bool
    scale: float | Tensor
    adopts_vectors: bool
    parameters: Fingerprint

    @property
    def in_space(self) -> Space: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


# --------------------------------------------------------------------------------------------------------- description
def describe(K: StateOwner) -> dict[str, Any]:
    """The part of a state that says what the blocks are of, without the blocks."""
    losses = K.risk.losses
    return {
        "format": FORMAT,
        "version": VERSION,
        "class": type(K).__name__,
        "loss_type": type(losses.given).__name__,
        "loss_reduction": losses.reduction,
        "loss_options": losses.options(),
        "fisher_type": K.vectors.fisher_type,
        "vectors": as_data(K.vectors),
        "seed": K.vectors.seed,
        "mc_samples": getattr(K.vectors, "samples", 1),
        "separate_weight_and_bias": K.separate_weight_and_bias,
        "num_data": K.risk.options.num_data,
        "num_per_example_loss_terms": K.risk.options.num_per_example_loss_terms,
        "progressbar": K.risk.options.progressbar,
        "dtype": str(K.dtype).removeprefix("torch."),
        "scale": float(K.scale),
        "layers": {
            entry.layer.name: {
                "approximation": as_data(entry.approximation),
                "parameters": {key: list(p.shape) for key, p in entry.layer.params.items()},
            }
            for entry in K.plan
        },
        "reads": describe_reads(K.risk.reads),
        "fingerprint": dict(K.parameters),
    }


# -------------------------------------------------------------------------------------------------------------- checks
def read_state(state: Any) -> Mapping[str, Any]:
    """A state, if it is one.

    Raises:
        ValueError: If it is foreign, cut off, or of another version.
    """
    if not isinstance(state, Mapping):
        read = ", as load(path) reads it from a file" if isinstance(state, (str, PathLike)) else ""
        raise ValueError(
            f"This is not a state of curvlinops_plus: expected what K.state_dict() returns{read}, got a "
            f"{type(state).__name__}."
        )
    if state.get("format") != FORMAT:
        raise ValueError("This is not a state of curvlinops_plus: the key 'format' is missing or foreign.")
    if "space" in state and "blocks" in state:
        raise ValueError(
            f"This is the state of a {state.get('class')}, which knows neither model nor data: read it by "
            "BlockDiagonal.from_state_dict(state)."
        )
    if (version := state.get("version")) != VERSION:
        raise ValueError(f"The state has version {version}; this package reads version {VERSION}.")
    if missing := [key for key in KEYS if key not in state]:
        raise ValueError(f"The state lacks {missing}; is the file cut off?")
    return state


def check_state(K: StateOwner, state: Mapping[str, Any]) -> None:
    """Compare what a state of the present version says of itself with an operator.

    Raises:
        ValueError: If it is of something else.
    """
    mine = describe(K)
    words = {
        "class": "class",
        "loss_type": "loss",
        "loss_reduction": "loss reduction",
        "fisher_type": "Fisher type",
        "separate_weight_and_bias": "option",
    }
    for key, word in words.items():
        if state[key] != mine[key]:
            raise ValueError(
                f"State mismatch in the {word} ({key}): the state has {state[key]!r}, this operator {mine[key]!r}."
            )
    if not same_data(state["loss_options"], mine["loss_options"]):
        raise ValueError(
            f"State mismatch in the loss options: the state has {state['loss_options']}, this operator "
            f"{mine['loss_options']}."
        )
    if not K.adopts_vectors and not same_data(state["vectors"], mine["vectors"]):
        raise ValueError(
            f"State mismatch in the vectors: the state was computed with {state['vectors']}, this operator has "
            f"{mine['vectors']}."
        )
    for name in [*mine["layers"], *state["layers"]]:
        theirs, ours = state["layers"].get(name), mine["layers"].get(name)
        if not same_data(theirs, ours):
            raise ValueError(f"State mismatch in layer {name!r}: the state has {theirs}, this operator {ours}.")
    if state["dtype"] != mine["dtype"]:
        raise ValueError(
            f"State mismatch in the dtype: the state has {state['dtype']}, this operator {mine['dtype']}. Convert the "
            f"model before, `model.to(torch.{state['dtype']})`; operators by themselves also have `K.to(dtype=...)`."
        )


# -------------------------------------------------------------------------------------------------------------- blocks
def write_blocks(K: StateOwner, operator: BlockDiagonal) -> dict[str, Any]:
    """The part of a state that holds the blocks of this process: factors under curvlinops' names, all others under
    "blocks".
    """
    state: dict[str, Any] = {"blocks": {}}
    for part in block_parts(K, operator.blocks).values():
        for name, content in part.items():
            state[name] = state.get(name, {}) | content
    return state


def block_parts(K: StateOwner, blocks: Mapping[str, LinearOperator]) -> dict[str, dict[str, Any]]:
    """What of a state belongs to each of these blocks, or to each layer that has factors."""
    parts: dict[str, dict[str, Any]] = {}
    for entry in K.plan:
        layer, names = entry.layer, factor_names(entry)
        if names and layer.groups[0].name in blocks:
            factors = {name: read_factor(layer, name, blocks, K.in_space) for name in names}
            content = {name: {layer.name: _each(factor, copied)} for name, factor in factors.items()}
            parts |= dict.fromkeys(part_names(entry, blocks), content)
        elif not names:
            named = zip(part_names(entry, blocks), (g.name for g in layer.groups if g.name in blocks), strict=True)
            parts |= {part: {"blocks": {name: pack(blocks[name])}} for part, name in named}
    return parts


def part_names(entry: LayerPlan, blocks: Container[str]) -> list[str]:
    """The names of the parts that the blocks of a layer are in, as far as they are among `blocks`."""
    groups = [group.name for group in entry.layer.groups if group.name in blocks]
    return [f"layer {entry.layer.name}"] * bool(groups) if factor_names(entry) else [f"block {name}" for name in groups]


def read_blocks(
    K: StateOwner, state: Mapping[str, Any], keeps: Callable[[str], bool]
) -> dict[str, LinearOperator] | None:
    """The blocks of a state that this process keeps, on its device; None if it was saved before any were computed.

    Raises:
        ValueError: If a block is missing or has another size.
    """
    missing = [key for key in ("examples", "blocks") if key not in state]
    if len(missing) == 2:
        return None
    if missing:
        raise ValueError(f"The state lacks {missing}; is the file cut off?")
    blocks = {name: unpack(block, K.device) for name, block in state["blocks"].items() if keeps(name)}
    for entry in K.plan:
        mine = [group for group in entry.layer.groups if keeps(group.name)]
        if mine and factor_names(entry):
            blocks |= _read_factored(entry, state, K.in_space, K.device)
        for group in mine:
            if group.name not in blocks:
                raise ValueError(f"The state lacks block {group.name!r}; is the file cut off?")
            _check_size(group, blocks[group.name])
    return blocks


def _check_size(group: Group, block: LinearOperator) -> None:
    expected = group.layout.dim
    if block.shape[0] != expected:
        raise ValueError(f"State mismatch in block {group.name!r}: its size is {block.shape[0]}, expected {expected}.")
    if isinstance(block, Kronecker) and (block.G.size, block.A.size) != group.layout.matrix_shape[-2:]:
        raise ValueError(
            f"State mismatch in block {group.name!r}: its factors G and A have sizes {block.G.size} and "
            f"{block.A.size}, expected {group.layout.matrix_shape[-2:]}."
        )


def _read_factored(
    entry: LayerPlan, state: Mapping[str, Any], space: Space, device: torch.device
) -> dict[str, LinearOperator]:
    title = entry.layer.title
    factors: dict[str, Any] = {}
    for name in factor_names(entry):
        if name not in state or entry.layer.name not in state[name]:
            raise ValueError(f"The state lacks {name} of {title}; is the file cut off?")
        factors[name] = state[name][entry.layer.name]
    try:
        factors = {name: _each(factor, lambda t: taken(t, device)) for name, factor in factors.items()}
        if isinstance(values := factors.get(VALUES), Mapping):  # by positions among the parameters, which may differ
            order = [name for name in state["fingerprint"] if name in space.names]
            factors[VALUES] = {space.names.index(order[position]): t for position, t in values.items()}
        return blocks_from_factors(entry, factors, space)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"State mismatch in {title}: its factors do not fit together ({error}).") from error
    except ValueError as error:
        raise ValueError(f"State mismatch in {title}: {error}") from error


def _each(value: Any, function: Any) -> Any:
    """Apply a function to a tensor, or to every tensor of a dict."""
    return {k: function(t) for k, t in value.items()} if isinstance(value, Mapping) else function(value)


# ---------------------------------------------------------------------------------------------------------- rebuilding
def rebuild_arguments(
    state: Mapping[str, Any],
    *,
    model: nn.Module,
    data: Iterable[Any] | None,
    params: Sequence[Tensor] | Mapping[str, Tensor] | None,
    loss: Any = None,
    approximations: Iterable[type[Accumulator]] = (),
    vectors: Vectors | None = None,
    **risk_options: Any,
) -> dict[str, Any]:
    """The arguments of `BlockwiseLinearOperator` that a state of the present version describes.

    For the others see `BlockwiseLinearOperator.from_state_dict`.
    """
    if loss is None:
        try:
            loss = rebuild_losses(state["loss_options"])
        except UnsupportedError as error:
            raise ValueError(
                f"The loss {state['loss_type']} can't be made again from saved options. Pass it: from_state_dict(..., "
                "loss=...), which is loss_func=... of KFACLinearOperator and the like."
            ) from error
    risk = EmpiricalRisk(
        model,
        loss,
        NoData() if data is None else data,
        params,
        num_data=state["num_data"],
        num_per_example_loss_terms=state["num_per_example_loss_terms"],
        progressbar=state["progressbar"],
        **risk_options,
    )
    separate = state["separate_weight_and_bias"]
    risk.reads = rebuild_reads(risk, state.get("reads"))
    known, found = (
        {layer.name for layer in layers_of(risk, separate)},
        rebuild_approximations(state, approximations),
    )
    return {
        "risk": risk,
        "approximation": {name: kind for name, kind in found.items() if name in known},  # `check_state` tells the rest
        "vectors": rebuild_vectors(state["vectors"]) if vectors is None else vectors,
        "separate_weight_and_bias": separate,
    }


class NoData(Sequence[Any]):
    """The data of an operator that was loaded without any."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        raise ValueError(
            "This operator was loaded without data (data=None): it has the blocks of its state, and can't compute, "
            "verify or differentiate anything anew. Pass the data to from_state_dict."
        )
