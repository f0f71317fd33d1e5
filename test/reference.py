"""A slow exact twin of everything that is computed cleverly elsewhere: definitions, autograd, and
plain loops.

Nothing of the package is imported here. A `Reference` is built from a model, the user's own loss
and data, and forms every matrix from the whole Jacobian and from the Hessian of the user's own loss
with respect to the model's output, so that every option of a loss is covered by PyTorch's reading
of it.

Letters: N examples, R loss terms of C numbers each, F = N·R·C numbers in a batch's output, P
parameters, V vectors, S positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from test.twin import Layer, Pass, Twin, Use, jacobian


@dataclass(eq=False, kw_only=True)
class Seen(Pass):
    """One batch."""

    y: Any  # targets
    f: Tensor  # the output in its own shape
    J: Tensor  # [F, P]
    g: Tensor  # [F], gradient of the summed loss
    H: Tensor  # [F, F], Hessian of the summed loss
    terms: Tensor  # [N, R, C], places in the flattened output
    divisor: float  # what "mean" divides by


Vectors = tuple[tuple[Seen, Tensor], ...]
"""For every batch what is backpropagated through it, [V, F]."""


class Reference(Twin):
    """Curvature matrices of `Σ loss` over a data set, by definition.

    Args:
        model: The model; it is copied.
        loss: The user's loss.
        data: Batches `(X, y)`, or mappings with "labels".
        params: Key to the model's own parameter, in the order of the vector.
        read: The model's output to the tensor that the loss reads.
        axis: Axis of that tensor which holds the C numbers of a term.
        to_loss: That tensor as the loss wants to have it.
        count: Number of examples of X.
        num_data: Replaces the number of examples in the scale of the loss.
        num_terms: Replaces the number of loss terms per example in it.
        mask: X, y to the positions [N, T] that count.
        example_axis: Module name to the axis of its examples.
        plain: Prepares the copy of the model.

    Matrices are computed once, since many laws ask for them: whoever changes one clones it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        data: Sequence[Any],
        params: Mapping[str, Tensor],
        read: Callable[[Any], Tensor] = lambda out: out,
        axis: int = -1,
        to_loss: Callable[[Tensor], Tensor] = lambda f: f,
        count: Callable[[Any], int] = len,
        num_data: int | None = None,
        num_terms: int | None = None,
        mask: Callable[[Any, Any], Tensor] | None = None,
        example_axis: Mapping[str, int] | None = None,
        plain: Callable[[nn.Module], object] = lambda model: None,
    ) -> None:
        super().__init__(model, params, example_axis, plain)
        self.read, self.axis, self.to_loss = read, axis, to_loss
        self.summed, self.mean = copy.deepcopy(loss), copy.deepcopy(loss)
        self.summed.reduction, self.mean.reduction = "sum", "mean"
        self.batches = [self._see(item, count, mask) for item in data]
        self.c = 1.0
        if loss.reduction == "mean":
            divisor = sum(b.divisor for b in self.batches)
            examples = sum(b.N for b in self.batches)
            terms = sum(b.N * b.terms.shape[1] for b in self.batches)
            per_example = terms / examples if num_terms is None else num_terms
            self.c = terms / ((examples if num_data is None else num_data) * per_example) / divisor

    # ------------------------------------------------------------------------------------ one batch
    def call(self, *args: Any, **kwargs: Any) -> Tensor:
        """Output, with its graph."""
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
            return self.read(self.model(*args, **kwargs))

    def _see(self, item: Any, count: Callable[[Any], int], mask: Any) -> Seen:
        if isinstance(item, Mapping):
            y = item["labels"]
            N = len(y)
            call = partial(self.call, **{k: v for k, v in item.items() if k != "labels"})
        else:
            X, y = item
            N = count(X)
            call = partial(self.call, X)
        output = call()
        J = jacobian(output, self.leaves)
        f = output.detach().requires_grad_()
        summed, mean = self.summed(self.to_loss(f), y), self.mean(self.to_loss(f), y)
        (g,) = torch.autograd.grad(summed, f, create_graph=True)
        total = float(summed.detach())
        divisor = total / float(mean.detach()) if total else 0.0
        places = torch.arange(f.numel(), device=f.device).view(f.shape)
        by_term = places if f.ndim == 1 else places.movedim(self.axis, -1)
        C = 1 if f.ndim == 1 else f.shape[self.axis]
        terms = by_term.reshape(N, -1, C)
        example = torch.empty(f.numel(), dtype=torch.long)
        example[terms.flatten().cpu()] = torch.arange(N).repeat_interleave(terms[0].numel())
        return Seen(
            run=lambda: call().flatten(),
            y=y,
            example=example,
            N=N,
            mask=None if mask is None else mask(item[0], y),
            f=f.detach(),
            J=J,
            g=g.detach().flatten(),
            H=jacobian(g, [f]),
            terms=terms,
            divisor=divisor,
        )

    # ------------------------------------------------------------------------------ matrices [P, P]
    @cache  # noqa: B019 (twins of the problems live as long as the tests)
    def ggn(self) -> Tensor:
        """`c Σ Jᵀ H J`."""
        return self.c * sum(b.J.T @ b.H @ b.J for b in self.batches)

    @cache  # noqa: B019
    def empirical_fisher(self, per_term: bool) -> Tensor:
        """`c Σ u uᵀ` over gradients `u` of examples, or of terms."""
        return self.c * sum(
            u.T @ u
            for u in (self.gradients(b, v).flatten(0, 1) for b, v in self.empirical(per_term))
        )

    @cache  # noqa: B019
    def hessian(self) -> Tensor:
        """Hessian of the whole loss."""
        params, result = self.leaves, 0.0
        for b in self.batches:
            total = self.summed(self.to_loss(b.run().view(b.f.shape)), b.y)
            grads = torch.autograd.grad(total, params, create_graph=True, materialize_grads=True)
            result = result + jacobian(torch.cat([g.flatten() for g in grads]), params)
        return self.c * result

    def gradient(self) -> Tensor:
        """Gradient of the whole loss."""
        return self.c * sum(b.J.T @ b.g for b in self.batches)

    # ------------------------------------------------------------------------------- vectors [V, F]
    @cache  # noqa: B019
    def exact(self) -> Vectors:
        """Columns of a root of every term's Hessian, one term of each example at a time."""
        result = []
        for b in self.batches:
            N, R, C = b.terms.shape
            v = torch.zeros(R, C, b.f.numel(), dtype=b.f.dtype, device=b.f.device)
            for n in range(N):
                for r in range(R):
                    at = b.terms[n, r]
                    values, Q = torch.linalg.eigh(b.H[at[:, None], at])
                    v[r][:, at] = (Q * values.clamp(min=0).sqrt()).T
            result.append((b, v.flatten(0, 1)))
        return tuple(result)

    @cache  # noqa: B019
    def empirical(self, per_term: bool) -> Vectors:
        """The loss's own gradient, of all terms together or of each."""
        result = []
        for b in self.batches:
            R = b.terms.shape[1]
            v = torch.zeros(R if per_term else 1, b.f.numel(), dtype=b.f.dtype, device=b.f.device)
            for r in range(R):
                at = b.terms[:, r].flatten()
                v[r if per_term else 0, at] = b.g[at]
            result.append((b, v))
        return tuple(result)

    def given(self, vectors: Sequence[Tensor]) -> Vectors:
        """Vectors [V, N, R, C] of the caller, one tensor per batch."""
        result = []
        for b, given in zip(self.batches, vectors, strict=True):
            v = torch.zeros(len(given), b.f.numel(), dtype=b.f.dtype, device=b.f.device)
            v[:, b.terms.flatten()] = given.flatten(1)
            result.append((b, v))
        return tuple(result)

    @cache  # noqa: B019
    def gradients(self, b: Seen, v: Tensor) -> Tensor:
        """Gradients [V, N, P] of each example by itself."""
        of_examples = []
        for n in range(b.N):
            at = b.terms[n].flatten()
            of_examples.append(v[:, at] @ b.J[at])
        return torch.stack(of_examples, 1)

    # --------------------------------------------------------------------------------------- blocks
    # -------------------------------------------------------------------------------------- factors
    @cache  # noqa: B019
    def factors(
        self,
        name: str,
        vectors: Vectors,
        reduce: bool = False,
        ones: bool = False,
        max_bytes: float = math.inf,
    ) -> tuple[Tensor, Tensor]:
        """`A` and `G` of a layer, one example, one position, one vector at a time.

        Those of a layer of several matrices are block-diagonal. Those of tied weights are the
        nearest Kronecker product to the sum over roles, where `A` is a mean of theirs with weights
        that add up to one.

        Args:
            name: The layer.
            vectors: What is backpropagated through each batch.
            reduce: Average inputs and sum gradients over positions first.
            ones: Append a column of ones to the inputs.
            max_bytes: Larger factors of each role are replaced by their diagonals.
        """
        layer = next(layer for layer in self.layers if layer.name == name and layer.roles)
        own, *others = layer.roles
        pairs = [self._role(own, vectors, reduce, ones)]
        # The other role multiplies with the transpose, so that its factors change places; it has no
        # column of ones.
        for role in others:
            rows, columns = self._role(role, vectors, reduce, False)
            pairs.append(
                (torch.block_diag(columns, columns.new_zeros(1, 1)) if ones else columns, rows)
            )
        pairs = [
            (self._kept(A, layer, max_bytes), self._kept(G, layer, max_bytes)) for A, G in pairs
        ]
        A, G = pairs[0]
        if not others:
            return A, G
        total = torch.stack([torch.outer(G.flatten(), A.flatten()) for A, G in pairs]).sum(0)
        u, s, vt = torch.linalg.svd(total, full_matrices=False)
        of_each = torch.stack([A.flatten() for A, _ in pairs], 1)
        weights = torch.linalg.lstsq(of_each, vt[0][:, None]).solution.sum()
        return (vt[0] / weights).view(A.shape), (u[:, 0] * s[0] * weights).view(G.shape)

    def _kept(self, factor: Tensor, layer: Layer, max_bytes: float) -> Tensor:
        """The factor if it is small enough, else its diagonal. Of several matrices all count."""
        own = layer.roles[0]
        count = max(use.slot + len(use.matrix) for use in own)
        return (
            factor
            if factor.numel() / count * factor.itemsize <= max_bytes
            else factor.diagonal().diag()
        )

    def _role(
        self, uses: list[Use], vectors: Vectors, reduce: bool, ones: bool
    ) -> tuple[Tensor, Tensor]:
        return self.factors_of(uses, [(b, self.c * v.T @ v) for b, v in vectors], reduce, ones)

    @cache  # noqa: B019
    def kfac(
        self,
        vectors: Vectors,
        reduce: bool = False,
        separate: bool = False,
        max_bytes: float = math.inf,
    ) -> Tensor:
        """`G ⊗ A` on every layer that has factors, the diagonal of the exact block on the others.
        [P, P]

        Factors that take more than `max_bytes` are replaced by their diagonals.
        """
        result = torch.diag(self.from_gradients(vectors).diagonal())
        for keys in self.blocks(separate):
            layer = self.layer_of(keys[0])
            if not layer.roles:
                continue
            if self.has_weight(keys):
                A, G = self.factors(layer.name, vectors, reduce, len(keys) > 1, max_bytes)
            else:
                G = self._kept(
                    self._role(layer.roles[0], vectors, reduce, False)[1], layer, max_bytes
                )
                A = torch.ones(1, 1, dtype=G.dtype)
            at = self.places(keys)
            result[at[:, None], at] = self.kronecker(keys, A, G)
        return result

    def from_gradients(self, vectors: Vectors) -> Tensor:
        """`c Σ u uᵀ` over the per-example gradients of all vectors, [P, P]."""
        return self.c * sum(
            u.T @ u for u in (self.gradients(b, v).flatten(0, 1) for b, v in vectors)
        )

    def corrected_eigenvalues(
        self, keys: Sequence[str], vectors: Vectors, QG: Tensor, QA: Tensor | None
    ) -> Tensor:
        """`Λ = c Σ (Q_Gᵀ U Q_A)²` of a layer's per-example gradients `U` [o, i] (i = 1 for a bias
        by itself).
        """
        rows, columns = self.matrix_places(keys)
        QA = torch.ones(1, 1, dtype=QG.dtype) if QA is None else QA
        total = torch.zeros(len(QG), len(QA), dtype=QG.dtype)
        for b, v in vectors:
            for u in self.gradients(b, v).flatten(0, 1)[:, self.places(keys)]:
                U = torch.zeros(len(QG), len(QA), dtype=QG.dtype)
                U[rows, columns] = u
                total += (QG.T @ U @ QA) ** 2
        return self.c * total
