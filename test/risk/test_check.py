"""The self-check: what a layer's recorded calls don't say is right nevertheless, or refused without
being asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    GGNLinearOperator,
    UnsupportedError,
    curvature,
)
from test.cases import close, unchanged
from test.helpers import seeded

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")

X, Y = torch.randn(7, 4, generator=seeded(1)).double(), torch.arange(7) % 3


def risk_of(model: nn.Module, data: Any = None, **options: Any) -> EmpiricalRisk:
    """A small classification problem."""
    return EmpiricalRisk(
        model, nn.CrossEntropyLoss(), [(X, Y)] if data is None else data, **options
    )


def exact(model: nn.Module, data: Any = None) -> Tensor:
    params = list(model.parameters())
    return GGNLinearOperator(
        model, nn.CrossEntropyLoss(), params, [(X, Y)] if data is None else data
    ).to_dense()


class Around(nn.Module):
    """Something strange between two linear layers."""

    def __init__(
        self, middle: Callable[[Any, Tensor], Tensor] | None = None, **modules: nn.Module
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.calls, self.strange = nn.Linear(4, 6), nn.Linear(6, 3), 0, middle
        for name, module in modules.items():
            self.add_module(name, module)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.tanh(h if self.strange is None else self.strange(self, h)))


class Scale(nn.Module):
    """A learned scale per channel, in a module without a rule."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.gamma, self.run, self.calls, self.factor = nn.Parameter(torch.ones(6)), run, 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma * self.factor if self.run is None else self.run(self, x)


