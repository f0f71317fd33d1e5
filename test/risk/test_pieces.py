"""Rows and gradients are formed in pieces of the examples; how large the pieces are changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FEW, close, problem

from curvlinops_plus import EKFAC, DiagonalBlock, MonteCarlo
from curvlinops_plus.risk import LayerBatch
from curvlinops_plus.risk import layer_batch as batch_file

NETS = [*FEW, "grouped cnn", "transposed convolution", "transposed convolution in groups", "encoder layer", "lstm"]


@pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
@pytest.mark.parametrize("approximation", [DiagonalBlock, EKFAC])
@pytest.mark.parametrize("name", NETS)
def test_pieces(name: str, approximation: Any, separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(name)
    options = {"vectors": MonteCarlo(2, seed=1), "separate_weight_and_bias": separate}
    whole = p.curvature(approximation, **options).to_dense()
    sizes: list[int] = []

    def cut(self: LayerBatch, size: int, numbers: int) -> Any:
        for start in range(0, self.num_examples, 2):  # the last of an odd number of examples is alone
            piece = self.examples(start, start + 2)
            sizes.append(piece.num_examples)
            yield piece

    with monkeypatch.context() as patch:
        patch.setattr(LayerBatch, "_cut", cut)
        close(p.curvature(approximation, **options).to_dense(), whole)
    assert sizes
    with monkeypatch.context() as patch:  # our own cutting, one example at a time
        patch.setattr(batch_file, "_ROW_BYTES", 1)
        patch.setattr(batch_file, "_PIECE_BYTES", 1)
        close(p.curvature(approximation, **options).to_dense(), whole)
    assert torch.count_nonzero(whole)
