"""Operators made again from their states alone: the composing door, multiples, and files of earlier versions."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import APPROXIMATIONS, FEW, close, problem, same
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    Accumulator,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvaturePropagation,
    CurvatureWarning,
    DiagonalBlock,
    EKFACLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    ForwardOnly,
    FullBlock,
    GGNDiagonalLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    KFOCLinearOperator,
    MonteCarlo,
    NearestKronecker,
    RelativeDamping,
    blocks,
    curvature,
    load,
    risk,
    save,
)
from curvlinops_plus.blocks import stored_options
from curvlinops_plus.linalg import Diagonal, HeuristicDamping, Structure
from curvlinops_plus.risk import Vectors

DATA = Path(__file__).parent / "data"


def small() -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    """The problem whose states are in `data`, made by version 1 of the format; the first layer has no factors."""
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_((torch.arange(p.numel(), dtype=torch.float64) + k).cos().view_as(p))
    X = torch.linspace(-2, 3, 15, dtype=torch.float64).view(5, 3).sin()
    return model, nn.CrossEntropyLoss(label_smoothing=0.1), [(X, torch.tensor([0, 1, 1, 0, 1]))]


def mixed(**options: Any) -> BlockwiseLinearOperator:
    model, loss, data = small()
    approximations = {nn.LayerNorm: FullBlock, "1": EKFAC.using(kfac_approx="reduce")}
    nearest = NearestKronecker.using(power_iterations=2)
    return curvature(EmpiricalRisk(model, loss, data), approximations, default=nearest, **options)


def reduce(**options: Any) -> KFACLinearOperator:
    model, loss, data = small()
    with warnings.catch_warnings():  # one of three layers gets its exact diagonal
        warnings.simplefilter("ignore", CurvatureWarning)
        return KFACLinearOperator(model, loss, list(model.parameters()), data, kfac_approx="reduce", **options)


# ----------------------------------------------------------------------------------------------------- composing door


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_every_approximation_is_made_again(name: str, approximation: str, tmp_path: Path) -> None:
    p = problem(name)
    for separate in (False, True):
        K = p.made(approximation, separate)
        save(K.state_dict(), tmp_path / "K.safetensors")
        options = {key: value for key, value in p.net.options.items() if key != "params"}
        other = BlockwiseLinearOperator.from_state_dict(
            load(tmp_path / "K.safetensors"), p.model, None, dict(K.risk.params), loss=p.loss, **options
        )
        close(other.to_dense(), K.to_dense(), 1e-13)
        assert [repr(e.approximation) for e in other.plan] == [repr(e.approximation) for e in K.plan]


def forms(*vectors: Vectors) -> list[Any]:
    return [pytest.param(v, id=repr(v)) for v in vectors]


@pytest.mark.parametrize(
    "vectors",
    forms(Exact(), Exact(signs=True, seed=4), CurvaturePropagation(2, 1), MonteCarlo(3, 5), Empirical(per_term=True)),
)
def test_every_kind_of_vectors_is_made_again(vectors: Vectors) -> None:
    K = mixed(vectors=vectors).compute()
    model, _, data = small()
    other = BlockwiseLinearOperator.from_state_dict(K.state_dict(), model, data)
    assert other.vectors == vectors
    assert other.risk.losses.given.label_smoothing == 0.1
    close(other.to_dense(), K.to_dense(), 1e-13)
    assert str(other) == str(K)
    same(other.compute().to_dense(), K.to_dense())


def test_forward_only_and_options_of_the_risk() -> None:
    model, loss, data = small()
    params = [*model[1].parameters(), *model[3].parameters()]
    risk = EmpiricalRisk(model, loss, data, params, num_data=9, num_per_example_loss_terms=2)
    K = curvature(risk, KFAC, vectors=ForwardOnly()).compute()
    other = BlockwiseLinearOperator.from_state_dict(K.state_dict(), model, data, params)
    assert (other.risk.options.num_data, other.risk.options.num_per_example_loss_terms) == (9, 2)
    same(other.compute().to_dense(), K.to_dense())


class Squares(Accumulator):
    """An approximation of the user's own."""

    def __init__(self, layer: Any, group: Any, scale: Any, factor: Any = 1.0) -> None:
        super().__init__(layer, group, scale)
        self.factor = factor

    def update(self, batch: Any) -> None:
        self.add("d", batch.squared_grads().flatten())

    def finish(self) -> Any:
        return Diagonal(self.value("d") * (self.factor if isinstance(self.factor, float) else 3.0))


