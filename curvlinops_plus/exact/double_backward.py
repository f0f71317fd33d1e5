"""Second derivatives: operations that have them, the Hessian of any loss, and messages about operations without."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.exact.batched import vjp
from curvlinops_plus.risk import EmpiricalRisk
from curvlinops_plus.risk.graph import postorder
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.process_state import eager


@contextmanager
def differentiable(risk: EmpiricalRisk) -> Iterator[None]:
    """Context in which passes over the data can be differentiated in every mode, whatever the caller's modes are.

    Afterwards the state of model and data is as before, see `preserve_state`.

    Attention runs by plain operations, whose fused kernels have neither forward mode nor second derivatives, and
    compiled modules run eagerly.
    """
    with preserve_state(risk.model, risk.data), eager(), torch.inference_mode(False), torch.enable_grad():
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


_MISSING = re.compile(r"derivative for '?(?:aten::)?_*(\w+?)(?:_dense)?(?:_backward)?'? is not implemented")


@contextmanager
def operation_context(forward: str | None = None) -> Iterator[None]:
    """Context that names the operation which can't be differentiated twice, if that is why its body fails.

    Args:
        forward: Why forward mode, which was tried first, is not possible.

    Raises:
        UnsupportedError: Instead of PyTorch's error.
    """
    try:
        yield
    except RuntimeError as error:
        found = _MISSING.search(str(error))
        if not found:
            raise
        raise UnsupportedError(
            f"The model or the loss uses {found[1]}, which PyTorch can't differentiate twice. Write it with "
            "operations that it can (cdist as (x[:, None] - y).norm(dim=-1), attention as softmax(q kᵀ) v), or use an "
            f"operator that goes back once, as KFACLinearOperator.{tried(forward)}"
        ) from error


def loss_hessian_product(loss: Tensor, F: Tensor) -> Callable[[Tensor], Tensor]:
    """The product `[K, *F.shape] -> [K, *F.shape]` with the Hessian of a loss with respect to the output `F`.

    Args:
        loss: The loss, with a graph down to `F`.
        F: The output.

    Cost: one backward pass, and one for each product.
    """
    gradient = None
    if loss.requires_grad and F.requires_grad:
        with operation_context():
            (gradient,) = torch.autograd.grad(loss, F, create_graph=True, allow_unused=True)
    if gradient is None or not gradient.requires_grad:
        return torch.zeros_like

    def product(V: Tensor) -> Tensor:
        with operation_context():
            (found,) = vjp([gradient], [F], [V])
        return torch.zeros_like(V) if found is None else found

    return product


def refuse_once_differentiable(output: Tensor) -> None:
    """Refuse functions whose backward pass has no derivative although a graph goes through it: PyTorch takes it for 0.

    Raises:
        UnsupportedError: Naming the function.

    Cost: a walk through the graph.
    """
    ours = torch.autograd.function.once_differentiable.__code__.co_filename
    for node, _ in postorder([output.grad_fn]):
        function = getattr(node, "_forward_cls", None)
        backward = getattr(function, "backward", None)
        code = getattr(backward, "__code__", None)
        if function is not None and hasattr(backward, "__wrapped__") and code is not None and code.co_filename == ours:
            raise UnsupportedError(
                f"The backward pass of {function.__name__} is marked @once_differentiable, so second derivatives would "
                "silently leave it out. Write it with operations that PyTorch can differentiate, or use an operator "
                "that goes back once, as KFACLinearOperator."
            )


def tried(why: str | None) -> str:
    """A sentence on why forward mode was not possible, if it was tried."""
    return f" Forward mode was tried first: {why}" if why else ""


def kernel_shape(N: int, tensors: Sequence[Tensor]) -> Hashable:
    """What kernels choose their ways by: number of examples, and axes of length one."""
    return N, *(tuple(size == 1 for size in t.shape) for t in tensors)


def is_symmetric(product: Callable[[Tensor], Tensor], x: Tensor, Hx: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product `H x` fits to a symmetric matrix, `uᵀ H x = xᵀ H u` for a random vector `u`.

    False is no proof of the contrary, see `refuse_asymmetry`.

    Args:
        product: Products [K, n] -> [K, n].
        x: A vector like a random one, [n].
        Hx: Its product.
        dtype: What limits the digits.

    Cost: one product.
    """
    generator = torch.Generator().manual_seed(1_895_364_127)  # no seed that `x` may have been drawn with, too
    u = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
    Hu, length = product(u[None])[0], x.norm() / x.numel() ** 0.5
    size = Hx.norm() + Hu.norm() * length
    # One number is compared: by chance it may be small, and much less than what is refused counts.
    return bool((u.dot(Hx) - x.dot(Hu)).abs() <= (1e-7 if dtype == torch.float64 else 1e-4) * size)


def refuse_asymmetry(product: Callable[[Tensor], Tensor], like: Tensor, scale: float, dtype: torch.dtype) -> None:
    """Refuse second derivatives that are not symmetric: those of a function are.

    Args:
        product: Products [K, n] -> [K, n] with a Hessian.
        like: A vector [n, *].
        scale: Size of the function, to tell zero derivatives, of which rounding leaves something.
        dtype: What limits the digits.

    Raises:
        UnsupportedError: If they are not symmetric in float64. In lower precisions only a `CurvatureWarning`: rounding
            has the same effect where terms cancel.

    Cost: three products.
    """
    generator = torch.Generator().manual_seed(0)
    V = like.new_empty(3, like.shape[0])
    for v in V:
        v.copy_(torch.randn(v.shape, generator=generator, dtype=torch.float64))
    inner, sizes = V.new_zeros(3, 3, dtype=torch.float64), []
    for k in range(3):  # one product at a time, of which numbers stay
        Hv = product(V[k : k + 1])[0]
        inner[:, k] = V @ Hv
        sizes.append(torch.linalg.vector_norm(Hv, dtype=torch.float64))
    size = float(torch.stack(sizes).norm())
    away = float((inner - inner.T).abs().max()) / size if size > 0 else 0.0  # of about |H - Hᵀ| / |H|
    if not away > (1e-5 if dtype == torch.float64 else 0.01):  # NaN is reported elsewhere
        return
    # The loss of what is certain is 0, and the logarithms and probabilities that it is made of are of size 1.
    eps, unit = torch.finfo(dtype).eps, max(scale, 1.0)
    if size <= unit * eps:
        return
    if size <= unit * eps**0.5 and only_rounding(product(V), lambda: product(3 * V) / 3, 1e-2 * min(away, 1.0)):
        return
    said = f"Products with the Hessian are not symmetric (by {away:.0e} of their length), as second derivatives are: "
    wrong = (
        "an operation of the model or the loss has a wrong second derivative in PyTorch, or a backward pass written by "
        "hand is not a function of its inputs alone. Find it with torch.autograd.gradgradcheck, layer by layer."
    )
    if dtype == torch.float64:
        raise UnsupportedError(said + wrong)
    warnings.warn(
        f"{said}either little is left of {dtype} numbers, as in networks that fit their data; or {wrong} In "
        "float64 the two can be told apart.",
        CurvatureWarning,
        stacklevel=2,
    )


def only_rounding(found: Tensor, scaled: Callable[[], Tensor], rtol: float = 1e-2) -> bool:
    """Whether rounding changes the result of a linear function: of three times the vector that is another one.

    Args:
        found: The result.
        scaled: Gives a third of the result for three times the vector.
        rtol: By which part of its norm.
    """
    return float((found - scaled()).norm()) > rtol * float(found.norm())
