"""The optimizers that are compared, with the hyper-parameters that are tuned and the ranges they
are drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from curvlinops_plus import EKFAC, KFACOptimizer, LevenbergMarquardt, NormConstraint

try:
    from pytorch_optimizer import SOAP, ScalableShampoo
except ImportError:
    SOAP = ScalableShampoo = None

Make = Callable[..., Sequence[Optimizer]]
Ranges = Mapping[str, tuple[float, float]]
FORGET = (0.02, 0.2)  # one minus momentum


@dataclass(frozen=True)
class Contender:
    """An optimizer, or a few that share the parameters.

    Attributes:
        make: Model, loss and tuned values to the optimizers whose `step` is called.
        ranges: Of what is tuned; drawn uniformly in the logarithm. Empty: nothing is tuned.
        of_task: Ranges that are others for a task.
        equal_time: Whether it also runs at equal time.
        line: How it is drawn; None: not at all.
    """

    make: Make
    ranges: Ranges = field(default_factory=dict)
    of_task: Mapping[str, Ranges] = field(default_factory=dict)
    equal_time: bool = True
    line: Mapping[str, Any] | None = None

    def ranges_for(self, task: str) -> Ranges:
        """What is tuned on a task."""
        return {**self.ranges, **self.of_task.get(task, {})}


def _sgd(model: nn.Module, _: Any, lr: float, forget: float) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr, 1 - forget)]


def _adam(model: nn.Module, _: Any, lr: float = 1e-3, forget: float = 0.1) -> list[Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr, (1 - forget, 0.999))]


def _muon(model: nn.Module, _: Any, lr: float, adam_lr: float) -> list[Optimizer]:
    """Muon takes matrices alone; embeddings are tables, and as usual they are Adam's, as is the
    rest.
    """
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    if isinstance(head := getattr(model, "head", None), nn.Linear):
        matrices = [w for w in matrices if w is not head.weight]
    muon = torch.optim.Muon(matrices, lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.Adam(_others(model, matrices), adam_lr)]


def _soap(model: nn.Module, _: Any, lr: float, forget: float) -> list[Optimizer]:
    assert SOAP is not None
    return [
        SOAP(
            model.parameters(), lr, (1 - forget, 0.95), weight_decay=0.0, precondition_frequency=10
        )
    ]


def _shampoo(model: nn.Module, _: Any, lr: float, forget: float) -> list[Optimizer]:
    """Shampoo as it is used: as long as an RMSprop step, and with preconditioners that are renewed
    every ten steps.
    """
    assert ScalableShampoo is not None
    options = {
        "start_preconditioning_step": 5,
        "preconditioning_compute_steps": 10,
        "graft_type": 3,
    }
    return [
        ScalableShampoo(
            model.parameters(), lr, (1 - forget, 0.99), moving_average_for_momentum=True, **options
        )
    ]


def _others(model: nn.Module, taken: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    ids = {id(p) for p in taken}
    return [p for p in model.parameters() if id(p) not in ids]


def _kfac(**options: Any) -> Make:
    """K-FAC with fixed options. Scales and shifts of batch norm are Adam's, with a learning rate
    that is not tuned.
    """

    def make(model: nn.Module, loss: nn.Module, **tuned: float) -> list[Optimizer]:
        norms = [
            p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()
        ]
        kfac = KFACOptimizer(model, loss, params=_others(model, norms), **options, **tuned)
        return [kfac, torch.optim.Adam(norms, 1e-2)] if norms else [kfac]

    return make


FIRST_ORDER = {"lr": (1e-3, 1e-1), "forget": FORGET}
TUNED = {"lr": (0.05, 2.0), "damping": (1e-4, 3e-2)}
BOUNDED = {"norm_constraint": (1e-4, 1e-1), "damping": TUNED["damping"]}
STEP = NormConstraint(1e-4, of="step")

# The colours are Okabe's and Ito's, which the colour-blind tell apart.
CONTENDERS: dict[str, Contender] = {
    "SGD with momentum": Contender(
        _sgd,
        {"lr": (0.03, 3.0), "forget": FORGET},
        {"autoencoder": {"lr": (0.3, 30.0)}},
        line={"color": "#999999", "linestyle": ":"},
    ),
    "Adam": Contender(_adam, FIRST_ORDER, line={"color": "#d55e00", "linestyle": "--"}),
    "Muon, Adam": Contender(
        _muon,
        {"lr": (2e-3, 2e-1), "adam_lr": (1e-3, 5e-2)},
        line={"color": "#e69f00", "linestyle": "--"},
    ),
    "SOAP": Contender(_soap, FIRST_ORDER, line={"color": "#cc79a7", "linestyle": "--"}),
    "Shampoo, grafted": Contender(_shampoo, {"lr": (3e-4, 3e-2), "forget": FORGET}),
    "K-FAC": Contender(_kfac(), TUNED, line={"color": "#0072b2"}),
    "EKFAC": Contender(_kfac(approximation=EKFAC), TUNED),
    "K-FAC, bound of step": Contender(_kfac(norm_constraint=STEP), TUNED),
    "EKFAC, bound of step": Contender(_kfac(approximation=EKFAC, norm_constraint=STEP), TUNED),
    "K-FAC, statistics / 5": Contender(_kfac(statistics_every=5), TUNED, line={"color": "#56b4e9"}),
    "EKFAC, statistics / 5": Contender(
        _kfac(approximation=EKFAC, statistics_every=5), TUNED, line={"color": "#009e73"}
    ),
    "K-FAC / 5, bound tuned": Contender(
        _kfac(statistics_every=5), BOUNDED, line={"color": "#000000"}
    ),
    "EKFAC / 5, bound tuned": Contender(_kfac(approximation=EKFAC, statistics_every=5), BOUNDED),
    "K-FAC, only lr tuned": Contender(_kfac(), {"lr": TUNED["lr"]}, equal_time=False),
    "K-FAC, defaults": Contender(_kfac(), equal_time=False),
    "K-FAC, adaptive": Contender(
        _kfac(lr="adaptive", momentum="adaptive", damping=LevenbergMarquardt()), equal_time=False
    ),
    "Adam, defaults": Contender(_adam, equal_time=False),
}
if SOAP is None:
    print("SOAP and Shampoo are left out: pytorch-optimizer is not installed.")
    CONTENDERS = {name: c for name, c in CONTENDERS.items() if c.make not in (_soap, _shampoo)}
if not hasattr(torch.optim, "Muon"):
    print(f"Muon is left out: torch {torch.__version__} has none.")
    CONTENDERS = {name: c for name, c in CONTENDERS.items() if c.make is not _muon}
