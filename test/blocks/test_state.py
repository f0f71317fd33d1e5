"""States: out and back through every format, into a new process, and refused whole where they do not fit."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import APPROXIMATIONS, FEW, Problem, close, fresh, problem, same, unchanged
from torch import Tensor, nn

from curvlinops_plus import (
    EKFAC,
    KFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EKFACLinearOperator,
    EmpiricalRisk,
    FullBlock,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    curvature,
    load,
    save,
)
from curvlinops_plus.linalg import BlockDiagonal, DeferredResult

ROOT = Path(__file__).parents[2]
both = pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator], ids=["KFAC", "EKFAC"])


def through_torch(state: Any, tmp_path: Path) -> Any:
    torch.save(state, tmp_path / "K.pt")
    return torch.load(tmp_path / "K.pt", weights_only=True)


def through_safetensors(state: Any, tmp_path: Path) -> Any:
    save(state, tmp_path / "K.safetensors")
    return load(tmp_path / "K.safetensors")


formats = pytest.mark.parametrize("through", [through_torch, through_safetensors])


def classic(kind: Any, p: Problem, **options: Any) -> Any:
    return kind(p.model, p.loss, p.params, p.data, **options)


def compare(one: Any, two: Any, path: str = "state") -> None:
    """Fail unless two states are equal, types included."""
    assert type(one) is type(two), path
    if isinstance(one, dict):
        assert list(one) == list(two), path
        for key in one:
            compare(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            compare(a, b, f"{path}/{index}")
    elif isinstance(one, Tensor):
        assert torch.equal(one, two), path
        assert one.dtype == two.dtype, path
    else:
        assert one == two, path


def only_plain(node: Any, path: str = "state") -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            assert isinstance(key, (str, int)), path
            only_plain(value, f"{path}/{key}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            only_plain(value, f"{path}/{index}")
    else:
        assert node is None or type(node) in (bool, int, float, str, Tensor), f"{path} is a {type(node).__name__}"


# --------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@formats
def test_round_trip_of_every_approximation(name: str, approximation: str, through: Any, tmp_path: Path) -> None:
    p = problem(name)
    for separate in (False, True):
        K = p.made(approximation, separate)
        state = K.state_dict()
        only_plain(state)
        back = through(state, tmp_path)
        compare(back, state)
        other = copy.copy(K)
        other._operator = None
        with unchanged(p.model, p.loss, p.data):
            other.load_state_dict(back)
        close(other.to_dense(), K.to_dense(), 1e-13)
        compare(other.state_dict(), state)


@both
@formats
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("loss", ["mse-sum", "ce-all", "bce-all-soft"])
def test_classic_round_trip_rebuilds_everything(
    kind: Any, separate: bool, loss: str, through: Any, tmp_path: Path
) -> None:
    p = problem(f"mlp, {loss}")
    K = classic(
        kind,
        p,
        fisher_type="mc",
        mc_samples=2,
        seed=4,
        kfac_approx="reduce",
        separate_weight_and_bias=separate,
        num_data=9,
    )
    back = through(K.state_dict(), tmp_path)
    with unchanged(p.model, p.loss, p.data, back):
        other = kind.from_state_dict(back, p.model, p.params, None)
    assert type(other) is kind
    close(other.to_dense(), K.to_dense(), 1e-13)
    close(other @ torch.ones(43).double(), K @ torch.ones(43).double(), 1e-13)
    compare(other.state_dict(), K.state_dict())
    again = kind.from_state_dict(back, p.model, p.params, p.data)
    again.compute_kronecker_factors()
    close(again.to_dense(), K.to_dense(), 1e-13)


def test_keys_of_curvlinops() -> None:
    p = problem("mlp")
    K = classic(KFACLinearOperator, p)
    state = K.state_dict()
    for key in ("input_covariances", "gradient_covariances"):
        assert list(state[key]) == ["0", "2"]
    assert state["loss_type"] == "CrossEntropyLoss"
    assert state["loss_reduction"] == "mean"
    assert state["seed"] == 2147483647
    assert state["mc_samples"] == 1
    E = classic(EKFACLinearOperator, p).state_dict()
    for key in ("input_covariances_eigenvectors", "gradient_covariances_eigenvectors", "corrected_eigenvalues"):
        assert list(E[key]) == ["0", "2"]
    lazy = classic(KFACLinearOperator, p, check_deterministic=False).state_dict()
    assert "input_covariances" not in lazy
    assert "gradient_covariances" not in lazy


@both
def test_a_state_is_a_copy(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p)
    dense, state = K.to_dense().clone(), K.state_dict()
    other = kind.from_state_dict(state, p.model, p.params, None)
    views = (
        ("input_covariances", "gradient_covariances")
        if kind is KFACLinearOperator
        else ("gradient_covariances_eigenvectors",)
    )
    for key in views:
        for factor in state[key].values():
            factor.zero_()
    same(K.to_dense(), dense)
    close(other.to_dense(), dense, 1e-13)


@both
def test_a_state_without_factors(kind: Any) -> None:
    p = problem("mlp")
    lazy = classic(kind, p, check_deterministic=False)
    other = kind.from_state_dict(lazy.state_dict(), p.model, p.params, p.data)
    same(other.to_dense(), classic(kind, p).to_dense())


def test_inverse_round_trip(tmp_path: Path) -> None:
    p = problem("mlp")
    for kind, options in (
        (KFACLinearOperator, {"damping": (0.1, 0.2)}),
        (KFACLinearOperator, {"damping": 0.1, "use_heuristic_damping": True, "min_damping": 1e-3, "cache": False}),
        (EKFACLinearOperator, {"damping": 0.1, "use_exact_damping": True, "retry_double_precision": False}),
    ):
        K = classic(kind, p)
        inverse = KFACInverseLinearOperator(K, **options)
        for through in (through_torch, through_safetensors):
            state = through(inverse.state_dict(), tmp_path)
            compare(state, inverse.state_dict())
            blank = classic(kind, p, check_deterministic=False)
            other = KFACInverseLinearOperator.from_state_dict(state, blank)
            close(other.to_dense(), inverse.to_dense(), 1e-13)
            compare(other.state_dict(), inverse.state_dict())


@both
@pytest.mark.parametrize(
    "options", [{"seed": 77}, {"mc_samples": 3}, {"num_data": 50}, {"num_per_example_loss_terms": 2}]
)
def test_a_loaded_operator_describes_its_blocks(kind: Any, options: dict[str, int]) -> None:
    """What was computed with other options is refused, or described as what it is."""
    p = problem("mlp")
    state, other = classic(kind, p, **options).state_dict(), classic(kind, p)
    try:
        other.load_state_dict(state)
    except ValueError:
        return
    compare(other.state_dict(), state)


@both
def test_another_precision(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p, fisher_type="type-2")
    low = K.to(dtype=torch.float32)
    assert low.dtype == torch.float32
    assert low.to_dense().dtype == torch.float32
    assert K.dtype == torch.float64
    close(low.to_dense(), K.to_dense(), rtol=1e-5)
    small = p.to(torch.device("cpu"), torch.float32)
    other = kind.from_state_dict(low.state_dict(), small.model, small.params, None)
    close(other.to_dense(), low.to_dense(), 1e-5)
    with pytest.raises(ValueError, match="dtype"):
        kind.from_state_dict(K.state_dict(), small.model, small.params, None)
    up = low.to(dtype=torch.float64)
    kind.from_state_dict(up.state_dict(), p.model, p.params, None)


def test_precision_of_blocks_that_are_computed_later() -> None:
    p = problem("mlp")
    K = classic(KFACLinearOperator, p, check_deterministic=False, fisher_type="type-2")
    low = K.to(dtype=torch.float32)
    assert low.to_dense().dtype == torch.float32
    close(low.to_dense(), K.to_dense(), rtol=1e-5)


def test_a_new_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = [(torch.randn(6, 4).double(), torch.randint(3, (6,)))]
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]).double(), label_smoothing=0.1)
    K = EKFACLinearOperator(model, loss, list(model.parameters()), data)
    torch.save(K.state_dict(), tmp_path / "K.pt")
    save(K.state_dict(), tmp_path / "K.safetensors")
    torch.save({"model": model.state_dict(), "product": K @ torch.ones(43).double()}, tmp_path / "rest.pt")
    code = f"""
        import torch
        from torch import nn
        from curvlinops_plus import EKFACLinearOperator, load
        rest = torch.load({str(tmp_path / "rest.pt")!r}, weights_only=True)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        model.load_state_dict(rest["model"])
        pickled = torch.load({str(tmp_path / "K.pt")!r}, weights_only=True)
        for state in (pickled, load({str(tmp_path / "K.safetensors")!r})):
            K = EKFACLinearOperator.from_state_dict(state, model, list(model.parameters()), None)
            assert torch.allclose(K @ torch.ones(43).double(), rest["product"], rtol=1e-12)
            assert K.risk.losses.given.label_smoothing == 0.1
            print("fine")
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fine", "fine"]


