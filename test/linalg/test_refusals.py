"""What operators of matrices refuse, and in which words: a line for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from curvlinops_plus.errors import NoClosedForm, NumericsError, SingularMatrixError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    CGInverseLinearOperator,
    Dense,
    Diagonal,
    Eigendecomposed,
    HeuristicDamping,
    IdentityLinearOperator,
    Kronecker,
    Layout,
    Space,
    Structure,
    SubmatrixLinearOperator,
    Sum,
    cg,
    from_scipy,
    minres,
    neumann,
)
from test.helpers import Refusal, refusals
from test.linalg.cases import F64, OnlyProducts, block_diagonal, normal, psd
from test.linalg.test_operator import Triangle

PSD, GENERAL = Structure.PSD, Structure.GENERAL
EYE = Dense(torch.eye(2), PSD)
EYE3 = Dense(torch.eye(3), PSD)
EYE12 = Kronecker(torch.eye(3), torch.eye(4))
NAN3 = torch.full((3, 3), torch.nan)
ONES = torch.ones(3)
WIDE = Dense(torch.zeros(2, 3))
SQUARE = Space.from_shapes([(2, 2)])
PARTS = Space.from_shapes([(2,), (1,)])
A9 = OnlyProducts(psd(9, 9), Space.from_shapes({"a": (2, 2), "b": (3,), "c": (2,)}))
SPACE = Space.from_shapes({"w": (2, 2), "b": (2,)})
LAYOUTS = {
    "w": Layout({"w": "o i -> o i"}, {"w": (2, 2)}),
    "b": Layout({"b": "o -> o 1"}, {"b": (2,)}),
}
BLOCKS = {"w": Dense(torch.eye(4), PSD), "b": Diagonal(torch.ones(2))}


def read(space: Space, X: Any) -> Any:
    return space.read(X, torch.float32, torch.device("cpu"))


def layout(pattern: str, *shape: int) -> Layout:
    return Layout({"w": pattern}, {"w": shape}, {"g": 4} if "g" in pattern else None)


def blocks(**changes: Any) -> BlockDiagonal:
    K, _ = block_diagonal()
    return BlockDiagonal(K.blocks | changes, K.layouts, K.space)


def with_scale(M: Tensor) -> BlockDiagonal:
    return blocks(scale=Dense(M.to(F64), PSD))


REFUSED: list[Refusal] = [
    # operators
    (lambda: EYE3 + Dense(torch.eye(2)),
     ValueError, r"The spaces of Dense\(\[\[3\]\] x \[\[3\]\]\) \+ Dense\(\[\[2"),
    (lambda: EYE3 + Dense(torch.eye(3, dtype=F64)),
     TypeError, "on one device, got torch.float32 on cpu and torch.float6"),
    (lambda: torch.ones(3) * EYE3,
     TypeError, r"the factor of a Dense to be one number.*got Tensor \[3\]"),
    (lambda: EYE3 * EYE3,
     TypeError, r"got Dense \[3, 3\].*; the product of two matrices is A @ B"),
    (lambda: EYE3 / "2", TypeError, "the divisor of a Dense to be one number"),
    (lambda: EYE3 / torch.tensor(0.0),
     ZeroDivisionError, r"Dense\(3 x 3, .*\) can't be divided by 0"),
    (lambda: EYE3 + 1, TypeError,
     r"int can't be added to Dense.* Add c times the identity by A.shift\(c\), a matrix "),
    (lambda: torch.ones(3, 3) + EYE3,
     TypeError, r"Tensor can't be added to Dense.*by A \+ curvlinops_plus.linalg.Dense\(M\)"),
    (lambda: EYE3 + "A", TypeError, r"unsupported operand type\(s\)"),
    (lambda: np.asarray(EYE3),
     TypeError, r"Dense.* is not an array. For its entries write A.to_dense\(\).cpu\(\).numpy"),
    (lambda: EYE3 @ torch.ones(3, dtype=torch.long),
     TypeError, r"got torch.int64; convert it, X.to\(torch.float32\)"),
    (lambda: EYE3.sample(3),
     TypeError, r"is the int 3; expected a torch.Generator; for a seed write .*manual_seed.* draws num="),
    (lambda: EYE3.quadratic_form(None), TypeError, r"Expected a tensor .*; got NoneType"),
    (lambda: EYE3.quadratic_form(torch.tensor(1.0)),
     ValueError, r"J of shape \[3\] or \[..., m, 3\], got \[\]"),
    (lambda: EYE3[:, [0]].quadratic_form(torch.ones(1)),
     ValueError, "Only a square matrix has quadratic forms, got"),
    (lambda: Sum(EYE3, EYE3).logdet,
     NoClosedForm, r"Sum\(3 x 3.*form of `logdet`: .*A.materialize\(\).logdet.*Lanczos"),
    (lambda: (EYE3 @ EYE3).inverse(0.1), NoClosedForm, "Product.*CGInverseLinearOperator"),
    (lambda: Space.from_shapes((2, 3)), TypeError, r"mapping of shapes such as .*, got \(2, 3\)"),
    (lambda: (EYE3 + EYE3 @ EYE3).to_scipy() @ np.ones(3, dtype=complex),
     TypeError, "real numbers, got dtype complex128"),
    (lambda: Triangle().T @ torch.ones(3, dtype=F64),
     NotImplementedError, r"has no adjoint: .*define `_rmatmat\(self"),
    (lambda: Triangle().to(torch.float32),
     NotImplementedError, "Triangle owns no tensors that could be moved"),
    (lambda: WIDE @ torch.zeros(2),
     ValueError, r"Dense\(2 x 3, GENERAL, .*\) @ X: Expected shape \[3\]"),
    (lambda: [torch.zeros(4, 5)] @ WIDE,
     ValueError, r'"0": expected shape \[2\] before axes .* got \[5, 4'),
    (lambda: 3 @ WIDE, TypeError, "Expected a tensor or NumPy array .* got int"),
    (lambda: [1, 2] @ WIDE, ValueError, "Expected 1 tensors of shapes .* got 2"),
    (lambda: [np.zeros((4, 2))] @ WIDE, TypeError, "expected a tensor of shape .* got ndarray"),
    (lambda: read(SQUARE, torch.zeros(4, 1, 1)),
     ValueError, r"Expected shape \[4\] or \[4, K\], got \[4, 1, 1\]"),
    (lambda: read(SQUARE, "vector"), TypeError, "Expected a tensor or NumPy array .* got str"),
    (lambda: read(SQUARE, [1.0, 2.0]),
     ValueError, r"Expected 1 tensors of shapes \[\[2, 2\]\], got 2"),
    (lambda: read(SQUARE, [4.0]),
     TypeError, r'Entry "0": expected a tensor of shape \[2, 2\], got float'),
    (lambda: read(SQUARE, [torch.zeros(4)]),
     ValueError, r'"0": expected shape \[2, 2\] before .* got \[4\]'),
    (lambda: read(SQUARE, {"w": torch.zeros(2, 2)}),
     ValueError, r"named \['0'\]; missing \['0'\], unexpected \['w'\]"),
    (lambda: read(PARTS, [torch.zeros(2, 3), torch.zeros(1)]),
     ValueError, "the same in every tensor"),
    (lambda: read(SQUARE, [torch.zeros(2, 2, dtype=F64)]),
     TypeError, 'Expected tensor "0" in torch.float32'),
    (lambda: read(SQUARE, torch.zeros(4, device="meta")),
     TypeError, "on cpu, where the operator is, got meta"),
    (lambda: PARTS.flatten([torch.zeros(2), torch.zeros(3)]),
     ValueError, r'"1": expected shape \[1\] before axes'),
    (lambda: PARTS.flatten_rows([torch.zeros(5, 2), torch.zeros(4, 1)]),
     ValueError, "behind axes that are the same"),
    # matrices that hold their entries, and dampings
    (lambda: Dense(torch.zeros(2, 3), PSD),
     ValueError, r"expected a PSD matrix to be square, got \[2, 3\]"),
    (lambda: Dense(torch.zeros(3)),
     ValueError, r"expected a real tensor with 2 axes, or 3 for a batch; got .*\[3\]"),
    (lambda: Dense(normal(3, 5), in_space=SPACE),
     ValueError, r"spaces of 3 rows and 5 columns, got .*w: \[2, 2\]"),
    (lambda: Diagonal(torch.zeros(2, dtype=torch.int64)),
     ValueError, "Diagonal: expected a real .* torch.int64"),
    (lambda: Dense(torch.zeros(2, 3)).trace, ValueError, "Only a square matrix has a trace"),
    (lambda: Dense(torch.eye(2)).eigenvalues(),
     NoClosedForm, "closed form of `eigenvalues`: .* A.to_dense.*eigsh"),
    (lambda: Dense(torch.eye(2)).power(0.5),
     ValueError, "Expected a positive semi-definite matrix, got .*real powers"),
    (lambda: Dense(torch.eye(2)).sample(), ValueError, "only those are covariances"),
    (lambda: Kronecker(torch.zeros(2, 2, 2), torch.zeros(3, 2, 2)),
     ValueError, "batches, got G with 2 and A with 3"),
    (lambda: Kronecker(NAN3, torch.eye(2)).logdet, NumericsError, "NaN or infinite"),
    (lambda: Kronecker(torch.eye(2), torch.eye(2), GENERAL).inverse(0.1),
     NoClosedForm, "Kronecker.*form of `inverse`"),
    (lambda: Eigendecomposed(EYE, torch.ones(3)),
     ValueError, r"values \[n\], got \[2, 2\] and \[3\]"),
    (lambda: Dense(torch.zeros(2, 2), Structure.SYMMETRIC).inverse(),
     SingularMatrixError, "singular or not finite"),
    (lambda: (0 * IdentityLinearOperator([(2,)])).inverse(),
     SingularMatrixError, "is singular: 1 of its 1"),
    (lambda: EYE12.inverse(HeuristicDamping((0.1, 0.1))),
     TypeError, "to be one number.* got tuple"),
    (lambda: EYE12.power(0.5, HeuristicDamping(0.1)),
     TypeError, r"to be one number.* Pairs of dampings"),
    (lambda: EYE12.inverse(-0.1), ValueError, "semi-definite matrix to be at least 0, got -0.1"),
    (lambda: EYE12.inverse((0.1, -0.1)), ValueError, "damping .* to be at least 0, got -0.1"),
    (lambda: EYE12.inverse("large"),
     TypeError, "one number, a 0-d tensor or a rule; got str 'large'"),
    (lambda: EYE12.shift([1.0]), TypeError, "the shift of a Kronecker to be one number"),
    (lambda: EYE.shift(-0.5).inverse(),
     ValueError, "semi-definite matrix to be at least 0, got -0.5"),
    (lambda: blocks().inverse(torch.ones(3)),
     ValueError, r"one per block, \[4\], got a damping of shape \[3\]"),
    (lambda: blocks().inverse({"fc": 1.0, "f": 2.0}),
     ValueError, r"each of the blocks .* got some for \['fc', 'f'\]"),
    (lambda: blocks().inverse((0.1, 0.1)), TypeError, 'block "scale": .* got tuple'),
    (lambda: with_scale(torch.zeros(3, 3)).inverse(),
     SingularMatrixError, r'block "scale": Dense.* singular: 3 of'),
    (lambda: with_scale(NAN3).logdet,
     NumericsError, r'block "scale": the matrix .* 9 entries that are NaN'),
    # layouts and blocks
    (lambda: layout("o i -> o i -> o", 2, 3),
     ValueError, 'Pattern "o i -> o i -> o" of parameter "w" with shape'),
    (lambda: layout("o i k -> o (i k)", 2, 3),
     ValueError, r"shape \[2, 3\]: (?s:.*)expected 4 dims"),
    (lambda: layout("o i -> (o i)", 2, 3),
     ValueError, '"rows cols" or "batch rows cols" on the right'),
    (lambda: layout("o i -> o j", 2, 3), ValueError, "Identifiers only on one side"),
    (lambda: layout("(a b) -> a b", 6), ValueError, "Could not infer sizes"),
    (lambda: layout("(g b) -> g b", 6), ValueError, "can't divide axis of length 6 in chunks of 4"),
    (lambda: Layout({"w": "o i -> o i"}, {"b": (2,)}),
     ValueError, r"one pattern and one shape per parameter, got pat"),
    (lambda: Layout({"w": "o i -> o i", "b": "o -> o 1"}, {"w": (2, 3), "b": (3,)}),
     ValueError, "same rows, got matrices"),
    (lambda: BlockDiagonal(BLOCKS, {"w": LAYOUTS["w"]}, SPACE),
     ValueError, r"one layout per block .* blocks \['w', 'b'\] and lay"),
    (lambda: BlockDiagonal({}, {}, SPACE), ValueError, "at least one block"),
    (lambda: BlockDiagonal(BLOCKS, LAYOUTS, Space({"w": (2, 2)})),
     ValueError, r"parameters Space\(w: .*\) in one layout, got "),
    (lambda: BlockDiagonal(BLOCKS, LAYOUTS, Space({"w": (4, 1), "b": (2,)})),
     ValueError, r"parameters Space\(w: \[4, 1\]"),
    (lambda: BlockDiagonal(BLOCKS | {"b": Diagonal(torch.ones(3))}, LAYOUTS, SPACE),
     ValueError, r'"b": expected a 2 x 2 matrix f'),
    (lambda: BlockDiagonal(BLOCKS | {"b": Diagonal(normal(2))}, LAYOUTS, SPACE),
     ValueError, '"b": .* in torch.float32 on cpu'),
    # rows and columns
    (lambda: A9[[0, 9], [0]],
     ValueError, r"Expected rows as different integers between 0 and 8, .*; got \[0, 9\]"),
    (lambda: A9[[0], [-1, 3]], ValueError, "columns as different integers between 0 and 8"),
    (lambda: A9[[0, 1, 0], [0]], ValueError, "rows as different integers"),
    (lambda: A9[[0], [1.0]], ValueError, "a mask of 9 entries, a slice, or names of .*'a', 'b'"),
    (lambda: A9[3, [0]], ValueError, "rows as different integers.*; got 3"),
    (lambda: A9[[True], [0]], ValueError, "a mask of 9 entries"),
    (lambda: A9[["a", "d"], [0]],
     ValueError, r"names of rows out of \['a', 'b', 'c'\], got \['a', 'd'\]"),
    (lambda: A9["a", ["b", "b"]], ValueError, "Expected different names of columns"),
    (lambda: A9["a"],
     ValueError, r"Expected A\[rows, cols\], with : for all rows or columns; got A\['a'\]"),
    (lambda: list(A9), ValueError, r"got A\[0\]"),
    (lambda: SubmatrixLinearOperator(A9, [0, 1], [1, 0]).trace,
     NoClosedForm, r"2 x 2.* no closed form of `diagonal`"),
    # solvers
    (lambda: cg(torch.eye(3), ONES), TypeError, r"got Tensor; wrap it: curvlinops_plus.linalg.Dense\(A\)"),
    (lambda: cg(EYE3, torch.ones(4)), ValueError, r"Expected shape \[3\]"),
    (lambda: cg(EYE3, torch.ones(3, dtype=F64)), TypeError, "got torch.float64"),
    (lambda: cg(Dense(normal(3, 2)), normal(3)),
     ValueError, "Expected a square matrix, got Dense.*use LSMR"),
    (lambda: CGInverseLinearOperator(Dense(normal(3, 2))),
     ValueError, "a square matrix, got Dense.*use LSMR"),
    (lambda: CGInverseLinearOperator(torch.eye(3)),
     TypeError, "Expected a LinearOperator, got Tensor; wrap it"),
    (lambda: minres(EYE3, ONES, preconditioner=Dense(-torch.eye(3))),
     ValueError, "indefinite preconditioner"),
    (lambda: neumann(EYE3, ONES, num_terms=10_000, scale=10.0),
     ValueError, r"overflowed at term \d+ of 10001: it div"),
    # SciPy
    (lambda: from_scipy(torch.eye(2)), TypeError, "got a Tensor"),
    (lambda: from_scipy(EYE), TypeError, "got a Dense"),
    (lambda: from_scipy(np.eye(2) * 1j), TypeError, "real numbers, got dtype complex128"),
    (lambda: from_scipy(normal(4, 6).numpy(), structure=PSD),
     ValueError, r"expected a PSD matrix to be square, got \[4, 6\]"),
    (lambda: sla.eigsh(EYE, k=1), TypeError, r"torch\.float32|not an array"),
]  # fmt: skip
test_refusals = refusals(REFUSED)
