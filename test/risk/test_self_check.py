"""Models whose layers are not what their recorded calls say: right, or refused without being asked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch
from cases import close, problem, unchanged
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
    KFACLinearOperator,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.risk import gradient_check, self_check
from curvlinops_plus.risk.autograd_graph import gradients_of

pytestmark = pytest.mark.usefixtures("both_ways")

X, Y = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(7) % 3


def risk_of(model: nn.Module, data: Any = None, **options: Any) -> EmpiricalRisk:
    """A small classification problem."""
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, Y)] if data is None else data, **options)


class Around(nn.Module):
    """Something strange between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.middle(self.a(x))))

    def middle(self, h: Tensor) -> Tensor:
        return h


# ---------------------------------------------------------------------------------------- rules that are not autograd's
class Forces(Around):
    """Energy and forces: the forward pass differentiates, so the layers are read by a backward pass too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = self.b(torch.tanh(self.a(x)))
            (force,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + force[:, :3]


class OtherWeights(Around):
    """Calls a layer with other tensors than its parameters."""

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(functional_call(self.a, {"weight": 2 * self.a.weight, "bias": self.a.bias}, (x,)))
        return self.b(h)


class ReadNorm(Around):
    """Reads the weight of a norm outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6).double()

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h) * self.norm.weight


class ReadGRU(Around):
    """Reads the weights of a recurrent layer outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 6, batch_first=True).double()

    def middle(self, h: Tensor) -> Tensor:
        return self.gru(h[:, None])[0][:, 0] + h @ getattr(self.gru, "weight_ih_l0")[:6]  # noqa: B009


class Scale(nn.Module):
    """A learned scale per channel."""

    def __init__(self, run: Callable[[Scale, Tensor], Tensor]) -> None:
        super().__init__()
        self.gamma, self.run, self.calls, self.factor = nn.Parameter(torch.ones(6).double()), run, 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Scaled(Around):
    """With a scale in the middle."""

    def __init__(self, run: Callable[[Scale, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = Scale(run)

    def middle(self, h: Tensor) -> Tensor:
        return self.scale(h)


class ReadScale(Scaled):
    """The parent reads the scale, too."""

    def middle(self, h: Tensor) -> Tensor:
        return self.scale(h) + self.scale.gamma


class AttributeAround(Scaled):
    """The parent sets an attribute around the call."""

    def middle(self, h: Tensor) -> Tensor:
        self.scale.factor = 3.0
        out = self.scale(h)
        self.scale.factor = 1.0
        return out


def counted(self: Scale, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.gamma * (1 + self.calls)


def twice_with_counter(self: Scale, x: Tensor) -> Tensor:
    self.calls = (self.calls + 1) % 2
    return x * self.gamma * (1 + self.calls)


class PerExampleBuffer(Scaled):
    """A buffer with a row for each example."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: x * self.gamma * self.get_buffer("rows")[: len(x)])
        self.scale.register_buffer("rows", torch.linspace(1, 2, 7).double()[:, None])


def statistics(self: Scale, x: Tensor) -> Tensor:
    return (x - x.mean(0)) * self.gamma


#: In place of the words of an error.
RIGHT = ""

STRANGE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "forces": (Forces, "by autograd.*something differentiated in the forward pass"),
    "other weights": (OtherWeights, RIGHT),
    "norm read outside": (ReadNorm, RIGHT),
    "recurrent weights read outside": (ReadGRU, RIGHT),
    "scale read by the parent": (lambda: ReadScale(lambda self, x: x * self.gamma), RIGHT),
    "attribute around the call": (
        lambda: AttributeAround(lambda self, x: x * self.gamma * self.factor),
        r"layer 'scale' \(Scale\).*attributes set around the call",
    ),
    "number of examples": (
        lambda: Scaled(lambda self, x: x * self.gamma / len(x)),
        r"first in layer 'scale' \(Scale\).*depend on each other",
    ),
    "batch statistics by hand": (lambda: Scaled(statistics), r"layer 'scale' \(Scale\).*depend on each other"),
    "buffer of rows": (PerExampleBuffer, r"layer 'scale' \(Scale\)"),
    "counter": (lambda: Scaled(counted), "Two evaluations of the model.*layer 'scale'"),
    "counter modulo": (lambda: Scaled(twice_with_counter), "layer 'scale'|Two evaluations"),
}


