"""The classic door: names, signatures, options and members of curvlinops 3.0.1, in front of the
same numbers.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

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
    compute_eigenvalue_correction_linear_weight_sharing,
    curvature,
)
from curvlinops_plus.risk import Vectors
from test.cases import Problem, close, problem, same, unchanged

CLASSES = {KFACLinearOperator: KFAC, EKFACLinearOperator: EKFAC}
both = pytest.mark.parametrize("kind", CLASSES, ids=["KFAC", "EKFAC"])
separate_or_joint = pytest.mark.parametrize("separate", [False, True], ids=["joint", "separate"])

# --------------------------------------------------------------------------------------- signatures


GIVEN = "model_func loss_func params data progressbar=False check_deterministic=True"
KFAC_LIKE = (
    f"{GIVEN} seed=2147483647 fisher_type=mc mc_samples=1 kfac_approx=expand "
    "num_per_example_loss_terms=None separate_weight_and_bias=True num_data=None batch_size_fn=None"
)
SIGNATURES = {
    "HessianLinearOperator": f"{GIVEN} num_data=None block_sizes=None batch_size_fn=None",
    "GGNLinearOperator": f"{GIVEN} num_data=None block_sizes=None batch_size_fn=None",
    "EFLinearOperator": f"{GIVEN} num_data=None block_sizes=None batch_size_fn=None",
    "FisherMCLinearOperator": f"{GIVEN} seed=2147483647 mc_samples=1 num_data=None batch_size_fn=None",
    "GGNDiagonalLinearOperator": f"{GIVEN} num_data=None batch_size_fn=None mc_samples=0 seed=2147483647",
    "KFACLinearOperator": KFAC_LIKE,
    "EKFACLinearOperator": KFAC_LIKE,
    "KFOCLinearOperator": KFAC_LIKE.replace(" fisher_type=mc mc_samples=1 kfac_approx=expand", ""),
    "KFACInverseLinearOperator": (
        "A damping=0.0 use_heuristic_damping=False min_damping=1e-08 use_exact_damping=False "
        "cache=True retry_double_precision=True"
    ),
    "KFACLinearOperator.from_state_dict": (
        "state_dict model_func params data check_deterministic=True batch_size_fn=None"
    ),
    "KFACInverseLinearOperator.from_state_dict": "state_dict A",
    "compute_eigenvalue_correction_linear_weight_sharing": "g ggT_eigvecs a aaT_eigvecs _force_strategy=None",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_order_and_defaults(path: str) -> None:
    thing: Any = curvlinops_plus
    for part in path.split("."):
        thing = getattr(thing, part)
    told = [
        p for p in inspect.signature(thing).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    values = [getattr(p.default, "value", p.default) for p in told]
    found = [
        p.name if p.default is p.empty else f"{p.name}={value}"
        for p, value in zip(told, values, strict=True)
    ]
    assert " ".join(found) == SIGNATURES[path]


def test_every_argument_and_option_arrives() -> None:
    """By position, and those of a risk by keyword; libraries on curvlinops read some of them
    again.
    """
    p = problem("mlp")
    by_position = (
        p.model,
        p.loss,
        p.params,
        p.data,
        False,
        False,
        3,
        "mc",
        2,
        "reduce",
        2,
        False,
        12,
        None,
    )
    K = KFACLinearOperator(*by_position, check=False)
    expected = curvature(
        p.risk(num_per_example_loss_terms=2, num_data=12),
        KFAC.using(kfac_approx="reduce"),
        vectors=MonteCarlo(2, seed=3),
    )
    close(K.to_dense(), expected.to_dense())
    assert K.risk.options.check is False
    assert (
        list(K._mapping)
        == list(K._input_covariances)
        == list(K._gradient_covariances)
        == ["0", "2"]
    )
    for kind in (KFACLinearOperator, KFOCLinearOperator, GGNDiagonalLinearOperator):
        weighted = kind(
            p.model, p.loss, p.params, p.data, weight=lambda X, y: torch.full((len(X),), 2.0)
        )
        close(weighted.to_dense(), kind(p.model, p.loss, p.params, p.data).to_dense())  # a mean
        with pytest.raises(TypeError, match="unexpected keyword argument 'wieght'"):
            kind(p.model, p.loss, p.params, p.data, wieght=None)


def test_fisher_and_kfac_types_are_strings_too() -> None:
    assert [item.value for item in FisherType] == ["type-2", "mc", "empirical", "forward-only"]
    assert [item.value for item in KFACType] == ["expand", "reduce"]
    assert FisherType.MC == "mc"
    p = problem("mlp")
    for options, words in (
        ({"fisher_type": "type2"}, "fisher_type='type2'; expected one of 'type-2', 'mc'"),
        ({"kfac_approx": "both"}, "kfac_approx='both'; expected one of 'expand', 'reduce'"),
        ({"fisher_type": "type-2", "mc_samples": 2}, "draws nothing"),
    ):
        with pytest.raises(ValueError, match=words):
            KFACLinearOperator(p.model, p.loss, p.params, p.data, **options)


# ------------------------------------------------------------------------------------------ numbers


def classic(kind: Any, p: Problem, **options: Any) -> Any:
    """An operator of the classic door, with an eye on the user's things."""
    with unchanged(p.model, p.loss, p.data):
        K = kind(p.model, p.loss, p.params, p.data, **{**p.net.options, **options})
        _ = K.trace
    return K