class Twice(MonteCarlo):
    """Vectors of the user's own."""


def test_what_is_the_user_s_own_is_passed_or_refused() -> None:
    model, loss, data = small()
    risk = EmpiricalRisk(model, loss, data)
    state = curvature(risk, {"1": Squares.using(factor=2.0)}, default=DiagonalBlock).compute().state_dict()
    with pytest.raises(ValueError, match=r"approximation Squares of layer '1' is not part.*approximations=\[Squares\]"):
        BlockwiseLinearOperator.from_state_dict(state, model, data)
    other = BlockwiseLinearOperator.from_state_dict(state, model, data, approximations=[Squares])
    close(other.blocks["1"].diagonal(), 2 * curvature(risk, DiagonalBlock).blocks["1"].diagonal())
    odd = curvature(risk, {"1": Squares.using(factor=len)}, default=DiagonalBlock).compute().state_dict()
    with pytest.raises(ValueError, match=r"option factor=<built-in function len> .*neither a tensor nor plain Python"):
        BlockwiseLinearOperator.from_state_dict(odd, model, data, approximations=[Squares])

    state = curvature(risk, DiagonalBlock, vectors=Twice(2, 3)).compute().state_dict()
    with pytest.raises(ValueError, match=r"vectors Twice are not part.*vectors=Twice"):
        BlockwiseLinearOperator.from_state_dict(state, model, data)
    other = BlockwiseLinearOperator.from_state_dict(state, model, data, vectors=Twice(2, 3))
    assert other.trace > 0
    with pytest.raises(ValueError, match="State mismatch in the vectors"):
        BlockwiseLinearOperator.from_state_dict(state, model, data, vectors=Twice(2, 4))


def test_states_that_do_not_fit_are_refused() -> None:
    model, _, data = small()
    state = mixed().compute().state_dict()
    with pytest.raises(ValueError, match="State mismatch in layer '3'"):
        BlockwiseLinearOperator.from_state_dict(state, model[:2], data)
    with pytest.raises(ValueError, match="not a state of curvlinops_plus"):
        BlockwiseLinearOperator.from_state_dict({}, model, data)
    for key in set(state) - {"blocks"}:  # without them it is a state from before anything was computed
        with pytest.raises(ValueError, match=r"lacks|not a state"):
            BlockwiseLinearOperator.from_state_dict({k: v for k, v in state.items() if k != key}, model, data)
    with pytest.raises(ValueError, match=r"the class \(class\)"):
        KFACLinearOperator.from_state_dict(state, model, list(model.parameters()), data)
    unknown = {**state, "loss_type": "Mine", "loss_options": {"loss": "Mine"}}
    with pytest.raises(ValueError, match=r"loss Mine can't be made again.*loss=\.\.\..*loss_func="):
        BlockwiseLinearOperator.from_state_dict(unknown, model, data)


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator, KFOCLinearOperator])
def test_classic_states_whose_first_layer_has_no_factors(kind: Any) -> None:
    model, loss, data = small()
    options = {} if kind is KFOCLinearOperator else {"kfac_approx": "reduce"}
    with pytest.warns(CurvatureWarning, match="exact diagonal"):
        K = kind(model, loss, list(model.parameters()), data, **options)
    other = kind.from_state_dict(K.state_dict(), model, list(model.parameters()), data)
    close(other.to_dense(), K.to_dense(), 1e-13)
    same(other.compute().to_dense(), K.to_dense())
    assert [e.approximation.options for e in other.plan] == [e.approximation.options for e in K.plan]