@pytest.mark.parametrize("approximation", [DiagonalBlock, EKFAC])
@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_what_a_layer_does_not_say_is_refused(name: str, approximation: Any) -> None:
    make, words = STRANGE[name]
    model = make()
    if words == RIGHT:
        exact = GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, Y)]).to_dense()
        close(curvature(risk_of(model), approximation).trace, exact.trace())
        return
    with pytest.raises((UnsupportedError, ValueError, RuntimeError), match=words):
        _ = curvature(risk_of(model), approximation).trace


@pytest.mark.parametrize("name", ["forces", "other weights", "norm read outside", "scale read by the parent"])
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_frozen_parameters_too(name: str) -> None:
    make, words = STRANGE[name]
    model = make()
    params = list(model.parameters())
    exact = GGNLinearOperator(model, nn.CrossEntropyLoss(), params, [(X, Y)]).to_dense()
    model.requires_grad_(False)
    if words == RIGHT:
        close(curvature(risk_of(model, params=params), DiagonalBlock).diagonal(), exact.diagonal())
        return
    with pytest.raises((UnsupportedError, ValueError)):
        _ = curvature(risk_of(model, params=params), DiagonalBlock).trace


# ------------------------------------------------------------------------------------------------------------- hooks
@contextmanager
def global_hook(hook: Callable[..., Any]) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def doubled(module: nn.Module, args: Any, out: Any) -> Any:
    return 2 * out if isinstance(module, nn.Linear) else None


def test_global_hooks_are_refused_by_layers_and_run_by_losses() -> None:
    model, loss = Around(), nn.CrossEntropyLoss()
    with global_hook(doubled):
        with pytest.raises(UnsupportedError, match=r"layer 'a' \(Linear\).*a hook change"):
            _ = curvature(risk_of(model), KFAC).trace
        with pytest.raises(UnsupportedError, match=r"CrossEntropyLoss. Hooks run when it is called"):
            KFACLinearOperator(model, loss, list(model.parameters()), [(X, Y)])
        close(risk_of(model).loss(), loss(model(X), Y))


def test_a_global_hook_on_layers_alone() -> None:
    """Its gradient is about what the layer returned, and that is not what the hook of all modules hands on."""
    from curvlinops_plus.likelihood import likelihood_of

    model, likelihood = Around(), likelihood_of(nn.CrossEntropyLoss())
    risk = EmpiricalRisk(model, likelihood, [(X, Y)])  # type: ignore[arg-type]
    with global_hook(doubled), pytest.raises(UnsupportedError, match=r"layer 'a' \(Linear\).*a hook change"):
        _ = curvature(risk, KFAC).trace


def test_hooks_of_a_loss_run() -> None:
    model, loss = Around(), nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, args, out: out * 2)  # type: ignore[operator]
    risk = EmpiricalRisk(model, loss, [(X, Y)])
    plain = nn.CrossEntropyLoss()(model(X), Y)
    close(risk.loss(), 2 * plain)
    close(
        GGNLinearOperator(model, loss, list(model.parameters()), [(X, Y)]).to_dense(),
        2 * GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, Y)]).to_dense(),
    )
    with pytest.raises(UnsupportedError, match=r"no likelihood is registered.*Hooks run when.*remove them"):
        KFACLinearOperator(model, loss, list(model.parameters()), [(X, Y)])


