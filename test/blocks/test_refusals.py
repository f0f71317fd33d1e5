"""What operators of blocks refuse, say and print in words, and what `verify()` finds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FromDistribution,
    FullBlock,
    KFOCLinearOperator,
    NearestKronecker,
    RelativeDamping,
    ScaledIdentity,
    UnsupportedError,
    VerificationError,
    curvature,
    register_likelihood,
    save,
)
from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.verify import LOSS_CHECK
from curvlinops_plus.linalg import Dense, Diagonal, LinearOperator
from test.cases import close, problem
from test.helpers import Written, normal, seeded

MODELS: dict[str, Any] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "norms": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)
    ),
}
DATA = [(normal(5, 3), normal(5, 2, seed=1)), (normal(2, 3, seed=2), normal(2, 2, seed=3))]


def risk(model: str | nn.Module = "plain", data: Any = DATA, **options: Any) -> EmpiricalRisk:
    model = MODELS[model]().double() if isinstance(model, str) else model
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=p.dtype, generator=seeded(p.numel()))
    return EmpiricalRisk(model, nn.MSELoss(), data, **options)


def classic(kind: Any, data: Any = DATA, **options: Any) -> Any:
    r = risk()
    return kind(r.model, nn.MSELoss(), list(r.model.parameters()), data, **options)


def own(function: Callable[[Any, Tensor], Tensor], **parts: Any) -> Any:
    """A function of modules and of parameters, which are given by their shapes."""
    made = {
        k: part if isinstance(part, nn.Module) else nn.Parameter(torch.rand(*part))
        for k, part in parts.items()
    }
    return Written(function, **made).double()


# ----------------------------------------------------------------------------------------- refusals


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


def streams(kind: Any = KFAC, X: Any = DATA[0][0], **options: Any) -> CurvatureEstimator:
    estimator = CurvatureEstimator(risk(), kind, **options)
    estimator.update((X, DATA[0][1][: len(X)]))
    return estimator


def hears(use: Callable[[nn.Module, Tensor], object]) -> None:
    estimator = CurvatureEstimator(risk())
    with estimator.listen(DATA[0]):
        use(estimator.risk.model, DATA[0][0])


def loads(kind: Any = KFAC, decay: float = 1.0, **changes: Any) -> None:
    state = {
        key: value
        for key, value in {**streams().state_dict(), **changes}.items()
        if value is not Mine
    }
    CurvatureEstimator(risk(), kind, decay=decay).load_state_dict(state)


def both_ways(model: nn.Module, X: Tensor) -> None:
    model(X)
    model(X)


def load_into(state: Any) -> None:
    BlockwiseLinearOperator.from_state_dict(state, risk().model, DATA)


MATRIX = Dense(torch.eye(2))
SWEEPS = NearestKronecker.using(max_bytes=0)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: curvature(risk(), {"Linear": KFAC}), ValueError, "A key is a name, a glob or the class"),
    (lambda: risk(reduction="sum"), ValueError, "reduction='sum' contradicts the loss"),
    # options of approximations
    (lambda: curvature(risk(), KFAC.using(kfac_approx="x")), ValueError, "kfac_approx='x'; expected one of 'expand', 'reduce'"),
    (lambda: curvature(risk(), EKFAC.using(basis_rtol=1.0)), ValueError, "basis_rtol=1; expected a number at least 0 and below 1"),
    (lambda: curvature(risk(), SWEEPS.kind.using(power_iterations=0)), ValueError, "power_iterations=0; expected an integer of at least 1"),
    (lambda: curvature(risk(), ScaledIdentity.using(scale=-1.0)), ValueError, "scale=-1; expected a number at least 0"),
    (lambda: curvature(risk(), TNT.using(max_bytes=100)), UnsupportedError, "factor G takes .*above the limit of 100"),
    (
        lambda: curvature(risk(), SWEEPS.kind.using(max_factor_bytes=100)),
        UnsupportedError,
        r"'0': its factor G takes .*give NearestKronecker a larger limit",
    ),
    (
        lambda: curvature(risk(), FullBlock.using(max_bytes=9)),
        UnsupportedError,
        r"'0': its full block is 16 x 16.*Use DiagonalBlock, KFAC or EKFAC",
    ),
    # memory
    (lambda: curvature(risk(), KFAC, max_bytes=0), ValueError, "max_bytes=0 must be an integer of at least 1"),
    (lambda: curvature(risk(), EKFAC, max_bytes=300), UnsupportedError, r"'0': EKFAC needs .*DiagonalBlock"),
    (lambda: curvature(risk(), Mine, max_bytes=9), UnsupportedError, r"Mine does not say how much memory.*`needs\(\)`"),
    # damping and algebra
    (lambda: (-curvature(risk())).inverse((1, 1)), ValueError, "a positive multiple of the curvature; this is -1 "),
    (lambda: curvature(risk(), max_kept_bytes=-1), ValueError, "max_kept_bytes=-1 must be an integer of at least 0"),
    (lambda: curvature(risk()).inverse((1, 1), use_exact_damping=True), ValueError, "or use exact damping, not both"),
    (lambda: save(Path("x"), streams()), TypeError, "save takes a state_dict, or what has one.* and then a path"),
    (lambda: load_into(Path("x")), ValueError, r"not a state .*, as load\(path\) reads it"),
    (lambda: curvature(risk()).load_state_dict("x"), ValueError, r"not a state .*, as load\(path\) reads it"),
    (lambda: load_into(nn.Tanh()), ValueError, r"state_dict\(\) returns.* got a Tanh"),
    (lambda: save(MATRIX @ MATRIX, Path("x")), TypeError, "save takes a state_dict, or what has one .*a Product"),
    # classes
    (lambda: classic(KFOCLinearOperator, fisher_type="forward-only"), UnsupportedError, "is made of gradients, and"),
    # estimators
    (lambda: CurvatureEstimator(risk()).operator, ValueError, "has seen no batch yet"),
    (lambda: CurvatureEstimator(risk(), decay=0), ValueError, "decay=0 is outside of"),
    (lambda: CurvatureEstimator(risk()).update(DATA[0], decay=1.5), ValueError, r"decay=1\.5 is outside of"),
    (lambda: streams(X=DATA[0][0][:0]), ValueError, "no examples"),
    (lambda: streams(SWEEPS), UnsupportedError, r"layer '0': NearestKronecker makes several sweeps over the same data"),
    (lambda: streams(Twice).operator, UnsupportedError, r"(?s)'0': Twice makes several sweeps.*curvature\(risk"),
    (lambda: streams(DiagonalBlock).merge(streams(KFAC)), ValueError, "Can't merge estimators that differ in layers"),
    (lambda: hears(lambda model, X: None), ValueError, "called 0 times inside `listen`"),
    (lambda: hears(both_ways), ValueError, "called 2 times inside `listen`"),
    (lambda: hears(lambda model, X: torch.no_grad()(model)(X)), UnsupportedError, r"ran under torch\.no_grad"),
    (lambda: hears(lambda model, X: model(X).sum().backward()), ValueError, "after the block, not inside"),
    (lambda: loads(draws=Mine), ValueError, r"lacks \['draws'\]; is the file cut off"),
    (lambda: loads(decay=0.5), ValueError, r"decay: the state has 1\.0, this one 0\.5"),
    (lambda: loads(DiagonalBlock), ValueError, "mismatch in layers, '0'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refusals(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock])
def test_damping_of_a_negative_multiple(approximation: Any) -> None:
    """An indefinite multiple has an inverse; a semi-definite matrix less a multiple of the identity
    is refused.
    """
    K, eye, c = curvature(risk(), approximation), torch.eye(26, dtype=torch.float64), -0.5
    close((c * K).inverse(0.1).to_dense() @ (c * K.to_dense() + 0.1 * eye), eye, 1e-6)
    with pytest.raises(
        ValueError,
        match='block "0": Expected the damping of a positive semi-definite matrix to be at',
    ):
        K.shift(-0.2).inverse(0.1)
    close((c * K).inverse(c * 0.1).to_dense(), K.inverse(0.1).to_dense() / c)
    close(K.shift(-0.2).inverse(0.3).to_dense(), K.inverse(0.1).to_dense())
    close(
        (c * K).inverse(RelativeDamping(0.1)).to_dense(),
        K.inverse(RelativeDamping(0.1)).to_dense() / c,
    )


@pytest.mark.filterwarnings("ignore::curvlinops_plus.CurvatureWarning")
def test_forward_only_names_all_layers_that_need_gradients_before_anything_runs() -> None:
    class Fails(nn.Sequential):
        def forward(self, x: Any) -> Any:
            raise AssertionError("the model runs")

    r = risk(Fails(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU()).double())
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


# -------------------------------------------------------------------------------- parameters, plans


def test_the_mapping_has_every_parameter_of_tied_layers() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.three(m.two(m.one(x).tanh()))

    model = own(
        forward, one=nn.Linear(3, 3), two=nn.Linear(3, 3), three=nn.Linear(3, 2, bias=False)
    )
    model.two.weight = model.one.weight
    params = [model.two.bias, model.three.weight, model.one.weight, model.one.bias]
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), DATA, params), DiagonalBlock)
    assert K.mapping == {"one": {"weight": 2, "bias": 3, "two.bias": 0}, "three": {"weight": 1}}
    for name in ("tied", "tied with two biases", "tied autoencoder", "tied transformer"):
        p = problem(name)
        positions = [
            at for layer in p.curvature(DiagonalBlock).mapping.values() for at in layer.values()
        ]
        assert sorted(positions) == list(range(len(p.params)))


def test_names_come_before_globs_and_the_nearest_types_last() -> None:
    chosen = {
        nn.Module: FullBlock,
        nn.Linear: TNT,
        "*2": EKFAC,
        "2": DiagonalBlock,
        "4": ScaledIdentity,
    }
    K = curvature(risk("norms"), chosen)
    kinds = ["TNT", "FullBlock", "DiagonalBlock", "FullBlock", "ScaledIdentity"]
    assert [repr(entry.approximation) for entry in K.plan] == kinds
    K = curvature(risk("norms"), {nn.Linear: TNT, "*": FullBlock})
    assert {repr(entry.approximation) for entry in K.plan} == {"FullBlock"}


def scaled() -> nn.Module:
    """Reads the weight of a layer norm once more, which the first sweep finds out."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x) * m.norm.weight
        return m.head(m.gate(x, x))

    return Written(forward, norm=nn.LayerNorm(4), gate=nn.Bilinear(4, 4, 4), head=nn.Linear(4, 2))


