"""Complex parameters as pairs of real ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def split_complex(model: nn.Module) -> list[str]:
    """Keep complex parameters as two real ones, their real and imaginary parts.

    The model computes what it did before, and can be trained, saved and used with everything here:
    vectors of curvatures have entries for both parts, and gradients are those with respect to them,
    which are the parts of PyTorch's complex gradient. Layers with such parameters have exact
    diagonals or full blocks, no Kronecker factors.

    Args:
        model: Changed in place, by `torch.nn.utils.parametrize`. A parameter `weight` becomes
            `parametrizations.weight.original0` and `original1`: so do it before a state is loaded
            or an optimizer made. `torch.nn.utils.parametrize.remove_parametrizations(module,
            "weight")` undoes it.

    Returns:
        The names of the parameters that were complex; none if there are none.

    Raises:
        ValueError: If several modules share one; the model has not changed then.

    Example:
        >>> model = nn.Module()
        >>> model.weight = nn.Parameter(torch.tensor([1 + 2j]))
        >>> split_complex(model), model.weight
        (['weight'], tensor([1.+2.j], grad_fn=<ComplexBackward0>))
        >>> [p.item() for p in model.parameters()]
        [1.0, 2.0]
    """
    places: dict[str, tuple[nn.Module, str]] = {}
    name_of: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        for local, p in module._parameters.items():
            if p is None or not p.is_complex():
                continue
            name = f"{path}.{local}" if path else local
            if p in name_of:
                raise ValueError(
                    f"{name_of[p]!r} and {name!r} are one complex parameter, which would become "
                    "two that are trained apart. Keep it in one module, and read it from there."
                )
            name_of[p] = name
            places[name] = module, local
    for module, local in places.values():
        parametrize.register_parametrization(module, local, _Parts())
    return [*places]


class _Parts(nn.Module):
    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.complex(real, imaginary)

    def right_inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value.real.clone(), value.imag.clone()
