"""Files: written aside and replaced when they are complete, read once, and refused if damaged."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    BlockwiseLinearOperator,
    Checkpoint,
    CurvatureEstimator,
    DiagonalBlock,
    EKFACLinearOperator,
    EmpiricalRisk,
    KFACInverseLinearOperator,
    KFACOptimizer,
    StochasticReconfiguration,
    curvature,
    load,
    save,
)
from curvlinops_plus.blocks import files
from curvlinops_plus.linalg import BlockDiagonal

Read = Callable[[Any], Tensor]


def net(seed: int = 0) -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    X = torch.randn(12, 3, dtype=torch.float64)
    y = torch.arange(12) % 2
    return model, nn.CrossEntropyLoss(), [(X[:6], y[:6]), (X[6:], y[6:])]


def train(model: nn.Module, loss: nn.Module, data: Any, optimizer: Any) -> None:
    for X, y in data:
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()


# ----------------------------------------------------------------------- states, and their numbers


def operator() -> tuple[Any, Read]:
    model, loss, data = net()
    K = curvature(EmpiricalRisk(model, loss, data), {"0": EKFAC, "2": DiagonalBlock})
    return K, lambda state: BlockwiseLinearOperator.from_state_dict(state, model).to_dense()


def inverse() -> tuple[Any, Read]:
    K, _ = operator()
    return K.inverse(1e-2), lambda state: BlockDiagonal.from_state_dict(state).to_dense()


def classic() -> tuple[Any, Read]:
    model, loss, data = net()
    A = EKFACLinearOperator(model, loss, list(model.parameters()), data)

    def read(state: Any) -> Tensor:
        made = EKFACLinearOperator(model, loss, list(model.parameters()), data)
        return KFACInverseLinearOperator.from_state_dict(state, made).to_dense()

    return KFACInverseLinearOperator(A, 0.1, use_exact_damping=True), read


def estimator() -> tuple[Any, Read]:
    model, loss, data = net()
    risk = EmpiricalRisk(model, loss, ())
    one = CurvatureEstimator(risk, EKFAC, decay=0.9)
    for batch in data:
        one.update(batch)
    one.refresh(1e-2)

    def read(state: Any) -> Tensor:
        two = CurvatureEstimator(risk, EKFAC, decay=0.9)
        two.load_state_dict(state)
        two.update(data[0])
        counted = torch.tensor([two.updates, two.examples, two.weight], dtype=torch.float64)
        dense = [two.operator.to_dense(), two.inverse().to_dense()]
        return torch.cat([counted, *(M.flatten() for M in dense)])

    return one, read


def optimizer() -> tuple[Any, Read]:
    model, loss, data = net()
    one = KFACOptimizer(model, loss, lr=0.1, inverse_every=2)
    train(model, loss, data, one)

    def read(state: Any) -> Tensor:
        other, other_loss, batches = net()
        two = KFACOptimizer(other, other_loss, lr=0.1, inverse_every=2)
        two.load_state_dict(state)
        train(other, other_loss, batches, two)
        return torch.cat([p.detach().flatten() for p in other.parameters()])

    return one, read


def reconfiguration() -> tuple[Any, Read]:
    x = torch.linspace(-4, 4, 21, dtype=torch.float64)

    def made() -> tuple[Tensor, StochasticReconfiguration]:
        a = torch.tensor([2.0, 0.5], dtype=torch.float64)

        def log_psi(params: Any, x: Tensor) -> Tensor:
            return -params[0][0] * x**2 - params[0][1] * x

        return a, StochasticReconfiguration(log_psi, [a], momentum=0.5)

    def steps(a: Tensor, one: StochasticReconfiguration) -> Tensor:
        for _ in range(2):
            one.step(x, a[0] * x.sin(), weights=(-(x**2)).exp())
        return a

    a, one = made()
    steps(a, one)

    def read(state: Any) -> Tensor:
        b, two = made()
        two.load_state_dict(state)
        return steps(b, two)

    return one, read


STATES = {
    f.__name__: f for f in (operator, inverse, classic, estimator, optimizer, reconfiguration)
}


# --------------------------------------------------------------------------------- damage to a file


def flipped(content: bytes, rng: random.Random) -> bytes:
    """One bit."""
    damaged = bytearray(content)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def zeroed(content: bytes, rng: random.Random) -> bytes:
    """A block of 512 bytes, as a lost page leaves it."""
    at = rng.randrange(len(content)) // 512 * 512
    return content[:at] + bytes(len(content[at : at + 512])) + content[at + 512 :]


def scrambled(content: bytes, rng: random.Random) -> bytes:
    """64 random bytes."""
    at = rng.randrange(len(content) - 64)
    return content[:at] + rng.randbytes(64) + content[at + 64 :]


def truncated(content: bytes, rng: random.Random) -> bytes:
    """Cut off."""
    return content[: rng.randrange(len(content))]


def is_plain(error: ValueError) -> bool:
    """Not a subclass such as `JSONDecodeError`, which speaks of the inside of files."""
    assert type(error) is ValueError, error
    return True


DAMAGES = {flipped: 60, zeroed: 20, scrambled: 20, truncated: 20}


@pytest.mark.parametrize("name", STATES)
def test_damaged_files_give_the_same_numbers_or_are_refused(name: str, tmp_path: Path) -> None:
    """Of every kind of state: a `ValueError`, from `load` or from whoever takes the state."""
    thing, read = STATES[name]()
    path = tmp_path / "state"
    save(thing, path)
    truth = read(load(path))
    content = path.read_bytes()
    rng = random.Random(name)
    refused = 0
    for damage, times in DAMAGES.items():
        for _ in range(times):
            path.write_bytes(damage(content, rng))
            try:
                numbers = read(load(path))
            except ValueError as error:
                refused += is_plain(error)
            else:
                assert torch.equal(numbers, truth)
    assert refused > 0.9 * sum(DAMAGES.values())


@pytest.mark.parametrize("name", STATES)
def test_damaged_states_of_torch_save(name: str) -> None:
    """PyTorch reads them without looking at its checksums, or raises what it likes."""
    thing, read = STATES[name]()
    buffer = io.BytesIO()
    torch.save(thing.state_dict(), buffer)
    content = buffer.getvalue()
    truth = read(torch.load(io.BytesIO(content), weights_only=True))
    rng = random.Random(name)
    refused = 0
    for damage, times in DAMAGES.items():
        for _ in range(times):
            try:
                state = torch.load(io.BytesIO(damage(content, rng)), weights_only=True)
            except Exception:
                continue
            try:
                numbers = read(state)
            except ValueError as error:
                refused += is_plain(error)
            else:
                assert torch.equal(numbers, truth)
    assert refused > 2


@pytest.mark.parametrize("name", ["operator", "estimator", "optimizer"])
def test_damaged_checkpoints(name: str) -> None:
    """Entries of `torch.distributed.checkpoint`."""
    (thing, _), (other, _) = STATES[name](), STATES[name]()
    entries = Checkpoint(thing).state_dict()
    rng = random.Random(name)
    refused = 0
    for number in range(60):
        key = list(entries)[number % len(entries)]
        damage = list(DAMAGES)[number % 4]
        before = str(other.state_dict())
        try:
            Checkpoint(other).load_state_dict({**entries, key: damage(entries[key], rng)})
        except ValueError as error:
            refused += is_plain(error)
            assert str(other.state_dict()) == before
        else:
            assert str(other.state_dict()) == str(thing.state_dict())
    assert refused > 30
    for key in entries:
        with pytest.raises(ValueError, match="lacks"):
            Checkpoint(other).load_state_dict({k: v for k, v in entries.items() if k != key})


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    thing, _ = operator()
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    with pytest.raises(ValueError, match=r"The entry 'state' .* can't be read"):
        Checkpoint(thing).load_state_dict({"state": buffer.getvalue()})
    assert not (tmp_path / "ran").exists()


def test_messages_name_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "K"
    K, read = operator()
    save(K, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"K is damaged: its tensor 'blocks/2/vector' is not what"):
        load(path)
    save({"seed": 1234, "values": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes().replace(b"1234", b"1235"))
    with pytest.raises(ValueError, match="the plan of its state is not what was saved"):
        load(path)
    state = K.state_dict()
    state["blocks"]["0"]["basis"]["A"]["matrix"][0, 0] += 1e-12
    with pytest.raises(
        ValueError, match=r"'blocks', '0': 'basis/A/matrix' is not what was saved.*delete its entry"
    ):
        read(state)
    state = K.state_dict()
    state["plan"]["loss"]["label_smoothing"] = 0.1
    with pytest.raises(ValueError, match="'plan' is not what was saved"):
        read(state)


# ----------------------------------------------------------------------------------- what files are


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    """In both directions, without checksums as of before, and with every dtype."""
    path = tmp_path / "state"
    dtypes = files._DTYPES.values()
    tensors = {str(dtype)[6:]: torch.arange(6).view(2, 3).to(dtype).T for dtype in dtypes}
    tensors |= {"empty": torch.zeros(0, 2), "0-d": torch.tensor(3.0)}
    save(tensors, path)
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no dict)
            assert torch.equal(file.get_tensor(name), tensors[name])
        metadata = file.metadata()
    del metadata["checksums"], metadata["checksum of the state"]
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    for name, t in load(path).items():
        assert torch.equal(t, tensors[name])
        assert t.dtype == tensors[name].dtype
    with pytest.raises(ValueError, match=r"'c' is of torch\.complex128"):
        save({"c": torch.zeros(2, dtype=torch.complex128)}, path)
    with pytest.raises(ValueError, match="Two keys of the state are '0' as text"):
        save({0: torch.zeros(2), "0": torch.ones(2)}, path)


def test_writing_to_a_loaded_tensor_leaves_the_file(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, tmp_path / "state")
    load(tmp_path / "state")["a"].zero_()
    assert load(tmp_path / "state")["a"].tolist() == [1, 1, 1]


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def ours(tree: str, **entries: Any) -> bytes:
    metadata = {"__metadata__": {"format": "curvlinops_plus", "state": tree}}
    return with_header(json.dumps(metadata | entries).encode())


A = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FOREIGN: dict[str, bytes] = {
    "empty": b"",
    "no header": b"12345678",
    "an enormous header": (2**63).to_bytes(8, "little") + b"{}",
    "no JSON": with_header(b"{"),
    "no text": with_header(b"\xff\xfe"),
    "a list": with_header(b"[]"),
    "metadata of a number": with_header(b'{"__metadata__": 3}'),
    "no state": with_header(b'{"__metadata__": {"format": "curvlinops_plus"}}'),
    "an unknown part": ours('{"$evil": [1]}'),
    "a bare list": ours("[1]"),
    "two parts": ours('{"$list": [], "$dict": []}'),
    "a number": ours("3"),
    "a missing tensor": ours('{"$tensor": "a"}'),
    "nested 100 000 times": ours("[" * 100_000),
    "lists in lists": ours('{"$list":[' * 5000 + "]}" * 5000),
    "a list of bytes": ours('{"$tensor": "a"}', a={**A, "dtype": "F8"}) + bytes(4),
    "another size": ours('{"$tensor": "a"}', a={**A, "shape": [2]}) + bytes(4),
    "before the beginning": ours('{"$tensor": "a"}', a={**A, "data_offsets": [-4, 0]}) + bytes(4),
    "behind the end": ours('{"$tensor": "a"}', a={**A, "data_offsets": [4, 8]}) + bytes(4),
    "no place": ours('{"$tensor": "a"}', a={"dtype": "F32"}) + bytes(4),
    "no entry": ours('{"$tensor": "a"}', a=3) + bytes(4),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(ValueError, match="state") as error:
        load(tmp_path / "state")
    assert error.type is ValueError


# ------------------------------------------------------------------------------------ one at a time


def whole(step: int, size: int = 1000) -> dict[str, Any]:
    return {"step": step, "values": torch.full((size,), float(step))}


def is_whole(state: dict[str, Any]) -> bool:
    return bool((state["values"] == state["step"]).all())


def test_a_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it is replaced while it is read, it is one of both."""
    path = tmp_path / "state"
    save(whole(1), path)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", after(mmap.mmap, lambda: save(whole(2), path)))
        state = load(path)
    assert state["step"] == 1
    assert is_whole(state)
    state = load(path)
    assert state["step"] == 2
    assert is_whole(state)


