"""Hostile networks: what is computed equals plain autodiff of whole batches, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlinops_plus import (
    EKFAC,
    GGN,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    Hessian,
    Jacobian,
    curvature,
)
from test.fuzz import hostile_field  # noqa: F401 (it registers its networks)
from test.fuzz.checks import Failure, equal
from test.fuzz.hostile_networks import HOSTILE, NO_ANSWER
from test.fuzz.run import is_refusal
from test.twin import jacobian

WRONG, ERROR, RIGHT, REFUSED = "WRONG", "ERROR", "right", "refused"
#: What a training loop is told instead of being stopped.
WARNED = (
    "are batch norm in training mode: the examples of a batch depend on each other",
    "are taken as they are, without preconditioner",
)
SIZES = ([3, 1, 2], [1], [2, 2], [1, 3])


class Whole:
    """Matrices of a network by autodiff of whole batches, in which examples may influence one
    another.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module, data: list[tuple[Tensor, Tensor]]
    ) -> None:
        params = list(model.parameters())
        self.sizes = [p.numel() for p in params]
        with sdpa_kernel(SDPBackend.MATH):
            n = sum(y.numel() for _, y in data)
            outputs = [model(x.clone()) for x, _ in data]
            self.loss, H = torch.zeros(()).double(), []
            for f, (_, y) in zip(outputs, data, strict=True):
                self.loss = self.loss + loss(f, y) * y.numel() / n
                g = f.detach().requires_grad_()
                value = loss(g, y) * y.numel() / n
                H.append(jacobian(*torch.autograd.grad(value, g, create_graph=True), [g]))
            options: Any = {"create_graph": True, "materialize_grads": True}
            grads = torch.autograd.grad(self.loss, params, **options)
            gradient = torch.cat([g.flatten() for g in grads])
            self.gradient, self.hessian = (
                gradient.detach(),
                jacobian(gradient, params, at_once=False),
            )
            J = [jacobian(f, params, at_once=False) for f in outputs]
        self.J = torch.cat(J)
        self.ggn = self.J.T @ torch.block_diag(*H) @ self.J

    def by_parameter(self, matrix: Tensor) -> Tensor:
        """A matrix with a block for each parameter."""
        return matrix * torch.block_diag(*(torch.ones(n, n).double() for n in self.sizes))


def _estimated(risk: EmpiricalRisk) -> Tensor:
    estimator = CurvatureEstimator(risk.with_data(()), FullBlock, separate_weight_and_bias=True)
    for batch in risk.data:
        estimator.update(batch)
    return estimator.operator.to_dense()


#: Name to what is computed, and what it should be.
LAWS: dict[str, tuple[Callable[[EmpiricalRisk], Any], Callable[[Whole], Any]]] = {
    "loss": (lambda risk: risk.loss(), lambda t: t.loss),
    "gradient": (
        lambda risk: torch.cat([g.flatten() for g in risk.gradient().values()]),
        lambda t: t.gradient,
    ),
    "Jacobian": (lambda risk: Jacobian(risk).to_dense(), lambda t: t.J),
    "GGN": (lambda risk: GGN(risk).to_dense(), lambda t: t.ggn),
    "GGN product": (lambda risk: GGN(risk) @ torch.eye(risk.space.dim).double(), lambda t: t.ggn),
    "Hessian": (lambda risk: Hessian(risk).to_dense(), lambda t: t.hessian),
    "full blocks": (
        lambda risk: curvature(risk, FullBlock, separate_weight_and_bias=True).to_dense(),
        lambda t: t.by_parameter(t.ggn),
    ),
    "diagonal": (
        lambda risk: curvature(risk, DiagonalBlock).diagonal(),
        lambda t: t.ggn.diagonal(),
    ),
    "EKFAC trace": (lambda risk: curvature(risk, EKFAC).trace, lambda t: t.ggn.trace()),
    "estimator": (_estimated, lambda t: t.by_parameter(t.ggn)),
}


#: What must be refused where the network has no answer; the others are those of one call.
_REPEATED = ("full blocks", "diagonal", "EKFAC trace")


def build(name: str) -> nn.Module:
    """A hostile network, always with the same parameters."""
    torch.manual_seed(0)
    model = HOSTILE[name][0]().double()
    model = model if name.endswith("training mode") else model.eval()
    generator = Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def verdicts(name: str, sizes: list[int], self_check: bool = True) -> dict[str, tuple[str, str]]:
    """For each law, whether it holds on one network, is refused or broken; and the numbers or the
    message.
    """
    loss, generator = nn.CrossEntropyLoss(), Generator().manual_seed(2)
    found: dict[str, tuple[str, str]] = {}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        X = [
            torch.randn(n, *HOSTILE[name][1], generator=generator, dtype=torch.float64)
            for n in sizes
        ]
        try:
            shapes = [build(name)(x.clone()).shape for x in X]
        except ValueError as error:  # a norm of one number
            return {"network": (REFUSED, f"the network itself: {error}")}
        Y = [torch.randint(3, (shape[0], *shape[2:]), generator=generator) for shape in shapes]
        truth = Whole(build(name), loss, list(zip(X, Y, strict=True)))
        for law in _REPEATED if name in NO_ANSWER else LAWS:
            if (name, law) == ("old weight norm", "Hessian"):
                continue  # the second derivative of PyTorch's own is wrong
            data = [(x.clone(), y.clone()) for x, y in zip(X, Y, strict=True)]
            risk = partial(EmpiricalRisk, build(name), loss, data, check=self_check)
            found[law] = _verdict(law, risk, None if name in NO_ANSWER else truth)
            if not all(torch.equal(x, mine) for x, (mine, _) in zip(X, data, strict=True)):
                found[law] = WRONG, "the data are not what they were"
    return found


def _verdict(law: str, risk: Callable[[], EmpiricalRisk], truth: Whole | None) -> tuple[str, str]:
    compute, expect = LAWS[law]
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got = compute(risk())
        if truth is None:
            return WRONG, "numbers that change with every call"
        messages = [str(warning.message) for warning in said]
        if told := [message for message in messages if any(words in message for words in WARNED)]:
            return REFUSED, told[0]
        equal(law, got, expect(truth), 1e-7)
    except Failure as failure:
        return WRONG, failure.numbers
    except Exception as error:
        return (
            REFUSED if is_refusal(error) else ERROR
        ), f"{type(error).__name__}: {' '.join(str(error).split())}"
    return RIGHT, ""


def wrong(found: dict[str, tuple[str, str]]) -> dict[str, str]:
    """The laws that are neither right nor refused, and why."""
    return {law: f"{kind}: {why}" for law, (kind, why) in found.items() if kind in (WRONG, ERROR)}


def main() -> int:
    """Print a line for each network; the exit status says whether something is wrong."""
    failed = 0
    for name in HOSTILE:
        for sizes in SIZES:
            found = verdicts(name, sizes)
            bad, refused = (
                wrong(found),
                [law for law, (kind, _) in found.items() if kind == REFUSED],
            )
            failed += bool(bad)
            summary = (
                f"WRONG: {', '.join(bad)}"
                if bad
                else f"refused: {', '.join(refused)}"
                if refused
                else RIGHT
            )
            print(f"{name}, batches of {sizes}: {summary}", flush=True)
            for law, why in bad.items():
                print(f"    {law}: {why[:300]}")
            if refused:
                print(f"    {found[refused[0]][1][:300]}")
    return int(failed > 0)
