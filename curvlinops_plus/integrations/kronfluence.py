"""Factors for kronfluence: its influence scores run on curvature that was computed here.

kronfluence reads one safetensors file for each kind of factor, with a tensor for each layer under the module's name.
"""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks import KFAC
from curvlinops_plus.blocks.accumulator import Approximation
from curvlinops_plus.integrations.eigenfactors import Eigenfactors, eigenfactors, write_files
from curvlinops_plus.risk import Empirical


def save_factors(K: Any, folder: str | PathLike[str]) -> None:
    """Write KFAC or EKFAC as kronfluence (1.0.1) reads it.

    With `folder="influence_results/<analysis name>/factors_<name>"`, the scores of
    `analyzer.compute_pairwise_scores(factors_name="<name>", ...)` and of `compute_self_scores` use these factors. The
    task's `get_influence_tracked_modules` names the layers of `K`.

    The matrix is `K` itself. That is kronfluence's, whose loss is summed over the terms of an example, if `K` is the
    mean over examples: with a summed loss write `K / K.examples`. kronfluence's KFAC of a layer that is used at S
    positions of an example is S times smaller than ours ("expand"), and so are the eigenvalues of `G` in the file.

    Args:
        K: `curvature(risk, KFAC)` or `curvature(risk, EKFAC)`, or a multiple. All of its layers are `Linear`, or
            `Conv2d` with zero padding and without groups.
        folder: A new or empty folder.

    Raises:
        TypeError: If `K` is another operator.
        UnsupportedError: If kronfluence has no such factors or would compute other gradients: layers of other types,
            shared and function-read parameters, modules that are called several times (of which its scores keep one
            call), blocks that are no Kronecker products, a block for each parameter, a bias that is not tracked, KFAC
            mixed with EKFAC. The message names the layer.
        ValueError: If `K` was loaded without data.
        FileExistsError: If there is something in the folder.
        ImportError: If the package safetensors is missing.

    Cost: an eigendecomposition of each factor of KFAC, and one forward pass over the data, which counts positions.

    Of EKFAC the files of the factors' eigenvalues, which kronfluence loads but does not use then, have the row and
    column means of the corrected ones.

    Example:
        >>> import os, tempfile, torch
        >>> from torch import nn
        >>> from curvlinops_plus import EKFAC, EmpiricalRisk, curvature
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(torch.ones(5, 3), torch.zeros(5).long())])
        >>> with tempfile.TemporaryDirectory() as results:
        ...     save_factors(curvature(risk, EKFAC), f"{results}/analysis/factors_ours")
        ...     len(os.listdir(f"{results}/analysis/factors_ours"))  # six kinds of factors, and factor_arguments.json
        7
    """
    layers = eigenfactors(K, "kronfluence", _why_not, needs_bias=True)
    kfac = all(factors.values_G is not None for factors in layers.values())
    expanded = {entry.layer.name for entry in K.plan if _is_expanded(entry.approximation) and K.vectors.backward}
    files: dict[str, dict[str, Tensor]] = {}
    for name, factors in layers.items():
        of_layer = _kfac(factors, factors.positions if name in expanded else 1.0) if kfac else _ekfac(factors)
        for kind, tensor in of_layer.items():
            files.setdefault(kind, {})[name] = tensor
    path = write_files(folder, files)
    arguments = {
        "strategy": "kfac" if kfac else "ekfac",
        "use_empirical_fisher": isinstance(K.vectors, Empirical),
    }
    (path / "factor_arguments.json").write_text(json.dumps(arguments, indent=4))


def _why_not(module: nn.Module) -> str | None:
    """kronfluence replaces modules of exactly these types; of others it has no gradients."""
    if type(module) is nn.Linear:
        return None
    if type(module) is not nn.Conv2d:
        return "kronfluence has factors of Linear and Conv2d."
    if module.groups > 1:
        return "kronfluence averages the channels of groups."
    if module.padding_mode != "zeros":
        return f"kronfluence pads with zeros, not with padding_mode={module.padding_mode!r}."
    return None


def _is_expanded(approximation: Approximation) -> bool:
    """Whether its factors are sums over positions, which kronfluence divides by their number: its only KFAC."""
    return approximation.kind is KFAC and approximation.options.get("kfac_approx", "expand") == "expand"


def _kfac(factors: Eigenfactors, positions: float) -> dict[str, Tensor]:
    """Covariances, which are means already, and their eigenvalues; `G` is divided by the number of positions."""
    assert factors.values_G is not None
    assert factors.values_A is not None
    values_G = factors.values_G / positions
    one = torch.ones(1, dtype=torch.int64)
    return {
        "activation_covariance": factors.Q_A * factors.values_A @ factors.Q_A.mT,
        "num_activation_covariance_processed": one,
        "gradient_covariance": factors.Q_G * values_G @ factors.Q_G.mT,
        "num_gradient_covariance_processed": one,
        "activation_eigenvectors": factors.Q_A,
        "activation_eigenvalues": factors.values_A,
        "gradient_eigenvectors": factors.Q_G,
        "gradient_eigenvalues": values_G,
    }


def _ekfac(factors: Eigenfactors) -> dict[str, Tensor]:
    values = factors.eigenvalues
    return {
        "activation_eigenvectors": factors.Q_A,
        "activation_eigenvalues": values.mean(0),
        "gradient_eigenvectors": factors.Q_G,
        "gradient_eigenvalues": values.mean(1) / values.mean().clamp(min=torch.finfo(values.dtype).tiny),
        "lambda_matrix": values,
        "num_lambda_processed": torch.ones(1, dtype=torch.int64),
    }
