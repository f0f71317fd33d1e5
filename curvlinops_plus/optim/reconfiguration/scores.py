"""Log-amplitudes `log ψ(θ, x)` as functions of real tensors, and their centred derivatives `Ō` over
weighted samples.

There are three kinds of amplitude, as in netket. `O` are the derivatives of `log ψ`:

| `amplitude` | log ψ | parameters | `O` of one sample | | --- | --- | --- | --- | | "real" | real;
of a complex one the real part, `log|ψ|` | real or complex | `∇ log|ψ|`, one row | | "complex" |
complex | real or complex, also mixed | `∇ Re log ψ` and `∇ Im log ψ`, two rows | | "holomorphic" |
complex and holomorphic in the parameters | all complex | complex derivative, one row |

All else works with real numbers. A complex parameter of shape `[*s]` is a real tensor `[*s, 2]`,
its real and imaginary parts (`torch.view_as_real`), and two rows are two numbers per sample. A
holomorphic function has the same two rows as a complex one, but the second follows from the first
(Cauchy-Riemann equations), which halves the derivatives and their memory. The gradient of a real
function with respect to a complex parameter is that with respect to the real part plus `i` times
that with respect to the imaginary part, as in `p.grad`. Then

    Ō = √W (I - 1 wᵀ) J        [n·c, P]

with `J` the derivatives of `log ψ` at the n samples (c = 1 row for each, or 2: real and imaginary
part), `w` the normalised weights of the samples (1/n without weights) and `W = diag(w)`. `√W (I - 1
wᵀ) = (I - √w √wᵀ) √W` is a projection times `√W`: centring once is enough, because centring twice
changes nothing.

Shapes: P real numbers in the parameters, n samples, c components; rows of `Ō` sample by sample,
component by component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from curvlinops_plus.errors import NumericsError, UnsupportedError
from curvlinops_plus.likelihood import Likelihood
from curvlinops_plus.linalg import LinearOperator, Space, gram
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk import (
    Draws,
    EmpiricalRisk,
    LayerBatch,
    Vectors,
    find_layers,
    named_params,
)
from curvlinops_plus.risk.batches import mapped, on_device
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.sweep import sweep

Amplitude = Literal["real", "complex", "holomorphic"]
LogPsi = nn.Module | Callable[[Any, Any], Tensor]
Params = Sequence[Tensor] | Mapping[str, Tensor] | None


class LogAmplitude:
    """`log ψ` as a function of real tensors.

    Args:
        log_psi: A module called with samples, or a function `(params, samples)`; returns `[n]` or
            `[n, 1]`, one number per sample, each of which depends on its own sample only.
        params: A list, tuple or dict of tensors; of a module its own (None: all that require a
            gradient).
        amplitude: "real", "complex" or "holomorphic".

    Raises:
        ValueError: If `amplitude` is unknown, or parameters are of a kind that does not match it.
        TypeError: If `params` is no collection of tensors.
    """

    def __init__(self, log_psi: LogPsi, params: Params, amplitude: Amplitude = "real") -> None:
        if amplitude not in get_args(Amplitude):
            raise ValueError(
                f"Expected amplitude to be one of {list(get_args(Amplitude))}, got {amplitude!r}."
            )
        self.kind, self.function = amplitude, log_psi
        self.container: Any = (
            dict if isinstance(params, Mapping) else tuple if isinstance(params, tuple) else list
        )
        self.module = log_psi if isinstance(log_psi, nn.Module) else None
        if self.module is not None:
            self.params = named_params(self.module, params)
            names = {id(p): name for name, p in self.module.named_parameters()}
            self._names = {key: names[id(p)] for key, p in self.params.items()}
        elif isinstance(params, (Mapping, list, tuple)) and params:
            self.params = dict(
                params
                if isinstance(params, Mapping)
                else ((str(k), p) for k, p in enumerate(params))
            )
        else:
            raise TypeError(
                "Expected `params` of a function to be a list, tuple or dict of tensors; got "
                f"{params!r}."
            )
        self.device, self.dtype = next(iter(self.params.values())).device, torch.float32
        for p in self.params.values():  # the real dtype in which all are combined
            self.dtype = torch.promote_types(self.dtype, p.dtype.to_real())
        real = [name for name, p in self.params.items() if not p.is_complex()]
        if self.kind == "holomorphic" and real:
            raise ValueError(
                f'amplitude="holomorphic" needs complex parameters, and {real} are real. Use "complex" for both kinds.'
            )
        self.space = Space.of({name: as_real(p) for name, p in self.params.items()})

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the parameters' current values as real tensors, in their own precision."""
        with torch.inference_mode(False):
            return {name: as_real(p.detach()).clone() for name, p in self.params.items()}

    def __call__(
        self, values: Mapping[str, Tensor], samples: Any
    ) -> Tensor:  # {name: real}, m samples -> [m, c]
        """`log ψ` of m samples, with c = 1 number per sample or 2, real and imaginary part."""
        given = {
            name: torch.view_as_complex(v) if self.params[name].is_complex() else v
            for name, v in values.items()
        }
        if self.module is not None:
            out = functional_call(
                self.module, {self._names[name]: v for name, v in given.items()}, (samples,)
            )
        else:
            out = self.function(
                given if self.container is dict else self.container(given.values()), samples
            )
        m = len(tree_leaves(samples)[0])
        if not isinstance(out, Tensor) or out.shape not in ((m,), (m, 1)):
            raise ValueError(
                f"log_psi returned {list(out.shape) if isinstance(out, Tensor) else type(out)} for "
                f"{m} samples; expected log ψ of each sample, [{m}] or [{m}, 1]. (Sign and log|ψ| "
                "apart: return log|ψ|, or torch.complex(log|ψ|, phase) for a complex amplitude.)"
            )
        out = out.reshape(m)
        if not out.is_complex():
            if self.kind == "holomorphic":
                raise ValueError(
                    f'amplitude="holomorphic" needs a complex log ψ, and log_psi returned {out.dtype}.'
                )
            return out[:, None]
        return out.real[:, None] if self.kind == "real" else torch.stack((out.real, out.imag), 1)

    def read(self, given: Any) -> Tensor:  # list, tuple or dict like the parameters, or flat -> [P]
        """A vector given in the container and shapes of the parameters, as a flat real tensor.

        Raises:
            ValueError: If shapes, names or number of tensors are not those of the parameters.
        """
        tree = given
        if isinstance(given, Mapping):
            tree = self.space.flatten({name: as_real(t) for name, t in given.items()})
        elif not isinstance(given, Tensor):
            tree = self.space.flatten([as_real(t) for t in given])
        X, form = self.space.read(
            tree.detach().to(self.device, self.dtype), self.dtype, self.device
        )
        if form.columns:
            raise ValueError(f"Expected one vector, got {X.shape[1]} columns.")
        return X[:, 0]

    def write(self, v: Tensor, like: Any = None) -> Any:  # [P] -> like the parameters
        """A flat vector in the container, shapes and dtypes of the parameters; flat if `like` is a
        flat tensor.
        """
        if isinstance(like, Tensor):
            return v.to(like.dtype)
        named = {
            name: (torch.view_as_complex(t.clone()) if p.is_complex() else t).to(p.dtype)
            for (name, t), p in zip(
                self.space.unflatten(v).items(), self.params.values(), strict=True
            )
        }
        kind: Any = (
            self.container if like is None else dict if isinstance(like, Mapping) else type(like)
        )
        return named if kind is dict else kind(named.values())


