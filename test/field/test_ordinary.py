"""What ordinary code does with data, networks, devices and options: a kind of fault in each
function.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CGInverseLinearOperator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    HeuristicDamping,
    IdentityLinearOperator,
    KFACOptimizer,
    QuadraticPenalty,
    RelativeDamping,
    SingularMatrixError,
    attribution_scores,
    cg,
    curvature,
    per_example_gradients,
    self_influence,
)
from curvlinops_plus.linalg import Dense, Structure
from curvlinops_plus.linalg.numerics import damped_cholesky
from test.helpers import seeded

# ------------------------------------------------------------------------ the order of the examples
N = 13
ONES = torch.ones(N, 1)
#: Of `0 x - y`, squared, the gradient is `-2 y`.
TARGETS = torch.arange(1.0, N + 1)[:, None]
STORED = TensorDataset(ONES, TARGETS)


def zero() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


class Odd(Sampler[int]):
    """A sampler of one's own; in order, or with a random first index."""

    def __init__(self, shuffles: bool) -> None:
        self.shuffles = shuffles

    def __iter__(self) -> Iterator[int]:
        start = int(torch.randint(1, N, ())) if self.shuffles else 0
        return ((start + n) % N for n in range(N))


class Buckets(Sampler[list[int]]):
    """Batches of one's own."""

    def __init__(self, shuffles: bool) -> None:
        self.shuffles = shuffles

    def __iter__(self) -> Iterator[list[int]]:
        pairs = [[*range(start, min(start + 4, N))] for start in range(0, N, 4)]
        return iter(pairs[::-1] if self.shuffles else pairs)


class Stream(IterableDataset[Any]):
    """An iterable data set; `len` of a loader raises."""

    def __init__(self, shuffles: bool = False) -> None:
        self.shuffles = shuffles

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(N).tolist() if self.shuffles else range(N)
        return (STORED[n] for n in order)


class Prefetching:
    """A loader inside of another object."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class Shard(DataLoader[Any]):
    """A loader with an iteration of its own."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Batches:
    """An iterable of one's own."""

    def __init__(self, shuffle: Callable[[list[int]], object]) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Any]:
        order = [*range(N)]
        self.shuffle(order)
        return ((ONES[order[k : k + 4]], TARGETS[order[k : k + 4]]) for k in range(0, N, 4))


def by_torch(order: list[int]) -> None:
    order[:] = torch.randperm(N).tolist()


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(STORED, **{"batch_size": 4} | options)


def distributed(**options: Any) -> DataLoader[Any]:
    return loader(
        sampler=DistributedSampler(
            STORED, **{"num_replicas": 1, "rank": 0, "shuffle": False} | options
        )
    )


#: Data, and which targets are read in which order.
IN_ORDER: dict[str, tuple[Callable[[], Any], Any]] = {
    "list": (lambda: [(ONES[:5], TARGETS[:5]), (ONES[5:], TARGETS[5:])], slice(None)),
    "loader": (loader, slice(None)),
    "single examples": (lambda: DataLoader([(ONES[:6], TARGETS[:6])], batch_size=None), slice(6)),
    "drop_last": (lambda: loader(drop_last=True), slice(12)),
    "batch sampler": (lambda: DataLoader(STORED, batch_sampler=BatchSampler(SequentialSampler(STORED), 4, False)),
                      slice(None)),
    "own sampler": (lambda: loader(sampler=Odd(False)), slice(None)),
    "own batches": (lambda: DataLoader(STORED, batch_sampler=Buckets(False)), slice(None)),
    "listed": (lambda: loader(sampler=range(N - 1, 3, -1)), [*range(N - 1, 3, -1)]),
    "listed batches": (lambda: DataLoader(STORED, batch_sampler=[[3, 1], [2]]), [3, 1, 2]),
    "one process": (distributed, slice(None)),
    "stream": (lambda: DataLoader(Stream(), batch_size=4), slice(None)),
    "wrapped": (lambda: Prefetching(Prefetching(loader())), slice(None)),
    "subclass": (lambda: Shard(STORED, batch_size=4), slice(None)),
    "iterable": (lambda: Batches(lambda order: None), slice(None)),
    "iterator": (lambda: iter(loader()), slice(None)),
}  # fmt: skip

