"""Each function that broadcasts a table, with its options, against autograd of one example at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops_plus.layer import broadcast
from curvlinops_plus.layer.broadcast import BroadcastRule, TableOfPass, TableRead, table_reads
from test.cases import close
from test.helpers import normal

N, V = 5, 2
X = normal(N, 4, 3, seed=1)
STATISTICS = normal(4, seed=5), normal(4, seed=6).square() + 0.5

#: A function, its arguments of a table, shapes of the tables, and keywords.
Case = tuple[Callable[..., Any], Callable[..., tuple[Any, ...]], list[tuple[int, ...]], Any]
CASES: dict[str, Case] = {
    "torch.add": (torch.add, lambda t: (X, t), [(3,)], {"alpha": 2.5}),
    "torch.add, the other": (torch.add, lambda t: (t, X), [(4, 1)], {"alpha": 2.5}),
    "add": (Tensor.add, lambda t: (t, X), [(1, 4, 3)], {}),
    "__radd__": (Tensor.__radd__, lambda t: (X, t), [()], {}),
    "add_": (Tensor.add_, lambda t: (X * t.sum().detach(), t), [(4, 3)], {"alpha": -2}),
    "torch.sub": (torch.sub, lambda t: (X, t), [(3,)], {"alpha": 2}),
    "sub": (Tensor.sub, lambda t: (t, X), [(3,)], {"alpha": 2}),
    "__rsub__": (Tensor.__rsub__, lambda t: (t, X), [(3,)], {}),
    "torch.rsub": (torch.rsub, lambda t: (X, t), [(3,)], {"alpha": 3}),
    "sub_": (Tensor.sub_, lambda t: (X * t.sum().detach(), t), [(3,)], {}),
    "torch.mul": (torch.mul, lambda t: (X, t), [(4, 1)], {}),
    "mul": (Tensor.mul, lambda t: (t, X), [(1, 1, 3)], {}),
    "of fewer axes": (Tensor.mul, lambda t: (X[:, 0, 0, None, None], t), [(2, 3)], {}),
    "torch.div": (torch.div, lambda t: (t, X + 9), [(3,)], {}),
    "denominator": (torch.div, lambda t: (X, t), [(4, 1)], {}),
    "__truediv__": (Tensor.__truediv__, lambda t: (t, X + 9), [(4, 1)], {}),
    "torch.where": (torch.where, lambda t: (X > 0, t, X), [(3,)], {}),
    "torch.where, the other": (torch.where, lambda t: (X[..., :1] > 0, X, t), [(4, 1)], {}),
    "expand": (Tensor.expand, lambda t: (t, N, -1, 3), [(4, 1)], {}),
    "expand_as": (Tensor.expand_as, lambda t: (t, X), [(1, 1, 3)], {}),
    "repeat": (Tensor.repeat, lambda t: (t, N, 1, 1), [(1, 4, 3)], {}),
    "broadcast_to": (torch.broadcast_to, lambda t: (t, (N, 4, 3)), [(3,)], {}),
    "tile": (torch.tile, lambda t: (t, (N, 4, 1)), [(1, 3)], {}),
    "linear": (F.linear, lambda t: (X, normal(2, 3), t), [(2,)], {}),
    "conv1d": (F.conv1d, lambda t: (X, normal(2, 4, 2), t), [(2,)], {"padding": 1}),
    "linear, weight": (F.linear, lambda w, t: (X, w, t), [(2, 3), (2,)], {}),
    "linear, of one axis": (F.linear, lambda w: (X[:, 0], w), [(2, 3)], {}),
    "conv1d, weight": (F.conv1d, lambda w: (X, w), [(2, 2, 2)], {"stride": 2, "groups": 2}),
    "conv1d, both": (F.conv1d, lambda w, t: (X, w, t), [(2, 4, 3), (2,)], {"padding": "same"}),
    "embedding": (F.embedding, lambda w: (X.mul(9).long() % 6, w), [(6, 2)], {"padding_idx": 1}),
    "torch.matmul": (torch.matmul, lambda w: (X, w), [(3, 2)], {}),
    "torch.mm": (torch.mm, lambda w: (X[:, 0], w), [(3, 2)], {}),
    "addmm": (torch.addmm, lambda w: (X[0, 0], X[:, 0], w), [(3, 3)], {}),
    "layer_norm": (F.layer_norm, lambda w, b: (X, (3,), w, b), [(3,), (3,)], {"eps": 0.1}),
    "layer_norm, two axes": (
        torch.layer_norm,
        lambda w, b: (X, (4, 3), w, b),
        [(4, 3), (4, 3)],
        {},
    ),
    "rms_norm": (F.rms_norm, lambda w: (X, (3,), w), [(3,)], {"eps": 0.1}),
    "group_norm": (F.group_norm, lambda w, b: (X, 2, w, b), [(4,), (4,)], {"eps": 0.1}),
    "batch_norm": (
        F.batch_norm,
        lambda w, b: (X, *STATISTICS, w, b),
        [(4,), (4,)],
        {"eps": 0.1},
    ),
    "instance_norm": (
        F.instance_norm,
        lambda w, b: (X, None, None, w, b),
        [(4,), (4,)],
        {"eps": 0.1},
    ),
    "instance_norm, running": (
        F.instance_norm,
        lambda w, b: (X, *STATISTICS, w, b, False),
        [(4,), (4,)],
        {},
    ),
}


def made(shape: tuple[int, ...], seed: int) -> Tensor:
    t = normal(*shape, seed=seed) if shape else torch.tensor(0.7).double()
    return t.requires_grad_()


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_each_example(name: str) -> None:
    function, arguments, shapes, options = CASES[name]
    tables = [made(shape, k + 7) for k, shape in enumerate(shapes)]
    output = function(*arguments(*tables), **options)
    g = normal(V, *output.shape, seed=3)
    args = arguments(*tables)
    ways = []
    for reads in table_reads(function, args, options, output):
        of_tables = [read for read in reads if any(read.table is t for t in tables)]
        if len(of_tables) == len(tables):
            ways.append(of_tables)
    assert len(ways) == 1
    (reads,) = ways
    assert [read.example_axes(N) for read in reads] == [[0]] * len(tables)
    rule = BroadcastRule([TableOfPass(r, 0, 1, {f"p{k}": r.table}) for k, r in enumerate(reads)])
    module: Any = None
    ours = rule.per_example_grads(module, reads[0].inputs, {}, g)
    for k, read in enumerate(reads):
        for v in range(V):
            for n in range(N):
                (expected,) = torch.autograd.grad(output[n], read.table, g[v, n], retain_graph=True)
                close(ours[f"p{k}"][v, n], expected)


def test_every_function_is_tested() -> None:
    tested = {function for function, *_ in CASES.values()}
    aliases = {Tensor.__add__, Tensor.__sub__, Tensor.__mul__, Tensor.__rmul__, Tensor.__iadd__}
    aliases |= {Tensor.__isub__, Tensor.broadcast_to, Tensor.tile, torch.group_norm}
    aliases |= {torch.rms_norm, Tensor.div, F.conv2d, F.conv3d}
    assert {*broadcast._READERS_OF_TABLES} <= tested | aliases


def test_tables_that_were_computed_and_several_positions() -> None:
    w = made((3,), 1)
    table = torch.outer(w, w).cumsum(0)[:2]  # [2, 3]
    x = normal(2 * N, 2, 3, seed=2)
    output = x * table
    (_, (read,)) = table_reads(torch.mul, (x, table), {}, output)
    rule = BroadcastRule([TableOfPass(read, 0, 2, {"weight": w})])
    g = normal(1, 2 * N, 2, 3, seed=4)
    module: Any = None
    ours = rule.per_example_grads(module, (x,), {}, g)["weight"]
    for n in range(N):
        rows = slice(2 * n, 2 * n + 2)
        (expected,) = torch.autograd.grad(output[rows], w, g[0, rows], retain_graph=True)
        close(ours[0, n], expected)


@pytest.mark.parametrize("function", [F.linear, F.conv1d])
@pytest.mark.parametrize("pieces", [False, True])
def test_weights_and_several_positions(function: Any, pieces: bool) -> None:
    w = made((3, 4, 2) if function is F.conv1d else (2, 3), 1)
    b = made((len(w),), 3)
    x = normal(2 * N, 4, 3, seed=2)
    output = function(x, 2 * w, b)
    ((of_weight, of_bias),) = table_reads(function, (x, weight := 2 * w, b), {}, output)
    assert of_weight.table is weight
    tables = [TableOfPass(of_weight, 0, 2, {"w": w}), TableOfPass(of_bias, 0, 2, {"b": b})]
    rule = BroadcastRule(tables)
    g = normal(V, *output.shape, seed=4)
    if pieces:
        rule.max_bytes = 3 * sum(table.bytes_on_the_way(g) for table in tables)
    module: Any = None
    ours = rule.per_example_grads(module, of_weight.inputs, {}, g)
    for v in range(V):
        for n in range(N):
            rows = slice(2 * n, 2 * n + 2)
            expected = torch.autograd.grad(output[rows], (w, b), g[v, rows], retain_graph=True)
            close(ours["w"][v, n], expected[0])
            close(ours["b"][v, n], expected[1])


def test_operations_that_can_t_be_vectorised() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return 2 * t

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore
            return g * (2.0 if float(g.detach().abs().sum()) >= 0 else 1.0)

    w = made((3,), 1)
    table = Doubled.apply(w)
    read = TableRead(table, (N, 3), torch.clone)
    g = normal(V, N, 3, seed=4)
    module: Any = None
    rule = BroadcastRule([TableOfPass(read, 0, 1, {"bias": w})])
    close(rule.per_example_grads(module, (), {}, g)["bias"], 2 * g)


def test_what_is_no_broadcast() -> None:
    t = made((4, 3), 1)
    assert not any(read.example_axes(N) for (read,) in table_reads(torch.add, (t, t), {}, t + t))
    assert table_reads(Tensor.repeat, (t, 2, 1), {}, t.repeat(2, 1)) == []
    assert table_reads(torch.div, (X, 2.0), {}, X / 2) == []
    view = X.clone().requires_grad_().mul(1)[0]
    view += t
    assert table_reads(Tensor.add_, (view, t), {}, view) == []  # others see it by the base
