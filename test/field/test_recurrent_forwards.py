"""Recurrent layers whose weights another `forward` reads: subclasses that pack, transpose, fold,
drop out or call twice; packed sequences; functions and cells.

The right values come from plain autograd, for one example after the other; in training mode with
the dropout of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    KFACOptimizer,
    curvature,
    per_example_gradients,
)
from test.cases import close
from test.helpers import Written, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")

N, T, i, h = 7, 5, 4, 3


def packed(x: Tensor, lengths: Tensor, batch_first: bool = True) -> PackedSequence:
    return pack_padded_sequence(x, lengths.cpu(), batch_first, enforce_sorted=False)


def padded(out: PackedSequence, batch_first: bool = True) -> Tensor:
    return pad_packed_sequence(out, batch_first, total_length=T)[0]


class Packing(nn.GRU):
    """Takes padded sequences and their lengths, as layers of forecasting libraries do."""

    def forward(self, x: Any, lengths: Any) -> Any:
        out, state = super().forward(packed(x, lengths, self.batch_first))
        return padded(out, self.batch_first), state


class Transposing(nn.LSTM):
    """Takes [T, N, i], and has `batch_first=True`."""

    def forward(self, x: Any, hx: Any = None) -> Any:
        out, states = super().forward(x.transpose(0, 1), hx)
        return out.transpose(0, 1), states


class Dropping(nn.LSTM):
    """One mask for all steps; forwards and backwards with the same weights."""

    def forward(self, x: Any, hx: Any = None) -> Any:
        mask = F.dropout(torch.ones_like(x[:, :1]), 0.3, self.training)
        out, _ = super().forward(x * mask)
        back, (state, _) = super().forward(x.flip(1))
        return out + back, state


class Folding(nn.GRU):
    """Several sequences of each example."""

    def forward(self, x: Any, hx: Any = None) -> Any:
        out, _ = super().forward(x.flatten(0, 1))
        return out.unflatten(0, x.shape[:2]).sum(1)


class Mixed(nn.LSTMCell):
    """A cell whose state changes slowly."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        state, cell = super().forward(input, hx)
        return 0.9 * state + 0.1 * hx[0], cell


def steps(m: Any, x: Tensor) -> Tensor:
    state = cell = x.new_zeros(len(x), h)
    for t in range(T):
        state, cell = m.layer(x[:, t], (state, cell))
        state = m.drop(state)
    return state


def by_function(m: Any, x: Tensor) -> Tensor:
    weights = [m.w_ih, m.w_hh, m.b_ih, m.b_hh]
    start = m.start.expand(1, len(x), h).contiguous()
    out, _ = torch.gru(x, start, weights, True, 1, 0.0, m.training, False, True)
    return out[:, -1]


def sorted_by_user(m: Any, X: Any) -> Tensor:
    x, lengths = X
    order = lengths.argsort(descending=True)
    inner = m.before(x[order]).tanh()
    _, state = m.layer(pack_padded_sequence(inner, lengths[order].cpu(), batch_first=True))
    return state[-1][order.argsort()]


def on_packed_rows(m: Any, X: Any) -> Tensor:
    p = packed(*X)
    rows = m.before(p.data).tanh()
    p = PackedSequence(rows, p.batch_sizes, p.sorted_indices, p.unsorted_indices)
    out, state = m.layer(p)
    return m.behind(padded(out)).tanh().sum(1) + state[-1]


def checkpointed(m: Any, X: Any) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return padded(m.layer(packed(x, X[1]))[0])

    return checkpoint(run, X[0].clone().requires_grad_(), use_reentrant=False).sum(1)


def packs_outside(m: Any, X: Any) -> Tensor:
    out, (_, cell) = m.layer(packed(*X))
    return padded(out).sum(1).unflatten(1, (-1, h)).sum(1) + cell[0]


def packs_inside(m: Any, X: Any) -> Tensor:
    out, state = m.layer(*X)
    return out.sum(1) + state[-1]


def packs_time_first(m: Any, X: Any) -> Tensor:
    out, state = m.layer(X[0].transpose(0, 1), X[1])
    return out.sum(0).unflatten(1, (-1, h)).sum(1) + state[-1]


def transposes(m: Any, x: Tensor) -> Tensor:
    out, (state, _) = m.layer(x.transpose(0, 1))
    return out.transpose(0, 1).cumsum(1)[:, -1] + state[0]


def drops_out_twice(m: Any, x: Tensor) -> Tensor:
    out, state = m.layer(x)
    return out.mean(1) + state[0]


LENGTHS = torch.tensor([2, 5, 3, 1, 5, 4, 2])
x = normal(N, T, i, seed=1)

