"""Several losses on several outputs: every matrix against plain autodiff, and against one operator
per loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EFLinearOperator,
    EKFACLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    ForwardOnly,
    FullBlock,
    Hessian,
    KFACLinearOperator,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.blocks.files import load, save
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk import Vectors
from curvlinops_plus.risk.vectors import CurvaturePropagation
from test.cases import unchanged
from test.helpers import seeded

Losses = Mapping[Any, tuple[Any, float]]
CE, MSE, BCE = nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss


class Net(nn.Module):
    """A trunk and three heads: classes, numbers, and switches. `keys`: which outputs; None for a
    tuple of all.
    """

    def __init__(self, keys: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(4, 1)
        self.keys = keys
        for key in set("abc").difference(keys or "abc"):
            delattr(self, key)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.trunk(x))
        found = {key: getattr(self, key)(h) for key in self.keys or "abc"}
        if "a" in found:
            found["a"] = found["a"].movedim(-1, 1)  # where PyTorch has classes
        return tuple(found.values()) if self.keys is None else found


def net(*keys: str, kind: type[Net] = Net) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(keys or None).double()


def batches(
    sizes: tuple[int, ...], keys: Any = "abc", terms: tuple[int, ...] = (), ignored: int = 0
) -> list[Any]:
    """Batches for `Net`; with `terms` each has that many positions, and `ignored` of a batch's
    classes are -100.
    """
    generator = seeded(3)
    like: Any = {"generator": generator, "dtype": torch.float64}
    found = []
    for index, n in enumerate(sizes):
        shape = (n, terms[index]) if terms else (n,)
        y: dict[str, Tensor] = {
            "a": torch.randint(0, 3, shape, generator=generator),
            "b": torch.randn(*shape, 2, **like),
            "c": torch.randint(0, 2, (*shape, 1), generator=generator).double(),
        }
        y["a"].view(-1)[: min(index * ignored, y["a"].numel() - 1)] = -100
        x = torch.randn(*shape, 3, **like)
        found.append((x, {k: y[k] for k in keys} if keys else tuple(y.values())))
    return found


def reduced(loss: Any, reduction: str) -> Any:
    loss = copy.copy(loss)
    loss.reduction = reduction
    return loss


class Twin:
    """Matrices of `Σ_h w_h c_h Σ ℓ_h` by definition; PyTorch itself says what each loss's mean
    divides by.
    """

    def __init__(
        self, model: nn.Module, losses: Losses, data: list[Any], num_data: int | None = None
    ) -> None:
        self.params = dict(model.named_parameters())
        self.values = torch.cat([p.detach().flatten() for p in self.params.values()])
        self.parts = []  # of each loss and batch: weight, gradients of examples, GGN
        self.model, self.data, self.losses, self.scales = model, data, losses, dict[Any, float]()
        N = sum(len(x) for x, _ in data)
        for key, (loss, weight) in losses.items():
            plain, mean, divisor = reduced(loss, "sum"), reduced(loss, "mean"), 0.0
            for x, y in data:
                f = self.output(self.values, x, key)
                value = mean(f, y[key])
                divisor += float(plain(f, y[key]) / value) if value.isfinite() else 0.0
                J = jacrev(lambda v, x=x, key=key: self.output(v, x, key).flatten())(self.values)
                of_output = lambda t, y=y, f=f, key=key, plain=plain: plain(t.view_as(f), y[key])  # noqa: E731
                g, H = jacrev(of_output)(f.flatten()), hessian(of_output)(f.flatten())
                rows = (J * g[:, None]).view(len(x), -1, len(self.values)).sum(1)
                self.parts.append((key, weight, rows, J.T @ H @ J))
            self.scales[key] = 1.0 if loss.reduction == "sum" else N / (num_data or N) / divisor

    def output(self, v: Tensor, x: Tensor, key: Any) -> Tensor:
        pieces = v.split([p.numel() for p in self.params.values()])
        named = {
            name: t.view_as(p) for (name, p), t in zip(self.params.items(), pieces, strict=True)
        }
        return functional_call(self.model, named, (x,))[key]

    def value(self, v: Tensor) -> Tensor:
        total = torch.zeros((), dtype=v.dtype)
        for key, (loss, weight) in self.losses.items():
            for x, y in self.data:
                total = total + weight * self.scales[key] * reduced(loss, "sum")(
                    self.output(v, x, key), y[key]
                )
        return total

    def ggn(self) -> Tensor:
        return sum(weight * self.scales[key] * G for key, weight, _, G in self.parts)  # type: ignore[return-value]

    def empirical(self, alone: bool = False) -> Tensor:
        """Of the weighted loss, with products between losses or (one term per example) without."""
        top = max(self.scales.values())
        rows: list[Any] = [
            torch.cat(
                [weight * self.scales[key] / top * g for k, weight, g, _ in self.parts if k == key]
            )
            for key in self.losses
        ]
        return top * sum(g.T @ g for g in (rows if alone else [sum(rows)]))

    def blocks(self, matrix: Tensor) -> Tensor:
        """Entries of a block per layer."""
        names = [name.rpartition(".")[0] for name in self.params]
        owner = torch.cat(
            [torch.full((p.numel(),), names.index(n)) for n, p in zip(names, self.params.values())]
        )
        return matrix * (owner[:, None] == owner)


def close(one: Any, other: Any, tolerance: float = 1e-10) -> None:
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    error, size = float((one - other).norm()), float(other.norm())
    assert error <= tolerance * size, f"{error / max(size, 1e-300)}"
    assert size > 0


def flat(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradient.values()])


WEIGHTS = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)
CASES: dict[str, tuple[Losses, dict[str, Any]]] = {
    "two": ({"a": (CE(), 1.3), "b": (MSE(), 0.5)}, {}),
    "three": ({"a": (CE(), 1.0), "b": (MSE(), 0.25), "c": (BCE(), 3.0)}, {}),
    "ignored": ({"a": (CE(), 1.3), "b": (MSE(), 0.5)}, {"ignored": 1}),
    "class weights": (
        {"a": (CE(weight=WEIGHTS, label_smoothing=0.1), 0.7), "c": (BCE(), 2.0)},
        {"ignored": 1},
    ),
    "sums": ({"a": (CE(reduction="sum"), 1.3), "b": (MSE(reduction="sum"), 0.5)}, {"ignored": 1}),
    "mixed": (
        {"a": (CE(), 1.3), "b": (MSE(reduction="sum"), 0.5), "c": (BCE(), 1.0)},
        {"ignored": 1},
    ),
    "positions": (
        {"a": (CE(), 1.3), "b": (MSE(), 0.5), "c": (BCE(reduction="sum"), 0.1)},
        {"terms": (2, 2, 2)},
    ),
    "lengths": ({"a": (CE(), 1.3), "b": (MSE(), 0.5)}, {"terms": (2, 3, 1), "ignored": 1}),
    "one": ({"b": (MSE(), 0.5)}, {}),
}
PAIR = {"a": CE(), "b": MSE()}


def case(
    name: str, sizes: tuple[int, ...] = (3, 5, 2), num_data: int | None = None
) -> tuple[Net, Losses, list[Any], Twin]:
    losses, options = CASES[name]
    model, data = net(*losses), batches(sizes, tuple(losses), **options)
    return model, losses, data, Twin(model, losses, data, num_data)


def trunk(model: Net, losses: Any, data: Any, **options: Any) -> EmpiricalRisk:
    """Of the trunk's parameters alone: it is the layer that every loss reaches."""
    return EmpiricalRisk(
        model, losses, data, dict(model.trunk.named_parameters(prefix="trunk")), **options
    )


