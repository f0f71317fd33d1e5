"""States that are damaged or made by hand: refused with a word about what is wrong, and nothing has
changed then.

Checksums notice most of it first. These states have none, as those of before.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from curvlinops_plus import (
    EKFAC,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EKFACLinearOperator,
    EmpiricalRisk,
    FullBlock,
    KFACInverseLinearOperator,
    KFACOptimizer,
    KFACPreconditioner,
    MonteCarlo,
    StochasticReconfiguration,
    WeightDecay,
    curvature,
    load,
    save,
)
from curvlinops_plus.linalg import BlockDiagonal
from test.nets import deep_tanh_net as net

LOSS = nn.CrossEntropyLoss()
Change = Callable[[Any], object]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    return [(X[k], torch.arange(6) % 2) for k in range(2)]


def older(state: Any) -> Any:
    """A copy of a state without checksums."""
    if isinstance(state, Mapping):
        return {key: older(item) for key, item in state.items() if key != "checksums"}
    if isinstance(state, (list, tuple)):
        return type(state)(map(older, state))
    return copy.deepcopy(state)


def equal(one: Any, two: Any) -> bool:
    (xs, form), (ys, other_form) = tree_flatten(one), tree_flatten(two)

    def same(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, Tensor) else bool(x == y)

    return form == other_form and all(map(same, xs, ys))


def refuses(thing: Any, state: Any, words: str = "") -> None:
    """`load_state_dict` raises a plain `ValueError`, and changes nothing."""
    before = copy.deepcopy(thing.state_dict())
    with pytest.raises(ValueError, match=words) as error:
        thing.load_state_dict(state)
    assert error.type is ValueError
    assert equal(thing.state_dict(), before)


def at(state: Any, path: str) -> tuple[Any, Any]:
    """What has the last key of a path, and that key."""
    *keys, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in keys:
        state = state[key if isinstance(state, (list, tuple)) or key in state else str(key)]
    return state, last if not isinstance(state, Mapping) or last in state else str(last)


def put(path: str, value: Any) -> Change:
    def change(state: Any) -> None:
        part, key = at(state, path)
        part[key] = value

    return change


def cut(path: str) -> Change:
    def change(state: Any) -> None:
        part, key = at(state, path)
        del part[key]

    return change


def to(path: str, function: Callable[[Any], Any]) -> Change:
    def change(state: Any) -> None:
        part, key = at(state, path)
        part[key] = function(part[key])

    return change


def entry(path: str, value: float, index: tuple[int, ...] = (0, 1)) -> Change:
    """One entry of a tensor."""
    return lambda state: at(state, path)[0][at(state, path)[1]].__setitem__(index, value)


def deep(times: int = 5000) -> Any:
    part: Any = {}
    for _ in range(times):
        part = {"type": "Scaled", "A": part, "c": 1.0, "delta": 0.0}
    return part


# -------------------------------------------------------------------------------------- operators

_A = "blocks/0/basis/A/matrix"
OPERATORS: dict[str, tuple[Change, str]] = {
    "A of another size": (to(_A, lambda t: t[:2, :2].clone()), "expected|Expected"),
    "A of one axis": (to(_A, lambda t: t[0].clone()), "block '0'|Dense"),
    "A of float32": (to(_A, Tensor.float), "'A'.* is of torch.float32; expected torch.float64"),
    "all of float32": (
        to("blocks/4", lambda block: {**block, "vector": block["vector"].float()}),
        "block '4' is of torch.float32",
    ),
    "A of integers": (to(_A, Tensor.long), "int64"),
    "A with NaN": (entry(_A, nan), "'basis', 'A', 'matrix' has NaN or infinite"),
    "A with inf": (entry(_A, inf), "NaN or infinite"),
    "A no tensor": (put(_A, [1.0]), "'matrix' is a list; expected a tensor"),
    "no A": (cut(_A), r"lacks \['matrix'\]"),
    "M not symmetric": (entry("blocks/2/matrix", 9.0), "block '2' is not symmetric"),
    "M negative": (to("blocks/2/matrix", Tensor.neg), "negative entry or eigenvalue"),
    "M of no structure": (put("blocks/2/structure", "GENERAL"), "block '2' is not SYMMETRIC"),
    "an unknown structure": (put("blocks/2/structure", "x"), "'structure' is 'x'; expected one of"),
    "a structure of a list": (put("blocks/2/structure", []), "expected a string"),
    "values negative": (entry("blocks/0/values", -9.0, (1,)), "negative entry or eigenvalue"),
    "values missing": (cut("blocks/0/values"), "lacks"),
    "a diagonal negative": (entry("blocks/4/vector", -9.0, (0,)), "block '4' is not PSD"),
    "a vector with NaN": (entry("blocks/4/vector", nan, (0,)), "NaN"),
    "an unknown type": (put("blocks/0/type", "os.system"), "'type' is 'os.system'; expected one"),
    "a type of a list": (put("blocks/0/type", []), "'type' is a list"),
    "a factor in a factor": (to("blocks/0/basis", lambda b: {**b, "G": b}), "can't be read|size"),
    "no block": (cut("blocks/0"), "lacks the blocks"),
    "a block of a list": (put("blocks/0", [1]), "block '0': this part is a list"),
    "blocks of a list": (put("blocks", [1]), "'blocks'.* a list"),
    "nested 5000 times": (put("blocks/0", deep()), "RecursionError|can't be read"),
    "rtol NaN": (put("blocks/0/rtol", nan), "'rtol' is nan"),
    "scale NaN": (put("scale", nan), "'scale' is nan; expected a finite number"),
    "scale infinite": (put("scale", inf), "'scale' is inf"),
    "scale a string": (put("scale", "1"), "'scale' is '1'"),
    "examples negative": (put("examples", -1), "'examples' is -1; expected an integer"),
    "examples a fraction": (put("examples", 1.5), "'examples' is 1.5"),
    "fingerprint empty": (put("fingerprint", {}), "'fingerprint' lacks"),
    "fingerprint of some": (cut("fingerprint/0.weight"), r"'fingerprint' lacks \['0.weight'\]"),
    "fingerprint of strings": (put("fingerprint/0.weight", ["a", "b"]), "expected two floats"),
    "fingerprint of one": (put("fingerprint/0.weight", [1.0]), "expected a list of 2 entries"),
    "options unknown": (put("options", {"model": 1}), "'options': an entry is 'model'"),
    "options a fraction": (put("options/num_data", 1.5), "'num_data' is 1.5"),
    "options of a list": (put("options", []), "'options': this part is a list"),
    "progressbar a string": (put("options/progressbar", "no"), "'progressbar' is 'no'"),
    "plan of a string": (put("plan", "KFAC"), "'plan': this part is 'KFAC'; expected a dict"),
    "no layers": (cut("plan/layers"), "'plan' lacks"),
    "layers of a list": (put("plan/layers", [1]), "'layers': this part is a list"),
    "no approximation": (cut("plan/layers/0/approximation"), "lacks"),
    "an approximation of a string": (put("plan/layers/0/approximation", "KFAC"), "this part is"),
    "no kind": (cut("plan/layers/0/approximation/kind"), r"lacks \['kind'\]"),
    "no vectors": (cut("plan/vectors"), "lacks"),
    "no loss": (cut("plan/loss/loss"), "lacks"),
    "a loss of a number": (put("plan/loss", 3), "'loss': this part is 3"),
    "no reads": (cut("plan/reads"), "lacks"),
    "reads of a number": (put("plan/reads", 3), "reads"),
    "reads of nothing": (put("plan/reads", {}), "reads"),
    "reads of others": (put("plan/reads", {"products": [{}], "enclosing": {}}), "reads"),
    "shapes of a number": (put("plan/layers/0/parameters/0.weight", 3), "expected a list"),
    "shapes of strings": (put("plan/layers/0/parameters/0.weight", ["a"]), "an integer"),
    "parameters of a list": (put("plan/layers/0/parameters", ["0.weight"]), "this part"),
    "a dtype of ours": (put("plan/dtype", "float32"), "dtype"),
    "another dtype": (put("plan/dtype", "save"), "'dtype' is 'save'; expected one of"),
    "a version of a string": (put("version", "1"), "version"),
    "foreign options": (put("plan/vectors/options", {"x": 1}), "vectors|can't be read"),
}


def operator(seed: int = 0) -> BlockwiseLinearOperator:
    approximations = {"0": EKFAC, "2": FullBlock, "4": DiagonalBlock}
    return curvature(EmpiricalRisk(net(seed), LOSS, batches()), approximations)


@pytest.fixture(scope="module")
def operators() -> tuple[BlockwiseLinearOperator, Any]:
    """One, and the state of another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        return operator(1), operator().state_dict()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, operators: tuple[BlockwiseLinearOperator, Any]) -> None:
    K, good = operators
    change, words = OPERATORS[name]
    state = older(good)
    change(state)
    refuses(K, state, words)
    with pytest.raises(ValueError, match=r".") as error:
        BlockwiseLinearOperator.from_state_dict(state, K.risk.model)
    assert error.type is ValueError


