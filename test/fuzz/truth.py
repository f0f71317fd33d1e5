"""What a case's matrices are, by `torch.autograd.grad` of one example at a time and dense algebra.

Nothing of the package is used here.

Letters: N examples, F numbers in one example's outputs, R loss terms of C numbers, P parameters, S
positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from test.fuzz.case import Case, term_axes
from test.fuzz.losses import fisher, make_loss, mean_divisor, value
from test.fuzz.modules import Conv1D

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
AFFINE = (nn.Linear, *CONV, *TRANSPOSED, nn.Embedding, Conv1D)


def _norm(m: Any, x: Tensor) -> Tensor:
    """Batch norm with stored statistics, and instance norm, written out: PyTorch's misread
    gradients of one example.
    """
    shape, axes = [1, -1, *[1] * (x.ndim - 2)], tuple(range(2, x.ndim))
    mean = x.mean(axes, keepdim=True) if m.running_mean is None else m.running_mean.view(shape)
    var = (
        x.var(axes, correction=0, keepdim=True)
        if m.running_var is None
        else m.running_var.view(shape)
    )
    out = (x - mean) / (var + m.eps).sqrt()
    return out if m.weight is None else out * m.weight.view(shape) + m.bias.view(shape)


def _bag(m: Any, x: Tensor) -> Tensor:
    """An embedding bag written out: PyTorch's own has no second derivative."""
    bags = []
    for tokens in x:
        rows = m.weight[tokens if m.padding_idx is None else tokens[tokens != m.padding_idx]]
        if m.mode == "max" and len(rows):
            bags.append(rows.amax(0))
        else:
            bags.append(rows.sum(0) / (max(1, len(rows)) if m.mode == "mean" else 1))
    return torch.stack(bags)


def _weight_norm(m: Any, magnitude: Tensor, direction: Tensor) -> Tensor:
    """Weight normalisation written out: the second derivative of PyTorch's own is wrong."""
    return direction * (magnitude / direction.square().sum(1, keepdim=True).sqrt())


def _plain(model: nn.Module) -> nn.Module:
    """The model with modules written out where PyTorch's own have wrong or missing derivatives."""
    for m in model.modules():
        norm, bag = isinstance(m, nn.modules.batchnorm._NormBase), isinstance(m, nn.EmbeddingBag)
        forward = (
            _norm
            if norm
            else _bag
            if bag
            else _weight_norm
            if type(m).__name__ == "_WeightNorm"
            else None
        )
        if forward:
            m.forward = partial(forward, m)  # type: ignore[method-assign]
    return model


@dataclass(eq=False)
class Example:
    """One example; lists are of each output."""

    outputs: list[Tensor]  # what the loss reads, with its graph
    J: Tensor  # [F, P], of all outputs one after the other
    places: list[Tensor]  # rows of J
    terms: list[Tensor]  # [R, C], rows of J
    loss: list[Tensor]
    g: list[Tensor]  # [F]
    H: list[Tensor]  # [F, F], or what replaces it


@dataclass(eq=False)
class Block:
    """Parameters that share a block."""

    keys: list[str]
    at: Tensor  # places in the whole vector
    affine: tuple[
        str, ...
    ]  # modules that multiply with them in one way, if their Kronecker factors are defined here


def second_derivatives(x: Tensor, g: Tensor | None) -> Tensor:
    """The Hessian [n, n] in `x` of a function with the gradient `g`; without a graph it is zero."""
    zero = torch.zeros_like(x).flatten()
    rows = []
    for number in zero if g is None else g.flatten():
        by_x = (
            torch.autograd.grad(number, x, retain_graph=True, allow_unused=True)
            if number.requires_grad
            else (None,)
        )
        rows.append(zero if by_x[0] is None else by_x[0].flatten())
    return torch.stack(rows)


def of_example(t: Tensor, n: int, N: int) -> Tensor:
    """The target of one example; outputs [N·R, C] have R rows of each."""
    return t.reshape(N, -1, *t.shape[1:])[n] if len(t) != N else t[n : n + 1]


def _same(one: nn.Module, two: nn.Module) -> bool:
    """Whether two modules have the very same parameters."""
    return {id(p) for p in one._parameters.values()} == {id(p) for p in two._parameters.values()}


