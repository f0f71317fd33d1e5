"""Centred derivatives `Ō` of log-amplitudes over weighted samples.

    Ō = √W (I - 1 wᵀ) J        [n·c, P]

with `J` the derivatives of `log ψ` at the n samples, c rows for each: one, or two, of real and
imaginary part (`amplitude.py`). `w` are the normalised weights of the samples (1/n without weights)
and `W = diag(w)`. `√W (I - 1 wᵀ) = (I - √w √wᵀ) √W` is a projection times `√W`: centring once is
enough, because centring twice changes nothing.

Two rows are two numbers per sample. A holomorphic function has the same two rows as a complex one,
but the second follows from the first (Cauchy-Riemann equations), which halves the derivatives and
their memory.

Shapes: P real numbers in the parameters, n samples, c components; rows of `Ō` sample by sample,
component by component.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.linalg import LinearOperator, Space, gram
from curvlinops_plus.linalg.precision import full_precision
from curvlinops_plus.optim.reconfiguration.amplitude import LogAmplitude
from curvlinops_plus.options import instance, integer, tensor_of
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import (
    Draws,
    EmpiricalRisk,
    LayerBatch,
    Vectors,
    find_layers,
)
from curvlinops_plus.risk.batches import mapped, on_device
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.record import sweep


class Ensemble:
    """A log-amplitude at its parameters' current values, with samples and their weights.

    Values of the parameters are copied, so that steps of an optimizer don't change the ensemble.

    Args:
        samples: A tensor, or a tuple, list or dict of tensors, with the n samples along the first
            axis.
        weights: Weights [n] of the samples, not negative; divided by their sum. None: all equal.
        chunk_size: How many samples are differentiated at once; None: all.

    Attributes:
        root: Square roots [n] of the normalised weights.
        components: Numbers per sample, 1 or 2.
        rows: Of these, how many are differentiated; those of a holomorphic function follow from the
            first one.

    Raises:
        ValueError: If there are fewer than two samples of positive weight, or weights are invalid.
        NumericsError: If log ψ of a sample is NaN or infinite.
        UnsupportedError: If log ψ is random, or that of one sample depends on others.

    Cost: one forward pass without gradient, and one of a sample.
    """

    def __init__(
        self, psi: LogAmplitude, samples: Any, weights: Any = None, chunk_size: int | None = None
    ) -> None:
        for leaf in tree_leaves(samples):
            instance("samples", leaf, Tensor, "a tensor [n, ...], or a tuple, list or dict of such")
        integer("chunk_size", chunk_size, low=1, optional=True)
        sizes = {len(t) if t.ndim else 0 for t in tree_leaves(samples)}
        if len(sizes) != 1:
            raise ValueError(
                "Expected tensors with all samples along their first axis; got the lengths "
                f"{sizes}."
            )
        self.psi = psi
        self.n = sizes.pop()
        self.weights = self._normalise(weights)
        self.root = self.weights.sqrt()
        self.values = psi.snapshot()
        samples = mapped(on_device, samples, psi.device)
        size = chunk_size or self.n
        self.chunks = [
            tree_map_only(Tensor, lambda t, start=start: t[start : start + size], samples)
            for start in range(0, self.n, size)
        ]
        self.components = self._forward().shape[1]
        self.rows = 1 if psi.kind == "holomorphic" else self.components
        if psi.kind == "holomorphic":
            self._check_holomorphic()

    def _normalise(self, weights: Any) -> Tensor:
        if weights is None:
            w = torch.ones(self.n, dtype=self.psi.dtype)
        else:
            w = tensor_of("weights", weights).detach()
        if w.shape != (self.n,) or w.is_complex():
            raise ValueError(
                f"Expected {self.n} real weights, one per sample; got {w.dtype} of shape "
                f"{list(w.shape)}."
            )
        invalid = ~(torch.isfinite(w) & (w >= 0))
        if bool(invalid.any()):
            raise ValueError(
                "Expected weights that are finite and not negative; "
                f"{name_samples(invalid)} are not."
            )
        positive = int((w > 0).sum())
        if positive < 2:
            raise ValueError(
                f"Expected at least two samples with a positive weight, got {positive} of {self.n}."
            )
        w = w.to(torch.promote_types(w.dtype, self.psi.dtype))
        return (w / w.sum()).to(self.psi.device, self.psi.dtype)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context for calls of `log_psi`, with gradients; restores the module and the global random
        state.
        """
        with (
            full_precision(self.psi.device.type),
            preserve_state(self.psi.module or nn.Module(), None),
            torch.inference_mode(False),
            sdpa_kernel(SDPBackend.MATH),  # fused attention has no second derivative
        ):
            yield

    def _forward(self) -> Tensor:
        """`log ψ` of all samples, [n, c]; checked on the last sample, which is also run alone."""
        with self.running(), GradMode(False):
            before = RandomState.now(self.psi.device)
            out = torch.cat([self.psi(self.values, chunk) for chunk in self.chunks])
            random = before != RandomState.now(self.psi.device)
            last_sample = tree_map_only(Tensor, lambda t: t[-1:], self.chunks[-1])
            alone = self.psi(self.values, last_sample)
        invalid = ~torch.isfinite(out).all(1)
        if bool(invalid.any()):
            raise NumericsError(
                f"log ψ is NaN or infinite for {name_samples(invalid)}. Look for samples where "
                "ψ = 0, for parameters that diverged, or for overflow; leave such samples out."
            )
        tolerance = torch.finfo(out.dtype).eps ** 0.5
        largest = float(out.abs().amax())
        agrees = torch.allclose(alone, out[-1:], rtol=tolerance, atol=tolerance * largest)
        if random or not agrees:
            draws = ", and draws random numbers" if random else ""
            raise UnsupportedError(
                f"log_psi gives {out[-1].tolist()} for the last sample among others, "
                f"{alone[0].tolist()} for it alone{draws}; "
                "each output must be a function of one sample. (Dropout or batch norm in training "
                "mode? Call .eval() first. A normalisation over the batch? It does not matter "
                "here, leave it out.)"
            )
        return out

    def _check_holomorphic(self) -> None:
        """Cauchy and Riemann: the derivatives of the imaginary part are `i` times those of the real
        part.
        """
        two_samples = tree_map_only(Tensor, lambda t: t[:2], self.chunks[0])
        with self.running():
            J = self._jacobian(two_samples, 2)  # [m, 2, P]
        J = torch.view_as_complex(J.unflatten(-1, (-1, 2)).contiguous())
        real, imag = J.unbind(1)
        error = float((imag - 1j * real).abs().amax())
        size = float(real.abs().amax() + imag.abs().amax())
        if error > 1e3 * torch.finfo(real.dtype).eps * size:
            raise ValueError(
                "log ψ is not holomorphic in its parameters, its derivatives violate the "
                f"Cauchy-Riemann equations by {error / size:.1e}. (Does it use .real, .imag, abs() "
                'or conj()?) Use amplitude="complex".'
            )

    def jacobians(self) -> Iterator[tuple[slice, Tensor]]:
        """Derivatives of each chunk's samples, [m, rows, P]."""
        start = 0
        for chunk in self.chunks:
            with self.running():
                J = self._jacobian(chunk, self.rows).to(self.psi.dtype)
            invalid = ~torch.isfinite(J).all(2).all(1)
            if bool(invalid.any()):
                raise NumericsError(
                    "The derivatives of log ψ are NaN or infinite for "
                    f"{name_samples(invalid, start)}, where log ψ is finite. Look for square roots "
                    "or norms at zero, and for nodes of ψ."
                )
            yield slice(start, start + len(J)), J
            start += len(J)

    def _jacobian(self, chunk: Any, rows: int) -> Tensor:
        """Derivatives of m samples, [m, rows, P]."""
        space = self.psi.space

        def of_sample(sample: Any) -> Tensor:  # [rows, P]
            x = tree_map_only(Tensor, lambda t: t[None], sample)
            out, back = vjp(lambda values: self.psi(values, x)[0], self.values)[:2]
            units = torch.eye(len(out), dtype=out.dtype, device=out.device)[:rows]
            gradients = [back(unit)[0] for unit in units]
            return torch.stack(
                [torch.cat([g[name].reshape(-1) for name in space.names]) for g in gradients]
            )

        try:
            return vmap(of_sample)(chunk).detach()
        except Exception:
            # vmap fails in many ways: control flow, in-place writes, unsupported operations.
            graph = _Graph(self, chunk)
            shape = graph.out.shape
            units = torch.eye(graph.out.numel(), dtype=graph.out.dtype, device=graph.out.device)
            gradients = [space.flatten(graph.backward(unit)) for unit in units.view(-1, *shape)]
            return torch.stack(gradients).unflatten(0, shape)[:, :rows]