def test_options_are_read_when_an_operator_is_made(
    operators: tuple[BlockwiseLinearOperator, Any],
) -> None:
    K, good = operators
    for path, words in (
        ("plan/layers/0/approximation/options", "approximation.*can't be read.*bogus"),
        ("plan/vectors/options", "vectors.*can't be read.*bogus"),
        ("plan/loss", "loss"),
    ):
        state = older(good)
        to(path, lambda options: {**options, "bogus": 1})(state)
        with pytest.raises(ValueError, match=words):
            BlockwiseLinearOperator.from_state_dict(state, K.risk.model)


def test_what_is_sound_is_not_refused(operators: tuple[BlockwiseLinearOperator, Any]) -> None:
    """Multiples, negative ones among them, in every order; and states of before."""
    K, good = operators
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        made = BlockwiseLinearOperator.from_state_dict(older(good), K.risk.model)
        for multiple in (made, -1 * made, -2 * (-3 * made), 0 * made, made.to(dtype=torch.float32)):
            state = multiple.state_dict()
            taken = copy.copy(multiple)
            taken.load_state_dict(state)
            assert torch.equal(taken.to_dense(), multiple.to_dense())
    parts = BlockDiagonal.from_state_dict(older(made.inverse(1e-3).state_dict()))
    assert torch.equal(parts.to_dense(), made.inverse(1e-3).to_dense())


