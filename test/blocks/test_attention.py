"""`nn.MultiheadAttention` and what is made of it, against attention with four linear layers of their own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from cases import APPROXIMATIONS, Net, Problem, close, make, unchanged
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    Accumulator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.linalg import Diagonal

E, HEADS = 4, 2


class FourLinears(nn.Module):
    """Multi-head attention as the textbook has it, examples first."""

    def __init__(self, given: nn.MultiheadAttention) -> None:
        super().__init__()
        kdim, vdim = given.kdim or E, given.vdim or E
        biased = given.in_proj_bias is not None
        self.q, self.k, self.v = (nn.Linear(size, E, bias=biased) for size in (E, kdim, vdim))
        self.out = nn.Linear(E, E, bias=biased)
        self.double()
        with torch.no_grad():
            for index, part in enumerate((self.q, self.k, self.v)):
                if given.in_proj_weight is None:
                    part.weight.copy_(getattr(given, f"{'qkv'[index]}_proj_weight"))
                else:
                    part.weight.copy_(given.in_proj_weight[index * E : index * E + E])
                if biased:
                    part.bias.copy_(given.in_proj_bias[index * E : index * E + E])
            self.out.load_state_dict(given.out_proj.state_dict())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any = None, attn_mask: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, x in zip(self.parts, (query, key, value)))
        scores = q @ k.mT / (E // HEADS) ** 0.5  # [N, heads, L, S]
        if attn_mask is not None:
            attn_mask = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, HEADS))
            scores = scores.masked_fill(attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None

    @property
    def parts(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q, self.k, self.v


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
        turn = not self.first and not isinstance(self.attn, FourLinears)
        if turn:
            turned = {id(t): t.transpose(0, 1) for t in (q, k, v)}  # which of them are one tensor must stay so
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
    "with weights": Form(call={"need_weights": True}),
    "without weights": Form(call={"need_weights": False}),
    "with the weights of every head": Form(call={"average_attn_weights": False}),
    "without bias": Form(options={"bias": False}),
    "time first": Form(options={"batch_first": False}),
    "time first, two inputs": Form(2, options={"batch_first": False}, inputs={"k": (2, E)}),
    "two inputs": Form(2, inputs={"k": (2, E)}),
    "three inputs": Form(3, inputs={"k": (2, E), "v": (2, E)}, call={"need_weights": False}),
    "three inputs without bias": Form(3, inputs={"k": (2, E), "v": (2, E)}, options={"bias": False}),
    "three sizes": Form(3, inputs={"k": (2, 2), "v": (2, 3)}, options={"kdim": 2, "vdim": 3}),
    "three sizes without bias": Form(
        3, inputs={"k": (2, 2), "v": (2, 3)}, options={"kdim": 2, "vdim": 3, "bias": False, "batch_first": False}
    ),
    "padding": Form(padding=SOME),
    "padding without weights": Form(padding=SOME, call={"need_weights": False}),
    "padding and a mask": Form(padding=SOME, call={"attn_mask": UPPER, "need_weights": False}),
    "bool mask": Form(call={"attn_mask": UPPER}),
    "float mask": Form(call={"attn_mask": torch.linspace(-1, 1, L * L, dtype=torch.float64).view(L, L)}),
    "a mask for every head": Form(masks=True),
    "causal": Form(call={"attn_mask": UPPER, "is_causal": True, "need_weights": False}),
    "causal with weights": Form(call={"attn_mask": UPPER, "is_causal": True}),
}
every_form = pytest.mark.parametrize("form", FORMS)


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
            model, inputs, count=lambda X: len(X["q"]), options={"batch_size_fn": lambda X: len(X["q"])}, loss="ce"
        )

    return make(maker, seed="attention")


@cache
def both_ways(form: str) -> tuple[Problem, Problem]:
    """Attention and the same with four linear layers, which compute the same; made once, so don't change them."""
    p = attention(form)
    q = written_out(p)
    for (X, _), b in zip(p.data, p.exact.batches, strict=True):
        close(p.model(X), q.model(X), 1e-12, "output")
        close(p.model(X), b.f, 1e-12, "output of the twin")
    return p, q


