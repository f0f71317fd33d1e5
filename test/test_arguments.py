"""Wrong arguments of the public names: each is refused in words, or works and is right."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import unchanged
from helpers import normal
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    ActivationHessian,
    BlockwiseLinearOperator,
    CurvatureEstimator,
    EKFACLinearOperator,
    EmpiricalRisk,
    FullBlock,
    GGNFactor,
    GGNLinearOperator,
    Hessian,
    HessianLinearOperator,
    HeuristicDamping,
    Jacobian,
    KFACLinearOperator,
    MonteCarlo,
    NumericsError,
    RelativeDamping,
    ScaledIdentity,
    UnsupportedError,
    condition_number,
    curvature,
    load,
    save,
    xtrace,
)
from curvlinops_plus.errors import CurvatureWarning

X, Y = normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
DATA, LOSS = [(X, Y)], nn.CrossEntropyLoss()


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    for p in model.parameters():
        p.data = normal(*p.shape, seed=p.numel())
    return model


def risk(model: nn.Module | None = None, data: Any = DATA, params: Any = None, **options: Any) -> EmpiricalRisk:
    return EmpiricalRisk(net() if model is None else model, LOSS, data, params, **options)


# ------------------------------------------------------------------------------------------------------------ risks
@pytest.mark.parametrize(
    "make",
    [GGN, GGNFactor, Hessian, Jacobian, ActivationHessian, curvature, BlockwiseLinearOperator, CurvatureEstimator],
)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_model_loss_and_data_in_place_of_a_risk(make: Callable[..., Any], number: int) -> None:
    model = net()
    words = rf"^{make.__name__} takes an EmpiricalRisk, got a Sequential: .* EmpiricalRisk\(model, loss, data\)\.$"
    with pytest.raises(TypeError, match=words):
        make(*[model, LOSS, DATA, list(model.parameters())][:number])
    with pytest.raises(TypeError, match=words):
        make(risk=model)


def test_a_risk_in_place_of_model_loss_and_data() -> None:
    for make in (KFACLinearOperator, GGNLinearOperator):
        with pytest.raises(
            TypeError, match=r"The model is a EmpiricalRisk; .*take curvature\(risk, KFAC\), GGN\(risk\)"
        ):
            make(risk(), LOSS, [], DATA)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"The model is a int; expected a torch.nn.Module, or a function"):
        KFACLinearOperator(3, LOSS, [], DATA)  # type: ignore[arg-type]


def test_warnings_point_at_the_line_outside_of_the_package() -> None:
    model = nn.Sequential(nn.PReLU(), nn.Linear(4, 3)).double()
    makers = (
        lambda: curvature(risk(model)),
        lambda: BlockwiseLinearOperator(risk(model)),
        lambda: CurvatureEstimator(risk(model)).update(DATA[0]),
        lambda: KFACLinearOperator(model, LOSS, list(model.parameters()), DATA),
    )
    for make in makers:
        with pytest.warns(CurvatureWarning, match=r"get their exact diagonal") as caught:
            make()
        assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda x: x, r"`model` is a function; .* A function \(params, X\) is a model for KFACLinearOperator"),
        (nn.Linear, r"`model` is the class Linear; .* Call it: Linear\(\.\.\.\)"),
        (DATA, "`model` is a list; layers can only be recorded in a torch.nn.Module.$"),
        (
            LOSS,
            "The model, a CrossEntropyLoss, has no parameters. The arguments are model, loss and data, in this order",
        ),
    ],
)
def test_what_is_no_model(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        risk(model)


def test_models_without_shapes() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(3)).double()
    words = r"\['1.weight', '1.bias'\] of the model have no shapes yet.*Call the model once on a batch"
    for params in (None, [model[0].weight]):
        with unchanged(model[0]), pytest.raises(ValueError, match=words):
            risk(model, params=params)
    with pytest.raises(ValueError, match=r"no shapes yet"):
        KFACLinearOperator(model, LOSS, list(model.parameters()), DATA)
    model(X)
    assert risk(model).space.dim == 43


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = net()
    with pytest.raises(UnsupportedError, match=r"\['0.weight', .*made in torch.inference_mode.*copy.deepcopy\(model\)"):
        risk(model)
    assert torch.equal(GGN(risk(copy.deepcopy(model))).to_dense(), GGN(risk(net())).to_dense())  # what it advises


def test_some_parameters_on_the_meta_device() -> None:
    model = net()
    model[2].to("meta")
    with pytest.raises(UnsupportedError, match=r"The parameters \['2.weight', '2.bias'\] are on the meta device"):
        risk(model, params=[model[0].weight])


# ------------------------------------------------------------------------------------------------------- parameters
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda m: m.named_parameters(), ValueError, r"params\[0\] is a tuple; .*dict\(model.named_parameters\(\)\)"),
        (
            lambda m: [*m.named_parameters()],
            ValueError,
            r"Of pairs .* make a dict: params=dict\(model.named_parameters",
        ),
        (lambda m: ["0.weight"], ValueError, r"params\[0\] is a str; .*\[model.get_parameter\(name\)\]"),
        (lambda m: [{"params": [*m.parameters()]}], ValueError, r"params\[0\] is a dict; .*group\['params'\]"),
        (lambda m: [m[0]], ValueError, r"params\[0\] is a Linear; .*\[\*module.parameters\(\)\]"),
        (lambda m: m, TypeError, r"`params` is a Sequential; .*: list\(model.parameters\(\)\)"),
        (lambda m: m[0].weight, TypeError, r"`params` is a Parameter; .*: \[p\] for a single one"),
        (lambda m: "0.weight", TypeError, r"`params` is a str; .*\[model.get_parameter\(name\)\] for a single one"),
        (lambda m: 5, TypeError, r"`params` is a int; expected a list or a dict"),
        (lambda m: {0: m[0].weight}, TypeError, r"`params` has the key 0, a int; expected names"),
    ],
)
def test_what_are_no_parameters(given: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    model = net()
    with pytest.raises(error, match=words):
        risk(model, params=given(model))


def test_parameters_in_other_containers() -> None:
    model = net()
    whole = GGN(risk(model)).to_dense()
    for params in (model.parameters(), tuple(model.parameters()), dict(model.named_parameters()), model.state_dict()):
        assert torch.equal(GGN(risk(model, params=params)).to_dense(), whole)


@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")  # before the function runs
@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator, GGNLinearOperator, HessianLinearOperator])
def test_functions_that_ask_for_another_parameter(kind: Any) -> None:
    def model(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return (x @ params["w1"].T).relu() @ params["w2"].T

    with pytest.raises(ValueError, match=r"asks for 'w2', and `params` has no such key; it has \['w1', 'w3'\]"):
        _ = kind(model, LOSS, {"w1": normal(5, 4), "w3": normal(3, 5)}, DATA) @ torch.ones(35).double()


def test_other_keys_that_are_missing_are_the_function_s_own() -> None:
    def model(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return x @ {"v": params["w"]}["w"].T

    with pytest.raises(KeyError, match=r"^'w'$"):
        GGNLinearOperator(model, LOSS, {"w": normal(3, 4)}, DATA).to_dense()


# ---------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"example_axis": 1}, TypeError, r'example_axis is a int; expected a dict .*example_axis={"name": 1}'),
        ({"example_axis": {"0": "1"}}, TypeError, r"example_axis={'0': '1'} is a str; expected an int"),
        ({"example_axis": {"0": True}}, TypeError, r"example_axis={'0': True} is a bool; expected an int"),
        ({"example_axis": {"a": 1}}, ValueError, r"example_axis={'a': 1} matches no module of the model; .*'2'"),
        (
            {"output": "logits"},
            TypeError,
            r"output is a str; expected a function, for instance output=lambda o: o\[0\]",
        ),
        ({"mask": torch.ones(6)}, TypeError, r"mask is a Tensor; expected a function, for instance mask=lambda X, y"),
        (
            {"batch_size_fn": 6},
            TypeError,
            r"batch_size_fn is a int; expected a function, for instance batch_size_fn=len",
        ),
    ],
)
def test_options_of_another_type(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        risk(**options)


@pytest.mark.parametrize("number", ["6", None, torch.Size([6, 4]), torch.ones(2)])
def test_batch_sizes_that_are_no_numbers(number: Any) -> None:
    with pytest.raises(TypeError, match=r"batch_size_fn returned .* for batch 0; expected the number of examples"):
        risk(batch_size_fn=lambda X: number).loss()


def test_batch_sizes_are_any_integers() -> None:
    for number in (6, np.int64(6), torch.tensor(6)):
        assert torch.equal(risk(batch_size_fn=lambda X, n=number: n).loss(), risk().loss())


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(normal(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda: KFAC(), TypeError, r"KFAC\(\) are the statistics of one layer, .* the class itself, KFAC\.$"),
        (lambda: {"0": EKFAC()}, TypeError, r"EKFAC\(\) are the statistics of one layer"),
        (lambda: KFAC(kfac_approx="reduce"), TypeError, r"Pass KFAC.using\(kfac_approx='reduce'\)\.$"),
        (lambda: "kfac", ValueError, "'kfac' is no approximation. Expected an Accumulator class such as KFAC"),
        (lambda: KFACLinearOperator, ValueError, "^KFACLinearOperator is no approximation"),
        (
            lambda: {"Linear": KFAC},
            ValueError,
            "No layer matches 'Linear'.* write the class itself, Linear, not its name",
        ),
    ],
)
def test_what_is_no_approximation(given: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        curvature(risk(), given())


def test_modules_in_place_of_their_names() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"No layer matches Linear\(.*A module is named: '2'\.$"):
        curvature(risk(model), {model[2]: KFAC})


@pytest.mark.parametrize("options", [{"samples": 1.5}, {"samples": "5"}, {"samples": 2, "seed": "a"}, {"seed": None}])
def test_random_vectors_need_integers(options: dict[str, Any]) -> None:
    name, value = list(options.items())[-1]
    with pytest.raises(TypeError, match=rf"MonteCarlo needs an integer, got {name}={value!r}"):
        MonteCarlo(**options)


# --------------------------------------------------------------------------------------------------- data and losses
def test_inputs_of_integers() -> None:
    words = "The model failed on an input of dtype int64; its parameters have float64"
    for product in (lambda r: curvature(r), lambda r: GGN(r).to_dense(), lambda r: r.loss()):
        with pytest.raises(TypeError, match=words):
            product(risk(data=[(X.long(), Y)]))


def test_errors_of_losses_say_what_they_got() -> None:
    words = (
        r"The loss mse_loss failed on an output of shape \[6, 3\], torch.float64, and a target of shape \[6\], torch"
    )
    r = EmpiricalRisk(net(), functional.mse_loss, DATA)
    for product in (lambda: GGN(r).to_dense(), lambda: Hessian(r).to_dense(), r.loss):
        with pytest.raises(RuntimeError, match=words):
            product()
    with pytest.raises(TypeError, match=r"The loss square failed .* Its own message: square"):
        EmpiricalRisk(net(), torch.square, DATA).loss()


def test_nan_in_the_first_batch() -> None:
    with pytest.raises(NumericsError, match=r"layer '0': the statistic .* has NaN"):
        curvature(risk(data=[(X * float("nan"), Y)]))


class Pair(NamedTuple):
    """Two inputs of a model."""

    x: Tensor
    gain: Tensor


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, pair: Pair) -> Tensor:
        return self.inner(pair.x * pair.gain)


def test_inputs_in_a_named_tuple() -> None:
    gain = normal(6, 4, seed=1)
    found = curvature(risk(OfPair(), [(Pair(X, gain), Y)], batch_size_fn=lambda pair: len(pair.x)), FullBlock)
    torch.testing.assert_close(found.to_dense(), curvature(risk(data=[(X * gain, Y)]), FullBlock).to_dense())


class Packed(nn.Module):
    """A layer that sees the steps of all examples interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        packed = packed_like(x, x)
        out = PackedSequence(self.fc(packed.data).tanh(), *packed[1:])
        return pad_packed_sequence(out, batch_first=True)[0].sum(1)