@pytest.mark.parametrize("num_data", [torch.tensor(6), np.int64(6)])
def test_counts_of_other_types(num_data: Any, tmp_path: Path) -> None:
    """Are what a risk takes, and go through files."""
    risk = EmpiricalRisk(net(), LOSS, batches(), num_data=num_data, progressbar=0)
    K = curvature(risk, DiagonalBlock)
    K.load_state_dict(K.state_dict())
    save(K, tmp_path / "K")
    K.load_state_dict(load(tmp_path / "K"))


def test_entries_of_ones_own(operators: tuple[BlockwiseLinearOperator, Any]) -> None:
    """Are not looked at, in a state with checksums."""
    K, good = operators
    with pytest.warns(CurvatureWarning, match="parameters differ"):
        made = BlockwiseLinearOperator.from_state_dict({**good, "epoch": 3}, K.risk.model)
    state = {**K.state_dict(), "epoch": 3}
    made.load_state_dict(state)
    assert torch.equal(made.to_dense(), K.to_dense())


BLOCKS: dict[str, tuple[Change, str]] = {
    "no space": (cut("space"), "lacks"),
    "space of a list": (put("space", [1]), "this part"),
    "space of strings": (put("space/0.weight", "ab"), "."),
    "no layouts": (cut("layouts"), "lacks"),
    "no patterns": (cut("layouts/2/patterns"), "lacks"),
    "patterns of others": (put("layouts/2/patterns", {"x": "i -> i"}), "can't be read"),
    "a pattern of a number": (put("layouts/2/patterns/2.weight", 3), "can't be read"),
    "no block": (cut("blocks/2"), "one layout per block"),
    "a block with NaN": (entry("blocks/2/matrix", nan), "NaN"),
    "a block of another size": (to("blocks/2/matrix", lambda t: t[:1, :1].clone()), "expected a"),
    "a block of a number": (put("blocks/2", 3), "this part is 3"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_diagonal(name: str, operators: tuple[BlockwiseLinearOperator, Any]) -> None:
    K, _ = operators
    state = older(K.operator.state_dict())
    change, words = BLOCKS[name]
    change(state)
    with pytest.raises(ValueError, match=words) as error:
        BlockDiagonal.from_state_dict(state)
    assert error.type is ValueError


# -------------------------------------------------------------------------------------- estimators

_SUM = "sums/layers/0/stages/0/0/sums/A"
_VALUES = "sums/layers/0/stages/1/0"
ESTIMATORS: dict[str, tuple[Change, str]] = {
    "updates negative": (put("updates", -1), "'updates' is -1"),
    "updates a fraction": (put("updates", 1.5), "'updates' is 1.5"),
    "updates True": (put("updates", True), "'updates' is True"),
    "weight NaN": (put("weight", nan), "'weight' is nan"),
    "weight negative": (put("weight", -1.0), "'weight' is -1.0"),
    "examples a string": (put("examples", "x"), "'examples' is 'x'"),
    "draws of one": (put("draws", [1]), "expected a list of 2 entries"),
    "draws negative": (put("draws", [0, -1]), "'draws': 1 is -1|'draws'"),
    "draws of a number": (put("draws", 3), "'draws' is 3"),
    "damping NaN": (put("damping", nan), "'damping' is nan"),
    "damping a tensor of NaN": (put("damping", torch.full((3,), nan)), "'damping' has NaN"),
    "damping a string": (put("damping", "x"), "'damping' is 'x'"),
    "decay of another": (put("decay", 0.5), "State mismatch in the decay"),
    "no sums": (put("sums", {}), "updates, and no statistics"),
    "sums of a list": (put("sums", []), "'sums': this part is a list"),
    "no step": (cut("sums/step"), "lacks"),
    "no totals": (cut("sums/layers/0/totals"), "lacks"),
    "no stages": (cut("sums/layers/0/stages"), "lacks"),
    "empty stages": (put("sums/layers/0/stages", []), "lacks"),
    "an index behind": (to("sums/layers", lambda x: {**x, "9": x["0"]}), "a layer is '9'"),
    "an index of a word": (to("sums/layers", lambda x: {**x, "a": x["0"]}), "a layer is 'a'"),
    "a layer of a number": (put("sums/layers/0", 3), "this part is 3"),
    "a stage of a list": (put("sums/layers/0/stages/0", [1]), "this part is a list"),
    "no accumulator": (cut("sums/layers/0/stages/0/0"), "lacks"),
    "a sum with NaN": (entry(_SUM, nan), "'A' has NaN"),
    "a sum of float32": (to(_SUM, Tensor.float), "'A' is a tensor of torch.float32"),
    "a sum of a list": (put(_SUM, [1.0]), "'A' is a list"),
    "a sum not symmetric": (entry(_SUM, 99.0), "not symmetric"),
    "a sum negative": (to(_SUM, Tensor.neg), "negative"),
    "a sum of another size": (
        to("sums/layers/1/stages/0/2/sums/matrix", lambda t: t[:2, :2].clone()),
        "expected 20 x 20",
    ),
    "no sum": (cut(_SUM), "."),
    "eigenvalues of another size": (
        to(f"{_VALUES}/sums/0", lambda t: t[:1].clone()),
        "can't be read|expected|Expected",
    ),
    "no bases": (put(f"{_VALUES}/constants", 3), "this part is 3"),
    "a basis of another size": (to(f"{_VALUES}/constants/QA", lambda t: t[:2, :2].clone()), "."),
    "a basis of NaN": (entry(f"{_VALUES}/constants/QA", nan), "'QA' has NaN"),
    "a count NaN": (put("sums/layers/0/stages/0/0/counts/A", nan), "'A' is nan"),
    "a count negative": (put("sums/layers/0/stages/0/0/counts/A", -1.0), "'A' is -1.0"),
    "loss_count NaN": (put("sums/layers/0/totals/loss_count", nan), "'loss_count' is nan"),
    "terms a fraction": (put("sums/layers/0/totals/terms", 1.5), "'terms' is 1.5"),
    "called behind": (put("sums/layers/0/totals/called", [7]), "indices below 3"),
    "called of a number": (put("sums/layers/0/totals/called", 3), "'called' is 3"),
    "weights of a string": (put("sums/layers/0/totals/weights", "x"), "'weights' is 'x'"),
    "decay of sums": (put("sums/decay", nan), "'decay' is nan"),
    "entered behind": (put("sums/entered", [9]), "indices below 3"),
    "withdrawn negative": (put("sums/withdrawn", [-1]), "'withdrawn'"),
    "refreshed of a number": (put("refreshed", 3), "'refreshed': this part is 3"),
    "refreshed without blocks": (cut("refreshed/blocks"), "'refreshed' lacks"),
    "refreshed with NaN": (entry("refreshed/blocks/2/matrix", nan), "'refreshed', block '2'.*NaN"),
    "refreshed of no layers": (put("refreshed/plan/layers", {}), "mismatch|lacks"),
    **{f"no {key}": (cut(key), "lacks") for key in ("weight", "draws", "damping", "refreshed")},
}


def estimator(seed: int) -> CurvatureEstimator:
    approximations = {"0": EKFAC, "2": FullBlock, "4": DiagonalBlock}
    made = CurvatureEstimator(EmpiricalRisk(net(seed), LOSS, ()), approximations, decay=0.9)
    for batch in batches():
        made.update(batch)
    made.refresh(1e-2)
    return made


@pytest.fixture(scope="module")
def estimators() -> tuple[CurvatureEstimator, Any]:
    return estimator(1), estimator(0).state_dict()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name: str, estimators: tuple[CurvatureEstimator, Any]) -> None:
    one, good = estimators
    change, words = ESTIMATORS[name]
    state = older(good)
    change(state)
    inverse = one.inverse()
    refuses(one, state, words)
    assert one.inverse() is inverse


def test_estimators_take_states_of_before(estimators: tuple[CurvatureEstimator, Any]) -> None:
    _, good = estimators
    one = estimator(2)
    one.load_state_dict(older(good))
    assert equal(older(one.state_dict()["sums"]), older(good["sums"]))


# -------------------------------------------------------------------------------------- optimizers

_W = "state/0.weight"
_GROUP = "param_groups/0"
OPTIMIZERS: dict[str, tuple[Change, str]] = {
    "no heard": (cut("heard"), r"lacks \['heard'\]"),
    "no dampings": (cut("dampings"), r"lacks \['dampings'\]"),
    "no steps": (cut("steps"), r"lacks \['steps'\]"),
    "no curvature": (cut("curvature"), r"lacks \['curvature'\]"),
    "no state": (cut("state"), r"lacks \['state'\]"),
    "no groups": (cut("param_groups"), r"lacks \['param_groups'\]"),
    "an unknown parameter": (put("state/other", {}), "a parameter is 'other'; expected one of"),
    "an unknown entry": (put(f"{_W}/other", torch.ones(1)), "an entry is 'other'"),
    "velocity of another shape": (put(f"{_W}/velocity", torch.ones(2, 2).double()), "'velocity'"),
    "velocity NaN": (entry(f"{_W}/velocity", nan), "'velocity' has NaN"),
    "velocity infinite": (entry(f"{_W}/velocity", -inf), "'velocity' has NaN or infinite"),
    "velocity missing": (cut(_W), r"of \['0.weight', '0.bias'\], which move together"),
    "curved_velocity missing": (cut(f"{_W}/curved_velocity"), "which move together"),
    "curved_velocity NaN": (entry(f"{_W}/curved_velocity", nan), "'curved_velocity' has NaN"),
    "velocity float32": (to(f"{_W}/velocity", Tensor.float), "torch.float32 .*torch.float64"),
    "velocity a list": (put(f"{_W}/velocity", [1.0]), "'velocity' is a list"),
    "velocity sparse": (to(f"{_W}/velocity", Tensor.to_sparse), "'velocity' is a tensor"),
    "state of a list": (put("state", [1]), "'state': this part is a list"),
    "lr a string": (put(f"{_GROUP}/lr", "x"), "'lr' is 'x'"),
    "lr a number as a string": (put(f"{_GROUP}/lr", "0.1"), "'lr' is '0.1'"),
    "lr NaN": (put(f"{_GROUP}/lr", nan), "'lr' is nan"),
    "lr negative": (put(f"{_GROUP}/lr", -0.1), "'lr' is -0.1"),
    "lr infinite": (put(f"{_GROUP}/lr", inf), "'lr' is inf"),
    "lr None": (put(f"{_GROUP}/lr", None), "'lr' is None"),
    "lr of one group adaptive": (put(f"{_GROUP}/lr", "adaptive"), "adaptive in one group"),
    "momentum missing": (cut(f"{_GROUP}/momentum"), r"lacks \['momentum'\]"),
    "momentum NaN": (put(f"{_GROUP}/momentum", nan), "'momentum' is nan"),
    "damping negative": (put(f"{_GROUP}/damping", -1.0), "'damping' is -1.0"),
    "damping adaptive": (put(f"{_GROUP}/damping", "adaptive"), "'damping' is 'adaptive'"),
    "constraint negative": (put(f"{_GROUP}/norm_constraint", -1.0), "'norm_constraint' is -1.0"),
    "constraint of another norm": (
        put(f"{_GROUP}/norm_constraint", {"c": 1.0, "of": "update", "norm": "x"}),
        "norm='x'",
    ),
    "constraint unknown": (put(f"{_GROUP}/norm_constraint", {"x": 1}), "can't be read"),
    "weight decay NaN": (put(f"{_GROUP}/weight_decay", nan), "'weight_decay' is nan"),
    "weight decay unknown": (put(f"{_GROUP}/weight_decay", {"kind": "x"}), "can't be read"),
    "other parameters": (put(f"{_GROUP}/params", ["x"]), "The state is of groups"),
    "parameters of numbers": (put(f"{_GROUP}/params", [0]), "The state is of groups"),
    "a group of a number": (put(_GROUP, 3), "this part is 3"),
    "one group only": (to("param_groups", lambda x: x[:1]), "The state is of groups"),
    "steps a fraction": (put("steps", 1.5), "'steps' is 1.5"),
    "steps negative": (put("steps", -7), "'steps' is -7"),
    "steps a tensor": (put("steps", torch.tensor(3.0)), "'steps' is 3.0"),
    "heard of one": (put("heard", [1]), "'heard' is a list; expected a list of 2"),
    "heard negative": (put("heard", [0, -1]), "is -1"),
    "dampings of others": (put("dampings", {"x": 1.0}), "one for each of"),
    "dampings of some": (cut("dampings/0"), "one for each of"),
    "dampings NaN": (put("dampings/0", nan), "'0' is nan"),
    "dampings of a list": (put("dampings", [1.0]), "this part is a list"),
    "statistics NaN": (
        entry("curvature/sums/layers/0/stages/0/0/sums/A", nan),
        "'curvature', 'sums'.*'A' has NaN",
    ),
    "refreshed None": (put("curvature/refreshed", None), "'dampings' is"),
    "statistics of another decay": (put("curvature/decay", 0.5), "State mismatch in the decay"),
    "updates negative": (put("curvature/updates", -1), "'updates' is -1"),
}


def trained(seed: int, kind: Any = KFACOptimizer, **options: Any) -> Any:
    model = net(seed)
    groups = [{"params": [*layer.parameters()]} for layer in (model[0], model[2], model[4])]
    made = kind(model, LOSS, params=[*groups], **options)
    for X, y in batches() * 2:
        made.zero_grad()
        LOSS(model(X), y).backward()
        made.step()
    return made


@pytest.fixture(scope="module")
def optimizers() -> tuple[KFACOptimizer, Any]:
    options = {"lr": 0.1, "weight_decay": WeightDecay(1e-3, "coupled")}
    return trained(1, **options), trained(0, **options).state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, optimizers: tuple[KFACOptimizer, Any]) -> None:
    one, good = optimizers
    change, words = OPTIMIZERS[name]
    state = older(good)
    change(state)
    inside = {key: value for key, value in vars(one).items() if key not in ("state", "curvature")}
    refuses(one, state, words)
    now = vars(one)
    assert inside.keys() == now.keys() - {"state", "curvature"}
    assert [key for key in inside if inside[key] is not now[key]] == []


