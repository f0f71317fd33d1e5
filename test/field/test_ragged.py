"""Examples of which layers see different numbers of rows: nodes and edges of several graphs, sets of
points, sequences one after the other.

The right values come from plain autograd, one example after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    Empirical,
    EmpiricalRisk,
    Exact,
    FullBlock,
    KFACOptimizer,
    Laplace,
    UnsupportedError,
    curvature,
    per_example_gradients,
)
from test.cases import close
from test.helpers import F64, Written, normal, seeded

pytestmark = pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
SIZES = (3, 1, 4, 2)


def graphs(m: Any, x: Any) -> Tensor:
    """Messages along edges, of nodes and edges and by parameters that functions read, added up."""
    h = m.norm(torch.tanh(m.nodes(torch.cat([m.kinds(x["kinds"]), x["x"]], 1))))
    source, target = x["edges"]
    messages = m.slopes(m.messages(torch.cat([h[source], h[target], x["lengths"]], 1)))
    received = torch.zeros_like(h).index_add(0, target, messages)
    h = m.cell(m.scale * received, h)
    return m.head(h.new_zeros(x["number"], h.shape[1]).index_add(0, x["example"], h))


def points(m: Any, x: Any) -> Tensor:
    """Each point by itself, and the largest numbers of a set."""
    h = m.second(torch.relu(m.norm(m.first(x["x"]))))
    index = x["example"][:, None].expand_as(h)
    return m.head(h.new_zeros(x["number"], h.shape[1]).scatter_reduce(0, index, h, "amax"))


def sequences(m: Any, x: Any) -> Tensor:
    """Attention inside of sequences that are one behind the other, in another order inside."""
    order = x["x"][:, 0].argsort()
    examples = x["example"][order]
    h = m.first(x["x"][order])
    q, k, v = m.attention(h).chunk(3, 1)
    mask = examples[:, None] == examples
    h = h + F.scaled_dot_product_attention(q[None], k[None], v[None], mask[None])[0]
    h = m.bias + h
    return m.head(h.new_zeros(x["number"], h.shape[1]).index_add(0, examples, h))


class Case(NamedTuple):
    """A network, what it is made of, and the examples of its rows."""

    forward: Callable[[Any, Any], Tensor]
    members: Callable[[], Mapping[str, Any]]
    example_of_rows: Callable[[Any], Any] = lambda x: x["example"]


CASES = {
    "graphs": Case(
        graphs,
        lambda: {
            "kinds": nn.Embedding(3, 2),
            "nodes": nn.Linear(4, 3),
            "norm": nn.LayerNorm(3),
            "messages": nn.Linear(7, 3),
            "slopes": nn.PReLU(3),
            "scale": nn.Parameter(torch.rand(3)),
            "cell": nn.GRUCell(3, 3),
            "head": nn.Linear(3, 2),
        },
        lambda x: [x["example"], x["example"][x["edges"][0]]],
    ),
    "points": Case(
        points,
        lambda: {
            "first": nn.Linear(2, 4),
            "norm": nn.BatchNorm1d(4),
            "second": nn.Linear(4, 3),
            "head": nn.Linear(3, 2),
        },
    ),
    "sequences": Case(
        sequences,
        lambda: {
            "first": nn.Linear(2, 4),
            "attention": nn.Linear(4, 12),
            "bias": nn.Parameter(torch.rand(4)),
            "head": nn.Linear(4, 2),
        },
    ),
}


def example(number_of_rows: int, seed: int) -> dict[str, Any]:
    edges = 2 * number_of_rows + 1
    return {
        "x": normal(number_of_rows, 2, seed=seed),
        "kinds": torch.randint(3, (number_of_rows,), generator=seeded(seed)),
        "edges": torch.randint(number_of_rows, (2, edges), generator=seeded(seed + 1)),
        "lengths": normal(edges, 1, seed=seed + 2),
        "example": torch.zeros(number_of_rows, dtype=torch.long),
        "number": 1,
    }


def joined(examples: list[dict[str, Any]]) -> dict[str, Any]:
    starts = torch.tensor([0, *[len(x["x"]) for x in examples]]).cumsum(0)
    together = {key: torch.cat([x[key] for x in examples]) for key in ("x", "kinds", "lengths")}
    edges = [x["edges"] + start for x, start in zip(examples, starts)]
    numbers = torch.arange(len(examples)).repeat_interleave(starts.diff())
    return together | {"edges": torch.cat(edges, 1), "example": numbers, "number": len(examples)}


class Problem:
    """A network, a batch of examples, and the gradients of each by itself."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        case = CASES[name]
        self.example_of_rows = case.example_of_rows
        self.model = Written(case.forward, **case.members()).double().eval()
        if name == "points":
            self.model.norm.running_mean.normal_()
        self.loss = nn.CrossEntropyLoss()
        self.examples = [example(size, 10 * n) for n, size in enumerate(SIZES)]
        self.y = torch.tensor([0, 1, 1, 0])
        self.X = joined(self.examples)
        self.params = list(self.model.parameters())

    def risk(self, **options: Any) -> EmpiricalRisk:
        options = {"example_of_rows": self.example_of_rows, "check": "every"} | options
        return EmpiricalRisk(self.model, self.loss, [(self.X, self.y)], self.params, **options)

    def gradients(self) -> Tensor:  # [N, dim]
        rows = []
        for n, x in enumerate(self.examples):
            value = self.loss(self.model(x), self.y[n : n + 1])
            gradients = torch.autograd.grad(value, self.params, materialize_grads=True)
            rows.append(torch.cat([g.flatten() for g in gradients]))
        return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_each_example(name: str) -> None:
    """They are those that the example has by itself."""
    problem = Problem(name)
    risk = problem.risk()
    (gradients,) = per_example_gradients(risk)
    close(risk.space.flatten_rows(gradients), problem.gradients())