# --------------------------------------------------------------------------------------- examples, and two evaluations
class Mixing(Around):
    """Examples attend to each other, if there are so many."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least = least

    def middle(self, h: Tensor) -> Tensor:
        return h.cumsum(0) if len(h) > self.least else h


@pytest.mark.parametrize("vectors", [None, ForwardOnly()])
@pytest.mark.parametrize("sizes", [[7], [5, 7]])
def test_examples_that_depend_on_each_other(sizes: list[int], vectors: Any) -> None:
    data = [(X[:n], Y[:n]) for n in sizes]
    model = Mixing(sizes[0] if len(sizes) > 1 else 0)
    with pytest.raises(UnsupportedError, match=r"outputs for 3 of 7 examples by themselves differ.*depend"):
        _ = curvature(risk_of(model, data), KFAC, vectors=vectors).trace


@pytest.mark.parametrize("N", [2, 3])
def test_all_examples_of_a_small_batch(N: int) -> None:
    with pytest.raises(UnsupportedError, match=r"layer 'a' \(Linear\).*norm .* in its rows, and of .* in others"):
        _ = curvature(risk_of(Mixing(), [(X[:N], Y[:N])]), KFAC).trace


@pytest.mark.parametrize(("N", "words"), [(3, "all 3 examples of a batch"), (6, "3 of 6 examples")])
def test_messages_say_how_many_examples_were_compared(N: int, words: str) -> None:
    model = STRANGE["attribute around the call"][0]()
    with pytest.raises(UnsupportedError, match=rf"layer 'scale'.*'scale.gamma' for one example, in a check of {words}"):
        _ = curvature(risk_of(model, [(X[:N], Y[:N])]), DiagonalBlock).trace

    class Flipped(Around):
        def middle(self, h: Tensor) -> Tensor:
            return h + self.a(h.flip(0)[:, :4]).flip(0)

    with pytest.raises(UnsupportedError, match=rf"layer 'a' \(Linear\) returned shape \[3, 6\] in a check of {words}"):
        _ = curvature(risk_of(Flipped(), [(X[:N], Y[:N])]), DiagonalBlock).trace


class TwoHeads(Around):
    """The first half of a batch goes through another layer than the second."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 6).double()
        self.one = nn.Linear(6, 6).double()

    def middle(self, h: Tensor) -> Tensor:
        k = len(h) // 2
        return torch.cat([self.one(h[:k]), self.other(h[k:])])


class TwoScales(Around):
    """The same in a module of unknown code."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.w = (nn.Parameter(torch.ones(6).double()) for _ in range(2))

        def forward(self, h: Tensor) -> Tensor:
            k = len(h) // 2
            return torch.cat([h[:k] * self.v, torch.sin(h[k:] * self.w)])

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.Inner()

    def middle(self, h: Tensor) -> Tensor:
        return self.scale(h)


@pytest.mark.parametrize("N", [2, 3, 4, 6, 8, 12, 32])
@pytest.mark.parametrize("network", [TwoHeads, TwoScales])
def test_places_in_a_batch(network: type[nn.Module], N: int) -> None:
    """What is run again for single examples finds another place for them: the single one that is compared may not."""
    generator = torch.Generator().manual_seed(N)
    data = [(torch.randn(N, 4, generator=generator).double(), torch.arange(N) % 3)]
    for approximation in (FullBlock, KFAC):
        with pytest.raises(UnsupportedError):
            curvature(risk_of(network(), data), approximation)
    estimator = CurvatureEstimator(risk_of(network(), ()), FullBlock)
    with pytest.raises(UnsupportedError):
        estimator.update(data[0])


def test_messages_say_that_all_examples_were_compared() -> None:
    with pytest.raises(UnsupportedError, match=r"the gradient of 'scale.v' for all examples, in a check of"):
        curvature(risk_of(TwoScales(), [(X[:6], Y[:6])]), FullBlock)


def test_code_that_depends_on_the_number_of_examples() -> None:
    class Branch(Around):
        def middle(self, h: Tensor) -> Tensor:
            return h if len(h) > 4 else 2 * h

    with pytest.raises(UnsupportedError, match=r"3 of 7 examples .*Or code of the model depends on the number.*`len"):
        _ = curvature(risk_of(Branch()), KFAC).trace


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_wrong_row_of_a_large_layer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Combinations of rows are compared, which must tell as much as all numbers."""
    from curvlinops_plus.layer.linear import LinearRule

    class Chain(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:  # of which nothing is known
            return super().forward(input)

    torch.manual_seed(0)
    model = Chain(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3)).to(dtype)
    rows = LinearRule.grad_rows

    def wrong(self: LinearRule, module: nn.Module, g: Tensor) -> Tensor:
        found = rows(self, module, g).clone()
        if module is model[2]:
            found[..., 17] = 0
        return found

    _ = curvature(risk_of(model, [(X.to(dtype), Y)]), KFAC).trace
    monkeypatch.setattr(LinearRule, "grad_rows", wrong)
    with pytest.raises(UnsupportedError, match=r"layer '2' \(Linear\).*'2.weight'"):
        _ = curvature(risk_of(model, [(X.to(dtype), Y)]), KFAC).trace


