"""Several losses on several outputs: every matrix against plain autodiff, and against one operator per loss."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import unchanged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    EFLinearOperator,
    EKFACLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    FisherMCLinearOperator,
    ForwardOnly,
    FullBlock,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.blocks.estimator import CurvatureEstimator
from curvlinops_plus.blocks.serialization import load, save
from curvlinops_plus.errors import UnsupportedError, VerificationError
from curvlinops_plus.likelihood import Likelihood, register_likelihood
from curvlinops_plus.risk import Vectors, find_layers
from curvlinops_plus.risk.sweep import sweep
from curvlinops_plus.risk.vectors import CurvaturePropagation

Losses = Mapping[Any, tuple[Any, float]]


class Net(nn.Module):
    """A trunk and three heads: classes, numbers, and switches.

    Args:
        keys: Which outputs, in which order; None for a tuple of all.
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


def net(*keys: str, seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(keys or None).double()


def batches(
    sizes: tuple[int, ...],
    keys: tuple[Any, ...] = ("a", "b", "c"),
    terms: tuple[int | None, ...] = (),
    ignored: int = 0,
) -> list[tuple[Tensor, Any]]:
    """Batches for `Net`; with `terms` each has that many positions, and `ignored` of a batch's classes are -100."""
    generator = torch.Generator().manual_seed(3)
    like = {"generator": generator, "dtype": torch.float64}
    found = []
    for index, n in enumerate(sizes):
        shape = (n,) if not terms or terms[index] is None else (n, terms[index])
        y: dict[Any, Tensor] = {
            "a": torch.randint(0, 3, shape, generator=generator),
            "b": torch.randn(*shape, 2, **like),
            "c": torch.randint(0, 2, (*shape, 1), generator=generator).double(),
        }
        y["a"].view(-1)[: min(index * ignored, y["a"].numel() - 1)] = -100
        x = torch.randn(*shape, 3, **like)
        found.append((x, {k: y[k] for k in keys} if keys else tuple(y.values())))
    return found


class Twin:
    """Matrices of `Σ_h w_h c_h Σ ℓ_h` by definition; PyTorch itself says what each loss's mean divides by."""

    def __init__(self, model: nn.Module, losses: Losses, data: list[Any], num_data: int | None = None) -> None:
        self.params = dict(model.named_parameters())
        self.values = torch.cat([p.detach().flatten() for p in self.params.values()])
        self.parts = []  # of each loss and batch: outputs, J, gradients of the terms, Hessian of the sum
        self.scales: dict[Any, float] = {}
        for key, (loss, _) in losses.items():
            plain = copy.copy(loss)
            plain.reduction = "sum"
            mean = copy.copy(loss)
            mean.reduction = "mean"
            divisor = 0.0
            for x, y in data:
                f = self.output(model, x, key)(self.values)
                value = mean(f, y[key])
                divisor += float(plain(f, y[key]) / value) if value.isfinite() else 0.0
                J = jacrev(lambda v, x=x, key=key: self.output(model, x, key)(v).flatten())(self.values)
                H = hessian(lambda t, y=y, f=f, key=key, plain=plain: plain(t.view_as(f), y[key]))(f.flatten())
                g = jacrev(lambda t, y=y, f=f, key=key, plain=plain: plain(t.view_as(f), y[key]))(f.flatten())
                self.parts.append((key, len(x), f, J, g, H))
            N = sum(len(x) for x, _ in data)
            self.scales[key] = 1.0 if loss.reduction == "sum" else N / (num_data or N) / divisor
        self.weights = {key: weight for key, (_, weight) in losses.items()}
        self.losses, self.data, self.model = losses, data, model

    def output(self, model: nn.Module, x: Tensor, key: Any) -> Callable[[Tensor], Tensor]:
        def function(v: Tensor) -> Tensor:
            pieces = v.split([p.numel() for p in self.params.values()])
            named = {name: t.view_as(p) for (name, p), t in zip(self.params.items(), pieces)}
            return functional_call(model, named, (x,))[key]

        return function

    def value(self, v: Tensor) -> Tensor:
        total = torch.zeros((), dtype=v.dtype)
        for key, (loss, weight) in self.losses.items():
            plain = copy.copy(loss)
            plain.reduction = "sum"
            for x, y in self.data:
                total = total + weight * self.scales[key] * plain(self.output(self.model, x, key)(v), y[key])
        return total

    def ggn(self) -> Tensor:
        return sum(self.weights[key] * self.scales[key] * J.T @ H @ J for key, _, _, J, _, H in self.parts)  # type: ignore[return-value]

    def empirical(self, alone: bool = False) -> Tensor:
        """Of the weighted loss, with products between losses or (one term per example) without."""
        top = max(self.scales.values())
        P = len(self.values)
        rows: dict[Any, Tensor] = {}
        for key in self.weights:
            found = [
                (self.weights[key] * self.scales[key] / top * J * g[:, None]).view(n, -1, P).sum(1)
                for k, n, _, J, g, _ in self.parts
                if k == key
            ]
            rows[key] = torch.cat(found)
        if alone:
            return top * sum(g.T @ g for g in rows.values())  # type: ignore[return-value]
        total = sum(rows.values())
        assert isinstance(total, Tensor)
        return top * total.T @ total

    def blocks(self, matrix: Tensor, separate: bool = False) -> Tensor:
        """Entries of a block per layer, or per parameter."""
        names = [name if separate else name.rpartition(".")[0] for name in self.params]
        owner = torch.cat([torch.full((p.numel(),), names.index(n)) for n, p in zip(names, self.params.values())])
        return matrix * (owner[:, None] == owner)


def close(one: Any, other: Any, tolerance: float = 1e-10) -> None:
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    size = float(other.norm())
    assert float((one - other).norm()) <= tolerance * size, f"{float((one - other).norm()) / max(size, 1e-300)}"
    assert size > 0


CE, MSE, BCE = nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss
WEIGHTS = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)
CASES: dict[str, tuple[Losses, dict[str, Any]]] = {
    "two": ({"a": (CE(), 1.3), "b": (MSE(), 0.5)}, {}),
    "three": ({"a": (CE(), 1.0), "b": (MSE(), 0.25), "c": (BCE(), 3.0)}, {}),
    "ignored": ({"a": (CE(), 1.3), "b": (MSE(), 0.5)}, {"ignored": 1}),
    "class weights": ({"a": (CE(weight=WEIGHTS, label_smoothing=0.1), 0.7), "c": (BCE(), 2.0)}, {"ignored": 1}),
    "sums": ({"a": (CE(reduction="sum"), 1.3), "b": (MSE(reduction="sum"), 0.5)}, {"ignored": 1}),
    "mixed": ({"a": (CE(), 1.3), "b": (MSE(reduction="sum"), 0.5), "c": (BCE(), 1.0)}, {"ignored": 1}),
    "positions": ({"a": (CE(), 1.3), "b": (MSE(), 0.5), "c": (BCE(reduction="sum"), 0.1)}, {"terms": (2, 2, 2)}),
    "lengths": ({"a": (CE(), 1.3), "b": (MSE(), 0.5)}, {"terms": (2, 3, 1), "ignored": 1}),
    "one": ({"b": (MSE(), 0.5)}, {}),
}
every_case = pytest.mark.parametrize("name", CASES)


