"""`verify()` notices approximations that are wrong, built in or a user's own, and blocks that
changed since.

A wrong approximation is a right one with another last step. What it must have is known on paper, or
from autograd by hand; that the package's own approximations are right is tested elsewhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import (
    EKFAC,
    KFAC,
    TNT,
    Accumulator,
    CurvatureEstimator,
    CurvatureWarning,
    DiagonalBlock,
    EKFACLinearOperator,
    Empirical,
    EmpiricalRisk,
    Exact,
    ForwardOnly,
    FromDistribution,
    FullBlock,
    KFACLinearOperator,
    MonteCarlo,
    NearestKronecker,
    ScaledIdentity,
    VerificationError,
    curvature,
    register_likelihood,
)
from curvlinops_plus.blocks.verify import BLOCK_CHECK, LOSS_CHECK, STORED_CHECK
from curvlinops_plus.linalg import (
    Dense,
    Diagonal,
    Eigendecomposed,
    Kronecker,
    LinearOperator,
    Structure,
)
from test.cases import APPROXIMATIONS, NETS, VECTORS, close, problem
from test.helpers import Written, normal, seeded
from test.nets import tanh_net

Block = Any


# ---------------------------------------------------------------------------------- right ones pass
@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.one_in(5)
def test_every_right_approximation_passes(net: str, approximation: str) -> None:
    result = problem(net).made(approximation).verify(stored=False)
    errors = [
        error for _, check, error in result.rows if check == BLOCK_CHECK and not math.isnan(error)
    ]
    assert errors
    assert max(errors) < 1e-12


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("net", ["mlp", "grouped cnn", "attention", "tied transformer"])
def test_with_all_vectors_and_separate_biases(net: str, separate: bool, vectors: str) -> None:
    options = {"vectors": VECTORS[vectors], "separate_weight_and_bias": separate}
    for approximation in (KFAC, EKFAC) if VECTORS[vectors].backward else (KFAC,):
        mapping = (
            dict.fromkeys(problem(net).net.fallback, ScaledIdentity)
            if approximation is KFAC
            else {}
        )
        problem(net).curvature(mapping, default=approximation, **options).verify()


# --------------------------------------------------------------------------------- wrong ones don't
def ending(kind: type[Accumulator], change: Callable[[Block], Block]) -> type[Accumulator]:
    """An approximation whose finished blocks are changed."""

    def finish(self: Any) -> Any:
        result = kind.finish(self)
        if isinstance(result, Accumulator):  # the second sweep ends otherwise
            second = type(result)
            result.__class__ = ending(second, change)  # type: ignore[assignment]
            return result
        return (
            {n: change(b) for n, b in result.items()}
            if isinstance(result, Mapping)
            else change(result)
        )

    return type(f"Wrong{kind.__name__}", (kind,), {"finish": finish})


def factors(
    of_G: Callable[[Tensor], Tensor], of_A: Callable[[Tensor], Tensor]
) -> Callable[[Block], Block]:
    """Changes the factors of Kronecker products."""

    def change(block: Block) -> Block:
        if not isinstance(block, Kronecker):
            return block
        G, A = of_G(block.G.matrices()), of_A(block.A.matrices())
        return Kronecker(Dense(G, Structure.PSD), Dense(A, Structure.PSD))

    return change


def same(M: Tensor) -> Tensor:
    return M


def without_last(M: Tensor) -> Tensor:
    """The column of the bias is missing."""
    M = M.clone()
    M[..., -1, :] = M[..., :, -1] = 0
    return M


def of_values(block: Block) -> Block:
    return (
        Eigendecomposed(block.basis, 2 * block.values)
        if isinstance(block, Eigendecomposed)
        else block
    )


def of_basis(block: Block) -> Block:
    """Eigenvectors that are twice too long, so that the trace alone looks right."""
    if not isinstance(block, Eigendecomposed):
        return block
    basis: Any = block.basis
    return Eigendecomposed(Kronecker(Dense(2 * basis.G.matrices()), basis.A), block.values)


WRONG: dict[str, type[Accumulator]] = {
    "KFAC, both factors twice": ending(KFAC, factors(lambda G: 2 * G, lambda A: 2 * A)),
    "KFAC, A twice": ending(KFAC, factors(same, lambda A: 2 * A)),
    "KFAC, G twice": ending(KFAC, factors(lambda G: 2 * G, same)),
    "KFAC, off-diagonal entries of G missing": ending(KFAC, factors(lambda G: G * torch.eye(G.shape[-1]).to(G), same)),
    "KFAC, no column for the bias": ending(KFAC, factors(same, without_last)),
    "KFAC, trace in another factor": ending(KFAC, factors(lambda G: G + torch.eye(G.shape[-1]).to(G), same)),
    "DiagonalBlock, 7 x + 1": ending(DiagonalBlock, lambda block: Diagonal(7 * block.diagonal() + 1)),
    "DiagonalBlock, in reverse": ending(DiagonalBlock, lambda block: Diagonal(block.diagonal().flip(0))),
    "FullBlock, twice": ending(FullBlock, lambda block: 2 * block),
    "FullBlock, its diagonal alone": ending(FullBlock, lambda block: Diagonal(block.diagonal())),
    "TNT, twice": ending(TNT, lambda block: 2 * block),
    "NearestKronecker, twice": ending(NearestKronecker, lambda block: 2 * block),
    "EKFAC, eigenvalues twice": ending(EKFAC, of_values),
    "EKFAC, eigenvectors twice as long": ending(EKFAC, of_basis),
    "ScaledIdentity, twice": ending(ScaledIdentity, lambda block: 2 * block),
}  # fmt: skip
WHERE = {"linear", "grouped cnn", "strided cnn", "attention", "called twice", "tied"}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("net", sorted(WHERE))
def test_a_wrong_approximation_is_named(net: str, wrong: str) -> None:
    K = problem(net).curvature(WRONG[wrong])
    with pytest.raises(
        VerificationError,
        match=rf"check \(b\) blocks: of the block '.*' that {WRONG[wrong].__name__} makes",
    ):
        K.verify()


@pytest.mark.parametrize("wrong", ["KFAC, both factors twice", "KFAC, A twice", "KFAC, G twice"])
@pytest.mark.parametrize("only", ["embedding", "body"])
def test_of_one_layer_too(only: str, wrong: str) -> None:
    """An embedding that is the head's weight, and a layer beside it."""
    K = problem("tied").curvature({only: WRONG[wrong]}, default=KFAC)
    with pytest.raises(
        VerificationError, match=rf"layer '{only}', check \(b\) blocks.*override `exact_parts`"
    ):
        K.verify()


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("wrong", ["KFAC, A twice", "KFAC, G twice"])
def test_with_inputs_alone(wrong: str, reduce: bool) -> None:
    """Of `ForwardOnly()` G is the identity."""
    approximation = WRONG[wrong].using(kfac_approx="reduce" if reduce else "expand")
    K = problem("attention").curvature(approximation, vectors=ForwardOnly())
    with pytest.raises(VerificationError, match=r"check \(b\) blocks"):
        K.verify()