def written_out(p: Problem) -> Problem:
    """The same model with four linear layers in the place of its attention."""
    model = copy.deepcopy(p.model)
    model.attn = FourLinears(p.model.attn)
    return Problem(replace(p.net, model=model), p.loss, p.data)


def three(blocks: Mapping[str, Any], ending: str = "") -> Tensor:
    """The blocks of queries, keys and values as one."""
    return torch.block_diag(*(blocks[f"attn.{part}{ending}"].to_dense() for part in "qkv"))


#: Whether weights and biases share a block is the layer's, not the mask's: forms that differ in their layers.
APART = ("self", "without bias", "time first, two inputs", "three inputs", "padding and a mask")


@every_form
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_blocks_are_those_of_four_linear_layers(form: str, approximation: str) -> None:
    p, q = both_ways(form)
    kind = APPROXIMATIONS[approximation]
    joint, of_linears = p.made(approximation).blocks, q.risk()
    expected = q.curvature(kind, risk=of_linears).blocks
    close(joint["attn.out_proj"].to_dense(), expected["attn.out"].to_dense(), what="out-projection")
    for name in ("before", "head"):
        close(joint[name].to_dense(), expected[name].to_dense(), what=name)
    rtol = 1e-6 if approximation == "EKFAC" else 1e-9  # eigenvectors of factors that are not far from singular
    # Gradients of keys add up to zero over positions: any eigenvectors will do. And factors of all three are larger.
    if approximation in ("EKFAC reduce", "EKFAC, large factors diagonal"):
        close(sum(b.trace for b in joint.values()), p.exact.ggn().trace(), what="trace")
        return
    if "three sizes" in form:
        expected_apart = q.curvature(kind, risk=of_linears, separate_weight_and_bias=True).blocks
        for part in "qkv":
            close(joint[f"attn.{part}_proj"].to_dense(), expected_apart[f"attn.{part}.weight"].to_dense(), rtol, part)
        if p.model.attn.in_proj_bias is not None and approximation != "FullBlock":
            close(joint["attn.in_proj_bias"].to_dense(), three(expected_apart, ".bias"), rtol, "bias")
        return
    if approximation == "FullBlock":  # has what is between the three, too
        size = E * (E + 1) if p.model.attn.in_proj_bias is not None else E * E
        whole = joint["attn.in_proj"].to_dense()
        pieces = [whole[i * size : i * size + size, i * size : i * size + size] for i in range(3)]
        close(torch.block_diag(*pieces), three(expected), what="in-projection")
        assert (whole - torch.block_diag(*pieces)).norm() > 1e-4 * whole.norm()
        return
    close(joint["attn.in_proj"].to_dense(), three(expected), rtol, "in-projection")
    if approximation != "KFAC" and form not in APART:
        return
    apart = p.made(approximation, separate=True).blocks
    expected_apart = q.curvature(kind, risk=of_linears, separate_weight_and_bias=True).blocks
    close(apart["attn.in_proj_weight"].to_dense(), three(expected_apart, ".weight"), rtol, "weight")
    if p.model.attn.in_proj_bias is not None:
        close(apart["attn.in_proj_bias"].to_dense(), three(expected_apart, ".bias"), rtol, "bias")


@every_form
def test_blocks_are_those_of_the_twin(form: str) -> None:
    p, _ = both_ways(form)
    exact = p.exact.only_blocks(p.exact.ggn(), False)
    close(p.made("FullBlock").to_dense(), exact, what="FullBlock")
    close(p.made("DiagonalBlock").to_dense(), exact.diagonal().diag(), what="DiagonalBlock")
    for kind in ("KFAC", "KFAC reduce"):
        close(p.made(kind).to_dense(), p.exact.kfac(p.exact.exact(), "reduce" in kind), what=kind)
    close(p.made("EKFAC").trace, exact.trace(), what="trace of EKFAC")