def name_samples(mask: Tensor, start: int = 0) -> str:
    """The samples where a mask [n] is True, in words.

    Example:
        >>> name_samples(torch.tensor([False, True, True]))
        '2 of 3 samples (1, 2)'
    """
    count = int(mask.sum())
    indices = ", ".join(str(start + int(i)) for i in mask.nonzero()[:8, 0])
    more = ", ..." if count > 8 else ""
    return f"{count} of {len(mask)} samples ({indices}{more})"


class _Graph:
    """A forward pass of some samples, and products with its Jacobian `J` and with `Jᵀ`.

    `J v` is the derivative of `wᵀ J v` with respect to `w`.
    """

    def __init__(self, ensemble: Ensemble, chunk: Any) -> None:
        self.leaves = {name: v.detach().requires_grad_() for name, v in ensemble.values.items()}
        self.out = ensemble.psi(self.leaves, chunk)  # [m, c]
        self.w = torch.zeros_like(self.out, requires_grad=True)
        self._back: dict[str, Tensor] | None = None  # Jᵀ w, with a graph to w

    def forward(self, v: dict[str, Tensor]) -> Tensor:
        """`J v` [m, c] of a vector by name."""
        if self._back is None:
            self._back = self.backward(self.w, create_graph=True)
        terms = [(g * v[name].to(g.dtype)).sum() for name, g in self._back.items()]
        product = torch.stack(terms).sum()
        return torch.autograd.grad(product, self.w, retain_graph=True, materialize_grads=True)[0]

    def backward(self, u: Tensor, create_graph: bool = False) -> dict[str, Tensor]:
        """`Jᵀ u` by name, of `u` [m, c]."""
        gradients = torch.autograd.grad(
            self.out,
            [*self.leaves.values()],
            u.to(self.out.dtype),
            retain_graph=True,
            materialize_grads=True,
            create_graph=create_graph,
        )
        return dict(zip(self.leaves, gradients, strict=True))