def test_the_classic_diagonal_is_made_again() -> None:
    model, loss, data = small()
    K = GGNDiagonalLinearOperator(model, loss, list(model.parameters()), data, mc_samples=2, seed=7)
    other = GGNDiagonalLinearOperator.from_state_dict(K.state_dict(), model, data)
    same(other.diagonal(), K.diagonal())
    assert other.vectors == MonteCarlo(2, 7)


# --------------------------------------------------------------------------------------------------------- multiples


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
def test_multiples_keep_state_table_and_blocks(kind: Any, tmp_path: Path) -> None:
    p = problem("mlp")
    K = kind(p.model, p.loss, p.params, p.data, fisher_type="type-2")
    half = K / 2
    assert type(half) is kind
    assert list(half.blocks) == list(K.blocks)
    assert "times 0.5" in str(half)
    assert "LinearRule" in str(half)
    close(half.to_dense(), K.to_dense() / 2, 1e-13)
    close((3 * half).trace, 1.5 * K.trace)
    save(half.state_dict(), tmp_path / "half.safetensors")
    state = load(tmp_path / "half.safetensors")
    assert state["scale"] == 0.5
    other = kind.from_state_dict(state, p.model, p.params, p.data)
    close(other.to_dense(), half.to_dense(), 1e-13)
    close(other.compute().to_dense(), half.to_dense(), 1e-13)
    K.load_state_dict(state)
    close(K.to_dense(), half.to_dense(), 1e-13)


def test_factors_of_a_multiple_are_those_of_the_operator() -> None:
    p = problem("mlp")
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, fisher_type="type-2")
    double = 2 * K
    assert double.gradient_covariances["0"] is K.gradient_covariances["0"]
    before = K.to_dense()
    double.gradient_covariances["0"] = 3 * double.gradient_covariances["0"]
    close(double.blocks["0.weight"].to_dense(), 6 * K.blocks["0.weight"].to_dense())
    same(K.to_dense(), before)


def test_recomputing_a_multiple() -> None:
    p = problem("generic layers")
    with pytest.warns(CurvatureWarning):
        K = EKFACLinearOperator(p.model, p.loss, p.params, p.data, fisher_type="type-2", **p.net.options)
    half, dense = K / 2, K.to_dense() / 2
    half.compute_eigenvalue_correction()
    close(half.to_dense(), dense, 1e-12)
    half.compute_kronecker_factors()
    close(half.to_dense(), dense, 1e-12)
    close(K.to_dense(), 2 * dense, 1e-13)


def test_damping_of_the_factors_of_a_multiple() -> None:
    """The scale belongs to the gradient factor; the heuristic does not depend on where it is."""
    p = problem("mlp")
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, fisher_type="type-2")
    other = copy.deepcopy(K.state_dict())
    for G in other["gradient_covariances"].values():
        G *= 4
    explicit = KFACLinearOperator.from_state_dict(other, p.model, p.params, None)
    close(explicit.to_dense(), 4 * K.to_dense())
    for options in ({"damping": (0.1, 0.3)}, {"damping": 0.1, "use_heuristic_damping": True}, {"damping": 0.2}):
        close((4 * K).inverse(**options).to_dense(), explicit.inverse(**options).to_dense())
        if "use_heuristic_damping" in options or isinstance(options["damping"], tuple):
            classic = KFACInverseLinearOperator(4 * K, **options)
            close(classic.to_dense(), explicit.inverse(**options).to_dense())
    rules = (RelativeDamping(0.1), RelativeDamping(0.2))
    close((4 * K).inverse(rules).to_dense(), explicit.inverse(rules).to_dense())
    with pytest.raises(ValueError, match="single damping value"):
        (4 * K).inverse((0.1, 0.1), use_heuristic_damping=True)


