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
from torch.utils._pytree import tree_leaves, tree_unflatten

from curvlinops_plus.contexts import GradMode
from curvlinops_plus.errors import UnsupportedError
from curvlinops_plus.layer.registry import register_rule
from curvlinops_plus.layer.replay import Call
from curvlinops_plus.layer.rule import LayerRule

# What autograd saves per example and step, in multiples of the gates.
_SAVED_OF_GATES = 4


class RecurrentCall(Call):
    """A call of a recurrent layer, whose steps are repeated for all examples at once."""

    def all_at_once(
        self, g: Sequence[Tensor], vectors: slice, examples: slice
    ) -> dict[str, Tensor]:
        """Gradients of a chunk, `[V, B, *shape]`: the examples are repeated for each vector.

        Raises:
            KeyError: If a weight is computed from other parameters (weight normalization, pruning).
        """
        num_vectors = vectors.stop - vectors.start
        x, states, lengths = self._inputs()
        # [V·B, ...]: one batch holds all examples, once for each vector.
        x, *states = [
            t.expand(self.num_examples, *t.shape[1:])[examples].repeat(
                num_vectors, *[1] * (t.ndim - 1)
            )
            for t in (x, *states)
        ]
        products = _Products(self.params, bool(self.module.bias))
        with GradMode(True):
            if isinstance(self.module, nn.RNNCellBase):
                outputs = _run_cell(self.module, products, x, states)
            else:
                goes_on = None
                if lengths is not None:
                    steps = torch.arange(x.shape[1], device=x.device)
                    goes_on = (steps < lengths[examples, None]).repeat(num_vectors, 1)
                outputs = _run_layers(self.module, products, x, states, goes_on)
        J = products.grads(outputs, [t[vectors, examples].flatten(0, 1).to(x.dtype) for t in g])
        return {name: J[name].unflatten(0, (num_vectors, -1)) for name in self.params}

    def pairs_at_once(self, g: Sequence[Tensor], max_bytes: int) -> int:
        """How many pairs of a vector and an example are worked on at a time."""
        x = self._inputs()[0]
        gates = sum(p.shape[0] for p in self.params.values() if p.ndim == 2)
        num_steps = x[0].numel() // x.shape[-1]
        return max_bytes // max(1, _SAVED_OF_GATES * gates * num_steps * x.element_size())

    def _inputs(self) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """The sequences; the states, if some are given; and their lengths, if they were packed."""
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        named = {**dict(zip(("input", "hx", "lengths"), args)), **kwargs}
        states = [t for t in tree_leaves(named.get("hx")) if t is not None]
        return named["input"], states, named.get("lengths")


