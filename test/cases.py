"""Everything that the laws are about, as lists of makers: a new net, loss, approximation or vector
is one line here.

    NETS             models with inputs, each with what is special about it
    LOSSES           losses with targets that fit any output
    PROBLEMS         pairs of both that every law is run on
    APPROXIMATIONS   what a block may be
    VECTORS          what may be backpropagated

`problem(name)` makes a problem, once, in float64; `Problem.exact` is its slow exact twin. `close`
compares, and `unchanged` checks that nothing of the user's was touched.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    CurvatureWarning,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    ForwardOnly,
    FullBlock,
    MonteCarlo,
    NearestKronecker,
    ScaledIdentity,
    curvature,
)
from test.fuzz.modules import Conv1D
from test.helpers import Written, unchanged
from test.reference import Reference

# ---------------------------------------------------------------------------------------- comparing


def close(got: Any, expected: Any, rtol: float = 1e-9, what: str = "result") -> None:
    """Fail unless shapes agree, everything is finite, and the difference is below `rtol` of the
    norm.
    """
    got, expected = (torch.as_tensor(t).detach().cpu().to(torch.float64) for t in (got, expected))
    assert got.shape == expected.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    )
    assert bool(expected.isfinite().all()), f"{what}: the expected numbers are not finite"
    assert bool(got.isfinite().all()), f"{what}: NaN or infinite numbers"
    error, size = float((got - expected).norm()), float(expected.norm())
    assert error <= rtol * max(size, 1e-12), (
        f"{what}: relative error {error / max(size, 1e-12):.2e}, allowed {rtol:.0e}"
    )


def same(got: Any, expected: Any) -> None:
    """Fail unless both are equal bit by bit."""
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))


# ------------------------------------------------------------------------------------------- losses


Targets = tuple[nn.Module, list[Tensor]]


def _indices(shapes: list[torch.Size], axis: int) -> list[Tensor]:
    return [torch.randint(shape[axis], shape[:axis] + shape[axis:][1:]) for shape in shapes]


def cross_entropy(
    weight: bool = False, ignore: int | None = None, soft: bool = False, **options: Any
) -> Callable[..., Targets]:
    """Cross-entropy with class indices or, with `soft`, probabilities that need not sum to one."""

    def make(shapes: list[torch.Size], axis: int) -> Targets:
        w = torch.linspace(0.3, 2.0, shapes[0][axis], dtype=torch.float64) if weight else None
        loss = nn.CrossEntropyLoss(
            w, **options, **({} if ignore is None else {"ignore_index": ignore})
        )
        if soft:
            return loss, [torch.rand(shape, dtype=torch.float64) for shape in shapes]
        y = _indices(shapes, axis)
        for t in y:
            if ignore is not None:
                t.view(-1)[::3] = ignore
        return loss, y

    return make


def binary(
    weight: bool = False, pos_weight: bool = False, soft: bool = False, **options: Any
) -> Callable[..., Targets]:
    """Binary cross-entropy with hard or soft targets; weights are along the last axis."""

    def make(shapes: list[torch.Size], axis: int) -> Targets:
        last = shapes[0][-1]
        w = torch.linspace(0.5, 1.5, last, dtype=torch.float64) if weight else None
        positive = torch.linspace(3.0, 0.5, last, dtype=torch.float64) if pos_weight else None
        y = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
        return nn.BCEWithLogitsLoss(w, pos_weight=positive, **options), y if soft else [
            t.round() for t in y
        ]

    return make


def squared(**options: Any) -> Callable[..., Targets]:
    """Squared error."""
    return lambda shapes, axis: (
        nn.MSELoss(**options),
        [torch.randn(shape, dtype=torch.float64) for shape in shapes],
    )


LOSSES: dict[str, Callable[..., Targets]] = {
    "mse": squared(),
    "mse-sum": squared(reduction="sum"),
    "poisson": lambda shapes, axis: (nn.PoissonNLLLoss(full=True), [torch.randint(5, s).double() for s in shapes]),
    "ce": cross_entropy(),
    "ce-sum": cross_entropy(reduction="sum"),
    "ce-weight": cross_entropy(weight=True),
    "ce-weight-sum": cross_entropy(weight=True, reduction="sum"),
    "ce-ignore": cross_entropy(ignore=-100),
    "ce-ignore-a-class": cross_entropy(ignore=1),
    "ce-smoothing": cross_entropy(label_smoothing=0.3),
    "ce-all": cross_entropy(weight=True, ignore=1, label_smoothing=0.2),
    "ce-probabilities": cross_entropy(soft=True),
    "ce-probabilities-all": cross_entropy(soft=True, weight=True, label_smoothing=0.2),
    "bce": binary(),
    "bce-sum": binary(reduction="sum"),
    "bce-weight": binary(weight=True),
    "bce-pos-weight": binary(pos_weight=True),
    "bce-all-soft": binary(weight=True, pos_weight=True, soft=True),
}  # fmt: skip

# --------------------------------------------------------------------------------------------- nets


@dataclass
class Net:
    """A model with its inputs."""

    model: nn.Module
    inputs: list[Any]  # one for each batch; batches differ in size
    read: Callable[[Any], Tensor] = lambda out: (
        out
    )  # the model's output to the tensor that the loss reads
    logits: bool = (
        False  # the output has `.logits` with classes last, and batches are mappings with "labels"
    )
    count: Callable[[Any], int] = len  # of examples of an input
    options: dict[str, Any] = field(default_factory=dict)  # of `EmpiricalRisk`
    params: Callable[[nn.Module], Any] = lambda model: list(model.parameters())
    loss: str = "ce"
    fallback: tuple[str, ...] = ()  # layers without Kronecker factors
    #: Names of modules to the axis of their examples where it is not the first and PyTorch's own
    #: modules say so.
    axes: dict[str, int] = field(default_factory=dict)
    #: Prepares the copy of the model that is the twin's.
    plain: Callable[[nn.Module], object] = lambda model: None


def _batches(*shape: int, sizes: Sequence[int] = (3, 1, 2)) -> list[Tensor]:
    return [torch.randn(n, *shape, dtype=torch.float64) for n in sizes]


def _tokens(most: int, *shape: int, sizes: Sequence[int] = (3, 1, 2)) -> list[Tensor]:
    return [torch.randint(most, (n, *shape)) for n in sizes]


def _mappings(count: str, **inputs: list[Any]) -> dict[str, Any]:
    """Inputs in mappings, with what says how many examples there are."""
    return {
        "inputs": [
            dict(zip(inputs, parts, strict=True)) for parts in zip(*inputs.values(), strict=True)
        ],
        "count": lambda X: len(X[count]),
        "options": {"batch_size_fn": lambda X: len(X[count])},
    }


def twice() -> Written:
    """One module called twice, at two depths."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(torch.tanh(m.shared(torch.tanh(m.shared(m.first(x))))))

    return Written(forward, first=nn.Linear(4, 3), shared=nn.Linear(3, 3), last=nn.Linear(3, 3))