def case(name: str, sizes: tuple[int, ...] = (3, 5, 2)) -> tuple[Net, Losses, list[Any], Twin]:
    losses, options = CASES[name]
    model, data = net(*losses), batches(sizes, tuple(losses), **options)
    return model, losses, data, Twin(model, losses, data)


# -------------------------------------------------------------------------------------------- the matrix, by definition


@every_case
def test_exact_operators_are_those_of_the_weighted_sum(name: str) -> None:
    model, losses, data, twin = case(name)
    params = list(model.parameters())
    with unchanged(model):
        close(GGNLinearOperator(model, losses, params, data).to_dense(), twin.ggn())
        close(HessianLinearOperator(model, losses, params, data).to_dense(), hessian(twin.value)(twin.values))
    risk = EmpiricalRisk(model, losses, data)
    close(risk.loss(), twin.value(twin.values))
    gradient, loss = risk.gradient_and_loss()
    close(torch.cat([g.flatten() for g in gradient.values()]), jacrev(twin.value)(twin.values))
    close(loss, risk.loss())


@every_case
def test_blocks_are_those_of_the_ggn(name: str) -> None:
    model, losses, data, twin = case(name)
    risk, ggn = EmpiricalRisk(model, losses, data), twin.ggn()
    with unchanged(model):
        close(curvature(risk, FullBlock).to_dense(), twin.blocks(ggn))
        close(curvature(risk, DiagonalBlock).diagonal(), ggn.diagonal())
    corrected = curvature(risk, EKFAC)
    close(corrected.trace, ggn.trace())
    error = {kind: float((curvature(risk, kind).to_dense() - twin.blocks(ggn)).norm()) for kind in (KFAC, EKFAC)}
    assert error[EKFAC] <= error[KFAC] * (1 + 1e-10)
    corrected.verify()


@pytest.mark.parametrize("name", ["two", "three", "ignored", "class weights", "sums", "mixed"])
def test_factors(name: str) -> None:
    """One position: G is the GGN of the bias, and A the mean of the inputs' outer products."""
    model, losses, data, twin = case(name)
    K = KFACLinearOperator(model, losses, list(model.parameters()), data, fisher_type="type-2")
    ggn, at = twin.ggn(), 0
    for name, p in model.named_parameters():
        layer, kind = name.split(".")
        if kind == "bias" and layer in ("trunk", *losses):
            block = ggn[at : at + p.numel(), at : at + p.numel()]
            close(K.gradient_covariances[layer], block)
        at += p.numel()
    X = torch.cat([x for x, _ in data])
    close(K.input_covariances["trunk"], X.T @ X / len(X))


@pytest.mark.parametrize("name", ["two", "three", "ignored", "class weights", "sums", "mixed", "one"])
def test_the_empirical_fisher_is_that_of_the_weighted_loss(name: str) -> None:
    model, losses, data, twin = case(name)
    risk = EmpiricalRisk(model, losses, data)
    close(curvature(risk, FullBlock, vectors=Empirical()).to_dense(), twin.blocks(twin.empirical()))
    alone = curvature(risk, FullBlock, vectors=Empirical(per_term=True)).to_dense()
    close(alone, twin.blocks(twin.empirical(alone=True)))
    EF = EFLinearOperator(model, losses, list(model.parameters()), data).to_dense()
    close(EF, twin.empirical(alone=True))


def test_losses_with_equal_means_have_the_mean_of_their_gradients_products() -> None:
    """The case in which everybody means the same by "empirical Fisher"."""
    data = batches((3, 4), ("a", "c"))
    model, losses = net("a", "c"), {"a": (CE(), 2.0), "c": (BCE(), 0.5)}
    rows = []
    for x, y in data:
        for n in range(len(x)):
            out = model(x[n : n + 1])
            value = 2.0 * CE()(out["a"], y["a"][n : n + 1]) + 0.5 * BCE()(out["c"], y["c"][n : n + 1])
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.trunk.parameters()))]))
    g = torch.stack(rows)
    close(of_trunk(EmpiricalRisk(model, losses, data), vectors=Empirical()), g.T @ g / 7)


# ------------------------------------------------------------------------------------- the sum of one operator per loss


