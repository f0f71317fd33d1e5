"""Batches that are lists with an entry for each example: bags of instances, images of all sizes,
texts that the model looks up itself.

Of the squared error the Gauss-Newton matrix is `2 / (N C)` times the sum of squared derivatives of
the outputs, which autograd gives for one example after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    DiagonalBlock,
    EmpiricalRisk,
    FullBlock,
    KFACOptimizer,
    Laplace,
    curvature,
    per_example_gradients,
)
from test.cases import close
from test.helpers import Written, normal, output_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*exact diagonal:UserWarning")
LETTERS = "abcdef"


def bags(s: Any, bags: Any) -> Tensor:
    """Attention over the instances of each bag."""
    pooled = []
    for bag in bags:
        h = torch.tanh(s.a(bag))
        pooled.append((s.attention(h).softmax(0) * h).sum(0))
    return s.b(torch.stack(pooled))


def images(s: Any, images: Any) -> Tensor:
    means = [torch.tanh(s.conv(image[None])).mean((2, 3))[0] for image in images]
    return s.b(torch.stack(means))


def padded(s: Any, images: Any) -> Tensor:
    height = max(image.shape[1] for image in images)
    same = [F.pad(image, (0, 0, 0, height - image.shape[1])) for image in images]
    return s.b(torch.tanh(s.conv(torch.stack(same))).sum((2, 3)))


def texts(s: Any, texts: Any) -> Tensor:
    at = [torch.tensor([LETTERS.index(letter) for letter in text]) for text in texts]
    return s.b(torch.stack([s.table(index).mean(0) for index in at]))


def net(function: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    members: dict[Any, dict[str, Any]] = {
        bags: {"a": nn.Linear(4, 3), "attention": nn.Linear(3, 1)},
        texts: {"table": nn.Embedding(6, 3)},
    }
    inner = members.get(function, {"conv": nn.Conv2d(3, 3, 2, bias=False)})
    return Written(function, **inner, b=nn.Linear(3, 2)).double()


def of_sizes(sizes: list[int], *shape: int, axis: int = 0) -> list[Tensor]:
    """Tensors whose lengths on one axis are these."""
    tensors = []
    for k, size in enumerate(sizes):
        tensors.append(normal(*shape[:axis], size, *shape[axis:], seed=k))
    return tensors


# Where all have as many rows as there are examples, or as many as the self-check looks at, rows look
# like examples.
SIZES = {"ragged": [1, 2, 3, 2, 1, 4, 2, 2], "threes": [3] * 8, "fives": [5] * 8, "ones": [1] * 8}
DATA: dict[str, tuple[Callable[..., Tensor], Any]] = {
    **{f"bags, {name}": (bags, of_sizes(sizes, 4)) for name, sizes in SIZES.items()},
    "images": (images, of_sizes([3, 4, 3, 5, 4, 3, 3, 4], 3, 4, axis=1)),
    "images of one size": (images, of_sizes([3] * 8, 3, 4, axis=1)),
    "padded images": (padded, of_sizes([4] * 8, 3, 4, axis=1)),
    "texts": (texts, ["ab", "cd", "e", "faa", "b", "c", "dd", "e"]),
}
Y = normal(8, 2, seed=9)


def problem(name: str, size: int) -> tuple[EmpiricalRisk, Tensor]:
    """A risk with batches of this size, and the derivatives of the outputs."""
    function, X = DATA[name]
    model = net(function)
    data = [(X[n : n + size], Y[n : n + size]) for n in range(0, 8, size)]
    risk = EmpiricalRisk(model, nn.MSELoss(), data, batch_size_fn=len)
    return risk, output_rows(model, [[x] for x in X])


@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("name", DATA)
def test_each_entry_is_an_example(name: str, size: int) -> None:
    risk, J = problem(name, size)
    diagonal = J.square().sum(0) * 2 / 16
    close(curvature(risk, DiagonalBlock).diagonal(), diagonal)
    close(GGN(risk) @ torch.eye(J.shape[1], dtype=J.dtype), J.T @ J * 2 / 16)
    assert not any(error > 1e-9 for *_, error in curvature(risk, EKFAC).verify().rows)


def test_predictions_gradients_and_training() -> None:
    risk, J = problem("bags, ragged", 5)
    X = DATA["bags, ragged"][1]
    J = J.view(8, 2, -1)
    la = Laplace(curvature(risk, FullBlock), 1.0)
    S = la.posterior @ torch.eye(J.shape[2], dtype=J.dtype)
    close(la.outputs(X)[1], J @ S @ J.mT)

    residuals = torch.cat([risk.model([x]) for x in X]).detach() - Y
    expected = (residuals[:, :, None] * J).sum(1)  # of half the sum of squares
    got = [torch.cat([g.flatten(1) for g in of.values()], 1) for of in per_example_gradients(risk)]
    got = torch.cat(got)
    close(got / got.norm(), expected / expected.norm())

    model, loss = net(bags), nn.MSELoss()
    optimizer = KFACOptimizer(model, loss, lr=0.1, batch_size_fn=len)
    errors = []
    for _ in range(8):
        optimizer.zero_grad()
        error = loss(model(X), Y)
        error.backward()
        optimizer.step()
        errors.append(float(error.detach()))
    assert errors[-1] < errors[0]
    assert not optimizer.curvature.withdrawn


def test_in_a_mapping_beside_other_lists() -> None:
    X = of_sizes(SIZES["ragged"], 4)
    model = Written(lambda s, x: s.inner(x["bags"]) * sum(x["scales"]), inner=net(bags))
    data = []
    for start in range(0, 8, 4):
        part = slice(start, start + 4)
        data.append(({"bags": X[part], "scales": (1.0, 2.0, 0.5, 0.1, 0.3)}, Y[part]))
    risk = EmpiricalRisk(model, nn.MSELoss(), data, batch_size_fn=lambda X: len(X["bags"]))
    J = output_rows(net(bags), [[x] for x in X]) * 3.9
    close(curvature(risk, DiagonalBlock).diagonal(), J.square().sum(0) * 2 / 16)


@pytest.mark.parametrize("size", [2, 4])
def test_several_inputs_in_a_list_are_no_examples(size: int) -> None:
    """Batches of two, and two inputs: the function that counts examples tells which is which."""
    torch.manual_seed(0)

    def by_einsum(s: Any, x: Any) -> Tensor:
        return s.b(torch.tanh(torch.einsum("ni,io->no", x[0], s.p) + s.q(x[1])))

    members = {"p": nn.Parameter(torch.randn(4, 3)), "q": nn.Linear(2, 3), "b": nn.Linear(3, 2)}
    model = Written(by_einsum, **members).double()
    P, Q = normal(8, 4, seed=1), normal(8, 2, seed=2)
    parts = [slice(n, n + size) for n in range(0, 8, size)]
    data = [([P[part], Q[part]], Y[part]) for part in parts]
    risk = EmpiricalRisk(model, nn.MSELoss(), data, batch_size_fn=lambda X: len(X[0]))
    J = output_rows(model, [*zip(P.split(1), Q.split(1), strict=True)])
    close(curvature(risk, DiagonalBlock).diagonal(), J.square().sum(0) * 2 / 16)
