"""Parameters that functions broadcast over examples, by themselves or in tables: norms, class
tokens, positions, scales of layers, biases of attention. No module is run again for them.

The right values come from plain autograd, one example and one number of the output at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops_plus import (
    EKFAC,
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    FullBlock,
    curvature,
)
from curvlinops_plus.risk.tables import Tables
from test.cases import close, unchanged
from test.helpers import normal

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")

Run = Callable[[Any, Tensor], Tensor]


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    return normal(*shape, seed=seed) / 2 if shape else torch.tensor(0.7).double()


class Part(nn.Module):
    """Parameters of the given shapes, and a function of them and of the input."""

    def __init__(self, run: Run, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for k, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, nn.Parameter(values(shape, k)))
        self.register_buffer("index", torch.arange(4)[:, None] - torch.arange(4) + 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def rms(x: Tensor, eps: float = 1e-3) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class Norm(nn.LayerNorm):
    """A type with another forward, as of image models."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class NormAct(nn.BatchNorm1d):
    """A norm with its activation, as of image models."""

    def forward(self, x: Tensor) -> Tensor:
        args = self.running_mean, self.running_var, self.weight, self.bias, self.training
        return F.batch_norm(x.mT, *args, 0.1, self.eps).relu_().mT


def attention(x: Tensor, bias: Tensor, fused: bool = False) -> Tensor:  # [N, T, 4], [heads, T, T]
    q = x.unflatten(-1, (2, 2)).transpose(1, 2)
    if fused:
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=bias, scale=0.5)
    else:
        scores = q @ q.mT / 2
        scores += bias
        out = scores.softmax(-1) @ q
    return out.transpose(1, 2).flatten(2)


def windows(s: Any, x: Tensor) -> Tensor:
    """Positions of an example are rows beside each other."""
    rows = x.unflatten(1, (2, 2)).flatten(0, 1)  # [2 N, 2, 4]
    return (rows * s.w + s.b).unflatten(0, (-1, 2)).flatten(1, 2)


def with_token(s: Any, x: Tensor) -> Tensor:
    return torch.cat([s.token.expand(len(x), -1, -1), x], 1) + s.positions


def of_table(s: Any, fused: bool, axes: int) -> Tensor:
    table = s.table[s.index.flatten()].view(4, 4, 2).permute(2, 0, 1).contiguous()
    return table[None] if axes == 4 else table