def alone(model: nn.Module, losses: Losses, data: list[Any], make: Callable[[EmpiricalRisk], Any]) -> Tensor:
    """`Σ_h w_h` times what one loss gives by itself."""
    total: Any = 0
    for key, (loss, weight) in losses.items():
        mine = [(x, y[key]) for x, y in data]
        risk = EmpiricalRisk(model, loss, mine, output=lambda out, key=key: out[key])
        total = total + weight * make(risk)
    return total


def of_trunk(risk: EmpiricalRisk, approximation: Any = FullBlock, vectors: Any = None) -> Tensor:
    """The trunk's block: it is the layer that every loss reaches."""
    model = risk.model
    assert isinstance(model, Net)
    own = copy.copy(risk)
    params = dict(model.trunk.named_parameters(prefix="trunk"))
    own = EmpiricalRisk(model, risk.losses.given, risk.data, params, output=risk.options.output, mask=risk.options.mask)
    return curvature(own, approximation, vectors=vectors).to_dense()


LOSS_OF = {"a": CE, "b": MSE, "c": BCE}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    keys=st.permutations("abc").flatmap(lambda p: st.integers(2, 3).map(lambda n: tuple(p[:n]))),
    reductions=st.lists(st.sampled_from(["mean", "sum"]), min_size=3, max_size=3),
    weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    shape=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3),
    ignored=st.integers(0, 2),
)
def test_any_losses_in_any_batches_are_the_sum_of_each(
    keys: tuple[str, ...], reductions: list[str], weights: list[float], shape: list[tuple[int, int]], ignored: int
) -> None:
    sizes, terms = zip(*shape)
    losses = {k: (LOSS_OF[k](reduction=r), w) for k, r, w in zip(keys, reductions, weights)}
    model, data = net(*keys), batches(sizes, keys, terms, ignored)
    risk = EmpiricalRisk(model, losses, data)
    close(of_trunk(risk), alone(model, losses, data, of_trunk))
    G = GGNLinearOperator(model, losses, list(model.trunk.parameters()), data)
    one = alone(
        model,
        losses,
        data,
        lambda r: GGNLinearOperator(
            model, r.losses.given, list(model.trunk.parameters()), r.data, output=r.options.output
        ).to_dense(),
    )
    close(G.to_dense(), one)


def test_a_tuple_is_like_a_dict() -> None:
    losses, data = CASES["three"][0], batches((3, 5))
    K = curvature(EmpiricalRisk(net("a", "b", "c"), losses, data), EKFAC)
    pairs = tuple(losses.values())
    for form in (pairs, list(pairs), [[loss, weight] for loss, weight in pairs]):
        given = [(x, tuple(y.values())) for x, y in data]
        close(curvature(EmpiricalRisk(net(), form, given), EKFAC).to_dense(), K.to_dense(), 1e-14)


def test_a_loss_without_weight_has_weight_one() -> None:
    data = batches((3,), ("a", "b"))
    with_weight = EmpiricalRisk(net("a", "b"), {"a": (CE(), 1), "b": (MSE(), 2.0)}, data)
    without = EmpiricalRisk(net("a", "b"), {"a": CE(), "b": (MSE(), 2.0)}, data)
    close(curvature(without).to_dense(), curvature(with_weight).to_dense(), 1e-15)


VECTORS = [Exact(), Exact(signs=True, seed=1), MonteCarlo(3, seed=2), CurvaturePropagation(2, seed=3), Empirical()]


@pytest.mark.parametrize("vectors", [*VECTORS, Empirical(per_term=True), ForwardOnly()], ids=repr)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_loss_in_a_dict_is_that_loss(vectors: Vectors, reduction: str) -> None:
    for key, loss in (("a", CE(reduction=reduction)), ("b", MSE(reduction=reduction))):
        model, data = net("a", "b"), batches((3, 5, 2), ("a", "b"), (2, 1, 3), ignored=1)
        plain = EmpiricalRisk(model, loss, [(x, y[key]) for x, y in data], output=lambda out, key=key: out[key])
        headed = EmpiricalRisk(
            model, {key: loss}, [(x, {key: y[key]}) for x, y in data], output=lambda out, key=key: {key: out[key]}
        )
        params = dict(model.trunk.named_parameters(prefix="trunk"))
        for risk in (plain, headed):
            risk.params = params
        for kind in (KFAC,) if isinstance(vectors, ForwardOnly) else (KFAC, EKFAC, FullBlock):
            one, other = (
                curvature(
                    EmpiricalRisk(model, r.losses.given, r.data, params, output=r.options.output), kind, vectors=vectors
                ).to_dense()
                for r in (plain, headed)
            )
            close(one, other, 1e-13)


def test_outputs_inside_of_an_object_are_picked() -> None:
    losses, data = CASES["two"][0], batches((3, 2), ("a", "b"))

    class Wrapped(Net):
        def forward(self, x: Tensor) -> Any:
            return {"features": x, "heads": list(super().forward(x).values())}

    model = Wrapped(("a", "b")).double()
    model.load_state_dict(net("a", "b").state_dict())
    risk = EmpiricalRisk(model, losses, data, output=lambda o: {"a": o["heads"][0], "b": o["heads"][1]})
    close(curvature(risk).to_dense(), curvature(EmpiricalRisk(net("a", "b"), losses, data)).to_dense(), 1e-14)