def test_batches_of_one_first() -> None:
    with pytest.raises(UnsupportedError, match="depend on each other"):
        _ = curvature(risk_of(Mixing(), [(X[:1], Y[:1]), (X, Y)]), KFAC).trace


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock])
def test_dropout_in_training_mode(approximation: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 3)).double()
    words = r"Two evaluations of the model.*first in layer '1' \(Dropout\).*'1' \(Dropout\); call model.eval\(\)"
    with unchanged(model), pytest.raises(RuntimeError, match=words):
        _ = curvature(risk_of(model), approximation).trace
    _ = curvature(risk_of(model), approximation, check_deterministic=False).trace
    estimator = CurvatureEstimator(risk_of(model, ()), approximation)
    with unchanged(model):
        estimator.update((X, Y))
    with estimator.listen((X, Y)):
        loss = nn.functional.cross_entropy(model(X), Y)
    loss.backward()


def test_random_numbers_by_hand() -> None:
    class Noise(Around):
        def middle(self, h: Tensor) -> Tensor:
            return h + torch.randn_like(h)

    with pytest.raises(RuntimeError, match=r"Two evaluations.*first in layer 'b'.*draw random numbers, or count"):
        _ = curvature(risk_of(Noise()), KFAC).trace


class Places(nn.Module):
    """Adds embeddings of positions, [T, d] or [1, T, d]."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.places, self.head = form, nn.Embedding(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 4]
        t = torch.arange(x.shape[1])
        h = x + self.places(t[None] if self.form == "with an axis" else t)
        if self.form == "checked":
            assert h.shape == x.shape
        f = self.head(torch.tanh(h))
        return f.flatten(0, 1) if self.form == "rows" else f.mT


@pytest.mark.parametrize("kind", ["cross-entropy", "squares"])
@pytest.mark.parametrize("form", ["positions", "rows", "checked"])
def test_one_position_without_an_axis_of_examples(form: str, kind: str) -> None:
    """[1, d] is one row for all examples, and [N, 1, d] + [N, d] something else: the module around it knows."""
    model, x = Places(form), X[:5, None]
    loss: Any = nn.CrossEntropyLoss() if kind == "cross-entropy" else nn.MSELoss()
    y = torch.zeros(5 if form == "rows" else (5, 1), dtype=torch.long) if kind == "cross-entropy" else model(x).detach()
    exact = GGNLinearOperator(model, loss, list(model.parameters()), [(x, y)]).to_dense()
    for check in (True, False):
        risk = EmpiricalRisk(model, loss, [(x, y)], check=check)
        with unchanged(model):
            K = curvature(risk, DiagonalBlock)
        close(K.trace, exact.trace())
        estimator = CurvatureEstimator(risk.with_data(()), DiagonalBlock)
        try:
            estimator.update((x, y))
        except UnsupportedError as error:
            assert "'places'" in str(error)  # noqa: PT017
        else:
            close(estimator.operator.trace, exact.trace())
    same = Places("with an axis")
    exact = GGNLinearOperator(same, nn.CrossEntropyLoss(), list(same.parameters()), [(x, torch.zeros(5, 1).long())])
    risk = EmpiricalRisk(same, nn.CrossEntropyLoss(), [(x, torch.zeros(5, 1).long())])
    close(curvature(risk, DiagonalBlock).diagonal(), exact.to_dense().diagonal())


@pytest.mark.parametrize("N", [3, 4, 5])
def test_positions_without_an_axis_of_examples(N: int) -> None:
    """Right, or refused with advice that is right."""
    x, y = X[:N, None].expand(N, 3, 4).clone(), torch.zeros(N, 3).long()
    model = Places("positions")
    exact = GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)]).to_dense()
    try:
        K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), [(x, y)]), DiagonalBlock)
    except UnsupportedError as error:
        assert "'places' (Embedding)" in str(error)  # noqa: PT017
    else:
        close(K.trace, exact.trace())
    same = Places("with an axis")
    exact = GGNLinearOperator(same, nn.CrossEntropyLoss(), list(same.parameters()), [(x, y)]).to_dense()
    close(curvature(EmpiricalRisk(same, nn.CrossEntropyLoss(), [(x, y)]), DiagonalBlock).diagonal(), exact.diagonal())


def test_a_target_of_the_wrong_shape_stays_one() -> None:
    """Also where a row for all examples was expanded as it should be."""
    risk = EmpiricalRisk(Places("with an axis"), nn.CrossEntropyLoss(), [(X[:5, None], torch.zeros(5, 2).long())])
    with pytest.raises(ValueError, match=r"needs class indices of shape \[5, 1\]") as raised:
        _ = curvature(risk, DiagonalBlock)
    assert not isinstance(raised.value, UnsupportedError)


# ------------------------------------------------------------------------------------------------------ what it costs
def test_it_is_one_pass_over_three_examples_once() -> None:
    model, sizes = Around(), []
    model.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    risk = risk_of(model, [(X, Y)] * 3)
    _ = curvature(risk, KFAC).trace
    _ = curvature(risk, EKFAC).trace
    assert sorted(sizes) == [3, *[7] * 6]
    sizes.clear()
    _ = curvature(risk.with_data([(X[:4], Y[:4])]), KFAC).trace
    assert sorted(sizes) == [3, 4]
    sizes.clear()
    _ = curvature(risk_of(model, check=False), KFAC).trace
    assert sizes == [7]


def test_nothing_of_the_user_changes() -> None:
    p = problem("mlp")
    state = torch.get_rng_state()
    with unchanged(p.model):
        _ = curvature(p.risk(), KFAC).trace
    assert torch.equal(state, torch.get_rng_state())


def test_buffers_that_a_training_pass_wrote_stay() -> None:
    """The look at a few examples leaves running statistics as the user's own pass left them."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(5, track_running_stats=True)
    model = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 5, 1), norm, nn.Flatten(), nn.Linear(20, 3)).double()
    estimator = CurvatureEstimator(risk_of(model, ()), KFAC)
    expected = [b.clone() for b in model.buffers()]
    with estimator.listen((X, Y)):
        loss = nn.functional.cross_entropy(model(X), Y)
        after = [b.clone() for b in model.buffers()]
    loss.backward()
    assert any(not torch.equal(a, b) for a, b in zip(expected, after))
    assert all(torch.equal(a, b) for a, b in zip(after, model.buffers()))