def test_optimizers_go_on_after_a_refusal() -> None:
    """As one that nobody has asked."""
    one, two = trained(1), trained(1)
    for change, _ in OPTIMIZERS.values():
        state = older(trained_state())
        change(state)
        with pytest.raises(ValueError, match=r"."):
            two.load_state_dict(state)
    for each in (one, two):
        model = each.curvature.risk.model
        each.zero_grad()
        LOSS(model(batches()[0][0]), batches()[0][1]).backward()
        each.step()
    assert equal(one.state_dict(), two.state_dict())


def trained_state(cache: list[Any] = []) -> Any:  # noqa: B006
    if not cache:
        cache.append(trained(0).state_dict())
    return cache[0]


def test_a_learning_rate_is_changed_in_a_state() -> None:
    """Without its checksums, as the message says."""
    one, state = trained(1), trained(0).state_dict()
    state["param_groups"][0]["lr"] = 0.01
    refuses(one, state, "'param_groups' is not what was saved.*delete its entry 'checksums'")
    del state["checksums"]
    one.load_state_dict(state)
    assert [group["lr"] for group in one.param_groups] == [0.01, 0.1, 0.1]


@pytest.mark.parametrize("kind", [KFACOptimizer, KFACPreconditioner])
def test_optimizers_take_states_of_before(kind: Any) -> None:
    one, two = trained(1, kind), trained(0, kind)
    one.curvature.risk.model.load_state_dict(two.curvature.risk.model.state_dict())
    one.load_state_dict(older(two.state_dict()))
    assert equal(one.state_dict(), two.state_dict())


