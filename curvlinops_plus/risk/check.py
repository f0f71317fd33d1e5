"""The self-check: the gradient of an example is what plain autograd gives for the example alone.

Three examples of a batch are run one by one, through the plain model. Their outputs have to be their part of the
batch's outputs, and their gradients what the layers' rules make of the recorded batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from curvlinops_plus.errors import CurvatureWarning, UnsupportedError
from curvlinops_plus.random_state import RandomState, kept_random_state
from curvlinops_plus.risk.batches import Batch, gradients_of, take_examples
from curvlinops_plus.risk.layer_batch import LayerBatch
from curvlinops_plus.risk.preserve import TOLERANCE, eager, kept_modules, relative_difference, training_modules
from curvlinops_plus.risk.record import OutsideReads, Recorder
from curvlinops_plus.risk.risk import EmpiricalRisk

# How many examples are run alone in a batch of a new kind, and else one. Of 1 852 runs of networks made to mislead, one
# leaves 12 unnoticed, two leave 4.
_FEW = 3

_CAUSES = (
    "Does something else read the parameter, does another axis than the first of the layer's output carry the examples "
    "(say example_axis=), does the module compute something else when it is run again, does a hook change what it "
    "returns, or is something differentiated in the forward pass?"
)


def look_at(
    risk: EmpiricalRisk, recorder: Recorder, batch: Batch, outputs: Sequence[Tensor], repeatable: bool
) -> Look | None:
    """Begin to compare a recorded batch with three of its examples: the first, those of a new kind, and the 4ᵏth ones.

    A batch is of a new kind if other layers are called, if layers return one row for all examples where they didn't
    before, or get examples in other inputs.

    Args:
        outputs: Of the recorded pass, with their graph.
        repeatable: Whether two evaluations of the model have to agree; not so in training loops.

    Raises:
        UnsupportedError: If examples depend on each other, as by batch norm in training mode.
        RuntimeError: If two evaluations of the model disagree.

    Warns:
        CurvatureWarning: In training loops, of batch norm in training mode, where nothing is compared.
    """
    checked, check = risk.checked, risk.options.check
    checked.batches += 1
    kind = frozenset(recorder.kinds), batch.num_examples > 1, recorder.backward
    new = kind not in checked.seen
    power_of_four = checked.batches & (checked.batches - 1) == 0 and checked.batches.bit_length() % 2
    if not check or not (new or check == "every" or power_of_four):
        return None
    if not any(m.training and isinstance(m, _BatchNorm) for m in risk.model.modules()):
        return Look(risk, recorder, batch, outputs, repeatable, kind)
    norms = [name for name, m in risk.model.named_modules() if m.training and isinstance(m, _BatchNorm)]
    said = f"{norms} are batch norm in training mode: the examples of a batch depend on each other."
    if repeatable:
        raise UnsupportedError(f"{said} Call model.eval() first, or say EmpiricalRisk(..., check=False).")
    if "batch norm" not in checked.said:
        checked.said.add("batch norm")
        why = "Gradients go through the statistics of the batch, as in other K-FAC optimizers, and are not compared"
        warn(f"{said} {why} with those of single examples.", CurvatureWarning, stacklevel=2)
    return None


@dataclass(eq=False)
class Look:
    """A recorded batch, and three of its examples by themselves; arguments as for `look_at`.

    Of the first vector that is backpropagated through the batch, the gradients of the three by the layers' rules are
    added up, each times a number of its own: a row that is taken for another example's changes that sum. The same sum
    comes from a plain backward pass through the three, run one by one. If the model can't run one by itself (graphs,
    bags of tokens), the whole batch is run again instead; in training loops, also if one has other outputs than in the
    batch, the graph of the recorded pass stands in.

    Cost: a forward and a backward pass of three examples, with gradients of the parameters.
    """

    risk: EmpiricalRisk
    recorder: Recorder
    batch: Batch
    outputs: Sequence[Tensor]
    repeatable: bool
    kind: Any

    def __post_init__(self) -> None:
        self.N, generator = self.batch.num_examples, torch.Generator().manual_seed(0)
        # Not the first ones: what is mixed may be neighbours, or not.
        few = 1 if self.kind in self.risk.checked.seen else _FEW
        self.chosen: list[int] = sorted(torch.randperm(self.N, generator=generator)[:few].tolist())
        self.numbers = 0.5 + torch.rand(len(self.chosen), generator=generator).to(self.outputs[0])
        self.at = torch.tensor(self.chosen, device=self.risk.device)
        self.zero: set[str] | None = None  # layers of which no gradient has arrived so far

    # ------------------------------------------------------------------------------------------ what autograd gives
    def expect(self, read: Sequence[int], vectors: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """What plain autograd makes of the first of some vectors, from these outputs on; returns the same vectors."""
        self.ours: dict[str, Tensor] = {}
        self.theirs: dict[str, Tensor | None] = {}
        sent = dict(zip(read, first := next(vectors), strict=True))
        self.vectors = [sent[k].to(f) if k in sent else torch.zeros_like(f) for k, f in enumerate(self.outputs)]
        params, self.recorder.see = self.risk.params, self.see
        with self._undisturbed():
            if False not in [p.requires_grad and not p._backward_hooks for p in params.values()]:
                self.theirs = self._gradients(None, params)
            else:  # frozen ones have no gradients, and hooks are the user's; modules may ask for the type of parameters
                free: dict[str, Tensor] = {key: nn.Parameter(p.detach()) for key, p in params.items()}
                self.theirs = self.risk.at(free, lambda model: self._gradients(model, free))
        return chain([first], vectors)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Context for passes of the plain model."""
        kept = kept_random_state(), kept_modules([*self.risk.model.modules()])
        with self.recorder.disabled, torch.set_grad_enabled(self.recorder.backward), eager, kept[0], kept[1]:
            yield

    def _gradients(self, model: nn.Module | None, params: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """The sum of the three by the plain model; None is zero, and what can't be told is missing."""
        heads, sent = self._alone(model), [self._scaled(self._picked(v)) for v in self.vectors]
        if heads is None:
            whole = [torch.zeros_like(v).unflatten(0, (self.N, -1)) for v in self.vectors]
            for v, own in zip(whole, sent, strict=True):
                v[self.at] = own.unflatten(0, (len(self.chosen), -1))
            sent = [v.flatten(0, 1) for v in whole]
            heads = self.risk.run(self.batch, model)[0] if self.repeatable else self.outputs
            if away := self._difference(heads, self.outputs):
                raise _random(self.risk, away)
            if not self.repeatable:
                params = {key: p for key, p in self.risk.params.items() if p.requires_grad}
        live = [(f, v) for f, v in zip(heads, sent, strict=True) if f.requires_grad]
        if not live or not params:
            return dict.fromkeys(params)
        fs, vs = zip(*live, strict=True)
        return dict(zip(params, gradients_of(fs, [*params.values()], vs, heads is self.outputs), strict=True))

    def _alone(self, model: nn.Module | None) -> Sequence[Tensor] | None:
        """What the losses read of the three, [three · positions, ...], each by itself.

        None if the model can't run one, or returns something of another form; in training loops also if it returns
        something else than in the batch.
        """
        before, alone, theirs = RandomState.now(self.risk.device), list[Any](), [*map(self._picked, self.outputs)]
        for n in self.chosen:
            if (one := take_examples(self.batch, [n])) is None:
                return None
            try:
                alone.append(self.risk.run(one, model)[0])
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the whole batch, which is run instead, raises what else is wrong
                return None
            if [f.shape for f in alone[-1]] != [(len(F) // self.N, *F.shape[1:]) for F in self.outputs]:
                return None
        heads = [torch.cat(fs) for fs in zip(*alone, strict=True)]
        if away := self._difference(heads, theirs):
            if not self.repeatable:
                return None
            if refusal := self.recorder.refusal_of_one_row("the model does more with it than broadcast it"):
                raise refusal
            with torch.no_grad():
                again = self.risk.run(self.batch)[0]
            if different := self._difference(again, self.outputs):
                raise _random(self.risk, different)
            raise UnsupportedError(
                f"The model's outputs for {len(self.chosen)} of {self.N} examples, each by itself, differ from those "
                f"in the batch by {away:.1e} of the norm: the examples of a batch depend on each other, so they have "
                "no gradients of their own. (Or code of the model depends on the number of examples, as `len(x)`; or "
                "a tensor of the input has as many rows as there are examples, and is not one of rows for examples.) "
                "EmpiricalRisk(..., check=False) goes on without this check."
            )
        if self.repeatable:
            _refuse_draws(self.risk, before)
        return heads

    def _picked(self, t: Tensor) -> Tensor:  # [N · positions, ...] -> [three · positions, ...]
        """The rows of the three."""
        if len(t) == self.N:
            return t.index_select(0, self.at)
        return t.unflatten(0, (self.N, -1)).index_select(0, self.at).flatten(0, 1)

    def _scaled(self, t: Tensor, axis: int = 0) -> Tensor:  # [..., three · positions, ...]
        """Rows of the three, each times the number of its example."""
        numbers, positions = self.numbers.to(t), t.shape[axis] // len(self.chosen)
        numbers = numbers if positions == 1 else numbers.repeat_interleave(positions)
        return t * numbers.view(-1, *[1] * (t.ndim - axis - 1))

    def _difference(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        """The relative difference of outputs if it is more than rounding, else 0."""
        if [f.shape for f in one] != [F.shape for F in other]:
            return 1.0
        with torch.no_grad():
            away = relative_difference(*[torch.cat([t.flatten() for t in ts]) for ts in (one, other)])
        dtypes = [*self.recorder.dtypes, *[F.dtype for F in other]]
        return away if away > TOLERANCE[min([dtype.itemsize for dtype in dtypes])] else 0.0

    # -------------------------------------------------------------------------------------- what the layers' rules give
    def see(self, batch: LayerBatch) -> None:
        """Take the same sum of a layer, by key, from what it gets of the first vector.

        Raises:
            OutsideReads: If the layer's rule fails.
        """
        layer = batch.layer
        if not self.ours.keys().isdisjoint(layer.params):
            return

        try:
            calls = batch.examples(self.at, slice(1)).calls
            for call in calls:
                several = isinstance(call.grads, list)  # [1, three · positions, ...]
                call.grads = [self._scaled(g, 1) for g in call.grads] if several else self._scaled(call.grads, 1)
            one = LayerBatch(layer, calls, 1)  # three examples are taken for positions of one: their sum is one product
            if one.whole:  # as blocks read it; a bias by itself is the last column
                columns = [group.layout.matrix_shape[-1] for group in layer.groups]
                for group, J in zip(layer.groups, one.per_example_grads.split(columns, -1), strict=True):
                    self.ours |= group.layout.views(J.flatten())
            else:
                self.ours |= {key: J[0, 0] for key, J in one.param_grads().items()}
        except (UnsupportedError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise OutsideReads(
                f"{layer.title} ({type(layer.uses[0].owner).__name__}): the layer's rule failed on a recorded call, "
                f"with {type(error).__name__}: {error}. {_CAUSES} Leave the parameters {list(layer.params)} out of "
                "`params`, or restructure that part of the model.",
                layer.params,
            ) from error

    def compare(self) -> None:
        """Refuse layers whose gradients by rule and by autograd differ.

        Raises:
            OutsideReads: If a layer's rule disagrees; names layer and parameter.
        """
        self.recorder.see = None  # else it would hold the graph, whose hooks hold the recorder
        layers = [layer for layer in self.recorder.layers if self.theirs.keys() >= layer.params.keys()]
        widest = torch.float64 if torch.float64 in [layer.accumulation_dtype for layer in layers] else torch.float32
        mine, theirs, zero = list[Tensor](), list[Tensor](), set[str]()
        for key, p in chain.from_iterable(layer.params.items() for layer in layers):
            for g, into in ((self.ours.get(key), mine), (self.theirs[key], theirs)):
                g = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
                into.append(g if g.dtype == widest and g.shape == p.shape else g.to(widest).reshape(p.shape))
        away = torch._foreach_sub(mine, theirs) if mine else ()  # pyright: ignore[reportPrivateImportUsage]
        sent = torch.cat([v.flatten() for v in self.vectors]) if len(self.vectors) > 1 else self.vectors[0]
        norms = torch._foreach_norm([sent.to(widest), *away, *theirs])  # pyright: ignore[reportPrivateImportUsage]
        scale, *found = torch.stack(norms).tolist()
        pairs = zip(found[: len(away)], found[len(away) :], strict=True)
        sizes = [[math.hypot(*n) for n in zip(*islice(pairs, len(layer.params)))] for layer in layers]
        largest = max([size for _, size in sizes if math.isfinite(size)], default=0.0)
        coarsest = min([dtype.itemsize for dtype in self.recorder.dtypes], default=8)
        for layer, (away, size) in zip(layers, sizes, strict=True):
            tolerance = TOLERANCE[min(coarsest, *[p.dtype.itemsize for p in layer.params.values()])]
            # A gradient of which rounding is all that is left is compared with the others, or with the vectors: with
            # one class, say, that is all. What is not finite is refused with the statistic that it makes.
            rounding = torch.finfo(layer.accumulation_dtype).eps * scale
            floor = 0.1 * tolerance * largest + (10 * rounding if math.isfinite(rounding) else 0.0)
            if math.isfinite(away) and not away <= tolerance * size + floor:
                own = math.hypot(*[float(self.ours[key].norm()) for key in layer.params if key in self.ours])
                called = layer in [self.recorder.layers[index] for index in self.recorder.by_layer]
                raise OutsideReads(
                    f"{layer.title} ({type(layer.uses[0].owner).__name__}): gradients of {list(layer.params)} for "
                    f"{len(self.chosen)} of {self.N} examples have norm {own:.4g} by the layer's rule and {size:.4g} "
                    f"by autograd, and differ by {away:.2g}. "
                    f"{_CAUSES if called else 'The layer was not called, so something else reads the parameters.'} "
                    "Leave them out of `params`, or restructure that part of the model. EmpiricalRisk(..., "
                    "check=False) goes on without this check, and with numbers that are wrong.",
                    layer.params,
                )
            self.risk.checked.errors[layer.name] = away / size if size > 0 else away
            if not size > 0:
                zero.add(layer.name)
        self.zero = zero if self.zero is None else self.zero & zero

    def finish(self) -> None:
        """All vectors were sent: a kind of batch in which each layer got a gradient need not be checked again."""
        if not self.recorder.backward:
            with self._undisturbed():
                self._alone(None)
        if not self.zero:
            self.risk.checked.seen.add(self.kind)


# ------------------------------------------------------------------------------------------- two evaluations that agree
def require_repeatable(risk: EmpiricalRisk, batch: Batch) -> None:
    """Compare two evaluations of the model on three examples of a batch, once for each mode of its modules.

    Raises:
        RuntimeError: If they differ, or if a model in training mode draws random numbers at all: it may differ rarely.

    Cost: once, two forward passes of three examples, or of the batch where these can't be run by themselves.
    """
    modes = tuple(m.training for m in risk.model.modules())
    if not risk.options.check or modes in risk.checked.modes:
        return
    few = take_examples(batch, range(min(_FEW, batch.num_examples)))
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
    torch.clear_autocast_cache()  # before PyTorch 2.7 it gives weights that were cast without gradients to later passes
    risk.checked.modes.add(modes)


def _refuse_draws(risk: EmpiricalRisk, before: RandomState) -> None:
    if RandomState.now(risk.device) != before and any(m.training for m in risk.model.modules()):
        names = training_modules(risk.model) or "code of its own"
        raise RuntimeError(
            f"The model draws random numbers in training mode, in {names}, so that evaluations may differ, if rarely: "
            "call model.eval(). check_deterministic=False takes them as they come."
        )


def _random(risk: EmpiricalRisk, away: float) -> RuntimeError:
    """The error about a model of which two evaluations differ."""
    random = training_modules(risk.model)
    cause = f"These modules are in training mode: {random}; call model.eval()." if random else ""
    return RuntimeError(
        f"Two evaluations of the model on the same examples differ, by {away:.1e} of the output's norm. "
        f"{cause or 'Does it draw random numbers, or count its calls?'} check_deterministic=False takes them as they "
        "come."
    )
