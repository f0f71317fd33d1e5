"""The classic door: names, signatures, options and members of curvlinops 3.0.1, in front of the same numbers."""

from __future__ import annotations

import inspect
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from cases import FEW, PROBLEMS, VECTORS, Problem, close, fresh, problem, same, unchanged
from torch import Tensor, nn

import curvlinops_plus
from curvlinops_plus import (
    EKFAC,
    KFAC,
    EFLinearOperator,
    EKFACLinearOperator,
    Empirical,
    Exact,
    FisherMCLinearOperator,
    FisherType,
    ForwardOnly,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    KFACType,
    KFOCLinearOperator,
    MonteCarlo,
    UnsupportedError,
    compute_eigenvalue_correction_linear_weight_sharing,
)

CLASSES = {KFACLinearOperator: KFAC, EKFACLinearOperator: EKFAC}
both = pytest.mark.parametrize("kind", CLASSES, ids=["KFAC", "EKFAC"])
separate_or_joint = pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])

# --------------------------------------------------------------------------------------------------------- signatures

REQUIRED = inspect.Parameter.empty
EXACT = {
    "model_func": REQUIRED,
    "loss_func": REQUIRED,
    "params": REQUIRED,
    "data": REQUIRED,
    "progressbar": False,
    "check_deterministic": True,
    "num_data": None,
    "block_sizes": None,
    "batch_size_fn": None,
}
KFAC_LIKE = {
    "model_func": REQUIRED,
    "loss_func": REQUIRED,
    "params": REQUIRED,
    "data": REQUIRED,
    "progressbar": False,
    "check_deterministic": True,
    "seed": 2147483647,
    "fisher_type": FisherType.MC,
    "mc_samples": 1,
    "kfac_approx": KFACType.EXPAND,
    "num_per_example_loss_terms": None,
    "separate_weight_and_bias": True,
    "num_data": None,
    "batch_size_fn": None,
}
SIGNATURES: dict[str, dict[str, Any]] = {
    "HessianLinearOperator": EXACT,
    "GGNLinearOperator": EXACT,
    "EFLinearOperator": EXACT,
    "FisherMCLinearOperator": {
        **{
            name: EXACT[name]
            for name in ("model_func", "loss_func", "params", "data", "progressbar", "check_deterministic")
        },
        "seed": 2147483647,
        "mc_samples": 1,
        "num_data": None,
        "batch_size_fn": None,
    },
    "KFACLinearOperator": KFAC_LIKE,
    "EKFACLinearOperator": KFAC_LIKE,
    "KFACInverseLinearOperator": {
        "A": REQUIRED,
        "damping": 0.0,
        "use_heuristic_damping": False,
        "min_damping": 1e-8,
        "use_exact_damping": False,
        "cache": True,
        "retry_double_precision": True,
    },
    "KFACLinearOperator.from_state_dict": {
        "state_dict": REQUIRED,
        "model_func": REQUIRED,
        "params": REQUIRED,
        "data": REQUIRED,
        "check_deterministic": True,
        "batch_size_fn": None,
    },
    "KFACInverseLinearOperator.from_state_dict": {"state_dict": REQUIRED, "A": REQUIRED},
    "compute_eigenvalue_correction_linear_weight_sharing": {
        "g": REQUIRED,
        "ggT_eigvecs": REQUIRED,
        "a": REQUIRED,
        "aaT_eigvecs": REQUIRED,
        "_force_strategy": None,
    },
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_order_and_defaults(path: str) -> None:
    thing: Any = curvlinops_plus
    for part in path.split("."):
        thing = getattr(thing, part)
    positional = [p for p in inspect.signature(thing).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert {p.name: p.default for p in positional} == SIGNATURES[path]
    assert [p.name for p in positional] == list(SIGNATURES[path]), "the order of the arguments"


def test_every_argument_may_be_given_by_position() -> None:
    p = problem("mlp")
    K = KFACLinearOperator(
        p.model, p.loss, p.params, p.data, False, False, 3, "mc", 2, "reduce", None, False, None, None
    )
    expected = p.curvature(KFAC.using(kfac_approx="reduce"), vectors=MonteCarlo(2, seed=3))
    close(K.to_dense(), expected.to_dense())


@pytest.mark.parametrize("kind", [KFACLinearOperator, KFOCLinearOperator, GGNDiagonalLinearOperator])
def test_options_of_a_risk_are_passed_on(kind: Any) -> None:
    p = problem("mlp")
    K = kind(p.model, p.loss, p.params, p.data, check=False, weight=lambda X, y: torch.full((len(X),), 2.0))
    assert K.risk.options.check is False
    close(K.to_dense(), kind(p.model, p.loss, p.params, p.data).to_dense())  # a mean
    with pytest.raises(TypeError, match=r"keyword 'wieght': an option neither of this operator nor of .EmpiricalRisk"):
        kind(p.model, p.loss, p.params, p.data, wieght=None)


def test_fisher_and_kfac_types_are_strings_too() -> None:
    assert {item.name: item.value for item in FisherType} == {
        "TYPE2": "type-2",
        "MC": "mc",
        "EMPIRICAL": "empirical",
        "FORWARD_ONLY": "forward-only",
    }
    assert {item.name: item.value for item in KFACType} == {"EXPAND": "expand", "REDUCE": "reduce"}
    assert "mc" in FisherType
    assert FisherType.MC in FisherType
    assert "forward" not in FisherType
    assert 3 not in FisherType
    assert "reduce" in KFACType
    assert FisherType.MC == "mc"
    assert FisherType("type-2") is FisherType.TYPE2


# ------------------------------------------------------------------------------------------------------------ numbers


def classic(kind: Any, p: Problem, **options: Any) -> Any:
    """An operator of the classic door, with an eye on the user's things."""
    with unchanged(p.model, p.loss, p.data):
        K = kind(p.model, p.loss, p.params, p.data, **{**p.net.options, **options})
        _ = K.trace
    return K


@both
@separate_or_joint
@pytest.mark.parametrize("approx", [*KFACType, "expand", "reduce"], ids=str)
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_every_fisher_type_is_its_vectors(kind: Any, name: str, approx: Any, separate: bool) -> None:
    p = problem(name)
    vectors = {
        "type-2": Exact(),
        "mc": MonteCarlo(3, seed=5),
        "empirical": Empirical(),
        "forward-only": ForwardOnly(),
    }
    for fisher_type in FisherType if isinstance(approx, KFACType) else [item.value for item in FisherType]:
        sent = vectors[FisherType(fisher_type).value]
        if kind is EKFACLinearOperator and fisher_type == "forward-only":
            continue
        if fisher_type == "type-2" and name == "attention" and kind is KFACLinearOperator and approx == "expand":
            sent = Exact(signs=True, seed=5)
        options = {"mc_samples": 3} if fisher_type == "mc" else {}
        K = classic(
            kind, p, fisher_type=fisher_type, seed=5, kfac_approx=approx, separate_weight_and_bias=separate, **options
        )
        approximation = CLASSES[kind].using(kfac_approx=KFACType(approx).value)
        expected = p.curvature(approximation, vectors=sent, separate_weight_and_bias=separate)
        close(K.to_dense(), expected.to_dense(), what=str(fisher_type))


@both
def test_defaults_are_those_of_the_signature(kind: Any) -> None:
    p = problem("strided cnn")
    K = classic(kind, p)
    expected = p.curvature(CLASSES[kind], vectors=MonteCarlo(1, seed=2147483647), separate_weight_and_bias=True)
    same(K.to_dense(), expected.to_dense())


@pytest.mark.one_in(2)
@both
@pytest.mark.parametrize("name", [n for n in PROBLEMS if "," not in n])
def test_every_net_through_the_classic_door(kind: Any, name: str) -> None:
    p = problem(name)
    if p.net.fallback:
        with pytest.warns(curvlinops_plus.CurvatureWarning, match=f"{len(p.net.fallback)} of"):
            K = classic(kind, p, fisher_type="empirical", check_deterministic=False)
    else:
        K = classic(kind, p, fisher_type="empirical")
    expected = p.curvature(CLASSES[kind], vectors=Empirical(), separate_weight_and_bias=True)
    close(K.trace, expected.trace)
    twin = p.exact.only_blocks(p.exact.empirical_fisher(per_term=False), separate=True)
    if kind is EKFACLinearOperator:
        close(K.trace, twin.trace())
    else:
        close(K.to_dense(), p.exact.kfac(p.exact.empirical(per_term=False), separate=True))


def test_random_signs_of_type_2_are_unbiased() -> None:
    p = problem("attention")
    draws = torch.stack(
        [
            classic(KFACLinearOperator, p, fisher_type="type-2", seed=s, check_deterministic=False).to_dense()
            for s in range(64)
        ]
    )
    expected = p.exact.kfac(p.exact.exact(), separate=True)
    allowed = 4 * draws.std(0) / 8 + 1e-9
    error = (draws.mean(0) - expected).abs()
    assert (error <= allowed).float().mean() > 0.999, f"{float((error - allowed).max()):.2e} beyond 4 standard errors"
    assert draws.std(0).max() > 1e-4, "nothing was drawn"


# ------------------------------------------------------------------------------------------------------------ members


@both
def test_shapes_and_types(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p)
    assert K.shape == (43, 43)
    assert K.dtype == torch.float64
    assert K.device == torch.device("cpu")
    assert tuple(K.in_shapes) == tuple(K.out_shapes) == tuple(q.shape for q in p.params)
    for number in (K.trace, K.det, K.logdet, K.frobenius_norm):
        assert isinstance(number, Tensor)
        assert number.ndim == 0
    assert K.mapping == {"0": {"weight": 0, "bias": 1}, "2": {"weight": 2, "bias": 3}}
    twice = KFACLinearOperator(p.model, p.loss, p.params[::-1], p.data, check_deterministic=False)
    assert twice.mapping == {"0": {"weight": 3, "bias": 2}, "2": {"weight": 1, "bias": 0}}
    gradient, loss = K.gradient_and_loss()
    close(torch.cat([g.flatten() for g in gradient]), p.exact.gradient())
    assert loss.ndim == 0
    assert [g.shape for g in gradient] == [q.shape for q in p.params]


@both
def test_algebra_and_scipy(kind: Any) -> None:
    p = problem("mlp")
    K, rng = classic(kind, p), np.random.default_rng(0)
    dense, v = K.to_dense(), torch.from_numpy(rng.standard_normal(43))
    for operator, matrix in (
        (K.T, dense.T),
        (K.adjoint(), dense.T),
        (K + K, 2 * dense),
        (K - 3 * K, -2 * dense),
        (-K, -dense),
        (K / 2, dense / 2),
        (K @ K, dense @ dense),
    ):
        close(operator @ v, matrix @ v)
    close(v @ K, v @ dense)
    for product in (K.matvec(v.numpy()), K.rmatvec(v.numpy())):
        close(product, dense @ v)
    X = torch.from_numpy(rng.standard_normal((43, 2)))
    for product in (K.matmat(X.numpy()), K.rmatmat(X.numpy())):
        close(product, dense @ X)
    scipy = K.to_scipy()
    assert scipy.dtype == np.float64
    close(scipy @ v.numpy(), dense @ v)
    assert K.to_scipy(dtype=np.float32).dtype == np.float32


@separate_or_joint
@pytest.mark.parametrize("name", ["mlp", "strided cnn", "weights only", "biases only"])
def test_factors_are_their_definitions(name: str, separate: bool) -> None:
    p = problem(name)
    K = classic(KFACLinearOperator, p, fisher_type="type-2", separate_weight_and_bias=separate, kfac_approx="reduce")
    by_layer: dict[str, list[str]] = {}
    for key in p.exact.names:
        layer = p.exact.affine_layer(key)
        assert layer is not None
        by_layer.setdefault(layer, []).append(p.exact.names[key].rsplit(".", 1)[-1])
    assert sorted(K.gradient_covariances) == sorted(by_layer)
    assert sorted(K.input_covariances) == sorted(n for n, locals_ in by_layer.items() if "weight" in locals_)
    for layer, locals_ in by_layer.items():
        A, G = p.exact.factors(layer, p.exact.exact(), reduce=True, ones=len(locals_) == 2 and not separate)
        close(K.gradient_covariances[layer], G)
        if "weight" in locals_:
            close(K.input_covariances[layer], A)


@separate_or_joint
def test_reduce_is_expand_where_nothing_is_shared(separate: bool) -> None:
    """Where each example has one position the same rows are multiplied, without means and copies of them."""
    p = problem("mlp")
    options = {"fisher_type": "empirical", "separate_weight_and_bias": separate}
    expand, reduce = (classic(KFACLinearOperator, p, kfac_approx=name, **options) for name in ("expand", "reduce"))
    for factors in ("input_covariances", "gradient_covariances"):
        for layer, factor in getattr(expand, factors).items():
            assert torch.equal(factor, getattr(reduce, factors)[layer])


@separate_or_joint
def test_factors_of_ekfac(separate: bool) -> None:
    p = problem("mlp")
    K = classic(EKFACLinearOperator, p, fisher_type="type-2", separate_weight_and_bias=separate)
    assert list(K.input_covariances_eigenvectors) == list(K.gradient_covariances_eigenvectors) == ["0", "2"]
    for position, (layer, o, i) in enumerate((("0", 5, 4), ("2", 3, 5))):
        values = K.corrected_eigenvalues[layer]
        if separate:
            assert list(values) == [2 * position, 2 * position + 1]
            assert values[2 * position].shape == (o, i)
            assert values[2 * position + 1].shape == (o,)
        else:
            assert values.shape == (o, i + 1)
        QG, QA = K.gradient_covariances_eigenvectors[layer], K.input_covariances_eigenvectors[layer]
        expected = p.exact.corrected_eigenvalues([f"{layer}.weight"], p.exact.exact(), QG, QA) if separate else None
        if expected is not None:
            close(values[2 * position], expected)


@both
def test_computing_again_gives_the_same_numbers(kind: Any) -> None:
    p = problem("strided cnn")
    K = classic(kind, p, mc_samples=2)
    dense = K.to_dense()
    with unchanged(p.model, p.loss, p.data):
        K.compute_kronecker_factors()
        if kind is EKFACLinearOperator:
            K.compute_eigenvalue_correction()
    same(K.to_dense(), dense)
    if kind is EKFACLinearOperator:
        K.compute_eigenvalue_correction()
        same(K.to_dense(), dense)
        K.compute_kronecker_factors()
        same(K.to_dense(), dense)  # the eigenvalues follow at first use


@both
@pytest.mark.parametrize("keep", [True, False])
def test_factors_are_computed_once_and_at_first_use(kind: Any, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p = fresh("mlp")
    monkeypatch.setattr("curvlinops_plus.risk.sweep.check_batch", lambda *_: None)
    passes = []
    p.model.register_forward_hook(lambda *_: passes.append(1))
    options = {} if keep else {"max_kept_bytes": 0}
    K = kind(p.model, p.loss, p.params, p.data, check_deterministic=False, **options)
    assert not passes
    _ = K.trace
    first = len(passes)
    assert first == len(p.data) * (1 if keep or kind is KFACLinearOperator else 2)
    _ = K.det, K @ torch.ones(43, dtype=torch.float64), K.input_covariances if kind is KFACLinearOperator else K.blocks
    assert len(passes) == first


# -------------------------------------------------------------------------------------------------------- live factors


@separate_or_joint
def test_factors_are_alive(separate: bool) -> None:
    p = problem("mlp")
    K = classic(KFACLinearOperator, p, fisher_type="type-2", separate_weight_and_bias=separate)
    v = torch.linspace(-1, 1, 43, dtype=torch.float64)
    for change in ("in place", "by item"):
        before = K.to_dense()
        for factors in (K.input_covariances, K.gradient_covariances):
            for name in list(factors):
                if change == "in place":
                    factors[name].mul_(2.0).diagonal().add_(0.1)
                else:
                    factors[name] = 3.0 * factors[name]
        dense = K.to_dense()
        assert not torch.allclose(dense, before)
        expected = torch.zeros_like(dense)
        for keys in p.exact.blocks(separate):
            layer = keys[0].split(".")[0]
            r, c = p.exact.matrix_places(keys)
            at = p.exact.places(keys)
            A = K.input_covariances[layer] if any("weight" in key for key in keys) else torch.ones(1, 1).double()
            expected[at[:, None], at] = K.gradient_covariances[layer][r[:, None], r] * A[c[:, None], c]
        close(dense, expected, what=change)
        close(K.trace, expected.trace(), what=change)
        close(K @ v, expected @ v, what=change)
        eye = torch.eye(43, dtype=torch.float64)
        close(K.inverse(damping=0.3).to_dense(), torch.linalg.inv(expected + 0.3 * eye), what=change)
        close(K.inverse(damping=0.3) @ v, torch.linalg.solve(expected + 0.3 * eye, v), what=change)
        exact = KFACInverseLinearOperator(K, damping=0.3, use_exact_damping=True)
        close(exact @ v, torch.linalg.solve(expected + 0.3 * eye, v), what=change)


def test_adding_a_damping_to_live_factors() -> None:
    """What libraries on top of curvlinops do: add to the diagonals, then use the operator."""
    p = problem("mlp")
    K = classic(KFACLinearOperator, p, fisher_type="type-2")
    for factor in (*K.input_covariances.values(), *K.gradient_covariances.values()):
        factor.diagonal().add_(1.0)
    assert torch.linalg.eigvalsh(K.to_dense()).min() > 1 - 1e-9
    assert bool(K.logdet.isfinite())


@separate_or_joint
def test_eigenvalues_are_alive(separate: bool) -> None:
    p = problem("mlp")
    K = classic(EKFACLinearOperator, p, fisher_type="type-2", separate_weight_and_bias=separate)
    trace, total = K.trace, torch.zeros(())
    for name in list(K.corrected_eigenvalues):
        values = K.corrected_eigenvalues[name]
        for t in values.values() if separate else [values]:
            t.mul_(2)
    close(K.trace, 2 * trace)
    for name in list(K.corrected_eigenvalues):
        values = K.corrected_eigenvalues[name]
        K.corrected_eigenvalues[name] = {k: t + 1 for k, t in values.items()} if separate else values + 1
    close(K.trace, 2 * trace + 43 + total)
    v = torch.ones(43, dtype=torch.float64)
    close(K @ v, K.to_dense() @ v)
    close(K.inverse(damping=1.0).to_dense(), torch.linalg.inv(K.to_dense() + torch.eye(43, dtype=torch.float64)))


# ---------------------------------------------------------------------------------------------- eigenvalue correction


@pytest.mark.parametrize("strategy", ["gramian", "per_example_gradients", None])
@pytest.mark.parametrize("positions", [1, 4])
def test_eigenvalue_correction_of_a_linear_layer(strategy: str | None, positions: int) -> None:
    torch.manual_seed(0)
    g, a = torch.randn(5, positions, 3).double(), torch.randn(5, positions, 4).double()
    QG, QA = (torch.linalg.qr(torch.randn(n, n).double()).Q for n in (3, 4))
    expected, of_bias = torch.zeros(3, 4).double(), torch.zeros(3).double()
    for n in range(5):
        J = sum(torch.outer(g[n, s], a[n, s]) for s in range(positions))
        expected += (QG.T @ J @ QA) ** 2
        of_bias += (QG.T @ g[n].sum(0)) ** 2
    close(compute_eigenvalue_correction_linear_weight_sharing(g, QG, a, QA, _force_strategy=strategy), expected)
    close(compute_eigenvalue_correction_linear_weight_sharing(g, QG, None, None, _force_strategy=strategy), of_bias)


# ---------------------------------------------------------------------------------------------------------- data forms


@both
def test_params_by_name(kind: Any) -> None:
    p = problem("mlp")
    named = dict(p.model.named_parameters())
    listed, by_name = classic(kind, p), kind(p.model, p.loss, named, p.data)
    same(by_name.to_dense(), listed.to_dense())
    v = {name: torch.ones_like(q) for name, q in named.items()}
    product = by_name @ v
    assert list(product) == list(named)
    same(torch.cat([t.detach().flatten() for t in product.values()]), listed @ torch.ones(43, dtype=torch.float64))
    detached = kind(p.model, p.loss, [q.detach() for q in p.params], p.data)
    same(detached.to_dense(), listed.to_dense())


@pytest.mark.parametrize("kind", [dict, UserDict], ids=["dict", "UserDict"])
def test_inputs_in_a_mapping(kind: Any) -> None:
    p = problem("mapping")
    data = [(kind(X), y) for X, y in p.data]
    for operator in (
        KFACLinearOperator,
        EKFACLinearOperator,
        GGNLinearOperator,
        HessianLinearOperator,
        EFLinearOperator,
    ):
        options = {"batch_size_fn": lambda X: len(X["u"])}
        K = operator(p.model, p.loss, p.params, data, **options)
        close(K.to_dense(), operator(p.model, p.loss, p.params, p.data, **options).to_dense(), what=operator.__name__)


def test_language_model_with_shifted_labels() -> None:
    p = problem("language model")

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = p.model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).logits[:, :-1].movedim(-1, 1)

    by_hand = [(item["input_ids"], item["labels"][:, 1:]) for item in p.data]
    plain = GGNLinearOperator(Shifted(), p.loss, p.params, by_hand)
    close(GGNLinearOperator(p.model, p.loss, p.params, p.data, shift_labels=True).to_dense(), plain.to_dense())
    head = [p.model.head.weight, p.model.head.bias]
    expected = KFACLinearOperator(Shifted(), p.loss, head, by_hand, fisher_type="empirical")
    close(
        KFACLinearOperator(p.model, p.loss, head, p.data, fisher_type="empirical", shift_labels=True).to_dense(),
        expected.to_dense(),
    )


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator, GGNLinearOperator])
def test_new_options_are_keywords(kind: Any) -> None:
    for name in ("output", "mask", "example_axis", "shift_labels"):
        parameter = inspect.signature(kind).parameters.get(name)
        assert parameter is None or parameter.kind == parameter.KEYWORD_ONLY
    p = problem("two outputs")
    K = kind(p.model, p.loss, p.params, p.data, output=lambda out: out[1])
    assert K.trace >= 0 if kind is not GGNLinearOperator else K.to_dense().trace() >= 0


