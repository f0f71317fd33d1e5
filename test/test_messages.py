"""Every error of ours says what was expected, what came and what to do next; nothing of the user's
has changed then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    Accumulator,
    ActivationHessian,
    AffineRule,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EFLinearOperator,
    EKFACLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    FisherMCLinearOperator,
    ForwardOnly,
    FullBlock,
    GGNFactor,
    GGNLinearOperator,
    Hessian,
    HessianLinearOperator,
    Jacobian,
    KFACLinearOperator,
    LayerRule,
    MonteCarlo,
    NumericsError,
    UnsupportedError,
    VerificationError,
    compute_eigenvalue_correction_linear_weight_sharing,
    curvature,
    register_rule,
)
from test.cases import close, problem, unchanged
from test.helpers import F64, Written, normal

KFACS = [KFACLinearOperator, EKFACLinearOperator]
EXACT = [GGNLinearOperator, HessianLinearOperator, EFLinearOperator, FisherMCLinearOperator]
CLASSIC = [*KFACS, *EXACT]
SAMPLING = [*KFACS, FisherMCLinearOperator]
X, Y, CE = normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), nn.CrossEntropyLoss()
P, TWO, GENERIC, ATTENTION = (
    problem(name) for name in ("mlp", "two outputs", "generic layers", "attention")
)
TIMES = problem("time first")
MODEL, W = P.model, P.model[0].weight
FOREIGN, NAN = (
    torch.zeros(5, 4, dtype=F64),
    torch.where(torch.arange(24).view(6, 4) == 9, torch.nan, X),
)
quiet = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")


def risk(
    model: Any = MODEL, data: Any = None, loss: Any = CE, params: Any = None, **options: Any
) -> EmpiricalRisk:
    return EmpiricalRisk(model, loss, [(X, Y)] if data is None else data, params, **options)


def lin(i: int = 4, o: int = 3, kind: Any = nn.Linear) -> Any:
    with torch.random.fork_rng(devices=[]):
        return kind(i, o, dtype=F64)


def one_bias() -> nn.Sequential:
    """Two layers with weights of their own and one bias: there is no common matrix."""
    model = nn.Sequential(lin(), nn.Tanh(), lin(3, 3))
    model[2].bias = model[0].bias
    return model


def branch(run: Callable[..., Tensor]) -> Written:
    return Written(run, first=lin(4, 5), second=lin(5, 3))


# ----------------------------------------------------------------------------- classes of all kinds
def function(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w1"].T).relu() @ params["w2"].T


CLASSES: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    # kinds, what they are given in place of what is right, error, part of the message
    (CLASSIC, {"params": [W, FOREIGN]}, ValueError, r"params\[1\] with shape \[5, 4\] is not a parameter of the"),
    (CLASSIC, {"params": [W, W]}, ValueError, r"params\[1\] is the same parameter as params\[0\]: the model's"),
    (CLASSIC, {"params": []}, ValueError, "`params` is empty"),
    (CLASSIC, {"model": risk()}, TypeError, r"The model is a EmpiricalRisk; .*take curvature\(risk, KFAC\),"),
    (CLASSIC, {"model": 3}, TypeError, "The model is a int; expected a torch.nn.Module, or a function"),
    ([*KFACS, *EXACT[:2]], {"model": function}, ValueError, r"a function needs `params` as a dict; it is called as"),
    (CLASSIC, {"loss": nn.CrossEntropyLoss(reduction="none")}, UnsupportedError,
     r'CrossEntropyLoss\(reduction=.none.\).*use "mean" or "sum"'),
    (SAMPLING, {"loss": nn.HuberLoss()}, ValueError,
     r"no likelihood is registered for the loss HuberLoss(.|\n)*@register_likelihood"),
    (CLASSIC, {"data": [(X, torch.full((6,), 3))]}, ValueError, "class index 3.*C = 3 classes"),
    (CLASSIC, {"loss": nn.MSELoss(), "data": [(X, torch.zeros(6).double())]}, ValueError,
     r"MSELoss needs a target of the output's shape \[6, 3\], got \[6\]"),
    (CLASSIC, {"data": [(X, torch.full((6,), -100))]}, ValueError, "No term of CrossEntropyLoss counts: every target"),
    (CLASSIC, {"data": [(X, Y), (NAN, Y)]}, NumericsError, "layer '0'.*statistic|The total loss is nan"),
    (KFACS, {"data": [(X, Y), (NAN, Y)], "check_deterministic": False}, NumericsError, "layer '0': the statistic"),
    (CLASSIC, {"of": TWO}, ValueError, r"The model returned a tuple; .*output=lambda o: o\[0\]"),
    (CLASSIC, {"of": TWO, "output": lambda out: out}, ValueError, "`output` selected a tuple; expected the tensor"),
]  # fmt: skip


@quiet
@pytest.mark.parametrize(
    ("kinds", "given", "error", "words"), CLASSES, ids=[words for *_, words in CLASSES]
)
def test_refusals_of_classes(
    kinds: list[Any], given: dict[str, Any], error: type[Exception], words: str
) -> None:
    p = given.get("of", P)
    inputs = {"model": p.model, "loss": p.loss, "params": p.params, "data": p.data, **given}
    inputs.pop("of", None)
    arguments = [inputs.pop(name) for name in ("model", "loss", "params", "data")]
    for kind in kinds:
        with unchanged(p.model, p.data), pytest.raises(error, match=words):
            kind(*arguments, **inputs).to_dense()


# --------------------------------------------------------------------------------------- all others
def batch(*given: Any, **options: Any) -> Any:
    return curvature(risk(data=given, **options), KFAC)


def no_shapes(params: Any = None) -> EmpiricalRisk:
    model = nn.Sequential(lin(4, 5), nn.LazyLinear(3)).double()
    return risk(model, params=params and params(model))


def whole_numbers() -> EmpiricalRisk:
    model = lin()
    model.scale = nn.Parameter(torch.ones(3, dtype=torch.long), requires_grad=False)
    return risk(model, params=list(model.parameters()))


def same_name(x: Tensor) -> Any:
    return {"score": x, "other": x}


def noisy(inner: nn.Module) -> Written:
    return Written(
        lambda m, x: m.inner(x * m.scale)[:, :3],
        inner=inner,
        scale=nn.Parameter(torch.ones(4).double()),
    )


def reentrant(m: Any, x: Tensor) -> Tensor:
    return m.second(checkpoint(m.first, x.requires_grad_(), use_reentrant=True))


def blows(m: Any, x: Tensor) -> Tensor:
    return m.second(m.div(m.first(x)))


class Affine(Accumulator):
    """An approximation of the user's own, which needs rows of inputs."""

    def update(self, batch: Any) -> None:
        self.add("a", batch.inputs.sum((0, 1)))

    def finish(self) -> Any:
        return self.value("nothing")


