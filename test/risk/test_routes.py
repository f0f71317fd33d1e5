"""Mixtures of experts: rows that are gathered from those of the examples, in many ways to write it.

Blocks are compared with the exact one by one backward pass per example, and with the products of
all rows that an expert saw.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    Exact,
    ForwardOnly,
    FullBlock,
    curvature,
)
from curvlinops_plus.risk import check
from curvlinops_plus.risk.function_calls import FunctionCalls
from curvlinops_plus.risk.routes import GatheredRows, Origins, RoutedRows
from test.cases import close, same, unchanged
from test.helpers import normal, seeded

D, E, C = 4, 3, 3
Moved = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


# From rows [R, d], the choices of each row [R, k] and the number of an expert: its rows, and where
# they come from.
def by_index(x: Tensor, choice: Tensor, e: int) -> tuple[Tensor, Tensor]:
    rows = (choice == e).nonzero()[:, 0]
    return x[rows], rows


def by_mask(x: Tensor, choice: Tensor, e: int) -> tuple[Tensor, Tensor]:
    mask = (choice == e).any(1)
    return x[mask], mask.nonzero()[:, 0]


def selected(x: Tensor, choice: Tensor, e: int) -> tuple[Tensor, Tensor]:
    rows = torch.where(choice == e)[0]
    return x.index_select(0, rows), rows


def backwards(x: Tensor, choice: Tensor, e: int) -> tuple[Tensor, Tensor]:
    rows = (choice == e).nonzero()[:, 0].flip(0)
    return torch.gather(x, 0, rows[:, None].expand(-1, x.shape[1])), rows


def cut_from_sorted(x: Tensor, choice: Tensor, e: int) -> tuple[Tensor, Tensor]:
    """All rows sorted by experts, once for each choice, and one piece of them."""
    order = choice.flatten().argsort(stable=True)
    rows = order // choice.shape[1]
    counts = choice.flatten().bincount(minlength=E).tolist()
    return x[rows].split(counts)[e], rows.split(counts)[e]


def sliced(x: Tensor, choice: Tensor, e: int) -> tuple[Tensor, Tensor]:
    order = choice.flatten().argsort(stable=True)
    counts = [0, *choice.flatten().bincount(minlength=E).cumsum(0).tolist()]
    rows = order // choice.shape[1]
    repeated = x.repeat_interleave(choice.shape[1], dim=0)
    return repeated[order][counts[e] : counts[e + 1]], rows[counts[e] : counts[e + 1]]


class Mixture(nn.Module):
    """Experts with two layers for some of the tokens each; x [N, T, d] -> [N, C].

    Args:
        move: How rows get to experts.
        top: Experts of each token.
        tokens: Whether tokens are routed, else examples with all of their tokens.
    """

    def __init__(self, move: Moved = by_index, top: int = 1, tokens: bool = True) -> None:
        super().__init__()
        self.move, self.top, self.tokens = move, top, tokens
        self.router, self.head = nn.Linear(D, E), nn.Linear(D, C)
        self.up = nn.ModuleList(nn.Linear(D, 5) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(5, D, bias=False) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1) if self.tokens else x
        by_row = rows if self.tokens else rows.mean(1)
        p, choice = self.router(by_row).softmax(-1).topk(self.top, -1)
        out = torch.zeros_like(rows)
        for e in range(E):
            a, places = self.move(rows, choice, e)
            weight = (p * (choice == e))[places].sum(-1)
            y = self.down[e](F.silu(self.up[e](a)))
            out = out.index_add(0, places, y * weight.view(-1, *[1] * (y.ndim - 1)))
        return self.head((rows + out).view_as(x)).mean(1)


MOVES = [by_index, by_mask, selected, backwards, cut_from_sorted, sliced]


def model_of(kind: Callable[..., nn.Module] = Mixture, *args: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind(*args).double()


def data_of(*sizes: int, T: int = 5, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    batches = []
    for k, n in enumerate(sizes):
        y = torch.randint(C, (n,), generator=seeded(seed + k))
        batches.append((normal(n, T, D, seed=seed + k), y))
    return batches


def exact(model: nn.Module, data: Any) -> tuple[Tensor, dict[str, slice]]:
    """The GGN of cross-entropy by the gradients of each example, and where parameters are."""
    params = dict(model.named_parameters())
    matrix, N = 0.0, sum(len(y) for _, y in data)
    for X, _ in data:
        for x in X:
            f = model(x[None])[0]
            rows = []
            for f_c in f:
                grads = torch.autograd.grad(
                    f_c, list(params.values()), retain_graph=True, materialize_grads=True
                )
                rows.append(torch.cat([g.flatten() for g in grads]))
            J = torch.stack(rows)
            p = f.softmax(0).detach()
            matrix = matrix + J.T @ (torch.diag(p) - p[:, None] * p) @ J / N
    at, start = {}, 0
    for key, p in params.items():
        at[key], start = slice(start, start + p.numel()), start + p.numel()
    assert isinstance(matrix, Tensor)
    return matrix, at


def products_of_rows(model: nn.Module, data: Any, name: str) -> Tensor:
    """`G ⊗ A` of the weight of an expert, from what hooks see of it."""
    A, G, number, N = 0.0, 0.0, 0, sum(len(y) for _, y in data)
    module = model.get_submodule(name)
    for X, _ in data:
        seen: dict[str, Tensor] = {}
        handle = module.register_forward_hook(
            lambda m, args, out, seen=seen: seen.update(a=args[0].detach(), out=out)
        )
        f = model(X)
        handle.remove()
        a = seen["a"].flatten(0, -2)
        p = f.softmax(1).detach()
        A, number = A + a.T @ a, number + len(a)
        for c in range(C):
            # One column of the root of diag(p) - p pᵀ of each example.
            root = p.sqrt()[:, c, None] * (torch.eye(C).double()[c] - p)
            (g,) = torch.autograd.grad(f, seen["out"], root, retain_graph=True)
            g = g.flatten(0, -2)
            G = G + g.T @ g / N
    return torch.kron(torch.as_tensor(G), torch.as_tensor(A) / max(1, number))


def input_factor(K: Any, e: int) -> Tensor:
    return K.blocks[f"up.{e}"].A.to_dense()


@pytest.mark.parametrize(("move", "top"), [*((move, 2) for move in MOVES), (by_index, 1)])
def test_blocks_of_experts(move: Moved, top: int) -> None:
    model, data = model_of(Mixture, move, top), data_of(4, 6, 3)
    matrix, at = exact(model, data)
    params = {key: p for key, p in model.named_parameters() if "up" in key or "down" in key}
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params)
    with warnings.catch_warnings(), unchanged(model, *data):
        warnings.simplefilter("error", CurvatureWarning)
        K, Q, full, diagonal = (
            curvature(risk, kind, vectors=Exact(), separate_weight_and_bias=True)
            for kind in (KFAC, EKFAC, FullBlock, DiagonalBlock)
        )
    for key in params:
        block = matrix[at[key], at[key]]
        close(full.blocks[key].to_dense(), block)
        close(diagonal.blocks[key].diagonal(), block.diagonal())
        if "weight" in key:
            close(
                K.blocks[key].to_dense(),
                products_of_rows(model, data, key.removesuffix(".weight")),
            )
        eigen: Any = Q.blocks[key]
        basis = eigen.basis.to_dense()
        close(eigen.values, (basis.T @ block @ basis).diagonal())


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_examples_are_routed_with_all_of_their_positions(approx: str) -> None:
    model, data = model_of(Mixture, by_index, 2, False), data_of(6, 5)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    K = curvature(risk, KFAC.using(kfac_approx=approx), separate_weight_and_bias=True)
    if approx == "expand":
        for e in range(E):
            expected = products_of_rows(model, data, f"up.{e}")
            close(K.blocks[f"up.{e}.weight"].to_dense(), expected)
    # A call with all examples is the plain one.
    full = curvature(risk, FullBlock)
    matrix, at = exact(model, data)
    close(full.blocks["down.1"].to_dense(), matrix[at["down.1.weight"], at["down.1.weight"]])


def test_reduced_rows_are_those_of_each_example() -> None:
    """Means and sums over the rows that an expert sees of an example."""
    model, (batch,) = model_of(), data_of(6)
    risk = EmpiricalRisk(model, nn.MSELoss(reduction="sum"), [(batch[0], normal(6, C))])
    K = curvature(risk, KFAC.using(kfac_approx="reduce"), vectors=ForwardOnly())
    with torch.no_grad():
        choice = model.get_submodule("router")(batch[0]).argmax(-1)  # [N, T]
        for e in range(E):
            means = [x[c == e].mean(0) for x, c in zip(batch[0], choice) if bool((c == e).any())]
            a = torch.cat([torch.stack(means), torch.ones(len(means), 1).double()], 1)
            close(input_factor(K, e), a.T @ a / len(a))


def test_masked_positions_do_not_count() -> None:
    model, ((X, y),) = model_of(), data_of(6)
    mask = torch.rand(6, 5, generator=seeded(1)) > 0.4
    X = torch.where(mask[..., None], X, 10.0)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)], mask=lambda X, y: mask)
    K = curvature(risk, KFAC, vectors=ForwardOnly())
    with torch.no_grad():
        choice = model.get_submodule("router")(X).argmax(-1)
    for e in range(E):
        a = F.pad(X[(choice == e) & mask], (0, 1), value=1.0)
        close(input_factor(K, e), a.T @ a / max(1, len(a)))


class Choosy(Mixture):
    """Nobody visits the last expert; it may not even be called."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        p, choice = self.router(rows)[:, : E - 1].softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for e in range(E):
            mine = choice == e
            if mine.any() or not self.skips:
                y = self.down[e](torch.tanh(self.up[e](rows[mine])))
                out = out.index_put((mine.nonzero()[:, 0],), p[mine, None] * y)
        return self.head((rows + out).view_as(x)).mean(1)