FISHER: dict[str, Vectors] = {
    "type-2": Exact(),
    "mc": MonteCarlo(3, seed=5),
    "empirical": Empirical(),
    "forward-only": ForwardOnly(),
}


@both
@pytest.mark.parametrize("fisher_type", FISHER)
@pytest.mark.parametrize(
    ("name", "approx"), [("mlp", "reduce"), ("attention", "expand"), ("attention", "reduce")]
)
def test_every_fisher_type_is_its_vectors(
    kind: Any, name: str, approx: str, fisher_type: str
) -> None:
    p, sent = problem(name), FISHER[fisher_type]
    options: dict[str, Any] = {"mc_samples": 3} if fisher_type == "mc" else {}
    options |= {"seed": 5, "fisher_type": fisher_type, "kfac_approx": approx}
    if kind is EKFACLinearOperator and fisher_type == "forward-only":
        with pytest.raises(ValueError, match=r"ForwardOnly\(\) sends"):
            kind(p.model, p.loss, p.params, p.data, **options)
        return
    if (
        fisher_type == "type-2"
        and name == "attention"
        and kind is KFACLinearOperator
        and approx == "expand"
    ):
        sent = Exact(signs=True, seed=5)
    expected = p.curvature(
        CLASSES[kind].using(kfac_approx=approx), vectors=sent, separate_weight_and_bias=True
    )
    close(classic(kind, p, **options).to_dense(), expected.to_dense())


@both
def test_defaults_are_those_of_the_signature(kind: Any) -> None:
    p = problem("strided cnn")
    K = classic(kind, p)
    expected = p.curvature(
        CLASSES[kind], vectors=MonteCarlo(1, seed=2147483647), separate_weight_and_bias=True
    )
    same(K.to_dense(), expected.to_dense())


# ------------------------------------------------------------------------------------------ members


@separate_or_joint
@pytest.mark.parametrize("name", ["mlp", "strided cnn", "weights only", "biases only"])
def test_factors_are_their_definitions(name: str, separate: bool) -> None:
    p = problem(name)
    K = classic(
        KFACLinearOperator,
        p,
        fisher_type="type-2",
        separate_weight_and_bias=separate,
        kfac_approx="reduce",
    )
    by_layer: dict[str, list[str]] = {}
    for key in p.exact.names:
        layer = p.exact.affine_layer(key)
        assert layer is not None
        by_layer.setdefault(layer, []).append(p.exact.names[key].rsplit(".", 1)[-1])
    assert sorted(K.gradient_covariances) == sorted(by_layer)
    assert sorted(K.input_covariances) == sorted(
        n for n, locals_ in by_layer.items() if "weight" in locals_
    )
    for layer, locals_ in by_layer.items():
        A, G = p.exact.factors(
            layer, p.exact.exact(), reduce=True, ones=len(locals_) == 2 and not separate
        )
        close(K.gradient_covariances[layer], G)
        if "weight" in locals_:
            close(K.input_covariances[layer], A)


@separate_or_joint
def test_factors_of_ekfac(separate: bool) -> None:
    p = problem("mlp")
    K = classic(EKFACLinearOperator, p, fisher_type="type-2", separate_weight_and_bias=separate)
    assert (
        list(K.input_covariances_eigenvectors)
        == list(K.gradient_covariances_eigenvectors)
        == ["0", "2"]
    )
    for position, (layer, o, i) in enumerate((("0", 5, 4), ("2", 3, 5))):
        values = K.corrected_eigenvalues[layer]
        if separate:
            assert list(values) == [2 * position, 2 * position + 1]
            assert values[2 * position].shape == (o, i)
            assert values[2 * position + 1].shape == (o,)
        else:
            assert values.shape == (o, i + 1)
        QG, QA = K.gradient_covariances_eigenvectors[layer], K.input_covariances_eigenvectors[layer]
        expected = (
            p.exact.corrected_eigenvalues([f"{layer}.weight"], p.exact.exact(), QG, QA)
            if separate
            else None
        )
        if expected is not None:
            close(values[2 * position], expected)


@both
@pytest.mark.filterwarnings("ignore:.*exact diagonal")
@pytest.mark.parametrize("name", ["strided cnn", "generic layers"])
def test_computing_again_gives_the_same_numbers(kind: Any, name: str) -> None:
    p = problem(name)
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
        half = K / 2
        half.compute_eigenvalue_correction()
        close(half.to_dense(), dense / 2)


