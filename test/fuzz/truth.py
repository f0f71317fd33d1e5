"""What a case's matrices are, by autograd of one example at a time and dense algebra.

Nothing of the package is used here.

Letters: N examples, F numbers in one example's outputs, R loss terms of C numbers, P parameters, S
positions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from test.fuzz.case import Case, term_axes
from test.fuzz.field_modules import by_calls
from test.fuzz.losses import fisher, make_loss, mean_divisor, value
from test.helpers import DEVICE
from test.twin import Pass, Twin, Use, jacobian


@dataclass(eq=False, kw_only=True)
class Example(Pass):
    """One example; lists are of each output."""

    shape: torch.Size  # of the first output
    J: Tensor  # [F, P], of all outputs one after the other
    places: list[Tensor]  # rows of J
    terms: list[Tensor]  # [R, C], rows of J
    loss: list[Tensor]
    g: list[Tensor]  # [F]
    H: list[Tensor]  # [F, F], or what replaces it


def of_example(t: Tensor, n: int, N: int) -> Tensor:
    """The target of one example; outputs [N·R, C] have R rows of each."""
    return t.reshape(N, -1, *t.shape[1:])[n] if len(t) != N else t[n : n + 1]


class Truth(Twin):
    """Everything about a case, by definition.

    Args:
        case: The case. Its model is copied to float64.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        wide = copy.deepcopy(case.model).double()
        own = {id(p): name for name, p in case.model.named_parameters()}
        super().__init__(
            wide,
            {key: wide.get_parameter(own[id(p)]) for key, p in case.keyed.items()},
            plain=by_calls,
            bags=True,
        )
        #: The model in its own precision; passes leave tensors in the case's.
        self.narrow = copy.deepcopy(case.model).requires_grad_()
        about = case.about["losses"]
        shapes = [[f.shape for f in case.outputs(self.model(self._wide(x)))] for x, _ in case.data]
        self.losses = [
            make_loss(o, shape, torch.float64, "sum").to(DEVICE)
            for o, shape in zip(about, shapes[0], strict=True)
        ]
        self.examples = [
            e for x, y in case.data for e in self._examples(self._wide(x), self._targets(y))
        ]
        #: Of each loss, `c`.
        self.c = [self._scale(k, [s[k] for s in shapes]) for k in range(len(about))]

    # ---------------------------------------------------------------------------------- one example
    def _wide(self, x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    def _targets(self, y: Any) -> list[Tensor]:
        return [self._wide(t) for t in self.case.outputs(y)]

    def _scale(self, k: int, shapes: list[Any]) -> float:
        o = self.case.about["losses"][k]
        if o["reduction"] == "sum":
            return 1.0
        divisor = sum(
            mean_divisor(o, self.losses[k], shape, self._targets(y)[k])
            for shape, (_, y) in zip(shapes, self.case.data, strict=True)
        )
        if self.case.about["num_data"] is not None:
            divisor *= self.case.about["num_data"] / len(self.examples)
        return 1 / divisor if divisor else float("nan")

    @property
    def kept(self) -> bool:
        """Whether at least one term of every loss counts."""
        return all(c == c for c in self.c)

    def _outputs(self, x: Tensor) -> list[Tensor]:
        return self.case.outputs(self.model(x))

    def _run(self, x: Tensor) -> Tensor:
        return torch.cat([f.flatten() for f in self._outputs(x)])

    def _examples(self, x: Tensor, targets: list[Tensor]) -> Iterator[Example]:
        N = len(x)
        for n in range(N):
            yield self._example(x[n : n + 1], [of_example(t, n, N) for t in targets])

    def _example(self, x: Tensor, targets: list[Tensor]) -> Example:
        outputs = self._outputs(x)
        J = jacobian(torch.cat([f.flatten() for f in outputs]), self.leaves)
        total = len(J)
        places = torch.arange(total, device=DEVICE).split([f.numel() for f in outputs])
        example = Example(
            run=partial(self._run, x),
            example=torch.zeros(total, dtype=torch.long, device=DEVICE),
            N=1,
            shape=outputs[0].shape,
            J=J,
            places=list(places),
            terms=[],
            loss=[],
            g=[],
            H=[],
        )
        axes = term_axes(self.case, [tuple(f.shape) for f in outputs])
        parts = zip(outputs, targets, axes, places, strict=True)
        for k, (output, y, axis, place) in enumerate(parts):
            shape = output.shape if output.ndim > 1 else (len(output), 1)
            by_term = place.view(shape).movedim(max(axis, 1), -1)
            example.terms.append(by_term.reshape(-1, shape[max(axis, 1)]))
            loss, g, H = self._in_output(k, output.detach(), y)
            gradient, hessian = J.new_zeros(total), J.new_zeros(total, total)
            gradient[place], hessian[place[:, None], place] = g, H
            example.loss.append(loss)
            example.g.append(gradient)
            example.H.append(hessian)
        return example

    def _in_output(self, k: int, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient and Hessian in one output."""
        o, loss, f = self.case.about["losses"][k], self.losses[k], f.clone().requires_grad_()
        summed = value(o, loss, f, y)
        g = torch.autograd.grad(summed, f, create_graph=True)[0].flatten()
        given = fisher(o, loss, f.detach(), y)
        if given is not None:
            return summed.detach(), g.detach(), given
        return summed.detach(), g.detach(), jacobian(g, [f])

    def flat(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Gradients as one vector; None is zero."""
        parts = [
            p.new_zeros(p.numel(), dtype=torch.float64) if g is None else g.flatten()
            for g, p in zip(grads, self.leaves, strict=True)
        ]
        return torch.cat(parts).detach()

    # ------------------------------------------------------------------------------ matrices [P, P]
    @cached_property
    def factors(self) -> list[float]:
        """What the summed value of each loss is multiplied by."""
        return [w * c for w, c in zip(self.case.weights, self.c, strict=True)]

    def inner(self, e: Example, vectors: str) -> Tensor:
        """The matrix [F, F] between the Jacobians, with all factors."""
        if vectors == "exact":
            return sum(a * H for a, H in zip(self.factors, e.H, strict=True))  # type: ignore[return-value]
        # Gradients are those of the weighted sum, relative to the largest factor.
        c = max(self.c)
        gradients = [a / c * g for a, g in zip(self.factors, e.g, strict=True)]
        if vectors == "empirical":
            g = sum(gradients)
            return c * torch.outer(g, g)  # type: ignore[arg-type]
        total = torch.zeros_like(e.H[0])
        for g, terms in zip(gradients, e.terms, strict=True):
            for at in terms:
                total[at[:, None], at] += c * torch.outer(g[at], g[at])
        return total

    def matrix(self, vectors: str = "exact") -> Tensor:
        """`c Σ Jᵀ M J`: the GGN, or an empirical Fisher matrix over examples or terms."""
        if vectors not in self._matrices:
            self._matrices[vectors] = sum(
                e.J.T @ self.inner(e, vectors) @ e.J for e in self.examples
            )  # type: ignore[assignment]
        return self._matrices[vectors]

    def size(self, vectors: str) -> float:
        """What errors of a matrix are relative to: its norm, unless nearly all of `Jᵀ J`
        cancels.
        """
        whole = sum(float(e.J.square().sum()) for e in self.examples) * max(self.factors)
        return max(float(self.matrix(vectors).norm()), 1e-3 * whole, 1e-4)

    @cached_property
    def _matrices(self) -> dict[str, Tensor]:
        return {}

    def decayed(self, vectors: str, decay: float) -> Tensor:
        """`Σ_k ρ^{t-k} S_k / Σ_k ρ^{t-k} d_k`: sums over batches, and what their means divide by;
        of one loss.
        """
        sums: Any = 0.0
        divisor, examples = 0.0, iter(self.examples)
        for x, y in self.case.data:
            target = self._targets(y)[0]
            batch = [next(examples) for _ in x]
            found = sum(e.J.T @ self.inner(e, vectors) @ e.J for e in batch) / self.c[0]
            number = mean_divisor(
                self.case.about["losses"][0], self.losses[0], self._shape(batch, len(x)), target
            )
            sums, divisor = decay * sums + found, decay * divisor + number
        return sums / divisor

    def _shape(self, batch: Sequence[Example], N: int) -> tuple[int, ...]:
        first, *rest = batch[0].shape
        return first * N, *rest

    @cached_property
    def jacobian(self) -> Tensor:
        """Rows of all examples, output by output."""
        return torch.cat([e.J[e.places[k]] for k in range(len(self.losses)) for e in self.examples])

    @cached_property
    def loss(self) -> Tensor:
        """The weighted sum of the losses."""
        return sum(
            a * loss for e in self.examples for a, loss in zip(self.factors, e.loss, strict=True)
        )  # type: ignore[return-value]

    @cached_property
    def gradient(self) -> Tensor:
        """Its gradient."""
        return sum(
            a * (e.J.T @ g) for e in self.examples for a, g in zip(self.factors, e.g, strict=True)
        )  # type: ignore[return-value]

    @cached_property
    def rounding(self) -> float:
        """How far PyTorch's own gradient is off in the precision of the case: terms that cancel
        leave something.
        """
        case = self.case
        if case.dtype == torch.float64:
            return 0.0
        model = self.narrow
        losses, total = (
            copy.deepcopy(nn.ModuleList(self.losses)).to(case.dtype),
            torch.zeros((), dtype=case.dtype, device=DEVICE),
        )
        for x, y in case.data:
            outputs = zip(
                case.about["losses"], losses, case.outputs(model(x)), case.outputs(y), strict=True
            )
            total = total + sum(
                a * value(o, loss, f, t) for a, (o, loss, f, t) in zip(self.factors, outputs)
            )
        params = [model.get_parameter(name) for name in self.names.values()]
        found = self.flat(torch.autograd.grad(total, params, allow_unused=True))
        return float((found - self.gradient).norm())

    @sdpa_kernel(SDPBackend.MATH)  # the other kernels have no second derivative
    def hessian_product(self, V: Tensor) -> Tensor:  # [P, K] -> [P, K]
        """The Hessian of the loss times vectors, by reverse mode twice."""
        total: Any = 0.0
        for x, ys in self.case.data:
            x, targets = self._wide(x), self._targets(ys)
            for n in range(len(x)):
                outputs = self.case.outputs(self.model(x[n : n + 1]))
                for k, (f, t) in enumerate(zip(outputs, targets, strict=True)):
                    o, y = self.case.about["losses"][k], of_example(t, n, len(x))
                    total = total + self.factors[k] * value(o, self.losses[k], f, y)
        params = self.leaves
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(total, params, create_graph=True, **options)
        flat = torch.cat([g.flatten() for g in grads])
        if not flat.requires_grad:
            return torch.zeros_like(V)
        return torch.stack(
            [self.flat(torch.autograd.grad(flat @ v, params, **options)) for v in V.T], 1
        )

    # -------------------------------------------------------------------------------------- factors
    def kfac_block(self, keys: Sequence[str], vectors: str, reduce: bool) -> Tensor | None:
        """The block `G ⊗ A` of some parameters; None without factors, or where nothing is seen."""
        roles = self.layer_of(keys[0]).roles
        if len(roles) != 1 or not any(
            self._sees(e, use) for e in self.examples for use in roles[0]
        ):
            return None
        inner = [(e, self.inner(e, vectors)) for e in self.examples]
        A, G = self.factors_of(roles[0], inner, reduce, len(keys) > 1)
        if not self.has_weight(keys):
            A = torch.ones(1, 1, dtype=torch.float64, device=DEVICE)
        return self.kronecker(keys, A, G)

    def _sees(self, e: Example, use: Use) -> bool:
        return any(bool(kept.any()) for _, _, kept in self.rows(e, use))
