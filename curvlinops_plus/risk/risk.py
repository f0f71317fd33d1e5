"""Model + loss + data as one noun, and the loop that sends vectors back through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import cached_property
from itertools import islice
from numbers import Real
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.likelihood import Likelihood, has_likelihood, likelihood_of
from curvlinops_plus.linalg import Space
from curvlinops_plus.risk.first_order import count_terms, first_nonfinite, one_pass, settled
from curvlinops_plus.risk.layers import Layer, example_axes, find_layers, named_params
from curvlinops_plus.risk.losses import Heads, Round
from curvlinops_plus.risk.preserve import untouched
from curvlinops_plus.risk.reading import Batch, check_data, naming_dtypes, read_batch, scalar_loss, select_output
from curvlinops_plus.risk.record import Consumer, Recorder
from curvlinops_plus.risk.totals import Shares, Totals
from curvlinops_plus.risk.vectors import Draws, Exact, Vectors

__all__ = ["EmpiricalRisk"]

T = TypeVar("T")


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
            included.
            Default: all that require a gradient.
        output: Picks the tensor that the loss reads out of what the model returns, or the dict or tuple of tensors that
            several losses read. An output with `.logits` needs none.
        mask: `mask(X, y)` gives [N, T] bool; positions that are False leave the statistics of layers with T positions.
        example_axis: Module name or glob to the axis that carries the examples, where it is not the first.
        batch_size_fn: Number of examples of an input that is no tensor.
        num_data: Replaces the number of examples seen in `c`.
        num_per_example_loss_terms: Replaces the number of loss terms per example seen in `c`.
        shift_labels: Language models: the output at position t is compared with the label at t + 1.
        progressbar: Show a bar on every loop over the data.
        reduction: For losses without a likelihood (Hessian and GGN take any): "mean" weighs batches by their numbers of
            examples, "sum" adds them up. Default: the loss's own attribute ("batchmean" is "mean"), else "mean".

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
        loss: nn.Module | Mapping[Any, Any] | Sequence[Any],
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
        _check_number("num_data", num_data, "examples")
        _check_number("num_per_example_loss_terms", num_per_example_loss_terms, "loss terms per example")
        self.heads = Heads(loss, reduction) if isinstance(loss, (Mapping, tuple, list)) else None
        for one in [loss] if self.heads is None else [head.loss for head in self.heads]:
            _check_loss(one)
        self.model, self.data = model, data
        self.loss_func: Any = loss if self.heads is None else self.heads.losses
        self.params, self.given_params = named_params(model, params)
        self.listed = not isinstance(params, Mapping)
        self.space = Space.of(self.params)
        self.output, self.mask, self.batch_size_fn = output, mask, batch_size_fn
        self.num_data, self.num_per_example_loss_terms = num_data, num_per_example_loss_terms
        self.shift_labels, self.progressbar, self._reduction = shift_labels, progressbar, reduction
        own = getattr(loss, "reduction", reduction)
        if reduction is not None and own != reduction:
            raise ValueError(
                f"reduction={reduction!r} contradicts the loss, which has reduction={own!r}. The argument is for "
                f"losses without that attribute; leave it out, or make the loss with the other reduction."
            )
        if self.heads is not None and (shift_labels or num_per_example_loss_terms is not None):
            name = "shift_labels" if shift_labels else "num_per_example_loss_terms"
            raise UnsupportedError(
                f"{name} is about one loss, and there are losses for the outputs {self.heads.keys}. "
                + (
                    "Shift output and target yourself, in `output=` and in the data."
                    if shift_labels
                    else "Leave it out."
                )
            )
        # Of several losses: shares in force, shares of a stream, totals of a set of sweeps and of the last other pass.
        self._shares: Shares | None = None
        self._stream = None if self.heads is None else Shares(self.heads, num_data)
        self._counted: list[Totals] | None = None
        self.remembered: Totals | None = None
        self._axes = example_axes(model, example_axis)
        self._announced = self._examples_checked = False
        self._rows_checked: set[str] = set()
        devices, dtypes = {p.device for p in self.params.values()}, {p.dtype for p in self.params.values()}
        if len(devices) != 1:
            raise ValueError(
                f"The parameters live on several devices, {sorted(map(str, devices))}; one operator needs them on one."
            )
        if not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(
                f"The parameters have dtypes {sorted(map(str, dtypes))}; only real floating-point parameters have "
                "a curvature here."
            )
        self.device = devices.pop()
        self.dtype = torch.float32
        for dtype in dtypes:
            self.dtype = torch.promote_types(self.dtype, dtype)
        if dtypes == {torch.float64}:
            self.dtype = torch.float64

    # ------------------------------------------------------------------------------------------------------- facts
    @cached_property
    def likelihood(self) -> Likelihood:
        """The loss as a negative log-likelihood; of several losses, what they have in common (see `heads`).

        Raises:
            UnsupportedError: If the loss, or one of its options, has none.
        """
        if self.heads is None:
            return likelihood_of(self.loss_func)
        _ = [head.likelihood for head in self.heads]
        return self.heads

    @cached_property
    def known_loss(self) -> bool:
        """Whether the loss has a likelihood."""
        return has_likelihood(self.loss_func) if self.heads is None else self.heads.known

    @property
    def reduction(self) -> str:
        """ "mean" or "sum".

        Raises:
            UnsupportedError: For "none" and others: no scalar loss has no curvature.
        """
        if self.heads is not None:
            return self.heads.reduction
        if self.known_loss:
            return self.likelihood.reduction
        reduction = self._reduction or getattr(self.loss_func, "reduction", "mean")
        if reduction == "batchmean":  # nn.KLDivLoss: the sum over the batch, divided by the number of its examples
            return "mean"
        if reduction not in ("mean", "sum"):
            name = getattr(type(self.loss_func), "__name__", "the loss")
            raise UnsupportedError(
                f'{name}(reduction={reduction!r}) is no scalar loss, so it has no curvature; use "mean" or "sum".'
            )
        return reduction

    @property
    def one_shot(self) -> bool:
        """Whether the data can be read only once."""
        return isinstance(self.data, Iterator)

    @property
    def one_batch(self) -> bool:
        """Whether the data are known to be one batch."""
        return isinstance(self.data, Sequence) and len(self.data) == 1

    def with_data(self, data: Iterable[Any]) -> EmpiricalRisk:
        """The same model, loss, parameters and options with other data.

        Raises:
            TypeError: If `data` is no iterable of batches.
        """
        check_data(data)
        other = copy(self)
        other.data, other.remembered = data, None
        other._stream = None if self.heads is None else Shares(self.heads, self.num_data)
        return other

    def layers(self, separate_weight_and_bias: bool = False) -> list[Layer]:
        """The layers that hold the parameters."""
        return find_layers(self.model, self.params, separate_weight_and_bias)

    def scale(self, totals: Totals) -> Tensor | float:
        """`c`: what multiplies the sum of all loss terms; of several losses, of those of the first mean.

        Raises:
            ValueError: If no loss term counts at all.
        """
        if self.reduction == "sum":
            return 1.0
        count = totals.loss_count
        if not float(count) > 0:
            raise ValueError(
                "No loss term counts: every target is ignored or has weight 0, so the mean over them does not exist."
            )
        terms = (
            totals.terms / totals.examples
            if self.num_per_example_loss_terms is None
            else self.num_per_example_loss_terms
        )
        given = (totals.examples if self.num_data is None else self.num_data) * terms
        return (totals.terms / given) / count

    # ------------------------------------------------------------------------------------------------------- loops
    def batches(self, desc: str) -> Iterator[Batch]:
        """Read the data once; empty batches are left out.

        Raises:
            ValueError: If there is no batch at all.
        """
        found = False
        bar = tqdm(self.data, desc=f"{desc} (on {self.device})") if self.progressbar else nullcontext(self.data)
        with bar as items:
            for index, item in enumerate(items):
                batch = read_batch(item, index, self.device, self.batch_size_fn)
                if batch.num_examples:
                    found = True
                    yield batch
        if not found:
            again = (
                " It is an iterator, which can be read only once: pass a list or a DataLoader." if self.one_shot else ""
            )
            raise ValueError(f"`data` has no examples.{again}")

    def run(self, batch: Batch, model: Callable[..., Any] | None = None) -> tuple[Any, Any, Any]:
        """Forward pass: output and target that the loss reads, and the class axis if it is not the loss's own.

        For several losses each of the three is a tuple.
        """
        call = self.model if model is None else model
        if isinstance(call, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            call = call.module  # replicas of a layer are other objects, and reducers need not run
        with naming_dtypes(batch, self.params):
            out = call(**batch.X) if batch.unpack else call(batch.X)
        return self.read_output(out, batch)

    def read_output(self, out: Any, batch: Batch) -> tuple[Any, Any, Any]:
        """What the model returned for a batch, as `run` gives it."""
        if self.heads is not None:
            fs, class_axes = self.heads.select(out, self.output)
            return fs, self.heads.targets(batch.y), class_axes
        f, last = select_output(out, self.output)
        y = batch.y
        if self.shift_labels:
            f, y = f[:, :-1], y[:, 1:]
        return f, y, -1 if last and f.ndim > 2 else None

    def canonical(self, f: Tensor, y: Tensor, batch: Batch, class_axis: int | None) -> tuple[Tensor, Tensor]:
        """Outputs [N, R, C] and targets of one batch."""
        if self.heads is None and isinstance(y, Tensor) and y.dtype != f.dtype and y.is_floating_point():
            y = y.to(f.dtype)
        return self.likelihood.canonical(f, y, batch.num_examples, class_axis)

    def terms(self, f: Any, y: Any, batch: Batch, class_axis: Any) -> tuple[Any, Any, Totals]:
        """Outputs and targets as the loss's rules want them, and the totals of the batch; `totals.loss` has a graph.

        A loss without a likelihood is taken as it is: its value for the batch counts as that of N terms.
        """
        if self.heads is not None:
            return self.heads.terms(f, y, batch, class_axis)
        N = batch.num_examples
        if self.known_loss:
            F, Y = self.canonical(f, y, batch, class_axis)
            loss, count = self.likelihood.nll(F, Y).sum(), self.likelihood.count(F, Y)
            return F, Y, Totals(N, N * F.shape[1], count, loss)
        mean = self.reduction == "mean"
        loss = scalar_loss(self.loss_func(f, y), f, self.loss_func)
        return f, y, Totals(N, N, float(N), loss * (N if mean else 1))

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Context that restores random state, buffers and generators when it ends.

        All sweeps in here are taken to see the same data: what several losses are divided by is counted once.
        """
        before, self._counted = self._counted, []
        try:
            with untouched(self.model, self.data):
                yield
        finally:
            self._counted = before

    # ---------------------------------------------------------------------------------------------- several losses
    def shares(self, part: Totals) -> tuple[float, ...]:
        """Of several losses: their shares (see `heads.py`) in a batch with these totals.

        Raises:
            UnevenError: If they are not those of the batches before, and nobody knows the whole data set.
        """
        shares = self._shares or self._stream
        assert shares is not None
        return shares.of(part)

    def objective(self, part: Totals) -> Tensor:
        """What the loss of a data set is the sum of over batches, up to `scale`; it has a graph."""
        loss = part.loss if self.heads is None else sum(s * loss for s, loss in zip(self.shares(part), part.losses))
        assert isinstance(loss, Tensor)
        return loss

    @contextmanager
    def sharing(self, shares: Shares | None) -> Iterator[None]:
        """In here several losses have these shares; None for those of a stream."""
        before, self._shares = self._shares, shares
        try:
            yield
        finally:
            self._shares = before

    def _shares_of_sweep(self, vectors: Vectors) -> Shares | None:
        """What a sweep multiplies several losses with. A sweep can't begin again, so terms are counted before."""
        heads = self.heads
        if heads is None:
            return None
        if heads.constant or self.one_shot or self.one_batch or not vectors.backward:
            return Shares(heads, self.num_data, single=self.one_batch)
        counted = [] if self._counted is None else self._counted
        if not counted:
            counted.append(count_terms(self))
        return Shares(heads, self.num_data, counted[0])

    def sweep(
        self,
        layers: Sequence[Layer],
        vectors: Vectors,
        consume: Consumer,
        after_batch: Callable[[Totals], None] | None = None,
        desc: str = "sweep",
    ) -> Totals:
        """Read the data once and show every layer's batches to `consume`.

        Args:
            layers: The layers to record.
            vectors: What is sent back.
            consume: Called with a `LayerBatch`, once per layer and piece of vectors.
            after_batch: Called with the totals of each batch when all of it was consumed.
            desc: Text of the progress bar.

        Returns:
            The totals over all batches.

        Cost: one forward pass, and one backward pass per vector to the layers' outputs only. With several losses, of
        which at least one has the reduction "mean", one more forward pass counts their terms, once for all sweeps of
        an operator; not if the data are one batch, or an iterator.
        """
        totals, draws = Totals(), Draws(0 if vectors.seed is None else vectors.seed)
        shares = self._shares_of_sweep(vectors)
        with self.sharing(shares), self.recorder(layers, vectors) as recorder:
            for batch in self.batches(desc):
                part = self.observe(recorder, batch, vectors, draws, consume)
                totals.add(part)
                if after_batch is not None:
                    after_batch(part)
        if shares is not None and vectors.backward and not shares.fit(totals):
            raise ValueError(shares.changing())
        return totals

    @contextmanager
    def recorder(self, layers: Sequence[Layer], vectors: Vectors, ours: bool = True) -> Iterator[Recorder]:
        """Hooks on the modules of `layers`, for as long as the context lasts.

        Args:
            layers: The layers.
            vectors: What will be sent back.
            ours: Whether the forward pass is ours alone: without vectors it needs no graph then.
        """
        grad_mode = torch.enable_grad if vectors.backward or not ours else torch.no_grad
        # Fused inference of transformers calls no submodule, so that no hook would fire.
        fused = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
        intercept = any(isinstance(module, fused) for module in self.model.modules())
        recorder = Recorder(layers, self.axis_of, vectors.backward, intercept)
        with torch.inference_mode(False), grad_mode(), recorder:
            yield recorder

    def observe(self, recorder: Recorder, batch: Batch, vectors: Vectors, draws: Draws, consume: Consumer) -> Totals:
        """Run the model on one batch, send vectors back, and show what every layer saw to `consume`."""
        random = torch.get_rng_state()
        # Hooks of a compiled model that ran before never fire; running eagerly leaves nothing behind.
        with torch.compiler.set_stance("force_eager"), recorder.recording(batch.num_examples):
            f, y, class_axis = self.run(batch)
        if new := recorder.expanded - self._rows_checked:
            self.check_rows(recorder, batch, f, random)
            self._rows_checked |= new
        return self.send(recorder, batch, (f, y, class_axis), vectors, draws, consume)

    def send(
        self,
        recorder: Recorder,
        batch: Batch,
        outputs: tuple[Any, Any, Any],
        vectors: Vectors,
        draws: Draws,
        consume: Consumer,
        keep: bool = False,
    ) -> Totals:
        """Send vectors back from what `run` returned in a recorded forward pass.

        Args:
            recorder: Which recorded it.
            batch: The batch.
            outputs: Output, target and class axis, as `run` returns them.
            vectors: What is sent back.
            draws: Random numbers for them.
            consume: Called with a `LayerBatch`, once per layer and piece of vectors.
            keep: Keep the graph: somebody else goes back through it afterwards.

        Returns:
            The totals of the batch.
        """
        f, y, class_axis = outputs
        N = batch.num_examples
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            F, Y, part = self.terms(f.detach(), y, batch, class_axis)
        mask = None if self.mask is None else self._read_mask(batch)

        def quietly(seen: Any) -> None:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                consume(seen)

        part.called = recorder.called
        if not vectors.backward:
            recorder.inputs_only(quietly, mask=mask)
            part.reached = recorder.called
            return part
        if self.heads is None:
            number, restore = vectors.count(self.likelihood, F), self.likelihood.restore
            sent = (
                [restore(v, f.shape, N, class_axis).to(f.dtype)] for v in vectors.send(self.likelihood, F, Y, draws)
            )
            rounds = [Round([f] if f.requires_grad else [], number, sent, F.shape[1])]
        else:
            part.shares = self.shares(part)
            rounds = self.heads.rounds(vectors, f, list(zip(F, Y, class_axis, strict=True)), draws, part.shares)
        self._announce(vectors, rounds)
        rounds = [turn for turn in rounds if turn.outputs]
        if not rounds:
            return part  # no tracked layer reaches the output in this batch
        if N > 1 and not self._examples_checked:
            self._check_examples(recorder, [f] if self.heads is None else [t for t in f if t.requires_grad], N)
            self._examples_checked = True
        for index, turn in enumerate(rounds):
            more = index < len(rounds) - 1
            part.reached |= self._send_back(recorder, turn, quietly, index == 0, keep or more, mask)
        return part

    def _send_back(
        self, recorder: Recorder, turn: Round, consume: Consumer, begin: bool, keep: bool, mask: Tensor | None
    ) -> set[int]:
        """Send vectors in pieces of the best size; which layers they reached."""
        per_chunk = self._vectors_at_once(recorder, turn.number)
        if per_chunk == 1:
            return recorder.send(turn.outputs, turn.sent, consume, begin=begin, keep=keep, mask=mask)
        reached: set[int] = set()
        for first, chunk in _chunks(turn.sent, per_chunk):
            stacked = [torch.stack(parts) for parts in zip(*chunk, strict=True)]
            reached |= recorder.send_batched(turn.outputs, stacked, first and begin, consume, mask=mask)
        return reached

    def _check_examples(self, recorder: Recorder, fs: Sequence[Tensor], N: int) -> None:
        """Do the rows that layers see belong to the examples that they are taken for?"""
        kind = nn.modules.batchnorm._BatchNorm
        mixing = [name for name, m in self.model.named_modules() if isinstance(m, kind) and m.training]
        if not mixing:
            return recorder.check_examples(fs, [_only(f, N - 1, N) for f in fs], N - 1)
        warn(
            f"{mixing} are batch norm in training mode: the examples of a batch depend on each other, and what layers "
            f"before them contribute through the batch's statistics is left out. Call model.eval() first.",
            CurvatureWarning,
            stacklevel=2,
        )

    def check_rows(self, recorder: Recorder, batch: Batch, f: Any, random: Tensor) -> None:
        """One row for all examples was expanded to a row for each: is the model still the same function?"""
        N = batch.num_examples
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            torch.set_rng_state(random)
            plain, _, _ = recorder.plainly(lambda: self.run(batch))
        for output, without in [(f, plain)] if self.heads is None else zip(f, plain):
            vectors = [(n, _only(output, n, N)) for n in (0, N - 1)]
            recorder.check_rows(output, without.detach(), vectors)

    def _announce(self, vectors: Vectors, rounds: Sequence[Round]) -> None:
        """Say once what exact vectors cost when there are several loss terms per example."""
        if not isinstance(vectors, Exact) or vectors.signs or self._announced:
            return
        for turn in rounds:
            if turn.terms > 1:
                self._announced = True
                warn(
                    f"Exact() sends {turn.number} vectors per batch{turn.where}: {turn.terms} loss terms per example, "
                    f"each by itself, times {turn.number // turn.terms} columns. Exact(signs=True) or MonteCarlo() "
                    "take fewer passes.",
                    CurvatureWarning,
                    stacklevel=2,
                )
                return

    def _vectors_at_once(self, recorder: Recorder, number: int) -> int:
        """How many vectors to send in one vectorised pass: 1 streams, which is faster for large batches on the CPU."""
        if number == 1:
            return 1
        limit = 2**26 if self.device.type == "cuda" else 2**14
        return max(1, min(number, limit // max(recorder.output_numel, 1)))

    def axis_of(self, name: str) -> int:
        """The axis of a module's inputs and outputs that carries the examples."""
        return self._axes.get(name, 0)

    def _read_mask(self, batch: Batch) -> Tensor:
        assert self.mask is not None
        mask = self.mask(batch.X, batch.y)
        if (
            not isinstance(mask, Tensor)
            or mask.dtype != torch.bool
            or mask.ndim != 2
            or mask.shape[0] != batch.num_examples
        ):
            what = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"`mask` returned {what}; expected a bool tensor [{batch.num_examples}, T], True where a position "
                "counts."
            )
        return mask.to(self.device)

    # -------------------------------------------------------------------------------------------------- first order
    def loss(self) -> Tensor:
        """The loss over all data, a 0-d tensor. Cost: one forward pass."""
        with self.untouched():
            _, totals = one_pass(self, gradient=False)
        return self._value(totals)

    def gradient(self) -> dict[str, Tensor]:
        """Gradient of the loss over all data: key to tensor. Cost: one forward and one backward pass.

        Several means over numbers of terms that are not in the same proportion in all batches: up to two more passes.
        """
        return self.gradient_and_loss()[0]

    def gradient_and_loss(self) -> tuple[dict[str, Tensor], Tensor]:
        """Gradient and loss over all data in one pass; nothing is written to `.grad`."""
        with self.untouched():
            grads, totals = settled(self, lambda: one_pass(self, gradient=True))
        c = self.scale(totals)
        return {key: g * c for key, g in grads.items()}, self._value(totals)

    def _value(self, totals: Totals) -> Tensor:
        """The loss of the data that the totals are of."""
        if self.heads is None:
            return torch.as_tensor(totals.loss * self.scale(totals)).to(self.dtype)
        factors = zip(self.heads, self.heads.scales(totals, self.num_data), totals.losses)
        return torch.as_tensor(sum(head.weight * c * loss for head, c, loss in factors)).to(self.dtype)

    def at(self, values: Mapping[str, Tensor], function: Callable[[nn.Module], T]) -> T:
        """`function(model)` at other values of the parameters (keys as in `params`); the model is as before afterwards.

        Everything that runs the model must happen inside, backward passes too: activation checkpointing runs it again.
        """
        replaced = {slot: values[key] for slot, key in self._slots.items()}
        return functional_call(_Inside(self.model, function), replaced, (), tie_weights=False)

    @cached_property
    def _slots(self) -> dict[str, str]:
        """Every place that holds a parameter, once, to its key: a module may have two names, a parameter two modules.

        Found before the first call of `at`, because these calls may be nested.
        """
        keys = {id(p): key for key, p in self.params.items()}
        return {
            f"model.{name}.{local}" if name else f"model.{local}": keys[id(p)]
            for name, module in self.model.named_modules()
            for local, p in module._parameters.items()
            if id(p) in keys
        }

    def first_nonfinite(self) -> str | None:
        """Where NaN or inf first appears in a forward pass: words naming layer and batch, None if nowhere."""
        return first_nonfinite(self)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type):
        raise TypeError(f"The loss is the class {loss.__name__}; expected an instance. Call it: {loss.__name__}(...).")
    if not callable(loss) and not isinstance(loss, Likelihood):
        came = repr(loss) if isinstance(loss, (str, int, float)) else f"a {type(loss).__name__}"
        raise TypeError(
            f"The loss is {came}; expected one as nn.MSELoss() or nn.CrossEntropyLoss(), a function of output and "
            "target that returns a 0-d tensor, or a dict or tuple of losses for a model with several outputs."
        )


def _check_number(name: str, number: Any, what: str) -> None:
    if number is None:
        return
    if not isinstance(number, Real) or isinstance(number, bool):
        raise TypeError(f"{name} is a {type(number).__name__}; expected the number of {what}, or None to count them.")
    if not 0 < float(number) < float("inf"):
        raise ValueError(f"{name}={number} must be positive: it is the number of {what}. None counts them.")


def _only(f: Tensor, n: int, N: int) -> Tensor:
    """A vector of the output's shape that is zero for all examples but one."""
    v = torch.zeros_like(f)
    piece = v.unflatten(0, (N, -1))[n]
    piece.copy_(torch.linspace(1, 2, piece.numel(), device=f.device).view_as(piece))
    return v


class _Inside(nn.Module):
    """Calls a function with a model whose parameters are replaced."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self) -> Any:
        return self.function(self.model)


def _chunks(items: Iterator[T], size: int) -> Iterator[tuple[bool, list[T]]]:
    """(is first, piece of at most `size` items)."""
    first = True
    while piece := list(islice(items, size)):
        yield first, piece
        first = False
