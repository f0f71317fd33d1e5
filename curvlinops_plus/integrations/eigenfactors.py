"""Eigenvectors and eigenvalues of every layer's block, for packages that know `W [o, i]` with the bias as a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.blocks import BlockwiseLinearOperator
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import Eigendecomposed, Kronecker, LinearOperator, OwnedBlockDiagonal
from curvlinops_plus.risk import EmpiricalRisk, ForwardOnly, Layer, LayerBatch
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.sweep import sweep

_LEAVE_OUT = "Leave its parameters out of `params`"
_KINDS: dict[type[LinearOperator], str] = {Kronecker: "KFAC", Eigendecomposed: "EKFAC"}


@dataclass(frozen=True)
class Eigenfactors:
    """The block of a layer, `(Q_G ⊗ Q_A) diag(eigenvalues) (Q_G ⊗ Q_A)ᵀ` on the row-major vector of `W [o, i]`.

    Attributes:
        layer: The layer; the last of its i columns is the bias, if it has one.
        module: Its module.
        Q_G: Eigenvectors of the rows, the columns of [o, o].
        Q_A: Eigenvectors of the columns, the columns of [i, i].
        eigenvalues: [o, i].
        positions: At how many positions of an example the weight is used, in the mean.
        values_G: Of KFAC the eigenvalues of `G` [o], times the operator's factor; None of EKFAC.
        values_A: Of KFAC the eigenvalues of `A` [i]; None of EKFAC.
    """

    layer: Layer
    module: nn.Module
    Q_G: Tensor
    Q_A: Tensor
    eigenvalues: Tensor
    positions: float
    values_G: Tensor | None = None
    values_A: Tensor | None = None


def eigenfactors(
    K: Any, package: str, why_not: Callable[[nn.Module], str | None], needs_bias: bool
) -> dict[str, Eigenfactors]:
    """Decompose the blocks of an operator, by the names of layers.

    Args:
        K: As `curvature` returns it, or a multiple.
        package: The name of the package that reads them, for messages.
        why_not: What the package can't do with a module, None if nothing.
        needs_bias: Whether the bias of a module that has one must be tracked.

    Raises:
        TypeError: If `K` is another operator.
        UnsupportedError: If a block can't be said in these terms, naming the layer.

    Cost: one forward pass over the data, an eigendecomposition of each factor of KFAC.
    """
    if not isinstance(K, BlockwiseLinearOperator):
        raise TypeError(
            f"Expected what curvature(risk, KFAC) or curvature(risk, EKFAC) returns, or a multiple of it, got "
            f"{type(K).__name__}: sums, inverses and operators of other kinds have no factors that {package} reads."
        )
    if isinstance(K.unscaled, OwnedBlockDiagonal):
        raise UnsupportedError(
            "The blocks are kept apart by several processes. Save the operator with save(K, path), and load it in one."
        )
    if not K.scale >= 0:
        raise UnsupportedError(f"Expected a positive semi-definite operator, got one times {float(K.scale):g}.")
    layers = [entry.layer for entry in K.plan]
    blocks = [K.unscaled.blocks[layer.groups[0].name] for layer in layers]
    for layer, block in zip(layers, blocks):
        if problem := _problem_of_module(layer, why_not, needs_bias) or _problem_of_block(layer, block):
            raise UnsupportedError(f"{layer.title} {problem} ({package}.save_factors)")
        if type(block) is not type(blocks[0]):
            raise UnsupportedError(
                f"{layer.title} is {_KINDS[type(block)]}, and {layers[0].title} is {_KINDS[type(blocks[0])]}; the "
                f"factors of a folder are all of one kind. Compute both alike. ({package}.save_factors)"
            )
    positions = _positions(K.risk, layers, package)
    scale = float(K.scale)
    return {layer.name: _decomposed(layer, block, scale, positions[layer]) for layer, block in zip(layers, blocks)}


def _problem_of_module(layer: Layer, why_not: Callable[[nn.Module], str | None], needs_bias: bool) -> str | None:
    """Why such packages don't have gradients of a layer as those of one module with its bias."""
    first = layer.uses[0]
    if problem := why_not(first.owner):
        return f"is of type {type(first.owner).__name__}: {problem} {_LEAVE_OUT}."
    if any(use.function is not None or use.module is not use.owner for use in layer.uses):
        return f"is read by a function, which no hook of its module sees. {_LEAVE_OUT}."
    if len(layer.uses) > 1:
        names = [use.name for use in layer.uses]
        return f"shares parameters between {names}, and factors there belong to one module. {_LEAVE_OUT}."
    if not layer.name:
        return "has no name there. Put it into nn.Sequential."
    missing = {name for name, _ in first.owner.named_parameters(recurse=False)} - first.keys.keys()
    if missing - (set() if needs_bias else {"bias"}):
        return (
            f"has parameters {sorted(missing)} that are not in `params`, and factors there have all of them. Add them, "
            "or leave out all of the layer's."
        )
    return None


