"""Blocks that one process owns."""

from __future__ import annotations

import torch

from curvlinops_plus.distributed import Alone
from curvlinops_plus.linalg import OwnedBlockDiagonal, Structure
from test.linalg.cases import F64, block_diagonal


def test_negative_multiples_of_owned_blocks_are_indefinite() -> None:
    K, _ = block_diagonal()
    owned = OwnedBlockDiagonal(K.blocks, K.layouts, K.space, Alone(), F64, torch.device("cpu"))
    for matrix in (-owned, owned.shift(-1.0), owned.shift(dict.fromkeys(K.blocks, -1.0))):
        assert matrix.structure == Structure.SYMMETRIC
    assert (2 * owned).shift(1.0).structure == Structure.PSD