def test_mask_on_the_classic_door() -> None:
    p = problem("attention")
    keep = lambda X, y: torch.arange(y.numel()).view(y.shape) % 3 != 1  # noqa: E731
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, fisher_type="empirical", mask=keep)
    twin = p.reference(mask=keep)
    close(K.to_dense(), twin.kfac(twin.empirical(per_term=False), separate=True))


def test_exact_operators_take_a_function() -> None:
    p = problem("mlp")
    params = dict(p.model.named_parameters())

    def f(theta: dict[str, Tensor], X: Tensor) -> Tensor:
        return torch.func.functional_call(p.model, theta, (X,))

    for kind in (GGNLinearOperator, HessianLinearOperator, EFLinearOperator):
        expected = kind(p.model, p.loss, params, p.data).to_dense()
        close(kind(f, p.loss, params, p.data).to_dense(), expected, what=kind.__name__)


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator, GGNLinearOperator, FisherMCLinearOperator])
def test_progress_bar(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    p = problem("mlp")
    _ = kind(p.model, p.loss, p.params, p.data, progressbar=True, check_deterministic=False).to_dense()
    assert kind.__name__ in capsys.readouterr().err


@pytest.mark.parametrize("name", FEW)
def test_verify_passes(name: str) -> None:
    p = problem(name)
    with unchanged(p.model, p.loss, p.data):
        table = p.curvature(KFAC, vectors=VECTORS["empirical"]).verify()
    assert len(table.rows) > len(list(p.exact.blocks(False)))


def test_names_that_libraries_on_curvlinops_read() -> None:
    p = problem("mlp")
    examples = sum(len(X) for X, _ in p.data)
    options = {"check_deterministic": False, "kfac_approx": "reduce", "mc_samples": 3, "seed": 5}
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, **options)
    assert (K._N_data, K._kfac_approx, K._mc_samples, K._seed) == (examples, "reduce", 3, 5)
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, num_data=11)
    assert K._N_data == 11


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator, GGNDiagonalLinearOperator])
def test_an_unknown_loss_is_refused_at_construction(kind: Any) -> None:
    p = problem("mlp")
    with pytest.raises(UnsupportedError, match="no likelihood is registered"):
        kind(p.model, nn.HuberLoss(), p.params, p.data, check_deterministic=False)