def test_negative_multiples_and_other_precisions() -> None:
    K = mixed()
    dense = K.to_dense()
    close((-K).to_dense(), -dense)
    assert (-K).structure < K.structure
    low = (torch.tensor(0.5, dtype=torch.float64) * K).to(dtype=torch.float32)
    assert low.to_dense().dtype == torch.float32
    close(low.to_dense(), dense / 2, 1e-5)
    assert low.state_dict()["scale"] == 0.5


def test_compute_returns_the_operator() -> None:
    K = mixed()
    assert K.compute() is K
    assert "examples" in K.state_dict()


# ----------------------------------------------------------------------------------------------------- earlier versions


def test_classic_states_of_version_1() -> None:
    """They could not be loaded by from_state_dict then, since their first layer has no Kronecker factors."""
    model, _, data = small()
    state = load(DATA / "version_1_classic.safetensors")
    assert state["version"] == 1
    K = KFACLinearOperator.from_state_dict(state, model, list(model.parameters()), data)
    same_numbers(K.to_dense(), (2.591289330213799, 0.8712785165166206, 1.8207367366400757))
    assert K.vectors == MonteCarlo(2, 3)
    assert K.state_dict()["version"] == 3
    other = reduce(check_deterministic=False)
    other.load_state_dict(state)
    close(other.to_dense(), K.to_dense(), 1e-12)


def same_numbers(M: Tensor, expected: tuple[float, float, float]) -> None:
    """Trace, norm and sum of a matrix are those of the version that wrote the state."""
    close(torch.stack([M.trace(), M.norm(), M.sum()]), torch.tensor(expected, dtype=M.dtype), 1e-12)


def test_composing_states_of_version_1() -> None:
    model, _, data = small()
    state, expected = load(DATA / "version_1_composing.safetensors"), mixed(vectors=Exact(signs=True, seed=4))
    for K in (BlockwiseLinearOperator.from_state_dict(state, model, data), mixed(vectors=Exact(signs=True, seed=4))):
        K.load_state_dict(state)
        close(K.to_dense(), expected.to_dense(), 1e-12)
    with pytest.raises(ValueError, match="lacks \\['layers'\\]"):
        K.load_state_dict({key: value for key, value in state.items() if key != "layers"})


def test_estimator_states_of_version_1() -> None:
    model, loss, data = small()
    plan = {"1": EKFAC, "3": KFAC.using(kfac_approx="reduce")}
    options = {"default": DiagonalBlock, "decay": 0.9, "damping": 0.1, "vectors": MonteCarlo(seed=1)}
    resumed = CurvatureEstimator(EmpiricalRisk(model, loss, ()), plan, **options)
    with pytest.warns(CurvatureWarning, match="drew random numbers in another way: vectors go on with others"):
        resumed.load_state_dict(load(DATA / "version_1_estimator.safetensors"))
    same_numbers(resumed.operator.to_dense(), (4.343781416122208, 1.869944811148691, 1.9546260828799673))
    same_numbers(resumed.inverse().to_dense(), (127.18728584086287, 32.66736914437686, 147.12396000093207))
    again = CurvatureEstimator(EmpiricalRisk(model, loss, ()), plan, **options)
    again.load_state_dict(resumed.state_dict())
    for each in (resumed, again):
        each.update(data[0])
    assert resumed.updates == 2
    close(again.operator.to_dense(), resumed.operator.to_dense(), 1e-12)
    close(again.inverse().to_dense(), resumed.inverse().to_dense(), 1e-12)


def test_options_that_version_1_wrote_as_members_of_an_enum() -> None:
    state = load(DATA / "version_1_classic.safetensors")
    state["layers"]["1"]["approximation"] = "KFAC(kfac_approx=<KFACType.REDUCE: 'reduce'>)"
    reduce(check_deterministic=False).load_state_dict(state)
    state["layers"]["1"]["approximation"] = "KFAC(kfac_approx=<no Python>)"
    with pytest.raises(ValueError, match=r"layer '1'.*no Python"):
        reduce(check_deterministic=False).load_state_dict(state)


