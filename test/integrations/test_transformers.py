"""K-FAC in the Trainer of transformers; run where that is installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_plus import KFACOptimizer, LevenbergMarquardt
from curvlinops_plus.integrations.transformers import KFACTrainerMixin
from test.helpers import seeded

try:
    import accelerate
    import transformers
except ImportError:
    accelerate = transformers = None

needed = pytest.mark.skipif(
    accelerate is None, reason="transformers or accelerate is absent: pip install transformers"
)
SIZES: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
DROPOUT: dict[str, Any] = {"resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def language_model(**config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=12, bos_token_id=0, eos_token_id=0, **SIZES, **config)
    )


def examples(n: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 12, (n, 6), generator=seeded(1))
    return [{"input_ids": row, "attention_mask": row > 0, "labels": row} for row in ids]


def trained(
    folder: Path, options: dict[str, Any], resume: str | None = None, **of_optimizer: Any
) -> tuple[Tensor, KFACOptimizer]:
    """Parameters after ten steps of a trainer that evaluates and saves after five."""

    class KFACTrainer(KFACTrainerMixin, transformers.Trainer): ...

    model = language_model(**DROPOUT)
    loss = nn.CrossEntropyLoss(label_smoothing=options.get("label_smoothing_factor", 0.0))
    optimizer = KFACOptimizer(model, loss, **{"lr": 0.05, **of_optimizer})
    arguments = transformers.TrainingArguments(
        str(folder),
        **{
            "max_steps": 10,
            "eval_strategy": "steps",
            "eval_steps": 5,
            "save_steps": 5,
            "per_device_train_batch_size": 4,
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": [],
            "logging_strategy": "no",
            **options,
        },
    )
    trainer = KFACTrainer(
        model,
        arguments,
        train_dataset=examples(32),
        eval_dataset=examples(4),
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=resume)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


@needed
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
@pytest.mark.parametrize(
    ("options", "of_optimizer", "examples_of_a_step"),
    [
        ({}, {}, 4),
        ({"max_grad_norm": 0.1, "bf16": True}, {"statistics_every": 2}, 4),
        ({"gradient_accumulation_steps": 2}, {"damping": LevenbergMarquardt(0.1, interval=3)}, 8),
        ({"label_smoothing_factor": 0.1}, {}, 4),
    ],
    ids=["plain", "clipped, bfloat16", "accumulated", "smoothed"],
)
def test_resumed_training_goes_on_bit_for_bit(
    tmp_path: Path, options: dict[str, Any], of_optimizer: dict[str, Any], examples_of_a_step: int
) -> None:
    whole, optimizer = trained(tmp_path / "whole", options, **of_optimizer)
    assert optimizer.steps == 10
    every = of_optimizer.get("statistics_every", 1)
    micro = options.get("gradient_accumulation_steps", 1)
    assert optimizer.curvature.updates == 10 * micro // every
    assert optimizer.curvature.examples == 10 * examples_of_a_step // every
    checkpoint = str(tmp_path / "whole" / "checkpoint-5")
    resumed, optimizer = trained(tmp_path / "resumed", options, checkpoint, **of_optimizer)
    assert optimizer.steps == 10
    assert torch.equal(resumed, whole)
    before = torch.cat([p.detach().flatten() for p in language_model(**DROPOUT).parameters()])
    assert not torch.allclose(whole, before, atol=1e-4)


@needed
@pytest.mark.filterwarnings("ignore:.*get their exact diagonal")
def test_a_trainer_takes_the_steps_of_a_loop(tmp_path: Path) -> None:
    """Without dropout and shuffling, the same as a loop that is written out."""

    class Trainer(KFACTrainerMixin, transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    ends = []
    for in_trainer in (True, False):
        model = language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), lr=0.05)
        if in_trainer:
            arguments = transformers.TrainingArguments(
                str(tmp_path),
                max_steps=4,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                save_strategy="no",
                logging_strategy="no",
                per_device_train_batch_size=4,
                use_cpu=True,
                disable_tqdm=True,
                report_to=[],
            )
            Trainer(
                model, arguments, train_dataset=examples(16), optimizers=(optimizer, None)
            ).train()
        else:
            model.train()
            for part in torch.stack([e["input_ids"] for e in examples(16)]).split(4):
                batch = {"input_ids": part, "attention_mask": part > 0, "labels": part}
                optimizer.zero_grad()
                with optimizer.listen(batch):
                    logits = model(input_ids=part, attention_mask=part > 0).logits
                # it divides by the number of labels before the shift
                loss = nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
                )
                (loss / part.numel()).backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


class Bare:
    """As much of a trainer as the mixin asks of it."""

    def __init__(self, optimizer: Any, smoothing: float = 0.0, world: int = 1) -> None:
        self.optimizer = optimizer
        self.args = SimpleNamespace(label_smoothing_factor=smoothing, world_size=world)

    def compute_loss(self, model: nn.Module, inputs: Any, factor: float = 1.0) -> Tensor:
        return factor * nn.functional.mse_loss(model(inputs["x"]), inputs["labels"])


class BareKFAC(KFACTrainerMixin, Bare): ...  # type: ignore[misc]


def test_refusals_and_evaluation() -> None:
    """Of arguments that contradict the optimizer, before anything is recorded."""
    model = nn.Linear(2, 1)
    inputs = {"x": torch.ones(3, 2), "labels": torch.zeros(3, 1)}

    class Input(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    net = Input()
    optimizer = KFACOptimizer(net, nn.MSELoss())
    wrapped = SimpleNamespace(optimizer=optimizer)
    for trainer, error, words in (
        (BareKFAC(torch.optim.SGD(net.parameters())), TypeError, "is a SGD; expected a KFACOpt"),
        (BareKFAC(wrapped, 0.1), ValueError, r"label_smoothing_factor=0\.1 of the trainer, and"),
        (BareKFAC(wrapped, world=2), ValueError, r"has 2 processes.*processes=Processes\(\)"),
    ):
        with pytest.raises(error, match=words):
            trainer.compute_loss(net, inputs)
    assert BareKFAC(None).compute_loss(net.eval(), inputs, 2.0) > 0
    assert optimizer.curvature.updates == 0
    BareKFAC(wrapped).compute_loss(net.train(), inputs, factor=2.0).backward()
    optimizer.step()
    assert optimizer.last_step.examples == 3
