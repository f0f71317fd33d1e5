"""Losses, data and outputs of a form that we can't take: what was expected, what came and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from curvlinops_plus import (
    EFLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
)
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import likelihood_of
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.preserve import training_modules

KINDS = (HessianLinearOperator, GGNLinearOperator, EFLinearOperator, KFACLinearOperator)
CE = nn.CrossEntropyLoss()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = numbers(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])


def net(out: int = 3) -> nn.Linear:
    model = nn.Linear(5, out, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(numbers(out, 5, seed=1))
        model.bias.copy_(numbers(out, seed=2))
    return model


def product(kind: Any, model: nn.Module, loss: Any, data: Any, **options: Any) -> Tensor:
    """The operator and one product with it."""
    A = kind(model, loss, list(model.parameters()), data, **options)
    return A @ torch.ones(A.shape[1], dtype=A.dtype)


# --------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss, r"is the class CrossEntropyLoss; expected an instance"),
        (None, r"The loss is a NoneType; expected one as nn.MSELoss\(\)"),
        ("mse", r"The loss is 'mse'; expected one as nn.MSELoss\(\).*a function of output and target"),
        ((nn.MSELoss,), r"is the class MSELoss; expected an instance"),
    ],
)
def test_losses_that_are_none(kind: Any, loss: Any, words: str) -> None:
    model = net()
    with pytest.raises(TypeError, match=words):
        kind(model, loss, list(model.parameters()), [(X, Y)])


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
def test_values_of_losses(kind: Any) -> None:
    def detached(f: Tensor, y: Tensor) -> Tensor:
        return f.detach().sum()

    def check(loss: Callable[[Tensor, Tensor], Any], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            product(kind, net(), loss, [(X, Y)])

    check(lambda f, y: f.square(), ValueError, r"loss <lambda> returned a tensor of shape \[6, 3\]; expected a single")
    check(lambda f, y: 1.0, TypeError, r"returned a float; expected a 0-d tensor.*without .item\(\)")
    check(detached, ValueError, "loss detached does not depend on the model's output in a differentiable way")


def test_one_number_in_a_vector_is_a_loss() -> None:
    found = product(HessianLinearOperator, net(), lambda f, y: f.square().mean().reshape(1), [(X, Y)])
    wanted = product(HessianLinearOperator, net(), lambda f, y: f.square().mean(), [(X, Y)])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
def test_batchmean_is_a_mean_over_examples(kind: Any) -> None:
    """Batches of different sizes give the matrix of one batch, that of the sum over the number of examples."""
    target = numbers(6, 3, seed=3).softmax(1)

    class Divergence(nn.KLDivLoss):
        """From logits, which makes the loss curved in the output."""

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input.log_softmax(1), target)

    found = product(kind, net(), Divergence(reduction="batchmean"), [(X[:4], target[:4]), (X[4:], target[4:])])
    total = product(kind, net(), Divergence(reduction="sum"), [(X, target)])
    torch.testing.assert_close(found, total / 6, rtol=1e-10, atol=1e-12)
    wanted = product(kind, net(), CE, [(X, target)])  # differs by a constant
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_other_reductions_are_refused() -> None:
    loss = nn.HuberLoss(reduction="none")
    with pytest.raises(UnsupportedError, match=r"HuberLoss .reduction='none'. is no scalar loss"):
        GGNLinearOperator(net(), loss, None, [(X, numbers(6, 3))])  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("name", ["num_data", "num_per_example_loss_terms"])
@pytest.mark.parametrize("number", [0, -6, float("nan"), float("inf")])
def test_numbers_are_positive(name: str, number: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={number} must be positive: it is the number of"):
        EmpiricalRisk(net(), CE, [(X, Y)], **{name: number})


def test_numbers_of_numpy_are_taken() -> None:
    found = EmpiricalRisk(net(), CE, [(X, Y)], num_data=np.int64(12)).loss()  # type: ignore[arg-type]
    torch.testing.assert_close(found, EmpiricalRisk(net(), CE, [(X, Y)]).loss() / 2)


# -------------------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("y", "words"),
    [
        (Y.tolist(), "CrossEntropyLoss needs a target that is a tensor, got a list. Batches must be"),
        (None, r"got a NoneType. Batches must be"),
        (Y.numpy(), "got a ndarray. Batches must be"),
        ({"a": Y}, "got a dict. .* for several targets give losses in their structure"),
    ],
)
def test_targets_that_are_no_tensors(kind: Any, y: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        product(kind, net(), CE, [(X, y)])


class MeanAndVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = net(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x)
        return out[:, :2], out[:, 2:].exp()


def test_gaussians() -> None:
    """Each message leads to the next one, and the last to the matrix."""
    model, loss, data = MeanAndVariance(), nn.GaussianNLLLoss(), [(X, numbers(6, 2))]
    with pytest.raises(ValueError, match=r"a tuple\. .*lambda o: o\[0\]`"):
        product(GGNLinearOperator, model, loss, data)
    with pytest.raises(
        ValueError, match=r"half the output.*\[6, 1\] for the output \[6, 2\], got \[6, 2\].*side by si"
    ):
        product(GGNLinearOperator, model, loss, data, output=lambda o: o[0])
    with pytest.raises(ValueError, match=r"an even number; got shape \[6, 1\]. The output holds means, then variances"):
        product(GGNLinearOperator, model, loss, data, output=lambda o: o[0][:, :1])
    found = product(GGNLinearOperator, model, loss, data, output=lambda o: torch.cat(o, -1))
    assert found.isfinite().all()
    assert found.abs().sum() > 0


# ----------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("kind", [*KINDS, EmpiricalRisk])
@pytest.mark.parametrize("data", [None, 3])
def test_data_that_are_no_iterable(kind: Any, data: Any) -> None:
    model = net()
    with pytest.raises(
        TypeError, match=rf"`data` is a {type(data).__name__}; expected an iterable of batches \(X, y\)"
    ):
        kind(model, CE, data=data, params=list(model.parameters())) if kind is EmpiricalRisk else kind(
            model, CE, list(model.parameters()), data
        )


class Counting(Dataset[Any]):
    """Items that count how often they are read."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.read = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.items[index]


