"""An emulated GPU: a device `cuda:0` whose memory is main memory and whose kernels are the CPU's.

With the environment variable `CURVLINOPS_EMULATED_GPU=1` everything in the folder `test` has it:

    CURVLINOPS_EMULATED_GPU=1 pytest test/linalg test/lives

PyTorch's own checks of devices run, operations on tensors of two devices raise, backward passes run
in autograd's thread of the device, and generators are those of the device or raise. Each wait of
the host is counted (`Waits`). Not shown are speed, memory, streams, several GPUs, and what only
CUDA's own libraries do.

The device is compiled once for each PyTorch and source, in half a minute, into a folder of the
user's cache. It must be loaded before PyTorch, which asks only once what devices there are.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

VARIABLE = "CURVLINOPS_EMULATED_GPU"
SOURCE = Path(__file__).with_name("device.cpp")
#: Why there is no emulated GPU although one was asked for.
missing: str | None = None
_library: ctypes.CDLL | None = None
_Listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Unavailable(Exception):
    """The emulated GPU can't be made here."""


def is_wanted() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


def is_installed() -> bool:
    return _library is not None


def build() -> Path:
    """The compiled device: of the cache, or made now.

    Raises:
        Unavailable: If it can't be compiled.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unavailable("PyTorch is not installed")
    torch = Path(spec.origin).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("this PyTorch has CUDA; the emulated GPU needs a build for the CPU")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise Unavailable("there is no C++ compiler: install g++, or name one in CXX")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "curvlinops-test"
    library = cache / f"gpu-{version('torch')}-{digest}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")  # other processes may compile as well
    lib = torch / "lib"
    command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-w"]
    command += ["-isystem", str(torch / "include"), str(SOURCE), "-o", str(unfinished)]
    command += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu"]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        unfinished.unlink(missing_ok=True)
        raise Unavailable(f"compiling the emulated GPU failed:\n{compiled.stderr[-2000:]}")
    unfinished.replace(library)
    return library


def install() -> None:
    """Make `cuda:0` there, or note in `missing` why it can't be."""
    global _library, missing
    if "torch" in sys.modules:
        raise RuntimeError("The emulated GPU must be installed before PyTorch is imported.")
    try:
        _library = ctypes.CDLL(str(build()))
    except (Unavailable, OSError) as error:
        missing = str(error)
        return
    _library.emulated_gpu_begin()
    import torch

    only_stream = SimpleNamespace(cuda_stream=0)
    answers = {
        "_lazy_init": None,
        "synchronize": None,
        "empty_cache": None,
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "current_stream": only_stream,
        "default_stream": only_stream,
    }
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random):  # which has names of the other one
            if hasattr(module, name):
                setattr(module, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # type: ignore[attr-defined]
    torch.cuda.default_generators = (torch.Generator("cuda"),)

    # Without CUDA the constructor of storages knows no such device; tensors have them.
    def content(storage: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    storages: Any = torch.UntypedStorage
    storages.clone = lambda storage: content(storage).clone().untyped_storage()
    storages.to = lambda storage, **options: content(storage).to(**options).untyped_storage()


class Waits:
    """While entered, counts how often the host waits for the GPU.

    Attributes:
        at: How often, by the line of the package (or what called it) and what it waits for.
    """

    def __init__(self) -> None:
        self.at: Counter[tuple[str, str]] = Counter()
        self._listener = _Listener(self._note)  # alive as long as it may be called

    @property
    def total(self) -> int:
        return self.at.total()

    def __enter__(self) -> Waits:
        assert _library is not None, "the emulated GPU is not installed"
        _library.emulated_gpu_listen(self._listener)
        return self

    def __exit__(self, *_: object) -> None:
        assert _library is not None
        _library.emulated_gpu_listen(None)

    def __str__(self) -> str:
        return "\n".join(
            f"{times:6d} x {place}: {reason}" for (place, reason), times in self.at.most_common()
        )

    def _note(self, reason: bytes) -> None:
        self.at[_place(sys._getframe(1)), reason.decode()] += 1


def _place(frame: FrameType | None) -> str:
    """The innermost line of the package, else the innermost one outside PyTorch."""
    outside = "autograd"
    while frame is not None:
        path = frame.f_code.co_filename
        if "/curvlinops_plus/" in path:
            return f"{path.rpartition('/curvlinops_plus/')[2]}:{frame.f_lineno}"
        if outside == "autograd" and "/torch/" not in path:
            outside = f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return outside
