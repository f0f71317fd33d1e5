"""A model and the parameters that it is a function of: what the user gives, one vector of them,
other values.

And models that several processes train: parameters that `fully_shard` spreads over them, and what
has to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from fnmatch import fnmatchcase
from functools import lru_cache, reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvlinops_plus.contexts import Endings, GradMode
from curvlinops_plus.distributed import Alone, Processes
from curvlinops_plus.errors import CurvatureWarning, UnsupportedError, level_of_user
from curvlinops_plus.linalg import Space
from curvlinops_plus.risk.preserve import ReplacedTensors, parameter_places, replaced_parameters

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class ModelParameters:
    """A model and the parameters that it is a function of.

    Args:
        modules: Name to module of the model, itself under "", as `modules_of` returns them.
        processes: The processes that share the data.

    Attributes:
        params: Key to parameter: the model's own tensors, or the values given instead.
        own_params: Key to the model's own tensor, also where `params` holds another value.
        space: The space of vectors like the parameters.
        device: Where the parameters are.
        dtype: What matrices over them are computed in.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        params: Sequence[Tensor | str] | Mapping[str, Tensor] | None,
        processes: Alone,
    ) -> None:
        self.model = modules[""]
        owned = dict(self.model.named_parameters())
        self.own_params = named_params(self.model, params, owned)
        parts = {name: p for name, p in owned.items() if hasattr(p, "full_tensor")}
        #: Parameters of which `fully_shard` gives each process a part, as plain tensors of whole
        #: shapes. Passes over the data evaluate the model at these, without communication:
        #: processes may have other numbers of batches.
        self._spread = _spread_parameters(self.model, parts, processes) if parts else {}
        self._sharded_modules = [m for m in modules.values() if _is_sharded(type(m))]
        self.params = self.whole(_values_by_key(params, self.own_params))
        self._elsewhere = any(self.params[key] is not p for key, p in self.own_params.items())
        # Found before any parameter is replaced, because replacements may be nested.
        self._places = parameter_places(modules.values(), self.own_params)
        self._spread_places = parameter_places(modules.values(), parts) if parts else ()
        holders = {module for module, _ in self._places}
        compiled = [m for m in holders if isinstance(m, torch.jit.ScriptModule)]
        if compiled:
            raise UnsupportedError(
                f"A {type(compiled[0]).__name__} (torch.jit) holds parameters: they can't be "
                "replaced, and hooks inside do not run. Pass the Python module that it was made "
                "from, or leave them out of `params`."
            )
        #: Parent, name and child of each module that has tracked parameters somewhere inside.
        self._paths = [
            (parent, name, child)
            for parent in modules.values()
            for name, child in parent._modules.items()
            if child is not None and not holders.isdisjoint(child.modules())
        ]
        self.space = Space({key: p.shape for key, p in self.params.items()})
        self.dtype = common_dtype(self.params)
        devices = [*{p.device for p in self.params.values()}]
        if len(devices) > 1:
            raise ValueError(
                f"The parameters live on several devices, {devices}; they need to be on one."
            )
        self.device = devices[0]

    def restricted(self, keys: Iterable[str]) -> Self:
        """The same as a function of some of its parameters, in their order here."""
        chosen = set(keys)
        part = copy(self)
        part.params = {key: p for key, p in self.params.items() if key in chosen}
        part.own_params = {key: p for key, p in self.own_params.items() if key in chosen}
        part.space = Space({key: p.shape for key, p in part.params.items()})
        part._places = [
            (module, [(name, key) for name, key in names if key in chosen])
            for module, names in self._places
        ]
        return part

    def vector(self) -> Tensor:
        """The parameters as they are now, one vector `[space.dim]` in their order; a copy without a
        graph.

        `space.unflatten` makes a dictionary of it, under the keys of `params`. To differentiate in
        the parameters themselves, use `params`, which every operator multiplies.

        Example:
            >>> from curvlinops_plus import EmpiricalRisk
            >>> data = [(torch.ones(1, 1), torch.ones(1, 1))]
            >>> risk = EmpiricalRisk(nn.Linear(1, 1), nn.MSELoss(), data)
            >>> before = risk.vector()
            >>> risk.assign(torch.tensor([3.0, 4.0]))
            >>> risk.vector(), risk.model.bias.item()
            (tensor([3., 4.]), 4.0)
            >>> risk.assign(before)
        """
        self.renew()
        with torch.inference_mode(False), GradMode(False):
            return torch.cat([p.detach().to(self.dtype).flatten() for p in self.params.values()])

    def assign(self, v: Any) -> None:
        """Write a vector into the parameters of the model, in place.

        Operators that were computed before stay as they are. `at` evaluates at other values and
        leaves the model alone.

        Args:
            v: What `vector` returns: a tensor or NumPy array `[space.dim]`, or a dictionary (by the
                keys of `params`), list or tuple of tensors of the parameters' shapes.

        Raises:
            TypeError: If `v` is none of these, or of another device or a wider dtype.
            ValueError: If names or shapes do not fit, or `params` holds other values than the
                model's own.
            UnsupportedError: If parameters are sharded by `fully_shard`.
        """
        self.require_in_place()
        if self._spread:
            raise UnsupportedError(
                "risk.assign(v) can't write to a model whose parameters are sharded by "
                "fully_shard. Use torch.distributed.checkpoint.state_dict.set_model_state_dict."
            )
        self.require_own_values("risk.assign(v)")
        x, container = self.space.read(v, self.dtype, self.device)
        if container.columns:
            raise ValueError(
                f"risk.assign(v): expected a single vector [{self.space.dim}], got {x.shape[1]} "
                "columns."
            )
        with GradMode(False):
            for key, value in self.space.unflatten(x[:, 0]).items():
                self.own_params[key].copy_(value)

    def at(self, values: Mapping[str, Tensor], function: Callable[[nn.Module], T]) -> T:
        """`function(model)` at other values of the parameters (keys as in `params`); the model is
        as before afterwards.

        Everything that runs the model must happen inside, backward passes too: activation
        checkpointing runs it again.
        """
        with self.placed(values):
            return function(self.model)

    def placed(self, values: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
        """Context in which the model has other values; by default those of `params` that are not
        its own tensors.
        """
        self.require_in_place()
        if values is None and not self._elsewhere:
            return nullcontext()
        values = self.params if values is None else values
        if self._spread:
            return self._placed_whole(values)
        return replaced_parameters(self._places, values)

    @contextmanager
    def _placed_whole(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which the modules have whole parameters, and don't gather or give up any."""
        hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for m in self.model.modules():
            for table in (m._forward_pre_hooks, m._forward_hooks):
                before = dict(table)
                hooks.append((table, before))
                for number, hook in before.items():
                    if (getattr(hook, "__module__", None) or "").startswith(_FSDP):
                        del table[number]
        whole_values = {name: p for name, (_, p) in self._spread.items()}

        def restore() -> None:
            for table, before in hooks:
                # Hooks that came since stay, behind those that were there.
                since = {number: hook for number, hook in table.items() if number not in before}
                table.clear()
                table.update(before | since)

        with (
            Endings() as endings,
            replaced_parameters(self._spread_places, whole_values),
            replaced_parameters(self._places, values),
        ):
            endings.surely(restore)
            yield

    @property
    def sharded(self) -> bool:
        """Whether the processes have parts of some parameters."""
        return bool(self._spread)

    def whole(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Key to the whole of a parameter of the model; itself if it is not spread over
        processes.
        """
        whole_of = {id(part): p for part, p in self._spread.values()}
        return {key: whole_of.get(id(p), p) for key, p in params.items()}

    def renew(self) -> None:
        """Take over the present values of parameters that are spread over processes. Collective, if
        there are any.
        """
        self.require_in_place()
        with GradMode(False):
            for part, p in self._spread.values():
                p.requires_grad_(part.requires_grad).copy_(part.full_tensor())

    def require_in_place(self) -> None:
        """Refuse, with a ValueError, a model that holds other tensors than when this was made."""
        for module in self._sharded_modules:
            # So that modules have their own parameters, and not what was gathered for a pass.
            module.reshard()  # type: ignore[operator]
        changed = []
        for parent, name, module in self._paths:
            if parent._modules.get(name) is not module:
                changed.append(name)
        for module, names in self._places:
            held = module._parameters
            if isinstance(held, ReplacedTensors):
                continue
            for name, key in names:
                if held.get(name) is not self.own_params[key]:
                    changed.append(key)
        if changed:
            raise ValueError(
                "The model has other tensors in place of its parameters or modules "
                f"{changed[:5]} than when this risk was made (load_state_dict(..., assign=True), a "
                "new nn.Parameter, or another module). Make a new EmpiricalRisk, or a new "
                "optimizer."
            )

    def require_own_values(self, subject: str) -> None:
        """Refuse other values than the model's own, for what watches or changes the model
        itself.
        """
        own_params = self.whole(self.own_params)
        replaced = [key for key, p in own_params.items() if self.params[key] is not p]
        if replaced:
            raise ValueError(
                f"{subject} is about the model's own parameters, and `params` holds other values "
                f"of {replaced[:3]}. Make a risk without these; `update` of an estimator runs the "
                "model at these."
            )


# ------------------------------------------------------------------------------ what the user gives
def named_params(
    model: nn.Module,
    params: Sequence[Tensor | str] | Mapping[str, Tensor] | None,
    owned: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Give each requested parameter a key and find the model's own tensor behind it.

    Args:
        model: The model.
        params: A list of the model's parameters or names, see `without_names`, a dict of them under
            names of the caller's, or None for all that require a gradient. `p.detach()` and
            `p.data` are recognised by their memory; any other tensor of the same shape, under a
            name of the model's own in a dict, is another value of that parameter.
        owned: All parameters of the model, by name, if somebody has looked.

    Returns:
        Key to the model's own parameter.

    Raises:
        TypeError: If `params` is neither a list nor a dict.
        ValueError: If there are no parameters, one is given twice, or one does not belong to the
            model.
    """
    if owned is None:
        owned = dict(model.named_parameters())
    if params is None:
        params = {name: p for name, p in owned.items() if p.requires_grad}
    if isinstance(params, (str, Tensor, nn.Module)) or not isinstance(params, Iterable):
        raise TypeError(
            f"`params` is a {type(params).__name__}; expected a list or a dict of the model's "
            'parameters, or a list of names, as list(model.parameters()) or ["2.weight"].'
        )
    is_dict = isinstance(params, Mapping)
    name_of = {id(p): name for name, p in owned.items()}
    own_params: dict[str, Tensor] = {}
    labels: dict[str, str] = {}
    entries = params.items() if isinstance(params, Mapping) else without_names(model, params)
    for position, entry in enumerate(entries):
        key, p = entry if is_dict else (None, entry)
        label = f"params[{position if key is None else key!r}]"
        name = name_of.get(id(p))
        if name is None and isinstance(p, Tensor):
            name = _name_of_values(key, p, owned)
        if name is None or not (key is None or isinstance(key, str)):
            raise _no_parameter(label, p, model)
        if name in labels:
            raise ValueError(
                f"{label} is the same parameter as {labels[name]}: the model's {name!r}. Name each "
                "parameter once."
            )
        labels[name] = label
        own_params[name if key is None else key] = owned[name]
    if not own_params:
        trained = sum(p.requires_grad for p in owned.values())
        once = ""
        if isinstance(params, Iterator):
            once = " It can be read only once, and was: pass list(model.parameters())."
        raise ValueError(
            f"`params` is empty, so there is no matrix.{once} The model, a {type(model).__name__}, "
            f"has {len(owned)} parameters, of which {trained} require a gradient and are taken by "
            "default. The arguments are model, loss and data, in this order."
        )
    return own_params


def without_names(model: nn.Module, params: Iterable[Any]) -> list[Any]:
    """A list of parameters, or of groups of them as optimizers have, with parameters in place of
    names: their own, those of modules, which stand for all parameters inside, and globs of both.

    Raises:
        ValueError: If nothing has this name; lists names.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        >>> [p.shape for p in without_names(model, ["1", "0.weight"])]
        [torch.Size([2, 4]), torch.Size([2]), torch.Size([4, 3])]
    """
    listed: list[Any] = []
    for entry in params:
        if isinstance(entry, str):
            listed += _parameters_called(entry, model)
        elif isinstance(entry, Mapping) and isinstance(entry.get("params"), (list, tuple)):
            listed.append({**entry, "params": without_names(model, entry["params"])})
        else:
            listed.append(entry)
    return listed


def _parameters_called(name: str, model: nn.Module) -> list[Tensor]:
    called: dict[int, Tensor] = {}
    every = dict(inner_model(model).named_parameters(remove_duplicate=False))
    for key, p in every.items():
        # "a.b.weight" is in the modules "a" and "a.b".
        for outer in accumulate(key.split("."), "{}.{}".format):
            if outer == name or fnmatchcase(outer, name):
                called[id(p)] = p
    if not called:
        shown = ", ".join(map(repr, [*every][:10]))
        raise ValueError(
            f"`params` names {name!r}, and the model {type(model).__name__} has neither a "
            f"parameter nor a module with parameters of that name. It has {shown}"
            f"{', ...' if len(every) > 10 else ''}."
        )
    return [*called.values()]


def _no_parameter(label: str, p: Any, model: nn.Module) -> ValueError:
    came = f" with shape {list(p.shape)}" if isinstance(p, Tensor) else f", a {type(p).__name__},"
    return ValueError(
        f"{label}{came} is not a parameter of the model {type(model).__name__}. Pass the model's "
        'own tensors or their names, for instance `list(model.parameters())`, `["2.weight"]` or '
        "`dict(model.named_parameters())`, or a dict of other values under the same names."
    )


def _name_of_values(key: Any, t: Tensor, owned: Mapping[str, Tensor]) -> str | None:
    """The model's parameter that a tensor shares its memory with, or is another value of."""
    for name, p in owned.items():
        if _is_same(t, p):
            return name
    is_value = isinstance(key, str) and key in owned and owned[key].shape == t.shape
    return key if is_value else None


def _is_same(t: Tensor, p: Tensor) -> bool:
    """Whether a tensor is a parameter, or shows the same memory, as `p.detach()` and `p.data`."""
    if t is p or t.shape != p.shape or not p.numel():
        return t is p
    return t.data_ptr() == p.data_ptr() and t.stride() == p.stride()


def _values_by_key(
    params: Sequence[Tensor | str] | Mapping[str, Tensor] | None, own_params: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The parameters at which everything is computed: the model's own, or what a dict holds for
    them.
    """
    values = dict(own_params)
    for key, t in params.items() if isinstance(params, Mapping) else ():
        if not _is_same(t, own_params[key]):
            is_parameter = isinstance(t, nn.Parameter)
            values[key] = t if is_parameter else nn.Parameter(t.detach(), t.requires_grad)
    return values


def common_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """The widest of the parameters' dtypes, float32 at least.

    Raises:
        ValueError: If some are complex or whole numbers; names them.
    """
    dtypes = {p.dtype for p in params.values()}
    refused = [dtype for dtype in dtypes if not dtype.is_floating_point]
    if refused:
        keys = [key for key, p in params.items() if p.dtype in refused]
        raise ValueError(
            f"The parameters {keys[:5]} are {', '.join(sorted(map(str, refused)))}; only real "
            "floating-point parameters have a curvature here. Of complex ones split_complex(model) "
            "makes pairs of real ones; or take the others, params=[p for p in model.parameters() "
            "if p.is_floating_point()]."
        )
    return reduce(torch.promote_types, dtypes, torch.float32)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Name to module of a model, itself first, under "", without `DistributedDataParallel` around
    it.

    Raises:
        ValueError: If it has parameters without shapes.
        UnsupportedError: If it is inside of `FullyShardedDataParallel`, or was made in inference
            mode.
    """
    modules = dict(inner_model(model).named_modules())
    for name, module in modules.items():
        where = f"The module {name!r}" if name else "The model"
        if _is_sharded(type(module)):
            module.reshard()  # type: ignore[operator]
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                f"{where} is a FullyShardedDataParallel, of flat pieces. Use fully_shard, or DDP."
            )
        for t in (*module._parameters.values(), *module._buffers.values()):
            if t is not None and type(t) is not nn.Parameter and is_lazy(t):
                raise ValueError(
                    f"{where} has no shapes yet: it is lazy, such as nn.LazyLinear. Call the model "
                    "once on a batch, model(X), which gives it its shapes."
                )
            if isinstance(t, nn.Parameter) and t.is_inference():
                raise UnsupportedError(
                    f"{where} was made under torch.inference_mode(), so that its parameters have "
                    "no derivatives. Make it outside, or load its state_dict() into one that was."
                )
    return modules


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside of `DistributedDataParallel`."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def example_axes(
    modules: Mapping[str, nn.Module], axis_of: Mapping[str, int] | None
) -> dict[str, int]:
    """Axis of the examples by module name: 1 inside `batch_first=False` modules, then what the user
    says.

    Args:
        axis_of: Names of modules, or globs of names, to axes.

    Raises:
        TypeError: If they are no such dict.
        ValueError: If a glob matches no module.
    """
    axes: dict[str, int] = {}
    for name, module in modules.items():
        attention = module
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            attention = module.self_attn
        if getattr(attention, "batch_first", None) is False:
            axes |= {inner: 1 for inner, _ in module.named_modules(prefix=name)}
    if axis_of is None:
        return axes
    if not isinstance(axis_of, Mapping) or not all(type(axis) is int for axis in axis_of.values()):
        raise TypeError(
            f"example_axis={axis_of!r} is no dict from names of modules to axes, as {{'name': 1}}."
        )
    for glob, axis in axis_of.items():
        matching = [name for name in modules if fnmatchcase(name, glob)]
        if not matching:
            raise ValueError(
                f"example_axis={{{glob!r}: {axis}}} matches no module of the model; they are "
                f"{[*modules][1:]}."
            )
        axes |= dict.fromkeys(matching, axis)
    return axes


# -------------------------------------------------------------------------------- several processes
# Where the hooks are from that gather whole parameters for a pass.
_FSDP = "torch.distributed.fsdp"


@lru_cache(1024)
def _is_sharded(kind: type[nn.Module]) -> bool:
    """Whether a class of modules is one of those that `fully_shard` makes."""
    return "FSDPModule" in [base.__name__ for base in kind.__mro__]


def _spread_parameters(
    model: nn.Module, parts: Mapping[str, Any], processes: Alone
) -> dict[str, tuple[Any, nn.Parameter]]:
    """Name to part and whole of each parameter that is spread over processes. Collective.

    Raises:
        UnsupportedError: If parameters are spread in another way than by `fully_shard`, or over
            processes that don't share the data.

    Cost: memory for all parameters that are spread; the blocks of their layers take more.
    """
    roots = [name for name, m in model.named_modules() if _is_sharded(type(m))]
    for name, p in parts.items():
        inside = any(root == "" or name.startswith(f"{root}.") for root in roots)
        if not inside or sum(not place.is_replicate() for place in p.placements) > 1:
            raise UnsupportedError(
                f"The parameter {name!r} is spread over processes by parallelize_module (tensor "
                f"parallel) or distribute_tensor, {p.placements}, and the model computes with "
                "parts of it. Only fully_shard is known. Make a plain model, of what "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)) returns."
            )
        if p.device_mesh.size() > processes.world:
            raise UnsupportedError(
                "The parameters are spread over processes by fully_shard, so that none can "
                "evaluate the model alone. Say EmpiricalRisk(..., processes=Processes()), in all "
                "of them."
            )
    values = {name: p.detach().full_tensor().clone() for name, p in parts.items()}
    return {name: (p, nn.Parameter(values[name], p.requires_grad)) for name, p in parts.items()}