K, E, G = (kind(MODEL, CE, P.params, P.data) for kind in (*KFACS, GGNLinearOperator))
NORM = EmpiricalRisk(
    GENERIC.model, GENERIC.loss, GENERIC.data, [GENERIC.model[1].weight, GENERIC.model[1].bias]
)
AFTER = r'Entry "0.weight": .*got NoneType. Gradients in `.grad` are there after'
g = torch.ones(1, 1, 1)

REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    # models
    (lambda: risk(lambda x: x), ValueError, r"`model` is a function. Layers can only be recorded"),
    (lambda: risk(nn.Linear), ValueError, r"`model` is the class Linear: call it"),
    (lambda: risk([(X, Y)]), ValueError, "`model` is a list. Layers can only be recorded in a torch.nn.Module"),
    (lambda: risk(CE), ValueError, "has 0 parameters.*The arguments are model, loss and data, in this order"),
    (lambda: risk(lin().requires_grad_(False)), ValueError, "has 2 parameters; by default those that require"),
    (lambda: no_shapes(), ValueError, "The module '1' has no shapes yet: it is lazy.*Call the model once"),
    # parameters
    (whole_numbers, ValueError, "torch.int64.*only real floating-point parameters"),
    (lambda: risk(params=MODEL.named_parameters()), ValueError, r"a tuple, .*dict\(model.named_par"),
    (lambda: risk(params=["0.weight"]), ValueError, r"params\[0\], a str, is not a parameter"),
    (lambda: risk(params=MODEL), TypeError, r"`params` is a Sequential; .*list\(model.parameters\(\)\)"),
    (lambda: risk(params=W), TypeError, "`params` is a Parameter; expected a list"),
    # options of a risk
    (lambda: risk(example_axis=1), TypeError, "example_axis=1 is no dict from names of modules to axes"),
    (lambda: TIMES.risk(example_axis={"bdy": 1}), ValueError,
     r"example_axis=\{'bdy': 1\} matches no module of the model; they are \['body', 'head'\]"),
    (lambda: curvature(ATTENTION.risk(mask=lambda X, y: None)), ValueError, "`mask` returned NoneType; expected a"),
    (lambda: curvature(ATTENTION.risk(mask=lambda X, y: torch.ones(len(y), 3))), ValueError,
     r"`mask` returned torch.float32 \[3, 3\]; expected a bool tensor \[3, T\]"),
    # batches, outputs and losses
    (lambda: batch(X), ValueError, "Batch 0 is a Tensor; expected a pair"),
    (lambda: batch({"x": X}), ValueError, r"a mapping with keys \['x'\]; expected a pair \(X, y\) or a mapping with"),
    (lambda: curvature(P.risk(data=iter(P.data))).verify(), ValueError, r"`verify\(\)` needs a few examples of its"),
    (lambda: GGN(risk(Written(lambda m, x: same_name(m.l(x)), l=lin()))).to_dense(), ValueError,
     r"returned a dict with fields \['score', 'other'\].*output=lambda o: o"),
    # what layers did
    (lambda: curvature(risk(branch(reentrant), [(X.clone(), Y)])), UnsupportedError,
     r"layer 'first' ran under torch.no_grad\(\).*use_reentrant=False"),
    (lambda: curvature(risk(noisy(nn.BatchNorm1d(4, affine=False)).double()), DiagonalBlock),
     (NotImplementedError, RuntimeError), r"\['inner'\] are batch norm in training mode.*model.eval"),
    (lambda: curvature(risk(noisy(nn.Dropout(0.5))), DiagonalBlock), (NotImplementedError, RuntimeError),
     r"'inner' \(Dropout\).*model.eval"),
    (lambda: curvature(risk(Written(blows, first=lin(4, 5), second=lin(5), div=Written(lambda m, x: x / 0.0)))),
     NumericsError, "layer 'first': the statistic .* NaN or infinite entries"),
    (lambda: curvature(risk(Written(lambda m, x: (m.l(x) * 0).sqrt(), l=lin())), EKFAC, vectors=MonteCarlo()),
     NumericsError, "layer 'l': the statistic .* NaN or infinite entries"),
    # approximations
    (lambda: curvature(GENERIC.risk(), {"head": KFAC}), ValueError, r"No layer matches 'head'.*'1', '2', '4'\].*'Li"),
    (lambda: curvature(risk(), "kfac"), ValueError, "'kfac' is no approximation. Expected .* such .* Not its name"),
    (lambda: KFAC(), TypeError, r"KFAC\(\) is made by operators.*curvature\(risk, KFAC\), and .* KFAC.using\(\.\.\.\)"),
    (lambda: EKFAC(kfac_approx="reduce"), TypeError, r"the class itself.* EKFAC.using\(kfac_approx='reduce'\)"),
    (lambda: DiagonalBlock(), TypeError, r"DiagonalBlock\(\) is made by operators, for each layer"),
    (lambda: curvature(GENERIC.risk(), {"1": EKFAC}, default=DiagonalBlock), UnsupportedError,
     r"layer '1' \(LayerNorm\) can't have EKFAC.*DiagonalBlock or FullBlock"),
    (lambda: curvature(risk(one_bias()), {"2": KFAC}, default=DiagonalBlock), UnsupportedError,
     r"layer '2'.*shared by \['0', '2'\] as different matrices"),
    (lambda: curvature(NORM, Affine), UnsupportedError,
     r"layer '1' \(LayerNorm\) has no affine rule.*@register_rule\(LayerNorm\)"),
    (lambda: curvature(risk(one_bias()), Affine), UnsupportedError, r"layer '0' \(Linear\) is shared by several"),
    (lambda: curvature(problem("tied").risk(), Affine, vectors=MonteCarlo()), UnsupportedError,
     "layer 'embedding': its parameter is multiplied with in 2 roles by"),
    (lambda: curvature(risk(), Affine), KeyError, "layer '0': nothing was added to 'nothing' yet"),
    # inverses and other operations
    (lambda: GGN(risk()).to(torch.float32), NotImplementedError, r"GGN owns no tensors .*model.to\(...\)"),
    (lambda: K @ [p.grad for p in MODEL.parameters()], TypeError, AFTER),
    (lambda: compute_eigenvalue_correction_linear_weight_sharing(g, g[0], g, g[0], _force_strategy="fast"), ValueError,
     "Invalid _force_strategy: 'fast'. Supported"),
]  # fmt: skip


