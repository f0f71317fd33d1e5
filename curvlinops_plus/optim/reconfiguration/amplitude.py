"""`LogAmplitude`: a log-amplitude `log ψ(θ, x)` as a function of real tensors.

There are three kinds of amplitude, as in netket. `O` are the derivatives of `log ψ`:

| `amplitude` | log ψ | parameters | `O` of one sample |
| --- | --- | --- | --- |
| "real" | real; of a complex one the real part, `log|ψ|` | real or complex | `∇ log|ψ|`, one row |
| "complex" | complex | real or complex, also mixed | `∇ Re log ψ` and `∇ Im log ψ`, two rows |
| "holomorphic" | complex and holomorphic in the parameters | all complex | complex derivative, one row |

All other modules of this package work with real numbers. A complex parameter of shape `[*s]` is a real tensor
`[*s, 2]`, its real and imaginary parts (`torch.view_as_real`), and two rows are two numbers per sample. A holomorphic
function has the same two rows as a complex one, but the second follows from the first (Cauchy-Riemann equations), which
halves the derivatives and their memory.

The gradient of a real function with respect to a complex parameter is that with respect to the real part plus `i` times
that with respect to the imaginary part, as in `p.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from curvlinops_plus.linalg import Space
from curvlinops_plus.risk import named_params

Amplitude = Literal["real", "complex", "holomorphic"]
LogPsi = nn.Module | Callable[[Any, Any], Tensor]
Params = Sequence[Tensor] | Mapping[str, Tensor] | None


class LogAmplitude:
    """`log ψ` as a function of real tensors.

    Args:
        log_psi: A module called with samples, or a function `(params, samples)`; returns `[n]` or `[n, 1]`, one number
            per sample, each of which depends on its own sample only.
        params: A list, tuple or dict of tensors; of a module its own (None: all that require a gradient).
        amplitude: "real", "complex" or "holomorphic".

    Raises:
        ValueError: If `amplitude` is unknown, or parameters are of a kind that does not match it.
        TypeError: If `params` is no collection of tensors.
    """

    def __init__(self, log_psi: LogPsi, params: Params, amplitude: Amplitude = "real") -> None:
        if amplitude not in get_args(Amplitude):
            raise ValueError(f"Expected amplitude to be one of {list(get_args(Amplitude))}, got {amplitude!r}.")
        self.kind, self.module, self.function = amplitude, None, log_psi
        self.container: Any = dict if isinstance(params, Mapping) else tuple if isinstance(params, tuple) else list
        if isinstance(log_psi, nn.Module):
            self.module, self.params = log_psi, named_params(log_psi, params)
            names = {id(p): name for name, p in log_psi.named_parameters()}
            self._names = {key: names[id(p)] for key, p in self.params.items()}
        else:
            if not isinstance(params, (Mapping, list, tuple)) or not params:
                raise TypeError(
                    "Expected `params` to be a list, tuple or dict of tensors, which log_psi(params, samples) gets as "
                    f"its first argument; got {params!r}. (A module knows its own.)"
                )
            self.params = dict(params if isinstance(params, Mapping) else ((str(k), p) for k, p in enumerate(params)))
        self.device, self.dtype = next(iter(self.params.values())).device, torch.float32
        for p in self.params.values():  # the real dtype in which all are combined
            self.dtype = torch.promote_types(self.dtype, p.dtype.to_real())
        real = [name for name, p in self.params.items() if not p.is_complex()]
        if self.kind == "holomorphic" and real:
            raise ValueError(
                f'amplitude="holomorphic" needs complex parameters, and {real} are real. Use "complex", which takes '
                "parameters of both kinds."
            )
        self.space = Space.of({name: as_real(p) for name, p in self.params.items()})

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the parameters' current values as real tensors, in their own precision."""
        with torch.inference_mode(False):
            return {name: as_real(p.detach()).clone() for name, p in self.params.items()}

    def __call__(self, values: Mapping[str, Tensor], samples: Any) -> Tensor:  # {name: real}, m samples -> [m, c]
        """`log ψ` of m samples, with c = 1 number per sample or 2, real and imaginary part."""
        given = {name: torch.view_as_complex(v) if self.params[name].is_complex() else v for name, v in values.items()}
        if self.module is not None:
            out = functional_call(self.module, {self._names[name]: v for name, v in given.items()}, (samples,))
        else:
            out = self.function(given if self.container is dict else self.container(given.values()), samples)
        m = len(tree_leaves(samples)[0])
        if not isinstance(out, Tensor) or out.shape not in ((m,), (m, 1)):
            what = f"shape {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(
                f"log_psi returned {what} for {m} samples; expected [{m}] or [{m}, 1], log ψ of each sample. (Sign and "
                "log|ψ| apart: return log|ψ|, or torch.complex(log|ψ|, phase) for a complex amplitude.)"
            )
        out = out.reshape(m)
        if not out.is_complex():
            if self.kind == "holomorphic":
                raise ValueError(f'amplitude="holomorphic" needs a complex log ψ, and log_psi returned {out.dtype}.')
            return out[:, None]
        return out.real[:, None] if self.kind == "real" else torch.stack((out.real, out.imag), 1)

    # Vectors in the user's containers ------------------------------------------------------------------------------

    def read(self, given: Any, what: str) -> Tensor:  # list, tuple or dict like the parameters, or flat -> [P]
        """A vector given in the container and shapes of the parameters, as a flat real tensor.

        Raises:
            ValueError: If shapes, names or number of tensors are not those of the parameters.
        """
        tree = given
        if isinstance(given, Mapping):
            tree = {name: as_real(t) for name, t in given.items()}
        elif isinstance(given, (list, tuple)):
            tree = [as_real(t) for t in given]
        try:
            tree = tree if isinstance(tree, Tensor) else self.space.flatten(tree)
            X, form = self.space.read(tree.detach().to(self.device, self.dtype), self.dtype, self.device)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{what}: {error}") from error
        if form.columns:
            raise ValueError(f"{what}: expected one vector, got {X.shape[1]} columns.")
        return X[:, 0]

    def write(self, v: Tensor, like: Any = None) -> Any:  # [P] -> like the parameters
        """A flat vector in the container, shapes and dtypes of the parameters; flat if `like` is a flat tensor."""
        if isinstance(like, Tensor):
            return v.to(like.dtype)
        named = {
            name: (torch.view_as_complex(t.contiguous()) if p.is_complex() else t).to(p.dtype)
            for (name, t), p in zip(self.space.unflatten(v).items(), self.params.values(), strict=True)
        }
        kind: Any = self.container if like is None else dict if isinstance(like, Mapping) else type(like)
        return named if kind is dict else kind(named.values())


@contextmanager
def full_precision_no_grad(device: torch.device) -> Iterator[None]:
    """Context without autograd graph and autocast, whatever the modes of the caller."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def as_real(t: Tensor) -> Tensor:  # [*s] -> [*s], or [*s, 2] of a complex tensor
    """A complex tensor as its real and imaginary parts."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
