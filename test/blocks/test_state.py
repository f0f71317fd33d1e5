"""States: out and back through every format, and refused whole where they do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from curvlinops_plus import (
    EKFAC,
    KFAC,
    Accumulator,
    BlockwiseLinearOperator,
    CurvaturePropagation,
    CurvatureWarning,
    DiagonalBlock,
    EKFACLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    FromDistribution,
    FullBlock,
    KFACLinearOperator,
    MonteCarlo,
    NearestKronecker,
    blocks,
    curvature,
    load,
    register_likelihood,
    risk,
    save,
)
from curvlinops_plus.blocks import state as states
from curvlinops_plus.linalg import BlockDiagonal, Diagonal
from curvlinops_plus.risk import Vectors
from test.cases import APPROXIMATIONS, FEW, Problem, close, fresh, problem, same, unchanged

both = pytest.mark.parametrize(
    "kind", [KFACLinearOperator, EKFACLinearOperator], ids=["KFAC", "EKFAC"]
)


def through_torch(state: Any, tmp_path: Path) -> Any:
    torch.save(state, tmp_path / "K.pt")
    return torch.load(tmp_path / "K.pt", weights_only=True)


def through_safetensors(state: Any, tmp_path: Path) -> Any:
    save(state, tmp_path / "K.safetensors")
    return load(tmp_path / "K.safetensors")


def classic(kind: Any, p: Problem, **options: Any) -> Any:
    return kind(p.model, p.loss, p.params, p.data, **options)


def compare(one: Any, two: Any) -> None:
    """Fail unless two states are equal, types included."""
    (xs, form), (ys, other) = tree_flatten(one), tree_flatten(two)
    assert form == other
    for x, y in zip(xs, ys, strict=True):
        assert type(x) is type(y)
        assert type(x) in (type(None), bool, int, float, str, Tensor)
        assert x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, Tensor) else x == y, (x, y)


def overwrite(state: Any) -> None:
    """Change every tensor of a state in place."""
    for t in tree_flatten(state)[0]:
        if isinstance(t, Tensor):
            t.fill_(7) if t.dtype != torch.uint8 else t.zero_()


def small() -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    """A network whose first layer has no factors."""
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_((torch.arange(p.numel(), dtype=torch.float64) + k).cos().view_as(p))
    X = torch.linspace(-2, 3, 15, dtype=torch.float64).view(5, 3).sin()
    return model, nn.CrossEntropyLoss(label_smoothing=0.1), [(X, torch.tensor([0, 1, 1, 0, 1]))]


def mixed(**options: Any) -> BlockwiseLinearOperator:
    model, loss, data = small()
    approximations = {nn.LayerNorm: FullBlock, "1": EKFAC.using(kfac_approx="reduce")}
    nearest = NearestKronecker.using(power_iterations=2)
    return curvature(EmpiricalRisk(model, loss, data), approximations, default=nearest, **options)


# -------------------------------------------------------------------------------------- round trips


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*FEW, "grouped cnn"])
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_round_trip_of_every_approximation(name: str, approximation: str, tmp_path: Path) -> None:
    """Through both formats; neither the operator that a state came from, nor those made of it,
    share memory with it.
    """
    p = problem(name)
    options = {key: value for key, value in p.net.options.items() if key != "params"}
    for separate, through in ((False, through_torch), (True, through_safetensors)):
        K = p.made(approximation, separate)
        state, before, taken = K.state_dict(), K.to_dense(), copy.copy(K)
        back = through(state, tmp_path)
        compare(back, state)
        taken._compute_later()
        with unchanged(p.model, p.loss, p.data):
            taken.load_state_dict(back)
        given = dict(K.risk.params)
        made = BlockwiseLinearOperator.from_state_dict(
            state, p.model, None, given, loss=p.loss, **options
        )
        compare(taken.state_dict(), state)
        assert [repr(e.approximation) for e in made.plan] == [repr(e.approximation) for e in K.plan]
        close(taken.to_dense(), before, 1e-13)
        overwrite(state)
        same(K.to_dense(), before)
        same(made.to_dense(), before)


@both
@pytest.mark.parametrize(
    ("loss", "separate"), [("mse-sum", True), ("ce-all", False), ("bce-all-soft", True)]
)
def test_classic_round_trip_rebuilds_everything(kind: Any, separate: bool, loss: str) -> None:
    p = problem(f"mlp, {loss}")
    options = {
        "fisher_type": "mc",
        "mc_samples": 2,
        "seed": 4,
        "num_data": 9,
        "num_per_example_loss_terms": 3,
    }
    K = classic(kind, p, kfac_approx="reduce", separate_weight_and_bias=separate, **options)
    state = K.state_dict()
    with unchanged(p.model, p.loss, p.data, state):
        other = kind.from_state_dict(state, p.model, p.params, None)
    assert type(other) is kind
    close(other.to_dense(), K.to_dense(), 1e-13)
    compare(other.state_dict(), state)
    again = kind.from_state_dict(state, p.model, p.params, p.data)
    again.compute_kronecker_factors()
    close(again.to_dense(), K.to_dense(), 1e-13)


@pytest.mark.parametrize(
    "vectors",
    [
        Exact(signs=True, seed=4),
        CurvaturePropagation(2, 1),
        MonteCarlo(3, 5),
        Empirical(per_term=True),
    ],
    ids=repr,
)
def test_every_kind_of_vectors_and_a_mix_of_blocks_is_made_again(vectors: Vectors) -> None:
    K, (model, _, data) = mixed(vectors=vectors), small()
    other = BlockwiseLinearOperator.from_state_dict(K.state_dict(), model, data)
    assert other.vectors == vectors
    assert other.risk.losses.given.label_smoothing == 0.1
    assert str(other) == str(K)
    same(other.compute().to_dense(), K.to_dense())
    with pytest.raises(
        ValueError, match=r"State mismatch in the parameters: only the state has \['3\.bias', '3"
    ):
        BlockwiseLinearOperator.from_state_dict(K.state_dict(), model[:2], data)


@both
def test_another_precision(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p, fisher_type="type-2")
    low = K.to(dtype=torch.float32)
    assert (low.dtype, low.to_dense().dtype, K.dtype) == (
        torch.float32,
        torch.float32,
        torch.float64,
    )
    close(low.to_dense(), K.to_dense(), rtol=1e-5)
    small = p.to(torch.device("cpu"), torch.float32)
    other = kind.from_state_dict(low.state_dict(), small.model, small.params, None)
    close(other.to_dense(), low.to_dense(), 1e-5)
    with pytest.raises(ValueError, match="dtype"):
        kind.from_state_dict(K.state_dict(), small.model, small.params, None)
    kind.from_state_dict(low.to(dtype=torch.float64).state_dict(), p.model, p.params, None)


@pytest.mark.parametrize("kind", [EKFACLinearOperator, KFACLinearOperator])
@pytest.mark.parametrize("separate", [False, True])
def test_parameters_in_another_order(kind: Any, separate: bool, tmp_path: Path) -> None:
    """Eigenvalues are stored by positions of parameters: those of a weight were taken for those of
    a bias.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()
    data = [(torch.randn(9, 1, dtype=torch.float64), torch.arange(9) % 4)]
    weight, bias, last = model.parameters()
    make = kind(
        model, nn.CrossEntropyLoss(), [weight, bias], data, separate_weight_and_bias=separate
    )
    save(make, tmp_path / "K.safetensors")
    for state in (make.state_dict(), load(tmp_path / "K.safetensors")):
        loaded = kind.from_state_dict(state, model, [bias, weight], data).to_dense()
        close(loaded.roll((4, 4), (0, 1)), make.to_dense())
    state = kind(model, nn.CrossEntropyLoss(), [weight, last], data).state_dict()
    loaded = kind.from_state_dict(state, model, [last, weight], data).to_dense()
    close(
        loaded.roll((4, 4), (0, 1)),
        kind(model, nn.CrossEntropyLoss(), [weight, last], data).to_dense(),
    )


