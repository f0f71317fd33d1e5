"""Functions that run recurrent layers: the module that stands for a call returns the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

from curvlinops_plus.layer.recurrent_functions import (
    RecurrentRead,
    recurrent_module,
    recurrent_read,
)
from test.cases import same
from test.helpers import normal


class Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[RecurrentRead] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = recurrent_read(func, args, kwargs or {})
        if read is not None:
            self.found.append(read)
        return func(*args, **kwargs or {})


def read_of(module: nn.Module, x: Any) -> RecurrentRead:
    with Reads() as reads:
        module(x)
    (read,) = reads.found
    return read


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "dropout": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers(kind: Any, options: dict[str, Any]) -> None:
    module = kind(3, 2, **options).double().eval()
    x = normal(4, 5, 3)
    read = read_of(module, x)
    assert [*read.weights] == [name for name, _ in module.named_parameters()]
    twin = recurrent_module(read.name, dict(read.options), read.weights)
    same(twin(x)[0], module(x)[0])
    assert read.num_sequences == (4 if module.batch_first else 5)
    packed = pack_padded_sequence(x, torch.tensor([5, 3, 3, 1]), batch_first=True)
    of_packed = read_of(module, packed)
    assert of_packed.batch_sizes is packed.batch_sizes
    assert of_packed.num_sequences == 4
    same(of_packed.x, packed.data)


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_cells(nonlinearity: str, bias: bool) -> None:
    x = normal(4, 3)
    cells = [nn.RNNCell(3, 2, bias, nonlinearity), nn.GRUCell(3, 2, bias), nn.LSTMCell(3, 2, bias)]
    for module in cells:
        module.double()
        read = read_of(module, x)
        twin = recurrent_module(read.name, dict(read.options), read.weights)
        out, again = module(x), twin(x)
        same(torch.stack([*again]), torch.stack([*out]))


def test_projections_and_nonlinearities() -> None:
    x = normal(4, 5, 3)
    for module in (nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True), nn.RNN(3, 2, 1, "relu")):
        read = read_of(module.double(), x)
        twin = recurrent_module(read.name, dict(read.options), read.weights)
        same(twin(x)[0], module(x)[0])


def test_dropout_inside_is_not_read() -> None:
    module = nn.GRU(3, 2, 2, dropout=0.5).double()
    with Reads() as reads:
        module(normal(4, 5, 3))
    assert not reads.found
    one_layer = nn.GRU(3, 2).double()
    one_layer.dropout = 0.5
    assert read_of(one_layer, normal(4, 5, 3)).name == "GRU"


def test_other_calls_are_not_read() -> None:
    x = normal(4, 3)
    assert recurrent_read(torch.add, (x, x), {}) is None
    assert recurrent_read(torch.gru_cell, (x,), {}) is None
    cell = nn.GRUCell(3, 2).double()
    one_bias = (x, normal(4, 2), cell.weight_ih, cell.weight_hh, cell.bias_ih)
    assert recurrent_read(torch.gru_cell, one_bias, {}) is None
