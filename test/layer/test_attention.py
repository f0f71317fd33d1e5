"""`nn.MultiheadAttention` in all forms, and what is made of it, against the slow exact twin."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import EKFAC, FullBlock
from test.cases import APPROXIMATIONS, Net, Problem, close, make

E, HEADS = 4, 2


class Model(nn.Module):
    """Attention with a layer before and behind it.

    Args:
        form: How it is called.
        options: Of `nn.MultiheadAttention`.
    """

    def __init__(self, form: Form, **options: Any) -> None:
        super().__init__()
        self.form, self.first = form, options.get("batch_first", True)
        self.before = nn.Linear(3, E)
        self.attn = nn.MultiheadAttention(E, HEADS, **{"batch_first": True, **options})
        self.head = nn.Linear(E, 3)

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        given = {"q": x} if isinstance(x, Tensor) else dict(x)
        q = torch.tanh(self.before(given["q"]))
        k = given.get("k", q)
        v = given.get("v", k)
        turn = not self.first
        if turn:
            turned = {
                id(t): t.transpose(0, 1) for t in (q, k, v)
            }  # which of them are one tensor must stay so
            q, k, v = (turned[id(t)] for t in (q, k, v))
        more = {"key_padding_mask": given["padding"]} if "padding" in given else {}
        more |= {"attn_mask": given["mask"].flatten(0, 1)} if "mask" in given else {}
        h, _ = self.attn(q, k, v, **more, **self.form.call)
        return self.head((h.transpose(0, 1) if turn else h).sum(1))


@dataclass(frozen=True, eq=False)
class Form:
    """A way to make and to call attention.

    Attributes:
        calls: How often its in-projection is read in one forward pass.
        options: Of `nn.MultiheadAttention`.
        call: Keywords of the call.
        inputs: Sizes [positions, features] of other inputs than the query.
        padding: Which keys of which example are padding; None for none.
        masks: Whether every head of every example has a mask of its own.
    """

    calls: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, tuple[int, int]] = field(default_factory=dict)
    padding: Tensor | None = None
    masks: bool = False


L = 3  # positions of the query
UPPER = torch.ones(L, L, dtype=torch.bool).triu(1)
SOME = torch.tensor([[False, False, True], [False, True, False], [False, False, False]])

FORMS: dict[str, Form] = {
    "self": Form(),
    "without weights": Form(call={"need_weights": False}),
    "with the weights of every head": Form(call={"average_attn_weights": False}),
    "time first, without bias": Form(options={"batch_first": False, "bias": False}),
    "time first, two inputs": Form(2, options={"batch_first": False}, inputs={"k": (2, E)}),
    "three inputs": Form(3, inputs={"k": (2, E), "v": (2, E)}, call={"need_weights": False}),
    "three sizes": Form(3, inputs={"k": (2, 2), "v": (2, 3)}, options={"kdim": 2, "vdim": 3}),
    "three sizes without bias": Form(3, inputs={"k": (2, 2), "v": (2, 3)}, options={"kdim": 2, "vdim": 3, "bias":
        False, "batch_first": False}),
    "padding": Form(padding=SOME),
    "padding and a mask": Form(padding=SOME, call={"attn_mask": UPPER, "need_weights": False}),
    "float mask": Form(call={"attn_mask": torch.linspace(-1, 1, L * L, dtype=torch.float64).view(L, L)}),
    "a mask for every head": Form(masks=True),
    "causal": Form(call={"attn_mask": UPPER, "is_causal": True, "need_weights": False}),
}  # fmt: skip


def attention(form: str | Form, train: bool = False, **more: Any) -> Problem:
    """A problem with attention."""
    given = FORMS[form] if isinstance(form, str) else form

    def maker() -> Net:
        model = Model(given, **given.options, **more).train(train)
        inputs = []
        for n in (3, 2):
            X: dict[str, Tensor] = {"q": torch.randn(n, L, 3).double()}
            X |= {name: torch.randn(n, *size).double() for name, size in given.inputs.items()}
            if given.padding is not None:
                X["padding"] = given.padding[:n]
            if given.masks:
                X["mask"] = torch.randn(n, HEADS, L, L).double()
            inputs.append(X)
        return Net(
            model,
            inputs,
            count=lambda X: len(X["q"]),
            options={"batch_size_fn": lambda X: len(X["q"])},
            loss="ce",
        )

    return make(maker, seed="attention")


def check(p: Problem, **options: Any) -> None:
    """Blocks are those of the slow exact twin."""
    risk, exact = p.risk(**options), p.exact.only_blocks(p.exact.ggn(), False)
    close(p.curvature(FullBlock, risk=risk).to_dense(), exact, what="FullBlock")
    for kind in ("KFAC", "KFAC reduce"):
        K = p.curvature(APPROXIMATIONS[kind], risk=risk)
        close(K.to_dense(), p.exact.kfac(p.exact.exact(), "reduce" in kind), what=kind)
    close(p.curvature(EKFAC, risk=risk).trace, exact.trace(), what="trace of EKFAC")


@pytest.mark.parametrize("form", FORMS)
def test_blocks_are_those_of_the_twin(form: str) -> None:
    p = attention(form)
    close(p.model(p.data[0][0]), p.exact.batches[0].f, 1e-12, "output of the twin")
    check(p)


@pytest.mark.parametrize("form", ["time first, two inputs", "three sizes", "padding"])
def test_each_parameter_by_itself(form: str) -> None:
    """Weights and biases apart, and some of them alone."""
    p = attention(form)
    close(p.made("KFAC", separate=True).to_dense(), p.exact.kfac(p.exact.exact(), separate=True))
    close(p.made("EKFAC", separate=True).trace, p.exact.ggn().trace())
    for chosen in (["in_proj_bias"], ["out_proj.bias", "in_proj_bias"]):
        params = {f"attn.{name}": p.model.attn.get_parameter(name) for name in chosen}
        check(Problem(replace(p.net, params=lambda model, own=params: own), p.loss, p.data))


class Encoder(nn.Module):
    """Two encoder layers that may be fused, on padded sequences; padding is ignored by the loss."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(2, 2, dim_feedforward=3, dropout=0.0, batch_first=first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.encoder = nn.TransformerEncoder(block, 2)
        self.head, self.first = nn.Linear(2, 3), first

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"] if self.first else inputs["x"].transpose(0, 1)
        h = self.encoder(x, src_key_padding_mask=inputs["padding"])
        h = h if self.first else h.transpose(0, 1)
        # Nested tensors come back as long as the longest sequence.
        h = nn.functional.pad(h, (0, 0, 0, inputs["x"].shape[1] - h.shape[1]))
        return self.head(h).movedim(-1, 1)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize(("first", "train"), [(True, False), (True, True), (False, False)])
def test_encoders_of_padded_sequences(first: bool, train: bool, frozen: bool) -> None:
    """In evaluation mode without gradients PyTorch would run a fused kernel, which no hook sees."""
    padding = torch.tensor([[False, False, False], [False, False, True], [False, True, True]])
    layers = [f"encoder.layers.{k}" for k in (0, 1)]

    def plain(model: nn.Module) -> None:
        model.encoder.use_nested_tensor = False  # type: ignore[union-attr]

    def maker() -> Net:
        inner = ("self_attn", "linear1", "linear2")
        return Net(
            Encoder(first).train(train),
            [{"x": torch.randn(n, 3, 2).double(), "padding": padding[-n:]} for n in (3, 2)],
            count=lambda X: len(X["x"]),
            options={"batch_size_fn": lambda X: len(X["x"])},
            fallback=tuple(f"{layer}.norm{j}" for layer in layers for j in (1, 2)),
            axes={} if first else {f"{layer}.{name}": 1 for layer in layers for name in inner},
            plain=plain,
        )

    p = make(maker, seed="encoder")
    for X, y in p.data:
        y[X["padding"]] = -100
    p.exact.ggn()
    if frozen:
        p.model.requires_grad_(False)
    check(p)
