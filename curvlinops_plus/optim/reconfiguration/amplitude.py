"""Log-amplitudes `log ψ(θ, x)` as functions of real tensors.

There are three kinds of amplitude, as in netket. `O` are the derivatives of `log ψ`:

- "real": `log ψ` is real, or its real part `log|ψ|` is meant; parameters are real or complex. `O`
  of one sample is `∇ log|ψ|`, one row.
- "complex": `log ψ` is complex; parameters are real, complex or mixed. `O` has two rows,
  `∇ Re log ψ` and `∇ Im log ψ`.
- "holomorphic": `log ψ` is complex and holomorphic in the parameters, which are all complex. The
  complex derivative is one row.

All else works with real numbers. A complex parameter of shape `[*s]` is a real tensor `[*s, 2]`,
its real and imaginary parts (`torch.view_as_real`). The gradient of a real function with respect to
a complex parameter is that with respect to the real part plus `i` times that with respect to the
imaginary part, as in `p.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from curvlinops_plus.layer.replay import held_parameters
from curvlinops_plus.linalg import Space
from curvlinops_plus.options import function, instance, one_of
from curvlinops_plus.risk import named_params

Amplitude = Literal["real", "complex", "holomorphic"]
LogPsi = nn.Module | Callable[[Any, Any], Tensor]
PsiParams = Sequence[Tensor] | Mapping[str, Tensor] | None


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

    def __init__(self, log_psi: LogPsi, params: PsiParams, amplitude: Amplitude = "real") -> None:
        self.kind: Amplitude = one_of("amplitude", amplitude, *get_args(Amplitude))
        function("log_psi", log_psi, "log_psi(params, samples) -> [n]", optional=False)
        self.function = log_psi
        self.container: Any = list
        if isinstance(params, Mapping):
            self.container = dict
        elif isinstance(params, tuple):
            self.container = tuple
        self.module = log_psi if isinstance(log_psi, nn.Module) else None
        if self.module is not None:
            self.params = named_params(self.module, params)
            key_of = {id(p): key for key, p in self.params.items()}
            held = held_parameters(self.module).items()
            self._places = {name: key_of[id(p)] for name, p in held if id(p) in key_of}
        elif isinstance(params, Mapping) and params:
            self.params = dict(params)
        elif isinstance(params, (list, tuple)) and params:
            self.params = {str(k): p for k, p in enumerate(params)}
        else:
            raise TypeError(
                "Expected `params` of a function to be a list, tuple or dict of tensors; got "
                f"{params!r}."
            )
        for name, p in self.params.items():
            instance(f"params[{name}]", p, Tensor, "a tensor")
        self.device = next(iter(self.params.values())).device
        self.dtype = torch.float32  # the real dtype in which all are combined
        for p in self.params.values():
            self.dtype = torch.promote_types(self.dtype, p.dtype.to_real())
        real = [name for name, p in self.params.items() if not p.is_complex()]
        if self.kind == "holomorphic" and real:
            raise ValueError(
                f'amplitude="holomorphic" needs complex parameters, and {real} are real. Use '
                '"complex" for both kinds.'
            )
        self.space = Space.of({name: as_real(p) for name, p in self.params.items()})

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the parameters' current values as real tensors, in their own precision."""
        with torch.inference_mode(False):
            return {name: as_real(p.detach()).clone() for name, p in self.params.items()}

    def __call__(self, values: Mapping[str, Tensor], samples: Any) -> Tensor:
        """`log ψ` of m samples, [m, c]: c = 1 number per sample or 2, real and imaginary part.

        Args:
            values: Real tensors for the parameters, by name.
            samples: Tensors with m samples along their first axis.
        """
        params = {
            name: torch.view_as_complex(value) if self.params[name].is_complex() else value
            for name, value in values.items()
        }
        if self.module is not None:
            tensors = {name: params[key] for name, key in self._places.items()}
            out = functional_call(self.module, tensors, (samples,), tie_weights=False)
        elif self.container is dict:
            out = self.function(params, samples)
        else:
            out = self.function(self.container(params.values()), samples)
        m = len(tree_leaves(samples)[0])
        if not isinstance(out, Tensor) or out.shape not in ((m,), (m, 1)):
            raise ValueError(
                f"log_psi returned {list(out.shape) if isinstance(out, Tensor) else type(out)} for "
                f"{m} samples; expected log ψ of each sample, [{m}] or [{m}, 1]. (Sign and log|ψ| "
                "apart: return log|ψ|, or torch.complex(log|ψ|, phase) for a complex amplitude.)"
            )
        out = out.reshape(m)
        if not out.is_complex() and self.kind == "holomorphic":
            raise ValueError(
                f'amplitude="holomorphic" needs a complex log ψ, and log_psi returned {out.dtype}.'
            )
        if not out.is_complex():
            return out[:, None]
        if self.kind == "real":
            return out.real[:, None]
        return torch.stack((out.real, out.imag), 1)

    def read(self, tree: Any) -> Tensor:
        """A vector in the container and shapes of the parameters (or flat) as a flat real tensor,
        [P].

        Raises:
            ValueError: If shapes, names or number of tensors are not those of the parameters, or a
                tensor is complex and its parameter real.
        """
        self._require_real(tree)
        if isinstance(tree, Mapping):
            tree = self.space.flatten({name: as_real(t) for name, t in tree.items()})
        elif not isinstance(tree, Tensor):
            instance(
                "A vector like the parameters", tree, (list, tuple), "their container, or flat"
            )
            for t in tree:
                instance("A vector like the parameters", t, Tensor, "made of tensors")
            tree = self.space.flatten([as_real(t) for t in tree])
        tree = tree.detach().to(self.device, self.dtype)
        X, form = self.space.read(tree, self.dtype, self.device)
        if form.columns:
            raise ValueError(f"Expected one vector, got {X.shape[1]} columns.")
        return X[:, 0]

    def _require_real(self, tree: Any) -> None:
        """Refuse complex numbers for real parameters, and in a flat vector."""
        named = {"the flat vector": tree} if isinstance(tree, Tensor) else tree
        if isinstance(tree, (list, tuple)):
            named = dict(zip(self.params, tree))
        complex_ones = [name for name, p in self.params.items() if p.is_complex()]
        wrong = [
            name
            for name, t in (named.items() if isinstance(named, Mapping) else ())
            if isinstance(t, Tensor) and t.is_complex() and name not in complex_ones
        ]
        if wrong:
            raise ValueError(
                f"Expected real numbers for real parameters and in flat vectors, got complex ones "
                f"for {wrong}. Take real and imaginary parts by themselves, or the real part of a "
                "gradient; flat parts of complex parameters are `torch.view_as_real` of them."
            )

    def write(self, v: Tensor, like: Any = None) -> Any:
        """A flat vector [P] in the shapes and dtypes of the parameters, and in their container or
        that of `like`; flat if `like` is a flat tensor.
        """
        if isinstance(like, Tensor):
            return v.to(like.dtype)
        container: Any = self.container
        if isinstance(like, Mapping):
            container = dict
        elif like is not None:
            container = type(like)
        named = self.by_name(v)
        if container is dict:
            return named
        return container(named.values())

    def by_name(self, v: Tensor) -> dict[str, Tensor]:
        """A flat vector [P] by the parameters' names, in their shapes and dtypes."""
        named = {}
        for name, t in self.space.unflatten(v).items():
            dtype = self.params[name].dtype
            named[name] = (torch.view_as_complex(t.clone()) if dtype.is_complex else t).to(dtype)
        return named


def as_real(t: Tensor) -> Tensor:
    """A complex tensor [*s] as its real and imaginary parts, [*s, 2]; a real one as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
