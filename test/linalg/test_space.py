"""Named tensors as one vector: round trips, forms, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlinops_plus.linalg import Dense, Space

from .cases import F64, normal

SPACE = Space.from_shapes({"weight": (2, 3), "scalar": (), "bias": (2,)})
CPU = torch.device("cpu")

shapes = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(shapes, st.lists(st.integers(0, 3), max_size=2))
def test_round_trips(shapes: list[list[int]], K: list[int]) -> None:
    space = Space.from_shapes(shapes)
    assert space.dim == sum(space.sizes) == sum(int(np.prod(shape)) for shape in shapes)
    v = normal(space.dim, *K)
    parts = space.unflatten(v)
    assert [tuple(t.shape) for t in parts.values()] == [(*shape, *K) for shape in shapes]
    assert torch.equal(space.flatten(parts), v)
    assert torch.equal(space.flatten(list(parts.values())), v)
    rows = normal(*K, space.dim)
    assert torch.equal(space.flatten_rows(space.unflatten_rows(rows)), rows)
    assert Space.of(space.unflatten(normal(space.dim))) == space


def test_unflatten_gives_views() -> None:
    v = normal(SPACE.dim, 2)
    SPACE.unflatten(v)["bias"].zero_()
    assert v[-2:].abs().sum() == 0
    assert SPACE.part(v, "bias").shape == (2, 2)


def test_equality_knows_names_and_order() -> None:
    same, reordered = Space.from_shapes(dict(SPACE.shapes)), Space.from_shapes(dict(reversed(SPACE.shapes.items())))
    anonymous = Space.from_shapes(list(SPACE.shapes.values()))
    assert same == SPACE
    assert hash(same) == hash(SPACE)
    assert reordered != SPACE
    assert anonymous != SPACE
    assert anonymous.compatible(SPACE)
    assert not reordered.compatible(SPACE)
    assert Space.from_shapes([(9,)]).matches(SPACE)
    assert not Space.from_shapes([(3, 3)]).matches(SPACE)


REFUSED = [
    ([(2, 2)], torch.zeros(3), ValueError, r"Expected shape \[4\] or \[4, K\], got \[3\]"),
    ([(2, 2)], torch.zeros(4, 1, 1), ValueError, r"got \[4, 1, 1\]"),
    ([(2, 2)], np.zeros((2, 4)), ValueError, r"Expected shape \[4\] or \[4, K\], got \[2, 4\]"),
    ([(2, 2)], np.zeros(4, dtype=complex), TypeError, "real numbers, got dtype complex128"),
    ([(2, 2)], "vector", TypeError, "Expected a tensor or NumPy array .* got str"),
    ([(2, 2)], [1.0, 2.0], ValueError, r"Expected 1 tensors of shapes \[\[2, 2\]\], got 2"),
    ([(2, 2)], [4.0], TypeError, r'Entry "0": expected a tensor of shape \[2, 2\], got float'),
    ([(2, 2)], [torch.zeros(4)], ValueError, r'Tensor "0": expected shape \[2, 2\] or \[2, 2, K\], got \[4\]'),
    ([(2, 2)], {"w": torch.zeros(2, 2)}, ValueError, r"named \['0'\]; missing \['0'\], unexpected \['w'\]"),
    ([(2,), (1,)], [torch.zeros(2, 3), torch.zeros(1, 2)], ValueError, "same number of columns"),
    ([(2,), (1,)], [torch.zeros(2, 3), torch.zeros(1)], ValueError, "same number of columns"),
    ([(2, 2)], torch.zeros(4, dtype=F64), TypeError, r"in torch.float32.* got torch.float64; convert it: X\.to\("),
    ([(2, 2)], torch.zeros(4, dtype=torch.int64), TypeError, "got torch.int64"),
    ([(2, 2)], [torch.zeros(2, 2, dtype=F64)], TypeError, 'Expected tensor "0" in torch.float32'),
    ([(2, 2)], torch.zeros(4, device="meta"), TypeError, "on cpu, where the operator is, got meta"),
]


@pytest.mark.parametrize(("shapes", "X", "error", "message"), REFUSED)
def test_refused_vectors(shapes: list, X: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Space.from_shapes(shapes).read(X, torch.float32, CPU)


def test_errors_name_the_operator_and_the_side() -> None:
    A = Dense(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"Dense\(2 x 3, GENERAL, torch.float32, cpu\) @ X: Expected shape \[3\]"):
        _ = A @ torch.zeros(2)
    with pytest.raises(ValueError, match=r"X @ Dense\(.*\): Expected shape \[2\] or \[K, 2\], got \[4, 3\]"):
        _ = torch.zeros(4, 3) @ A
    with pytest.raises(ValueError, match=r'Tensor "0": expected shape \[2\] or \[K, 2\], got \[2, 4\]'):
        _ = [torch.zeros(2, 4)] @ A


def test_other_errors() -> None:
    for shapes in (3, "vector", None):
        with pytest.raises(TypeError, match=r"a sequence or mapping of shapes such as .*, got"):
            Space.from_shapes(shapes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sequence of shapes, got \(2, 3\); write \[\(2, 3\)\]"):
        Space.from_shapes((2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'Tensor "bias": expected shape \[2\] \(and columns\), got \[3\]'):
        SPACE.flatten([torch.zeros(2, 3), torch.zeros(()), torch.zeros(3)])
    with pytest.raises(ValueError, match=r'Tensor "weight": expected shape \[..., 2, 3\], got \[3, 2\]'):
        SPACE.flatten_rows([torch.zeros(3, 2), torch.zeros(()), torch.zeros(2)])
    with pytest.raises(ValueError, match="same leading axes in every tensor"):
        SPACE.flatten_rows([torch.zeros(5, 2, 3), torch.zeros(5), torch.zeros(4, 2)])
