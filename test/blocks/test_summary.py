"""The table of numbers per block, beside eigenvalues of the blocks as dense matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    BlockwiseLinearOperator,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    HeuristicDamping,
    NearestKronecker,
    RelativeDamping,
    ScaledIdentity,
    curvature,
)
from curvlinops_plus.linalg import LinearOperator
from test.helpers import normal


class Experts(nn.Module):
    """Matrices of two experts, [experts, inputs, outputs], of which every example uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(2, 3, 4, seed=3))

    def forward(self, X: Tensor) -> Tensor:
        products = torch.bmm(X.expand(2, *X.shape), self.weight)
        return products.transpose(0, 1).tanh().flatten(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)
    ).double()


def risk_of(model: nn.Module, *shape: int, N: int = 7) -> EmpiricalRisk:
    X = normal(N, *shape, seed=1)
    with torch.no_grad():
        y = normal(*model(X).shape, seed=2)
    return EmpiricalRisk(model, nn.MSELoss(), [(X, y)])


CASES: dict[str, Any] = {
    "KFAC": lambda: curvature(risk_of(mlp(), 3), {nn.LayerNorm: FullBlock}),
    "full": lambda: curvature(risk_of(mlp(), 3, N=40), FullBlock),
    "diagonal": lambda: curvature(risk_of(mlp(), 3), DiagonalBlock),
    "EKFAC": lambda: curvature(risk_of(mlp(), 3), {nn.LayerNorm: DiagonalBlock}, default=EKFAC),
    "nearest": lambda: curvature(
        risk_of(mlp(), 3), {nn.LayerNorm: FullBlock}, default=NearestKronecker
    ),
    "TNT": lambda: curvature(risk_of(mlp(), 3), {nn.LayerNorm: FullBlock}, default=TNT),
    "identity": lambda: curvature(
        risk_of(nn.Linear(3, 2).double(), 3), ScaledIdentity.using(scale=2.0), vectors=ForwardOnly()
    ),
    "groups": lambda: curvature(risk_of(convolution(), 4, 3, 3), KFAC),
    "groups, EKFAC": lambda: curvature(risk_of(convolution(), 4, 3, 3), EKFAC),
    "experts": lambda: curvature(
        risk_of(nn.Sequential(Experts(), nn.Linear(8, 2).double()), 3), KFAC
    ),
    "separate": lambda: curvature(
        risk_of(nn.Linear(3, 2).double(), 3), EKFAC, separate_weight_and_bias=True
    ),
    "a multiple": lambda: 3 * curvature(risk_of(nn.Linear(3, 2).double(), 3), KFAC),
    "offloaded": lambda: curvature(risk_of(nn.Linear(3, 2).double(), 3), KFAC).offload("cpu"),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_dense_blocks(name: str) -> None:
    K: BlockwiseLinearOperator = CASES[name]()
    damped = K.summary(damping=1e-2)
    rows = K.summary()
    assert [row["block"] for row in rows] == list(K.blocks)
    for row, with_damping, block in zip(rows, damped, K.blocks.values(), strict=True):
        values = torch.linalg.eigvalsh(block.to_dense())
        size = float(values.max())
        assert row["count"] == len(values)
        assert row["trace"] == pytest.approx(float(values.sum()), rel=1e-9)
        assert row["largest"] == pytest.approx(size, rel=1e-9)
        rank = int((values > 1e-10 * size).sum())
        assert row["rank"] == rank
        whole = size / float(values.min()) if rank == len(values) else math.inf
        assert row["condition"] == pytest.approx(whole, rel=1e-6)
        expected = (size + 1e-2) / (max(float(values.min()), 0.0) + 1e-2)
        assert with_damping["condition"] == pytest.approx(expected, rel=1e-8)
        without = {key: number for key, number in with_damping.items() if key != "condition"}
        assert without == {key: row[key] for key in without}


def test_names_are_those_of_layers_and_parameters() -> None:
    K = curvature(risk_of(mlp(), 3), {nn.LayerNorm: FullBlock}, separate_weight_and_bias=True)
    found = [(r["block"], r["layer"], r["module"], r["parameters"]) for r in K.summary()]
    assert found == [
        (f"{layer}.{part}", layer, module, f"{layer}.{part}")
        for layer, module in (("0", "Linear"), ("2", "LayerNorm"), ("3", "Linear"))
        for part in ("weight", "bias")
    ]
    tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    tied[2].weight = tied[0].weight
    tied[2].bias = tied[0].bias
    (row,) = curvature(risk_of(tied, 3), KFAC).summary()
    assert (row["module"], row["parameters"]) == ("Linear+Linear", "0.weight, 0.bias")


def test_stacks_of_experts_are_one_block() -> None:
    assert CASES["experts"]().blocks["0"].batch == (2,)


def dense_condition(M: Tensor) -> float:
    values = torch.linalg.eigvalsh(M)
    return float(values[-1] / values[0])


def test_condition_with_every_kind_of_damping() -> None:
    K = curvature(risk_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), 3), KFAC)
    first, last = K.blocks.values()
    for damping in (
        HeuristicDamping(0.1),
        (0.2, 0.3),
        RelativeDamping(0.1),
        torch.tensor([0.1, 0.4], dtype=torch.float64),
        {"0": (0.2, 0.3), "1": 0.5},
    ):
        found = [row["condition"] for row in K.summary(damping)]
        inverse = K.inverse(damping).blocks.values()
        assert found == pytest.approx([dense_condition(P.to_dense()) for P in inverse], rel=1e-8)
    G = first.G.matrix + 0.3 * torch.eye(4, dtype=torch.float64)
    A = first.A.matrix + 0.2 * torch.eye(4, dtype=torch.float64)
    by_hand = dense_condition(G) * dense_condition(A)
    assert K.summary((0.2, 0.3))[0]["condition"] == pytest.approx(by_hand, rel=1e-8)
    assert last.shape == (10, 10)