def test_hugging_face_logits_among_several_outputs() -> None:
    """Classes of `.logits` are on the last axis, also if it is one of several outputs."""

    class Output(dict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            if name in self:
                return self[name]
            raise AttributeError(name)

    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            a, b, _ = super().forward(x)
            return Output(logits=a.movedim(1, -1), b=b)

    torch.manual_seed(0)
    model = Model().double()
    model.load_state_dict(net().state_dict())
    data = batches((3, 2), ("a", "b"), (2, 2))
    losses = CASES["two"][0]
    risk = EmpiricalRisk(
        model, losses, data, dict(model.trunk.named_parameters(prefix="t")), output=lambda o: {"a": o.logits, "b": o.b}
    )
    close(curvature(risk, FullBlock).to_dense(), of_trunk(EmpiricalRisk(net("a", "b"), losses, data)), 1e-13)


def test_masked_positions() -> None:
    losses = {"a": (CE(), 1.5), "b": (MSE(), 0.5)}
    model, data = net("a", "b"), batches((3, 2), ("a", "b"), (3, 2))
    mask = lambda x, y: x[..., 0] > -0.3  # noqa: E731
    assert not all(bool(mask(x, y).all()) for x, y in data)
    masked = of_trunk(EmpiricalRisk(model, losses, data, mask=mask))

    def one(risk: EmpiricalRisk) -> Tensor:
        risk.options = replace(risk.options, mask=mask)
        return of_trunk(risk)

    close(masked, alone(model, losses, data, one))


def test_num_data_replaces_the_number_of_examples() -> None:
    losses = {"a": (CE(), 1.3), "b": (MSE(), 0.5), "c": (BCE(reduction="sum"), 0.5)}
    model, data = net("a", "b", "c"), batches((3, 5), ignored=1)
    twin = Twin(model, losses, data, num_data=20)
    params = list(model.parameters())
    close(GGNLinearOperator(model, losses, params, data, num_data=20).to_dense(), twin.ggn())
    risk = EmpiricalRisk(model, losses, data, num_data=20)
    close(curvature(risk, FullBlock).to_dense(), twin.blocks(twin.ggn()))
    close(risk.loss(), twin.value(twin.values))
    gradient = torch.cat([g.flatten() for g in risk.gradient().values()])
    close(gradient, jacrev(twin.value)(twin.values))


def test_losses_without_a_likelihood_in_the_exact_operators() -> None:
    model, data = net("a", "b"), batches((3, 5), ("a", "b"))
    losses = {"a": (CE(), 1.3), "b": (nn.HuberLoss(delta=0.3), 0.5)}
    params = list(model.parameters())
    twin = Twin(model, losses, data)
    close(HessianLinearOperator(model, losses, params, data).to_dense(), hessian(twin.value)(twin.values))
    close(GGNLinearOperator(model, losses, params, data).to_dense(), twin.ggn())
    with pytest.raises(UnsupportedError, match=r"loss 'b' \(HuberLoss\): no likelihood is registered"):
        KFACLinearOperator(model, losses, params, data)
    function = {"a": CE(), "b": nn.functional.huber_loss}
    assert EmpiricalRisk(model, function, data, reduction="sum").losses.reduction == "mean"
    silent = EmpiricalRisk(model, {"b": nn.functional.huber_loss}, data, reduction="sum")
    assert silent.losses.reduction == "sum"
    with pytest.raises(
        UnsupportedError, match=r"loss 'b' \(HuberLoss\): HuberLoss\(reduction='none'\) is no scalar loss"
    ):
        HessianLinearOperator(model, {"a": CE(), "b": nn.HuberLoss(reduction="none")}, params, data)


def test_parameters_that_one_loss_does_not_reach() -> None:
    model, losses, data, twin = case("two")
    for layer in ("a", "b"):
        params = dict(getattr(model, layer).named_parameters(prefix=layer))
        at = [sum(p.numel() for p in list(model.parameters())[: 2 + 2 * (layer == "b")])]
        size = sum(p.numel() for p in params.values())
        block = twin.ggn()[at[0] : at[0] + size, at[0] : at[0] + size]
        close(curvature(EmpiricalRisk(model, losses, data, params), FullBlock).to_dense(), block)
        close(GGNLinearOperator(model, losses, params, data).to_dense(), block)
    for vectors in (MonteCarlo(), Empirical()):
        assert float(curvature(EmpiricalRisk(model, losses, data, params), vectors=vectors).trace) > 0


# ------------------------------------------------------------------------------------------------------- random vectors


@pytest.mark.parametrize("vectors", [MonteCarlo(2, seed=5), CurvaturePropagation(2, seed=5), Exact(True, 5)], ids=repr)
def test_draws_do_not_depend_on_batches(vectors: Vectors) -> None:
    losses = CASES["three"][0]
    whole = batches((7,), terms=(2,))
    (x, y) = whole[0]
    pieces = [(x[i:j], {k: t[i:j] for k, t in y.items()}) for i, j in ((0, 2), (2, 3), (3, 7))]
    one, other = (
        curvature(EmpiricalRisk(net("a", "b", "c"), losses, data), FullBlock, vectors=vectors).to_dense()
        for data in (whole, pieces)
    )
    close(one, other, 1e-13)


@pytest.mark.parametrize("kind", [MonteCarlo, CurvaturePropagation])
def test_random_vectors_are_unbiased(kind: Any) -> None:
    losses, options = CASES["ignored"]
    model, data = net(*losses), batches((3, 2), tuple(losses), **options)
    exact = of_trunk(EmpiricalRisk(model, losses, data))
    v = torch.linspace(-1, 1, len(exact), dtype=torch.float64)
    risk = EmpiricalRisk(model, losses, data, dict(model.trunk.named_parameters(prefix="trunk")))
    found = torch.stack([v @ (curvature(risk, FullBlock, vectors=kind(1, seed)).to_dense() @ v) for seed in range(100)])
    error = found.std() / len(found) ** 0.5
    assert float((found.mean() - v @ exact @ v).abs()) < 4 * float(error)
    assert float(error) < 0.2 * float(v @ exact @ v)  # it could have failed


@pytest.mark.parametrize("kind", [MonteCarlo, CurvaturePropagation])
def test_losses_draw_independently(kind: Any) -> None:
    """Two losses of one output with the same draws would give twice the matrix."""
    model, data = net("b"), batches((3, 2), ("b",))
    twice = [(x, {"b": y["b"], "d": y["b"]}) for x, y in data]
    params = dict(model.trunk.named_parameters(prefix="trunk"))
    risk = EmpiricalRisk(model, {"b": MSE(), "d": MSE()}, twice, params, output=lambda o: {"b": o["b"], "d": o["b"]})
    exact = float(curvature(risk, FullBlock).trace)
    found = torch.stack([curvature(risk, DiagonalBlock, vectors=kind(1, seed)).trace for seed in range(60)])
    error = float(found.std()) / len(found) ** 0.5
    assert abs(float(found.mean()) - exact) < 4 * error < 0.5 * exact


@pytest.mark.slow
def test_the_monte_carlo_operator_is_unbiased() -> None:
    model, losses, data, twin = case("ignored", (3, 2))
    params = list(model.parameters())
    F = FisherMCLinearOperator(model, losses, params, data, mc_samples=4000, check_deterministic=False).to_dense()
    assert float((F - twin.ggn()).norm() / twin.ggn().norm()) < 0.1
    FisherMCLinearOperator(model, losses, params, data, seed=3)  # two products agree


def test_the_monte_carlo_operator_draws_what_blocks_draw() -> None:
    """The last layers see one loss each, so that no products between losses are in the way."""
    model, losses, data, _ = case("ignored", (3, 2))
    params = {**dict(model.a.named_parameters(prefix="a"))}
    F = FisherMCLinearOperator(model, losses, params, data, seed=3, mc_samples=2)
    K = curvature(EmpiricalRisk(model, losses, data, params), FullBlock, vectors=MonteCarlo(2, 3))
    close(F.to_dense(), K.to_dense(), 1e-13)


class Columns(Vectors):
    """Vectors of a user, who knows nothing of several losses."""

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return likelihood.num_columns(F)

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Any) -> Iterator[Tensor]:
        return likelihood.hessian_root_columns(F, Y)


