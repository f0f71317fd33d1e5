"""Weights that functions read, rather than modules: `F.linear(x, self.w)`, `x @ W.T + b`, tied
decoders, and more.

Every model is compared with one backward pass per example and output number of the model itself.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    GGNLinearOperator,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.risk.function_reads import layers_of
from test.cases import close, same, unchanged
from test.helpers import normal, seeded

Run = Callable[[Any, Tensor], Tensor]


class Own(nn.Module):
    """Parameters of the given shapes, submodules, and a forward pass that does what it likes with
    them.

    Args:
        run: The forward pass.
        parts: Names of parameters and their shapes, and of modules.
    """

    def __init__(self, run: Run, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for index, (name, part) in enumerate(parts.items()):
            own = nn.Parameter(normal(*part, seed=index) / 2) if isinstance(part, tuple) else part
            setattr(self, name, own)
        self.double()
        with torch.no_grad():
            for index, p in enumerate(self.parameters()):
                p.copy_(normal(*p.shape, seed=index) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def qkv(s: Any, x: Tensor) -> Tensor:
    q, k, v = (F.linear(x, w, b) for w, b in zip(s.w.chunk(3), s.b.chunk(3)))
    return s.o((q @ k.mT).softmax(-1) @ v).sum(1)


def uneven(s: Any, x: Tensor) -> Tensor:
    """Rows of a weight that is read in parts and as a whole."""
    first, second = (
        F.linear(x, s.l.weight[:4], s.l.bias[:4]),
        F.linear(x, s.l.weight[3:], s.l.bias[3:]),
    )
    return s.o(torch.tanh(first * second + s.l(x)[..., 1:5]))


def listed(s: Any, x: Tensor) -> Tensor:
    for index, w in enumerate(s.ws):
        x = torch.tanh(F.linear(x, w, s.bs[str(index)]))
    return x


def in_no_mask(s: Any, x: Tensor) -> Tensor:
    """Attention by the function, with the weights of a module that is never called."""
    x, a = x.transpose(0, 1), s.a
    out = F.multi_head_attention_forward(
        x,
        x,
        x,
        4,
        2,
        a.in_proj_weight,
        a.in_proj_bias,
        None,
        None,
        False,
        0.0,
        a.out_proj.weight,
        a.out_proj.bias,
    )
    return s.o(out[0].transpose(0, 1)).sum(1)


def scaled_call(s: Any, x: Tensor) -> Tensor:
    """The layer itself, and the layer with half its weight."""
    return s.o(torch.tanh(s.l(functional_call(s.l, {"weight": s.l.weight / 2}, (x,)))))


def swapped(s: Any, x: Tensor) -> Tensor:
    """Other parameters in their place around one call."""
    w, b = s.l.weight, s.l.bias
    s.l.weight, s.l.bias = nn.Parameter(torch.eye(3).double()), nn.Parameter(torch.ones(3).double())
    h = s.l(x)
    s.l.weight, s.l.bias = w, b
    return s.o(torch.tanh(s.l(h)))


def cached_outside(s: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return s.o(torch.tanh(s.l(torch.tanh(F.linear(x, s.l.weight.T)))))


class Bias(nn.Module):
    """Attention with a learned bias for each distance, shared by all examples and handed on to the
    next one.
    """

    def __init__(self, table: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, 4) for _ in range(3))
        if table:
            self.table = nn.Embedding(5, 2)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (2, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if bias is None:
            distance = (
                (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs().clamp(max=4)
            )
            bias = self.table(distance).permute(2, 0, 1)[None]
        assert bias is not None
        return ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2), bias


def relative(s: Any, x: Tensor) -> Tensor:
    h, bias = s.first(x)
    h, _ = s.second(s.body(h * s.scale), bias)
    return s.o(h).sum(1)


def mlp(s: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, s.w, s.b)), s.v)


def linear(i: int, o: int, **options: Any) -> nn.Linear:
    return nn.Linear(i, o, **options)


def attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(4, 2, batch_first=True)


def shares(name: str) -> Callable[[], nn.Module]:
    """Two attention modules that share one parameter."""

    def make() -> nn.Module:
        def run(s: Any, x: Tensor) -> Tensor:
            h = s.a(x, x, x, need_weights=False)[0]
            return s.o(s.c(h, h, h, need_weights=False)[0]).sum(1)

        model = Own(run, a=attention(), c=attention(), o=linear(4, 2))
        inside, _, local = name.rpartition(".")
        setattr(model.c.get_submodule(inside), local, model.a.get_parameter(name))
        return model

    return make


def one_bias() -> nn.Module:
    """Two linear layers with one weight, of which one has a bias."""
    model = Own(
        lambda s, x: s.o(torch.tanh(s.plain(torch.tanh(s.biased(x))))),
        biased=linear(3, 3),
        o=linear(3, 2),
    )
    model.plain = linear(3, 3, bias=False)
    model.plain.weight = model.biased.weight
    return model


parametrizations = nn.utils.parametrizations
ROWS, SEQUENCES = normal(5, 3, seed=9), normal(5, 4, 3, seed=9)
IMAGES = normal(4, 2, 5, 4, seed=9)
TOKENS = torch.randint(7, (5, 4), generator=seeded(9))

# Name: model, inputs, and the layers that have Kronecker factors with what reads their weight.
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "functions": (lambda: Own(mlp, w=(4, 3), b=(4,), v=(2, 4)), ROWS, "w v"),
    "functions on sequences": (lambda: Own(mlp, w=(4, 3), b=(4,), v=(2, 4)), SEQUENCES, "w v"),
    "matmul": (
        lambda: Own(lambda s, x: torch.tanh(x @ s.w + s.b) @ s.v.T, w=(3, 4), b=(4,), v=(2, 4)),
        ROWS,
        "w v",
    ),
    "matmul on sequences": (
        lambda: Own(
            lambda s, x: torch.matmul(torch.tanh(s.b + x @ s.w), s.v.mT), w=(3, 4), b=(4,), v=(2, 4)
        ),
        SEQUENCES,
        "w v",
    ),
    "addmm and mm": (
        lambda: Own(
            lambda s, x: torch.addmm(s.b, x, s.w).tanh().mm(s.v), w=(3, 4), b=(4,), v=(4, 2)
        ),
        ROWS,
        "w v",
    ),
    "convolutions": (
        lambda: Own(
            lambda s, x: F.conv_transpose2d(
                torch.tanh(F.conv2d(x, s.w, s.b, stride=2, padding=1, groups=2)),
                s.u,
                s.c,
                (2, 1),
                1,
                dilation=2,
            ).sum(3),
            w=(4, 1, 3, 2),
            b=(4,),
            u=(4, 3, 2, 2),
            c=(3,),
        ),
        IMAGES,
        "w",
    ),
    "embedding": (
        lambda: Own(
            lambda s, x: s.o(torch.tanh(F.embedding(x, s.w, padding_idx=-1))).sum(1),
            w=(7, 4),
            o=linear(4, 2),
        ),
        TOKENS,
        "w o",
    ),
    "indexing": (
        lambda: Own(
            lambda s, x: s.o(torch.tanh(s.w[x - 3])).sum(1),
            w=(7, 4),
            o=linear(4, 2),
        ),
        TOKENS,
        "o",
    ),
    "rows of one weight": (lambda: Own(qkv, w=(9, 3), b=(9,), o=linear(3, 2)), SEQUENCES, "w o"),
    "rows of a module's weight": (lambda: Own(uneven, l=linear(3, 7), o=linear(4, 2)), ROWS, "l o"),
    "rows of a transposed weight": (
        lambda: Own(lambda s, x: s.o(torch.tanh(x @ s.w[1:4])), w=(5, 3), o=linear(3, 2)),
        ROWS,
        "w o",
    ),
    "a module's forward": (
        lambda: Own(lambda s, x: s.o(torch.tanh(s.l.forward(x))), l=linear(3, 4), o=linear(4, 2)),
        ROWS,
        "l o",
    ),
    "called and read": (
        lambda: Own(
            lambda s, x: s.o(F.linear(torch.tanh(s.l(x)), s.l.weight)),
            l=linear(3, 3),
            o=linear(3, 2),
        ),
        ROWS,
        "l o",
    ),
    "tied decoder": (
        lambda: Own(
            lambda s, x: F.linear(torch.tanh(s.h(s.e(x))), s.e.weight).sum(1),
            e=nn.Embedding(7, 3),
            h=linear(3, 3),
        ),
        TOKENS,
        "e h",
    ),
    "embedding of words and of probabilities": (
        lambda: Own(
            lambda s, x: s.o(torch.tanh(s.e(x) + s.h(s.e(x)).softmax(-1) @ s.e.weight)).sum(1),
            e=nn.Embedding(7, 3),
            h=linear(3, 7),
            o=linear(3, 2),
        ),
        TOKENS,
        "e h o",
    ),
    "tied autoencoder": (
        lambda: Own(lambda s, x: F.linear(torch.tanh(s.l(x)), s.l.weight.t()), l=linear(3, 4)),
        ROWS,
        "l",
    ),
    "tied with two biases": (
        lambda: Own(
            lambda s, x: F.linear(torch.tanh(s.l(x)), s.l.weight.t(), s.b), l=linear(3, 4), b=(3,)
        ),
        ROWS,
        "",
    ),
    "lists": (
        lambda: Own(
            listed,
            ws=nn.ParameterList([torch.ones(4, 3), torch.ones(2, 4)]),
            bs=nn.ParameterDict({"0": torch.ones(4), "1": torch.ones(2)}),
        ),
        ROWS,
        "ws.0 ws.1",
    ),
    "weight norm by hand": (
        lambda: Own(
            lambda s, x: s.o(torch.tanh(F.linear(x, s.g * s.v / s.v.norm(dim=1, keepdim=True)))),
            g=(4, 1),
            v=(4, 3),
            o=linear(4, 2),
        ),
        ROWS,
        "o",
    ),
    "low-rank": (
        lambda: Own(
            lambda s, x: s.o(torch.tanh(s.l(x) + x @ s.a.T @ s.c.T)),
            l=linear(3, 4),
            a=(2, 3),
            c=(4, 2),
            o=linear(4, 2),
        ),
        ROWS,
        "l a c o",
    ),
    "low-rank, merged": (
        lambda: Own(
            lambda s, x: s.o(torch.tanh(F.linear(x, s.l.weight + s.c @ s.a, s.l.bias))),
            l=linear(3, 4),
            a=(2, 3),
            c=(4, 2),
            o=linear(4, 2),
        ),
        ROWS,
        "o",
    ),
    "weights from inputs": (
        lambda: Own(
            lambda s, x: s.o(torch.einsum("noi,ni->no", s.h(x).unflatten(1, (2, 3)), x)),
            h=linear(3, 6),
            o=linear(2, 2),
        ),
        ROWS,
        "h o",
    ),
    "norm's weight outside": (
        lambda: Own(
            lambda s, x: s.o(s.n(s.l(x)) * s.n.weight),
            l=linear(3, 4),
            n=nn.LayerNorm(4),
            o=linear(4, 2),
        ),
        ROWS,
        "l o",
    ),
    "weight in a norm": (
        lambda: Own(lambda s, x: s.l(x) / s.l.weight.norm(), l=linear(3, 2)),
        ROWS,
        "",
    ),
    "attention by the function": (
        lambda: Own(in_no_mask, a=attention(), o=linear(4, 2)),
        normal(4, 3, 4),
        "a.in_proj a.out_proj o",
    ),
    "shared in_proj_weight": (shares("in_proj_weight"), normal(4, 3, 4), "a.out_proj c.out_proj o"),
    "shared out_proj.weight": (shares("out_proj.weight"), normal(4, 3, 4), "a.in_proj c.in_proj o"),
    "one bias": (one_bias, ROWS, "biased o"),
    "functional_call with a multiple": (
        lambda: Own(scaled_call, l=linear(3, 3), o=linear(3, 2)),
        ROWS,
        "o",
    ),
    "weights swapped around a call": (
        lambda: Own(swapped, l=linear(3, 3), o=linear(3, 2)),
        ROWS,
        "l o",
    ),
    "cached parametrization outside": (
        lambda: Own(cached_outside, l=parametrizations.weight_norm(linear(3, 3)), o=linear(3, 2)),
        ROWS,
        "o",
    ),
    "relative positions": (
        lambda: Own(
            relative,
            first=Bias(True),
            second=Bias(False),
            body=linear(4, 3),
            o=linear(4, 2),
            scale=(4,),
        ),
        SEQUENCES,
        "",
    ),
}
every = pytest.mark.parametrize("name", MODELS)


def risk_of(name: str, model: nn.Module | None = None, **options: Any) -> EmpiricalRisk:
    """The risk of a model on all inputs in two batches."""
    make, X, _ = MODELS[name]
    model = make() if model is None else model
    with torch.no_grad():
        y = torch.sin(7 * model(X))
    return EmpiricalRisk(
        model,
        nn.MSELoss(),
        [(X[:3], y[:3]), (X[3:], y[3:])],
        dict(model.named_parameters()),
        **options,
    )


def exact(risk: EmpiricalRisk) -> Tensor:
    """The GGN of mean squared error, by one backward pass for each number of the output."""
    total: Any = 0.0
    model, numbers = copy.deepcopy(risk.model).requires_grad_(), 0
    params = list(model.parameters())
    for X, y in risk.data:
        for x in X:
            f = model(x[None]).flatten()
            rows = [
                torch.autograd.grad(one, params, retain_graph=True, allow_unused=True) for one in f
            ]
            zeros = [torch.zeros_like(p) for p in params]
            J = torch.stack(
                [
                    torch.cat([(z if g is None else g).flatten() for g, z in zip(row, zeros)])
                    for row in rows
                ]
            )
            total = total + 2 * J.T @ J
        numbers += y.numel()
    return total / numbers


def only_blocks(K: BlockwiseLinearOperator, matrix: Tensor) -> Tensor:
    """Zero outside of the operator's blocks."""
    places, start = {}, 0
    for key, p in K.risk.params.items():
        places[key] = torch.arange(start, start + p.numel())
        start += p.numel()
    kept = torch.zeros_like(matrix)
    for entry in K.plan:
        for group in entry.layer.groups:
            at = torch.cat([places[key] for key in group.keys])
            kept[at[:, None], at] = matrix[at[:, None], at]
    return kept