SHUFFLED: dict[str, tuple[Callable[[], Any], str]] = {
    "loader": (lambda: loader(shuffle=True), r"RandomSampler \(shuffle=True\)"),
    "with a generator": (lambda: loader(shuffle=True, generator=seeded(3)), "RandomSampler"),
    "weighted": (lambda: loader(sampler=WeightedRandomSampler([1.0] * N, N)), "WeightedRandomSampler"),
    "subset": (lambda: loader(sampler=SubsetRandomSampler(range(N))), "SubsetRandomSampler"),
    "one by one": (lambda: DataLoader([(ONES, TARGETS)] * 3, batch_size=None, shuffle=True), "RandomSampler"),
    "batch sampler": (lambda: DataLoader(STORED, batch_sampler=BatchSampler(RandomSampler(STORED), 4, False)),
                      "RandomSampler"),
    "own sampler": (lambda: loader(sampler=Odd(True)), "Odd"),
    "own batches": (lambda: DataLoader(STORED, batch_sampler=Buckets(True)), "Buckets"),
    "epochs of processes": (lambda: distributed(shuffle=True), "DistributedSampler"),
    "one of two processes": (lambda: distributed(num_replicas=2), "DistributedSampler"),
    "wrapped": (lambda: Prefetching(Prefetching(loader(shuffle=True))), "RandomSampler"),
    "subclass": (lambda: Shard(STORED, batch_size=4, shuffle=True), "Shard has the order of a RandomSampler"),
    "stream": (lambda: DataLoader(Stream(True), batch_size=4), "this DataLoader begins with another batch each time"),
    "by torch": (lambda: Batches(by_torch), "this Batches begins with another batch each time"),
    "by Python": (lambda: Batches(random.shuffle), "this Batches begins with another batch each time"),
    "by NumPy": (lambda: Batches(np.random.shuffle), "this Batches begins with another batch each time"),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_ORDER)
def test_column_n_is_the_nth_example(case: str) -> None:
    """Gradients are `-2 y`, so influences are `4 y y'`."""
    make, order = IN_ORDER[case]
    y = TARGETS[order][:, 0]
    risk = EmpiricalRisk(zero(), nn.MSELoss(), [(ONES[:2], TARGETS[:2])])
    I, data = IdentityLinearOperator(risk.space), risk.with_data
    assert torch.equal(self_influence(I, data(make())), 4 * y**2)
    assert torch.equal(attribution_scores(I, risk, data(make())), 4 * TARGETS[:2] * y)
    assert torch.equal(attribution_scores(I, data(make()), risk), 4 * y[:, None] * TARGETS[:2, 0])
    gradients = [g["weight"].flatten() for g in per_example_gradients(data(make()))]
    assert torch.equal(torch.cat(gradients), -2 * y)


def random_states() -> list[Any]:
    of_numpy: Any = np.random.get_state()  # noqa: NPY002 (whoever shuffles by it)
    return [torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist(), of_numpy[2]]


@pytest.mark.parametrize("case", SHUFFLED)
def test_shuffled_data_are_refused_where_examples_have_numbers(case: str) -> None:
    """For queries and training examples; nothing is drawn, and all else takes them."""
    make, name = SHUFFLED[case]
    risk = EmpiricalRisk(zero(), nn.MSELoss(), [(ONES[:2], TARGETS[:2])])
    shuffled, I = risk.with_data(make()), IdentityLinearOperator(risk.space)
    before = random_states()
    uses: list[Callable[[], object]] = [
        lambda: self_influence(I, shuffled),
        lambda: attribution_scores(I, shuffled, risk),
        lambda: attribution_scores(I, risk, shuffled),
        lambda: per_example_gradients(shuffled),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=rf"{name}.*number n would not be.*shuffle=False"):
            use()
    assert random_states() == before
    assert shuffled.loss().isfinite()


# ---------------------------------------------------------------------------------------- no length
class Raising(Batches):
    """An iterable that does not know its length, and says so in its own words."""

    def __len__(self) -> int:
        raise NotImplementedError("of unknown length")


class Times(nn.Module):
    """A layer that reads its weight by a function, so that these are looked for in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize(
    "options", [{}, {"num_data": N}, {"progressbar": True}], ids=["", "num_data", "bar"]
)
@pytest.mark.parametrize(
    "make", [lambda: DataLoader(Stream(), batch_size=4), lambda: Raising(lambda order: None)]
)
@pytest.mark.parametrize("model", [zero, Times])
def test_data_without_a_length(
    make: Callable[[], Any], model: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    """The curvature of the squared error of one output is `2 x²`, here 2."""
    if options.get("progressbar") and isinstance(make(), Raising):
        options = {}  # tqdm asks for the length itself
    risk = EmpiricalRisk(model(), nn.MSELoss(), make(), **options)
    for approximation in (KFAC, EKFAC, DiagonalBlock):
        assert float(curvature(risk, approximation).trace) == pytest.approx(2)
    assert float(GGN(risk) @ torch.ones(1)) == pytest.approx(2)
    assert float(risk.loss()) == pytest.approx(float(TARGETS.square().mean()))


# ----------------------------------------------------------------------------------- blocks of zero
class Branch(nn.Module):
    """A residual network whose branch starts at zero: no gradient reaches the layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.last, self.head = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.last(self.inside(x).tanh()))


