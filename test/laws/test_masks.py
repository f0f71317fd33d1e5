"""A padded batch with a mask is the batch without its padding: masked positions leave the
statistics of any layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    CurvatureWarning,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    curvature,
)
from test.cases import APPROXIMATIONS, close, unchanged

T, D = 4, 4  # as many positions as features: axes that are mixed up must show
LENGTHS = [(4, 2), (3,)]


class Tokens(nn.Module):
    """Tokens or features in, a layer between a first and a last one, logits [N, C, T] out."""

    def __init__(self, layer: nn.Module, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.layer, self.last = first or nn.Linear(3, D), layer, nn.Linear(D, 3)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        h = torch.tanh(self.first(inputs["x"]))
        h = self.layer(h, inputs["keep"]) if isinstance(self.layer, Masked) else self.layer(h)
        return self.last(torch.tanh(h)).movedim(-1, 1)


class Masked(nn.Module):
    """A layer that must know which positions are padding."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, keep: Tensor) -> Tensor:
        layer = self.layer
        if isinstance(layer, nn.TransformerEncoderLayer):
            return layer(h, src_key_padding_mask=~keep)
        x = h if layer.batch_first else h.transpose(0, 1)
        out = layer(x, x, x, key_padding_mask=~keep)[0]
        return h + (out if layer.batch_first else out.transpose(0, 1))


class Then(nn.Module):
    """A layer with functions before and after it."""

    def __init__(
        self, layer: nn.Module, before: Callable[[Any], Any], after: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.layer, self.before, self.after = layer, before, after

    def forward(self, h: Tensor) -> Tensor:
        return self.after(self.layer(self.before(h)))


class Scale(nn.Module):
    """Parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return (h * self.scale + self.shift).exp()


class Tied(Tokens):
    """The embedding's table is the last layer's, too."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(D), nn.Embedding(3, D))
        self.last = nn.Linear(D, 3, bias=False)
        self.last.weight = self.first.weight


BLOCK = {"d_model": D, "nhead": 2, "dim_feedforward": 3, "dropout": 0.0, "batch_first": True}
MODELS: dict[str, Callable[[], Tokens]] = {
    "linear": lambda: Tokens(nn.Linear(D, D)),
    "embedding": lambda: Tokens(nn.Linear(D, D, bias=False), nn.Embedding(6, D)),
    "embedding with padding": lambda: Tokens(nn.Identity(), nn.Embedding(6, D, padding_idx=2)),
    "layer norm": lambda: Tokens(nn.LayerNorm(D)),
    "prelu": lambda: Tokens(nn.PReLU()),
    "pointwise convolution": lambda: Tokens(
        Then(nn.Conv1d(D, D, 1, groups=2), lambda h: h.mT, lambda h: h.mT)
    ),
    "bare parameters": lambda: Tokens(Scale()),
    "lstm": lambda: Tokens(Then(nn.LSTM(D, D, batch_first=True), lambda h: h, lambda out: out[0])),
    "attention": lambda: Tokens(Masked(nn.MultiheadAttention(D, 2, batch_first=True))),
    "encoder layer": lambda: Tokens(Masked(nn.TransformerEncoderLayer(**BLOCK))),
    "tied": Tied,
}
every_model = pytest.mark.parametrize("name", MODELS)


def padded(name: str, ignore: bool = True) -> tuple[nn.Module, list[Any], list[Any]]:
    """A model in float64, padded batches, and one batch for each example without its padding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().double()
        for p in model.parameters():
            nn.init.normal_(p, std=0.7)
        together, apart = [], []
        for lengths in LENGTHS:
            n = len(lengths)
            table = model.first.num_embeddings if isinstance(model.first, nn.Embedding) else None
            x = torch.randn(n, T, 3).double() if table is None else torch.randint(table, (n, T))
            y = torch.randint(3, (n, T))
            keep = torch.arange(T) < torch.tensor(lengths)[:, None]
            if ignore:
                y[~keep] = -100
            together.append(({"x": x, "keep": keep}, y))
            for k, length in enumerate(lengths):
                X = {"x": x[k : k + 1, :length], "keep": keep[k : k + 1, :length]}
                apart.append((X, y[k : k + 1, :length]))
    return model.eval(), together, apart


def count(X: Mapping[str, Tensor]) -> int:
    return len(X["x"])


def mask(X: Mapping[str, Tensor], y: Tensor) -> Tensor:
    return X["keep"]


def risk(
    model: nn.Module, data: list[Any], masked: bool, loss: nn.Module | None = None
) -> EmpiricalRisk:
    loss = nn.CrossEntropyLoss(reduction="sum") if loss is None else loss
    return EmpiricalRisk(model, loss, data, batch_size_fn=count, mask=mask if masked else None)


def quietly(*args: Any, **options: Any) -> Any:
    """`curvature`, without the warning about layers that have no Kronecker factors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*get their exact diagonal", CurvatureWarning)
        K = curvature(*args, **options)
        K.compute()
    return K


#: One for each statistic of a layer.
STATISTICS = ("KFAC", "KFAC reduce", "EKFAC", "DiagonalBlock", "FullBlock", "TNT")


@pytest.mark.one_in(2)
@every_model
@pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])
def test_padding_with_a_mask_is_no_padding(name: str, separate: bool) -> None:
    model, together, apart = padded(name)
    masked, plain = risk(model, together, True), risk(model, apart, False)
    # What an encoder layer is made of is among the models.
    for approximation in STATISTICS if separate or name == "encoder layer" else APPROXIMATIONS:
        kind = APPROXIMATIONS[approximation]
        with unchanged(model, together):
            got = quietly(masked, kind, separate_weight_and_bias=separate)
        expected = quietly(plain, kind, separate_weight_and_bias=separate)
        if (
            "EKFAC" in approximation
        ):  # where a factor lacks rank, rounding decides about its eigenvectors
            close(got.trace, expected.trace, what=approximation)
        else:
            close(got.to_dense(), expected.to_dense(), what=approximation)


