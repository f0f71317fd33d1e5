"""Forward mode with a graph for the backward pass, in the memory of that graph.

PyTorch keeps the tangent of each tensor that is saved for the backward pass, which does not need it. It also records
how tangents are computed, with what that saves: in softmax and norms three times as much as the model's own backward
pass needs. Both is twice to four times the memory of the graph alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdRef

# Tangents with fewer numbers stay, and cost no time.
LEAST_NUMBERS = 2**12


class PassingTangents(TorchFunctionMode):
    """While active, a tangent is freed with the last reference that the model's code has to its tensor.

    The graph then saves tensors without their tangents. Should anything read a tangent that was freed, it reads NaN.

    Args:
        kept: Tangents that are not freed: those of parameters.
        free: Whether tangents are freed; otherwise only what their computation saved.

    Attributes:
        freed: How many tangents were freed, or will be.
    """

    def __init__(self, kept: Sequence[Tensor] = (), free: bool = True) -> None:
        super().__init__()
        self.free, self.freed, self._active, self._read = free, 0, False, False
        self._kept = kept  # so that no other tensor gets the identity of one
        self._watched: dict[WeakIdRef, Tensor] = {}  # to its tangent; tensors themselves are compared by numbers
        self._alive = Counter(id(t) for t in kept)  # how many tensors have it
        self._ended: list[WeakIdRef] = []
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> PassingTangents:
        self._active = True
        if self.free:
            self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.free:
            self._hooks.__exit__(*error)
        self._active, self._kept = False, ()
        self._watched.clear()
        self._alive.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        while self._ended:
            self._end(self._watched.pop(self._ended.pop()))
        out = func(*args, **(kwargs or {}))
        for t in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(t, Tensor) and t.numel() >= LEAST_NUMBERS:
                self._watch(t)
        return out

    def missed_one(self, made: Iterable[Tensor]) -> bool:
        """Whether a tangent may have been needed after it was freed.

        Args:
            made: Tangents that came out.
        """
        # A backward pass inside of the model reads what was saved, whose tangents it takes from there.
        return self._read or not all(bool(t.isfinite().all()) for t in made)

    def _watch(self, t: Tensor) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(t):  # pyright: ignore[reportAttributeAccessIssue]
            return
        try:
            tangent = forward_ad.unpack_dual(t).tangent
        except RuntimeError:  # sparse and nested tensors
            return
        if tangent is None:
            return
        if tangent.requires_grad and not tangent._is_view():  # views follow what they are views of
            tangent.detach_()
        if not self.free:
            return
        ref = WeakIdRef(t, self._ended.append)
        before = self._watched.get(ref)
        if before is tangent:  # an operation that returns its input
            return
        self._watched[ref] = tangent
        self.freed += 1
        self._alive[id(tangent)] += 1
        if before is not None:
            self._end(before)
        elif t._is_view() and t._base is not None:  # a function may have made it inside; it ends with its last view
            self._watch(t._base)

    def _end(self, tangent: Tensor) -> None:
        """Free the tangent of a tensor that ended; tensors that live have others, also of the same memory."""
        self._alive[id(tangent)] -= 1
        if not self._alive[id(tangent)]:
            tangent.data = tangent.new_full((), torch.nan).expand(tangent.shape)

    # A graph that holds other tensors of the same memory lets those of the model's code end.
    def _pack(self, t: Tensor) -> tuple[Tensor, int]:
        if self._active and t.numel() >= LEAST_NUMBERS:  # functions don't return what they only make on their way
            self._watch(t)
        return t.detach(), t._version

    def _unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        t, version = packed
        self._read |= self._active
        if t._version != version:  # PyTorch doesn't look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {[*t.shape]} is at version {t._version}; expected version {version} instead."
            )
        return t
