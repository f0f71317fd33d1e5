"""The self-check: on one graph of a few examples, the layers' rules give the gradients that
autograd gives.

Three examples of a batch are run and recorded by themselves. A random vector goes back from all of
their outputs, once to the layers, whose rules make gradients of single examples, and once to the
parameters. Both sides are linear in the vector and stand on the same graph, so they agree to
rounding for every vector if they do for a random one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.random_state import RandomState, kept_random_state
from curvlinops_plus.risk.batches import Batch, gradients_of, take_examples
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.preserve import (
    TOLERANCE,
    eager,
    kept_modules,
    relative_difference,
    training_modules,
    with_short_products,
)
from curvlinops_plus.risk.risk import EmpiricalRisk

if TYPE_CHECKING:
    from curvlinops_plus.risk.record import Recorder

# How many examples are run by themselves. If three disagree, two are tried: an axis of another
# meaning may have size 3.
_FEW = (3, 2)
# Batches that are looked at although nothing about them is new: 1, 4, 16, 64, ...
_REGULARLY = {4**k for k in range(32)}
#: Largest relative difference of two gradients on one graph that passes as rounding, by bytes of a
#: number. Models in float64 may have norms that compute in float32 whatever they get.
_ROUNDING = {2: 5e-2, 4: 1e-5, 8: 1e-6}

_CAUSES = (
    "Does something else read the parameter, does another axis than the first of the layer's "
    "output carry the examples (say example_axis=), does the module compute something else when it "
    "is run again, does a hook change what it returns, or is something differentiated in the "
    "forward pass?"
)


def check_batch(
    risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor]
) -> None:
    """Compare a recorded batch with a few of its examples: the first batch, those of a new kind,
    and the 4ᵏth ones.

    A batch is of a new kind if other layers are called, if layers return one row for all examples
    where they didn't before, or get examples in other inputs. Which vectors are sent back makes no
    difference.

    Args:
        outputs: Of the recorded pass, with their graph.

    Raises:
        OutsideReads: If a layer's rule disagrees with autograd, or takes for rows of examples what
            is none.
        UnsupportedError: If examples depend on each other, as by batch norm in training mode.
        RuntimeError: If two evaluations of the model disagree.

    Warns:
        CurvatureWarning: In training loops, once, if the model can't be run again, or if batch norm
            keeps no running statistics; nothing is compared then.

    Cost: a forward pass of three examples and two backward passes, one of them with gradients of
    the parameters; of the whole batch where three examples can't be run by themselves (graphs, bags
    of tokens).
    """
    checked = risk.checked
    checked.batches += 1
    kind = recorder.reads, frozenset(recorder.kinds), batch.num_examples > 1, recorder.backward
    due = kind not in checked.seen or risk.options.check == "every" or checked.batches in _REGULARLY
    if not risk.options.check or not due:
        return
    norms = {
        name: m
        for name, m in risk.model.named_modules()
        if m.training and isinstance(m, _BatchNorm)
    }
    if norms and recorder.repeatable:
        raise UnsupportedError(
            f"{[*norms]} are batch norm in training mode: the examples of a batch depend on each "
            "other. Call model.eval() first, or say EmpiricalRisk(..., check=False)."
        )
    if untracked := [name for name, norm in norms.items() if norm.running_mean is None]:
        _warn_once(
            risk,
            f"{untracked} are batch norm in training mode: the examples of a batch depend on each "
            "other. Without running statistics the gradients of layers can't be compared with "
            "autograd's.",
        )
        return
    if _Check(risk, recorder, batch, outputs, list(norms.values())).passes():
        checked.seen.add(kind)


def _warn_once(risk: EmpiricalRisk, message: str) -> None:
    if message not in risk.checked.said:
        risk.checked.said.add(message)
        warn(message, CurvatureWarning, stacklevel=level_of_user())


class _CannotRun(Exception):
    """A model does not run on a part of a batch."""


@dataclass(eq=False)
class _Check:
    """One comparison; arguments as for `check_batch`.

    A row that is taken for another example's changes no sum over examples. So each example has a
    factor: on one side rows of the layers are multiplied by it, on the other what is sent back.
    Factors are powers of two, which commute with rounding.

    Args:
        norms: Batch norms in training mode, which use their running statistics meanwhile: layers,
            reads and axes stay the same.
    """

    risk: EmpiricalRisk
    recorder: Recorder
    batch: Batch
    outputs: Sequence[Tensor]
    norms: Sequence[nn.Module] = ()
    factors: Tensor = field(init=False, repr=False)

    def passes(self) -> bool:
        """Whether every layer got a gradient, and it was right.

        Raises:
            See `check_batch`.
        """
        N = self.batch.num_examples
        order = torch.randperm(N, generator=torch.Generator().manual_seed(0)).tolist()
        numbers = [n for n in _FEW if n < N] or [N]
        disagreement: OutsideReads | None = None
        with self._undisturbed():
            for number in numbers:
                # Not the first ones: what is mixed may be neighbours, or not.
                chosen = sorted(order[:number])
                few = take_examples(self.batch, chosen)
                if few is None:
                    break
                try:
                    return self._compare(few, chosen)
                except (
                    _CannotRun
                ):  # the whole batch, which is run instead, raises what else is wrong
                    break
                except OutsideReads as error:
                    disagreement = disagreement or error
            if disagreement is not None:
                raise disagreement
            try:
                return self._compare(self.batch, list(range(N)))
            except (UnsupportedError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if self.recorder.repeatable:
                    raise
                _warn_once(
                    self.risk,
                    "The gradients that layers' rules give are not compared with autograd's: the "
                    "model can't be run again on a batch of the training loop, "
                    f"{type(error).__name__}: {error}.",
                )
                return True

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Context for a pass that leaves the model and the batch's own recording as they are."""
        modules = kept_modules([*self.risk.model.modules()])
        gradients = torch.set_grad_enabled(self.recorder.backward)
        with self.recorder.disabled, gradients, eager, kept_random_state(), modules:
            for norm in self.norms:
                norm.training = False
            yield

    def _compare(self, few: Batch, chosen: Sequence[int]) -> bool:
        """Run and record these examples, and compare what was recorded."""
        params = self.risk.params
        if not self.recorder.backward or all(
            p.requires_grad and not p._backward_hooks for p in params.values()
        ):
            return self._compare_at(None, params, few, chosen)
        # Frozen ones have no gradients, and hooks are the user's.
        free: dict[str, Tensor] = {key: nn.Parameter(p.detach()) for key, p in params.items()}
        return self.risk.at(free, lambda model: self._compare_at(model, free, few, chosen))

    def _compare_at(
        self, model: nn.Module | None, params: dict[str, Tensor], few: Batch, chosen: Sequence[int]
    ) -> bool:
        """The same, at these tensors in place of the parameters."""
        main = self.recorder
        small = main.beside(params)
        before = RandomState.now(self.risk.device) if self.recorder.repeatable else None
        with small:
            try:
                with small.recording(len(chosen)):
                    outputs = self.risk.run(few, model)[0]
            except (UnsupportedError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if few is self.batch:
                    raise
                raise _CannotRun from error
            N = self.batch.num_examples
            expected = [(len(F) // N * len(chosen), *F.shape[1:]) for F in self.outputs]
            if few is not self.batch and [f.shape for f in outputs] != expected:
                raise _CannotRun
            if before is not None:
                self._compare_outputs(small, outputs, few, chosen)
                _refuse_draws(self.risk, before)
            self._compare_kinds(small)
            return not main.backward or self._compare_gradients(small, outputs, params)

    # ------------------------------------------------------------------ outputs, and axes of inputs
    def _compare_outputs(
        self, small: Recorder, outputs: Sequence[Tensor], few: Batch, chosen: Sequence[int]
    ) -> None:
        """Refuse examples whose outputs depend on the rest of the batch, and models that are
        random.
        """
        N = self.batch.num_examples
        at = torch.tensor(chosen, device=self.risk.device)
        rows = [F.unflatten(0, (N, -1)).index_select(0, at).flatten(0, 1) for F in self.outputs]
        away = self._difference(outputs, rows)
        if not away:
            return
        if few is self.batch:
            raise _random(self.risk, away)
        if refusal := small.refusal_of_one_row("the model does more with it than broadcast it"):
            raise refusal
        with torch.no_grad(), small.disabled:
            again = self.risk.run(self.batch)[0]
        if different := self._difference(again, self.outputs):
            raise _random(self.risk, different)
        raise UnsupportedError(
            f"The model's outputs for {len(chosen)} of {N} examples, by themselves, differ from "
            f"those in the batch by {away:.1e} of the norm: the examples of a batch depend on each "
            "other, so they have no gradients of their own. (Or code of the model depends on the "
            "number of examples, as `len(x)`; or a tensor of the input has as many rows as there "
            "are examples, and is not one of rows for examples.) EmpiricalRisk(..., check=False) "
            "continues without this check; results may be wrong."
        )

    def _difference(self, outputs: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        """The relative difference of outputs if it is more than rounding, else 0."""
        if [f.shape for f in outputs] != [F.shape for F in others]:
            return 1.0
        with torch.no_grad():
            flat = [torch.cat([t.flatten() for t in tensors]) for tensors in (outputs, others)]
            away = relative_difference(*flat)
        dtypes = [*self.recorder.dtypes, *[F.dtype for F in others]]
        return away if away > TOLERANCE[min([dtype.itemsize for dtype in dtypes])] else 0.0

    def _compare_kinds(self, small: Recorder) -> None:
        """Require that calls have the examples in the same inputs whatever the number of examples.

        A table of T rows looks like a row for each example in a batch of T examples, and in no
        other.
        """
        if small.num_examples == self.batch.num_examples:
            return
        for layer in small.layers:
            for use in layer.uses:
                here, there = (
                    {kind for kind in r.kinds if kind[0] == use.name}
                    for r in (small, self.recorder)
                )
                if there and not here <= there:
                    raise OutsideReads(
                        f"{layer.title} ({type(use.owner).__name__}) has the examples on other "
                        f"axes of its inputs in a batch of {small.num_examples} examples than in "
                        f"one of {self.batch.num_examples}: a table has as many rows as there are "
                        "examples. Give it an axis of size 1 in front, make it a buffer of the "
                        f"layer, or leave the parameters {list(layer.params)} out of `params`.",
                        layer.params,
                    )

    # ------------------------------------------------------------------------------------ gradients
    def _compare_gradients(
        self, small: Recorder, outputs: Sequence[Tensor], params: dict[str, Tensor]
    ) -> bool:
        """Compare `Σ_n r_n J_nᵀ v_n` by the layers' rules and by autograd, for a random vector at
        all outputs.

        Returns:
            Whether all layers have gradients that are more than rounding.
        """
        live = [f for f in outputs if f.requires_grad]
        if not live:
            return False
        generator = torch.Generator().manual_seed(2)
        vectors: list[Tensor] = []
        for f in live:
            dtype = torch.promote_types(f.dtype, torch.float32)
            vectors.append(torch.randn(f.shape, generator=generator, dtype=dtype).to(f.device))
        self.factors = _factors(small.num_examples).to(self.risk.device)
        ours = self._by_rules(small, live, vectors)
        theirs = self._by_autograd(small, live, vectors, params)
        layers = [layer for layer in small.layers if layer not in small.ignored]
        keys = [key for layer in layers for key in layer.params]
        doubles = any(layer.accumulation_dtype == torch.float64 for layer in layers)
        dtype = torch.float64 if doubles else torch.float32
        a, b = ([sums[key].to(dtype) for key in keys] for sums in (ours, theirs))
        differences = torch._foreach_sub(a, b)  # pyright: ignore[reportPrivateImportUsage]
        sent = [v.to(dtype) for v in vectors]
        norms = torch._foreach_norm([*differences, *b, *sent])  # pyright: ignore[reportPrivateImportUsage]
        numbers = torch.stack(norms).tolist()  # one wait for all of them
        away_of = dict(zip(keys, numbers[: len(keys)], strict=True))
        size_of = dict(zip(keys, numbers[len(keys) : 2 * len(keys)], strict=True))
        sizes = [math.hypot(*[size_of[key] for key in layer.params]) for layer in layers]
        largest = max([size for size in sizes if math.isfinite(size)], default=0.0)
        scale = math.hypot(*numbers[2 * len(keys) :])
        all_told = True
        wrong: list[tuple[Layer, float, float]] = []
        for layer, size in zip(layers, sizes, strict=True):
            away = math.hypot(*[away_of[key] for key in layer.params])
            tolerance = rounding_of(layer, small)
            # A gradient of which rounding is all that is left is compared with the others, or with
            # what was sent. What is not finite is refused with the statistic that it makes.
            floor = (
                0.1 * tolerance * largest + 10 * torch.finfo(layer.accumulation_dtype).eps * scale
            )
            if math.isfinite(away) and math.isfinite(size) and away > tolerance * size + floor:
                wrong.append((layer, size, away))
            self.risk.checked.errors[layer.name] = away / size if size > 0 else away
            all_told = all_told and not size <= floor
        if wrong:
            raise self._disagreement(small, wrong, ours)
        return all_told

    def _by_rules(
        self, small: Recorder, live: Sequence[Tensor], vectors: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """The sum by the layers' rules: rows of each example times its factor."""
        sums: dict[str, Tensor] = {}

        def add(batch: LayerBatch) -> None:
            layer = batch.layer
            try:
                sums.update(self._sum_of(batch))
            except (UnsupportedError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise OutsideReads(
                    f"{layer.title} ({type(layer.uses[0].owner).__name__}): the layer's rule "
                    f"failed on a recorded call, with {type(error).__name__}: {error}. {_CAUSES} "
                    f"Leave the parameters {list(layer.params)} out of `params`, or restructure "
                    "that part of the model.",
                    layer.params,
                ) from error

        small.begin(add)
        small.send(live, [vectors], keep_graph=True)
        like = {key: p for layer in small.layers for key, p in layer.params.items()}
        return {
            key: sums[key].reshape(p.shape) if key in sums else torch.zeros_like(p)
            for key, p in like.items()
        }

    def _sum_of(self, batch: LayerBatch) -> dict[str, Tensor]:
        layer = batch.layer
        for call in batch.calls:
            several = isinstance(call.grads, list)  # [1, few · positions, ...] each
            call.grads = (
                [self._scaled(g, 1) for g in call.grads] if several else self._scaled(call.grads, 1)
            )
        # The examples are taken for positions of one: their sum is one product.
        whole = LayerBatch(layer, batch.calls, 1)
        if not whole.whole:
            return {key: J[0, 0] for key, J in whole.param_grads().items()}
        # As blocks read it; a bias by itself is the last column.
        columns = [group.layout.matrix_shape[-1] for group in layer.groups]
        sums: dict[str, Tensor] = {}
        for group, J in zip(layer.groups, whole.per_example_grads.split(columns, -1), strict=True):
            sums |= group.layout.views(J.flatten())
        return sums

    def _by_autograd(
        self,
        small: Recorder,
        live: Sequence[Tensor],
        vectors: Sequence[Tensor],
        params: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """The sum by a plain backward pass: what is sent back from each example times its
        factor.
        """
        sent, power = small.in_range([self._scaled(v) for v in vectors], live)
        gradients = gradients_of(live, list(params.values()), sent, False)
        sums: dict[str, Tensor] = {}
        for (key, p), g in zip(params.items(), gradients, strict=True):
            g = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            sums[key] = g if power == 1 else g.float() / power
        return sums

    def _scaled(self, t: Tensor, axis: int = 0) -> Tensor:  # [..., few · positions, ...]
        """Rows of the examples, each times the factor of its example."""
        positions = t.shape[axis] // len(self.factors)
        factors = self.factors.to(t.dtype)
        factors = factors if positions == 1 else factors.repeat_interleave(positions)
        return t * factors.view(-1, *[1] * (t.ndim - axis - 1))

    def _disagreement(
        self, small: Recorder, wrong: Sequence[tuple[Layer, float, float]], ours: dict[str, Tensor]
    ) -> OutsideReads:
        """The error about layers whose gradients by rule and by autograd differ.

        Args:
            wrong: Each with the norm by autograd, and that of the difference.
        """
        (layer, size, away), *others = wrong
        norm = math.hypot(*[float(ours[key].norm()) for key in layer.params])
        called = layer in [small.layers[index] for index in small.by_layer]
        causes = (
            _CAUSES
            if called
            else "The layer was not called, so something else reads the parameters."
        )
        turned_off = (
            "EmpiricalRisk(..., check=False)"
            if self.recorder.repeatable
            else "KFACOptimizer(..., check=False)"
        )
        also = f" So do those of {[other.name for other, *_ in others]}." if others else ""
        return OutsideReads(
            f"{layer.title} ({type(layer.uses[0].owner).__name__}): gradients of "
            f"{list(layer.params)} for {small.num_examples} of {self.batch.num_examples} examples "
            f"have norm {norm:.4g} by the layer's rule and {size:.4g} by autograd, and differ by "
            f"{away:.2g}.{also} {causes} Leave them out of `params`, or restructure that part of "
            f"the model. {turned_off} continues without this check; results may be wrong.",
            [key for wrong_layer, *_ in wrong for key in wrong_layer.params],
        )


@lru_cache(64)
def _factors(number: int) -> Tensor:
    """A power of two for each example, as different as their number allows."""
    exponents = torch.arange(number) % 4 - 1
    order = torch.randperm(number, generator=torch.Generator().manual_seed(1))
    return torch.ldexp(torch.ones(number), exponents[order])


def rounding_of(layer: Layer, recorder: Recorder) -> float:
    """What passes as rounding for a layer's gradients."""
    sizes = [dtype.itemsize for dtype in recorder.dtypes] + [
        p.dtype.itemsize for p in layer.params.values()
    ]
    coarsest = min(sizes)
    return with_short_products(_ROUNDING[coarsest], coarsest, layer.device)


# ----------------------------------------------------------------------- two evaluations that agree
def require_repeatable(risk: EmpiricalRisk, batch: Batch) -> None:
    """Compare two evaluations of the model on three examples of a batch, once for each mode of its
    modules.

    Raises:
        RuntimeError: If they differ, or if a model in training mode draws random numbers at all: it
            may differ rarely.

    Cost: once, two forward passes of three examples, or of the batch where these can't be run by
    themselves.
    """
    modes = tuple(m.training for m in risk.model.modules())
    if not risk.options.check or modes in risk.checked.modes:
        return
    few = take_examples(batch, range(min(_FEW[0], batch.num_examples)))
    with kept_random_state(), kept_modules([*risk.model.modules()]), torch.no_grad():
        before = RandomState.now(risk.device)
        try:
            first = risk.run(few or batch)[0]
        except Exception:
            few, first = None, risk.run(batch)[0]
        for f, again in zip(first, risk.run(few or batch)[0], strict=True):
            away = relative_difference(again, f) if again.shape == f.shape else 1.0
            if away > TOLERANCE[f.element_size()]:
                raise _random(risk, away)
        _refuse_draws(risk, before)
    # before PyTorch 2.7 it gives weights that were cast without gradients to later passes
    torch.clear_autocast_cache()
    risk.checked.modes.add(modes)


def _refuse_draws(risk: EmpiricalRisk, before: RandomState) -> None:
    if RandomState.now(risk.device) != before and any(m.training for m in risk.model.modules()):
        names = training_modules(risk.model) or "code of its own"
        raise RuntimeError(
            f"The model draws random numbers in training mode, in {names}, so that evaluations may "
            "differ, if rarely: call model.eval(). check_deterministic=False takes them as they "
            "come."
        )


def _random(risk: EmpiricalRisk, away: float) -> RuntimeError:
    """The error about a model of which two evaluations differ."""
    random = training_modules(risk.model)
    cause = f"These modules are in training mode: {random}; call model.eval()." if random else ""
    return RuntimeError(
        f"Two evaluations of the model on the same examples differ, by {away:.1e} of the output's "
        f"norm. {cause or 'Does it draw random numbers, or count its calls?'} "
        "check_deterministic=False takes them as they come."
    )