@pytest.mark.parametrize("kind", KINDS)
def test_datasets_are_no_loaders(kind: Any) -> None:
    """With as many features as outputs, an example [4] with target [4] looks like four examples."""
    x, y, model = numbers(9, 4), numbers(9, 4, seed=1), nn.Linear(4, 4).double()
    for data in (TensorDataset(x, y), Counting(list(zip(x, y)))):
        with pytest.raises(
            TypeError, match=rf"{type(data).__name__}; .*Dataset.*DataLoader\(dataset, batch_size=...\)"
        ):
            kind(model, nn.MSELoss(), list(model.parameters()), data)
        assert getattr(data, "read", 0) == 0
        found = product(kind, model, nn.MSELoss(), DataLoader(data, batch_size=4))
        torch.testing.assert_close(found, product(kind, model, nn.MSELoss(), [(x[:4], y[:4]), (x[4:], y[4:])]))


def test_datasets_of_batches_are_read_by_a_loader_without_batch_size() -> None:
    batches = Counting([(X[:4], Y[:4]), (X[4:], Y[4:])])
    with pytest.raises(TypeError, match=r"items are batches already, DataLoader\(dataset, batch_size=None\)"):
        GGNLinearOperator(net(), CE, None, batches)  # type: ignore[arg-type]
    found = product(GGNLinearOperator, net(), CE, DataLoader(batches, batch_size=None))
    torch.testing.assert_close(found, product(GGNLinearOperator, net(), CE, [(X, Y)]))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X, Y)])


