"""Models on which a check of one vector, or of two graphs, is wrong: each is right here, or refused
by name.

What is expected comes from `torch.autograd.grad` of single examples and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops_plus import (
    EKFAC,
    KFAC,
    AffineRule,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    FullBlock,
    IdentityLinearOperator,
    KFACOptimizer,
    KFACPreconditioner,
    MonteCarlo,
    UnsupportedError,
    attribution_scores,
    curvature,
    per_example_gradients,
    register_rule,
)
from test.cases import close
from test.helpers import normal

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")


def double(model: nn.Module) -> nn.Module:
    model.double()
    for seed, p in enumerate(model.parameters()):
        p.data = 0.6 * normal(*p.shape, seed=seed + 10)
    return model


def example_rows(model: nn.Module, x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """The Jacobian of one example's outputs [numbers, P], one backward pass per number."""
    out = model(x[None])
    flat = torch.cat([t.flatten() for t in (out if isinstance(out, tuple) else (out,))])
    rows = [torch.autograd.grad(f, params, retain_graph=True, materialize_grads=True) for f in flat]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def ggn_of_squares(model: nn.Module, X: Tensor, number: int) -> Tensor:
    """The GGN of the mean squared error over N examples, `2/(N·number) Σ Jᵀ J`."""
    params = list(model.parameters())
    J = torch.cat([example_rows(model, x, params) for x in X])
    return 2 * J.T @ J / (len(X) * number)


# ------------------------------------------------------ what only other outputs than the first show
class WithGradient(nn.Module):
    """Returns u and ∇u, as models of differential equations do: only ∇u reads the layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        u = self.b(torch.tanh(h))
        slope = (self.b.weight * (1 - torch.tanh(h) ** 2)) @ self.a.weight
        return torch.cat([u, slope], 1)


class Reconstruction(nn.Module):
    """The first output is the code's sum; the others are decoded with the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.encoder(x))
        return torch.cat([code.sum(1, keepdim=True), code @ self.encoder.weight], 1)


class Recurrence(nn.Module):
    """The first step reads the recurrent weight once, and later ones by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.step(x))
        second = torch.tanh(first @ self.step.weight.T)
        return torch.cat([self.head(first), self.head(second)], 1)


class SharedQueriesAndKeys(nn.Module):
    """A causal attention whose keys are a function of the queries' weight: position 0 attends to
    itself alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 3]
        q, k = self.q(x), x @ self.q.weight.T
        T = x.shape[1]
        scores = (q @ k.mT).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
        return self.head(scores.softmax(-1) @ self.v(x))


FIRST_VECTOR: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "u and its gradient": (WithGradient, (2,), (3,)),
    "tied reconstruction": (Reconstruction, (3,), (4,)),
    "recurrence by hand": (Recurrence, (3,), (2,)),
    "shared queries and keys": (SharedQueriesAndKeys, (4, 3), (4, 2)),
}


@pytest.mark.parametrize("check", [True, "every"])
@pytest.mark.parametrize("name", FIRST_VECTOR)
def test_all_outputs_are_compared(name: str, check: Any) -> None:
    make, shape, out = FIRST_VECTOR[name]
    model = double(make())
    X, Y = normal(6, *shape, seed=1), normal(6, *out, seed=2)
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X[:4], Y[:4]), (X[4:], Y[4:])], check=check)
    expected = ggn_of_squares(model, X, Y[0].numel())
    close(curvature(risk, DiagonalBlock, vectors=Exact()).diagonal(), expected.diagonal())
    close(curvature(risk, EKFAC).trace, expected.trace())


class Twisted(nn.Linear):
    """A layer of a user, whose rule is wrong by a factor in the last output."""


@register_rule(Twisted)
class TwistedRule(AffineRule):
    factor = 1.0

    def patterns(self, module: nn.Module) -> dict[str, str]:
        return {"weight": "o i -> o i"}

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return x[:, None]

    def grads(self, module: nn.Module, g: Tensor) -> Tensor:
        scale = torch.ones(g.shape[-1])
        scale[-1] = self.factor
        return (g * scale)[:, :, None]


@pytest.mark.parametrize("factor", [2.0, 1 + 1e-4])
def test_a_wrong_rule_is_noticed_in_float32(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides stand on one graph, so that even a ten thousandth is more than rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Twisted(4, 2, bias=False))
    X, Y = torch.randn(5, 3), torch.randn(5, 2)
    expected = ggn_of_squares(model, X, 2).diagonal()
    diagonal = curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, Y)]), DiagonalBlock).diagonal()
    torch.testing.assert_close(diagonal, expected)
    monkeypatch.setattr(TwistedRule, "factor", factor)
    risk = EmpiricalRisk(model, nn.MSELoss(), [(X, Y)])
    try:
        diagonal = curvature(risk, DiagonalBlock).diagonal()
    except UnsupportedError as error:
        assert "layer '2' (Twisted)" in str(error)  # noqa: PT017
    else:  # the model is run for each example instead
        torch.testing.assert_close(diagonal, expected)
    assert risk.reads is not None


