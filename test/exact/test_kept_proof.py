"""Kept linearisations: what the proof that a forward pass is the same must notice, and what is held."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import close
from helpers import F64, normal
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import EmpiricalRisk
from curvlinops_plus.exact import GGN
from curvlinops_plus.exact.batched import add_vjp
from curvlinops_plus.exact.kept_graph import kept_graph

OUTSIDE: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _outside() -> None:
    OUTSIDE.clear()
    OUTSIDE.update(scale=1.0, results=[])


class Net(nn.Module):
    """Two layers, with a function in front of them and one between."""

    def __init__(self, before: Any = None, between: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.before, self.between, self.table = before, between, torch.ones(5, dtype=F64)
        self.array = torch.ones(5, dtype=F64).numpy()
        self.shared = torch.from_numpy(self.array)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.before(x) if self.before else x))
        return self.second(self.between(self, h) if self.between else h)


def lists() -> list[Any]:
    return [(normal(n, 4, seed=n), torch.arange(n) % 3) for n in (6, 4, 5)]


def operator(model: nn.Module, data: Any = None, kept: int | None = 2**28) -> tuple[GGN, Tensor]:
    risk = EmpiricalRisk(model.double(), nn.CrossEntropyLoss(), data or lists(), check=False)
    G = GGN(risk, check_deterministic=False, max_kept_bytes=kept)
    return G, normal(G.shape[1])


def stay(G: GGN) -> int:
    assert G._linear.kept is not None
    return len(G._linear.kept._kept)


def after(model: nn.Module, change: Callable[[], object], data: Any = None) -> tuple[Tensor, int]:
    """A product after a change, compared with that of a new operator; and how much changed."""
    G, v = operator(model, data)
    for _ in range(3):
        before = G @ v
    held = stay(G)
    change()
    found, (plain, _) = G @ v, operator(model, data, kept=0)
    close(found, plain @ v, 1e-12)
    return (found - before).norm() / before.norm(), held


@torch.library.custom_op("curvlinops_plus_test::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * OUTSIDE["scale"]


def seen_by_modes(x: Tensor) -> Tensor:
    if has_torch_function((x,)):
        return handle_torch_function(seen_by_modes, (x,), x)  # type: ignore[no-any-return]
    return x * OUTSIDE["scale"]


def noisy(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(int(OUTSIDE["scale"]))
        return x * torch.empty(4, dtype=F64).uniform_()


def packed(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return x.sin()


@pytest.mark.parametrize("before", [scaled, torch.ops.curvlinops_plus_test.scaled, seen_by_modes, noisy])
def test_operations_that_read_what_calls_do_not_tell(before: Any) -> None:
    changed, held = after(Net(before), lambda: OUTSIDE.update(scale=2.0))
    assert changed > 0.01
    assert not held


def test_hooks_of_saved_tensors_and_tensors_from_elsewhere_are_not_kept() -> None:
    """Code that makes tensors and is no PyTorch can't be given tensors without numbers."""
    OUTSIDE["factor"] = torch.full((5,), 2.0, dtype=F64)
    for model in (Net(packed), Net(between=lambda net, h: h * OUTSIDE["factor"])):
        assert not after(model, lambda: None)[1]


def test_memory_that_was_replaced_and_written_to() -> None:
    """The new memory holds the same numbers; that in the graph doesn't any more."""
    table, weight = Net(between=lambda net, h: h * net.table), Net()

    def replace_table() -> None:
        old = table.table
        table.table = old.clone()
        old.data.mul_(3)

    def replace_weight() -> None:
        old = weight.second.weight.data
        weight.second.weight.data = old.clone()
        old.mul_(3)

    for model, change in ((table, replace_table), (weight, replace_weight)):
        changed, held = after(model, change)
        assert changed < 1e-12
        assert held == 3


def test_tensors_that_a_forward_pass_writes_to_unseen() -> None:
    values = [1.0, 2.0]

    def between(net: Net, h: Tensor) -> Tensor:
        for value in (values[0], values[1]):
            net.array[:] = value
            h = h * net.shared.clone()
        net.array[:] = values[0]
        return h

    changed, _ = after(Net(between=between), lambda: values.__setitem__(1, 5.0))
    assert changed > 0.01


def test_results_that_somebody_keeps() -> None:
    """Who holds a result of the forward pass may write to what the graph saved."""

    def between(net: Net, h: Tensor) -> Tensor:
        OUTSIDE["results"].append(h)
        return h

    def write() -> None:
        for h in OUTSIDE["results"]:
            h.data.mul_(2)

    changed, held = after(Net(between=between), write)
    assert changed < 1e-12
    assert not held


def test_parts_of_functions_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention(Net):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = (x[:, None] + torch.arange(3)[None, :, None]).sin()
            return super().forward(self.attention(x, x, x)[0].sum(1))

    softmax = nn.functional.softmax
    changed, held = after(
        Attention(), lambda: monkeypatch.setattr(nn.functional, "softmax", lambda x, dim=-1: softmax(3 * x, dim))
    )
    assert changed > 1e-3
    assert held == 3