# ----------------------------------------------------------------------------------------------------------- mismatches


def other_model(p: Problem, **changes: Any) -> Problem:
    net = copy.copy(p.net)
    net.model = changes.pop("model", p.model)
    return Problem(net, changes.pop("loss", p.loss), p.data)


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def renamed() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


MISMATCHES: dict[str, tuple[Callable[[Problem], Problem], dict[str, Any], str]] = {
    "loss": (lambda p: other_model(p, loss=nn.MSELoss()), {}, "loss"),
    "option of the loss": (lambda p: other_model(p, loss=nn.CrossEntropyLoss(label_smoothing=0.1)), {}, "loss options"),
    "weight of the loss": (
        lambda p: other_model(p, loss=nn.CrossEntropyLoss(torch.ones(3).double())),
        {},
        "loss options",
    ),
    "reduction": (lambda p: other_model(p, loss=nn.CrossEntropyLoss(reduction="sum")), {}, "reduction"),
    "shapes": (lambda p: other_model(p, model=wider()), {}, "layer '0'"),
    "layers": (lambda p: other_model(p, model=renamed()), {}, "layer"),
    "precision": (lambda p: p.to(torch.device("cpu"), torch.float32), {}, "dtype"),
    "separate blocks": (lambda p: p, {"separate_weight_and_bias": False}, "separate_weight_and_bias"),
    "approximation": (lambda p: p, {"kfac_approx": "reduce"}, "reduce"),
    "Fisher type": (lambda p: p, {"fisher_type": "empirical"}, "Fisher type"),
}


