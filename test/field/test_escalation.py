"""Where running a module again for each example fails, or disagrees with autograd, the module
around it is run again.

The right values come from plain autograd, for each number of the output by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from curvlinops_plus import (
    EKFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    KFACOptimizer,
    UnsupportedError,
    curvature,
)
from curvlinops_plus.risk.found_reads import FoundReads, describe_reads, extent
from test.cases import close
from test.helpers import normal

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")


def net(*sizes: int) -> nn.Sequential:
    pairs = pairwise(sizes)
    return nn.Sequential(*[layer for i, o in pairs for layer in (nn.Linear(i, o), nn.Tanh())][:-1])


class Energy(nn.Module):
    """The derivative of a network in its input, by autograd."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            u = self.net(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (ddu,) = torch.autograd.grad(du.square().sum(), x, create_graph=True)
        return u + du + ddu


class Transformed(nn.Module):
    """A network under a transform of `torch.func`, or in forward mode."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, net(2, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "vmap":
            return torch.vmap(self.net)(x)
        if self.kind == "jvp":
            return torch.func.jvp(self.net, (x,), (torch.ones_like(x),))[1]
        if self.kind == "grad":
            return torch.func.vmap(torch.func.grad(lambda t: self.net(t).square().sum()))(x)
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(
                self.net(forward_ad.make_dual(x, torch.ones_like(x)))
            ).tangent


class Windows(nn.Module):
    """Attention within windows, which are on the axis of the examples, with a table of biases and a
    mask of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(4, 12), nn.Parameter(torch.zeros(3, 3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [N · windows, T, 4], [windows, T, T]
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.logaddexp(q @ k.mT, self.table).unflatten(0, (-1, len(mask))) + mask
        assert scores.shape[1] == len(mask), "all windows of an image, please"
        return scores.flatten(0, 1).softmax(-1) @ v


class Shifted(nn.Module):
    """A block around them; the model sees sequences of two windows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Windows(), nn.Linear(4, 2)
        self.register_buffer("mask", normal(2, 3, 3, seed=8))

    def forward(self, x: Tensor) -> Tensor:  # [N, 6, 4]
        h = self.attention(x.unflatten(1, (2, 3)).flatten(0, 1), self.mask)
        return self.out(h.unflatten(0, (len(x), 2)).flatten(1, 2)).mean(1)


class Edges(nn.Module):
    """Nodes that look at neighbours, with parameters for both ends of an edge."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.lin = nn.Linear(i, o, bias=False)
        self.source, self.target = nn.Parameter(torch.zeros(1, o)), nn.Parameter(torch.zeros(1, o))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # [nodes, i]
        h = self.lin(x)
        a, b = torch.cosine_similarity(h, self.source), torch.cosine_similarity(h, self.target)
        weight = torch.tanh(a[edges[0]] + b[edges[1]]).exp()
        return torch.zeros_like(h).index_add(0, edges[1], weight[:, None] * h[edges[0]])


class Graph(nn.Module):
    """One graph for each batch, or an object with one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Edges(3, 4), Edges(4, 2)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]]))

    def forward(self, x: Tensor | Box) -> Tensor:
        x = x.x if isinstance(x, Box) else x
        return self.second(torch.tanh(self.first(x[0], self.edges)), self.edges)[None].mean(1)


class Box:
    """What is no tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Gain(nn.Module):
    """A module that is called without a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1, 3))

    def forward(self) -> Tensor:
        return self.log.exp()


class Scaled(nn.Module):
    """One object for each batch, of whose rows all become longer alike."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.layer = Gain(), nn.Linear(3, 2)

    def forward(self, x: Box) -> Tensor:
        return self.layer(torch.hypot(x.x, self.gain()))


class Padded(nn.Module):
    """A module that insists on the mask of the batch, by an assertion, inside one that makes the
    mask.
    """

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [N, T, 4], [T, N]
            assert mask.shape[1] == len(x), (
                f"Expected mask.shape[1] to be {len(x)}, but got {mask.shape[1]}"
            )
            return torch.atan2(x, self.scale) * mask.T[..., None]

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Padded.Inner(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x, (x[..., 0] > -0.5).T.to(x))).mean(1)


def boxes(shape: tuple[int, ...]) -> list[Any]:
    return [Box(normal(1, *shape, seed=k)) for k in range(4)]


ROWS, SEQUENCES = (
    [normal(7, 2, seed=1), normal(5, 2, seed=2)],
    [normal(7, 6, 4, seed=1), normal(5, 6, 4, seed=2)],
)
GRAPHS = [normal(1, 5, 3, seed=k) for k in range(4)]
# A model, its inputs, and the modules that are run again.
MODELS: dict[str, tuple[Callable[[], nn.Module], list[Any], set[str]]] = {
    "derivatives": (lambda: Energy(net(2, 4, 2)), ROWS, {""}),
    "derivatives inside": (
        lambda: nn.Sequential(nn.Linear(2, 3), Energy(net(3, 4, 3)), nn.Linear(3, 2)),
        ROWS,
        {"1"},
    ),
    "derivatives of derivatives": (
        lambda: Energy(nn.Sequential(Energy(net(2, 3, 2)), nn.Linear(2, 2))),
        ROWS,
        {""},
    ),
    "far inside": (
        lambda: Energy(nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh()))),
        ROWS,
        {""},
    ),
    "vmap": (lambda: Transformed("vmap"), ROWS, {""}),
    "jvp": (lambda: Transformed("jvp"), ROWS, {""}),
    "grad": (lambda: Transformed("grad"), ROWS, {""}),
    "forward mode": (lambda: Transformed("forward"), ROWS, {""}),
    "windows": (Shifted, SEQUENCES, {""}),
    "windows inside": (
        lambda: nn.Sequential(Shifted(), nn.Tanh(), nn.Linear(2, 2)),
        SEQUENCES,
        {"0"},
    ),
    "edges": (Graph, GRAPHS, {""}),
    "edges in objects": (Graph, boxes((5, 3)), {""}),
    "no tensor": (Scaled, boxes((3,)), {""}),
    "an assertion": (lambda: nn.Sequential(Padded(), nn.Tanh()), SEQUENCES, {"0"}),
}
every = pytest.mark.parametrize("name", MODELS)