# Name: a part of a network that maps [N, 4, 4] to [N, T, 4].
PARTS: dict[str, Callable[[], nn.Module]] = {
    "rms norm": lambda: Part(lambda s, x: s.w * rms(x), w=(4,)),
    "rms norm, one more": lambda: Part(lambda s, x: rms(x.float()).to(x) * (1.0 + s.w), w=(4,)),
    "rms norm, by float32": lambda: Part(
        lambda s, x: (rms(x) * (1.0 + s.w.float())).type_as(x), w=(4,)
    ),
    "norm and shift": lambda: Part(lambda s, x: rms(x) * s.w + s.b, w=(4,), b=(4,)),
    "norm and shift in one": lambda: Part(
        lambda s, x: torch.layer_norm(x, (4,), s.w, s.b), w=(4,), b=(4,)
    ),
    "scale that is the shift": lambda: Part(lambda s, x: F.layer_norm(x, (4,), s.w, s.w), w=(4,)),
    "F.rms_norm": lambda: Part(lambda s, x: F.rms_norm(x, (4,), s.w, 1e-2), w=(4,)),
    "F.group_norm": lambda: Part(lambda s, x: F.group_norm(x.mT, 2, s.w, s.b).mT, w=(4,), b=(4,)),
    "F.instance_norm": lambda: Part(
        lambda s, x: F.instance_norm(x.mT, weight=s.w, bias=s.b).mT, w=(4,), b=(4,)
    ),
    "another forward": lambda: Norm(4),
    "norm and activation": lambda: NormAct(4),
    "scale of a layer": lambda: Part(lambda s, x: x + s.gamma * torch.tanh(x), gamma=(4,)),
    "scale of channels": lambda: Part(
        lambda s, x: x + torch.tanh(x).mul(s.gamma.reshape(1, -1, 1)), gamma=(4,)
    ),
    "one number": lambda: Part(lambda s, x: x * s.scale.exp(), scale=()),
    "quotient": lambda: Part(lambda s, x: s.w / (x.square() + 1), w=(4,)),
    "difference": lambda: Part(lambda s, x: (s.a - x).sub(s.b) + (1 - s.a) * x, a=(4,), b=(4, 1)),
    "token and positions": lambda: Part(with_token, token=(1, 1, 4), positions=(1, 5, 4)),
    "some of the positions": lambda: Part(lambda s, x: x + s.p[: x.shape[1]], p=(7, 4)),
    "interpolated positions": lambda: Part(
        lambda s, x: x + F.interpolate(s.p.mT[None], 4, mode="linear").mT, p=(3, 4)
    ),
    "masked token": lambda: Part(
        lambda s, x: torch.where(x[..., :1] > 0, s.token, x), token=(1, 1, 4)
    ),
    "bias of attention": lambda: Part(
        lambda s, x: attention(x, of_table(s, False, 4)), table=(7, 2)
    ),
    "bias of fused attention": lambda: Part(
        lambda s, x: attention(x, of_table(s, True, 4), True), table=(7, 2)
    ),
    "bias of fused attention, three axes": lambda: Part(
        lambda s, x: attention(x, of_table(s, True, 3), True), table=(7, 2)
    ),
    "bias in parts": lambda: Part(
        lambda s, x: F.linear(x, s.w, torch.cat([s.a, torch.zeros(2).double()])), w=(4, 4), a=(2,)
    ),
    "scaled bias of a convolution": lambda: Part(
        lambda s, x: F.conv1d(x.mT, s.w, 2 * s.b).mT, w=(4, 4, 2), b=(4,)
    ),
    "a computed matrix": lambda: Part(
        lambda s, x: F.linear(x, s.g * s.v / s.v.norm(dim=1, keepdim=True), s.b),
        v=(4, 4),
        g=(4, 1),
        b=(4,),
    ),
    "a product as a matrix": lambda: Part(lambda s, x: x @ (s.a @ s.b), a=(4, 2), b=(2, 4)),
    "a rounded kernel": lambda: Part(
        lambda s, x: F.conv1d(x.mT, s.w + (s.w.round(decimals=1) - s.w).detach(), s.b, 1, 1).mT,
        w=(4, 4, 3),
        b=(4,),
    ),
    "a computed table of tokens": lambda: Part(
        lambda s, x: F.embedding((x[..., 0] > 0).long() + 1, s.a @ s.b, 2) * x, a=(3, 2), b=(2, 4)
    ),
    "denominator": lambda: Part(lambda s, x: x / s.w.exp() / (2 + s.w), w=(4,)),
    "windows of a computed matrix": lambda: Part(
        lambda s, x: (x.flatten(0, 1) @ s.w.tanh()).unflatten(0, (-1, 4)), w=(4, 4)
    ),
    "frames of a computed kernel": lambda: Part(
        lambda s, x: (
            F.conv1d(x.flatten(0, 1)[:, None], s.w.tanh(), None, 1, 1).unflatten(0, (-1, 4)).mean(2)
        ),
        w=(2, 1, 3),
    ),
    "expanded matrix": lambda: Part(lambda s, x: x @ (s.w.expand(4, 4) + s.index.tanh()), w=(1, 4)),
    "scale and matrix": lambda: Part(
        lambda s, x: x @ (s.w * s.index.tanh()) + (x.mean(1) * s.w)[:, None], w=(1, 4)
    ),
    "windows": lambda: Part(windows, w=(4,), b=(1, 2, 4)),
    "two parameters in a table": lambda: Part(lambda s, x: x + (s.a + s.b), a=(4, 1), b=(1, 4)),
    "a table of a table": lambda: Part(
        lambda s, x: x * torch.tanh(s.a[None].repeat(1, 4, 1) * 2), a=(1, 4)
    ),
    "twice": lambda: Part(lambda s, x: torch.sin(x * s.w) * (2 + s.w) - s.w, w=(4,)),
    "feature tokens": lambda: Part(
        lambda s, x: (x.mean(2)[..., None] * s.weight[None]) + s.bias[None],
        weight=(4, 4),
        bias=(4, 4),
    ),
}
every = pytest.mark.parametrize("name", PARTS)
DATA = [(normal(5, 4, 4, seed=1), normal(5, 2, seed=2)), (normal(6, 4, 4, seed=3), normal(6, 2))]


