"""A model and the parameters that it is a function of: what the user gives, one vector of them, other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from fnmatch import fnmatchcase
from operator import is_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvlinops_plus.distributed import Alone
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.linalg import Space
from curvlinops_plus.risk.modules import Replaced, modules_of, parameter_places, parameters_of, replaced_parameters
from curvlinops_plus.risk.replicas import WholeParameters, give_up_gathered

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class ModelParameters:
    """A model and the parameters that it is a function of.

    Args:
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
        processes: Alone,
    ) -> None:
        self.model, owned = model, parameters_of(modules)
        self._own = named_params(model, params, owned)
        self.whole = WholeParameters(model, owned, processes)
        self.params = self.whole.of(_values_of(params, self._own))
        self._elsewhere = bool(self.whole) or not all(map(is_, self.params.values(), self._own.values()))
        # Found before any parameter is replaced, because replacements may be nested.
        self._places = parameter_places(modules.values(), self._own)
        self._paths = [(m, name, child) for m in modules.values() for name, child in m._modules.items() if child]
        for module, names in self._places:
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedError(
                    f"{[key for _, key in names]} are parameters of a {type(module).__name__} (torch.jit): they can't "
                    "be replaced, and hooks inside do not run. Pass the Python module that it was made from, or leave "
                    "its parameters out of `params`."
                )
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
        before, values = {key: p.detach().clone() for key, p in self._own.items()}, self.space.unflatten(x[:, 0])
        with torch.no_grad():
            try:
                for key, p in self._own.items():
                    p.copy_(values[key])
            except RuntimeError:
                for p, old in zip(self._own.values(), before.values(), strict=True):
                    if not torch.equal(p, old):
                        p.copy_(old)
                raise

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
        gone = [m for parent, name, m in self._paths if name not in parent._modules or parent._modules[name] is not m]
        inside = {module for child in gone for module in child.modules()}
        other = [
            key
            for module, names in self._places
            for name, key in names
            if (module._parameters.get(name) is not self._own[key] or module in inside)
            and not isinstance(module._parameters, Replaced)
        ]
        if other:
            raise ValueError(
                f"The model has other tensors in place of its parameters {other[:5]}{' …' if other[5:] else ''} than "
                "when this risk was made (load_state_dict(..., assign=True), a new nn.Parameter, or another module). "
                "Make a new EmpiricalRisk, or a new optimizer."
            )

    def require_own_values(self, what: str) -> None:
        """Refuse other values than the model's own, for what watches the user's forward pass."""
        if other := [key for key, p in self.whole.of(self._own).items() if self.params[key] is not p]:
            raise ValueError(
                f"{what} watches the model at its own parameters, and `params` holds other values of {other[:3]}. Use "
                "`update`, which runs the model at these."
            )


