"""The same factors and damped inverses as kfac_jax 0.0.8 on the same net, where it is installed (with jax 0.6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from curvlinops_plus import KFAC, EmpiricalRisk, curvature

jax = pytest.importorskip("jax")
kfac_jax = pytest.importorskip("kfac_jax")
if tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 7):
    pytest.skip("kfac_jax 0.0.8 does not run on jax 0.7 and later", allow_module_level=True)


def test_factors_and_inverses() -> None:
    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    X, y = torch.randn(7, 4).double(), torch.randint(3, (7,))
    params = [
        (jnp.array(m.weight.detach().numpy().T), jnp.array(m.bias.detach().numpy())) for m in (model[0], model[2])
    ]

    def loss(theta, batch):  # type: ignore[no-untyped-def]
        (w1, b1), (w2, b2) = theta
        f = jnp.tanh(batch[0] @ w1 + b1) @ w2 + b2
        kfac_jax.register_softmax_cross_entropy_loss(f, batch[1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(f), batch[1][:, None], 1))

    arguments = (params, (jnp.array(X.numpy()), jnp.array(y.numpy())))
    estimator = kfac_jax.BlockDiagonalCurvature(func=loss, default_estimation_mode="ggn_exact")
    key = jax.random.PRNGKey(0)
    state = estimator.init(
        key, arguments, exact_powers_to_cache=None, approx_powers_to_cache=None, cache_eigenvalues=False
    )
    state = estimator.update_curvature_matrix_estimate(
        state, ema_old=0.0, ema_new=1.0, identity_weight=0.0, batch_size=7, rng=key, func_args=arguments
    )

    K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:3], y[:3]), (X[3:], y[3:])]), KFAC)
    for block, theirs in zip(K.blocks.values(), state.blocks_states, strict=True):
        A, G = (np.array(factor.value) for factor in theirs.factors)
        np.testing.assert_allclose(block.A.matrix.numpy(), A, atol=1e-14)
        np.testing.assert_allclose(block.G.matrix.numpy(), G, atol=1e-14)

    ones = [(jnp.ones((4, 5)), jnp.ones(5)), (jnp.ones((5, 3)), jnp.ones(3))]
    for damping in (1e-3, 0.1):
        for exact in (True, False):
            found = estimator.multiply_inverse(
                state, ones, identity_weight=damping, exact_power=exact, use_cached=False, pmap_axis_name=None
            )
            expected = np.concatenate([np.concatenate([np.array(w).T.ravel(), np.array(b)]) for w, b in found])
            inverse = K.inverse(damping, use_heuristic_damping=not exact, min_damping=0.0)
            ours = (inverse @ torch.ones(K.shape[0]).double()).numpy()
            np.testing.assert_allclose(ours, expected, rtol=1e-12)