@pytest.mark.parametrize("kind", [KFAC, EKFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize("skips", [False, True])
def test_an_expert_that_nobody_visits_has_a_zero_block(skips: bool, kind: Any) -> None:
    model, data = model_of(Choosy, skips), data_of(5, 4)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    K = curvature(risk, kind)
    same(K.blocks[f"up.{E - 1}"].to_dense(), torch.zeros(25, 25).double())
    close(K.blocks["down.0"].trace, curvature(risk, EKFAC).blocks["down.0"].trace, rtol=1)
    v = normal(K.shape[0])
    close((K.inverse(0.5) @ (K @ v + 0.5 * v)), v)
    if kind is not KFAC:
        close(K.trace, exact(model, data)[0].trace())


class OneForAll(Mixture):
    """All rows go to one expert, in order; others are not called. Beside them a spare layer."""

    def __init__(self, spare: int) -> None:
        super().__init__()
        self.spare = nn.Linear(spare, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        p = self.router(rows).softmax(-1)[:, 1:2]
        choice = torch.ones_like(p[:, 0])
        out = torch.zeros_like(rows)
        for e in [int(e) for e in choice.unique()]:
            mine = choice == e
            out[mine] = self.down[e](torch.tanh(self.up[e](rows[mine])))
        return self.head((rows + p * out).view_as(x)).mean(1)


@pytest.mark.parametrize("kind", [KFAC, EKFAC, FullBlock])
def test_experts_beside_one_that_sees_all_rows_have_zero_blocks(kind: Any) -> None:
    model, data = model_of(OneForAll, 9), data_of(5, 4)
    params = [p for name, p in model.named_parameters() if name.startswith(("up", "down", "head"))]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params)
    K = curvature(risk, kind)
    for block in (K.blocks["up.0"], K.blocks[f"down.{E - 1}"]):
        assert not block.to_dense().any()
    J = risk.restricted([key for key in risk.params if not key.startswith(("up.0", "down.0"))])
    close(K.blocks["up.1"].trace, curvature(J, kind).blocks["up.1"].trace)


def test_a_layer_that_is_no_expert_is_refused_if_it_is_not_called() -> None:
    model, data = model_of(OneForAll, 9), data_of(5, 4)
    with pytest.raises(ValueError, match=r"'spare'.* was never called"):
        curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), KFAC)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_stream_of_batches(kind: Any) -> None:
    model, data = model_of(Mixture, by_mask, 2), data_of(6, 5)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    estimator = CurvatureEstimator(risk, kind)
    for batch in data:
        estimator.update(batch)
    if kind is KFAC:
        close(estimator.operator.to_dense(), curvature(risk, kind).to_dense())
    else:
        close(estimator.operator.trace, exact(model, data)[0].trace())