@pytest.mark.parametrize("name", CASES)
def test_blocks_and_traces(name: str) -> None:
    """Blocks under empirical vectors are sums of squares; EKFAC keeps the trace."""
    problem = Problem(name)
    risk = problem.risk()
    J = problem.gradients()
    expected = (J.T @ J / len(J)).diagonal()
    close(curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal(), expected)
    close(curvature(risk, FullBlock, vectors=Empirical()).diagonal(), expected)
    K = curvature(risk, EKFAC, vectors=Exact())
    close(K.trace, GGN(risk).to_dense().trace())
    assert K.verify()


def test_factors() -> None:
    """Those of KFAC are a mean over all nodes, and a sum over their gradients."""
    problem = Problem("graphs")
    K = curvature(problem.risk(), KFAC, vectors=Empirical())
    rows: list[Tensor] = []
    returned: list[Tensor] = []

    def keep(layer: nn.Module, args: Any, out: Tensor) -> None:
        out.retain_grad()
        rows.append(args[0].detach())
        returned.append(out)

    problem.model.nodes.register_forward_hook(keep)
    for n, x in enumerate(problem.examples):
        problem.loss(problem.model(x), problem.y[n : n + 1]).backward()
    a = F.pad(torch.cat(rows), (0, 1), value=1.0)
    g = torch.cat([t.grad for t in returned if t.grad is not None])
    A = a.T @ a / sum(SIZES)
    G = g.T @ g / len(SIZES)
    close(K.blocks["nodes"].to_dense(), torch.kron(G, A))


@pytest.mark.parametrize("way", ["a mapping", "an object", "by names"])
def test_training(way: str) -> None:
    """The optimizer's statistics are those of the batch, however the model is called."""
    problem = Problem("graphs")
    model = problem.model
    call: Callable[[], Any] = lambda: model(problem.X)  # noqa: E731
    if way == "an object":
        model.function = lambda m, batch: graphs(m, vars(batch))
        example_of_rows = lambda batch: problem.example_of_rows(vars(batch))  # noqa: E731
        call = lambda: model(SimpleNamespace(**problem.X))  # noqa: E731
    else:
        example_of_rows = problem.example_of_rows
    if way == "by names":
        model = ByNames(model)
        call = lambda: model(**problem.X)  # noqa: E731
    expected = curvature(Problem("graphs").risk(), KFAC, vectors=Exact()).diagonal()
    model.train()
    optimizer = KFACOptimizer(
        model,
        problem.loss,
        lr=1e-3,
        vectors=Exact(),
        example_of_rows=example_of_rows,
    )
    problem.loss(call(), problem.y).backward()
    close(optimizer.curvature.operator.diagonal(), expected)
    optimizer.step()
    assert optimizer.last_step.examples == len(SIZES)


