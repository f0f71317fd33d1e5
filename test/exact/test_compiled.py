"""Compiled products: equal to the eager ones and to derivatives by hand, compiled once for each size
of batches, and eager, with a warning, where they can't be compiled or would be wrong.
"""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    GGN,
    CGInverseLinearOperator,
    CurvaturePropagation,
    Empirical,
    EmpiricalRisk,
    Exact,
    Hessian,
    Jacobian,
    MonteCarlo,
)
from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.exact import compiled
from test.cases import close
from test.helpers import F64, normal, unchanged

pytestmark = [
    pytest.mark.usefixtures("quick_compiler", "graphs"),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7),
        reason="the compiler of PyTorch 2.6 can't trace a risk",
    ),
]


class Graphs:
    """A backend of the compiler that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.factor = 1.0
        self.seconds = 0.0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1

        def run(*args: Any) -> Any:
            time.sleep(self.seconds)
            first, *others = graph(*args)
            return (first * self.factor, *others)

        return run


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    backend = Graphs()
    monkeypatch.setattr(compiled, "_BACKEND", backend)
    monkeypatch.setattr(compiled, "_is_timed", False)
    return backend


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(*sizes: int) -> list[Any]:
    return [(normal(n, 4, seed=n), torch.arange(n) % 3) for n in sizes]


def some(names: Iterable[str], *quick: str) -> list[Any]:
    """All, of which those that are not named here are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def risk_of(model: nn.Module, *sizes: int) -> EmpiricalRisk:
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), batches(*sizes or (5,)))


def vectors(A: Any, K: int = 1) -> Tensor:
    return normal(A.shape[1], K, seed=7).to(A.dtype)


def require_compiled(
    A: Any, twin: Any, tolerance: float = 1e-12, columns: tuple[int, ...] = (1,)
) -> None:
    """So many vectors at once, without a warning: as the eager twin has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CurvatureWarning)
        for K in columns:
            v = vectors(A, K)
            for _ in range(2):
                close(A @ v, twin @ v, tolerance)
    assert A._compiled.reasons == {}


# ------------------------------------------------------------------------------------------ equal
def regression(loss: Any) -> EmpiricalRisk:
    return EmpiricalRisk(net(), loss, [(X, normal(len(X), 3)) for X, _ in batches(5)])


def weighted() -> EmpiricalRisk:
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=F64), label_smoothing=0.1)
    data = [(X, y, torch.arange(1.0, 1 + len(X))) for X, y in batches(5)]
    return EmpiricalRisk(net(), loss, data, weight=lambda X, y, w: w)


class Two(nn.Module):
    """Two outputs, the first of which is that of `net`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.net(x)
        return f, f.sin()


def two_losses() -> EmpiricalRisk:
    data = [(X, (y, normal(len(X), 3))) for X, y in batches(5)]
    return EmpiricalRisk(Two(), (nn.CrossEntropyLoss(), (nn.MSELoss(), 0.3)), data)


RISKS: dict[str, Callable[[], EmpiricalRisk]] = {
    "cross-entropy": lambda: risk_of(net()),
    "sum": lambda: regression(nn.MSELoss(reduction="sum")),
    "no likelihood": lambda: regression(nn.HuberLoss()),
    "weights": weighted,
    "two losses": two_losses,
    "binary": lambda: EmpiricalRisk(
        net(), nn.BCEWithLogitsLoss(), [(normal(5, 4), torch.ones(5, 3).double())]
    ),
}
MODES = [
    Exact(),
    Exact(signs=True),
    MonteCarlo(2, 1),
    Empirical(),
    Empirical(per_term=True),
    CurvaturePropagation(2, 3),
]


@pytest.mark.parametrize("name", some(RISKS, "two losses"))
@pytest.mark.parametrize("kind", [GGN, Hessian])
def test_losses(kind: Any, name: str) -> None:
    risk = RISKS[name]()
    require_compiled(kind(risk, compile=True), kind(risk))


@pytest.mark.parametrize("name", some(RISKS, "two losses", "no likelihood"))
def test_gradient_and_loss(name: str, graphs: Graphs) -> None:
    """One function of each batch for both."""
    risk = RISKS[name]()
    A = Hessian(risk, compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CurvatureWarning)
        for _ in range(2):
            gradient, loss = A.gradient_and_loss()
    close(loss, risk.loss())
    for g, (key, expected) in zip(gradient, risk.gradient().items(), strict=True):
        close(g, expected, 1e-12, key)
    assert graphs.count == 1