def refuses(K: Any, state: Any, match: str) -> None:
    """Loading raises a ValueError that says why, and changes nothing."""
    before, dense = copy.deepcopy(K.state_dict()), K.to_dense().clone()
    with unchanged(K.risk.model, K.risk.losses.given), pytest.raises(ValueError, match=match):
        K.load_state_dict(state)
    same(K.to_dense(), dense)
    compare(K.state_dict(), before)


@both
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_mismatches_are_refused(kind: Any, mismatch: str) -> None:
    p = problem("mlp")
    change, options, words = MISMATCHES[mismatch]
    state = classic(kind, p).state_dict()
    q = change(p)
    data = [(X, torch.randn(len(X), 3, dtype=X.dtype)) for X, _ in q.data] if isinstance(q.loss, nn.MSELoss) else q.data
    K = kind(q.model, q.loss, list(q.model.parameters()), data, **options)
    refuses(K, state, words)


@both
def test_other_kinds_and_other_parameters_are_refused(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p)
    other = EKFACLinearOperator if kind is KFACLinearOperator else KFACLinearOperator
    refuses(K, classic(other, p).state_dict(), "class")
    refuses(K, p.curvature(KFAC).state_dict(), "class")
    refuses(K, kind(p.model, p.loss, p.params[:3], p.data).state_dict(), "layer '2'")
    with pytest.raises(ValueError, match="class"):
        kind.from_state_dict(classic(other, p).state_dict(), p.model, p.params, None)


