"""Curvature that is updated batch by batch, inside a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor

from curvlinops_plus.blocks.accumulation import refuse_unread
from curvlinops_plus.blocks.batch_pass import BatchPass, PassStart, Show
from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator
from curvlinops_plus.blocks.estimator_processes import add_to_step, sums_of_batch, together
from curvlinops_plus.blocks.estimator_state import read_estimator, with_layers, write_estimator
from curvlinops_plus.blocks.fingerprint import fingerprint
from curvlinops_plus.blocks.heard_pass import HeardBatch, HeardPass, listen
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.over_processes import decompose_factors
from curvlinops_plus.blocks.plan import plan_table
from curvlinops_plus.blocks.running_sums import RunningSums
from curvlinops_plus.blocks.step import Step
from curvlinops_plus.blocks.stored_options import plain, same_data
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.compared import described
from curvlinops_plus.risk import Draws, EmpiricalRisk, Layer, Totals, Vectors
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.losses import LossWeights
from curvlinops_plus.risk.record import OutsideReads
from curvlinops_plus.risk.risk import made_together


class CurvatureEstimator:
    """A running estimate of a risk's block-diagonal curvature that takes one batch at a time.

    Statistics are sums, so batches add up to the data set that they make: after a pass over the data, `operator` is
    what `curvature(risk, ...)` computes from it (at fixed parameters; and except for EKFAC, see below). With `decay`
    ρ < 1 they are exponential moving averages with normalised weights, `Σ_k ρ^{t-k} n_k x_k / Σ_k ρ^{t-k} n_k`, where
    `x_k` is the mean over the `n_k` examples (or loss terms) of batch k: the first update returns the statistic itself,
    and no bias needs correcting. A layer's average is over the steps that have called it; others leave it as it is.

    EKFAC needs eigenvectors before it can sum eigenvalues. It takes those of its first batch, which is sent twice;
    later eigenvalues are summed in this basis until `refresh`, which computes the eigenvectors of the current factors
    and transforms the eigenvalues: they become the diagonal of the old block in the new basis. Approximations that
    need several sweeps over the same data are refused.

    The inverse belongs to the statistics of the last `refresh`, and to the damping given there. It does not change in
    between, whatever is added.

    With `reduction="sum"` batches are matrices of which the average is taken. A batch that is added with `decay=1`
    belongs to the one before it, like one more micro-batch of the same step: these add up.

    Args:
        risk: Model, loss and options. Its `data` is only looked at for functions that read parameters; `()` is fine.
        approximation: As for `curvature`.
        default: As for `curvature`.
        vectors: As for `curvature`; random ones draw new numbers for every batch.
        separate_weight_and_bias: Give every parameter its own block.
        decay: ρ, in (0, 1]. With `reduction="sum"`, 1 adds batches up, and less averages them.
        damping: Of the inverse; anything that `K.inverse(damping)` takes.
        leave_out_uncalled: Layers that no batch has called yet are left out: `operator` and `inverse()` have the
            parameters of the others, and `uncalled` lists them. By default both refuse.

    Raises:
        ValueError: If `decay` is not in (0, 1].

    Cost: `update` is a forward pass and a backward pass per vector to the layers' outputs; `listen` saves the forward
    pass. Memory: the statistics, up to three times while a batch is added, whatever the number of updates.

    Source: moving averages and half-fresh inverses as in Martens & Grosse 2015, sections 5 and 8; George et al. 2018,
    section 3.2 (EKFAC with running averages).

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.MSELoss()
        >>> estimator = CurvatureEstimator(EmpiricalRisk(model, loss, ()), decay=0.95, damping=1e-3)
        >>> for step in range(4):
        ...     X, y = torch.rand(8, 3), torch.rand(8, 2)
        ...     with estimator.listen((X, y)):
        ...         value = loss(model(X), y)
        ...     value.backward()
        ...     if step % 2 == 0:
        ...         estimator.refresh()
        >>> direction = estimator.inverse() @ [p.grad for p in model.parameters()]
        >>> [list(d.shape) for d in direction], estimator.updates
        ([[2, 3], [2]], 4)
    """

    @made_together
    def __init__(
        self,
        risk: EmpiricalRisk,
        approximation: Any = KFAC,
        *,
        default: Any = KFAC,
        vectors: Vectors | str | None = None,
        separate_weight_and_bias: bool = False,
        decay: float = 1.0,
        damping: Any = 0.0,
        leave_out_uncalled: bool = False,
    ) -> None:
        _check_decay(decay)
        self.decay, self.damping, self.leave_out_uncalled = decay, damping, leave_out_uncalled
        options = {"default": default, "separate_weight_and_bias": separate_weight_and_bias}
        self._blank = BlockwiseLinearOperator(risk, approximation, vectors=vectors, compute=False, **options)
        self.risk, self.vectors = self._blank.risk, self._blank.vectors
        self.reset()

    #: The layers with their approximations. How functions read parameters is known after the first batch.
    plan = property(lambda self: self._blank.plan)

    def reset(self) -> None:
        """Forget everything, and start the random numbers anew."""
        self._sums = RunningSums.of_plan(self.plan, self._scale)
        #: The number of the step, and of examples of this process in it, which random numbers depend on.
        self._drawn: tuple[int, int] = 0, 0
        #: The step that batches are added to.
        self.step = Step()
        #: Relative weights of several losses, which each batch of a stream has to tell.
        self._weights = LossWeights(self.risk.losses, self.risk.options.num_data)
        self._snapshot: BlockwiseLinearOperator | None = None
        self._inverse: LinearOperator | None = None
        #: The number of updates, of examples in them, and the sum of their weights.
        self.updates, self.examples, self.weight = 0, 0, 0.0
        self.begun = 0.0  # the sum of weights of steps: with `decay=1` an update continues the one before

    def _scale(self, totals: Totals) -> Tensor | float:
        c = self.risk.scale(totals)
        return c / totals.steps if self.risk.losses.reduction == "sum" and totals.steps else c

    # ------------------------------------------------------------------------------------------------------ updating
    def update(self, batch: Any, decay: float | None = None) -> None:
        """Add one batch, with a separate forward pass that leaves the model, its buffers and random state unchanged.
        The statistics of batch norm in training mode are taken as constants.

        Args:
            batch: An item of the risk's data: `(X, y)`, or a mapping with "labels".
            decay: For this update, instead of the estimator's. With 1 during the first steps these weigh alike, and
                micro-batches after the first one of a step count as one batch with it.

        Raises:
            ValueError: If the batch can't be read, or has no examples, which some of several processes may lack.
            NumericsError: If one of its statistics is NaN or infinite; names layer and statistic. Nothing has changed
                then.
        """
        _update(self, self._read(batch), PassStart.now(), partial(self._add, decay=decay))

    @contextmanager
    def listen(self, batch: Any, decay: float | None = None) -> Iterator[None]:
        """Add one batch from the forward pass that happens inside: call the model once, and go backward afterwards.

        Vectors are sent through the model's own graph when the context ends, which stays for your backward pass.
        Nothing is added if the block raises. Where your pass can't be recorded as it is (position tables of one row),
        and with an embedding with `scale_grad_by_freq` (which divides gradients by how often the batch has a row: they
        are no derivatives then, and curvature is that without it), another pass is made, from the random state of
        yours.

        Args:
            batch: What the model is called with, and the targets: `(X, y)`, or a mapping with "labels".
            decay: As for `update`.

        Raises:
            ValueError: If the model was not called exactly once, or its graph is gone.
            NumericsError: As for `update`.
            UnsupportedError: If a pass of its own has another output.

        Cost: a backward pass per vector; a forward pass where another one is made.
        """
        self.risk.require_own_values("`listen`")
        found, add = self._read(batch), partial(self._add, decay=decay)
        start = PassStart.now() if self.risk.whole or not found.num_examples else None
        with nullcontext() if start else listen(self._pass(found), add, partial(_update, self)):
            yield
        if start:  # the layers have other tensors in the user's pass, which come and go; or there are no examples
            _update(self, found, start, add)

    def begin(self, X: Any, unpack: bool = False, watch: bool = True) -> HeardBatch:
        """Begin to watch a call of the model whose targets come later: what `listen` does in one block.

        Then follow `end(output)` of what is returned here, and `add(y)`, or `close()`.

        Args:
            X: What the model is about to be called with; its examples are counted.
            unpack: Whether it will be called as `model(**X)`.
            watch: Refuse outputs of other calls than one of the risk's model on X, as of a copy of it, which hooks on
                the model tell. A hook of the model that calls `begin` itself knows that, and says False.
        """
        self.risk.require_own_values("`begin`")
        self.risk.whole.refuse("`begin` can't watch a model", "Use `listen` or `update`.")
        batch = self.risk.read_input(X, unpack)
        # Where it is not known yet how functions read parameters, a pass of its own has to find out.
        heard = None if self._looks_first else HeardPass(self._pass(batch), partial(_update, self))
        return HeardBatch(batch, heard, self._add_heard, self.risk.model if watch else None)

    def _add_heard(self, batch: Batch, heard: HeardPass | None, decay: float | None) -> None:
        add = partial(self._add, decay=decay)
        if heard is not None:
            return heard.add(batch, add)
        if self._looks_first:
            self._look(batch)
        _update(self, batch, PassStart.now(), add)

    def _pass(self, batch: Batch) -> BatchPass:
        return BatchPass(self.risk, self._layers, self.vectors, self._weights, batch)

    _layers = property(lambda self: [entry.layer for entry in self.plan])

    def _read(self, batch: Any) -> Batch:
        found = self.risk.read(batch, self.updates)
        if not found.num_examples and self.risk.processes.world == 1:
            raise ValueError("The batch has no examples.")
        if found.num_examples and self._looks_first:
            self._look(found)
        return found

    #: Whether it has to be found out before the first batch how functions read parameters.
    _looks_first = property(
        lambda self: self.risk.reads is None and _has_unknown_code(self._layers) and not self._sums.called
    )

    def _look(self, batch: Batch, error: OutsideReads | None = None) -> None:
        """Look which functions read parameters, which changes the layers."""
        if error is not None and self.updates:
            raise UnsupportedError(
                f"{error} In earlier batches it was not so: their statistics are of other layers."
            ) from error
        if batch.num_examples:
            self._blank.learn_reads(batch, error)
        else:  # other processes have them, and tell what they find
            self.risk.reads = None
            self._blank.renew_plan()
        self._sums = RunningSums.of_plan(self.plan, self._scale)

    def _add(self, show: Show, decay: float | None) -> None:
        """Sum one batch by itself, then add it to the running sums: an error before that changes nothing."""
        _add(self, show, self.decay if decay is None else decay)

    def settle(self) -> None:
        """Of several processes: finish a step whose batches have called other layers in other processes. Collective.

        All decay a layer that some have called, and count their examples for it. Reading does it as well.

        Raises:
            ProcessError: If several such steps were taken since the last time.
        """
        together(self, "the end of a step", lambda: None)

    # ------------------------------------------------------------------------------------------------------- reading
    @property
    def operator(self) -> BlockwiseLinearOperator:
        """The curvature of all batches until now, like that of `curvature`; later updates don't change it.

        Of several processes: that of the batches of all. Collective.

        Raises:
            ValueError: If nothing was added yet, or a layer was never called (see `leave_out_uncalled`).
        """
        return together(self, "the estimator's operator", lambda: _operator(self, self._sums.over(self.risk.processes)))

    @property
    def uncalled(self) -> list[str]:
        """Names of the layers that no batch has called yet."""
        return [layer.name for layer in self._layers if layer not in self._sums.called]

    def refresh(self, damping: Any = None) -> None:
        """Take new bases (EKFAC), and make `inverse()` that of the statistics as they are now. Collective.

        Args:
            damping: Of the inverse from now on, as for `K.inverse`, such as `HeuristicDamping(λ)`. Default: as before.

        Raises:
            ValueError: If nothing was added yet.
            SingularMatrixError: If a block is singular and the damping is 0; names the block.
        """
        self.refresh_by(lambda K: self.damping if damping is None else damping)

    def refresh_by(self, choose: Callable[[BlockwiseLinearOperator], Any]) -> None:
        """The same, with a damping `choose(K)` that depends on the curvature."""
        renewed = together(self, "a refresh", lambda: _renewed(self, choose))
        self._sums, self._snapshot, self._inverse, self.damping = renewed

    @property
    def refreshed(self) -> BlockwiseLinearOperator:
        """The curvature at the last `refresh`, whose decompositions are kept; a ValueError before the first."""
        if self._snapshot is None:
            raise ValueError("The estimator was not refreshed yet: call `refresh(damping)` first.")
        return self._snapshot

    def inverse(self, damping: Any = None) -> LinearOperator:
        """`(K + damping·I)⁻¹` at the last `refresh`; the first call refreshes, with this damping.

        Args:
            damping: Default: that of the last refresh, whose inverse is kept. Another number takes its
                eigendecompositions; what damps single factors decomposes these each time.
        """
        if self._snapshot is None:
            self.refresh(damping)
        if damping is not None and damping is not self.damping and not same_data(plain(damping), plain(self.damping)):
            return self.refreshed.inverse(damping)
        if self._inverse is None:
            self._inverse = self.refreshed.inverse(self.damping)
        return self._inverse

    # --------------------------------------------------------------------------------------------- merging and saving
    def merge(self, other: CurvatureEstimator) -> None:
        """Add the sums of another estimator of the same network: at ρ = 1 the union of two data sets.

        Random numbers go on from this estimator's; the inverse stays that of its last refresh. Batches that both have
        seen at the same time are parts of one, as with several processes: with `reduction="sum"` they add up.

        EKFAC's eigenvalues are sums in the basis of an estimator's own first batch, or last refresh. Those of another
        one fit after `other.adopt_bases(self)`, best before its first update.

        Raises:
            ValueError: If the two approximate differently, or EKFAC's eigenvalues are in different bases. Nothing has
                changed then.
        """
        if not other.updates:
            return
        _merge(self, other)

    def adopt_bases(self, other: CurvatureEstimator) -> None:
        """Sum EKFAC's eigenvalues in the bases of another estimator of the same network from now on, for `merge`.

        Before the first update this loses nothing. Eigenvalues that were already summed are transformed as by
        `refresh`. The inverse stays that of the last refresh.

        Raises:
            ValueError: If the two approximate differently.

        Example:
            >>> import torch
            >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), ())
            >>> one, two = CurvatureEstimator(risk), CurvatureEstimator(risk)
            >>> one.update((torch.rand(4, 3), torch.rand(4, 2)))
            >>> two.adopt_bases(one)  # then two.update(...), and one.merge(two) at the end
        """
        _require_like(self, other)
        self._sums = self._sums.in_bases_of(other._sums)

    def state_dict(self) -> dict[str, Any]:
        """Everything that going on needs, in tensors and plain Python: sums, bases, random state, the last refresh.

        Of several processes the same state in all, so that any number of them may go on from it. Collective.
        `torch.save` and `torch.load(weights_only=True)` carry it, and so do `save` and `load` (safetensors).
        """
        return together(self, "the estimator's state", lambda: write_estimator(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another estimator stopped; random numbers, bases and the inverse are as they were there.

        Damping that is neither number nor tensor is not in the state: this estimator's own is used.

        Raises:
            ValueError: If it is cut off, foreign, or of another network or other approximations; nothing has changed.
        """
        read_estimator(self, state)

    def __repr__(self) -> str:
        progress = f"{self.updates} updates, {self.examples} examples, decay {self.decay}"
        return f"CurvatureEstimator, {progress}\n{plan_table(self.plan)}"


