"""K-FAC in the `Trainer` of transformers, whose models compute their losses inside of their forward
pass, where no loss module is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import Trainer  # pyright: ignore[reportMissingImports]
else:
    Trainer = object  # the class beside this one in the bases of the user's


class KFACTrainerMixin(Trainer):
    """Lets a `Trainer` train with `KFACOptimizer`: `class KFACTrainer(KFACTrainerMixin, Trainer)`.

    The optimizer is given as `optimizers=(optimizer, None)`, made of the model and of the loss that
    the model computes from `labels`, as nn.CrossEntropyLoss(). Micro-batches of gradient
    accumulation are one update of the statistics; evaluation adds nothing to them. Checkpoints have
    the state of the optimizer: training that is resumed goes on bit for bit.

    Raises:
        TypeError: In training, if the optimizer of the trainer is another one.
        ValueError: In training, if label smoothing of trainer and loss differ; or if there are
            several processes, of which the optimizer was not told.

    Example:
        >>> class Trainer:  # that of transformers
        ...     args = optimizer = None
        ...
        ...     def compute_loss(self, model, inputs):
        ...         return model(inputs["input_ids"])
        >>> class KFACTrainer(KFACTrainerMixin, Trainer): ...
        >>> KFACTrainer().compute_loss(nn.Linear(2, 1).train(), {})
        Traceback (most recent call last):
            ...
        TypeError: The optimizer of the trainer is a NoneType; expected a KFACOptimizer, ...
    """

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; a batch of training is added to the statistics."""
        if not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        optimizer: Any = self.optimizer
        while hasattr(optimizer, "optimizer"):  # accelerate has put its own around it
            optimizer = optimizer.optimizer
        if not hasattr(optimizer, "listen"):
            raise TypeError(
                f"The optimizer of the trainer is a {type(optimizer).__name__}; expected a "
                "KFACOptimizer, KFACTrainer(model, ..., optimizers=(KFACOptimizer(model, loss), "
                "None))."
            )
        self._check_agreement(optimizer)
        with optimizer.listen(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _check_agreement(self, optimizer: Any) -> None:
        """Refuse arguments of the trainer that make another loss than the optimizer's."""
        risk = optimizer.curvature.risk
        smoothing = self.args.label_smoothing_factor
        for loss in risk.losses:
            of_loss = getattr(loss.loss, "label_smoothing", 0.0)
            if of_loss != smoothing:
                raise ValueError(
                    f"label_smoothing_factor={smoothing:g} of the trainer, and the optimizer's "
                    f"{loss.title} has label_smoothing={of_loss:g}: give both the same."
                )
        world = self.args.world_size
        if world > 1 and risk.processes.world == 1:
            raise ValueError(
                f"The trainer has {world} processes, and the optimizer knows of this one alone: "
                "their parameters would drift apart. Give it all of them, KFACOptimizer(model, "
                "loss, processes=Processes())."
            )