@contextmanager
def full_precision_no_grad(device: torch.device) -> Iterator[None]:
    """Context without autograd graph and autocast, whatever the modes of the caller."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def as_real(t: Tensor) -> Tensor:  # [*s] -> [*s], or [*s, 2] of a complex tensor
    """A complex tensor as its real and imaginary parts."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


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
        sizes = {len(t) for t in tree_leaves(samples)}
        if len(sizes) != 1:
            raise ValueError(
                "Expected tensors with all samples along their first axis; got the lengths "
                f"{sizes}."
            )
        self.psi, self.n = psi, sizes.pop()
        self.weights = self._read_weights(weights)
        self.root, self.free = self.weights.sqrt(), psi.snapshot()
        samples, step = mapped(on_device, samples, psi.device), chunk_size or self.n
        self.chunks = [
            tree_map_only(Tensor, lambda t, i=i: t[i : i + step], samples)
            for i in range(0, self.n, step)
        ]
        self.components = self._forward().shape[1]
        self.rows = 1 if psi.kind == "holomorphic" else self.components
        if psi.kind == "holomorphic":
            self._check_holomorphic()

    def _read_weights(self, weights: Any) -> Tensor:
        w = (
            torch.ones(self.n, dtype=self.psi.dtype)
            if weights is None
            else torch.as_tensor(weights).detach()
        )
        if w.shape != (self.n,) or w.is_complex():
            raise ValueError(
                f"Expected {self.n} real weights, one per sample; got {w.dtype} of shape "
                f"{list(w.shape)}."
            )
        if bool((bad := ~(torch.isfinite(w) & (w >= 0))).any()):
            raise ValueError(
                f"Expected weights that are finite and not negative; {name_samples(bad)} are not."
            )
        if (positive := int((w > 0).sum())) < 2:
            raise ValueError(
                f"Expected at least two samples with a positive weight, got {positive} of {self.n}."
            )
        w = w.to(torch.promote_types(w.dtype, self.psi.dtype))
        return (w / w.sum()).to(self.psi.device, self.psi.dtype)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context for calls of `log_psi`; restores the module and the global random state."""
        with ExitStack() as stack:
            stack.enter_context(preserve_state(self.psi.module or nn.Module(), None))
            stack.enter_context(torch.inference_mode(False))  # with gradients
            stack.enter_context(torch.autocast(self.psi.device.type, enabled=False))
            stack.enter_context(
                sdpa_kernel(SDPBackend.MATH)
            )  # fused attention has no second derivative
            yield

    def _forward(self) -> Tensor:  # -> [n, c]
        with self.running(), torch.no_grad():
            before = RandomState.now(self.psi.device)
            out = torch.cat([self.psi(self.free, chunk) for chunk in self.chunks])
            random = before != RandomState.now(self.psi.device)
            last = self.psi(self.free, tree_map_only(Tensor, lambda t: t[-1:], self.chunks[-1]))
        if bool((bad := ~torch.isfinite(out).all(1)).any()):
            raise NumericsError(
                f"log ψ is NaN or infinite for {name_samples(bad)}. Look for samples where ψ = 0, "
                "for parameters that diverged, or for overflow; leave such samples out."
            )
        tolerance = torch.finfo(out.dtype).eps ** 0.5
        if random or not torch.allclose(
            last, out[-1:], rtol=tolerance, atol=tolerance * float(out.abs().amax())
        ):
            raise UnsupportedError(
                f"log_psi gives {out[-1].tolist()} for the last sample among others, "
                f"{last[0].tolist()} for it alone{', and draws random numbers' if random else ''}; "
                "each output must be a function of one sample. (Dropout or batch norm in training "
                "mode? Call .eval() first. A normalisation over the batch? It does not matter "
                "here, leave it out.)"
            )
        return out

    def _check_holomorphic(self) -> None:
        """Cauchy and Riemann: the derivatives of the imaginary part are `i` times those of the real
        part.
        """
        with self.running():
            J = self._jacobian(
                tree_map_only(Tensor, lambda t: t[:2], self.chunks[0]), 2
            )  # [m, 2, P]
        real, imag = (
            torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
            for part in J.movedim(1, 0)
        )
        error, size = (imag - 1j * real).abs().amax(), real.abs().amax() + imag.abs().amax()
        if float(error) > 1e3 * torch.finfo(real.dtype).eps * float(size):
            raise ValueError(
                "log ψ is not holomorphic in its parameters, its derivatives violate the Cauchy-Riemann equations by "
                f'{float(error / size):.1e}. (Does it use .real, .imag, abs() or conj()?) Use amplitude="complex".'
            )

    def jacobians(self) -> Iterator[tuple[slice, Tensor]]:
        """Derivatives of each chunk's samples, [m, rows, P]."""
        start = 0
        for chunk in self.chunks:
            with self.running():
                J = self._jacobian(chunk, self.rows).to(self.psi.dtype)
            if bool((bad := ~torch.isfinite(J).all(2).all(1)).any()):
                raise NumericsError(
                    f"The derivatives of log ψ are NaN or infinite for {name_samples(bad, start)}, "
                    "where log ψ is finite. Look for square roots or norms at zero, and for nodes "
                    "of ψ."
                )
            yield slice(start, start + len(J)), J
            start += len(J)

    def _jacobian(self, chunk: Any, rows: int) -> Tensor:  # -> [m, rows, P]
        def one(sample: Any) -> Tensor:  # -> [rows, P]
            x = tree_map_only(Tensor, lambda t: t[None], sample)
            out, back = vjp(lambda free: self.psi(free, x)[0], self.free)[:2]
            found = [
                back(e)[0] for e in torch.eye(len(out), dtype=out.dtype, device=out.device)[:rows]
            ]
            return torch.stack(
                [torch.cat([g[name].reshape(-1) for name in self.psi.space.names]) for g in found]
            )

        try:
            return vmap(one)(chunk).detach()
        except (
            Exception
        ):  # vmap has many kinds of errors: control flow, in-place writes, unsupported operations
            graph = _Graph(self, chunk)
            basis = torch.eye(graph.out.numel(), dtype=graph.out.dtype, device=graph.out.device)
            found = [
                self.psi.space.flatten(graph.backward(u)) for u in basis.view(-1, *graph.out.shape)
            ]
            return torch.stack(found).unflatten(0, graph.out.shape)[:, :rows]