def dense(risk: EmpiricalRisk, approximation: Any = FullBlock, vectors: Any = None) -> Tensor:
    return curvature(risk, approximation, vectors=vectors).to_dense()


@pytest.mark.parametrize("num_data", [None, 20])
@pytest.mark.parametrize("name", CASES)
def test_matrices_are_those_of_the_weighted_sum(name: str, num_data: int | None) -> None:
    model, losses, data, twin = case(name, num_data=num_data)
    ggn = twin.ggn()
    risk = EmpiricalRisk(model, losses, data, num_data=num_data)
    with unchanged(model):
        close(GGN(risk).to_dense(), ggn)
        close(Hessian(risk).to_dense(), hessian(twin.value)(twin.values))
        close(dense(risk), twin.blocks(ggn))
        close(curvature(risk, DiagonalBlock).diagonal(), ggn.diagonal())
    close(risk.loss(), twin.value(twin.values))
    gradient, loss = risk.gradient_and_loss()
    close(flat(gradient), jacrev(twin.value)(twin.values))
    close(loss, risk.loss())
    corrected = curvature(risk, EKFAC)
    close(corrected.trace, ggn.trace())
    errors = [
        float((K.to_dense() - twin.blocks(ggn)).norm()) for K in (corrected, curvature(risk, KFAC))
    ]
    assert errors[0] <= errors[1] * (1 + 1e-10)
    corrected.verify()
    if name not in ("positions", "lengths"):
        close(dense(risk, vectors=Empirical()), twin.blocks(twin.empirical()))
        close(
            dense(risk, vectors=Empirical(per_term=True)), twin.blocks(twin.empirical(alone=True))
        )
        E = EFLinearOperator(model, losses, list(model.parameters()), data, num_data=num_data)
        close(E.to_dense(), twin.empirical(alone=True))


