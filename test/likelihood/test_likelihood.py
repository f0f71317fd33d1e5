"""Laws of the built-in losses, against PyTorch's own losses and automatic differentiation, under
every option.
"""

from __future__ import annotations

import copy
import inspect
import io
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus.likelihood import (
    BCE,
    MSE,
    NLL,
    BCEWithLogits,
    CrossEntropy,
    GaussianNLL,
    Likelihood,
    PoissonNLL,
    likelihood_of,
    rebuild_loss,
)
from curvlinops_plus.likelihood.draws import counts
from test.helpers import squared, uniforms

N = 4
BUILTIN: list[type[Likelihood]] = [
    MSE,
    CrossEntropy,
    NLL,
    BCEWithLogits,
    BCE,
    GaussianNLL,
    PoissonNLL,
]
F64, F32 = torch.float64, torch.float32
CLASS_WEIGHTS = torch.tensor([0.5, 0.0, 2.0])


@dataclass
class Case:
    """A loss with an output and a target that fit it."""

    loss: nn.Module
    f: Tensor
    y: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        """The same in another precision."""
        y = self.y.to(dtype) if self.y.is_floating_point() else self.y
        return Case(copy.deepcopy(self.loss).to(dtype), self.f.to(dtype), y)

    def canonical(self, num_examples: int = N) -> tuple[Likelihood, Tensor, Tensor]:
        likelihood = likelihood_of(self.loss)
        return likelihood, *likelihood.canonical(self.f, self.y, num_examples)

    def unreduced(self, f: Tensor) -> Tensor:
        """PyTorch's loss of each term, in PyTorch's shape."""
        loss = copy.deepcopy(self.loss)
        vars(loss)["reduction"] = "none"
        return loss(f, self.y)


def _cross_entropy_cases() -> dict[str, Case]:
    torch.manual_seed(0)
    cases, shapes = {}, [(), (2,), (2, 2)]
    # -100 and 255 lie outside of the classes, -1 would be a valid Python index, 1 is one of the
    # classes
    ignored = [(-100, False), (-100, True), (-1, True), (1, True), (255, True)]
    options = product([None, CLASS_WEIGHTS], [0.0, 0.3], ignored)
    for i, (weight, smoothing, (ignore_index, some_ignored)) in enumerate(options):
        d = shapes[i % 3]
        loss = nn.CrossEntropyLoss(weight, ignore_index=ignore_index, label_smoothing=smoothing)
        y = torch.randint(3, (N, *d))
        if some_ignored:
            y[0], y[2:3] = ignore_index, ignore_index
        what = f"weight={weight is not None}-smoothing={smoothing}-ignore={ignore_index}-{some_ignored}"
        cases[f"CE-{len(d) + 2}d-{what}"] = Case(loss, torch.randn(N, 3, *d, dtype=F64), y)
    for weight, smoothing, d in product([None, CLASS_WEIGHTS], [0.0, 0.3], [(), (2,)]):
        loss = nn.CrossEntropyLoss(weight, label_smoothing=smoothing)
        y = torch.rand(N, 3, *d, dtype=F64)  # rows don't sum to one
        name = f"CE-{len(d) + 2}d-probabilities-weight={weight is not None}-smoothing={smoothing}"
        cases[name] = Case(loss, torch.randn(N, 3, *d, dtype=F64), y)
    return cases


def _bce_cases() -> dict[str, Case]:
    torch.manual_seed(1)
    cases = {}
    for shape, weights in {
        (N,): [None, (), (1,)],
        (N, 3): [None, (1,), (3,), (1, 3), (1, 1)],
        (N, 2, 3): [None, (3,), (2, 1), (2, 3), (1, 2, 1)],
        (N, 2, 2, 3): [(2, 3), (2, 1, 1), (2, 1, 3), (1, 1, 2, 1)],
    }.items():
        for i, (weight, pos_weight) in enumerate(product(weights, weights)):
            y = torch.rand(shape, dtype=F64)
            y = y if i % 2 else y.round()
            w, pw = (None if s is None else 3 * torch.rand(s) for s in (weight, pos_weight))
            name = f"BCE-{len(shape)}d-weight={weight}-pos_weight={pos_weight}-{'soft' if i % 2 else 'hard'}"
            cases[name] = Case(
                nn.BCEWithLogitsLoss(weight=w, pos_weight=pw), torch.randn(shape, dtype=F64), y
            )
    return cases


