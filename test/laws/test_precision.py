"""The main laws in float32, half precision, under autocast and on every device."""

from __future__ import annotations

import pytest
import torch

from curvlinops_plus import (
    Empirical,
    GGNLinearOperator,
    HessianLinearOperator,
)
from test.cases import APPROXIMATIONS, NETS, Problem, close, problem, unchanged

HALF = [torch.bfloat16, torch.float16]
SOME = [
    "mlp",
    "in-place relu",
    "strided cnn",
    "attention",
    "called twice",
    "tied",
    "generic layers",
    "language model",
]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_laws_on_every_device_and_in_single_precision(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "cpu" and dtype == torch.float64:
        pytest.skip("in test_laws.py")
    p = problem(name)
    q, rtol = p.to(device, dtype), TOLERANCE[dtype]
    exact, risk = p.exact.only_blocks(p.exact.ggn(), False), q.risk()
    for approximation, expected in (
        ("KFAC", p.exact.kfac(p.exact.exact())),
        ("DiagonalBlock", exact.diagonal().diag()),
        ("FullBlock", exact),
    ):
        K = q.curvature(APPROXIMATIONS[approximation], risk=risk)
        assert K.to_dense().dtype == dtype
        assert K.to_dense().device.type == device.type
        close(K.to_dense(), expected, rtol, approximation)
    E = q.curvature(APPROXIMATIONS["EKFAC"], risk=risk)
    close(E.trace, exact.trace(), rtol, "trace of EKFAC")
    for kind, expected in (
        (GGNLinearOperator, p.exact.ggn()),
        (HessianLinearOperator, p.exact.hessian()),
    ):
        A = kind(q.model, q.loss, q.params, q.data, **q.net.options)
        close(A.to_dense(), expected, rtol, kind.__name__)


def check_empirical(p: Problem, q: Problem, dtype: torch.dtype) -> None:
    """Of `q` in another precision: single-precision operators, near to what `p` is exactly."""
    exact = p.exact.only_blocks(p.exact.empirical_fisher(per_term=False), False)
    expected = {
        "KFAC": p.exact.kfac(p.exact.empirical(per_term=False)),
        "DiagonalBlock": exact.diagonal().diag(),
        "FullBlock": exact,
    }
    for approximation, matrix in expected.items():
        K = q.curvature(APPROXIMATIONS[approximation], vectors=Empirical())
        assert {K.dtype, K.to_dense().dtype, (K @ torch.ones(K.shape[1], dtype=dtype)).dtype} == {
            torch.float32
        }
        close(K.to_dense(), matrix, 3 * TOLERANCE[dtype], approximation)
    E = q.curvature(APPROXIMATIONS["EKFAC"], vectors=Empirical())
    close(E.trace, exact.trace(), TOLERANCE[dtype], "trace of EKFAC")


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_models_accumulate_in_single_precision(
    name: str, dtype: torch.dtype
) -> None:
    p = problem(name)
    check_empirical(p, p.to(torch.device("cpu"), dtype), dtype)


@pytest.mark.parametrize(
    "name", ["mlp", "in-place relu", "strided cnn", "attention", "generic layers"]
)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    p = problem(name)
    q = p.to(torch.device("cpu"), torch.float32)
    with unchanged(q.model, q.data), torch.autocast("cpu", dtype=dtype):
        check_empirical(p, q, dtype)
