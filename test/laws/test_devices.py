"""Nothing is mixed up between devices, and no layer by itself waits for one.

**Another device**, which no machine has to have: tensors there are those of PyTorch's meta device,
which have shapes and no numbers. A dispatch mode keeps numbers for them in main memory, computes
with these, and refuses operations on tensors of both devices as a GPU does. So what is computed is
also compared with what the CPU computes.

**Waiting**: on a GPU the host runs ahead and queues work; a number that it reads (`bool(t)`,
`t.item()`, `t.tolist()`, indexing with a mask, a copy between devices) makes it wait until all of
that is done. Such readings are the same operations on every device, so they are counted on the CPU,
too, by the batch in which they happen: a sweep has as many in a deep network as in a shallow one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    TNT,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    FullBlock,
    GGNFactor,
    Hessian,
    KFACOptimizer,
    Laplace,
    MonteCarlo,
    curvature,
    hutchinson_trace,
    prune,
)
from curvlinops_plus.layer.patches import _taps as taps_of_convolutions
from curvlinops_plus.linalg import HeuristicDamping
from test.gpu import emulator

pytestmark = pytest.mark.filterwarnings("ignore::curvlinops_plus.errors.CurvatureWarning")


# ------------------------------------------------------------------------------- networks and tasks
def convolutions(depth: int) -> nn.Module:
    hidden = [
        layer
        for _ in range(depth)
        for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh())
    ]
    last = [nn.Conv2d(3, 3, 2, stride=2, groups=3), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 3, 3, padding=1), *hidden, *last
    ).eval()


class Mixed(nn.Module):
    """Embedding, attention, norms and positions, with logits `[N, C, T]`."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(depth)]
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token((x[:, 0].abs() * 2).long().clamp(max=6))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        for mlp in self.mlps:
            h = h + mlp(h)
        return self.head(h.mean(1))


MODELS: dict[str, Callable[[int], nn.Module]] = {"convolutions": convolutions, "attention": Mixed}
Made = Sequence[Tensor] | Tensor


def _products(operator: Callable[[EmpiricalRisk], Any]) -> Callable[[EmpiricalRisk], Made]:
    def run(risk: EmpiricalRisk) -> Made:
        A = operator(risk)
        v = torch.linspace(-1, 1, A.shape[1], dtype=A.dtype, device=A.device)
        return [A @ v, A @ v, A @ torch.stack([v, v + 1], 1)]

    return run


def _blocks(approximation: Any, vectors: Any = "mc") -> Callable[[EmpiricalRisk], Made]:
    return _products(lambda risk: curvature(risk, approximation, vectors=vectors))


def _listen(
    approximation: Any, vectors: Any, refresh: bool = False
) -> Callable[[EmpiricalRisk], Made]:
    def estimated(risk: EmpiricalRisk) -> Any:
        loss = risk.losses[0].loss
        estimator = CurvatureEstimator(
            EmpiricalRisk(risk.model, loss, ()), approximation, vectors=vectors, decay=0.9
        )
        for X, y in risk.data:
            with estimator.listen((X, y)):
                value = loss(risk.model(X), y)
            value.backward()
            if refresh:
                estimator.refresh(0.1)
        return estimator.operator

    return _products(estimated)


def _train(risk: EmpiricalRisk) -> Made:
    model, loss = risk.model, risk.losses[0].loss
    for module in model.modules():
        module.training = not isinstance(module, nn.BatchNorm2d)
    optimizer = KFACOptimizer(model, loss, lr=1e-2, damping=1e-2)
    for X, y in risk.data:
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