def packed_like(x: Tensor, values: Tensor) -> PackedSequence:
    lengths = x.any(2).sum(1)
    return pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)


# -------------------------------------------------------------------------------------------------- weights that move
class Training:
    """Batches between which another thread trains."""

    def __init__(self, model: nn.Module, batches: int = 2) -> None:
        self.model, self.batches = model, batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches):
            yield X, Y
            thread = threading.Thread(target=self.train)
            thread.start()
            thread.join()

    @torch.no_grad()
    def train(self) -> None:
        for p in [*self.model.parameters()][:1]:
            p.add_(0.1)


@pytest.mark.parametrize(
    "use",
    [partial(curvature, approximation=EKFAC), lambda r: GGN(r).to_dense(), lambda r: r.loss(), lambda r: r.gradient()],
)
def test_weights_that_change_during_a_pass(use: Callable[[EmpiricalRisk], Any]) -> None:
    model = net()
    with pytest.raises(RuntimeError, match=r"\['0.weight'\] were written to during this pass.*copy.deepcopy\(model\)"):
        use(risk(model, Training(model)))
    use(risk(copy.deepcopy(model), Training(model)))  # as it advises


def test_other_inputs_than_listen_was_given() -> None:
    model = net()
    estimator = CurvatureEstimator(risk(model))
    for other in (X + 1, X[:3]):
        words = r"The model was called on other tensors.*`listen` or `begin` was given.*after augmentation"
        with pytest.raises(ValueError, match=words), estimator.listen((X, Y)):
            model(other)
    assert not estimator.updates
    with estimator.listen((X, Y)):
        model(X.clone())
    torch.testing.assert_close(estimator.operator.to_dense(), curvature(risk(model)).to_dense())


