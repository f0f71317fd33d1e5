"""The empirical risk: model, losses, data and parameters of the function that is minimised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from reprlib import repr as shortened
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.distributed import Processes
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.options import one_of
from curvlinops_plus.progress import known_length, shown
from curvlinops_plus.risk.batches import (
    Batch,
    are_in_lists,
    check_data,
    copy_of,
    count_examples,
    mapped,
    on_device,
    prepare_graph,
    read_example_of_rows,
    refuse_outside_reads,
    tensors_of,
)
from curvlinops_plus.risk.found_reads import FoundReads
from curvlinops_plus.risk.function_module import FunctionModule, ModelOrFunction
from curvlinops_plus.risk.labels import are_labels_shifted, shifted_labels
from curvlinops_plus.risk.loss_passes import gradient_pass, loss_pass
from curvlinops_plus.risk.losses import Losses, Totals
from curvlinops_plus.risk.output_forms import in_form, with_example_axis
from curvlinops_plus.risk.parameters import (
    ModelParameters,
    common_processes,
    example_axes,
    modules_of,
    require_replicas,
)
from curvlinops_plus.risk.preserve import Inputs, preserve_state, untraced
from curvlinops_plus.risk.risk_options import Loss, RiskOptions, checked_weight
from curvlinops_plus.risk.routes import kinds_by_number
from curvlinops_plus.risk.vectors import Vectors

T = TypeVar("T")

#: Of a risk, what operators call and users don't.
_FOR_OPERATORS = {
    "batches",
    "checked",
    "for_vectors",
    "own_params",
    "placed",
    "read",
    "read_input",
    "read_output",
    "reads",
    "renew",
    "require_in_place",
    "require_own_values",
    "restricted",
    "run",
    "scale",
    "sharded",
    "together",
    "value",
    "whole",
}


class EmpiricalRisk(ModelParameters):
    """The loss of a model over a data set, `c Σ_batches Σ_n Σ_r ℓ(f(x_n)_r, y_{n,r})`.

    `c` is 1 for `reduction="sum"`; for "mean" it is one over what PyTorch divides by, *over the
    whole data set*: batches of different sizes count as one big batch would. With several losses it
    is their weighted sum, each with its own `c`.

    Args:
        model: A module, whose mode (train or eval) is left as it is; or a function `(params, X) ->
            outputs`, of which `params` are the parameters, a dict: it can do what a module can,
            and `model` is a module around it.
        loss: The loss, for instance `nn.CrossEntropyLoss()`. For a model with several outputs a
            dict or a tuple, of the form of its output and of the targets, of losses or pairs
            `(loss, weight)`.
        data: An iterable of batches `(X, y)`, `X` a tensor or a mapping, or of mappings with
            `labels` (then the model is called with the rest as keywords). It is read once per
            sweep. N, the number of examples, is the size of the first axis of `X`, or the one that
            all tensors of a mapping have in common, or what `batch_size_fn` says. When a few
            examples are run alone, any tensor of `X` and `y` whose first or second axis has size N,
            or whose first axis is a multiple of N, is taken for rows of examples. Make what belongs
            to all of them, such as a table or a graph, a buffer of the model, or add an axis of
            size 1 in front.
        params: The parameters, a list or a dict of the model's own tensors; any subset in any
            order, frozen ones included. In a list, names stand for them: "2.weight" for itself, "2"
            for all parameters of the module, "*.bias" for all that match. A dict with the model's
            names may hold other values: everything is computed at these, and the model keeps its
            own. Default: all that require a gradient; a function has no default.
        output: Selects the tensor that the loss reads from what the model returns, or the dict or
            tuple of tensors that several losses read. Outputs with `.logits` don't need it.
        mask: `mask(X, y)` gives [N, T] bool; positions that are False leave the statistics of
            layers with T positions.
        example_axis: Module name or glob to the axis that carries the examples, where it is not the
            first.
        batch_size_fn: Number of examples of an input that is not a tensor.
        example_of_rows: For examples of which layers see different numbers of rows, such as the
            nodes of several graphs one after the other: `example_of_rows(X)` gives the number of
            the example of each row, M integers from 0 on. Tensors with M rows have these. For
            several kinds of rows it gives a list, `lambda g: [g.batch, g.batch[g.edge_index[0]]]`
            for nodes and edges. N is one more than the largest number, unless there is
            `batch_size_fn`.
        num_data: Replaces the number of examples counted for `c`.
        num_per_example_loss_terms: Replaces the number of loss terms per example counted for `c`.
        shift_labels: Language models: the output at position t is compared with the label at t + 1.
            Positions are axis 1 of both, and classes the last axis of the output: `output=lambda f:
            f.mT` transposes `[N, classes, T]`, which is not noticed if T equals the number of
            classes. Default: as the model's own loss does, if it computes one from `labels`; else,
            and with `check=False`, no shift.
        progressbar: Show a bar on every loop over the data.
        reduction: For losses without a likelihood (Hessian and GGN take any): "mean" weighs batches
            by their numbers of examples, "sum" adds them up. Default: the loss's own attribute
            ("batchmean" is "mean"), else "mean".
        check: Whether three examples of a batch are run and recorded by themselves. Compared are
            their outputs with those in the batch, and gradients by layer rules with plain
            autograd's, for a random vector at all outputs. True does so in the first batch, in each
            that calls other layers, and in batches 4, 16, 64, ...; "every" in all. Also whether two
            evaluations have to agree, and whether a loss that the model computes from `labels` is
            compared with this one; whether a loss without a likelihood is a mean (or sum) over
            examples.
        weight: `weight(X, y, ...)` gives the weights of the examples of a batch, N numbers of at
            least 0; it is called with all entries of the batch, which may have more than two:
            `weight=lambda X, y, w: w` for batches `(X, y, w)`. A batch that is a mapping with
            `labels` is `weight(X, labels)`, `X` the rest, from which it may pop what the model
            doesn't take. The loss is `c Σ_n w_n Σ_r ℓ(f(x_n)_r, y_{n,r})` with `c` one over the sum
            of weights times terms for "mean": an example of weight 2 counts as two, one of weight 0
            as none, in the loss, its derivatives and all statistics. To divide by N instead, use
            reduction="sum" and weights `w / N`.
        processes: Several processes, each with its part of the data: `processes.share(data)`.
            Results are those of all data, and equal in all processes, which have to compute them
            together. Default: this process alone.

    Passes over the data don't depend on the caller's modes: neither `torch.autocast`,
    `torch.no_grad()` and `torch.inference_mode()` around them nor the compiler change results.
    Autocast inside the model's forward is part of the model. Afterwards model, data and global
    settings are as before.

    Threads: one at a time runs passes over data, of any risk, and others wait; so operators may be
    created and used in several threads. Meanwhile other threads may call the model: they see its
    own parameters, and their calls are not recorded. They must not change it, or draw from the
    global random generators if the model does.

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
        TypeError: If the model is neither a module nor a function with a dict of parameters; if the
            loss is a class or not callable, or `data` is no iterable of batches (a `Dataset` is
            none); if `params` or an option is of another type than said here.
        UnsupportedError: If the loss is no scalar (`reduction="none"`).
        ValueError: If a parameter is not the model's, or `num_data`, `num_per_example_loss_terms`
            or the weight of a loss is no positive finite number.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> data = [(torch.ones(4, 3), torch.zeros(4, 2))]
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), data)
        >>> risk.space.dim
        8
        >>> sorted(risk.gradient())
        ['bias', 'weight']
        >>> params = {"W": torch.ones(3, 2)}
        >>> linear = EmpiricalRisk(lambda p, X: X @ p["W"], nn.MSELoss(), data, params)
        >>> linear.loss(), linear.gradient()["W"].shape
        (tensor(9.), torch.Size([3, 2]))
    """

    def __init__(
        self,
        model: ModelOrFunction,
        loss: Loss,
        data: Iterable[Any],
        params: Sequence[Tensor | str] | Mapping[str, Tensor] | None = None,
        *,
        output: Callable[[Any], Any] | None = None,
        mask: Callable[[Any, Any], Tensor] | None = None,
        example_axis: Mapping[str, int] | None = None,
        batch_size_fn: Callable[[Any], int] | None = None,
        example_of_rows: Callable[[Any], Any] | None = None,
        num_data: int | None = None,
        num_per_example_loss_terms: int | None = None,
        shift_labels: bool | None = None,
        progressbar: bool = False,
        reduction: str | None = None,
        check: bool | str = True,
        weight: Callable[..., Any] | None = None,
        processes: Processes | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            model = FunctionModule(model, params)
        modules = modules_of(model)
        check_data(data)
        #: The processes that share the data; `Alone()` if there are none.
        self.processes = common_processes(model, processes)
        self.data = data
        one_of("reduction", reduction, "mean", "sum", None)
        self.losses = Losses(loss, reduction, check is not False)
        super().__init__(modules, params, self.processes)
        self.options = RiskOptions(
            output,
            mask,
            example_axes(modules, example_axis),
            batch_size_fn,
            example_of_rows,
            num_data,
            num_per_example_loss_terms,
            shift_labels,
            progressbar,
            reduction,
            check,
            weight,
        )
        self.options.require_valid(self.losses)
        #: What was found out in the first batches.
        self.checked = Checked()

    def __repr__(self) -> str:
        """Model, losses, sizes and options that are not the default; nothing is read or run."""
        losses = ", ".join(loss.title for loss in self.losses)
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{type(self).__name__}({type(self.model).__name__}, {losses}), {self.space.dim} "
            f"parameters in {len(self.params)} tensors, {dtype} on {self.device}"
        ]
        batches = known_length(self.data)
        counted = "" if batches is None else f" of {batches} batch{'es' * (batches != 1)}"
        lines.append(f"  data: {type(self.data).__name__}{counted}")
        default = RiskOptions()
        options = []
        for name, option in vars(self.options).items():
            if option not in (getattr(default, name), {}):
                options.append(f"{name}={getattr(option, '__name__', None) or shortened(option)}")
        if options:
            lines.append(f"  options: {', '.join(options)}")
        return "\n".join(lines)

    def __dir__(self) -> list[str]:
        """What users call; the package has the rest for operators."""
        return sorted({*super().__dir__()} - _FOR_OPERATORS)

    def with_data(self, data: Iterable[Any]) -> EmpiricalRisk:
        """The same model, losses, parameters and options with other data.

        Raises:
            TypeError: If `data` is no iterable of batches.
        """
        check_data(data)
        risk = copy(self)
        risk.data = data
        risk.checked = Checked(reads=self.reads)
        return risk

    @property
    def reads(self) -> FoundReads | None:
        """How functions read parameters: what was found and what was checked are shared by copies
        of the risk.
        """
        return self.checked.reads

    @reads.setter
    def reads(self, reads: FoundReads | None) -> None:
        self.checked.reads = reads

    def for_vectors(self, vectors: Vectors) -> EmpiricalRisk:
        """The risk with all that vectors need of its losses: of any loss there are gradients of
        each example.
        """
        if not vectors.of_loss or self.losses.have_likelihoods:
            return self
        risk = copy(self)
        risk.losses = self.losses.of_examples()
        return risk

    # ------------------------------------------------------------------------------------ one batch
    def batches(self, desc: str) -> Iterator[Batch]:
        """Read the data of this process once; empty batches are left out.

        Raises:
            ValueError: If there is no batch at all, and there are no other processes that may have
                some.
        """
        before = 0
        title = f"{desc} (on {self.device})"
        for index, item in enumerate(shown(self.data, title, self.options.progressbar)):
            batch = self.read(item, index, before)
            if batch.num_examples:
                yield batch if batch.first == before else replace(batch, first=before)
                before += batch.num_examples
        if not before and self.processes.world == 1:
            raise _no_examples(self.data)

    def read(self, item: Any, index: int = 0, first: int = 0) -> Batch:
        """One item of the data as a batch, with `first` examples before it; one tells whether
        labels are shifted.

        Raises:
            ValueError: If it is neither a pair nor a mapping with `labels`, its examples can't be
                counted, or `weight` gives something else than N finite numbers of at least 0.
            UnsupportedError: If the loss that the model computes from the labels is not this one,
                or its outputs depend on them.
        """
        if isinstance(item, Batch):  # was read before
            return item
        options = self.options
        unpack = isinstance(item, Mapping) and "labels" in item
        longest = 2 if options.weight is None else math.inf
        if unpack:
            X: Any = {key: value for key, value in item.items() if key != "labels"}
            y = item["labels"]
            extras: Sequence[Any] = ()
        elif isinstance(item, (tuple, list)) and 2 <= len(item) <= longest:
            X, y, *extras = item
        else:
            raise _no_batch(item, index)
        X = mapped(on_device, X, self.device)
        y = mapped(on_device, y, self.device)
        # Before examples are counted: it may take its numbers out of a mapping.
        weight = None if options.weight is None else options.weight(X, y, *extras)
        rows = read_example_of_rows(X, options.example_of_rows, self.device)
        N = count_examples(X, y, index, options.batch_size_fn, unpack, rows)
        if options.weight is not None:
            weight = checked_weight(weight, N, index, self.device)
        in_lists = are_in_lists(X, N, options.batch_size_fn)
        batch = Batch(X, y, N, unpack, first, weight, in_lists=in_lists, example_of_rows=rows)
        if unpack and options.check and options.shift_labels is None and self.checked.shift is None:
            self.checked.shift = are_labels_shifted(self.model, self.losses, options.output, batch)
        return batch

    def read_input(self, X: Any, unpack: bool) -> Batch:
        """What the model is called with as a batch whose targets are not known yet.

        A batch of which it can't be told to which examples rows belong has none, with a warning:
        others go on.

        Raises:
            ValueError: If its examples can't be counted.
            UnsupportedError: If examples have weights, which come with the targets.
        """
        if self.options.weight is not None:
            raise UnsupportedError(
                "weight= comes with the targets. Give whole batches, to `update` or `listen`."
            )
        options = self.options
        rows = read_example_of_rows(X, options.example_of_rows, self.device)
        N = count_examples(X, None, 0, options.batch_size_fn, unpack, rows)
        try:
            kinds_by_number(N, rows)
        except UnsupportedError as error:
            warn(
                f"{error} It adds nothing to the curvature.",
                CurvatureWarning,
                stacklevel=level_of_user(),
            )
            return Batch(X, None, 0, unpack)
        in_lists = are_in_lists(X, N, options.batch_size_fn)
        return Batch(X, None, N, unpack, in_lists=in_lists, example_of_rows=rows)

    def run(self, batch: Batch, model: Callable[..., Any] | None = None) -> tuple[Any, Any, Any]:
        """Forward pass: for each loss its output, its target, and its class axis if that is not the
        loss's own.
        """
        call = self.model if model is None else model
        if isinstance(call, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            call = call.module  # replicas of a layer are other objects, and reducers need not run
        X = mapped(copy_of, batch.X)  # a model may write to its input
        with self.placed() if model is None and self._elsewhere else nullcontext():
            try:
                out = call(**X) if batch.unpack else call(X)
            except (RuntimeError, TypeError) as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    advice = _why_it_failed(error, batch, self.params.values())
                    if not advice:
                        raise
                    raise type(error)(f"{error}. {advice}") from error
                with GradMode(True):  # it differentiates by itself, as forces from an energy
                    return self.run(batch, model)
        outputs, targets, class_axes = self.read_output(out, batch)
        if model is not None and not self.checked.in_modules and torch.is_grad_enabled():
            refuse_outside_reads("model", outputs, self.own_params)
            self.checked.in_modules = True
        return outputs, targets, class_axes

    def read_output(self, out: Any, batch: Batch) -> tuple[Any, Any, Any]:
        """Outputs, targets and class axes, as `run` gives them, from what the model returned for a
        batch.
        """
        outputs, class_axes = self.losses.select(out, self.options.output)
        is_shifted = self.options.shift_labels
        if is_shifted is None:
            is_shifted = self.checked.shift
        if batch.forms:  # the losses were called on these outputs and targets
            outputs = tuple(map(in_form, outputs, batch.forms))
            class_axes = (None,) * len(outputs)
            is_shifted = False
        is_graph = not torch.compiler.is_compiling() and any(f.requires_grad for f in outputs)
        if self.checked.batch_norm and is_graph:
            self.checked.batch_norm = prepare_graph(outputs, batch.num_examples)
        targets = self.losses.matched(batch.y, "target", "The batch has")
        if batch.num_examples == 1:
            fewest = [loss.fewest_axes for loss in self.losses]
            pairs = map(with_example_axis, outputs, targets, fewest)
            outputs, targets = zip(*pairs, strict=True)
        if is_shifted:
            parts = map(shifted_labels, self.losses, outputs, targets, class_axes)
            outputs, targets, class_axes = zip(*parts)
        return outputs, targets, class_axes

    def scale(self, totals: Totals, loss: int | None = None) -> float:
        """`c`: what multiplies the sum of all terms of the reference loss (the first one with the
        reduction "mean").

        Args:
            totals: Of the whole data set.
            loss: The number of another loss.

        Raises:
            ValueError: If no loss term counts at all.
        """
        options = self.options
        reduced = self.losses[self.losses.reference if loss is None else loss]
        if reduced.reduction == "sum":
            return 1.0
        count = totals.read_count(loss)
        if not count > 0:
            raise ValueError(
                f"No term of {reduced.title} counts: every target is ignored or has weight 0, so "
                "the mean over them does not exist. Leave such a loss out; skip such batches until "
                "one counts."
            )
        # How many terms were counted for each that the user says there are.
        ratio = 1.0
        if options.num_data is not None:
            ratio = totals.examples / float(options.num_data)
        if options.num_per_example_loss_terms is not None:
            ratio *= totals.terms / totals.examples / float(options.num_per_example_loss_terms)
        return ratio / count

    # --------------------------------------------------------------------------------- all the data
    def together(
        self,
        work: Callable[[], T],
        over_data: bool = True,
        same: Callable[[], Mapping[str, Any]] = dict,
    ) -> T:
        """Work by all processes, whose models and losses are the same. Collective.

        Args:
            work: What each does.
            over_data: Whether that reads the data. Else batches came one by one, in passes that may
                write buffers.
            same: Name to what else has to be the same in all, see `Processes.same`.

        Raises:
            ProcessError: In all processes, if it fails in one, or something differs.
        """
        if self.processes.world == 1:
            self.renew()
            return work()

        def agreed() -> T:
            self.renew()
            require_replicas(self, over_data, same)
            return work()

        return self.processes.together(agreed)

    @untraced
    def loss(self) -> Tensor:
        """The loss over all data, a 0-d tensor; of a class that `register_likelihood` knows it is
        that of its distribution, with the constants. Cost: one forward pass. Collective.
        """
        with preserve_state(self.model, self.data):
            return self.value(self.together(partial(loss_pass, self)))

    def gradient(self) -> dict[str, Tensor]:
        """Gradient of the loss over all data: key to tensor. Cost: one forward and one backward
        pass. Collective.

        Of several losses with the reduction "mean": one more forward pass, which counts terms.
        """
        return self.gradient_and_loss()[0]

    @untraced
    def gradient_and_loss(self) -> tuple[dict[str, Tensor], Tensor]:
        """Gradient and loss over all data in one pass; nothing is written to `.grad`.
        Collective.
        """
        with preserve_state(self.model, self.data):
            sums, totals = self.together(partial(gradient_pass, self))
        c = self.scale(totals)
        return {key: g * c for key, g in sums.items()}, self.value(totals)

    def value(self, totals: Totals) -> Tensor:
        """The loss of the data that the totals are of."""
        terms = [
            loss.weight * self.scale(totals, k) * totals.losses[k]
            for k, loss in enumerate(self.losses)
        ]
        value = sum(terms)
        return torch.as_tensor(value, dtype=self.dtype, device=self.device)


@dataclass
class Checked:
    """What was found out about a risk once, in the first batches.

    Attributes:
        in_modules: Whether the model was seen to read its parameters in its modules.
        kinds: What was called in batches that were compared with plain autograd, where no gradient
            was zero.
        batches: How many batches there were.
        warnings: Messages that were given, each once.
        shift: Whether labels are shifted; None as long as no model with a loss of its own told.
        reads: How functions read parameters, outside of modules with rules; None before they were
            looked for.
        batch_norm: Whether batch norm may be in the graphs of outputs.
        modes: Modes of all modules, training or not, in which two evaluations agreed.
        errors: Layer name to the relative difference that was last seen.
        compared: Names of the layers of which a gradient was compared that was more than rounding.
        changing: Names of modules that were seen to compute something else in each call, as by a
            counter.
    """

    in_modules: bool = False
    kinds: set[Any] = field(default_factory=set)
    batches: int = 0
    warnings: set[str] = field(default_factory=set)
    reads: FoundReads | None = None
    shift: bool | None = None
    batch_norm: bool = True
    modes: set[tuple[bool, ...]] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)


def _no_examples(data: Any) -> ValueError:
    """The error about data without any example."""
    advice = "Is the dataset empty, or shorter than a batch, with drop_last=True?"
    if isinstance(data, Iterator):
        advice = "It is an iterator, which can be read only once: pass a list or a DataLoader."
    elif isinstance(data, (list, tuple)):
        advice = (
            "Give some where the risk is made, EmpiricalRisk(model, loss, data), or where a state "
            "is loaded, BlockwiseLinearOperator.from_state_dict(state, model, data)."
        )
    return ValueError(f"`data` has no examples. {advice}")


def _why_it_failed(error: Exception, batch: Batch, params: Iterable[Tensor]) -> str:
    """What to do about a model that raised one of Python's errors on a batch, "" if nobody
    knows.
    """
    if type(error) is TypeError:
        if not batch.unpack or "unexpected keyword" not in str(error):
            return ""
        key = next(iter(batch.X), "x")
        return (
            "A batch that is a mapping with 'labels' is given to the model as keywords. If it "
            f"takes one input, make pairs, (batch[{key!r}], batch['labels'])."
        )
    given = {t.dtype for t in tensors_of(batch.X) if t.is_floating_point()}
    expected = {p.dtype for p in params}
    is_about_types = type(error) is RuntimeError and "type" in str(error)
    if not is_about_types or given & expected or len(given) != 1 or len(expected) != 1:
        return ""
    (came,) = given
    (dtype,) = expected
    return (
        f"The input of the batch is {came}, the parameters are {dtype}: convert one of them, "
        f"X.to({dtype}) or model.to({came})."
    )


def _no_batch(item: Any, index: int) -> ValueError:
    """The error about an item of the data that is no batch."""
    came = type(item).__name__
    advice = "Without targets, as of an autoencoder, a batch is (X, X)."
    if isinstance(item, (tuple, list)):
        came = f"{came} of length {len(item)}"
        if len(item) != 1:
            advice = (
                "Targets of several losses stand together, (X, (y1, y2)); weights of examples take "
                "EmpiricalRisk(..., weight=lambda X, y, w: w); what else there is has to be left "
                "out."
            )
    elif isinstance(item, Mapping):
        came = f"mapping with keys {list(item)}"
        advice = "Of other mappings take a pair, (batch['image'], batch['class'])."
    return ValueError(
        f"Batch {index} is a {came}; expected a pair (X, y) or a mapping with 'labels'. For one "
        f"batch, write data=[(X, y)]. {advice} Make pairs in the "
        "`collate_fn` of the loader, or a list of them, [(X, y) for X, y, *_ in loader]."
    )


def takes_risk(function: Callable[Inputs, T]) -> Callable[Inputs, T]:
    """A function, or a constructor, whose first argument is a risk: refuses anything else with what
    to write.

    The arguments are checked before Python counts them, because who forgets the risk gives model,
    loss and data.
    """
    constructor = function.__name__ == "__init__"
    missing = object()  # then Python says so

    @wraps(function)
    def checked(*args: Inputs.args, **kwargs: Inputs.kwargs) -> T:
        risk = args[constructor] if len(args) > constructor else kwargs.get("risk", missing)
        if risk is not missing and not isinstance(risk, EmpiricalRisk):
            owner = type(args[0]).__name__ if constructor else function.__name__
            raise TypeError(
                f"{owner} takes an EmpiricalRisk, got a {type(risk).__name__}: make one of model, "
                "loss and data first, EmpiricalRisk(model, loss, data)."
            )
        return function(*args, **kwargs)

    return checked