def wrapped_processes(model: nn.Module) -> Processes | None:
    """The processes that train a model inside of `DistributedDataParallel`; None without one.

    Raises:
        UnsupportedError: If its parameters are sharded.
    """
    if any(_is_sharded(type(module)) for module in model.modules()):
        raise UnsupportedError(
            "The parameters of the model are sharded by fully_shard, and this optimizer takes "
            "steps with whole ones. Use DistributedDataParallel, or a CurvatureEstimator that "
            "listens, and whole gradients, full_tensor()."
        )
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    return Processes(model.process_group)


def common_processes(model: nn.Module, processes: Any) -> Alone:
    """The processes that share the data: `processes`, or this one alone for None.

    Raises:
        TypeError: If it is something else.

    Warns:
        CurvatureWarning: Once, of a wrapped model without processes.
    """
    if processes is not None and not isinstance(processes, Alone):
        raise TypeError(
            f"processes is a {type(processes).__name__}; expected Processes(), or None for this "
            "one alone."
        )
    if processes is None and isinstance(model, nn.parallel.DistributedDataParallel):
        _warn_alone()
    return processes or Alone()


@lru_cache(1)
def _warn_alone() -> None:
    """Say once that a wrapped model is evaluated by one process."""
    warn(
        "The model is wrapped by DistributedDataParallel, and the risk has processes=None: each "
        "process computes with its own part of the data, and by itself. Say EmpiricalRisk(..., "
        "processes=Processes()) for that of all data.",
        CurvatureWarning,
        stacklevel=level_of_user(),
    )


