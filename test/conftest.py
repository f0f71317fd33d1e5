"""What every test may use: every device, and a check that no global setting changes. More is in
`cases.py`.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from test.gpu import emulator

# The matrices of the tests are tiny, and threads only wait for each other.
torch.set_num_threads(1)
# What runs first loads what others find loaded.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a law for every problem in k forms, each problem is tested in one form, chosen by its
    number.
    """
    count: Counter[str] = Counter()
    for item in items:
        if isinstance(item, pytest.Function) and (mark := item.get_closest_marker("one_in")):
            k, all_of = mark.args[0], mark.kwargs.get("all_of", ())
            number, count[name] = count[name := item.nodeid.split("[")[0]], count[name] + 1
            if number % k != number // k % k and not any(
                item.callspec.params.get("name") == one for one in all_of
            ):
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Take what collection made, millions of objects, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes each begins with tests that stand together: what they share is computed
    in one of them.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture
def new_objects_only() -> None:
    """`gc.get_objects()` finds what the test makes, and not the millions of objects of before."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """PyTorch computes with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling does not flush the processor's caches to measure each guard, a quarter of its
    time.
    """
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that is there, also an emulated one (`test/gpu`); a test with this fixture runs
    on all of them.
    """
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(emulator.missing or "no CUDA device")
    return torch.device(request.param)


def settings() -> dict[str, object]:
    """Global settings of PyTorch."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


_settings = pytest.StashKey[dict[str, object]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """With `pytest_runtest_teardown` in place of a fixture, which would take as long as a small
    test.
    """
    item.stash[_settings] = settings()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """No test, and nothing that a test calls, changes a global setting of PyTorch."""
    result = yield
    assert settings() == item.stash[_settings]
    return result
