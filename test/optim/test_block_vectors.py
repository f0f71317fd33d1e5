"""Parameters as vectors of whole option groups, against concatenating them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import KFAC, DiagonalBlock, KFACOptimizer
from curvlinops_plus.linalg import Layout
from curvlinops_plus.optim.kfac.block_vectors import BlockVectors

#: Key to shape and pattern, block by block; the last two have axes that the matrix takes apart, and the entries of "x"
#: can't be a view.
BLOCKS = [
    {"w": ((3, 4), "o i -> o i"), "b": ((3,), "o -> o 1")},
    {"k": ((4, 2, 3, 3), "o i h w -> o (i h w)"), "c": ((4,), "o -> o 1")},
    {"t": ((5, 2), "i o -> o i")},
    {"s": ((2, 3), "a b -> 1 (a b)")},
    {"u": ((), "-> 1 1")},
    {"g": ((6, 2), "(g o) i -> g o i"), "h": ((6,), "(g o) -> g o 1")},
    {"x": ((4, 3, 2), "(g i) o t -> g o (i t)"), "y": ((6,), "(g o) -> g o 1")},
]


def problem() -> tuple[BlockVectors, dict[str, Layout], dict[str, Tensor]]:
    """All layouts, in two option groups by turns."""
    layouts: dict[str, Layout] = {}
    for of in BLOCKS:
        shapes, patterns = {k: shape for k, (shape, _) in of.items()}, {k: pattern for k, (_, pattern) in of.items()}
        layouts["".join(of)] = Layout(patterns, shapes, {"g": 2} if of.keys() & {"g", "x"} else {})
    torch.manual_seed(0)
    params = {key: torch.randn(shape).double() for of in layouts.values() for key, shape in of.shapes.items()}
    groups: list[dict[str, Any]] = [{}, {}]
    of_keys = {key: groups[k % 2] for k, layout in enumerate(layouts.values()) for key in layout.names}
    return BlockVectors(layouts, params, of_keys, torch.float64), layouts, params


def tensors(vectors: BlockVectors, columns: tuple[int, ...] = ()) -> list[Tensor]:
    return [torch.randn((*columns, *p.shape)).double() for p in vectors.params]


def test_parts_are_the_rows_of_the_layouts() -> None:
    vectors, layouts, _ = problem()
    given = tensors(vectors)
    tree = {key: t[..., None] for key, t in zip(vectors.keys, given, strict=True)}
    joined = vectors.join(given)
    assert len(joined) == 2
    parts = vectors.parts(joined)
    assert parts.keys() == layouts.keys()
    for name, layout in layouts.items():
        assert torch.equal(parts[name], layout.join(tree)[:, 0])
    assert all(map(torch.equal, vectors.join_parts(parts), joined))


@pytest.mark.parametrize("columns", [(), (3,)])
def test_splitting_undoes_joining(columns: tuple[int, ...]) -> None:
    vectors, _, _ = problem()
    given = tensors(vectors, columns)
    columns_of = [vectors.join([t[k] for t in given]) for k in range(3)] if columns else [vectors.join(given)]
    joined = [torch.stack(vs) if columns else vs[0] for vs in zip(*columns_of, strict=True)]
    assert all(map(torch.equal, vectors.split(joined), given))


def test_adding_to_parameters() -> None:
    vectors, _, _ = problem()
    given, before = tensors(vectors), [p.clone() for p in vectors.params]
    vectors.add_to_params(vectors.join(given))
    assert all(torch.equal(p, b + t) for p, b, t in zip(vectors.params, before, given, strict=True))


def test_what_is_kept() -> None:
    vectors, _, _ = problem()
    state: dict[Any, dict[str, Any]] = {p: {} for p in vectors.params}
    given = vectors.join(tensors(vectors))

    def as_kept() -> list[Tensor]:
        return [state[p]["v"] for p in vectors.params]

    vectors.remember(state, "v", given)
    assert all(map(torch.equal, as_kept(), vectors.split(given)))
    found, there = vectors.recall(state, "v")
    assert all(a is b for a, b in zip(found, given, strict=True))
    assert all(there)
    for v in found:  # in place, as steps do
        v.mul_(2)
    vectors.remember(state, "v", found)
    assert all(map(torch.equal, as_kept(), vectors.split(found)))
    state[vectors.params[0]]["v"] = torch.zeros_like(vectors.params[0])  # somebody else's
    state[vectors.params[-1]]["v"].fill_(7.0)
    expected = [t.clone() for t in as_kept()]
    found, _ = vectors.recall(state, "v")
    assert all(map(torch.equal, vectors.split(found), expected))
    vectors.remember(state, "v", [None, found[1]])
    found, there = vectors.recall(state, "v")
    assert there == [k == 1 for k in vectors.at]
    assert not found[0].any()
    assert all(torch.equal(state[p]["v"], t) for p, t, k in zip(vectors.params, expected, vectors.at, strict=True) if k)


class Twisted(nn.Module):
    """Layers whose matrices take axes of their parameters apart, one of which is called by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose1d(4, 6, 2, groups=2)
        self.second = nn.Conv1d(6, 4, 2, groups=2, bias=False)
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.head = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.head](torch.tanh(self.second(torch.tanh(self.first(x)))).mean(-1))


