"""Running the user's model: its inputs, its modes, other threads, compiled callers, and what can't
be run.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    ActivationHessian,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    GGNFactor,
    Hessian,
    Jacobian,
    MonteCarlo,
    curvature,
    hutchinson_trace,
)
from curvlinops_plus.errors import UnsupportedError
from test.cases import close, unchanged
from test.helpers import F64, normal
from test.nets import tanh_net

CE = nn.CrossEntropyLoss()


def net(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(0)
    return tanh_net(4, 5, 3).to(dtype)


def batches(dtype: torch.dtype = F64) -> list[Any]:
    return [(normal(n, 4, seed=n).to(dtype), torch.arange(n) % 3) for n in (4, 3)]


def gradient(risk: EmpiricalRisk) -> Tensor:
    return torch.cat([g.flatten() for g in risk.gradient().values()])


def ones(risk: EmpiricalRisk) -> Tensor:
    return torch.linspace(-1, 1, risk.space.dim, dtype=risk.dtype)


def inverse(risk: EmpiricalRisk) -> Tensor:
    """A product with the inverse, and its log-determinant."""
    K_inverse = curvature(risk, KFAC).inverse(damping=0.1)
    return torch.cat([K_inverse @ ones(risk), torch.as_tensor(K_inverse.logdet).view(1)])


#: Numbers of a risk that come from passes over its data.
NUMBERS: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "loss": lambda risk: risk.loss(),
    "gradient": gradient,
    "GGN": lambda risk: GGN(risk) @ ones(risk),
    "GGN, columns": lambda risk: GGN(risk) @ torch.stack([ones(risk), ones(risk) ** 2], 1),
    "GGN, dense": lambda risk: GGN(risk).to_dense(),
    "Fisher": lambda risk: GGN(risk, MonteCarlo(2)) @ ones(risk),
    "Hessian": lambda risk: Hessian(risk, check_deterministic=True) @ ones(risk),
    "Jacobian": lambda risk: Jacobian(risk, check_deterministic=True) @ ones(risk),
    "Jacobian, transposed": lambda risk: Jacobian(risk).T @ (Jacobian(risk) @ ones(risk)),
    "factor": lambda risk: GGNFactor(risk).T @ ones(risk),
    "trace": lambda risk: curvature(risk, EKFAC).trace,
    "diagonal": lambda risk: curvature(risk, DiagonalBlock).diagonal(),
    "inverse": inverse,
    "block": lambda risk: curvature(risk, FullBlock).to_dense(),
}
each_number = pytest.mark.parametrize("number", NUMBERS)


# ------------------------------------------------------------------------------------------- inputs
class Doubled(nn.Module):
    """Writes to its input."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.net = way, net()

    def forward(self, x: Any) -> Tensor:
        x = x["x"] if self.way == "a mapping" else x
        (x.data if self.way == "data" else x).mul_(2)
        return self.net(x)


@each_number
@pytest.mark.parametrize("way", ["in place", "data", "a mapping"])
def test_models_that_write_to_their_input(way: str, number: str) -> None:
    model, data = Doubled(way), batches()
    expected = NUMBERS[number](EmpiricalRisk(Doubled(way).net, CE, [(2 * x, y) for x, y in data]))
    given: Any = [({"x": x}, y) for x, y in data] if way == "a mapping" else data
    options = {"batch_size_fn": lambda X: len(X["x"])} if way == "a mapping" else {}
    with unchanged(model, given):
        close(NUMBERS[number](EmpiricalRisk(model, CE, given, **options)), expected)
    if way == "in place":  # a loader makes new batches each time
        loader = DataLoader(
            TensorDataset(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])), 4
        )
        with unchanged(model, data):
            close(NUMBERS[number](EmpiricalRisk(model, CE, loader)), expected)


# ----------------------------------------------------------------------------------------- autocast
@each_number
def test_numbers_do_not_depend_on_autocast_around_them(number: str) -> None:
    risk = EmpiricalRisk(net(torch.float32), CE, batches(torch.float32))
    expected = NUMBERS[number](risk)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = NUMBERS[number](EmpiricalRisk(risk.model, CE, risk.data))
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


# ------------------------------------------------------------------------------------------ threads
class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 8)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.table(x)).mean(1))


THREADED = {
    "GGN": lambda risk: GGN(risk) @ ones(risk),
    "GGN, columns": lambda risk: GGN(risk) @ torch.eye(risk.space.dim, 3, dtype=F64),
    "Hessian": lambda risk: Hessian(risk) @ ones(risk),
    "gradient": gradient,
    "KFAC": lambda risk: curvature(risk, {nn.LayerNorm: FullBlock}, default=KFAC) @ ones(risk),
    "diagonal": lambda risk: curvature(risk, DiagonalBlock).diagonal(),
    "activation": lambda risk: ActivationHessian(risk, ("out", "output", 0)).to_dense(),
}


