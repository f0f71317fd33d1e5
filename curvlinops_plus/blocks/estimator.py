"""Curvature that is updated batch by batch, inside a training loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from curvlinops_plus.blocks.accumulator import Choice, Choices
from curvlinops_plus.blocks.blockwise import BlockwiseLinearOperator
from curvlinops_plus.blocks.kfac import KFAC
from curvlinops_plus.blocks.plan import Plan, plan_table
from curvlinops_plus.blocks.state import checked, description_of, difference, plain, take_state
from curvlinops_plus.blocks.sums import Sums
from curvlinops_plus.blocks.together import decompose_factors
from curvlinops_plus.blocks.users_pass import ShowDrawn, UsersPass, called_once
from curvlinops_plus.errors import CurvatureWarning, ProcessError, UnsupportedError, level_of_user
from curvlinops_plus.layer.replay import NoExampleGradients
from curvlinops_plus.linalg import LinearOperator
from curvlinops_plus.linalg.checksums import sealed
from curvlinops_plus.linalg.damping import Damping, check_damping
from curvlinops_plus.linalg.fields import Fields
from curvlinops_plus.options import flag, number
from curvlinops_plus.risk import Draws, EmpiricalRisk, Totals, Vectors
from curvlinops_plus.risk.backward_pass import Consumer
from curvlinops_plus.risk.batches import Batch
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.function_reads import begin_to_follow
from curvlinops_plus.risk.loss_passes import LossWeights
from curvlinops_plus.risk.parameters import Fingerprint, fingerprint
from curvlinops_plus.risk.preserve import preserve_state
from curvlinops_plus.risk.record import Recorder, follows_rows
from curvlinops_plus.risk.risk import takes_risk

T = TypeVar("T")

# The sum and norm of a parameter of which nothing is known: none differs from them.
UNKNOWN = [0.0, math.inf]


# What the state of an estimator has besides that of an operator.
_NEEDED = {"decay", "updates", "weight", "draws", "damping", "sums", "refreshed"}


class _Loaded(NamedTuple):
    """What a state holds, made for an estimator.

    Attributes:
        blank: An operator without blocks, with plan and reads of the state.
        sums: The statistics.
        snapshot: The curvature at the last refresh, None before the first.
        draws: Number of the step and of examples in it, of all processes.
        updates, examples, weight: As of the estimator, of all processes.
        damping: Of the inverse; None: that of who loads it.
    """

    blank: BlockwiseLinearOperator
    sums: Sums
    snapshot: BlockwiseLinearOperator | None
    draws: tuple[int, int]
    updates: int
    examples: int
    weight: float
    damping: Any


class CurvatureEstimator:
    """A running estimate of a risk's block-diagonal curvature that takes one batch at a time.

    Statistics are sums, so batches add up to the data set that they make: after a pass over the
    data, `operator` is what `curvature(risk, ...)` computes from it (at fixed parameters; and
    except for EKFAC, see below). With `decay` ρ < 1 they are exponential moving averages with
    normalised weights, `Σ_k ρ^{t-k} n_k x_k / Σ_k ρ^{t-k} n_k`, where `x_k` is the mean over the
    `n_k` examples (or loss terms) of batch k: the first update returns the statistic itself, and no
    bias needs correcting. A layer's average is over the steps that have called it; others leave it
    as it is.

    EKFAC needs eigenvectors before it can sum eigenvalues. It takes those of its first batch, which
    is sent twice; later eigenvalues are summed in this basis until `refresh`, which computes the
    eigenvectors of the current factors and transforms the eigenvalues: they become the diagonal of
    the old block in the new basis. Approximations that need several sweeps over the same data are
    refused.

    If the self-check finds in a later batch that the gradients of a layer can't be told, a warning
    names it, nothing more is added to it, and its block is the identity from the next `refresh` on:
    `inverse()` leaves its gradient as it is, divided by one plus the damping.

    The inverse belongs to the statistics of the last `refresh`, and to the damping given there. It
    does not change in between, whatever is added.

    With `reduction="sum"` batches are matrices of which the average is taken. A batch that is added
    with `decay=1` belongs to the one before it, like one more micro-batch of the same step: these
    add up.

    Args:
        risk: Model, loss and options. Its `data` is only read for functions that read parameters;
            `()` is fine.
        approximation: As for `curvature`.
        default: As for `curvature`.
        vectors: As for `curvature`; random ones draw new numbers for every batch.
        separate_weight_and_bias: Give every parameter its own block.
        decay: ρ, in (0, 1]. With `reduction="sum"`, 1 adds batches up, and less averages them.
        damping: Of the inverse; anything that `K.inverse(damping)` takes.
        leave_out_uncalled: Layers that no batch has called yet are left out: `operator` and
            `inverse()` have the parameters of the others, and `uncalled` lists them. By default
            both refuse.

    Raises:
        ValueError: If `decay` is not in (0, 1].

    Cost: `update` is a forward pass and a backward pass per vector to the layers' outputs; `listen`
    saves the forward pass. Memory: the statistics, up to three times while a batch is added,
    whatever the number of updates.

    Source: moving averages and half-fresh inverses as in Martens & Grosse 2015, sections 5 and 8;
    George et al. 2018, section 3.2 (EKFAC with running averages).

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

    #: Whether random numbers belong to a batch as a whole, see `Draws`: so in an optimizer.
    draws_by_batch = False

    #: Whether layers of which no pass tells the gradients of each example are withdrawn at once,
    #: with a warning, rather than refused: so in an optimizer.
    withdraws = False

    @takes_risk
    def __init__(
        self,
        risk: EmpiricalRisk,
        approximation: Choices = KFAC,
        *,
        default: Choice = KFAC,
        vectors: Vectors | str | None = None,
        separate_weight_and_bias: bool = False,
        decay: float = 1.0,
        damping: Damping = 0.0,
        leave_out_uncalled: bool = False,
    ) -> None:
        _check_decay(decay)
        check_damping("damping", damping)
        flag("leave_out_uncalled", leave_out_uncalled)
        self.decay = decay
        self.damping = damping
        self.leave_out_uncalled = leave_out_uncalled
        #: The layers with their approximations. How functions read parameters is known after the
        #: first batch.
        self.plan = Plan(risk, approximation, default, vectors, separate_weight_and_bias)
        self.risk = self.plan.risk
        self.vectors = self.plan.vectors
        self.reset()

    def reset(self) -> None:
        """Start again, with the first random numbers."""
        self._sums = Sums(self.plan, self._scale)
        #: Whether all processes do, with other layers, of which some may not know yet.
        self._begins_anew = False
        #: The number of the step, and of examples of this process in it, which random numbers
        #: depend on.
        self._drawn: tuple[int, int] = 0, 0
        #: Relative weights of several losses, which each batch of a stream has to tell.
        self._weights = LossWeights(self.risk)
        self._recorder: Recorder | None = None
        self._snapshot: BlockwiseLinearOperator | None = None
        self._inverse: LinearOperator | None = None
        #: The number of updates, of examples in them, and the sum of their weights.
        self.updates = 0
        self.examples = 0
        self.weight = 0.0

    def _scale(self, totals: Totals) -> Tensor | float:
        c = self.risk.scale(totals)
        return c / totals.steps if self.risk.losses.reduction == "sum" and totals.steps else c

    # ------------------------------------------------------------------------------------- updating
    def update(self, batch: Any, decay: float | None = None) -> None:
        """Add one batch, with a separate forward pass that leaves the model, its buffers and random
        state unchanged.

        Args:
            batch: An item of the risk's data: `(X, y)`, or a mapping with "labels".
            decay: For this update, instead of the estimator's. With 1 during the first steps these
                weigh alike, and micro-batches after the first one of a step count as one batch with
                it.

        Raises:
            ValueError: If the batch can't be read, or has no examples, which some of several
                processes may lack.
            NumericsError: If one of its statistics is NaN or infinite; names layer and statistic.
                Nothing has changed then.
        """
        self._add_by_own_pass(self.risk.read(batch, self.updates), decay)

    @contextmanager
    def listen(self, batch: Any, decay: float | None = None) -> Iterator[None]:
        """Record one batch from your forward pass: call the model once in this context, and go
        backward afterwards.

        Vectors are backpropagated through the model's graph when the context ends, which stays for
        your backward pass. Nothing is added if the block raises. If your pass can't be recorded
        (position tables of one row, embeddings with `scale_grad_by_freq`), another pass is made,
        with other random numbers.

        Args:
            batch: What the model is called with, and the targets: `(X, y)`, or a mapping with
                "labels".
            decay: As for `update`.

        Raises:
            ValueError: If the model was not called exactly once, or its graph is gone.
            NumericsError: As for `update`.

        Cost: a backward pass per vector; a forward pass where another one is made.
        """
        self.risk.require_own_values("`listen`")
        self.risk.require_in_place()
        found = self.risk.read(batch, self.updates)
        with closing(self.users_pass(found)) as users_pass:
            once = called_once(users_pass, self.risk.model)
            with once if found.num_examples else nullcontext():
                yield
            users_pass.add(found.y, decay)

    @property
    def _looks_first(self) -> bool:
        """Whether it has to be found out in the first batch how functions read parameters."""
        if self.updates or self.risk.reads is not None:
            return False
        return any(use.without_rule for entry in self.plan for use in entry.layer.uses)

    def users_pass(self, batch: Batch, records: bool = True) -> UsersPass:
        """Record a call of the model by the user, from `begin` to `end`, and `add` it when its
        targets are known.
        """
        recorder = None
        # With fully sharded parameters the layers have other tensors in it.
        if records and batch.num_examples and not (self._looks_first or self.risk.sharded):
            recorder = self._recorder_of(own_pass=False)
            if recorder.scales_gradients:  # they are no derivatives
                recorder = None
        return UsersPass(batch, recorder, self._add, self._fresh, self._add_by_own_pass)

    def _fresh(self) -> Sums | None:
        """Sums for one batch; None if it may have to be shown more than once, or to be agreed on
        with other processes.
        """
        sums = self._sums.fresh()
        return None if self._begins_anew or sums.waiting else sums

    def _recorder_of(self, own_pass: bool = True) -> Recorder:
        """What records the layers; a recorder of the same layers that is free is taken again."""
        layers = self._sums.layers
        ignored = frozenset(self._sums.withdrawn)
        recorder = self._recorder
        fits = (
            recorder is not None
            and recorder.layers is layers
            and recorder.ignored == ignored
            and recorder.gathers == follows_rows(self.risk)
            and not recorder.is_open
        )
        if recorder is None or not fits:
            recorder = self._recorder = Recorder(
                self.risk, layers, self.vectors, repeatable=False, ignored=ignored
            )
        recorder.own_pass = own_pass
        recorder.weights = self._weights
        return recorder

    def _add_by_own_pass(
        self, batch: Batch, decay: float | None, error: OutsideReads | None = None
    ) -> None:
        """Add a batch by a pass of our own; an error says what is wrong with the layers."""
        if not batch.num_examples and self.risk.processes.world == 1:
            raise ValueError("The batch has no examples.")
        self.risk.renew()
        cause = ""
        refusals: list[UnsupportedError] = []
        while True:
            try:
                if error is not None:
                    self._learn(batch, error)
                elif batch.num_examples and self._looks_first:
                    self._take_plan(self.plan.learned(batch))
                error = None
                self._add(partial(self._run, batch), decay)
                break
            except OutsideReads as outside:
                cause = f"{outside} Nor does a module around it tell. "
                error = outside
            except NoExampleGradients as refusal:
                advice = "In training loops leave these to another optimizer (`params=`)."
                if self.withdraws:
                    advice = ""
                message = f"{cause}{refusal.fact} {advice}".rstrip()
                refusals.append(self._left_out(refusal.keys, UnsupportedError(message)))
            except UnsupportedError as refusal:
                if error is None:
                    raise
                refusals.append(self._left_out(error.keys, refusal))
                error = None
        if refusals:
            self._warn_of_withdrawn(refusals)

    def _left_out(self, keys: Iterable[str], refusal: UnsupportedError) -> UnsupportedError:
        """The reason why layers are withdrawn in the first batch.

        Raises:
            UnsupportedError: The reason, if nothing would be left, or this is no training loop.
        """
        sums = self._sums
        layers = {layer for layer in sums.layers if not layer.params.keys().isdisjoint(keys)}
        withdrawn = sums.withdrawn | layers
        is_new = layers and not sums.withdrawn.issuperset(layers)
        alone = self.risk.processes.world == 1
        if not (self.withdraws and alone and is_new) or len(withdrawn) == len(sums.layers):
            raise refusal
        sums.withdrawn = withdrawn
        return refusal

    def _warn_of_withdrawn(self, refusals: Sequence[UnsupportedError]) -> None:
        """Warn once of layers that no batch tells the gradients of."""
        withdrawn = [key for layer in self._sums.withdrawn for key in layer.params]
        keys = [key for key in self.risk.params if key in withdrawn]
        others = ""
        if len(refusals) > 1:
            others = f" (And {len(refusals) - 1} more.)"
        warnings.warn(
            f"{refusals[0]}{others} The gradients of {keys} are taken as they are, without "
            "preconditioner.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )

    def _run(self, batch: Batch, draws: Draws, consume: Consumer) -> Totals:
        """Show a batch by a pass of our own; once more with the same dropout."""
        if not batch.num_examples:  # a step of other processes
            return Totals()
        recorder = self._recorder_of()  # of the layers that processes have agreed on
        with preserve_state(self.risk.model, self.risk.data), recorder.hooked():
            return recorder.observe(batch, draws, consume)

    def _learn(self, batch: Batch, error: OutsideReads) -> None:
        """Take up what a pass has shown: in the first batch other layers, later which to leave."""
        if self.updates:
            # In batches until now each expert may have seen all rows, or none.
            if batch.num_examples and begin_to_follow(self.risk, batch, error):
                self.plan.reads = self.risk.reads
            else:
                self._withdraw(error)
        elif batch.num_examples:
            # Raises the error again if it finds no more than was known.
            self._take_plan(self.plan.learned(batch, error))
            if self._sums.withdrawn.issuperset(self._sums.layers):
                raise UnsupportedError(
                    f"{error} Nothing is left of which a pass tells the gradients of each example: "
                    "in training mode dropout keeps the model from being run again. Restructure "
                    "that part of the model, or take another optimizer."
                )
        else:  # other processes have examples, and tell what they find
            self.risk.reads = None
            self._take_plan(self.plan.renewed())

    def _take_plan(self, plan: Plan) -> None:
        """Begin with these layers; nothing was summed yet."""
        withdrawn = {key for layer in self._sums.withdrawn for key in layer.params}
        self.plan = plan
        self._sums = Sums(plan, self._scale)
        self._sums.withdrawn = {
            layer for layer in self._sums.layers if not withdrawn.isdisjoint(layer.params)
        }

    def _withdraw(self, error: OutsideReads) -> None:
        """Add nothing more to layers of which a batch shows, after others, that their statistics
        are not right.
        """
        layers = [
            layer for layer in self._sums.layers if not layer.params.keys().isdisjoint(error.keys)
        ]
        if self._sums.withdrawn.issuperset(layers):
            raise UnsupportedError(str(error)) from error
        self._sums.withdrawn.update(layers)
        warnings.warn(
            f"{error} In earlier batches it was not so. From now on the gradients of "
            f"{[layer.name for layer in layers]} are taken as they are, without preconditioner.",
            CurvatureWarning,
            stacklevel=level_of_user(),
        )

    def _add(self, show: ShowDrawn, decay: float | None = None, batch: Sums | None = None) -> None:
        """Sum one batch by itself, then add it to the running sums: an error before that changes
        nothing.

        Args:
            batch: Its sums, if it was shown once already; `show` tells the totals then.
        """
        decay = self.decay if decay is None else decay
        _check_decay(decay)
        step, before = self._drawn
        if decay != 1 and self.updates:
            step, before = step + 1, 0
        # If it is shown again, it is with the same vectors.
        draws = Draws(self.vectors.seed or 0, step, before, self.draws_by_batch)
        show_again = partial(show, draws)
        if (world := self.risk.processes.world) > 1 and (self._sums.begins or self._begins_anew):
            batch, totals = self._first(show_again)
        else:
            batch = batch or self._sums.fresh()
            totals = batch.see(show_again, self.risk.processes if world == 1 else None)
        batch.require_finite()
        # One call, so that an interrupt comes before all of it or afterwards.
        vars(self).update(
            _sums=self._sums.added(batch, totals, decay),
            _drawn=(step, before + totals.examples),
            updates=self.updates + 1,
            examples=self.examples + totals.examples,
            weight=decay * self.weight + 1,
        )
        self.plan.confirm()

    def _first(self, show: Callable[[Consumer], Totals]) -> tuple[Sums, Totals]:
        """The sums of a batch from which, with those of other processes, bases follow, as of EKFAC.
        Collective.
        """
        processes = self.risk.processes

        def first() -> tuple[Sums, Totals] | OutsideReads:
            self._agree_on_reads()
            batch = self._sums.fresh()
            totals = Totals()
            outside: OutsideReads | None = None
            try:
                totals = show(batch.consume)
            except OutsideReads as error:
                outside = error
            if noticed := [each for each in processes.gather(outside) if each is not None]:
                return noticed[0]  # the same in all, which do the same about it, or refuse it
            batch.see(show, processes, totals)
            return batch, totals

        found = self.risk.together(first, over_data=False, same=self.plan.described)
        self._begins_anew = isinstance(found, OutsideReads)
        if isinstance(found, OutsideReads):  # no failure: all look for functions, and begin anew
            raise found
        return found

    # ------------------------------------------------------------------------------------ processes
    @property
    def called_in_step(self) -> set[int]:
        """Indices of the layers that the open step has called."""
        return self._sums.entered

    def enter(self, called: Iterable[int]) -> None:
        """Other processes have called layers in the open step: they decay here, too."""
        self._sums.enter(called)

    def add_nothing(self) -> None:
        """Take a step to which this process has nothing to add, while others have."""
        self._add(lambda draws, consume: Totals())

    def _together(self, work: Callable[[], T]) -> T:
        """Work by all processes on their estimators, whose moving averages must have the same
        weights. Collective.

        A process without any batch has nothing to weigh.
        """
        processes = self.risk.processes

        def agreed() -> T:
            if processes.world > 1:
                self._agree_on_reads()
                self.enter(set[int]().union(*processes.gather(self.called_in_step)))
                self._agree_on_withdrawn()
                averages = [
                    self._sums.totals_of(layer).steps
                    for layer in self._sums.layers
                    if layer not in self._sums.withdrawn
                ]
                told = processes.gather((self.updates, averages))
                if len({str(weights) for updates, weights in told if updates}) > 1:
                    raise ProcessError(
                        "The processes have made other numbers of steps, or called other layers in "
                        "them: updates and weights of batches in each layer's moving average are "
                        f"{told}. All have to make the same number of steps, which call the same "
                        "layers; further micro-batches of a step are added with decay=1."
                    )
            return work()

        return self.risk.together(agreed, over_data=False, same=self.plan.described)

    def _agree_on_reads(self) -> None:
        """Take over how functions read parameters from processes that have found more of it.
        Collective.
        """
        plan = self.plan.agreed()
        if plan is self.plan:
            return
        if self._sums.called:
            self.plan = plan
            raise UnsupportedError(
                "Functions that read parameters were found by other processes, whose batches "
                "call other parts of the model. Statistics of other layers don't add up. Begin "
                "with batches that call all."
            )
        self._take_plan(plan)

    def _agree_on_withdrawn(self) -> None:
        """Withdraw the layers that other processes have withdrawn. Collective."""
        sums = self._sums
        mine = {k for k, layer in enumerate(sums.layers) if layer in sums.withdrawn}
        sums.withdrawn = {sums.layers[k] for k in mine.union(*self.risk.processes.gather(mine))}

    # -------------------------------------------------------------------------------------- reading
    @property
    def operator(self) -> BlockwiseLinearOperator:
        """The curvature of all batches until now, like that of `curvature`; later updates don't
        change it.

        Of several processes: that of the batches of all. Collective.

        Raises:
            ValueError: If nothing was added yet, or a layer was never called (see
                `leave_out_uncalled`).
        """

        def made() -> BlockwiseLinearOperator:
            sums = self._sums.over(self.risk.processes)
            return self._operator(sums, fingerprint(self.risk))

        return self._together(made)

    @property
    def uncalled(self) -> list[str]:
        """Names of the layers that no batch has called yet."""
        called = set(self._sums.called)
        return [layer.name for layer in self._sums.layers if layer not in called]

    @property
    def withdrawn(self) -> list[str]:
        """Names of the layers whose statistics a later batch has shown to be wrong; their blocks
        are identities.
        """
        return [layer.name for layer in self._sums.layers if layer in self._sums.withdrawn]

    def refresh(self, damping: Damping | None = None) -> None:
        """Take new bases (EKFAC), and make `inverse()` that of the statistics as they are now.
        Collective.

        Args:
            damping: Of the inverse from now on, as for `K.inverse`, such as `HeuristicDamping(λ)`.
                Default: as before.

        Raises:
            ValueError: If nothing was added yet.
            SingularMatrixError: If a block is singular and the damping is 0; names the block.
        """
        renewed = self._together(
            lambda: self._renewed(self.damping if damping is None else damping)
        )
        self._sums, self._snapshot, self._inverse, self.damping = renewed

    def _renewed(
        self, damping: Damping
    ) -> tuple[Sums, BlockwiseLinearOperator, LinearOperator, Any]:
        """Sums in new bases, the curvature, its inverse, and the damping."""
        processes = self.risk.processes
        processes.same({"the damping": damping})
        sums, whole = self._sums.renewed(processes)
        snapshot = self._operator(whole, dict.fromkeys(self.risk.params, UNKNOWN))
        decompose_factors(snapshot.blocks, damping, processes)
        return sums, snapshot, snapshot.inverse(damping), damping

    def _operator(self, sums: Sums, parameters: Fingerprint) -> BlockwiseLinearOperator:
        """The curvature that these sums make, with the fingerprint of what it belongs to."""
        if not any(self.risk.processes.gather(self.updates)):
            raise ValueError(
                "The estimator has seen no batch yet: call `update(batch)`, or `listen(batch)`, "
                "first."
            )
        called = sums.called
        layer = next((layer for layer in sums.layers if layer not in called), None)
        if layer is not None and not self.leave_out_uncalled:
            raise ValueError(
                f"{layer.title} was never called in {self.updates} updates, so its parameters "
                f"{list(layer.params)} have no curvature yet. CurvatureEstimator(..., "
                "leave_out_uncalled=True) makes operators of the other layers; `uncalled` lists "
                f"what is left out, {self.uncalled} now."
            )
        K = BlockwiseLinearOperator._of_plan(self.plan.only([layer.name for layer in called]))
        examples = sum(self.risk.processes.gather(self.examples))
        K._adopt(sums.blocks(), examples, parameters)
        return K

    @property
    def refreshed(self) -> BlockwiseLinearOperator:
        """The curvature at the last `refresh`, whose decompositions are kept; a ValueError before
        the first.
        """
        if self._snapshot is None:
            raise ValueError("The estimator was not refreshed yet: call `refresh(damping)` first.")
        return self._snapshot

    def inverse(self, damping: Damping | None = None) -> LinearOperator:
        """`(K + damping·I)⁻¹` at the last `refresh`; the first call refreshes, with this damping.

        Args:
            damping: Default: that of the last refresh, whose inverse is kept. Another number takes
                its eigendecompositions; what damps single factors decomposes these each time.
        """
        if self._snapshot is None:
            self.refresh(damping)
        if (
            damping is not None
            and damping is not self.damping
            and difference(plain(damping), plain(self.damping))
        ):
            return self.refreshed.inverse(damping)
        if self._inverse is None:
            self._inverse = self.refreshed.inverse(self.damping)
        return self._inverse

    # --------------------------------------------------------------------------- merging and saving
    def merge(self, other: CurvatureEstimator) -> None:
        """Add the sums of another estimator of the same network: at ρ = 1 the union of two data
        sets.

        Random numbers continue from this estimator's; the inverse stays that of its last refresh.
        Batches of the same steps are parts of one, as with several processes: with
        `reduction="sum"` they add up.

        EKFAC's eigenvalues are sums in the basis of an estimator's own first batch, or last
        refresh. Those of the other one are projected into this basis, which preserves their sum.

        Raises:
            ValueError: If the two approximate differently. Nothing has changed then.
        """
        if not other.updates:
            return
        mine, theirs = (
            {**description_of(BlockwiseLinearOperator._of_plan(e.plan))["plan"], "decay": e.decay}
            for e in (self, other)
        )
        if mismatch := difference(mine, theirs):
            where, here, there = mismatch
            raise ValueError(
                f"Can't merge estimators that differ in {where}: {here!r} and {there!r}."
            )
        self._sums = self._sums.merged(other._sums)
        self.updates += other.updates
        self.examples += other.examples
        self.weight += other.weight

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue, in tensors and plain Python: sums, bases, random state,
        the last refresh.

        Of several processes the same state in all, so that any number of them may go on from it.
        Collective. `torch.save` and `torch.load(weights_only=True)` carry it, and so do `save` and
        `load` (safetensors).
        """
        return self._together(self._state)

    def _state(self) -> dict[str, Any]:
        processes = self.risk.processes
        step, drawn = self._drawn
        updates, examples, drawn = zip(*processes.gather((self.updates, self.examples, drawn)))
        blank = BlockwiseLinearOperator._of_plan(self.plan)
        blank._compute_later()
        state = {
            **description_of(blank),
            "decay": self.decay,
            "updates": max(updates),
            "examples": sum(examples),
            "weight": self.weight,
            "draws": [step, sum(drawn)],
            "damping": self.damping if isinstance(self.damping, (int, float, Tensor)) else None,
            "sums": self._sums.over(processes).state_dict(),
            "refreshed": None if self._snapshot is None else self._snapshot.state_dict(),
        }
        return sealed(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another estimator stopped, with its random numbers, bases and inverse.

        Damping that is neither number nor tensor is not in the state: this estimator's own is used.

        Raises:
            ValueError: If it is damaged, cut off, foreign, or of another network or other
                approximations; nothing has changed.
        """
        self._take_loaded(self._loaded(checked(state)))

    def _loaded(self, state: Fields) -> _Loaded:
        """What a checked state holds, made for this estimator, which does not change."""
        if missing := _NEEDED - state.data.keys():
            raise ValueError(
                f"The state lacks {sorted(missing)}; is the file cut off, or not that of an "
                "estimator?"
            )
        if state.count("updates") and not state.part("sums").data.get("layers"):
            raise ValueError(
                "The state has updates, and no statistics of them. Was it loaded by "
                "torch.distributed.checkpoint? Save and load Checkpoint(estimator) there."
            )
        if state["decay"] != self.decay:
            raise ValueError(
                f"State mismatch in the decay: the state has {state['decay']}, this one "
                f"{self.decay}."
            )
        draws = state.sequence("draws", 2)
        damping = state["damping"]
        if isinstance(damping, Tensor):
            state.tensor("damping")
        elif damping is not None:
            state.number("damping")
        with warnings.catch_warnings():  # in training, parameters are meant to change
            warnings.simplefilter("ignore", CurvatureWarning)
            blank = BlockwiseLinearOperator._of_plan(self.plan)
            take_state(blank, state)
            snapshot = None
            if state["refreshed"] is not None:
                refreshed = state.part("refreshed")
                refreshed.require({"plan", "blocks"})
                plan = blank.plan.only(refreshed.part("plan").part("layers").data)
                snapshot = BlockwiseLinearOperator._of_plan(plan)
                take_state(snapshot, checked(refreshed.data, refreshed.title))
        sums = Sums(blank.plan, self._scale)
        sums.load_state_dict(state.part("sums"))
        return _Loaded(
            blank,
            sums,
            snapshot,
            (draws.count(0), draws.count(1)),
            state.count("updates"),
            state.count("examples"),
            state.number("weight", 0.0),
            damping,
        )

    def _take_loaded(self, loaded: _Loaded) -> None:
        """Continue with it."""
        # What functions read belongs to the sums.
        self.risk.reads = loaded.blank.risk.reads
        self.plan = loaded.blank.plan.of_risk(self.risk)
        # What was summed before belongs to the first process; others go on from zero.
        first = self.risk.processes.rank == 0
        self._sums = loaded.sums if first else loaded.sums.without_data()
        self._snapshot = loaded.snapshot
        self._inverse = None
        step, drawn = loaded.draws
        self._drawn = step, -(-drawn // self.risk.processes.world)
        self.updates = loaded.updates
        self.weight = loaded.weight
        self.examples = loaded.examples if first else 0
        if loaded.damping is not None:
            self.damping = loaded.damping

    def __repr__(self) -> str:
        progress = f"{self.updates} updates, {self.examples} examples, decay {self.decay}"
        return f"CurvatureEstimator, {progress}\n{plan_table(self.plan)}"


def _check_decay(decay: float) -> None:
    if not 0 < number("decay", decay) <= 1:
        raise ValueError(
            f"decay={decay} is outside of (0, 1]: 1 weighs all batches alike, 0.95 forgets old "
            "ones."
        )