# -------------------------------------------------------------------------------------- the others

RECONFIGURATIONS: dict[str, tuple[Change, str]] = {
    "no groups": (cut("param_groups"), "lacks"),
    "two groups": (to("param_groups", lambda x: [*x, *x]), "a list of 1 entries"),
    "no lr": (cut("param_groups/0/lr"), "lacks"),
    "lr NaN": (put("param_groups/0/lr", nan), "'lr' is nan"),
    "momentum above 1": (put("param_groups/0/momentum", 2.0), "momentum"),
    "norm_constraint negative": (put("param_groups/0/norm_constraint", -1.0), "norm_constraint"),
    "norm_constraint a string": (put("param_groups/0/norm_constraint", "x"), "can't be read"),
    "steps negative": (put("param_groups/0/steps", -1), "'steps' is -1"),
    "another number of parameters": (put("param_groups/0/params", [0, 1]), "'params'"),
    "previous NaN": (entry("state/0/previous", nan, (0,)), "'previous' has NaN"),
    "previous of another shape": (put("state/0/previous", torch.ones(3)), "'previous' is"),
    "previous of another parameter": (to("state", lambda x: {7: x[0]}), "."),
    "state of a list": (put("state", [1]), "this part"),
}


@pytest.mark.parametrize("name", RECONFIGURATIONS)
def test_reconfiguration(name: str) -> None:
    x = torch.linspace(-4, 4, 21, dtype=torch.float64)

    def made() -> StochasticReconfiguration:
        a = torch.tensor([2.0, 0.5], dtype=torch.float64)
        one = StochasticReconfiguration(
            lambda p, x: -p[0][0] * x**2 - p[0][1] * x, [a], momentum=0.5
        )
        one.step(x, a[0] * x.sin(), weights=(-(x**2)).exp())
        return one

    change, words = RECONFIGURATIONS[name]
    state = older(made().state_dict())
    change(state)
    one = made()
    refuses(one, state, words)
    one.load_state_dict(older(made().state_dict()))


