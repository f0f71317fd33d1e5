"""Experts as stacks of matrices, multiplied in every way: as the same experts that are modules."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    KFACOptimizer,
    MonteCarlo,
    attribution_scores,
    curvature,
)
from curvlinops_plus.blocks import NearestKronecker
from test.cases import close, same, unchanged
from test.helpers import normal, seeded

D, H, E, C = 4, 8, 3, 3


class Modules(nn.Module):
    """Experts `tanh(x Wᵀ + b) Vᵀ`, each an `nn.Linear`; the two best ones for each token.

    Args:
        everyone: Every token goes to all experts.
    """

    def __init__(self, everyone: bool = False) -> None:
        super().__init__()
        self.everyone = everyone
        self.router, self.head = nn.Linear(D, E), nn.Linear(D, C)
        self.up = nn.ModuleList(nn.Linear(D, H) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(H, D, bias=False) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        p, choice = self.router(rows).softmax(-1).topk(E if self.everyone else 2, -1)
        return self.head((rows + self.mixed(rows, p, choice)).view_as(x)).mean(1)

    def mixed(self, rows: Tensor, p: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e in range(E):
            at, k = torch.where(choice == e)
            y = self.down[e](torch.tanh(self.up[e](rows[at])))
            out = out.index_add(0, at, y * p[at, k, None])
        return out


class Stacks(Modules):
    """The same with stacks.

    Args:
        up: How `x Wᵀ + b` is computed of rows and the experts that they meet.
        down: How `h Vᵀ` is.
    """

    def __init__(self, up: Any, down: Any, everyone: bool = False) -> None:
        super().__init__(everyone)
        torch.manual_seed(0)
        by_module = Modules()
        self.load_state_dict(by_module.state_dict())
        held = dict(self.named_parameters())
        del self.up, self.down

        def stack(name: str, flips: bool = False) -> nn.Parameter:
            t = torch.stack([held[name.format(e)].detach() for e in range(E)])
            return nn.Parameter((t.mT if flips else t).clone(memory_format=torch.contiguous_format))

        self.multiply_up, self.multiply_down = up, down
        self.W = stack("up.{}.weight", is_transposed(up))
        self.b = stack("up.{}.bias")
        self.V = stack("down.{}.weight", is_transposed(down))

    def mixed(self, rows: Tensor, p: Tensor, choice: Tensor) -> Tensor:
        chosen, order = choice.flatten().sort(stable=True)
        at = order // choice.shape[1]
        x = rows[at]
        h = torch.tanh(self.multiply_up(x, self.W, self.b, chosen))
        y = self.multiply_down(h, self.V, None, chosen)
        return torch.zeros_like(rows).index_add(0, at, y * p.flatten()[order][:, None])


def is_transposed(f: Any) -> bool:
    return f in (sliced_matmul, gathered_rows, grouped, everyone)


# From rows [M, i], which meet one matrix each of a stack [E, o, i] or [E, i, o].
def one_by_one(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def multiply(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
        parts = x.split(chosen.bincount(minlength=E).tolist())
        return torch.cat([product(part, W, b, e) for e, part in enumerate(parts)])

    return multiply


sliced = one_by_one(lambda x, W, b, e: F.linear(x, W[e], None if b is None else b[e]))
sliced_transpose = one_by_one(lambda x, W, b, e: x @ W[e].T + (0 if b is None else b[e]))
sliced_matmul = one_by_one(lambda x, W, b, e: x @ W[e] + (0 if b is None else b[e]))


def gathered_rows(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
    out = torch.bmm(x.unsqueeze(1), W[chosen]).squeeze(1)
    return out if b is None else out.add_(b[chosen])


def gathered_columns(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
    out = torch.bmm(W.index_select(0, chosen), x.unsqueeze(-1)).squeeze(-1)
    return out if b is None else out + b.index_select(0, chosen)


def gathered_transposes(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
    out = (x[:, None] @ W[chosen].transpose(1, 2))[:, 0]
    return out if b is None else out + b[chosen]


def ends(chosen: Tensor) -> Tensor:
    return chosen.bincount(minlength=E).cumsum(0).int()


def grouped(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
    out = F.grouped_mm(x, W, offs=ends(chosen))
    return out if b is None else out.add_(b[chosen])


def grouped_transposes(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
    out = F.grouped_mm(x, W.transpose(-2, -1), offs=ends(chosen))
    return out if b is None else out.add_(b[chosen])


def everyone(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
    return torch.bmm(x.view(E, -1, x.shape[1]), W).flatten(0, 1)


def everyone_transposed(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
    return (x.view(E, -1, x.shape[1]) @ W.transpose(1, 2)).flatten(0, 1)


WAYS = [
    (sliced, sliced),
    (sliced_transpose, sliced_transpose),
    (sliced_matmul, sliced_matmul),
    (gathered_rows, gathered_columns),
    (gathered_columns, gathered_rows),
    (gathered_transposes, sliced),
]


def data_of(*sizes: int, T: int = 4, dtype: Any = torch.float64) -> Any:
    batches = []
    for k, n in enumerate(sizes):
        y = torch.randint(C, (n,), generator=seeded(k))
        batches.append((normal(n, T, D, seed=k).to(dtype), y))
    return batches


def risks(up: Any, down: Any, *sizes: int, everyone: bool = False, dtype: Any = torch.float64):
    """Risks of the two, in this order: stacks, modules."""
    stacks = Stacks(up, down, everyone).to(dtype)
    torch.manual_seed(0)
    modules = Modules(everyone).to(dtype)
    data, loss = data_of(*sizes, dtype=dtype), nn.CrossEntropyLoss()
    x = data[0][0]
    close(stacks(x), modules(x), rtol=1e-4)
    return EmpiricalRisk(stacks, loss, data), EmpiricalRisk(modules, loss, data)


def compare(K: Any, M: Any, rtol: float = 1e-9) -> None:
    """The blocks of stacks are those of modules beside each other."""
    blocks, of_modules = K.blocks, M.blocks
    for name, of_name in (("W", "up"), ("V", "down")):
        matrix_shape = K.operator.layouts[name].matrix_shape
        size = matrix_shape[1] * matrix_shape[2]
        dense = blocks[name].to_dense().view(E, size, E, size)
        for e in range(E):
            key = f"{of_name}.{e}.weight"
            close(dense[e, :, e], of_modules[key].to_dense(), rtol)
            for other in set(range(E)) - {e}:
                same(dense[e, :, other], torch.zeros_like(dense[e, :, other]))
    dense = blocks["b"].to_dense().view(E, H, E, H)
    for e in range(E):
        close(dense[e, :, e], of_modules[f"up.{e}.bias"].to_dense(), rtol)


@pytest.mark.parametrize("kind", [KFAC, EKFAC, KFAC.using(kfac_approx="reduce"), DiagonalBlock])
@pytest.mark.parametrize("ways", WAYS)
def test_blocks_of_stacks(ways: Any, kind: Any) -> None:
    stacks, modules = risks(*ways, 5, 4)
    with warnings.catch_warnings(), unchanged(stacks.model, *stacks.data):
        warnings.simplefilter("error", CurvatureWarning)
        K = curvature(stacks, kind, separate_weight_and_bias=True)
    compare(K, curvature(modules, kind, separate_weight_and_bias=True))
    if kind is EKFAC:
        close(K.trace, GGN(stacks).to_dense().trace())
    if kind is DiagonalBlock:
        close(K.diagonal(), GGN(stacks).to_dense().diagonal())


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
@pytest.mark.parametrize("down", [everyone, everyone_transposed])
def test_a_product_with_all_matrices(down: Any, kind: Any) -> None:
    stacks, modules = risks(sliced, down, 5, 4, everyone=True)
    K = curvature(stacks, kind, separate_weight_and_bias=True)
    compare(K, curvature(modules, kind, separate_weight_and_bias=True))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped products")
@pytest.mark.parametrize("ways", [(grouped, grouped_transposes), (grouped_transposes, grouped)])
def test_grouped_products(ways: Any) -> None:
    """They exist in single precision; sizes are multiples of four numbers there."""
    torch.manual_seed(0)
    stacks, modules = risks(*ways, 6, 5, dtype=torch.float32)
    for kind in (KFAC, DiagonalBlock):
        K = curvature(stacks, kind, separate_weight_and_bias=True)
        M = curvature(modules, kind, separate_weight_and_bias=True)
        compare(K, M, 1e-4)


def test_weight_and_bias_form_one_block() -> None:
    stacks, modules = risks(sliced, sliced, 5)
    for kind in (KFAC, EKFAC, NearestKronecker, FullBlock):
        K, M = curvature(stacks, kind), curvature(modules, kind)
        dense = K.blocks["W"].to_dense().view(E, H * (D + 1), E, H * (D + 1))
        for e in range(E):
            close(dense[e, :, e], M.blocks[f"up.{e}"].to_dense())


def some_with_bias(x: Tensor, W: Tensor, b: Tensor | None, chosen: Tensor) -> Tensor:
    """One matrix is read with its vector, and one without."""
    parts = x.split(chosen.bincount(minlength=E).tolist())
    products = [F.linear(part, W[e], b[e] if e == 1 else None) for e, part in enumerate(parts)]  # type: ignore[index]
    return torch.cat(products)


def test_a_stack_that_is_read_in_two_ways() -> None:
    model = Stacks(some_with_bias, sliced).double()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data_of(5, 4))
    matrix = GGN(risk).to_dense()
    K = curvature(risk, DiagonalBlock)
    close(K.diagonal(), matrix.diagonal())
    places = K.operator.positions()["W"]
    close(curvature(risk, EKFAC).blocks["W"].trace, matrix[places, places].sum())


def test_gradients_of_examples() -> None:
    stacks, modules = risks(gathered_columns, sliced_matmul, 5)
    scores = []
    for risk in (stacks, modules):
        P = curvature(risk, KFAC, separate_weight_and_bias=True).inverse(0.1)
        scores.append(attribution_scores(P, risk.with_data(data_of(3)), risk))
    close(*scores)


class Repeated(Modules):
    """Tokens are repeated, once for each of their experts, which have a matrix for each row."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats
        self.V = nn.Parameter(normal(E, D, D).clone())
        del self.up, self.down

    def mixed(self, rows: Tensor, p: Tensor, choice: Tensor) -> Tensor:
        if self.repeats:
            y = (self.V[choice.flatten()] @ rows.repeat_interleave(2, dim=0)[..., None])[..., 0]
            return (y * p.flatten()[:, None]).unflatten(0, (-1, 2)).sum(1)
        out = torch.zeros_like(rows)
        for e in range(E):
            at, k = torch.where(choice == e)
            out = out.index_add(0, at, rows[at] @ self.V[e].T * p[at, k, None])
        return out


