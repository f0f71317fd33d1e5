"""Weights that are computed from parameters in each pass: no module runs again for each example, and
blocks and numbers are what they are where modules do.

The right values come from plain autograd, one example and one number of the output at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrize import register_parametrization

from curvlinops_plus import (
    CurvatureEstimator,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    FullBlock,
    KFACOptimizer,
    MonteCarlo,
    curvature,
)
from curvlinops_plus.blocks import users_pass
from curvlinops_plus.layer.broadcast import BroadcastRule
from curvlinops_plus.risk import function_reads
from test.cases import close, unchanged
from test.helpers import Written, normal

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*get their exact diagonal", "ignore:.*deprecated.*"
)


class Centred(nn.Module):
    """A parametrization."""

    def forward(self, w: Tensor) -> Tensor:
        return w - w.mean()


class Coupled(nn.Module):
    """A parametrization of two parameters."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a) * b.exp() + a @ a.mT @ b

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w / 2, w.clone() / 3


def parametrized(layer: nn.Module, name: str, parametrization: nn.Module) -> nn.Module:
    return register_parametrization(layer, name, parametrization)


def rounded(w: Tensor) -> Tensor:
    """Rounding that passes gradients on."""
    return w + (w.round(decimals=1) - w).detach()


class Quantized(nn.Linear):
    """A layer of PyTorch's training with quantization: weights go through a fake quantization."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full((len(self.weight),), 0.07, dtype=self.weight.dtype)
        zero = torch.zeros(len(self.weight), dtype=torch.int32)
        w = torch.fake_quantize_per_channel_affine(self.weight, scale.float(), zero, 0, -128, 127)
        return F.linear(x, w, self.bias)


class Folded(nn.Module):
    """`norm(conv(x, w s) / s + b)` with the scale `s` of the norm, as in such a training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, 2))
        self.bias = nn.Parameter(torch.randn(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.norm.weight / (self.norm.running_var + 0.1).sqrt()  # type: ignore[operator]
        y = F.conv1d(x.mT, rounded(self.weight * scale[:, None, None])) / scale[:, None]
        return self.norm(y + self.bias[:, None]).mT


class Product(torch.autograd.Function):
    """A product that nobody sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore
        x, w = ctx.saved_tensors
        return g @ w.mT, (x.mT @ g).flatten(0, -3).sum(0)


def low_rank(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.base.weight + m.b @ m.a, m.base.bias)


def of_two_layers(m: Any, x: Tensor) -> Tensor:
    """A weight of the parameters of two layers, of which one runs, too."""
    return m.one(x) + x @ (m.one.weight.mT @ m.two.weight)


def experts(m: Any, x: Tensor) -> Tensor:
    """Each sees some of the rows."""
    rows = x.flatten(0, 1)
    chosen = rows[:, 0] > rows[:, 1]
    out = rows.new_zeros(len(rows), 4)
    out[chosen] = m.a(rows[chosen])
    out[~chosen] = m.b(rows[~chosen])
    return out.view(*x.shape[:2], 4)


def written_into(m: Any, x: Tensor) -> Tensor:
    """What is read, and then written into."""
    scale = 2 * m.s
    y = F.linear(x, 2 * m.w) + scale
    scale.mul_(1.5)
    return y * scale


def by_itself_too(m: Any, x: Tensor) -> Tensor:
    """A weight that is read as it is and in what is computed."""
    return F.linear(torch.tanh(F.linear(x, m.w, m.b)) @ m.w, 2 * m.w)


# Name: a part of a network that maps [N, T, 2] to [N, T', 4].
PARTS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(2, 4)),
    "weight norm of a convolution": lambda: Written(
        lambda m, x: m.conv(x.mT).mT,
        conv=parametrizations.weight_norm(nn.Conv1d(2, 4, 2, padding=1, groups=2)),
    ),
    "weight norm of before": lambda: old_weight_norm(nn.Linear(2, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(
        nn.Linear(2, 4), n_power_iterations=50
    ).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(2, 4)),
    "a parametrization": lambda: parametrized(nn.Linear(2, 4), "weight", Centred()),
    "of two parameters": lambda: parametrized(nn.Linear(2, 4), "weight", Coupled()),
    "a bias": lambda: parametrized(nn.Linear(2, 4), "bias", Centred()),
    "both": lambda: parametrized(
        parametrized(nn.Linear(2, 4), "weight", Centred()), "bias", Centred()
    ),
    "a norm's scale": lambda: nn.Sequential(
        nn.Linear(2, 4), parametrized(nn.LayerNorm(4), "weight", Centred())
    ),
    "an embedding": lambda: Written(
        lambda m, x: m.table((x > 0).long().sum(-1)) * x.sum(-1, keepdim=True),
        table=parametrized(nn.Embedding(3, 4), "weight", Centred()),
    ),
    "fake quantization": lambda: Quantized(2, 4),
    "folded norm": Folded,
    "low rank": lambda: Written(
        low_rank,
        base=nn.Linear(2, 4),
        a=nn.Parameter(torch.randn(1, 2)),
        b=nn.Parameter(torch.randn(4, 1)),
    ),
    "of two layers": lambda: Written(
        of_two_layers, one=nn.Linear(2, 4), two=nn.Linear(4, 4, bias=False)
    ),
    "written into": lambda: Written(
        written_into, w=nn.Parameter(torch.randn(4, 2)), s=nn.Parameter(torch.randn(4))
    ),
    "experts": lambda: Written(
        experts,
        a=parametrizations.weight_norm(nn.Linear(2, 4)),
        b=parametrizations.weight_norm(nn.Linear(2, 4)),
    ),
    "two tables": lambda: Written(
        lambda m, x: F.linear(x, m.w.tanh()) * m.s.exp() + F.linear(x, m.w.exp(), m.b.tanh()),
        w=nn.Parameter(torch.randn(4, 2)),
        s=nn.Parameter(torch.randn(4)),
        b=nn.Parameter(torch.randn(4)),
    ),
    "beside another": lambda: Written(
        lambda m, x: torch.hypot(F.linear(x, m.w.tanh()), m.p),
        w=nn.Parameter(torch.randn(4, 2)),
        p=nn.Parameter(torch.randn(4)),
    ),
    "unseen": lambda: Written(
        lambda m, x: F.linear(x, 2 * m.w) + Product.apply(x, m.w.mT.exp()),
        w=nn.Parameter(torch.randn(4, 2)),
    ),
    "by itself, too": lambda: Written(
        by_itself_too, w=nn.Parameter(torch.randn(4, 2)), b=nn.Parameter(torch.randn(4))
    ),
}
#: Where modules run again all the same.
AGAIN = {"written into", "beside another", "unseen"}
every = pytest.mark.parametrize("name", PARTS)
SIZES = (3, 2)
EACH_VECTORS = {"exact": Exact(), "empirical": Empirical(), "samples": MonteCarlo(2, seed=3)}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    part = PARTS[name]()
    model = Written(
        lambda m, x: m.last(torch.tanh(m.part(torch.tanh(m.first(x))))).mean(1),
        first=nn.Linear(2, 2),
        part=part,
        last=nn.Linear(4, 2),
    )
    model = model.double().eval()
    with torch.no_grad():
        for p in part.parameters():
            p.add_(0.3 * torch.rand_like(p))
    return model


def data_of(sizes: Sequence[int] = SIZES, positions: int = 3) -> list[Any]:
    return [
        (normal(n, positions, 2, seed=n), normal(n, 2, seed=n + 9), torch.arange(1.0, n + 1))
        for n in sizes
    ]


def risk_of(model: nn.Module, data: Any = None, **options: Any) -> EmpiricalRisk:
    params = dict(model.named_parameters())
    options.setdefault("weight", lambda X, y, w: w)
    return EmpiricalRisk(model, nn.MSELoss(), data or data_of(), params, **options)


def running_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_reads, "_keys_of_tables", lambda *given: {})


def blocks_of(risk: EmpiricalRisk, **options: Any) -> Mapping[str, Any]:
    made = {}
    for vectors, approximation in (
        ("exact", DiagonalBlock),
        ("empirical", FullBlock),
        ("samples", FullBlock),
    ):
        K = curvature(risk, approximation, vectors=EACH_VECTORS[vectors], **options)
        made |= {(vectors, group.name, group.keys): K.blocks[group.name] for group in K.plan.groups}
    return made


@pytest.mark.one_in(4)
@every
@pytest.mark.parametrize("case", ["joint", "separate", "masked", "unchecked"])
def test_blocks_are_those_of_modules_that_run_again(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, case) == ("of two layers", "unchecked"):
        pytest.skip("nobody looks for functions, and a layer is never called")
    model = network(name)
    # An expert without a row has an error where modules run again.
    data = data_of((3, 5) if name == "experts" else SIZES)
    options: dict[str, Any] = {}
    of_blocks: dict[str, Any] = {"separate_weight_and_bias": case == "separate"}
    if case == "masked":
        options["mask"] = lambda X, y: X[..., 0] > 0
    if case == "unchecked":
        options["check"] = False
    with unchanged(model):
        ours = blocks_of(risk_of(model, data, **options), **of_blocks)
    with monkeypatch.context() as context:
        running_again(context)
        expected = blocks_of(risk_of(model, data, **options), **of_blocks)
        mapping = curvature(risk_of(model, data, **options), **of_blocks).mapping
    assert [*ours] == [*expected]
    assert curvature(risk_of(model, data, **options), **of_blocks).mapping == mapping
    for key, block in ours.items():
        close(block.to_dense(), expected[key].to_dense(), 1e-12, what=str(key))


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_masks_are_those_of_plain_layers(kind: str) -> None:
    """With as many channels as positions."""
    torch.manual_seed(0)
    plain, computed = (
        nn.Linear(2, 3) if kind == "linear" else nn.Conv1d(2, 3, 3, padding=1) for _ in range(2)
    )
    computed.load_state_dict(plain.state_dict())
    parametrized(computed, "weight", Written(lambda m, w: w + 0))
    diagonals = []
    for layer in (plain, computed):
        model = Written(
            lambda m, x: m.layer(x if kind == "linear" else x.mT).exp().flatten(1), layer=layer
        )
        risk = risk_of(model.double(), weight=None, mask=lambda X, y: X[..., 0] > 0)
        risk = risk.with_data([(X, normal(len(X), 9)) for X, *_ in data_of()])
        K = curvature(risk, DiagonalBlock)
        names = sorted(K.blocks)
        diagonals.append(torch.cat([K.blocks[name].to_dense().diagonal() for name in names]))
    close(diagonals[1].sort().values, diagonals[0].sort().values, 1e-12)


@pytest.mark.one_in(3)
@every
@pytest.mark.parametrize("sizes", [(3, 2), (4,), (1, 2), (8, 5)], ids=str)
def test_diagonals_are_autograd_s(name: str, sizes: tuple[int, ...]) -> None:
    model = network(name)
    data = [(X, y) for X, y, _ in data_of(sizes)]
    params = [*model.parameters()]
    rows = []
    for X, _ in data:
        for number in model(X).flatten():
            back = torch.autograd.grad(
                number, params, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in back]))
    J = torch.stack(rows)
    risk = risk_of(model, data, weight=None)
    K = curvature(risk, DiagonalBlock)
    close(K.diagonal(), 2 * J.square().sum(0) / len(J), 1e-12)
    if name not in AGAIN:
        rules = {type(use.rule).__name__ for entry in K.plan for use in entry.layer.uses}
        assert rules.isdisjoint({"LayerRule", "EnclosedRule"})
        assert any(isinstance(u.rule, BroadcastRule) for e in K.plan for u in e.layer.uses)


@pytest.mark.one_in(3)
@every
def test_frozen_parameters_estimators_and_states(name: str) -> None:
    model = network(name)
    batch = data_of((4,))[0]
    risk = risk_of(model, [batch])
    expected = curvature(risk, FullBlock).to_dense()
    frozen = risk_of(model.requires_grad_(False), [batch])
    close(curvature(frozen, FullBlock).to_dense(), expected, 1e-12)
    model.requires_grad_(True)
    listening, loaded = (CurvatureEstimator(risk_of(model, ()), FullBlock) for _ in range(2))
    with listening.listen(batch):
        model(batch[0])
    loaded.load_state_dict(listening.state_dict())
    close(listening.operator.to_dense(), expected, 1e-12)
    close(loaded.operator.to_dense(), expected, 1e-12)


@pytest.mark.one_in(3, all_of=["two tables", "of two layers"])
@every
def test_backward_passes_of_the_user_s_free_their_graph(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of the layers are taken from them where that is early enough."""
    monkeypatch.setattr(users_pass, "_ENOUGH_NUMBERS", 0)
    model = network(name).train()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.ModuleDict)):
            module.eval()
    X, y = normal(5, 3, 2, seed=1), normal(5, 2, seed=2)
    options: Any = {"vectors": Empirical(), "approximation": DiagonalBlock}
    optimizer = KFACOptimizer(model, nn.MSELoss(), lr=0.0, **options)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(X), y).backward()
        optimizer.step()
    K = curvature(risk_of(model, [(X, y)], weight=None), DiagonalBlock, vectors=Empirical())
    close(optimizer.curvature.operator.diagonal(), K.diagonal(), 1e-12)


