"""Likelihoods from `torch.distributions`, against the built-in ones and against formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.likelihood import FromDistribution, Likelihood, likelihood_of, rebuild_loss
from test.helpers import squared, uniforms

F64 = torch.float64


def normal(f: Tensor) -> distributions.Distribution:
    return distributions.Normal(f, 0.5**0.5)


def multivariate_normal(f: Tensor) -> distributions.Distribution:
    factor = torch.tensor([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.1, -0.3, 1.5]], dtype=f.dtype)
    return distributions.MultivariateNormal(f, scale_tril=factor)


def binomial(f: Tensor) -> distributions.Distribution:
    return distributions.Binomial(torch.tensor([1.0, 2.0, 5.0], dtype=f.dtype), logits=f)


OUTPUT = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
CLASSES, BITS, NUMBERS = torch.tensor([0, 2, 1, 1]), OUTPUT.sign().clamp(min=0), OUTPUT.flip(0)

EQUAL = {
    "normal": (normal, nn.MSELoss(), NUMBERS),
    "bernoulli": (lambda f: distributions.Bernoulli(logits=f), nn.BCEWithLogitsLoss(), BITS),
    "categorical": (lambda f: distributions.Categorical(logits=f), nn.CrossEntropyLoss(), CLASSES),
    "poisson": (
        lambda f: distributions.Poisson(f.exp()),
        nn.PoissonNLLLoss(full=True),
        torch.tensor([[3.0, 0.0, 1.0]]).double().expand(4, 3),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equals_the_built_in_likelihood(name: str) -> None:
    make, loss, y = EQUAL[name]
    built_in, likelihood = likelihood_of(loss), FromDistribution(make)
    assert likelihood.no_ggn is not None  # one can't tell that these are natural parameters
    F, Y = built_in.canonical(OUTPUT, y, 4)
    F_too, Y_too = likelihood.canonical(OUTPUT, y, 4)
    assert torch.equal(F, F_too)
    V = torch.randn(2, *F.shape, dtype=F64)
    pairs = {
        "grad": (built_in.grad(F, Y), likelihood.grad(F, Y_too)),
        "product": (built_in.hessian_product(F, Y, V), likelihood.hessian_product(F, Y_too, V)),
        "count": (built_in.count(F, Y), likelihood.count(F, Y_too)),
        "root": (squared(built_in.hessian_root(F, Y)), squared(likelihood.hessian_root(F, Y_too))),
        "nll": (
            built_in.nll(F, Y).diff(dim=0),
            likelihood.nll(F, Y_too).diff(dim=0),
        ),  # up to a constant
    }
    draws = built_in.draw(F, Y, 20, uniforms()), likelihood.draw(F, Y_too, 20, uniforms())
    if name == "normal":  # f - y has the other sign than the built-in draw; both have the same law
        pairs["draw"] = draws[0], -draws[1]
    elif name == "categorical":
        pairs["draw"] = draws
    for expected, actual in pairs.values():
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-7)


LAWS = {
    **{name: (make, OUTPUT, y) for name, (make, _, y) in EQUAL.items()},
    "poisson": (lambda f: distributions.Poisson(f.exp()), OUTPUT, torch.ones(4, 3, dtype=F64)),
    "binomial": (
        lambda f: distributions.Binomial(5, logits=f),
        OUTPUT,
        torch.ones(4, 3, dtype=F64),
    ),
    "binomial of different numbers": (binomial, OUTPUT, torch.ones(4, 3, dtype=F64)),
    "log-normal": (lambda f: distributions.LogNormal(f, 0.5), OUTPUT, OUTPUT.exp()),
    "multivariate normal": (multivariate_normal, OUTPUT, NUMBERS),
    "independent": (lambda f: distributions.Independent(normal(f), 1), OUTPUT, NUMBERS),
    "poisson of 1-d output": (
        lambda f: distributions.Poisson(f.exp()),
        OUTPUT[:, 0],
        torch.ones(4, dtype=F64),
    ),
    "flattened": (
        lambda f: distributions.Poisson(f.exp()),
        OUTPUT[:2].repeat(4, 1),
        torch.ones(8, 3, dtype=F64),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_draws(name: str) -> None:
    make, f, y = LAWS[name]
    likelihood = FromDistribution(make)
    F, Y = likelihood.canonical(f, y, 4)
    torch.testing.assert_close(likelihood.restore(F, f.shape, 4), f)
    state, num = torch.get_rng_state(), 4000
    v = likelihood.draw(F, Y, num, uniforms())
    assert torch.equal(torch.get_rng_state(), state)
    outer = torch.einsum("vnrc,vnrd->vnrcd", v, v)
    z = (outer.mean(0) - squared(likelihood.hessian_root(F, Y))).abs() / (
        outer.std(0) / num**0.5 + 1e-7
    )
    assert z.max() < 4, f"{z.max().item():.2f} standard errors"

    whole, uniform = likelihood.draw(F, Y, 3, uniforms(1)), uniforms(1)
    parts = [likelihood.draw(F[i:j], Y[i:j], 3, uniform) for i, j in [(0, 3), (3, 4)]]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    single = likelihood.draw(F.float(), Y.float() if Y.is_floating_point() else Y, 3, uniforms(1))
    torch.testing.assert_close(single.double(), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("name", LAWS)
def test_draws_at_the_ends_of_the_uniforms(name: str, value: float) -> None:
    make, f, y = LAWS[name]
    F, Y = FromDistribution(make).canonical(f, y, 4)
    assert (
        FromDistribution(make)
        .draw(F, Y, 2, lambda *shape: torch.full(shape, value, dtype=F64))
        .isfinite()
        .all()
    )


def two(kind: Any) -> Callable[[Tensor], distributions.Distribution]:
    """A distribution of two parameters that the output holds, the second as a logarithm."""
    return lambda f: kind(f[..., :1], f[..., 1:].exp())


def positive(kind: Any) -> Callable[[Tensor], distributions.Distribution]:
    return lambda f: kind(*f.exp().split(1, -1))


FAMILIES: dict[str, Callable[[Tensor], distributions.Distribution]] = {
    "normal": two(distributions.Normal),
    "laplace": two(distributions.Laplace),
    "cauchy": two(distributions.Cauchy),
    "gumbel": two(distributions.Gumbel),
    "log-normal": two(distributions.LogNormal),
    "gamma": positive(distributions.Gamma),
    "inverse gamma": positive(distributions.InverseGamma),
    "beta": positive(distributions.Beta),
    "dirichlet": lambda f: distributions.Dirichlet(f.exp()),
    "poisson": lambda f: distributions.Poisson(f.exp()),
    "poisson of rates": lambda f: distributions.Poisson(f.abs()),
    "exponential": lambda f: distributions.Exponential(f.exp()),
    "half-normal": lambda f: distributions.HalfNormal(f.exp()),
    "geometric": lambda f: distributions.Geometric(logits=f),
    "bernoulli of probabilities": lambda f: distributions.Bernoulli(probs=f.sigmoid() / 2),
    "one-hot": lambda f: distributions.OneHotCategorical(logits=f),
    "multivariate": lambda f: distributions.MultivariateNormal(
        f, scale_tril=torch.diag_embed((f / 2).exp())
    ),
    "independent laplace": lambda f: distributions.Independent(
        distributions.Laplace(f, f.exp()), 1
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_fisher_is_the_second_moment_of_drawn_gradients(name: str) -> None:
    """Whether or not the output holds natural parameters, and the Hessian at a target is the same
    or not.
    """
    likelihood, num = FromDistribution(FAMILIES[name]), 4000
    F = OUTPUT[:, None, :2] / 2
    Y = FAMILIES[name](F).mean
    v = likelihood.draw(F, Y, num, uniforms(1))
    outer = torch.einsum("vnrc,vnrd->vnrcd", v, v)
    fisher = squared(likelihood.hessian_root(F, Y))
    assert fisher.diagonal(dim1=-2, dim2=-1).min() > 0
    z = (outer.mean(0) - fisher).abs() / (outer.std(0) / num**0.5 + 1e-7)
    assert z.max() < 4, f"{z.max().item():.2f} standard errors"
    V = torch.randn(2, *F.shape, dtype=F64)
    expected = torch.einsum("nrcd,vnrd->vnrc", fisher, V)
    torch.testing.assert_close(likelihood.hessian_product(F, Y, V), expected, rtol=1e-8, atol=1e-8)


def test_fisher_matrices_of_a_location_and_a_scale() -> None:
    """Known formulas, where PyTorch's divergence has a kink too."""
    for kind, at_location, at_scale in (
        (distributions.Normal, 1.0, 2.0),
        (distributions.Laplace, 1.0, 1.0),
        (distributions.Cauchy, 0.5, 0.5),
    ):
        F = torch.tensor([[[0.3, 2.0]]], dtype=F64)
        make = lambda f, kind=kind: kind(f[..., :1], f[..., 1:])  # noqa: E731
        H = squared(FromDistribution(make).hessian_root(F, torch.zeros(1, 1, 1, dtype=F64)))
        expected = torch.diag(torch.tensor([at_location, at_scale], dtype=F64)) / 4
        torch.testing.assert_close(H[0, 0], expected)