@pytest.mark.parametrize("approximation", [KFAC, DiagonalBlock])
@pytest.mark.parametrize("options", [{}, {"norm_constraint": None}, {"reject": 2.0}])
def test_steps_against_dense_algebra(approximation: Any, options: dict[str, Any]) -> None:
    """`δ = μ v - α (K + λ)⁻¹ g`, shortened to `⟨δ, (C + λ) δ⟩ <= c`, with blocks that do not move in every step."""
    torch.manual_seed(0)
    model, loss = Twisted().double(), nn.MSELoss()
    optimizer = KFACOptimizer(model, loss, 0.3, 0.8, 0.1, approximation=approximation, inverse_every=1, **options)
    velocity = {p: torch.zeros_like(p) for p in model.parameters()}
    for step in range(8):
        model.head = step // 2 % 2
        X, y = torch.randn(6, 4, 5).double(), torch.randn(6, 3).double()
        optimizer.zero_grad()
        loss(model(X), y).backward()
        before = {p: p.detach().clone() for p in model.parameters()}
        optimizer.step()
        assert not optimizer.last_step.rejected
        K = optimizer.curvature.estimator.refreshed
        moved = [p for p in model.parameters() if p.grad is not None]
        names = {p: name for name, p in model.named_parameters()}
        everything = {n: torch.zeros_like(K.risk.params[n]) for n in K.in_space.names}
        g = K.in_space.flatten(everything | {names[p]: p.grad for p in moved if p.grad is not None})
        v = K.in_space.flatten(everything | {names[p]: velocity[p] for p in moved})
        C = K.to_dense() + 0.1 * torch.eye(len(g)).double()
        delta = 0.8 * v - 0.3 * torch.linalg.solve(C, g)
        if "norm_constraint" not in options:
            # The constraint carries (C + λ) v along, which belongs to the inverse of the step before.
            delta *= optimizer.last_step.scale
        tree = K.in_space.unflatten(delta)
        for p in model.parameters():
            if p.grad is None:
                assert torch.equal(p, before[p])
            else:
                velocity[p] = tree[names[p]]
                torch.testing.assert_close(p - before[p], velocity[p], rtol=1e-8, atol=1e-12)
                torch.testing.assert_close(optimizer.state[p]["velocity"], velocity[p], rtol=1e-8, atol=1e-12)
    assert optimizer.state_dict()["state"]


def test_what_is_kept_of_parameters_at_rest_is_not_a_part_of_larger_tensors() -> None:
    """Else every step with other layers would leave a whole vector behind."""
    torch.manual_seed(0)
    model, loss = Twisted(), nn.MSELoss()
    optimizer = KFACOptimizer(model, loss)
    for step in range(4):
        model.head = step % 2
        optimizer.zero_grad()
        loss(model(torch.randn(6, 4, 5)), torch.randn(6, 3)).backward()
        optimizer.step()
    kept = optimizer.state[model.get_parameter("heads.0.weight")]["velocity"]
    assert kept.untyped_storage().nbytes() == 4 * kept.numel()


def test_a_step_in_which_nothing_has_a_curvature_yet_moves_nothing() -> None:
    torch.manual_seed(0)
    model, loss = Twisted(), nn.MSELoss()
    optimizer = KFACOptimizer(model, loss, params=model.heads.parameters(), statistics_every=10)
    for step in range(2):  # no statistics are due when the second head is called for the first time
        model.head = step
        optimizer.zero_grad()
        loss(model(torch.randn(6, 4, 5)), torch.randn(6, 3)).backward()
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert any(moved) == (step == 0)
    assert optimizer.last_step.left_alone == [f"heads.{k}.{name}" for k in range(2) for name in ("weight", "bias")]
