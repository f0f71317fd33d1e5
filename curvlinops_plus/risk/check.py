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
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from curvlinops_plus.contexts import Endings, GradMode
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.random_state import RandomState
from curvlinops_plus.risk.backward_pass import in_range
from curvlinops_plus.risk.batches import Batch, gradients_of, on_device, take_examples
from curvlinops_plus.risk.calls import OutsideReads
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.layers import Layer
from curvlinops_plus.risk.preserve import (
    TOLERANCE,
    eager,
    kept_modules,
    kept_random_state,
    relative_difference,
    training_modules,
    with_short_products,
)
from curvlinops_plus.risk.risk import EmpiricalRisk
from curvlinops_plus.risk.stack_batch import batch_of

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
    kind = recorder.reads, frozenset(recorder.last.kinds), batch.num_examples > 1, recorder.backward
    is_known = kind in checked.kinds and checked.batches not in _REGULARLY
    # Of experts, other ones run in every batch: each of them is compared once.
    is_known = is_known and recorder.visited <= checked.compared
    if not risk.options.check or (is_known and risk.options.check != "every"):
        return
    batch_norms: dict[str, _BatchNorm] = {}
    for name, module in risk.model.named_modules():
        if module.training and isinstance(module, _BatchNorm):
            batch_norms[name] = module
    if batch_norms and recorder.repeatable:
        raise UnsupportedError(
            f"{[*batch_norms]} are batch norm in training mode: the examples of a batch depend on "
            "each other. Call model.eval() first, or pass EmpiricalRisk(..., check=False)."
        )
    untracked = [name for name, norm in batch_norms.items() if norm.running_mean is None]
    if untracked:
        _warn_once(
            risk,
            f"{untracked} are batch norm in training mode: the examples of a batch depend on each "
            "other. Without running statistics the gradients of layers can't be compared with "
            "autograd's.",
        )
        return
    if _BatchCheck(risk, recorder, batch, outputs, [*batch_norms.values()]).passes():
        checked.kinds.add(kind)


def _warn_once(risk: EmpiricalRisk, message: str) -> None:
    if message not in risk.checked.warnings:
        risk.checked.warnings.add(message)
        warn(message, CurvatureWarning, stacklevel=level_of_user())