# ------------------------------------------------------------------------------------------------- no false alarms
def test_an_input_in_which_examples_cant_be_told_apart_is_run_whole() -> None:
    class Table(Around):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return super().forward(inputs["x"] + inputs["table"][:2].sum(0))

    model, sizes = Table(), []
    model.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    data = [({"x": X, "table": torch.ones(14, 4).double()}, Y)]
    _ = curvature(risk_of(model, data, batch_size_fn=lambda x: len(x["x"])), KFAC).trace
    assert sizes == [7, 7]


def test_a_model_that_needs_all_of_the_batch_is_run_whole() -> None:
    class Seven(Around):
        def middle(self, h: Tensor) -> Tensor:
            return h.view(7, 6)

    close(curvature(risk_of(Seven()), FullBlock).to_dense(), curvature(risk_of(Around()), FullBlock).to_dense())


def test_gradients_that_are_zero_but_for_rounding() -> None:
    """A bias before a norm that subtracts the mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Flatten(), nn.Linear(48, 3))
    data = [(torch.randn(5, 2, 6, 6), Y[:5])]
    assert curvature(risk_of(model, data, params=list(model[0].parameters())), EKFAC).trace > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_other_precisions_and_sizes(dtype: torch.dtype, scale: float) -> None:
    model = Around().to(dtype)
    _ = curvature(risk_of(model, [((scale * X).to(dtype), Y)]), EKFAC).trace


def test_examples_that_change_places() -> None:
    """One of them stays where it is."""

    class Swapped(Around):
        def __init__(self, other: int) -> None:
            super().__init__()
            self.other = other

        def middle(self, h: Tensor) -> Tensor:
            swapped = torch.arange(len(h))
            swapped[[0, self.other]] = swapped[[self.other, 0]]
            return h.tanh() + self.a(h[:, :4][swapped]).tanh()[swapped]

    for N, other in ((2, 1), (3, 1), (3, 2), (7, 1), (7, 6)):
        with pytest.raises(UnsupportedError, match=r"layer 'a'|depend on each other"):
            _ = curvature(risk_of(Swapped(other), [(X[:N], Y[:N])]), EKFAC).trace


class Exchanged(Around):
    """Two examples change places inside; outputs don't show it."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__()
        self.pair = [one, other]

    def middle(self, h: Tensor) -> Tensor:
        order = torch.arange(len(h))
        if len(h) > max(self.pair):
            order[self.pair] = order[self.pair[::-1]]
        return h.tanh() + self.a(h[:, :4][order]).tanh()[order]


