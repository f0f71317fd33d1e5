"""Curvature that listens: batch by batch as in one pass, moving averages in closed form, merging,
resuming.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    ForwardOnly,
    FullBlock,
    MonteCarlo,
    NumericsError,
    SingularMatrixError,
    curvature,
    load,
    save,
)
from curvlinops_plus.linalg import HeuristicDamping
from test.helpers import Written
from test.nets import tanh_net

SINGLE_PASS = {
    "KFAC": KFAC,
    "diagonal": DiagonalBlock,
    "full": FullBlock,
    "reduce": KFAC.using(kfac_approx="reduce"),
}
EVERY = {
    **SINGLE_PASS,
    "EKFAC": EKFAC,
    "mix": {"0": EKFAC, "*": FullBlock, nn.LayerNorm: DiagonalBlock},
}


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(torch.float32)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, 3), torch.randint(3, (n,))) for n in sizes]


def estimator(
    model: nn.Module, approximation: Any = KFAC, loss: nn.Module | None = None, **options: Any
) -> Any:
    return whole(model, approximation, (), loss, CurvatureEstimator, **options)


def whole(
    model: nn.Module,
    approximation: Any,
    data: Any,
    loss: Any = None,
    make: Any = curvature,
    **options: Any,
) -> Any:
    plan = (
        approximation
        if isinstance(approximation, dict)
        else {"0": approximation, "3": approximation}
    )
    risk = EmpiricalRisk(model, loss or nn.CrossEntropyLoss(), data)
    return make(risk, plan, default=DiagonalBlock, **options)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max())


def fed(running: Any, data: list[Any]) -> Any:
    """The estimator after it has seen these batches."""
    for batch in data:
        running.update(batch)
    return running


VECTORS: dict[str, Any] = {"exact": Exact(), "mc": MonteCarlo(2, seed=3), "empirical": Empirical()}


@pytest.mark.parametrize(
    ("vectors", "reduction"), [("exact", "mean"), ("mc", "sum"), ("empirical", "mean")]
)
@pytest.mark.parametrize("approximation", SINGLE_PASS)
def test_batches_add_up_to_the_data_set(approximation: str, vectors: str, reduction: str) -> None:
    model, data, loss = network(), batches(5, 2, 4), nn.CrossEntropyLoss(reduction=reduction)
    options = {"vectors": VECTORS[vectors]}
    running = estimator(model, EVERY[approximation], loss, **options)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fed(running, data)
    assert all(torch.equal(t, before[0][name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(p.grad is None for p in model.parameters())
    expected = whole(model, EVERY[approximation], data, loss, **options).to_dense()
    close(running.operator.to_dense(), expected)
    assert (running.updates, running.examples, running.weight) == (3, 11, 3)


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("approximation", EVERY)
def test_the_first_update_is_the_statistic_itself(approximation: str, decay: float) -> None:
    model, data, options = network(), batches(6), {"vectors": MonteCarlo(2, seed=3)}
    running = fed(estimator(model, EVERY[approximation], decay=decay, **options), data)
    close(
        running.operator.to_dense(),
        whole(model, EVERY[approximation], data, **options).to_dense(),
        1e-10,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("approximation", SINGLE_PASS)
def test_moving_average(approximation: str, reduction: str) -> None:
    """`Σ ρ^{t-k} x_k / Σ ρ^{t-k}` of the factors, for batches of one size."""
    model, data, loss = network(), batches(4, 4, 4, 4), nn.CrossEntropyLoss(reduction=reduction)
    ρ = 0.8
    running = fed(estimator(model, EVERY[approximation], loss, decay=ρ), data)
    each = [whole(model, EVERY[approximation], [batch], loss) for batch in data]
    weights = torch.tensor([ρ**3, ρ**2, ρ, 1.0])
    weights /= weights.sum()

    def average(read: Callable[[Any], Tensor]) -> Tensor:
        return sum((w * read(K) for w, K in zip(weights, each, strict=True)), torch.zeros(()))

    for name, block in running.operator.blocks.items():
        if hasattr(block, "A"):
            close(block.A.to_dense(), average(lambda K, n=name: K.blocks[n].A.to_dense()))
            close(block.G.to_dense(), average(lambda K, n=name: K.blocks[n].G.to_dense()))
        else:
            close(block.to_dense(), average(lambda K, n=name: K.blocks[n].to_dense()))


@pytest.mark.parametrize("vectors", [*VECTORS.values(), ForwardOnly()], ids=[*VECTORS, "forward"])
def test_listening_is_updating(vectors: Any) -> None:
    model, data, loss = network(), batches(5, 3), nn.CrossEntropyLoss()
    approximation = KFAC if isinstance(vectors, ForwardOnly) else EKFAC
    plan = {"0": approximation, "3": approximation}
    params = (
        None
        if not isinstance(vectors, ForwardOnly)
        else [*model[0].parameters(), *model[3].parameters()]
    )
    running, listening = (
        CurvatureEstimator(
            EmpiricalRisk(model, loss, (), params), plan, default=DiagonalBlock, vectors=vectors
        )
        for _ in range(2)
    )
    for X, y in data:
        running.update((X, y))
        model.zero_grad()
        with listening.listen((X, y)):
            value = loss(model(X), y)
        value.backward()
        got = [p.grad for p in model.parameters()]
        expected = torch.autograd.grad(loss(model(X), y), list(model.parameters()))
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True) if g is not None)
    close(listening.operator.to_dense(), running.operator.to_dense())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_batch_that_is_shown_twice_has_one_dropout() -> None:
    """EKFAC's first batch: eigenvalues of the gradients that its eigenvectors come from, so the
    exact trace.
    """
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    batch, state, traces = batches(6)[0], torch.get_rng_state(), []
    for approximation in (EKFAC, DiagonalBlock):
        torch.set_rng_state(state)
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), ())
        traces.append(
            fed(
                CurvatureEstimator(risk, approximation, vectors=Empirical()), [batch]
            ).operator.trace
        )
    close(*traces)


# ----------------------------------------------------------------------------- EKFAC between sweeps
def test_refresh_carries_eigenvalues_into_the_new_basis() -> None:
    """The diagonal of the old block in the new eigenvectors; the trace stays."""
    model, data = network(), batches(5, 5)
    running, factors, exact = (
        fed(estimator(model, k, decay=0.9), data) for k in (EKFAC, KFAC, DiagonalBlock)
    )
    before = running.operator
    running.refresh(damping=0.1)
    after = running.operator
    for name in ("0", "3"):
        Q = torch.kron(
            *(
                torch.linalg.eigh(getattr(factors.operator.blocks[name], f).to_dense())[1]
                for f in "GA"
            )
        )
        expected = Q @ torch.diag((Q.T @ before.blocks[name].to_dense() @ Q).diagonal()) @ Q.T
        close(after.blocks[name].to_dense(), expected, 1e-9)
        close(after.blocks[name].trace, before.blocks[name].trace)
    close(
        after.trace, exact.operator.trace
    )  # sums of squares have the trace of the exact block in any basis


# -------------------------------------------------------------------------------------- the inverse
def test_the_inverse_stays_until_it_is_refreshed() -> None:
    model, data = network(), batches(4, 4, 4)
    running = fed(estimator(model, damping=0.1), data[:1])
    first = running.inverse()
    running.update(data[1])
    assert running.inverse() is first
    close(first.to_dense(), whole(model, KFAC, data[:1]).inverse(0.1).to_dense(), 1e-10)
    close(
        running.inverse(0.5).to_dense(), whole(model, KFAC, data[:1]).inverse(0.5).to_dense(), 1e-10
    )
    assert running.inverse() is first
    running.refresh()
    close(running.inverse().to_dense(), whole(model, KFAC, data[:2]).inverse(0.1).to_dense(), 1e-10)
    running.refresh(damping=0.2)
    close(running.inverse().to_dense(), whole(model, KFAC, data[:2]).inverse(0.2).to_dense(), 1e-10)


# -------------------------------------------------------------------------------- merging, resuming
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_eigenvalues_merge_in_one_basis(decay: float) -> None:
    """That of the first one's first batch: two processes, each with halves of all batches."""
    model, data = network(), batches(8, 8)
    one, apart = (estimator(model, EKFAC, decay=decay) for _ in range(2))
    (X, y), exact = data[0], estimator(model, DiagonalBlock, decay=decay)
    one.update((X[:4], y[:4]))
    apart.update((X[4:], y[4:]))
    of_apart, merged = apart.operator, estimator(model, EKFAC, decay=decay)
    merged.load_state_dict(one.state_dict())
    merged.merge(apart)  # whose eigenvalues are carried into this basis
    close(merged.operator.trace, (one.operator.trace + of_apart.trace) / 2)
    assert torch.equal(apart.operator.to_dense(), of_apart.to_dense())
    exact.update(data[0])
    close(merged.operator.trace, exact.operator.trace)
    for name in ("0", "3"):
        Q = one.operator.blocks[name].basis.to_dense()
        carried = Q @ torch.diag((Q.T @ of_apart.blocks[name].to_dense() @ Q).diagonal()) @ Q.T
        close(
            merged.operator.blocks[name].to_dense(),
            (one.operator.blocks[name].to_dense() + carried) / 2,
            1e-9,
        )