@pytest.mark.parametrize(
    ("kind", "make"),
    {
        "StudentT": lambda f: distributions.StudentT(4.0, f),
        "NegativeBinomial": lambda f: distributions.NegativeBinomial(3.0, logits=f),
        "VonMises": lambda f: distributions.VonMises(f, torch.ones_like(f)),
        "Wishart": lambda f: distributions.Wishart(
            f.new_full(f.shape[:-1], 9.0), scale_tril=torch.diag_embed(f.exp())
        ),
        "Weibull": lambda f: distributions.Weibull(f.exp(), torch.ones_like(f)),
        "TransformedDistribution": lambda f: distributions.TransformedDistribution(
            distributions.Normal(torch.zeros_like(f), 1.0), [distributions.AffineTransform(f, 1.0)]
        ),
        "HalfCauchy": lambda f: distributions.Independent(distributions.HalfCauchy(f.exp()), 1),
    }.items(),
)
def test_distributions_without_a_divergence_have_only_draws(kind: str, make: Any) -> None:
    likelihood = FromDistribution(make)
    y = make(OUTPUT[:, None]).sample()[:, 0]
    F, Y = likelihood.canonical(OUTPUT, y, 4)
    words = (
        f"no Kullback-Leibler divergence between two {kind} distributions.*MonteCarlo.*register_kl"
    )
    with pytest.raises(UnsupportedError, match=words):
        likelihood.hessian_product(F, Y, F)
    with pytest.raises(UnsupportedError, match=words):
        likelihood.hessian_root(F, Y)
    assert likelihood.draw(F, Y, 2, uniforms()).isfinite().all()
    assert likelihood.grad(F, Y).isfinite().all()


