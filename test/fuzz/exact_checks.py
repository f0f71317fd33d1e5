"""Checks of loss, gradient and the matrix-free operators."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlinops_plus import (
    GGN,
    ActivationHessian,
    CGInverseLinearOperator,
    EFLinearOperator,
    GGNDiagonalLinearOperator,
    GGNFactor,
    GGNLinearOperator,
    Hessian,
    HessianLinearOperator,
    Jacobian,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    MonteCarlo,
)

from .checks import VECTORS, Subject, check
from .compare import holds, require
from .losses import value
from .pieces import Options
from .truth import second_derivatives


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


@check("forms of vectors", lambda r: {"form": r.choice(["list", "dict", "numpy", "left", "columns"])}, 1.5)
def _forms(s: Subject, o: Options) -> None:
    G, truth = GGN(s.risk()), s.truth.matrix()
    v = s.normal(s.case.size, what="forms")
    expected, sizes = truth @ v.double(), s.truth.sizes
    parts = {key: t.view(p.shape) for t, (key, p) in zip(v.split(sizes), s.case.keyed.items(), strict=True)}
    columns = {key: torch.stack([t, 2 * t], -1) for key, t in parts.items()}
    got = {
        "list": lambda: torch.cat([t.flatten() for t in G @ list(parts.values())]),
        "dict": lambda: torch.cat([t.flatten() for t in (G @ parts).values()]),
        "numpy": lambda: torch.as_tensor(G @ v.numpy()),
        "left": lambda: v @ G,
        "columns": lambda: torch.cat([t.reshape(-1, 2) for t in (G @ columns).values()]),
    }[o["form"]]()
    expected = torch.stack([expected, 2 * expected], 1) if o["form"] == "columns" else expected
    s.equal(f"GGN @ v as {o['form']}", got, expected)


@check("algebra of operators", often=1)
def _algebra(s: Subject, o: Options) -> None:
    G, H, v = GGN(s.risk()), Hessian(s.risk()), s.normal(s.case.size, what="algebra")
    g, wide = s.truth.matrix(), v.double()
    h = s.truth.hessian_product(torch.stack([wide, g @ wide], 1))
    s.equal("(2 G - H / 4 + G G) @ v", (2 * G - H / 4 + G @ G) @ v, 2 * g @ wide - h[:, 0] / 4 + g @ g @ wide)
    s.equal("(H @ G) @ v", (H @ G) @ v, h[:, 1])
    s.equal("G.shift(0.3) @ v", G.shift(0.3) @ v, g @ wide + 0.3 * wide)
    s.equal("scipy's product", torch.as_tensor(G.to_scipy() @ v.numpy()), g @ wide)


@check("classic operators", often=1.5)
def _classic(s: Subject, o: Options) -> None:
    require(s.known and not s.case.several and s.case.about["num_data"] is None)
    arguments = (s.case.model, s.case.loss, s.case.params or list(s.case.keyed.values()), s.case.shown(s.case.data))
    V, more = s.normal(s.case.size, 2, what="classic"), s.case.options
    s.equal("GGNLinearOperator", GGNLinearOperator(*arguments, **more) @ V, s.truth.matrix() @ V.double())
    s.equal("HessianLinearOperator", HessianLinearOperator(*arguments, **more) @ V, s.truth.hessian_product(V.double()))
    s.equal("EFLinearOperator", EFLinearOperator(*arguments, **more) @ V, s.truth.matrix("terms") @ V.double())
    D = GGNDiagonalLinearOperator(*arguments, **more)
    s.equal("GGNDiagonalLinearOperator", D @ V, s.truth.matrix().diagonal()[:, None] * V.double())


@check("activation", lambda r: {"which": r.random(), "side": r.choice(["input", "output"])}, 1.5)
def _activation(s: Subject, o: Options) -> None:
    model = s.truth.model
    names = [name for name, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1d", "Conv2d", "Tanh")]
    once = [name for name in names if _calls(s, name) == 1]
    # At an exact zero the second derivative of PReLU is not symmetric in PyTorch.
    require(bool(once) and not any(isinstance(m, nn.PReLU) for m in model.modules()))
    name = once[int(o["which"] * len(once))]
    H = ActivationHessian(s.risk(), (name, o["side"], 0)).to_dense()  # first, as it may be refused
    s.equal(f"ActivationHessian of the {o['side']} of {name}", H, _activation_hessian(s, name, o["side"]))


def _calls(s: Subject, name: str) -> int:
    seen: list[Any] = []
    if ".layer" in name:  # it may be called with keywords
        return 0
    with s.truth.hooked(name, lambda args, out: seen.append(out)):
        s.truth.model(s.truth._wide(s.case.data[0][0]))
    shapes = {len(x) for x, _ in s.case.data}
    return len(seen) if all(t.is_floating_point() and len(t) in shapes for t in seen) else 0


def _activation_hessian(s: Subject, name: str, side: str) -> Tensor:
    """Block-diagonal over batches."""
    blocks, truth = [], s.truth
    module = truth.model.get_submodule(name)
    for x, y in s.case.data:
        leaf: list[Tensor] = []

        def replace(t: Tensor, leaf: list[Tensor] = leaf) -> Tensor:
            leaf.append(t.detach().clone().requires_grad_())
            return leaf[0].clone()

        hook = (
            module.register_forward_pre_hook(lambda m, args, f=replace: (f(args[0]), *args[1:]))
            if side == "input"
            else module.register_forward_hook(lambda m, args, out, f=replace: f(out))
        )
        try:
            with sdpa_kernel(SDPBackend.MATH):
                outputs = s.case.outputs(truth.model(truth._wide(x)))
        finally:
            hook.remove()
        total: Any = 0.0
        for a, o, loss, f, t in zip(
            truth.factors, s.case.about["losses"], truth.losses, outputs, truth._targets(y), strict=True
        ):
            total = total + a * value(o, loss, f, t)
        z = leaf[0]
        g = torch.autograd.grad(total, z, create_graph=True, allow_unused=True)[0]
        blocks.append(second_derivatives(z, g))
    return torch.block_diag(*blocks)


@check("inverse by iterations", lambda r: {"by": r.choice(["cg", "minres", "lsmr"])}, 0.8)
def _iterations(s: Subject, o: Options) -> None:
    require(s.double)
    G, v = GGN(s.risk()), s.normal(s.case.size, what="cg")
    damping = float(s.truth.matrix().trace()) / s.case.size + 0.1
    A = G.shift(damping)
    inverse = {
        "cg": lambda: CGInverseLinearOperator(A, tolerance=1e-12, max_iter=500),
        "minres": lambda: MINRESInverseLinearOperator(A, tol=1e-12, max_iter=500),
        "lsmr": lambda: LSMRInverseLinearOperator(A, atol=1e-13, btol=1e-13, conlim=0.0, maxiter=500),
    }[o["by"]]()
    dense = s.truth.matrix() + damping * torch.eye(s.case.size, dtype=torch.float64)
    s.equal(f"solved by {o['by']}", inverse @ v, torch.linalg.solve(dense, v.double()), 100)


@check("Monte Carlo is unbiased", often=0.4)
def _unbiased(s: Subject, o: Options) -> None:
    """Sixteen independent estimates of one number; their mean is within nine standard errors."""
    require(s.known)
    v = s.normal(s.case.size, what="mc")
    draws = torch.stack([v @ (GGN(s.risk(), MonteCarlo(samples=20, seed=k)) @ v) for k in range(16)]).double()
    expected = v.double() @ s.truth.matrix() @ v.double()
    error = float(draws.std()) / 4
    distance = abs(float(draws.mean() - expected))
    numbers = f"mean {float(draws.mean()):.5g} ± {error:.2g}, expected {float(expected):.5g}"
    holds("Monte-Carlo Fisher is unbiased", distance <= 9 * error + 1e-3 * abs(float(expected)) + 1e-9, numbers)