class Sorted(Mixture):
    """Tokens go to experts by their first entry; an expert without tokens is not called."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        choice = (rows[:, 0] > 9).long()
        out = torch.zeros_like(rows)
        for e in range(E):
            places = (choice == e).nonzero()[:, 0]
            if len(places):
                y = self.down[e](torch.tanh(self.up[e](rows[places])))
                out = out.index_add(0, places, y)
        return self.head((rows + out).view_as(x)).mean(1)


@pytest.mark.filterwarnings("error::curvlinops_plus.CurvatureWarning")
def test_one_expert_may_see_all_rows_of_the_first_batches() -> None:
    model, data = model_of(Sorted), data_of(6, 5, 4)
    data[1][0][1:, :3, 0] = 10
    data[2][0][:, 1, 0] = 10
    params = {k: p for k, p in model.named_parameters() if k.startswith(("up.", "down."))}
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params)
    expected = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params), KFAC)
    estimator = CurvatureEstimator(risk, KFAC, leave_out_uncalled=True)
    for batch in data:
        estimator.update(batch)
    assert estimator.uncalled == ["up.2", "down.2"]
    for name in ("up.0", "down.0"):
        close(estimator.operator.blocks[name].to_dense(), expected.blocks[name].to_dense())
    assert risk.reads is not None
    assert risk.reads.gathered


class Split(Mixture):
    """Experts by the first entry of a token, whose tokens are neighbours once they are sorted: what
    no single example can be run through.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        choice = (rows[:, 0] > 9).long() + (rows[:, 0] > 99).long()
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=E).tolist()
        parts = [
            self.down[e](torch.tanh(self.up[e](part)))
            for e, part in enumerate(rows[order].split(counts))
            if len(part)
        ]
        out = torch.zeros_like(rows).index_add(0, order, torch.cat(parts))
        return self.head((rows + out).view_as(x)).mean(1)


