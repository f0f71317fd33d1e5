"""Weights that several modules read: exact blocks with all cross terms, factors from every role."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import APPROXIMATIONS, Conv1D, Net, Problem, close, make, problem, unchanged
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops_plus import (
    EKFAC,
    KFAC,
    CurvatureWarning,
    DiagonalBlock,
    EmpiricalRisk,
    ForwardOnly,
    FullBlock,
    MonteCarlo,
    curvature,
)

TIED = ["tied", "tied transformer", "tied in one role", "tied autoencoder", "tied with two biases"]
WITH_FACTORS = TIED[:-1]
forms = [pytest.mark.parametrize("separate", [False, True]), pytest.mark.parametrize("reduce", [False, True])]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kind(name: str, reduce: bool) -> Any:
    return APPROXIMATIONS[name + (" reduce" if reduce else "")]


def untied(p: Problem, use: Callable[[nn.Module], nn.Module]) -> Problem:
    """The same function with parameters of its own in one of the places."""
    model = copy.deepcopy(p.model)
    module = use(model)
    for name, q in list(module._parameters.items()):
        if q is not None:
            setattr(module, name, nn.Parameter(q.detach().clone()))
    return Problem(replace(p.net, model=model), p.loss, p.data)


# ---------------------------------------------------------------------------------------------------- exact blocks


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("separate", [False, True])
def test_exact_blocks_have_the_cross_terms(name: str, separate: bool) -> None:
    """One block per tied weight, against one autograd call per output number of the user's model."""
    p = problem(name)
    params = list(p.keyed.values())
    total: Any = 0.0
    for (X, _), b in zip(p.data, p.exact.batches, strict=True):
        rows = [torch.autograd.grad(one, params, retain_graph=True) for one in p.model(X).flatten()]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        total = total + J.T @ b.H @ J
    exact = p.exact.only_blocks(p.exact.c * total, separate)
    close(p.curvature(FullBlock, separate_weight_and_bias=separate).to_dense(), exact, what="FullBlock")
    close(p.curvature(DiagonalBlock, separate_weight_and_bias=separate).diagonal(), exact.diagonal(), what="Diagonal")


def test_cross_terms_matter() -> None:
    """Adding up the squares of each use by itself is another matrix."""
    p = problem("tied")
    q = untied(p, lambda model: model.head)
    exact = p.curvature(DiagonalBlock).diagonal()[p.exact.places(["embedding.weight"])]
    apart = q.curvature(DiagonalBlock).diagonal()
    added = apart[q.exact.places(["embedding.weight"])] + apart[q.exact.places(["head.weight"])]
    assert (exact - added).norm() > 0.01 * exact.norm()


# --------------------------------------------------------------------------------------------------------- factors


def nearest(K: Tensor, o: int, i: int) -> Tensor:
    """The Kronecker product nearest to `K [o·i, o·i]`, by a singular value decomposition of all of it."""
    R = K.view(o, i, o, i).transpose(1, 2).reshape(o * o, i * i)
    u, s, vt = torch.linalg.svd(R)
    return torch.kron((s[0] * u[:, 0]).view(o, o), vt[0].view(i, i))


@pytest.mark.parametrize("reduce", [False, True])
def test_kfac_is_the_kronecker_product_nearest_to_the_sum_over_roles(reduce: bool) -> None:
    """Each role as if it had a weight of its own, added up as whole matrices."""
    p = problem("tied")
    q = untied(p, lambda model: model.head)
    apart, at = q.curvature(kind("KFAC", reduce)).to_dense(), q.exact.places
    embedding, head = (apart[at([f"{n}.weight"])][:, at([f"{n}.weight"])] for n in ("embedding", "head"))
    total = embedding + head  # both row-major on [vocabulary, features]
    block = p.curvature(kind("KFAC", reduce)).to_dense()
    mine = p.exact.places(["embedding.weight"])
    close(block[mine[:, None], mine], nearest(total, 5, 3))
    assert (block[mine[:, None], mine] - total).norm() > 1e-3 * total.norm(), "the sum is no Kronecker product"


