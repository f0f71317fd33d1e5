"""The check of loss Hessians at outputs where they are next to nothing; checks of shifted labels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops_plus import EmpiricalRisk, FromDistribution, curvature, register_likelihood
from curvlinops_plus.blocks.verify import LOSS_CHECK
from curvlinops_plus.errors import VerificationError
from curvlinops_plus.linalg import LinearOperator


class Sharpened(nn.CrossEntropyLoss):
    """A loss whose likelihood is another one's."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(1.01 * input, target)


register_likelihood(Sharpened)(lambda loss: FromDistribution(lambda f: torch.distributions.Categorical(logits=f)))


LOSSES = [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)]


def _operator(loss: nn.Module, gap: float, dtype: torch.dtype) -> LinearOperator:
    """Of a model whose outputs are about `gap` apart."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight *= 0.1
        model.bias.copy_(gap * torch.tensor([1.0, 0.0, 0.3, -0.5]))
    X, y = torch.rand(5, 3).to(dtype), torch.tensor([0, 1, 0, 3, 0])
    if not isinstance(loss, nn.CrossEntropyLoss):
        y = torch.rand(5, 4).to(dtype).round()
    return curvature(EmpiricalRisk(model.to(dtype), loss, [(X, y)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1.0, 8.0, 12.0, 16.0, 25.0, 40.0, 80.0, 1000.0])
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)]
)
def test_a_saturated_loss_passes(loss: nn.Module, gap: float, dtype: torch.dtype) -> None:
    found = _operator(loss, gap, dtype).verify()  # type: ignore[attr-defined]
    assert any(check == LOSS_CHECK for _, check, _ in found.rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1.0, 12.0, 1000.0])
def test_a_wrong_likelihood_is_found_also_there(gap: float, dtype: torch.dtype) -> None:
    with pytest.raises(VerificationError, match=r"loss Sharpened, check \(c\) loss Hessian.*with all its options"):
        _operator(Sharpened(), gap, dtype).verify()  # type: ignore[attr-defined]


@pytest.mark.parametrize("said", [None, True])
def test_shifted_labels(said: bool | None) -> None:
    """The model's own loss tells that they are; what is recorded and what is compared know it."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(7, 3).double(), nn.Linear(3, 7).double()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
            f = self.head(torch.tanh(self.embedding(input_ids).cumsum(1)))
            loss = None if labels is None else F.cross_entropy(f[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return SimpleNamespace(logits=f, loss=loss)

    model, ids = Language(), torch.arange(20).reshape(5, 4) % 7
    data = [{"input_ids": ids, "labels": ids.flip(0)}]
    K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data, shift_labels=said))
    assert {check for _, check, _ in K.verify(num_examples=2).rows} >= {LOSS_CHECK, "(a) gradients", "(b) G", "(b) A"}
