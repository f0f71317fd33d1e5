"""KFAC, EKFAC and KFOC, their inverse, and the diagonal: names, arguments, order and defaults of
curvlinops 3.0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from curvlinops_plus.blocks.accumulator import Accumulator
from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator
from curvlinops_plus.blocks.ekfac import EKFAC, Correction
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.per_example import DiagonalBlock, NearestKronecker
from curvlinops_plus.blocks.sweeps import KEPT_BYTES, Sweeps
from curvlinops_plus.classic.arguments import FisherType, KFACType, build_risk, names_of
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import (
    Deferred,
    Dense,
    Diagonal,
    Eigendecomposed,
    Kronecker,
    LinearOperator,
    Structure,
)
from curvlinops_plus.linalg.checksums import require_intact, sealed
from curvlinops_plus.linalg.damping import check_damping
from curvlinops_plus.linalg.fields import Fields, reading
from curvlinops_plus.options import flag, integer, number, one_of
from curvlinops_plus.risk import Empirical, Exact, ForwardOnly, Layer, MonteCarlo, Vectors
from curvlinops_plus.risk.parameters import fingerprint

if TYPE_CHECKING:
    from typing_extensions import Self


class KFACLinearOperator(BlockwiseLinearOperator):
    """Kronecker-factored approximate curvature (KFAC) of the Fisher or generalized Gauss-Newton
    matrix.

    Layers without Kronecker factors get their exact diagonal, and one warning lists them.

    Args:
        model_func: The network: a module, or a function `(params, X) -> outputs`, whose layers are
            its matrix products, convolutions and embeddings with parameters.
        loss_func: `MSELoss`, `CrossEntropyLoss`, `BCEWithLogitsLoss`, or any loss with a registered
            likelihood.
        params: The parameters, in the order in which vectors are formed: a list, or a dict under
            names of your own. A function is called with the dict; under a module's own names a dict
            may hold other values.
        data: Iterable of batches `(X, y)`, `X` a tensor or a mapping (then `batch_size_fn` is
            needed), or of mappings with `labels`.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compute now, and compare the total loss of two passes over the data.
            Otherwise factors are computed at first use, which refuses parameters that have changed
            since.
        seed: Where the random draws start.
        fisher_type: "type-2" (exact), "mc" (labels drawn from the model), "empirical" or
            "forward-only".
        mc_samples: Draws per example for "mc".
        kfac_approx: "expand" or "reduce".
        num_per_example_loss_terms: Replaces the number of loss terms per example in the scale of
            the loss.
        separate_weight_and_bias: Weight and bias have blocks of their own.
        num_data: Replaces the number of examples in the scale of the loss.
        batch_size_fn: Number of examples of an input that is not a tensor.
        backend: Accepted for code written for curvlinops, "hooks" or "make_fx", without effect:
            modules are recorded by hooks, and functions that read parameters as they are called.
        max_kept_bytes: Memory for what stays between two sweeps, as for `curvature`; KFAC alone
            keeps nothing.
        owned: As for `curvature`: of several processes each keeps only some blocks, and has the
            factors of these.
        max_bytes: As for `curvature`: layers in groups that fit, each with sweeps of its own.
        offload: As for `curvature`: where finished blocks are kept, "cpu".
        risk_options: Keyword options of `EmpiricalRisk`, such as `output`, `mask`, `weight`,
            `shift_labels`, `processes`.

    Raises:
        ValueError: For an unknown loss, an unknown option value, a negative `max_kept_bytes`, or
            `mc_samples` with anything but "mc".
        RuntimeError: If two passes over the data disagree, or the parameters changed before the
            first use.

    Cost: one sweep (forward pass, and one backward pass per vector to the layers' outputs only);
    the determinism check is one more forward pass.

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

    _APPROXIMATION: ClassVar[type[Accumulator]] = KFAC

    def __init__(
        self,
        model_func: nn.Module | Callable[..., Any],
        loss_func: nn.Module,
        params: Sequence[Tensor | str] | Mapping[str, Tensor],
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
        backend: str = "hooks",
        max_kept_bytes: int = KEPT_BYTES,
        owned: bool = False,
        max_bytes: int | None = None,
        offload: str | torch.device | None = None,
        **risk_options: Any,
    ) -> None:
        fisher_type = FisherType(one_of("fisher_type", fisher_type, *names_of(FisherType)))
        kfac_type = KFACType(one_of("kfac_approx", kfac_approx, *names_of(KFACType)))
        expand = kfac_type is KFACType.EXPAND
        flag("check_deterministic", check_deterministic)
        one_of("backend", backend, "hooks", "make_fx")
        integer("mc_samples", mc_samples, low=1)
        if fisher_type is not FisherType.MC and mc_samples != 1:
            raise ValueError(
                f"mc_samples={mc_samples}: fisher_type={fisher_type.value!r} draws nothing."
            )
        vectors: Vectors
        if fisher_type is FisherType.TYPE2:
            # KFAC-expand sums over positions independently: with R > 1 loss terms a random sign for
            # each saves R times the passes. Per-example gradients need every term by itself.
            vectors = Exact(signs=self._APPROXIMATION is KFAC and expand, seed=seed)
        elif fisher_type is FisherType.MC:
            vectors = MonteCarlo(mc_samples, seed)
        elif fisher_type is FisherType.EMPIRICAL:
            vectors = Empirical()
        else:
            vectors = ForwardOnly()
        risk = build_risk(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            num_data,
            batch_size_fn,
            num_per_example_loss_terms=num_per_example_loss_terms,
            **risk_options,
        )
        super().__init__(
            risk,
            self._APPROXIMATION if expand else self._APPROXIMATION.using(kfac_approx="reduce"),
            vectors=vectors,
            separate_weight_and_bias=separate_weight_and_bias,
            check_deterministic=check_deterministic,
            max_kept_bytes=max_kept_bytes,
            owned=owned,
            max_bytes=max_bytes,
            offload=offload,
            compute=check_deterministic,
        )

    _adopts_vectors = True

    def compute_kronecker_factors(self) -> None:
        """Compute the factors anew from the data; what was there before is dropped."""
        self.compute()

    def _factors(self, side: str, eigenvectors: bool = False) -> Mapping[str, Any]:
        """Layer name to one kind of factor: the tensors of the blocks, which may be written to in
        place.
        """
        factors: dict[str, Tensor] = {}
        for layer in self._layers():
            # The weight's block comes last, so that it has the layer's name; those that other
            # processes keep are not there.
            groups = sorted(layer.groups, key=lambda group: layer.weight in group.keys)
            for group in groups:
                block: Any = self.operator.blocks.get(group.name)
                is_decomposed = isinstance(block, Eigendecomposed)
                if is_decomposed != eigenvectors:
                    continue
                factor = block.basis if is_decomposed else block
                if isinstance(factor, Kronecker):
                    factor = factor.A if side == "A" else factor.G
                elif side == "A":  # a bias has no input factor
                    continue
                if isinstance(factor, Dense):
                    factors[layer.name] = factor.matrix
                elif isinstance(factor, Diagonal) and not eigenvectors:
                    # Its eigenvectors would be the identity's.
                    factors[layer.name] = factor.vector
        return MappingProxyType(factors)

    def _layers(self) -> list[Layer]:
        """The layers that have Kronecker factors."""
        return [
            entry.layer
            for entry in self.plan
            if issubclass(entry.approximation.kind, self._APPROXIMATION)
        ]

    @property
    def input_covariances(self) -> Mapping[str, Any]:
        """Layer name to the live input factor `A`; layers whose weight is not in `params` have
        none.
        """
        return self._factors("A")

    @property
    def gradient_covariances(self) -> Mapping[str, Any]:
        """Layer name to the live gradient factor `G`."""
        return self._factors("G")

    @classmethod
    def from_state_dict(  # type: ignore[override]  # the order of the arguments is that of curvlinops
        cls,
        state_dict: Mapping[str, Any],
        model_func: nn.Module,
        params: Sequence[Tensor | str] | Mapping[str, Tensor] | None,
        data: Iterable[Any] | None,
        check_deterministic: bool = True,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        loss_func: Any = None,
        **options: Any,
    ) -> Self:
        """The operator that a state describes, without reading data or computing anything.

        Args:
            state_dict: What `state_dict()` returned.
            model_func: The network.
            params: The parameters, as when the state was made. None: those that the state names, in
                its order.
            data: For recomputing later; None is fine.
            check_deterministic: Whether computing anew will compare two passes.
            batch_size_fn: As in the constructor.
            loss_func: Needed for losses that are not built in.
            options: The other keyword-only options of the constructor.

        Raises:
            ValueError: If the state is foreign, cut off, or does not fit.
        """
        options["batch_size_fn"] = batch_size_fn
        K = super().from_state_dict(state_dict, model_func, data, params, loss=loss_func, **options)
        K.check_deterministic = check_deterministic
        return K

    # laplace-torch reads these names.
    _mapping = property(lambda self: self.mapping)
    _input_covariances = property(lambda self: self.input_covariances)
    _gradient_covariances = property(lambda self: self.gradient_covariances)


class EKFACLinearOperator(KFACLinearOperator):
    """Eigenvalue-corrected KFAC (EKFAC) of the Fisher or generalized Gauss-Newton matrix.

    The eigenvectors are KFAC's, the eigenvalues the diagonal of the exact block in that basis: its
    trace is the exact block's trace, and it is never further from the exact block than KFAC.
    Arguments as for `KFACLinearOperator`, without "forward-only".

    Cost: two sweeps and an eigendecomposition of each factor; the determinism check compares the
    two sweeps. Inputs and gradients of all layers over all data are kept for the second sweep if
    they take up to `max_kept_bytes` (not between calls of `compute_kronecker_factors` and
    `compute_eigenvalue_correction`, the parameters may change there); model and data are not run
    again then, and the determinism check is one forward pass.

    Source: George et al. 2018, "Fast Approximate Natural Gradient Descent in a Kronecker-factored
    Eigenbasis".

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 2)
        >>> data = [(torch.rand(5, 3), torch.rand(5, 2))]
        >>> K = EKFACLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> {position: tuple(e.shape) for position, e in K.corrected_eigenvalues[""].items()}
        {0: (2, 3), 1: (2,)}
    """

    _APPROXIMATION = EKFAC

    def compute_kronecker_factors(self) -> None:
        """Compute the factors anew (first sweep); the eigenvalues follow at first use, at the same
        parameters.

        Raises:
            UnsupportedError: With `max_bytes`, whose groups of layers are finished one after the
                other.
        """
        if self.max_bytes is not None:
            raise UnsupportedError(
                f"max_bytes={self.max_bytes}: layers are computed in groups, each to its end, and "
                "the factors of all are never there together. Use compute(), which computes "
                "everything anew."
            )
        self._compute(fingerprint(self.risk), max_sweeps=1)

    def compute_eigenvalue_correction(self) -> None:
        """Compute the eigenvalues anew (second sweep) at the present parameters, in the basis of
        the factors that are there.
        """
        self._compute(fingerprint(self.risk), self._begun or self._in_current_basis())

    def _in_current_basis(self) -> Sweeps:
        """The second sweep alone, which corrects the eigenvalues of the present basis."""
        if self.owned or self.max_bytes is not None:
            raise UnsupportedError(
                "The eigenvectors of all layers are needed at once, which owned=True and "
                "max_bytes= keep apart. Use compute(), which computes everything anew."
            )
        sweeps = Sweeps(self)
        stages = sweeps.groups[0].stages
        blocks = self.operator.blocks
        Q_A = self.input_covariances_eigenvectors
        Q_G = self.gradient_covariances_eigenvectors
        for entry in self.plan:
            layer = entry.layer
            if issubclass(entry.approximation.kind, EKFAC):
                name = layer.name
                correction = Correction(layer, self.risk.scale, Q_G.get(name), Q_A.get(name))
                stages[layer] = [{name: correction}]
            else:
                del stages[layer]
                for group in layer.groups:
                    sweeps.blocks[group.name] = blocks[group.name]._scale(1 / self.scale)
        return sweeps

    @property
    def input_covariances_eigenvectors(self) -> Mapping[str, Any]:
        """Layer name to the live eigenvectors of the input factor."""
        return self._factors("A", eigenvectors=True)

    @property
    def gradient_covariances_eigenvectors(self) -> Mapping[str, Any]:
        """Layer name to the live eigenvectors of the gradient factor."""
        return self._factors("G", eigenvectors=True)

    @property
    def corrected_eigenvalues(self) -> Mapping[str, Any]:
        """Layer name to live eigenvalues: [o, i] if weight and bias are joined, else {position in
        `params`: tensor}.
        """
        eigenvalues: dict[str, Any] = {}
        for layer in self._layers():
            by_position: dict[int, Tensor] = {}
            for group in layer.groups:
                block: Any = self.operator.blocks.get(group.name)
                if block is None:  # another process keeps it
                    continue
                shape = group.layout.matrix_shape
                if layer.weight not in group.keys:  # a bias has rows alone
                    shape = shape[:-1]
                position = self.in_space.names.index(group.keys[0])
                by_position[position] = block.values.view(*shape)
            joined = len(layer.groups) == 1 and len(layer.params) > 1
            if by_position:
                eigenvalues[layer.name] = (
                    next(iter(by_position.values())) if joined else by_position
                )
        return MappingProxyType(eigenvalues)


class KFOCLinearOperator(KFACLinearOperator):
    """Kronecker-factored optimal curvature (KFOC): per layer the product `G ⊗ A` nearest to the
    exact block.

    Nearest in the Frobenius norm, see `NearestKronecker`; a separate bias block is exact.
    `input_covariances` and `gradient_covariances` are the factors of the layers' weights: both
    symmetric and positive semi-definite, with equal mean eigenvalues. Layers without Kronecker
    factors get their exact diagonal, and one warning lists them.

    Arguments as for `KFACLinearOperator`, without `kfac_approx`; the exact matrix ("type-2") is the
    default. More options are those of `curvature(risk, NearestKronecker.using(...))`.

    Args:
        fisher_type: "type-2" (exact), "mc" (labels drawn from the model) or "empirical".
        mc_samples: Draws per example for "mc".
        options: Keyword options of `KFACLinearOperator`.

    Cost: one sweep for layers whose block takes no more than 64 MiB, four sweeps for larger ones.

    Source: Schnaus et al. 2021, "Kronecker-factored optimal curvature"; Koroko et al. 2022 (arXiv
    2201.10285).

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

    _APPROXIMATION = NearestKronecker

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: nn.Module,
        params: Sequence[Tensor | str] | Mapping[str, Tensor],
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
        **options: Any,
    ) -> None:
        super().__init__(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            check_deterministic,
            seed,
            fisher_type,
            mc_samples,
            num_per_example_loss_terms=num_per_example_loss_terms,
            separate_weight_and_bias=separate_weight_and_bias,
            num_data=num_data,
            batch_size_fn=batch_size_fn,
            **options,
        )


class KFACInverseLinearOperator(Deferred):
    """Damped inverse of a `KFACLinearOperator` or `EKFACLinearOperator`.

    Args:
        A: The operator.
        damping: A number that is added *in full to each factor*, or a pair for input and gradient
            factors. With `use_exact_damping` or `use_heuristic_damping` a single number.
        use_heuristic_damping: Split the number over the factors, Martens & Grosse 2015, section
            6.3.
        min_damping: Lower bound of each side under the heuristic.
        use_exact_damping: `(A + damping·I)⁻¹`, through eigendecompositions.
        cache: Accepted for code written for curvlinops; inverse blocks are computed at first use,
            and kept.
        retry_double_precision: Try a failing Cholesky decomposition once more in float64.

    Raises:
        ValueError: For another operator, both kinds of damping, a pair with either, or EKFAC
            without exact damping.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops_plus import KFACLinearOperator
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 2)
        >>> data = [(torch.rand(5, 3), torch.rand(5, 2))]
        >>> K = KFACLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> v = torch.ones(8)
        >>> inverse = KFACInverseLinearOperator(K, damping=1e-2, use_exact_damping=True)
        >>> bool(torch.allclose(inverse @ (K @ v + 1e-2 * v), v, atol=1e-4))
        True
    """

    def __init__(
        self,
        A: KFACLinearOperator,
        damping: float | tuple[float, float] = 0.0,
        use_heuristic_damping: bool = False,
        min_damping: float = 1e-8,
        use_exact_damping: bool = False,
        cache: bool = True,
        retry_double_precision: bool = True,
    ) -> None:
        if not isinstance(A, KFACLinearOperator):
            raise ValueError(
                "The input `A` must be an instance of `KFACLinearOperator`; others have "
                "`A.inverse`."
            )
        if isinstance(A, EKFACLinearOperator) and not use_exact_damping:
            raise ValueError(
                "Only exact damping is supported for EKFAC. Pass use_exact_damping=True."
            )
        check_damping("damping", damping)
        number("min_damping", min_damping, low=0)
        flag("use_heuristic_damping", use_heuristic_damping)
        flag("use_exact_damping", use_exact_damping)
        flag("cache", cache)
        flag("retry_double_precision", retry_double_precision)
        if use_exact_damping + use_heuristic_damping + isinstance(damping, tuple) > 1:
            raise ValueError(
                "Either use heuristic damping or exact damping, or give a pair. Heuristic and "
                "exact damping require a single damping value."
            )
        super().__init__(A.in_space, A.dtype, A.device, Structure.PSD)
        self._A = A
        self._options = {
            "damping": damping,
            "use_heuristic_damping": use_heuristic_damping,
            "min_damping": min_damping,
            "use_exact_damping": use_exact_damping,
            "cache": cache,
            "retry_double_precision": retry_double_precision,
        }

    @cached_property
    def operator(self) -> LinearOperator:  # type: ignore[override]
        """The inverse blocks as a plain operator, computed at first use."""
        damping: Any = self._options["damping"]
        exact = self._options["use_exact_damping"]
        heuristic = self._options["use_heuristic_damping"]
        if not (exact or heuristic or isinstance(damping, tuple)):
            damping = (damping, damping)  # added to each factor
        options = {
            name: self._options[name]
            for name in ("use_heuristic_damping", "min_damping", "retry_double_precision")
        }
        return self._A.inverse(damping, **options)

    def state_dict(self) -> dict[str, Any]:
        """Options, and the state of the operator that is inverted. The inverse blocks follow from
        them.
        """
        return sealed({"A": self._A.state_dict(), **self._options})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and the inverted operator's blocks.

        Raises:
            ValueError: If the state is damaged, or that of the inverted operator does not fit;
                nothing has changed then.
        """
        made = type(self).from_state_dict(state_dict, self._A)
        self._options = made._options
        vars(self).pop("operator", None)

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, Any], A: KFACLinearOperator
    ) -> KFACInverseLinearOperator:
        """The inverse that a state describes, of `A`.

        Args:
            state_dict: What `state_dict()` returned.
            A: The operator; it takes over the blocks of the state.

        Raises:
            ValueError: If the state is damaged or does not fit; nothing has changed then.
        """
        title = "The state"
        with reading(title):
            require_intact(state_dict, title)
        state = Fields(state_dict, title)
        flags = ("use_heuristic_damping", "use_exact_damping", "cache", "retry_double_precision")
        damping = state["damping"]
        if isinstance(damping, (list, tuple)):
            pair = state.sequence("damping", 2)
            damping = (pair.number(0, 0.0), pair.number(1, 0.0))
        else:
            state.number("damping", 0.0)
        state.number("min_damping", 0.0)
        options = {name: state.flag(name) for name in flags}
        inverse = cls(A, damping, min_damping=state["min_damping"], **options)
        A.load_state_dict(state["A"])
        return inverse