@pytest.fixture(autouse=True)
def no_warnings_about_missing_factors() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*exact diagonal", category=CurvatureWarning)
        yield


@every
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_exact_blocks(name: str, frozen: bool) -> None:
    model = MODELS[name][0]().requires_grad_(not frozen)
    risk = risk_of(name, model)
    expected = exact(risk)
    with unchanged(model, risk.data):
        D, M = curvature(risk, DiagonalBlock), curvature(risk, FullBlock)
        close(D.diagonal(), expected.diagonal(), what="DiagonalBlock")
        full = M.to_dense()
    close(full, only_blocks(M, expected), what="FullBlock")


@pytest.mark.one_in(3)
@every
@pytest.mark.parametrize("separate", [False, True])
def test_factors(name: str, separate: bool) -> None:
    """The layers that have factors, and EKFAC's law: its trace is exact, and it is no worse than
    KFAC.
    """
    risk, layers = risk_of(name), MODELS[name][2].split()
    K = curvature(risk, KFAC, separate_weight_and_bias=separate)
    E = curvature(risk, EKFAC, separate_weight_and_bias=separate)
    k, e = K.to_dense(), E.to_dense()
    found = {entry.layer.name for entry in K.plan if entry.layer.affine}
    if layers and not (separate and name in ("tied autoencoder", "one bias", "called and read")):
        assert set(layers) <= found
    expected = only_blocks(E, exact(risk))
    close(e.trace(), expected.trace(), what="trace")
    assert (e - expected).norm() <= (k - expected).norm() * (1 + 1e-9) + 1e-12
    K.verify()


