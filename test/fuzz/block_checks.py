"""Checks of block-diagonal approximations against the exact matrix and against their definitions."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from curvlinops_plus import (
    EKFAC,
    GGN,
    KFAC,
    TNT,
    CurvaturePropagation,
    DiagonalBlock,
    Exact,
    FullBlock,
    MonteCarlo,
    curvature,
)

from .checks import VECTORS, Subject, check
from .compare import holds, require
from .exact_checks import draw_vectors
from .kronecker import kfac_block
from .pieces import Options
from .truth import of_example


def draw_blocks(r: Random) -> Options:
    """Vectors, joint or separate, expand or reduce."""
    return {**draw_vectors(r), "separate": r.random() < 0.35, "reduce": r.random() < 0.35}


def options_of(o: Options) -> dict[str, Any]:
    return {"vectors": VECTORS[o["vectors"]], "separate_weight_and_bias": o["separate"]}


def approximation(kind: Any, o: Options) -> Any:
    return kind.using(kfac_approx="reduce") if o["reduce"] else kind


@check("exact blocks", lambda r: {**draw_blocks(r), "kind": r.choice(["full", "diagonal"])}, often=None)
def _exact_blocks(s: Subject, o: Options) -> None:
    expected = s.truth.only_blocks(s.truth.matrix(o["vectors"]), o["separate"])
    kind = FullBlock if o["kind"] == "full" else DiagonalBlock
    expected = expected if o["kind"] == "full" else expected.diagonal().diag()
    dense = s.curvature(kind, **options_of(o)).to_dense()
    s.equal(f"{kind.__name__} is the exact block ({o['vectors']})", dense, expected, scale=s.truth.size(o["vectors"]))


@check("EKFAC's trace", draw_blocks, often=None)
def _trace(s: Subject, o: Options) -> None:
    K = s.curvature(approximation(EKFAC, o), **options_of(o))
    expected = s.truth.matrix(o["vectors"]).trace()
    s.equal(f"trace of EKFAC ({o['vectors']})", K.trace, expected, scale=s.truth.size(o["vectors"]))


def block_of(s: Subject, dense: Tensor, at: Tensor) -> Tensor:
    return dense[at[:, None], at].double()


def plan_of(K: Any) -> dict[tuple[str, ...], str]:
    """The approximation of each block, by the keys of its parameters."""
    return {tuple(sorted(g.keys)): repr(entry.approximation) for entry in K.plan for g in entry.layer.groups}


@check("KFAC by definition", draw_blocks, 4)
def _kfac(s: Subject, o: Options) -> None:
    K = s.curvature(approximation(KFAC, o), **options_of(o))
    dense, planned = K.to_dense(), plan_of(K)
    for block in s.truth.blocks(o["separate"]):
        if not block.affine:
            continue
        got = block_of(s, dense, block.at)
        if planned[tuple(sorted(block.keys))] == "DiagonalBlock":  # seen by a module around the layer
            exact = block_of(s, s.truth.matrix(o["vectors"]), block.at)
            s.equal(f"diagonal of {block.keys}", got, exact.diagonal().diag())
            continue
        expected = kfac_block(s.truth, block, o["vectors"], o["reduce"])
        if expected is None:
            continue
        s.equal(f"KFAC block of {block.keys} ({block.affine})", got, expected)


@check("EKFAC by definition", draw_blocks, 3)
def _ekfac(s: Subject, o: Options) -> None:
    require(s.double)
    K = s.curvature(approximation(EKFAC, o), **options_of(o))
    names = {tuple(sorted(g.keys)): g.name for entry in K.plan for g in entry.layer.groups}
    exact = s.truth.matrix(o["vectors"])
    for block in s.truth.blocks(o["separate"]):
        E = block_of(s, exact, block.at)
        name = names.get(tuple(sorted(block.keys)))
        holds("blocks by module", name is not None, f"{block.keys} are no block: {list(names)}")
        assert name is not None
        got, of_block = block_of(s, K.to_dense(), block.at), K.blocks[name]
        basis = getattr(of_block, "basis", None)
        if basis is None:
            s.equal(f"diagonal of {block.keys}", got, E.diagonal().diag())
            continue
        columns = basis.to_dense()
        zeros = {other: torch.zeros_like(part) for other, part in K.split(s.normal(s.case.size)).items()}
        Q = torch.stack([K.merge({**zeros, name: q.view_as(zeros[name])}) for q in columns.T], 1)[block.at]
        s.equal(f"basis of {block.keys} is orthogonal", Q.T @ Q, torch.eye(len(Q)))
        s.equal(f"EKFAC block of {block.keys}", got, Q @ (Q.T @ E @ Q).diagonal().diag() @ Q.T)
        if not block.affine or (factored := kfac_block(s.truth, block, o["vectors"], o["reduce"])) is None:
            continue
        rotated = Q.T @ factored @ Q
        s.equal(f"eigenvectors of {block.keys}", rotated, rotated.diagonal().diag(), 10, float(factored.norm()))


RANDOM = {
    "mc": MonteCarlo(samples=2, seed=3),
    "signs": Exact(signs=True, seed=5),
    "propagation": CurvaturePropagation(samples=2, seed=7),
}


@check("random vectors", lambda r: {"vectors": r.choice([*RANDOM]), "reduce": r.random() < 0.3}, 1.5)
def _random_vectors(s: Subject, o: Options) -> None:
    """Draws follow the examples: neither the batches nor the operator matter."""
    vectors = RANDOM[o["vectors"]]
    full = s.curvature(FullBlock, vectors=vectors)
    s.equal("the same draws for EKFAC", s.curvature(approximation(EKFAC, o), vectors=vectors).trace, full.trace)
    diagonal = s.curvature(DiagonalBlock, vectors=vectors)
    s.equal("the same draws for DiagonalBlock", diagonal.diagonal(), full.diagonal())
    if all(len(e.terms[0]) == 1 for e in s.truth.examples) and not s.case.several:
        dense = GGN(s.risk(), vectors).to_dense()
        s.equal("the same draws for GGN", s.truth.only_blocks(dense.double(), False), full.to_dense())


def single(data: list[Any]) -> list[Any]:
    """The same examples, one at a time."""
    found = []
    for x, y in data:
        for n in range(len(x)):
            part = partial(of_example, n=n, N=len(x))
            one = {k: part(t) for k, t in y.items()} if isinstance(y, dict) else None
            one = one or (tuple(part(t) for t in y) if isinstance(y, tuple) else part(y))
            found.append((x[n : n + 1], one))
    return found


KINDS = {"KFAC": KFAC, "TNT": TNT, "full": FullBlock, "ekfac": EKFAC}


@check("batches don't matter", lambda r: {"kind": r.choice([*KINDS]), "mc": r.random() < 0.6}, 2)
def _batches(s: Subject, o: Options) -> None:
    kind = KINDS[o["kind"]]
    vectors = RANDOM["mc"] if o["mc"] else Exact()
    one = s.curvature(kind, vectors=vectors)
    other = curvature(s.risk(single(s.case.data)), kind, vectors=vectors)
    require(plan_of(one) == plan_of(other))  # all rows of one example are its own, also those of a table
    if kind is EKFAC:
        s.equal("one example at a time, trace of EKFAC", other.trace, one.trace)
    else:
        s.equal(f"one example at a time, {o['kind']}", other.to_dense(), one.to_dense(), 10)