def after(function: Callable[..., Any], work: Callable[[], object]) -> Callable[..., Any]:
    """A function that does something else first."""

    def both(*args: Any, **options: Any) -> Any:
        work()
        return function(*args, **options)

    return both


def test_four_threads_save_to_one_path(tmp_path: Path) -> None:
    """While others read: none fails, and every state that is read is one that was saved."""
    path = tmp_path / "state"
    save(whole(0), path)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(12):
                if number < 4:
                    save(whole(100 * number + step), path)
                else:
                    assert is_whole(load(path))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(tmp_path) == ["state"]


WRITES = """
import sys, torch
from curvlinops_plus.blocks import files
real = files.os.fsync
def slow(fd):
    print("written", flush=True)
    sys.stdin.read()
files.os.fsync = slow
files.save({"values": torch.zeros(1000)}, sys.argv[1])
"""


def test_killed_while_it_saves(tmp_path: Path) -> None:
    """The old file is whole; what is left of the new one is removed by the next save to the same
    path, and not before its process has ended.
    """
    path = tmp_path / "state"
    save(whole(1), path)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    (unfinished,) = tmp_path.glob(".unfinished-*")
    save(whole(2), path)
    save(whole(2), tmp_path / "other")
    assert unfinished.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    save(whole(2), tmp_path / "other")
    assert unfinished.exists()
    save(whole(3), path)
    assert sorted(os.listdir(tmp_path)) == ["other", "state"]
    assert load(path)["step"] == 3


