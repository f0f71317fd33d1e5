"""Merging networks: the average of their parameters, weighted by their curvatures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from curvlinops_plus.applications.networks import require_own_values, risk_of
from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.layer.kept import module_copy
from curvlinops_plus.linalg import LinearOperator, RelativeDamping, Structure, cg
from curvlinops_plus.options import instance
from curvlinops_plus.risk.parameters import inner_model

Model = TypeVar("Model", bound=nn.Module)


def merge(
    models: Sequence[Model], curvatures: Sequence[LinearOperator], *, damping: Any = None
) -> Model:
    """One network from several of the same architecture: `θ = θ̄ + (Σ_k K_k + δ I)⁻¹ Σ_k K_k (θ_k -
    θ̄)`.

    `θ̄` is the plain average of the parameters, and `θ` the minimum of the quadratic models of all
    losses together, `Σ_k ½ (θ - θ_k)ᵀ K_k (θ - θ_k)`, with `½ δ |θ - θ̄|²` for directions that no
    curvature says anything about. With diagonal Fisher matrices it is Fisher merging (Matena &
    Raffel 2022).

    Where the sum of the curvatures has an inverse that is taken: in closed form if it is diagonal,
    dense, or block-diagonal of these; by conjugate gradients with the nearest Kronecker product as
    preconditioner for blocks that are sums of Kronecker products. Otherwise it is conjugate
    gradients.

    Args:
        models: The networks; best fine-tuned from the same one.
        curvatures: One symmetric matrix for each, over the same parameters in the same order, as
            `curvature(risk, KFAC)` of a risk of that network. `2 * K` gives a network double
            weight.
        damping: `δ`, a number or a rule, as for `inverse`. Default: `RelativeDamping(0.1)` of the
            sum. With less, directions that the data say little about are left to noise.

    Returns:
        A copy of the first network with the merged parameters. The given ones don't change.

    Raises:
        ValueError: If there are no models, not as many curvatures as models, a curvature is not
            symmetric or of another network or other values of its parameters, spaces differ, or
            parameters or buffers that no curvature is of differ between the networks.

    Cost: of the inverse, or a product with all curvatures per iteration.

    Example:
        >>> from curvlinops_plus import DiagonalBlock, EmpiricalRisk, curvature, merge
        >>> models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
        >>> for model, value in zip(models, [0.0, 3.0]):
        ...     _ = nn.init.constant_(model.weight, value)
        >>> inputs = torch.eye(2) * 2**0.5, torch.diag(torch.tensor([1.0, 2.0]))
        >>> data = [[(x, x[:, :1])] for x in inputs]
        >>> risks = [EmpiricalRisk(m, nn.MSELoss(), d) for m, d in zip(models, data)]
        >>> merged = merge(models, [curvature(risk, DiagonalBlock) for risk in risks], damping=0.0)
        >>> merged.weight.detach().round(decimals=3)  # (2 · 0 + 1 · 3) / 3, (2 · 0 + 4 · 3) / 6
        tensor([[1., 2.]])
    """
    instance("models", models, Iterable, "a list of networks")
    instance("curvatures", curvatures, Iterable, "a list of operators, one for each network")
    models = [cast(Model, inner_model(model)) for model in models]
    curvatures = list(curvatures)
    for k, model in enumerate(models):
        instance(f"models[{k}]", model, nn.Module, "a torch.nn.Module")
    for k, K in enumerate(curvatures):
        instance(f"curvatures[{k}]", K, LinearOperator, "an operator of `curvature`")
    if not models or len(models) != len(curvatures):
        raise ValueError(
            f"Expected a curvature for each of {len(models)} models, got {len(curvatures)}."
        )
    names_of_models = [
        _parameter_names(k, model, K) for k, (model, K) in enumerate(zip(models, curvatures))
    ]
    names = names_of_models[0]
    if any(differing != names for differing in names_of_models):
        raise ValueError(
            f"The curvatures are over other parameters: {names[:5]} and {names_of_models[-1][:5]}."
        )
    _require_equal_rest(models, set(names))
    # θ = θ̄ + (Σ_k K_k + δ I)⁻¹ Σ_k K_k (θ_k - θ̄)
    total = cast(LinearOperator, sum(curvatures))
    damping = RelativeDamping(0.1) if damping is None else damping
    with GradMode(False):
        thetas = [_parameter_vector(model, names, total.dtype) for model in models]
        average = torch.stack(thetas).mean(0)
        deviations = [K @ (theta - average) for K, theta in zip(curvatures, thetas)]
        right_side = torch.stack(deviations).sum(0)
        try:
            theta = average + total.inverse(damping) @ right_side
        except NoClosedForm:
            tolerance = torch.finfo(total.dtype).eps ** 0.75
            theta = average + cg(total.shift(damping), right_side, tol=tolerance)[0]
        merged = module_copy(models[0])
        values = total.in_space.unflatten(theta).values()
        for name, value in zip(names, values):
            merged.get_parameter(name).copy_(value)
    return merged


def _parameter_vector(model: nn.Module, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    return torch.cat([model.get_parameter(name).to(dtype).flatten() for name in names])


def _parameter_names(k: int, model: nn.Module, K: LinearOperator) -> list[str]:
    """The network's names of the parameters that its curvature is over, in the order of vectors.

    Refuses a curvature that is not symmetric, or not of this network as it is.
    """
    title = f"curvatures[{k}]"
    if K.structure < Structure.SYMMETRIC:
        raise ValueError(f"{title}: expected a symmetric matrix, got {K.label}.")
    risk = risk_of(K)
    if risk is not None and risk.model is not model:
        raise ValueError(
            f"{title} is of another network than models[{k}]; bring them in one order."
        )
    require_own_values(K, model, title)
    parameters = dict(model.named_parameters())
    if risk is None:
        names = K.in_space.names
    else:
        name_of = {id(p): name for name, p in parameters.items()}
        names = [name_of[id(p)] for p in risk.own_params.values()]
    shapes = [parameters[name].shape for name in names if name in parameters]
    if shapes != list(K.in_space.shapes.values()):
        raise ValueError(
            f"{title} is over {K.in_space}, and the network has no parameters of these names and "
            "shapes."
        )
    return names


def _require_equal_rest(models: Sequence[nn.Module], merged: set[str]) -> None:
    """Refuse parameters and buffers that differ and are not merged."""
    reference, *rests = [_unmerged_state(model, merged) for model in models]
    for rest in rests:
        differing = [
            name
            for name, entry in reference.items()
            if name not in rest or not _same_entry(entry, rest[name])
        ]
        if differing:
            raise ValueError(
                f"The networks differ in {differing[:5]}, of which there is no curvature. Include "
                "parameters in `params` of the risks; make buffers, such as statistics of batch "
                "norm, equal before."
            )


def _unmerged_state(model: nn.Module, merged: set[str]) -> dict[str, Any]:
    """A network's state but for the merged parameters, under all names of a shared one."""
    merged_ids = {id(p) for name, p in model.named_parameters() if name in merged}
    state = model.state_dict(keep_vars=True)
    return {name: entry for name, entry in state.items() if id(entry) not in merged_ids}


def _same_entry(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, Tensor) and a.equal(b))
