"""Checks of what is recorded in the user's own pass, with dropout on: the matrix of the network
with the same masks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus import (
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    KFACOptimizer,
)
from test.fuzz.checks import Subject, check, require
from test.fuzz.losses import mean_divisor, value
from test.fuzz.pieces import Options
from test.fuzz.truth import of_example
from test.helpers import DEVICE

KINDS = {"full": FullBlock, "diagonal": DiagonalBlock}


@contextmanager
def dropout_on(model: nn.Module) -> Iterator[None]:
    """Context in which dropout is in training mode with known random numbers, and nothing else
    is.
    """
    modules = [m for m in model.modules() if m is model or isinstance(m, nn.Dropout)]
    before = [m.training for m in modules]
    with torch.random.fork_rng(devices=[0] if DEVICE.type == "cuda" else []):
        torch.manual_seed(7)
        for module in modules:
            module.training = True
        try:
            yield
        finally:
            for module, mode in zip(modules, before, strict=True):
                module.training = mode


def _expected(s: Subject) -> Tensor:
    """`c Σ g gᵀ` of the first batch, from one pass of it all."""
    truth, o = s.truth, s.case.about["losses"][0]
    x, y = s.case.data[0]
    loss, matrix = truth.losses[0], torch.zeros(s.case.size, s.case.size).double()
    with dropout_on(truth.model):
        (f,) = s.case.outputs(truth.model(x.double() if x.is_floating_point() else x))
    y = y.double() if y.is_floating_point() else y
    for n in range(len(x)):
        of_loss = value(o, loss, of_example(f, n, len(x)), of_example(y, n, len(x)))
        options: Any = {"retain_graph": True, "allow_unused": True}
        g = truth.flat(torch.autograd.grad(of_loss, truth.leaves, **options))
        matrix = matrix.to(g.device) + torch.outer(g, g)
    if o["reduction"] == "sum":
        return matrix
    return matrix / mean_divisor(o, loss, tuple(f.shape), y)


@check(
    "training",
    lambda r: {"way": r.choice(["listen", "optimizer"]), "kind": r.choice([*KINDS])},
    2,
)
def _training(s: Subject, o: Options) -> None:
    case = s.case
    require(s.known and s.double and not case.several and case.about["num_data"] is None)
    require(o["way"] == "listen" or case.about["losses"][0]["kind"] != "gaussian")
    expected = s.truth.only_blocks(_expected(s), False)
    require(bool(expected.isfinite().all()))  # else no term counts
    model = copy.deepcopy(case.model).requires_grad_()
    params = [model.get_parameter(name) for name in s.truth.names.values()]
    (batch,) = list(case.shown(case.data[:1]))
    options: Any = {"vectors": Empirical()}
    if o["way"] == "listen":
        risk = EmpiricalRisk(model, case.loss, (), params, **case.options)
        estimator = CurvatureEstimator(risk, KINDS[o["kind"]], **options)
    else:
        options |= {"params": params, "approximation": KINDS[o["kind"]], **case.options}
        optimizer = KFACOptimizer(model, case.loss, **options)
        estimator = optimizer.curvature
    for _ in range(2):  # in the first batch functions that read parameters are looked for
        estimator.reset()
        with dropout_on(model):
            if o["way"] == "listen":
                with estimator.listen(batch):
                    model(batch[0])
            else:
                (f,) = case.outputs(model(batch[0]))
                case.loss(f, batch[1]).backward()
    require(not estimator.withdrawn)
    expected = expected if o["kind"] == "full" else expected.diagonal().diag()
    K = estimator.operator
    # Experts that the batch did not visit are left out, and have no curvature.
    sizes = torch.tensor([p.numel() for p in params])
    is_there = torch.tensor([name in K.in_space.shapes for name in s.truth.names.values()])
    is_kept = is_there.repeat_interleave(sizes).to(expected.device)
    s.equal(f"{o['way']}, left out", expected[~is_kept], torch.zeros_like(expected[~is_kept]))
    expected = expected[is_kept][:, is_kept]
    got = K.to_dense()
    s.equal(f"{o['way']} in training", got, expected, scale=max(float(expected.norm()), 1e-3))
