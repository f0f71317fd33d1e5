"""Checks of the closed forms of block-diagonal operators against dense algebra, of states, and of
running estimates.
"""

from __future__ import annotations

import copy
import io
from random import Random
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    DiagonalBlock,
    FullBlock,
    RelativeDamping,
)
from test.fuzz.checks import VECTORS, Subject, check, holds, require
from test.fuzz.matrix_checks import RANDOM, plan_of
from test.fuzz.pieces import Options
from test.helpers import DEVICE

KINDS = {"KFAC": KFAC, "EKFAC": EKFAC, "full": FullBlock, "diagonal": DiagonalBlock, "TNT": TNT}


def draw_operator(r: Random) -> Options:
    """An approximation, vectors, and a multiple."""
    return {
        "kind": r.choice([*KINDS]),
        "vectors": r.choice([*VECTORS, *RANDOM]),
        "separate": r.random() < 0.35,
        "times": r.choice([1.0, 1.0, 0.5]),
    }


def operator(s: Subject, o: Options) -> Any:
    K = s.curvature(KINDS[o["kind"]], vectors=vectors_of(o), separate_weight_and_bias=o["separate"])
    return K if o["times"] == 1 else o["times"] * K


def vectors_of(o: Options) -> Any:
    return {**VECTORS, **RANDOM}[o["vectors"]]


def damping_of(dense: Tensor) -> float:
    """About the mean eigenvalue."""
    return 0.1 + float(dense.trace()) / len(dense)


@check("numbers of a matrix", draw_operator, 3)
def _numbers(s: Subject, o: Options) -> None:
    K = operator(s, o)
    dense = K.to_dense().double()
    scale = float(dense.norm())
    v = s.normal(s.case.size, 2, what="numbers")
    s.equal("symmetric", dense, dense.T)
    s.equal("K @ V", K @ v, dense @ v.double())
    s.equal("V.T @ K", v.T @ K, v.double().T @ dense)
    s.equal("trace", K.trace, dense.trace())
    s.equal("frobenius_norm", K.frobenius_norm, dense.norm())
    s.equal("diagonal", K.diagonal(), dense.diagonal(), scale=scale)
    values = torch.linalg.eigvalsh((dense + dense.T) / 2)
    s.equal("eigenvalues", K.eigenvalues().double().sort().values, values, scale=max(scale, 1e-2))
    J = s.normal(3, s.case.size, what="J")
    s.equal("quadratic_form", K.quadratic_form(J), J.double() @ dense @ J.double().T)
    least = float(values.min())
    holds(
        "positive semi-definite", least >= -s.tolerance * (scale + 1e-6), f"eigenvalue {least:.3g}"
    )


@check("inverse", lambda r: {**draw_operator(r), "rule": r.random() < 0.3}, 3)
def _inverse(s: Subject, o: Options) -> None:
    K = operator(s, o)
    dense = K.to_dense().double()
    eye = torch.eye(len(dense), dtype=torch.float64, device=DEVICE)
    damping = damping_of(dense)
    v = s.normal(s.case.size, 2, what="inverse")
    inverse = K.inverse(damping)
    expected = torch.linalg.inv(dense + damping * eye)
    s.equal("inverse(damping) @ V", inverse @ v, expected @ v.double(), 10)
    s.equal("logdet of the inverse", inverse.logdet, expected.logdet(), 10)
    s.equal("trace of the inverse", inverse.trace, expected.trace(), 10)
    s.equal("logdet of the shifted", K.shift(damping).logdet, -expected.logdet(), 10)
    root = K.power(0.5, damping)
    s.equal(
        "power(1/2, damping), squared", root @ (root @ v), (dense + damping * eye) @ v.double(), 10
    )
    if o["rule"] and all(float(block.trace) > 1e-6 for block in K.blocks.values()):
        relative = K.inverse(RelativeDamping(0.3))
        by_block = {
            name: 0.3 * float(block.trace) / block.shape[0] for name, block in K.blocks.items()
        }
        s.equal("RelativeDamping", relative @ v, K.inverse(by_block) @ v, 10)