# -------------------------------------------------------------------- a second use of the same risk
def tied() -> tuple[nn.Module, Tensor, Tensor]:
    return double(Reconstruction()), normal(5, 3, seed=3), normal(5, 4, seed=4)


def gradient_rows(model: nn.Module, X: Tensor, Y: Tensor, loss: nn.Module) -> Tensor:
    rows = [
        torch.autograd.grad(loss(model(x[None]), y[None]), list(model.parameters()))
        for x, y in zip(X, Y)
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(reduction="sum"), nn.HuberLoss(reduction="sum")], ids=["MSE", "Huber"]
)
def test_what_is_found_belongs_to_what_was_checked(loss: nn.Module) -> None:
    """The first use finds the second read; every later one knows of it, in any order."""
    model, X, Y = tied()
    risk = EmpiricalRisk(model, loss, [(X, Y)])
    expected = gradient_rows(model, X, Y, loss).square().sum()
    for _ in range(3):
        close(curvature(risk, DiagonalBlock, vectors=Empirical()).trace, expected)
    if isinstance(loss, nn.MSELoss):
        gram = attribution_scores(
            IdentityLinearOperator(risk.space, dtype=torch.float64), risk, risk
        )
        close(gram.diagonal().sum(), expected)
        for _ in range(2):
            (gradients,) = per_example_gradients(risk)
            close(sum(g.square().sum() for g in gradients.values()), expected)


def test_another_mode_after_the_first() -> None:
    model, X, Y = tied()
    loss = nn.MSELoss(reduction="sum")
    risk = EmpiricalRisk(model, loss, [(X, Y)])
    _ = curvature(risk, DiagonalBlock, vectors=Exact()).trace
    expected = gradient_rows(model, X, Y, loss).square().sum()
    close(curvature(risk, DiagonalBlock, vectors=Empirical()).trace, expected)


# ------------------------------------------------------------------------------ axes by coincidence
class Biased(nn.Module):
    """Adds what it is told to `[N, T, T]`, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, scores: Tensor, table: Tensor) -> Tensor:
        return scores + torch.einsum("...stk,k->...st", table, self.weight)


class TableOfPairs(nn.Module):
    """A table `[T, T, 3]` that belongs to all examples goes into a module with a parameter."""

    def __init__(self, T: int) -> None:
        super().__init__()
        self.biased, self.head = Biased(), nn.Linear(T, 2)
        self.register_buffer("pairs", normal(T, T, 3, seed=7))

    def forward(self, x: Tensor) -> Tensor:  # [N, T]
        scores = self.biased(torch.tanh(x[:, :, None] * x[:, None, :]), self.pairs)
        return self.head((scores.softmax(-1) @ x[..., None])[..., 0])


@pytest.mark.parametrize("N", [2, 3, 4, 5])
@pytest.mark.parametrize("T", [2, 3, 5])
def test_a_table_with_as_many_rows_as_examples(T: int, N: int) -> None:
    model = double(TableOfPairs(T))
    X, Y = normal(N, T, seed=1), normal(N, 2, seed=2)
    K = curvature(EmpiricalRisk(model, nn.MSELoss(), [(X, Y)]), DiagonalBlock)
    close(K.diagonal(), ggn_of_squares(model, X, 2).diagonal())


# ----------------------------------------------------------------------------------- training loops
class TiedDecoder(nn.Module):
    """An autoencoder with batch norm whose decoder is a function of the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3, affine=False)

    def decode(self, h: Tensor, weight: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.norm(h)), weight.T)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encoder(x), self.encoder.weight)


class TiedImages(TiedDecoder):
    """The same with convolutions, of which the second is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2, affine=False)

    def decode(self, h: Tensor, weight: Tensor) -> Tensor:
        return F.conv_transpose2d(torch.tanh(self.norm(h)), weight)


class TimeFirst(TiedDecoder):
    """A layer whose rows have the time first, behind a norm of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:  # [N, 6, 4]
        rows = self.encoder(x.transpose(0, 1))
        return self.norm(torch.tanh(rows).transpose(0, 1).mT).mT


