"""What the applications refuse, and in which words: a line for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from curvlinops_plus import (
    GGN,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    IdentityLinearOperator,
    Laplace,
    NoClosedForm,
    QuadraticPenalty,
    UnsupportedError,
    attribution_scores,
    curvature,
    linear_datamodeling_score,
    merge,
    per_example_gradients,
    prune,
)
from curvlinops_plus.linalg import Dense, Space, Structure
from test.helpers import F64, Refusal, normal, refusals
from test.nets import tanh_net

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:.*differ:curvlinops_plus.CurvatureWarning"
)
X, Y, CLASSES = normal(12, 2), normal(12, 3, seed=1), torch.arange(12) % 3
MSE, CE = nn.MSELoss(), nn.CrossEntropyLoss()
COUNTS, BINARY = nn.PoissonNLLLoss(), nn.BCEWithLogitsLoss()
TARGETS: dict[nn.Module, Tensor] = {CE: CLASSES, COUNTS: Y.abs(), BINARY: (Y > 0).double()}


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return tanh_net(2, 4, 3).double()


M = network()


def risk_of(
    model: Any = M, loss: Any = CE, params: Any = None, y: Tensor | None = None
) -> EmpiricalRisk:
    y = TARGETS.get(loss, Y) if y is None else y
    return EmpiricalRisk(model, loss, [(X[:5], y[:5]), (X[5:], y[5:])], params)


def kfac(model: Any = M, loss: Any = CE, **options: Any) -> Any:
    return curvature(risk_of(model, loss), KFAC, **options)


def two_losses() -> EmpiricalRisk:
    return EmpiricalRisk(M, (MSE, MSE), [(X, (Y, Y))], output=lambda out: (out, 2 * out))


def weighted() -> EmpiricalRisk:
    return EmpiricalRisk(M, {"y": (MSE, 0.25)}, [(X, {"y": Y})], output=lambda out: {"y": out})


def on(model: nn.Module) -> Dense:
    """A matrix on the parameters of a model."""
    space = Space.of(dict(model.named_parameters()))
    return Dense(torch.eye(space.dim), Structure.PSD, in_space=space, out_space=space)


def moved(model: Any = M) -> dict[str, Tensor]:
    return {key: p.detach() + 1 for key, p in model.named_parameters()}


# ------------------------------------------------------------------------- what takes several steps
def trained(use: Callable[[Any], object], prepare: Callable[[Any], Any] = lambda K: K) -> None:
    """Train the network between a curvature and its use."""
    prepared = prepare(K := kfac(model := network()))
    _ = K @ normal(27)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    use(prepared)


def of_some_data() -> None:
    estimator = CurvatureEstimator(risk_of(), KFAC)
    estimator.update((X[:5], CLASSES[:5]))
    Laplace(estimator.operator)


def without_data() -> None:
    K = kfac()
    Laplace(type(K).from_state_dict(K.state_dict(), M, None, loss=CE))


def scores(P: Any = None, queries: Any = None, **options: Any) -> object:
    P = IdentityLinearOperator(risk_of().space, dtype=F64) if P is None else P
    return attribution_scores(P, risk_of() if queries is None else queries, risk_of(), **options)


def merge_with_other_buffers() -> None:
    norms: Any = [
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double().eval() for _ in range(2)
    ]
    norms[1][1].running_mean.add_(1.0)
    merge(norms, [curvature(risk_of(norm), DiagonalBlock) for norm in norms])


def merge_heads() -> None:
    models = network(), network(1)
    merge(models, [curvature(risk_of(m, params=list(m[2].parameters())), KFAC) for m in models])


def penalty_of_replaced_parameters() -> None:
    penalty = QuadraticPenalty(kfac(model := network()))
    model[0].weight = nn.Parameter(torch.zeros(4, 2, dtype=F64))
    penalty()


def prune_again() -> None:
    prune(model := network(), kfac(model), 0.5, 1, candidates=["2.weight"])
    prune(model, curvature(risk_of(model, params={"2.bias": model[2].bias}), DiagonalBlock), 0.5)


def prune_computed() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    assert prune(model, on(model), 0.5, candidates=["1.weight"]).keys() == {"1.weight"}
    prune(model, on(model), 0.5)


OLD, FOLLOWS = "have changed since", "computed in each product from the parameters that"
REFUSED: list[Refusal] = [
    # Laplace
    (lambda: Laplace(GGN(risk_of()).materialize()), TypeError, "takes the curvature of a risk"),
    (lambda: Laplace(kfac() + kfac()), TypeError, "takes the curvature of a risk"),
    (lambda: Laplace(12 * kfac()), ValueError, "K is 12 times a curvature; give K itself"),
    (lambda: Laplace(GGN(risk_of(loss=nn.HuberLoss()))), UnsupportedError, "not HuberLoss"),
    (lambda: Laplace(curvature(two_losses(), KFAC)),
     UnsupportedError, "not .*MSELoss.*, .*MSELoss"),
    (lambda: Laplace(GGN(weighted())), UnsupportedError, "the weight 1, not loss 'y'"),
    (lambda: Laplace(kfac(loss=COUNTS)).predict(X),
     UnsupportedError, "PoissonNLLLoss has no predictive distribution"),
    (lambda: trained(Laplace), ValueError, OLD),
    (lambda: trained(lambda la: la.predict(X), Laplace), ValueError, OLD),
    (of_some_data, ValueError, "computed from 5 examples, and the data of its risk now have 12"),
    (without_data, ValueError, "has no examples"),
    (lambda: Laplace(kfac(), 0.0), ValueError, "expected one positive finite number"),
    (lambda: Laplace(kfac(), {"0": 1.0}), ValueError, "expected the blocks"),
    (lambda: Laplace(kfac(), dict.fromkeys(moved(), 1.0)),
     UnsupportedError, 'Block "0" is a Kronecker of several'),
    (lambda: Laplace(kfac(), noise=0.1), ValueError, "CrossEntropyLoss.* has none"),
    (lambda: Laplace(kfac(loss=MSE), noise=math.nan), ValueError, "noise is nan"),
    (lambda: Laplace(curvature(risk_of(loss=MSE, y=M(X).detach()), KFAC)),
     ValueError, "noise is 0.0"),
    (lambda: Laplace(kfac()).predict(X, "softmax"), ValueError, "has 'probit', 'mc', 'bridge'"),
    (lambda: Laplace(kfac(loss=MSE)).predict(X, "mc"),
     ValueError, "link='mc'; MSELoss has 'probit'"),
    (lambda: Laplace(kfac(loss=BINARY)).predict(X, "bridge"),
     ValueError, "BCEWithLogitsLoss has 'probit', 'mc'"),
    (lambda: Laplace(kfac()).predict(X[:0]), ValueError, "no inputs to predict for"),
    # influence
    (lambda: per_example_gradients(M), TypeError, "per_example_gradients takes an EmpiricalRisk"),
    (lambda: scores(queries=risk_of(network())),
     ValueError, "differ in model or parameters; take train.with_data"),
    (lambda: next(per_example_gradients(risk_of(loss=nn.HuberLoss()), per_term=True)),
     UnsupportedError, r"terms of a likelihood, and \['HuberLoss'\] has none"),
    (lambda: per_example_gradients(risk_of(), measurement=lambda f, y: f[:, 0], per_term=True),
     UnsupportedError, "a measurement has none"),
    (lambda: next(per_example_gradients(risk_of(), measurement=lambda f, y: f.mean())),
     ValueError, r"`measurement` returned \[\] for a batch of 5 examples"),
    (lambda: next(per_example_gradients(risk_of(), measurement=lambda f, y: f[:, 0] - f.mean())),
     ValueError, "for the first example of a batch and .* for it alone"),
    (lambda: per_example_gradients(two_losses(), measurement=lambda f, y: f[:, 0]),
     UnsupportedError, "is about one output"),
    (lambda: linear_datamodeling_score(Y, Y, Y), ValueError, r"expected \[Q, N\], \[M, N\]"),
    (lambda: linear_datamodeling_score(Y, Y, Y @ Y.T, confidence=1.5),
     ValueError, "confidence=1.5"),
    (lambda: next(per_example_gradients(two_losses(), per_term=True)),
     UnsupportedError, "about the terms of one loss; there are"),
    # merging
    (lambda: merge([M, M], [kfac()]),
     ValueError, "Expected a curvature for each of 2 models, got 1"),
    (lambda: merge([M], [kfac(network())]), ValueError, r"is of another network than models\[0\]"),
    (lambda: merge([M], [Dense(normal(27, 27))]),
     ValueError, r"curvatures\[0\]: expected a symmetric matrix"),
    (lambda: merge([M], [Dense(torch.eye(27), Structure.PSD)]),
     ValueError, "no parameters of these names"),
    (lambda: merge([M], [GGN(risk_of())]), NoClosedForm, "trace"),
    (merge_with_other_buffers,
     ValueError, r"differ in \['1.running_mean'\], of which there is no curvature"),
    (merge_heads, ValueError, r"The networks differ in \['0.weight', '0.bias'"),
    (lambda: merge([M], [GGN(risk_of(params=moved()))], damping=0.1),
     ValueError, "at other values of .* load them"),
    (lambda: trained(lambda K: merge([K.risk.model], [K])),
     ValueError, rf"\['0.weight'\] {OLD} curvatures\[0\]"),
    # penalties
    (lambda: QuadraticPenalty(GGN(risk_of())), TypeError, FOLLOWS),
    (lambda: QuadraticPenalty(Dense(normal(27, 27))), ValueError, "Expected a symmetric matrix"),
    (lambda: QuadraticPenalty(kfac() + kfac()),
     ValueError, "doesn't tell the network .*; say which parameters"),
    (penalty_of_replaced_parameters, ValueError, "other tensors in place of its parameters"),
    # pruning
    (lambda: prune(M, kfac(), 90), ValueError, r"sparsity=90, .* in \[0, 1\)"),
    (lambda: prune(M, kfac(), 0.5, candidates=["1.weight"]),
     ValueError, r"names \['1.weight'\], which K doesn't know"),
    (lambda: prune(M[2], kfac(), 0.5), ValueError, "has no parameters .* of the shapes"),
    (lambda: prune(nn.Sequential(nn.Linear(3, 4)), on(M), 0.5),
     ValueError, r"no parameters \['0.weight'"),
    (lambda: prune(M, GGN(risk_of()), 0.5), NoClosedForm, "materialize"),
    (lambda: prune(M, GGN(risk_of(params=moved())), 0.5),
     ValueError, "K was computed at other values of"),
    (lambda: trained(lambda K: prune(K.risk.model, 2 * K, 0.5)),
     ValueError, rf"\['0.weight'\] {OLD} K was computed"),
    (lambda: prune(M, kfac(), 0.5, units="experts"), ValueError, "K has no stacks of experts"),
    (lambda: prune(M, kfac(), 0.5, units="heads"), ValueError, "units='heads'; expected 'experts'"),
    (lambda: prune(M, kfac(), 0.5, units=[]), ValueError, "units is empty"),
    (lambda: prune(M, kfac(), 0.5, units=[["1.*"]]), ValueError, "names none of"),
    (lambda: prune(M, kfac(), 0.5, units=[["0.*"], ["*.bias", "2.*"]]),
     ValueError, r"Several units have the parameters \['0.bias'\]"),
    (lambda: prune(M, kfac(), 0.5, units=[["0.weight"], ["2.*"]]), ValueError, "K couples units"),
    (prune_again, UnsupportedError, "'2.bias' is pruned already.*remove"),
    (prune_computed, UnsupportedError, "a weight is computed from it"),
]  # fmt: skip
test_refusals = refusals(REFUSED)
