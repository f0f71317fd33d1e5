"""Jacobians and factors of the curvature against dense autodiff in float64, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import FEW, NETS, PROBLEMS, Problem, close, problem, unchanged
from helpers import refuses_cdist
from hypothesis import given, settings
from hypothesis import strategies as st
from middles import MIDDLES, Net, Once, clipped
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvlinops_plus
from curvlinops_plus import (
    GGN,
    EmpiricalRisk,
    FisherMCLinearOperator,
    GGNFactorLinearOperator,
    GGNLinearOperator,
    Jacobian,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.linalg import Product
from curvlinops_plus.risk import Empirical, MonteCarlo

#: Nets whose outputs have one shape in all batches, but for the number of examples.
STACKABLE = [name for name in NETS if name != "uneven sequences"]


def jacobian_of(p: Problem, **options: Any) -> JacobianLinearOperator:
    return JacobianLinearOperator(p.model, p.params, p.data, **{**p.net.options, **options})


def factor_of(p: Problem, **options: Any) -> GGNFactorLinearOperator:
    return GGNFactorLinearOperator(p.model, p.loss, p.params, p.data, **{**p.net.options, **options})


def dense(p: Problem) -> Tensor:
    """The Jacobian by `torch.func.jacrev`."""
    return torch.cat([b.J for b in p.exact.batches])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------------------------------------------- products
@pytest.mark.parametrize("name", STACKABLE)
def test_jacobian(name: str) -> None:
    p = problem(name)
    matrix = dense(p)
    with unchanged(p.model, p.data):
        J = jacobian_of(p)
        assert J.shape == matrix.shape
        assert J.out_shapes == ((sum(len(b.f) for b in p.exact.batches), *p.exact.batches[0].f.shape[1:]),)
        V, U = normal(J.shape[1], 3), normal(J.shape[0], 3)
        close(J @ V, matrix @ V)
        close(J @ V[:, 0], matrix @ V[:, 0])
        close(J.T @ U, matrix.T @ U)
        close(U[:, 0] @ J, U[:, 0] @ matrix)
        close(J.to_dense(), matrix)


@pytest.mark.parametrize("name", PROBLEMS)
def test_factor_times_its_transpose_is_the_ggn(name: str) -> None:
    p = problem(name)
    ggn = p.exact.ggn()
    with unchanged(p.model, p.data, p.loss):
        B = factor_of(p)
        dense_B = B.to_dense()
        close(dense_B @ dense_B.T, ggn)
        V, U = normal(B.shape[0], 2), normal(B.shape[1], 2)
        close(B.T @ V, dense_B.T @ V)
        close(B @ U, dense_B @ U)
        close(B.T @ V[:, 0], dense_B.T @ V[:, 0])
        close(B @ (B.T @ V), ggn @ V)


@pytest.mark.parametrize("name", FEW)
def test_factors_of_other_matrices(name: str) -> None:
    p = problem(name)
    drawn = MonteCarlo(samples=3, seed=7)
    B = factor_of(p, vectors=drawn)
    F = FisherMCLinearOperator(
        p.model, p.loss, p.params, p.data, check_deterministic=False, seed=7, mc_samples=3, **p.net.options
    )
    close(Product(B, B.T).to_dense(), F.to_dense())
    for per_term in (False, True):
        D = factor_of(p, vectors=Empirical(per_term=per_term)).to_dense()
        close(D @ D.T, p.exact.empirical_fisher(per_term))


def test_inner_shape_is_examples_terms_columns() -> None:
    p = problem("attention, ce")
    N, (R, C) = sum(b.N for b in p.exact.batches), p.exact.batches[0].terms.shape[1:]
    assert factor_of(p).in_shapes == ((N, R, C - 1),)
    assert factor_of(p, vectors=MonteCarlo(samples=5)).in_shapes == ((N, R, 5),)
    assert factor_of(p, vectors="empirical").in_shapes == ((N, 1, 1),)
    assert factor_of(p, vectors=Empirical(per_term=True)).in_shapes == ((N, R, 1),)
    uneven = problem("uneven sequences")
    columns = sum(b.terms[..., 1:].numel() for b in uneven.exact.batches)
    assert factor_of(uneven).in_shapes == ((columns,),)


def test_scale_follows_num_data() -> None:
    p = problem("mlp")
    D = factor_of(p, num_data=60).to_dense()
    close(D @ D.T, p.reference(num_data=60).ggn())


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    features=st.integers(1, 4),
    classes=st.integers(1, 4),
    columns=st.integers(1, 5),
    chunk_size=st.integers(1, 6) | st.none(),
    forward=st.booleans(),
)
def test_any_shape(
    sizes: list[int], features: int, classes: int, columns: int, chunk_size: int | None, forward: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 3), nn.Tanh(), nn.Linear(3, classes)).double()
    X = [torch.randn(n, features, dtype=torch.float64) for n in sizes]
    data = [(x, torch.zeros(len(x), classes, dtype=torch.float64)) for x in X]
    params = dict(model.named_parameters())
    J = JacobianLinearOperator(model, params, data, check_deterministic=False, chunk_size=chunk_size)
    J._linear.mode.right = None if forward else False  # None: found out
    theta = {key: p.detach() for key, p in params.items()}
    found = torch.func.jacrev(lambda t: torch.func.functional_call(model, t, (torch.cat(X),)).flatten())(theta)
    matrix = torch.cat([j.flatten(1) for j in found.values()], 1)
    V = torch.randn(matrix.shape[1], columns, dtype=torch.float64)
    U = torch.randn(matrix.shape[0], columns, dtype=torch.float64)
    close(J @ V, matrix @ V)
    close(J.T @ U, matrix.T @ U)
    assert J._linear.mode.right is forward


def test_forms_of_vectors() -> None:
    p = problem("mlp")
    named = dict(p.model.named_parameters())
    J = JacobianLinearOperator(p.model, named, p.data)
    matrix = dense(p)
    flat = normal(J.shape[1])
    tree = J.in_space.unflatten(flat)
    expected = matrix @ flat
    shape = J.out_shapes[0]
    as_dict = J @ tree
    assert isinstance(as_dict, dict)
    close(next(iter(as_dict.values())), expected.view(shape))
    (as_list,) = J @ list(tree.values())
    close(as_list, expected.view(shape))
    as_numpy = J @ flat.numpy()
    assert isinstance(as_numpy, np.ndarray)
    close(torch.from_numpy(as_numpy), expected)
    back = J.T @ [expected.view(shape)]
    close(torch.cat([t.flatten() for t in back]), matrix.T @ expected)
    close(torch.from_numpy(J.to_scipy() @ flat.numpy()), expected)
    close(torch.from_numpy(J.T.to_scipy() @ expected.numpy()), matrix.T @ expected)


def test_adjoints_belong_to_each_other() -> None:
    p = problem("mlp")
    J = jacobian_of(p)
    Jt = TransposedJacobianLinearOperator(p.model, p.params, p.data)
    assert type(J.T) is TransposedJacobianLinearOperator
    assert type(Jt.T) is JacobianLinearOperator
    assert type(J.T.T) is JacobianLinearOperator
    assert Jt.shape == J.shape[::-1]
    assert Jt.in_shapes == J.out_shapes
    close(Jt.to_dense(), dense(p).T)
    close(Jt.T.to_dense(), dense(p))
    v, u = normal(J.shape[1]), normal(J.shape[0])
    close((J @ v) @ u, v @ (Jt @ u))


def test_same_numbers_as_curvlinops() -> None:
    peer = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(1), nn.Linear(8, 6), nn.Unflatten(1, (2, 3)))
    model = model.double()
    data = [(torch.randn(n, 1, 4, 4, dtype=torch.float64), torch.zeros(n, 2, 3)) for n in (2, 3)]
    params = list(model.parameters())
    for name in ("JacobianLinearOperator", "TransposedJacobianLinearOperator"):
        ours, theirs = getattr(curvlinops_plus, name)(model, params, data), getattr(peer, name)(model, params, data)
        assert ours.shape == tuple(theirs.shape)
        V = normal(ours.shape[1], 2)
        close(ours @ V, theirs @ V)


def test_function_as_model() -> None:
    W = {"w": normal(3, 2), "b": normal(2)}
    data = [(normal(4, 3), torch.zeros(4, 2))]
    J = JacobianLinearOperator(lambda params, X: (X @ params["w"] + params["b"]).sin(), W, data)
    expected = torch.func.jacrev(lambda t: (data[0][0] @ t["w"] + t["b"]).sin().flatten())(W)
    close(J.to_dense(), torch.cat([expected["w"].flatten(1), expected["b"]], 1))


# ------------------------------------------------------------------------------------ forward mode, where it is right
@pytest.mark.parametrize("name", MIDDLES)
def test_forward_mode_only_where_it_is_right(name: str) -> None:
    torch.manual_seed(0)
    middle, right = MIDDLES[name]
    model = Net(middle).double()
    data = [(torch.randn(n, 3, dtype=torch.float64), torch.zeros(n, 2, dtype=torch.float64)) for n in (3, 2)]
    params = list(model.parameters())
    outputs = torch.cat([model(X) for X, _ in data]).flatten()
    rows = [
        torch.autograd.grad(f, params, retain_graph=True, allow_unused=True, materialize_grads=True) for f in outputs
    ]
    matrix = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    J = JacobianLinearOperator(model, params, data)
    V = normal(J.shape[1], 3)
    assert J._linear.mode.right is right
    close(J @ V, matrix @ V)
    close(J @ V[:, 0], matrix @ V[:, 0])
    close(J.to_dense(), matrix)
    close(
        J._linear.ggn_product(*_first(J, V), lambda F, _: lambda JV: [2 * JV[0]]), 2 * V.T @ matrix[:6].T @ matrix[:6]
    )
    close(
        J._linear.ggn_product(*_first(J, V[:, :1]), lambda F, _: lambda JV: JV),
        V[:, :1].T @ matrix[:6].T @ matrix[:6],
    )


def _first(J: JacobianLinearOperator, V: Tensor) -> tuple[Any, Tensor]:
    return next(J.risk.batches("first")), V.T


@pytest.mark.parametrize("first_batch_is_padded", [True, False])
def test_padding_has_no_derivative_in_either_mode(first_batch_is_padded: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, padding_idx=-5), nn.Flatten(), nn.Linear(4, 2)).double()
    tokens = [torch.tensor([[0, 1]]), torch.tensor([[2, 3], [1, 4]])]
    data = [(t, torch.zeros(len(t), 2)) for t in (tokens if first_batch_is_padded else tokens[::-1])]
    params = list(model.parameters())
    J = JacobianLinearOperator(model, params, data)
    V = normal(J.shape[1], 2)
    assert J._linear.mode.right
    matrix = J.to_dense()  # by backward passes
    assert not matrix[:, :2].any()
    close(J @ V, matrix @ V)
    close(J @ V[:, 0], matrix @ V[:, 0])


def test_operations_that_cannot_be_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("mlp")
    J = jacobian_of(p)
    V = normal(J.shape[1], 3)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Batching rule not implemented")

    with monkeypatch.context() as patched:
        patched.setattr(torch.func, "vmap", fail)
        found = J @ V
    close(found, dense(p) @ V)


def test_dropout_draws_the_same_for_value_and_derivative() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double().train()
    data = [(torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))]
    J = JacobianLinearOperator(model, list(model.parameters()), data, check_deterministic=False)
    linear, V = J._linear, normal(J.shape[1], 2)
    for columns in (V, V[:, :1]):
        batch, rows = _first(J, columns)
        torch.manual_seed(1)
        GV = linear.ggn_product(batch, rows, lambda F, _: lambda JV: JV)
        torch.manual_seed(1)
        f = model(data[0][0]).flatten()
        matrix = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(x, list(model.parameters()), retain_graph=True)])
                for x in f
            ]
        )
        close(GV, rows @ matrix.T @ matrix)


def test_no_warning_and_no_trace() -> None:
    p = problem("encoder layer")
    fast = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings(), unchanged(p.model, p.data):
        warnings.simplefilter("error")
        J = jacobian_of(p)
        _ = J @ normal(J.shape[1], 2)
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert not torch.is_inference_mode_enabled()


def test_inside_inference_mode_and_no_grad() -> None:
    p = problem("mlp")
    J, v = jacobian_of(p), normal(jacobian_of(p).shape[1])
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            close((J @ v).clone(), dense(p) @ v)
            close((J.T @ (J @ v)).clone(), dense(p).T @ dense(p) @ v)


def test_other_precisions() -> None:
    p = problem("mlp").to(torch.device("cpu"), torch.float32)
    J = jacobian_of(p)
    v = normal(J.shape[1]).float()
    assert J.dtype == (J @ v).dtype == torch.float32
    close((J @ v).double(), dense(problem("mlp")) @ v.double(), rtol=1e-4)
    half = problem("mlp").to(torch.device("cpu"), torch.bfloat16)
    H = JacobianLinearOperator(half.model, half.params, half.data)
    assert H.dtype == (H @ v).dtype == torch.float32
    close((H @ v).double(), dense(problem("mlp")) @ v.double(), rtol=0.1)


# ---------------------------------------------------------------------------------------------------------- messages
def _loader(shuffle: bool, **options: Any) -> DataLoader[Any]:
    X = normal(6, 3)
    return DataLoader(TensorDataset(X, torch.zeros(6, 2, dtype=torch.float64)), 2, shuffle=shuffle, **options)


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("make", [
    lambda model, data: JacobianLinearOperator(model, list(model.parameters()), data),
    lambda model, data: TransposedJacobianLinearOperator(model, list(model.parameters()), data),
    lambda model, data: GGNFactorLinearOperator(model, nn.MSELoss(), list(model.parameters()), data),
])  # fmt: skip
def test_shuffling_loader(make: Callable[[nn.Module, Any], Any]) -> None:
    model = _mlp()
    make(model, _loader(shuffle=False))
    with pytest.raises(RuntimeError, match=r"another order each time \(shuffle=True\?\)"):
        make(model, _loader(shuffle=True, generator=torch.Generator().manual_seed(0)))


def test_random_models_and_data_that_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(), nn.Linear(40, 2)).double()
    with pytest.raises(RuntimeError, match=r"training mode: '1' \(Dropout\); call model.eval"):
        JacobianLinearOperator(model, list(model.parameters()), _loader(shuffle=False))
    JacobianLinearOperator(model.eval(), list(model.parameters()), _loader(shuffle=False))

    class Changing:
        def __iter__(self) -> Any:
            return iter([(torch.rand(2, 3, dtype=torch.float64), torch.zeros(2, 2))])

    with pytest.raises(RuntimeError, match="random augmentation"):
        JacobianLinearOperator(model, list(model.parameters()), Changing())


def test_not_finite() -> None:
    model = _mlp()
    data = [(torch.full((2, 3), torch.nan, dtype=torch.float64), torch.zeros(2, 2))]
    with pytest.raises(NumericsError, match=r"NaN or infinite entries\. First seen: .*batch 0"):
        JacobianLinearOperator(model, list(model.parameters()), data)


def test_iterators() -> None:
    model = _mlp()
    with pytest.raises(ValueError, match="JacobianLinearOperator reads the data once per product"):
        JacobianLinearOperator(model, list(model.parameters()), iter(_loader(shuffle=False)))


def test_number_of_examples() -> None:
    model, data = _mlp(), list(_loader(shuffle=False))
    params = list(model.parameters())
    J = JacobianLinearOperator(model, params, data, num_data=6)
    close(J.to_dense(), JacobianLinearOperator(model, params, data).to_dense())
    for number, what in ((5, "more"), (7, "fewer")):
        J = JacobianLinearOperator(model, params, data, check_deterministic=False, num_data=number)
        with pytest.raises(ValueError, match=f"The data have {what} examples than JacobianLinearOperator"):
            _ = J @ normal(J.shape[1])


def test_outputs_that_cannot_be_stacked() -> None:
    p = problem("uneven sequences")
    with pytest.raises(ValueError, match="stacks outputs along their first axis"):
        jacobian_of(p)
    J = jacobian_of(p, output=lambda f: f.mean(2))
    assert J.out_shapes == ((sum(b.N for b in p.exact.batches), 3),)


def test_chunk_size() -> None:
    model = _mlp()
    with pytest.raises(ValueError, match="chunk_size=0 must be an integer of at least 1"):
        JacobianLinearOperator(model, list(model.parameters()), _loader(shuffle=False), chunk_size=0)


def test_outputs_of_several_losses() -> None:
    """One tensor of rows for each output; each of them differs in shape."""
    model, X = _mlp(), normal(5, 3)
    losses = {"a": nn.MSELoss(), "b": nn.CrossEntropyLoss()}

    def output(f: Tensor) -> dict[str, Tensor]:
        return {"a": f[:, :1], "b": f.sin()}

    data = [(x, {"a": normal(len(x), 1), "b": torch.zeros(len(x), dtype=torch.long)}) for x in X.split([2, 3])]
    J = Jacobian(EmpiricalRisk(model, losses, data, output=output), check_deterministic=True)
    assert {key: list(shape) for key, shape in J.out_space.shapes.items()} == {"a": [5, 1], "b": [5, 2]}
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


def test_losses_without_likelihood() -> None:
    model = _mlp()
    with pytest.raises(UnsupportedError, match="no likelihood is registered"):
        GGNFactorLinearOperator(model, nn.HuberLoss(), list(model.parameters()), _loader(shuffle=False))


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        # Not `nn.functional.embedding_bag`, which is replaced by operations that have all derivatives.
        return torch.embedding_bag(self.bag.weight, x.flatten(), torch.arange(0, x.numel(), x.shape[1]))[0]


def test_operations_without_second_derivative_are_named() -> None:
    data = [(torch.tensor([[0, 1], [2, 2]]), torch.zeros(2, 2, dtype=torch.float64))]
    model = _Bag()
    with pytest.raises(UnsupportedError, match=r"uses embedding_bag, which .* Forward mode was tried first"):
        JacobianLinearOperator(model, list(model.parameters()), data)
    # One backward pass is possible.
    Jt = TransposedJacobianLinearOperator(model, list(model.parameters()), data, check_deterministic=False)
    assert Jt.to_dense().shape == (10, 4)
    net = Net(lambda net, h: Once.apply(h)).double()  # type: ignore[arg-type]
    # PyTorch itself takes its derivative for zero, without a word.
    with pytest.raises(UnsupportedError, match=r"backward pass of Once is marked @once_differentiable"):
        JacobianLinearOperator(net, list(net.parameters()), _loader(shuffle=False))
    net = Net(clipped).double()
    with pytest.raises(UnsupportedError, match=r"is not linear in the gradient\. Forward mode was tried first"):
        JacobianLinearOperator(net, list(net.parameters()), _loader(shuffle=False))
    net = Net(lambda net, h: torch.cdist(h[:, None], h[:, None] + 1).flatten(1) * h).double()
    with refuses_cdist("uses cdist, which PyTorch can't differentiate twice. Write it"):
        JacobianLinearOperator(net, list(net.parameters()), _loader(shuffle=False))


class _Steps(nn.Module):
    """A linear map after a step along the gradient of a penalty, which forward takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 4).double())

    def forward(self, x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((self.w**4).sum(), self.w, create_graph=True)
        return nn.functional.linear(x, self.w - 0.05 * g)


def test_models_that_differentiate_their_parameters_in_forward() -> None:
    model, (X, y) = _Steps(), (torch.rand(5, 4).double(), torch.arange(5) % 3)
    J = torch.stack([torch.autograd.grad(f, model.w, retain_graph=True)[0].flatten() for f in model(X).flatten()])
    p = model(X).softmax(-1).detach()
    H = torch.block_diag(*(q.diag() - q.outer(q) for q in p)) / 5
    for columns in (torch.eye(12).double(), torch.arange(12).double() / 12):
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y)])
        close(Jacobian(risk) @ columns, J @ columns)
        close(GGN(risk) @ columns, J.T @ H @ J @ columns)
    close(GGN(risk).to_dense(), J.T @ H @ J)
    close(Jacobian(risk).to_dense(), J)


