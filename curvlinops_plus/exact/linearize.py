"""Products with the Jacobian of a model's output, batch by batch, by forward and backward differentiation.

`J v` is forward-mode differentiation: each operation carries a tangent along. That costs about one forward pass more,
and the graph of the same forward pass serves a backward pass after it. Where an operation has no forward mode, or where
it would be wrong (`torch.no_grad()` inside a model stops gradients, but not tangents), `J v` is the derivative of
`wᵀ J` with respect to `w` instead, by two backward passes. Which of the two is right for a model is found out once per
operator, on the first batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.exact.double_backward import naming_operations, plain_attention, refuse_once_differentiable, tried
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.reading import Batch

__all__ = [
    "CHUNK_BYTES",
    "FunctionModule",
    "Linearizer",
    "Outputs",
    "checked_chunk_size",
    "pull",
    "random_state",
    "set_random_state",
]

T = TypeVar("T")

# Columns are vectorised in pieces whose copies of the largest intermediate result stay below this many bytes.
CHUNK_BYTES = 2**28


class _Watch(TorchFunctionMode):
    """Sees every operation of a forward pass, and puts right what forward mode would do wrong.

    Attributes:
        largest: Numbers in the largest result.
        stopped: Whether a tangent came out of an operation that keeps no gradient: forward mode ignores `no_grad`.
        padded: Whether a table with `padding_idx` was read: forward mode ignores that, too; not while we watch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.stopped, self.padded = 1, False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._embedded(*args, **(kwargs or {})) if func is embedding else func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel())
                if not torch.is_grad_enabled() and forward_ad.unpack_dual(t).tangent is not None:
                    self.stopped = True
        return out

    def _embedded(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any) -> Any:
        out = embedding(input, weight, None, *rest, **more)
        if padding_idx is None:
            return out
        self.padded = True
        return torch.where((input == padding_idx % len(weight))[..., None], out.detach(), out)


Outputs = Sequence[Tensor]
Read = Callable[[nn.Module, Batch], tuple[Outputs, Any]]
# From the outputs, and what was read beside them, a linear function of vectors [K, *output], one for each output.
Linear = Callable[[Outputs, Any], Callable[[list[Tensor]], T]]