# --------------------------------------------------------------------------------------------- what the user gives
def named_params(
    model: nn.Module,
    params: Sequence[Tensor] | Mapping[str, Tensor] | None,
    owned: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Give each requested parameter a key and find the model's own tensor behind it.

    Args:
        model: The model.
        params: A list of the model's parameters, a dict of them under names of the caller's, or None for all that
            require a gradient. `p.detach()` and `p.data` are recognised by their memory; any other tensor of the same
            shape, under a name of the model's own in a dict, is another value of that parameter.
        owned: All parameters of the model, by name, if somebody has looked.

    Returns:
        Key to the model's own parameter.

    Raises:
        TypeError: If `params` is neither a list nor a dict.
        ValueError: If there are no parameters, one is given twice, or one does not belong to the model.
    """
    owned = dict(model.named_parameters()) if owned is None else owned
    if params is None:
        params = {name: p for name, p in owned.items() if p.requires_grad}
    if isinstance(params, (str, Tensor, nn.Module)) or not isinstance(params, Iterable):
        raise TypeError(
            f"`params` is a {type(params).__name__}; expected a list or a dict of the model's parameters, as "
            "list(model.parameters())."
        )
    given = params.items() if isinstance(params, Mapping) else [(None, p) for p in params]
    by_identity = {id(p): name for name, p in owned.items()}
    by_memory = {(p.data_ptr(), p.shape, p.stride()): name for name, p in owned.items() if p.numel() > 0}
    own: dict[str, Tensor] = {}
    labels: dict[str, str] = {}
    for position, (key, p) in enumerate(given):
        label, name = f"params[{position if key is None else key!r}]", by_identity.get(id(p))
        if not isinstance(p, Tensor) or not isinstance(key, (str, type(None))):
            raise ValueError(
                f"{label} is a {type(p).__name__}; expected a list of parameters of the model, as "
                "list(model.parameters()), or a dict of them by name, as dict(model.named_parameters())."
            )
        name = name or by_memory.get((p.data_ptr(), p.shape, p.stride()))
        if name is None and key is not None and key in owned and owned[key].shape == p.shape:
            name = key
        if name is None:
            expected = f" (its own {key!r} has {list(owned[key].shape)})" if key is not None and key in owned else ""
            raise ValueError(
                f"{label} with shape {list(p.shape)} is not a parameter of the model {type(model).__name__}{expected}. "
                "Pass the model's own tensors, for instance `[p for p in model.parameters() if p.requires_grad]` or "
                "`dict(model.named_parameters())`, or a dict of other values under the same names."
            )
        if name in labels:
            raise ValueError(
                f"{label} is the same parameter as {labels[name]}: the model's {name!r}. Name each parameter once."
            )
        labels[name] = label
        own[key or name] = owned[name]
    if not own:
        raise ValueError(
            f"`params` is empty, so there is no matrix. The model, a {type(model).__name__}, has {len(owned)} "
            "parameters; by default those that require a gradient are taken. The arguments are model, loss and data, "
            "in this order."
        )
    return own


def _values_of(params: Any, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What stands for parameters: the model's own tensors, or other values given under their names."""
    if not isinstance(params, Mapping):
        return own

    def value(given: Tensor, own: Tensor) -> Tensor:
        if given is own or (given.data_ptr() == own.data_ptr() and given.shape == own.shape and own.numel()):
            return own
        return given if isinstance(given, nn.Parameter) else nn.Parameter(given.detach(), given.requires_grad)

    return {key: value(params[key], p) for key, p in own.items()}


def common_device(params: Mapping[str, Tensor]) -> torch.device:
    """Where all of the parameters are; refuses several devices."""
    device, *others = {p.device for p in params.values()}
    if others:
        raise ValueError(
            f"The parameters live on several devices, {sorted(map(str, [device, *others]))}; one operator needs them "
            "on one."
        )
    return device


def common_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """The widest of the parameters' dtypes, float32 at least."""
    wide, dtypes = torch.float32, {p.dtype for p in params.values()}
    for dtype in dtypes:
        if not dtype.is_floating_point:
            raise ValueError(
                f"The parameters have dtypes {sorted(map(str, dtypes))}; only real floating-point parameters have "
                "a curvature here."
            )
        wide = wide if dtype == wide else torch.promote_types(wide, dtype)
    return wide


def require_module(model: Any) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A model without its wrapper, and its modules by their names; refuses what is no model, or not yet one.

    Raises:
        ValueError: If it is no module, or has parameters without shapes.
        UnsupportedError: If it is inside of `FullyShardedDataParallel`.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        advice = ""
        if isinstance(model, type):
            advice = f" Call it: {model.__name__}(...)."
        elif callable(model):
            advice = (
                " A function (params, X) is a model for KFACLinearOperator(function, loss, params, data) and the like."
            )
        raise ValueError(f"`model` is {what}; layers can only be recorded in a torch.nn.Module.{advice}")
    model = inner_model(model)
    modules = modules_of(model)
    give_up_gathered(modules.values())
    for name, module in modules.items():
        where = f"The module {name!r}" if name else "The model"
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                f"{where} is a FullyShardedDataParallel, whose parameters "
                "are pieces of flat tensors. Use fully_shard of torch.distributed.fsdp, or DistributedDataParallel."
            )
        held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if any(type(t) is not nn.Parameter and is_lazy(t) for t in held):
            raise ValueError(
                f"{where} has no shapes yet: it is lazy, such as nn.LazyLinear. Call the model once on a batch, "
                "model(X), which gives it its shapes."
            )
    return model, modules


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside of `DistributedDataParallel`."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def example_axes(modules: Mapping[str, nn.Module], given: Mapping[str, int] | None) -> dict[str, int]:
    """Axis of the examples by module name: 1 inside `batch_first=False` modules, then what the user says.

    Args:
        given: Names of modules, or globs of names, to axes.

    Raises:
        TypeError: If one is no integer, or they are not in a dict.
        ValueError: If a glob matches no module.
    """
    axes: dict[str, int] = {}
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    for name, module in modules.items():
        holder = module.self_attn if isinstance(module, layers) else module
        if getattr(holder, "batch_first", None) is False:
            axes |= {inner: 1 for inner, _ in module.named_modules(prefix=name)}
    if given is not None and not (isinstance(given, Mapping) and all(type(axis) is int for axis in given.values())):
        raise TypeError(
            f"example_axis={given!r} is no dict from names of modules to axes, as example_axis={{'name': 1}}, with '' "
            "for the model itself."
        )
    for glob, axis in (given or {}).items():
        matching = [name for name in modules if fnmatchcase(name, glob)]
        if not matching:
            raise ValueError(
                f"example_axis={{{glob!r}: {axis}}} matches no module of the model; its modules are {[*modules][1:]}."
            )
        axes |= dict.fromkeys(matching, axis)
    return axes