def risk_of(name: str) -> EmpiricalRisk:
    make, inputs, _ = MODELS[name]
    model = make().double()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(normal(*p.shape, seed=k) / 2)
    sizes = [len(X.x if isinstance(X, Box) else X) for X in inputs]
    targets = [normal(N, 2, seed=20 + k) for k, N in enumerate(sizes)]
    size = (lambda X: len(X.x)) if isinstance(inputs[0], Box) else None
    return EmpiricalRisk(model, nn.MSELoss(), list(zip(inputs, targets)), batch_size_fn=size)


def jacobian(risk: EmpiricalRisk) -> Tensor:
    """Of all outputs, by a backward pass for each number."""
    params, rows = [*risk.params.values()], []
    for X, _ in risk.data:
        for f in risk.model(X).flatten():
            found = torch.autograd.grad(
                f, params, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


@every
def test_modules_around_are_run_again(name: str) -> None:
    risk = risk_of(name)
    J = jacobian(risk)
    G = 2 * J.T @ J / len(J)
    close(curvature(risk, DiagonalBlock).diagonal(), G.diagonal(), what="diagonal")
    assert risk.reads is not None
    assert {*risk.reads.enclosing.values()} == MODELS[name][2]
    close(curvature(risk_of(name), EKFAC).trace, G.trace(), what="trace")
    M = curvature(risk_of(name), FullBlock)
    M.verify()
    whole, places = (
        M.to_dense(),
        dict(
            zip(risk.params, torch.arange(len(G)).split([p.numel() for p in risk.params.values()]))
        ),
    )
    for entry in M.plan:
        for group in entry.layer.groups:
            at = torch.cat([places[key] for key in group.keys])
            close(whole[at[:, None], at], G[at[:, None], at], what=group.name)


@every
def test_without_the_self_check(name: str) -> None:
    """Reruns that fail are noticed without it, those that disagree are not; then nothing else
    changes.
    """
    if "derivatives" in name or name in ("far inside", "forward mode"):
        return
    risk = risk_of(name)
    risk.options = EmpiricalRisk(
        risk.model, nn.MSELoss(), [], check=False, batch_size_fn=risk.options.batch_size_fn
    ).options
    J = jacobian(risk)
    close(curvature(risk, DiagonalBlock).diagonal(), 2 * J.square().sum(0) / len(J))


@every
def test_states_say_which_module_is_run_again(name: str) -> None:
    risk = risk_of(name)
    K = curvature(risk, EKFAC)
    expected, state = K.to_dense(), K.state_dict()
    again = risk_of(name)
    loaded = BlockwiseLinearOperator.from_state_dict(
        state, again.model, again.data, batch_size_fn=risk.options.batch_size_fn
    )
    close(loaded.to_dense(), expected, 0 + 1e-15)
    assert loaded.risk.reads is not None
    assert risk.reads is not None
    assert loaded.risk.reads.enclosing == risk.reads.enclosing
    close(loaded.compute().to_dense(), expected)


@every
def test_estimators(name: str) -> None:
    risk = risk_of(name)
    batch = risk.data[0]  # type: ignore[index]
    expected = curvature(risk.with_data([batch]), EKFAC).to_dense()
    updated, listening = (CurvatureEstimator(risk_of(name).with_data(()), EKFAC) for _ in range(2))
    updated.update(batch)
    with listening.listen(batch):
        listening.risk.model(batch[0])
    close(updated.operator.to_dense(), expected)
    close(listening.operator.to_dense(), expected)


@pytest.mark.parametrize("name", ["derivatives", "windows inside", "an assertion"])
def test_training(name: str) -> None:
    risk, loss = risk_of(name), nn.MSELoss()
    X, y = risk.data[0]  # type: ignore[index]
    optimizer, values = KFACOptimizer(risk.model, loss), list[float]()
    for _ in range(12):
        optimizer.zero_grad()
        value = loss(risk.model(X), y)
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0]