def name_samples(bad: Tensor, start: int = 0) -> str:
    """The samples where a mask [n] is True, in words.

    Example:
        >>> name_samples(torch.tensor([False, True, True]))
        '2 of 3 samples (1, 2)'
    """
    where = ", ".join(str(start + int(i)) for i in bad.nonzero()[:8, 0])
    return (
        f"{int(bad.sum())} of {len(bad)} samples ({where}{', ...' if int(bad.sum()) > 8 else ''})"
    )


class _Graph:
    """A forward pass of some samples, with what is needed to multiply with its Jacobian and the
    transpose of it.

    `J v` is the derivative of `wᵀ J v` with respect to `w`.
    """

    def __init__(self, ensemble: Ensemble, chunk: Any) -> None:
        self.leaves = {name: v.detach().requires_grad_() for name, v in ensemble.free.items()}
        self.out = ensemble.psi(self.leaves, chunk)  # [m, c]
        self.w, self._back = torch.zeros_like(self.out, requires_grad=True), None

    def forward(self, v: dict[str, Tensor]) -> Tensor:  # {name: [*s]} -> [m, c]
        self._back = self._back or self.backward(
            self.w, create_graph=True
        )  # Jᵀ w, with a graph to w
        product = torch.stack(
            [(g * v[name].to(g.dtype)).sum() for name, g in self._back.items()]
        ).sum()
        return torch.autograd.grad(product, self.w, retain_graph=True, materialize_grads=True)[0]

    def backward(
        self, u: Tensor, create_graph: bool = False
    ) -> dict[str, Tensor]:  # [m, c] -> {name: [*s]}
        options = {"retain_graph": True, "materialize_grads": True, "create_graph": create_graph}
        found = torch.autograd.grad(
            self.out, [*self.leaves.values()], u.to(self.out.dtype), **options
        )
        return dict(zip(self.leaves, found, strict=True))


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
        self.ensemble, self.matrix = ensemble, None
        self._scale: Tensor | None = None
        self._kept: _Graph | None = None
        if stored:
            J = torch.cat([J for _, J in ensemble.jacobians()])  # [n, rows, P]
            if psi.kind == "holomorphic":  # of f = u + iv with θ = x + iy: f' = ∂u/∂x - i ∂u/∂y
                J = torch.view_as_complex(J.unflatten(-1, (-1, 2)).contiguous()).conj()
            self.matrix = self.centred(J).flatten(0, 1).resolve_conj()

    def divide(self, scale: Tensor) -> None:
        """Divide columns by `scale` [P]; both parts of a complex parameter by the same."""
        if self.matrix is None:
            self._scale = scale
        else:
            self.matrix = self.matrix / (scale[::2] if self.matrix.is_complex() else scale)

    def centred(self, t: Tensor) -> Tensor:  # [n, ...] -> [n, ...]
        """`√W (I - 1 wᵀ) t`."""
        w, root = self.ensemble.weights, self.ensemble.root
        mean = torch.tensordot(w.to(t.dtype), t, dims=1)
        return (t - mean) * root.view(-1, *[1] * (t.ndim - 1)).to(t.dtype)

    def _graph(self, chunk: Any) -> _Graph:
        graph = self._kept or _Graph(self.ensemble, chunk)
        self._kept = graph if len(self.ensemble.chunks) == 1 else None
        return graph

    def _matmat(self, X: Tensor) -> Tensor:  # [P, K] -> [n·c, K]
        if self.matrix is not None:
            return _to_real(self.matrix @ self._from_real(X))
        columns, X = [], X if self._scale is None else X / self._scale[:, None]
        with self.ensemble.running():
            for chunk in self.ensemble.chunks:
                graph = self._graph(chunk)
                columns.append(
                    torch.stack([graph.forward(self.in_space.unflatten(v)) for v in X.T], -1)
                )
        return self.centred(torch.cat(columns).to(self.dtype)).flatten(
            0, 1
        )  # [n, c, K] -> [n·c, K]

    def _rmatmat(self, X: Tensor) -> Tensor:  # [n·c, K] -> [P, K]
        if self.matrix is not None:
            return _to_real(self.matrix.mH @ self._from_real(X))
        U = self.ensemble.root[:, None, None] * X.view(
            self.ensemble.n, self.ensemble.components, -1
        )
        U = U - self.ensemble.weights[:, None, None] * U.sum(0)  # (I - w 1ᵀ) √W X
        total, start = X.new_zeros(self.shape[1], X.shape[1]), 0
        with self.ensemble.running():
            for chunk in self.ensemble.chunks:
                graph = self._graph(chunk)
                parts, start = U[start : start + len(graph.out)], start + len(graph.out)
                total += torch.stack(
                    [self.in_space.flatten(graph.backward(u)) for u in parts.unbind(-1)], 1
                )
        return total if self._scale is None else total / self._scale[:, None]

    def _from_real(self, X: Tensor) -> Tensor:  # [2d, K] -> complex [d, K]
        assert self.matrix is not None
        return torch.complex(*X.unflatten(0, (-1, 2)).unbind(1)) if self.matrix.is_complex() else X

    def kernel(self) -> Tensor:
        """`Ō Ōᵀ` [n·c, n·c], the centred neural tangent kernel; of products from recorded layers,
        where they can be.
        """
        records = self.matrix is None and len(self.ensemble.chunks) == 1 and self._scale is None
        if records and (plain := recorded_kernel(self.ensemble)) is not None:
            return self.centred(self.centred(plain).T)
        M = self._stored()
        return _as_blocks(M @ M.mH) if M.is_complex() else gram(M.T)

    def _stored(self) -> Tensor:
        found = Scores(self.ensemble, True).matrix if self.matrix is None else self.matrix
        assert found is not None
        return found

    def covariance(self) -> Tensor:
        """`S = Ōᵀ Ō` [P, P]."""
        M = self._stored()
        return _as_blocks(M.mH @ M) if M.is_complex() else gram(M)

    def variances(self) -> Tensor:
        """The diagonal of `S`, [P]; one chunk at a time is in memory."""
        if self.matrix is not None:
            squares = self.matrix.abs().square().sum(0)
            return squares.repeat_interleave(2) if self.matrix.is_complex() else squares
        w, columns = self.ensemble.weights, 0.0
        mean = sum(torch.tensordot(w[at], J, dims=1) for at, J in self.ensemble.jacobians())
        for at, J in self.ensemble.jacobians():
            columns = columns + torch.tensordot(w[at], (J - mean).square(), dims=1).sum(0)
        assert isinstance(columns, Tensor)
        holomorphic = self.ensemble.psi.kind == "holomorphic"
        return (
            columns.unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2) if holomorphic else columns
        )


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
    psi, parts = ensemble.psi, list[Tensor]()
    if (
        psi.module is None
        or ensemble.components > 1
        or any(p.is_complex() for p in psi.params.values())
    ):
        return None

    def consume(batch: LayerBatch) -> None:
        if batch.role is not None and not batch.sparse:
            a, g = batch.inputs, batch.grads
            if isinstance(a, Tensor) and a.ndim == 3 and a.shape[1] == 1:
                return parts.append(gram(a[:, 0].T) * gram(g[0, :, 0].T))
        J = torch.cat(
            [t[0].reshape(batch.num_examples, -1) for t in batch.param_grads().values()], 1
        )
        parts.append(gram(J.T))

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
    return sum(parts, zeros).to(psi.dtype)


def _to_real(Y: Tensor) -> Tensor:  # complex [d, K] -> [2d, K]
    return torch.stack((Y.real, Y.imag), 1).flatten(0, 1) if Y.is_complex() else Y


def _as_blocks(M: Tensor) -> Tensor:  # complex [d, e] -> [2d, 2e]
    """A complex matrix as the real one that multiplies real and imaginary parts, each entry a 2 x 2
    block.
    """
    rows = torch.stack(
        (torch.stack((M.real, -M.imag), -1), torch.stack((M.imag, M.real), -1)), 1
    )  # [d, 2, e, 2]
    return rows.reshape(2 * M.shape[0], 2 * M.shape[1])
