"""When blocks are computed, and that parameters which change before that are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import close, problem
from helpers import seeded
from torch import nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureWarning,
    EKFACLinearOperator,
    EmpiricalRisk,
    GGNDiagonalLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    curvature,
)
from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator
from curvlinops_plus.blocks.fingerprint import changed_parameters, fingerprint


def network() -> nn.Sequential:
    generator = seeded(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=p.dtype, generator=generator)
    return model


DATA = [(torch.randn(5, 3, dtype=torch.float64, generator=seeded()), torch.zeros(5, 2, dtype=torch.float64))]


def at_once(model: nn.Module) -> Any:
    return curvature(EmpiricalRisk(model, nn.MSELoss(), DATA), KFAC)


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, {"0": EKFAC}])
def test_curvature_is_that_of_the_parameters_when_it_is_called(approximation: Any) -> None:
    model = network()
    expected = curvature(EmpiricalRisk(model, nn.MSELoss(), DATA), approximation).to_dense()
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), DATA), approximation)
    with torch.no_grad():
        model[0].weight += 1
    assert torch.equal(K.to_dense(), expected)
    assert not torch.allclose(K.compute().to_dense(), expected)  # asked for, it is computed anew


def lazy(model: nn.Module, cls: Any = KFACLinearOperator, params: Any = None) -> Any:
    params = list(model.parameters()) if params is None else params
    return cls(model, nn.MSELoss(), params, DATA, check_deterministic=False)


def write_version(model: Any) -> None:
    with torch.no_grad():
        model[0].weight += 1


def write_data(model: Any) -> None:
    model[0].weight.data[0, 0] += 1e-6


def replace_data(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.flip(1)


def load(model: Any) -> None:
    model.load_state_dict({k: 2 * v if k == "0.weight" else v for k, v in model.state_dict().items()})


LAZY = [KFACLinearOperator, EKFACLinearOperator, GGNDiagonalLinearOperator]
CHANGES = [write_version, write_data, replace_data, load]
USES: dict[str, Callable[[Any], Any]] = {
    "trace": lambda K: K.trace,
    "product": lambda K: K @ torch.ones(26, dtype=torch.float64),
    "dense": lambda K: K.to_dense(),
    "inverse": lambda K: K.inverse(0.1),
    "multiple": lambda K: 2 * K,
    "to": lambda K: K.to(dtype=torch.float32),
    "blocks": lambda K: K.blocks,
}


@pytest.mark.parametrize("cls", LAZY)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_parameters_that_change_before_the_first_use_are_named(cls: Any, change: Any) -> None:
    model = network()
    K = lazy(model, cls)
    change(model)
    with pytest.raises(RuntimeError, match=r"\['0.weight'\] have changed since it was made. Call its compute\(\)"):
        _ = K.trace
    close(K.compute().to_dense(), lazy(model, cls).to_dense())
    _ = K.trace


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_first_use_is_one(use: Any) -> None:
    model = network()
    K = lazy(model)
    write_data(model)
    with pytest.raises(RuntimeError, match="computed at its first use"):
        use(K)


def test_frozen_parameters_outside_of_it_count_too() -> None:
    model = network()
    K = lazy(model, params=list(model[2].parameters()))
    write_data(model)
    with pytest.raises(RuntimeError, match=r"\['model.0.weight'\] have changed"):
        _ = K.trace


def test_the_same_values_again_are_no_change() -> None:
    model = network()
    K, before = lazy(model), {k: v.clone() for k, v in model.state_dict().items()}
    write_version(model)
    model.load_state_dict(before)
    close(K.to_dense(), lazy(model).to_dense())


def test_eigenvalues_follow_at_the_parameters_of_the_factors() -> None:
    model = network()
    K = lazy(model, EKFACLinearOperator)
    K.compute_kronecker_factors()
    write_data(model)
    with pytest.raises(RuntimeError, match=r"\['0.weight'\] have changed"):
        _ = K.trace
    K.compute_eigenvalue_correction()  # asked for: new eigenvalues in the old basis
    assert torch.isfinite(K.trace)


def test_an_inverse_of_what_is_not_computed_yet() -> None:
    model = network()
    K = lazy(model)
    inverse = KFACInverseLinearOperator(K, damping=0.1)
    write_data(model)
    with pytest.raises(RuntimeError, match="computed at its first use"):
        inverse @ torch.ones(26, dtype=torch.float64)


def test_a_kept_inverse_follows_blocks_that_are_computed_anew() -> None:
    model = network()
    K = lazy(model)
    inverse = KFACInverseLinearOperator(K, damping=0.1)
    before = inverse.to_dense()
    write_version(model)
    assert torch.equal(inverse.to_dense(), before)
    K.compute()
    close(inverse.to_dense(), KFACInverseLinearOperator(K, damping=0.1).to_dense())
    assert not torch.allclose(inverse.to_dense(), before)


def test_a_failed_computation_leaves_the_blocks() -> None:
    model = network()
    K = at_once(model)
    before = K.to_dense()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="NaN"):
        K.compute()
    assert torch.equal(K.to_dense(), before)


def test_a_state_tells_the_parameters_of_its_blocks() -> None:
    """Not those that the model has when the state is written."""
    model = network()
    K, before = at_once(model), {k: v.clone() for k, v in model.state_dict().items()}
    write_version(model)
    state = K.state_dict()
    with pytest.warns(CurvatureWarning, match="differ from those"):
        elsewhere = BlockwiseLinearOperator.from_state_dict(state, model, None)
    assert elsewhere.state_dict()["fingerprint"] == state["fingerprint"]
    model.load_state_dict(before)
    loaded = BlockwiseLinearOperator.from_state_dict(state, model, None)  # no warning
    assert loaded.state_dict()["fingerprint"] == state["fingerprint"]


@pytest.mark.parametrize("size", [1, 2**18 - 1, 2**18, 2**18 + 1, 2**20 + 5, 3 * 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fingerprints_are_two_sums(size: int, dtype: torch.dtype) -> None:
    model = nn.Module()
    model.p = nn.Parameter(torch.randn(size, dtype=dtype, generator=seeded()))
    risk = EmpiricalRisk(model, nn.MSELoss(), ())
    p, index = model.p.detach().double(), torch.arange(size, dtype=torch.float64)
    (found,) = fingerprint(risk).values()
    assert found == pytest.approx([float(p.abs().sum()), float(p @ index.cos())], rel=1e-9, abs=1e-6)
    again = fingerprint(risk)
    assert not changed_parameters(again, fingerprint(risk), 1e-12)
    with torch.no_grad():
        model.p[-1] *= -1
    assert changed_parameters(again, fingerprint(risk), 1e-12) == ["p"]


def test_a_problem_with_tied_weights() -> None:
    p = problem("tied")
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, check_deterministic=False)
    assert torch.isfinite(K.trace)
