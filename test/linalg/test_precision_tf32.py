"""Products of this package are never made of shortened numbers (TF32); the user's model keeps its
setting."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    EmpiricalRisk,
    GGNFactor,
    Hessian,
    KFACOptimizer,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.linalg import Dense, Structure, cg
from curvlinops_plus.linalg import precision as switches
from curvlinops_plus.linalg.precision import (
    full_precision,
    has_short_products,
    plain_mode,
    users_tf32,
)

products: Any = torch.backends.cuda.matmul
newer = pytest.mark.skipif(not switches._HAS_PRECISIONS, reason="switches of PyTorch 2.9")


def older(setting: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(setting)


def set_products() -> None:
    products.fp32_precision = "tf32"


def set_everything() -> None:
    torch.backends.fp32_precision = "tf32"


def set_device() -> None:
    torch.backends.cudnn.fp32_precision = "tf32"


def set_allowed() -> None:
    products.allow_tf32 = True


SWITCHES = [
    pytest.param(older("high"), id="high"),
    pytest.param(older("medium"), id="medium"),
    pytest.param(set_allowed, id="allowed"),
    pytest.param(set_products, id="products", marks=newer),
    pytest.param(set_everything, id="everything", marks=newer),
    pytest.param(set_device, id="device", marks=newer),
]


def is_on() -> bool:
    """What the kernels see."""
    if switches._HAS_PRECISIONS:
        return products.fp32_precision == "tf32"
    return products.allow_tf32


def everything() -> list[Any]:
    """All settings of products."""
    if not switches._HAS_PRECISIONS:
        return [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
    backends: Any = torch.backends
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # newer and older switches differ
        precision = None
    return [
        precision,
        backends.fp32_precision,
        products.fp32_precision,
        backends.cudnn.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
    ]


@pytest.fixture(params=SWITCHES)
def switch(request: pytest.FixtureRequest) -> Iterator[None]:
    """TF32 is on."""
    before = everything()
    request.param()
    assert is_on()
    yield
    torch.set_float32_matmul_precision("highest")
    if switches._HAS_PRECISIONS:
        backends: Any = torch.backends
        backends.fp32_precision = "none"
        backends.cudnn.fp32_precision = "none"
        products.fp32_precision = "none"
        backends.mkldnn.matmul.fp32_precision = before[5]


@pytest.mark.parametrize("context", [full_precision, plain_mode])
@pytest.mark.usefixtures("switch")
def test_switches_are_restored(context: Callable[[str], Any]) -> None:
    before = everything()
    for _ in range(2):
        with context("cuda"):
            assert not is_on()
            assert has_short_products("cuda")
            with plain_mode("cuda"), full_precision("cuda"):
                assert not is_on()
            assert not is_on()
            with users_tf32():
                assert is_on()
                assert everything() == before
                with context("cuda"):
                    assert not is_on()
                assert is_on()
            assert not is_on()
        assert everything() == before
    with pytest.raises(ZeroDivisionError), context("cuda"), users_tf32():
        raise ZeroDivisionError
    assert everything() == before
    # As an interrupt leaves it, between a block and its end.
    inside = context("cuda")
    inside.__enter__()
    assert not is_on()
    model = users_tf32()
    model.__enter__()
    assert is_on()
    del model
    assert not is_on()
    del inside
    assert everything() == before
    with context("cpu"), users_tf32():
        assert everything() == before


@newer
def test_more_general_switches_still_decide() -> None:
    backends: Any = torch.backends
    backends.fp32_precision = "tf32"
    try:
        with plain_mode("cuda"):
            assert not is_on()
        backends.fp32_precision = "ieee"
        assert not is_on()
    finally:
        backends.fp32_precision = "none"


def test_nothing_is_touched_without_tf32() -> None:
    before = everything()
    with plain_mode("cuda"), users_tf32():
        assert everything() == before
    assert everything() == before


# ------------------------------------------------------------------- who sees what, as if on a GPU
PRODUCTS = ("mm", "bmm", "addmm", "mv", "dot", "baddbmm")


class Products(TorchDispatchMode):
    """Counts products by who makes them, and whether TF32 is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, bool]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in PRODUCTS and args[0].dtype == torch.float32:
            self.seen[maker(), is_on()] += 1
        return func(*args, **(kwargs or {}))


def maker() -> str:
    """The package's folder, "model" for passes of the user's model."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "importlib" in frame.filename:  # PyTorch multiplies while it is imported
            return "import"
        if path.name == "differentiable.py":  # which calls the model's functions
            continue
        if frame.name == "users_forward" or "autograd" in path.parts:
            return "model"
        if "curvlinops_plus" in path.parts:
            return path.parts[path.parts.index("curvlinops_plus") + 1]
    return "?"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))

    def users_forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.users_forward(x)


def train(risk: EmpiricalRisk) -> None:
    optimizer = KFACOptimizer(risk.model.train(), risk.losses[0].loss, norm_constraint=1e-3)
    for X, y in risk.data:
        optimizer.zero_grad()
        risk.losses[0].loss(risk.model(X), y).backward()
        optimizer.step()


def of_blocks(risk: EmpiricalRisk, approximation: Any) -> None:
    K = curvature(risk, approximation, vectors=MonteCarlo())
    v = torch.ones(K.shape[1])
    for operator in (K, K.inverse(0.1), K.power(-0.5, 0.1)):
        operator @ v
        operator.to_dense()
        operator.quadratic_form(v)


def of_matrix(risk: EmpiricalRisk) -> None:
    A = Dense(torch.eye(3) + 0.1, Structure.PSD)
    A.inverse(0.1).to_dense()
    A.power(-0.5, 0.1).to_dense()
    cg(A, torch.ones(3))


WORK: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "KFAC": lambda risk: of_blocks(risk, KFAC),
    "EKFAC": lambda risk: of_blocks(risk, EKFAC),
    "GGN": lambda risk: GGN(risk) @ torch.ones(27),
    "Hessian": lambda risk: Hessian(risk) @ torch.ones(27),
    "factor": lambda risk: GGNFactor(risk).T @ torch.ones(27),
    "cg": lambda risk: cg(GGN(risk).shift(0.1), torch.ones(27), max_iter=2),
    "optimizer": train,
    "matrix": of_matrix,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize("switch", [SWITCHES[0], SWITCHES[3]], indirect=True)
def test_who_sees_tf32(name: str, switch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "_GPUS", ("cpu",))
    torch.manual_seed(0)
    data = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(2)]
    before = everything()
    with Products() as found:
        WORK[name](EmpiricalRisk(Model(), nn.CrossEntropyLoss(), data))
    assert everything() == before
    assert "?" not in found.seen
    found.seen = Counter({key: n for key, n in found.seen.items() if key[0] != "import"})
    for who, on in found.seen:
        assert on == (who == "model"), found.seen
    assert ("model", True) in found.seen or name == "matrix"
    algebra = {who for who, on in found.seen if not on}
    assert algebra or name in ("GGN", "Hessian", "factor", "cg")
