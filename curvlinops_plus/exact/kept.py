"""Linearisations that stay between products: a product needs no forward pass then.

Of a batch the graph of the outputs `F` is kept, and that of `Jᵀ w` as a function of `w`. `J v` is the derivative of the
latter, `Jᵀ M J v` a backward pass through the former. That is less work than a forward pass with tangents and a
backward pass, but for convolutions, whose second derivatives are slow. Memory is bounded, and nothing is used again
unless model and data are proved to be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from curvlinops_plus.exact.batched import agree, is_generic, join_rows, split_rows
from curvlinops_plus.exact.kept_graph import KeptGraph, kept_graph
from curvlinops_plus.exact.model_passes import OutputProduct, Outputs
from curvlinops_plus.exact.program import Program, Unclear, fingerprint
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.graph import postorder
from curvlinops_plus.risk.risk import checked_bytes

#: Memory in which linearisations stay by default: none. Whoever asks for it says that the model is a function.
KEPT_BYTES = 0

_SIMPLE = (bool, int, float, str, type(None))


@dataclass(eq=False)
class _Linearization:
    """The linearisation of one batch.

    Attributes:
        batch: The batch, whose tensors are shared with the data.
        prints: Their fingerprints.
        extra: What was read beside the outputs.
        graph: What products are computed from.
        program: What the forward pass did.
    """

    batch: Batch
    prints: list[Any]
    extra: Any
    graph: KeptGraph
    program: Program


class KeptLinearizations:
    """Products from linearisations, which stay for later products with the same model and data.

    They are made in the second of two products with the same parameters. One is used again only if the parameters hold
    the same numbers, the batch is equal, and the forward pass is proved to compute the same, see `Program`; else all
    are dropped.

    Args:
        risk: Model, parameters and data; the matrix of every loss is known from the output.
        read: As in `Linearizer`.
        max_bytes: The largest memory that all that stay may hold, without tensors of the model and lists of data.

    Raises:
        ValueError: If `max_bytes` is no integer of at least 0.
    """

    def __init__(self, risk: EmpiricalRisk, read: Callable[[nn.Module, Batch], Any], max_bytes: int) -> None:
        self.risk, self.read, self.max_bytes = risk, read, checked_bytes(max_bytes, "products")
        self._forget()

    def _forget(self) -> None:
        self._kept: dict[int, _Linearization] = {}
        self._held = 0  # bytes
        self._numbers: list[Any] | None = None  # fingerprints of the parameters in the product before
        self._generic: bool | None = None  # whether the vector of this product can tell whether one is right
        self._products = 1  # with these parameters, with that which found out how to differentiate
        self._patience = 1  # products before something stays
        self._useful = self.max_bytes > 0  # whether linearisations fit, and are fast, right and proved

    def __getstate__(self) -> dict[str, Any]:  # graphs can't be copied or stored
        return {"risk": self.risk, "read": self.read, "max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def product(
        self,
        index: int,
        batch: Batch,
        row: Tensor,  # [1, n]
        output_product: OutputProduct,
        numbers: int,
        total: Tensor | None = None,
    ) -> Tensor | None:
        """`Jᵀ M J v` of batch number `index` from its linearisation; None if there is none, and nothing happened.

        Args:
            index: Number of the batch in this pass; they come in order.
            batch, row: The batch and the vector.
            output_product: As in `Linearizer.ggn_product`, but that of a batch may be asked for twice.
            numbers: How many numbers operations of a forward pass return per example, about.
            total: What the product is added to, if it is not the first one; it is returned then.
        """
        if not self._useful or _in_modes():  # of the user's, which may change what functions do
            return None
        if not index:
            self._begin()
            if not self._useful:
                return None
        kept = self._kept.get(index)
        if kept is not None:
            if self._is_same(kept, batch):
                return self._at(kept.graph.free, lambda model: self._product(kept, row, output_product, total))
            self._drop()
        if not self._may_stay(batch, numbers):
            return None
        if self._generic is None:
            self._generic = is_generic(row[0], self._params)
        return self._make(index, batch, row, output_product, total) if self._generic else None

    def _product(
        self, kept: _Linearization, row: Tensor, output_product: OutputProduct, total: Tensor | None
    ) -> Tensor:
        JV = kept.graph.jvp(row)
        MJV = output_product(kept.graph.F, kept.extra)(JV)
        total = torch.zeros_like(row, dtype=self.risk.dtype) if total is None else total
        return kept.graph.add_vjp([_filled(Mv, v) for Mv, v in zip(MJV, JV, strict=True)], total)

    @property
    def _params(self) -> list[Tensor]:
        return list(self.risk.params.values())

    def _at(self, free: list[Tensor], function: Callable[[nn.Module], Any]) -> Any:
        return self.risk.at(dict(zip(self.risk.params, free, strict=True)), function)

    # --------------------------------------------------------------------------------------------------- is it the same
    def _begin(self) -> None:
        """At the beginning of a product: are the parameters those of the product before?"""
        try:
            numbers = [(fingerprint(p.detach()), p.data_ptr()) for p in self._params]  # a graph holds that memory
        except Unclear:  # parameters of a class of their own
            self._useful = False
            return
        changed = self._numbers is not None and numbers != self._numbers
        if changed or _has_hooks(self.risk.model):  # hooks, which may only watch, want to be called
            self._drop()
        self._numbers, self._products, self._generic = numbers, self._products + 1, None

    def _drop(self) -> None:
        if self._kept and self._products < self._patience + 3:
            self._patience *= 2  # making them took more than they saved
        self._kept, self._held, self._products = {}, 0, 0

    def _is_same(self, kept: _Linearization, batch: Batch) -> bool:
        try:
            return kept.graph.is_untouched and _is_same_batch(kept, batch) and self._is_repeated(kept)
        except Unclear:
            return False

    def _is_repeated(self, kept: _Linearization) -> bool:
        def follows(model: nn.Module) -> bool:
            inputs = [*kept.graph.free, *_tensors(kept.batch)]
            return kept.program.is_repeated_by(lambda: self.read(model, kept.batch)[0], inputs)

        return self._at(kept.graph.free, follows)

    # ------------------------------------------------------------------------------------------------------ making one
    def _may_stay(self, batch: Batch, numbers: int) -> bool:
        """Whether another one may stay, which holds about half of what operations return."""
        numbers *= batch.num_examples
        if self._products <= self._patience:
            return False
        fits = self._held + numbers * self.risk.dtype.itemsize // 2 <= self.max_bytes
        self._useful = fits or bool(self._kept)  # else not even the first one does
        return fits

    def _make(
        self, index: int, batch: Batch, row: Tensor, output_product: OutputProduct, total: Tensor | None
    ) -> Tensor | None:
        """The product with a new linearisation, which stays if it fits; None if it is slow, wrong or unclear."""
        state, parts = RandomState.now(self.risk.device), None
        try:
            made = self._linearize(batch)
            if made is not None:
                parts = self._checked(made, row, output_product)
        except (Unclear, RuntimeError):  # an operation that can't be differentiated twice; all else fails again
            made = None
        if made is None or parts is None:
            self._useful, self._kept, self._held = False, {}, 0
            state.restore()
            return None
        size = made.graph.bytes(self._users_tensors(index))
        if self._held + size <= self.max_bytes:
            self._kept[index] = made
        self._held = min(self._held + size, self.max_bytes)  # full: no other one is tried
        return join_rows(parts, made.graph.free, 1, self.risk.dtype, total)

    def _checked(self, made: _Linearization, row: Tensor, output_product: OutputProduct) -> list[Tensor | None] | None:
        """The parts of `Jᵀ M J v` if they are right."""

        def inside(model: nn.Module) -> list[Tensor | None] | None:
            F, free = made.graph.F, made.graph.free
            JV = made.graph.jvp(row)
            MJV = [Mv for Mv in output_product(F, made.extra)(JV) if Mv is not None]
            if len(MJV) < len(JV):
                return None
            parts = made.graph.vjp(MJV)
            return parts if agree(split_rows(row, free), JV, MJV, parts, F) else None

        return self._at(made.graph.free, inside)

    def _users_tensors(self, index: int) -> list[Tensor]:
        """Tensors that are there anyway: the model's, and the data's if they are a list."""
        model, data = self.risk.model, self.risk.data
        batch = tree_leaves(data[index]) if isinstance(data, (list, tuple)) and index < len(data) else []
        return [*model.parameters(), *model.buffers(), *(t for t in batch if isinstance(t, Tensor))]

    def _linearize(self, batch: Batch) -> _Linearization | None:
        """The linearisation of a batch, None where products from it would be slow.

        Raises:
            Unclear: If it can't be proved that another forward pass is the same.
        """
        if not _is_plain(batch):
            raise Unclear
        batch = Batch(_shared(batch.X), _shared(batch.y), batch.num_examples, batch.unpack)
        prints = [fingerprint(t) for t in _tensors(batch)]
        free = [p.detach().requires_grad_() for p in self._params]
        F, extra, program = self._forward(batch, free)
        graph = self._at(free, lambda model: kept_graph(F, free))
        if graph is None:
            return None
        made = _Linearization(batch, prints, extra, graph, program)
        if not self._is_repeated(made):
            raise Unclear
        return made

    def _forward(self, batch: Batch, free: list[Tensor]) -> tuple[Outputs, Any, Program]:
        """What `read` returns, and a program that tells everything about it."""
        read: list[tuple[Outputs, Any]] = []

        def run(model: nn.Module) -> Program:
            def forward() -> Outputs:
                read.append(self.read(model, batch))
                return read[0][0]

            modules = [one.loss for one in self.risk.losses if isinstance(one.loss, nn.Module)]
            others = [t for module in (model, *modules) for t in _held_tensors(module)]
            return Program(forward, [*free, *_tensors(batch)], others)

        state, held = RandomState.now(self.risk.device), _held_tensors(self.risk.model)
        program = self._at(free, run)
        F, extra = read[0]
        drew = state != RandomState.now(self.risk.device)
        # A tensor that a forward pass leaves in the model has to be computed.
        if drew or [*map(id, held)] != [*map(id, _held_tensors(self.risk.model))]:
            raise Unclear
        own = torch.autograd.function.BackwardCFunction  # a backward pass in a user's code, which may read anything
        if any(isinstance(node, own) for node, _ in postorder([f.grad_fn for f in F])):
            raise Unclear
        return F, extra, program


# ------------------------------------------------------------------------------------------------------------- helpers
def _filled(Mv: Tensor | None, v: Tensor) -> Tensor:
    return torch.zeros_like(v) if Mv is None else Mv


def _has_hooks(model: nn.Module) -> bool:
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    everywhere = any(getattr(nn.modules.module, f"_global_{kind}") for kind in kinds)
    return everywhere or any(getattr(m, f"_{kind}", None) for m in model.modules() for kind in kinds)


def _held_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors in attributes of modules."""
    # Where parameters are replaced they are in a dict of a type of its own, into which PyTorch does not look.
    held = ([*vars(m).values(), *m._parameters.values()] for m in model.modules())
    return [t for attributes in held for t in tree_leaves(attributes) if isinstance(t, Tensor)]