@pytest.mark.parametrize("name", ["weight norm", "fake quantization", "folded norm", "low rank"])
def test_training_with_dropout_behind(name: str) -> None:
    """Nothing runs again, so that dropout and batch norm don't matter."""
    model: Any = network(name)
    model.last = nn.Sequential(nn.Dropout(0.3), model.last)
    model.train()
    loss = nn.MSELoss()
    optimizer = KFACOptimizer(model, loss, lr=0.05)
    X, y = normal(8, 3, 2, seed=1), normal(8, 2, seed=2)
    values = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*taken as they are.*")
        for _ in range(8):
            optimizer.zero_grad()
            value = loss(model(X), y)
            value.backward()
            optimizer.step()
            values.append(value.item())
    assert optimizer.curvature.withdrawn == []
    assert values[-1] < values[0]


def test_choices_name_the_module_that_holds_the_block() -> None:
    """The norm, whose scale is in the block of the convolution, keeps its shift."""
    names = {"part": FullBlock, "part.norm": DiagonalBlock}
    K = curvature(risk_of(network("folded norm")), names)
    chosen = {entry.layer.name: entry.approximation.kind for entry in K.plan}
    assert chosen["part"] is FullBlock
    assert chosen["part.norm"] is DiagonalBlock
    K = curvature(risk_of(network("folded norm")), {nn.BatchNorm1d: FullBlock})
    chosen = {entry.layer.name: entry.approximation.kind for entry in K.plan}
    assert chosen["part"] is DiagonalBlock
    assert "in a weight that is computed" in str(K)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight may have more numbers than the parameters that it is computed from."""
    model = network("low rank")
    expected = blocks_of(risk_of(model))
    sizes = []
    gradients = BroadcastRule.per_example_grads

    def few(self: Any, module: Any, args: Any, kwargs: Any, g: Tensor) -> Any:
        sizes.append(sum(table.bytes_on_the_way(g) for table in self.tables))
        self.max_bytes = 3 * sizes[-1]
        return gradients(self, module, args, kwargs, g)

    monkeypatch.setattr(BroadcastRule, "per_example_grads", few)
    for key, block in blocks_of(risk_of(model)).items():
        close(block.to_dense(), expected[key].to_dense(), 1e-12, what=str(key))
    assert min(sizes) >= 8 * 4 * (4 * 2)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_layers_of_pytorch_s_training_with_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which its functions need."""
    quantization = pytest.importorskip("torch.ao.quantization")
    if not hasattr(quantization, "prepare_qat"):
        pytest.skip("PyTorch has none")
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU())
    model = nn.Sequential(convolution, nn.Flatten(), nn.Linear(12, 2)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    quantization.fuse_modules_qat(model, [["0.0", "0.1", "0.2"]], inplace=True)
    quantization.prepare_qat(model, inplace=True)
    X = normal(8, 2, 3, 3, seed=1).float()
    model(X)
    model.apply(quantization.disable_observer).eval()
    data = [
        (X[:3], normal(3, 2).float(), torch.ones(3)),
        (X[3:5], normal(2, 2).float(), X[:2, 0, 0, 0].exp()),
    ]
    risk = risk_of(model, data)
    ours = blocks_of(risk)
    rules = {type(use.rule).__name__ for e in curvature(risk).plan for use in e.layer.uses}
    assert rules.isdisjoint({"LayerRule", "EnclosedRule"})
    running_again(monkeypatch)
    expected = blocks_of(risk_of(model, data))
    assert [*ours] == [*expected]
    for key, block in ours.items():
        close(block.to_dense(), expected[key].to_dense(), 1e-5, what=str(key))