def test_errors_of_the_model_stay_what_they_are() -> None:
    def fails(net: nn.Module, h: Tensor) -> Tensor:
        raise KeyError("mine")

    net = Net(fails).double()
    with pytest.raises(KeyError, match="mine"):
        JacobianLinearOperator(net, list(net.parameters()), _loader(shuffle=False))
    for hooks in (net._forward_hooks, net._forward_pre_hooks):
        assert not hooks


def test_ggn_is_factor_squared_beside_the_operator() -> None:
    p = problem("strided cnn")
    B, G = factor_of(p), GGNLinearOperator(p.model, p.loss, p.params, p.data, **p.net.options)
    v = normal(G.shape[0])
    close((B.T @ v).square().sum(), v @ (G @ v))


class Toggled(nn.Module):
    """A part of it may lose its graph, which tangents don't notice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.stopped = nn.Linear(3, 4), nn.Linear(4, 2), False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.stopped):
            h = self.first(x).tanh()
        return self.second(h)


@pytest.mark.parametrize("columns", [1, 3])
def test_a_part_that_loses_its_graph_after_the_first_product(columns: int) -> None:
    torch.manual_seed(0)
    model = Toggled().double()
    J = Jacobian(EmpiricalRisk(model, nn.MSELoss(), [(torch.randn(5, 3).double(), torch.zeros(5, 2).double())]))
    V = torch.randn(J.shape[1], columns).double()
    before = J @ V
    model.stopped = True
    after = J @ V
    torch.testing.assert_close(after, J.T.to_dense().T @ V)
    assert not torch.allclose(before, after)
    model.stopped = False
    torch.testing.assert_close(J @ V, before)