class Choosy(Columns):
    """Asks for random numbers that depend on the numbers."""

    seed = 0

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Any) -> Iterator[Tensor]:
        if float(draws.uniform(len(F), 1)[0, 0]) != 0.5:
            draws.uniform(len(F), 2)
        return super().send(likelihood, F, Y, draws)


@pytest.mark.parametrize("vectors", VECTORS, ids=repr)
@pytest.mark.parametrize("size", [2, 2000])
def test_inputs_are_new_once_per_batch(vectors: Vectors, size: int) -> None:
    """Small batches are sent in one vectorised pass, large ones vector by vector."""
    losses, data = CASES["three"][0], batches((size, 2))
    risk = EmpiricalRisk(net("a", "b", "c"), losses, data)
    seen: list[tuple[str, bool]] = []
    sweep(risk, find_layers(risk.model, risk.params), vectors, lambda part: seen.append((part.layer.name, part.first)))
    for name in ("trunk", "a", "b", "c"):
        assert [first for layer, first in seen if layer == name].count(True) == len(data)


def test_vectors_of_a_user() -> None:
    model, losses, data, twin = case("ignored")
    risk = EmpiricalRisk(model, losses, data)
    close(curvature(risk, FullBlock, vectors=Columns()).to_dense(), twin.blocks(twin.ggn()))


# ------------------------------------------------------------------------------------------------- passes over the data


def passes(model: nn.Module, run: Callable[[], object]) -> int:
    count = []
    handle = model.register_forward_hook(lambda *_: count.append(1))
    try:
        run()
    finally:
        handle.remove()
    return len(count)


def test_terms_are_counted_once_and_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = CASES["two"][0]
    sums = {"a": CE(reduction="sum"), "b": MSE(reduction="sum")}
    model, data = net("a", "b"), batches((3, 5), ("a", "b"), ignored=1)
    params = list(model.parameters())

    def forward(approximation: Any, losses: Any, data: Any, vectors: Any = None, **options: Any) -> int:
        risk = EmpiricalRisk(model, losses, data, params, check=False)
        return passes(model, lambda: curvature(risk, approximation, vectors=vectors, **options).trace)

    assert forward(KFAC, losses, data) == 2 + 2
    assert forward(EKFAC, losses, data) == 2 + 2
    assert forward(EKFAC, losses, data, max_kept_bytes=0) == 2 + 2 * 2
    assert forward(KFAC, sums, data) == 2
    assert forward(KFAC, losses, data[1:]) == 1
    assert forward(KFAC, losses, data, ForwardOnly()) == 2
    K = KFACLinearOperator(model, losses, params, data)
    # The determinism check reads the data, too, and the self-check runs three examples by themselves.
    assert passes(model, lambda: K.compute()) == 2 + 2 + 2 + 3
    G = GGNLinearOperator(model, losses, params, data, check_deterministic=False)
    v = torch.ones(G.shape[0], dtype=torch.float64)
    assert passes(model, lambda: G @ v) == 1 + 2 + 2 + 2  # forward mode is tried, the second batch tells, count, again
    assert passes(model, lambda: G @ v) == 2  # what was counted is remembered, and compared with what is seen
    even = GGNLinearOperator(model, losses, params, batches((3, 5), ("a", "b")), check_deterministic=False)
    assert passes(model, lambda: even @ v) == 1 + 2
    assert passes(model, lambda: even @ v) == 2


