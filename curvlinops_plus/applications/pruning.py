"""Pruning: optimal brain surgeon, with any curvature that has an inverse in closed form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.nn.utils.parametrize import ParametrizationList
from tqdm.auto import tqdm

from curvlinops_plus.applications.networks import require_own_values
from curvlinops_plus.applications.units import require_uncoupled, units_of
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Diagonal,
    LinearOperator,
    Space,
)
from curvlinops_plus.linalg.damping import Damping
from curvlinops_plus.linalg.decisions import is_true, read_together
from curvlinops_plus.linalg.dense import IdentityMultiple
from curvlinops_plus.linalg.numerics import wide
from curvlinops_plus.linalg.submatrices import Selection, submatrix
from curvlinops_plus.options import flag, instance, integer, number


@torch.no_grad()
def prune(
    model: nn.Module,
    K: LinearOperator,
    sparsity: float,
    rounds: int = 20,
    *,
    damping: Damping = 1e-4,
    candidates: Iterable[str] | None = None,
    units: str | Iterable[Iterable[str]] | None = None,
    progressbar: bool = False,
) -> dict[str, Tensor]:
    """Set those parameters of a model to zero that raise the loss least, and adjust the others to
    compensate.

    Around the trained parameters θ₀ the loss rises by `½ (θ - θ₀)ᵀ H (θ - θ₀)` with `H = K +
    damping I`. Each round finds the minimum over the remaining parameters F, with all constraints
    of this and earlier rounds: the others are zero and `θ_F = H_FF⁻¹ (H θ₀)_F`. Then it drops those
    whose removal costs least, `θ_i² / (2 [H_FF⁻¹]_ii)`, the same fraction in each round. No data
    are read. Sparsities above 80 % need more than one round.

    As with the functions of `torch.nn.utils.prune`, the model is changed: a parameter `weight`
    becomes `weight_orig`, with a buffer `weight_mask` that keeps pruned entries at zero while the
    model is trained further; `torch.nn.utils.prune.remove(module, "weight")` makes a plain `weight`
    with the zeros. A hook of the model applies all masks when it is called, including those of
    parameters that are read without calling their module.

    Args:
        model: The trained model.
        K: Its curvature, as `curvature(risk, KFAC)` returns it, on parameters by their names in the
            model. Those of the model that `K` doesn't contain don't change. With `DiagonalBlock` it
            is optimal brain damage: the others don't change.
        sparsity: The fraction of the candidates that will be zero.
        rounds: How often saliencies are computed.
        damping: Added to `K`, as in `K.shift(damping)`.
        candidates: Names of the parameters that may be pruned; others are only adjusted. Default:
            all of `K`.
        units: What is set to zero as a whole, by the loss that it costs, `½ θ_uᵀ H_uu θ_u`:
            "experts", each with its part of all stacks of a module, or lists of names or globs of
            parameters, as `[[f"experts.{e}.*"] for e in range(8)]`. `K` must not couple them with
            other parameters, so that nothing has to be adjusted; two products with `K` are all
            that it takes. `sparsity` is the fraction of units then, and `rounds` is not read.
        progressbar: Show a bar over the rounds.

    Returns:
        The mask of each candidate, True where an entry is left.

    Raises:
        ValueError: If `sparsity` is not in [0, 1), there are no rounds, `K` or `candidates` name
            parameters that the model doesn't have, or `K` was computed at other values than the
            model's; if `K` has no stacks of experts, or `units` overlap, or are
            parts of blocks.
        NoClosedForm: If a part of `K` has no inverse with a diagonal in closed form; of a small
            network `K.materialize()` has.
        UnsupportedError: If a candidate is a parameter from which a weight is computed (weight norm
            and others), or is pruned already.

    Cost: in double precision, for a block of n parameters memory for n² numbers and about n³ / 2
    operations for all rounds. One round takes a decomposition of n (1 - sparsity) parameters alone.

    Source: Hassibi & Stork 1993, "Second order derivatives for network pruning: optimal brain
    surgeon"; LeCun et al. 1990, "Optimal brain damage".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, KFAC, curvature, prune
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(50, 3)
        >>> X[:, 2] = X[:, 1]  # so either of the two may go, and the other one takes over
        >>> model = nn.Linear(3, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(X, X.sum(1, keepdim=True))])
        >>> masks = prune(model, curvature(risk, KFAC), sparsity=0.3, rounds=1, damping=1e-4)
        >>> masks["weight"].sum(), model.weight.sum().round(decimals=2)
        (tensor(2), tensor(3.))
    """
    instance("model", model, nn.Module, "a torch.nn.Module")
    instance("K", K, LinearOperator, "an operator, such as curvature(risk, KFAC)")
    number("sparsity", sparsity)
    rounds = integer("rounds", rounds)
    instance("candidates", candidates, Iterable, "a list of names of parameters", optional=True)
    flag("progressbar", progressbar)
    holders = _holders(model, K)
    chosen = set(holders if candidates is None else candidates)
    _require_prunable(holders, chosen, sparsity, rounds)
    space = K.in_space
    theta = space.flatten({key: model.get_parameter(key) for key in holders}).to(K.dtype)
    # Rounding would decide which of equally good parameters go.
    theta = theta.to(wide(theta))
    prunable = space.flatten(
        {key: torch.full(shape, float(key in chosen)) for key, shape in space.shapes.items()}
    )
    prunable = prunable.to(theta.device).bool()
    num_prunable = sum(space.shapes[key].numel() for key in chosen)
    H = K.shift(damping)
    H = (H.gather() if isinstance(H, BlockDiagonal) else H).to(dtype=theta.dtype)
    H_theta = H @ theta
    # The minimum over the remaining parameters F: θ_F = H_FF⁻¹ (H θ₀)_F.
    minimum = torch.zeros_like(theta)
    if units is not None:
        parts = units_of(K, units, chosen, holders)
        require_uncoupled(H, parts, theta, H_theta)
        remaining = _remaining_units(parts, theta * H_theta, sparsity)
        minimum[remaining] = theta[remaining]
    else:
        sizes = [
            len(theta) - num_prunable + round(num_prunable * (1 - sparsity) ** (step / rounds))
            for step in range(1, rounds + 1)
        ]
        bar = tqdm(sizes, "pruning", disable=not progressbar)
        remaining = _remaining(H, H_theta, prunable, bar)
        if len(remaining):
            left = Selection(Space.flat(len(remaining)), remaining, len(theta))
            minimum[remaining] = submatrix(H, left, left).inverse() @ H_theta[remaining]
    mask = torch.zeros_like(prunable).index_fill_(0, remaining, True)
    masks = {key: part.clone() for key, part in space.unflatten(mask).items() if key in chosen}
    for key, value in space.unflatten(minimum).items():
        model.get_parameter(key).copy_(value)
    for key, parameter_mask in masks.items():
        for holder in holders[key]:
            torch_prune.custom_from_mask(holder.module, holder.name, parameter_mask)
    if masks and _apply_masks not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_apply_masks, prepend=True)
    return masks


def _remaining(
    H: LinearOperator, H_theta: Tensor, prunable: Tensor, sizes: Iterable[int]
) -> Tensor:
    """Positions of the parameters that are left after all rounds, in order.

    Args:
        sizes: How many are left after each round.
    """
    remaining = torch.arange(len(prunable), device=prunable.device)
    gone = remaining[:0]
    surgeon = _Surgeon(H, H_theta)
    for size in sizes:
        saliencies = surgeon.saliencies(gone, remaining)
        saliencies = saliencies.where(prunable[remaining], torch.inf)
        is_left = torch.zeros_like(remaining).index_fill_(0, saliencies.topk(size).indices, 1)
        in_order = remaining[is_left.argsort(stable=True)]
        gone, remaining = in_order.split([len(remaining) - size, size])
    return remaining


class _Surgeon:
    """Saliencies `θ_i² / [H_FF⁻¹]_ii` at the minimum `θ_F = H_FF⁻¹ (H θ₀)_F` over the parameters F,
    from which some go in each round.
    """

    def __init__(self, H: LinearOperator, H_theta: Tensor) -> None:
        every = torch.arange(len(H_theta), device=H_theta.device)
        inverse = H.inverse()
        if isinstance(H, BlockDiagonal) and isinstance(inverse, BlockDiagonal):
            positions = H.positions()
            blocks = [(H._fetched(name), inverse._fetched(name)) for name in positions]
        else:
            positions = {"": every}
            blocks = [(H, inverse)]
        #: How many parameters of each block are left.
        self.numbers = [len(places) for places in positions.values()]
        self.starts = [0, *accumulate(self.numbers)][:-1]
        #: The place of each parameter where those of a block are neighbours.
        self.slots = torch.cat([*positions.values()]).argsort()
        self.ends = torch.tensor([*accumulate(self.numbers)], device=every.device)
        self.parts = [
            _Remainder.of(block, block_inverse, H_theta[places], every[: len(places)])
            for (block, block_inverse), places in zip(blocks, positions.values())
        ]

    def saliencies(self, gone: Tensor, remaining: Tensor) -> Tensor:
        """Of the remaining parameters.

        Args:
            gone: Positions of the parameters that have gone since the last call.
            remaining: Of those that are left.
        """
        if len(gone):
            self._drop(self.slots[gone].sort().values, self.slots[remaining].sort().values)
        saliencies = torch.empty_like(self.slots, dtype=self.parts[0].H_theta.dtype)
        for part, start in zip(self.parts, self.starts):
            saliencies[start + part.columns] = part.minimum.square() / part.variances
        return saliencies[self.slots[remaining]]

    def _drop(self, gone: Tensor, left: Tensor) -> None:
        """Let parameters go; slots, in order."""
        # The only numbers of a round that the host reads.
        bounds = [0, *torch.searchsorted(left, self.ends).tolist()]
        numbers_left = [end - start for start, end in pairwise(bounds)]
        numbers_gone = [before - after for before, after in zip(self.numbers, numbers_left)]
        self.numbers = numbers_left
        changes = [
            *zip(self.parts, self.starts, gone.split(numbers_gone), left.split(numbers_left))
        ]

        def parts() -> list[_Remainder]:
            return [part.without(gone - start, left - start) for part, start, gone, left in changes]

        self.parts = read_together(parts, left.device)


@dataclass(frozen=True, eq=False)
class _Remainder:
    """The minimum over the parameters F of a block that are left, and the diagonal of `H_FF⁻¹`.

    With the inverse `M` for a set of parameters, that for a set without R is `M - M_:R M_RR⁻¹ M_R:`
    `= M - Bᵀ B`, with `B = L⁻¹ M_R:` and `L Lᵀ = M_RR`. Rounds add rows to `B`.

    Attributes:
        H: The block.
        H_theta: `H θ₀` of the block's parameters.
        columns: Positions of parameters of which `H` was inverted, in order.
        inverse: The inverse for these.
        rows: `B`, in pieces.
        minimum: Of the remaining parameters, at their places among these.
        variances: The diagonal, at the same places.
    """

    H: LinearOperator
    H_theta: Tensor
    columns: Tensor
    inverse: LinearOperator
    rows: tuple[Tensor, ...]
    minimum: Tensor
    variances: Tensor

    @classmethod
    def of(
        cls, H: LinearOperator, inverse: LinearOperator, H_theta: Tensor, columns: Tensor
    ) -> _Remainder:
        minimum = inverse @ H_theta[columns]
        return cls(H, H_theta, columns, inverse, (), minimum, inverse.diagonal())

    def without(self, gone: Tensor, left: Tensor) -> _Remainder:
        """The same when the parameters `gone` have gone, too, and those at `left` are left."""
        c = len(self.columns)
        m = len(gone)
        is_diagonal = isinstance(self.inverse, (Diagonal, IdentityMultiple))
        if not m or not len(left) or is_diagonal:
            return self
        number_of_rows = sum(len(B) for B in self.rows)
        if m * c * (2 * number_of_rows + m) > len(left) ** 3:  # more operations than an inverse
            return self._anew(left)
        places = torch.searchsorted(self.columns, gone)
        picked = Selection(Space.flat(m), places, c)
        rows = submatrix(self.inverse, slice(None), picked).to_dense().T  # M_R:, [m, c]
        for B in self.rows:
            rows = rows - B[:, places].T @ B
        L, info = torch.linalg.cholesky_ex(rows[:, places])
        if is_true(info > 0):  # by rounding
            return self._anew(left)
        B = torch.linalg.solve_triangular(L, rows, upper=False)
        # θ_F - M_FR M_RR⁻¹ θ_R
        steps = torch.linalg.solve_triangular(L, self.minimum[places, None], upper=False)
        minimum = self.minimum - (B.T @ steps)[:, 0]
        variances = self.variances - B.square().sum(0)
        rows = (*self.rows, B)
        return replace(self, rows=rows, minimum=minimum, variances=variances)

    def _anew(self, left: Tensor) -> _Remainder:
        picked = Selection(Space.flat(len(left)), left, len(self.H_theta))
        inverse = submatrix(self.H, picked, picked).inverse()
        return _Remainder.of(self.H, inverse, self.H_theta, left)


def _remaining_units(units: list[Tensor], products: Tensor, sparsity: float) -> Tensor:
    """Positions of the parameters that are left of those units that cost most.

    Args:
        units: Positions of the parameters of each.
        products: `θ * (H θ)`, of which those of a unit add up to `θ_uᵀ H_uu θ_u`.
    """
    left = torch.ones_like(products, dtype=torch.bool)
    costs = torch.stack([products[unit].sum() for unit in units])
    for cheapest in costs.topk(round(sparsity * len(units)), largest=False).indices.tolist():
        left[units[cheapest]] = False
    return left.nonzero()[:, 0]


def _apply_masks(model: nn.Module, inputs: Any) -> None:
    """Mask all pruned parameters: PyTorch's hooks do so for a module that is called, and only
    then.
    """
    for module in model.modules():
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, torch_prune.BasePruningMethod):
                hook(module, inputs)


class _Holder(NamedTuple):
    """A module that has a parameter, and the parameter's name there."""

    module: nn.Module
    name: str


