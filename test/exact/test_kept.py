"""Linearisations that stay between products: the same numbers, never those of another model or other data."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FEW, close, problem, unchanged
from helpers import F64, normal
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    EFLinearOperator,
    EmpiricalRisk,
    FisherMCLinearOperator,
    GGNLinearOperator,
    MonteCarlo,
)
from curvlinops_plus.exact import GGN, Jacobian
from curvlinops_plus.exact import kept as kept_module
from curvlinops_plus.exact.program import fingerprint


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def batches() -> list[Any]:
    return [(normal(n, 4, seed=n), torch.arange(n) % 3) for n in (6, 4, 5)]


def operator(model: nn.Module, data: Any, loss: Any = None, **options: Any) -> GGN:
    options = {"max_kept_bytes": 2**28, **options}
    return GGN(EmpiricalRisk(model, loss or nn.CrossEntropyLoss(), data), **options)


def held(G: GGN) -> int:
    kept = G._linear.kept
    return 0 if kept is None else len(kept._kept)


def without(G: GGN, v: Tensor) -> Tensor:
    """The product of an operator that keeps nothing."""
    return GGN(G.risk, G.vectors, max_kept_bytes=0) @ v


def prepared(model: nn.Module, data: Any, loss: Any = None, **options: Any) -> tuple[GGN, Tensor]:
    """An operator that keeps linearisations, and a vector."""
    G = operator(model, data, loss, **options)
    v = normal(G.shape[1])
    for _ in range(3):
        close(G @ v, without(G, v))
    assert held(G)
    return G, v


@pytest.mark.parametrize("name", FEW)
def test_products_stay_the_same(name: str) -> None:
    p = problem(name)
    dense = p.exact.ggn()
    with unchanged(p.model, p.loss, p.data):
        G = GGN(p.risk(), max_kept_bytes=2**28)
        for seed in range(5):
            v = normal(len(dense), seed=seed)
            close(G @ v, dense @ v)
        V = torch.stack([v, torch.ones_like(v)], 1)
        close(G @ V, dense @ V)
        close(G @ V[:, 1], dense @ V[:, 1])
        close(G.to_dense(), dense)


class _Watch(TorchDispatchMode):
    """Notes every operation that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "_in_modes", lambda: False)  # the watch is one
    G, v = prepared(net(), batches())
    norm = torch.ops.aten.native_layer_norm.default
    with _Watch() as kept:
        _ = G @ v
    with _Watch() as plain:
        _ = without(G, v)
    assert held(G) == 3
    assert norm in plain.seen
    assert norm not in kept.seen


def test_draws_are_those_of_other_products() -> None:
    G, v = prepared(net(), batches(), vectors=MonteCarlo(2, 5))
    close(G @ v, G.to_dense() @ v)