def test_swapped_factors() -> None:
    """Of a square matrix, where shapes don't tell."""
    swapped = ending(
        KFAC, lambda block: Kronecker(block.A, block.G) if isinstance(block, Kronecker) else block
    )
    risk = EmpiricalRisk(
        nn.Linear(3, 3, bias=False).double(), nn.MSELoss(), [(normal(4, 3), normal(4, 3, seed=1))]
    )
    with pytest.raises(VerificationError, match=r"check \(b\) blocks"):
        curvature(risk, swapped).verify()


class Divided(KFAC):
    """Divides the sum of `a aᵀ` by N² instead of N."""

    def factors(self) -> dict[str, Tensor]:
        made = super().factors()
        return made | {"A": made["A"] / self.totals.examples}


class Skewed(EKFAC):
    """Eigenvectors that are twice as long, with eigenvalues that fit."""

    def decompose(self, name: str, M: Tensor) -> Tensor:
        return 2 * super().decompose(name, M)


class Unweighted(Accumulator):
    """Forgets the factor of the loss."""

    def update(self, batch: Any) -> None:
        self.add("d", batch.squared_grads())

    def finish(self) -> LinearOperator:
        return Diagonal(self.sums["d"].flatten())


class FirstVector(Accumulator):
    """Reads one vector of those that come at once."""

    def update(self, batch: Any) -> None:
        self.add("d", batch.per_example_grads[0].square().sum(0).flatten())

    def finish(self) -> LinearOperator:
        return Diagonal(self.value("d"))

    exact_parts = DiagonalBlock.exact_parts


class Twice(FullBlock):
    """Adds every batch a second time."""

    def update(self, batch: Any) -> None:
        super().update(batch)
        super().update(batch)


class Lost(DiagonalBlock):
    """Ends in NaN."""

    def finish(self) -> LinearOperator:
        return Diagonal(self.value("diagonal").flatten() * torch.nan)


class Doubled(Accumulator):
    """A user's own Kronecker product, too large by two."""

    affine = True
    factor = 2.0

    def update(self, batch: Any) -> None:
        self.add("G", batch.grad_gram())
        if batch.first:
            self.add("A", *batch.input_gram())

    def finish(self) -> LinearOperator:
        return Kronecker(
            Dense(self.factor * self.value("G"), Structure.PSD),
            Dense(self.value("A"), Structure.PSD),
        )