def test_a_file_that_was_taken_for_an_abandoned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock another process may remove it: another one is made."""
    lock = fcntl.flock
    removed = []

    def late(file: Any, kind: int) -> None:
        lock(file, kind)
        if not removed:
            (unfinished,) = tmp_path.glob(".unfinished-*")
            unfinished.unlink()
            removed.append(unfinished)

    monkeypatch.setattr(files.fcntl, "flock", late)
    save(whole(1), tmp_path / "state")
    assert removed
    assert load(tmp_path / "state")["step"] == 1


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_full_disk(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    save(whole(1), path)

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    place, name = {
        "write": (files, "bytes_of"),
        "fsync": (os, "fsync"),
        "replace": (Path, "replace"),
    }[fails]
    monkeypatch.setattr(place, name, full)
    with pytest.raises(OSError, match="No space"):
        save(whole(2), path)
    assert os.listdir(tmp_path) == ["state"]
    assert load(path)["step"] == 1


def test_the_disk_has_it_before_the_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    seen = []
    sync = os.fsync

    def synced(descriptor: int) -> None:
        seen.append((path.exists(), os.fstat(descriptor).st_size))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    save(whole(1), path)
    assert seen == [(False, path.stat().st_size)]


# --------------------------------------------------------------------------------- modes and links


def test_modes(tmp_path: Path) -> None:
    """Of a file that is there it stays; new ones have what the umask says."""
    path = tmp_path / "state"
    before = os.umask(0o027)
    try:
        save(whole(1), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    save(whole(2), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    save(whole(1), tmp_path / "runs/1")
    latest = tmp_path / "latest"
    latest.symlink_to("runs/1")
    save(whole(2), latest)
    assert latest.is_symlink()
    assert load(tmp_path / "runs/1")["step"] == 2
    dangling = tmp_path / "dangling"
    dangling.symlink_to("runs/2")
    save(whole(3), dangling)
    assert dangling.is_symlink()
    assert load(tmp_path / "runs/2")["step"] == 3


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in ("/dev/null", tmp_path / "pipe", tmp_path / "link", tmp_path):
        for work in (lambda path=path: save(whole(1), path), lambda path=path: load(path)):
            with pytest.raises(ValueError, match="expected the path of a file"):
                work()
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        save(whole(1), tmp_path / "none/state")


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    save(whole(1), path)
    save(whole(2), path)
    assert load(path)["step"] == 2


def test_checksums_take_less_than_writing() -> None:
    """They are of memory as it is, without copies."""
    t = torch.zeros(2**22)
    view = files.bytes_of(t)
    t[0] = 1
    assert view[2:4] == bytes([128, 63])
    start = time.perf_counter()
    files.checksum_of(t)
    assert time.perf_counter() - start < 1  # 16 MiB