def residual() -> Written:
    """In-place sums on views of layer outputs."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        h += x
        out = m.second(torch.tanh(h))
        out += h
        return out.movedim(-1, 1)

    return Written(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def tied() -> Written:
    """An embedding whose weight is the head's too."""
    parts = {
        "embedding": nn.Embedding(5, 3),
        "body": nn.Linear(3, 3),
        "head": nn.Linear(3, 5, bias=False),
    }
    parts["head"].weight = parts["embedding"].weight
    return Written(lambda m, x: m.head(torch.tanh(m.body(m.embedding(x)))).movedim(-1, 1), **parts)


class Attention(nn.Module):
    """Positions that mix, behind an in-place activation on 3-d features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.k, self.head = (
            nn.Linear(3, 4),
            nn.Linear(4, 2),
            nn.Linear(4, 2),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.first(x))
        h = (self.q(h) @ self.k(h).mT).softmax(-1) @ h
        return self.head(h).movedim(-1, 1)


def by_position(net: nn.Module) -> Written:
    """A net applied to every position, classes on axis 1 of the output."""
    return Written(lambda m, x: m.net(x).movedim(-1, 1), net=net)


def bare() -> Written:
    """Parameters held by the container itself, beside its layers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.inner(torch.tanh(x * m.scale + m.shift) + m.scale)

    return Written(
        forward,
        scale=nn.Parameter(torch.rand(4)),
        shift=nn.Parameter(torch.rand(())),
        inner=nn.Linear(4, 3),
    )


