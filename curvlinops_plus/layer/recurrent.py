"""Rules of recurrent layers: per-example gradients from one pass through the steps, for all
examples at once.

The weights of a recurrent layer enter through products `W a + b` at every step. With the gradients
`δ_t` of all these products, `Σ_t δ_t a_tᵀ` are the gradients of each example: one forward and one
backward pass through the unfused recurrence give them for all examples. (Running the fused layer
again for each example would, too, but `vmap` supports none of these layers.)

The steps of a sequence depend on each other, so that there are no Kronecker factors: the blocks are
the exact diagonal or the full block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.registry import register_rule
from curvlinops_plus.layer.replay import in_chunks, why_computed
from curvlinops_plus.layer.rule import LayerRule
from curvlinops_plus.linalg.numerics import at_least_float32

# Work memory per example and step, in multiples of the gates, for tensors that autograd saves.
_ACTIVATIONS = 4


class _Products:
    """All products `W a + b` of a pass through the recurrence, with their inputs."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = params
        self.calls: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, a: Tensor, weight: str, bias: str = "") -> Tensor:  # [..., i] -> [..., o]
        y = F.linear(a, self.params[weight], self.params.get(bias))
        if not y.requires_grad:  # the parameters do not: their summed gradients are not needed
            y.requires_grad_()
        self.calls.setdefault((weight, bias), []).append((a.detach(), y))
        return y

    def grads(
        self, outputs: Sequence[Tensor], g: Sequence[Tensor]
    ) -> dict[str, Tensor]:  # -> {name: [B, *shape]}
        """Gradients of each example by one backward pass."""
        products = [y for calls in self.calls.values() for _, y in calls]
        at = iter(torch.autograd.grad(outputs, products, g, materialize_grads=True))
        found: dict[str, Tensor] = {}
        for (weight, bias), calls in self.calls.items():
            a = torch.stack([a for a, _ in calls], 1).flatten(
                1, -2
            )  # all steps together: [B, T, i]
            delta = torch.stack([next(at) for _ in calls], 1).flatten(1, -2)
            found[weight] = delta.mT @ a
            if bias in self.params:
                found[bias] = delta.sum(1)
        return found