@pytest.mark.parametrize(
    "name", ["functions", "matmul on sequences", "tied decoder", "called and read", "low-rank"]
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_inside_activation_checkpointing(name: str, frozen: bool) -> None:
    model = MODELS[name][0]().requires_grad_(not frozen)
    expected = curvature(risk_of(name, model), EKFAC).to_dense()
    run = model.run
    model.run = lambda s, x: checkpoint(lambda y: run(s, y), x, use_reentrant=False)
    close(curvature(risk_of(name, model), EKFAC).to_dense(), expected)


@pytest.mark.parametrize("vectors", [None, ForwardOnly()])
@pytest.mark.parametrize("approximation", [KFAC, KFAC.using(kfac_approx="reduce")])
@pytest.mark.parametrize(
    "name", ["functions", "matmul", "functions on sequences", "matmul on sequences", "addmm and mm"]
)
@pytest.mark.parametrize("separate", [False, True])
def test_functions_are_like_modules(
    name: str, approximation: Any, vectors: Any, separate: bool
) -> None:
    if "matmul" in name and not separate:
        return  # a bias that is added by itself has a block of its own
    risk = risk_of(name)
    w, b, v = risk.params.values()
    twin = nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 2, bias=False)).double()
    stored = (w if w.shape == (4, 3) else w.T, b, v if v.shape == (2, 4) else v.T)
    with torch.no_grad():
        for p, value in zip(twin.parameters(), stored):
            p.copy_(value)
    other = EmpiricalRisk(twin, nn.MSELoss(), risk.data)
    K, L = (
        curvature(r, approximation, vectors=vectors, separate_weight_and_bias=separate)
        for r in (risk, other)
    )
    order = torch.cat([t.flatten() for t in _as_stored(risk)])
    close(K.to_dense()[order[:, None], order], L.to_dense())


