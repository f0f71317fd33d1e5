"""Weights that several modules read: exact blocks with all cross terms, factors from every role."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    curvature,
)
from test.cases import APPROXIMATIONS, Net, Problem, close, make, problem, unchanged
from test.helpers import Written, normal

TIED = ["tied", "tied transformer", "tied in one role", "tied autoencoder", "tied with two biases"]


def kind(name: str, reduce: bool) -> Any:
    return APPROXIMATIONS[name + (" reduce" if reduce else "")]


def untied(p: Problem, use: Callable[[nn.Module], nn.Module]) -> Problem:
    """The same function with parameters of its own in one of the places."""
    model = copy.deepcopy(p.model)
    module = use(model)
    for name, q in list(module._parameters.items()):
        if q is not None:
            setattr(module, name, nn.Parameter(q.detach().clone()))
    return Problem(replace(p.net, model=model), p.loss, p.data)


# ------------------------------------------------------------------------------------------ factors


def nearest(K: Tensor, o: int, i: int) -> Tensor:
    """The Kronecker product nearest to `K [o·i, o·i]`, by a singular value decomposition of all of
    it.
    """
    R = K.view(o, i, o, i).transpose(1, 2).reshape(o * o, i * i)
    u, s, vt = torch.linalg.svd(R)
    return torch.kron((s[0] * u[:, 0]).view(o, o), vt[0].view(i, i))


@pytest.mark.parametrize("reduce", [False, True])
def test_kfac_is_the_kronecker_product_nearest_to_the_sum_over_roles(reduce: bool) -> None:
    """Each role as if it had a weight of its own, added up as whole matrices."""
    p = problem("tied")
    q = untied(p, lambda model: model.head)
    apart, at = q.curvature(kind("KFAC", reduce)).to_dense(), q.exact.places
    embedding, head = (
        apart[at([f"{n}.weight"])][:, at([f"{n}.weight"])] for n in ("embedding", "head")
    )
    total = embedding + head  # both row-major on [vocabulary, features]
    block = p.curvature(kind("KFAC", reduce)).to_dense()
    mine = p.exact.places(["embedding.weight"])
    close(block[mine[:, None], mine], nearest(total, 5, 3))
    assert (block[mine[:, None], mine] - total).norm() > 1e-3 * total.norm(), (
        "the sum is no Kronecker product"
    )


# --------------------------------------------------------------------------- one role, several uses


def shared(modules: bool) -> nn.Module:
    """Three calls: of one module, or of modules that share weight and bias."""

    def forward(m: Any, x: Tensor) -> Tensor:  # [N, S, 3]
        h = torch.tanh(m.same[0](x))
        h = torch.tanh(m.same[1](h)).sum(1)
        return m.last(torch.tanh(m.same[2](h)))

    first = nn.Linear(3, 3)
    same = nn.ModuleList([first, *(nn.Linear(3, 3) if modules else first for _ in range(2))])
    for other in same:
        other.weight, other.bias = first.weight, first.bias
    return Written(forward, last=nn.Linear(3, 2), same=same)


@pytest.mark.parametrize("approximation", ["KFAC", "KFAC reduce", "EKFAC", "FullBlock", "TNT"])
@pytest.mark.parametrize("separate", [False, True])
def test_modules_of_one_role_are_one_module_called_several_times(
    approximation: str, separate: bool
) -> None:
    results = []
    for modules in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = shared(modules).double()
        with torch.no_grad():
            for q in model.parameters():
                q.copy_(normal(*q.shape, seed=q.numel()))
        data = [(normal(n, 2, 3, seed=n), torch.arange(n) % 2) for n in (4, 3)]
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
        K = curvature(risk, APPROXIMATIONS[approximation], separate_weight_and_bias=separate)
        results.append((K.trace, K.to_dense()))
    close(results[0][0], results[1][0], what="trace")
    close(results[0][1], results[1][1], 1e-7 if "EKFAC" in approximation else 1e-9)


def pair() -> nn.Module:
    """The same role twice, both sparse: the factor stays a diagonal."""

    def forward(m: Any, x: Tensor) -> Tensor:  # [N, 4]
        return m.head(torch.tanh(m.source(x[:, :3]).sum(1)) * m.target(x[:, 3:]).sum(1))

    model = Written(
        forward, source=nn.Embedding(5, 2), target=nn.Embedding(5, 2), head=nn.Linear(2, 3)
    )
    model.target.weight = model.source.weight
    return model


def test_roles_of_one_table() -> None:
    p = make(lambda: Net(pair(), [torch.randint(4, (n, 4)) for n in (3, 2)]), seed="pair")
    exact = p.exact.only_blocks(p.exact.ggn(), False)
    for reduce in (False, True):
        close(p.curvature(kind("KFAC", reduce)).to_dense(), p.exact.kfac(p.exact.exact(), reduce))
        close(p.curvature(kind("EKFAC", reduce)).trace, exact.trace())
    close(p.curvature(FullBlock).to_dense(), exact)


# ------------------------------------------------------------------------------------------ subsets


@pytest.mark.parametrize("name", TIED)
def test_any_subset(name: str) -> None:
    """A bias alone, a weight alone: what is tracked decides who is tied to whom."""
    p = problem(name)
    for key, q in p.keyed.items():
        risk = EmpiricalRisk(p.model, p.loss, p.data, [q], **p.net.options)
        twin = Problem(
            replace(p.net, params=lambda model, k=key: {k: model.get_parameter(k)}), p.loss, p.data
        ).exact
        exact = twin.ggn()
        with unchanged(p.model, p.data), warnings.catch_warnings():
            warnings.simplefilter("ignore", CurvatureWarning)
            close(curvature(risk, FullBlock).to_dense(), exact, what=f"FullBlock of {key}")
            close(curvature(risk, KFAC).to_dense(), twin.kfac(twin.exact()), what=f"KFAC of {key}")
            close(curvature(risk, EKFAC).trace, exact.trace(), what=f"EKFAC of {key}")


def test_what_leaves_no_factors() -> None:
    """A bias apart from a weight of two roles; two biases, unless only the weight is tracked."""
    p = problem("tied autoencoder")
    risk = EmpiricalRisk(p.model, p.loss, p.data, list(p.model.parameters()))
    full = curvature(risk, FullBlock).to_dense()
    with pytest.warns(CurvatureWarning, match="1 of 1 layers"):
        K = curvature(risk, KFAC, separate_weight_and_bias=True)
    close(K.to_dense().diagonal(), full.diagonal())
    close(curvature(risk, EKFAC).trace, full.trace(), what="joint")
    p = problem("tied with two biases")
    with pytest.warns(CurvatureWarning, match="1 of 1 layers"):
        curvature(p.risk(), KFAC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        K = curvature(EmpiricalRisk(p.model, p.loss, p.data, [p.model.one.weight]), KFAC)
    assert type(K.blocks["one"]).__name__ == "Kronecker"


def test_a_product_with_a_table_outside_of_any_module_is_one_more_use() -> None:
    """A matrix product with the table, without a module, is what a tied head is."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.body(m.embedding(x)).sum(1)
        return m.head(h) if m.by_module else h @ m.embedding.weight.T

    parts = {
        "embedding": nn.Embedding(5, 3),
        "body": nn.Linear(3, 3),
        "head": nn.Linear(3, 5, bias=False),
    }
    model: Any = Written(forward, **parts).double()
    model.head.weight = model.embedding.weight
    data = [(torch.tensor([[1, 2], [3, 4], [0, 2]]), torch.tensor([0, 1, 4]))]
    for approximation in (KFAC, EKFAC, FullBlock, DiagonalBlock):
        model.by_module = True
        expected = curvature(
            EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation
        ).to_dense()
        model.by_module = False
        close(
            curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation).to_dense(),
            expected,
        )