def test_masked_positions_of_repeated_rows() -> None:
    torch.manual_seed(0)
    models = [Repeated(repeats).double() for repeats in (True, False)]
    models[0].load_state_dict(models[1].state_dict())
    data = data_of(5)
    mask = torch.rand(5, 4, generator=seeded(2)) > 0.4
    blocks = []
    for model in models:
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, mask=lambda X, y: mask)
        blocks.append([curvature(risk, kind).blocks["V"].to_dense() for kind in (KFAC, EKFAC)])
    for repeated, one_by_one_ in zip(*blocks, strict=True):
        close(repeated, one_by_one_)


def test_verification() -> None:
    stacks, _ = risks(gathered_rows, gathered_columns, 4, 3)
    for kind in (KFAC, EKFAC, DiagonalBlock, FullBlock):
        curvature(stacks, kind).verify()


@pytest.mark.parametrize("vectors", [MonteCarlo(2, seed=1), ForwardOnly(), "empirical"])
def test_other_vectors(vectors: Any) -> None:
    stacks, modules = risks(sliced, gathered_rows, 5, 4)
    K = curvature(stacks, KFAC, vectors=vectors, separate_weight_and_bias=True)
    M = curvature(modules, KFAC, vectors=vectors, separate_weight_and_bias=True)
    compare(K, M)