@pytest.mark.parametrize(
    ("make", "shape"), [(TiedDecoder, (5,)), (TiedImages, (1, 3, 3)), (TimeFirst, (6, 4))]
)
def test_batch_norm_in_training_hides_no_second_read(make: Any, shape: tuple[int, ...]) -> None:
    """The trace of the empirical Fisher is that of both reads, or the layer is refused by name."""
    model = double(make()).train()
    X, squares = normal(6, *shape, seed=1), nn.MSELoss(reduction="sum")
    estimator = CurvatureEstimator(
        EmpiricalRisk(model, squares, ()), DiagonalBlock, vectors=Empirical()
    )
    try:
        estimator.update((X, X))
    except UnsupportedError as error:
        assert "layer 'encoder'" in str(error)  # noqa: PT017
        assert make is not TiedDecoder
        return
    assert make is not TimeFirst
    # Gradients at the layer's outputs go through the statistics of the batch; then each example has
    # its own rows, and the weight two leaves.
    encoded = model.encoder(X).detach().requires_grad_()
    weight = model.encoder.weight.detach().clone().requires_grad_()
    normed = model.norm(encoded)
    norm, model.norm = model.norm, nn.Identity()
    out = model.decode(normed, weight)
    residual = 2 * (out - X).detach()
    (g,) = torch.autograd.grad(out, encoded, residual, retain_graph=True)
    total = torch.zeros(()).double()
    for n in range(len(X)):
        first = torch.autograd.grad(
            model.encoder(X[n : n + 1]), list(model.encoder.parameters()), g[n : n + 1]
        )
        decoded = model.decode(normed[n : n + 1].detach(), weight)
        (second,) = torch.autograd.grad(decoded, weight, residual[n : n + 1])
        total += (first[0] + second).square().sum() + first[1].square().sum()
    model.norm = norm
    close(estimator.operator.trace, total)


def head_at_zero(p: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(p), nn.Linear(12, 3))
    nn.init.zeros_(model[3].weight)
    nn.init.zeros_(model[3].bias)
    return model


class Adapter(nn.Module):
    """A frozen layer and a product of two small ones behind dropout, of which the second starts at
    zero.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.frozen, self.down, self.up = (
            nn.Linear(6, 6),
            nn.Linear(6, 2, bias=False),
            nn.Linear(2, 6, bias=False),
        )
        self.drop, self.head = nn.Dropout(p), nn.Linear(6, 3)
        nn.init.zeros_(self.up.weight)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.frozen(x) + self.up(self.down(self.drop(x)))))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("make", [head_at_zero, Adapter])
@pytest.mark.parametrize("seed", range(3))
def test_dropout_is_no_disagreement(make: Any, p: float, bf16: bool, seed: int) -> None:
    """The statistics are those of the pass as it was, with its masks."""
    torch.manual_seed(seed)
    model, loss = make(p), nn.CrossEntropyLoss()
    seen: dict[str, Tensor] = {}
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    last.register_forward_hook(lambda module, args, out: seen.update(a=args[0].detach().float()))
    params = [q for q in model.parameters() if q.requires_grad]
    with KFACOptimizer(model, loss, lr=0.05, params=params, decay=0.5) as optimizer:
        for _ in range(5):
            x, y = torch.randn(16, 6), torch.randint(3, (16,))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                value = loss(model(x), y)
            recorded = seen["a"]
            value.backward()
            optimizer.step()
        name = next(name for name, m in model.named_modules() if m is last)
        ones = torch.cat([recorded, torch.ones(len(x), 1)], 1)
        A = optimizer.curvature.operator.blocks[name].A.to_dense()
    assert optimizer.curvature.withdrawn == []
    # The newest batch has more than half of the weight of all: its mean square is most of the
    # factor's trace.
    assert A.trace() >= 0.5 * ones.square().sum() / len(x) - 1e-4


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


@pytest.mark.parametrize("seed", range(4))
def test_kinks_at_data_points_are_no_disagreement(seed: int) -> None:
    """Float32, with pixels that are exactly zero: an example alone may pass a kink on the other
    side.
    """
    torch.manual_seed(seed)
    blocks = [Residual(8) for _ in range(4)]
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    X = torch.relu(torch.randn(24, 1, 8, 8) - 1)
    risk = EmpiricalRisk(model.eval(), nn.CrossEntropyLoss(), [(X, torch.randint(3, (24,)))])
    assert curvature(risk, KFAC, vectors=MonteCarlo()).trace > 0
    assert max(risk.checked.errors.values()) < 5e-6


# -------------------------------------------------------- a disagreement long after the first batch
class Later(nn.Module):
    """From a call on, a layer is read by a function, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.late = nn.Linear(4, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out = self.last(h)
        return out + (h.square() @ self.last.weight.T) if self.late else out


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    return normal(8, 4, seed=seed), torch.arange(8) % 3


def step(optimizer: Any, model: nn.Module, loss: nn.Module, seed: int) -> dict[str, Tensor]:
    x, y = batch_of(seed)
    optimizer.zero_grad()
    loss(model(x), y).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return gradients


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, FullBlock])
def test_a_layer_that_disagrees_later_is_left_without_preconditioner(approximation: Any) -> None:
    model, loss = double(Later()), nn.CrossEntropyLoss()
    λ, rate = 0.25, 0.1
    check = "every" if approximation is EKFAC else True  # it has seen the first batch twice
    options = {
        "lr": rate,
        "check": check,
        "damping": λ,
        "momentum": 0.0,
        "norm_constraint": None,
        "inverse_every": 1,
        "approximation": approximation,
    }
    optimizer = KFACOptimizer(model, loss, **options)
    for seed in range(3):
        step(optimizer, model, loss, seed)
    model.late = True
    with pytest.warns(
        CurvatureWarning, match=r"(?s)layer 'last' \(Linear\).*check=False of an optimizer"
    ) as told:
        step(optimizer, model, loss, 3)  # the fourth batch is looked at
    assert len(told) == 1
    assert "eval()" not in str(told[0].message)
    assert optimizer.curvature.withdrawn == ["last"]
    for seed in range(4, 20):  # the sixteenth is looked at again, and nothing more is said
        before = model.last.weight.detach().clone()
        gradients = step(optimizer, model, loss, seed)
        close(before - model.last.weight.detach(), rate * gradients["last.weight"] / (1 + λ))
    # Another process goes on from the state, bit for bit.
    state, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    step(optimizer, model, loss, 30)
    twin = double(Later())
    twin.late = True
    twin.load_state_dict(weights)
    resumed = KFACOptimizer(twin, loss, **options)
    resumed.load_state_dict(state)
    assert resumed.curvature.withdrawn == ["last"]
    step(resumed, twin, loss, 30)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("way", ["update", "listen", "preconditioner", "factored", "power"])
