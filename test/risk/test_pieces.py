"""Rows and gradients are formed in pieces of the examples, or combined first; how changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FEW, close, problem
from curvlinops_plus.risk.module_state import ModuleState
from torch import nn

from curvlinops_plus import EKFAC, GGN, DiagonalBlock, EmpiricalRisk, MonteCarlo, curvature
from curvlinops_plus.risk import LayerBatch
from curvlinops_plus.risk import layer_batch as batch_file
from curvlinops_plus.risk.layers import find_layers
from curvlinops_plus.risk.sweep import sweep

NETS = [*FEW, "grouped cnn", "transposed convolution", "transposed convolution in groups", "encoder layer", "lstm"]


@pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
@pytest.mark.parametrize("approximation", [DiagonalBlock, EKFAC])
@pytest.mark.parametrize("name", NETS)
def test_pieces(name: str, approximation: Any, separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(name)
    options = {"risk": p.risk(), "vectors": MonteCarlo(2, seed=1), "separate_weight_and_bias": separate}
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


@pytest.mark.parametrize("name", NETS)
def test_combinations_of_rows(name: str) -> None:
    p, seen = problem(name), 0
    risk = p.risk()

    def consume(batch: LayerBatch) -> None:
        nonlocal seen
        for group in batch.layer.groups:
            part = batch.restrict(group)
            left = torch.randn(2, group.layout.matrix_shape[-2], generator=torch.Generator().manual_seed(seen)).double()
            J = part.per_example_grads
            close(part.combined_grads(left), left @ J)
            split = group.layout.split(J[0, 0].reshape(-1, 1))
            columns = [group.layout.columns(key, g[..., 0]) for key, g in split.items()]
            assert [c.shape[-1] for c in columns] == [group.layout.width(key) for key in group.keys]
            assert torch.equal(torch.cat(columns, -1), J[0, 0])
            seen += 1

    sweep(risk, find_layers(risk.model, risk.params), MonteCarlo(2, seed=1), consume)
    assert seen


class Tables(nn.Module):
    """Two layers, the second with two tables for all examples, one inside of a keyword."""

    class Gains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(5))

        def forward(self, h: torch.Tensor, table: torch.Tensor, *, more: dict[str, Any]) -> torch.Tensor:
            return ((h[:, None] + table).tanh() * more["scales"].mean(0) * self.gain).sum(1)

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.gains = nn.Linear(4, 5), self.Gains()
        self.table, self.scales = torch.randn(rows, 5).double(), torch.randn(rows, 5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gains(self.first(x), self.table, more={"unused": x, "scales": self.scales})


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_a_table_with_as_many_rows_as_a_piece_has_examples(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Tables(rows).double()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(torch.randn(11, 4).double(), torch.arange(11) % 5)])
    exact = GGN(risk).to_dense().diagonal()
    for examples in (1, 2, 3, 4, 11):  # of one column of the loss's root, or of four of them
        monkeypatch.setattr(batch_file, "_PIECE_BYTES", examples * 4 * 5 * 8)
        close(curvature(risk, DiagonalBlock).diagonal(), exact)


def test_hooks_that_go_while_a_module_is_read() -> None:
    """As finalizers remove them when something is collected in between."""
    module = nn.Linear(2, 2)

    class Going:
        @property
        def __code__(self) -> None:
            other.remove()

        def __call__(self, *args: Any) -> None:
            pass

    module.register_forward_hook(Going())
    other = module.register_forward_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    assert len(ModuleState.of(module).options) == 2
    assert len(module._forward_hooks) == 2
