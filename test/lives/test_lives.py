"""Ordinary models through whole lives: one line per model in `models.py`, one function per life
here.

Stored is kept, resumed is uninterrupted, micro-batches are one batch, two processes are one, all is
what autograd says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlinops_plus import (
    EKFAC,
    GGN,
    CurvatureEstimator,
    FullBlock,
    Hessian,
    curvature,
)
from test.cases import close, same
from test.helpers import DEVICE
from test.lives.lives import (
    KINDS,
    Training,
    determined,
    estimator_of,
    in_parts,
    loss_of,
    operator_of,
    risk_of,
    through_a_file,
    trained,
    vector,
)
from test.lives.models import MODELS, OF_PACKAGES, Ordinary

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*exact diagonal:curvlinops_plus.errors.CurvatureWarning"
)


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name in OF_PACKAGES else name
        for name in MODELS
    ]
)
def ordinary(request: pytest.FixtureRequest) -> Ordinary:
    found = MODELS[request.param]
    if found.missing:
        pytest.skip(f"{found.needs} is not installed")
    return found


@pytest.fixture
def name(request: pytest.FixtureRequest, ordinary: Ordinary) -> str:
    return next(name for name, one in MODELS.items() if one is ordinary)


# ------------------------------------------------------------------------------- stored and resumed
def test_operator_in_a_new_process(name: str, elsewhere: list[dict[str, Any]]) -> None:
    found = elsewhere[0]["read"][name]
    assert isinstance(found, dict), found
    for kind in KINDS:
        same(found[kind], operator_of(name, kind).to_dense().cpu())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("listens", [False, True], ids=["update", "listen"])
def test_resumed_estimator(ordinary: Ordinary, kind: str, listens: bool) -> None:
    def show(estimator: CurvatureEstimator, seed: int) -> None:
        X, y = ordinary.batch(ordinary.examples(5, seed))
        if listens:
            with estimator.listen((X, y)):
                output = estimator.risk.model(X)
            loss_of(ordinary.loss(), output, y).backward()
        else:
            estimator.update((X, y))

    estimator = estimator_of(ordinary, ordinary.make(), kind)
    for seed in range(2):
        show(estimator, seed)
    estimator.refresh()
    resumed = estimator_of(ordinary, ordinary.make(), kind)
    resumed.load_state_dict(through_a_file(estimator.state_dict()))
    for seed in range(2, 4):
        for one in (estimator, resumed):
            show(one, seed)
        same(resumed.inverse().to_dense(), estimator.inverse().to_dense())
        same(resumed.operator.to_dense(), estimator.operator.to_dense())
    for one in (estimator, resumed):
        one.refresh()
    same(resumed.inverse().to_dense(), estimator.inverse().to_dense())
    assert (resumed.updates, resumed.examples, resumed.weight) == (4, 20, estimator.weight)


def test_resumed_optimizer(ordinary: Ordinary) -> None:
    def step(training: Training, number: int) -> None:
        examples = ordinary.examples(6, number)
        training.step([examples[:2], examples[2:]])

    training, resumed = Training(ordinary), Training(ordinary)
    for number in range(3):
        step(training, number)
    resumed.load_state_dict(through_a_file(training.state_dict()))
    for number in range(3, 6):
        for one in (training, resumed):
            step(one, number)
        same(vector(resumed.model), vector(training.model))


# --------------------------------------------------------------------------------- parts of a batch
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_are_one_batch(ordinary: Ordinary, kind: str) -> None:
    model, examples = ordinary.make(), ordinary.examples(6, 1)
    whole = ordinary.batch(examples)
    parts = [ordinary.batch(part) for part in (examples[:2], examples[2:3], examples[3:])]
    one, several = (
        curvature(risk_of(ordinary, model, data), KINDS[kind]) for data in ([whole], parts)
    )
    close(determined(several), determined(one), 1e-12)
    first = ordinary.batch(ordinary.examples(3, 0))  # EKFAC has its bases from it
    by_whole, by_parts = (estimator_of(ordinary, model, kind) for _ in range(2))
    for estimator, batches in ((by_whole, [whole]), (by_parts, parts)):
        estimator.update(first)
        for number, batch in enumerate(batches):
            estimator.update(batch, decay=1.0 if number else None)
    close(determined(by_parts.operator), determined(by_whole.operator), 1e-12)


def test_two_processes_are_one(
    name: str, ordinary: Ordinary, elsewhere: list[dict[str, Any]]
) -> None:
    expected = in_parts(ordinary)
    for process in elsewhere:
        found = process["in parts"][name]
        assert isinstance(found, dict), found
        for what, value in expected.items():
            close(found[what], value, ordinary.rtol, what)


# -------------------------------------------------------------------------------- by autograd alone
class ByAutograd:
    """Derivatives of the loss of a batch in the parameters, by PyTorch alone.

    Attributes:
        ggn, hessian: The matrices.
        rtol: How close the Hessian is: functions without second derivatives have differences of
            gradients.
    """

    def __init__(self, ordinary: Ordinary, model: nn.Module, batch: Any) -> None:
        self.model, self.params, self.loss, (self.X, self.y) = (
            model,
            trained(model),
            ordinary.loss(),
            batch,
        )
        output = self.output()
        named = output if isinstance(output, dict) else {"": output}
        J = torch.stack(
            [flat(entry, self.params) for part in named.values() for entry in part.flatten()]
        )
        at = {name: part.detach().requires_grad_() for name, part in named.items()}
        value = loss_of(self.loss, at if isinstance(output, dict) else at[""], self.y)
        gradient = flat(value, list(at.values()), create_graph=True)
        curved = torch.stack([flat(entry, list(at.values())) for entry in gradient])
        self.ggn = J.T @ curved @ J
        try:
            self.hessian, self.rtol = (
                torch.stack([flat(entry, self.params) for entry in self.gradient()]),
                1e-10,
            )
        except NotImplementedError:
            self.hessian, self.rtol = self.differences(), 1e-6

    def output(self) -> Any:
        with sdpa_kernel(SDPBackend.MATH):  # others have no second derivatives
            return self.model(self.X)

    def gradient(self) -> Tensor:
        return flat(loss_of(self.loss, self.output(), self.y), self.params, create_graph=True)

    def differences(self, h: float = 1e-4) -> Tensor:
        """Central differences of gradients."""
        columns, here = [], nn.utils.parameters_to_vector(self.params).detach()
        for step in h * torch.eye(len(here)).to(here):
            sides = []
            for at in (here + step, here - step):
                nn.utils.vector_to_parameters(at, self.params)
                sides.append(self.gradient().detach())
            columns.append((sides[0] - sides[1]) / (2 * h))
        nn.utils.vector_to_parameters(here, self.params)
        return torch.stack(columns)


def flat(value: Tensor, at: list[Any], **options: Any) -> Tensor:
    """The gradient as one vector."""
    grads = torch.autograd.grad(value, at, retain_graph=True, allow_unused=True, **options)
    return torch.cat(
        [
            (torch.zeros_like(t) if g is None else g).flatten()
            for t, g in zip(at, grads, strict=True)
        ]
    )


def test_what_autograd_says(ordinary: Ordinary) -> None:
    model, examples = ordinary.make(), ordinary.examples(5, 0)
    expected = ByAutograd(ordinary, model, ordinary.batch(examples))
    risk = risk_of(ordinary, model, [ordinary.batch(examples[:2]), ordinary.batch(examples[2:])])
    close(GGN(risk).to_dense(), expected.ggn, ordinary.rtol, "GGN")
    # of which plain autograd has no second derivatives
    if not any(isinstance(m, nn.EmbeddingBag) for m in model.modules()):
        close(
            Hessian(risk).to_dense(), expected.hessian, max(expected.rtol, ordinary.rtol), "Hessian"
        )
    close(curvature(risk, EKFAC).trace, expected.ggn.trace(), ordinary.rtol, "EKFAC's trace")
    K = curvature(risk, FullBlock, default=FullBlock)
    block_of = {
        key: group.name for entry in K.plan for group in entry.layer.groups for key in group.keys
    }
    blocks = [name for key, p in risk.params.items() for name in [block_of[key]] * p.numel()]
    mask = torch.tensor([[one == two for two in blocks] for one in blocks], device=DEVICE)
    close(K.to_dense(), expected.ggn * mask, ordinary.rtol, "blocks")