# ------------------------------------------------------------------------------------------------- what is recorded


class Calls(Accumulator):
    """Counts what a layer was called in one batch."""

    per_group = False
    seen: dict[str, int] = {}  # noqa: RUF012 (one test reads it at a time)

    def update(self, batch: Any) -> None:
        Calls.seen[self.layer.name] = len(batch.calls)
        self.add("one", torch.ones(1, dtype=torch.float64))

    def finish(self) -> Any:
        shapes = {group.name: group.layout.matrix_shape for group in self.layer.groups}
        return {name: Diagonal(torch.ones(prod(shape), dtype=torch.float64)) for name, shape in shapes.items()}


@every_form
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("vectors", [None, ForwardOnly()], ids=["backward", "forward only"])
def test_a_forward_pass_gives_these_layers(form: str, frozen: bool, vectors: Any) -> None:
    """What recording sees of attention rests on PyTorch's insides: this must hold in every version."""
    p = attention(form)
    params = list(p.model.parameters())
    if frozen:
        p.model.requires_grad_(False)
    Calls.seen = {}
    risk = EmpiricalRisk(p.model, p.loss, p.data, params, **p.net.options)
    curvature(risk, Calls, vectors=vectors).compute()
    expected = {"before": 1, "head": 1, "attn.out_proj": 1}
    if "three sizes" in form:
        expected |= {f"attn.{part}_proj": 1 for part in "qkv"}
        if FORMS[form].options.get("bias", True):
            expected["attn.in_proj_bias"] = 3
    else:
        expected["attn.in_proj"] = FORMS[form].calls
    assert Calls.seen == expected