@quiet
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad", "ignore:Using a target size"
)
@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refusals(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with (
        unchanged(*(p.model for p in (P, TWO, GENERIC, ATTENTION, TIMES))),
        pytest.raises(error, match=words),
    ):
        call()


@pytest.mark.parametrize(
    "make",
    [
        GGN,
        GGNFactor,
        Hessian,
        Jacobian,
        ActivationHessian,
        curvature,
        BlockwiseLinearOperator,
        CurvatureEstimator,
    ],
)
def test_model_loss_and_data_in_place_of_a_risk(make: Callable[..., Any]) -> None:
    words = rf"^{make.__name__} takes an EmpiricalRisk, got a Sequential: .* EmpiricalRisk\(model, loss, data\)\.$"
    for number in range(1, 5):
        with pytest.raises(TypeError, match=words):
            make(*[MODEL, CE, [(X, Y)], list(MODEL.parameters())][:number])
    with pytest.raises(TypeError, match=words):
        make(risk=MODEL)


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


DID: dict[Any, str] = {
    lambda m, x: m.first(x)[:, :3]: "layer 'second' .Linear. was never called in any batch",
    in_place: "input of layer 'first' was modified in place after the layer read it.*x = x . y",
    no_grad: r"layer 'first' ran under torch.no_grad\(\).*use_reentrant=False.*\['first.weight', 'first.bias'\]",
    half_detached: r"'first' .Linear. does not reach the output in any batch.*\['first.weight', 'first.bias'\]",
}


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock])
@pytest.mark.parametrize(
    "vectors", [Exact(), MonteCarlo(2), ForwardOnly()], ids=lambda v: v.fisher_type
)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_layers_did(approximation: Any, vectors: Any, frozen: bool) -> None:
    forward = isinstance(vectors, ForwardOnly)
    if forward and approximation is not KFAC:
        return
    for run, words in list(DID.items())[: 2 if forward else 4]:
        model = branch(run).requires_grad_(not frozen)
        with unchanged(model), pytest.raises(ValueError, match=words):
            curvature(risk(model, params=list(model.parameters())), approximation, vectors=vectors)