@register_rule(nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
class RecurrentRule(LayerRule):
    """`nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells with all options, but no dropout in training
    mode.

    Layers whose weights are computed from other parameters (weight normalization, pruning) are run
    again instead, one example at a time.

    Cost: a forward and a backward pass of the layer, step by step, for each vector and example (all
    in one batch).

    Example:
        >>> layer, x = nn.GRU(3, 2, batch_first=True), torch.ones(4, 5, 3)
        >>> g = [torch.ones(1, 4, 5, 2), torch.zeros(1, 4, 1, 2)]  # of sequence and last state
        >>> RecurrentRule().per_example_grads(layer, (x,), {}, g)["weight_hh_l0"].shape
        torch.Size([1, 4, 6, 2])
    """

    call_type = RecurrentCall

    def check(self, module: nn.Module) -> None:
        """Refuse dropout between layers, which draws random numbers.

        Raises:
            UnsupportedError: For dropout in training mode.
        """
        draws = getattr(module, "dropout", 0) and getattr(module, "num_layers", 1) > 1
        if module.training and draws:
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
        is_cell = isinstance(module, nn.RNNCellBase)
        expected = 2 if is_cell else 3
        sequence_axis = 0 if is_cell or module.batch_first else 1
        if leaves[0].ndim == expected - 1:
            raise UnsupportedError(
                f"{type(module).__name__} {'got' if inputs else 'returned'} shape "
                f"{list(leaves[0].shape)} without an example axis, expected {expected} dimensions. "
                f"Add it to the input, with `x.unsqueeze({sequence_axis})`."
            )
        state_axis = 0 if is_cell else 1
        return [sequence_axis, *[state_axis] * (len(leaves) - 1)]


class _Products:
    """All products `W a + b` of a pass through the recurrence, with their inputs."""

    def __init__(self, params: Mapping[str, Tensor], has_bias: bool) -> None:
        self.params = params
        self.has_bias = has_bias
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, name: str, a: Tensor) -> Tensor:  # [..., i] -> [..., o]
        """`weight_name a + bias_name`, or without the bias of a projection."""
        has_bias = self.has_bias and not name.startswith("hr")
        bias = self.params[f"bias_{name}"] if has_bias else None
        y = F.linear(a, self.params[f"weight_{name}"], bias)
        # The parameters do not require gradients: those summed over examples are not needed.
        if not y.requires_grad:
            y.requires_grad_()
        self.calls.setdefault(name, []).append((a.detach(), y))
        return y

    def grads(self, outputs: Sequence[Tensor], g: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients `[B, *shape]` of each example by one backward pass."""
        products = [y for calls in self.calls.values() for _, y in calls]
        deltas = iter(torch.autograd.grad(outputs, products, g, materialize_grads=True))
        gradients: dict[str, Tensor] = {}
        for name, calls in self.calls.items():
            # All steps together: [B, T, i] and [B, T, o].
            a = torch.stack([a for a, _ in calls], 1).flatten(1, -2)
            delta = torch.stack([next(deltas) for _ in calls], 1).flatten(1, -2)
            # Σ_t δ_t a_tᵀ and Σ_t δ_t
            gradients[f"weight_{name}"] = delta.mT @ a
            gradients[f"bias_{name}"] = delta.sum(1)
        return gradients


def _run_layers(
    module: Any,
    products: _Products,
    x: Tensor,
    states: Sequence[Tensor],
    goes_on: Tensor | None,
) -> list[Tensor]:
    """Outputs of the layer for sequences [B, T, i] and states [B, layers, h]: sequence, and
    states after it.

    Args:
        goes_on: Which sequences have which steps, [B, T] bool; None for all.
    """
    suffixes = ("", "_reverse") if module.bidirectional else ("",)
    final_states: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        sequences = []
        for suffix in suffixes:
            state = _initial_state(module, x, [s[:, len(final_states)] for s in states])
            steps = x.flip(1) if suffix else x
            exist = goes_on.flip(1) if suffix and goes_on is not None else goes_on
            out, state = _sequence(module, products, steps, state, f"_l{layer}{suffix}", exist)
            sequences.append(out.flip(1) if suffix else out)
            final_states.append(state)
        x = torch.cat(sequences, -1)
    return [x, *[torch.stack(states, 1) for states in zip(*final_states, strict=True)]]


def _run_cell(
    module: Any, products: _Products, x: Tensor, states: Sequence[Tensor]
) -> list[Tensor]:
    """The state after one step."""
    return [*_step(module, products, products("ih", x), _initial_state(module, x, states), "")]


def _initial_state(module: nn.Module, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """State before the first step, zero by default: (h, c) of an LSTM, else (h,)."""
    if states:
        return tuple(states)
    assert isinstance(module, (nn.RNNBase, nn.RNNCellBase))
    h = x.new_zeros(len(x), getattr(module, "proj_size", 0) or module.hidden_size)
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return h, x.new_zeros(len(x), module.hidden_size)
    return (h,)


def _sequence(
    module: nn.Module,
    products: _Products,
    x: Tensor,
    state: tuple[Tensor, ...],
    name: str,
    goes_on: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: outputs [B, T, h] and the state after the last step that
    exists.
    """
    outputs = []
    for t, contribution in enumerate(products(f"ih{name}", x).unbind(1)):
        after = _step(module, products, contribution, state, name)
        if goes_on is None:
            state = after
        else:
            exists = goes_on[:, t, None]
            state = tuple(torch.where(exists, new, old) for new, old in zip(after, state))
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def _step(
    module: nn.Module,
    products: _Products,
    contribution: Tensor,
    state: tuple[Tensor, ...],
    name: str,
) -> tuple[Tensor, ...]:
    """State after one step, from the contribution of the input to the gates in PyTorch's order."""
    h = state[0]
    past = products(f"hh{name}", h)
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        i, f, g, o = (contribution + past).chunk(4, -1)
        # c' = σ(f) c + σ(i) tanh(g), h' = σ(o) tanh(c')
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        if getattr(module, "proj_size", 0):
            h = products(f"hr{name}", h)
        return h, c
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        r, z, n = contribution.chunk(3, -1)
        r_past, z_past, n_past = past.chunk(3, -1)
        # h' = (1 - z) n + z h: the reset gate r acts on the past's contribution to n.
        z = (z + z_past).sigmoid()
        n = (n + (r + r_past).sigmoid() * n_past).tanh()
        return ((1 - z) * n + z * h,)
    assert isinstance(module, (nn.RNN, nn.RNNCell))
    gates = contribution + past
    return (gates.tanh() if module.nonlinearity == "tanh" else gates.relu(),)