def test_an_iterator_is_fine_where_proportions_are_even() -> None:
    model, losses, data, twin = case("two")
    risk = EmpiricalRisk(model, losses, iter(data))
    close(curvature(risk, FullBlock).to_dense(), twin.blocks(twin.ggn()))
    close(
        torch.cat([g.flatten() for g in EmpiricalRisk(model, losses, iter(data)).gradient().values()]),
        jacrev(twin.value)(twin.values),
    )
    model, losses, data, _ = case("ignored")
    with pytest.raises(ValueError, match=r"\['a', 'b'\] are over 4 : 10 terms in this batch, and 3 : 6 before"):
        _ = curvature(EmpiricalRisk(model, losses, iter(data))).trace
    with pytest.raises(ValueError, match="seen once"):
        EmpiricalRisk(model, losses, iter(data)).gradient()
    model, losses, data, _ = case("mixed")
    with pytest.raises(ValueError, match=r"reduction \['mean', 'sum', 'mean'\].*the same reduction"):
        _ = curvature(EmpiricalRisk(model, losses, iter(data))).trace


def test_data_that_change_are_noticed() -> None:
    losses = CASES["two"][0]

    class Masked(list[Any]):
        """Ignores more classes each time."""

        times = 0

        def __iter__(self) -> Iterator[Any]:
            self.times += 1
            for x, y in super().__iter__():
                a = y["a"].clone()
                a[: self.times] = -100
                yield x, {**y, "a": a}

    model = net("a", "b")
    risk = EmpiricalRisk(model, losses, Masked(batches((6, 9), ("a", "b"))))
    with pytest.raises(ValueError, match=r"losses of \['a', 'b'\] differ from pass to pass"):
        _ = curvature(risk).trace
    with pytest.raises(ValueError, match="differ from pass to pass"):
        risk.gradient()


def test_data_may_be_exchanged_between_products() -> None:
    """What was remembered is compared with what is seen."""
    losses, data = CASES["two"][0], batches((3, 5), ("a", "b"), ignored=1)
    model = net("a", "b")
    params = list(model.trunk.parameters())
    G = GGNLinearOperator(model, losses, params, data, check_deterministic=False)
    before = G.to_dense()
    data[0] = batches((7,), ("a", "b"))[0]
    data[1] = batches((3, 4), ("a", "b"), ignored=2)[1]
    after = G.to_dense()
    close(after, GGNLinearOperator(model, losses, params, list(data)).to_dense())
    assert float((before - after).norm()) > 1e-3 * float(after.norm())
    assert EmpiricalRisk(model, losses, data).gradient().keys() == dict(model.named_parameters()).keys()


def test_determinism_is_checked() -> None:
    model, losses, data, _ = case("two")
    model.trunk = nn.Sequential(model.trunk, nn.Dropout(0.5))  # type: ignore[assignment]
    params = list(model.a.parameters())
    for kind in (KFACLinearOperator, EKFACLinearOperator, GGNLinearOperator):
        with pytest.raises(RuntimeError, match=r"Two (passes|evaluations).*(disagree|differ).*Dropout"):
            kind(model, losses, params, data)


# -------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("name", ["two", "three", "sums", "positions"])
@pytest.mark.parametrize("kind", [KFAC, DiagonalBlock])
def test_a_stream_adds_up_to_the_data(name: str, kind: Any) -> None:
    model, losses, data, _ = case(name)
    if name == "positions":
        losses = {"a": losses["a"], "b": losses["b"]}
        model, data = net("a", "b"), [(x, {k: y[k] for k in losses}) for x, y in data]
    estimator = CurvatureEstimator(EmpiricalRisk(model, losses, ()), kind, vectors=MonteCarlo(2, 1))
    for batch in data:
        estimator.update(batch)
    whole = curvature(EmpiricalRisk(model, losses, data), kind, vectors=MonteCarlo(2, 1))
    close(estimator.operator.to_dense(), whole.to_dense(), 1e-12)


def test_a_stream_listens_resumes_and_merges() -> None:
    model, losses, data, twin = case("two", (3, 5, 2, 4))

    def estimator(decay: float = 1.0) -> CurvatureEstimator:
        return CurvatureEstimator(EmpiricalRisk(model, losses, ()), FullBlock, decay=decay)

    one, other = estimator(), estimator()
    for batch in data[:2]:
        x, y = batch
        with one.listen(batch):
            out = model(x)
            value = sum(weight * loss(out[key], y[key]) for key, (loss, weight) in losses.items())
        value.backward()
    model.zero_grad()
    state = one.state_dict()
    resumed = estimator()
    resumed.load_state_dict(state)
    resumed.update(data[2])
    other.update(data[3])
    resumed.merge(other)
    close(resumed.operator.to_dense(), twin.blocks(twin.ggn()))

    moving = estimator(0.5)
    for batch in data:
        moving.update(batch)
    parts = [Twin(model, losses, [batch]).ggn() * len(batch[0]) for batch in data]
    weights = [0.5 ** (3 - k) for k in range(4)]
    total = sum(w * len(x) for w, (x, _) in zip(weights, data))
    close(moving.operator.to_dense(), twin.blocks(sum(w * G for w, G in zip(weights, parts)) / total))  # type: ignore[arg-type]


def test_a_stream_with_uneven_proportions_is_refused_and_unchanged() -> None:
    model, losses, data, _ = case("ignored")
    estimator = CurvatureEstimator(EmpiricalRisk(model, losses, ()))
    estimator.update(data[0])
    before = estimator.operator.to_dense()
    with pytest.raises(ValueError, match=r"over 4 : 10 terms in this batch, and 3 : 6 before.*new EmpiricalRisk"):
        estimator.update(data[1])
    close(estimator.operator.to_dense(), before, 1e-15)
    x, y = data[0]
    with pytest.raises(ValueError, match="over 0 : 6 terms in this batch"):
        estimator.update((x, {**y, "a": torch.full_like(y["a"], -100)}))
    # The same proportion with fewer terms is fine, and so are other proportions under "sum".
    other = CurvatureEstimator(EmpiricalRisk(model, CASES["sums"][0], ()))
    for batch in data:
        other.update(batch)
    model, losses, data, _ = case("mixed")
    with pytest.raises(ValueError, match="the same reduction"):
        CurvatureEstimator(EmpiricalRisk(model, losses, ())).update(data[0])