def _add(estimator: CurvatureEstimator, show: Show, decay: float) -> None:
    _check_decay(decay)
    step, before = estimator._drawn if decay == 1 or not estimator.updates else (estimator._drawn[0] + 1, 0)

    def show_again(consume: Consumer) -> Totals:  # with the same vectors each time
        return show(consume, Draws(estimator.vectors.seed or 0, step, before)).of_stream()

    batch, totals = sums_of_batch(estimator, show_again)
    batch.require_finite()
    add_to_step(estimator, batch, totals, decay)
    estimator._drawn = step, before + totals.examples
    estimator.updates, estimator.examples = estimator.updates + 1, estimator.examples + totals.examples
    estimator.weight = decay * estimator.weight + 1
    estimator.begun = max(1.0, estimator.begun) if decay == 1 else decay * estimator.begun + 1
    estimator._blank.confirm_plan()


def _renewed(
    estimator: CurvatureEstimator, choose: Callable[[BlockwiseLinearOperator], Any]
) -> tuple[RunningSums, BlockwiseLinearOperator, LinearOperator, Any]:
    """Sums in new bases, the curvature, its inverse, and the damping that is chosen for it."""
    sums, whole = estimator._sums.renewed(estimator.risk.processes)
    snapshot = _operator(estimator, whole)
    damping = choose(snapshot)
    estimator.risk.processes.same("a refresh", lambda: {"the damping": described(damping)})
    decompose_factors(snapshot.blocks, damping, estimator.risk.processes)
    return sums, snapshot, snapshot.inverse(damping), damping