def test_processes_take_over_the_larger_module() -> None:
    def described(*names: str) -> Any:
        return describe_reads(FoundReads((), {f"key {k}": name for k, name in enumerate(names)}))

    ordered = [
        described(),
        described("a.b.c"),
        described("a"),
        described(""),
        described("a", "b.c"),
        described("", ""),
    ]
    for smaller, larger in pairwise(ordered):
        assert extent(smaller) < extent(larger)


# ---------------------------------------------------------------------------------- what is refused
class Never(nn.Module):
    """Runs with the examples of a batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 3:
            raise KeyError("not so few")
        return torch.atan2(x, self.scale)


@pytest.mark.parametrize("deep", [1, 2])
def test_what_no_module_around_can_be_run_with_is_refused_with_what_was_tried(deep: int) -> None:
    inner: nn.Module = Never()
    for _ in range(deep):
        inner = nn.Sequential(nn.Linear(2, 2), inner)
    risk = EmpiricalRisk(inner.double(), nn.MSELoss(), [(X, X) for X in ROWS])
    key = next(key for key in risk.params if "scale" in key)
    tried = "the model itself" if deep == 1 else "'1', then the model itself"
    reason = r"layer ''.*raised KeyError: 'not so few'.*leave these out of `params`"
    words = rf"{reason}\. Running {tried} again for each example did not help"
    for _ in range(2):  # the second time is like the first
        with pytest.raises(UnsupportedError, match=words) as error:
            curvature(risk, DiagonalBlock).compute()
        assert key in str(error.value)


@pytest.mark.parametrize("random", [True, False])
def test_what_no_module_around_can_help_with_is_refused_at_once(random: bool) -> None:
    class Draws(Never):
        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(x, self.scale) + 0 * torch.rand(()).item()

    model = nn.Sequential(
        nn.Linear(2, 2), Draws() if random else nn.Sequential(Draws(), nn.BatchNorm1d(2))
    ).double()
    risk = EmpiricalRisk(model.train(), nn.MSELoss(), [(X, X) for X in ROWS], check=False)
    with pytest.raises(
        UnsupportedError, match=r"layer '1.*(draws random numbers|BatchNorm1d)"
    ) as error:
        curvature(risk, DiagonalBlock, check_deterministic=False).compute()
    assert "did not help" not in str(error.value)


# -------------------------------------------------------- examples and other things of equal number
class Table(nn.Module):
    """A weight that functions multiply rows of examples with, and those of a table."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.ones(3, 3)), nn.Linear(3, 2)
        self.register_buffer("table", normal(rows, 3, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ self.w) + torch.tanh(self.table @ self.w).mean(0))


