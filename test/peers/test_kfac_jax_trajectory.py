"""The same training runs as kfac_jax 0.0.8 makes, where it is installed (with jax 0.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from curvlinops_plus.optim import KFACOptimizer, LevenbergMarquardt, NormConstraint, WeightDecay

jax = pytest.importorskip("jax")
kfac_jax = pytest.importorskip("kfac_jax")
if tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 7):
    pytest.skip("kfac_jax 0.0.8 does not run on jax 0.7 and later", allow_module_level=True)

STEPS = 17


def problem() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, [(torch.randn(12, 4).double(), torch.randint(3, (12,))) for _ in range(STEPS)]


def theirs(
    model: nn.Module, batches: Any, l2: float, **options: Any
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy
    layers = (model[0], model[2])
    params = [
        (jnp.array(m.weight.detach().numpy().T), jnp.array(m.bias.detach().numpy())) for m in layers
    ]

    def value(theta, batch):  # type: ignore[no-untyped-def]
        (w1, b1), (w2, b2) = theta
        f = jnp.tanh(batch[0] @ w1 + b1) @ w2 + b2
        kfac_jax.register_softmax_cross_entropy_loss(f, batch[1])
        penalty = sum(jnp.sum(p**2) for p in jax.tree_util.tree_leaves(theta))
        return (
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(f), batch[1][:, None], 1))
            + l2 / 2 * penalty
        )

    lr, momentum, damping = (options.pop(name, None) for name in ("lr", "momentum", "damping"))
    optimizer = kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(value),
        l2_reg=l2,
        use_adaptive_learning_rate=lr is None,
        use_adaptive_momentum=momentum is None,
        use_adaptive_damping=damping is None,
        initial_damping=1.0 if damping is None else None,
        num_burnin_steps=0,
        estimation_mode="ggn_exact",
        curvature_ema=0.95,
        inverse_update_period=5,
        **options,
    )
    data = [(jnp.array(X.numpy()), jnp.array(y.numpy())) for X, y in batches]
    key = jax.random.PRNGKey(0)
    state, seen = optimizer.init(params, key, data[0]), []
    given = {"learning_rate": lr, "momentum": momentum, "damping": damping}
    given = {name: jnp.array(value) for name, value in given.items() if value is not None}
    for step, batch in enumerate(data):
        params, state, stats = optimizer.step(
            params, state, key, batch=batch, global_step_int=step, **given
        )
        seen.append(
            {name: float(stats[name]) for name in ("loss", "damping", "rho") if name in stats}
            | given
        )
        seen[-1] |= {
            name: float(stats[name]) for name in ("learning_rate", "momentum") if name in stats
        }
    flat = [np.concatenate([np.array(w).T.ravel(), np.array(b)]) for w, b in params]
    return np.concatenate(flat), seen


CASES = {
    "exact": ({}, {"lr": 0.1, "momentum": 0.9, "damping": 0.3, "use_exact_inverses": True}),
    "factored": ({"inverse": "factored"}, {"lr": 0.1, "momentum": 0.9, "damping": 0.3}),
    "norm": (
        {"norm_constraint": NormConstraint(1e-3, of="step")},
        {
            "lr": 0.1,
            "momentum": 0.9,
            "damping": 0.3,
            "use_exact_inverses": True,
            "norm_constraint": 1e-3,
        },
    ),
    "levenberg-marquardt": (
        {"damping": LevenbergMarquardt(1.0)},
        {"lr": 0.1, "momentum": 0.9, "use_exact_inverses": True},
    ),
    "adaptive": (
        {"lr": "adaptive", "momentum": "adaptive", "damping": LevenbergMarquardt(1.0)},
        {"use_exact_inverses": True},
    ),
    "adaptive, factored, weight decay": (
        {
            "lr": "adaptive",
            "momentum": "adaptive",
            "damping": LevenbergMarquardt(1.0),
            "inverse": "factored",
            "weight_decay": WeightDecay(1e-2, "coupled"),
        },
        {"l2": 1e-2},
    ),
    # adaptive momentum alone begins with NaN there, since the first velocity is zero
    "adaptive learning rate": (
        {"lr": "adaptive", "momentum": 0.5},
        {"momentum": 0.5, "damping": 0.3, "use_exact_inverses": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_same_trajectory(case: str) -> None:
    ours, options = (dict(part) for part in CASES[case])
    model, batches = problem()
    expected, seen = theirs(model, batches, options.pop("l2", 0.0), **options)
    ours = {
        "lr": 0.1,
        "momentum": 0.9,
        "damping": 0.3,
        "norm_constraint": None,
        "inverse_every": 5,
    } | ours
    loss = nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, loss, vectors="ggn_exact", **ours)
    for (X, y), stats in zip(batches, seen, strict=True):
        optimizer.zero_grad()
        with optimizer.listen((X, y)):
            output = model(X)
        loss(output, y).backward()
        optimizer.step()
        report = optimizer.last_step
        for name, found in (
            ("learning_rate", report.lr),
            ("momentum", report.momentum),
            ("damping", report.damping),
        ):
            if name in stats:
                np.testing.assert_allclose(found[0], float(stats[name]), rtol=1e-10, err_msg=name)
        if report.rho is not None and "rho" in stats:
            np.testing.assert_allclose(report.rho, stats["rho"], rtol=1e-9)
    found = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