def test_other_orders_of_the_parameters_are_refused_or_understood() -> None:
    """Corrected eigenvalues are found by position: a state of another order must not be misread."""
    p = problem("mlp")
    K = classic(EKFACLinearOperator, p, fisher_type="type-2")
    turned = EKFACLinearOperator(p.model, p.loss, p.params[::-1], p.data, fisher_type="type-2")
    try:
        other = EKFACLinearOperator.from_state_dict(K.state_dict(), p.model, p.params[::-1], None)
    except ValueError:
        return
    close(other.to_dense(), turned.to_dense())


@both
def test_foreign_and_truncated_states_are_refused(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p)
    state = K.state_dict()
    for foreign in ({}, {"a": 1}, p.model.state_dict(), {**state, "format": "something else"}, [state], None):
        refuses(K, foreign, "not a state of curvlinops_plus")
        with pytest.raises(ValueError, match="not a state of curvlinops_plus"):
            kind.from_state_dict(foreign, p.model, p.params, None)
    refuses(K, {**state, "version": 99}, "version 99")
    for key in state:
        cut = {k: v for k, v in state.items() if k != key}
        if key == "blocks":  # then it is a state from before anything was computed, or refused
            continue
        refuses(K, cut, "lacks|not a state")
        if key != "loss_options":
            with pytest.raises(ValueError, match=r"lacks|not a state"):
                kind.from_state_dict(cut, p.model, p.params, None)
    for key in ("input_covariances", "gradient_covariances", "input_covariances_eigenvectors", "corrected_eigenvalues"):
        if key in state:
            refuses(K, {**state, key: {"0": state[key]["0"]}}, f"lacks {key} of layer '2'")


@both
def test_a_state_without_the_options_of_the_loss(kind: Any) -> None:
    p = problem("mlp")
    state = classic(kind, p).state_dict()
    del state["loss_options"]
    with pytest.raises(ValueError, match="lacks"):
        kind.from_state_dict(state, p.model, p.params, None)


@both
def test_a_factor_that_is_no_tensor(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p)
    state = K.state_dict()
    key = "input_covariances" if kind is KFACLinearOperator else "input_covariances_eigenvectors"
    refuses(K, {**state, key: {**state[key], "0": "a string"}}, "layer '0'|block '0")


@both
def test_a_factor_that_is_not_square_is_named(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p)
    state = K.state_dict()
    key = "input_covariances" if kind is KFACLinearOperator else "input_covariances_eigenvectors"
    refuses(K, {**state, key: {**state[key], "0": torch.ones(4, 3).double()}}, "layer '0'|block '0")


@both
def test_factors_of_other_shapes_are_refused(kind: Any) -> None:
    p = problem("mlp")
    K = classic(kind, p)
    state = K.state_dict()
    keys = (
        ("input_covariances", "gradient_covariances")
        if kind is KFACLinearOperator
        else ("input_covariances_eigenvectors",)
    )
    for key in keys:
        for wrong in (torch.eye(7).double(), torch.ones(4, 3).double(), torch.ones(3).double()):
            refuses(K, {**state, key: {**state[key], "0": wrong}}, "layer '0'|block '0|square|[Ee]xpected")
        refuses(K, {**state, key: {**state[key], "0": state[key]["0"].float()}}, "layer '0'|block '0|dtype")


def test_factors_swapped_in_shape_are_refused() -> None:
    """5 x 3 and 3 x 5 have the same size: the shapes of the factors are looked at, not only their product."""
    p = problem("mlp")
    K = classic(KFACLinearOperator, p)
    state = K.state_dict()
    swapped = {
        **state,
        "input_covariances": {**state["input_covariances"], "2": state["gradient_covariances"]["2"]},
        "gradient_covariances": {**state["gradient_covariances"], "2": state["input_covariances"]["2"]},
    }
    refuses(K, swapped, "layer '2'|block '2")


def test_changed_parameters_are_noticed() -> None:
    p = fresh("mlp")
    K = classic(KFACLinearOperator, p)
    state, dense = K.state_dict(), K.to_dense().clone()
    with torch.no_grad():
        p.model[0].weight[0, 0] += 0.1
    with pytest.warns(CurvatureWarning, match="parameters differ"):
        other = KFACLinearOperator.from_state_dict(state, p.model, p.params, None)
    close(other.to_dense(), dense, 1e-13)
    with pytest.warns(CurvatureWarning, match="parameters differ"):
        K.load_state_dict(state)