@pytest.mark.parametrize("form", ["self", "two inputs", "three sizes", "padding without weights", "time first"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_frozen_attention_is_the_same(form: str, train: bool) -> None:
    """In evaluation mode without gradients PyTorch would run a fused kernel, which no hook sees."""
    p = attention(form, train=train)
    frozen = Problem(replace(p.net, model=copy.deepcopy(p.model).requires_grad_(False)), p.loss, p.data)
    for approximation in ("KFAC", "EKFAC", "FullBlock"):
        kind = APPROXIMATIONS[approximation]
        close(frozen.curvature(kind).to_dense(), p.curvature(kind).to_dense(), what=approximation)


class Encoder(nn.Module):
    """Two encoder layers that may be fused, on padded sequences; padding is ignored by the loss."""

    def __init__(self, first: bool = True, nested: bool = True) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(2, 2, dim_feedforward=3, dropout=0.0, batch_first=first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=nested)
        self.head, self.first = nn.Linear(2, 3), first

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"] if self.first else inputs["x"].transpose(0, 1)
        h = self.encoder(x, src_key_padding_mask=inputs["padding"])
        h = h if self.first else h.transpose(0, 1)
        if h.shape[1] < inputs["x"].shape[1]:  # nested tensors come back as long as the longest sequence
            h = nn.functional.pad(h, (0, 0, 0, inputs["x"].shape[1] - h.shape[1]))
        return self.head(h).movedim(-1, 1)


def plain_encoder(model: nn.Module) -> None:
    """The twin's copy: no nested tensors."""
    for m in model.modules():
        if isinstance(m, nn.TransformerEncoder):
            m.use_nested_tensor = False


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_encoders_of_padded_sequences(first: bool, train: bool, frozen: bool) -> None:
    padding = torch.tensor([[False, False, False], [False, False, True], [False, True, True]])

    def maker() -> Net:
        inputs = [{"x": torch.randn(n, 3, 2).double(), "padding": padding[-n:]} for n in (3, 2)]
        norms = tuple(f"encoder.layers.{k}.norm{j}" for k in (0, 1) for j in (1, 2))
        inner = ("self_attn", "linear1", "linear2")
        return Net(
            Encoder(first).train(train),
            inputs,
            count=lambda X: len(X["x"]),
            options={"batch_size_fn": lambda X: len(X["x"])},
            fallback=norms,
            axes={} if first else {f"encoder.layers.{k}.{name}": 1 for k in (0, 1) for name in inner},
            plain=plain_encoder,
        )

    p = make(maker, seed="encoder")
    for X, y in p.data:
        y[X["padding"]] = -100
    exact = p.exact.only_blocks(p.exact.ggn(), False)
    if frozen:
        p.model.requires_grad_(False)
    risk = p.risk()
    close(p.curvature(FullBlock, risk=risk).to_dense(), exact, what="FullBlock")
    for kind in ("KFAC", "KFAC reduce"):
        K = p.curvature(APPROXIMATIONS[kind], risk=risk)
        close(K.to_dense(), p.exact.kfac(p.exact.exact(), "reduce" in kind), what=kind)
    close(p.curvature(EKFAC, risk=risk).trace, exact.trace(), what="trace of EKFAC")
    forward = p.curvature({"*norm*": Calls}, default=KFAC, vectors=ForwardOnly())
    for name, block in forward.blocks.items():
        if "norm" in name:
            continue
        A, _ = p.exact.factors(name, p.exact.exact(), ones=True)
        parts = block.A.to_dense()  # of several matrices: all of them, one after the other
        close(parts if parts.shape == A.shape else torch.block_diag(*parts), A, what=f"A of {name}, forward only")


# --------------------------------------------------------------------------------------------- other parameters, calls


@pytest.mark.parametrize("more", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "bias": False}])
@pytest.mark.parametrize("form", ["self", "two inputs", "padding", "time first"])
def test_more_keys_and_values(more: dict[str, Any], form: str) -> None:
    """`bias_k` and `bias_v` have no factors: their block is exact."""
    p = attention(form, **more)
    p.net.fallback = ("attn",) if "add_bias_kv" in more else ()
    exact = p.exact.only_blocks(p.exact.ggn(), False)
    close(p.curvature(FullBlock).to_dense(), exact, what="FullBlock")
    close(p.curvature(KFAC).to_dense(), p.exact.kfac(p.exact.exact()), what="KFAC")
    close(p.curvature(EKFAC).trace, exact.trace(), what="trace of EKFAC")


class Recurring(nn.Module):
    """One attention called three times, in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.attn(x, x, x)
        h, _ = self.attn(h, x, x, need_weights=False)
        h, weights = self.attn(h, h, h)
        return self.head(weights @ h).sum(1)


def test_attention_called_several_times() -> None:
    p = make(lambda: Net(Recurring(), [torch.randn(n, 3, 2).double() for n in (3, 2)]), seed="recurring")
    exact = p.exact.only_blocks(p.exact.ggn(), False)
    close(p.curvature(FullBlock).to_dense(), exact, what="FullBlock")
    close(p.curvature(DiagonalBlock).to_dense(), exact.diagonal().diag(), what="DiagonalBlock")
    for reduce in (False, True):
        kind = APPROXIMATIONS["KFAC reduce" if reduce else "KFAC"]
        close(p.curvature(kind).to_dense(), p.exact.kfac(p.exact.exact(), reduce), what=f"KFAC, reduce={reduce}")
    E_ = p.curvature(EKFAC)
    close(E_.trace, exact.trace(), what="trace of EKFAC")
    assert (E_.to_dense() - exact).norm() <= (p.exact.kfac(p.exact.exact()) - exact).norm()


@pytest.mark.parametrize(
    "chosen", [["in_proj_weight"], ["in_proj_bias"], ["out_proj.weight"], ["out_proj.bias", "in_proj_bias"]]
)
def test_some_of_the_parameters(chosen: list[str]) -> None:
    p = attention("two inputs")
    params = {name: p.model.attn.get_parameter(name) for name in chosen}
    with unchanged(p.model, p.data):
        got = {
            name: curvature(
                EmpiricalRisk(p.model, p.loss, p.data, params, **p.net.options), kind, separate_weight_and_bias=True
            ).to_dense()
            for name, kind in APPROXIMATIONS.items()
        }
    at = p.exact.places([f"attn.{name}" for name in chosen])
    exact = p.exact.only_blocks(p.exact.ggn(), True)[at[:, None], at]
    close(got["FullBlock"], exact)
    close(got["DiagonalBlock"], exact.diagonal().diag())
    close(got["KFAC"], p.exact.kfac(p.exact.exact(), separate=True)[at[:, None], at])
    close(got["KFAC reduce"], p.exact.kfac(p.exact.exact(), True, separate=True)[at[:, None], at])
    close(got["EKFAC"].trace(), exact.trace())


class MyAttention(nn.MultiheadAttention):
    """A user's own forward around PyTorch's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