Fingerprint = Mapping[str, list[float]]


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """For each tensor `Σ x` and its norm in double precision: they tell whether it has changed.

    Cost: one pass over their memory.

    Example:
        >>> sums_of({"x": torch.tensor([3.0, -4.0])})
        {'x': [-1.0, 5.0]}
    """
    if not tensors:
        return {}
    with GradMode(False):
        # All entries in place, of real floating-point numbers.
        reals = []
        for t in tensors.values():
            if t.is_complex():
                t = torch.view_as_real(t)
            elif t.layout is not torch.strided:
                t = t.to_dense()
            reals.append(t if t.is_floating_point() else t.double())
        sums = [x.sum(dtype=torch.float64) for x in reals]
        norms = torch._foreach_norm(reals, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]
    numbers = [*sums, *norms]
    if len({x.device for x in numbers}) > 1:
        numbers = [x.to(numbers[0].device) for x in numbers]
    # One transfer: every answer of a GPU is waited for. NaN equals NaN.
    pairs = torch.stack(numbers).nan_to_num().view(2, -1).T.tolist()
    return dict(zip(tensors, pairs, strict=True))


def fingerprint(risk: Any) -> dict[str, list[float]]:
    """`sums_of` the parameters: under their keys, and others of the model under their names after
    "model.".

    Writing to `p.data` changes no version of a tensor, so that only values tell.
    """
    risk.renew()
    tracked = {*map(id, risk.params.values())}
    parameters = risk.whole(dict(risk.model.named_parameters()))
    untracked = {f"model.{name}": p for name, p in parameters.items() if id(p) not in tracked}
    return sums_of(risk.params | untracked)