@pytest.mark.parametrize("approximation", EVERY)
def test_resuming(approximation: str, tmp_path: Any) -> None:
    """In the middle of a pass, with random vectors, after a refresh: bit for bit the same
    continuation.
    """
    model, data = network(), batches(4, 3, 5, 4)
    options = {"vectors": MonteCarlo(1, seed=1), "decay": 0.9, "damping": 0.1}
    running, resumed = (estimator(model, EVERY[approximation], **options) for _ in range(2))
    fed(running, data[:2]).refresh(0.3)
    running.update(data[2])
    state = running.state_dict()
    if approximation != "EKFAC":
        save(running, tmp_path / "state.safetensors")
        state = load(tmp_path / "state.safetensors")
    resumed.load_state_dict(state)
    for each in (running, resumed):
        each.update(data[3])
    assert torch.equal(resumed.operator.to_dense(), running.operator.to_dense())
    v = torch.randn(running.operator.shape[0])
    close(resumed.inverse() @ v, running.inverse() @ v)
    for each in (running, resumed):
        each.refresh()
    assert torch.equal(resumed.inverse() @ v, running.inverse() @ v)
    assert (resumed.updates, resumed.examples, resumed.weight) == (
        running.updates,
        running.examples,
        running.weight,
    )


@pytest.mark.parametrize("approximation", ["KFAC", "EKFAC", "full"])
def test_looking_changes_no_bits(approximation: str) -> None:
    model, data = network(), batches(4, 3, 5)
    running, looked, other = (
        estimator(model, EVERY[approximation], decay=0.9, damping=0.1) for _ in range(3)
    )
    for batch in data:
        running.update(batch)
        looked.update(batch)
        _ = looked.operator.trace, torch.inference_mode()(looked.state_dict)()
        other.load_state_dict(looked.state_dict())
        other.merge(looked)
    assert torch.equal(looked.operator.to_dense(), running.operator.to_dense())
    for each in (running, looked):
        each.refresh()
    assert torch.equal(looked.inverse().to_dense(), running.inverse().to_dense())