def settings() -> tuple[Any, ...]:
    filters = list(warnings.filters)
    return (
        stance(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        filters,
    )


def stance() -> Any:
    """What compiled modules do: run what was compiled, or run eagerly."""
    return torch._dynamo.eval_frame._stance


def test_another_thread_evaluates_the_model() -> None:
    model = Tokens().double().eval()
    data = [
        (torch.arange(12).view(4, 3) % 9, torch.arange(4) % 3),
        (torch.arange(6).view(2, 3), torch.arange(2)),
    ]
    expected = {name: number(EmpiricalRisk(model, CE, data)) for name, number in THREADED.items()}
    X = data[0][0][:3]
    with torch.no_grad():
        output = model(X)
    stop, wrong, calls = threading.Event(), [], 0

    def evaluate() -> None:
        nonlocal calls
        try:
            while not stop.is_set():
                with torch.no_grad():
                    close(model(X), output)
                (g,) = torch.autograd.grad(model(X).sum(), model.out.bias)
                close(g, torch.full((3,), 3.0, dtype=F64))
                calls += 1
        except BaseException as error:  # shown to the test, which runs in another thread
            wrong.append(error)

    before = settings()
    other = threading.Thread(target=evaluate)
    other.start()
    try:
        for _ in range(3):
            for name, number in THREADED.items():
                close(number(EmpiricalRisk(model, CE, data)), expected[name], what=name)
    finally:
        stop.set()
        other.join()
    assert wrong == []
    assert calls > 3
    assert settings() == before


def test_risks_of_one_model_in_several_threads() -> None:
    """Each finds the model as the user left it, and everything is as before in the end."""
    model = Tokens().double()
    model.table.sparse = True
    data = [(torch.arange(12).view(4, 3) % 9, torch.arange(4) % 3)]
    expected = {name: number(EmpiricalRisk(model, CE, data)) for name, number in THREADED.items()}
    wrong: list[BaseException] = []
    names = list(THREADED)

    def work(first: int) -> None:
        try:
            for name in names[first:] + names[:first]:
                close(THREADED[name](EmpiricalRisk(model, CE, data)), expected[name], what=name)
        except BaseException as error:  # shown to the test, which runs in another thread
            wrong.append(error)

    before = settings()
    with unchanged(model, data):
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 2, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert settings() == before
    assert model.table.sparse
    assert type(model.out._parameters) is dict
    seen = []
    torch._dynamo.reset()  # no thread has left "force_eager" behind
    compiled = torch.compile(
        lambda x: x + 1, backend=lambda graph, inputs: seen.append(graph) or graph.forward
    )
    compiled(torch.ones(2))
    assert len(seen) == 1


def test_another_thread_evaluates_the_model_of_an_estimator() -> None:
    model, (batch, _) = net(), batches()
    estimates = []
    for busy in (False, True):
        estimator = CurvatureEstimator(EmpiricalRisk(model, CE, [batch]), KFAC, vectors=Empirical())

        def evaluate() -> None:
            with torch.no_grad():
                model(normal(5, 4, seed=9))

        with estimator.listen(batch):
            other = threading.Thread(target=evaluate)
            if busy:
                other.start()
                other.join()
            loss = CE(model(batch[0]), batch[1])
        loss.backward()
        estimates.append(estimator.operator.to_dense())
    close(estimates[1], estimates[0])


# ----------------------------------------------------------------------------------------- compiled
@pytest.fixture(scope="module")
def compiler() -> Iterator[None]:
    """What was compiled for one test is there for the next; no function is compiled so often that
    it then isn't.
    """
    torch._dynamo.reset()
    limit = (
        "recompile_limit"
        if hasattr(torch._dynamo.config, "recompile_limit")
        else "cache_size_limit"
    )  # PyTorch 2.6
    with torch._dynamo.config.patch({limit: 64}):
        yield


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("compiler", "quick_compiler")
@pytest.mark.parametrize("number", [*NUMBERS, "loop", "estimator", "verify"])
def test_inside_a_compiled_function(number: str) -> None:
    """The graph is divided around what goes over the data; the program runs."""
    risk = EmpiricalRisk(net(), CE, batches())
    H = Hessian(risk)

    def loop(risk: EmpiricalRisk) -> Tensor:
        v = ones(risk)
        for _ in range(3):
            v = H @ v
            v = v / v.norm()
        return v

    def verified(risk: EmpiricalRisk) -> Tensor:
        K = curvature(risk, KFAC)
        K.verify()
        return K.trace

    more = {
        "loop": loop,
        "estimator": lambda risk: hutchinson_trace(H, num_matvecs=3),
        "verify": verified,
    }
    function = {**NUMBERS, **more}[number]
    torch.manual_seed(0)
    expected = torch.as_tensor(function(risk))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        torch.manual_seed(0)
        found = torch.compile(lambda risk: torch.as_tensor(function(risk)) * 2, backend="eager")(
            risk
        )
    close(found, 2 * expected)


@pytest.mark.parametrize("first", [True, False])
def test_reentrant_checkpointing(first: bool) -> None:
    """It hides the parameters inside: without a word, where its input needs a gradient."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            if first:
                return self.b(checkpoint(self.a, x.clone().requires_grad_(), use_reentrant=True))  # type: ignore[arg-type]
            return checkpoint(self.b, self.a(x), use_reentrant=True)  # type: ignore[return-value]

    model, data = Net().double(), batches()
    risk = EmpiricalRisk(model, CE, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own
        _ = risk.loss()
        for number in ("gradient", "GGN", "GGN, dense", "Hessian", "Jacobian, transposed"):
            with (
                unchanged(model, data),
                pytest.raises(UnsupportedError, match=r"Pass use_reentrant=False"),
            ):
                NUMBERS[number](risk)


def test_parameters_without_derivatives() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(net())
    with pytest.raises(
        UnsupportedError, match=r"A RecursiveScriptModule \(torch.jit\) holds parameters"
    ):
        EmpiricalRisk(scripted, CE, batches())
    model = nn.Sequential(scripted, nn.Linear(3, 3).double())
    with pytest.raises(UnsupportedError, match=r"A RecursiveScriptModule"):
        EmpiricalRisk(model, CE, batches())
    risk = EmpiricalRisk(
        model, CE, batches(), list(model[1].parameters())
    )  # its parameters are constants
    inputs = [(scripted(X).detach(), y) for X, y in batches()]
    close(GGN(risk).to_dense(), GGN(EmpiricalRisk(model[1], CE, inputs)).to_dense())
    normed = torch.jit.script(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().eval()
    )  # it holds buffers
    model = nn.Sequential(normed, nn.Linear(3, 3).double())
    assert (
        curvature(EmpiricalRisk(model, CE, batches(), list(model[1].parameters())), KFAC).trace > 0
    )


def test_layers_of_width_zero() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # initialization of nothing
        model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3)).double()
    p = model(batches()[0][0]).softmax(-1)[0].detach()
    close(GGN(EmpiricalRisk(model, CE, batches())).to_dense(), torch.diag(p) - p[:, None] * p)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.BCEWithLogitsLoss])
def test_weights_of_a_loss_that_require_a_gradient(loss: Any) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    option = "weight" if loss is nn.CrossEntropyLoss else "pos_weight"
    data = (
        batches() if option == "weight" else [(X, torch.eye(3, dtype=F64)[y]) for X, y in batches()]
    )
    for number in NUMBERS.values():
        found = number(
            EmpiricalRisk(net(), loss(**{option: weight.clone().requires_grad_()}), data)
        )
        assert not torch.as_tensor(found).requires_grad
        close(found, number(EmpiricalRisk(net(), loss(**{option: weight}), data)))


def test_parameters_of_two_dtypes() -> None:
    """What limits the digits is the coarser of them."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x.float())).double())

    torch.manual_seed(0)
    model = Mixed()
    twin = Mixed().double()
    twin.load_state_dict(model.state_dict())
    twin.forward = lambda x: twin.b(torch.tanh(twin.a(x)))  # type: ignore[method-assign]
    data = [(X.float().double(), y) for X, y in batches()]
    for number in NUMBERS.values():
        close(number(EmpiricalRisk(model, CE, data)), number(EmpiricalRisk(twin, CE, data)), 1e-5)
    curvature(EmpiricalRisk(model, CE, data), EKFAC).verify()


# --------------------------------------------------------------------------------- of a new process
FIRST_OPERATOR = """
import sys
import torch
import torch.utils.checkpoint  # older versions of PyTorch load SymPy with it
before = set(sys.modules)
from curvlinops_plus import EKFACLinearOperator, KFACLinearOperator
known = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
unknown = torch.nn.ModuleList([known])
unknown.forward = known.forward
data = [(torch.rand(5, 3), torch.rand(5, 2))]
for name, model in {"known": known, "unknown": unknown}.items():
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        kind(model, torch.nn.MSELoss(), list(model.parameters()), data).trace
    print(name, *sorted({"torch._dynamo", "sympy"} & (set(sys.modules) - before)))
"""


@pytest.mark.skipif(
    torch.__version__.startswith("2.6"), reason="PyTorch 2.6 loads its compiler by itself"
)
def test_the_first_operators_load_neither_compiler_nor_sympy() -> None:
    """Which take a second, of a process that has nothing else to do with them."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_OPERATOR], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["known", "unknown"]


def test_data_that_were_made_in_inference_mode() -> None:
    """Autograd can't save such tensors for a backward pass; they are copied."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with torch.inference_mode():
        made = torch.rand(5, 3), torch.rand(5, 2)
    plain = tuple(torch.tensor(t.tolist()) for t in made)
    v = torch.rand(8)
    products = []
    for batch in (made, plain):
        risk = EmpiricalRisk(model, nn.MSELoss(), [batch])
        products.append([GGN(risk) @ v, curvature(risk) @ v, *risk.gradient().values()])
    for product, expected in zip(*products, strict=True):
        torch.testing.assert_close(product, expected)