class Linearizer:
    """Products with the Jacobian of what a model returns, batch by batch.

    Args:
        risk: Model, parameters and data.
        read: `read(model, batch)` runs the model and returns the tensors that are differentiated, and anything else.
        chunk_size: Columns that are computed together. Default: as many as keep within 256 MiB of copies.

    Raises:
        ValueError: If `chunk_size` is less than one.
    """

    def __init__(self, risk: EmpiricalRisk, read: Read, chunk_size: int | None = None) -> None:
        self.risk, self.read, self.chunk_size = risk, read, checked_chunk_size(chunk_size)
        self.keys = list(risk.params)
        self._largest = 0  # numbers in the largest intermediate result; 0 asks to watch the next forward pass
        self._stopped = False  # whether a tangent came out of an operation under `no_grad` then
        self._padded = False  # whether a table with `padding_idx` was read
        self._forward: bool | None = None  # whether forward mode is right; None before it was tried
        self._shared = True  # whether the graph of a forward pass with tangents serves the backward pass
        self._why: str | None = None  # what speaks against forward mode

    # ------------------------------------------------------------------------------------------------------ products
    def push(self, batch: Batch, rows: Tensor, left: Linear[Tensor]) -> Tensor:
        """`L J v` for several vectors of parameters: [K, n] -> [K, m].

        Args:
            batch: The batch.
            rows: The vectors.
            left: Makes the product [K, *output] -> [K, m] with `L`.

        Cost: one forward pass with tangents for a single vector, another one without for several.
        """
        with self._context():
            self._try_forward(batch)
            pieces = rows.split(self._columns())
            if not self._forward:

                def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
                    product = left([f.detach() for f in F], extra)
                    return torch.cat([product(self._push_twice(F, free, piece)) for piece in pieces])

                return self._at(batch, inside)
            with torch.no_grad():
                if len(rows) == 1:
                    return self._at_tangent(batch, rows, lambda F, extra, JV, _: left(F, extra)(JV))
                state = random_state(self.risk.device)
                product = self._at(batch, lambda F, extra, _: left(F, extra))
                return torch.cat([product(self._push_forward(batch, piece, state)) for piece in pieces])

    def pull(self, batch: Batch, rows: Callable[[Outputs, Any], list[Tensor]]) -> Tensor:
        """`Jᵀ u` for several vectors of the outputs' shapes: [K, *output] -> [K, n].

        Args:
            batch: The batch.
            rows: Makes the vectors [K, *output], one tensor for each output.

        Cost: one forward pass, and one backward pass for each vector.
        """

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
            with torch.no_grad():
                vectors = rows([f.detach() for f in F], extra)
            pieces = zip(*(v.split(self._columns()) for v in vectors), strict=True)
            return torch.cat([self._pulled(F, free, piece, len(piece[0])) for piece in pieces])

        with self._context():
            return self._at(batch, inside)

    def sandwich(self, batch: Batch, rows: Tensor, middle: Linear[Sequence[Tensor | None]]) -> Tensor:
        """`Jᵀ M J v` for several vectors, [K, n] -> [K, n].

        Args:
            batch: The batch.
            rows: The vectors.
            middle: Makes the product [K, *output] -> [K, *output] with `M` from the outputs, which are still part of a
                graph; None for an output without a share.

        Cost: one forward pass with tangents and one backward pass for a single vector, whose graph they share.
        """
        with self._context():
            self._try_forward(batch)
            if self._forward and self._shared and len(rows) == 1:
                return self._at_tangent(
                    batch, rows, lambda F, extra, JV, free: self._pulled(F, free, middle(F, extra)(JV), 1)
                )
            state, pieces = random_state(self.risk.device), rows.split(self._columns())

            def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor:
                product, found = middle(F, extra), []
                for piece in pieces:
                    forward = self._forward
                    JV = self._push_forward(batch, piece, state) if forward else self._push_twice(F, free, piece)
                    found.append(self._pulled(F, free, product(JV), len(piece)))
                return torch.cat(found)

            return self._at(batch, inside)

    def matrix(self, batch: Batch, middle: Linear[Sequence[Tensor | None]]) -> Tensor:
        """`Jᵀ M J`, [n, n]: from the rows of `J` if these are fewer than parameters, else column by column.

        Args:
            batch: The batch.
            middle: As for `sandwich`.

        Cost: one forward pass, and a backward pass for each number in the outputs; or for each parameter as `sandwich`.
        """
        n = self.risk.space.dim

        def inside(F: Outputs, extra: Any, free: list[Tensor]) -> Tensor | None:
            sizes = [f.numel() for f in F]
            if sum(sizes) >= n:
                return None
            product, rows = middle(F, extra), []
            for k, f in enumerate(F):
                for unit in torch.eye(sizes[k], dtype=f.dtype, device=f.device).split(self._columns()):
                    vectors = [unit.view(-1, *f.shape) if j == k else None for j in range(len(F))]
                    rows.append(self._pulled(F, free, vectors, len(unit)))
            J = torch.cat(rows)  # [m, n]
            columns = [part.T.reshape(n, *f.shape).to(f.dtype) for part, f in zip(J.split(sizes), F, strict=True)]
            middled = [
                torch.zeros_like(V) if MV is None else MV for V, MV in zip(columns, product(columns), strict=True)
            ]
            return torch.cat([MV.flatten(1).to(J.dtype) for MV in middled], 1) @ J

        state = random_state(self.risk.device)
        with self._context():
            found = self._at(batch, inside)
        if found is not None:
            return found
        set_random_state(self.risk.device, state)
        return self.sandwich(batch, torch.eye(n, dtype=self.risk.dtype, device=self.risk.device), middle)

    # ------------------------------------------------------------------------------------------------------- running
    @contextmanager
    def _context(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.enable_grad(), plain_attention():
            yield

    def _call(self, values: Sequence[Tensor], function: Callable[[nn.Module], T]) -> T:
        """`function(model)` with other values of the parameters."""
        return self.risk.at(dict(zip(self.keys, values, strict=True)), function)

    def _run(self, model: nn.Module, batch: Batch) -> tuple[Outputs, Any]:
        with torch.compiler.set_stance("force_eager"):
            if self._largest and not self._padded:
                return self.read(model, batch)
            with _Watch() as watch:
                found = self.read(model, batch)
        self._largest, self._padded = max(self._largest, watch.largest), self._padded or watch.padded
        self._stopped = watch.stopped and torch.is_grad_enabled()
        return found

    def _free(self) -> list[Tensor]:
        return [p.detach().requires_grad_() for p in self.risk.params.values()]

    def _at(self, batch: Batch, function: Callable[[Outputs, Any, list[Tensor]], T]) -> T:
        """`function(F, extra, parameters)` while the model has these parameters; `F` has a graph."""
        free = self._free()
        return self._call(free, lambda model: function(*self._run(model, batch), free))

    def _at_tangent(self, batch: Batch, row: Tensor, function: Callable[..., T]) -> T:  # row [1, n]
        """`function(F, extra, J v, parameters)`: one forward pass, whose graph is there for the backward pass."""
        free = self._free()

        with ExitStack() as level:
            level.enter_context(forward_ad.dual_level())
            duals = [forward_ad.make_dual(p, t[0]) for p, t in zip(free, self._split(row), strict=True)]

            def inside(model: nn.Module) -> T:
                with level:  # left before the backward pass, which would drag the tangents along
                    F, extra = self._run(model, batch)
                    JV = [t.detach()[None] for t in _tangents(F)]
                return function(F, extra, JV, free)

            return self._call(duals, inside)

    # ------------------------------------------------------------------------------------------------- forward mode
    def _try_forward(self, batch: Batch) -> None:
        """Find out, once, whether forward mode is possible and right: does it agree with a backward pass?"""
        if self._forward is not None:
            return
        device = self.risk.device
        generator, state = torch.Generator().manual_seed(0), random_state(device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=self.risk.dtype).to(device)

        v = normal(1, self.risk.space.dim)

        def agrees(F: Outputs, extra: Any, JV: list[Tensor], free: list[Tensor]) -> bool:
            JV = [t.to(v.dtype) for t in JV]
            norm = torch.stack([t.norm() for t in JV]).norm()
            u = [t / norm for t in JV] if bool((norm > 0) & norm.isfinite()) else [normal(*t.shape) for t in JV]
            back = self._pulled(F, free, u, 1)
            if not bool(back.isfinite().all()):
                return True  # nothing to compare, whichever way
            # <u, J v> from both sides. As v is random, rounding adds up to little; where it is much, the other way is
            # slower and never wrong.
            eps = max(torch.finfo(t.dtype).eps for t in (*F, *free))
            return bool(((back * v).sum() - norm).abs() <= min(10 * eps**0.5, 0.1) * torch.maximum(norm, back.norm()))

        try:
            self._largest = 0
            with warnings.catch_warnings():  # PyTorch loads its own rules of forward mode at first use
                warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
                right = self._at_tangent(batch, v, agrees)
        except CheckpointError:  # the forward pass that it repeats has no tangents
            self._shared = False
            set_random_state(device, state)
            right = self._at(batch, lambda F, extra, free: agrees(F, extra, self._push_forward(batch, v, state), free))
        except RuntimeError as error:
            right, self._why = False, str(error).splitlines()[0]
        finally:
            set_random_state(device, state)
        if right and not self._stopped:
            self._forward = True
            return
        self._why = self._why or "it disagrees with a backward pass (torch.no_grad() or a hook inside the model?)."

        def twice(F: Outputs, extra: Any, free: list[Tensor]) -> bool:
            for f in F:
                refuse_once_differentiable(f)
            return agrees(F, extra, self._push_twice(F, free, v), free)

        if not self._at(batch, twice):
            raise UnsupportedError(
                "The derivative of the model by two backward passes disagrees with that by one: a hook of the model or "
                f"a backward pass written by hand is not linear in the gradient.{tried(self._why)}"
            )
        self._forward = False
        set_random_state(device, state)

    def _push_forward(self, batch: Batch, rows: Tensor, state: Any) -> list[Tensor]:
        """`J v` without a graph, [K, n] -> [K, *output]; random numbers are those of the forward pass at `state`."""
        after = random_state(self.risk.device)
        values, V = tuple(p.detach() for p in self.risk.params.values()), self._split(rows)

        def function(*parameters: Tensor) -> tuple[Tensor, ...]:
            return tuple(self._call(parameters, lambda model: self._run(model, batch)[0]))

        def one(*tangents: Tensor) -> tuple[Tensor, ...]:
            return torch.func.jvp(function, values, tangents)[1]

        def alone(k: int) -> list[Tensor]:
            set_random_state(self.risk.device, state)
            with forward_ad.dual_level():
                return _tangents(function(*(forward_ad.make_dual(p, v[k]) for p, v in zip(values, V, strict=True))))

        try:
            with torch.no_grad():
                if len(rows) > 1:
                    try:
                        set_random_state(self.risk.device, state)
                        return list(torch.func.vmap(one, randomness="same")(*V))
                    except RuntimeError:  # an operation that can't be vectorised; all else fails again
                        pass
                return [torch.stack(ts) for ts in zip(*(alone(k) for k in range(len(rows))), strict=True)]
        finally:
            set_random_state(self.risk.device, after)

    # ------------------------------------------------------------------------------------------------- reverse mode
    def _push_twice(self, F: Outputs, free: list[Tensor], rows: Tensor) -> list[Tensor]:
        """`J v` as the derivative of `wᵀ J` with respect to `w`, [K, n] -> [K, *output]."""
        w = [torch.zeros_like(f, requires_grad=True) for f in F]
        reached = [i for i, f in enumerate(F) if f.requires_grad]
        JV = [f.new_zeros(len(rows), *f.shape) for f in F]
        with naming_operations(self._why):
            outputs, ws = [F[i] for i in reached], [w[i] for i in reached]
            back = torch.autograd.grad(outputs, free, ws, create_graph=True, allow_unused=True) if reached else ()
            used = [(g, v) for g, v in zip(back, self._split(rows)) if g is not None and g.requires_grad]
            if used:
                for i, t in zip(reached, pull([g for g, _ in used], ws, [v for _, v in used]), strict=True):
                    JV[i] = JV[i] if t is None else t.detach()
        return JV

    def _pulled(self, F: Outputs, free: list[Tensor], vectors: Sequence[Tensor | None], K: int) -> Tensor:
        """`Jᵀ u` for K vectors, [K, *output] -> [K, n]."""
        sent = [(f, v.to(f.dtype)) for f, v in zip(F, vectors, strict=True) if v is not None and f.requires_grad]
        risk = self.risk
        parts = pull([f for f, _ in sent], free, [v for _, v in sent]) if sent else [None] * len(free)
        joined = [
            torch.zeros(K, p.numel(), dtype=risk.dtype, device=risk.device)
            if part is None
            else part.reshape(K, -1).to(risk.dtype)
            for part, p in zip(parts, free, strict=True)
        ]
        return torch.cat(joined, 1)

    # ------------------------------------------------------------------------------------------------------- helpers
    def _split(self, rows: Tensor) -> list[Tensor]:
        """[K, n] to [K, *shape] for each parameter, in the parameters' own dtypes."""
        space, params = self.risk.space, self.risk.params.values()
        rows = rows.clone() if rows.is_inference() else rows
        parts = rows.split(list(space.sizes), dim=1)
        return [part.reshape(len(rows), *p.shape).to(p.dtype) for part, p in zip(parts, params, strict=True)]

    def _columns(self) -> int:
        """Columns that are computed together."""
        # Forward mode and backward pass hold a few results of each column at a time.
        return self.chunk_size or max(1, CHUNK_BYTES // (8 * (self.risk.space.dim + 4 * self._largest)))


def checked_chunk_size(chunk_size: int | None) -> int | None:
    """The number of columns that are computed together, if it is one.

    Raises:
        ValueError: If not.
    """
    whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is not None and not (whole and chunk_size >= 1):
        raise ValueError(
            f"chunk_size={chunk_size!r} must be an integer of at least 1, the number of columns computed together."
        )
    return chunk_size


def _tangents(outputs: Outputs) -> list[Tensor]:
    found = [forward_ad.unpack_dual(f) for f in outputs]
    return [torch.zeros_like(f) if t is None else t for f, t in found]


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """State of the global generators that a forward pass may draw from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Go on from a state of the global generators."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def pull(outputs: Sequence[Any], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor | None]:
    """Vector-Jacobian products of several vectors [K, *output] at once; one vector takes the plain way, which is
    faster.
    """
    if len(vectors[0]) == 1:
        found = torch.autograd.grad(outputs, inputs, [v[0] for v in vectors], retain_graph=True, allow_unused=True)
        return [None if g is None else g[None] for g in found]
    try:
        return list(
            torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, is_grads_batched=True, allow_unused=True)
        )
    except RuntimeError:  # operations that can't be vectorised (group norm's second derivative); all else fails again
        rows = [pull(outputs, inputs, [v[k : k + 1] for v in vectors]) for k in range(len(vectors[0]))]
    columns = zip(*rows, strict=True)
    return [None if column[0] is None else torch.cat([g for g in column if g is not None]) for column in columns]


class FunctionModule(nn.Module):
    """A function `(params, X) -> outputs` as a module that holds the parameters.

    Args:
        function: The function; its parameters may be replaced as those of any module.
        params: Values of the parameters, by key.

    Raises:
        ValueError: If `params` is no mapping.
    """

    def __init__(self, function: Callable[..., Any], params: Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        super().__init__()
        if not isinstance(params, Mapping):
            raise ValueError(
                "A model that is a function needs `params` as a dict, and is called as model_func(params, X). Pass "
                "dict(model.named_parameters()) or the like, or a torch.nn.Module."
            )
        self.function, self.keys = function, list(params)
        for index, p in enumerate(params.values()):
            own = p if isinstance(p, nn.Parameter) else nn.Parameter(p.detach(), requires_grad=False)
            self.register_parameter(f"p{index}", own)

    def forward(self, X: Any) -> Any:
        """The function's result with the module's parameters."""
        return self.function({key: getattr(self, f"p{index}") for index, key in enumerate(self.keys)}, X)