class Scores(LinearOperator):
    """`Ō` [n·c, P], by products, or with all its entries.

    Products take a forward pass and one or two backward passes each, per chunk of samples; without
    chunks the graph of the forward pass is kept, and only backward passes are left.

    Args:
        stored: Keep the entries: n·c·P numbers (of a holomorphic amplitude the complex derivatives
            [n, P/2], half as many), from one backward pass per sample and component (vectorised).
    """

    def __init__(self, ensemble: Ensemble, stored: bool) -> None:
        psi = ensemble.psi
        super().__init__(
            psi.space, psi.dtype, psi.device, out_space=Space.flat(ensemble.n * ensemble.components)
        )
        self.ensemble = ensemble
        self.matrix: Tensor | None = None
        self._divisor: Tensor | None = None
        self._last_graph: _Graph | None = None
        if stored:
            J = torch.cat([J for _, J in ensemble.jacobians()])  # [n, rows, P]
            if psi.kind == "holomorphic":  # of f = u + iv with θ = x + iy: f' = ∂u/∂x - i ∂u/∂y
                J = torch.view_as_complex(J.unflatten(-1, (-1, 2)).contiguous()).conj()
            self.matrix = self.centred(J).flatten(0, 1).resolve_conj()

    def divide(self, divisor: Tensor) -> None:
        """Divide columns by `divisor` [P]; both parts of a complex parameter by the same."""
        if self.matrix is None:
            self._divisor = divisor
        elif self.matrix.is_complex():
            self.matrix = self.matrix / divisor[::2]
        else:
            self.matrix = self.matrix / divisor

    def centred(self, t: Tensor) -> Tensor:
        """`√W (I - 1 wᵀ) t` of `t` [n, ...]."""
        w = self.ensemble.weights.to(t.dtype)
        root = self.ensemble.root.view(-1, *[1] * (t.ndim - 1)).to(t.dtype)
        return (t - torch.tensordot(w, t, dims=1)) * root

    def _graph(self, chunk: Any) -> _Graph:
        if len(self.ensemble.chunks) > 1:
            return _Graph(self.ensemble, chunk)
        if self._last_graph is None:
            self._last_graph = _Graph(self.ensemble, chunk)
        return self._last_graph

    def _matmat(self, X: Tensor) -> Tensor:
        """`Ō X` [n·c, K] of X [P, K]."""
        if self.matrix is not None:
            return _to_real(self.matrix @ self._from_real(X))
        if self._divisor is not None:
            X = X / self._divisor[:, None]
        products = []
        with self.ensemble.running():
            for chunk in self.ensemble.chunks:
                graph = self._graph(chunk)
                columns = [graph.forward(self.in_space.unflatten(v)) for v in X.T]
                products.append(torch.stack(columns, -1))
        J_X = torch.cat(products).to(self.dtype)  # [n, c, K]
        return self.centred(J_X).flatten(0, 1)

    def _rmatmat(self, X: Tensor) -> Tensor:
        """`Ōᵀ X` [P, K] of X [n·c, K]."""
        if self.matrix is not None:
            return _to_real(self.matrix.mH @ self._from_real(X))
        ensemble = self.ensemble
        # Ōᵀ X = Jᵀ U with U = (I - w 1ᵀ) √W X
        U = ensemble.root[:, None, None] * X.view(ensemble.n, ensemble.components, -1)
        U = U - ensemble.weights[:, None, None] * U.sum(0)
        total = X.new_zeros(self.shape[1], X.shape[1])
        start = 0
        with ensemble.running():
            for chunk in ensemble.chunks:
                graph = self._graph(chunk)
                stop = start + len(graph.out)
                columns = [
                    self.in_space.flatten(graph.backward(u)) for u in U[start:stop].unbind(-1)
                ]
                total += torch.stack(columns, 1)
                start = stop
        return total if self._divisor is None else total / self._divisor[:, None]

    def _from_real(self, X: Tensor) -> Tensor:
        """[2d, K] as complex [d, K], of complex scores."""
        assert self.matrix is not None
        return torch.complex(*X.unflatten(0, (-1, 2)).unbind(1)) if self.matrix.is_complex() else X

    def kernel(self) -> Tensor:
        """`Ō Ōᵀ` [n·c, n·c], the centred neural tangent kernel; of products from recorded layers,
        where they can be.
        """
        if self.matrix is None and self._divisor is None and len(self.ensemble.chunks) == 1:
            uncentred = recorded_kernel(self.ensemble)
            if uncentred is not None:
                return self.centred(self.centred(uncentred).T)
        M = self._entries()
        return _as_blocks(M @ M.mH) if M.is_complex() else gram(M.T)

    def covariance(self) -> Tensor:
        """`S = Ōᵀ Ō` [P, P]."""
        M = self._entries()
        return _as_blocks(M.mH @ M) if M.is_complex() else gram(M)

    def _entries(self) -> Tensor:
        matrix = Scores(self.ensemble, True).matrix if self.matrix is None else self.matrix
        assert matrix is not None
        return matrix

    def variances(self) -> Tensor:
        """The diagonal of `S`, [P]; one chunk at a time is in memory."""
        if self.matrix is not None:
            squares = self.matrix.abs().square().sum(0)
            return squares.repeat_interleave(2) if self.matrix.is_complex() else squares
        w = self.ensemble.weights
        mean = sum(torch.tensordot(w[chunk], J, dims=1) for chunk, J in self.ensemble.jacobians())
        variances = torch.zeros((), dtype=self.dtype, device=self.device)
        for chunk, J in self.ensemble.jacobians():
            variances = variances + torch.tensordot(w[chunk], (J - mean).square(), dims=1).sum(0)
        if self.ensemble.psi.kind == "holomorphic":
            # |f'|² = (∂u/∂x)² + (∂u/∂y)², for both parts
            return variances.unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2)
        return variances