def test_a_plan_that_is_made_anew_is_reported_once() -> None:
    """What reads the weight of a norm once more is found in the first batch; the warning points to
    the caller.
    """
    batch, loss = (torch.rand(5, 4), torch.rand(5, 2)), nn.MSELoss()
    made: list[Any] = []
    steps: list[tuple[Callable[[], object], int]] = [
        (lambda: made.append(curvature(EmpiricalRisk(scaled(), loss, [batch]), EKFAC)), 1),
        (lambda: made[0].compute(), 0),
        (lambda: made.append(CurvatureEstimator(EmpiricalRisk(scaled(), loss, ()))), 0),
        (lambda: made[1].update(batch), 1),
        (lambda: (made[1].update(batch), made[1].operator), 0),
    ]
    for step, number in steps:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
        own = [w for w in found if issubclass(w.category, CurvatureWarning)]
        assert ["exact diagonal" in str(w.message) for w in own] == [True] * number
        assert all(w.filename == __file__ for w in own)


# ------------------------------------------------------------------------------------------- verify


class Sharpened(nn.CrossEntropyLoss):
    """A loss whose likelihood is another one's."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(1.01 * input, target)


register_likelihood(Sharpened)(
    lambda loss: FromDistribution(lambda f: torch.distributions.Categorical(logits=f))
)


def _operator(loss: nn.Module, gap: float, dtype: torch.dtype) -> LinearOperator:
    """Of a model whose outputs are about `gap` apart."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight *= 0.1
        model.bias.copy_(gap * torch.tensor([1.0, 0.0, 0.3, -0.5]))
    X, y = torch.rand(5, 3).to(dtype), torch.tensor([0, 1, 0, 3, 0])
    if not isinstance(loss, nn.CrossEntropyLoss):
        y = torch.rand(5, 4).to(dtype).round()
    return curvature(EmpiricalRisk(model.to(dtype), loss, [(X, y)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1.0, 16.0, 1000.0])
@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)],
)
def test_a_saturated_loss_passes(loss: nn.Module, gap: float, dtype: torch.dtype) -> None:
    found = _operator(loss, gap, dtype).verify()  # type: ignore[attr-defined]
    assert any(check == LOSS_CHECK for _, check, _ in found.rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1.0, 12.0, 1000.0])
def test_a_wrong_likelihood_is_found_also_there(gap: float, dtype: torch.dtype) -> None:
    with pytest.raises(
        VerificationError, match=r"loss Sharpened, check \(c\) loss Hessian.*with all its options"
    ):
        _operator(Sharpened(), gap, dtype).verify()  # type: ignore[attr-defined]
