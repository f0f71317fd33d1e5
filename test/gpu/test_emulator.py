"""The emulated GPU raises where a GPU does, computes what the CPU computes, and tells of waits."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from test.cases import close, same
from test.gpu import emulator

emulated = pytest.mark.skipif(
    not emulator.is_installed(), reason=f"no emulated GPU, which {emulator.VARIABLE}=1 makes"
)
GPU = torch.device("cuda:0")


@pytest.fixture
def a() -> Tensor:
    return torch.linspace(-1, 2, 4, device=GPU)


# ----------------------------------------------------------------------------- operands and results
MIXED: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda a: a + torch.ones(4),
    "in place": lambda a: torch.ones(4).add_(a),
    "in place in a number": lambda a: torch.ones(()).add_(a[0]),
    "stack": lambda a: torch.stack([a, torch.ones(4)]),
    "product": lambda a: torch.ones(2, 4) @ a,
    "where": lambda a: torch.where(a > 0, a, torch.zeros(4)),
    "index of the CPU": lambda a: a.index_select(0, torch.arange(2)),
    "index of the GPU": lambda a: torch.ones(4)[torch.arange(2, device=GPU)],
    "generator of the CPU": lambda a: torch.randn(2, device=GPU, generator=Generator()),
    "generator of the GPU": lambda a: torch.randn(2, generator=Generator(GPU)),
    "generator in place": lambda a: torch.empty_like(a).normal_(generator=Generator()),
}


@emulated
@pytest.mark.parametrize("name", MIXED)
def test_devices_are_not_mixed(name: str, a: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"same device|device type for generator"):
        MIXED[name](a)


@emulated
def test_results_are_on_the_gpu(a: Tensor) -> None:
    numbers = a.cpu()
    for result, expected in (
        (2 * a + torch.tensor(1.0), 2 * numbers + 1),
        (a[1:].view(3, 1).mT, numbers[1:].view(3, 1).mT),
        (a[torch.arange(2)], numbers[:2]),
        (
            torch.view_as_complex(a.view(2, 2)).conj(),
            torch.view_as_complex(numbers.view(2, 2)).conj(),
        ),
        (torch.vmap(lambda x: x * a)(torch.ones(2, 4, device=GPU)), numbers.expand(2, 4)),
        (torch.func.jvp(torch.sin, (a,), (a,))[1], numbers * numbers.cos()),
    ):
        assert result.device == GPU
        same(result.cpu(), expected)


@emulated
def test_memory_is_shared_by_views(a: Tensor) -> None:
    view = a.view(2, 2)
    torch.add(view, 1, out=view)
    same(a.cpu(), torch.linspace(-1, 2, 4) + 1)
    same(torch.from_dlpack(a).zero_().cpu(), torch.zeros(4))
    assert not a.any()
    resized = torch.empty(0, device=GPU)
    same(torch.cat([a, a], out=resized).cpu(), torch.zeros(8))
    assert resized.shape == (8,)


@emulated
def test_random_numbers(a: Tensor) -> None:
    torch.manual_seed(3)
    one, state = torch.randn_like(a), torch.cuda.get_rng_state()
    two = torch.randn_like(a)
    torch.cuda.set_rng_state(state)
    same(torch.randn_like(a), two)
    torch.manual_seed(3)
    same(torch.randn_like(a), one)
    generator = Generator(GPU).manual_seed(3)
    assert generator.device == GPU
    same(torch.randn(4, device=GPU, generator=generator), one)


@emulated
def test_copies_and_files() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)).to(
        GPU
    )
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for place in (GPU, torch.device("cpu")):
        file.seek(0)
        state = torch.load(file, map_location=place, weights_only=True)
        assert {t.device for t in state.values()} == {place}
    twin = copy.deepcopy(model)
    X = torch.randn(5, 2, 3, 3, device=GPU)
    same(twin(X), model(X))
    model(X).square().sum().backward()
    assert all(p.grad is not None and p.grad.device == GPU for p in model.parameters())


@emulated
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_recurrent_layers(layer: Any, bias: bool) -> None:
    def derivatives(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
        params = list(model.parameters())
        first = torch.autograd.grad(model(x)[0].square().sum(), params)
        again = torch.autograd.grad(model(x)[0].square().sum(), params, create_graph=True)
        total = torch.stack([g.square().sum() for g in again]).sum()
        yield from (*first, *torch.autograd.grad(total, params))

    model = layer(3, 4, num_layers=2, bias=bias).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    there = copy.deepcopy(model).to(GPU)
    for got, expected in zip(derivatives(there, x.to(GPU)), derivatives(model, x), strict=True):
        close(got, expected, 1e-12)


# -------------------------------------------------------------------------------------------- waits
READS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "item": (lambda a: a.sum().item(), 1),
    "truth": (lambda a: bool(a.isfinite().all()), 1),
    "mask": (lambda a: a[a > 0], 1),
    "list of places": (lambda a: a[[0, 1]], 1),
    "places of the host": (lambda a: a[torch.arange(2)], 1),
    "places": (lambda a: a[torch.arange(2, device=GPU)], 0),
    "nonzero": (lambda a: a.nonzero(), 1),
    "to the host": (lambda a: a.cpu(), 1),
    "from the host": (lambda a: torch.tensor([1.0], device=GPU), 1),
    "from pinned memory": (lambda a: torch.ones(2).pin_memory().to(GPU, non_blocking=True), 0),
    "eigenvectors": (lambda a: torch.linalg.eigh(a.diag()), 1),
    "checked factor": (lambda a: torch.linalg.cholesky(a.exp().diag()), 1),
    "factor": (lambda a: torch.linalg.cholesky_ex(a.exp().diag()), 0),
    "product": (lambda a: a.view(2, 2) @ a.view(2, 2) + a[0], 0),
}


@emulated
@pytest.mark.parametrize("name", READS)
def test_waits_are_counted(name: str, a: Tensor) -> None:
    read, expected = READS[name]
    with emulator.Waits() as waits:
        read(a)
    read(a)
    assert waits.total == expected, str(waits)
    assert all(place.startswith("test_emulator.py:") for place, _ in waits.at)


# ----------------------------------------------------------------------------------- not everywhere
def test_without_a_compiler(tmp_path: Path) -> None:
    environment = os.environ | {
        emulator.VARIABLE: "1",
        "CXX": "no-such-compiler",
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    code = "from test.gpu import emulator; import torch; print(torch.cuda.is_available(), emulator.missing)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("False")
    assert "C++ compiler" in done.stdout or "has CUDA" in done.stdout


def test_only_before_torch() -> None:
    with pytest.raises(RuntimeError, match="before PyTorch"):
        emulator.install()
