"""What is timed: each task by its name, of one library, ours or curvlinops 3.0.1."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from measure import Task
from torch import nn
from workloads import Workload

import curvlinops_plus
from curvlinops_plus import CurvatureEstimator, Empirical, EmpiricalRisk, MonteCarlo

try:
    import curvlinops
except ImportError:
    curvlinops = None


def gradient_pass(work: Workload) -> Task:
    """One plain gradient pass: forward and backward to the parameters over all the data."""

    def run() -> None:
        for X, y in work.data:
            torch.autograd.grad(work.loss(work.model(X), y), work.params)

    return run


def kfac(library: ModuleType, work: Workload, compute: bool = True, **options: Any) -> Any:
    """KFAC, weight and bias joined, without the determinism check."""
    joined = {"check_deterministic": False, "separate_weight_and_bias": False}
    K = library.KFACLinearOperator(
        work.model, work.loss, work.params, work.data, **joined, **options
    )
    if compute:
        K.compute_kronecker_factors()
    return K


def ekfac(library: ModuleType, work: Workload) -> Any:
    """EKFAC: factors, eigenvectors, corrected eigenvalues."""
    joined = {"check_deterministic": False, "separate_weight_and_bias": False}
    if library is curvlinops_plus:
        K = library.EKFACLinearOperator(work.model, work.loss, work.params, work.data, **joined)
        K.compute()
        return K
    model, data = work.model, work.data
    if data[0][1].ndim == 2 and not data[0][1].is_floating_point():  # it takes logits [N·R, C] only
        model, data = nn.Sequential(model, Rows()), [(X, y.flatten()) for X, y in data]
    K = library.EKFACLinearOperator(model, work.loss, work.params, data, **joined)
    K.compute_kronecker_factors()
    K.compute_eigenvalue_correction()
    return K


class Rows(nn.Module):
    """[N, C, R] to [N·R, C]."""

    def forward(self, f: torch.Tensor) -> torch.Tensor:
        return f.transpose(1, 2).flatten(0, 1)


def exact(library: ModuleType, work: Workload, kind: str) -> Any:
    """GGN or Hessian, which are known by their products; nothing is computed yet."""
    operator = getattr(library, f"{kind}LinearOperator")
    return operator(work.model, work.loss, work.params, work.data, check_deterministic=False)


def product(A: Any, work: Workload, columns: int | None = None, before: int = 0) -> Task:
    """A product with one vector, or with several columns; that many products are made now, `before`
    it.
    """
    v = torch.randn(
        *((A.shape[1],) if columns is None else (A.shape[1], columns)), device=work.device
    )
    for _ in range(before):
        A @ v
    return lambda: A @ v


def first_product(library: ModuleType, work: Workload, kind: str) -> Task:
    """An operator is made, and multiplies once."""

    def run() -> None:
        product(exact(library, work, kind), work)()

    return run


def tasks(library: ModuleType, work: Workload) -> dict[str, Task]:
    """Everything that the table of times lists, for one workload."""
    given = (work.model, work.loss, work.params, work.data)
    before = 2 if library is curvlinops_plus else 0  # the peer's products are all alike
    chosen: dict[str, Task] = {}
    if work.name == "tiny":  # milliseconds
        chosen["construction, nothing computed"] = lambda: kfac(library, work, compute=False)
    chosen["construction, defaults"] = lambda: library.KFACLinearOperator(*given)
    chosen["KFAC, Monte Carlo"] = lambda: kfac(library, work)
    if work.exact:
        chosen["KFAC, exact"] = lambda: kfac(library, work, fisher_type="type-2")
    chosen["EKFAC, Monte Carlo"] = lambda: ekfac(library, work)
    G, H = exact(library, work, "GGN"), exact(library, work, "Hessian")
    for A, kind in ((G, "GGN"), (H, "Hessian")):
        chosen[f"{kind} product, first"] = first_product(library, work, kind)
        chosen[f"{kind} product, third and later"] = product(A, work, before=before)
    chosen["GGN products, 8 columns"] = product(G, work, columns=8)
    K = kfac(library, work)
    chosen["K @ v"] = product(K, work, before=1)
    chosen["damped inverse @ v"] = product(
        library.KFACInverseLinearOperator(K, damping=1e-2), work, before=1
    )
    return chosen


def training_tasks(work: Workload) -> dict[str, Task]:
    """A pass of training steps (forward, backward, plain descent), alone and while an estimator
    listens.
    """

    def backward(X: torch.Tensor, y: torch.Tensor) -> None:
        work.loss(work.model(X), y).backward()

    def step(X: torch.Tensor, y: torch.Tensor, estimator: CurvatureEstimator | None) -> None:
        if estimator is None:
            backward(X, y)
        else:
            with estimator.listen((X, y)):
                value = work.loss(work.model(X), y)
            value.backward()
        with torch.no_grad():
            for p in work.params:
                p.sub_(p.grad, alpha=1e-6)
                p.grad = None

    def steps(estimator: CurvatureEstimator | None) -> Task:
        def run() -> None:
            for X, y in work.data:
                step(X, y, estimator)

        return run

    def listening(vectors: MonteCarlo | Empirical) -> Task:
        risk = EmpiricalRisk(work.model, work.loss, (), params=work.params)
        return steps(CurvatureEstimator(risk, vectors=vectors, decay=0.95))

    return {
        "plain": steps(None),
        "KFAC, Monte Carlo": listening(MonteCarlo()),
        "KFAC, empirical": listening(Empirical()),
    }
