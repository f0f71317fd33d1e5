"""`Ensemble`: a log-amplitude at fixed parameters, with weighted samples and their derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.exact.passes import Replaced
from curvlinops_plus.optim.reconfiguration.amplitude import LogAmplitude
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk.batches import to_device
from curvlinops_plus.risk.modules import preserve_state
from curvlinops_plus.risk.process_state import eager


class Ensemble:
    """A log-amplitude at its parameters' current values, with samples and their weights.

    Values of the parameters are copied, so that steps of an optimizer don't change the ensemble.

    Args:
        samples: A tensor, or a tuple, list or dict of tensors, with the n samples along the first axis.
        weights: Weights [n] of the samples, not negative; divided by their sum. None: all equal.
        chunk_size: How many samples are differentiated at once; None: all.

    Attributes:
        root: Square roots [n] of the normalised weights.
        components: Numbers per sample, 1 or 2.

    Raises:
        ValueError: If there are fewer than two samples of positive weight, or weights are invalid.
        NumericsError: If log ψ of a sample is NaN or infinite.
        UnsupportedError: If log ψ is random, that of one sample depends on others, or a backward pass is not linear.

    Cost: one forward pass without gradient, and one of a sample.
    """

    def __init__(self, psi: LogAmplitude, samples: Any, weights: Any = None, chunk_size: int | None = None) -> None:
        leaves = tree_leaves(samples)
        sizes = {t.shape[0] if isinstance(t, Tensor) and t.ndim else None for t in leaves}
        if len(sizes) != 1 or None in sizes:
            shapes = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in leaves]
            raise ValueError(
                f"Expected samples as a tensor, or a tuple, list or dict of tensors, all with the samples along their "
                f"first axis; got {shapes}."
            )
        self.psi, self.n = psi, sizes.pop() or 0
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise ValueError(f"Expected chunk_size to be a positive whole number or None, got {chunk_size!r}.")
        self.weights = self._read_weights(weights)
        self.root = self.weights.sqrt()
        self.free = psi.snapshot()
        samples, step = to_device(samples, psi.device), chunk_size or max(1, self.n)
        self.chunks = [tree_map_only(Tensor, lambda t, i=i: t[i : i + step], samples) for i in range(0, self.n, step)]
        self.components = self._forward().shape[1]
        if psi.kind == "holomorphic":
            self._check_holomorphic()

    @property
    def stored_bytes(self) -> int:
        """Memory of all derivatives."""
        rows = 1 if self.psi.kind == "holomorphic" else self.components
        return self.n * rows * self.psi.space.dim * self.psi.dtype.itemsize

    def _read_weights(self, weights: Any) -> Tensor:
        n, like = self.n, {"dtype": self.psi.dtype, "device": self.psi.device}
        w = torch.full((n,), 1 / max(1, n), **like) if weights is None else torch.as_tensor(weights).detach()
        if w.shape != (n,) or w.is_complex():
            raise ValueError(f"Expected {n} real weights, one per sample; got {w.dtype} of shape {list(w.shape)}.")
        bad = ~(torch.isfinite(w) & (w >= 0))
        if bool(bad.any()):
            raise ValueError(
                f"Expected weights that are finite and not negative; {name_samples(bad)} are not. Importance weights "
                "are |ψ|²/q, with samples from q."
            )
        if int((w > 0).sum()) < 2:
            raise ValueError(
                f"Expected at least two samples with a positive weight, got {int((w > 0).sum())} of {n}: the "
                "covariance over one sample is zero, whatever the amplitude."
            )
        w = w.to(torch.promote_types(w.dtype, self.psi.dtype))
        return (w / w.sum()).to(**like)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context for calls of `log_psi`; restores the module and the global random state."""
        kind = self.psi.device.type
        with ExitStack() as stack:
            stack.enter_context(preserve_state(self.psi.module or nn.Module(), None))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # fused attention has no second derivative
            stack.enter_context(eager())
            yield

    def _forward(self) -> Tensor:  # -> [n, c]
        with self.running(), torch.no_grad():
            before = RandomState.now(self.psi.device)
            out = torch.cat([self.psi(self.free, chunk) for chunk in self.chunks])
            after = RandomState.now(self.psi.device)
            if before != after:
                raise UnsupportedError(
                    "log_psi draws random numbers (dropout in training mode?), so that its derivatives are random. "
                    "Call .eval() first, or make the randomness part of the samples."
                )
            self._check_finite(out)
            alone = tree_map_only(Tensor, lambda t: t[-1:], self.chunks[-1])
            leaves = {name: v.detach().requires_grad_() for name, v in self.free.items()}
            try:
                with torch.enable_grad(), Replaced(set()):
                    last = self.psi(leaves, alone)
            except Exception as error:
                raise UnsupportedError(
                    f"log_psi can't be called with one sample, where it should return log ψ of it: {error} (Batch norm "
                    "in training mode? Call .eval() first.)"
                ) from error
            last = last.detach()
        tolerance = torch.finfo(out.dtype).eps ** 0.5
        if not torch.allclose(last, out[-1:], rtol=tolerance, atol=tolerance * float(out.abs().amax())):
            raise UnsupportedError(
                f"log_psi gives {out[-1].tolist()} for the last sample among others and {last[0].tolist()} for that "
                "sample alone; each of its outputs must depend on one sample only. (Batch norm in training mode? Call "
                ".eval() first. A normalisation over the batch? It does not matter here, leave it out.)"
            )
        return out

    def _check_finite(self, out: Tensor) -> None:
        bad = ~torch.isfinite(out).all(1)
        if bool(bad.any()):
            raise NumericsError(
                f"log ψ is NaN or infinite for {name_samples(bad)}. Look for samples where ψ = 0, for parameters that "
                "diverged, or for overflow; leave such samples out."
            )

    def _check_holomorphic(self) -> None:
        """Cauchy and Riemann: the derivatives of the imaginary part are `i` times those of the real part."""
        first = tree_map_only(Tensor, lambda t: t[:2], self.chunks[0])
        with self.running():
            J = self._jacobian(first, 2).movedim(1, 0)  # [2, m, P]
        real, imag = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) for part in J)
        error, size = (imag - 1j * real).abs().amax(), real.abs().amax() + imag.abs().amax()
        if float(error) > 1e3 * torch.finfo(real.dtype).eps * float(size):
            raise ValueError(
                f'amplitude="holomorphic": log ψ is not holomorphic in its parameters, its derivatives violate the '
                f"Cauchy-Riemann equations by {float(error / size):.1e}. (Does it use .real, .imag, abs() or conj() of "
                'something that depends on them?) Use amplitude="complex".'
            )

    # Derivatives of each sample --------------------------------------------------------------------------------------

    def jacobians(self) -> Iterator[tuple[slice, Tensor]]:
        """Derivatives of each chunk's samples, [m, c, P]; of a holomorphic function those of its real part, c = 1."""
        rows, start = 1 if self.psi.kind == "holomorphic" else self.components, 0
        for chunk in self.chunks:
            with self.running():
                J = self._jacobian(chunk, rows).to(self.psi.dtype)
            bad = ~torch.isfinite(J).all(2).all(1)
            if bool(bad.any()):
                raise NumericsError(
                    f"The derivatives of log ψ are NaN or infinite for {name_samples(bad, start)}, where log ψ is "
                    "finite. Look for square roots or norms at zero, and for nodes of ψ."
                )
            yield slice(start, start + len(J)), J
            start += len(J)

    def _jacobian(self, chunk: Any, rows: int) -> Tensor:  # -> [m, rows, P]
        def one(sample: Any) -> Tensor:  # -> [rows, P]
            x = tree_map_only(Tensor, lambda t: t[None], sample)
            out, back = vjp(lambda free: self.psi(free, x)[0].unbind(), self.free)[:2]
            found = []
            for k in range(rows):
                (g,) = back(tuple(torch.full_like(o, float(j == k)) for j, o in enumerate(out)))
                found.append(torch.cat([g[name].reshape(-1) for name in self.psi.space.names]))
            return torch.stack(found)

        try:
            return vmap(one)(chunk).detach()
        except Exception:  # vmap has many kinds of errors: control flow, in-place writes, unsupported operations
            return self._jacobian_row_by_row(chunk, rows)

    def _jacobian_row_by_row(self, chunk: Any, rows: int) -> Tensor:
        leaves = {name: v.detach().requires_grad_() for name, v in self.free.items()}
        out = self.psi(leaves, chunk)
        found = [
            torch.cat(
                [
                    g.reshape(-1)
                    for g in torch.autograd.grad(o, list(leaves.values()), retain_graph=True, materialize_grads=True)
                ]
            )
            for o in out[:, :rows].reshape(-1)
        ]
        return torch.stack(found).view(len(out), rows, -1)


def name_samples(bad: Tensor, start: int = 0) -> str:
    """The samples where a mask [n] is True, in words.

    Example:
        >>> name_samples(torch.tensor([False, True, True]))
        '2 of 3 samples (1, 2)'
    """
    where = [start + int(i) for i in bad.nonzero()[:8, 0]]
    more = ", ..." if int(bad.sum()) > len(where) else ""
    return f"{int(bad.sum())} of {len(bad)} samples ({', '.join(map(str, where))}{more})"