def _mse_cases() -> dict[str, Case]:
    torch.manual_seed(2)
    return {
        f"MSE-{list(shape)}": Case(
            nn.MSELoss(), torch.randn(shape, dtype=F64), torch.randn(shape, dtype=F64)
        )
        for shape in [(N,), (N, 1), (N, 3), (N, 2, 3), (N, 2, 1, 3)]
    }


def _poisson_cases(log_input: bool) -> dict[str, Case]:
    torch.manual_seed(3)
    cases = {}
    for i, shape in enumerate([(N,), (N, 1), (N, 3), (N, 2, 3), (N, 2, 1, 3)]):
        full, eps = bool(i % 2), (1e-8, 0.3)[i // 2 % 2]
        loss = nn.PoissonNLLLoss(log_input, full, eps=eps)
        f = torch.randn(shape, dtype=F64)
        name = f"Poisson-{list(shape)}-log_input={log_input}-full={full}-eps={eps}"
        cases[name] = Case(
            loss, f if log_input else f.exp() + 0.3, torch.poisson(2 * torch.ones(shape, dtype=F64))
        )
    return cases


def _nll_cases() -> dict[str, Case]:
    torch.manual_seed(4)
    cases = {}
    for weight, ignore_index, d in product([None, CLASS_WEIGHTS], [-100, 1], [(), (2,), (2, 2)]):
        y = torch.randint(3, (N, *d))
        y[0] = ignore_index
        name = f"NLL-{len(d) + 2}d-weight={weight is not None}-ignore={ignore_index}"
        loss = nn.NLLLoss(weight, ignore_index=ignore_index)
        cases[name] = Case(loss, torch.randn(N, 3, *d, dtype=F64).log_softmax(1), y)
    return cases


def _probability_cases() -> dict[str, Case]:
    torch.manual_seed(5)
    cases = {}
    shapes: dict[tuple[int, ...], list] = {
        (N,): [None, ()],
        (N, 3): [None, (3,), (1, 3)],
        (N, 2, 3): [None, (2, 1)],
    }
    for shape, weights in shapes.items():
        for weight in weights:
            loss = nn.BCELoss(None if weight is None else 3 * torch.rand(weight))
            f, y = 0.1 + 0.8 * torch.rand(shape, dtype=F64), torch.rand(shape, dtype=F64)
            cases[f"BCE of probabilities-{len(shape)}d-weight={weight}"] = Case(
                loss, f, y if weight else y.round()
            )
    return cases


HESSIAN = _cross_entropy_cases() | _bce_cases() | _mse_cases() | _poisson_cases(log_input=True)
FISHER = (
    _nll_cases() | _probability_cases() | _poisson_cases(log_input=False)
)  # which takes the Hessian's place
CASES = HESSIAN | FISHER


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param].to(F64)


@pytest.fixture(params=HESSIAN)
def hessian_case(request: pytest.FixtureRequest) -> Case:
    return HESSIAN[request.param].to(F64)


@pytest.fixture(params=[F64, F32], ids=["float64", "float32"])
def typed_case(request: pytest.FixtureRequest, case: Case) -> Case:
    return case.to(request.param)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-11 if actual.dtype == F64 else 2e-5
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


def blocks(likelihood: Likelihood, F: Tensor, Y: Tensor) -> Tensor:
    """Hessian [N, R, C, C] of each term, column by column from `hessian_product`."""
    C = F.shape[-1]
    basis = torch.eye(C, dtype=F.dtype)[:, None, None].expand(C, *F.shape)
    return likelihood.hessian_product(F, Y, basis).movedim(0, -1)


