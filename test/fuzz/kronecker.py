"""Kronecker factors by definition: rows of inputs and gradients of one example at a time, outer
products, sums.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from test.fuzz.modules import Conv1D
from test.fuzz.truth import TRANSPOSED, Block, Truth


def matrix_of(truth: Truth, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Matrix, row and column of every number of the block's parameters; a bias is the last
    column.
    """
    module = truth.model.get_submodule(block.affine[0])
    weight = module._parameters["weight"]
    assert weight is not None
    m, r, c, width = _places(module, weight)
    ids = {id(p): local for local, p in module._parameters.items()}
    found, rows = [], int(r.max()) + 1
    for key in block.keys:
        at = torch.arange(truth.params[key].numel())
        bias = (at // rows, at % rows, torch.full_like(at, width))
        found.append((m, r, c) if ids[id(truth.params[key])] == "weight" else bias)
    m, r, c = (torch.cat(parts) for parts in zip(*found, strict=True))
    return m, r, c


def _places(module: nn.Module, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Matrix, row and column of every number of a weight, and the number of columns."""
    places = torch.arange(weight.numel()).view(weight.shape)
    if isinstance(module, (nn.Embedding, Conv1D)):
        table = places.T[None]
    elif isinstance(module, TRANSPOSED):
        table = places.unflatten(0, (module.groups, -1)).movedim(2, 1).flatten(2)
    elif isinstance(module, nn.Linear):
        table = places.flatten(1)[None]
    else:
        table = places.flatten(1).unflatten(0, (module.groups, -1))  # type: ignore[arg-type]
    m, r, c = (torch.empty(weight.numel(), dtype=torch.long) for _ in range(3))
    grid = torch.meshgrid(*(torch.arange(n) for n in table.shape), indexing="ij")
    for target, index in zip((m, r, c), grid, strict=True):
        target[table] = index
    return m, r, c, table.shape[2]


def rows_of(truth: Truth, path: str) -> list[tuple[Tensor, ...]]:
    """What a layer's calls multiply in every example, for each of its matrices: inputs [m, S, i],
    and derivatives of all outputs of the network by the products [m, S, F, o]."""
    module = truth.model.get_submodule(path)
    found = []
    for x, _ in truth.case.data:
        for n in range(len(x)):
            calls: list[tuple[tuple[Tensor, ...], Tensor]] = []
            with truth.hooked(path, lambda args, out: calls.append((args, out))):  # noqa: B023
                outputs = truth.case.outputs(truth.model(truth._wide(x[n : n + 1])))
            numbers = [f for o in outputs for f in o.flatten()]
            grads = [
                torch.autograd.grad(f, [c[1] for c in calls], retain_graph=True, allow_unused=True)
                if f.requires_grad
                else [None] * len(calls)
                for f in numbers
            ]
            parts = []
            for k, (args, out) in enumerate(calls):
                of_call = [torch.zeros_like(out) if g[k] is None else g[k] for g in grads]
                parts.append(_rows_of_call(module, args, torch.stack(of_call)))
            if parts:
                found.append(tuple(torch.cat(part, 1) for part in zip(*parts, strict=True)))
    return found


def _rows_of_call(module: nn.Module, args: tuple[Tensor, ...], D: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [m, S, i] and derivatives [m, S, F, o] of one call; the derivatives `D` are by its
    output.
    """
    x = args[0].detach()
    F = len(D)
    if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
        d = D.reshape(F, -1, D.shape[-1]).movedim(0, 1)[None]
        if isinstance(module, nn.Embedding):
            a = nn.functional.one_hot(x.flatten(), module.num_embeddings).double()
            if module.padding_idx is not None:
                kept = x.flatten() != module.padding_idx
                a, d = a[kept], d[:, kept]
            return a[None], d
        return x.reshape(1, -1, x.shape[-1]), d
    layer = copy.deepcopy(module)
    weight = layer.weight.requires_grad_()  # type: ignore[union-attr, operator]
    out = layer(x)  # [1, O, *positions]
    m, r, c, width = _places(module, weight)  # type: ignore[arg-type]
    groups, o = int(m.max()) + 1, int(r.max()) + 1
    a = torch.zeros(groups, out[0, 0].numel(), width, dtype=torch.float64)
    for g in range(groups):
        at = (m == g) & (r == 0)
        for s, number in enumerate(out[0, g * o].flatten()):
            row = torch.autograd.grad(number, weight, retain_graph=True)[0].flatten()  # type: ignore[arg-type]
            a[g, s, c[at]] = row[at]
    return a, D.reshape(F, groups, o, -1).permute(1, 3, 0, 2)


def kfac_block(truth: Truth, block: Block, vectors: str, reduce: bool) -> Tensor | None:
    """The block `G ⊗ A` in the order of the block's parameters; None if the layer sees nothing."""
    m, r, c = matrix_of(truth, block)
    module = truth.model.get_submodule(block.affine[0])
    weight = module._parameters["weight"]
    assert weight is not None
    with_bias = len(block.keys) > 1
    of_modules = zip(*(rows_of(truth, path) for path in block.affine), strict=True)
    rows = [[torch.cat(part, 1) for part in zip(*same, strict=True)] for same in of_modules]
    A, G, count = 0.0, 0.0, 0
    for e, (a, D) in zip(truth.examples, rows, strict=True):
        if with_bias:
            a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        if reduce and a.shape[1]:
            a, D = a.mean(1, keepdim=True), D.sum(1, keepdim=True)
        M = truth.inner(e, vectors)
        count += a.shape[1]
        A = A + a.mT @ a
        G = G + torch.einsum("msfo,fg,msgp->mop", D, M, D)
    if not count:
        return None
    A = A / count
    assert isinstance(A, Tensor)
    assert isinstance(G, Tensor)
    if isinstance(module, nn.Embedding):
        A = torch.diag_embed(A.diagonal(dim1=1, dim2=2))
    if not any(truth.params[key] is weight for key in block.keys):
        A, c = torch.ones(len(A), 1, 1, dtype=torch.float64), torch.zeros_like(c)
    same = m[:, None] == m
    return same * G[m[:, None], r[:, None], r] * A[m[:, None], c[:, None], c]
