"""Optimizers that are tied to a model."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class TiedOptimizer(torch.optim.Optimizer):
    """An optimizer that is neither copied nor pickled: PyTorch's would copy groups and state, and
    nothing else.
    """

    def __getstate__(self) -> NoReturn:  # type: ignore[override]
        name = type(self).__name__
        raise TypeError(
            f"A {name} can't be copied or pickled, as it is tied to its model. Make another one "
            "with the same arguments for the copy of the model, and pass on the state: "
            "other.load_state_dict(optimizer.state_dict())."
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over groups and state, as from a state that is loaded. PyTorch adds an option of its
        own to the defaults, which states of before have not.
        """
        options = {*self.defaults}
        super().__setstate__(state)
        for name in {*self.defaults} - options:
            del self.defaults[name]
