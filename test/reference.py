"""Slow exact twins of everything that is computed cleverly elsewhere: definitions, `torch.func` and plain loops.

Nothing of the package is imported here. A `Reference` is built from a model, the user's own loss and data, and forms
every matrix from the whole Jacobian and from the Hessian of the user's own loss with respect to the model's output, so
that every option of a loss is covered by PyTorch's reading of it.

Letters: N examples, R loss terms of C numbers each, F = N·R·C numbers in a batch's output, P parameters, V vectors,
S positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(eq=False)
class Seen:
    """One batch."""

    X: Any
    N: int
    f: Tensor  # the output in its own shape
    J: Tensor  # [F, P]
    g: Tensor  # [F], gradient of the summed loss
    H: Tensor  # [F, F], Hessian of the summed loss
    terms: Tensor  # [N, R, C], places in the flattened output
    divisor: float  # what "mean" divides by
    mask: Tensor | None  # [N, T]


Vectors = tuple[tuple[Seen, Tensor], ...]
"""For every batch what is sent back through it, [V, F]."""


class Reference:
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
    ) -> None:
        own = {id(p): name for name, p in model.named_parameters()}
        self.names = {key: own[id(p)] for key, p in params.items()}
        self.values = {key: p.detach().clone() for key, p in params.items()}
        self.model = copy.deepcopy(model).requires_grad_(False)
        # Every place that holds a parameter, once: a module that is registered under two names is one place, and
        # replacing it under both would make `functional_call` put the wrong tensor back.
        self.slots: dict[str, list[str]] = {key: [] for key in self.names}
        key_of = {id(self.model.get_parameter(name)): key for key, name in self.names.items()}
        for path, module in self.model.named_modules():
            for local, p in module._parameters.items():
                if id(p) in key_of:
                    self.slots[key_of[id(p)]].append(f"{path}.{local}" if path else local)
        self.read, self.axis, self.to_loss = read, axis, to_loss
        self.example_axis = dict(example_axis or {})
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

    # ------------------------------------------------------------------------------------------------- one batch
    def call(self, theta: Mapping[str, Tensor], X: Any) -> Tensor:
        """Output at other parameters."""
        replaced = {slot: value for key, value in theta.items() for slot in self.slots[key]}
        args, kwargs = (X.args, X.kwargs) if isinstance(X, Inputs) else ((X,), {})
        return self.read(functional_call(self.model, replaced, args, kwargs, tie_weights=False))

    def _see(self, item: Any, count: Callable[[Any], int], mask: Any) -> Seen:
        if isinstance(item, Mapping):
            y, kwargs = item["labels"], {k: v for k, v in item.items() if k != "labels"}
            X, N = Inputs((), kwargs), len(y)
        else:
            X, y = item
            N = count(X)
        f = self.call(self.values, X)
        J = torch.cat(
            [j.reshape(f.numel(), -1) for j in jacrev(lambda t: self.call(t, X).flatten())(self.values).values()], 1
        )

        def total(flat: Tensor) -> Tensor:
            return self.summed(self.to_loss(flat.view(f.shape)), y)

        summed, mean = total(f.flatten()), self.mean(self.to_loss(f), y)
        divisor = 0.0 if float(summed) == 0 else float(summed / mean)
        places = torch.arange(f.numel(), device=f.device).view(f.shape)
        terms = (
            places.view(N, -1, 1) if f.ndim == 1 else places.movedim(self.axis, -1).reshape(N, -1, f.shape[self.axis])
        )
        H = hessian(total)(f.flatten())
        return Seen(X, N, f, J, grad(total)(f.flatten()), H, terms, divisor, None if mask is None else mask(item[0], y))

    # ------------------------------------------------------------------------------------------- matrices [P, P]
    def ggn(self) -> Tensor:
        """`c Σ Jᵀ H J`."""
        return self.c * sum(b.J.T @ b.H @ b.J for b in self.batches)

    def empirical_fisher(self, per_term: bool) -> Tensor:
        """`c Σ u uᵀ` over gradients `u` of examples, or of terms."""
        return self.c * sum(u.T @ u for u in (self.gradients(b, v).flatten(0, 1) for b, v in self.empirical(per_term)))

    def hessian(self) -> Tensor:
        """Hessian of the whole loss."""
        sizes = [v.numel() for v in self.values.values()]

        def total(flat: Tensor, b: Seen, y: Any) -> Tensor:
            parts = flat.split(sizes)
            theta = {key: part.view(v.shape) for part, (key, v) in zip(parts, self.values.items(), strict=True)}
            return self.summed(self.to_loss(self.call(theta, b.X)), y)

        flat = torch.cat([v.flatten() for v in self.values.values()])
        # Reverse over reverse: forward over reverse (`hessian`) is wrong for LayerNorm in PyTorch 2.13.
        return self.c * sum(jacrev(grad(total))(flat, b, y) for b, y in zip(self.batches, self._targets, strict=True))

    def with_targets(self, targets: Sequence[Any]) -> Reference:
        """Remember the targets, which `hessian` reads once more."""
        self._targets = list(targets)
        return self

    def __hash__(self) -> int:
        return id(self)

    def gradient(self) -> Tensor:
        """Gradient of the whole loss."""
        return self.c * sum(b.J.T @ b.g for b in self.batches)

    # -------------------------------------------------------------------------------------------- vectors [V, F]
    @cache  # noqa: B019 (twins of the problems live as long as the tests)
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

    def gradients(self, b: Seen, v: Tensor) -> Tensor:
        """Gradients [V, N, P] of each example by itself."""
        of_examples = []
        for n in range(b.N):
            at = b.terms[n].flatten()
            of_examples.append(v[:, at] @ b.J[at])
        return torch.stack(of_examples, 1)

    # ---------------------------------------------------------------------------------------------------- blocks
    def blocks(self, separate: bool) -> list[list[str]]:
        """Keys of the parameters that share a block."""
        if separate:
            return [[key] for key in self.names]
        holders: list[set[str]] = []
        key_of = {id(self.model.get_parameter(name)): key for key, name in self.names.items()}
        for module in self.model.modules():
            mine = {key_of[id(p)] for p in module._parameters.values() if id(p) in key_of}
            if mine:
                joined = [h for h in holders if h & mine]
                holders = [h for h in holders if not h & mine] + [mine.union(*joined)]
        return [[key for key in self.names if key in h] for h in holders]

    def owners(self, key: str) -> list[tuple[str, nn.Module]]:
        """The modules that hold a parameter, with their names."""
        p = self.model.get_parameter(self.names[key])
        return [(name, m) for name, m in self.model.named_modules() if any(p is q for q in m._parameters.values())]

    def places(self, keys: Sequence[str]) -> Tensor:
        """Where parameters stand in the whole vector."""
        starts, start = {}, 0
        for key, value in self.values.items():
            starts[key], start = start, start + value.numel()
        return torch.cat([torch.arange(starts[k], starts[k] + self.values[k].numel()) for k in keys])

    def only_blocks(self, matrix: Tensor, separate: bool) -> Tensor:
        """A matrix with everything outside of the blocks set to zero."""
        result = torch.zeros_like(matrix)
        for keys in self.blocks(separate):
            at = self.places(keys)
            result[at[:, None], at] = matrix[at[:, None], at]
        return result

    # --------------------------------------------------------------------------------------------------- factors
    def affine_layer(self, key: str) -> str | None:
        """Name of the one module that holds a parameter if it has Kronecker factors."""
        owners = self.owners(key)
        shared = any(len(self.owners(k)) > 1 for k in self.names if self._module(k) is owners[0][1])
        fits = (
            len(owners) == 1 and not shared and type(owners[0][1]) in AFFINE and getattr(owners[0][1], "groups", 1) == 1
        )
        return owners[0][0] if fits else None

    def _module(self, key: str) -> nn.Module:
        return self.owners(key)[0][1]

    def _calls(
        self, b: Seen, name: str, probes: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Inputs and outputs of a module in one forward pass, with numbers added to its outputs; the model's output."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> Tensor | None:
            inputs.append([*args, *kwargs.values()][0].clone())
            outputs.append(out.clone())
            return None if probes is None else out + probes[len(outputs) - 1]

        handle = self.model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
        try:
            f = self.call(self.values, b.X)
        finally:
            handle.remove()
        return inputs, outputs, f

    @cache  # noqa: B019
    def rows(self, b: Seen, name: str) -> list[tuple[Tensor, Tensor]]:
        """For each call of a layer its inputs `a` [N, S, i], and derivatives [F, N, S, o] of the output by its outputs.

        A row of inputs is, by definition, the derivative of one output number with respect to its row of the weight.
        """
        module, axis = self.model.get_submodule(name), self.example_axis.get(name, 0)
        channel = -1 if isinstance(module, nn.Linear) else 1
        inputs, outputs, _ = self._calls(b, name)
        if not outputs:
            return []
        probes = [torch.zeros_like(out) for out in outputs]
        D = jacrev(lambda p: self._calls(b, name, p)[2].flatten())(probes)
        result = []
        weight = module.weight.detach()
        for x, d in zip(inputs, D, strict=True):

            def first_channel(row: Tensor, x: Tensor = x) -> Tensor:
                return functional_call(module, {"weight": torch.cat([row[None], weight[1:]])}, (x,)).select(channel, 0)

            a = jacrev(first_channel)(weight[0]).flatten(x.ndim - 1)
            d = d.movedim(channel if channel < 0 else channel + 1, -1)
            a, d = a.movedim(axis, 0), d.movedim(axis + 1, 1)
            result.append((a.reshape(b.N, -1, a.shape[-1]), d.reshape(len(d), b.N, -1, d.shape[-1])))
        return result

    @cache  # noqa: B019
    def factors(self, name: str, vectors: Vectors, reduce: bool = False, ones: bool = False) -> tuple[Tensor, Tensor]:
        """`A` and `G` of a layer, one example, one position, one vector at a time.

        Args:
            name: The layer.
            vectors: What is sent back through each batch.
            reduce: Average inputs and sum gradients over positions first.
            ones: Append a column of ones to the inputs.
        """
        A: Any = 0.0
        G: Any = 0.0
        rows = 0
        for b, v in vectors:
            calls = self.rows(b, name)
            for n in range(b.N):
                a_n, g_n = [], []
                for a, D in calls:
                    for s in range(a.shape[1]):
                        if b.mask is not None and b.mask.shape[1] == a.shape[1] and not b.mask[n, s]:
                            continue
                        a_n.append(torch.cat([a[n, s], a.new_ones(1)]) if ones else a[n, s])
                        g_n.append(v @ D[:, n, s])  # [V, o]
                if reduce and a_n:
                    a_n, g_n = [torch.stack(a_n).mean(0)], [torch.stack(g_n).sum(0)]
                for a, g in zip(a_n, g_n, strict=True):
                    A = A + torch.outer(a, a)
                    rows += 1
                    for g_v in g:
                        G = G + torch.outer(g_v, g_v)
        return A / rows, self.c * G

    def matrix_places(self, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Row and column of every number of a layer's parameters in the layer's one matrix `[o, i]` or `[o, i + 1]`."""
        rows, columns = [], []
        for key in keys:
            value = self.values[key]
            if self.names[key].rsplit(".", 1)[-1] == "bias":
                width = self._module(key).weight[0].numel()
                rows.append(torch.arange(len(value)))
                columns.append(torch.full((len(value),), width if len(keys) > 1 else 0))
            else:
                o, i = len(value), value[0].numel()
                rows.append(torch.arange(o).repeat_interleave(i))
                columns.append(torch.arange(i).repeat(o))
        return torch.cat(rows), torch.cat(columns)

    def kfac(self, vectors: Vectors, reduce: bool = False, separate: bool = False) -> Tensor:
        """`G ⊗ A` on every layer that has factors, the diagonal of the exact block on the others. [P, P]"""
        result = torch.diag(self.from_gradients(vectors).diagonal())
        for keys in self.blocks(separate):
            name = self.affine_layer(keys[0])
            if name is None:
                continue
            has_weight = any(self.names[key].rsplit(".", 1)[-1] == "weight" for key in keys)
            A, G = self.factors(name, vectors, reduce, ones=len(keys) > 1)
            if not has_weight:
                A = torch.ones(1, 1, dtype=G.dtype)
            r, c = self.matrix_places(keys)
            at = self.places(keys)
            result[at[:, None], at] = G[r[:, None], r] * A[c[:, None], c]
        return result

    def from_gradients(self, vectors: Vectors) -> Tensor:
        """`c Σ u uᵀ` over the per-example gradients of all vectors, [P, P]."""
        return self.c * sum(u.T @ u for u in (self.gradients(b, v).flatten(0, 1) for b, v in vectors))

    def corrected_eigenvalues(self, keys: Sequence[str], vectors: Vectors, QG: Tensor, QA: Tensor | None) -> Tensor:
        """`Λ = c Σ (Q_Gᵀ U Q_A)²` of a layer's per-example gradients `U` [o, i] (i = 1 for a bias by itself)."""
        rows, columns = self.matrix_places(keys)
        QA = torch.ones(1, 1, dtype=QG.dtype) if QA is None else QA
        total = torch.zeros(len(QG), len(QA), dtype=QG.dtype)
        for b, v in vectors:
            for u in self.gradients(b, v).flatten(0, 1)[:, self.places(keys)]:
                U = torch.zeros(len(QG), len(QA), dtype=QG.dtype)
                U[rows, columns] = u
                total += (QG.T @ U @ QA) ** 2
        return self.c * total


@dataclass
class Inputs:
    """Inputs of a model that is not called with one positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