@dataclass(eq=False)
class _BatchCheck:
    """One comparison; arguments as for `check_batch`.

    A row that is taken for another example's changes no sum over examples. So each example has a
    factor: on one side rows of the layers are multiplied by it, on the other what is sent back.
    Factors are powers of two, which commute with rounding.

    Args:
        batch_norms: Those in training mode, which use their running statistics meanwhile: layers,
            reads and axes stay the same.
    """

    risk: EmpiricalRisk
    recorder: Recorder
    batch: Batch
    outputs: Sequence[Tensor]
    batch_norms: Sequence[nn.Module] = ()
    factors: Tensor = field(init=False, repr=False)

    def passes(self) -> bool:
        """Whether every layer got a gradient, and it was right.

        Raises:
            See `check_batch`.
        """
        N = self.batch.num_examples
        order = torch.randperm(N, generator=torch.Generator().manual_seed(0), device="cpu").tolist()
        # Those first that visit an expert which was not compared.
        order = [*dict.fromkeys([*self._visitors(), *order])]
        numbers = [n for n in _FEW if n < N] or [N]
        disagreement: OutsideReads | None = None
        # The model and the batch's own recording stay as they are.
        modules = [*self.risk.model.modules()]
        with (
            Endings() as endings,
            GradMode(self.recorder.backward),
            kept_random_state(),
            kept_modules(modules),
        ):
            eager.enter(endings)
            endings.enter_context(self.recorder.disabled)
            for norm in self.batch_norms:
                norm.training = False
            for number in numbers:
                # Not the first ones: what is mixed may be neighbours, or not.
                chosen = sorted(order[:number])
                few = take_examples(self.batch, chosen)
                if few is None:
                    break
                try:
                    passed = self._compare(few, chosen)
                except OutsideReads as error:
                    disagreement = disagreement or error
                    continue
                if passed is not None:
                    return passed
                # The whole batch, which is run instead, raises what else is wrong.
                break
            if disagreement is not None:
                raise disagreement
            try:
                return bool(self._compare(self.batch, list(range(N))))
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

    def _visitors(self) -> Iterator[int]:
        """An example for each expert that was not compared yet."""
        for call in self.recorder.last.calls:
            layer = self.recorder.layers[call.layer]
            if call.routed is not None and layer.name not in self.risk.checked.compared:
                yield from call.routed.examples[:1].tolist()

    def _compare(self, few: Batch, chosen: Sequence[int]) -> bool | None:
        """Run and record these examples, and compare what was recorded; None if the model does not
        run on them.
        """
        model: nn.Module | None = None
        params: dict[str, Tensor] = self.risk.params
        are_free = all(p.requires_grad and not p._backward_hooks for p in params.values())
        replaces = self.recorder.backward and not are_free
        if replaces:
            # Frozen ones have no gradients, and hooks are the user's.
            model = self.risk.model
            params = {key: nn.Parameter(p.detach()) for key, p in params.items()}
        small = self.recorder.beside(params)
        is_part = few is not self.batch
        random_state = RandomState.now(self.risk.device) if self.recorder.repeatable else None
        with self.risk.placed(params) if replaces else nullcontext(), small.attached():
            try:
                with small.recording(few):
                    outputs = self.risk.run(few, model)[0]
            except (UnsupportedError, torch.OutOfMemoryError):
                raise
            except Exception:
                if is_part:
                    return None
                raise
            N = self.batch.num_examples
            expected = [(len(F) // N * len(chosen), *F.shape[1:]) for F in self.outputs]
            has_rows = [f.shape for f in outputs] == expected
            if not (is_part and has_rows):  # else there are as many for each example
                self._compare_tables(small, outputs, few, model)
            if is_part and not has_rows:
                return None
            if random_state is not None:
                self._compare_outputs(small, outputs, few, chosen)
                _refuse_draws(self.risk, random_state)
            self._compare_kinds(small)
            return not small.backward or self._compare_gradients(small, outputs, params)

    # ------------------------------------------------------------------ outputs, and axes of inputs
    def _compare_tables(
        self, small: Recorder, outputs: Sequence[Tensor], few: Batch, model: nn.Module | None
    ) -> None:
        """Require that outputs have the same shapes where no row is expanded to one for each
        example: a row may also be all examples, on another axis.
        """
        refusal = small.last.refusal_of_one_row("the model's outputs have other shapes without it")
        if refusal is None:
            return
        with GradMode(False), small.disabled:
            plain = self.risk.run(few, model)[0]
        if [f.shape for f in outputs] != [F.shape for F in plain]:
            raise refusal

    def _compare_outputs(
        self, small: Recorder, outputs: Sequence[Tensor], few: Batch, chosen: Sequence[int]
    ) -> None:
        """Refuse examples whose outputs depend on the rest of the batch, and models that are
        random.
        """
        N = self.batch.num_examples
        index = on_device(torch.tensor(chosen, device="cpu"), self.risk.device)
        rows = [F.unflatten(0, (N, -1)).index_select(0, index).flatten(0, 1) for F in self.outputs]
        difference = self._difference(outputs, rows)
        if not difference:
            return
        if few is self.batch:
            raise _random(self.risk, difference)
        refusal = small.last.refusal_of_one_row("the model does more with it than broadcast it")
        if refusal is not None:
            raise refusal
        with GradMode(False), small.disabled:
            second_outputs = self.risk.run(self.batch)[0]
        second_difference = self._difference(second_outputs, self.outputs)
        if second_difference:
            raise _random(self.risk, second_difference)
        raise UnsupportedError(
            f"The model's outputs for {len(chosen)} of {N} examples, by themselves, differ from "
            f"those in the batch by {difference:.1e} of the norm: the examples of a batch depend "
            "on each other, so they have no gradients of their own. (Or code of the model depends "
            "on the number of examples, as `len(x)`; or a tensor of the input has as many rows as "
            "there are examples, and is not one of rows for examples.) EmpiricalRisk(..., "
            "check=False) continues without this check; results may be wrong."
        )

    def _difference(self, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """The relative difference of outputs if it is more than rounding, else 0."""
        if [f.shape for f in outputs] != [F.shape for F in expected]:
            return 1.0
        with GradMode(False):
            f = torch.cat([t.flatten() for t in outputs])
            F = torch.cat([t.flatten() for t in expected])
            difference = relative_difference(f, F)
        dtypes = self.recorder.last.dtypes.union([F.dtype for F in expected])
        coarsest = min([dtype.itemsize for dtype in dtypes])
        return difference if difference > TOLERANCE[coarsest] else 0.0

    def _compare_kinds(self, small: Recorder) -> None:
        """Require that calls have the examples in the same inputs whatever the number of examples.

        A table of T rows looks like a row for each example in a batch of T examples, and in no
        other.
        """
        if small.last.num_examples == self.batch.num_examples:
            return
        for layer in small.layers:
            for use in layer.uses:
                kinds = {kind for kind in self.recorder.last.kinds if kind[0] == use.name}
                few_kinds = {kind for kind in small.last.kinds if kind[0] == use.name}
                if kinds and not few_kinds <= kinds:
                    raise OutsideReads(
                        f"{use.title} has the examples on other axes of its inputs in a batch of "
                        f"{small.last.num_examples} examples than in one of "
                        f"{self.batch.num_examples}: a table has as many rows as there are "
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
        vectors = []
        for f in live:
            dtype = torch.promote_types(f.dtype, torch.float32)
            normal = torch.randn(f.shape, generator=generator, dtype=dtype, device="cpu")
            vectors.append(on_device(normal, f.device))
        self.factors = on_device(_factors(small.last.num_examples), self.risk.device)
        ours: dict[str, Tensor] = {}
        back = small.backward_pass(partial(self._add_by_rule, ours))
        back.send(live, [vectors], keep_graph=True)
        # By plain autograd, what is sent back from each example is multiplied by its factor.
        theirs: dict[str, Tensor] = {}
        sent, power = in_range([self._scaled(v) for v in vectors], live, small.last.dtypes)
        gradients = gradients_of(live, list(params.values()), sent, False)
        for (key, p), g in zip(params.items(), gradients):
            if g is None:
                g = torch.zeros_like(p)
            if g.is_sparse:
                g = g.to_dense()
            theirs[key] = g if power == 1 else g.float() / power
        return self._agree(small, ours, theirs, vectors)

    def _add_by_rule(self, sums: dict[str, Tensor], batch: LayerBatch) -> None:
        """Add the gradients of a layer by its rule: rows of each example times its factor."""
        layer = batch.layer
        try:
            for call in batch.calls:
                # [1, few · positions, ...] each
                if call.routed is None:
                    call.gradients = [self._scaled(g, 1) for g in call.gradients]
                    continue
                factors = self.factors[call.routed.examples]
                call.gradients = [
                    g * factors.to(g.dtype).view(-1, *[1] * (g.ndim - 2)) for g in call.gradients
                ]
                call.routed = call.routed.of_one_example()
            # The examples are taken for positions of one: their sum is one product.
            example = batch_of(layer, batch.calls, 1)
            if example.whole:
                # As blocks read it; a bias by itself is the last column.
                columns = [group.layout.matrix_shape[-1] for group in layer.groups]
                matrices = example.per_example_grads.split(columns, -1)
                for group, J in zip(layer.groups, matrices):
                    sums |= group.layout.views(J.flatten())
            else:
                sums |= {key: J[0, 0] for key, J in example.param_grads().items()}
        except (UnsupportedError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise OutsideReads(
                f"{layer.title} ({layer.type_name}): the layer's rule failed on "
                f"a recorded call, with {type(error).__name__}: {error}. {_CAUSES} Leave the "
                f"parameters {list(layer.params)} out of `params`, or restructure that part of the "
                "model.",
                layer.params,
            ) from error

    def _agree(
        self,
        small: Recorder,
        ours: dict[str, Tensor],
        theirs: dict[str, Tensor],
        vectors: Sequence[Tensor],
    ) -> bool:
        """Refuse layers whose gradients by rule and by autograd differ by more than rounding.

        Returns:
            Whether all layers have gradients that are more than rounding.
        """
        layers = [layer for layer in small.layers if layer not in small.ignored]
        for layer in layers:
            for key, p in layer.params.items():
                ours[key] = ours[key].reshape(p.shape) if key in ours else torch.zeros_like(p)
        layer_norms, norm_sent = _norms(layers, ours, theirs, vectors)
        largest = max([norms.size for norms in layer_norms if norms.size < math.inf], default=0.0)
        called = {small.layers[index] for index in small.last.by_layer}
        all_above = True
        wrong = []
        for norms in layer_norms:
            # ‖ours - theirs‖ ≤ τ ‖theirs‖ + floor, floor = 0.1 τ max_layers ‖theirs‖ + 10 ε ‖v‖: a
            # gradient of which rounding is all that is left is compared with the others, or with
            # what was sent. What is not finite is refused with the statistic that it makes.
            layer, difference, size = norms
            tolerance = rounding_of(layer, small)
            epsilon = torch.finfo(layer.accumulation_dtype).eps
            floor = 0.1 * tolerance * largest + 10 * epsilon * norm_sent
            if math.isfinite(size) and tolerance * size + floor < difference < math.inf:
                wrong.append(norms)
            self.risk.checked.errors[layer.name] = difference / size if size > 0 else difference
            if size > floor:
                self.risk.checked.compared.add(layer.name)
            # A few examples may not reach every expert.
            is_asked = not self.recorder.gathers or layer in called
            all_above = all_above and not (is_asked and size <= floor)
        if wrong:
            raise self._disagreement(small, wrong, ours)
        return all_above

    def _scaled(self, t: Tensor, axis: int = 0) -> Tensor:  # [..., few · positions, ...]
        """Rows of the examples, each times the factor of its example."""
        positions = t.shape[axis] // len(self.factors)
        factors = self.factors.to(t.dtype)
        if positions != 1:
            factors = factors.repeat_interleave(positions)
        return t * factors.view(-1, *[1] * (t.ndim - axis - 1))

    def _disagreement(
        self, small: Recorder, wrong: Sequence[_Norms], ours: dict[str, Tensor]
    ) -> OutsideReads:
        """The error about layers whose gradients by rule and by autograd differ."""
        layer = wrong[0].layer
        norm = math.hypot(*[float(ours[key].norm()) for key in layer.params])
        causes = "The layer was not called, so something else reads the parameters."
        if small.layers.index(layer) in small.last.by_layer:
            causes = _CAUSES
        owner = "EmpiricalRisk" if self.recorder.repeatable else "KFACOptimizer"
        names = [norms.layer.name for norms in wrong[1:]]
        also = f" So do those of {names}." if names else ""
        return OutsideReads(
            f"{layer.title} ({layer.type_name}): gradients of {list(layer.params)} for "
            f"{small.last.num_examples} of {self.batch.num_examples} examples have norm "
            f"{norm:.4g} by the layer's rule and {wrong[0].size:.4g} by autograd, and differ by "
            f"{wrong[0].difference:.2g}.{also} {causes} Leave them out of `params`, or restructure "
            f"that part of the model. {owner}(..., check=False) continues without this check; "
            "results may be wrong.",
            [key for norms in wrong for key in norms.layer.params],
        )


class _Norms(NamedTuple):
    """Norms of what autograd gives for a layer, and of its difference from what the rule gives."""

    layer: Layer
    difference: float
    size: float


def _norms(
    layers: Sequence[Layer],
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    vectors: Sequence[Tensor],
) -> tuple[list[_Norms], float]:
    """Norms for each layer, and that of the vectors, with one wait for all of them."""
    keys = [key for layer in layers for key in layer.params]
    dtypes = {layer.accumulation_dtype for layer in layers}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    expected = [theirs[key].to(dtype) for key in keys]
    gradients = [ours[key].to(dtype) for key in keys]
    differences = torch._foreach_sub(gradients, expected)  # pyright: ignore[reportPrivateImportUsage]
    tensors = [*differences, *expected, *[v.to(dtype) for v in vectors]]
    numbers = iter(torch.stack(torch._foreach_norm(tensors)).tolist())  # pyright: ignore[reportPrivateImportUsage]
    difference_of = dict(zip(keys, numbers))
    size_of = dict(zip(keys, numbers))
    norms = []
    for layer in layers:
        difference = math.hypot(*[difference_of[key] for key in layer.params])
        size = math.hypot(*[size_of[key] for key in layer.params])
        norms.append(_Norms(layer, difference, size))
    return norms, math.hypot(*numbers)


@lru_cache(64)
def _factors(number: int) -> Tensor:
    """A power of two for each example, as different as their number allows."""
    exponents = torch.arange(number, device="cpu") % 4 - 1
    order = torch.randperm(number, generator=torch.Generator().manual_seed(1), device="cpu")
    return torch.ldexp(torch.ones(number, device="cpu"), exponents[order])


def rounding_of(layer: Layer, recorder: Recorder) -> float:
    """What passes as rounding for a layer's gradients."""
    dtypes = recorder.last.dtypes.union([p.dtype for p in layer.params.values()])
    coarsest = min([dtype.itemsize for dtype in dtypes])
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
    few = take_examples(batch, range(min(_FEW[0], batch.num_examples))) or batch
    with kept_random_state(), kept_modules([*risk.model.modules()]), GradMode(False):
        before = RandomState.now(risk.device)
        try:
            outputs = risk.run(few)[0]
        except Exception:
            few = batch
            outputs = risk.run(few)[0]
        for f, again in zip(outputs, risk.run(few)[0], strict=True):
            difference = relative_difference(again, f) if again.shape == f.shape else 1.0
            if difference > TOLERANCE[f.element_size()]:
                raise _random(risk, difference)
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


def _random(risk: EmpiricalRisk, difference: float) -> RuntimeError:
    """The error about a model of which two evaluations differ."""
    random = training_modules(risk.model)
    cause = f"These modules are in training mode: {random}; call model.eval()." if random else ""
    return RuntimeError(
        f"Two evaluations of the model on the same examples differ, by {difference:.1e} of the "
        f"output's norm. {cause or 'Does it draw random numbers, or count its calls?'} "
        "check_deterministic=False takes them as they come."
    )