def _problem_of_block(layer: Layer, block: LinearOperator) -> str | None:
    """Why a block is no Kronecker product for one matrix with the bias as last column."""
    group, *others = layer.groups
    if others:
        return (
            "has a block for each of its parameters, and factors there have the bias as last column. Use "
            "curvature(risk, …) with separate_weight_and_bias=False, its default."
        )
    if len(group.layout.matrix_shape) != 2 or (layer.bias is not None and group.keys[-1] != layer.bias):
        return f"has parameters {group.layout}, not one matrix with the bias as last column. {_LEAVE_OUT}."
    product = block.basis if isinstance(block, Eigendecomposed) else block
    if type(block) not in _KINDS or not isinstance(product, Kronecker):
        return (
            f"has a block of type {type(block).__name__}, and factors there are Kronecker products. Use KFAC or EKFAC "
            "for it, or leave its parameters out of `params`."
        )
    return None


def _positions(risk: EmpiricalRisk, layers: Sequence[Layer], package: str) -> dict[Layer, float]:
    """Positions per example of each layer, in the mean; a forward pass that refuses several calls of one module."""
    rows, examples = (dict.fromkeys(layers, 0.0) for _ in range(2))

    def consume(batch: LayerBatch) -> None:
        layer, w = batch.layer, batch.example_weights
        if len(batch.calls) > 1:
            raise UnsupportedError(
                f"{layer.title} is called {len(batch.calls)} times in a forward pass, and the gradients of {package} "
                f"are those of one call. {_LEAVE_OUT}."
            )
        rows[layer] += float(batch.rows.input_gram(diagonal=True)[1])
        examples[layer] += batch.num_examples if w is None else float(w.sum())

    with preserve_state(risk.model, risk.data):
        sweep(risk, layers, ForwardOnly(), consume, desc="counting positions")
    return {layer: rows[layer] / examples[layer] for layer in layers}


def _decomposed(layer: Layer, block: LinearOperator, scale: float, positions: float) -> Eigenfactors:
    module = layer.uses[0].owner
    if isinstance(block, Kronecker):
        (values_G, Q_G), (values_A, Q_A) = block.G.eigh(), block.A.eigh()
        values_G = scale * values_G
        values = values_G[:, None] * values_A
        return Eigenfactors(layer, module, Q_G.to_dense(), Q_A.to_dense(), values, positions, values_G, values_A)
    assert isinstance(block, Eigendecomposed)
    assert isinstance(block.basis, Kronecker)
    values = scale * block.values.view(layer.groups[0].layout.matrix_shape)
    return Eigenfactors(layer, module, block.basis.G.to_dense(), block.basis.A.to_dense(), values, positions)


def write_files(folder: str | PathLike[str], files: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Write safetensors files into a folder that is new or empty.

    Args:
        folder: The folder; it is made if there is none.
        files: Path in the folder, without `.safetensors`, to layer name to tensor.

    Raises:
        ImportError: If the package safetensors is missing.
        FileExistsError: If there is something in the folder.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("save_factors needs the package safetensors: pip install safetensors.") from error

    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already, and not an empty folder: factors of two kinds would be mixed.")
    for name, tensors in files.items():
        file = path / f"{name}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        # Files hold tensors that share no memory.
        save_file({layer: t.detach().cpu().clone().contiguous() for layer, t in tensors.items()}, file)
    return path
