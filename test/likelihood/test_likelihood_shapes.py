"""Between a user's shapes and the canonical form, and what is refused on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import likelihood_of
from test.helpers import seeded

MSE, CE = likelihood_of(nn.MSELoss()), likelihood_of(nn.CrossEntropyLoss())
SIZE = st.integers(1, 3)


@given(
    N=SIZE,
    positions=SIZE,
    d=st.lists(SIZE, max_size=2),
    C=SIZE,
    lead=st.lists(SIZE, max_size=2),
    data=st.data(),
)
def test_restore_is_the_inverse_of_canonical(
    N: int, positions: int, d: list, C: int, lead: list, data
) -> None:
    rest = [*d, C]
    axis = data.draw(st.sampled_from([*range(1, len(rest) + 1), -1]))
    f = torch.arange(float(torch.Size([N * positions, *rest]).numel())).view(N * positions, *rest)
    F, Y = MSE.canonical(f, f, N, axis)
    assert F.shape == (
        N,
        positions * f[0].numel() // rest[axis - (axis > 0)],
        rest[axis - (axis > 0)],
    )
    assert torch.equal(F, Y)
    assert torch.equal(MSE.restore(F, f.shape, N, axis), f)
    stacked = F.expand(*lead, *F.shape)
    assert torch.equal(MSE.restore(stacked, f.shape, N, axis), f.expand(*lead, *f.shape))
    for n in range(N):  # an example's positions stay with it
        assert torch.equal(
            F[n].flatten().sort().values, f[n * positions : (n + 1) * positions].flatten()
        )


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
def long(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


Z = torch.zeros
LOGITS = torch.randn(2, 3, generator=seeded())


def test_taken() -> None:
    """What is next to something refused."""
    likelihood_of(nn.CrossEntropyLoss(ignore_index=-1)).canonical(
        Z(2, 3), Z(2, 3), 2
    )  # as PyTorch: it means nothing
    for f in (LOGITS, LOGITS.bfloat16()):
        likelihood_of(nn.NLLLoss()).canonical(f.log_softmax(1), long(2), 2)
    likelihood_of(nn.PoissonNLLLoss(log_input=False, eps=2.0)).canonical(Z(1, 2) - 1, Z(1, 2), 1)
    likelihood_of(nn.PoissonNLLLoss()).canonical(Z(1, 2) - 1, Z(1, 2), 1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(), "sums .* to -6.*Are these logits"),
        (
            nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)),
            "is -1 for some target y.*between 0 and 1",
        ),
    ],
)
def test_targets_without_a_root(loss: nn.Module, message: str) -> None:
    likelihood = likelihood_of(loss)
    F, Y = likelihood.canonical(Z(1, 3), torch.full((1, 3), -2.0), 1)
    assert likelihood.hessian_product(F, Y, torch.ones_like(F)).isfinite().all()
    for use in (
        lambda: likelihood.hessian_root(F, Y),
        lambda: next(iter(likelihood.hessian_root_columns(F, Y))),
        lambda: likelihood.draw(F, Y, 1, torch.rand),
    ):
        with pytest.raises(UnsupportedError, match=message):
            use()