CLASSIC: dict[str, tuple[Change, str]] = {
    "no A": (cut("A"), "lacks"),
    "no damping": (cut("damping"), "lacks"),
    "no cache": (cut("cache"), "lacks"),
    "damping NaN": (put("damping", nan), "'damping' is nan"),
    "damping of three": (put("damping", (1.0, 1.0, 1.0)), "a list of 2"),
    "a pair and exact": (put("damping", (1.0, 1.0)), "exact damping"),
    "a flag of a string": (put("use_exact_damping", "no"), "'use_exact_damping' is 'no'"),
    "A of another version": (put("A/version", 9), "version 9"),
    "A with NaN": (entry("A/blocks/0.weight/values", nan, (0,)), "NaN"),
}


@pytest.mark.parametrize("name", CLASSIC)
def test_classic_inverse(name: str) -> None:
    model = net()
    A = EKFACLinearOperator(model, LOSS, list(model.parameters()), batches())
    one = KFACInverseLinearOperator(A, 0.2, use_exact_damping=True)
    change, words = CLASSIC[name]
    state = older(one.state_dict())
    change(state)
    refuses(one, state, words)
    with pytest.raises(ValueError, match=words):
        KFACInverseLinearOperator.from_state_dict(state, A)


def test_vectors_that_operators_adopt() -> None:
    """Classic operators take over the seed of a state."""
    model = net()
    make = EKFACLinearOperator
    A = make(model, LOSS, list(model.parameters()), batches(), fisher_type="mc")
    state = older(A.state_dict())
    state["plan"]["vectors"]["options"]["seed"] = 5
    A.load_state_dict(state)
    assert A.vectors == MonteCarlo(1, 5)
    state["plan"]["vectors"]["options"] = {"bogus": 5}
    refuses(A, state, "vectors.*can't be read")
