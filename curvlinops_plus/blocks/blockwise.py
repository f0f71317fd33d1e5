"""Block-diagonal curvature of a risk: one block per layer, or per parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks.accumulator import Accumulator, Approximation, Choice, Choices
from curvlinops_plus.blocks.approximations import APPROXIMATIONS
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.plan import (
    LayerPlan,
    Memory,
    Plan,
    memory_of,
    plan_table,
)
from curvlinops_plus.blocks.state import (
    checked,
    description_of,
    from_data,
    params_of,
    take_state,
    vectors_of,
)
from curvlinops_plus.blocks.summary import Summary, summary_of
from curvlinops_plus.blocks.sweeps import KEPT_BYTES, Sweeps
from curvlinops_plus.blocks.verify import Verification, verify
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import (
    BlockDiagonal,
    Deferred,
    Kronecker,
    LinearOperator,
    OwnedBlockDiagonal,
    Structure,
    heuristic_damping,
)
from curvlinops_plus.linalg.checksums import sealed
from curvlinops_plus.linalg.damping import Damping, HeuristicDamping, Scalar, resolve
from curvlinops_plus.linalg.fields import reading
from curvlinops_plus.linalg.packing import pack
from curvlinops_plus.linalg.stacks import joined_dampings, lay_together
from curvlinops_plus.options import device_of, flag, whole
from curvlinops_plus.risk import EmpiricalRisk, Vectors
from curvlinops_plus.risk.batches import require_rereadable
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.found_reads import rebuild_reads
from curvlinops_plus.risk.function_module import ModelOrFunction
from curvlinops_plus.risk.function_reads import layers_of
from curvlinops_plus.risk.losses import rebuild_losses
from curvlinops_plus.risk.parameters import Fingerprint, changed_parameters, fingerprint
from curvlinops_plus.risk.risk import takes_risk

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockwiseLinearOperator(Deferred):
    """A block-diagonal approximation of the curvature of an empirical risk.

    Blocks are computed once, in as few sweeps over the data as the approximations need, and kept.
    In closed form it has `trace det logdet frobenius_norm eigenvalues() diagonal() inverse(damping)
    power(p, damping) sample(generator)`, and adding a multiple of the identity keeps them.

    Args:
        risk: Model, loss and data.
        approximation: An approximation for all layers, or a mapping from layer names, globs or
            module types to one.
        default: The approximation of layers that the mapping does not name.
        vectors: What is backpropagated through the network, or its name (`as_vectors`).
        separate_weight_and_bias: Give every parameter its own block.
        check_deterministic: True compares the total loss of two passes over the data when blocks
            are computed. None: two evaluations of a few examples have to agree. False: not even
            these.
        max_kept_bytes, owned, max_bytes, offload: As for `curvature`.
        compute: Compute the blocks now. Otherwise at first use, which refuses parameters that have
            changed since.

    Raises:
        RuntimeError: If two passes over the data do not give the same total loss; at the first use
            of an operator with `compute=False`, if the model's parameters changed before it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import EmpiricalRisk, KFAC
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> risk = EmpiricalRisk(model, nn.MSELoss(), [(torch.ones(5, 3), torch.zeros(5, 2))])
        >>> K = BlockwiseLinearOperator(risk, KFAC)
        >>> print(K)
        BlockwiseLinearOperator 26x26, float32 on cpu, from 5 examples
          layer  module  rule        parameters            approximation  blocks
          0      Linear  LinearRule  0.weight, 0.bias      KFAC           4x4
          2      Linear  LinearRule  2.weight, 2.bias      KFAC           2x5
    """

    #: Whether a state may come from other vectors of the same kind, which are then taken over.
    _adopts_vectors: bool = False
    #: Whether the blocks were computed from the data of the risk, not from a stream, and not
    #: loaded.
    _of_data: bool = False

    @takes_risk
    def __init__(
        self,
        risk: EmpiricalRisk,
        approximation: Choices = KFAC,
        *,
        default: Choice = KFAC,
        vectors: Vectors | str | None = None,
        separate_weight_and_bias: bool = False,
        check_deterministic: bool | None = None,
        max_kept_bytes: int = KEPT_BYTES,
        owned: bool = False,
        max_bytes: int | None = None,
        offload: str | torch.device | None = None,
        compute: bool = True,
    ) -> None:
        plan = Plan(risk, approximation, default, vectors, separate_weight_and_bias, owned)
        flag("compute", compute)
        kept = whole(max_kept_bytes)
        if kept is None or kept < 0:
            raise ValueError(
                f"max_kept_bytes={max_kept_bytes!r} must be an integer of at least 0; 0 keeps "
                "nothing."
            )
        self._begin(plan, check_deterministic, max_kept_bytes, max_bytes, offload)
        if compute:
            self.compute()
        else:
            self.parameters = fingerprint(self.risk)

    def _begin(
        self,
        plan: Plan,
        check_deterministic: bool | None = None,
        max_kept_bytes: int = KEPT_BYTES,
        max_bytes: int | None = None,
        offload: str | torch.device | None = None,
    ) -> None:
        """Have a plan and options, and no blocks."""
        risk = plan.risk
        super().__init__(risk.space, risk.dtype, risk.device, Structure.PSD)
        #: The layers with their approximations; the operator has the same risk and vectors.
        self.plan = plan
        self.risk = risk
        self.vectors = plan.vectors
        self.separate_weight_and_bias = plan.separate_weight_and_bias
        self.owned = plan.owned
        #: What multiples are, times the curvature.
        self.scale = 1.0
        self.check_deterministic = flag("check_deterministic", check_deterministic, optional=True)
        self.max_kept_bytes = max_kept_bytes
        self.max_bytes = max_bytes
        #: Where finished blocks are kept, if not on the operator's own device.
        self._kept_on = device_of("offload", offload)
        self._operator: BlockDiagonal | None = None
        #: Sweeps of which some are left.
        self._begun: Sweeps | None = None
        #: The number of examples that the blocks were computed from, None before.
        self.examples: int | None = None
        #: Of the model's parameters that the blocks belong to, or will belong to.
        self.parameters: Fingerprint = {}

    @classmethod
    def _of_plan(cls, plan: Plan) -> Self:
        """An operator of these layers without blocks."""
        K = cls.__new__(cls)
        K._begin(plan)
        return K

    # ------------------------------------------------------------------------------------ computing
    def compute(self) -> Self:
        """Compute all blocks again, with the current parameters. Returns the operator itself."""
        self._compute(fingerprint(self.risk))
        return self

    def _compute(
        self, parameters: Fingerprint, begun: Sweeps | None = None, max_sweeps: int | None = None
    ) -> None:
        """Compute the blocks of the present parameters, of which this is the fingerprint.
        Collective.

        If a parameter turns out to be read outside of its layer, its reads are taken into the plan.

        Args:
            begun: Sweeps of which one is left.
            max_sweeps: Begin with this number of sweeps; the others follow at first use.
        """
        self._begun = None  # after an exception its sums are incomplete

        def work() -> Sweeps:
            if begun is not None:
                begun.run(max_sweeps=1)
                return begun
            while True:
                if self.risk.processes.world > 1:
                    self.plan = self.plan.agreed()
                sweeps = Sweeps(self, 0 if max_sweeps else self.max_kept_bytes)
                try:
                    sweeps.run(max_sweeps)
                except OutsideReads as error:
                    require_rereadable(
                        self.risk.data, "it is read again for functions that read parameters"
                    )
                    # Raises the error again if it finds no more than was known.
                    self.plan = self.plan.learned(error=error)
                else:
                    self.plan.confirm()
                    return sweeps

        sweeps = self.risk.together(
            work, same=lambda: {**self.plan.described(), "max_bytes=": self.max_bytes}
        )
        if max_sweeps:
            self._operator = None
            self._begun = sweeps
            self.parameters = parameters
            return
        self._adopt(sweeps.blocks, sweeps.totals[0].examples, parameters)
        if self.scale != 1:
            self._operator = self.operator._scale(self.scale)
        self._of_data = True

    def _adopt(
        self, blocks: Mapping[str, LinearOperator], examples: int | None, parameters: Fingerprint
    ) -> None:
        """Have these blocks, in the operator's own precision and on its device.

        Args:
            examples: The number that they were computed from.
            parameters: The fingerprint of those that they were computed at.
        """
        layouts = {group.name: group.layout for group in self.plan.groups}
        device = self._kept_on or self.device
        mine = {name: blocks[name].to(device, self.dtype) for name in layouts if name in blocks}
        space = self.risk.space
        if device.type != "cpu":
            lay_together(mine.values())
        if self.plan.owners is None:
            operator = BlockDiagonal(mine, layouts, space, self.device)
        else:
            processes = self.risk.processes
            operator = OwnedBlockDiagonal(mine, layouts, space, processes, self.dtype, self.device)
            operator._keeps_elsewhere = device != self.device
        self._operator = operator
        self._begun = None
        self.examples = examples
        self.parameters = parameters

    def _compute_later(self) -> None:
        """Drop the blocks; those of the present parameters will be computed at first use."""
        self._operator = None
        self._begun = None
        self.parameters = fingerprint(self.risk)

    # -------------------------------------------------------------------------------------- algebra
    @property
    def operator(self) -> BlockDiagonal:
        """The blocks as a plain operator, without the network."""
        if self._operator is None:
            if changed := changed_parameters(self.parameters, fingerprint(self.risk), 1e-12):
                raise RuntimeError(
                    f"{self.label} is computed at its first use, and the parameters {changed} have "
                    "changed since it was made. Call its compute() for the matrix at the present "
                    "ones, or make it after they change. `curvature` computes at once, and so does "
                    "check_deterministic=True of the other classes."
                )
            self._compute(self.parameters, self._begun)
        assert self._operator is not None
        return self._operator

    @property
    def blocks(self) -> dict[str, LinearOperator]:
        """Block name to operator. Blocks are named after layers, or after parameters that have a
        block of their own.
        """
        blocks = dict(self.operator.blocks)
        for group in self.plan.groups:
            if group.name in blocks:
                keys = ", ".join(group.keys)
                blocks[group.name]._of = f"block {group.name!r} ({keys})"
        return blocks

    def _with(self, operator: BlockDiagonal) -> Self:
        other = copy.copy(self)
        other._operator = operator
        return other

    def _scale(self, c: Scalar) -> Self:
        multiple = self._with(self.operator._scale(c))
        multiple.scale = self.scale * float(c.detach() if isinstance(c, Tensor) else c)
        multiple.structure = Structure.PSD if multiple.scale >= 0 else Structure.SYMMETRIC
        return multiple

    def inverse(
        self,
        damping: Damping = 0.0,
        *,
        use_heuristic_damping: bool = False,
        min_damping: float = 1e-8,
        retry_double_precision: bool = True,
        use_exact_damping: bool = False,
    ) -> LinearOperator:
        """`(K + damping·I)⁻¹`, an operator with its own `logdet`, `trace`, `sample`.

        Args:
            damping: A number; a tensor with one value per block; a rule such as
                `RelativeDamping(0.1)`; or a pair `(λ_A, λ_G)` that is added to the Kronecker
                factors instead, as `HeuristicDamping` chooses one.
            use_heuristic_damping: The same as `HeuristicDamping(damping, min=min_damping)`: split
                the number over the factors by Martens & Grosse 2015, section 6.3. A separate bias
                block is damped like the gradient factor of its weight.
            min_damping: Lower bound of each side under the heuristic.
            retry_double_precision: Try a failing Cholesky decomposition once more in float64.
            use_exact_damping: Accepted for code written for curvlinops, where a plain number damps
                each factor unless this is True; here it always damps the whole matrix, and a pair
                each factor.

        Raises:
            SingularMatrixError: If a block is singular and `damping` is 0; names the block.
            ValueError: If a pair is given together with the heuristic, or either together with
                exact damping.
        """
        heuristic = use_heuristic_damping or isinstance(damping, HeuristicDamping)
        if use_exact_damping and (heuristic or isinstance(damping, tuple)):
            raise ValueError(
                "Either damp the factors (heuristic damping, or a pair) or use exact damping, not "
                "both."
            )
        if isinstance(damping, HeuristicDamping):
            min_damping = damping.min
            damping = damping.damping
        if not heuristic and not isinstance(damping, tuple):
            return self.operator.inverse(damping, retry_double_precision=retry_double_precision)
        if heuristic and isinstance(damping, tuple):
            raise ValueError("Heuristic and exact damping require a single damping value.")
        if not self.scale > 0:
            raise ValueError(
                "Dampings of factors need a positive multiple of the curvature; this is "
                f"{float(self.scale):g} times it. Damp the whole matrix, with a number."
            )
        processes = self.risk.processes

        def choose() -> dict[str, Any]:
            if self.plan.owners is not None:
                processes.same({"the damping": (damping, min_damping)})
            return self._factor_dampings(damping, min_damping)

        dampings = choose() if self.plan.owners is None else processes.together(choose)
        return self.operator.inverse(dampings, retry_double_precision=retry_double_precision)

    def _factor_dampings(self, damping: Any, min_damping: float) -> dict[str, Any]:
        """Dampings of blocks by a pair, or by a number that is split over factors (Martens & Grosse
        2015, section 6.3).

        A separate bias block is damped like the gradient factor of its weight.
        """
        blocks = self.operator.blocks  # others may be kept by other processes
        products = {name: block for name, block in blocks.items() if isinstance(block, Kronecker)}
        if isinstance(damping, tuple):
            return {name: damping if name in products else damping[1] for name in blocks}
        dampings: dict[str, Any] = self.operator.per_block(damping)
        pairs: dict[str, Any] = {}
        for names, stack in self.operator.stacks().items():
            undivided = joined_dampings([dampings[name] for name in names])
            if isinstance(stack, Kronecker) and undivided is not None:
                number = resolve(undivided, stack, batch=stack.batch)
                for_A, for_G = heuristic_damping(stack.A, stack.G, number, min_damping)
                pairs |= zip(names, zip(for_A.unbind(), for_G.unbind()), strict=True)
        for entry in self.plan:
            names = [group.name for group in entry.layer.groups]
            for name in names:
                if (block := products.get(name)) is None:
                    continue
                if name not in pairs:
                    number = resolve(dampings[name], block)
                    pairs[name] = heuristic_damping(block.A, block.G, number, min_damping)
                dampings |= {**dict.fromkeys(names, pairs[name][1]), name: pairs[name]}
        return dampings

    def _to(self, device: torch.device | None, dtype: torch.dtype | None) -> Self:
        # Also if the blocks are computed anew; the model stays where it is.
        moved = self._with(self.operator.to(device=device, dtype=dtype))
        moved.device = device or self.device
        moved.dtype = dtype or self.dtype
        return moved

    def offload(self, where: str | torch.device = "cpu") -> Self:
        """The same operator with blocks that are kept on another device; see
        `BlockDiagonal.offload`.
        """
        return self._with(self.operator.offload(where))

    def split(self, v: Any) -> dict[str, Tensor]:
        """A vector's parts, block by block (`BlockDiagonal.split`): `K.blocks[name] @
        K.split(v)[name]`.
        """
        return self.operator.split(v)

    def merge(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector with these parts: the inverse of `split`."""
        return self.operator.merge(parts)

    def memory(self) -> Memory:
        """What the blocks take, layer by layer, in bytes; nothing is computed. Print it for a table
        in GiB.

        Its attributes `computing` and `kept` are the sums over all layers: while blocks are
        computed, and afterwards. Factors that layers share count for each of them, and blocks that
        processes keep apart as if one had all.

        Raises:
            UnsupportedError: If an approximation of your own does not say what it takes.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from curvlinops_plus import EKFAC, EmpiricalRisk, curvature
            >>> risk = EmpiricalRisk(nn.Linear(4095, 1024), nn.MSELoss(), ())
            >>> print(curvature(risk, EKFAC, compute=False).memory())
            layer     computing  kept
            (model)   0.148      0.082
            all, GiB  0.148      0.082
        """
        return memory_of(self.plan)

    def summary(self, damping: Any = None) -> Summary:
        """Trace, largest eigenvalue, rank and condition of each block: print it for a table, or
        make `pandas.DataFrame(K.summary())`.

        Args:
            damping: What `inverse` takes: then `condition` is that of the damped blocks. None: of
                the blocks as they are, inf if they are singular.

        Returns:
            A `Summary`, a tuple with a dictionary for each block.

        Raises:
            ValueError: If the damping is negative or does not fit the blocks.

        Cost: the eigendecompositions of `inverse`, which are remembered, and one transfer from the
        device.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from curvlinops_plus import FullBlock, EmpiricalRisk, curvature
            >>> model = nn.Linear(1, 1)
            >>> data = [(torch.tensor([[-1.0], [1.0]]), torch.zeros(2, 1))]
            >>> K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), FullBlock)
            >>> K.summary(damping=1.0)
            block   module  parameters    count  trace  largest  rank  condition
            weight  Linear  weight, bias      2      4        2     2          1
            all                               2      4        2     2
        """
        return summary_of(self, damping)

    def gradient_and_loss(self) -> tuple[list[Tensor], Tensor]:
        """Gradient of the loss in the order of the parameters, and the loss, over all data."""
        gradient, loss = self.risk.gradient_and_loss()
        return list(gradient.values()), loss

    # -------------------------------------------------------------------------------------- factors
    @property
    def mapping(self) -> dict[str, dict[str, int]]:
        """Layer name to its parameters' own names and their positions in `params`.

        If modules that share parameters have further ones of the same name, these have the module's
        name in front.
        """
        keys = list(self.risk.params)
        mapping: dict[str, dict[str, int]] = {}
        for entry in self.plan:
            positions = mapping.setdefault(entry.layer.name, {})
            for use in entry.layer.named_uses:
                for name, key in use.keys.items():
                    position = keys.index(key)
                    if positions.get(name, position) != position:
                        name = f"{use.name}.{name}"
                    positions[name] = position
        return mapping

    def verify(self, num_examples: int = 3, stored: bool = True) -> Verification:
        """Check rules, approximations and losses on a few examples, and the operator's blocks,
        layer by layer.

        See `curvlinops_plus.blocks.verify.verify`.
        """
        return verify(self, num_examples, stored)

    @property
    def label(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__} {self.shape[0]}x{self.shape[1]}, {dtype} on {self.device}"

    def __repr__(self) -> str:
        state = "not computed yet" if self._operator is None else f"from {self.examples} examples"
        scale = "" if self.scale == 1 else f", times {self.scale:g}"
        return f"{self.label}, {state}{scale}\n{plan_table(self.plan)}"

    # ---------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """All blocks and what they were computed from, in tensors and plain Python.

        `torch.save` and `torch.load(weights_only=True)` carry it, and so do `save` and `load`
        (safetensors). Collective if processes keep blocks apart: each gets all of them.
        """
        state = description_of(self)
        if self._operator is not None:
            blocks = self._operator.gather().blocks
            state["blocks"] = {name: sealed(pack(block)) for name, block in blocks.items()}
        return sealed(state)

    def _state_parts(self) -> dict[str, dict[str, Any]]:
        """The same in parts, "state" and one for each block that this process keeps; empty before
        they are computed.
        """
        parts: dict[str, dict[str, Any]] = {"state": sealed(description_of(self))}
        if self._operator is None:
            return parts | {f"block {name}": {} for name in self.plan.kept_blocks}
        parts["state"]["blocks"] = {}
        for name in self.plan.kept_blocks:
            parts[f"block {name}"] = {name: sealed(pack(self._operator.blocks[name]))}
        return parts

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the blocks of a state. The data are not read, the model is not changed.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            ValueError: If the state is damaged, cut off or foreign, or was computed for another
                loss, other layers, shapes or options; nothing has changed then.

        Warns:
            CurvatureWarning: If the parameters changed since.
        """
        take_state(self, checked(state_dict))

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Any],
        model: ModelOrFunction,
        data: Iterable[Any] | None = None,
        params: Sequence[Tensor | str] | Mapping[str, Tensor] | None = None,
        *,
        loss: Any = None,
        approximations: Iterable[type[Accumulator]] = (),
        vectors: Vectors | None = None,
        owned: bool = False,
        **risk_options: Any,
    ) -> Self:
        """The operator that a state describes, without reading data or computing anything.

        Args:
            state_dict: What `state_dict()` returned.
            model: The network; of a function also `params`.
            data: Only needed to compute again later.
            params: The parameters, as when the state was made. Default: those that the state names,
                in its order; needed if their names were not the model's own.
            loss: Needed for losses that are not built in.
            approximations: Your own `Accumulator` classes among those that the state names.
            vectors: Needed for vectors of your own.
            owned: Keep only some of the blocks in each of several processes, as for `curvature`.
                Collective then.
            risk_options: The other options of `EmpiricalRisk`, such as `output` and `mask`:
                functions are not stored.

        Raises:
            ValueError: If the state is foreign, damaged, cut off, or does not fit; if it names an
                approximation or vectors that are neither part of the package nor passed.

        Warns:
            CurvatureWarning: If the parameters changed since.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from curvlinops_plus import DiagonalBlock, EmpiricalRisk, curvature
            >>> model, data = nn.Linear(3, 2), [(torch.ones(5, 3), torch.zeros(5, 2))]
            >>> K = curvature(EmpiricalRisk(model, nn.MSELoss(), data), DiagonalBlock)
            >>> state = (K / 2).state_dict()
            >>> loaded = BlockwiseLinearOperator.from_state_dict(state, model, data)
            >>> bool((loaded.diagonal() == K.diagonal() / 2).all())
            True
        """
        state = checked(state_dict)
        plan = state.part("plan")
        if loss is None:
            try:
                with reading(f"{state.title}, 'loss'"):
                    loss = rebuild_losses(plan["loss"])
            except UnsupportedError as error:
                raise ValueError(
                    f"The loss {plan['loss']['loss']} can't be made again from saved options. Pass "
                    "it: BlockwiseLinearOperator.from_state_dict(..., loss=...), "
                    "KFACLinearOperator.from_state_dict(..., loss_func=...) and the like."
                ) from error
        if params is None and isinstance(model, nn.Module):
            params = params_of(state, model)
        risk = EmpiricalRisk(
            model, loss, () if data is None else data, params, **state["options"], **risk_options
        )
        with reading(f"{state.title}, 'reads'"):
            risk.reads = rebuild_reads(risk.params, plan["reads"])
        separate = plan["separate_weight_and_bias"]
        kinds = [*APPROXIMATIONS, *approximations]
        of_layers: dict[str, Approximation] = {}
        for layer in layers_of(risk, separate):
            # Where layers differ, `take_state` says so.
            if layer.name in plan["layers"]:
                described = plan.part("layers").part(layer.name).part("approximation")
                kind, options = from_data(described, kinds, "approximations=[...]")
                of_layers[layer.name] = Approximation(kind, options)
                with reading(described.title):  # options are read when accumulators are made
                    LayerPlan(layer, of_layers[layer.name]).accumulators()
        if vectors is None:
            vectors = vectors_of(plan.part("vectors"))
        K = cls._of_plan(Plan(risk, of_layers, KFAC, vectors, separate, owned))
        take_state(K, state)
        return K


@takes_risk
def curvature(
    risk: EmpiricalRisk,
    approximation: Choices = KFAC,
    *,
    default: Choice = KFAC,
    vectors: Vectors | str | None = None,
    separate_weight_and_bias: bool = False,
    check_deterministic: bool | None = None,
    max_kept_bytes: int = KEPT_BYTES,
    owned: bool = False,
    max_bytes: int | None = None,
    offload: str | torch.device | None = None,
    compute: bool = True,
) -> BlockwiseLinearOperator:
    """Block-diagonal curvature of a risk, any mix of approximations over its layers.

    Args:
        risk: Model, loss and data.
        approximation: An approximation for all layers (KFAC, EKFAC, NearestKronecker, TNT,
            DiagonalBlock, FullBlock, ScaledIdentity, your own `Accumulator`), or its name, as
            "ekfac"; or a mapping from layer names, globs or module types to one. Exact names come
            before globs, globs before types.
        default: The approximation of layers that the mapping does not name.
        vectors: What is backpropagated: `Exact()` (the default), `MonteCarlo(samples, seed)`,
            `Empirical()`, `ForwardOnly()`.
        separate_weight_and_bias: Give every parameter its own block.
        check_deterministic: True compares the total loss of two passes over the data. None:
            compares two evaluations of a few examples. False: neither, nor outputs of a few
            examples with the batch's.
        max_kept_bytes: Memory for keeping layer inputs and output gradients of all data for
            approximations with a second sweep (EKFAC, `NearestKronecker` by sweeps), which then
            doesn't run the model again. If they take more than this, 16 MiB by default, none are
            kept.
        owned: Each of several processes keeps only some of the blocks, with at most an equal share
            of the memory plus the largest block. Products and other results are then collective.
            Without several processes there is no difference.
        max_bytes: Memory for sums and decompositions of layers that are computed together: layers
            are computed in groups that fit, each with its own sweeps and the same results. Default:
            no limit. (The `max_bytes` of an approximation is the limit of one factor or block.)
        offload: The device on which finished blocks are kept, "cpu"; see `BlockDiagonal.offload`.
            By default they stay.
        compute: False computes at first use: `memory()` says before what it will take.

    Returns:
        A linear operator with all its blocks.

    Cost: as many sweeps over the data as the approximations need, with `max_bytes` for each group
    of layers by itself (`memory()` says what they take, nothing warns before memory is short), and
    the self-check (unless `EmpiricalRisk(..., check=False)`): a forward and two backward passes
    over three examples.

    Raises:
        ValueError: If a key of the mapping matches no layer, or a layer never ran; if
            `max_kept_bytes` is no integer of at least 0.
        UnsupportedError: If a layer, the loss or an option can't be handled; if a layer alone needs
            more than `max_bytes` while it is computed; if the examples of a batch depend on each
            other (batch norm in training mode); if a layer's rule disagrees with autograd on three
            examples of the first batch. Names the layer.
        NumericsError: If a statistic is not finite; names it and the layer.
        RuntimeError: If two evaluations of the model, or two passes over the data, disagree
            (dropout in training mode).
        TypeError: If `risk` is not an `EmpiricalRisk`, or an approximation is an instance such as
            `KFAC()` instead of the class.

    Warns:
        CurvatureWarning: If layers get their exact diagonal because they have no Kronecker factors,
            normalisation layers among them; for each operator that is computed, once. `print(K)`
            lists them with reasons.

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
        max_kept_bytes=max_kept_bytes,
        owned=owned,
        max_bytes=max_bytes,
        offload=offload,
        compute=compute,
    )
