"""Forms in which losses read what a model has returned: the same numbers in another shape or dtype,
or with axes in another order.

Training loops write `output.squeeze(-1)`, `output.view(-1, C)`, `output.transpose(1, 2)` or
`output.float()` between a model and its loss. A form is read off the graph between both tensors. It
says nothing of the number of examples, so it changes what the model returns for a part of a batch
in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Nodes of functions that leave row-major order as it is, if they leave out no number.
_IN_ORDER = {
    "AliasBackward0",
    "CloneBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "ToCopyBackward0",
    "UnbindBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
    *(f"SqueezeBackward{k}" for k in range(5)),
}


class Change(NamedTuple):
    """One step of a form: axes are permuted, then the shape is `[-1, *sizes]`, then the dtype
    changes.

    Attributes:
        axes: Of the input, in the new order; the first one stays.
    """

    axes: Sequence[int]
    sizes: Sequence[int]
    dtype: torch.dtype


OutputForm = tuple[Change, ...]


def in_form(output: Tensor, form: OutputForm) -> Tensor:
    """An output in a form, with its graph.

    Example:
        >>> output = torch.arange(6.0).view(2, 3, 1)
        >>> in_form(output, (Change((0, 2, 1), (3,), torch.float64),)).shape
        torch.Size([2, 3])
    """
    for axes, sizes, dtype in form:
        output = output.permute(*axes).reshape(-1, *sizes).to(dtype)
    return output


def form_of(f: Tensor, output: Tensor, num_examples: int) -> OutputForm | None:
    """The form in which `f` has the numbers of an output; None if it is not made of it like that.

    Args:
        num_examples: N. The first axis of each shape on the way is a multiple of it, as that of the
            output is.

    Example:
        >>> x = torch.ones(4, 3, 1, requires_grad=True)
        >>> output = 2 * x
        >>> form_of(output[..., 0], output, 4)
        (Change(axes=(0, 1, 2), sizes=(3,), dtype=torch.float32),)
        >>> form_of(output, output, 4), form_of(output + 1, output, 4)
        ((), None)
    """
    if f is output:
        return ()
    nodes = _nodes_between(f, output)
    if not nodes or f.numel() != output.numel():
        return None
    changes = []
    shape = tuple(output.shape)
    for node in nodes:
        axes = _axes_after(node, len(shape))
        made = node._input_metadata[0]
        shape = tuple(made.shape)
        starts_with_examples = shape and num_examples and shape[0] % num_examples == 0
        if axes[:1] != (0,) or not (starts_with_examples or num_examples == 1):
            return None
        changes.append(Change(axes, shape[1:], made.dtype))
    return tuple(changes)


def _nodes_between(f: Tensor, output: Tensor) -> list[Any]:
    """The nodes that have made `f` of an output, the first one first; none if others than those of
    forms have.
    """
    nodes: list[Any] = []
    node = f.grad_fn
    number = f.output_nr
    # Nodes may have several outputs.
    while node is not None and (node, number) != (output.grad_fn, output.output_nr):
        kind = node.name()
        if kind not in _IN_ORDER and kind not in ("PermuteBackward0", "TransposeBackward0"):
            return []
        nodes.append(node)
        node, number = node.next_functions[0]
    return nodes[::-1] if node is not None else []


def _axes_after(node: Any, ndim: int) -> tuple[int, ...]:
    """The axes of a tensor with `ndim` of them in the order in which a node has them."""

    def axis(saved: int) -> int:  # negative ones are saved as numbers without sign
        return (saved - 2**64 if saved >= 2**63 else saved) % ndim

    axes = [*range(ndim)]
    if node.name() == "PermuteBackward0":
        axes = [axis(saved) for saved in node._saved_dims]
    elif node.name() == "TransposeBackward0":
        one = axis(node._saved_dim0)
        two = axis(node._saved_dim1)
        axes[one], axes[two] = two, one
    return tuple(axes)
