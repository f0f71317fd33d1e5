"""Checks of loss, gradient and the matrix-free operators, and of blocks against these and their
definitions.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    TNT,
    CurvaturePropagation,
    DiagonalBlock,
    Exact,
    FullBlock,
    GGNFactor,
    Hessian,
    Jacobian,
    MonteCarlo,
    curvature,
)
from test.fuzz.checks import VECTORS, Subject, check, holds, require
from test.fuzz.pieces import Options
from test.fuzz.truth import of_example
from test.helpers import DEVICE


def draw_vectors(r: Random) -> Options:
    """One of the modes whose matrix is known exactly."""
    return {"vectors": r.choice(["exact", "exact", "empirical", "terms"])}


@check("loss and gradient", often=None)
def _loss_and_gradient(s: Subject, o: Options) -> None:
    gradient, loss = s.risk().gradient_and_loss()
    s.equal("loss", loss, s.truth.loss)
    s.equal("loss by itself", s.risk().loss(), s.truth.loss)
    scale = max(float(s.truth.gradient.norm()), 10 * s.truth.rounding / s.tolerance)
    s.equal(
        "gradient",
        torch.cat([g.flatten() for g in gradient.values()]),
        s.truth.gradient,
        scale=scale,
    )
    holds("keys of the gradient", list(gradient) == list(s.case.keyed), f"{list(gradient)}")


@check("GGN", draw_vectors, often=None)
def _ggn(s: Subject, o: Options) -> None:
    require(s.known or o["vectors"] == "exact")
    G, V = GGN(s.risk(), VECTORS[o["vectors"]]), s.normal(s.case.size, 2)
    expected = s.truth.matrix(o["vectors"])
    s.equal(
        f"GGN({o['vectors']}) @ V", G @ V, expected @ V.double(), scale=s.truth.size(o["vectors"])
    )


@check("GGN, dense", draw_vectors, 2)
def _ggn_dense(s: Subject, o: Options) -> None:
    require(s.known or o["vectors"] == "exact")
    dense, scale = GGN(s.risk(), VECTORS[o["vectors"]]).to_dense(), s.truth.size(o["vectors"])
    s.equal(f"GGN({o['vectors']}).to_dense()", dense, s.truth.matrix(o["vectors"]), scale=scale)


@check("Hessian", lambda r: {"dense": r.random() < 0.3}, 3)
def _hessian(s: Subject, o: Options) -> None:
    V = s.normal(s.case.size, 2, what="Hessian")
    H = Hessian(s.risk())
    expected = s.truth.hessian_product(V.double())
    s.equal("Hessian @ V", H @ V, expected)
    if o["dense"]:
        dense = H.to_dense()
        s.equal("Hessian.to_dense()", dense @ V, expected)
        s.equal("Hessian is symmetric", dense, dense.T)


@check("Jacobian", often=2)
def _jacobian(s: Subject, o: Options) -> None:
    require(s.case.about["num_data"] is None)
    require(not s.case.about["longer"])
    J, expected = Jacobian(s.risk()), s.truth.jacobian
    V, U = s.normal(s.case.size, 2, what="J"), s.normal(len(expected), 2, what="JT")
    s.equal("J @ V", J @ V, expected @ V.double())
    s.equal("J.T @ U", J.T @ U, expected.T @ U.double())
    s.equal("J.to_dense()", J.to_dense(), expected)


@check("GGNFactor", draw_vectors, 2)
def _factor(s: Subject, o: Options) -> None:
    require(s.known)
    B, G = GGNFactor(s.risk(), VECTORS[o["vectors"]]), s.truth.matrix(o["vectors"])
    dense = B.to_dense().double()
    s.equal(f"B Bᵀ of GGNFactor({o['vectors']})", dense @ dense.T, G)
    v = s.normal(s.case.size, what="factor")
    s.equal("‖Bᵀ v‖²", (B.T @ v).double().square().sum(), v.double() @ G @ v.double())
    u = s.normal(B.shape[1], what="B")
    s.equal("B @ u", B @ u, dense @ u.double())


# ------------------------------------------------------------------------------------------- blocks
def draw_blocks(r: Random) -> Options:
    """Vectors, joint or separate, expand or reduce."""
    return {**draw_vectors(r), "separate": r.random() < 0.35, "reduce": r.random() < 0.35}


def options_of(o: Options) -> dict[str, Any]:
    return {"vectors": VECTORS[o["vectors"]], "separate_weight_and_bias": o["separate"]}


def approximation(kind: Any, o: Options) -> Any:
    return kind.using(kfac_approx="reduce") if o["reduce"] else kind


@check(
    "exact blocks", lambda r: {**draw_blocks(r), "kind": r.choice(["full", "diagonal"])}, often=None
)
def _exact_blocks(s: Subject, o: Options) -> None:
    expected = s.truth.only_blocks(s.truth.matrix(o["vectors"]), o["separate"])
    kind = FullBlock if o["kind"] == "full" else DiagonalBlock
    expected = expected if o["kind"] == "full" else expected.diagonal().diag()
    dense = s.curvature(kind, **options_of(o)).to_dense()
    s.equal(
        f"{kind.__name__} is the exact block ({o['vectors']})",
        dense,
        expected,
        scale=s.truth.size(o["vectors"]),
    )


@check("EKFAC's trace", draw_blocks, often=None)
def _trace(s: Subject, o: Options) -> None:
    K = s.curvature(approximation(EKFAC, o), **options_of(o))
    expected = s.truth.matrix(o["vectors"]).trace()
    s.equal(f"trace of EKFAC ({o['vectors']})", K.trace, expected, scale=s.truth.size(o["vectors"]))


def block_of(s: Subject, dense: Tensor, at: Tensor) -> Tensor:
    return dense[at[:, None], at].double()


def plan_of(K: Any) -> dict[tuple[str, ...], str]:
    """The approximation of each block, by the keys of its parameters."""
    return {
        tuple(sorted(g.keys)): repr(entry.approximation)
        for entry in K.plan
        for g in entry.layer.groups
    }


@check("KFAC by definition", draw_blocks, 4)
def _kfac(s: Subject, o: Options) -> None:
    K = s.curvature(approximation(KFAC, o), **options_of(o))
    dense, planned = K.to_dense(), plan_of(K)
    for keys in s.truth.blocks(o["separate"]):
        expected = s.truth.kfac_block(keys, o["vectors"], o["reduce"])
        if expected is None:
            continue
        at = s.truth.places(keys)
        got = block_of(s, dense, at)
        if planned[tuple(sorted(keys))] == "DiagonalBlock":  # seen by a module around the layer
            exact = block_of(s, s.truth.matrix(o["vectors"]), at)
            s.equal(f"diagonal of {keys}", got, exact.diagonal().diag())
        else:
            s.equal(f"KFAC block of {keys}", got, expected)


@check("EKFAC by definition", draw_blocks, 3)
def _ekfac(s: Subject, o: Options) -> None:
    require(s.double)
    K = s.curvature(approximation(EKFAC, o), **options_of(o))
    names = {tuple(sorted(g.keys)): g.name for entry in K.plan for g in entry.layer.groups}
    exact = s.truth.matrix(o["vectors"])
    for keys in s.truth.blocks(o["separate"]):
        at = s.truth.places(keys)
        E = block_of(s, exact, at)
        name = names.get(tuple(sorted(keys)))
        holds("blocks by module", name is not None, f"{keys} are no block: {list(names)}")
        assert name is not None
        got, of_block = block_of(s, K.to_dense(), at), K.blocks[name]
        basis = getattr(of_block, "basis", None)
        if basis is None:
            s.equal(f"diagonal of {keys}", got, E.diagonal().diag())
            continue
        columns = basis.to_dense()
        zeros = {
            other: torch.zeros_like(part) for other, part in K.split(s.normal(s.case.size)).items()
        }
        Q = torch.stack([K.merge({**zeros, name: q.view_as(zeros[name])}) for q in columns.T], 1)[
            at
        ]
        s.equal(f"basis of {keys} is orthogonal", Q.T @ Q, torch.eye(len(Q), device=DEVICE))
        s.equal(f"EKFAC block of {keys}", got, Q @ (Q.T @ E @ Q).diagonal().diag() @ Q.T)
        factored = s.truth.kfac_block(keys, o["vectors"], o["reduce"])
        if factored is None:
            continue
        rotated = Q.T @ factored @ Q
        s.equal(
            f"eigenvectors of {keys}",
            rotated,
            rotated.diagonal().diag(),
            10,
            float(factored.norm()),
        )


RANDOM = {
    "mc": MonteCarlo(samples=2, seed=3),
    "signs": Exact(signs=True, seed=5),
    "propagation": CurvaturePropagation(samples=2, seed=7),
}


@check(
    "random vectors", lambda r: {"vectors": r.choice([*RANDOM]), "reduce": r.random() < 0.3}, 1.5
)
def _random_vectors(s: Subject, o: Options) -> None:
    """Draws follow the examples: neither the batches nor the operator matter."""
    vectors = RANDOM[o["vectors"]]
    full = s.curvature(FullBlock, vectors=vectors)
    s.equal(
        "the same draws for EKFAC",
        s.curvature(approximation(EKFAC, o), vectors=vectors).trace,
        full.trace,
    )
    diagonal = s.curvature(DiagonalBlock, vectors=vectors)
    s.equal("the same draws for DiagonalBlock", diagonal.diagonal(), full.diagonal())
    if all(len(e.terms[0]) == 1 for e in s.truth.examples) and not s.case.several:
        dense = GGN(s.risk(), vectors).to_dense()
        s.equal(
            "the same draws for GGN", s.truth.only_blocks(dense.double(), False), full.to_dense()
        )


def single(data: list[Any]) -> list[Any]:
    """The same examples, one at a time."""
    found = []
    for x, y in data:
        for n in range(len(x)):
            part = partial(of_example, n=n, N=len(x))
            one = {k: part(t) for k, t in y.items()} if isinstance(y, dict) else None
            one = one or (tuple(part(t) for t in y) if isinstance(y, tuple) else part(y))
            found.append((x[n : n + 1], one))
    return found


KINDS = {"KFAC": KFAC, "TNT": TNT, "full": FullBlock, "ekfac": EKFAC}


@check("batches don't matter", lambda r: {"kind": r.choice([*KINDS]), "mc": r.random() < 0.6}, 2)
def _batches(s: Subject, o: Options) -> None:
    kind = KINDS[o["kind"]]
    vectors = RANDOM["mc"] if o["mc"] else Exact()
    one = s.curvature(kind, vectors=vectors)
    other = curvature(s.risk(single(s.case.data)), kind, vectors=vectors)
    require(
        plan_of(one) == plan_of(other)
    )  # all rows of one example are its own, also those of a table
    if kind is EKFAC:
        s.equal("one example at a time, trace of EKFAC", other.trace, one.trace)
    else:
        s.equal(f"one example at a time, {o['kind']}", other.to_dense(), one.to_dense(), 10)
