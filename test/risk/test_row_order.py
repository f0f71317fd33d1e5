"""Layers that see the rows of a batch in an order of their own: `example_of_row=`, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    curvature,
)
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk import layer_batch

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal:curvlinops_plus.errors.CurvatureWarning")

F64 = torch.float64
Data = list[tuple[Any, Tensor]]


class Experts(nn.Module):
    """Tokens go to the best `k` experts, which see them gathered by index."""

    def __init__(self, k: int, experts: int) -> None:
        super().__init__()
        self.k, self.inp, self.gate, self.head = k, nn.Linear(4, 5), nn.Linear(5, experts), nn.Linear(5, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Linear(6, 5, bias=False))
            for _ in range(experts)
        )
        self.examples: dict[int, Tensor] = {}
        self.seen: dict[int, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x).tanh()
        tokens = h.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(1).topk(self.k, 1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, slot = (chosen == e).nonzero(as_tuple=True)
            self.examples[e] = rows // x.shape[1]
            self.seen.setdefault(e, []).append(tokens[rows].detach())
            out = out.index_add(0, rows, weights[rows, slot, None] * expert(tokens[rows]))
        return self.head((h + out.view_as(h)).mean(1))


def experts(k: int = 2, experts: int = 4) -> tuple[Experts, Data, dict[str, Any]]:
    """The last expert sees nothing in the second batch, of one example and few tokens."""
    model = Experts(k, experts).double()
    data = [(torch.randn(N, T, 4, dtype=F64), torch.randint(3, (N,))) for N, T in ((4, 6), (2, 3), (1, 1))]
    options = {f"experts.{e}*": (lambda X, y, e=e: model.examples[e]) for e in range(experts)}
    return model, data, {"example_of_row": options}


class Graphs(nn.Module):
    """Graph networks on nodes of several graphs in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])).relu()
        return self.head(x.new_zeros(int(graph.max()) + 1, 3).index_add(0, graph, x))


def graphs() -> tuple[nn.Module, Data, dict[str, Any]]:
    data = []
    for sizes in ([2, 4, 1], [3, 3]):
        graph = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        order = torch.randperm(len(graph))
        start = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        edges = torch.cat([start[k] + torch.randint(n, (2, 4)) for k, n in enumerate(sizes)], 1)
        X = {"x": torch.randn(len(graph), 3, dtype=F64), "edges": order.argsort()[edges], "graph": graph[order]}
        data.append(({**X}, torch.randint(3, (len(sizes),))))
    options = {
        "batch_size_fn": lambda X: int(X["graph"].max()) + 1,
        "example_of_row": {"model.[fs]*": lambda X, y: X["graph"]},
    }
    return Unpacked(Graphs().double()), data, options


class Unpacked(nn.Module):
    """Calls a model with a mapping."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        return self.model(**X)


class Picked(nn.Module):
    """A layer on some examples, some of them twice, last ones first."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = picked(x)
        h = self.layer(x[rows].transpose(0, 1) if isinstance(self.layer, nn.GRU) else x[rows])
        h = h[0].transpose(0, 1) if isinstance(h, tuple) else h
        h = h.flatten(1)
        return self.head(h.new_zeros(len(x), h.shape[1]).index_add(0, rows, h))


def picked(X: Tensor, y: Any = None) -> Tensor:
    """None, one or two rows, which depends on what is in the example, not on its place."""
    copies = (7 * X.flatten(1)[:, 0]).long().abs() % 3
    return torch.arange(len(X)).repeat_interleave(copies).flip(0)


def one_layer(layer: nn.Module, inputs: Callable[[int], Tensor], features: int) -> tuple[nn.Module, Data, Any]:
    data = [(inputs(N), torch.randint(3, (N,))) for N in (4, 2)]
    return Picked(layer, features).double(), data, {"example_of_row": {"layer": picked}}


class Twins(nn.Module):
    """One encoder on the pairs of all examples, first halves first; the answers depend on both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.encoder(torch.cat([x[:, 0], x[:, 1]])).chunk(2)
        return self.head(a * b)


def twins() -> tuple[nn.Module, Data, dict[str, Any]]:
    data = [(torch.randn(N, 2, 4, dtype=F64), torch.randint(3, (N,))) for N in (3, 2)]
    return Twins().double(), data, {"example_of_row": {"encoder.?": lambda X, y: torch.arange(len(X)).repeat(2)}}


class Flipped(nn.Module):
    """An encoder on the examples in another order, or on pairs of rows that are next to each other."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.encoder, self.head, self.pairs = nn.Linear(4, 5), nn.Linear(5, 3), pairs

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.arange(len(x)).flip(0)
        if self.pairs:
            return self.head(self.encoder(x.flatten(0, 1)).tanh().unflatten(0, (-1, 2)).prod(1))
        return self.head(self.encoder(x[self.rows].sum(1)).tanh()[self.rows])