def two_outputs() -> Written:
    """A tuple of which the loss reads the second part."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(m.body(x))
        return h, m.head(h)

    return Written(forward, body=nn.Linear(4, 3), head=nn.Linear(3, 3))


@dataclass
class LanguageOutput:
    """Looks like an output of a language model."""

    logits: Tensor
    hidden: Tensor | None = None


class Language(nn.Module):
    """Looks like a language model: tokens in, an output object with `.logits` [N, T, C] out,
    positions broadcast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(6, 3), nn.Embedding(5, 3)
        self.norm, self.body, self.head = nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, input_ids: Tensor) -> LanguageOutput:
        h = self.tokens(input_ids) + self.positions(
            torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        )
        past = torch.ones(h.shape[1], h.shape[1], dtype=h.dtype, device=h.device).tril()
        h = self.norm(h)
        h = h + torch.tanh(self.body((past / past.sum(1, keepdim=True)) @ h))
        return LanguageOutput(self.head(h), h)


def time_first() -> Written:
    """A layer that sees [T, N, d]."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.body(x.transpose(0, 1))).transpose(0, 1)).movedim(-1, 1)

    return Written(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 3))


class GPT(nn.Module):
    """A tiny transformer whose head is its embedding, with layers that multiply from the right."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(5, 2), nn.Embedding(3, 2)
        self.norm, self.attend, self.project = nn.LayerNorm(2), Conv1D(6, 2), Conv1D(2, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)[None])
        q, k, v = self.attend(self.norm(h)).chunk(3, -1)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = h + self.project((q @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v)
        return self.head(h).movedim(-1, 1)


def same_role() -> Written:
    """Two modules that multiply with one weight, once at more positions than the other time."""

    def forward(m: Any, x: Tensor) -> Tensor:  # [N, S, 3]
        return m.last(torch.tanh(m.two(torch.tanh(m.one(x)).sum(1))))

    model = Written(forward, one=nn.Linear(3, 3), two=nn.Linear(3, 3), last=nn.Linear(3, 3))
    model.two.weight, model.two.bias = model.one.weight, model.one.bias
    return model


def autoencoder() -> Written:
    """A weight and its transpose, one with a bias: `Conv1D` and `Linear` see the same numbers
    turned around.
    """
    model = Written(
        lambda m, x: m.up(torch.tanh(m.down(x))), down=nn.Linear(4, 2, bias=False), up=Conv1D(4, 2)
    )
    model.up.weight = model.down.weight
    return model


def incompatible() -> Written:
    """One weight with two biases: no matrix has both."""
    model = Written(
        lambda m, x: m.two(torch.tanh(m.one(x))), one=nn.Linear(3, 3), two=nn.Linear(3, 3)
    )
    model.two.weight = model.one.weight
    return model


def headed(layer: nn.Module, read: Callable[[Any, Any], Tensor]) -> Written:
    """A layer, and a head at every position of what is read of it."""
    return Written(
        lambda m, x: m.head(read(m.layer, x)).movedim(-1, 1), layer=layer, head=nn.Linear(2, 3)
    )


def _states(rnn: Any, x: Tensor) -> Tensor:  # [N, T, 2]
    """The sequence and the last state of a recurrent layer."""
    out, (_, state) = rnn(x if rnn.batch_first else x.transpose(0, 1))
    return (out if rnn.batch_first else out.transpose(0, 1)) + state[-1][:, None]


def cells() -> Written:
    """A recurrent cell, called once for every step with its own states."""

    def forward(m: Any, x: Tensor) -> Tensor:  # [N, T, 2]
        state = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return m.head(state[0] + state[1])

    return Written(forward, cell=nn.LSTMCell(2, 2), head=nn.Linear(2, 3))


def adapted() -> Written:
    """Two small layers beside a large one that is frozen."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.base(x) + 2 * m.up(m.down(x))))

    small = {"down": nn.Linear(4, 2, bias=False), "up": nn.Linear(2, 4, bias=False)}
    return Written(forward, base=nn.Linear(4, 4), head=nn.Linear(4, 3), **small)


def checkpointed() -> Written:
    """A block that runs again in the backward pass."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(
            checkpoint(m.block, x, use_reentrant=False) if m.again else m.block(x)
        ).movedim(-1, 1)

    block = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    return Written(forward, block=block, head=nn.Linear(2, 3), again=True)