def _merge(one: CurvatureEstimator, other: CurvatureEstimator) -> None:
    _require_like(one, other)
    one._sums, one.step = one._sums.merged(other._sums, one.step, other.step), one.step.merged(other.step)
    one.updates, one.examples = one.updates + other.updates, one.examples + other.examples
    one.weight += other.weight
    one.begun = max(one.begun, other.begun)


def _update(
    estimator: CurvatureEstimator,
    found: Batch,
    start: PassStart,
    add: Callable[[Show], None],
    check: Callable[[Sequence[Tensor]], None] | None = None,
    error: OutsideReads | None = None,
) -> None:
    """Add a batch by a pass of its own; arguments as for `BatchPass.run`, and what is wrong with the layers."""
    estimator.risk.whole.renew()
    while True:
        if error is not None:
            estimator._look(found, error)  # raises it again if it finds no more than was known
        try:
            return estimator._pass(found).run(start, add, check)
        except OutsideReads as another:
            error = another


def _operator(estimator: CurvatureEstimator, sums: RunningSums) -> BlockwiseLinearOperator:
    """The curvature that these sums make."""
    _require_updates(estimator)
    called = sums.called
    layer: Layer | None = next((layer for layer in estimator._layers if layer not in called), None)
    if layer is not None and not estimator.leave_out_uncalled:
        raise _no_curvature(layer, estimator)
    K, blocks = with_layers(estimator._blank, [layer.name for layer in called]), sums.blocks()
    for layer in called:
        refuse_unread(estimator.risk, layer, blocks)
    K.parameters = fingerprint(estimator.risk)
    K._set_blocks(blocks, sum(estimator.risk.processes.gather("counting examples", estimator.examples)))
    return K