TASKS: dict[str, Callable[[EmpiricalRisk], Made]] = {
    "gradient": lambda risk: [*risk.gradient().values()],
    "KFAC, Monte Carlo": _blocks(KFAC, MonteCarlo()),
    "KFAC, exact": _blocks(KFAC, Exact()),
    "KFAC, empirical": _blocks(KFAC, Empirical()),
    "EKFAC": _blocks(EKFAC, MonteCarlo()),
    "TNT": _blocks(TNT, MonteCarlo()),
    "diagonal": _blocks(DiagonalBlock, MonteCarlo()),
    "full": _blocks(FullBlock, MonteCarlo()),
    "damped inverse": _products(
        lambda risk: curvature(risk, KFAC, vectors=MonteCarlo()).inverse(damping=0.1)
    ),
    "inverse of factors": _products(
        lambda risk: curvature(risk, KFAC, vectors=MonteCarlo()).inverse(HeuristicDamping(0.1))
    ),
    "GGN": _products(GGN),
    "Fisher": _products(lambda risk: GGN(risk, MonteCarlo())),
    "Hessian": _products(Hessian),
    "GGN factor": _products(GGNFactor),
    "dense": lambda risk: [GGN(risk).to_dense(), curvature(risk, KFAC, vectors=Exact()).to_dense()],
    "trace": lambda risk: [torch.as_tensor(hutchinson_trace(GGN(risk), num_matvecs=3))],
    "estimator": _listen(KFAC, MonteCarlo()),
    "estimator, EKFAC": _listen(EKFAC, MonteCarlo()),
    "estimator, EKFAC, refreshed": _listen(EKFAC, MonteCarlo(), refresh=True),
    "optimizer": _train,
}


# ----------------------------------------------------------------------------------- another device
DEVICE = torch.device("meta")
# Operations that copy, or whose indices may be in main memory.
# In place, and of the form alone.
_FORMS = {"squeeze_", "unsqueeze_", "t_", "transpose_"}
_BETWEEN = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"}
# Operations whose results depend on numbers in number or size.
_SIZES = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}


class DevicesMixed(Exception):
    """An operation on tensors of two devices."""


