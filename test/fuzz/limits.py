"""Limits of working memory, which decide where the package cuts its work into pieces; here they
become tiny.

Most errors of cutting appear at the borders of pieces, and usual networks are larger than those of
the tests.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from curvlinops_plus.blocks.sweeps import Kept

#: Module, attribute (of a class: "Class.attribute") and small value.
LIMITS: list[tuple[str, str, Any]] = [
    ("risk.layer_batch", "_PIECE_BYTES", 64),
    ("risk.layer_batch", "_ROW_BYTES", 64),
    ("risk.layer_batch", "_ROWS", 1),
    ("risk.backward_pass", "BackwardPass.at_once", lambda self, number: 1),
    ("risk.backward_pass", "_MANY_NUMBERS", 0),
    ("risk.backward_pass", "_VECTOR_BYTES", 64),
    ("linalg.pieces", "_GPU_BYTES", 64),
    ("exact.passes", "_COLUMNS_AT_ONCE", 2),
    ("exact.passes", "_CPU_NUMBERS", 1),
    ("blocks.sweeps", "Kept", lambda max_bytes, layers: Kept(64, layers)),
    ("likelihood.draws", "_DRAW_BYTES", 64),
    ("layer.rule", "LayerRule.max_bytes", 64),
    ("layer.squares", "_CHUNK_BYTES", 64),
    ("layer.rows", "_WORK_BYTES", 64),
    ("layer.convolution_gram", "_PATCH_BYTES", 64),
    ("layer.convolution_gram", "_LARGE_GROUP", 3),
    ("layer.convolution_gram", "_MIN_PATCHES", 1),
    ("layer.convolution_gram", "_MIN_PRODUCTS", 1),
    ("linalg.gram_sum", "_BLOCK", 2),
    ("estimate.matrix", "BLOCK_BYTES", 64),
    ("applications.output_covariance", "_COLUMN_BYTES", 64),
    ("optim.reconfiguration.damped_solve", "_LARGEST", 4),
    ("optim.reconfiguration.damped_solve", "_STORED_BYTES", 64),
]


@contextmanager
def small_buffers() -> Iterator[None]:
    """Context in which every limit is small."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for path, name, small in LIMITS:
            owner: Any = importlib.import_module(f"curvlinops_plus.{path}")
            *outer, attribute = name.split(".")
            for part in outer:
                owner = getattr(owner, part)
            before.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, small)
        yield
    finally:
        for owner, attribute, value in reversed(before):
            setattr(owner, attribute, value)
