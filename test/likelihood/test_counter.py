"""Random numbers from counters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from curvlinops_plus.likelihood.counter import counter_key, splitmix64, uniforms
from curvlinops_plus.risk import Draws


def test_known_answers() -> None:
    """Those of SplitMix64 with seed 1234567."""
    states = np.array([(1234567 + k * 0x9E3779B97F4A7C15) % 2**64 for k in (1, 2, 3)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_known_uniforms() -> None:
    """By plain Python, number by number: numbers must never change again."""

    def mix(z: int) -> int:
        for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> bits)) * factor % 2**64
        return z ^ (z >> 31)

    gamma, key = 0x9E3779B97F4A7C15, counter_key(7, 2)
    assert key == mix((mix((7 + gamma) % 2**64) + 2 + gamma) % 2**64)
    for e in (0, 5, 10**12):
        for j in (0, 1, 70000):
            expected = (mix((mix((e * gamma + key) % 2**64) + (j + 1) * gamma) % 2**64) >> 11) / 2**53
            assert float(uniforms(key, [e], j, 1)) == expected


def test_numbers_belong_to_examples_and_positions() -> None:
    whole = uniforms(5, range(1000), 0, 90)  # in several pieces
    at = [999, 3, 500]
    assert torch.equal(uniforms(5, torch.tensor(at), 10, 7), whole[at, 10:17])
    assert torch.equal(uniforms(5, range(1, 1000, 3), 0, 90), whole[1::3])
    assert uniforms(5, range(0), 0, 3).shape == (0, 3)
    assert not torch.equal(uniforms(6, range(1000), 0, 90), whole)


def test_moments() -> None:
    """Of 10⁶ numbers, within five standard errors: means, squares, neighbours in both directions, bits."""
    u = uniforms(counter_key(1234, 0), range(1000), 0, 1000)
    n = u.numel()
    assert bool(((u >= 0) & (u < 1)).all())
    centred = (u - 0.5) * math.sqrt(12)
    assert abs(centred.mean()) < 5 / math.sqrt(n)
    assert abs(centred.square().mean() - 1) < 5 * math.sqrt(0.8 / n)
    for product in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(product.mean()) < 5 / math.sqrt(n)
    counts = torch.histc(u, 100, 0, 1)
    assert ((counts - n / 100).square() / (n / 100)).sum() < 100 + 5 * math.sqrt(200)
    lowest = (u * 2**53).long() % 2
    assert abs(lowest.double().mean() - 0.5) < 2.5 / math.sqrt(n)
    other = uniforms(counter_key(1234, 1), range(1000), 0, 1000)
    assert abs((centred * (other - 0.5)).mean()) < 5 / math.sqrt(n)


def test_draws() -> None:
    state = torch.get_rng_state()
    draws = Draws(3)
    first, second = draws.of_examples(range(4)).uniform(4, 2), draws.uniform(4, 3)
    assert torch.equal(torch.cat([first, second], 1), Draws(3).uniform(4, 5))
    assert torch.equal(draws.of_examples(range(4)).uniform(4, 2), first)  # asked for again: the same numbers
    assert not torch.equal(Draws(3, step=1).uniform(4, 2), first)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"shape \[5, 2\] were asked for in a batch of 4 examples"):
        draws.uniform(5, 2)