def flipped(pairs: bool = False) -> tuple[Flipped, Data, dict[str, Any]]:
    model = Flipped(pairs).double()
    data = [(torch.randn(N, 2, 4, dtype=F64), torch.randint(3, (N,))) for N in (5, 2)]
    return model, data, {} if pairs else {"example_of_row": {"encoder": lambda X, y: model.rows}}


class Packed(nn.Module):
    """A recurrent layer, and a second one, on packed sequences of different lengths; states are given and read."""

    def __init__(self, layer: nn.RNNBase, sort: bool) -> None:
        super().__init__()
        directions = 1 + layer.bidirectional
        out = layer.proj_size or layer.hidden_size
        self.layer, self.sort = layer, sort
        self.second = nn.GRU(out * directions, 2, bidirectional=True)
        self.start = nn.Linear(3, layer.num_layers * directions * layer.hidden_size)
        self.head = nn.Linear(4 + out, 3)

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        x, layer = X["x"], self.layer
        h = self.start(x[:, 0]).unflatten(1, (-1, layer.hidden_size)).transpose(0, 1).contiguous()
        hx = (h[..., : layer.proj_size or None].contiguous(), h.tanh()) if isinstance(layer, nn.LSTM) else h
        packed = pack_padded_sequence(x, X["lengths"], batch_first=True, enforce_sorted=self.sort)
        out, states = layer(packed, hx)
        last = states[0] if isinstance(layer, nn.LSTM) else states
        padded, _ = pad_packed_sequence(self.second(out)[0], batch_first=True)
        return self.head(torch.cat([padded.sum(1), last[-1]], 1))


def packed(layer: nn.RNNBase, sort: bool = False) -> tuple[nn.Module, Data, dict[str, Any]]:
    data = []
    for lengths in ([5, 3, 3, 1], [4, 2], [2]):
        order = torch.arange(len(lengths)) if sort else torch.randperm(len(lengths))
        X = {"x": torch.randn(len(lengths), 5, 3, dtype=F64), "lengths": torch.tensor(lengths)[order]}
        data.append((X, torch.randint(3, (len(lengths),))))
    return Packed(layer, sort).double(), data, {"batch_size_fn": lambda X: len(X["x"])}


CASES: dict[str, Callable[[], tuple[nn.Module, Data, dict[str, Any]]]] = {
    "experts": experts,
    "one expert per token": lambda: experts(1, 3),
    "graphs": graphs,
    "twins": twins,
    "another order": flipped,
    "pairs": lambda: flipped(pairs=True),
    "convolution": lambda: one_layer(nn.Conv2d(2, 3, 3), lambda N: torch.randn(N, 2, 4, 4, dtype=F64), 12),
    "embedding": lambda: one_layer(nn.Embedding(9, 4), lambda N: torch.randint(9, (N, 5)), 20),
    "time first": lambda: one_layer(nn.GRU(3, 4), lambda N: torch.randn(N, 5, 3, dtype=F64), 20),
    "linear": lambda: one_layer(nn.Linear(3, 4), lambda N: torch.randn(N, 5, 3, dtype=F64), 20),
    "packed": lambda: packed(nn.RNN(3, 4)),
    "packed, sorted": lambda: packed(nn.GRU(3, 4, batch_first=True), sort=True),
    "packed, two layers": lambda: packed(nn.GRU(3, 2, 2, bidirectional=True, bias=False)),
    "packed, projected": lambda: packed(nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True)),
    "channels": lambda: one_layer(nn.GroupNorm(1, 2), lambda N: torch.randn(N, 2, 3, dtype=F64), 6),
}


def problem(name: str) -> tuple[EmpiricalRisk, dict[str, Tensor]]:
    """The risk, and gradients of the loss of every example, [N, *shape], by plain autograd."""
    torch.manual_seed(0)
    model, data, options = CASES[name]()
    params, found = dict(model.named_parameters()), []
    for X, y in data:
        losses = nn.functional.cross_entropy(model(X), y, reduction="none")
        for loss in losses:
            found.append(torch.autograd.grad(loss, list(params.values()), retain_graph=True, materialize_grads=True))
    J = {name: torch.stack(grads) for name, grads in zip(params, zip(*found, strict=True), strict=True)}
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **options), J


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


each = pytest.mark.parametrize("name", CASES)