@pytest.mark.filterwarnings("error::curvlinops_plus.CurvatureWarning")
@pytest.mark.parametrize("visits", [[0, 1, 2], [1, 2, 0], [2, 0, 1]], ids=str)
def test_experts_may_be_visited_in_later_batches(visits: list[int]) -> None:
    """A batch that goes to one expert moves no rows, in whatever place it comes."""
    model, data = model_of(Split), data_of(6, 5, 4)
    data[0][0][..., 0] = 100
    data[1][0][1:, :3, 0] = 10
    data[2][0][:, 1, 0] = 100
    data = [data[k] for k in visits]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    assert all(entry.approximation.kind is KFAC for entry in curvature(risk, KFAC).plan)
    close(curvature(risk, EKFAC).trace, exact(model, data)[0].trace())


# ------------------------------------------------------------------------ what can't be followed
class Turned(torch.autograd.Function):
    """Rows in the other order, unseen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.flip(0)


UNSEEN = {
    "function": lambda y: Turned.apply(y),
    "product": lambda y: torch.eye(len(y)).double().flip(0) @ y,
    "einsum": lambda y: torch.einsum("mn,nd->md", torch.eye(len(y)).double().flip(0), y),
    "turned": lambda y: y.rot90(2).flip(1),
    "sorted": lambda y: y[y.detach()[:, 0].argsort()],
}


class Shuffled(Mixture):
    """Something happens to the rows between the two layers of an expert."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        p, choice = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for e in range(E):
            places = (choice == e).nonzero()[:, 0]
            h = torch.tanh(self.up[e](rows[places]))
            there = UNSEEN[self.how](h)
            order = UNSEEN[self.how](torch.arange(len(h)).double()[:, None].expand(-1, 5))
            if self.how == "sorted":
                order = h.detach()[:, 0].argsort()[:, None]
            y = self.down[e](there)
            places = places[order[:, 0].long()]
            out = out.index_add(0, places, y * p[places, None])
        return self.head((rows + out).view_as(x)).mean(1)