# ------------------------------------------------------------------------- positions with gradients


def gradients_without(model: nn.Module, path: str, data: list[Any], loss: nn.Module) -> Tensor:
    """`Σ_n u uᵀ`, `u` the gradient of an example by a layer's parameters through the positions that
    count.

    One example at a time, in plain autograd: the gradient of the loss by the layer's output,
    masked, sent on to the layer's parameters with its input kept as it is.
    """
    module = model.get_submodule(path)
    params = [p for p in module._parameters.values() if p is not None]
    total: Any = 0.0
    for X, y in data:
        for n in range(len(y)):
            calls: list[tuple[Any, Any]] = []
            handle = module.register_forward_hook(
                lambda module, args, out, calls=calls: calls.append((args, out))
            )
            value = loss(model({key: t[n : n + 1] for key, t in X.items()}), y[n : n + 1])
            handle.remove()
            ((args, out),) = calls
            seen = out[0] if isinstance(out, tuple) else out
            (g,) = torch.autograd.grad(value, seen)
            keep = X["keep"][n]
            g = g * (keep[None, None] if isinstance(module, nn.Conv1d) else keep[None, :, None])
            again = module(*(t.detach() for t in args))
            again = again[0] if isinstance(again, tuple) else again
            u = torch.autograd.grad(again, params, g)
            flat = torch.cat([t.flatten() for t in u])
            total = total + torch.outer(flat, flat)
    return total


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("tied", "encoder layer")])
@pytest.mark.parametrize("approximation", [FullBlock, DiagonalBlock, EKFAC])
def test_gradients_at_masked_positions_are_left_out(name: str, approximation: Any) -> None:
    """Here padding is not ignored by the loss, so there is something to leave out, from norms and
    embeddings too.
    """
    model, together, _ = padded(name, ignore=False)
    loss = nn.CrossEntropyLoss(reduction="sum")
    K = quietly(risk(model, together, True), approximation, vectors=Empirical())
    unmasked = quietly(risk(model, together, False), approximation, vectors=Empirical())
    seen = 0
    for block in K.blocks:
        if "proj" in block:
            continue  # attention calls none of its submodules
        expected = gradients_without(model, block, together, loss)
        trace = expected.trace()
        if approximation is EKFAC:
            close(K.blocks[block].trace, trace, what=f"{block}, trace")
        else:
            layout = K.operator.layouts[block]
            order = layout.join(by_shape(K, block)).flatten().argsort()
            got = K.blocks[block].to_dense()[order[:, None], order]
            close(
                got,
                expected if approximation is FullBlock else expected.diagonal().diag(),
                what=block,
            )
        assert abs(float(unmasked.blocks[block].trace - trace)) > 1e-3 * float(trace), (
            f"{block}: nothing was masked"
        )
        seen += 1
    assert seen >= 2


def by_shape(K: Any, block: str) -> dict[str, Tensor]:
    """Numbers of a block's parameters in the order of the module, one after the other, in their
    shapes.
    """
    start, tree = 0, {}
    for key, q in K.risk.params.items():
        if key.rpartition(".")[0] == block:
            tree[key] = torch.arange(start, start + q.numel(), dtype=torch.float64).view(
                *q.shape, 1
            )
            start += q.numel()
    return tree


@pytest.mark.parametrize("approximation", ["KFAC", "KFAC reduce"])
def test_an_example_of_padding_alone_adds_nothing(approximation: str) -> None:
    model, together, _ = padded("linear")
    X, y = together[0]
    X = X | {"keep": X["keep"] & torch.tensor([[True], [False]])}
    y = torch.where(X["keep"], y, -100)
    alone = [({key: value[:1] for key, value in X.items()}, y[:1])]
    kind = APPROXIMATIONS[approximation]
    found, expected = (
        quietly(risk(model, data, True), kind).blocks["layer"] for data in ([(X, y)], alone)
    )
    close(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("approximation", ["KFAC", "KFAC reduce"])
def test_positions_may_stand_in_the_rows_of_a_layer(approximation: str) -> None:
    """A convolution of `[N · T, 1, D]` is that of `[N, 1, T, D]`."""
    model, together, _ = padded("linear")
    flat, image = (
        nn.Conv1d(1, 1, 3, padding=1).double(),
        nn.Conv2d(1, 1, (1, 3), padding=(0, 1)).double(),
    )
    image.weight, image.bias = nn.Parameter(flat.weight.detach()[:, :, None]), flat.bias
    nets = [
        Tokens(
            Then(flat, lambda h: h.flatten(0, 1)[:, None], lambda h: h[:, 0].unflatten(0, (-1, T)))
        ),
        Tokens(Then(image, lambda h: h[:, None], lambda h: h[:, 0])),
    ]
    for net in nets:
        net.first, net.last = model.first, model.last
    close(
        *(
            quietly(risk(net, together, False), APPROXIMATIONS[approximation]).to_dense()
            for net in nets
        )
    )