class Adapter(nn.Module):
    """A low-rank update whose second factor starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 2, bias=False)
        self.last, self.head = nn.Linear(2, 3, bias=False), nn.Linear(3, 2)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.last(self.inside(x))[:, :2]


def zero_branch(network: type[nn.Module]) -> EmpiricalRisk:
    torch.manual_seed(0)
    data = [(torch.randn(11, 3).double(), torch.randint(2, (11,)))]
    return EmpiricalRisk(network().double(), nn.CrossEntropyLoss(), data)


@pytest.mark.parametrize("of_blocks", [False, True], ids=["one rule", "mapping"])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize("network", [Branch, Adapter])
def test_relative_dampings_of_zero_blocks(
    network: type[nn.Module], approximation: Any, of_blocks: bool
) -> None:
    """By dense algebra; others are damped relative to themselves."""
    K = curvature(zero_branch(network), approximation)
    rule: Any = RelativeDamping(0.1)
    rule = dict.fromkeys(K.blocks, rule) if of_blocks else rule
    inverse, root, shifted = K.inverse(rule), K.power(-0.5, rule), K.shift(rule)
    assert not K.blocks["inside"].to_dense().any()
    mean = float(K.to_dense().trace()) / K.shape[0]
    for name, block in K.blocks.items():
        M = block.to_dense()
        own = float(M.trace()) / len(M)
        damped = M + 0.1 * (mean if name == "inside" else own) * torch.eye(len(M))
        torch.testing.assert_close(inverse.blocks[name].to_dense(), torch.linalg.inv(damped))
        half = root.blocks[name].to_dense()
        torch.testing.assert_close(half @ half @ damped, torch.eye(len(M)).double())
        torch.testing.assert_close(shifted.blocks[name].to_dense(), damped)


def test_relative_dampings_of_factors() -> None:
    """Martens and Grosse's split of the same number, whether the curvature or its matrix is
    asked.
    """
    K = curvature(zero_branch(Branch), KFAC)
    number = {name: 0.1 * float(block.trace) / block.shape[0] for name, block in K.blocks.items()}
    number["inside"] = 0.1 * float(K.trace) / K.shape[0]
    want = K.inverse(HeuristicDamping(number)).to_dense()
    for matrix in (K, K.operator):
        torch.testing.assert_close(
            matrix.inverse(HeuristicDamping(RelativeDamping(0.1))).to_dense(), want
        )


def test_a_matrix_of_zeros_takes_a_number() -> None:
    """Relative to nothing there is no damping: the message says so."""
    risk = zero_branch(Branch)
    K = curvature(risk, KFAC)
    only = {"inside.weight": risk.model.inside.weight, "inside.bias": risk.model.inside.bias}
    alone = curvature(EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), risk.data, only), KFAC)
    for make in (lambda d: K.blocks["inside"].inverse(d), alone.inverse):
        with pytest.raises(
            SingularMatrixError,
            match=r"Add a damping that is a number.*all gradients.*leave them out",
        ):
            make(RelativeDamping(0.1))
        assert float(make(0.5).trace) == pytest.approx(2 * 16)


# ------------------------------------------------------------------------------------------ devices
def test_devices_are_named_as_by_tensors(device: torch.device) -> None:
    """`"cuda"` is `"cuda:0"`, and `"cpu:0"` is `"cpu"`: vectors there are multiplied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
    risk = EmpiricalRisk(
        model, nn.CrossEntropyLoss(), [(torch.randn(5, 1, 4, 4).double(), torch.randint(3, (5,)))]
    )
    K = curvature(risk, KFAC)
    v = torch.randn(K.shape[0], dtype=torch.float64)
    operators = [
        K,
        K.operator,
        K.inverse(0.1),
        next(iter(K.blocks.values())),
        IdentityLinearOperator(K.in_space),
    ]
    for name in (device.type, f"{device.type}:0"):
        where = torch.empty(0, device=name).device
        for A in operators:
            x = v[: A.shape[1]].to(A.dtype)
            moved = A.to(name)
            assert moved.device == where
            torch.testing.assert_close((moved @ x.to(name)).cpu(), A @ x)
            assert moved.to("cpu").device == torch.device("cpu")


