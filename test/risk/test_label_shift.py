"""Language models that compute a loss from `labels`: it tells whether ours has to shift them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import close, unchanged
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    CurvatureEstimator,
    DiagonalBlock,
    EmpiricalRisk,
    GGNLinearOperator,
    Hessian,
    KFACLinearOperator,
    UnsupportedError,
    curvature,
)


@dataclass
class Output:
    """What a model of Hugging Face returns."""

    logits: Tensor
    loss: Tensor | None = None


class Language(nn.Module):
    """A model of tokens that computes its own loss; `shift` says which, `factor` makes it another one."""

    def __init__(self, shift: bool, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift, self.factor = shift, factor
        self.embedding, self.head = nn.Embedding(9, 3), nn.Linear(3, 9)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(torch.tanh(self.embedding(input_ids).cumsum(1)))
        if labels is None:
            return Output(logits)
        f, y = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        return Output(logits, self.factor * F.cross_entropy(f.flatten(0, 1), y.flatten()))


def data(sizes: tuple[int, ...] = (5, 2)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for N in sizes:
        ids = torch.randint(9, (N, 4), generator=generator)
        labels = ids.clone()
        labels[0, 2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}])
def test_the_model_tells(shift: bool, options: dict[str, Any]) -> None:
    model, loss = Language(shift), nn.CrossEntropyLoss(**options)
    found, said = (EmpiricalRisk(model, loss, data(), shift_labels=s) for s in (None, shift))
    with unchanged(model):
        close(found.loss(), said.loss())
    gradients = EmpiricalRisk(model, loss, data()).gradient()
    for key, g in said.gradient().items():
        close(gradients[key], g)
    v = torch.ones(found.space.dim, dtype=torch.float64)
    for kind in (GGN, Hessian):
        close(kind(EmpiricalRisk(model, loss, data())) @ v, kind(said) @ v)
    close(curvature(EmpiricalRisk(model, loss, data()), DiagonalBlock).trace, curvature(said, DiagonalBlock).trace)
    params = list(model.parameters())
    classic = KFACLinearOperator(model, loss, params, data(), fisher_type="empirical", batch_size_fn=batch_size)
    expected = KFACLinearOperator(
        model, loss, params, data(), fisher_type="empirical", batch_size_fn=batch_size, shift_labels=shift
    )
    close(classic.trace, expected.trace)
    close(
        GGNLinearOperator(model, loss, params, data(), batch_size_fn=batch_size) @ v,
        GGNLinearOperator(model, loss, params, data(), batch_size_fn=batch_size, shift_labels=shift) @ v,
    )
    estimators = [
        CurvatureEstimator(EmpiricalRisk(model, loss, (), shift_labels=s), DiagonalBlock) for s in (None, shift)
    ]
    for estimator in estimators:
        estimator.update(data()[0])
    close(estimators[0].operator.trace, estimators[1].operator.trace)


def batch_size(inputs: Any) -> int:
    return len(inputs["input_ids"])


def test_the_loss_is_that_of_the_model() -> None:
    (batch,) = data((5,))
    model = Language(True)
    close(EmpiricalRisk(model, nn.CrossEntropyLoss(), [batch]).loss(), model(**batch).loss)


def test_neither_is_refused_with_the_numbers() -> None:
    risk = EmpiricalRisk(Language(True, 2.0), nn.CrossEntropyLoss(), data())
    words = (
        r"Language computes a loss of its own.*: \d\.\d+ for 4 examples; CrossEntropyLoss gives .*unshifted.*shifted"
    )
    with pytest.raises(UnsupportedError, match=words + r".*shift_labels=False.*output="):
        risk.loss()
    for said in (False, True):
        assert EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), data(), shift_labels=said).loss() > 0
    assert EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), data(), check=False).loss() > 0


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-2, 0.0])
def test_losses_that_are_nearly_the_same(shift: bool, dtype: torch.dtype, scale: float) -> None:
    """A new model predicts nothing, so that the shift changes little: the first label, which a shift drops, tells."""
    model = Language(shift).to(dtype)
    with torch.no_grad():
        model.head.weight.mul_(scale)
        model.head.bias.zero_()
    found, said = (EmpiricalRisk(model, nn.CrossEntropyLoss(), data(), shift_labels=s) for s in (None, shift))
    assert found.loss() == said.loss()
    assert found.checked.shift is shift


def test_equal_losses_of_labels_that_can_not_be_ignored_are_refused() -> None:
    class Strict(Language):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
            if labels is not None and labels.min() < 0:
                raise ValueError("labels must be tokens")
            return super().forward(input_ids, labels)

    model = Strict(True)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    batch = {"input_ids": torch.ones(3, 4, dtype=torch.long), "labels": torch.ones(3, 4, dtype=torch.long)}
    with pytest.raises(UnsupportedError, match=r"Strict computes a loss.*shift_labels=False"):
        EmpiricalRisk(model, nn.CrossEntropyLoss(), [batch]).loss()


def test_other_losses_are_compared_too() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2).double()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
            f = self.head(x)
            return Output(f, None if labels is None else F.mse_loss(f, labels))

    batch = {"x": torch.rand(5, 3).double(), "labels": torch.rand(5, 2).double()}
    model = Regression()
    close(EmpiricalRisk(model, nn.MSELoss(), [batch]).loss(), model(**batch).loss)
    with pytest.raises(UnsupportedError, match=r"Regression computes a loss.*L1Loss gives \d"):
        EmpiricalRisk(model, nn.L1Loss(), [batch]).loss()


def test_models_without_a_loss_are_not_shifted() -> None:
    class Silent(Language):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
            return Output(super().forward(input_ids).logits)

    class Fails(Language):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
            if labels is not None:
                raise KeyError("labels of another form")
            return super().forward(input_ids)

    expected = EmpiricalRisk(Language(False), nn.CrossEntropyLoss(), data(), shift_labels=False).loss()
    for model in (Silent(True), Fails(True)):
        close(EmpiricalRisk(model, nn.CrossEntropyLoss(), data()).loss(), expected)