class Network(nn.Module):
    """A part between layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.last = nn.Linear(4, 4), part, nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.part(torch.tanh(self.first(x))))).mean(1)


def network(name: str) -> Network:
    model = Network(PARTS[name]()).eval()
    with torch.no_grad():
        for k, p in enumerate(model.part.parameters()):
            p.copy_(values((*p.shape,), k))
        for b in model.part.buffers():
            if b.is_floating_point():
                b.uniform_(0.5, 1.5)
    return model


def rows_of(outputs: Tensor, params: Sequence[Tensor]) -> Tensor:
    """The Jacobian, one row for each number of the outputs."""
    rows = []
    for number in outputs.flatten():
        gradients = torch.autograd.grad(
            number, params, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def jacobian(model: nn.Module) -> Tensor:
    trainable = [nn.Parameter(p.detach()) for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    values: dict[str, Tensor] = dict(zip(names, trainable))
    outputs = [torch.func.functional_call(model, values, (X,)) for X, _ in DATA]
    return torch.cat([rows_of(out, trainable) for out in outputs])


def risk_of(model: nn.Module, **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(model, nn.MSELoss(), DATA, dict(model.named_parameters()), **options)


@pytest.mark.one_in(2)
@every
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_exact_blocks_without_running_anything_again(name: str, frozen: bool) -> None:
    model = network(name).requires_grad_(not frozen)
    J = jacobian(model)
    G = 2 * J.T @ J / len(J)
    risk = risk_of(model)
    tolerance = 1e-5 if "float32" in name or "one more" in name else 1e-10
    with unchanged(model, DATA):
        D = curvature(risk, DiagonalBlock)
        close(D.diagonal(), G.diagonal(), tolerance, what="diagonal")
        assert risk.reads is not None
        assert not risk.reads.enclosing
        M = curvature(risk_of(model), FullBlock)
    rules = {type(use.rule).__name__ for entry in D.plan for use in entry.layer.uses}
    # A vector that is added has a Gram matrix.
    assert rules - {"MatrixRule", "ConvRule"} == {"LinearRule", "BroadcastRule"}
    whole = M.to_dense()
    for group in M.plan.groups:
        places = {}
        start = 0
        for key, p in risk.params.items():
            places[key] = torch.arange(start, start + p.numel())
            start += p.numel()
        at = torch.cat([places[key] for key in group.keys])
        close(whole[at[:, None], at], G[at[:, None], at], tolerance, what=group.name)


FEW = ["rms norm, one more", "norm and activation", "token and positions", "bias of attention"]
few = pytest.mark.parametrize("name", FEW)


@few
def test_in_checkpoints(name: str) -> None:
    model = network(name)
    expected = curvature(risk_of(model), EKFAC).to_dense()
    part = model.part
    run = part.forward
    part.forward = lambda x: checkpoint(run, x, use_reentrant=False)  # type: ignore[method-assign]
    close(curvature(risk_of(model), EKFAC).to_dense(), expected, 1e-7)


@few
def test_states_and_estimators(name: str) -> None:
    model = network(name)
    expected = curvature(risk_of(model).with_data(DATA[:1]), EKFAC).to_dense()
    updated, listening, loaded = (
        CurvatureEstimator(risk_of(model).with_data(()), EKFAC) for _ in range(3)
    )
    updated.update(DATA[0])
    with listening.listen(DATA[0]):
        model(DATA[0][0])
    loaded.load_state_dict(updated.state_dict())
    for estimator in (updated, listening, loaded):
        close(estimator.operator.to_dense(), expected, 1e-7)


@every
def test_training_with_dropout(name: str) -> None:
    """Gradients of each example are those of the training pass, on its graph."""
    model = network(name)
    last = model.last
    model.last = nn.Sequential(nn.Dropout(0.3), last)  # type: ignore[assignment]
    model.train()
    if name == "norm and activation":
        model.part.eval()
    X, y = DATA[0][0], torch.arange(5) % 2
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (), dict(model.named_parameters()))
    estimator = CurvatureEstimator(risk, DiagonalBlock, vectors=Empirical())
    for _ in range(2):
        # The first batch is evaluated once more, where functions are looked for.
        estimator.reset()
        with estimator.listen((X, y)):
            f = model(X)
        of_examples = F.cross_entropy(f, y, reduction="none")
        rows = rows_of(of_examples, [*model.parameters()])
    tolerance = 1e-5 if "float32" in name or "one more" in name else 1e-10
    close(estimator.operator.diagonal(), rows.square().mean(0), tolerance)
    assert risk.reads is not None
    assert not risk.reads.enclosing


AS_MANY = ["a table of a table", "two parameters in a table", "windows", "expanded matrix"]
AS_MANY += ["a computed matrix", "a rounded kernel", "scale and matrix"]


@pytest.mark.parametrize("N", [1, 2, 4, 8])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", AS_MANY)
def test_as_many_examples_as_other_things(name: str, check: bool, N: int) -> None:
    """Axes of other things may look like axes of examples."""
    model = network(name)
    sizes = (N, 5, 4) if check else (N, N)
    data = [(normal(n, 4, 4, seed=n), normal(n, 2, seed=9)) for n in sizes]
    risk = EmpiricalRisk(model, nn.MSELoss(), data, check=check)
    J = torch.cat([rows_of(model(X), [*model.parameters()]) for X, _ in data])
    close(curvature(risk, DiagonalBlock).diagonal(), 2 * J.square().sum(0) / len(J))
    assert risk.reads is not None
    assert N < 3 or not risk.reads.enclosing


def test_what_tables_are() -> None:
    w, x = torch.ones(3, requires_grad=True), torch.ones(2, 3)
    tables = Tables(lambda t: ("w",) if t is w else None)
    layer = nn.BatchNorm1d(3)
    tables.begin([layer])
    assert tables.of(layer.running_mean) == tables.of(layer.weight) == ()  # type: ignore[arg-type]
    assert tables.of_all([w, layer.weight]) == ("w",)
    assert tables.of_all([w, x]) is None
    made = 2 * w
    tables.add([made], ("w",))
    assert tables.of(made) == ("w",)
    constant = torch.zeros(2, 3)
    tables.add(constant, ())
    constant += x  # it may depend on examples now
    assert tables.of(constant) is None


# Name of the class, and of the package in Hugging Face's library.
NORMS = {"LlamaRMSNorm": "llama", "Gemma3RMSNorm": "gemma3", "T5LayerNorm": "t5"}
NORMS |= {"SmolLM3RMSNorm": "smollm3", "GraniteRMSNorm": "granite", "Olmo2RMSNorm": "olmo2"}
NORMS |= {"DeepseekV3RMSNorm": "deepseek_v3"}


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_hugging_face(kind: str) -> None:
    """They compute in float32."""
    pytest.importorskip("transformers")
    path = f"transformers.models.{NORMS[kind]}.modeling_{NORMS[kind]}"
    norm = getattr(pytest.importorskip(path), kind)(4, eps=0.1)
    model = Network(norm).eval()
    with torch.no_grad():
        norm.weight.copy_(normal(4))
    risk = risk_of(model)
    J = jacobian(model)
    D = curvature(risk, DiagonalBlock)
    close(D.diagonal(), 2 * J.square().sum(0) / len(J), 1e-6)
    assert "BroadcastRule" in str(D)
    assert risk.reads is not None
    assert not risk.reads.enclosing


class Mixed(nn.Module):
    """A parameter that a function does not broadcast, and a table that the module is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))
        self.register_buffer("rows", normal(6, 4, seed=8))
        self.inner = Part(lambda s, xs: torch.atan2(xs[0], s.w) * xs[1].mean(0), w=(4,))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((torch.hypot(x, self.w), self.rows))


@pytest.mark.parametrize("N", [4, 5, 6])
def test_tables_that_modules_are_given_are_no_examples(N: int) -> None:
    """With as many rows as there are examples, three of them show what it is."""
    torch.manual_seed(0)
    model = Network(Mixed()).double()
    data = [(normal(N, 4, 4, seed=N), normal(N, 2, seed=9))]
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    J = rows_of(model(data[0][0]), [*model.parameters()])
    close(curvature(risk, DiagonalBlock).diagonal(), 2 * J.square().sum(0) / len(J))
