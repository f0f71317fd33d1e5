"""What operators of blocks refuse and warn of, and in which words: a line for each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    TNT,
    Accumulator,
    AffineRule,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EKFACLinearOperator,
    EmpiricalRisk,
    Exact,
    ForwardOnly,
    FullBlock,
    KFACLinearOperator,
    KFOCLinearOperator,
    MonteCarlo,
    NearestKronecker,
    NumericsError,
    ScaledIdentity,
    UnsupportedError,
    VerificationError,
    curvature,
    register_rule,
    save,
)
from curvlinops_plus import (
    compute_eigenvalue_correction_linear_weight_sharing as eigenvalue_correction,
)
from curvlinops_plus.linalg import Dense, Diagonal
from test.cases import close, problem, unchanged
from test.helpers import F64, Refusal, Written, normal, refusals

CE = nn.CrossEntropyLoss()
MLP, GENERIC = problem("mlp"), problem("generic layers")
MODEL = MLP.model
X, Y = normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
NORM = EmpiricalRisk(
    GENERIC.model, GENERIC.loss, GENERIC.data, [GENERIC.model[1].weight, GENERIC.model[1].bias]
)
MATRIX = Dense(torch.eye(2))
SWEEPS = NearestKronecker.using(max_bytes=0)
ROWS = torch.ones(1, 1, 1)
quiet = pytest.mark.filterwarnings(
    "ignore:.*get their exact diagonal", "ignore:None of the inputs have requires_grad"
)


def risk(
    model: nn.Module = MODEL, data: Any = ((X, Y),), params: Any = None, **options: Any
) -> EmpiricalRisk:
    return EmpiricalRisk(model, CE, data, params, **options)


def classic(kind: Any, **options: Any) -> Any:
    return kind(MODEL, CE, MLP.params, MLP.data, **options)


def linear(i: int = 4, o: int = 3) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        return nn.Linear(i, o, dtype=F64)


def one_bias() -> nn.Sequential:
    """Two layers with weights of their own and one bias: there is no common matrix."""
    model = nn.Sequential(linear(), nn.Tanh(), linear(3, 3))
    model[2].bias = model[0].bias
    return model


def branch(run: Callable[..., Tensor], **parts: nn.Module) -> Written:
    return Written(run, first=linear(4, 5), second=linear(5, 3), **parts)


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0.0


def infinite_slope(m: Any, x: Tensor) -> Tensor:
    return (m.l(x) * 0).sqrt()


def reentrant(m: Any, x: Tensor) -> Tensor:
    return m.second(checkpoint(m.first, x.requires_grad_(), use_reentrant=True))


class Mine(Accumulator):
    """An approximation that does not say how much memory it takes, and that of a second sweep which
    has no bases.
    """

    def update(self, batch: Any) -> None:
        self.add("d", batch.squared_grads().flatten())

    def finish(self) -> Any:
        return Diagonal(self.value("d"))


class Twice(Mine):
    def finish(self) -> Any:
        return Mine(self.layer, self.group, self.scale)


class Affine(Accumulator):
    """An approximation of the user's own, which needs rows of inputs."""

    def update(self, batch: Any) -> None:
        self.add("a", batch.inputs.sum((0, 1)))

    def finish(self) -> Any:
        return self.value("nothing")


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(normal(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x @ self.kernel


@register_rule(Kernel)
class Forgetful(AffineRule):
    """Forgets the factor 2."""

    def patterns(self, module: Any) -> dict[str, str]:
        return {"kernel": "i o -> o i"}

    def inputs(self, module: Any, x: Tensor) -> Tensor:
        return x[:, None]

    def grads(self, module: Any, g: Tensor) -> Tensor:
        return g[:, :, None]


def mixed() -> Written:
    """Examples depend on each other."""
    return branch(lambda m, x: m.second(m.first(x) - m.first(x).mean(0)))


def streams(kind: Any = KFAC, X: Tensor = X, **options: Any) -> CurvatureEstimator:
    estimator = CurvatureEstimator(risk(), kind, **options)
    estimator.update((X, Y[: len(X)]))
    return estimator


def hears(use: Callable[[nn.Module, Tensor], object]) -> None:
    model = copy.deepcopy(MODEL)
    with CurvatureEstimator(risk(model)).listen((X, Y)):
        use(model, X)


def loads(kind: Any = KFAC, decay: float = 1.0, without: str = "") -> None:
    state = streams().state_dict()
    state.pop(without, None)
    CurvatureEstimator(risk(), kind, decay=decay).load_state_dict(state)


def both_ways(model: nn.Module, X: Tensor) -> None:
    model(X)
    model(X)


def load_into(state: Any) -> None:
    BlockwiseLinearOperator.from_state_dict(state, MODEL, MLP.data)


REFUSED: list[Refusal] = [
    # approximations
    (lambda: curvature(GENERIC.risk(), {"head": KFAC}),
     ValueError, r"No layer matches 'head'.*'1', '2', '4'\].*'Li"),
    (lambda: curvature(risk(), "kfak"),
     ValueError, "'kfak' is no approximation. Expected one of 'KFAC', 'EKFAC', 'TNT', .*'ScaledId"),
    (lambda: curvature(risk(), nn.Linear),
     ValueError, "Linear is no approximation. Expected an Accumulator class such"),
    (lambda: KFAC(), TypeError,
     r"KFAC\(\) is made by operators.*curvature\(risk, KFAC\), and .* KFAC.using\(\.\.\.\)"),
    (lambda: EKFAC(kfac_approx="reduce"),
     TypeError, r"the class itself.* EKFAC.using\(kfac_approx='reduce'\)"),
    (lambda: DiagonalBlock(), TypeError, r"DiagonalBlock\(\) is made by operators, for each layer"),
    (lambda: curvature(GENERIC.risk(), {"1": EKFAC}, default=DiagonalBlock),
     UnsupportedError, r"layer '1' \(LayerNorm\) can't have EKFAC.*DiagonalBlock or FullBlock"),
    (lambda: curvature(risk(one_bias()), {"2": KFAC}, default=DiagonalBlock),
     UnsupportedError, r"layer '2'.*shared by \['0', '2'\] as different matrices"),
    (lambda: curvature(NORM, Affine),
     UnsupportedError, r"layer '1' \(LayerNorm\) has no affine rule.*@register_rule\(LayerNorm\)"),
    (lambda: curvature(risk(one_bias()), Affine),
     UnsupportedError, r"layer '0' \(Linear\) is shared by several"),
    (lambda: curvature(problem("tied").risk(), Affine, vectors=MonteCarlo()),
     UnsupportedError, "layer 'embedding': its parameter is multiplied with in 2 roles by"),
    (lambda: curvature(risk(), Affine), KeyError, "layer '0': nothing was added to 'nothing' yet"),
    (lambda: curvature(risk(), {"Linear": KFAC}),
     ValueError, "A key is a name, a glob or the class"),
    # options of approximations
    (lambda: curvature(risk(), KFAC.using(kfac_approx="x")),
     ValueError, "kfac_approx='x'; expected one of 'expand', 'reduce'"),
    (lambda: curvature(risk(), EKFAC.using(basis_rtol=1.0)),
     ValueError, "basis_rtol=1; expected a number at least 0 and below 1"),
    (lambda: curvature(risk(), SWEEPS.kind.using(power_iterations=0)),
     ValueError, "power_iterations=0; expected an integer of at least 1"),
    (lambda: curvature(risk(), ScaledIdentity.using(scale=-1.0)),
     ValueError, "scale=-1; expected a number at least 0"),
    (lambda: curvature(risk(), TNT.using(max_bytes=100)),
     UnsupportedError, "factor G takes .*above the limit of 100"),
    (lambda: curvature(risk(), SWEEPS.kind.using(max_factor_bytes=100)),
     UnsupportedError, r"'0': its factor G takes .*give NearestKronecker a larger limit"),
    (lambda: curvature(risk(), FullBlock.using(max_bytes=9)),
     UnsupportedError, r"'0': its full block is 25 x 25.*Use DiagonalBlock, KFAC or EKFAC"),
    # memory
    (lambda: curvature(risk(), KFAC, max_bytes=0),
     ValueError, "max_bytes=0 must be an integer of at least 1"),
    (lambda: curvature(risk(), EKFAC, max_bytes=300),
     UnsupportedError, r"'0': EKFAC needs .*DiagonalBlock"),
    (lambda: curvature(risk(), Mine, max_bytes=9),
     UnsupportedError, r"Mine does not say how much memory.*`needs\(\)`"),
    # damping and algebra
    (lambda: (-curvature(risk())).inverse((1, 1)),
     ValueError, "a positive multiple of the curvature; this is -1 "),
    (lambda: curvature(risk(), max_kept_bytes=-1),
     ValueError, "max_kept_bytes=-1 must be an integer of at least 0"),
    (lambda: curvature(risk()).inverse((1, 1), use_exact_damping=True),
     ValueError, "or use exact damping, not both"),
    (lambda: save(Path("x"), streams()),
     TypeError, "save takes a state_dict, or what has one.* and then a path"),
    (lambda: load_into(Path("x")), ValueError, r"not a state .*, as load\(path\) reads it"),
    (lambda: curvature(risk()).load_state_dict("x"),
     ValueError, r"not a state .*, as load\(path\) reads it"),
    (lambda: load_into(nn.Tanh()), ValueError, r"state_dict\(\) returns.* got a Tanh"),
    (lambda: save(MATRIX @ MATRIX, Path("x")),
     TypeError, "save takes a state_dict, or what has one .*a Product"),
    # classes
    (lambda: classic(KFOCLinearOperator, fisher_type="forward-only"),
     UnsupportedError, "is made of gradients, and"),
    # estimators
    (lambda: CurvatureEstimator(risk()).operator, ValueError, "has seen no batch yet"),
    (lambda: CurvatureEstimator(risk(), decay=0), ValueError, "decay=0 is outside of"),
    (lambda: CurvatureEstimator(risk()).update((X, Y), decay=1.5),
     ValueError, r"decay=1\.5 is outside of"),
    (lambda: streams(X=X[:0]), ValueError, "no examples"),
    (lambda: streams(SWEEPS),
     UnsupportedError, r"layer '0': NearestKronecker makes several sweeps over the same data"),
    (lambda: streams(Twice).operator,
     UnsupportedError, r"(?s)'0': Twice makes several sweeps.*curvature\(risk"),
    (lambda: streams(DiagonalBlock).merge(streams(KFAC)),
     ValueError, "Can't merge estimators that differ in layers"),
    (lambda: hears(lambda model, X: None), ValueError, "called 0 times inside `listen`"),
    (lambda: hears(both_ways), ValueError, "called 2 times inside `listen`"),
    (lambda: hears(lambda model, X: torch.no_grad()(model)(X)),
     UnsupportedError, r"ran under torch\.no_grad"),
    (lambda: hears(lambda model, X: model(X).sum().backward()),
     ValueError, "after the block, not inside"),
    (lambda: loads(without="draws"), ValueError, r"lacks \['draws'\]; is the file cut off"),
    (lambda: loads(decay=0.5), ValueError, r"decay: the state has 1\.0, this one 0\.5"),
    (lambda: loads(DiagonalBlock), ValueError, "mismatch in layers, '0'"),
    # what layers did
    (lambda: curvature(risk(branch(reentrant), [(X.clone(), Y)])),
     UnsupportedError, r"use_reentrant=True, which hides parameters.*Pass use_reentrant=False"),
    (lambda: curvature(risk(branch(lambda m, x: m.second(m.div(m.first(x))), div=Infinite()))),
     NumericsError, "layer 'first': the statistic .* NaN or infinite entries"),
    (lambda: curvature(risk(Written(infinite_slope, l=linear())), EKFAC, vectors=MonteCarlo()),
     NumericsError, "layer 'l': the statistic .* NaN or infinite entries"),
    # verify
    (lambda: curvature(risk(nn.Sequential(Kernel()), check=False)).verify(),
     VerificationError, r"check \(a\) gradients: layer '0' .*by autograd"),
    (lambda: BlockwiseLinearOperator(risk(mixed()), KFAC, compute=False).verify(),
     UnsupportedError, "examples of a batch depend on each other"),
    (lambda: curvature(MLP.risk(data=iter(MLP.data))).verify(),
     ValueError, r"`verify\(\)` needs a few examples of its"),
    # other operations
    (lambda: curvature(risk()) @ [p.grad for p in MODEL.parameters()], TypeError,
     r'Entry "0.weight": .*got NoneType. Gradients in `.grad` are there after'),
    (lambda: eigenvalue_correction(ROWS, ROWS[0], ROWS, ROWS[0], _force_strategy="fast"),
     ValueError, "Invalid _force_strategy: 'fast'. Supported"),
]  # fmt: skip
test_refusals = quiet(refusals(REFUSED, MODEL, GENERIC.model))


@pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")
def test_forward_only_names_all_layers_that_need_gradients_before_anything_runs() -> None:
    class Fails(nn.Sequential):
        def forward(self, x: Any) -> Any:
            raise AssertionError("the model runs")

    r = risk(Fails(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU()).double())
    words = (
        r"layer '1': DiagonalBlock is made of gradients, and ForwardOnly\(\) sends nothing back. .*"
        r"LayerNorm: ScaledIdentity, PReLU: ScaledIdentity"
    )
    with pytest.raises(UnsupportedError, match=words):
        curvature(r, vectors=ForwardOnly())
    with pytest.raises(UnsupportedError, match=words):
        CurvatureEstimator(r, vectors=ForwardOnly())
    with pytest.raises(UnsupportedError, match="layer '0': EKFAC is made of gradients"):
        curvature(r, EKFAC, vectors=ForwardOnly())


# ---------------------------------------------------------------------------------- what layers did
def no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.first(x)
    return m.second(torch.tanh(h))


def in_place(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x)
    out = m.first(h)
    h.mul_(2)
    return m.second(out) + h.sum(1, keepdim=True)


def half_detached(m: Any, x: Tensor) -> Tensor:
    return m.second(torch.tanh(m.first(x)).detach())


def never_called(m: Any, x: Tensor) -> Tensor:
    return m.first(x)[:, :3]


FIRST = r"\['first.weight', 'first.bias'\]"
DID: list[tuple[Callable[..., Tensor], str]] = [
    (never_called, "layer 'second' .Linear. was never called in any batch"),
    (in_place, "input of layer 'first' was modified in place after the layer read it.*x = x . y"),
    (no_grad, rf"layer 'first' ran under torch.no_grad\(\).*use_reentrant=False.*{FIRST}"),
    (half_detached, rf"'first' .Linear. does not reach the output in any batch.*{FIRST}"),
]


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize(
    "vectors", [Exact(), MonteCarlo(2), ForwardOnly()], ids=lambda v: v.fisher_type
)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_layers_did(approximation: Any, vectors: Any, frozen: bool) -> None:
    forward = isinstance(vectors, ForwardOnly)
    if forward and approximation is not KFAC:
        return
    for run, words in DID[: 2 if forward else 4]:
        model = branch(run).requires_grad_(not frozen)
        with unchanged(model), pytest.raises(ValueError, match=words):
            curvature(risk(model, params=list(model.parameters())), approximation, vectors=vectors)


# ----------------------------------------------------------------------------------------- warnings
def bag_of_maxima() -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(5, 3, mode="max"), linear(3)).double()


TOKENS = torch.tensor([[0, 0], [1, 0], [2, 3], [4, 4], [0, 1], [1, 1]])


def broadcast() -> nn.Module:
    query = nn.Buffer(torch.ones(2).double())
    return Written(
        lambda m, x: m.body(x) + m.code(m.query), body=linear(), code=linear(2), query=query
    )


WARNED: list[tuple[Callable[[], EmpiricalRisk], str]] = [
    (lambda: risk(one_bias()), r"shared by \['0', '2'\]"),
    (lambda: GENERIC.risk(), "LayerNorm: its rule LayerNormRule is not that of an affine layer"),
    (lambda: risk(bag_of_maxima(), [(TOKENS, Y)]), "max"),
    (lambda: risk(nn.utils.parametrizations.weight_norm(linear())),
     r"'the model' \(ParametrizedLinear.*weight"),
    (lambda: risk(broadcast()), r"'code' \(Linear: \['code.weight', 'code.bias'\] are a"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), WARNED, ids=[words for _, words in WARNED])
def test_warnings_give_reasons(make: Callable[[], EmpiricalRisk], words: str) -> None:
    given = make()
    with unchanged(given.model), pytest.warns(CurvatureWarning, match=words):
        diagonal = curvature(given, KFAC).diagonal()
    if "code" in words:
        close(diagonal[15:], GGN(given).to_dense().diagonal()[15:])


def test_warnings_point_at_the_line_outside_of_the_package() -> None:
    model = nn.Sequential(nn.PReLU(), linear()).double()
    data, params = [(X, Y)], list(model.parameters())
    makers: list[Callable[[], Any]] = [
        lambda: curvature(risk(model)),
        lambda: BlockwiseLinearOperator(risk(model)),
        lambda: CurvatureEstimator(risk(model)).update(data[0]),
        *(
            lambda kind=kind: kind(model, CE, params, data)
            for kind in (KFACLinearOperator, EKFACLinearOperator)
        ),
        *(
            lambda kind=kind: kind(model, CE, params, data, check_deterministic=False).trace
            for kind in (KFACLinearOperator, EKFACLinearOperator)
        ),
    ]
    for make in makers:
        with pytest.warns(CurvatureWarning, match=r"get their exact diagonal") as caught:
            make()
        assert {warning.filename for warning in caught} == {__file__}
