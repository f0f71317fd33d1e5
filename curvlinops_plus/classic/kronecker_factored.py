"""The classic door: classes with the names, argument names, order and defaults of curvlinops 3.0.1.

Each builds an `EmpiricalRisk` and hands it on. What their signatures can't say, `curvature` can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, EnumMeta
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator
from curvlinops_plus.blocks.factor_views import Factors, views
from curvlinops_plus.blocks.kfac import EKFAC, KFAC, Correction
from curvlinops_plus.blocks.nearest import NearestKronecker
from curvlinops_plus.blocks.per_example import DiagonalBlock
from curvlinops_plus.blocks.plan import Sums
from curvlinops_plus.linalg import BlockDiagonal, LinearOperator
from curvlinops_plus.risk import Empirical, EmpiricalRisk, Exact, ForwardOnly, MonteCarlo, Vectors
from curvlinops_plus.risk.determinism import require_same
from curvlinops_plus.risk.losses import rebuild_losses
from curvlinops_plus.risk.preserve import preserve_state

__all__ = [
    "EKFACLinearOperator",
    "FisherType",
    "GGNDiagonalLinearOperator",
    "KFACLinearOperator",
    "KFACType",
    "KFOCLinearOperator",
]


class _StringsToo(EnumMeta):
    """Lets `"mc" in FisherType` be true, as for the member itself."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)  # type: ignore[call-arg]
        except ValueError:
            return False
        return True


class FisherType(str, Enum, metaclass=_StringsToo):
    """Which matrix the gradient statistics estimate; members and their strings may be used alike.

    Example:
        >>> "mc" in FisherType, FisherType.MC == "mc", "forward" in FisherType
        (True, True, False)
    """

    TYPE2 = "type-2"
    MC = "mc"
    EMPIRICAL = "empirical"
    FORWARD_ONLY = "forward-only"


class KFACType(str, Enum, metaclass=_StringsToo):
    """How positions that share a weight are treated, see `KFAC`."""

    EXPAND = "expand"
    REDUCE = "reduce"


