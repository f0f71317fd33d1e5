"""What stochastic reconfiguration refuses, and in which words: a line for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops_plus.errors import NumericsError, SingularMatrixError, UnsupportedError
from curvlinops_plus.optim import StochasticReconfiguration, fisher_inverse
from curvlinops_plus.optim import stochastic_reconfiguration as sr
from test.helpers import Refusal, refusals
from test.optim.reconfiguration.amplitudes import C128, F64, real_net

NET = real_net(9, 6)
X = NET.samples
E = NET.costs
ARGS = (*NET.args, E)
ONES = torch.ones(4, dtype=F64)
COMPLEX_ONES = ONES.to(C128)
INF = float("inf")
NAN = torch.isin(torch.arange(9), torch.tensor([1, 4]))
RANDOM = nn.Sequential(nn.Linear(4, 1), nn.Dropout()).double()
NORMED = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def holomorphic(log_psi: Any, *params: Tensor) -> Callable[[], Any]:
    return lambda: sr(log_psi, list(params), X, E, amplitude="holomorphic")


def optimizer(**options: Any) -> Callable[[], Any]:
    return lambda: StochasticReconfiguration(NET.log_psi, **options)


REFUSED: list[Refusal] = [
    (lambda: sr(*NET.args[:2], X[:1], E[:1]),
     ValueError, r"at least two samples with a positive weight, got 1 of 1"),
    (lambda: sr(*ARGS, weights=[1] + 8 * [0]), ValueError, r"at least two samples.*got 1 of 9"),
    (lambda: sr(*ARGS, weights=[1] * 8 + [-1]), ValueError, r"not negative; 1 of 9 samples \(8\)"),
    (lambda: sr(*ARGS, weights=[1, 1]),
     ValueError, r"Expected 9 real weights, one per sample; got .* shape \[2\]"),
    (lambda: sr(*NET.args, E.where(~NAN, INF)),
     NumericsError, r"local_costs is NaN .* 2 of 9 samples \(1, 4\).*clip"),
    (lambda: sr(*NET.args[:2], X.where(~NAN[:, None], INF), E),
     NumericsError, r"log ψ is NaN or infinite for 2 of 9 samples \(1, 4\)"),
    (lambda: sr(lambda p, x: (p[0] * x).sqrt(), [ONES[0]], (torch.arange(9) != 5).to(F64), E,
                chunk_size=3), NumericsError,
     r"derivatives of log ψ are NaN or infinite for 1 of 3 samples \(5\)"),
    (lambda: sr(lambda p, x: p[0] * x, [torch.tensor(1.0)], torch.tensor([1e25, -1e25]), E[:2],
                mode="dense"), NumericsError,
     r"S \[1, 1\] has 1 entries that are NaN or infinite"),
    (lambda: sr(*NET.args, E[:, None]),
     ValueError, r"local_costs of shape \[9\], one for each sample, got \[9, 1\]"),
    (lambda: sr(*ARGS, 0.0, "kernel"), ValueError, r'mode="kernel" needs a positive damping'),
    (lambda: fisher_inverse(*NET.args[:2], 0.0, mode="kernel"),
     ValueError, r'mode="kernel" needs a positive'),
    (lambda: sr(*ARGS, 0.0),
     SingularMatrixError, r"S of 37 real parameters .* have rank 8 at most. Add a damping"),
    (lambda: sr(*ARGS, 0.0, "lazy"), SingularMatrixError, r"S of 37 real parameters is singular"),
    (lambda: sr(lambda p, x: x[:, 0] * (p[0] + p[1]), [ONES[0]] * 2, X, E, 0.0),
     SingularMatrixError, r"S is singular: 1 of its 2 eigenvalues count as zero.*Add a damping"),
    (lambda: sr(*ARGS, float("nan")),
     ValueError, r"damping=nan; expected a finite number at least 0"),
    (lambda: sr(*ARGS, momentum=1.0),
     ValueError, r"momentum=1; expected a number at least 0 and below 1"),
    (lambda: sr(*ARGS, mode="qgt"),
     ValueError, "mode='qgt'; expected one of 'lazy', 'dense', 'kernel', 'auto'"),
    (lambda: sr(*ARGS, solver="lu"), ValueError, r"solver='lu'; expected one of 'cholesky', 'cg', None"),
    (lambda: sr(*ARGS, mode="lazy", solver="cholesky"),
     ValueError, r'solver="cholesky" needs the matrix, which mode="lazy" does not form'),
    (lambda: sr(*ARGS, amplitude="imaginary"),
     ValueError, "amplitude='imaginary'; expected one of 'real', 'complex', 'holomorphic'"),
    (lambda: sr(*ARGS, amplitude="holomorphic"),
     ValueError, r"needs complex parameters, and .* are real. Use"),
    (holomorphic(lambda p, x: (x.to(C128) @ p[0]).abs(), COMPLEX_ONES),
     ValueError, r"needs a complex log ψ"),
    (holomorphic(lambda p, x: x.to(C128) @ p[0].conj(), COMPLEX_ONES),
     ValueError, r"violate the Cauchy-Riemann"),
    (holomorphic(lambda p, x: x.to(C128) @ p[0] + p[1].conj() * x.square().sum(1), COMPLEX_ONES,
                COMPLEX_ONES[0]), ValueError,
     r"violate the Cauchy-Riemann"),
    (lambda: sr(lambda p, x: x * p[0], [ONES], X, E),
     ValueError, r"log_psi returned \[9, 4\] for 9 samples"),
    (lambda: sr(lambda p, x: (x, x), [ONES], X, E),
     ValueError, r"returned .*tuple.* 9 samples.*return log\|ψ\|"),
    (lambda: sr(lambda p, x: x @ p, ONES, X, E),
     TypeError, r"`params` of a function to be a list, .* got tensor"),
    (lambda: sr(lambda p, x: x @ p, [], X, E), TypeError, r"`params` of a .* got \[\]"),
    (lambda: sr(NET.log_psi, [ONES], X, E), ValueError, r"is not a parameter of the model"),
    (lambda: sr(*NET.args[:2], (X, ONES[:3]), E),
     ValueError, r"along their first axis; got the lengths \{9, 3\}"),
    (lambda: sr(RANDOM, None, X, E), UnsupportedError, r"draws random numbers"),
    (lambda: sr(NORMED, None, X, E),
     ValueError, r"Expected more than 1 value per channel when training"),
    (lambda: sr(lambda p, x: (x @ p[0]).log_softmax(0), [ONES], X, E),
     UnsupportedError, r"function of one sample"),
    (lambda: sr(*ARGS, momentum=0.5, previous=dict.fromkeys(NET.params, ONES)),
     ValueError, r"expected"),
    (lambda: fisher_inverse(*NET.args[:2])({}, X), ValueError, r"missing \['decay'"),
    (lambda: fisher_inverse(*NET.args[:2])(torch.ones(37, 2), X),
     ValueError, r"Expected one vector, got 2 columns"),
    (lambda: fisher_inverse(*NET.args[:2])(torch.full((37,), INF), X),
     NumericsError, r"grad has NaN"),
    (optimizer(norm="max"), ValueError, "norm='max'; expected one of 'euclidean', 'fisher'"),
    (optimizer(lr=-1), ValueError, "lr=-1; expected a number at least 0"),
    (optimizer(norm_constraint=-1),
     ValueError, "norm_constraint=-1; expected a number at least 0"),
    (lambda: optimizer(damping=lambda step: -1.0)().step(X, E),
     ValueError, "damping=-1; expected a number at least 0"),
]  # fmt: skip
test_refusals = refusals(REFUSED)
