"""Between a user's shapes and the canonical form, and what is refused on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import likelihood_of

MSE, CE, BCE = (likelihood_of(kind()) for kind in (nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss))
SIZE = st.integers(1, 3)


@given(N=SIZE, positions=SIZE, d=st.lists(SIZE, max_size=2), C=SIZE, lead=st.lists(SIZE, max_size=2), data=st.data())
def test_restore_is_the_inverse_of_canonical(N: int, positions: int, d: list, C: int, lead: list, data) -> None:
    rest = [*d, C]
    axis = data.draw(st.sampled_from([*range(1, len(rest) + 1), -1]))
    f = torch.arange(float(torch.Size([N * positions, *rest]).numel())).view(N * positions, *rest)
    F, Y = MSE.canonical(f, f, N, axis)
    assert F.shape == (N, positions * f[0].numel() // rest[axis - (axis > 0)], rest[axis - (axis > 0)])
    assert torch.equal(F, Y)
    assert torch.equal(MSE.restore(F, f.shape, N, axis), f)
    stacked = F.expand(*lead, *F.shape)
    assert torch.equal(MSE.restore(stacked, f.shape, N, axis), f.expand(*lead, *f.shape))
    for n in range(N):  # an example's positions stay with it
        assert torch.equal(F[n].flatten().sort().values, f[n * positions : (n + 1) * positions].flatten())


@given(N=SIZE, positions=SIZE)
def test_one_dimensional_outputs(N: int, positions: int) -> None:
    f = torch.randn(N * positions)
    F, Y = MSE.canonical(f, f, N)
    assert F.shape == Y.shape == (N, positions, 1)
    assert torch.equal(MSE.restore(F.expand(2, -1, -1, -1), f.shape, N), f.expand(2, -1))


def test_class_axis() -> None:
    f, y = torch.randn(2, 5, 4), torch.randint(4, (2, 5))
    F, Y = CE.canonical(f, y, 2, class_axis=-1)
    assert torch.equal(F, f)
    assert torch.equal(Y, y)
    F_swapped, Y_swapped = CE.canonical(f.mT, y, 2)
    assert torch.equal(F_swapped, F)
    assert torch.equal(Y_swapped, Y)
    F_flat, Y_flat = CE.canonical(f.flatten(0, 1), y.flatten(), 2)
    assert torch.equal(F_flat, F)
    assert torch.equal(Y_flat, Y)


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("likelihood", [MSE, BCE])
@pytest.mark.parametrize(("f_shape", "y_shape"), [((4, 1), (4,)), ((4,), (4, 1)), ((4, 3), (4, 1)), ((4, 3), (2, 3))])
def test_nothing_is_broadcast(likelihood, f_shape: tuple, y_shape: tuple) -> None:
    with pytest.raises(ValueError, match=r"needs a target of the output's shape \[4.*got \[\d.*reshape"):
        likelihood.canonical(torch.zeros(f_shape), torch.zeros(y_shape), 4)


def test_cross_entropy_target_shape() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3, 5\] with classes along axis 1 .*\[2, 5\].*target of shape \[2\]"):
        CE.canonical(torch.zeros(2, 3, 5), torch.zeros(2, dtype=torch.long), 2)


@pytest.mark.parametrize("index", [3, -1, -101])
def test_class_index_out_of_range(index: int) -> None:
    with pytest.raises(ValueError, match=rf"class index {index}, .*C = 3 classes, 0 to 2 \(ignore_index is -100\)"):
        CE.canonical(torch.zeros(2, 3), torch.tensor([0, index]), 2)


@pytest.mark.parametrize("y", [torch.zeros(2), torch.zeros(2, dtype=torch.bool)])
def test_class_indices_must_be_integers(y) -> None:
    with pytest.raises(ValueError, match=rf"needs class indices of shape .*, integers, .*{y.dtype}"):
        CE.canonical(torch.zeros(2, 3), y, 2)


def test_class_probabilities_must_be_floating_point() -> None:
    with pytest.raises(UnsupportedError, match=r"class probabilities. It must be floating-point, got torch\.int64"):
        CE.canonical(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long), 2)


def test_ignore_index_with_class_probabilities() -> None:
    f, y = torch.zeros(2, 3), torch.zeros(2, 3)
    likelihood_of(nn.CrossEntropyLoss(ignore_index=-1)).canonical(f, y, 2)  # as PyTorch: negative ones mean nothing
    loss = nn.CrossEntropyLoss(ignore_index=1)
    with pytest.raises(RuntimeError):
        loss(f, y)
    with pytest.raises(UnsupportedError, match=r"ignore_index=1 has no meaning"):
        likelihood_of(loss).canonical(f, y, 2)


def test_number_of_class_weights() -> None:
    ce = likelihood_of(nn.CrossEntropyLoss(torch.ones(4)))
    with pytest.raises(ValueError, match=r"weight=...\) has shape \[4\], .* 3 classes along axis 1"):
        ce.canonical(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), 2)


def test_values_without_a_root() -> None:
    with pytest.raises(UnsupportedError, match=r"negative weight -2; weights must be >= 0"):
        likelihood_of(nn.CrossEntropyLoss(torch.tensor([1.0, -2.0])))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(), "sums .* to -6.*Are these logits"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), "is -1 for some target y.*between 0 and 1"),
    ],
)
def test_targets_without_a_root(loss: nn.Module, message: str) -> None:
    likelihood = likelihood_of(loss)
    F, Y = likelihood.canonical(torch.zeros(1, 3), torch.full((1, 3), -2.0), 1)
    assert likelihood.hessian_product(F, Y, torch.ones_like(F)).isfinite().all()
    with pytest.raises(UnsupportedError, match=message):
        likelihood.hessian_root(F, Y)
    with pytest.raises(UnsupportedError, match=message):
        next(iter(likelihood.hessian_root_columns(F, Y)))
    with pytest.raises(UnsupportedError, match=message):
        likelihood.draw(F, Y, 1, torch.rand)


@pytest.mark.parametrize("option", ["weight", "pos_weight"])
@pytest.mark.parametrize("shape", [(2,), (1, 4, 3), (4,)])
def test_binary_weights_that_do_not_fit(option: str, shape: tuple) -> None:
    options: dict[str, Any] = {option: torch.ones(shape)}
    likelihood = likelihood_of(nn.BCEWithLogitsLoss(**options))
    with pytest.raises(ValueError, match=rf"{option}=...\) of shape .* can't be broadcast to .* \[4, 3\]"):
        likelihood.canonical(torch.zeros(4, 3), torch.zeros(4, 3), 4)


@pytest.mark.parametrize(("shape", "num_examples"), [((), 1), ((3, 2), 2), ((2, 2), 4), ((0, 2), 1), ((2, 2), 0)])
def test_first_axis_must_hold_the_examples(shape: tuple, num_examples: int) -> None:
    with pytest.raises(ValueError, match=rf"of shape \[.*\], must hold the {num_examples} examples"):
        MSE.canonical(torch.zeros(shape), torch.zeros(shape), num_examples)


@pytest.mark.parametrize(("shape", "axis"), [((3,), None), ((2, 3), 0), ((2, 3), -2), ((2, 3), 2)])
def test_class_axis_must_exist_beside_the_examples(shape: tuple, axis: int | None) -> None:
    with pytest.raises(ValueError, match=r"CrossEntropyLoss: axis .* of an output of shape \["):
        CE.canonical(torch.zeros(shape), torch.zeros(shape), 1, axis)


def test_output_must_be_floating_point() -> None:
    with pytest.raises(ValueError, match=r"floating-point output of the model, got torch\.int64"):
        MSE.canonical(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3), 2)


def test_logits_in_place_of_log_probabilities() -> None:
    likelihood = likelihood_of(nn.NLLLoss())
    f, y = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2])
    with pytest.raises(UnsupportedError, match=r"NLLLoss: the exponentials .* 3 numbers sum to .*CrossEntropyLoss"):
        likelihood.canonical(f, y, 2)
    likelihood.canonical(f.log_softmax(1), y, 2)
    likelihood.canonical(f.bfloat16().log_softmax(1), y, 2)
    with pytest.raises(ValueError, match=r"needs class indices without axis 1, got shape \[2, 3\]"):
        likelihood.canonical(f.log_softmax(1), f.softmax(1), 2)
    with pytest.raises(UnsupportedError, match="negative weight -1"):
        likelihood_of(nn.NLLLoss(torch.tensor([1.0, -1.0])))


def test_logits_in_place_of_probabilities() -> None:
    likelihood = likelihood_of(nn.BCELoss())
    with pytest.raises(UnsupportedError, match=r"BCELoss: .* from -1 to 2; probabilities .*BCEWithLogitsLoss"):
        likelihood.canonical(torch.tensor([[-1.0, 2.0]]), torch.zeros(1, 2), 1)
    with pytest.raises(UnsupportedError, match=r"BCELoss\(weight=...\) of shape \[4, 1\].*one entry per example"):
        likelihood_of(nn.BCELoss(torch.ones(4, 1))).canonical(torch.full((4, 3), 0.5), torch.zeros(4, 3), 4)


def test_rates_must_be_positive() -> None:
    f = torch.tensor([[0.0, -1.0]])
    with pytest.raises(UnsupportedError, match=r"PoissonNLLLoss\(log_input=False\): .* rate -1; .*softplus"):
        likelihood_of(nn.PoissonNLLLoss(log_input=False)).canonical(f, f, 1)
    likelihood_of(nn.PoissonNLLLoss(log_input=False, eps=2.0)).canonical(f, f, 1)
    likelihood_of(nn.PoissonNLLLoss()).canonical(f, f, 1)