class GGNDiagonalLinearOperator(BlockwiseLinearOperator):
    """The diagonal of the generalized Gauss-Newton matrix, exact or from sampled gradients, for any
    layer.

    Args:
        model_func: The network, a module.
        loss_func: A loss with a registered likelihood.
        params: The parameters, in the order in which vectors are formed: a list, or a dict under
            names of your own.
        data: Iterable of batches, as for `KFACLinearOperator`.
        progressbar: Show a bar on every loop over the data.
        check_deterministic: Compute now, and compare the total loss of two passes over the data.
            Otherwise the diagonal is computed at first use, which refuses parameters that have
            changed since.
        num_data: Replaces the number of examples in the scale of the loss.
        batch_size_fn: Number of examples of an input that is not a tensor.
        mc_samples: Draws per example; 0 is the exact diagonal.
        seed: Where the random draws start.
        risk_options: Keyword options of `EmpiricalRisk`.

    Raises:
        ValueError: For an unknown loss, or a negative `mc_samples`.
        RuntimeError: If two passes over the data disagree, or the parameters changed before the
            first use.

    Cost: one sweep, with one backward pass per column of the loss Hessian's root, or per draw.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(1, 1)
        >>> data = [(torch.tensor([[2.0]]), torch.zeros(1, 1))]
        >>> GGNDiagonalLinearOperator(
        ...     model, nn.MSELoss(), list(model.parameters()), data
        ... ).diagonal().round()
        tensor([8., 2.])
    """

    def __init__(
        self,
        model_func: nn.Module,
        loss_func: nn.Module,
        params: Sequence[Tensor | str] | Mapping[str, Tensor],
        data: Iterable[Any],
        progressbar: bool = False,
        check_deterministic: bool = True,
        num_data: int | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        mc_samples: int = 0,
        seed: int = 2147483647,
        **risk_options: Any,
    ) -> None:
        flag("check_deterministic", check_deterministic)
        integer("mc_samples", mc_samples, low=0)
        integer("seed", seed)
        risk = build_risk(
            model_func,
            loss_func,
            params,
            data,
            progressbar,
            num_data,
            batch_size_fn,
            **risk_options,
        )
        super().__init__(
            risk,
            DiagonalBlock,
            vectors=MonteCarlo(mc_samples, seed) if mc_samples else Exact(),
            check_deterministic=check_deterministic,
            compute=check_deterministic,
        )