def test_everything_of_ours_can_be_made_from_a_state() -> None:
    """A new approximation or mode is registered for states."""
    kinds = [vars(blocks)[name] for name in blocks.__all__]
    ours = {
        k
        for k in kinds
        if isinstance(k, type) and issubclass(k, Accumulator) and k is not Accumulator
    }
    assert ours == set(states.APPROXIMATIONS)
    modes = [vars(risk)[name] for name in risk.__all__]
    sent = {m for m in modes if isinstance(m, type) and issubclass(m, Vectors) and m is not Vectors}
    assert sent == set(states.VECTORS)
    assert len(ours) > 5
    assert len(sent) > 4


# --------------------------------------------------------------------------------------- mismatches


def with_loss(loss: nn.Module) -> Callable[[Problem], Problem]:
    return lambda p: Problem(p.net, loss, p.data)


def with_model(*layers: nn.Module) -> Callable[[Problem], Problem]:
    return lambda p: Problem(replace(p.net, model=nn.Sequential(*layers).double()), p.loss, p.data)


MISMATCHES: dict[str, tuple[Callable[[Problem], Problem], dict[str, Any], str]] = {
    "loss": (
        with_loss(nn.MSELoss()),
        {},
        "loss, 'loss': the state has 'CrossEntropyLoss', this operator 'MSELoss'",
    ),
    "option of the loss": (
        with_loss(nn.CrossEntropyLoss(label_smoothing=0.1)),
        {},
        "loss, 'label_smoothing'",
    ),
    "weight of the loss": (
        with_loss(nn.CrossEntropyLoss(torch.ones(3).double())),
        {},
        "loss, 'weight'",
    ),
    "reduction": (with_loss(nn.CrossEntropyLoss(reduction="sum")), {}, "reduction"),
    "shapes": (
        with_model(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        {},
        "layers, '0', 'parameters'",
    ),
    "layers": (
        with_model(nn.Identity(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        {},
        r"only the state has \['0\.bias'",
    ),
    "precision": (lambda p: p.to(torch.device("cpu"), torch.float32), {}, "dtype"),
    "separate blocks": (
        lambda p: p,
        {"separate_weight_and_bias": False},
        "separate_weight_and_bias",
    ),
    "approximation": (lambda p: p, {"kfac_approx": "reduce"}, "reduce"),
    "Fisher type": (lambda p: p, {"fisher_type": "empirical"}, "vectors, 'kind'"),
}


def refuses(K: Any, state: Any, match: str) -> None:
    """Loading raises a ValueError that says why, and changes nothing."""
    before, dense = copy.deepcopy(K.state_dict()), K.to_dense().clone()
    with unchanged(K.risk.model, K.risk.losses.given), pytest.raises(ValueError, match=match):
        K.load_state_dict(state)
    same(K.to_dense(), dense)
    compare(K.state_dict(), before)


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_mismatches_are_refused(mismatch: str) -> None:
    p = problem("mlp")
    kind = KFACLinearOperator if list(MISMATCHES).index(mismatch) % 2 else EKFACLinearOperator
    change, options, words = MISMATCHES[mismatch]
    state = classic(kind, p).state_dict()
    q = change(p)
    data = (
        [(X, torch.randn(len(X), 3, dtype=X.dtype)) for X, _ in q.data]
        if isinstance(q.loss, nn.MSELoss)
        else q.data
    )
    K = kind(q.model, q.loss, list(q.model.parameters()), data, **options)
    refuses(K, state, words)


@pytest.mark.parametrize("change", [lambda W: W[0, 0].add_(0.1), lambda W: W.neg_()])
def test_changed_parameters_are_noticed(change: Callable[[Tensor], object]) -> None:
    p = fresh("mlp")
    K = classic(KFACLinearOperator, p)
    state, dense = K.state_dict(), K.to_dense()
    with torch.no_grad():
        change(p.model[0].weight)
    with pytest.warns(CurvatureWarning, match="parameters differ"):
        other = KFACLinearOperator.from_state_dict(state, p.model, p.params, None)
    same(other.to_dense(), dense)
    with pytest.warns(CurvatureWarning, match="parameters differ"):
        K.load_state_dict(state)
    assert K.state_dict()["fingerprint"] == state["fingerprint"]  # that of its blocks


@both
def test_states_that_do_not_fit_are_refused(kind: Any) -> None:
    """Those of others, foreign ones and cut ones."""
    p = problem("mlp")
    K, other = (
        classic(kind, p),
        EKFACLinearOperator if kind is KFACLinearOperator else KFACLinearOperator,
    )
    state = K.state_dict()
    foreign = [{}, {"a": 1}, p.model.state_dict(), [state], None, (K + K).state_dict()]
    # States of before had no checksums.
    older = {key: value for key, value in state.items() if key != "checksums"}
    cut = {key: {k: v for k, v in state.items() if k != key} for key in older}
    wrong: list[tuple[Any, str]] = [
        (classic(other, p).state_dict(), "class"),
        (p.curvature(KFAC).state_dict(), "class"),
        (
            kind(p.model, p.loss, p.params[:3], p.data).state_dict(),
            r"only this operator \['2\.bias'\]",
        ),
        ({**state, "version": 99}, "version 99"),
        ({**older, "blocks": {}}, "lacks the blocks"),
        ({**state, "blocks": {}}, "'blocks' is not what was saved"),
        *((each, "not a state of") for each in foreign),
        *((each, "lacks|not a state|version") for each in cut.values()),
    ]
    for given, words in wrong:
        refuses(K, given, words)
    for given in [wrong[0][0], *foreign, *cut.values()]:
        with pytest.raises(ValueError, match=r"class|lacks|not a state|version"):
            kind.from_state_dict(given, p.model, p.params, None)


class Squares(Accumulator):
    """An approximation of the user's own."""

    def __init__(self, layer: Any, group: Any, scale: Any, factor: Any = 1.0) -> None:
        super().__init__(layer, group, scale)
        self.factor = factor

    def update(self, batch: Any) -> None:
        self.add("d", batch.squared_grads().flatten())

    def finish(self) -> Any:
        return Diagonal(self.value("d") * (self.factor if isinstance(self.factor, float) else 3.0))


class Draws(MonteCarlo):
    """Vectors of the user's own."""


class Counts(nn.Module):
    """A loss of the user's own."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Poisson(f.exp()).log_prob(y).mean()


register_likelihood(Counts)(
    lambda loss: FromDistribution(lambda f: torch.distributions.Poisson(f.exp()))
)


def test_what_is_the_user_s_own_is_passed_or_refused() -> None:
    model, loss, data = small()
    counts = [(X, y[:, None].expand(-1, 2).double()) for X, y in data]
    make, kinds = BlockwiseLinearOperator.from_state_dict, {"1": Squares.using(factor=2.0)}

    def state(
        kind: Any = DiagonalBlock, loss: nn.Module = loss, data: Any = data, **options: Any
    ) -> Any:
        return curvature(
            EmpiricalRisk(model, loss, data), kind, default=DiagonalBlock, **options
        ).state_dict()

    with pytest.raises(ValueError, match=r"Squares is not part.*approximations="):
        make(state(kinds), model, data)
    with pytest.raises(
        ValueError,
        match=r"option factor=<built-in function len> .*neither a tensor nor plain Python",
    ):
        make(state({"1": Squares.using(factor=len)}), model, data, approximations=[Squares])
    other = make(state(kinds), model, data, approximations=[Squares])
    close(other.blocks["1"].diagonal(), 2 * make(state(), model, data).blocks["1"].diagonal())
    drawn = state(vectors=Draws(2, 3))
    with pytest.raises(ValueError, match=r"Draws is not part.*vectors=Draws"):
        make(drawn, model, data)
    with pytest.raises(ValueError, match="State mismatch in vectors"):
        make(drawn, model, data, vectors=Draws(2, 4))
    assert make(drawn, model, data, vectors=Draws(2, 3)).trace > 0
    with pytest.raises(
        ValueError, match=r"loss .*Counts can't be made again.*loss=\.\.\..*loss_func="
    ):
        make(state(loss=Counts(), data=counts), model, counts)
    assert make(state(loss=Counts(), data=counts), model, counts, loss=Counts()).trace > 0


# -------------------------------------------------------------------------------------------- files


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "K.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="not one that curvlinops_plus wrote"):
        load(path)


def test_odd_names_survive(tmp_path: Path) -> None:
    state = {
        "a/b": {"c%": {0: torch.ones(2), "x": (1, [2.5, None])}},
        "": torch.zeros(0),
        "ü": {"a": {"b": torch.ones(1)}},
    }
    save(state, tmp_path / "s.safetensors")
    compare(load(tmp_path / "s.safetensors"), state)
    with pytest.raises((TypeError, ValueError), match=r"JSON|saved|lambda|function"):
        save({"f": lambda: None}, tmp_path / "t.safetensors")
    assert not (tmp_path / "t.safetensors").exists()


def test_multiples_and_sums(tmp_path: Path) -> None:
    p = problem("mlp")
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        K = classic(kind, p, fisher_type="type-2")
        half = 2 * (K / 4)
        assert type(half) is kind
        assert all(words in str(half) for words in ("times 0.5", "LinearRule"))
        close(half.to_dense(), K.to_dense() / 2, 1e-13)
        close((3 * half).trace, 1.5 * K.trace)
        state = through_safetensors(half, tmp_path)
        other = kind.from_state_dict(state, p.model, p.params, p.data)
        close(other.to_dense(), half.to_dense(), 1e-13)
        close(other.compute().to_dense(), half.to_dense(), 1e-13)
        K.load_state_dict(state)
        close(K.to_dense(), half.to_dense(), 1e-13)
    K, L = (curvature(p.risk(data=data), KFAC) for data in (p.data, p.data[:1]))
    total = 2 * K + L
    assert list(total.blocks) == list(K.blocks)
    close(total.to_dense(), 2 * K.to_dense() + L.to_dense(), 1e-12)
    close(
        BlockDiagonal.from_state_dict(through_safetensors(total, tmp_path)).to_dense(),
        total.to_dense(),
        1e-12,
    )
    with pytest.raises(ValueError, match="not a state of `curvature`"):
        K.load_state_dict(total.state_dict())
    with pytest.raises(ValueError, match=r"not the state of a BlockDiagonal"):
        BlockDiagonal.from_state_dict(K.state_dict())