class Evaluated(nn.Module):
    """Stays in evaluation mode whatever happens around it, as frozen statistics must."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)
        self.train()

    def train(self, mode: bool = True) -> Evaluated:
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


_SMALL: dict[str, Any] = {
    "d_model": 2,
    "nhead": 2,
    "dim_feedforward": 2,
    "dropout": 0.0,
    "batch_first": True,
}


def _frozen(model: nn.Module, *names: str) -> nn.Module:
    for name, p in model.named_parameters():
        if not names or name.startswith(names):
            p.requires_grad_(False)
    return model


def _mlp(activation: nn.Module | None = None, i: int = 4, h: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(i, h), activation or nn.Tanh(), nn.Linear(h, 3))


def _cnn(**options: Any) -> nn.Sequential:
    conv = nn.Conv2d(2, 2, 3, **options)
    return nn.Sequential(
        conv,
        nn.ReLU(inplace=True),
        nn.Conv2d(2, 2, (1, 2), bias=False),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Some of the parameters, in another order, under names of the user's."""
    items = list(model.named_parameters())[::-1]
    return {f"p{index}": p for index, (_, p) in enumerate(items) if index != 1}


NETS: dict[str, Callable[[], Net]] = {
    "linear": lambda: Net(nn.Linear(4, 3), _batches(4)),
    "mlp": lambda: Net(_mlp(), _batches(4)),
    "in-place relu": lambda: Net(_mlp(nn.ReLU(inplace=True)), _batches(4)),
    "deep linear": lambda: Net(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)),
        _batches(4), loss="mse"),
    "one number": lambda: Net(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)),
        _batches(4), loss="bce"),
    "strided cnn": lambda: Net(_cnn(stride=2, padding=(1, 0)), _batches(2, 5, 6)),
    "same cnn": lambda: Net(_cnn(padding="same", padding_mode="reflect", dilation=(1, 2)), _batches(2, 4, 5)),
    "grouped cnn": lambda: Net(_cnn(groups=2), _batches(2, 3, 4)),
    "conv1d": lambda: Net(nn.Sequential(nn.Conv1d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Conv1d(3, 3, 2)),
        _batches(2, 6)),
    "conv3d": lambda: Net(nn.Sequential(nn.Conv3d(1, 2, (2, 1, 2), padding=(1, 0, 0)), nn.ReLU(inplace=True),
        nn.Flatten(), nn.LazyLinear(3)), _batches(1, 2, 2, 3)),
    "sequence": lambda: Net(by_position(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))),
        _batches(2, 3)),
    "grid": lambda: Net(by_position(nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True), nn.Linear(2, 3))),
        _batches(2, 2, 3)),
    "attention": lambda: Net(Attention(), _batches(3, 3)),
    "uneven sequences": lambda: Net(Attention(), [*_batches(2, 3, sizes=(2,)), *_batches(4, 3, sizes=(1,)),
        *_batches(1, 3)]),
    "flattened": lambda: Net(Written(lambda m, x: m.net(x.flatten(0, 1)), net=_mlp(i=3, h=4)), _batches(3, 3)),
    "called twice": lambda: Net(twice(), _batches(4)),
    "in-place residual": lambda: Net(residual(), _batches(2, 4)),
    "padding index": lambda: Net(nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 3)),
        [torch.tensor([[0, 1], [2, 3], [4, 1]]), torch.tensor([[1, 0]]), torch.tensor([[1, 1], [3, 2]])]),
    "transposed convolution": lambda: Net(nn.Sequential(nn.ConvTranspose1d(2, 2, 2, stride=2),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3)), _batches(2, 2)),
    "tied": lambda: Net(tied(), _tokens(5, 3)),
    "tied transformer": lambda: Net(GPT(), _tokens(5, 3, sizes=(3, 1)), fallback=("norm",)),
    "tied in one role": lambda: Net(same_role(), _batches(2, 3)),
    "tied autoencoder": lambda: Net(autoencoder(), _batches(4), loss="mse", params=lambda model: [model.down.weight]),
    "tied with two biases": lambda: Net(incompatible(), _batches(3), fallback=("one",)),
    "right-hand weight": lambda: Net(by_position(nn.Sequential(Conv1D(4, 3), nn.Tanh(), Conv1D(3, 4))), _batches(2, 3)),
    "self-attention": lambda: Net(headed(nn.MultiheadAttention(2, 2, batch_first=True), lambda layer, x: x + layer(x, x,
        x)[0]), _batches(3, 2)),
    "cross-attention of three sizes": lambda: Net(Written(lambda m, X: m.head(m.attn(X["q"], X["k"], X["v"],
        need_weights=False)[0].sum(1)), attn=nn.MultiheadAttention(2, 1, batch_first=True, kdim=3, vdim=1),
        head=nn.Linear(2, 3)), **_mappings("q", q=_batches(2, 2), k=_batches(3, 3), v=_batches(3, 1))),
    "encoder layer": lambda: Net(Evaluated(headed(nn.TransformerEncoderLayer(**_SMALL), lambda layer, x: layer(x))),
        _batches(2, 2, sizes=(2, 1)), fallback=("net.0.layer.norm1", "net.0.layer.norm2")),
    "decoder layer": lambda: Net(headed(nn.TransformerDecoderLayer(**_SMALL), lambda layer, X: layer(X["q"],
        X["memory"])), **_mappings("q", q=_batches(2, 2, sizes=(2, 1)), memory=_batches(3, 2, sizes=(2, 1))),
        fallback=("layer.norm1", "layer.norm2", "layer.norm3")),
    "lstm": lambda: Net(headed(nn.LSTM(2, 2, batch_first=True), _states), _batches(2, 2), fallback=("layer",)),
    "lstm with time first": lambda: Net(headed(nn.LSTM(2, 2), _states), _batches(3, 2, sizes=(2, 1)),
        fallback=("layer",)),
    "lstm cells": lambda: Net(cells(), _batches(3, 2), fallback=("cell",)),
    "adapters": lambda: Net(_frozen(adapted(), "base", "head"), _batches(4), params=lambda model:
        [*model.down.parameters(), *model.up.parameters()]),
    "checkpointed": lambda: Net(checkpointed(), _batches(2, 3), fallback=("block.1",), plain=lambda model:
        setattr(model, "again", False)),
    "compiled": lambda: Net(nn.Sequential(nn.Linear(4, 3), torch.compile(nn.Sequential(nn.Tanh(), nn.Linear(3, 3)),
        backend="eager")), _batches(4)),
    "spectral norm": lambda: Net(Evaluated(spectral_norm(nn.Conv1d(2, 2, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(4,
        3)), _batches(2, 3), fallback=("net.0",)),
    "frozen": lambda: Net(_frozen(_mlp(nn.ReLU(inplace=True))), _batches(4)),
    "frozen sequence": lambda: Net(_frozen(Attention()), _batches(2, 3)),
    "half frozen": lambda: Net(_frozen(_mlp(nn.ReLU(inplace=True)), "0"), _batches(4), params=lambda model: [p for p
        in model.parameters() if p.requires_grad]),
    "weights only": lambda: Net(_mlp(), _batches(4), params=lambda model: [model[2].weight, model[0].weight]),
    "biases only": lambda: Net(by_position(_mlp()), _batches(2, 4), params=lambda model: [model.net[2].bias,
        model.net[0].bias]),
    "shuffled": lambda: Net(_mlp(), _batches(4), params=lambda model: list(model.parameters())[::-1]),
    "named subset": lambda: Net(_cnn(), _batches(2, 3, 4), params=_named),
    "generic layers": lambda: Net(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.PReLU(), nn.Flatten(),
        nn.Linear(8, 3)), [torch.randint(5, (n, 2)) for n in (3, 1, 2)], fallback=("1", "2")),
    "group norm": lambda: Net(nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3)),
        _batches(2, 3), fallback=("1",)),
    "root mean square norm": lambda: Net(by_position(nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4, eps=1e-3),
        nn.Linear(4, 3))), _batches(2, 3), fallback=("net.1",)),
    "instance norm": lambda: Net(nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.Tanh(), nn.Flatten(),
        nn.Linear(6, 3)), _batches(2, 3), fallback=("0",)),
    "batch norm 2d": lambda: Net(Evaluated(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 2), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(4, 3)), _batches(2, 2, 3), fallback=("net.0",)),
    "bare parameters": lambda: Net(bare(), _batches(4), fallback=("",)),
    "mapping": lambda: Net(Written(lambda m, X: torch.tanh(m.left(X["u"])) * m.right(X["v"]), left=nn.Linear(2, 3),
        right=nn.Linear(3, 3)), [{"u": u, "v": v} for u, v in zip(_batches(2), _batches(3), strict=True)],
        count=lambda X: len(X["u"]), options={"batch_size_fn": lambda X: len(X["u"])}),
    "two outputs": lambda: Net(two_outputs(), _batches(4), read=lambda out: out[1], options={"output": lambda out:
        out[1]}),
    "language model": lambda: Net(Language(), [torch.randint(6, (n, 3)) for n in (3, 1, 2)], logits=True,
        fallback=("norm",)),
    "time first": lambda: Net(time_first(), _batches(4, 3), options={"example_axis": {"body": 1}}),
}  # fmt: skip