def test_any_two_examples_that_change_places_in_a_small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a batch are compared, where that is cheap; not only those of a few examples."""
    monkeypatch.setattr(self_check, "_LIGHT", 2**20)
    X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(9) % 3
    for pair in [*combinations(range(9), 2)][::2]:
        with pytest.raises(UnsupportedError, match=r"layer 'a'.*mixes examples"):
            _ = curvature(risk_of(Exchanged(*pair), [(X, Y)]), EKFAC).trace
    monkeypatch.setattr(self_check, "halves_by_digits", lambda N: torch.zeros(0, N, dtype=torch.bool))
    _ = curvature(risk_of(Exchanged(2, 6), [(X, Y)]), EKFAC).trace


@pytest.mark.parametrize(
    ("dtype", "strength"), [(torch.bfloat16, 1e-4), (torch.float32, 1e-10), (torch.float64, 1e-17)]
)
def test_examples_that_are_mixed_by_less_than_rounding(dtype: torch.dtype, strength: float) -> None:
    """Training may make it more later, and a kind of batch that was looked at is not looked at again."""

    class Slightly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
            self.to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            return self.b(h + strength * h.roll(1, 0))

    with pytest.raises(UnsupportedError, match=r"layer 'a'.*mixes examples"):
        _ = curvature(risk_of(Slightly(), [(X[:8].to(dtype), Y[:8])]), KFAC).trace


def test_random_models_that_are_not_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model may be random, and is not, outputs tell what all rows would."""
    monkeypatch.setattr(self_check, "_LIGHT", 0)
    called: list[Any] = []
    compare = self_check.compare_all_rows
    monkeypatch.setattr(self_check, "compare_all_rows", lambda *given: [called.append(given), compare(*given)])
    _ = curvature(risk_of(Around()), KFAC, check_deterministic=False).trace
    assert not called
    _ = curvature(risk_of(Around(), [(X[:3], Y[:3])]), KFAC, check_deterministic=False).trace
    assert len(called) == 1
    model = nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 3)).double()
    _ = curvature(risk_of(model), KFAC, check_deterministic=False).trace
    assert len(called) == 2
    with pytest.raises(UnsupportedError, match=r"layer 'a' .*mixes examples"):
        _ = curvature(risk_of(Mixing()), KFAC, check_deterministic=False).trace


def test_small_differences_are_noticed_in_double_precision() -> None:
    class Nearly(AttributeAround):
        def middle(self, h: Tensor) -> Tensor:
            self.scale.factor = 1 + 1e-6
            out = self.scale(h)
            self.scale.factor = 1.0
            return out

    with pytest.raises(UnsupportedError, match=r"layer 'scale' \(Scale\).*by the layer's rule"):
        _ = curvature(risk_of(Nearly(lambda self, x: x * self.gamma * self.factor)), DiagonalBlock).trace


# ------------------------------------------------------------------------------------- gradients that are zero at first
def times_gamma(self: Scale, x: Tensor) -> Tensor:
    return x * self.gamma * self.factor