def test_swapped_entries_of_a_parameter_are_noticed() -> None:
    p = fresh("mlp")
    state = classic(KFACLinearOperator, p).state_dict()
    with torch.no_grad():
        p.model[0].weight.copy_(p.model[0].weight.flip(0))
    with pytest.warns(CurvatureWarning, match="parameters differ"):
        KFACLinearOperator.from_state_dict(state, p.model, p.params, None)


def test_a_loss_of_the_user_s_own() -> None:
    from curvlinops_plus import FromDistribution, register_likelihood

    class Counts(nn.Module):
        reduction = "mean"

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return -torch.distributions.Poisson(f.exp()).log_prob(y).mean()

    register_likelihood(Counts)(lambda loss: FromDistribution(lambda f: torch.distributions.Poisson(f.exp())))
    p = problem("mlp, mse")
    data = [(X, y.abs().round()) for X, y in p.data]
    K = KFACLinearOperator(p.model, Counts(), p.params, data)
    with pytest.raises(ValueError, match="loss_func"):
        KFACLinearOperator.from_state_dict(K.state_dict(), p.model, p.params, None)
    other = KFACLinearOperator.from_state_dict(K.state_dict(), p.model, p.params, None, loss_func=Counts())
    close(other.to_dense(), K.to_dense(), 1e-13)


