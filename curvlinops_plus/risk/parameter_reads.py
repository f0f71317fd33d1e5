"""Which operations read a parameter in a forward pass, where autograd's graph does not tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.risk.autograd_graph import nodes_of, postorder
from curvlinops_plus.risk.modules import Places


class ParameterReads(TorchFunctionMode):
    """While active, counts for each parameter the torch functions that make a tensor from it.

    Looking at its shape or dtype does not count. Costs a few microseconds per function call.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self.counts = {id(p): 0 for p in params}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.counts and (found := self._among((*args, *kwargs.values()))):
            with torch._C.DisableTorchFunction():  # looking at the result is no call that other modes should see
                made = any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_leaves(out))
            for read in found if made else ():
                self.counts[read] += 1
        return out

    def _among(self, given: tuple[Any, ...]) -> set[int]:
        """The parameters among the arguments of a function, most of which are no containers."""
        found = {id(t) for t in given}
        if containers := [t for t in given if isinstance(t, (tuple, list, dict))]:
            found |= {id(t) for t in tree_leaves(containers)}
        return found & self.counts.keys()


class KeptParameters(ParameterReads):
    """While a model runs with other tensors in place of its parameters, notes which of its own ones it still reads.

    Args:
        own: The model's own parameters, by key.
        values: Their values, where others were given.
    """

    def __init__(self, own: Mapping[str, Tensor], values: Mapping[str, Tensor], places: Places) -> None:
        super().__init__(p for p in own.values() if not p.requires_grad)
        self._own = own
        given = [module._parameters[name] for module, names in places for name, _ in names]
        below = [getattr(node, "variable", None) for node, _ in postorder(nodes_of(t for t in given if t is not None))]
        self._given = {id(t) for t in (*given, *below)}
        self._differentiates = any(t is not None and t.requires_grad for t in given)
        # By memory: what an earlier pass left behind is another tensor, of the same numbers.
        self._memory = {p.data_ptr(): key for each in (own, values) for key, p in each.items() if p.numel()}

    def refuse(self, outputs: Iterable[Tensor]) -> None:
        """Refuse outputs that depend on them: that part would be missing in derivatives.

        Cost: a walk through the graph.
        """
        leaves = [getattr(node, "variable", None) for node, _ in postorder(nodes_of(outputs))]
        kept = {self._memory.get(t.data_ptr()) for t in leaves if t is not None and id(t) not in self._given}
        kept |= {key for key, p in self._own.items() if self.counts.get(id(p)) and id(p) not in self._given}
        names = [key for key in self._own if key in kept]
        if names and self._differentiates:
            raise UnsupportedError(
                f"The model reads the parameters {names[:5]}{' …' if len(names) > 5 else ''} from elsewhere than the "
                "attributes of its modules, such as a list or dict that keeps them. Derivatives are taken where "
                "parameters are replaced in the modules, so that part would be left out. Let forward read the "
                "attribute (self.weight), or keep several in an nn.ParameterList or nn.ParameterDict."
            )


def refuse_outside_reads(loss: Tensor, params: Mapping[str, Tensor]) -> None:
    """Refuse a loss that reads parameters by itself: they are replaced inside the model only.

    Args:
        params: The parameters in their own tensors, by key.

    Cost: a walk through the graph.
    """
    own = {id(p): key for key, p in params.items()}
    read = {own.get(id(getattr(node, "variable", None))) for node, _ in postorder([loss.grad_fn])} - {None}
    if read:
        names = [key for key in params if key in read]
        raise ValueError(
            f"The loss reads the parameters {names[:5]}{' …' if len(names) > 5 else ''} past the model (a penalty?). "
            "Derivatives are taken where the parameters are replaced inside the model, so that part would be left out. "
            "Let the loss read them from the model, as in `for p in model.parameters()`, or add the curvature of the "
            "penalty to the operator, as in `H + weight_decay * IdentityLinearOperator(...)`."
        )