class _Scaled(nn.Module):
    """Reads things that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.table = net(), 2.0, torch.ones(3, dtype=F64)
        self.options = {"power": 1, "limit": 1.5, "many": 9, "top": 1e3}
        self.register_buffer("shift", torch.zeros(3, dtype=F64))
        self.register_buffer("mixing", torch.eye(3, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        f = self.layer(x) * self.scale * self.table + self.shift  # type: ignore[operator]
        f = torch.where(x[:, :1] > self.options["limit"], f * f.cos(), f)
        if len(x) > self.options["many"]:
            f = f.tanh()
        if float(f.detach().max()) > self.options["top"]:
            f = f / 2
        if self.layer[0].weight.requires_grad:
            f = f + f.square()
        with torch.set_grad_enabled(SWITCHES["graph"]):
            gate = f.sigmoid()
        mixed = f @ self.mixing
        f = f * gate + (f.detach() if SWITCHES["detach"] else f) + mixed + torch.tensor([0.1, 0.2, 0.3])
        return f.tanh() ** self.options["power"]


SWITCHES = {"graph": True, "detach": False}


def _halve(t: Tensor) -> None:
    with torch.no_grad():
        t.mul_(0.5)


def _behind(t: Tensor) -> None:
    t.data.mul_(1 + 1e-12)


def _swap(t: Tensor) -> None:
    t.data.copy_(t.data.flip(0))


def _assign(model: Any) -> None:
    model.layer[0].weight.data = model.layer[0].weight.data * 2


def _replace(model: Any) -> None:
    model.layer[0].bias = nn.Parameter(model.layer[0].bias.detach() + 1)


def _perturbed(model: nn.Module) -> dict[str, Tensor]:
    return {name: 1.1 * t for name, t in model.state_dict().items() if name.startswith("layer.0")}


CHANGES: dict[str, Callable[[Any, list[Any], Any], object]] = {
    "parameter": lambda model, data, loss: _halve(model.layer[0].weight),
    "parameter through data": lambda model, data, loss: _halve(model.layer[3].bias.data),
    "last bit of a parameter": lambda model, data, loss: _behind(model.layer[0].weight),
    "order within a parameter": lambda model, data, loss: _swap(model.layer[0].weight),
    "data of a parameter": lambda model, data, loss: _assign(model),
    "buffer": lambda model, data, loss: _halve(model.shift.add_(2)),
    "buffer through data": lambda model, data, loss: model.shift.data.add_(1),
    "attribute": lambda model, data, loss: setattr(model, "scale", 3.0),
    "entry of a dict": lambda model, data, loss: model.options.update(power=2),
    "order within a buffer": lambda model, data, loss: model.mixing.data.copy_(model.mixing.roll(1, 0)),
    "limit that one example passes": lambda model, data, loss: model.options.update(limit=1.0),
    "limit of the number of examples": lambda model, data, loss: model.options.update(many=5),
    "limit of a computed number": lambda model, data, loss: model.options.update(top=0.5),
    "requires_grad": lambda model, data, loss: model.layer[0].weight.requires_grad_(False),
    "part without a graph": lambda model, data, loss: SWITCHES.update(graph=False),
    "detached part": lambda model, data, loss: SWITCHES.update(detach=True),
    "default dtype": lambda model, data, loss: torch.set_default_dtype(torch.float64),
    "other parameters": lambda model, data, loss: model.load_state_dict(_Scaled().state_dict() | _perturbed(model)),
    "tensor that is no buffer": lambda model, data, loss: _halve(model.table),
    "module": lambda model, data, loss: model.layer.__setitem__(1, nn.Sigmoid()),
    "hook": lambda model, data, loss: model.layer[1].register_forward_hook(lambda m, args, out: out * 2),
    "hook that changes derivatives alone": lambda model, data, loss: model.layer[0].register_forward_hook(
        lambda m, args, out: out / 2 + out.detach() / 2
    ),
    "forward": lambda model, data, loss: setattr(model.layer[1], "forward", torch.sin),
    "loss weight": lambda model, data, loss: _halve(loss.weight[:1]),
    "ignored class": lambda model, data, loss: setattr(loss, "ignore_index", 1),
    "input": lambda model, data, loss: _halve(data[1][0]),
    "input through data": lambda model, data, loss: data[2][0].data.mul_(1 + 1e-12),
    "target": lambda model, data, loss: data[1][1].fill_(2),
    "another batch": lambda model, data, loss: data.__setitem__(1, (normal(4, 4, seed=9), data[1][1])),
    "order of batches": lambda model, data, loss: data.reverse(),
    "a batch more": lambda model, data, loss: data.append((normal(4, 4, seed=9), torch.arange(4) % 3)),
    "a batch less": lambda model, data, loss: data.pop(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_products(name: str) -> None:
    model, data, loss = _Scaled().double(), batches(), nn.CrossEntropyLoss(weight=normal(3).abs())
    G, v = prepared(model, data, loss)
    before, switches, dtype = G @ v, dict(SWITCHES), torch.get_default_dtype()
    try:
        CHANGES[name](model, data, loss)
        risk = EmpiricalRisk(model, loss, data, params=list(model.parameters()))
        expected = GGN(risk, max_kept_bytes=0) @ v
        for _ in range(4):
            close(G @ v, expected, 1e-13)
    finally:
        SWITCHES.update(switches)
        torch.set_default_dtype(dtype)
    if name == "default dtype":
        assert float((before - expected).norm() / before.norm()) > 1e-9
    elif name not in ("last bit of a parameter", "input through data", "order of batches", "requires_grad"):
        assert float((before - expected).norm() / before.norm()) > 1e-4


def test_values_in_numpy_memory() -> None:
    X = normal(6, 4)
    array = X.numpy()
    G, v = prepared(net(), [(torch.from_numpy(array), torch.arange(6) % 3)])
    array[:] = array[::-1].copy() * 0.3
    close(G @ v, without(G, v))


def test_a_function_that_reads_a_global() -> None:
    rate = {"a": 1.0}
    W = {"w": normal(4, 3)}
    risk = EmpiricalRisk(_Function(W, rate), nn.MSELoss(), [(normal(5, 4), normal(5, 3, seed=1))])
    G, v = GGN(risk, max_kept_bytes=2**28), normal(12)
    for a in (1.0, 1.0, 1.0, 1 + 1e-9, 2.0):
        rate["a"] = a
        close(G @ v, GGN(risk, max_kept_bytes=0) @ v, 1e-13)


class _Function(nn.Module):
    def __init__(self, W: dict[str, Tensor], rate: dict[str, float]) -> None:
        super().__init__()
        self.w, self.rate = nn.Parameter(W["w"]), (rate,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.rate[0]["a"] * x @ self.w)


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.AlphaDropout(0.3)], ids=["dropout", "alpha dropout"])
def test_random_models_draw_again(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 30), module, nn.Linear(30, 3)).double().train()
    G = operator(model, batches(), check_deterministic=False)
    v, products = normal(G.shape[1]), []
    for seed in range(4):
        torch.manual_seed(seed)
        products.append(G @ v)
        torch.manual_seed(seed)
        close(products[-1], GGN(G.risk, check_deterministic=False, max_kept_bytes=0) @ v)
    assert not held(G)


def test_models_whose_parameters_change_in_each_product() -> None:
    model = net()
    G, v = operator(model, batches()), normal(53)
    for step in range(8):
        close(G @ v, without(G, v))
        if step % 2:
            _halve(model[0].weight)
    assert not held(G) or G._linear.kept._patience > 1  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["convolution", "checkpointing", "gate", "batch norm"])
def test_what_is_not_kept(kind: str) -> None:
    """Convolutions would be slower; the others must be run as they are."""
    torch.manual_seed(0)
    model: nn.Module = {
        "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten()),
        "checkpointing": _Checkpointed,
        "gate": _Gate,
        "batch norm": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    }[kind]()
    G = operator(model.double(), batches())
    v = normal(G.shape[1])
    for _ in range(4):
        close(G @ v, without(G, v))
    assert not held(G)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class _Gate(_Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        f = self.inner(x)
        with torch.no_grad():
            gate = f.sigmoid()
        return f * gate


class _Forgetful(torch.autograd.Function):
    """`x²`, with tangents, whose backward pass has no derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return 2 * g[0] * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return 2 * tangents[0] * ctx.saved_tensors[0]


