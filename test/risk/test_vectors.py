"""What is backpropagated: each kind by itself, the words that stand for them, and what is
refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops_plus import KFAC, EmpiricalRisk, FromDistribution, FullBlock, curvature
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import Likelihood, likelihood_of
from curvlinops_plus.risk import vectors as modes
from curvlinops_plus.risk.vectors import (
    CurvaturePropagation,
    Draws,
    Exact,
    MonteCarlo,
    Vectors,
    as_vectors,
)
from test.helpers import seeded

F64 = torch.float64


def terms(
    loss: nn.Module, *shape: int, C: int = 3, seed: int = 0
) -> tuple[Likelihood, Tensor, Tensor]:
    """A likelihood with outputs and targets [*shape, C]."""
    generator = seeded(seed)
    f = torch.randn(*shape, C, dtype=F64, generator=generator)
    likelihood = likelihood_of(loss)
    if isinstance(loss, nn.CrossEntropyLoss):
        y = torch.randint(C, shape, generator=generator)
        return (likelihood, *likelihood.canonical(f, y, shape[0], class_axis=-1))
    return (
        likelihood,
        *likelihood.canonical(f, torch.rand(f.shape, dtype=F64, generator=generator), shape[0]),
    )


def blocks(likelihood: Likelihood, F: Tensor, Y: Tensor) -> Tensor:
    """Loss Hessian of each example over all of its terms, [N, R·C, R·C]."""
    B = likelihood.hessian_root(F, Y)
    H = torch.einsum("knrc,knrd->nrcd", B, B)
    return torch.stack([torch.block_diag(*h) for h in H])


def sent(vectors: Vectors, likelihood: Likelihood, F: Tensor, Y: Tensor, seed: int = 0) -> Tensor:
    """All vectors [V, N, R·C]."""
    found = torch.stack([*vectors.send(likelihood, F, Y, Draws(seed))])
    assert len(found) == vectors.count(likelihood, F)
    return found.flatten(2)


# ---------------------------------------------------------------------------- curvature propagation

LOSSES = {
    "ce": nn.CrossEntropyLoss(),
    "mse": nn.MSELoss(),
    "bce": nn.BCEWithLogitsLoss(),
    "poisson": nn.PoissonNLLLoss(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [(4,), (3, 2)], ids=["one term", "several terms"])
def test_curvature_propagation_averages_to_the_hessian_of_all_terms(
    loss: str, shape: tuple[int, ...]
) -> None:
    likelihood, F, Y = terms(LOSSES[loss], *shape)
    v = sent(CurvaturePropagation(4000), likelihood, F, Y) * 4000**0.5
    assert len(v) == 4000
    outer = torch.einsum("vni,vnj->vnij", v, v)
    z = (outer.mean(0) - blocks(likelihood, F, Y)).abs() / (outer.std(0) / 4000**0.5 + 1e-12)
    assert z.max() < 4, f"{z.max().item():.2f} standard errors"


@pytest.mark.parametrize("loss", ["mse", "bce", "poisson"])
def test_one_column_in_all_has_no_noise(loss: str) -> None:
    likelihood, F, Y = terms(LOSSES[loss], 5, C=1)
    expected = blocks(likelihood, F, Y)
    for vectors in (CurvaturePropagation(), CurvaturePropagation(3, seed=4)):
        v = sent(vectors, likelihood, F, Y, vectors.seed)
        torch.testing.assert_close(torch.einsum("vni,vnj->nij", v, v), expected, rtol=1e-12, atol=0)
    drawn = sent(MonteCarlo(), likelihood, F, Y)
    assert not torch.allclose(drawn.square()[0, :, :, None], expected, rtol=0.1)


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    samples=st.integers(1, 3),
    R=st.integers(1, 2),
)
def test_signs_depend_on_the_examples_not_on_their_batches(
    sizes: list[int], samples: int, R: int
) -> None:
    likelihood, F, Y = terms(nn.CrossEntropyLoss(), sum(sizes), R)
    for vectors in (CurvaturePropagation(samples, seed=1), Exact(signs=True, seed=1)):
        whole = torch.stack([*vectors.send(likelihood, F, Y, Draws(1))])
        draws, parts = Draws(1), []
        numbers = torch.arange(len(F)).split(sizes)
        for f, y, examples in zip(F.split(sizes), Y.split(sizes), numbers, strict=True):
            parts.append(
                torch.stack([*vectors.send(likelihood, f, y, draws.of_examples(examples))])
            )
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------ words


def test_the_page_about_modes_lists_all_words() -> None:
    page = (Path(__file__).parents[2] / "docs" / "modes.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    found = {}
    for words, made, *_ in (row for row in rows if len(row) == 5):
        (call,) = re.findall("`(.*?)`", made)
        found.update(dict.fromkeys(re.findall("`(.*?)`", words), eval(call, vars(modes))))
    for word, vectors in found.items():
        assert repr(as_vectors(word)) == repr(vectors), word
    with pytest.raises(ValueError, match="or a word:") as error:
        as_vectors("?")
    assert {*re.findall("'([a-z0-9_-]+)'", str(error.value))} == {*found}


# ------------------------------------------------------------------------------------ GGN or Fisher


@pytest.mark.parametrize("word", ["ggn_exact", "ggn_curvature_prop"])
def test_the_ggn_is_refused_where_only_the_fisher_is_there(word: str) -> None:
    vectors = as_vectors(word)
    name = type(vectors).__name__
    cases: list[tuple[Any, str]] = [
        (
            nn.GaussianNLLLoss(),
            "GaussianNLLLoss has a Hessian in mean and variance that is indefinite",
        ),
        (
            nn.PoissonNLLLoss(log_input=False),
            "PoissonNLLLoss with log_input=False .* depends on the targets",
        ),
        (nn.NLLLoss(), "NLLLoss is linear in the log-probabilities"),
        (nn.BCELoss(), "BCELoss has a Hessian in the probabilities"),
        (
            FromDistribution(lambda f: torch.distributions.Gamma(f.exp(), 1.0)),
            "FromDistribution may have a Hessian",
        ),
    ]
    F = torch.zeros(2, 1, 4, dtype=F64)
    for loss, words in cases:
        likelihood = likelihood_of(loss)
        message = rf'{name}\(matrix="ggn"\): {words}.*matrix="fisher".*"fisher_"'
        with pytest.raises(UnsupportedError, match=message):
            vectors.count(likelihood, F)
        as_vectors(word.replace("ggn", "fisher")).check(likelihood)
        type(vectors)().check(likelihood)
    for loss in (*LOSSES.values(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        vectors.check(likelihood_of(loss))
    risk = EmpiricalRisk(
        nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1)),
        nn.NLLLoss(),
        [(torch.ones(4, 3), torch.arange(4) % 2)],
    )
    with pytest.raises(UnsupportedError, match="NLLLoss is linear in the log-probabilities"):
        curvature(risk, KFAC, vectors=vectors)
    for other in (word.replace("ggn", "fisher"), vectors.fisher_type):
        plain = FullBlock if other == "type-2" else KFAC
        assert curvature(risk, plain, vectors=as_vectors(other)).trace > 0