class Truth:
    """Everything about a case, by definition.

    Args:
        case: The case. Its model is copied to float64.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = _plain(copy.deepcopy(case.model).double())
        own = {id(p): name for name, p in case.model.named_parameters()}
        mine = dict(self.model.named_parameters())
        self.params = {key: mine[own[id(p)]].requires_grad_() for key, p in case.keyed.items()}
        #: Key to name in the model.
        self.names = {key: own[id(p)] for key, p in case.keyed.items()}
        self.sizes = [p.numel() for p in self.params.values()]
        about = case.about["losses"]
        shapes = [[f.shape for f in case.outputs(self.model(self._wide(x)))] for x, _ in case.data]
        self.losses = [
            make_loss(o, shape, torch.float64, "sum")
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

    def _examples(self, x: Tensor, targets: list[Tensor]) -> Iterator[Example]:
        N = len(x)
        for n in range(N):
            yield self._example(
                self.case.outputs(self.model(x[n : n + 1])), [of_example(t, n, N) for t in targets]
            )

    def _example(self, outputs: list[Tensor], targets: list[Tensor]) -> Example:
        rows = [
            self.flat(self._derivatives(number))
            for output in outputs
            for number in output.flatten()
        ]
        total, found = len(rows), Example(outputs, torch.stack(rows), [], [], [], [], [])
        axes = term_axes(self.case, [tuple(o.shape) for o in outputs])
        places = torch.arange(total).split([o.numel() for o in outputs])
        for k, (output, y, axis, place) in enumerate(
            zip(outputs, targets, axes, places, strict=True)
        ):
            found.places.append(place)
            shape = output.shape if output.ndim > 1 else (len(output), 1)
            found.terms.append(
                place.view(shape).movedim(max(axis, 1), -1).reshape(-1, shape[max(axis, 1)])
            )
            loss, g, H = self._in_output(k, output.detach(), y)
            gradient, hessian = torch.zeros(total).double(), torch.zeros(total, total).double()
            gradient[place], hessian[place[:, None], place] = g, H
            found.loss.append(loss)
            found.g.append(gradient)
            found.H.append(hessian)
        return found

    def _in_output(self, k: int, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient and Hessian in one output."""
        o, loss, f = self.case.about["losses"][k], self.losses[k], f.clone().requires_grad_()
        summed = value(o, loss, f, y)
        g = torch.autograd.grad(summed, f, create_graph=True)[0].flatten()
        given = fisher(o, loss, f.detach(), y)
        if given is not None:
            return summed.detach(), g.detach(), given
        return summed.detach(), g.detach(), second_derivatives(f, g)

    def _derivatives(self, number: Tensor) -> Sequence[Tensor | None]:
        if not number.requires_grad:
            return [None] * len(self.sizes)
        return torch.autograd.grad(
            number, [*self.params.values()], retain_graph=True, allow_unused=True
        )

    def flat(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Gradients as one vector; None is zero."""
        parts = [
            torch.zeros(n).double() if g is None else g.flatten()
            for g, n in zip(grads, self.sizes, strict=True)
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
        first, *rest = batch[0].outputs[0].shape
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
        model = copy.deepcopy(case.model).requires_grad_()
        losses, total = (
            copy.deepcopy(nn.ModuleList(self.losses)).to(case.dtype),
            torch.zeros((), dtype=case.dtype),
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
        params = [*self.params.values()]
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(total, params, create_graph=True, **options)
        flat = torch.cat([g.flatten() for g in grads])
        if not flat.requires_grad:
            return torch.zeros_like(V)
        return torch.stack(
            [self.flat(torch.autograd.grad(flat @ v, params, **options)) for v in V.T], 1
        )

    # --------------------------------------------------------------------------------------- blocks
    def places(self, keys: Sequence[str]) -> Tensor:
        """Where parameters stand in the whole vector."""
        starts = dict(
            zip(self.params, torch.tensor([0, *self.sizes]).cumsum(0).tolist(), strict=False)
        )
        return torch.cat(
            [torch.arange(starts[k], starts[k] + self.params[k].numel()) for k in keys]
        )

    def blocks(self, separate: bool) -> list[Block]:
        """Parameters by module; modules that share one are together."""
        return [self._block([key]) for key in self.params] if separate else self._joint

    @cached_property
    def holders(self) -> dict[str, list[str]]:
        """Key to the paths of all modules that hold the parameter."""
        ids = {id(p): key for key, p in self.params.items()}
        found: dict[str, list[str]] = {key: [] for key in self.params}
        for path, module in self.model.named_modules(remove_duplicate=True):
            for p in module._parameters.values():
                if id(p) in ids:
                    found[ids[id(p)]].append(path)
        return found

    @cached_property
    def _joint(self) -> list[Block]:
        groups: list[tuple[set[str], set[str]]] = []  # modules and keys
        for key, paths in self.holders.items():
            # The original parameters of a parametrised module are those of the module; attention
            # has a layer inside.
            inside = ".in_proj" if "in_proj" in self.names[key] else ""
            at, keys = {path.split(".parametrizations")[0] + inside for path in paths}, {key}
            for group in [g for g in groups if g[0] & at]:
                at, keys = at | group[0], keys | group[1]
                groups.remove(group)
            groups.append((at, keys))
        order = [[key for key in self.params if key in keys] for _, keys in groups]
        return [
            self._block(keys)
            for keys in sorted(order, key=lambda keys: [*self.params].index(keys[0]))
        ]

    def _block(self, keys: list[str]) -> Block:
        holders = sorted({path for key in keys for path in self.holders[key]})
        modules = [self.model.get_submodule(path) for path in holders]
        first = modules[0]
        # Modules that share a parameter must share all, and be linear.
        shared = all(self._users(p) == holders for p in first._parameters.values() if p is not None)
        same = all(type(m) is nn.Linear and _same(m, first) for m in modules[1:])
        plain = type(first) in AFFINE and not hasattr(first, "parametrizations")
        return Block(keys, self.places(keys), tuple(holders) if shared and same and plain else ())

    def _users(self, p: Tensor) -> list[str]:
        return sorted(
            path
            for path, m in self.model.named_modules()
            if any(p is q for q in m._parameters.values())
        )

    def only_blocks(self, matrix: Tensor, separate: bool) -> Tensor:
        """A matrix with zeros outside the blocks."""
        same = torch.zeros_like(matrix)
        for block in self.blocks(separate):
            same[block.at[:, None], block.at] = 1
        return matrix * same

    # ------------------------------------------------------------------------------------ recording
    @contextmanager
    def hooked(self, path: str, see: Callable[[tuple[Any, ...], Tensor], None]) -> Iterator[None]:
        """Context in which `see(inputs, output)` sees the calls of a module; what follows can't
        write to the output.
        """

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
        ) -> Tensor:
            out = out.clone()
            see((*args, *kwargs.values()), out)
            return out.clone()

        handle = self.model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
