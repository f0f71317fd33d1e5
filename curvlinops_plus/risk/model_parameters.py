"""A model as a function of some of its parameters: these as one vector, at other values, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from operator import is_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from curvlinops_plus.distributed import Alone
from curvlinops_plus.linalg import Space
from curvlinops_plus.risk.parameters import common_device, common_dtype, named_params, values_of, write_parameters
from curvlinops_plus.risk.replaced_parameters import parameter_places, paths_in, replaced_parameters, require_places
from curvlinops_plus.risk.sharded import WholeParameters
from curvlinops_plus.risk.usable_model import refuse_parameters

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class ModelParameters:
    """A model and the parameters that it is a function of.

    Args:
        owned: All parameters of the model, by name.
        processes: The processes that share the data.

    Attributes:
        whole: The whole values of parameters that are spread over processes.
        params: Key to parameter: the model's own tensors, or the values given instead.
        space: The space of vectors like the parameters.
        device: Where the parameters are.
        dtype: What matrices over them are computed in.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Tensor] | Mapping[str, Tensor] | None,
        modules: Mapping[str, nn.Module],
        owned: Mapping[str, Tensor],
        processes: Alone,
    ) -> None:
        self.model = model
        self._own = named_params(model, params, owned)
        self.whole = WholeParameters(model, owned, processes)
        self.params = self.whole.of(values_of(params, self._own))
        self._elsewhere = bool(self.whole) or not all(map(is_, self.params.values(), self._own.values()))
        # Found before any parameter is replaced, because replacements may be nested.
        self._places = parameter_places(modules.values(), self._own)
        self._paths = paths_in(modules.values())
        refuse_parameters(modules, owned, self._own)
        self.space, self.device = Space.of(self.params), common_device(self.params)
        self.dtype = common_dtype(self.params)

    @property
    def own_params(self) -> dict[str, Tensor]:
        """Key to the model's own tensor, also where `params` holds another value."""
        return dict(self._own)

    def restricted(self, keys: Iterable[str]) -> Self:
        """The same as a function of some of its parameters, in their order here."""
        chosen, other = set(keys), copy(self)
        other.params = {key: p for key, p in self.params.items() if key in chosen}
        other.space = Space.of(other.params)
        other._own = {key: p for key, p in self._own.items() if key in chosen}
        other._places = [(module, [(n, key) for n, key in names if key in chosen]) for module, names in self._places]
        return other

    def vector(self) -> Tensor:
        """The parameters as they are now, one vector `[space.dim]` in their order; a copy without a graph.

        `space.unflatten` makes a dictionary of it, under the keys of `params`. To differentiate in the parameters
        themselves, use `params`, which every operator multiplies.

        Example:
            >>> from curvlinops_plus import EmpiricalRisk
            >>> risk = EmpiricalRisk(nn.Linear(1, 1), nn.MSELoss(), [(torch.ones(1, 1), torch.ones(1, 1))])
            >>> before = risk.vector()
            >>> risk.assign(torch.tensor([3.0, 4.0]))
            >>> risk.vector(), risk.model.bias.item()
            (tensor([3., 4.]), 4.0)
            >>> risk.assign(before)
        """
        self.require_in_place()
        self.whole.renew()
        with torch.inference_mode(False), torch.no_grad():
            return torch.cat([p.detach().to(self.dtype).flatten() for p in self.params.values()])

    def assign(self, v: Any) -> None:
        """Write a vector into the parameters of the model, in place.

        Operators that were computed before stay as they are. `at` evaluates at other values and leaves the model alone.

        Args:
            v: What `vector` returns: a tensor or NumPy array `[space.dim]`, or a dictionary (by the keys of `params`),
                list or tuple of tensors of the parameters' shapes.

        Raises:
            TypeError: If `v` is none of these, or of another device or a wider dtype.
            ValueError: If names or shapes do not fit, or `params` holds other values than the model's own.
            UnsupportedError: If parameters are sharded by `fully_shard`.
            RuntimeError: If a parameter can't be written to. Nothing is changed then, nor in the cases before.
        """
        self.require_in_place()
        self.whole.refuse(
            "risk.assign(v) can't write to a model", "Use torch.distributed.checkpoint.state_dict.set_model_state_dict."
        )
        if other := [key for key, own in self._own.items() if self.params[key] is not own]:
            raise ValueError(
                f"risk.assign(v) writes into the model's own parameters, and `params` holds other values of "
                f"{other[:3]}. Assign to a risk without these, or make a new one with other values."
            )
        try:
            x, container = self.space.read(v, self.dtype, self.device)
        except (TypeError, ValueError) as error:
            raise type(error)(f"risk.assign(v): {error}") from error
        if container.columns is not None:
            raise ValueError(
                f"risk.assign(v): expected a single vector [{self.space.dim}], got {x.shape[1]} columns; pick one."
            )
        write_parameters(self._own, self.space.unflatten(x[:, 0]))

    def at(self, values: Mapping[str, Tensor], function: Callable[[nn.Module], T]) -> T:
        """`function(model)` at other values of the parameters (keys as in `params`); the model is as before afterwards.

        Everything that runs the model must happen inside, backward passes too: activation checkpointing runs it again.
        """
        self.require_in_place()
        with self.whole.placed(), replaced_parameters(self._places, values):
            return function(self.model)

    def placed(self) -> AbstractContextManager[None]:
        """Context in which the model has the values of `params`, where these are not its own tensors."""
        self.require_in_place()
        return self._placed() if self._elsewhere else nullcontext()

    @contextmanager
    def _placed(self) -> Iterator[None]:
        with self.whole.placed(), replaced_parameters(self._places, self.params):
            yield

    def require_in_place(self) -> None:
        """Refuse, with a ValueError that names some, a model that holds other tensors than when this was made."""
        self.whole.give_up()
        require_places(self._places, self._paths, self._own)

    def require_own_values(self, what: str) -> None:
        """Refuse other values than the model's own, for what watches the user's forward pass."""
        if other := [key for key, p in self.whole.of(self._own).items() if self.params[key] is not p]:
            raise ValueError(
                f"{what} watches the model at its own parameters, and `params` holds other values of {other[:3]}. Use "
                "`update`, which runs the model at these."
            )