def test_a_matrix_that_nobody_meets() -> None:
    model = Stacks(sliced, gathered_columns).double()
    with torch.no_grad():
        model.router.bias[1] = -100
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data_of(5))
    for kind in (KFAC, EKFAC):
        K = curvature(risk, kind)
        size = K.operator.layouts["V"].dim // E
        block = K.blocks["V"].to_dense()[size : 2 * size, size : 2 * size]
        same(block, torch.zeros_like(block))
        assert float(K.blocks["V"].trace) > 0
        v = normal(K.shape[0])
        close(K.inverse(0.3) @ (K @ v + 0.3 * v), v)


def test_a_state_is_loaded_without_data() -> None:
    stacks, _ = risks(gathered_rows, sliced, 5)
    K = curvature(stacks, EKFAC)
    file = io.BytesIO()
    torch.save(K.state_dict(), file)
    file.seek(0)
    loaded = BlockwiseLinearOperator.from_state_dict(torch.load(file), stacks.model)
    same(loaded.to_dense(), K.to_dense())
    assert loaded.risk.reads is not None
    assert loaded.risk.reads.gathered
    again = BlockwiseLinearOperator.from_state_dict(K.state_dict(), stacks.model, stacks.data)
    close(again.compute().to_dense(), K.to_dense())


def test_streams_and_steps() -> None:
    stacks, _ = risks(sliced, gathered_rows, 5, 4)
    estimator = CurvatureEstimator(stacks, KFAC)
    for batch in stacks.data:
        estimator.update(batch)
    close(estimator.operator.to_dense(), curvature(stacks, KFAC).to_dense())
    model = stacks.model
    optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), lr=0.05, damping=1e-2)
    losses = []
    for _ in range(4):
        for X, y in stacks.data:
            optimizer.zero_grad()
            with optimizer.listen((X, y)):
                f = model(X)
            loss = F.cross_entropy(f, y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
