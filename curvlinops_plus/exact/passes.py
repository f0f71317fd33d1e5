"""Passes of one batch through a model, forward with tangents and back through the graph: `J v`, `Jᵀ
u`, `Jᵀ M J v`.

`J v` is forward-mode differentiation: each operation carries a tangent along, and the graph of the
same forward pass serves the backward pass after it. Where an operation has no forward mode, or
forward mode is wrong (it ignores `torch.no_grad`), `J v` is the derivative of `wᵀ J` with respect
to `w`, by two backward passes. Which one is right is told by plain backward passes: `⟨u, J v⟩ = ⟨Jᵀ
u, v⟩` for random `u` and `v`, once for each way of computing `J v`. The products themselves tell
less, since `⟨M J̃ v, J̃ v⟩ = ⟨v, Jᵀ M J̃ v⟩` also holds where `J̃` loses a part of `J`, or all.

Hessians never go forward: PyTorch's forward derivatives of normalisation layers are constants for
the backward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, group_norm
from torch.overrides import TorchFunctionMode

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg.numerics import whole
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import Batch, gradients_of, nodes_of, postorder, tensors_of
from curvlinops_plus.risk.preserve import preserve_state, quiet, with_short_products

Outputs: TypeAlias = Sequence[Tensor]
Read: TypeAlias = Callable[[nn.Module, Batch], tuple[Outputs, Any]]
# A linear function of vectors [K, *output], one for each output, to the same.
Linear: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]

# Columns that are computed together: their results stay below so many bytes, and they are at most
# so many.
_CHUNK_BYTES, _COLUMNS = 2**28, 64
# On a CPU columns are backpropagated together only while results have fewer numbers: larger ones
# gain nothing by it.
_CPU_NUMBERS = 2**17
# By bytes of the coarsest numbers, how far the two sides of an identity may be apart: of products,
# and of one pair of vectors, in which every parameter that loses its tangent counts as much as any
# other.
_TOLERANCE = {2: 5e-2, 4: 5e-3, 8: 1e-6}
_OF_ONE_PAIR = {2: 0.1, 4: 1e-4, 8: 1e-6}
# Vectors `u`: one pair may agree by chance, where numbers have few digits.
_PAIRS = 3
# By how much, at most, a random vector is larger for parameters with small gradients than for those
# with the largest.
_WEIGHT = {2: 2.0**4, 4: 2.0**10, 8: 2.0**20}
_MISSING = re.compile(
    r"derivative for '?(?:aten::)?_*(\w+?)(?:_dense)?(?:_backward)?'? is not implemented"
)


@contextmanager
def differentiable(risk: EmpiricalRisk) -> Iterator[None]:
    """Context in which passes over the data can be differentiated in every mode, whatever the
    caller's modes are.

    Afterwards the state of model and data is as before, see `preserve_state`. Attention runs by
    plain operations, whose fused kernels have neither forward mode nor second derivatives, and
    compiled modules run eagerly.

    Raises:
        UnsupportedError: Naming an operation that can't be differentiated twice, in place of
            PyTorch's error.
    """
    with (
        preserve_state(risk.model, risk.data),
        torch.inference_mode(False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        try:
            yield
        except RuntimeError as error:
            if not (found := _MISSING.search(str(error))):
                raise
            raise UnsupportedError(
                f"The model or the loss uses {found[1]}, which PyTorch can't differentiate twice. "
                "Write it with operations that it can (cdist as (x[:, None] - y).norm(dim=-1), "
                "attention as softmax(q kᵀ) v), or use an operator that goes back once, as "
                "KFACLinearOperator."
            ) from error


class Replaced(TorchFunctionMode):
    """While active, replaces two operations of which PyTorch has wrong derivatives by others of the
    same values.

    Of weight norm's fused kernel the second derivative is wrong; forward mode ignores the
    `padding_idx` of tables, and their gradients by `scale_grad_by_freq` are no derivatives.

    Attributes:
        any: Whether it has replaced an operation.
        group_norm: Whether it has seen group norm, whose second derivatives of several columns at
            once are wrong.
    """

    any = group_norm = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._weight_norm:  # pyright: ignore[reportPrivateImportUsage]
            self.any = True
            return _weight_norm(*args, **kwargs)
        if func is embedding and (found := _embedding(*args, **kwargs)) is not None:
            self.any = True
            return found
        self.group_norm |= func is group_norm or func is torch.group_norm
        return func(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / |v|`, with a norm for each entry of the axis, or a single one if that is -1."""
    others = [axis for axis in range(v.ndim) if dim == -1 or axis != dim % v.ndim]
    return v * (g / v.square().sum(others, keepdim=dim != -1).sqrt())