def _as_stored(risk: EmpiricalRisk) -> list[Tensor]:
    """Places of the parameters in the order of the twin's."""
    start, places = 0, []
    for key, p in risk.params.items():
        place = torch.arange(start, start + p.numel()).view(p.shape)
        start += p.numel()
        turned = (key == "w" and p.shape == (3, 4)) or (key == "v" and p.shape == (4, 2))
        places.append(place.T if turned else place)
    return places


@pytest.mark.parametrize("approximation", [KFAC, KFAC.using(kfac_approx="reduce")])
def test_an_embedding_of_words_and_of_probabilities_is_one_product(approximation: Any) -> None:
    """Rows of one matrix, some of them sparse: as if all were dense."""
    risk = risk_of("embedding of words and of probabilities")

    def dense(s: Any, x: Tensor) -> Tensor:
        word = F.one_hot(x, 7).double()
        return s.o(
            torch.tanh(word @ s.e.weight + s.h(word @ s.e.weight).softmax(-1) @ s.e.weight)
        ).sum(1)

    twin = copy.deepcopy(risk.model)
    twin.run = dense
    other = EmpiricalRisk(twin, nn.MSELoss(), risk.data, dict(twin.named_parameters()))
    K, L = (curvature(r, approximation).to_dense() for r in (risk, other))
    close(K, L)


