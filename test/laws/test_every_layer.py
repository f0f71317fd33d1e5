"""Every layer of PyTorch that holds parameters, by itself: its exact blocks are autodiff's, its
factors the twin's.

Layers inside of nets are in `cases.NETS`; here each one stands alone, so that a mistake can't hide
behind another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils._pytree import tree_leaves

from curvlinops_plus import CurvatureWarning, curvature
from test.cases import APPROXIMATIONS, NETS, Conv1D, Net, Problem, close, make

SIZES = (3, 2)


class Alone(nn.Module):
    """One layer; all floating-point tensors that it returns side by side, examples first.

    Args:
        layer: The layer.
        first: Whether examples come first in the first input and output, or time does.
        states: Axis of the examples in the outputs after the first.
    """

    def __init__(self, layer: nn.Module, first: bool = True, states: int = 0) -> None:
        super().__init__()
        self.layer, self.first, self.states = layer, first, states

    def forward(self, x: Any) -> Tensor:
        named = x if isinstance(x, Mapping) else {}
        out = self.layer(*([] if named else [x if self.first else x.transpose(0, 1)]), **named)
        leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        axes = [0 if self.first else 1] + [self.states] * (len(leaves) - 1)
        return torch.cat(
            [t.movedim(axis, 0).flatten(1) for t, axis in zip(leaves, axes, strict=True)], 1
        )


class Centred(nn.Module):
    """A parametrization of a user's."""

    def forward(self, w: Tensor) -> Tensor:
        return w - w.mean()