def changed_parameters(before: Fingerprint, now: Fingerprint, tolerance: float) -> list[str]:
    """Keys of the parameters whose sums changed by more than `tolerance`, relative to their
    size.
    """
    changed = []
    for key, (total, norm) in before.items():
        room = 2 * tolerance * norm
        if key not in now or abs(now[key][0] - total) > room or abs(now[key][1] - norm) > room:
            changed.append(key)
    return changed


def require_replicas(risk: Any, over_data: bool, same: Callable[[], Mapping[str, Any]]) -> None:
    """Refuse processes that differ in parameters, losses, options, or `same`. Collective.

    Args:
        over_data: Whether the data are read now: then buffers are compared, too. Batches of
            training write to them.
    """
    kinds = {f"{key}, its dtype and shape": (p.dtype, p.shape) for key, p in risk.params.items()}
    facts: dict[str, Any] = kinds | fingerprint(risk)
    if over_data:
        facts |= sums_of(dict(risk.model.named_buffers()))
    for loss in risk.losses:
        function = loss.loss if loss.likelihood is None else loss.likelihood.options()
        facts[loss.title] = function, loss.weight, loss.reduction
    for name, option in vars(risk.options).items():
        if name not in ("check", "progressbar"):
            facts[f"{name}="] = option
    risk.processes.same(facts | dict(same()))
