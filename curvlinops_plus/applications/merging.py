"""Merging networks: the average of their parameters, weighted by their curvatures."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from curvlinops_plus.applications.networks import require_own_values, risk_of
from curvlinops_plus.errors import NoClosedForm
from curvlinops_plus.linalg import LinearOperator, RelativeDamping, Structure, cg
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
    dense, or block- diagonal of these; by conjugate gradients with the nearest Kronecker product as
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
        >>> risks = [EmpiricalRisk(m, nn.MSELoss(), [(x, x[:, :1])]) for m, x in zip(models, inputs)]
        >>> merged = merge(models, [curvature(risk, DiagonalBlock) for risk in risks], damping=0.0)
        >>> merged.weight.detach().round(decimals=3)  # (2 · 0 + 1 · 3) / 3, (2 · 0 + 4 · 3) / 6
        tensor([[1., 2.]])
    """
    models, curvatures = [cast(Model, inner_model(model)) for model in models], list(curvatures)
    if not models or len(models) != len(curvatures):
        raise ValueError(
            f"Expected a curvature for each of {len(models)} models, got {len(curvatures)}."
        )
    for k, (model, K) in enumerate(zip(models, curvatures)):
        if K.structure < Structure.SYMMETRIC:
            raise ValueError(f"curvatures[{k}]: expected a symmetric matrix, got {K.label}.")
        if (risk := risk_of(K)) and risk.model is not model:
            raise ValueError(
                f"curvatures[{k}] is of another network than models[{k}]; bring them in one order."
            )
        require_own_values(K, model, f"curvatures[{k}]")
    names = [
        _names(model, K, f"curvatures[{k}]") for k, (model, K) in enumerate(zip(models, curvatures))
    ]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"The curvatures are over other parameters: {names[0][:5]} and {names[-1][:5]}."
        )
    _require_equal_rest(models, set(names[0]))
    K, total = curvatures[0], cast(LinearOperator, sum(curvatures))
    damping = RelativeDamping(0.1) if damping is None else damping
    with torch.no_grad():
        params = [dict(model.named_parameters()) for model in models]
        vectors = [torch.cat([p[name].to(K.dtype).flatten() for name in names[0]]) for p in params]
        average = torch.stack(vectors).mean(0)
        right = torch.stack([K @ (v - average) for K, v in zip(curvatures, vectors)]).sum(0)
        try:
            found = average + total.inverse(damping) @ right
        except NoClosedForm:
            found = (
                average
                + cg(total.shift(damping), right, tol=torch.finfo(total.dtype).eps ** 0.75)[0]
            )
        merged = copy.deepcopy(models[0])
        own = dict(merged.named_parameters())
        for name, value in zip(names[0], K.in_space.unflatten(found).values()):
            own[name].copy_(value)
    return merged


def _names(model: nn.Module, K: LinearOperator, what: str) -> list[str]:
    """The network's names of the parameters that a curvature is over, in the order of its
    vectors.
    """
    of_model = dict(model.named_parameters())
    names = {id(p): name for name, p in of_model.items()}
    risk = risk_of(K)
    found = K.in_space.names if risk is None else [names[id(p)] for p in risk.own_params.values()]
    if [of_model[name].shape for name in found if name in of_model] != list(
        K.in_space.shapes.values()
    ):
        raise ValueError(
            f"{what} is over {K.in_space}, and the network has no parameters of these names and "
            "shapes."
        )
    return found


def _require_equal_rest(models: Sequence[nn.Module], merged: set[str]) -> None:
    """Refuse parameters and buffers that differ and are not merged."""
    rest = []
    for model in models:
        own = {
            id(p) for name, p in model.named_parameters() if name in merged
        }  # a shared one has several names
        rest.append(
            {name: t for name, t in model.state_dict(keep_vars=True).items() if id(t) not in own}
        )
    for other in rest[1:]:
        differ = [
            name
            for name, t in rest[0].items()
            if name not in other
            or (t is not other[name] and not (isinstance(t, Tensor) and t.equal(other[name])))
        ]
        if differ:
            words = (
                f"The networks differ in {differ[:5]}, of which there is no curvature. Include "
                "parameters in `params`"
            )
            raise ValueError(
                f"{words} of the risks; make buffers, such as statistics of batch norm, equal "
                "before."
            )
