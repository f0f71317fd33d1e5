"""How do kronfluence and bergson read EKFAC from here? Their files hold one tensor per layer, in
safetensors.

Both store a layer's block as eigenvectors of its rows and columns and a matrix of eigenvalues, `W
[o, i]` with the bias as last column. They support `Linear`, kronfluence also `Conv2d` with zero
padding and without groups, bergson also transformers' `Conv1D`; each layer must be called once,
with all of its parameters tracked.

    python examples/export_factors.py   # needs safetensors; a second; writes into a temporary
    folder
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from curvlinops_plus import EKFAC, EmpiricalRisk, curvature


def eigenfactors(K):
    """Name of each layer to `(Q_G [o, o], Q_A [i, i], eigenvalues [o, i])` of an EKFAC operator."""
    return {
        name: (
            block.basis.G.to_dense(),
            block.basis.A.to_dense(),
            block.values.view(block.basis.G.size, -1),
        )
        for name, block in K.blocks.items()
    }


def for_kronfluence(K, folder, empirical=False):
    """As kronfluence 1.0.1 reads factors: `folder` is `influence_results/<analysis
    name>/factors_<name>`.

    Its loss is a sum over the terms of an example and its matrix a mean over examples: of a summed
    loss, write the factors of `K / K.examples`. `empirical` says whether `K` has
    `vectors=Empirical()`.
    """
    files, one = {}, torch.ones(1, dtype=torch.int64)
    for name, (Q_G, Q_A, values) in eigenfactors(K).items():
        tensors = {
            "activation_eigenvectors": Q_A,
            "activation_eigenvalues": values.mean(0),  # read, and not used
            "gradient_eigenvectors": Q_G,
            "gradient_eigenvalues": values.mean(1) / values.mean(),
            "lambda_matrix": values,
            "num_lambda_processed": one,
        }
        for kind, tensor in tensors.items():
            files.setdefault(kind, {})[name] = tensor
    write(folder, files)
    arguments = {"strategy": "ekfac", "use_empirical_fisher": empirical}
    (Path(folder) / "factor_arguments.json").write_text(json.dumps(arguments, indent=4))


def for_bergson(K, folder):
    """As one process of bergson 2.5 reads a preconditioner with `ev_correction=True`; names are
    those in its model.
    """
    kinds = "eigen_gradient_sharded", "eigen_activation_sharded", "eigenvalue_correction_sharded"
    layers = eigenfactors(K)
    write(
        folder,
        {
            f"{kind}/shard_0": {name: layers[name][i] for name in layers}
            for i, kind in enumerate(kinds)
        },
    )


def write(folder, files):
    for name, tensors in files.items():
        path = Path(folder) / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {layer: t.detach().cpu().clone().contiguous() for layer, t in tensors.items()}, path
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    data = [(torch.randn(20, 5), torch.randint(3, (20,)))]
    K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), EKFAC)
    with TemporaryDirectory() as folder:
        for_kronfluence(K, f"{folder}/analysis/factors_ours")
        for_bergson(K, f"{folder}/ekfac")
        print(
            *sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.*")),
            sep="\n",
        )
        Q_G, Q_A, values = (
            load_file(f"{folder}/analysis/factors_ours/{kind}.safetensors")["0"]
            for kind in ("gradient_eigenvectors", "activation_eigenvectors", "lambda_matrix")
        )
        Q = torch.kron(Q_G, Q_A)
        error = (Q * values.flatten() @ Q.T - K.blocks["0"].to_dense()).abs().max()
        print(f"the first layer's block from the files: off by {error:.0e}")