def test_a_backward_pass_without_a_derivative_is_not_kept() -> None:
    class Net(_Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner[3](_Forgetful.apply(self.inner[0](x)))

    model = Net().double()
    G = operator(model, batches())
    v = normal(G.shape[1])
    for _ in range(4):
        close(G @ v, without(G, v))
    assert G._linear.mode.right
    assert not held(G)


def test_memory_is_bounded() -> None:
    model = net()
    data = batches() * 4
    G, v = prepared(model, data)
    whole = G._linear.kept._held  # type: ignore[union-attr]
    assert held(G) == 12
    for share in (0.5, 0.2, 0.01):
        G = operator(model, data, max_kept_bytes=int(share * whole))
        for _ in range(4):
            close(G @ v, without(G, v))
        assert G._linear.kept._held <= share * whole  # type: ignore[union-attr]
        assert (held(G) > 0) == (share > 0.1)


def test_what_is_held_is_counted() -> None:
    """Storages that appear with a linearisation, against the bytes that it says."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)])
    G = operator(model, [(torch.randn(200, 64), torch.randint(64, (200,)))])
    v = torch.randn(G.shape[1])
    _ = G @ v
    gc.collect()
    before = _resident()
    _ = G @ v
    gc.collect()
    said = G._linear.kept._held  # type: ignore[union-attr]
    assert said > 200 * 64 * 4 * 8
    assert _resident() - before < 3 * said + 2**24


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_loaders_and_copies() -> None:
    X, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    loader = DataLoader(TensorDataset(X, y), 4)
    G, v = prepared(net(), loader)
    assert held(G) == 4
    for twin in (pickle.loads(pickle.dumps(G)), copy.deepcopy(G)):
        assert not held(twin)
        close(twin @ v, G @ v)
    shuffled = DataLoader(TensorDataset(X, y), 4, shuffle=True)
    S = operator(net(), shuffled)
    for _ in range(4):
        close(S @ v, G @ v)


def test_nothing_is_kept_on_request() -> None:
    G = operator(net(), batches(), max_kept_bytes=0)
    for _ in range(4):
        _ = G @ normal(G.shape[1])
    assert not held(G)


@pytest.mark.parametrize(
    "how", ["attribute", "hook", "hook everywhere", "own backward pass", "hook of a tensor", "data", "pointer"]
)
def test_what_calls_do_not_tell_is_not_kept(how: str) -> None:
    """What is left in the model, or done in a backward pass, may be anything."""
    model = _Silent(how).double()
    G = operator(model, batches())
    v = normal(G.shape[1])
    handle = model.inner[0].register_forward_hook(lambda m, args, out: None) if how == "hook" else None
    if how == "hook everywhere":
        handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: None)
    for _ in range(4):
        close(G @ v, without(G, v))
    assert not held(G)
    if handle is not None:
        handle.remove()
        _ = G @ v, G @ v
        assert held(G)


class _Silent(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = net(), how

    def forward(self, x: Tensor) -> Tensor:
        f = self.inner(x)
        if self.how == "attribute":
            self.last = [f]
        if self.how == "own backward pass":
            f = _Identity.apply(f)
        if self.how == "hook of a tensor" and f.requires_grad:
            f.register_hook(lambda g: g)
        if self.how == "pointer":  # for code that is no PyTorch: in another pass that memory is somebody else's
            assert f.detach().data_ptr()
        return f + 0 * f.data if self.how == "data" else f


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].clone()


def test_a_part_that_loses_its_graph_between_products() -> None:
    """Tangents pass through `no_grad`, so forward mode is right for a model only as long as it has the same graph."""

    class Gated(_Checkpointed):
        open = True

        def forward(self, x: Tensor) -> Tensor:
            f = self.inner(x)
            with torch.set_grad_enabled(self.open):
                gate = f.sigmoid()
            return f * gate

    model = Gated().double()
    for V in (normal(53), normal(53, 2), torch.ones(53, dtype=F64)):
        model.open = True
        G = operator(model, batches(), max_kept_bytes=0)
        for model.open in (True, False, True):
            close(G @ V, operator(model, batches()).to_dense() @ V)


def test_modes_of_the_caller_and_other_threads() -> None:
    G, v = prepared(net(), batches())
    expected, found = without(G, v), []
    with torch.inference_mode():
        close(G @ v, expected)
    with torch.no_grad():
        close(G @ v, expected)
    threads = [threading.Thread(target=lambda: found.append(G @ v)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for product in found:
        close(product, expected)
    assert len(found) == held(G) == 3


def test_autocast_and_precision_of_the_model() -> None:
    class Cast(nn.Module):
        enabled = False

        def __init__(self) -> None:
            super().__init__()
            self.inner = net().float()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
                return self.inner(x).float()

    model = Cast()
    G = operator(model, [(X.float(), y) for X, y in batches()])
    v = torch.randn(53)
    for _ in range(3):
        _ = G @ v
    assert held(G)
    before, model.enabled = G @ v, True
    after = G @ v
    assert not held(G)
    assert float((after - before).norm() / before.norm()) > 1e-4


@pytest.mark.parametrize("given", [-1, 1.5, True, "64 MiB"])
def test_a_budget_that_is_none(given: Any) -> None:
    model = net()
    with pytest.raises(ValueError, match=r"max_kept_bytes=.* must be an integer of at least 0"):
        operator(model, batches(), max_kept_bytes=given)
    for kind in (GGNLinearOperator, EFLinearOperator, FisherMCLinearOperator):
        params = list(model.parameters())
        with pytest.raises(ValueError, match="max_kept_bytes"):
            kind(model, nn.CrossEntropyLoss(), params, batches(), max_kept_bytes=given)
        assert kind(model, nn.CrossEntropyLoss(), params, batches(), max_kept_bytes=5)._linear.kept.max_bytes == 5


@pytest.mark.parametrize("columns", [2, 5])
@pytest.mark.parametrize("budget", [0, 2**28])
def test_several_columns(columns: int, budget: int) -> None:
    G = operator(net(), batches(), max_kept_bytes=budget)
    dense, V = G.to_dense(), normal(G.shape[1], columns)
    for X in (V, V, torch.eye(len(V), dtype=F64), V[:, 0], V):
        close(G @ X, dense @ X)
    assert held(G) == (3 if budget else 0)


# ------------------------------------------------------------------------------------- found by an independent reading
def _steps(G: GGN, change: Any, v: Tensor) -> Tensor:
    for _ in range(3):
        _ = G @ v
    change()
    return G @ v


def test_nothing_stays_by_default() -> None:
    G = GGN(operator_of(nn.Linear(4, 3).double()).risk)
    assert not G._linear.kept._useful


def operator_of(model: nn.Module, X: Tensor | None = None, **options: Any) -> GGN:
    torch.manual_seed(0)
    X = torch.randn(6, 4).double() if X is None else X
    return GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, torch.arange(6) % 3)]), **options)


KEEPING = {"max_kept_bytes": 2**28}


def test_attributes_of_tensors() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * getattr(x, "factor", 1.0))

    torch.manual_seed(0)
    model, X, v = Weighted().double(), torch.randn(6, 4).double(), normal(15)
    X.factor = 3.0
    G = operator_of(model, X, check_deterministic=False, **KEEPING)
    found = [G @ v for _ in range(4)]
    expected = operator_of(model, X, check_deterministic=False) @ v
    for one in found:
        close(one, expected, 1e-12)


@pytest.mark.parametrize("draw", ["fork_rng", "get_rng_state"])
def test_random_numbers_of_a_state_that_is_restored(draw: str) -> None:
    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seed = nn.Linear(4, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            if draw == "fork_rng":
                with torch.random.fork_rng():
                    torch.manual_seed(self.seed)
                    noise = torch.randn(4)
            else:
                state = torch.get_rng_state()
                torch.manual_seed(self.seed)
                noise = torch.randn(4)
                torch.set_rng_state(state)
            return self.linear(x * noise.to(x))

    torch.manual_seed(0)
    model, v = Seeded().double(), normal(15)
    G = operator_of(model, check_deterministic=False, **KEEPING)
    found = _steps(G, lambda: setattr(model, "seed", 1), v)
    close(found, operator_of(model, check_deterministic=False) @ v, 1e-12)


def test_masks_of_equal_counts_have_other_fingerprints() -> None:
    prints, low = fingerprint, torch.finfo(torch.float32).min
    for shape in ((4, 8), (2, 1, 1, 16), (128, 128)):
        seen = set()
        for seed in range(20):
            flat = torch.zeros(math.prod(shape))
            flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))[: len(flat) // 2]] = low
            seen.add(str(prints(flat.view(shape))))
        assert len(seen) == 20
    for length in (2, 18, 1850, 2974):
        x = torch.ones(length, dtype=F64)
        assert len({str(prints(t)) for t in (x, -x, 2 * x, 16 * x, x.cumsum(0), x.cumsum(0).flip(0))}) == 6
    big = torch.arange(8) + 2**60
    assert prints(big) != prints(big.flip(0))


def test_writes_that_leave_the_numbers_as_they_are() -> None:
    torch.manual_seed(0)
    model, v = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), normal(43)
    G = operator_of(model, **KEEPING)
    state = copy.deepcopy(model.state_dict())
    expected = operator_of(model) @ v
    for _ in range(5):
        close(G @ v, expected, 1e-12)
        model.load_state_dict(state)


def test_modes_of_the_user() -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return 2 * out if func is nn.functional.linear else out

    torch.manual_seed(0)
    model, v = nn.Linear(4, 3).double(), normal(15)
    G = operator_of(model, check_deterministic=False, **KEEPING)
    for _ in range(3):
        _ = G @ v
    with Doubled():
        close(G @ v, operator_of(model, check_deterministic=False) @ v, 1e-12)


class Branching(nn.Module):
    """Another factor in large batches: computed without gradients, where it is a constant in small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o, self.always = nn.Linear(4, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if len(x) > 6 or self.always:
            with torch.no_grad():
                factor = h.abs().mean() + 1
        else:
            factor = torch.ones((), dtype=h.dtype)
        return self.o(h * factor)


@pytest.mark.parametrize("options", [{}, KEEPING], ids=["", "kept"])
@pytest.mark.parametrize("columns", [1, 3])
def test_a_branch_without_gradients_of_the_same_graph(options: dict[str, Any], columns: int) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(n, 4).double(), torch.arange(n) % 3) for n in (5, 9)]
    model, V = Branching().double(), torch.randn(43, columns).double()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, check=False)
    G, J = GGN(risk, check_deterministic=False, **options), Jacobian(risk, check_deterministic=False)
    dense = GGN(risk, check_deterministic=False).to_dense()
    for _ in range(4):
        close(G @ V, dense @ V, 1e-12)
        close(J @ V, J.T.to_dense().T @ V, 1e-12)