# ------------------------------------------------------------------------------------- live factors


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
                    with pytest.raises(TypeError, match="item assignment"):
                        factors[name] = 3.0 * factors[name]
                    factors[name].mul_(3.0)
        dense = K.to_dense()
        assert not torch.allclose(dense, before)
        expected = torch.zeros_like(dense)
        for keys in p.exact.blocks(separate):
            layer = keys[0].split(".")[0]
            r, c = p.exact.matrix_places(keys)
            at = p.exact.places(keys)
            A = (
                K.input_covariances[layer]
                if any("weight" in key for key in keys)
                else torch.ones(1, 1).double()
            )
            expected[at[:, None], at] = (
                K.gradient_covariances[layer][r[:, None], r] * A[c[:, None], c]
            )
        close(dense, expected, what=change)
        close(K.trace, expected.trace(), what=change)
        close(K @ v, expected @ v, what=change)
        eye = torch.eye(43, dtype=torch.float64)
        close(
            K.inverse(damping=0.3).to_dense(), torch.linalg.inv(expected + 0.3 * eye), what=change
        )
        close(K.inverse(damping=0.3) @ v, torch.linalg.solve(expected + 0.3 * eye, v), what=change)
        exact = KFACInverseLinearOperator(K, damping=0.3, use_exact_damping=True)
        close(exact @ v, torch.linalg.solve(expected + 0.3 * eye, v), what=change)


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
        for t in values.values() if separate else [values]:
            t.add_(1)
    close(K.trace, 2 * trace + 43 + total)
    v = torch.ones(43, dtype=torch.float64)
    close(K @ v, K.to_dense() @ v)
    expected = torch.linalg.inv(K.to_dense() + torch.eye(43, dtype=torch.float64))
    close(K.inverse(damping=1.0).to_dense(), expected)
    close(KFACInverseLinearOperator(K, damping=1.0, use_exact_damping=True).to_dense(), expected)


# ---------------------------------------------------------------------------- eigenvalue correction


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
    close(
        compute_eigenvalue_correction_linear_weight_sharing(g, QG, a, QA, _force_strategy=strategy),
        expected,
    )
    close(
        compute_eigenvalue_correction_linear_weight_sharing(
            g, QG, None, None, _force_strategy=strategy
        ),
        of_bias,
    )


# --------------------------------------------------------------------------------------- data forms


@both
def test_params_by_name(kind: Any) -> None:
    p = problem("mlp")
    named = dict(p.model.named_parameters())
    listed, by_name = classic(kind, p), kind(p.model, p.loss, named, p.data)
    same(by_name.to_dense(), listed.to_dense())
    v = {name: torch.ones_like(q) for name, q in named.items()}
    product = by_name @ v
    assert list(product) == list(named)
    same(
        torch.cat([t.detach().flatten() for t in product.values()]),
        listed @ torch.ones(43, dtype=torch.float64),
    )
    detached = kind(p.model, p.loss, [q.detach() for q in p.params], p.data)
    same(detached.to_dense(), listed.to_dense())


def test_exact_operators_take_a_function() -> None:
    p = problem("mlp")
    params = dict(p.model.named_parameters())

    def f(theta: dict[str, Tensor], X: Tensor) -> Tensor:
        return torch.func.functional_call(p.model, theta, (X,))

    for kind in (GGNLinearOperator, HessianLinearOperator, EFLinearOperator):
        expected = kind(p.model, p.loss, params, p.data).to_dense()
        close(kind(f, p.loss, params, p.data).to_dense(), expected, what=kind.__name__)


def test_positions_of_parameters() -> None:
    p = problem("mlp")
    for params, positions in ((p.params, (0, 1, 2, 3)), (p.params[::-1], (3, 2, 1, 0))):
        K = KFACLinearOperator(p.model, p.loss, params, p.data, check_deterministic=False)
        names = ("weight", "bias")
        assert K.mapping == {
            "0": dict(zip(names, positions[:2])),
            "2": dict(zip(names, positions[2:])),
        }
        gradient, loss = K.gradient_and_loss()
        assert [g.shape for g in gradient] == [q.shape for q in params]
        close(loss, p.risk().loss())


# ---------------------------------------------------------------------- names of curvlinops' main
def test_monte_carlo_estimates_by_the_exact_class() -> None:
    p = problem("mlp")
    args = p.model, p.loss, p.params, p.data
    drawn = GGNLinearOperator(*args, mc_samples=3, seed=5).to_dense()
    same(drawn, FisherMCLinearOperator(*args, mc_samples=3, seed=5).to_dense())
    assert not torch.equal(drawn, GGNLinearOperator(*args, mc_samples=3, seed=6).to_dense())
    same(GGNLinearOperator(*args, mc_samples=0).to_dense(), GGNLinearOperator(*args).to_dense())
    with pytest.raises(ValueError, match="EFLinearOperator draws nothing"):
        EFLinearOperator(*args, mc_samples=1)


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator, KFOCLinearOperator])
def test_backends(kind: Any) -> None:
    p = problem("mlp")
    args = p.model, p.loss, p.params, p.data
    same(kind(*args, backend="make_fx").to_dense(), kind(*args).to_dense())
    with pytest.raises(ValueError, match=r"backend='jax'.*'hooks', 'make_fx'"):
        kind(*args, backend="jax")