def experts(forward: Any = lambda m, x: (m.one if x.sum() > 0 else m.other)(x)) -> nn.Module:
    """Which of two layers runs depends on the data."""
    return Written(forward, one=nn.Linear(3, 3), other=nn.Linear(3, 3))


@pytest.mark.parametrize("approximation", [*SINGLE_PASS, "EKFAC"])
def test_layers_that_never_ran_are_refused_or_left_out(approximation: str) -> None:
    model, (X, y), kind = experts(), batches(4)[0], EVERY[approximation]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), ())
    strict = fed(CurvatureEstimator(risk, kind), [(X.abs(), y)])
    words = (
        r"(?s)layer 'other' was never called in 1 updates.*leave_out_uncalled=True.*\['other'\] now"
    )
    with pytest.raises(ValueError, match=words):
        _ = strict.operator
    running, loaded = (
        CurvatureEstimator(risk, kind, damping=0.1, leave_out_uncalled=True) for _ in range(2)
    )
    running.update((X.abs(), y))
    assert running.uncalled == ["other"]
    part = [("one." + name, p) for name, p in model.one.named_parameters()]
    expected = curvature(
        EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X.abs(), y)], dict(part)), kind
    )
    K, inverse = running.operator, running.inverse()
    close(K.to_dense(), expected.to_dense(), 1e-10)
    close(inverse.to_dense(), expected.inverse(0.1).to_dense(), 1e-10)
    assert list(inverse.in_space.names) == [name for name, _ in part] == list(K.risk.params)
    assert "other" not in repr(K)
    loaded.load_state_dict(running.state_dict())
    close(loaded.inverse().to_dense(), inverse.to_dense(), 1e-10)
    running.update((-X.abs(), y))
    assert (running.uncalled, running.operator.shape) == ([], (24, 24))
    assert running.inverse() is inverse  # until it is refreshed
    running.refresh()
    assert running.inverse().shape == (24, 24)


