"""The same blocks and damped inverses as kfac_jax 0.0.8 on the same net, where it is installed
(with jax 0.6).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    KFAC,
    TNT,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    ScaledIdentity,
    curvature,
)

jax = pytest.importorskip("jax")
kfac_jax = pytest.importorskip("kfac_jax")
if tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 7):
    pytest.skip("kfac_jax 0.0.8 does not run on jax 0.7 and later", allow_module_level=True)
jnp = jax.numpy


def loss(params: Any, batch: Any) -> Any:
    (w1, b1), (w2, b2) = params
    f = jnp.tanh(batch[0] @ w1 + b1) @ w2 + b2
    kfac_jax.register_softmax_cross_entropy_loss(f, batch[1])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(f), batch[1][:, None], 1))


def theirs_of(parts: list[Tensor]) -> list[Any]:
    """Weights [o, i] and biases, as pairs of weights [i, o] and biases."""
    found = [jnp.array(t.detach().numpy().T) for t in parts]
    return list(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (KFAC, "DenseTwoKroneckerFactored"),
        (TNT, "DenseTNT"),
        (DiagonalBlock, "DenseDiagonal"),
        (FullBlock, "DenseFull"),
        (ScaledIdentity, "ScaledIdentity"),
    ],
)
def test_blocks_and_inverses(ours: Any, theirs: str) -> None:
    jax.config.update("jax_enable_x64", True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    X, y = torch.randn(7, 4).double(), torch.randint(3, (7,))
    arguments = theirs_of(list(model.parameters())), (jnp.array(X.numpy()), jnp.array(y.numpy()))
    estimator, key = (
        kfac_jax.BlockDiagonalCurvature(
            func=loss,
            default_estimation_mode="ggn_exact",
            layer_tag_to_block_ctor={"dense": getattr(kfac_jax, theirs)},
        ),
        jax.random.PRNGKey(0),
    )
    state = estimator.init(
        key,
        arguments,
        exact_powers_to_cache=None,
        approx_powers_to_cache=None,
        cache_eigenvalues=False,
    )
    state = estimator.update_curvature_matrix_estimate(
        state,
        ema_old=0.0,
        ema_new=1.0,
        identity_weight=0.0,
        batch_size=7,
        rng=key,
        func_args=arguments,
    )
    K = curvature(
        EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:3], y[:3]), (X[3:], y[3:])]), ours
    )
    v = [torch.randn_like(p) for p in model.parameters()]

    def compare(operator: Any, function: Any, damping: float, exact: bool) -> None:
        found = function(
            state,
            theirs_of(v),
            identity_weight=damping,
            exact_power=exact,
            use_cached=False,
            pmap_axis_name=None,
        )
        expected = np.concatenate([np.array(t).T.ravel() for pair in found for t in pair])
        np.testing.assert_allclose(
            (operator @ torch.cat([t.flatten() for t in v])).numpy(), expected, rtol=1e-10
        )

    compare(K.shift(0.1), estimator.multiply, 0.1, exact=True)
    compare(K.inverse(0.1), estimator.multiply_inverse, 0.1, exact=True)
    if ours is not KFAC:
        return
    for block, of_block in zip(K.blocks.values(), state.blocks_states, strict=True):
        A, G = (np.array(factor.value) for factor in of_block.factors)
        np.testing.assert_allclose(block.A.matrix.numpy(), A, atol=1e-14)
        np.testing.assert_allclose(block.G.matrix.numpy(), G, atol=1e-14)
    for damping in (1e-3, 0.1):
        heuristic = K.inverse(damping, use_heuristic_damping=True, min_damping=0.0)
        compare(heuristic, estimator.multiply_inverse, damping, exact=False)