# ---------------------------------------------------------------------------------- what is refused
def test_data_that_can_be_read_once() -> None:
    name = "tied decoder"
    risk = risk_of(name)
    with pytest.raises(ValueError, match=r"iterator.*functions that read parameters"):
        curvature(risk.with_data(iter(risk.data)), KFAC).compute()


def test_modules_that_cannot_be_run_with_other_values() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        if type(s.l.weight) is not nn.Parameter:
            raise TypeError("no parameter")
        return s.l(torch.maximum(s.l(x), s.l.bias))

    model = Own(run, l=linear(3, 3))
    risk = EmpiricalRisk(model, nn.MSELoss(), [(ROWS, ROWS)])
    with pytest.raises(
        UnsupportedError, match=r"Own can't be run again.*\['l.bias'\].*leave these out of `params`"
    ):
        curvature(risk, DiagonalBlock).compute()


def test_reads_outside_of_the_model_are_refused() -> None:
    model = Own(lambda s, x: s.l(x), l=linear(3, 2))
    risk = EmpiricalRisk(
        model, nn.MSELoss(), [(ROWS, ROWS[:, :2])], output=lambda f: f * model.l.weight.norm()
    )
    with pytest.raises(ValueError, match=r"layer 'l'.*\['l.weight'\].*something else read"):
        curvature(risk, DiagonalBlock).compute()