def test_ekfac_of_a_layer_that_runs_later_counts_all_batches() -> None:
    """Its eigenvalues are means over all examples, those of batches before its first call
    included.
    """
    model, (X, y) = experts(), batches(4)[0]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), ())
    ekfac, diagonal, first, second = (
        CurvatureEstimator(risk, k) for k in (EKFAC, DiagonalBlock, EKFAC, EKFAC)
    )
    for running in (ekfac, diagonal):
        fed(running, [(X.abs(), y), (-X.abs(), y)])
    close(ekfac.operator.trace, diagonal.operator.trace)
    first.update((X.abs(), y))
    second.update((-X.abs(), y))
    first.merge(second)
    close(first.operator.to_dense(), ekfac.operator.to_dense())
    first.refresh(0.1)
    close(first.operator.trace, diagonal.operator.trace)


# ------------------------------------------------------------------ what is refused changes nothing
@pytest.mark.parametrize(("listening", "later"), [(False, False), (True, True)])
@pytest.mark.parametrize("approximation", EVERY)
def test_a_batch_that_is_refused_changes_nothing(
    approximation: str, listening: bool, later: bool
) -> None:
    model, data = network(), batches(4, 4, 4)
    running, other = (
        estimator(model, EVERY[approximation], vectors=MonteCarlo(1, 0), damping=0.1)
        for _ in range(2)
    )
    data[1][0][2, 1] = float("nan")
    for each in (running, other) if later else ():
        each.update(data[0])

    def listen(batch: Any, fails: bool = False) -> None:
        with running.listen(batch):
            model(batch[0])
            if fails:
                raise RuntimeError("mine")

    with pytest.raises(NumericsError, match=r"layer '.*' .*NaN or infinite"):
        (listen if listening else running.update)(data[1])
    with pytest.raises(RuntimeError, match="mine"):
        listen(data[0], fails=True)
    with pytest.raises(ValueError, match="class"):
        running.update((data[0][0], data[0][1] + 7))
    assert (running.updates, running.examples, running.weight) == (
        other.updates,
        other.examples,
        other.weight,
    )
    assert not any(m._forward_hooks for m in model.modules())
    for each in (running, other):
        each.update(data[2])
    assert torch.equal(running.operator.to_dense(), other.operator.to_dense())
    if approximation == "KFAC":
        with pytest.raises(SingularMatrixError):
            running.refresh(damping=0.0)
    assert torch.equal(running.inverse().to_dense(), other.inverse().to_dense())


@pytest.mark.parametrize(("decay", "reduction"), [(0.9, "mean"), (0.9, "sum"), (1.0, "sum")])
@pytest.mark.parametrize("approximation", ["KFAC", "diagonal"])
def test_micro_batches_are_one_batch(approximation: str, reduction: str, decay: float) -> None:
    """Halves, the second one added with `decay=1`, are the whole, also under decay and if the loss
    is a sum.
    """
    model, data, loss = network(), batches(6, 4, 8), nn.CrossEntropyLoss(reduction=reduction)
    whole_batches, halves, merged, parts = (
        estimator(model, EVERY[approximation], loss, decay=decay) for _ in range(4)
    )
    for X, y in data:
        n = len(y) // 2
        whole_batches.update((X, y))
        halves.update((X[:n], y[:n]))
        halves.update((X[n:], y[n:]), decay=1)
        merged.update((X[:n], y[:n]))
        parts.update((X[n:], y[n:]))
    expected = whole_batches.operator.to_dense()
    close(halves.operator.to_dense(), expected)
    merged.merge(parts)
    close(merged.operator.to_dense(), expected)
    resumed = estimator(model, EVERY[approximation], loss, decay=decay)
    resumed.load_state_dict(halves.state_dict())
    for each in (whole_batches, resumed):
        each.update(data[0])
    close(resumed.operator.to_dense(), whole_batches.operator.to_dense())


@pytest.mark.parametrize(
    "damping",
    [
        HeuristicDamping(0.3, min=0.2),
        (0.1, 0.2),
        0.3,
        torch.linspace(0.1, 0.3, 3, dtype=torch.float64),
    ],
    ids=str,
)
def test_dampings(damping: Any) -> None:
    """In `refresh`, in `inverse`, and in an `inverse` before any `refresh`, where the estimator's
    own is 0.
    """
    model, data = network(), batches(4)
    expected = whole(model, KFAC, data).inverse(damping).to_dense()
    for way in ("refresh", "inverse", "at once"):
        running = fed(estimator(model), data)
        if way != "at once":
            running.refresh(damping if way == "refresh" else 0.7)
        found = running.inverse() if way == "refresh" else running.inverse(damping)
        close(found.to_dense(), expected, 1e-10)
        if way == "refresh":
            assert running.inverse(copy.copy(damping)) is found


