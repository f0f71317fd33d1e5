"""The pieces of random networks: what each takes, how its options are drawn, and how it is built.

A piece is known by its name and plain options, and its sizes follow from the shape of an example
that arrives. So a network is a list of names and options that can be printed, stored and shortened.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from test.fuzz import modules

Shape = tuple[int, ...]
Options = dict[str, Any]
#: Name and options of a piece.
Layer = Sequence[Any]


class Invalid(Exception):
    """A description from which no case can be made, such as a kernel that is larger than the
    image.
    """


@dataclass(frozen=True)
class Piece:
    """One kind of piece: how many axes an example may have, random options, the module, and a
    relative frequency.
    """

    dims: tuple[int, ...]
    draw: Callable[[Random, Shape], Options]
    build: Callable[[Shape, Options], nn.Module]
    often: float = 1.0


def sequence(
    shape: Shape, layers: Sequence[Layer], tokens: bool = False
) -> tuple[nn.Module, Shape]:
    """The modules of several pieces one after the other, and the shape of an example that comes
    out.
    """
    built = []
    for name, options in layers:
        piece = (TOKENS if tokens else PIECES)[name]
        if len(shape) not in piece.dims:
            raise Invalid(f"{name} takes no examples of shape {shape}")
        try:
            module = piece.build(shape, options).eval()
            given = torch.zeros(2, *shape, dtype=torch.long if tokens else torch.float32)
            with torch.no_grad():
                module(given[:1])  # some norms refuse one number
                shape = tuple(module(given).shape[1:])
        except (ValueError, RuntimeError, AssertionError) as error:
            raise Invalid(f"{name} {options}: {error}") from error
        if not all(shape):
            raise Invalid(f"{name} leaves nothing: {shape}")
        built.append(module)
        tokens = False
    return nn.Sequential(*built), shape


def _inner(shape: Shape, layers: Sequence[Layer], same: bool = False) -> nn.Module:
    module, out = sequence(shape, layers)
    if same and out != shape:
        raise Invalid(f"{layers} changes the shape from {shape} to {out}")
    return module


# ------------------------------------------------------------------------------- layers, one by one
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu in place": lambda: nn.SiLU(inplace=True),
    "softplus": nn.Softplus,
    "sigmoid_": lambda: modules.function(torch.sigmoid_),
    "leaky in place": lambda: nn.LeakyReLU(0.3, inplace=True),
    "elu": nn.ELU,
}


def _conv(shape: Shape, o: Options) -> nn.Module:
    groups = o["groups"] if shape[0] % o["groups"] == 0 else 1
    kernel = tuple(min(k, size) for k, size in zip(o["kernel"], shape[1:], strict=False))
    padding = o["padding"] if o["stride"] == 1 or o["padding"] != "same" else 1
    more = {"padding": padding, "groups": groups, "padding_mode": o["mode"]}
    more |= {key: o[key] for key in ("stride", "dilation", "bias")}
    return getattr(nn, f"Conv{len(shape) - 1}d")(shape[0], o["out"] * groups, kernel, **more)


def _draw_conv(r: Random, shape: Shape) -> Options:
    return {
        "out": r.randint(1, 2),
        "kernel": [r.randint(1, 3 if len(shape) < 4 else 2) for _ in shape[1:]],
        "stride": r.choice([1, 1, 1, 2]),
        "padding": r.choice([0, 0, 1, "same", "valid"]),
        "dilation": r.choice([1, 1, 1, 2]),
        "groups": r.choice([1, 1, 2]),
        "bias": r.random() < 0.7,
        "mode": r.choice(["zeros"] * 4 + ["reflect", "replicate", "circular"])
        if len(shape) < 4
        else "zeros",
    }


def _transposed(shape: Shape, o: Options) -> nn.Module:
    groups = o["groups"] if shape[0] % o["groups"] == 0 else 1
    kind = getattr(nn, f"ConvTranspose{len(shape) - 1}d")
    kernel = tuple(o["kernel"][: len(shape) - 1])
    more = {key: o[key] for key in ("stride", "padding", "dilation", "bias")}
    return kind(
        shape[0], o["out"] * groups, kernel, output_padding=o["extra"], groups=groups, **more
    )


def _draw_transposed(r: Random, shape: Shape) -> Options:
    stride = r.choice([1, 1, 2])
    return {
        "out": r.randint(1, 2),
        "kernel": [r.randint(1, 2) for _ in shape[1:]],
        "stride": stride,
        "padding": r.choice([0, 0, 0, 1]),
        "dilation": r.choice([1, 1, 2]),
        "extra": r.randint(0, stride - 1),
        "groups": r.choice([1, 1, 2]),
        "bias": r.random() < 0.7,
    }


def _norm(shape: Shape, o: Options) -> nn.Module:
    axes, channels, options = len(shape) - 1, shape[0], {"eps": 1e-3, "affine": o["affine"]}
    if o["kind"] == "layer":
        return nn.LayerNorm(
            shape[-o["axes"] :], eps=1e-3, elementwise_affine=o["affine"], bias=o["bias"]
        )
    if o["kind"] == "rms":
        return nn.RMSNorm(shape[-1:], eps=1e-3, elementwise_affine=o["affine"])
    if o["kind"] == "group":
        return nn.GroupNorm(o["groups"] if channels % o["groups"] == 0 else 1, channels, **options)
    kind = "InstanceNorm" if o["kind"] == "instance" and axes else "BatchNorm"
    return getattr(nn, f"{kind}{max(axes, 1)}d")(channels, **options)


def _draw_norm(r: Random, shape: Shape) -> Options:
    return {
        "kind": r.choice(["layer", "rms", "group", "batch", "instance"]),
        "axes": r.choice([1, min(2, len(shape))]),
        "affine": r.random() < 0.85,
        "bias": r.random() < 0.8,
        "groups": r.choice([1, 2]),
    }


def _parametrized(shape: Shape, o: Options) -> nn.Module:
    layer = nn.Linear(shape[-1], o["out"])
    torch.manual_seed(0)  # spectral_norm starts from random vectors
    return (weight_norm if o["how"] == "weight" else spectral_norm)(layer.eval())


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "swap": lambda x: x.transpose(1, 2),
    "mean": lambda x: x.mean(1),
    "flip": lambda x: x.flip(-1).contiguous(),
    "pairs": lambda x: torch.nn.functional.max_pool1d(x.flatten(1)[:, None], 2, ceil_mode=True)[
        :, 0
    ],
    "square": lambda x: x + 0.3 * x.square(),
}


def _function(name: str) -> nn.Module:
    return modules.function(FUNCTIONS[name])


def _attention(shape: Shape, o: Options) -> nn.Module:
    return modules.attention(
        shape[-1], **{**o, "num_heads": o["num_heads"] if shape[-1] % o["num_heads"] == 0 else 1}
    )


def _draw_attention(r: Random, shape: Shape) -> Options:
    options = {"num_heads": r.choice([1, 2]), "cross": r.random() < 0.3, "bias": r.random() < 0.7}
    more = {"add_bias_kv": r.random() < 0.1, "batch_first": r.random() < 0.6}
    return options | more


def _recurrent(shape: Shape, o: Options) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return modules.recurrent(d=shape[-1], **o)


def _draw_recurrent(r: Random, shape: Shape) -> Options:
    return {
        "kind": r.choice(["RNN", "GRU", "LSTM"]),
        "batch_first": r.random() < 0.6,
        "bidirectional": r.random() < 0.2,
        "bias": r.random() < 0.8,
    }


# ------------------------------------------------------------------------------- pieces with pieces
def _draw_same(r: Random, shape: Shape) -> list[Layer]:
    """Pieces that leave the shape as it is."""
    last: Layer = [
        "linear",
        {"out": shape[-1], "bias": r.random() < 0.7, "how": r.choice(["layer", "Conv1D"])},
    ]
    first = draw_piece(r, shape, ["activation", "norm", "prelu", "wave", "function"])
    return r.choice(
        [[last], [first, last], [last, ["activation", {"name": r.choice([*ACTIVATIONS])}]]]
    )


def _draw_branches(r: Random, shape: Shape) -> Options:
    out = r.randint(1, 3)
    one, two = (
        [["linear", {"out": out, "bias": r.random() < 0.7, "how": "layer"}]] for _ in range(2)
    )
    if r.random() < 0.5:
        one = [*one, ["activation", {"name": r.choice([*ACTIVATIONS])}]]
    return {"join": r.choice(["cat", "mul", "sub", "gate"]), "one": one, "two": two}


def _linear(shape: Shape, o: Options) -> nn.Module:
    if o["how"] == "Conv1D":
        return modules.contiguous(modules.Conv1D(o["out"], shape[-1]))
    layer = nn.Linear(shape[-1], o["out"], bias=o["bias"])
    return modules.keyword(layer) if o["how"] == "keyword" else layer


def _draw_linear(r: Random, shape: Shape) -> Options:
    how = r.choice(["layer"] * 5 + ["Conv1D", "keyword"])
    return {"out": r.randint(1, 4), "bias": r.random() < 0.75, "how": how}


ANY, SEVERAL = (1, 2, 3, 4), (2, 3, 4)


def plain(dims: tuple[int, ...], build: Callable[[Shape], nn.Module], often: float) -> Piece:
    """A piece without options."""
    return Piece(dims, lambda r, s: {}, lambda s, o: build(s), often)


PIECES: dict[str, Piece] = {
    "linear": Piece(ANY, _draw_linear, _linear, 4),
    "activation": Piece(
        ANY,
        lambda r, s: {"name": r.choice([*ACTIVATIONS])},
        lambda s, o: ACTIVATIONS[o["name"]](),
        4,
    ),
    "conv": Piece(SEVERAL, _draw_conv, _conv, 4),
    "transposed conv": Piece(SEVERAL, _draw_transposed, _transposed, 1.5),
    "norm": Piece(ANY, _draw_norm, _norm, 2.5),
    "prelu": Piece(
        ANY,
        lambda r, s: {"channels": r.random() < 0.5},
        lambda s, o: nn.PReLU(s[0] if o["channels"] else 1),
    ),
    "bilinear": Piece(
        ANY,
        lambda r, s: {"out": r.randint(1, 3), "bias": r.random() < 0.7},
        lambda s, o: modules.two_inputs(s[-1], **o),
        0.7,
    ),
    "behind one": Piece(
        ANY,
        lambda r, s: {"how": r.choice(["squeeze", "flatten", "take", "sum"])},
        lambda s, o: modules.behind_one(nn.Linear(s[-1], s[-1]), o["how"]),
        0.6,
    ),
    "bare": plain(ANY, lambda s: modules.bare(s[-1]), 0.7),
    "wave": plain(ANY, lambda s: modules.wave(s[-1]), 0.7),
    "parametrized": Piece(
        ANY,
        lambda r, s: {"out": r.randint(1, 3), "how": r.choice(["weight", "spectral"])},
        _parametrized,
        0.5,
    ),
    "residual": Piece(
        ANY,
        lambda r, s: {"in_place": r.random() < 0.5, "inner": _draw_same(r, s)},
        lambda s, o: modules.residual(_inner(s, o["inner"], True), o["in_place"]),
        1.5,
    ),
    "branches": Piece(
        ANY,
        _draw_branches,
        lambda s, o: modules.branches(_inner(s, o["one"]), _inner(s, o["two"]), o["join"]),
        1.5,
    ),
    "repeated": Piece(
        ANY,
        lambda r, s: {"times": r.randint(2, 3), "inner": _draw_same(r, s)},
        lambda s, o: modules.repeated(_inner(s, o["inner"], True), o["times"]),
        1.5,
    ),
    "again": Piece(
        ANY,
        lambda r, s: {"inner": _draw_same(r, s)},
        lambda s, o: modules.again(_inner(s, o["inner"])),
        0.5,
    ),
    "tied": Piece(
        ANY,
        lambda r, s: {"how": r.choice(["both", "weight", "transposed"]), "bias": r.random() < 0.6},
        lambda s, o: modules.tied(s[-1], **o),
        1.2,
    ),
    "halves": plain(ANY, lambda s: modules.halves(s[-1]), 0.7),
    "stopped": plain(ANY, lambda s: modules.stopped(s[-1]), 0.5),
    "dropout": plain(ANY, lambda s: nn.Dropout(0.5), 0.8),
    "function": Piece(
        ANY,
        lambda r, s: {"name": r.choice(["flip", "square"])},
        lambda s, o: _function(o["name"]),
        0.5,
    ),
    "swap": plain((2, 3), lambda s: _function("swap"), 0.7),
    "mean": plain(SEVERAL, lambda s: _function("mean"), 0.7),
    "pairs": plain(ANY, lambda s: _function("pairs"), 0.5),
    "flatten": plain(SEVERAL, lambda s: nn.Flatten(), 0.7),
    "positions": Piece(
        (2,),
        lambda r, s: {"plain": r.random() < 0.15},
        lambda s, o: modules.positions(*s, o["plain"]),
        0.7,
    ),
    "attention by hand": plain((2,), lambda s: modules.attention_by_hand(s[-1]), 1),
    "attention": Piece((2,), _draw_attention, _attention, 1.5),
    "recurrent": Piece((2,), _draw_recurrent, _recurrent, 1),
    "cells": Piece(
        (2,),
        lambda r, s: {"kind": r.choice(["RNNCell", "GRUCell", "LSTMCell"])},
        lambda s, o: modules.cells(o["kind"], s[-1]),
        0.7,
    ),
    "encoder": Piece(
        (2,),
        lambda r, s: {"batch_first": r.random() < 0.6, "norm_first": r.random() < 0.5},
        lambda s, o: modules.encoder(s[-1], **o),
        0.4,
    ),
}

#: What comes first if the data are tokens [N, T].
TOKENS: dict[str, Piece] = {
    "embedding": Piece(
        (1,),
        lambda r, s: {"d": r.randint(2, 3), "padding": r.choice([None, None, 0, 2])},
        lambda s, o: nn.Embedding(4, o["d"], padding_idx=o["padding"]),
        3,
    ),
    "bag": Piece(
        (1,),
        lambda r, s: {
            "d": r.randint(2, 3),
            "mode": r.choice(["sum", "mean", "max"]),
            "padding": r.choice([None, 1]),
        },
        lambda s, o: modules.bag(4, **o),
    ),
    "tied head": Piece(
        (1,),
        lambda r, s: {"d": 2, "body": _draw_same(r, (s[0], 2))},
        lambda s, o: modules.tied_head(
            nn.Embedding(4, o["d"]), _inner((s[0], o["d"]), o["body"], True)
        ),
    ),
}


def draw_piece(
    r: Random, shape: Shape, names: Sequence[str] | None = None, tokens: bool = False
) -> Layer:
    """Name and options of a random piece that takes examples of a shape."""
    pieces = TOKENS if tokens else PIECES
    fitting = [name for name in (names or pieces) if len(shape) in pieces[name].dims]
    name = r.choices(fitting, [pieces[name].often for name in fitting])[0]
    return [name, pieces[name].draw(r, shape)]
