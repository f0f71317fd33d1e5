"""Factors for bergson: its preconditioners are made from curvature that was computed here.

bergson reads folders of eigenvectors and eigenvalues, each with one safetensors file for each process, which has some
rows of every layer's tensor.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

from torch import Tensor, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.integrations.eigenfactors import Eigenfactors, eigenfactors, write_files


def save_factors(K: Any, folder: str | PathLike[str], *, shards: int = 1) -> None:
    """Write KFAC or EKFAC as bergson (2.5) reads it.

    `bergson.hessians.preconditioner.load_preconditioner(folder)` multiplies with the damped inverse of `K`, with
    `ev_correction=True` if `K` is EKFAC; so do the steps of bergson's pipelines that are given a Hessian's path.

    The matrix is `K` itself. bergson's is the mean over documents of what its `loss_reduction` makes of one: with a
    summed loss write `K / K.examples`. Names are those in `model.base_model`, where the model has one, as bergson's.

    Args:
        K: `curvature(risk, KFAC)` or `curvature(risk, EKFAC)`, or a multiple. All of its layers are `Linear` or
            `Conv1D` of transformers. Either no bias is in `params`, or those of all modules are: bergson's
            `include_bias`, which is False by default.
        folder: A new or empty folder.
        shards: The number of processes that read it together; one process reads any number.

    Raises:
        TypeError: If `K` is another operator.
        ValueError: If `shards` is less than 1, or `K` was loaded without data.
        UnsupportedError: If bergson has no such factors: layers of other types, shared and function-read parameters,
            modules that are called several times (of which its gradients keep one call), blocks that are no Kronecker
            products, a block for each parameter, only some of the biases, KFAC mixed with EKFAC, layers outside of
            `model.base_model`. The message names the layer.
        FileExistsError: If there is something in the folder.
        ImportError: If the package safetensors is missing.

    Cost: an eigendecomposition of each factor of KFAC, and one forward pass over the data, which looks for modules that
    are called several times.

    Example:
        >>> import os, tempfile, torch
        >>> from torch import nn
        >>> from curvlinops_plus import EKFAC, EmpiricalRisk, curvature
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(torch.ones(5, 3), torch.zeros(5).long())])
        >>> with tempfile.TemporaryDirectory() as results:
        ...     save_factors(curvature(risk, EKFAC), f"{results}/ekfac")
        ...     sorted(os.listdir(f"{results}/ekfac"))
        ['eigen_activation_sharded', 'eigen_gradient_sharded', 'eigenvalue_correction_sharded']
    """
    if shards < 1:
        raise ValueError(f"Expected shards to be at least 1, got {shards}.")
    layers = eigenfactors(K, "bergson", _why_not, needs_bias=False)
    _require_same_biases(layers)
    names = _names(K.risk.model, layers)
    files: dict[str, dict[str, Tensor]] = {}
    for name, factors in layers.items():
        for rank in range(shards):
            for kind, tensor in _tensors(factors, rank, shards).items():
                files.setdefault(f"{kind}/shard_{rank}", {})[names[name]] = tensor
    write_files(folder, files)


def _why_not(module: nn.Module) -> str | None:
    """Other layers have gradients in bergson, but no factors."""
    kind = type(module)
    linear = kind is nn.Linear or f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D"
    return None if linear else "bergson has factors of Linear, and of Conv1D of transformers."


def _require_same_biases(layers: dict[str, Eigenfactors]) -> None:
    have = {name: f.layer for name, f in layers.items() if getattr(f.module, "bias", None) is not None}
    biased = {name: layer.bias is not None for name, layer in have.items()}
    if len(set(biased.values())) > 1:
        name = next(name for name, tracked in biased.items() if not tracked)
        raise UnsupportedError(
            f"{have[name].title} has a bias that is not in `params`, and other biases are. bergson has all of "
            "them or none (include_bias): add it, or leave all out."
        )


def _names(model: nn.Module, layers: dict[str, Eigenfactors]) -> dict[str, str]:
    """Layer name to the module's name in the part of the model that bergson reads."""
    base = getattr(model, "base_model", model)
    known = {id(module): name for name, module in base.named_modules()}
    for factors in layers.values():
        if not known.get(id(factors.module)):
            raise UnsupportedError(
                f"{factors.layer.title} is not in `model.base_model`, the part of the model that bergson reads. Leave "
                "its parameters out of `params`."
            )
    return {name: known[id(factors.module)] for name, factors in layers.items()}


def _tensors(factors: Eigenfactors, rank: int, shards: int) -> dict[str, Tensor]:
    """Of each kind of tensor the rows of one process; the input factor's eigenvalues are whole in each."""

    def part(t: Tensor) -> Tensor:
        base, rest = divmod(len(t), shards)
        return t[: base + rest] if rank == 0 else t[rest + rank * base : rest + (rank + 1) * base]

    basis = {"eigen_activation_sharded": part(factors.Q_A), "eigen_gradient_sharded": part(factors.Q_G)}
    if factors.values_G is None or factors.values_A is None:
        return {**basis, "eigenvalue_correction_sharded": part(factors.eigenvalues)}
    of_factors = {"factor_eig_a": factors.values_A, "factor_eig_g": part(factors.values_G)}
    return {**basis, "eigenvalue_sharded": part(factors.eigenvalues), **of_factors}