@pytest.mark.parametrize("how", UNSEEN)
@pytest.mark.parametrize("N", [4, 5, 6])
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_rows_that_are_moved_unseen_are_noticed(N: int, how: str) -> None:
    model, data = model_of(Shuffled, how), data_of(N, N + 1)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    K = curvature(risk, EKFAC)
    close(K.trace, exact(model, data)[0].trace())


class Late(Mixture):
    """The expert that later batches visit first has its weight read by something else, too."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        choice = (rows[:, 0] > 9).long()
        out = torch.zeros_like(rows)
        for e in range(E):
            places = (choice == e).nonzero()[:, 0]
            if len(places):
                y = self.down[e](torch.tanh(self.up[e](rows[places])))
                y = y * self.get_parameter("up.1.weight").sum() if e == 1 else y
                out = out.index_add(0, places, y)
        return self.head((rows + out).view_as(x)).mean(1)


def test_an_expert_is_compared_when_it_is_first_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = model_of(Late), data_of(6, 5, 6)
    data[1][0][2:, :2, 0] = 10
    keys = ("up.0", "up.1", "down.0", "down.1", "head")
    params = {key: p for key, p in model.named_parameters() if key.startswith(keys)}
    with pytest.warns(CurvatureWarning, match="get their exact diagonal"):
        K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params), EKFAC)
    matrix, at = exact(model, data)
    close(K.trace, sum(matrix[at[key], at[key]].trace() for key in params))
    # Others are not compared again.
    compared: list[int] = []
    passes = check._BatchCheck.passes
    monkeypatch.setattr(
        check._BatchCheck, "passes", lambda self: compared.append(1) or passes(self)
    )
    curvature(EmpiricalRisk(model_of(), nn.CrossEntropyLoss(), data_of(*range(5, 14))), KFAC)
    assert len(compared) <= 4


def test_a_rule_of_the_wrong_examples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check compares which examples rows belong to."""
    of = RoutedRows.of

    def wrong(places: Origins, num_examples: int) -> RoutedRows:
        return of(Origins(places.index.roll(1), places.total), num_examples)

    model, data = model_of(), data_of(6)
    monkeypatch.setattr(RoutedRows, "of", wrong)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    with pytest.warns(CurvatureWarning, match="get their exact diagonal"):
        K = curvature(risk, EKFAC)
    close(K.trace, exact(model, data)[0].trace())
    assert "up.0.weight" in risk.reads.enclosing  # type: ignore[union-attr]


# ---------------------------------------------------------------------------- functions one by one
def followed(f: Callable[[Tensor], Any], shape: tuple[int, ...] = (6, 4)) -> Origins | None:
    """Origins behind a function of rows 5, 0, 3, 3, 1, 2."""
    x, rows = torch.rand(8, *shape[1:]), GatheredRows(2)
    index = torch.tensor([5, 0, 3, 3, 1, 2])

    def receive(function: Any, args: Any, kwargs: Any, examples: Any) -> Any:
        out = function(*args, **kwargs)
        rows.follow(function, args, kwargs, out)
        return out

    with FunctionCalls(receive):
        out = f(x[index])
    return rows.places(out)


