"""Walking through autograd's graph of a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from curvlinops_plus.errors import UnsupportedError

REENTRANT = (
    "The model uses activation checkpointing with use_reentrant=True, which hides parameters from derivatives other "
    "than loss.backward(). Pass use_reentrant=False to torch.utils.checkpoint (Hugging Face: "
    "gradient_checkpointing_kwargs={'use_reentrant': False})."
)


def nodes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The node of the graph that made each tensor, None for leaves; modes that watch a model's calls don't see it."""
    with torch._C.DisableTorchFunction():
        return [t.grad_fn for t in tensors]


def postorder(roots: Iterable[Any]) -> dict[Any, list[Any]]:
    """Every node below some roots with its children towards the inputs, each after all of them.

    Args:
        roots: Nodes, as `tensor.grad_fn` gives them; None is skipped.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> [type(node).__name__ for node in postorder([(2 * x).sum().grad_fn])]
        ['AccumulateGrad', 'MulBackward0', 'SumBackward0']
    """
    below: dict[Any, list[Any]] = {}
    found: dict[Any, list[Any]] = {}
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack[-1]
        if node in below:  # what is below it has been found
            stack.pop()
            found.setdefault(node, below[node])
            continue
        children = below[node] = []
        for child, _ in node.next_functions:
            if child is not None:
                children.append(child)
                if child not in below:
                    stack.append(child)
    return found


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
    for node in postorder(nodes_of(outputs)):
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


def refuse_outside_reads(reader: str, tensors: Iterable[Tensor], params: Mapping[str, Tensor]) -> None:
    """Refuse a model or loss that reads trainable parameters past the modules, where other values stand for them.

    Args:
        reader: Which of the two.
        tensors: What it returned.
        params: The parameters in their own tensors, by key.

    Cost: a walk through the graph.
    """
    own = {id(p): key for key, p in params.items()}
    if read := {own.get(id(getattr(node, "variable", None))) for node in postorder(nodes_of(tensors))} - {None}:
        names = [key for key in params if key in read]
        raise UnsupportedError(
            f"The {reader} reads the parameters {names[:5]}{' …' if len(names) > 5 else ''} from elsewhere than the "
            "attributes of modules, such as a list that keeps them, or a penalty in the loss. Derivatives are taken "
            "where parameters are replaced in the modules, so that part would be left out. Let forward read the "
            "attribute (self.weight), keep several in an nn.ParameterList, and add the curvature of a penalty to the "
            "operator, as in `H + weight_decay * IdentityLinearOperator(...)`."
        )