@pytest.mark.parametrize("name", ["two", "three", "ignored", "class weights", "sums", "mixed"])
def test_factors(name: str) -> None:
    """One position: G is the GGN of the bias, and A the mean of the inputs' outer products."""
    model, losses, data, twin = case(name)
    K = KFACLinearOperator(model, losses, list(model.parameters()), data, fisher_type="type-2")
    G = twin.ggn().split([p.numel() for p in model.parameters()])
    for index, layer in enumerate(name for name, _ in model.named_children()):
        at = sum(p.numel() for p in list(model.parameters())[: 2 * index + 1])
        rows = G[2 * index + 1]
        close(K.gradient_covariances[layer], rows[:, at : at + len(rows)])
    X = torch.cat([x for x, _ in data])
    close(K.input_covariances["trunk"], X.T @ X / len(X))


def alone(
    model: Net,
    losses: Losses,
    data: list[Any],
    make: Callable[[EmpiricalRisk], Any],
    **options: Any,
) -> Tensor:
    """`Σ_h w_h` times what one loss gives by itself."""
    total: Any = 0
    for key, (loss, weight) in losses.items():
        mine = [(x, y[key]) for x, y in data]
        total = total + weight * make(
            trunk(model, loss, mine, output=lambda out, key=key: out[key], **options)
        )
    return total


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    keys=st.permutations("abc").flatmap(lambda p: st.integers(2, 3).map(lambda n: tuple(p[:n]))),
    reductions=st.lists(st.sampled_from(["mean", "sum"]), min_size=3, max_size=3),
    weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    shape=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3),
    ignored=st.integers(0, 2),
    masked=st.booleans(),
)
def test_any_losses_in_any_batches_are_the_sum_of_each(
    keys: Any, reductions: Any, weights: Any, shape: Any, ignored: int, masked: bool
) -> None:
    def mask(x: Tensor, y: Any) -> Tensor:
        kept = x[..., 0] > -0.3
        kept[:, -1] = True
        return kept

    sizes, terms = zip(*shape)
    kinds = {"a": CE, "b": MSE, "c": BCE}
    losses = {
        k: (kinds[k](reduction=r), w) for k, r, w in zip(keys, reductions, weights, strict=False)
    }
    model, data, options = (
        net(*keys),
        batches(sizes, keys, terms, ignored),
        {"mask": mask} if masked else {},
    )
    close(
        dense(trunk(model, losses, data, **options)), alone(model, losses, data, dense, **options)
    )
    close(
        GGN(trunk(model, losses, data)).to_dense(),
        alone(model, losses, data, lambda r: GGN(r).to_dense()),
    )


VECTORS = [
    Exact(),
    Exact(signs=True, seed=1),
    MonteCarlo(3, seed=2),
    CurvaturePropagation(2, seed=3),
    Empirical(),
]


@pytest.mark.parametrize("vectors", [*VECTORS, Empirical(per_term=True), ForwardOnly()], ids=repr)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_loss_in_a_dict_is_that_loss(vectors: Vectors, reduction: str) -> None:
    for key, loss in (("a", CE(reduction=reduction)), ("b", MSE(reduction=reduction))):
        model, data = net("a", "b"), batches((3, 5, 2), "ab", (2, 1, 3), ignored=1)
        plain = trunk(
            model, loss, [(x, y[key]) for x, y in data], output=lambda out, key=key: out[key]
        )
        of_one = [(x, {key: y[key]}) for x, y in data]
        headed = trunk(model, {key: loss}, of_one, output=lambda out, key=key: {key: out[key]})
        for kind in (KFAC,) if isinstance(vectors, ForwardOnly) else (KFAC, EKFAC, FullBlock):
            close(dense(plain, kind, vectors), dense(headed, kind, vectors), 1e-13)


