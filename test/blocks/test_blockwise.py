"""When blocks are computed, that parameters which change before are noticed; multiples of what is
computed late.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    DiagonalBlock,
    EKFACLinearOperator,
    EmpiricalRisk,
    GGNDiagonalLinearOperator,
    KFACLinearOperator,
    RelativeDamping,
    curvature,
)
from test.cases import close, same
from test.helpers import normal, seeded
from test.nets import tanh_net


def network() -> nn.Sequential:
    generator = seeded(1)
    model = tanh_net(3, 4, 2).double()
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=p.dtype, generator=generator)
    return model


DATA = [
    (
        normal(5, 3),
        torch.zeros(5, 2, dtype=torch.float64),
    )
]


def lazy(
    model: nn.Module, cls: Any = KFACLinearOperator, params: Any = None, data: Any = DATA
) -> Any:
    params = list(model.parameters()) if params is None else params
    return cls(model, nn.MSELoss(), params, data, check_deterministic=False)


def write_data(model: Any) -> None:
    model[0].weight.data[0, 0] += 1e-6


def replace_data(model: Any) -> None:
    model[0].weight.data = 2 * model[0].weight.data


def load(model: Any) -> None:
    model.load_state_dict(
        {k: 2 * v if k == "0.weight" else v for k, v in model.state_dict().items()}
    )


LAZY = [KFACLinearOperator, EKFACLinearOperator, GGNDiagonalLinearOperator]
CHANGES = [write_data, replace_data, load]


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, {"0": EKFAC}])
def test_curvature_is_that_of_the_parameters_when_it_is_called(approximation: Any) -> None:
    """Nothing is kept from one computation to the next one; one that fails leaves what was
    there.
    """
    model = network()
    risk = EmpiricalRisk(model, nn.MSELoss(), DATA)
    expected, K = (curvature(risk, approximation) for _ in range(2))
    with torch.no_grad():
        model[0].weight += 1
    same(K.to_dense(), expected.to_dense())
    same(K.compute().to_dense(), curvature(risk, approximation).to_dense())
    after = K.to_dense()
    assert not torch.allclose(after, expected.to_dense())
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"layer '0'.*NaN"):
        K.compute()
    same(K.to_dense(), after)


@pytest.mark.parametrize("cls", LAZY)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_parameters_that_change_before_the_first_use_are_named(cls: Any, change: Any) -> None:
    model = network()
    K, before = lazy(model, cls), {k: v.clone() for k, v in model.state_dict().items()}
    change(model)
    with pytest.raises(
        RuntimeError, match=r"\['0.weight'\] have changed since it was made. Call its compute\(\)"
    ):
        _ = K.trace
    model.load_state_dict(before)  # the same values again are no change
    close(K.to_dense(), lazy(model, cls).to_dense())
    change(model)
    close(K.compute().to_dense(), lazy(model, cls).to_dense())
    last = lazy(model, cls, params=list(model[2].parameters()))
    change(model)
    with pytest.raises(
        RuntimeError, match=r"\['model.0.weight'\] have changed"
    ):  # outputs depend on it
        _ = last.trace


def test_eigenvalues_follow_at_the_parameters_of_the_factors() -> None:
    """And sums that an exception left half full are dropped, never added to."""
    model, second = network(), 2 * DATA[0][0]
    K = lazy(model, EKFACLinearOperator, data=[*DATA, (second, DATA[0][1])])
    expected = K.to_dense()
    K.compute_kronecker_factors()

    def fails(module: nn.Module, args: Any) -> None:
        if args[0].equal(second):
            raise RuntimeError("the user's own")

    handle = model[0].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="the user's own"):
        K.compute_eigenvalue_correction()
    handle.remove()
    close(K.to_dense(), expected)
    K.compute_kronecker_factors()
    write_data(model)
    with pytest.raises(RuntimeError, match=r"\['0.weight'\] have changed"):
        _ = K.trace
    K.compute_eigenvalue_correction()  # asked for: new eigenvalues in the old basis
    assert torch.isfinite(K.trace)


# ---------------------------------------------------------------------------------------- multiples


@pytest.mark.parametrize("cls", LAZY[:2])
def test_an_operator_without_data_says_so(cls: Any) -> None:
    K = lazy(network(), cls)
    loaded = cls.from_state_dict(
        K.state_dict() if K.trace else {}, K.risk.model, list(K.risk.model.parameters()), None
    )
    close(loaded.to_dense(), K.to_dense())
    for use in (loaded.compute, loaded.verify, loaded.gradient_and_loss):
        with pytest.raises(ValueError, match="has no examples"):
            use()
    with pytest.raises(ValueError, match=rf"^.*{cls.__name__} 26x26.*$"):
        K @ torch.ones(5, dtype=K.dtype)


class Changes(list[Any]):
    """Data that are other ones when they are read again."""

    def __init__(self, *passes: list[Any]) -> None:
        super().__init__(passes[0])
        self.passes, self.read = passes, 0

    def __iter__(self) -> Any:
        self.read += 1
        return iter(self.passes[min(self.read, len(self.passes)) - 1])


@pytest.mark.parametrize("more", [[*DATA, *DATA], []], ids=["more", "fewer"])
def test_sweeps_see_the_same_data(more: list[Any]) -> None:
    """As many examples in each; and with `check_deterministic` the same loss."""
    (X, y), model = DATA[0], network()
    options: dict[str, Any] = {"max_kept_bytes": 0, "check_deterministic": True}
    with pytest.raises(
        ValueError, match=r"`data` gave \d+ examples in one sweep and \d+ in the next"
    ):
        curvature(
            EmpiricalRisk(model, nn.MSELoss(), Changes([*DATA, *DATA], [*more, *more, *DATA])),
            EKFAC,
            **options,
        )
    for kind, kept in ((EKFAC, 0), (EKFAC, 2**24), (KFAC, 0)):
        data = Changes(DATA, [(2 * X, y)])
        with pytest.raises(RuntimeError, match="loss"):
            curvature(
                EmpiricalRisk(model, nn.MSELoss(), data), kind, **options | {"max_kept_bytes": kept}
            )


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock])
def test_damping_of_a_negative_multiple(approximation: Any) -> None:
    """An indefinite multiple has an inverse; a semi-definite matrix less a multiple of the identity
    is refused.
    """
    K, eye, c = (
        curvature(EmpiricalRisk(network(), nn.MSELoss(), DATA), approximation),
        torch.eye(26, dtype=torch.float64),
        -0.5,
    )
    close((c * K).inverse(0.1).to_dense() @ (c * K.to_dense() + 0.1 * eye), eye, 1e-6)
    with pytest.raises(
        ValueError,
        match='block "0": Expected the damping of a positive semi-definite matrix to be at',
    ):
        K.shift(-0.2).inverse(0.1)
    close((c * K).inverse(c * 0.1).to_dense(), K.inverse(0.1).to_dense() / c)
    close(K.shift(-0.2).inverse(0.3).to_dense(), K.inverse(0.1).to_dense())
    close(
        (c * K).inverse(RelativeDamping(0.1)).to_dense(),
        K.inverse(RelativeDamping(0.1)).to_dense() / c,
    )