def test_streams_with_other_proportions_do_not_merge() -> None:
    losses, data = CASES["ignored"][0], batches((4, 4), ("a", "b"), ignored=1)
    model = net("a", "b")
    one, other = (CurvatureEstimator(EmpiricalRisk(model, losses, ())) for _ in range(2))
    one.update(data[0])
    other.update(data[1])
    before = one.operator.to_dense()
    with pytest.raises(ValueError, match=r"relative weights are 1.3 : 0.25 here and 1.3 : 0.1875 there"):
        one.merge(other)
    close(one.operator.to_dense(), before, 1e-15)


# ----------------------------------------------------------------------------------------------- classic door, states


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_state_has_all_losses_with_their_options(kind: Any, form: str, tmp_path: Path) -> None:
    named = {"a": (CE(weight=WEIGHTS), 1.3), "b": (MSE(), 0.5), "c": (BCE(), 1.0)}
    losses: Any = named if form == "dict" else tuple(named.values())
    data = batches((3, 5), ("a", "b", "c") if form == "dict" else ())
    model = net("a", "b", "c") if form == "dict" else net()
    params = list(model.parameters())
    K = kind(model, losses, params, data)
    assert [(type(one.loss), one.weight) for one in K.risk.losses] == [(CE, 1.3), (MSE, 0.5), (BCE, 1.0)]
    save(K.state_dict(), tmp_path / "K.safetensors")
    for state in (K.state_dict(), load(tmp_path / "K.safetensors")):
        again = kind.from_state_dict(state, model, params, data)
        close(again.to_dense(), K.to_dense(), 1e-15)
        rebuilt = again.risk.losses.given
        assert type(rebuilt) is type(losses)
        same = kind(model, losses, params, data, check_deterministic=False)
        same.load_state_dict(state)
        again.compute()
        close(again.to_dense(), K.to_dense(), 1e-13)

    def other(changed: dict[str, Any]) -> Any:
        mine: Any = {**named, **changed}
        return kind(model, mine if form == "dict" else tuple(mine.values()), params, data, check_deterministic=False)

    for changed in ({"b": (MSE(), 0.6)}, {"a": (CE(), 1.3)}, {"a": (CE(weight=2 * WEIGHTS), 1.3)}):
        with pytest.raises(ValueError, match="State mismatch in the loss options"):
            other(changed).load_state_dict(K.state_dict())


def test_a_state_of_one_loss_is_not_one_of_several() -> None:
    model, losses, data, _ = case("one")
    params = list(model.trunk.parameters())
    single = KFACLinearOperator(
        model, MSE(), params, [(x, y["b"]) for x, y in data], output=lambda o: o["b"], check_deterministic=False
    )
    K = KFACLinearOperator(model, losses, params, data, check_deterministic=False)
    with pytest.raises(ValueError, match="State mismatch in the loss "):
        K.load_state_dict(single.state_dict())


class Wrong(Likelihood):
    """Rules that are not those of the loss."""

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        return (F - Y).square().sum(-1)


def test_verify_names_the_loss_with_wrong_rules() -> None:
    from curvlinops_plus.likelihood.likelihood import _MAKERS

    register_likelihood(nn.SmoothL1Loss)(Wrong)
    try:
        model, data = net("a", "b"), batches((4,), ("a", "b"))
        risk = EmpiricalRisk(model, {"a": CE(), "b": nn.SmoothL1Loss()}, data)
        with pytest.raises(VerificationError, match=r"loss 'b' \(SmoothL1Loss\), check \(c\)"):
            curvature(risk).verify()
    finally:
        _MAKERS.pop(nn.SmoothL1Loss, None)


def test_verify_does_without_terms_of_a_loss() -> None:
    """Of the first examples every class may be ignored."""
    model, losses, data, _ = case("ignored")
    data[0][1]["a"][:] = -100
    table = curvature(EmpiricalRisk(model, losses, data)).verify().table()
    assert "loss 'a' (CrossEntropyLoss)" in table
    assert "loss 'b' (MSELoss)" in table


# --------------------------------------------------------------------------------------------------------------- errors


def risk_of(losses: Any, model: nn.Module | None = None, data: Any = None, **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(
        net("a", "b") if model is None else model,
        losses,
        batches((3, 2), ("a", "b")) if data is None else data,
        **options,
    )


def test_losses_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="There are no losses"):
        risk_of({})
    with pytest.raises(ValueError, match=r"a number is no loss.*\(\(loss, weight\), \(loss, weight\)\)"):
        risk_of((CE(), 1.0))
    for wrong in ({"inner": CE()}, (CE(), 1.0, 2.0), 3.0, None, [CE(), MSE(), BCE()]):
        with pytest.raises(ValueError, match=r"output 'b': expected a loss or a pair \(loss, weight\), got "):
            risk_of({"a": CE(), "b": wrong})
    for weight in (-1.0, float("nan"), float("inf"), "1", True, torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"loss for the output 'b' is .*; expected a positive finite number\.$"):
            risk_of({"a": CE(), "b": (MSE(), weight)})
    with pytest.raises(
        ValueError, match=r"is 0; expected a positive finite number. A loss with weight 0 .* leave it out"
    ):
        risk_of({"a": CE(), "b": (MSE(), 0)})
    with pytest.raises(ValueError, match=r"The loss for the output \(1, 2\): expected a name or a number, got a tuple"):
        risk_of({(1, 2): CE()})
    with pytest.raises(UnsupportedError, match=r"loss .b. \(MSELoss\): MSELoss\(reduction=.none.\) is no scalar loss"):
        risk_of({"a": CE(), "b": MSE(reduction="none")}).losses.require_likelihoods()