class Correct(Doubled):
    factor = 1.0


class Meant(Doubled):
    """Has no exact part, as it says."""

    def exact_parts(self, block: Any, J: Any, batches: Any) -> Sequence[tuple[Tensor, Tensor]]:
        return []


@pytest.mark.parametrize("net", ["mlp", "attention"])
@pytest.mark.parametrize("kind", [Divided, Skewed, Unweighted, FirstVector, Twice, Lost, Doubled])
def test_a_users_own_accumulator(kind: type[Accumulator], net: str) -> None:
    if net == "attention" and kind in (Unweighted, Doubled):
        return  # by default one gradient at one position is compared
    with pytest.raises(
        VerificationError,
        match=rf"check \(b\) blocks: of the block '.*' that {kind.__name__} makes",
    ):
        problem(net).curvature(kind).verify()


def test_what_is_not_compared_says_so() -> None:
    problem("mlp").curvature(Correct).verify()
    result = problem("mlp").curvature(Meant).verify(stored=False)
    assert [layer for layer, _, error in result.rows if math.isnan(error)] == ["0", "2"]
    assert "(b) blocks: 2 not compared, 0, 2\nall 3 checks passed" in str(result)
    assert result.table().splitlines()[2] == "0        (b) blocks        not compared"


# --------------------------------------------------------------------------- what they compare with
def test_gradients_are_those_of_autograd_by_hand() -> None:
    """Of vectors that a single linear layer shows: its bias's gradient is what was sent."""
    shown: list[Tensor] = []

    class Looks(DiagonalBlock):
        def exact_parts(
            self, block: Any, J: Tensor, batches: Any
        ) -> Sequence[tuple[Tensor, Tensor]]:
            shown.append(J)
            return super().exact_parts(block, J, batches)

    X = normal(5, 4)
    risk = EmpiricalRisk(nn.Linear(4, 3).double(), nn.MSELoss(), [(X, normal(5, 3, seed=1))])
    curvature(risk, Looks).verify(stored=False)
    several, alone = shown
    assert several.shape == (3, 3, 3, 5)
    assert alone.shape == (1, 1, 3, 5)
    sent = several[..., -1]
    close(several[..., :-1], torch.einsum("vno,ni->vnoi", sent, X[:3]), 1e-14)


