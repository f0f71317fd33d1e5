"""Block-diagonal curvature of a risk: one block per layer, or per parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from curvlinops_plus.curvature.kronecker import EKFAC, KFAC, ekfac_blocks, kfac_blocks
from curvlinops_plus.curvature.plan import Entry, Sums, make_plan, training_modules
from curvlinops_plus.curvature.state import FORMAT, VERSION, fingerprint, pack, same_fingerprint, unpack
from curvlinops_plus.errors import CurvatureWarning, NumericsError
from curvlinops_plus.linalg import BlockDiagonal, Dense, Eigendecomposed, Kronecker, LinearOperator, Space, Structure, heuristic_damping
from curvlinops_plus.risk import EmpiricalRisk, Exact, Layer, Vectors

__all__ = ["BlockwiseLinearOperator", "Factors", "curvature"]


class BlockwiseLinearOperator(LinearOperator):
    """A block-diagonal approximation of the curvature of an empirical risk.

    Blocks are computed at first use, in as few sweeps over the data as the approximations need, and kept. All numbers that
    follow from structure are there: `trace det logdet frobenius_norm eigenvalues() diagonal() inverse(damping)
    power(p, damping) sample(generator)`, and adding a multiple of the identity keeps them.

    Args:
        risk: Model, loss and data.
        approximation: An approximation for all layers, or a mapping from layer names, globs or module types to one.
        default: The approximation of layers that the mapping does not name.
        vectors: What is sent back through the network.
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
          layer  module  parameters            approximation  blocks
          0      Linear  0.weight, 0.bias      KFAC           4x4
          2      Linear  2.weight, 2.bias      KFAC           2x5
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        approximation: Any = KFAC,
        *,
        default: Any = KFAC,
        vectors: Vectors | None = None,
        separate_weight_and_bias: bool = False,
        check_deterministic: bool = False,
    ) -> None:
        self.risk = risk
        self.vectors = Exact() if vectors is None else vectors
        self.separate_weight_and_bias = separate_weight_and_bias
        self.plan: list[Entry] = make_plan(risk.layers(separate_weight_and_bias), approximation, default)
        self.check_deterministic = check_deterministic
        self.examples: int | None = None
        self._operator: BlockDiagonal | None = None
        self._converted: tuple[torch.device | None, torch.dtype | None] = (None, None)
        if check_deterministic:
            self.compute()

    # ---------------------------------------------------------------------------------------------------- computing
    def compute(self) -> BlockDiagonal:
        """Compute all blocks anew. Nothing is ever added to what was there before."""
        with self.risk.untouched():
            sums = Sums(self.risk, self.plan, self.vectors)
            while not sums.done:
                sums.sweep(self._title(len(sums.totals)))
                if self.check_deterministic and len(sums.totals) == 2:
                    self._compare(sums)
                sums.finish()
            if self.check_deterministic and len(sums.totals) == 1:
                self._second_look(sums)
                self._compare(sums)
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
        from curvlinops_plus.risk import ForwardOnly

        if self.risk.one_shot:
            raise ValueError(
                "`data` is an iterator, which can be read only once, and the determinism check reads it again. Pass a list of batches or a DataLoader, or "
                "check_deterministic=False."
            )
        sums.totals.append(self.risk.sweep([], ForwardOnly(), lambda seen: None, desc="determinism check"))

    def _compare(self, sums: Sums) -> None:
        one, two = (torch.as_tensor(totals.loss, dtype=torch.float64) for totals in sums.totals[:2])
        if not bool(one.isfinite() & two.isfinite()):
            where = self.risk.first_nonfinite()
            raise NumericsError(f"The total loss is {float(one)}. {f'First seen: {where}.' if where else ''}")
        tolerance = 1e-8 if self.risk.dtype == torch.float64 else 5e-5
        same_count = sums.totals[0].examples == sums.totals[1].examples
        if not same_count or not torch.allclose(one, two, rtol=tolerance, atol=1e-6):
            random = training_modules(self.risk.model)
            cause = f"These modules are in training mode: {random}; call model.eval()." if random else (
                "Does the data change from pass to pass (random augmentation, drop_last with shuffling), or the model?"
            )
            raise RuntimeError(
                f"Two passes over the data disagree: total loss {float(one):.8g} over {sums.totals[0].examples} examples and {float(two):.8g} over "
                f"{sums.totals[1].examples}. {cause} check_deterministic=False turns this check off."
            )

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
    def out_space(self) -> Space:
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

    def _matmat(self, X: Tensor) -> Tensor:
        return self.operator._matmat(X)

    def to_dense(self) -> Tensor:
        return self.operator.to_dense()

    @property
    def trace(self) -> Tensor:
        return self.operator.trace

    @property
    def det(self) -> Tensor:
        return self.operator.det

    @property
    def logdet(self) -> Tensor:
        return self.operator.logdet

    @property
    def frobenius_norm(self) -> Tensor:
        return self.operator.frobenius_norm

    def eigenvalues(self) -> Tensor:
        return self.operator.eigenvalues()

    def diagonal(self) -> Tensor:
        return self.operator.diagonal()

    def power(self, p: float, damping: Any = 0.0) -> LinearOperator:
        return self.operator.power(p, damping)

    def shift(self, delta: Any) -> LinearOperator:
        return self.operator.shift(delta)

    def sample(self, generator: torch.Generator | None = None, num: int | None = None) -> Tensor:
        return self.operator.sample(generator, num)

    def inverse(self, damping: Any = 0.0, use_heuristic_damping: bool = False, min_damping: float = 1e-8, retry_double_precision: bool = True) -> LinearOperator:
        """`(K + damping·I)⁻¹`, an operator with its own `logdet`, `trace`, `sample`.

        Args:
            damping: A number; a tensor with one value per block; a rule such as `RelativeDamping(0.1)`; or a pair
                `(λ_A, λ_G)` that is added to the Kronecker factors instead.
            use_heuristic_damping: Split the number over the factors by Martens & Grosse 2015, section 6.3. A bias apart is
                damped like the gradient factor of its weight.
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
        return self.operator.inverse(damping, retry_double_precision=retry_double_precision)

    def _heuristic(self, damping: Any, min_damping: float) -> dict[str, Any]:
        """Block name to damping: a pair for Kronecker blocks, a number for others."""
        blocks, result = self.operator.blocks, {}
        for layer in self._layers:
            pair = None
            for group in layer.groups:
                block = blocks[group.name]
                if isinstance(block, Kronecker):
                    pair = heuristic_damping(block.A, block.G, damping, min_damping)
            for group in layer.groups:
                kron = isinstance(blocks[group.name], Kronecker)
                result[group.name] = damping if pair is None else pair if kron else pair[1]
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

    def gradient_and_loss(self) -> tuple[list[Tensor], Tensor]:
        """Gradient of the loss in the order of the parameters, and the loss, over all data."""
        gradient, loss = self.risk.gradient_and_loss()
        return list(gradient.values()), loss

    # ------------------------------------------------------------------------------------------------------- factors
    @property
    def mapping(self) -> dict[str, dict[str, int]]:
        """Layer name to its parameters' own names and their positions in `params`."""
        order = {key: position for position, key in enumerate(self.risk.params)}
        return {layer.name: {local: order[key] for use in layer.uses for local, key in use.keys.items()} for layer in self._layers}

    def verify(self, num_examples: int = 3) -> Any:
        """Check rules, statistics, loss and traces on a few examples, layer by layer.

        See `curvlinops_plus.curvature.verify.verify`.
        """
        from curvlinops_plus.curvature.verify import verify

        return verify(self, num_examples)

    def __repr__(self) -> str:
        state = "not computed yet" if self._operator is None else f"from {self.examples} examples"
        head = f"{type(self).__name__} {self.shape[0]}x{self.shape[1]}, {str(self.dtype).removeprefix('torch.')} on {self.device}, {state}"
        rows = [("layer", "module", "parameters", "approximation", "blocks")]
        for entry in self.plan:
            layer = entry.layer
            sizes = ", ".join("x".join(map(str, group.layout.matrix_shape)) for group in layer.groups)
            kinds = "+".join(type(use.module).__name__ for use in layer.uses)
            rows.append((layer.name or "(model)", kinds, ", ".join(layer.params), repr(entry.approximation), sizes))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  " + "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([head, *lines])

    # --------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """All blocks and what they were computed from, in tensors and plain Python.

        `torch.save` and `torch.load(weights_only=True)` carry it, and so do `save` and `load` (safetensors).
        """
        likelihood = self.risk.likelihood
        state: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "class": type(self).__name__,
            "loss_type": type(self.risk.loss_func).__name__,
            "loss_reduction": likelihood.reduction,
            "loss_options": likelihood.options(),
            "fisher_type": self.vectors.fisher_type,
            "vectors": repr(self.vectors),
            "seed": self.vectors.seed,
            "mc_samples": getattr(self.vectors, "samples", 1),
            "separate_weight_and_bias": self.separate_weight_and_bias,
            "num_data": self.risk.num_data,
            "num_per_example_loss_terms": self.risk.num_per_example_loss_terms,
            "progressbar": self.risk.progressbar,
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": {
                entry.layer.name: {
                    "approximation": repr(entry.approximation),
                    "parameters": {key: list(p.shape) for key, p in entry.layer.params.items()},
                }
                for entry in self.plan
            },
            "fingerprint": fingerprint(self.risk.params),
        }
        if self._operator is not None:
            state["examples"] = self.examples
            state["blocks"] = {name: pack(block) for name, block in self._operator.blocks.items() if name not in self._factored()}
            for name, factors in self._views().items():
                if len(factors):
                    state[name] = {layer: _plain_copy(value) for layer, value in factors.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the blocks of a state. The data is not read, the model is not changed.

        Raises:
            ValueError: If the state is cut off or foreign, or was computed for another loss, other layers, shapes or
                options; nothing has changed then.

        Warns:
            CurvatureWarning: If the parameters changed since.
        """
        self._check_state(state)
        blocks = self._read_blocks(state)
        if not same_fingerprint(state["fingerprint"], fingerprint(self.risk.params)):
            warn(
                "The model's parameters differ from those that this state was computed at; its blocks describe the old ones.",
                CurvatureWarning,
                stacklevel=2,
            )
        self.risk.progressbar = bool(state["progressbar"])
        if blocks is None:
            self._operator = None
        else:
            self._install(blocks, state["examples"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise ValueError("This is not a state of curvlinops_plus: the key 'format' is missing or foreign.")
        mine = self.state_dict_header()
        missing = [key for key in mine if key not in state]
        if missing:
            raise ValueError(f"The state lacks {missing}; is the file cut off?")
        if state["version"] > VERSION:
            raise ValueError(f"The state has version {state['version']}; this package reads up to {VERSION}. Update curvlinops_plus.")
        words = {"class": "class", "loss_type": "loss", "loss_reduction": "loss reduction", "separate_weight_and_bias": "option"}
        for key, word in words.items():
            if state[key] != mine[key]:
                raise ValueError(f"State mismatch in the {word} ({key}): the state has {state[key]!r}, this operator {mine[key]!r}.")
        if not _same_options(state["loss_options"], mine["loss_options"]):
            raise ValueError(
                f"State mismatch in the loss options: the state has {state['loss_options']}, this operator {mine['loss_options']}."
            )
        if state["layers"] != mine["layers"]:
            for name in [*mine["layers"], *state["layers"]]:
                theirs, ours = state["layers"].get(name), mine["layers"].get(name)
                if theirs != ours:
                    raise ValueError(f"State mismatch in layer {name!r}: the state has {theirs}, this operator {ours}.")
        if state["dtype"] != mine["dtype"]:
            raise ValueError(
                f"State mismatch in the dtype: the state has {state['dtype']}, this operator {mine['dtype']}. Convert one of them with `K.to(dtype=...)`."
            )

    def state_dict_header(self) -> dict[str, Any]:
        """The part of `state_dict` that says what the blocks are of, without the blocks."""
        bare = copy.copy(self)
        bare._operator = None
        return BlockwiseLinearOperator.state_dict(bare)

    def _read_blocks(self, state: Mapping[str, Any]) -> dict[str, LinearOperator] | None:
        """Blocks of a state, checked for completeness and shapes; None if it has none."""
        if "blocks" not in state:
            return None
        device, blocks = self.device, {name: unpack(block, self.device) for name, block in state["blocks"].items()}

        def factor(view: str, layer: Layer) -> Any:
            try:
                return _moved(state[view][layer.name], device)
            except KeyError as error:
                raise ValueError(f"The state lacks {view} of layer {layer.name!r}; is the file cut off?") from error

        positions = {key: position for position, key in enumerate(self.risk.params)}
        for entry in self.plan:
            layer, kind = entry.layer, entry.approximation.kind
            weight = any(layer.weight in group.keys for group in layer.groups) if layer.affine else False
            if issubclass(kind, EKFAC):
                QA = factor("input_covariances_eigenvectors", layer) if weight else None
                values = factor("corrected_eigenvalues", layer)
                named = {
                    group.name: values[positions[group.keys[0]]] if isinstance(values, Mapping) else values for group in layer.groups
                }
                blocks.update(ekfac_blocks(layer, factor("gradient_covariances_eigenvectors", layer), QA, named))
            elif issubclass(kind, KFAC):
                A = factor("input_covariances", layer) if weight else None
                blocks.update(kfac_blocks(layer, A, factor("gradient_covariances", layer)))
        for layer in self._layers:
            for group in layer.groups:
                if group.name not in blocks:
                    raise ValueError(f"The state lacks block {group.name!r}; is the file cut off?")
                dim = blocks[group.name].shape[0]
                expected = sum(self.risk.params[key].numel() for key in group.keys)
                if dim != expected:
                    raise ValueError(f"State mismatch in block {group.name!r}: its size is {dim}, expected {expected}.")
        return blocks

    def _factored(self) -> set[str]:
        """Names of the blocks whose factors are in one of the factor views."""
        kinds = (KFAC,)
        return {g.name for e in self.plan if issubclass(e.approximation.kind, kinds) for g in e.layer.groups}

    def _views(self) -> dict[str, Factors]:
        """Every factor view under its name in a state dict."""
        return {
            "input_covariances": Factors(self, "A", KFAC),
            "gradient_covariances": Factors(self, "G", KFAC),
            "input_covariances_eigenvectors": Factors(self, "A", EKFAC),
            "gradient_covariances_eigenvectors": Factors(self, "G", EKFAC),
            "corrected_eigenvalues": Factors(self, "values", EKFAC),
        }


class Factors(MutableMapping[str, Any]):
    """Live view of one kind of factor: layer name to tensor.

    The tensors are those that the operator multiplies with: changing one in place, or setting an item, changes the operator.

    Args:
        owner: The operator.
        part: "A", "G" or "values".
        kind: KFAC for covariances, EKFAC for eigenvectors.
    """

    def __init__(self, owner: BlockwiseLinearOperator, part: str, kind: type[KFAC]) -> None:
        self.owner, self.part, self.kind = owner, part, kind

    def _entries(self) -> dict[str, Layer]:
        exact = {
            entry.layer.name: entry.layer
            for entry in self.owner.plan
            if issubclass(entry.approximation.kind, self.kind) and issubclass(entry.approximation.kind, EKFAC) == (self.kind is EKFAC)
        }
        if self.part == "A":
            return {name: layer for name, layer in exact.items() if layer.weight is not None}
        return exact

    def __getitem__(self, name: str) -> Any:
        layer = self._entries()[name]
        blocks = self.owner.operator.blocks
        if self.part == "values":
            shaped = {g: blocks[g.name].values.view(*_value_shape(layer, g)) for g in layer.groups}  # type: ignore[attr-defined]
            if len(layer.groups) == 1 and not self.owner.separate_weight_and_bias and len(layer.params) > 1:
                return next(iter(shaped.values()))
            order = {key: position for position, key in enumerate(self.owner.risk.params)}
            return {order[group.keys[0]]: value for group, value in shaped.items()}
        for group in layer.groups:
            block: Any = blocks[group.name]
            operator = block.basis if isinstance(block, Eigendecomposed) else block
            if isinstance(operator, Kronecker):
                return getattr(operator, self.part).matrix
            if self.part == "G" and isinstance(operator, Dense):
                return operator.matrix
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        layer = self._entries()[name]
        current = {view: factors.get(name) for view, factors in self.owner._views().items()}
        view = next(v for v, factors in self.owner._views().items() if (factors.part, factors.kind) == (self.part, self.kind))
        current[view] = value
        if self.kind is EKFAC:
            values, order = current["corrected_eigenvalues"], {key: position for position, key in enumerate(self.owner.risk.params)}
            named = {g.name: values[order[g.keys[0]]] if isinstance(values, Mapping) else values for g in layer.groups}
            blocks = ekfac_blocks(layer, current["gradient_covariances_eigenvectors"], current["input_covariances_eigenvectors"], named)
        else:
            blocks = kfac_blocks(layer, current["input_covariances"], current["gradient_covariances"])
        operator = self.owner.operator
        self.owner._operator = BlockDiagonal({**operator.blocks, **blocks}, operator.layouts, self.owner.risk.space)

    def __delitem__(self, name: str) -> None:
        raise TypeError("Factors of an operator can be replaced, not removed.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __repr__(self) -> str:
        return repr(dict(self))


def _value_shape(layer: Layer, group: Any) -> tuple[int, ...]:
    rows, columns = group.layout.matrix_shape
    return (rows, columns) if layer.weight in group.keys else (rows,)


def _plain_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_copy(v) for key, v in value.items()}
    return value.detach().clone().contiguous()


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {key: v.to(device) for key, v in value.items()}
    return value.to(device)


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool(torch.allclose(a.cpu().double(), b.cpu().double(), rtol=1e-6))
        return a == b

    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


def curvature(
    risk: EmpiricalRisk,
    approximation: Any = KFAC,
    *,
    default: Any = KFAC,
    vectors: Vectors | None = None,
    separate_weight_and_bias: bool = False,
    check_deterministic: bool = False,
) -> BlockwiseLinearOperator:
    """Block-diagonal curvature of a risk, any mix of approximations over its layers.

    Args:
        risk: Model, loss and data.
        approximation: An approximation for all layers (KFAC, EKFAC, DiagonalBlock, FullBlock, your own `Accumulator`), or a
            mapping from layer names, globs or module types to one. Exact names come before globs, globs before types.
        default: The approximation of layers that the mapping does not name.
        vectors: What is sent back: `Exact()` (the default), `MonteCarlo(samples, seed)`, `Empirical()`, `ForwardOnly()`.
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