def centred(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", Centred())


class Scaled(nn.Module):
    """Parameters that are used directly: one per channel, one for all, one token that is
    prepended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(()))
        self.token = nn.Parameter(torch.zeros(1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), 1, 3), x * self.scale + self.shift], 1).exp()


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def tokens(most: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(most, (n, *shape))


def named(**inputs: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    return lambda n: {name: one(n) for name, one in inputs.items()}


def layer(
    kind: Callable[..., nn.Module],
    *args: Any,
    x: Callable[[int], Any],
    first: bool = True,
    states: int = 0,
    fallback: Sequence[str] = (),
    **options: Any,
) -> Callable[[], Net]:
    """The maker of a net of one layer.

    Args:
        kind: Makes the layer.
        *args: Of the layer.
        x: Inputs of so many examples.
        first: Whether examples come first.
        states: Axis of the examples in the outputs after the first.
        fallback: Layers without Kronecker factors.
        **options: Of the layer.
    """

    def count(X: Any) -> int:
        return len(next(iter(X.values()))) if isinstance(X, Mapping) else len(X)

    def maker() -> Net:
        inputs = [x(n) for n in SIZES]
        more = {"batch_size_fn": count} if isinstance(inputs[0], Mapping) else {}
        model = Alone(kind(*args, **options), first, states).eval()
        return Net(
            model,
            inputs,
            count=count,
            options=more,
            fallback=tuple(fallback),
            plain=dense_gradients,
        )

    return maker


def plain(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], Net]:
    """The maker of a net of one layer that has no Kronecker factors."""
    return layer(kind, *args, **options, fallback=("layer",))


def recurrent(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], Net]:
    return plain(kind, *args, batch_first=True, states=1, **options)


def dense_gradients(model: nn.Module) -> None:
    """Sparse gradients can't be differentiated."""
    for m in model.modules():
        if isinstance(m, nn.Embedding):
            m.sparse = False


def parametrized(
    register: Callable[[nn.Module], Any], kind: Callable[..., nn.Module]
) -> Callable[..., nn.Module]:
    def made(*args: Any) -> nn.Module:
        register(module := kind(*args))
        return module

    return made


def bags(**options: Any) -> Callable[[], Net]:
    """Bags that begin at offsets; the third is empty."""
    last = options.get("include_last_offset", False)

    def maker() -> Net:
        offsets = [[0, 2, 2, 5], [0, 1, 3]] if last else [[0, 2, 2], [0, 1]]
        inputs = [
            {"offsets": torch.tensor(o), "input": torch.randint(4, (k,))}
            for o, k in zip(offsets, (5, 3))
        ]
        if options.get("mode") == "sum":
            inputs = [
                {**X, "per_sample_weights": torch.randn(len(X["input"])).double()} for X in inputs
            ]

        def count(X: Any) -> int:
            return len(X["offsets"]) - last

        model = Alone(nn.EmbeddingBag(4, 2, **options))
        return Net(model, inputs, count=count, options={"batch_size_fn": count})

    return maker


INPROJ = {"embed_dim": 2, "num_heads": 1, "batch_first": True}
THREE = {"query": floats(2, 2), "key": floats(3, 3), "value": floats(3, 1)}
QKV = {"query": floats(2, 2), "key": floats(3, 2), "value": floats(3, 2)}
NORMS = ("layer.norm1", "layer.norm2", "layer.norm3")
BLOCK = {"d_model": 2, "nhead": 1, "dim_feedforward": 2, "dropout": 0.0, "batch_first": True}

LAYERS: dict[str, Callable[[], Net]] = {
    "linear": layer(nn.Linear, 3, 2, x=floats(3)),
    "linear at positions": layer(nn.Linear, 2, 2, x=floats(2, 2, 2)),
    "linear without bias": layer(nn.Linear, 3, 2, bias=False, x=floats(2, 3)),
    "conv1d in groups": layer(nn.Conv1d, 4, 6, 2, groups=2, stride=2, x=floats(4, 4)),
    "depthwise conv1d": layer(
        nn.Conv1d, 3, 6, 2, groups=3, padding_mode="circular", padding=1, x=floats(3, 2)
    ),
    "conv2d in groups": layer(
        nn.Conv2d, 4, 2, (2, 1), groups=2, dilation=(2, 1), x=floats(4, 3, 2)
    ),
    "depthwise conv2d": layer(
        nn.Conv2d, 2, 2, 3, groups=2, padding="same", bias=False, x=floats(2, 2, 2)
    ),
    "conv3d in groups": layer(
        nn.Conv3d, 2, 2, (1, 2, 1), groups=2, padding=(0, 1, 0), x=floats(2, 1, 2, 1)
    ),
    "transposed conv1d": layer(nn.ConvTranspose1d, 2, 3, 2, stride=2, x=floats(2, 2)),
    "transposed conv1d in groups": layer(
        nn.ConvTranspose1d,
        4,
        2,
        3,
        stride=2,
        padding=2,
        output_padding=1,
        dilation=2,
        groups=2,
        x=floats(4, 2),
    ),
    "transposed conv1d with a given size": layer(
        nn.ConvTranspose1d,
        2,
        2,
        2,
        stride=3,
        bias=False,
        x=named(input=floats(2, 2), output_size=lambda n: [6]),
    ),
    "transposed conv2d": layer(
        nn.ConvTranspose2d, 2, 2, (1, 2), stride=(2, 1), padding=(0, 1), x=floats(2, 2, 2)
    ),
    "depthwise transposed conv2d": layer(
        nn.ConvTranspose2d, 2, 4, (2, 1), groups=2, x=floats(2, 1, 2)
    ),
    "transposed conv3d": layer(nn.ConvTranspose3d, 2, 2, (1, 2, 1), groups=2, x=floats(2, 1, 1, 2)),
    "embedding": layer(nn.Embedding, 4, 2, x=tokens(4, 3)),
    "embedding of one token": layer(nn.Embedding, 4, 3, x=tokens(4)),
    "embedding of a grid": layer(nn.Embedding, 3, 2, x=tokens(3, 2, 2)),
    "embedding with padding": layer(nn.Embedding, 4, 2, padding_idx=1, x=tokens(4, 4)),
    "embedding with sparse gradients": layer(nn.Embedding, 4, 2, sparse=True, x=tokens(4, 3)),
    "bag of rows, sum": layer(nn.EmbeddingBag, 4, 3, mode="sum", x=tokens(4, 3)),
    "bag of rows, mean": layer(nn.EmbeddingBag, 4, 3, mode="mean", x=tokens(4, 3)),
    "weighted bag": layer(
        nn.EmbeddingBag, 4, 3, mode="sum", x=named(input=tokens(4, 3), per_sample_weights=floats(3))
    ),
    "bag with padding": layer(nn.EmbeddingBag, 4, 3, mode="mean", padding_idx=0, x=tokens(4, 4)),
    "bags at offsets, sum": bags(mode="sum"),
    "bags at offsets, mean": bags(mode="mean"),
    "bags at offsets with the last": bags(mode="mean", include_last_offset=True),
    "largest of a bag": plain(nn.EmbeddingBag, 4, 3, mode="max", x=tokens(4, 3)),
    "bilinear": plain(nn.Bilinear, 2, 3, 2, x=named(input1=floats(2), input2=floats(3))),
    "bilinear at positions": plain(
        nn.Bilinear, 2, 2, 2, bias=False, x=named(input1=floats(2, 2), input2=floats(2, 2))
    ),
    "right-hand weight": layer(Conv1D, 3, 2, x=floats(2, 2)),
    "layer norm": plain(nn.LayerNorm, 4, x=floats(2, 4)),
    "layer norm of a grid": plain(nn.LayerNorm, (2, 3), bias=False, x=floats(2, 3)),
    "root mean square norm": plain(nn.RMSNorm, 4, x=floats(2, 4)),
    "group norm": plain(nn.GroupNorm, 2, 4, x=floats(4, 2)),
    "instance norm 1d": plain(nn.InstanceNorm1d, 2, affine=True, x=floats(2, 3)),
    "instance norm 2d": plain(nn.InstanceNorm2d, 2, affine=True, x=floats(2, 2, 2)),
    "batch norm 1d": plain(nn.BatchNorm1d, 4, x=floats(4)),
    "batch norm 1d at positions": plain(nn.BatchNorm1d, 2, x=floats(2, 3)),
    "batch norm 2d": plain(nn.BatchNorm2d, 2, x=floats(2, 2, 2)),
    "batch norm 3d": plain(nn.BatchNorm3d, 2, x=floats(2, 1, 2, 2)),
    "prelu": plain(nn.PReLU, x=floats(2, 3)),
    "prelu of channels": plain(nn.PReLU, 2, x=floats(2, 3)),
    "bare parameters": plain(Scaled, x=floats(2, 3)),
    "self-attention": layer(
        lambda **options: Itself(nn.MultiheadAttention(**options)), **INPROJ, x=floats(2, 2)
    ),
    "attention of two inputs": layer(nn.MultiheadAttention, **INPROJ, x=named(**QKV)),
    "attention without weights": layer(
        nn.MultiheadAttention, **INPROJ, x=named(**QKV, need_weights=lambda n: False)
    ),
    "attention of three sizes": layer(
        nn.MultiheadAttention, **INPROJ, kdim=3, vdim=1, x=named(**THREE)
    ),
    "attention with more keys": plain(
        nn.MultiheadAttention, **INPROJ, bias=False, add_bias_kv=True, x=named(**QKV)
    ),
    "encoder layer": layer(nn.TransformerEncoderLayer, **BLOCK, x=floats(2, 2), fallback=NORMS[:2]),
    "encoder layer without bias": layer(
        nn.TransformerEncoderLayer,
        **BLOCK,
        bias=False,
        norm_first=True,
        x=floats(2, 2),
        fallback=NORMS[:2],
    ),
    "decoder layer": layer(
        nn.TransformerDecoderLayer,
        **BLOCK,
        x=named(tgt=floats(2, 2), memory=floats(3, 2)),
        fallback=NORMS,
    ),
    "lstm": recurrent(nn.LSTM, 2, 1, x=floats(3, 2)),
    "lstm with time first": plain(nn.LSTM, 2, 1, bias=False, x=floats(3, 2), first=False, states=1),
    "lstm in both directions": recurrent(nn.LSTM, 1, 1, bidirectional=True, x=floats(2, 1)),
    "lstm with a projection": recurrent(nn.LSTM, 1, 2, proj_size=1, x=floats(2, 1)),
    "two layers of gru": recurrent(nn.GRU, 1, 1, num_layers=2, x=floats(2, 1)),
    "gru with time first": plain(nn.GRU, 2, 1, x=floats(2, 2), first=False, states=1),
    "rnn": recurrent(nn.RNN, 2, 2, nonlinearity="relu", x=floats(2, 2)),
    "lstm cell": plain(nn.LSTMCell, 2, 2, x=floats(2)),
    "gru cell with a state": plain(nn.GRUCell, 2, 2, x=named(input=floats(2), hx=floats(2))),
    "rnn cell": plain(nn.RNNCell, 2, 2, x=floats(2)),
    "weight norm": plain(parametrized(parametrizations.weight_norm, nn.Linear), 3, 2, x=floats(3)),
    "weight norm of before": plain(
        parametrized(old_weight_norm, nn.Conv1d), 2, 2, 2, x=floats(2, 3)
    ),
    "spectral norm": plain(
        parametrized(parametrizations.spectral_norm, nn.Linear), 3, 2, x=floats(3)
    ),
    "orthogonal": plain(parametrized(parametrizations.orthogonal, nn.Linear), 3, 2, x=floats(3)),
    "a parametrization of the user's": plain(parametrized(centred, nn.Linear), 3, 2, x=floats(3)),
}


class Itself(nn.Module):
    """Attention of an input to itself."""

    def __init__(self, attn: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Any:
        return self.attn(x, x, x)


@cache
def alone(name: str) -> Problem:
    """The problem of a layer, with its twin made before anything else ran."""
    p = make(LAYERS[name], seed=name)
    _ = p.exact
    return p


every_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.mark.one_in(2)
@every_layer
@pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
def test_exact_blocks_are_those_of_autodiff(name: str, separate: bool) -> None:
    p = alone(name)
    exact = p.exact.only_blocks(p.exact.ggn(), separate)
    for approximation, expected in (
        ("FullBlock", exact),
        ("DiagonalBlock", exact.diagonal().diag()),
    ):
        close(p.made(approximation, separate).to_dense(), expected, 1e-8, approximation)


@pytest.mark.one_in(4)
@every_layer
@pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
@pytest.mark.parametrize("reduce", [False, True], ids=["expand", "reduce"])
def test_factors(name: str, separate: bool, reduce: bool) -> None:
    """KFAC is its definition; EKFAC keeps the trace and is not further away; both are exact without
    factors.
    """
    p = alone(name)
    ending = " reduce" if reduce else ""
    exact = p.exact.only_blocks(p.exact.ggn(), separate)
    expected = p.exact.kfac(p.exact.exact(), reduce, separate)
    close(p.made("KFAC" + ending, separate).to_dense(), expected, 1e-8, "KFAC")
    E = p.made("EKFAC" + ending, separate)
    close(E.trace, exact.trace(), 1e-8, "trace of EKFAC")
    error, of_kfac = (E.to_dense() - exact).norm(), (expected - exact).norm()
    assert error <= of_kfac * (1 + 1e-9) + 1e-12 * exact.norm(), (
        f"error {error} of EKFAC, {of_kfac} of KFAC"
    )


@every_layer
def test_the_layers_that_have_no_factors_are_listed(name: str) -> None:
    p = alone(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        K = curvature(p.risk(), APPROXIMATIONS["KFAC"])
    said = [str(w.message) for w in caught if issubclass(w.category, CurvatureWarning)]
    assert len(said) == bool(p.net.fallback), said
    for found in p.net.fallback:
        assert found in said[0] or found in str(K), said[0]
    assert f"{len(p.net.fallback)} of {len(K.plan)} layers" in said[0] if said else True


# ------------------------------------------------------------------------------ what must not be so


def test_every_module_of_pytorch_that_holds_parameters_is_here() -> None:
    """A new layer in `torch.nn` must come by here; containers and losses hold none of their own."""
    makers = [*LAYERS.values(), *NETS.values()]
    covered = {
        base for maker in makers for m in maker().model.modules() for base in type(m).__mro__
    }
    # A transformer is made of encoder and decoder layers, and synchronised norms need several
    # processes.
    covered |= {nn.Transformer, nn.SyncBatchNorm, nn.InstanceNorm3d}

    def parameters(kind: Any) -> list[Any]:
        for args, options in (((2,), {}), ((2, 2), {}), ((2, 2, 2), {}), ((2,), {"affine": True})):
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if found := list(kind(*args, **options).parameters()):
                    return found
        return []

    kinds = {
        name: getattr(nn, name)
        for name in dir(nn)
        if not any(w in name for w in ("Lazy", "Quantizable", "Loss"))
    }
    missing = [
        name
        for name, kind in kinds.items()
        if isinstance(kind, type)
        and issubclass(kind, nn.Module)
        and kind not in covered
        and parameters(kind)
    ]
    assert not missing, f"layers with parameters and no test: {missing}"