@pytest.mark.parametrize("approximation", [KFAC, DiagonalBlock])
def test_in_mixed_precision(approximation: Any) -> None:
    """Of a model that runs in bfloat16 by itself."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.body(x).float()

    torch.manual_seed(0)
    model = Written(forward, body=tanh_net(6, 8, 3))
    data = [(torch.randn(7, 6), torch.arange(7) % 3)]
    curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation).verify()
    wrong = curvature(
        EmpiricalRisk(model, nn.CrossEntropyLoss(), data),
        ending(approximation, lambda block: 2 * block),
    )
    with pytest.raises(VerificationError, match=r"check \(b\) blocks"):
        wrong.verify()


def test_operators_of_the_classic_door() -> None:
    model = made().risk.model
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        K = kind(model, nn.CrossEntropyLoss(), list(model.parameters()), made().risk.data)
        assert STORED_CHECK in str(K.verify())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("approximation", [KFAC, EKFAC, DiagonalBlock, FullBlock, TNT])
def test_in_other_precisions(approximation: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = tanh_net(6, 8, 3).to(dtype)
    data = [(normal(7, 6).to(dtype), torch.tensor([0, 1, 2, 0, 1, 2, 0]))]
    K = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation)
    assert BLOCK_CHECK in str(K.verify())
    wrong = curvature(
        EmpiricalRisk(model, nn.CrossEntropyLoss(), data),
        ending(approximation, lambda block: 2 * block),
    )
    with pytest.raises(VerificationError, match=r"check \(b\) blocks"):
        wrong.verify()


# -------------------------------------------------------------------------------------- stored ones
def made(approximation: Any = KFAC, data: Any = None, **options: Any) -> Any:
    model = tanh_net(4, 5, 3).double()
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=p.dtype, generator=seeded(p.numel()))
    data = [
        (normal(5, 4), torch.tensor([0, 1, 2, 1, 0])),
        (normal(2, 4, seed=1), torch.tensor([2, 1])),
    ]
    return curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation, **options)


def in_place(K: Any) -> None:
    K.blocks["2"].G.matrix.mul_(2)


def replaced(K: Any) -> None:
    K.operator.blocks["2"] = 3 * K.operator.blocks["2"]


def loaded(K: Any) -> None:
    """The state of other data."""
    other = EmpiricalRisk(
        K.risk.model,
        nn.CrossEntropyLoss(),
        [(2 * normal(7, 4), torch.tensor([0, 1, 2, 1, 0, 2, 1]))],
    )
    K.load_state_dict(curvature(other, KFAC).state_dict())


@pytest.mark.parametrize("change", [in_place, replaced, loaded])
def test_blocks_that_changed_are_named(change: Callable[[Any], None]) -> None:
    K = made()
    K.verify()
    change(K)
    with pytest.raises(
        VerificationError,
        match=r"check \(d\) stored blocks: the operator's block '.*' differs from.*stored=False",
    ):
        K.verify()
    K.verify(stored=False)
    K.compute()
    K.verify()


def test_eigenvalues_that_changed() -> None:
    K = made(EKFAC)
    K.blocks["0"].values.mul_(2)
    with pytest.raises(VerificationError, match=r"layer '0', check \(d\) stored blocks"):
        K.verify()


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_stored_blocks_and_their_multiples_pass(scale: float) -> None:
    K = scale * made(EKFAC, max_bytes=2**20)
    rows = [row for row in K.verify().rows if row[1] == STORED_CHECK]
    assert [layer for layer, *_ in rows] == ["0", "2"]


def test_blocks_that_the_data_do_not_give_are_left_out() -> None:
    """At other parameters, of streams and states, and of random vectors over data in a random
    order.
    """
    K = made()
    with torch.no_grad():
        K.risk.model[0].weight.add_(1)
    stream = CurvatureEstimator(made().risk, KFAC, decay=0.5)
    for batch in stream.risk.data:
        stream.update(batch)
    risk = made().risk
    kept = type(K).from_state_dict(
        made().state_dict(), risk.model, risk.data, list(risk.params.values())
    )
    loader = DataLoader(TensorDataset(normal(9, 4), torch.arange(9) % 3), 3, shuffle=True)
    shuffled = curvature(risk.with_data(loader), vectors=MonteCarlo())
    lazy = made(compute=False)
    for operator in (K, stream.operator, kept, shuffled, lazy):
        result = operator.verify()
        assert all(math.isnan(error) for _, check, error in result.rows if check == STORED_CHECK)
        assert f"{STORED_CHECK}: {len(operator.plan.kept_blocks)} not compared" in str(result)
    for vectors in (Exact(), Empirical()):
        assert f"{STORED_CHECK}: " not in str(
            curvature(risk.with_data(loader), vectors=vectors).verify()
        )


def test_blocks_of_other_processes_are_left_out() -> None:
    K = made({"0": WRONG["KFAC, G twice"]}, default=DiagonalBlock)
    K.plan.owners = {"0": 1, "2": 0}
    assert [layer for layer, check, _ in K.verify(stored=False).rows if check == BLOCK_CHECK] == [
        "2"
    ]


def test_warnings_are_not_repeated() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CurvatureWarning)
        made().verify()


# ---------------------------------------------------------------------------------- likelihoods
class Sharpened(nn.CrossEntropyLoss):
    """A loss whose likelihood is another one's."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(1.01 * input, target)


register_likelihood(Sharpened)(
    lambda loss: FromDistribution(lambda f: torch.distributions.Categorical(logits=f))
)


def _operator(
    loss: nn.Module, gap: float, dtype: torch.dtype, check: bool = True
) -> LinearOperator:
    """Of a model whose outputs are about `gap` apart."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.weight *= 0.1
        model.bias.copy_(gap * torch.tensor([1.0, 0.0, 0.3, -0.5]))
    X, y = torch.rand(5, 3).to(dtype), torch.tensor([0, 1, 0, 3, 0])
    if not isinstance(loss, nn.CrossEntropyLoss):
        y = torch.rand(5, 4).to(dtype).round()
    return curvature(EmpiricalRisk(model.to(dtype), loss, [(X, y)], check=check))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1.0, 16.0, 1000.0])
@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)],
)
def test_a_saturated_loss_passes(loss: nn.Module, gap: float, dtype: torch.dtype) -> None:
    found = _operator(loss, gap, dtype).verify()  # type: ignore[attr-defined]
    assert any(check == LOSS_CHECK for _, check, _ in found.rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1.0, 12.0, 1000.0])
def test_a_wrong_likelihood_is_found_also_there(gap: float, dtype: torch.dtype) -> None:
    with pytest.raises(
        VerificationError, match=r"loss Sharpened, check \(c\) loss Hessian.*with all its options"
    ):
        _operator(Sharpened(), gap, dtype, check=False).verify()  # type: ignore[attr-defined]
