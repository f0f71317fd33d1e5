"""Whether `J v` may be computed by forward-mode differentiation of a model, found out by numbers.

Forward mode is faster, but where an operation has no forward mode it is not possible, and `torch.no_grad()` inside a
model, which stops gradients but not tangents, makes it wrong. Which is the case is determined on the first batch: the
numbers of a product `Jᵀ M J v` tell it themselves, others need a check of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.batched import agree, is_generic, split_rows, vjp
from curvlinops_plus.exact.double_backward import only_rounding, refuse_once_differentiable, tried
from curvlinops_plus.exact.linear_passes import is_by_hand, refuse_nonlinear
from curvlinops_plus.exact.model_passes import ModelPasses, OutputProduct, Outputs, jvp_double_backward
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.graph import postorder, raise_unreached


class OtherGraph(Exception):
    """A forward pass took another way than those for which forward mode was tried."""

    def __init__(self, graph: int) -> None:
        self.graph = graph


class ForwardMode:
    """Whether forward mode is right for a model.

    Args:
        passes: What runs the model.

    Attributes:
        right: Whether it is; None before it was tried.
        shared: Whether the graph of a forward pass with tangents serves the backward pass.
        graphs: Of forward passes for which it was tried.
        why: The reason why it is not used.
    """

    def __init__(self, passes: ModelPasses) -> None:
        self.passes = passes
        self.right: bool | None = None
        self.shared = True
        self.graphs: set[int] = set()
        self.why: str | None = None
        self._linear: set[int] = set()  # graphs through which backward passes were found to be linear

    def require_tried(self, F: Outputs) -> None:
        """Refuse forward mode where the model takes another way than when it was tried: parts may have no graph there.

        Raises:
            OtherGraph: If the graph was not seen.
        """
        if self.right and ((graph := self._graph(F)) not in self.graphs or self.passes.stopped):
            raise OtherGraph(graph)

    def product_that_tells(self, batch: Batch, rows: Tensor, output_product: OutputProduct) -> Tensor | None:
        """`Jᵀ M J v` by forward mode, if its own numbers say that forward mode is right; else None, and nothing is
        known.

        `<M J v, J v> = <v, Jᵀ M J v>` holds for any `M`, with `J` from forward mode on the left, and from a backward
        pass on the right.
        """
        if len(rows) > 1 or not is_generic(rows[0], self.passes.params):
            return None
        state, self.passes.largest = RandomState.now(self.passes.risk.device), 0

        def product(F: Outputs, extra: Any, JV: list[Tensor], free: list[Tensor]) -> Tensor | None:
            MJV = [Mv for Mv in output_product(F, extra)(JV) if Mv is not None]
            if len(MJV) < len(JV):
                return None
            if is_by_hand(F, self.passes.hooked):  # vectors of other lengths may leave something else
                return None
            back = self.passes.vjp(F, free, MJV, 1, last=True)
            if not agree([rows], JV, MJV, [back], [*F, *free]):
                return None
            self.graphs.add(self._graph(F))
            return back

        try:
            with _first_use_of_forward_mode():
                found = self.passes.at_tangent(batch, rows, product)
        except UnsupportedError:
            raise
        except RuntimeError:
            found = None
        if found is not None and not self.passes.stopped:
            self.right = True
            return found
        state.restore()
        return None

    def require_linear(self, F: Outputs, free: list[Tensor]) -> None:
        """Refuse backward passes that are not linear. Once for each graph, and only where it does not make this clear.

        Args:
            F: Outputs.
            free: Parameters.

        Raises:
            UnsupportedError: As `refuse_nonlinear`, for two random vectors.
        """
        if not is_by_hand(F, self.passes.hooked) or (graph := self._graph(F)) in self._linear:
            return
        generator = torch.Generator().manual_seed(0)
        pairs = [torch.randn((2, *f.shape), generator=generator, dtype=torch.float64).to(f) for f in F]

        def send(a: float, b: float) -> list[Tensor]:
            return _back(F, free, [(a * v + b * w)[None] for v, w in pairs])

        if refuse_nonlinear(send, F, max(torch.finfo(t.dtype).eps for t in (*F, *free))):
            self._linear.add(graph)

    def _graph(self, F: Outputs) -> int:
        """What a graph is like, whether or not its parameters carry tangents, of which they are a view then."""
        names = []
        for node, below in postorder([f.grad_fn for f in F]):
            of_parameter = len(below) == 1 and not below[0].next_functions
            if not (of_parameter and node.name() in ("ViewBackward0", "AliasBackward0")):
                names.append(node.name())
        return hash((self.passes.hooked, *names))

    def choose(self, batch: Batch) -> None:
        """Determine whether forward mode is possible and right: does it agree with a backward pass?"""
        device = self.passes.risk.device
        generator, state = torch.Generator().manual_seed(0), RandomState.now(device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=self.passes.risk.dtype).to(device)

        v = normal(1, self.passes.risk.space.dim)

        def agrees(F: Outputs, extra: Any, JV: list[Tensor], free: list[Tensor]) -> bool:
            self.graphs.add(self._graph(F))
            right = _agrees(F, free, split_rows(v, free), JV, normal)
            if right:
                self.require_linear(F, free)
            return right

        try:
            self.passes.largest = 0
            with _first_use_of_forward_mode():
                right = self.passes.at_tangent(batch, v, agrees)
        except CheckpointError:  # the forward pass that it repeats has no tangents
            self.shared = False
            state.restore()
            right = self.passes.at(
                batch, lambda F, extra, free: agrees(F, extra, self.passes.jvp_forward(batch, v, state), free)
            )
        except UnsupportedError:
            raise
        except RuntimeError as error:
            right, self.why = False, str(error).splitlines()[0]
        finally:
            state.restore()
        if right and not self.passes.stopped:
            self.right = True
            return
        self.why = self.why or "it disagrees with a backward pass (torch.no_grad() or a hook inside the model?)."

        def twice(F: Outputs, extra: Any, free: list[Tensor]) -> bool:
            for f in F:
                refuse_once_differentiable(f)
            return agrees(F, extra, jvp_double_backward(F, free, v, self.why), free)

        if not self.passes.at(batch, twice):
            raise UnsupportedError(
                "The derivative of the model by two backward passes disagrees with that by one: a hook of the model or "
                f"a backward pass written by hand is not linear in the gradient.{tried(self.why)}"
            )
        self.right = False
        state.restore()


@contextmanager
def _first_use_of_forward_mode() -> Iterator[None]:
    """Context without the warning that PyTorch gives when it loads its own rules of forward mode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
        yield