@pytest.mark.parametrize("decay", ["0.9", None])
def test_decays_that_are_no_numbers(decay: Any) -> None:
    with pytest.raises(TypeError, match=r"decay is a \w+; expected a number in \(0, 1\]"):
        CurvatureEstimator(risk(), decay=decay)


# ---------------------------------------------------------------------------------------------------------- dampings
@pytest.mark.parametrize("rule", [RelativeDamping, HeuristicDamping])
def test_classes_of_dampings(rule: Any) -> None:
    K = curvature(risk())
    for use in (K.inverse, K.shift, partial(K.power, -1.0)):
        with pytest.raises(
            TypeError, match=rf"The damping is the class {rule.__name__}; .* Call it: {rule.__name__}\("
        ):
            use(rule)


def test_numbers_that_are_none() -> None:
    with pytest.raises(TypeError, match=r"Expected the factor to be a number, got str '0.1'"):
        RelativeDamping("0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Expected the exponent to be a number, got str '-1'"):
        curvature(risk()).power("-1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Expected a LinearOperator, a tensor, .*, got EmpiricalRisk"):
        xtrace(risk(), 4)
    with pytest.raises(TypeError, match=r"Expected a LinearOperator, a tensor, .*, got EmpiricalRisk"):
        condition_number(risk())


