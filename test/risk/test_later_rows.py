"""Rows, attributes and numbers of examples that are others in a later batch only: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import close
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from curvlinops_plus import (
    EKFAC,
    GGN,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    UnsupportedError,
    curvature,
)

pytestmark = pytest.mark.usefixtures("both_ways")


class Unpadded(nn.Module):
    """Positions of sequences that a mask keeps, one row each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.o = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.zeros(*mask.shape, 5, dtype=x.dtype)
        h[mask] = torch.tanh(self.e(x[mask]))
        return self.o(h.sum(1))


class Graphs(Unpadded):
    """Nodes of graphs, one row each, added up by an index."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = torch.zeros(int(index.max()) + 1, 5, dtype=x.dtype)
        return self.o(h.index_add(0, index, torch.tanh(self.e(x))))


def padded(lengths: Sequence[int], width: int = 4) -> dict[str, Tensor]:
    """Sequences of these lengths."""
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {"x": torch.randn(len(lengths), width, 4).double(), "mask": mask, "labels": torch.arange(len(lengths)) % 3}


def graphs(sizes: Sequence[int]) -> dict[str, Tensor]:
    """Graphs of these sizes."""
    index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return {"x": torch.randn(sum(sizes), 4).double(), "index": index, "labels": torch.arange(len(sizes)) % 3}


def traces(model: nn.Module, data: list[Any], approximation: Any, in_loop: bool, **options: Any) -> tuple[Any, Any]:
    """The trace of the curvature, and the exact one."""
    exact, examples = map(sum, zip(*(exact_trace(model, batch) for batch in data)))
    if not in_loop:
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **options)
        return curvature(risk, approximation).trace, exact / examples
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), (), **options), approximation)
    for batch in data:
        estimator.update(batch)
    return estimator.operator.trace, exact / examples


def exact_trace(model: nn.Module, batch: Any) -> tuple[Any, int]:
    """The trace of one batch's GGN, from Jacobians, and how many examples it is a sum over."""
    inputs = {k: t for k, t in batch.items() if k != "labels"} if isinstance(batch, dict) else {}
    args = () if inputs else (batch[0],)
    params = {key: p.detach() for key, p in model.named_parameters()}

    def call(values: dict[str, Tensor]) -> Tensor:
        return functional_call(model, values, args, inputs)

    p = call(params).softmax(1)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    jacobians = [J.flatten(2) for J in jacrev(call)(params).values()]  # [N, C, D] each
    return sum((J * (H @ J)).sum() for J in jacobians), len(p)


UNPADDED = [[(4, 4, 4, 4), (4, 1, 2, 1)], [(2, 1, 3, 2), (2, 2, 2, 2)], [(2, 2, 2, 2), (2, 1, 3, 2)]]
GRAPHS = [[(3, 3, 3), (1, 3, 5)], [(3, 3, 3), (2, 1, 3)], [(2, 2, 2), (3, 3, 3)], [(3, 3, 3), (1, 4, 4)]]
ROWS = [(Unpadded, padded, sizes, {}) for sizes in UNPADDED]
ROWS += [(Graphs, graphs, sizes, {"batch_size_fn": lambda X: int(X["index"].max()) + 1}) for sizes in GRAPHS]


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("make", "read", "sizes", "options"), ROWS)
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_rows_of_other_examples_in_a_later_batch(
    make: Any, read: Any, sizes: Any, options: Any, turned: bool, in_loop: bool
) -> None:
    data = [read(found) for found in (sizes[::-1] if turned else sizes)]
    try:
        ours, exact = traces(make(), data, EKFAC, in_loop, **options)
    except (UnsupportedError, ValueError) as error:
        assert "layer 'e'" in str(error) or "layer ''" in str(error)  # noqa: PT017
    else:
        close(ours, exact)


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double().abs()