# ---------------------------------------------------------------------------------- against PyTorch


def test_nll_is_the_unreduced_loss(typed_case: Case) -> None:
    likelihood, F, Y = typed_case.canonical()
    expected = typed_case.unreduced(typed_case.f)
    nll = likelihood.nll(F, Y)
    if not isinstance(
        typed_case.loss, (nn.CrossEntropyLoss, nn.NLLLoss)
    ):  # elementwise; a term is a row
        expected = expected.reshape(F.shape).sum(-1)
    close(nll, expected.reshape(nll.shape))


@pytest.mark.parametrize("num_examples", [N, N // 2])  # two positions of each example, flattened
def test_count_is_what_mean_divides_by(typed_case: Case, num_examples: int) -> None:
    likelihood, F, Y = typed_case.canonical(num_examples)
    count = likelihood.count(F, Y)
    assert count.shape == ()
    mean = likelihood.nll(F, Y).sum() / count
    close(mean.to(F.dtype), typed_case.loss(typed_case.f, typed_case.y))


def test_grad(typed_case: Case) -> None:
    likelihood, F, Y = typed_case.canonical()
    expected = torch.func.grad(lambda f: typed_case.unreduced(f).sum())(typed_case.f)
    close(likelihood.restore(likelihood.grad(F, Y), typed_case.f.shape, N), expected)


def test_hessian_and_root_are_those_of_the_loss(hessian_case: Case) -> None:
    n = hessian_case.f.numel()
    total = lambda f: hessian_case.unreduced(f.view_as(hessian_case.f)).sum()  # noqa: E731
    expected = torch.func.jacrev(torch.func.jacrev(total))(hessian_case.f.flatten())
    likelihood, F, Y = hessian_case.canonical()
    # entries of the output in the order of the canonical form, to lay the expected matrix out in
    # blocks
    order = (
        likelihood.restore(torch.arange(n).view(F.shape), hessian_case.f.shape, N)
        .flatten()
        .argsort()
    )
    expected = expected[order][:, order]
    close(torch.block_diag(*blocks(likelihood, F, Y).flatten(0, 1)), expected)
    close(torch.block_diag(*squared(likelihood.hessian_root(F, Y)).flatten(0, 1)), expected)


@pytest.mark.parametrize("name", FISHER)
def test_fisher_takes_the_place_of_the_hessian(name: str) -> None:
    """What the last function of a model makes of it is the Hessian of the loss that reads that
    function's input.
    """
    case = FISHER[name].to(F64)
    likelihood, F, Y = case.canonical()
    reason = likelihood.no_ggn
    assert reason is not None
    if isinstance(case.loss, nn.PoissonNLLLoss):
        rates = F + case.loss.eps
        assert "log_input=True" in reason
        close(blocks(likelihood, F, Y), torch.diag_embed(1 / rates))
        k = torch.arange(80, dtype=F64).view(-1, 1, 1, 1)
        probability = torch.distributions.Poisson(rates).log_prob(k).exp()
        close((probability * (1 - k / rates) ** 2).sum(0), 1 / rates)
        return
    if isinstance(case.loss, nn.NLLLoss):
        of_logits: nn.Module = nn.CrossEntropyLoss(
            case.loss.weight, ignore_index=case.loss.ignore_index
        )
        last, logits = lambda z: z.log_softmax(-1), F + 0.7
    else:
        of_logits, last, logits = nn.BCEWithLogitsLoss(case.loss.weight), torch.sigmoid, F.logit()  # type: ignore[arg-type]
    assert type(of_logits).__name__ in reason
    J = torch.func.vmap(torch.func.jacrev(last))(logits.flatten(0, 1)).unflatten(0, F.shape[:2])
    close(J.mT @ blocks(likelihood, F, Y) @ J, blocks(likelihood_of(of_logits), logits, Y))
    B = J.mT @ likelihood.hessian_root(F, Y).permute(1, 2, 3, 0)
    close(B @ B.mT, blocks(likelihood_of(of_logits), logits, Y))
    close(
        (J.mT @ likelihood.grad(F, Y)[..., None])[..., 0], likelihood_of(of_logits).grad(logits, Y)
    )


def test_float32_root_product_and_scale(case: Case) -> None:
    likelihood, F, Y = case.canonical()
    likelihood32, F_32, Y_32 = case.to(F32).canonical()
    H = blocks(likelihood, F, Y)
    close(blocks(likelihood32, F_32, Y_32), H)
    close(squared(likelihood32.hessian_root(F_32, Y_32)), H)
    assert likelihood.scale(F, Y).shape in {(*F.shape[:2], 1), F.shape}


@pytest.mark.parametrize("C", [1, 2, 5, 40])
@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_the_root_of_saturated_outputs_keeps_its_digits(C: int, size: float) -> None:
    """Relative to each term by itself: what a fitted network has left is all in numbers next to 0
    or 1.
    """
    torch.manual_seed(0)
    F_32 = size * torch.randn(64, 2, C)
    likelihood, Y = (
        likelihood_of(nn.CrossEntropyLoss(label_smoothing=0.1)),
        torch.randint(C, (64, 2)),
    )
    p = F_32.softmax(-1).double()
    rest = torch.stack([p[..., [c for c in range(C) if c != k]].sum(-1) for k in range(C)], -1)
    H = torch.diag_embed(p * rest) - (1 - torch.eye(C)) * p[..., :, None] * p[..., None, :]
    found = squared(likelihood.hessian_root(F_32, Y)).double()
    away, norm = (torch.linalg.matrix_norm(t) for t in (found - H, H))
    assert (away <= 2e-6 * norm + 1e-37).all()  # below are no numbers in float32
    assert len(likelihood.hessian_root(F_32, Y)) == max(C - 1, 1)
    V = torch.randn(64, 2, C)
    adjoint = likelihood.hessian_root_transpose_product(F_32, Y, V)
    away = likelihood.hessian_root_product(F_32, Y, adjoint) - (H @ V.double()[..., None])[..., 0]
    assert (
        torch.linalg.vector_norm(away, dim=-1)
        <= 1e-5 * norm * torch.linalg.vector_norm(V, dim=-1) + 1e-30
    ).all()


def test_products_with_the_root(typed_case: Case) -> None:
    """`B (Bᵀ v) = H v`, and one-hot vectors give the columns of `B` one by one."""
    likelihood, F, Y = typed_case.canonical()
    root = likelihood.hessian_root(F, Y)
    K = len(root)
    assert likelihood.num_columns(F) == K
    close(torch.stack(list(likelihood.hessian_root_columns(F, Y))), root)
    one_hot = torch.eye(K, dtype=F.dtype)[:, None, None].expand(K, *F.shape[:2], K)
    close(likelihood.hessian_root_product(F, Y, one_hot), root)
    V = torch.randn(2, 3, *F.shape, dtype=F.dtype)
    adjoint = likelihood.hessian_root_transpose_product(F, Y, V)
    assert adjoint.shape == (2, 3, *F.shape[:2], K)
    close(likelihood.hessian_root_product(F, Y, adjoint), likelihood.hessian_product(F, Y, V))
    close(
        Likelihood.hessian_root_product(likelihood, F, Y, adjoint),
        likelihood.hessian_root_product(F, Y, adjoint),
    )
    close(Likelihood.hessian_root_transpose_product(likelihood, F, Y, V), adjoint)


# ----------------------------------------------------------------------------- against the defaults


class ByAutodiff(Likelihood):
    """Nothing but the loss terms of another likelihood: all else is the base class."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__(likelihood.loss)
        self.nll = likelihood.nll

    def nll(self, F: Tensor, Y: Tensor) -> Tensor:
        raise AssertionError("replaced above")


def test_formulas_equal_autodiff(case: Case) -> None:
    likelihood, F, Y = case.canonical()
    default = ByAutodiff(likelihood)
    close(default.grad(F, Y), likelihood.grad(F, Y))
    if likelihood.no_ggn is not None:
        return
    V = torch.randn(2, *F.shape, dtype=F64)
    close(default.hessian_product(F, Y, V), likelihood.hessian_product(F, Y, V))
    B = default.hessian_root(F, Y)
    assert len(B) == default.num_columns(F)
    torch.testing.assert_close(
        squared(B), squared(likelihood.hessian_root(F, Y)), rtol=1e-8, atol=1e-8
    )


# ----------------------------------------------------------------------------------- random vectors


def assert_second_moment(likelihood: Likelihood, F: Tensor, Y: Tensor, num: int = 4000) -> None:
    v = likelihood.draw(F, Y, num, uniforms(1))
    assert v.shape == (num, *F.shape)
    outer = torch.einsum("vnrc,vnrd->vnrcd", v, v)
    error = outer.std(0) / num**0.5
    z = (outer.mean(0) - blocks(likelihood, F, Y)).abs() / (error + 1e-12)
    assert z.max() < 4, f"{z.max().item():.2f} standard errors"


def test_draws_average_to_the_hessian(case: Case) -> None:
    assert_second_moment(*case.canonical())


def test_draws_by_default_average_to_the_hessian() -> None:
    likelihood, F, Y = CASES["CE-2d-probabilities-weight=True-smoothing=0.3"].to(F64).canonical()
    assert_second_moment(ByAutodiff(likelihood), F, Y)


def test_the_moment_test_can_fail() -> None:
    likelihood, F, Y = CASES["MSE-[4, 3]"].canonical()
    vars(likelihood)["hessian_product"] = lambda F, Y, V: 2.3 * V
    with pytest.raises(AssertionError, match="standard errors"):
        assert_second_moment(likelihood, F, Y)


def test_draws_do_not_depend_on_batches_or_precision(case: Case) -> None:
    state = torch.get_rng_state()
    likelihood, F, Y = case.canonical()
    whole = likelihood.draw(F, Y, 5, uniforms())
    uniform = uniforms()
    parts = [likelihood.draw(F[i:j], Y[i:j], 5, uniform) for i, j in [(0, 1), (1, 4)]]
    close(torch.cat(parts, 1), whole)
    likelihood32, F_32, Y_32 = case.to(F32).canonical()
    close(likelihood32.draw(F_32, Y_32, 5, uniforms()), whole)
    assert torch.equal(torch.get_rng_state(), state)


def test_impossible_classes_are_never_drawn() -> None:
    likelihood = likelihood_of(nn.CrossEntropyLoss())
    f = torch.tensor([[-torch.inf, 0.0, 0.3, -torch.inf]], dtype=F64)
    F, Y = likelihood.canonical(f, torch.tensor([1]), 1)
    ends = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=F64)
    v = likelihood.draw(F, Y, 4, lambda *shape: ends.expand(shape))
    assert (v[..., [0, 3]] == 0).all()


def test_poisson_counts_are_the_inverse_distribution_function() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    rates = torch.tensor([1e-300, 1e-9, 1e-3, 0.3, 1.0, 7.5, 40.0, 999.0, 3e4, 2e6], dtype=F64)
    u = torch.cat([uniforms()(200), torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=F64)])
    k = counts(rates[:, None].expand(-1, len(u)), u.expand(len(rates), -1))
    expected = torch.from_numpy(
        scipy_stats.poisson.ppf(u.clamp(2.0**-54).numpy(), rates[:, None].numpy())
    )
    assert torch.equal(k[:, :-4], expected[:, :-4])
    # In the outermost 2⁻⁵³ the distribution function has no digits left; a draw there stays within
    # reach of the rate.
    assert ((k - rates[:, None]).abs() <= 9 * rates.sqrt()[:, None] + 26).all()


def test_saturated_probabilities_have_finite_numbers() -> None:
    """A sigmoid that rounds to 0 or 1 has derivative zero; nothing that it multiplies may be
    infinite.
    """
    likelihood = likelihood_of(nn.BCELoss())
    f = torch.tensor([[0.0, 1.0, 0.5]])
    for y in (torch.zeros(1, 3), torch.ones(1, 3)):
        F, Y = likelihood.canonical(f, y, 1)
        results = [likelihood.nll(F, Y), likelihood.grad(F, Y), likelihood.hessian_root(F, Y)]
        results += [
            likelihood.hessian_product(F, Y, torch.ones_like(F)),
            likelihood.draw(F, Y, 3, uniforms()),
        ]
        assert all(r.isfinite().all() for r in results)
        close(likelihood.nll(F, Y).sum() / 3, nn.BCELoss()(f, y))
        leaf = f.clone().requires_grad_()
        (theirs,) = torch.autograd.grad(nn.BCELoss(reduction="sum")(leaf, y), leaf)
        torch.testing.assert_close(likelihood.grad(F, Y)[:, 0], theirs, rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("rules", BUILTIN)
def test_every_constructor_option_is_known(rules: type[Likelihood]) -> None:
    """A new option in a future PyTorch must be handled, or refused, before this passes again."""
    assert rules.loss_type is not None
    folded_into_reduction = {"size_average", "reduce"}
    assert {*inspect.signature(rules.loss_type).parameters} - folded_into_reduction == {
        *rules.option_names
    }
    forward = [*inspect.signature(rules.loss_type.forward).parameters][1:]
    assert forward[1] == "target"


@pytest.mark.parametrize(
    "kind", [rules.loss_type for rules in BUILTIN if rules.loss_type is not nn.GaussianNLLLoss]
)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_reduction(kind: type[nn.Module]) -> None:
    assert likelihood_of(kind()).reduction == "mean"
    assert likelihood_of(kind(reduction="sum")).reduction == "sum"
    assert likelihood_of(kind(size_average=True)).reduction == "mean"
    assert likelihood_of(kind(size_average=False)).reduction == "sum"
    for unreduced in (kind(reduction="none"), kind(reduce=False)):
        with pytest.raises(
            NotImplementedError, match=rf'{kind.__name__}\(reduction=.none.\).*"mean" or "sum"'
        ):
            likelihood_of(unreduced)


def test_all_ignored_counts_zero_and_stays_finite() -> None:
    likelihood = likelihood_of(nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1))
    F, Y = likelihood.canonical(torch.randn(2, 3), torch.full((2,), -100), 2)
    assert likelihood.count(F, Y) == 0
    found = [likelihood.nll(F, Y), likelihood.grad(F, Y), likelihood.hessian_root(F, Y)]
    assert all((result == 0).all() for result in (*found, likelihood.draw(F, Y, 3, uniforms())))


def test_options_rebuild_the_loss(case: Case) -> None:
    file = io.BytesIO()
    torch.save(likelihood_of(case.loss).options(), file)
    file.seek(0)
    rebuilt = rebuild_loss(torch.load(file, weights_only=True))
    assert type(rebuilt) is type(case.loss)
    assert torch.equal(rebuilt(case.f, case.y), case.loss(case.f, case.y))


# ---------------------------------------------------------------------------- precision, transforms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised_to_float32(dtype: torch.dtype) -> None:
    for case in CASES.values():
        half = case.to(dtype)
        likelihood, F, Y = half.canonical()
        assert F.dtype == F32
        results = [
            likelihood.nll(F, Y),
            likelihood.grad(F, Y),
            likelihood.draw(F, Y, 1, uniforms()),
        ]
        results += [
            likelihood.hessian_root(F, Y),
            likelihood.hessian_product(F, Y, torch.ones_like(F)),
        ]
        assert {r.dtype for r in results} == {F32}