class RecurrentRule(LayerRule):
    """`nn.RNN`, `nn.LSTM` and `nn.GRU` with all their options, but no dropout in training mode.

    Cost: a forward and a backward pass of the layer, step by step, for each vector and example (all
    in one batch).

    Example:
        >>> layer, x = nn.GRU(3, 2, batch_first=True), torch.ones(4, 5, 3)
        >>> g = [torch.ones(1, 4, 5, 2), torch.zeros(1, 4, 1, 2)]  # of the sequence, and of the last state
        >>> RecurrentRule().per_example_grads(layer, (x,), {}, g)["weight_hh_l0"].shape
        torch.Size([1, 4, 6, 2])
    """

    def check(self, module: nn.Module) -> None:
        """Refuse dropout between layers, which draws random numbers.

        Raises:
            UnsupportedError: For dropout in training mode.
        """
        super().check(module)
        if (
            module.training
            and getattr(module, "dropout", 0)
            and getattr(module, "num_layers", 1) != 1
        ):
            raise UnsupportedError(
                f"{type(module).__name__}(dropout={module.dropout}) in training mode draws random "
                "numbers, so that its gradients are those of one draw. For the curvature of the "
                "model call `model.eval()`; in a training loop set this dropout to 0, or leave the "
                "layer's parameters to another optimizer (`params=`)."
            )

    def axes(
        self, module: nn.Module, axis: int, leaves: Sequence[Tensor], inputs: bool
    ) -> list[int]:
        """Sequences have the examples on the axis that `batch_first` sets, states on axis 1; of
        cells all have them first.

        Raises:
            UnsupportedError: If the input is one sequence without an example axis.
        """
        cell = isinstance(module, nn.RNNCellBase)
        if leaves[0].ndim == 2 - cell:
            raise UnsupportedError(
                f"{type(module).__name__} {'got' if inputs else 'returned'} shape "
                f"{list(leaves[0].shape)} without an example axis, expected {3 - cell} dimensions. "
                "Add it to the input, with "
                f"`x.unsqueeze({0 if cell or module.batch_first else 1})`."
            )
        return [0 if cell or module.batch_first else 1, *[0 if cell else 1] * (len(leaves) - 1)]

    def replay(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        g: Tensor | Sequence[Tensor],
        in_axes: Sequence[int | None] | None = None,
        out_axes: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Gradients of each example by repeating the steps of the layer, for all examples at once.

        Layers whose weights are computed from other parameters (weight normalization, pruning) are
        run again instead, one example at a time.
        """
        g = [g] if isinstance(g, Tensor) else list(g)
        named = {**dict(zip(("input", "hx"), args)), **kwargs}
        if why_computed(module, self._weights(module)):
            tensors = [t for t in tree_leaves((tuple(args), dict(kwargs))) if isinstance(t, Tensor)]
            in_axes = in_axes or self.axes(module, 0, tensors, inputs=True)
            return super().replay(
                module, args, kwargs, g, in_axes, out_axes or self.axes(module, 0, g, inputs=False)
            )
        given = tree_leaves((named["input"], named.get("hx")))
        B = g[0].shape[1]
        x, *states = [
            at_least_float32(t.detach()).expand(B, *t.shape[1:])
            for t in given
            if isinstance(t, Tensor)
        ]
        params = {
            name: at_least_float32(p.detach()) for name, p in module.named_parameters(recurse=False)
        }

        def chunk(g: Sequence[Tensor], vectors: slice, examples: slice) -> dict[str, Tensor]:
            """All vectors at once: the examples are repeated for each."""
            V = len(g[0][vectors])
            given = [t[examples].repeat(V, *[1] * (t.ndim - 1)) for t in (x, *states)]
            with torch.enable_grad():
                products = _Products(params)
                outputs = self._run(module, products, given[0], given[1:])
            J = products.grads(outputs, [t[vectors, examples].flatten(0, 1).to(x.dtype) for t in g])
            return {name: J[name].unflatten(0, (V, -1)) for name in params}

        V, gates = len(g[0]), sum(p.shape[0] for p in params.values() if p.ndim == 2)
        rows = self.max_bytes // max(
            1, _ACTIVATIONS * gates * (x[0].numel() // x.shape[-1]) * x.element_size()
        )
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return in_chunks(chunk, g, (min(V, max(1, rows)), min(B, max(1, rows // max(1, V)))))

    def _weights(self, module: nn.Module) -> Sequence[str]:
        """Names of weights and biases."""
        assert isinstance(module, nn.RNNBase)
        return module._flat_weights_names

    def _run(
        self, module: nn.Module, products: _Products, x: Tensor, states: Sequence[Tensor]
    ) -> list[Tensor]:
        """Outputs of the layer for sequences [B, T, i] and states [B, layers, h]: sequence, and
        states after it.
        """
        assert isinstance(module, nn.RNNBase)
        directions = 2 if module.bidirectional else 1
        last: list[tuple[Tensor, ...]] = []
        for layer in range(module.num_layers):
            sequences = []
            for reverse in range(directions):
                name = f"_l{layer}" + "_reverse" * reverse
                state = _states(module, x, [s[:, len(last)] for s in states])
                out, state = _sequence(module, products, x.flip(1) if reverse else x, state, name)
                sequences.append(out.flip(1) if reverse else out)
                last.append(state)
            x = torch.cat(sequences, -1)
        return [x, *(torch.stack(states, 1) for states in zip(*last))]


class CellRule(RecurrentRule):
    """`nn.RNNCell`, `nn.LSTMCell` and `nn.GRUCell`: one step, all tensors with the examples
    first.
    """

    def _weights(self, module: nn.Module) -> Sequence[str]:
        return ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

    def _run(
        self, module: nn.Module, products: _Products, x: Tensor, states: Sequence[Tensor]
    ) -> list[Tensor]:
        given = products(x, "weight_ih", "bias_ih")
        return [*_step(module, products, given, _states(module, x, states), "")]


register_rule(nn.RNN, nn.LSTM, nn.GRU)(RecurrentRule)
register_rule(nn.RNNCell, nn.LSTMCell, nn.GRUCell)(CellRule)


def _states(module: nn.Module, x: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """State before the first step, zero by default: (h, c) of an LSTM, else (h,)."""
    if given:
        return tuple(given)
    assert isinstance(module, (nn.RNNBase, nn.RNNCellBase))
    h = x.new_zeros(len(x), getattr(module, "proj_size", 0) or module.hidden_size)
    return (
        (h, x.new_zeros(len(x), module.hidden_size))
        if isinstance(module, (nn.LSTM, nn.LSTMCell))
        else (h,)
    )


def _sequence(
    module: nn.Module, products: _Products, x: Tensor, state: tuple[Tensor, ...], name: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: outputs [B, T, h] and the state after the last step."""
    steps = []
    for given in products(x, f"weight_ih{name}", f"bias_ih{name}").unbind(1):
        state = _step(module, products, given, state, name)
        steps.append(state[0])
    return torch.stack(steps, 1), state


def _step(
    module: nn.Module, products: _Products, given: Tensor, state: tuple[Tensor, ...], name: str
) -> tuple[Tensor, ...]:
    """State after one step; `given` is the contribution of the input to the gates, in PyTorch's
    order.
    """
    h = state[0]
    past = products(h, f"weight_hh{name}", f"bias_hh{name}")
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        i, f, g, o = (given + past).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (products(h, f"weight_hr{name}") if f"weight_hr{name}" in products.params else h), c
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        (r, z, n), (r_past, z_past, n_past) = given.chunk(3, -1), past.chunk(3, -1)
        z = (z + z_past).sigmoid()
        n = (n + (r + r_past).sigmoid() * n_past).tanh()
        return ((1 - z) * n + z * h,)
    assert isinstance(module, (nn.RNN, nn.RNNCell))
    return (
        torch.tanh(given + past) if module.nonlinearity == "tanh" else torch.relu(given + past),
    )