def test_gradient_of_several_batches() -> None:
    """By autograd of the whole data set, without the package; a parameter that nothing reads has
    gradient zero.
    """
    model = net()
    model.unread = nn.Parameter(normal(2))
    A = GGN(risk_of(model, 6, 4), compile=True)
    X, y = (torch.cat(part) for part in zip(*batches(6, 4)))
    value = nn.CrossEntropyLoss()(model(X), y)
    expected = torch.autograd.grad(value, [*model.parameters()], materialize_grads=True)
    gradient, loss = A.gradient_and_loss()
    close(loss, value)
    for g, e in zip(gradient, expected, strict=True):
        assert g.shape == e.shape
        close(g, e, 1e-12)


def test_gradient_in_training_mode_is_eager() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), net()).double()
    risk = risk_of(model, 5)
    A = GGN(risk, compile=True)
    with pytest.warns(CurvatureWarning, match=r"Gradient\(compile=True\).*training mode: '0'"):
        gradient, _ = A.gradient_and_loss()
    for g, expected in zip(gradient, risk.gradient().values(), strict=True):
        close(g, expected)


@pytest.mark.parametrize(
    "mode", some({repr(mode): mode for mode in MODES}, "MonteCarlo(samples=2, seed=1)")
)
def test_modes(mode: str) -> None:
    """Random vectors are the same, also those of each of two losses."""
    vectors = next(v for v in MODES if repr(v) == mode)
    risk = two_losses()
    require_compiled(GGN(risk, vectors, compile=True), GGN(risk, vectors))


def test_jacobian() -> None:
    risk = risk_of(net(), 4, 6)
    J = Jacobian(risk, compile=True)
    require_compiled(J, Jacobian(risk))
    U = normal(30, 1)
    close(J.T @ U, Jacobian(risk).T @ U)
    assert J._compiled_columns is not None
    assert J._compiled_columns.reasons == {}