class _Ones(Vectors):
    """Backpropagates ones: the output gradients of each layer are then those of each sample."""

    def count(self, likelihood: Likelihood, F: Tensor) -> int:
        return 1

    def send(self, likelihood: Likelihood, F: Tensor, Y: Tensor, draws: Draws) -> Iterator[Tensor]:
        yield torch.ones_like(F)


def recorded_kernel(ensemble: Ensemble) -> Tensor | None:
    """`J Jᵀ` [n, n] of a real module, neither centred nor weighted; None if its layers can't be
    recorded.

    A layer `W a + b` without weight sharing, whose derivatives are `g (a, 1)ᵀ`, adds `(a aᵀ) ∘ (g
    gᵀ)`; others add the inner products of their derivatives. Derivatives of three samples are
    compared with those of autograd.

    Cost: one forward and one backward pass, and n² products per input and output of each layer.
    """
    psi = ensemble.psi
    complex_params = any(p.is_complex() for p in psi.params.values())
    if psi.module is None or ensemble.components > 1 or complex_params:
        return None
    layer_kernels: list[Tensor] = []

    def consume(batch: LayerBatch) -> None:
        a = batch.inputs if batch.role is not None and not batch.sparse else None
        if isinstance(a, Tensor) and a.ndim == 3 and a.shape[1] == 1:
            layer_kernels.append(gram(a[:, 0].T) * gram(batch.grads[0, :, 0].T))
            return
        gradients = [g[0].reshape(batch.num_examples, -1) for g in batch.param_grads().values()]
        layer_kernels.append(gram(torch.cat(gradients, 1).T))

    zeros = torch.zeros(ensemble.n, dtype=psi.dtype, device=psi.device)
    try:
        risk = EmpiricalRisk(
            psi.module,
            nn.MSELoss(reduction="sum"),  # without effect: the vectors are ones
            [(ensemble.chunks[0], zeros)],
            psi.params,
            output=lambda out: (out.real if out.is_complex() else out).reshape(-1),
            batch_size_fn=lambda X: len(tree_leaves(X)[0]),
        )
        with ensemble.running():
            sweep(risk, find_layers(risk.model, risk.params, False), _Ones(), consume)
    except (NotImplementedError, ValueError):  # not supported by recording
        return None
    return sum(layer_kernels, zeros).to(psi.dtype)


def _to_real(Y: Tensor) -> Tensor:
    """Complex [d, K] as real [2d, K], real and imaginary parts in turn."""
    return torch.stack((Y.real, Y.imag), 1).flatten(0, 1) if Y.is_complex() else Y


def _as_blocks(M: Tensor) -> Tensor:
    """A complex matrix [d, e] as the real one [2d, 2e] that multiplies real and imaginary parts:
    each entry `a + bi` becomes a block [[a, -b], [b, a]].
    """
    real_rows = torch.stack((M.real, -M.imag), -1)
    imag_rows = torch.stack((M.imag, M.real), -1)
    rows = torch.stack((real_rows, imag_rows), 1)  # [d, 2, e, 2]
    return rows.reshape(2 * M.shape[0], 2 * M.shape[1])