def test_another_damping_keeps_the_decompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    running = fed(estimator(network(), damping=0.1), batches(4))
    running.refresh()

    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("decomposed again")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    running.inverse(0.5)
    with pytest.raises(AssertionError, match="decomposed again"):
        running.refresh()


@pytest.mark.parametrize(
    ("name", "place"), [("KFAC", 0), ("full", 1), ("EKFAC", 0), ("EKFAC", 2), ("mix", 1)]
)
def test_batches_in_which_nothing_counts(name: str, place: int) -> None:
    """They add their inputs, and nothing else, wherever they come; EKFAC takes its basis from the
    first that counts.
    """
    model, data = network(), batches(6, 5)
    stream = [*data[:place], (torch.randn(4, 3), torch.full((4,), -100)), *data[place:]]
    listening, running, nothing = (estimator(model, EVERY[name], vectors=Exact()) for _ in range(3))
    for batch in stream:
        running.update(batch)
        with listening.listen(batch):
            model(batch[0])
    if name in ("EKFAC", "mix"):  # whose blocks don't depend on inputs without gradients
        expected = fed(nothing, data).operator
        nothing.reset()
    else:
        plan = dict.fromkeys(("0", "3"), EVERY[name])
        expected = curvature(
            running.risk.with_data(stream), plan, default=DiagonalBlock, vectors=Exact()
        )
    torch.testing.assert_close(running.operator.to_dense(), expected.to_dense())
    torch.testing.assert_close(listening.operator.to_dense(), expected.to_dense())
    nothing.update(stream[place])
    with pytest.raises(
        ValueError, match=r"No term of CrossEntropyLoss counts.*skip such batches until one counts"
    ):
        nothing.refresh(0.1)
    nothing.load_state_dict(nothing.state_dict())
    fed(nothing, data).refresh(0.1)
    torch.testing.assert_close(nothing.operator.trace, running.operator.trace)


@pytest.mark.parametrize("listens", [False, True])
def test_sums_in_which_nothing_counts(listens: bool) -> None:
    """Their matrix is zero, and bases come later: from the first batch of which any loss has a
    term.
    """

    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        return dict(zip(("one", "two"), m.net(x).split([3, 3], -1), strict=True))

    model = Written(forward, net=tanh_net(3, 4, 6))
    loss = nn.CrossEntropyLoss(reduction="sum")
    X, y = batches(8)[0]
    none = torch.full_like(y, -100)
    late, plain = (
        CurvatureEstimator(EmpiricalRisk(model, {"one": loss, "two": loss}, ()), EKFAC)
        for _ in range(2)
    )

    def add(one: CurvatureEstimator, targets: dict[str, Tensor]) -> None:
        if not listens:
            return one.update((X, targets))
        with one.listen((X, targets)):
            model(X)

    add(late, {"one": none, "two": none})
    assert not late.operator.to_dense().any()
    late.refresh(0.5)
    torch.testing.assert_close(late.inverse().to_dense(), 2 * torch.eye(46))
    for targets in ({"one": none, "two": y}, {"one": y, "two": y.flip(0)}):
        add(late, targets)
        add(plain, targets)
        torch.testing.assert_close(late.operator.to_dense(), plain.operator.to_dense())


@pytest.mark.parametrize("of", [lambda estimator: estimator, type], ids=["object", "class"])
def test_dir_shows_what_users_call(of: Callable[[CurvatureEstimator], Any]) -> None:
    """And what the package calls begins with an underscore."""
    estimator = CurvatureEstimator(EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), ()))
    shown = {name for name in dir(of(estimator)) if not name.startswith("_")}
    methods = {"inverse", "listen", "load_state_dict", "merge", "refresh", "reset", "state_dict"}
    told = {"draws_by_batch", "operator", "refreshed", "uncalled", "withdrawn"}
    of_class = {"update", *methods, *told}
    options = {"damping", "decay", "leave_out_uncalled", "plan", "risk", "vectors"}
    counts = {"examples", "updates", "weight"}
    assert shown == (of_class if of is type else of_class | options | counts)