def _embedding(
    index: Tensor, weight: Tensor, padding_idx: int | None, scale_grad_by_freq: bool, **options: Any
) -> Tensor | None:
    """A table whose row `padding_idx` is constant, and whose gradients are derivatives; None if
    they are anyway.
    """
    if padding_idx is None and not scale_grad_by_freq:
        return None
    out = embedding(index, weight, None, **options)
    return (
        out
        if padding_idx is None
        else torch.where((index == padding_idx % len(weight))[..., None], out.detach(), out)
    )


class Passes:
    """Products with the Jacobian `J` of what a model returns, batch by batch; all inside of
    `differentiable`.

    Args:
        risk: Model, parameters and data.
        read: `read(model, batch)` runs the model and returns the tensors that are differentiated,
            and anything else.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB, 64
            at most.
        twice: Whether there is no forward mode.

    Attributes:
        twice: Whether `J v` takes two backward passes.
        reached: Whether any output has depended on the parameters; None before the first.

    Raises:
        ValueError: If `chunk_size` is less than one.
    """

    def __init__(
        self, risk: EmpiricalRisk, read: Read, chunk_size: int | None = None, twice: bool = False
    ) -> None:
        if chunk_size is not None and ((found := whole(chunk_size)) is None or found < 1):
            raise ValueError(
                f"chunk_size={chunk_size!r} must be an integer of at least 1, the number of "
                "columns computed together."
            )
        self.risk, self.read, self.params = risk, read, list(risk.params.values())
        fitting = _CHUNK_BYTES // max(1, 8 * risk.space.dim)
        self.columns = int(chunk_size) if chunk_size else max(1, min(_COLUMNS, fitting))
        self._together = chunk_size is not None or risk.device.type != "cpu"
        self.narrow = any(p.dtype == torch.float16 for p in self.params)
        self.twice = twice
        self.reached: bool | None = None
        self._right = set[
            Any
        ]()  # ways of computing `J v`, and shapes of batches, that `check` found to be right
        self._replaced = Replaced()
        self._itemsize: int | None = None  # of the coarsest numbers in the model

    @contextmanager
    def run(
        self, batch: Batch, row: Tensor | None = None
    ) -> Iterator[tuple[Outputs, Any, list[Tensor], list[Tensor] | None]]:
        """Run the model: `(F, extra, parameters, J v)`, where `F` has a graph down to copies of the
        parameters.

        `J v` [1, *output] is that of a vector [n], by forward mode. Inside, the model has the
        copies, because checkpointing runs parts of it again in the backward pass.
        """
        free, JV = [p.detach().requires_grad_() for p in self.params], None
        with ExitStack() as tangents:
            values = free
            if row is not None:
                tangents.enter_context(forward_ad.dual_level())
                # `make_dual` copies a tangent that is a part of a larger tensor, unless it doesn't
                # look like one.
                V = [torch.from_dlpack(t[0].detach()) for t in self.split(row[None])]
                values = [forward_ad.make_dual(p, v) for p, v in zip(free, V, strict=True)]
            # The first run of the model is watched, and all others if they need it.
            watched = (
                self._replaced if self._itemsize is None or self._replaced.any else nullcontext()
            )
            with self.risk.placed(dict(zip(self.risk.params, values, strict=True))), watched:
                with tangents:  # left before the backward pass, which would propagate tangents, too
                    F, extra = self.read(self.risk.model, batch)
                    if row is not None:
                        pairs = [forward_ad.unpack_dual(f) for f in F]
                        JV = [
                            torch.zeros_like(f)[None] if t is None else t.detach()[None]
                            for f, t in pairs
                        ]
                if self._itemsize is None:
                    nodes = postorder(nodes_of(F))
                    dtypes = {m.dtype for node in nodes for m in node._input_metadata} | {
                        t.dtype for t in (*F, *free)
                    }
                    self._itemsize = min([d.itemsize for d in dtypes if d.is_floating_point])
                self.reached = self.reached or not F or any(f.requires_grad for f in F)
                yield F, extra, free, JV

    # ------------------------------------------------------------------------------------- products
    def ggn(
        self,
        batch: Batch,
        rows: Tensor,
        matrix: Callable[[Outputs, Any], Linear],
        total: Tensor | None = None,
    ) -> Tensor:
        """Add `Jᵀ M J v` of several vectors [K, n] to a total [K, n]; returns `⟨M J v, J v⟩` [K].

        Args:
            matrix: Makes the product with `M` from the outputs and what was read beside them.
            total: None for `⟨M J v, J w⟩` [K, K] of all pairs of up to `columns` vectors, without a
                backward pass.

        Cost: one forward pass with tangents and one backward pass for a single vector, which share
        the graph. Several share a forward pass, and carry tangents through another one.
        """
        state, energy = RandomState.now(self.risk.device), []
        dual, wide = (
            len(rows) == 1 and not self.twice,
            torch.promote_types(rows.dtype, torch.float32),
        )
        with self.run(batch, rows[0] if dual else None) as (F, extra, free, JV):
            M = matrix(F, extra)
            for start in range(0, len(rows), self.columns):
                at = slice(start, start + self.columns)
                if JV is None or not dual:
                    JV = (
                        self._twice(F, free, rows[at])
                        if self.twice
                        else self.forward(batch, rows[at], state)
                    )
                MJV = M(JV)
                if total is not None:
                    self.back(F, free, MJV, total[at], last=dual)
                pairs = [
                    [t.flatten(1).to(wide) for t in pair] for pair in zip(MJV, JV, strict=True)
                ]
                energies = [
                    torch.einsum("ko,lo->kl" if total is None else "ko,ko->k", *pair)
                    for pair in pairs
                ]
                energy.append(sum(energies[1:], energies[0]))
        return torch.cat(energy)

    def back(
        self,
        F: Sequence[Tensor | None],
        free: Sequence[Tensor],
        vectors: Sequence[Tensor],
        total: Tensor,
        last: bool = False,
    ) -> None:
        """Add `Jᵀ u` of several vectors, [K, *output] for each output, to a total, a row for each.

        In float16 vectors are sent times a power of two that leaves room on both sides.

        Args:
            last: Whether the graph may be freed.
        """
        sent = [
            (f, v) for f, v in zip(F, vectors, strict=True) if f is not None and f.requires_grad
        ]
        if not sent:
            return
        power, outputs = 1.0, [f for f, _ in sent]
        if self.narrow or any(f.dtype == torch.float16 for f in outputs):
            largest = max(float(v.abs().amax()) for _, v in sent)
            power = 2.0 ** (-math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        K = len(total)
        size = self._sent_together(outputs, K) if K > 1 else 1
        for start in range(0, K, size):
            at = slice(start, start + size)
            U = [(v[at] if power == 1 else v[at].float() * power).to(f.dtype) for f, v in sent]
            found = vjp(outputs, free, U, last and start + size >= K)
            for own, part in zip(total[at].split([p.numel() for p in free], 1), found, strict=True):
                if part is not None:
                    part = part.reshape(len(own), -1)
                    own += part if power == 1 else part.to(own.dtype) / power

    def _sent_together(self, outputs: Sequence[Tensor], K: int) -> int:
        """How many of K columns are backpropagated together."""
        if self._replaced.group_norm:
            return 1
        numbers = max(t.numel() for t in (*outputs, *self.params))
        return self.columns if self._together else max(1, min(K, _CPU_NUMBERS // max(1, numbers)))

    def forward(self, batch: Batch, rows: Tensor, state: RandomState | None = None) -> list[Tensor]:
        """`J v` of several vectors, [K, n] -> [K, *output] for each output.

        Args:
            state: Where the random numbers of the forward pass begin that is differentiated; by
                default those of now.

        Cost: one forward pass with tangents, without a graph, for a piece of vectors.
        """
        state = RandomState.now(self.risk.device) if state is None else state
        if len(rows) > self.columns:
            pieces = [self.forward(batch, piece, state) for piece in rows.split(self.columns)]
            return [torch.cat(parts) for parts in zip(*pieces, strict=True)]
        if self.twice:
            with self.run(batch) as (F, _, free, _):
                return self._twice(F, free, rows)
        values, V = tuple(p.detach() for p in self.params), self.split(rows)

        def function(*parameters: Tensor) -> tuple[Tensor, ...]:
            with (
                self.risk.placed(dict(zip(self.risk.params, parameters, strict=True))),
                self._replaced,
            ):
                return tuple(self.read(self.risk.model, batch)[0])

        def one(*tangents: Tensor) -> tuple[Tensor, ...]:
            return torch.func.jvp(function, values, tangents)[1]

        def alone(row: Tensor) -> Any:
            state.restore()
            with self.run(batch, row) as (_, _, _, JV):
                return JV

        try:
            with quiet(), torch.no_grad():
                if len(rows) == 1:
                    return alone(rows[0])
                state.restore()
                return list(torch.func.vmap(one, randomness="same")(*V))
        except (
            RuntimeError
        ):  # what can't be vectorised, or differentiates in its forward pass; all else fails again
            return [torch.cat(ts) for ts in zip(*map(alone, rows), strict=True)]

    def _twice(self, F: Outputs, free: list[Tensor], rows: Tensor) -> list[Tensor]:
        """`J v` as the derivative of `wᵀ J` with respect to `w`, [K, n] -> [K, *output]."""
        JV = {id(f): f.new_zeros(len(rows), *f.shape) for f in F}
        reached = [f for f in F if f.requires_grad]
        # Not at zero, where functions that take the logarithm of a gradient are singular.
        w = [v[0].requires_grad_() for v in _random(reached)]
        back = gradients_of(reached, free, w, True, create_graph=True) if reached else ()
        used = [(g, v) for g, v in zip(back, self.split(rows)) if g is not None and g.requires_grad]
        size = self._sent_together(F, len(rows))
        for start in range(0, len(rows) if used else 0, size):
            at = slice(start, start + size)
            for f, t in zip(
                reached, vjp([g for g, _ in used], w, [v[at] for _, v in used]), strict=True
            ):
                if t is not None:
                    JV[id(f)][at] = t.detach()
        return [JV[id(f)] for f in F]

    def split(self, rows: Tensor) -> list[Tensor]:  # [K, n] -> [K, *shape] for each parameter
        """The parts of several vectors, in the parameters' own dtypes."""
        rows = rows.clone() if rows.is_inference() else rows
        parts = rows.split([p.numel() for p in self.params], dim=1)
        return [
            part.reshape(len(rows), *p.shape).to(p.dtype)
            for part, p in zip(parts, self.params, strict=True)
        ]

    # ---------------------------------------------------------------------------------- the adjoint
    def check(self, batch: Batch, columns: int, graph: bool = False, forward: bool = True) -> None:
        """Compare `⟨u, J v⟩` with `⟨Jᵀ u, v⟩` for random `u` and `v`, once for each way in which `J
        v` is computed.

        And for each shape of batches: code may branch by it.

        Args:
            columns: Of the product that comes next: one, or several at once.
            graph: Whether a single tangent is carried while the graph of the backward pass is made,
                as by `ggn`.
            forward: Whether it computes `J v`. If not, and nothing can, there is nothing to compare
                with.

        Raises:
            RuntimeError: If they differ in forward mode; two backward passes may be right.
            UnsupportedError: If they differ all the same, or the model can't be differentiated
                twice.

        Cost: once for each shape, a forward pass, three backward passes, and `J v` of one or two
        vectors.
        """
        if columns > 1 and columns % self.columns == 1:  # the last one is computed by itself
            self.check(batch, 1)
        way = "several" if columns > 1 else "with graph" if graph else "alone"
        way = "twice" if self.twice else way
        kind = way, batch.num_examples, *[t.shape for t in tensors_of(batch.X)]
        if kind in self._right:
            return
        state = RandomState.now(self.risk.device)
        try:
            with self.run(batch) as (F, _, free, _):
                if not any(f.requires_grad for f in F):
                    return
                U = _random(F, _PAIRS)
                JTU = torch.zeros(
                    _PAIRS, self.risk.space.dim, dtype=self.risk.dtype, device=self.risk.device
                )
                self.back(F, free, U, JTU)
                rows = self._weighted(JTU, 1 + (way == "several"))
                if self.twice:
                    self._require_twice(F, free)
                    JV: Sequence[Tensor] = self._twice(F, free, rows)
            if not self.twice:
                state.restore()
                JV = (
                    self._with_graph(batch, rows)
                    if way == "with graph"
                    else self.forward(batch, rows)
                )
            self._require_pairs(U, JV, JTU, rows)
        except RuntimeError as error:
            # `Jᵀ u` goes back once, which the model may be able to do.
            if (
                forward
                or not self.twice
                or not (isinstance(error, _NotTwice) or _MISSING.search(str(error)))
            ):
                raise
        finally:
            state.restore()
        self._right.add(kind)

    def _with_graph(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        with self.run(batch, rows[0]) as (_, _, _, JV):
            assert JV is not None
            return JV

    def _weighted(self, JTU: Tensor, K: int) -> Tensor:
        """Random vectors `v` [K, n] in which every parameter contributes as much to `⟨Jᵀ u, v⟩` as
        any other.
        """
        sizes = [p.numel() for p in self.params]
        norms = torch.stack([part.norm() for part in JTU.split(sizes, 1)])
        weights = (norms.max() / norms).nan_to_num(1.0).clamp(1.0, _WEIGHT[self._itemsize or 8])
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(K, JTU.shape[1], generator=generator, dtype=JTU.dtype).to(JTU.device)
        return rows * weights.repeat_interleave(torch.tensor(sizes, device=JTU.device))

    def _require_pairs(
        self, U: Sequence[Tensor], JV: Sequence[Tensor], JTU: Tensor, rows: Tensor
    ) -> None:
        """Require `⟨u, J v⟩ = ⟨Jᵀ u, v⟩` for all pairs.

        Args:
            U: Vectors `u` [pairs, *output], for each output.
            JV: Products `J v` [K, *output], likewise.
            JTU: Products `Jᵀ u` [pairs, n].
            rows: Vectors `v` [K, n].
        """
        wide = torch.promote_types(JTU.dtype, torch.float32)
        U, JV = ([t.flatten(1).to(wide) for t in tensors] for tensors in (U, JV))
        one = torch.stack([u @ Jv.T for u, Jv in zip(U, JV, strict=True)]).sum(0)
        two = (JTU @ rows.T).to(wide)
        # The standard deviation of `⟨Jᵀ u, v⟩`, if `v` is random: √Σ_p |g_p|² w_p² over parameters
        # p.
        sizes = [p.numel() for p in self.params]
        parts = zip(JTU.split(sizes, 1), rows[:1].split(sizes, 1), strict=True)
        scale = (
            torch.stack([g.norm(dim=1) * v.square().mean().sqrt() for g, v in parts])
            .norm(dim=0)
            .to(wide)
        )
        # Where derivatives are zero, as before a norm that takes them away, rounding is all that is
        # left of them.
        lengths = torch.stack([u.norm(dim=1) for u in U]).norm(dim=0)
        rounding = 10 * torch.finfo(wide).eps * lengths[:, None] * rows.to(wide).norm(dim=1)
        itemsize = self._itemsize or 8
        tolerance = with_short_products(_OF_ONE_PAIR[itemsize], itemsize, self.risk.device)
        if bool(((one - two).abs() > tolerance * scale[:, None] + rounding).any()):
            raise self._not_adjoint("⟨u, J v⟩ and ⟨Jᵀ u, v⟩")

    def _require_twice(self, F: Outputs, free: Sequence[Tensor]) -> None:
        """Refuse functions whose backward pass can't be differentiated, which autograd would take
        for constants.
        """
        reached = [f for f in F if f.requires_grad]
        sent = [v[0].requires_grad_() for v in _random(reached)]
        gradients = gradients_of(reached, free, sent, True, create_graph=True)
        require_differentiable([g for g in gradients if g is not None], F)

    def require_adjoint(self, rows: Tensor, products: Tensor, energy: Tensor) -> None:
        """Require `⟨M J v, J v⟩ = ⟨v, Jᵀ M J v⟩` for vectors and products [K, n]; what is not
        finite passes.

        Raises:
            RuntimeError: If they differ in forward mode; two backward passes may be right.
            UnsupportedError: If they differ all the same.
        """
        one, two = energy.to(rows), (rows * products).sum(1)
        room = rows.norm(dim=1) * products.norm(dim=1) / rows.shape[1] ** 0.5
        small = torch.finfo(one.dtype).tiny  # below, numbers have few digits
        if bool(
            ((one - two).abs() > _TOLERANCE[self._itemsize or 8] * (one.abs() + room) + small).any()
        ):
            raise self._not_adjoint("⟨M J v, J v⟩ and ⟨v, Jᵀ M J v⟩")

    def _not_adjoint(self, sides: str) -> Exception:
        return (UnsupportedError if self.twice else RuntimeError)(
            f"The model's backward pass is not the derivative of its forward pass: {sides} differ. "
            "Does a hook, or a backward pass written by hand, clamp, normalise or perturb "
            "gradients, or a custom operator lack derivatives? Leave that out while the curvature "
            "is computed."
        )


class _NotTwice(UnsupportedError):
    """A model that can't be differentiated twice."""


def require_differentiable(gradients: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Refuse gradients that autograd takes for constants where it can't differentiate them.

    A function under `once_differentiable` leaves a node that raises in `backward()`, and is skipped
    by `torch.autograd.grad`.

    Args:
        gradients: With a graph, of a backward pass whose vectors require a gradient: else there is
            no such node.
        outputs: What they are gradients of, whose graph tells names.

    Raises:
        UnsupportedError: Naming the functions.

    Cost: a walk through the graph of the gradients.
    """
    if not any(node.name() == "torch::autograd::Error" for node in postorder(nodes_of(gradients))):
        return
    functions = [getattr(node, "_forward_cls", None) for node in postorder(nodes_of(outputs))]
    once = [
        f.__qualname__ for f in functions if f is not None and hasattr(f.backward, "__wrapped__")
    ]
    names = f": {', '.join(dict.fromkeys(once))}" if once else ""
    raise _NotTwice(
        "The model or the loss uses a function that can be differentiated once, and has no second "
        f"derivative (`once_differentiable`){names}. Write its backward pass with operations of "
        "PyTorch, or use an operator that goes back once, as KFACLinearOperator."
    )


def _random(tensors: Sequence[Tensor], K: int = 1) -> list[Tensor]:
    """Random vectors [K, *shape] for each of some tensors, always the same; small enough for
    float16.
    """
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(K, *t.shape, generator=generator).mul_(2.0**-4).to(t) for t in tensors]


def vjp(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    last: bool = False,
) -> list[Tensor | None]:
    """Vector-Jacobian products of several vectors `[K, *output]`: `[K, *input]`, None where nothing
    depends.

    Args:
        last: Whether a single vector may free what the graph saved.

    Cost: one backward pass, vectorised over K; a single vector takes the plain way, which is
    faster.
    """
    if len(vectors[0]) == 1:
        found = gradients_of(outputs, inputs, [v[0] for v in vectors], not last)
        return [None if g is None else g[None] for g in found]
    try:
        with quiet():
            options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
            return list(torch.autograd.grad(outputs, inputs, vectors, **options))
    except RuntimeError:  # operations that can't be vectorised; all else fails again
        rows = [
            vjp(outputs, inputs, [v[k : k + 1] for v in vectors]) for k in range(len(vectors[0]))
        ]
    columns = zip(*rows, strict=True)
    return [
        None if column[0] is None else torch.cat([g for g in column if g is not None])
        for column in columns
    ]