# ------------------------------------------------------------------------------- right, not refused


TOKENS = torch.tensor([[0, 0], [1, 0], [2, 3], [4, 4], [0, 1], [1, 1]])


def test_embeddings_that_scale_gradients() -> None:
    """Their gradients are the user's; curvature is that without the option, wherever it listens, or
    is refused.
    """
    found, dense, grads = [], [], []
    for scales in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(5, 3, scale_grad_by_freq=scales), nn.Flatten(), nn.Linear(6, 3)
        ).double()
        for vectors in (Exact(), Empirical()):
            estimator = CurvatureEstimator(risk(model, ()), vectors=vectors)
            with estimator.listen((TOKENS, Y)):
                model(TOKENS)
            found.append(estimator.operator.to_dense())
        CE(model(TOKENS), Y).backward()
        grads.append(model[0].weight.grad)

        def looks_up(m: Any, x: Tensor, scales: bool = scales) -> Tensor:
            return m.last(functional.embedding(x, m.table, scale_grad_by_freq=scales).flatten(1))

        table = risk(Written(looks_up, table=model[0].weight, last=model[2]), [(TOKENS, Y)])
        dense.append([kind(table).to_dense() for kind in (GGN, Hessian, Jacobian)])
        if scales:
            with pytest.warns(
                CurvatureWarning, match="exact diagonal.*a rule that autograd contradicts"
            ):
                curvature(table, KFAC)
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*dense)
    assert not torch.allclose(*grads)