def test_the_structure_follows_the_scale_of_the_state() -> None:
    model, loss, data = small()
    K = curvature(EmpiricalRisk(model, loss, data), DiagonalBlock).compute()
    for state, other, structure in (((-K).state_dict(), K, Structure.SYMMETRIC), (K.state_dict(), -K, Structure.PSD)):
        made = BlockwiseLinearOperator.from_state_dict(state, model, data)
        other.load_state_dict(state)
        assert made.structure == other.structure == structure
        close(made.materialize().eigenvalues(), other.materialize().eigenvalues())


def test_dampings_of_factors_need_a_positive_multiple() -> None:
    K = curvature(problem("mlp").risk(), KFAC)
    for multiple in (0 * K, -K):
        for damping in (HeuristicDamping(0.1), (0.1, 0.1)):
            with pytest.raises(ValueError, match="need a positive multiple of the curvature"):
                multiple.inverse(damping)


def test_loading_leaves_the_risk_of_the_caller_alone() -> None:
    model, loss, data = small()
    state = curvature(EmpiricalRisk(model, loss, data, num_data=50), DiagonalBlock).compute().state_dict()
    risk = EmpiricalRisk(model, loss, data)
    K = curvature(risk, DiagonalBlock)
    K.load_state_dict(state)
    assert risk.options.num_data is None
    assert K.risk.options.num_data == 50


@pytest.mark.parametrize("kind", [EKFACLinearOperator, KFACLinearOperator])
@pytest.mark.parametrize("separate", [False, True])
def test_parameters_in_another_order(kind: Any, separate: bool, tmp_path: Path) -> None:
    """Eigenvalues are stored by positions of parameters: those of a weight were taken for those of a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()
    data = [(torch.randn(9, 1, dtype=torch.float64), torch.arange(9) % 4)]
    weight, bias, last = model.parameters()
    make = kind(model, nn.CrossEntropyLoss(), [weight, bias], data, separate_weight_and_bias=separate)
    save(make, tmp_path / "K.safetensors")
    for state in (make.state_dict(), load(tmp_path / "K.safetensors")):
        loaded = kind.from_state_dict(state, model, [bias, weight], data).to_dense()
        close(loaded.roll((4, 4), (0, 1)), make.to_dense())
    state = kind(model, nn.CrossEntropyLoss(), [weight, last], data).state_dict()
    loaded = kind.from_state_dict(state, model, [last, weight], data).to_dense()
    close(loaded.roll((4, 4), (0, 1)), kind(model, nn.CrossEntropyLoss(), [weight, last], data).to_dense())


def test_everything_of_ours_can_be_made_from_a_state() -> None:
    """A new approximation or mode is registered for states."""
    kinds = [vars(blocks)[name] for name in blocks.__all__]
    ours = {k for k in kinds if isinstance(k, type) and issubclass(k, Accumulator) and k is not Accumulator}
    assert ours == set(stored_options.APPROXIMATIONS)
    modes = [vars(risk)[name] for name in risk.__all__]
    sent = {m for m in modes if isinstance(m, type) and issubclass(m, Vectors) and m is not Vectors}
    assert sent == set(stored_options.VECTORS)
    assert len(ours) > 5
    assert len(sent) > 4


@pytest.mark.parametrize("separate", [False, True])
def test_the_heuristic_is_a_rule_and_a_flag(separate: bool) -> None:
    K = problem("mlp").curvature(KFAC, separate_weight_and_bias=separate)
    rule, flag = (
        K.inverse(HeuristicDamping(0.1, min=0.02)),
        K.inverse(0.1, use_heuristic_damping=True, min_damping=0.02),
    )
    same(rule.to_dense(), flag.to_dense())
    assert not torch.allclose(rule.to_dense(), K.inverse(0.1).to_dense())