class KFACLinearOperator(BlockwiseLinearOperator):
    """Kronecker-factored approximate curvature (KFAC) of the Fisher or generalized Gauss-Newton matrix.

    Layers without Kronecker factors get their exact diagonal, and one warning lists them.

    Args:
        model_func: The network, a module.
        loss_func: `MSELoss`, `CrossEntropyLoss`, `BCEWithLogitsLoss`, or any loss with a registered likelihood.
        params: The parameters, in the order in which vectors are formed: a list, or a dict under names of your own.
        data: Iterable of batches `(X, y)`, `X` a tensor or a mapping (then `batch_size_fn` is needed), or of mappings
            with `labels`.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compute now, and compare the total loss of two passes over the data.
        seed: Where the random draws start.
        fisher_type: "type-2" (exact), "mc" (labels drawn from the model), "empirical" or "forward-only".
        mc_samples: Draws per example for "mc".
        kfac_approx: "expand" or "reduce".
        num_per_example_loss_terms: Replaces the number of loss terms per example in the scale of the loss.
        separate_weight_and_bias: Weight and bias have blocks of their own.
        num_data: Replaces the number of examples in the scale of the loss.
        batch_size_fn: Number of examples of an input that is no tensor.
        output: Picks the tensor that the loss reads out of what the model returns.
        mask: `mask(X, y)` gives [N, T] bool: positions that count in the statistics of layers with T positions.
        example_axis: Module name or glob to the axis of the examples, where it is not the first.
        shift_labels: Language models: position t predicts the label at t + 1.

    Raises:
        ValueError: For an unknown loss, an unknown option value, or `mc_samples` with anything but "mc".
        RuntimeError: If two passes over the data disagree.

    Cost: one sweep (forward pass, and one backward pass per vector to the layers' outputs only); the determinism check
    is one more forward pass.

    Sources: Martens & Grosse 2015; Grosse & Martens 2016; Eschenhagen et al. 2023.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> data = [(torch.rand(5, 3), torch.tensor([0, 1, 0, 1, 1]))]
        >>> K = KFACLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data)
        >>> K.shape, list(K.input_covariances), (K @ torch.ones(26)).shape
        ((26, 26), ['0', '2'], torch.Size([26]))
    """

    _SUPPORTED_FISHER_TYPE: ClassVar[Any] = FisherType
    _SUPPORTED_KFAC_APPROX: ClassVar[Any] = KFACType
    _APPROXIMATION: ClassVar[type[Accumulator]] = KFAC
    SELF_ADJOINT: ClassVar[bool] = True

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: nn.Module,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        seed: int = 2147483647,
        fisher_type: str = FisherType.MC,
        mc_samples: int = 1,
        kfac_approx: str = KFACType.EXPAND,
        num_per_example_loss_terms: int | None = None,
        separate_weight_and_bias: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        output: Callable[[Any], Any] | None = None,
        mask: Callable[[Any, Any], Tensor] | None = None,
        example_axis: Mapping[str, int] | None = None,
        shift_labels: bool = False,
    ) -> None:
        supported = [FisherType(item).value for item in self._SUPPORTED_FISHER_TYPE]
        if fisher_type not in supported:
            raise ValueError(f"Invalid fisher_type: {fisher_type!r}. Supported by {type(self).__name__}: {supported}.")
        if kfac_approx not in KFACType:
            raise ValueError(f"Invalid kfac_approx: {kfac_approx!r}. Supported: {[item.value for item in KFACType]}.")
        if fisher_type != FisherType.MC and mc_samples != 1:
            raise ValueError(
                f"Invalid mc_samples: {mc_samples}. fisher_type={FisherType(fisher_type).value!r} draws nothing, "
                "so it must be 1."
            )
        self._fisher_type, self._mc_samples, self._seed = FisherType(fisher_type), mc_samples, seed
        self._kfac_approx = KFACType(kfac_approx)
        risk = EmpiricalRisk(
            model_func,
            loss_func,
            data,
            params,
            output=output,
            mask=mask,
            example_axis=example_axis,
            batch_size_fn=_batch_size(data, batch_size_fn),
            num_data=num_data,
            num_per_example_loss_terms=num_per_example_loss_terms,
            shift_labels=shift_labels,
            progressbar=progressbar,
        )
        risk.losses.require_likelihoods()  # an unknown loss is refused now, not at first use
        super().__init__(
            risk,
            self._APPROXIMATION.using(kfac_approx="reduce")
            if self._kfac_approx == KFACType.REDUCE
            else self._APPROXIMATION,
            vectors=self._vectors(),
            separate_weight_and_bias=separate_weight_and_bias,
            check_deterministic=check_deterministic,
        )

    def _vectors(self) -> Vectors:
        if self._fisher_type == FisherType.TYPE2:
            # KFAC-expand adds positions up independently: with R > 1 loss terms a random sign for each saves R times
            # the passes. What is made of per-example gradients needs every term by itself.
            return Exact(signs=self._APPROXIMATION is KFAC and self._kfac_approx == KFACType.EXPAND, seed=self._seed)
        if self._fisher_type == FisherType.MC:
            return MonteCarlo(self._mc_samples, self._seed)
        return Empirical() if self._fisher_type == FisherType.EMPIRICAL else ForwardOnly()

    adopts_vectors = True

    def _adopt(self, state: Mapping[str, Any]) -> None:
        super()._adopt(state)
        self._seed, self._mc_samples = (
            state["seed"] if self.vectors.seed is not None else self._seed,
            state["mc_samples"],
        )
        self.vectors = self._vectors()

    def compute_kronecker_factors(self) -> None:
        """Compute the factors anew from the data; what was there before is dropped."""
        self.compute()

    @property
    def input_covariances(self) -> Factors:
        """Layer name to the live input factor `A`; layers whose weight is not in `params` have none."""
        return views(self)["input_covariances"]

    @property
    def gradient_covariances(self) -> Factors:
        """Layer name to the live gradient factor `G`."""
        return views(self)["gradient_covariances"]

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Any],
        model_func: nn.Module,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any] | None,
        check_deterministic: bool = True,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        loss_func: Any = None,
        **options: Any,
    ) -> KFACLinearOperator:
        """The operator that a state describes; neither is the data read nor anything computed.

        Args:
            state_dict: What `state_dict()` returned.
            model_func: The network.
            params: The parameters, as when the state was made.
            data: For recomputing later; None is fine.
            check_deterministic: Whether computing anew will compare two passes.
            batch_size_fn: As in the constructor.
            loss_func: Needed for losses that are not built in.
            options: The other keyword-only options of the constructor.

        Raises:
            ValueError: If the state is foreign, cut off, or does not fit.
        """
        if not isinstance(state_dict, Mapping) or "loss_type" not in state_dict or "format" not in state_dict:
            raise ValueError("This is not a state of curvlinops_plus: the key 'format' is missing or foreign.")
        if loss_func is None:
            if "loss_options" not in state_dict:
                raise ValueError("The state lacks 'loss_options'; is the file cut off?")
            loss_func = rebuild_losses(state_dict["loss_options"])
        try:
            K = cls(
                model_func,
                loss_func,
                params,
                _NoData() if data is None else data,
                progressbar=state_dict["progressbar"],
                check_deterministic=False,
                seed=state_dict["seed"] or 0,
                fisher_type=state_dict["fisher_type"],
                mc_samples=state_dict["mc_samples"],
                num_per_example_loss_terms=state_dict["num_per_example_loss_terms"],
                separate_weight_and_bias=state_dict["separate_weight_and_bias"],
                num_data=state_dict["num_data"],
                batch_size_fn=batch_size_fn,
                **cls._approximation_options(state_dict),
                **options,
            )
        except KeyError as error:
            raise ValueError(f"The state lacks {error}; is the file cut off?") from error
        K._load(state_dict, stacklevel=3)
        K.check_deterministic = check_deterministic
        return K

    @classmethod
    def _approximation_options(cls, state: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the constructor that a state keeps in the name of its approximation."""
        approximation = next(iter(state["layers"].values()))["approximation"]
        return {"kfac_approx": KFACType.REDUCE if "'reduce'" in approximation else KFACType.EXPAND}

    # Libraries built on curvlinops 3.0.1 read these names.
    _mapping = property(lambda self: self.mapping)
    _input_covariances = property(lambda self: self.input_covariances)
    _gradient_covariances = property(lambda self: self.gradient_covariances)
    _separate_weight_and_bias = property(lambda self: self.separate_weight_and_bias)
    _params = property(lambda self: list(self.risk.params.values()))
    _in_shape = property(lambda self: list(self.in_shapes))
    _out_shape = property(lambda self: list(self.out_shapes))

    @property
    def _N_data(self) -> int:
        if self.risk.options.num_data is not None:
            return self.risk.options.num_data
        _ = self.operator
        assert self.examples is not None
        return self.examples


class EKFACLinearOperator(KFACLinearOperator):
    """Eigenvalue-corrected KFAC (EKFAC) of the Fisher or generalized Gauss-Newton matrix.

    The eigenvectors are KFAC's, the eigenvalues the diagonal of the exact block in that basis: its trace is the exact
    block's trace, and it is never further from the exact block than KFAC. Arguments as for `KFACLinearOperator`,
    without "forward-only".

    Cost: two sweeps and an eigendecomposition of each factor; the determinism check compares the two sweeps. While the
    inputs and gradients of all layers over the data are less than 64 MiB they are kept instead of making the second
    sweep (not between calls of `compute_kronecker_factors` and `compute_eigenvalue_correction`, the parameters may
    change there), and the determinism check is one forward pass.

    Source: George et al. 2018, "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 2)
        >>> data = [(torch.rand(5, 3), torch.rand(5, 2))]
        >>> K = EKFACLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> {position: tuple(values.shape) for position, values in K.corrected_eigenvalues[""].items()}
        {0: (2, 3), 1: (2,)}
    """

    _SUPPORTED_FISHER_TYPE = (FisherType.TYPE2, FisherType.MC, FisherType.EMPIRICAL)
    _APPROXIMATION = EKFAC

    _half_way: Sums | None = None

    def compute_kronecker_factors(self) -> None:
        """Compute the factors anew (first sweep); the eigenvalues follow at first use."""
        with preserve_state(self.risk.model, self.risk.data):
            sums = Sums(self.risk, self.plan, self.vectors)
            sums.sweep(self._title(0))
            sums.finish()
        self._half_way, self._operator = sums, None

    def compute_eigenvalue_correction(self) -> None:
        """Compute the eigenvalues anew (second sweep), in the basis of the factors that are there."""
        # Taken away first: after an exception in the sweep its sums are half full and must never be added to again.
        sums, self._half_way = self._half_way or self._in_current_basis(), None
        with preserve_state(self.risk.model, self.risk.data):
            sums.sweep(self._title(1))
            if self.check_deterministic and len(sums.totals) == 2:
                require_same(self.risk, *sums.totals)
            sums.finish()
        self._install(sums.blocks, sums.totals[0].examples)

    def compute(self) -> BlockDiagonal:
        if self._half_way is not None:
            self.compute_eigenvalue_correction()
            assert self._operator is not None
            return self._operator
        return super().compute()

    def _adopt(self, state: Mapping[str, Any]) -> None:
        super()._adopt(state)
        self._half_way = None

    def to(self, device: Any = None, dtype: Any = None) -> BlockwiseLinearOperator:
        if self._half_way is not None:
            self.compute_eigenvalue_correction()  # two operators must not go on with the same sums
        return super().to(device, dtype)

    def _in_current_basis(self) -> Sums:
        """Sums whose next sweep corrects the eigenvalues of the present basis."""
        current: dict[str, LinearOperator] = self.blocks
        QA, QG = self.input_covariances_eigenvectors, self.gradient_covariances_eigenvectors
        sums = Sums(self.risk, self.plan, self.vectors)
        for entry, accumulators in zip(self.plan, sums.pending):
            name = entry.layer.name
            if issubclass(entry.approximation.kind, EKFAC):
                accumulators.clear()
                accumulators[name] = Correction(entry.layer, self.risk.scale, QG[name], QA.get(name))
            else:
                accumulators.clear()
                sums.blocks.update({group.name: current[group.name] for group in entry.layer.groups})
        return sums

    @property
    def input_covariances_eigenvectors(self) -> Factors:
        """Layer name to the live eigenvectors of the input factor."""
        return views(self)["input_covariances_eigenvectors"]

    @property
    def gradient_covariances_eigenvectors(self) -> Factors:
        """Layer name to the live eigenvectors of the gradient factor."""
        return views(self)["gradient_covariances_eigenvectors"]

    @property
    def corrected_eigenvalues(self) -> Factors:
        """Layer name to live eigenvalues: [o, i] if weight and bias are joined, else {position in `params`: tensor}."""
        return views(self)["corrected_eigenvalues"]

    _input_covariances_eigenvectors = property(lambda self: self.input_covariances_eigenvectors)
    _gradient_covariances_eigenvectors = property(lambda self: self.gradient_covariances_eigenvectors)
    _corrected_eigenvalues = property(lambda self: self.corrected_eigenvalues)


class KFOCLinearOperator(KFACLinearOperator):
    """Kronecker-factored optimal curvature (KFOC): per layer the product `G ⊗ A` nearest to the exact block.

    Nearest in the Frobenius norm, see `NearestKronecker`; a bias apart has its exact block. `input_covariances` and
    `gradient_covariances` are the factors of the layers' weights: both symmetric and positive semi-definite, with equal
    mean eigenvalues. Layers without Kronecker factors get their exact diagonal, and one warning lists them.

    Arguments as for `KFACLinearOperator`, without `kfac_approx`; the exact matrix ("type-2") is the default. More
    options are those of `curvature(risk, NearestKronecker.using(...))`.

    Args:
        fisher_type: "type-2" (exact), "mc" (labels drawn from the model) or "empirical".
        mc_samples: Draws per example for "mc".

    Cost: one sweep for layers whose block takes no more than 64 MiB, four sweeps for larger ones.

    Source: Schnaus et al. 2021, "Kronecker-factored optimal curvature"; Koroko et al. 2022 (arXiv 2201.10285).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 2)
        >>> data = [(torch.rand(5, 3), torch.rand(5, 2))]
        >>> K = KFOCLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> K.input_covariances[""].shape, {name: block.shape for name, block in K.blocks.items()}
        (torch.Size([3, 3]), {'weight': (6, 6), 'bias': (2, 2)})
    """

    _SUPPORTED_FISHER_TYPE = (FisherType.TYPE2, FisherType.MC, FisherType.EMPIRICAL)
    _APPROXIMATION = NearestKronecker

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: nn.Module,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        seed: int = 2147483647,
        num_per_example_loss_terms: int | None = None,
        separate_weight_and_bias: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        fisher_type: str = FisherType.TYPE2,
        mc_samples: int = 1,
        output: Callable[[Any], Any] | None = None,
        mask: Callable[[Any, Any], Tensor] | None = None,
        example_axis: Mapping[str, int] | None = None,
        shift_labels: bool = False,
    ) -> None:
        super().__init__(
            model_func,
            loss_func,
            params,
            data,
            progressbar=progressbar,
            check_deterministic=check_deterministic,
            seed=seed,
            fisher_type=fisher_type,
            mc_samples=mc_samples,
            num_per_example_loss_terms=num_per_example_loss_terms,
            separate_weight_and_bias=separate_weight_and_bias,
            num_data=num_data,
            batch_size_fn=batch_size_fn,
            output=output,
            mask=mask,
            example_axis=example_axis,
            shift_labels=shift_labels,
        )

    @classmethod
    def _approximation_options(cls, state: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    @property
    def input_covariances(self) -> Factors:
        """Layer name to the live factor `A`; layers whose weight is not in `params` have none."""
        return _NearestFactors(self, "A", cast(Any, NearestKronecker))

    @property
    def gradient_covariances(self) -> Factors:
        """Layer name to the live factor `G`; of a layer whose bias alone is in `params`, its block."""
        return _NearestFactors(self, "G", cast(Any, NearestKronecker))


class _NearestFactors(Factors):
    """A bias apart has a block of its own, which a new factor of the weight must not replace."""

    def __setitem__(self, name: str, value: Any) -> None:
        factor = self[name]
        if value.shape != factor.shape:
            raise ValueError(
                f"layer {name!r}: expected a factor of shape {list(factor.shape)}, got {list(value.shape)}."
            )
        factor.copy_(value)


class GGNDiagonalLinearOperator(BlockwiseLinearOperator):
    """The diagonal of the generalized Gauss-Newton matrix, exact or from would-be gradients, for any layer.

    Args:
        model_func: The network, a module.
        loss_func: A loss with a registered likelihood.
        params: The parameters, in the order in which vectors are formed: a list, or a dict under names of your own.
        data: Iterable of batches, as for `KFACLinearOperator`.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compute now, and compare the total loss of two passes over the data.
        num_data: Replaces the number of examples in the scale of the loss.
        batch_size_fn: Number of examples of an input that is no tensor.
        mc_samples: Draws per example; 0 is the exact diagonal.
        seed: Where the random draws start.
        num_per_example_loss_terms: Replaces the number of loss terms per example in the scale of the loss.
        output: Picks the tensor that the loss reads out of what the model returns.
        mask: `mask(X, y)` gives [N, T] bool: positions that count in the statistics of layers with T positions.
        example_axis: Module name or glob to the axis of the examples, where it is not the first.
        shift_labels: Language models: position t predicts the label at t + 1.

    Raises:
        ValueError: For an unknown loss, or a negative `mc_samples`.
        RuntimeError: If two passes over the data disagree.

    Cost: one sweep, with one backward pass per column of the loss Hessian's root, or per draw.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1)
        >>> data = [(torch.tensor([[2.0]]), torch.zeros(1, 1))]
        >>> GGNDiagonalLinearOperator(model, nn.MSELoss(), list(model.parameters()), data).diagonal().round()
        tensor([8., 2.])
    """

    SELF_ADJOINT: ClassVar[bool] = True

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: nn.Module,
        params: Sequence[Tensor] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        mc_samples: int = 0,
        seed: int = 2147483647,
        *,
        num_per_example_loss_terms: int | None = None,
        output: Callable[[Any], Any] | None = None,
        mask: Callable[[Any, Any], Tensor] | None = None,
        example_axis: Mapping[str, int] | None = None,
        shift_labels: bool = False,
    ) -> None:
        if mc_samples < 0:
            raise ValueError(
                f"Invalid mc_samples: {mc_samples}. Expected 0 for the exact diagonal, or a number of draws."
            )
        risk = EmpiricalRisk(
            model_func,
            loss_func,
            data,
            params,
            output=output,
            mask=mask,
            example_axis=example_axis,
            batch_size_fn=_batch_size(data, batch_size_fn),
            num_data=num_data,
            num_per_example_loss_terms=num_per_example_loss_terms,
            shift_labels=shift_labels,
            progressbar=progressbar,
        )
        risk.losses.require_likelihoods()  # an unknown loss is refused now, not at first use
        vectors = MonteCarlo(mc_samples, seed) if mc_samples else Exact()
        super().__init__(risk, DiagonalBlock, vectors=vectors, check_deterministic=check_deterministic)


def _batch_size(data: Iterable[Any], given: Callable[[Any], int] | None) -> Callable[[Any], int] | None:
    """As in curvlinops 3.0.1, inputs that are mappings need `batch_size_fn`; said at once where the data is at hand."""
    if given is None and isinstance(data, Sequence) and len(data):
        item = data[0]
        if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], Mapping):
            raise ValueError(
                "When using dict-like custom data, `batch_size_fn` is required: a function of X that returns the "
                "number of examples, for instance "
                "`batch_size_fn=lambda X: len(X['x'])`."
            )
    return given


class _NoData(Sequence[Any]):
    """What an operator has that was loaded without data."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        raise ValueError(
            "This operator was loaded without data (data=None): it has the blocks of its state, and can't compute, "
            "verify or differentiate anything anew. Pass the data to from_state_dict."
        )