def _holders(model: nn.Module, K: LinearOperator) -> dict[str, list[_Holder]]:
    """All holders of each parameter that `K` knows: several if it is shared."""
    require_own_values(K, model, "K")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    foreign = [
        key
        for key, shape in K.in_space.shapes.items()
        if key not in parameters or parameters[key].shape != shape
    ]
    if foreign:
        raise ValueError(
            f"The model has no parameters {foreign[:3]} of the shapes that K has; it has "
            f"{[*parameters][:5]}."
        )
    holders_of = defaultdict[int, list[_Holder]](list)
    for module in model.modules():
        for name, p in module._parameters.items():
            holders_of[id(p)].append(_Holder(module, name))
    return {key: holders_of[id(parameters[key])] for key in K.in_space.names}


def _require_prunable(
    holders: dict[str, list[_Holder]], chosen: set[str], sparsity: float, rounds: int
) -> None:
    """Refuse unknown candidates, and those that are pruned or parametrized already."""
    if not 0 <= sparsity < 1 or rounds < 1:
        raise ValueError(
            f"sparsity={sparsity}, rounds={rounds}; expected a fraction in [0, 1) and at least one "
            "round."
        )
    unknown = chosen - holders.keys()
    if unknown:
        raise ValueError(
            f"`candidates` names {sorted(unknown)}, which K doesn't know; it knows {[*holders]}."
        )
    for key in holders:
        modules = [holder.module for holder in holders[key] if key in chosen]
        if any(torch_prune.is_pruned(m) or isinstance(m, ParametrizationList) for m in modules):
            raise UnsupportedError(
                f"{key!r} is pruned already, or a weight is computed from it. Leave it out of "
                "`candidates`, or make it plain: torch.nn.utils.prune.remove, "
                "remove_parametrizations."
            )