# ------------------------------------------------------------------------------------------ options
@pytest.mark.parametrize(
    "check", ["evry", "none", "True", "", 2, 0, 1.0, None, np.True_, ["every"]]
)
def test_check_is_one_of_three(check: Any) -> None:
    for make in (
        lambda: EmpiricalRisk(zero(), nn.MSELoss(), [], check=check),
        lambda: KFACOptimizer(zero(), nn.MSELoss(), check=check),
    ):
        with pytest.raises(ValueError, match=r'check=.*; expected True .*, "every" .*, or False'):
            make()
    for right in (True, False, "every"):
        assert EmpiricalRisk(zero(), nn.MSELoss(), [], check=right).options.check == right


# ----------------------------------------------------------------------------------------- messages
ILL = torch.diag(torch.logspace(0, 9, 30, dtype=torch.float64))
ONCE = torch.ones(30, dtype=torch.float64)
#: Singular; plus 1e-9, which float32 rounds away, positive definite.
NEARLY = torch.ones(2, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda: cg(Dense(ILL), ONCE, max_iter=2),
        lambda: CGInverseLinearOperator(Dense(ILL), max_iter=2) @ ONCE,
        lambda: damped_cholesky(NEARLY, 1e-9),
        lambda: Dense(NEARLY, Structure.PSD).inverse(1e-9),
    ],
    ids=["cg", "inverse", "cholesky", "dense"],
)
def test_warnings_point_at_the_line_of_the_user(use: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        use()
    told = [w for w in seen if issubclass(w.category, CurvatureWarning)]
    assert told
    assert {Path(w.filename) for w in told} == {Path(__file__)}


def test_layers_of_other_libraries_are_named_with_their_module() -> None:
    """A class of the name of PyTorch's is told from it."""

    class LayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.hypot(x, self.gain)

    data = [(torch.randn(4, 3), torch.randn(4, 2))]
    risk = EmpiricalRisk(nn.Sequential(LayerNorm(), nn.Linear(3, 2)), nn.MSELoss(), data)
    with pytest.warns(
        CurvatureWarning, match=rf"no rule is registered for {__name__}\.\S*LayerNorm"
    ):
        curvature(risk, KFAC)


# ---------------------------------------------------------------- networks that change between tasks
def wider(model: Any) -> dict[str, Tensor]:
    """Two more classes; the parameters that the old ones are now."""
    old = model[2]
    model[2] = nn.Linear(5, 4).double()
    with torch.no_grad():
        model[2].weight[:2] = old.weight
        model[2].bias[:2] = old.bias
    return {"2.weight": model[2].weight[:2], "2.bias": model[2].bias[:2]}


def other_head(model: Any) -> dict[str, Tensor]:
    model[2] = copy.deepcopy(model[2])
    return dict(model[2].named_parameters("2"))


def other_values(model: Any) -> dict[str, Tensor]:
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return {}


@pytest.mark.parametrize("change", [wider, other_head, other_values])
@pytest.mark.parametrize("approximation", [DiagonalBlock, FullBlock])
def test_a_penalty_of_a_network_that_has_changed(
    change: Callable[[Any], dict[str, Tensor]], approximation: Any
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    X, y = torch.randn(9, 3).double(), torch.randint(2, (9,))
    K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)]), approximation)
    dense, before = K.to_dense(), torch.cat([p.detach().flatten() for p in model.parameters()])
    penalty = QuadraticPenalty(K, strength=3.0)
    changed = change(model)
    with pytest.raises(ValueError, match=r"Or give the penalty its parameters, penalty\(params\)"):
        penalty()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    now = {**dict(model.named_parameters()), **changed}
    step = torch.cat([t.detach().flatten() for t in now.values()]) - before
    value = penalty(now)
    torch.testing.assert_close(value.detach(), 1.5 * step @ dense @ step)
    value.backward()
    expected = 3.0 * dense @ step
    torch.testing.assert_close(model[0].weight.grad.flatten(), expected[:15])
    torch.testing.assert_close(model[2].weight.grad[:2].flatten(), expected[20:30])
    assert not model[2].weight.grad[2:].any()
    with pytest.raises(ValueError, match=r"\['2.bias'\] are others, or missing"):
        penalty({**now, "2.bias": torch.zeros(7)})
