"""Walking through autograd's graph of a forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from curvlinops_plus.errors import NumericsError, UnsupportedError

REENTRANT = (
    "The model uses activation checkpointing with use_reentrant=True, which hides parameters from derivatives other "
    "than loss.backward(). Pass use_reentrant=False to torch.utils.checkpoint (Hugging Face: "
    "gradient_checkpointing_kwargs={'use_reentrant': False})."
)


def nodes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The node of the graph that made each tensor, None for leaves; modes that watch a model's calls don't see it."""
    with torch._C.DisableTorchFunction():
        return [t.grad_fn for t in tensors]


def postorder(roots: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Every node below some roots once, with its children towards the inputs, each after all of them.

    Args:
        roots: Nodes, as `tensor.grad_fn` gives them; None is skipped.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> [type(node).__name__ for node, _ in postorder([(2 * x).sum().grad_fn])]
        ['AccumulateGrad', 'MulBackward0', 'SumBackward0']
    """
    below: dict[Any, list[Any]] = {}
    stack = [(root, False) for root in roots if root is not None]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node, below[node]
        elif node not in below:
            children = below[node] = [child for child, _ in node.next_functions if child is not None]
            if not children:
                yield node, children
                continue
            stack.append((node, True))
            stack += [(child, False) for child in children if child not in below]


def kinds_of_nodes(output: Tensor) -> frozenset[type]:
    """What kinds of nodes a graph has, faster than by `postorder`."""
    found: set[Any] = {output.grad_fn} - {None}
    left = [*found]
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                left.append(node)
    return frozenset(map(type, found))


def edge_of(t: Tensor) -> GradientEdge:
    """Where a tensor is in its graph, which stays alive without the tensor, in all versions of PyTorch."""
    if isinstance(t.grad_fn, torch._C._FunctionBase):  # what is written in Python does not keep its graph
        with torch.enable_grad():
            t = t.view_as(t)
    return get_gradient_edge(t)


def gradients_of(
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    vectors: Sequence[Tensor],
    retain_graph: bool,
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad(outputs, inputs, vectors, allow_unused=True)`, without its comparison of symbolic shapes.

    To compare shapes, that function loads SymPy, a third of a second in the first call of a process, and takes as long
    in each as a layer of a small network. And it hides modes that watch functions from parts of the model that run
    again in the backward pass.

    Args:
        inputs: Tensors, or edges of the graph.
        vectors: One for each output, of its shape.
        retain_graph: Whether somebody goes back through the graph once more.
        create_graph: Whether what comes out is differentiated.
    """
    return _engine_run_backward(
        tuple(outputs), tuple(vectors), retain_graph, create_graph, tuple(inputs), True, accumulate_grad=False
    )


def prepare_graph(outputs: Sequence[Tensor], num_examples: int) -> bool:
    """Let every batch norm in a graph get gradients whose strides PyTorch reads right; refuse graphs with gaps.

    Where the batch or all of an axis of the image has length one, strides don't tell whether a tensor is contiguous or
    channels-last. The CPU kernel of the backward pass takes input and gradient to be alike then, and mixes channels up
    if they are not: with a loss on `[1, C, H, W]`, for instance. Instance norm calls it with a batch of one.

    Returns:
        Whether there is any batch norm.

    Raises:
        UnsupportedError: If there is reentrant activation checkpointing, which leaves out parameters.

    Cost: a walk through the graph.
    """
    found = False
    for node, _ in postorder(nodes_of(outputs)):
        name = node.name()
        if "BatchNorm" in name:
            node.register_prehook(partial(_copy_ambiguous, num_examples))
            found = True
        elif name == "CheckpointFunctionBackward":
            raise UnsupportedError(REENTRANT)
    return found


def raise_unreached() -> NoReturn:
    """The error if derivatives of a model don't reach any parameter."""
    raise UnsupportedError(
        "The output of the model does not depend on any of the parameters in a way that can be differentiated. Does it "
        "run under torch.no_grad(), detach its output, or call torch.autograd.grad without create_graph=True?"
    )


def _copy_ambiguous(N: int, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    g = grads[0]
    # Of several examples, instance norm makes one of more channels, which is contiguous.
    if g is not None and g.shape[0] == 1 < N and g.is_contiguous():
        return grads
    # Every other number of a tensor of twice the size: contiguous in no way, which the kernel reads by its strides.
    if g is None or g.device.type != "cpu" or 1 not in (g.shape[0], *g.shape[2:]):
        return grads
    return (torch.stack((g, g), -1)[..., 0], *grads[1:])


_START = 6  # a vector's largest number is brought to 2 ** _START: below it is more room than above
_HIGH = 14  # the largest number that arrives anywhere should be below 2 ** _HIGH,
_LOW = -4  # and the largest of each layer above 2 ** _LOW, so that numbers of a thousandth keep their digits
_DOWN = 10  # after an overflow
_ROUGH = -17  # the largest of a layer has fewer digits than in bfloat16 below 2 ** _ROUGH


class Arrived(NamedTuple):
    """What vectors leave behind.

    Attributes:
        gradients: What arrived.
        power: The power of two that it is multiplied with.
        rough: Where so little arrived, beside other places, that float16 holds few of its digits.
    """

    gradients: list[Tensor | None]
    power: float = 1.0
    rough: Sequence[int] = ()

    def take(self, at: int) -> Tensor | None:
        """What arrived at one place, divided by the power; it is not kept here any more."""
        g, self.gradients[at] = self.gradients[at], None
        return g if g is None or self.power == 1 else g.to(torch.promote_types(g.dtype, torch.float32)) / self.power


def is_narrow(places: Iterable[Any]) -> bool:
    """Whether one of the tensors, or of the places for them, is in float16."""
    return any(place.dtype == torch.float16 for place in places)


def narrowest(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a vector for an output of this dtype is made: it is rounded after it was multiplied."""
    return torch.float32 if dtype == torch.float16 else dtype


def columns_in_range(X: Tensor, narrow: bool, product: Callable[[Tensor], Tensor]) -> Tensor:
    """A linear function of columns [n, K], each times a power of two that brings its largest number to about 1.

    Args:
        narrow: Whether they go through float16; else they are left as they are.
    """
    if not narrow:
        return product(X)
    power = torch.exp2(torch.frexp(X.detach().abs().amax(0))[1].clamp(-100, 100).to(X.dtype))
    return product(X / power) * power


def require_in_range(found: Tensor, narrow: bool, given: Tensor | None = None) -> Tensor:
    """A result, unless it left the range of float16 on its way: the true one may be finite.

    Args:
        narrow: Whether it went through float16.
        given: What it is the result of; what is not finite itself stays so.

    Raises:
        NumericsError: If it is not finite.
    """
    if narrow and not bool(found.isfinite().all()) and (given is None or bool(given.isfinite().all())):
        raise NumericsError(
            "A product has NaN or infinite entries: something on its way through the model leaves the range of "
            "float16, whose largest number is 65504, or the model's own outputs are not finite. Compute it with "
            "model.float() or model.bfloat16(), or with a loss that is divided by more."
        )
    return found


def below_range(gradients: Iterable[Tensor]) -> bool:
    """Whether float16 gradients that somebody else sent are so small that they have lost digits."""
    narrow = [g.abs().amax() for g in gradients if g.dtype == torch.float16 and g.numel()]
    return bool(narrow) and float(torch.stack(narrow).min()) < 2.0**_LOW


def send_in_range(
    send: Callable[[Sequence[Tensor]], Iterable[Tensor | None]],
    outputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    narrow: bool,
) -> Arrived:
    """Send vectors back.

    Args:
        send: Called with vectors in the outputs' dtypes; returns what arrives. May be called again.
        outputs: Where they are sent from.
        vectors: One for each output, `[*lead, *output]`.
        narrow: Whether there is float16 on their way; else they are sent as they are.

    Cost: a pass, and further ones after an overflow, or if it brought numbers that are too small.
    """
    largest = max(_sizes(vectors).values(), default=0.0) if narrow else 0.0
    if not 0 < largest < math.inf:
        return Arrived([*send([v.to(f.dtype) for v, f in zip(vectors, outputs, strict=True)])])

    def sent(exponent: int) -> tuple[list[Tensor | None], dict[int, float]]:
        found = [*send([(v * 2.0**exponent).to(f.dtype) for v, f in zip(vectors, outputs, strict=True)])]
        return found, _sizes(found)

    exponent = _START - _exponent(largest)
    found, sizes = sent(exponent)
    for _ in range(4):
        if all(map(math.isfinite, sizes.values())):
            break
        exponent -= _DOWN
        found, sizes = sent(exponent)
    else:  # it is not finite, whatever it is multiplied with
        return Arrived(found, 2.0**exponent)
    least, most = (f(sizes.values(), default=1.0) for f in (min, max))
    if least < 2.0**_LOW and (room := _HIGH - _exponent(most)) > 0:
        more = min(room, _LOW - _exponent(least)) if least else room  # zeros may be numbers that were too small
        again, larger = sent(exponent + more)
        if all(map(math.isfinite, larger.values())):
            found, sizes, exponent = again, larger, exponent + more
    return Arrived(found, 2.0**exponent, [at for at, size in sizes.items() if 0 < size < 2.0**_ROUGH])


def _exponent(size: float) -> int:
    return math.frexp(size)[1]


def _sizes(tensors: Iterable[Tensor | None]) -> dict[int, float]:
    """The largest number of each tensor, by its position."""
    found = {at: t.detach().abs().amax().float() for at, t in enumerate(tensors) if t is not None and t.numel()}
    return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}