@each
@pytest.mark.parametrize("pieces", ["large", "small"])
def test_gradients_of_examples(name: str, pieces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagonal, blocks and the trace of EKFAC are made of them, also in pieces of one example."""
    if pieces == "small":
        monkeypatch.setattr(layer_batch, "_PIECE_BYTES", 64)
        monkeypatch.setattr(layer_batch, "_ROW_BYTES", 64)
    risk, J = problem(name)
    N = len(next(iter(J.values())))
    diagonal = risk.space.unflatten(curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal())
    for key, grads in J.items():
        close(diagonal[key], grads.square().sum(0) / N)
    close(curvature(risk, EKFAC, vectors=Empirical()).trace, sum(g.square().sum() for g in J.values()) / N)
    full = curvature(risk, FullBlock, vectors=Empirical())
    rows = risk.space.flatten_rows(dict(J))
    exact = rows.mT @ rows / N
    v = torch.randn(risk.space.dim, dtype=F64)
    for positions in full.mapping.values():
        at = torch.zeros_like(v)
        for key in {list(J)[k] for k in positions.values()}:
            start, size = risk.space.extents[key]
            at[start : start + size] = 1
        close(at * (full @ (at * v)), at * (exact @ (at * v)))


@pytest.mark.parametrize("make", [experts, twins, flipped])
def test_without_being_told_numbers_are_exact_or_refused_with_advice(make: Callable[[], Any]) -> None:
    """Twins and experts become part of the model's own layer, which runs again for each example."""
    torch.manual_seed(0)
    model, data, _ = make()
    params = {key: p for key, p in model.named_parameters() if "head" not in key}
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params)
    if isinstance(model, Flipped):
        advice = r"in an order of their own.*example_of_row={'encoder': lambda X, y: model.rows} if forward keeps"
        with pytest.raises(UnsupportedError, match=advice):
            curvature(risk, KFAC)
        return
    K = curvature(risk, KFAC, vectors=Empirical())
    assert "example_of_row= can tell" in repr(K)
    found = risk.space.unflatten(K.diagonal())
    exact = curvature(
        EmpiricalRisk(model, risk.losses.given, data, params, **make_options(model)), DiagonalBlock, vectors=Empirical()
    )
    expected = exact.risk.space.unflatten(exact.diagonal())
    for entry in K.plan:
        for key in entry.layer.params if entry.approximation.kind is DiagonalBlock else ():
            close(found[key], expected[key])


def make_options(model: nn.Module) -> dict[str, Any]:
    """What tells the order."""
    if isinstance(model, Twins):
        return {"example_of_row": {"encoder.?": lambda X, y: torch.arange(len(X)).repeat(2)}}
    return {"example_of_row": {f"experts.{e}*": (lambda X, y, e=e: model.examples[e]) for e in range(4)}}  # type: ignore


def test_factors_count_the_rows_that_there_are() -> None:
    """`A` is the mean of `a aᵀ` over the rows of an expert, with ones for the bias; `G` the sum of `g gᵀ`."""
    torch.manual_seed(0)
    model, data, options = experts()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **options)
    gradients: dict[int, list[Tensor]] = {}
    for e, expert in enumerate(model.experts):
        expert[0].register_forward_hook(  # before the activation writes in place
            lambda _, args, out, e=e: out.register_hook(lambda g: gradients.setdefault(e, []).append(g)) and None
        )
    for X, y in data:
        nn.functional.cross_entropy(model(X), y, reduction="sum").backward()
    model.zero_grad(set_to_none=True)
    N = sum(len(y) for _, y in data)
    plain = {e: (torch.cat(model.seen[e]), torch.cat(gradients[e])) for e in range(len(model.experts))}
    for expert in model.experts:
        expert[0]._forward_hooks.clear()
    K = curvature(risk, KFAC, vectors=Empirical())
    affine = {key: p for key, p in risk.params.items() if key.split(".")[-2] != "2"}
    forward = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, affine, **options)
    forward = curvature(forward, KFAC, vectors=ForwardOnly())
    assert {len(a) for a, _ in plain.values()} != {len(plain[0][0])}
    for e, (a, g) in plain.items():
        a = torch.cat([a, torch.ones(len(a), 1, dtype=F64)], 1)
        block = K.blocks[f"experts.{e}.0"]
        close(block.A.to_dense(), a.mT @ a / len(a))
        close(block.G.to_dense(), g.mT @ g / N)
        close(forward.blocks[f"experts.{e}.0"].A.to_dense(), a.mT @ a / len(a))


def test_reduced_factors_average_the_rows_of_an_example() -> None:
    torch.manual_seed(0)
    model, data, options = experts(1, 2)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **options)
    means, present = [], 0
    for X, _ in data:
        model(X)
        for n in range(len(X)):
            rows = model.seen[0][-1][model.examples[0] == n]
            present += bool(len(rows))
            means.append(torch.cat([rows, torch.ones(len(rows), 1, dtype=F64)], 1).sum(0) / max(len(rows), 1))
    A = curvature(risk, KFAC.using(kfac_approx="reduce"), vectors=Empirical()).blocks["experts.0.0"].A.to_dense()
    close(A, sum(torch.outer(a, a) for a in means) / present)


