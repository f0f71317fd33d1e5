"""Operators that are computed late are as good as those that hold their blocks: sums, multiples, shifts, inverses."""

from __future__ import annotations

import pytest
import torch
from cases import close, problem

from curvlinops_plus import (
    EKFACLinearOperator,
    IdentityLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    RelativeDamping,
)


@pytest.fixture(params=[KFACLinearOperator, EKFACLinearOperator], ids=["KFAC", "EKFAC"])
def K(request: pytest.FixtureRequest) -> KFACLinearOperator:
    p = problem("mlp")
    return request.param(p.model, p.loss, p.params, p.data, fisher_type="type-2")


def test_multiples_keep_closed_forms(K: KFACLinearOperator) -> None:
    dense, eye = 60 * K.to_dense(), torch.eye(K.shape[0], dtype=K.dtype)
    close((60 * K).trace, dense.trace())
    close((60 * K).frobenius_norm, torch.linalg.matrix_norm(dense))
    close((60 * K).shift(1.0).logdet, torch.logdet(dense + eye))
    close(((60 * K) + 1.0 * IdentityLinearOperator(K.in_shapes, K.device, K.dtype)).logdet, torch.logdet(dense + eye))
    shifts = torch.linspace(0.5, 2.0, len(K.blocks), dtype=K.dtype)
    close((60 * K).shift(shifts).logdet, K.operator._scale(60.0).shift(shifts).logdet)
    draws = (60 * K).sample(torch.Generator().manual_seed(0))
    close(draws, 60**0.5 * K.sample(torch.Generator().manual_seed(0)))


def test_relative_damping_of_a_multiple_is_relative_to_each_block(K: KFACLinearOperator) -> None:
    rule = RelativeDamping(0.1)
    close((60 * K).inverse(rule).to_dense(), K.inverse(rule).to_dense() / 60)


def test_pairs_and_heuristics_of_kfac() -> None:
    p = problem("mlp")
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, fisher_type="type-2")
    for options, same in (
        ({"damping": 0.1}, {"damping": (0.1, 0.1)}),
        ({"damping": (0.1, 0.3)}, {"damping": (0.1, 0.3)}),
        ({"damping": 0.1, "use_heuristic_damping": True}, {"damping": 0.1, "use_heuristic_damping": True}),
    ):
        close(KFACInverseLinearOperator(K, **options).to_dense(), K.inverse(**same).to_dense())


def test_inverse_of_a_multiple_has_its_own_numbers(K: KFACLinearOperator) -> None:
    inverse = (2 * K).inverse(damping=0.5)
    dense = torch.linalg.inv(2 * K.to_dense() + 0.5 * torch.eye(K.shape[0], dtype=K.dtype))
    close(inverse.to_dense(), dense)
    close(inverse.logdet, torch.logdet(dense))
    close((3 * inverse).trace, 3 * dense.trace())
    classic = KFACInverseLinearOperator(K, damping=0.5, use_exact_damping=True)
    close((2 * classic).logdet, torch.logdet(2 * classic.to_dense()))


def test_errors_name_the_operator_in_one_line(K: KFACLinearOperator) -> None:
    with pytest.raises(ValueError, match=rf"{type(K).__name__} {K.shape[0]}x{K.shape[0]}") as caught:
        K @ torch.ones(5, dtype=K.dtype)
    assert "approximation" not in str(caught.value)


def test_an_operator_without_data_says_so(K: KFACLinearOperator) -> None:
    p = problem("mlp")
    loaded = type(K).from_state_dict(K.state_dict(), p.model, p.params, None)
    close(loaded.to_dense(), K.to_dense())
    for use in (loaded.compute, loaded.verify, loaded.gradient_and_loss):
        with pytest.raises(ValueError, match="loaded without data"):
            use()


def test_one_pair_is_not_a_list_of_batches() -> None:
    p = problem("mlp")
    with pytest.raises(ValueError, match=r"data=\[\(X, y\)\]"):
        KFACLinearOperator(p.model, p.loss, p.params, p.data[0])


def test_a_second_sweep_that_failed_is_not_gone_on_with() -> None:
    """Sums that an exception left half full are dropped, never added to."""
    p = problem("mlp")
    K = EKFACLinearOperator(p.model, p.loss, p.params, p.data, check_deterministic=False, fisher_type="type-2")
    expected = K.to_dense()
    K.compute_kronecker_factors()
    seen: list[int] = []

    def fail(*_: object) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise RuntimeError("the user's own")

    handle = p.model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="the user's own"):
        K.compute_eigenvalue_correction()
    handle.remove()
    close(K.trace, expected.trace())
    close(K.to_dense(), expected)


def test_weight_and_bias_share_their_factor_and_its_decomposition() -> None:
    p = problem("mlp")
    blocks = KFACLinearOperator(p.model, p.loss, p.params, p.data).blocks
    assert blocks["0.weight"].G is blocks["0.bias"]


def test_an_argument_that_contradicts_the_loss() -> None:
    p = problem("mlp")
    with pytest.raises(ValueError, match=r"reduction='sum' contradicts the loss"):
        p.risk(reduction="sum")