def test_parameters_that_one_loss_does_not_reach() -> None:
    model, losses, data, twin = case("two")
    for layer, at in ("a", slice(16, 31)), ("b", slice(31, 41)):
        params = dict(getattr(model, layer).named_parameters(prefix=layer))
        risk = EmpiricalRisk(model, losses, data, params)
        for found in (dense(risk), GGN(risk).to_dense()):
            close(found, twin.ggn()[at, at])
        assert all(
            float(curvature(risk, vectors=vectors).trace) > 0
            for vectors in (MonteCarlo(), Empirical())
        )


# ----------------------------------------------------------------------------- passes over the data


@pytest.mark.parametrize("name", ["three", "sums", "positions"])
@pytest.mark.parametrize("kind", [KFAC, DiagonalBlock])
def test_a_stream_adds_up_to_the_data(name: str, kind: Any) -> None:
    model, losses, data, _ = case(name)
    if name == "positions":  # the third one is a sum
        model, losses = net("a", "b"), {k: losses[k] for k in "ab"}
        data = [(x, {k: y[k] for k in losses}) for x, y in data]
    estimator = CurvatureEstimator(EmpiricalRisk(model, losses, ()), kind, vectors=MonteCarlo(2, 1))
    for batch in data:
        estimator.update(batch)
    close(
        estimator.operator.to_dense(),
        dense(EmpiricalRisk(model, losses, data), kind, MonteCarlo(2, 1)),
        1e-12,
    )


def test_a_stream_listens_resumes_and_merges() -> None:
    model, losses, data, twin = case("two", (3, 5, 2, 4))
    one, other, resumed, moving = (
        CurvatureEstimator(EmpiricalRisk(model, losses, ()), FullBlock, decay=decay)
        for decay in (1.0, 1.0, 1.0, 0.5)
    )
    for x, y in data[:2]:
        with one.listen((x, y)):
            out = model(x)
            value = sum(weight * loss(out[key], y[key]) for key, (loss, weight) in losses.items())
        value.backward()
    model.zero_grad()
    resumed.load_state_dict(one.state_dict())
    resumed.update(data[2])
    other.update(data[3])
    resumed.merge(other)
    close(resumed.operator.to_dense(), twin.blocks(twin.ggn()))

    for batch in data:
        moving.update(batch)
    weights = [0.5 ** (3 - k) * len(x) for k, (x, _) in enumerate(data)]
    parts = [
        w / sum(weights) * Twin(model, losses, [batch]).ggn() for w, batch in zip(weights, data)
    ]
    close(moving.operator.to_dense(), twin.blocks(sum(parts)))  # type: ignore[arg-type]


