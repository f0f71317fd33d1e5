"""Batch norm in training mode, in training loops: the curvature is that of the model at the batch's statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import close, unchanged
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    MonteCarlo,
    UnsupportedError,
    curvature,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*are batch norm in training mode", "ignore:.*get their exact diagonal")

Y = torch.arange(12) % 3
VECTORS = [Exact(), MonteCarlo(2, seed=1), Empirical()]


def vectors(options: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """A network of vectors, with data."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, **options)
    return nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(12, 4).double()


def images(options: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """A network of images, with data."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, **options)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), norm, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3)).double()
    return model, torch.randn(12, 2, 3, 3).double()


def at_statistics(model: nn.Module, x: Tensor, make: Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    """The same network in evaluation mode, whose running statistics are those of one batch."""
    twin, _ = make(options | {"track_running_stats": True, "momentum": 1.0})
    twin.load_state_dict(model.state_dict(), strict=False)
    h = model[0](x).detach()  # type: ignore[index]
    others = [axis for axis in range(h.ndim) if axis != 1]
    twin[1].running_mean.copy_(h.mean(others))
    twin[1].running_var.copy_(h.var(others, correction=0))
    return twin.eval()


def estimate(model: nn.Module, batch: Any, listening: bool, approximation: Any, vectors: Any) -> Any:
    """The curvature of one batch."""
    params = [p for name, p in model.named_parameters() if not name.startswith("1.")]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (), params)
    estimator = CurvatureEstimator(risk, approximation, vectors=vectors)
    if not listening:
        with unchanged(model):
            estimator.update(batch)
        return estimator.operator
    with estimator.listen(batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return estimator.operator


@pytest.mark.parametrize("listening", [False, True])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock])
@pytest.mark.parametrize("mode", VECTORS, ids=repr)
@pytest.mark.parametrize("make", [vectors, images])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_the_curvature_is_that_of_the_model_at_the_statistics_of_the_batch(
    options: dict[str, Any], make: Any, mode: Any, approximation: Any, listening: bool
) -> None:
    model, x = make(options)
    twin = at_statistics(model, x, make, options)
    ours = estimate(model, (x, Y), listening, approximation, mode)
    close(ours.to_dense(), estimate(twin, (x, Y), False, approximation, mode).to_dense())


def test_the_users_pass_is_theirs() -> None:
    """Running statistics move once, gradients are those through the statistics, random numbers go on as without us."""
    (model, x), (twin, _) = vectors({}), vectors({})
    for net in (model, twin):
        net.append(nn.Dropout())  # type: ignore[operator]
    params = [*model[0].parameters(), *model[3].parameters()]  # type: ignore[index]
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), (), params), EKFAC)
    found = []
    for net in (model, twin):
        torch.manual_seed(3)
        if net is model:
            with estimator.listen((x, Y)):
                loss = nn.functional.cross_entropy(net(x), Y)
        else:
            loss = nn.functional.cross_entropy(net(x), Y)
        loss.backward()
        found.append([loss.detach(), torch.rand(()), *(p.grad for p in net.parameters()), *net.buffers()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_dropout_is_that_of_the_users_pass() -> None:
    model, x = vectors({"affine": False})
    model.append(nn.Dropout())  # type: ignore[operator]
    torch.manual_seed(3)
    ours = estimate(model, (x, Y), True, EKFAC, Exact())
    torch.manual_seed(3)
    close(ours.to_dense(), estimate(model, (x, Y), False, EKFAC, Exact()).to_dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_of_the_users_pass(dtype: torch.dtype) -> None:
    model, x = vectors({"affine": False})
    model, x = model.float(), x.float()
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), KFAC)
    with estimator.listen((x, Y)), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        model(x)
    assert estimator.updates == 1


def test_parameters_that_are_written_to_inside() -> None:
    model, x = vectors({"affine": False})
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), KFAC)

    def step() -> None:
        model(x)
        nn.init.zeros_(model[0].weight)  # type: ignore[index]

    with pytest.raises(ValueError, match="Parameters were written to inside `listen`"), estimator.listen((x, Y)):
        step()
    assert estimator.updates == 0


def test_a_model_that_does_something_else_when_it_is_run_once_more() -> None:
    class Counts(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.calls * super().forward(x)

    model, x = vectors({"affine": False})
    model = Counts(*model)  # type: ignore[misc]
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), KFAC)
    with pytest.raises(UnsupportedError, match=r"runs the model once more.*differs"), estimator.listen((x, Y)):
        model(x)
    assert estimator.updates == 0


def test_a_batch_norm_with_a_forward_of_its_own_mixes_examples() -> None:
    class Activated(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    model, x = vectors({"affine": False})
    model[1] = Activated(5, affine=False).double()  # type: ignore[operator]
    for listening in (False, True):
        with pytest.raises(UnsupportedError, match=r"layer '0' .*mixes examples"):
            estimate(model, (x, Y), listening, KFAC, Exact())


def test_statistics_are_constants_too_where_nothing_is_checked() -> None:
    model, x = vectors({"affine": False})
    twin = at_statistics(model, x, vectors, {"affine": False})
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(x, Y)], check=False)
    theirs = curvature(EmpiricalRisk(twin, nn.CrossEntropyLoss(), [(x, Y)]), EKFAC, vectors=Exact())
    close(curvature(risk, EKFAC, vectors=Exact()).to_dense(), theirs.to_dense())
