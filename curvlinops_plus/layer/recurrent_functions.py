"""Functions that run a recurrent layer, such as `torch.lstm`: what they read, and the module that
does the same.

The `forward` of `nn.LSTM` hands its weights to such a function, whatever a subclass does around
it: pack, transpose, drop out, call it twice. The function's arguments say where the examples are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class RecurrentRead:
    """A call of a function that runs the steps of a recurrent layer, or one step of a cell.

    Attributes:
        name: Type of the module that does the same, such as "LSTM".
        options: Its options, but for sizes.
        weights: Names in the module, each with the weight.
        x: The input. Of packed sequences their rows, step by step, `[M, i]`.
        states: The states before the first step.
        batch_sizes: Of packed sequences: how many there are at each step.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    weights: Mapping[str, Tensor]
    x: Tensor
    states: tuple[Tensor, ...]
    batch_sizes: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences there are; of a cell, how many rows."""
        if self.batch_sizes is not None:
            return int(self.batch_sizes[0])
        options = dict(self.options)
        axis = 0 if options.get("batch_first", True) else 1
        return self.x.shape[axis] if self.x.ndim > axis else 0


def recurrent_read(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RecurrentRead | None:
    """How a call runs a recurrent layer; None of all other functions, and with dropout between
    layers, which draws random numbers inside.

    Example:
        >>> cell = nn.GRUCell(3, 2)
        >>> args = torch.ones(5, 3), torch.ones(5, 2), *cell.parameters()
        >>> read = recurrent_read(torch.gru_cell, args, {})
        >>> read.name, [*read.weights]
        ('GRUCell', ['weight_ih', 'weight_hh', 'bias_ih', 'bias_hh'])
    """
    reader = _SIGNATURES.get(function)
    if reader is None:
        return None
    try:
        return reader(*args, **kwargs)
    except TypeError:  # arguments that this signature does not have
        return None


def recurrent_module(
    name: str, options: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> nn.Module:
    """The module that does the same as a call with these weights.

    Example:
        >>> cell = nn.RNNCell(3, 2, bias=False)
        >>> weights = dict(cell.named_parameters())
        >>> recurrent_module("RNNCell", {"bias": False, "nonlinearity": "relu"}, weights)
        RNNCell(3, 2, bias=False, nonlinearity=relu)
    """
    suffix = "" if name.endswith("Cell") else "_l0"
    num_gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[name.removesuffix("Cell")]
    rows, input_size = weights[f"weight_ih{suffix}"].shape
    sizes = {"input_size": input_size, "hidden_size": rows // num_gates}
    if "weight_hr_l0" in weights:
        sizes["proj_size"] = len(weights["weight_hr_l0"])
    module = getattr(nn, name)(**sizes, **options, device="meta")
    for local, weight in weights.items():
        setattr(module, local, weight)
    return module


# One reader for each signature.
def _cell(name: str, **options: Any) -> Callable[..., RecurrentRead | None]:
    def read(
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> RecurrentRead | None:
        if (b_ih is None) != (b_hh is None):
            return None
        named = {"weight_ih": w_ih, "weight_hh": w_hh, "bias_ih": b_ih, "bias_hh": b_hh}
        weights = {local: weight for local, weight in named.items() if weight is not None}
        with_bias = {"bias": b_ih is not None, **options}
        return RecurrentRead(name, (*with_bias.items(),), weights, input, _states(hx))

    return read


def _layers(name: str, **options: Any) -> Callable[..., RecurrentRead | None]:
    def read(input: Tensor, *args: Any, **kwargs: Any) -> RecurrentRead | None:
        packed = bool(args) and isinstance(args[0], Tensor) and not args[0].is_floating_point()
        return (of_packed if packed else of_sequences)(input, *args, **kwargs)

    def of_sequences(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> RecurrentRead | None:
        sizes = (has_biases, num_layers, bidirectional, batch_first)
        return made(input, hx, params, sizes, dropout if train else 0, None)

    def of_packed(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> RecurrentRead | None:
        # They are recorded as padded sequences, the examples first.
        sizes = (has_biases, num_layers, bidirectional, True)
        return made(data, hx, params, sizes, dropout if train else 0, batch_sizes)

    def made(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        sizes: tuple[bool, int, bool, bool],
        dropout: float,
        batch_sizes: Tensor | None,
    ) -> RecurrentRead | None:
        if dropout and sizes[1] > 1:  # between layers
            return None
        names = ("bias", "num_layers", "bidirectional", "batch_first")
        all_options = (*zip(names, sizes, strict=True), *options.items())
        weights = dict(zip(_names_of_weights(len(params), *sizes[:3]), params, strict=True))
        return RecurrentRead(name, all_options, weights, x, _states(hx), batch_sizes)

    return read


def _states(hx: Any) -> tuple[Tensor, ...]:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _names_of_weights(
    number: int, has_bias: bool, num_layers: int, bidirectional: bool
) -> Iterator[str]:
    """Names of a module's weights, in the order in which functions take them."""
    directions = ("", "_reverse") if bidirectional else ("",)
    kinds = ["weight_ih", "weight_hh"]
    if has_bias:
        kinds += ["bias_ih", "bias_hh"]
    if number > len(kinds) * num_layers * len(directions):
        kinds.append("weight_hr")  # a projection
    for layer in range(num_layers):
        for direction in directions:
            for kind in kinds:
                yield f"{kind}_l{layer}{direction}"


_SIGNATURES: dict[Any, Callable[..., RecurrentRead | None]] = {
    torch.lstm: _layers("LSTM"),
    torch.gru: _layers("GRU"),
    torch.rnn_tanh: _layers("RNN", nonlinearity="tanh"),
    torch.rnn_relu: _layers("RNN", nonlinearity="relu"),
    torch.lstm_cell: _cell("LSTMCell"),
    torch.gru_cell: _cell("GRUCell"),
    torch.rnn_tanh_cell: _cell("RNNCell", nonlinearity="tanh"),
    torch.rnn_relu_cell: _cell("RNNCell", nonlinearity="relu"),
}
#: Functions that run a recurrent layer.
RECURRENT = frozenset(_SIGNATURES)
