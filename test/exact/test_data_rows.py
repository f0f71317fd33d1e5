"""Jacobians and factors of the curvature against dense autodiff in float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import (
    GGN,
    EmpiricalRisk,
    GGNFactor,
    GGNFactorLinearOperator,
    Hessian,
    Jacobian,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops_plus.risk import Empirical, MonteCarlo
from test.cases import NETS, PROBLEMS, Problem, close, problem, unchanged
from test.helpers import normal
from test.middles import without_tangents
from test.nets import tanh_net


def jacobian_of(p: Problem, **options: Any) -> JacobianLinearOperator:
    return JacobianLinearOperator(p.model, p.params, p.data, **{**p.net.options, **options})


def factor_of(p: Problem, **options: Any) -> GGNFactorLinearOperator:
    return GGNFactorLinearOperator(
        p.model, p.loss, p.params, p.data, **{**p.net.options, **options}
    )


def dense(p: Problem) -> Tensor:
    """The Jacobian by `torch.func.jacrev`."""
    return torch.cat([b.J for b in p.exact.batches])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return tanh_net(3, 4, 2).double()


# ----------------------------------------------------------------------------------------- products
@pytest.mark.parametrize("name", NETS)
def test_jacobian(name: str) -> None:
    p = problem(name)
    matrix = dense(p)
    with unchanged(p.model, p.data), warnings.catch_warnings():
        warnings.simplefilter("error")
        J = jacobian_of(p)
        assert J.shape == matrix.shape
        if name != "uneven sequences":
            assert J.out_shapes == (
                (sum(len(b.f) for b in p.exact.batches), *p.exact.batches[0].f.shape[1:]),
            )
        V, U = normal(J.shape[1], 3), normal(J.shape[0], 3)
        close(J @ V, matrix @ V)
        close(J @ V[:, 0], matrix @ V[:, 0])
        close(J.T @ U, matrix.T @ U)
        close(U[:, 0] @ J, U[:, 0] @ matrix)
        close(J.to_dense(), matrix)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PROBLEMS)
def test_factor_times_its_transpose_is_the_ggn(name: str) -> None:
    p = problem(name)
    ggn = p.exact.ggn()
    with unchanged(p.model, p.data, p.loss):
        B = factor_of(p)
        dense_B = B.to_dense()
        close(dense_B @ dense_B.T, ggn)
        V, U = normal(B.shape[0], 2), normal(B.shape[1], 2)
        close(B @ U, dense_B @ U)
        close(B.T @ V[:, 0], dense_B.T @ V[:, 0])
        close(B @ (B.T @ V), ggn @ V)


def test_rows_are_examples_terms_columns() -> None:
    p = problem("attention, ce")
    N, (R, C) = sum(b.N for b in p.exact.batches), p.exact.batches[0].terms.shape[1:]
    assert factor_of(p).in_shapes == ((N, R, C - 1),)
    assert factor_of(p, vectors=MonteCarlo(samples=5)).in_shapes == ((N, R, 5),)
    assert factor_of(p, vectors="empirical").in_shapes == ((N, 1, 1),)
    assert factor_of(p, vectors=Empirical(per_term=True)).in_shapes == ((N, R, 1),)
    uneven = problem("uneven sequences")
    columns = sum(b.terms[..., 1:].numel() for b in uneven.exact.batches)
    assert factor_of(uneven).in_shapes == ((columns,),)
    assert jacobian_of(uneven, output=lambda f: f.mean(2)).out_shapes == (
        (sum(b.N for b in uneven.exact.batches), 3),
    )


@pytest.mark.parametrize("kind", [Jacobian, GGNFactor])
@pytest.mark.parametrize("number", [2, 4])
def test_rows_are_as_many_as_in_the_first_pass(kind: Any, number: int) -> None:
    data = [(x, torch.zeros(2, 2)) for x in normal(8, 3).split(2)]
    batches = data[:3]
    J = kind(EmpiricalRisk(mlp(), nn.MSELoss(), batches), check_deterministic=False)
    v, u = (normal(n, 1)[:, 0] for n in (J.shape if kind is GGNFactor else J.shape[::-1]))
    rows = J.T if kind is GGNFactor else J
    batches[:] = data[:number]
    for use in (lambda: rows @ v, lambda: rows.T @ u, lambda: J.to_dense()):
        with pytest.raises(ValueError, match="The data have more or fewer examples"):
            use()


@pytest.mark.parametrize("kind", [GGN, GGNFactor, Hessian, Jacobian])
def test_other_values_than_the_model_s_own(kind: Any) -> None:
    model, data = (
        mlp(),
        [(normal(3, 3), torch.arange(3) % 2), (normal(2, 3, seed=1), torch.arange(2) % 2)],
    )
    other = {key: p.detach() + 1 for key, p in model.named_parameters()}
    moved = mlp()
    moved.load_state_dict(other)
    A, B = (
        kind(EmpiricalRisk(m, nn.CrossEntropyLoss(), data, p))
        for m, p in ((model, other), (moved, None))
    )
    v, u = normal(A.shape[1]), normal(A.shape[0])
    close(A @ v, B @ v)
    close(A.T @ u, B.T @ u)
    close(A.to_dense(), B.to_dense())


def test_both_doors() -> None:
    p = problem("mlp")
    J, matrix = JacobianLinearOperator(p.model, dict(p.model.named_parameters()), p.data), dense(p)
    v = normal(J.shape[1])
    (as_list,) = J @ list(J.in_space.unflatten(v).values())
    close(as_list, (matrix @ v).view(J.out_shapes[0]))
    Jt = TransposedJacobianLinearOperator(p.model, p.params, p.data)
    assert J.T.T is J
    assert (Jt.shape, Jt.in_shapes) == (J.shape[::-1], J.out_shapes)
    close(Jt.to_dense(), matrix.T)
    close(Jt.T.to_dense(), matrix)


def test_function_as_model() -> None:
    W = {"w": normal(3, 2), "b": normal(2)}
    data = [(normal(4, 3), torch.zeros(4, 2))]
    J = JacobianLinearOperator(lambda params, X: (X @ params["w"] + params["b"]).sin(), W, data)
    expected = torch.func.jacrev(lambda t: (data[0][0] @ t["w"] + t["b"]).sin().flatten())(W)
    close(J.to_dense(), torch.cat([expected["w"].flatten(1), expected["b"]], 1))


def test_outputs_of_several_losses() -> None:
    """One tensor of rows for each output; each of them differs in shape."""
    model, X = mlp(), normal(5, 3)
    losses = {"a": nn.MSELoss(), "b": nn.CrossEntropyLoss()}

    def output(f: Tensor) -> dict[str, Tensor]:
        return {"a": f[:, :1], "b": f.sin()}

    data = [
        (x, {"a": normal(len(x), 1), "b": torch.zeros(len(x), dtype=torch.long)})
        for x in X.split([2, 3])
    ]
    J = Jacobian(EmpiricalRisk(model, losses, data, output=output), check_deterministic=True)
    assert {key: list(shape) for key, shape in J.out_space.shapes.items()} == {
        "a": [5, 1],
        "b": [5, 2],
    }
    theta = {key: p.detach() for key, p in model.named_parameters()}

    def rows(t: dict[str, Tensor]) -> Tensor:
        f = output(torch.func.functional_call(model, t, (X,)))
        return torch.cat([f["a"].flatten(), f["b"].flatten()])

    matrix = torch.cat([j.flatten(1) for j in torch.func.jacrev(rows)(theta).values()], 1)
    close(J.to_dense(), matrix)
    V, U = normal(J.shape[1], 2), normal(J.shape[0], 2)
    close(J @ V, matrix @ V)
    close(J.T @ U, matrix.T @ U)
    few = Jacobian(EmpiricalRisk(model, losses, data, [model[2].bias], output=output))
    close(few.to_dense(), matrix[:, -2:])  # by tangents: there are fewer parameters than outputs


# ----------------------------------------------------------------------------- modes and precisions
def test_operations_that_cannot_be_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Batching rule not implemented")

    p = problem("mlp")
    J, V = jacobian_of(p), normal(dense(p).shape[1], 3)
    with monkeypatch.context() as patched:
        patched.setattr(torch.func, "vmap", fail)
        found = J @ V
    close(found, dense(p) @ V)


class Squared(nn.Module):
    """Has no forward mode."""

    def forward(self, x: Tensor) -> Tensor:
        return without_tangents(self, x)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("middle", [nn.Tanh, Squared])
def test_dropout_draws_the_same_for_value_and_derivative(middle: Any, columns: int) -> None:
    """The forward pass, the tangents of several columns, and a pass that begins anew, are those of
    one mask.
    """
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), middle(), nn.Linear(8, 2)).double().train()
    )
    X = normal(4, 3)
    G = GGN(
        EmpiricalRisk(model, nn.MSELoss(), [(X, normal(4, 2))], check=False),
        check_deterministic=False,
    )
    V = normal(G.shape[1], columns)
    torch.manual_seed(1)
    found = G @ V
    torch.manual_seed(1)
    f, params = model(X).flatten(), [*model.parameters()]
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(x, params, retain_graph=True)])
        for x in f
    ]
    J = torch.stack(rows)
    close(found, 2 / 8 * J.T @ (J @ V))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_other_precisions(dtype: torch.dtype, rtol: float) -> None:
    p, v = problem("mlp").to(torch.device("cpu"), dtype), normal(dense(problem("mlp")).shape[1])
    J = JacobianLinearOperator(p.model, p.params, p.data)
    assert J.dtype == (J @ v.float()).dtype == torch.float32
    close((J @ v.float()).double(), dense(problem("mlp")) @ v, rtol=rtol)


@pytest.mark.parametrize("columns", [1, 3])
def test_dropout_of_several_batches(columns: int) -> None:
    """Both products see the same random numbers, which go on from batch to batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double()
    risk = EmpiricalRisk(
        model, nn.MSELoss(), [(normal(3, 3, seed=k), normal(3, 2)) for k in range(3)], check=False
    )
    J = Jacobian(risk, check_deterministic=False)
    V, U, seed = normal(J.shape[1], columns), normal(J.shape[0], columns, seed=1), torch.manual_seed
    close((U * (seed(1) and J @ V)).sum(), (V * (seed(1) and J.T @ U)).sum())
