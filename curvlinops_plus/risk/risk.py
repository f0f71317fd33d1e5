"""The empirical risk: model, losses, data and parameters of the function that is minimised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import Space
from curvlinops_plus.risk.first_order import gradient_pass, loss_pass
from curvlinops_plus.risk.layers import FoundReads, example_axes, named_params
from curvlinops_plus.risk.loss_weights import with_consistent_weights
from curvlinops_plus.risk.losses import Losses, Terms
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.reading import Batch, check_data, input_error_context, is_iterator, read_batch
from curvlinops_plus.risk.totals import Number, Totals

__all__ = ["EmpiricalRisk", "RiskOptions", "require_risk"]

T = TypeVar("T")


@dataclass(frozen=True)
class RiskOptions:
    """Options of an `EmpiricalRisk`, under the names of its arguments."""

    output: Callable[[Any], Any] | None = None
    mask: Callable[[Any, Any], Tensor] | None = None
    example_axis: Mapping[str, int] | None = None
    batch_size_fn: Callable[[Any], int] | None = None
    num_data: int | None = None
    num_per_example_loss_terms: int | None = None
    shift_labels: bool = False
    progressbar: bool = False
    reduction: str | None = None


class EmpiricalRisk:
    """The loss of a model over a data set, `c Σ_batches Σ_n Σ_r ℓ(f(x_n)_r, y_{n,r})`.

    `c` is 1 for `reduction="sum"`; for "mean" it is one over what PyTorch divides by, *over the whole data set*:
    batches of different sizes count as one big batch would. Of several losses the weighted sum is meant, each with
    its own `c`.

    Args:
        model: A module. Its mode (train or eval) is left as it is.
        loss: The loss, for instance `nn.CrossEntropyLoss()`. For a model with several outputs a dict or a tuple, of the
            form of its output and of the targets, of losses or pairs `(loss, weight)`.
        data: An iterable of batches `(X, y)`, `X` a tensor or a mapping, or of mappings with `labels` (then the model
            is called with the rest as keywords). It is read once per sweep.
        params: The parameters, a list or a dict of the model's own tensors; any subset in any order, frozen ones
            included. Under the model's own names a dict may hold other values: everything is computed at these, and
            the model keeps its own.
            Default: all that require a gradient.
        output: Picks the tensor that the loss reads out of what the model returns, or the dict or tuple of tensors that
            several losses read. An output with `.logits` needs none.
        mask: `mask(X, y)` gives [N, T] bool; positions that are False leave the statistics of layers with T positions.
        example_axis: Module name or glob to the axis that carries the examples, where it is not the first.
        batch_size_fn: Number of examples of an input that is no tensor.
        num_data: Replaces the number of examples counted for `c`.
        num_per_example_loss_terms: Replaces the number of loss terms per example counted for `c`.
        shift_labels: Language models: the output at position t is compared with the label at t + 1.
        progressbar: Show a bar on every loop over the data.
        reduction: For losses without a likelihood (Hessian and GGN take any): "mean" weighs batches by their numbers of
            examples, "sum" adds them up. Default: the loss's own attribute ("batchmean" is "mean"), else "mean".

    Attributes:
        model: The module.
        losses: The losses, one for each output; most models have one.
        data: The data.
        params: Key to parameter: the model's own tensors, or the values given instead.
        space: The space of vectors like the parameters.
        device: Where the parameters are.
        dtype: What matrices of the risk are computed in.
        options: The other arguments.

    Raises:
        TypeError: If the loss is a class or not callable, or `data` is no iterable of batches (a `Dataset` is none).
        ValueError: If a parameter is not the model's, or `num_data`, `num_per_example_loss_terms` or the weight of a
            loss is no positive finite number.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), [(torch.ones(4, 3), torch.zeros(4, 2))])
        >>> risk.space.dim
        8
        >>> sorted(risk.gradient())
        ['bias', 'weight']
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Mapping[Any, Any] | Sequence[Any] | Callable[..., Any],
        data: Iterable[Any],
        params: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
        *,
        output: Callable[[Any], Any] | None = None,
        mask: Callable[[Any, Any], Tensor] | None = None,
        example_axis: Mapping[str, int] | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        num_data: int | None = None,
        num_per_example_loss_terms: int | None = None,
        shift_labels: bool = False,
        progressbar: bool = False,
        reduction: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"`model` is a {type(model).__name__}; layers can only be recorded in a torch.nn.Module.")
        check_data(data)
        self.model, self.data = model, data
        self.losses = Losses(loss, reduction)
        self._own = named_params(model, params)
        self.params = {key: _value(params, key, p) for key, p in self._own.items()}
        self.space = Space.of(self.params)
        self.device, self.dtype = _common_device(self.params), _common_dtype(self.params)
        axes = example_axes(model, example_axis)
        self.options = RiskOptions(
            output,
            mask,
            axes,
            batch_size_fn,
            num_data,
            num_per_example_loss_terms,
            shift_labels,
            progressbar,
            reduction,
        )
        _check_options(self.options, self.losses)
        #: Self-checks that this risk has passed, and messages that were given; each is needed once.
        self.checked: set[str] = set()
        #: How functions read parameters, outside of modules with rules; None before they were looked for.
        self.reads: FoundReads | None = None

    def with_data(self, data: Iterable[Any]) -> EmpiricalRisk:
        """The same model, losses, parameters and options with other data.

        Raises:
            TypeError: If `data` is no iterable of batches.
        """
        check_data(data)
        other = copy(self)
        other.data, other.checked = data, set()
        return other

    # ------------------------------------------------------------------------------------------------- one batch
    def batches(self, desc: str) -> Iterator[Batch]:
        """Read the data once; empty batches are left out.

        Raises:
            ValueError: If there is no batch at all.
        """
        found, options = False, self.options
        bar = tqdm(self.data, desc=f"{desc} (on {self.device})") if options.progressbar else nullcontext(self.data)
        with bar as items:
            for index, item in enumerate(items):
                batch = read_batch(item, index, self.device, options.batch_size_fn)
                if batch.num_examples:
                    found = True
                    yield batch
        if not found:
            again = (
                " It is an iterator, which can be read only once: pass a list or a DataLoader."
                if is_iterator(self.data)
                else ""
            )
            raise ValueError(f"`data` has no examples.{again}")

    def run(self, batch: Batch, model: Callable[..., Any] | None = None) -> tuple[Any, Any, Any]:
        """Forward pass: for each loss its output, its target, and its class axis if that is not the loss's own."""
        call = self.model if model is None else model
        if isinstance(call, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            call = call.module  # replicas of a layer are other objects, and reducers need not run
        with input_error_context(batch, self.params), self.placed() if model is None else nullcontext():
            out = call(**batch.X) if batch.unpack else call(batch.X)
        return self.read_output(out, batch)

    def read_output(self, out: Any, batch: Batch) -> tuple[Any, Any, Any]:
        """Outputs, targets and class axes, as `run` gives them, from what the model returned for a batch."""
        outputs, class_axes = self.losses.select(out, self.options.output)
        targets = self.losses.targets(batch.y)
        if self.options.shift_labels:
            outputs, targets = tuple(f[:, :-1] for f in outputs), tuple(y[:, 1:] for y in targets)
        return outputs, targets, class_axes

    def terms(
        self, outputs: Sequence[Tensor], targets: Sequence[Any], batch: Batch, class_axes: Sequence[int | None]
    ) -> Terms:
        """What the losses make of outputs and targets, and the totals of the batch; its losses have a graph.

        The value of a loss without a likelihood counts as that of N terms.
        """
        return self.losses.terms(outputs, targets, batch.num_examples, class_axes)

    def scale(self, totals: Totals) -> Number:
        """`c`: what multiplies the sum of all terms of the reference loss (the first one with the reduction "mean").

        Raises:
            ValueError: If no loss term counts at all.
        """
        options = self.options
        return self.losses.scale(totals, options.num_data, options.num_per_example_loss_terms)

    def at(self, values: Mapping[str, Tensor], function: Callable[[nn.Module], T]) -> T:
        """`function(model)` at other values of the parameters (keys as in `params`); the model is as before afterwards.

        Everything that runs the model must happen inside, backward passes too: activation checkpointing runs it again.
        """
        replaced = {slot: values[key] for slot, key in self._slots.items()}
        return functional_call(_Inside(self.model, function), replaced, (), tie_weights=False)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """The model has the values of `params` in here, where these are not its own tensors."""
        other = {id(own): self.params[key] for key, own in self._own.items() if self.params[key] is not own}
        slots = [
            (module, local, p)
            for module in (self.model.modules() if other else ())
            for local, p in module._parameters.items()
            if id(p) in other
        ]
        try:
            for module, local, p in slots:
                module._parameters[local] = other[id(p)]  # pyright: ignore[reportArgumentType]
            yield
        finally:
            for module, local, p in slots:
                module._parameters[local] = p

    def require_own_values(self, what: str) -> None:
        """Refuse other values than the model's own, for what watches the user's forward pass.

        Raises:
            ValueError: Naming some parameters.
        """
        if other := [key for key, own in self._own.items() if self.params[key] is not own]:
            raise ValueError(
                f"{what} watches the model at its own parameters, and `params` holds other values of {other[:3]}. Use "
                "`update`, which runs the model at these."
            )

    @cached_property
    def _slots(self) -> dict[str, str]:
        """Every place that holds a parameter, once, to its key: a module may have two names, a parameter two modules.

        Found before the first call of `at`, because these calls may be nested.
        """
        keys = {id(p): key for params in (self._own, self.params) for key, p in params.items()}
        return {
            f"model.{name}.{local}" if name else f"model.{local}": keys[id(p)]
            for name, module in self.model.named_modules()
            for local, p in module._parameters.items()
            if id(p) in keys
        }

    # ---------------------------------------------------------------------------------------------- all the data
    def loss(self) -> Tensor:
        """The loss over all data, a 0-d tensor. Cost: one forward pass."""
        with preserve_state(self.model, self.data):
            return self._value(loss_pass(self))

    def gradient(self) -> dict[str, Tensor]:
        """Gradient of the loss over all data: key to tensor. Cost: one forward and one backward pass.

        Several means over numbers of terms that are not in the same proportion in all batches: up to two more passes.
        """
        return self.gradient_and_loss()[0]

    def gradient_and_loss(self) -> tuple[dict[str, Tensor], Tensor]:
        """Gradient and loss over all data in one pass; nothing is written to `.grad`."""
        with preserve_state(self.model, self.data):
            sums, totals = with_consistent_weights(self, lambda weights: gradient_pass(self, weights))
        c = self.scale(totals)
        return {key: g * c for key, g in sums.items()}, self._value(totals)

    def _value(self, totals: Totals) -> Tensor:
        """The loss of the data that the totals are of."""
        if len(self.losses) == 1:
            value = self.losses[0].weight * self.scale(totals) * totals.losses[0]
        else:
            scales = self.losses.scales(totals, self.options.num_data)
            value = sum(one.weight * c * loss for one, c, loss in zip(self.losses, scales, totals.losses))
        return torch.as_tensor(value).to(self.dtype)


def require_risk(risk: Any, owner: str) -> None:
    """Refuse anything else in place of a risk.

    Raises:
        TypeError: Saying what to write.
    """
    if not isinstance(risk, EmpiricalRisk):
        raise TypeError(
            f"{owner} takes an EmpiricalRisk, got a {type(risk).__name__}: make one of model, loss and data first, "
            "EmpiricalRisk(model, loss, data)."
        )


class _Inside(nn.Module):
    """Calls a function with a model whose parameters are replaced."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self) -> Any:
        return self.function(self.model)


def _value(params: Any, key: str, own: Tensor) -> Tensor:
    """What stands for a parameter: the model's own tensor, or another value given under its name."""
    given = params[key] if isinstance(params, Mapping) else own
    if given is own or (given.data_ptr() == own.data_ptr() and given.shape == own.shape and own.numel()):
        return own
    return given if isinstance(given, nn.Parameter) else nn.Parameter(given.detach(), given.requires_grad)


def _common_device(params: Mapping[str, Tensor]) -> torch.device:
    devices = {p.device for p in params.values()}
    if len(devices) != 1:
        raise ValueError(
            f"The parameters live on several devices, {sorted(map(str, devices))}; one operator needs them on one."
        )
    return devices.pop()


def _common_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """The widest of the parameters' dtypes, float32 at least."""
    dtypes = {p.dtype for p in params.values()}
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(
            f"The parameters have dtypes {sorted(map(str, dtypes))}; only real floating-point parameters have "
            "a curvature here."
        )
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide


def _check_options(options: RiskOptions, losses: Losses) -> None:
    numbers = {
        "num_data": (options.num_data, "examples"),
        "num_per_example_loss_terms": (options.num_per_example_loss_terms, "loss terms per example"),
    }
    for name, (number, what) in numbers.items():
        if number is None:
            continue
        if not isinstance(number, Real) or isinstance(number, bool):
            raise TypeError(
                f"{name} is a {type(number).__name__}; expected the number of {what}, or None to count them."
            )
        if not 0 < float(number) < float("inf"):
            raise ValueError(f"{name}={number} must be positive: it is the number of {what}. None counts them.")
    if losses.form != "single":
        about_one = {
            "shift_labels": "Shift output and target yourself, in `output=` and in the data.",
            "num_per_example_loss_terms": "Leave it out.",
        }
        for name, advice in about_one.items():
            if getattr(options, name):
                raise UnsupportedError(
                    f"{name} is about one loss, and there are losses for the outputs {losses.keys}. {advice}"
                )
