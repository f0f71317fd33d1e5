"""A network with a Laplace approximation as BoTorch's model, if BoTorch is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from curvlinops_plus import GGN, EmpiricalRisk, Laplace, UnsupportedError
from curvlinops_plus.integrations.botorch import LaplaceModel
from test.cases import close
from test.helpers import normal
from test.nets import tanh_net


def la_of(C: int, loss: Any = None) -> Laplace:
    torch.manual_seed(0)
    model = tanh_net(2, 6, C).double()
    X = normal(20, 2)
    y = torch.stack([(X[:, 0] - 0.3) ** 2 + (k + 1) * X[:, 1] ** 2 for k in range(C)], 1)
    return Laplace(GGN(EmpiricalRisk(model, loss or nn.MSELoss(), [(X, y)])), 2.0)


def test_without_botorch_an_error_says_so() -> None:
    from curvlinops_plus.integrations import botorch

    if botorch.Model is object:
        with pytest.raises(ImportError, match="pip install botorch"):
            LaplaceModel(la_of(1))


@pytest.mark.parametrize("C", [1, 2])
def test_posteriors_are_those_of_laplace(C: int) -> None:
    pytest.importorskip("botorch")
    la = la_of(C)
    model = LaplaceModel(la, C)
    X = normal(3, 4, 2, seed=1)
    posterior = model.posterior(X)
    assert posterior.mean.shape == (3, 4, C)
    assert (model.num_outputs, model.batch_shape) == (C, torch.Size())
    for k in range(3):
        mean, covariance = la.joint(X[k])
        close(posterior.mean[k], mean)
        close(posterior.distribution.covariance_matrix[k], covariance.reshape(4 * C, 4 * C))
    single = model.posterior(X[:, :1], observation_noise=True)
    close(single.variance, posterior.variance[:, :1] + la.noise**2)
    close(model.posterior(X, output_indices=[C - 1]).mean, posterior.mean[..., -1:])
    assert posterior.rsample(torch.Size([5])).shape == (5, 3, 4, C)


def test_acquisition_functions_are_optimized() -> None:
    pytest.importorskip("botorch")
    from botorch.acquisition import LogExpectedImprovement, qUpperConfidenceBound
    from botorch.optim import optimize_acqf

    model = LaplaceModel(la_of(1))
    bounds = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    for acquisition, q in (
        (LogExpectedImprovement(model, 0.5, maximize=True), 1),
        (qUpperConfidenceBound(model, beta=2.0), 2),
    ):
        torch.manual_seed(0)
        X, value = optimize_acqf(
            acquisition, bounds, q, num_restarts=2, raw_samples=8, options={"maxiter": 5}
        )
        at_random = 2 * torch.rand(10, q, 2, dtype=torch.float64) - 1
        assert X.shape == (q, 2)
        assert float(value) >= float(acquisition(at_random).max()) - 1e-6


def test_other_losses_are_refused() -> None:
    pytest.importorskip("botorch")
    la: Any = la_of(1)
    la.likelihood = nn.Identity()
    la.likelihood.name = "CrossEntropyLoss"
    with pytest.raises(UnsupportedError, match="CrossEntropyLoss has none"):
        LaplaceModel(la)
