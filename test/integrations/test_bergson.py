"""Factors written for bergson are the matrix that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import close
from helpers import F64, normal, seeded
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    EmpiricalRisk,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.integrations.bergson import save_factors

stored = pytest.importorskip("safetensors.torch")
N, S, C = 6, 4, 3


class ClassesFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # [N, S, C] -> [N, C, S]
        return x.transpose(1, 2)


def tokens() -> tuple[nn.Sequential, EmpiricalRisk]:
    """Layers on sequences, and the total loss of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C, bias=False), ClassesFirst()).double()
    X, y = normal(N, S, 4, seed=1), torch.randint(C, (N, S), generator=seeded(2))
    return model, EmpiricalRisk(model, nn.CrossEntropyLoss(reduction="sum"), list(zip(X.split(4), y.split(4))))


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC])
def test_files_have_the_matrix(approximation: Any, shards: int, tmp_path: Path) -> None:
    _, risk = tokens()
    K = 2.5 * curvature(risk, approximation)
    save_factors(K, tmp_path / "new", shards=shards)

    def joined(kind: str, name: str) -> Tensor:
        files = [tmp_path / "new" / kind / f"shard_{rank}.safetensors" for rank in range(shards)]
        return torch.cat([stored.load_file(file)[name] for file in files])

    kind = "eigenvalue_sharded" if approximation is KFAC else "eigenvalue_correction_sharded"
    for name, block in K.blocks.items():
        QG, QA, values = (joined(part, name) for part in ("eigen_gradient_sharded", "eigen_activation_sharded", kind))
        Q = torch.kron(QG, QA)
        close(Q * values.flatten() @ Q.mT, block.to_dense())
        if approximation is KFAC:
            a = stored.load_file(tmp_path / "new" / "factor_eig_a" / f"shard_{shards - 1}.safetensors")[name]
            close(torch.outer(joined("factor_eig_g", name), a), values)
    sizes = [len(stored.load_file(tmp_path / "new" / kind / f"shard_{r}.safetensors")["0"]) for r in range(shards)]
    assert sizes == {1: [5], 2: [3, 2], 4: [2, 1, 1, 1]}[shards]  # the first process takes what is left over


def test_what_it_has_no_factors_for_is_refused(tmp_path: Path) -> None:
    model, risk = tokens()
    with pytest.raises(ValueError, match="shards to be at least 1, got 0"):
        save_factors(curvature(risk, KFAC), tmp_path / "new", shards=0)
    with pytest.raises(UnsupportedError, match=r"layer '0' has a block of type Diagonal.*bergson.save_factors"):
        save_factors(curvature(risk, {"0": DiagonalBlock}), tmp_path / "new")
    more = nn.Sequential(*model[:3], nn.Linear(C, C, dtype=F64), ClassesFirst())
    params = {n: p for n, p in more.named_parameters() if n != "3.bias"}
    some = EmpiricalRisk(more, nn.CrossEntropyLoss(), risk.data, params)
    with pytest.raises(UnsupportedError, match=r"layer '3' has a bias that is not in `params`, and other biases are"):
        save_factors(curvature(some, KFAC), tmp_path / "new")
    images = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, C, 2), nn.Flatten())
    data = [(torch.rand(3, 4), torch.zeros(3).long())]
    with pytest.raises(UnsupportedError, match=r"is of type Conv2d: bergson has factors of Linear, and of Conv1D"):
        save_factors(curvature(EmpiricalRisk(images, nn.CrossEntropyLoss(), data), KFAC), tmp_path / "new")
    assert not (tmp_path / "new").exists()
