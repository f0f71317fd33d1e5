"""Block-diagonal curvature of a risk: one block per layer, or per parameter."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar
from warnings import warn

import torch
from torch import Tensor

from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.plan import Entry, Sums, make_plan
from curvlinops_plus.blocks.serialization import fingerprint, same_fingerprint
from curvlinops_plus.blocks.state import check_state, describe, read_blocks, write_blocks
from curvlinops_plus.blocks.verify import Verification, verify
from curvlinops_plus.errors import CurvatureWarning
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Deferred,
    Kronecker,
    LinearOperator,
    Space,
    Structure,
    heuristic_damping,
)
from curvlinops_plus.linalg.damping import resolve
from curvlinops_plus.risk import EmpiricalRisk, ForwardOnly, Layer, Vectors, as_vectors
from curvlinops_plus.risk.determinism import require_same
from curvlinops_plus.risk.layers import find_layers
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import is_iterator
from curvlinops_plus.risk.sweep import sweep

__all__ = ["BlockwiseLinearOperator", "curvature"]


class BlockwiseLinearOperator(Deferred):
    """A block-diagonal approximation of the curvature of an empirical risk.

    Blocks are computed at first use, in as few sweeps over the data as the approximations need, and kept. All numbers
    that follow from structure are there: `trace det logdet frobenius_norm eigenvalues() diagonal() inverse(damping)
    power(p, damping) sample(generator)`, and adding a multiple of the identity keeps them.

    Args:
        risk: Model, loss and data.
        approximation: An approximation for all layers, or a mapping from layer names, globs or module types to one.
        default: The approximation of layers that the mapping does not name.
        vectors: What is sent back through the network, or its name (`as_vectors`).
        separate_weight_and_bias: Give every parameter its own block.
        check_deterministic: Compute the blocks now, and compare the total loss of two passes over the data.

    Raises:
        RuntimeError: If two passes over the data do not give the same total loss.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, KFAC
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.ones(5, 3), torch.zeros(5, 2))])
        >>> K = BlockwiseLinearOperator(risk, KFAC)
        >>> print(K)
        BlockwiseLinearOperator 26x26, float32 on cpu, not computed yet
          layer  module  rule        parameters            approximation  blocks
          0      Linear  LinearRule  0.weight, 0.bias      KFAC           4x4
          2      Linear  LinearRule  2.weight, 2.bias      KFAC           2x5
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        approximation: Any = KFAC,
        *,
        default: Any = KFAC,
        vectors: Vectors | str | None = None,
        separate_weight_and_bias: bool = False,
        check_deterministic: bool = False,
    ) -> None:
        self.risk = risk
        self.vectors = as_vectors(vectors)
        self.separate_weight_and_bias = separate_weight_and_bias
        self.plan: list[Entry] = make_plan(
            find_layers(risk.model, risk.params, separate_weight_and_bias), approximation, default
        )
        self.check_deterministic = check_deterministic
        self.examples: int | None = None
        self._operator: BlockDiagonal | None = None
        self._converted: tuple[torch.device | None, torch.dtype | None] = (None, None)
        if check_deterministic:
            self.compute()

    # ---------------------------------------------------------------------------------------------------- computing
    def compute(self) -> BlockDiagonal:
        """Compute all blocks anew. Nothing is ever added to what was there before."""
        with preserve_state(self.risk.model, self.risk.data):
            sums = Sums(self.risk, self.plan, self.vectors, keep=True)
            while not sums.done:
                sums.sweep(self._title(len(sums.totals)))
                if self.check_deterministic and len(sums.totals) == 2:
                    require_same(self.risk, *sums.totals)
                sums.finish()
            if self.check_deterministic and len(sums.totals) == 1:
                self._second_look(sums)
                require_same(self.risk, *sums.totals)
        return self._install(sums.blocks, sums.totals[0].examples)

    def _title(self, sweep: int) -> str:
        return f"{type(self).__name__} sweep {sweep + 1}"

    def _install(self, blocks: Mapping[str, LinearOperator], examples: int) -> BlockDiagonal:
        ordered = {group.name: blocks[group.name] for layer in self._layers for group in layer.groups}
        layouts = {group.name: group.layout for layer in self._layers for group in layer.groups}
        operator = BlockDiagonal(ordered, layouts, self.risk.space).to(dtype=self.risk.dtype)
        self._operator, self.examples = operator.to(*self._converted), examples
        return self._operator

    def _second_look(self, sums: Sums) -> None:
        """One more forward pass, for the determinism check."""
        if is_iterator(self.risk.data):
            raise ValueError(
                "`data` is an iterator, which can be read only once, and the determinism check reads it again. "
                "Pass a list of batches or a DataLoader, or "
                "check_deterministic=False."
            )
        sums.totals.append(sweep(self.risk, [], ForwardOnly(), lambda seen: None, desc="determinism check"))

    @property
    def operator(self) -> BlockDiagonal:
        """The blocks as a plain operator that knows nothing of networks; computed at first use."""
        return self.compute() if self._operator is None else self._operator

    @property
    def _layers(self) -> list[Layer]:
        return [entry.layer for entry in self.plan]

    @property
    def blocks(self) -> dict[str, LinearOperator]:
        """Block name to operator. Blocks are named after layers, or after parameters where those stand apart."""
        return dict(self.operator.blocks)

    # ----------------------------------------------------------------------------------------------- linear operator
    @property
    def in_space(self) -> Space:
        return self.risk.space

    @property
    def dtype(self) -> torch.dtype:
        return self._converted[1] or self.risk.dtype

    @property
    def device(self) -> torch.device:
        return self._converted[0] or self.risk.device

    @property
    def structure(self) -> Structure:
        return Structure.PSD

    def inverse(
        self,
        damping: Any = 0.0,
        *,
        use_heuristic_damping: bool = False,
        min_damping: float = 1e-8,
        retry_double_precision: bool = True,
    ) -> LinearOperator:
        """`(K + damping·I)⁻¹`, an operator with its own `logdet`, `trace`, `sample`.

        Args:
            damping: A number; a tensor with one value per block; a rule such as `RelativeDamping(0.1)`; or a pair
                `(λ_A, λ_G)` that is added to the Kronecker factors instead.
            use_heuristic_damping: Split the number over the factors by Martens & Grosse 2015, section 6.3. A bias apart
                is damped like the gradient factor of its weight.
            min_damping: Lower bound of each side under the heuristic.
            retry_double_precision: Try a failing Cholesky decomposition once more in float64.

        Raises:
            SingularMatrixError: If a block is singular and `damping` is 0; names the block.
            ValueError: If a pair is given together with the heuristic.
        """
        if use_heuristic_damping:
            if isinstance(damping, tuple):
                raise ValueError("Heuristic and exact damping require a single damping value.")
            damping = self._heuristic(damping, min_damping)
        elif isinstance(damping, tuple):  # a bias apart has a gradient factor only
            blocks = self.operator.blocks
            damping = {name: damping if isinstance(b, Kronecker) else damping[1] for name, b in blocks.items()}
        return self.operator.inverse(damping, retry_double_precision=retry_double_precision)

    def _heuristic(self, damping: Any, min_damping: float) -> dict[str, Any]:
        """Block name to damping: a pair for Kronecker blocks, a number for others."""
        blocks = self.operator.blocks
        result: dict[str, Any] = {
            name: resolve(value, blocks[name]) for name, value in self.operator.per_block(damping).items()
        }
        for layer in self._layers:
            pair = None
            for group in layer.groups:
                block = blocks[group.name]
                if isinstance(block, Kronecker):
                    pair = heuristic_damping(block.A, block.G, result[group.name], min_damping)
            for group in layer.groups:
                if pair is not None:
                    result[group.name] = pair if isinstance(blocks[group.name], Kronecker) else pair[1]
        return result

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> BlockwiseLinearOperator:
        """The same operator on another device or in another precision; the model is left where it is.

        Blocks computed later are converted too.
        """
        moved = copy.copy(self)
        moved._converted = (
            self._converted[0] if device is None else torch.device(device),
            self._converted[1] if dtype is None else dtype,
        )
        moved._operator = None if self._operator is None else self._operator.to(device=device, dtype=dtype)
        return moved

    def split(self, v: Any) -> dict[str, Tensor]:
        """A vector's parts, block by block (`BlockDiagonal.split`): `K.blocks[name] @ K.split(v)[name]`."""
        return self.operator.split(v)

    def merge(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector that `parts` are the blocks' parts of: undoes `split`."""
        return self.operator.merge(parts)

    def gradient_and_loss(self) -> tuple[list[Tensor], Tensor]:
        """Gradient of the loss in the order of the parameters, and the loss, over all data."""
        gradient, loss = self.risk.gradient_and_loss()
        return list(gradient.values()), loss

    # ------------------------------------------------------------------------------------------------------- factors
    @property
    def mapping(self) -> dict[str, dict[str, int]]:
        """Layer name to its parameters' own names and their positions in `params`."""
        order = {key: position for position, key in enumerate(self.risk.params)}
        return {
            layer.name: {local: order[key] for use in layer.uses for local, key in use.keys.items()}
            for layer in self._layers
        }

    def verify(self, num_examples: int = 3) -> Verification:
        """Check rules, statistics, loss and traces on a few examples, layer by layer.

        See `curvlinops_plus.blocks.verify.verify`.
        """
        return verify(self, num_examples)

    @property
    def label(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__} {self.shape[0]}x{self.shape[1]}, {dtype} on {self.device}"

    def __repr__(self) -> str:
        state = "not computed yet" if self._operator is None else f"from {self.examples} examples"
        rows = [("layer", "module", "rule", "parameters", "approximation", "blocks")]
        for entry in self.plan:
            layer = entry.layer
            sizes = ", ".join("x".join(map(str, group.layout.matrix_shape)) for group in layer.groups)
            kinds = "+".join(type(use.owner).__name__ for use in layer.uses)
            rules = "+".join(type(use.rule).__name__ for use in layer.uses)
            name, params = layer.name or "(model)", ", ".join(layer.params)
            rows.append((name, kinds, rules, params, repr(entry.approximation), sizes))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  " + "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([f"{self.label}, {state}", *lines])

    # --------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """All blocks and what they were computed from, in tensors and plain Python.

        `torch.save` and `torch.load(weights_only=True)` carry it, and so do `save` and `load` (safetensors).
        """
        state = describe(self)
        if self._operator is not None:
            state["examples"] = self.examples
            state |= write_blocks(self, self._operator)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the blocks of a state. The data is not read, the model is not changed.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            ValueError: If the state is cut off or foreign, or was computed for another loss, other layers, shapes or
                options; nothing has changed then.

        Warns:
            CurvatureWarning: If the parameters changed since.
        """
        self._load(state_dict, stacklevel=3)

    def _load(self, state_dict: Mapping[str, Any], stacklevel: int) -> None:
        check_state(self, state_dict)
        blocks = read_blocks(self, state_dict)
        if not same_fingerprint(state_dict["fingerprint"], fingerprint(self.risk.params)):
            warn(
                "The model's parameters differ from those that this state was computed at; its blocks describe the old "
                "ones.",
                CurvatureWarning,
                stacklevel=stacklevel,
            )
        self._adopt(state_dict)
        if blocks is None:
            self._operator = None
        else:
            self._install(blocks, state_dict["examples"])

    #: Whether a state may come from other vectors, which are then taken over.
    adopts_vectors: ClassVar[bool] = False

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Take over the options that a state was computed with."""
        names = ("progressbar", "num_data", "num_per_example_loss_terms")
        self.risk.options = replace(self.risk.options, **{name: state[name] for name in names})


def curvature(
    risk: EmpiricalRisk,
    approximation: Any = KFAC,
    *,
    default: Any = KFAC,
    vectors: Vectors | str | None = None,
    separate_weight_and_bias: bool = False,
    check_deterministic: bool = False,
) -> BlockwiseLinearOperator:
    """Block-diagonal curvature of a risk, any mix of approximations over its layers.

    Args:
        risk: Model, loss and data.
        approximation: An approximation for all layers (KFAC, EKFAC, NearestKronecker, TNT, DiagonalBlock, FullBlock,
            ScaledIdentity, your own `Accumulator`), or a mapping from layer names, globs or module types to one. Exact
            names come before globs, globs before types.
        default: The approximation of layers that the mapping does not name.
        vectors: What is sent back: `Exact()` (the default), `MonteCarlo(samples, seed)`, `Empirical()`,
            `ForwardOnly()`.
        separate_weight_and_bias: Give every parameter its own block.
        check_deterministic: Compute now and compare the total loss of two passes.

    Returns:
        A linear operator whose blocks are computed at first use.

    Raises:
        ValueError: If a key of the mapping matches no layer.

    Warns:
        CurvatureWarning: Once, listing the layers that get their exact diagonal because they have no Kronecker factors.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EKFAC, EmpiricalRisk, FullBlock
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.rand(5, 3), torch.zeros(5, 2))])
        >>> K = curvature(risk, {nn.LayerNorm: FullBlock, "2": EKFAC})
        >>> [type(block).__name__ for block in K.blocks.values()]
        ['Kronecker', 'Dense', 'Eigendecomposed']
    """
    return BlockwiseLinearOperator(
        risk,
        approximation,
        default=default,
        vectors=vectors,
        separate_weight_and_bias=separate_weight_and_bias,
        check_deterministic=check_deterministic,
    )