class Scaled(nn.Module):
    """A module of unknown code, with a factor that it holds in some way."""

    def __init__(self, hold: Callable[[float], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gamma, self.hold, self.read = nn.Parameter(torch.ones(6).double()), hold, read
        self.held = hold(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gamma * self.read(self.held))


class Changes(nn.Module):
    """Sets the factor for negative inputs, and sets it back."""

    def __init__(self, scaled: Scaled) -> None:
        super().__init__()
        self.a, self.scaled, self.b = nn.Linear(4, 6).double(), scaled, nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        self.scaled.held = self.scaled.hold(3.0 if bool((x < 0).all()) else 1.0)
        h = self.scaled(self.a(x))
        self.scaled.held = self.scaled.hold(1.0)
        return self.b(h)


HELD: dict[str, tuple[Callable[[float], Any], Callable[[Any], Any]]] = {
    "NumPy number": (np.float64, float),
    "NumPy array": (lambda c: np.array([c]), lambda held: float(held[0])),
    "tensor": (torch.tensor, lambda held: held),
    "list of tensors": (lambda c: [torch.tensor(c)], lambda held: held[0]),
    "long tensor": (lambda c: torch.full((40,), c), lambda held: held[0]),
    "object": (lambda c: SimpleNamespace(c=c), lambda held: held.c),
    "tensor in an object": (lambda c: SimpleNamespace(c=torch.tensor(c)), lambda held: held.c),
}


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", HELD)
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_attributes_that_are_others_in_a_later_batch(kind: str, turned: bool, in_loop: bool) -> None:
    data = [(X, torch.arange(6) % 3), (-X, torch.arange(6) % 2)]
    with pytest.raises(UnsupportedError, match="layer 'scaled'"):
        traces(Changes(Scaled(*HELD[kind])), data[::-1] if turned else data, DiagonalBlock, in_loop)


class Centred(nn.Module):
    """Examples depend on each other in batches of some sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.sizes = nn.Linear(4, 6).double(), nn.Linear(6, 3).double(), sizes

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h - h.mean(0) * (len(x) in self.sizes))


@pytest.mark.parametrize("listening", [False, True])
@pytest.mark.parametrize("numbers", [(7, 5), (5, 7), (5, 6, 2, 7), (3, 2)])
def test_examples_that_depend_on_each_other_in_batches_of_one_size(numbers: Sequence[int], listening: bool) -> None:
    model = Centred([2, 7])
    estimator = CurvatureEstimator(EmpiricalRisk(model, nn.CrossEntropyLoss(), ()), EKFAC)

    def steps() -> None:
        for N in numbers:
            batch = torch.randn(N, 4).double(), torch.arange(N) % 3
            if listening:
                with estimator.listen(batch):
                    model(batch[0])
            else:
                estimator.update(batch)

    with pytest.raises(UnsupportedError, match=r"layer 'a' .*mixes examples"):
        steps()


class Tabled(nn.Module):
    """A layer without a rule that is given a table, the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5).double())

    def forward(self, h: Tensor, table: Tensor) -> Tensor:
        return (h + table.mean(0)) * self.gain


class WithTable(Unpadded):
    """A table of some rows on the way."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tabled, self.table = Tabled(), torch.randn(rows, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.tanh(self.tabled(self.e(x), self.table)))


@pytest.mark.parametrize("rows", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("sizes", [(6, 5), (5, 6), (6, 3, 2), (4, 5, 2)])
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_a_table_with_as_many_rows_as_a_batch_has_examples(sizes: Sequence[int], rows: int) -> None:
    """It counts as rows of examples: refused, unless no batch has as many examples."""
    model = WithTable(rows)
    params, X = list(model.parameters()), torch.randn(11, 4).double()
    data = list(zip(X.split(sizes), (torch.arange(11) % 3).split(sizes), strict=True))
    exact = GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params)).to_dense().diagonal()
    try:
        K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params), DiagonalBlock)
    except UnsupportedError as error:
        assert rows in sizes
        assert "layer 'tabled'" in str(error)  # noqa: PT017
    else:
        close(K.diagonal(), exact)
        assert rows not in sizes