def test_dampings_that_do_not_fit_are_refused() -> None:
    K = curvature(risk_of(nn.Linear(3, 2).double(), 3), KFAC)
    with pytest.raises(ValueError, match="damping=-1; expected a number at least 0"):
        K.summary(-1.0)
    with pytest.raises(ValueError, match="Expected one number or one per block"):
        K.summary(torch.ones(3))


def test_a_zero_block_and_one_without_closed_form_say_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    nn.init.zeros_(model[1].weight)  # nothing is sent to the first layer
    K = curvature(risk_of(model, 3), FullBlock)
    first, last = K.summary()
    assert (first["trace"], first["largest"], first["rank"]) == (0.0, 0.0, 0)
    assert math.isnan(first["condition"])
    assert K.summary(1.0)[0]["condition"] == 1.0

    class Known(LinearOperator):
        def _matmat(self, X: Tensor) -> Tensor:
            return block._matmat(X)

    block = K.operator.blocks["1"]
    K.operator.blocks["1"] = Known(block.in_space, block.dtype, block.device, block.structure)
    row = K.summary(1.0)[1]
    assert all(math.isnan(row[key]) for key in ("trace", "largest", "rank", "condition"))
    assert row["count"] == last["count"] == 10
    assert str(K.summary()).splitlines()[-1].split() == ["all", "26", "-", "-", "-"]


def test_text_is_aligned_and_has_a_total_line() -> None:
    K = curvature(risk_of(mlp(), 3), DiagonalBlock)
    rows = K.summary()
    head, *body, total = str(rows).splitlines()
    assert repr(rows) == str(rows)
    assert head.split() == "block module parameters count trace largest rank condition".split()  # noqa: SIM905
    ends = [head.index(name) + len(name) for name in ("count", "trace", "largest", "rank")]
    for line in (*body, total):
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for end in ends), line
    _, count, trace, largest, rank = total.split()
    values = K.eigenvalues()
    assert (int(count), int(rank)) == (len(values), int((values > 0).sum()))
    assert (trace, largest) == (f"{float(values.sum()):.4g}", f"{float(values.max()):.4g}")


def test_html_is_escaped_and_rows_make_frames() -> None:
    model = nn.Module()
    model.add_module("a<b>&", nn.Linear(3, 2).double())
    model.forward = model._modules["a<b>&"].forward  # type: ignore[assignment,union-attr]
    K = curvature(risk_of(model, 3), KFAC)
    html = K.summary()._repr_html_()
    assert "a&lt;b&gt;&amp;.weight" in html
    assert "a<b>" not in html
    assert html.count("<tr>") == html.count("</tr>") == 3
    rows = K.summary()
    assert isinstance(rows, tuple)  # a sequence of mappings, of which pandas makes a frame
    assert all(type(number) in (int, float, str) for row in rows for number in row.values())


def test_pandas_makes_a_frame_of_it() -> None:
    """A row for each block, a column for each key, numbers as numbers."""
    pandas = pytest.importorskip("pandas")
    K = curvature(risk_of(convolution(), 4, 3, 3), EKFAC)
    rows = K.summary(damping=0.1)
    frame = pandas.DataFrame(rows)
    assert [*frame.columns] == [*rows[0]]
    assert [*frame["block"]] == [*K.blocks]
    assert frame["trace"].dtype == float
    assert frame["count"].dtype == int
    assert frame["count"].sum() == K.shape[0]
    assert frame["trace"].sum() == pytest.approx(float(K.trace))
    assert frame.set_index("block")["largest"].idxmax() in K.blocks
    assert frame.to_dict("records") == [*rows]


def test_nothing_is_decomposed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    K = curvature(risk_of(nn.Linear(3, 2).double(), 3), KFAC)
    before = K.summary()
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda *a, **k: calls.append(a) or eigh(*a, **k))
    assert K.summary() == before
    K.summary(0.1)
    K.inverse(0.1)
    assert calls == []