@check("states", draw_operator, 2)
def _states(s: Subject, o: Options) -> None:
    K = operator(s, o)
    file = io.BytesIO()
    torch.save(K.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    loss = {} if not s.case.several else {"loss": s.case.loss}
    reading = {key: value for key, value in s.case.options.items() if key != "num_data"}
    again = BlockwiseLinearOperator.from_state_dict(
        state, s.case.model, None, s.case.params, **loss, **reading
    )
    s.equal("from_state_dict", again.to_dense(), K.to_dense(), 1e-3)
    fresh = copy.copy(operator(s, {**o, "times": 1.0}))
    fresh.load_state_dict(state)
    s.equal("load_state_dict", fresh.diagonal(), K.diagonal(), 1e-3)
    damping = damping_of(K.to_dense())
    v = s.normal(s.case.size, what="state")
    s.equal("inverse from a state", again.inverse(damping) @ v, K.inverse(damping) @ v, 1e-2)


# ------------------------------------------------------------------------------------- running sums
@check(
    "estimator",
    lambda r: {**draw_operator(r), "listen": r.random() < 0.4, "decay": r.choice([1.0, 1.0, 0.5])},
    2.5,
)
def _estimator(s: Subject, o: Options) -> None:
    """Updates add up to the curvature of all data; with decay they are a weighted mean."""
    require(s.known and s.case.about["num_data"] is None and o["vectors"] not in RANDOM)
    exact = o["kind"] in ("full", "diagonal")
    kind = KINDS[o["kind"]]
    options = {"vectors": vectors_of(o), "separate_weight_and_bias": o["separate"]}
    decay = o["decay"] if not s.case.several else 1.0
    estimator = _run(s, kind, options, decay, s.case.data, o["listen"])
    got = estimator.operator
    if decay == 1:
        whole = s.curvature(kind, **options)
        if o["kind"] == "EKFAC":
            s.equal("trace of the estimator's EKFAC", got.trace, whole.trace)
        elif exact or plan_of(got) == plan_of(whole):  # one example at a time tells no axes
            s.equal(f"estimator and curvature, {o['kind']}", got.to_dense(), whole.to_dense(), 10)
        if exact:
            expected = s.truth.only_blocks(s.truth.matrix(o["vectors"]), o["separate"])
            expected = expected if o["kind"] == "full" else expected.diagonal().diag()
            s.equal("estimator's exact blocks", got.to_dense(), expected)
    elif exact and s.case.about["losses"][0]["reduction"] == "mean":
        expected = s.truth.only_blocks(s.truth.decayed(o["vectors"], decay), o["separate"])
        expected = expected if o["kind"] == "full" else expected.diagonal().diag()
        s.equal("moving average of exact blocks", got.to_dense(), expected)
    estimator.refresh(0.5)
    v = s.normal(s.case.size, what="estimator")
    dense = estimator.operator.to_dense().double() + 0.5 * torch.eye(
        s.case.size, dtype=torch.float64, device=DEVICE
    )
    s.equal(
        "estimator's inverse", estimator.inverse() @ v, torch.linalg.solve(dense, v.double()), 10
    )
    again = CurvatureEstimator(s.risk(()), kind, decay=decay, **options)
    again.load_state_dict(estimator.state_dict())
    s.equal("estimator's state", again.operator.to_dense(), estimator.operator.to_dense(), 1e-2)
    s.equal("estimator's state, inverse", again.inverse() @ v, estimator.inverse() @ v, 1)


def _run(
    s: Subject, kind: Any, options: dict[str, Any], decay: float, data: Any, listen: bool
) -> CurvatureEstimator:
    estimator = CurvatureEstimator(s.risk(()), kind, decay=decay, **options)
    for batch in s.case.shown(data):
        if listen:
            with estimator.listen(batch):
                s.case.model(batch[0])
        else:
            estimator.update(batch)
    return estimator


@check("merged estimators", lambda r: {**draw_operator(r)}, 1.5)
def _merge(s: Subject, o: Options) -> None:
    require(s.known and s.case.about["num_data"] is None and len(s.case.data) > 1)
    require(o["vectors"] not in RANDOM and o["kind"] != "EKFAC")
    options = {"vectors": vectors_of(o), "separate_weight_and_bias": o["separate"]}
    kind = KINDS[o["kind"]]
    one, two, whole = (
        _run(s, kind, options, 1.0, data, False)
        for data in (s.case.data[:1], s.case.data[1:], s.case.data)
    )
    one.merge(two)
    s.equal("merged estimators", one.operator.to_dense(), whole.operator.to_dense(), 1)
    holds(
        "examples of merged estimators",
        one.examples == whole.examples,
        f"{one.examples}, {whole.examples}",
    )