def test_attention_beside_a_function_that_reads_is_one_use() -> None:
    """Its rule answers for both products; noted once more they would be calls of their own."""

    def run(model: Any, x: Tensor) -> Tensor:
        attended = model.attention(x, x, x, need_weights=False)[0]
        return F.linear(attended, model.weight).mean(1)

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Own(run, attention=attention, weight=(3, 4))
    data = [(normal(5, 6, 4), normal(5, 3))]
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    names = [[use.name for use in layer.uses] for layer in layers_of(risk)]
    assert sorted(names) == [["attention.in_proj"], ["attention.out_proj"], ["weight"]]


def test_an_attention_module_of_which_a_part_is_never_read() -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, s.a.in_proj_weight, s.a.in_proj_bias).chunk(3, -1)
        return s.o((q @ k.mT).softmax(-1) @ v).sum(1)

    model, X = Own(run, a=attention(), o=linear(4, 2)), normal(4, 3, 4)
    data = [(X, torch.zeros(4, 2).double())]
    with pytest.raises(
        ValueError, match=r"layer 'a.out_proj' .* was never called.*Leave them out of `params`"
    ):
        curvature(EmpiricalRisk(model, nn.MSELoss(), data), KFAC).compute()
    read = {key: p for key, p in model.named_parameters() if "out_proj" not in key}
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data, read), FullBlock)
    assert [type(block).__name__ for block in K.blocks.values()] == ["Dense", "Dense"]
    K.verify()


# -------------------------------------------------------------------- estimators, states, functions
@pytest.mark.parametrize("name", ["functions", "tied decoder", "low-rank, merged"])
def test_estimators(name: str) -> None:
    risk = risk_of(name)
    (X, y), *_ = risk.data
    expected = curvature(risk.with_data([(X, y)]), EKFAC).to_dense()

    def new() -> CurvatureEstimator:
        return CurvatureEstimator(risk_of(name, risk.model).with_data(()), EKFAC)

    updated, listening, loaded = new(), new(), new()
    updated.update((X, y))
    with listening.listen((X, y)):
        value = nn.MSELoss()(risk.model(X), y)
    value.backward()
    for estimator in (updated, listening):
        close(estimator.operator.to_dense(), expected)
    with listening.listen((X, y)):
        risk.model(X)
    loaded.load_state_dict(listening.state_dict())
    for estimator in (listening, loaded):
        close(estimator.operator.to_dense(), expected)