def test_attention_with_a_forward_of_the_user_s_is_right_or_refused() -> None:
    """Whatever the code makes of it, no block may be silently wrong."""
    p = attention("self")
    mine = MyAttention(E, HEADS, batch_first=True).double()
    mine.load_state_dict(p.model.attn.state_dict())
    p.model.attn = mine
    risk = EmpiricalRisk(p.model, p.loss, p.data, **p.net.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        try:
            full = curvature(risk, FullBlock).to_dense()
            diagonal = curvature(risk, KFAC).diagonal()
        except ValueError as error:
            refusal = str(error)
        else:
            refusal = ""
    if refusal:
        assert "layer 'attn" in refusal
        return
    params = list(p.model.parameters())
    expected: Any = 0.0
    for X, y in p.data:
        f = p.model(X)
        probs = f.softmax(-1)
        H = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
        rows = [torch.autograd.grad(f[n, c], params, retain_graph=True) for n in range(len(y)) for c in range(3)]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, (len(y), 3))
        expected = expected + torch.einsum("ncp,ncd,ndq->pq", J, H, J) / 5
    sizes = [q.numel() for q in params]
    within = torch.block_diag(*(torch.ones(size, size) for size in sizes)).bool()
    close(full[within], expected[within])
    assert diagonal.isfinite().all()


def test_dropout_in_training_mode_changes_nothing_silently() -> None:
    """Attention with dropout in training mode draws masks; two sweeps see different ones, and the check says so."""
    p = attention("self", train=True)
    p.model.attn.dropout = 0.5
    with pytest.raises((RuntimeError, UnsupportedError)):
        curvature(p.risk(), EKFAC, check_deterministic=True)


def test_unbatched_inputs_are_refused() -> None:
    attn = nn.MultiheadAttention(2, 1, batch_first=True).double()

    class Unbatched(nn.Module):
        def __init__(self, attn: nn.Module, head: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.attn, self.head = attn, head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.stack([self.attn(one, one, one)[0] for one in x]).sum(1))

    model = Unbatched(attn, nn.Linear(2, 2).double())
    risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.randn(3, 2, 2).double(), torch.randn(3, 2).double())])
    with pytest.raises(UnsupportedError, match=r"three dimensions.*x\[None\]"):
        curvature(risk, KFAC).compute()


def test_the_comparison_notices_a_swap() -> None:
    """Queries are not keys: blocks in another order are no small error."""
    p = attention("self")
    expected = written_out(p).curvature(KFAC).blocks
    wrong = torch.block_diag(*(expected[f"attn.{part}"].to_dense() for part in "kqv"))
    with pytest.raises(AssertionError, match="relative error"):
        close(p.curvature(KFAC).blocks["attn.in_proj"].to_dense(), wrong)