KEEPS = {
    "tanh": torch.tanh,
    "in place": lambda y: y.mul_(2),
    "chunk": lambda y: y.chunk(2, -1)[1],
    "split": lambda y: y.split(1, dim=1)[0],
    "linear": lambda y: F.linear(y, torch.rand(3, 4)),
    "matmul": lambda y: y @ torch.rand(4, 7),
    "column": lambda y: y[:, :1] * y,
    "beside": lambda y: torch.cat([y.sin(), y.cos()], 1),
    "dots": lambda y: y[..., ::2],
    "norm": lambda y: F.layer_norm(y, (4,)),
    "sum": lambda y: y.sum(-1),
    "view": lambda y: y.view(6, 2, 2),
    "turned inside": lambda y: y.view(6, 2, 2).transpose(1, 2),
    "dropout": lambda y: F.dropout(y, 0.5),
    "bmm": lambda y: torch.bmm(y.unsqueeze(1), torch.rand(6, 4, 3)).squeeze(1),
    "masked": lambda y: y.masked_fill(y > 0.5, 0.0),
    "cast": lambda y: y.to(torch.float64),
}
LOSES = {
    "over rows": lambda y: y[:, :4].sum(0),
    "of a square": lambda y: torch.cat([y, y], 1)[:, :6].T,
    "second factor": lambda y: torch.rand(6, 6) @ y,
    "flipped": lambda y: y.flip(0),
    "sorted": lambda y: y.sort(0)[0],
    "added": lambda y: torch.zeros(6, 4).index_add(0, torch.arange(6).flip(0), y),
    "sum of a square": lambda y: torch.cat([y, y], 1)[:, :6].sum(0),
    "row": lambda y: torch.cat([y, y], 1)[:, :6][0],
    "einsum": lambda y: torch.einsum("md->dm", torch.cat([y, y], 1)[:, :6]),
}


@pytest.mark.parametrize("name", KEEPS)
def test_functions_that_keep_rows(name: str) -> None:
    places = followed(KEEPS[name])
    assert places is not None
    same(places.index, torch.tensor([5, 0, 3, 3, 1, 2]))


@pytest.mark.parametrize("name", LOSES)
def test_functions_that_move_rows(name: str) -> None:
    assert followed(LOSES[name]) is None


MOVE = {
    "index": (lambda y: y[torch.tensor([1, 1, 4])], [0, 0, 1]),
    "mask": (lambda y: y[torch.tensor([True, False, False, True, False, True])], [5, 3, 2]),
    "slice": (lambda y: y[2:4], [3, 3]),
    "narrow": (lambda y: y.narrow(0, 1, 2), [0, 3]),
    "split": (lambda y: y.split([2, 4])[1], [3, 3, 1, 2]),
    "chunk": (lambda y: y.chunk(3)[0], [5, 0]),
    "positions": (lambda y: y.view(12, 2), [5, 5, 0, 0, 3, 3, 3, 3, 1, 1, 2, 2]),
    "joined": (lambda y: torch.cat([y[4:], y[:1]]), [1, 2, 5]),
    "repeated": (lambda y: y[:2].repeat_interleave(2, dim=0), [5, 5, 0, 0]),
}


@pytest.mark.parametrize("name", MOVE)
def test_functions_that_gather_again(name: str) -> None:
    f, expected = MOVE[name]
    places = followed(f)
    assert places is not None
    same(places.index, torch.tensor(expected))


def test_two_axes_of_rows() -> None:
    x, rows = torch.rand(2, 3, 4), GatheredRows(2)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    y = x[mask]
    rows.follow(Tensor.__getitem__, (x, mask), {}, y)
    places = rows.places(y)
    assert places is not None
    assert places.total == 6
    same(places.index, torch.tensor([0, 2, 4]))
    pair = (torch.tensor([1, 0]), torch.tensor([2, 1]))
    z = x[pair]
    rows.follow(Tensor.__getitem__, (x, pair), {}, z)
    places = rows.places(z)
    assert places is not None
    same(places.index, torch.tensor([5, 1]))
    assert [rows.moves_rows(t) for t in (x, y, z)] == [False, True, True]
