"""What the state of a block-diagonal operator says about itself, and whether it fits another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlinops_plus.blocks.factor_views import views
from curvlinops_plus.blocks.kfac import EKFAC, KFAC, ekfac_blocks, kfac_blocks
from curvlinops_plus.blocks.serialization import FORMAT, VERSION, fingerprint, pack, unpack
from curvlinops_plus.linalg import BlockDiagonal, Kronecker, LinearOperator
from curvlinops_plus.risk import Layer

if TYPE_CHECKING:
    from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator

__all__ = ["check_state", "describe", "read_blocks", "write_blocks"]


def describe(K: BlockwiseLinearOperator) -> dict[str, Any]:
    """The part of a state that says what the blocks are of, without the blocks."""
    losses = K.risk.losses
    losses.require_likelihoods()
    return {
        "format": FORMAT,
        "version": VERSION,
        "class": type(K).__name__,
        "loss_type": type(losses.given).__name__,
        "loss_reduction": losses.reduction,
        "loss_options": losses.options(),
        "fisher_type": K.vectors.fisher_type,
        "vectors": repr(K.vectors),
        "seed": K.vectors.seed,
        "mc_samples": getattr(K.vectors, "samples", 1),
        "separate_weight_and_bias": K.separate_weight_and_bias,
        "num_data": K.risk.options.num_data,
        "num_per_example_loss_terms": K.risk.options.num_per_example_loss_terms,
        "progressbar": K.risk.options.progressbar,
        "dtype": str(K.dtype).removeprefix("torch."),
        "layers": {
            entry.layer.name: {
                "approximation": repr(entry.approximation),
                "parameters": {key: list(p.shape) for key, p in entry.layer.params.items()},
            }
            for entry in K.plan
        },
        "fingerprint": fingerprint(K.risk.params),
    }


def write_blocks(K: BlockwiseLinearOperator, operator: BlockDiagonal) -> dict[str, Any]:
    """The part of a state that holds the blocks: factors under curvlinops' names, all others under "blocks"."""
    factored = {g.name for e in K.plan if issubclass(e.approximation.kind, KFAC) for g in e.layer.groups}
    state: dict[str, Any] = {"blocks": {name: pack(b) for name, b in operator.blocks.items() if name not in factored}}
    for name, factors in views(K).items():
        if len(factors):
            state[name] = {layer: _each(value, _copy) for layer, value in factors.items()}
    return state


def check_state(K: BlockwiseLinearOperator, state: Any) -> None:
    """Compare what a state says of itself with an operator.

    Raises:
        ValueError: If the state is foreign, cut off, or of something else.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise ValueError("This is not a state of curvlinops_plus: the key 'format' is missing or foreign.")
    mine = describe(K)
    missing = [key for key in mine if key not in state]
    if missing:
        raise ValueError(f"The state lacks {missing}; is the file cut off?")
    if state["version"] > VERSION:
        raise ValueError(
            f"The state has version {state['version']}; this package reads up to {VERSION}. Update curvlinops_plus."
        )
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
    if not _same_options(state["loss_options"], mine["loss_options"]):
        raise ValueError(
            f"State mismatch in the loss options: the state has {state['loss_options']}, this operator "
            f"{mine['loss_options']}."
        )
    if not K.adopts_vectors and state["vectors"] != mine["vectors"]:
        raise ValueError(
            f"State mismatch in the vectors: the state was computed with {state['vectors']}, this operator has "
            f"{mine['vectors']}."
        )
    for name in [*mine["layers"], *state["layers"]]:
        theirs, ours = state["layers"].get(name), mine["layers"].get(name)
        if theirs != ours:
            raise ValueError(f"State mismatch in layer {name!r}: the state has {theirs}, this operator {ours}.")
    if state["dtype"] != mine["dtype"]:
        raise ValueError(
            f"State mismatch in the dtype: the state has {state['dtype']}, this operator {mine['dtype']}. Convert "
            "one of "
            f"them with `K.to(dtype=...)`."
        )


def read_blocks(K: BlockwiseLinearOperator, state: Mapping[str, Any]) -> dict[str, LinearOperator] | None:
    """The blocks of a state on the operator's device; None if it was saved before any were computed.

    Raises:
        ValueError: If a block is missing or has another size.
    """
    if "blocks" not in state and "examples" not in state:
        return None  # saved before anything was computed
    missing = [key for key in ("examples", "blocks") if key not in state]
    if missing:
        raise ValueError(f"The state lacks {missing}; is the file cut off?")
    blocks = {name: unpack(block, K.device) for name, block in state["blocks"].items()}
    for entry in K.plan:
        if issubclass(entry.approximation.kind, KFAC):
            blocks.update(_factored_blocks(K, entry.layer, issubclass(entry.approximation.kind, EKFAC), state))
    for entry in K.plan:
        for group in entry.layer.groups:
            if group.name not in blocks:
                raise ValueError(f"The state lacks block {group.name!r}; is the file cut off?")
            dim, expected = blocks[group.name].shape[0], sum(K.risk.params[key].numel() for key in group.keys)
            if dim != expected:
                raise ValueError(f"State mismatch in block {group.name!r}: its size is {dim}, expected {expected}.")
            block = blocks[group.name]
            if isinstance(block, Kronecker) and (block.G.size, block.A.size) != group.layout.matrix_shape[-2:]:
                raise ValueError(
                    f"State mismatch in block {group.name!r}: its factors G and A have sizes {block.G.size} and "
                    f"{block.A.size}, expected {group.layout.matrix_shape[-2:]}."
                )
    return blocks


def _factored_blocks(
    K: BlockwiseLinearOperator, layer: Layer, corrected: bool, state: Mapping[str, Any]
) -> dict[str, LinearOperator]:
    def factor(view: str) -> Any:
        try:
            return _each(state[view][layer.name], lambda t: _copy(t).to(K.device))
        except KeyError as error:
            raise ValueError(f"The state lacks {view} of {layer.title}; is the file cut off?") from error

    try:
        if not corrected:
            A = None if layer.weight is None else factor("input_covariances")
            return kfac_blocks(layer, A, factor("gradient_covariances"))
        QA = None if layer.weight is None or layer.sparse else factor("input_covariances_eigenvectors")
        values, order = factor("corrected_eigenvalues"), list(K.risk.params)
        named = {g.name: values[order.index(g.keys[0])] if isinstance(values, dict) else values for g in layer.groups}
        return ekfac_blocks(layer, factor("gradient_covariances_eigenvectors"), QA, named)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"State mismatch in {layer.title}: its factors do not fit together ({error}).") from error
    except ValueError as error:
        raise error if layer.title in str(error) else ValueError(f"State mismatch in {layer.title}: {error}") from error


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and bool(torch.allclose(a.cpu().double(), b.cpu().double(), rtol=1e-6))
        return type(a) is type(b) and a == b

    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


def _each(value: Any, function: Any) -> Any:
    """Apply a function to a tensor, or to every tensor of a dict."""
    return {k: function(t) for k, t in value.items()} if isinstance(value, Mapping) else function(value)


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format)