@pytest.mark.parametrize("rows", [9, 10, 12, 15, 21, 22, 30, 768, 770])
def test_the_structure_does_not_depend_on_the_length_of_a_table(rows: int) -> None:
    model = Table(rows).double()
    risk = EmpiricalRisk(
        model, nn.MSELoss(), [(normal(n, 3, seed=n), normal(n, 2, seed=9)) for n in (16, 13)]
    )
    D, J = curvature(risk, DiagonalBlock), jacobian(risk)
    close(D.diagonal(), 2 * J.square().sum(0) / len(J))
    assert [(entry.layer.name, [*entry.layer.params]) for entry in D.plan] == [
        ("", ["w"]),
        ("out", ["out.weight", "out.bias"]),
    ]


# ---------------------------------------------------------------------------- names of other layers
class Holder(nn.Module):
    """A layer, one of whose parameters has a name here, too, beside a parameter of the holder's
    own.
    """

    def __init__(self, name: str, reads: bool) -> None:
        super().__init__()
        self.inner, self.scale, self.reads = nn.Linear(3, 3), nn.Parameter(torch.ones(3)), reads
        setattr(self, name, getattr(self.inner, name))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) * self.scale
        return (
            torch.tanh(h) * (self.weight if hasattr(self, "weight") else self.bias).square().sum()
            if self.reads
            else h
        )


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("local", ["weight", "bias"])
def test_a_layer_with_a_second_name_in_its_parent(local: str, reads: bool) -> None:
    """It has factors, unless the parent reads one of its parameters as well."""
    torch.manual_seed(0)
    model = nn.Sequential(Holder(local, reads), nn.Tanh(), nn.Linear(3, 2)).double()
    risk = EmpiricalRisk(
        model, nn.MSELoss(), [(normal(n, 3, seed=n), normal(n, 2, seed=9)) for n in (6, 4)]
    )
    J = jacobian(risk)
    close(curvature(risk, DiagonalBlock).diagonal(), 2 * J.square().sum(0) / len(J))
    K = curvature(risk, EKFAC)
    close(K.trace, 2 * J.square().sum() / len(J))
    affine = {key for entry in K.plan if entry.layer.affine for key in entry.layer.params}
    other = "bias" if local == "weight" else "weight"
    assert (f"0.inner.{other}" in affine) == (not reads)
    assert (f"0.{local}" in affine) == (not reads)


def test_objects_of_several_examples_are_told_to_be_given_one_by_one() -> None:
    torch.manual_seed(0)
    model, loss = Scaled().double(), nn.MSELoss()
    X, Y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    several = EmpiricalRisk(model, loss, [(Box(X), Y)], batch_size_fn=lambda box: len(box.x))
    with pytest.raises(
        UnsupportedError, match=r"as a batch of graphs, can't be divided.*batch_size_fn=lambda X: 1"
    ):
        curvature(several, DiagonalBlock)
    single = [(Box(x[None]), y[None]) for x, y in zip(X, Y, strict=True)]
    risk = EmpiricalRisk(model, loss, single, batch_size_fn=lambda box: 1)
    params = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in params)).double()
    for x in X:
        for number in model(Box(x[None])).flatten():
            rows = torch.autograd.grad(number, params, retain_graph=True)
            total += 2 / 8 * torch.cat([g.flatten() for g in rows]).square()
    diagonal = curvature(risk, DiagonalBlock).diagonal()
    torch.testing.assert_close(diagonal, total)
