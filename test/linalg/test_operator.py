"""Arithmetic of operators, the vectors that they multiply, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlinops_plus.linalg import (
    Dense,
    IdentityLinearOperator,
    LinearOperator,
    Scaled,
    Space,
    Structure,
)
from test.linalg.cases import F64, OnlyProducts, eye_like, normal, psd, symmetric
from test.linalg.test_laws import close

PSD, SYMMETRIC, GENERAL = Structure.PSD, Structure.SYMMETRIC, Structure.GENERAL


def test_structure_of_results() -> None:
    P, S, G = Dense(psd(3, 3), PSD), Dense(symmetric(3), SYMMETRIC), Dense(normal(3, 3))
    for A, structure in (
        (P + P, PSD),
        (P + S, SYMMETRIC),
        (P - P, SYMMETRIC),
        (P + G, GENERAL),
        (2 * P, PSD),
        (-P, SYMMETRIC),
        (-G, GENERAL),
        (P.shift(1.0), PSD),
        (P.shift(-1.0), SYMMETRIC),
        (P @ P, GENERAL),
    ):
        assert A.structure == structure


def test_adding_multiples_of_the_identity_shifts() -> None:
    M = psd(4, 4)
    A, eye = Dense(M, PSD), IdentityLinearOperator([(4,)], dtype=F64)
    for shifted, delta in (
        (A + eye, 1.0),
        (2 * eye + A, 2.0),
        (A - 0.1 * eye, -0.1),
        (A + eye / 2, 0.5),
    ):
        assert isinstance(shifted, Scaled)
        close(shifted.to_dense(), M + delta * eye_like(M))
        close(shifted.logdet, torch.logdet(M + delta * eye_like(M)))
    assert ((A + eye) + eye).A is A
    close(((A + eye) + eye).to_dense(), M + 2 * eye_like(M))
    close((eye - A).to_dense(), eye_like(M) - M)
    close((eye + 2 * eye).logdet, 4 * torch.tensor(3.0, dtype=F64).log())


def test_nested_arithmetic() -> None:
    M, N = normal(3, 3), normal(3, 3, seed=1)
    A, B = Dense(M), Dense(N)
    close((2 * A - B.T @ A / 4).to_dense(), 2 * M - N.T @ M / 4)
    close((-(A + B)).T.to_dense(), -(M + N).T)
    for n in (2, 3):
        close((-Dense(normal(n, n))).det, (-1) ** n * torch.linalg.det(normal(n, n)))
    close(sum([A, B, A]).to_dense(), 2 * M + N)
    close(A.H @ N, M.T @ N)
    for c in (2, np.float32(2), np.int64(2), torch.tensor(2.0)):
        for scaled in (c * A, A * c, A / (1 / c)):
            close(scaled @ torch.ones(3, dtype=F64), 2 * M.sum(1))
    space = Space.from_shapes({"a": (2,), "b": (1,)})
    for combined in (
        OnlyProducts(M, space) + A,
        A + OnlyProducts(M, space),
        A @ OnlyProducts(M, space),
    ):
        assert combined.in_space == space  # a flat operator joins one with shapes


@pytest.mark.parametrize("wide", [torch.float32, F64])
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16, torch.float32])
def test_narrower_vectors_are_widened(narrow: torch.dtype, wide: torch.dtype) -> None:
    """The result is that of the widened vector, in the operator's dtype; autocast changes
    nothing.
    """
    A, X = Dense(normal(3, 4).to(wide)), normal(4, 2).to(narrow)
    expected = A.to_dense() @ X.to(wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = A @ X
    assert found.dtype == wide
    close(found, expected)
    close((A @ [X])[0], expected)
    close(X.T @ A.T, expected.T)
    close((A.T @ A).quadratic_form(X.T), expected.T @ expected)
    half = Dense(torch.eye(3, dtype=torch.bfloat16))
    assert ((half @ torch.ones(3, dtype=torch.float16)).dtype, (half @ np.ones(3)).dtype) == (
        torch.bfloat16,
        np.float32,
    )
    assert (Dense(torch.eye(3)) @ np.arange(6)[::-2]).tolist() == [
        5.0,
        3.0,
        1.0,
    ]  # integers, negative strides


class Triangle(LinearOperator):
    """Not symmetric, and cannot be transposed."""

    in_space, dtype, device = Space.from_shapes([(3,)]), F64, torch.device("cpu")  # type: ignore[assignment]

    def _matmat(self, X: torch.Tensor) -> torch.Tensor:
        return X.cumsum(0)


class Twice(LinearOperator):
    device = torch.device("cpu")

    def _matmat(self, X: torch.Tensor) -> torch.Tensor:
        return 2 * X


def test_operators_of_users() -> None:
    """Attributes are given to the constructor, or those of the class."""
    assert (Triangle() @ torch.ones(3, dtype=F64)).tolist() == [1, 2, 3]
    assert Triangle().to("cpu").in_shapes == ((3,),)
    assert Triangle().to("cpu:0").in_shapes == ((3,),)
    space, out = Space.from_shapes({"w": (2,)}), Space.from_shapes({"y": (2,)})
    A = Twice(space, F64)
    assert (A.in_space, A.out_space, A.structure, A.device.type) == (space, space, GENERAL, "cpu")
    assert Twice(space, F64, structure=PSD).structure == PSD
    assert Twice(space, F64, out_space=out).T.in_space is out
    answer = Twice(space, F64, out_space=out) @ {"w": torch.ones(2, dtype=F64)}
    assert {name: t.tolist() for name, t in answer.items()} == {"y": [2, 2]}


# Spaces
# --------------------------------------------------------------------------------------------------

SPACE = Space.from_shapes({"weight": (2, 3), "scalar": (), "bias": (2,)})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=2),
)
def test_round_trips(shapes: list[list[int]], K: list[int]) -> None:
    space = Space.from_shapes(shapes)
    assert space.dim == sum(space.sizes) == sum(int(np.prod(shape)) for shape in shapes)
    v, rows = normal(space.dim, *K), normal(*K, space.dim)
    parts = space.unflatten(v)
    assert [tuple(t.shape) for t in parts.values()] == [(*shape, *K) for shape in shapes]
    assert torch.equal(space.flatten(parts), v)
    assert torch.equal(space.flatten(dict(reversed(parts.items()))), v)
    assert torch.equal(space.flatten_rows(space.unflatten_rows(rows)), rows)
    assert Space.of(space.unflatten(normal(space.dim))) == space


def test_views_names_and_order() -> None:
    v = normal(SPACE.dim, 2)
    SPACE.unflatten(v)["bias"].zero_()
    assert v[-2:].abs().sum() == 0
    same, reordered = (
        Space.from_shapes(dict(SPACE.shapes)),
        Space.from_shapes(dict(reversed(SPACE.shapes.items()))),
    )
    anonymous = Space.from_shapes(list(SPACE.shapes.values()))
    assert same == SPACE
    assert hash(same) == hash(SPACE)
    assert SPACE not in (reordered, anonymous)
    assert anonymous.compatible(SPACE)
    assert not reordered.compatible(SPACE)
    assert Space.from_shapes([(9,)]).matches(SPACE)
    assert not Space.from_shapes([(3, 3)]).matches(SPACE)


def test_a_shifted_matrix_says_of_what_and_by_how_much() -> None:
    A = Dense(torch.eye(2), Structure.PSD)
    shown = repr(Scaled(A, 2.0, 0.5))
    assert shown == (
        "Scaled(2 x 2, PSD, torch.float32, cpu)\n  2 A + 0.5 I, A = "
        "Dense(2 x 2, PSD, torch.float32, cpu)"
    )
    delta = torch.tensor(0.5, requires_grad=True)
    assert repr(Scaled(A, 2.0, delta)) == shown