# ----------------------------------------------------------------------------------------- problems


@dataclass(frozen=True, eq=False)
class Problem:
    """A net with a loss, and batches with targets."""

    net: Net
    loss: nn.Module
    data: list[Any]

    @property
    def model(self) -> nn.Module:
        return self.net.model

    @cached_property
    def params(self) -> Any:
        """The parameters as a user hands them over."""
        return self.net.params(self.model)

    @property
    def keyed(self) -> dict[str, Tensor]:
        """The same by key."""
        own = {id(p): name for name, p in self.model.named_parameters()}
        return (
            dict(self.params)
            if isinstance(self.params, Mapping)
            else {own[id(p)]: p for p in self.params}
        )

    def risk(self, data: Any = None, **options: Any) -> EmpiricalRisk:
        """Model, loss and data as one noun."""
        data = self.data if data is None else data
        return EmpiricalRisk(
            self.model, self.loss, data, self.params, **{**self.net.options, **options}
        )

    def curvature(
        self,
        approximation: Any,
        data: Any = None,
        risk: EmpiricalRisk | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """The composing door, with an eye on the user's things; warnings that a net must cause are
        expected.

        Of several approximations with one `risk`, the first one checks the model.
        """
        with (
            unchanged(self.model, self.loss, data if isinstance(data, list) else self.data),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", r"Exact\(\) sends", CurvatureWarning)
            if self.net.fallback:
                warnings.filterwarnings("ignore", ".*get their exact diagonal", CurvatureWarning)
            risk = risk if isinstance(risk, EmpiricalRisk) else self.risk(data, **(risk or {}))
            return curvature(risk, approximation, **options)

    @cached_property
    def _made(self) -> dict[tuple[str, bool], Any]:
        return {}

    def made(self, approximation: str, separate: bool = False) -> Any:
        """The operator of one of `APPROXIMATIONS`; made once, so don't change it, nor the code
        while it is made.
        """
        if (approximation, separate) not in self._made:
            K = self.curvature(APPROXIMATIONS[approximation], separate_weight_and_bias=separate)
            self._made[approximation, separate] = K
        return self._made[approximation, separate]

    def reference(self, **options: Any) -> Reference:
        """The slow exact twin."""
        net, hugging = self.net, self.net.logits
        classes_last = hugging and isinstance(self.loss, nn.CrossEntropyLoss)
        return Reference(
            self.model,
            self.loss,
            self.data,
            self.keyed,
            read=(lambda out: out.logits) if hugging else net.read,
            axis=1 if isinstance(self.loss, nn.CrossEntropyLoss) and not hugging else -1,
            to_loss=(lambda f: f.movedim(-1, 1)) if classes_last else (lambda f: f),
            count=net.count,
            example_axis={**net.axes, **net.options.get("example_axis", {})},
            plain=net.plain,
            **options,
        )

    @cached_property
    def exact(self) -> Reference:
        """`reference()`, made once."""
        return self.reference()

    def to(self, device: torch.device, dtype: torch.dtype) -> Problem:
        """A copy on another device, in another precision."""

        def move(t: Any) -> Any:
            if isinstance(t, Tensor):
                return t.to(device, dtype) if t.is_floating_point() else t.to(device)
            if isinstance(t, Mapping):
                return {key: move(value) for key, value in t.items()}
            return type(t)(move(value) for value in t) if isinstance(t, (list, tuple)) else t

        model = copy.deepcopy(self.model).to(device, dtype)
        return Problem(
            replace(self.net, model=model),
            copy.deepcopy(self.loss).to(device, dtype),
            move(self.data),
        )


def make(maker: Callable[[], Net], loss_name: str | None = None, seed: str = "") -> Problem:
    """A problem from the maker of a net, in float64, with numbers that depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(seed.encode()))
        net = maker()
        net.model.double()
        with torch.no_grad():
            if any(isinstance(m, nn.LazyLinear) for m in net.model.modules()):
                net.model(net.inputs[0])
            for p in net.model.parameters():
                p.copy_(torch.randn_like(p) / max(1, p[0].numel() if p.ndim > 1 else 2) ** 0.5)
            outs = [net.model(input_ids=x) if net.logits else net.model(x) for x in net.inputs]
        shapes = [(out.logits if net.logits else net.read(out)).shape for out in outs]
        last = len(shapes[0]) - 1
        loss, y = LOSSES[loss_name or net.loss](shapes, last if net.logits else min(1, last))
    pairs = zip(net.inputs, y, strict=True)
    data = [{"input_ids": X, "labels": t} for X, t in pairs] if net.logits else list(pairs)
    return Problem(net, loss, data)


@cache
def problem(name: str) -> Problem:
    """A problem by its name, "net" or "net, loss"; made once, so don't change it."""
    return fresh(name)


def fresh(name: str) -> Problem:
    """The same problem with a model and data of its own."""
    net, _, loss = name.partition(", ")
    return make(NETS[net], loss or None, seed=net)


#: Every net with a loss that fits, and every loss on a net with one term per example and one with
#: several.
PROBLEMS = [*NETS, *(f"{net}, {loss}" for net in ("mlp", "attention") for loss in LOSSES)]
#: A few that differ most, for laws that are about the approximation rather than the net.
FEW = [
    "mlp",
    "strided cnn",
    "attention",
    "called twice",
    "tied",
    "generic layers",
    "language model",
]

# ----------------------------------------------------------------------------------- approximations

APPROXIMATIONS: dict[str, Any] = {
    "KFAC": KFAC,
    "KFAC reduce": KFAC.using(kfac_approx="reduce"),
    "EKFAC": EKFAC,
    "EKFAC reduce": EKFAC.using(kfac_approx="reduce"),
    "KFAC with diagonal factors": KFAC.using(max_bytes=0),
    "EKFAC, large factors diagonal": EKFAC.using(max_bytes=150),
    "DiagonalBlock": DiagonalBlock,
    "FullBlock": FullBlock,
    "ScaledIdentity": ScaledIdentity.using(scale=0.5),
    "NearestKronecker": NearestKronecker,
    "NearestKronecker by sweeps": NearestKronecker.using(max_bytes=0),
    "TNT": TNT,
}

VECTORS: dict[str, Any] = {
    "exact": Exact(),
    "signs": Exact(signs=True, seed=3),
    "mc": MonteCarlo(samples=2, seed=1),
    "empirical": Empirical(),
    "empirical per term": Empirical(per_term=True),
    "forward only": ForwardOnly(),
}