def test_a_stream_with_uneven_proportions_is_refused_and_unchanged() -> None:
    model, losses, data, _ = case("ignored")
    one, other = (CurvatureEstimator(EmpiricalRisk(model, losses, ())) for _ in range(2))
    one.update(data[0])
    other.update(data[1])
    before = one.operator.to_dense()
    x, y = data[0]
    for run, words in (
        (lambda: one.update(data[1]), r"relative weights are 1.3 : "),
        (
            lambda: one.update((x, {**y, "a": torch.full_like(y["a"], -100)})),
            "No term of loss .a. .* counts",
        ),
        (lambda: one.merge(other), r"relative weights are 1.3 : 0.25 here and 1.3 : 0.2 there"),
    ):
        with pytest.raises(ValueError, match=words):
            run()
        close(one.operator.to_dense(), before, 1e-15)
    # Other proportions are fine under "sum".
    sums = CurvatureEstimator(EmpiricalRisk(model, CASES["sums"][0], ()))
    for batch in data:
        sums.update(batch)
    model, losses, data, _ = case("mixed")
    with pytest.raises(ValueError, match="for all losses"):
        CurvatureEstimator(EmpiricalRisk(model, losses, ())).update(data[0])


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("form", [dict, tuple])
def test_a_state_has_all_losses_with_their_options(kind: Any, form: Any, tmp_path: Path) -> None:
    named = {"a": (CE(weight=WEIGHTS), 1.3), "b": (MSE(), 0.5), "c": (BCE(), 1.0)}
    model, data = (net(*"abc"), batches((3, 5))) if form is dict else (net(), batches((3, 5), ()))
    params = list(model.parameters())

    def made(**changed: Any) -> Any:
        mine = {**named, **changed}
        return kind(
            model,
            mine if form is dict else (*mine.values(),),
            params,
            data,
            check_deterministic=False,
        )

    K = made()
    assert [(type(one.loss), one.weight) for one in K.risk.losses] == [
        (CE, 1.3),
        (MSE, 0.5),
        (BCE, 1.0),
    ]
    save(K.state_dict(), tmp_path / "K.safetensors")
    for state in (K.state_dict(), load(tmp_path / "K.safetensors")):
        again = kind.from_state_dict(state, model, params, data)
        close(again.to_dense(), K.to_dense(), 1e-15)
        assert type(again.risk.losses.given) is form
        made().load_state_dict(state)
        again.compute()
        close(again.to_dense(), K.to_dense(), 1e-13)
    for changed in ({"b": (MSE(), 0.6)}, {"a": (CE(), 1.3)}, {"a": (CE(weight=2 * WEIGHTS), 1.3)}):
        with pytest.raises(ValueError, match="State mismatch in loss"):
            made(**changed).load_state_dict(K.state_dict())
    one = [(x, y["b" if form is dict else 1]) for x, y in data]
    single = kind(net("b"), MSE(), None, one, output=lambda o: o["b"], check_deterministic=False)
    with pytest.raises(ValueError, match="State mismatch in "):
        K.load_state_dict(single.state_dict())


X, Y = batches((3,))[0]
TARGETS = {k: Y[k] for k in "ab"}
IGNORED = {**TARGETS, "a": torch.full_like(Y["a"], -100)}
POSITIVE = r"loss for the output 'b' is .*; expected a positive finite number\.$"
NO_PAIR = r"The loss for the output 'b' is .*a pair \(loss, weight\)"
NO_TERM = r"No term of loss 'a' \(CrossEntropyLoss\) counts"


def refused(
    losses: Any, words: str, y: Any = TARGETS, keys: str = "ab", **options: Any
) -> tuple[Any, ...]:
    return losses, words, y, keys, options


REFUSED = [
    refused({}, "There are no losses"),
    refused((CE(), 1.0), r"The loss for the output 1 is 1.0"),
    refused({"a": CE(), "b": (CE(), 1.0, 2.0)}, NO_PAIR),
    *(
        refused({"a": CE(), "b": (MSE(), weight)}, POSITIVE)
        for weight in (-1.0, float("nan"), float("inf"), 0.0)
    ),
    refused({"a": CE(), "b": MSE(reduction="none")}, r"loss .b. \(MSELoss\)"),
    refused({"a": CE(), "box": MSE()}, r"\['a', 'b'\], but .* \['a', 'box'\]\. Outputs can"),
    refused(PAIR, r"outputs \['a', 'b', 'c'\], ", keys="abc"),
    refused(PAIR, r"tuple with outputs \[0, 1, 2\], but the losses are a dict", keys=""),
    refused(
        PAIR,
        r"MSELoss needs a target of the output's shape \[3, 2\], got \[3, 1\]",
        {**TARGETS, "b": Y["c"]},
    ),
    refused(PAIR, r"has a Tensor, but the losses are a dict", Y["a"]),
    refused(PAIR, r"targets \['a'\], but the losses are a dict", {"a": Y["a"]}),
    refused(PAIR, NO_TERM, IGNORED),
    refused(PAIR, r"shift_labels is about one loss.*\['a', 'b'\]", shift_labels=True),
]


@pytest.mark.parametrize(("losses", "words", "targets", "keys", "options"), REFUSED)
def test_what_does_not_match_is_refused(
    losses: Any, words: str, targets: Any, keys: str, options: Any
) -> None:
    with pytest.raises((ValueError, UnsupportedError), match=words):
        EmpiricalRisk(net(*keys), losses, [(X, targets)], **options).loss()