@pytest.mark.parametrize("n", range(7))
def test_an_example_without_a_gradient(n: int) -> None:
    """Whichever example has none, others tell that the layer is not what it says."""

    class Gated(AttributeAround):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (x[:, :1] != 0)

    x = X.clone()
    x[n] = 0
    with pytest.raises(UnsupportedError, match=r"layer 'scale' \(Scale\).*by the layer's rule"):
        _ = curvature(risk_of(Gated(times_gamma), [(x, Y)]), DiagonalBlock).trace


def test_a_head_of_zeros_that_is_trained() -> None:
    model = AttributeAround(times_gamma)
    nn.init.zeros_(model.b.weight)
    risk = risk_of(model)
    _ = curvature(risk, DiagonalBlock).trace
    nn.init.normal_(model.b.weight)
    with pytest.raises(UnsupportedError, match=r"layer 'scale' \(Scale\).*by the layer's rule"):
        _ = curvature(risk, DiagonalBlock).trace


def test_half_precision_is_no_excuse() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = AttributeAround(times_gamma).to(dtype)
        with pytest.raises(UnsupportedError, match=r"layer 'scale' \(Scale\).*by the layer's rule"):
            _ = curvature(risk_of(model, [(X.to(dtype), Y)]), DiagonalBlock).trace


def test_frozen_parameters_that_are_read_in_later_batches() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1 if bool(x[0, 0] > 0) else self.layer.weight.sum())

    x = X.abs()
    for data in ([(x, Y), (-x, Y)], [(-x, Y), (x, Y)]):
        model = Later().requires_grad_(False)
        params = list(model.parameters())
        exact = GGNLinearOperator(model, nn.CrossEntropyLoss(), params, data).to_dense()
        try:
            K = curvature(risk_of(model, data, params=params), DiagonalBlock)
        except UnsupportedError as error:
            assert "'layer.weight'" in str(error)  # noqa: PT017
        else:
            close(K.diagonal(), exact.diagonal())


def test_weights_without_a_gradient_in_a_later_batch() -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(3, 4).double())
            self.v = nn.Parameter(torch.randn(3, 3).double())

        def forward(self, x: Tensor) -> Tensor:
            w = self.w
            if bool(x[0, 0] < 0):
                with torch.no_grad():
                    w = self.w[:]
            return nn.functional.linear(torch.tanh(nn.functional.linear(x, w)), self.v)

    model, x = Stopped(), X.abs()
    for data in ([(x, Y), (-x, Y)], [(-x, Y), (x, Y)]):
        exact = GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data).to_dense()
        try:
            K = curvature(risk_of(model, data), DiagonalBlock)
        except (UnsupportedError, ValueError):
            continue
        close(K.diagonal(), exact.diagonal())


def test_groups_of_examples() -> None:
    class Groups(Around):
        def forward(self, inputs: Any) -> Tensor:
            self.group = inputs["group"]
            return super().forward(inputs["x"])

        def middle(self, h: Tensor) -> Tensor:
            return (self.group[:, None] == self.group[None]).double() @ h

    data = [({"x": X, "group": torch.tensor([0, 1, 1, 2, 3, 3, 4])}, Y)]
    with pytest.raises(UnsupportedError, match=r"depend on each other|mixes examples"):
        _ = curvature(risk_of(Groups(), data, batch_size_fn=lambda inputs: 7), DiagonalBlock).trace


def test_an_example_at_a_time() -> None:
    """The layers return one row in each call, which is no row for all examples."""

    class OneByOne(Around):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super(OneByOne, self).forward(row[None]) for row in x])

    model = OneByOne()
    try:
        K = curvature(risk_of(model), DiagonalBlock)
    except UnsupportedError as error:
        assert "returned one row for all" in str(error)  # noqa: PT017
    else:
        exact = GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, Y)]).to_dense()
        close(K.diagonal(), exact.diagonal())


def test_what_the_first_vectors_left_takes_no_memory_in_the_pass_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the few examples at all layers, a good part of the memory of a sweep over little data."""
    left: list[weakref.ref[Tensor]] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not [r for r in left if r() is not None]
        found = gradients_of(*args, **kwargs)
        left.extend(weakref.ref(g) for g in found)
        return found

    monkeypatch.setattr(gradient_check, "gradients_of", watched)
    curvature(risk_of(Around()), KFAC)
    assert len(left) > 2