def _agrees(
    F: Outputs, free: list[Tensor], v: list[Tensor], JV: list[Tensor], normal: Callable[..., Tensor]
) -> bool:  # v [1, *shape] for each parameter
    """Whether `<u, J v> = <Jᵀ u, v>`, with a `u` along `J v`."""
    norm = _norm(JV)
    if norm > 0 and not any(f.requires_grad for f in F):
        raise_unreached()
    u = [t / norm for t in JV] if bool((norm > 0) & norm.isfinite()) else [normal(*t.shape) for t in JV]
    back = _back(F, free, u)
    length = _norm(back)
    if not bool(length.isfinite()):
        return True  # nothing to compare, whichever way
    # As v is random, rounding errors hardly add up; where they do, two backward passes are slower, and right.
    size, eps = torch.maximum(norm, length), max(torch.finfo(t.dtype).eps for t in (*F, *free))
    inner = torch.stack([g.flatten().dot(t.flatten()).to(norm.dtype) for g, t in zip(back, v, strict=True)]).sum()
    if bool((inner - norm).abs() <= min(10 * eps**0.5, 0.1) * size):
        return True
    # Or the derivative is zero, as that of a bias in front of a norm, and rounding is all that is left.
    small = bool(size <= eps**0.5 * _norm(F))
    return small and only_rounding(_flat(back), lambda: _flat(_back(F, free, [3 * t for t in u])) / 3)


def _back(F: Outputs, free: list[Tensor], u: list[Tensor]) -> list[Tensor]:
    """`Jᵀ u`, in parts: the whole would be another copy."""
    sent = [(f, t.to(f.dtype)) for f, t in zip(F, u, strict=True) if f.requires_grad]
    parts = vjp([f for f, _ in sent], free, [t for _, t in sent]) if sent else [None] * len(free)
    return [torch.zeros_like(p)[None] if part is None else part for part, p in zip(parts, free, strict=True)]


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t.detach()).double() for t in tensors]))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten().double() for t in tensors])