def test_recomputing_without_data_is_refused() -> None:
    p = problem("mlp")
    K = KFACLinearOperator.from_state_dict(classic(KFACLinearOperator, p).state_dict(), p.model, p.params, None)
    with pytest.raises(ValueError, match=r"no examples|data"):
        K.compute_kronecker_factors()


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.3, 0.7, 0.99])
def test_a_file_that_is_cut_off(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "K.safetensors"
    save(classic(KFACLinearOperator, problem("mlp")).state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(ValueError, match=r"cut off|can't be read"):
        load(path)


def test_foreign_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "K.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="not one that curvlinops_plus wrote"):
        load(path)
    save_file({"a": torch.ones(2)}, path, metadata={"format": "curvlinops_plus", "state": "{not json"})
    with pytest.raises(ValueError, match="can't be read"):
        load(path)
    reference = json.dumps({"$dict": [["x", {"$tensor": "b"}]]})
    save_file({"a": torch.ones(2)}, path, metadata={"format": "curvlinops_plus", "state": reference})
    with pytest.raises(ValueError, match="can't be read"):
        load(path)
    path.write_bytes(b"some text, and no tensors at all")
    with pytest.raises(ValueError, match="can't be read"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing.safetensors")


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


def test_state_of_a_mixed_operator(tmp_path: Path) -> None:
    p = problem("generic layers")
    mapping = {"0": DiagonalBlock, "1": APPROXIMATIONS["FullBlock"], "2": DiagonalBlock, "4": EKFAC}
    K = curvature(p.risk(), mapping)
    K.compute()
    other = curvature(EmpiricalRisk(p.model, p.loss, p.data), mapping)
    other.load_state_dict(through_safetensors(K.state_dict(), tmp_path))
    close(other.to_dense(), K.to_dense(), 1e-13)
    assert isinstance(other, BlockwiseLinearOperator)
    third = curvature(p.risk(), {**mapping, "0": APPROXIMATIONS["FullBlock"]})
    third.compute()
    refuses(third, K.state_dict(), "layer '0'")


def test_bytes_of_a_saved_state_are_the_same_twice() -> None:
    p = problem("mlp")
    buffers = []
    for _ in range(2):
        buffer = io.BytesIO()
        torch.save(classic(KFACLinearOperator, p).state_dict(), buffer)
        buffers.append(buffer.getvalue())
    assert buffers[0] == buffers[1]


# ------------------------------------------------------------------------------------------------- states in place
def overwrite(state: Any) -> None:
    """Change every tensor of a state in place."""
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ():
        if isinstance(value, Tensor):
            value.fill_(7) if value.dtype != torch.uint8 else value.zero_()
        else:
            overwrite(value)


@pytest.mark.parametrize("name", ["mlp", "generic layers", "tied", "strided cnn", "grouped cnn"])
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_a_state_that_is_edited_in_place_leaves_the_operator_alone(approximation: str, name: str) -> None:
    """Neither the operator that it came from, nor those that were made of it, share memory with it."""
    p = problem(name)
    K = p.curvature(APPROXIMATIONS[approximation])
    before, state = K.to_dense(), K.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        made = BlockwiseLinearOperator.from_state_dict(state, p.model, None, p.params, loss=p.loss, **p.net.options)
        taken = p.curvature(APPROXIMATIONS[approximation])
        taken.load_state_dict(state)
    same(made.to_dense(), before)
    overwrite(state)
    for operator in (K, made, taken):
        same(operator.to_dense(), before)


@pytest.mark.parametrize("approximation", [KFAC, EKFAC, FullBlock])
def test_the_state_of_an_estimator_that_is_edited_in_place_leaves_it_alone(approximation: Any) -> None:
    p = problem("mlp")
    first, second = (CurvatureEstimator(p.risk(data=[]), approximation, damping=0.1) for _ in range(2))
    first.update(p.data[0])
    first.refresh()
    first.update(p.data[1])
    state, before, inverse = first.state_dict(), first.operator.to_dense(), first.inverse().to_dense()
    second.load_state_dict(state)
    overwrite(state)
    for each in (first, second):
        same(each.operator.to_dense(), before)
        close(each.inverse().to_dense(), inverse, 1e-12)
    for each in (first, second):
        each.update(p.data[0])
    same(first.operator.to_dense(), second.operator.to_dense())


def test_every_packed_matrix_is_a_copy() -> None:
    from curvlinops_plus.linalg import Dense, Diagonal, Eigendecomposed, Kronecker, Structure
    from curvlinops_plus.linalg.packing import pack, unpack

    Q, G, A = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q.contiguous() for n in (6, 2, 3))
    values = torch.rand(6, dtype=torch.float64)
    for operator in (
        Dense(Q),
        Diagonal(values),
        Kronecker(G, A, Structure.GENERAL),
        Eigendecomposed(Dense(Q), values),
        Eigendecomposed(Kronecker(G, A, Structure.GENERAL), values),
    ):
        before, state = operator.to_dense().clone(), pack(operator)
        made = unpack(state, torch.device("cpu"))
        overwrite(state)
        same(operator.to_dense(), before)
        same(made.to_dense(), before)


def test_sums_of_curvatures_are_saved(tmp_path: Path) -> None:
    """Of two data sets: blocks, inverse and file of the sum."""
    p, q = problem("mlp"), problem("mlp")
    K, L = (curvature(EmpiricalRisk(p.model, p.loss, data), KFAC) for data in (p.data, q.data[:1]))
    total = 2 * K + L
    assert isinstance(total, DeferredResult)
    assert list(total.blocks) == list(K.blocks)
    close(total.to_dense(), 2 * K.to_dense() + L.to_dense(), 1e-12)
    save(total, tmp_path / "total.safetensors")
    loaded = BlockDiagonal.from_state_dict(load(tmp_path / "total.safetensors"))
    with pytest.raises(ValueError, match="This is the state of a BlockDiagonal, which knows neither model nor data"):
        K.load_state_dict(total.state_dict())
    with pytest.raises(ValueError, match=r"not the state of a BlockDiagonal.*is read by BlockwiseLinearOperator"):
        BlockDiagonal.from_state_dict(K.state_dict())
    part = K[3:30, 3:30]
    save(part, tmp_path / "part.safetensors")
    close(BlockDiagonal.from_state_dict(load(tmp_path / "part.safetensors")).to_dense(), part.to_dense(), 1e-12)
    before, computed = K.to_dense().clone(), K + L
    K.compute()
    close(computed.to_dense(), before + L.to_dense(), 1e-9)
    close(loaded.to_dense(), total.to_dense(), 1e-12)
    v = torch.ones(total.shape[0], dtype=total.dtype)
    solved = torch.linalg.solve(total.shift(0.1).to_dense(), v)
    close(loaded.inverse(0.1) @ v, solved, 1e-9)