def test_dropout_that_is_off_may_stay() -> None:
    assert after(Net(nn.Dropout(0.5)).eval(), lambda: None)[1] == 3


def test_batches_that_hold_other_objects() -> None:
    class Pair:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    data = [((X, Pair(X)), y) for X, y in lists()]
    risk = EmpiricalRisk(
        Net(lambda pair: pair[1].x).double(),
        nn.CrossEntropyLoss(),
        data,
        batch_size_fn=lambda X: len(X[0]),
        check=False,
    )
    G = GGN(risk, check_deterministic=False, max_kept_bytes=2**28)
    v = normal(G.shape[1])
    for _ in range(3):
        close(G @ v, GGN(risk, check_deterministic=False, max_kept_bytes=0) @ v)
    assert not stay(G)


# ------------------------------------------------------------------------------------------------------------- memory
def wide() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        torch.randn(256, 64),
        torch.arange(256) % 10,
    )


def test_only_activations_stay() -> None:
    """Gradients of layers don't, nor a copy of the data; what a loader makes is counted."""
    model, X, y = wide()
    small = 3 * 256 * 10 * 4  # outputs
    sizes = []
    for data in ([(X, y)], DataLoader(TensorDataset(X, y), 256)):
        G = GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), max_kept_bytes=2**28)
        v = torch.randn(G.shape[1])
        for _ in range(2):
            _ = G @ v
        assert stay(G) == 1
        sizes.append(G._linear.kept._held)  # type: ignore[union-attr]
    activations = 256 * 128 * 4
    assert activations <= sizes[0] < activations + small
    assert X.nbytes + activations <= sizes[1] < X.nbytes + activations + small + y.nbytes


def test_a_formula_that_needs_a_dropped_tensor_gives_no_number() -> None:
    """A derivative by something else than `w` does."""
    W = normal(4, 3).requires_grad_()
    h = normal(5, 4).requires_grad_()
    graph = kept_graph([(h @ W).tanh()], [h, W])
    assert graph is not None
    edge = graph.back[1]
    assert edge is not None
    (by_w,) = torch.autograd.grad([edge], graph.w, [torch.ones_like(W)], retain_graph=True)
    (by_h,) = torch.autograd.grad([edge], [h], [torch.ones_like(W)], retain_graph=True)
    assert by_w.isfinite().all()
    assert not by_h.isfinite().any()
    J = torch.func.jvp(lambda W: (h @ W).tanh(), (W.detach(),), (torch.ones_like(W),))[1]
    close(by_w, J)


@pytest.mark.parametrize("dtypes", [(F64, F64), (F64, torch.float32)])
def test_parts_that_are_added_as_they_come(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b, unused = normal(3).to(dtypes[0]), normal(2, 2).to(dtypes[1]), normal(2)
    free = [t.requires_grad_() for t in (a, unused, b)]
    f, total = (a[:2].sin() @ b.double()).tanh(), normal(1, 9)
    u, before = normal(1, 2, seed=5), total.clone()
    parts = torch.autograd.grad([f], free, [u[0]], retain_graph=True, allow_unused=True)
    flat = torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(parts, free, strict=True)])
    assert add_vjp([f], free, [u], total) is total
    close(total, before + flat, 1e-7 if torch.float32 in dtypes else 1e-12)
    assert all(p.grad is None for p in free)


def test_peak_memory_of_products_is_a_few_vectors() -> None:
    """The second product, which makes linearisations, takes little more than others."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 10))
    data = [(torch.randn(64, 1024), torch.arange(64) % 10) for _ in range(3)]
    G = GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), max_kept_bytes=2**24)
    vector = 4 * G.shape[1]
    peaks = [_peak(G) / vector for _ in range(4)]
    assert stay(G) == 3
    assert max(peaks) < 3.2
    assert max(peaks[2:]) < 2.0


def _peak(G: GGN) -> float:
    """The most that was allocated at once in a product."""
    v = torch.randn(G.shape[1])
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _ = G @ v
    held = peak = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return float(peak)


@pytest.mark.parametrize("how", ["frozen", "left out"])
def test_a_module_with_a_parameter_of_its_own_beside_the_operator_s(how: str) -> None:
    model = Net().double()
    if how == "frozen":
        model.first.weight.requires_grad_(False)
    params = [p for p in model.parameters() if p is not model.first.weight]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(normal(6, 4), torch.arange(6) % 3)], params=params)
    G, plain = GGN(risk, max_kept_bytes=2**28), GGN(risk)
    for seed in range(3):
        v = normal(G.shape[1], seed=seed)
        close(G @ v, plain @ v)
    kept = G._linear.kept
    assert kept is not None
    assert len(kept._kept) == 1
    with torch.no_grad():
        model.first.weight.mul_(1.5)
    close(G @ v, plain @ v)