# ------------------------------------------------------------------------------------------------------------- files
def test_saving(tmp_path: Path) -> None:
    r = risk()
    K = curvature(r)
    save(K, path := tmp_path / "K.st")
    with pytest.raises(FileNotFoundError, match=r"Can't save to .*/none/K.st: it is in a folder that does not exist"):
        save(K, tmp_path / "none" / "K.st")
    with pytest.raises(FileNotFoundError, match=r"Can't save to .*: it is a folder; add the name of a file"):
        save(K, tmp_path)
    with pytest.raises(TypeError, match=r"save takes what is saved first, then the path: save\(K, '.*K.st'\)"):
        save(path, K)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a GGN has none.*such as GGN, is made again from these"):
        save(GGN(r), path)
    found = BlockwiseLinearOperator.from_state_dict(load(path), r.model, None)
    assert torch.equal(found.to_dense(), K.to_dense())


def test_loading(tmp_path: Path) -> None:
    r = risk()
    K = curvature(r)
    save(K, path := tmp_path / "K.st")
    for arguments in ((path, r.model, DATA), (K,), (K.state_dict(),)):
        with pytest.raises(
            TypeError, match=r"load takes the path of a file, got .*from_state_dict\(load\(path\), model"
        ):
            load(*arguments)
    with pytest.raises(FileNotFoundError, match=r"is a folder; expected a file that `save` wrote"):
        load(tmp_path)
    torch.save(K.state_dict(), tmp_path / "K.pt")
    with pytest.raises(ValueError, match=r"no safetensors file. What torch.save wrote is read by torch.load"):
        load(tmp_path / "K.pt")
    for given in (str(path), path):
        with pytest.raises(ValueError, match=r"not a state .*, as load\(path\) reads it from a file, got a \w+"):
            BlockwiseLinearOperator.from_state_dict(given, r.model, DATA)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"not a state .*, as load\(path\) reads it"):
            K.load_state_dict(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not a state .*what K.state_dict\(\) returns, got a Sequential"):
        BlockwiseLinearOperator.from_state_dict(r.model, load(path), DATA)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- dtypes and sizes
def test_conversion_of_operators() -> None:
    r = risk()
    for K in (curvature(r), curvature(r).inverse(0.1), 2 * curvature(r, EKFAC)):
        for there in (K.to(torch.float32), K.to(dtype=torch.float32), K.to("cpu", torch.float32)):
            assert there.dtype == torch.float32
            torch.testing.assert_close(there.to_dense(), K.to_dense().float(), rtol=1e-4, atol=1e-5)
    for A in (GGN(r), Hessian(r), Jacobian(r)):
        assert A.to("cpu") is A.to(torch.float64) is A.to() is A
        with pytest.raises(
            NotImplementedError, match=rf"{type(A).__name__} owns no tensors .* to torch.float32: .*model.to\(...\)"
        ):
            A.to(torch.float32)
        with pytest.raises(NotImplementedError, match=r"to meta and torch.float32: "):
            A.to("meta", torch.float32)


def test_large_matrices_are_not_formed() -> None:
    wide = nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
    r = EmpiricalRisk(wide, nn.MSELoss(), [(torch.ones(1, 4), torch.ones(1, 1))])
    for A in (GGN(r), curvature(r, ScaledIdentity)):
        with pytest.raises(NumericsError, match=r"not enough memory for the entries of .* GiB .*A\[rows, columns\]"):
            A.to_dense()


def test_gradients_that_are_not_there_yet() -> None:
    K = curvature(risk())
    with pytest.raises(TypeError, match=r'Entry "0.weight": .*got NoneType. Gradients in `.grad` are there after'):
        _ = K @ [p.grad for p in net().parameters()]