def scaled(run: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Around(lambda self, h: self.scale(h), scale=Scale(run))


class Forces(Around):
    """Energy and forces: the forward pass differentiates, so the layers are read by a backward pass
    too.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = super().forward(x)
            (force,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + force[:, :3]


class OtherWeights(Around):
    """Calls a layer with other tensors than its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(
            functional_call(self.a, {"weight": 2 * self.a.weight, "bias": self.a.bias}, (x,)).tanh()
        )


def set_around(factor: float) -> Callable[[Any, Tensor], Tensor]:
    def middle(self: Any, h: Tensor) -> Tensor:
        self.scale.factor, before = factor, self.scale.factor
        out = self.scale(h)
        self.scale.factor = before
        return out

    return middle


def counted(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.gamma * (1 + self.calls)


def swapped(self: Any, h: Tensor) -> Tensor:
    order = torch.arange(len(h))
    order[[0, -1]] = order[[-1, 0]]
    return h.tanh() + self.a(h[:, :4][order]).tanh()[order]


def halves(self: Any, h: Tensor) -> Tensor:
    k = len(h) // 2
    return torch.cat([self.one(h[:k]), self.other(h[k:])])


def of_one_weight(self: Any, h: Tensor) -> Tensor:
    return h + self.a(h.flip(0)[:, :4]).flip(0)


#: Models, and words of the refusal; None where the numbers are right.
STRANGE: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "forces": (Forces, "something differentiated in the forward pass"),
    "other weights": (OtherWeights, None),
    "norm read outside": (
        lambda: Around(lambda self, h: self.n(h) * self.n.weight, n=nn.LayerNorm(6)),
        None,
    ),
    "scale read by the parent": (
        lambda: Around(lambda self, h: self.scale(h) + self.scale.gamma, scale=Scale()),
        None,
    ),
    "attribute around the call": (
        lambda: Around(set_around(3.0), scale=Scale()),
        r"layer 'scale' \(Scale\)",
    ),
    "number of examples": (
        scaled(lambda self, x: x * self.gamma / len(x)),
        "depend on each other.*`len",
    ),
    "statistics by hand": (
        scaled(lambda self, x: (x - x.mean(0)) * self.gamma),
        "depend on each other",
    ),
    "counter": (scaled(counted), "Two evaluations of the model"),
    "noise": (
        lambda: Around(lambda self, h: h + torch.randn_like(h)),
        "Two evaluations",
    ),
    "examples attend to each other": (
        lambda: Around(lambda self, h: h.cumsum(0)),
        "3 of 7 examples.*depend",
    ),
    "examples change places": (lambda: Around(swapped), "layer 'a'"),
    "flipped examples": (lambda: Around(of_one_weight), "layer 'a'"),
    "halves through two layers": (
        lambda: Around(halves, one=nn.Linear(6, 6), other=nn.Linear(6, 6)),
        "",
    ),
}


@pytest.mark.parametrize("approximation", [DiagonalBlock, EKFAC])
@pytest.mark.parametrize("name", STRANGE)
def test_right_or_refused(name: str, approximation: Any) -> None:
    make, words = STRANGE[name]
    model = make()
    try:
        K = curvature(risk_of(model), approximation)
    except (UnsupportedError, RuntimeError) as error:
        assert re.search("right$" if words is None else words, str(error)), error  # noqa: PT017
    else:
        close(K.trace, exact(model).trace(), 1e-6 if "half" in name else 1e-9)


@pytest.mark.parametrize(
    "name", ["forces", "other weights", "norm read outside", "scale read by the parent"]
)
def test_frozen_parameters_too(name: str) -> None:
    make, words = STRANGE[name]
    model = make()
    params, whole = list(model.parameters()), exact(model)
    model.requires_grad_(False)
    try:
        K = curvature(risk_of(model, params=params), DiagonalBlock)
    except UnsupportedError as error:
        assert re.search("right$" if words is None else words, str(error)), error  # noqa: PT017
    else:
        close(K.diagonal(), whole.diagonal())


@pytest.mark.parametrize("N", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "name", ["attribute around the call", "examples change places", "statistics by hand"]
)
def test_batches_of_any_size_and_estimators(name: str, N: int) -> None:
    model, batch = STRANGE[name][0](), (X[:N], Y[:N])
    estimator = CurvatureEstimator(risk_of(model, ()), DiagonalBlock)
    if name == "statistics by hand":
        with pytest.raises(UnsupportedError, match="by the layer's rule"):
            estimator.update((X[:2], Y[:2]))
        return
    estimator.update(batch)
    close(estimator.operator.trace, exact(model, [batch]).trace())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_no_excuse(dtype: torch.dtype) -> None:
    model, data = Around(set_around(3.0), scale=Scale()), [(X.to(dtype), Y)]
    expected = exact(model).trace()
    close(
        curvature(risk_of(model.to(dtype), data), DiagonalBlock).trace.to(expected), expected, 0.05
    )


# -------------------------------------------------------------------------------- when it is looked
class Later(nn.Module):
    """Mixes examples in batches whose number, from one, is among these."""

    def __init__(self, *strange: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.strange = nn.Linear(6, 3).double(), strange

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x[:, :6])
        return out.cumsum(0) if int(x[0, -1]) in self.strange else out


def numbered(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    data = [(torch.randn(5, 7).double(), torch.arange(5) % 3) for _ in range(count)]
    for k, (x, _) in enumerate(data, 1):
        x[:, -1] = k
    return data


@pytest.mark.parametrize("number", range(1, 9))
def test_first_and_fourth_batches_or_every_one(number: int) -> None:
    model, data = Later(number), numbered(8)

    def run(check: Any) -> None:
        curvature(risk_of(model, data, check=check), DiagonalBlock)

    run(False)
    with pytest.raises(UnsupportedError, match="depend on each other"):
        run("every")
    if number in (1, 4):
        with pytest.raises(UnsupportedError, match="depend on each other"):
            run(True)
    else:
        run(True)


def test_batches_that_call_other_layers() -> None:
    class Sometimes(Later):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return self.more(h).cumsum(0) if int(x[0, -1]) == 5 else h

    with pytest.raises(UnsupportedError, match="depend on each other"):
        curvature(risk_of(Sometimes(), numbered(8)), KFAC)


def test_it_costs_three_examples_once() -> None:
    model, sizes = Around(), list[int]()
    model.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    risk = risk_of(model, [(X, Y)] * 5)
    _ = curvature(risk, KFAC, vectors=ForwardOnly()).trace
    assert sizes == [7, 3, 7, 7, 7, 3, 7]
    _ = curvature(risk_of(model, check=False), KFAC).trace
    assert sizes[7:] == [7]


def test_buffers_that_a_training_pass_wrote_stay() -> None:
    """The look at a few examples leaves running statistics as the user's own pass left them."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(5, track_running_stats=True)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 5, 1), norm, nn.Flatten(), nn.Linear(20, 3)
    ).double()
    estimator = CurvatureEstimator(risk_of(model, ()), KFAC)
    expected = [b.clone() for b in model.buffers()]
    with estimator.listen((X, Y)):
        loss = nn.functional.cross_entropy(model(X), Y)
        after = [b.clone() for b in model.buffers()]
    loss.backward()
    assert any(not torch.equal(a, b) for a, b in zip(expected, after))
    assert all(torch.equal(a, b) for a, b in zip(after, model.buffers()))


@pytest.mark.parametrize("approximation", [KFAC, DiagonalBlock])
def test_dropout_in_training_mode(approximation: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 3)).double()
    with unchanged(model), pytest.raises(RuntimeError, match=r"Two evaluations.*'1' \(Dropout\)"):
        _ = curvature(risk_of(model), approximation).trace
    _ = curvature(risk_of(model), approximation, check_deterministic=False).trace
    estimator = CurvatureEstimator(risk_of(model, ()), approximation)
    with unchanged(model):
        estimator.update((X, Y))
    with estimator.listen((X, Y)):
        loss = nn.functional.cross_entropy(model(X), Y)
    loss.backward()


# ---------------------------------------------------------------------------------- no false alarms
def test_inputs_and_models_that_take_the_whole_batch_only() -> None:
    class Table(Around):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return super().forward(inputs["x"] + inputs["table"][:2].sum(0))

    data = [({"x": X, "table": torch.zeros(14, 4).double()}, Y)]
    plain = curvature(risk_of(Around()), FullBlock).to_dense()
    K = curvature(risk_of(Table(), data, batch_size_fn=lambda x: len(x["x"])), FullBlock)
    close(K.to_dense(), plain)
    close(curvature(risk_of(Around(lambda self, h: h.view(7, 6))), FullBlock).to_dense(), plain)


def test_a_head_of_zeros_that_is_trained() -> None:
    """Gradients that are zero say nothing: it is looked again."""
    model = Around(set_around(3.0), scale=Scale())
    nn.init.zeros_(model.b.weight)
    risk = risk_of(model, [(X, Y)] * 3)
    _ = curvature(risk, DiagonalBlock).trace
    nn.init.normal_(model.b.weight)
    close(curvature(risk, DiagonalBlock).trace, exact(model, risk.data).trace())


@pytest.mark.parametrize("axis", [False, True])
@pytest.mark.parametrize("N", [1, 3, 4, 5])
@pytest.mark.parametrize("T", [1, 3])
def test_positions_without_an_axis_of_examples(N: int, T: int, axis: bool) -> None:
    """One row for all examples, or a table of them."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.places, self.head = nn.Embedding(3, 4).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:  # [N, T, 4]
            t = torch.arange(x.shape[1])
            h = x + self.places(t[None] if axis else t)
            assert h.shape == x.shape
            return self.head(torch.tanh(h)).mT

    x, y = X[:N, None].expand(N, T, 4).clone(), torch.zeros(N, T).long()
    model = Places()
    K = curvature(risk_of(model, [(x, y)]), DiagonalBlock)
    close(K.trace, exact(model, [(x, y)]).trace())
    with pytest.raises(ValueError, match=rf"needs class indices of shape \[{N}, {T}\]") as raised:
        curvature(risk_of(model, [(x, torch.zeros(N, 2).long())]), DiagonalBlock)
    assert not isinstance(raised.value, UnsupportedError)
