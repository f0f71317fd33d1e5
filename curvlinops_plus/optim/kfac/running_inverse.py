"""The damped inverse of a curvature estimate that follows training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from warnings import warn

from torch import Tensor

from curvlinops_plus.blocks import BlockwiseLinearOperator, CurvatureEstimator
from curvlinops_plus.blocks.batch_pass import PassStart
from curvlinops_plus.blocks.heard_pass import HeardBatch
from curvlinops_plus.errors import CurvatureWarning, NumericsError, UnsupportedError, level_of_user
from curvlinops_plus.exact import GGN
from curvlinops_plus.linalg import HeuristicDamping, LinearOperator
from curvlinops_plus.optim.kfac.policies import number
from curvlinops_plus.risk import EmpiricalRisk, MonteCarlo
from curvlinops_plus.risk.reading import Batch

__all__ = ["RunningInverse"]

Inverse = Literal["exact", "factored"]


class RunningInverse:
    """An estimator that is fed by training, and the inverse of its curvature, which is renewed every few steps.

    Args:
        risk: Model, loss and parameters.
        approximation: As for `CurvatureEstimator`.
        default: As there.
        vectors: As there.
        decay: As there.
        statistics_every: Steps between two updates of the statistics.
        inverse_every: Steps between two refreshes of the inverse.
        inverse: "exact" is `(K + λI)⁻¹` with the damping of now; "factored" splits `λ` between the factors of each
            Kronecker product, with the damping of the refresh.
        power: Of `K + λI`; -1 but for special purposes.

    Attributes:
        steps: Steps that were taken.
        batches: Batches that were added since the last one.
    """

    def __init__(
        self,
        risk: EmpiricalRisk,
        approximation: Any,
        *,
        default: Any,
        vectors: Any,
        decay: float,
        statistics_every: int,
        inverse_every: int,
        inverse: Inverse,
        power: float,
    ) -> None:
        if inverse not in ("exact", "factored"):
            raise ValueError(f'inverse={inverse!r}; expected "exact" or "factored".')
        if inverse == "factored" and power != -1:
            raise ValueError(f'inverse="factored" and power={power:g}: only inverses can be damped factor by factor.')
        for name, every in (("statistics_every", statistics_every), ("inverse_every", inverse_every)):
            if not isinstance(every, int) or every < 1:
                raise ValueError(f"{name}={every!r}; expected a number of steps, at least 1.")
        self.risk = risk
        self.estimator = CurvatureEstimator(
            risk,
            approximation,
            default=default,
            vectors=MonteCarlo() if vectors is None else vectors,
            decay=decay,
            leave_out_uncalled=True,
        )
        self.statistics_every, self.inverse_every = statistics_every, inverse_every
        self.kind, self.power = inverse, number("-power", -power, strict=True) * -1
        self.steps = self.batches = 0
        self._before = 0  # examples before this step
        self._starts: PassStart | None = None  # of the call that is heard
        self._waiting: tuple[HeardBatch, Any] | None = None  # for its backward pass
        self._seen = _Again([])
        self._dampings: dict[str, float] | None = None  # of the last refresh
        self._inverse: tuple[Any, LinearOperator] | None = None  # with the dampings that it belongs to

    # ---------------------------------------------------------------------------------------------------- statistics
    @property
    def examples(self) -> int:
        """Examples that were added since the last step."""
        return self.estimator.examples - self._before

    @property
    def due(self) -> bool:
        """Whether this step updates the statistics."""
        return self.steps % self.statistics_every == 0 or not self.estimator.updates

    @contextmanager
    def listen(self, batch: Any, remember: bool = False) -> Iterator[None]:
        """Add a batch from the forward pass inside, if statistics are due; several of one step are one update.

        Args:
            batch: As for `CurvatureEstimator.listen`.
            remember: Keep it until the step, which evaluates the model on it again.
        """
        start = PassStart.now(self.risk.model) if remember else None
        if self.due:
            with self.estimator.listen(batch, decay=1.0 if self.batches else None):
                yield
            self.batches += 1
        else:
            yield
        if start is not None:
            self._seen.batches.append((self.risk.read(batch), start))

    def begin(self, X: Any, unpack: bool, remember: bool) -> HeardBatch | None:
        """Hear a call of the model whose targets come later, if the step needs it; for `add`."""
        try:
            self.finish()
        except (NumericsError, UnsupportedError) as error:  # as after an overflow, where a scaler has skipped the step
            warn(f"A batch was left out of the statistics. {error}", CurvatureWarning, stacklevel=level_of_user())
        if not self.due and not remember:
            return None
        self._starts = PassStart.now(self.risk.model) if remember else None
        return self.estimator.begin(X, unpack) if self.due else HeardBatch(self.risk.read_input(X, unpack))

    def add(self, heard: HeardBatch, y: Any) -> None:
        """Add what was heard, with these targets."""
        if self.due:
            self._waiting = heard, y
            vectors = self.estimator.vectors
            if not (vectors.of_loss and vectors.together):  # else gradients of the loss come with its backward pass
                self.finish()
        if self._starts is not None:
            self._seen.batches.append((replace(heard.batch, y=y), self._starts))

    def forget_examples(self) -> None:
        """Count examples from now on."""
        self._before = self.estimator.examples

    def finish(self) -> None:
        """Add the batch that waits for its backward pass, if there is one."""
        if self._waiting is not None:
            (heard, y), self._waiting = self._waiting, None
            heard.add(y, decay=1.0 if self.batches else None)
            self.batches += 1

    def require_batches(self, statistics: bool, again: bool) -> None:
        """Refuse a step that has not seen what it needs.

        Args:
            statistics: Refuse it if statistics are due, too.
            again: Whether the step evaluates the model on its batches again.

        Raises:
            RuntimeError: If it has not.
        """
        if (self.due and not self.batches and (statistics or not self.estimator.updates)) or (
            again and not self._seen.batches
        ):
            names = ", ".join(getattr(one.loss, "__name__", type(one.loss).__name__) for one in self.risk.losses)
            raise RuntimeError(
                f"No batch was seen since the last step: the loss that was given, {names}, was not called on an output "
                "of the model in training mode. Write `loss(model(X), y).backward()` with that loss; or, for losses "
                "that are functions and outputs that are changed before, call the model inside "
                "`with optimizer.listen((X, y)):`. strict=False steps with the statistics of before."
            )

    # ----------------------------------------------------------------------------------- the batches of this step again
    def loss(self) -> float:
        """The loss of this step's batches at the parameters of now."""
        return float(self.risk.with_data(self._seen).loss())

    def model_product(self, vectors: Mapping[str, Tensor], exact: bool) -> dict[str, Tensor]:
        """`C v`: with the exact GGN of this step's batches, or with the statistics of now."""
        if not exact:
            return self.product(vectors, fresh=True)
        G = GGN(self.risk.with_data(self._seen), check_deterministic=False)
        return G @ self._complete(G, vectors)

    # ------------------------------------------------------------------------------------------------------- inverse
    def refresh_if_due(self, dampings: Mapping[str, float]) -> bool:
        """Renew the inverse if its time has come.

        Args:
            dampings: Key of a parameter to the damping of its block.
        """
        due = self._dampings is None or self.steps % self.inverse_every == 0
        if due:
            self.estimator.refresh_by(lambda K: self._of_blocks(K, dampings))
            self._dampings, self._inverse = dict(dampings), None
        return due

    def apply(self, gradients: Mapping[str, Tensor], dampings: Mapping[str, float]) -> dict[str, Tensor]:
        """`(K + λI)ᵖ g` of the parameters that have gradient and curvature.

        Args:
            gradients: Key of a parameter to its gradient; where there is none, it counts as zero.
            dampings: As for `refresh_if_due`.
        """
        P = self._damped(dampings)
        for layout in self.estimator.refreshed.operator.layouts.values():
            with_gradient = [key for key in layout.names if key in gradients]
            if 0 < len(with_gradient) < len(layout.names):
                raise ValueError(
                    f"Of the parameters {list(layout.names)}, which are one block of the curvature, only "
                    f"{with_gradient} have a gradient. Freeze the others before the optimizer is made, or leave them "
                    "out of its `params`."
                )
        found = P @ self._complete(P, gradients)
        return {key: t for key, t in found.items() if key in gradients}

    def product(self, vectors: Mapping[str, Tensor], fresh: bool = False) -> dict[str, Tensor]:
        """`K v`, with the statistics of the last refresh, or with those of now; zero where there is no curvature."""
        K = self.estimator.operator if fresh else self.estimator.refreshed
        found = K @ self._complete(K, vectors)
        return {key: found[key] if key in found else v.new_zeros(v.shape) for key, v in vectors.items()}

    def _complete(self, operator: LinearOperator, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        params = self.risk.params
        return {
            key: vectors[key] if key in vectors else params[key].new_zeros(params[key].shape)
            for key in operator.in_space.names
        }

    def _damped(self, dampings: Mapping[str, float]) -> LinearOperator:
        """The inverse with these dampings; a factored one keeps those of the refresh."""
        if self.kind == "factored":
            assert self._dampings is not None
            dampings = self._dampings
        if self._inverse is None or self._inverse[0] != dampings:
            K = self.estimator.refreshed
            of_blocks = self._of_blocks(K, dampings)
            P = self.estimator.inverse(of_blocks) if self.power == -1 else K.power(self.power, of_blocks)
            self._inverse = dict(dampings), P
        return self._inverse[1]

    def _of_blocks(self, K: BlockwiseLinearOperator, dampings: Mapping[str, float]) -> Any:
        """The damping of each block, from those of its parameters."""
        found = {name: self._common(layout.names, dampings) for name, layout in K.operator.layouts.items()}
        return HeuristicDamping(found, min=0.0) if self.kind == "factored" else found

    @staticmethod
    def _common(keys: Any, dampings: Mapping[str, float]) -> float:
        found = {dampings[key] for key in keys}
        if len(found) > 1:
            raise ValueError(
                f"The parameters {list(keys)} are one block of the curvature, and have dampings (weight decay "
                f"included) {sorted(found)}. Put them in one group."
            )
        return found.pop()

    # --------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Everything that going on needs, between two steps."""
        return {"steps": self.steps, "dampings": self._dampings, "estimator": self.estimator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stopped."""
        self.estimator.load_state_dict(state["estimator"])
        self.steps, self._dampings, self._inverse = state["steps"], state["dampings"], None
        self.drop()
        self.batches, self._before, self._seen = 0, self.estimator.examples, _Again([])

    def drop(self) -> None:
        """Forget a batch that waits for its backward pass."""
        if self._waiting is not None:
            self._waiting[0].close()
            self._waiting = None

    def advance(self) -> None:
        """A step was taken."""
        self.steps, self.batches, self._before = self.steps + 1, 0, self.estimator.examples
        self._seen = _Again([])


@dataclass(frozen=True)
class _Again:
    """Batches of a step, each from the random state and buffers in which it was first seen."""

    batches: list[tuple[Batch, PassStart]]

    def __iter__(self) -> Iterator[Any]:
        for batch, start in self.batches:
            start.restore()
            yield batch