@pytest.mark.parametrize("reduce", [False, True])
def test_kfac_of_a_transposed_weight_with_a_bias(reduce: bool) -> None:
    """The role without the bias has nothing in its column."""
    p = problem("tied autoencoder")
    p = Problem(replace(p.net, params=lambda model: list(model.parameters())), p.loss, p.data)
    q = untied(p, lambda model: model.down)
    risk = EmpiricalRisk(
        q.model, q.loss, q.data, [q.model.down.weight, q.model.up.weight, q.model.up.bias], **q.net.options
    )
    apart = curvature(risk, kind("KFAC", reduce)).to_dense()
    down, up, bias = slice(0, 8), slice(8, 16), slice(16, 20)  # [2, 4], [2, 4] (in, out), [4]
    total = torch.zeros(12, 12, dtype=torch.float64)  # on [4, 2 + 1], the matrix of `up`
    weight = torch.arange(12).view(4, 3)[:, :2]
    for part in (down, up):
        total[weight.T.flatten()[:, None], weight.T.flatten()] += apart[part, part]
    shift = torch.arange(12).view(4, 3)[:, 2]
    total[shift[:, None], shift] += apart[bias, bias]
    total[weight.T.flatten()[:, None], shift] += apart[up, bias]
    total[shift[:, None], weight.T.flatten()] += apart[bias, up]
    expected = nearest(total, 4, 3)
    order = torch.cat([weight.T.flatten(), shift])
    got = p.curvature(kind("KFAC", reduce)).to_dense()
    keys = [key for layer in p.exact.layers for key in layer.keys]
    at = p.exact.places(sorted(keys, key=lambda key: key.endswith("bias")))
    close(got[at[:, None], at], expected[order[:, None], order])


@pytest.mark.parametrize("name", TIED)
@forms[0]
@forms[1]
def test_ekfac_keeps_the_trace_and_is_never_worse(name: str, separate: bool, reduce: bool) -> None:
    p = problem(name)
    exact = p.exact.only_blocks(p.exact.ggn(), separate)
    E = p.curvature(kind("EKFAC", reduce), separate_weight_and_bias=separate).to_dense()
    K = p.curvature(kind("KFAC", reduce), separate_weight_and_bias=separate).to_dense()
    close(K, p.exact.kfac(p.exact.exact(), reduce, separate), what="KFAC")
    close(E.trace(), exact.trace(), what="trace")
    for keys in p.exact.blocks(separate):
        at = p.exact.places(keys)
        block, e, k = (m[at[:, None], at] for m in (exact, E, K))
        close(e.trace(), block.trace(), what=f"trace of {keys}")
        assert (e - block).norm() <= (k - block).norm() * (1 + 1e-9) + 1e-12, keys
        assert torch.linalg.eigvalsh(k).min() >= -1e-9 * k.norm(), f"KFAC of {keys} is not positive semi-definite"


@pytest.mark.parametrize("name", ["tied", "tied autoencoder"])
def test_two_roles_beat_the_diagonal(name: str) -> None:
    """What the diagonal fallback would leave out. No theorem, but so on these nets; a larger one is below."""
    p = problem(name)
    tied = next(layer for layer in p.exact.layers if len(layer.roles) > 1)
    at = p.exact.places(tied.keys)
    exact = p.exact.ggn()[at[:, None], at]
    E = p.curvature(EKFAC).to_dense()[at[:, None], at]
    error, of_diagonal = (E - exact).norm() / exact.norm(), (exact.diagonal().diag() - exact).norm() / exact.norm()
    assert error < of_diagonal, f"{float(error):.3f} of EKFAC, {float(of_diagonal):.3f} of the diagonal"


class TinyGPT(nn.Module):
    """Token and position embeddings, two blocks of attention and a small net each, the tokens' weight as head."""

    def __init__(self, vocabulary: int = 11, d: int = 4, length: int = 5) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln1": nn.LayerNorm(d),
                    "attend": Conv1D(3 * d, d),
                    "project": Conv1D(d, d),
                    "ln2": nn.LayerNorm(d),
                    "up": Conv1D(2 * d, d),
                    "down": Conv1D(d, 2 * d),
                }
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        h = self.tokens(x) + self.positions(torch.arange(T)[None])
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        for block in self.blocks:
            q, k, v = block["attend"](block["ln1"](h)).chunk(3, -1)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf).softmax(-1)
            h = h + block["project"](weights @ v)
            h = h + block["down"](nn.functional.gelu(block["up"](block["ln2"](h))))
        return self.head(self.norm(h)).movedim(-1, 1)