class OtherDevice(TorchDispatchMode):
    """While active, tensors of the meta device have numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[
            int, tuple[Any, Tensor]
        ] = {}  # of each storage, which stays alive: bytes

    def numbers(self, x: Any) -> Any:
        """A tensor's numbers in main memory, where views stay views; all else as it is."""
        if isinstance(x, torch.device):
            return torch.device("cpu") if x == DEVICE else x
        if not isinstance(x, Tensor) or not x.is_meta:
            return x
        _, memory = self._memory[x.untyped_storage()._cdata]
        return memory.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def _keep(self, t: Any, numbers: Any) -> None:
        if (
            isinstance(t, Tensor)
            and (key := (storage := t.untyped_storage())._cdata) not in self._memory
        ):
            self._memory[key] = storage, torch.zeros(storage.nbytes(), dtype=torch.uint8)
            self.numbers(t).copy_(numbers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there, to = any(t.is_meta for t in tensors), kwargs.get("device")
        if not there and to != DEVICE:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        elsewhere = [
            t for t in tensors if not t.is_meta and t.ndim
        ]  # GPUs take numbers of main memory
        if there and elsewhere and name not in _BETWEEN:
            raise DevicesMixed(f"{func}: {[(t.device.type, *t.shape) for t in tensors]}")
        found = func(*tree_map(self.numbers, args), **tree_map(self.numbers, kwargs))
        if found is None:
            return None
        if name.endswith("_") and tensors:
            return func(*args, **kwargs) if name in _FORMS else args[0]
        if to not in (None, DEVICE) or not any(isinstance(t, Tensor) for t in tree_leaves(found)):
            return found
        if name == "_local_scalar_dense" or (name == "index" and not args[0].is_meta):
            return found
        out = found if name in _SIZES or elsewhere else func(*args, **kwargs)
        if [getattr(t, "shape", None) for t in tree_leaves(out)] != [
            getattr(t, "shape", None) for t in tree_leaves(found)
        ] or out is found:
            out = tree_map(
                lambda t: torch.empty_like(t, device=DEVICE) if isinstance(t, Tensor) else t, found
            )
        for t, r in zip(tree_leaves(out), tree_leaves(found), strict=True):
            self._keep(t, r)
        return out


def _of_plain_numbers(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor`, which fills memory unseen, in main memory first."""

    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        found = make(data, *args, **options)
        return found if device is None else found.to(device)

    return made


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherDevice:
    """The other device, which has autocast and all else that GPUs have and the meta device has
    not.
    """
    enabled, autocast, dtype, item = (
        torch.is_autocast_enabled,
        torch.autocast,
        torch.get_autocast_dtype,
        Tensor.__getitem__,
    )
    mode = OtherDevice()
    taps_of_convolutions.cache_clear()  # kept there by the device of another test

    def at(t: Tensor, index: Any) -> Tensor:  # a list of places becomes a tensor unseen
        return item(
            t,
            torch.tensor(index, device=t.device)
            if t.is_meta and isinstance(index, list)
            else index,
        )

    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda *k: False if k == ("meta",) else enabled(*k)
    )
    monkeypatch.setattr(
        torch, "autocast", lambda k, *a, **o: nullcontext() if k == "meta" else autocast(k, *a, **o)
    )
    monkeypatch.setattr(
        torch, "get_autocast_dtype", lambda k: torch.float16 if k == "meta" else dtype(k)
    )
    monkeypatch.setattr(torch, "from_dlpack", lambda t: t.detach().clone())
    monkeypatch.setattr(torch, "tensor", _of_plain_numbers(torch.tensor))
    monkeypatch.setattr(torch, "as_tensor", _of_plain_numbers(torch.as_tensor))
    monkeypatch.setattr(Tensor, "__getitem__", at)
    return mode


def made(model: str, batches: int = 2) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    network = MODELS[model](1).double().eval()
    return network, [
        (torch.randn(4, 4, 4, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(batches)
    ]


def moved(network: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    for module in network.modules():
        for key, p in module._parameters.items():
            module._parameters[key] = p if p is None else nn.Parameter(p.detach().to(DEVICE))
        for key, b in module._buffers.items():
            module._buffers[key] = b if b is None else b.to(DEVICE)
    return [(X.to(DEVICE), y.to(DEVICE)) for X, y in data]


@pytest.mark.one_in(3, all_of=("inverse of factors",))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TASKS)
def test_on_another_device(name: str, model: str, other: OtherDevice) -> None:
    network, data = made(model)
    expected = TASKS[name](EmpiricalRisk(network, nn.CrossEntropyLoss(), data))
    network, data = made(model)
    with other:
        found = TASKS[name](EmpiricalRisk(network, nn.CrossEntropyLoss(), moved(network, data)))
        found = [other.numbers(t.detach()) for t in found]
    for one, two in zip(found, expected, strict=True):
        assert float((one - two.detach()).norm()) <= 1e-9 * float(two.detach().norm()) + 1e-12


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [name for name in TASKS if name != "trace"])  # it is no tensor
def test_where_new_tensors_are_elsewhere(name: str, model: str) -> None:
    """After `torch.set_default_device` tensors are made where the model is, all the same."""
    network, data = made(model)
    risk = EmpiricalRisk(network, nn.CrossEntropyLoss(), data)
    expected = [t.detach().clone() for t in TASKS[name](risk)]
    network, data = made(model)
    with torch.device("meta"):
        found = TASKS[name](EmpiricalRisk(network, nn.CrossEntropyLoss(), data))
    for one, two in zip(found, expected, strict=True):
        assert float((one.detach() - two).norm()) <= 1e-12 * float(two.norm())


@pytest.mark.parametrize(
    "mix",
    [
        lambda a: a + torch.ones(3),
        lambda a: torch.stack([a, torch.ones(3)]),
        lambda a: a.index_select(0, torch.arange(2)),
        lambda a: a.mul_(torch.ones(3)),
    ],
)
def test_mixing_is_noticed(mix: Callable[[Tensor], Tensor], other: OtherDevice) -> None:
    with other:
        a = torch.ones(3, device=DEVICE)
        assert float((2 * a)[torch.arange(2)].sum()) == 4
        with pytest.raises(DevicesMixed):
            mix(a)


# ------------------------------------------------------------------------------------------ waiting
# Operations whose result the host needs, or whose size it has to know.
_READS = {"_local_scalar_dense", "is_nonzero", "equal", "allclose", *_SIZES}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
#: The batch in which readings are counted: three examples of the 1st, 2nd, 4th, ... are compared
#: with autograd.
COUNTED = 2


class Readings(TorchDispatchMode):
    """Counts by batch (None: not in one)."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: int | None = None
        self.found: Counter[int | None] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        masks = name in _INDEXING and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]
        )
        if name in _READS or masks or _between_devices(name, args, kwargs):
            self.found[self.batch] += 1
        return func(*args, **kwargs)


def _between_devices(name: str, args: Any, kwargs: Any) -> bool:
    if name == "copy_":
        return args[0].device.type != args[1].device.type and not (len(args) > 2 and args[2])
    to = kwargs.get("device")
    waits = not kwargs.get("non_blocking", False)
    return (
        name == "_to_copy"
        and to is not None
        and waits
        and torch.device(to).type != args[0].device.type
    )


class Batches:
    """Data that tell which of their batches is being worked on."""

    def __init__(self, data: Sequence[Any], readings: Readings) -> None:
        self.data, self.readings = data, readings

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.data):
            self.readings.batch = number
            yield item
        self.readings.batch = None


def readings(
    sweep: Callable[[EmpiricalRisk], object], model: str, depth: int, device: torch.device
) -> int:
    torch.manual_seed(0)
    data = [
        (torch.randn(4, 4, 4, device=device), torch.randint(3, (4,), device=device))
        for _ in range(3)
    ]
    with Readings() as found:
        sweep(
            EmpiricalRisk(
                MODELS[model](depth).to(device), nn.CrossEntropyLoss(), Batches(data, found)
            )
        )
    return found.found[COUNTED]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "name",
    # Decompositions of a refresh are waited for, in whatever batch.
    [name for name in TASKS if name not in ("gradient", "dense", "trace") and "refr" not in name],
)
def test_layers_do_not_wait_for_the_device(name: str, model: str, device: torch.device) -> None:
    shallow, deep = (readings(TASKS[name], model, depth, device) for depth in (1, 3))
    # On the CPU, where nobody waits, the number of a batch's loss terms is read, too.
    assert shallow == deep <= (16 if device.type == "cpu" else 8)


@pytest.mark.parametrize(
    "read",
    [
        lambda a: float(a.sum()),
        lambda a: bool(a.isfinite().all()),
        lambda a: a.sum().item(),
        lambda a: a[a > 0],
        lambda a: a.nonzero(),
        lambda a: torch.equal(a, a),
    ],
)
def test_readings_are_counted(read: Callable[[Tensor], object], device: torch.device) -> None:
    class Reading(DiagonalBlock):
        def update(self, batch: Any) -> None:
            super().update(batch)
            read(batch.per_example_grads)

    shallow, deep = (
        readings(lambda risk: curvature(risk, Reading), "convolutions", depth, device)
        for depth in (1, 3)
    )
    assert shallow < deep


# ----------------------------------------------------------------------- waiting for an emulated GPU
# Readings are not all: a copy to the GPU of what the host holds waits, and so do decompositions.
class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


class AttentionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.before_attention(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, blocks: int, width: int = 8, words: int = 16, length: int = 6) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(AttentionBlock(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def emulated(name: str, batches: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A network on the GPU, and its batches."""
    torch.manual_seed(0)
    if name == "MLP":
        model: nn.Module = nn.Sequential(
            nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)
        )
        data = [(torch.randn(8, 8), torch.randint(5, (8,))) for _ in range(batches)]
    elif name == "ResNet":
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            *(ResidualBlock(4, 4), ResidualBlock(4, 8), ResidualBlock(8, 8)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )
        data = [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,))) for _ in range(batches)]
    else:
        model = GPT(blocks=3)
        data = [(torch.randint(16, (2, 6)), torch.randint(16, (2, 6))) for _ in range(batches)]
    return model.cuda().eval(), [(X.cuda(), y.cuda()) for X, y in data]


def _of_model(name: str, batches: int) -> Any:
    model, data = emulated(name, batches)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    return curvature(risk, KFAC, vectors=MonteCarlo())


def waits_of_a_batch(name: str) -> emulator.Waits:
    """Two more batches, halved: what is paid once has no part in it."""
    _of_model(name, 5)
    with emulator.Waits() as five:
        _of_model(name, 5)
    with emulator.Waits() as seven:
        _of_model(name, 7)
    waits = emulator.Waits()
    for place in five.at | seven.at:
        # Networks and their batches are copied by the test.
        if not place[0].startswith(Path(__file__).name):
            waits.at[place] = (seven.at[place] - five.at[place]) // 2
    return waits


def waits_of_an_inverse(name: str) -> emulator.Waits:
    K = _of_model(name, 2)
    with emulator.Waits() as waits:
        K.inverse(1e-2)
    return waits


def waits_of_a_summary(name: str) -> emulator.Waits:
    """Of damped blocks; their decompositions are those of an inverse."""
    K = _of_model(name, 2)
    with emulator.Waits() as waits:
        K.summary(1e-2)
    return waits


def waits_of_bases(name: str) -> emulator.Waits:
    """What EKFAC waits for and KFAC does not."""
    model, data = emulated(name, 2)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    waits = emulator.Waits()
    for approximation in (EKFAC, KFAC):
        curvature(risk, approximation, vectors=MonteCarlo())
        with emulator.Waits() as of_one:
            curvature(risk, approximation, vectors=MonteCarlo())
        if approximation is EKFAC:
            waits.at.update(of_one.at)
        else:
            waits.at.subtract(of_one.at)
    return waits


def waits_of_factored_inverses(name: str) -> emulator.Waits:
    return waits_of_a_refresh(name, HeuristicDamping(1e-2))


def waits_of_a_refresh(name: str, damping: Any = 1e-2) -> emulator.Waits:
    model, data = emulated(name, 2)
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), ())
    estimator = CurvatureEstimator(risk, KFAC, vectors=MonteCarlo(), decay=0.9, damping=damping)
    for batch in data:
        estimator.update(batch)
        estimator.refresh()
    with emulator.Waits() as waits:
        estimator.refresh()
    return waits


def waits_of_a_step(name: str) -> emulator.Waits:
    """A step with statistics and old inverses."""
    model, data = emulated(name, 1)
    for module in model.modules():
        module.training = not isinstance(module, nn.BatchNorm2d)
    loss = nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, lr=1e-3, damping=1e-2, inverse_every=10**6)
    X, y = data[0]
    for _ in range(18):  # the 1st, 2nd, 4th, ... are looked at closely
        waits = emulator.Waits()
        with waits:
            optimizer.zero_grad()
            loss(model(X), y).backward()
            optimizer.step()
    return waits


def waits_of_a_prior(name: str) -> emulator.Waits:
    K = _of_model(name, 2)
    la = Laplace(K, dict.fromkeys(K.blocks, 1.0))
    with emulator.Waits() as waits:
        la.fit_prior()
    return waits


def waits_of_pruning(name: str) -> emulator.Waits:
    """Ten rounds."""
    K = _of_model(name, 2)
    with emulator.Waits() as waits:
        prune(K.risk.model, K, 0.6, 10)
    return waits


NETWORKS = ("MLP", "ResNet", "GPT")
#: Counts, and how often the host waits at most in each network: for a batch of KFAC after others,
#: for an inverse, for new inverses of an estimator, for a step without these, for prior precisions
#: of all blocks, and for pruning.
WAITS: dict[str, tuple[Callable[[str], emulator.Waits], tuple[int, int, int]]] = {
    "batch": (waits_of_a_batch, (0, 0, 0)),
    "inverse": (waits_of_an_inverse, (4, 8, 7)),
    "summary": (waits_of_a_summary, (5, 10, 9)),
    "second sweep": (waits_of_bases, (8, 12, 13)),
    "refresh": (waits_of_a_refresh, (6, 10, 9)),
    "refresh of factors": (waits_of_factored_inverses, (3, 3, 3)),
    "step": (waits_of_a_step, (2, 2, 2)),
    "prior": (waits_of_a_prior, (10, 16, 15)),
    "pruning": (waits_of_pruning, (33, 71, 87)),
}


@pytest.mark.skipif(
    not emulator.is_installed(), reason=f"no emulated GPU, which {emulator.VARIABLE}=1 makes"
)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("task", WAITS)
def test_waits_on_an_emulated_gpu(task: str, name: str) -> None:
    count, bounds = WAITS[task]
    waits, most = count(name), bounds[NETWORKS.index(name)]
    assert waits.total <= most, f"{waits.total} waits, at most {most}:\n{waits}"
