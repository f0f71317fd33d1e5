"""Random numbers from counters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from curvlinops_plus.likelihood import draws as draws_file
from curvlinops_plus.likelihood.draws import categories, normals, splitmix64, uniforms
from curvlinops_plus.risk import Draws


def test_known_answers() -> None:
    """Those of SplitMix64 with seed 1234567."""
    states = np.array(
        [(1234567 + k * 0x9E3779B97F4A7C15) % 2**64 for k in (1, 2, 3)], dtype=np.uint64
    )
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_numbers_belong_to_examples_and_positions() -> None:
    whole = uniforms(5, range(1000), 0, 90)  # in several pieces
    at = [999, 3, 500]
    assert torch.equal(uniforms(5, torch.tensor(at), 10, 7), whole[at, 10:17])
    assert torch.equal(uniforms(5, range(1, 1000, 3), 0, 90), whole[1::3])
    assert uniforms(5, range(0), 0, 3).shape == (0, 3)
    assert not torch.equal(uniforms(6, range(1000), 0, 90), whole)


def test_draws() -> None:
    state = torch.get_rng_state()
    draws = Draws(3)
    first, second = draws.of_examples(range(4)).uniform(4, 2), draws.uniform(4, 3)
    assert torch.equal(torch.cat([first, second], 1), Draws(3).uniform(4, 5))
    assert torch.equal(
        draws.of_examples(range(4)).uniform(4, 2), first
    )  # asked for again: the same numbers
    assert not torch.equal(Draws(3, step=1).uniform(4, 2), first)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="invalid for input of size 8"):
        draws.uniform(5, 2)


def test_draws_of_batches() -> None:
    """Numbers of their own for each batch of a step, in the open interval, and the same again."""

    def drawn(seed: int, step: int, before: int, N: int, *losses: int) -> torch.Tensor:
        draws = Draws(seed, step, before, by_batch=True)
        for loss in losses:
            draws = draws.of_loss(loss)
        draws.of_examples(range(before, before + N))
        return torch.cat([draws.uniform(N, 2), draws.uniform(N, 3)], 1)

    state = torch.get_rng_state()
    others = [drawn(4, 1, 0, 500), drawn(3, 2, 0, 500), drawn(3, 1, 9, 500), drawn(3, 1, 0, 500, 1)]
    u = drawn(3, 1, 0, 500)
    assert torch.equal(u, drawn(3, 1, 0, 500))
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1])) < 0.1
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 < float(u.min()) < 0.01
    assert 0.99 < float(u.max()) < 1
    assert len(u.unique()) > 2490
    assert bool(normals(u).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_do_not_depend_on_the_pieces(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU pieces are larger than on a CPU."""
    torch.manual_seed(0)
    probabilities = torch.rand(3, 5, 40, dtype=dtype)
    probabilities[0, 1] = 0
    probabilities[1, 2, 3] = torch.nan
    probabilities[2, :, -7:] = 0
    u = uniforms(5, range(15), 0, 6).view(3, 5, 6)
    u[2] = 1 - 2**-53
    expected = categories(probabilities, u)
    for size in (1, 700, 2**40):
        monkeypatch.setattr(draws_file, "_DRAW_BYTES", size)
        assert torch.equal(categories(probabilities, u), expected)
    assert torch.equal(categories(probabilities[0, 0], u[0, 0]), expected[0, 0])
    assert categories(probabilities, u[..., :0]).shape == (3, 5, 0)
    assert categories(probabilities[:0], u[:0]).shape == (0, 5, 6)
