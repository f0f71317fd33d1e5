"""The public names: complete, documented, with an example each, and stable."""

from __future__ import annotations

import builtins
import importlib
import inspect
import subprocess
import sys
from functools import cache

import pytest

import curvlinops_plus

# What users may import from the top. Adding a name here is a decision; removing one is a breaking
# change.
NAMES = """
Accumulator ActivationHessian ActivationHessianLinearOperator AffineRule BlockwiseLinearOperator
CGInverseLinearOperator CenteredFisherLinearOperator Checkpoint CurvatureEstimator CurvaturePropagation
CurvatureWarning DiagonalBlock EFLinearOperator EKFAC EKFACLinearOperator Empirical EmpiricalRisk Exact
FisherMCLinearOperator FisherType ForwardOnly FromDistribution FullBlock GGN GGNDiagonalLinearOperator GGNFactor
GGNFactorLinearOperator GGNLinearOperator Hessian HessianLinearOperator HeuristicDamping IdentityLinearOperator
Jacobian JacobianLinearOperator KFAC KFACInverseLinearOperator KFACLinearOperator KFACOptimizer KFACPreconditioner
KFACType KFOCLinearOperator LSMRInverseLinearOperator LanczosApproximateLogSpectrumCached
LanczosApproximateSpectrumCached Laplace LayerRule LevenbergMarquardt Likelihood LinearOperator
MINRESInverseLinearOperator MonteCarlo Memory NearestKronecker Needs NeumannInverseLinearOperator NoClosedForm
NormConstraint NumericsError ProcessError Processes ProjectedLinearOperator QuadraticPenalty RelativeDamping
ScaledIdentity SingularMatrixError SolveInfo SolveReport SparseRows StepReport StochasticReconfiguration
SubmatrixLinearOperator TNT TransposedJacobianLinearOperator UnsupportedError VerificationError WeightDecay
__version__ approximate_boundaries approximate_boundaries_abs as_vectors attribution_scores cg check_rule
compute_eigenvalue_correction_linear_weight_sharing condition_number curvature fisher_inverse from_scipy
hutchinson_diag hutchinson_squared_fro hutchinson_trace hutchpp_trace lanczos_approximate_log_spectrum
lanczos_approximate_spectrum linear_datamodeling_score load logdet lsmr merge minres neumann per_example_gradients
plot_influence plot_predictions plot_spectrum plot_summary prune
random_vector register_likelihood register_rule self_influence save spectral_norm split_complex stochastic_reconfiguration
submatrix top_eigenpairs xdiag xtrace
""".split()  # noqa: SIM905 (a line for each would be a page)


# SciPy, PyTorch or Python have these names too: they are imported by name, and not by `*`.
EXPECTED = {"Laplace", "load", "save"}  # but these, which whoever writes `*` looks for here
NOT_BY_STAR = {"LinearOperator", "cg", "logdet", "lsmr", "minres"}


def test_all_is_exactly_the_public_names() -> None:
    assert sorted(curvlinops_plus.__all__) == sorted(set(NAMES) - NOT_BY_STAR)
    assert len(set(curvlinops_plus.__all__)) == len(curvlinops_plus.__all__)


def test_star_import_gives_them() -> None:
    space: dict[str, object] = {}
    exec("from curvlinops_plus import *", space)
    assert set(NAMES) - NOT_BY_STAR <= space.keys()
    assert not NOT_BY_STAR & space.keys()


def taken() -> set[str]:
    """Names that a star import must not shadow."""
    modules = [
        "torch",
        "torch.nn",
        "torch.linalg",
        "torch.optim",
        "torch.func",
        "torch.distributions",
        "numpy",
    ]
    modules += [
        f"scipy.{part}"
        for part in ("linalg", "sparse", "sparse.linalg", "optimize", "special", "stats")
    ]
    names = {name for module in modules for name in dir(importlib.import_module(module))} | set(
        dir(builtins)
    )
    return {name for name in names if not name.startswith("_")}


def test_star_import_shadows_nothing() -> None:
    assert taken() & set(curvlinops_plus.__all__) == EXPECTED
    assert set(NAMES) & taken() == NOT_BY_STAR | EXPECTED


@cache
def imported() -> list[set[str]]:
    """Modules that a new process has after each of four statements, beside what it needs of the
    required packages.
    """
    statements = (
        "import curvlinops_plus",
        "curvlinops_plus.blocks",
        "from curvlinops_plus import KFACLinearOperator",
        "from curvlinops_plus import *",
    )
    code = (
        "import sys, einops, numpy, scipy, torch, torch.nn.utils.prune, torch.utils._device, "
        "torch.utils.checkpoint, tqdm.auto\nbefore = set(sys.modules)\n"
        f"for statement in {statements}: exec(statement); "
        "print(*sorted(set(sys.modules) - before))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return [set(line.split()) - set(sys.stdlib_module_names) for line in shown.splitlines()]


def test_import_leaves_other_packages_for_later() -> None:
    """What takes long to import, and is seldom needed, is imported at its first use: parts of
    SciPy, transformers.
    """
    *_, found = imported()
    assert {name.split(".")[0] for name in found} == {"curvlinops_plus"}
    assert "curvlinops_plus.layer.linear" in found


def test_names_are_imported_when_they_are_used() -> None:
    package, room, name, _ = (
        {".".join(name.split(".")[:2]) for name in found} for found in imported()
    )
    assert package == {"curvlinops_plus", "curvlinops_plus.version"}
    assert "curvlinops_plus.blocks" in room
    assert {
        f"curvlinops_plus.{room}" for room in ("optim", "applications", "estimate")
    } & name == set()


def test_dir_lists_all_names_and_others_are_refused() -> None:
    assert set(NAMES) | {"risk", "errors"} <= set(dir(curvlinops_plus))
    with pytest.raises(AttributeError, match="module 'curvlinops_plus' has no attribute 'KFAK'"):
        curvlinops_plus.KFAK  # noqa: B018


def test_nothing_is_defined_at_the_top() -> None:
    for name in NAMES:
        if name != "__version__":
            assert getattr(curvlinops_plus, name).__module__ != "curvlinops_plus", name


@pytest.mark.parametrize("name", [n for n in NAMES if n != "__version__"])
def test_documented_with_an_example_and_every_argument(name: str) -> None:
    """Names in the signature appear in the docstring; a class may refer to another one's list ("as
    for").
    """
    thing = getattr(curvlinops_plus, name)
    doc = inspect.getdoc(thing) or ""
    assert doc.strip(), f"{name} has no docstring"
    if isinstance(thing, type) and issubclass(thing, (Warning, Exception)):
        return
    assert ">>>" in doc or name == "KFACType", f"{name} has no example"
    if "rguments as for" in doc:
        return
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return
    if isinstance(thing, type) and inspect.isabstract(thing) and not doc.count("Args:"):
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in parameters if p.kind not in kinds and p.name not in doc]
    enum_like = {"value", "names", "module", "qualname", "type", "start", "boundary"}
    assert not [m for m in missing if m not in enum_like], f"{name}: {missing}"