def test_a_tiny_gpt() -> None:
    """Exact diagonal, exact trace, and a block of the tied weight that is nearer than the diagonal."""
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = TinyGPT().double()
    with torch.no_grad():
        for p in model.parameters():  # as language models start, unlike nn.Embedding
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)
    torch.set_rng_state(torch_state)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(11, (6, 6), generator=generator)
    data = [(text[:4, :-1], text[:4, 1:]), (text[4:, :-1], text[4:, 1:])]
    loss = nn.CrossEntropyLoss()
    params = dict(model.named_parameters())
    risk = EmpiricalRisk(model, loss, data, params)
    rows, count = [], 6 * 5
    for X, _ in data:
        f = model(X)  # [N, C, T]
        p = f.detach().softmax(1).movedim(1, -1)  # [N, T, C]
        B = torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]
        for k in range(11):
            for t in range(5):
                v = torch.zeros_like(f)
                v[:, :, t] = B[:, t, :, k]
                for n in range(len(X)):
                    one = torch.zeros_like(f)
                    one[n] = v[n]
                    g = torch.autograd.grad(f, list(params.values()), one, retain_graph=True)
                    rows.append(torch.cat([t.flatten() for t in g]))
    J = torch.stack(rows) / count**0.5
    with unchanged(model, data), warnings.catch_warnings():
        warnings.simplefilter("ignore", CurvatureWarning)
        found = {k: curvature(risk, a) for k, a in (("D", DiagonalBlock), ("K", KFAC), ("E", EKFAC))}
        close(found["D"].diagonal(), J.square().sum(0))
        close(found["E"].trace, J.square().sum())
        block = {k: K.blocks["tokens"].to_dense() for k, K in found.items()}
    exact = J[:, :44].T @ J[:, :44]
    # Both blocks are row-major on the matrix of the head, [vocabulary, d]: the parameter's own order.
    error = {k: float((m - exact).norm() / exact.norm()) for k, m in block.items()}
    close(block["D"], exact.diagonal().diag())
    close(block["E"].trace(), exact.trace())
    assert error["E"] < error["K"] < error["D"], error
    assert error["E"] < 0.9 * error["D"], error


# ---------------------------------------------------------------------------------------------- one role, several uses