class OwnLoader(Counting):
    """Says itself what it is to be iterated over."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class OwnList(list[Any], Dataset[Any]):
    pass


@pytest.mark.parametrize("data", [Stream(), OwnLoader([(X, Y)]), OwnList([(X, Y)])], ids=["stream", "loader", "list"])
def test_datasets_that_iterate_over_batches(data: Any) -> None:
    found = product(GGNLinearOperator, net(), CE, data)
    torch.testing.assert_close(found, product(GGNLinearOperator, net(), CE, [(X, Y)]))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = net()

    def forward(self, X: Any) -> Tensor:
        return self.layer(X[0] + X[1])


def test_inputs_whose_examples_are_not_counted() -> None:
    for given in ((X, X), {"mask": X[:2], "x": X}, {"words": ["a", "b"]}, ["a", "b"]):
        with pytest.raises(ValueError, match=r"Can't tell how many examples batch 0 has.*`batch_size_fn=lambda X:"):
            product(GGNLinearOperator, TwoInputs(), CE, [(given, Y)])
    found = product(GGNLinearOperator, TwoInputs(), CE, [((X, X), Y)], batch_size_fn=lambda X: len(X[0]))
    torch.testing.assert_close(found, product(GGNLinearOperator, net(), CE, [(2 * X, Y)]))


def test_errors_of_models_on_tensors_are_their_own() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).no_such_method()

    with pytest.raises(AttributeError, match="no_such_method"):
        product(GGNLinearOperator, Broken(), CE, [(X, Y)])


# ---------------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.RReLU(), "'0' (RReLU)"),
        (nn.Dropout(0.1), "'0' (Dropout)"),
        (nn.BatchNorm1d(5), "'0' (BatchNorm1d)"),
        (nn.LSTM(5, 5, num_layers=2, dropout=0.1), "'0' (LSTM)"),
        (nn.GRU(5, 5, num_layers=2, dropout=0.1), "'0' (GRU)"),
        (nn.RNN(5, 5, num_layers=2, dropout=0.1), "'0' (RNN)"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "'0' (MultiheadAttention)"),
        (nn.Dropout(0.0), ""),
        (nn.LSTM(5, 5, num_layers=2), ""),
        (nn.MultiheadAttention(4, 2), ""),
        (nn.ReLU(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_in_training_mode(module: nn.Module, name: str) -> None:
    assert training_modules(nn.Sequential(module)) == name
    assert training_modules(nn.Sequential(module).eval()) == ""


def test_attention_in_encoder_layers_is_named() -> None:
    found = training_modules(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1))
    assert "'self_attn' (MultiheadAttention)" in found
    assert "'dropout1' (Dropout)" in found


def test_the_check_names_them() -> None:
    model, words = nn.Sequential(net(), nn.RReLU(0.1, 0.9)), r"in training mode: '1' \(RReLU\); call model.eval\(\)"
    for kind in KINDS:
        with pytest.raises(RuntimeError, match=words):
            product(kind, model, CE, [(X, Y)])
    with pytest.raises(RuntimeError, match=words):
        JacobianLinearOperator(model, list(model.parameters()), [(X, Y)])


def test_shapes_are_checked_by_the_likelihood_itself() -> None:
    with pytest.raises(TypeError, match="MSELoss needs a target that is a tensor, got a float"):
        likelihood_of(nn.MSELoss()).canonical(torch.zeros(2, 1), 0.0, 2)  # type: ignore[arg-type]


def test_messages_of_several_losses_name_the_output() -> None:
    """What is said of one loss is said of each of several."""
    model = nn.Linear(3, 4).double()
    X, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    params, two = list(model.parameters()), nn.MSELoss()

    def risk(loss: Any, target: Any) -> EmpiricalRisk:
        split = lambda f: {"a": f[:, :2], "b": f[:, 2:]}  # noqa: E731
        return EmpiricalRisk(model, {"a": loss, "b": two}, [(X, {"a": target, "b": y[:, 2:]})], params, output=split)

    with pytest.raises(TypeError, match="output 'a': MSELoss needs a target that is a tensor, got a list"):
        risk(two, y[:, :2].tolist()).gradient()
    with pytest.raises(ValueError, match=r"returned a tensor of shape \[6, 2\]; expected a single number"):
        risk(lambda f, t: f - t, y[:, :2]).gradient()
    probabilities = y[:, :2].softmax(-1)
    batch = risk(nn.KLDivLoss(reduction="batchmean"), probabilities).loss()
    whole = risk(lambda f, t: nn.functional.kl_div(f, t, reduction="sum") / 6, probabilities).loss()
    torch.testing.assert_close(batch, whole)


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    "make", [HessianLinearOperator, GGNLinearOperator, lambda m, loss, *rest: JacobianLinearOperator(m, *rest)]
)
def test_complex_outputs(make: Callable[..., Any], kind: torch.dtype) -> None:
    """Products were those of the real part, or of neither; of real and imaginary parts they are right."""
    model = nn.Sequential(net(4), nn.Unflatten(1, (2, 2)))
    whole = nn.Sequential(model, Complex(kind))

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return (f if f.is_complex() else torch.view_as_complex(f)).abs().pow(3).sum()

    params, data = list(model.parameters()), [(X, Y)]
    with pytest.raises(UnsupportedError, match=r"shape \[6, 2\], torch\.complex\d+; expected real ones.*view_as_real"):
        make(whole, loss, params, data).to_dense()
    assert make(model, loss, params, data).to_dense().count_nonzero() > 0


class Complex(nn.Module):
    """Pairs of numbers as complex ones."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x.contiguous()).to(self.kind)
