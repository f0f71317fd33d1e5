"""What tests of several folders use: seeded random numbers, matrices with known eigenvalues, a law of affine rules,
and the memory that something takes.

Problems and their exact twin are in `cases.py` and `reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from curvlinops_plus import UnsupportedError

F64 = torch.float64


class Written(nn.Module):
    """A network written as a function of its modules, parameters and buffers."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def seeded(seed: int = 0) -> Generator:
    """A generator of its own, so that the global random state is not touched."""
    return Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, dtype=F64, generator=seeded(seed))


def uniforms(seed: int = 0) -> Callable[..., Tensor]:
    """A source of uniform numbers in float64."""
    generator = seeded(seed)
    return lambda *shape: torch.rand(*shape, dtype=F64, generator=generator)


def squared(B: Tensor) -> Tensor:
    """Columns [K, N, R, C] -> Σ_k b_k b_kᵀ [N, R, C, C]."""
    return torch.einsum("knrc,knrd->nrcd", B, B)


def with_eigenvalues(values: Any, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    values = torch.as_tensor(values, dtype=F64)
    Q = torch.linalg.qr(normal(len(values), len(values), seed=seed))[0]
    A = Q * values @ Q.T
    return (A + A.T) / 2


def peak(run: Callable[[], object]) -> int:
    """The largest number of bytes that are allocated at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        run()
    events, found = [*watch.profiler.kineto_results.experimental_event_tree()], []
    while events:
        event = events.pop()
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        events += event.children
    alive: dict[int, int] = {}
    now = most = 0
    for _, pointer, size in sorted(found):
        if size > 0:
            alive[pointer] = size
        now += size if size > 0 else -alive.pop(pointer, 0)
        most = max(most, now)
    return most


def check_fast_paths(
    rule: Any, module: Any, x: Tensor, g: Tensor, dtype: torch.dtype = F64, tolerance: float = 1e-11
) -> None:
    """What a rule computes without its rows is what plain sums over its rows `a` and `b` give."""
    a, b = rule.inputs(module, x), rule.grads(module, g)
    assert isinstance(a, Tensor)
    A, total, count = rule.input_gram(module, x)
    assert {a.dtype, b.dtype, A.dtype, total.dtype} == {dtype}
    assert b.shape[1:3] == a.shape[:2]
    close = {"rtol": tolerance, "atol": 100 * tolerance}
    torch.testing.assert_close(A, torch.einsum("bs...i,bs...j->...ij", a, a), **close)
    torch.testing.assert_close(total, a.sum((0, 1)), **close)
    assert count == a.shape[0] * a.shape[1]
    for stacked, rows in (rule.stacked_inputs(module, x), a), (rule.stacked_grads(module, g), b):
        if stacked is not None:
            torch.testing.assert_close(stacked, rows.reshape(-1, rows.shape[-1]), **close)
    torch.testing.assert_close(rule.mean_inputs(module, x), a.mean(1), **close)
    torch.testing.assert_close(rule.grad_gram(module, g), torch.einsum("vbs...o,vbs...p->...op", b, b), **close)


def refuses_cdist(words: str) -> AbstractContextManager[object]:
    """`pytest.raises` where `torch.cdist` has no second derivative; it has one since PyTorch 2.15."""
    x = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(torch.cdist(x, x + 1).sum(), x, create_graph=True)
    try:
        torch.autograd.grad(g.sum(), x)
    except RuntimeError:
        return pytest.raises(UnsupportedError, match=words)
    return nullcontext()