def test_hessian_by_hand() -> None:
    """By autograd of the whole data set, without the package."""
    model = net()
    A = Hessian(risk_of(model, 6, 4), compile=True)
    X, y = (torch.cat(part) for part in zip(*batches(6, 4)))
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        values = {n: part.view(s) for n, part, s in zip(names, parts, shapes, strict=True)}
        return nn.CrossEntropyLoss()(torch.func.functional_call(model, values, X), y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    H = torch.autograd.functional.hessian(loss, flat)
    for K in (1, 2):
        close(A @ vectors(A, K), H @ vectors(A, K), 1e-10)
    assert A._compiled is not None
    assert A._compiled.reasons == {}


class Attention(nn.Module):
    """Causal attention in a table of tokens, whose head is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(scaled_dot_product_attention(x, x.sin(), x, is_causal=True)).mT


def tokens(n: int, length: int) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(n * length).view(n, length) % 7
    return numbers, numbers.flip(1)


def weight_norm() -> nn.Module:
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model(normal(20, 4))
    return model.eval()


class WritesInput(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mul_(2))


MODELS: dict[str, Callable[[], EmpiricalRisk]] = {
    "attention": lambda: EmpiricalRisk(
        Attention().double(), nn.CrossEntropyLoss(), [tokens(3, 5), tokens(2, 5)]
    ),
    "weight norm": lambda: risk_of(weight_norm()),
    "batch norm": lambda: risk_of(batch_norm()),
    "transformer": lambda: EmpiricalRisk(
        nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten())
        .eval()
        .double(),
        nn.MSELoss(),
        [(normal(2, 3, 4), normal(2, 12, seed=1))],
    ),
    "writes its input": lambda: risk_of(WritesInput()),
    "some parameters": lambda: (
        lambda m: EmpiricalRisk(m, nn.CrossEntropyLoss(), batches(5), [m[2].bias, m[0].weight])
    )(net()),
    "other values": lambda: (
        lambda m: EmpiricalRisk(
            m, nn.CrossEntropyLoss(), batches(5), {"0.weight": m[0].weight.detach() * 2}
        )
    )(net()),
    "data parallel": lambda: risk_of(nn.DataParallel(net())),
}


@pytest.mark.parametrize("name", some(MODELS, "attention", "weight norm"))
def test_models(name: str) -> None:
    risk = MODELS[name]()
    inputs = [X.clone() for X, _ in risk.data]
    with unchanged(risk.model):
        require_compiled(GGN(risk, compile=True), GGN(risk), 1e-11)
    assert all(torch.equal(X, before) for (X, _), before in zip(risk.data, inputs, strict=True))


def test_inside_of_solvers() -> None:
    risk = risk_of(net())
    A = GGN(risk, compile=True)
    v = vectors(A)[:, 0]
    x = CGInverseLinearOperator(A.shift(0.1), tolerance=1e-12) @ v
    close(x, CGInverseLinearOperator(GGN(risk).shift(0.1), tolerance=1e-12) @ v, 1e-9)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        close(A @ v, GGN(risk) @ v)
    assert A._compiled is not None
    assert A._compiled.reasons == {}


# ----------------------------------------------------------------------------------------- how often
def test_each_size_once(graphs: Graphs) -> None:
    """Each size of batches is compiled once, and not again."""
    risk = risk_of(net(), 6, 6, 4)
    A = GGN(risk, compile=True)
    for _ in range(3):
        A @ vectors(A)
    assert graphs.count == 2
    risk.data[:] = batches(6, 4, 9, 8, 7)
    for _ in range(2):
        close(A @ vectors(A), GGN(risk) @ vectors(A))
    assert graphs.count == 5
    assert A._compiled is not None
    assert A._compiled.reasons == {}


@pytest.mark.slow
def test_many_operators() -> None:
    """More than the compiler compiles one function for."""
    for _ in range(12):
        require_compiled(GGN(risk_of(net(), 5), compile=True), GGN(risk_of(net(), 5)))


def test_copies_compile_for_themselves(graphs: Graphs) -> None:
    A = GGN(risk_of(net()), compile=True)
    v = vectors(A)
    product = A @ v
    number = graphs.count
    for twin in (copy.deepcopy(A), pickle.loads(pickle.dumps(A))):
        close(twin @ v, product)
    assert graphs.count == 3 * number


# ------------------------------------------------------------------------------------- what changes
class Scaled(nn.Module):
    """A network times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale * FACTOR


FACTOR = 1.0


def test_what_changes_between_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    risk = risk_of(model)
    A = GGN(risk, compile=True)
    v = vectors(A)
    A @ v

    def require() -> None:
        close(A @ v, GGN(risk) @ v)
        assert A._compiled is not None
        assert A._compiled.reasons == {}

    with torch.no_grad():
        model.net[0].weight.mul_(2)
    require()
    model.scale = 3.0
    require()
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    require()
    handle = model.net[0].register_forward_hook(lambda module, args, out: 2 * out)
    require()
    handle.remove()
    require()
    model.net[0].bias.requires_grad_(False)
    require()
    risk.losses[0].loss.label_smoothing = 0.2
    require()


def test_errors_of_the_data() -> None:
    """Those of the eager product; the product is compiled afterwards as before."""
    risk = risk_of(net(), 5, 5)
    A = GGN(risk, compile=True)
    product = A @ vectors(A)
    labels = risk.data[1][1]
    labels[2] += 7
    with pytest.raises(ValueError, match="class index"):
        A @ vectors(A)
    labels[2] -= 7
    close(A @ vectors(A), product)
    assert A._compiled is not None
    assert A._compiled.reasons == {}


# ---------------------------------------------------------------------------------- what stays eager
class Has(nn.Module):
    """A network whose forward is a function of it."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = net()
        self.function = function
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def branches(m: Has, x: Tensor) -> Tensor:
    f = m.net(x)
    return 2 * f if f.sum() > 0 else f


def counts(m: Has, x: Tensor) -> Tensor:
    m.calls += 1
    return m.net(x)


def keeps(m: Has, x: Tensor) -> Tensor:
    m.kept = m.net(x)  # type: ignore[assignment]
    return m.kept * 2  # type: ignore[return-value, operator]


def draws(m: Has, x: Tensor) -> Tensor:
    return m.net(x) + torch.randn(len(x), 3, dtype=F64)


def checkpoints(m: Has, x: Tensor) -> Tensor:
    return checkpoint(m.net, x, use_reentrant=False)  # type: ignore[return-value]


EAGER: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branches": (lambda: Has(branches).eval(), "branching"),
    "counts": (lambda: Has(counts).eval(), "change its modules"),
    "keeps": (lambda: Has(keeps).eval(), "."),
    "draws": (lambda: Has(draws).eval(), "random numbers"),
    "checkpoints": (lambda: Has(checkpoints).eval(), "hooks|checkpoint"),
    "dropout": (lambda: nn.Sequential(*net(), nn.Dropout(0.5)), "training mode"),
    "batch norm": (lambda: batch_norm().train(), "training mode"),
    "half precision": (lambda: net().half(), "float16"),
}


@pytest.mark.parametrize("name", some(EAGER, *EAGER))
def test_what_stays_eager(name: str) -> None:
    """The same numbers, and a warning, once for a single vector and once for several."""
    make, reason = EAGER[name]
    model = make()
    dtype = next(model.parameters()).dtype
    data = [(X.to(dtype), y) for X, y in batches(5)]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    state = torch.get_rng_state()
    with unchanged(model):
        A = GGN(risk, compile=True, check_deterministic=False)
        for K in (1, 3):
            with pytest.warns(CurvatureWarning, match=rf"compile=True.*{reason}"):
                product = A @ vectors(A, K)
            with warnings.catch_warnings():
                warnings.simplefilter("error", CurvatureWarning)
                again = A @ vectors(A, K)
            twin = GGN(risk, check_deterministic=False) @ vectors(A, K)
            close(product, twin, 1e-12)
            close(again, twin, 1e-12)
    assert torch.equal(torch.get_rng_state(), state)
    # What the compiler leaves behind would break checkpoints of everybody.
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    assert torch.autograd.forward_ad._current_level == -1


def test_other_modes() -> None:
    """A model that has been compiled in another mode."""
    model = nn.Sequential(*net(), nn.Dropout(0.5)).eval()
    risk = risk_of(model)
    A = GGN(risk, compile=True, check_deterministic=False)
    require_compiled(A, GGN(risk))
    model.train()
    with pytest.warns(CurvatureWarning, match="training mode"):
        product = A @ vectors(A)
    assert torch.equal(product, GGN(risk, check_deterministic=False) @ vectors(A))


def test_iterators_stay_eager() -> None:
    risk = risk_of(net())
    data = risk.data
    risk.data = iter(data)
    A = GGN(risk, compile=True, check_deterministic=False)
    with pytest.warns(CurvatureWarning, match="iterator"):
        product = A @ vectors(A)
    risk.data = data
    close(product, GGN(risk) @ vectors(A))


def test_other_numbers_are_refused(graphs: Graphs) -> None:
    graphs.factor = 1 + 1e-5
    risk = risk_of(net())
    A = GGN(risk, compile=True)
    with pytest.warns(CurvatureWarning, match="numbers are others, by 1e-05"):
        product = A @ vectors(A)
    assert torch.equal(product, GGN(risk) @ vectors(A))


def test_one_parameter_with_other_numbers_is_refused() -> None:
    """However small its part is."""
    A = GGN(risk_of(net()), compile=True)
    assert A._compiled is not None
    expected = vectors(A).T.clone()
    expected[:, -3:] *= 1e-4  # the last bias
    products = expected.clone()
    products[:, -3:] *= 1.1
    with pytest.raises(compiled.NotCompiled, match="others"):
        A._compiled._require_equal(products, expected)
    A._compiled._require_equal(expected.clone(), expected)
    with pytest.raises(compiled.NotCompiled):
        A._compiled._require_equal(expected * float("nan"), expected)


def test_what_is_slower_stays_eager(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_is_timed", True)
    graphs.seconds = 0.2
    A = GGN(risk_of(net(), 5), compile=True)
    with pytest.warns(CurvatureWarning, match="times as long"):
        A @ vectors(A)


def test_several_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="block_sizes"):
        Hessian(risk_of(net()), block_sizes=[2, 2], compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_machine_code(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's own backend."""
    monkeypatch.setattr(compiled, "_BACKEND", "inductor")
    data = [(X.to(dtype), y) for X, y in batches(5)]
    risk = EmpiricalRisk(net().to(dtype), nn.CrossEntropyLoss(), data)
    for make in (GGN, Hessian, Jacobian):
        require_compiled(make(risk, compile=True), make(risk), 10 * torch.finfo(dtype).eps)