class ByNames(nn.Module):
    """A model that is called with keywords."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        return self.model(inputs)


def test_batches_of_any_size() -> None:
    """Batches of an estimator add up, whatever number of rows they have."""
    problem = Problem("graphs")
    risk = problem.risk()
    estimator = CurvatureEstimator(risk.with_data([]), DiagonalBlock, vectors=Empirical())
    for part in ([0, 1, 2], [3]):
        X = joined([problem.examples[n] for n in part])
        estimator.update((X, problem.y[part]))
    J = problem.gradients()
    close(estimator.operator.diagonal(), J.square().mean(0))


def test_predictions() -> None:
    """Of several examples together are those of each by itself."""
    problem = Problem("graphs")
    posterior = Laplace(curvature(problem.risk(), DiagonalBlock), 1.0)
    together = posterior.predict(problem.X)
    for n, x in enumerate(problem.examples):
        close(together[n : n + 1], posterior.predict(x))


def test_masks_and_weights() -> None:
    """An example of weight 0 is none, and one of weight 2 counts twice."""
    problem = Problem("points")
    weights = torch.tensor([2.0, 0.0, 1.0, 1.0])
    risk = problem.risk(weight=lambda X, y: weights)
    J = problem.gradients()
    expected = (weights[:, None] * J.square()).sum(0) / weights.sum()
    close(curvature(risk, DiagonalBlock, vectors=Empirical()).diagonal(), expected)


def with_edges(x: dict[str, Any], number: int) -> dict[str, Any]:
    """As many edges of an example."""
    edges = x["edges"].repeat(1, 2)[:, :number]
    return x | {"edges": edges, "lengths": x["lengths"].repeat(2, 1)[:number]}


def test_two_kinds_of_as_many_rows() -> None:
    """Are refused, unless they belong to the same examples."""
    problem = Problem("graphs")
    rings = [with_edges(x, size) for x, size in zip(problem.examples, SIZES)]
    problem.examples, problem.X = rings, joined(rings)
    (gradients,) = per_example_gradients(problem.risk())
    close(problem.risk().space.flatten_rows(gradients), problem.gradients())
    others = [with_edges(x, size) for x, size in zip(problem.examples, (2, 2, 4, 2))]
    problem.X = joined(others)
    with pytest.raises(UnsupportedError, match="two kinds of 10 rows"):
        curvature(problem.risk(), DiagonalBlock)


def test_two_kinds_of_as_many_rows_in_training() -> None:
    """Such a batch adds nothing to the statistics, and training goes on."""
    problem = Problem("graphs")
    optimizer = KFACOptimizer(
        problem.model.train(), problem.loss, lr=1e-3, example_of_rows=problem.example_of_rows
    )
    others = [with_edges(x, size) for x, size in zip(problem.examples, (2, 2, 4, 2))]

    def step(X: Any) -> None:
        optimizer.zero_grad()
        problem.loss(problem.model(X), problem.y).backward()
        optimizer.step()

    step(problem.X)
    before = optimizer.curvature.operator.diagonal()
    with pytest.warns(CurvatureWarning, match=r"two kinds of 10 rows.*adds nothing"):
        step(joined(others))
    assert torch.equal(optimizer.curvature.operator.diagonal(), before)
    step(problem.X)
    assert optimizer.curvature.updates == 2
    assert not optimizer.curvature.withdrawn


def test_what_is_refused() -> None:
    """Numbers that are none, that there are too many of, or that are another example's."""
    problem = Problem("points")
    with pytest.raises(TypeError, match=r"returned torch.float64 \[10, 2\]; expected a vector"):
        curvature(problem.risk(example_of_rows=lambda x: x["x"]), DiagonalBlock)
    with pytest.raises(ValueError, match="names example 3 of batch 0, which has 2"):
        curvature(problem.risk(batch_size_fn=lambda x: 2), DiagonalBlock)
    with pytest.raises(ValueError, match="names example -1 of batch 0"):
        curvature(problem.risk(example_of_rows=lambda x: x["example"] - 1), DiagonalBlock)
    with pytest.raises(UnsupportedError):
        curvature(problem.risk(example_of_rows=lambda x: x["example"].flip(0)), DiagonalBlock)


def test_other_rows_are_not_taken_for_positions() -> None:
    """As many rows of each example would be read that way, if nobody had said otherwise."""
    model = Written(
        lambda m, x: m.head(m.rows(x["x"]).view(2, -1, 3).sum(1)),
        rows=nn.Linear(2, 3),
        head=nn.Linear(3, 2),
    ).to(F64)
    X = {"x": normal(4, 2), "example": torch.tensor([0, 0, 0, 1, 1, 1])}
    risk = EmpiricalRisk(
        model,
        nn.CrossEntropyLoss(),
        [(X, torch.tensor([0, 1]))],
        [model.rows.weight],
        example_of_rows=lambda x: x["example"],
        check=False,
    )
    with pytest.raises(UnsupportedError):
        curvature(risk, KFAC)
