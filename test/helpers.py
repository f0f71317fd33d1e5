"""What tests of several folders use: seeded random numbers, matrices with known eigenvalues, a law
of affine rules, and a check that nothing of the user's was touched.

Problems and their exact twin are in `cases.py` and `reference.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from curvlinops_plus import LinearOperator, UnsupportedError
from curvlinops_plus.linalg import Space
from test.gpu import emulator

F64 = torch.float64
#: Where the models of lives and random networks are.
DEVICE = torch.device("cuda:0" if emulator.is_installed() else "cpu")


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


class Counted(LinearOperator):
    """Nothing but products and a transpose, whose columns are counted; with `noise` they are
    random.
    """

    def __init__(self, matrix: Tensor, noise: float = 0.0) -> None:
        m, n = matrix.shape
        super().__init__(Space.flat(n), matrix.dtype, matrix.device, out_space=Space.flat(m))
        self.matrix, self.noise, self.seen, self.generator = matrix, noise, list[int](), seeded()

    def _matmat(self, X: Tensor) -> Tensor:
        self.seen.append(X.shape[1])
        Y = self.matrix @ X
        return Y + self.noise * torch.randn(Y.shape, dtype=Y.dtype, generator=self.generator)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return self.matrix.T @ X


def check_fast_paths(
    rule: Any, module: Any, x: Tensor, g: Tensor, dtype: torch.dtype = F64, tolerance: float = 1e-11
) -> None:
    """What a rule computes without its rows is what plain sums over its rows `a` and `b` give."""
    a, b = rule.rows(module, x), rule.grad_rows(module, g)
    assert isinstance(a, Tensor)
    A, total, count = rule.input_gram(module, x)
    assert {a.dtype, b.dtype, A.dtype, total.dtype} == {dtype}
    assert b.shape[1:3] == a.shape[:2]
    close = {"rtol": tolerance, "atol": 100 * tolerance}
    torch.testing.assert_close(A, torch.einsum("bs...i,bs...j->...ij", a, a), **close)
    torch.testing.assert_close(total, a.sum((0, 1)), **close)
    assert count == a.shape[0] * a.shape[1]
    torch.testing.assert_close(rule.mean_inputs(module, x), a.mean(1), **close)
    torch.testing.assert_close(
        rule.grad_gram(module, g), torch.einsum("vbs...o,vbs...p->...op", b, b), **close
    )


Refusal = tuple[Callable[[], object], type[Exception], str]
"""What is tried, its error, and a pattern of its message."""


def refusals(table: Sequence[Refusal], *things: Any) -> Callable[..., None]:
    """A test of every line of a table; nothing of these things changes."""

    @pytest.mark.parametrize(
        ("call", "error", "words"), table, ids=[words for _, _, words in table]
    )
    def test(call: Callable[[], object], error: type[Exception], words: str) -> None:
        with unchanged(*things) if things else nullcontext(), pytest.raises(error, match=words):
            call()

    return test


def refuses_cdist(words: str) -> AbstractContextManager[object]:
    """`pytest.raises` where `torch.cdist` has no second derivative; it has one since PyTorch
    2.15.
    """
    x = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(torch.cdist(x, x + 1).sum(), x, create_graph=True)
    try:
        torch.autograd.grad(g.sum(), x)
    except RuntimeError:
        return pytest.raises(UnsupportedError, match=words)
    return nullcontext()


def _facts(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything that could change about a thing of the user's, by name; tensors as copies."""
    if isinstance(thing, nn.Module):
        for name, m in thing.named_modules():
            at = f"{path}.{name}"
            yield f"{at} attributes", sorted(vars(m))
            yield (
                f"{at} forward",
                id(m.forward.__func__) if hasattr(m.forward, "__func__") else id(m.forward),
            )
            yield f"{at} training", m.training
            for hooks in [name for name in vars(m) if "_hooks" in name]:
                yield f"{at} {hooks}", list(getattr(m, hooks))
            for kind in (m._parameters, m._buffers):
                for key, t in kind.items():
                    yield from _facts(t, f"{at}.{key}")
    elif isinstance(thing, Tensor):
        yield (
            f"{path} object",
            (id(thing), thing.data_ptr(), thing.dtype, thing.device, tuple(thing.shape)),
        )
        yield f"{path} values", thing.detach().clone()
        yield f"{path} requires_grad", thing.requires_grad
        yield f"{path} hooks", thing._backward_hooks
        if thing.is_leaf:
            yield f"{path} grad object", id(thing.grad)
            yield f"{path} grad", None if thing.grad is None else thing.grad.clone()
        if isinstance(thing, nn.Parameter):
            yield f"{path} attributes", sorted(vars(thing))
            yield f"{path} version", thing._version
    elif isinstance(thing, Mapping):
        yield f"{path} keys", list(thing)
        for key, value in thing.items():
            yield from _facts(value, f"{path}[{key!r}]")
    elif isinstance(thing, (list, tuple)):
        yield f"{path} length", len(thing)
        for index, value in enumerate(thing):
            yield from _facts(value, f"{path}[{index}]")


def _snapshot(things: Sequence[Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "random numbers": torch.get_rng_state(),
        "random numbers of Python": random.getstate(),
    }
    facts["random numbers of NumPy"] = torch.from_numpy(np.random.get_state()[1].copy())  # noqa: NPY002, what models draw from
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        facts["random numbers on CUDA"] = torch.cuda.get_rng_state()
    for index, thing in enumerate(things):
        facts.update(_facts(thing, f"{type(thing).__name__} {index}"))
    return facts


@contextmanager
def unchanged(*things: Any) -> Iterator[None]:
    """Fail if anything of modules, tensors, batches or the global random numbers differs at the
    end, errors or not.
    """
    before = _snapshot(things)
    try:
        yield
    finally:
        after = _snapshot(things)
        changed = sorted(before.keys() ^ after.keys())
        for name in before.keys() & after.keys():
            one, two = before[name], after[name]
            equal = (
                torch.equal(one.nan_to_num(), two.nan_to_num())
                if isinstance(one, Tensor) and isinstance(two, Tensor)
                else one == two
            )
            if not equal:
                changed.append(name)
        assert not changed, f"changed: {changed}"


def output_rows(model: nn.Module, examples: Sequence[Any]) -> Tensor:  # [N · C, P]
    """Derivatives of the outputs by the parameters, by autograd, one example after the other; each
    is what the model is called with.
    """
    parameters = [*model.parameters()]
    rows = []
    for example in examples:
        for number in model(example).flatten():
            back = torch.autograd.grad(
                number, parameters, retain_graph=True, materialize_grads=True, allow_unused=True
            )
            rows.append(torch.cat([g.flatten() for g in back]))
    return torch.stack(rows)
