"""Checks of loss, gradient and the matrix-free operators."""

from __future__ import annotations

from random import Random

import torch

from curvlinops_plus import (
    GGN,
    GGNFactor,
    Hessian,
    Jacobian,
)

from .checks import VECTORS, Subject, check
from .compare import holds, require
from .pieces import Options


def draw_vectors(r: Random) -> Options:
    """One of the modes whose matrix is known exactly."""
    return {"vectors": r.choice(["exact", "exact", "empirical", "terms"])}


@check("loss and gradient", often=None)
def _loss_and_gradient(s: Subject, o: Options) -> None:
    gradient, loss = s.risk().gradient_and_loss()
    s.equal("loss", loss, s.truth.loss)
    s.equal("loss by itself", s.risk().loss(), s.truth.loss)
    scale = max(float(s.truth.gradient.norm()), 10 * s.truth.rounding / s.tolerance)
    s.equal("gradient", torch.cat([g.flatten() for g in gradient.values()]), s.truth.gradient, scale=scale)
    holds("keys of the gradient", list(gradient) == list(s.case.keyed), f"{list(gradient)}")


@check("GGN", draw_vectors, often=None)
def _ggn(s: Subject, o: Options) -> None:
    require(s.known or o["vectors"] == "exact")
    G, V = GGN(s.risk(), VECTORS[o["vectors"]]), s.normal(s.case.size, 2)
    expected = s.truth.matrix(o["vectors"])
    s.equal(f"GGN({o['vectors']}) @ V", G @ V, expected @ V.double(), scale=s.truth.size(o["vectors"]))


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