def _tensors(batch: Batch) -> list[Tensor]:
    leaves = tree_flatten((batch.X, batch.y))[0]
    return [t for t in leaves if isinstance(t, Tensor)]


def _is_plain(batch: Batch) -> bool:
    """Whether nothing is in a batch but numbers."""
    leaves = tree_flatten((batch.X, batch.y))[0]
    return all(_is_plain_tensor(x) if isinstance(x, Tensor) else isinstance(x, _SIMPLE) for x in leaves)


def _is_plain_tensor(t: Tensor) -> bool:
    return type(t) is Tensor and not vars(t) and not t.requires_grad


def _shared(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach(), tree)


def _in_modes() -> bool:
    """Whether modes are active that see every call."""
    return bool(_get_current_function_mode_stack() or _get_current_dispatch_mode_stack())


def _is_same_batch(kept: _Linearization, batch: Batch) -> bool:
    """Whether a batch is equal to the one of a linearisation, whose tensors hold what they held."""
    a, b = tree_flatten((kept.batch.X, kept.batch.y)), tree_flatten((batch.X, batch.y))
    if a[1] != b[1] or kept.batch.num_examples != batch.num_examples or kept.batch.unpack != batch.unpack:
        return False
    prints = iter(kept.prints)
    for s, t in zip(a[0], b[0], strict=True):
        if not isinstance(s, Tensor):
            if type(s) is not type(t) or s != t:
                return False
        else:
            known = next(prints)
            if not _is_plain_tensor(t) or fingerprint(t) != known:
                return False
            if t.data_ptr() != s.data_ptr() and fingerprint(s) != known:
                return False
    return True