def test_targets_may_have_another_length_than_the_output() -> None:
    def make(f: Tensor) -> distributions.Distribution:
        mean, log_scale = f.chunk(2, -1)
        return distributions.Normal(mean, log_scale.exp())

    F, Y = FromDistribution(make).canonical(torch.zeros(4, 5, 6), torch.zeros(4, 5, 3), 4)
    assert (F.shape, Y.shape) == ((4, 5, 6), (4, 5, 3))
    F, Y = FromDistribution(make, class_axis=1).canonical(
        torch.zeros(4, 6, 5), torch.zeros(4, 3, 5), 4
    )
    assert (F.shape, Y.shape) == ((4, 5, 6), (4, 5, 3))


# --------------------------------------------------------------------------- Gaussian with variance


@pytest.mark.parametrize("loss", [nn.GaussianNLLLoss(), nn.GaussianNLLLoss(full=True, eps=0.6)])
def test_gaussian_nll(loss: nn.GaussianNLLLoss) -> None:
    likelihood = likelihood_of(loss)
    mean, variance = torch.randn(4, 2, 3, dtype=F64), torch.rand(4, 2, 3, dtype=F64) + 0.1
    y = torch.randn(4, 2, 3, dtype=F64)
    f = torch.cat([mean, variance], -1)
    F, Y = likelihood.canonical(f, y, 4)
    torch.testing.assert_close(
        likelihood.nll(F, Y).sum() / likelihood.count(F, Y), loss(mean, y, variance)
    )

    s = variance.clamp(min=loss.eps)
    fisher = torch.diag_embed(torch.cat([1 / s, 1 / (2 * s**2)], -1))
    torch.testing.assert_close(squared(likelihood.hessian_root(F, Y)), fisher)
    torch.testing.assert_close(squared(Likelihood.hessian_root(likelihood, F, Y)), fisher)
    v = likelihood.draw(F, Y, 4000, uniforms())
    outer = torch.einsum("vnrc,vnrd->vnrcd", v, v)
    assert ((outer.mean(0) - fisher).abs() / (outer.std(0) / 4000**0.5)).max() < 4

    # a draw is the gradient of the loss at a target from the model
    noise = torch.special.ndtri(uniforms(3)(4, 2, 1, 3))[:, :, 0]
    at = likelihood.grad(torch.cat([mean, s], -1), mean + s.sqrt() * noise)
    torch.testing.assert_close(likelihood.draw(F, Y, 1, uniforms(3))[0], at)

    assert rebuild_loss(likelihood.options())(mean, y, variance) == loss(mean, y, variance)