def test_every_kind_of_training_loop_goes_on(way: str) -> None:
    model, loss = double(Later()), nn.CrossEntropyLoss()
    options: dict[str, Any] = {"factored": {"inverse": "factored"}, "power": {"power": -0.5}}.get(
        way, {}
    )
    optimizer = KFACPreconditioner(model, loss, damping=0.1, **options)
    inner, estimator = torch.optim.SGD(model.parameters(), lr=0.1), optimizer.curvature

    def add(seed: int) -> None:
        x, y = batch_of(seed)
        if way == "update":
            return estimator.update((x, y))
        inner.zero_grad()
        if way == "listen":
            with optimizer.listen((x, y)):
                out = model(x)
            with optimizer.paused():
                loss(out, y).backward()
        else:
            loss(model(x), y).backward()
        optimizer.step()
        inner.step()

    for seed in range(3):
        add(seed)
    model.late = True
    with pytest.warns(CurvatureWarning, match="layer 'last'.*without preconditioner"):
        add(3)
    for seed in range(4, 18):
        add(seed)
    assert estimator.updates == 18
    K = estimator.operator
    close(K.blocks["last"].to_dense(), torch.eye(18).double())
    first = double(Later()).first  # of the other layer the statistics go on
    assert K.blocks["first"].shape == (first.weight.numel() + 5,) * 2
    estimator.merge(estimator)
    assert estimator.withdrawn == ["last"]


def test_what_a_head_at_zero_hides_is_looked_at_in_the_next_batch() -> None:
    """All gradients in front of it are zero, so that nothing can be told in the first batch."""
    model = double(Later())
    model.late = True
    body = nn.Linear(3, 3).double()
    nn.init.zeros_(body.weight)
    network = nn.Sequential(model, body)
    estimator = CurvatureEstimator(EmpiricalRisk(network, nn.CrossEntropyLoss(), ()))
    estimator.update(batch_of(0))
    body.weight.data = torch.eye(3).double()
    with pytest.warns(CurvatureWarning, match=r"layer '0.last'.*without preconditioner"):
        estimator.update(batch_of(1))


class MoreLater(Later):
    """From a call on, there is one layer more, which is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(torch.tanh(self.first(x)))
        return self.more(out) + out.square() @ self.more.weight.T if self.late else out


@pytest.mark.parametrize("approximation", [KFAC, EKFAC])
def test_a_layer_that_is_called_later_and_wrong_at_once(approximation: Any) -> None:
    model, loss = double(MoreLater()), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(
        model, loss, lr=0.1, norm_constraint=None, damping=0.5, approximation=approximation
    )
    step(optimizer, model, loss, 0)
    model.late = True
    with pytest.warns(CurvatureWarning, match=r"layer 'more'.*without preconditioner"):
        step(optimizer, model, loss, 1)
    before = model.more.bias.detach().clone()
    step(optimizer, model, loss, 2)
    assert not torch.equal(before, model.more.bias)
    assert optimizer.last_step.left_alone == []
