"""Options are refused where they are given, under their names; wrong types as well."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CGInverseLinearOperator,
    Checkpoint,
    CurvatureEstimator,
    EKFACLinearOperator,
    EmpiricalRisk,
    Exact,
    FromDistribution,
    FullBlock,
    GGNLinearOperator,
    Hessian,
    HeuristicDamping,
    IdentityLinearOperator,
    KFACLinearOperator,
    KFACOptimizer,
    KFACPreconditioner,
    Laplace,
    LevenbergMarquardt,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NearestKronecker,
    NeumannInverseLinearOperator,
    NormConstraint,
    QuadraticPenalty,
    RelativeDamping,
    ScaledIdentity,
    StochasticReconfiguration,
    SubmatrixLinearOperator,
    WeightDecay,
    approximate_boundaries,
    attribution_scores,
    check_rule,
    condition_number,
    curvature,
    fisher_inverse,
    from_scipy,
    hutchinson_trace,
    lanczos_approximate_spectrum,
    logdet,
    merge,
    per_example_gradients,
    prune,
    random_vector,
    self_influence,
    spectral_norm,
    stochastic_reconfiguration,
    top_eigenpairs,
    xtrace,
)
from curvlinops_plus.linalg import Dense, Structure
from curvlinops_plus.options import flag, integer, number
from test.cases import problem
from test.helpers import F64, normal

NAN, INF = float("nan"), float("inf")
P = problem("mlp")
RISK = EmpiricalRisk(P.model, P.loss, P.data, P.params)
K = curvature(RISK, KFAC)
MATRIX = Dense(torch.eye(12, dtype=F64), Structure.PSD)
BATCH = Dense(torch.eye(2, dtype=F64).repeat(2, 1, 1), Structure.PSD)
MASK = torch.ones(6, 3, dtype=torch.bool)
TWO = torch.ones(2)


def risk(**options: Any) -> Any:
    return EmpiricalRisk(P.model, P.loss, P.data, P.params, **options)


def classic(kind: Any) -> Callable[..., Any]:
    return lambda **options: kind(P.model, P.loss, P.params, P.data, **options)


def kfac(**options: Any) -> Any:
    return KFACOptimizer(P.model, P.loss, **options)


def group(**options: Any) -> Any:
    """An optimizer with a parameter group that has these options."""
    return kfac(params=[{"params": list(P.model.parameters()), **options}])


def preconditioner(**options: Any) -> Any:
    return KFACPreconditioner(P.model, P.loss, **options)


def log_psi(params: Any, x: Any) -> Any:
    return -params[0] * x**2


def reconfiguration(**options: Any) -> Any:
    return StochasticReconfiguration(log_psi, [torch.ones((), dtype=F64)], **options)


def direction(**options: Any) -> Any:
    x = torch.linspace(-1, 1, 5, dtype=F64)
    arguments = {"samples": x, "local_costs": x**2, **options}
    return stochastic_reconfiguration(log_psi, [torch.ones((), dtype=F64)], **arguments)


def of(function: Any, *args: Any) -> Callable[..., Any]:
    return lambda **options: function(*args, **options)


def weighted(weight: Any) -> Any:
    return EmpiricalRisk(P.model, nn.CrossEntropyLoss(weight=weight), P.data)


FINITE = "expected a finite number"
COUNT = "expected an integer of at least 1"
CALLED = "expected a function, "
WHETHER = "expected True or False"

# door, argument, values, what the message says after the name of the argument
TABLE: list[tuple[Callable[..., Any], str, list[Any], str]] = [
    # ------------------------------------------------------------------------- optimizers, at once
    (kfac, "lr", [INF, NAN, -1, "fast", TWO, 10**400, True], "expected a .*number at least 0"),
    (kfac, "momentum", [INF, NAN, -0.1, None], "expected a .*number at least 0"),
    (kfac, "damping", [INF, NAN, -1.0, "x"], "expected a .*number at least 0"),
    (kfac, "weight_decay", [INF, NAN, -1.0], "expected a .*number at least 0"),
    (kfac, "norm_constraint", [INF, NAN, 0], "expected a .*number above 0"),
    (kfac, "inverse_every", [0, -3, 2.5, "1", TWO], COUNT),
    (kfac, "statistics_every", [0, 1.5, None], COUNT),
    (kfac, "reject", [INF, NAN, 0.5, "yes"], "expected a .*number at least 1"),
    (kfac, "maximize", ["no", None, 2, TWO], WHETHER),
    (kfac, "strict", ["no"], WHETHER),
    (kfac, "decay", [NAN, "x"], "number"),
    (kfac, "power", [0.0, NAN, -INF], "expected a .*number below 0"),
    (kfac, "params", [3, P.model, torch.ones(3)], "expected a list of parameters"),
    (group, "lr", [INF, "slow"], "expected a .*number at least 0"),
    (group, "damping", [INF, -1.0], "expected a .*number at least 0"),
    (group, "weight_decay", [INF], FINITE),
    (preconditioner, "inverse_every", [0, 2.5], COUNT),
    (preconditioner, "damping", [NAN], FINITE),
    (LevenbergMarquardt, "interval", [0, 2.5], COUNT),
    (LevenbergMarquardt, "decay", [0, 1.1, NAN], "expected a .*number above 0 and at most 1"),
    (LevenbergMarquardt, "initial", [NAN, INF], FINITE),
    (LevenbergMarquardt, "thresholds", [None, (1,), "ab"], "two numbers|number"),
    (NormConstraint, "c", [NAN, "x"], "number above 0"),
    (WeightDecay, "strength", [INF, None], "number at least 0"),
    (reconfiguration, "lr", [INF, "x"], "expected a .*number at least 0"),
    (reconfiguration, "momentum", [1.0, NAN, -1], "expected a .*number at least 0 and below 1"),
    (reconfiguration, "damping", [INF, -1.0], "expected a .*number at least 0"),
    (reconfiguration, "norm", ["max", 3], "expected one of 'euclidean', 'fisher'"),
    (reconfiguration, "tol", [NAN, -1], "expected a .*number at least 0"),
    (reconfiguration, "max_iter", [2.5, -1], "expected an integer of at least 0"),
    (direction, "chunk_size", [0, 2.5], COUNT),
    (direction, "samples", ["x", [1.0]], r"expected a tensor \[n, ...\]"),
    (direction, "weights", ["x"], "expected a tensor"),
    (direction, "local_costs", [None], "expected a tensor"),
    (of(fisher_inverse, log_psi, [TWO]), "mode", ["x", None], "expected one of 'lazy'"),
    # --------------------------------------------------------------------------- dampings, factors
    (RelativeDamping, "factor", [NAN, INF, -1, "x"], "expected a .*number at least 0"),
    (HeuristicDamping, "damping", [NAN, -1], "expected a .*number at least 0"),
    (of(HeuristicDamping, 1e-3), "min", [NAN, -1], "expected a .*number at least 0"),
    (K.inverse, "damping", [INF, NAN, 10**400, torch.tensor(INF)], FINITE),
    (lambda dampings: BATCH.inverse(dampings), "dampings", [torch.tensor([INF, 1.0])], "finite"),
    (K.power, "p", [NAN, INF, "x"], "number"),
    (lambda shift: K.shift(shift), "shift", [NAN, torch.tensor(NAN)], FINITE),
    (lambda factor: factor * K, "factor", [NAN, INF], FINITE),
    (lambda divisor: K / divisor, "divisor", [NAN], FINITE),
    (of(CurvatureEstimator, RISK), "damping", [INF, -1.0, {"0": NAN}], "number at least 0"),
    (of(CurvatureEstimator, RISK), "decay", [NAN, "x"], "number"),
    (KFAC.using, "max_bytes", [-1, 2.5, NAN], "expected an integer of at least 0"),
    (EKFAC.using, "basis_rtol", [NAN, 1.0], "expected a .*number at least 0 and below 1"),
    (EKFAC.using, "kfac_approx", ["both", None], "expected one of 'expand', 'reduce'"),
    (FullBlock.using, "max_bytes", [INF], "expected an integer of at least 0"),
    (NearestKronecker.using, "power_iterations", [NAN, 0], COUNT),
    (ScaledIdentity.using, "scale", [INF, -1.0], "expected a .*number at least 0"),
    # --------------------------------------------------------------------------------------- risks
    (risk, "mask", [MASK], CALLED + r"mask\(X, y\) -> bool tensor \[N, T\], called with each batch"),
    (risk, "weight", [torch.ones(6), 1.0], CALLED + r"weight\(X, y, ...\) -> tensor \[N\]"),
    (risk, "output", [torch.ones(6, 3), 0], CALLED + r"output\(o\) -> tensor, called with what the model"),
    (risk, "batch_size_fn", [6, torch.tensor(6)], CALLED + r"batch_size_fn\(X\)"),
    (risk, "num_data", ["x", [6], 1j], "expected a number"),
    (risk, "progressbar", ["no"], WHETHER),
    (risk, "shift_labels", ["no"], "expected True, False or None"),
    (risk, "reduction", ["none", 3], "expected one of 'mean', 'sum', None"),
    (GGN, "risk", [None, P.model], "GGN takes an EmpiricalRisk"),
    (of(GGN, RISK), "check_deterministic", ["x"], "expected True, False or None"),
    (of(Hessian, RISK), "block_sizes", [3, ["x"]], "integer"),
    (of(curvature, RISK), "offload", ["disk", 2.5], "expected a device"),
    (of(curvature, RISK), "owned", ["x"], WHETHER),
    (of(curvature, RISK), "default", ["KFACC", "", 3], "is no approximation"),
    (Exact, "signs", ["x"], WHETHER),
    (classic(GGNLinearOperator), "mask", [MASK], CALLED),
    (classic(KFACLinearOperator), "fisher_type", ["x", None], "expected one of 'type-2', 'mc'"),
    (classic(EKFACLinearOperator), "mc_samples", [NAN, 0], COUNT),
    (weighted, "weight", [torch.tensor([1.0, NAN, 1.0]), torch.tensor([INF, 1.0, 1.0])],
     r"has entries that are NaN or infinite, at \[\[.\]\]; expected finite weights"),
    (FromDistribution, "make", [None, TWO], CALLED + r"make\(f\)"),
    # ------------------------------------------------------------------------ solvers and matrices
    (of(CGInverseLinearOperator, MATRIX), "tolerance", [NAN, -1, "x"], "number at least 0"),
    (of(CGInverseLinearOperator, MATRIX), "max_iter", [2.5, -1], "integer of at least 0"),
    (of(MINRESInverseLinearOperator, MATRIX), "preconditioner", [TWO], CALLED),
    (of(LSMRInverseLinearOperator, MATRIX), "damp", [NAN, INF], FINITE),
    (of(NeumannInverseLinearOperator, MATRIX), "num_terms", [-1, 2.5], "integer of at least 0"),
    (of(NeumannInverseLinearOperator, MATRIX), "scale", [NAN, INF], FINITE),
    (CGInverseLinearOperator, "A", ["x", None], "Expected a LinearOperator"),
    (lambda A: SubmatrixLinearOperator(A, [0], [0]), "A", [None], "Expected a LinearOperator"),
    (IdentityLinearOperator, "shapes", [3, TWO], "of shapes"),
    (from_scipy, "op", ["x", None, [1.0]], "expected an operator of this package, a tensor"),
    (K.sample, "generator", [0], "expected a torch.Generator; for a seed"),
    (K.sample, "num", [2.5, 0], COUNT),
    (K.to, "device", ["disk"], "expected a device"),
    # ---------------------------------------------------------------------------------- estimators
    (lambda A: xtrace(A, 4), "A", ["x", None, nn.Linear], "expected an operator of this package"),
    (of(hutchinson_trace, MATRIX), "num_matvecs", [2.5, None, TWO], "expected an integer"),
    (of(hutchinson_trace, MATRIX, 3), "generator", [0, "x"], "expected a torch.Generator"),
    (of(hutchinson_trace, MATRIX, 3), "return_error", [TWO], WHETHER),
    (of(spectral_norm, MATRIX), "tol", [NAN, "x"], "number at least 0"),
    (of(condition_number, MATRIX), "max_iter", [0, 2.5], COUNT),
    (of(top_eigenpairs, MATRIX), "k", [torch.tensor(1.0), "x"], "expected an integer"),
    (of(logdet, MATRIX), "num_probes", [0, 2.5], COUNT),
    (of(lanczos_approximate_spectrum, MATRIX), "ncv", [0, -1, 2.5], "an integer of at least 2"),
    (of(lanczos_approximate_spectrum, MATRIX, 5), "kappa", [NAN, 1.0], "number above 1"),
    (of(approximate_boundaries, MATRIX), "boundaries", [3, (1.0,), (NAN, 1.0)], "eigenvalue|number"),
    (random_vector, "dim", [2.5, -1], "expected an integer of at least 0"),
    # -------------------------------------------------------------------------------- applications
    (lambda queries: attribution_scores(K, queries, RISK), "queries", [None], "expected an EmpiricalRisk"),
    (lambda P: self_influence(P, RISK), "P", [[1.0], None], "Expected a LinearOperator"),
    (lambda risk: next(per_example_gradients(risk)), "risk", [None], "takes an EmpiricalRisk"),
    (QuadraticPenalty, "K", [None, "x"], "expected an operator"),
    (of(QuadraticPenalty, K), "strength", [NAN, "x"], "number"),
    (of(prune, P.model, K), "sparsity", [NAN, "x"], "number"),
    (lambda models: merge(models, [K]), "models", [None], "expected a list of networks"),
    (of(Laplace, K), "max_bytes", [2.5], "expected an integer of at least 0"),
    (lambda module: check_rule(module, normal(4, 3)), "module", [None, "x"], "expected a torch.nn.Module"),
    (Checkpoint, "thing", [None], "what has a state_dict"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("door", "argument", "value", "words"),
    [(door, argument, value, words) for door, argument, values, words in TABLE for value in values],
)
def test_refused(door: Callable[..., Any], argument: str, value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words) as raised:
        door(**{argument: value})
    error = raised.traceback[-1]
    assert "curvlinops_plus" in str(error.path)
    assert "raise " in str(error.statement)
    named = re.search(argument.replace("_", "[_ ]"), str(raised.value), re.IGNORECASE)
    assert named or argument in WITHOUT_NAME


#: Their messages say what kind of thing is expected, without the name.
WITHOUT_NAME = ("A", "P", "op", "c", "strength", "damping", "thresholds", "default", "shift")


def test_refused_options_leave_no_hooks() -> None:
    before = dict(P.model._forward_hooks), dict(P.model._forward_pre_hooks)
    errors = []
    for options in ({"lr": INF}, {"inverse_every": 0}, {"reject": INF}, {"damping": NAN}):
        with pytest.raises(ValueError, match="expected") as raised:
            kfac(**options)
        errors.append(raised)  # keeps what the constructor had made
    assert (dict(P.model._forward_hooks), dict(P.model._forward_pre_hooks)) == before


def test_valid_options_of_all_kinds_are_read() -> None:
    """Numbers and counts of NumPy and PyTorch, and flags as 0 and 1."""
    assert integer("n", np.int64(3), low=3) == integer("n", torch.tensor(3)) == 3
    assert (
        number("x", np.float32(0.5), low=0.5, high=0.5) == number("x", torch.tensor([0.5])) == 0.5
    )
    assert number("x", INF, low=0, infinite=True) == INF
    assert number("x", None, optional=True) is None
    assert flag("f", np.True_) is True
    assert flag("f", 0) is False
    with pytest.raises(ValueError, match=r"n=1\d*\.\.\.\d*; expected an integer, below 2\*\*63"):
        integer("n", 10**400)
    optimizer = kfac(lr=torch.tensor(0.1), inverse_every=np.int64(2), maximize=np.False_)
    optimizer.close()


def test_a_rejected_step_never_makes_the_damping_infinite() -> None:
    rule = LevenbergMarquardt(1e308, interval=100, max=INF)
    assert number("damping", rule.adapted(1e308, NAN)) > 1e308