# ----------------------------------------------------------------------------------------- warnings
def broadcast() -> nn.Module:
    query = nn.Buffer(torch.ones(2).double())
    return Written(lambda m, x: m.body(x) + m.code(m.query), body=lin(), code=lin(2), query=query)


WARNED: list[tuple[Callable[[], EmpiricalRisk], str]] = [
    (lambda: risk(one_bias()), r"shared by \['0', '2'\]"),
    (lambda: GENERIC.risk(), "LayerNorm: its rule LayerNormRule is not that of an affine layer"),
    (lambda: risk(nn.Sequential(nn.EmbeddingBag(5, 3, mode="max"), lin(3)).double(), [(TOKENS, Y)]), "max"),
    (lambda: risk(nn.utils.parametrizations.weight_norm(lin())), r"'the model' \(ParametrizedLinear.*weight"),
    (lambda: risk(broadcast()), r"'the model' \(Written: \['code.weight', 'code.bias'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), WARNED, ids=[words for _, words in WARNED])
def test_warnings_give_reasons(make: Callable[[], EmpiricalRisk], words: str) -> None:
    given = make()
    with unchanged(given.model), pytest.warns(CurvatureWarning, match=words):
        diagonal = curvature(given, KFAC).diagonal()
    if "code" in words:
        close(diagonal[15:], GGN(given).to_dense().diagonal()[15:])


def test_warnings_point_at_the_line_outside_of_the_package() -> None:
    model = nn.Sequential(nn.PReLU(), lin()).double()
    data, params = [(X, Y)], list(model.parameters())
    makers: list[Callable[[], Any]] = [
        lambda: curvature(risk(model)),
        lambda: BlockwiseLinearOperator(risk(model)),
        lambda: CurvatureEstimator(risk(model)).update(data[0]),
        *(lambda kind=kind: kind(model, CE, params, data) for kind in KFACS),
        *(
            lambda kind=kind: kind(model, CE, params, data, check_deterministic=False).trace
            for kind in KFACS
        ),
    ]
    for make in makers:
        with pytest.warns(CurvatureWarning, match=r"get their exact diagonal") as caught:
            make()
        assert {warning.filename for warning in caught} == {__file__}


# --------------------------------------------------------------------------------- rules and verify
class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(normal(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x @ self.kernel


class Odd(Kernel):
    pass


@register_rule(Kernel)
class Forgetful(AffineRule):
    """Forgets the factor 2."""

    def patterns(self, module: Any) -> dict[str, str]:
        return {"kernel": "i o -> o i"}

    def inputs(self, module: Any, x: Tensor) -> Tensor:
        return x[:, None]

    def grads(self, module: Any, g: Tensor) -> Tensor:
        return g[:, :, None]


@register_rule(Odd)
class OddRule(LayerRule):
    def patterns(self, module: Any) -> dict[str, str]:
        return {"weight": "i o -> o i"}


MIXED = Written(lambda m, x: m.last(m.first(x) - m.first(x).mean(0)), first=lin(4, 5), last=lin(5))
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: curvature(risk(nn.Sequential(Kernel()), check=False)).verify(), VerificationError,
     r"check \(a\) gradients: layer '0' .*by autograd"),
    (lambda: BlockwiseLinearOperator(risk(MIXED), KFAC, compute=False).verify(), UnsupportedError,
     "examples of a batch depend on each other"),
    (lambda: curvature(risk(nn.Sequential(Odd())), DiagonalBlock), ValueError,
     r"OddRule.patterns names \['weight'\], but Odd has the parameters \['kernel'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_wrong_rules_and_likelihoods_are_named(
    call: Any, error: type[Exception], words: str
) -> None:
    with unchanged(MODEL, MIXED), pytest.raises(error, match=words):
        call()