def test_a_mask_is_not_about_gathered_rows() -> None:
    """The mask has as many positions as an expert has rows for each example, and is not applied to them."""
    risk, _ = problem("twins")
    masked = EmpiricalRisk(
        risk.model,
        nn.CrossEntropyLoss(),
        risk.data,
        example_of_row=risk.options.example_of_row,
        mask=lambda X, y: torch.tensor([True, False]).expand(len(X), 2),
    )
    K, L = (curvature(r, KFAC, vectors=Empirical()) for r in (risk, masked))
    close(L.to_dense(), K.to_dense())


def test_an_estimator_in_a_training_loop() -> None:
    torch.manual_seed(0)
    model, data, options = experts()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **options)
    expected = curvature(risk, KFAC, vectors=Empirical())
    estimator = CurvatureEstimator(risk, KFAC, vectors=Empirical())
    for batch in data:
        estimator.update(batch)
    close(estimator.operator.to_dense(), expected.to_dense())


# What is refused -----------------------------------------------------------------------------------------------------


def trace(model: nn.Module, data: Data, rows: Any) -> Tensor:
    return curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data, example_of_row=rows), EKFAC).trace


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, r"'layer' \(Linear\) returned shape \[4, 4\] in a batch of 3.*example_of_row=\{'layer': lambda X, y"),
        (lambda X, y: [0, 0, 1, 2], r"example_of_row=\{'layer': ...\} returned a list; expected a LongTensor \[4\]"),
        (lambda X, y: torch.ones(4), r"returned a torch.float32 tensor; expected a LongTensor"),
        (lambda X, y: torch.arange(3), r"returned shape \[3\], and the layer returned 4 rows"),
        (lambda X, y: torch.arange(4), r"returned numbers from 0 to 3; expected numbers of examples, from 0 to 2"),
        (lambda X, y: torch.arange(4) - 1, "returned numbers from -1 to 2"),
        (lambda X, y: torch.tensor([0, 1, 1, 2]), r"'layer' \(Linear\) returned shape \[4, 4\]"),
    ],
)
def test_refused(rows: Any, words: str) -> None:
    """The last one is about wrong examples, which a vector for one of them finds."""
    torch.manual_seed(0)

    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.tensor([2, 0, 1, 2])
            return self.head(x.new_zeros(3, 4).index_add(0, rows, self.layer(x[rows])))

    data = [(torch.randn(3, 3), torch.randint(3, (3,)))]
    with pytest.raises(UnsupportedError, match=words):
        trace(Four(), data, rows and {"layer": rows})


def test_packed_sequences_that_are_not_the_examples() -> None:
    class Pairs(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(pack_padded_sequence(x, torch.tensor([2, 2]), batch_first=True))[1][0][:1].expand(3, 3)

    data = [(torch.randn(2, 2, 4), torch.randint(3, (3,)))]
    risk = EmpiricalRisk(Pairs(nn.GRU(4, 3)), nn.CrossEntropyLoss(), data, batch_size_fn=lambda X: 3)
    with pytest.raises(UnsupportedError, match=r"'layer' \(GRU\) returned 2 packed sequences in a batch of 3 examples"):
        _ = curvature(risk, DiagonalBlock).trace


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_packed_sequences_through_computed_weights() -> None:
    model, data, options = packed(nn.GRU(3, 4))
    model.layer = nn.utils.weight_norm(nn.GRU(3, 4), "weight_hh_l0").double()
    with pytest.raises(UnsupportedError, match=r"'weight_hh_l0'.* computed .*padded tensors, not with a Packed"):
        _ = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **options), DiagonalBlock).trace


def test_refused_at_construction() -> None:
    data = [(torch.randn(3, 3), torch.randint(3, (3,)))]
    with pytest.raises(ValueError, match=r"example_of_row=\{'heads': ...\} matches no module .* are \['0'\]"):
        trace(nn.Sequential(nn.Linear(3, 3)), data, {"heads": picked})
    with pytest.raises(TypeError, match=r"example_of_row=\{'0': ...\} is a Tensor; expected a function of a batch"):
        trace(nn.Sequential(nn.Linear(3, 3)), data, {"0": torch.arange(3)})


def test_weights_that_functions_read_are_refused() -> None:
    data = [(torch.randn(3, 5, 4), torch.randn(3, 5, 4))]
    model = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).eval()
    risk = EmpiricalRisk(model, nn.MSELoss(), data, example_of_row={"self_attn*": lambda X, y: torch.arange(3)})
    with pytest.raises(UnsupportedError, match=r"example_of_row= can't be said for layer 'self_attn.*by functions"):
        _ = curvature(risk, KFAC).trace