def _has_unknown_code(layers: Iterable[Layer]) -> bool:
    return any(use.without_rule for layer in layers for use in layer.uses)


def _no_curvature(layer: Layer, estimator: CurvatureEstimator) -> ValueError:
    return ValueError(
        f"{layer.title} was never called in {estimator.updates} updates, so its parameters {list(layer.params)} have "
        "no curvature yet. CurvatureEstimator(..., leave_out_uncalled=True) makes operators of the other layers; "
        f"`uncalled` lists what is left out, {estimator.uncalled} now."
    )


def _require_updates(estimator: CurvatureEstimator) -> None:
    if not any(estimator.risk.processes.gather("counting updates", estimator.updates)):
        raise ValueError("The estimator has seen no batch yet: call `update(batch)`, or `listen(batch)`, first.")


def _require_like(one: CurvatureEstimator, other: CurvatureEstimator) -> None:
    def options(estimator: CurvatureEstimator) -> tuple[list[tuple[str, str]], str, float]:
        approximations = [(entry.layer.name, repr(entry.approximation)) for entry in estimator.plan]
        return approximations, repr(estimator.vectors), estimator.decay

    mine, theirs = options(one), options(other)
    if mine != theirs:
        raise ValueError(
            f"Can't merge estimators that differ in layers, approximations, vectors or decay: {mine} and {theirs}."
        )


def _check_decay(decay: Any) -> None:
    if not isinstance(decay, Real):
        raise TypeError(f"decay is a {type(decay).__name__}; expected a number in (0, 1].")
    if not 0 < float(decay) <= 1:
        raise ValueError(f"decay={decay} is outside of (0, 1]: 1 weighs all batches alike, 0.95 forgets old ones.")