def test_outputs_and_losses_that_do_not_match() -> None:
    pair = {"a": CE(), "b": MSE()}
    with pytest.raises(
        ValueError, match=r"returned outputs \['a', 'b'\], but .* \['a', 'box'\]: no output .*\['box'\] and no loss"
    ):
        risk_of({"a": CE(), "box": MSE()}).loss()
    with pytest.raises(ValueError, match=r"outputs \['a', 'b', 'c'\], .*: no loss for the outputs \['c'\]. Say which"):
        risk_of(pair, net("a", "b", "c")).loss()
    tuples = [(x, tuple(y.values())) for x, y in batches((3,), ("a", "b"))]
    with pytest.raises(ValueError, match=r"returned 3 outputs, but there are losses for 2 losses"):
        risk_of((CE(), MSE()), net(), tuples).loss()
    with pytest.raises(
        ValueError,
        match=r"returned a tuple with outputs \[0, 1, 2\], but the losses are a dict .*\{'a': ..., 'b': ...\}",
    ):
        risk_of(pair, net()).loss()
    with pytest.raises(ValueError, match=r"returned a dict with outputs \['a', 'b'\], but the losses are a tuple"):
        risk_of((CE(), MSE()), data=tuples).loss()
    with pytest.raises(ValueError, match=r"`output` selected a Tensor, but the losses are a dict"):
        risk_of(pair, output=lambda o: o["a"]).loss()
    with pytest.raises(ValueError, match=r"output 'b' is a list; expected the tensor that its loss reads"):
        risk_of(pair, output=lambda o: {"a": o["a"], "b": [o["b"]]}).loss()
    with pytest.raises(
        ValueError, match=r"output 'b': MSELoss needs a target of the output's shape \[3, 2\], got \[3, 1\]"
    ):
        risk_of(pair, data=[(x, {"a": y["a"], "b": y["c"]}) for x, y in batches((3,))]).loss()


def test_targets_and_losses_that_do_not_match() -> None:
    pair = {"a": CE(), "b": MSE()}
    x, y = batches((3,), ("a", "b"))[0]
    for target, words in (
        (y["a"], r"has a Tensor, but the losses are a dict .* y = \{'a': ..., 'b': ...\}"),
        ((y["a"], y["b"]), r"has a tuple with targets \[0, 1\], but the losses are a dict"),
        (
            {"a": y["a"]},
            r"has targets \['a'\], but there are losses for \['a', 'b'\]: no target for the losses \['b'\]",
        ),
        ({**y, "id": x}, r"no loss for the targets \['id'\]. Batches must be"),
    ):
        with pytest.raises(ValueError, match=words):
            risk_of(pair, data=[(x, target)]).loss()
    with pytest.raises(ValueError, match=r"tuple of length 3.*\(X, \(y1, y2\)\)"):
        risk_of((CE(), MSE()), net(), [(x, y["a"], y["b"])]).loss()


def test_a_loss_of_which_no_term_counts() -> None:
    x, y = batches((3,), ("a", "b"))[0]
    ignored = {**y, "a": torch.full_like(y["a"], -100)}
    for data in ([(x, ignored)], [(x, ignored), (x, ignored)]):
        risk = risk_of({"a": CE(), "b": MSE()}, data=data)
        for run in (risk.loss, risk.gradient, lambda risk=risk: curvature(risk).trace):
            with pytest.raises(ValueError, match=r"No term of loss 'a' \(CrossEntropyLoss\) counts"):
                run()


def test_options_for_one_loss_are_refused() -> None:
    pair = {"a": CE(), "b": MSE()}
    with pytest.raises(UnsupportedError, match=r"shift_labels is about one loss.*\['a', 'b'\]. Shift"):
        risk_of(pair, shift_labels=True)
    with pytest.raises(UnsupportedError, match=r"num_per_example_loss_terms is about one loss.*Leave it out"):
        risk_of(pair, num_per_example_loss_terms=3)


def test_a_loss_whose_ggn_is_its_fisher() -> None:
    class Positive(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return {"a": out["a"], "b": torch.cat([out["b"][:, :1], out["b"][:, 1:].exp()], 1)}

    model = Positive(("a", "b")).double()
    data = [(x, {"a": y["a"], "b": y["b"][:, :1]}) for x, y in batches((3, 2), ("a", "b"))]
    losses = {"a": (CE(), 2.0), "b": (nn.GaussianNLLLoss(), 0.5)}
    risk = EmpiricalRisk(model, losses, data)
    close(of_trunk(risk), alone(model, losses, data, of_trunk))
    curvature(risk).verify()
    with pytest.raises(UnsupportedError, match="GaussianNLLLoss has a Hessian in mean and variance"):
        _ = curvature(risk, vectors=Exact(matrix="ggn")).trace


def test_a_layer_whose_output_no_loss_reads() -> None:
    with pytest.raises(ValueError, match=r"layer 'c' \(Linear\) does not reach the output"):
        _ = curvature(
            risk_of({"a": CE(), "b": MSE()}, net("a", "b", "c"), output=lambda o: {k: o[k] for k in "ab"})
        ).trace


# ----------------------------------------------------------------------------------------------------------------- docs


def test_the_page_runs_and_prints_what_it_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    ((code, expected),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", page, flags=re.DOTALL)
    printed = io.StringIO()
    with redirect_stdout(printed), torch.random.fork_rng():
        exec(compile(code, "losses.md", "exec"), {"__name__": "losses"})
    assert printed.getvalue() == expected
