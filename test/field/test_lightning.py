"""K-FAC in Lightning, with losses that are functions; run where that is installed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops_plus import KFACOptimizer, LevenbergMarquardt
from test.helpers import normal, seeded

try:
    import lightning
except ImportError:
    lightning = None

needed = pytest.mark.skipif(lightning is None, reason="lightning is absent: pip install lightning")
DATA = TensorDataset(normal(48, 6).float(), torch.randint(3, (48,), generator=seeded(1)))
Module: Any = object if lightning is None else lightning.LightningModule


class Classifier(Module):
    """A classifier as Lightning's users write it.

    Args:
        whole: Whether the optimizer has the LightningModule, rather than the network in it.
        options: Of the optimizer.
    """

    def __init__(self, whole: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.whole = whole
        self.options = options
        self.examples: list[int] = []

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X)

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        X, y = batch
        value = F.cross_entropy(self(X) if self.whole else self.net(X), y)
        self.log("loss", value)
        return value

    def validation_step(self, batch: Any, index: int) -> None:
        X, y = batch
        self.log("error", F.cross_entropy(self(X), y))

    def configure_optimizers(self) -> Any:
        model = self if self.whole else self.net
        optimizer = KFACOptimizer(model, nn.CrossEntropyLoss(), lr=0.05, **self.options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, *args: Any) -> None:
        self.examples.append(self.optimizers().last_step.examples)


class ByHand(Classifier):
    """The same with manual optimization: two micro-batches a step, and clipping."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        X, y = batch
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self.net(X), y) / 2)
        if index % 2:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


def trained(
    folder: Path, made: Any, resume: str | None = None, **options: Any
) -> tuple[Tensor, list[int]]:
    """Parameters after three epochs of four batches of twelve."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        ],
        **options,
    )
    loader = DataLoader(DATA, 12)
    trainer.fit(made, loader, loader, ckpt_path=resume)
    return torch.cat([p.detach().flatten() for p in made.parameters()]), made.examples


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], list[int]]] = {
    "plain": (Classifier, {}, {}, 12 * [12]),
    "whole": (Classifier, {"whole": True}, {"gradient_clip_val": 0.1}, 12 * [12]),
    "accumulated": (
        Classifier,
        {"damping": LevenbergMarquardt(0.1, interval=2)},
        {"accumulate_grad_batches": 2},
        [0, *11 * [24]],
    ),
    "bfloat16": (
        Classifier,
        {"statistics_every": 3},
        {"precision": "bf16-mixed"},
        4 * [12, 0, 0],
    ),
    "by hand": (ByHand, {}, {}, [0, *11 * [24]]),
}


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_resumed_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Each batch of training is heard, and none of validation."""
    make, options, of_trainer, examples = CASES[name]
    whole, heard = trained(tmp_path, make(**options), **of_trainer)
    assert heard == examples
    checkpoint = str(tmp_path / "epoch=1.ckpt")
    resumed, _ = trained(tmp_path / "again", make(**options), checkpoint, **of_trainer)
    assert torch.equal(resumed, whole)
    before = torch.cat([p.detach().flatten() for p in make(**options).parameters()])
    assert not torch.allclose(whole, before, atol=1e-3)


@needed
@pytest.mark.filterwarnings("ignore")
def test_lightning_takes_the_steps_of_a_loop(tmp_path: Path) -> None:
    found, _ = trained(tmp_path, Classifier())
    made = Classifier()
    (optimizer,), (schedule,) = made.configure_optimizers()
    for _ in range(3):
        for X, y in DataLoader(DATA, 12):
            optimizer.zero_grad()
            F.cross_entropy(made.net(X), y).backward()
            optimizer.step()
            schedule["scheduler"].step()
    assert torch.equal(torch.cat([p.detach().flatten() for p in made.parameters()]), found)