#: Name -> the model's parts, what it does, its input.
CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any, Any], Tensor], Any]] = {
    "packs": (lambda: {"layer": Packing(i, h, batch_first=True)}, packs_inside, (x, LENGTHS)),
    "packs, time first": (
        lambda: {"layer": Packing(i, h, num_layers=2, bidirectional=True)},
        packs_time_first,
        (x, LENGTHS),
    ),
    "transposes": (lambda: {"layer": Transposing(i, h, batch_first=True)}, transposes, x),
    "drops out, twice": (
        lambda: {"layer": Dropping(i, h, batch_first=True)},
        drops_out_twice,
        x,
    ),
    "folds": (
        lambda: {"layer": Folding(i, h, batch_first=True)},
        lambda m, x: m.layer(x).tanh().mean(1),
        normal(N, 2, T, i, seed=2),
    ),
    "cell": (lambda: {"layer": Mixed(i, h)}, steps, x),
    "packed outside": (
        lambda: {"layer": nn.LSTM(i, h, batch_first=True, bidirectional=True)},
        packs_outside,
        (x, LENGTHS),
    ),
    "projected": (
        lambda: {"layer": nn.LSTM(i, 2 * h, proj_size=h, batch_first=True)},
        lambda m, X: padded(m.layer(packed(*X))[0]).sum(1),
        (x, LENGTHS),
    ),
    "layers on packed rows": (
        lambda: {
            "before": nn.Linear(i, i),
            "layer": nn.GRU(i, h, batch_first=True),
            "behind": nn.Linear(h, h),
        },
        on_packed_rows,
        (x, LENGTHS),
    ),
    "sorted by the user": (
        lambda: {"before": nn.Linear(i, i), "layer": nn.RNN(i, h, batch_first=True)},
        sorted_by_user,
        (x, LENGTHS),
    ),
    "checkpointed": (
        lambda: {"layer": nn.GRU(i, h, batch_first=True)},
        checkpointed,
        (x, LENGTHS),
    ),
    "function": (
        lambda: {
            "w_ih": nn.Parameter(normal(9, i, seed=3)),
            "w_hh": nn.Parameter(normal(9, h, seed=4)),
            "b_ih": nn.Parameter(normal(9, seed=5)),
            "b_hh": nn.Parameter(normal(9, seed=6)),
            "start": nn.Parameter(normal(1, 1, h, seed=7)),
        },
        by_function,
        x,
    ),
}


def made(name: str) -> tuple[nn.Module, Any, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    parts, run, X = CASES[name]
    model = Written(
        lambda m, X: m.head(m.drop(run(m, X))),
        **parts(),
        drop=nn.Dropout(0.3),
        head=nn.Linear(h, 2),
    )
    options = {"batch_size_fn": lambda X: len(X[0])} if isinstance(X, tuple) else {}
    return model.double(), X, torch.arange(N) % 2, options


def one_of(X: Any, n: int) -> Any:
    return tuple(t[n : n + 1] for t in X) if isinstance(X, tuple) else X[n : n + 1]


def rows_of(outputs: Any, params: Sequence[Tensor]) -> Tensor:
    """The gradient of each number."""
    rows = []
    for number in outputs:
        back = torch.autograd.grad(number, params, retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in back]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_examples_have_their_own_gradients(name: str) -> None:
    model, X, y, options = made(name)
    model.eval()
    params = [*model.parameters()]
    losses = [F.cross_entropy(model(one_of(X, n)), y[n : n + 1]) for n in range(N)]
    J = rows_of(losses, params)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)], **options)
    K = curvature(risk, DiagonalBlock, vectors=Empirical())
    close(K.diagonal(), J.square().mean(0))
    rows = [
        torch.cat([g.flatten(1) for g in part.values()], 1) for part in per_example_gradients(risk)
    ]
    close(torch.cat(rows), J)
    # No module runs again for single examples.
    assert risk.reads is None or not risk.reads.enclosing
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X, normal(N, 2, seed=9))], **options)
    exact = rows_of(torch.cat([model(one_of(X, n)).flatten() for n in range(N)]), params)
    close(curvature(risk, DiagonalBlock, vectors=Exact()).diagonal(), exact.square().sum(0) / N)


@pytest.mark.parametrize("name", CASES)
def test_all_layers_are_preconditioned_in_training(name: str) -> None:
    """With dropout, nothing can be run again for single examples; the statistics are those of the
    pass.
    """
    model, X, y, options = made(name)
    model.train()
    optimizer = KFACOptimizer(
        model,
        nn.CrossEntropyLoss(),
        lr=0.1,
        approximation=DiagonalBlock,
        vectors=Empirical(),
        decay=1e-12,
        **options,
    )
    F.cross_entropy(model(X), y).backward()
    optimizer.step()
    # The first batch is recorded in a pass of its own.
    with optimizer.paused():
        torch.manual_seed(5)
        J = rows_of(F.cross_entropy(model(X), y, reduction="none"), [*model.parameters()])
    torch.manual_seed(5)
    F.cross_entropy(model(X), y).backward()
    optimizer.curvature.refresh()
    assert not optimizer.curvature.withdrawn
    close(optimizer.curvature.operator.diagonal(), J.square().mean(0))


def test_a_penalty_on_the_weights_is_another_read() -> None:
    """The layer runs again then: its weights are read by more than the recurrence."""

    class Penalized(nn.LSTM):
        def forward(self, input: Any, hx: Any = None) -> Any:
            out, _ = super().forward(input, hx)
            weight: Any = self.weight_hh_l0
            return out[:, -1] * weight.square().sum()

    torch.manual_seed(0)
    model = nn.Sequential(Penalized(i, h, batch_first=True), nn.Linear(h, 2)).double()
    data = [(x, normal(N, 2, seed=9))]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), DiagonalBlock)
    exact = rows_of(model(x).flatten(), [*model.parameters()])
    close(K.diagonal(), exact.square().sum(0) / N)


def test_dropout_between_layers_is_named() -> None:
    """It happens inside the function, where its mask isn't seen."""

    class Passing(nn.GRU):
        def forward(self, input: Any, hx: Any = None) -> Any:
            return super().forward(input, hx)[0][:, -1]

    model = nn.Sequential(Passing(i, h, 2, dropout=0.5, batch_first=True), nn.Linear(h, 2))
    optimizer = KFACOptimizer(model.double().train(), nn.MSELoss())
    with pytest.warns(UserWarning, match="draws random numbers.*without preconditioner"):
        F.mse_loss(model(x), normal(N, 2, seed=9)).backward()
    optimizer.step()
    assert optimizer.curvature.withdrawn == ["0"]