@pytest.mark.parametrize("name", ["functions", "convolutions", "tied decoder", "low-rank, merged"])
def test_states_say_what_functions_read(name: str) -> None:
    risk = risk_of(name)
    K = curvature(risk, EKFAC)
    expected = K.to_dense()
    state = K.state_dict()
    same(BlockwiseLinearOperator.from_state_dict(state, risk.model, data=None).to_dense(), expected)
    other = curvature(risk_of(name, risk.model), EKFAC)
    other.load_state_dict(state)
    same(other.to_dense(), expected)


def test_listening_needs_the_model_s_own_values() -> None:
    model = linear(3, 2)
    values = {key: 2 * p.detach() for key, p in model.named_parameters()}
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.MSELoss(), (), values))
    batch = (ROWS.float(), ROWS[:, :2].float())
    words = r"`listen` is about the model.s own.*other values of \['weight', 'bias'\]"
    with pytest.raises(ValueError, match=words), estimator.listen(batch):
        pass


def test_blocks_have_different_names() -> None:
    """A key of the caller's that is the name of another layer."""
    model = nn.Sequential(nn.Linear(3, 4), Own(lambda s, x: x @ s.w, w=(4, 2))).double()
    params = {"0": model[1].w, "weight": model[0].weight}
    risk = EmpiricalRisk(model, nn.MSELoss(), [(ROWS, ROWS[:, :2])], params)
    with pytest.raises(ValueError, match=r"blocks would be named \['0'\].*another key"):
        curvature(risk, KFAC)


# -------------------------------------------------------------------------- tables for all examples
class Relative(nn.Module):
    """Attention whose scores get a bias for each distance, from a table that knows no examples."""

    def __init__(self, reshaped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reshaped, self.bias = reshaped, nn.Embedding(5, 2)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 4]
        steps = torch.arange(x.shape[1])
        table = self.bias(steps[:, None] - steps + 2)  # [T, T, heads]
        if self.reshaped:
            table = self.bias((steps[:, None] - steps + 2)[None]).reshape(len(steps), len(steps), 2)
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) + table.permute(2, 0, 1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).mean(1)


@pytest.mark.parametrize("reshaped", [False, True])
@pytest.mark.parametrize("approximation", [DiagonalBlock, EKFAC])
@pytest.mark.parametrize("N", [1, 2, 4, 5, 6])
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_a_table_for_all_examples_is_enclosed(N: int, approximation: Any, reshaped: bool) -> None:
    X = torch.randn(N, 3, 4, generator=seeded(N)).double()
    model, data = Relative(reshaped), [(X, torch.zeros(N, 2).double())]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), approximation)
    exact = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data).to_dense()
    close(K.trace, exact.trace())
    if approximation is DiagonalBlock:
        close(K.diagonal(), exact.diagonal())


class Packed(nn.Module):
    """A recurrent layer on sequences of their own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            X["x"], X["lengths"], batch_first=True, enforce_sorted=False
        )
        return self.head(self.lstm(packed)[1][0][-1])


class Experts(nn.Module):
    """Rows are gathered: each example goes to the expert of its largest gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(3, 2), nn.Linear(3, 2)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        x = X["x"][:, 0]
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mine = (choice == k).nonzero()[:, 0]
            out[mine] = weight[mine, None] * torch.tanh(expert(x[mine]))
        return self.head(x + out)


@pytest.mark.parametrize("make", [Packed, Experts])
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_layers_whose_rows_are_gathered_are_run_by_the_module_around(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    model = make().double()
    data = [
        (
            {"x": torch.randn(n, 5, 3).double(), "lengths": torch.arange(n) % 3 + 2},
            torch.arange(n) % 2,
        )
        for n in (6, 5)
    ]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, batch_size_fn=lambda X: len(X["x"]))
    K = curvature(risk, EKFAC)
    close(K.trace, GGN(risk).to_dense().trace())
    assert K.risk.reads is not None
    order = [
        *K.risk.reads.enclosing
    ]  # else flat blocks would differ between processes, whose sets have other orders
    assert order == [key for key, _ in model.named_parameters() if key in order]