class Shared(nn.Module):
    """Three calls: of one module, or of modules that share weight and bias."""

    def __init__(self, modules: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.same = nn.ModuleList([self.first])
        for _ in range(2):
            other = nn.Linear(3, 3) if modules else self.first
            other.weight, other.bias = self.first.weight, self.first.bias
            self.same.append(other)

    def forward(self, x: Tensor) -> Tensor:  # [N, S, 3]
        h = torch.tanh(self.same[0](x))
        h = torch.tanh(self.same[1](h)).sum(1)
        return self.last(torch.tanh(self.same[2](h)))


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("separate", [False, True])
def test_modules_of_one_role_are_one_module_called_several_times(approximation: str, separate: bool) -> None:
    results = []
    for modules in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Shared(modules).double()
        with torch.no_grad():
            for q in model.parameters():
                q.copy_(numbers(*q.shape, seed=q.numel()))
        data = [(numbers(n, 2, 3, seed=n), torch.arange(n) % 2) for n in (4, 3)]
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
        K = curvature(risk, APPROXIMATIONS[approximation], separate_weight_and_bias=separate)
        results.append((K.trace, K.to_dense()))
    close(results[0][0], results[1][0], what="trace")
    close(results[0][1], results[1][1], 1e-7 if "EKFAC" in approximation else 1e-9)


def test_two_embeddings_with_one_table() -> None:
    """The same role twice, both sparse: the factor stays a diagonal."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target, self.head = nn.Embedding(5, 2), nn.Embedding(5, 2), nn.Linear(2, 3)
            self.target.weight = self.source.weight

        def forward(self, x: Tensor) -> Tensor:  # [N, 4]
            return self.head(torch.tanh(self.source(x[:, :3]).sum(1)) * self.target(x[:, 3:]).sum(1))

    p = make(lambda: Net(Pair(), [torch.randint(5, (n, 4)) for n in (4, 2)]), seed="pair")
    exact = p.exact.only_blocks(p.exact.ggn(), False)
    for reduce in (False, True):
        K = p.curvature(kind("KFAC", reduce))
        close(K.to_dense(), p.exact.kfac(p.exact.exact(), reduce))
        close(p.curvature(kind("EKFAC", reduce)).trace, exact.trace())
    close(p.curvature(FullBlock).to_dense(), exact)


def test_a_role_that_a_batch_does_not_reach() -> None:
    """The head is read by one batch only; the embedding by both."""

    class Now(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.other = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.embedding(x).sum(1))
            return self.head(h) if len(x) == 2 else self.other(h)

    p = make(lambda: Net(Now(), [torch.randint(4, (n, 2)) for n in (3, 2)]), seed="now")
    exact = p.exact.only_blocks(p.exact.ggn(), False)
    close(p.curvature(FullBlock).to_dense(), exact)
    close(p.curvature(KFAC).to_dense(), p.exact.kfac(p.exact.exact()))
    close(p.curvature(EKFAC).trace, exact.trace())


# -------------------------------------------------------------------------------------------------- subsets and states


@pytest.mark.parametrize("name", TIED)
def test_any_subset(name: str) -> None:
    """A bias alone, a weight alone: what is tracked decides who is tied to whom."""
    p = problem(name)
    for key, q in p.keyed.items():
        risk = EmpiricalRisk(p.model, p.loss, p.data, [q], **p.net.options)
        twin = Problem(replace(p.net, params=lambda model, k=key: {k: model.get_parameter(k)}), p.loss, p.data).exact
        exact = twin.ggn()
        with unchanged(p.model, p.data), warnings.catch_warnings():
            warnings.simplefilter("ignore", CurvatureWarning)
            close(curvature(risk, FullBlock).to_dense(), exact, what=f"FullBlock of {key}")
            close(curvature(risk, KFAC).to_dense(), twin.kfac(twin.exact()), what=f"KFAC of {key}")
            close(curvature(risk, EKFAC).trace, exact.trace(), what=f"EKFAC of {key}")


def test_a_bias_apart_leaves_no_factors_to_a_weight_of_two_roles() -> None:
    p = problem("tied autoencoder")
    risk = EmpiricalRisk(p.model, p.loss, p.data, list(p.model.parameters()))
    full = curvature(risk, FullBlock).to_dense()
    with pytest.warns(CurvatureWarning, match="1 of 1 layers"):
        K = curvature(risk, KFAC, separate_weight_and_bias=True)
    close(K.to_dense().diagonal(), full.diagonal())
    close(curvature(risk, EKFAC).trace, full.trace(), what="joint")


def test_two_biases_leave_no_factors_unless_only_the_weight_is_tracked() -> None:
    p = problem("tied with two biases")
    with pytest.warns(CurvatureWarning, match="1 of 1 layers"):
        curvature(p.risk(), KFAC)
    risk = EmpiricalRisk(p.model, p.loss, p.data, [p.model.one.weight])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        K = curvature(risk, KFAC)
    assert type(K.blocks["one"]).__name__ == "Kronecker"


@pytest.mark.parametrize("name", WITH_FACTORS)
def test_states_and_inverses(name: str) -> None:
    p = problem(name)
    for approximation in ("KFAC", "EKFAC", "FullBlock"):
        for separate in (False, True):
            K = p.curvature(APPROXIMATIONS[approximation], separate_weight_and_bias=separate)
            dense = K.to_dense()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CurvatureWarning)
                other = curvature(p.risk(), APPROXIMATIONS[approximation], separate_weight_and_bias=separate)
            other.load_state_dict(K.state_dict())
            close(other.to_dense(), dense, 1e-13)
            damped = dense + 0.3 * torch.eye(len(dense), dtype=torch.float64)
            close(K.inverse(damping=0.3).to_dense(), torch.linalg.inv(damped), 1e-8)
            close(K.inverse(damping=0.3).logdet, -torch.linalg.slogdet(damped).logabsdet, 1e-8)


def test_draws_and_forward_only() -> None:
    """Random vectors: EKFAC's trace is the full block's for the same draws. Forward only: something, and no NaN."""
    for name in WITH_FACTORS:
        p = problem(name)
        draws = MonteCarlo(samples=3, seed=2)
        close(p.curvature(EKFAC, vectors=draws).trace, p.curvature(FullBlock, vectors=draws).trace, what=name)
        only = {nn.LayerNorm: DiagonalBlock} if p.net.fallback else {}
        if not only:
            K = p.curvature(KFAC, vectors=ForwardOnly())
            assert K.to_dense().isfinite().all()
            assert torch.linalg.eigvalsh(K.to_dense()).min() > -1e-9


def test_a_product_with_a_table_outside_of_any_module_is_one_more_use() -> None:
    """A matrix product with the table, without a module, is what a tied head is."""

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.by_module = True

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(self.embedding(x)).sum(1)
            return self.head(h) if self.by_module else h @ self.embedding.weight.T

    model = Loose().double()
    data = [(torch.tensor([[1, 2], [3, 4], [0, 2]]), torch.tensor([0, 1, 4]))]
    for approximation in (KFAC, EKFAC, FullBlock, DiagonalBlock):
        model.by_module = True
        expected = curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation).to_dense()
        model.by_module = False
        close(curvature(EmpiricalRisk(model, nn.CrossEntropyLoss(), data), approximation).to_dense(), expected)


def test_the_twin_s_tied_jacobian_is_a_function_of_one_weight() -> None:
    """Finite differences in the shared weight: both places move at once."""
    p = problem("tied")
    X, _ = p.data[0]
    W = p.model.embedding.weight.detach()
    column = numbers(*W.shape, seed=4)

    def at(step: float) -> Tensor:
        both = dict.fromkeys(("embedding.weight", "head.weight"), W + step * column)
        with torch.no_grad():
            return functional_call(p.model, both, (X,), tie_weights=False)

    difference = (at(1e-5) - at(-1e-5)).flatten() / 2e-5
    J = p.exact.batches[0].J[:, p.exact.places(["embedding.weight"])]
    close(J @ column.flatten(), difference, 1e-7)
